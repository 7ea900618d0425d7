"""Joint laws of two rows: kinds of pairs of keys, a row with itself, the scaling of a law.

By token and on classes of keys alike: counts are one by token. In a text two keys may be of one
word, a kind of pairs besides that of two words (`Mixture`). A law is scaled to given means over
either key, by factors of its keys (Sinkhorn), and so are its derivatives (`Sums`); a row's law with
itself is solved for (`own_response`). See docs/theory/attention.md, The closure, and
docs/theory/state.md, Classes of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import Matrix, diagonal_of
from .row_statistics import AttentionRows

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
ByRelation = list[Matrix]
"""A matrix over keys by kinds of pairs: what a key has with itself beyond, and pairs of each."""
Diagonal = Callable[[Array], Array]
"""What a matrix of two ranges of keys has where they are one key."""

EXPONENT_MAX = 40.0
"""Cap on exponents: reached only beyond the tables of exact rows, where nothing is claimed."""

JOINT_SWEEPS = 3
"""Sinkhorn sweeps of the joint law of two rows."""

TANGENT_SWEEPS = 6
"""Sweeps that bring the means of its derivative to 0."""


class Mixture(NamedTuple):
    """Pairs of keys of one kind, or of two: of two words, and of one.

    A matrix over keys with entries by kind multiplies as two without, its parts: its means over
    cells, by the counts of those, and what pairs of one word have beyond those of two, by the
    counts of that word's other tokens. Since these are few, the diagonal is counted by itself
    there, and stands for all that a token has with itself beyond two words.

    Of the first kind a token with itself is one whose word is read once. Of two documents no token
    is in both, and two at one place stand for it: of one word, as in texts that begin alike, or of
    two, which are of the first kind, and so is one word that each document reads once.

    Attributes:
        share: (n, k) of pairs that are of one word; None: nothing distinguishes pairs.
        read_again: of tokens, those whose word is read again.
        coincidence: (o,) of pairs at one place of two documents that are of one word; None: of one.
    """

    share: Array | None
    read_again: float = 0.0
    coincidence: Array | None = None

    @property
    def portions(self) -> list[float]:
        """Of tokens, by how often their word is read: once, and again."""
        return [1.0] if self.share is None else [1.0 - self.read_again, self.read_again]

    @property
    def levels(self) -> list[float]:
        """Share of the other tokens that are of a token's word, by that of all pairs."""
        if self.share is None:
            return [1.0]
        return [0.0, 1.0 / self.read_again if self.read_again > 0.0 else 0.0]

    def weighed(self, relations: Sequence[Array]) -> list[Array]:
        """(..., n, k) what sums over all pairs count of each kind."""
        if self.share is None:
            return list(relations)
        return [(1.0 - self.share) * relations[0], self.share * relations[1]]

    def mean(self, values: Sequence[Array], level: float = 1.0) -> Array:
        """(..., n, k) over all pairs of what two words have and one; or over those of a token whose
        word is `level` times as frequent as in all."""
        if self.share is None:
            return values[0]
        others, same = values
        share = self.share if level == 1.0 else np.minimum(level * self.share, 1.0)
        return np.asarray(others + share * (same - others))

    def mean_of(self, relations: ByRelation, diagonal_of: Diagonal = diagonal_of) -> Matrix:
        """Over all pairs, and over tokens."""
        if self.share is None:
            return relations[0]
        first, second = self.weighed([one for _, one in relations])
        pairs = first + second
        alone: Any = sum(self.of_tokens([excess + diagonal_of(one) for excess, one in relations]))
        return alone - diagonal_of(pairs), pairs

    def of_tokens(self, wholes: Sequence[Array]) -> list[Array]:
        """(..., o) what sums over tokens, or over pairs at one place, count of each kind."""
        if self.share is None:
            return list(wholes)
        return [(1.0 - self._met) * wholes[0], self._met * wholes[1]]

    @property
    def _met(self) -> Any:
        """(o,) of tokens, or of pairs at one place, those of one word that is read again."""
        if self.coincidence is None:
            return self.read_again
        return np.minimum(self.coincidence, self.read_again)

    @property
    def often(self) -> Any:
        """(o,) how often a token of a repeated word meets its word at its place."""
        return self._met / max(self.read_again, 1e-300)

    def wholes(self, diagonals: Sequence[Array]) -> list[Array]:
        """Of every kind what a kernel has of a token with itself, or of two at one place that are
        two words, and one."""
        if self.share is None:
            return [diagonals[0]]
        if self.coincidence is None:
            return [diagonals[0]] * 2
        first = 1.0 - self._met
        once = np.maximum(self.coincidence - self._met, 0.0) / np.where(first > 0.0, first, 1.0)
        return [diagonals[0] + once * (diagonals[1] - diagonals[0]), diagonals[1]]

    # --- parts that multiply by themselves ------------------------------------------------------

    def parts_of(
        self, diagonals: Sequence[Array], values: Sequence[Array], diagonal_of: Diagonal
    ) -> list[Matrix]:
        """A kernel: `diagonals` as `wholes` takes them, and of two words and of one."""
        whole = diagonals[0]
        if self.share is None:
            return [(whole - diagonal_of(values[0]), values[0])]
        mean, more = self.mean(values), values[1] - values[0]
        if self.coincidence is None:
            return [(whole - diagonal_of(mean), mean), (whole - diagonal_of(values[0]), more)]
        together = diagonals[1] - whole
        whole = whole + self.coincidence * together
        excess = self.often * (together - diagonal_of(more))
        return [(whole - diagonal_of(mean), mean), (excess, more)]

    def parts(self, relations: ByRelation, diagonal_of: Diagonal = diagonal_of) -> list[Matrix]:
        """A matrix of both kinds."""
        if self.share is None:
            return relations
        (_, others), (excess, same) = relations
        beyond = same - others
        return [self.mean_of(relations, diagonal_of), (excess + diagonal_of(beyond), beyond)]

    def joined(self, parts: Sequence[Matrix], alone: Array, placed: Any = 0.0) -> ByRelation:
        """The matrix of such parts, diagonals being those beyond pairs of one word; of a token
        whose word is read once, `alone`; and of two words at one place, `placed`."""
        if self.share is None:
            return [parts[0]]
        (_, mean), (excess, beyond) = parts
        others = mean - self.share * beyond
        if self.coincidence is not None:
            often = self.often
            excess = placed + excess / np.where(often > 0.0, often, 1.0)
        return [(alone, others), (excess, others + beyond)]


