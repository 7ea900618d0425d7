"""Distance penalties on classes: what rows of a causal mask see when weights fade with distance.

A head of slope s adds -s (i - j) to its logits, a prior p_ij = e^{-s (i - j)} on its weights that
varies inside cells. A row p counts a class q by n tokens of one prior w, n w = sum_j p and
n w^2 = sum_j p^2 over the cell: sums over keys, and over keys met twice, are those of the prior.
What two rows share is its mean over two tokens of their cells, a token with itself left out,

    sum_j p_ij p_i'j,    i in one cell and i' in the other,

and so is what two keys send to the rows that see both. All are sums of exponentials under hats
that are linear in log position, found by recursion over positions. What tokens a few apart have in
common beyond the rest of their cells is averaged over these.

See docs/theory/state.md, Classes of positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import PositionClasses, Sight, lagrange, stencil

Array = NDArray[np.float64]

REACH = 45.0
"""Penalty beyond which a weight is left out: e^-45 of the largest."""

LEAST_SHARE = 1e-9
"""Share of a row's weight below which it does not see a class."""


@dataclass(frozen=True, eq=False)
class FadingSight(Sight):
    """Of one slope.

    Attributes:
        slope: s.
        prior: (P, P) weight of a class's token, as an equal share of the row's.
        heavier: (P, P) mean prior of a class's tokens, over pairs of what a token gives twice, in
            units of `prior`.
        met_by_one: (P, P, P) [row, other, key]: prior of a row on the tokens that another one
            looks at, over that on those that it looks at itself.
    """

    slope: float = 0.0
    prior: Array = field(init=False)
    heavier: Array = field(init=False)
    met_by_one: Array = field(init=False)

    @functools.cached_property
    def met_before(self) -> Array:
        """e^s sum_{j < i} p_ij^2 over the whole of it: the row before weighs its keys by e^s more,
        and does not see the row's own position."""
        squares = self.keys * self.prior**2
        itself = np.diag(1.0 / np.maximum(np.diagonal(squares), 1.0))
        sizes = (
            _size(np.clip(np.minimum(self.classes.nodes - less, self.window), 1, None), self.slope)
            for less in (0, 1)
        )
        whole, before = sizes
        return np.asarray(np.exp(self.slope) * (1.0 - itself) * (whole / before)[:, None])

    def __post_init__(self) -> None:
        self._set(_fading(self.classes, self.slope, self.window))

    def _set(self, fields: dict[str, Array]) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def lighter(self, factor: Array) -> FadingSight:
        """The same rows, whose squares of weights are `factor`, (P, P), times those of the prior's:
        fewer keys would have more of them each."""
        found, root = object.__new__(FadingSight), np.sqrt(factor)
        found._set(vars(self) | _of_counts(self.classes, self.keys / factor, self.seen))
        found._set(
            {
                "prior": self.prior * factor,
                "shared": self.shared / (root[:, None, :] * root[None, :, :]),
                "split": self.split / factor,
                "met_by_one": self.met_by_one * root[None, :, :] / root[:, None, :],
            }
        )
        return found


@functools.lru_cache(maxsize=32)
def fading(classes: PositionClasses, slope: float, window: int | None = None) -> FadingSight:
    """The same for the same classes, slope and window."""
    return FadingSight(classes, min(window or classes.length, classes.length), slope)


