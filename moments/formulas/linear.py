"""Linear maps, dropout and the identity.

x ~ (mean m, variance v, token covariance c), weights independent with variance s and mean 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .law import ComponentLaws, Law, Substituted, derived, times
from .references import kedia


def _covariance(m: Any, x_variance: Any, x_other_variance: Any, x_correlation: Any) -> Any:
    return x_correlation * m.sqrt(x_variance * x_other_variance)


def _hidden_covariance(m: Any, x_variance: Any, x_hidden_correlation: Any) -> Any:
    return x_hidden_correlation * x_variance


# y_o = sum_i w_oi x_i: features of y are independent given x, so E y y' = d_in s E x x'.
LINEAR = ComponentLaws(
    "linear",
    "Linear layer without bias",
    {
        "mean": Law(lambda m: 0, kedia("Table 15, FFN")),
        "variance": Law(
            lambda m, fan_in, weight_variance, x_variance, x_mean: (
                fan_in * weight_variance * (x_variance + x_mean**2)
            ),
            kedia("A.2 and Table 16, FFN"),
        ),
        "covariance": Law(
            Substituted(
                lambda m, fan_in, weight_variance, inner, x_mean, x_other_mean: (
                    fan_in * weight_variance * (inner + x_mean * x_other_mean)
                ),
                inner=_covariance,
            ),
            kedia("A.2 and Table 18, FFN"),
        ),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19, FFN")),
        "grad_variance": Law(
            lambda m, fan_out, weight_variance, grad_variance: (
                fan_out * weight_variance * grad_variance
            ),
            kedia("A.2 and Table 17, FFN"),
        ),
        "grad_covariance": Law(
            lambda m, fan_out, weight_variance, grad_covariance: (
                fan_out * weight_variance * grad_covariance
            ),
            kedia("A.2 and Table 20, FFN"),
        ),
        "kurtosis": Law(
            lambda m: 3, derived("Gaussian weights: given the input, the output is Gaussian")
        ),
    },
)

# The bias is one draw for all tokens: it adds to variance and covariance alike.
_BIAS = derived("a bias is independent of the weights and common to all tokens")


def _biased(quantity: str) -> Law:
    unbiased = LINEAR.law(quantity).formula
    return Law(
        Substituted(lambda m, inner, bias_variance: inner + bias_variance, inner=unbiased), _BIAS
    )


BIASED_LINEAR = ComponentLaws(
    "biased_linear",
    "Linear layer with a bias of random entries",
    {
        **LINEAR.laws,
        "mean": Law(lambda m: 0, _BIAS),
        "variance": _biased("variance"),
        "covariance": _biased("covariance"),
        "hidden_covariance": Law(lambda m: 0, _BIAS),
        "kurtosis": Law(
            lambda m: 3, derived("Gaussian weights and bias: given the input, a Gaussian output")
        ),
    },
)


# Kept entries are scaled by 1/(1-p); masks of different tokens are independent.
DROPOUT = ComponentLaws(
    "dropout",
    "Dropout with probability p, kept entries scaled by 1/(1-p)",
    {
        "mean": Law(lambda m, x_mean: x_mean, kedia("A.3 and Table 15, Dropout")),
        "variance": Law(
            lambda m, drop_prob, x_variance, x_mean: (
                (x_variance + drop_prob * x_mean**2) / (1 - drop_prob)
            ),
            kedia("A.3 and Table 16, Dropout"),
        ),
        "covariance": Law(_covariance, kedia("A.3 and Table 18, Dropout")),
        "hidden_covariance": Law(_hidden_covariance, kedia("A.3 and Table 19, Dropout")),
        "grad_variance": Law(
            lambda m, drop_prob, grad_variance: grad_variance / (1 - drop_prob),
            kedia("A.3 and Table 17, Dropout"),
        ),
        "grad_covariance": Law(
            lambda m, grad_covariance: grad_covariance, kedia("A.3 and Table 20, Dropout")
        ),
        "kurtosis": Law(
            lambda m, drop_prob: 3 / (1 - drop_prob),
            derived("zero-mean Gaussian input: E x^4 / (1-p)^3 over (E x^2 / (1-p))^2"),
        ),
    },
)

_UNSCALED: dict[str, Callable[..., Any]] = {
    "variance": lambda m, x_variance: x_variance,
    "covariance": _covariance,
    "hidden_covariance": _hidden_covariance,
    "grad_variance": lambda m, grad_variance: grad_variance,
    "grad_covariance": lambda m, grad_covariance: grad_covariance,
}

# A constant multiplier: residual scales, LayerNorm Scaling, output scales.
SCALE = ComponentLaws(
    "scale",
    "Multiplication by a constant whose square is the weight variance",
    {
        "mean": Law(
            lambda m, weight_variance, x_mean: m.sqrt(weight_variance) * x_mean,
            derived("definition; a positive constant"),
        ),
        **{
            quantity: Law(times(formula, "weight_variance"), derived("definition"))
            for quantity, formula in _UNSCALED.items()
        },
        "kurtosis": Law(lambda m: 3, derived("Gaussian input")),
    },
)


def _mixed(
    m: Any,
    skip_square: Any,
    branch_square: Any,
    x_variance: Any,
    branch_variance: Any,
    branch_correlation: Any,
) -> Any:
    """Variance of lambda x + beta b where x and b correlate."""
    kept, added = skip_square * x_variance, branch_square * branch_variance
    return kept + added + 2 * branch_correlation * m.sqrt(kept * added)


# Training correlates blocks with the stream; at initialisation both correlations are 0.
CORRELATED_RESIDUAL = ComponentLaws(
    "correlated_residual",
    "Residual addition whose branch correlates with the stream",
    {
        "variance": Law(
            _mixed,
            derived("variance of a sum"),
            note="Sun et al. (21) leave out the 2; Kedia et al. 3.5 and E.5.1 state it in words",
        ),
        "grad_variance": Law(
            Substituted(
                _mixed,
                x_variance="grad_variance",
                branch_variance="grad_branch_variance",
                branch_correlation="grad_branch_correlation",
            ),
            derived("variance of a sum"),
            note="Kedia et al. E.6.2 state it in words",
        ),
    },
)
