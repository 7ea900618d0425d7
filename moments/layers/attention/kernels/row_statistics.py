"""Statistics of single attention rows: variance, participation, mean attention, finite widths.

Every row has a reference: an exchangeable row of n_e keys with logit variance theta around their
common part, chosen to match the distribution of the overlaps of the row's keys. Its exact
statistics calibrate the closure. The sum and the difference of two queries have independent
chi-square norms (`Widths.variance`, reduced for tokens of fixed norm), over which every exact
statistic is averaged: terms of order 1/d_model and 1/d_head enter as factors on dC2/drho, per
gradient path. See docs/theory/attention.md, The closure, and docs/theory/softmax.md, Queries of
finite width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray

from ....engine.state import ratio_or_zero
from .. import softmax
from ..softmax import (
    CORRECTED_MAX,
    STIFFNESS_LEAST,
    THETA_MAX,
    chebyshev_basis,
    chi_square_rule,
    key_corrections,
    pair_spreads,
)

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


# --- reference rows -------------------------------------------------------------------------------

FEWEST_KEYS = 3.0
"""Floor of n_e in rows of at least this many keys: the response in `mean_attention` is 0/0 at 2."""


class ReferenceRow(NamedTuple):
    """The exchangeable reference of every attention row; arrays (L,).

    Attributes:
        theta: variance of the logits around their common part.
        keys: effective number of keys n_e, between 1 and 1/sum prior^2, the number of keys.
    """

    theta: Array
    keys: Array


Mean = Callable[[Callable[[Array], Array]], Array]
"""Mean over the pairs of keys of every row of a function of C - max C."""


def annealed_moments(mean: Mean, relative: Array, spread: float, tau: float) -> tuple[Array, Array]:
    """log mean e^{tau (C - mean C)} and log mean e^{2 tau (C - mean C)} over a row's key pairs.

    Args:
        relative: (rows,) mean of C - max C.
        spread: max C - min C.
        tau: covariance of logits per unit of the kernel, at the rows' average query.
    """
    shift = -tau * relative
    if tau * spread < 1.0:  # logarithms of numbers near 1, without cancellation
        first = np.log1p(mean(lambda below: np.expm1(tau * below)))
        second = np.log1p(mean(lambda below: np.expm1(2.0 * tau * below)))
    else:
        first = np.log(np.maximum(mean(lambda below: np.exp(tau * below)), 1e-300))
        second = np.log(np.maximum(mean(lambda below: np.exp(2.0 * tau * below)), 1e-300))
    return np.maximum(first + shift, 0.0), np.maximum(second + 2.0 * shift, 0.0)


def _annealed(theta: Array, keys: Array) -> Array:
    """log mean over key pairs of e^{cov - mean cov} of an exchangeable row."""
    return np.asarray(np.logaddexp(np.log1p(-1.0 / keys), theta - np.log(keys)) - theta / keys)


NEWTON_STEPS = 30
"""Cap on Newton steps, never reached."""


def _theta_of(keys: Array, target: Array, theta: Array, steps: int = NEWTON_STEPS) -> Array:
    """Solve `_annealed(theta, keys) = target`, convex and increasing in theta, by Newton's method:
    the first step lands at or above the root, further ones descend monotonically."""
    share, logs = 1.0 / keys, np.log(keys)
    others = np.log1p(-share)
    bound = (target + logs) / (1.0 - share)
    theta = np.minimum(np.maximum(theta, 1e-12), bound)
    for _ in range(steps):
        value = np.logaddexp(others, theta - logs) - theta * share
        slope = np.maximum(share * np.exp(theta - value - theta * share) - share, 1e-12)
        before = theta
        theta = np.minimum(np.maximum(theta - (value - target) / slope, 1e-12), bound)
        if (np.abs(theta - before) <= 1e-12 * theta).all():
            break
    return theta


def _roots(first: Array, second: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """theta and log n of rows with both moments, log n in [low, high], by Newton's method.

    Starts from an estimate by third cumulants or, for peaked rows, by the largest key, and corrects
    theta alone before every step.
    """
    size = np.maximum(first, 1e-300)
    small = 0.75 * np.maximum(second / size - 4.0, 1e-3)
    logs = np.log(np.maximum(0.5 * small * small / size, 1.0))
    logs = np.minimum(np.maximum(np.maximum(logs, second - 2.0 * first), low), high)
    share = np.exp(-logs)
    theta = np.sqrt(2.0 * first / (share * (1.0 - share)))
    theta, smallest = _theta_of(1.0 / share, first, theta, 3), np.inf
    for _ in range(NEWTON_STEPS):
        share = np.exp(-logs)
        theta = _theta_of(1.0 / share, first, theta, 1)
        rest, odds = np.log1p(-share), share / (1.0 - share)
        errors, by_theta, by_logs = [], [], []
        for times, target in ((1.0, first), (2.0, second)):
            scaled = times * theta
            value = np.logaddexp(rest, scaled - logs) - scaled * share
            equal = np.exp(scaled - logs - value - scaled * share)  # weight of pairs of equal keys
            errors.append(value - target)
            by_theta.append(times * np.maximum(equal - share, 1e-12))
            by_logs.append(scaled * share + odds * (1.0 - equal) - equal)
        determinant = by_theta[0] * by_logs[1] - by_theta[1] * by_logs[0]
        step = by_theta[0] * errors[1] - by_theta[1] * errors[0]
        step = -step / np.where(determinant == 0.0, 1.0, determinant)
        last_logs, last_theta = logs, theta
        logs = np.minimum(np.maximum(logs + step, low), high)
        theta = theta - (errors[0] + by_logs[0] * (logs - last_logs)) / by_theta[0]
        theta = np.maximum(theta, 1e-12)
        change = float((np.abs(logs - last_logs) + np.abs(theta - last_theta) / last_theta).max())
        # Stop when the next (quadratic) step is negligible, or when steps are rounding errors.
        if change <= 1e-8 or (smallest < 1e-4 and change > 0.5 * smallest):
            break
        smallest = min(change, smallest)
    return theta, logs


def matched(first: Array, second: Array, count: Array) -> ReferenceRow:
    """The exchangeable rows with these `annealed_moments`, of at most `count` keys."""
    several = count > 1.0 + 1e-6
    ceiling = np.where(several, count, 2.0)
    floor = np.minimum(FEWEST_KEYS, ceiling)

    def excess(keys: Array, of: Any, theta: Array) -> tuple[Array, Array]:
        theta = _theta_of(keys, first[of], theta)
        return np.abs(second[of] - _annealed(2.0 * theta, keys)), theta

    # upper bounds of the root: by the largest key alone, and to second order in small theta
    theta = (first + np.log(ceiling)) / (1.0 - 1.0 / ceiling)
    theta = np.minimum(theta, np.sqrt(2.0 * first / (1.0 - 1.0 / ceiling) * ceiling))
    all_keys, theta = excess(ceiling, ..., theta)
    keys = ceiling.copy()
    # other rows are exchangeable to rounding, with n_e = n
    inside = np.flatnonzero((all_keys > 1e-6 * second) & (ceiling > floor) & several)
    if inside.size:
        ends = np.log(floor[inside]), np.log(ceiling[inside])
        root, logs = _roots(first[inside], second[inside], *ends)
        result = np.exp(logs)
        solved = (logs > ends[0]) & (logs < ends[1])
        solved &= np.abs(second[inside] - _annealed(2.0 * root, result)) <= 1e-9 * second[inside]
        if not solved.all():  # without a root: the end with the smaller error
            rest = inside[~solved]
            few_keys, theta_few = excess(floor[rest], rest, theta[rest])
            at_floor = few_keys < all_keys[rest]
            result[~solved] = np.where(at_floor, floor[rest], ceiling[rest])
            root[~solved] = np.where(at_floor, theta_few, theta[rest])
        keys[inside], theta[inside] = result, root
    return ReferenceRow(np.where(several, theta, 0.0), np.where(several, keys, 1.0))


# --- rows of any kernel ---------------------------------------------------------------------------

ONE_KEY = 1.0 + 1e-9

LEAST_SCALE = 1e-3
"""Floor of the logit variance over a kernel's range at which the reference row is matched; it has a
limit, and is linear below."""

LEAST_RESPONSE = 1e-3
"""Floor of x, which divides; it is .5 to 1 in rows of several keys."""


@dataclass(frozen=True)
class AttentionRows:
    """Exact statistics of the reference row of every attention row; arrays (rows,).

    Attributes:
        count: number of keys, 1/sum prior^2.
        temperature: C_ii of the query (the class mean for a class's representative row).
        logit_variance: theta of the reference row.
        unshared: theta per unit of logit scale and temperature: C_jj - b.
        unshared_fraction: `unshared` over the mean C_jj of the row's keys.
        unshared_by_mean: fraction of C_jj that n_e equal keys do not share if their mean overlap is
            the row's; `unshared_fraction` for exchangeable keys, 2 for two opposite ones.
        theta: `logit_variance`, limited to the range of the exact statistics.
        keys: effective number of keys n_e.
        entropy: E[-sum a log a] in nats, over all allowed keys.
        strength: (1 - P2)/(1 - 1/n_e), the exact response of the softmax to its own logits.
        odds: log-odds of P2 per logit variance.
        own_response: x, the response of a mean weight to its key's own logit: `odds`, at most at
            the edge of the tables, like the responses below.
        kernel_response: y, the response of a mean weight to a correlation of its key.
        variance_response: the response of a mean weight to its key's own variance.
    """

    count: Array
    temperature: Array
    logit_variance: Array
    unshared: Array
    unshared_fraction: Array
    unshared_by_mean: Array
    theta: Array
    keys: Array
    entropy: Array
    strength: Array
    odds: Array
    own_response: Array
    kernel_response: Array
    variance_response: Array

    def of(self, rows: Indices | slice) -> AttentionRows:
        """The statistics of an index or slice of rows."""
        return AttentionRows(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def variance_kept(self) -> Array:
        """theta over the logit variance: 1, and less for rows beyond the exact statistics."""
        return self.theta / np.maximum(self.logit_variance, softmax.THETA_LEAST)

    @property
    def step(self) -> Array:
        """Step size of the iteration for A in `joint_laws.softmax_response`.

        For exchangeable keys that iteration has one variable, p - q of a key with itself and with
        another one, and the derivative -2 l p (1 - p)/(1 - p + q), l the log-odds of p: this step
        makes it converge quadratically.
        """
        keys = np.maximum(self.keys, ONE_KEY)
        contrast = self.strength * (keys - 1.0) / keys
        return 1.0 / (1.0 + 2.0 * self.odds * self.theta * (1.0 - contrast))

    @property
    def softening(self) -> Array:
        """Factor on the logit covariance that brings the row into the range of the tables."""
        inside = np.minimum(self.theta, THETA_MAX)
        return inside / np.maximum(self.logit_variance, softmax.THETA_LEAST)


def rows_of_kernel(
    kernel: Array, prior: Array, temperature: Array, logit_scale: float
) -> AttentionRows:
    """Reference statistics of rows with the given keys and query norms.

    Args:
        kernel: (L, L) second moments C of the tokens.
        prior: (rows, L) weights of every row's keys at vanishing logits; they sum to 1, and a row's
            pairs of keys are averaged under them.
        temperature: (rows,) second moment C_ii of each row's query.
        logit_scale: tau, so that row i has logit covariance tau C_ii C_jk.
    """
    logs = np.log(np.where(prior > 0.0, prior, 1.0))
    top = float(kernel.max())
    below = kernel - top

    def mean(function: Callable[[Array], Array]) -> Array:
        return np.asarray(np.einsum("ij,ij->i", prior @ function(below), prior))

    return attention_rows(
        mean,
        (float(kernel.min()), top),
        (temperature, float(temperature.mean())),
        logit_scale,
        1.0 / (prior * prior).sum(1),
        prior @ np.diag(kernel),
        np.maximum(-(prior * logs).sum(1), 0.0),
    )


def attention_rows(
    mean: Mean,
    between: tuple[float, float],
    temperature: tuple[Array, float],
    logit_scale: float,
    count: Array,
    diagonal: Array,
    uniform: Array,
) -> AttentionRows:
    """Reference statistics of rows, from the distribution of the overlaps of their keys.

    Args:
        mean: over pairs of keys.
        between: smallest and largest entry of the keys' kernel.
        temperature: (rows,) second moment of each row's query, and its average.
        logit_scale: tau.
        count, diagonal, uniform: as in `statistics_of`.

    Source:
        derived here; which annealed moments to match was decided by measurement.
    """
    low, top = between
    of_rows, average = temperature
    # The limit of vanishing logits is taken at a small scale, without cancellation.
    scale = max(logit_scale * average, LEAST_SCALE / max(top - low, 1e-12))
    relative = mean(lambda below: below)
    reference = matched(*annealed_moments(mean, relative, top - low, scale), count)
    overlap = relative + top
    return statistics_of(reference, scale, count, of_rows, logit_scale, diagonal, overlap, uniform)


def statistics_of(
    reference: ReferenceRow,
    scale: float,
    count: Array,
    temperature: Array,
    logit_scale: float,
    diagonal: Array,
    overlap: Array,
    uniform: Array,
) -> AttentionRows:
    """Exact statistics of the rows' references.

    Args:
        reference, scale: the references, and the logit scale times temperature they belong to.
        count: (rows,) number of keys.
        diagonal, overlap: (rows,) means of C_jj over a row's keys and of C_jl over their pairs.
        uniform: (rows,) entropy at vanishing logits.
    """
    unshared = reference.theta / scale
    variance = unshared * logit_scale * temperature
    theta = softmax.tabulated(variance)
    exact = softmax.rows(theta, reference.keys)
    several = reference.keys > 1.0
    keys = np.maximum(reference.keys, ONE_KEY)
    square, cube = np.asarray(exact.sum_square), np.asarray(exact.sum_cube)
    rest = np.maximum(1.0 - square, 1e-300)
    strength = np.where(several, (1.0 - square) * keys / (keys - 1.0), 1.0)
    odds = np.where(several, np.log(square * (keys - 1.0) / rest) / theta, 1.0)
    # Responses of mean weights are capped at the edge of the tables: being of first order in the
    # differences of keys, they would be exponentiated too far in rows that select one key.
    near = theta
    if theta.max() > THETA_MAX:
        near = np.minimum(theta, THETA_MAX)
        exact_near = softmax.rows(near, reference.keys)
        square, cube = np.asarray(exact_near.sum_square), np.asarray(exact_near.sum_cube)
        rest = np.maximum(1.0 - square, 1e-300)
    # E sum a (1-a)(1-2a), by Gaussian interpolation: second derivative of a in its own logit
    curvature = 1.0 - 3.0 * square + 2.0 * cube
    response_own = odds
    if near is not theta:
        response_own = np.where(several, np.log(square * (keys - 1.0) / rest) / near, 1.0)
    wide = reference.keys > 2.0 + 1e-6
    response = np.where(wide, keys / np.maximum(keys - 2.0, 1e-6) * curvature / rest, 0.0)
    # `response` already contains a fraction P2 of the key's own variance, which is added back
    own_variance = np.where(several, 0.5 * keys / (keys - 1.0) * curvature + response * square, 0.0)
    sized = np.where(diagonal > 0.0, diagonal, 1.0)  # keys that are 0 have no unshared fraction
    diagonal_factor = (1.0 - overlap / sized) / (1.0 - 1.0 / keys)
    return AttentionRows(
        count,
        temperature,
        variance,
        unshared,
        np.clip(unshared / sized, 0.0, 2.0),
        np.where(several, np.clip(diagonal_factor, 0.0, 2.0), 0.0),
        theta,
        reference.keys,
        np.asarray(exact.entropy) + uniform - np.log(reference.keys),
        strength,
        np.maximum(odds, 1e-12),
        np.maximum(response_own, LEAST_RESPONSE),
        response,
        own_variance,
    )


def mean_attention(
    kernel: Array, prior: Array, statistics: AttentionRows, rows: Indices, scale: float
) -> Array:
    """(a, n) mean attention E a_ij of some rows over n common keys.

    E a_j is proportional to p_j (sum_k p_k e^{x tau C_jk})^{-y/x}, p the prior: similar keys share
    their weight. x and y are the exact responses of an exchangeable row to one key's own logit and
    to one key's correlations, so the law is exact to first order around such a row; for any prior
    it is exact to first order in tau.

    Args:
        kernel: (n, n) second moments of the keys.
        prior: (a, n) weights of the keys at vanishing logits, of sum 1.
        rows: (a,) their indices in `statistics`; the last one's x is used for all.
        scale: tau, per unit of query norm.
    """
    response = statistics.own_response[rows[-1]]
    tau = scale * statistics.temperature[rows[-1]] * statistics.softening[rows[-1]]
    boltzmann = np.exp(response * tau * (kernel - kernel.max()))
    crowd = np.log(np.maximum(prior @ boltzmann, 1e-300))
    variance = np.diag(kernel)
    relative = variance - (prior @ variance)[:, None]
    log_weight = log_weights(statistics, rows, scale, relative, crowd, response)
    allowed = prior > 0.0
    log_weight = np.where(allowed, log_weight + np.log(np.where(allowed, prior, 1.0)), -np.inf)
    weight = np.exp(log_weight - log_weight.max(1, keepdims=True))
    return np.asarray(weight / weight.sum(1, keepdims=True))


def log_weights(
    statistics: AttentionRows,
    rows: Indices,
    scale: float,
    relative: Array,
    crowd: Array,
    response: Array | float,
) -> Array:
    """(a, n) logarithm of `mean_attention` over the prior, up to a constant of every row.

    Args:
        relative: (a, n) a key's variance less the row's mean.
        crowd: (a, n) logarithm of the mean e^{x tau C_jk} over the row's keys k.
        response: x, per row or for all.
    """
    lift = scale * statistics.temperature[rows] * statistics.softening[rows]
    lift = lift * statistics.variance_response[rows]
    shared = statistics.kernel_response[rows] / response
    return np.asarray(lift[:, None] * relative - shared[:, None] * crowd)


# --- saturation -----------------------------------------------------------------------------------

FAINT = 1e-9
"""Product of correlation and logit variance below which the limit of independent rows is used."""

LEAST_OWN = 0.05
"""Floor of the unshared fraction of keys in `dropped_by_own`, which divides."""


def saturation(
    correlation: Array, keys: Array, theta: Array, odds: Array
) -> tuple[Array, Array, Array]:
    """R1, R2 and rho dR2/drho of two rows with these statistics; see docs/theory/band.md."""
    free = (keys - 1) / keys**2
    share = 1 / (1 + (keys - 1) * np.exp(-correlation * odds))
    slope = odds / theta * share * (1 - share) / free
    faint = np.abs(correlation * theta) < FAINT
    chord = np.where(
        faint, slope, (share - 1 / keys) / (np.where(faint, 1.0, correlation * theta) * free)
    )
    return chord, slope, correlation * odds * (1 - 2 * share) * slope


def dropped_by_own(dropped: Any, unshared: Array) -> Array:
    """Relative addition of attention dropout to the response of a row with itself: the undropped
    response contains only the unshared part of the keys.

    Args:
        dropped: p/(1 - p).
        unshared: unshared fraction of the keys.
    """
    return np.asarray(dropped / np.maximum(unshared, LEAST_OWN))


# --- finite widths --------------------------------------------------------------------------------


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
    tables: Any = softmax,
) -> FiniteRows:
    """Statistics of rows, averaged over fluctuations at finite width; responses of one key are 0.

    Args:
        theta, keys: (m,) logit variance within the tables and number of keys.
        unshared: (m,) u, the unshared fraction of a key.
        rho: (m, s) correlations of the queries; the first is 1.
        tables: `softmax`, or an `AlikeRows`.
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
        np.where(one_key, 1.0, softmax.jacobian_square(p2, keys)),
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
    size = softmax.tabulated(theta[:, None, None] * norm)
    psi = size * (plus - minus) / norm
    relative = np.sqrt(1.0 + 2.0 * share[:, 0] * shared**2)[:, None] * (rule.nodes - 1.0)
    relative = np.maximum(1.0 + relative, 0.0)
    row_theta = softmax.tabulated(theta[:, None] * relative)
    dimension = 1.0 / (deficit * unshared**2 + STIFFNESS_LEAST) + 2.0
    corrections = key_corrections(theta, keys, dimension)
    # variances and covariances of the Gaussian logits equivalent to those of keys of fixed norm
    fixed = np.reshape(deficit > 0.0, (-1, 1))
    gauss_size, gauss_psi, gauss_theta = size, psi, row_theta
    if fixed.any():
        corrected = corrections.covariance(row_theta, row_theta)
        gauss_theta = softmax.tabulated(np.where(fixed, corrected, row_theta))
        fixed = fixed[..., None]
        gauss_size = softmax.tabulated(np.where(fixed, corrections.covariance(size, size), size))
        gauss_psi = np.where(fixed, corrections.covariance(size, psi), psi)
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
    gap = np.maximum(reference.logit_variance, softmax.THETA_LEAST) * reference.strength**2
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
