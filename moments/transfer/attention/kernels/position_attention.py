"""Causal softmax attention on classes of positions: the closure of `closure` in their algebra.

Every node of `classes.PositionClasses` is a row and a key. A matrix over keys is (own, pairs); its
products close, so that each step of the closure keeps its form: reference rows, mean attention, the
self overlap of a row, joint laws of two rows, dropped attention. Masks and windows are the counts
of a `Sight`, distance penalties those of a `FadingSight`, rotary positions the means of a
`Turning`; all tokens may be one class. Every node is a row class of its own, exact
on its own reference, and every two of them have a law at the correlation of their queries and its
derivative there; between nodes everything is interpolated.

For tokens that are alike but for their position nothing else is approximated: with every position
a node, a layer meets `KernelAttention` as closely as that one's single precision and its nodes in
the correlation allow, where it gives every row a class of its own. `tests/test_position_classes.py`
holds that; what nodes lose in whole models is in `benchmarks/data/position_classes.json`.

Every two rows of an attention layer on classes, in tiles of rows that see nearly the same keys.

The laws of two rows are arrays over the keys of either. A tile of rows sees a range of classes, and
pairs of two tiles are treated together, over those two ranges: half of what a causal mask would
fill with zeros is left out, and beyond a window nearly all.

See docs/theory/state.md, Classes of positions.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import Matrix, Sight, diagonal
from ..softmax.table import THETA_MAX
from . import exact_rows
from .closure import MARGINAL_SWEEPS, fixed_norms, unshared_part
from .finite_rows import Widths, calibrate, nodes_for
from .joint_laws import (
    EXPONENT_MAX,
    ITERATIONS,
    JOINT_SWEEPS,
    RHO_MIN,
    SELF_SWEEPS,
    TANGENT_SWEEPS,
    geometric_mean,
    sharpening,
    single,
)
from .relative_positions import FadingSight, Turning
from .row_statistics import (
    RowStatistics,
    annealed_moments,
    log_weights,
    matched,
    reference_scale,
    statistics_of,
)

# --- pairs of rows --------------------------------------------------------------------------------

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
        still: (c, n, k) means of rho of two keys of the longer row; None likewise.
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
    still: Array | None
    begun: Array | None

    def diagonal(self, pairs: Array) -> Array:
        """(..., o) entries of keys of both."""
        return pairs.diagonal(self.left.start - self.right.start, -2, -1)

    @property
    def rows(self) -> slice:
        """The range of the longer rows."""
        return slice(int(self.long[0]), int(self.long[-1]) + 1)

    def projected(self, maps: RowMaps, kernels: Sequence[tuple[Matrix, bool]]) -> list[Matrix]:
        """X C X'^T of rows' maps and kernels C of their own and pairs' entries.

        Args:
            maps: of all rows.
            kernels: (o,) and (n, k) of all rows or (rows, n, k) of the longer ones; or, where it is
                said to be by pair, (c, o) and (c, n, k).
        """
        own_keys, size = (self.own_left, self.own_right), self.left.stop - self.left.start
        second = maps.own[self.short, self.own]
        once = maps.once[self.short, self.own]
        middles, owns = [], []
        for kernel, by_pair in kernels:
            if self.begun is not None:
                kernel, by_pair = self._of_pairs(kernel, by_pair), True
            first = self.long if by_pair else self.rows
            apart = kernel[0] - self.diagonal(kernel[1])
            if self.begun is not None:
                apart = apart * self.begun
            middle = maps.whole[first, self.left, self.left] @ kernel[1]
            beside = maps.pairs[first, self.left, self.own] * apart[..., None, :]
            middle[:, :, self.own_right] += beside
            own = maps.own[first, self.own] * apart
            if not by_pair:
                where = self.long - self.long[0]
                middle, own = middle[where], own[where]
            middles.append(middle)
            owns.append(own)
        found = np.concatenate(middles, axis=1) if len(middles) > 1 else middles[0]
        parts = [slice(k * size, (k + 1) * size) for k in range(len(kernels))]
        # One token of its own meets what counts multiply below; what it is with itself is `own`.
        for part, own in zip(parts, owns, strict=True):
            diagonal = _diagonal(found[:, part][:, own_keys[0], own_keys[1]])
            diagonal += own * once
        found = found @ np.swapaxes(maps.whole[self.short, self.right, self.right], -1, -2)
        matrices = []
        for part, own in zip(parts, owns, strict=True):
            pairs, own = found[:, part], own * second
            diagonal = _diagonal(pairs[:, own_keys[0], own_keys[1]])
            diagonal -= own * once
            matrices.append((own, pairs))
        return matrices

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
        once: (P, P) one over the counts of a row's keys.
        whole: (P, P, P) pairs times counts, and own on the diagonal.
    """

    own: Array
    pairs: Array
    once: Array
    whole: Array

    @classmethod
    def of(cls, own: Array, pairs: Array, counts: Array) -> RowMaps:
        whole = pairs * counts[:, None, :]
        its_own = _diagonal(whole)
        its_own += own
        there = counts > 0.0
        return cls(own, pairs, np.where(there, 1.0 / np.where(there, counts, 1.0), 0.0), whole)


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
        tiles.append(
            _tile(sight, slice(rows.start, rows.stop), long, short, right, right, turned, turning)
        )
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
    turning: Turning | None,
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
    still = None if turning is None else turning.within[long, left, right]
    return Tile(pairs, long, short, *where, met, met_own, turned, still, several)


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
            tiles.append(_tile(sight, pairs, long, short, left, right, turned, turning))
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


# --- the layer ------------------------------------------------------------------------------------

TOLERANCE = 2e-5
"""Largest change of an overlap at which its iteration ends; below that by token, rows being few."""


class Across(NamedTuple):
    """`queries`, `keys`, `values` and `repeats` of `ClassLogits`, of tokens of two documents."""

    queries: Matrix
    keys: Matrix
    values: Matrix
    repeats: Array | None = None


class Neighbours(NamedTuple):
    """Of every row and the one before it.

    Attributes:
        queries: (P,) kernel of their queries.
        before: the node of the latter, as `neighbours.NeighbouringClasses.before`.
    """

    queries: Array
    before: tuple[int, ...]


