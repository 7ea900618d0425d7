"""Layer and root-mean-square normalisation of tokens with moments (v, c), and dynamic tanh."""

from __future__ import annotations

from typing import Any

from .activation import TANH
from .checks import Interval
from .law import ComponentLaws, Law, Substituted, asymptotic, derived
from .price import price
from .references import kedia

_PAIR: dict[str, Any] = {
    "v": "x_variance",
    "other": "x_other_variance",
    # E 1/(s_i s_j) to second order in the squared norms' fluctuation
    "jensen": lambda m, norm_spread, other_norm_spread, pair_norm_spread: (
        1 + m.ratio(3, 8) * (norm_spread + other_norm_spread) + pair_norm_spread / 4
    ),
}


def _pair_rescaled(
    m: Any, v: Any, other: Any, x_correlation: Any, epsilon: Any, jensen: Any, lost: Any
) -> Any:
    shares = v / (v + epsilon) * (other / (other + epsilon))
    return x_correlation * m.sqrt(shares) * jensen - lost


# The derivative of the covariance in that of the tokens; `lost` does not depend on it.
_SLOPE = price(
    Substituted(_pair_rescaled, **_PAIR, lost=lambda m: 0),
    "x_variance",
    "x_other_variance",
    "x_correlation",
)
_TOKEN_SLOPE = Substituted(
    _SLOPE,
    x_other_variance="x_variance",
    x_correlation=lambda m: 1,
    other_norm_spread="norm_spread",
    pair_norm_spread="norm_spread",
)


def _gradient(m: Any, slope: Any, removed_pair_share: Any, grad_covariance: Any) -> Any:
    return grad_covariance * (1 - removed_pair_share) * slope


_BACK = derived("derivative of the covariance in the tokens', less the directions projected out")


def _rescaling() -> dict[str, Law]:
    """Division by the root mean square of a token's features, epsilon under the root.

    The pullback projects out the signal's direction n and, for LayerNorm, the mean over features:
    tr P_i P_j = d - [mean] - 2 + (n_i.n_j)^2, and tr P_i = d - [mean] - 1.
    """
    return {
        "variance": Law(
            lambda m, x_variance, epsilon: x_variance / (x_variance + epsilon),
            derived("definition, the squared norm at its mean"),
        ),
        "covariance": asymptotic(
            Substituted(_pair_rescaled, **_PAIR, lost="overlap_norm_spread"),
            derived("second-order expansion of E o_ij/(|x_i| |x_j|)"),
            "large d_model: fourth order in the fluctuation of overlap and norms left out; "
            "of Gaussian tokens, r (1 - (1 - r^2)/(2 d))",
        ),
        "grad_variance": asymptotic(
            Substituted(
                _gradient,
                slope=_TOKEN_SLOPE,
                removed_pair_share="removed_share",
                grad_covariance="grad_variance",
            ),
            _BACK,
            "large d_model; fourth order in the norm's fluctuation left out",
        ),
        "grad_covariance": asymptotic(
            Substituted(_gradient, slope=_SLOPE),
            _BACK,
            "large d_model; fourth order in the norms' fluctuation left out",
        ),
    }


# Under the refined theory x is the centred input: (1 - 1/d) of an input that is not yet centred.
LAYERNORM = ComponentLaws(
    "layernorm",
    "Layer normalisation, unit gain and no bias",
    {
        "mean": Law(lambda m: 0, kedia("A.6 and Table 15")),
        "hidden_covariance": Law(lambda m, d_model: -1 / (d_model - 1), kedia("A.6 and Table 19")),
        "kurtosis": Law(
            lambda m, d_model: 3 * (d_model - 1) / (d_model + 1),
            derived("a coordinate of a uniform direction orthogonal to the mean"),
        ),
    },
    refined=_rescaling(),
    published={
        "variance": Law(lambda m: 1, kedia("A.6 and Table 16")),
        "covariance": asymptotic(
            lambda m, d_model, x_correlation: (1 - 1 / d_model) * x_correlation,
            kedia("A.6 and Table 18"),
            "large d_model; to O(1/d) the factor is 1 - (1 - r^2)/(2 (d - 1))",
        ),
        "grad_variance": asymptotic(
            lambda m, x_variance, grad_variance: grad_variance / x_variance,
            kedia("A.6 and Table 17"),
            "large d_model",
        ),
        "grad_covariance": asymptotic(
            lambda m, x_variance, grad_covariance: grad_covariance / x_variance,
            kedia("A.6 and Table 20"),
            "large d_model",
        ),
    },
    simplified={
        "covariance": asymptotic(
            lambda m, x_correlation: x_correlation, kedia("Table 1 and L.1"), "1/d dropped"
        )
    },
)


RMSNORM = ComponentLaws(
    "rmsnorm",
    "Root-mean-square normalisation, unit gain",
    {
        "mean": Law(lambda m: 0, derived("an odd function of a symmetric input")),
        "hidden_covariance": Law(
            lambda m: 0, derived("features of a Gaussian token change sign independently")
        ),
        "kurtosis": Law(
            lambda m, d_model: 3 * d_model / (d_model + 2),
            derived("a coordinate of a uniform direction"),
        ),
    },
    refined=_rescaling(),
)


# --- Dynamic Tanh: no normalisation, an elementwise squashing ------------------------------------


def _dyt_laws() -> dict[str, Law]:
    tanh = TANH.under("published")
    source = derived("tanh of a Gaussian of variance alpha^2 v; its laws by quadrature")
    largest = tanh["variance"].limits["x_variance"]
    # alpha is 0.5 at initialisation, and stays of that order
    limits = {
        "x_variance": largest,
        "x_other_variance": largest,
        "alpha": Interval(0.0, 1.0, open_lower=True),
    }

    def times_alpha(m: Any, alpha: Any, v: Any) -> Any:
        return alpha**2 * v

    def law(quantity: str) -> Law:
        formula = Substituted(
            tanh[quantity].formula,
            x_variance=Substituted(times_alpha, v="x_variance"),
            x_other_variance=Substituted(times_alpha, v="x_other_variance"),
        )
        if quantity.startswith("grad_"):
            formula = Substituted(times_alpha, v=formula)
        return Law(formula, source, limits=limits)

    scaled = ("variance", "covariance", "hidden_covariance", "grad_variance", "grad_covariance")
    centred = {"mean": Law(lambda m: 0, derived("an odd function of a symmetric input"))}
    return centred | {quantity: law(quantity) for quantity in (*scaled, "kurtosis")}


DYT = ComponentLaws("dyt", "Dynamic Tanh, tanh(alpha x)", _dyt_laws())
