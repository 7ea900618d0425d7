"""Configs of types with routed experts: every entry changes the declaration or is named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import moments
from moments import Experts
from moments.errors import DomainError, ValidityWarning
from moments.model.huggingface import OF_BLOCKS
from moments.model.huggingface.moe import READERS as FAMILIES
from moments.model.huggingface.sizes import sized_config

KINDS = pytest.mark.parametrize("kind", sorted(FAMILIES))
# What the classes' own defaults lack to be a model
NEEDED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
}
# By kind or for all: entries at another value
SECOND: dict[str, Any] = {
    "attention_chunk_size": 8,
    "attention_dropout": 0.3,
    "attention_multiplier": 0.3,
    "attn_temperature_tuning": False,
    "embedding_multiplier": 5.0,
    "first_k_dense_replace": 2,
    "floor_scale": 8,
    "head_dim": 16,
    "hidden_act": "relu",
    "initializer_range": 0.05,
    "input_jitter_noise": 0.1,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 80,
    "intermediate_size_mlp": 80,
    "layer_types": ["full_attention", "sliding_attention"],
    "logits_scaling": 3.0,
    "max_position_embeddings": 16,
    "max_window_layers": 0,
    "mlp_only_layers": [0],
    "moe_intermediate_size": 24,
    "moe_k": 3,
    "moe_layer_end_index": 0,
    "moe_layer_interval": 3,
    "moe_layer_start_index": 0,
    "moe_layers": [1],
    "moe_num_experts": 12,
    "moe_num_shared_experts": 3,
    "n_group": 4,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "no_rope_layer_interval": 2,
    "no_rope_layers": [1, 0],
    "num_attention_heads": 2,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "num_local_experts": 12,
    "pad_token_id": 3,
    "partial_rotary_factor": 0.25,
    "residual_multiplier": 0.3,
    "rms_norm_eps": 0.05,
    "rope_parameters": {"rope_theta": 10.0},
    "rope_theta": 10.0,
    "rotary_dim": 2,
    "routed_scaling_factor": 3.0,
    "router_jitter_noise": 0.1,
    "clip_qkv": 2.0,
    "decoder_sparse_step": 2,
    "hidden_size": 64,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "sliding_window": 4,
    "topk_group": 2,
    "vocab_size": 90,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4}
# Entries that say something beside others alone
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen2_moe", "max_window_layers"): WINDOWS,
    ("qwen2_moe", "layer_types"): WINDOWS,
    ("qwen2_moe", "sliding_window"): {"use_sliding_window": True},
    ("qwen2_moe", "use_sliding_window"): {"sliding_window": 4},
    ("qwen3_moe", "sliding_window"): {"use_sliding_window": True},
    ("qwen3_moe", "use_sliding_window"): {"sliding_window": 4},
    ("dots1", "max_window_layers"): {"sliding_window": 4},
    ("dots1", "layer_types"): {"sliding_window": 4},
    ("dots1", "sliding_window"): {"max_window_layers": 0},
    ("glm4_moe", "topk_group"): {"n_group": 4},
    ("dots1", "topk_group"): {"n_group": 4},
}
# Read for an entry beside it that is known to say the same, or at lengths that these do not have
SILENT = {
    *((kind, "partial_rotary_factor") for kind in FAMILIES if kind != "glm4_moe"),
    ("llama4_text", "attn_scale"),
    ("llama4_text", "attn_temperature_tuning"),
    ("llama4_text", "layer_types"),
    ("minimax_m2", "rotary_dim"),
}


def config_of(kind: str) -> dict[str, Any]:
    config = sized_config(kind, 2, 32, vocab_size=150, seq_len=24)
    return config | {"moe_layer_start_index": 1} if kind == "ernie4_5_moe" else config


def quiet(config: Any, **options: Any) -> moments.Transformer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        return moments.from_huggingface(config, **options)


@KINDS
def test_a_missing_entry_means_what_the_class_means(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    given = NEEDED.get(kind, {})
    config = transformers.AutoConfig.for_model(kind, **given)
    assert quiet({"model_type": kind} | given) == quiet(config)
    assert kind in OF_BLOCKS
    with pytest.warns(ValidityWarning, match=r"spectral_gate = 3 is not modelled: no entry of"):
        moments.from_huggingface(config_of(kind) | {"spectral_gate": 3})


@KINDS
def test_every_entry_that_is_read_changes_the_declaration_or_is_named(kind: str) -> None:
    family = OF_BLOCKS[kind]
    for entry in sorted(family.entries(config_of(kind))):
        if (kind, entry) in SILENT or (
            family.usual.get(entry) is ... and (kind, entry) not in BESIDE
        ):
            continue
        base = config_of(kind) | BESIDE.get((kind, entry), {})
        usual = base.get(entry, family.defaults.get(entry))
        if entry not in SECOND and not isinstance(usual, bool):
            assert entry not in family.defaults, entry
            continue
        changed, refusal = base | {entry: SECOND.get(entry, not usual)}, ""
        first, second = quiet(base), None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                second = moments.from_huggingface(changed)
            except DomainError as error:
                refusal = str(error)
        said = any(f"{entry} = " in str(w.message) for w in caught)
        assert f"{entry} = " in refusal or (second is not None and second != first) or said, entry


LLAMA = {"architectures": ["X"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu"}
LLAMA |= {"initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}
LLAMA |= {"tie_word_embeddings": False, "attention_dropout": 0.0, "transformers_version": "4.51.0"}
RELEASED: dict[str, dict[str, Any]] = {
    # Entries as checkpoints have them, those that say nothing here included.
    "mixtral": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768}
    | {"num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32}
    | {"num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False}
    | {"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02}
    | {"sliding_window": None, "vocab_size": 32000},
    "qwen3_moe": LLAMA
    | {"attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048}
    | {"intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48}
    | {"mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True}
    | {"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8}
    | {"num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False}
    | {"rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0}
    | {"router_aux_loss_coef": 0.001, "sliding_window": None, "use_sliding_window": False}
    | {"vocab_size": 151936},
    "olmoe": LLAMA
    | {"attention_bias": False, "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024}
    | {"max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16}
    | {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16}
    | {"num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1}
    | {"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0}
    | {"router_aux_loss_coef": 0.01, "vocab_size": 50304},
}


@pytest.mark.parametrize("kind", sorted(RELEASED))
def test_released_configs_are_read_without_a_warning(kind: str) -> None:
    model = moments.from_huggingface({"model_type": kind} | RELEASED[kind])
    block = model.ffns[-1]
    assert isinstance(block, Experts)
    given = {
        "mixtral": (8, 2, "chosen", None),
        "qwen3_moe": (128, 8, "chosen", 768),
        "olmoe": (64, 8, "all", None),
    }[kind]
    assert (block.experts, block.chosen, block.normalised, block.d_ff) == given


def test_which_layers_are_routed() -> None:
    """Dense layers at the start, in between, and where a list says so."""

    def routed(kind: str, **changes: Any) -> list[int]:
        model = quiet(sized_config(kind, 4, 32) | NEEDED.get(kind, {}) | changes)
        return [n for n, block in enumerate(model.ffns) if block is not None]

    assert routed("glm4_moe", first_k_dense_replace=3) == [3]
    assert routed("qwen2_moe", decoder_sparse_step=2) == [1, 3]
    assert routed("qwen3_moe", mlp_only_layers=[0, 2]) == [1, 3]
    assert routed("ernie4_5_moe", moe_layer_start_index=1, moe_layer_end_index=2) == [1, 2]
    assert routed("llama4_text", interleave_moe_layer_step=2) == [1, 3]
    dense = quiet(sized_config("llama4_text", 2, 32) | {"intermediate_size_mlp": 96})
    assert dense.d_ff == 96
    mixers = quiet(sized_config("llama4_text", 4, 32)).mixers
    assert [one is not None for one in mixers] == [True, True, True, False]  # normed where turned
    with pytest.raises(DomainError, match="first_k_dense_replace = -1"):
        routed("glm4_moe", first_k_dense_replace=-1)
