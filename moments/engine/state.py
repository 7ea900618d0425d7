"""State of a pass: the moments of a signal and of its gradient.

A `Kernel` has one number per token and one per pair of tokens, in one of three resolutions:

exchangeable     all tokens alike: `diagonal` and `off_diagonal` have shape (...,)
by class         P classes of positions (`classes`): shapes (..., P) and (..., P, P), with two
                 different tokens of one class on the diagonal of `off_diagonal`
token-resolved   `diagonal` has shape (..., L), `off_diagonal` (..., L, L) with it on its diagonal

Leading axes are configurations; without any, exchangeable entries are plain floats. All classes are
immutable by convention (declaring them frozen would double the time of construction). See
docs/theory/state.md, The kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..formulas.algebra import is_number, number_system
from ..formulas.law import Law
from .classes import PositionClasses, diagonal_factor

Array = Any  # float or numpy array; see the module docstring


def ratio_or_zero(numerator: Array, denominator: Array) -> Array:
    """A ratio, 0 where the denominator is."""
    if is_number(denominator) or np.ndim(denominator) == 0:
        return numerator / denominator if denominator else 0.0 * numerator
    if denominator.all():
        return np.asarray(numerator / denominator, dtype=float)
    result = np.zeros(np.broadcast_shapes(np.shape(numerator), denominator.shape))
    return np.divide(numerator, denominator, out=result, where=denominator != 0)


@dataclass(slots=True, eq=False)
class Kernel:
    """Second moments per token and per ordered pair of different tokens.

    `resolved` is False for exchangeable tokens, True by token, else the classes of positions.
    """

    diagonal: Array
    off_diagonal: Array
    resolved: bool | PositionClasses = False

    @property
    def classes(self) -> PositionClasses | None:
        """The classes of positions; None in the other resolutions."""
        return self.resolved if isinstance(self.resolved, PositionClasses) else None

    @classmethod
    def of_matrix(cls, matrix: Array) -> Kernel:
        """The token-resolved kernel of a (..., L, L) matrix."""
        return cls(np.diagonal(matrix, axis1=-2, axis2=-1), matrix, True)

    def with_diagonal(self, diagonal: Array) -> Kernel:
        """The kernel with another diagonal."""
        if self.resolved is not True:
            return Kernel(diagonal, self.off_diagonal, self.resolved)
        shape = np.shape(diagonal)
        matrix = np.array(np.broadcast_to(self.off_diagonal, (*shape, shape[-1])))
        index = np.arange(shape[-1])
        matrix[..., index, index] = diagonal
        return Kernel(diagonal, matrix, True)

    @classmethod
    def of_parts(
        cls, diagonal: Array, off_diagonal: Array, resolved: bool | PositionClasses
    ) -> Kernel:
        """A kernel from a diagonal and an off-diagonal computed separately."""
        kernel = cls(diagonal, off_diagonal, resolved)
        return kernel.with_diagonal(diagonal) if resolved is True else kernel

    def lift(self, value: Array) -> tuple[Array, Array]:
        """A value per configuration, with axes to broadcast against `diagonal`, `off_diagonal`."""
        if not self.resolved or np.ndim(value) == 0:
            return value, value
        return value[..., None], value[..., None, None]

    def scaled(self, factor: Array) -> Kernel:
        """The kernel times a factor per configuration."""
        if is_number(factor) and factor == 1.0:
            return self
        if not self.resolved:
            return Kernel(self.diagonal * factor, self.off_diagonal * factor)
        one, two = self.lift(factor)
        return Kernel(self.diagonal * one, self.off_diagonal * two, self.resolved)

    def with_ones(self) -> Kernel:
        """A kernel of ones of the same shape."""
        if not self.resolved:
            return Kernel(0.0 * self.diagonal + 1.0, 0.0 * self.off_diagonal + 1.0)
        return Kernel(np.ones_like(self.diagonal), np.ones_like(self.off_diagonal), self.resolved)

    def weighted(self, diagonal: Array, off_diagonal: Array) -> Kernel:
        """The kernel with separate factors on the diagonal and off-diagonal entries."""
        return Kernel.of_parts(
            self.diagonal * diagonal, self.off_diagonal * off_diagonal, self.resolved
        )

    def resolved_as(self, other: Kernel) -> Kernel:
        """An exchangeable kernel in the resolution of another; a resolved one is unchanged."""
        if self.resolved or not other.resolved:
            return self
        diagonal = np.broadcast_to(other.lift(self.diagonal)[0], np.shape(other.diagonal))
        off_diagonal = np.broadcast_to(
            other.lift(self.off_diagonal)[1], np.shape(other.off_diagonal)
        )
        return Kernel.of_parts(diagonal, off_diagonal, other.resolved)

    def mixed(self, share: Array, other: Kernel, other_share: Array) -> Kernel:
        """share * self + other_share * other."""
        if self.resolved:
            return self.scaled(share) + other.scaled(other_share)
        return Kernel(
            self.diagonal * share + other.diagonal * other_share,
            self.off_diagonal * share + other.off_diagonal * other_share,
        )

    def without_common(self) -> Kernel:
        """The kernel minus its mean over pairs of different tokens."""
        one, two = self.lift(self.mean_off_diagonal())
        return Kernel(self.diagonal - one, self.off_diagonal - two, self.resolved)

    def __add__(self, other: Kernel) -> Kernel:
        return Kernel(
            self.diagonal + other.diagonal, self.off_diagonal + other.off_diagonal, self.resolved
        )

    def __sub__(self, other: Kernel) -> Kernel:
        return Kernel(
            self.diagonal - other.diagonal, self.off_diagonal - other.off_diagonal, self.resolved
        )

    def __mul__(self, other: Kernel) -> Kernel:
        return Kernel(
            self.diagonal * other.diagonal, self.off_diagonal * other.off_diagonal, self.resolved
        )

    def at_every_pair(self, factor: Array) -> Kernel:
        """The kernel times an off-diagonal factor; its diagonal multiplies the kernel's."""
        if self.classes is not None:
            return Kernel(
                self.diagonal * diagonal_factor(factor), self.off_diagonal * factor, self.resolved
            )
        if not self.resolved:
            return Kernel(self.diagonal * factor, self.off_diagonal * factor)
        return Kernel.of_matrix(self.off_diagonal * factor)

    def transposed(self) -> Kernel:
        if not self.resolved:
            return self
        return Kernel(self.diagonal, np.swapaxes(self.off_diagonal, -1, -2), self.resolved)

    def over_tokens(self, value: Array) -> tuple[Array, Array]:
        """A value per token, broadcast as the first and as the second token of every pair."""
        if not self.resolved:
            return value, value
        return value[..., :, None], value[..., None, :]

    def mean_diagonal(self, real: Array | None = None) -> Array:
        """Average over tokens; `real` as in `average`."""
        return self.average(self.diagonal, real)

    def average(self, values: Array, real: Array | None = None) -> Array:
        """Average of values over tokens; a value common to all tokens is unchanged.

        Args:
            real: (L,) 1 for real tokens and 0 for padding, by token; None: all are real.
        """
        if not self.resolved or np.ndim(values) < np.ndim(self.diagonal):
            return values
        if self.classes is not None:
            return self.classes.mean(values)
        return np.mean(values, axis=-1) if real is None else values @ real / real.sum()

    def mean_off_diagonal(self, real: Array | None = None) -> Array:
        """Average over pairs of different tokens, `real` as in `average`; 0 for a single token."""
        if not self.resolved:
            return self.off_diagonal
        if self.classes is not None:
            return self.classes.mean_of_pairs(self.off_diagonal)
        if real is None:
            length = self.off_diagonal.shape[-1]
            total = self.off_diagonal.sum((-2, -1)) - self.diagonal.sum(-1)
        else:
            length = real.sum()
            total = self.off_diagonal @ real @ real - self.diagonal @ real
        return total / max(length * (length - 1), 1)

    def total(self, seq_len: int) -> Array:
        """Sum of all entries, over tokens and ordered pairs."""
        if self.classes is not None:
            diagonal = (self.diagonal * self.classes.count).sum(-1)
            return diagonal + self.classes.sum_of_pairs(self.off_diagonal)
        if self.resolved:
            return self.off_diagonal.sum((-2, -1))
        return seq_len * (self.diagonal + (seq_len - 1) * self.off_diagonal)


