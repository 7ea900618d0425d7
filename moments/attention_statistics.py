"""Softmax statistics of one attention layer with tokens alike, averaged over the tokens' norms.

A row's logits are w.x_j with w = W_k^T W_q x_i. Two things at finite width:

Queries. |w|^2 fluctuates: as a chi-square over d_head (the query's entries) and over d_model (the
key weights), and with |x_i|^2. It is replaced by a gamma variable of the same relative variance
2/nu, and the average by a Gauss rule. Two rows fluctuate together: with w, w' = sqrt((1+r)/2) p +-
sqrt((1-r)/2) q, what enters are |p|^2 and |q|^2.

Keys. Given w, logits of Gaussian tokens are Gaussian. Tokens whose norm is fixed, by a
normalisation, lack the fluctuation 2/d of |x_j|^2, or the part 2 delta of it:
delta = 1/d - Var|x|^2 / (2 E^2|x|^2). To first order in delta, from the covariance of sample
correlations (Isserlis' theorem for the inner products, the delta method for the norms),

    the own logit variance, 1 - r, fluctuates with all overlaps: relative variance 2 r^2 delta;
    own logits given that have fourth cumulant -6 (1-r)^2 delta times their variance squared;

and the overlaps of two queries fluctuate less (`_norms`). A fourth cumulant 3 z theta^2 acts as an
independent fluctuation z of each key's own variance. On P_2 = 1 - 2 d/dtheta E log sum e^s that is,
exactly,

    dP_2 = -(z theta^2 / 4) d/dtheta (1 - 7 P_2 + 12 P_3 - 6 P_4).

For many keys it replaces the logit covariance psi of two rows by log E e^{s+s'} - log E e^s -
log E e^s', with s on a sphere. Finite rows are taken at that psi with its shift scaled by dP_2 over
the limit of dP_2: first order is exact for P_2, and the limit of many keys for all statistics.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .state import Array

if TYPE_CHECKING:
    from .softmax import SquareRows


@dataclass(frozen=True, eq=False)
class AttentionStatistics:
    """Values of the refined attention laws' symbols, and of what users ask about attention.

    Attributes:
        values: symbol name -> value, shape (...,).
        logit_variance: theta, within a row.
        entropy: E[-sum_j a_ij log a_ij] in nats.
        valid: False where theta is beyond what the statistics are validated for.
    """

    values: dict[str, Array]
    logit_variance: Array
    entropy: Array
    valid: Any


@functools.lru_cache(maxsize=256)
def _rows(seq_len: int) -> SquareRows:
    from .softmax import SquareTable

    return SquareTable.load().at_length(seq_len)


class _Rule(NamedTuple):
    """Gauss nodes of one chi-square over its mean, and of two independent ones."""

    nodes: np.ndarray
    weights: np.ndarray
    first: np.ndarray
    second: np.ndarray
    pair_weights: np.ndarray


@functools.lru_cache(maxsize=1024)
def _rule(variance: float, points: int | None = None) -> _Rule:
    from .softmax import chi_square_rule

    nodes, weights = chi_square_rule(2 / variance, points)
    count = nodes.size
    return _Rule(
        nodes,
        weights,
        np.repeat(nodes, count),
        np.tile(nodes, count),
        np.outer(weights, weights).ravel(),
    )


def _rules(variance: Any) -> _Rule:
    """The rule, along a new last axis where every configuration has one of its own."""
    if np.ndim(variance) == 0:
        return _rule(float(variance))
    flat = [_rule(float(v), 5) for v in np.ravel(variance)]
    return _Rule(
        *[np.stack(part).reshape(*np.shape(variance), -1) for part in zip(*flat, strict=True)]
    )


class _Norms(NamedTuple):
    """Nodes of |w|^2 of one row, and of |p|^2 and |q|^2 of a pair; each over its mean."""

    row: np.ndarray
    total: np.ndarray
    difference: np.ndarray
    row_weights: np.ndarray
    pair_weights: np.ndarray


def _norms(r: Any, d_model: Any, d_head: Any, norm_spread: Any, deficit: Any) -> _Norms:
    """Wishart weights 2/d_head + 2/d, Gaussian overlaps 2/d, less what fixed norms take away.

    With o = x_i.x_k/d and phi the relative fluctuation of the keys' own variance, over delta:
    Var phi = 2 r^2, Var o = (1 - r^2)^2, Cov = -2 r^2 (1-r); |p|^2 = (1+o)(1+phi)/(1+r) and
    |q|^2 = (1-o)(1+phi)/(1-r). The part that depends on r rescales the nodes about their mean.
    """
    common = 2 / d_head + 2 / d_model + norm_spread
    rule = _rules(common)
    r = _positive_part(r)  # negative correlations are at most 1/(L-1)
    share = deficit / common
    total = 1 + share * (1 - r - 3 * r**2 + 7 * r**3) / (1 + r)
    difference = 1 + share * (1 + 2 * r + 7 * r**2)
    along = share * (-1 - r + 3 * r**2 + 7 * r**3) / ((1 + r) * total)
    apart = (difference - along**2 * total) ** 0.5
    first = _lift(total**0.5) * (rule.first - 1)
    return _Norms(
        np.maximum(1 + _lift((1 + 2 * share * r**2) ** 0.5) * (rule.nodes - 1), 0.0),
        np.maximum(1 + first, 0.0),
        np.maximum(1 + _lift(apart) * (rule.second - 1) + _lift(along) * first, 0.0),
        rule.weights,
        rule.pair_weights,
    )


def _positive_part(x: Any) -> Any:
    return np.maximum(x, 0.0) if np.ndim(x) else max(x, 0.0)


def _lift(x: Any) -> Any:
    """A number per configuration, against the nodes' axis."""
    return x[..., None] if np.ndim(x) else x


