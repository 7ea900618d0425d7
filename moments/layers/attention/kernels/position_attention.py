"""Softmax attention on classes of positions: the closure of `KernelAttention` on nodes.

Every node of `classes.PositionClasses` is both a row and a key. A matrix over keys is a pair
(diagonal or its excess, off-diagonal), closed under products. `KeyCounts` hold masks and windows,
`RotaryMeans` rotary positions. The joint law of two rows is an array over the keys of either; row
pairs are processed in tiles of neighbouring rows. If every position is a node, the result is that
of `KernelAttention`. See docs/theory/state.md, Classes of positions.
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
from .. import softmax
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
    softmax_response,
)
from .relative_positions import RotaryMeans
from .row_statistics import (
    AttentionRows,
    Nodes,
    Widths,
    attention_rows,
    calibrate,
    log_weights,
    nodes_for,
)
from .rows import Paths, RowAttention, single

# --- pairs of rows --------------------------------------------------------------------------------

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

TILE = 12
"""Rows per tile: small tiles skip more masked entries, large tiles need fewer numpy calls."""


@dataclass(frozen=True, eq=False)
class Tile:
    """The c pairs of rows from two ranges of rows, with n and k keys, o of them common.

    Attributes:
        pairs: index range of these pairs among all pairs of rows.
        long, short: (c,) the later and the earlier row; if both ranges are the same, the last
            entries pair every row with itself.
        left, right: keys that any row of the first and of the second range attends to.
        common: their intersection; `common_left` and `common_right` index it within either.
        mask, mask_common: (c, n, k) and (c, o) 1 where each row attends to its key, else 0.
        rotated: (c, n, k) and (c,) means of rho over two rows with a key of each, and with the same
            key; None without rotary positions.
        unrotated: (c, n, k) mean rho of two keys of the longer row; None without rotary positions.
        begun: (c, o) 1 from the first key of the longer row's window on; None if all are 1.
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
    rotated: tuple[Array, Array] | None
    unrotated: Array | None
    begun: Array | None

    def diagonal_of(self, matrix: Array) -> Array:
        """(..., o) entries of (..., n, k) at which both keys are the same."""
        return matrix.diagonal(self.left.start - self.right.start, -2, -1)

    @property
    def rows(self) -> slice:
        """Range of the longer rows."""
        return slice(int(self.long[0]), int(self.long[-1]) + 1)

    def projected(self, maps: RowMaps, kernels: Sequence[tuple[Matrix, bool]]) -> list[Matrix]:
        """X C X'^T, excess and off-diagonal, for the maps X, X' of every pair of rows.

        Args:
            kernels: excess and off-diagonal of each C, and whether there is one per pair of rows:
                then (c, o) and (c, n, k), otherwise (o,) and (n, k), or (rows, n, k) for one per
                longer row.
        """
        common_keys, size = (self.common_left, self.common_right), self.left.stop - self.left.start
        second = maps.excess[self.short, self.common]
        once = maps.inverse_counts[self.short, self.common]
        middles, excesses = [], []
        for kernel, by_pair in kernels:
            if self.begun is not None:
                kernel, by_pair = self._per_pair(kernel, by_pair), True
            first = self.long if by_pair else self.rows
            diagonal_excess = kernel[0] if self.begun is None else kernel[0] * self.begun
            middle = maps.whole[first, self.left, self.left] @ kernel[1]
            added = maps.off_diagonal[first, self.left, self.common] * diagonal_excess[..., None, :]
            middle[:, :, self.common_right] += added
            excess = maps.excess[first, self.common] * diagonal_excess
            if not by_pair:
                where = self.long - self.long[0]
                middle, excess = middle[where], excess[where]
            middles.append(middle)
            excesses.append(excess)
        result = np.concatenate(middles, axis=1) if len(middles) > 1 else middles[0]
        parts = [slice(k * size, (k + 1) * size) for k in range(len(kernels))]
        # The product below multiplies by counts of tokens, but the excess belongs to one token.
        for part, excess in zip(parts, excesses, strict=True):
            diagonal = on_diagonal(result[:, part][:, common_keys[0], common_keys[1]])
            diagonal += excess * once
        result = result @ np.swapaxes(maps.whole[self.short, self.right, self.right], -1, -2)
        matrices = []
        for part, excess in zip(parts, excesses, strict=True):
            off_diagonal, excess = result[:, part], excess * second
            diagonal = on_diagonal(off_diagonal[:, common_keys[0], common_keys[1]])
            diagonal -= excess * once
            matrices.append((excess, off_diagonal))
        return matrices

    def _per_pair(self, kernel: Matrix, by_pair: bool) -> Matrix:
        """Expand a kernel that is the same for all rows, or per longer row, to all pairs."""
        if by_pair:
            return kernel
        diagonal, off_diagonal = kernel
        where = self.long - self.long[0]
        diagonal = diagonal[where] if diagonal.ndim == 2 else diagonal
        if off_diagonal.ndim == 3:
            return diagonal, off_diagonal[where]
        return diagonal, np.broadcast_to(off_diagonal, (len(self.long), *off_diagonal.shape))


class RowMaps(NamedTuple):
    """For every row a matrix X over its keys, which maps kernels C to X C X'^T.

    Attributes:
        excess, off_diagonal: (P, P) and (P, P, P) of X.
        inverse_counts: (P, P) one over the counts of a row's keys, 0 for others.
        whole: (P, P, P) X as it acts on values at nodes: off-diagonal entries times the counts of
            the second key, plus the excess on the diagonal.
    """

    excess: Array
    off_diagonal: Array
    inverse_counts: Array
    whole: Array

    @classmethod
    def of(cls, excess: Array, off_diagonal: Array, counts: Array) -> RowMaps:
        whole = off_diagonal * counts[:, None, :]
        entries = on_diagonal(whole)
        entries += excess
        visible = counts > 0.0
        inverse = np.where(visible, 1.0 / np.where(visible, counts, 1.0), 0.0)
        return cls(excess, off_diagonal, inverse, whole)


