"""What bounds a DeepScaleLM stack, forward and backward, beside a prediction of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import domain_error
from ...formulas.kedia_chain import DSLM_CHAIN
from ...formulas.law import Theory
from ...model.transformer import Transformer
from ...prediction.result import Prediction
from .alike import predict_alike
from .chain import chain_constants
from .results import Result


@dataclass(frozen=True)
class DslmBounds(Result):
    """Kedia et al.'s E.3 to E.5: bounds of many layers, and the extremes of a prediction.

    Attributes:
        prediction: what the extremes are of.
        simplified: whether the attention block's weights are those of the feed-forward block.
        branch_constant: k = N beta^2.
        gradient_ratio: smallest and largest C_6 of the layers, the correlation of the gradient that
            meets the attention over that of the signal entering the layer.
        bounds, extremes: (lower, upper) by quantity: `variance` over the input's, and
            `grad_variance` over the output's.
    """

    prediction: Prediction
    simplified: bool
    branch_constant: float
    gradient_ratio: tuple[float, float]
    bounds: Mapping[str, tuple[float, float]]
    extremes: Mapping[str, tuple[float, float]]

    @property
    def heading(self) -> str:
        kind = "simplified DeepScaleLM" if self.simplified else "DeepScaleLM"
        low, high = self.gradient_ratio
        return (
            f"{kind}, {self.prediction.model.norm} norm, k = {self.branch_constant:.3g}, "
            f"C_6 from {low:.3g} to {high:.3g}"
        )

    def _rows(self) -> list[Mapping[str, Any]]:
        return [
            {
                "quantity": name,
                "lower bound": low,
                "smallest": self.extremes[name][0],
                "largest": self.extremes[name][1],
                "upper bound": high,
            }
            for name, (low, high) in self.bounds.items()
        ]


def dslm_bounds(
    model: Transformer,
    theory: Theory = "simplified",
    *,
    correlation: float = 0.227,
    grad_correlation: float = 0.0,
) -> DslmBounds:
    """Bounds of DeepScaleLM's variance and gradient that do not depend on its depth.

    As the scheme sets it, variance is 1 and the gradient's factor lies between
    e^(k (C_6 - 1)) at its smallest and largest C_6, both taken with 1, which the start has. With
    the simplified weights the variance stays between (1 + e^(-2k))/2 and 1, and the gradient's
    factor between e^(-2k) and e^(k C_6). All for many layers.

    Args:
        model: as `with_scheme("dslm")` makes it from a ReLU model.
        theory: of the prediction; Table 2's, "simplified", is what the bounds are derived from.
        correlation: of the input's tokens before the embedding's dropout.
        grad_correlation: at the output.

    Raises:
        DomainError: scales that do not square to 1, a simplified model whose norm is not "pre",
            or a model that Table 2 does not cover.
    """
    if model.norm not in ("pre", "post"):
        raise domain_error("norm", model.norm, "'pre' or 'post'")
    squares = model.by_block("skip_scale") ** 2 + model.by_block("branch_scale") ** 2
    if not np.allclose(squares, 1.0):
        raise domain_error(
            "skip_scale^2 + branch_scale^2",
            f"{squares.min():g} to {squares.max():g}",
            "1 in every block",
            'model.with_scheme("dslm") sets it',
        )
    chain_constants(model)  # refuses what Table 2 does not cover
    assert model.weights is not None
    alike = [np.asarray(model.weights.of(name)) for name in ("value", "ffn_in")]
    simplified = bool(np.allclose(alike[0], alike[1]))
    if simplified and model.norm != "pre":
        raise domain_error("norm", model.norm, "'pre' for the simplified weights")
    p = predict_alike(
        model,
        theory,
        correlation=correlation * (1 - model.dropout),
        grad_correlation=grad_correlation,
    )
    ratios = _gradient_ratios(p)
    k = float(model.layers * np.mean(model.by_block("branch_scale") ** 2))
    low, high = min(1.0, float(ratios.min())), max(1.0, float(ratios.max()))
    laws = DSLM_CHAIN.laws
    at = {"branch_constant": k}
    if simplified:
        bounds = {
            "variance": (float(laws["simplified_variance_lower"](**at)), 1.0),
            "grad_variance": (
                float(laws["simplified_grad_lower"](**at)),
                float(laws["simplified_grad_upper"](**at, gradient_ratio=float(ratios.max()))),
            ),
        }
    else:
        ends = [float(laws["grad_bound"](**at, gradient_ratio=c)) for c in (low, high)]
        bounds = {"variance": (1.0, 1.0), "grad_variance": (ends[0], ends[1])}
    v, g = p.variance / p.variance[0], p.grad_variance / p.grad_variance[-1]
    extremes = {
        "variance": (float(v.min()), float(v.max())),
        "grad_variance": (float(g.min()), float(g.max())),
    }
    found = (float(ratios.min()), float(ratios.max()))
    return DslmBounds(p, simplified, k, found, bounds, extremes)


def _gradient_ratios(prediction: Prediction) -> np.ndarray:
    """C_6 of every layer, (N,)."""
    received = [
        point.gradient.kernel.mean_pairs() / point.gradient.kernel.mean_diagonal()
        for point in prediction.trace.points
        if point.site == "attention.sum" and point.gradient is not None
    ]
    return np.asarray(np.array(received, dtype=float) / prediction.correlation[:-1])
