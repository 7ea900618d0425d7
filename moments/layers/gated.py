"""Gated units: an activation of one linear map of the input times a second linear map.

See docs/theory/norms.md, Realised overlaps.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..engine.composition import Hidden, Leaf, OfEntry, Pullback, PullbackResult, weights_of
from ..engine.directions import knows_directions, with_alignment
from ..engine.fluctuation import (
    OverlapWalk,
    UnsharedOverlap,
    elasticity,
    overlap_covariance,
    shared_with,
    shifted_overlaps,
)
from ..engine.state import (
    Array,
    Fluctuation,
    Gradient,
    Kernel,
    Signal,
    Values,
    bind,
    evaluate,
    evaluate_sides,
    observed,
    ratio_or_zero,
)
from ..engine.trace import Record
from ..formulas.activation import above_quantile
from ..formulas.algebra import CachingNumpy, number_system
from ..formulas.gated import gated
from ..formulas.law import ComponentLaws
from ..formulas.linear import LINEAR
from .elementary import Linear, concentration, faintly


@dataclass(frozen=True)
class GatedLinear(Leaf):
    """activation(x @ gate) * (x @ ffn_in): SwiGLU, GeGLU, ReGLU and others.

    Moments of pairs are averaged over the fluctuation of two tokens' overlap, which both maps
    share (`fluctuation`): it adds a correlation of order 1/width to almost uncorrelated tokens, and
    the next attention averages over many such pairs. The squared norm of a token, which scales both
    maps, is taken at its mean, as after a normalisation. Without one, second moments are low by
    about the norm's relative variance (1.4 percent for Gaussian tokens of width 96). The gradient's
    part along the token is larger than assumed by about 1/fan_in of the whole, which a preceding
    normalisation projects out.

    Attributes:
        label: site name of the product in a trace.
        activation: laws of the activation.
        fan_in, fan_out: features of the input, and of each of the two maps.
        gate, ffn_in: variances of the two maps' weights.
        gate_bias, bias: variances of their biases.
        has_bias: whether both have biases (of any variance) that receive gradients.
        prefix: of the matrices' names in the table of weight gradients.
        shift: added to the second factor: activation(x @ gate) * (x @ ffn_in + shift).
        clamp: upper bound of the gate and bound of the second map's size; None: no bounds. Moments
            neglect it; if more than `BOUND` of the entries are clamped, a note warns.
        sparsity: share of a token's gates that are cut off before the activation, of an input of
            variance 1 (`FeedForward.sparsity`).
    """

    label: str
    activation: ComponentLaws
    fan_in: Any
    fan_out: Any
    gate: Any
    ffn_in: Any
    gate_bias: Any = 0.0
    bias: Any = 0.0
    has_bias: bool = False
    prefix: str = ""
    shift: float = 0.0
    clamp: float | None = None
    sparsity: float | None = None

    hidden: ClassVar[Hidden] = Hidden(1, 1.0)

    @property
    def matrices(self) -> tuple[str, ...]:
        return f"{self.prefix}gate", f"{self.prefix}ffn_in"

    def with_variances(self, names: tuple[str, ...], factor: float) -> GatedLinear:
        fields = [name for name in ("gate", "ffn_in") if self.prefix + name in names]
        return replace(self, **{name: getattr(self, name) * factor for name in fields})

    @property
    def unit(self) -> ComponentLaws:
        """Laws of the function of the gates."""
        if not self.sparsity:
            return self.activation
        variance = float(self.fan_in * self.gate + self.gate_bias)
        return above_quantile(self.activation, self.sparsity, variance)

    def entry_moments(self, algebra: Any, names: tuple[str, ...] = ()) -> OfEntry:
        product = gated(self.unit).under("refined")["variance"]
        mean = self.unit.under("refined")["mean"]
        gate, factor = (linear.entry_moments(algebra, names) for linear in self._maps())

        def result(entering: tuple[Array, Array], times: float) -> tuple[Array, Array]:
            _, of_gate = gate(entering, times)
            of_factor = factor(entering, times)[1] + self.shift**2
            values = {"x_variance": of_gate, "factor_variance": of_factor, "x_mean": 0.0}
            square = product.formula(algebra, *product.pick(values))
            if not self.shift:
                return 0.0, square
            common = self.shift * mean.formula(algebra, *mean.pick(values))
            return common, square - common * common

        return result

    def domain_share(self, mean: Array, variance: Array, algebra: Any) -> Array:
        upper = gated(self.unit).under("refined")["variance"].domain["x_variance"].upper
        _, of_gate = self._maps()[0].entry_moments(algebra)((mean, variance), 1.0)
        return of_gate / upper

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        (inner, factor), *backs = self._factors(signal)
        laws = gated(self.unit).under("refined")
        kept = None if signal.kernel.classes is None else CachingNumpy()
        one, two = bind(inner, {})
        one = one | {"factor_variance": factor.kernel.diagonal}
        two = two | {"factor_covariance": factor.kernel.off_diagonal}
        moved, sides = shifted_overlaps(signal), None
        if moved is not None:
            with observed(None):  # `explain` shows the laws at the mean overlap
                sides = self._at_pairs(moved.above), self._at_pairs(moved.below)
        values = _Values(self.unit, kept, one, two, sides)
        algebra = values.algebra
        variance, ends = evaluate(laws["variance"], algebra, one), values.at_ends("covariance")
        kernel = Kernel.of_parts(variance, 0.5 * (ends[0] + ends[1]), signal.resolved)
        kurtosis = faintly(laws["kurtosis"], algebra, one)
        limit = laws["variance"].domain["x_variance"]
        notes: tuple[str, ...] = ()
        if not limit.contains(inner.kernel.mean_diagonal()):
            notes = (f"the gate's variance is outside {limit}, where the laws are resolved",)
        notes += self._bound(inner, factor)
        mean: Array = 0.0
        if self.shift:
            law = self.unit.under("refined")["mean"]
            mean = self.shift * evaluate(law, algebra, one | {"x_mean": 0.0})
            first, second = kernel.over_tokens(mean + 0.0 * kernel.diagonal)
            common = Kernel.of_parts(mean * mean + 0.0 * variance, first * second, kernel.resolved)
            kernel = kernel - common
        output = Signal(
            kernel, signal.seq_len, mean, width=self.fan_out, kurtosis=kurtosis, notes=notes
        )
        if signal.fluctuation is not None:
            of_gate = values.gradient(AT_FACTOR, inner.kernel.with_ones())
            kurtosis = kernel.average(kurtosis)
            norms = self._norms(signal, inner, factor, of_gate, kurtosis / 3)
            step = None if moved is None else moved.step
            output = output.replace(
                notes=notes + _unsteady(signal),
                kurtosis=kurtosis,
                fluctuation=_fluctuation(signal, output, norms, ends, step),
            )
        return output, functools.partial(self._back, output, values, backs)

    def _back(
        self, output: Signal, values: _Values, maps: list[Pullback], gradient: Gradient
    ) -> PullbackResult:
        """Gradient at the input, through both factors and their linear maps."""
        at_gate, at_factor = (values.gradient(x, gradient.kernel) for x in (AT_GATE, AT_FACTOR))
        if output.fluctuation is not None and knows_directions(gradient):
            # E F^2 q/(E F^2 E q), F = f u, of q = f'^2 u^2 at the gate and f^2 at the factor
            law = self.unit.under("refined")["alignment"]
            slopes = faintly(law, values.algebra, values.one)
            at_gate = with_alignment(at_gate, output, gradient, 3 * slopes)
            at_factor = with_alignment(at_factor, output, gradient, output.kurtosis / 3)
        # The matrices are independent, and so are the gradients through them.
        parts = [
            back(gradient.with_kernel(kernel))
            for back, kernel in zip(maps, (at_gate, at_factor), strict=True)
        ]
        total = parts[0].gradient.kernel + parts[1].gradient.kernel
        return PullbackResult(
            Gradient(total, gradient.seq_len), functools.partial(weights_of, *parts)
        )

    def _bound(self, inner: Signal, factor: Signal) -> tuple[str, ...]:
        """A note if `clamp` bounds too many entries."""
        if self.clamp is None:
            return ()
        other = np.max(factor.kernel.diagonal) - self.shift**2
        beyond = 0.5 * _outside(self.clamp, np.max(inner.kernel.diagonal))
        beyond += _outside(self.clamp, other)
        if beyond <= BOUND:
            return ()
        return (f"clamps at {self.clamp:g} bind at {beyond:.2g} of the entries and are left out",)

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        # `elasticity` is taken per unit of the input's overlap, before the linear maps.
        before, after = record.input, record.output
        rate = elasticity(self, before, after, walk.real)
        maps = [linear.forward(before)[0].kernel for linear in self._maps()]
        sizes = [float(kernel.mean_diagonal(walk.real)) for kernel in maps]
        common = [float(kernel.mean_off_diagonal(walk.real)) for kernel in maps]
        gate, factor = zip(sizes, map(ratio_or_zero, common, sizes), strict=True)
        units = concentration(self.unit, *gate, (*factor, self.shift))
        return at.mapped(after.width).activated(rate, (after.width, after.width), units)

    def _factors(self, signal: Signal) -> tuple[tuple[Signal, Signal], Pullback, Pullback]:
        """Inputs of the activation and second factor, as second moments about 0; and the pullbacks
        of both linear maps."""
        (inner, gate_back), (factor, factor_back) = (x.forward(signal) for x in self._maps())
        if self.shift:
            shift = factor.kernel.with_ones().scaled(self.shift**2)
            factor = factor.replace(kernel=factor.kernel + shift)
        return (inner, factor), gate_back, factor_back

    def _at_pairs(self, signal: Signal) -> Values:
        """Values of the laws' symbols for pairs."""
        (inner, factor), *_ = self._factors(signal)
        correlation, covariance = inner.correlation(), factor.kernel.off_diagonal
        return {"x_correlation": correlation, "factor_covariance": covariance}

    def _maps(self) -> tuple[Linear, Linear]:
        """The linear maps of the gate and of the second factor."""
        gate = self._map("gate", self.gate, self.gate_bias)
        return gate, self._map("ffn_in", self.ffn_in, self.bias)

    def _map(self, weight: str, variance: Any, bias: Any) -> Linear:
        parameters = {
            "fan_in": self.fan_in,
            "fan_out": self.fan_out,
            "weight_variance": variance,
            "bias_variance": bias,
        }
        name = self.prefix + weight
        return Linear(
            LINEAR, "refined", weight, parameters, self.fan_out, name, has_bias=self.has_bias
        )

    def _norms(
        self, signal: Signal, inner: Signal, factor: Signal, of_gate: Kernel, kurtosis: Any
    ) -> Kernel:
        """Covariance of the squared norms of two tokens of the output.

        Given the input, features are independent, each f(a)^2 u^2, with E f(a)^2 f(a')^2 taken as
        P_ii P_jj + (kurtosis - 1) P_ij^2 (exact for a token with itself). The fluctuation of the
        input's squared norm changes E f(a)^2, as for f of degree 1, and E u^2 in proportion, apart
        from the biases' part.
        """
        assert signal.fluctuation is not None
        excess, pair_excess = of_gate.lift(kurtosis - 1)
        gate, other = of_gate * of_gate, factor.kernel * factor.kernel
        p, p_other = of_gate.over_tokens(of_gate.diagonal)
        u, u_other = other.over_tokens(factor.kernel.diagonal)
        off_diagonal = (
            2 * p * p_other * other.off_diagonal
            + pair_excess * gate.off_diagonal * (u * u_other + 2 * other.off_diagonal)
        ) / self.fan_out
        diagonal = (2 + 3 * excess) * gate.diagonal * other.diagonal / self.fan_out
        rate = 1 - ratio_or_zero(self.gate_bias, inner.kernel.diagonal)
        rate = rate + (1 - ratio_or_zero(self.bias, factor.kernel.diagonal))
        rate = rate * of_gate.diagonal * factor.kernel.diagonal
        rate = ratio_or_zero(rate, signal.second_moment().diagonal)
        first, second = of_gate.over_tokens(rate)
        inherited = signal.fluctuation.norms.weighted(rate * rate, first * second)
        return inherited + Kernel.of_parts(diagonal, off_diagonal, of_gate.resolved)


