"""Relative positions on classes: rotation and biases by relative position, by cells of positions.

Rotation multiplies the kernel of two keys of one row by rho(j' - j), and the covariance of two
rows' logits by rho(j' - j - (i' - i)), with rho(x) = sum_m s_m cos(w_m x): cells hold its mean, a
token with itself left out. See docs/theory/state.md, Classes of positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import BothSides, KeyCounts, Matrix, OneClass, PositionClasses, diagonal_of
from ....model.positions import RelativeBias

# --- rotary positions -----------------------------------------------------------------------------

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Phases = NDArray[np.complex128]


@dataclass(frozen=True, eq=False)
class RotaryMeans:
    """Means of rho on classes.

    Attributes:
        within: (P, P, P) [p, q, r] of two different keys of a row.
        keys: (P, P, m) of e^{i w j} over a row's keys in a cell.
        shares: (m,) s_m.
    """

    within: Array
    keys: Phases
    shares: Array
    _mass: Array
    _same: Array
    _rows: tuple[Phases, Array, Array]
    _speed: Array

    @classmethod
    def of(cls, key_counts: KeyCounts, frequencies: Array, shares: Array) -> RotaryMeans:
        """The same for the same nodes and frequencies."""
        return _rotary_means(key_counts, tuple(map(float, frequencies)), tuple(map(float, shares)))

    def of_rows(self, long: Indices, short: Indices) -> Phases:
        """(C, m) mean e^{i w (i - i')} of two different rows."""
        sums, mass, twice = self._rows
        same, pairs = twice[long, short], mass[long] * mass[short]
        usable = pairs - same > LEAST_PAIRS * pairs
        result = sums[long] * sums[short].conj() - same[:, None]
        result /= np.where(usable, pairs - same, 1.0)[:, None]
        return np.asarray(np.where(usable[:, None], result, np.exp(1j * self._speed)))

    def pair_count(self) -> Array:
        """(P, P) ordered pairs of different positions of two cells: by what their means weigh,
        which what turns between two rows of one cell is rounded to."""
        _, mass, twice = self._rows
        return np.asarray(np.outer(mass, mass) - twice)

    def between(
        self, long: Indices, short: Indices, rows: Phases, left: slice, right: slice
    ) -> Array:
        """(C, n, k) mean rho(j' - j - (i' - i)) of two rows and a key of each.

        Args:
            long, short: rows, seeing keys i' behind those of the latter alone.
        """
        first = self.keys[long, left].conj() * (rows * self.shares)[:, None, :]
        total = (first @ np.swapaxes(self.keys[short, right], -1, -2)).real
        mass = self._mass[long, left][:, :, None] * self._mass[short, right][:, None, :]
        turned = (rows @ self.shares).real[:, None, None]
        return of_pairs(total, mass, self._same[short][:, left, right], turned, turned)


def _turns(count: int, speed: Array) -> tuple[Phases, Phases]:
    """(b, m) and (n, m) whose products are e^{i w j} of j = k n + l, at least `count` in all: b + n
    exponentials for b n positions."""
    size = max(1, math.isqrt(count))
    rows = -(-count // size)
    ahead, inside = (np.arange(one, dtype=float) for one in (rows, size))
    return np.exp(1j * np.outer(size * ahead, speed)), np.exp(1j * np.outer(inside, speed))


def turned_sums(weights: Array, first: int, speed: Array) -> Phases:
    """(k, m) sums over j of weights (k, n) times e^{i w (first + j)}."""
    several, count = weights.shape
    ahead, inside = _turns(count, speed)
    nodes_inside = np.zeros((several, len(ahead) * len(inside)))
    nodes_inside[:, :count] = weights
    # real times complex, as real times pairs of real
    blocks = nodes_inside.reshape(-1, len(inside)) @ inside.view(float)
    sums = (blocks.view(complex).reshape(several, len(ahead), -1) * ahead).sum(1)
    return np.asarray(sums * np.exp(1j * first * speed))


def turned_means(count: int, speed: Array, share: Array) -> Phases:
    """(count,) sums over frequencies of shares times e^{i w j}, from j = 0 on."""
    ahead, inside = _turns(count, speed)
    return np.asarray(((ahead * share) @ inside.T).ravel()[:count])


LEAST_PAIRS = 1e-6
"""Share of two different tokens in two cells' pairs below which there are none."""


def of_pairs(mean: Array, pairs: Array, itself: Array, of_itself: Any, otherwise: Any) -> Array:
    """Mean over two different tokens, from one over all pairs of which `itself` are one token
    twice; `of_itself` is what those have, `otherwise` what stands in where there are no others."""
    rest = pairs - itself
    usable = rest > LEAST_PAIRS * pairs
    result = (mean * pairs - itself * of_itself) / np.where(usable, rest, 1.0)
    return np.asarray(np.where(usable, result, otherwise))


@functools.lru_cache(maxsize=8)
def _rotary_means(
    key_counts: KeyCounts, frequencies: tuple[float, ...], shares: tuple[float, ...]
) -> RotaryMeans:
    speed, share = np.array(frequencies), np.array(shares)
    size = len(key_counts.classes.nodes)
    basis = basis_of(key_counts.classes, speed)
    # A window begins inside a cell that its counts reach into: they are of what whole cells hold.
    whole = isinstance(key_counts.classes, BothSides | OneClass)
    ends = np.full(size, key_counts.classes.length) if whole else key_counts.ends
    result = [basis.sums(0, int(end)) for end in ends]
    sums, mass, same = (np.stack(part) for part in zip(*result, strict=True))
    keys = np.divide(sums, mass[:, :, None], out=np.zeros_like(sums), where=mass[:, :, None] > 0.0)
    total = np.asarray(((keys * share) @ np.swapaxes(keys.conj(), -1, -2)).real)
    near = float(np.cos(speed) @ share)
    within = of_pairs(total, mass[:, :, None] * mass[:, None, :], same, 1.0, near)
    rows = basis.sums(0, key_counts.classes.length)
    return RotaryMeans(within, keys, share, mass, same, rows, speed)


class LinearBasis:
    """Sums over positions weighed by functions that are linear in log position between nodes."""

    def __init__(self, classes: PositionClasses, speed: Array) -> None:
        self._nodes, self._speed = classes.nodes, speed
        self._parts: dict[tuple[int, int, int], tuple[Phases, Array, Array]] = {}

    def _part(self, cell: int, low: int, high: int) -> tuple[Phases, Array, Array]:
        """Of low < j < high in the cell behind a node: phases and masses of both basis functions,
        and their squares and product."""
        if (cell, low, high) not in self._parts:
            ends = np.log(self._nodes[cell : cell + 2])
            rising = (np.log(np.arange(low + 1.0, high)) - ends[0]) / (ends[1] - ends[0])
            basis = np.stack([1.0 - rising, rising])
            phases = turned_sums(basis, low + 1, self._speed)
            self._parts[cell, low, high] = phases, basis.sum(1), basis @ basis.T
        return self._parts[cell, low, high]

    def sums(self, start: int, end: int) -> tuple[Phases, Array, Array]:
        """(P, m), (P,) and (P, P) of the positions behind `start` up to `end`."""
        nodes, size = self._nodes, len(self._nodes)
        phases = np.zeros((size, len(self._speed)), complex)
        mass, twice = np.zeros(size), np.zeros((size, size))
        nodes_inside = np.flatnonzero((nodes > start) & (nodes <= end))
        phases[nodes_inside] += np.exp(
            1j * np.multiply.outer(nodes[nodes_inside].astype(float), self._speed)
        )
        mass[nodes_inside] += 1.0
        twice[nodes_inside, nodes_inside] += 1.0
        for cell in range(size - 1):
            low, high = max(start, int(nodes[cell])), min(end + 1, int(nodes[cell + 1]))
            if high - low > 1:
                part = self._part(cell, low, high)
                phases[cell : cell + 2] += part[0]
                mass[cell : cell + 2] += part[1]
                twice[cell : cell + 2, cell : cell + 2] += part[2]
        return phases, mass, twice


class ConstantBasis(LinearBasis):
    """Sums over all positions alike."""

    def sums(self, start: int, end: int) -> tuple[Phases, Array, Array]:
        length = int(self._nodes[-1])
        phases = turned_sums(np.ones((1, length)), 1, self._speed)
        return phases, np.array([float(length)]), np.array([[float(length)]])


def basis_of(classes: PositionClasses, speed: Array) -> LinearBasis:
    """Those of classes of positions, or of one class of all."""
    return (
        ConstantBasis(classes, speed)
        if isinstance(classes, OneClass)
        else LinearBasis(classes, speed)
    )


# --- biases by relative position ------------------------------------------------------------------
#
# A bias shifts the logits of all keys of its bucket. With J = diag(w) - w w^T of rows of weights w
# and M^b a row's keys in bucket b, its table's gradient has of two rows
#
#     sum_b M^b_i^T J_i C J_i'^T M^b_i' = sum_b U^b_i^T C U^b_i',    U^b = w o (M^b - w.M^b).

SPREAD = 8.0
"""Positions, and distances of two rows, for every doubling, that cells' means are taken of."""


def shifted_together(weights: Array, bucket: Indices, kernel: Array) -> Array:
    """(L, L) sum_b U^b C U^b^T.

    Args:
        weights: (L, n) of rows that sum to 1.
        bucket: (L, n) of every row's keys.
        kernel: (n, n) C.
    """
    result = np.zeros((len(weights), len(weights)))
    for one in range(int(bucket.max()) + 1):
        inside = weights * (bucket == one)
        inside -= weights * inside.sum(1, keepdims=True)
        result += inside @ kernel @ inside.T
    return result


def shifted_classes(
    key_counts: KeyCounts, table: RelativeBias, weights: Array, kernel: Matrix
) -> Matrix:
    """The same on classes: what different keys share by counts of buckets in classes, and what a
    key has of its own by rows that see their keys alike.

    Args:
        weights: (P, P) mean attention [row, key] to one token of a class.
    """
    diagonal, pairs = kernel
    excess = (key_counts.keys * weights) @ (diagonal - diagonal_of(pairs))
    alone, both = _of_own_keys(key_counts, table)
    result = alone * excess, both * 0.5 * (excess[:, None] + excess)
    if isinstance(key_counts.classes, OneClass):  # different keys share the same, and U sums to 0
        return result
    keys = _keys_of_buckets(key_counts, table)
    portion = np.einsum("pbq,pq->pb", keys, weights)
    portion /= portion.sum(1, keepdims=True)
    moved = weights[:, None, :] * (keys - portion[:, :, None] * keys.sum(1, keepdims=True))
    together = np.einsum("pbq,qr,sbr->ps", moved, pairs, moved, optimize=True)
    return result[0] + diagonal_of(together), result[1] + together


def _runs(table: RelativeBias, causal: bool, length: int) -> tuple[Indices, Indices]:
    """First and last offset of every bucket, a key's position minus its row's."""
    most = table.max_distance + 1
    offsets = np.arange(-most, 1 if causal else most + 1)
    begins = np.flatnonzero(np.diff(table.bucket(offsets, causal), prepend=-1))[1:]
    return np.append(-length, offsets[begins]), np.append(
        offsets[begins] - 1, 0 if causal else length
    )


def _grid(length: int) -> Indices:
    """Edges of ranges of 0 ... length - 1, as wide as they are far from 0 over `SPREAD`."""
    several = int(SPREAD * np.log2(length + 1.0)) + 2
    return np.unique(np.geomspace(1.0, length + 1.0, several).round().astype(np.intp)) - 1


def _linear_basis(classes: PositionClasses, place: Indices) -> Array:
    """(P, n) of positions, as `PositionClasses.basis`."""
    size, every = len(classes.nodes), np.arange(len(place))
    if size == 1:
        return np.ones((1, len(place)))
    (left, share), result = classes.cells_of(place), np.zeros((size + 1, len(place)))
    result[left, every], result[left + 1, every] = 1.0 - share, share
    return result[:-1]


@functools.lru_cache(maxsize=8)
def _keys_of_buckets(key_counts: KeyCounts, table: RelativeBias) -> Array:
    """(P, b, P) keys of a row's buckets in a class."""
    classes, size = key_counts.classes, len(key_counts.classes.nodes)
    begins, _ = _runs(table, True, classes.length)
    result = np.zeros((size, len(begins), size))
    for number, row in enumerate(classes.nodes.tolist()):
        grid = _grid(row)
        edges = np.concatenate([grid, row - grid, 1 - begins[1:]])
        edges = np.unique(np.clip(edges, 0, min(row, key_counts.window)))
        kind = np.searchsorted(begins, -edges[:-1], "right") - 1
        middle = row - (edges[:-1] + edges[1:] - 1) // 2
        np.add.at(result[number], kind, (_linear_basis(classes, middle) * np.diff(edges)).T)
    return result


@functools.lru_cache(maxsize=8)
def _of_own_keys(key_counts: KeyCounts, table: RelativeBias) -> Matrix:
    """sum_b U^b.U^b of rows that see their keys alike: means over the rows of a cell, and over
    pairs of different rows of two."""
    classes, grid = key_counts.classes, _grid(key_counts.classes.length)
    places, counts = (grid[:-1] + grid[1:] + 1) // 2, np.diff(grid)
    rows, offset = (one.ravel() for one in np.meshgrid(places, np.append(0, places), indexing="ij"))
    shares = np.outer(counts, np.append(1, counts)).ravel()
    there = offset < rows
    rows, others, shares = rows[there], (rows - offset)[there], shares[there]
    common, itself = _of_two_rows(key_counts, table, rows, others), rows == others
    first, second = _linear_basis(classes, rows), _linear_basis(classes, others)

    def mean(sums: Callable[[Array], Array]) -> Array:
        whole = sums(shares.astype(float))
        return np.asarray(sums(shares * common) / np.where(whole > 0.0, whole, 1.0))

    def of_pairs(weights: Array) -> Array:
        result = (first * np.where(itself, 0.0, weights)) @ second.T
        return np.asarray(result + result.T)

    return mean(lambda weights: first @ np.where(itself, weights, 0.0)), mean(of_pairs)


def _of_two_rows(
    key_counts: KeyCounts, table: RelativeBias, rows: Indices, others: Indices
) -> Array:
    """(n,) the same of two rows each: buckets are ranges of positions."""
    length, causal = key_counts.classes.length, not isinstance(key_counts.classes, OneClass)
    begins, ends = _runs(table, causal, length)

    def size(*ranges: tuple[Indices, Indices]) -> Array:
        starts, stops = zip(*ranges, strict=True)
        last, first = functools.reduce(np.minimum, stops), functools.reduce(np.maximum, starts)
        return np.asarray(np.maximum(last - first + 1.0, 0.0))

    ranges, seen = [], []
    for row in (rows[:, None], others[:, None]):
        ranges.append((row + begins, row + ends))
        start, end = np.ones_like(row), np.full_like(row, length)
        seen.append(
            (np.maximum(row - key_counts.window + 1, start), row) if causal else (start, end)
        )
    one, other = (size(k, s) / size(s) for k, s in zip(ranges, seen, strict=True))
    common = size(*ranges, *seen) - size(ranges[0], *seen) * other - size(ranges[1], *seen) * one
    common += size(*seen) * one * other
    return np.asarray(common.sum(1) / (size(seen[0]) * size(seen[1]))[:, 0])
