"""The leaves that hold laws: linear maps, activations, dropout, scales, and whole published blocks.

Each takes its laws as data, so that a theory is a choice of laws and never a branch in the engine.
Normalisation and refined attention, which need more than two laws, have modules of their own.

See docs/theory/norms.md, Squared norms.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from ..engine.composition import Hidden, Leaf, OfEntry, Pullback, Pulled
from ..engine.directions import isotropic, knows_directions, realigned, shortened, without
from ..engine.fluctuation import (
    OverlapWalk,
    UnsharedOverlap,
    activated,
    dropped,
    elasticity,
    followed,
    mapped,
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
    """A leaf whose moments follow from its laws alone.

    Attributes:
        theory: which of them to use.
        label: site name in a trace.
        parameters: values of the laws' symbols that the signal does not carry, such as fan_in.
        width: number of features of the output; None: that of the input.
    """

    laws: ComponentLaws
    theory: Theory
    label: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    width: Any = None

    def of_entry(self, algebra: Any, names: tuple[str, ...] = ()) -> OfEntry:
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
        if not np.all(kernel.diagonal):  # a constant's square less its mean's may round below 0
            variance = np.maximum(variance, 0.0)
        off_diagonal = evaluate(laws["covariance"], algebra, two) + 0 * kernel.off_diagonal
        output = Signal(
            Kernel.joined(variance, off_diagonal, signal.resolved),
            signal.seq_len,
            mean=evaluate(laws["mean"], algebra, one),
            width=signal.width if self.width is None else self.width,
        )
        more: dict[str, Any] = {}
        limit = laws["variance"].domain.get("x_variance")
        bounded = limit is not None and limit.upper < np.inf
        if limit is not None and bounded and not limit.contains(kernel.mean_diagonal()):
            note = f"the input's variance is outside {limit}, where the laws are resolved"
            more["notes"] = (note,)
        if signal.fluctuation is not None:
            more |= self._over_draws(signal, output, one)
        elif not signal.resolved and "hidden_covariance" in laws:
            more["hidden_covariance"] = evaluate(laws["hidden_covariance"], algebra, one)
        if more:
            output = output.replace(**more)

        back, back_pairs = laws.get("grad_variance"), laws.get("grad_covariance")
        if back is None or back_pairs is None:
            raise DomainError(f"theory {self.theory!r} states no gradient of {self.laws.name}")
        if signal.resolved:
            # Matrices that the way back does not need are not kept.
            kept = (*back.arguments, "x_variance")
            one = {name: one[name] for name in kept if name in one}
            two = {name: two[name] for name in back_pairs.arguments if name in two}
        return output, functools.partial(self._back, signal, output, one, two)

    def _back(
        self, signal: Signal, output: Signal, one: Values, two: Values, gradient: Gradient
    ) -> Pulled:
        """The way back, around what entered and left; `one` and `two` are values of the laws'
        symbols, for a token and for a pair."""
        laws, algebra = self.laws.under(self.theory), signal.algebra
        diagonal, off_diagonal = gradient.kernel.diagonal, gradient.kernel.off_diagonal
        given = {"grad_variance": diagonal, "grad_covariance": off_diagonal}
        variance = evaluate(laws["grad_variance"], algebra, one | given)
        pair = (two if gradient.resolved else one) | given
        off_diagonal = evaluate(laws["grad_covariance"], algebra, pair)
        kernel = Kernel.joined(variance, off_diagonal, gradient.resolved)
        sent = self._sent(gradient, kernel, signal, output, one)
        return Pulled(sent, functools.partial(self._weights, signal, gradient))

    def _sent(
        self, gradient: Gradient, kernel: Kernel, signal: Signal, output: Signal, one: Values
    ) -> Gradient:
        """The gradient at the input, of second moments `kernel`."""
        return gradient.with_kernel(kernel)

    def _over_draws(self, signal: Signal, output: Signal, values: Values) -> dict[str, Any]:
        """What varies over draws of an output of these moments: fields of `Signal`."""
        return {}

    def _weights(self, signal: Signal, gradient: Gradient) -> Values:
        """Of what entered and of the gradient at the output, as `Pulled.weights`."""
        return {}


@dataclass(frozen=True)
class Linear(Lawful):
    """A weight matrix, with a bias where `parameters` holds its `bias_variance`.

    Attributes:
        weight: its name in the table of weight gradients.
        has_bias: whether there is a bias, of any variance, that receives a gradient.
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
        return {"fluctuation": mapped(signal, output, gain)}

    def _sent(
        self, gradient: Gradient, kernel: Kernel, signal: Signal, output: Signal, one: Values
    ) -> Gradient:
        # x.W^T g = (W x).g: what g lacks along W x, W^T g lacks along x.
        if not isotropic(gradient.radial):
            kernel = without(kernel, signal, (1 - gradient.radial) / self.parameters["fan_in"])
        return gradient.along(kernel)

    def _weights(self, signal: Signal, gradient: Gradient) -> Values:
        # dW = sum_i g_i x_i^T, so E|dW|^2 = d_out d_in sum_ij E[g_i g_j] E[x_i x_j]; and
        # db = sum_i g_i. Where gradients fall with the tokens' norms, they meet shorter tokens.
        width = self.parameters["fan_out"]
        tokens = signal.second_moment()
        if signal.fluctuation is not None:
            tokens = shortened(tokens, signal.fluctuation.norms, gradient.norm_response)
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
        slope = 0.0 if followed(signal) is None else self._slope(signal, values)
        return {"fluctuation": activated(signal, output, kurtosis, slope), "kurtosis": kurtosis}

    def _slope(self, signal: Signal, values: Values) -> Array:
        """Change of a covariance per change of the input's, at the mean correlation."""
        law = self.laws.under(self.theory)["grad_covariance"]
        kernel, mean = signal.kernel, signal.mean
        diagonal, off_diagonal = kernel.mean_diagonal(), kernel.mean_off_diagonal()
        given = dict(self.parameters)
        given["x_variance"] = given["x_other_variance"] = diagonal
        given["x_mean"] = given["x_other_mean"] = kernel.average(mean)
        given["x_correlation"] = np.clip(ratio_or_zero(off_diagonal, diagonal), -1.0, 1.0)
        given["grad_covariance"] = 1.0
        return evaluate(law, signal.algebra, given)

    def _sent(
        self, gradient: Gradient, kernel: Kernel, signal: Signal, output: Signal, one: Values
    ) -> Gradient:
        algebra, entering = signal.algebra, signal.kernel
        if output.fluctuation is not None and knows_directions(gradient):
            alignment = faintly(self.laws.under(self.theory)["alignment"], algebra, one)
            kernel = realigned(kernel, output, gradient, alignment)
        if not np.all(entering.diagonal):
            kernel = self._at_rest(kernel, entering, algebra)
        return gradient.with_kernel(kernel)

    def _at_rest(self, kernel: Kernel, entering: Kernel, algebra: Any) -> Kernel:
        """The gradient where inputs are 0: kinks have the slope of their flatter side there.

        Laws have it in the limit of small inputs, which see both sides: with slopes l and u,
        E f'(x)^2 = (l^2 + u^2)/2, and E f'(x) f'(-x) = l u. torch takes l of ReLU and its leaky
        relatives.
        """
        laws = self.laws.under(self.theory)
        still = dict(self.parameters) | {"x_variance": 0.0, "x_other_variance": 0.0}
        still |= {"grad_variance": 1.0, "grad_covariance": 1.0, "x_correlation": -1.0}
        square = float(evaluate(laws["grad_variance"], algebra, still))
        product = float(evaluate(laws["grad_covariance"], algebra, still))
        flat = square - max(square * square - product * product, 0.0) ** 0.5
        mean = 0.5 * (square + product)  # ((l + u)/2)^2
        nothing = np.asarray(entering.diagonal) == 0.0
        alone: Array = np.where(nothing, ratio_or_zero(flat, square), 1.0)
        one: Array = np.where(nothing, ratio_or_zero(flat, mean) ** 0.5, 1.0)
        if algebra.scalar:
            alone, one = float(alone), float(one)
        first, second = entering.over_tokens(one)
        return kernel.weighted(alone, first * second)


