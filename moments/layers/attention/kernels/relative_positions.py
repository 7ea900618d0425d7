"""Relative positions: rotary positions and biases by relative position, by token and on classes.

Rotation multiplies the kernel of two keys of one row by rho(j' - j), and the covariance of two
rows' logits by rho(j' - j - (i' - i)), rho(x) = sum_m s_m cos(w_m x). On classes it is averaged
over the pairs of different tokens of two cells. By token it is split as rho(delta - D) =
rho(D) rho(delta) + sum_t U_t(D) V_t(delta), for offsets D of the rows and delta of the keys. See
docs/theory/state.md, Classes of positions, and docs/theory/attention.md, The closure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import BothSides, KeyCounts, Matrix, OneClass, PositionClasses, diagonal_of
from ....model.positions import RelativeBias, Rotary

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Phases = NDArray[np.complex128]


# --- rotary positions on classes ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RotaryMeans:
    """Means of rho on classes.

    Attributes:
        within: (P, P, P) [row, key, key] mean rho of two different keys of a row.
        keys: (P, P, m) [row, key] mean e^{i w j} over a row's keys in a cell.
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
        """Cached instance for these nodes and frequencies w_m with shares s_m."""
        return _rotary_means(key_counts, tuple(map(float, frequencies)), tuple(map(float, shares)))

    def of_rows(self, long: Indices, short: Indices) -> Phases:
        """(C, m) mean e^{i w (i - i')} of two different rows."""
        sums, mass, same_token = self._rows
        same, pairs = same_token[long, short], mass[long] * mass[short]
        usable = pairs - same > LEAST_PAIRS * pairs
        result = sums[long] * sums[short].conj() - same[:, None]
        result /= np.where(usable, pairs - same, 1.0)[:, None]
        return np.asarray(np.where(usable[:, None], result, np.exp(1j * self._speed)))

    def pair_count(self) -> Array:
        """(P, P) ordered pairs of different positions of two cells, over which `of_rows` averages
        rotations."""
        _, mass, same_token = self._rows
        return np.asarray(np.outer(mass, mass) - same_token)

    def between(
        self, long: Indices, short: Indices, rows: Phases, left: slice, right: slice
    ) -> Array:
        """(C, n, k) mean rho(j' - j - (i' - i)) of two rows and a key of each, in the ranges `left`
        and `right`; `rows` are their `of_rows`."""
        first = self.keys[long, left].conj() * (rows * self.shares)[:, None, :]
        total = (first @ np.swapaxes(self.keys[short, right], -1, -2)).real
        mass = self._mass[long, left][:, :, None] * self._mass[short, right][:, None, :]
        same_key = (rows @ self.shares).real[:, None, None]
        return of_pairs(total, mass, self._same[short][:, left, right], same_key, same_key)


