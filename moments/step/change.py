"""How a step changes a tensor: three token kernels, and what operations do to them.

A tensor h becomes h + u. With K = E h h and delta the loss's gradient at h before the step, per
feature,

    P: the coherent part, u_t = - sum_s P_ts delta_s + noise;
    M = E u_t h_s, the overlap with what was;
    U = E u_t u_s, all of the change.

P is a mean over draws. One draw's is P + S o kappa, kappa the scatter of the overlaps of the
stream's tokens about their mean (`Overlaps`): steps of all layers meet the same one, so that it
adds up over them as P does and not as noise. Muon's, which sees one draw's tokens and gradients
both, is carried draw by draw beside their D (`scattering`). Likewise what a step is given delta
beyond what is linear in it, of kernel V, is alike in matrices whose delta is nearly the same, those
that write to the stream (`Beyond`).

The updated kernel is K + M + M^T + U. Changes are carried themselves and never formed as a
difference of kernels, so that small steps lose no digits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def precision(tokens: int) -> Any:
    """Of what differences of kernels never see: single where tokens are many, and the matrices of
    their pairs what takes the time."""
    return np.dtype(np.float32 if tokens > 128 else float)


def sized(part: Array) -> tuple[float, Array]:
    """A matrix as precise as tokens ask, on a scale whose square single precision holds."""
    kind = precision(len(part))
    if kind.itemsize == 8:
        return 1.0, part
    size = max(float(part.max()), -float(part.min())) or 1.0
    if _LEAST**0.5 < size < _LEAST**-0.5:
        return 1.0, part.astype(kind, copy=False)
    return size, np.asarray(part / part.dtype.type(size), kind)


def between(first: Array, gradient: Array, second: Array) -> Array:
    """P D P'^T: what two coherent changes share."""
    (one, p), (two, d) = sized(first), sized(gradient)
    three, q = (one, p) if second is first else sized(second)
    found, size = p @ d @ q.T, one * two * three
    return np.asarray((found if _LEAST < size < 1 / _LEAST else found.astype(float)) * size)


def between_trace(first: Array, gradient: Array) -> float:
    """tr(P D P^T)."""
    (one, p), (two, d) = sized(first), sized(gradient)
    return float(np.vdot(p @ d, p)) * one * one * two


_LEAST = 1e-20
"""Of numbers whose matrices single precision holds, entries far smaller among them."""


def scattering(
    first: Change, second: Change, gradient: Array, received: Array | None
) -> Array | float:
    """E P_k D_k P'_k^T over draws k, less P D P'^T.

    `received`: (N, T, T) D_k - D; None: it is not known.
    """
    if received is None or (first.drawn is None and second.drawn is None):
        return 0.0
    one, two = (
        part.coherent[None] if part.drawn is None else part.coherent + part.drawn
        for part in (first, second)
    )
    every = one @ (gradient + received) @ np.swapaxes(two, -1, -2)
    return np.asarray(every.mean(0) - between(first.coherent, gradient, second.coherent))


def conserved(
    before: Change,
    after: Change,
    gradients: tuple[Array, Array],
    received: tuple[Array | None, Array | None],
) -> Change:
    """Behind a map that is followed by its mean, with every draw's P on the scale at which
    tr(P D), the step's meeting with the loss, stays that draw's.

    Args:
        gradients, received: D on both sides, and draws less it.
    """
    if after.drawn is None or not before.coherent.any():
        return after
    met = []
    for change, gradient, draws in zip((before, after), gradients, received, strict=True):
        if change.drawn is None or draws is None:
            return after
        every = (change.coherent + change.drawn) * (gradient + draws)
        met.append(every.sum((1, 2)) / np.vdot(change.coherent, gradient))
    grown = (met[0] / met[1])[:, None, None]
    return dataclasses.replace(after, drawn=grown * (after.coherent + after.drawn) - after.coherent)


