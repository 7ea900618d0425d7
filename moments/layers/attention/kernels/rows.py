"""Output and gradient factors of attention from the joint laws of its rows.

Finite widths add terms of order 1/d_model: a row attends to tokens in the direction of its query,
which shifts its output, and tokens of fixed norm fluctuate less. If delta is the deficit of the
norms' fluctuation and u the fraction of a key's second moment that it does not share with others,

    the overlap of a token with itself is multiplied by e^{-x (1 + rho)},
        x = u^2 delta theta (2 P2 - 5 P3 + 3 P4)/P2;
    that of different tokens falls by the fraction u (1 + u) delta theta (1 - 3 P2 + 2 P3).

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ....engine.classes import Matrix, diagonal_of
from ..softmax import THETA_MAX
from .row_statistics import (
    AttentionRows,
    Calibration,
    Nodes,
    Widths,
    dropped_by_own,
    saturation,
)

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


FAINT = 1e-5
"""Floor of the logit variance and of a query's variance over the largest: attention is linear below
it to five digits, and results are scaled linearly from there."""


Moments = TypeVar("Moments")


class Paths(NamedTuple, Generic[Moments]):
    """Second moments per feature of the gradient at attention's input, by path; `cross` is the
    correlation of the value and key paths, of order 1/d_model."""

    value: Moments
    query: Moments
    key: Moments
    cross: Moments

    @property
    def total(self) -> Any:
        """Sum of the paths, for self-attention."""
        parts: Any = self
        return parts.value + parts.query + parts.key + parts.cross


class PathFactors(NamedTuple):
    """Factors at finite width that multiply dF/drho in each gradient path, per pair of rows.

    Attributes:
        query: factor of the query path.
        key: factor of the key path, correlation of the queries included; with rotary positions only
            the part due to fluctuating products, which does not depend on that correlation.
        cross: factor of the correlation of the key and value paths.
        along: with rotary positions, the rest of `key`, before rotation; None otherwise.
    """

    query: Array
    key: Array
    cross: Array
    along: Array | None


class RowAttention:
    """Moments of an attention layer from the joint laws of its rows; subclasses group the rows.

    Attributes:
        output: second moments per feature of sum_j a_ij x_j, attention dropout included.
        response: query path per unit of the gradient kernel G.
        overlap_path: growth of the query path per unit of G and of the relative variance of two
            tokens' overlap.
        logit_variance: (rows,) theta, variance of a row's logits around their common part.
        weights, counted: (rows, keys) mean attention to one token, and to all tokens of a key.
    """

    output: Any
    response: Any
    overlap_path: Any
    logits: Any
    logit_variance: Array
    weights: Array
    counted: Array

    _rows: AttentionRows  # per row
    _calibration: Calibration  # per row
    _factors: PathFactors
    _widths: Widths
    _dropped: float  # p/(1 - p) of attention dropout
    _two_rows: tuple[Indices, Indices]  # per pair of rows
    _self_pairs: Any  # index of the pairs that are a row with itself
    _bare: Array  # correlation of the queries before rotation, per pair
    _correlation: Array  # at which the joint law is evaluated, per pair
    _shift: Array
    _sizes: Array  # (keys,) second moments of values
    _linear: float = 1.0  # factor by which results are scaled below `FAINT`

    def _as_kernel(self, values: Array) -> Any:
        """Values per pair of rows, symmetric in them, in the layout of kernels."""
        raise NotImplementedError

    def _mean_kernel(self, name: str) -> Matrix:
        """Kernel of `keys` or `values`, averaged over relations of two tokens."""
        raise NotImplementedError

    def _key_phases(self) -> NDArray[np.complex128] | None:
        """(..., keys, m) e^{i w j} of rotary positions; None without."""
        raise NotImplementedError

    def _rows_times(self, kernel: Matrix) -> Array:
        """(rows, keys) product W C of mean attention and a kernel."""
        excess = kernel[0] - diagonal_of(kernel[1])
        return np.asarray(self.counted @ kernel[1] + self.weights * excess)

    def _unshared(self, name: str) -> Array:
        """(rows,) attended second moment of keys or values minus that of their weighted mean."""
        kernel = self._mean_kernel(name)
        shared = (self.counted * self._rows_times(kernel)).sum(1)
        return np.asarray(np.maximum(self.counted @ kernel[0] - shared, 0.0))

    def _rotated_shift(self, shift: Array) -> Array:
        """Shift of a row's output along its query: (rows,), or with rotary positions (rows, m) sums
        of the keys' parts, in proportion to w_ij (C_jj - sum_l w_il C_lj), times their phases."""
        phases, kernel = self._key_phases(), self._mean_kernel("values")
        if phases is None:
            return shift
        parts = self.counted * (kernel[0] - self._rows_times(kernel))
        total = parts.sum(1)
        usable = np.abs(total) > 1e-300
        parts = parts * np.where(usable, shift / np.where(usable, total, 1.0), 0.0)[:, None]
        return np.asarray((parts[:, None, :] @ phases)[:, 0])

    def _shift_products(self) -> Array:
        """Product of both rows' `_shift`, per pair."""
        first, second = self._two_rows
        return np.asarray(self._shift[first] * self._shift[second])

    def _path_factors(self, nodes: Nodes, basis: Array, rotated: bool) -> PathFactors:
        """Factors at `_correlation`, where `basis` (r, ...) are the interpolation weights of the
        nodes."""
        first, second = self._two_rows
        weights, calibration = np.moveaxis(basis, 0, -1), self._calibration
        sharp = self._sharpening()

        def between(values: Array) -> Array:
            return np.asarray(np.vecdot(weights, 0.5 * (values[first] + values[second])))

        query, growth = between(calibration.query) * sharp, between(calibration.growth)
        cross = 2.0 / self._widths.d_model * growth * sharp  # overlaps that values and keys share
        if not rotated:
            return PathFactors(query, between(calibration.key) * sharp, cross, None)
        # The fluctuating products depend on the keys' rotation alone, not on that of the rows.
        key = between(calibration.key - nodes.rho * calibration.along) * sharp
        along = between(calibration.along) * self._bare * sharp
        return PathFactors(query, key, cross, along)

    def _sharpening(self) -> Array | float:
        """Growth of dF/drho beyond the tables, per pair of rows.

        At rho = 1 a hard softmax is sensitive only where two logits nearly tie, E tr J^2 of order
        theta^{-1/2}; correlations with theta (1 - rho) >> 1 have reached their limit.
        """
        rows, (first, second) = self._rows, self._two_rows
        if not np.any(rows.logit_variance > rows.theta):
            return 1.0
        inside = np.sqrt(rows.theta)
        beyond = np.sqrt(np.maximum(rows.logit_variance, rows.theta))
        unlike = 1.0 - self._correlation
        inner = 1.0 / (inside[first] * inside[second]) + unlike
        return np.asarray(np.sqrt(inner / (1.0 / (beyond[first] * beyond[second]) + unlike)))

    def _dropped_terms(self) -> tuple[Array, Array]:
        """Two (rows,): sum_j E a_ij^2 C_jj of the values, and tr(E[J D J] C)."""
        raise NotImplementedError

    def _evaluate(
        self,
        mean: Array,
        excess: Array,
        slope: Array,
        queries: Array,
        common_weights: Array | None,
        itself: bool = True,
    ) -> None:
        """Form `output`, `response` and `overlap_path`.

        Args: per pair of rows:
            mean: overlap of mean outputs.
            excess: addition of the joint laws to it.
            slope: derivative of `excess` in the correlation of the two queries.
            queries: kernel of the queries.
            common_weights: sum_j w_ij w_i'j over common tokens; None: there are none.
            itself: whether a row paired with itself is one query, as it is within one document.
        """
        logits, widths, same = self.logits, self._widths, self._self_pairs
        (first, second), calibration = self._two_rows, self._calibration
        temperature, attended = logits.temperature, self.counted @ self._sizes
        if itself:
            shift = attended - (mean + excess)[same]
            if logits.keys is not logits.values:  # the query selects keys, the output moves values
                keys, values = self._unshared("keys"), self._unshared("values")
                usable = values > 1e-9 * attended
                shift = shift * np.sqrt(np.where(usable, keys / np.where(usable, values, 1.0), 0.0))
            self._shift = self._rotated_shift(shift)
        shift_products = logits.scale * self._shift_products()
        gained = excess + shift_products * queries / widths.d_model
        if widths.deficit > 0.0:
            gained += self._fixed_norms(mean, excess, attended - mean[same], common_weights)
        output, norm = mean + self._linear * gained, np.sqrt(temperature)
        query = self._factors.query * slope / (norm[first] * norm[second])
        query = query + shift_products / widths.d_model
        if itself:
            query[same] += calibration.common * slope[same] / temperature
        if self._dropped > 0.0:
            squares, noise = self._dropped_terms()
            output[same] += self._dropped * squares
            query[same] += self._dropped * logits.scale * calibration.noise_query * noise
        self.output = self._as_kernel(output)
        self.response = self._as_kernel(self._linear * query)
        self.overlap_path = self._as_kernel(self._linear * shift_products)

    def _fixed_norms(
        self, mean: Array, excess: Array, unshared_sum: Array, common_weights: Array | None
    ) -> Array:
        """Change of the output because tokens have fixed norms, per pair of rows; see above.

        The unshared second moment of a key is that of a row, `unshared_sum` (rows,), over the
        n_e - 1 of its n_e effective keys that fluctuate independently; 0 for rows of one key.
        """
        (first, second), calibration = self._two_rows, self._calibration
        common = np.zeros_like(mean)  # part of `mean` from the same tokens' unshared moments
        if common_weights is not None:
            keys = np.maximum(self._rows.keys, 1.0)
            several = keys > 1.0 + 1e-6
            unshared = np.where(several, unshared_sum / np.where(several, keys - 1.0, 1.0), 0.0)
            size = np.sqrt(np.maximum(unshared, 0.0) / common_weights[self._self_pairs])
            common = common_weights * size[first] * size[second]
        stiffness = calibration.stiffness[first] + calibration.stiffness[second]
        same_token = np.expm1(-0.5 * stiffness * (1.0 + self._correlation))
        different_tokens = 0.5 * (calibration.against[first] + calibration.against[second])
        return np.asarray(same_token * (common + excess) - different_tokens * (mean - common))

    @property
    def amplification(self) -> Any:
        """Joint response of two rows over that of rows at their mean weights, in the layout of
        kernels: R2 of exchangeable keys whose log-odds grow in proportion to the correlation of the
        queries."""
        rows, correlation = self._rows, self._bare
        keys = np.maximum(rows.keys, 1.0 + 1e-6)
        theta = np.maximum(rows.theta, FAINT)
        odds = np.where(rows.keys > 1.0 + 1e-6, rows.odds * theta, theta)
        slopes = [
            saturation(correlation, *(x[row] + 0.0 * correlation for x in (keys, theta, odds)))[1]
            for row in self._two_rows
        ]
        first, second = (np.sqrt(rows.variance_kept)[row] for row in self._two_rows)
        result = np.asarray(first * second * 0.5 * (slopes[0] + slopes[1]))
        result[self._self_pairs] *= 1.0 + dropped_by_own(self._dropped, rows.unshared_fraction)
        return self._as_kernel(result)

    @property
    def beyond_tables(self) -> bool:
        """Whether theta exceeds 8 in any row, beyond which statistics continue the tables."""
        return bool(np.any(self.logit_variance > THETA_MAX))


def single(array: Array) -> tuple[float, NDArray[np.float32]]:
    """The largest absolute entry, and the array divided by it, in single precision."""
    scale = float(max(array.max(initial=0.0), -array.min(initial=0.0))) or 1.0
    return scale, (array / scale).astype(np.float32)
