"""Positions of a text on classes, where two tokens of two cells are the same word or two.

Tokens of one row of the embedding's table begin alike, and where logits are strong rows look at all
of them: their weights multiply, as no mean over a cell tells. So what two tokens have in common
takes two values,

    [[K, S], [S, .]],    of two different words, and of one,

where cells share a word in s of their pairs of tokens. Every entrywise map meets both by
itself; sums over pairs count K by 1 - s and S by s. A matrix M over tokens that does so,

    M_jl = K + (S - K) e_jl,    e_jl = 1 where j and l are one word,

has means over cells (1 - s) K + s S, which multiply as matrices of `classes` do, and beside them
what tokens of one word have beyond others: sum_l e_jl e_lk = n_j e_jk with n_j the tokens of that
word in the cell, so that excesses multiply by themselves, D D' = n (S - K)(S' - K') with n, of the
words that pairs are of, in place of a cell's count. What frequent words have beyond rarer ones in
these sums is left out.

See docs/theory/state.md, Classes of positions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .classes import Array, Matrix, PositionClasses, TwiceClasses, as_many, few_points, to_total

WORDS = 1
"""Frequencies that stand for those of the words that pairs of tokens are of. Of Llama's layers at
512 and 1024 tokens of Zipf's law two move the mean gradient by 2.5 % where it enters, weights'
gradients by 1.2 % and correlations by .001."""

LEAST = 1e-3
"""Other tokens of a pair's word, where there are fewer: counts that nothing divides by. A tenth and
ten times as many move no such prediction by 1e-4."""


class Frequencies(NamedTuple):
    """Words by how frequent they are: those that are read once, and a Gauss rule for the rest.

    Attributes:
        level: (T,) share of the other tokens that are of a token's word, by that of all pairs.
        portion: (T,) of the tokens.
        of_pairs: (T,) of the pairs of tokens of one word.
    """

    level: Array
    portion: Array
    of_pairs: Array

    @classmethod
    def of(cls, shares: NDArray[Any], portions: NDArray[Any], size: int = WORDS) -> Frequencies:
        """From those of every word: what of the other tokens are of it, and of all."""
        several, where = np.unique(shares, return_inverse=True)
        weights = np.bincount(where, shares * portions)
        total = weights.sum()
        if not total > 0.0:
            return cls(np.zeros(1), np.ones(1), np.zeros(1))
        held = several > 0.0
        nodes, rule = few_points(several[held], size, weights[held] / total)
        portion = total * rule / nodes
        rest = max(1.0 - portion.sum(), 0.0)
        return cls(np.append(0.0, nodes / total), np.append(rest, portion), np.append(0.0, rule))


@dataclass(frozen=True, eq=False)
class TextClasses(TwiceClasses):
    """Of one text.

    Attributes:
        share: (P, P) of pairs of different tokens of two cells that are one word.
        frequencies: of its words.
        others: (T - 1, P) of the tokens of a cell, those of a pair's word besides that pair, by its
            frequency.
        ids: (L,) the text; None: Zipf's law.
    """

    share: Array
    frequencies: Frequencies
    others: Array
    ids: NDArray[np.int64] | None = None

    @property
    def causal(self) -> PositionClasses:
        return self.one.causal

    @functools.cached_property
    def pair_count(self) -> Array:
        others, same = (self.one.pair_count * part for part in (1.0 - self.share, self.share))
        return np.block([[others, 0.5 * same], [0.5 * same, np.zeros_like(same)]])

    @functools.cached_property
    def one_word(self) -> Array:
        """(2 P, 2 P) 1 for tokens of one word, else 0."""
        return self.of_kinds(np.zeros_like(self.share), np.ones_like(self.share))

    @functools.cached_property
    def following_pairs(self) -> Array:
        found = self.within(self.one.following_pairs)
        total = float(self.length - 1)
        return np.minimum(found * to_total(found * self.pair_count, total), 1.0)

    def repeated(self, values: Array) -> Array:
        return np.concatenate([values, values], axis=-1)

    def kinds(self, pairs: Array) -> tuple[Array, Array]:
        """(..., P, P) of two words and of one."""
        size = self.size
        return pairs[..., :size, :size], pairs[..., :size, size:]

    def of_kinds(self, others: Array, same: Array) -> Array:
        """(..., 2 P, 2 P) of these."""
        others, same = np.broadcast_arrays(others, same)
        turned = np.swapaxes(same, -1, -2)
        top, bottom = (np.concatenate(row, axis=-1) for row in ((others, same), (turned, others)))
        return np.concatenate([top, bottom], axis=-2)

    def blocks(self, own: Array, pairs: Array) -> tuple[Matrix, ...]:
        """One matrix of means over cells."""
        others, same = self.kinds(pairs)
        return ((own[..., : self.size], others + self.share * (same - others)),)

    def told_apart(self, own: Array, pairs: Array) -> tuple[Matrix, ...]:
        """Of two words, and of one."""
        single = own[..., : self.size]
        others, same = self.kinds(pairs)
        return (single, others), (single, same)

    def joined(self, *blocks: Matrix) -> Matrix:
        """Of matrices of both kinds, or of one of means over cells, in which one word is as two."""
        own = blocks[0][0]
        return self.repeated(own), self.of_kinds(blocks[0][1], blocks[-1][1])

    def cell_means(self, values: Array) -> Array:
        return self.repeated(self.one.cell_means(values))

    def pair_means(
        self, first: NDArray[np.int64], second: NDArray[np.int64], weights: Array | None = None
    ) -> Array:
        assert self.ids is not None
        found, pairs = self.one.pair_sums(first, second, weights)
        _, words = np.unique(self.ids, return_inverse=True)
        _, codes = np.unique(np.concatenate([first, second]), return_inverse=True)
        one, two = np.split(codes * (int(words.max()) + 1), 2)
        alike, _ = self.one.pair_sums(one + words, two + words, weights)
        same, _ = self.one.pair_sums(self.ids, self.ids)
        counted = self.one.pair_count
        others = as_many(found - alike, pairs - same, counted * (1.0 - self.share))
        return self.of_kinds(others, as_many(alike, same, counted * self.share))


def text_classes(one: PositionClasses, ids: NDArray[np.int64]) -> TextClasses:
    """Of a text (L,)."""
    share = np.clip(one.pair_means(ids, ids), 0.0, 1.0)
    length = one.length
    _, word, count = np.unique(ids, return_inverse=True, return_counts=True)
    shares = (count - 1.0) / (length - 1.0)
    frequencies = Frequencies.of(shares, count / length)
    total = float(shares @ count) / length
    often = frequencies.level[1:] * total * (length - 1.0) - 1.0
    # Where in the text the words of pairs stand: each as often as there are pairs of it, and others.
    each = (count - 1.0) * np.maximum(count - 2.0, 0.0)
    where = one.cell_means(each[word])
    mean = float(each @ count) / length
    where = where / mean if mean > 0.0 else np.ones_like(where)
    others = np.maximum(often[:, None] / (length - 2.0) * where, LEAST / (length - 2.0))
    return TextClasses(length, np.tile(one.nodes, 2), one, share, frequencies, others, ids)


@functools.lru_cache(maxsize=16)
def zipf_classes(one: PositionClasses, vocab_size: int) -> TextClasses:
    """Of words that are drawn by Zipf's law."""
    size = len(one.nodes)
    portions = 1.0 / np.arange(1.0, vocab_size + 1.0)
    portions = portions / portions.sum()
    collision = float(portions @ portions)
    share = np.full((size, size), collision)
    frequencies = Frequencies.of(portions, portions)
    others = np.tile(frequencies.level[1:, None] * collision, size)
    return TextClasses(one.length, np.tile(one.nodes, 2), one, share, frequencies, others)