ALIKE = Mixture(None)


def bounded_exp(exponent: ByRelation, diagonal_of: Diagonal, factor: Array | None) -> ByRelation:
    """exp of a token's and of pairs' exponents times a factor per matrix, or of them as they are,
    which then are written over."""
    result = []
    for excess, inside in exponent:
        whole = excess + diagonal_of(inside)
        if factor is not None:
            whole, inside = factor[..., 0] * whole, factor * inside
        np.exp(np.minimum(inside, EXPONENT_MAX, out=inside), out=inside)
        result.append((np.exp(np.minimum(whole, EXPONENT_MAX)) - diagonal_of(inside), inside))
    return result


class WordAgreement(NamedTuple):
    """How the words of two keys agree.

    A cell may hold more of one word than repeated words make up of the text, and then more of its
    tokens are of such. So whether two keys' words are repeated agrees beyond chance in 1 - `free`
    of pairs: no more than leaves no word negative, (1 - same) / (1 - portion) of either.
    Of a key's own cell of n tokens one is that key, and this holds of the n - 1 others.

    Attributes:
        same: (n, k) of the keys that one of a repeated word meets in a cell those of its word.
        free: (n, k) of pairs of two cells, those that do not depend on each other; None: all.
        free_common: (c, o) the same of two keys of one cell.
        of_others: (n, k) one over the part of pairs that are of two words.
    """

    same: Array
    free: Array | None
    free_common: Array
    of_others: Array

    @classmethod
    def of(
        cls, mixture: Mixture, common: tuple[slice, slice], counts: tuple[Array, Array]
    ) -> WordAgreement:
        """Args:
        mixture: of kinds of pairs of keys.
        common: keys of both among those of either.
        counts: (c, o) tokens that either row attends to of these.
        """
        assert mixture.share is not None
        (once, again), (_, level) = mixture.portions, mixture.levels
        same = np.minimum(level * mixture.share, 1.0)
        result = np.minimum(1.0 / max(again, 1e-300), (1.0 - same) / max(once, 1e-300))
        of_cell = on_diagonal(result[None, common[0], common[1]])
        others = 1.0 - 1.0 / np.maximum(np.minimum(*counts), 1.0)
        free_common = np.minimum(of_cell * others, 1.0)
        of_cell[...] = 1.0
        free = None if result.min() >= 1.0 else np.minimum(result, 1.0)
        return cls(same, free, free_common, 1.0 / np.maximum(1.0 - again * same, LEAST_OTHERS))