@dataclass(frozen=True, eq=False)
class RowPairs:
    """All C pairs of rows of a layer.

    Attributes:
        rows: ranges of rows, each with the range of keys that these attend to.
        long, short: (C,) the later and the earlier row of every pair.
        itself: (C,) whether the pair is a row with itself; any other pair (p, p) is a row with a
            neighbour in its class.
        phases: (C, m) mean e^{i w (i - i')} of the two rows; None without rotary positions.
    """

    tiles: tuple[Tile, ...]
    rows: tuple[tuple[slice, slice], ...]
    long: Indices
    short: Indices
    itself: NDArray[np.bool_]
    phases: NDArray[np.complex128] | None

    def to_matrix(self, values: Array) -> Matrix:
        """(diagonal (P,), off-diagonal (P, P)) from (C,) values that are symmetric in the rows."""
        diagonal, different = values[self.itself], ~self.itself
        off_diagonal = np.empty((len(diagonal), len(diagonal)))
        off_diagonal[self.long[different], self.short[different]] = values[different]
        off_diagonal[self.short[different], self.long[different]] = values[different]
        return diagonal, off_diagonal

    def from_matrix(self, diagonal: Array, off_diagonal: Array) -> Array:
        """(C,) entries of a matrix over rows: the inverse of `to_matrix`."""
        return np.where(self.itself, diagonal[self.long], off_diagonal[self.long, self.short])


def _tile(
    key_counts: KeyCounts,
    pairs: slice,
    long: Indices,
    short: Indices,
    left: slice,
    right: slice,
    rotated: tuple[Array, Array] | None,
    rotary_means: RotaryMeans | None,
) -> Tile:
    start, stop = max(left.start, right.start), min(left.stop, right.stop)
    common = slice(start, max(start, stop))
    empty = common.stop == common.start
    common_left, common_right = (
        slice(0, 0) if empty else slice(start - keys.start, stop - keys.start)
        for keys in (left, right)
    )
    visible = key_counts.visible[long, left], key_counts.visible[short, right]
    mask = (visible[0][:, :, None] & visible[1][:, None, :]).astype(float)
    mask_common = (visible[0][:, common_left] & visible[1][:, common_right]).astype(float)
    begin = np.where(long > short, key_counts.first_key[long], 0)
    inside = np.arange(common.start, common.stop) >= begin[:, None]
    begun = None if inside.all() else inside.astype(float)
    ranges = left, right, common, common_left, common_right
    unrotated = None if rotary_means is None else rotary_means.within[long, left, right]
    return Tile(pairs, long, short, *ranges, mask, mask_common, rotated, unrotated, begun)


@functools.lru_cache(maxsize=16)
def row_pairs(key_counts: KeyCounts, rotary_means: RotaryMeans | None) -> RowPairs:
    """Pair every row with every other one and with itself; cached by arguments."""
    size = len(key_counts.keys)
    ends = np.linspace(0, size, max(1, round(size / TILE)) + 1).round().astype(int)
    rows = []
    for low, high in itertools.pairwise(ends):
        seen = np.flatnonzero(key_counts.visible[low:high].any(0))
        rows.append((slice(int(low), int(high)), slice(int(seen[0]), int(seen[-1]) + 1)))
    tiles, longs, shorts, selves, phases, count = [], [], [], [], [], 0
    for index, (rows1, left) in enumerate(rows):
        for rows2, right in rows[: index + 1]:
            long, short = (index.ravel() for index in np.mgrid[rows1, rows2])
            below = short <= long
            long, short = long[below], short[below]
            itself = np.zeros(len(long), bool)
            if rows1 == rows2:
                each = np.arange(rows1.start, rows1.stop)
                long, short = np.concatenate([long, each]), np.concatenate([short, each])
                itself = np.concatenate([itself, np.ones(len(each), bool)])
            rotated = None
            if rotary_means is not None:
                phase = rotary_means.of_rows(long, short)
                phase[itself] = 1.0
                between = rotary_means.between(long, short, phase, left, right)
                between[itself] = rotary_means.within[long[itself]][:, left, right]
                rotated = between, (phase @ rotary_means.shares).real
                phases.append(phase)
            pairs = slice(count, count + len(long))
            tiles.append(_tile(key_counts, pairs, long, short, left, right, rotated, rotary_means))
            longs.append(long)
            shorts.append(short)
            selves.append(itself)
            count += len(long)
    return RowPairs(
        tuple(tiles),
        tuple(rows),
        np.concatenate(longs),
        np.concatenate(shorts),
        np.concatenate(selves),
        np.concatenate(phases) if phases else None,
    )


# --- the layer ------------------------------------------------------------------------------------


class Words(NamedTuple):
    """Kernels of `ClassLogits` for two tokens that are the same word.

    Attributes:
        queries, keys, values: the diagonal belongs to a token with itself, or, between two
            documents, to two tokens at the same position.
        share: (P, P) fraction of pairs that are the same word.
        repeated: fraction of tokens whose word occurs more than once.
        others: fraction of tokens that are further occurrences of a pair's word.
        coincidence: (P,) fraction of pairs at the same position of two documents that are the same
            word; None within one document.
    """

    queries: Matrix
    keys: Matrix
    values: Matrix
    share: Array
    repeated: float
    others: float
    coincidence: Array | None = None

    def mixture(
        self, left: slice = slice(None), right: slice = slice(None), common: slice = slice(None)
    ) -> Mixture:
        """Mixture of pairs of different words and of the same word, on ranges of keys."""
        coincidence = None if self.coincidence is None else self.coincidence[common]
        return Mixture(self.share[left, right], self.repeated, coincidence)