def entrywise_overlap(
    leaf: Leaf,
    record: Record,
    at: UnsharedOverlap,
    real: Array | None,
    laws: ComponentLaws | None = None,
    square: float = 1.0,
) -> UnsharedOverlap:
    """Behind a function of every feature by itself, that of `laws` of inputs whose squares are
    `square` times these; None: of features whose slopes tokens do not share."""
    before, after, units = record.input, record.output, 1.0
    if laws is not None:
        variance = float(before.kernel.mean_diagonal(real))
        common = float(before.kernel.mean_off_diagonal(real))
        units = concentration(laws, square * variance, ratio_or_zero(common, variance))
    moved = elasticity(leaf, before, after, real)
    return at.activated(moved, (before.width, after.width), units)


@functools.lru_cache(maxsize=1024)
def concentration(
    laws: ComponentLaws,
    variance: float,
    correlation: float,
    factor: tuple[float, float, float] | None = None,
) -> float:
    """E s^4/(E s^2)^2 over features, s^2 the variance of f(x) given what all tokens share of x.

    Where tokens share most of x, a feature of large slope has it for all of them: their overlaps
    are sums over fewer features by that number. Derived here, by quadrature: x = sqrt(v r) z +
    sqrt(v (1 - r)) e with z shared; behind a gate s^2 is that of f(x) u, u = shift + a Gaussian.

    Args:
        laws: of f; 1 where they do not name it.
        variance, correlation: v and r, of two tokens' x.
        factor: variance and correlation of u, and the shift; None: there is no gate.
    """
    if laws.entrywise is None or not variance > 0.0:
        return 1.0
    function, nearest = laws.entrywise[0], 1.0 - 1e-6  # where a function is linear in the rest
    r = min(max(correlation, 0.0), nearest)
    z = (np.arange(160) + 0.5) / 12.5 - 6.4
    weights = np.exp(-(z**2) / 2)
    weights /= weights.sum()
    shared = (variance * r) ** 0.5 * z
    nodes, masses = np.polynomial.hermite_e.hermegauss(16)
    values = function(NUMPY, shared[:, None] + (variance * (1.0 - r)) ** 0.5 * nodes)
    mean, square = (values**k @ masses / masses.sum() for k in (1, 2))
    spread = (values - mean[:, None]) ** 2 @ masses / masses.sum()
    common, fourth, alone = 1.0, 1.0, 0.0  # E m^2, E m^4 and variance of u = m + its own
    if factor is not None:
        size, other, shift = factor[0], min(factor[1], nearest), factor[2]
        common, alone = size * other + shift**2, size * (1.0 - other)
        fourth = 3.0 * (size * other) ** 2 + 6.0 * size * other * shift**2 + shift**4
    first = float(weights @ (spread * common + square * alone))
    second = spread**2 * fourth + 2.0 * spread * common * square * alone + (square * alone) ** 2
    return float(weights @ second) / first**2 if first > 0.0 else 1.0


