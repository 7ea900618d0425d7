"""Classes of positions of a text, where pairs of the same word differ from pairs of two words.

An off-diagonal entry takes two values, K for two different words and S for the same word, stored as
the blocks [[K, S], [S, K]]. A share s of the pairs of two cells are the same word, so that sums
over pairs weight K by 1 - s and S by s. See docs/theory/repeats.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .classes import (
    Array,
    ClassMatrix,
    KeyCounts,
    Matrix,
    PairSums,
    PositionClasses,
    diagonal_of,
    factor_to_total,
    scaled_means,
)

LEAST = 1e-3
"""Lower bound of counts that are divided by."""


def repeated_words(shares: NDArray[Any], portions: NDArray[Any]) -> tuple[float, float]:
    """Fit a text in which some tokens are of equally frequent repeated words, the rest unique.

    The probabilities that a pair, and that a triple of tokens is one word are preserved.

    Args:
        shares: (words,) share of a token's other tokens that are of each word.
        portions: (words,) share of all tokens that are of each word.

    Returns:
        The share of tokens of repeated words, and the frequency of each repeated word.
    """
    total, cubes = float(shares @ portions), float(shares**2 @ portions)
    return (total**2 / cubes, cubes / total) if cubes > 0.0 else (0.0, 0.0)


@dataclass(frozen=True, eq=False)
class TextClasses(PositionClasses):
    """Classes of one or several texts. `nodes` has those of `one` twice; tokens are counted once.

    Attributes:
        one: the classes of positions, without words.
        share: (P, P) share of the pairs of different tokens that are the same word.
        repeated_share: share of tokens whose word is repeated.
        same_word_share: share of a document's other tokens that are of the same word as a
            same-word pair.
        same_word_share_across: likewise for same-word pairs of two documents.
        ids: (L,) or (documents, longest) token ids of the text; None: words by Zipf's law.
    """

    one: PositionClasses
    share: Array
    repeated_share: float
    same_word_share: float
    same_word_share_across: float
    ids: NDArray[np.int64] | None = None

    @property
    def causal(self) -> PositionClasses:
        return self.one.causal

    @property
    def one_document(self) -> PositionClasses:
        return self.one.one_document

    @property
    def document_lengths(self) -> tuple[int, ...]:
        return self.one.document_lengths

    @property
    def is_real(self) -> NDArray[np.bool_]:
        return self.one.is_real

    @functools.cached_property
    def size(self) -> int:
        """Number of nodes of `one`."""
        return len(self.one.nodes)

    @functools.cached_property
    def count(self) -> Array:
        return np.concatenate([self.one.count, np.zeros(self.size)])

    def key_counts(self, window: int | None = None) -> KeyCounts:
        return self.one.key_counts(window)

    def mean(self, values: Array) -> Array:
        """(...) average over tokens of (..., 2 P) or of the first (..., P) values."""
        return self.one.mean(np.asarray(values)[..., : self.size])

    def as_one_document(self, sums: Array) -> Array:
        return self.one.as_one_document(sums[..., : self.size])

    def block_diagonal(self, off_diagonal: Array) -> Array:
        return np.tile(self.one.block_diagonal(off_diagonal), (2, 2))

    def at_every_position(self, values: Array) -> Array:
        return self.one.at_every_position(values[..., : self.size])

    @property
    def document_counts(self) -> Matrix | None:
        counts = self.one.document_counts
        if counts is None:
            return None
        return self._twice(counts[0]), self.from_word_blocks(counts[1], counts[1])

    @functools.cached_property
    def pair_count(self) -> Array:
        different, same = (self.one.pair_count * part for part in (1.0 - self.share, self.share))
        return np.block([[different, 0.5 * same], [0.5 * same, np.zeros_like(same)]])

    @functools.cached_property
    def same_word(self) -> Array:
        """(2 P, 2 P) 1 for pairs of the same word, else 0."""
        return self.from_word_blocks(np.zeros_like(self.share), np.ones_like(self.share))

    @functools.cached_property
    def same_position(self) -> Array:
        same_position = self.one.same_position + 0.0 * self.share
        return self.from_word_blocks(same_position, same_position)

    @functools.cached_property
    def following_pairs(self) -> Array:
        result = self.from_word_blocks(self.one.following_pairs, self.one.following_pairs)
        total = float(self.length - len(self.document_lengths))
        return np.minimum(result * factor_to_total(result * self.pair_count, total), 1.0)

    def mean_of_pairs(self, off_diagonal: Array) -> Array:
        return self.one.mean_of_pairs(self.word_mean(off_diagonal))

    @functools.cached_property
    def shares(self) -> tuple[Matrix, ...]:
        """`share` within documents and, with several, across them."""
        result = self.one.blocks(np.zeros(self.size), self.share)
        # Entries near the diagonal of the block across documents are extrapolated.
        return tuple((diagonal, np.clip(share, 0.0, 1.0)) for diagonal, share in result)

    @functools.cached_property
    def largest_same_word_share(self) -> float:
        """Largest share of same-word pairs in a cell: that of tokens of repeated words, else 1."""
        return self.repeated_share or 1.0

    @functools.cached_property
    def crowded(self) -> float:
        """Share of pairs of keys of one word beyond `largest_same_word_share`, mean over rows."""
        inside, size = self.one.one_document, len(self.one.one_document.nodes)
        beyond = np.maximum(self.share[:size, :size] - self.largest_same_word_share, 0.0)
        keys = inside.key_counts().keys
        keys = keys / keys.sum(1, keepdims=True)
        return float(inside.mean(np.einsum("pq,qr,pr->p", keys, beyond, keys)))

    def tiled(self, values: Array) -> Array:
        return self._twice(self.one.tiled(values))

    def _twice(self, values: Array) -> Array:
        return np.concatenate([values, values], axis=-1)

    def by_word(self, off_diagonal: Array) -> tuple[Array, Array]:
        """(..., P, P) entries of different-word and of same-word pairs."""
        size = self.size
        return off_diagonal[..., :size, :size], off_diagonal[..., :size, size:]

    def from_word_blocks(self, different: Array, same: Array) -> Array:
        """(..., 2 P, 2 P) matrix of the entries of different-word and of same-word pairs."""
        different, same = np.broadcast_arrays(different, same)
        rows = (different, same), (same, different)
        top, bottom = (np.concatenate(row, axis=-1) for row in rows)
        return np.concatenate([top, bottom], axis=-2)

    def word_mean(self, off_diagonal: Array) -> Array:
        different, same = self.by_word(off_diagonal)
        return np.asarray(different + self.share * (same - different))

    def blocks(self, diagonal: Array, off_diagonal: Array) -> tuple[Matrix, ...]:
        """Split the word means by document, as `PositionClasses.blocks`."""
        return self.one.blocks(diagonal[..., : self.size], self.word_mean(off_diagonal))

    @functools.cached_property
    def one_document_with_words(self) -> TextClasses:
        if len(self.document_lengths) == 1:
            return self
        one, (_, share) = self.one_document, self.shares[0]
        counts = self.repeated_share, self.same_word_share, self.same_word_share_across
        return TextClasses(one.length, np.tile(one.nodes, 2), one, share, *counts)

    def within_block(self, diagonal: Array, off_diagonal: Array) -> Matrix:
        if len(self.document_lengths) == 1:
            return diagonal, off_diagonal
        different, _, same, _ = self.blocks_by_word(diagonal, off_diagonal)
        return self.one_document_with_words.joined(different, same)

    def across_block(self, diagonal: Array, off_diagonal: Array) -> Matrix | None:
        if len(self.document_lengths) == 1:
            return None
        (_, (share_at_position, share)), inside = self.shares, self.one_document_with_words
        _, (at_position, different), _, (same_at_position, same) = self.blocks_by_word(
            diagonal, off_diagonal
        )
        # `inside` weights same-word pairs by its own share: keep the mean over words.
        excess = same - different
        different = different + (share - inside.share) * excess
        diagonal = at_position + share_at_position * (same_at_position - at_position)
        return inside.joined((diagonal, different), (diagonal, different + excess))

    def word_product(self, product: Matrix, left: ClassMatrix, right: ClassMatrix) -> Matrix:
        """Multiplies separately the excess over different-word entries of the diagonal and of
        same-word entries. `crowded` corrects attention weights w, left of w C or right of R w."""
        (diagonal, off_diagonal), share, count = product, self.share, self.one_document.count
        left_diagonal, left_excess = self._excess(left)
        right_diagonal, right_excess = self._excess(right)
        excess = left_diagonal[..., :, None] * right_excess
        excess = excess + left_excess * right_diagonal[..., None, :]
        excess = excess + left_excess @ ((self.same_word_share * count)[:, None] * right_excess)
        if left.same_word_ratio is not None:
            change = ((left.same_word_ratio - 1.0) * left.mean) @ (
                count[:, None] * share * right_excess
            )
            diagonal, off_diagonal = diagonal + diagonal_of(change), off_diagonal + change
        if right.same_word_ratio is not None:
            weights = count[:, None] * right.mean
            root = np.sqrt((weights * right.same_word_ratio).sum(-2) / weights.sum(-2))
            excess = excess + (root[..., :, None] * root[..., None, :] - 1.0) * off_diagonal
        different = off_diagonal - share * excess
        # In a diagonal entry, an intermediate token is the same word in both factors or in neither.
        spread = share * (1.0 - share) * (count - np.eye(len(count)))
        diagonal = diagonal + (left_excess * spread * np.swapaxes(right_excess, -1, -2)).sum(-1)
        return self._twice(diagonal), self.from_word_blocks(different, different + excess)

    def _excess(self, matrix: ClassMatrix) -> Matrix:
        """Excess of the diagonal and of same-word entries over different-word entries."""
        different, same = self.by_word(matrix.off_diagonal)
        return matrix.diagonal[..., : self.size] - diagonal_of(different), same - different

    def blocks_by_word(self, diagonal: Array, off_diagonal: Array) -> tuple[Matrix, ...]:
        """Split into the blocks of different-word pairs, then those of same-word pairs."""
        single = diagonal[..., : self.size]
        different, same = self.by_word(off_diagonal)
        return *self.one.blocks(single, different), *self.one.blocks(single, same)

    def joined(self, *blocks: Matrix) -> Matrix:
        """Assemble a matrix from `blocks_by_word`, or from `blocks` for both kinds of pairs."""
        count = min(len(self.document_lengths), 2)
        diagonal, different = self.one.joined(*blocks[:count])
        _, same = self.one.joined(*blocks[-count:])
        return self._twice(diagonal), self.from_word_blocks(different, same)

    def cell_means(self, values: Array) -> Array:
        return self._twice(self.one.cell_means(values))

    @functools.cached_property
    def _same_word_pairs(self) -> list[tuple[PairSums, Array]]:
        """Numbers of same-word pairs, and their shares, for each of `pair_sums`."""
        assert self.ids is not None
        result = self.one.pair_sums(self.ids, self.ids)
        return [(one, np.clip(scaled_means(*one), 0.0, 1.0)) for one in result]

    def pair_means(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> Array:
        assert self.ids is not None
        _, words = np.unique(self.ids, return_inverse=True)
        _, codes = np.unique(np.stack([first, second]), return_inverse=True)
        words = np.reshape(words, self.ids.shape)
        one, two = np.reshape(codes, (2, *first.shape)) * (int(words.max()) + 1)
        matching = self.one.pair_sums(first, second)
        matching_words = self.one.pair_sums(one + words, two + words)
        different, same = [], []
        for block, same_word, (pairs, share) in zip(
            matching, matching_words, self._same_word_pairs, strict=True
        ):
            matches = block.matching - same_word.matching
            expected = block.expected * (1.0 - share), block.expected * share
            different.append(scaled_means(matches, block.total - pairs.matching, expected[0]))
            same.append(scaled_means(same_word.matching, pairs.matching, expected[1]))
        means = (self.one.from_pair_means(*one) for one in (different, same))
        return self.from_word_blocks(*means)


def text_classes(one: PositionClasses, ids: NDArray[np.int64]) -> TextClasses:
    """Classes of a text (L,), or of several (documents, longest)."""
    share = np.clip(one.pair_means(ids, ids), 0.0, 1.0)
    real = np.atleast_2d(one.is_real)
    text, document = np.atleast_2d(ids)[real], np.nonzero(real)[0]
    (words, where), count = np.unique([text, document], axis=1, return_counts=True)
    lengths, tokens = real.sum(1).astype(float), float(len(text))
    # For each word of each document: share of its document's other tokens, and number of pairs
    # with tokens of other documents.
    shares = (count - 1.0) / (lengths[where] - 1.0)
    _, word = np.unique(words, return_inverse=True)
    elsewhere = count * (np.bincount(word, count)[word] - count)
    frequency = shares if shares.any() else elsewhere / (count * tokens)
    read_again, frequent = repeated_words(frequency, count / tokens)
    length = float(lengths @ lengths) / tokens
    others = max(frequent * (length - 1.0) - 1.0, LEAST) / max(length - 2.0, LEAST)
    across = float(shares @ elsewhere) / max(float(elsewhere.sum()), 1.0)
    across = max(across, LEAST / length)
    nodes = np.tile(one.nodes, 2)
    return TextClasses(one.length, nodes, one, share, read_again, others, across, ids)


@functools.lru_cache(maxsize=16)
def zipf_classes(one: PositionClasses, vocab_size: int) -> TextClasses:
    """Classes of a text whose words are drawn by Zipf's law."""
    size = len(one.nodes)
    portions = 1.0 / np.arange(1.0, vocab_size + 1.0)
    portions = portions / portions.sum()
    collision = float(portions @ portions)
    share = np.full((size, size), collision)
    repeated, others = repeated_words(portions, portions)
    return TextClasses(one.length, np.tile(one.nodes, 2), one, share, repeated, others, others)
