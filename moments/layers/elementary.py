"""Components defined by laws: linear maps, activations, dropout, scales, whole published blocks.

Laws are data, so that a theory is a choice of laws and not a branch in the engine. See
docs/theory/norms.md, Squared norms.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ..engine.composition import Hidden, Leaf, OfEntry, Pullback, PullbackResult
from ..engine.directions import (
    isotropic,
    knows_directions,
    weighted_by_gradient,
    with_alignment,
    without,
)
from ..engine.fluctuation import (
    OverlapWalk,
    UnsharedOverlap,
    elasticity,
    overlap_covariance,
    overlap_of_activation,
    overlap_of_dropout,
    overlap_of_product,
)
from ..engine.state import Array, Gradient, Kernel, Signal, Values, bind, evaluate, ratio_or_zero
from ..engine.trace import Record
from ..errors import DomainError
from ..formulas.algebra import NUMPY
from ..formulas.law import ComponentLaws, Law, Theory
from ..formulas.linear import BIASED_LINEAR, LINEAR
from ..model.fields import set_field


@dataclass(frozen=True)
class Lawful(Leaf):
    """A component whose moments follow from its laws.

    Attributes:
        theory: whose laws to use.
        label: site name in a trace.
        parameters: values of the laws' symbols that are not moments of the signal, such as fan_in.
        width: number of features of the output; None: that of the input.
    """

    laws: ComponentLaws
    theory: Theory
    label: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    width: Any = None

    def entry_moments(self, algebra: Any, names: tuple[str, ...] = ()) -> OfEntry:
        laws = self.laws.under(self.theory)
        mean, variance = laws["mean"], laws["variance"]
        values = dict(self.parameters)
        weight = None if set(names).isdisjoint(self.matrices) else values["weight_variance"]

        def result(entering: tuple[Array, Array], factor: float) -> tuple[Array, Array]:
            values["x_mean"], values["x_variance"] = entering
            if weight is not None:
                values["weight_variance"] = weight * factor
            return (
                mean.formula(algebra, *mean.pick(values)),
                variance.formula(algebra, *variance.pick(values)),
            )

        return result

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        laws = self.laws.under(self.theory)
        algebra, kernel = signal.algebra, signal.kernel
        one, two = bind(signal, self.parameters)
        variance = evaluate(laws["variance"], algebra, one) + 0 * kernel.diagonal
        if not np.all(kernel.diagonal):  # for a constant, E f^2 - (E f)^2 may round below 0
            variance = np.maximum(variance, 0.0)
        off_diagonal = evaluate(laws["covariance"], algebra, two) + 0 * kernel.off_diagonal
        output = Signal(
            Kernel.of_parts(variance, off_diagonal, signal.resolved),
            signal.seq_len,
            mean=evaluate(laws["mean"], algebra, one),
            width=signal.width if self.width is None else self.width,
        )
        fields: dict[str, Any] = {}
        limit = laws["variance"].domain.get("x_variance")
        bounded = limit is not None and limit.upper < np.inf
        if limit is not None and bounded and not limit.contains(kernel.mean_diagonal()):
            note = f"the input's variance is outside {limit}, where the laws are resolved"
            fields["notes"] = (note,)
        if signal.fluctuation is not None:
            fields |= self._over_draws(signal, output, one)
        elif not signal.resolved and "hidden_covariance" in laws:
            fields["hidden_covariance"] = evaluate(laws["hidden_covariance"], algebra, one)
        if fields:
            output = output.replace(**fields)

        back, back_pairs = laws.get("grad_variance"), laws.get("grad_covariance")
        if back is None or back_pairs is None:
            raise DomainError(f"theory {self.theory!r} states no gradient of {self.laws.name}")
        if signal.resolved:
            # Keep only the matrices that the backward pass needs.
            kept = (*back.arguments, "x_variance")
            one = {name: one[name] for name in kept if name in one}
            two = {name: two[name] for name in back_pairs.arguments if name in two}
        return output, functools.partial(self._back, signal, output, one, two)

    def _back(
        self, signal: Signal, output: Signal, one: Values, two: Values, gradient: Gradient
    ) -> PullbackResult:
        """Gradient at the input; `one` and `two` are values of the laws' symbols for a token and
        for a pair."""
        laws, algebra = self.laws.under(self.theory), signal.algebra
        diagonal, off_diagonal = gradient.kernel.diagonal, gradient.kernel.off_diagonal
        moments = {"grad_variance": diagonal, "grad_covariance": off_diagonal}
        variance = evaluate(laws["grad_variance"], algebra, one | moments)
        pair = (two if gradient.resolved else one) | moments
        off_diagonal = evaluate(laws["grad_covariance"], algebra, pair)
        kernel = Kernel.of_parts(variance, off_diagonal, gradient.resolved)
        grad_in = self._grad_in(gradient, kernel, signal, output, one)
        return PullbackResult(grad_in, functools.partial(self._weights, signal, gradient))

    def _grad_in(
        self, gradient: Gradient, kernel: Kernel, signal: Signal, output: Signal, one: Values
    ) -> Gradient:
        """The gradient at the input, of second moments `kernel` by the laws."""
        return gradient.with_kernel(kernel)

    def _over_draws(self, signal: Signal, output: Signal, values: Values) -> dict[str, Any]:
        """Fields of the output `Signal` that describe its fluctuation over draws."""
        return {}

    def _weights(self, signal: Signal, gradient: Gradient) -> Values:
        """`Pulled.weights` for this input and the gradient at the output."""
        return {}


@dataclass(frozen=True)
class Linear(Lawful):
    """A weight matrix, with a bias if `parameters` has a `bias_variance`.

    Attributes:
        weight: name in the table of weight gradients.
        has_bias: whether a bias (of any variance) receives a gradient.
    """

    weight: str = "weight"
    has_bias: bool = False

    def __post_init__(self) -> None:
        if "bias_variance" in self.parameters and self.laws is LINEAR:
            set_field(self, "laws", BIASED_LINEAR)

    @property
    def matrices(self) -> tuple[str, ...]:
        return (self.weight,)

    def with_variances(self, names: tuple[str, ...], factor: float) -> Linear:
        if self.weight not in names:
            return self
        variance = self.parameters["weight_variance"] * factor
        return replace(self, parameters={**self.parameters, "weight_variance": variance})

    def _over_draws(self, signal: Signal, output: Signal, values: Values) -> dict[str, Any]:
        gain = self.parameters["fan_in"] * self.parameters["weight_variance"]
        return {"fluctuation": overlap_of_product(signal, output, gain)}

    def _grad_in(
        self, gradient: Gradient, kernel: Kernel, signal: Signal, output: Signal, one: Values
    ) -> Gradient:
        # x.W^T g = (W x).g: a g without a part along W x gives a W^T g without one along x.
        if not isotropic(gradient.radial):
            kernel = without(kernel, signal, (1 - gradient.radial) / self.parameters["fan_in"])
        return gradient.along(kernel)

    def _weights(self, signal: Signal, gradient: Gradient) -> Values:
        # dW = sum_i g_i x_i^T, so E|dW|^2 = d_out d_in sum_ij E[g_i g_j] E[x_i x_j]; and
        # db = sum_i g_i. If gradients decrease with the tokens' norms, shorter tokens weigh more.
        width = self.parameters["fan_out"]
        tokens = signal.second_moment()
        if signal.fluctuation is not None:
            tokens = weighted_by_gradient(tokens, signal.fluctuation.norms, gradient.norm_response)
        overlap = (tokens * gradient.kernel).total(signal.seq_len)
        norms = {self.weight: self.parameters["fan_in"] * width * overlap}
        if self.has_bias:
            norms[f"{self.weight}.bias"] = width * gradient.kernel.total(signal.seq_len)
        return norms

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return at.mapped(record.output.width)


@dataclass(frozen=True)
class Activation(Lawful):
    """A function applied to every entry of a centred Gaussian input."""

    hidden: ClassVar[Hidden] = Hidden(2, 2.0)

    def domain_share(self, mean: Array, variance: Array, algebra: Any) -> Array:
        return variance / self.laws.under(self.theory)["variance"].domain["x_variance"].upper

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return entrywise_overlap(self, record, at, walk.real, self.laws)

    def _over_draws(self, signal: Signal, output: Signal, values: Values) -> dict[str, Any]:
        kurtosis = faintly(self.laws.under(self.theory)["kurtosis"], signal.algebra, values)
        if signal.resolved:
            kurtosis = signal.kernel.average(kurtosis)
        slope = 0.0 if overlap_covariance(signal) is None else self._slope(signal, values)
        return {
            "fluctuation": overlap_of_activation(signal, output, kurtosis, slope),
            "kurtosis": kurtosis,
        }

    def _slope(self, signal: Signal, values: Values) -> Array:
        """Derivative of a covariance in that of the input, at the mean correlation."""
        law = self.laws.under(self.theory)["grad_covariance"]
        kernel, mean = signal.kernel, signal.mean
        diagonal, off_diagonal = kernel.mean_diagonal(), kernel.mean_off_diagonal()
        values = dict(self.parameters)
        values["x_variance"] = values["x_other_variance"] = diagonal
        values["x_mean"] = values["x_other_mean"] = kernel.average(mean)
        values["x_correlation"] = np.clip(ratio_or_zero(off_diagonal, diagonal), -1.0, 1.0)
        values["grad_covariance"] = 1.0
        return evaluate(law, signal.algebra, values)

    def _grad_in(
        self, gradient: Gradient, kernel: Kernel, signal: Signal, output: Signal, one: Values
    ) -> Gradient:
        algebra, entering = signal.algebra, signal.kernel
        if output.fluctuation is not None and knows_directions(gradient):
            alignment = faintly(self.laws.under(self.theory)["alignment"], algebra, one)
            kernel = with_alignment(kernel, output, gradient, alignment)
        if not np.all(entering.diagonal):
            kernel = self._at_rest(kernel, entering, algebra)
        return gradient.with_kernel(kernel)

    def _at_rest(self, kernel: Kernel, entering: Kernel, algebra: Any) -> Kernel:
        """The gradient at inputs that are 0, where kinks have the slope of their flatter side.

        The laws give the limit of small inputs, which are on both sides: with slopes l and u,
        E f'(x)^2 = (l^2 + u^2)/2 and E f'(x) f'(-x) = l u. torch uses l for ReLU and leaky ReLUs.
        """
        laws = self.laws.under(self.theory)
        at_zero = dict(self.parameters) | {"x_variance": 0.0, "x_other_variance": 0.0}
        at_zero |= {"grad_variance": 1.0, "grad_covariance": 1.0, "x_correlation": -1.0}
        square = float(evaluate(laws["grad_variance"], algebra, at_zero))
        product = float(evaluate(laws["grad_covariance"], algebra, at_zero))
        flat = square - max(square * square - product * product, 0.0) ** 0.5
        mean = 0.5 * (square + product)  # ((l + u)/2)^2
        zero = np.asarray(entering.diagonal) == 0.0
        of_token: Array = np.where(zero, ratio_or_zero(flat, square), 1.0)
        of_pair: Array = np.where(zero, ratio_or_zero(flat, mean) ** 0.5, 1.0)
        if algebra.scalar:
            of_token, of_pair = float(of_token), float(of_pair)
        first, second = entering.over_tokens(of_pair)
        return kernel.weighted(of_token, first * second)


def entrywise_overlap(
    leaf: Leaf,
    record: Record,
    at: UnsharedOverlap,
    real: Array | None,
    laws: ComponentLaws | None = None,
    square: float = 1.0,
) -> UnsharedOverlap:
    """Unshared overlap at the output of an entrywise function with these `laws` at inputs times the
    root of `square`; None: slopes of features are independent between tokens."""
    before, after, units = record.input, record.output, 1.0
    if laws is not None:
        variance = float(before.kernel.mean_diagonal(real))
        common = float(before.kernel.mean_off_diagonal(real))
        units = concentration(laws, square * variance, ratio_or_zero(common, variance))
    rate = elasticity(leaf, before, after, real)
    return at.activated(rate, (before.width, after.width), units)


@functools.lru_cache(maxsize=1024)
def concentration(
    laws: ComponentLaws,
    variance: float,
    correlation: float,
    factor: tuple[float, float, float] | None = None,
) -> float:
    """E s^4/(E s^2)^2 over features, s^2 the variance of f(x) given the part of x that all tokens
    share.

    If tokens share most of x, a feature has a large slope for all tokens or for none: overlaps are
    then sums over fewer features, by this factor. Derived here, by quadrature: x = sqrt(v r) z +
    sqrt(v (1 - r)) e with z shared; with a gate s^2 is that of f(x) u, u = shift + a Gaussian.

    Args:
        laws: of f; without its function the result is 1.
        variance, correlation: v and r, of two tokens' x.
        factor: variance and correlation of u, and the shift; None: no gate.
    """
    if laws.entrywise is None or not variance > 0.0:
        return 1.0
    function, nearest = laws.entrywise[0], 1.0 - 1e-6  # at this r f is linear in e
    r = min(max(correlation, 0.0), nearest)
    z = (np.arange(160) + 0.5) / 12.5 - 6.4
    weights = np.exp(-(z**2) / 2)
    weights /= weights.sum()
    shared = (variance * r) ** 0.5 * z
    nodes, masses = np.polynomial.hermite_e.hermegauss(16)
    values = function(NUMPY, shared[:, None] + (variance * (1.0 - r)) ** 0.5 * nodes)
    mean, square = (values**k @ masses / masses.sum() for k in (1, 2))
    spread = (values - mean[:, None]) ** 2 @ masses / masses.sum()
    common, fourth, own = 1.0, 1.0, 0.0  # E m^2, E m^4 and Var(u - m), m the shared part of u
    if factor is not None:
        size, other, shift = factor[0], min(factor[1], nearest), factor[2]
        common, own = size * other + shift**2, size * (1.0 - other)
        fourth = 3.0 * (size * other) ** 2 + 6.0 * size * other * shift**2 + shift**4
    first = float(weights @ (spread * common + square * own))
    second = spread**2 * fourth + 2.0 * spread * common * square * own + (square * own) ** 2
    return float(weights @ second) / first**2 if first > 0.0 else 1.0


FAINT = 1e-30
"""Floor of the variance in ratios of a function's moments, which have a limit at 0."""


