"""Positions of a text on classes, where two tokens of two cells are the same word or two.

What two tokens have in common takes two values, [[K, S], [S, .]], of two different words and of
one; cells share a word in s of their pairs, so that sums over pairs count K by 1 - s and S by s.
See docs/theory/repeats.md.
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
"""Other tokens of a pair's word, where there are fewer: counts that nothing divides by."""


def repeated_words(shares: NDArray[Any], portions: NDArray[Any]) -> tuple[float, float]:
    """What part of the tokens is of a repeated word, all of these being as frequent, and how
    frequent: so that a token meets its word as often, and a pair of one word a third of it.

    Args:
        shares: of every word, what of the other tokens are of it.
        portions: and what of all.
    """
    total, cubes = float(shares @ portions), float(shares**2 @ portions)
    return (total**2 / cubes, cubes / total) if cubes > 0.0 else (0.0, 0.0)


@dataclass(frozen=True, eq=False)
class TextClasses(PositionClasses):
    """Of one text, or of several: `nodes` are those of other classes twice, tokens counted once.

    Attributes:
        share: (P, P) of pairs of different tokens of two cells that are one word.
        read_again: of tokens, those whose word is read again.
        others: of a document's tokens, those of a pair's word besides that pair.
        others_across: the same of pairs of two documents.
        ids: (L,) the text, or (documents, longest); None: Zipf's law.
    """

    one: PositionClasses
    share: Array
    read_again: float
    others: float
    others_across: float
    ids: NDArray[np.int64] | None = None

    @property
    def causal(self) -> PositionClasses:
        return self.one.causal

    @property
    def inside(self) -> PositionClasses:
        return self.one.inside

    @property
    def ends(self) -> tuple[int, ...]:
        return self.one.ends

    @property
    def there(self) -> NDArray[np.bool_]:
        return self.one.there

    @functools.cached_property
    def size(self) -> int:
        """Nodes of `one`."""
        return len(self.one.nodes)

    @functools.cached_property
    def count(self) -> Array:
        return np.concatenate([self.one.count, np.zeros(self.size)])

    def key_counts(self, window: int | None = None) -> KeyCounts:
        return self.one.key_counts(window)

    def mean(self, values: Array) -> Array:
        """Of (..., 2 P), or of the first (..., P) of them."""
        return self.one.mean(np.asarray(values)[..., : self.size])

    def as_one_document(self, sums: Array) -> Array:
        return self.one.as_one_document(sums[..., : self.size])

    def within(self, off_diagonal: Array) -> Array:
        return np.tile(self.one.within(off_diagonal), (2, 2))

    def spread_out(self, values: Array) -> Array:
        return self.one.spread_out(values[..., : self.size])

    @property
    def documents(self) -> Matrix | None:
        counts = self.one.documents
        return (
            None
            if counts is None
            else (self._twice(counts[0]), self.of_relations(*[counts[1]] * 2))
        )

    @functools.cached_property
    def pair_count(self) -> Array:
        others, same = (self.one.pair_count * part for part in (1.0 - self.share, self.share))
        return np.block([[others, 0.5 * same], [0.5 * same, np.zeros_like(same)]])

    @functools.cached_property
    def one_word(self) -> Array:
        """(2 P, 2 P) 1 for tokens of one word, else 0."""
        return self.of_relations(np.zeros_like(self.share), np.ones_like(self.share))

    @functools.cached_property
    def at_one_place(self) -> Array:
        placed = self.one.at_one_place + 0.0 * self.share
        return self.of_relations(placed, placed)

    @functools.cached_property
    def following_pairs(self) -> Array:
        result = self.of_relations(self.one.following_pairs, self.one.following_pairs)
        total = float(self.length - len(self.ends))
        return np.minimum(result * factor_to_total(result * self.pair_count, total), 1.0)

    def mean_of_pairs(self, off_diagonal: Array) -> Array:
        return self.one.mean_of_pairs(self._over_words(off_diagonal))

    @functools.cached_property
    def shares(self) -> tuple[Matrix, ...]:
        """`share` in one document and in two, own parts being those of pairs at one place."""
        result = self.one.blocks(np.zeros(self.size), self.share)
        # Of two documents a cell with itself is read off its neighbours, which may lead beyond.
        return tuple((diagonal, np.clip(share, 0.0, 1.0)) for diagonal, share in result)

    @functools.cached_property
    def most_of_a_cell(self) -> float:
        """What of a cell's tokens can be of one word, by its frequency in the text: as often as it,
        its tokens' share is the most that all pairs of one word have, and at most 1."""
        return self.read_again or 1.0

    @functools.cached_property
    def crowded(self) -> float:
        """Mean over rows of how many pairs of their keys are of one word beyond that."""
        inside, size = self.one.inside, len(self.one.inside.nodes)
        beyond = np.maximum(self.share[:size, :size] - self.most_of_a_cell, 0.0)
        keys = inside.key_counts().keys
        keys = keys / keys.sum(1, keepdims=True)
        return float(inside.mean(np.einsum("pq,qr,pr->p", keys, beyond, keys)))

    def repeated(self, values: Array) -> Array:
        return self._twice(self.one.repeated(values))

    def _twice(self, values: Array) -> Array:
        return np.concatenate([values, values], axis=-1)

    def by_relation(self, off_diagonal: Array) -> tuple[Array, Array]:
        """(..., P, P) of two words and of one."""
        size = self.size
        return off_diagonal[..., :size, :size], off_diagonal[..., :size, size:]

    def of_relations(self, others: Array, same: Array) -> Array:
        """(..., 2 P, 2 P) of these."""
        others, same = np.broadcast_arrays(others, same)
        top, bottom = (np.concatenate(row, axis=-1) for row in ((others, same), (same, others)))
        return np.concatenate([top, bottom], axis=-2)

    def _over_words(self, off_diagonal: Array) -> Array:
        """(..., P, P) means over cells."""
        others, same = self.by_relation(off_diagonal)
        return np.asarray(others + self.share * (same - others))

    def blocks(self, diagonal: Array, off_diagonal: Array) -> tuple[Matrix, ...]:
        """Of means over cells."""
        return self.one.blocks(diagonal[..., : self.size], self._over_words(off_diagonal))

    @functools.cached_property
    def of_one(self) -> TextClasses:
        if len(self.ends) == 1:
            return self
        one, (_, share) = self.inside, self.shares[0]
        counts = self.read_again, self.others, self.others_across
        return TextClasses(one.length, np.tile(one.nodes, 2), one, share, *counts)

    def alone(self, diagonal: Array, off_diagonal: Array) -> Matrix:
        if len(self.ends) == 1:
            return diagonal, off_diagonal
        inside, _, alike, _ = self.blocks_by_relation(diagonal, off_diagonal)
        return self.of_one.joined(inside, alike)

    def between(self, diagonal: Array, off_diagonal: Array) -> Matrix | None:
        if len(self.ends) == 1:
            return None
        (_, (coincidence, across)), inside = self.shares, self.of_one
        _, (placed, others), _, (together, same) = self.blocks_by_relation(diagonal, off_diagonal)
        # As many words are shared across as inside, and the mean is what it was.
        beyond = same - others
        others = others + (across - inside.share) * beyond
        diagonal = placed + coincidence * (together - placed)
        return inside.joined((diagonal, others), (diagonal, others + beyond))

    def word_mean(self, off_diagonal: Array) -> Array:
        return self._over_words(off_diagonal)

    def word_product(self, product: Matrix, one: ClassMatrix, other: ClassMatrix) -> Matrix:
        """By parts: what a token has with itself beyond two words stands by itself. Rows of
        attention give two keys of one word less, multiplied from the left, X = w C w^T, or from
        the right, w^T R w."""
        (diagonal, off_diagonal), share, count = product, self.share, self.inside.count
        (first, left), (second, right) = (self._beyond(matrix) for matrix in (one, other))
        beyond = first[..., :, None] * right + left * second[..., None, :]
        beyond = beyond + left @ ((self.others * count)[:, None] * right)
        if one.crowded is not None:
            less = ((one.crowded - 1.0) * one.mean) @ (count[:, None] * share * right)
            diagonal, off_diagonal = diagonal + diagonal_of(less), off_diagonal + less
        if other.crowded is not None:
            given = count[:, None] * other.mean
            root = np.sqrt((given * other.crowded).sum(-2) / given.sum(-2))
            beyond = beyond + (root[..., :, None] * root[..., None, :] - 1.0) * off_diagonal
        others = off_diagonal - share * beyond
        # Of a token with itself the other one is of its word for both, or for neither.
        spread = share * (1.0 - share) * (count - np.eye(len(count)))
        alone = diagonal + (left * spread * np.swapaxes(right, -1, -2)).sum(-1)
        return self._twice(alone), self.of_relations(others, others + beyond)

    def _beyond(self, matrix: ClassMatrix) -> Matrix:
        """What a token has with itself, and with others of its word, beyond two words."""
        others, same = self.by_relation(matrix.off_diagonal)
        return matrix.diagonal[..., : self.size] - diagonal_of(others), same - others

    def blocks_by_relation(self, diagonal: Array, off_diagonal: Array) -> tuple[Matrix, ...]:
        """Of two words, and then of one."""
        single = diagonal[..., : self.size]
        return tuple(
            block
            for kind in self.by_relation(off_diagonal)
            for block in self.one.blocks(single, kind)
        )

    def joined(self, *blocks: Matrix) -> Matrix:
        """Of matrices of both kinds, or of means over cells, in which one word is as two."""
        every = min(len(self.ends), 2)
        diagonal, others = self.one.joined(*blocks[:every])
        _, same = self.one.joined(*blocks[-every:])
        return self._twice(diagonal), self.of_relations(others, same)

    def cell_means(self, values: Array) -> Array:
        return self._twice(self.one.cell_means(values))

    @functools.cached_property
    def _of_one_word(self) -> list[tuple[PairSums, Array]]:
        """Of the classes' kinds of pairs, those of one word, and their share."""
        assert self.ids is not None
        result = self.one.pair_sums(self.ids, self.ids)
        return [(one, np.clip(scaled_means(*one), 0.0, 1.0)) for one in result]

    def pair_means(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> Array:
        assert self.ids is not None
        _, words = np.unique(self.ids, return_inverse=True)
        _, codes = np.unique(np.stack([first, second]), return_inverse=True)
        words = np.reshape(words, self.ids.shape)
        one, two = np.reshape(codes, (2, *first.shape)) * (int(words.max()) + 1)
        others, same = [], []
        for (matching, count, expected), (alike, *_), (of_word, share) in zip(
            self.one.pair_sums(first, second),
            self.one.pair_sums(one + words, two + words),
            self._of_one_word,
            strict=True,
        ):
            others.append(
                scaled_means(matching - alike, count - of_word.matching, expected * (1.0 - share))
            )
            same.append(scaled_means(alike, of_word.matching, expected * share))
        return self.of_relations(self.one.from_pair_means(*others), self.one.from_pair_means(*same))


def text_classes(one: PositionClasses, ids: NDArray[np.int64]) -> TextClasses:
    """Of a text (L,), or of several (documents, longest)."""
    share = np.clip(one.pair_means(ids, ids), 0.0, 1.0)
    there = np.atleast_2d(one.there)
    read, document = np.atleast_2d(ids)[there], np.nonzero(there)[0]
    (words, where), count = np.unique([read, document], axis=1, return_counts=True)
    ends, tokens = there.sum(1).astype(float), float(len(read))
    # Of the words of every document: what of its other tokens are of each, and how many elsewhere.
    shares = (count - 1.0) / (ends[where] - 1.0)
    _, word = np.unique(words, return_inverse=True)
    elsewhere = count * (np.bincount(word, count)[word] - count)
    often = shares if shares.any() else elsewhere / (count * tokens)
    repeated, frequent = repeated_words(often, count / tokens)
    length = float(ends @ ends) / tokens
    others = max(frequent * (length - 1.0) - 1.0, LEAST) / max(length - 2.0, LEAST)
    across = float(shares @ elsewhere) / max(float(elsewhere.sum()), 1.0)
    across = max(across, LEAST / length)
    nodes = np.tile(one.nodes, 2)
    return TextClasses(one.length, nodes, one, share, repeated, others, across, ids)


@functools.lru_cache(maxsize=16)
def zipf_classes(one: PositionClasses, vocab_size: int) -> TextClasses:
    """Of words that are drawn by Zipf's law."""
    size = len(one.nodes)
    portions = 1.0 / np.arange(1.0, vocab_size + 1.0)
    portions = portions / portions.sum()
    collision = float(portions @ portions)
    share = np.full((size, size), collision)
    repeated, others = repeated_words(portions, portions)
    return TextClasses(one.length, np.tile(one.nodes, 2), one, share, repeated, others, others)
