"""Softmax statistics of one attention layer with tokens alike, averaged over the tokens' norms.

A row's logits are w.x_j with w = W_k^T W_q x_i. Two things at finite width:

Queries. |w|^2 fluctuates: as a chi-square over d_head (the query's entries) and over d_model (the
key weights), and with |x_i|^2. It is replaced by a gamma variable of the same relative variance
2/nu, and the average by a Gauss rule. Two rows fluctuate together: with w, w' = sqrt((1+r)/2) p +-
sqrt((1-r)/2) q, what enters are |p|^2 and |q|^2.

Keys. Given w, logits of Gaussian tokens are Gaussian; what tokens of fixed norm change is derived
in `softmax.fixed_norms`, here for queries and keys that share the same fraction r.

See docs/theory/softmax.md, Queries of finite width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...engine.state import Array

if TYPE_CHECKING:
    from .kernels.exact_rows import AlikeRows


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
def _rows(seq_len: int) -> AlikeRows:
    from .kernels.exact_rows import AlikeRows

    return AlikeRows(seq_len)


class _Rule(NamedTuple):
    """Gauss nodes of one chi-square over its mean, and of two independent ones."""

    nodes: np.ndarray
    weights: np.ndarray
    first: np.ndarray
    second: np.ndarray
    pair_weights: np.ndarray


@functools.lru_cache(maxsize=1024)
def _rule(variance: float, count: int = 0) -> _Rule:
    """The default rule of that relative variance; `count` nodes at least, those added of weight
    0."""
    from .softmax import chi_square_rule

    nodes, weights = chi_square_rule(2 / variance if variance else np.inf)
    added = max(count - nodes.size, 0)
    nodes, weights = np.append(nodes, np.ones(added)), np.append(weights, np.zeros(added))
    count = nodes.size
    return _Rule(
        nodes,
        weights,
        np.repeat(nodes, count),
        np.tile(nodes, count),
        np.outer(weights, weights).ravel(),
    )


def _rules(variance: Any) -> _Rule:
    """The rule, along a new last axis where every configuration has one of its own: the one that
    it has alone."""
    if np.ndim(variance) == 0:
        return _rule(float(variance))
    distinct, where = np.unique(variance, return_inverse=True)
    if distinct.size == 1:
        return _rule(float(distinct[0]))
    count = max(_rule(v).nodes.size for v in distinct.tolist())
    rules = zip(*(_rule(v, count) for v in distinct.tolist()), strict=True)
    shape = np.shape(variance)
    return _Rule(*[np.stack(part)[where.ravel()].reshape(*shape, -1) for part in rules])


class _Norms(NamedTuple):
    """Nodes of |w|^2 of one row, and of |p|^2 and |q|^2 of a pair; each over its mean."""

    row: np.ndarray
    total: np.ndarray
    difference: np.ndarray
    row_weights: np.ndarray
    pair_weights: np.ndarray


def _norms(r: Any, d_model: Any, d_head: Any, norm_spread: Any, deficit: Any) -> _Norms:
    """Wishart weights 2/d_head + 2/d, Gaussian overlaps 2/d, less what fixed norms take away.

    What depends on the correlation rescales the nodes about their mean.
    """
    from .softmax.fixed_norms import pair_spreads

    common = 2 / d_head + 2 / d_model + norm_spread
    rule = _rules(common)
    r = _positive_part(r)  # negative correlations are at most 1/(L-1)
    share = deficit / common
    total, difference, along = pair_spreads(r, r, share)
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


STATISTICS = (
    "logit_scale",
    "norm_deficit",
    "row_square",
    "row_cube",
    "row_fourth",
    "row_vacancy",
    "row_square_slope",
    "row_tilt",
    "row_logit_square",
    "row_skewness",
    "row_dropout_cross",
    "jacobian_square",
    "jacobian_square_logit",
    "jacobian_curvature",
    "jacobian_radial",
    "jacobian_radial_logit",
    "overlap",
    "overlap_slope",
    "jacobian_overlap",
    "jacobian_overlap_logit",
    "radial_overlap",
    "radial_overlap_logit",
)


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
    from .softmax.fixed_norms import CORRECTED_MAX, STIFFNESS_LEAST, key_corrections

    scalar = type(logit_scale) is float
    deficit = _positive_part(1 / d_model - norm_spread / 2)
    r = np.asarray(correlation, dtype=float)[..., None]
    theta = (1 - r) * np.asarray(logit_scale, dtype=float)[..., None]
    norms = _norms(correlation, d_model, d_head, norm_spread, deficit)
    plus, minus = (1 + r) / 2 * norms.total, (1 - r) / 2 * norms.difference
    row_theta, pair_theta, psi = theta * norms.row, theta * (plus + minus), theta * (plus - minus)
    rows = _rows(seq_len)
    # Fourth cumulant -6/(D+2) of a coordinate on a sphere in D dimensions.
    dimension = 1 / (deficit * (1 - correlation) ** 2 + STIFFNESS_LEAST) + 2
    keys = key_corrections(rows.single, theta[..., 0], dimension, CORRECTED_MAX)
    keys_of_nodes = keys._replace(dimension=_lift(keys.dimension), share=_lift(keys.share))
    seen = keys_of_nodes.covariance(
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
    inside = np.minimum(theta[..., 0], CORRECTED_MAX)
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


def attention_diagnostics(
    logit_variance: Array, square: Array, entropy: Array, keys: Array
) -> dict[str, Array]:
    """What users ask about attention; distance is E sum_j (a_ij - 1/n)^2 over n keys."""
    return {
        "logit_variance": logit_variance,
        "square_sum": square,
        "distance_to_uniform": square - 1 / keys,
        "entropy": entropy,
    }
