"""Causal softmax attention on classes of positions: the closure in their algebra.

Every node of `classes.PositionClasses` is a row and a key. A matrix over keys is (diagonal, pairs);
products of two are one. Masks and windows are `KeyCounts`, rotary positions `RotaryMeans`. The laws
of two rows are arrays over the keys of either; pairs of two tiles of rows are treated together,
over the ranges of their keys. With every position a node it is `KernelAttention`. See
docs/theory/state.md, Classes of positions.
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

from ....engine.classes import KeyCounts, Matrix, diagonal_of
from ....engine.state import ratio_or_zero
from . import exact_rows
from .finite_rows import Nodes, Widths, calibrate, nodes_for
from .joint_laws import (
    ALIKE,
    JOINT_SWEEPS,
    RHO_MIN,
    ByRelation,
    Mixture,
    Sums,
    bounded_exp,
    geometric_mean,
    on_diagonal,
    own_response,
    times,
)
from .relative_positions import RotaryMeans
from .row_groups import single
from .row_statistics import AttentionRows, attention_rows, log_weights
from .rows import PathFactors, Paths, RowAttention

# --- pairs of rows --------------------------------------------------------------------------------

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

TILE = 12
"""Rows of a tile: fewer leave out more zeros, more take fewer calls."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Pairs of rows of two ranges.

    Attributes:
        pairs: where they are among all.
        long, short: (c,) their rows; the last are every row with itself where both ranges are one.
        common: keys of both, in all; `common_left` and `common_right` within those of either.
        mask, mask_common: (c, n, k) and (c, o) ones where both rows see their keys, and zeros.
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
    common: slice
    common_left: slice
    common_right: slice
    mask: Array
    mask_common: Array
    turned: tuple[Array, Array] | None
    still: Array | None
    begun: Array | None

    def diagonal_of(self, pairs: Array) -> Array:
        """(..., o) entries of keys of both."""
        return pairs.diagonal(self.left.start - self.right.start, -2, -1)

    @property
    def rows(self) -> slice:
        """The range of the longer rows."""
        return slice(int(self.long[0]), int(self.long[-1]) + 1)

    def projected(self, maps: RowMaps, kernels: Sequence[tuple[Matrix, bool]]) -> list[Matrix]:
        """X C X'^T of rows' maps and kernels C, diagonals and pairs.

        Args:
            kernels: (o,) and (n, k) of all rows or (rows, n, k) of the longer ones; or, where it is
                said to be by pair, (c, o) and (c, n, k). What a key has beyond pairs, and pairs.
        """
        common_keys, size = (self.common_left, self.common_right), self.left.stop - self.left.start
        second = maps.excess[self.short, self.common]
        once = maps.once[self.short, self.common]
        middles, excesses = [], []
        for kernel, by_pair in kernels:
            if self.begun is not None:
                kernel, by_pair = self._of_pairs(kernel, by_pair), True
            first = self.long if by_pair else self.rows
            diagonal_excess = kernel[0] if self.begun is None else kernel[0] * self.begun
            middle = maps.whole[first, self.left, self.left] @ kernel[1]
            added = maps.pairs[first, self.left, self.common] * diagonal_excess[..., None, :]
            middle[:, :, self.common_right] += added
            excess = maps.excess[first, self.common] * diagonal_excess
            if not by_pair:
                where = self.long - self.long[0]
                middle, excess = middle[where], excess[where]
            middles.append(middle)
            excesses.append(excess)
        result = np.concatenate(middles, axis=1) if len(middles) > 1 else middles[0]
        parts = [slice(k * size, (k + 1) * size) for k in range(len(kernels))]
        # One token of its own meets what counts multiply below; what it is with itself is `excess`.
        for part, excess in zip(parts, excesses, strict=True):
            diagonal = on_diagonal(result[:, part][:, common_keys[0], common_keys[1]])
            diagonal += excess * once
        result = result @ np.swapaxes(maps.whole[self.short, self.right, self.right], -1, -2)
        matrices = []
        for part, excess in zip(parts, excesses, strict=True):
            pairs, excess = result[:, part], excess * second
            diagonal = on_diagonal(pairs[:, common_keys[0], common_keys[1]])
            diagonal -= excess * once
            matrices.append((excess, pairs))
        return matrices

    def _of_pairs(self, kernel: Matrix, by_pair: bool) -> Matrix:
        """(c, n, k) of what is of all rows, or of the longer ones."""
        if by_pair:
            return kernel
        diagonal, pairs = kernel
        where = self.long - self.long[0]
        diagonal = diagonal[where] if diagonal.ndim == 2 else diagonal
        if pairs.ndim == 3:
            return diagonal, pairs[where]
        return diagonal, np.broadcast_to(pairs, (len(self.long), *pairs.shape))


class RowMaps(NamedTuple):
    """A map of kernels over keys for every row, X = (excess, pairs), and all of it by the counts of
    the second key.

    Attributes:
        excess, pairs: (P, P) on the diagonal, beyond `pairs`, and (P, P, P).
        once: (P, P) one over the counts of a row's keys.
        whole: (P, P, P) pairs times counts, and the excess on the diagonal.
    """

    excess: Array
    pairs: Array
    once: Array
    whole: Array

    @classmethod
    def of(cls, excess: Array, pairs: Array, counts: Array) -> RowMaps:
        whole = pairs * counts[:, None, :]
        entries = on_diagonal(whole)
        entries += excess
        there = counts > 0.0
        return cls(excess, pairs, np.where(there, 1.0 / np.where(there, counts, 1.0), 0.0), whole)


