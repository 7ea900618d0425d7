"""What a part of a network does to sensitivities, by token: around a record of both passes.

A number y is linear in the gradient's kernel, dy = sum(Lambda o dG), and smooth in the signal's,
dy = sum(Gamma o dC), at every point. Through a part with signals C -> C' and gradients G' -> G,

    Lambda' = (dG/dG')^T Lambda,    Gamma = (dC'/dC)^T Gamma' + d<Lambda, G>/dC.

Additions add noise (`moments.noise.network`). See docs/theory/band.md, How it travels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from .classes import ClassMatrix, OneClass, diagonal_factor, diagonal_of, one_class
from .fluctuation import norm_variance
from .state import Array, Fluctuation, Gradient, Kernel, Signal
from .trace import Record

SINGLE = np.float32
"""Precision of sensitivities and of the maps they pass through: they need no more."""


class GradientAdjoint(NamedTuple):
    """What a sensitivity at a part's input says about the part.

    Attributes:
        sensitivity: (..., L, L) Lambda', to the gradient at the output.
        exposure: what `Response.signal_adjoint` needs of it.
        noise: (...,) variance that randomness inside the part adds to y.
        coherence: (...,) share of the part's gain that overlaps of different directions have.
    """

    sensitivity: Array
    exposure: Any = None
    noise: Array = 0.0
    coherence: Array = 1.0


class SignalAdjoint(NamedTuple):
    """What a sensitivity to the signal at a part's output says about the part.

    Attributes:
        sensitivity: (..., L, L) Gamma, to the signal at the input.
        noise: (...,) variance that randomness inside the part adds to y.
    """

    sensitivity: Array
    noise: Array = 0.0


class Response(Protocol):
    """What a part does to sensitivities; kernels (targets, ..., L, L)."""

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        """From the gradient at the input to that at the output."""

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        """Sensitivity to the signal at the input, of one to that at the output.

        `exposure` is that of a `GradientAdjoint`, possibly of fewer targets: the first ones.
        """


def ratio(numerator: Array, denominator: Array) -> Array:
    """A ratio, in the numerator's precision; 0 where there is no such mode (tokens identical, or of
    zero sum)."""
    numerator, denominator = np.asarray(numerator), np.asarray(denominator)
    present = denominator != 0
    if present.all():
        result = numerator / denominator
    else:
        result = numerator / np.where(present, denominator, denominator.dtype.type(1))
        result = np.where(present, result, 0)
    return np.asarray(result, numerator.dtype)


# --- matrices over tokens: arrays (..., L, L), or on classes --------------------------------------

Matrix = Any


def matrix_of(kernel: Kernel, seq_len: int) -> Matrix:
    """A kernel's entries; tokens alike are one class of `seq_len`."""
    if kernel.classes is not None:  # of one document, for all: others are sequences of a batch
        diagonal, off_diagonal = kernel.classes.alone(kernel.diagonal, kernel.off_diagonal)
        return ClassMatrix(diagonal, off_diagonal, kernel.classes.of_one)
    if kernel.resolved:
        return kernel.off_diagonal
    diagonal, off_diagonal = np.broadcast_arrays(kernel.diagonal, kernel.off_diagonal)
    return ClassMatrix(diagonal[..., None], off_diagonal[..., None, None], one_class(seq_len))


def kernel_of(matrix: Matrix) -> Kernel:
    """The kernel of these entries."""
    if isinstance(matrix, ClassMatrix):
        if isinstance(matrix.classes, OneClass):
            return Kernel(matrix.diagonal[..., 0], matrix.off_diagonal[..., 0, 0])
        return Kernel(matrix.diagonal, matrix.off_diagonal, matrix.classes)
    return Kernel.of_matrix(matrix)


def transposed(matrix: Matrix) -> Matrix:
    return matrix.transposed() if isinstance(matrix, ClassMatrix) else np.swapaxes(matrix, -1, -2)


def symmetric(matrix: Matrix) -> Matrix:
    """The symmetric part: an antisymmetric rounding error would grow through a deep network."""
    return 0.5 * (matrix + transposed(matrix))


def total(matrix: Matrix) -> Array:
    """(...) sum of all entries."""
    return matrix.total() if isinstance(matrix, ClassMatrix) else matrix.sum((-2, -1))


def row_sums(matrix: Matrix) -> Array:
    """(..., L) sums over the second token."""
    return matrix.row_sums() if isinstance(matrix, ClassMatrix) else matrix.sum(-1)


