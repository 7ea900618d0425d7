"""Softmax statistics of one attention layer with tokens alike, averaged over the queries' norms.

A row's logits are w.x_j with w = W_k^T W_q x_i, and |w|^2 fluctuates: as a chi-square over d_head
(the query's entries) and over d_model (the key weights), and with |x_i|^2 itself. It is replaced by
a gamma variable with the same relative variance 2/nu,
1/nu = 1/d_head + 1/d_model + Var|x|^2 / (2 E^2|x|^2), and the average by a Gauss rule.
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
    """Gauss nodes of |w|^2/E|w|^2 for one row, and of two independent ones for a pair of rows."""

    nodes: np.ndarray
    weights: np.ndarray
    first: np.ndarray
    second: np.ndarray
    pair_weights: np.ndarray


@functools.lru_cache(maxsize=1024)
def _rule(freedom: float, points: int | None = None) -> _Rule:
    from .softmax import chi_square_rule

    nodes, weights = chi_square_rule(freedom, points)
    count = nodes.size
    return _Rule(
        nodes,
        weights,
        np.repeat(nodes, count),
        np.tile(nodes, count),
        np.outer(weights, weights).ravel(),
    )


def _rules(freedom: Any) -> _Rule:
    """The rule, along a new last axis where every configuration has one of its own."""
    if np.ndim(freedom) == 0:
        return _rule(float(freedom))
    flat = [_rule(float(nu), 5) for nu in np.ravel(freedom)]
    return _Rule(
        *[np.stack(part).reshape(*np.shape(freedom), -1) for part in zip(*flat, strict=True)]
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
    rule = _rules(freedom)
    r = np.asarray(correlation, dtype=float)[..., None]
    theta = (1 - r) * np.asarray(logit_scale, dtype=float)[..., None]
    rows = _rows(seq_len)
    single = rows.single(theta * rule.nodes)
    # Rows i and k with w, w' = sqrt((1+r)/2) p +- sqrt((1-r)/2) q, |p|^2 and |q|^2 independent.
    plus, minus = (1 + r) / 2 * rule.first, (1 - r) / 2 * rule.second
    total = plus + minus
    psi = theta * (plus - minus)
    pair = rows.pair(theta * total, (plus - minus) / total)
    # Averages over the norms: of each statistic, and of each times its logit (co)variance's factor.
    row = _averages(single, rule.weights, rule.nodes)
    both = _averages(pair, rule.pair_weights, psi)
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