@dataclass(frozen=True, eq=False)
class RowPairs:
    """All pairs of rows of a layer.

    Attributes:
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

    def split(self, of_pairs: Array) -> Matrix:
        """(diagonal (P,), pairs (P, P)) of a symmetric number for every pair."""
        diagonal, several = of_pairs[self.alone], ~self.alone
        pairs = np.empty((len(diagonal), len(diagonal)))
        pairs[self.long[several], self.short[several]] = of_pairs[several]
        pairs[self.short[several], self.long[several]] = of_pairs[several]
        return diagonal, pairs

    def joined(self, diagonal: Array, pairs: Array) -> Array:
        """(C,) of the same."""
        return np.where(self.alone, diagonal[self.long], pairs[self.long, self.short])


def _tile(
    key_counts: KeyCounts,
    pairs: slice,
    long: Indices,
    short: Indices,
    left: slice,
    right: slice,
    turned: tuple[Array, Array] | None,
    rotary_means: RotaryMeans | None,
) -> Tile:
    start, stop = max(left.start, right.start), min(left.stop, right.stop)
    common = slice(start, max(start, stop))
    empty = common.stop == common.start
    common_left, common_right = (
        slice(0, 0) if empty else slice(start - one.start, stop - one.start)
        for one in (left, right)
    )
    looks = key_counts.visible[long, left], key_counts.visible[short, right]
    mask = (looks[0][:, :, None] & looks[1][:, None, :]).astype(float)
    mask_common = (looks[0][:, common_left] & looks[1][:, common_right]).astype(float)
    begin = np.where(long > short, key_counts.begins[long], 0)
    begun = np.arange(common.start, common.stop) >= begin[:, None]
    several = None if begun.all() else begun.astype(float)
    where = left, right, common, common_left, common_right
    still = None if rotary_means is None else rotary_means.within[long, left, right]
    return Tile(pairs, long, short, *where, mask, mask_common, turned, still, several)


@functools.lru_cache(maxsize=16)
def row_pairs(key_counts: KeyCounts, rotary_means: RotaryMeans | None) -> RowPairs:
    """Of every row with every other and with itself; the same for the same arguments."""
    size = len(key_counts.keys)
    ends = np.linspace(0, size, max(1, round(size / TILE)) + 1).round().astype(int)
    rows = []
    for low, high in itertools.pairwise(ends):
        seen = np.flatnonzero(key_counts.visible[low:high].any(0))
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
            if rotary_means is not None:
                together = rotary_means.of_rows(long, short)
                together[alone] = 1.0
                between = rotary_means.between(long, short, together, left, right)
                between[alone] = rotary_means.within[long[alone]][:, left, right]
                turned = between, (together @ rotary_means.shares).real
                phases.append(together)
            pairs = slice(count, count + len(long))
            tiles.append(_tile(key_counts, pairs, long, short, left, right, turned, rotary_means))
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


class Words(NamedTuple):
    """`queries`, `keys` and `values` of `ClassLogits` for two tokens of one word.

    Attributes:
        queries, keys, values: diagonals are of a token with itself, or of two at one place.
        share: (P, P) of pairs that are.
        read_again: of tokens, those whose word is read again.
        others: of tokens, those of a pair's word besides that pair.
        coincidence: (P,) of pairs at one place of two documents that are; None: of one document.
    """

    queries: Matrix
    keys: Matrix
    values: Matrix
    share: Array
    read_again: float
    others: float
    coincidence: Array | None = None

    def mixture(
        self, left: slice = slice(None), right: slice = slice(None), common: slice = slice(None)
    ) -> Mixture:
        """Of kinds of pairs of keys; `common`: those of both."""
        coincidence = None if self.coincidence is None else self.coincidence[common]
        return Mixture(self.share[left, right], self.read_again, coincidence)


class Across(NamedTuple):
    """`queries`, `keys`, `values` and `words` of `ClassLogits`, of tokens of two documents."""

    queries: Matrix
    keys: Matrix
    values: Matrix
    words: Words | None = None


class ClassLogits(NamedTuple):
    """`logits.Logits` on classes.

    Attributes:
        queries, keys, values: kernels (diagonal (P,), pairs (P, P)); as there.
        key_counts: which keys rows see.
        rotary_means: rotary positions; None: none.
        across: the same kernels of tokens of two documents, diagonals being those of two tokens at
            one place; None: there is one document.
        words: what two tokens of one word have, the rest being of two words; None: of any two.
    """

    queries: Matrix
    keys: Matrix
    values: Matrix
    scale: float
    key_counts: KeyCounts
    rotary_means: RotaryMeans | None = None
    across: Across | None = None
    words: Words | None = None

    @property
    def temperature(self) -> Array:
        """(P,) of a row's query with itself."""
        return np.asarray(self.queries[0])

    @property
    def prior(self) -> Array:
        """(P, P) weight of a key's token where logits vanish; a row's sum to 1."""
        return np.asarray(self.key_counts.visible / self.key_counts.keys.sum(1, keepdims=True))

    @property
    def aligned(self) -> bool:
        """As in `Logits`."""
        return self.rotary_means is None and self.keys is self.values

    def mixture(self, left: slice = slice(None), right: slice = slice(None)) -> Mixture:
        """Of kinds of pairs of keys."""
        return ALIKE if self.words is None else self.words.mixture(left, right)

    @property
    def key_relations(self) -> list[Array]:
        """(P, P) kernels of two keys, of each kind of pair."""
        return [self.keys[1]] if self.words is None else [self.keys[1], self.words.keys[1]]

    @property
    def within(self) -> list[Array]:
        """(P, P), or (P, P, P) by row where positions turn: of two keys of one row."""
        if self.rotary_means is None:
            return self.key_relations
        return [pairs * self.rotary_means.within for pairs in self.key_relations]

    def among(self, rows: slice, keys: slice) -> list[Array]:
        """(n, k, k) of the same, for some rows and keys."""
        several = [pairs[keys, keys] for pairs in self.key_relations]
        if self.rotary_means is None:
            shape = rows.stop - rows.start, *several[0].shape
            return [np.broadcast_to(pairs, shape) for pairs in several]
        return [pairs * self.rotary_means.within[rows, keys, keys] for pairs in several]

    def averaged(self, function: Callable[[Array], Array]) -> tuple[Array, Array]:
        """(P,) and (P, P) or (P, P, P): of an entry of the keys' kernel within a row."""
        several = [function(pairs) for pairs in self.within]
        return function(self.keys[0]), self.mixture().mean(several)