class ClassLogits(NamedTuple):
    """`logits.Logits` on classes.

    Attributes:
        queries, keys, values: kernels (own (P,), pairs (P, P)); as there.
        scale: tau.
        sight: which keys rows see.
        turning: rotary positions; None: none.
        repeats: (P, P) variance of the keys' and values' kernel within cells; None: none.
        across: the same kernels of tokens of two documents, own parts being those of two tokens at
            one place; None: there is one document.
        beside: queries of a row and of the one before it; None: these are like others of a class.
    """

    queries: Matrix
    keys: Matrix
    values: Matrix
    scale: float
    sight: Sight
    turning: Turning | None = None
    repeats: Array | None = None
    across: Across | None = None
    beside: Neighbours | None = None

    @property
    def prior(self) -> Array:
        """(P, P) weight of a key's token where logits vanish; a row's sum to 1."""
        sight = self.sight
        size = sight.keys.sum(1, keepdims=True)
        if not isinstance(sight, FadingSight):
            return np.asarray(sight.seen / size)
        return np.asarray(sight.prior / (sight.keys * sight.prior).sum(1, keepdims=True))

    @property
    def aligned(self) -> bool:
        """As in `Logits`."""
        return self.turning is None and self.keys is self.values

    @property
    def within(self) -> Array:
        """(P, P), or (P, P, P) by row where positions turn: the kernel of two keys of one row."""
        pairs = self.keys[1]
        return np.asarray(pairs if self.turning is None else pairs * self.turning.within)

    @property
    def deviation(self) -> Array | None:
        """(P, P, P) root of its variance inside cells."""
        return None if self.turning is None else np.abs(self.keys[1]) * self.turning.deviation

    def among(self, rows: slice, keys: slice) -> tuple[Array, Array | None]:
        """(n, k, k) of both, for some rows and keys."""
        pairs = self.keys[1][keys, keys]
        if self.turning is None:
            return np.broadcast_to(pairs, (rows.stop - rows.start, *pairs.shape)), None
        where = rows, keys, keys
        away = np.abs(pairs) * self.turning.deviation[where]
        return pairs * self.turning.within[where], away

    def averaged(self, function: Callable[[Array], Array]) -> tuple[Array, Array]:
        """(P,) and (P, P) or (P, P, P): of an entry of the keys' kernel within a row."""
        own, middle, away = function(self.keys[0]), self.within, self.deviation
        if away is None:
            return own, function(middle)
        assert self.turning is not None
        shares = zip(*self.turning.rule, strict=True)
        return own, np.asarray(sum(w * function(middle + z * away) for z, w in shares))

    def log_mean(self, deviation: Array | None, factor: Array) -> Array | None:
        """log E e^x of an exponent that varies inside cells as rho does."""
        if self.turning is None or deviation is None:
            return None
        size = factor * deviation
        shares = zip(*self.turning.rule, strict=True)
        logs = (z * size + np.log(w) for z, w in shares)
        return np.asarray(functools.reduce(np.logaddexp, logs))


class Paths(NamedTuple):
    """Gradient at the attention's input by path, each (own (P,), pairs (P, P)); see
    `attention.AttentionGradient`."""

    value: Matrix
    query: Matrix
    key: Matrix
    cross: Matrix


