"""The map of one layer: correlations that it leaves as they are, and how fast they are reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moments.errors import DomainError, MomentsError, domain_error
from moments.formulas.law import Theory
from moments.grids.together import predict_together
from moments.model.transformer import Transformer

from ..formulas.kedia_chain import PRE_LN_CHAIN
from .kedia import chain_constants
from .results import Result, predict_alike

# --- The engine's map of one layer, and the stream's correlations that it leaves unchanged --------


# A Pre-LN stream so large that one layer hardly moves it; what it adds is then a function of the
# correlation alone, wrong by one part in LARGE.
LARGE = 1e6


class State(NamedTuple):
    """Moments at one point of the stream."""

    variance: float
    correlation: float
    grad_variance: float
    grad_correlation: float


@dataclass(frozen=True)
class OneLayer:
    """One layer of a model, as a map of moments: forward from its input, backward from its output.

    Raises:
        DomainError: a norm other than pre or post, or layers that differ by LayerNorm Scaling.
    """

    model: Transformer
    theory: Theory

    @classmethod
    def of(cls, model: Transformer, theory: Theory, layer: int) -> OneLayer:
        if model.norm not in ("pre", "post"):
            raise domain_error("norm", model.norm, "'pre' or 'post'")
        _check_repeats(model, layer)
        return cls(repeated_layer(model, layer, 1).replace(embedding=None), theory)

    @property
    def carries_all(self) -> bool:
        """Pre-LN whose skip connection keeps the whole stream, so that its variance grows."""
        return self.model.norm == "pre" and float(self.model.skip_scales.min()) >= 1.0

    def __call__(
        self, variance: float, correlation: float, grad_correlation: float = 0.0
    ) -> tuple[State, State]:
        """Moments at the input and at the output."""
        p = predict_alike(
            self.model,
            self.theory,
            variance=variance,
            correlation=correlation,
            grad_correlation=grad_correlation,
        )
        columns = (p.variance, p.correlation, p.grad_variance, p.grad_correlation)
        first, last = (State(*(float(c[i]) for c in columns)) for i in (0, 1))
        return first, last

    def added(self, correlation: float) -> float:
        """Token correlation of what one layer adds to a large Pre-LN stream."""
        before, after = self(LARGE, correlation)
        pairs = after.variance * after.correlation - before.variance * before.correlation
        return pairs / (after.variance - before.variance)

    def returned(self, correlation: float, grad_correlation: float) -> float:
        """Token correlation of the gradient one layer adds to that of a large Pre-LN stream."""
        after, before = self(LARGE, correlation, grad_correlation)
        pairs = (
            after.grad_variance * after.grad_correlation
            - before.grad_variance * before.grad_correlation
        )
        return pairs / (after.grad_variance - before.grad_variance)


def _check_repeats(model: Transformer, layer: int) -> None:
    """Raise unless the model has that layer, and it can stand for all."""
    if model.layernorm_scaling:
        raise DomainError("layernorm_scaling makes every layer another map: none can be repeated")
    if not 1 <= layer <= model.layers:
        raise domain_error("layer", layer, f"from 1 to {model.layers}")


def repeated_layer(model: Transformer, layer: int, times: int) -> Transformer:
    """Layer `layer` of a model, from 1, `times` times: every list of one per layer becomes its."""

    def own(values: Any) -> Any:
        return values[layer - 1] if isinstance(values, tuple) else values

    def each(variances: Any) -> Any:
        if variances is None:
            return None
        lists = {name: own(value) for name, value in vars(variances).items()}
        return variances.replace(**lists)

    pairs = ("skip_scale", "branch_scale", "norm_gain")
    found = {name: own(getattr(model, name)) for name in (*pairs, "temperature", "window")}
    for name in pairs:
        if isinstance(found[name], tuple):
            found[name] = [found[name]] * times
    return model.replace(
        layers=times, weights=each(model.weights), biases=each(model.biases), **found
    )


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

    def _table(self) -> dict[str, Any]:
        names = ("correlation", "grad_correlation", "variance", f"{self.kind} rate")
        predicted = (self.correlation, self.grad_correlation, self.variance, self.rate)
        closed = (self.closed_correlation, self.closed_grad_correlation, None, None)
        return {"quantity": names, "predicted": predicted, "closed form": closed}


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


# --- Whether depth keeps signals and gradients apart: Cowsik et al.'s two exponents, at finite size
#
# Cowsik et al. 2024 call a transformer trainable where two Lyapunov exponents vanish together.
# The angle exponent is the rate at which tokens that are all but the same part (or, negative,
# come together) from layer to layer: the logarithm of the factor on 1 - r at r = 1. The gradient
# exponent is the rate at which squared gradients grow from layer to layer on their way down,
# where tokens correlate as they tend to. Theirs come from update maps of infinite width and
# length; here both are read off `moments.predict`'s own map, of a layer repeated `DEPTH` times,
# of which the first and the last third have died away. Of a Pre-LN stack that keeps all of its
# stream both are 0 in the limit and fall to it as 1/depth: its boundaries are no lines.


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

    def _table(self) -> list[Mapping[str, Any]]:
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
    angles = [_late_growth(row) for row in 1 - close[1]]
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
    given = {"variance": variance, "correlation": correlation}
    if len(models) == 1:  # by plain numbers, several times faster
        p = predict_alike(models[0], theory, **{name: float(v[0]) for name, v in given.items()})
    else:
        p = predict_together(models, theory, given)
    return np.atleast_2d(p.variance), np.atleast_2d(p.correlation), np.atleast_2d(p.grad_variance)


def _late_growth(apart: np.ndarray) -> float:
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
    _check_repeats(model, layer)
    dropped = (model.dropout, model.attention_dropout, model.ffn_dropout, model.activation_dropout)
    if any(dropped):
        raise domain_error(
            "dropout", max(d or 0.0 for d in dropped), "0: under dropout no tokens stay the same"
        )
    if model.norm == "mix" or model.encoder is not None:
        raise domain_error("norm", model.norm, "one placement, and no encoder")
    return repeated_layer(model, layer, DEPTH).replace(embedding=None, head=None)
