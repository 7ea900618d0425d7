"""Noci et al.: residual branches over sqrt(N), and a temperature that balances gradients."""

from __future__ import annotations

import math

import numpy as np

from ..errors import without_warnings
from ..formulas.attention import UNIFORM_ATTENTION_GRADIENTS
from ..formulas.checks import check_choice
from ..formulas.law import Source
from ..formulas.references import NOCI
from ..model.transformer import Transformer
from ..prediction.predict import predict
from ..solver.solve import solve_objective
from .registry import Scheme


def _noci(
    model: Transformer, temperature: str | None = "solved", correlation: float | None = None
) -> Transformer:
    """Branches times 1/sqrt(N), and logits divided by a temperature.

    Args:
        model: its placement stays; the authors' is "post".
        temperature: "solved": one for all layers, at which this model's query and value weights
            receive the same gradient (geometric mean over layers); "per-layer": each layer's own;
            "printed": the authors' closed form for uniform attention in every layer, from the
            moments that enter it; None: stays.
        correlation: of the input's tokens; None: that of the embedding, else 0.
    """
    check_choice("temperature", temperature, ("solved", "per-layer", "printed", None))
    scaled = model.replace(branch_scale=1 / math.sqrt(model.layers), skip_scale=1.0)
    if temperature == "printed":
        return scaled.replace(temperature=_printed(scaled, correlation))
    if temperature is None:
        return scaled
    goal = "query_value_balance" + ("_per_layer" if temperature == "per-layer" else "")
    plan = solve_objective(
        scaled, goal, free="temperature", correlation=correlation, tolerance=1e-6
    )
    return plan.model


def _printed(model: Transformer, correlation: float | None) -> list[float]:
    with without_warnings():
        found = predict(model, correlation=correlation)
    frame = found.to_frame()
    normed = frame[frame.site == "attention.norm"]
    if model.norm == "pre" and len(normed) == model.layers:
        entering = zip(normed.variance, normed.correlation, strict=True)
    else:
        entering = zip(found.variance[:-1], found.correlation[:-1], strict=True)
    law = UNIFORM_ATTENTION_GRADIENTS.law("inverse_temperature_square")
    shape = {"d_model": model.d_model, "seq_len": model.seq_len}
    squares = [law(**shape, x_variance=v, x_correlation=r) for v, r in entering]
    return [1 / float(np.sqrt(square)) for square in squares]


NOCI_SCALING = Scheme(
    "noci",
    "residual branches times 1/sqrt(N), and a temperature on the logits",
    ("branch_scale", "skip_scale", "temperature"),
    Source(NOCI, "sections 3.2 and 4, and Appendix C.2"),
    _noci,
    ("post", "none"),
    predictions=20,
)
