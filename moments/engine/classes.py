"""Classes of positions: a causal sequence of any length as a few nodes in log position.

Under a causal mask, tokens that are alike but for their position have a kernel D(i) for a token and
K(i, j) for two of them, both smooth in the logarithms of their positions. They are held at nodes
x_1 = 1 < ... < x_P = L, dense at the start and log-spaced beyond; K at (p, p) is the value between
two neighbours near x_p. Sums over tokens are sums over nodes with counts,

    sum_{j <= x_p} f(j) = sum_q keys[p, q] f(x_q),

those of the interpolant of f that is cubic in log j between its nearest nodes, all of them on the
summed side of x_p: f may jump there. The last position is by itself, since it has no next token to
predict: no cell before it is interpolated from it. A sum over rows i >= x_q, whose terms fall like
i^-k because attention's weights do, interpolates i^k f(i).

A matrix over keys has a part of each key's own beside the smooth one, X = (a, B), and products
close over the counts N of the inner key:

    (a, B)(a', B') = (a a', a B' + B a' + B N B').

With every position a node all counts are 1 and nothing is approximated.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EXACT = 4
"""First positions that are nodes of their own."""

PER_OCTAVE = 2.0
"""Nodes for every doubling of the position beyond them. At 256 positions, against twice as many and
six exact ones: gradients move by 3e-3 at most and correlations by 2e-4; with 1.5 by 9e-3 and 5e-4,
with 1 by 3e-2 and 1e-3."""

SUMMED = 64
"""Positions between two nodes that are summed one by one; more by a Gauss rule of 24 points."""


@dataclass(frozen=True, eq=False)
class PositionClasses:
    """Nodes in position and what sums over tokens make of them.

    Attributes:
        length: tokens L.
        nodes: (P,) positions, counted from 1; the last are L - 1 and L.
        keys: (P, P) counts of sum_{j <= x_p}.
        rows: (P, P) counts [q, p] of sum_{i >= x_q} of what falls like 1/i.
        rows_square: likewise of what falls like 1/i^2.
    """

    length: int
    nodes: NDArray[np.intp]
    keys: Array = field(init=False)
    rows: Array = field(init=False)
    rows_square: Array = field(init=False)

    def __post_init__(self) -> None:
        for name, power in (("keys", None), ("rows", 1.0), ("rows_square", 2.0)):
            object.__setattr__(self, name, _counts(self.nodes, power))

    @classmethod
    def of(cls, length: int, exact: int = EXACT, per_octave: float = PER_OCTAVE) -> PositionClasses:
        """Nodes for a sequence: its first `exact` positions, then `per_octave` for a doubling."""
        return _spaced(int(length), int(exact), float(per_octave))

    @property
    def count(self) -> Array:
        """(P,) tokens that a node stands for."""
        return np.asarray(self.keys[-1])

    @functools.cached_property
    def pair_count(self) -> Array:
        """(P, P) ordered pairs of different tokens: as many as there are, so that what is the same
        for all pairs averages to itself."""
        pairs = self.count[:, None] * (self.keys - np.eye(len(self.nodes)))
        pairs = pairs + pairs.T
        return np.asarray(pairs * (self.length * (self.length - 1.0) / pairs.sum()))

    @functools.cached_property
    def shared(self) -> Array:
        """(P, P, P) counts [p, s, q] of keys that rows p and s both see."""
        index = np.arange(len(self.nodes))
        return self.keys[np.minimum.outer(index, index)]

    @functools.cached_property
    def split(self) -> Array:
        """(P, P, P) counts [s, p, q] of sum_{j <= x_p} of what may jump behind x_s <= x_p."""
        size = len(self.nodes)
        found = np.zeros((size, size, size))
        for short in range(size):
            found[short, short:] = self.keys[short]
            for long in range(short + 1, size):
                found[short, long] += self._behind(short, long)
        return found

    def _behind(self, short: int, long: int) -> Array:
        """(P,) counts of sum_{x_s < j <= x_p}, from nodes behind x_s alone."""
        nodes, logs, counts = self.nodes, np.log(self.nodes), np.zeros(len(self.nodes))
        counts[short + 1 : long + 1] = 1.0
        last = min(long, len(nodes) - 2)
        for cell in range(short, last):
            points, masses = _between(nodes[cell], nodes[cell + 1])
            stencil = _stencil(cell, short + 1, last)
            counts[stencil] += (_lagrange(logs[stencil], np.log(points)) * masses).sum(1)
        return counts

    def mean(self, values: Array) -> Array:
        """(...) average over tokens of (..., P) values."""
        return np.asarray((values * self.count).sum(-1) / self.length)

    def spread_out(self, values: Array) -> Array:
        """(..., L) mean squares at every position, from (..., P).

        Their logarithms are interpolated: gradients under Post-LN fall from one position to the
        next by more than what is added to them, and a cubic of the values would overshoot zero.
        """
        inner, matrix = values[..., :-1], _interpolation(self.nodes)[:-1, :-1].T
        positive = np.all(inner > 0, axis=-1, keepdims=True)
        by_logs = np.exp(np.log(np.where(positive, inner, 1.0)) @ matrix)
        found = np.where(positive, by_logs, inner @ matrix)
        return np.concatenate([found, values[..., -1:]], axis=-1)


@functools.lru_cache(maxsize=16)
def _spaced(length: int, exact: int, per_octave: float) -> PositionClasses:
    first = np.arange(1, min(exact, length) + 1)
    if length <= exact + 2:
        first = np.arange(1, length + 1)
        return PositionClasses(length, first)
    steps = max(1, int(np.ceil(np.log2(length / exact) * per_octave)))
    rest = np.round(exact * ((length - 1) / exact) ** (np.arange(1, steps + 1) / steps))
    nodes = np.union1d(first, rest.astype(np.intp))
    return PositionClasses(length, np.append(nodes, length))


def _between(low: int, high: int) -> tuple[Array, Array]:
    """Points and masses of the sum over positions strictly between two nodes."""
    count = high - low - 1
    if count <= SUMMED:
        return np.arange(low + 1, high, dtype=np.float64), np.ones(max(count, 0))
    points, masses = np.polynomial.legendre.leggauss(24)  # over the cells' edges, low + 1/2 on
    half = 0.5 * count
    return 0.5 * (low + high) + half * points, half * masses


def _lagrange(logs: Array, at: Array) -> Array:
    """(stencil, points) cubic or lower interpolation from the logarithms of some nodes."""
    basis = np.ones((len(logs), len(at)))
    for one in range(len(logs)):
        for other in range(len(logs)):
            if one != other:
                basis[one] *= (at - logs[other]) / (logs[one] - logs[other])
    return basis


def _stencil(cell: int, low: int, high: int) -> slice:
    """At most four nodes from low to high, around the cell behind node `cell`."""
    size = min(4, high - low + 1)
    start = min(max(cell - (size - 2) // 2, low), high - size + 1)
    return slice(start, start + size)


def _counts(nodes: NDArray[np.intp], power: float | None) -> Array:
    """[end, node] of sums up to node `end` (power None), or from it on, of what falls like
    i^-power."""
    total, logs = len(nodes), np.log(nodes)
    cells = [_between(*pair) for pair in itertools.pairwise(nodes)]
    found: dict[tuple[int, int, int], Array] = {}

    def of_cell(cell: int, stencil: slice) -> Array:
        key = cell, stencil.start, stencil.stop
        if key not in found:
            points, masses = cells[cell]
            basis = _lagrange(logs[stencil], np.log(points)) * masses
            if power is not None:
                basis = basis * (nodes[stencil][:, None] / points) ** power
            found[key] = basis.sum(1)
        return found[key]

    counts = np.zeros((total, total))
    for end in range(total):
        low, high = (0, end) if power is None else (end, total - 1)
        counts[end, low : high + 1] += 1.0
        inner = min(high, total - 2)
        for cell in range(low, inner):
            stencil = _stencil(cell, low, inner)
            counts[end, stencil] += of_cell(cell, stencil)
    return counts


@functools.lru_cache(maxsize=4)
def _interpolated(nodes: tuple[int, ...]) -> Array:
    logs, matrix = np.log(nodes), np.zeros((nodes[-1], len(nodes)))
    matrix[np.asarray(nodes) - 1, np.arange(len(nodes))] = 1.0
    for cell, (low, high) in enumerate(itertools.pairwise(nodes)):
        stencil = _stencil(cell, 0, len(nodes) - 2)
        inside = np.arange(low + 1, high)
        matrix[inside - 1, stencil] = _lagrange(logs[stencil], np.log(inside)).T
    return matrix


def _interpolation(nodes: NDArray[np.intp]) -> Array:
    return _interpolated(tuple(int(node) for node in nodes))


# --- matrices over keys ---------------------------------------------------------------------------

Matrix = tuple[Any, Any]
"""(own, pairs): what a key has beyond `pairs` on the diagonal, (..., P), and (..., P, P)."""


def diagonal(pairs: Array) -> Array:
    """(..., P) values between neighbours."""
    return np.diagonal(pairs, axis1=-2, axis2=-1)


def product(one: Matrix, other: Matrix, counts: Array) -> Matrix:
    """Of two matrices, summed over the inner key by its counts (..., P)."""
    (a, left), (b, right) = one, other
    both = left @ (counts[..., :, None] * right)
    return a * b, a[..., :, None] * right + left * b[..., None, :] + both


def transposed(one: Matrix) -> Matrix:
    """Of two keys."""
    return one[0], np.swapaxes(one[1], -1, -2)


class ClassMatrix:
    """A matrix over tokens on classes, with the arithmetic of arrays (..., L, L).

    Classes are taken as blocks of alike tokens here, each of `count`: a row that sees a part of a
    class sees all of it with as much less weight. Products, transposes and sums are then those of
    one matrix over all tokens, so that maps of kernels and their transposes agree; it costs the
    order of a cell in how a mask's edge is met.

    Attributes:
        own: (..., P) entries of a token with itself.
        pairs: (..., P, P) of two different tokens.
        classes: the positions.
    """

    __array_ufunc__ = None
    __slots__ = ("classes", "own", "pairs")

    def __init__(self, own: Array, pairs: Array, classes: PositionClasses) -> None:
        shape = np.broadcast_shapes(np.shape(own)[:-1], np.shape(pairs)[:-2])
        size = np.shape(pairs)[-1]
        self.own = np.broadcast_to(own, (*shape, size))
        self.pairs = np.broadcast_to(pairs, (*shape, size, size))
        self.classes = classes

    @classmethod
    def of_rows(cls, rows: Array, classes: PositionClasses) -> ClassMatrix:
        """Of what rows give to one key of a class that they see, (..., P, P)."""
        count, inside = classes.count, np.diagonal(rows, axis1=-2, axis2=-1)
        pairs = rows * classes.keys / count
        several = count > 1.5
        beside = (np.diagonal(classes.keys) - 1.0) / np.where(several, count - 1.0, 1.0)
        index = np.arange(len(count))
        pairs[..., index, index] = np.where(
            several, inside * beside, inside * np.diagonal(classes.keys) / count
        )
        return cls(np.where(several, inside, pairs[..., index, index]), pairs, classes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pairs.shape

    @property
    def size(self) -> int:
        return int(self.pairs.size)

    def astype(self, kind: Any) -> ClassMatrix:
        return ClassMatrix(self.own.astype(kind), self.pairs.astype(kind), self.classes)

    def transposed(self) -> ClassMatrix:
        return ClassMatrix(self.own, np.swapaxes(self.pairs, -1, -2), self.classes)

    def total(self) -> Array:
        """(...) sum of all entries."""
        return np.asarray((self.row_sums() * self.classes.count).sum(-1))

    def row_sums(self) -> Array:
        """(..., P) sums over the second token."""
        return np.asarray(self.own - diagonal(self.pairs) + self.pairs @ self.classes.count)

    def trace(self) -> Array:
        return np.asarray((self.own * self.classes.count).sum(-1))

    def __getitem__(self, index: Any) -> ClassMatrix:
        return ClassMatrix(self.own[index], self.pairs[index], self.classes)

    def __len__(self) -> int:
        return len(self.pairs)

    def __array__(self, *_: Any, **__: Any) -> Array:
        raise TypeError("a matrix on classes is no array: apply functions of entries `entrywise`")

    def __matmul__(self, other: Any) -> Any:
        count, apart = self.classes.count, self.own - diagonal(self.pairs)
        if not isinstance(other, ClassMatrix):  # a column per token
            return apart[..., None] * other + self.pairs @ (count[:, None] * other)
        beyond = other.own - diagonal(other.pairs)
        pairs = apart[..., :, None] * other.pairs + self.pairs * beyond[..., None, :]
        pairs = pairs + self.pairs @ (count[:, None] * other.pairs)
        return ClassMatrix(apart * beyond + diagonal(pairs), pairs, self.classes)

    def _with(self, other: Any, operation: Any) -> ClassMatrix:
        if isinstance(other, ClassMatrix):
            return ClassMatrix(
                operation(self.own, other.own), operation(self.pairs, other.pairs), self.classes
            )
        return ClassMatrix(
            operation(self.own, own_part(other)), operation(self.pairs, other), self.classes
        )

    def __add__(self, other: Any) -> ClassMatrix:
        return self._with(other, np.add)

    def __sub__(self, other: Any) -> ClassMatrix:
        return self._with(other, np.subtract)

    def __mul__(self, other: Any) -> ClassMatrix:
        return self._with(other, np.multiply)

    def __truediv__(self, other: Any) -> ClassMatrix:
        return self._with(other, np.divide)

    def __pow__(self, power: int) -> ClassMatrix:
        return ClassMatrix(self.own**power, self.pairs**power, self.classes)

    def __rsub__(self, other: Any) -> ClassMatrix:
        return (self * -1.0).__add__(other)

    __radd__ = __add__
    __rmul__ = __mul__


def own_part(other: Any) -> Any:
    """What meets a token's own entry, of an array that meets pairs (..., P or 1, P or 1)."""
    other = np.asarray(other)
    if other.ndim < 2:
        return other
    if other.shape[-1] == 1:
        return other[..., 0]
    return other[..., 0, :] if other.shape[-2] == 1 else diagonal(other)
