"""How a step changes a tensor: three token kernels, and their maps under operations.

A tensor h becomes h + u. With K = E h h and delta the loss's gradient at h before the step, per
feature,

    P: the coherent part, u_t = - sum_s P_ts delta_s + noise;
    M = E u_t h_s, the overlap with the tensor before;
    U = E u_t u_s, the square of the whole change.

P is a mean over draws. Its deviation in one draw is S times the deviation of the overlaps of the
stream's tokens (`Overlaps`). The part of a step that is not linear in delta is correlated between
all matrices that write to the stream (`Beyond`).

The updated kernel is K + M + M^T + U. Changes are propagated themselves and never formed as a
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
    """Data type of products over pairs of tokens: single precision for many tokens."""
    return np.dtype(float if tokens <= 128 else np.float32)


def product(*factors: Array) -> Array:
    """Matrix product in `precision`, every factor scaled to entries of at most 1."""
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
    """P D P'^T, E u u' of two coherent changes."""
    return product(first, gradient, second.T)


def between_trace(first: Array, gradient: Array) -> float:
    """tr(P D P^T)."""
    return float(np.vdot(product(first, gradient), first))


SINGLE_PRECISION = 1e-5
"""Share of the largest eigenvalue of one draw's overlaps near which single precision loses one:
some hundred times its rounding."""


def resolved(values: Array, least: float = SINGLE_PRECISION) -> Array:
    """(..., k) from 0 for ascending eigenvalues that are rounding to 1: a smooth step at the share
    `least` of the largest, so that results vary continuously with rounding."""
    share = np.maximum(values, 0.0) / (least * np.maximum(values[..., -1:], 1e-300))
    with np.errstate(over="ignore", divide="ignore"):
        return np.asarray(1 / (1 + share**-4))


def over(shares: Array, values: Array) -> Array:
    """Quotient of resolved shares and eigenvalues, 0 where these are not positive."""
    return np.divide(shares, values, out=np.zeros_like(values), where=values > 0)


class Beyond(NamedTuple):
    """V, the kernel of the part of a change that is a function of delta, but not linear in it.

    One for the sum of all writes to the stream so far: with one each, the stream's change moved by
    at most .9 %, the loss's by .2 % (Muon and Adam on 12 layers of width 64), a tenth elsewhere.

    Attributes:
        root: (T, T) square roots of the entries of V, with their signs.
        linear: linear share of the square of a step that is a function of delta: 2/pi for signs.
        kept: squared correlation of that delta with the delta at the present site.
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
        """At the sum of a residual block: the part `after` of delta's kernel `before` remains."""
        kernel = self.kernel
        there = float(np.vdot(kernel, before))
        share = float(np.vdot(kernel, after)) / there if there > 0 else 1.0
        return self._replace(kept=self.kept * min(max(share, 0.0), 1.0))

    def mapped(self, function: Callable[[Array], Array]) -> Beyond:
        """V mapped by a linear function of kernels."""
        return Beyond.of(function(self.kernel), self.linear, self.kept)

    def alike(self, other: Beyond) -> Array:
        """The cross term that another step adds to U: the geometric mean of V and V', times their
        cosine and the correlation for deltas that differ; 0 where their signs are opposite."""
        one, two = self.kernel, other.kernel
        norms = float(np.linalg.norm(one) * np.linalg.norm(two))
        r = (self.kept * other.kept) ** 0.5
        same = (correlated(self.linear, r) * correlated(other.linear, r)) ** 0.5
        same *= 2 * float(np.vdot(one, two)) / norms if norms else 0.0
        return np.asarray(same * np.maximum(self.root * other.root, 0.0))

    def with_more(self, other: Beyond) -> Beyond:
        """The sum of both; shares are averaged by size."""
        sizes = [max(float(np.trace(one.kernel)), 1e-300) ** 0.5 for one in (self, other)]
        share = sizes[0] / sum(sizes)
        return Beyond(
            self.root + other.root,
            share * self.linear + (1 - share) * other.linear,
            share * self.kept + (1 - share) * other.kept,
        )


def correlated(linear: float, r: float) -> float:
    """Correlation of the nonlinear parts of two steps, from the correlation r of their deltas.

    Two steps a/|a| along n-dimensional Gaussians a of correlation r have the correlation m r plus a
    nonlinear part, m (`linear`) the linear share. That part is proportional to asin(r) - r at n = 1
    (signs, m = 2/pi) and to r^3 at large n (m = 1); interpolated by m between: .004 off at n = 3.
    """
    r = min(max(r, 0.0), 1.0)
    many = min(max((linear - 2 / math.pi) / (1 - 2 / math.pi), 0.0), 1.0)
    return many * r**3 + (1 - many) * (math.asin(r) - r) / (math.pi / 2 - 1)