class Fluctuation(NamedTuple):
    """Covariances over draws of realised overlaps o_ij = x_i.x_j/width (module `fluctuation`).

    Attributes:
        norms: U, covariance of o_ii and o_jj; 0 behind a normalisation.
        overlaps: Y, with Cov(o_kl, o_mn) = (y_km y_ln + y_kn y_lm)/2 where y has the entries
            sqrt(Y) and the kernel's signs: 2 C o C/width for Gaussian features. It ignores that a
            normalisation fixes norms. None: not tracked.
        free_norms: U before a normalisation fixed the norms; None: `norms`.
        shared: covariances of overlaps, and of squared norms, with those at the start of the
            branch, where the first token of a pair is taken and its squared norm divided by; None:
            the branch starts here.
        drawn: relative variance of a token's squared norm, in `norms`, due to attention weights
            that are drawn in every head; independent for every token.
    """

    norms: Kernel
    overlaps: Kernel | None = None
    free_norms: Kernel | None = None
    shared: tuple[Kernel, Kernel] | None = None
    drawn: Array = 0.0

    @classmethod
    def of_gaussian(cls, kernel: Kernel, width: Array) -> Fluctuation:
        """Fluctuation of independent Gaussian features, 2 C o C/width, without overlaps."""
        return cls((kernel * kernel).scaled(2 / width))

    @classmethod
    def fixed(cls, kernel: Kernel) -> Fluctuation:
        """Fluctuation of tokens with fixed norms, without overlaps."""
        return cls(kernel.scaled(0.0))

    @property
    def before_norms(self) -> Kernel:
        """U before any normalisation."""
        return self.norms if self.free_norms is None else self.free_norms

    def scaled(self, factor: Array) -> Fluctuation:
        """Fluctuation of the tensor times sqrt(factor), inside a branch."""
        square, (norms, overlaps, free, shared, _) = factor * factor, self
        if shared is not None:
            shared = shared[0].scaled(factor), shared[1].scaled(factor)
        return Fluctuation(
            norms.scaled(square),
            None if overlaps is None else overlaps.scaled(square),
            None if free is None else free.scaled(square),
            shared,
            self.drawn,
        )


