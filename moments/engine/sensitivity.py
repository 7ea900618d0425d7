"""What passes through a network besides moments: the sensitivities of one number to them.

A number y is linear in the gradient's kernel, dy = sum(Lambda o dG), and smooth in the signal's,
dy = sum(Gamma o dC), at every point. Through a part with signals C -> C' and gradients G' -> G,

    Lambda' = (dG/dG')^T Lambda,    Gamma = (dC'/dC)^T Gamma' + d<Lambda, G>/dC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .classes import ClassMatrix, OneClass, one_class, own_part
from .state import Array, Kernel

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
    exposure: Any
    noise: Array
    coherence: Array


class SignalAdjoint(NamedTuple):
    """What a sensitivity to the signal at a part's output says about the part.

    Attributes:
        sensitivity: (..., L, L) Gamma, to the signal at the input.
        noise: (...,) variance that randomness inside the part adds to y.
        common: (...,) the same for sequences that share the weights, over the square of their
            tokens' correlation; and that of tokens which agree on average in nothing.
    """

    sensitivity: Array
    noise: Array
    common: Array


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
        found = numerator / denominator
    else:
        found = numerator / np.where(present, denominator, denominator.dtype.type(1))
        found = np.where(present, found, 0)
    return np.asarray(found, numerator.dtype)


# --- matrices over tokens: arrays (..., L, L), or on classes --------------------------------------

Matrix = Any


def matrix_of(kernel: Kernel, seq_len: int) -> Matrix:
    """A kernel's entries; tokens alike are one class of `seq_len`."""
    if kernel.classes is not None:  # of one document, for all: others are sequences of a batch
        inside, *_ = kernel.classes.blocks(kernel.diagonal, kernel.pairs)
        return ClassMatrix(*inside, kernel.classes.inside)
    if kernel.resolved:
        return kernel.pairs
    own, pairs = np.broadcast_arrays(kernel.diagonal, kernel.pairs)
    return ClassMatrix(own[..., None], pairs[..., None, None], one_class(seq_len))


def kernel_of(matrix: Matrix) -> Kernel:
    """The kernel of these entries."""
    if isinstance(matrix, ClassMatrix):
        if isinstance(matrix.classes, OneClass):
            return Kernel(matrix.own[..., 0], matrix.pairs[..., 0, 0])
        return Kernel(matrix.own, matrix.pairs, matrix.classes)
    return Kernel.of_matrix(matrix)


def transposed(matrix: Matrix) -> Matrix:
    return matrix.transposed() if isinstance(matrix, ClassMatrix) else np.swapaxes(matrix, -1, -2)


def symmetric(matrix: Matrix) -> Matrix:
    """The symmetric part: an antisymmetric rounding error would grow through a deep network."""
    return 0.5 * (matrix + transposed(matrix))


def own_entries(matrix: Matrix) -> Array:
    """(..., L) entries of every token with itself."""
    if isinstance(matrix, ClassMatrix):
        return matrix.own
    return np.diagonal(matrix, axis1=-2, axis2=-1)


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


def diagonal(entries: Array, like: Matrix) -> Matrix:
    """The diagonal matrices of entries (..., L)."""
    if isinstance(like, ClassMatrix):
        none = np.zeros((*entries.shape, entries.shape[-1]), entries.dtype)
        return ClassMatrix(entries, none, like.classes)
    matrix = np.zeros((*entries.shape, entries.shape[-1]), entries.dtype)
    index = np.arange(entries.shape[-1])
    matrix[..., index, index] = entries
    return matrix


def off_diagonal(matrix: Matrix) -> Matrix:
    """The same without what tokens have with themselves."""
    return matrix - diagonal(own_entries(matrix), matrix)


def ones(shape: tuple[int, ...], like: Matrix) -> Matrix:
    """A matrix of ones of shape (..., L, L)."""
    if isinstance(like, ClassMatrix):
        return ClassMatrix(np.ones(shape[:-1]), np.ones(shape), like.classes)
    return np.ones(shape)


def stacked(matrices: Sequence[Matrix], axis: Any = np.concatenate) -> Matrix:
    """Matrices one after the other along their first axis, or along a new one by np.stack."""
    first = matrices[0]
    if isinstance(first, ClassMatrix):
        own = axis([one.own for one in matrices])
        return ClassMatrix(own, axis([one.pairs for one in matrices]), first.classes)
    return axis(matrices)


def present(matrix: Matrix) -> bool:
    """Whether any entry is not 0."""
    if isinstance(matrix, ClassMatrix):
        return bool(np.any(matrix.own) or np.any(matrix.pairs))
    return bool(np.any(matrix))


def sum_of(matrices: Sequence[Matrix]) -> Matrix:
    found = matrices[0]
    for one in matrices[1:]:
        found = found + one
    return found


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
    own = function(*(m.own if isinstance(m, ClassMatrix) else own_part(m) for m in matrices))
    pairs = function(*(m.pairs if isinstance(m, ClassMatrix) else m for m in matrices))
    if isinstance(own, tuple):
        return tuple(ClassMatrix(a, b, on) for a, b in zip(own, pairs, strict=True))
    return ClassMatrix(own, pairs, on)


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
