"""Every type of decoder that is read from its config alone, and the dense ones of late, against the
real module at 4 and at 16 layers.

    python benchmarks/every_type.py measure [--names mixtral ...] [--layers 4] [--draws 32]
    python benchmarks/every_type.py table               # predicts all; into docs/accuracy.md

A config is its class's own but for its size (`CHANGES`) and entries of variance .82/width, as 4e-4
is at a width of 2048. Of two stretches of English text: the stream's variances, correlations and
gradients behind every layer, the loss, and the squared gradient of every matrix, whose names are
translated; means over draws with their standard errors in data/every_type.npz.
"""

from __future__ import annotations

import argparse
import re
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import records
import tables

import moments
from moments.model.huggingface.family import SECTIONS
from moments.model.huggingface.sizes import sized_config

NAME = "every_type"
WIDTH, LENGTH, BATCH, VOCAB, DEVIATION = 128, 32, 2, 400, 0.08
FILES = {"dense": ("relatives",), "blocks": ("latent", "moe", "recurrent", "hybrid", "newer")}
BOUNDS = {"variance": 0.02, "correlation": 0.015, "gradient": 0.05, "loss": 0.005}
BOUNDS |= {"matrix": 0.08, "total": 0.04}
"""Errors beyond twice the standard error; relative but the correlation's."""

CHANGES: dict[str, Any] = {
    "initializer_range": DEVIATION,
    "hidden_dropout": 0.0,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "shared_intermediate_size": 96,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "sliding_window": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_d_ssm": 256,
    "mamba_n_groups": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
    "state_size": 16,
    "time_step_rank": 8,
    "mamba_dt_rank": 8,
}
"""Entries of any type that has them."""
_OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "gemma3n_text": {
        "intermediate_size": 8192,
        "laurel_rank": 32,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4_text": {"global_head_dim": 64, "hidden_size_per_layer_input": 0},
    "llama4_text": {"num_experts_per_tok": 1, "intermediate_size_mlp": 512, "interleave": 1},
    "recurrent_gemma": {"lru_width": WIDTH, "attention_window_size": 8, "num_key_value_heads": 1},
    "lfm2": {"block_multiple_of": 32},
    "lfm2_moe": {"block_multiple_of": 32},
    "jamba": {"initializer_range": 0.05},
    "granitemoe": {"attention_multiplier": 1 / 32},
    "granitemoeshared": {"attention_multiplier": 1 / 32},
    "granite_swa": {"attention_multiplier": 1 / 32},
    "granitemoe_swa": {"attention_multiplier": 1 / 32},
    "nemotron": {"head_dim": 32, "num_key_value_heads": 2},
    "ministral": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
}
_LEFT = ("longcat_flash", "openai-gpt")  # two layers in one; a list leaves its layers
_LEFT += ("glm4v_text", "glm4v_moe_text", "qwen2_vl_text", "qwen2_5_vl_text")  # built of a whole
_LEFT += ("qwen3_vl_text", "qwen3_vl_moe_text")
_ROLES: dict[str, str] = {
    r"embed_tokens\.|embeddings?\.|wte\.|embed_in\.": "token",
    r"wpe\.": "position",
    r"altup_projections": "streams.in",
    r"altup_unembed": "streams.out",
    r"altup\.modality_router": "streams.router",
    r"altup\.prediction": "streams.prediction",
    r"altup\.correction": "streams.correction",
    r"laurel\.linear_left": "laurel_down",
    r"laurel\.linear_right": "laurel_up",
    r"per_layer_input_gate": "per_layer_gate",
    r"per_layer_projection": "per_layer_output",
    r"attn\.c_proj": "output",
    r"c_attn|Wqkv|query_key_value": "query key value",
    r"experts\.gate_up": "gate ffn_in",
    r"shared_experts?\.gate_up|shared_mlp\.input_linear": "shared_gate shared_ffn_in",
    r"shared_(experts?|mlp)\.gate_proj": "shared_gate",
    r"shared_(experts?|mlp)\.up_proj": "shared_ffn_in",
    r"shared_(experts?|mlp)\.(down_proj|output_linear)": "shared_ffn_out",
    r"shared_expert_gate": "shared_router",
    r"experts\.down": "ffn_out",
    r"experts\.up": "ffn_in",
    r"input_linear": "gate ffn_in",
    r"output_linear": "ffn_out",
    r"router|(mlp|mixer|feed_forward)\.gate\.": "router",
    r"in_proj_qkvz": "query key value mixer_gate",
    r"in_proj_ba": "mixer_step mixer_rate",
    r"\bqkv_proj": "query key value",
    r"in_proj": "mixer_query mixer_key mixer_value mixer_gate mixer_step|"
    "query key value mixer_gate mixer_step|value mixer_gate",
    r"output_gate": "mixer_gate",
    r"x_proj": "mixer_step_down key query",
    r"dt_proj": "mixer_step",
    r"gate_up_proj": "gate ffn_in",
    r"q_a_proj": "query_down",
    r"kv_a_proj": "kv_down",
    r"kv_b_proj": "key value",
    r"(q_b|q|query)_proj": "query",
    r"(k|key)_proj": "key",
    r"(v|value)_proj": "value",
    r"(o|out|output|dense)_proj|attention\.dense|self_attn\.dense": "output",
    r"gate_proj|\bw1\b": "gate",
    r"up_proj|\bw3\b|fc1|fc_in|c_fc|h_to_4h": "ffn_in",
    r"down_proj|\bw2\b|fc2|fc_out|c_proj|4h_to_h": "ffn_out",
    r"lm_head|embed_out": "head",
}
"""Parts of parameters' names, and what they are called here; the first that fits, and of several
meanings the first whose matrices a layer has."""
_SKIPPED = "norm|ln_|embed_positions|bias|A_log|\\.D$|taps|conv|sinks|rotary|scale|alpha|beta|eps"
_SKIPPED += "|tokens_per_layer|per_layer_model"  # behind a gain that starts at zero


