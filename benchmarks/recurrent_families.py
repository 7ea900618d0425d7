"""LFM2, Mamba-2 and Qwen3-Next at a small size, drawn by transformers' own initialisation.

    python benchmarks/recurrent_families.py    # writes data/recurrent_families.json

Of one text: the stream's variances, the loss, and the squared gradient of every parameter, whose
names are translated; means over draws with their standard errors, which
`tests/test_recurrent_families.py` compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from moments.model.huggingface.sizes import sized_config

STORE = Path(__file__).parent / "data" / "recurrent_families.json"
KINDS = ("lfm2", "mamba2", "qwen3_next", "bamba", "minimax")
LENGTH, LAYERS, DRAWS = 16, 2, 48
_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SMALL: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}
    | {"block_multiple_of": 32, "initializer_range": 0.1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2}
    | {"rescale_prenorm_residual": True},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
    | {"mamba_expand": 2, "num_key_value_heads": 2, "initializer_range": 0.1}
    | {"attn_layer_indices": [1]},
    "minimax": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "initializer_range": 0.1, "linear_attn_alpha_factor": 1.5}
    | {"mlp_beta_factor": 0.7},
    "qwen3_next": _DELTA
    | _EXPERTS
    | {"linear_num_value_heads": 16, "num_key_value_heads": 2, "head_dim": 16}
    | {"layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.03}
    | {"shared_expert_intermediate_size": 48},
}
# Parts of parameters' names, and what they are called here
ROLES: dict[str, dict[str, str]] = {
    "lfm2": {
        r"conv\.in_proj": "query key value",
        r"conv\.out_proj|self_attn\.out_proj": "output",
        r"conv\.conv": "mixer.taps",
        r"\bw1\b": "gate",
        r"\bw3\b": "ffn_in",
        r"\bw2\b": "ffn_out",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
    },
    "mamba2": {
        "in_proj": "query key value mixer_gate mixer_step",
        "out_proj": "output",
        r"conv1d\.weight": "query.taps key.taps value.taps",
        r"conv1d\.bias": "query.taps.bias key.taps.bias value.taps.bias",
        r"mixer\.norm": "mixer_norm.gain",
        "lm_head": "head",
    },
    "bamba": {
        "in_proj": "query key value mixer_gate mixer_step",
        "out_proj|o_proj": "output",
        r"conv1d\.weight": "query.taps key.taps value.taps",
        r"mamba\.norm": "mixer_norm.gain",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "gate_proj": "gate",
        "up_proj": "ffn_in",
        "down_proj": "ffn_out",
        "lm_head": "head",
    },
    "minimax": {
        "qkv_proj": "query key value",
        "output_gate": "mixer_gate",
        "out_proj|o_proj": "output",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "lm_head": "head",
    },
    "qwen3_next": {
        "in_proj_qkvz": "query key value mixer_gate",
        "in_proj_ba": "mixer_step mixer_rate",
        r"linear_attn\.out_proj|o_proj": "output",
        "q_proj": "query attention_gate",
        "k_proj": "key",
        "v_proj": "value",
        "lm_head": "head",
    },
}


def config_of(kind: str) -> dict[str, Any]:
    return sized_config(kind, LAYERS, 64, vocab_size=150, seq_len=32) | SMALL[kind]


def text() -> np.ndarray:
    return np.random.default_rng(0).integers(3, 60, (1, LENGTH))


def measured(kind: str) -> dict[str, Any]:
    """Means and standard errors, of gradients by layer and roles."""
    import torch

    from moments.torch.huggingface_modules import build_module

    ids = torch.as_tensor(text())
    found: dict[Any, list[Any]] = {}
    for seed in range(DRAWS):
        module, stream = build_module(config_of(kind), seed=seed), []
        base = module.backbone if kind == "mamba2" else module.model
        for layer in base.layers:
            layer.register_forward_hook(
                lambda _, __, out, s=stream: s.append(
                    float((out[0] if isinstance(out, tuple) else out).detach().square().mean())
                )
            )
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        found.setdefault("stream", []).append(stream)
        found.setdefault("loss", []).append(float(loss.detach()))
        for name, parameter in module.named_parameters():
            roles = next((r for part, r in ROLES[kind].items() if re.search(part, name)), None)
            if roles is not None:
                layer = re.search(r"layers\.(\d+)\.", name)
                place = f"{int(layer[1]) + 1 if layer else LAYERS + 1} {roles}"
                square = float(parameter.grad.double().square().sum())
                found.setdefault(place, []).append(square)
    return {
        name: [np.mean(values, 0).tolist(), (np.std(values, 0, ddof=1) / DRAWS**0.5).tolist()]
        for name, values in found.items()
    }


def main() -> None:
    STORE.write_text(json.dumps({kind: measured(kind) for kind in KINDS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
