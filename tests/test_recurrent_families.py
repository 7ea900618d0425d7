"""Families with recurrences, and hybrids, read from their configs, against the real modules.

Draws of transformers' own initialisation are stored (`python benchmarks/recurrent_families.py`).
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recurrent_families import HYBRIDS, KINDS, LAYERS, LENGTH, STORE, VARIANTS, config_of, text

import moments
from moments import Absent, DomainError, GatedDeltaNet, LinearAttention, Mamba2, ShortConvolution
from moments.model.huggingface import OF_BLOCKS

BOUND = {"mamba2": 0.1, "lfm2": 0.08, "qwen3_next": 0.12, "bamba": 0.1, "minimax": 0.08}
BOUND |= dict.fromkeys((*HYBRIDS, *VARIANTS), 0.08)


def quiet(config: Any, **options: Any) -> moments.Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return moments.from_huggingface(config, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
@pytest.mark.parametrize("kind", [*KINDS, *HYBRIDS, *VARIANTS])
def test_moments_and_gradients_are_those_of_the_module(kind: str) -> None:
    model = quiet(config_of(kind), seq_len=LENGTH)
    p, measured = moments.predict(model, token_ids=text()), json.loads(STORE.read_text())[kind]
    (stream, error), (loss, loss_error) = (map(np.array, measured[k]) for k in ("stream", "loss"))
    if kind != "minimax":  # whose layers' outputs are before the norm
        assert np.all(np.abs(p.variance[1:] - stream) < 0.02 * stream + 2 * error)
    assert abs(p.loss - loss) < 0.005 * loss + 2 * loss_error
    rows = p.weight_gradients().set_index(["layer", "weight"]).squared_norm
    for place in measured.keys() - {"stream", "loss"}:
        layer, *roles = place.split()
        numbers = [int(layer)]
        if kind == "gemma4_shared" and int(layer) > model.layers:  # one tensor for all layers
            numbers = list(range(1, model.layers + 1))
        parts, (value, error) = [(n, role) for n in numbers for role in roles], measured[place]
        expected = sum(rows[part] for part in parts)
        if (kind, roles) == ("falcon_h1", ["gate"]):  # its multiplier stands in its variance
            expected *= config_of(kind)["mlp_multipliers"][0] ** 2
        if (kind, roles) == ("gemma4_experts", ["router"]):  # so does its input's
            expected /= model.d_model
        assert abs(expected - value) < BOUND[kind] * value + 2.5 * error, place


def test_blocks_are_those_of_the_layers() -> None:
    lfm2, mamba2, qwen, bamba, minimax = (quiet(config_of(kind), seq_len=LENGTH) for kind in KINDS)
    assert isinstance(lfm2.mixers[0], ShortConvolution)
    assert isinstance(mamba2.mixer, Mamba2)
    assert isinstance(qwen.mixers[0], GatedDeltaNet)
    assert [model.mixers[1] is None for model in (lfm2, mamba2, bamba)] == [True, False, True]
    assert mamba2.ffn == Absent()
    assert isinstance(minimax.mixers[1], LinearAttention)
    assert minimax.norm == "post"  # and its stream is what norms leave
    assert mamba2.weights is not None
    assert mamba2.weights.output == 1 / (3 * 128 * LAYERS)
    assert qwen.attention_gate == "elementwise"


def test_a_stack_without_attention_has_none_of_its_fields() -> None:
    folder = Path(__file__).parent / "recurrent_configs"
    config = json.loads((folder / "qwen3-next-80b.json").read_text(encoding="utf-8"))
    model = moments.from_huggingface(config | {"num_hidden_layers": 2}, seq_len=64)
    assert (model.qk_norm, model.attention_gate) == (None, None)
    assert None not in model.mixers


RELEASED = {
    "lfm2-1.2b": ("short_convolution", 10),
    "mamba2-130m": ("mamba2", 24),
    "qwen3-next-80b": ("gated_delta_net", 36),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_have_their_mixers(name: str) -> None:
    folder = Path(__file__).parent / "recurrent_configs"
    config = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    model = moments.from_huggingface(config, seq_len=64)
    kind, count = RELEASED[name]
    kinds = [one.kind for one in model.mixers if one is not None]
    assert kinds == [kind] * count


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_of_another_meaning_is_refused_or_named(kind: str) -> None:
    assert kind in OF_BLOCKS
    config = config_of(kind)
    with pytest.warns(moments.ValidityWarning, match="spectral_gate = 3 is not modelled"):
        moments.from_huggingface(config | {"spectral_gate": 3})
    if kind == "minimax":
        return
    biases = "conv_bias", "use_bias", "attention_bias", "mamba_proj_bias"
    bias = dict(zip(KINDS, biases, strict=False))[kind]
    with pytest.raises(DomainError, match=bias):
        moments.from_huggingface(config | {bias: True})
    if "layer_types" in config:
        with pytest.raises(DomainError, match="layer_types"):
            moments.from_huggingface(config | {"layer_types": ["conv", "sliding"]})