def trace_of(matrix: Matrix) -> Array:
    """(...) sum over tokens of their own entries."""
    if isinstance(matrix, ClassMatrix):
        return matrix.trace()
    return np.trace(matrix, axis1=-2, axis2=-1)


def over_tokens(entries: Array, like: Matrix) -> Array:
    """(...) sum over tokens of a number for each."""
    if isinstance(like, ClassMatrix):
        return np.asarray((entries * like.classes.count).sum(-1))
    return np.asarray(entries.sum(-1))


def count_of(matrix: Matrix) -> float:
    """Number of tokens."""
    return float(matrix.classes.length if isinstance(matrix, ClassMatrix) else matrix.shape[-1])


def diagonal_matrix(entries: Array, like: Matrix) -> Matrix:
    """The diagonal matrices of entries (..., L)."""
    if isinstance(like, ClassMatrix):
        none = np.zeros((*entries.shape, entries.shape[-1]), entries.dtype)
        return ClassMatrix(entries, none, like.classes)
    matrix = np.zeros((*entries.shape, entries.shape[-1]), entries.dtype)
    index = np.arange(entries.shape[-1])
    matrix[..., index, index] = entries
    return matrix


def without_diagonal(matrix: Matrix) -> Matrix:
    """The same without what tokens have with themselves."""
    return matrix - diagonal_matrix(diagonal_of(matrix), matrix)


def ones(shape: tuple[int, ...], like: Matrix) -> Matrix:
    """A matrix of ones of shape (..., L, L)."""
    if isinstance(like, ClassMatrix):
        return ClassMatrix(np.ones(shape[:-1]), np.ones(shape), like.classes)
    return np.ones(shape)


def stacked(matrices: Several[Matrix], axis: Any = np.concatenate) -> Matrix:
    """Matrices one after the other along their first axis, or along a new one by np.stack."""
    first = matrices[0]
    if isinstance(first, ClassMatrix):
        diagonal, off_diagonal = (
            axis([one.diagonal for one in matrices]),
            axis([one.off_diagonal for one in matrices]),
        )
        crowded = None if first.crowded is None else axis([one.crowded for one in matrices])
        return ClassMatrix(diagonal, off_diagonal, first.classes, crowded)
    return axis(matrices)


def present(matrix: Matrix) -> bool:
    """Whether any entry is not 0."""
    if isinstance(matrix, ClassMatrix):
        return bool(np.any(matrix.diagonal) or np.any(matrix.off_diagonal))
    return bool(np.any(matrix))


def sum_of(matrices: Several[Any]) -> Any:
    """Of matrices or kernels, at least one."""
    result = matrices[0]
    for one in matrices[1:]:
        result = result + one
    return result


def grown(matrix: Matrix, first: Matrix) -> Matrix:
    """The sum, of a matrix with possibly fewer leading entries: the first ones."""
    if len(first) == len(matrix):
        return matrix + first
    return stacked([matrix[: len(first)] + first, matrix[len(first) :]])


def entrywise(function: Callable[..., Any], *matrices: Any) -> Any:
    """A function of entries, which may return several; arrays meet pairs of tokens."""
    on = next((one.classes for one in matrices if isinstance(one, ClassMatrix)), None)
    if on is None:
        return function(*matrices)
    diagonal = function(
        *(m.diagonal if isinstance(m, ClassMatrix) else diagonal_factor(m) for m in matrices)
    )
    off_diagonal = function(
        *(m.off_diagonal if isinstance(m, ClassMatrix) else m for m in matrices)
    )
    if isinstance(diagonal, tuple):
        return tuple(ClassMatrix(a, b, on) for a, b in zip(diagonal, off_diagonal, strict=True))
    return ClassMatrix(diagonal, off_diagonal, on)


def per_pair(values: Any) -> Array:
    """A number for each configuration, to meet a matrix's entries."""
    return np.asarray(values, SINGLE)[..., None, None]


def per_unit(matrix: Matrix, unit: Array) -> Matrix:
    """Entries over a number (...,); 0 where that is."""
    return entrywise(ratio, matrix, np.asarray(unit)[..., None, None])


def paired(sensitivity: Matrix, first: Matrix, second: Matrix) -> Array:
    """tr(Lambda A Lambda B) of symmetric matrices."""
    one = sensitivity @ first
    other = one if second is first else sensitivity @ second
    return total(one * transposed(other))


# --- responses of components ----------------------------------------------------------------------

STEP = 1e-4
"""Relative step of the one-sided differences, whose error is of this order."""


