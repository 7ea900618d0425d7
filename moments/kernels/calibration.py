"""Scalar functions of the correlation between two queries that tie the closure to exact rows.

For an exchangeable row everything the closure leaves open is one number per correlation rho of two
queries: the overlap C2(rho) = E sum_j a_j a'_j of their rows. A key holds the fraction C2 of its
own column of the joint law and (1 - C2)/(n-1) of each other, so a law proportional to exp(beta gap)
on its diagonal needs

    beta gap = log[(n-1) C2/(1-C2)],     gap = (theta/tau) strength^2.

For rows of different length or variance the geometric mean of the two log odds is used: exact to
first order in rho, and within 1 % of the exact log odds for theta <= 1, 3 % for theta <= 3 (the
worst case being a row of two or three keys against a long one).

Finite widths enter here and in `width_terms`. The realised query products q_i.q_i'/d_head
fluctuate: in distribution the sum and the difference of two queries have independent chi-square
norms of relative variance 2/nu (`Widths.freedom`), less what tokens of fixed norm take away
(`softmax.fixed_norms`, which also says at what covariance their keys' logits are to be read), so
every exact statistic is averaged over two two-point rules. The gradient paths carry the width terms
of an exchangeable layer, derived in `laws.attention_refined`, divided by the closure's own
derivative dC2/drho, as factors; with u = 1 - b/C_jj what a key does not share with the others and
delta the deficit of its norm's fluctuation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moments.kernels import exact_rows
from moments.kernels.nodes import Nodes
from moments.kernels.widths import Widths
from moments.softmax import chi_square_rule
from moments.softmax.chebyshev import THETA_MAX
from moments.softmax.fixed_norms import (
    STIFFNESS_LEAST,
    KeyCorrections,
    key_corrections,
    pair_spreads,
)

Array = NDArray[np.float64]


class Calibration(NamedTuple):
    """One row per class; a column per node where two are stated.

    Attributes:
        log_odds: (classes, r) log[(n-1) C2/(1-C2)], averaged over the widths' fluctuations in C2.
        key: (classes, r) multiplies dF/drho in the key path; rho at infinite width.
        query: (classes, r) multiplies dF/drho in the query path; 1 at infinite width.
        growth: (classes, r) dF/dlog theta at fixed rho, over dF/drho.
        tilt, query_tilt: (classes, r) E of two rows' shifts along the direction that both look in,
            over their product, in the output and in the query path.
        common: (classes,) what the keys' own variance, fluctuating, adds to `query` for a row with
            itself.
        stiffness: (classes,) x, where fixed norms leave the fraction e^{-x (1 + rho)} of C2.
        against: (classes,) fraction of what two rows' keys share that fixed norms take away.
        masks: (classes,) relative change of what a dropped value weighs.
        noise_key, noise_query, noise_cross: (classes,) what the widths do to the response to
            dropped attention in the paths and in the correlation of the key and value paths; 1, 1
            and 0 at infinite width.
    """

    log_odds: Array
    key: Array
    query: Array
    growth: Array
    tilt: Array
    query_tilt: Array
    common: Array
    stiffness: Array
    against: Array
    masks: Array
    noise_key: Array
    noise_query: Array
    noise_cross: Array


class _Pairs(NamedTuple):
    """Statistics of two rows, averaged: (classes, r); `drive` those times the logit covariance."""

    overlap: Array
    jacobian: Array
    radial: Array
    growth: Array
    drive: Array
    drive_radial: Array


class _Rows(NamedTuple):
    """Statistics of one row, averaged: (classes,); `dropped` is theta (2 P2 - 5 P3 + 3 P4)."""

    square: Array
    cube: Array
    fourth: Array
    vacancy: Array
    jacobian: Array
    radial: Array
    tilt: Array
    weighted: Array
    driven: Array
    dropped: Array


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
        unshared: (classes,) u.
        nodes: correlations.
        widths: of the layer.
    """
    narrow, wide, deficit = 1.0 / widths.d_head, 1.0 / widths.d_model, widths.deficit
    single, rho, column = keys <= 1.0, nodes.rho, theta[:, None]
    dimension = 1.0 / (deficit * unshared**2 + STIFFNESS_LEAST) + 2.0
    corrections = key_corrections(
        lambda around: exact_rows.rows(around, keys), theta, dimension, 0.95 * THETA_MAX
    )
    pair, row = _averages(theta, keys, unshared, nodes, widths, corrections)
    square = np.maximum(row.square, 1e-300)
    straight_row = np.where(single, 1.0, np.maximum(row.jacobian, 1e-300))
    curvature = np.where(single, 0.0, corrections.curvature) / straight_row
    diagonal = (row.square - 2.0 * row.cube + row.fourth) / straight_row
    stiff = unshared**2 * deficit
    shared = np.maximum(1.0 - unshared, 0.0)
    fluctuating = unshared * (wide - deficit)
    between = 0.5 * (1.0 + rho)

    closure = pair.overlap @ nodes.basis(rho)[1]
    still = single[:, None] | (closure <= 0.0)
    closure = np.where(still, 1.0, closure)
    key = pair.drive * (1.0 - wide) + pair.drive_radial * wide
    key = key * np.exp(-np.outer(stiff * curvature, between))
    query = pair.jacobian * max(1.0 - 2.0 * wide - narrow, 0.0)
    query = query + pair.radial * (narrow + 3.0 * wide)
    spent = diagonal[:, None] + np.outer(curvature, between)
    query = query * np.exp(-2.0 * stiff[:, None] * spent)
    common = shared**2 * deficit * (4.0 * row.radial - 2.0 * row.jacobian)

    masked = row.jacobian * max(1.0 - 2.0 * wide - narrow, 0.0)
    masked = masked + row.radial * (narrow + 2.0 * wide)
    masked = masked * np.exp(-stiff * curvature)
    masked = masked + fluctuating * straight_row * (2.0 * diagonal + curvature)
    masked = masked + 2.0 * shared**2 * deficit * (row.radial - row.jacobian)
    noise = np.where(single, 1.0, exact_rows.jacobian_square(row.square, keys))
    noise_key = row.driven / (theta * noise) * (1.0 + fluctuating * curvature)
    noise_cross = 2.0 * wide * unshared * row.dropped / (theta * noise)

    tilt, query_tilt = _tilts(pair, row, theta, rho)
    skewness = theta * (1.0 - 3.0 * row.square + 2.0 * row.cube)
    odds = np.clip(pair.overlap, 1e-12, 1.0 - 1e-12)
    odds = np.log(np.maximum(keys - 1.0, 1e-12)[:, None] * odds / (1.0 - odds))
    return Calibration(
        np.where(single[:, None], 0.0, odds),
        np.where(still, rho, key / closure),
        np.where(still, 1.0, column * query / closure),
        np.where(still, 0.0, pair.growth / closure),
        np.where(single[:, None], 1.0, tilt),
        np.where(single[:, None], 1.0, query_tilt),
        np.where(still[:, 0], 0.0, theta * common / closure[:, 0]),
        np.where(single, 0.0, stiff * row.dropped / square),
        np.where(single, 0.0, deficit * unshared * (1.0 + unshared) * skewness),
        np.where(single, 0.0, fluctuating * (row.weighted / square - 1.0)),
        np.where(single, 1.0, noise_key),
        np.where(single, 1.0, masked / noise),
        np.where(single, 0.0, noise_cross),
    )


