"""Attention and feed-forward blocks as whole units, as the papers tabulate them.

The "published" rows of the summary tables are what the components give when composed; the
"simplified" rows (Table 2) are approximations of their own and are what that theory propagates.
"""

from __future__ import annotations

from typing import Any

from .activation import relu_moment, relu_slope
from .attention import (
    _BACKWARD_NOTE,
    _FORWARD_NOTE,
    _attention_covariance,
    _attention_variance,
    _value_path_covariance,
    _value_path_variance,
)
from .checks import Interval
from .law import ComponentLaws, Law
from .references import kedia

_UNIFORM = "uniform attention over many correlated tokens; no source term where r or r_g is 0"

_KEPT_CORRELATION = (
    "; as printed: the block's dropout scales the correlated part of the gradient too, where the "
    "components composed (A.3 and A.8) leave a covariance unchanged"
)


def _block_variance(
    m: Any,
    output: Any,
    value: Any,
    d_model: Any,
    seq_len: Any,
    query: Any,
    key: Any,
    drop_prob: Any,
    attention_drop_prob: Any,
    x_variance: Any,
    x_correlation: Any,
) -> Any:
    heads = _attention_variance(
        m, value, d_model, seq_len, query, key, attention_drop_prob, x_variance, x_correlation
    )
    return d_model * output * heads / (1 - drop_prob)


def _block_covariance(
    m: Any,
    output: Any,
    value: Any,
    d_model: Any,
    seq_len: Any,
    query: Any,
    key: Any,
    x_variance: Any,
    x_correlation: Any,
) -> Any:
    heads = _attention_covariance(m, value, d_model, seq_len, query, key, x_variance, x_correlation)
    return d_model * output * heads


def _block_value_path_variance(
    m: Any,
    output: Any,
    value: Any,
    d_model: Any,
    seq_len: Any,
    drop_prob: Any,
    attention_drop_prob: Any,
    grad_variance: Any,
    grad_covariance: Any,
) -> Any:
    gain = d_model**2 * output * value / (1 - drop_prob)
    return gain * _value_path_variance(
        m, seq_len, attention_drop_prob, grad_variance, grad_covariance
    )


ATTENTION_BLOCK = ComponentLaws(
    "attention_block",
    "Attention block: attention, output projection, dropout",
    {
        "mean": Law(lambda m: 0, kedia("B.1 and Table 15")),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19")),
    },
    published={
        "variance": Law(
            _block_variance, kedia("B.1 and Table 16"), "asymptotic", note=_FORWARD_NOTE
        ),
        "covariance": Law(
            _block_covariance, kedia("B.1 and Table 18"), "asymptotic", note=_FORWARD_NOTE
        ),
        "grad_variance": Law(
            _block_value_path_variance,
            kedia("B.1 and Table 17"),
            "asymptotic",
            note=_BACKWARD_NOTE + _KEPT_CORRELATION,
        ),
        "grad_covariance": Law(
            lambda m, output, value, d_model, seq_len, grad_variance, grad_covariance: (
                d_model**2
                * output
                * value
                * _value_path_covariance(m, seq_len, grad_variance, grad_covariance)
            ),
            kedia("B.1 and Table 20"),
            "asymptotic",
            note=_BACKWARD_NOTE + _KEPT_CORRELATION,
        ),
    },
    simplified={
        "variance": Law(
            lambda m, d_model, output, value, drop_prob, x_variance, x_correlation: (
                d_model**2 * output * value * x_variance * x_correlation / (1 - drop_prob)
            ),
            kedia("Table 2"),
            "asymptotic",
            note=_UNIFORM,
            limits={"x_correlation": Interval(0.0, 1.0)},
        ),
        "covariance": Law(
            lambda m, d_model, output, value, x_variance, x_correlation: (
                d_model**2 * output * value * x_variance * x_correlation
            ),
            kedia("Table 2: output correlation 1 - p"),
            "asymptotic",
            note=_UNIFORM,
            limits={"x_correlation": Interval(0.0, 1.0)},
        ),
        "grad_variance": Law(
            lambda m, d_model, output, value, drop_prob, grad_covariance: (
                d_model**2 * output * value * grad_covariance / (1 - drop_prob)
            ),
            kedia("Table 2"),
            "asymptotic",
            note=_UNIFORM,
        ),
        "grad_covariance": Law(
            lambda m, d_model, output, value, grad_covariance: (
                d_model**2 * output * value * grad_covariance
            ),
            kedia("Table 2: gradient correlation 1 - p"),
            "asymptotic",
            note=_UNIFORM,
        ),
    },
)


def _ffn_gain(d_model: Any, d_ff: Any, ffn_in: Any, ffn_out: Any) -> Any:
    return d_model * d_ff * ffn_in * ffn_out


def _polynomial_correlation(m: Any, r: Any) -> Any:
    return 1 / m.pi + r / 2 + (m.ratio(1, 2) - 1 / m.pi) * r**2


def _ffn_value_path_covariance(
    m: Any,
    d_model: Any,
    d_ff: Any,
    ffn_in: Any,
    ffn_out: Any,
    x_variance: Any,
    x_other_variance: Any,
    x_correlation: Any,
    grad_covariance: Any,
) -> Any:
    slope = relu_slope(m, x_variance, x_other_variance, x_correlation)
    return _ffn_gain(d_model, d_ff, ffn_in, ffn_out) * slope * grad_covariance


FFN_BLOCK = ComponentLaws(
    "ffn_block",
    "Feed-forward block: linear, ReLU, linear, dropout",
    {
        "mean": Law(lambda m: 0, kedia("B.2 and Table 15")),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19")),
        "variance": Law(
            lambda m, d_model, d_ff, ffn_in, ffn_out, drop_prob, x_variance: (
                _ffn_gain(d_model, d_ff, ffn_in, ffn_out) / 2 * x_variance / (1 - drop_prob)
            ),
            kedia("B.2 and Table 16, at d_ff = 4 d"),
        ),
        "covariance": Law(
            lambda m, d_model, d_ff, ffn_in, ffn_out, x_variance, x_other_variance, x_correlation: (
                _ffn_gain(d_model, d_ff, ffn_in, ffn_out)
                * relu_moment(m, x_variance, x_other_variance, x_correlation)
            ),
            kedia("B.2 and Table 18, at d_ff = 4 d"),
            note="the table prints 4 d for 4 d^2",
        ),
        "grad_variance": Law(
            lambda m, d_model, d_ff, ffn_in, ffn_out, drop_prob, grad_variance: (
                _ffn_gain(d_model, d_ff, ffn_in, ffn_out) / 2 * grad_variance / (1 - drop_prob)
            ),
            kedia("B.2 and Table 17, at d_ff = 4 d"),
        ),
        "grad_covariance": Law(
            _ffn_value_path_covariance,
            kedia("B.2 and Table 20, at d_ff = 4 d"),
        ),
    },
    simplified={
        "covariance": Law(
            lambda m, d_model, d_ff, ffn_in, ffn_out, x_variance, x_correlation: (
                _ffn_gain(d_model, d_ff, ffn_in, ffn_out)
                / 2
                * x_variance
                * _polynomial_correlation(m, x_correlation)
            ),
            kedia("Table 2: the polynomial times 1 - p"),
            "fitted",
            note="the paper's polynomial approximation of the exact law on r in [0, 1]",
            limits={"x_correlation": Interval(0.0, 1.0)},
        ),
    },
)
