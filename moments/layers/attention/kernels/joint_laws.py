"""Joint laws F/(w w') of two attention rows: scaling to given marginals, a row with itself.

Used by token (counts are 1) and on classes of positions. In a text two keys are either different
words or the same word; matrices over keys have one block per relation (`Mixture`). `Sums` scales a
law to given means over either key (Sinkhorn), and its derivatives likewise; `softmax_response`
solves for the law of a row with itself. See docs/theory/attention.md, The closure, and
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
"""(excess, off-diagonal) matrices over keys, one per relation: any two keys, or different words and
the same word. The excess is added to the off-diagonal entries for a key with itself."""
Diagonal = Callable[[Array], Array]
"""Reads the entries of a matrix over two ranges of keys at which both keys are the same."""

EXPONENT_MAX = 40.0
"""Cap on exponents: reached only beyond the tables of exact rows, where nothing is claimed."""

JOINT_SWEEPS = 3
"""Sinkhorn sweeps of the joint law of two rows."""

TANGENT_SWEEPS = 6
"""Sweeps that bring the means of the derivative to 0."""


class Mixture(NamedTuple):
    """Relations of two keys: any two, or different words and the same word.

    A matrix over keys with entries by relation multiplies as two ordinary matrices, its parts: the
    mean over relations, with the counts of all tokens, and the difference of the same word from
    different words, with the counts of other occurrences of that word. Because these are few, the
    second part has a diagonal of its own: the whole difference of a token with itself from two
    different words.

    The diagonal of the first relation belongs to tokens whose word occurs once, that of the second
    to tokens of repeated words. Between two documents, which share no token, the diagonal belongs
    to two tokens at the same position: the second relation if these are the same repeated word,
    else the first.

    Attributes:
        share: (n, k) fraction of pairs that are the same word; None: words are not distinguished.
        repeated: fraction of tokens whose word occurs more than once.
        coincidence: (o,) fraction of pairs at the same position of two documents that are the same
            word; None within one document.
    """

    share: Array | None
    repeated: float = 0.0
    coincidence: Array | None = None

    @property
    def portions(self) -> list[float]:
        """Fractions of tokens whose word occurs once and more than once."""
        return [1.0] if self.share is None else [1.0 - self.repeated, self.repeated]

    @property
    def levels(self) -> list[float]:
        """Frequency of a token's word among other tokens over its mean, for words that occur once
        and repeated ones."""
        if self.share is None:
            return [1.0]
        return [0.0, 1.0 / self.repeated if self.repeated > 0.0 else 0.0]

    def weighed(self, relations: Sequence[Array]) -> list[Array]:
        """(..., n, k) values per relation, times the fraction of pairs that have it."""
        if self.share is None:
            return list(relations)
        return [(1.0 - self.share) * relations[0], self.share * relations[1]]

    def mean(self, relations: Sequence[Array], level: float = 1.0) -> Array:
        """(..., n, k) mean over relations, for a word `level` times as frequent as on average."""
        if self.share is None:
            return relations[0]
        different, same = relations
        share = self.share if level == 1.0 else np.minimum(level * self.share, 1.0)
        return np.asarray(different + share * (same - different))

    def mean_of(self, relations: ByRelation, diagonal_of: Diagonal = diagonal_of) -> Matrix:
        """Mean of a matrix over relations: excess, off-diagonal."""
        if self.share is None:
            return relations[0]
        first, second = self.weighed([matrix for _, matrix in relations])
        mean = first + second
        wholes = [excess + diagonal_of(matrix) for excess, matrix in relations]
        diagonal: Any = sum(self.of_tokens(wholes))
        return diagonal - diagonal_of(mean), mean

    def of_tokens(self, wholes: Sequence[Array]) -> list[Array]:
        """(..., o) diagonals per relation, times the fraction of tokens that have it."""
        if self.share is None:
            return list(wholes)
        return [(1.0 - self._same_share) * wholes[0], self._same_share * wholes[1]]

    @property
    def _same_share(self) -> Any:
        """(o,) fraction of tokens, or pairs at the same position, in the second relation."""
        if self.coincidence is None:
            return self.repeated
        return np.minimum(self.coincidence, self.repeated)

    @property
    def same_rate(self) -> Any:
        """(o,) probability that a repeated word recurs at its position in the other document."""
        return self._same_share / max(self.repeated, 1e-300)

    def wholes(self, diagonals: Sequence[Array]) -> list[Array]:
        """Diagonal of a kernel per relation, from that of a token with itself, or from those of two
        different words and of the same word at the same position."""
        if self.share is None:
            return [diagonals[0]]
        if self.coincidence is None:
            return [diagonals[0]] * 2
        first, single = 1.0 - self._same_share, self.coincidence - self._same_share
        single = np.maximum(single, 0.0) / np.where(first > 0.0, first, 1.0)
        return [diagonals[0] + single * (diagonals[1] - diagonals[0]), diagonals[1]]

    # --- parts, each of which multiplies as an ordinary matrix ----------------------------------

    def parts_of(
        self, diagonals: Sequence[Array], relations: Sequence[Array], diagonal_of: Diagonal
    ) -> list[Matrix]:
        """Parts of a kernel given by its `diagonals`, as in `wholes`, and off-diagonals."""
        whole = diagonals[0]
        if self.share is None:
            return [(whole - diagonal_of(relations[0]), relations[0])]
        mean, difference = self.mean(relations), relations[1] - relations[0]
        if self.coincidence is None:
            excess = whole - diagonal_of(relations[0])
            return [(whole - diagonal_of(mean), mean), (excess, difference)]
        same_word = diagonals[1] - whole
        whole = whole + self.coincidence * same_word
        excess = self.same_rate * (same_word - diagonal_of(difference))
        return [(whole - diagonal_of(mean), mean), (excess, difference)]

    def parts(self, relations: ByRelation, diagonal_of: Diagonal = diagonal_of) -> list[Matrix]:
        """Parts of a matrix given by relation."""
        if self.share is None:
            return relations
        (_, different), (excess, same) = relations
        beyond = same - different
        return [self.mean_of(relations, diagonal_of), (excess + diagonal_of(beyond), beyond)]

    def joined(self, parts: Sequence[Matrix], single: Array, placed: Any = 0.0) -> ByRelation:
        """The matrix with these parts (the second one's diagonal is the excess over two tokens of
        the same word), and (..., o) excesses of `single` tokens, whose word occurs once, and of two
        different words `placed` at the same position."""
        if self.share is None:
            return [parts[0]]
        (_, mean), (excess, beyond) = parts
        different = mean - self.share * beyond
        if self.coincidence is not None:
            rate = self.same_rate
            excess = placed + excess / np.where(rate > 0.0, rate, 1.0)
        return [(single, different), (excess, different + beyond)]


ALIKE = Mixture(None)


def bounded_exp(exponent: ByRelation, diagonal_of: Diagonal, factor: Array | None) -> ByRelation:
    """Entrywise exp of an exponent times a factor per matrix; without a factor the off-diagonal
    exponent is overwritten."""
    result = []
    for excess, matrix in exponent:
        whole = excess + diagonal_of(matrix)
        if factor is not None:
            whole, matrix = factor[..., 0] * whole, factor * matrix
        np.exp(np.minimum(matrix, EXPONENT_MAX, out=matrix), out=matrix)
        result.append((np.exp(np.minimum(whole, EXPONENT_MAX)) - diagonal_of(matrix), matrix))
    return result


class WordAgreement(NamedTuple):
    """Statistical dependence of two keys being repeated words.

    A cell in which one word is more frequent than repeated words are in the text also holds more
    repeated words. So whether two keys' words are repeated agrees beyond chance in a fraction
    1 - `free` of pairs; `free` = (1 - same)/(1 - repeated) at most, so that no count of different
    words is negative. In a key's own cell this applies to the other tokens only.

    Attributes:
        same: (n, k) fraction of a cell's tokens that are the word of a given repeated word.
        free: (n, k) fraction of pairs from two cells that are independent; None: all.
        free_common: (c, o) the same for two keys of one cell.
        inverse_different: (n, k) one over the fraction of pairs that are different words.
    """

    same: Array
    free: Array | None
    free_common: Array
    inverse_different: Array

    @classmethod
    def of(
        cls, mixture: Mixture, common: tuple[slice, slice], counts: tuple[Array, Array]
    ) -> WordAgreement:
        """From ranges of the common keys within the keys of either row, and the (c, o) counts of
        their tokens in each row."""
        assert mixture.share is not None
        (once, again), (_, level) = mixture.portions, mixture.levels
        same = np.minimum(level * mixture.share, 1.0)
        result = np.minimum(1.0 / max(again, 1e-300), (1.0 - same) / max(once, 1e-300))
        of_cell = on_diagonal(result[None, common[0], common[1]])
        others = 1.0 - 1.0 / np.maximum(np.minimum(*counts), 1.0)  # tokens of a cell besides one
        free_common = np.minimum(of_cell * others, 1.0)
        of_cell[...] = 1.0
        free = None if result.min() >= 1.0 else np.minimum(result, 1.0)
        inverse_different = 1.0 / np.maximum(1.0 - again * same, LEAST_DIFFERENT)
        return cls(same, free, free_common, inverse_different)


class Maps(NamedTuple):
    """A law as a linear map from values at keys to sums over keys, by whether a key's word is
    repeated (T = 2; T = 1 if words are not distinguished).

    All relations are in one array, because numpy calls dominate the cost of small arrays.

    Attributes:
        off_diagonal: (T, c, n, k) law of different words, and the difference of the same word from
            it times that word's frequency; (T + 1, c, n, k) with the part of different words that
            agree beyond chance (`WordAgreement`) as a further entry.
        first, second: (T, c, o) excess of a token with itself times its weight in either row, plus
            the agreement beyond chance of different words of one cell times the cell's weight.
    """

    off_diagonal: Array
    first: Array
    second: Array


class Sums(NamedTuple):
    """Sums over the keys of either row, for the laws of c pairs of rows.

    Attributes:
        mixture: relations of two keys.
        common_first, common_second: ranges of the common keys within the keys of either row.
        first, second: (c, n) and (c, k) weights of classes.
        token_first, token_second: (c, o) weights of one token, on the common keys.
        targets_first, targets_second: (c, n, T) and (c, k, T) means of the scaled law over the
            other key, for keys whose word occurs once and repeated ones.
        agreement: None if words are not distinguished.
    """

    mixture: Mixture
    common_first: slice
    common_second: slice
    first: Array
    second: Array
    token_first: Array
    token_second: Array
    targets_first: Array
    targets_second: Array
    agreement: WordAgreement | None

    @classmethod
    def of(
        cls,
        mixture: Mixture,
        common: tuple[slice, slice],
        weights: tuple[Array, Array],
        token_weights: tuple[Array, Array],
        targets: tuple[Array, Array],
    ) -> Sums:
        """Args: the attributes of both rows."""
        agreement = None
        if mixture.share is not None:
            counts = [
                np.where(token > 0.0, whole[:, keys] / np.where(token > 0.0, token, 1.0), np.inf)
                for whole, keys, token in zip(weights, common, token_weights, strict=True)
            ]
            agreement = WordAgreement.of(mixture, common, (counts[0], counts[1]))
        return cls(mixture, *common, *weights, *token_weights, *targets, agreement)

    def at_common(self, matrices: Array) -> Array:
        """(c, o) view of the entries of (c, n, k) at which both keys are the same."""
        return on_diagonal(matrices[:, self.common_first, self.common_second])

    def over_first(
        self, law: ByRelation, sweeps: int, initial: Array | None = None
    ) -> tuple[ByRelation, Array]:
        """The law scaled as by `balanced_with`, divided by the first key's targets, and the first
        key's Sinkhorn factors; `initial`: factors of a law close to this one to start from."""
        left, right = self._factors_by_word(self._maps_by_word(law), sweeps, initial)
        targets = np.where(left > 0.0, self._targets[0], 1.0)
        return self._times(law, self._products((left / targets)[None], right[None])), left

    def balanced_with(
        self, law: ByRelation, sweeps: int, directions: Sequence[ByRelation]
    ) -> tuple[ByRelation, list[ByRelation]]:
        """Scale a law to means `targets_first` and `targets_second` over either key (Sinkhorn); and
        form its derivatives law o (direction + u 1^T + 1 v^T), u and v such that their means over
        either key are 0. The sweeps for these contract, as the law's spectrum is in [-1, 1].
        Directions are (whole diagonal, off-diagonal) by relation, and are overwritten.
        """
        maps = self._maps_by_word(law)
        targets = self._targets
        left, right = self._factors_by_word(maps, sweeps)
        products = self._products(left[None], right[None])
        if not directions:
            return self._times(law, products), []
        inverse_left, inverse_right = (
            factor / np.where(target > 0.0, target, 1.0)
            for factor, target in zip((left, right), targets, strict=True)
        )
        wholes = [excess + self.at_common(matrix) for excess, matrix in law]
        rows, columns = (np.empty((len(directions), *factor.shape)) for factor in (left, right))
        for k, direction in enumerate(directions):
            for whole, (_, matrix), (diagonal, along) in zip(wholes, law, direction, strict=True):
                along *= matrix
                diagonal *= whole
            unshifted = [(diagonal - self.at_common(along), along) for diagonal, along in direction]
            along_maps = self._maps_by_word(unshifted)
            sums = self._over_second(along_maps, right), self._over_first(along_maps, left)
            rows[k], columns[k] = -inverse_left * sums[0], -inverse_right * sums[1]
        u, v = _shifts(
            rows,
            columns,
            lambda v: inverse_left * self._over_second(maps, right * v),
            lambda u: inverse_right * self._over_first(maps, left * u),
        )
        tangents = []
        for k, direction in enumerate(directions):
            shifts = self._products(np.stack([left * u[k], left]), np.stack([right, right * v[k]]))
            tangent = []
            for whole, (_, matrix), (diagonal, along), factors, shift in zip(
                wholes, law, direction, products, shifts, strict=True
            ):
                diagonal *= factors[0]
                diagonal += whole * shift[0]
                along *= factors[1]
                shift[1][...] *= matrix
                along += shift[1]
                tangent.append((diagonal - self.at_common(along), along))
            tangents.append(tangent)
        return self._times(law, products), tangents

    # --- by whether a key's word is repeated -----------------------------------------------------

    def _maps_by_word(self, law: ByRelation) -> Maps:
        tokens = self.token_first, self.token_second
        if self.agreement is None:
            ((excess, matrix),) = law
            return Maps(matrix[None], *((excess * token)[None] for token in tokens))
        same, free, free_common, _ = self.agreement
        (single, different), (beyond, same_word) = law
        off_diagonal = np.empty((2 if free is None else 3, *different.shape))
        excess = np.empty((2, *single.shape))
        off_diagonal[0], excess[0] = different, single
        difference = np.subtract(same_word, different, out=off_diagonal[-1])
        whole = beyond + self.at_common(difference)
        if self.mixture.coincidence is not None:  # the word at the same position may differ
            whole = single + self.mixture.same_rate * (whole - single)
        difference *= same
        np.subtract(whole, self.at_common(difference), out=excess[1])
        if free is not None:
            off_diagonal[0] *= free
            np.subtract(different, off_diagonal[0], out=off_diagonal[1])
            difference += off_diagonal[1]
        own_cell = self.at_common(off_diagonal[0])
        agreeing = own_cell * (1.0 - free_common)
        own_cell -= agreeing
        classes = self.first[:, self.common_first], self.second[:, self.common_second]
        first, second = (
            excess * token + agreeing * whole for token, whole in zip(tokens, classes, strict=True)
        )
        return Maps(off_diagonal, first, second)

    def _over_second(self, maps: Maps, values: Array) -> Array:
        """(..., T, c, n) sums over the second key, of values (..., T, c, k)."""
        total = self._over_keys(maps.off_diagonal, self.second * values)
        total[..., self.common_first] += maps.second * values[..., self.common_second]
        return total

    def _over_first(self, maps: Maps, values: Array) -> Array:
        """(..., T, c, k) sums over the first key, of values (..., T, c, n)."""
        total = self._over_keys(np.swapaxes(maps.off_diagonal, -1, -2), self.first * values)
        total[..., self.common_second] += maps.first * values[..., self.common_first]
        return total

    def _over_keys(self, maps: Array, values: Array) -> Array:
        """Apply `Maps.off_diagonal`: different words to the mean of both kinds of words, the same
        word to repeated ones alone."""
        if self.agreement is None:
            return np.asarray((maps @ values[..., None])[..., 0])
        agreeing = len(maps) > 2
        if agreeing:
            values = np.concatenate([values[..., :1, :, :], values], axis=-3)
        once, again = self.mixture.portions
        values[..., 0, :, :] *= once
        values[..., 0, :, :] += again * values[..., -1, :, :]
        total = np.asarray((maps @ values[..., None])[..., 0])
        total[..., 1:, :, :] += total[..., :1, :, :]
        return total[..., agreeing:, :, :]

    @property
    def _targets(self) -> tuple[Array, Array]:
        return self.targets_first.transpose(2, 0, 1), self.targets_second.transpose(2, 0, 1)

    def _factors_by_word(
        self, maps: Maps, sweeps: int, initial: Array | None = None
    ) -> tuple[Array, Array]:
        """(T, c, n) and (T, c, k) Sinkhorn factors of both keys."""
        targets = self._targets
        left, right = np.ones(targets[0].shape) if initial is None else initial, targets[1]
        for _ in range(sweeps):
            right = targets[1] / np.maximum(self._over_first(maps, left), 1e-300)
            left = targets[0] / np.maximum(self._over_second(maps, right), 1e-300)
        return left, right

    def _products(self, left: Array, right: Array) -> list[tuple[Array, Array]]:
        """(c, o) and (c, n, k) mean products of both keys' factors, per relation: of one token and
        of two, summed over r of (r, T, c, n) and (r, T, c, k) factors."""
        portions = np.reshape(self.mixture.portions, (-1, 1, 1))

        def outer(first: Array, second: Array) -> Array:
            if len(first) == 1:
                return np.asarray(first[0, :, :, None] * second[0, :, None, :])
            return np.asarray(first.transpose(1, 2, 0) @ second.transpose(1, 0, 2))

        same_token = (left[..., self.common_first] * right[..., self.common_second]).sum(0)
        different = outer((left * portions).sum(1), (right * portions).sum(1))
        if self.agreement is None:
            return [(same_token[0], different)]
        same, free, free_common, inverse_different = self.agreement
        once, again = self.mixture.portions
        repeated = outer(left[:, 1], right[:, 1])
        # different words: all pairs, with those that agree beyond chance, less those of one word
        if free is not None:
            agreed = once * outer(left[:, 0], right[:, 0]) + again * repeated
            different += (1.0 - free) * (agreed - different)
        own_cell = self.at_common(different)
        own_cell += (1.0 - free_common) * ((portions * same_token).sum(0) - own_cell)
        different -= (again * same) * repeated
        different *= inverse_different
        result = different, repeated
        diagonals = same_token if self.mixture.coincidence is None else map(self.at_common, result)
        return [(np.array(one), pairs) for one, pairs in zip(diagonals, result, strict=True)]

    def _times(self, law: ByRelation, factors: list[tuple[Array, Array]]) -> ByRelation:
        """The law times factors of a token and of two; the latter are overwritten."""
        result = []
        for (excess, matrix), (of_token, of_pairs) in zip(law, factors, strict=True):
            of_pairs *= matrix
            whole = (excess + self.at_common(matrix)) * of_token
            result.append((whole - self.at_common(of_pairs), of_pairs))
        return result


