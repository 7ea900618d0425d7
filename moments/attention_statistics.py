"""Softmax statistics of one attention layer with tokens alike, averaged over the queries' norms.

A row's logits are w.x_j with w = W_k^T W_q x_i, and |w|^2 fluctuates: as a chi-square over d_head
(the query's entries) and over d_model (the key weights), and with |x_i|^2 itself. It is replaced by
a gamma variable with the same relative variance 2/nu,
1/nu = 1/d_head + 1/d_model + Var|x|^2 / (2 E^2|x|^2), and the average by a Gauss rule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .state import Array


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
def _rows(seq_len: int) -> Any:
    from .softmax import square_rows

    return square_rows(seq_len)


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
    from .softmax import gamma_rule

    scalar = type(logit_scale) is float
    freedom = 1 / (1 / d_head + 1 / d_model + norm_spread / 2)
    nodes, weights = gamma_rule(freedom)
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

    def over_rows(values: Array) -> Array:
        total = (values * weights).sum(-1)
        return float(total) if scalar else total

    def over_pairs(values: Array) -> Array:
        total = (values * pair_weights).sum(-1)
        return float(total) if scalar else total

    scaled = theta * nodes
    values = {
        "logit_scale": logit_scale,
        "row_square": over_rows(single.sum_square),
        "row_vacancy": over_rows(single.trace_square),
        "row_square_slope": over_rows(single.sum_square_slope),
        "row_tilt": over_rows(single.mean_logit_square),
        "row_logit_square": over_rows(single.weighted_logit_square),
        "row_dropout_cross": over_rows(
            scaled * (2 * single.sum_square - 5 * single.sum_cube + 3 * single.sum_fourth)
        ),
        "jacobian_square": over_rows(single.jacobian_square),
        "jacobian_square_logit": over_rows(nodes * single.jacobian_square),
        "jacobian_radial": over_rows(single.radial_square),
        "jacobian_radial_logit": over_rows(nodes * single.radial_square),
        "overlap": over_pairs(pair.overlap),
        "overlap_slope": over_pairs(pair.overlap_slope),
        "jacobian_overlap": over_pairs(pair.jacobian_overlap),
        "jacobian_overlap_logit": over_pairs(psi * pair.jacobian_overlap),
        "radial_overlap": over_pairs(pair.radial_overlap),
        "radial_overlap_logit": over_pairs(psi * pair.radial_overlap),
    }
    return AttentionStatistics(
        values,
        (1 - correlation) * logit_scale,
        over_rows(single.entropy),
        np.all(single.valid) and np.all(pair.valid),
    )