FAINT = 1e-30
"""A variance that stands for none in ratios of a function's moments: their limit there."""


def faintly(law: Law, algebra: Any, values: Values) -> Array:
    """A law that is 0/0 without any input, as the limit of small ones."""
    v = values["x_variance"]
    least = max(v, FAINT) if algebra.scalar else np.maximum(v, FAINT)
    return evaluate(law, algebra, values | {"x_variance": least})


@dataclass(frozen=True)
class Dropout(Lawful):
    """Dropout with fresh masks for every token and entry."""

    masks: ClassVar[bool] = True

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return entrywise_overlap(self, record, at, walk.real)

    def _over_draws(self, signal: Signal, output: Signal, values: Values) -> dict[str, Any]:
        drop_prob = self.parameters["drop_prob"]
        return {
            "fluctuation": dropped(signal, drop_prob),
            "centred": signal.centred,
            "kurtosis": signal.kurtosis / (1 - drop_prob),
        }

    def _sent(self, gradient: Gradient, kernel: Kernel, *_: Any) -> Gradient:
        # The masks of a signal are those of its gradient: x'.g' is what it was.
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

    def _sent(self, gradient: Gradient, kernel: Kernel, *_: Any) -> Gradient:
        return replace(gradient, kernel=kernel)


@dataclass(frozen=True)
class LayerScale(Leaf):
    """Gains per feature that multiply a branch (Touvron et al. 2021, CaiT), as parameters.

    They start at the residual connection's own factor, which multiplies the branch behind this.

    Attributes:
        label: name of the gains.
        gain: that factor; above 0.
    """

    label: str
    gain: float

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        return signal, functools.partial(self._back, signal)

    def _back(self, signal: Signal, gradient: Gradient) -> Pulled:
        """The gradient as it came; the gains' is dL/dg = sum_i x_i dL/dy_i in every feature."""
        return Pulled(gradient, functools.partial(self._weights, signal, gradient.kernel))

    def _weights(self, signal: Signal, gradient: Kernel) -> Values:
        total = (signal.second_moment() * gradient).total(signal.seq_len)
        return {self.label: signal.width * total / self.gain**2}
