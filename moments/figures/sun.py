"""Figure 4 of Sun et al., at initialisation."""

from __future__ import annotations

import numpy as np

from ..embedding import Embedding
from ..law import Source
from ..laws.references import SUN
from ..positions import Rotary
from ..transformer import Transformer
from .setup import Line, Panel, Setup

VOCABULARY, TOKENS = 32000, 256


def text() -> np.ndarray:
    """A sequence of words drawn by Zipf's law."""
    weights = 1 / np.arange(1, VOCABULARY + 1)
    draw = np.random.default_rng(0)
    return np.asarray(draw.choice(VOCABULARY, size=TOKENS, p=weights / weights.sum()))


def llama() -> Transformer:
    """LLaMA-130M, every matrix of deviation .02."""
    model = Transformer(
        12,
        768,
        12,
        TOKENS,
        d_ff=2048,
        normalization="rmsnorm",
        activation="swiglu",
        causal=True,
        embedding=Embedding(VOCABULARY, 0.02**2),
        rotary=Rotary(),
    )
    return model.with_scheme("normal")


def figures() -> tuple[Setup, ...]:
    """Those this module declares."""
    base, inputs = llama(), {"token_ids": text()}
    models = {
        "Pre-LN": base,
        "Scaled Initialisation": base.with_scheme("scaled-init"),
        "LayerNorm Scaling": base.with_scheme("lns"),
    }
    panel = Panel(
        "at initialisation",
        tuple(Line(name, model, "variance", inputs, seeds=2) for name, model in models.items()),
        y="variance of the stream",
        log=True,
    )
    settings = (
        "LLaMA-130M: 12 layers, d_model 768, 12 heads, d_ff 2048, RMSNorm, SwiGLU, deviation .02, "
        "256 tokens by Zipf's law. The paper shows these set-ups in training, not at its start"
    )
    title = "Output variance by layer, AT INITIALISATION"
    return (Setup("sun-4", title, Source(SUN, "Figure 4"), settings, (panel,)),)