@dataclass(frozen=True)
class Elementwise:
    """A leaf that acts on every token alone.

    Attributes:
        onward, back: (..., L, L) derivative of an output pair by its input pair, and the factor on
            a gradient pair.
        growth, back_growth: (..., L, L) change of an output pair, and of that factor, where both
            tokens grow, over the tokens' relative growth; correlated as they were.
        back_change: (..., L, L) derivative of that factor by the pair.
        kernel, gradient: second moments at the input, gradient at the output.
    """

    onward: Matrix
    growth: Matrix
    back: Matrix
    back_change: Matrix
    back_growth: Matrix
    kernel: Matrix
    gradient: Matrix

    @classmethod
    def of(
        cls,
        forward: Callable[[Signal], Any],
        signal: Signal,
        gradient: Gradient,
        grad_out: Array,
        at_once: bool = True,
    ) -> Elementwise:
        """Differences of a leaf's `forward` around the signal that entered it.

        Args:
            grad_out: the same, as sensitivities have it.
            at_once: whether it takes several signals on an axis before those of configurations.
        """
        kernel = signal.second_moment()
        base = signal.replace(kernel=kernel, mean=0.0 * kernel.diagonal)
        first, second = kernel.over_tokens(kernel.diagonal)
        scale = Kernel.joined(kernel.diagonal, np.sqrt(first * second), kernel.resolved)
        nearer = kernel - scale.scaled(STEP).weighted(0.0, 1.0)
        risen = base.replace(kernel=kernel.scaled(1 + STEP), fluctuation=_grown(signal.fluctuation))
        ends = base, base.replace(kernel=nearer), risen
        groups = [_side_by_side(ends, grad_out.shape[:-2])] if at_once else ends
        outs: list[Matrix] = []
        backs: list[Matrix] = []
        for entering in groups:
            output, pullback = forward(entering)
            grad_in = pullback(_ones(gradient, entering.kernel)).gradient.kernel
            for result, one in ((outs, output.second_moment()), (backs, grad_in)):
                result += _each(
                    matrix_of(one, signal.seq_len), grad_out.shape, len(ends) if at_once else 1
                )
        (out, out_near, out_grown), (back, back_near, back_grown) = outs, backs
        tokens, step = (matrix_of(one, signal.seq_len) for one in (kernel, scale.scaled(STEP)))
        onward, change = (
            without_diagonal(entrywise(ratio, at - near, step))
            for at, near in ((out, out_near), (back, back_near))
        )
        growth = (out_grown - out) / STEP - onward * tokens
        back_growth = (back_grown - back) / STEP - change * tokens
        fields = (onward, growth, back, change, back_growth, tokens, grad_out)
        return cls(*(field.astype(SINGLE) for field in fields))

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        paired = sensitivity * self.gradient
        by_pair = self.back_change * paired if present(self.back_change) else None
        exposure = by_pair, self._by_size(self.back_growth * paired)
        return GradientAdjoint(self.back * sensitivity, exposure, coherence=self._coherence)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        by_pair, by_size = exposure
        size = self._by_size(self.growth * sensitivity)
        size[: len(by_size)] += by_size
        result = self.onward * sensitivity
        if by_pair is not None:
            result = grown(result, by_pair)
        return SignalAdjoint(result + diagonal_matrix(size, result))

    @functools.cached_property
    def _coherence(self) -> Array:
        factor = kernel_of(self.back)
        return ratio(factor.mean_off_diagonal(), factor.mean_diagonal())

    def _by_size(self, entries: Array) -> Array:
        """Each of two tokens has half a share in their pair."""
        return ratio(row_sums(entries), diagonal_of(self.kernel))


@dataclass(frozen=True)
class Sequence:
    """Parts one after the other."""

    parts: tuple[Response, ...]

    @property
    def shares(self) -> list[Array]:
        """Those of the parallel branches in it."""
        inner = [part for part in self.parts if isinstance(part, Sum | Sequence)]
        return inner[0].shares

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        noise, coherence, exposures = 0.0, 1.0, []
        for part in self.parts:
            sensitivity, exposure, more, share = part.gradient_adjoint(sensitivity)
            noise, coherence = noise + more, coherence * share
            exposures.append(exposure)
        return GradientAdjoint(sensitivity, exposures, noise, coherence)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        noise: Array = 0.0
        for part, exposed in zip(self.parts[::-1], exposure[::-1], strict=True):
            sensitivity, more = part.signal_adjoint(sensitivity, exposed)
            noise = noise + more
        return SignalAdjoint(sensitivity, noise)


