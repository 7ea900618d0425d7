"""Giorlandino and Goldt's theory of a stack: infinite width and length, attention frozen or not.

Between a stack whose tokens become one (rank collapse) and one whose attention picks single keys
(entropy collapse, `RandomEnergy.frozen`). Their recursion for the variance q and the covariance p
of tokens, with the scales, gains and activations of a declared model; what it leaves out is of the
order of 1/width and 1/log(length), which `moments.predict` has.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from moments.errors import domain_error
from moments.formulas.activation import activation_laws
from moments.formulas.checks import POSITIVE, Interval, check_interval
from moments.model.transformer import Transformer

from ..formulas.random_energy import RANDOM_ENERGY
from .results import Result


@dataclass(frozen=True)
class RandomEnergy(Result):
    """Tokens along the depth in that limit.

    Attributes:
        model: what was asked.
        variance, correlation: of the stream, (N + 1,).
        logit_variance: of every attention's rows, (N,).
        participation: sum of squared attention weights, (N,): 0 where attention is spread out.
    """

    model: Transformer
    variance: np.ndarray
    correlation: np.ndarray
    logit_variance: np.ndarray
    participation: np.ndarray

    @property
    def critical_logit_variance(self) -> float:
        """2 log n: beyond it attention freezes on few keys."""
        law = RANDOM_ENERGY.law("critical_logit_variance")
        return float(law.of({"seq_len": float(self.model.seq_len)}))

    @property
    def frozen(self) -> np.ndarray:
        """Which attentions are beyond the transition, (N,): entropy collapse."""
        return self.logit_variance > self.critical_logit_variance

    @property
    def heading(self) -> str:
        frozen = int(self.frozen.sum())
        return (
            f"infinite width and length: correlation {self.correlation[0]:.3g} to "
            f"{self.correlation[-1]:.3g}; attention frozen in {frozen} of {len(self.frozen)} layers"
        )

    def _table(self) -> dict[str, np.ndarray]:
        return {
            "layer": np.arange(len(self.variance)),
            "variance": self.variance,
            "correlation": self.correlation,
            "logit variance": np.append(np.nan, self.logit_variance),
            "participation": np.append(np.nan, self.participation),
        }


def random_energy(
    model: Transformer, variance: float = 1.0, correlation: float = 0.0
) -> RandomEnergy:
    """The recursion along a stack.

    Args:
        model: Pre-LN, Post-LN or without norms, full attention, no dropout.
        variance, correlation: of the tensor that enters layer 1.

    Raises:
        DomainError: something that the theory does not have.
    """
    _check(model)
    check_interval("variance", variance, POSITIVE)
    check_interval("correlation", correlation, Interval(0.0, 1.0))
    laws = activation_laws(model.activation)
    skips, branches = model.by_block("skip_scale") ** 2, model.by_block("branch_scale") ** 2
    gains = model.norm_gains**2
    q, p = variance, variance * correlation
    found, thetas, shares = [(q, p)], [], []
    for n in range(model.layers):
        weights = model.layer_weights(n + 1)
        for block, name in enumerate(("attention", "ffn")):
            size = q if model.norm == "none" else gains[n, block]
            entering = (size, size * p / q) if model.norm in ("pre", "none") else (q, p)
            if name == "attention":
                scale = model.d_model**2 * weights.query * weights.key / model.temperatures[n] ** 2
                added, theta, share = _attention(model, entering, scale)
                thetas.append(theta)
                shares.append(share)
                gain = model.d_model * weights.value * model.heads * (model.d_head or 0)
                gain *= weights.output
            else:
                added = _activated(laws, model.d_model * weights.ffn_in, entering)
                gain = (model.d_ff or 0) * weights.ffn_out
            q = skips[n, block] * q + branches[n, block] * gain * added[0]
            p = skips[n, block] * p + branches[n, block] * gain * added[1]
            if model.norm == "post":
                q, p = gains[n, block], gains[n, block] * p / q
        found.append((q, p))
    variances, covariances = np.array(found).T
    return RandomEnergy(
        model, variances, covariances / variances, np.array(thetas), np.array(shares)
    )


def _attention(
    model: Transformer, entering: tuple[float, float], scale: float
) -> tuple[tuple[float, float], float, float]:
    """Variance and covariance of averaged tokens, logit variance and participation."""
    q, p = entering
    values = {
        "x_variance": q,
        "x_correlation": min(p / q, 1.0),
        "logit_scale": scale * q * q,
        "seq_len": float(model.seq_len),
        "row_square": 0.0,
    }
    theta = float(values["logit_scale"] * (1 - values["x_correlation"]))
    laws = {name: RANDOM_ENERGY.law(name) for name in ("variance", "covariance", "row_square")}
    if theta > RANDOM_ENERGY.law("critical_logit_variance").of(values):
        values["row_square"] = float(laws["row_square"].of(values))
    both = float(laws["variance"].of(values)), float(laws["covariance"].of(values))
    return both, theta, values["row_square"]


def _activated(laws: Any, gain: float, entering: tuple[float, float]) -> tuple[float, float]:
    """Second moments, about zero, of a hidden layer's activations."""
    variance = gain * entering[0]
    values = {
        "x_variance": variance,
        "x_other_variance": variance,
        "x_mean": 0.0,
        "x_other_mean": 0.0,
        "x_correlation": min(entering[1] / entering[0], 1.0),
    }
    square = float(laws.law("mean").of(values)) ** 2
    own, pairs = (float(laws.law(name).of(values)) for name in ("variance", "covariance"))
    return own + square, pairs + square


_SIZES = ("layers", "d_model", "heads", "d_head", "kv_heads", "seq_len", "d_ff", "weights")
_NORMS = ("norm", "normalization", "norm_affine", "norm_bias", "norm_gain", "norm_epsilon")
_REST = ("activation", "temperature", "skip_scale", "branch_scale", "embedding", "head")
COVERED = (*_SIZES, *_NORMS, *_REST)
"""Fields of a Transformer that the theory reads, or that make no difference in its limit."""


def _check(model: Transformer) -> None:
    if model.norm not in ("pre", "post", "none"):
        raise domain_error("norm", model.norm, "'pre', 'post' or 'none' in this theory")
    plain = Transformer(1, model.d_model, model.heads, 2, d_head=model.d_head)
    for f in dataclasses.fields(model):
        value = getattr(model, f.name)
        if f.compare and f.name not in COVERED and value != getattr(plain, f.name):
            raise domain_error(f.name, value, "absent in this theory")
