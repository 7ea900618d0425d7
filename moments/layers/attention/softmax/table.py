"""Statistics of softmax rows by interpolation.

Tables interpolate bounded, smooth functions of theta, log n and rho: a statistic over its behaviour
in the limits theta -> 0, n -> 1 and n -> infinity, so that errors are relative and these limits
exact. `benchmarks/build_softmax_tables.py` makes them. See docs/theory/softmax.md, The integrals.
"""

from __future__ import annotations

import functools
import math
from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ....errors import domain_error

# --- statistics ----------------------------------------------------------------------------------

Array = NDArray[np.float64]


class PairStatistics(NamedTuple):
    """Two softmax rows; broadcast arrays.

    Attributes:
        overlap: C2 = E sum_j a_j a'_j.
        jacobian_overlap: T = E tr(J J') = dC2/dpsi.
        radial_overlap: UD = E (J s).(J' s') / psi; (1 + psi) T for many keys.
        overlap_slope: dC2/dlog theta at fixed rho, theta of both rows.
    """

    overlap: Array | float
    jacobian_overlap: Array | float
    radial_overlap: Array | float
    overlap_slope: Array | float


class RowStatistics(NamedTuple):
    """One row a of n keys, its logits s of variance theta; S = sum_j a_j^2, m = sum_j a_j s_j.

    Attributes:
        sum_square: P2 = E S.
        sum_cube: P3 = E sum a^3.
        sum_fourth: P4 = E sum a^4.
        trace_square: E (tr J)^2 = E (1 - S)^2; hence E S^2 = trace_square - 1 + 2 P2.
        jacobian_square: T2 = E tr J^2.
        radial_square: U = E |J s|^2 / theta; (1 + theta) T2 for many keys.
        sum_square_slope: dP2/dlog theta.
        mean_logit_square: E m^2 / theta.
        weighted_logit_square: E sum a^2 s^2 / theta.
        entropy: E[-sum a log a], in nats.
    """

    sum_square: Array | float
    sum_cube: Array | float
    sum_fourth: Array | float
    trace_square: Array | float
    jacobian_square: Array | float
    radial_square: Array | float
    sum_square_slope: Array | float
    mean_logit_square: Array | float
    weighted_logit_square: Array | float
    entropy: Array | float


# --- bounded functions ----------------------------------------------------------------------------


def decode_participation(theta: Array, n: Array | float, functions: Array) -> tuple[Array, Array]:
    """(P2, 1 - P2) from the first function, each to full relative accuracy."""
    odds = np.exp(theta * functions[0])
    others = n - 1.0
    total = others + odds
    return odds / total, others / total


def decode_row(theta: Array, n: Array | float, functions: Array) -> RowStatistics:
    """Statistics of one row from the tabulated functions, whose trailing axes are theta's."""
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
    )


def decode_square_pair(psi: Array, n: Array | float, functions: Array) -> PairStatistics:
    """Statistics of two rows of n keys from the tabulated functions."""
    c2, rest = decode_participation(psi, n, functions)
    jacobian = np.exp(functions[1]) * c2 * rest
    return PairStatistics(c2, jacobian, functions[2] * jacobian, functions[3] * psi * jacobian)


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


_NEAR, _FAR = math.sqrt(THETA_MAX), math.sqrt(THETA_FAR)


def far_coordinate(theta: Array) -> Array:
    """[THETA_MAX, THETA_FAR] to [-1, 1], linear in the standard deviation."""
    return np.asarray((np.sqrt(theta) - _NEAR) * (2.0 / (_FAR - _NEAR)) - 1.0)


def whole_coordinate(theta: Array) -> Array:
    """[0, THETA_FAR] to [-1, 1], linear in the standard deviation."""
    return np.asarray(np.sqrt(theta) * (2.0 / _FAR) - 1.0)


def far_rho_coordinate(rho: Array) -> Array:
    """[RHO_FAR, 1] to [-1, 1]."""
    return np.asarray((rho - RHO_FAR) * (2.0 / (1.0 - RHO_FAR)) - 1.0)