class Across(NamedTuple):
    """Kernels of `ClassLogits` for tokens of two different documents."""

    queries: Matrix
    keys: Matrix
    values: Matrix
    words: Words | None = None


class ClassLogits(NamedTuple):
    """`logits.Logits` on classes of positions.

    Attributes:
        queries, keys, values: kernels, (diagonal (P,), off-diagonal (P, P)).
        key_counts: which keys each row attends to.
        rotary_means: None without rotary positions.
        across: kernels of tokens of two documents, whose diagonal belongs to two tokens at the same
            position; None: there is one document.
        words: kernels of two tokens of the same word, `queries`, `keys` and `values` then being
            those of different words; None: words are not distinguished.
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
        """(P,) second moment of a row's query."""
        return np.asarray(self.queries[0])

    @property
    def prior(self) -> Array:
        """(P, P) attention to one token of a class if all logits vanish."""
        return np.asarray(self.key_counts.visible / self.key_counts.keys.sum(1, keepdims=True))

    @property
    def aligned(self) -> bool:
        """Whether there is no rotation and values have the kernel of the keys, as in `Logits`."""
        return self.rotary_means is None and self.keys is self.values

    def mixture(self, left: slice = slice(None), right: slice = slice(None)) -> Mixture:
        """Mixture of the relations between two keys."""
        return ALIKE if self.words is None else self.words.mixture(left, right)

    @property
    def key_relations(self) -> list[Array]:
        """(P, P) kernels of two keys: of different words and of the same word, or of any two."""
        return [self.keys[1]] if self.words is None else [self.keys[1], self.words.keys[1]]

    @property
    def within(self) -> list[Array]:
        """`key_relations` after rotation: (P, P), or (P, P, P) by row with rotary positions."""
        if self.rotary_means is None:
            return self.key_relations
        return [kernel * self.rotary_means.within for kernel in self.key_relations]

    def among(self, rows: slice, keys: slice) -> list[Array]:
        """(n, k, k) `within` for a range of rows and one of keys."""
        kernels = [kernel[keys, keys] for kernel in self.key_relations]
        if self.rotary_means is None:
            shape = rows.stop - rows.start, *kernels[0].shape
            return [np.broadcast_to(kernel, shape) for kernel in kernels]
        return [kernel * self.rotary_means.within[rows, keys, keys] for kernel in kernels]

    def averaged(self, function: Callable[[Array], Array]) -> tuple[Array, Array]:
        """Mean of a function of the entries of `within` over relations: diagonal, off-diagonal."""
        values = [function(kernel) for kernel in self.within]
        return function(self.keys[0]), self.mixture().mean(values)


