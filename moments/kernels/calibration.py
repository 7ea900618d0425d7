"""Scalar functions of the correlation between two queries that tie the closure to exact rows.

For an exchangeable pair of rows (n <= k keys) everything the closure leaves open is one number per
correlation rho: the overlap C2(rho) = E sum_j a_j a'_j. With q = k C2/n, a shared key holds the
fraction q of its own column and (1-q)/(n-1) of each other, so a joint law proportional to
exp(beta gap) on the diagonal needs

    beta gap = log[(n-1) q/(1-q)].

Finite widths enter here and nowhere else. The realised query products q_i.q_i'/d_head fluctuate: in
distribution the sum and the difference of two queries have independent chi-square norms of relative
variance 2/nu, 1/nu = 1/d_head + 1/d_model, so every exact statistic is averaged over two two-point
rules. The gradient paths carry the width terms of one exchangeable layer, divided by the closure's
own derivative dC2/drho, as the factors `key` and `query`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray

from moments.kernels import exact_rows

Array = NDArray[np.float64]


class Nodes(NamedTuple):
    """Chebyshev-Lobatto nodes in the query correlation.

    Attributes:
        low, high: ends of the interval.
        rho: (nodes,) correlations, from high to low.
        to_coefficients: (nodes, nodes) matrix from values at the nodes to Chebyshev coefficients.
    """

    low: float
    high: float
    rho: Array
    to_coefficients: Array

    def _unit(self, rho: Array) -> Array:
        return np.clip((2.0 * rho - self.high - self.low) / (self.high - self.low), -1.0, 1.0)

    def basis(self, rho: Array) -> Array:
        """(nodes, *rho.shape): what multiplies values at the nodes to give the value at rho."""
        terms = chebyshev.chebvander(self._unit(rho), len(self.rho) - 1)
        return np.moveaxis(terms @ self.to_coefficients, -1, 0)

    def slope_basis(self, rho: Array) -> Array:
        """Like `basis`, for the derivative with respect to rho."""
        derivative = chebyshev.chebder(self.to_coefficients) * 2.0 / (self.high - self.low)
        terms = chebyshev.chebvander(self._unit(rho), len(self.rho) - 2)
        return np.moveaxis(terms @ derivative, -1, 0)


def nodes_for(correlation: Array, theta: float) -> Nodes:
    """As many nodes as e^{theta rho} needs on the interval of correlations that occur.

    Its Chebyshev coefficients on a half width h decay like (theta h/2)^m/m!; the derivative, which
    the gradient needs, multiplies that by m. The interval ends at 1, where every row meets itself.
    """
    low = float(min(correlation.min(), 0.9))
    half = 0.25 * theta * (1.0 - low)
    order, term = 1, half
    while order < 9 and term * (order + 1) > 2e-3:
        order += 1
        term *= half / order
    unit = np.cos(np.pi * np.arange(order + 1) / order)
    inverse = np.linalg.inv(chebyshev.chebvander(unit, order))
    return Nodes(low, 1.0, 0.5 * (1.0 + low) + 0.5 * (1.0 - low) * unit, inverse)


class PairCalibration(NamedTuple):
    """Per pair of row classes (rows) and node (columns).

    Attributes:
        log_ratio: log[(n-1) q/(1-q)].
        key: multiplies dF/drho in the key path; rho at infinite width.
        cross: the same for the correlation of the key and value paths; 0 at infinite width.
        query: multiplies dF/drho in the query path; 1 at infinite width.
        slope: dC2/drho that the closure will reproduce.
    """

    log_ratio: Array
    key: Array
    cross: Array
    query: Array
    slope: Array


def calibrate_pairs(
    theta: Array,
    keys: Array,
    theta2: Array,
    keys2: Array,
    nodes: Nodes,
    d_model: float,
    d_head: float,
) -> PairCalibration:
    """Exact C2, T and their width averages for every pair of classes at every node.

    Args:
        theta, keys, theta2, keys2: (pairs,) reference rows; the order of the two does not matter.
        nodes: correlations.
        d_model, d_head: widths, inf allowed.
    """
    swap = keys > keys2
    first, second = np.where(swap, theta2, theta), np.where(swap, theta, theta2)
    fewer, more = np.minimum(keys, keys2)[:, None], np.maximum(keys, keys2)[:, None]
    rho = np.broadcast_to(nodes.rho, (len(theta), len(nodes.rho)))
    spread = 1.0 / d_head + 1.0 / d_model
    overlap, jacobian, radial = (np.zeros(rho.shape) for _ in range(3))
    drive, drive_radial, scale_slope = (np.zeros(rho.shape) for _ in range(3))
    for xi, weight in chi_square_rule(spread):
        for xi2, weight2 in chi_square_rule(spread):
            plus, minus = (1.0 + rho) * xi, (1.0 - rho) * xi2
            scale = 0.5 * (plus + minus)
            cosine = 0.5 * (plus - minus) / scale
            theta_a = np.minimum(first[:, None] * scale, exact_rows.THETA_MAX)
            theta_b = np.minimum(second[:, None] * scale, exact_rows.THETA_MAX)
            exact = exact_rows.pair(theta_a, fewer, theta_b, more, cosine)
            psi = cosine * np.sqrt(theta_a * theta_b)
            share = weight * weight2
            overlap += share * exact.overlap
            jacobian += share * exact.jacobian_overlap
            radial += share * exact.radial_overlap
            drive += share * psi * exact.jacobian_overlap
            drive_radial += share * psi * exact.radial_overlap
            scale_slope += share * exact.overlap_slope
    share = np.clip(more * overlap / fewer, 1e-12, 1.0 - 1e-12)
    log_ratio = np.log(np.maximum(fewer - 1.0, 1e-12) * share / (1.0 - share))
    slope = overlap @ nodes.slope_basis(nodes.rho)
    theta_mean = np.sqrt(first * second)[:, None]
    one = fewer <= 1.0
    safe = np.where(one | (slope <= 0.0), 1.0, slope)
    key = drive * (1.0 - 1.0 / d_model) + drive_radial / d_model
    query = jacobian * (1.0 - 2.0 / d_model - 1.0 / d_head) + radial * (
        3.0 / d_model + 1.0 / d_head
    )
    return PairCalibration(
        np.where(one, 0.0, log_ratio),
        np.where(one, rho, key / safe),
        np.where(one, 0.0, 2.0 / d_model * scale_slope / safe),
        np.where(one, 1.0, theta_mean * query / safe),
        np.where(one, 0.0, slope),
    )


def chi_square_rule(spread: float) -> list[tuple[float, float]]:
    """Nodes and weights of the two-point rule for chi-square_nu/nu, 1/nu = `spread`.

    It matches the mean, the variance 2/nu and the third moment.
    """
    if spread <= 0.0:
        return [(1.0, 1.0)]
    half = 0.5 / spread
    root = np.sqrt(half + 1.0)
    return [
        (1.0 + (1.0 + root) / half, 0.5 * (1.0 - 1.0 / root)),
        (1.0 + (1.0 - root) / half, 0.5 * (1.0 + 1.0 / root)),
    ]
