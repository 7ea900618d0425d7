"""Fluctuation of a row's logit variance over draws, and corrections for tokens of fixed norm.

A row's logits are w.x_j with w = W_k^T W_q x_i; averages over |w|^2 are by Gaussian quadrature. The
relative variance of |x_j|^2 of tokens of fixed norm is 2 delta smaller, delta = 1/d - Var|x|^2 / (2
E^2|x|^2): overlaps of two queries fluctuate less (`pair_spreads`), and logits are equivalent to
Gaussian ones of another covariance (`KeyCorrections`). See docs/theory/softmax.md, Tokens of fixed
norm.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ....errors import domain_error
from .table import (
    LENGTH_MAX,
    Array,
    chebyshev_basis,
    length_coordinate,
    load_coefficients,
    whole_coordinate,
)

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
        """Covariance of the equivalent Gaussian logits; its relative shift is constant beyond
        `CORRECTED_MAX`."""
        inside = np.minimum(1.0, CORRECTED_MAX / np.maximum(theta, CORRECTED_MAX))
        theta, psi = inside * theta, inside * psi
        joint = sphere(2 * (theta + psi), self.dimension) - 2 * sphere(theta, self.dimension)
        return (psi + self.share * (joint - psi)) / inside


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
