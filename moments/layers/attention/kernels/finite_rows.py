"""Exchangeable softmax rows at finite width, and the calibration of the closure to them.

The sum and the difference of two queries have independent chi-square norms (`Widths.variance`,
reduced for tokens of fixed norm), over which every exact statistic is averaged. Terms of order
1/d_model and 1/d_head enter the closure as factors on its derivative dC2/drho, per gradient path.
See docs/theory/attention.md, The closure, and docs/theory/softmax.md, Queries of finite width.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray

from ....engine.state import ratio_or_zero
from ..softmax import chi_square_rule
from ..softmax.norms import CORRECTED_MAX, STIFFNESS_LEAST, key_corrections, pair_spreads
from ..softmax.table import chebyshev_basis
from . import exact_rows
from .row_statistics import AttentionRows


class Widths(NamedTuple):
    """Widths of one layer.

    Attributes:
        norm_spread: Var|x|^2 / E^2|x|^2 of a token: 0 after a normalisation, 2/d_model if Gaussian;
            a number, or (m,) per row.
    """

    d_model: float
    d_head: float
    norm_spread: Any

    @property
    def variance(self) -> Any:
        """2/nu: relative variance of a row's logit variance, before corrections for fixed norms."""
        return 2.0 / self.d_head + 2.0 / self.d_model + self.norm_spread

    @property
    def deficit(self) -> Any:
        """delta: half the deficit of the relative variance of |x|^2 to that of Gaussian tokens."""
        result = 1.0 / self.d_model - 0.5 * self.norm_spread
        return np.maximum(result, 0.0) if np.ndim(result) else max(result, 0.0)

    @property
    def deficit_share(self) -> Any:
        """delta over the relative variance 2/nu."""
        return ratio_or_zero(np.where(self.deficit > 1e-12, self.deficit, 0.0), self.variance)


Array = NDArray[np.float64]


class FiniteRows(NamedTuple):
    """Statistics of m rows at s correlations; theta the logit variance, delta `Widths.deficit`.

    Attributes:
        overlap: (m, s) C2 = E sum_j a_j a'_j.
        growth: (m, s) dC2/dlog theta at fixed correlation.
        key: (m, s) E tr J J' times the logits' covariance, in the key path.
        along: (m, s) theta E tr J J' in the key path; the rest of `key`, beyond rho times it, is
            due to logit products that fluctuate with the Jacobians, independent of rho.
        query: (m, s) E tr J J' in the query path.
        square, jacobian: (m,) P2 = E sum a^2; T2 = E tr J^2 at the logit variance of this P2.
        common: (m,) addition to `query` of a row with itself by the fluctuating keys' variance.
        stiffness: (m,) x; fixed norms multiply C2 by e^{-x (1 + rho)}.
        against: (m,) fraction by which fixed norms reduce the overlap of different keys.
        dropped_key, dropped_query, dropped_cross: (m,) response to attention dropout in the paths
            `key` and `query`, and theta (2 P2 - 5 P3 + 3 P4).
        entropy: (m,) E[-sum a log a] in nats.
    """

    overlap: Array
    growth: Array
    key: Array
    along: Array
    query: Array
    square: Array
    jacobian: Array
    common: Array
    stiffness: Array
    against: Array
    dropped_key: Array
    dropped_query: Array
    dropped_cross: Array
    entropy: Array


