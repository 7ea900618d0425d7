"""What passes through a network besides moments: the sensitivities of one number to them.

A number y is linear in the gradient's kernel, dy = sum(Lambda o dG), and smooth in the signal's,
dy = sum(Gamma o dC), at every point. Through a part with signals C -> C' and gradients G' -> G,

    Lambda' = (dG/dG')^T Lambda,    Gamma = (dC'/dC)^T Gamma' + d<Lambda, G>/dC.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from .state import Array

SINGLE = np.float32
"""Precision of sensitivities and of the maps they pass through: they need no more."""


class Ascent(NamedTuple):
    """What a sensitivity at a part's input says about the part.

    Attributes:
        sensitivity: (..., L, L) Lambda', to the gradient at the output.
        exposure: what `Response.descend` needs of it.
        noise: (...,) variance that randomness inside the part adds to y.
        coherence: (...,) share of the part's gain that overlaps of different directions have.
    """

    sensitivity: Array
    exposure: Any
    noise: Array
    coherence: Array


class Descent(NamedTuple):
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

    def ascend(self, sensitivity: Array) -> Ascent:
        """From the gradient at the input to that at the output."""

    def descend(self, sensitivity: Array, exposure: Any) -> Descent:
        """Sensitivity to the signal at the input, of one to that at the output.

        `exposure` is that of an ascent, possibly of fewer targets: the first ones.
        """


def transposed(matrix: Array) -> Array:
    return np.swapaxes(matrix, -1, -2)


def symmetric(matrix: Array) -> Array:
    """The symmetric part: an antisymmetric rounding error would grow through a deep network."""
    return 0.5 * (matrix + transposed(matrix))


def diagonal(entries: Array) -> Array:
    """The diagonal matrices (..., L, L) of entries (..., L)."""
    matrix = np.zeros((*entries.shape, entries.shape[-1]), entries.dtype)
    index = np.arange(entries.shape[-1])
    matrix[..., index, index] = entries
    return matrix


def paired(sensitivity: Array, first: Array, second: Array) -> Array:
    """tr(Lambda A Lambda B) of symmetric matrices."""
    one = sensitivity @ first
    other = one if second is first else sensitivity @ second
    return (one * transposed(other)).sum((-2, -1))