@dataclass(frozen=True)
class Sum:
    """Branches that read the same tensor, whose outputs add up.

    Attributes:
        grad_out: (..., L, L) gradient at the output.
    """

    parts: tuple[Response, ...]
    grad_out: Array

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        steps = [part.gradient_adjoint(sensitivity) for part in self.parts]
        onward, exposures, noises, coherences = zip(*steps, strict=True)
        coherence = sum(share * one for share, one in zip(self.shares, coherences, strict=True))
        return GradientAdjoint(sum_of(onward), list(exposures), sum_of(noises), coherence)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        steps = [
            part.signal_adjoint(sensitivity, exposed)
            for part, exposed in zip(self.parts, exposure, strict=True)
        ]
        return SignalAdjoint(*map(sum_of, zip(*steps, strict=True)))

    @functools.cached_property
    def shares(self) -> list[Array]:
        """(...,) share of every branch in the variance of the gradient they send back."""
        identity = diagonal_matrix(np.ones((1, *self.grad_out.shape[:-1]), SINGLE), self.grad_out)
        sizes = [
            total(part.gradient_adjoint(identity).sensitivity[0] * self.grad_out)
            for part in self.parts
        ]
        return [ratio(size, sum(sizes)) for size in sizes]


@dataclass(frozen=True)
class Sublayer:
    """A response with a skip connection past it, around the means; kernels (..., L, L).

    Attributes:
        response: of the branch, or of the whole where there is no skip connection.
        residual: whether there is an addition.
        skip: (..., 1 or L, 1 or L) squared factor of the skip connection, 0 where there is none.
        scale: (...,) squared factor of the branch.
        entering, leaving: kernels of the signal.
        grad_in, grad_out: kernels of the gradient, at the input and at the output, in units of the
            former's trace.
        kappa: (...,) d_model times the relative variance of |branch|^2.
        back_kappa: the same of the gradient; both beyond what `response` calls noise.
        inner: number of features of all heads, where the branch attends; else None.
        attends: (...,) share of attention in what the branch adds; 1 where it is all of it.
        scatter: relative covariance of factors of its tokens that all features share and a draw
            sets; None: there are none.
        inside: part of `skip` by which the branch itself hands on what enters.
    """

    response: Response
    residual: bool
    skip: Array
    scale: Array
    entering: Matrix
    leaving: Matrix
    grad_in: Matrix
    grad_out: Matrix
    kappa: Array
    back_kappa: Array
    width: float
    inner: float | None
    attends: Array = 1.0
    scatter: Matrix | None = None
    inside: Array = 0.0

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        result = self.response.gradient_adjoint(sensitivity)
        onward = per_pair(self.scale) * result.sensitivity
        return result._replace(
            sensitivity=onward + (self.skip - self.inside) * sensitivity,
            noise=result.noise
            + self._noise(sensitivity, self.kept_gradient, self.grad_in, self.back_kappa),
        )

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        result = self.response.signal_adjoint(per_pair(self.scale) * sensitivity, exposure)
        return result._replace(
            sensitivity=result.sensitivity + (self.skip - self.inside) * sensitivity,
            noise=result.noise + self._noise(sensitivity, self.kept, self.leaving, self.kappa),
        )

    @functools.cached_property
    def kept(self) -> Matrix:
        """Of the signal that leaves, what the skip connection kept."""
        return self.skip * self.entering

    @functools.cached_property
    def kept_gradient(self) -> Matrix:
        """The same of the gradient that the part sends."""
        return self.skip * self.grad_out

    def floor(self, carried: Array, added: Array, coherent: Array, overlap: Array) -> Array:
        """Covariance of what the addition does to different directions of random overlap.

        Args:
            carried, added: parts of y through the skip connection and through the branch.
            coherent: of `added`, what the mean of the tokens carries on.
            overlap: q, second moment of the directions' correlation.
        """
        cross = 4 * carried * coherent * overlap
        if self.inner is None:
            return (cross + self.kappa * coherent**2 * overlap) / self.width
        # two matrices one after the other: behind the first, overlaps have grown by 1/inner
        twice = 2 * overlap * self.width / self.inner + 2 * (overlap + 1 / self.inner)
        common = 0.0 if np.all(self.attends == 1) else self.kappa * coherent**2 * overlap
        return (cross + twice * (self.attends * added) ** 2 + common) / self.width

    def _noise(self, sensitivity: Array, carried: Array, whole: Array, kappa: Array) -> Array:
        """Variance that an addition to what is carried adds."""
        if not self.residual:
            return np.zeros(sensitivity.shape[:-2])
        added = whole - carried
        skipped, branch = sensitivity @ carried, sensitivity @ added
        own = total((4 * skipped + per_pair(kappa) * branch) * transposed(branch)) / self.width
        if self.scatter is None:
            return own
        each = sensitivity * added
        return own + 4 * total(transposed(each) @ (self.scatter @ each))


