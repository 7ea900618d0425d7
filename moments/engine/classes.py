"""Classes of positions: kernels of a sequence of any length, stored at a few positions.

A kernel of tokens that differ in position alone is smooth in the logarithm of the position. It is
stored at nodes x_1 = 1 < ... < x_P = L; the off-diagonal entry (p, p) belongs to two neighbouring
tokens near x_p. A sum over tokens is a sum over nodes with counts, the integrals of an interpolant.
Throughout, a matrix is a pair of arrays, diagonal (..., P) and off-diagonal (..., P, P). See
docs/theory/state.md, Classes of positions.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EXACT = 4
"""Number of first positions each of which is a node."""

PER_OCTAVE = 2.0
"""Nodes per doubling of the position beyond these."""

PER_WINDOW, LEAST_PER_WINDOW, FEW_WINDOWS, MOST_WINDOWS = 4.0, 2.0, 16, 72
"""Nodes per attention window in sequences of at most FEW_WINDOWS windows, and in longer ones; none
beyond MOST_WINDOWS: cells as wide as a window lose the correlation of nearby tokens."""

SUMMED = 64
"""Positions between two nodes up to which they are summed one by one; else by 24 Gauss points."""


@dataclass(frozen=True, eq=False)
class PositionClasses:
    """Nodes of one sequence, and sums over its tokens.

    Subclasses for several documents (`DocumentClasses`) and for texts (`texts.TextClasses`) store
    several blocks per matrix; `blocks` splits and `joined` assembles them.

    Attributes:
        nodes: (P,) positions, counted from 1; the last are L - 1 and L.
    """

    length: int
    nodes: NDArray[np.intp]

    @classmethod
    def for_length(
        cls,
        length: int,
        window: int | None = None,
        exact: int = EXACT,
        per_octave: float = PER_OCTAVE,
        per_window: float | None = None,
        widening: float = 0.0,
    ) -> PositionClasses:
        """Place the nodes of a sequence.

        Args:
            window: keys that a row attends to at most; None: no window.
            exact: number of first positions each of which is a node.
            per_octave: nodes per doubling of the position beyond these.
            per_window: least number of nodes per window; None: by the number of windows.
            widening: without a window, relative growth of each step in log position towards the
                start; `per_octave` then holds for the last positions.
        """
        if window is None or window >= length:
            if widening > 0.0:
                return _widening(int(length), float(per_octave), float(widening))
            return _spaced(int(length), float(length), int(exact), float(per_octave))
        if per_window is None:
            per_window = PER_WINDOW if length <= FEW_WINDOWS * window else LEAST_PER_WINDOW
        return _spaced(int(length), window / per_window, int(exact), float(per_octave))

    @functools.cached_property
    def count(self) -> Array:
        """(P,) number of tokens in each class."""
        return np.asarray(self.causal.key_counts().keys[-1])

    @property
    def one_document(self) -> PositionClasses:
        """Classes of a single document."""
        return self

    @property
    def causal(self) -> PositionClasses:
        """The same nodes under a causal mask, from which tokens and pairs are counted."""
        return self

    @property
    def document_lengths(self) -> tuple[int, ...]:
        """Number of tokens of each document."""
        return (self.length,)

    def blocks(self, diagonal: Array, off_diagonal: Array) -> tuple[Matrix, ...]:
        """Split a matrix by whether its two tokens share a document: one block if there is a single
        document, else a second one for pairs of different documents."""
        return ((diagonal, off_diagonal),)

    def blocks_by_word(self, diagonal: Array, off_diagonal: Array) -> tuple[Matrix, ...]:
        """Split as `blocks`, and by whether the two tokens are the same word if there is a text."""
        return self.blocks(diagonal, off_diagonal)

    def joined(self, *blocks: Matrix) -> Matrix:
        """Assemble a matrix from its `blocks`."""
        return blocks[0]

    @property
    def one_document_with_words(self) -> PositionClasses:
        """Classes of a single document that still distinguish words, those of a `ClassMatrix`."""
        return self.one_document

    def within_block(self, diagonal: Array, off_diagonal: Array) -> Matrix:
        """The block of pairs within one document, on the classes `of_one`."""
        return self.blocks(diagonal, off_diagonal)[0]

    def across_block(self, diagonal: Array, off_diagonal: Array) -> Matrix | None:
        """The block of pairs of different documents, on the classes `of_one`, with the pairs at one
        position on its diagonal; None if there is a single document."""
        _, *across = self.blocks(diagonal, off_diagonal)
        return across[0] if across else None

    def word_mean(self, off_diagonal: Array) -> Array:
        """(..., P, P) entries averaged over same-word and different-word pairs."""
        return off_diagonal

    def word_product(self, product: Matrix, left: ClassMatrix, right: ClassMatrix) -> Matrix:
        """The product of two matrices, given the `product` of their word means."""
        return product

    @property
    def is_real(self) -> NDArray[np.bool_]:
        """(L,) or (documents, longest): whether a document has that position."""
        return np.ones(self.length, dtype=bool)

    def block_diagonal(self, off_diagonal: Array) -> Array:
        """The matrix with this block within documents and 0 across them."""
        return off_diagonal

    @property
    def same_position(self) -> Array:
        """1 for pairs at the same position of two documents, else 0."""
        return np.zeros(())

    @functools.cached_property
    def following_pairs(self) -> Array:
        """(P, P) share of the pairs (i, j) with j = i + 1, scaled to their exact number: at nodes
        one position apart, and beyond these within a class."""
        one = self.one_document
        neighbours = np.diff(one.nodes) == 1
        result = np.diag(neighbours.astype(float), 1)
        in_class = np.append(~neighbours, False)
        in_class[-2] = True
        pairs = np.maximum(np.diagonal(one.pair_count), 0.0)
        several = in_class & (pairs > 0.0)
        result[several, several] = np.minimum(one.count[several] / pairs[several], 1.0)
        result = self.block_diagonal(result)
        total = float(self.is_real.sum() - len(np.atleast_2d(self.is_real)))
        return np.minimum(result * factor_to_total(result * self.pair_count, total), 1.0)

    @property
    def document_counts(self) -> Matrix | None:
        """Number of documents that reach a class, and of documents or pairs of documents that reach
        two; None if all documents have the same length. Attention sums gradients over rows, and
        short documents have none at late positions."""
        return None

    def same_within_and_across(self, matrix: Matrix) -> Matrix:
        """The matrix with this block both within and across documents."""
        return self.joined(*[matrix] * min(len(self.document_lengths), 2))

    def as_one_document(self, sums: Array) -> Array:
        """(..., P) sums over the tokens of each class, all counted as one document's."""
        return sums

    def tiled(self, values: Array) -> Array:
        """(..., nodes) values of one document's classes, repeated for all stored nodes."""
        return values

    @functools.cached_property
    def pair_count(self) -> Array:
        """(P, P) number of ordered pairs of different tokens, scaled to their exact total: then a
        constant averages to itself."""
        pairs = self.count[:, None] * self._earlier_keys
        pairs = pairs + pairs.T
        return np.asarray(pairs * (self.length * (self.length - 1.0) / pairs.sum()))

    @property
    def _earlier_keys(self) -> Array:
        """(P, P) number of keys of each class before a row."""
        return np.asarray(self.causal.key_counts().keys - np.eye(len(self.nodes)))

    def key_counts(self, window: int | None = None) -> KeyCounts:
        """Counts of the keys that each row attends to."""
        return _causal_counts(self, self.length if window is None else min(window, self.length))

    def mean(self, values: Array) -> Array:
        """(...) average of (..., P) values over tokens."""
        return np.asarray((values * self.count).sum(-1) / self.length)

    def mean_of_pairs(self, off_diagonal: Array) -> Array:
        """(...) average of (..., P, P) entries over pairs of different tokens of one sequence."""
        return self.sum_of_pairs(off_diagonal) / max(self.length * (self.length - 1), 1)

    def sum_of_pairs(self, off_diagonal: Array) -> Array:
        """(...) sum of (..., P, P) entries over ordered pairs of different tokens."""
        return np.asarray((off_diagonal * self.pair_count).sum((-2, -1)))

    @functools.cached_property
    def _cells(self) -> tuple[NDArray[np.intp], Array]:
        """`cells_of` all positions."""
        return self.cells_of(np.arange(1, self.length + 1))

    def cells_of(self, positions: NDArray[Any]) -> tuple[NDArray[np.intp], Array]:
        """(n,) index of the last node not behind each position, and the interpolation weight of the
        next node, linear in log position."""
        last = max(len(self.nodes) - 2, 0)
        left = np.minimum(np.searchsorted(self.nodes, positions, side="right") - 1, last)
        logs = np.log(np.append(self.nodes, 2.0 * self.length))
        return left, (np.log(positions) - logs[left]) / (logs[left + 1] - logs[left])

    @functools.cached_property
    def basis(self) -> Array:
        """(P, L) hat functions, piecewise linear in log position: 1 at their node, 0 at others."""
        return self.basis_at(np.arange(1, self.length + 1))

    def basis_at(self, positions: NDArray[Any]) -> Array:
        """(P, n) `basis` at given positions."""
        (left, share), index = self.cells_of(positions), np.arange(len(positions))
        result = np.zeros((len(self.nodes) + 1, len(positions)))
        result[left, index], result[left + 1, index] = 1.0 - share, share
        return result[:-1]

    def cell_means(self, values: Array) -> Array:
        """(P,) means of (L,) values, weighted by each hat function."""
        left, share = self._cells
        sums, sizes = (
            np.bincount(left, (1.0 - share) * one, len(self.nodes) + 1)
            + np.bincount(left + 1, share * one, len(self.nodes) + 1)
            for one in (values, np.ones(self.length))
        )
        return np.asarray(sums[:-1] / sizes[:-1])

    def pair_means(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> Array:
        """(P, P) share of the pairs of different tokens j, l with first[j] == second[l], scaled to
        their exact number."""
        sums = self.pair_sums(first, second)
        return self.from_pair_means(*(scaled_means(*one) for one in sums))

    def from_pair_means(self, *means: Array) -> Array:
        """The off-diagonal matrix of the means over each of `pair_sums`."""
        return means[0]

    def pair_sums(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> list[PairSums]:
        """Count the pairs of different tokens j, l with first[j] == second[l], for each block:
        within a document; with several, across them at different positions and at one position."""
        basis, real = self.one_document.basis, np.atleast_2d(self.is_real)
        weights, longest, documents_at = real + 0.0, real.shape[1], real.sum(0)
        distinct, index = np.unique(np.stack([first, second]), return_inverse=True)
        one, two = np.reshape(index, (2, *real.shape))
        size, values = len(basis), len(distinct)
        offsets = np.arange(size)[:, None] * values

        def histogram(which: NDArray[np.intp], weight: Array) -> Array:
            """(P, values) tokens of each class with each value."""
            flat = (offsets + which).ravel()
            result = np.bincount(flat, (basis * weight).ravel(), size * values)
            return np.asarray(result.reshape(size, values), np.float64)

        sums = [np.zeros((size, values)), np.zeros((size, values))]
        inside, inside_pairs = np.zeros((size, size)), np.zeros((size, size))
        for document, weight in enumerate(weights):
            both = histogram(one[document], weight), histogram(two[document], weight)
            inside += both[0] @ both[1].T
            sums = [total + part for total, part in zip(sums, both, strict=True)]
            tokens = basis @ real[document]
            inside_pairs += np.outer(tokens, tokens)
        same_token = (weights * (one == two)).sum(0)

        # Matches at one position: a code for each (position, value).
        code = np.arange(longest)[None, :] * values
        codes, index = np.unique(np.stack([code + one, code + two]), return_inverse=True)
        left, right = np.reshape(index, (2, *real.shape))
        at_position = np.bincount(left.ravel(), weights.ravel(), len(codes))
        at_position *= np.bincount(right.ravel(), weights.ravel(), len(codes))
        at_position = np.bincount(codes // values, at_position, longest) - same_token

        pairs_at_position = documents_at * (documents_at - 1.0)
        all_pairs = np.outer(basis @ documents_at, basis @ documents_at)
        totals = (
            inside_pairs - (basis * documents_at) @ basis.T,
            all_pairs - inside_pairs - (basis * pairs_at_position) @ basis.T,
            basis @ pairs_at_position,
        )
        matching = (
            inside - (basis * same_token) @ basis.T,
            sums[0] @ sums[1].T - inside - (basis * at_position) @ basis.T,
            basis @ at_position,
        )
        blocks = zip(matching, totals, self._counts_of_blocks, strict=False)
        return [PairSums(*block) for block in blocks]

    @property
    def _counts_of_blocks(self) -> tuple[Array, ...]:
        """Number of pairs in each of `pair_sums`."""
        return (self.pair_count,)

    def at_every_position(self, values: Array) -> Array:
        """(..., L) mean squares at every position, interpolated from (..., P).

        Their logarithms are interpolated: Post-LN gradients fall so fast from one position to the
        next that a cubic of the values would overshoot zero.
        """
        inner = values[..., :-1]
        positive = np.all(inner > 0, axis=-1, keepdims=True)
        at_nodes = np.where(positive, np.log(np.where(positive, inner, 1.0)), inner)
        result = np.empty((*values.shape[:-1], self.length))
        result[..., self.nodes[:-1] - 1] = at_nodes
        for gap, near, weights in _interpolation(tuple(self.nodes.tolist())):
            result[..., gap] = at_nodes[..., near] @ weights
        others = result[..., :-1]
        np.exp(others, out=others, where=positive)
        result[..., -1] = values[..., -1]
        return result


class PairSums(NamedTuple):
    """Numbers of pairs of tokens, (P, P) or (P,).

    Attributes:
        matching: pairs that match, weighted by `PositionClasses.basis`.
        total: all pairs, weighted likewise.
        expected: all pairs, as `pair_count` counts them.
    """

    matching: Array
    total: Array
    expected: Array


@functools.lru_cache(maxsize=16)
def _spaced(length: int, step: float, exact: int, per_octave: float) -> PositionClasses:
    if length <= exact + 2:
        return PositionClasses(length, np.arange(1, length + 1))
    # Steps are limited by the octave and by `step`; all are then rescaled in log to end at L - 1.
    positions, ratio = [float(exact)], 2.0 ** (1.0 / per_octave)
    while positions[-1] < length - 1:
        positions.append(min(positions[-1] * ratio, positions[-1] + step))
    logs = np.log(np.array(positions) / exact)
    rescaled = exact * np.exp(logs * (np.log((length - 1) / exact) / logs[-1]))
    nodes = {*range(1, exact + 1), *np.round(rescaled).astype(int).tolist(), length}
    return PositionClasses(length, np.array(sorted(nodes), np.intp))


@functools.lru_cache(maxsize=16)
def _widening(length: int, per_octave: float, widening: float) -> PositionClasses:
    """Nodes whose steps in log position grow by a constant factor towards the start: most tokens
    are in the last cells, which dominate sums over tokens and the error of averaging rotary keys
    over a cell."""
    octaves = np.log2(length - 1)
    steps = max(round(np.log1p(widening * octaves * per_octave) / np.log1p(widening)), 1)
    distance = np.expm1(np.arange(steps + 1) * np.log1p(widening))
    positions = np.round((length - 1) * 2.0 ** (-octaves * distance / distance[-1])).astype(int)
    return PositionClasses(length, np.array(sorted({1, *positions.tolist(), length}), np.intp))


@dataclass(frozen=True, eq=False)
class BothSides(PositionClasses):
    """Classes of a sequence without a mask, whose rows attend to the keys less than a window away
    on both sides. The nodes of a causal mask serve: rows near either end differ from the others
    over one window."""

    def key_counts(self, window: int | None = None) -> KeyCounts:
        reach = self.length if window is None else min(window, self.length)
        return _bidirectional_counts(self, reach)

    @property
    def causal(self) -> PositionClasses:
        return _nodes(self.length, tuple(self.nodes.tolist()))


@functools.lru_cache(maxsize=16)
def _nodes(length: int, nodes: tuple[int, ...]) -> PositionClasses:
    return PositionClasses(length, np.array(nodes))


@functools.lru_cache(maxsize=16)
def both_sides(one: PositionClasses) -> BothSides:
    """The unmasked classes on these nodes, cached."""
    return BothSides(one.length, one.nodes)


@dataclass(frozen=True, eq=False)
class OneClass(PositionClasses):
    """A single class of exchangeable tokens, whose rows attend to every key: its entries are means
    over tokens and over pairs of different tokens."""

    def basis_at(self, positions: NDArray[Any]) -> Array:
        return np.ones((1, len(positions)))

    def key_counts(self, window: int | None = None) -> KeyCounts:
        return _all_keys(self)


@functools.lru_cache(maxsize=64)
def one_class(length: int) -> OneClass:
    """The class of `length` exchangeable tokens, cached."""
    return OneClass(length, np.array([length]))


@dataclass(frozen=True, eq=False)
class DocumentClasses(PositionClasses):
    """Classes of several documents or sequences that share weights but do not attend to each other.

    Under a causal mask a token depends on its position and not on the length of its document, so
    that all documents share one set of classes. Two documents represent every pair of documents:
    `nodes` lists the nodes twice, and an off-diagonal matrix has the blocks

        [[inside, across], [across, inside]].

    The diagonal of `across` has the pairs at the same position of two documents, which share a row
    of a position table. Its value for two different nearby positions is extrapolated from the
    entries on both sides of the diagonal.

    A value of a class is its mean over the documents that are long enough to reach it.

    Attributes:
        length: number of tokens of all documents.
        one: classes of the longest document.
        lengths: number of tokens of each document.
    """

    one: PositionClasses
    lengths: tuple[int, ...]

    @property
    def one_document(self) -> PositionClasses:
        return self.one

    @property
    def document_lengths(self) -> tuple[int, ...]:
        return self.lengths

    @functools.cached_property
    def documents_per_class(self) -> Array:
        """(P,) number of documents that reach a class, averaged over its positions."""
        return self.one.cell_means(self._documents_at.astype(np.float64))

    @functools.cached_property
    def _documents_at(self) -> NDArray[np.intp]:
        """(longest,) number of documents that reach each position."""
        ends = np.bincount(self.lengths, minlength=self.one.length + 1)
        return np.asarray(len(self.lengths) - np.cumsum(ends)[:-1])

    @functools.cached_property
    def documents_per_pair(self) -> tuple[Array, Array]:
        """(P, P) number of documents that reach both positions, and of ordered pairs of different
        documents, the first of which reaches the first position and the second the second."""
        size = len(self.documents_per_class)
        inside = self.documents_per_class[np.maximum.outer(np.arange(size), np.arange(size))]
        across = np.maximum(
            np.outer(self.documents_per_class, self.documents_per_class) - inside, 0.0
        )
        return inside, np.where(across > LEAST_SHARED * inside, across, 0.0)

    @functools.cached_property
    def _document_pairs_at(self) -> Array:
        """(P,) number of ordered pairs of different documents that both reach a position."""
        return self.one.cell_means(self._documents_at * (self._documents_at - 1.0))

    @functools.cached_property
    def same_position(self) -> Array:
        size = len(self.one.nodes)
        return np.eye(2 * size, k=size) + np.eye(2 * size, k=-size)

    @functools.cached_property
    def _counts(self) -> tuple[Array, Array]:
        """For each of the n document lengths in ascending order: (n, P) tokens of each class in a
        document of that length, and (n,) number of such documents."""
        ends, number = np.unique(self.lengths, return_counts=True)
        sums, last = _Sums(self.one.nodes, self.one.length), len(self.one.nodes) - 1
        return np.array([sums(0, int(end), 0, last) for end in ends]), number.astype(float)

    @functools.cached_property
    def count(self) -> Array:
        counts, number = self._counts
        return np.tile(0.5 * (number @ counts), 2)

    @functools.cached_property
    def inside_count(self) -> Array:
        """(P, P) number of ordered pairs of different tokens of the same document."""
        counts, number = self._counts
        pairs = (number @ counts)[:, None] * self.one._earlier_keys
        lengths = np.array(self.lengths, float)
        pairs = pairs + pairs.T
        return np.asarray(pairs * factor_to_total(pairs, float(lengths @ (lengths - 1.0))))

    @functools.cached_property
    def across_count(self) -> Matrix:
        """Number of ordered pairs of tokens of different documents: at one position (P,), and at
        different positions (P, P)."""
        counts, number = self._counts
        # Pairs within the shorter one's length, and then with the rest of the longer document.
        longer = number.sum() - np.cumsum(number)
        same_position = (number * (number - 1.0 + 2.0 * longer)) @ counts
        pairs = same_position[:, None] * self.one._earlier_keys
        rest = np.cumsum((number[:, None] * counts)[::-1], axis=0)[::-1]
        rest = rest - (longer + number)[:, None] * counts
        pairs += np.einsum("n,np,nq->pq", number, rest, counts)
        return same_position, np.asarray(pairs + pairs.T)

    @functools.cached_property
    def pair_count(self) -> Array:
        diagonal, off_diagonal = self.across_count
        inner = np.diagonal(off_diagonal)
        # Pairs of nearby positions are counted at the entries they are extrapolated from.
        across = off_diagonal - np.diag(inner) + inner[:, None] * self._near_diagonal
        across = 0.5 * (across + across.T) + np.diag(diagonal)
        return 0.5 * np.block([[self.inside_count, across], [across, self.inside_count]])

    @functools.cached_property
    def _near_diagonal(self) -> Array:
        """(P, P) weights that extrapolate a row's entry near the diagonal from its other entries:
        the mean of two extrapolations, linear in log position, from either side."""
        logs, size = np.log(self.one.nodes), len(self.one.nodes)
        result = np.zeros((size, size))
        for node in range(size):
            sides = [
                range(node - 1, max(node - 3, -1), -1),
                range(node + 1, min(node + 3, size - 1)),
            ]
            sides = [side for side in sides if len(side)] or [range(node - 1, node - 2, -1)]
            for side in sides:
                near = np.array(side)
                result[node, near] += lagrange(logs[near], logs[[node]])[:, 0] / len(sides)
        return result

    def mean_of_pairs(self, off_diagonal: Array) -> Array:
        size, count = len(self.one.nodes), self.inside_count
        return np.asarray(
            (off_diagonal[..., :size, :size] * count).sum((-2, -1)) / max(count.sum(), 1.0)
        )

    @functools.cached_property
    def document_counts(self) -> Matrix | None:
        if len(set(self.lengths)) == 1:
            return None
        inside, across = self.documents_per_pair
        return self.joined((self.documents_per_class, inside), (self._document_pairs_at, across))

    def as_one_document(self, sums: Array) -> Array:
        return np.asarray(2.0 * sums[..., : len(self.one.nodes)])

    def tiled(self, values: Array) -> Array:
        return np.concatenate([values, values], axis=-1)

    def mean(self, values: Array) -> Array:
        """(...) average over tokens of (..., 2 P) values, or of (..., P) for both documents."""
        values = np.asarray(values)
        return super().mean(values if values.shape[-1] == len(self.nodes) else np.tile(values, 2))

    def key_counts(self, window: int | None = None) -> KeyCounts:
        return self.one.key_counts(window)

    def blocks(self, diagonal: Array, off_diagonal: Array) -> tuple[Matrix, ...]:
        size = len(self.one.nodes)
        across, index = np.array(off_diagonal[..., :size, size:]), np.arange(size)
        at_one_place = np.array(across[..., index, index])
        across[..., index, index] = 0.0
        across[..., index, index] = (across * self._near_diagonal).sum(-1)
        return (diagonal[..., :size], off_diagonal[..., :size, :size]), (at_one_place, across)

    def joined(self, *blocks: Matrix) -> Matrix:
        (diagonal, inside), (same_position, pairs) = blocks
        index, across = np.arange(len(self.one.nodes)), np.array(pairs)
        across[..., index, index] = same_position
        transposed = np.swapaxes(across, -1, -2)
        top, bottom = (
            np.concatenate(np.broadcast_arrays(*row), axis=-1)
            for row in ((inside, across), (transposed, inside))
        )
        return np.concatenate([diagonal] * 2, axis=-1), np.concatenate([top, bottom], axis=-2)

    def block_diagonal(self, off_diagonal: Array) -> Array:
        zeros = np.zeros_like(off_diagonal)
        return np.block([[off_diagonal, zeros], [zeros, off_diagonal]])

    @functools.cached_property
    def is_real(self) -> NDArray[np.bool_]:
        return np.asarray(np.arange(self.one.length) < np.array(self.lengths)[:, None])

    def cell_means(self, values: Array) -> Array:
        """(2 P,) means of (documents, longest) values over the real positions of each class."""
        sums = self.one.basis @ np.where(self.is_real, values, 0.0).sum(0)
        return np.tile(sums / (self.one.basis @ self._documents_at), 2)

    def from_pair_means(self, *means: Array) -> Array:
        inside, across, same_position = means
        return np.asarray(self.joined((np.diagonal(inside), inside), (same_position, across))[1])

    @property
    def _counts_of_blocks(self) -> tuple[Array, ...]:
        return self.inside_count, self.across_count[1], self.across_count[0]

    def at_every_position(self, values: Array) -> Array:
        """(..., longest) mean squares at every position."""
        return self.one.at_every_position(values[..., : len(self.one.nodes)])


LEAST_SHARED = 1e-9
"""Ratio of document pairs that reach two positions to documents, below which it counts as 0."""


def scaled_means(sums: Array, count: Array, expected: Array) -> Array:
    """`sums` over `count`, rescaled such that sum(means * expected) = sum(sums). A cell of a single
    position has no pairs and takes the mean of its neighbours."""
    usable, total = count > 0.5, float(sums.sum())
    result = np.where(usable, sums / np.where(usable, count, 1.0), 0.0)
    if result.ndim == 2:
        for cell in map(int, np.flatnonzero(~np.diagonal(usable))):
            neighbours = [min(cell + 1, len(result) - 1), max(cell - 1, 0)]
            result[cell, cell] = result[cell, neighbours].mean()
    return result * factor_to_total(result * expected, total)


def factor_to_total(counts: Array, total: float) -> float:
    """The factor that makes counts sum to `total`."""
    result = float(counts.sum())
    return total / result if result > 0.0 else 0.0


@functools.lru_cache(maxsize=16)
def documents_on(one: PositionClasses, lengths: tuple[int, ...]) -> DocumentClasses:
    """The classes of two or more documents of these lengths, cached."""
    return DocumentClasses(sum(lengths), np.tile(one.nodes, 2), one, lengths)


@functools.cache
def _gauss() -> tuple[Array, Array]:
    return np.polynomial.legendre.leggauss(24)


def positions_between(low: int, high: int) -> tuple[Array, Array]:
    """Points and weights of the sum over the positions strictly between two nodes."""
    count = high - low - 1
    if count <= SUMMED:
        return np.arange(low + 1, high, dtype=np.float64), np.ones(max(count, 0))
    points, weights = _gauss()  # of an integral from low + 1/2 to high - 1/2
    half = 0.5 * count
    return 0.5 * (low + high) + half * points, half * weights


def few_points(values: Array, most: int) -> tuple[Array, Array]:
    """Nodes and weights of a Gauss rule for the mean of a smooth function over `values`.

    At most `most` nodes, exact for polynomials of degree 2 most - 1: eigenvalues of the Jacobi
    matrix of the orthogonal polynomials over the values (Golub and Welsch 1969).
    """
    points = np.asarray(values, dtype=np.float64)
    weights = np.full(len(points), 1.0 / len(points))
    if len(points) <= most:
        return points, weights
    centre, size = points.mean(), np.ptp(points) or 1.0
    x = (points - centre) / size
    basis = [np.sqrt(weights)]
    diagonal, secondary = [], []
    for order in range(most):
        vector = x * basis[-1]
        diagonal.append(float(basis[-1] @ vector))
        for earlier in basis:
            vector = vector - (earlier @ vector) * earlier
        secondary.append(float(np.linalg.norm(vector)))
        if order + 1 < most:
            basis.append(vector / secondary[-1])
    jacobi = np.diag(diagonal) + np.diag(secondary[:-1], 1) + np.diag(secondary[:-1], -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return centre + size * nodes, vectors[0] ** 2


def lagrange(nodes: Array, points: Array) -> Array:
    """(nodes, points) Lagrange basis polynomials of the nodes at the points."""
    basis = np.ones((len(nodes), len(points)))
    for i in range(len(nodes)):
        for j in range(len(nodes)):
            if i != j:
                basis[i] *= (points - nodes[j]) / (nodes[i] - nodes[j])
    return basis


def stencil(cell: int, low: int, high: int) -> slice:
    """At most four nodes of low to high around the cell between the nodes `cell` and `cell` + 1; at
    most three if the cell is outside, where a cubic extrapolation would amplify errors."""
    size = min(4 if low <= cell < high else 3, high - low + 1)
    start = min(max(cell - (size - 2) // 2, low), high - size + 1)
    return slice(start, start + size)


@dataclass(frozen=True, eq=False)
class KeyCounts:
    """Counts that turn sums over a row's keys, or over a key's rows, into sums over nodes.

    Under a causal mask the row at node p attends to the keys x_p - window < j <= x_p. A count
    N[.., q] is the integral of the interpolant's basis function at node q over the summed range.
    Where the summand may jump at an end of a range, only nodes on the summed side are used; values
    that belong to a single row are smooth beyond the first key of its window.

    Attributes:
        window: largest number of keys of a row.
        size: (P,) number of keys of each row.
        keys: (P, P) counts [p, q] of the keys of row p.
        shared: (P, P, P) counts [p, s, q] of the keys that rows p and s have in common.
        split: (P, P, P) counts [s, p, q] of the keys of row p, for summands that jump at the ends
            of row s: behind x_s if x_s < x_p, before its first key if x_s > x_p.
        rows: (P, P) counts [q, p] of the rows that attend to key q, for summands ~ 1/size.
        rows_split: (P, P, P) counts [q, r, p] likewise, for summands that jump where rows start or
            stop attending to key r.
        rows_of_pair: (P, P, P) counts [q, r, p] of the rows that attend to both q and r, for
            summands ~ 1/size^2.
        first_key: (P,) index of the first node that is a key of each row.
    """

    classes: PositionClasses
    window: int
    size: Array
    keys: Array
    shared: Array
    split: Array
    rows: Array
    rows_split: Array
    rows_of_pair: Array
    first_key: NDArray[np.intp]

    @functools.cached_property
    def rows_of_pair_diagonal(self) -> Array:
        """(P, P) counts [q, p] of the rows that attend to key q, for summands ~ 1/size^2."""
        return diagonal_of(np.swapaxes(self.rows_of_pair, 0, 2)).T

    @functools.cached_property
    def visible(self) -> NDArray[np.bool_]:
        """(P, P) whether row p has a nonzero count of key q."""
        return np.asarray(self.keys != 0.0)


@functools.lru_cache(maxsize=16)
def _causal_counts(classes: PositionClasses, reach: int) -> KeyCounts:
    """Counts of rows that attend to the `reach` last keys up to themselves."""
    nodes, total = classes.nodes, len(classes.nodes)
    starts = np.maximum(nodes - reach, 0)
    first = np.searchsorted(nodes, starts, "right")  # first node among each row's keys
    last = np.searchsorted(nodes, nodes + reach) - 1  # last node among each key's rows
    sums = _Sums(nodes, reach)
    keys, rows = np.zeros((total, total)), np.zeros((total, total))
    shared, split, later, sending = (np.zeros((total,) * 3) for _ in range(4))
    for p in range(total):
        split[p, p] = keys[p] = sums(starts[p], nodes[p], 0, p)
        rows[p] = sending[p, p] = sums(nodes[p] - 1, nodes[p] + reach - 1, p, last[p], 1)
        for s in range(p + 1):
            common = shared[p, s] = shared[s, p] = sums(starts[p], nodes[s], first[p], s)
            later[p, s] = later[s, p] = sums(nodes[p] - 1, nodes[s] + reach - 1, p, last[s], 2)
            if s == p:
                shared[p, p] = keys[p]
                continue
            behind = max(nodes[s], starts[p]), nodes[p], max(s + 1, first[p]), p
            split[s, p] = common + sums(*behind)
            before = starts[s], min(nodes[s], starts[p]), first[s], min(s, first[p] - 1)
            without_node = before[0] < before[1] and before[2] > before[3]
            split[p, s] = keys[s] if without_node else common + sums(*before)
            begin, end = int(nodes[p]) - 1, int(nodes[s]) + reach - 1
            sending[s, p], sending[p, s] = rows[s], rows[p]
            if begin < end:  # some rows attend to both keys
                common = sums(begin, end, p, last[s], 1)
                sending[s, p] = sums(nodes[s] - 1, begin, s, p - 1, 1) + common
                if last[s] < last[p]:  # else there is no node behind `end`
                    rest = sums(end, nodes[p] + reach - 1, last[s] + 1, last[p], 1)
                    sending[p, s] = common + rest
    size = np.minimum(nodes, reach).astype(float)
    return KeyCounts(classes, reach, size, keys, shared, split, rows, sending, later, first)


@functools.lru_cache(maxsize=64)
def _all_keys(classes: OneClass) -> KeyCounts:
    """Counts of a single class, whose rows attend to every key."""
    size, zero = float(classes.length), np.zeros(1, np.intp)
    pairs, triples = np.full((1, 1), size), np.full((1, 1, 1), size)
    counts = np.array([size]), pairs, triples, triples, pairs, triples, triples
    return KeyCounts(classes, classes.length, *counts, zero)


@functools.lru_cache(maxsize=16)
def _bidirectional_counts(classes: BothSides, reach: int) -> KeyCounts:
    """Counts of rows that attend to both sides: no row ends at a node, so that nothing jumps."""
    nodes, total, length = classes.nodes, len(classes.nodes), classes.length
    starts, ends = np.maximum(nodes - reach, 0), np.minimum(nodes + reach - 1, length)

    def size(position: Any) -> Any:
        return np.minimum(position + reach - 1.0, length) - np.maximum(position - reach, 0.0)

    sums, last = _Sums(nodes, reach, size), total - 1
    spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
    keys, rows = (
        np.array([sums(low, high, 0, last, power) for low, high in spans]) for power in (0, 1)
    )
    shared, later = (np.zeros((total,) * 3) for _ in range(2))
    for p, s in np.ndindex(total, total):
        low, high = max(spans[p][0], spans[s][0]), min(spans[p][1], spans[s][1])
        shared[p, s] = sums(low, high, 0, last)
        later[p, s] = sums(low, high, 0, last, 2)
    cube, zeros = (total, total, total), np.zeros(total, np.intp)
    split, sending = np.broadcast_to(keys, cube), np.broadcast_to(rows[:, None], cube)
    sizes = size(nodes.astype(float))
    return KeyCounts(classes, reach, sizes, keys, shared, split, rows, sending, later, zeros)


class _Sums:
    """Counts of sums over ranges of positions, for one window, cached.

    `size` maps positions to the number of keys of their rows; None: min(position, window).
    """

    def __init__(self, nodes: NDArray[np.intp], window: int, size: Any = None) -> None:
        self._nodes, self._logs = nodes, np.log(nodes)
        self._size = size or functools.partial(np.minimum, window)
        self._positions: list[int] = nodes.tolist()
        self._cells: dict[tuple[int, ...], Array] = {}
        self._sums: dict[tuple[int, ...], Array] = {}

    def __call__(self, low: int, high: int, first: int, last: int, power: int = 0) -> Array:
        """(P,) counts of sum_{low < i <= high} f(i), where f(i) size(i)^power is interpolated
        from the nodes `first` to `last`."""
        key = int(low), min(int(high), self._positions[-1]), first, last, power
        if key not in self._sums:
            self._sums[key] = self._sum(*key)
        return self._sums[key]

    def _sum(self, low: int, high: int, first: int, last: int, power: int) -> Array:
        nodes = self._positions
        counts = np.zeros(len(nodes))
        if low >= high or first > last:
            return counts
        behind = bisect.bisect_right(nodes, low)
        counts[max(first, behind) : min(last + 1, bisect.bisect_right(nodes, high))] = 1.0
        inner = min(last, len(nodes) - 2)
        for cell in range(max(0, behind - 1), len(nodes) - 2):
            if nodes[cell] >= high:
                break
            near = stencil(cell, first, inner)
            ends = max(low, nodes[cell]), min(high + 1, nodes[cell + 1])
            key = near.start, near.stop, *ends, power
            if key not in self._cells:
                points, weights = positions_between(*ends)
                basis = lagrange(self._logs[near], np.log(points)) * weights
                if power:
                    sizes = self._size(self._nodes[near])[:, None]
                    basis = basis * (sizes / self._size(points)) ** power
                self._cells[key] = basis.sum(1)
            counts[near] += self._cells[key]
        return counts


@functools.lru_cache(maxsize=4)
def _interpolation(nodes: tuple[int, ...]) -> list[tuple[slice, slice, Array]]:
    """For each gap between nodes: its positions, the interpolating nodes, and their weights."""
    logs, result = np.log(nodes), []
    for cell, (low, high) in enumerate(itertools.pairwise(nodes)):
        if high > low + 1:
            near = stencil(cell, 0, len(nodes) - 2)
            weights = lagrange(logs[near], np.log(np.arange(low + 1, high)))
            result.append((slice(low, high - 1), near, weights))
    return result


class ClassRows(NamedTuple):
    """Attention weights on classes.

    Attributes:
        weights: (..., P, P) [row, key] to a single key of a class.
    """

    weights: Array
    key_counts: KeyCounts

    @property
    def counted(self) -> Array:
        """(..., P, P) [row, key] to all keys of a class together."""
        return self.key_counts.keys * self.weights


# --- matrices over keys ---------------------------------------------------------------------------

Matrix = tuple[Any, Any]
"""(diagonal, off_diagonal), of shapes (..., P) and (..., P, P)."""


def diagonal_of(matrix: Any) -> Array:
    """(..., P) diagonal of an array (..., P, P) or a `ClassMatrix`."""
    if isinstance(matrix, ClassMatrix):
        return matrix.diagonal
    if matrix.shape[-2:] == (1, 1):
        return np.asarray(matrix[..., 0])
    return np.asarray(matrix.diagonal(axis1=-2, axis2=-1))


class ClassMatrix:
    """A matrix over tokens, stored on classes, with the arithmetic of arrays (..., L, L).

    Classes are blocks of `count` exchangeable tokens here: a row that attends to a fraction of a
    class attends to all of it, with weights reduced by that fraction. Products, transposes and sums
    are then exactly those of one matrix over all tokens, so that a map of kernels and its transpose
    agree. The price is an error of the size of one cell at the edge of a mask.

    Attributes:
        diagonal: (..., nodes) entries of a token with itself.
        off_diagonal: (..., nodes, nodes) entries of two different tokens.
        classes: of a single document, with or without words, or one class.
        same_word_ratio: (..., P, P) for attention weights on a text, the ratio of the joint weight
            of two keys of the same word to that of two different words; None otherwise.
    """

    __array_ufunc__ = None

    def __init__(
        self,
        diagonal: Array,
        off_diagonal: Array,
        classes: PositionClasses,
        crowded: Array | None = None,
    ) -> None:
        if diagonal.shape != off_diagonal.shape[:-1] or len(set(off_diagonal.shape[-2:])) > 1:
            shape = np.broadcast_shapes(diagonal.shape[:-1], off_diagonal.shape[:-2])
            size = off_diagonal.shape[-1]
            diagonal = np.broadcast_to(diagonal, (*shape, size))
            off_diagonal = np.broadcast_to(off_diagonal, (*shape, size, size))
        self.diagonal, self.off_diagonal = diagonal, off_diagonal
        self.classes, self.same_word_ratio = classes, crowded

    @classmethod
    def of_rows(
        cls,
        rows: Array,
        key_counts: KeyCounts,
        classes: PositionClasses,
        crowded: Array | None = None,
    ) -> ClassMatrix:
        """Attention weights as a matrix, of `rows` (..., P, P): weights to a single visible key."""
        count, inside = key_counts.classes.count, np.diagonal(rows, axis1=-2, axis2=-1)
        off_diagonal, seen = rows * key_counts.keys / count, np.diagonal(key_counts.keys)
        several = count > 1.5
        neighbours = (seen - 1.0) / np.where(several, count - 1.0, 1.0)
        index = np.arange(len(count))
        off_diagonal[..., index, index] = np.where(
            several, inside * neighbours, inside * seen / count
        )
        diagonal = np.where(several, inside, off_diagonal[..., index, index])
        return cls(*classes.same_within_and_across((diagonal, off_diagonal)), classes, crowded)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.off_diagonal.shape

    @property
    def size(self) -> int:
        return int(self.off_diagonal.size)

    def astype(self, kind: Any) -> ClassMatrix:
        crowded = None if self.same_word_ratio is None else self.same_word_ratio.astype(kind)
        return ClassMatrix(
            self.diagonal.astype(kind), self.off_diagonal.astype(kind), self.classes, crowded
        )

    def transposed(self) -> ClassMatrix:
        return ClassMatrix(self.diagonal, np.swapaxes(self.off_diagonal, -1, -2), self.classes)

    def total(self) -> Array:
        """(...) sum of all entries."""
        return np.asarray((self.row_sums() * self.classes.count).sum(-1))

    def row_sums(self) -> Array:
        """(..., P) sums over the second token."""
        return self.classes.tiled(self.excess + self.mean @ self.classes.one_document.count)

    def trace(self) -> Array:
        return np.asarray((self.diagonal * self.classes.count).sum(-1))

    @functools.cached_property
    def mean(self) -> Array:
        """(..., P, P) mean entry of two different tokens of two classes."""
        return self.classes.word_mean(self.off_diagonal)

    @functools.cached_property
    def excess(self) -> Array:
        """(..., P) diagonal entry minus the entry of two different tokens of the class."""
        return np.asarray(self.diagonal[..., : self.mean.shape[-1]] - diagonal_of(self.mean))

    @functools.cached_property
    def counted(self) -> Array:
        """(..., P, P) `mean` times the number of tokens of the first class."""
        return np.asarray(self.classes.one_document.count[:, None] * self.mean)

    def __getitem__(self, index: Any) -> ClassMatrix:
        return ClassMatrix(self.diagonal[index], self.off_diagonal[index], self.classes)

    def __len__(self) -> int:
        return len(self.off_diagonal)

    def __array__(self, *_: Any, **__: Any) -> Array:
        raise TypeError("a matrix on classes is no array: apply functions of entries `entrywise`")

    def __matmul__(self, other: Any) -> Any:
        excess, mean = self.excess, self.mean
        if not isinstance(other, ClassMatrix):  # columns (..., P, n)
            columns = np.asarray(other)[..., : mean.shape[-1], :]
            result = excess[..., None] * columns + mean @ (
                self.classes.one_document.count[:, None] * columns
            )
            return np.swapaxes(self.classes.tiled(np.swapaxes(result, -1, -2)), -1, -2)
        off_diagonal = excess[..., :, None] * other.mean + mean * other.excess[..., None, :]
        off_diagonal = off_diagonal + mean @ other.counted
        product = excess * other.excess + diagonal_of(off_diagonal), off_diagonal
        return ClassMatrix(*self.classes.word_product(product, self, other), self.classes)

    def _with(self, other: Any, operation: Any) -> ClassMatrix:
        if isinstance(other, ClassMatrix):
            return ClassMatrix(
                operation(self.diagonal, other.diagonal),
                operation(self.off_diagonal, other.off_diagonal),
                self.classes,
            )
        return ClassMatrix(
            operation(self.diagonal, diagonal_factor(other)),
            operation(self.off_diagonal, other),
            self.classes,
        )

    __add__ = __radd__ = functools.partialmethod(_with, operation=np.add)
    __sub__ = functools.partialmethod(_with, operation=np.subtract)
    __mul__ = __rmul__ = functools.partialmethod(_with, operation=np.multiply)
    __truediv__ = functools.partialmethod(_with, operation=np.divide)

    def __pow__(self, power: int) -> ClassMatrix:
        return ClassMatrix(self.diagonal**power, self.off_diagonal**power, self.classes)

    def __rsub__(self, other: Any) -> Any:
        return self * -1.0 + other


def diagonal_factor(other: Any) -> Any:
    """The diagonal of a factor (..., P or 1, P or 1) of off-diagonal entries."""
    other = np.asarray(other)
    if other.ndim < 2:
        return other
    if other.shape[-1] == 1:
        return other[..., 0]
    return other[..., 0, :] if other.shape[-2] == 1 else diagonal_of(other)
