"""Exact statistics of exchangeable softmax rows, many rows at a time.

`moments.transfer.attention.softmax` tabulates them; here its tables are read for arrays of rows
of different variances and lengths at once, and continued where the variance
lies beyond (`softmax.peaked`).
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..softmax import PairStatistics, RowStatistics, SquareTable
from ..softmax.exact import THETA_EXACT
from ..softmax.peaked import at_edge, pairs_beyond, rows_beyond
from ..softmax.table import (
    THETA_MAX,
    chebyshev_basis,
    decode_participation,
    decode_square_pair,
    length_coordinate,
    theta_coordinate,
)

Array = NDArray[np.float64]

THETA_PEAKED = 200.0
"""Logit variances beyond are moved here: the joint laws in single precision were finite up to it,
and queries and keys then lack a factor of the root of the rest."""

THETA_LEAST = 1e-9
"""Variances below are moved here, where every statistic is linear to nine digits."""


def tabulated(theta: Array) -> Array:
    """The variance at which a row of logit variance `theta` is evaluated."""
    return np.asarray(np.minimum(np.maximum(theta, THETA_LEAST), THETA_PEAKED))


def rows(theta: Array, keys: Array) -> RowStatistics:
    """Statistics of single rows, arguments that broadcast; beyond the tables by `peaked`."""
    inside = SquareTable.load().single(np.minimum(theta, THETA_MAX), keys)
    if not np.any(theta > THETA_MAX):
        return inside
    variance, count = np.broadcast_arrays(theta, keys)
    return rows_beyond(variance, count, inside)


EVALUATED = THETA_EXACT
"""Variance up to which rows of one length are read from the second table, or evaluated exactly."""


class AlikeRows:
    """Statistics of rows of one length, at any logit variance; as the functions of this module,
    which take rows of many lengths (`finite_rows.Tables`)."""

    def __init__(self, keys: int) -> None:
        self._keys, self._rows = float(keys), SquareTable.load().at_length(keys)

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, keys: int) -> AlikeRows:
        """The same for the same."""
        return cls(keys)

    def tabulated(self, theta: Array) -> Array:
        """As the function."""
        return tabulated(theta)

    def rows(self, theta: Array, keys: Any = None) -> RowStatistics:
        """Of one row."""
        theta = np.minimum(theta, THETA_PEAKED)
        found = self._rows.single(np.minimum(theta, EVALUATED))
        far = theta > EVALUATED
        if not np.any(far):
            return found
        beyond = rows(np.asarray(theta)[far], np.full(int(far.sum()), self._keys))
        return _replaced(found, far, beyond)

    def pairs(self, theta: Array, keys: Any, rho: Array) -> PairStatistics:
        """Of two rows whose logits correlate by rho."""
        theta, rho = np.broadcast_arrays(np.minimum(theta, THETA_PEAKED), rho)
        far = theta > EVALUATED
        if not np.any(far):
            return self._rows.pair(theta, rho)
        # the least that the exact evaluator is asked for stands where it is not needed
        found = self._rows.pair(np.where(far, THETA_MAX, theta), np.where(far, 1.0, rho))
        count = np.full(int(far.sum()), self._keys)
        beyond = pairs(theta[far][:, None], count, rho[far][:, None])
        return _replaced(found, far, PairStatistics(*[np.ravel(one) for one in beyond[:-1]]))


Statistics = TypeVar("Statistics", RowStatistics, PairStatistics)


def _replaced(found: Statistics, where: Any, values: Statistics) -> Statistics:
    fields: list[Any] = []
    for one, other in zip(found[:-1], values[:-1], strict=True):
        field = np.array(one)
        field[where] = other
        fields.append(field)
    return type(found)(*fields)._replace(valid=found.valid)


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
    if np.any(theta > THETA_MAX):
        return _beyond(theta, keys, rho)
    functions = _functions(theta, keys, rho, 4)
    return decode_square_pair(theta * rho, keys[:, None], functions, True)


def _beyond(theta: Array, keys: Array, rho: Array) -> PairStatistics:
    theta, count, rho = np.broadcast_arrays(theta, keys[:, None], rho)
    edge = SquareTable.load().single(np.full(len(keys), THETA_MAX), keys)
    edge = RowStatistics(*[np.asarray(one)[:, None] for one in edge[:-1]])
    moved, _ = at_edge(theta, rho, edge)
    inside = np.minimum(theta, THETA_MAX)
    met = np.where(theta > THETA_MAX, np.clip(moved, -1.0, 1.0), rho)
    functions = _functions(inside, keys, met, 4)
    found = decode_square_pair(inside * met, keys[:, None], functions, True)
    return pairs_beyond(theta, count, rho, edge, found)


def overlaps(theta: Array, keys: Array, rho: Array) -> Array:
    """(m, s): C2 = E sum a a' alone; arguments as those of `pairs`."""
    if np.any(theta > THETA_MAX):
        return np.asarray(_beyond(theta, keys, rho).overlap)
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
    square, jacobian, slope = _squares(theta, keys)
    for _ in range(6):
        error = (square - sum_square) / np.maximum(slope, 1e-300)
        moved = tabulated(theta * np.exp(np.minimum(np.maximum(-error, -1.0), 1.0)))
        if (np.abs(moved - theta) <= 1e-6 * theta).all():
            break
        theta = moved
        square, jacobian, slope = _squares(theta, keys)
    return np.where(count > 1.0 + 1e-6, jacobian, 0.0)


def _squares(theta: Array, keys: Array) -> tuple[Array, Array, Array]:
    """E sum a^2, E tr J^2 and dP2/dlog theta of `rows`."""
    if theta.max() > THETA_MAX:
        row = rows(theta, keys)
        square, jacobian = np.asarray(row.sum_square), np.asarray(row.jacobian_square)
        return square, jacobian, np.asarray(row.sum_square_slope)
    functions = SquareTable.load().row_functions(theta, keys, 3).reshape(3, *theta.shape)
    square, rest = decode_participation(theta, keys, functions)
    jacobian = functions[1] * square * rest
    return square, jacobian, functions[2] * theta * jacobian
