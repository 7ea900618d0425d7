"""Sun et al.'s bounds on the Jacobian of a Pre-LN stack: Theorems 3.3, 4.2 and 4.3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import domain_error
from ...formulas.checks import check_in
from ...formulas.sun import CURSE_OF_DEPTH
from ...formulas.symbols import POSITIVE
from ...prediction.result import Prediction
from .results import Result


@dataclass(frozen=True)
class JacobianBounds(Result):
    """Natural logarithms of the bounds on |dy_n / dx_1|, at every depth n.

    Attributes:
        prediction: its variances enter the bounds.
        constants: A and B, as equation 36 gives them, and as printed.
        corrected, printed: (N + 1,), the product over the first n layers; 0 at n = 0.
        query: (N + 1,), corrected, with Theorem 4.3's factor: bound on the gradient of W_1.
        predicted: (N + 1,), log of the root-mean-square gain of the gradient from n to the input.
    """

    prediction: Prediction
    constants: Mapping[str, float]
    corrected: np.ndarray
    printed: np.ndarray
    query: np.ndarray
    predicted: np.ndarray

    @property
    def heading(self) -> str:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in self.constants.items())
        return f"logarithms of Jacobian bounds; {shown}"

    def _rows(self) -> list[Mapping[str, Any]]:
        columns = {
            "variance": self.prediction.variance,
            "log bound": self.corrected,
            "log bound, printed": self.printed,
            "log query bound": self.query,
            "log gain, predicted": self.predicted,
        }
        return [
            {"layer": n, **{name: float(values[n]) for name, values in columns.items()}}
            for n in range(len(self.corrected))
        ]


def jacobian_bounds(
    prediction: Prediction, *, weight_variance: float | None = None
) -> JacobianBounds:
    """Theorem 3.3, or 4.2 under LayerNorm Scaling, along a prediction's variances.

    Args:
        prediction: of a single Pre-LN configuration.
        weight_variance: the one variance of all matrices that the paper assumes; None: the
            largest of the model's, as suits an upper bound.

    Raises:
        DomainError: not Pre-LN, another placement of the scaling, or several configurations.
    """
    model = prediction.model
    if model.norm != "pre":
        raise domain_error("norm", model.norm, "'pre': the theorems are about Pre-LN")
    if model.layernorm_scaling not in (False, True, "after-norm"):
        raise domain_error(
            "layernorm_scaling", model.layernorm_scaling, "False or 'after-norm', as in Theorem 4.2"
        )
    if prediction.variance.ndim != 1:
        raise domain_error("prediction", prediction, "of a single configuration")
    if weight_variance is None:
        weight_variance = _largest(prediction)
    check_in("weight_variance", weight_variance, POSITIVE)
    shape = {
        "weight_variance": weight_variance,
        "d_model": model.d_model,
        "d_ff": model.d_ff,
        "d_head": model.d_head,
        "heads": model.heads,
        "seq_len": model.seq_len,
    }
    names = (
        "jacobian_linear",
        "jacobian_quadratic",
        "jacobian_linear_printed",
        "jacobian_quadratic_printed",
    )
    constants = {name: float(CURSE_OF_DEPTH.law(name)(**shape)) for name in names}
    scaled = bool(model.layernorm_scaling)
    right = "lns_jacobian_factor" if scaled else "jacobian_factor"
    corrected = _log_product(prediction, right, constants, "")
    printed = _log_product(
        prediction, "lns_jacobian_factor_printed" if scaled else right, constants, "_printed"
    )
    first = CURSE_OF_DEPTH.law("query_prefactor")(
        x_variance=float(prediction.variance[0]), **{k: v for k, v in shape.items() if k != "d_ff"}
    )
    gain = np.log(prediction.grad_variance[0] / prediction.grad_variance) / 2
    return JacobianBounds(
        prediction, constants, corrected, printed, corrected + math.log(float(first)), gain
    )


def _log_product(
    prediction: Prediction, factor: str, constants: Mapping[str, float], suffix: str
) -> np.ndarray:
    values = {
        "x_variance": prediction.variance[:-1],
        "jacobian_linear": constants[f"jacobian_linear{suffix}"],
        "jacobian_quadratic": constants[f"jacobian_quadratic{suffix}"],
        "layer": np.arange(1, len(prediction.variance)),
    }
    factors = CURSE_OF_DEPTH.law(factor)(**values)
    return np.concatenate([[0.0], np.cumsum(np.log(factors))])


def _largest(prediction: Prediction) -> float:
    weights = prediction.model.weights
    assert weights is not None
    names = ("query", "key", "value", "output", "ffn_in", "ffn_out")
    return max(float(np.max(getattr(weights, name))) for name in names)
