"""Exact statistics of exchangeable softmax rows, vectorised over rows: the tables of `softmax`,
continued to larger variances by `softmax.peaked`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..softmax import PairStatistics, RowStatistics, SquareTable
from ..softmax.peaked import at_edge, pairs_beyond, rows_beyond
from ..softmax.table import (
    RHO_FAR,
    THETA_FAR,
    THETA_MAX,
    Contracted,
    chebyshev_basis,
    checked_rho,
    checked_theta,
    decode_participation,
    decode_row,
    decode_square_pair,
    far_coordinate,
    far_rho_coordinate,
    length_coordinate,
    theta_coordinate,
)

Array = NDArray[np.float64]

THETA_PEAKED = 200.0
"""Cap on the logit variance, up to which joint laws in single precision are finite. Beyond it the
gradients of queries and keys are low by the root of the ratio."""

THETA_LEAST = 1e-9
"""Floor of the logit variance, at which every statistic is linear to nine digits."""


def tabulated(theta: Array) -> Array:
    """The logit variance, limited to the range of the exact statistics."""
    return np.asarray(np.minimum(np.maximum(theta, THETA_LEAST), THETA_PEAKED))


def rows(theta: Array, keys: Array) -> RowStatistics:
    """Statistics of single rows; arguments broadcast. Beyond the tables by `softmax.peaked`."""
    inside = SquareTable.load().single(np.minimum(theta, THETA_MAX), keys)
    if not np.any(theta > THETA_MAX):
        return inside
    variance, count = np.broadcast_arrays(theta, keys)
    return rows_beyond(variance, count, inside)


class AlikeRows:
    """Statistics of rows of one length n at any logit variance, with the interface of this module.

    Relative errors up to theta = 8: at most 1e-4 for one row and for a pair with rho >= -0.3
    (of radial_overlap relative to jacobian_overlap, of overlap_slope relative to psi times
    jacobian_overlap), 1e-3 as rho approaches -1 at theta > 4. Up to theta = 32 a second table
    interpolates rows, and pairs with rho >= -0.3, to 1e-4. `softmax.peaked` covers more negative
    correlations, where overlaps are almost 0, and larger theta.
    """

    def __init__(self, keys: float) -> None:
        self._keys, self._near = float(keys), SquareTable.load().contracted(keys)

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, keys: float) -> AlikeRows:
        """Cached instance."""
        return cls(keys)

    @functools.cached_property
    def _far(self) -> Contracted:
        return SquareTable.load_far().contracted(self._keys)

    def rows(self, theta: Any, keys: Any = None) -> RowStatistics:
        """Statistics of one row.

        Raises:
            DomainError: theta negative or not finite.
        """
        theta = np.minimum(checked_theta(theta), THETA_PEAKED)
        flat = theta.reshape(-1)
        inside = np.minimum(flat, THETA_MAX)
        result = decode_row(inside, self._keys, self._near.rows(theta_coordinate(inside)))
        beyond = flat > THETA_MAX
        if beyond.any():
            far, peaked = beyond & (flat <= THETA_FAR), flat > THETA_FAR
            functions = self._far.rows(far_coordinate(flat[far]))
            _assign(result, far, decode_row(flat[far], self._keys, functions))
            _assign(result, peaked, rows(flat[peaked], np.full(int(peaked.sum()), self._keys)))
        return RowStatistics(*[np.reshape(field, theta.shape) for field in result])

    def pairs(self, theta: Any, keys: Any, rho: Any) -> PairStatistics:
        """Statistics of two rows whose logits have the correlation rho.

        Raises:
            DomainError: theta negative or not finite, rho outside [-1, 1].
        """
        size = np.minimum(checked_theta(theta), THETA_PEAKED)
        size, cosine = np.broadcast_arrays(size, checked_rho(rho))
        flat, flat_rho = size.reshape(-1), cosine.reshape(-1)
        inside = np.minimum(flat, THETA_MAX)
        functions = self._near.pairs(theta_coordinate(inside), flat_rho)
        result = decode_square_pair(flat_rho * inside, self._keys, functions)
        beyond = flat > THETA_MAX
        if beyond.any():
            far = beyond & (flat <= THETA_FAR) & (flat_rho >= RHO_FAR)
            peaked = beyond & ~far
            functions = self._far.pairs(
                far_coordinate(flat[far]), far_rho_coordinate(flat_rho[far])
            )
            psi = flat_rho[far] * flat[far]
            _assign(result, far, decode_square_pair(psi, self._keys, functions))
            count = np.full(int(peaked.sum()), self._keys)
            other = pairs(flat[peaked][:, None], count, flat_rho[peaked][:, None])
            _assign(result, peaked, [np.ravel(field) for field in other])
        return PairStatistics(*[np.reshape(field, size.shape) for field in result])


def _assign(result: RowStatistics | PairStatistics, where: Any, values: Any) -> None:
    for field, value in zip(result, values, strict=True):
        np.asarray(field)[where] = value


@functools.cache
def _by_length(functions: int) -> Array:
    """(log n, theta * functions * rho) coefficients of the first tabulated functions of a pair."""
    pair = SquareTable.load().pair[:, :, :functions].swapaxes(0, 1)
    return np.ascontiguousarray(pair.reshape(len(pair), -1))


def _functions(theta: Array, keys: Array, rho: Array, count: int) -> Array:
    """(count, m, s) values of the first tabulated functions; arguments as in `pairs`."""
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
    """Statistics of two rows of equal law at several correlations.

    Args:
        theta: (m, 1) or (m, s) logit variance.
        keys: (m,) number of keys.
        rho: (s,) correlations of the logits, or (m, s).

    Returns:
        (m, s) arrays.
    """
    if np.any(theta > THETA_MAX):
        return _beyond(theta, keys, rho)
    functions = _functions(theta, keys, rho, 4)
    return decode_square_pair(theta * rho, keys[:, None], functions)


def _beyond(theta: Array, keys: Array, rho: Array) -> PairStatistics:
    theta, count, rho = np.broadcast_arrays(theta, keys[:, None], rho)
    edge = SquareTable.load().single(np.full(len(keys), THETA_MAX), keys)
    edge = RowStatistics(*[np.asarray(field)[:, None] for field in edge])
    edge_rho, _ = at_edge(theta, rho, edge)
    inside = np.minimum(theta, THETA_MAX)
    correlation = np.where(theta > THETA_MAX, np.clip(edge_rho, -1.0, 1.0), rho)
    functions = _functions(inside, keys, correlation, 4)
    result = decode_square_pair(inside * correlation, keys[:, None], functions)
    return pairs_beyond(theta, count, rho, edge, result)


def overlaps(theta: Array, keys: Array, rho: Array) -> Array:
    """(m, s): C2 = E sum a a' alone; arguments as in `pairs`."""
    if np.any(theta > THETA_MAX):
        return np.asarray(_beyond(theta, keys, rho).overlap)
    functions = _functions(theta, keys, rho, 1)
    return decode_participation(theta * rho, keys[:, None], functions)[0]


