"""Statistics of two softmax rows of different lengths, by interpolation: causal attention."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from moments.errors import domain_error
from moments.softmax.chebyshev import (
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
    LENGTH_MAX,
    SquareTable,
    checked_length,
    checked_rho,
    checked_theta,
    load_coefficients,
)


def _lengths(n: ArrayLike, k: ArrayLike) -> tuple[Array, Array]:
    n, k = checked_length("n", n), checked_length("k", k)
    if np.any(k < n):
        raise domain_error("k", k, "at least n", "name the shorter row first")
    return n, k


class RectangularTable(NamedTuple):
    """Chebyshev coefficients for rows of n and k >= n keys that share the first n, as under a causal mask.

    Error of overlap, jacobian_overlap and overlap_slope, relative, and of radial_overlap in units of
    jacobian_overlap: below 1e-4 up to theta = 2, 1e-3 up to theta = 6. Beyond theta = 8 or n = 1e8
    arguments are moved to that edge and `valid` is False: `exact.pair_statistics` goes on to 32.

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

        About 20 microseconds a point; `staged` is faster where theta and rho are the same for all.

        Args:
            theta: logit variance of both rows.
            n: number of keys of the shorter row; real, >= 1.
            rho: correlation of the two logits of a shared key, in [-1, 1].
            k: number of keys of the longer row, >= n.

        Raises:
            DomainError: an argument outside these ranges.
        """
        theta, rho = checked_theta(theta), checked_rho(rho)
        n, k = _lengths(n, k)
        theta, n, rho, k = np.broadcast_arrays(theta, n, rho, k)
        shape = theta.shape
        theta, n, rho, k = (a.reshape(-1) for a in (theta, n, rho, k))
        valid = (theta <= THETA_MAX) & (n <= LENGTH_MAX)
        theta = np.minimum(theta, THETA_MAX)
        functions = self._functions(theta, n, rho, k)
        result = decode_pair(rho * theta, n, k, functions, valid)
        return PairStatistics(*[np.reshape(field, shape) for field in result])

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
            out[:, block] = np.einsum("pfc,pc->fp", rows.reshape(-1, functions, rhos * ratios), columns)
        return out

    def staged(self, theta: float, rho: float, n: ArrayLike, k: ArrayLike) -> PairStatistics:
        """`pairs` for one variance and one correlation and many lengths.

        theta and rho are contracted once, log n once per distinct n.

        Args:
            theta, rho: as in `pairs`, scalars.
            n, k: arrays that broadcast, n <= k.

        Raises:
            DomainError: as `pairs`.
        """
        theta_array, rho_array = checked_theta([theta]), checked_rho([rho])
        n, k = np.broadcast_arrays(*_lengths(n, k))
        valid = (n <= LENGTH_MAX) & bool(theta <= THETA_MAX)
        theta_array = np.minimum(theta_array, THETA_MAX)
        a = chebyshev_basis(theta_coordinate(theta_array), self.pair.shape[0])[:, 0]
        c = chebyshev_basis(rho_array, self.pair.shape[3])[:, 0]
        at = np.einsum("abfcd,c->abfd", self.pair, c)
        at = np.einsum("abfd,a->bfd", at, a)
        flat_n, flat_k = n.reshape(-1), k.reshape(-1)
        distinct, which = np.unique(flat_n, return_inverse=True)
        b = chebyshev_basis(length_coordinate(np.minimum(distinct, LENGTH_MAX)), at.shape[0])
        per_length = np.einsum("bfd,bu->dfu", at, b)
        d = chebyshev_basis(ratio_coordinate(flat_n, flat_k), at.shape[2])
        # Clenshaw would save nothing: the sum over the ratio is dominated by gathering rows
        functions = np.zeros((at.shape[1], flat_n.size))
        for coefficients, basis in zip(per_length, d, strict=True):
            functions += coefficients[:, which] * basis
        result = decode_pair(theta_array * rho_array, flat_n, flat_k, functions, valid.reshape(-1))
        return PairStatistics(*[np.reshape(field, n.shape) for field in result])

    def general(
        self, theta: ArrayLike, n: ArrayLike, theta2: ArrayLike, k: ArrayLike, psi: ArrayLike
    ) -> PairStatistics:
        """Pairs of rows of different logit variance, by an equal-variance pair that matches to first order.

        The common variance is that of the mean fluctuation of the two partition sums,
        log[(e^theta / n + e^theta2 / k) / (1/n + 1/k)], or |psi| where that is larger. psi is kept;
        log k C2 is scaled by the exact ratio of its psi-derivatives at psi = 0, where
        k T = (1-P2)(1-P2') k/(k-1), and the other two functions are corrected to first order alike.
        Exact at equal variances and for small psi; otherwise an approximation: median error 1e-5 for
        theta2/theta within e^(+-0.35), up to several per cent at a ratio of 4.

        Args:
            theta, n: logit variance and number of keys of the shorter row.
            theta2, k: those of the longer row, k >= n. All arguments broadcast.
            psi: covariance of the two logits of a shared key, |psi| <= sqrt(theta theta2).

        Raises:
            DomainError: an argument outside these ranges.
        """
        theta, theta2 = checked_theta(theta), checked_theta(theta2)
        n, k = _lengths(n, k)
        psi = np.asarray(psi, dtype=np.float64)
        theta, n, theta2, k, psi = np.broadcast_arrays(theta, n, theta2, k, psi)
        if not np.all(np.abs(psi) <= np.sqrt(theta * theta2) * (1.0 + 1e-9) + 1e-300):
            raise domain_error("psi", psi, "a covariance: |psi| <= sqrt(theta theta2)")
        shape = theta.shape
        theta, n, theta2, k, psi = (a.reshape(-1) for a in (theta, n, theta2, k, psi))
        valid = (np.maximum(theta, theta2) <= THETA_MAX) & (n <= LENGTH_MAX)
        theta, theta2 = np.minimum(theta, THETA_MAX), np.minimum(theta2, THETA_MAX)
        psi = np.clip(psi, -np.sqrt(theta * theta2), np.sqrt(theta * theta2))
        share = k / (n + k)
        common = np.log(share * np.exp(theta) + (1.0 - share) * np.exp(theta2))
        common = np.clip(np.maximum(common, np.abs(psi)), 1e-12, THETA_MAX)

        rest, slope = self._first_order(theta, n)
        rest2, slope2 = self._first_order(theta2, k)
        rest_common, slope_common = self._first_order(common, n)
        rest2_common, slope2_common = self._first_order(common, k)
        functions = self._functions(common, n, np.clip(psi / common, -1.0, 1.0), k)
        scale = (rest / rest_common) * (rest2 / rest2_common)
        functions[1] += np.log(scale)
        functions[0] *= scale
        functions[2] *= (1.0 - 2.0 * slope) * (1.0 - 2.0 * slope2)
        functions[2] /= (1.0 - 2.0 * slope_common) * (1.0 - 2.0 * slope2_common)
        functions[3] += slope_common + slope2_common - slope - slope2
        result = decode_pair(psi, n, k, functions, valid)
        return PairStatistics(*[np.reshape(field, shape) for field in result])

    @staticmethod
    def _first_order(theta: Array, n: Array) -> tuple[Array, Array]:
        """(1 - P2) n/(n-1), which stays finite at n = 1, and dP2/dlog theta / (1 - P2)."""
        functions = SquareTable.load().row_functions(theta, n, 3)
        odds = np.exp(theta * functions[0])
        p2, _ = decode_participation(theta, n, functions)
        return n / (n - 1.0 + odds), functions[2] * theta * functions[1] * p2
