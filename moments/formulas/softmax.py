"""Softmax as published, over L logits of variance v and pair correlation r: log-normal forms, which
the refined theory replaces by exact statistics (see `moments.layers.attention.softmax`).
"""

from __future__ import annotations

from typing import Any

from .law import ComponentLaws, Law, Substituted, asymptotic
from .references import kedia


def _published_variance(m: Any, seq_len: Any, x_variance: Any, x_correlation: Any) -> Any:
    unshared = x_variance * (1 - x_correlation)
    finite = unshared * seq_len / (seq_len - 1)
    return m.expm1(finite) * m.exp(2 * finite) / ((seq_len - 1) * m.exp(unshared) + 1) ** 2


def _simplified_variance(m: Any, seq_len: Any, x_variance: Any, x_correlation: Any) -> Any:
    return m.expm1((1 - x_correlation) * x_variance) / seq_len**2


def _gradient(variance: Any) -> Substituted:
    return Substituted(
        lambda m, seq_len, inner, grad_variance: (inner + 1 / seq_len**2) * grad_variance,
        inner=variance,
    )


SOFTMAX = ComponentLaws(
    "softmax",
    "Softmax over L logits",
    {"mean": Law(lambda m, seq_len: 1 / seq_len, kedia("A.7 and Table 15"))},
    published={
        "variance": asymptotic(
            _published_variance,
            kedia("A.7 and Table 16"),
            "log-normal denominator; 6 % high at logit variance 1, L = 300",
        ),
        "grad_variance": asymptotic(
            _gradient(_published_variance),
            kedia("A.7 and Table 17"),
            "large L, gradients uncorrelated; correlated ones need a factor 1 - r_g",
        ),
    },
    simplified={
        "variance": asymptotic(_simplified_variance, kedia("A.7, Table 1"), "large L"),
        "grad_variance": asymptotic(
            _gradient(_simplified_variance),
            kedia("A.7, Table 1"),
            "large L, gradients uncorrelated",
        ),
    },
)