class PositionAttention:
    """Moments of one causal softmax attention layer on classes of positions.

    Attributes:
        weights: (P, P) mean attention [row, key] to one token of a class.
        counted: (P, P) to all tokens of a class that a row sees.
        logit_variance, entropy, sum_square: (P,) as in `attention.KernelAttention`.
        output: second moments per feature of sum_j a_ij x_j, attention dropout included.
        response: what the query path is per unit of G.
        overlap_path: what the query path gains per unit of G and of the relative variance of two
            tokens' overlap.
        repeated: the part of `response` that comes of `ClassLogits.repeats`; None without.
        across: the same rows where two of them are of different documents; None: there is one.
        beside: every row and the one before it, own parts being what these two have; None: they are
            like others of a class.
    """

    across: PositionAttention | None = None
    beside: PositionAttention | None = None

    def __init__(
        self,
        logits: ClassLogits,
        *,
        drop_prob: float = 0.0,
        d_model: float = np.inf,
        d_head: float = np.inf,
        norm_spread: float = 0.0,
        value_bias: float = 0.0,
    ) -> None:
        """Build the layer's joint law; O(P^4).

        Args:
            logits: of the layer.
            drop_prob, d_model, d_head, norm_spread, value_bias: as in `attention.KernelAttention`.
        """
        self.logits = logits
        self._kernels: Across | ClassLogits = logits
        self._widths = Widths(float(d_model), float(d_head), float(norm_spread))
        self._dropped, self._value_bias = drop_prob / (1.0 - drop_prob), value_bias
        sight = logits.sight
        self._rows = rows = row_statistics(logits)
        self.weights = mean_attention(logits, rows)
        if isinstance(sight, FadingSight):
            lighter = _lighter(logits, rows, sight)
            self.logits = logits = logits._replace(sight=sight.lighter(lighter))
            self._kernels = logits
            self.weights = self.weights * lighter
        self.counted = logits.sight.keys * self.weights
        self._pairs = RowPairs.of(sight, logits.turning)
        self._response = RowMaps.of(*self._self_response(), logits.sight.keys)
        self._joint_laws()
        self.logit_variance, self.entropy = rows.logit_variance, rows.entropy
        own, inside = self._alone
        self._squares = self.weights**2 * np.maximum(own + diagonal(inside), 0.0)
        self.sum_square = (sight.keys * self._squares).sum(1)
        if self._dropped > 0.0:
            self._respond_to_noise()
        self._forward()
        if logits.across is not None:
            self.across = self._of_two_documents(logits.across)
        if logits.beside is not None:
            self.beside = self._of_neighbours(logits.beside)
        self._give_back()

    def _give_back(self) -> None:
        """Keep what the way back needs of the laws, in single precision, and not the rest."""
        laws = zip(self._pairs.tiles, self._laws, strict=True)
        self._sent = [self._at_keys(tile, law) for tile, law in laws]
        del self._laws, self._response, self._slope, self._sums, self._traces

    def _of_two_documents(self, met: Across) -> PositionAttention:
        """These rows, met by those of another document, which sees other tokens at the same places:
        what a row has with itself is what two at one place have."""
        return self._met(met, self._pairs)

    def _of_neighbours(self, met: Neighbours) -> PositionAttention:
        """Every row met by the one before it, which sees the same keys but for the row's own."""
        logits = self.logits
        kernels = logits._replace(queries=(met.queries, logits.queries[1]))
        pairs = RowPairs.of_neighbours(logits.sight, logits.turning, met.before)
        return self._met(kernels, pairs)

    def _met(self, kernels: Across | ClassLogits, pairs: RowPairs) -> PositionAttention:
        found = copy.copy(self)
        found._kernels, found._pairs, found._dropped = kernels, pairs, 0.0
        found.across = found.beside = None
        found._joint_laws()
        found._forward()
        found._give_back()
        return found

    @property
    def _neighbouring(self) -> bool:
        """Whether these are rows that follow one another."""
        return isinstance(self._pairs, NeighbourRows)

    def _of_one_token(self, rows: Indices, keys: slice) -> Array | float:
        """(n, k), or 1 for all: what of the squares of a row's weights it has with itself, or with
        the row before where these are pairs of such."""
        if not self._neighbouring:
            return 1.0
        return np.asarray(self.logits.sight.met_before[rows, keys])

    @property
    def beyond_tables(self) -> NDArray[np.bool_]:
        """(P,) whether the logit variance is beyond the tables."""
        return np.asarray(self.logit_variance > THETA_MAX)

    # --- rows ----------------------------------------------------------------------------------

    def _self_response(self) -> Matrix:
        """1 - A of every row; see `joint_laws.self_overlap`."""
        size = len(self.weights)
        found, inside = np.zeros((size, size)), np.zeros((size,) * 3)
        for rows, keys in self._pairs.rows:
            found[rows, keys], inside[rows, keys, keys] = self._responses(rows, keys)
        return found, inside

    def _responses(self, of: slice, among: slice) -> Matrix:
        """1 - A of some rows, over the keys that they see."""
        logits, rows = self.logits, self._rows
        keys, seen = logits.sight.keys[of, among], logits.sight.seen[of, among]
        weights, own = self.weights[of, among], logits.keys[0][among]
        held = seen.astype(float)
        both = held[:, :, None] * held[:, None, :]
        temperature = logits.scale * logits.queries[0]
        pull = (rows.own_response * temperature * rows.softening)[of, None, None]
        within, away = logits.among(of, among)
        top = max(own.max(), within.max())
        of_pairs = np.exp(pull * (within - top))
        of_own = np.exp(pull[..., 0] * (own - top)) - diagonal(of_pairs)
        prior = logits.prior[of, among]
        total = np.einsum("pr,pqr->pq", keys * prior, of_pairs) + prior * of_own
        found = np.where(seen, prior * of_own / total, 0.0)
        inside = both * (prior[:, None, :] * of_pairs / total[:, :, None])
        exponent = pull / np.maximum(rows.strength[of], 1e-6)[:, None, None] ** 2
        away = logits.log_mean(away, exponent)
        apart = own - diagonal(within)
        counted = keys[:, :, None] * within  # C by its counts
        its_own = _diagonal(counted)
        its_own += apart
        excess: Array | float = 0.0
        if isinstance(logits.sight, FadingSight):
            excess = self._excess_weight(of, among)
        step, last = np.full(len(keys), 0.5), None
        sent = keys * weights
        for _ in range(ITERATIONS):
            # (1 - A) C (1 - A)^T, of A = (found, inside): `product` twice, in place
            response = 1.0 - found
            middle = response[:, :, None] * within
            middle -= inside @ counted
            middle_own = response * apart
            projected = middle * keys[:, None, :]
            its_own = _diagonal(projected)
            its_own += middle_own
            projected = projected @ np.swapaxes(inside, -1, -2)
            middle *= response[:, None, :]
            projected = np.subtract(middle, projected, out=projected)
            whole = middle_own * response + diagonal(projected) - 2.0 * excess * apart
            joint_own, joint = _bounded_exp((whole, projected), exponent, away)
            joint_own -= diagonal(joint)
            joint_own *= held
            joint *= both
            left, right = _balances((joint_own, joint), weights, sent, SELF_SWEEPS)
            joint *= left[:, :, None]
            joint *= (right * weights)[:, None, :]
            joint -= inside
            change = joint_own * left * right * (weights + excess) - found
            if last is not None:  # the step that would have cancelled the last change
                turned = last - change
                counts = keys * turned
                size = (counts * turned).sum(1)
                moved = step * (counts * last).sum(1) / np.maximum(size, 1e-30)
                step = np.minimum(np.maximum(moved, 0.25), 1.0)
            last = change
            largest = max(np.abs(change).max(), joint.max(), -joint.min())
            found = found + step[:, None] * change
            joint *= step[:, None, None]
            inside += joint
            if largest < TOLERANCE:
                break
        return held * (1.0 - found), both * -inside

    # --- pairs of rows -------------------------------------------------------------------------

    def _projected(self, tile: Tile, kernels: Sequence[tuple[Matrix, bool]]) -> list[Matrix]:
        """(1 - A) C (1 - A')^T of pairs of rows; `kernels` as in `Tile.projected`."""
        found = tile.projected(self._response, kernels)
        if isinstance(self.logits.sight, FadingSight):
            long, short = tile.long, tile.short
            heavier = self._excess_weight(long, tile.own) + self._excess_weight(short, tile.own)
            heavier[long != short] = 0.0
            for (kernel, by_pair), (own, _) in zip(kernels, found, strict=True):
                apart = kernel[0] - tile.diagonal(kernel[1])
                if not by_pair and apart.ndim > 1:
                    apart = apart[long - long[0]]
                own -= heavier * apart
        return found

    def _excess_weight(self, rows: Indices | slice, keys: slice) -> Array:
        """(n, k) by how much a class's token weighs more where what it gives itself counts, by the
        square of its weight, than on average."""
        assert isinstance(self.logits.sight, FadingSight)
        return np.asarray((self.logits.sight.heavier - 1.0)[rows, keys] * self.weights[rows, keys])

    def _joint_laws(self) -> None:
        """The joint law F/(w w') of every pair of rows, the longer one's keys first, and what moves
        it."""
        logits, rows, pairs = self.logits, self._rows, self._pairs
        turning, met, temperature = logits.turning, self._kernels, logits.queries[0]
        own, between = met.queries
        bare = np.clip(between / np.sqrt(np.outer(temperature, temperature)), -1.0, 1.0)
        bare = pairs.joined(np.clip(own / temperature, -1.0, 1.0), bare)
        beside = np.concatenate([t.turned[1] for t in pairs.tiles if t.turned] or [np.ones(1)])
        lowest = bare if turning is None else np.minimum(bare * beside, 0.0)
        nodes = nodes_for(lowest, float(rows.theta.max()))
        unshared, by_mean = rows.unshared_fraction, rows.unshared_by_mean
        self._calibration = calibration = calibrate(
            rows.theta, rows.keys, unshared, by_mean, nodes, self._widths, between_nodes=True
        )
        gap = np.maximum(rows.logit_variance, exact_rows.THETA_LEAST) * rows.strength**2
        exponent = calibration.log_odds / np.maximum(gap, 1e-12)[:, None]
        self._exponent_slope = exponent @ nodes.slopes[:, 0]
        exponent = exponent * logits.scale * temperature[:, None]
        exponent = geometric_mean(exponent[pairs.long], exponent[pairs.short])

        moved, unturned = [], []
        turn = np.ones(len(bare))
        self._sums = [self._sums_of(tile) for tile in pairs.tiles]
        self._traces = [self._trace(sums) for sums in self._sums]
        along_values = []
        for tile, trace in zip(pairs.tiles, self._traces, strict=True):
            own, kernel = met.keys[0][tile.own], met.keys[1][tile.left, tile.right]
            kernels: list[tuple[Matrix, bool]] = [((own, kernel), False)]
            if tile.turned is not None:
                of_keys, of_rows = tile.turned
                assert turning is not None
                within = turning.within[tile.rows, tile.left, tile.right]
                turned = own * of_rows[:, None], kernel * of_keys
                kernels = [(turned, True), ((own, kernel * within), False)]
            if not logits.aligned:
                values = met.values[0][tile.own], met.values[1][tile.left, tile.right]
                kernels.append((values, False))
            found = self._projected(tile, kernels)
            moved.append(found[0])
            along_values.append(found[-1])
            if tile.turned is not None:
                unturned.append(found[1])
                meeting = _gathered(trace, found[0]), _gathered(trace, found[1])
                turn[tile.pairs] = _ratio(*meeting, of_rows)
        self._correlation = rho = np.clip(bare * turn, nodes.low, 1.0)
        self._basis, slopes = nodes.basis(rho)
        factor, slope = (np.vecdot(one.T, exponent) for one in (self._basis, slopes))
        self._slope = slope
        exponents: list[Matrix] = moved
        factors: Array | None = factor
        if turning is not None:
            # What comes of fluctuating products does not know how far apart the rows are; the rest
            # is per unit of what the kernel holds of the correlation.
            alone = exponent @ nodes.basis(np.zeros(1))[0][:, 0]
            apart = np.abs(rho) > RHO_MIN
            along = np.where(apart, (factor - alone) / np.where(apart, rho, 1.0), slope) * bare
            exponents, factors = [], None
            for tile, one, other in zip(pairs.tiles, moved, unturned, strict=True):
                exponents.append(_mixed(along[tile.pairs], one, alone[tile.pairs], other))
        self._laws = [
            self._law(
                sums,
                (one,) if logits.aligned else (one, last),
                (two, None if factors is None else factors[sums.tile.pairs]),
                factor[sums.tile.pairs],
                slope[sums.tile.pairs],
            )
            for sums, one, last, two in zip(self._sums, moved, along_values, exponents, strict=True)
        ]

        shared_part = 2.0 / self._widths.d_model
        sharp = sharpening(rows, pairs.long, pairs.short, rho)
        self._growth = self._over_pairs(calibration.growth)
        self._query = self._over_pairs(calibration.query) * sharp
        cross = shared_part * self._growth * sharp
        # of the derivative as keys turn with their rows, and as they turn alone
        self._driven: tuple[Array, ...]
        if turning is None:
            self._driven = (np.stack([self._over_pairs(calibration.key) * sharp, cross]),)
            return
        along = self._over_pairs(calibration.along) * bare * sharp
        beside = self._over_pairs(calibration.key - nodes.rho * calibration.along) * sharp
        self._driven = np.stack([along, 0.0 * cross]), np.stack([beside, cross])

    def _law(
        self,
        sums: _Sums,
        directions: Sequence[Matrix],
        exponent: tuple[Matrix, Array | None],
        factor: Array,
        slope: Array,
    ) -> _Laws:
        """The joint law of pairs of rows, and its derivatives.

        Args:
            sums: over the keys of pairs.
            directions: the projected kernel, and where they are not its the values', written over.
            exponent: of the law, as a matrix and what multiplies it; None: nothing does.
            factor: (c,) of the exponent in the kernel, for a row with itself.
            slope: (c,) its derivative in the correlation.
        """
        logits, tile = self.logits, sums.tile
        long, alone, away = tile.long, self._pairs.alone[tile.pairs], None
        if logits.turning is not None and alone.any():
            away = np.zeros_like(directions[0][1])
            rows = slice(int(long[alone][0]), int(long[alone][-1]) + 1)
            _, inside = logits.among(rows, tile.left)
            assert inside is not None
            inside = inside[long[alone] - rows.start]
            away[alone] = logits.log_mean(inside, factor[alone, None, None])
        held, times = exponent
        whole = held[0] + tile.diagonal(held[1])
        times = None if times is None else times[:, None, None]
        own, pairs = _bounded_exp((whole, held[1]), times, away)
        own -= tile.diagonal(pairs)
        own *= tile.met_own
        pairs *= tile.met
        for beside, between in directions:
            beside += tile.diagonal(between)
            beside *= slope[:, None]
            between *= slope[:, None, None]
        joint, tangents = sums.balanced_with((own, pairs), JOINT_SWEEPS, directions)
        return _Laws(joint, tangents[0], tangents[-1])

    def _sums_of(self, tile: Tile) -> _Sums:
        sight, weights = self.logits.sight, self.weights
        long, short, left, right = tile.long, tile.short, tile.left, tile.right
        # keys that the other row does not see lack what that row's own terms add
        return _Sums(
            tile,
            sight.split[short, long, left] * weights[long, left],
            sight.split[long, short, right] * weights[short, right],
            weights[long, tile.own] * self._shared(tile, long, short, tile.own),
            weights[short, tile.own] * self._shared(tile, short, long, tile.own),
        )

    def _shared(self, tile: Tile, one: Indices, other: Indices, keys: slice) -> Any:
        """(c, n) of what a token weighs in a row, the part on those that another row looks at."""
        sight, alone = self.logits.sight, self._pairs.alone[tile.pairs]
        others: Array | float = 1.0
        if isinstance(sight, FadingSight):
            others = sight.met_by_one[one, other, keys]
        elif not self._neighbouring:
            return 1.0
        return np.where(alone[:, None], self._of_one_token(one, keys), others)

    @property
    def _alone(self) -> Matrix:
        """(P, P) and (P, P, P) joint law of every row with itself."""
        size = len(self.weights)
        own, inside = np.zeros((size, size)), np.zeros((size,) * 3)
        for tile, law in zip(self._pairs.tiles, self._laws, strict=True):
            alone = self._pairs.alone[tile.pairs]
            rows = tile.long[alone]
            if len(rows):
                own[rows, tile.left] = law.joint[0][alone]
                inside[rows, tile.left, tile.right] = law.joint[1][alone]
        return own, inside

    def _over_pairs(self, values: Array) -> Array:
        """(C,) of (P, r) values of rows at the nodes of the correlation."""
        halves = 0.5 * (values[self._pairs.long] + values[self._pairs.short])
        return np.asarray(np.vecdot(self._basis.T, halves))

    def _trace(self, sums: _Sums) -> Matrix:
        """(c, o) and (c, n, k) what a law of pairs of rows is to be summed with for tr(F C), of the
        values' kernel."""
        sight, weights, tile = self.logits.sight, self.weights, sums.tile
        long, short, alone = tile.long, tile.short, self._pairs.alone[tile.pairs]
        values, kernel = self._kernels.values[0], self._kernels.values[1][tile.left, tile.right]
        once = sight.shared[long, short, tile.own] * weights[long, tile.own]
        once[alone] = self.counted[long[alone], tile.own]
        once[alone] *= self._of_one_token(long[alone], tile.own)
        once *= weights[short, tile.own]
        pairs = sums.first[:, :, None] * sums.second[:, None, :]
        pairs *= kernel
        pairs_own = _diagonal(pairs[:, tile.own_left, tile.own_right])
        pairs_own += (values[tile.own] - tile.diagonal(kernel)) * once
        return once * values[tile.own], pairs

    def _gather(self, of: int) -> Array:
        """(C,) of the joint laws or of their derivatives in the correlation."""
        laws = zip(self._traces, self._laws, strict=True)
        return np.concatenate([_gathered(trace, law[of]) for trace, law in laws])

    def _repeated(self, variance: Array) -> Array:
        """(C,) what the derivative in the correlation gathers besides where covariances of two
        keys vary within cells by so much: logits and values vary together.

        To first order in the logits, of keys that are projected alone.
        """
        own, found = self._response.own, []
        for sums, law in zip(self._sums, self._laws, strict=True):
            tile = sums.tile
            first = sums.first * own[tile.long, tile.left]
            second = sums.second * own[tile.short, tile.right]
            met = _times(law.joint[1] * variance[tile.left, tile.right], second)
            found.append(self._slope[tile.pairs] * (met * first).sum(1))
        return np.concatenate(found)

    # --- forward -------------------------------------------------------------------------------

    def _forward(self) -> None:
        logits, weights, rows, sight = self.logits, self.weights, self._rows, self.logits.sight
        met, itself = self._kernels, self._kernels is logits
        own, pairs, calibration = logits.values[0], self._pairs, self._calibration
        long, short, alone = pairs.long, pairs.short, pairs.alone
        width = self._widths.d_model
        whole = self.mean_output()
        mean = pairs.joined(*whole)
        excess, slope = self._gather(0) - mean, self._gather(1)
        if itself:
            self._shift = self._shifted(whole[0] + excess[alone])
        looking = logits.scale * self._looking(self._shift)
        temperature, of_queries = logits.queries[0], pairs.joined(*met.queries)
        of_joint, of_query = (
            self._over_pairs(one) for one in (calibration.joint_shift, calibration.query_shift)
        )
        output = mean + excess + looking * of_joint * of_queries / width
        if self._widths.deficit > 0.0:
            held = np.zeros(len(long))  # of the same tokens, which two documents do not have
            if itself or self._neighbouring:
                apart = self.counted @ own - whole[0]
                unshared = unshared_part(rows.keys, apart, (self.counted * weights).sum(1))
                shared = np.einsum("psq,pq,sq->ps", sight.shared, weights, weights)
                every = np.arange(len(weights))
                alike = self._of_one_token(every, slice(0, len(weights)))
                held = pairs.joined((self.counted * weights * alike).sum(1), shared)
                held = held * np.sqrt(unshared[long] * unshared[short])
            output += fixed_norms(
                self._widths,
                (long, short),
                self._correlation,
                self._growth,
                calibration.stiffness,
                calibration.against,
                rows.unshared_by_mean,
                mean,
                excess,
                slope,
                held,
            )
        path = looking * of_query
        norm = np.sqrt(temperature)

        def sent(slope: Array) -> Array:
            found = self._query * slope / (norm[long] * norm[short])
            if itself:
                found[alone] += calibration.common * slope[alone] / temperature
            return np.asarray(found)

        query = sent(slope) + path / width
        self.repeated = None
        if met.repeats is not None:
            repeated = sent(self._repeated(met.repeats))
            self.repeated = pairs.split(repeated)
            query = query + repeated
        if self._dropped > 0.0:
            masks = (1.0 + calibration.masks) * ((sight.keys * self._squares) @ own)
            output[alone] += self._dropped * masks
            noise = calibration.noise_query * self._noise_overlap(logits.keys[0], logits.within)
            query[alone] += self._dropped * logits.scale * noise
        self.output, self.response = pairs.split(output), pairs.split(query)
        self.overlap_path = pairs.split(path)

    def _shifted(self, output: Array) -> Array:
        """(P,) what a row's direction adds to the tokens that it attends to, whose average has that
        variance."""
        logits = self.logits
        own = logits.values[0]
        shift = (self.counted @ own - output) * np.sqrt(self._rows.softening)
        if logits.keys is not logits.values:  # the row looks at the keys, and moves the values
            moved = self._apart(logits.values)
            usable = moved > 1e-9 * (self.counted @ own)
            ratio = self._apart(logits.keys) / np.where(usable, moved, 1.0)
            shift = shift * np.sqrt(np.where(usable, ratio, 0.0))
        return np.asarray(shift)

    def _met_by(self, kernel: Matrix) -> Array:
        """(P, P) [row, key] of W C."""
        apart = kernel[0] - diagonal(kernel[1])
        return np.asarray(self.counted @ kernel[1] + self.weights * apart)

    def _apart(self, kernel: Matrix) -> Array:
        """(P,) what the attended tokens of a row do not share."""
        held = (self.counted * self._met_by(kernel)).sum(1)
        return np.asarray(np.maximum(self.counted @ kernel[0] - held, 0.0))

    def _looking(self, shift: Array) -> Array:
        """(C,) products of two rows' shifts; see `closure._looking`."""
        turning, long, short = self.logits.turning, self._pairs.long, self._pairs.short
        if turning is None or self._pairs.phases is None:
            return shift[long] * shift[short]
        parts = self.counted * (self.logits.values[0] - self._met_by(self.logits.values))
        total = parts.sum(1)
        usable = np.abs(total) > 1e-300
        parts = parts * np.where(usable, shift / np.where(usable, total, 1.0), 0.0)[:, None]
        turned = np.einsum("pq,pqm->pm", parts, turning.keys)
        both = turned[long] * turned[short].conj() * self._pairs.phases.conj()
        return np.asarray((both @ turning.shares).real)

    def mean_output(self) -> Matrix:
        """Overlap W C W^T of mean outputs."""
        own, pairs = self._kernels.values
        shared, apart = self.logits.sight.shared, own - diagonal(pairs)
        smooth = self.counted @ pairs @ self.counted.T
        of_own = np.einsum("psq,pq,sq,q->ps", shared, self.weights, self.weights, apart)
        every = slice(0, len(own))
        squares = self.counted * self.weights * self._of_one_token(np.arange(len(own)), every)
        alone = squares @ apart
        return diagonal(smooth) + alone, np.asarray(smooth + of_own)

    # --- attention dropout (see `closure`) ------------------------------------------------------

    def _respond_to_noise(self) -> None:
        logits = self.logits
        weights, seen = self.weights, logits.sight.seen
        own = logits.values[0] + self._value_bias
        beside, inside = self._alone
        response = self._response
        trace = exact_rows.jacobian_square(self.sum_square, self._rows.count)
        trace = trace * np.sqrt(self._rows.softening) * (self.counted @ own)
        moved = response.own**2 * own, (response.whole * own) @ np.swapaxes(response.pairs, -1, -2)
        moved[1][...] += response.pairs * (own * response.own)[:, None, :]
        if isinstance(logits.sight, FadingSight):
            every = slice(0, len(own))
            moved[0][...] -= 2.0 * self._excess_weight(every, every) * own
        slope = self._exponent_slope
        a, direction = slope[:, None] * moved[0], slope[:, None, None] * moved[1]
        whole = beside + diagonal(inside)
        mean = np.einsum("pqr,pqr,pr->pq", inside, direction, self.counted)
        mean += (whole * (a + diagonal(direction)) - diagonal(inside * direction)) * weights
        mean = np.where(seen, mean, 0.0)
        met = inside * self.counted[:, None, :]
        its_own = _diagonal(met)
        its_own += beside * weights
        left = mean[..., None]
        shift = -0.5 * left
        for _ in range(MARGINAL_SWEEPS):
            shift = 0.5 * (shift - left - met @ shift)
        shift = shift[..., 0]
        moved_pairs = direction + shift[:, :, None] + shift[:, None, :]
        pairs = inside * moved_pairs
        self._noise = whole * (a + diagonal(moved_pairs)) - diagonal(pairs), pairs
        self._noise_left = np.einsum("pq,pqr->pr", self.counted, pairs) + weights * self._noise[0]
        self._noise_both = (self.counted * self._noise_left).sum(1)
        self._noise_scale = np.ones(len(own))
        bare = self._noise_overlap(np.ones(len(own)), None)
        usable = bare > 1e-300
        self._noise_scale = np.where(usable, trace / np.where(usable, bare, 1.0), 0.0)

    def _noise_overlap(self, own: Array, pairs: Array | None) -> Array:
        """(P,) tr(E[J D J] X) of every row, of one kernel X, of one for every row, or of what
        different keys do not share."""
        counted, weights = self.counted, self.weights
        a, inside = self._noise
        beside, total = (a + diagonal(inside)) * own, np.zeros(len(own))
        mapped = weights * own
        if pairs is not None:
            apart = diagonal(pairs)
            mapped = weights * (own - apart) + _times(np.broadcast_to(pairs, inside.shape), counted)
            total += (_times(inside * pairs, counted) * counted).sum(1)
            beside -= diagonal(inside) * apart
        total += (counted * weights * beside).sum(1)
        total -= 2.0 * (self.logits.sight.keys * self._noise_left * mapped * weights).sum(1)
        total += self._noise_both * (counted * mapped).sum(1)
        return np.asarray(total * self._noise_scale)

    # --- backward ------------------------------------------------------------------------------

    def _at_keys(self, tile: Tile, laws: _Laws) -> list[Matrix]:
        """What every pair of rows sends to their keys per unit of its gradient, by the joint law
        and by its derivative along the values as its rows turn, and as they do not: (c, o) and
        (c, n k) of each."""
        sight, weights = self.logits.sight, self.weights
        long, short, left, right = tile.long, tile.short, tile.left, tile.right
        sent, beside = sight.rows.T * weights, (long == short) & ~self._pairs.alone[tile.pairs]
        alone = self._pairs.alone[tile.pairs]
        twice = np.where(long == short, 1.0, 2.0)[:, None]
        both = (twice * sent[long, left])[:, :, None] * sent[short, right][:, None, :]
        alike = twice * sent[long, tile.own] * sent[short, tile.own]
        if self._neighbouring:
            both, alike = self._before_each(tile)
        elif alone.any():  # a row with itself instead of with its neighbour
            rows = long[alone]
            once = weights[rows, left][:, :, None] * weights[rows, right][:, None, :]
            once *= np.moveaxis(sight.later[left, right][:, :, rows], -1, 0)
            twice_met = (sight.later_own[left][:, rows] * weights[rows, left].T ** 2).T
            both[alone], alike[alone] = once, twice_met
            both[beside] -= once
            alike[beside] -= twice_met
        joint, keyed = (
            ((law[0] + tile.diagonal(law[1])) * alike, law[1]) for law in (laws.joint, laws.keyed)
        )
        if tile.turned is None:
            return [_in_single(*joint, both), _in_single(*keyed, both)]
        of_keys, of_rows = tile.turned
        assert tile.still is not None
        own, pairs = keyed[0], keyed[1] * both
        return [
            _in_single(*joint, both),
            _in_single(own * of_rows[:, None], pairs, of_keys),
            _in_single(own, pairs, tile.still),
        ]

    def _before_each(self, tile: Tile) -> tuple[Array, Array]:
        """(c, n, k) and (c, o) how often and by what weights rows and the ones before them, in
        either order, meet two keys, and one that is the same."""
        sight, weights = self.logits.sight, self.weights
        long, short, left, right, own = tile.long, tile.short, tile.left, tile.right, tile.own
        alone = self._pairs.alone[tile.pairs][:, None]
        # What the row before sees alone, behind a window's end, as often as a key with which that
        # of its row begins.
        every = np.arange(len(weights))
        begin = sight.seen[long].argmax(1)[:, None, None]
        keys, others = every[left][None, :, None], every[right][None, None, :]
        first = begin + (keys == begin) * (begin + 1 < len(weights))
        held = np.where(others < begin, first, others)
        counts = sight.later[keys, held, long[:, None, None]]
        both = weights[long, left][:, :, None] * weights[short, right][:, None, :] * counts
        part = np.where(alone, sight.met_before[long, own], 1.0)
        alike = weights[long, own] * weights[short, own] * sight.later_own[own][:, long].T * part
        return 2.0 * both, 2.0 * alike

    def backward(self, own: Array, pairs: Any) -> Paths:
        """Second moments per feature of the gradient at the attention's input, by path.

        Args:
            own, pairs: of the gradient at sum_j a_ij x_j, behind the value weights; of rows and
                the ones before them what these have in common, (P,), and nothing.
        """
        size, tiles = len(self.weights), self._pairs.tiles
        scale, given = single(own if self._neighbouring else self._pairs.joined(own, pairs))
        driven = [(slice(0, 1), given[None])]
        driven += [(slice(1, 3), (given * one).astype(np.float32)) for one in self._driven]
        total_own, total = np.zeros((3, size)), np.zeros((3, size, size))
        for tile, sent in zip(tiles, self._sent, strict=True):
            shape = tile.left.stop - tile.left.start, tile.right.stop - tile.right.start
            for (path, of_law), law in zip(driven, sent, strict=True):
                total_own[path, tile.own] += of_law[:, tile.pairs] @ law[0]
                found = of_law[:, tile.pairs] @ law[1]
                total[path, tile.left, tile.right] += found.reshape(-1, *shape)
        total_own, total = scale * total_own, scale * total
        if self._dropped > 0.0:
            self._send_noise(own, total_own, total)
        total = 0.5 * (total + np.swapaxes(total, -1, -2))
        query = own * self.response[0], total[0]
        if not self._neighbouring:
            query = query[0], pairs * self.response[1]
        by_path = [(total_own[path], total[path]) for path in range(3)]
        return Paths(by_path[0], query, by_path[1], by_path[2])

    def _send_noise(self, given: Array, total_own: Array, total: Array) -> None:
        """Add what dropped attention sends."""
        logits, weights, later = self.logits, self.weights, self.logits.sight.later
        squares = logits.sight.later_own  # (key, row)
        total_own[0] += self._dropped * (squares * self._squares.T) @ given
        driven = self._dropped * logits.scale * given * logits.queries[0] * self._noise_scale
        a, noise = self._noise
        left = self._noise_left
        shape = noise - left[:, None, :] - left[:, :, None] + self._noise_both[:, None, None]
        whole, once = a + diagonal(shape), weights[:, :, None] * weights[:, None, :]
        once *= np.moveaxis(later, -1, 0)
        turned = shape if logits.turning is None else shape * logits.turning.within
        calibration = self._calibration
        paths = (calibration.noise_key, turned), (calibration.noise_cross, shape)
        for path, (factor, law) in enumerate(paths, start=1):
            total[path] += np.einsum("p,pqr->qr", factor * driven, law * once)
            total_own[path] += (squares * (weights**2 * whole).T) @ (factor * driven)


