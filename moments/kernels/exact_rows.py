"""Exact statistics of exchangeable softmax rows, many rows at a time.

`moments.softmax` tabulates them; here its tables are read for arrays of rows of different variances
and lengths at once, with the variance moved to the edge of the table where it lies beyond.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from moments.softmax import PairStatistics, RowStatistics, SquareTable
from moments.softmax.chebyshev import (
    THETA_MAX,
    chebyshev_basis,
    length_coordinate,
    theta_coordinate,
)
from moments.softmax.encoding import decode_participation, decode_square_pair

Array = NDArray[np.float64]

THETA_LEAST = 1e-9
"""Variances below are moved here, where every statistic is linear to nine digits."""


def tabulated(theta: Array) -> Array:
    """The variance at which a row of logit variance `theta` is evaluated."""
    return np.asarray(np.clip(theta, THETA_LEAST, THETA_MAX))


def rows(theta: Array, keys: Array) -> RowStatistics:
    """Statistics of single rows; `theta` within the table, arguments that broadcast."""
    return SquareTable.load().single(theta, keys)


@functools.cache
def _by_length(functions: int) -> Array:
    """(log n, theta * functions * rho) coefficients of the first functions of a pair."""
    pair = SquareTable.load().pair[:, :, :functions].swapaxes(0, 1)
    return np.ascontiguousarray(pair.reshape(len(pair), -1))


def _functions(theta: Array, keys: Array, rho: Array, count: int) -> Array:
    """(count, m, s) of the tabulated functions; arguments as those of `pairs`."""
    thetas, lengths, _, orders = SquareTable.load().pair.shape
    in_length = chebyshev_basis(length_coordinate(keys), lengths).T @ _by_length(count)
    in_length = in_length.reshape(len(keys), thetas, count * orders)
    in_theta = chebyshev_basis(theta_coordinate(theta.ravel()), thetas)
    in_theta = in_theta.reshape(thetas, *theta.shape).transpose(1, 2, 0)  # (m, s or 1, thetas)
    in_rho = (in_theta @ in_length).reshape(*theta.shape, count, orders)
    basis = chebyshev_basis(rho.ravel(), orders).reshape(orders, *rho.shape)
    if theta.shape[1] == 1 and rho.ndim == 1:
        return np.asarray((in_rho[:, 0] @ basis).swapaxes(0, 1))
    if rho.ndim == 1:
        return np.asarray(np.einsum("msfo,os->fms", in_rho, basis))
    return np.asarray(np.einsum("msfo,oms->fms", in_rho, basis))


def pairs(theta: Array, keys: Array, rho: Array) -> PairStatistics:
    """Statistics of two alike rows at several correlations.

    Args:
        theta: (m, 1) or (m, s) logit variance within the table.
        keys: (m,) number of keys of either row.
        rho: (s,) correlations of their logits, or (m, s) where each row has its own.

    Returns:
        (m, s) arrays.
    """
    functions = _functions(theta, keys, rho, 4)
    return decode_square_pair(theta * rho, keys[:, None], functions, True)


def overlaps(theta: Array, keys: Array, rho: Array) -> Array:
    """(m, s): C2 = E sum a a' alone; arguments as those of `pairs`."""
    functions = _functions(theta, keys, rho, 1)
    return decode_participation(theta * rho, keys[:, None], functions)[0]


def jacobian_square(sum_square: Array, count: Array) -> Array:
    """E tr J^2 of exchangeable rows of `count` keys with the given E sum a^2; one shape.

    Newton's method for the logit variance, in its logarithm.
    """
    keys = np.maximum(count, 1.0 + 1e-9)
    sum_square = np.clip(sum_square, (1.0 + 1e-9) / keys, 1.0 - 1e-9)
    odds = (keys - 1.0) * sum_square / (1.0 - sum_square)
    theta = tabulated(np.log(np.maximum(odds, 1.0)))
    row = rows(theta, keys)
    for _ in range(6):
        error = (row.sum_square - sum_square) / np.maximum(row.sum_square_slope, 1e-300)
        moved = tabulated(theta * np.exp(np.clip(-error, -1.0, 1.0)))
        if np.all(np.abs(moved - theta) <= 1e-6 * theta):
            break
        theta = moved
        row = rows(theta, keys)
    return np.where(count > 1.0 + 1e-6, np.asarray(row.jacobian_square), 0.0)
