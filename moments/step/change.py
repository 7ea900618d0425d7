"""How a step changes a tensor: three token kernels, and what operations do to them.

A tensor h becomes h + u. With K = E h h and delta the loss's gradient at h before the step, per
feature,

    P: the coherent part, u_t = - sum_s P_ts delta_s + noise;
    M = E u_t h_s, the overlap with what was;
    U = E u_t u_s, all of the change.

P is a mean over draws. What one draw's has besides follows the scatter of overlaps of the stream's
tokens (`Overlaps`); what a step has beyond what is linear in delta is alike in all that writes to
the stream (`Beyond`).

The updated kernel is K + M + M^T + U. Changes are carried themselves and never formed as a
difference of kernels, so that small steps lose no digits.

See docs/theory/step-travels.md, The change travels.
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
    """Of products over pairs of tokens: single where those are many, and take the time."""
    return np.dtype(float if tokens <= 128 else np.float32)


def product(*factors: Array) -> Array:
    """Their matrix product in that precision, every factor on a scale of its own."""
    kind, size = precision(max(map(len, factors))), 1.0
    if kind.itemsize == 8:
        return np.asarray(functools.reduce(np.matmul, factors))
    parts = []
    for factor in factors:
        largest = float(np.abs(factor).max(initial=0.0)) or 1.0
        parts.append((factor / largest).astype(kind))
        size *= largest
    return np.asarray(functools.reduce(np.matmul, parts).astype(float) * size)


def between(first: Array, gradient: Array, second: Array) -> Array:
    """P D P'^T: what two coherent changes share."""
    return product(first, gradient, second.T)


def between_trace(first: Array, gradient: Array) -> float:
    """tr(P D P^T)."""
    return float(np.vdot(product(first, gradient), first))


SINGLE_PRECISION = 1e-5
"""Share of the largest eigenvalue of one draw's overlaps near which single precision loses one:
some hundred times its rounding."""


def resolved(values: Array, least: float = SINGLE_PRECISION) -> Array:
    """(..., k) how far ascending eigenvalues are more than rounding, 0 to 1: a step at that share
    of the largest which is smooth, as no rounding may decide what is on which side."""
    share = np.maximum(values, 0.0) / (least * np.maximum(values[..., -1:], 1e-300))
    with np.errstate(over="ignore", divide="ignore"):
        return np.asarray(1 / (1 + share**-4))


def over(shares: Array, values: Array) -> Array:
    """Shares of what is resolved over eigenvalues, 0 where there is nothing."""
    return np.divide(shares, values, out=np.zeros_like(values), where=values > 0)


class Beyond(NamedTuple):
    """What writes to the stream are given their delta, beyond what is linear in it.

    Of all writes so far as one: told apart, the stream's change moved by at most .9 %, the loss's
    by .2 % (Muon and Adam on 12 layers of width 64), and by a tenth of that elsewhere.

    Attributes:
        root: (T, T) roots of V's entries, with their signs.
        linear: share of the step, given delta, that is linear in it: 2/pi of signs.
        kept: square of the correlation of its delta with that where the change now is.
    """

    root: Array
    linear: float
    kept: float = 1.0

    @classmethod
    def of(cls, kernel: Array, linear: float, kept: float = 1.0) -> Beyond:
        return cls(np.copysign(np.sqrt(np.abs(kernel)), kernel), linear, kept)

    @property
    def kernel(self) -> Array:
        """V."""
        return np.asarray(self.root * np.abs(self.root))

    def behind(self, before: Array, after: Array) -> Beyond:
        """With a delta that has the kernel `after` of `before`, what has come to it being new."""
        kernel = self.kernel
        there = float(np.vdot(kernel, before))
        share = float(np.vdot(kernel, after)) / there if there > 0 else 1.0
        return self._replace(kept=self.kept * min(max(share, 0.0), 1.0))

    def mapped(self, function: Callable[[Array], Array]) -> Beyond:
        """Behind a linear map of kernels."""
        return Beyond.of(function(self.kernel), self.linear, self.kept)

    def alike(self, other: Beyond) -> Array:
        """What another step, whose delta is that here, adds to the square of both: all that there
        can be where V and V' are one up to a factor, less by the cosine between them, and by deltas
        that are not one; where they are of opposite signs, nothing."""
        one, two = self.kernel, other.kernel
        norms = float(np.linalg.norm(one) * np.linalg.norm(two))
        r = (self.kept * other.kept) ** 0.5
        same = (correlated(self.linear, r) * correlated(other.linear, r)) ** 0.5
        same *= 2 * float(np.vdot(one, two)) / norms if norms else 0.0
        return np.asarray(same * np.maximum(self.root * other.root, 0.0))

    def with_more(self, other: Beyond) -> Beyond:
        """Both as one, by their sizes."""
        sizes = [max(float(np.trace(one.kernel)), 1e-300) ** 0.5 for one in (self, other)]
        share = sizes[0] / sum(sizes)
        return Beyond(
            self.root + other.root,
            share * self.linear + (1 - share) * other.linear,
            share * self.kept + (1 - share) * other.kept,
        )


