"""Layer normalisation of a stream with token moments (v, c)."""

from __future__ import annotations

from ..law import ComponentLaws, Law
from .references import kedia

LAYERNORM = ComponentLaws(
    "layernorm",
    "Layer normalisation, unit gain and no bias",
    {
        "mean": Law(lambda m: 0, kedia("A.6 and Table 15")),
        "variance": Law(lambda m: 1, kedia("A.6 and Table 16")),
        "hidden_covariance": Law(
            lambda m, d_model: -1 / (d_model - 1), kedia("A.6 and Table 19")
        ),
        "kurtosis": Law(lambda m: 3, kedia("A.6: Gaussian input")),
    },
    published={
        "covariance": Law(
            lambda m, d_model, x_correlation: (1 - 1 / d_model) * x_correlation,
            kedia("A.6 and Table 18"),
            "asymptotic",
            note="large d_model; to O(1/d) the factor is 1 - (1 - r^2)/(2 (d - 1))",
        ),
        "grad_variance": Law(
            lambda m, x_variance, grad_variance: grad_variance / x_variance,
            kedia("A.6 and Table 17"),
            "asymptotic",
            note="large d_model",
        ),
        "grad_covariance": Law(
            lambda m, x_variance, grad_covariance: grad_covariance / x_variance,
            kedia("A.6 and Table 20"),
            "asymptotic",
            note="large d_model",
        ),
    },
    simplified={
        "covariance": Law(
            lambda m, x_correlation: x_correlation,
            kedia("Table 1 and L.1"),
            "asymptotic",
            note="1/d dropped",
        )
    },
)
