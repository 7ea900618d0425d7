"""Adjoints of a part of a network: how sensitivities pass through it, around recorded moments.

A scalar y is linear in the gradient's kernel, dy = sum(Lambda o dG), and smooth in the signal's,
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
"""Precision of sensitivities and of the maps they pass through."""


class GradientAdjoint(NamedTuple):
    """Result of propagating a sensitivity to gradients forward through a part.

    Attributes:
        sensitivity: (..., L, L) Lambda', to the gradient at the output.
        exposure: input of `Response.signal_adjoint`, from which d<Lambda, G>/dC follows.
        noise: (...,) variance of y due to randomness inside the part.
        coherence: (...,) gain of the overlap of two orthogonal directions, over the part's gain.
    """

    sensitivity: Array
    exposure: Any = None
    noise: Array = 0.0
    coherence: Array = 1.0


class SignalAdjoint(NamedTuple):
    """Result of propagating a sensitivity to signals backward through a part.

    Attributes:
        sensitivity: (..., L, L) Gamma, to the signal at the input.
        noise: (...,) variance of y due to randomness inside the part.
    """

    sensitivity: Array
    noise: Array = 0.0


class Response(Protocol):
    """Adjoints of a part; sensitivities (targets, ..., L, L) have one target per scalar y."""

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        """Propagate a sensitivity from the gradient at the input to that at the output."""

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        """Propagate a sensitivity from the signal at the output to that at the input; `exposure` is
        that of a `GradientAdjoint`, of the same targets or the first ones."""


def ratio(numerator: Array, denominator: Array) -> Array:
    """A ratio in the numerator's precision, 0 where the denominator is."""
    numerator, denominator = np.asarray(numerator), np.asarray(denominator)
    any_nonzero = denominator != 0
    if any_nonzero.all():
        result = numerator / denominator
    else:
        result = numerator / np.where(any_nonzero, denominator, denominator.dtype.type(1))
        result = np.where(any_nonzero, result, 0)
    return np.asarray(result, numerator.dtype)


# --- matrices over tokens -------------------------------------------------------------------------

Matrix = Any
"""An array (..., L, L) or a `ClassMatrix`."""


def matrix_of(kernel: Kernel, seq_len: int) -> Matrix:
    """A kernel as a matrix; exchangeable tokens are one class of `seq_len`."""
    if kernel.classes is not None:  # other documents are treated as sequences of a batch
        diagonal, off_diagonal = kernel.classes.within_block(kernel.diagonal, kernel.off_diagonal)
        return ClassMatrix(diagonal, off_diagonal, kernel.classes.one_document_with_words)
    if kernel.resolved:
        return kernel.off_diagonal
    diagonal, off_diagonal = np.broadcast_arrays(kernel.diagonal, kernel.off_diagonal)
    return ClassMatrix(diagonal[..., None], off_diagonal[..., None, None], one_class(seq_len))


def kernel_of(matrix: Matrix) -> Kernel:
    """The inverse of `matrix_of`."""
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
    """(...) sum of the diagonal over tokens."""
    if isinstance(matrix, ClassMatrix):
        return matrix.trace()
    return np.trace(matrix, axis1=-2, axis2=-1)


def over_tokens(entries: Array, like: Matrix) -> Array:
    """(...) sum over tokens of values (..., L)."""
    if isinstance(like, ClassMatrix):
        return np.asarray((entries * like.classes.count).sum(-1))
    return np.asarray(entries.sum(-1))


def count_of(matrix: Matrix) -> float:
    """Number of tokens."""
    return float(matrix.classes.length if isinstance(matrix, ClassMatrix) else matrix.shape[-1])