class PositionAttention(RowAttention):
    """Moments of one causal softmax attention layer on classes of positions.

    Attributes:
        entropy, sum_square: (P,) as in `attention.KernelAttention`.
        others: the same rows where two of them are of different documents, of one word, and of both
            where there are such.
    """

    others: tuple[PositionAttention, ...] = ()

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
        """Build the layer's joint law; O(P^4)."""
        self.logits, self._sizes = logits, logits.values[0]
        self._kernels: Across | ClassLogits = logits
        self._widths = Widths(float(d_model), float(d_head), float(norm_spread))
        self._dropped, self._value_bias = drop_prob / (1.0 - drop_prob), value_bias
        key_counts = logits.key_counts
        self._rows = rows = rows_of_classes(logits)
        several = attention_by_word(logits, rows)
        self.weights = several @ logits.mixture().portions
        self._by_word = ratio_or_zero(several, self.weights[:, :, None])
        self.counted = logits.key_counts.keys * self.weights
        self._pairs = row_pairs(key_counts, logits.rotary_means)
        self._read_once = np.zeros_like(self.weights)
        self._response = self._self_response()
        self._project()
        self._nodes: Nodes | None = None
        self._joint_laws()
        self.logit_variance, self.entropy = rows.logit_variance, rows.entropy
        diagonal, inside = logits.mixture().mean_of(self._own_laws)
        self._squares = self.weights**2 * np.maximum(diagonal + diagonal_of(inside), 0.0)
        self.sum_square = (key_counts.keys * self._squares).sum(1)
        if self._dropped > 0.0:
            self._respond_to_noise()
        self._forward()
        coincidence: list[Across | ClassLogits] = [logits]
        if logits.across is not None:
            coincidence.append(logits.across)
        if logits.words is not None:
            coincidence += [self._of_one_word(one) for one in coincidence]
        self.others = tuple(map(self._of_kernels, coincidence[1:]))
        self._give_back()

    def _give_back(self) -> None:
        """Keep what the way back needs of the laws, in single precision, and not the rest."""
        laws = zip(self._pairs.tiles, self._laws, strict=True)
        self._sent = [self._at_keys(tile, law) for tile, law in laws]
        del self._laws, self._projections, self._response, self._slope, self._sums, self._traces

    def _of_one_word(self, coincidence: Across | ClassLogits) -> Across | ClassLogits:
        """The same of rows that are of one word."""
        assert coincidence.words is not None
        return coincidence._replace(queries=coincidence.words.queries)

    def _of_kernels(self, kernels: Across | ClassLogits) -> PositionAttention:
        """These rows with others: with those of another document, over other tokens at the
        same places, a row with itself is two at one place."""
        result = copy.copy(self)
        result._kernels, result._dropped, result.others = kernels, 0.0, ()
        if kernels.words is not None and kernels.words.coincidence is not None:
            mean, same = self._response
            counts = self.logits.key_counts.keys * kernels.words.others
            result._response = [mean, RowMaps.of(same.excess, same.pairs, counts)]
        alike = all(
            getattr(kernels, name) is getattr(self._kernels, name)
            for name in ("keys", "values", "words")
        )
        if not alike or result._response is not self._response:
            result._project()
        result._joint_laws()
        result._forward()
        result._give_back()
        return result

    # --- rows ----------------------------------------------------------------------------------

    def _counts(self, keys: Array) -> list[Array]:
        """What sums over keys count: of all, and of other tokens of a pair's word."""
        words = self.logits.words
        return [keys] if words is None else [keys, keys * words.others]

    def _self_response(self) -> list[RowMaps]:
        """1 - A of every row, by the parts of `Mixture`; see `joint_laws.own_response`."""
        counts = self._counts(self.logits.key_counts.keys)
        result = np.zeros((len(counts), *self.weights.shape))
        inside = np.zeros((*result.shape, result.shape[-1]))
        for rows, keys in self._pairs.rows:
            for part, (excess, pairs) in enumerate(self._responses(rows, keys)):
                result[part, rows, keys], inside[part, rows, keys, keys] = excess, pairs
        return [RowMaps.of(*one) for one in zip(result, inside, counts, strict=True)]

    def _responses(self, of: slice, among: slice) -> list[Matrix]:
        """1 - A of some rows, over the keys that they see."""
        logits, rows = self.logits, self._rows
        keys, seen = logits.key_counts.keys[of, among], logits.key_counts.visible[of, among]
        weights, diagonal = self.weights[of, among], logits.keys[0][among]
        mixture, counts = logits.mixture(among, among), self._counts(keys)
        every, aims = slice(0, len(diagonal)), self._by_word[of, among]
        of_classes = keys * weights
        sums = Sums.of(
            mixture, (every, every), (of_classes, of_classes), (weights, weights), (aims, aims)
        )
        given = diagonal, logits.among(of, among), counts, seen, logits.prior[of, among]
        parts, single = own_response(sums, *given, rows.of(of), logits.scale)
        self._read_once[of, among] = single
        return parts

    # --- pairs of rows -------------------------------------------------------------------------

    def _mixture(self, tile: Tile) -> Mixture:
        words = self._kernels.words
        return ALIKE if words is None else words.mixture(tile.left, tile.right, tile.common)

    def _projected(
        self, tile: Tile, kernels: Sequence[tuple[list[Array], list[Array], bool]]
    ) -> list[ByRelation]:
        """(1 - A) C (1 - A')^T of pairs of rows, of kernels of a key with itself, of two words and
        of one, as `Mixture.parts_of` takes them; `kernels` else as in `Tile.projected`."""
        mixture, long, short, keys = self._mixture(tile), tile.long, tile.short, tile.common
        divided = [mixture.parts_of(one, two, tile.diagonal_of) for one, two, _ in kernels]
        parts = []
        for part, maps in enumerate(self._response):
            given = [(one[part], kernel[2]) for one, kernel in zip(divided, kernels, strict=True)]
            parts.append(tile.projected(maps, given))
        result = []
        for one, (diagonals, relations, by_pair), several in zip(
            divided, kernels, zip(*parts, strict=True), strict=True
        ):
            moved = []
            for part, (excess, pairs) in enumerate(several):
                diagonal_excess, within = one[part][0], tile.diagonal_of(one[part][1])
                if not by_pair and diagonal_excess.ndim > 1:
                    diagonal_excess, within = (
                        of_row[long - long[0]] for of_row in (diagonal_excess, within)
                    )
                if part > 0 and mixture.coincidence is None:
                    maps = self._response[part]
                    first, second = maps.excess[long, keys], maps.excess[short, keys]
                    beyond = diagonal_of(maps.pairs)
                    excess -= (
                        beyond[long, keys] * second + first * beyond[short, keys]
                    ) * diagonal_excess
                    excess -= first * within * second
                moved.append((excess, pairs))
            read_once = self._read_once[long, keys] * self._read_once[short, keys]
            singles = []
            for whole in (mixture.wholes(diagonals)[0], diagonals[0]):
                single = whole - tile.diagonal_of(relations[0])
                if not by_pair and single.ndim > 1:
                    single = single[long - long[0]]
                singles.append(single * read_once)
            result.append(mixture.joined(moved, *singles))
        return result

    def _project(self) -> None:
        """What joint laws are made of that knows no queries: rows that meet in several ways share
        it, half of what their laws cost."""
        logits, pairs, rotary_means = self.logits, self._pairs, self.logits.rotary_means
        moved, unturned, along_values = [], [], []
        turn = np.ones(len(pairs.long))
        self._sums = [self._sums_of(tile) for tile in pairs.tiles]
        self._traces = [self._trace(*one) for one in zip(pairs.tiles, self._sums, strict=True)]
        for tile, trace in zip(pairs.tiles, self._traces, strict=True):
            diagonal, of_relations = self._between_keys(tile)
            kernels: list[tuple[list[Array], list[Array], bool]] = [(diagonal, of_relations, False)]
            if tile.turned is not None:
                of_keys, of_rows = tile.turned
                assert rotary_means is not None
                within = rotary_means.within[tile.rows, tile.left, tile.right]
                turned = (
                    [one * of_rows[:, None] for one in diagonal],
                    [kernel * of_keys for kernel in of_relations],
                )
                still = diagonal, [kernel * within for kernel in of_relations]
                kernels = [(*turned, True), (*still, False)]
            if not logits.aligned:
                kernels.append((*self._between_values(tile), False))
            result = self._projected(tile, kernels)
            moved.append(result[0])
            along_values.append(result[-1])
            if tile.turned is not None:
                unturned.append(result[1])
                overlaps = _gathered(trace, result[0]), _gathered(trace, result[1])
                turn[tile.pairs] = _ratio(*overlaps, of_rows)
        self._projections = moved, unturned, along_values, turn

    def _joint_laws(self) -> None:
        """The joint law F/(w w') of every pair of rows, the longer one's keys first, and what moves
        it."""
        logits, rows, pairs = self.logits, self._rows, self._pairs
        rotary_means, coincidence, temperature = (
            logits.rotary_means,
            self._kernels,
            logits.queries[0],
        )
        diagonal, between = coincidence.queries
        bare = np.clip(between / np.sqrt(np.outer(temperature, temperature)), -1.0, 1.0)
        self._bare = bare = pairs.joined(np.clip(diagonal / temperature, -1.0, 1.0), bare)
        of_rows = np.concatenate([t.turned[1] for t in pairs.tiles if t.turned] or [np.ones(1)])
        lowest = bare if rotary_means is None else np.minimum(bare * of_rows, 0.0)
        nodes = self._nodes
        if nodes is None or lowest.min() < nodes.low:
            self._nodes = nodes = nodes_for(lowest, float(rows.theta.max()))
            self._calibration = calibrate(rows, logits.scale, nodes, self._widths, True)
        # else rows of one word, which are more alike: their correlations lie among these
        calibration, exponent = self._calibration, self._calibration.exponent
        exponent = geometric_mean(exponent[pairs.long], exponent[pairs.short])

        moved, unturned, along_values, turn = self._projections
        self._correlation = rho = np.clip(bare * turn, nodes.low, 1.0)
        basis, slopes = nodes.basis(rho)
        factor, slope = (np.vecdot(one.T, exponent) for one in (basis, slopes))
        self._slope = slope
        along = factor
        exponents: list[ByRelation] = moved
        factors: Array | None = factor
        if rotary_means is not None:
            # What comes of fluctuating products does not know how far apart the rows are; the rest
            # is per unit of what the kernel holds of the correlation.
            alone = exponent @ nodes.basis(np.zeros(1))[0][:, 0]
            distinct = np.abs(rho) > RHO_MIN
            along = (
                np.where(distinct, (factor - alone) / np.where(distinct, rho, 1.0), slope) * bare
            )
            exponents, factors = [], None
            for tile, one, other in zip(pairs.tiles, moved, unturned, strict=True):
                exponents.append(_mixed(along[tile.pairs], one, alone[tile.pairs], other))
        self._laws = [
            self._law(
                tile,
                sums,
                (one,) if logits.aligned else (one, last),
                (two, None if factors is None else factors[tile.pairs]),
                along[tile.pairs],
                slope[tile.pairs],
            )
            for tile, sums, one, last, two in zip(
                pairs.tiles, self._sums, moved, along_values, exponents, strict=True
            )
        ]

        given = calibration, nodes, basis, (pairs.long, pairs.short), rows, rho, self._widths
        self._factors = paths = PathFactors.of(*given, None if rotary_means is None else bare)
        still = np.stack([paths.key, paths.cross])
        # of the derivative as keys turn with their rows, and as they turn alone
        self._driven: tuple[Array, ...] = (still,)
        if paths.along is not None:
            self._driven = np.stack([paths.along, 0.0 * paths.cross]), still

    def _between_keys(self, tile: Tile) -> tuple[list[Array], list[Array]]:
        """Kernel of keys of both rows: (o,) and (n, k) of each kind of pair."""
        return _among(tile, self._kernels.keys, self._kernels.words, "keys")

    def _between_values(self, tile: Tile) -> tuple[list[Array], list[Array]]:
        return _among(tile, self._kernels.values, self._kernels.words, "values")

    def _law(
        self,
        tile: Tile,
        sums: Sums,
        directions: Sequence[ByRelation],
        exponent: tuple[ByRelation, Array | None],
        factor: Array,
        slope: Array,
    ) -> _Laws:
        """The joint law of pairs of rows, and its derivatives.

        Args:
            tile, sums: of pairs, and over their keys.
            directions: the projected kernel, and where they are not its the values'.
            exponent: of the law, as a matrix and what multiplies it; None: nothing does.
            factor: (c,) of the exponent in the kernel as rows turn it.
            slope: (c,) its derivative in the correlation.
        """
        law, times = exponent
        times = None if times is None else times[:, None, None]
        law = bounded_exp(law, tile.diagonal_of, times)
        for diagonal, pairs in law:
            diagonal *= tile.mask_common
            pairs *= tile.mask
        sloped = [
            [
                (
                    slope[:, None] * (excess + tile.diagonal_of(between)),
                    slope[:, None, None] * between,
                )
                for excess, between in direction
            ]
            for direction in directions
        ]
        joint, tangents = sums.balanced_with(law, JOINT_SWEEPS, sloped)
        return _Laws(joint, tangents[0], tangents[-1])

    def _sums_of(self, tile: Tile) -> Sums:
        key_counts, weights = self.logits.key_counts, self.weights
        long, short, left, right = tile.long, tile.short, tile.left, tile.right
        # keys that the other row does not see lack what that row's own terms add
        return Sums.of(
            self._mixture(tile),
            (tile.common_left, tile.common_right),
            (
                key_counts.split[short, long, left] * weights[long, left],
                key_counts.split[long, short, right] * weights[short, right],
            ),
            (weights[long, tile.common], weights[short, tile.common]),
            (self._by_word[long, left], self._by_word[short, right]),
        )

    @property
    def _own_laws(self) -> ByRelation:
        """(P, P) and (P, P, P) joint law of every row with itself."""
        rows, size = self.weights.shape
        result = [
            (np.zeros((rows, size)), np.zeros((rows, size, size)))
            for _ in self.logits.mixture().portions
        ]
        for tile, law in zip(self._pairs.tiles, self._laws, strict=True):
            alone = self._pairs.alone[tile.pairs]
            rows = tile.long[alone]
            if len(rows):
                for (excess, inside), (excess2, pairs) in zip(result, law.joint, strict=True):
                    excess[rows, tile.left] = excess2[alone]
                    inside[rows, tile.left, tile.right] = pairs[alone]
        return result

    def _trace(self, tile: Tile, sums: Sums) -> ByRelation:
        """(c, o) and (c, n, k) what a law of pairs of rows is to be summed with for tr(F C), of the
        values' kernel."""
        key_counts, weights = self.logits.key_counts, self.weights
        long, short, same = tile.long, tile.short, self._pairs.alone[tile.pairs]
        values, kernels = self._between_values(tile)
        once = key_counts.shared[long, short, tile.common] * weights[long, tile.common]
        once[same] = self.counted[long[same], tile.common]
        once *= weights[short, tile.common]
        both = sums.first[:, :, None] * sums.second[:, None, :]
        counted = sums.mixture.weighed(kernels)
        result = []
        # A token with itself is as its kind of pair and what it has beyond, and no pair of two.
        alone = sums.mixture.of_tokens(sums.mixture.wholes(values))
        for itself, kernel in zip(alone, counted, strict=True):
            pairs = both * kernel
            coincidence = sums.at_common(pairs)
            coincidence += (itself - tile.diagonal_of(kernel)) * once
            result.append((itself * once, pairs))
        return result

    def _gather(self, of: int) -> Array:
        """(C,) of the joint laws or of their derivatives in the correlation."""
        laws = zip(self._traces, self._laws, strict=True)
        return np.concatenate([_gathered(trace, (law.joint, law.slope)[of]) for trace, law in laws])

    # --- forward -------------------------------------------------------------------------------

    def _forward(self) -> None:
        kernels, pairs, weights = self._kernels, self._pairs, self.weights
        self._two_rows, self._alone = (pairs.long, pairs.short), pairs.alone
        mean = pairs.joined(*self.mean_output())
        moved, together = (self._gather(0) - mean, self._gather(1)), None
        if kernels.values is self.logits.values:  # two documents have no tokens in common
            shared = np.einsum("psq,pq,sq->ps", self.logits.key_counts.shared, weights, weights)
            together = pairs.joined((self.counted * weights).sum(1), shared)
        queries = pairs.joined(*kernels.queries)
        self._evaluate(mean, *moved, queries, together, kernels is self.logits)

    def _split(self, of_pairs: Array) -> Matrix:
        return self._pairs.split(of_pairs)

    def _turned_keys(self) -> NDArray[np.complex128] | None:
        rotary_means = self.logits.rotary_means
        return None if rotary_means is None else rotary_means.keys

    def _products(self) -> Array:
        rotary_means, pairs = self.logits.rotary_means, self._pairs
        if rotary_means is None or pairs.phases is None:
            return super()._products()
        both = self._shift[pairs.long] * self._shift[pairs.short].conj() * pairs.phases.conj()
        return np.asarray((both @ rotary_means.shares).real)

    def _dropped_terms(self) -> tuple[Array, Array]:
        logits = self.logits
        squares = (logits.key_counts.keys * self._squares) @ logits.values[0]
        within = logits.mixture().mean(logits.within)
        return squares, self._noise_overlap(logits.keys[0], within)

    def _mean_of(self, name: str) -> Matrix:
        (diagonal, pairs), words = getattr(self._kernels, name), self._kernels.words
        if words is None:
            return diagonal, pairs
        (alike, same), mixture = getattr(words, name), words.mixture()
        if mixture.coincidence is not None:
            diagonal = diagonal + mixture.coincidence * (alike - diagonal)
        return diagonal, mixture.mean([pairs, same])

    def mean_output(self) -> Matrix:
        """Overlap W C W^T of mean outputs."""
        diagonal, pairs = self._mean_of("values")
        shared, excess = self.logits.key_counts.shared, diagonal - diagonal_of(pairs)
        smooth = self.counted @ pairs @ self.counted.T
        of_own = np.einsum("psq,pq,sq,q->ps", shared, self.weights, self.weights, excess)
        alone = (self.counted * self.weights) @ excess
        return diagonal_of(smooth) + alone, np.asarray(smooth + of_own)

    # --- attention dropout (see `attention`) ------------------------------------------------------

    def _respond_to_noise(self) -> None:
        """E[J D J] of every row over its weights, (diagonal, pairs) of weighted mean 0."""
        weights, response = self.weights, self._response[0]
        diagonal = self.logits.values[0] + self._value_bias
        moved = (
            response.excess**2 * diagonal,
            (response.whole * diagonal) @ np.swapaxes(response.pairs, -1, -2),
        )
        moved[1][...] += response.pairs * (diagonal * response.excess)[:, None, :]
        law, every = self.logits.mixture().mean_of(self._own_laws), slice(0, len(diagonal))
        counts, aims = (self.counted, self.counted), (weights > 0.0)[..., None].astype(float)
        sums = Sums.of(ALIKE, (every, every), counts, (weights, weights), (aims, aims))
        direction = moved[0] + diagonal_of(moved[1]), moved[1]
        _, [[(excess, inside)]] = sums.balanced_with([law], 0, [[direction]])
        # sweeps end before these means are 0
        left = np.einsum("pq,pqr->pr", self.counted, inside) + weights * excess
        both = (self.counted * left).sum(1)
        inside = inside - left[:, None, :] - left[:, :, None] + both[:, None, None]
        trace = exact_rows.jacobian_square(self.sum_square, self._rows.count)
        bare = (self.counted * weights * (excess + diagonal_of(inside))).sum(1)
        usable = bare > 1e-300
        scale = trace * (self.counted @ diagonal) / np.where(usable, bare, 1.0)
        scale = np.where(usable, scale, 0.0)[:, None]
        self._noise = scale * excess, scale[..., None] * inside

    def _noise_overlap(self, diagonal: Array, pairs: Array) -> Array:
        """(P,) tr(E[J D J] X) of every row, of one kernel X, or of one for every row."""
        counted, (excess, inside) = self.counted, self._noise
        alone = (excess + diagonal_of(inside)) * diagonal - diagonal_of(inside * pairs)
        total = (times(inside * pairs, counted) * counted).sum(1)
        return np.asarray(total + (counted * self.weights * alone).sum(1))

    # --- backward ------------------------------------------------------------------------------

    def _at_keys(self, tile: Tile, laws: _Laws) -> list[Matrix]:
        """What every pair of rows sends to their keys per unit of its gradient, by the joint law
        and by its derivative along the values as its rows turn, and as they do not: (c, o) and
        (c, kinds n k) of each."""
        key_counts, weights = self.logits.key_counts, self.weights
        long, short, left, right = tile.long, tile.short, tile.left, tile.right
        grad_in, neighbour = (
            key_counts.rows.T * weights,
            (long == short) & ~self._pairs.alone[tile.pairs],
        )
        alone = self._pairs.alone[tile.pairs]
        twice = np.where(long == short, 1.0, 2.0)[:, None]
        # a key that one of the rows does not see lacks what that row's own terms add
        counts = (
            np.moveaxis(key_counts.sending[left, right][:, :, long], -1, 0),
            np.moveaxis(key_counts.sending[right, left][:, :, short], -1, 0).swapaxes(1, 2),
        )
        both = (twice * weights[long, left])[:, :, None] * weights[short, right][:, None, :]
        both = both * counts[0] * counts[1]
        alike = twice * grad_in[long, tile.common] * grad_in[short, tile.common]
        if alone.any():  # a row with itself instead of its neighbour
            rows = long[alone]
            once = weights[rows, left][:, :, None] * weights[rows, right][:, None, :]
            once *= np.moveaxis(key_counts.later[left, right][:, :, rows], -1, 0)
            twice_met = (key_counts.later_diagonal[left][:, rows] * weights[rows, left].T ** 2).T
            both[alone], alike[alone] = once, twice_met
            both[neighbour] -= once
            alike[neighbour] -= twice_met
        mixture, result = self._mixture(tile), []
        for law in (laws.joint, laws.keyed):
            of_tokens, mean = mixture.mean_of(law, tile.diagonal_of)
            whole = (of_tokens + tile.diagonal_of(mean)) * alike
            result.append((whole, [pairs for _, pairs in law]))
        (excess, joint), (excess2, keyed) = result
        if tile.turned is None:
            return [_in_single(excess, joint, both), _in_single(excess2, keyed, both)]
        rho, of_rows = tile.turned
        assert tile.still is not None
        turned, still = ([pairs * means for _, pairs in laws.keyed] for means in (rho, tile.still))
        return [
            _in_single(excess, joint, both),
            _in_single(excess2 * of_rows[:, None], turned, both),
            _in_single(excess2, still, both),
        ]

    def backward(self, diagonal: Array, pairs: Any) -> Paths[Matrix]:
        """Second moments per feature of the gradient at the attention's input, by path: each
        (diagonal (P,), pairs (P, P)), or (2, P, P) of two words and of one.

        Args:
            diagonal, pairs: of the gradient at sum_j a_ij x_j, behind the value weights.
        """
        size, tiles = self.weights.shape[1], self._pairs.tiles
        scale, given = single(self._pairs.joined(diagonal, pairs))
        driven = [(slice(0, 1), given[None])]
        driven += [(slice(1, 3), (given * one).astype(np.float32)) for one in self._driven]
        relations = len(self.logits.key_relations)
        total_diagonal, total = np.zeros((3, size)), np.zeros((3, relations, size, size))
        for tile, grad_in in zip(tiles, self._sent, strict=True):
            shape = tile.left.stop - tile.left.start, tile.right.stop - tile.right.start
            for (path, of_law), law in zip(driven, grad_in, strict=True):
                total_diagonal[path, tile.common] += of_law[:, tile.pairs] @ law[0]
                result = of_law[:, tile.pairs] @ law[1]
                total[path, :, tile.left, tile.right] += result.reshape(-1, relations, *shape)
        total_diagonal, total = scale * total_diagonal, scale * total
        if self._dropped > 0.0:
            self._send_noise(diagonal, total_diagonal, total)
        total = 0.5 * (total + np.swapaxes(total, -1, -2))
        if relations == 1:
            total = total[:, 0]
        query = diagonal * self.response[0], pairs * self.response[1]
        by_path = [(total_diagonal[path], total[path]) for path in range(3)]
        return Paths(by_path[0], query, by_path[1], by_path[2])

    def _send_noise(self, given: Array, total_diagonal: Array, total: Array) -> None:
        """Add what dropped attention sends."""
        logits, weights, later = self.logits, self.weights, self.logits.key_counts.later
        squares = logits.key_counts.later_diagonal  # (key, row)
        total_diagonal[0] += self._dropped * (squares * self._squares.T) @ given
        driven = self._dropped * logits.scale * given * logits.queries[0]
        excess, noise = self._noise
        whole, once = excess + diagonal_of(noise), weights[:, :, None] * weights[:, None, :]
        once *= np.moveaxis(later, -1, 0)
        turned = noise if logits.rotary_means is None else noise * logits.rotary_means.within
        calibration = self._calibration
        paths = (calibration.noise_key, turned), (calibration.noise_cross, noise)
        for path, (factor, law) in enumerate(paths, start=1):
            total[path] += np.einsum("p,pqr->qr", factor * driven, law * once)  # of every kind
            total_diagonal[path] += (squares * (weights**2 * whole).T) @ (factor * driven)


