"""Classes of positions: a causal sequence of any length as a few nodes in log position.

Kernels of tokens that differ in position alone are smooth in its logarithm. They are kept at nodes
x_1 = 1 < ... < x_P = L; K at (p, p) is the value between two neighbours near x_p. Sums over tokens
are sums over nodes with counts, those of an interpolant. See docs/theory/state.md, Classes of
positions.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EXACT = 4
"""First positions that are nodes of their own."""

PER_OCTAVE = 2.0
"""Nodes for every doubling of the position beyond them."""

PER_WINDOW, LEAST_PER_WINDOW, FEW_WINDOWS, MOST_WINDOWS = 4.0, 2.0, 16, 72
"""Nodes for every window of positions, in sequences of few windows and of more; beyond the most
there are no classes: cells as wide as a window lose what only nearby tokens have in common."""

SUMMED = 64
"""Positions between two nodes that are summed one by one; more by a Gauss rule of 24 points."""


@dataclass(frozen=True, eq=False)
class PositionClasses:
    """Nodes in position and what sums over tokens make of them.

    Attributes:
        nodes: (P,) positions, counted from 1; the last are L - 1 and L.
    """

    length: int
    nodes: NDArray[np.intp]

    @classmethod
    def of(
        cls,
        length: int,
        window: int | None = None,
        exact: int = EXACT,
        per_octave: float = PER_OCTAVE,
        per_window: float | None = None,
        widening: float = 0.0,
    ) -> PositionClasses:
        """Nodes for a sequence: its first `exact` positions, then `per_octave` for a doubling, and
        no fewer than `per_window` for a window; None: as many as its windows allow. Without
        windows, where steps widen by a part each, `per_octave` is of the last positions."""
        if window is None or window >= length:
            if widening > 0.0:
                return _widening(int(length), float(per_octave), float(widening))
            return _spaced(int(length), float(length), int(exact), float(per_octave))
        if per_window is None:
            per_window = PER_WINDOW if length <= FEW_WINDOWS * window else LEAST_PER_WINDOW
        return _spaced(int(length), window / per_window, int(exact), float(per_octave))

    @functools.cached_property
    def count(self) -> Array:
        """(P,) tokens that a node stands for."""
        return np.asarray(self.causal.key_counts().keys[-1])

    @property
    def inside(self) -> PositionClasses:
        """Classes of one sequence or document: these, where there are no others."""
        return self

    @property
    def causal(self) -> PositionClasses:
        """The same nodes under a mask, by which tokens and their pairs are counted."""
        return self

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens of every sequence or document."""
        return (self.length,)

    def blocks(self, diagonal: Array, off_diagonal: Array) -> tuple[Matrix, ...]:
        """A matrix (own (..., P), pairs (..., P, P)), by what two tokens have to do with each
        other: of one document, and where there are several of two."""
        return ((diagonal, off_diagonal),)

    def blocks_by_relation(self, diagonal: Array, off_diagonal: Array) -> tuple[Matrix, ...]:
        """The same, and by what else pairs of a cell differ in."""
        return self.blocks(diagonal, off_diagonal)

    def joined(self, *blocks: Matrix) -> Matrix:
        """The same back."""
        return blocks[0]

    @property
    def of_one(self) -> PositionClasses:
        """Those that `ClassMatrix` is on: of one document."""
        return self.inside

    def alone(self, diagonal: Array, off_diagonal: Array) -> Matrix:
        """A matrix of one document, on `of_one`."""
        return self.blocks(diagonal, off_diagonal)[0]

    def between(self, diagonal: Array, off_diagonal: Array) -> Matrix | None:
        """That of two, own parts being those of two tokens at one place; None: there is one."""
        _, *across = self.blocks(diagonal, off_diagonal)
        return across[0] if across else None

    def over_relations(self, off_diagonal: Array) -> Array:
        """(..., P, P) means over what else pairs of two cells differ in."""
        return off_diagonal

    def with_relations(self, product: Matrix, one: ClassMatrix, other: ClassMatrix) -> Matrix:
        """The product of two matrices, of that of their means over cells."""
        return product

    @property
    def there(self) -> NDArray[np.bool_]:
        """(L,), or (documents, longest): whether a document has that position."""
        return np.ones(self.length, dtype=bool)

    def within(self, off_diagonal: Array) -> Array:
        """The matrix of pairs of one document, and 0 where two are."""
        return off_diagonal

    @property
    def at_one_place(self) -> Array:
        """1 for two tokens that are at one place of two documents, else 0."""
        return np.zeros(())

    @functools.cached_property
    def following_pairs(self) -> Array:
        """(P, P) share of pairs (i, j) in which j is the token behind i, as many as there are: two
        nodes that are one position apart, and beyond them two of one class."""
        one = self.inside
        neighbours = np.diff(one.nodes) == 1
        result = np.diag(neighbours.astype(float), 1)
        inside = np.append(~neighbours, False)
        inside[-2] = True
        off_diagonal = np.maximum(np.diagonal(one.pair_count), 0.0)
        several = inside & (off_diagonal > 0.0)
        result[several, several] = np.minimum(one.count[several] / off_diagonal[several], 1.0)
        result = self.within(result)
        total = float(self.there.sum() - len(np.atleast_2d(self.there)))
        return np.minimum(result * to_total(result * self.pair_count, total), 1.0)

    @property
    def documents(self) -> Matrix | None:
        """How many documents, or pairs of two, reach a class or two; None where all reach all: a
        gradient that attention sends is summed over rows, which not every key has."""
        return None

    def everywhere(self, matrix: Matrix) -> Matrix:
        """Of what any two places have in common, be they of one document or of two."""
        return self.joined(*[matrix] * min(len(self.ends), 2))

    def in_one(self, sums: Array) -> Array:
        """(..., P) sums over tokens of each class, as if there were one document."""
        return sums

    def repeated(self, values: Array) -> Array:
        """(..., nodes) of what one document's classes have."""
        return values

    @functools.cached_property
    def pair_count(self) -> Array:
        """(P, P) ordered pairs of different tokens: as many as there are, so that what is the same
        for all pairs averages to itself."""
        off_diagonal = self.count[:, None] * (
            self.causal.key_counts().keys - np.eye(len(self.nodes))
        )
        off_diagonal = off_diagonal + off_diagonal.T
        return np.asarray(off_diagonal * (self.length * (self.length - 1.0) / off_diagonal.sum()))

    def key_counts(self, window: int | None = None) -> KeyCounts:
        """What the rows of a causal mask see; the same for the same window."""
        whole = window is None or window >= self.length
        return _seen(self, self.length if whole or window is None else window)

    def mean(self, values: Array) -> Array:
        """(...) average over tokens of (..., P) values."""
        return np.asarray((values * self.count).sum(-1) / self.length)

    def mean_of_pairs(self, off_diagonal: Array) -> Array:
        """(...) average over pairs of different tokens of one sequence, of (..., P, P)."""
        return self.sum_of_pairs(off_diagonal) / max(self.length * (self.length - 1), 1)

    def sum_of_pairs(self, off_diagonal: Array) -> Array:
        """(...) sum over ordered pairs of different tokens."""
        return np.asarray((off_diagonal * self.pair_count).sum((-2, -1)))

    @functools.cached_property
    def _cells(self) -> tuple[NDArray[np.intp], Array]:
        """`cells_of` all positions."""
        return self.cells_of(np.arange(1, self.length + 1))

    def cells_of(self, place: NDArray[Any]) -> tuple[NDArray[np.intp], Array]:
        """(n,) the node at a position or before it, and the next one's part by log position."""
        last = max(len(self.nodes) - 2, 0)
        left = np.minimum(np.searchsorted(self.nodes, place, side="right") - 1, last)
        logs = np.log(np.append(self.nodes, 2.0 * self.length))
        return left, (np.log(place) - logs[left]) / (logs[left + 1] - logs[left])

    @functools.cached_property
    def basis(self) -> Array:
        """(P, L) functions linear in log position between nodes, 1 at their own: cells."""
        (left, share), place = self._cells, np.arange(self.length)
        result = np.zeros((len(self.nodes) + 1, self.length))
        result[left, place], result[left + 1, place] = 1.0 - share, share
        return result[:-1]

    def cell_means(self, values: Array) -> Array:
        """(P,) means over cells of (L,) values."""
        left, share = self._cells
        sums, sizes = (
            np.bincount(left, (1.0 - share) * one, len(self.nodes) + 1)
            + np.bincount(left + 1, share * one, len(self.nodes) + 1)
            for one in (values, np.ones(self.length))
        )
        return np.asarray(sums[:-1] / sizes[:-1])

    def pair_means(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> Array:
        """(P, P) shares of pairs of different tokens j and l of two cells with first[j] equal to
        second[l]; over all pairs of the sequence as many as there are."""
        return self.of_sums(*(as_many(*one) for one in self.pair_sums(first, second)))

    def of_sums(self, *means: Array) -> Array:
        """The matrix of means that are taken over each of `pair_sums`."""
        return means[0]

    def pair_sums(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> list[PairSums]:
        """Of the same, by what else pairs differ in."""
        known, where = np.unique(np.concatenate([first, second]), return_inverse=True)
        sums = [
            np.array([np.bincount(one, hat, len(known)) for hat in self.basis])
            for one in np.split(where, 2)
        ]
        size = self.basis.sum(1)
        itself = (self.basis * (first == second)) @ self.basis.T
        result, count = (
            sums[0] @ sums[1].T - itself,
            np.outer(size, size) - self.basis @ self.basis.T,
        )
        return [PairSums(result, count, self.pair_count)]

    def spread_out(self, values: Array) -> Array:
        """(..., L) mean squares at every position, from (..., P).

        Their logarithms are interpolated: gradients under Post-LN fall from one position to the
        next by more than what is added to them, and a cubic of the values would overshoot zero.
        """
        inner = values[..., :-1]
        positive = np.all(inner > 0, axis=-1, keepdims=True)
        known = np.where(positive, np.log(np.where(positive, inner, 1.0)), inner)
        result = np.empty((*values.shape[:-1], self.length))
        result[..., self.nodes[:-1] - 1] = known
        for inside, near, weights in _between(tuple(self.nodes.tolist())):
            result[..., inside] = known[..., near] @ weights
        others = result[..., :-1]
        np.exp(others, out=others, where=positive)
        result[..., -1] = values[..., -1]
        return result


class PairSums(NamedTuple):
    """Pairs of positions of two cells, (P, P), or some other such pairs.

    Attributes:
        matching: how many are as asked for, by `PositionClasses.basis`.
        total: how many there are.
        expected: the same as sums over pairs count them.
    """

    matching: Array
    total: Array
    expected: Array


@functools.lru_cache(maxsize=16)
def _spaced(length: int, step: float, exact: int, per_octave: float) -> PositionClasses:
    if length <= exact + 2:
        return PositionClasses(length, np.arange(1, length + 1))
    # Positions as far apart as octaves or the window allow, then moved to end where they should.
    places, ratio = [float(exact)], 2.0 ** (1.0 / per_octave)
    while places[-1] < length - 1:
        places.append(min(places[-1] * ratio, places[-1] + step))
    logs = np.log(np.array(places) / exact)
    steps = exact * np.exp(logs * (np.log((length - 1) / exact) / logs[-1]))
    nodes = {*range(1, exact + 1), *np.round(steps).astype(int).tolist(), length}
    return PositionClasses(length, np.array(sorted(nodes), np.intp))


@functools.lru_cache(maxsize=16)
def _widening(length: int, per_octave: float, widening: float) -> PositionClasses:
    """Nodes whose steps in log position grow by a factor each, from the last one backwards: sums
    over tokens count a cell by its tokens, most of which are in the last ones, and with them goes
    what means over cells lose of keys that turn inside."""
    octaves = np.log2(length - 1)
    steps = max(round(np.log1p(widening * octaves * per_octave) / np.log1p(widening)), 1)
    away = np.expm1(np.arange(steps + 1) * np.log1p(widening))
    places = np.round((length - 1) * 2.0 ** (-octaves * away / away[-1])).astype(int)
    return PositionClasses(length, np.array(sorted({1, *places.tolist(), length}), np.intp))


@dataclass(frozen=True, eq=False)
class BothSides(PositionClasses):
    """Positions of sequences without a mask, whose rows see those less than a window away on both
    sides: nodes as under a mask, since what differs at either end does so over a window."""

    def key_counts(self, window: int | None = None) -> KeyCounts:
        return _seen_both(self, self.length if window is None else min(window, self.length))

    @property
    def causal(self) -> PositionClasses:
        return _nodes(self.length, tuple(self.nodes.tolist()))


@functools.lru_cache(maxsize=16)
def _nodes(length: int, nodes: tuple[int, ...]) -> PositionClasses:
    return PositionClasses(length, np.array(nodes))


@functools.lru_cache(maxsize=16)
def both_sides(one: PositionClasses) -> BothSides:
    """The same for the same classes."""
    return BothSides(one.length, one.nodes)


@dataclass(frozen=True, eq=False)
class OneClass(PositionClasses):
    """All tokens of a sequence as one class, whose rows see every key: what a node holds are means
    over tokens and over pairs of different ones."""

    @property
    def basis(self) -> Array:
        return np.ones((1, self.length))

    def key_counts(self, window: int | None = None) -> KeyCounts:
        return _everything(self)


@functools.lru_cache(maxsize=64)
def one_class(length: int) -> OneClass:
    """The same for the same length."""
    return OneClass(length, np.array([length]))


@dataclass(frozen=True, eq=False)
class DocumentClasses(PositionClasses):
    """Several sequences or documents that share weights, each of which attends to itself alone.

    Under a causal mask what a token is depends on its place alone, however long its document: one
    set of classes serves all. Two documents stand for every two, so that `nodes` are those of one
    and then of the other, and a matrix of pairs has the blocks

        [[inside, across], [across, inside]],

    `across` having two tokens at one place of two documents on its diagonal, as a token with itself
    is next to `inside`: they share a row of a table of positions. What two tokens near each other
    share in two documents is read off both sides of it.

    A number of a class is its mean over the documents that reach it, whose shares are counts.

    Attributes:
        length: tokens of all documents.
        one: classes of the longest.
    """

    one: PositionClasses
    lengths: tuple[int, ...]

    @property
    def inside(self) -> PositionClasses:
        return self.one

    @property
    def ends(self) -> tuple[int, ...]:
        return self.lengths

    @functools.cached_property
    def present(self) -> Array:
        """(P,) documents that reach a class, on average over its positions."""
        return self.one.cell_means(self._reaching.astype(np.float64))

    @functools.cached_property
    def _reaching(self) -> NDArray[np.intp]:
        """(longest,) documents that reach a position."""
        ends = np.bincount(self.lengths, minlength=self.one.length + 1)
        return np.asarray(len(self.lengths) - np.cumsum(ends)[:-1])

    @functools.cached_property
    def together(self) -> tuple[Array, Array]:
        """(P, P) documents that reach both positions, and ordered pairs of different ones of which
        each reaches its own; (p, p) of the first is `present`."""
        size = len(self.present)
        inside = self.present[np.maximum.outer(np.arange(size), np.arange(size))]
        across = np.maximum(np.outer(self.present, self.present) - inside, 0.0)
        return inside, np.where(across > LEAST_SHARED * inside, across, 0.0)

    @functools.cached_property
    def _at_place(self) -> Array:
        """(P,) ordered pairs of different documents that reach a position."""
        return self.one.cell_means(self._reaching * (self._reaching - 1.0))

    @functools.cached_property
    def at_one_place(self) -> Array:
        size = len(self.one.nodes)
        return np.eye(2 * size, k=size) + np.eye(2 * size, k=-size)

    @functools.cached_property
    def _counts(self) -> tuple[Array, Array]:
        """(n, P) tokens of a class up to the end of a document, and (n,) documents that end there,
        the shortest first."""
        ends, many = np.unique(self.lengths, return_counts=True)
        sums, last = _Sums(self.one.nodes, self.one.length), len(self.one.nodes) - 1
        return np.array([sums(0, int(end), 0, last) for end in ends]), many.astype(float)

    @functools.cached_property
    def count(self) -> Array:
        counts, many = self._counts
        return np.tile(0.5 * (many @ counts), 2)

    @functools.cached_property
    def inside_count(self) -> Array:
        """(P, P) ordered pairs of different tokens of one document."""
        counts, many = self._counts
        off_diagonal = (many @ counts)[:, None] * (
            self.one.causal.key_counts().keys - np.eye(len(self.one.nodes))
        )
        lengths = np.array(self.lengths, float)
        off_diagonal = off_diagonal + off_diagonal.T
        return np.asarray(off_diagonal * to_total(off_diagonal, float(lengths @ (lengths - 1.0))))

    @functools.cached_property
    def across_count(self) -> Matrix:
        """Of two documents: those at one place (P,), and others (P, P)."""
        counts, many = self._counts
        # Of two documents as many as the shorter one has places, and then the rest of the longer.
        longer = many.sum() - np.cumsum(many)
        at_place = (many * (many - 1.0 + 2.0 * longer)) @ counts
        off_diagonal = at_place[:, None] * (
            self.one.causal.key_counts().keys - np.eye(len(at_place))
        )
        rest = np.cumsum((many[:, None] * counts)[::-1], axis=0)[::-1]
        rest = rest - (longer + many)[:, None] * counts
        off_diagonal += np.einsum("n,np,nq->pq", many, rest, counts)
        return at_place, np.asarray(off_diagonal + off_diagonal.T)

    @functools.cached_property
    def pair_count(self) -> Array:
        diagonal, off_diagonal = self.across_count
        inner = np.diagonal(off_diagonal)
        # Those next to the diagonal are counted where they are read from.
        across = off_diagonal - np.diag(inner) + inner[:, None] * self._aside
        across = 0.5 * (across + across.T) + np.diag(diagonal)
        return 0.5 * np.block([[self.inside_count, across], [across, self.inside_count]])

    @functools.cached_property
    def _aside(self) -> Array:
        """(P, P) weights by which a row's other entries give that next to its diagonal: linear in
        log position from either side, along which the rest is smooth, and their mean."""
        logs, size = np.log(self.one.nodes), len(self.one.nodes)
        result = np.zeros((size, size))
        for node in range(size):
            sides = [
                range(node - 1, max(node - 3, -1), -1),
                range(node + 1, min(node + 3, size - 1)),
            ]
            sides = [side for side in sides if len(side)] or [range(node - 1, node - 2, -1)]
            for side in sides:
                near = np.array(side)
                result[node, near] += lagrange(logs[near], logs[[node]])[:, 0] / len(sides)
        return result

    def mean_of_pairs(self, off_diagonal: Array) -> Array:
        size, count = len(self.one.nodes), self.inside_count
        return np.asarray(
            (off_diagonal[..., :size, :size] * count).sum((-2, -1)) / max(count.sum(), 1.0)
        )

    @functools.cached_property
    def documents(self) -> Matrix | None:
        if len(set(self.lengths)) == 1:
            return None
        inside, across = self.together
        return self.joined((self.present, inside), (self._at_place, across))

    def in_one(self, sums: Array) -> Array:
        half = sums[..., : len(self.one.nodes)]
        return np.asarray(2.0 * half)

    def repeated(self, values: Array) -> Array:
        return np.concatenate([values, values], axis=-1)

    def mean(self, values: Array) -> Array:
        """Of (..., 2 P), or of (..., P) numbers that both have."""
        values = np.asarray(values)
        return super().mean(values if values.shape[-1] == len(self.nodes) else np.tile(values, 2))

    def key_counts(self, window: int | None = None) -> KeyCounts:
        return self.one.key_counts(window)

    def blocks(self, diagonal: Array, off_diagonal: Array) -> tuple[Matrix, ...]:
        size = len(self.one.nodes)
        across, index = np.array(off_diagonal[..., :size, size:]), np.arange(size)
        at_one_place = np.array(across[..., index, index])
        across[..., index, index] = 0.0
        across[..., index, index] = (across * self._aside).sum(-1)
        return (diagonal[..., :size], off_diagonal[..., :size, :size]), (at_one_place, across)

    def joined(self, *blocks: Matrix) -> Matrix:
        inside, across = blocks
        index, other = np.arange(len(self.one.nodes)), np.array(across[1])
        other[..., index, index] = across[0]
        turned = np.swapaxes(other, -1, -2)
        top, bottom = (
            np.concatenate(np.broadcast_arrays(*both), axis=-1)
            for both in ((inside[1], other), (turned, inside[1]))
        )
        return np.concatenate([inside[0]] * 2, axis=-1), np.concatenate([top, bottom], axis=-2)

    def within(self, off_diagonal: Array) -> Array:
        none = np.zeros_like(off_diagonal)
        return np.block([[off_diagonal, none], [none, off_diagonal]])

    @functools.cached_property
    def there(self) -> NDArray[np.bool_]:
        return np.asarray(np.arange(self.one.length) < np.array(self.lengths)[:, None])

    def cell_means(self, values: Array) -> Array:
        """(2 P,) means over cells of (documents, longest) values, each as far as it reaches."""
        sums = self.one.basis @ np.where(self.there, values, 0.0).sum(0)
        return np.tile(sums / (self.one.basis @ self._reaching), 2)

    def of_sums(self, *means: Array) -> Array:
        inner, outer, diagonal = means
        return np.asarray(self.joined((np.diagonal(inner), inner), (diagonal, outer))[1])

    def pair_sums(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> list[PairSums]:
        """Of one document, of two, and at one place of two: of (documents, longest) values, of
        which those that are not there do not count."""
        basis, there = self.one.basis, self.there
        weights = there + 0.0
        known, where = np.unique(np.stack([first, second]), return_inverse=True)
        one, two = np.reshape(where, (2, *there.shape))
        size, values = len(basis), len(known)
        offsets = np.arange(size)[:, None] * values

        def sums(which: NDArray[np.intp], by: Array) -> Array:
            flat = (offsets + which).ravel()
            result = np.bincount(flat, (basis * by).ravel(), size * values)
            return np.asarray(result.reshape(size, values), np.float64)

        every = [np.zeros((size, values)), np.zeros((size, values))]
        inside, places = np.zeros((size, size)), np.zeros((size, size))
        for number in range(len(there)):
            both = sums(one[number], weights[number]), sums(two[number], weights[number])
            inside += both[0] @ both[1].T
            every = [total + part for total, part in zip(every, both, strict=True)]
            cells = basis @ there[number]
            places += np.outer(cells, cells)
        itself = (weights * (one == two)).sum(0)
        at_place = np.arange(there.shape[1])[None, :] * values
        codes, result = np.unique(np.stack([at_place + one, at_place + two]), return_inverse=True)
        left, right = np.reshape(result, (2, *there.shape))
        pairs_at_place = np.bincount(left.ravel(), weights.ravel(), len(codes))
        pairs_at_place *= np.bincount(right.ravel(), weights.ravel(), len(codes))
        pairs_at_place = np.bincount(codes // values, pairs_at_place, there.shape[1]) - itself
        others = self._reaching * (self._reaching - 1.0)
        whole = np.outer(basis @ self._reaching, basis @ self._reaching)
        counts = (
            places - (basis * self._reaching) @ basis.T,
            whole - places - (basis * others) @ basis.T,
            basis @ others,
        )
        shares = (
            inside - (basis * itself) @ basis.T,
            every[0] @ every[1].T - inside - (basis * pairs_at_place) @ basis.T,
            basis @ pairs_at_place,
        )
        expected = self.inside_count, self.across_count[1], self.across_count[0]
        return [PairSums(*one) for one in zip(shares, counts, expected, strict=True)]

    def spread_out(self, values: Array) -> Array:
        """(..., longest) mean squares at every place."""
        return self.one.spread_out(values[..., : len(self.one.nodes)])


LEAST_SHARED = 1e-9
"""Pairs of documents that reach two positions, of those that reach one, below which none do."""


def as_many(result: Array, count: Array, expected: Array) -> Array:
    """Sums over their counts, such that weighed by what is counted elsewhere they are as many. A
    cell of one position has no pairs: those with the next stand in."""
    usable, total = count > 0.5, float(result.sum())
    result = np.where(usable, result / np.where(usable, count, 1.0), 0.0)
    if result.ndim == 2:
        for place in map(int, np.flatnonzero(~np.diagonal(usable))):
            neighbours = [min(place + 1, len(result) - 1), max(place - 1, 0)]
            result[place, place] = result[place, neighbours].mean()
    return result * to_total(result * expected, total)


def to_total(counts: Array, total: float) -> float:
    """The factor by which counts sum to what they should."""
    result = float(counts.sum())
    return total / result if result > 0.0 else 0.0


@functools.lru_cache(maxsize=16)
def documents_on(one: PositionClasses, lengths: tuple[int, ...]) -> DocumentClasses:
    """The same for the same documents, of which there are two at least."""
    return DocumentClasses(sum(lengths), np.tile(one.nodes, 2), one, lengths)


@functools.cache
def _gauss() -> tuple[Array, Array]:
    return np.polynomial.legendre.leggauss(24)


def positions_between(low: int, high: int) -> tuple[Array, Array]:
    """Points and masses of the sum over positions strictly between two nodes."""
    count = high - low - 1
    if count <= SUMMED:
        return np.arange(low + 1, high, dtype=np.float64), np.ones(max(count, 0))
    points, masses = _gauss()  # over the cells' edges, low + 1/2 on
    half = 0.5 * count
    return 0.5 * (low + high) + half * points, half * masses


def few_points(values: Array, most: int) -> tuple[Array, Array]:
    """Gauss rule of at most `most` nodes for the mean of a smooth function over given points.

    Exact for polynomials of degree 2 most - 1: nodes are the eigenvalues of the Jacobi matrix of
    the points' orthogonal polynomials (Golub and Welsch 1969).
    """
    points = np.asarray(values, dtype=np.float64)
    weights = np.full(len(points), 1.0 / len(points))
    if len(points) <= most:
        return points, weights
    centre, size = points.mean(), np.ptp(points) or 1.0
    x = (points - centre) / size
    basis = [np.sqrt(weights)]
    diagonal, neighbours = [], []
    for order in range(most):
        moved = x * basis[-1]
        diagonal.append(float(basis[-1] @ moved))
        for vector in basis:
            moved = moved - (vector @ moved) * vector
        neighbours.append(float(np.linalg.norm(moved)))
        if order + 1 < most:
            basis.append(moved / neighbours[-1])
    jacobi = np.diag(diagonal) + np.diag(neighbours[:-1], 1) + np.diag(neighbours[:-1], -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return centre + size * nodes, vectors[0] ** 2


def lagrange(logs: Array, at: Array) -> Array:
    """(stencil, points) cubic or lower interpolation from the logarithms of some nodes."""
    basis = np.ones((len(logs), len(at)))
    for one in range(len(logs)):
        for other in range(len(logs)):
            if one != other:
                basis[one] *= (at - logs[other]) / (logs[one] - logs[other])
    return basis


def stencil(cell: int, low: int, high: int) -> slice:
    """At most four nodes from low to high, around the cell behind node `cell`; three if that is
    beyond them, where a cubic would magnify what is not smooth."""
    size = min(4 if low <= cell < high else 3, high - low + 1)
    start = min(max(cell - (size - 2) // 2, low), high - size + 1)
    return slice(start, start + size)


@dataclass(frozen=True, eq=False)
class KeyCounts:
    """What the rows of a causal mask see, in counts.

    A row at node p sees the keys x_p - window < j <= x_p, and sums over them or over the rows that
    see a key are sums over nodes of an interpolant. Its nodes are on the summed side of an end
    where that may jump; what is of one row alone goes on beyond the first key of its window.

    Attributes:
        window: keys that a row attends to at most.
        starts: (P,) the last position that a row no longer attends to.
        ends: (P,) the last that it does.
        size: (P,) keys of a row.
        keys: (P, P) counts of a row's keys.
        shared: (P, P, P) counts [p, s, q] of the keys that rows p and s both see.
        split: (P, P, P) counts [s, p, q] of row p's keys, of what may jump where row s sees no
            more: behind x_s < x_p, or before its first key where x_s > x_p.
        rows: (P, P) counts [q, p] of the rows that see q, of what falls like 1/size.
        sending: (P, P, P) the same counts [q, r, p], of what may jump where rows begin or cease to
            see r.
        later: (P, P, P) counts [q, r, p] of those that see both, of what falls like 1/size^2.
        begins: (P,) its first node that is a key.
    """

    classes: PositionClasses
    window: int
    starts: NDArray[np.intp]
    ends: NDArray[np.intp]
    size: Array
    keys: Array
    shared: Array
    split: Array
    rows: Array
    sending: Array
    later: Array
    begins: NDArray[np.intp]

    @functools.cached_property
    def later_diagonal(self) -> Array:
        """(P, P) counts [q, p] of the rows that see q, of what falls like 1/size^2."""
        return diagonal_of(np.swapaxes(self.later, 0, 2)).T

    @functools.cached_property
    def visible(self) -> NDArray[np.bool_]:
        """(P, P) whether a row counts a key."""
        return np.asarray(self.keys != 0.0)


@functools.lru_cache(maxsize=16)
def _seen(classes: PositionClasses, reach: int) -> KeyCounts:
    nodes, total = classes.nodes, len(classes.nodes)
    starts = np.maximum(nodes - reach, 0)
    first = np.searchsorted(nodes, starts, "right")  # of a row's keys
    last = np.searchsorted(nodes, nodes + reach) - 1  # of the rows that see a key
    sums = _Sums(nodes, reach)
    keys, rows = np.zeros((total, total)), np.zeros((total, total))
    shared, split, later, sending = (np.zeros((total,) * 3) for _ in range(4))
    for p in range(total):
        split[p, p] = keys[p] = sums(starts[p], nodes[p], 0, p)
        rows[p] = sending[p, p] = sums(nodes[p] - 1, nodes[p] + reach - 1, p, last[p], 1)
        for s in range(p + 1):
            both = shared[p, s] = shared[s, p] = sums(starts[p], nodes[s], first[p], s)
            seeing = sums(nodes[p] - 1, nodes[s] + reach - 1, p, last[s], 2)
            later[p, s] = later[s, p] = seeing
            if s == p:
                shared[p, p] = keys[p]
            else:
                behind = max(nodes[s], starts[p]), nodes[p], max(s + 1, first[p]), p
                split[s, p] = both + sums(*behind)
                before = starts[s], min(nodes[s], starts[p]), first[s], min(s, first[p] - 1)
                alone = before[0] < before[1] and before[2] > before[3]  # no node among them
                split[p, s] = keys[s] if alone else both + sums(*before)
                begin, end = int(nodes[p]) - 1, int(nodes[s]) + reach - 1
                sending[s, p], sending[p, s] = rows[s], rows[p]
                if begin < end:  # rows that see both
                    together = sums(begin, end, p, last[s], 1)
                    sending[s, p] = sums(nodes[s] - 1, begin, s, p - 1, 1) + together
                    if last[s] < last[p]:  # else no node is among the rest
                        rest = sums(end, nodes[p] + reach - 1, last[s] + 1, last[p], 1)
                        sending[p, s] = together + rest
    size = np.minimum(nodes, reach).astype(float)
    return KeyCounts(
        classes, reach, starts, nodes, size, keys, shared, split, rows, sending, later, first
    )


@functools.lru_cache(maxsize=64)
def _everything(classes: OneClass) -> KeyCounts:
    """Of one class."""
    size, none = float(classes.length), np.zeros(1, np.intp)
    off_diagonal, cubes = np.full((1, 1), size), np.full((1, 1, 1), size)
    ends = none, classes.nodes, np.array([size])
    counts = off_diagonal, cubes, cubes, off_diagonal, cubes, cubes
    return KeyCounts(classes, classes.length, *ends, *counts, none)


@functools.lru_cache(maxsize=16)
def _seen_both(classes: BothSides, reach: int) -> KeyCounts:
    """Of rows that see both sides: nothing jumps at a node, since no row ends there."""
    nodes, total, length = classes.nodes, len(classes.nodes), classes.length
    starts, ends = np.maximum(nodes - reach, 0), np.minimum(nodes + reach - 1, length)

    def size(place: Any) -> Any:
        return np.minimum(place + reach - 1.0, length) - np.maximum(place - reach, 0.0)

    sums, last = _Sums(nodes, reach, size), total - 1
    spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
    keys, rows = (
        np.array([sums(low, high, 0, last, power) for low, high in spans]) for power in (0, 1)
    )
    shared, later = (np.zeros((total,) * 3) for _ in range(2))
    for p, s in np.ndindex(total, total):
        low, high = max(spans[p][0], spans[s][0]), min(spans[p][1], spans[s][1])
        shared[p, s] = sums(low, high, 0, last)
        later[p, s] = sums(low, high, 0, last, 2)
    cube, none = (total, total, total), np.zeros(total, np.intp)
    split, sending = np.broadcast_to(keys, cube), np.broadcast_to(rows[:, None], cube)
    sizes = size(nodes.astype(float))
    return KeyCounts(
        classes, reach, starts, ends, sizes, keys, shared, split, rows, sending, later, none
    )


class _Sums:
    """Counts of sums over ranges of positions, for one window.

    `size` gives how many keys the rows at some positions see; None: those up to their own.
    """

    def __init__(self, nodes: NDArray[np.intp], window: int, size: Any = None) -> None:
        self._nodes, self._logs = nodes, np.log(nodes)
        self._size = size or functools.partial(np.minimum, window)
        self._places: list[int] = nodes.tolist()
        self._cells: dict[tuple[int, ...], Array] = {}
        self._sums: dict[tuple[int, ...], Array] = {}

    def __call__(self, low: int, high: int, first: int, last: int, power: int = 0) -> Array:
        """(P,) counts of sum_{low < i <= high} f(i) from nodes first to last; with a power,
        size(i)^power f(i) is what is interpolated."""
        asked = int(low), min(int(high), self._places[-1]), first, last, power
        if asked not in self._sums:
            self._sums[asked] = self._sum(*asked)
        return self._sums[asked]

    def _sum(self, low: int, high: int, first: int, last: int, power: int) -> Array:
        places = self._places
        counts = np.zeros(len(places))
        if low >= high or first > last:
            return counts
        behind = bisect.bisect_right(places, low)
        counts[max(first, behind) : min(last + 1, bisect.bisect_right(places, high))] = 1.0
        inner = min(last, len(places) - 2)
        for cell in range(max(0, behind - 1), len(places) - 2):
            if places[cell] >= high:
                break
            near = stencil(cell, first, inner)
            ends = max(low, places[cell]), min(high + 1, places[cell + 1])
            key = near.start, near.stop, *ends, power
            if key not in self._cells:
                points, masses = positions_between(*ends)
                basis = lagrange(self._logs[near], np.log(points)) * masses
                if power:
                    sizes = self._size(self._nodes[near])[:, None]
                    basis = basis * (sizes / self._size(points)) ** power
                self._cells[key] = basis.sum(1)
            counts[near] += self._cells[key]
        return counts


@functools.lru_cache(maxsize=4)
def _between(nodes: tuple[int, ...]) -> list[tuple[slice, slice, Array]]:
    """Between every two nodes the positions, the nodes that give them, and the weights of those."""
    logs, result = np.log(nodes), []
    for cell, (low, high) in enumerate(itertools.pairwise(nodes)):
        if high > low + 1:
            near = stencil(cell, 0, len(nodes) - 2)
            weights = lagrange(logs[near], np.log(np.arange(low + 1, high)))
            result.append((slice(low, high - 1), near, weights))
    return result


class ClassRows(NamedTuple):
    """Rows of attention on classes.

    Attributes:
        weights: (..., P, P) [row, key], to one token of a class.
    """

    weights: Array
    key_counts: KeyCounts

    @property
    def counted(self) -> Array:
        """(..., P, P) to all tokens of a class that a row attends to."""
        return self.key_counts.keys * self.weights


# --- matrices over keys ---------------------------------------------------------------------------

Matrix = tuple[Any, Any]
"""(own, pairs): what a key has beyond `off_diagonal` on the diagonal, (..., P), and (..., P, P)."""


def diagonal_of(matrix: Any) -> Array:
    """(..., P) diagonal of an array (..., P, P), or of a `ClassMatrix`."""
    if isinstance(matrix, ClassMatrix):
        return matrix.diagonal
    if matrix.shape[-2:] == (1, 1):
        return np.asarray(matrix[..., 0])
    return np.asarray(matrix.diagonal(axis1=-2, axis2=-1))


class ClassMatrix:
    """A matrix over tokens on classes, with the arithmetic of arrays (..., L, L).

    Classes are taken as blocks of alike tokens here, each of `count`: a row that sees a part of a
    class sees all of it with as much less weight. Products, transposes and sums are then those of
    one matrix over all tokens, so that maps of kernels and their transposes agree; it costs the
    order of a cell at a mask's edge.

    Attributes:
        diagonal: (..., nodes) entries of a token with itself.
        off_diagonal: (..., nodes, nodes) of two different tokens.
        classes: the positions, those of a text's words, or one class of tokens alike.
        crowded: (..., P, P) of rows of attention, what two keys of one word get together over what
            two others do: they crowd each other. None: no such rows, or no words.
    """

    __array_ufunc__ = None

    def __init__(
        self,
        diagonal: Array,
        off_diagonal: Array,
        classes: PositionClasses,
        crowded: Array | None = None,
    ) -> None:
        entries, matrix = diagonal.shape, off_diagonal.shape
        if entries != matrix[:-1] or matrix[-1] != matrix[-2]:
            shape, size = np.broadcast_shapes(entries[:-1], matrix[:-2]), matrix[-1]
            diagonal = np.broadcast_to(diagonal, (*shape, size))
            off_diagonal = np.broadcast_to(off_diagonal, (*shape, size, size))
        self.diagonal, self.off_diagonal, self.classes, self.crowded = (
            diagonal,
            off_diagonal,
            classes,
            crowded,
        )

    @classmethod
    def of_rows(
        cls,
        rows: Array,
        key_counts: KeyCounts,
        classes: PositionClasses,
        crowded: Array | None = None,
    ) -> ClassMatrix:
        """Of what rows give to one key of a class that they see, (..., P, P)."""
        count, inside = key_counts.classes.count, np.diagonal(rows, axis1=-2, axis2=-1)
        off_diagonal, seen = rows * key_counts.keys / count, np.diagonal(key_counts.keys)
        several = count > 1.5
        neighbours = (seen - 1.0) / np.where(several, count - 1.0, 1.0)
        index = np.arange(len(count))
        off_diagonal[..., index, index] = np.where(
            several, inside * neighbours, inside * seen / count
        )
        diagonal = np.where(several, inside, off_diagonal[..., index, index])
        return cls(*classes.everywhere((diagonal, off_diagonal)), classes, crowded)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.off_diagonal.shape

    @property
    def size(self) -> int:
        return int(self.off_diagonal.size)

    def astype(self, kind: Any) -> ClassMatrix:
        crowded = None if self.crowded is None else self.crowded.astype(kind)
        return ClassMatrix(
            self.diagonal.astype(kind), self.off_diagonal.astype(kind), self.classes, crowded
        )

    def transposed(self) -> ClassMatrix:
        return ClassMatrix(self.diagonal, np.swapaxes(self.off_diagonal, -1, -2), self.classes)

    def total(self) -> Array:
        """(...) sum of all entries."""
        return np.asarray((self.row_sums() * self.classes.count).sum(-1))

    def row_sums(self) -> Array:
        """(..., P) sums over the second token."""
        return self.classes.repeated(self.excess + self.mean @ self.classes.inside.count)

    def trace(self) -> Array:
        return np.asarray((self.diagonal * self.classes.count).sum(-1))

    @functools.cached_property
    def mean(self) -> Array:
        """(..., P, P) over all pairs of two classes."""
        return self.classes.over_relations(self.off_diagonal)

    @functools.cached_property
    def excess(self) -> Array:
        """(..., P) what a token has with itself beyond what it has with others of its class."""
        return np.asarray(self.diagonal[..., : self.mean.shape[-1]] - diagonal_of(self.mean))

    @functools.cached_property
    def counted(self) -> Array:
        """(..., P, P) means times the tokens of the first one's class."""
        return np.asarray(self.classes.inside.count[:, None] * self.mean)

    def __getitem__(self, index: Any) -> ClassMatrix:
        return ClassMatrix(self.diagonal[index], self.off_diagonal[index], self.classes)

    def __len__(self) -> int:
        return len(self.off_diagonal)

    def __array__(self, *_: Any, **__: Any) -> Array:
        raise TypeError("a matrix on classes is no array: apply functions of entries `entrywise`")

    def __matmul__(self, other: Any) -> Any:
        excess, mean = self.excess, self.mean
        if not isinstance(other, ClassMatrix):  # a column per token
            columns = np.asarray(other)[..., : mean.shape[-1], :]
            result = excess[..., None] * columns + mean @ (
                self.classes.inside.count[:, None] * columns
            )
            return np.swapaxes(self.classes.repeated(np.swapaxes(result, -1, -2)), -1, -2)
        beyond = other.excess
        off_diagonal = excess[..., :, None] * other.mean + mean * beyond[..., None, :]
        off_diagonal = off_diagonal + mean @ other.counted
        product = excess * beyond + diagonal_of(off_diagonal), off_diagonal
        return ClassMatrix(*self.classes.with_relations(product, self, other), self.classes)

    def _with(self, other: Any, operation: Any) -> ClassMatrix:
        if isinstance(other, ClassMatrix):
            return ClassMatrix(
                operation(self.diagonal, other.diagonal),
                operation(self.off_diagonal, other.off_diagonal),
                self.classes,
            )
        return ClassMatrix(
            operation(self.diagonal, diagonal_factor(other)),
            operation(self.off_diagonal, other),
            self.classes,
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
        return ClassMatrix(self.diagonal**power, self.off_diagonal**power, self.classes)

    def __rsub__(self, other: Any) -> ClassMatrix:
        return (self * -1.0).__add__(other)

    __radd__ = __add__
    __rmul__ = __mul__


def diagonal_factor(other: Any) -> Any:
    """What meets a token's own entry, of an array that meets pairs (..., P or 1, P or 1)."""
    other = np.asarray(other)
    if other.ndim < 2:
        return other
    if other.shape[-1] == 1:
        return other[..., 0]
    return other[..., 0, :] if other.shape[-2] == 1 else diagonal_of(other)
