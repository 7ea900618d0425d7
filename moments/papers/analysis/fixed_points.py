"""Where token correlations stop moving with depth, and how fast they get there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import MomentsError
from ...formulas.kedia_chain import PRE_LN_CHAIN
from ...formulas.law import Theory
from ...model.transformer import Transformer
from .chain import chain_constants
from .one_layer import OneLayer
from .results import Result

_STEP = 1e-5  # of numerical slopes; a fixed point this close to 1 counts as 1


@dataclass(frozen=True)
class FixedPoints(Result):
    """Stationary correlations of signal and gradient.

    Attributes:
        model, theory: what was asked.
        correlation: r of the signal that a deep stack tends to; 1 is rank collapse.
        grad_correlation: r_g that the gradient tends to, going down, at that r.
        variance: of the stream there; infinite where it grows with depth.
        rate: "geometric": the distance to r shrinks by this factor per layer. "power": it shrinks
            as layer^-rate (Pre-LN with a whole skip connection, whose layers count ever less).
        kind: which of the two.
        closed_correlation, closed_grad_correlation: Kedia et al.'s F, solved; None where Table 2
            does not cover the model, or the blocks are damped by a Post-LN or a scaled skip.
    """

    model: Transformer
    theory: Theory
    correlation: float
    grad_correlation: float
    variance: float
    rate: float
    kind: str
    closed_correlation: float | None
    closed_grad_correlation: float | None

    @property
    def collapses(self) -> bool:
        """Whether all tokens become one."""
        return self.correlation == 1.0

    def layers_to(self, share: float) -> float:
        """Layers in which the distance to the fixed point shrinks to `share` of itself.

        Asymptotic, from a stream that is already near it; counted from layer 1 for a power law.
        """
        if self.kind == "geometric":
            return math.log(share) / math.log(self.rate)
        return float(share ** (-1 / self.rate))

    @property
    def heading(self) -> str:
        how = (
            f"distance x {self.rate:.4g} a layer"
            if self.kind == "geometric"
            else f"distance as layer^-{self.rate:.4g}"
        )
        end = "rank collapse" if self.collapses else "no rank collapse"
        return f"{end}: correlation tends to {self.correlation:.4g}, {how}"

    def _rows(self) -> list[Mapping[str, Any]]:
        return [
            {
                "quantity": "correlation",
                "predicted": self.correlation,
                "closed form": self.closed_correlation,
            },
            {
                "quantity": "grad_correlation",
                "predicted": self.grad_correlation,
                "closed form": self.closed_grad_correlation,
            },
            {"quantity": "variance", "predicted": self.variance, "closed form": None},
            {"quantity": f"{self.kind} rate", "predicted": self.rate, "closed form": None},
        ]


def correlation_fixed_points(
    model: Transformer, theory: Theory = "refined", *, layer: int = 1
) -> FixedPoints:
    """Stationary token correlations of a deep stack of one layer's kind, and the rate of approach.

    The engine's map of one layer is iterated to its stable point, tokens alike.

    Args:
        model: its layer `layer` is repeated for ever.
        theory: which laws the map uses.
        layer: which layer, counted from 1.

    Raises:
        DomainError: a norm other than pre or post, LayerNorm Scaling, or no such layer.
    """
    one = OneLayer.of(model, theory, layer)
    if one.carries_all:
        r = _stable(one.added)
        slope = _slope(one.added, r)
        variance, rate, kind = math.inf, 1 - slope, "power"
        rg = _stable(lambda rg: one.returned(r, rg))
    else:
        r, variance, rate = _stationary(one)
        kind = "geometric"
        rg = _stable(lambda rg: one(variance, r, rg)[0].grad_correlation)
    closed = _closed(model, one, layer)
    return FixedPoints(model, theory, r, rg, variance, rate, kind, *closed)


def _stable(mapping: Callable[[float], float]) -> float:
    """The stable fixed point in [0, 1] of a rising map: from above, the first that attracts."""
    from scipy.optimize import brentq

    def gap(r: float) -> float:
        return mapping(r) - r

    # 1 is a fixed point without dropout; it is the end of every start where it attracts.
    top = 1 - _STEP
    if gap(top) >= 0:
        return 1.0
    low = _STEP  # 0 itself is fixed, and repels, where a theory has no source of correlation
    if gap(low) <= 0:
        return 0.0
    return float(brentq(gap, low, top, xtol=1e-13))


def _slope(mapping: Callable[[float], float], r: float) -> float:
    if r == 1.0:
        return (1 - mapping(1 - _STEP)) / _STEP
    low, high = max(r - _STEP, 0.0), min(r + _STEP, 1.0)
    return (mapping(high) - mapping(low)) / (high - low)


def _stationary(one: OneLayer) -> tuple[float, float, float]:
    """Correlation, variance and dominant slope where a whole layer changes neither."""

    def variance_at(r: float) -> float:
        """Where the variance settles at this correlation; after a Post-LN it is the norm's."""
        if one.model.norm == "post":
            return one(1.0, r)[1].variance
        # v' = lambda^4 v + what the branches add, on which v acts weakly: Newton's method.
        variance = 1.0
        for _ in range(4):
            low, high = (one(v, r)[1].variance for v in (variance, 1.01 * variance))
            kept = (high - low) / (0.01 * variance)
            variance = (low - kept * variance) / (1 - kept)
        return variance

    def mapping(r: float) -> float:
        return one(variance_at(r), r)[1].correlation

    r = _stable(mapping)
    variance = variance_at(r)
    return r, variance, _dominant_slope(one, variance, r)


def _dominant_slope(one: OneLayer, variance: float, r: float) -> float:
    """Largest eigenvalue of the map's Jacobian in (correlation, variance)."""
    import numpy as np

    def image(v: float, c: float) -> np.ndarray:
        after = one(v, c)[1]
        return np.array([after.correlation, after.variance / variance])

    sign = -1.0 if r > 0.5 else 1.0
    base = image(variance, r)
    by_r = (image(variance, r + sign * _STEP) - base) / (sign * _STEP)
    if one.model.norm == "post":
        return float(by_r[0])
    by_v = (image(variance * (1 + _STEP), r) - base) / _STEP
    return float(np.abs(np.linalg.eigvals(np.stack([by_r, by_v], axis=1))).max())


def _closed(model: Transformer, one: OneLayer, layer: int) -> tuple[float | None, float | None]:
    if not one.carries_all:
        return None, None
    try:
        c1, c2 = chain_constants(model, layer)
    except MomentsError:
        return None, None
    r = PRE_LN_CHAIN.law("correlation")(attention_gain=c1, ffn_gain=c2, drop_prob=model.dropout)
    rg = PRE_LN_CHAIN.law("grad_correlation")(
        attention_gain=c1, ffn_gain=c2, drop_prob=model.dropout, x_correlation=min(float(r), 1.0)
    )
    return min(float(r), 1.0), float(rg)
