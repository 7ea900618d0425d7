"""Every two rows of an attention layer on classes, in tiles of rows that see nearly the same keys.

The laws of two rows are arrays over the keys of either. A tile of rows sees a range of classes, and
pairs of two tiles are treated together, over those two ranges: half of what a causal mask would
fill with zeros is left out, and beyond a window nearly all.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import Matrix, Sight
from .turning import Turning

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

TILE = 9
"""Rows of a tile: fewer leave out more zeros, more take fewer calls."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Pairs of rows of two ranges.

    Attributes:
        pairs: where they are among all.
        long, short: (c,) their rows; the last are every row with itself where both ranges are one.
        left, right: keys of either.
        own: keys of both, in all; `own_left` and `own_right` within those of either.
        met, met_own: (c, n, k) and (c, o) ones where both rows see their keys, and zeros.
        turned: (c, n, k) and (c,): means of rho of two rows, and a key of each or one of both; None
            without rotary positions.
        begun: (c, o) ones where the keys of both rows have begun; None where all begin at once.
    """

    pairs: slice
    long: Indices
    short: Indices
    left: slice
    right: slice
    own: slice
    own_left: slice
    own_right: slice
    met: Array
    met_own: Array
    turned: tuple[Array, Array] | None
    begun: Array | None

    def diagonal(self, pairs: Array) -> Array:
        """(..., o) entries of keys of both."""
        offset = self.left.start - self.right.start
        return np.diagonal(pairs, offset, axis1=-2, axis2=-1)

    @property
    def rows(self) -> slice:
        """The range of the longer rows."""
        return slice(int(self.long[0]), int(self.long[-1]) + 1)

    def projected(self, maps: RowMaps, kernel: Matrix, by_pair: bool) -> Matrix:
        """X C X'^T of rows' maps and a kernel C of its own and pairs' entries.

        Args:
            maps: of all rows.
            kernel: (o,) and (n, k) of all rows or (rows, n, k) of the longer ones; or of pairs.
            by_pair: whether it is (c, o) and (c, n, k) of pairs.
        """
        if self.begun is not None:
            kernel, by_pair = self._of_pairs(kernel, by_pair), True
        first = self.long if by_pair else self.rows
        own, pairs = maps.own[first, self.own], maps.pairs[first, self.left, self.own]
        apart = kernel[0] - self.diagonal(kernel[1])
        if self.begun is not None:
            apart = apart * self.begun
        middle, own = maps.whole[first, self.left, self.left] @ kernel[1], own * apart
        middle[:, :, self.own_right] += pairs * apart[..., None, :]
        if not by_pair:
            where = self.long - self.long[0]
            middle, own = middle[where], own[where]
        found = middle @ np.swapaxes(maps.whole[self.short, self.right, self.right], -1, -2)
        turned = np.swapaxes(maps.pairs[self.short, self.right, self.own], -1, -2)
        found[:, self.own_left, :] += own[:, :, None] * turned
        return own * maps.own[self.short, self.own], found

    def _of_pairs(self, kernel: Matrix, by_pair: bool) -> Matrix:
        """(c, n, k) of what is of all rows, or of the longer ones."""
        own, pairs = kernel
        if by_pair:
            return kernel
        if pairs.ndim == 3:
            return own, pairs[self.long - self.long[0]]
        return own, np.broadcast_to(pairs, (len(self.long), *pairs.shape))


class RowMaps(NamedTuple):
    """A map of kernels over keys for every row, X = (own, pairs), and all of it by the counts of
    the second key.

    Attributes:
        own, pairs: (P, P) and (P, P, P).
        whole: (P, P, P) pairs times counts, and own on the diagonal.
    """

    own: Array
    pairs: Array
    whole: Array

    @classmethod
    def of(cls, own: Array, pairs: Array, counts: Array) -> RowMaps:
        whole = pairs * counts[:, None, :]
        each = np.arange(len(own))
        whole[:, each, each] += own
        return cls(own, pairs, whole)


@dataclass(frozen=True, eq=False)
class RowPairs:
    """All pairs of rows of a layer.

    Attributes:
        tiles: of pairs.
        rows: ranges of rows and of the keys that they see.
        long, short: (C,) the longer and the shorter row of every pair.
        alone: (C,) whether it is a row with itself; (p, p) otherwise is one with its neighbour.
        phases: (C, m) mean e^{i w (i - i')} of the two rows; None without rotary positions.
    """

    tiles: tuple[Tile, ...]
    rows: tuple[tuple[slice, slice], ...]
    long: Indices
    short: Indices
    alone: NDArray[np.bool_]
    phases: NDArray[np.complex128] | None

    @classmethod
    def of(cls, sight: Sight, turning: Turning | None) -> RowPairs:
        """The same for the same arguments."""
        return _pairs(sight, turning)

    @classmethod
    def of_neighbours(
        cls, sight: Sight, turning: Turning | None, before: tuple[int, ...]
    ) -> NeighbourRows:
        """Of every row and the one before it, which is of node `before`; the same for the same."""
        return _neighbours(sight, turning, before)

    def split(self, of_pairs: Array) -> Matrix:
        """(own (P,), pairs (P, P)) of a symmetric number for every pair."""
        own, several = of_pairs[self.alone], ~self.alone
        pairs = np.empty((len(own), len(own)))
        pairs[self.long[several], self.short[several]] = of_pairs[several]
        pairs[self.short[several], self.long[several]] = of_pairs[several]
        return own, pairs

    def joined(self, own: Array, pairs: Array) -> Array:
        """(C,) of the same."""
        return np.where(self.alone, own[self.long], pairs[self.long, self.short])


class NeighbourRows(RowPairs):
    """A pair for every row, with the one before it; two of one class are `alone`: they see the same
    keys but for one."""

    def split(self, of_pairs: Array) -> Matrix:
        """(own (P,), nothing)."""
        return of_pairs, np.zeros((0, 0))


@functools.lru_cache(maxsize=16)
def _neighbours(sight: Sight, turning: Turning | None, before: tuple[int, ...]) -> NeighbourRows:
    previous, whole = np.array(before), RowPairs.of(sight, turning)
    tiles, phases = [], []
    for rows, keys in whole.rows:
        long = np.arange(rows.start, rows.stop)
        short = previous[rows]
        seen = np.flatnonzero(sight.seen[short].any(0))
        right = slice(min(keys.start, int(seen[0])), keys.stop)
        turned = None
        if turning is not None:
            together = turning.of_neighbours(len(long))
            between = turning.between(long, short, together, right, right)
            turned = between, (together @ turning.shares).real
            phases.append(together)
        tiles.append(_tile(sight, slice(rows.start, rows.stop), long, short, right, right, turned))
    every = np.arange(len(previous))
    return NeighbourRows(
        tuple(tiles),
        whole.rows,
        every,
        previous,
        previous == every,
        np.concatenate(phases) if phases else None,
    )


def _tile(
    sight: Sight,
    pairs: slice,
    long: Indices,
    short: Indices,
    left: slice,
    right: slice,
    turned: tuple[Array, Array] | None,
) -> Tile:
    start, stop = max(left.start, right.start), min(left.stop, right.stop)
    own = slice(start, max(start, stop))
    empty = own.stop == own.start
    own_left, own_right = (
        slice(0, 0) if empty else slice(start - one.start, stop - one.start)
        for one in (left, right)
    )
    looks = sight.seen[long, left], sight.seen[short, right]
    met = (looks[0][:, :, None] & looks[1][:, None, :]).astype(float)
    met_own = (looks[0][:, own_left] & looks[1][:, own_right]).astype(float)
    begin = np.where(long > short, sight.begins[long], 0)
    begun = np.arange(own.start, own.stop) >= begin[:, None]
    several = None if begun.all() else begun.astype(float)
    where = left, right, own, own_left, own_right
    return Tile(pairs, long, short, *where, met, met_own, turned, several)


@functools.lru_cache(maxsize=16)
def _pairs(sight: Sight, turning: Turning | None) -> RowPairs:
    size = len(sight.keys)
    ends = np.linspace(0, size, max(1, round(size / TILE)) + 1).round().astype(int)
    rows = []
    for low, high in itertools.pairwise(ends):
        seen = np.flatnonzero(sight.seen[low:high].any(0))
        rows.append((slice(int(low), int(high)), slice(int(seen[0]), int(seen[-1]) + 1)))
    tiles, longs, shorts, alones, phases, count = [], [], [], [], [], 0
    for index, (rows1, left) in enumerate(rows):
        for rows2, right in rows[: index + 1]:
            long, short = (one.ravel() for one in np.mgrid[rows1, rows2])
            below = short <= long
            long, short = long[below], short[below]
            alone = np.zeros(len(long), bool)
            if rows1 == rows2:
                each = np.arange(rows1.start, rows1.stop)
                long, short = np.concatenate([long, each]), np.concatenate([short, each])
                alone = np.concatenate([alone, np.ones(len(each), bool)])
            turned = None
            if turning is not None:
                together = turning.of_rows(long, short)
                together[alone] = 1.0
                between = turning.between(long, short, together, left, right)
                between[alone] = turning.within[long[alone]][:, left, right]
                turned = between, (together @ turning.shares).real
                phases.append(together)
            pairs = slice(count, count + len(long))
            tiles.append(_tile(sight, pairs, long, short, left, right, turned))
            longs.append(long)
            shorts.append(short)
            alones.append(alone)
            count += len(long)
    return RowPairs(
        tuple(tiles),
        tuple(rows),
        np.concatenate(longs),
        np.concatenate(shorts),
        np.concatenate(alones),
        np.concatenate(phases) if phases else None,
    )
