"""Figures of Kedia et al."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from moments.formulas.references import kedia
from moments.model.transformer import Transformer

from .setup import LAYER_NORM, TYPICAL_LAYER_NORM, FigureLine, Panel, Setup

DROPOUT = 0.1
CORRELATION = 0.227  # of tables in equal parts at 32,000 words and 256 tokens, before dropout
INPUT = {"correlation": (1 - DROPOUT) * CORRELATION}
DEEP = (
    "192 layers, 256 tokens, ReLU and dropout .1 as in the authors' scripts, whose BERT of d_model "
    "1024 with 16 heads reads text; d_model 256, 4 heads, input correlation .9 x .227 and a white "
    "gradient at the output are ours"
)
RELEASED = (
    ". The authors' scripts plot the right panel's quantity over five parameters of each layer, "
    "and beside it a curve drawn from its first point, by 1/sqrt(1 + 1/n) or 1.024 a layer. The "
    "right panel's points and solid line are means over draws, which in Post-LN rare draws rule"
)
STREAM = "variance of the stream (input: 1)"
GRADIENT = "gradient variance, typical draw (output: 1)"


def deep(norm: str) -> Transformer:
    """The 192-layer model with Xavier weights."""
    return Transformer(192, 256, 4, 256, norm=norm, dropout=DROPOUT)


@cache
def scaled(norm: str) -> Transformer:
    """The same under DeepScaleLM, on fewer tokens."""
    return deep(norm).replace(seq_len=64).with_scheme("dslm", input_correlation=CORRELATION)


def _both(model: Transformer, quantity: str) -> tuple[FigureLine, ...]:
    """Our line with points, and the paper's full forms."""
    printed = quantity.removesuffix("_typical")
    return (
        FigureLine("refined", model, quantity, INPUT, seeds=2),
        FigureLine("paper's forms", model, printed, INPUT, theory="published", points=False),
    )


def _deep(
    name: str, number: int, title: str, norm: str, quantity: str, label: str, log: str = ""
) -> Setup:
    y, x = "y" in log, "x" in log
    panels = [Panel("", _both(deep(norm), quantity), y=label, log=y, log_x=x)]
    settings = DEEP
    if quantity != "variance":
        lines = (
            FigureLine("refined", deep(norm), LAYER_NORM, INPUT, over="last", seeds=2),
            FigureLine(
                "typical draw", deep(norm), TYPICAL_LAYER_NORM, INPUT, over="last", points=False
            ),
        )
        last = f"{LAYER_NORM} (last: 1)"
        panels.append(Panel("", lines, x="layer", y=last, log=y, log_x=x))
        settings += RELEASED
    return Setup(name, title, kedia(f"Figure {number}"), settings, tuple(panels))


def _conserved() -> Setup:
    panels = []
    for norm in ("pre", "post"):  # on top of each other in one panel they would hide each other
        model = scaled(norm)
        norms = FigureLine("refined", model, LAYER_NORM, INPUT, over="last", seeds=2)
        title = f"{norm.title()}-LN"
        panels += [
            Panel(title, _both(model, "variance"), y=STREAM),
            Panel(title, _both(model, "grad_variance_typical"), y=GRADIENT),
            Panel(title, (norms,), x="layer", y=f"{LAYER_NORM} (last: 1)"),
        ]
    title = "DeepScaleLM conserves the variance forward, norms of weight gradients backward"
    settings = DEEP.replace("256 tokens, ReLU", "64 tokens for the authors' 256, ReLU")
    settings += (
        ". The authors' scripts plot the right panel's quantity over five parameters a layer"
    )
    return Setup("kedia-4", title, kedia("Figure 4"), settings, tuple(panels), columns=3)


def _of_block(label: str, which: str, drop_prob: float, **changes: Any) -> FigureLine:
    """Correlation of one block's output against that of its input; the other block adds nothing."""
    scales = [[1.0, 0.0]] if which == "attention" else [[0.0, 1.0]]
    model = Transformer(
        1, 256, 4, 256, norm="none", dropout=drop_prob, branch_scale=scales, skip_scale=1.0
    )
    return FigureLine(label, model, "correlation", site=f"{which}.dropout", **changes)


def _correlations() -> Setup:
    lines = (
        _of_block("attention block", "attention", DROPOUT, seeds=2),
        _of_block("feed-forward block", "ffn", DROPOUT, seeds=8),
    )
    panel = Panel("dropout .1", lines, "input correlation", "output correlation", diagonal=True)
    title = "The feed-forward block lowers high correlations"
    settings = "Dropout keeps attention's below 1; d_model 256, 4 heads, 256 tokens, Xavier weights"
    return Setup("kedia-7", title, kedia("Figure 7"), settings, (panel,))


def _no_collapse() -> Setup:
    base = Transformer(100, 128, 4, 64, dropout=DROPOUT)
    models = {
        "Xavier": base,
        "Xavier, λ = 1, β² = 2/N": base.replace(branch_scale=math.sqrt(2 / 100)),
        "DeepScaleLM": base.with_scheme("dslm", input_correlation=CORRELATION),
    }
    lines = tuple(
        FigureLine(name, model, "correlation", INPUT, seeds=2) for name, model in models.items()
    )
    title = "No rank collapse with Xavier weights and dropout"
    settings = (
        "100 layers, dropout .1, ReLU and the three schemes as in the paper; Pre-LN, d_model 128, "
        "4 heads and 64 tokens are ours"
    )
    panel = Panel("", lines, y="token correlation")
    return Setup("kedia-8", title, kedia("Figure 8"), settings, (panel,))


def _polynomial() -> Setup:
    lines = (
        _of_block("exact", "ffn", 0.0, seeds=8),
        _of_block("polynomial of Table 2", "ffn", 0.0, theory="simplified", points=False),
    )
    panel = Panel("no dropout", lines, "input correlation", "output correlation", diagonal=True)
    title = "Correlation through the feed-forward block, and its polynomial"
    settings = "d_model 256, Xavier weights"
    return Setup("kedia-13", title, kedia("Figure 13"), settings, (panel,))


def figures() -> tuple[Setup, ...]:
    """Those this module declares."""
    return (
        _deep(
            "kedia-1",
            1,
            "Pre-LN: forward variance grows linearly",
            "pre",
            "variance",
            STREAM,
        ),
        _deep(
            "kedia-2",
            2,
            "Pre-LN: gradient variance grows hyperbolically",
            "pre",
            "grad_variance_typical",
            GRADIENT,
            "xy",
        ),
        _deep(
            "kedia-3",
            3,
            "Post-LN: gradient variance vanishes exponentially",
            "post",
            "grad_variance_typical",
            GRADIENT,
            "y",
        ),
        _conserved(),
        _correlations(),
        _no_collapse(),
        _polynomial(),
    )