def faintly(law: Law, algebra: Any, values: Values) -> Array:
    """Evaluate a law that is 0/0 at inputs of variance 0, in the limit of small ones."""
    v = values["x_variance"]
    least = max(v, FAINT) if algebra.scalar else np.maximum(v, FAINT)
    return evaluate(law, algebra, values | {"x_variance": least})


@dataclass(frozen=True)
class Dropout(Lawful):
    """Dropout with independent masks for every token and entry."""

    is_dropout: ClassVar[bool] = True

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return entrywise_overlap(self, record, at, walk.real)

    def _over_draws(self, signal: Signal, output: Signal, values: Values) -> dict[str, Any]:
        drop_prob = self.parameters["drop_prob"]
        return {
            "fluctuation": overlap_of_dropout(signal, drop_prob),
            "centred": signal.centred,
            "kurtosis": signal.kurtosis / (1 - drop_prob),
        }

    def _grad_in(self, gradient: Gradient, kernel: Kernel, *_: Any) -> Gradient:
        # Signal and gradient have the same masks, so x.g is unchanged.
        return gradient.along(kernel)


@dataclass(frozen=True)
class Scale(Lawful):
    """Multiplication by a constant."""

    rescales: ClassVar[bool] = True

    def _over_draws(self, signal: Signal, output: Signal, values: Values) -> dict[str, Any]:
        assert signal.fluctuation is not None
        factor = self.parameters["weight_variance"]
        return {
            "fluctuation": signal.fluctuation.scaled(factor),
            "centred": None if signal.centred is None else signal.centred.scaled(factor),
            "kurtosis": signal.kurtosis,
        }

    def _grad_in(self, gradient: Gradient, kernel: Kernel, *_: Any) -> Gradient:
        return replace(gradient, kernel=kernel)


@dataclass(frozen=True)
class LayerScale(Leaf):
    """Learned gains per feature on a branch (Touvron et al. 2021, CaiT).

    Their initial value is the residual connection's branch scale, which is applied there, so that
    this component only has the gains' gradient.

    Attributes:
        label: name of the gains.
        gain: their initial value, above 0.
    """

    label: str
    gain: float

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        return signal, functools.partial(self._back, signal)

    def _back(self, signal: Signal, gradient: Gradient) -> PullbackResult:
        """The unchanged gradient; that of the gains is sum_i x_i dL/dy_i in every feature."""
        return PullbackResult(gradient, functools.partial(self._weights, signal, gradient.kernel))

    def _weights(self, signal: Signal, gradient: Kernel) -> Values:
        total = (signal.second_moment() * gradient).total(signal.seq_len)
        return {self.label: signal.width * total / self.gain**2}