def diagonal_matrix(entries: Array, like: Matrix) -> Matrix:
    """The diagonal matrix of entries (..., L)."""
    if isinstance(like, ClassMatrix):
        zeros = np.zeros((*entries.shape, entries.shape[-1]), entries.dtype)
        return ClassMatrix(entries, zeros, like.classes)
    matrix = np.zeros((*entries.shape, entries.shape[-1]), entries.dtype)
    index = np.arange(entries.shape[-1])
    matrix[..., index, index] = entries
    return matrix


def without_diagonal(matrix: Matrix) -> Matrix:
    return matrix - diagonal_matrix(diagonal_of(matrix), matrix)


def ones(shape: tuple[int, ...], like: Matrix) -> Matrix:
    if isinstance(like, ClassMatrix):
        return ClassMatrix(np.ones(shape[:-1]), np.ones(shape), like.classes)
    return np.ones(shape)


def stacked(matrices: Several[Matrix], axis: Any = np.concatenate) -> Matrix:
    """Join matrices along their first axis, or by `np.stack` along a new one."""
    first = matrices[0]
    if isinstance(first, ClassMatrix):
        diagonal = axis([one.diagonal for one in matrices])
        off_diagonal = axis([one.off_diagonal for one in matrices])
        crowded = (
            None
            if first.same_word_ratio is None
            else axis([one.same_word_ratio for one in matrices])
        )
        return ClassMatrix(diagonal, off_diagonal, first.classes, crowded)
    return axis(matrices)


def any_nonzero(matrix: Matrix) -> bool:
    """Whether any entry is nonzero."""
    if isinstance(matrix, ClassMatrix):
        return bool(np.any(matrix.diagonal) or np.any(matrix.off_diagonal))
    return bool(np.any(matrix))


def sum_of(matrices: Several[Any]) -> Any:
    """Sum of one or more matrices or kernels."""
    result = matrices[0]
    for one in matrices[1:]:
        result = result + one
    return result


def added_to_first(matrix: Matrix, first: Matrix) -> Matrix:
    """Add a matrix of the first targets to one of all targets."""
    if len(first) == len(matrix):
        return matrix + first
    return stacked([matrix[: len(first)] + first, matrix[len(first) :]])


def entrywise(function: Callable[..., Any], *matrices: Any) -> Any:
    """Apply a function of entries, which may return a tuple, to matrices; arrays broadcast."""
    classes = next((one.classes for one in matrices if isinstance(one, ClassMatrix)), None)
    if classes is None:
        return function(*matrices)
    diagonal = function(
        *(m.diagonal if isinstance(m, ClassMatrix) else diagonal_factor(m) for m in matrices)
    )
    off_diagonal = function(
        *(m.off_diagonal if isinstance(m, ClassMatrix) else m for m in matrices)
    )
    if isinstance(diagonal, tuple):
        pairs = zip(diagonal, off_diagonal, strict=True)
        return tuple(ClassMatrix(*pair, classes) for pair in pairs)
    return ClassMatrix(diagonal, off_diagonal, classes)


def per_pair(values: Any) -> Array:
    """Values (...,) with axes to broadcast against a matrix."""
    return np.asarray(values, SINGLE)[..., None, None]


def per_unit(matrix: Matrix, unit: Array) -> Matrix:
    """A matrix over values (...,), 0 where these are."""
    return entrywise(ratio, matrix, np.asarray(unit)[..., None, None])


def trace_of_products(sensitivity: Matrix, first: Matrix, second: Matrix) -> Array:
    """tr(Lambda A Lambda B) of symmetric matrices."""
    left = sensitivity @ first
    right = left if second is first else sensitivity @ second
    return total(left * transposed(right))


# --- responses of components ----------------------------------------------------------------------

STEP = 1e-4
"""Relative step of the one-sided differences, whose error is of this order."""