def finite_rows(
    theta: Array,
    keys: Array,
    unshared: Array,
    rho: Array,
    widths: Widths,
    tables: Any = exact_rows,
) -> FiniteRows:
    """Statistics of rows, averaged over fluctuations at finite width; responses of one key are 0.

    Args:
        theta, keys: (m,) logit variance within the tables and number of keys.
        unshared: (m,) u, the unshared fraction of a key.
        rho: (m, s) correlations of the queries; the first is 1.
        tables: `exact_rows`, or an `AlikeRows`.
    """
    narrow, wide, deficit = 1.0 / widths.d_head, 1.0 / widths.d_model, widths.deficit
    one_key = keys <= 1.0
    average = averages(theta, keys, unshared, rho, widths, tables)
    row, pair = average.row, average.pair
    p2, p3, p4 = (row[f"sum_{power}"] for power in ("square", "cube", "fourth"))
    square = np.maximum(p2, 1e-300)
    jacobian = np.where(one_key, 1.0, np.maximum(row["jacobian_square"], 1e-300))
    curvature = np.where(one_key, 0.0, average.curvature)
    diagonal = (p2 - 2.0 * p3 + p4) / jacobian
    stiff = unshared**2 * deficit
    shared = np.maximum(1.0 - unshared, 0.0)
    fluctuating = unshared * (wide - deficit)
    between = 0.5 * (1.0 + rho)
    tangential = max(1.0 - 2.0 * wide - narrow, 0.0)

    damping = np.exp(-(stiff * curvature)[:, None] * between)
    key = pair["jacobian_overlap_"] * (1.0 - wide) + pair["radial_overlap_"] * wide
    along = pair["jacobian_overlap"] * (1.0 - wide) + pair["radial_overlap"] * wide
    query = pair["jacobian_overlap"] * tangential + pair["radial_overlap"] * (narrow + 3.0 * wide)
    exponent = diagonal[:, None] + curvature[:, None] * between
    query = query * np.exp(-2.0 * stiff[:, None] * exponent)
    radial = row["radial_square"]
    common = shared**2 * deficit * (4.0 * radial - 2.0 * row["jacobian_square"])

    dropped_query = row["jacobian_square"] * tangential + radial * (narrow + 2.0 * wide)
    dropped_query = dropped_query * np.exp(-stiff * curvature)
    dropped_query = dropped_query + fluctuating * jacobian * (2.0 * diagonal + curvature)
    skewness = np.minimum(theta, CORRECTED_MAX) * (1.0 - 3.0 * p2 + 2.0 * p3)
    dropped_key = theta * row["jacobian_square_"]
    return FiniteRows(
        pair["overlap"],
        pair["overlap_slope"],
        key * damping,
        along * damping * theta[:, None],
        query,
        p2,
        np.where(one_key, 1.0, exact_rows.jacobian_square(p2, keys)),
        np.where(one_key, 0.0, common),
        np.where(one_key, 0.0, stiff * average.dropped / square),
        np.where(one_key, 0.0, deficit * unshared * (1.0 + unshared) * skewness),
        np.where(one_key, 0.0, dropped_key * (1.0 + fluctuating * curvature)),
        np.where(one_key, 0.0, dropped_query),
        np.where(one_key, 0.0, average.dropped),
        np.where(one_key, 0.0, row["entropy"]),
    )


class Averages(NamedTuple):
    """Statistics averaged over the norms of the sum and the difference of two queries, and those of
    one row over its query's norm.

    Attributes:
        row: (m,) by field of `RowStatistics`; names with a trailing underscore: times the norm.
        pair: (m, s) by field of `PairStatistics`; with underscore: times the logits' covariance.
        dropped: (m,) theta (2 P2 - 5 P3 + 3 P4).
        curvature: (m,) of `KeyCorrections`.
    """

    row: dict[str, Array]
    pair: dict[str, Array]
    dropped: Array
    curvature: Array


