"""Noci et al.'s query and value gradients under uniform attention, and what balances them.

Single head with d_k = d_v = d and query, key and value weights of variance 1/d. The norms are the
squared Frobenius norms of the output's Jacobian in a weight matrix: the squared gradient norm for
an incoming gradient of unit variance, uncorrelated between tokens.
"""

from __future__ import annotations

from typing import Any

from ..law import ComponentLaws, Law, Source
from .references import NOCI

_UNIFORM = "uniform attention: logit variance small, r well away from 1 for the ratio to matter"


def _value_norm(m: Any, d_model: Any, seq_len: Any, x_variance: Any, x_correlation: Any) -> Any:
    return x_variance * d_model**2 * (1 + x_correlation * (seq_len - 1))


def _query_norm(m: Any, d_model: Any, seq_len: Any, x_variance: Any, x_correlation: Any) -> Any:
    return (
        x_variance**3
        * (seq_len - 1)
        / seq_len
        * (1 - x_correlation) ** 2
        * d_model
        * (seq_len + d_model)
    )


UNIFORM_ATTENTION_GRADIENTS = ComponentLaws(
    "uniform_attention_gradients",
    "Query and value gradients of one head under uniform attention",
    {
        "value_gradient": Law(
            _value_norm, Source(NOCI, "Theorem 3.2, values"), "asymptotic", note=_UNIFORM
        ),
        "query_gradient": Law(
            _query_norm, Source(NOCI, "Theorem 3.2, queries"), "asymptotic", note=_UNIFORM
        ),
        "inverse_temperature_square": Law(
            lambda m, d_model, seq_len, x_variance, x_correlation: (
                _value_norm(m, d_model, seq_len, x_variance, x_correlation)
                / _query_norm(m, d_model, seq_len, x_variance, x_correlation)
            ),
            Source(NOCI, "Appendix C.3: the factor on the logits that makes both norms equal"),
            "asymptotic",
            note=_UNIFORM,
        ),
    },
)