def _phase_factors(count: int, speed: Array) -> tuple[Phases, Phases]:
    """(b, m) and (n, m) whose products are e^{i w j}, j = k n + l, for at least `count` positions:
    b + n instead of b n exponentials."""
    size = max(1, math.isqrt(count))
    rows = -(-count // size)
    ahead, inside = (np.arange(n, dtype=float) for n in (rows, size))
    return np.exp(1j * np.outer(size * ahead, speed)), np.exp(1j * np.outer(inside, speed))


def turned_sums(weights: Array, first: int, speed: Array) -> Phases:
    """(k, m) sums over j of weights (k, n) times e^{i w (first + j)}."""
    rows, count = weights.shape
    ahead, inside = _phase_factors(count, speed)
    padded = np.zeros((rows, len(ahead) * len(inside)))
    padded[:, :count] = weights
    # complex numbers as pairs of real ones, for a real matrix product
    blocks = padded.reshape(-1, len(inside)) @ inside.view(float)
    sums = (blocks.view(complex).reshape(rows, len(ahead), -1) * ahead).sum(1)
    return np.asarray(sums * np.exp(1j * first * speed))


def turned_means(count: int, speed: Array, share: Array) -> Phases:
    """(count,) sums over frequencies of shares times e^{i w j}, j = 0 ... count - 1."""
    ahead, inside = _phase_factors(count, speed)
    return np.asarray(((ahead * share) @ inside.T).ravel()[:count])


LEAST_PAIRS = 1e-6
"""Fraction of pairs of different tokens among all pairs of two cells below which it counts as 0."""


def of_pairs(mean: Array, pairs: Array, itself: Array, of_itself: Any, otherwise: Any) -> Array:
    """Mean over pairs of different tokens, from the mean over all `pairs`, of which `itself` are a
    token with itself, of value `of_itself`; `otherwise` if there are no different ones."""
    rest = pairs - itself
    usable = rest > LEAST_PAIRS * pairs
    result = (mean * pairs - itself * of_itself) / np.where(usable, rest, 1.0)
    return np.asarray(np.where(usable, result, otherwise))


@functools.lru_cache(maxsize=8)
def _rotary_means(
    key_counts: KeyCounts, frequencies: tuple[float, ...], shares: tuple[float, ...]
) -> RotaryMeans:
    speed, share = np.array(frequencies), np.array(shares)
    sums, mass, same = parts = basis_sums(key_counts.classes, speed)
    rows = sums[-1], mass[-1], same[-1]
    # A causal window may begin inside a cell; sums are over whole cells up to its end.
    if isinstance(key_counts.classes, BothSides):
        sums, mass, same = (np.broadcast_to(part[-1], part.shape) for part in parts)
    keys = np.divide(sums, mass[:, :, None], out=np.zeros_like(sums), where=mass[:, :, None] > 0.0)
    total = np.asarray(((keys * share) @ np.swapaxes(keys.conj(), -1, -2)).real)
    near = float(np.cos(speed) @ share)
    within = of_pairs(total, mass[:, :, None] * mass[:, None, :], same, 1.0, near)
    return RotaryMeans(within, keys, share, mass, same, rows, speed)


def basis_sums(classes: PositionClasses, speed: Array) -> tuple[Phases, Array, Array]:
    """(P, P, m) phases, (P, P) masses and (P, P, P) products of `PositionClasses.basis`, summed
    over the positions up to each node [node, class]."""
    nodes, size = classes.nodes.tolist(), len(classes.nodes)
    if isinstance(classes, OneClass):
        phases = turned_sums(np.ones((1, classes.length)), 1, speed)
        return (
            phases[None],
            np.full((1, 1), float(classes.length)),
            np.full((1, 1, 1), float(classes.length)),
        )
    phases = np.zeros((size, size, len(speed)), complex)
    mass, products = np.zeros((size, size)), np.zeros((size, size, size))
    for p, node in enumerate(nodes):
        phases[p:, p] += np.exp(1j * (float(node) * speed))
        mass[p:, p] += 1.0
        products[p:, p, p] += 1.0
        if p and node - nodes[p - 1] > 1:
            cell, first, ends = slice(p - 1, p + 1), nodes[p - 1] + 1, np.log(nodes[p - 1 : p + 1])
            rising = (np.log(np.arange(float(first), node)) - ends[0]) / (ends[1] - ends[0])
            basis = np.stack([1.0 - rising, rising])
            phases[p:, cell] += turned_sums(basis, first, speed)
            mass[p:, cell] += basis.sum(1)
            products[p:, cell, cell] += basis @ basis.T
    return phases, mass, products


# --- rotary positions by token --------------------------------------------------------------------

TURNS = 2.0
"""Full turns over the whole sequence beyond which a frequency counts as fast."""

TERM_TOLERANCE = 0.01
"""Largest neglected slow term of the sum over t."""


class _Split(NamedTuple):
    """The split of rho on the offsets -reach ... reach: (g,), (t, g), (t, g) and (t,) arrays."""

    whole: Array
    query_terms: Array
    key_terms: Array
    parity: Array


@functools.lru_cache(maxsize=32)
def _split(frequencies: tuple[float, ...], shares: tuple[float, ...], reach: int) -> _Split:
    speed = np.array(frequencies)
    phases = np.multiply.outer(np.arange(-reach, reach + 1.0), speed)
    return _split_phases(phases, np.array(shares), speed * reach <= 2.0 * np.pi * TURNS)


def _split_phases(phases: Array, share: Array, slow: NDArray[np.bool_]) -> _Split:
    """The split on offsets with these phases (g, m); every offset occurs with its opposite."""
    whole = np.cos(phases) @ share
    # remainder = slow cos cos + slow sin sin - whole whole^T, of low rank: eigenvalues per parity
    even = np.column_stack([np.cos(phases[:, slow]), whole])
    queries, keys, parity = [], [], []
    for vectors, weights, sign in (
        (even, np.append(share[slow], -1.0), 1.0),
        (np.sin(phases[:, slow]), share[slow], -1.0),
    ):
        basis, inside = np.linalg.qr(vectors)
        values, axes = np.linalg.eigh((inside * weights) @ inside.T)
        keep = np.abs(values) > TERM_TOLERANCE * len(phases)
        # nothing remains at offset 0
        modes = (basis @ axes[:, keep]).T * phases.any(1)
        queries.append(values[keep, None] * modes)
        keys.append(modes)
        parity.append(np.full(len(modes), sign))
    return _Split(whole, np.vstack(queries), np.vstack(keys), np.concatenate(parity))


def _split_places(
    angles: Sequence[Array], speeds: Array, shares: Array
) -> tuple[_Split, list[Indices]]:
    """The split for patches of an image, and the offset of every pair of patches, from their rotary
    angles: one half for the vertical position, one half for the horizontal."""
    half = len(shares) // 2
    pairs = [a[None, :, [0, half]] - a[:, None, [0, half]] for a in angles]
    flat = np.concatenate([p.reshape(-1, 2) for p in pairs])
    offsets, index = np.unique(np.round(flat, 9), axis=0, return_inverse=True)
    phases = np.repeat(offsets, half, axis=1) * (speeds / speeds[0])
    split = _split_phases(phases, shares, np.ones(len(shares), bool))
    parts = np.split(index.ravel(), np.cumsum([p.shape[0] * p.shape[1] for p in pairs])[:-1])
    return split, [part.reshape(p.shape[:2]) for part, p in zip(parts, pairs, strict=True)]


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of the queries and the keys of one layer.

    Attributes:
        queries: (Lq, Lq) rho(D), the factor on the queries' correlation.
        keys: (Lk, Lk) rho(delta), the factor on the keys' kernel.
        query_terms, key_terms: (t, Lq, Lq) and (t, Lk, Lk), U_t and V_t.
        parity: (t,) 1 if both are even functions, -1 if both are odd.
        shares: (m,) s_m.
        query_angles, key_angles: (Lq, m) and (Lk, m) rotation angles of the tokens.
    """

    queries: Array
    keys: Array
    query_terms: Array
    key_terms: Array
    parity: Array
    shares: Array
    query_angles: Array
    key_angles: Array

    @classmethod
    def of(
        cls, frequencies: Array, shares: Array, query_positions: Array, key_positions: Array
    ) -> Rotation:
        """The split above for tokens at the given positions."""
        places = query_positions, key_positions
        offsets = [np.subtract.outer(p, p).T for p in places]
        reach = max(1.0, *(float(np.abs(offset).max()) for offset in offsets))
        split = _split(tuple(frequencies), tuple(shares), round(reach))
        index = [np.rint(offset + reach).astype(np.intp) for offset in offsets]
        return cls._of(split, index, shares, [np.multiply.outer(p, frequencies) for p in places])

    @classmethod
    def of_rotary(cls, rotary: Rotary, d_head: int, *places: Array) -> Rotation:
        """The split of declared rotary positions, for the positions of queries and of keys."""
        speeds, shares = rotary.frequencies(d_head)
        if rotary.grid is None:
            return cls.of(speeds, shares, *places)
        angles = [rotary.angles(p, d_head) for p in places]
        return cls._of(*_split_places(angles, speeds, shares), shares, angles)

    @classmethod
    def _of(
        cls, split: _Split, index: Sequence[Indices], shares: Array, angles: Sequence[Array]
    ) -> Rotation:
        return cls(
            split.whole[index[0]],
            split.whole[index[1]],
            split.query_terms[:, index[0]],
            split.key_terms[:, index[1]],
            split.parity,
            shares,
            *angles,
        )

    def kernels(self, keys: Array) -> Array:
        """(1 + t, Lk, Lk): Ck times rho(delta), then times every V_t(delta)."""
        return np.concatenate([(keys * self.keys)[None], keys * self.key_terms])


# --- biases by relative position ------------------------------------------------------------------
#
# A bias shifts the logits of all keys of its bucket. With J = diag(w) - w w^T for weights w, and
# M^b the indicator of a row's keys in bucket b, the gradient of the table contains for two rows
#
#     sum_b M^b_i^T J_i C J_i'^T M^b_i' = sum_b U^b_i^T C U^b_i',    U^b = w o (M^b - w.M^b).

SPREAD = 8.0
"""Sampled positions, and distances of two rows, per octave, for means over cells."""


def shifted_together(weights: Array, bucket: Indices, kernel: Array) -> Array:
    """(L, L) sum_b U^b C U^b^T.

    Args:
        weights: (L, n) rows of sum 1.
        bucket: (L, n) bucket of every key in every row.
        kernel: (n, n) C.
    """
    result = np.zeros((len(weights), len(weights)))
    for number in range(int(bucket.max()) + 1):
        inside = weights * (bucket == number)
        inside -= weights * inside.sum(1, keepdims=True)
        result += inside @ kernel @ inside.T
    return result


def shifted_classes(
    key_counts: KeyCounts, table: RelativeBias, weights: Array, kernel: Matrix
) -> Matrix:
    """`shifted_together` on classes: the off-diagonal kernel with counts of buckets in classes, its
    diagonal excess with uniform attention.

    Args:
        weights: (P, P) mean attention [row, key] to one token of a class.
    """
    diagonal, off_diagonal = kernel
    excess = (key_counts.keys * weights) @ (diagonal - diagonal_of(off_diagonal))
    of_row, of_rows = _uniform_overlaps(key_counts, table)
    result = of_row * excess, of_rows * 0.5 * (excess[:, None] + excess)
    if isinstance(key_counts.classes, OneClass):  # a constant off-diagonal kernel: U sums to 0
        return result
    keys = _keys_of_buckets(key_counts, table)
    portion = np.einsum("pbq,pq->pb", keys, weights)
    portion /= portion.sum(1, keepdims=True)
    shifts = weights[:, None, :] * (keys - portion[:, :, None] * keys.sum(1, keepdims=True))
    smooth = np.einsum("pbq,qr,sbr->ps", shifts, off_diagonal, shifts, optimize=True)
    return result[0] + diagonal_of(smooth), result[1] + smooth


def _runs(table: RelativeBias, causal: bool, length: int) -> tuple[Indices, Indices]:
    """First and last offset (key's minus row's position) of every bucket."""
    most = table.max_distance + 1
    offsets = np.arange(-most, 1 if causal else most + 1)
    begins = np.flatnonzero(np.diff(table.bucket(offsets, causal), prepend=-1))[1:]
    return np.append(-length, offsets[begins]), np.append(
        offsets[begins] - 1, 0 if causal else length
    )


def _grid(length: int) -> Indices:
    """Edges of ranges of 0 ... length - 1, with `SPREAD` ranges per octave."""
    count = int(SPREAD * np.log2(length + 1.0)) + 2
    return np.unique(np.geomspace(1.0, length + 1.0, count).round().astype(np.intp)) - 1


@functools.lru_cache(maxsize=8)
def _keys_of_buckets(key_counts: KeyCounts, table: RelativeBias) -> Array:
    """(P, b, P) counts of a row's keys [row, bucket, class]."""
    classes, size = key_counts.classes, len(key_counts.classes.nodes)
    begins, _ = _runs(table, True, classes.length)
    result = np.zeros((size, len(begins), size))
    for number, row in enumerate(classes.nodes.tolist()):
        grid = _grid(row)
        edges = np.concatenate([grid, row - grid, 1 - begins[1:]])
        edges = np.unique(np.clip(edges, 0, min(row, key_counts.window)))
        bucket = np.searchsorted(begins, -edges[:-1], "right") - 1
        middle = row - (edges[:-1] + edges[1:] - 1) // 2
        np.add.at(result[number], bucket, (classes.basis_at(middle) * np.diff(edges)).T)
    return result


@functools.lru_cache(maxsize=8)
def _uniform_overlaps(key_counts: KeyCounts, table: RelativeBias) -> Matrix:
    """sum_b U^b.U^b of rows with uniform attention: means over the rows of a cell, and over pairs
    of different rows of two cells."""
    classes, grid = key_counts.classes, _grid(key_counts.classes.length)
    places, counts = (grid[:-1] + grid[1:] + 1) // 2, np.diff(grid)
    rows, offset = (x.ravel() for x in np.meshgrid(places, np.append(0, places), indexing="ij"))
    shares = np.outer(counts, np.append(1, counts)).ravel()
    valid = offset < rows
    rows, others, shares = rows[valid], (rows - offset)[valid], shares[valid]
    common, itself = _uniform_overlap(key_counts, table, rows, others), rows == others
    first, second = classes.basis_at(rows), classes.basis_at(others)

    def mean(sums: Callable[[Array], Array]) -> Array:
        total = sums(shares.astype(float))
        return np.asarray(sums(shares * common) / np.where(total > 0.0, total, 1.0))

    def of_pairs(weights: Array) -> Array:
        result = (first * np.where(itself, 0.0, weights)) @ second.T
        return np.asarray(result + result.T)

    return mean(lambda weights: first @ np.where(itself, weights, 0.0)), mean(of_pairs)


def _uniform_overlap(
    key_counts: KeyCounts, table: RelativeBias, rows: Indices, others: Indices
) -> Array:
    """(n,) sum_b U^b.U^b of n pairs of rows with uniform attention; buckets are ranges of keys."""
    length, causal = key_counts.classes.length, not isinstance(key_counts.classes, OneClass)
    begins, ends = _runs(table, causal, length)

    def size(*ranges: tuple[Indices, Indices]) -> Array:
        """Number of positions in the intersection of ranges."""
        starts, stops = zip(*ranges, strict=True)
        last, first = functools.reduce(np.minimum, stops), functools.reduce(np.maximum, starts)
        return np.asarray(np.maximum(last - first + 1.0, 0.0))

    ranges, visible = [], []
    for row in (rows[:, None], others[:, None]):
        ranges.append((row + begins, row + ends))
        start, end = np.ones_like(row), np.full_like(row, length)
        visible.append(
            (np.maximum(row - key_counts.window + 1, start), row) if causal else (start, end)
        )
    # fraction of each row's keys in the bucket
    first, second = (size(k, s) / size(s) for k, s in zip(ranges, visible, strict=True))
    common = size(*ranges, *visible) - size(ranges[0], *visible) * second
    common -= size(ranges[1], *visible) * first
    common += size(*visible) * first * second
    return np.asarray(common.sum(1) / (size(visible[0]) * size(visible[1]))[:, 0])