@dataclass(slots=True, eq=False)
class Signal:
    """Moments of a tensor of shape (tokens, features) with exchangeable features.

    Attributes:
        kernel: variances and token covariances about the ensemble mean.
        mean: ensemble mean, per token where resolved.
        hidden_covariance: covariance between two features of one token (published theory).
        fluctuation: of norms and overlaps over draws (refined theory); None: not tracked.
        centred: part of `kernel` whose features already average to zero within every token.
        kurtosis: fourth moment of an entry over its squared second moment; 3 means Gaussian.
        diagnostics: further statistics by the component that produced the signal.
        notes: warnings by that component about the accuracy of the moments.
        stream_deviation: if the signal is the mean of several streams, the kernel of a stream's
            deviation from it; None: a single stream, or copies.
    """

    kernel: Kernel
    seq_len: int
    mean: Array = 0.0
    width: Array = 1.0
    hidden_covariance: Array = 0.0
    fluctuation: Fluctuation | None = None
    centred: Kernel | None = None
    kurtosis: Array = 3.0
    diagnostics: Mapping[str, Array] | None = None
    notes: tuple[str, ...] = ()
    stream_deviation: Kernel | None = None

    @property
    def algebra(self) -> Any:
        """Number system of the entries: plain floats if there are no axes."""
        return number_system(self.kernel.diagonal)

    @property
    def resolved(self) -> bool | PositionClasses:
        return self.kernel.resolved

    def correlation(self) -> Array:
        """Correlation of every pair, clipped to [-1, 1]; 0 without variance."""
        kernel = self.kernel
        if is_number(kernel.diagonal):
            return min(1.0, max(-1.0, ratio_or_zero(kernel.off_diagonal, kernel.diagonal)))
        first, second = kernel.over_tokens(kernel.diagonal)
        scale = np.sqrt(first * second) if kernel.resolved else first
        return np.minimum(np.maximum(ratio_or_zero(kernel.off_diagonal, scale), -1.0), 1.0)

    def cosine_square(self) -> Array:
        """Squared cosine between the vectors of every pair of tokens, means included."""
        tokens = self.second_moment()
        first, second = tokens.over_tokens(tokens.diagonal)
        return ratio_or_zero(tokens.off_diagonal * tokens.off_diagonal, first * second)

    def second_moment(self) -> Kernel:
        """E x_i x_j, the kernel about zero instead of the mean."""
        kernel, mean = self.kernel, self.mean
        if is_number(mean) and mean == 0.0:
            return kernel
        first, second = kernel.over_tokens(mean) if np.ndim(mean) else (mean, mean)
        return Kernel(
            kernel.diagonal + mean * mean, kernel.off_diagonal + first * second, kernel.resolved
        )

    def replace(self, **changes: Any) -> Signal:
        return replace(self, **changes)