@dataclass(frozen=True)
class Elementwise:
    """Adjoints of a leaf that acts on every token separately; all matrices (..., L, L).

    An entry C'_ij of the output's kernel is a function of C_ij and of the squared norms of tokens i
    and j, and so is the factor B_ij on the gradient, G_ij = B_ij G'_ij.

    Attributes:
        slope: dC'_ij/dC_ij, 0 for i = j.
        growth: derivative of C'_ij by the relative growth of both squared norms at constant C_ij.
        factor: B_ij.
        factor_slope, factor_growth: likewise of B_ij.
        kernel: C, second moments at the input.
        gradient: G', at the output.
    """

    slope: Matrix
    growth: Matrix
    factor: Matrix
    factor_slope: Matrix
    factor_growth: Matrix
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
        """Differentiate a leaf's `forward` numerically at the signal that entered it.

        Args:
            forward: as `composition.Leaf.forward`.
            gradient: at the output.
            grad_out: the kernel of `gradient`, in the units of sensitivities.
            at_once: whether `forward` accepts several signals stacked on a first axis.
        """
        kernel = signal.second_moment()
        base = signal.replace(kernel=kernel, mean=0.0 * kernel.diagonal)
        first, second = kernel.over_tokens(kernel.diagonal)
        scale = Kernel.of_parts(kernel.diagonal, np.sqrt(first * second), kernel.resolved)
        decorrelated = base.replace(kernel=kernel - scale.scaled(STEP).weighted(0.0, 1.0))
        enlarged = base.replace(
            kernel=kernel.scaled(1 + STEP), fluctuation=_grown(signal.fluctuation)
        )
        inputs = base, decorrelated, enlarged
        groups = [_side_by_side(inputs, grad_out.shape[:-2])] if at_once else inputs
        count = len(inputs) if at_once else 1
        outputs: list[Matrix] = []
        factors: list[Matrix] = []
        for entering in groups:
            output, pullback = forward(entering)
            grad_in = pullback(_ones(gradient, entering.kernel)).gradient.kernel
            for result, one in ((outputs, output.second_moment()), (factors, grad_in)):
                result += _each(matrix_of(one, signal.seq_len), grad_out.shape, count)
        tokens, step = (matrix_of(one, signal.seq_len) for one in (kernel, scale.scaled(STEP)))

        def derivatives(at: Matrix, decorrelated: Matrix, enlarged: Matrix) -> tuple[Matrix, ...]:
            slope = without_diagonal(entrywise(ratio, at - decorrelated, step))
            return slope, (enlarged - at) / STEP - slope * tokens

        fields = (*derivatives(*outputs), factors[0], *derivatives(*factors), tokens, grad_out)
        return cls(*(field.astype(SINGLE) for field in fields))

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        weights = sensitivity * self.gradient
        by_pair = self.factor_slope * weights if any_nonzero(self.factor_slope) else None
        exposure = by_pair, self._by_size(self.factor_growth * weights)
        return GradientAdjoint(self.factor * sensitivity, exposure, coherence=self._coherence)

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        by_pair, by_size = exposure
        size = self._by_size(self.growth * sensitivity)
        size[: len(by_size)] += by_size
        result = self.slope * sensitivity
        if by_pair is not None:
            result = added_to_first(result, by_pair)
        return SignalAdjoint(result + diagonal_matrix(size, result))

    @functools.cached_property
    def _coherence(self) -> Array:
        factor = kernel_of(self.factor)
        return ratio(factor.mean_off_diagonal(), factor.mean_diagonal())

    def _by_size(self, growth: Array) -> Array:
        """Sensitivity to each token's size: half of every pair belongs to either token."""
        return ratio(row_sums(growth), diagonal_of(self.kernel))


@dataclass(frozen=True)
class Sequence:
    """Parts one after the other."""

    parts: tuple[Response, ...]

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
    """Parallel branches of one tensor; `grad_out` (..., L, L) is the gradient at their sum."""

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
        """(...,) share of each branch in the variance of the gradient at the input."""
        identity = diagonal_matrix(np.ones((1, *self.grad_out.shape[:-1]), SINGLE), self.grad_out)
        sizes = [
            total(part.gradient_adjoint(identity).sensitivity[0] * self.grad_out)
            for part in self.parts
        ]
        return [ratio(size, sum(sizes)) for size in sizes]


