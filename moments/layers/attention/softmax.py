"""Statistics of softmax rows with Gaussian logits, over exchangeable keys.

Tables interpolate bounded, smooth functions of theta, log n and rho: a statistic over its behaviour
in the limits theta -> 0, n -> 1 and n -> infinity, so that errors are relative and these limits
exact (`benchmarks/build_softmax_tables.py`). Rows of larger logit variance, where one key has
almost all attention, continue them. Tokens of fixed norm, and the fluctuation of a row's logit
variance over draws, are corrections. See docs/theory/softmax.md.
"""

from __future__ import annotations

import functools
import math
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import domain_error

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
    """One row a of n keys, its logits s of variance theta; S = sum_j a_j^2.

    Attributes:
        sum_square: P2 = E S.
        sum_cube: P3 = E sum a^3.
        sum_fourth: P4 = E sum a^4.
        jacobian_square: T2 = E tr J^2.
        radial_square: U = E |J s|^2 / theta; (1 + theta) T2 for many keys.
        sum_square_slope: dP2/dlog theta.
        entropy: E[-sum a log a], in nats.
    """

    sum_square: Array | float
    sum_cube: Array | float
    sum_fourth: Array | float
    jacobian_square: Array | float
    radial_square: Array | float
    sum_square_slope: Array | float
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
    return RowStatistics(
        sum_square=p2,
        sum_cube=np.minimum(np.exp(theta * functions[5]) / n**2, p2),
        sum_fourth=np.minimum(np.exp(theta * functions[6]) / n**3, p2),
        jacobian_square=jacobian,
        radial_square=functions[3] * jacobian,
        sum_square_slope=functions[2] * theta * jacobian,
        entropy=np.log(n) - functions[4] * (theta * rest),
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


# --- beyond the tables ----------------------------------------------------------------------------

GUMBEL = math.pi**2 / 6
"""Variance of Gumbel noise."""


@functools.lru_cache(maxsize=4096)
def extremes(keys: float) -> float:
    """f of n standard normals (any real n > 1)."""
    from scipy.special import log_ndtr

    x = np.linspace(-12.0, 12.0, 1201)
    log_density = -0.5 * x * x - 0.5 * math.log(2 * math.pi)
    below = log_ndtr(x)
    step = x[1] - x[0]
    return float(keys * (keys - 1.0) * np.exp(2 * log_density + (keys - 2.0) * below).sum() * step)


def _falling(theta: Array, gap: Array, edge: Array) -> Array:
    """dP2/dlog theta of `_deficit`, by a difference quotient."""
    step = 1e-4
    return np.asarray((_deficit(theta, gap, edge) - _deficit(theta * (1 + step), gap, edge)) / step)


def _of_keys(keys: Array) -> Array:
    """`extremes` of every number of keys."""
    distinct, where = np.unique(keys, return_inverse=True)
    result = np.array([extremes(max(n, 1.0 + 1e-6)) for n in distinct.tolist()])[where.ravel()]
    return result.reshape(np.shape(keys))


def _deficit(theta: Array, gap: Array, edge: Array) -> Array:
    """1 - P2, given its value at the edge of the tables."""
    sigma, first = np.sqrt(theta), math.sqrt(THETA_MAX)
    at_edge = edge * first
    frozen = (gap - (gap - at_edge) * THETA_MAX / theta) / sigma
    # In rows of so many keys that none has a sizeable share yet, odds grow by sigma/f.
    spread = 1.0 / (1.0 / edge + (sigma - first) / gap)
    return np.where(gap < 1.5 * at_edge, frozen, spread)


def _partitions(square: Array) -> tuple[Array, Array, Array]:
    """E tr J^2, P3 and P4 of the Poisson-Dirichlet law with this P2, by the partitions of up to
    four draws of a key."""
    cube = square * (1 + square) / 2
    return square * (1 - square) / 3, cube, cube * (2 + square) / 3


TIES = (math.pi**2 - 6) / 6
"""theta U/E tr J^2 with two competing keys: mean of x^2/2 under (a (1 - a))^2, x their distance."""


def _radial(theta: Array, edge: RowStatistics) -> Array:
    """U/E tr J^2 of equal rows."""
    jacobian = np.maximum(np.asarray(edge.jacobian_square), 1e-300)
    before = THETA_MAX * np.asarray(edge.radial_square) / jacobian
    return np.asarray((TIES + (before - TIES) * THETA_MAX / theta) / theta)


def _curvature(theta: Array, deficit: Array, edge: RowStatistics) -> Array:
    """E tr J^2 at 1 - P2 = deficit."""
    square = np.asarray(edge.sum_square)
    ratio = np.asarray(edge.jacobian_square) / np.maximum(_partitions(square)[0], 1e-300)
    return np.asarray(_partitions(1 - deficit)[0] * (1 + (ratio - 1) * THETA_MAX / theta))


def rows_beyond(theta: Array, keys: Array, edge: RowStatistics) -> RowStatistics:
    """Statistics of single rows if theta > THETA_MAX, else `edge`.

    Args:
        edge: statistics at min(theta, THETA_MAX).
    """
    gap = _of_keys(keys)
    far = np.maximum(theta, THETA_MAX)
    rest = np.maximum(1.0 - np.asarray(edge.sum_square), 1e-300)
    deficit = _deficit(far, gap, rest)
    share = deficit / rest
    jacobian = _curvature(far, deficit, edge)
    _, *before = _partitions(np.asarray(edge.sum_square))
    _, *laws = _partitions(1 - deficit)
    cube, fourth = (
        law * (1 + (np.asarray(exact) / np.maximum(law_at_edge, 1e-300) - 1) * THETA_MAX / far)
        for exact, law_at_edge, law in zip(
            (edge.sum_cube, edge.sum_fourth), before, laws, strict=True
        )
    )
    result = RowStatistics(
        sum_square=1.0 - deficit,
        sum_cube=np.minimum(cube, 1 - deficit),
        sum_fourth=np.minimum(fourth, 1 - deficit),
        jacobian_square=jacobian,
        radial_square=_radial(far, edge) * jacobian,
        sum_square_slope=_falling(far, gap, rest),
        entropy=np.asarray(edge.entropy) * share,
    )
    beyond = (theta > THETA_MAX) & (keys > 1.0 + 1e-6)
    return RowStatistics(*[np.where(beyond, a, b) for a, b in zip(result, edge, strict=True)])


def at_edge(theta: Array, rho: Array, edge: RowStatistics) -> tuple[Array, Array]:
    """Correlation at the edge of the tables with the same overlap, and its ratio to rho.

    Args:
        edge: statistics of single rows at THETA_MAX; broadcasts against theta and rho.
    """
    slope = np.asarray(edge.sum_square_slope)
    kappa = slope / np.maximum(np.asarray(edge.jacobian_square), 1e-300)
    far = np.maximum(theta, THETA_MAX)
    shift = GUMBEL * (1 / THETA_MAX - 1 / far)
    shift = shift + (kappa - GUMBEL) * (1 / THETA_MAX - THETA_MAX / far**2) / 2
    stretch = np.exp(shift)
    return rho * stretch, stretch


def pairs_beyond(
    theta: Array, keys: Array, rho: Array, edge: RowStatistics, result: PairStatistics
) -> PairStatistics:
    """Statistics of two rows if theta > THETA_MAX, else `result`; all of one shape.

    Args:
        theta, keys, rho: logit variance, number of keys and correlation of the logits.
        edge: single rows at THETA_MAX.
        result: pairs at min(theta, THETA_MAX) and at the correlation of `at_edge`, at most 1.
    """
    gap = _of_keys(keys)
    far = np.maximum(theta, THETA_MAX)
    edge_rho, stretch = at_edge(far, rho, edge)
    rest = np.maximum(1.0 - np.asarray(edge.sum_square), 1e-300)
    overlap = np.asarray(result.overlap)
    slope = THETA_MAX * np.asarray(result.jacobian_overlap) * stretch  # dC2/drho
    # Hermite's cubic of (1 - C2)^2 in rho, from the line that meets the edge at 1 to rho = 1
    low, low_slope = 1 / stretch, THETA_MAX * np.asarray(edge.jacobian_square) * stretch
    deficit = _deficit(far, gap, rest)
    top_slope = far * _curvature(far, deficit, edge)
    width = np.maximum(1.0 - low, 1e-12)
    at_low, at_top = rest**2, deficit**2
    chord = (at_top - at_low) / width
    first = np.maximum(-2 * rest * low_slope, 3 * chord)
    last = np.maximum(-2 * deficit * top_slope, 3 * chord)
    t = np.clip((rho - low) / width, 0.0, 1.0)
    square = at_low * (1 + 2 * t) * (1 - t) ** 2 + at_top * t * t * (3 - 2 * t)
    square = square + width * (first * t * (1 - t) ** 2 - last * t * t * (1 - t))
    change = 6 * t * (1 - t) * chord + first * (1 - t) * (1 - 3 * t) + last * t * (3 * t - 2)
    near = np.sqrt(np.maximum(square, 1e-300))
    within = (edge_rho > 1.0) & (width > 1e-7)
    overlap = np.where(within, 1.0 - near, overlap)
    slope = np.where(within, np.maximum(-change, 0.0) / (2 * near), slope)
    jacobian = slope / far
    before = np.maximum(np.asarray(result.jacobian_overlap), 1e-300)
    own = np.asarray(edge.radial_square) / np.maximum(np.asarray(edge.jacobian_square), 1e-300)
    radial_ratio = _radial(far, edge) / np.maximum(own, 1e-300)
    radial = np.asarray(result.radial_overlap) * jacobian / before * radial_ratio
    growth = np.asarray(result.overlap_slope) * jacobian / before
    beyond = (theta > THETA_MAX) & (keys > 1.0 + 1e-6)
    fields = zip((overlap, jacobian, radial, growth), result, strict=True)
    return PairStatistics(*[np.where(beyond, a, b) for a, b in fields])


# --- rows of any logit variance -------------------------------------------------------------------

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


# --- queries whose norm fluctuates ----------------------------------------------------------------


class ChiSquareRule(NamedTuple):
    """Nodes (points,) of mean 1, and weights (points,) of sum 1."""

    nodes: Array
    weights: Array


def _frozen(array: Array) -> Array:
    """Make an array read-only, because a cache returns it."""
    array.flags.writeable = False
    return array


@functools.lru_cache(256)
def chi_square_rule(nu: float, points: int | None = None) -> ChiSquareRule:
    """Gaussian quadrature for xi = chi-square(nu) / nu, exact up to xi^(2 points - 1).

    The default errs by less than 0.3 % on averages of P2, T2 and theta T2 for nu >= 25 and theta
    up to 1.5, 0.5 % below.

    Args:
        nu: degrees of freedom, > 0; infinity means no fluctuation.
        points: number of nodes; by default 2 for nu >= 25, 3 for nu >= 8, else 5.

    Raises:
        DomainError: nu not positive, or points < 1.

    Source:
        Golub and Welsch (1969): eigenvalues of the Jacobi matrix of the generalised Laguerre
        polynomials with alpha = nu/2 - 1.
    """
    if not nu > 0.0:
        raise domain_error("nu", nu, "a number of degrees of freedom > 0")
    if points is None:
        points = 2 if nu >= 25.0 else 3 if nu >= 8.0 else 5
    if points < 1:
        raise domain_error("points", points, "at least 1")
    if not nu < 1e12:
        return ChiSquareRule(_frozen(np.ones(1)), _frozen(np.ones(1)))
    i = np.arange(points)
    half = 0.5 * nu
    off_diagonal = np.sqrt(i[1:] * (i[1:] + half - 1.0))
    jacobi = np.diag(2.0 * i + half) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return ChiSquareRule(_frozen(nodes / half), _frozen(vectors[0] ** 2))


# --- tokens whose norm is fixed -------------------------------------------------------------------

STIFFNESS_LEAST = 1e-12
"""Floor of the fourth cumulant of the keys' logits, for Gaussian keys."""

CORRECTED_MAX = 30.0
"""Cap on the logit variance in first-order terms of the widths, inside the table of
`key_corrections`: they assume an annealed sum over keys, not a row that selects a single key."""


class PairSpreads(NamedTuple):
    """Variances of |p|^2 and |q|^2 over those of Gaussian queries, and their regression.

    With w, w' = sqrt((1+rho)/2) p +- sqrt((1-rho)/2) q.

    Attributes:
        total, difference: of |p|^2 and of |q|^2.
        along: covariance of the two over the variance of |p|^2.
    """

    total: Any
    difference: Any
    along: Any


def pair_spreads(rho: Any, shared: Any, share: Any) -> PairSpreads:
    """Fluctuations of two queries of correlation rho over keys that share the fraction k.

    With o = x_i.x_k/d and phi the relative fluctuation of the keys' unshared variance, over delta:
    Var phi = 2 k^2, Var o = (1 - rho^2)^2, Cov = -2 s^2 (1 - rho), s the correlation of queries and
    keys; |p|^2 = (1+o)(1+phi)/(1+rho) and |q|^2 = (1-o)(1+phi)/(1-rho). s^2 = k rho is used, exact
    for exchangeable tokens.

    Args:
        rho, shared: rho and k, in [0, 1].
        share: delta over the relative variance of |w|^2 without it.
    """
    plus, minus, square, cross = 1 + rho, 1 - rho, shared * shared, 4 * shared * rho
    total = 1 + share * (minus**2 + 2 * square - cross * minus / plus)
    difference = 1 + share * (plus**2 + 2 * square + cross)
    along = share * (-plus * minus + 2 * square + cross * rho / plus) / total
    return PairSpreads(total, difference, along)


def sphere(variance: Any, dimension: Any) -> Any:
    """log E e^s for s of this variance, a coordinate of a point on a sphere: leading order in 1/D.

    v/2 - v^2/(4 D) + ...: the saddle point of the Bessel integral.
    """
    stretch = 4 * variance / dimension
    excess = stretch / (np.sqrt(1 + stretch) + 1)
    return dimension / 2 * (excess - np.log1p(excess / 2))


class KeyCorrections(NamedTuple):
    """Corrections for keys of fixed norm.

    Attributes:
        dimension: of the sphere whose coordinates have the fourth cumulant of the logits.
        share: fraction of the shift for infinitely many keys that occurs with n keys.
        curvature: theta sum_l E d^2 (J^2)_ll / ds_l^2, over E tr J^2.
    """

    dimension: Any
    share: Any
    curvature: Any

    def covariance(self, theta: Any, psi: Any) -> Any:
        """(m, ...) covariance of the equivalent Gaussian logits; its relative shift is constant
        beyond `CORRECTED_MAX`."""
        axes = -1, *(1,) * (np.ndim(theta) - 1)
        dimension, share = (np.reshape(x, axes) for x in (self.dimension, self.share))
        inside = np.minimum(1.0, CORRECTED_MAX / np.maximum(theta, CORRECTED_MAX))
        theta, psi = inside * theta, inside * psi
        joint = sphere(2 * (theta + psi), dimension) - 2 * sphere(theta, dimension)
        return (psi + share * (joint - psi)) / inside


@functools.cache
def _table() -> Array:
    """(theta, log n, functions) Chebyshev coefficients of the share and of the curvature."""
    return load_coefficients("softmax_norms")["row"]


def key_corrections(theta: Any, keys: Any, dimension: Any) -> KeyCorrections:
    """Corrections by a table of exact integrals, with relative errors of 1e-4 in the share and .003
    in the curvature.

    Args:
        theta, keys: (m,) logit variance, and number of keys.
    """
    variance = np.minimum(np.maximum(theta, 0.0), CORRECTED_MAX)
    length = np.clip(keys, 1.0, LENGTH_MAX)
    thetas, lengths, _ = _table().shape
    a = chebyshev_basis(whole_coordinate(variance), thetas)
    b = chebyshev_basis(length_coordinate(length), lengths)
    share, curvature = np.einsum("abf,ap,bp->fp", _table(), a, b, optimize=True)
    return KeyCorrections(dimension, share, variance * curvature)