def kinds() -> list[str]:
    """Every type that `table` has."""
    found = [
        kind for section, files in FILES.items() for f in files for kind in SECTIONS[section][f]
    ]
    return sorted(set(found) - set(_LEFT))


def config_of(kind: str, layers: int) -> dict[str, Any]:
    """Of this depth."""
    from moments.model.huggingface import READERS

    defaults = READERS[kind].defaults
    sized = sized_config(kind, layers, WIDTH, vocab_size=VOCAB, seq_len=LENGTH)
    sized |= {name: value for name, value in CHANGES.items() if name in defaults}
    if kind == "lfm2_moe":  # whose default says nothing; every third layer attends, as released
        sized["layer_types"] = ["full_attention" if n % 3 == 2 else "conv" for n in range(layers)]
    if kind == "gemma3n_text":  # sparse gates below, shared keys above
        half = layers // 2
        sized["activation_sparsity_pattern"] = [0.95] * half + [0.0] * (layers - half)
        sized["layer_types"] = ["sliding_attention", "full_attention"] * half
        sized["num_kv_shared_layers"] = half
    return sized | _OWN.get(kind, {})


def text() -> np.ndarray:
    from moments.torch.text import tokenize

    return np.asarray(tokenize(VOCAB, LENGTH, BATCH))