def behind_a_matrix(
    before: Change,
    after: Change,
    gradients: tuple[Array, Array],
    received: tuple[Array, Array],
    shape: tuple[float, float],
) -> Change:
    """Behind an (m, n) matrix W that alone reads a tensor, with what draws tell of P.

    As delta_x = W^T delta_y, the overlaps u_t.delta_s are the same on both sides. So the part of
    W u along delta_y has the kernel Z D_y^+ Z^T, Z = (n/m) P D_x, in every draw; and W is as if
    drawn anew only across delta_y, in m less its rank of m directions.

    Args:
        before, after: the change of x; and that of y, as if W were independent.
        gradients: D of both.
        received: (N, T, T) draws of these.
        shape: n and m.
    """
    if before.drawn is None or not before.coherent.any():
        return after
    (n, m), (entering, leaving) = shape, received
    step = before.coherent + before.drawn
    sent = step @ entering
    inverse = np.linalg.pinv(leaving, SINGLE_PRECISION, hermitian=True)
    rank = np.trace(leaving @ inverse, axis1=1, axis2=2)[:, None, None]
    less = (rank / m * (sent @ np.swapaxes(step, 1, 2))).mean(0)
    less = less * (np.trace(after.coherent) / np.trace(before.coherent))
    found = conserved(
        before, after, gradients, (entering - entering.mean(0), leaving - leaving.mean(0))
    )
    assert found.drawn is not None
    carried = found.coherent + found.drawn
    along = (n / m) ** 2 * sent @ inverse @ np.swapaxes(sent, 1, 2)
    more = (along - carried @ leaving @ np.swapaxes(carried, 1, 2)).mean(0)
    return dataclasses.replace(found, total=after.total - less + more)


SINGLE_PRECISION = 1e-5
"""Share of the largest eigenvalue of one draw's overlaps below which single precision has lost one:
some hundred times its rounding."""


@dataclass(frozen=True, eq=False)
class Nonlinear:
    """V of one write.

    Attributes:
        kernel: V on the scale at which its squares sum to 1.
        size: that scale.
    """

    kernel: Array
    size: float

    @classmethod
    def of(cls, kernel: Array, factor: float = 1.0) -> Nonlinear:
        """V = factor times `kernel`."""
        size, unit = sized(kernel)
        norm = math.sqrt(float(np.vdot(unit, unit))) or 1.0
        return cls(unit / unit.dtype.type(norm), size * norm * factor)

    @functools.cached_property
    def root(self) -> Array:
        """Roots of the kernel's entries, with their signs."""
        return np.asarray(np.copysign(np.sqrt(np.abs(self.kernel)), self.kernel))


class Beyond(NamedTuple):
    """What one write to the stream is given its delta, beyond what is linear in it.

    Attributes:
        part: V.
        linear: share of the step, given delta, that is linear in it: 2/pi of signs.
        kept: square of the correlation of its delta with that where the change now is.
    """

    part: Nonlinear
    linear: float
    kept: float = 1.0

    def behind(self, before: Array, after: Array) -> Beyond:
        """With a delta that has the kernel `after` of `before`, what has come to it being new."""
        there = float(np.vdot(self.part.kernel, before))
        share = float(np.vdot(self.part.kernel, after)) / there if there > 0 else 1.0
        return self._replace(kept=self.kept * min(max(share, 0.0), 1.0))

    def mapped(self, function: Callable[[Array], Array]) -> Beyond:
        """Behind a linear map of kernels."""
        return self._replace(part=Nonlinear.of(function(self.part.kernel), self.part.size))

    def times(self, factor: float) -> Beyond:
        """Behind a factor."""
        return self._replace(part=Nonlinear(self.part.kernel, factor * self.part.size))


def correlated(linear: float, r: float) -> float:
    """Correlation of what two steps have beyond their linear parts, from that of their deltas.

    A step in one direction a/|a| of an n-dimensional Gaussian a has, with another whose a is
    correlated by r,

        E cos = m r 2F1(1/2, 1/2; n/2 + 1; r^2),   m = (2/n) (G((n + 1)/2)/G(n/2))^2,

    of which m r is linear: the rest is r^3 at large n and asin(r) - r at n = 1, of signs.

    Args:
        linear: m.
        r: of the two a.
    """
    return _correlated(round(linear, 3), round(min(r, 1.0), 4))


@functools.lru_cache(maxsize=4096)
def _correlated(linear: float, r: float) -> float:
    from scipy.special import hyp2f1

    if linear > _NEARLY or r <= 0.0:
        return max(r, 0.0) ** 3
    half = _dimension(linear) / 2 + 1
    whole, at_one = (float(hyp2f1(0.5, 0.5, half, square)) - 1 for square in (r * r, 1.0))
    return r * whole / at_one