def jacobian_square(sum_square: Array, count: Array) -> Array:
    """E tr J^2 of exchangeable rows of `count` keys with the given E sum a^2, entry by entry, by
    Newton's method for the logarithm of the logit variance."""
    keys = np.maximum(count, 1.0 + 1e-9)
    sum_square = np.clip(sum_square, (1.0 + 1e-9) / keys, 1.0 - 1e-9)
    odds = (keys - 1.0) * sum_square / (1.0 - sum_square)
    theta = tabulated(np.log(np.maximum(odds, 1.0)))
    square, jacobian, slope = _squares(theta, keys)
    for _ in range(6):
        error = (square - sum_square) / np.maximum(slope, 1e-300)
        update = tabulated(theta * np.exp(np.minimum(np.maximum(-error, -1.0), 1.0)))
        if (np.abs(update - theta) <= 1e-6 * theta).all():
            break
        theta = update
        square, jacobian, slope = _squares(theta, keys)
    return np.where(count > 1.0 + 1e-6, jacobian, 0.0)


KEYS = np.geomspace(2.0, 2.0**16, 31)
ODDS = np.linspace(-14.0, 8.0, 80)
"""Nodes of `_participation`, between which it is linear, to 3 percent."""


def participation_variance(sum_square: Array, keys: Array) -> Array:
    """Variance over draws of S = sum a^2 of exchangeable rows with the given E S.

    With a_j = e_j/sum e, Laplace's transform of 1/(sum e)^4 gives E S^2 as one integral of
    functions of a single key: derived here, a test draws rows.
    """
    excess = np.clip(sum_square - 1.0 / keys, 0.0, 1.0)
    odds = np.log(np.maximum(excess, 1e-12) / np.maximum(1.0 - sum_square, 1e-12))
    row, of_row = _between(np.log(KEYS), np.log(keys) + 0.0 * excess)
    column, of_column = _between(ODDS, odds)
    table = _participation()
    first, second = (
        (1.0 - of_column) * table[k, column] + of_column * table[k, column + 1]
        for k in (row, row + 1)
    )
    return np.asarray(np.exp((1.0 - of_row) * first + of_row * second) * excess**2)


def _between(nodes: Array, values: Array) -> tuple[NDArray[np.int64], Array]:
    """The node below each value, and the value's position between it and the next."""
    place = np.interp(values, nodes, np.arange(len(nodes)))
    low = np.minimum(place.astype(int), len(nodes) - 2)
    return low, place - low


@functools.cache
def _participation() -> Array:
    """log Var S/(E S - 1/n)^2 at `KEYS` and `ODDS`, logarithms of (E S - 1/n)/(1 - E S)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    weights = weights / weights.sum()
    odds, values, n = [], [], KEYS[:, None]
    for theta in np.geomspace(0.01, 20.0, 20):
        sizes, end = np.exp(np.sqrt(theta) * nodes), 4.0 + 4.0 * np.sqrt(theta)
        start = -np.log(KEYS[-1]) - theta - 6.0
        times, step = np.linspace(start, end, 300, retstep=True)
        times = np.exp(times)
        decay = np.exp(-np.outer(times, sizes))
        zeroth, square, fourth = (decay @ (weights * sizes**k) for k in (0, 2, 4))
        others = np.power(zeroth, n - 2.0)
        mean = step * (times**2 * n * square * zeroth * others).sum(1)
        squares = n * fourth * zeroth + n * (n - 1.0) * square**2
        second = step * (times**4 / 6.0 * squares * others).sum(1)
        excess = mean - 1.0 / KEYS
        odds.append(np.log(excess / (1.0 - mean)))
        values.append(np.log((second - mean**2) / excess**2))
    columns = zip(np.transpose(odds), np.transpose(values), strict=True)
    return np.array([np.interp(ODDS, *column) for column in columns])


def _squares(theta: Array, keys: Array) -> tuple[Array, Array, Array]:
    """E sum a^2, E tr J^2 and dP2/dlog theta of single rows."""
    if theta.max() > THETA_MAX:
        row = rows(theta, keys)
        square, jacobian = np.asarray(row.sum_square), np.asarray(row.jacobian_square)
        return square, jacobian, np.asarray(row.sum_square_slope)
    functions = SquareTable.load().row_functions(theta, keys, 3).reshape(3, *theta.shape)
    square, rest = decode_participation(theta, keys, functions)
    jacobian = functions[1] * square * rest
    return square, jacobian, functions[2] * theta * jacobian
