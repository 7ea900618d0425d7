"""Released configs by entry: another value changes the declaration, is named or is refused."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moments
from moments.model.huggingface import READERS
from moments.model.huggingface.config import read_config
from moments.model.huggingface.entries import IRRELEVANT

FOLDERS = ("released_configs", "text_configs", "recurrent_configs", "perception_configs")
WORDS = ("gelu", "silu", "sigmoid", "absolute", "learned", "all", "none", "rope", "yarn")
# Of no effect beside what others of the same config say: windows that are off, another entry for
# the same thing, scaled positions of which another entry decides; what no line of a module reads
OFF_IN = {
    "exaone4": "sliding_window_pattern",
    "falcon": "attention_dropout",
    "falcon_h1": "mamba_expand",
    "gemma4_text": "num_global_key_value_heads use_double_wide_mlp tie_word_embeddings",
    "arcee": "rope_scaling.mscale",
    "hunyuan_v1_dense": "rope_scaling.beta_fast rope_scaling.beta_slow rope_scaling.factor "
    "rope_scaling.mscale rope_scaling.mscale_all_dim",
    "marian": "share_encoder_decoder_embeddings",
    "phi3": "rope_scaling.short_factor",
    "qwen2": "max_window_layers use_sliding_window",
    "qwen3": "max_window_layers use_sliding_window",
    "smollm3": "use_sliding_window",
}


def configs() -> Iterator[Any]:
    for folder in FOLDERS:
        for file in sorted((Path(__file__).parent / folder).glob("*.json")):
            entries = json.loads(file.read_text(encoding="utf-8"))
            kind = entries["model_type"]
            if kind not in ("clip", "siglip"):
                yield pytest.param(entries, id=file.stem)
                continue
            for side in ("text", "vision"):
                part = entries[f"{side}_config"] | {"model_type": f"{kind}_{side}_model"}
                yield pytest.param(part, id=f"{file.stem} {side}")


EACH = pytest.mark.parametrize("entries", list(configs()))


def read(entries: Any) -> Any:
    """What a config declares and what is said of it; words where it is refused."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            model = moments.from_huggingface(entries)
        except moments.MomentsError as error:
            return str(error)
    return model, {str(one.message) for one in said}


def places(entries: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all that is no object."""
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from places(value, (*path, name))
        else:
            yield (*path, name)


def objects(entries: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from objects(value, (*path, name))


def others(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value or 2, max(value // 2, 1), 1, 0, -1]
    if isinstance(value, float):
        return [1.5 * value or 0.1, value + 0.1]
    if isinstance(value, list):
        return [value[:-1], value[::-1], value[1:] + value[:1], value + value[-1:], ["none"]]
    if isinstance(value, str):
        return [one for one in WORDS if one != value]
    return [16, 0.3, True, "none", {"rope_type": "linear", "factor": 2.0}]


def put(entries: Any, path: tuple[Any, ...], value: Any) -> Any:
    result = at = copy.deepcopy(entries)
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return result


@EACH
def test_another_value_changes_the_declaration_or_is_named(entries: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = read_config(entries)["model_type"]
    usual = READERS[kind].usual
    silent = IRRELEVANT | {name for name, value in usual.items() if value is ...}
    off, first = OFF_IN.get(kind, "").split(), read(entries)
    assert not isinstance(first, str), first
    for path in places(entries):
        sides = entries["model_type"] != kind and path[0] != "text_config"
        inside = path[1:] if path[0] == "text_config" else path
        if sides or silent & {path[-1], path[0]} or ".".join(inside) in off:
            continue
        value = entries
        for name in path:
            value = value[name]
        assert any(read(put(entries, path, one)) != first for one in others(value)), path


@EACH
def test_an_entry_that_is_not_known_is_named_wherever_it_stands(entries: Any) -> None:
    first = read(entries)
    for path in objects(entries):
        if set(path) & IRRELEVANT or (path and path[0] in ("vision_config", "audio_config")):
            continue  # sides that are left out, which is said
        model, said = read(put(entries, (*path, "spectral_gate"), 3))
        assert model == first[0]
        assert any("spectral_gate" in one for one in said - first[1]), path