@dataclass(frozen=True)
class Sublayer:
    """Adjoints and noise of a residual sum, or of a part without one; kernels (..., L, L).

    Attributes:
        response: of the branch, or of the whole part if there is no skip connection.
        residual: whether the part adds noise of its own, as a residual sum does.
        skip: (..., 1 or L, 1 or L) squared factor of the skip connection, 0 if there is none.
        scale: (...,) squared factor of the branch.
        entering, leaving: kernels of the signal at the input and at the output.
        grad_in, grad_out: kernels of the gradient there, over the trace of the former.
        kappa: (...,) width times the relative variance of |branch|^2, without the noise that
            `response` returns.
        back_kappa: likewise for the gradient that leaves the branch.
        inner: number of features of all heads if the branch has self-attention; else None.
        attends: (...,) share of attention in the gradient of the branch.
        scatter: relative covariance over draws of a random factor of each token of the branch, the
            same for all features; None: no such factor.
        inside: part of `skip` that runs through the branch itself (bottom-to-top).
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
        branch = per_pair(self.scale) * result.sensitivity
        noise = self._noise(sensitivity, self.kept_gradient, self.grad_in, self.back_kappa)
        return result._replace(
            sensitivity=branch + (self.skip - self.inside) * sensitivity,
            noise=result.noise + noise,
        )

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        result = self.response.signal_adjoint(per_pair(self.scale) * sensitivity, exposure)
        return result._replace(
            sensitivity=result.sensitivity + (self.skip - self.inside) * sensitivity,
            noise=result.noise + self._noise(sensitivity, self.kept, self.leaving, self.kappa),
        )

    @functools.cached_property
    def kept(self) -> Matrix:
        """Kernel of the skip connection's share of the output."""
        return self.skip * self.entering

    @functools.cached_property
    def kept_gradient(self) -> Matrix:
        """Kernel of the skip connection's share of the gradient at the input."""
        return self.skip * self.grad_out

    def floor(self, carried: Array, added: Array, coherent: Array, overlap: Array) -> Array:
        """Noise covariance of contributions to y in directions whose overlap is random, 0 on
        average.

        Args:
            carried, added: shares of y through the skip connection and through the branch.
            coherent: `added` times the coherence of the branch.
            overlap: q, mean square of the overlap.
        """
        cross = 4 * carried * coherent * overlap
        if self.inner is None:
            return (cross + self.kappa * coherent**2 * overlap) / self.width
        # Two matrices in sequence: behind the first, q has grown by 1/inner.
        both = 2 * overlap * self.width / self.inner + 2 * (overlap + 1 / self.inner)
        common = 0.0 if np.all(self.attends == 1) else self.kappa * coherent**2 * overlap
        return (cross + both * (self.attends * added) ** 2 + common) / self.width

    def _noise(self, sensitivity: Array, carried: Array, whole: Array, kappa: Array) -> Array:
        """Variance of y due to the addition `whole - carried` to `carried`: docs/theory/band.md."""
        if not self.residual:
            return np.zeros(sensitivity.shape[:-2])
        added = whole - carried
        skipped, branch = sensitivity @ carried, sensitivity @ added
        noise = total((4 * skipped + per_pair(kappa) * branch) * transposed(branch)) / self.width
        if self.scatter is None:
            return noise
        factors = sensitivity * added
        return noise + 4 * total(transposed(factors) @ (self.scatter @ factors))