def _averages(
    theta: Array,
    keys: Array,
    unshared: Array,
    nodes: Nodes,
    widths: Widths,
    corrections: KeyCorrections,
) -> tuple[_Pairs, _Rows]:
    """Averages over the norms of the sum and the difference of two queries, and over one's own."""
    rule = chi_square_rule(widths.freedom)
    count, share = len(rule.nodes), widths.deficit_share
    first, second = np.repeat(rule.nodes, count), np.tile(rule.nodes, count)
    shared = np.clip(1.0 - unshared, 0.0, 1.0)
    rho = nodes.rho
    spreads = pair_spreads(np.maximum(rho, 0.0), shared[:, None], share)
    apart = np.maximum(spreads.difference - spreads.along**2 * spreads.total, 0.0)
    total = np.sqrt(spreads.total)[..., None] * (first - 1.0)
    apart = np.sqrt(apart)[..., None] * (second - 1.0)
    plus = 0.5 * (1.0 + rho[:, None]) * np.maximum(1.0 + total, 0.0)
    along = np.asarray(spreads.along)[..., None] * total
    minus = 0.5 * (1.0 - rho[:, None]) * np.maximum(1.0 + apart + along, 0.0)
    norm = np.maximum(plus + minus, 1e-12)
    size = exact_rows.tabulated(theta[:, None, None] * norm)
    psi = size * (plus - minus) / norm
    own = np.sqrt(1.0 + 2.0 * share * shared**2)[:, None] * (rule.nodes - 1.0)
    own = np.maximum(1.0 + own, 0.0)
    alone = exact_rows.tabulated(theta[:, None] * own)
    size_seen, psi_seen, alone_seen = size, psi, alone
    if widths.deficit > 0.0:
        lifted = corrections._replace(
            dimension=corrections.dimension[:, None], share=corrections.share[:, None]
        )
        alone_seen = exact_rows.tabulated(lifted.covariance(alone, alone))
        lifted = corrections._replace(
            dimension=corrections.dimension[:, None, None], share=corrections.share[:, None, None]
        )
        size_seen = exact_rows.tabulated(lifted.covariance(size, size))
        psi_seen = lifted.covariance(size, psi)
    cosine = np.clip(psi_seen / size_seen, -1.0, 1.0)
    flat = (len(theta), -1)
    exact = exact_rows.pairs(size_seen.reshape(flat), keys, cosine.reshape(flat))
    weights = np.outer(rule.weights, rule.weights).ravel()
    fields = [np.reshape(field, size.shape) for field in exact[:4]]
    averaged = [field @ weights for field in fields]
    pair = _Pairs(*averaged, (psi * fields[1]) @ weights, (psi * fields[2]) @ weights)
    rows = exact_rows.rows(alone_seen, keys[:, None])
    cube, fourth = np.asarray(rows.sum_cube), np.asarray(rows.sum_fourth)
    dropped = alone * (2.0 * np.asarray(rows.sum_square) - 5.0 * cube + 3.0 * fourth)
    entries = (*rows[:6], rows.mean_logit_square, rows.weighted_logit_square)
    driven = alone * np.asarray(rows.jacobian_square)
    found = [np.asarray(one) @ rule.weights for one in (*entries, driven, dropped)]
    return pair, _Rows(*found)


def _tilts(pair: _Pairs, row: _Rows, theta: Array, rho: Array) -> tuple[Array, Array]:
    """E of two rows' shifts over their product: E tr D tr D' and E (a'.a^2 - a.a' sum a^2)
    interpolate between independent and equal rows."""
    product = np.maximum((1.0 - row.square) ** 2, 1e-300)
    own, cosine = row.vacancy / product, rho * rho
    query = 1.0 + cosine * (own[:, None] - 1.0)
    rest = 4.0 * (row.cube - (row.vacancy - 1.0 + 2.0 * row.square))
    tilt = query + (pair.jacobian - rest[:, None]) / product[:, None]
    # equal rows: exactly E (a.s)^2 - theta P2, logits averaged with it
    exact = (row.tilt - row.square) / (theta * product)
    return tilt + np.outer(exact - tilt[:, 0], cosine), query
