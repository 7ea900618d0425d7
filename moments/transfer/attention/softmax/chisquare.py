"""The average over the fluctuation of a row's logit variance.

The logits of query i are <w_i, x_j>, and given w_i their variance within the row is theta |w_i|^2
over its mean. |w_i|^2 is close to a gamma variable of mean 1 and variance 2/nu (chi-square over nu,
nu degrees of freedom); the rule below is Gaussian quadrature for exactly that density.

See docs/theory/softmax.md, Queries of finite width.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ....errors import domain_error
from .laplace import Array


class ChiSquareRule(NamedTuple):
    """nodes (points,) of mean 1, and weights (points,) that sum to 1."""

    nodes: Array
    weights: Array


class PairRule(NamedTuple):
    """Nodes for two rows whose variances fluctuate together.

    Attributes:
        theta: (points,) logit variance common to the two rows.
        rho: (points,) correlation of their logits, psi / theta.
        weights: (points,) that sum to 1.
    """

    theta: Array
    rho: Array
    weights: Array


def _frozen(array: Array) -> Array:
    """`array`, read-only: what a cache hands out must not be changed."""
    array.flags.writeable = False
    return array


@functools.lru_cache(256)
def chi_square_rule(nu: float, points: int | None = None) -> ChiSquareRule:
    """Gaussian quadrature for xi = chi-square(nu) / nu, exact up to xi^(2 points - 1).

    The default errs by less than 0.3 % on averages of P2, T2 and theta T2 for nu >= 25 and theta
    up to 1.5, 0.5 % below.

    Args:
        nu: degrees of freedom, > 0; infinity means no fluctuation.
        points: how many nodes; by default 2 for nu >= 25, 3 for nu >= 8, else 5.

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
    beside = np.sqrt(i[1:] * (i[1:] + half - 1.0))
    jacobi = np.diag(2.0 * i + half) + np.diag(beside, 1) + np.diag(beside, -1)
    nodes, vectors = np.linalg.eigh(jacobi)
    return ChiSquareRule(_frozen(nodes / half), _frozen(vectors[0] ** 2))


@functools.lru_cache(4096)
def _pair_shape(nu: float, points: int | None) -> tuple[Array, Array, Array]:
    nodes, weights = chi_square_rule(nu, points)
    return (
        np.repeat(nodes, nodes.size),
        np.tile(nodes, nodes.size),
        _frozen(np.outer(weights, weights).ravel()),
    )


def chi_square_pair_rule(
    theta: float, correlation: float, nu: float, points: int | None = None
) -> PairRule:
    """Nodes for two rows whose w have the given correlation.

    With w, w' = sqrt((1+r)/2) p +- sqrt((1-r)/2) q and xi, xi' the independent |p|^2, |q|^2 over
    their means, psi -> theta [(1+r) xi - (1-r) xi'] / 2, and the mean of the two rows' variances
    -> theta [(1+r) xi + (1-r) xi'] / 2, which stands for both (their difference, of mean 0 given
    xi and xi', is left out).

    Args:
        theta: mean logit variance of a row, >= 0.
        correlation: r, in [-1, 1]: the mean of psi is r theta.
        nu, points: as in `chi_square_rule`.

    Raises:
        DomainError: correlation outside [-1, 1], or as in `chi_square_rule`.
    """
    if not -1.0 <= correlation <= 1.0:
        raise domain_error("correlation", correlation, "in [-1, 1]")
    xi, xi2, weights = _pair_shape(nu, points)
    plus, minus = (0.5 * (1.0 + correlation)) * xi, (0.5 * (1.0 - correlation)) * xi2
    total = plus + minus
    return PairRule(theta * total, (plus - minus) / total, weights)
