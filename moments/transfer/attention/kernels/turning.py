"""Rotary positions on classes: what the rotation is on average within their cells.

The kernel of two keys of one row is multiplied by rho(j' - j), and the covariance of two rows'
logits by rho(j' - j - (i' - i)), with rho(x) = sum_m s_m cos(w_m x). That oscillates within cells,
whatever their number, so cells hold its mean: for every frequency that of the phase e^{i w j} under
hats that are linear in log j, whose products are the means over two cells of rows and two of keys.
A token with itself is left out, being no pair. What laws that are not linear in the kernel make of
the rest is followed to second order, by the variance of rho inside the cells.

See docs/theory/state.md, Classes of positions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import BothSides, OneClass, PositionClasses, Sight
from .heads import few_points

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Phases = NDArray[np.complex128]

SAMPLED = 32
"""Positions of a cell that the variance of rho is averaged over."""

OFFSETS = 6
"""Nodes for the distribution of rho over all offsets of one class."""

CHUNK = 4096
"""Positions whose phases are held at a time."""


@dataclass(frozen=True, eq=False)
class Turning:
    """Means of rho on classes.

    Attributes:
        within: (P, P, P) [p, q, r] of two different keys of a row.
        deviation: (P, P, P) root of its variance inside the cells.
        rule: nodes and weights of its distribution there, in units of that.
        keys: (P, P, m) of e^{i w j} over a row's keys in a cell.
        shares: (m,) s_m.
    """

    within: Array
    deviation: Array
    rule: tuple[tuple[float, ...], tuple[float, ...]]
    keys: Phases
    shares: Array
    _mass: Array
    _same: Array
    _rows: tuple[Phases, Array, Array]
    _speed: Array

    @classmethod
    def of(cls, sight: Sight, frequencies: Array, shares: Array) -> Turning:
        """The same for the same nodes and frequencies."""
        return _turning(sight, tuple(map(float, frequencies)), tuple(map(float, shares)))

    def of_rows(self, long: Indices, short: Indices) -> Phases:
        """(C, m) mean e^{i w (i - i')} of two different rows."""
        sums, mass, twice = self._rows
        same, pairs = twice[long, short], mass[long] * mass[short]
        usable = pairs - same > LEAST_PAIRS * pairs
        found = sums[long] * sums[short].conj() - same[:, None]
        found /= np.where(usable, pairs - same, 1.0)[:, None]
        return np.asarray(np.where(usable[:, None], found, np.exp(1j * self._speed)))

    def of_neighbours(self, count: int) -> Phases:
        """(count, m) e^{i w} of rows that follow one another."""
        return np.tile(np.exp(1j * self._speed), (count, 1))

    def between(
        self, long: Indices, short: Indices, rows: Phases, left: slice, right: slice
    ) -> Array:
        """(C, n, k) mean rho(j' - j - (i' - i)) of two rows and a key of each.

        Args:
            long, short: rows, seeing keys i' behind those of the latter alone.
            rows: as from `of_rows`.
            left, right: keys of either.
        """
        first = self.keys[long, left].conj() * (rows * self.shares)[:, None, :]
        total = (first @ np.swapaxes(self.keys[short, right], -1, -2)).real
        mass = self._mass[long, left][:, :, None] * self._mass[short, right][:, None, :]
        own = (rows @ self.shares).real[:, None, None]
        return of_pairs(total, mass, self._same[short][:, left, right], own, own)


LEAST_PAIRS = 1e-6
"""Share of two different tokens in two cells' pairs below which there are none."""


def of_pairs(mean: Array, pairs: Array, itself: Array, own: Any, beside: Any) -> Array:
    """Mean over two different tokens, from one over all pairs of which `itself` are one token
    twice; `own` is what those have, `beside` what stands in where there are no others."""
    rest = pairs - itself
    usable = rest > LEAST_PAIRS * pairs
    found = (mean * pairs - itself * own) / np.where(usable, rest, 1.0)
    return np.asarray(np.where(usable, found, beside))


@functools.lru_cache(maxsize=8)
def _turning(sight: Sight, frequencies: tuple[float, ...], shares: tuple[float, ...]) -> Turning:
    speed, share = np.array(frequencies), np.array(shares)
    size = len(sight.classes.nodes)
    hats = (OneHat if isinstance(sight.classes, OneClass) else Hats)(sight.classes, speed)
    found = [hats.sums(int(sight.starts[p]), int(sight.ends[p])) for p in range(size)]
    sums, mass, same = (np.stack(part) for part in zip(*found, strict=True))
    keys = np.divide(sums, mass[:, :, None], out=np.zeros_like(sums), where=mass[:, :, None] > 0.0)
    total = np.asarray(((keys * share) @ np.swapaxes(keys.conj(), -1, -2)).real)
    near = float(np.cos(speed) @ share)
    within = of_pairs(total, mass[:, :, None] * mass[:, None, :], same, 1.0, near)
    rows = hats.sums(0, sight.classes.length)
    ending = not isinstance(sight.classes, BothSides)
    varying = hats.deviation(share, ending), hats.rule(share)
    return Turning(within, *varying, keys, share, mass, same, rows, speed)


class Hats:
    """Sums over positions weighed by functions that are linear in log position between nodes."""

    def __init__(self, classes: PositionClasses, speed: Array) -> None:
        self._nodes, self._speed = classes.nodes, speed
        self._parts: dict[tuple[int, int, int], tuple[Phases, Array, Array]] = {}

    def _part(self, cell: int, low: int, high: int) -> tuple[Phases, Array, Array]:
        """Of low < j < high in the cell behind a node: phases and masses of both hats, and their
        squares and product."""
        if (cell, low, high) not in self._parts:
            ends = np.log(self._nodes[cell : cell + 2])
            phases = np.zeros((2, len(self._speed)), complex)
            mass, squares = np.zeros(2), np.zeros((2, 2))
            for start in range(low + 1, high, CHUNK):
                place = np.arange(start, min(start + CHUNK, high), dtype=float)
                rising = (np.log(place) - ends[0]) / (ends[1] - ends[0])
                hats = np.stack([1.0 - rising, rising])
                phases += hats @ np.exp(1j * np.multiply.outer(place, self._speed))
                mass += hats.sum(1)
                squares += hats @ hats.T
            self._parts[cell, low, high] = phases, mass, squares
        return self._parts[cell, low, high]

    def sums(self, start: int, end: int) -> tuple[Phases, Array, Array]:
        """(P, m), (P,) and (P, P) of the positions behind `start` up to `end`."""
        nodes, size = self._nodes, len(self._nodes)
        phases = np.zeros((size, len(self._speed)), complex)
        mass, twice = np.zeros(size), np.zeros((size, size))
        held = np.flatnonzero((nodes > start) & (nodes <= end))
        phases[held] += np.exp(1j * np.multiply.outer(nodes[held].astype(float), self._speed))
        mass[held] += 1.0
        twice[held, held] += 1.0
        for cell in range(size - 1):
            low, high = max(start, int(nodes[cell])), min(end + 1, int(nodes[cell + 1]))
            if high - low > 1:
                part = self._part(cell, low, high)
                phases[cell : cell + 2] += part[0]
                mass[cell : cell + 2] += part[1]
                twice[cell : cell + 2, cell : cell + 2] += part[2]
        return phases, mass, twice

    def _sample(self, cell: int, behind: bool) -> tuple[Array, Array]:
        """Positions of the cells before a node, and of the one behind it; and how they count."""
        nodes = self._nodes
        low = int(nodes[cell - 1]) if cell else 0
        high = int(nodes[cell + 1]) if behind and cell + 1 < len(nodes) else int(nodes[cell]) + 1
        count = high - low - 1
        steps = np.arange(count, dtype=float)
        if count > SAMPLED:  # one in every stratum, in no period's step
            each = np.arange(SAMPLED)
            steps = np.floor((each + (each * 0.6180339887498949) % 1.0) * count / SAMPLED)
        places = low + 1.0 + steps
        logs, at = np.log(places), np.log(nodes[cell])
        hats = np.interp(logs, np.log([max(low, 0.5), nodes[cell], high]), [0.0, 1.0, 0.0])
        return places, np.where(logs == at, 1.0, hats)

    def _table(self, share: Array) -> Array:
        """(L,) rho of every offset."""
        table = np.empty(int(self._nodes[-1]))
        for start in range(0, len(table), CHUNK):
            offsets = np.arange(start, min(start + CHUNK, len(table)), dtype=float)
            turned = np.cos(np.multiply.outer(offsets, self._speed))
            table[start : start + len(offsets)] = turned @ share
        return table

    def rule(self, share: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """As likely as much above the mean as below."""
        return (1.0, -1.0), (0.5, 0.5)

    def scatter(self, share: Array) -> Array:
        """(P, P) variance of rho inside two cells, less that of its means over either."""
        size, table = len(self._nodes), self._table(share)
        every = [self._sample(cell, True) for cell in range(size)]
        found = np.zeros((size, size))
        for q in range(size):
            for r in range(q + 1):
                (one, left), (other, right) = every[q], every[r]
                offset = np.abs(np.subtract.outer(one, other)).astype(np.intp)
                weight = np.outer(left, right) * (offset > 0)
                mass, rho = weight.sum(), table[offset]
                if mass <= 0.0:
                    continue
                apart = rho - (weight * rho).sum() / mass
                for axis in (0, 1):
                    sums = weight.sum(axis, keepdims=True)
                    means = (weight * apart).sum(axis, keepdims=True)
                    apart = apart - means / np.where(sums > 0.0, sums, 1.0)
                found[q, r] = found[r, q] = (weight * apart**2).sum() / mass
        return found

    def deviation(self, share: Array, ending: bool = True) -> Array:
        """See `Turning.deviation`; that of a window's first cell is that of all of it. `ending`:
        whether rows end at their own position."""
        size, table = len(self._nodes), self._table(share)

        def variance(one: tuple[Array, Array], other: tuple[Array, Array]) -> float:
            offset = np.abs(np.subtract.outer(one[0], other[0])).astype(np.intp)
            weight = np.outer(one[1], other[1]) * (offset > 0)
            mass, rho = weight.sum(), table[offset]
            if mass <= 0.0:
                return 0.0
            return float((weight * (rho - (weight * rho).sum() / mass) ** 2).sum() / mass)

        every, ends = ([self._sample(c, behind) for c in range(size)] for behind in (True, False))
        found = np.zeros((size, size))
        last = np.zeros((size, size))
        for q in range(size):
            for r in range(q + 1):
                found[q, r] = found[r, q] = variance(every[q], every[r])
                last[q, r] = variance(ends[q], ends[q] if r == q else every[r])
        whole = np.broadcast_to(found, (size, size, size)).copy()
        for p in range(size if ending else 0):
            whole[p, p, : p + 1] = whole[p, : p + 1, p] = last[p, : p + 1]
        return np.sqrt(whole)


class OneHat(Hats):
    """Sums over all positions alike."""

    def sums(self, start: int, end: int) -> tuple[Phases, Array, Array]:
        length = int(self._nodes[-1])
        phases = np.zeros((1, len(self._speed)), complex)
        for first in range(1, length + 1, CHUNK):
            place = np.arange(first, min(first + CHUNK, length + 1), dtype=float)
            phases += np.exp(1j * np.multiply.outer(place, self._speed)).sum(0)
        return phases, np.array([float(length)]), np.array([[float(length)]])

    def _spread(self, share: Array) -> tuple[Array, Array, float]:
        """rho of every offset about its mean over pairs, their shares, and its deviation."""
        rho, length = self._table(share)[1:], int(self._nodes[-1])
        count = 2.0 * (length - np.arange(1.0, length)) / (length * (length - 1.0))
        apart = rho - count @ rho
        return apart, count, float(np.sqrt(count @ apart**2))

    def deviation(self, share: Array, ending: bool = True) -> Array:
        return np.full((1, 1, 1), self._spread(share)[2])

    def rule(self, share: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """A Gauss rule for the offsets of all pairs."""
        apart, count, size = self._spread(share)
        if size < 1e-12:
            return super().rule(share)
        nodes, weights = few_points(apart / size, OFFSETS, count)
        return tuple(map(float, nodes)), tuple(map(float, weights))