class PositionAttention(RowAttention):
    """Moments of one softmax attention layer on classes of positions.

    Attributes:
        entropy, sum_square: (P,) as in `attention.KernelAttention`.
        others: the same rows for other relations of the two queries: of different documents, of the
            same word, and of the same word in different documents, as far as these occur.
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
        by_word = attention_by_word(logits, rows)
        self.weights = by_word @ logits.mixture().portions
        self._by_word = ratio_or_zero(by_word, self.weights[:, :, None])
        self.counted = logits.key_counts.keys * self.weights
        self._pairs = pairs = row_pairs(key_counts, logits.rotary_means)
        self._two_rows, self._self_pairs = (pairs.long, pairs.short), pairs.itself
        self._single_response = np.zeros_like(self.weights)
        self._response = self._softmax_response()
        self._project()
        self._nodes: Nodes | None = None
        self._joint_laws()
        self.logit_variance, self.entropy = rows.logit_variance, rows.entropy
        excess, off_diagonal = logits.mixture().mean_of(self._self_laws)
        self._squares = self.weights**2 * np.maximum(excess + diagonal_of(off_diagonal), 0.0)
        self.sum_square = (key_counts.keys * self._squares).sum(1)
        if self._dropped > 0.0:
            self._respond_to_noise()
        self._forward()
        relations: list[Across | ClassLogits] = [logits]
        if logits.across is not None:
            relations.append(logits.across)
        for kernels in tuple(relations):
            if kernels.words is not None:
                relations.append(kernels._replace(queries=kernels.words.queries))
        self.others = tuple(map(self._with_kernels, relations[1:]))
        self._keep_backward()

    def _keep_backward(self) -> None:
        """Form the backward maps in single precision and drop the laws behind them."""
        laws = zip(self._pairs.tiles, self._laws, strict=True)
        self._backward_maps = [self._key_gradient_maps(tile, law) for tile, law in laws]
        del self._laws, self._projections, self._response, self._sums, self._traces

    def _with_kernels(self, kernels: Across | ClassLogits) -> PositionAttention:
        """The same rows with other kernels between the two rows of a pair. Between two documents
        the diagonal stands for two rows at the same position."""
        result = copy.copy(self)
        result._kernels, result._dropped, result.others = kernels, 0.0, ()
        if kernels.words is not None and kernels.words.coincidence is not None:
            mean, same = self._response
            counts = self.logits.key_counts.keys * kernels.words.others
            result._response = [mean, RowMaps.of(same.excess, same.off_diagonal, counts)]
        unchanged = all(
            getattr(kernels, name) is getattr(self._kernels, name)
            for name in ("keys", "values", "words")
        )
        if not unchanged or result._response is not self._response:
            result._project()
        result._joint_laws()
        result._forward()
        result._keep_backward()
        return result

    # --- rows ----------------------------------------------------------------------------------

    def _counts(self, keys: Array) -> list[Array]:
        """Counts of keys for each part of `Mixture`: all tokens, other tokens of a pair's word."""
        words = self.logits.words
        return [keys] if words is None else [keys, keys * words.others]

    def _softmax_response(self) -> list[RowMaps]:
        """1 - A of every row, by the parts of `Mixture`; see `joint_laws.softmax_response`."""
        counts = self._counts(self.logits.key_counts.keys)
        result = np.zeros((len(counts), *self.weights.shape))
        off_diagonals = np.zeros((*result.shape, result.shape[-1]))
        for rows, keys in self._pairs.rows:
            for part, (excess, off_diagonal) in enumerate(self._response_of(rows, keys)):
                result[part, rows, keys] = excess
                off_diagonals[part, rows, keys, keys] = off_diagonal
        return [RowMaps.of(*one) for one in zip(result, off_diagonals, counts, strict=True)]

    def _response_of(self, rows: slice, keys: slice) -> list[Matrix]:
        """1 - A for a range of rows, over the range of keys that these attend to."""
        logits = self.logits
        counts, weights = logits.key_counts.keys[rows, keys], self.weights[rows, keys]
        every, targets = slice(0, weights.shape[1]), self._by_word[rows, keys]
        ranges, classes = (every, every), (counts * weights, counts * weights)
        tokens = weights, weights
        sums = Sums.of(logits.mixture(keys, keys), ranges, classes, tokens, (targets, targets))
        kernel = logits.keys[0][keys], logits.among(rows, keys), self._counts(counts)
        reference = logits.prior[rows, keys], self._rows.of(rows)
        parts, single = softmax_response(sums, *kernel, *reference, logits.scale)
        self._single_response[rows, keys] = single
        return parts

    # --- pairs of rows -------------------------------------------------------------------------

    def _mixture(self, tile: Tile) -> Mixture:
        words = self._kernels.words
        return ALIKE if words is None else words.mixture(tile.left, tile.right, tile.common)

    def _projected(
        self, tile: Tile, kernels: Sequence[tuple[list[Array], list[Array], bool]]
    ) -> list[ByRelation]:
        """(1 - A) C (1 - A')^T for every pair of rows of a tile, from the diagonals and
        off-diagonals of each C by relation, and whether there is one per pair of rows."""
        mixture, long, short, keys = self._mixture(tile), tile.long, tile.short, tile.common
        kernel_parts = [
            mixture.parts_of(diagonals, relations, tile.diagonal_of)
            for diagonals, relations, _ in kernels
        ]
        by_part = []
        for part, maps in enumerate(self._response):
            of_part = [
                (parts[part], by_pair)
                for parts, (_, _, by_pair) in zip(kernel_parts, kernels, strict=True)
            ]
            by_part.append(tile.projected(maps, of_part))
        result = []
        for parts, (diagonals, relations, by_pair), projected in zip(
            kernel_parts, kernels, zip(*by_part, strict=True), strict=True
        ):
            corrected = []
            for part, (excess, off_diagonal) in enumerate(projected):
                diagonal_excess, within = parts[part][0], tile.diagonal_of(parts[part][1])
                if not by_pair and diagonal_excess.ndim > 1:
                    diagonal_excess, within = (
                        per_row[long - long[0]] for per_row in (diagonal_excess, within)
                    )
                if part > 0 and mixture.coincidence is None:
                    maps = self._response[part]
                    first, second = maps.excess[long, keys], maps.excess[short, keys]
                    beyond = diagonal_of(maps.off_diagonal)
                    excess -= (
                        beyond[long, keys] * second + first * beyond[short, keys]
                    ) * diagonal_excess
                    excess -= first * within * second
                corrected.append((excess, off_diagonal))
            single_response = self._single_response[long, keys] * self._single_response[short, keys]
            singles = []
            for whole in (mixture.wholes(diagonals)[0], diagonals[0]):
                single = whole - tile.diagonal_of(relations[0])
                if not by_pair and single.ndim > 1:
                    single = single[long - long[0]]
                singles.append(single * single_response)
            result.append(mixture.joined(corrected, *singles))
        return result

    def _project(self) -> None:
        """Form the ingredients of the joint laws that do not depend on the queries' kernel, so that
        all relations of two rows share them: half the cost of the laws."""
        logits, pairs, rotary_means = self.logits, self._pairs, self.logits.rotary_means
        rotated, unrotated, along_values = [], [], []
        rotation_factor = np.ones(len(pairs.long))
        self._sums = [self._sums_of(tile) for tile in pairs.tiles]
        self._traces = [self._trace(*one) for one in zip(pairs.tiles, self._sums, strict=True)]
        for tile, trace in zip(pairs.tiles, self._traces, strict=True):
            diagonal, of_relations = self._between(tile, "keys")
            kernels: list[tuple[list[Array], list[Array], bool]] = [(diagonal, of_relations, False)]
            if tile.rotated is not None:
                of_keys, of_rows = tile.rotated
                assert rotary_means is not None
                within = rotary_means.within[tile.rows, tile.left, tile.right]
                with_rows = (
                    [entries * of_rows[:, None] for entries in diagonal],
                    [kernel * of_keys for kernel in of_relations],
                )
                of_keys_alone = diagonal, [kernel * within for kernel in of_relations]
                kernels = [(*with_rows, True), (*of_keys_alone, False)]
            if not logits.aligned:
                kernels.append((*self._between(tile, "values"), False))
            result = self._projected(tile, kernels)
            rotated.append(result[0])
            along_values.append(result[-1])
            if tile.rotated is not None:
                unrotated.append(result[1])
                overlaps = _traced(trace, result[0]), _traced(trace, result[1])
                rotation_factor[tile.pairs] = _ratio(*overlaps, of_rows)
        self._projections = rotated, unrotated, along_values, rotation_factor

    def _joint_laws(self) -> None:
        """Form the joint law F/(w w') of every pair of rows (first axis: keys of the longer row)
        and its derivatives."""
        logits, rows, pairs = self.logits, self._rows, self._pairs
        rotary_means, temperature = logits.rotary_means, logits.queries[0]
        diagonal, between = self._kernels.queries
        bare = np.clip(between / np.sqrt(np.outer(temperature, temperature)), -1.0, 1.0)
        self._bare = bare = pairs.from_matrix(np.clip(diagonal / temperature, -1.0, 1.0), bare)
        of_rows = np.concatenate([t.rotated[1] for t in pairs.tiles if t.rotated] or [np.ones(1)])
        lowest = bare if rotary_means is None else np.minimum(bare * of_rows, 0.0)
        nodes = self._nodes
        if nodes is None or lowest.min() < nodes.low:
            self._nodes = nodes = nodes_for(lowest, float(rows.theta.max()))
            self._calibration = calibrate(rows, logits.scale, nodes, self._widths, True)
        # otherwise queries of the same word, whose higher correlations lie within these nodes
        exponent = self._calibration.exponent
        exponent = geometric_mean(exponent[pairs.long], exponent[pairs.short])

        rotated, unrotated, along_values, rotation_factor = self._projections
        self._correlation = rho = np.clip(bare * rotation_factor, nodes.low, 1.0)
        basis, slopes = nodes.basis(rho)
        factor, slope = (np.vecdot(one.T, exponent) for one in (basis, slopes))
        along = factor
        exponents: list[ByRelation] = rotated
        factors: Array | None = factor
        if rotary_means is not None:
            # The part due to fluctuating products (rho = 0) does not depend on the distance of the
            # rows; the rest is taken per unit of the correlation that the rotated kernel contains.
            at_zero = exponent @ nodes.basis(np.zeros(1))[0][:, 0]
            distinct = np.abs(rho) > RHO_MIN
            along = (
                np.where(distinct, (factor - at_zero) / np.where(distinct, rho, 1.0), slope) * bare
            )
            exponents, factors = [], None
            for tile, with_rows, keys_alone in zip(pairs.tiles, rotated, unrotated, strict=True):
                part = tile.pairs
                exponents.append(_combined(along[part], with_rows, at_zero[part], keys_alone))
        self._laws = [
            self._law(
                tile,
                sums,
                (projected,) if logits.aligned else (projected, of_values),
                law,
                None if factors is None else factors[tile.pairs],
                slope[tile.pairs],
            )
            for tile, sums, projected, of_values, law in zip(
                pairs.tiles, self._sums, rotated, along_values, exponents, strict=True
            )
        ]

        self._factors = paths = self._path_factors(nodes, basis, rotary_means is not None)
        unrotated_factors = np.stack([paths.key, paths.cross])
        # factors of the derivative along keys rotated with their rows, and along keys alone
        self._derivative_factors: tuple[Array, ...] = (unrotated_factors,)
        if paths.along is not None:
            rotated_factors = np.stack([paths.along, 0.0 * paths.cross])
            self._derivative_factors = rotated_factors, unrotated_factors

    def _between(self, tile: Tile, name: str) -> tuple[list[Array], list[Array]]:
        """(o,) diagonals and (n, k) off-diagonals of the kernel of `keys` or `values`, one per
        relation."""
        words, kernel = self._kernels.words, getattr(self._kernels, name)
        relations = [kernel] if words is None else [kernel, getattr(words, name)]
        return [diagonal[tile.common] for diagonal, _ in relations], [
            off_diagonal[tile.left, tile.right] for _, off_diagonal in relations
        ]

    def _law(
        self,
        tile: Tile,
        sums: Sums,
        directions: Sequence[ByRelation],
        exponent: ByRelation,
        factor: Array | None,
        slope: Array,
    ) -> _Laws:
        """The joint law of a tile's row pairs, with an exponent times a (c,) factor (None: 1), and
        its derivatives.

        Args:
            directions: the projected kernel of the keys, then that of the values if it differs.
            slope: (c,) derivative of the factor in the correlation of the queries.
        """
        factor = None if factor is None else factor[:, None, None]
        law = bounded_exp(exponent, tile.diagonal_of, factor)
        for excess, off_diagonal in law:
            excess *= tile.mask_common
            off_diagonal *= tile.mask
        sloped = [
            [
                (
                    slope[:, None] * (excess + tile.diagonal_of(off_diagonal)),
                    slope[:, None, None] * off_diagonal,
                )
                for excess, off_diagonal in direction
            ]
            for direction in directions
        ]
        joint, tangents = sums.balanced_with(law, JOINT_SWEEPS, sloped)
        return _Laws(joint, tangents[0], tangents[-1])

    def _sums_of(self, tile: Tile) -> Sums:
        key_counts, weights = self.logits.key_counts, self.weights
        long, short, left, right = tile.long, tile.short, tile.left, tile.right
        # `split` counts keys that only one row sees without interpolating across the jump there
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
    def _self_laws(self) -> ByRelation:
        """(P, P) and (P, P, P) joint law of every row with itself."""
        rows, size = self.weights.shape
        result = [
            (np.zeros((rows, size)), np.zeros((rows, size, size)))
            for _ in self.logits.mixture().portions
        ]
        for tile, law in zip(self._pairs.tiles, self._laws, strict=True):
            itself = self._pairs.itself[tile.pairs]
            rows = tile.long[itself]
            if len(rows):
                for total, of_tile in zip(result, law.joint, strict=True):
                    total[0][rows, tile.left] = of_tile[0][itself]
                    total[1][rows, tile.left, tile.right] = of_tile[1][itself]
        return result

    def _trace(self, tile: Tile, sums: Sums) -> ByRelation:
        """(c, o) and (c, n, k) coefficients of the law F/(w w') in tr(F C), C the values' kernel;
        `_traced` sums over them."""
        key_counts, weights = self.logits.key_counts, self.weights
        long, short, same = tile.long, tile.short, self._pairs.itself[tile.pairs]
        values, kernels = self._between(tile, "values")
        once = key_counts.shared[long, short, tile.common] * weights[long, tile.common]
        once[same] = self.counted[long[same], tile.common]
        once *= weights[short, tile.common]
        both = sums.first[:, :, None] * sums.second[:, None, :]
        counted = sums.mixture.weighed(kernels)
        result = []
        # A token with itself counts with its diagonal entry instead of that of two different ones.
        diagonals = sums.mixture.of_tokens(sums.mixture.wholes(values))
        for diagonal, kernel in zip(diagonals, counted, strict=True):
            off_diagonal = both * kernel
            entries = sums.at_common(off_diagonal)
            entries += (diagonal - tile.diagonal_of(kernel)) * once
            result.append((diagonal * once, off_diagonal))
        return result

    def _traces_of(self, name: str) -> Array:
        """(C,) tr(F C) with F the `joint` laws, or their `slope` in the correlation."""
        laws = zip(self._traces, self._laws, strict=True)
        return np.concatenate([_traced(trace, getattr(law, name)) for trace, law in laws])

    # --- forward -------------------------------------------------------------------------------

    def _forward(self) -> None:
        kernels, pairs, weights = self._kernels, self._pairs, self.weights
        mean = pairs.from_matrix(*self.mean_output())
        excess, slope = self._traces_of("joint") - mean, self._traces_of("slope")
        common_weights = None
        if kernels.values is self.logits.values:  # two documents have no tokens in common
            shared = np.einsum("psq,pq,sq->ps", self.logits.key_counts.shared, weights, weights)
            common_weights = pairs.from_matrix((self.counted * weights).sum(1), shared)
        queries = pairs.from_matrix(*kernels.queries)
        self._evaluate(mean, excess, slope, queries, common_weights, kernels is self.logits)

    def _as_kernel(self, values: Array) -> Matrix:
        return self._pairs.to_matrix(values)

    def _key_phases(self) -> NDArray[np.complex128] | None:
        rotary_means = self.logits.rotary_means
        return None if rotary_means is None else rotary_means.keys

    def _shift_products(self) -> Array:
        rotary_means, pairs = self.logits.rotary_means, self._pairs
        if rotary_means is None or pairs.phases is None:
            return super()._shift_products()
        both = self._shift[pairs.long] * self._shift[pairs.short].conj() * pairs.phases.conj()
        return np.asarray((both @ rotary_means.shares).real)

    def _dropped_terms(self) -> tuple[Array, Array]:
        logits = self.logits
        squares = (logits.key_counts.keys * self._squares) @ logits.values[0]
        within = logits.mixture().mean(logits.within)
        return squares, self._noise_overlap(logits.keys[0], within)

    def _mean_kernel(self, name: str) -> Matrix:
        (diagonal, off_diagonal), words = getattr(self._kernels, name), self._kernels.words
        if words is None:
            return diagonal, off_diagonal
        (same_diagonal, same_word), mixture = getattr(words, name), words.mixture()
        if mixture.coincidence is not None:
            diagonal = diagonal + mixture.coincidence * (same_diagonal - diagonal)
        return diagonal, mixture.mean([off_diagonal, same_word])

    def mean_output(self) -> Matrix:
        """Overlap W C W^T of mean outputs."""
        diagonal, off_diagonal = self._mean_kernel("values")
        shared, excess = self.logits.key_counts.shared, diagonal - diagonal_of(off_diagonal)
        smooth = self.counted @ off_diagonal @ self.counted.T
        same_token = np.einsum("psq,pq,sq,q->ps", shared, self.weights, self.weights, excess)
        of_row = (self.counted * self.weights) @ excess
        return diagonal_of(smooth) + of_row, np.asarray(smooth + same_token)

    # --- attention dropout (see `attention`) ------------------------------------------------------

    def _respond_to_noise(self) -> None:
        """Form E[J D J]/(w w^T) of every row: (excess, off-diagonal) of weighted mean 0."""
        weights, response = self.weights, self._response[0]
        diagonal = self.logits.values[0] + self._value_bias
        projected = (response.whole * diagonal) @ np.swapaxes(response.off_diagonal, -1, -2)
        projected += response.off_diagonal * (diagonal * response.excess)[:, None, :]
        law, every = self.logits.mixture().mean_of(self._self_laws), slice(0, len(diagonal))
        counts, targets = (self.counted, self.counted), (weights > 0.0)[..., None].astype(float)
        sums = Sums.of(ALIKE, (every, every), counts, (weights, weights), (targets, targets))
        direction = response.excess**2 * diagonal + diagonal_of(projected), projected
        _, [[(excess, off_diagonal)]] = sums.balanced_with([law], 0, [[direction]])
        # remove the means that remain after a finite number of sweeps
        left = np.einsum("pq,pqr->pr", self.counted, off_diagonal) + weights * excess
        both = (self.counted * left).sum(1)
        off_diagonal = off_diagonal - left[:, None, :] - left[:, :, None] + both[:, None, None]
        trace = softmax.jacobian_square(self.sum_square, self._rows.count)
        bare = (self.counted * weights * (excess + diagonal_of(off_diagonal))).sum(1)
        usable = bare > 1e-300
        scale = trace * (self.counted @ diagonal) / np.where(usable, bare, 1.0)
        scale = np.where(usable, scale, 0.0)[:, None]
        self._noise = scale * excess, scale[..., None] * off_diagonal

    def _noise_overlap(self, diagonal: Array, kernels: Array) -> Array:
        """(P,) tr(E[J D J] X) of every row, for one kernel X or one per row."""
        counted, (excess, noise) = self.counted, self._noise
        same_token = (excess + diagonal_of(noise)) * diagonal - diagonal_of(noise * kernels)
        total = (((noise * kernels) @ counted[:, :, None])[..., 0] * counted).sum(1)
        return np.asarray(total + (counted * self.weights * same_token).sum(1))

    # --- backward ------------------------------------------------------------------------------

    def _key_gradient_maps(self, tile: Tile, laws: _Laws) -> list[Matrix]:
        """Gradient kernel at the keys per unit of a row pair's gradient, (c, o) and
        (c, relations n k): through the joint law, then through its derivative along the values.
        With rotary positions the latter is stated twice, rotated with the rows and unrotated."""
        key_counts, weights = self.logits.key_counts, self.weights
        long, short, left, right = tile.long, tile.short, tile.left, tile.right
        itself = self._pairs.itself[tile.pairs]
        neighbour = (long == short) & ~itself
        order_count = np.where(long == short, 1.0, 2.0)[:, None]
        # `sending` counts rows that see only one of the keys without interpolating across the jump
        counts = (
            np.moveaxis(key_counts.rows_split[left, right][:, :, long], -1, 0),
            np.moveaxis(key_counts.rows_split[right, left][:, :, short], -1, 0).swapaxes(1, 2),
        )
        both = (order_count * weights[long, left])[:, :, None] * weights[short, right][:, None, :]
        both = both * counts[0] * counts[1]
        row_weights = key_counts.rows.T * weights
        same_key = order_count * row_weights[long, tile.common] * row_weights[short, tile.common]
        if itself.any():  # split the diagonal class pair into a row itself and its neighbours
            rows = long[itself]
            both_itself = weights[rows, left][:, :, None] * weights[rows, right][:, None, :]
            both_itself *= np.moveaxis(key_counts.rows_of_pair[left, right][:, :, rows], -1, 0)
            key_itself = (
                key_counts.rows_of_pair_diagonal[left][:, rows] * weights[rows, left].T ** 2
            ).T
            both[itself], same_key[itself] = both_itself, key_itself
            both[neighbour] -= both_itself
            same_key[neighbour] -= key_itself
        mixture, result = self._mixture(tile), []
        for law in (laws.joint, laws.along_values):
            of_tokens, mean = mixture.mean_of(law, tile.diagonal_of)
            diagonal = (of_tokens + tile.diagonal_of(mean)) * same_key
            result.append((diagonal, [off_diagonal for _, off_diagonal in law]))
        (diagonal, joint), (diagonal2, along_values) = result
        maps = [_in_single(diagonal, joint, both)]
        if tile.rotated is None:
            return [*maps, _in_single(diagonal2, along_values, both)]
        rho, of_rows = tile.rotated
        assert tile.unrotated is not None
        for entries, means in ((diagonal2 * of_rows[:, None], rho), (diagonal2, tile.unrotated)):
            maps.append(_in_single(entries, [matrix * means for matrix in along_values], both))
        return maps

    def backward(self, diagonal: Array, off_diagonal: Any) -> Paths[Matrix]:
        """Second moments per feature of the gradient at the attention's input, by path: each
        (diagonal (P,), off-diagonal (P, P)), the latter (2, P, P) for different words and the same.

        Args:
            diagonal, off_diagonal: of the gradient at sum_j a_ij x_j, behind the value weights.
        """
        size, tiles = self.weights.shape[1], self._pairs.tiles
        scale, gradient = single(self._pairs.from_matrix(diagonal, off_diagonal))
        # paths 0: value, 1: key, 2: cross
        weighted = [(slice(0, 1), gradient[None])]
        for factors in self._derivative_factors:
            weighted.append((slice(1, 3), (gradient * factors).astype(np.float32)))
        relations = len(self.logits.key_relations)
        total_diagonal, total = np.zeros((3, size)), np.zeros((3, relations, size, size))
        for tile, maps in zip(tiles, self._backward_maps, strict=True):
            shape = tile.left.stop - tile.left.start, tile.right.stop - tile.right.start
            for (path, of_pairs), (of_diagonal, of_matrix) in zip(weighted, maps, strict=True):
                total_diagonal[path, tile.common] += of_pairs[:, tile.pairs] @ of_diagonal
                result = of_pairs[:, tile.pairs] @ of_matrix
                total[path, :, tile.left, tile.right] += result.reshape(-1, relations, *shape)
        total_diagonal, total = scale * total_diagonal, scale * total
        if self._dropped > 0.0:
            self._add_dropout_gradient(diagonal, total_diagonal, total)
        total = 0.5 * (total + np.swapaxes(total, -1, -2))
        if relations == 1:
            total = total[:, 0]
        query = diagonal * self.response[0], off_diagonal * self.response[1]
        by_path = [(total_diagonal[path], total[path]) for path in range(3)]
        return Paths(by_path[0], query, by_path[1], by_path[2])

    def _add_dropout_gradient(self, gradient: Array, total_diagonal: Array, total: Array) -> None:
        """Add the gradient through attention dropout, in place, to the paths of `backward`."""
        logits, weights, later = self.logits, self.weights, self.logits.key_counts.rows_of_pair
        squares = logits.key_counts.rows_of_pair_diagonal  # (key, row)
        total_diagonal[0] += self._dropped * (squares * self._squares.T) @ gradient
        row_gradient = self._dropped * logits.scale * gradient * logits.queries[0]
        excess, noise = self._noise
        diagonal, both = excess + diagonal_of(noise), weights[:, :, None] * weights[:, None, :]
        both *= np.moveaxis(later, -1, 0)
        rotated = noise if logits.rotary_means is None else noise * logits.rotary_means.within
        calibration = self._calibration
        paths = (calibration.noise_key, rotated), (calibration.noise_cross, noise)
        for path, (factor, law) in enumerate(paths, start=1):
            total[path] += np.einsum("p,pqr->qr", factor * row_gradient, law * both)
            total_diagonal[path] += (squares * (weights**2 * diagonal).T) @ (factor * row_gradient)