def rows_of_classes(logits: ClassLogits) -> AttentionRows:
    """Of every node as a row."""
    keys, temperature, diagonal = logits.key_counts.keys, logits.queries[0], logits.keys[0]
    prior, within = logits.prior, logits.within
    seen, squares = keys * prior, keys * prior**2
    top = float(max(diagonal.max(), *(one.max() for one in within)))

    def mean(function: Callable[[Array], Array]) -> Array:
        of_own, of_pairs = logits.averaged(lambda entries: function(entries - top))
        excess = of_own - diagonal_of(of_pairs)
        return np.asarray(_over_keys(seen, of_pairs) + (squares * excess).sum(1))

    return attention_rows(
        mean,
        (float(min(one.min() for one in within)), top),
        (temperature, float(logits.key_counts.classes.mean(temperature))),
        logits.scale,
        1.0 / squares.sum(1),
        seen @ diagonal,
        -(seen * np.log(np.where(prior > 0.0, prior, 1.0))).sum(1),
    )


def _over_keys(keys: Array, pairs: Array) -> Array:
    """(P,) sums over both keys of a row."""
    if pairs.ndim == 2:
        return np.asarray(np.einsum("pq,pq->p", keys @ pairs, keys))
    return np.asarray(((pairs @ keys[:, :, None])[..., 0] * keys).sum(1))


