"""Gated units: an activation of one linear map times another linear map of the same input.

y = f(a) u: the gate a and the factor u have weights of their own, so given the input they are
independent, and centred. Second moments multiply, and each factor's gradient carries the other.
"""

from __future__ import annotations

import functools
from typing import Any

from .activation import ACTIVATION_LAWS
from .law import ComponentLaws, Law, Substituted, derived

_SOURCE = derived("second moments of independent centred factors multiply; checked by quadrature")


_KNOWN = {
    "silu": ("swiglu", "SwiGLU, SiLU(a) u"),
    "gelu": ("geglu", "GeGLU, GeLU(a) u, erf form"),
    "gelu_tanh": ("geglu_tanh", "GeGLU, GeLU(a) u, tanh form"),
    "relu": ("reglu", "ReGLU, ReLU(a) u"),
    "sigmoid": ("glu", "GLU, sigmoid(a) u"),
    "identity": ("bilinear", "Bilinear unit, a u"),
}


@functools.cache
def gated(base: ComponentLaws) -> ComponentLaws:
    """Laws of f(a) u for the activation f of `base`.

    The input of a law is the gate's pre-activation a, Gaussian and centred; the factor's moments
    are `factor_variance` and `factor_covariance`. `grad_variance` is that of the gradient at a,
    `grad_factor` of the one at u.
    """
    of = base.under("published")

    def square(m: Any, v: Any) -> Any:
        return of["variance"].formula(m, v) + of["mean"].formula(m, v) ** 2

    def moment(m: Any, v: Any, other: Any, r: Any) -> Any:
        means = of["mean"].formula(m, v) * of["mean"].formula(m, other)
        return of["covariance"].formula(m, v, other, r) + means

    def law(formula: Any) -> Law:
        return Law(formula, _SOURCE, limits=of["covariance"].limits)

    def times(factor: str, quantity: str) -> Law:
        of_base = of[quantity].formula
        return law(Substituted(lambda m, of, by: of * by, of=of_base, by=factor))

    return ComponentLaws(
        *_KNOWN.get(base.name, (f"gated_{base.name}", f"Gated unit: f(a) u, f = {base.title}")),
        {
            "mean": Law(lambda m: 0, _SOURCE),
            "hidden_covariance": Law(lambda m: 0, _SOURCE),
            "variance": law(
                lambda m, x_variance, factor_variance: square(m, x_variance) * factor_variance
            ),
            "covariance": law(
                lambda m, x_variance, x_other_variance, x_correlation, factor_covariance: (
                    moment(m, x_variance, x_other_variance, x_correlation) * factor_covariance
                )
            ),
            "grad_variance": times("factor_variance", "grad_variance"),
            "grad_covariance": times("factor_covariance", "grad_covariance"),
            "grad_factor": law(
                lambda m, x_variance, grad_variance: square(m, x_variance) * grad_variance
            ),
            "grad_factor_covariance": law(
                lambda m, x_variance, x_other_variance, x_correlation, grad_covariance: (
                    moment(m, x_variance, x_other_variance, x_correlation) * grad_covariance
                )
            ),
            "kurtosis": law(lambda m, x_variance: 3 * of["kurtosis"].formula(m, x_variance)),
        },
    )


GATED = tuple(gated(ACTIVATION_LAWS[name]) for name in _KNOWN)
