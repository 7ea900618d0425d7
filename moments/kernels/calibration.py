"""Scalar functions of the correlation between two queries that tie the closure to exact rows.

For an exchangeable row everything the closure leaves open is one number per correlation rho of two
queries: the overlap C2(rho) = E sum_j a_j a'_j of their rows. A key holds the fraction C2 of its
own column of the joint law and (1 - C2)/(n-1) of each other, so a law proportional to exp(beta gap)
on its diagonal needs

    beta gap = log[(n-1) C2/(1-C2)],     gap = (theta/tau) strength^2.

For rows of different length or variance the geometric mean of the two log odds is used: exact to
first order in rho, and within 1 % of the exact log odds for theta <= 1, 3 % for theta <= 3 (the
worst case being a row of two or three keys against a long one).

Finite widths enter here and nowhere else. The realised query products q_i.q_i'/d_head fluctuate: in
distribution the sum and the difference of two queries have independent chi-square norms of relative
variance 2/nu (`Widths.freedom`), so every exact statistic is averaged over two two-point
rules. The gradient paths carry the width terms of an exchangeable layer divided by the closure's
own derivative dC2/drho, as factors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray

from moments.kernels import exact_rows
from moments.softmax import chi_square_rule

Array = NDArray[np.float64]


class Widths(NamedTuple):
    """What makes a finite layer fluctuate.

    Attributes:
        d_model, d_head: widths, inf allowed.
        norm_spread: Var|x|^2 / E^2|x|^2 of a token: 0 after a normalisation, 2/d_model if Gaussian.
    """

    d_model: float
    d_head: float
    norm_spread: float

    @property
    def freedom(self) -> float:
        """nu: degrees of freedom of a row's logit variance."""
        inverse = 1.0 / self.d_head + 1.0 / self.d_model + 0.5 * self.norm_spread
        return 1.0 / inverse if inverse > 1e-12 else math.inf

    @property
    def fixed_norm(self) -> float:
        """1 for tokens of fixed norm, 0 for Gaussian ones (or an infinite d_model)."""
        if self.d_model == math.inf:
            return 0.0
        return max(0.0, 1.0 - 0.5 * self.d_model * self.norm_spread)


class Nodes(NamedTuple):
    """Chebyshev-Lobatto nodes in the query correlation, from 1 downwards.

    Attributes:
        low: the other end of the interval.
        rho: (nodes,) correlations.
        to_coefficients: (nodes, nodes) matrix from values at the nodes to Chebyshev coefficients.
    """

    low: float
    rho: Array
    to_coefficients: Array

    def basis(self, rho: Array) -> tuple[Array, Array]:
        """Each (nodes, *rho.shape): what multiplies values at the nodes to give the value at rho,
        and the derivative at rho."""
        unit = np.clip((2.0 * rho - 1.0 - self.low) / (1.0 - self.low), -1.0, 1.0)
        terms = np.moveaxis(chebyshev.chebvander(unit, len(self.rho) - 1), -1, 0)
        derivative = chebyshev.chebder(self.to_coefficients) * 2.0 / (1.0 - self.low)
        value = np.tensordot(self.to_coefficients.T, terms, 1)
        return value, np.tensordot(derivative.T, terms[:-1], 1)


def nodes_for(correlation: Array, theta: float) -> Nodes:
    """As many nodes as e^{theta rho} needs on the interval of correlations that occur.

    Its Chebyshev coefficients on a half width h decay like (theta h/2)^m/m!; the derivative, which
    the gradient needs, multiplies that by m. The interval ends at 1, where every row meets itself.
    """
    low = float(min(correlation.min(), 0.9))
    half = 0.25 * theta * (1.0 - low)
    order, term = 1, half
    while order < 10 and term * (order + 1) > 4e-3:
        order += 1
        term *= half / order
    unit = np.cos(np.pi * np.arange(order + 1) / order)
    inverse = np.linalg.inv(chebyshev.chebvander(unit, order))
    rho = 0.5 * (1.0 + low) + 0.5 * (1.0 - low) * unit
    return Nodes(low, rho, np.asarray(inverse, dtype=np.float64))


