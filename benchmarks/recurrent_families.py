"""Families with recurrences at a small size, drawn by transformers' own initialisation.

    python benchmarks/recurrent_families.py [KIND ...]    # writes data/recurrent_families.json

Of one text: the stream's variances, the loss, and the squared gradient of every parameter, whose
names are translated; means over draws with their standard errors, which
`tests/test_recurrent_families.py` compares.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from moments.model.huggingface.sizes import sized_config

STORE = Path(__file__).parent / "data" / "recurrent_families.json"
KINDS = ("lfm2", "mamba2", "qwen3_next", "bamba", "minimax")
HYBRIDS = ("granitemoehybrid", "nemotron_h", "falcon_h1", "jamba", "kimi_linear")
HYBRIDS += ("mamba", "falcon_mamba", "recurrent_gemma", "gemma4_text")
VARIANTS = ("gemma4_experts", "gemma4_shared")
"""Of kinds above, by other entries."""
LENGTH, LAYERS, DRAWS = 16, 2, 48
_DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2}
_MAMBA2 |= {"mamba_expand": 2, "num_key_value_heads": 2}
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
    "granitemoehybrid": _MAMBA2
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    | {"shared_intermediate_size": 48, "initializer_range": 0.1, "embedding_multiplier": 12}
    | {"attention_multiplier": 0.0625, "residual_multiplier": 0.22, "logits_scaling": 6}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
    | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]}
    | {"n_routed_experts": 4, "moe_intermediate_size": 32, "initializer_range": 0.1}
    | {"moe_shared_expert_intermediate_size": 48, "head_dim": 16, "intermediate_size": 128},
    "falcon_h1": _MAMBA2
    | {"mamba_d_ssm": 128, "initializer_range": 0.1, "attention_in_multiplier": 0.9}
    | {"attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656854249492381}
    | {"key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "ssm_in_multiplier": 1.25}
    | {"mlp_multipliers": [0.8838834764831845, 0.5859375], "ssm_out_multiplier": 0.5}
    | {"ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]},
    "jamba": {"mamba_d_state": 16, "mamba_dt_rank": 4, "num_experts": 4, "initializer_range": 0.05}
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "intermediate_size": 64},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 8, "num_local_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "initializer_range": 0.06}
    | {"kv_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
    | {"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    "mamba": {"state_size": 16, "time_step_rank": 4, "tie_word_embeddings": False},
    "falcon_mamba": {"state_size": 16, "time_step_rank": 4, "tie_word_embeddings": False},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_key_value_heads": 1}
    | {"attention_window_size": 8, "lru_width": 64, "w_init_variance_scale": 0.2},
    "gemma3n_text": {"head_dim": 16, "num_key_value_heads": 2, "num_kv_shared_layers": 0}
    | {"laurel_rank": 8, "layer_types": ["sliding_attention", "full_attention"]}
    | {"sliding_window": 8, "hidden_size_per_layer_input": 16},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2}
    | {"sliding_window": 8, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_experts": {"head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2}
    | {"sliding_window": 8, "hidden_size_per_layer_input": 0, "enable_moe_block": True}
    | {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32, "initializer_range": 0.1}
    | {"layer_types": ["sliding_attention", "full_attention"], "model_type": "gemma4_text"},
    "gemma4_shared": {"head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2}
    | {"sliding_window": 8, "hidden_size_per_layer_input": 64, "num_kv_shared_layers": 2}
    | {"num_hidden_layers": 4, "use_double_wide_mlp": True, "initializer_range": 0.1}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "model_type": "gemma4_text"},
    "qwen3_next": _DELTA
    | _EXPERTS
    | {"linear_num_value_heads": 16, "num_key_value_heads": 2, "head_dim": 16}
    | {"layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.03}
    | {"shared_expert_intermediate_size": 48},
}
# Parts of parameters' names, and what they are called here
_MAMBA = {
    "in_proj": "value mixer_gate",
    "x_proj": "mixer_step_down key query",
    r"dt_proj\.weight": "mixer_step",
    r"dt_proj\.bias": "mixer_step.bias",
    "out_proj": "output",
    r"conv1d\.weight": "value.taps",
    r"conv1d\.bias": "value.taps.bias",
    "A_log": "rate",
    r"\.D$": "skip",
}
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
    "granitemoehybrid": {
        r"mamba\.in_proj": "query key value mixer_gate mixer_step",
        "out_proj|o_proj": "output",
        "dt_bias": "mixer_step.bias",
        "A_log": "rate",
        r"conv1d\.weight": "query.taps key.taps value.taps",
        r"mamba\.norm": "mixer_norm.gain",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "router": "router",
        r"experts\.gate_up": "gate ffn_in",
        r"experts\.down": "ffn_out",
        "input_linear": "shared_gate shared_ffn_in",
        "output_linear": "shared_ffn_out",
        "lm_head": "head",
    },
    "nemotron_h": {
        "in_proj": "query key value mixer_gate mixer_step",
        "out_proj|o_proj": "output",
        r"conv1d\.weight": "query.taps key.taps value.taps",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        r"shared_experts\.up": "shared_ffn_in",
        r"shared_experts\.down": "shared_ffn_out",
        r"up_proj": "ffn_in",
        r"down_proj": "ffn_out",
        r"gate\.weight": "router",
        "lm_head": "head",
    },
    "falcon_h1": {
        "in_proj": "mixer_query mixer_key mixer_value mixer_gate mixer_step",
        "out_proj": "mixer_output",
        "o_proj": "output",
        r"conv1d\.weight": "mixer_query.taps mixer_key.taps mixer_value.taps",
        r"\.D$": "skip",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "gate_proj": "gate",
        "up_proj": "ffn_in",
        "down_proj": "ffn_out",
        "lm_head": "head",
    },
    "jamba": _MAMBA
    | {
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "o_proj": "output",
        r"experts\.gate_up": "gate ffn_in",
        "router": "router",
        "gate_proj": "gate",
        "up_proj": "ffn_in",
        "down_proj": "ffn_out",
        "lm_head": "head",
    },
    "kimi_linear": {
        r"0\.self_attn\.q_proj|1\.self_attn\.q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        r"conv1d": "query.taps key.taps value.taps",
        "f_a_proj": "mixer_step_down",
        "f_b_proj": "mixer_step",
        "g_a_proj": "mixer_gate_down",
        "g_b_proj": "mixer_gate",
        r"\.b_proj": "mixer_rate",
        "kv_a_proj": "kv_down",
        "kv_b_proj": "key value",
        "o_proj": "output",
        r"experts\.gate_up": "gate ffn_in",
        r"shared_experts\.gate": "shared_gate",
        r"shared_experts\.up": "shared_ffn_in",
        r"shared_experts\.down": "shared_ffn_out",
        r"mlp\.gate\.weight": "router",
        "gate_proj": "gate",
        "up_proj": "ffn_in",
        "down_proj": "ffn_out",
        "lm_head": "head",
    },
    "gemma4_text": {
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "o_proj": "output",
        "gate_proj": "gate",
        "up_proj": "ffn_in",
        "down_proj": "ffn_out",
        "q_norm": "query.norm.gain",
        "k_norm": "key.norm.gain",
    },
    "gemma4_experts": {
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "o_proj": "output",
        "mlp.gate_proj": "shared_gate",
        "mlp.up_proj": "shared_ffn_in",
        "mlp.down_proj": "shared_ffn_out",
        r"experts\.gate_up": "gate ffn_in",
        r"experts\.down": "ffn_out",
        r"router\.proj": "router",
        "post_feedforward_layernorm_1": "ffn.shared_norm.gain",
        "post_feedforward_layernorm_2": "ffn.experts_norm.gain",
    },
    "gemma4_shared": {
        "per_layer_model_projection": "per_layer_projection",
        "per_layer_projection_norm": "per_layer.context.gain",
        "embed_tokens_per_layer": "per_layer_table",
        "per_layer_input_gate": "per_layer_gate",
        "per_layer_projection": "per_layer_output",
        "post_per_layer_input_norm": "per_layer.post_norm.gain",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "o_proj": "output",
        "gate_proj": "gate",
        "up_proj": "ffn_in",
        "down_proj": "ffn_out",
    },
    "mamba": _MAMBA,
    "falcon_mamba": _MAMBA,
    "recurrent_gemma": {
        r"linear_x\.weight": "value",
        r"linear_y\.weight": "mixer_gate",
        r"linear_x\.bias": "value.bias",
        r"linear_y\.bias": "mixer_gate.bias",
        r"linear_out\.weight|o_proj\.weight": "output",
        r"conv_1d\.weight": "value.taps",
        r"input_gate_weight": "mixer_input",
        r"recurrent_gate_weight": "mixer_step",
        r"recurrent_param": "rate",
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        r"gate_proj\.weight": "gate",
        r"up_proj\.weight": "ffn_in",
        r"down_proj\.weight": "ffn_out",
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
    of = SMALL[kind].get("model_type", kind)
    return sized_config(of, LAYERS, 64, vocab_size=150, seq_len=32) | SMALL[kind]


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
        base = module.backbone if hasattr(module, "backbone") else module.model
        for layer in base.layers:
            layer.register_forward_hook(
                lambda _, __, out, s=stream: s.append(
                    float((out[0] if isinstance(out, tuple) else out).detach().square().mean())
                )
            )
        loss = module(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.setdefault("stream", []).append(stream)
        found.setdefault("loss", []).append(float(loss.detach()))
        for name, parameter in module.named_parameters():
            roles = next((r for part, r in ROLES[kind].items() if re.search(part, name)), None)
            if roles is not None:
                layer = re.search(r"layers\.(\d+)\.", name)
                place = f"{int(layer[1]) + 1 if layer else len(base.layers) + 1} {roles}"
                square = float(parameter.grad.double().square().sum())
                found.setdefault(place, []).append(square)
    return {
        name: [np.mean(values, 0).tolist(), (np.std(values, 0, ddof=1) / DRAWS**0.5).tolist()]
        for name, values in found.items()
    }


def main() -> None:
    stored = json.loads(STORE.read_text())
    stored |= {kind: measured(kind) for kind in sys.argv[1:] or SMALL}
    STORE.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
