"""Statistics of softmax rows of one length, by interpolation: microseconds, not milliseconds.

Statistics of softmax rows as bounded, smooth functions of theta, log n and rho, and back.

Tables interpolate the functions below rather than the statistics, which span many decades. Each is
a statistic over its behaviour in the limits theta -> 0, n -> 1 and n -> infinity (or the logarithm
of that, where it is positive and varies a lot): errors are relative, and those limits are exact.

Tensor Chebyshev interpolation in the coordinates of a softmax row.

See docs/theory/softmax.md, The integrals.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ....errors import domain_error
from .exact import (
    PSI_LEAST,
    THETA_EXACT,
    Array,
    BoolArray,
    PairStatistics,
    RowStatistics,
    check_length,
    pair_statistics,
    row_statistics,
)

# --- bounded functions ----------------------------------------------------------------------------

ROW_FUNCTIONS = 10
PAIR_FUNCTIONS = 4


def encode_row(theta: float, n: float) -> Array:
    """(ROW_FUNCTIONS,) functions of one row, from the exact evaluator; theta > 0 and n > 1.

    First the log-odds of P2 per theta, log[(n-1) P2 / (1-P2)] / theta: 1 at theta = 0.
    """
    row = row_statistics(theta, n)
    rest = 1.0 - row.sum_square
    return np.array(
        [
            math.log((n - 1.0) * row.sum_square / rest) / theta,
            row.jacobian_square / (row.sum_square * rest),
            row.sum_square_slope / (theta * row.jacobian_square),
            row.radial_square / row.jacobian_square,
            row.trace_square / rest,
            (row.mean_logit_square - theta * rest**2) / row.sum_square,
            math.log(row.weighted_logit_square / row.sum_square),
            (math.log(n) - row.entropy) / (theta * rest),
            math.log(n**2 * row.sum_cube) / theta,
            math.log(n**3 * row.sum_fourth) / theta,
        ]
    )


def decode_participation(theta: Array, n: Array | float, functions: Array) -> tuple[Array, Array]:
    """(P2, 1 - P2) from the first function, each to full relative accuracy."""
    odds = np.exp(theta * functions[0])
    others = n - 1.0
    total = others + odds
    return odds / total, others / total


def decode_row(
    theta: Array, n: Array | float, functions: Array, valid: BoolArray | bool
) -> RowStatistics:
    """Inverse of `encode_row`; theta and the trailing axes of `functions` broadcast."""
    p2, rest = decode_participation(theta, n, functions)
    jacobian = functions[1] * p2 * rest
    spread = theta * rest
    return RowStatistics(
        sum_square=p2,
        sum_cube=np.minimum(np.exp(theta * functions[8]) / n**2, p2),
        sum_fourth=np.minimum(np.exp(theta * functions[9]) / n**3, p2),
        trace_square=functions[4] * rest,
        jacobian_square=jacobian,
        radial_square=functions[3] * jacobian,
        sum_square_slope=functions[2] * theta * jacobian,
        mean_logit_square=functions[5] * p2 + spread * rest,
        weighted_logit_square=np.exp(functions[6]) * p2,
        entropy=np.log(n) - functions[7] * spread,
        valid=valid,
    )


def _pair_at_small_theta(theta: float, n: float, rho: float) -> PairStatistics:
    """The pair, its overlap divided by the evaluator's own error in the exact C2(rho = 0) = 1/n.

    log(n C2) is divided by psi below, which would magnify that error near theta = 0.
    """
    pair = pair_statistics(theta, n, rho)
    if theta > 0.1:
        return pair
    uncorrelated = n * pair_statistics(theta, n, 0.0).overlap
    return pair._replace(overlap=pair.overlap / uncorrelated)


def encode_square_pair(theta: float, n: float, rho: float) -> Array:
    """(PAIR_FUNCTIONS,) functions of two rows of n keys; theta > 0, n > 1 and rho != 0.

    The first is the log-odds of C2 per psi: at rho = 1 that of P2 per theta.
    """
    pair, psi = _pair_at_small_theta(theta, n, rho), rho * theta
    rest = 1.0 - pair.overlap
    return np.array(
        [
            math.log((n - 1.0) * pair.overlap / rest) / psi,
            math.log(pair.jacobian_overlap / (pair.overlap * rest)),
            pair.radial_overlap / pair.jacobian_overlap,
            pair.overlap_slope / (psi * pair.jacobian_overlap),
        ]
    )


def decode_square_pair(
    psi: Array, n: Array | float, functions: Array, valid: BoolArray | bool
) -> PairStatistics:
    """Inverse of `encode_square_pair`."""
    c2, rest = decode_participation(psi, n, functions)
    jacobian = np.exp(functions[1]) * c2 * rest
    slope = functions[3] * psi * jacobian
    return PairStatistics(c2, jacobian, functions[2] * jacobian, slope, valid)


# --- interpolation --------------------------------------------------------------------------------

THETA_MAX = 8.0
"""Largest logit variance in the tables."""

THETA_FAR, RHO_FAR = 32.0, -0.3
"""Largest logit variance, and least correlation of two rows, in the tables beyond `THETA_MAX`."""

LENGTH_MAX = 1e8
"""Largest number of keys in the tables."""

LOG_LENGTH_MAX = math.log(LENGTH_MAX)

_RECURRENCE_FROM = 64
"""Number of points from which the three-term recurrence is faster than cosines."""


def gauss_nodes(count: int) -> Array:
    """Roots of the Chebyshev polynomial of degree `count`: none at an end, where ratios are 0/0."""
    return np.cos(np.pi * (np.arange(count) + 0.5) / count)


def chebyshev_coefficients(values: Array, axes: Sequence[int]) -> Array:
    """Coefficients of the interpolant through `values` at the gauss_nodes of each of `axes`."""
    for axis in axes:
        count = values.shape[axis]
        transform = np.cos(np.outer(np.arange(count), np.arccos(gauss_nodes(count))))
        transform *= 2.0 / count
        transform[0] *= 0.5
        values = np.moveaxis(np.tensordot(transform, values, (1, axis)), 0, axis)
    return values


def chebyshev_basis(x: Array, count: int) -> Array:
    """(count, points): the first `count` Chebyshev polynomials at x (points,) in [-1, 1]."""
    if x.size < _RECURRENCE_FROM:
        return np.asarray(np.cos(np.arange(count)[:, None] * np.arccos(x)))
    basis = np.empty((count, x.size))
    basis[0], basis[1] = 1.0, x
    twice = 2.0 * x
    for degree in range(2, count):
        np.multiply(twice, basis[degree - 1], out=basis[degree])
        basis[degree] -= basis[degree - 2]
    return basis


def theta_coordinate(theta: Array) -> Array:
    """[0, THETA_MAX] to [-1, 1], linear in the standard deviation."""
    return np.asarray(np.sqrt(theta * (4.0 / THETA_MAX)) - 1.0)


def theta_at(coordinate: float) -> float:
    """Inverse of `theta_coordinate`."""
    return THETA_MAX * (0.5 * (1.0 + coordinate)) ** 2


_NEAR, _FAR = math.sqrt(THETA_MAX), math.sqrt(THETA_FAR)


def far_coordinate(theta: Array) -> Array:
    """[THETA_MAX, THETA_FAR] to [-1, 1], linear in the standard deviation."""
    return np.asarray((np.sqrt(theta) - _NEAR) * (2.0 / (_FAR - _NEAR)) - 1.0)


def far_theta_at(coordinate: float) -> float:
    """Inverse of `far_coordinate`."""
    return (_NEAR + (_FAR - _NEAR) * 0.5 * (1.0 + coordinate)) ** 2


def far_rho_coordinate(rho: Array) -> Array:
    """[RHO_FAR, 1] to [-1, 1]."""
    return np.asarray((rho - RHO_FAR) * (2.0 / (1.0 - RHO_FAR)) - 1.0)


def far_rho_at(coordinate: float) -> float:
    """Inverse of `far_rho_coordinate`."""
    return RHO_FAR + (1.0 - RHO_FAR) * 0.5 * (1.0 + coordinate)


def length_coordinate(n: Array) -> Array:
    """[1, 1e8] to [-1, 1], linear in log n."""
    return np.asarray(np.log(n) * (2.0 / LOG_LENGTH_MAX) - 1.0)


def length_at(coordinate: float) -> float:
    """Inverse of `length_coordinate`."""
    return math.exp(0.5 * LOG_LENGTH_MAX * (1.0 + coordinate))


# --- tables ---------------------------------------------------------------------------------------


def load_coefficients(name: str) -> dict[str, Array]:
    """Float64 arrays of one data file of the package, by name."""
    with (
        resources.files("moments").joinpath("data", f"{name}.npz").open("rb") as stream,
        np.load(stream) as file,
    ):
        return {key: file[key].astype(np.float64) for key in file.files}


def checked_theta(theta: ArrayLike) -> Array:
    """Finite logit variances >= 0 as an array; DomainError otherwise."""
    array = np.asarray(theta, dtype=np.float64)
    if array.size and not (array.min() >= 0.0 and array.max() < np.inf):
        raise domain_error("theta", theta, "finite and >= 0", "is a weight variance negative?")
    return array


def checked_rho(rho: ArrayLike) -> Array:
    """Correlations in [-1, 1] as an array, rounding beyond +-1 removed; DomainError otherwise."""
    array = np.asarray(rho, dtype=np.float64)
    if array.size and not (array.min() >= -1.0 and array.max() <= 1.0):
        if not np.all(np.abs(array) <= 1.0 + 1e-9):
            raise domain_error("rho", rho, "a correlation in [-1, 1]")
        array = np.clip(array, -1.0, 1.0)
    return array


def checked_length(name: str, length: ArrayLike) -> Array:
    """Finite numbers of keys >= 1 as an array; DomainError otherwise."""
    array = np.asarray(length, dtype=np.float64)
    if array.size and not (array.min() >= 1.0 and array.max() < np.inf):
        raise domain_error(name, length, "a finite number of keys >= 1")
    return array


def exact_row(theta: float, n: float) -> RowStatistics:
    """`row_statistics` at the nearest validated variance; `valid` if that is theta itself."""
    return row_statistics(min(theta, THETA_EXACT), n)._replace(valid=theta <= THETA_EXACT)


def exact_pair(theta: float, n: float, rho: float) -> PairStatistics:
    """`pair_statistics` at the nearest validated arguments; `valid` if those are theta and rho."""
    nearest = min(theta, THETA_EXACT)
    inside = theta <= THETA_EXACT and (rho == -1.0 or rho * nearest >= PSI_LEAST)
    if rho > -1.0 and rho * nearest < PSI_LEAST:
        rho = PSI_LEAST / nearest * (1 - 1e-12)  # inside, whatever the rounding of the product
    return pair_statistics(nearest, n, rho)._replace(valid=inside)


class SquareRows:
    """Statistics of rows of one length n; made by `SquareTable.at_length`.

    Up to theta = 8 and n = 1e8 they are interpolated. Relative errors: of one row 1e-4 at most, of
    a pair with rho >= -0.3 likewise (radial_overlap's over jacobian_overlap, overlap_slope's over
    psi times jacobian_overlap); 1e-3 as rho nears -1 at theta > 4. Up to theta = 32 a second table
    interpolates rows, and pairs with rho >= -0.3, to 1e-4. For what is left up to there the exact
    evaluator is called: 2 ms per row, 3 to 100 ms per pair. Beyond that the numbers are those of
    theta = 32 (for a pair, at the least rho allowed there), and `valid` is False.
    """

    def __init__(self, n: float) -> None:
        self.n, self._near = n, SquareTable.load().contracted(n)
        self._limit, self._far_limit = (THETA_MAX, THETA_FAR) if n <= LENGTH_MAX else (-1.0, -1.0)

    @functools.cached_property
    def _far(self) -> _Contracted:
        return SquareTable.load_far().contracted(self.n)

    def single(self, theta: ArrayLike) -> RowStatistics:
        """Statistics of one row.

        Args:
            theta: logit variance, any shape.

        Returns:
            Arrays of that shape.

        Raises:
            DomainError: theta negative or not finite.
        """
        array = checked_theta(theta)
        flat = array.reshape(-1)
        beyond = flat > self._limit
        tabulated = np.minimum(flat, THETA_MAX)
        functions = self._near.rows(theta_coordinate(tabulated))
        result = decode_row(tabulated, self.n, functions, ~beyond)
        if beyond.any():
            far = beyond & (flat <= self._far_limit)
            theta = flat[far]
            functions = self._far.rows(far_coordinate(theta))
            _assign(result, far, decode_row(theta, self.n, functions, True))
            for i in np.flatnonzero(beyond & ~far):
                _assign(result, int(i), exact_row(float(flat[i]), self.n))
        if array.ndim != 1:
            return RowStatistics(*[np.reshape(field, array.shape) for field in result])
        return result

    def pair(self, theta: ArrayLike, rho: ArrayLike) -> PairStatistics:
        """Statistics of two rows whose logits have variance theta and correlation rho.

        Args:
            theta: logit variance of both rows.
            rho: correlation of the logits of one key in the two rows; broadcasts against theta.

        Returns:
            Arrays of the broadcast shape.

        Raises:
            DomainError: theta negative or not finite, rho outside [-1, 1].
        """
        array, correlation = checked_theta(theta), checked_rho(rho)
        if array.shape != correlation.shape:
            array, correlation = np.broadcast_arrays(array, correlation)
        flat, flat_rho = array.reshape(-1), correlation.reshape(-1)
        beyond = flat > self._limit
        tabulated = np.minimum(flat, THETA_MAX)
        functions = self._near.pairs(theta_coordinate(tabulated), flat_rho)
        result = decode_square_pair(flat_rho * tabulated, self.n, functions, ~beyond)
        if beyond.any():
            far = beyond & (flat <= self._far_limit) & (flat_rho >= RHO_FAR)
            theta, rho_far = flat[far], flat_rho[far]
            functions = self._far.pairs(far_coordinate(theta), far_rho_coordinate(rho_far))
            _assign(result, far, decode_square_pair(rho_far * theta, self.n, functions, True))
            for i in np.flatnonzero(beyond & ~far):
                _assign(result, int(i), exact_pair(float(flat[i]), self.n, float(flat_rho[i])))
        if array.ndim != 1:
            return PairStatistics(*[np.reshape(field, array.shape) for field in result])
        return result


def _assign(
    result: RowStatistics | PairStatistics, where: Any, found: RowStatistics | PairStatistics
) -> None:
    for array, value in zip(result, found, strict=True):
        np.asarray(array)[where] = value


class _Contracted:
    """A table at one number of keys: `row` (theta, functions), `pair` (theta, functions, rho)."""

    def __init__(self, row: Array, pair: Array) -> None:
        self._row = np.ascontiguousarray(row.T)
        self._pair_shape = pair.shape[1:]
        self._pair = np.ascontiguousarray(pair.reshape(pair.shape[0], -1).T)

    def rows(self, theta: Array) -> Array:
        """(functions, points) at coordinates (points,)."""
        return np.asarray(self._row @ chebyshev_basis(theta, self._row.shape[1]))

    def pairs(self, theta: Array, rho: Array) -> Array:
        """Likewise of pairs."""
        in_rho = self._pair @ chebyshev_basis(theta, self._pair.shape[1])
        basis = chebyshev_basis(rho, self._pair_shape[1])
        return np.asarray((in_rho.reshape(*self._pair_shape, theta.size) * basis).sum(axis=1))


class SquareTable(NamedTuple):
    """Chebyshev coefficients for rows of equal length and equal logit variance, up to THETA_MAX.

    Attributes:
        row: (theta, log n, functions) of `encode_row`.
        pair: (theta, log n, functions, rho) of `encode_square_pair`.
    """

    row: Array
    pair: Array

    @staticmethod
    @functools.cache
    def load() -> SquareTable:
        """The table shipped with the package, read once."""
        data = load_coefficients("softmax_square")
        return SquareTable(data["row"], data["pair"])

    @staticmethod
    @functools.cache
    def load_far() -> SquareTable:
        """That of logit variances from THETA_MAX to THETA_FAR, and correlations from RHO_FAR."""
        data = load_coefficients("softmax_far")
        return SquareTable(data["row"], data["pair"])

    def contracted(self, n: float) -> _Contracted:
        """Its coefficients at n keys."""
        coordinate = length_coordinate(np.array([min(n, LENGTH_MAX)]))
        row_basis = chebyshev_basis(coordinate, self.row.shape[1])[:, 0]
        pair_basis = chebyshev_basis(coordinate, self.pair.shape[1])[:, 0]
        row = np.einsum("abf,b->af", self.row, row_basis)
        return _Contracted(row, np.einsum("abfr,b->afr", self.pair, pair_basis))

    def at_length(self, n: float) -> SquareRows:
        """The table at n keys (real, >= 1); cached.

        Raises:
            DomainError: n < 1 or not finite.
        """
        return _square_rows(check_length("n", n))

    def single(self, theta: ArrayLike, n: ArrayLike) -> RowStatistics:
        """`SquareRows.single` over broadcasting arrays of variances and numbers of keys.

        1000 distinct points take about 2 ms, and a thousand lengths at one theta a fifth of that.

        Raises:
            DomainError: theta negative or not finite; n < 1 or not finite.
        """
        variance, length = checked_theta(theta), checked_length("n", n)
        if length.ndim == 0:
            return self.at_length(float(length)).single(variance)
        shape = np.broadcast_shapes(variance.shape, length.shape)
        functions = self.row_functions(variance, length, self.row.shape[2])
        variance, length = _flat(variance, shape), _flat(length, shape)
        beyond = (variance > THETA_MAX) | (length > LENGTH_MAX)
        result = decode_row(np.minimum(variance, THETA_MAX), length, functions, ~beyond)
        for i in np.flatnonzero(beyond):
            _assign(result, int(i), exact_row(float(variance[i]), float(length[i])))
        return RowStatistics(*[np.reshape(field, shape) for field in result])

    def row_functions(self, theta: Array, n: Array, count: int) -> Array:
        """(count, points) of the first `encode_row` functions at the broadcast points, flattened.

        Arguments beyond the table are moved to its edge.
        """
        shape = np.broadcast_shapes(theta.shape, n.shape)
        if n.ndim == 1 and n.size > 1 and shape[-1] == n.size and shape == theta.shape:
            return self._by_lengths(theta, n, count)
        one_theta = theta.size == 1
        variance = theta.reshape(-1) if one_theta else _flat(theta, shape)
        thetas, lengths, _ = self.row.shape
        a = chebyshev_basis(theta_coordinate(np.minimum(variance, THETA_MAX)), thetas)
        b = chebyshev_basis(length_coordinate(np.minimum(_flat(n, shape), LENGTH_MAX)), lengths)
        in_length = self.row[:, :, :count].reshape(thetas, lengths * count).T @ a
        if one_theta:
            return np.asarray(in_length.reshape(lengths, count).T @ b)
        return np.asarray(np.einsum("bfp,bp->fp", in_length.reshape(lengths, count, -1), b))

    def _by_lengths(self, theta: Array, n: Array, count: int) -> Array:
        """`row_functions` of lengths (P,) that come again and again, and theta (..., P)."""
        in_length = _rows_at_lengths(n.tobytes())[:, :count]
        thetas = in_length.shape[2]
        coordinate = theta_coordinate(np.minimum(theta.reshape(-1), THETA_MAX))
        basis = chebyshev_basis(coordinate, thetas).reshape(thetas, -1, n.size)
        found = in_length @ basis.transpose(2, 0, 1)
        return found.transpose(1, 2, 0).reshape(count, -1)


@functools.lru_cache(64)
def _rows_at_lengths(lengths: bytes) -> Array:
    """(lengths, functions, theta) coefficients of rows."""
    n = np.minimum(np.frombuffer(lengths), LENGTH_MAX)
    row = SquareTable.load().row
    basis = chebyshev_basis(length_coordinate(n), row.shape[1])
    return np.ascontiguousarray(np.tensordot(row, basis, (1, 0)).T)


def _flat(values: Array, shape: tuple[int, ...]) -> Array:
    return (values if values.shape == shape else np.broadcast_to(values, shape)).reshape(-1)


@functools.lru_cache(512)
def _square_rows(n: float) -> SquareRows:
    return SquareRows(n)