@dataclass(frozen=True)
class Around:
    """The units in which a part's gradients are measured.

    Attributes:
        unit: (...,) trace of the gradient that the part sends.
    """

    unit: Array

    def by_token(self, values: Array, kernel: Kernel) -> Array:
        """(..., L) numbers for every token of a kernel, as sensitivities have them."""
        return np.asarray(values) if kernel.resolved else np.asarray(values)[..., None]

    def grad_out(self, record: Record) -> Matrix:
        """The gradient at the output."""
        grad_out = matrix_of(record.grad_out.kernel, record.output.seq_len)
        return in_units(grad_out, self.unit)

    def kernels(self, record: Record) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """Of the signal that enters and leaves, and of the gradient sent and received."""
        entering, leaving = (
            matrix_of(one.second_moment(), one.seq_len).astype(SINGLE)
            for one in (record.input, record.output)
        )
        grad_in = in_units(matrix_of(record.grad_in.kernel, record.input.seq_len), self.unit)
        return entering, leaving, grad_in, self.grad_out(record)

    def part(self, record: Record) -> Sublayer:
        """What a layer is made of, with a skip connection or without."""
        answer = record.component.response(record, self)
        return answer if isinstance(answer, Sublayer) else self.alone(record, answer)

    def alone(self, record: Record, answer: Response, kappa: Array = 0.0) -> Sublayer:
        """A part without a skip connection, whose own draw adds noise of that kappa."""
        adds, nothing = bool(np.any(kappa)), per_pair(0.0)
        fixed = *self.kernels(record), kappa, kappa, float(record.output.width)
        return Sublayer(answer, adds, nothing, 1.0, *fixed, heads_width(record))

    def added(self, record: Record, branch: Record, skip: Array, scale: Array) -> Sublayer:
        """What `branch` adds to a skip connection; squared factors of both."""
        answer = branch.component.response(branch, self)
        kappa, back_kappa, attends = kappas(branch, answer)
        return Sublayer(
            answer,
            True,
            per_pair(skip),
            scale,
            *self.kernels(record),
            kappa,
            back_kappa,
            float(record.output.width),
            heads_width(branch),
            attends,
        )


def heads_width(record: Record) -> float | None:
    """Number of features of all heads of self-attention, None where there is none."""
    for leaf in record.leaves():
        if leaf.component.mixes_tokens and leaf.memory is None:
            return float(leaf.output.width)
    return None


def kappas(branch: Record, answer: Any) -> tuple[Array, Array, Array]:
    """kappa, back_kappa and share of attention of `Sublayer`.

    Of parallel branches, whose sum varies by 2 (sum B)^2/d if each does by 2 B^2/d; unless a
    normalisation behind them fixes the size of the sum.
    """
    result = branch.paths()
    common = set(result[0]).intersection(*result[1:]) if len(result) > 1 else set()
    if fixed_behind(result[0], common):
        result, common = [tuple(branch.leaves())], set()
    sizes, of_signal, of_gradient, attention_flags = [], [], [], []
    for path in result:
        reached = last_matrix([leaf for leaf in path if leaf not in common]).output
        of_signal.append(_own_fluctuation(path, branch.input, reached))
        sizes.append(np.asarray(reached.second_moment().mean_diagonal()))
        attends = any(leaf.component.mixes_tokens and leaf.memory is None for leaf in path)
        of_gradient.append(2.0 if attends else of_signal[-1])
        attention_flags.append(float(attends))
    if len(result) == 1:
        return of_signal[0], of_gradient[0], 1.0
    shares = _path_shares(answer)
    return (
        _together(of_signal, [ratio(size, sum(sizes)) for size in sizes]),
        _together(of_gradient, shares),
        sum(share * one for share, one in zip(shares, attention_flags, strict=True)),
    )


def _path_shares(answer: Any) -> list[Array]:
    """Shares of every way through parallel branches, of branches in branches too; none where there
    is one way."""
    if isinstance(answer, Sequence):
        return next(filter(None, map(_path_shares, answer.parts)), [])
    if not isinstance(answer, Sum):
        return []
    return [
        share * one
        for share, part in zip(answer.shares, answer.parts, strict=True)
        for one in _path_shares(part) or [1.0]
    ]


