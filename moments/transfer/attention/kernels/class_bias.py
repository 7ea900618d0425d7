"""Biases by relative position on classes of positions, to first order: `heads.RelativeBiasNoise`.

A bias of variance v that all pairs of tokens of one bucket share adds v sum_b U^b_i U^b_i'^T to the
joint law of two rows, U^b_ij = w_ij (1[b_ij = b] - m_b(i)) and m_b(i) what row i's bucket holds of
its attention. Of a kernel of own parts a_j beside what two tokens share, the first kind meets

    sum_j a_j w_ij w_i'j (1[b_ij = b_i'j] - m_{b_ij}(i') - m_{b_i'j}(i) + sum_b m_b(i) m_b(i')),

over the keys that both rows see, and the second the sums of U^b over classes. Buckets are ranges of
positions, over which `classes.PositionClasses.hats` sum in closed form: they are linear in log j,
and sum log j = log Gamma. Two rows of one class are as far apart as sums over rows count them.

Tokens of one class are one row and one key here whose numbers are means over all rows and pairs of
rows: sums over classes then vanish, and a key takes back from all others what it sends itself.

See docs/theory/state.md, Classes of positions.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import (
    Matrix,
    OneClass,
    PositionClasses,
    Sight,
    diagonal,
    lagrange,
    stencil,
)
from ....model.positions import RelativeBias

Array = NDArray[np.float64]

DISTANCES = 12
"""Ranges of distances between two rows of one class, in every cell."""

LEAST_BESIDE = 0.25
"""Rows of a node's own class before it, on average, below which the next one stands for them."""


class Buckets(NamedTuple):
    """How rows' buckets meet classes of keys; P rows, b buckets.

    Attributes:
        keys: (P, b, P) keys of a row's bucket in a class.
        shared: (P, P, b, P) those that another row sees too: [row, other, bucket, key].
        same: (P, P, P) keys [row, other, key] in one bucket of both; (p, p) of two neighbours.
    """

    keys: Array
    shared: Array
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
        usable = both > 0.0
        self._rate = np.where(usable, pairs / np.where(usable, both, 1.0), 0.0)
        own = total - 2.0 * np.einsum("pbq,pb->pq", found.keys, held)
        own += diagonal(product)[:, None] * total
        self._own_rate = np.where(total > 0.0, own / np.where(total > 0.0, total, 1.0), 0.0)

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

    for p, s in np.ndindex(size, size):
        low, one = max(int(sight.starts[p]), int(sight.starts[s])), int(nodes[p])
        if s != p:
            same[p, s] = met(one, int(nodes[s]), low)
            continue
        for distance, share in _beside(sight.classes, p):
            same[p, p] += share * met(one, one - distance, low)
    return Buckets(keys, shared, same)


def _beside(classes: PositionClasses, p: int) -> list[tuple[int, float]]:
    """How far the other row of a pair of one class is, and how much that counts: as a row sums over
    those before it, by what the interpolant of nodes gives to this one."""
    nodes = classes.nodes
    mass = float(classes.seen().keys[p, p]) - 1.0
    if p == 0 or nodes[p] - nodes[p - 1] == 1 or mass < LEAST_BESIDE:
        return [(1 if p else -1, 1.0)]
    found, logs = [], np.log(nodes)
    for cell in range(p - 1, max(p - 4, -1), -1):
        held = stencil(cell, 0, p)
        ends = int(nodes[p] - nodes[cell + 1]), int(nodes[p] - nodes[cell])
        steps = np.geomspace(max(ends[0], 1), ends[1], DISTANCES + 1)
        edges = np.unique(np.round(steps).astype(np.intp))
        if held.stop <= p or len(edges) < 2:
            continue
        places = float(nodes[p]) - np.arange(edges[0], edges[-1])
        weight = lagrange(logs[held], np.log(places))[p - held.start]
        for low, high, sums in zip(
            edges[:-1], edges[1:], np.add.reduceat(weight, edges[:-1] - edges[0]), strict=True
        ):
            found.append((int((low * (high - 1)) ** 0.5), float(sums / mass)))
    total = sum(share for _, share in found)
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
