"""Softmax rows of logit variances beyond the tables, where one key has almost all attention.

Lines of equal C2 follow d log rho/d log theta = -kappa/theta, kappa = pi^2/6 + c/theta, back to the
edge of the tables. For single rows 1 - P2 is f/sigma minus a term in 1/theta that is fixed by the
edge; other moments are those of the Poisson-Dirichlet law with this P2 (Pitman 1995). See
docs/theory/softmax.md, Beyond the tables.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from .table import THETA_MAX, Array, PairStatistics, RowStatistics

GUMBEL = math.pi**2 / 6
"""Variance of Gumbel noise."""


@functools.lru_cache(maxsize=4096)
def extremes(keys: float) -> tuple[float, float]:
    """f, and E max^2, of n standard normals (any real n > 1)."""
    from scipy.special import log_ndtr

    x = np.linspace(-12.0, 12.0, 1201)
    log_density = -0.5 * x * x - 0.5 * math.log(2 * math.pi)
    below = log_ndtr(x)
    step = x[1] - x[0]
    gap = keys * (keys - 1.0) * np.exp(2 * log_density + (keys - 2.0) * below).sum() * step
    top = keys * (x * x * np.exp(log_density + (keys - 1.0) * below)).sum() * step
    return float(gap), float(top)


def _powers(row: RowStatistics) -> tuple[Any, Any, Any]:
    return row.sum_cube, row.sum_fourth, row.trace_square


def _falling(theta: Array, gap: Array, edge: Array) -> Array:
    """dP2/dlog theta of `_deficit`, by a difference quotient."""
    step = 1e-4
    return np.asarray((_deficit(theta, gap, edge) - _deficit(theta * (1 + step), gap, edge)) / step)


def _of_keys(keys: Array) -> tuple[Array, Array]:
    """`extremes` of every number of keys."""
    distinct, where = np.unique(keys, return_inverse=True)
    result = np.array([extremes(max(n, 1.0 + 1e-6)) for n in distinct.tolist()])[where.ravel()]
    result = result.reshape(*np.shape(keys), 2)
    return result[..., 0], result[..., 1]


def _deficit(theta: Array, gap: Array, edge: Array) -> Array:
    """1 - P2, given its value at the edge of the tables."""
    sigma, first = np.sqrt(theta), math.sqrt(THETA_MAX)
    at_edge = edge * first
    frozen = (gap - (gap - at_edge) * THETA_MAX / theta) / sigma
    # In rows of so many keys that none has a sizeable share yet, odds grow by sigma/f.
    spread = 1.0 / (1.0 / edge + (sigma - first) / gap)
    return np.where(gap < 1.5 * at_edge, frozen, spread)


def _partitions(square: Array) -> tuple[Array, Array, Array, Array]:
    """E tr J^2, P3, P4 and E (1 - S)^2 of the Poisson-Dirichlet law with this P2.

    E S^2 = [P2 (1 + P2)(2 + P2) + (1 - P2) P2^2]/6, by the partitions of four draws of a key.
    """
    cube = square * (1 + square) / 2
    fourth = cube * (2 + square) / 3
    squares = fourth + (1 - square) * square**2 / 6
    return square * (1 - square) / 3, cube, fourth, 1 - 2 * square + squares


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
    gap, top = _of_keys(keys)
    far = np.maximum(theta, THETA_MAX)
    rest = np.maximum(1.0 - np.asarray(edge.sum_square), 1e-300)
    deficit = _deficit(far, gap, rest)
    share = deficit / rest
    jacobian = _curvature(far, deficit, edge)
    _, *before = _partitions(np.asarray(edge.sum_square))
    _, *laws = _partitions(1 - deficit)
    cube, fourth, vacancy = (
        law * (1 + (np.asarray(exact) / np.maximum(law_at_edge, 1e-300) - 1) * THETA_MAX / far)
        for exact, law_at_edge, law in zip(_powers(edge), before, laws, strict=True)
    )

    def towards(value: Any, limit: Any) -> Array:
        return np.asarray(limit + (np.asarray(value) - limit) * share)

    result = RowStatistics(
        sum_square=1.0 - deficit,
        sum_cube=np.minimum(cube, 1 - deficit),
        sum_fourth=np.minimum(fourth, 1 - deficit),
        trace_square=np.minimum(vacancy, deficit),
        jacobian_square=jacobian,
        radial_square=_radial(far, edge) * jacobian,
        sum_square_slope=_falling(far, gap, rest),
        mean_logit_square=towards(edge.mean_logit_square, top),
        weighted_logit_square=towards(edge.weighted_logit_square, top),
        entropy=towards(edge.entropy, 0.0),
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
    gap, _ = _of_keys(keys)
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
