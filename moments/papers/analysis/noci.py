"""Noci et al.: how far query gradients fall behind, and the temperature that evens them out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import domain_error
from ...formulas.noci import UNIFORM_ATTENTION_GRADIENTS
from ...prediction.result import Prediction
from .results import Result


@dataclass(frozen=True)
class GradientGap(Result):
    """Squared gradient norms of query against value weights, layer by layer.

    Attributes:
        prediction: it was read from.
        ratio: (N,), query over value, predicted.
        uniform_ratio: (N,), Noci et al.'s Theorem 3.2 with equations 17 and 18, at the moments that
            enter each layer's attention: one head of width d, weights of variance 1/d, gradients
            uncorrelated between tokens.
        temperature: (N,), the factor tau on the logits that evens the two out at uniform attention
            (equation 47). The logits it makes are not quite small: they raise the value gradient by
            1 + n/(n + d), which leaves a ratio of (n + d)/(2 n + d).
    """

    prediction: Prediction
    ratio: np.ndarray
    uniform_ratio: np.ndarray
    temperature: np.ndarray

    @property
    def heading(self) -> str:
        return (
            f"query over value gradients: {self.ratio[0]:.4g} in layer 1, {self.ratio[-1]:.4g} in "
            f"layer {len(self.ratio)}"
        )

    def _table(self) -> dict[str, np.ndarray]:
        return {
            "layer": np.arange(1, len(self.ratio) + 1),
            "query / value": self.ratio,
            "uniform attention": self.uniform_ratio,
            "temperature": self.temperature,
        }


def gradient_gap(prediction: Prediction) -> GradientGap:
    """Query over value gradients of every layer, beside the uniform-attention law.

    The temperature is infinite where tokens have collapsed into one.

    Raises:
        DomainError: a theory other than "refined", which alone has query gradients, or several
            configurations.
    """
    if prediction.theory != "refined":
        raise domain_error("theory", prediction.theory, "'refined', which alone has query paths")
    frame = prediction.weight_gradients()
    model = prediction.model
    norms = frame.pivot_table(index="layer", columns="weight", values="squared_norm", sort=True)
    ratio = (norms["query"] / norms["value"]).to_numpy(float)
    scale = model.norm_scales**2 if model.norm == "pre" else np.ones(model.layers)
    variance = scale if model.norm == "pre" else prediction.variance[:-1]
    correlation = np.minimum(prediction.correlation[:-1], 1.0)
    square = np.full(model.layers, np.inf)
    apart = correlation < 1.0
    if apart.any():
        square[apart] = UNIFORM_ATTENTION_GRADIENTS.law("inverse_temperature_square")(
            d_model=model.d_model,
            seq_len=model.seq_len,
            x_variance=np.broadcast_to(variance, model.layers)[apart],
            x_correlation=correlation[apart],
        )
    return GradientGap(prediction, ratio, 1 / square, np.sqrt(square))