@dataclass(slots=True, eq=False)
class Gradient:
    """Moments of dLoss/dx at one point; the mean is zero.

    Attributes:
        kernel: variances and token covariances.
        radial: variance of the gradient's component along the signal, over that of any other
            component: 0.0 if everything downstream ignores the signal's scale, 1 if nothing is
            known. For all tokens or per token.
        centred_share: share of the variance whose features already average to zero.
        norm_response: relative decrease of a token's variance per relative increase of the signal's
            squared norm, for all tokens or per token: 1 before a normalisation.
        persistence: relative growth that a branch's parts have to apply to the gradient they
            return: (kernel, value per token) for parts that act on tokens separately and for
            attention (`directions.persistence`, `directions.shared_persistence`).
        stream_deviation: as `Signal.stream_deviation`.
        alone: share of what a branch returns to a token that comes from what this token itself
            receives; None: all of it, or nothing if the branch mixes tokens.
    """

    kernel: Kernel
    seq_len: int
    radial: Array = 1.0
    centred_share: Array = 0.0
    norm_response: Array = 0.0
    persistence: tuple[Kernel, Array] | None = None
    stream_deviation: Kernel | None = None
    alone: Array | None = None

    @property
    def orthogonal(self) -> bool:
        """Whether the gradient has no component along the signal."""
        return is_number(self.radial) and self.radial == 0.0

    @property
    def resolved(self) -> bool | PositionClasses:
        return self.kernel.resolved

    def with_kernel(self, kernel: Kernel) -> Gradient:
        """A gradient with this kernel and unknown directions."""
        return Gradient(kernel, self.seq_len)

    def joined(self, other: Kernel) -> Gradient:
        """The sum with an independent gradient of unknown directions."""
        total = self.kernel + other
        one = ratio_or_zero(self.kernel.diagonal, total.diagonal)
        mean = ratio_or_zero(self.kernel.mean_diagonal(), total.mean_diagonal())
        return replace(
            self,
            kernel=total,
            radial=1.0 - one * (1.0 - self.radial),
            centred_share=self.centred_share * mean,
        )

    def along(self, kernel: Kernel) -> Gradient:
        """The gradient behind a map that preserves x.g and the tokens' norms."""
        return Gradient(kernel, self.seq_len, self.radial, norm_response=self.norm_response)

    def averaged(self) -> Gradient:
        """The gradient with `radial` and `norm_response` averaged over tokens by variance."""
        if not self.resolved:
            return self
        return replace(
            self, radial=self._average(self.radial), norm_response=self._average(self.norm_response)
        )

    def _average(self, value: Array) -> Array:
        kernel = self.kernel
        if np.ndim(value) == 0 or np.ndim(value) < np.ndim(kernel.diagonal):
            return value
        sizes = kernel.diagonal
        return ratio_or_zero(kernel.average(value * sizes), kernel.average(sizes))

    def for_addend(
        self, kernel: Kernel, share: Array, persistence: tuple[Kernel, Array] | None = None
    ) -> Gradient:
        """The gradient at one of two independent addends, of `share` of the sum's variance.

        Of the component that it lacks along x = a + b, `share` lies along a: E (a.g)^2 =
        |a|^2 |g|^2/d times 1 - share (1 - radial). |x|^2 changes by `share` times that of |a|^2.
        """
        radial = 1.0 - share * (1.0 - self.radial)
        response = share * self.norm_response
        return Gradient(
            kernel, self.seq_len, radial, norm_response=response, persistence=persistence
        )