BOUND = 1e-3
"""Fraction of clamped entries beyond which a note warns."""


def _outside(limit: float, variance: Any) -> float:
    """Probability that a centred Gaussian exceeds a limit in absolute value."""
    return math.erfc(limit / math.sqrt(2 * max(float(variance), 1e-300)))


def _unsteady(signal: Signal) -> tuple[str, ...]:
    """A note if the tokens' norms, which are taken at their means, fluctuate much."""
    if signal.fluctuation is None:
        return ()
    tokens, norms = signal.second_moment().diagonal, signal.fluctuation.norms.diagonal
    spread = float(np.max(ratio_or_zero(norms, tokens * tokens)))
    if spread <= 0.1:
        return ()
    return (
        f"squared norms of the tokens vary by {spread:.2g} (relative variance) before a gated unit "
        "without a normalisation: its second moments are low by about that",
    )


def _fluctuation(
    signal: Signal, output: Signal, norms: Kernel, ends: Any, step: Array | None
) -> Fluctuation:
    """Fluctuation of the unit's output: overlaps change with those of the input, by the mean slope
    between the `ends`, off-diagonal moments at two overlaps a `step` from the mean."""
    if step is None:
        return Fluctuation(norms)
    overlaps, moment = overlap_covariance(signal), output.second_moment()
    assert overlaps is not None
    change = 0.5 * (ends[0] - ends[1])  # slope times step
    root = overlaps.diagonal**0.5
    first, second = overlaps.over_tokens(root)
    size = _mean_pairs(overlaps, 0.5 * (first * second + overlaps.off_diagonal))
    square = ratio_or_zero(_mean_pairs(overlaps, change * change), size)
    slope = ratio_or_zero(_mean_pairs(overlaps, change * step), size)
    total = overlaps.mixed(square, moment * moment, 2 / output.width)
    shared, of_norms = shared_with(signal)
    return Fluctuation(norms, total, shared=(shared.scaled(slope), of_norms.scaled(0.0)))