def measured(kind: str, layers: int, draws: int) -> dict[str, Any]:
    """Means and standard errors."""
    import torch
    import transformers

    from moments.torch.huggingface_modules import build_module

    transformers.logging.set_verbosity_error()
    config, ids = config_of(kind, layers), torch.as_tensor(text())
    found: dict[str, list[Any]] = {}
    for seed in range(draws):
        module, stream = build_module(config, seed=seed), []
        blocks = next(
            part
            for name, part in module.named_modules()
            if isinstance(part, torch.nn.ModuleList) and re.search(r"(layers|h|blocks)$", name)
        )

        def kept(_: Any, __: Any, out: Any, stream: list[Any] = stream) -> None:
            out = out[0] if isinstance(out, tuple) else out
            out.retain_grad()
            stream.append(out)

        def entering(_: Any, args: Any, stream: list[Any] = stream) -> None:
            args[0].retain_grad()
            stream.append(args[0])

        giving = list(blocks)
        if kind == "minimax":  # whose stream is what norms leave: the next layer's, and the last
            giving = [*(layer.input_layernorm for layer in blocks[1:]), module.model.norm]
        if kind == "gemma3n_text":  # behind whose last layer the streams are one
            module.model.norm.register_forward_pre_hook(entering)
            giving = blocks[:-1]
        for layer in giving:
            layer.register_forward_hook(kept)
        module.train()
        loss = module(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.setdefault("loss", []).append(float(loss.detach()))
        moved = {"variance": [], "correlation": [], "gradient": []}
        for out in stream:
            x, gradient = out.detach().double(), out.grad.double()
            if x.ndim == 4:  # of several streams the first, and what is added to all
                x, gradient = x[0], gradient.sum(0)
            pairs = x @ x.transpose(-1, -2) / x.shape[-1]
            own, count = pairs.diagonal(dim1=-2, dim2=-1).mean(), pairs.shape[-1]
            off = (pairs.sum() / len(pairs) - own * count) / (count * (count - 1))
            moved["variance"].append(float(own))
            moved["correlation"].append(float(off / own))
            moved["gradient"].append(float(gradient.square().mean()))
        for name, values in moved.items():
            found.setdefault(name, []).append(values)
        for name, parameter in module.named_parameters():
            place = place_of(name, len(blocks))
            if place is None or parameter.grad is None:
                continue
            square = float(parameter.grad.double().square().sum())
            rows = found.setdefault(f"matrix {place}", [])
            if len(rows) > seed:
                rows[seed] += square
            else:
                rows.append(square)
    return {
        name: [np.mean(values, 0), np.std(values, 0, ddof=1) / draws**0.5]
        for name, values in found.items()
    } | {"draws": draws}


def place_of(name: str, layers: int) -> str | None:
    """Of a matrix, its layer and what it is called here."""
    if name.endswith("bias") or re.search(_SKIPPED, name.rpartition(".weight")[0] or name):
        return None
    roles = next((ours for part, ours in _ROLES.items() if re.search(part, name)), None)
    if roles is None:
        return f"? {name}"
    layer = re.search(r"\.(\d+)\.", name)
    ends = {"token": 0, "position": 0, "streams.in": 1, "streams.out": layers}
    usual = int(layer[1]) + 1 if layer else layers + 1
    number = usual if layer and "layers." in name else ends.get(roles, usual)
    return f"{number} {roles}"


def predicted(kind: str, layers: int) -> moments.Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        model = moments.from_huggingface(config_of(kind, layers), seq_len=LENGTH)
        return moments.predict(model, token_ids=text(), tokens=True)


def errors(measured: Mapping[str, Any], p: moments.Prediction) -> dict[str, tuple[Any, ...]]:
    """Of every quantity the error that exceeds twice its standard error most, and where."""
    result: dict[str, tuple[Any, ...]] = {}
    shown = {
        "variance": p.variance[1:],
        "correlation": p.correlation[1:],
        "gradient": p.grad_variance[1:],
    }
    for name, ours in shown.items():
        mean, error = measured[name]
        scale = 1.0 if name == "correlation" else mean
        result[name] = _worst((np.asarray(ours) - mean) / scale, error / scale, range(1, 99))
    loss, error = measured["loss"]
    result["loss"] = float(p.loss / loss - 1), float(error / loss), ""
    rows = p.weight_gradients().set_index(["layer", "weight"]).squared_norm
    known, unknown, scores = set(rows.index), [], []
    for place, (value, error) in _matrices(measured):
        layer, _, roles = place.partition(" ")
        several = roles.split("|")
        if layer != "?" and (int(layer), "mixer_step_down") in known:
            several = several[-1:]  # Mamba's of two parts, not Mamba-2's of five
        meant = ([(layer, role) for role in one.split()] for one in several)
        parts = [[(int(n), role) for n, role in one] for one in meant if layer != "?"]
        there = next((one for one in parts if one and set(one) <= known), None)
        if there is None:
            unknown.append(place)
        elif value > 1e-12:
            if roles == "query" and (gate := (int(layer), "attention_gate")) in known:
                there.append(gate)  # of one matrix with the queries'
            scores.append((sum(rows[part] for part in there), value, error, place.split("|")[0]))
    ours, mean, error = np.array([s[:3] for s in scores]).T
    result["matrix"] = _worst(ours / mean - 1, error / mean, [s[3] for s in scores])
    every = float(mean.sum()), float(np.sqrt((error**2).sum()))
    result["total"] = float(ours.sum() / every[0] - 1), every[1] / every[0], ""
    if unknown:
        result["unknown"] = len(unknown), 0.0, ", ".join(unknown[:3])
    return result


def _matrices(measured: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """By place; of names that had none when they were measured by that which they have now."""
    layers, found = len(measured["variance"][0]), []
    for key, value in measured.items():
        if key.startswith("matrix "):
            place: str | None = key.removeprefix("matrix ")
            if place is not None and place.startswith("? "):
                place = place_of(place[2:], layers)
            if place is not None:
                found.append((place, value))
    return found


def _worst(gaps: Any, stderr: Any, where: Any) -> tuple[float, float, Any]:
    index = int(np.argmax(np.abs(gaps) - 2 * stderr))
    return float(gaps[index]), float(stderr[index]), where[index]


def outside(found: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Quantities beyond their bounds and twice the standard error."""
    return [
        name
        for name, (gap, error, _) in found.items()
        if name in BOUNDS and abs(gap) - 2 * error > BOUNDS[name]
    ]


def _cell(name: str, found: tuple[Any, ...]) -> str:
    gap, error, where = found
    text = tables.percent(gap, error, signed=True)
    text = f"**{text}**" if abs(gap) - 2 * error > BOUNDS[name] else text
    return f"{text} ({where})" if name == "matrix" else text


def write(stored: Mapping[str, Any]) -> None:
    """Predict all that is stored, into docs/accuracy.md."""
    rows, inside = [], 0
    order = sorted(stored, key=lambda key: (key.split()[0], int(key.split()[1])))
    for key in order:
        kind, layers = key.split()
        if kind in _LEFT:
            continue
        found = errors(stored[key], predicted(kind, int(layers)))
        cells = [_cell(name, found[name]) for name in BOUNDS]
        rows.append([kind, layers, int(stored[key]["draws"]), *cells])
        inside += not outside(found)
        print(rows[-1], flush=True)
    header = [
        "type",
        "layers",
        "draws",
        "variance",
        "correlation",
        "gradient",
        "loss",
        "matrix",
        "total",
    ]
    said = f"{inside} of {len(rows)} have nothing outside."
    tables.put("accuracy", "every-type", tables.markdown(header, rows), said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("measure", "table"))
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--layers", type=int, nargs="*", default=[4])
    parser.add_argument("--draws", type=int, default=32)
    given = parser.parse_args()
    if given.action == "table":
        write(records.load(NAME))
        return
    for layers in given.layers:
        for kind in given.names or kinds():
            start, key = time.perf_counter(), f"{kind} {layers}"
            stored = records.load(NAME) if records.exists(NAME) else {}
            try:
                if key in stored and stored[key]["draws"] >= given.draws:
                    continue
                stored[key] = measured(kind, layers, given.draws)
                records.save(NAME, stored)
                found = errors(stored[key], predicted(kind, layers))
            except Exception as error:
                print(f"{key}: {type(error).__name__}: {str(error)[:150]}", flush=True)
                continue
            bad, took = outside(found), time.perf_counter() - start
            words = ", ".join(f"{k} {v[0]:+.3f} ({v[1]:.3f}) {v[2]}" for k, v in found.items())
            said = f"OUT {' '.join(bad)}" if bad else "holds"
            print(f"{key}: {said}: {words}; {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
