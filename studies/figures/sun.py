"""Figures of Sun et al., at initialisation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from moments.formulas.law import Source
from moments.formulas.references import SUN
from moments.model.transformer import Transformer

from ..analysis.cases import in_house, llama, open_models, read_words, scaled, text
from .setup import FigureLine, HeatMap, Panel, Setup

LLAMA = (
    "LLaMA-130M: 12 layers, d_model 768, 12 heads, d_ff 2048, RMSNorm, SwiGLU, deviation .02, "
    "{tokens} tokens by Zipf's law. "
)


def _variances() -> Setup:
    base, inputs = llama(), {"token_ids": text()}
    models = {
        "Pre-LN": base,
        "Scaled Initialisation": base.with_scheme("scaled-init"),
        "LayerNorm Scaling": base.with_scheme("lns"),
    }
    panel = Panel(
        "",
        tuple(
            FigureLine(name, model, "variance", inputs, seeds=2) for name, model in models.items()
        ),
        y="variance of the stream",
        log=True,
    )
    settings = LLAMA.format(tokens=256) + "The paper shows them after 10,000 steps of training"
    title = "Output variance by layer, AT INITIALISATION"
    return Setup("sun-4", title, Source(SUN, "Figure 4"), settings, (panel,))


def _angles(
    number: int, title: str, models: Mapping[str, Transformer], settings: str, paper: str
) -> Setup:
    panels = tuple(HeatMap(name, partial(read_words, model)) for name, model in models.items())
    return Setup(
        f"sun-{number}",
        f"Angular distance between layers, AT INITIALISATION: {title}",
        Source(SUN, f"Figure {number}"),
        f"{settings}Predicted from moments, not simulated. {paper}",
        panels,
    )


def figures() -> tuple[Setup, ...]:
    """Those this module declares."""
    short = LLAMA.format(tokens=32)
    return (
        _angles(
            2,
            "open models",
            open_models(),
            "Weights as the models' configurations initialise them, 32 tokens by Zipf's law. ",
            "The paper shows trained models",
        ),
        _angles(3, "either placement", in_house(), short, "The paper shows trained models"),
        _variances(),
        _angles(6, "LayerNorm Scaling", scaled(), short, "The paper shows trained models"),
    )
