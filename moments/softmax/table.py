"""Statistics of softmax rows of one length, by interpolation: microseconds instead of milliseconds."""

from __future__ import annotations

import functools
from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from moments.errors import domain_error
from moments.softmax.chebyshev import (
    LOG_LENGTH_MAX,
    THETA_MAX,
    chebyshev_basis,
    length_coordinate,
    theta_coordinate,
)
from moments.softmax.encoding import decode_row, decode_square_pair
from moments.softmax.exact import (
    PSI_LEAST,
    THETA_EXACT,
    PairStatistics,
    RowStatistics,
    check_length,
    pair_statistics,
    row_statistics,
)
from moments.softmax.laplace import Array

LENGTH_MAX = float(np.exp(LOG_LENGTH_MAX))


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
    """`row_statistics`, at the nearest validated variance and with `valid` saying if that is another."""
    return row_statistics(min(theta, THETA_EXACT), n)._replace(valid=theta <= THETA_EXACT)


def exact_pair(theta: float, n: float, rho: float) -> PairStatistics:
    """`pair_statistics`, at the nearest validated arguments and with `valid` saying if those are others."""
    nearest = min(theta, THETA_EXACT)
    inside = theta <= THETA_EXACT and (rho == -1.0 or rho * nearest >= PSI_LEAST)
    if rho > -1.0 and rho * nearest < PSI_LEAST:
        rho = PSI_LEAST / nearest
    return pair_statistics(nearest, n, rho)._replace(valid=inside)


class SquareRows:
    """Statistics of rows of one length n; made by `SquareTable.at_length`.

    Up to theta = 8 and n = 1e8 they are interpolated: relative error below 1e-4 (radial_overlap: of
    jacobian_overlap). Beyond, and up to theta = 32, the exact evaluator is called, milliseconds per
    point. Beyond that the numbers are those of theta = 32, and `valid` is False.
    """

    def __init__(self, n: float, row: Array, pair: Array) -> None:
        """`row` (theta, functions) and `pair` (theta, functions * rho) are contracted over log n."""
        self.n = n
        self._row = np.ascontiguousarray(row.T)
        self._pair = np.ascontiguousarray(pair.T)
        self._pair_functions = 4
        self._limit = THETA_MAX if n <= LENGTH_MAX * (1.0 + 1e-12) else -1.0

    def single(self, theta: ArrayLike) -> RowStatistics:
        """Statistics of one row.

        Args:
            theta: logit variance, any shape.

        Returns:
            Arrays of that shape.

        Raises:
            DomainError: theta negative or not finite.
        """
        theta = checked_theta(theta)
        flat = theta.reshape(-1)
        beyond = flat > self._limit
        tabulated = np.minimum(flat, THETA_MAX)
        count = self._row.shape[1]
        functions = self._row @ chebyshev_basis(theta_coordinate(tabulated), count)
        valid = ~beyond
        result = decode_row(tabulated, self.n, functions, valid)
        if beyond.any():
            for i in np.flatnonzero(beyond):
                _assign(result, i, exact_row(float(flat[i]), self.n))
        return result if theta.ndim == 1 else RowStatistics(*[f.reshape(theta.shape) for f in result])

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
        theta, rho = checked_theta(theta), checked_rho(rho)
        if theta.shape != rho.shape:
            theta, rho = np.broadcast_arrays(theta, rho)
        flat, flat_rho = theta.reshape(-1), rho.reshape(-1)
        beyond = flat > self._limit
        tabulated = np.minimum(flat, THETA_MAX)
        count = self._pair.shape[1]
        in_rho = self._pair @ chebyshev_basis(theta_coordinate(tabulated), count)
        in_rho = in_rho.reshape(self._pair_functions, -1, flat.size)
        basis = chebyshev_basis(flat_rho, in_rho.shape[1])
        functions = (in_rho * basis).sum(axis=1)
        result = decode_square_pair(flat_rho * tabulated, self.n, functions, ~beyond)
        if beyond.any():
            for i in np.flatnonzero(beyond):
                _assign(result, i, exact_pair(float(flat[i]), self.n, float(flat_rho[i])))
        return (
            result if theta.ndim == 1 else PairStatistics(*[f.reshape(theta.shape) for f in result])
        )


def _assign(
    result: RowStatistics | PairStatistics, i: int, exact: RowStatistics | PairStatistics
) -> None:
    for array, value in zip(result, exact, strict=True):
        array[i] = value  # type: ignore[index]


class SquareTable(NamedTuple):
    """Chebyshev coefficients for rows of equal length and equal logit variance.

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
        theta, n = checked_theta(theta), checked_length("n", n)
        if n.size == 1 and n.ndim == 0:
            return self.at_length(float(n)).single(theta)
        shape = np.broadcast_shapes(theta.shape, n.shape)
        functions = self.row_functions(theta, n, self.row.shape[2])
        flat, length = _flat(theta, shape), _flat(n, shape)
        beyond = (flat > THETA_MAX) | (length > LENGTH_MAX)
        result = decode_row(np.minimum(flat, THETA_MAX), length, functions, ~beyond)
        for i in np.flatnonzero(beyond):
            _assign(result, i, exact_row(float(flat[i]), float(length[i])))
        return RowStatistics(*[field.reshape(shape) for field in result])

    def row_functions(self, theta: Array, n: Array, count: int) -> Array:
        """(count, points) of the first `encode_row` functions at the broadcast points, flattened.

        Arguments beyond the table are moved to its edge.
        """
        shape = np.broadcast_shapes(theta.shape, n.shape)
        thetas, lengths, functions = self.row.shape[0], self.row.shape[1], count
        one_theta = theta.size == 1
        x = theta_coordinate(np.minimum(theta.reshape(-1) if one_theta else _flat(theta, shape), THETA_MAX))
        y = length_coordinate(np.minimum(_flat(n, shape), LENGTH_MAX))
        table = self.row[:, :, :count].reshape(thetas, lengths * functions)
        in_length = table.T @ chebyshev_basis(x, thetas)  # (lengths * functions, points or 1)
        basis = chebyshev_basis(y, lengths)
        if one_theta:
            return np.asarray(in_length.reshape(lengths, functions).T @ basis)
        return np.asarray(
            np.einsum("bfp,bp->fp", in_length.reshape(lengths, functions, -1), basis)
        )


def _flat(values: Array, shape: tuple[int, ...]) -> Array:
    return np.asarray(np.broadcast_to(values, shape).reshape(-1))


@functools.lru_cache(512)
def _square_rows(n: float) -> SquareRows:
    table = SquareTable.load()
    basis = chebyshev_basis(
        length_coordinate(np.array([min(n, LENGTH_MAX)])), max(table.row.shape[1], table.pair.shape[1])
    )[:, 0]
    row = np.einsum("abf,b->af", table.row, basis[: table.row.shape[1]])
    pair = np.einsum("abfr,b->afr", table.pair, basis[: table.pair.shape[1]])
    return SquareRows(n, row, pair.reshape(pair.shape[0], -1))
