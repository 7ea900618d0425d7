"""Cases of Sun et al.: angular distances between layers at initialisation, Figures 2, 3 and 6."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...formulas.law import Source
from ...formulas.references import SUN
from ...model.embedding import Embedding
from ...model.positions import Rotary
from ...model.presets import preset
from ...model.transformer import Transformer
from ...prediction.result import Prediction
from .angular import angular_distance
from .case import Case, expected, limits

VOCABULARY, TOKENS = 32000, 256
SHORT = 32
"""Tokens read by the open models: their angles hardly depend on it."""


def text(tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> np.ndarray:
    """A sequence of words drawn by Zipf's law."""
    weights = 1 / np.arange(1, vocabulary + 1)
    draw = np.random.default_rng(0)
    return np.asarray(draw.choice(vocabulary, size=tokens, p=weights / weights.sum()))


def llama(tokens: int = TOKENS) -> Transformer:
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
        embedding=Embedding(VOCABULARY, 0.02**2),
        rotary=Rotary(),
    )
    return model.with_scheme("normal")


def open_models() -> dict[str, Transformer]:
    """Figure 2's, as their configs initialise them; DeepSeek-7B is LLaMA-7B with 30 layers."""
    return {
        "BERT-large, Post-LN": preset("bert-large", seq_len=SHORT),
        "Qwen3-8B, Pre-LN": preset("qwen3-8b", seq_len=SHORT),
        "LLaMA2-13B, Pre-LN": preset("llama-2-13b", seq_len=SHORT),
        "DeepSeek-7B, Pre-LN": preset("llama-7b", seq_len=SHORT).replace(layers=30),
    }


def in_house() -> dict[str, Transformer]:
    """Figure 3's LLaMA-130M."""
    base = llama(SHORT)
    return {"Post-LN": base.replace(norm="post"), "Pre-LN": base}


def scaled() -> dict[str, Transformer]:
    """Figure 6's LLaMA-130M."""
    base = llama(SHORT)
    return {"Pre-LN": base, "LayerNorm Scaling": base.with_scheme("lns")}


def read_words(model: Transformer) -> Prediction:
    """A prediction of the model on `SHORT` words of its vocabulary."""
    words = 30_000  # the least of them has 30,522
    return expected(model, token_ids=text(SHORT, words))


def _angles(
    name: str,
    place: str,
    claim: str,
    verdict: str,
    models: Callable[[], Mapping[str, Transformer]],
) -> Case:
    predicted, series, made = {}, {}, []
    for title, model in models().items():
        p = read_words(model)
        made.append(p)
        found = angular_distance(p)
        step = found.from_layer(1)
        middle = model.layers // 2
        predicted[f"{title}: layer 1"] = float(step[0])
        predicted[f"{title}: layer {middle}"] = float(step[middle - 1])
        predicted[f"{title}: layer {model.layers}"] = float(step[-1])
        series[title] = found.matrix
    return Case(
        name,
        Source(SUN, place),
        claim,
        {"models": ", ".join(series), "distance": "equation 1, one layer"},
        {"tokens": f"{SHORT} by Zipf's law", "weights": "at initialisation, deviation .02"},
        predicted,
        verdict,
        series=series,
        notes=limits(made),
    )


def angles_of_open_models() -> Case:
    """Figure 2, bottom: open models, here before training."""
    return _angles(
        "angles_of_open_models",
        "Figure 2",
        "after training, distances fall with depth in Pre-LN, below .2 after DeepSeek-7B's 18th "
        "layer, and rise in Post-LN",
        "Both directions are there at initialisation: Pre-LN's layers add to a stream that has "
        "grown, Post-LN's to one of variance 1, and ever more alike tokens make attention add more",
        open_models,
    )


def angles_in_house() -> Case:
    """Figure 3, top: LLaMA-130M with either placement, here before training."""
    return _angles(
        "angles_in_house",
        "Figure 3",
        "after training, early Post-LN layers and late Pre-LN layers are alike",
        "Both are so at initialisation: distances fall with depth in Pre-LN, and rise in Post-LN, "
        "there by little",
        in_house,
    )


def angles_under_scaling() -> Case:
    """Figure 6, right: LayerNorm Scaling, here before training."""
    return _angles(
        "angles_under_scaling",
        "Figure 6",
        "after training, most layers turn the stream by more than .6 under LayerNorm Scaling, and "
        "by ever less in Pre-LN",
        "Not at initialisation, where scaled blocks add less and turn the stream less than plain "
        "Pre-LN's: independent blocks cannot exceed .5, so that what the figure shows is learned",
        scaled,
    )


CASES: Mapping[str, Callable[[], Case]] = {
    "angles_of_open_models": angles_of_open_models,
    "angles_in_house": angles_in_house,
    "angles_under_scaling": angles_under_scaling,
}