def averages(
    theta: Array, keys: Array, unshared: Array, rho: Array, widths: Widths, tables: Any
) -> Averages:
    """Average the exact statistics; arguments as in `finite_rows`."""
    deficit, share = widths.deficit, np.reshape(widths.deficit_share, (-1, 1))
    rule = _rules(widths.variance)
    shared = np.clip(1.0 - unshared, 0.0, 1.0)
    spreads = pair_spreads(np.maximum(rho, 0.0), shared[:, None], share)
    difference = np.maximum(spreads.difference - spreads.along**2 * spreads.total, 0.0)
    # relative changes of the norms of the queries' sum, and of their difference, at the nodes
    total = np.sqrt(spreads.total)[..., None] * (rule.first[..., None, :] - 1.0)
    difference = np.sqrt(difference)[..., None] * (rule.second[..., None, :] - 1.0)
    plus = 0.5 * (1.0 + rho[..., None]) * np.maximum(1.0 + total, 0.0)
    along = np.asarray(spreads.along)[..., None] * total
    minus = 0.5 * (1.0 - rho[..., None]) * np.maximum(1.0 + difference + along, 0.0)
    norm = np.maximum(plus + minus, 1e-12)
    size = exact_rows.tabulated(theta[:, None, None] * norm)
    psi = size * (plus - minus) / norm
    relative = np.sqrt(1.0 + 2.0 * share[:, 0] * shared**2)[:, None] * (rule.nodes - 1.0)
    relative = np.maximum(1.0 + relative, 0.0)
    row_theta = exact_rows.tabulated(theta[:, None] * relative)
    dimension = 1.0 / (deficit * unshared**2 + STIFFNESS_LEAST) + 2.0
    corrections = key_corrections(theta, keys, dimension)
    # variances and covariances of the Gaussian logits equivalent to those of keys of fixed norm
    fixed = np.reshape(deficit > 0.0, (-1, 1))
    gauss_size, gauss_psi, gauss_theta = size, psi, row_theta
    if fixed.any():
        lifted = corrections._replace(
            dimension=corrections.dimension[:, None], share=corrections.share[:, None]
        )
        corrected = lifted.covariance(row_theta, row_theta)
        gauss_theta = exact_rows.tabulated(np.where(fixed, corrected, row_theta))
        fixed = fixed[..., None]
        lifted = corrections._replace(
            dimension=corrections.dimension[:, None, None], share=corrections.share[:, None, None]
        )
        gauss_size = exact_rows.tabulated(np.where(fixed, lifted.covariance(size, size), size))
        gauss_psi = np.where(fixed, lifted.covariance(size, psi), psi)
    cosine = np.clip(gauss_psi / gauss_size, -1.0, 1.0)
    flat = (len(theta), -1)
    pairs = tables.pairs(gauss_size.reshape(flat), keys, cosine.reshape(flat))
    rows = tables.rows(gauss_theta, keys[:, None])
    of_pairs = {name: np.reshape(getattr(pairs, name), size.shape) for name in pairs._fields}
    of_rows = {name: np.asarray(getattr(rows, name)) for name in rows._fields}
    p2, p3, p4 = (of_rows[f"sum_{power}"] for power in ("square", "cube", "fourth"))
    dropped = np.minimum(row_theta, CORRECTED_MAX) * (2.0 * p2 - 5.0 * p3 + 3.0 * p4)
    return Averages(
        _weighed(of_rows, rule.weights, relative),
        _weighed(of_pairs, rule.pair_weights[..., None, :], psi),
        (dropped * rule.weights).sum(-1),
        corrections.curvature,
    )


def _weighed(values: dict[str, Array], weights: Array, factor: Array) -> dict[str, Array]:
    """Averages over the nodes, and, under names with an underscore, of values times a factor."""
    times = weights * factor
    result = {name: np.vecdot(value, weights) for name, value in values.items()}
    return result | {f"{name}_": np.vecdot(value, times) for name, value in values.items()}


class _Rule(NamedTuple):
    """Gauss nodes of a chi-square variable over its mean, and of two independent ones."""

    nodes: Array
    weights: Array
    first: Array
    second: Array
    pair_weights: Array