def rows_of_classes(logits: ClassLogits) -> AttentionRows:
    """Reference statistics of every node's row."""
    keys, temperature, diagonal = logits.key_counts.keys, logits.queries[0], logits.keys[0]
    prior, within = logits.prior, logits.within
    class_prior, squares = keys * prior, keys * prior**2
    top = float(max(diagonal.max(), *(kernel.max() for kernel in within)))

    def mean(function: Callable[[Array], Array]) -> Array:
        of_diagonal, off_diagonal = logits.averaged(lambda entries: function(entries - top))
        excess = of_diagonal - diagonal_of(off_diagonal)
        return np.asarray(_over_key_pairs(class_prior, off_diagonal) + (squares * excess).sum(1))

    return attention_rows(
        mean,
        (float(min(kernel.min() for kernel in within)), top),
        (temperature, float(logits.key_counts.classes.mean(temperature))),
        logits.scale,
        1.0 / squares.sum(1),
        class_prior @ diagonal,
        -(class_prior * np.log(np.where(prior > 0.0, prior, 1.0))).sum(1),
    )


def _over_key_pairs(weights: Array, kernel: Array) -> Array:
    """(P,) sums over both keys of a row, for one kernel or one per row."""
    if kernel.ndim == 2:
        return np.asarray(np.einsum("pq,pq->p", weights @ kernel, weights))
    return np.asarray(((kernel @ weights[:, :, None])[..., 0] * weights).sum(1))


