"""How a step changes a tensor: three token kernels, and what operations do to them.

A tensor h becomes h + u. With K = E h h and delta the loss's gradient at h before the step, per
feature,

    P: the coherent part, u_t = - sum_s P_ts delta_s + noise;
    M = E u_t h_s, the overlap with what was;
    U = E u_t u_s, all of the change.

The updated kernel is K + M + M^T + U. Changes are carried themselves and never formed as a
difference of kernels, so that small steps lose no digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Change:
    """What a step does to a tensor; each of the three (T, T).

    Attributes:
        coherent: P.
        overlap: M.
        total: U.
    """

    coherent: Array
    overlap: Array
    total: Array

    @classmethod
    def none(cls, count: int) -> Change:
        """Of `count` tokens that stay as they are."""
        nothing = np.zeros((count, count))
        return cls(nothing, nothing, nothing)

    def new(self, kernel: Array) -> Array:
        """The updated kernel."""
        return kernel + self.overlap + self.overlap.T + self.total

    def met(self, kernel: Array) -> Array:
        """E h'_t h_s: the updated tensor with the old one."""
        return kernel + self.overlap

    def times(self, factor: Array | float) -> Change:
        """Every entry of all three times a factor, or one for each pair of tokens."""
        return Change(factor * self.coherent, factor * self.overlap, factor * self.total)

    def sent(self, gradient: Array, scale: float = 1.0) -> Array:
        """What the coherent part adds to the square, D = `gradient` on a scale of its own."""
        return self.coherent @ (scale * gradient) @ self.coherent.T

    def less(self, square: Array) -> Change:
        """With less of the square."""
        return Change(self.coherent, self.overlap, self.total - square)

    def each(self, function: Callable[[Array], Array]) -> Change:
        """What a linear map makes of all three."""
        return Change(function(self.coherent), function(self.overlap), function(self.total))

    def plus(self, other: Change, gradient: Array) -> Change:
        """With another cause of change of the same tensor, E delta delta = `gradient` there.

        The two are independent but for their coherent parts: E u u' = P D P'^T.
        """
        cross = self.coherent @ gradient @ other.coherent.T
        return Change(
            self.coherent + other.coherent,
            self.overlap + other.overlap,
            self.total + other.total + cross + cross.T,
        )

    def shifted(self, coherent: float, total: float, gradient: Array) -> Change:
        """With a bias's step, which all tokens share: P and U are these numbers everywhere."""
        cross = coherent * (self.coherent @ gradient.sum(1))
        both = np.add.outer(cross, cross)
        return Change(self.coherent + coherent, self.overlap, self.total + total + both)

    def rescaled(self, kernel: Array, factor: Array, less: Array) -> Change:
        """Of r_t (h_t + u_t), r a number per token, with `less` = r - 1 to its own precision.

        The change is r u + (r - 1) h.
        """
        r, q = factor[:, None], less[:, None]
        overlap = r * self.overlap + q * kernel
        total = r * r.T * self.total + q * q.T * kernel
        cross = r * q.T * self.overlap
        return Change(r * self.coherent, overlap, total + cross + cross.T)


def summed(
    skip: Change, branch: Change, scales: tuple[float, float], gradient: Array, tied: Array
) -> Change:
    """Of the residual sum: skip_scale h + branch_scale f(h).

    Args:
        skip, branch: of the two addends before their scales.
        scales: squares of the amplitudes that multiply them.
        gradient: E delta delta at the sum.
        tied: E h_t delta_s there along the stream's identity path (`ends.tied_overlap`): the
            branch's coherent change meets the stream's own words.
    """
    kept, added = skip.times(scales[0]), branch.times(scales[1])
    found = kept.plus(added, gradient)
    return Change(found.coherent, found.overlap - added.coherent @ tied.T, found.total)