@functools.cache
def _dimension(linear: float) -> float:
    """n of m."""
    from scipy.optimize import brentq

    def excess(n: float) -> float:
        return 2 / n * math.exp(2 * (math.lgamma((n + 1) / 2) - math.lgamma(n / 2))) - linear

    return 1.0 if excess(1.0) >= 0 else float(brentq(excess, 1.0, 1e4))


_NEARLY = 0.99
"""Linear share from which a step's third order is all it has beyond. Chosen; .9 and .999 change
nothing of Adam's and Muon's first steps of 12 layers of width 64."""

_APART = 16
"""Writes that are told apart; of more, those whose deltas are most alike count as one. Half and
twice as many move those steps' loss by 2e-5 and the stream's change by 1.4e-4."""


@dataclass(frozen=True)
class Change:
    """What a step does to a tensor; each (T, T).

    Attributes:
        coherent: P.
        overlap: M.
        total: U.
        scattered: S.
        beyond: what writes to the stream are beyond linear.
        drawn: (N, T, T) what draws have of P beyond it; None: nothing is known.
    """

    coherent: Array
    overlap: Array
    total: Array
    scattered: Array
    beyond: tuple[Beyond, ...] = ()
    drawn: Array | None = None

    def __post_init__(self) -> None:
        """As precise as tokens ask, where that holds it."""
        kind = precision(len(self.coherent))
        parts = {
            name: getattr(self, name) for name in ("coherent", "overlap", "total", "scattered")
        }
        parts = {name: part for name, part in parts.items() if part.dtype != kind}
        if not parts:
            return
        sizes = np.abs([part.diagonal() for part in (self.coherent, self.total)]).max(1)
        if np.all((sizes == 0) | ((sizes > _LEAST) & (sizes < 1 / _LEAST))):
            for name, part in parts.items():
                object.__setattr__(self, name, part.astype(kind))

    @classmethod
    def none(cls, count: int) -> Change:
        """Of `count` tokens that stay as they are."""
        return cls.of(np.zeros((count, count)))

    @classmethod
    def of(cls, coherent: Array, drawn: Array | None = None) -> Change:
        """What follows the gradient, alone."""
        nothing = np.zeros_like(coherent)
        return cls(coherent, nothing, nothing, nothing, (), drawn)

    def new(self, kernel: Array) -> Array:
        """The updated kernel."""
        return kernel + self.overlap + self.overlap.T + self.total

    def met(self, kernel: Array) -> Array:
        """E h'_t h_s: the updated tensor with the old one."""
        return kernel + self.overlap

    def times(self, factor: Array | float) -> Change:
        """Every entry of all times a factor, or one for each pair of tokens."""
        if isinstance(factor, float) and factor == 1.0:
            return self
        found = dataclasses.replace(self, beyond=()).each(lambda part: factor * part)
        beyond = tuple(
            one.times(factor)
            if isinstance(factor, float)
            else one.mapped(lambda part: factor * part)
            for one in self.beyond
        )
        return dataclasses.replace(found, beyond=beyond)

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
            tuple(one.mapped(function) for one in self.beyond),
            None if self.drawn is None else function(self.drawn),
        )

    def plus(self, other: Change, gradient: Array, received: Array | None = None) -> Change:
        """With another cause of change of the same tensor, E delta delta = `gradient` there.

        The two are independent but for their coherent parts, E u u' = P D P'^T, and what is alike
        beyond. `received`: draws of D less it.
        """
        cross = between(self.coherent, gradient, other.coherent)
        cross = cross + scattering(self, other, gradient, received)
        total = self.total + other.total + cross + cross.T
        for one in other.beyond:
            total = total + self.alike(one)
        return Change(
            self.coherent + other.coherent,
            self.overlap + other.overlap,
            total,
            self.scattered + other.scattered,
            _few((*self.beyond, *other.beyond)),
            joined(self.drawn, other.drawn),
        )

    def alike(self, other: Beyond) -> Array:
        """What another step, whose delta is that here, adds beyond the linear parts to the square
        of both: all that there can be where V and V' are one up to a factor, less by the cosine
        between them, and by deltas that are not one."""
        found, size = np.zeros_like(other.part.kernel), other.part.size
        for one in self.beyond:
            r = (one.kept * other.kept) ** 0.5
            same = (correlated(one.linear, r) * correlated(other.linear, r)) ** 0.5
            same *= 2 * float(np.vdot(one.part.kernel, other.part.kernel))
            if found_size := same * (one.part.size * size) ** 0.5:
                found += found_size * one.part.root
        # of opposite signs nothing is alike
        return np.asarray(np.where(found * other.part.root > 0, found * np.abs(other.part.root), 0))

    def shifted(self, coherent: float, total: float, gradient: Array) -> Change:
        """With a bias's step, which all tokens share: P and U are these numbers everywhere."""
        cross = coherent * (self.coherent @ gradient.sum(1))
        both = np.add.outer(cross, cross)
        linear = coherent * coherent * float(gradient.sum())
        found = self.total + total + both
        beyond = self.beyond
        if total - linear > _EXACT * total:
            own = Beyond(Nonlinear.of(np.full_like(both, total - linear)), linear / total)
            found, beyond = found + self.alike(own), _few((*beyond, own))
        return Change(
            self.coherent + coherent, self.overlap, found, self.scattered, beyond, self.drawn
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
            tuple(one.mapped(lambda part: r * r.T * part) for one in self.beyond),
            None if self.drawn is None else r * self.drawn,
        )