def _crowding(logits: ClassLogits, rows: AttentionRows, level: float = 1.0) -> Array:
    """(P, P) sum_k p_k e^{x tau C_jk} of `mean_attention`, up to a factor; see `Mixture.levels`."""
    diagonal, prior, within = logits.keys[0], logits.prior, logits.within
    exponent = rows.own_response * logits.scale * logits.queries[0] * rows.softening
    top = max(diagonal.max(), *(kernel.max() for kernel in within))
    relations = [np.exp(exponent[:, None, None] * (kernel - top)) for kernel in within]
    off_diagonal = logits.mixture().mean(relations, level)
    excess = np.exp(exponent[:, None] * (diagonal - top)) - diagonal_of(off_diagonal)
    by_others = np.einsum("pr,pqr->pq", logits.key_counts.keys * prior, off_diagonal)
    return np.asarray(by_others + prior * excess)


def attention_by_word(logits: ClassLogits, rows: AttentionRows) -> Array:
    """(P, P, T) mean attention [row, key] to one token of a class, separately for words that occur
    once and repeated ones (T = 2; 1 if words are not distinguished); see `row_statistics`."""
    keys, diagonal, prior = logits.key_counts.keys, logits.keys[0], logits.prior
    visible, every = logits.key_counts.visible, np.arange(len(keys))
    relative = diagonal - ((keys * prior) @ diagonal)[:, None]
    log_prior = np.log(np.where(visible, prior, 1.0))
    mixture, by_word = logits.mixture(), []
    for level in mixture.levels:
        crowding = np.log(np.maximum(_crowding(logits, rows, level), 1e-300))
        logs = log_weights(rows, every, logits.scale, relative, crowding, rows.own_response)
        by_word.append(np.where(visible, logs + log_prior, -np.inf))
    logs = np.stack(by_word, -1)
    weight = np.exp(logs - logs.max((1, 2), keepdims=True))
    total = (keys * (weight @ mixture.portions)).sum(1)
    return np.asarray(weight / total[:, None, None])