def fixed_behind(path: Several[Record], common: set[Record]) -> bool:
    """Whether a normalisation stands behind parallel branches, in what their paths have in
    common."""
    behind = itertools.takewhile(lambda leaf: leaf in common, reversed(path))
    return any(leaf.component.normalises for leaf in behind)


def last_matrix(path: Several[Record]) -> Record:
    """A path's last leaf but dropout, whose masks, fresh for every token, average out."""
    return next(leaf for leaf in reversed(path) if not leaf.component.masks)


def _together(kappas: Several[Array], shares: Several[Array]) -> Array:
    excess = ((kappa - 2) * share**2 for kappa, share in zip(kappas, shares, strict=True))
    return 2 + sum(excess)


def _own_fluctuation(path: Several[Record], entering: Signal, reached: Signal) -> Array:
    """d_model times the relative variance of |branch|^2 that its own matrices add."""
    # What a norm divides by, and what attention averages, is tracked anew.
    anew = any(leaf.component.normalises or leaf.component.mixes_tokens for leaf in path)
    inherited = 0.0 if anew else norm_variance(entering)
    return reached.width * np.maximum(norm_variance(reached) - inherited, 0.0)


def _grown(fluctuation: Fluctuation | None) -> Fluctuation | None:
    """What varies over draws of tokens that grew by a step, correlated in every draw as they were:
    overlaps then vary in proportion (docs/theory/band.md)."""
    if fluctuation is None:
        return None
    square = (1 + STEP) ** 2
    norms, overlaps, *_ = fluctuation
    of_overlaps = None if overlaps is None else overlaps.scaled(square)
    return fluctuation._replace(norms=norms.scaled(square), overlaps=of_overlaps)


def in_units(kernel: Matrix, unit: Array) -> Matrix:
    """A gradient's kernel in these units; 0 where the unit is."""
    return per_unit(kernel, unit).astype(SINGLE)


def _side_by_side(signals: Several[Signal], axes: tuple[int, ...]) -> Signal:
    """Signals that differ in their kernels, on an axis of their own before those of
    configurations."""

    def entries(values: Several[Array], axis_count: int) -> Array:
        shape = np.shape(values[0])
        shape = np.broadcast_shapes(shape, axes + shape[len(shape) - axis_count :])
        return np.stack([np.broadcast_to(value, shape) for value in values])

    def together(values: Several[Any]) -> Any:
        first = values[0]
        if isinstance(first, Kernel):
            axis_count, several = int(bool(first.resolved)), [one.diagonal for one in values]
            off_diagonal = entries([one.off_diagonal for one in values], 2 * axis_count)
            return Kernel(entries(several, axis_count), off_diagonal, first.resolved)
        if isinstance(first, tuple):
            result = [together(one) for one in zip(*values, strict=True)]
            return type(first)(*result) if hasattr(first, "_fields") else tuple(result)
        return first

    kernel, centred, fluctuation = (
        together([getattr(one, name) for one in signals])
        for name in ("kernel", "centred", "fluctuation")
    )
    mean = 0.0 * kernel.diagonal
    return signals[0].replace(kernel=kernel, mean=mean, centred=centred, fluctuation=fluctuation)


def _each(matrix: Matrix, shape: tuple[int, ...], count: int) -> list[Matrix]:
    """Of so many matrices side by side, each; or one that is the same for all."""
    alone = count == 1 or len(matrix.shape) <= len(shape)
    return [matrix] * count if alone else [matrix[k] for k in range(count)]


def _ones(gradient: Gradient, kernel: Kernel) -> Gradient:
    """A gradient of covariance 1 everywhere, otherwise as the one given."""
    tokens = matrix_of(kernel, gradient.seq_len)
    grad_out = matrix_of(gradient.kernel, gradient.seq_len)
    even = kernel_of(ones(np.broadcast_shapes(grad_out.shape, tokens.shape), tokens))
    axes = np.ndim(gradient.kernel.diagonal)

    def spread_over(value: Array) -> Array:  # what is of every token or configuration stays that
        by_token = axes and np.ndim(value) == axes
        return np.broadcast_to(value, np.shape(even.diagonal)) if by_token else value

    radial, share = spread_over(gradient.radial), spread_over(gradient.centred_share)
    return Gradient(even, gradient.seq_len, radial, share)