@functools.lru_cache(maxsize=1024)
def _rule(variance: float, count: int = 0) -> _Rule:
    """The default rule for a relative variance, padded with nodes of weight 0 to `count` nodes."""
    nodes, weights = chi_square_rule(2.0 / variance if variance > 2e-12 else math.inf)
    added = max(count - nodes.size, 0)
    nodes, weights = np.append(nodes, np.ones(added)), np.append(weights, np.zeros(added))
    count = nodes.size
    pair_weights = np.outer(weights, weights).ravel()
    return _Rule(nodes, weights, np.repeat(nodes, count), np.tile(nodes, count), pair_weights)


def _rules(variance: Any) -> _Rule:
    """The rule for a relative variance, or (m, nodes) arrays of the rules for (m,) of them."""
    if np.ndim(variance) == 0:
        return _rule(float(variance))
    distinct, where = np.unique(variance, return_inverse=True)
    if distinct.size == 1:
        return _rule(float(distinct[0]))
    count = max(_rule(v).nodes.size for v in distinct.tolist())
    rules = zip(*(_rule(v, count) for v in distinct.tolist()), strict=True)
    return _Rule(*[np.stack(part)[where] for part in rules])


# --- calibration of the closure -------------------------------------------------------------------

TOLERANCE = 2e-2
"""Relative size below which Chebyshev coefficients of the derivative are neglected."""

NEAREST_END = 0.9
"""Largest lower end of the interval of correlations, whose length divides derivatives."""

MOST_ORDERS = 10
"""Largest degree, reached by peaked rows alone."""


class Nodes(NamedTuple):
    """Chebyshev-Lobatto nodes in the query correlation, from 1 downwards.

    Attributes:
        low: lower end of the interval.
        rho: (nodes,) correlations.
        to_coefficients: (nodes, nodes) matrix from values at the nodes to Chebyshev coefficients.
        to_slopes: (nodes - 1, nodes) to coefficients of the derivative, on an interval of length 2.
        at_nodes: (nodes, nodes) to the derivative at the nodes, on an interval of length 2.
    """

    low: float
    rho: Array
    to_coefficients: Array
    to_slopes: Array
    at_nodes: Array

    @property
    def slopes(self) -> Array:
        """(nodes, nodes) matrix from values at the nodes to derivatives at the nodes."""
        return self.at_nodes * (2.0 / (1.0 - self.low))

    def basis(self, rho: Array) -> tuple[Array, Array]:
        """Weights of the values at the nodes in the value and in the derivative at rho, each
        (nodes, *rho.shape)."""
        unit = (2.0 * rho - 1.0 - self.low) / (1.0 - self.low)
        unit = np.minimum(np.maximum(unit, -1.0), 1.0)
        terms, count = chebyshev_basis(unit.reshape(-1), len(self.rho)), len(self.rho)
        derivative = self.to_slopes * (2.0 / (1.0 - self.low))
        values = self.to_coefficients.T @ terms, derivative.T @ terms[:-1]
        return values[0].reshape(count, *rho.shape), values[1].reshape(count, *rho.shape)


def nodes_for(correlation: Array, theta: float) -> Nodes:
    """Enough nodes for e^{theta rho} on the interval of correlations that occur.

    Its Chebyshev coefficients on a half width h decay like (theta h/2)^m/m!; those of the
    derivative, which gradients need, are m times larger. The interval ends at 1, the correlation of
    a row with itself.
    """
    low = float(min(correlation.min(), NEAREST_END))
    half = 0.25 * theta * (1.0 - low)
    order, term = 1, half
    while order < MOST_ORDERS and term * (order + 1) > TOLERANCE:
        order += 1
        term *= half / order
    unit, *matrices = _lobatto(order)
    rho = 0.5 * (1.0 + low) + 0.5 * (1.0 - low) * unit
    return Nodes(low, rho, *matrices)


@functools.cache
def _lobatto(order: int) -> tuple[Array, Array, Array, Array]:
    """Nodes on [-1, 1], and matrices from values there to coefficients, to coefficients of the
    derivative, and to the derivative at the nodes."""
    unit = np.cos(np.pi * np.arange(order + 1) / order)
    terms = chebyshev.chebvander(unit, order)
    inverse = np.asarray(np.linalg.inv(terms), dtype=np.float64)
    slopes: Array = np.asarray(chebyshev.chebder(inverse), dtype=np.float64)
    return unit, inverse, slopes, np.asarray((terms[:, :-1] @ slopes).T, dtype=np.float64)