def _sphere(variance: Any, dimension: Any) -> Any:
    """log E e^s for s of this variance, a coordinate of a point on a sphere: leading order in 1/D.

    v/2 - v^2/(4 D) + ...: the saddle point of the Bessel integral.
    """
    stretch = 4 * variance / dimension
    excess = stretch / (np.sqrt(1 + stretch) + 1)
    return dimension / 2 * (excess - np.log1p(excess / 2))


class _Keys(NamedTuple):
    """Corrections for keys of fixed norm."""

    dimension: Any
    share: Any
    curvature: Any

    def covariance(self, theta: Any, psi: Any) -> Any:
        """The logit covariance at which Gaussian keys have these keys' statistics."""
        joint = _sphere(2 * (theta + psi), self.dimension) - 2 * _sphere(theta, self.dimension)
        return psi + self.share * (joint - psi)


_STIFFNESS_LEAST = 1e-12  # stands for 0: Gaussian keys
_RELATIVE_STEP = 0.02
_THETA_LEAST, _THETA_LARGEST = 1e-4, 30.0  # corrections vanish below; statistics end soon above


def _keys(rows: SquareRows, theta: Any, dimension: Any) -> _Keys:
    """The share and the curvature of rows, from derivatives of row moments in theta (shape (...,)).

    The curvature is theta sum_l E d^2 (D^2)_ll / ds_l^2. Written in power sums S_m = sum a^m, its
    S_2 S_3 and S_2 S_4 are those of dP_3/dtheta and dP_4/dtheta, which leaves P_5: the least value
    that P_2, P_3 and P_4 allow stands for it.
    """
    theta = np.minimum(theta, _THETA_LARGEST)
    inside = np.maximum(theta, _THETA_LEAST)
    h = _RELATIVE_STEP
    around = rows.single(np.stack([inside * (1 - h), inside, inside * (1 + h)]))
    moments = np.stack([around.sum_square, around.sum_cube, around.sum_fourth])
    p2, p3, p4 = moments[:, 1]
    slope2, slope3, slope4 = (moments[:, 2] - moments[:, 0]) / (2 * h * inside)
    share = 1 - (12 * slope3 - 6 * slope4) / (7 * np.maximum(slope2, 1e-300))
    # a_j-weighted moments of a_j are 1, P2, P3, ...: their Hankel determinant is not negative.
    p5 = p3**2 + (p4 - p2 * p3) ** 2 / np.maximum(p3 - p2**2, 1e-300)
    square_square = np.asarray(around.trace_square)[1] - 1 + 2 * p2
    curvature = (
        4 * p2 - 18 * p3 + 18 * p4 - 10 / 3 * slope3 + 2 * slope4 + 4 * square_square - 8 * p5
    )
    return _Keys(_lift(dimension), _lift(share), theta * curvature)