@dataclass(frozen=True)
class Change:
    """The change of a tensor by a step; each (T, T).

    Attributes:
        coherent: P.
        overlap: M.
        total: U.
        scattered: S, the response of P to the overlaps of a draw.
        beyond: nonlinear part of writes to the stream, or None.
    """

    coherent: Array
    overlap: Array
    total: Array
    scattered: Array
    beyond: Beyond | None = None

    @classmethod
    def none(cls, count: int) -> Change:
        """No change of `count` tokens."""
        return cls.of(np.zeros((count, count)))

    @classmethod
    def of(cls, coherent: Array) -> Change:
        """A change with a coherent part only."""
        nothing = np.zeros_like(coherent)
        return cls(coherent, nothing, nothing, nothing)

    def new(self, kernel: Array) -> Array:
        """The updated kernel."""
        return kernel + self.overlap + self.overlap.T + self.total

    def updated_overlap(self, kernel: Array) -> Array:
        """E h'_t h_s, h' the updated tensor, from the kernel before."""
        return kernel + self.overlap

    def share(self, kernel: Array) -> float:
        """Largest mean square of the change over that of the tensor."""
        return float(np.max(np.diag(self.total)) / np.max(np.diag(kernel)))

    def times(self, factor: Array | float) -> Change:
        """All parts times a factor, or one for each pair of tokens."""
        return self.each(lambda part: factor * part)

    def each(
        self, function: Callable[[Array], Array], coherent: Callable[[Array], Array] | None = None
    ) -> Change:
        """All parts mapped by a linear function; `coherent`: that of P and S if it differs."""
        of_p = function if coherent is None else coherent
        return Change(
            of_p(self.coherent),
            function(self.overlap),
            function(self.total),
            of_p(self.scattered),
            None if self.beyond is None else self.beyond.mapped(function),
        )

    def plus(self, other: Change, gradient: Array) -> Change:
        """The sum with another change of the same tensor, E delta delta = `gradient`.

        The two are independent but for their coherent parts, E u u' = P D P'^T, and the nonlinear
        parts' correlation.
        """
        cross = between(self.coherent, gradient, other.coherent)
        found = Change(
            self.coherent + other.coherent,
            self.overlap + other.overlap,
            self.total + other.total + cross + cross.T,
            self.scattered + other.scattered,
            self.beyond,
        )
        return found if other.beyond is None else found.with_nonlinear(other.beyond)

    def decorrelated(self, before: Array, after: Array) -> Change:
        """The change at the sum of a residual block, as `Beyond.behind`."""
        if self.beyond is None:
            return self
        return dataclasses.replace(self, beyond=self.beyond.behind(before, after))

    def with_nonlinear(self, more: Beyond) -> Change:
        """Add the nonlinear part of a write that is otherwise included, and its cross terms."""
        if self.beyond is None:
            return dataclasses.replace(self, beyond=more)
        total = self.total + self.beyond.alike(more)
        return dataclasses.replace(self, total=total, beyond=self.beyond.with_more(more))

    def shifted(self, coherent: float, total: float, gradient: Array) -> Change:
        """Add a bias's step, whose P and U are the same numbers for all pairs of tokens."""
        cross = coherent * (self.coherent @ gradient.sum(1))
        both = np.add.outer(cross, cross)
        linear = coherent * coherent * float(gradient.sum())
        found = dataclasses.replace(
            self, coherent=self.coherent + coherent, total=self.total + total + both
        )
        if total - linear <= _EXACT * total:
            return found
        return found.with_nonlinear(Beyond.of(np.full_like(both, total - linear), linear / total))

    def rescaled(self, kernel: Array, factor: Array, less: Array) -> Change:
        """The change r u + (r - 1) h of r_t (h_t + u_t), r a number per token; `less` is r - 1,
        given apart for its digits."""
        r, q = factor[:, None], less[:, None]
        found = self.each(lambda part: r * r.T * part, lambda part: r * part)
        cross = r * q.T * self.overlap
        return dataclasses.replace(
            found,
            overlap=r * self.overlap + q * kernel,
            total=found.total + q * q.T * kernel + cross + cross.T,
        )


_EXACT = 1e-9
"""Share of a square below which its nonlinear part is rounding."""


@dataclass(frozen=True, eq=False)
class Overlaps:
    """The scatter of the overlaps of a stream's tokens over draws.

    The cosine of tokens t and s is C_ts + kappa_ts, with the approximation
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
        """From the tokens' kernel."""
        size = np.sqrt(np.maximum(np.diag(kernel), 1e-300))
        return cls(kernel / np.outer(size, size), size, width)

    @functools.cached_property
    def _loose(self) -> Array:
        return np.asarray(1 - self.correlation * self.correlation)

    def square(self, first: Array, second: Array, gradient: Array) -> Array:
        """E (S o kappa) D (S' o kappa)^T of two changes with responses S and S'."""
        if not (first.any() and second.any()):
            return np.zeros_like(first)
        c, one = self.correlation, self._loose * first
        two = one if second is first else self._loose * second
        return np.asarray(c * between(one, gradient * c, two) / self.width)
