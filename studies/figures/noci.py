"""Figures 8 to 10 of Noci et al."""

from __future__ import annotations

import math

from moments.formulas.law import Source
from moments.formulas.references import NOCI
from moments.model.transformer import Transformer

from ..analysis.noci import linear_stack
from .setup import SQUARED_NORM, FigureLine, Panel, Setup

DEPTH = 32
WHITE = {"correlation": 0.0}


def linear(depth_scaled: bool, layers: int = DEPTH) -> Transformer:
    """Linear, without normalisation, under uniform attention."""
    model = linear_stack(layers, 128, 32, 1.0)
    return model.replace(branch_scale=1 / math.sqrt(layers)) if depth_scaled else model


def _norms() -> Setup:
    made = {"α = 1": linear(False), "α = 1/√L": linear(True)}
    panels = (
        Panel(
            "",
            tuple(FigureLine(k, m, "variance", WHITE, over="first") for k, m in made.items()),
            y="squared norm of the sequence, over the input's",
            log=True,
        ),
        Panel(
            "",
            tuple(FigureLine(k, m, "correlation", WHITE) for k, m in made.items()),
            y="token correlation",
        ),
    )
    settings = (
        "linear activations, no normalisation, uniform attention; 32 layers, d = d_ff = 128, one "
        "head, 32 tokens, white input, Xavier weights are ours"
    )
    title = "Residual scaling keeps norm and correlation, however deep"
    return Setup("noci-8", title, Source(NOCI, "Figure 8"), settings, panels)


def _gradients() -> Setup:
    model = Transformer(12, 32, 4, 50, d_ff=128, norm="pre")
    inputs = {"correlation": 0.2}
    weights = ("value", "query", "key")
    panels = (
        Panel(
            "",
            (FigureLine("stream", model, "correlation", inputs, seeds=50),),
            y="token correlation",
        ),
        Panel(
            "",
            tuple(FigureLine(w, model, SQUARED_NORM + w, inputs, seeds=50) for w in weights),
            x="layer",
            y="squared gradient norm",
            log=True,
        ),
    )
    settings = (
        "Table 2: Pre-LN, d_model 32, d_ff 128, 4 heads, 50 tokens, ReLU, 50 runs; 12 layers, "
        "Xavier weights, input correlation .2 and a white gradient of variance 1 at the output "
        "are ours"
    )
    title = "Pre-LN: correlation, and gradients of values, queries and keys"
    return Setup("noci-9", title, Source(NOCI, "Figure 9"), settings, panels)


def _activations() -> Setup:
    panels = []
    for activation, name in (("identity", "linear"), ("relu", "ReLU")):
        lines = []
        for norm, scaled in (("post", False), ("post", True), ("pre", False)):
            gain = 1 / math.sqrt(DEPTH) if scaled else 1.0
            model = Transformer(
                DEPTH, 128, 1, 32, d_ff=128, norm=norm, activation=activation, branch_scale=gain
            )
            label = f"{norm.title()}-LN" + (", 1/sqrt(L)" if scaled else "")
            lines.append(FigureLine(label, model, "correlation", WHITE))
        panels.append(Panel(name, tuple(lines), y="token correlation"))
    settings = (
        "32 layers, d = d_ff = 128, one head, 32 tokens, white input and Xavier weights are ours"
    )
    title = "Correlation rises faster under ReLU than in a linear network"
    return Setup("noci-10", title, Source(NOCI, "Figure 10"), settings, tuple(panels))


def figures() -> tuple[Setup, ...]:
    """Those this module declares."""
    return _norms(), _gradients(), _activations()