class ClassHeads:
    """Moments of one head drawn at random, with the interface of `PositionAttention`; see
    `attention.HeadAverage`."""

    def __init__(self, layers: Sequence[PositionAttention], shares: Array, sight: Sight) -> None:
        """`sight`: without what tells heads apart."""
        self._layers, self._shares, self._sight = list(layers), list(shares), sight

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._mean([getattr(layer, name) for layer in self._layers])

    def _mean(self, values: Sequence[Any]) -> Any:
        if values[0] is None:
            return None
        if isinstance(values[0], tuple):
            found = [self._mean(column) for column in zip(*values, strict=True)]
            return type(values[0])(*found) if hasattr(values[0], "_fields") else tuple(found)
        return sum(share * value for share, value in zip(self._shares, values, strict=True))

    @property
    def weights(self) -> Array:
        """Mean attention to one token, its own cell's tokens being alike."""
        counted = self._mean([layer.counted for layer in self._layers])
        keys = self._sight.keys
        return np.where(self._sight.seen, counted / np.where(self._sight.seen, keys, 1.0), 0.0)

    @property
    def across(self) -> ClassHeads | None:
        return self._of([layer.across for layer in self._layers])

    @property
    def beside(self) -> ClassHeads | None:
        return self._of([layer.beside for layer in self._layers])

    def _of(self, layers: list[PositionAttention | None]) -> ClassHeads | None:
        there = [layer for layer in layers if layer is not None]
        return ClassHeads(there, np.array(self._shares), self._sight) if there else None

    @property
    def beyond_tables(self) -> NDArray[np.bool_]:
        return np.asarray(np.any([layer.beyond_tables for layer in self._layers], axis=0))

    def mean_output(self) -> Matrix:
        found: Matrix = self._mean([layer.mean_output() for layer in self._layers])
        return found

    def backward(self, own: Array, pairs: Array) -> Paths:
        found: Paths = self._mean([layer.backward(own, pairs) for layer in self._layers])
        return found