LEAST_DIFFERENT = 0.05
"""Floor of the fraction of pairs that are different words, which divides; a chosen value."""


def _shifts(
    rows: Array,
    columns: Array,
    over_second: Callable[[Array], Array],
    over_first: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """Solve u + over_second(v) = rows, v + over_first(u) = columns, until a sweep changes v by
    rounding alone."""
    u, v = rows, np.zeros_like(columns)
    for sweep in range(TANGENT_SWEEPS):
        if sweep:
            u = rows - over_second(v)
        last, v = v, columns - over_first(u)
        if sweep > 1 and np.abs(v - last).max(initial=0.0) <= 1e-12 * np.abs(v).max(initial=0.0):
            break
    return u, v


TOLERANCE = 2e-5
"""Largest change of an entry of A at which its iteration ends."""

ITERATIONS = 30
"""Most steps of that iteration."""

SELF_SWEEPS = 2
"""Sinkhorn sweeps per step, continued from the last step's factors."""


def softmax_response(
    sums: Sums,
    diagonal: Array,
    relations: Sequence[Array],
    counts: Sequence[Array],
    prior: Array,
    reference: AttentionRows,
    logit_scale: float,
) -> tuple[list[Matrix], Array]:
    """1 - A of c rows, A_jl = E[a_j a_l]/E a_j: how shifts of logits move the softmax.

    Solves A = F/w, F = w w^T o exp(exponent (1 - A) C (1 - A)^T) scaled to the marginals w.

    Args:
        sums: over the keys of a row, which is both rows of its pair.
        diagonal: (n,) C of a key with itself.
        relations: (c, n, n) C of two keys, per relation.
        counts: (c, n) counts of the keys, per part of `Mixture`.
        prior: (c, n) weight of one token where logits vanish; 0 for keys that a row does not have.
        reference: statistics of these rows.
        logit_scale: tau, per unit of their temperature.

    Returns:
        1 - A, per part of `Mixture`, and (c, n) its excess for words that occur once.
    """
    mixture, weights, keys = sums.mixture, sums.token_first, counts[0]
    step = least_step = reference.step
    scale = reference.odds * logit_scale * reference.temperature * reference.variance_kept
    # a single key has all attention, whatever its logit
    scale = np.where(reference.keys > 1.0, scale, 0.0)
    mask = (prior > 0.0).astype(float)
    both = mask[:, :, None] * mask[:, None, :]
    kernel = mixture.parts_of([diagonal], relations, diagonal_of)
    kernel_map = []  # acts on values at nodes from the left
    for count, (excess, matrix) in zip(counts, kernel, strict=True):
        kernel_map.append(count[:, :, None] * matrix)
        entries = on_diagonal(kernel_map[-1])
        entries += excess
    scales = scale[:, None, None]
    overlap = _first_overlap(mixture, diagonal, relations, keys, prior, scale)
    exponent = scales / np.maximum(reference.strength, 1e-6)[:, None, None] ** 2
    last, factors = None, None
    for _ in range(ITERATIONS):
        projected = [
            _project_part(one, of_kernel, of_map, count, part > 0)
            for part, (one, of_kernel, of_map, count) in enumerate(
                zip(mixture.parts(overlap), kernel, kernel_map, counts, strict=True)
            )
        ]
        single = (1.0 - overlap[0][0]) ** 2 * (diagonal - diagonal_of(relations[0]))
        joint = bounded_exp(mixture.joined(projected, single), diagonal_of, exponent)
        for excess, matrix in joint:
            excess *= mask
            matrix *= both
        joint, factors = sums.over_first(joint, SELF_SWEEPS, factors)
        changes = []  # F/w - A, off-diagonal entries in place
        for (excess, matrix), before in zip(joint, overlap, strict=True):
            matrix *= weights[:, None, :]
            matrix -= before[1]
            excess *= weights
            changes.append(excess - before[0])
        change = np.stack(changes)
        if last is not None:  # the step that would have cancelled the last change (Irons and Tuck)
            difference = last - change
            weighted = keys * difference
            size = (weighted * difference).sum((0, 2))
            best = step * (weighted * last).sum((0, 2)) / np.maximum(size, 1e-30)
            step = np.minimum(np.maximum(best, least_step), 1.0)
        last = change
        largest = np.abs(change).max()
        for relation, (excess, matrix) in enumerate(overlap):
            move = joint[relation][1]
            largest = max(largest, move.max(), -move.min())
            move *= step[:, None, None]
            overlap[relation] = excess + step[:, None] * changes[relation], matrix + move
        if largest < TOLERANCE:
            break
    response = [
        (mask * (1.0 - excess), both * -matrix) for excess, matrix in mixture.parts(overlap)
    ]
    return response, mask * (1.0 - overlap[0][0])


def _first_overlap(
    mixture: Mixture,
    diagonal: Array,
    relations: Sequence[Array],
    keys: Array,
    prior: Array,
    scale: Array,
) -> ByRelation:
    """First guess of A: the prior tilted by e^{scale C_jl}, normalised over l."""
    top = max(diagonal.max(), *(kernel.max() for kernel in relations))
    tilted = [np.exp(scale[:, None, None] * (kernel - top)) for kernel in relations]
    mean, same_token = mixture.mean(tilted), np.exp(scale[:, None] * (diagonal - top))
    total = np.einsum("pr,pqr->pq", keys * prior, mean)
    total += prior * (same_token - diagonal_of(mean))
    mask, result = prior > 0.0, []
    for tilt in tilted:
        excess = np.where(mask, prior * (same_token - diagonal_of(tilt)) / total, 0.0)
        result.append((excess, mask[:, :, None] * (prior[:, None, :] * tilt / total[:, :, None])))
    return result


def _project_part(
    overlap: Matrix, kernel: Matrix, kernel_map: Array, count: Array, same_word: bool
) -> Matrix:
    """(1 - A) C (1 - A)^T for one part of `Mixture`, `kernel_map` being C as it acts on values at
    nodes; with `same_word` the excess is relative to two tokens of the same word."""
    excess, matrix = overlap
    response = 1.0 - excess
    middle = response[:, :, None] * kernel[1]
    middle -= matrix @ kernel_map
    middle_diagonal = response * kernel[0]
    rest = middle * count[:, None, :]
    entries = on_diagonal(rest)
    entries += middle_diagonal
    rest = rest @ np.swapaxes(matrix, -1, -2)
    middle *= response[:, None, :]
    diagonal = middle_diagonal * response
    if same_word:
        pair = response**2 * diagonal_of(kernel[1])
        diagonal = diagonal - (pair - 2.0 * middle_diagonal * diagonal_of(matrix))
    return diagonal, np.subtract(middle, rest, out=rest)


def on_diagonal(matrices: Array) -> Array:
    """(c, o) writable view of the diagonals of (c, o, o) matrices."""
    if matrices.flags.c_contiguous:
        return matrices.reshape(len(matrices), -1)[:, :: matrices.shape[2] + 1]
    view: Array = np.einsum("cqq->cq", matrices)
    return view


# --- two rows of different statistics -------------------------------------------------------------

RHO_MIN = 1e-3
"""Correlation at which the ratio of two excesses is taken for nodes nearer to 0, their zero."""


def geometric_mean(first: Array, second: Array) -> Array:
    """Geometric mean of two numbers of the same sign, with that sign; else the arithmetic mean."""
    product = first * second
    size = np.sign(first) * np.sqrt(np.maximum(product, 0.0))
    return np.where(product > 0.0, size, 0.5 * (first + second))
