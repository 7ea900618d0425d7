"""Released configs of current models, small: real modules measured and their configs predicted.

`tests/released_configs/` and `tests/text_configs/` have the config.json of released models,
written from memory of what was published and not compared with the files themselves.
`shrunk` takes from one its size alone: layers, widths, heads in their ratio, rows of tables, the
reach of windows. transformers' own module of it, with its own initialisation, reads English text
(smooth random pictures for ViT) and computes its own loss; the same small config is read by
`moments.from_huggingface` and predicted on the same tokens.

    python benchmarks/released_configs.py measure --seeds 48 [--names gemma3-1b ...]  # continues
    python benchmarks/released_configs.py table [--names gemma3-1b ...]               # predicts

Means and standard errors lie in benchmarks/data/, in a file for either folder.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import time
import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import real_modules

import moments
from moments.model.huggingface import READERS
from moments.model.huggingface.sizes import FFN_WIDTHS, HEADS, LAYERS, WIDTHS

CONFIGS = [
    Path(__file__).resolve().parents[1] / "tests" / name
    for name in ("released_configs", "text_configs")
]
DATA = Path(__file__).parent / "data"
DEPTH, N_HEADS, D_HEAD, VOCAB, SEQ_LEN, BATCH, WINDOW = 6, 4, 64, 1000, 64, 2, 16
CHUNK = 8
BOUNDS = {name: bound for name, bound in real_modules.BOUNDS.items() if name != "total"}
"""Errors beyond twice the standard error; relative but the correlation's."""

_NARROW = ("embedding_size", "word_embed_proj_dim", "input_embedding_size")
_NARROW += ("output_embedding_size",)
_HEAD = ("head_dim", "d_kv")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
_TOKENS += ("decoder_start_token_id",)
_WINDOWS = ("sliding_window", "local_attention")


def names() -> list[str]:
    """Of every released config."""
    return sorted(file.stem for folder in CONFIGS for file in folder.glob("*.json"))


def file_of(name: str) -> Path:
    """Where a released config lies; its measurement lies in the file of `DATA` named as its
    folder."""
    return next(file for folder in CONFIGS if (file := folder / f"{name}.json").exists())


def released(name: str) -> dict[str, Any]:
    """A config as it was released."""
    entries: dict[str, Any] = json.loads(file_of(name).read_text(encoding="utf-8"))
    return entries