def row_statistics(logits: ClassLogits) -> RowStatistics:
    """Of every node as a row."""
    keys, temperature, own = logits.sight.keys, logits.queries[0], logits.keys[0]
    prior, within = logits.prior, logits.within
    seen, squares = keys * prior, keys * prior**2
    count = 1.0 / squares.sum(1)
    top = float(max(own.max(), within.max()))
    spread = top - float(within.min())

    def mean(function: Callable[[Array], Array]) -> Array:
        of_own, of_pairs = logits.averaged(lambda entries: function(entries - top))
        apart = of_own - diagonal(of_pairs)
        return np.asarray(_over_keys(seen, of_pairs) + (squares * apart).sum(1))

    relative = mean(lambda values: values)
    scale = reference_scale(logits.scale * float(logits.sight.classes.mean(temperature)), spread)
    reference = matched(*annealed_moments(mean, relative, spread, scale), count)
    uniform = -(seen * np.log(np.where(prior > 0.0, prior, 1.0))).sum(1)
    return statistics_of(
        reference, scale, count, temperature, logits.scale, seen @ own, relative + top, uniform
    )


def _over_keys(keys: Array, pairs: Array) -> Array:
    """(P,) sums over both keys of a row."""
    if pairs.ndim == 2:
        return np.asarray(np.einsum("pq,pq->p", keys @ pairs, keys))
    return np.asarray(((pairs @ keys[:, :, None])[..., 0] * keys).sum(1))


