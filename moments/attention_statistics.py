"""Softmax statistics of one attention layer with tokens alike, averaged over the queries' norms.

A row's logits are w.x_j with w = W_k^T W_q x_i, and |w|^2 fluctuates: as a chi-square over d_head
(the query's entries) and over d_model (the key weights), and with |x_i|^2 itself. It is replaced by
a gamma variable with the same relative variance 2/nu,
1/nu = 1/d_head + 1/d_model + Var|x|^2 / (2 E^2|x|^2), and the average by a Gauss rule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


def _norm_nodes(freedom: Any) -> tuple[np.ndarray, np.ndarray]:
    """Gauss nodes and weights of chi-square(freedom)/freedom, along a new last axis."""
    from .softmax import chi_square_rule

    if np.ndim(freedom) == 0:
        return chi_square_rule(float(freedom))
    flat = [chi_square_rule(float(nu), 5) for nu in np.ravel(freedom)]
    shape = (*np.shape(freedom), -1)
    return (
        np.array([rule.nodes for rule in flat]).reshape(shape),
        np.array([rule.weights for rule in flat]).reshape(shape),
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
    scalar = type(logit_scale) is float
    freedom = 1 / (1 / d_head + 1 / d_model + norm_spread / 2)
    nodes, weights = _norm_nodes(freedom)
    r = np.asarray(correlation, dtype=float)[..., None]
    theta = (1 - r) * np.asarray(logit_scale, dtype=float)[..., None]
    rows = _rows(seq_len)
    single = rows.single(theta * nodes)

    count = nodes.shape[-1]
    first = np.repeat(np.arange(count), count)
    second = np.tile(np.arange(count), count)
    a, b = nodes[..., first], nodes[..., second]
    # w_i = common + own part: rows i and k share the common part of the norms' fluctuation
    pair_theta = theta * ((1 + r) * a + (1 - r) * b) / 2
    psi = theta * ((1 + r) * a - (1 - r) * b) / 2
    row_correlation = ((1 + r) * a - (1 - r) * b) / ((1 + r) * a + (1 - r) * b)
    pair = rows.pair(pair_theta, row_correlation)
    pair_weights = weights[..., first] * weights[..., second]

    # Averages over the norms: of each statistic, and of each times its logit (co)variance's factor.
    row = _averages(single, weights, nodes)
    both = _averages(pair, pair_weights, psi)
    values = {
        "logit_scale": logit_scale,
        "row_square": row["sum_square"],
        "row_vacancy": row["trace_square"],
        "row_square_slope": row["sum_square_slope"],
        "row_tilt": row["mean_logit_square"],
        "row_logit_square": row["weighted_logit_square"],
        "row_dropout_cross": theta[..., 0]
        * (2 * row["sum_square_"] - 5 * row["sum_cube_"] + 3 * row["sum_fourth_"]),
        "jacobian_square": row["jacobian_square"],
        "jacobian_square_logit": row["jacobian_square_"],
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
