"""Statistics of single attention rows: variance, participation, entropy and mean attention.

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..softmax.chebyshev import THETA_MAX
from . import exact_rows
from .reference import ReferenceRow, reference_rows

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

ONE_KEY = 1.0 + 1e-9

LEAST_SCALE = 1e-3
"""Logit variance over a kernel's range below which its reference row is found at that scale: it has
a limit, linear from there."""

LEAST_RESPONSE = 1e-3
"""Floor of x, which divides; rows of several keys have .5 to 1."""


@dataclass(frozen=True)
class RowStatistics:
    """One entry per attention row, from the exact statistics of its reference row; arrays (rows,).

    Attributes:
        count: number of keys, 1/sum prior^2.
        temperature: C_ii of the query (the class mean for a class's own row).
        logit_variance: theta of the reference row.
        unshared: the same per unit of logit scale and query norm: C_jj - b.
        unshared_fraction: the same over the mean C_jj of the row's keys.
        own_fraction: fraction of C_jj that n_e alike keys do not share if their mean overlap is the
            row's; as `unshared_fraction` for exchangeable keys, 2 for two opposite ones.
        theta: the same within the tables, where the exact statistics were taken.
        keys: effective number of keys n_e.
        sum_square: P2 = E sum a^2 of the reference row.
        entropy: E[-sum a log a] in nats, over all allowed keys.
        strength: (1 - P2)/(1 - 1/n_e), the exact response of the softmax to its own logits.
        odds: log-odds of P2 per logit variance.
        own_response: x, the response of a mean weight to its key's own logit: `odds` within the
            tables, like the responses below.
        kernel_response: y, the response of a mean weight to a correlation of its key.
        variance_response: the response of a mean weight to its key's own variance.
    """

    count: Array
    temperature: Array
    logit_variance: Array
    unshared: Array
    unshared_fraction: Array
    own_fraction: Array
    theta: Array
    keys: Array
    sum_square: Array
    entropy: Array
    strength: Array
    odds: Array
    own_response: Array
    kernel_response: Array
    variance_response: Array

    @property
    def held(self) -> Array:
        """1, and below 1 for rows beyond all laws: the factor on their logit variance."""
        return self.theta / np.maximum(self.logit_variance, exact_rows.THETA_LEAST)

    @property
    def softening(self) -> Array:
        """Factor on the logit covariance that brings the row into the range of the tables."""
        inside = np.minimum(self.theta, THETA_MAX)
        return inside / np.maximum(self.logit_variance, exact_rows.THETA_LEAST)


def row_statistics(
    kernel: Array, prior: Array, temperature: Array, logit_scale: float
) -> RowStatistics:
    """Reference statistics of rows with the given keys and query norms.

    Args:
        kernel: (L, L) second moments of the tokens.
        prior: (rows, L) weights of the keys at vanishing logits, of sum 1.
        temperature: (rows,) second moment C_ii of each row's query.
        logit_scale: tau, so that row i has logit covariance tau C_ii C_jk.
    """
    scale = reference_scale(logit_scale * float(temperature.mean()), float(np.ptp(kernel)))
    logs = np.log(np.where(prior > 0.0, prior, 1.0))
    return statistics_of(
        reference_rows(kernel, prior, scale),
        scale,
        1.0 / (prior * prior).sum(1),
        temperature,
        logit_scale,
        prior @ np.diag(kernel),
        np.einsum("ij,ij->i", prior @ kernel, prior),
        np.maximum(-(prior * logs).sum(1), 0.0),
    )


def reference_scale(logit_scale: float, spread: float) -> float:
    """Where logits vanish the reference has a limit, which a small scale finds without
    cancellation."""
    return max(logit_scale, LEAST_SCALE / max(spread, 1e-12))


def statistics_of(
    reference: ReferenceRow,
    scale: float,
    count: Array,
    temperature: Array,
    logit_scale: float,
    diagonal: Array,
    overlap: Array,
    uniform: Array,
) -> RowStatistics:
    """Exact statistics of the rows' references.

    Args:
        reference, scale: the references, found at that scale.
        count: (rows,) number of keys.
        temperature, logit_scale: as in `row_statistics`.
        diagonal, overlap: (rows,) means of C_jj over a row's keys and of C_jl over their pairs.
        uniform: (rows,) entropy without any logits.
    """
    unshared = reference.theta / scale
    variance = unshared * logit_scale * temperature
    theta = exact_rows.tabulated(variance)
    exact = exact_rows.rows(theta, reference.keys)
    several = reference.keys > 1.0
    keys = np.maximum(reference.keys, ONE_KEY)
    square, cube = np.asarray(exact.sum_square), np.asarray(exact.sum_cube)
    rest = np.maximum(1.0 - square, 1e-300)
    strength = np.where(several, (1.0 - square) * keys / (keys - 1.0), 1.0)
    odds = np.where(several, np.log(square * (keys - 1.0) / rest) / theta, 1.0)
    # Mean weights respond as at the edge of the tables: first order in how keys differ, which
    # exponentials carry too far in rows that all but pick a key.
    near = np.minimum(theta, THETA_MAX)
    exact_near = exact_rows.rows(near, reference.keys)
    square, cube = np.asarray(exact_near.sum_square), np.asarray(exact_near.sum_cube)
    rest = np.maximum(1.0 - square, 1e-300)
    # E sum a (1-a)(1-2a), by Gaussian interpolation: second derivative of a in its own logit
    curvature = 1.0 - 3.0 * square + 2.0 * cube
    own = np.where(several, np.log(square * (keys - 1.0) / rest) / near, 1.0)
    wide = reference.keys > 2.0 + 1e-6
    response = np.where(wide, keys / np.maximum(keys - 2.0, 1e-6) * curvature / rest, 0.0)
    # the pull `response` already contains a share P2 of the key's own variance: added back
    own_variance = np.where(several, 0.5 * keys / (keys - 1.0) * curvature + response * square, 0.0)
    sized = np.where(diagonal > 0.0, diagonal, 1.0)  # of keys without any size there is no part
    own_part = (1.0 - overlap / sized) / (1.0 - 1.0 / keys)
    return RowStatistics(
        count,
        temperature,
        variance,
        unshared,
        np.clip(unshared / sized, 0.0, 2.0),
        np.where(several, np.clip(own_part, 0.0, 2.0), 0.0),
        theta,
        reference.keys,
        np.asarray(exact.sum_square),
        np.asarray(exact.entropy) + uniform - np.log(reference.keys),
        strength,
        np.maximum(odds, 1e-12),
        np.maximum(own, LEAST_RESPONSE),
        response,
        own_variance,
    )


def mean_attention(
    kernel: Array, prior: Array, statistics: RowStatistics, rows: Indices, scale: float
) -> Array:
    """(a, n) mean attention E a_ij of some rows over n common keys.

    E a_j is proportional to p_j (sum_k p_k e^{x tau C_jk})^{-y/x}, p the prior: a key crowded by
    others like it shares its weight with them. x and y are the exact responses of an exchangeable
    row to one key's own logit and to one key's correlations, so the law is exact to first order
    around such a row; for any prior it is exact to first order in tau.

    Args:
        kernel: (n, n) second moments of the keys.
        prior: (a, n) weights of the keys at vanishing logits, of sum 1.
        statistics: of all rows.
        rows: (a,) their indices in `statistics`; the last one's x is used for all.
        scale: tau, per unit of query norm.
    """
    own = statistics.own_response[rows[-1]]
    tau = scale * statistics.temperature[rows[-1]] * statistics.softening[rows[-1]]
    boltzmann = np.exp(own * tau * (kernel - kernel.max()))
    crowd = np.log(np.maximum(prior @ boltzmann, 1e-300))
    variance = np.diag(kernel)
    relative = variance - (prior @ variance)[:, None]
    log_weight = log_weights(statistics, rows, scale, relative, crowd, own)
    held = prior > 0.0
    log_weight = np.where(held, log_weight + np.log(np.where(held, prior, 1.0)), -np.inf)
    weight = np.exp(log_weight - log_weight.max(1, keepdims=True))
    return np.asarray(weight / weight.sum(1, keepdims=True))


def log_weights(
    statistics: RowStatistics,
    rows: Indices,
    scale: float,
    relative: Array,
    crowd: Array,
    own: Array | float,
) -> Array:
    """(a, n) logarithm of `mean_attention` over the prior, up to a constant of every row.

    Args:
        statistics, rows, scale: as there.
        relative: (a, n) a key's variance less the row's mean.
        crowd: (a, n) logarithm of the mean e^{x tau C_jk} over the row's keys k.
        own: x, of every row or of all.
    """
    lift = scale * statistics.temperature[rows] * statistics.softening[rows]
    lift = lift * statistics.variance_response[rows]
    shared = statistics.kernel_response[rows] / own
    return np.asarray(lift[:, None] * relative - shared[:, None] * crowd)