def _crowd(logits: ClassLogits, rows: RowStatistics) -> tuple[Array, Array]:
    """(P, P) of `log_weights`, by others and by a key itself, without the logarithm."""
    own, prior = logits.keys[0], logits.prior
    pull = rows.own_response * logits.scale * logits.queries[0] * rows.softening
    within, away = logits.within, logits.deviation
    top = max(own.max(), within.max())
    raised = pull[:, None, None]
    of_pairs = np.exp(raised * (within - top))
    varying = logits.log_mean(away, raised)
    if varying is not None:
        of_pairs = of_pairs * np.exp(np.minimum(varying, EXPONENT_MAX))
    of_own = np.exp(pull[:, None] * (own - top)) - diagonal(of_pairs)
    return np.einsum("pr,pqr->pq", logits.sight.keys * prior, of_pairs), prior * of_own


def _lighter(logits: ClassLogits, rows: RowStatistics, sight: FadingSight) -> Array:
    """(P, P) of the squares of weights in a class, over those of weights in proportion to the
    prior: a key that is heavier crowds itself more. Of priors at their mean's deviation from it."""
    others, itself = _crowd(logits, rows)
    shared = (rows.kernel_response / rows.own_response)[:, None]
    away = np.sqrt(np.maximum(sight.heavier - 1.0, 0.0))
    ends = 1.0 + away, 1.0 - away
    weights = [np.maximum(others + prior * itself, 1e-300) ** -shared for prior in ends]
    means = 0.5 * (weights[0] + weights[1])
    squares = 0.5 * (ends[0] * weights[0] ** 2 + ends[1] * weights[1] ** 2)
    return np.where(sight.seen, squares / means**2, 1.0)


