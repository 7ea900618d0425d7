"""Softmax over L logits of variance v and pair correlation r, as published.

The refined theory replaces these log-normal forms by exact statistics
(see `moments.transfer.attention.softmax`).
"""

from __future__ import annotations

from typing import Any

from .law import ComponentLaws, Law
from .references import kedia


def _published_variance(m: Any, seq_len: Any, v: Any, r: Any) -> Any:
    own = v * (1 - r)
    finite = own * seq_len / (seq_len - 1)
    return m.expm1(finite) * m.exp(2 * finite) / ((seq_len - 1) * m.exp(own) + 1) ** 2


def _simplified_variance(m: Any, seq_len: Any, v: Any, r: Any) -> Any:
    return m.expm1((1 - r) * v) / seq_len**2


SOFTMAX = ComponentLaws(
    "softmax",
    "Softmax over L logits",
    {"mean": Law(lambda m, seq_len: 1 / seq_len, kedia("A.7 and Table 15"))},
    published={
        "variance": Law(
            lambda m, seq_len, x_variance, x_correlation: _published_variance(
                m, seq_len, x_variance, x_correlation
            ),
            kedia("A.7 and Table 16"),
            "asymptotic",
            note="log-normal denominator; 6 % high at logit variance 1, L = 300",
        ),
        "grad_variance": Law(
            lambda m, seq_len, x_variance, x_correlation, grad_variance: (
                (_published_variance(m, seq_len, x_variance, x_correlation) + 1 / seq_len**2)
                * grad_variance
            ),
            kedia("A.7 and Table 17"),
            "asymptotic",
            note="large L, gradients uncorrelated; correlated ones need a factor 1 - r_g",
        ),
    },
    simplified={
        "variance": Law(
            lambda m, seq_len, x_variance, x_correlation: _simplified_variance(
                m, seq_len, x_variance, x_correlation
            ),
            kedia("A.7, Table 1"),
            "asymptotic",
            note="large L",
        ),
        "grad_variance": Law(
            lambda m, seq_len, x_variance, x_correlation, grad_variance: (
                (_simplified_variance(m, seq_len, x_variance, x_correlation) + 1 / seq_len**2)
                * grad_variance
            ),
            kedia("A.7, Table 1"),
            "asymptotic",
            note="large L, gradients uncorrelated",
        ),
    },
)