def _fading(classes: PositionClasses, slope: float, window: int) -> dict[str, Array]:
    nodes, size = classes.nodes, len(classes.nodes)
    reach = min(int(REACH / slope) + 1, window)
    sums = _Sums(nodes)
    keys, squares, met, cubes = (np.zeros((size, size)) for _ in range(4))
    split, shared = (np.zeros((size,) * 3) for _ in range(2))
    received = _received(classes.length, slope, window)
    count, pairs = classes.count, classes.pair_count
    for p in range(size):
        end = int(nodes[p])
        least, cubic = max(end - reach, 0), True

        def of(place: Array, end: int = end) -> Array:
            one, places = np.exp(-slope * np.abs(end - place)), place.astype(np.intp) - 1
            whole = _size(min(end, window), slope) * received[places]
            return np.stack([one, one**2, one * np.maximum(whole - one, 0.0), one**3])

        found = sums(of, least, end, 0, p)
        if found.min() < 0.0:  # all weight in few cells
            cubic = False
            found = sums(of, least, end, 0, p, cubic=cubic)
        keys[p], squares[p], met[p], cubes[p] = found
        split[p + 1 :, p] = keys[p]
        for s in range(p + 1):
            at = int(nodes[s])
            split[s, p] = sums(of, least, at, 0, s, cubic=cubic)[0]
            split[s, p] += sums(of, max(at, least), end, s + 1, p, cubic=cubic)[0]
            if s < p:

                def by_both(place: Array, end: int = end, at: int = at) -> Array:
                    return np.exp(-slope * (np.abs(end - place) + np.abs(at - place)))[None]

                both = sums(by_both, least, at, 0, s, cubic=cubic)[0]
                shared[p, s] = shared[s, p] = np.maximum(both, 0.0)
    seen = keys > LEAST_SHARE * keys.sum(1, keepdims=True)
    keys, squares = np.where(seen, keys, 0.0), np.where(seen, squares, 0.0)
    # What a row shares with all others, less what it shares with those of other cells, is what it
    # shares with those of its own.
    others = np.einsum("ps,psq->pq", pairs, shared) / count[:, None]
    alone = np.diagonal(pairs)[:, None] / count[:, None]
    beside = np.where(alone > 0.0, (met - others) / np.where(alone > 0.0, alone, 1.0), 0.0)
    every = np.arange(size)
    shared[every, every] = np.clip(beside, 0.0, squares)
    prior = np.where(seen, squares / np.where(seen, keys, 1.0), 1.0)
    together = seen[:, None, :] & seen[None, :, :]
    each = np.where(seen, keys, 1.0)
    counts = np.where(seen, keys / prior, 0.0)
    return {
        "starts": np.maximum(nodes - window, 0),
        "ends": nodes,
        "begins": np.zeros(size, np.intp),
        "size": np.minimum(nodes, window).astype(float),
        "shared": np.where(together, shared / (prior[:, None, :] * prior[None, :, :]), 0.0),
        "split": np.where(seen[None, :, :], split / prior, 0.0),
        "prior": prior,
        "heavier": np.where(seen, cubes / np.where(seen, squares * prior, 1.0), 1.0),
        "met_by_one": np.where(together, shared / (each * prior[:, None, :]), 0.0),
    } | _of_counts(classes, counts, seen)


def _of_counts(classes: PositionClasses, counts: Array, seen: Any) -> dict[str, Array]:
    """Rows give what keys get: sums over rows are those over keys, read the other way."""
    count, pairs, every = classes.count, classes.pair_count, np.arange(len(counts))
    rows = (count[:, None] * counts / count).T
    twice = np.einsum("p,pq,pr->qrp", count, counts, counts)
    twice[every, every] -= (count[:, None] * counts).T
    several = pairs > 0.0
    later = np.where(several[:, :, None], twice / np.where(several, pairs, 1.0)[:, :, None], 0.0)
    return {"keys": counts, "rows": rows, "later": later, "later_own": rows, "seen": seen}


def _size(place: Any, slope: float) -> Any:
    """What rows of those positions weigh their keys by together."""
    return np.expm1(-slope * np.asarray(place, float)) / np.expm1(-slope)


def _received(length: int, slope: float, window: int) -> Array:
    """(L,) what every key receives of rows that share one weight out, of as many as see it."""
    from scipy.signal import lfilter  # takes a tenth of a second

    sent = 1.0 / _size(np.minimum(np.arange(length, 0, -1), window), slope)
    found = lfilter([1.0], [1.0, -float(np.exp(-slope))], sent)[::-1]
    beyond = np.append(found[window:], np.zeros(min(window, length)))
    return np.asarray(found - np.exp(-slope * window) * beyond)


class _Sums:
    """Sums over ranges of positions of what is interpolated between nodes, times weights."""

    def __init__(self, nodes: NDArray[np.intp]) -> None:
        self._nodes, self._logs = nodes, np.log(nodes)

    def __call__(
        self,
        weights: Callable[[Array], Array],
        low: int,
        high: int,
        first: int,
        last: int,
        cubic: bool = True,
    ) -> Array:
        """(k, P) counts of sum_{low < i <= high} w(i) f(i), as those of `classes._Sums`."""
        nodes, high = self._nodes, min(high, int(self._nodes[-1]))
        counts = weights(nodes.astype(float))
        if low >= high or first > last:
            return 0.0 * counts
        inside = (nodes > low) & (nodes <= high)
        inside[:first] = inside[last + 1 :] = False
        counts = np.where(inside, counts, 0.0)
        inner = min(last, len(nodes) - 2)
        begin = max(0, int(np.searchsorted(nodes, low, "right")) - 1)
        for cell in range(begin, len(nodes) - 2):
            ends = max(low, int(nodes[cell])) + 1, min(high + 1, int(nodes[cell + 1]))
            if ends[0] >= ends[1]:
                continue
            held, place = stencil(cell, first, inner), np.arange(*ends, dtype=float)
            if not cubic:
                start = min(max(cell, first), max(inner - 1, first))
                held = slice(start, min(start + 1, inner) + 1)
            if cell >= inner:  # beyond all nodes, as at the last
                held = slice(inner, inner + 1)
            basis = lagrange(self._logs[held], np.log(place))
            counts[:, held] += weights(place) @ basis.T
        return counts