class Maps(NamedTuple):
    """A law by whether a key's word is read again (T = 2; 1 without words), as what takes values of
    keys to sums of them.

    All stand in one array, and both of its readings are views: with small arrays the calls are what
    costs.

    Attributes:
        pairs: (T, c, n, k) of two words, and what one word has beyond by its share of the other
            tokens; (T + 1, c, n, k) where words agree beyond chance, with what they have beyond.
        one, two: (T, c, o) of a token with itself beyond both, times its weight in either row; and
            of two words in one cell where they agree, times the cell's weight.
    """

    pairs: Array
    one: Array
    two: Array


class Sums(NamedTuple):
    """Sums over the keys of either row of laws of pairs of rows.

    Attributes:
        mixture: of kinds of pairs of keys.
        common_first, common_second: keys of both among those of either.
        first, second: (c, n) and (c, k) weights of classes.
        one, two: (c, o) of one token, on keys of both.
        aims_first, aims_second: (c, n, T) and (c, k, T) what means over the other key are to be, of
            keys whose word is read once and again.
        agreement: of keys of two words and of one; None: of one kind.
    """

    mixture: Mixture
    common_first: slice
    common_second: slice
    first: Array
    second: Array
    one: Array
    two: Array
    aims_first: Array
    aims_second: Array
    agreement: WordAgreement | None

    @classmethod
    def of(
        cls,
        mixture: Mixture,
        common: tuple[slice, slice],
        weights: tuple[Array, Array],
        of_one: tuple[Array, Array],
        aims: tuple[Array, Array],
    ) -> Sums:
        """Args: as the attributes, of the first and of the second key."""
        agreement = None
        if mixture.share is not None:
            counts = [
                np.where(one > 0.0, whole[:, keys] / np.where(one > 0.0, one, 1.0), np.inf)
                for whole, keys, one in zip(weights, common, of_one, strict=True)
            ]
            agreement = WordAgreement.of(mixture, common, (counts[0], counts[1]))
        return cls(mixture, *common, *weights, *of_one, *aims, agreement)

    def at_common(self, pairs: Array) -> Array:
        """(c, o) entries of keys of both, to be written to."""
        return on_diagonal(pairs[:, self.common_first, self.common_second])

    def over_first(
        self, law: ByRelation, sweeps: int, begin: Array | None = None
    ) -> tuple[ByRelation, Array]:
        """The law scaled so that its means over either key are `aims_first` and `aims_second`, over
        those of the first key, and the first key's factors.

        Args:
            law: not yet scaled.
            sweeps: of the scaling.
            begin: the factors of a law next to it.
        """
        left, right = self._factors_by_word(self._maps_by_word(law), sweeps, begin)
        aims = np.where(left > 0.0, self._aims[0], 1.0)
        return self._times(law, self._products((left / aims)[None], right[None])), left

    def balanced_with(
        self, law: ByRelation, sweeps: int, directions: Sequence[ByRelation]
    ) -> tuple[ByRelation, list[ByRelation]]:
        """The law scaled so that its means over either key are `aims_first` and `aims_second`
        (Sinkhorn); and of it law o (direction + u 1^T + 1 v^T) whose means over either key are 0:
        its spectrum in [-1, 1] makes the sweeps contract.

        Directions are written over.

        Args:
            law: not yet scaled.
            sweeps: of the scaling.
            directions: of a key of both, all that it has with itself, and of two keys.
        """
        maps = self._maps_by_word(law)
        aims = self._aims
        left, right = self._factors_by_word(maps, sweeps)
        products = self._products(left[None], right[None])
        if not directions:
            return self._times(law, products), []
        over_left, over_right = (
            one / np.where(aim > 0.0, aim, 1.0)
            for one, aim in zip((left, right), aims, strict=True)
        )
        wholes = [excess + self.at_common(pairs) for excess, pairs in law]
        rows, columns = (np.empty((len(directions), *one.shape)) for one in (left, right))
        for k, direction in enumerate(directions):
            for whole, (_, pairs), (excess, along) in zip(wholes, law, direction, strict=True):
                along *= pairs
                excess *= whole
            moved = [(excess - self.at_common(along), along) for excess, along in direction]
            along_maps = self._maps_by_word(moved)
            sums = self._over_second(along_maps, right), self._over_first(along_maps, left)
            rows[k], columns[k] = -over_left * sums[0], -over_right * sums[1]
        u, v = _shifts(
            rows,
            columns,
            lambda v: over_left * self._over_second(maps, right * v),
            lambda u: over_right * self._over_first(maps, left * u),
        )
        tangents = []
        for k, direction in enumerate(directions):
            shifts = self._products(np.stack([left * u[k], left]), np.stack([right, right * v[k]]))
            tangent = []
            for whole, (_, pairs), (excess, along), factors, shift in zip(
                wholes, law, direction, products, shifts, strict=True
            ):
                excess *= factors[0]
                excess += whole * shift[0]
                along *= factors[1]
                shift[1][...] *= pairs
                along += shift[1]
                tangent.append((excess - self.at_common(along), along))
            tangents.append(tangent)
        return self._times(law, products), tangents

    # --- by whether a key's word is read again ---------------------------------------------------

    def _maps_by_word(self, law: ByRelation) -> Maps:
        if self.agreement is None:
            ((excess, pairs),) = law
            return Maps(pairs[None], (excess * self.one)[None], (excess * self.two)[None])
        same, free, free_common, _ = self.agreement
        (alone, others), (beyond, together) = law
        pairs = np.empty((2 if free is None else 3, *others.shape))
        excess = np.empty((2, *alone.shape))
        pairs[0], excess[0] = others, alone
        more = np.subtract(together, others, out=pairs[-1])
        whole = beyond + self.at_common(more)
        if self.mixture.coincidence is not None:  # what stands at its place of another document
            whole = alone + self.mixture.often * (whole - alone)
        more *= same
        np.subtract(whole, self.at_common(more), out=excess[1])
        if free is not None:
            pairs[0] *= free
            np.subtract(others, pairs[0], out=pairs[1])
            more += pairs[1]
        of_cell = self.at_common(pairs[0])
        agreeing_common = of_cell * (1.0 - free_common)
        of_cell -= agreeing_common
        one = excess * self.one + agreeing_common * self.first[:, self.common_first]
        two = excess * self.two + agreeing_common * self.second[:, self.common_second]
        return Maps(pairs, one, two)

    def _over_second(self, maps: Maps, values: Array) -> Array:
        """(..., T, c, n) of (..., T, c, k)."""
        total = self._summed(maps.pairs, self.second * values)
        total[..., self.common_first] += maps.two * values[..., self.common_second]
        return total

    def _over_first(self, maps: Maps, values: Array) -> Array:
        """(..., T, c, k) of (..., T, c, n)."""
        total = self._summed(np.swapaxes(maps.pairs, -1, -2), self.first * values)
        total[..., self.common_second] += maps.one * values[..., self.common_first]
        return total

    def _summed(self, pairs: Array, given: Array) -> Array:
        """Of values by their tokens: two words meet those of both kinds, and one its own."""
        if self.agreement is None:
            return np.asarray((pairs @ given[..., None])[..., 0])
        agreeing = len(pairs) > 2
        if agreeing:
            given = np.concatenate([given[..., :1, :, :], given], axis=-3)
        once, again = self.mixture.portions
        given[..., 0, :, :] *= once
        given[..., 0, :, :] += again * given[..., -1, :, :]
        total = np.asarray((pairs @ given[..., None])[..., 0])
        total[..., 1:, :, :] += total[..., :1, :, :]
        return total[..., agreeing:, :, :]

    @property
    def _aims(self) -> tuple[Array, Array]:
        return self.aims_first.transpose(2, 0, 1), self.aims_second.transpose(2, 0, 1)

    def _factors_by_word(
        self, maps: Maps, sweeps: int, begin: Array | None = None
    ) -> tuple[Array, Array]:
        """(T, c, n) and (T, c, k)."""
        aims = self._aims
        left, right = np.ones(aims[0].shape) if begin is None else begin, aims[1]
        for _ in range(sweeps):
            right = aims[1] / np.maximum(self._over_first(maps, left), 1e-300)
            left = aims[0] / np.maximum(self._over_second(maps, right), 1e-300)
        return left, right

    def _products(self, left: Array, right: Array) -> list[tuple[Array, Array]]:
        """(c, o) and (c, n, k) of every kind: factors of one token, and their means over pairs,
        summed over those of (r, T, c, n) and (r, T, c, k)."""
        portions = np.reshape(self.mixture.portions, (-1, 1, 1))

        def outer(one: Array, two: Array) -> Array:
            if len(one) == 1:
                return np.asarray(one[0, :, :, None] * two[0, :, None, :])
            return np.asarray(one.transpose(1, 2, 0) @ two.transpose(1, 0, 2))

        shared = (left[..., self.common_first] * right[..., self.common_second]).sum(0)
        others = outer((left * portions).sum(1), (right * portions).sum(1))
        if self.agreement is None:
            return [(shared[0], others)]
        same, free, free_common, of_others = self.agreement
        once, again = self.mixture.portions
        both = outer(left[:, 1], right[:, 1])
        # of two words: of any, and of those that agree in being read again, less those of one word
        if free is not None:
            agreed = once * outer(left[:, 0], right[:, 0]) + again * both
            others += (1.0 - free) * (agreed - others)
        of_cell = self.at_common(others)
        of_cell += (1.0 - free_common) * ((portions * shared).sum(0) - of_cell)
        others -= (again * same) * both
        others *= of_others
        alone = shared if self.mixture.coincidence is None else map(self.at_common, (others, both))
        return [(np.array(one), pairs) for one, pairs in zip(alone, (others, both), strict=True)]

    def _times(self, law: ByRelation, factors: list[tuple[Array, Array]]) -> ByRelation:
        result = []
        for (excess, pairs), (alone, both) in zip(law, factors, strict=True):
            both *= pairs
            result.append(((excess + self.at_common(pairs)) * alone - self.at_common(both), both))
        return result


