"""Statistics of two softmax rows of different lengths, by interpolation: causal attention."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from moments.errors import domain_error
from moments.softmax.chebyshev import (
    LENGTH_MAX,
    THETA_MAX,
    chebyshev_basis,
    length_coordinate,
    ratio_coordinate,
    theta_coordinate,
)
from moments.softmax.encoding import decode_pair, decode_participation
from moments.softmax.exact import PairStatistics
from moments.softmax.laplace import Array
from moments.softmax.table import (
    SquareTable,
    checked_length,
    checked_rho,
    checked_theta,
    load_coefficients,
)


def _lengths(n: ArrayLike, k: ArrayLike) -> tuple[Array, Array]:
    short, long = checked_length("n", n), checked_length("k", k)
    if np.any(long < short):
        raise domain_error("k", k, "at least n", "name the shorter row first")
    return short, long


def _shaped(result: PairStatistics, shape: tuple[int, ...]) -> PairStatistics:
    return PairStatistics(*[np.reshape(field, shape) for field in result])


class RectangularTable(NamedTuple):
    """Chebyshev coefficients for rows of n and k >= n keys that share the first n: a causal mask.

    Relative errors: overlap below 1e-5 up to theta = 2 and 1e-4 up to 8; jacobian_overlap 2e-5,
    2e-4 up to 6, 3e-3 up to 8; overlap_slope 3e-5, 5e-4 up to 6, 1e-3 up to 8 (over psi times
    jacobian_overlap); radial_overlap 5e-4 (over jacobian_overlap). Medians are a tenth of these or
    less. Beyond theta = 8 or n = 1e8 arguments are moved to that edge and `valid` is False;
    `pair_statistics` goes on to 32.

    Attributes:
        pair: (theta, log n, functions, rho, cube root of n/k) of `encode_pair`.
    """

    pair: Array

    @staticmethod
    @functools.cache
    def load() -> RectangularTable:
        """The table shipped with the package, read once."""
        return RectangularTable(load_coefficients("softmax_rectangular")["pair"])

    def pairs(self, theta: ArrayLike, n: ArrayLike, rho: ArrayLike, k: ArrayLike) -> PairStatistics:
        """Statistics of pairs of rows of one logit variance; all arguments broadcast.

        About 10 microseconds a point; `staged` is faster where theta and rho are the same for all.

        Args:
            theta: logit variance of both rows.
            n: number of keys of the shorter row; real, >= 1.
            rho: correlation of the two logits of a shared key, in [-1, 1].
            k: number of keys of the longer row, >= n.

        Raises:
            DomainError: an argument outside these ranges.
        """
        short, long = _lengths(n, k)
        arrays = np.broadcast_arrays(checked_theta(theta), short, checked_rho(rho), long)
        variance, short, correlation, long = (a.reshape(-1) for a in arrays)
        valid = (variance <= THETA_MAX) & (short <= LENGTH_MAX)
        variance = np.minimum(variance, THETA_MAX)
        functions = self._functions(variance, short, correlation, long)
        result = decode_pair(correlation * variance, short, long, functions, valid)
        return _shaped(result, arrays[0].shape)

    def _functions(self, theta: Array, n: Array, rho: Array, k: Array) -> Array:
        """(functions, points), in blocks that keep the contracted coefficients small."""
        thetas, lengths, functions, rhos, ratios = self.pair.shape
        matrix = self.pair.reshape(thetas * lengths, -1)
        out = np.empty((functions, theta.size))
        for start in range(0, theta.size, 1024):
            block = slice(start, start + 1024)
            a = chebyshev_basis(theta_coordinate(theta[block]), thetas)
            b = chebyshev_basis(length_coordinate(np.minimum(n[block], LENGTH_MAX)), lengths)
            c = chebyshev_basis(rho[block], rhos)
            d = chebyshev_basis(ratio_coordinate(n[block], k[block]), ratios)
            rows = (a[:, None] * b[None]).reshape(thetas * lengths, -1).T @ matrix
            columns = (c[:, None] * d[None]).reshape(rhos * ratios, -1).T
            rows = rows.reshape(-1, functions, rhos * ratios)
            out[:, block] = np.einsum("pfc,pc->fp", rows, columns)
        return out

    def staged(self, theta: float, rho: float, n: ArrayLike, k: ArrayLike) -> PairStatistics:
        """`pairs` for one variance and one correlation and many lengths.

        theta and rho are contracted once, log n once per distinct n: 0.3 microseconds a point.

        Args:
            theta, rho, n, k: as in `pairs`; theta and rho scalars.

        Raises:
            DomainError: as `pairs`.
        """
        variance, correlation = checked_theta([theta]), checked_rho([rho])
        arrays = np.broadcast_arrays(*_lengths(n, k))
        short, long = (a.reshape(-1) for a in arrays)
        valid = (short <= LENGTH_MAX) & (variance <= THETA_MAX)
        variance = np.minimum(variance, THETA_MAX)
        a = chebyshev_basis(theta_coordinate(variance), self.pair.shape[0])[:, 0]
        c = chebyshev_basis(correlation, self.pair.shape[3])[:, 0]
        at = np.einsum("abfcd,c->abfd", self.pair, c)
        at = np.einsum("abfd,a->bfd", at, a)
        distinct, which = np.unique(short, return_inverse=True)
        b = chebyshev_basis(length_coordinate(np.minimum(distinct, LENGTH_MAX)), at.shape[0])
        per_length = np.einsum("bfd,bu->dfu", at, b)
        d = chebyshev_basis(ratio_coordinate(short, long), at.shape[2])
        functions = np.zeros((at.shape[1], short.size))
        for coefficients, basis in zip(per_length, d, strict=True):
            functions += coefficients[:, which] * basis
        result = decode_pair(variance * correlation, short, long, functions, valid)
        return _shaped(result, arrays[0].shape)

    def general(
        self, theta: ArrayLike, n: ArrayLike, theta2: ArrayLike, k: ArrayLike, psi: ArrayLike
    ) -> PairStatistics:
        """Pairs of rows of different logit variance, by the nearest pair of equal variance.

        The common variance is that of the mean fluctuation of the two partition sums,
        log[(e^theta / n + e^theta2 / k) / (1/n + 1/k)], or |psi| where that is larger. psi is kept;
        log k C2 is scaled by the exact ratio of its psi-derivatives at psi = 0, where
        k T = (1-P2)(1-P2') k/(k-1), and the other two functions are corrected to first order alike.
        Exact at equal variances and for small psi; otherwise an approximation. Errors, median and
        largest, of overlap and of jacobian_overlap over random n, k, rho > -0.2 and ratios of the
        variances from 1.2 to 4: up to theta = 2, 5e-6 and 3e-3, 5e-5 and 3e-2; up to theta = 6,
        2e-4 and 3e-2, 2e-3 and 8e-2; radial_overlap errs by 5 times the latter.

        Args:
            theta, n: logit variance and number of keys of the shorter row.
            theta2, k: those of the longer row, k >= n. All arguments broadcast.
            psi: covariance of the two logits of a shared key, |psi| <= sqrt(theta theta2).

        Raises:
            DomainError: an argument outside these ranges.
        """
        one, two = checked_theta(theta), checked_theta(theta2)
        short, long = _lengths(n, k)
        arrays = np.broadcast_arrays(one, short, two, long, np.asarray(psi, dtype=np.float64))
        shape = arrays[0].shape
        one, short, two, long, covariance = (a.reshape(-1) for a in arrays)
        if not np.all(np.abs(covariance) <= np.sqrt(one * two) * (1.0 + 1e-9) + 1e-300):
            raise domain_error("psi", psi, "a covariance: |psi| <= sqrt(theta theta2)")
        valid = (np.maximum(one, two) <= THETA_MAX) & (short <= LENGTH_MAX)
        one, two = np.minimum(one, THETA_MAX), np.minimum(two, THETA_MAX)
        bound = np.sqrt(one * two)
        covariance = np.clip(covariance, -bound, bound)
        share = long / (short + long)
        common = np.log(share * np.exp(one) + (1.0 - share) * np.exp(two))
        common = np.clip(np.maximum(common, np.abs(covariance)), 1e-12, THETA_MAX)

        rest, slope = self._first_order(one, short)
        rest2, slope2 = self._first_order(two, long)
        rest_common, slope_common = self._first_order(common, short)
        rest2_common, slope2_common = self._first_order(common, long)
        rho = np.clip(covariance / common, -1.0, 1.0)
        functions = self._functions(common, short, rho, long)
        scale = (rest / rest_common) * (rest2 / rest2_common)
        functions[0] *= scale
        functions[1] += np.log(scale)
        functions[2] *= (1.0 - 2.0 * slope) * (1.0 - 2.0 * slope2)
        functions[2] /= (1.0 - 2.0 * slope_common) * (1.0 - 2.0 * slope2_common)
        functions[3] += slope_common + slope2_common - slope - slope2
        return _shaped(decode_pair(covariance, short, long, functions, valid), shape)

    @staticmethod
    def _first_order(theta: Array, n: Array) -> tuple[Array, Array]:
        """(1 - P2) n/(n-1), which stays finite at n = 1, and dP2/dlog theta / (1 - P2)."""
        functions = SquareTable.load().row_functions(theta, n, 3)
        odds = np.exp(theta * functions[0])
        p2, _ = decode_participation(theta, n, functions)
        return n / (n - 1.0 + odds), functions[2] * theta * functions[1] * p2
