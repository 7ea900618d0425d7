"""Scaled dot-product attention as published: log-normal weights, gradients through the value path
only. The refined theory averages exact rows instead, without closed formulas; see
`moments.layers.attention`.

theta_0 = d v^2 sigma_q^2 sigma_k^2, so that the logits of one row have variance (1 - r) d theta_0.
The functions' parameter names are the laws' symbols.
"""

from __future__ import annotations

from typing import Any

from .law import ComponentLaws, Law, Source, Substituted, asymptotic
from .references import NOCI, kedia

# --- as published ---------------------------------------------------------------------------------

FORWARD_NOTE = (
    "large L and d; log-normal attention weights; dropout of the common part left out "
    "(-2.9 % at L = 50, r = .9, p = .6)"
)
BACKWARD_NOTE = (
    "value path under uniform attention only: the query and key paths left out cost a factor of "
    "3 to 10 in deep Post-LN models, more under a causal mask"
)


def _theta(m: Any, d_model: Any, query: Any, key: Any, x_variance: Any) -> Any:
    return d_model * x_variance**2 * query * key


_AS_PRINTED: dict[str, Any] = {"v": "x_variance", "r": "x_correlation", "theta": _theta}


def _average_variance(
    m: Any, d_model: Any, seq_len: Any, theta: Any, drop_prob: Any, v: Any, r: Any
) -> Any:
    """Variance of sum_j a_ij x_j."""
    weights = m.exp((1 - r) * d_model * theta) / (1 - drop_prob)
    scattered = (1 - r) ** 2 * (seq_len - 1) * theta
    return v * ((scattered + weights * (4 * (1 - r) ** 2 * theta + (1 - r))) / seq_len + r)


def _average_covariance(m: Any, seq_len: Any, theta: Any, v: Any, r: Any) -> Any:
    """Covariance of sum_j a_ij x_j and sum_j a_kj x_j."""
    return v * (r + (2 * (1 - r) ** 2 * theta + (1 - r)) / seq_len)


_AVERAGE_VARIANCE = Substituted(_average_variance, **_AS_PRINTED)
_AVERAGE_COVARIANCE = Substituted(_average_covariance, **_AS_PRINTED)


def value_path_variance(
    m: Any, seq_len: Any, drop_prob: Any, grad_variance: Any, grad_covariance: Any
) -> Any:
    """Variance of sum_i a_ij g_i."""
    kept = 1 - drop_prob
    return (grad_variance + (seq_len - 1) * grad_covariance * kept) / (seq_len * kept)


def value_path_covariance(m: Any, seq_len: Any, grad_variance: Any, grad_covariance: Any) -> Any:
    return (grad_variance + (seq_len - 1) * grad_covariance) / seq_len


def _common(m: Any, x_variance: Any, x_correlation: Any) -> Any:
    """The covariance of two tokens."""
    return x_correlation * x_variance


def _grad_common(m: Any, grad_covariance: Any) -> Any:
    return grad_covariance


ATTENTION_WITHOUT_VALUE = ComponentLaws(
    "attention_without_value",
    "Single-head attention without the value projection",
    {
        "mean": Law(lambda m: 0, kedia("Table 15, SHA")),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19, SHA")),
    },
    published={
        "variance": asymptotic(
            _AVERAGE_VARIANCE,
            kedia("A.8 and Table 16, SHA"),
            FORWARD_NOTE + "; the table's factor d_in is a misprint",
        ),
        "covariance": asymptotic(
            _AVERAGE_COVARIANCE,
            kedia("A.8 and Table 18, SHA"),
            FORWARD_NOTE + "; the table's factor d_in is a misprint",
        ),
        "grad_variance": asymptotic(
            value_path_variance,
            kedia("A.8 and Table 17, SHA"),
            BACKWARD_NOTE + "; the table's d_in and (1-p)^2 are misprints",
        ),
        "grad_covariance": asymptotic(
            value_path_covariance,
            kedia("A.8 and Table 20, SHA"),
            BACKWARD_NOTE + "; the table's factor d_in is a misprint",
        ),
    },
    simplified={
        quantity: asymptotic(formula, kedia(place), "uniform attention over many tokens")
        for quantity, formula, place in (
            ("variance", _common, "Table 1, SHA"),
            ("covariance", _common, "Table 1, SHA: output correlation 1"),
            ("grad_variance", _grad_common, "Table 1, SHA"),
            ("grad_covariance", _grad_common, "Table 1, SHA: gradient correlation 1"),
        )
    },
)


def _after_value(average: Any) -> Substituted:
    """After the value projection."""
    return Substituted(lambda m, value, d_model, inner: d_model * value * inner, inner=average)


attention_variance = _after_value(_AVERAGE_VARIANCE)
attention_covariance = _after_value(_AVERAGE_COVARIANCE)


def _before_value(at_values: Any) -> Substituted:
    """Gradient before the value projection."""
    return Substituted(lambda m, value, fan_out, inner: fan_out * value * inner, inner=at_values)


# Heads share the input and have independent weights: each has the moments of one head, and their
# gradients add up at the input, so that fan_out is the width of all values together.
ATTENTION = ComponentLaws(
    "attention",
    "Multi-head scaled dot-product attention with value projection, heads concatenated",
    {
        "mean": Law(lambda m: 0, kedia("A.8 and Table 15")),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19")),
        "kurtosis": Law(lambda m: 3, kedia("A.8: Gaussian value weights")),
    },
    published={
        "variance": asymptotic(attention_variance, kedia("A.8"), FORWARD_NOTE),
        "covariance": asymptotic(attention_covariance, kedia("A.8"), FORWARD_NOTE),
        "grad_variance": asymptotic(
            _before_value(value_path_variance), kedia("A.8"), BACKWARD_NOTE
        ),
        "grad_covariance": asymptotic(
            _before_value(value_path_covariance), kedia("A.8"), BACKWARD_NOTE
        ),
    },
)


# --- Noci et al.'s query and value gradients ------------------------------------------------------
# One head of width d and query, key and value weights of variance 1/d. The norms are the squared
# Frobenius norms of the output's Jacobian in a weight matrix: the squared gradient norm for an
# incoming gradient of unit variance, uncorrelated between tokens.

_UNIFORM = "uniform attention: logit variance small, r well away from 1 for the ratio to matter"


def _value_norm(m: Any, d_model: Any, seq_len: Any, x_variance: Any, x_correlation: Any) -> Any:
    return x_variance * d_model**2 * (1 + x_correlation * (seq_len - 1))


def _query_norm(m: Any, d_model: Any, seq_len: Any, x_variance: Any, x_correlation: Any) -> Any:
    unshared = (seq_len - 1) / seq_len * (1 - x_correlation) ** 2
    return x_variance**3 * unshared * d_model * (seq_len + d_model)


UNIFORM_ATTENTION_GRADIENTS = ComponentLaws(
    "uniform_attention_gradients",
    "Query and value gradients of one head under uniform attention",
    {
        "value_gradient": asymptotic(_value_norm, Source(NOCI, "Theorem 3.2, values"), _UNIFORM),
        "query_gradient": asymptotic(_query_norm, Source(NOCI, "Theorem 3.2, queries"), _UNIFORM),
        "inverse_temperature_square": asymptotic(
            Substituted(
                lambda m, of_value, of_query: of_value / of_query,
                of_value=_value_norm,
                of_query=_query_norm,
            ),
            Source(NOCI, "Appendix C.3: the factor on the logits that makes both norms equal"),
            _UNIFORM,
        ),
    },
)