def _mean_pairs(like: Kernel, off_diagonal: Array) -> Array:
    return Kernel.of_parts(0.0 * like.diagonal, off_diagonal, like.resolved).mean_off_diagonal()


AT_GATE = "grad_variance", "grad_covariance"
AT_FACTOR = "grad_factor", "grad_factor_covariance"
"""Names of the laws of the gradients at both factors, for a token and for a pair."""


class _Values(NamedTuple):
    """Values of the laws' symbols for a token, for a pair, and for a pair at the two overlaps whose
    mean is taken (`engine.fluctuation.shifted_overlaps`)."""

    activation: ComponentLaws
    kept: CachingNumpy | None
    one: Values
    two: Values
    sides: tuple[Values, Values] | None

    @property
    def algebra(self) -> Any:
        return number_system(self.one["x_variance"]) if self.kept is None else self.kept

    def at_ends(self, quantity: str, **more: Array) -> tuple[Array, Array]:
        """Evaluate a law of a pair at both overlaps."""
        law = gated(self.activation).law(quantity)
        return evaluate_sides(law, self.algebra, self.two | more, self.sides)

    def gradient(self, quantities: tuple[str, str], gradient: Kernel) -> Kernel:
        """The gradient's kernel at a factor."""
        variance = {"grad_variance": gradient.diagonal}
        law = gated(self.activation).law(quantities[0])
        diagonal = evaluate(law, self.algebra, self.one | variance)
        above, below = self.at_ends(quantities[1], grad_covariance=gradient.off_diagonal)
        return Kernel.of_parts(diagonal, 0.5 * (above + below), gradient.resolved)