class Calibration(NamedTuple):
    """Factors of the closure by exact rows: a row per class of rows, a column per node of rho.

    Attributes:
        exponent: (classes, r) exponent of a class's joint law with itself per unit of the projected
            kernel, by log[(n-1) C2/(1-C2)] with C2 averaged over fluctuations at finite width.
        key: (classes, r) factor on dF/drho in the key path; rho at infinite width.
        along: (classes, r) that part of `key` per unit of the queries' correlation which is not due
            to fluctuating products; 1 at infinite width.
        query: (classes, r) factor on dF/drho in the query path; 1 at infinite width.
        growth: (classes, r) dF/dlog theta at fixed rho, over dF/drho.
        common: (classes,) addition to `query` for a row with itself.
        stiffness, against: (classes,) as in `FiniteRows`.
        noise_key, noise_query, noise_cross: (classes,) factors on the response to attention dropout
            in the paths, and its part in `Paths.cross`; 1, 1 and 0 at infinite width.
    """

    exponent: Array
    key: Array
    along: Array
    query: Array
    growth: Array
    common: Array
    stiffness: Array
    against: Array
    noise_key: Array
    noise_query: Array
    noise_cross: Array


def calibrate(
    reference: AttentionRows,
    logit_scale: float,
    nodes: Nodes,
    widths: Widths,
    between_nodes: bool = False,
) -> Calibration:
    """Calibrate every class at every node.

    Args:
        reference: of the classes' representative rows.
        between_nodes: whether log-odds are interpolated to a correlation at which joint laws are
            then formed; False: joint laws are formed at the nodes and interpolated.
    """
    theta, keys, unshared = reference.theta, reference.keys, reference.unshared_fraction
    unshared_keys = reference.unshared_by_mean
    one_key, column = (keys <= 1.0)[:, None], theta[:, None]
    rho = np.broadcast_to(nodes.rho, (len(theta), len(nodes.rho)))
    result = finite_rows(theta, keys, unshared_keys, rho, widths)
    odds = np.clip(result.overlap, 1e-12, 1.0 - 1e-12)
    odds = np.log(np.maximum(keys - 1.0, 1e-12)[:, None] * odds / (1.0 - odds))
    derivative = nodes.slopes
    closure = result.overlap @ derivative
    if between_nodes:
        closure = result.overlap * (1.0 - result.overlap) * (odds @ derivative)
    constant = one_key | (closure <= 0.0)
    closure = np.where(constant, 1.0, closure)
    # First order in the variance of one key's logit, which is that of its unshared part.
    lift = np.where(unshared > 0.0, unshared_keys / np.where(unshared > 0.0, unshared, 1.0), 1.0)
    noise = result.jacobian
    cross = 2.0 / widths.d_model * unshared * result.dropped_cross / (theta * noise)
    gap = np.maximum(reference.logit_variance, exact_rows.THETA_LEAST) * reference.strength**2
    sizes = logit_scale * reference.temperature / np.maximum(gap, 1e-12)
    return Calibration(
        np.where(one_key, 0.0, odds) * sizes[:, None],
        np.where(constant, rho, result.key / closure),
        np.where(constant, 1.0, result.along / closure),
        np.where(constant, 1.0, column * result.query / closure),
        np.where(constant, 0.0, result.growth / closure),
        np.where(constant[:, 0], 0.0, theta * result.common / closure[:, 0]),
        lift * result.stiffness,
        lift * result.against,
        np.where(one_key[:, 0], 1.0, result.dropped_key / (theta * noise)),
        np.where(one_key[:, 0], 1.0, result.dropped_query / noise),
        cross,
    )
