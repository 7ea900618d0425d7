"""Types that read pictures or sound, and their text towers: real modules measured.

    python benchmarks/pictures_and_sound.py measure [--names deit-base-distilled ...] [--seeds 32]
    python benchmarks/pictures_and_sound.py table [--names ...]

`tests/perception_configs/` has released configs, written from memory of what was published and not
compared with the files themselves. `shrunk` takes from one its size alone. Every draw is
transformers' own. A module with a loss of its own receives that loss's gradient; of the others the
last layer's output receives independent normal entries of variance 1. Means over draws and their
standard errors are stored in data/pictures_and_sound.json, which
`tests/test_pictures_and_sound.py` compares with predictions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import moments

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "perception_configs"
STORE = Path(__file__).parent / "data" / "pictures_and_sound.json"
WIDTH, HEADS, VOCAB, SEQ_LEN = 256, 4, 300, 24
DEEP = ("deit-base-distilled", "clip-vit-base-patch32 vision", "siglip-base-patch16 text")
"""Measured at 16 layers too."""
BOUNDS = {"variance": 0.02, "correlation": 0.015, "grad_variance": 0.05, "loss": 0.005}
MATRICES, TOTAL = 0.08, 0.04


def released(name: str) -> dict[str, Any]:
    """The entries of a config; of one with two towers the name says which, "clip... vision"."""
    file, _, tower = name.partition(" ")
    entries: dict[str, Any] = json.loads((CONFIGS / f"{file}.json").read_text(encoding="utf-8"))
    return entries[f"{tower}_config"] if tower in ("text", "vision") else entries


def names() -> list[str]:
    """Of every config, or tower of one, and those that are measured at 16 layers."""
    result = []
    for file in sorted(CONFIGS.glob("*.json")):
        towers = "text_config" in json.loads(file.read_text(encoding="utf-8"))
        result += [f"{file.stem} {t}" for t in ("text", "vision")] if towers else [file.stem]
    return result + [f"{name} 16" for name in DEEP]


def shrunk(name: str) -> dict[str, Any]:
    """A released config at another size; dropout and what masks or drops layers is off."""
    deep = name.endswith(" 16")
    entries = dict(released(name.removesuffix(" 16")))
    small: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 16 if deep else 4}
    small |= {"num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH, "patch_size": 8}
    small |= {"image_size": 32, "vocab_size": VOCAB, "max_position_embeddings": SEQ_LEN}
    small |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "stage_names": None}
    small |= {"out_indices": None, "out_features": None, "drop_path_rate": 0.0, "mask_ratio": 0.0}
    small |= {"max_length": 40, "num_mel_bins": 24, "frequency_stride": 5, "time_stride": 5}
    small |= {"vision_use_head": False, "d_model": WIDTH, "encoder_ffn_dim": 4 * WIDTH}
    small |= {"decoder_ffn_dim": 3 * WIDTH, "encoder_layers": 4, "decoder_layers": 4}
    small |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    small |= {"max_source_positions": 20, "max_target_positions": SEQ_LEN}
    small |= {"num_conv_pos_embeddings": 16}
    small |= {"num_conv_pos_embedding_groups": 4, "apply_spec_augment": False}
    small |= {"decoder_start_token_id": 3, "suppress_tokens": None, "begin_suppress_tokens": None}
    for entry, value in small.items():
        wanted = entries["model_type"] == "siglip_vision_model" and entry == "vision_use_head"
        if entry in entries or wanted:
            entries[entry] = value
    return entries | {k: 0.0 for k, v in entries.items() if "drop" in k and isinstance(v, float)}


def given(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a module reads, the same in every draw: photographs, a spectrogram, a text."""
    from moments.layers.images import photograph

    if "image_size" in config:
        both = [photograph(config["image_size"], top) for top in (True, False)]
        return {"pixel_values": np.concatenate(both)}
    if config["model_type"].startswith("audio"):
        return {"input_values": _spectrogram(config["max_length"], config["num_mel_bins"])}
    if "conv_dim" in config:
        return {"input_values": _waveform(320 * SEQ_LEN + 80)}
    ids = np.random.default_rng(0).integers(4, 60, (2, SEQ_LEN))
    if config["model_type"] == "whisper":
        frames = 2 * config["max_source_positions"]
        features = _spectrogram(frames, config["num_mel_bins"]).transpose(0, 2, 1)
        return {"input_features": features, "labels": ids}
    return {"input_ids": ids}