def _combined(
    factor1: Array, matrices1: ByRelation, factor2: Array, matrices2: ByRelation
) -> ByRelation:
    """Linear combination of two matrices per pair of rows, with (c,) factors."""
    result = []
    for (excess1, matrix1), (excess2, matrix2) in zip(matrices1, matrices2, strict=True):
        total = factor1[:, None, None] * matrix1
        total += factor2[:, None, None] * matrix2
        result.append((factor1[:, None] * excess1 + factor2[:, None] * excess2, total))
    return result


def _traced(trace: ByRelation, law: ByRelation) -> Array:
    """(c,) tr(F C) of a law F/(w w'), with the coefficients of `PositionAttention._trace`."""
    result: Any = 0.0
    for (excess, off_diagonal), (of_excess, of_pairs) in zip(law, trace, strict=True):
        count = len(excess)
        result = result + np.vecdot(off_diagonal.reshape(count, -1), of_pairs.reshape(count, -1))
        result = result + np.vecdot(excess, of_excess)
    return np.asarray(result)


def _in_single(diagonal: Array, relations: Sequence[Array], factor: Array) -> Matrix:
    """(c, o) diagonals, and (c, relations n k) matrices times a factor, in single precision."""
    result = np.empty((len(diagonal), len(relations), *factor.shape[1:]), np.float32)
    for relation, matrix in enumerate(relations):
        np.multiply(matrix, factor, out=result[:, relation], casting="same_kind")
    return diagonal.astype(np.float32), result.reshape(len(diagonal), -1)


def _ratio(part: Array, whole: Array, otherwise: Array) -> Array:
    usable = np.abs(whole) > 1e-12 * np.abs(whole).max(initial=1e-300)
    return np.where(usable, part / np.where(usable, whole, 1.0), otherwise)


class _Laws(NamedTuple):
    """Joint law of the row pairs of a tile, and its derivatives in the correlation of the queries
    along the keys' kernel and along the values'."""

    joint: ByRelation
    slope: ByRelation
    along_values: ByRelation