# --- evaluation of laws ---------------------------------------------------------------------------

Values = dict[str, Array]

Observer = Callable[[Law, Mapping[str, Array], Array], None]

_OBSERVER: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed(by: Observer | None) -> Iterator[None]:
    """Call `by` with every law evaluated inside the context, in this thread or task; None: stop."""
    token = _OBSERVER.set(by)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def bind(signal: Signal, parameters: Mapping[str, Array]) -> tuple[Values, Values]:
    """Values of the laws' symbols for one token, and for a pair of tokens.

    For exchangeable tokens both are the same dictionary, since published laws mix the symbols.
    """
    kernel = signal.kernel
    if not signal.resolved:
        values = dict(parameters)
        values["x_mean"] = values["x_other_mean"] = signal.mean
        values["x_variance"] = values["x_other_variance"] = kernel.diagonal
        values["x_correlation"] = signal.correlation()
        if signal.fluctuation is None:
            hidden = ratio_or_zero(signal.hidden_covariance, kernel.diagonal)
            values["x_hidden_correlation"] = hidden
        return values, values
    lifted = {name: kernel.lift(value) for name, value in parameters.items()}
    single = {name: one for name, (one, _) in lifted.items()}
    single |= {"x_mean": signal.mean, "x_variance": kernel.diagonal}
    pair = {name: two for name, (_, two) in lifted.items()}
    pair["x_variance"], pair["x_other_variance"] = kernel.over_tokens(kernel.diagonal)
    pair["x_mean"], pair["x_other_mean"] = kernel.over_tokens(signal.mean + 0 * kernel.diagonal)
    pair["x_correlation"] = signal.correlation()
    return single, pair


def evaluate(law: Law, algebra: Any, values: Values) -> Array:
    """Evaluate a law on bound values, in the number system of the signal."""
    result = law.formula(algebra, *law.pick(values))
    if (observer := _OBSERVER.get()) is not None:
        observer(law, values, result)
    return result


def evaluate_sides(
    law: Law, algebra: Any, values: Values, sides: tuple[Values, Values] | None
) -> tuple[Array, Array]:
    """Evaluate a law at `values` updated by either of two `sides`; None: twice at `values`.

    An observer sees the law at `values`.
    """
    if sides is None:
        return (evaluate(law, algebra, values),) * 2
    if (observer := _OBSERVER.get()) is not None:
        observer(law, values, law.formula(algebra, *law.pick(values)))
    one, two = (law.formula(algebra, *law.pick(values | side)) for side in sides)
    return one, two
