"""How a step changes a tensor: three token kernels, and what operations do to them.

A tensor h becomes h + u. With K = E h h and delta the loss's gradient at h before the step, per
feature,

    P: the coherent part, u_t = - sum_s P_ts delta_s + noise;
    M = E u_t h_s, the overlap with what was;
    U = E u_t u_s, all of the change.

P is a mean over draws. One draw's is P + S o kappa, kappa the scatter of the overlaps of the
stream's tokens about their mean (`Overlaps`): steps of all layers meet the same one, so that it
adds up over them as P does and not as noise. Likewise what a step is given delta beyond what is
linear in it, of kernel V, is alike in matrices whose delta is the same, those that write to the
stream.

The updated kernel is K + M + M^T + U. Changes are carried themselves and never formed as a
difference of kernels, so that small steps lose no digits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def precision(tokens: int) -> Any:
    """Of what differences of kernels never see: single where tokens are many, and the matrices of
    their pairs what takes the time."""
    return np.dtype(np.float32 if tokens > 128 else float)


def between(first: Array, gradient: Array, second: Array) -> Array:
    """P D P'^T: what two coherent changes share."""
    # on the scale of each, of which single precision holds the square
    sizes = [max(float(np.abs(one).max(initial=0.0)), 1e-300) for one in (first, gradient, second)]
    kind = precision(len(gradient))
    one, two, three = (
        (part / size).astype(kind)
        for part, size in zip((first, gradient, second), sizes, strict=True)
    )
    return np.asarray(one @ two @ three.T, float) * math.prod(sizes)


@dataclass(frozen=True)
class Change:
    """What a step does to a tensor; each (T, T).

    Attributes:
        coherent: P.
        overlap: M.
        total: U.
        scattered: S.
        beyond: V.
    """

    coherent: Array
    overlap: Array
    total: Array
    scattered: Array
    beyond: Array

    @classmethod
    def none(cls, count: int) -> Change:
        """Of `count` tokens that stay as they are."""
        nothing = np.zeros((count, count))
        return cls(nothing, nothing, nothing, nothing, nothing)

    def new(self, kernel: Array) -> Array:
        """The updated kernel."""
        return kernel + self.overlap + self.overlap.T + self.total

    def met(self, kernel: Array) -> Array:
        """E h'_t h_s: the updated tensor with the old one."""
        return kernel + self.overlap

    def times(self, factor: Array | float) -> Change:
        """Every entry of all times a factor, or one for each pair of tokens."""
        return self.each(lambda part: factor * part)

    def sent(self, gradient: Array, scale: float = 1.0) -> Array:
        """What the coherent part adds to the square, D = `gradient` on a scale of its own."""
        return scale * between(self.coherent, gradient, self.coherent)

    def less(self, square: Array) -> Change:
        """With less of the square."""
        return dataclasses.replace(self, total=self.total - square)

    def each(self, function: Callable[[Array], Array]) -> Change:
        """What a linear map makes of all."""
        return Change(
            function(self.coherent),
            function(self.overlap),
            function(self.total),
            function(self.scattered),
            function(self.beyond),
        )

    def plus(self, other: Change, gradient: Array) -> Change:
        """With another cause of change of the same tensor, E delta delta = `gradient` there.

        The two are independent but for their coherent parts, E u u' = P D P'^T, and what is alike
        beyond.
        """
        cross = between(self.coherent, gradient, other.coherent)
        alike = _alike(self.beyond, other.beyond)
        return Change(
            self.coherent + other.coherent,
            self.overlap + other.overlap,
            self.total + other.total + cross + cross.T + alike,
            self.scattered + other.scattered,
            self.beyond + other.beyond + alike,
        )

    def shifted(self, coherent: float, total: float, gradient: Array) -> Change:
        """With a bias's step, which all tokens share: P and U are these numbers everywhere."""
        cross = coherent * (self.coherent @ gradient.sum(1))
        both = np.add.outer(cross, cross)
        own = np.full_like(both, total - coherent * coherent * float(gradient.sum()))
        alike = _alike(self.beyond, own)
        return Change(
            self.coherent + coherent,
            self.overlap,
            self.total + total + both + alike,
            self.scattered,
            self.beyond + own + alike,
        )

    def rescaled(self, kernel: Array, factor: Array, less: Array) -> Change:
        """Of r_t (h_t + u_t), r a number per token, with `less` = r - 1 to its own precision.

        The change is r u + (r - 1) h.
        """
        r, q = factor[:, None], less[:, None]
        overlap = r * self.overlap + q * kernel
        total = r * r.T * self.total + q * q.T * kernel
        cross = r * q.T * self.overlap
        return Change(
            r * self.coherent,
            overlap,
            total + cross + cross.T,
            r * self.scattered,
            r * r.T * self.beyond,
        )


def _alike(first: Array, second: Array) -> Array:
    """What two functions of one delta, of kernels V and V', add to that of their sum: all that
    there can be where V and V' are one up to a factor, less by the cosine between them."""
    if not (first.any() and second.any()):
        return np.zeros_like(first)
    sizes = float((first**2).sum()), float((second**2).sum())
    share = float((first * second).sum()) / (sizes[0] * sizes[1]) ** 0.5
    return np.asarray(2 * share * np.sqrt(np.maximum(first * second, 0.0)) * np.sign(first))


@dataclass(frozen=True, eq=False)
class Overlaps:
    """How one draw's overlaps of a stream's tokens scatter about their mean.

    The cosine of tokens t and s is C_ts + kappa_ts, of which what matters is taken:
    E kappa_ts kappa_t's' = (1 - C_ts^2) (1 - C_t's'^2) C_tt' C_ss'/n, exact at equal pairs, 0 where
    tokens are the same.

    Attributes:
        correlation: (T, T) C of the tokens.
        sizes: (T,) roots of their second moments.
        width: n, features of each.
    """

    correlation: Array
    sizes: Array
    width: float

    @classmethod
    def of(cls, kernel: Array, width: float) -> Overlaps:
        """Of tokens of a kernel."""
        size = np.sqrt(np.maximum(np.diag(kernel), 1e-300))
        return cls(kernel / np.outer(size, size), size, width)

    def square(self, first: Array, second: Array, gradient: Array) -> Array:
        """E (S o kappa) D (S' o kappa)^T of two changes that follow the scatter."""
        if not (first.any() and second.any()):
            return np.zeros_like(first)
        c = self.correlation
        loose = 1 - c * c
        return c * between(loose * first, gradient * c, loose * second) / self.width


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
    return dataclasses.replace(found, overlap=found.overlap - added.coherent @ tied.T)