LEAST_OTHERS = 0.05
"""Share of pairs of two words below which they count no more: there are hardly any. Chosen."""


def _shifts(
    rows: Array,
    columns: Array,
    over_second: Callable[[Array], Array],
    over_first: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """u and v that bring means to 0 which lack `rows` and `columns` of it; from the third sweep on
    what is left of a change may be rounding."""
    u, v = rows, np.zeros_like(columns)
    for sweep in range(TANGENT_SWEEPS):
        if sweep:
            u = rows - over_second(v)
        last, v = v, columns - over_first(u)
        if sweep > 1 and np.abs(v - last).max(initial=0.0) <= 1e-12 * np.abs(v).max(initial=0.0):
            break
    return u, v


TOLERANCE = 2e-5
"""Largest change of an overlap at which its iteration ends."""

ITERATIONS = 30
"""Most steps to a self-consistent overlap."""

SELF_SWEEPS = 2
"""Sinkhorn sweeps within a step of that iteration, from the last step's factors on."""


def own_response(
    sums: Sums,
    diagonal: Array,
    relations: Sequence[Array],
    counts: Sequence[Array],
    seen: NDArray[np.bool_],
    prior: Array,
    reference: AttentionRows,
    logit_scale: float,
) -> tuple[list[Matrix], Array]:
    """1 - A of rows with themselves, by the parts of `Mixture`, and of words that are read once.

    Solves A = F/w, F = w w^T o exp(exponent (1 - A) C (1 - A)^T) scaled to the marginals w.

    Args:
        sums: over the keys of a row, twice.
        diagonal: (n,) C of a key with itself.
        relations: (c, n, n) C of two keys, of two words and of one.
        counts: (c, n) what sums over keys count, by part.
        seen: (c, n) the keys of every row.
        prior: (c, n) weight of a key's token where logits vanish.
        reference: (c,) of these rows.
        logit_scale: per unit of their temperature.
    """
    mixture, weights, keys = sums.mixture, sums.one, counts[0]
    strength, step = reference.strength, reference.step
    steady = step  # the first step, and the least
    pull = reference.odds * logit_scale * reference.temperature * reference.variance_kept
    # one key is all of its row, whatever its logit
    pull = np.where(reference.keys > 1.0, pull, 0.0)
    mask = seen.astype(float)
    both = mask[:, :, None] * mask[:, None, :]
    parts = mixture.parts_of([diagonal], relations, diagonal_of)
    counted = []  # C by its counts
    for count, (excess, pairs) in zip(counts, parts, strict=True):
        counted.append(count[:, :, None] * pairs)
        entries = on_diagonal(counted[-1])
        entries += excess
    top, along = max(diagonal.max(), *(one.max() for one in relations)), pull[:, None, None]
    guesses = [np.exp(along * (one - top)) for one in relations]
    of_pairs, alone = mixture.mean(guesses), np.exp(pull[:, None] * (diagonal - top))
    total = np.einsum("pr,pqr->pq", keys * prior, of_pairs)
    total += prior * (alone - diagonal_of(of_pairs))
    result = []
    for guess in guesses:
        excess = np.where(seen, prior * (alone - diagonal_of(guess)) / total, 0.0)
        result.append((excess, both * (prior[:, None, :] * guess / total[:, :, None])))
    exponent = along / np.maximum(strength, 1e-6)[:, None, None] ** 2
    last, balance = None, None
    for _ in range(ITERATIONS):
        # (1 - A) C (1 - A)^T, of every part A = (excess, pairs): `product` twice, in place
        projected = []
        for part, (excess, pairs) in enumerate(mixture.parts(result)):
            response, diagonal_excess = 1.0 - excess, parts[part][0]
            middle = response[:, :, None] * parts[part][1]
            middle -= pairs @ counted[part]
            middle_diagonal = response * diagonal_excess
            moved = middle * counts[part][:, None, :]
            entries = on_diagonal(moved)
            entries += middle_diagonal
            moved = moved @ np.swapaxes(pairs, -1, -2)
            middle *= response[:, None, :]
            single: Array | float = 0.0
            if part > 0:
                single = response**2 * diagonal_of(parts[part][1])
                single = single - 2.0 * middle_diagonal * diagonal_of(pairs)
            whole = middle_diagonal * response - single
            projected.append((whole, np.subtract(middle, moved, out=moved)))
        read_once = (1.0 - result[0][0]) ** 2 * (diagonal - diagonal_of(relations[0]))
        joint = mixture.joined(projected, read_once)
        joint = bounded_exp(joint, diagonal_of, exponent)
        for excess, pairs in joint:
            excess *= mask
            pairs *= both
        joint, balance = sums.over_first(joint, SELF_SWEEPS, balance)
        changes = []
        for (excess, pairs), before in zip(joint, result, strict=True):
            pairs *= weights[:, None, :]
            pairs -= before[1]
            excess *= weights
            changes.append(excess - before[0])
        change = np.stack(changes)
        if last is not None:  # the step that would have cancelled the last change (Irons and Tuck)
            turned = last - change
            counted_turn = keys * turned
            size = (counted_turn * turned).sum((0, 2))
            moved = step * (counted_turn * last).sum((0, 2)) / np.maximum(size, 1e-30)
            step = np.minimum(np.maximum(moved, steady), 1.0)
        last = change
        largest = 0.0
        for kind, (excess, pairs) in enumerate(result):
            largest = max(largest, np.abs(changes[kind]).max())
            largest = max(largest, joint[kind][1].max(), -joint[kind][1].min())
            joint[kind][1][...] *= step[:, None, None]
            result[kind] = excess + step[:, None] * changes[kind], pairs + joint[kind][1]
        if largest < TOLERANCE:
            break
    maps = [(mask * (1.0 - excess), both * -pairs) for excess, pairs in mixture.parts(result)]
    return maps, mask * (1.0 - result[0][0])


def times(matrices: Array, values: Array) -> Array:
    """(c, n) or (c, n, d) of matrices (c, n, k) and values (c, k) or (c, k, d)."""
    if values.ndim == 2:
        return np.asarray((matrices @ values[:, :, None])[..., 0])
    return np.asarray(matrices @ values)


def on_diagonal(matrices: Array) -> Array:
    """(c, o) of (c, o, o), to be written to."""
    if matrices.flags.c_contiguous:
        return matrices.reshape(len(matrices), -1)[:, :: matrices.shape[2] + 1]
    view: Array = np.einsum("cqq->cq", matrices)
    return view


# --- two rows of different statistics -------------------------------------------------------------

RHO_MIN = 1e-3
"""Where the ratio of two excesses is taken at a node nearer to 0, their common zero."""


def geometric_mean(first: Array, second: Array) -> Array:
    """Of two numbers of one sign, with that sign; the arithmetic mean of others."""
    product = first * second
    size = np.sign(first) * np.sqrt(np.maximum(product, 0.0))
    return np.where(product > 0.0, size, 0.5 * (first + second))
