"""Sun et al.: bounds on the Jacobian of a Pre-LN stack, and angles between its layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moments.errors import domain_error
from moments.formulas.checks import POSITIVE, check_interval
from moments.prediction.result import Prediction

from ..formulas.sun import CURSE_OF_DEPTH
from .recursion import variance_recursion
from .results import Result

# --- Sun et al.'s bounds on the Jacobian of a Pre-LN stack: Theorems 3.3, 4.2 and 4.3 -------------


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

    def _table(self) -> dict[str, np.ndarray]:
        return {
            "layer": np.arange(len(self.corrected)),
            "variance": self.prediction.variance,
            "log bound": self.corrected,
            "log bound, printed": self.printed,
            "log query bound": self.query,
            "log gain, predicted": self.predicted,
        }


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
    check_interval("weight_variance", weight_variance, POSITIVE)
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


# --- Angular distance between the stream at two depths (Sun et al. equation 1), from moments ------
#
# A block's last matrix has mean zero and knows nothing of the stream, so x_{l+1} = lambda x_l +
# beta b has cosine lambda sqrt(v_l / v_{l+1}) with x_l, a normalisation changes no angle, and
# cosines of successive blocks multiply. Exact for the mean inner product; the angle itself
# fluctuates by O(1/sqrt(d)). A branch correlation makes it a Markov chain: a block knows earlier
# streams only through the one it is added to.


@dataclass(frozen=True)
class AngularDistance(Result):
    """Angles between the stream's points.

    Attributes:
        prediction: it was read from.
        branch_correlation: of blocks and stream; 0 at initialisation.
        cosine: (N + 1, N + 1), between point l and point m of the stream.
    """

    prediction: Prediction
    branch_correlation: float
    cosine: np.ndarray

    @property
    def matrix(self) -> np.ndarray:
        """arccos(cosine) / pi, (N + 1, N + 1): 0 alike, 0.5 unrelated."""
        return np.asarray(np.arccos(np.clip(self.cosine, -1.0, 1.0)) / np.pi)

    def from_layer(self, steps: int) -> np.ndarray:
        """Distance over `steps` layers from every starting point, (N + 1 - steps,)."""
        if not 1 <= steps <= len(self.cosine) - 1:
            raise domain_error("steps", steps, f"from 1 to {len(self.cosine) - 1}")
        return np.asarray(np.diagonal(self.matrix, steps).copy())

    @property
    def heading(self) -> str:
        step = self.from_layer(1)
        return (
            f"angular distance of one layer: {step[0]:.3f} at the input, {step[-1]:.3f} at the "
            f"output, {self.prediction.model.norm} norm"
        )

    def _table(self) -> dict[str, np.ndarray]:
        first, last = np.triu_indices(len(self.cosine), 1)
        distances = self.matrix[first, last]
        return {"layer": first, "steps": last - first, "angular_distance": distances}


def angular_distance(prediction: Prediction, branch_correlation: float = 0.0) -> AngularDistance:
    """Angular distance between every two points of the stream, for heat maps over depth.

    Args:
        prediction: of a single configuration, Pre-LN or Post-LN.
        branch_correlation: of every block's output with the stream; 0 at initialisation.

    Raises:
        DomainError: as `variance_recursion`.
    """
    steps = variance_recursion(prediction, branch_correlation).cosine
    layers = steps[0::2] * steps[1::2]
    count = len(layers) + 1
    cosine = np.eye(count)
    for first in range(count - 1):
        cosine[first, first + 1 :] = np.cumprod(layers[first:])
    return AngularDistance(
        prediction, branch_correlation, np.maximum(np.triu(cosine), np.triu(cosine).T)
    )
