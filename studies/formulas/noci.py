"""Noci et al.'s stacks of uniform attention: growth, correlation, and Jacobians at given tokens.

The heads have width d and query, key and value weights of variance 1/d.
"""

from __future__ import annotations

from typing import Any

from moments.formulas.law import ComponentLaws, Law, Source, Substituted, asymptotic, derived
from moments.formulas.references import NOCI


def _common_share(m: Any, seq_len: Any, x_correlation: Any) -> Any:
    """Squared norm of the mean token over that of a token."""
    return (1 + (seq_len - 1) * x_correlation) / seq_len


def _norm_after(m: Any, attention: Any, ffn: Any, x_variance: Any, share: Any) -> Any:
    """Variance once uniform attention has multiplied inner products by a factor."""
    return x_variance * ffn * (1 + (attention - 1) * share)


def _correlation_after(m: Any, attention: Any, share: Any, seq_len: Any) -> Any:
    grown = attention * share / (1 + (attention - 1) * share)
    return (seq_len * grown - 1) / (seq_len - 1)


def _after_layers(formula: Any) -> Substituted:
    return Substituted(
        formula,
        attention=lambda m, attention_branch_square, layers: (
            (1 + attention_branch_square) ** layers
        ),
        ffn=lambda m, ffn_branch_square, layers: (1 + ffn_branch_square) ** layers,
        share=_common_share,
    )


def _after_many(formula: Any) -> Substituted:
    return Substituted(
        formula,
        attention=lambda m, attention_depth_constant: m.exp(attention_depth_constant),
        ffn=lambda m, ffn_depth_constant: m.exp(ffn_depth_constant),
        share=_common_share,
    )


_LINEAR = "uniform attention and identity activation"

UNIFORM_ATTENTION_STACK = ComponentLaws(
    "uniform_attention_stack",
    "Linear stack of uniform attention and feed-forward blocks without normalisation",
    {
        "inner_product_growth": Law(
            _after_layers(lambda m, attention, ffn: ffn * attention),
            Source(NOCI, "Lemma 3.2, equation 10"),
            note=_LINEAR,
        ),
        "inner_product_limit": asymptotic(
            _after_many(lambda m, attention, ffn: attention * ffn),
            Source(NOCI, "Lemma 3.2, equation 11"),
            _LINEAR + "; many layers",
        ),
        "variance": Law(
            _after_layers(_norm_after),
            Source(NOCI, "Lemma 3.3, equation 12, for tokens alike; its sum is geometric"),
            note=_LINEAR,
        ),
        "variance_limit": asymptotic(
            _after_many(_norm_after),
            Source(NOCI, "Lemma 3.3, equation 13, for tokens alike"),
            _LINEAR + "; many layers",
        ),
        "correlation": Law(
            _after_layers(_correlation_after),
            Source(NOCI, "A.4, from Lemmas 3.2 and 3.3"),
            note=_LINEAR + "; tokens of one norm",
        ),
        "correlation_limit": asymptotic(
            _after_many(_correlation_after),
            Source(NOCI, "Theorem 3.3, equation 15"),
            _LINEAR + "; many layers",
        ),
    },
)


def _value_part(m: Any, value: Any, d_model: Any, fan_out: Any) -> Any:
    return d_model * fan_out * value


def _logit_unit(m: Any, query: Any, key: Any, value: Any, fan_out: Any) -> Any:
    return query * key * value * fan_out


# dS_i/dx_a = (1/n) W_V^T + (1/(n sqrt(d_k))) W_V^T [delta_ia G W^T + X^T L e_a x_i^T W] with
# G = X^T L X and W = W_Q W_K^T, whose entries have variance d_k s_q s_k. The three squares and the
# product of the two logit terms survive the average over weights.
UNIFORM_ATTENTION_JACOBIAN = ComponentLaws(
    "uniform_attention_jacobian",
    "Squared norms of one head's Jacobians under uniform attention, at given tokens",
    {
        "query_gradient": Law(
            lambda m, key, value, fan_out, seq_len, gram_square, token_square: (
                key * value * fan_out / seq_len**2 * token_square * gram_square
            ),
            Source(NOCI, "Lemma 3.1, equation 7"),
            note="uniform attention",
        ),
        "input_gradient": Law(
            lambda m, query, key, value, d_model, fan_out, seq_len, gram_square, gram_trace, token_square: (  # noqa: E501
                _value_part(m, value, d_model, fan_out)
                + _logit_unit(m, query, key, value, fan_out)
                * (
                    d_model * gram_square / seq_len
                    + (d_model * token_square * gram_trace + 2 * gram_square) / seq_len**2
                )
            ),
            derived("Lemma 3.1's three terms, with the commutation matrix kept in equation 35"),
            note="uniform attention",
        ),
        "input_gradient_printed": Law(
            lambda m, query, key, value, d_model, fan_out, seq_len, gram_square: (
                8 * _logit_unit(m, query, key, value, fan_out) * d_model * gram_square / seq_len
                + 2 * _value_part(m, value, d_model, fan_out)
            ),
            Source(NOCI, "Lemma 3.1, equation 8"),
            note="printed as an upper bound, which it is not: equation 35 drops the commutation",
        ),
    },
)