def joined(one: Array | None, two: Array | None) -> Array | None:
    """The sum of what is known."""
    if one is None or two is None:
        return two if one is None else one
    return one + two


_EXACT = 1e-9
"""Share of a square below which what is not linear is rounding."""


def _few(found: tuple[Beyond, ...]) -> tuple[Beyond, ...]:
    """No more than are told apart."""
    while len(found) > _APART:
        kept = [one.kept for one in found]
        k = int(np.argmin(np.abs(np.diff(kept))))
        one, two = found[k : k + 2]
        scales = [each.part.size / (one.part.size + two.part.size) for each in (one, two)]
        root = sum(
            scale**0.5 * each.part.root for scale, each in zip(scales, (one, two), strict=True)
        )
        sizes = [
            max(scale * float(np.trace(each.part.kernel)), 1e-300) ** 0.5
            for scale, each in zip(scales, (one, two), strict=True)
        ]
        share = sizes[0] / sum(sizes)
        joined = Beyond(
            Nonlinear.of(root * np.abs(root), one.part.size + two.part.size),
            share * one.linear + (1 - share) * two.linear,
            share * one.kept + (1 - share) * two.kept,
        )
        found = (*found[:k], joined, *found[k + 2 :])
    return found


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
        size, kind = np.sqrt(np.maximum(np.diag(kernel), 1e-300)), precision(len(kernel))
        return cls((kernel / np.outer(size, size)).astype(kind), size, width)

    @functools.cached_property
    def _loose(self) -> Array:
        return np.asarray(1 - self.correlation * self.correlation)

    def square(self, first: Array, second: Array, gradient: Array) -> Array:
        """E (S o kappa) D (S' o kappa)^T of two changes that follow the scatter."""
        if not (first.any() and second.any()):
            return np.zeros_like(first)
        c, one = self.correlation, self._loose * first
        two = one if second is first else self._loose * second
        return np.asarray(c * between(one, gradient * c, two) / self.width)


def summed(
    skip: Change,
    branch: Change,
    scales: tuple[float, float],
    gradient: Array,
    tied: Array,
    received: Array | None = None,
) -> Change:
    """Of the residual sum: skip_scale h + branch_scale f(h).

    Args:
        skip, branch: of the two addends before their scales.
        scales: squares of the amplitudes that multiply them.
        gradient: E delta delta at the sum.
        tied: E h_t delta_s there along the stream's identity path (`ends.tied_overlap`): the
            branch's coherent change meets the stream's own words.
        received: draws of E delta delta there, less it.
    """
    kept, added = skip.times(scales[0]), branch.times(scales[1])
    found = kept.plus(added, gradient, received)
    return dataclasses.replace(found, overlap=found.overlap - added.coherent @ tied.T)
