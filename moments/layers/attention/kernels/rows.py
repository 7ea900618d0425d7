"""What attention makes of the joint laws of its rows, whichever way these are grouped.

Finite widths add at order 1/d_model what a row's direction moves, and what tokens of fixed norm
lack. Where delta is the deficit of the norms' fluctuation and u the fraction of a key that it does
not share,

    the same token's overlap keeps e^{-x (1 + rho)}, x = u^2 delta theta (2 P2 - 5 P3 + 3 P4)/P2;
    that of different tokens that both attend to falls by u (1 + u) delta theta (1 - 3 P2 + 2 P3).

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import Matrix, diagonal_of
from ..softmax.table import THETA_MAX
from .finite_rows import Calibration, Nodes, Widths
from .row_statistics import AttentionRows, dropped_by_own, saturation

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


FAINT = 1e-5
"""Logit variance, and share of the largest query's variance, that stand for less: attention is
linear in them to five digits there, and what is linear is scaled on."""


Moments = TypeVar("Moments")


class Paths(NamedTuple, Generic[Moments]):
    """Per-feature second moments of the gradient at the attention's input, by path: arrays (L, L),
    kernels, or matrices on classes.

    Attributes:
        cross: correlation of the value and key paths, of order 1/d_model.
    """

    value: Moments
    query: Moments
    key: Moments
    cross: Moments

    @property
    def total(self) -> Any:
        """Their sum, where the tokens that ask are those attended to."""
        parts: Any = self
        return parts.value + parts.query + parts.key + parts.cross


class PathFactors(NamedTuple):
    """What the widths make of a joint law's derivative in the paths, of every two rows.

    Attributes:
        query: factor of the query path.
        key: factor of the key path, which includes the correlation; with rotary positions, of what
            comes of fluctuating products alone, whatever the queries' correlation.
        cross: that of the correlation of the key and value paths.
        along: with rotary positions, the rest of `key`, as the rows turn; None without.
    """

    query: Array
    key: Array
    cross: Array
    along: Array | None

    @classmethod
    def of(
        cls,
        calibration: Calibration,
        nodes: Nodes,
        basis: Array,
        pairs: tuple[Indices, Indices],
        reference: AttentionRows,
        correlation: Array,
        widths: Widths,
        turned: Array | None,
    ) -> PathFactors:
        """Args:
        calibration: of every row.
        basis: (r, ...) what multiplies values at the nodes, of every pair.
        pairs: both rows of every pair.
        reference: of every row.
        correlation: of every pair, at which the joint law is read.
        turned: correlation of the queries, with rotary positions; None without.
        """
        first, second = pairs
        weights, sharp = np.moveaxis(basis, 0, -1), sharpening(reference, *pairs, correlation)

        def between(values: Array) -> Array:
            return np.asarray(np.vecdot(weights, 0.5 * (values[first] + values[second])))

        query, growth = between(calibration.query) * sharp, between(calibration.growth)
        cross = 2.0 / widths.d_model * growth * sharp  # of overlaps that values and keys share
        if turned is None:
            return cls(query, between(calibration.key) * sharp, cross, None)
        # Products fluctuate together where keys are turned alike, however far apart their rows are.
        key = between(calibration.key - nodes.rho * calibration.along) * sharp
        return cls(query, key, cross, between(calibration.along) * turned * sharp)


class RowAttention:
    """Moments of a layer of attention from its rows, of which subclasses say how they are grouped.

    Attributes:
        output: second moments per feature of sum_j a_ij x_j, attention dropout included.
        response: what the query path is per unit of G.
        overlap_path: what the query path gains per unit of G and of the relative variance of two
            tokens' overlap.
        logit_variance: of every row, of its logits around their common part, theta.
        weights, counted: (rows, keys) mean attention, to one token and to all of a key.
    """

    output: Any
    response: Any
    overlap_path: Any
    logits: Any
    logit_variance: Array
    weights: Array
    counted: Array

    _rows: AttentionRows  # of every row
    _calibration: Calibration  # likewise
    _factors: PathFactors
    _widths: Widths
    _dropped: float
    _two_rows: tuple[Indices, Indices]  # of every pair
    _alone: Any  # which pairs are a row with itself
    _bare: Array  # correlation of every two queries
    _correlation: Array  # at which the joint law is read
    _shift: Array
    _sizes: Array  # (keys,) second moments of values
    _linear: float = 1.0

    def _split(self, of_pairs: Array) -> Any:
        """A symmetric number for every pair, in the layout of kernels."""
        raise NotImplementedError

    def _mean_of(self, name: str) -> Matrix:
        """Means over cells of the kernel of `keys` or `values`."""
        raise NotImplementedError

    def _turned_keys(self) -> NDArray[np.complex128] | None:
        """(..., keys, m) e^{i w j} of keys that turn with their positions; None: they do not."""
        raise NotImplementedError

    def _rows_times(self, kernel: Matrix) -> Array:
        """(rows, keys) of W C."""
        excess = kernel[0] - diagonal_of(kernel[1])
        return np.asarray(self.counted @ kernel[1] + self.weights * excess)

    def _unshared(self, name: str) -> Array:
        """(rows,) what the keys or values that a row attends to do not share, at least 0."""
        kernel = self._mean_of(name)
        shared = (self.counted * self._rows_times(kernel)).sum(1)
        return np.asarray(np.maximum(self.counted @ kernel[0] - shared, 0.0))

    def _directed(self, shift: Array) -> Array:
        """What a row's direction adds to the tokens that it attends to: (rows,), or (rows, m) of
        keys that turn, each of which has a part w_ij (C_jj - sum_l w_il C_lj)."""
        turned, kernel = self._turned_keys(), self._mean_of("values")
        if turned is None:
            return shift
        parts = of_shift(self.counted * (kernel[0] - self._rows_times(kernel)), shift)
        return np.asarray((parts[:, None, :] @ turned)[:, 0])

    def _products(self) -> Array:
        """Products of two rows' `_shift`, for every pair."""
        first, second = self._two_rows
        return np.asarray(self._shift[first] * self._shift[second])

    def _dropped_terms(self) -> tuple[Array, Array]:
        """(rows,) E a^2 times the values' second moments, and tr(E[J D J] C)."""
        raise NotImplementedError

    def _evaluate(
        self,
        mean: Array,
        excess: Array,
        slope: Array,
        queries: Array,
        together: Array | None,
        itself: bool = True,
    ) -> None:
        """Form the attributes.

        Args: of every pair:
            mean: overlap of mean outputs.
            excess: what the joint laws add to it.
            slope: its derivative in the correlation of two queries.
            queries: kernel of the queries.
            together: sum_j w_ij w_i'j over the tokens of both; None: there are none.
            itself: whether pairs of a row with itself are of one query.
        """
        logits, rows, widths, alone = self.logits, self._rows, self._widths, self._alone
        (first, second), calibration = self._two_rows, self._calibration
        temperature, attended = logits.temperature, self.counted @ self._sizes
        if itself:
            shift = attended - (mean + excess)[alone]
            if logits.keys is not logits.values:  # the row looks at the keys, and moves the values
                looked, moved = self._unshared("keys"), self._unshared("values")
                shift = shift * toward_keys(moved, looked, attended)
            self._shift = self._directed(shift)
        looking = logits.scale * self._products()
        gained = excess + looking * queries / widths.d_model
        if widths.deficit > 0.0:
            common = np.zeros_like(mean)
            if together is not None:
                squares = together[alone]
                unshared = np.sqrt(unshared_part(rows.keys, attended - mean[alone], squares))
                common = together * unshared[first] * unshared[second]
            of_rows = calibration.stiffness, calibration.against
            gained += fixed_norms(self._two_rows, self._correlation, *of_rows, mean, excess, common)
        output, norm = mean + self._linear * gained, np.sqrt(temperature)
        query = self._factors.query * slope / (norm[first] * norm[second])
        query = query + looking / widths.d_model
        if itself:
            query[alone] += calibration.common * slope[alone] / temperature
        if self._dropped > 0.0:
            squares, noise = self._dropped_terms()
            output[alone] += self._dropped * squares
            query[alone] += self._dropped * logits.scale * calibration.noise_query * noise
        several = output, self._linear * query, self._linear * looking
        self.output, self.response, self.overlap_path = map(self._split, several)

    @property
    def amplification(self) -> Any:
        """`amplification` of every two rows."""
        result = amplification(self._rows, *self._two_rows, self._bare)
        result[self._alone] *= 1.0 + dropped_by_own(self._dropped, self._rows.unshared_fraction)
        return self._split(result)

    @property
    def beyond_tables(self) -> NDArray[np.bool_]:
        """(rows,) whether theta is beyond 8, where rows are those of `softmax.peaked`."""
        return np.asarray(self.logit_variance > THETA_MAX)