@dataclass(frozen=True)
class GradientUnits:
    """Converts a record's kernels to matrices, gradients in a common unit.

    Attributes:
        unit: (...,) trace of the gradient at the part's input.
    """

    unit: Array

    def by_token(self, values: Array, kernel: Kernel) -> Array:
        """(..., L) values per token, with one entry for exchangeable tokens."""
        return np.asarray(values) if kernel.resolved else np.asarray(values)[..., None]

    def grad_out(self, record: Record) -> Matrix:
        """The gradient at the output."""
        grad_out = matrix_of(record.grad_out.kernel, record.output.seq_len)
        return in_units(grad_out, self.unit)

    def kernels(self, record: Record) -> tuple[Matrix, Matrix, Matrix, Matrix]:
        """Kernels `entering`, `leaving`, `grad_in` and `grad_out` of `Sublayer`."""
        entering, leaving = (
            matrix_of(one.second_moment(), one.seq_len).astype(SINGLE)
            for one in (record.input, record.output)
        )
        grad_in = in_units(matrix_of(record.grad_in.kernel, record.input.seq_len), self.unit)
        return entering, leaving, grad_in, self.grad_out(record)

    def part(self, record: Record) -> Sublayer:
        """The response of a part of a layer, with a skip connection or without."""
        response = record.component.response(record, self)
        return response if isinstance(response, Sublayer) else self.alone(record, response)

    def alone(self, record: Record, response: Response, kappa: Array = 0.0) -> Sublayer:
        """A part without a skip connection, with noise of that kappa."""
        noisy, no_skip = bool(np.any(kappa)), per_pair(0.0)
        fields = *self.kernels(record), kappa, kappa, float(record.output.width)
        return Sublayer(response, noisy, no_skip, 1.0, *fields, heads_width(record))

    def added(self, record: Record, branch: Record, skip: Array, scale: Array) -> Sublayer:
        """A residual sum; `skip` and `scale` are the squared factors of its addends."""
        response = branch.component.response(branch, self)
        kappa, back_kappa, attends = kappas(branch, response)
        return Sublayer(
            response,
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
    """Number of features of all heads of self-attention; None without self-attention."""
    for leaf in record.leaves():
        if leaf.component.mixes_tokens and leaf.memory is None:
            return float(leaf.output.width)
    return None


def kappas(branch: Record, response: Any) -> tuple[Array, Array, Array]:
    """`kappa`, `back_kappa` and `attends` of `Sublayer`.

    A sum of parallel branches of squared norms B_b varies by 2 (sum B)^2/d if each varies by
    2 B_b^2/d; unless a normalisation behind them fixes the norm of the sum.
    """
    paths = branch.paths()
    common = set(paths[0]).intersection(*paths[1:]) if len(paths) > 1 else set()
    if fixed_behind(paths[0], common):
        paths, common = [tuple(branch.leaves())], set()
    sizes, of_signal, of_gradient, attention_flags = [], [], [], []
    for path in paths:
        output = last_matrix([leaf for leaf in path if leaf not in common]).output
        of_signal.append(_added_norm_variance(path, branch.input, output))
        sizes.append(np.asarray(output.second_moment().mean_diagonal()))
        attends = any(leaf.component.mixes_tokens and leaf.memory is None for leaf in path)
        of_gradient.append(2.0 if attends else of_signal[-1])
        attention_flags.append(float(attends))
    if len(paths) == 1:
        return of_signal[0], of_gradient[0], 1.0
    shares = _path_shares(response)
    return (
        _kappa_of_sum(of_signal, [ratio(size, sum(sizes)) for size in sizes]),
        _kappa_of_sum(of_gradient, shares),
        sum(share * one for share, one in zip(shares, attention_flags, strict=True)),
    )


def _path_shares(response: Any) -> list[Array]:
    """Share of each path through (nested) parallel branches; empty if there is a single path."""
    if isinstance(response, Sequence):
        return next(filter(None, map(_path_shares, response.parts)), [])
    if not isinstance(response, Sum):
        return []
    return [
        share * inner
        for share, part in zip(response.shares, response.parts, strict=True)
        for inner in _path_shares(part) or [1.0]
    ]


def fixed_behind(path: Several[Record], common: set[Record]) -> bool:
    """Whether a normalisation follows parallel branches, in the leaves `common` to their paths."""
    behind = itertools.takewhile(lambda leaf: leaf in common, reversed(path))
    return any(leaf.component.normalises for leaf in behind)


def last_matrix(path: Several[Record]) -> Record:
    """The last leaf of a path that is not dropout, whose masks average out over tokens."""
    return next(leaf for leaf in reversed(path) if not leaf.component.is_dropout)


def _kappa_of_sum(kappas: Several[Array], shares: Several[Array]) -> Array:
    excess = ((kappa - 2) * share**2 for kappa, share in zip(kappas, shares, strict=True))
    return 2 + sum(excess)


def _added_norm_variance(path: Several[Record], entering: Signal, output: Signal) -> Array:
    """width times the relative variance of |branch|^2 that the branch's own matrices add."""
    # Behind a normalisation or attention, the tracked variance does not include the input's.
    reset = any(leaf.component.normalises or leaf.component.mixes_tokens for leaf in path)
    inherited: Array = 0.0 if reset else norm_variance(entering)
    if output.fluctuation is not None:  # weights drawn for single tokens average out
        inherited = inherited + output.kernel.average(output.fluctuation.drawn)
    return output.width * np.maximum(norm_variance(output) - inherited, 0.0)


def _grown(fluctuation: Fluctuation | None) -> Fluctuation | None:
    """Fluctuations of tokens enlarged by a step, at the same correlation in every draw: overlaps
    then vary in proportion (docs/theory/band.md)."""
    if fluctuation is None:
        return None
    square = (1 + STEP) ** 2
    norms, overlaps, *_ = fluctuation
    of_overlaps = None if overlaps is None else overlaps.scaled(square)
    return fluctuation._replace(norms=norms.scaled(square), overlaps=of_overlaps)


def in_units(kernel: Matrix, unit: Array) -> Matrix:
    """A gradient's kernel over its unit (...,), 0 where the unit is."""
    return per_unit(kernel, unit).astype(SINGLE)


def _side_by_side(signals: Several[Signal], axes: tuple[int, ...]) -> Signal:
    """Stack signals that differ in their kernels on a new first axis."""

    def entries(values: Several[Array], token_axes: int) -> Array:
        shape = np.shape(values[0])
        shape = np.broadcast_shapes(shape, axes + shape[len(shape) - token_axes :])
        return np.stack([np.broadcast_to(value, shape) for value in values])

    def together(values: Several[Any]) -> Any:
        first = values[0]
        if isinstance(first, Kernel):
            token_axes = int(bool(first.resolved))
            diagonal = entries([one.diagonal for one in values], token_axes)
            off_diagonal = entries([one.off_diagonal for one in values], 2 * token_axes)
            return Kernel(diagonal, off_diagonal, first.resolved)
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
    """Split `count` stacked matrices; a matrix without that axis is the same for all."""
    single = count == 1 or len(matrix.shape) <= len(shape)
    return [matrix] * count if single else [matrix[k] for k in range(count)]


def _ones(gradient: Gradient, kernel: Kernel) -> Gradient:
    """A gradient whose covariances are all 1, with the directions of `gradient`."""
    tokens = matrix_of(kernel, gradient.seq_len)
    grad_out = matrix_of(gradient.kernel, gradient.seq_len)
    even = kernel_of(ones(np.broadcast_shapes(grad_out.shape, tokens.shape), tokens))
    axes = np.ndim(gradient.kernel.diagonal)

    def spread_over(value: Array) -> Array:
        by_token = axes and np.ndim(value) == axes
        return np.broadcast_to(value, np.shape(even.diagonal)) if by_token else value

    radial, share = spread_over(gradient.radial), spread_over(gradient.centred_share)
    return Gradient(even, gradient.seq_len, radial, share)