def mean_attention(logits: ClassLogits, rows: RowStatistics) -> Array:
    """(P, P) mean attention [row, key] to one token of a class; see `row_statistics`."""
    keys, own, scale, prior = logits.sight.keys, logits.keys[0], logits.scale, logits.prior
    seen = keys * prior
    crowd = np.add(*_crowd(logits, rows))
    crowd = np.log(np.maximum(crowd, 1e-300))
    relative = own - (seen @ own)[:, None]
    every = np.arange(len(own))
    logs = log_weights(rows, every, scale, relative, crowd, rows.own_response)
    held = logits.sight.seen
    logs = np.where(held, logs + np.log(np.where(held, prior, 1.0)), -np.inf)
    weight = np.exp(logs - logs.max(1, keepdims=True))
    return np.asarray(weight / (keys * weight).sum(1, keepdims=True))


def _mixed(share: Array, one: Matrix, other_share: Array, other: Matrix) -> Matrix:
    """Of pairs of rows, each times a factor."""
    own = share[:, None] * one[0] + other_share[:, None] * other[0]
    pairs = share[:, None, None] * one[1]
    pairs += other_share[:, None, None] * other[1]
    return own, pairs


def _gathered(trace: Matrix, law: Matrix) -> Array:
    """(c,) sums of a law of pairs of rows with what `PositionAttention._trace` says."""
    count = len(law[0])
    inside = np.vecdot(law[1].reshape(count, -1), trace[1].reshape(count, -1))
    return np.asarray(inside + np.vecdot(law[0], trace[0]))