def amplification(
    rows: AttentionRows, first: Indices, second: Indices, correlation: Array
) -> Array:
    """How much more two rows move together than rows of their mean weights would: as those of
    exchangeable keys whose log odds grow in proportion to the correlation of their queries.

    Args:
        first, second: which of them, of every pair.
        correlation: of every pair's queries.
    """
    keys = np.maximum(rows.keys, 1.0 + 1e-6)
    theta = np.maximum(rows.theta, FAINT)
    odds = np.where(rows.keys > 1.0 + 1e-6, rows.odds * theta, theta)
    slopes = [
        saturation(correlation, *(one[side] + 0.0 * correlation for one in (keys, theta, odds)))[1]
        for side in (first, second)
    ]
    kept = np.sqrt(rows.variance_kept)
    return np.asarray(kept[first] * kept[second] * 0.5 * (slopes[0] + slopes[1]))


def sharpening(
    stats: AttentionRows, first: Indices, second: Indices, correlation: Array
) -> Array | float:
    """Growth of dF/drho beyond the tables, of pairs of rows with these statistics.

    At rho = 1 a hard softmax is sensitive only where two logits nearly tie, E tr J^2 of order
    theta^{-1/2}; correlations with theta (1 - rho) >> 1 have reached their limit.
    """
    if not np.any(stats.logit_variance > stats.theta):
        return 1.0
    inside = np.sqrt(stats.theta)
    beyond = np.sqrt(np.maximum(stats.logit_variance, stats.theta))
    unlike = 1.0 - correlation
    inner = 1.0 / (inside[first] * inside[second]) + unlike
    return np.asarray(np.sqrt(inner / (1.0 / (beyond[first] * beyond[second]) + unlike)))


