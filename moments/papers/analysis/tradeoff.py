"""Sensitivity (Davis et al. 2021) and what it costs in stability, over k and alpha."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...formulas.checks import check_in
from ...formulas.kedia_chain import DSLM_CHAIN
from ...formulas.law import Theory
from ...formulas.symbols import Interval
from ...model.transformer import Transformer
from ...prediction.result import Prediction
from .alike import predict_alike
from .blocks import blocks
from .results import Result


def block_sensitivity(prediction: Prediction) -> np.ndarray:
    """N sigma_block^2 / sigma_skip^2 of every attention and feed-forward block, shape (N, 2).

    Source: Davis et al. 2021 in the form of Kedia et al. 4.6. Variances as they are added, scales
    included, averaged over tokens and configurations.
    """
    model = prediction.model
    added = [b.total / (b.skip_square * b.entering) - 1 for b in blocks(prediction)]
    return np.asarray(model.layers * np.reshape(added, (model.layers, 2)))


@dataclass(frozen=True)
class Sensitivity(Result):
    """Sensitivity of a model, block by block.

    Attributes:
        prediction: it was read from.
        blocks: of every layer's attention and feed-forward block, (N, 2).
        closed: N beta^2, what unit blocks on a unit stream give; of layer 1's scale.
    """

    prediction: Prediction
    blocks: np.ndarray
    closed: float

    @property
    def mean(self) -> float:
        """Davis et al.'s average."""
        return float(np.mean(self.blocks))

    @property
    def median(self) -> float:
        """The average that first blocks do not dominate."""
        return float(np.median(self.blocks))

    @property
    def heading(self) -> str:
        return (
            f"sensitivity: mean {self.mean:.4g}, median {self.median:.4g}, "
            f"N beta^2 = {self.closed:.4g}"
        )

    def _rows(self) -> list[Mapping[str, Any]]:
        return [
            {"layer": n, "attention": float(attention), "ffn": float(ffn)}
            for n, (attention, ffn) in enumerate(self.blocks, 1)
        ]


def sensitivity(prediction: Prediction) -> Sensitivity:
    """N sigma_block^2 / sigma_skip^2 of every block, its mean and its median."""
    model = prediction.model
    scale = float(np.mean(model.branch_scales**2))
    closed = DSLM_CHAIN.law("sensitivity")(layers=model.layers, branch_square=scale)
    return Sensitivity(prediction, block_sensitivity(prediction), float(closed))


@dataclass(frozen=True)
class TradeOff(Result):
    """Stability against expressivity of DeepScaleLM over beta^2 = k / N^alpha.

    `rows`: k, alpha, branch_square, sensitivity (N beta^2 = k N^(1-alpha)) and its predicted
    median; fall, the share of the gradient that skip connections alone keep (Appendix G), and
    grad_ratio, the smallest over the largest predicted gradient variance.
    """

    model: Transformer
    theory: Theory
    rows: tuple[Mapping[str, Any], ...]

    @property
    def heading(self) -> str:
        return f"stability and expressivity at {self.model.layers} layers, theory {self.theory}"

    def _rows(self) -> list[Mapping[str, Any]]:
        return list(self.rows)


def trade_off(
    model: Transformer,
    ks: Sequence[float] = (0.5, 1.0, 2.0, 4.0),
    alphas: Sequence[float] = (0.5, 1.0, 1.5, 2.0),
    *,
    correlation: float = 0.227,
    grad_correlation: float = 0.0,
    theory: Theory = "refined",
) -> TradeOff:
    """Sensitivity and gradient of DeepScaleLM for every k and alpha with beta^2 below 1.

    Args:
        model: shape, norm, depth and dropout.
        ks, alphas: of beta^2 = k / N^alpha; pairs that give 1 or more are left out.
        correlation: of the input's tokens, before the embedding's dropout.
        grad_correlation: at the output.
        theory: of the predictions.
    """
    for name, values in (("ks", ks), ("alphas", alphas)):
        check_in(name, list(values), Interval(0.0, open_lower=True))
    rows: list[Mapping[str, Any]] = []
    base = model.replace(embedding=None)
    for k in ks:
        for alpha in alphas:
            depth = {"branch_constant": k, "branch_exponent": alpha, "layers": model.layers}
            square = float(DSLM_CHAIN.law("branch_square")(**depth))
            if square >= 1:
                continue
            scaled = base.with_scheme("dslm", k=k, alpha=alpha, input_correlation=correlation)
            p = predict_alike(
                scaled,
                theory,
                correlation=correlation * (1 - model.dropout),
                grad_correlation=grad_correlation,
            )
            found = sensitivity(p)
            rows.append(
                {
                    "k": k,
                    "alpha": alpha,
                    "branch_square": square,
                    "sensitivity": found.closed,
                    "predicted sensitivity": found.median,
                    "fall": float(DSLM_CHAIN.law("fall")(**depth)),
                    "grad_ratio": float(p.grad_variance.min() / p.grad_variance.max()),
                }
            )
    return TradeOff(model, theory, tuple(rows))