def _crowd(logits: ClassLogits, rows: AttentionRows, level: float = 1.0) -> tuple[Array, Array]:
    """(P, P) of `log_weights`, by others and by a key itself, without the logarithm."""
    diagonal, prior = logits.keys[0], logits.prior
    pull = rows.own_response * logits.scale * logits.queries[0] * rows.softening
    within = logits.within
    top = max(diagonal.max(), *(one.max() for one in within))
    raised = pull[:, None, None]
    relations = [np.exp(raised * (one - top)) for one in within]
    of_pairs = logits.mixture().mean(relations, level)
    of_own = np.exp(pull[:, None] * (diagonal - top)) - diagonal_of(of_pairs)
    return np.einsum("pr,pqr->pq", logits.key_counts.keys * prior, of_pairs), prior * of_own


def attention_by_word(logits: ClassLogits, rows: AttentionRows) -> Array:
    """(P, P, T) mean attention [row, key] to one token of a class, of words that are read once and
    again (T = 1 without words); see `row_statistics`."""
    keys, diagonal, scale, prior = (
        logits.key_counts.keys,
        logits.keys[0],
        logits.scale,
        logits.prior,
    )
    seen, visible = keys * prior, logits.key_counts.visible
    relative, every = diagonal - (seen @ diagonal)[:, None], np.arange(len(keys))
    mixture, several = logits.mixture(), []
    for level in mixture.levels:
        crowd = np.log(np.maximum(np.add(*_crowd(logits, rows, level)), 1e-300))
        logs = log_weights(rows, every, scale, relative, crowd, rows.own_response)
        several.append(np.where(visible, logs + np.log(np.where(visible, prior, 1.0)), -np.inf))
    logs = np.stack(several, -1)
    weight = np.exp(logs - logs.max((1, 2), keepdims=True))
    total = (keys * (weight @ mixture.portions)).sum(1)
    return np.asarray(weight / total[:, None, None])


