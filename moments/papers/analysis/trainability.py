"""Whether depth keeps signals and gradients apart: Cowsik et al.'s two exponents, at finite size.

Cowsik et al. 2024 call a transformer trainable where two Lyapunov exponents vanish together. The
angle exponent is the rate at which tokens that are all but the same part (or, negative, come
together) from layer to layer: the logarithm of the factor on 1 - r at r = 1. The gradient exponent
is the rate at which squared gradients grow from layer to layer on their way down, where tokens
correlate as they tend to. Theirs come from update maps of infinite width and length; here both are
read off `moments.predict`'s own map, of a layer repeated `DEPTH` times, of which the first and the
last third have died away. Of a Pre-LN stack that keeps all of its stream both are 0 in the limit
and fall to it as 1/depth: its boundaries are no lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import DomainError, domain_error
from ...formulas.law import Theory
from ...grids.together import predict_together
from ...model.transformer import Transformer
from .alike import predict_alike
from .one_layer import repeated_layer
from .results import Result

DEPTH = 96
"""Layers, in a third of which what is left of the beginning has died away unless an exponent is
within some 1/30 of 0."""

CLOSE, SEEN = 1e-6, (1e-11, 1e-4)
"""1 - r of tokens that are all but the same, and where it is followed: between what rounding leaves
of it and where it acts on itself. ReLU's kink acts at sqrt(1 - r), some 1e-3 of an exponent."""


@dataclass(frozen=True)
class Exponents(Result):
    """Of one layer, repeated for ever.

    Attributes:
        model: whose layer it is.
        angle: per layer; below 0 tokens that are close come together, above 0 they part.
        gradient: per layer; above 0 squared gradients grow on their way down, below 0 they vanish.
        correlation: that tokens tend to.
        variance: of the stream after so many layers.
    """

    model: Transformer
    angle: float
    gradient: float
    correlation: float
    variance: float

    @property
    def heading(self) -> str:
        phase = "part" if self.angle > 0 else "come together"
        way = "grow" if self.gradient > 0 else "shrink"
        return (
            f"close tokens {phase} by exp({self.angle:.3g}) a layer, squared gradients {way} by "
            f"exp({self.gradient:.3g}) a layer on their way down; correlation tends to "
            f"{self.correlation:.4g}"
        )

    def _rows(self) -> list[Mapping[str, Any]]:
        names = ("angle", "gradient", "correlation", "variance")
        return [{"quantity": name, "value": getattr(self, name)} for name in names]


def exponents(model: Transformer, theory: Theory = "refined", *, layer: int = 1) -> Exponents:
    """Angle and gradient exponent of a layer that is repeated.

    Source of the definitions: Cowsik et al. 2024, Geometric dynamics of signal propagation predict
    trainability of transformers. The map is that of `predict`, tokens alike.

    Args:
        model: full attention without positions, no dropout (whose tokens never become the same),
            layers of one kind.
        theory: whose map.
        layer: which of its layers, from 1.

    Raises:
        DomainError: dropout, LayerNorm Scaling, or attention that tells tokens apart.
    """
    return many_exponents([model], theory, layer=layer)[0]


def many_exponents(
    models: Sequence[Transformer], theory: Theory = "refined", *, layer: int = 1
) -> list[Exponents]:
    """`exponents` of models that differ in numbers alone, at once.

    Raises:
        DomainError: as `exponents`.
    """
    deep = [repeated(model, layer) for model in models]
    count = len(models)
    variance, correlation, gradient = _stream(deep, theory, np.ones(count), np.full(count, 0.5))
    first, last = DEPTH // 3, 2 * DEPTH // 3
    with np.errstate(divide="ignore", invalid="ignore"):
        grown = np.log(gradient[:, first] / gradient[:, last]) / (last - first)
    close = _stream(deep, theory, variance[:, -1], np.full(count, 1 - CLOSE))
    angles = [_slope(row) for row in 1 - close[1]]
    if not (np.all(np.isfinite(grown)) and np.all(np.isfinite(angles))):
        raise DomainError(
            f"signals or gradients die out or overflow within {DEPTH} layers: exponents of such "
            "layers are not resolved"
        )
    return [
        Exponents(model, float(a), float(g), float(r), float(v))
        for model, a, g, r, v in zip(
            models, angles, grown, correlation[:, -1], variance[:, -1], strict=True
        )
    ]


def _stream(
    models: Sequence[Transformer], theory: Theory, variance: np.ndarray, correlation: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Variance, correlation and gradient variance along the depth, (B, DEPTH + 1) each."""
    if len(models) == 1:  # by plain numbers, several times faster
        p = predict_alike(
            models[0], theory, variance=float(variance[0]), correlation=float(correlation[0])
        )
        return p.variance[None], p.correlation[None], p.grad_variance[None]
    given = {"variance": variance, "correlation": correlation}
    variance, correlation, gradient, _ = predict_together(models, theory, given).stream
    return variance, correlation, gradient


def _slope(apart: np.ndarray) -> float:
    """Growth per layer of 1 - r, where it is seen: at least over two layers."""
    seen = (apart > SEEN[0]) & (apart < SEEN[1])
    end = max(len(seen) if seen.all() else int(np.argmin(seen)), 3)
    start = min(end // 3, end - 2)
    return float(np.log(apart[end - 1] / apart[start]) / (end - 1 - start))


def repeated(model: Transformer, layer: int) -> Transformer:
    """One of its layers `DEPTH` times, by itself.

    Raises:
        DomainError: as `exponents`.
    """
    if model.layernorm_scaling:
        raise DomainError("layernorm_scaling makes every layer another map: it has no exponents")
    if not 1 <= layer <= model.layers:
        raise domain_error("layer", layer, f"from 1 to {model.layers}")
    dropped = (model.dropout, model.attention_dropout, model.ffn_dropout, model.activation_dropout)
    if any(dropped):
        raise domain_error(
            "dropout", max(d or 0.0 for d in dropped), "0: under dropout no tokens stay the same"
        )
    if model.norm == "mix" or model.encoder is not None:
        raise domain_error("norm", model.norm, "one placement, and no encoder")
    return repeated_layer(model, layer, DEPTH).replace(embedding=None, head=None)