def length_coordinate(n: Array) -> Array:
    """[1, 1e8] to [-1, 1], linear in log n."""
    return np.asarray(np.log(n) * (2.0 / LOG_LENGTH_MAX) - 1.0)


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


class Contracted:
    """A table at one number of keys: `row` (theta, functions), `pair` (theta, functions, rho)."""

    def __init__(self, row: Array, pair: Array) -> None:
        self._row = np.ascontiguousarray(row.T)
        self._pair_shape = pair.shape[1:]
        self._pair = np.ascontiguousarray(pair.reshape(pair.shape[0], -1).T)

    def rows(self, theta: Array) -> Array:
        """(functions, points) at coordinates (points,)."""
        return np.asarray(self._row @ chebyshev_basis(theta, self._row.shape[1]))

    def pairs(self, theta: Array, rho: Array) -> Array:
        """(functions, points) of pairs at coordinates (points,)."""
        in_rho = self._pair @ chebyshev_basis(theta, self._pair.shape[1])
        basis = chebyshev_basis(rho, self._pair_shape[1])
        return np.asarray((in_rho.reshape(*self._pair_shape, theta.size) * basis).sum(axis=1))


class SquareTable(NamedTuple):
    """Chebyshev coefficients for rows of equal length and equal logit variance, up to THETA_MAX.

    Attributes:
        row: (theta, log n, functions) for one row, see `decode_row`.
        pair: (theta, log n, functions, rho) for two rows, see `decode_square_pair`.
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
        """The table for theta from THETA_MAX to THETA_FAR and correlations from RHO_FAR."""
        data = load_coefficients("softmax_far")
        return SquareTable(data["row"], data["pair"])

    def contracted(self, n: float) -> Contracted:
        """The coefficients at n keys."""
        coordinate = length_coordinate(np.array([min(n, LENGTH_MAX)]))
        row_basis = chebyshev_basis(coordinate, self.row.shape[1])[:, 0]
        pair_basis = chebyshev_basis(coordinate, self.pair.shape[1])[:, 0]
        row = np.einsum("abf,b->af", self.row, row_basis)
        return Contracted(row, np.einsum("abfr,b->afr", self.pair, pair_basis))

    def single(self, theta: ArrayLike, n: ArrayLike) -> RowStatistics:
        """Statistics of single rows, over broadcasting arrays of variances and numbers of keys.

        Arguments beyond the table are moved to its edge.

        Raises:
            DomainError: theta negative or not finite; n < 1 or not finite.
        """
        variance, length = checked_theta(theta), checked_length("n", n)
        shape = np.broadcast_shapes(variance.shape, length.shape)
        functions = self.row_functions(variance, length, self.row.shape[2])
        variance, length = _flat(variance, shape), _flat(length, shape)
        result = decode_row(np.minimum(variance, THETA_MAX), length, functions)
        return RowStatistics(*[np.reshape(field, shape) for field in result])

    def row_functions(self, theta: Array, n: Array, count: int) -> Array:
        """(count, points) of the first functions of `decode_row`; arguments as in `single`."""
        shape = np.broadcast_shapes(theta.shape, n.shape)
        one_theta = theta.size == 1
        variance = theta.reshape(-1) if one_theta else _flat(theta, shape)
        thetas, lengths, _ = self.row.shape
        a = chebyshev_basis(theta_coordinate(np.minimum(variance, THETA_MAX)), thetas)
        b = chebyshev_basis(length_coordinate(np.minimum(_flat(n, shape), LENGTH_MAX)), lengths)
        in_length = self.row[:, :, :count].reshape(thetas, lengths * count).T @ a
        if one_theta:
            return np.asarray(in_length.reshape(lengths, count).T @ b)
        return np.asarray(np.einsum("bfp,bp->fp", in_length.reshape(lengths, count, -1), b))


def _flat(values: Array, shape: tuple[int, ...]) -> Array:
    return (values if values.shape == shape else np.broadcast_to(values, shape)).reshape(-1)