class Calibration(NamedTuple):
    """One row per class; a column per node unless stated.

    Attributes:
        log_odds: log[(n-1) C2/(1-C2)], averaged over the widths' fluctuations inside C2.
        key: multiplies dF/drho in the key path; rho at infinite width.
        query: multiplies dF/drho in the query path; 1 at infinite width.
        cross: (classes,) correlation of the key and value paths over the key path, at rho = 1.
        noise_key, noise_query, noise_cross: (classes,) what the widths do to the response to
            dropped attention in the paths and in the correlation of the key and value paths; 1, 1
            and 0 at infinite width.
    """

    log_odds: Array
    key: Array
    query: Array
    cross: Array
    noise_key: Array
    noise_query: Array
    noise_cross: Array


def calibrate(
    theta: Array,
    keys: Array,
    unshared: Array,
    nodes: Nodes,
    widths: Widths,
) -> Calibration:
    """Exact statistics of every class at every node, averaged over the widths' fluctuations.

    Args:
        theta, keys: (classes,) reference rows.
        unshared: (classes,) 1 - b/C_jj, the fraction a key does not share with the others.
        nodes: correlations.
        widths: of the layer.
    """
    rho = nodes.rho
    d_model, d_head = widths.d_model, widths.d_head
    rule = chi_square_rule(widths.freedom)
    overlap, jacobian, radial, drive, drive_radial, slope = np.zeros((6, len(theta), len(rho)))
    for xi, weight in zip(rule.nodes, rule.weights, strict=True):
        for xi2, weight2 in zip(rule.nodes, rule.weights, strict=True):
            plus, minus = 0.5 * (1.0 + rho) * xi, 0.5 * (1.0 - rho) * xi2
            scale, cosine = plus + minus, (plus - minus) / (plus + minus)
            scaled = exact_rows.tabulated(theta[:, None] * scale)
            lengths = np.broadcast_to(keys[:, None], scaled.shape).ravel()
            angle = np.broadcast_to(cosine, scaled.shape).reshape(-1, 1)
            exact = exact_rows.pairs(scaled.ravel(), lengths, angle)
            share = weight * weight2
            statistics = [np.reshape(field, scaled.shape) for field in exact[:4]]
            overlap += share * statistics[0]
            jacobian += share * statistics[1]
            radial += share * statistics[2]
            drive += share * scaled * cosine * statistics[1]
            drive_radial += share * scaled * cosine * statistics[2]
            slope += share * statistics[3]
    theta, keys = theta[:, None], keys[:, None]
    closure = overlap @ nodes.basis(rho)[1]
    still = (keys <= 1.0) | (closure <= 0.0)
    closure = np.where(still, 1.0, closure)
    overlap = np.clip(overlap, 1e-12, 1.0 - 1e-12)
    key = drive * (1.0 - 1.0 / d_model) + drive_radial / d_model
    # overlaps of keys with themselves, which fixed norms keep from fluctuating
    fixed = widths.fixed_norm * unshared[:, None] ** 2
    query = jacobian * np.maximum(1.0 - 2.0 * (1.0 + fixed) / d_model - 1.0 / d_head, 0.0)
    noise_query = query + radial * (2.0 / d_model + 1.0 / d_head)
    query = theta * (query + radial * (3.0 / d_model + 1.0 / d_head)) / closure
    alone = exact_rows.rows(theta[:, 0], keys[:, 0])
    single = keys[:, 0] <= 1.0
    noise = np.where(single, 1.0, alone.jacobian_square)
    mean_theta = drive[:, 0] / np.where(single, 1.0, jacobian[:, 0])
    noise_key = drive[:, 0] / (theta[:, 0] * noise)
    noise_key *= 1.0 + 4.0 * mean_theta * unshared / d_model
    noise_query = noise_query[:, 0] / noise
    noise_query *= 1.0 + (2.0 + 4.0 * mean_theta) * unshared / d_model
    # E sum (2 a^2 - 5 a^3 + 3 a^4): a dropped value and the key that it shares
    shared = 2.0 * alone.sum_square - 5.0 * alone.sum_cube + 3.0 * alone.sum_fourth
    log_odds = np.log(np.maximum(keys - 1.0, 1e-12) * overlap / (1.0 - overlap))
    cross = 2.0 / d_model * slope / np.where(np.abs(key) < 1e-300, 1.0, key)
    key = np.where(still, rho, key / closure)
    return Calibration(
        np.where(keys <= 1.0, 0.0, log_odds),
        key,
        np.where(still, 1.0, query),
        np.where(single, 0.0, cross[:, 0]),
        np.where(single, 1.0, noise_key),
        np.where(single, 1.0, noise_query),
        np.where(single, 0.0, 2.0 / d_model * unshared * shared / noise),
    )