def shrunk(name: str, layers: int = DEPTH) -> dict[str, Any]:
    """A released config with fewer layers, features, tokens and rows; all else is its own."""
    entries = released(name)

    def first(names: tuple[str, ...]) -> Any:
        return next((entries[n] for n in names if entries.get(n) is not None), None)

    depth, width, heads = first(LAYERS), first(WIDTHS), first(HEADS)
    small = copy.deepcopy(entries)

    def put(names: tuple[str, ...], value: int) -> None:
        small.update({n: value for n in names if isinstance(entries.get(n), int)})

    new_width = N_HEADS * D_HEAD
    for entry, value in entries.items():
        if isinstance(value, list) and len(value) == depth:
            small[entry] = value[:layers]
    put(LAYERS, layers)
    put(WIDTHS, new_width)
    put(HEADS, N_HEADS)
    put(_HEAD, D_HEAD)
    shared = entries.get("num_key_value_heads")
    if shared is not None:
        small["num_key_value_heads"] = max(1, N_HEADS * shared // heads)
    for entry in (*FFN_WIDTHS, *_NARROW):
        if isinstance(entries.get(entry), int):
            small[entry] = 16 * max(1, round(entries[entry] * new_width / width / 16))
    if "rotary_dim" in entries:
        small["rotary_dim"] = entries["rotary_dim"] * D_HEAD * heads // width
    put(_WINDOWS, WINDOW)
    put(("vocab_size", "decoder_vocab_size"), VOCAB)
    for entry in _TOKENS:
        token = entries.get(entry)
        if isinstance(token, int) and token >= VOCAB:
            small[entry] = VOCAB - 1 - _TOKENS.index(entry)
        elif isinstance(token, list):
            small[entry] = 2
    small.update({entry: 0.0 for entry in entries if entry.endswith("layerdrop")})
    put(("image_size",), 32)
    put(("patch_size", "encoder_stride"), 8)
    for part in ("short_factor", "long_factor"):
        factors = (entries.get("rope_scaling") or {}).get(part)
        if factors:
            pairs = round(D_HEAD * entries.get("partial_rotary_factor", 1.0)) // 2
            small["rope_scaling"][part] = factors[:: len(factors) // pairs][:pairs]
    return small


def module(config: Mapping[str, Any], seed: int) -> Any:
    """The real class of a config, drawn by its own rule."""
    from moments.torch.huggingface_modules import build_module

    if config["model_type"] in READERS:
        return build_module(config, seed)
    import torch

    from moments.torch import from_config

    settings, _ = from_config.settings(config)
    made = from_config.module_class(config, settings)
    torch.manual_seed(seed)
    return made(settings)


def task(config: Mapping[str, Any]) -> str:
    kind = config["model_type"]
    if kind in READERS:
        return READERS[kind].task
    return "masked" if "MaskedLM" in config["architectures"][0] else "causal"


def batch(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a module reads, the same in every draw."""
    from moments.torch.huggingface_modules import module_batch
    from moments.torch.text import mask_tokens, tokenize

    if config["model_type"] in READERS:
        images = task(config) == "images"
        return module_batch(config, seq_len=None if images else SEQ_LEN, batch=BATCH, seed=0)
    ids = tokenize(VOCAB, SEQ_LEN, BATCH)
    inputs, labels = mask_tokens(ids, VOCAB, 0) if task(config) == "masked" else (ids, ids)
    return {"input_ids": inputs, "labels": labels}


def predicted(config: Mapping[str, Any]) -> moments.Prediction:
    """The config read and predicted on the same tokens."""
    data, of = batch(config), task(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        model = moments.from_huggingface(dict(config), seq_len=None if of == "images" else SEQ_LEN)
        if of == "images":
            return moments.predict(model, pixels=data["pixel_values"], targets=data["labels"])
        if of == "translation":
            labels, start = data["labels"], config.get("decoder_start_token_id", 0)
            shifted = np.roll(labels, 1, axis=1)
            if config["model_type"] != "mbart":  # whose module begins with the last label
                shifted[:, 0] = start
            read = {"token_ids": data["input_ids"]}
            return moments.predict(
                model, token_ids=shifted, targets=data["labels"], encoder_inputs=read
            )
        given = {} if of == "causal" else {"targets": data["labels"]}
        return moments.predict(model, token_ids=data["input_ids"], tokens=True, **given)


# --- measurement ---------------------------------------------------------------------------------


def measured(name: str, seeds: int) -> dict[str, Any]:
    """Means and standard errors over draws of the real module."""
    import transformers

    from moments.torch import measure

    transformers.logging.set_verbosity_error()
    config = shrunk(name)
    start = 1000 * (zlib.crc32(name.encode()) % 1_000_000)
    result = measure(lambda seed: module(config, seed), batch(config), seeds=seeds, seed=start)
    rows: dict[str, Any] = {"seeds": seeds, "loss": _digits([result.loss, result.loss_stderr])}
    for quantity in ("variance", "correlation", "grad_variance"):
        draws = np.asarray(result.samples[quantity])
        rows[quantity] = [
            _digits(draws.mean(0)),
            _digits(draws.std(0, ddof=1) / math.sqrt(len(draws))),
        ]
    rows["weights"] = {
        f"{row['layer']} {row['weight']}": _digits(
            [row["squared_norm"], row["squared_norm_stderr"]]
        )
        for row in result.weight_gradient_rows
        if row["squared_norm"] > 1e-12
    }
    return rows


def _digits(values: Any) -> list[float]:
    return [float(f"{v:.4g}") for v in np.ravel(values)]


def stored() -> dict[str, Any]:
    """Of every config that was measured."""
    return {k: v for folder in CONFIGS for k, v in _stored(folder.name).items()}


def _stored(folder: str) -> dict[str, Any]:
    file = DATA / f"{folder}.json"
    return json.loads(file.read_text()) if file.exists() else {}


# --- comparison ----------------------------------------------------------------------------------


def errors(name: str, p: moments.Prediction | None = None) -> dict[str, tuple[float, float, str]]:
    """Of every quantity the error that exceeds twice its standard error most: error, standard
    error, and where."""
    rows, config = stored()[name], shrunk(name)
    p = predicted(config) if p is None else p
    result = {}
    for quantity in ("variance", "correlation", "grad_variance"):
        mean, error = np.array(rows[quantity])
        scale = 1.0 if quantity == "correlation" else mean
        gaps = (np.asarray(getattr(p, quantity)) - mean) / scale
        result[quantity] = _worst(gaps, error / scale, [str(n) for n in range(len(mean))])
    loss, error = rows["loss"]
    result["loss"] = float(p.loss) / loss - 1, error / loss, ""
    known = {
        f"{row.layer} {row.weight}": float(row.squared_norm)
        for row in p.weight_gradients().itertuples()
    }
    # One table of relative biases gathers what all layers send it, and one token table what both
    # stacks do.
    shared = [v for k, v in known.items() if k.endswith(" relative_bias")]
    each = config["model_type"] == "umt5"  # whose layers have a table each
    known["0 relative_bias"] = shared[0] if each and shared else sum(shared)
    if p.encoder is not None:
        rows_read = p.encoder.weight_gradients().itertuples()
        known["0 token"] += sum(float(r.squared_norm) for r in rows_read if r.weight == "token")
    matrices = {
        k: v
        for k, v in rows["weights"].items()
        if not k.endswith((".bias", ".gain", "LayerNorm.weight", ".branch_scale"))
    }
    factored = getattr(p.model.head, "factor_variance", None) is not None
    matrices = {k if k in known else _ours(k, factored): v for k, v in matrices.items()}
    missing = [k for k in matrices if k not in known]
    if missing:
        result["missing"] = 1.0, 0.0, ", ".join(missing[:4])
    there = [k for k in matrices if k in known]
    mean, error = np.array([matrices[k] for k in there]).T
    gaps = np.array([known[k] for k in there]) / mean - 1
    result["matrices"] = _worst(gaps, error / mean, there)
    return result


# Parameters before layer 1 that a module's reading gives no role.
_NAMES = {
    "embeddings_project.weight": "factor",
    "project_in.weight": "factor",
    "position_embeddings.weight": "position",
    "class": "segment",
}


def _ours(key: str, factored: bool) -> str:
    """Our name of a measured matrix."""
    layer, name = key.split(" ")
    if found := re.fullmatch(r"decoder\.block\.(\d+)\..*relative_attention_bias\.weight", name):
        return f"{int(found[1]) + 1} relative_bias"
    if factored and name == "head.transform":
        name = "head.factor"
    result = (ours for theirs, ours in _NAMES.items() if name.endswith(theirs))
    return f"{layer} {next(result, name)}"


def _worst(gaps: np.ndarray, stderr: np.ndarray, where: list[str]) -> tuple[float, float, str]:
    index = int(np.argmax(np.abs(gaps) - 2 * stderr))
    return float(gaps[index]), float(stderr[index]), where[index]


def failures(name: str, result: Mapping[str, tuple[float, float, str]]) -> list[str]:
    """Quantities whose error exceeds its bound beyond twice the standard error."""
    return [
        quantity
        for quantity, (gap, error, _) in result.items()
        if abs(gap) - 2 * error > BOUNDS.get(quantity, 0.0)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("measure", "table"))
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=48)
    given = parser.parse_args()
    for name in given.names or names():
        start = time.perf_counter()
        if given.action == "measure":
            if stored().get(name, {}).get("seeds", 0) >= given.seeds:
                continue
            try:
                result = measured(name, given.seeds)
            except moments.MomentsError as error:
                print(f"{name}: {error}", flush=True)
                continue
            folder = file_of(name).parent.name
            rows = _stored(folder) | {name: result}
            lines = (f"{json.dumps(k)}: {json.dumps(rows[k])}" for k in sorted(rows))
            (DATA / f"{folder}.json").write_text("{" + ",\n".join(lines) + "}\n")
            print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
            continue
        if name not in stored():
            print(f"{name}: not measured", flush=True)
            continue
        try:
            rows_found = errors(name)
        except moments.MomentsError as error:
            print(f"{name}: refused: {error}", flush=True)
            continue
        words = ", ".join(
            f"{k} {v[0]:+.3f} ({v[1]:.3f}) {v[2]}".strip() for k, v in rows_found.items()
        )
        bad = failures(name, rows_found)
        print(f"{name}: {'holds' if not bad else 'FAILS ' + ' '.join(bad)}: {words}", flush=True)


if __name__ == "__main__":
    main()