def _among(
    tile: Tile, kernel: Matrix, words: Words | None, name: str
) -> tuple[list[Array], list[Array]]:
    """Of keys of both rows: (o,), and (n, k) of each kind of pair."""
    relations = [kernel] if words is None else [kernel, getattr(words, name)]
    return [diagonal[tile.common] for diagonal, _ in relations], [
        pairs[tile.left, tile.right] for _, pairs in relations
    ]


def _mixed(share: Array, one: ByRelation, other_share: Array, other: ByRelation) -> ByRelation:
    """Of pairs of rows, each times a factor."""
    result = []
    for (excess, pairs), (excess2, pairs2) in zip(one, other, strict=True):
        total = share[:, None, None] * pairs
        total += other_share[:, None, None] * pairs2
        result.append((share[:, None] * excess + other_share[:, None] * excess2, total))
    return result


def _gathered(trace: ByRelation, law: ByRelation) -> Array:
    """(c,) sums of a law of pairs of rows with what `PositionAttention._trace` says."""
    result: Any = 0.0
    for (excess, pairs), (alone, counted) in zip(law, trace, strict=True):
        count = len(excess)
        result = result + np.vecdot(pairs.reshape(count, -1), counted.reshape(count, -1))
        result = result + np.vecdot(excess, alone)
    return np.asarray(result)


def _in_single(excess: Array, relations: Sequence[Array], factor: Array) -> Matrix:
    """(c, o), and (c, kinds n k) of pairs times a factor, rounded to single precision."""
    result = np.empty((len(excess), len(relations), *factor.shape[1:]), np.float32)
    for kind, pairs in enumerate(relations):
        np.multiply(pairs, factor, out=result[:, kind], casting="same_kind")
    return excess.astype(np.float32), result.reshape(len(excess), -1)


def _ratio(part: Array, whole: Array, otherwise: Array) -> Array:
    usable = np.abs(whole) > 1e-12 * np.abs(whole).max(initial=1e-300)
    return np.where(usable, part / np.where(usable, whole, 1.0), otherwise)


class _Laws(NamedTuple):
    """Of pairs of rows: the joint law, its derivative in the correlation, and that along the
    values."""

    joint: ByRelation
    slope: ByRelation
    keyed: ByRelation
