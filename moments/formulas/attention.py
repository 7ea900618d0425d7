"""Scaled dot-product attention: the published laws here, the refined ones in `attention_refined`.

As published: log-normal weights, and of the gradient only the value path.

theta_0 = d v^2 sigma_q^2 sigma_k^2, so that the logits of one row have variance (1 - r) d theta_0.
The functions' parameter names are the laws' symbols.
"""

from __future__ import annotations

from typing import Any

from .attention_refined import AVERAGE, WITH_VALUE
from .law import ComponentLaws, Law
from .references import kedia

_FORWARD_NOTE = (
    "large L and d; log-normal attention weights; dropout of the common part left out "
    "(-2.9 % at L = 50, r = .9, p = .6)"
)
_BACKWARD_NOTE = (
    "value path under uniform attention only: the query and key paths left out cost a factor of "
    "3 to 10 in deep Post-LN models, more under a causal mask"
)


def _theta(d_model: Any, query: Any, key: Any, x_variance: Any) -> Any:
    return d_model * x_variance**2 * query * key


def _average_variance(
    m: Any,
    d_model: Any,
    seq_len: Any,
    query: Any,
    key: Any,
    drop_prob: Any,
    x_variance: Any,
    x_correlation: Any,
) -> Any:
    """Variance of sum_j a_ij x_j."""
    theta, unshared = _theta(d_model, query, key, x_variance), 1 - x_correlation
    weights = m.exp(unshared * d_model * theta) / (1 - drop_prob)
    scattered = unshared**2 * (seq_len - 1) * theta
    return x_variance * (
        (scattered + weights * (4 * unshared**2 * theta + unshared)) / seq_len + x_correlation
    )


def _average_covariance(
    m: Any,
    d_model: Any,
    seq_len: Any,
    query: Any,
    key: Any,
    x_variance: Any,
    x_correlation: Any,
) -> Any:
    """Covariance of sum_j a_ij x_j and sum_j a_kj x_j."""
    theta, unshared = _theta(d_model, query, key, x_variance), 1 - x_correlation
    return x_variance * (x_correlation + (2 * unshared**2 * theta + unshared) / seq_len)


def _returned_variance(
    m: Any, seq_len: Any, drop_prob: Any, grad_variance: Any, grad_covariance: Any
) -> Any:
    """Variance of sum_i a_ij g_i."""
    kept = 1 - drop_prob
    return (grad_variance + (seq_len - 1) * grad_covariance * kept) / (seq_len * kept)


def _returned_covariance(m: Any, seq_len: Any, grad_variance: Any, grad_covariance: Any) -> Any:
    return (grad_variance + (seq_len - 1) * grad_covariance) / seq_len


ATTENTION_WITHOUT_VALUE = ComponentLaws(
    "attention_without_value",
    "Single-head attention without the value projection",
    {
        "mean": Law(lambda m: 0, kedia("Table 15, SHA")),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19, SHA")),
    },
    refined=AVERAGE,
    published={
        "variance": Law(
            _average_variance,
            kedia("A.8 and Table 16, SHA"),
            "asymptotic",
            note=_FORWARD_NOTE + "; the table's factor d_in is a misprint",
        ),
        "covariance": Law(
            _average_covariance,
            kedia("A.8 and Table 18, SHA"),
            "asymptotic",
            note=_FORWARD_NOTE + "; the table's factor d_in is a misprint",
        ),
        "grad_variance": Law(
            _returned_variance,
            kedia("A.8 and Table 17, SHA"),
            "asymptotic",
            note=_BACKWARD_NOTE + "; the table's d_in and (1-p)^2 are misprints",
        ),
        "grad_covariance": Law(
            _returned_covariance,
            kedia("A.8 and Table 20, SHA"),
            "asymptotic",
            note=_BACKWARD_NOTE + "; the table's factor d_in is a misprint",
        ),
    },
    simplified={
        "variance": Law(
            lambda m, x_variance, x_correlation: x_correlation * x_variance,
            kedia("Table 1, SHA"),
            "asymptotic",
            note="uniform attention over many tokens",
        ),
        "covariance": Law(
            lambda m, x_variance, x_correlation: x_correlation * x_variance,
            kedia("Table 1, SHA: output correlation 1"),
            "asymptotic",
            note="uniform attention over many tokens",
        ),
        "grad_variance": Law(
            lambda m, grad_covariance: grad_covariance,
            kedia("Table 1, SHA"),
            "asymptotic",
            note="uniform attention over many tokens",
        ),
        "grad_covariance": Law(
            lambda m, grad_covariance: grad_covariance,
            kedia("Table 1, SHA: gradient correlation 1"),
            "asymptotic",
            note="uniform attention over many tokens",
        ),
    },
)


def _attention_variance(
    m: Any,
    value: Any,
    d_model: Any,
    seq_len: Any,
    query: Any,
    key: Any,
    drop_prob: Any,
    x_variance: Any,
    x_correlation: Any,
) -> Any:
    return (
        d_model
        * value
        * _average_variance(m, d_model, seq_len, query, key, drop_prob, x_variance, x_correlation)
    )


def _attention_covariance(
    m: Any,
    value: Any,
    d_model: Any,
    seq_len: Any,
    query: Any,
    key: Any,
    x_variance: Any,
    x_correlation: Any,
) -> Any:
    average = _average_covariance(m, d_model, seq_len, query, key, x_variance, x_correlation)
    return d_model * value * average


# Heads share the input and have independent weights: each carries the moments of one head, and
# the gradients they send back add up, so fan_out is the width of all values together.
ATTENTION = ComponentLaws(
    "attention",
    "Multi-head scaled dot-product attention with value projection, heads concatenated",
    {
        "mean": Law(lambda m: 0, kedia("A.8 and Table 15")),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19")),
        "kurtosis": Law(lambda m: 3, kedia("A.8: Gaussian value weights")),
    },
    refined=WITH_VALUE,
    published={
        "variance": Law(_attention_variance, kedia("A.8"), "asymptotic", note=_FORWARD_NOTE),
        "covariance": Law(_attention_covariance, kedia("A.8"), "asymptotic", note=_FORWARD_NOTE),
        "grad_variance": Law(
            lambda m, value, fan_out, seq_len, drop_prob, grad_variance, grad_covariance: (
                fan_out
                * value
                * _returned_variance(m, seq_len, drop_prob, grad_variance, grad_covariance)
            ),
            kedia("A.8"),
            "asymptotic",
            note=_BACKWARD_NOTE,
        ),
        "grad_covariance": Law(
            lambda m, value, fan_out, seq_len, grad_variance, grad_covariance: (
                fan_out * value * _returned_covariance(m, seq_len, grad_variance, grad_covariance)
            ),
            kedia("A.8"),
            "asymptotic",
            note=_BACKWARD_NOTE,
        ),
    },
)