def _spectrogram(frames: int, bins: int) -> np.ndarray:
    """Two pieces of a photograph's brightness, centred and of variance 1 / 4, as AST reads sound:
    neighbours are alike in either direction, as in a spectrogram of speech."""
    from moments.layers.images import photograph

    grey = photograph(64)[0].mean(0)
    pieces = np.stack([grey[:frames, :bins], grey[-frames:, -bins:]])
    return (pieces - pieces.mean()) / (2 * pieces.std())


def _waveform(samples: int) -> np.ndarray:
    """A tone with overtones that glides and swells, with noise: centred and of variance 1, (1,
    samples) at 16 kHz, as wav2vec 2.0 reads sound."""
    time = np.arange(samples) / 16000
    phase = 2 * np.pi * (120 * time + 60 * time**2)
    wave = sum(np.sin(k * phase) / k for k in range(1, 12)) * (1 + np.sin(9 * time))
    wave = wave + 0.1 * np.random.default_rng(0).standard_normal(samples)
    return ((wave - wave.mean()) / wave.std())[None]


def predicted(config: dict[str, Any], entering: Any = None) -> moments.Prediction:
    """The config read and predicted on the same input; `entering` is the kernel of what enters
    layer 1 where convolutions over a waveform make it."""
    data = given(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        if "input_ids" in data:
            model = moments.from_huggingface(config, seq_len=SEQ_LEN)
            return moments.predict(model, token_ids=data["input_ids"], tokens=True)
        if entering is not None:
            model = moments.from_huggingface(config, seq_len=len(entering))
            return moments.predict(model, kernel=entering)
        model = moments.from_huggingface(config)
        if "labels" in data:
            shifted = np.pad(data["labels"][:, :-1], ((0, 0), (1, 0)), constant_values=3)
            read = {"pixels": data["input_features"][:, None]}
            return moments.predict(
                model, token_ids=shifted, targets=data["labels"], encoder_inputs=read
            )
        pixels = data.get("pixel_values")
        if pixels is None:
            pixels = data["input_values"].transpose(0, 2, 1)[:, None]
        targets = {} if model.head is None else {"targets": np.array([0, 1])}
        return moments.predict(model, pixels=pixels, **targets)


# --- measurement ----------------------------------------------------------------------------------

ROLES = {
    r"encoder_attn\.q_proj": "cross_query",
    r"encoder_attn\.k_proj": "cross_key",
    r"encoder_attn\.v_proj": "cross_value",
    r"encoder_attn\.out_proj": "cross_output",
    r"q_proj": "query",
    r"k_proj": "key",
    r"v_proj": "value",
    r"(o|out)_proj": "output",
    r"fc1|up_proj|intermediate_dense": "ffn_in",
    r"fc2|down_proj|output_dense": "ffn_out",
    r"layers\.\d+\.layer_norm": "attention.norm.gain",
    r"gate_proj": "gate",
    r"layernorm_before|norm1": "attention.norm.gain",
    r"layernorm_after|norm2": "ffn.norm.gain",
    r"lambda_1|layer_scale1": "attention.layer_scale",
    r"lambda_2|layer_scale2": "ffn.layer_scale",
    r"position_embedding(s)?": "position",
    r"token_embedding|embed_tokens": "token",
    r"conv1": "convolution_1",
    r"conv2": "convolution_2",
    r"self_attn_layer_norm": "attention.norm.gain",
    r"encoder_attn_layer_norm": "cross.norm.gain",
    r"final_layer_norm": "ffn.norm.gain",
    r"cls_token|class_embedding": "class",
    r"distillation_token|register_tokens": "register",
    r"patch_embedding(s)?(\.projection)?": "patch",
    r"classifier(\.dense)?": "head",
    r"pooler\.layernorm|classifier\.layernorm": "head.norm.gain",
    r"pre_layrnorm": "embedding.norm.gain",
    r"\blayernorm": "final.norm.gain",
}


def place(name: str) -> str | None:
    """Layer and role of a parameter; None: it has none here."""
    layer = re.search(r"layers?\.(\d+)\.", name)
    stack = "encoder " if name.startswith("model.encoder.") else ""
    for pattern, role in ROLES.items():
        if re.search(rf"\b({pattern})\b", name):
            if name.endswith(".bias"):
                role = f"{role.removesuffix('.gain')}.bias"
            return f"{stack}{int(layer[1]) + 1 if layer else 0} {role}"
    return None


def draw(config: dict[str, Any], seed: int) -> dict[str, Any]:
    """One module of the config: moments of its stream and the squared gradient of every part."""
    import torch

    from moments.torch.huggingface_modules import build_module

    module = build_module(config, seed=seed).eval()
    if config["model_type"] == "vit_mae":
        # Its class's rule, which transformers 5 skips: a fresh module has no positions.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module.embeddings.patch_embeddings.projection._is_hf_initialized = False
            module.embeddings.initialize_weights()
    data = {name: torch.as_tensor(value) for name, value in given(config).items()}
    data = {k: v.float() if v.is_floating_point() else v for k, v in data.items()}
    depth = int(config["num_hidden_layers"])
    lists = (part for part in module.modules() if isinstance(part, torch.nn.ModuleList))
    stacks = [one for one in lists if len(one) == depth]
    streams = [_watched(one) for one in stacks]
    stream = streams[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config["model_type"] == "vit_mae":
            count = (config["image_size"] // config["patch_size"]) ** 2
            data["noise"] = torch.arange(count).expand(2, -1).float()
        labels = hasattr(module, "classifier") or "labels" in data
        if labels:
            data.setdefault("labels", torch.tensor([0, 1]))
        out = module(**data)
        top = stream[-1]
        loss = out.loss if labels else (top * torch.randn_like(top)).sum()
        loss.backward()
    result: dict[str, Any] = {"loss": float(loss.detach())} if labels else {}
    if "conv_dim" in config:
        entered = stream[0][0].detach().double().numpy()
        result["entering"] = (entered @ entered.T / entered.shape[1]).tolist()
    for stack, one in zip(("", "encoder "), reversed(streams), strict=False):
        for name, tensors in (("", one), ("grad_", [part.grad for part in one])):
            pairs = [_pair_moments(part.detach().double().numpy()) for part in tensors]
            result[f"{stack}{name}variance"] = [own for own, _ in pairs]
            if not name:
                result[f"{stack}correlation"] = [both / own for own, both in pairs]
    for name, parameter in module.named_parameters():
        where = place(name)
        if where is not None and parameter.grad is not None:
            square = float(parameter.grad.double().square().sum())
            result[where] = result.get(where, 0.0) + square
    return result


def _watched(layers: Any) -> list[Any]:
    """The tensors that enter the first and leave every layer, once the module has run."""
    stream: list[Any] = []

    def keep(_: Any, args: Any, kwargs: Any, out: Any = None) -> None:
        tensor = (args[0] if args else kwargs["hidden_states"]) if out is None else out
        tensor = tensor[0] if isinstance(tensor, tuple) else tensor
        tensor.retain_grad()
        stream.append(tensor)

    layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    for layer in layers:
        layer.register_forward_hook(keep, with_kwargs=True)
    return stream


def _pair_moments(x: np.ndarray) -> tuple[float, float]:
    """Mean over tokens of x_i . x_i per feature, and over pairs of one sequence of x_i . x_j."""
    gram = np.einsum("bik,bjk->bij", x, x) / x.shape[-1]
    length = x.shape[1]
    own = np.einsum("bii->", gram)
    return own / (len(x) * length), (gram.sum() - own) / (len(x) * length * (length - 1))


def measured(name: str, seeds: int) -> dict[str, Any]:
    """Means over draws and standard errors."""
    import transformers

    transformers.logging.set_verbosity_error()
    config, start = shrunk(name), 1000 * (zlib.crc32(name.encode()) % 1_000_000)
    rows: dict[str, list[Any]] = {}
    for seed in range(seeds):
        for key, value in draw(config, start + seed).items():
            rows.setdefault(key, []).append(value)
    entering = rows.pop("entering", None)
    kept = {} if entering is None else {"entering": _digits(np.mean(entering, 0))}
    return kept | {
        key: [_digits(np.mean(v, 0)), _digits(np.std(v, 0, ddof=1) / math.sqrt(seeds))]
        for key, v in rows.items()
    }


def _digits(values: Any) -> Any:
    result = [float(f"{v:.4g}") for v in np.ravel(values)]
    return result if np.ndim(values) else result[0]


def stored() -> dict[str, Any]:
    return json.loads(STORE.read_text()) if STORE.exists() else {}


# --- comparison -----------------------------------------------------------------------------------


def failures(name: str) -> list[str]:
    """What is outside of its bound beyond twice the standard error, with both numbers."""
    rows, misses = dict(stored()[name]), []
    entering = rows.pop("entering", None)
    if entering is not None:
        entering = np.reshape(entering, (math.isqrt(len(entering)), -1))
    p = predicted(shrunk(name), entering)
    for stack, (quantity, bound) in itertools.product(("", "encoder "), BOUNDS.items()):
        if stack + quantity not in rows:
            continue
        value, error = map(np.array, rows[stack + quantity])
        of = p.encoder if stack else p
        mine = np.asarray(getattr(of, quantity))
        scale = 1.0 if quantity == "correlation" else value
        for n, gap in enumerate(np.ravel((np.abs(mine - value) - 2 * error) / scale)):
            if gap > bound:
                where = np.ravel(mine)[n], np.ravel(value)[n], np.ravel(error)[n]
                misses.append(
                    f"{stack}{quantity} {n}: " + "{:.4g} for {:.4g} ({:.2g})".format(*where)
                )
    known: dict[str, float] = {}
    for stack, of in (("", p), ("encoder ", p.encoder)):
        for row in () if of is None else of.weight_gradients().itertuples():
            layer = 0 if row.layer > of.model.layers else row.layer
            known[f"{stack}{layer} {row.weight}"] = float(row.squared_norm)
    total = np.zeros(3)
    for key, pair in rows.items():
        if key.removeprefix("encoder ") in BOUNDS:
            continue
        value, error = pair
        if key not in known:
            misses.append(f"{key} has no row")
            continue
        if key.endswith("key.bias") and value < 1e-9 * max(known.values()):
            continue
        total += known[key], value, error**2
        gap = abs(known[key] - value) - 2 * error
        if gap > MATRICES * value:
            misses.append(f"{key}: {known[key]:.4g} for {value:.4g} ({error:.2g})")
    if abs(total[0] - total[1]) - 2 * math.sqrt(total[2]) > TOTAL * total[1]:
        misses.append("total: {:.4g} for {:.4g}".format(*total))
    return misses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("measure", "table"))
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=32)
    asked = parser.parse_args()
    for name in asked.names or names():
        if asked.action == "measure":
            rows = stored() | {name: measured(name, asked.seeds)}
            lines = (f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows))
            STORE.write_text("{" + ",\n".join(lines) + "}\n")
        elif name in stored():
            print(name, failures(name) or "holds", flush=True)


if __name__ == "__main__":
    main()