def attention_statistics(
    logit_scale: Array,
    correlation: Array,
    seq_len: int,
    d_model: Array,
    d_head: Array,
    norm_spread: Array = 0.0,
) -> AttentionStatistics:
    """Statistics of rows whose logits have variance (1 - correlation) * logit_scale.

    Args:
        logit_scale: Theta = d_model^2 query key v^2, shape (...,).
        correlation: of the tokens, shape (...,).
        seq_len: keys per row.
        d_model, d_head: widths that make the queries' norms fluctuate.
        norm_spread: Var|x|^2 / E^2|x|^2 of a token; 0 after a normalisation.
    """
    scalar = type(logit_scale) is float
    deficit = _positive_part(1 / d_model - norm_spread / 2)
    r = np.asarray(correlation, dtype=float)[..., None]
    theta = (1 - r) * np.asarray(logit_scale, dtype=float)[..., None]
    norms = _norms(correlation, d_model, d_head, norm_spread, deficit)
    plus, minus = (1 + r) / 2 * norms.total, (1 - r) / 2 * norms.difference
    row_theta, pair_theta, psi = theta * norms.row, theta * (plus + minus), theta * (plus - minus)
    rows = _rows(seq_len)
    # Fourth cumulant -6/(D+2) of a coordinate on a sphere in D dimensions.
    dimension = 1 / (deficit * (1 - correlation) ** 2 + _STIFFNESS_LEAST) + 2
    keys = _keys(rows, theta[..., 0], dimension)
    seen = keys.covariance(
        np.concatenate([row_theta, pair_theta, pair_theta], -1),
        np.concatenate([row_theta, pair_theta, psi], -1),
    )
    single_count, pair_count = row_theta.shape[-1], psi.shape[-1]
    single = rows.single(seen[..., :single_count])
    seen_theta, seen_psi = seen[..., single_count:-pair_count], seen[..., -pair_count:]
    cosine = np.divide(seen_psi, seen_theta, out=np.ones_like(psi), where=seen_theta > 0)
    pair = rows.pair(seen_theta, np.minimum(np.maximum(cosine, -1.0), 1.0))
    # Averages over the norms: of each statistic, and of each times its logit (co)variance's factor.
    row = _averages(single, norms.row_weights, norms.row)
    both = _averages(pair, norms.pair_weights, psi)
    inside = np.minimum(theta[..., 0], _THETA_LARGEST)
    values = {
        "logit_scale": logit_scale,
        "norm_deficit": deficit,
        "row_square": row["sum_square"],
        "row_cube": row["sum_cube"],
        "row_fourth": row["sum_fourth"],
        "row_vacancy": row["trace_square"],
        "row_square_slope": row["sum_square_slope"],
        "row_tilt": row["mean_logit_square"],
        "row_logit_square": row["weighted_logit_square"],
        "row_skewness": inside * (1 - 3 * row["sum_square"] + 2 * row["sum_cube"]),
        "row_dropout_cross": inside
        * (2 * row["sum_square_"] - 5 * row["sum_cube_"] + 3 * row["sum_fourth_"]),
        "jacobian_square": row["jacobian_square"],
        "jacobian_square_logit": row["jacobian_square_"],
        "jacobian_curvature": keys.curvature,
        "jacobian_radial": row["radial_square"],
        "jacobian_radial_logit": row["radial_square_"],
        "overlap": both["overlap"],
        "overlap_slope": both["overlap_slope"],
        "jacobian_overlap": both["jacobian_overlap"],
        "jacobian_overlap_logit": both["jacobian_overlap_"],
        "radial_overlap": both["radial_overlap"],
        "radial_overlap_logit": both["radial_overlap_"],
    }
    if scalar:
        values = {name: float(value) for name, value in values.items()}
    return AttentionStatistics(
        values,
        (1 - correlation) * logit_scale,
        row["entropy"],
        bool(np.all(single.valid) and np.all(pair.valid)),
    )


def _averages(statistics: Any, weights: np.ndarray, factor: np.ndarray) -> dict[str, Any]:
    """Weighted sums over the last axis; a trailing underscore marks those times `factor`."""
    names = statistics._fields[:-1]
    stacked = np.array(statistics[:-1])
    plain = (stacked * weights).sum(-1)
    times = (stacked * (weights * factor)).sum(-1)
    return dict(zip(names, plain, strict=True)) | {
        f"{name}_": value for name, value in zip(names, times, strict=True)
    }
