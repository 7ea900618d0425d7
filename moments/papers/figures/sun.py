"""Figures of Sun et al., at initialisation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ...formulas.law import Source
from ...formulas.references import SUN
from ...model.embedding import Embedding
from ...model.positions import Rotary
from ...model.presets import preset
from ...model.transformer import Transformer
from ...prediction.result import Prediction
from ..analysis.results import expected
from .setup import FigureLine, HeatMap, Panel, Setup

SHORT = 32
"""Tokens that angles are read from: they hardly depend on how many."""

WORDS = 30_000
"""Of which they are: the smallest vocabulary, BERT's, has 30,522."""

LLAMA = (
    "LLaMA-130M: 12 layers, d_model 768, 12 heads, d_ff 2048, RMSNorm, SwiGLU, deviation .02, "
    "{tokens} tokens by Zipf's law. "
)


def text(tokens: int, vocabulary: int) -> np.ndarray:
    """A sequence of words drawn by Zipf's law."""
    weights = 1 / np.arange(1, vocabulary + 1)
    draw = np.random.default_rng(0)
    return np.asarray(draw.choice(vocabulary, size=tokens, p=weights / weights.sum()))


def llama(tokens: int) -> Transformer:
    """LLaMA-130M, every matrix of deviation .02."""
    model = Transformer(
        12,
        768,
        12,
        tokens,
        d_ff=2048,
        normalization="rmsnorm",
        activation="swiglu",
        causal=True,
        embedding=Embedding(32000, 0.02**2),
        rotary=Rotary(),
    )
    return model.with_scheme("normal")


def read_words(model: Transformer) -> Prediction:
    """A prediction of the model on `SHORT` words."""
    return expected(model, token_ids=text(SHORT, WORDS))


def _variances() -> Setup:
    base, inputs = llama(256), {"token_ids": text(256, 32000)}
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
    number: int,
    title: str,
    models: Mapping[str, Transformer],
    settings: str = LLAMA.format(tokens=SHORT),
) -> Setup:
    panels = tuple(HeatMap(name, partial(read_words, model)) for name, model in models.items())
    return Setup(
        f"sun-{number}",
        f"Angular distance between layers, AT INITIALISATION: {title}",
        Source(SUN, f"Figure {number}"),
        f"{settings}Predicted from moments, not simulated. The paper shows trained models",
        panels,
    )


def figures() -> tuple[Setup, ...]:
    """Those this module declares."""
    base = llama(SHORT)
    open_models = {
        "BERT-large, Post-LN": preset("bert-large", seq_len=SHORT),
        "Qwen3-8B, Pre-LN": preset("qwen3-8b", seq_len=SHORT),
        "LLaMA2-13B, Pre-LN": preset("llama-2-13b", seq_len=SHORT),
        # LLaMA-7B with 30 layers
        "DeepSeek-7B, Pre-LN": preset("llama-7b", seq_len=SHORT).replace(layers=30),
    }
    return (
        _angles(
            2,
            "open models",
            open_models,
            "Weights as the models' configurations initialise them, 32 tokens by Zipf's law. ",
        ),
        _angles(3, "either placement", {"Post-LN": base.replace(norm="post"), "Pre-LN": base}),
        _variances(),
        _angles(
            6,
            "LayerNorm Scaling",
            {"Pre-LN": base, "LayerNorm Scaling": base.with_scheme("lns")},
        ),
    )
