"""Gated units: an activation of one linear map times another linear map of the same input.

y = f(a) u: the gate a and the factor u have independent weights, so given the input they are
independent and centred. Second moments multiply, and the gradient of each contains the other.
"""

from __future__ import annotations

import functools

from .activation import ACTIVATION_LAWS
from .law import ComponentLaws, Law, Substituted, derived, times

_SOURCE = derived("second moments of independent centred factors multiply; checked by quadrature")
_BACK = derived("derivative of the second moment in that of one factor's tokens")

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
    laws = base.under("published")
    mean = laws["mean"].formula
    square = Substituted(
        lambda m, inner, mean: inner + mean**2, inner=laws["variance"].formula, mean=mean
    )
    moment = Substituted(
        lambda m, inner, one, two: inner + one * two,
        inner=laws["covariance"].formula,
        one=mean,
        two=Substituted(mean, x_variance="x_other_variance"),
    )
    formulas = {
        "variance": times(square, "factor_variance"),
        "covariance": times(moment, "factor_covariance"),
        "grad_variance": times(laws["grad_variance"].formula, "factor_variance"),
        "grad_covariance": times(laws["grad_covariance"].formula, "factor_covariance"),
        "grad_factor": times(square, "grad_variance"),
        "grad_factor_covariance": times(moment, "grad_covariance"),
        "kurtosis": Substituted(lambda m, inner: 3 * inner, inner=laws["kurtosis"].formula),
    }
    limits = laws["covariance"].limits
    return ComponentLaws(
        *_KNOWN.get(base.name, (f"gated_{base.name}", f"Gated unit: f(a) u, f = {base.title}")),
        {
            "mean": Law(lambda m: 0, _SOURCE),
            "hidden_covariance": Law(lambda m: 0, _SOURCE),
            **{
                name: Law(formula, _BACK if name.startswith("grad") else _SOURCE, limits=limits)
                for name, formula in formulas.items()
            },
        },
    )


GATED = tuple(gated(ACTIVATION_LAWS[name]) for name in _KNOWN)