def toward_keys(moved: Array, looked: Array, size: Array) -> Array:
    """(Lq,) factor on a row's shift where it looks at keys and moves values.

    Args:
        moved, looked: what the attended tokens' values do not share, and their keys.
        size: of the attended values.
    """
    usable = moved > 1e-9 * size
    return np.sqrt(np.where(usable, looked / np.where(usable, moved, 1.0), 0.0))


def of_shift(parts: Array, shift: Array) -> Array:
    """(Lq, Lk) the keys' parts of a row's shift, in proportion to these."""
    total = parts.sum(1)
    usable = np.abs(total) > 1e-300
    return np.asarray(parts * np.where(usable, shift / np.where(usable, total, 1.0), 0.0)[:, None])


def unshared_part(effective_keys: Array, unshared_sum: Array, square: Array) -> Array:
    """(Lq,) own part of a row's keys, those that move together counting as one: n_e of them, of
    which a row holds 1/n_e in common with itself. Rows of one key have nothing to fluctuate.

    Args:
        unshared_sum: w.diag(C) - w^T C w.
        square: sum_j w_j^2.
    """
    keys = np.maximum(effective_keys, 1.0)
    several = keys > 1.0 + 1e-6
    unshared = np.where(several, unshared_sum / np.where(several, keys - 1.0, 1.0), 0.0)
    return np.asarray(np.maximum(unshared, 0.0) / square)


def fixed_norms(
    rows: tuple[Indices, Indices],
    correlation: Array,
    stiffness: Array,
    against: Array,
    mean: Array,
    excess: Array,
    common: Array,
) -> Array:
    """What tokens of fixed norm add to the output, for pairs of rows; see above.

    Args:
        rows: both indices of every pair.
        stiffness, against: (Lq,) of every row.
        common: what two rows have in common of the same tokens' own parts.
    """
    one, two = rows
    kept = np.expm1(-0.5 * (stiffness[one] + stiffness[two]) * (1.0 + correlation))
    lost = 0.5 * (against[one] + against[two])
    return np.asarray(kept * (common + excess) - lost * (mean - common))