def _in_single(own: Array, pairs: Array, factor: Array) -> Matrix:
    """(c, o), and (c, n k) of pairs times a factor, rounded to single precision."""
    found = np.empty(pairs.shape, np.float32)
    np.multiply(pairs, factor, out=found, casting="same_kind")
    return own.astype(np.float32), found.reshape(len(pairs), -1)


def _ratio(part: Array, whole: Array, otherwise: Array) -> Array:
    usable = np.abs(whole) > 1e-12 * np.abs(whole).max(initial=1e-300)
    return np.where(usable, part / np.where(usable, whole, 1.0), otherwise)


def _bounded_exp(exponent: Matrix, factor: Array | None, away: Array | None) -> Matrix:
    """exp of a token's and of pairs' exponents times a factor per matrix, or of them as they are,
    which then are written over; pairs' vary by `away`."""
    own, inside = exponent
    if factor is not None:
        own, inside = factor[..., 0] * own, factor * inside
    if away is not None:
        inside += away
    inside = np.exp(np.minimum(inside, EXPONENT_MAX, out=inside), out=inside)
    return np.exp(np.minimum(own, EXPONENT_MAX)), inside


class _Laws(NamedTuple):
    """Of pairs of rows: the joint law, its derivative in the correlation, and that along the
    values."""

    joint: Matrix
    slope: Matrix
    keyed: Matrix


class _Sums(NamedTuple):
    """Sums over the keys of either row.

    Attributes:
        tile: of pairs of rows.
        first, second: (c, n) and (c, k) weights of classes.
        one, two: (c, o) of one token, on keys of both.
    """

    tile: Tile
    first: Array
    second: Array
    one: Array
    two: Array

    def over_first(self, law: Matrix) -> Array:
        """(c, k)."""
        total: Array = (self.first[:, None, :] @ law[1])[:, 0]
        total[:, self.tile.own_right] += law[0] * self.one
        return total

    def over_second(self, law: Matrix) -> Array:
        """(c, n)."""
        total: Array = (law[1] @ self.second[:, :, None])[:, :, 0]
        total[:, self.tile.own_left] += law[0] * self.two
        return total

    def maps(self, law: Matrix) -> tuple[Array, Array]:
        """(c, k, n) and (c, n, k): what takes values to sums of them times the law over the first
        key, and over the second."""
        pairs, (keys1, keys2) = law[1], (self.tile.own_left, self.tile.own_right)
        first = np.empty((len(pairs), pairs.shape[2], pairs.shape[1]))
        np.multiply(np.swapaxes(pairs, 1, 2), self.first[:, None, :], out=first)
        second = pairs * self.second[:, None, :]
        own = _diagonal(first[:, keys2, keys1]), _diagonal(second[:, keys1, keys2])
        own[0][...] += law[0] * self.one
        own[1][...] += law[0] * self.two
        return first, second

    def balanced_with(
        self, joint: Matrix, sweeps: int, directions: Sequence[Matrix]
    ) -> tuple[Matrix, list[Matrix]]:
        """The joint law scaled, in place, so that its means over either key are 1 (see
        `joint_laws.balanced`); and of it joint o (direction + u 1^T + 1 v^T) whose means over
        either key are 0, made of each direction in its place (see `joint_laws.tangent`).

        Args:
            joint: not yet scaled.
            sweeps: of the scaling.
            directions: of a key of both, and of two keys.
        """
        tile, (own, pairs) = self.tile, joint
        to_second, to_first = self.maps(joint)
        left = right = np.ones((*self.first.shape, 1))
        for _ in range(sweeps):
            right = 1.0 / np.maximum(to_second @ left, 1e-300)
            left = 1.0 / np.maximum(to_first @ right, 1e-300)
        own *= left[:, tile.own_left, 0]
        own *= right[:, tile.own_right, 0]
        pairs *= left
        pairs *= right.swapaxes(1, 2)

        whole = own + tile.diagonal(pairs)
        for beside, between in directions:
            between *= pairs
            beside *= whole
            beside -= tile.diagonal(between)
        rows, columns = (
            np.concatenate([-sums(one)[..., None] for one in directions], -1)
            for sums in (self.over_second, self.over_first)
        )
        u, v = rows, np.zeros_like(columns)
        for sweep in range(TANGENT_SWEEPS):
            if sweep:
                u = rows - left * (to_first @ (right * v))
            last, v = v, columns - right * (to_second @ (left * u))
            # From the third on what is left may be rounding.
            if sweep > 1 and np.abs(v - last).max() <= 1e-12 * np.abs(v).max():
                break
        for k, (beside, between) in enumerate(directions):
            first, second = u[..., k], v[..., k]
            moved = first[:, :, None] + second[:, None, :]
            moved *= pairs
            between += moved
            beside += own * (first[:, tile.own_left] + second[:, tile.own_right])
        return joint, list(directions)


def _times(matrices: Array, values: Array) -> Array:
    """(c, n) or (c, n, d) of matrices (c, n, k) and values (c, k) or (c, k, d)."""
    if values.ndim == 2:
        return np.asarray((matrices @ values[:, :, None])[..., 0])
    return np.asarray(matrices @ values)


def _diagonal(matrices: Array) -> Array:
    """(c, o) of (c, o, o), to be written to."""
    if matrices.flags.c_contiguous:
        return matrices.reshape(len(matrices), -1)[:, :: matrices.shape[2] + 1]
    view: Array = np.einsum("cqq->cq", matrices)
    return view


def _balances(joint: Matrix, weights: Array, counted: Array, sweeps: int) -> tuple[Array, Array]:
    """Factors that balance the law of every row with itself, over its own keys of these weights:
    symmetric in its keys, so that one map serves both."""
    own, pairs = joint
    over = pairs * counted[:, None, :]
    its_own = _diagonal(over)
    its_own += own * weights
    left = right = np.ones((*own.shape, 1))
    for _ in range(sweeps):
        right = 1.0 / np.maximum(over @ left, 1e-300)
        left = 1.0 / np.maximum(over @ right, 1e-300)
    return left[..., 0], right[..., 0]
