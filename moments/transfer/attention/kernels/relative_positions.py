"""Relative positions on classes: rotation and biases by relative position, by cells of positions.

Rotation multiplies the kernel of two keys of one row by rho(j' - j), and the covariance of two
rows' logits by rho(j' - j - (i' - i)), with rho(x) = sum_m s_m cos(w_m x): cells hold its mean, a
token with itself left out, and the variance inside them.

Biases by relative position, to first order, are as `attention.RelativeBiasNoise` by token. One of
variance v that all pairs of tokens of one bucket share adds v sum_b U^b_i U^b_i'^T to the joint law
of two rows, U^b_ij = w_ij (1[b_ij = b] - m_b(i)) and m_b(i) what row i's bucket holds of its
attention. Of a kernel of own parts a_j beside what two tokens share, the first kind meets

    sum_j a_j w_ij w_i'j (1[b_ij = b_i'j] - m_{b_ij}(i') - m_{b_i'j}(i) + sum_b m_b(i) m_b(i')),

over the keys that both rows see, and the second the sums of U^b over classes. Two rows of one class
are as far apart as sums over rows count them.

Tokens of one class are one row and one key here whose numbers are means over all rows and pairs of
rows: sums over classes then vanish, and a key takes back from all others what it sends itself.

See docs/theory/state.md, Classes of positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import (
    BothSides,
    Matrix,
    OneClass,
    PositionClasses,
    Sight,
    diagonal,
    few_points,
    lagrange,
    stencil,
)
from ....model.positions import RelativeBias

# --- rotary positions -----------------------------------------------------------------------------

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Phases = NDArray[np.complex128]
Rule = list[tuple[Any, Any]]
"""Nodes and weights of a distribution, in units of its deviation about its mean."""

SAMPLED = 32
"""Positions of a cell that the variance of rho is averaged over."""

OFFSETS = 6
"""Nodes for the distribution of rho over all offsets of one class."""


@dataclass(frozen=True, eq=False)
class Turning:
    """Means of rho on classes.

    Attributes:
        within: (P, P, P) [p, q, r] of two different keys of a row.
        deviation: (P, P, P) root of its variance inside the cells.
        rule: of its distribution there, the same for all or (P, P, P).
        rows: (P, P) variance of rho(i - i') of two different rows of two cells.
        keys: (P, P, m) of e^{i w j} over a row's keys in a cell.
        shares: (m,) s_m.
    """

    within: Array
    deviation: Array
    rule: Rule
    rows: Array
    keys: Phases
    shares: Array
    _mass: Array
    _same: Array
    _rows: tuple[Phases, Array, Array]
    _speed: Array
    _rows_at: tuple[Array, Array]
    _keys_at: tuple[Array, Array]

    @classmethod
    def of(cls, sight: Sight, frequencies: Array, shares: Array) -> Turning:
        """The same for the same nodes and frequencies."""
        return _turning(sight, tuple(map(float, frequencies)), tuple(map(float, shares)))

    def rule_at(self, where: Any) -> Rule:
        """The rule for some rows and keys."""
        return [(z[where], w[where]) if np.ndim(z) else (z, w) for z, w in self.rule]

    def of_rows(self, long: Indices, short: Indices) -> Phases:
        """(C, m) mean e^{i w (i - i')} of two different rows."""
        sums, mass, twice = self._rows
        same, pairs = twice[long, short], mass[long] * mass[short]
        usable = pairs - same > LEAST_PAIRS * pairs
        found = sums[long] * sums[short].conj() - same[:, None]
        found /= np.where(usable, pairs - same, 1.0)[:, None]
        return np.asarray(np.where(usable[:, None], found, np.exp(1j * self._speed)))

    @functools.cached_property
    def _deviations(self) -> tuple[Array, Array, Array]:
        """(s,) deviations of an offset, and (s, 2 L) the roots of rho's variance about a mean one,
        and its skewness: both Gaussian, by cosine transforms of what is even."""
        from scipy.fft import dct  # takes a tenth of a second

        count = 2 * int(self._rows_at[0].max()) + 2
        sizes = 2.0 ** np.arange(-1.0, np.log2(count))
        rho = turned_means(count, self._speed, self.shares).real
        waves = np.pi * np.arange(count) / (count - 1)
        powers = dct(np.stack([rho, rho**2, rho**3]), 1) / (2.0 * (count - 1))
        found = []
        for size in sizes:
            mean, square, cube = dct(powers * np.exp(-0.5 * (waves * size) ** 2), 1)
            root = np.sqrt(np.maximum(square - mean**2, 0.0))
            found.append((root, skewness(cube - mean * (3.0 * square - 2.0 * mean**2), root)))
        roots, skews = (np.stack(one) for one in zip(*found, strict=True))
        return sizes, roots, skews

    def away(
        self, long: Indices, short: Indices, left: slice, right: slice, rows: bool
    ) -> tuple[Array, Rule]:
        """(C, n, k) root of the variance of rho(j' - j - (i' - i)) inside the cells of two rows and
        a key of each, and the rule; `rows`: whether rows vary, or follow one another."""
        (places, varying), (keys, inside) = self._rows_at, self._keys_at
        apart = places[long] - places[short] if rows else np.ones(len(long))
        size = varying[long] + varying[short] if rows else np.zeros(len(long))
        mean = keys[short][:, None, right] - keys[long][:, left, None] + apart[:, None, None]
        whole = inside[short][:, None, right] + inside[long][:, left, None] + size[:, None, None]
        sizes, roots, skews = self._deviations
        level = np.log2(np.maximum(np.sqrt(whole) / sizes[0], 1e-9))
        lower = np.clip(np.floor(level), 0, len(sizes) - 2).astype(np.intp)
        share = np.clip(level - lower, 0.0, 1.0)
        where = np.minimum(np.abs(mean).round().astype(np.intp), roots.shape[1] - 1)
        root, skew = (
            (1.0 - share) * one[lower, where] + share * one[lower + 1, where]
            for one in (roots, skews)
        )
        rule = two_points(skew) if np.ndim(self.rule[0][0]) else self.rule
        return np.asarray(np.where(whole > 0.0, root, 0.0)), rule

    def pair_count(self) -> Array:
        """(P, P) ordered pairs of different positions of two cells: by what their means weigh,
        which what turns between two rows of one cell is held as."""
        _, mass, twice = self._rows
        return np.asarray(np.outer(mass, mass) - twice)

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
        turned = (rows @ self.shares).real[:, None, None]
        return of_pairs(total, mass, self._same[short][:, left, right], turned, turned)


MOST_SKEWED = 4.0
"""Bound of what may be a number next to nothing over another. Chosen; 2 and 16 move Llama's and
Mistral's layers at 2048 and 4096 tokens by no 1e-8."""


def skewness(cube: Array, root: Array) -> Array:
    """Of a third central moment and a deviation."""
    there = root > 1e-9
    found = cube / np.where(there, root, 1.0) ** 3
    return np.where(there, np.clip(found, -MOST_SKEWED, MOST_SKEWED), 0.0)


def two_points(skew: Array) -> Rule:
    """The Gauss rule of two nodes, of mean 0, variance 1 and that skewness."""
    above = 0.5 * skew + np.sqrt(1.0 + 0.25 * skew**2)
    share = 1.0 / (1.0 + above**2)
    return [(above, share), (-1.0 / above, 1.0 - share)]


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
    held = np.zeros((several, len(ahead) * len(inside)))
    held[:, :count] = weights
    # real times complex, as real times pairs of real
    blocks = held.reshape(-1, len(inside)) @ inside.view(float)
    sums = (blocks.view(complex).reshape(several, len(ahead), -1) * ahead).sum(1)
    return np.asarray(sums * np.exp(1j * first * speed))


def turned_means(count: int, speed: Array, share: Array) -> Phases:
    """(count,) sums over frequencies of shares times e^{i w j}, from j = 0 on."""
    ahead, inside = _turns(count, speed)
    return np.asarray(((ahead * share) @ inside.T).ravel()[:count])


LEAST_PAIRS = 1e-6
"""Share of two different tokens in two cells' pairs below which there are none."""


def of_pairs(mean: Array, pairs: Array, itself: Array, of_itself: Any, beside: Any) -> Array:
    """Mean over two different tokens, from one over all pairs of which `itself` are one token
    twice; `of_itself` is what those have, `beside` what stands in where there are no others."""
    rest = pairs - itself
    usable = rest > LEAST_PAIRS * pairs
    found = (mean * pairs - itself * of_itself) / np.where(usable, rest, 1.0)
    return np.asarray(np.where(usable, found, beside))


@functools.lru_cache(maxsize=8)
def _turning(sight: Sight, frequencies: tuple[float, ...], shares: tuple[float, ...]) -> Turning:
    speed, share = np.array(frequencies), np.array(shares)
    size = len(sight.classes.nodes)
    hats = hats_of(sight.classes, speed)
    # A window begins inside a cell that its counts reach into: they are of what whole cells hold.
    whole = isinstance(sight.classes, BothSides | OneClass)
    ends = np.full(size, sight.classes.length) if whole else sight.ends
    found = [hats.sums(0, int(end)) for end in ends]
    sums, mass, same = (np.stack(part) for part in zip(*found, strict=True))
    keys = np.divide(sums, mass[:, :, None], out=np.zeros_like(sums), where=mass[:, :, None] > 0.0)
    total = np.asarray(((keys * share) @ np.swapaxes(keys.conj(), -1, -2)).real)
    near = float(np.cos(speed) @ share)
    within = of_pairs(total, mass[:, :, None] * mass[:, None, :], same, 1.0, near)
    rows = hats.sums(0, sight.classes.length)
    ending = not isinstance(sight.classes, BothSides)
    deviation, rule = hats.deviation(share, ending)
    varying = deviation, rule, hats.deviation(share, False)[0][0] ** 2
    return Turning(within, *varying, keys, share, mass, same, rows, speed, *hats.places(ending))


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
            rising = (np.log(np.arange(low + 1.0, high)) - ends[0]) / (ends[1] - ends[0])
            hats = np.stack([1.0 - rising, rising])
            phases = turned_sums(hats, low + 1, self._speed)
            self._parts[cell, low, high] = phases, hats.sum(1), hats @ hats.T
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

    def places(self, ending: bool) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Mean and variance of positions in a cell: (P,) of rows, and (P, P) [row, key] of keys."""
        size = len(self._nodes)

        def moments(cell: int, behind: bool) -> tuple[float, float]:
            places, weight = self._sample(cell, behind)
            mean = float(weight @ places / weight.sum())
            return mean, float(weight @ (places - mean) ** 2 / weight.sum())

        mean, variance = np.array([moments(cell, True) for cell in range(size)]).T
        keys = np.tile(mean, (size, 1)), np.tile(variance, (size, 1))
        if ending:
            for cell in range(size):
                keys[0][cell, cell], keys[1][cell, cell] = moments(cell, False)
        return (mean, variance), keys

    def _table(self, share: Array) -> Array:
        """(L,) rho of every offset."""
        return turned_means(int(self._nodes[-1]), self._speed, share).real

    def _about_mean(
        self, table: Array, one: tuple[Array, Array], other: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Shares of pairs of different positions of two cells, and rho of each about its mean."""
        offset = np.abs(np.subtract.outer(one[0], other[0])).astype(np.intp)
        weight = np.outer(one[1], other[1]) * (offset > 0)
        weight /= max(weight.sum(), 1e-300)
        return weight, table[offset] - (weight * table[offset]).sum()

    def scatter(self, share: Array) -> Array:
        """(P, P) variance of rho inside two cells, less that of its means over either."""
        size, table = len(self._nodes), self._table(share)
        every = [self._sample(cell, True) for cell in range(size)]
        found = np.zeros((size, size))
        for q in range(size):
            for r in range(q + 1):
                weight, apart = self._about_mean(table, every[q], every[r])
                for axis in (0, 1):
                    sums = weight.sum(axis, keepdims=True)
                    means = (weight * apart).sum(axis, keepdims=True)
                    apart = apart - means / np.where(sums > 0.0, sums, 1.0)
                found[q, r] = found[r, q] = (weight * apart**2).sum()
        return found

    def deviation(self, share: Array, ending: bool = True) -> tuple[Array, Rule]:
        """See `Turning.deviation`, and its rule; those of a window's first cell are of all of it.
        `ending`: whether rows end at their own position."""
        size, table = len(self._nodes), self._table(share)

        def moments(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[float, float]:
            weight, apart = self._about_mean(table, one, other)
            return float((weight * apart**2).sum()), float((weight * apart**3).sum())

        every, ends = ([self._sample(c, behind) for c in range(size)] for behind in (True, False))
        found, last = np.zeros((size, size, 2)), np.zeros((size, size, 2))
        for q in range(size):
            for r in range(q + 1):
                found[q, r] = found[r, q] = moments(every[q], every[r])
                last[q, r] = moments(ends[q], ends[q] if r == q else every[r])
        whole = np.broadcast_to(found, (size, *found.shape)).copy()
        for p in range(size if ending else 0):
            whole[p, p, : p + 1] = whole[p, : p + 1, p] = last[p, : p + 1]
        root = np.sqrt(whole[..., 0])
        return root, two_points(skewness(whole[..., 1], root))


class OneHat(Hats):
    """Sums over all positions alike."""

    def sums(self, start: int, end: int) -> tuple[Phases, Array, Array]:
        length = int(self._nodes[-1])
        phases = turned_sums(np.ones((1, length)), 1, self._speed)
        return phases, np.array([float(length)]), np.array([[float(length)]])

    def places(self, ending: bool) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        length = float(self._nodes[-1])
        mean, variance = np.array([0.5 * (length + 1.0)]), np.array([(length**2 - 1.0) / 12.0])
        return (mean, variance), (mean[None], variance[None])

    def _spread(self, share: Array) -> tuple[Array, Array, float]:
        """rho of every offset about its mean over pairs, their shares, and its deviation."""
        rho, length = self._table(share)[1:], int(self._nodes[-1])
        count = 2.0 * (length - np.arange(1.0, length)) / (length * (length - 1.0))
        apart = rho - count @ rho
        return apart, count, float(np.sqrt(count @ apart**2))

    def deviation(self, share: Array, ending: bool = True) -> tuple[Array, Rule]:
        """By a Gauss rule for the offsets of all pairs."""
        apart, count, size = self._spread(share)
        rule: Rule = [(1.0, 0.5), (-1.0, 0.5)]
        if size >= 1e-12:
            nodes, weights = few_points(apart / size, OFFSETS, count)
            rule = list(zip(nodes.tolist(), weights.tolist(), strict=True))
        return np.full((1, 1, 1), size), rule


def hats_of(classes: PositionClasses, speed: Array) -> Hats:
    """Those of classes of positions, or of one class of all."""
    return OneHat(classes, speed) if isinstance(classes, OneClass) else Hats(classes, speed)


# --- biases in buckets ----------------------------------------------------------------------------

DISTANCES = 12
"""Ranges of distances between two rows of one class, in every cell."""

LEAST_BESIDE = 0.25
"""Rows that a node stands for, of what interpolation adds and takes away, below which it stands for
itself alone, and the next one for those of its own class."""

NEAR, FAR = 2, 8
"""Nodes before a row's that are averages over the rows they stand for, and how far at most, in
units of the distance beyond which all is one bucket."""


class Buckets(NamedTuple):
    """How rows' buckets meet classes of keys; P rows, b buckets.

    Attributes:
        keys: (P, b, P) keys of a row's bucket in a class.
        shared: (P, P, b, P) those that another row sees too: [row, other, bucket, key].
        same: (P, P, P) keys [row, other, key] in one bucket of both.
        beside: of nodes that are near each other, the rows that the second stands for.
    """

    keys: Array
    shared: Array
    same: Array
    beside: dict[tuple[int, int], tuple[Beside, ...]]


class Beside(NamedTuple):
    """Another row, near one.

    Attributes:
        share: of what the row has with all that a node stands for, times by how much that one's
            weights are larger than the node's.
        keys: (b, P) the row's keys that it sees too, by the row's buckets.
        other: (b, P) its keys, by its own.
        same: (P,) those in one bucket of both.
    """

    share: float
    keys: Array
    other: Array
    same: Array


class ClassBiasNoise:
    """What the biases add, of rows of a mean attention (P, P) to one token of a class."""

    def __init__(self, sight: Sight, table: RelativeBias, weights: Array) -> None:
        self._sight, self._weights, self._variance = sight, weights, table.variance
        size = len(weights)
        self._own_rate, self._rate = np.zeros((size, size)), np.zeros((size,) * 3)
        if isinstance(sight.classes, OneClass):
            self._sums = np.zeros((size, 1, size))
            self._own_rate[0, 0], self._rate[0, 0, 0] = _of_all(sight.classes.length, table)
            return
        found = _buckets(sight, table)
        held = np.einsum("pbq,pq->pb", found.keys, weights)
        held /= held.sum(1, keepdims=True)
        total = found.keys.sum(1)
        self._sums = weights[:, None, :] * (found.keys - held[:, :, None] * total[:, None, :])
        met = np.einsum("psbq,sb->psq", found.shared, held)
        both = found.shared.sum(2)
        product = held @ held.T
        pairs = found.same - met - np.swapaxes(met, 0, 1) + product[:, :, None] * both
        for (p, s), others in found.beside.items():
            met_by = np.sum([self._met(held[p], weights[s], other) for other in others], axis=0)
            met_by[s] += met_by[s + 1 :].sum()  # what the node does not see, rows behind it do
            met_by[s + 1 :] = 0.0
            pairs[p, s] = pairs[s, p] = met_by
            both[p, s] = both[s, p] = sight.shared[p, s]  # as these are counted below
        usable = both > 0.0
        self._rate = np.where(usable, pairs / np.where(usable, both, 1.0), 0.0)
        own = total - 2.0 * np.einsum("pbq,pb->pq", found.keys, held)
        own += diagonal(product)[:, None] * total
        self._own_rate = np.where(total > 0.0, own / np.where(total > 0.0, total, 1.0), 0.0)

    @staticmethod
    def _met(held: Array, weights: Array, beside: Beside) -> Array:
        """(P,) sum over a class's keys of the products of two rows' deviations in their bucket."""
        other = beside.other @ weights
        other = other / other.sum()
        lost = other @ beside.keys + held @ beside.other
        return np.asarray(beside.share * (beside.same - lost + (held @ other) * beside.keys.sum(0)))

    def overlaps(self, kernel: Matrix) -> Matrix:
        """Per unit of variance, what the outputs' kernel gains."""
        own, pairs = kernel
        weights, sight = self._weights, self._sight
        apart = own - diagonal(pairs)
        smooth = np.einsum("pbq,qr,sbr->ps", self._sums, pairs, self._sums, optimize=True)
        alone = (sight.keys * weights**2 * self._own_rate) @ apart + diagonal(smooth)
        shared = sight.shared * weights[:, None, :] * weights[None, :, :] * self._rate
        return alone, shared @ apart + smooth

    def forward(self, kernel: Matrix) -> Matrix:
        """What the outputs' kernel gains."""
        own, pairs = self.overlaps(kernel)
        return self._variance * own, self._variance * pairs

    def backward(self, gradient: Matrix) -> Matrix:
        """What the value path gains; rows of U sum to 0, and so does what all tokens receive."""
        own, pairs = gradient
        weights, sight = self._weights, self._sight
        sent = sight.rows.T * weights  # by rows of a class to a key
        once = np.diagonal(sight.later).T * weights.T**2  # (key, row): by one row, twice
        found = (once * self._own_rate.T) @ own
        found += np.einsum("ps,psq,pq,sq->q", pairs, self._rate, sent, sent, optimize=True)
        itself = np.einsum("ppq->qp", self._rate)
        found -= (once * itself) @ diagonal(pairs)
        if isinstance(sight.classes, OneClass):
            found, others = self._variance * found, sight.classes.length - 1
            return found, np.full_like(pairs, -found[0] / others)
        # of one key, by rows of a class that see it and by single ones that see both
        moved = self._sums / np.where(sight.seen, sight.keys, 1.0)[:, None, :]
        rows = moved * sight.rows.T[:, None, :]
        both = np.einsum("ps,pbq,sbr->qr", pairs, rows, rows, optimize=True)
        alone = own - diagonal(pairs)
        both += np.einsum("p,pbq,pbr,qrp->qr", alone, moved, moved, sight.later, optimize=True)
        return self._variance * found, self._variance * both


@functools.lru_cache(maxsize=8)
def _buckets(sight: Sight, table: RelativeBias) -> Buckets:
    nodes, size = sight.classes.nodes, len(sight.classes.nodes)
    number = table.bucket(-np.arange(table.max_distance + 1), True)
    begins = np.flatnonzero(np.diff(number, prepend=-1))  # of runs of distances
    kind = number[begins]
    ends = np.append(begins[1:] - 1, nodes[-1])
    last = nodes[:, None] - begins  # (P, b) the last key of a run, and the one before its first
    before = np.maximum(nodes[:, None] - ends - 1, sight.starts[:, None])
    last = np.maximum(last, before)
    limit = nodes[None, :, None]  # what another row sees
    shared = _sums(nodes, np.minimum(last[:, None], limit))
    shared -= _sums(nodes, np.minimum(before[:, None], limit))
    keys = shared[np.arange(size), np.arange(size)]
    same = np.zeros((size,) * 3)

    def met(one: int, other: int, low: int) -> Array:
        high = min(one, other)
        edges = np.concatenate([[low, high], one - begins, other - begins])
        edges = np.unique(np.clip(edges, low, max(low, high)))
        if len(edges) < 2:
            return np.zeros(size)
        runs = [np.searchsorted(begins, row - edges[1:], "right") - 1 for row in (one, other)]
        counted = np.diff(_sums(nodes, edges), axis=0)
        return np.asarray(counted[kind[runs[0]] == kind[runs[1]]].sum(0))

    def of_row(row: int, end: int) -> Array:
        """(b, P) its keys up to a position, by bucket."""
        start = max(row - sight.window, 0)
        ranges = np.maximum(row - ends - 1, start), np.maximum(row - begins, start)
        low, high = (_sums(nodes, np.minimum(place, end)) for place in ranges)
        return np.asarray(high - low)

    def along(p: int, s: int) -> Iterator[Beside]:
        one, node = int(nodes[p]), int(nodes[s])
        for distance, share in _beside(sight.classes, p, s):
            other = one - distance
            low, end = max(max(one, other) - sight.window, 0), min(one, other)
            share *= min(node, sight.window) / min(other, sight.window)
            mine, its = of_row(one, end), of_row(other, end)
            yield Beside(share, by_kind(mine), by_kind(its), met(one, other, low))

    def by_kind(runs: Array) -> Array:
        found = np.zeros((int(kind.max()) + 1, size))
        np.add.at(found, kind, runs)
        return found

    near = [
        (p, s)
        for p in range(size)
        for s in range(max(p - NEAR, 0), p + 1)
        if s == p or nodes[p] - nodes[s] < FAR * table.max_distance
    ]
    for p, s in np.ndindex(size, size):
        if (max(p, s), min(p, s)) not in near:
            low = max(int(sight.starts[p]), int(sight.starts[s]))
            same[p, s] = met(int(nodes[p]), int(nodes[s]), low)
    return Buckets(keys, shared, same, {(p, s): tuple(along(p, s)) for p, s in near})


def _beside(classes: PositionClasses, p: int, s: int) -> list[tuple[int, float]]:
    """How far from a row at one node those are that another stands for, and how much they count: as
    a row sums over those before it, by what the interpolant of nodes gives to this one."""
    nodes, itself = classes.nodes, [(int(classes.nodes[p] - classes.nodes[s]), 1.0)]
    high = min(p, len(nodes) - 2)
    found, logs = [] if s == p or s > high else itself, np.log(nodes)
    for cell in range(min(s + 2, high), max(s - 4, -1), -1):
        held = stencil(cell, 0, high)
        ends = int(nodes[p] - nodes[min(cell + 1, p)]), int(nodes[p] - nodes[cell])
        if not held.start <= s < held.stop or ends[1] - ends[0] < 2:
            continue
        steps = np.geomspace(ends[0] + 1, ends[1], DISTANCES + 1)
        edges = np.unique(np.round(steps).astype(np.intp))
        places = float(nodes[p]) - np.arange(edges[0], edges[-1])
        weight = lagrange(logs[held], np.log(places))[s - held.start]
        for low, top, sums in zip(
            edges[:-1], edges[1:], np.add.reduceat(weight, edges[:-1] - edges[0]), strict=True
        ):
            found.append((int((low * (top - 1)) ** 0.5), float(sums)))
    total = sum(share for _, share in found)
    if total < LEAST_BESIDE * max(sum(abs(share) for _, share in found), 1.0):
        return itself if s < p else [(1 if p else -1, 1.0)]
    return [(distance, share / total) for distance, share in found]


def _sums(nodes: NDArray[np.intp], last: NDArray[np.intp]) -> Array:
    """(..., P) sums over positions up to `last` of the functions `classes.PositionClasses.hats`."""
    from scipy.special import gammaln  # takes a tenth of a second

    low, high = nodes[:-1].astype(float), nodes[1:].astype(float)
    inside = np.clip(last[..., None], low, high - 1.0)
    count = inside - low
    rising = gammaln(inside + 1.0) - gammaln(low + 1.0) - count * np.log(low)
    rising = rising / np.log(high / low)
    found = (last[..., None] >= nodes) + 0.0
    found[..., :-1] += count - rising
    found[..., 1:] += rising
    return np.asarray(found)


@functools.lru_cache(maxsize=16)
def _of_all(length: int, table: RelativeBias) -> tuple[float, float]:
    """Of tokens that all see all: of a row with itself, and the mean of two rows."""
    reach = min(table.max_distance + 1, length)
    offsets = np.arange(-reach, reach + 1)
    number = table.bucket(offsets, False)
    begins = np.flatnonzero(np.diff(number, prepend=-1))
    first, last = (offsets[one] + 0.0 for one in (begins, np.append(begins[1:] - 1, -1)))
    first[0], last[-1] = -length, length
    place = np.arange(1.0, length + 1)[:, None]
    # keys at an offset from a row, and rows that a key is at that offset from
    met = np.minimum(place + last, length) - np.maximum(place + first, 1.0) + 1.0
    asked = np.minimum(place - first, length) - np.maximum(place - last, 1.0) + 1.0
    kinds = np.equal.outer(number[begins], np.unique(number)) + 0.0
    held = np.maximum(met, 0.0) @ kinds / length
    rows = np.maximum(asked, 0.0) @ kinds
    pairs = length * (length - 1.0)
    squares = float((held**2).sum())
    together = (float((rows**2).sum()) / length - length) / pairs
    return 1.0 - squares / length, together - (float((held.sum(0) ** 2).sum()) - squares) / pairs