def correlated(linear: float, r: float) -> float:
    """Correlation of what two steps have beyond their linear parts, from that of their deltas.

    A step in one direction a/|a| of an n-dimensional Gaussian a, of which m is linear, has with
    another whose a is correlated by r beside m r the rest asin(r) - r at n = 1, of signs, where m
    is 2/pi, and r^3 at large n, where m is 1. Between, a mean by m: of E cos, .004 off at n = 3.
    `linear` is m.
    """
    r = min(max(r, 0.0), 1.0)
    many = min(max((linear - 2 / math.pi) / (1 - 2 / math.pi), 0.0), 1.0)
    return many * r**3 + (1 - many) * (math.asin(r) - r) / (math.pi / 2 - 1)


@dataclass(frozen=True)
class Change:
    """What a step does to a tensor; each (T, T).

    Attributes:
        coherent: P.
        overlap: M.
        total: U.
        scattered: S.
        beyond: what writes to the stream are beyond linear; None: nothing.
    """

    coherent: Array
    overlap: Array
    total: Array
    scattered: Array
    beyond: Beyond | None = None

    @classmethod
    def none(cls, count: int) -> Change:
        """Of `count` tokens that stay as they are."""
        return cls.of(np.zeros((count, count)))

    @classmethod
    def of(cls, coherent: Array) -> Change:
        """What follows the gradient, alone."""
        nothing = np.zeros_like(coherent)
        return cls(coherent, nothing, nothing, nothing)

    def new(self, kernel: Array) -> Array:
        """The updated kernel."""
        return kernel + self.overlap + self.overlap.T + self.total

    def met(self, kernel: Array) -> Array:
        """E h'_t h_s: the updated tensor with the old one."""
        return kernel + self.overlap

    def share(self, kernel: Array) -> float:
        """Of the largest square of a tensor of that kernel, the largest of the change."""
        return float(np.max(np.diag(self.total)) / np.max(np.diag(kernel)))

    def times(self, factor: Array | float) -> Change:
        """Every entry of all times a factor, or one for each pair of tokens."""
        return self.each(lambda part: factor * part)

    def sent(self, gradient: Array, scale: float = 1.0) -> Array:
        """What the coherent part adds to the square, D = `gradient` on a scale of its own."""
        return scale * between(self.coherent, gradient, self.coherent)

    def less(self, square: Array) -> Change:
        """With less of the square."""
        return dataclasses.replace(self, total=self.total - square)

    def each(
        self, function: Callable[[Array], Array], coherent: Callable[[Array], Array] | None = None
    ) -> Change:
        """What a linear map makes of all; `coherent`: of P and what goes with it, if that is
        another."""
        of_p = function if coherent is None else coherent
        return Change(
            of_p(self.coherent),
            function(self.overlap),
            function(self.total),
            of_p(self.scattered),
            None if self.beyond is None else self.beyond.mapped(function),
        )

    def plus(self, other: Change, gradient: Array) -> Change:
        """With another cause of change of the same tensor, E delta delta = `gradient` there.

        The two are independent but for their coherent parts, E u u' = P D P'^T, and what is alike
        beyond.
        """
        cross = between(self.coherent, gradient, other.coherent)
        found = Change(
            self.coherent + other.coherent,
            self.overlap + other.overlap,
            self.total + other.total + cross + cross.T,
            self.scattered + other.scattered,
            self.beyond,
        )
        return found if other.beyond is None else found.going_beyond(other.beyond)

    def parted(self, before: Array, after: Array) -> Change:
        """Where of a delta of kernel `before` there is `after` left, and what is new beside it."""
        if self.beyond is None:
            return self
        return dataclasses.replace(self, beyond=self.beyond.behind(before, after))

    def going_beyond(self, more: Beyond) -> Change:
        """With what a write that is in it already is beyond linear, and shares with others."""
        if self.beyond is None:
            return dataclasses.replace(self, beyond=more)
        total = self.total + self.beyond.alike(more)
        return dataclasses.replace(self, total=total, beyond=self.beyond.with_more(more))

    def shifted(self, coherent: float, total: float, gradient: Array) -> Change:
        """With a bias's step, which all tokens share: P and U are these numbers everywhere."""
        cross = coherent * (self.coherent @ gradient.sum(1))
        both = np.add.outer(cross, cross)
        linear = coherent * coherent * float(gradient.sum())
        found = dataclasses.replace(
            self, coherent=self.coherent + coherent, total=self.total + total + both
        )
        if total - linear <= _EXACT * total:
            return found
        return found.going_beyond(Beyond.of(np.full_like(both, total - linear), linear / total))

    def rescaled(self, kernel: Array, factor: Array, less: Array) -> Change:
        """Of r_t (h_t + u_t), r a number per token, with `less` = r - 1 to its own precision.

        The change is r u + (r - 1) h.
        """
        r, q = factor[:, None], less[:, None]
        found = self.each(lambda part: r * r.T * part, lambda part: r * part)
        cross = r * q.T * self.overlap
        return dataclasses.replace(
            found,
            overlap=r * self.overlap + q * kernel,
            total=found.total + q * q.T * kernel + cross + cross.T,
        )


_EXACT = 1e-9
"""Share of a square below which what is not linear is rounding."""


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
