"""Readers of dense decoders, against their modules as these are read by what they compute."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments.errors import ValidityWarning
from moments.model.huggingface import DENSE, FAMILIES, OF_BLOCKS
from moments.model.huggingface.entries import Entries
from moments.model.huggingface.llama import slowed
from moments.model.positions import Rotary

transformers = pytest.importorskip("transformers")

CONFIGS = Path(__file__).parent / "released_configs"
RELEASED = {
    file.stem: entries
    for file in sorted(CONFIGS.glob("*.json"))
    if (entries := json.loads(file.read_text(encoding="utf-8")))["model_type"] in DENSE
}
MATRICES = ("query", "key", "value", "output", "ffn_in", "ffn_out", "gate")


def quiet(config: Any, **options: Any) -> moments.Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        return moments.from_huggingface(config, **options)


def numbers(model: moments.Transformer) -> dict[str, Any]:
    """All that a declaration says, layer by layer, defaults resolved."""
    fields = model.to_dict() | {"name": None}
    fields |= {name: getattr(model, name) for name in ("ffn_dropout", "attention_dropout")}
    fields |= {name: getattr(model, name) for name in ("kv_heads", "d_head", "d_ff")}
    fields["window"], fields["temperature"] = list(model.windows), model.temperatures.tolist()
    fields["norm_gain"] = model.norm_gains.tolist()
    fields["rotary"] = [
        None if one is None else [a.tolist() for a in one.frequencies(model.d_head)]
        for one in model.rotaries
    ]
    fields["weights"] = {
        name: np.broadcast_to(model.weights.of(name), model.layers).tolist() for name in MATRICES
    }
    return fields


def flat(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from flat(entry, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for number, entry in enumerate(value):
            yield from flat(entry, f"{where}[{number}]")
    else:
        yield where, value


def differences(one: moments.Transformer, other: moments.Transformer) -> dict[str, Any]:
    first, second = (dict(flat(numbers(model))) for model in (one, other))
    return {
        place: (first.get(place), second.get(place))
        for place in first.keys() | second.keys()
        if first.get(place) != second.get(place)
        and not (
            isinstance(first.get(place), float)
            # variances are sampled, and frequencies rounded, where a module is read
            and math.isclose(first[place], second.get(place, math.inf), rel_tol=5e-3)
        )
    }


# Windows and positions that differ between layers; the others: `python tests/test_dense_readers.py`
QUICK = ("exaone4-32b", "command-r7b")


def as_the_module_has_it(name: str) -> dict[str, Any]:
    """What a released config's reader says otherwise than its module, at four layers."""
    from moments.torch.from_config import from_config

    entries = RELEASED[name]
    depth = entries["num_hidden_layers"]
    entries = {
        k: v[:4] if isinstance(v, list) and len(v) == depth else v for k, v in entries.items()
    } | {"num_hidden_layers": 4}
    length = 1024 if "gemma" in name else 64
    return differences(quiet(entries, seq_len=length), from_config(entries, length)[0])


@pytest.mark.parametrize("name", QUICK)
def test_a_released_config_is_read_as_its_module_is(name: str) -> None:
    pytest.importorskip("torch")
    assert as_the_module_has_it(name) == {}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_read_without_a_remark(name: str) -> None:
    model = moments.from_huggingface(RELEASED[name])
    assert model.layers == RELEASED[name]["num_hidden_layers"]


@pytest.mark.parametrize("kind", sorted(DENSE))
def test_a_missing_entry_means_what_the_class_means(kind: str) -> None:
    assert kind not in FAMILIES
    assert kind not in OF_BLOCKS
    given = quiet({"model_type": kind})
    assert given == quiet(transformers.AutoConfig.for_model(kind))
    drops = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0} if kind == "m2m_100" else {}
    with pytest.warns(ValidityWarning) as notes:
        moments.from_huggingface({"model_type": kind, "spectral_gate": 3} | drops)
    assert any("spectral_gate = 3 is not modelled: no entry of" in str(n.message) for n in notes)


POSITIONS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn of two scales": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_slowed_positions_are_those_of_transformers(kind: str) -> None:
    pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    name = kind.split()[0]
    given = POSITIONS[kind] | {"rope_type": name, "rope_theta": 150000.0}
    given |= {} if name == "linear" else {"original_max_position_embeddings": 4096}
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        rope_parameters=dict(given),
        max_position_embeddings=131072,
    )
    speeds, factor = ROPE_INIT_FUNCTIONS[name](config, device=None)
    read = Entries({"max_position_embeddings": 131072}, "llama", {})
    found, scale = slowed(read, given, Rotary(base=150000.0), 64)
    assert np.array(found.speeds) == pytest.approx(speeds.numpy(), rel=1e-5)
    assert scale == pytest.approx(factor, rel=1e-6)


def test_positions_that_are_wrong_are_refused() -> None:
    entries = RELEASED["olmo3-7b"] | {"rope_scaling": {"rope_type": "yarn", "factor": -1.0}}
    with pytest.raises(moments.DomainError, match="a positive number"):
        moments.from_huggingface(entries)


if __name__ == "__main__":
    for each in RELEASED:
        print(each, as_the_module_has_it(each))
