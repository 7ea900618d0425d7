"""Entries of recurrences' and hybrids' configs: defaults, second values, released models, sides."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from recurrent_families import HYBRIDS, config_of

import moments
from moments.errors import DomainError, ValidityWarning
from moments.model.huggingface import OF_BLOCKS
from moments.model.huggingface.sizes import _NEEDED

transformers = pytest.importorskip("transformers")

EACH = pytest.mark.parametrize("kind", [*HYBRIDS, "gemma3n_text"])
FOLDER = Path(__file__).parent / "recurrent_configs"


def read(config: Any, **options: Any) -> tuple[moments.Transformer, list[str]]:
    """The declaration, and what is said of it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = moments.from_huggingface(config, **options)
    return model, [str(one.message) for one in caught if one.category is ValidityWarning]


@EACH
def test_a_missing_entry_means_what_the_class_means(kind: str) -> None:
    needed = _NEEDED.get(kind, {})
    config = transformers.AutoConfig.for_model(kind, **needed)
    assert read({"model_type": kind} | needed, seq_len=16) == read(config, seq_len=16)


SECOND: dict[str, Any] = {
    "activation_sparsity_pattern": [0.9, 0.0],
    "attn_layer_period": 1,
    "expert_layer_period": 1,
    "block_types": ["attention"],
    "hidden_act": "relu",
    "hidden_activation": "relu",
    "layer_types": ["full_attention"] * 2,
    "layers_block_type": ["mlp"],
    "linear_attn_config": {"num_heads": 2},
    "mamba_hidden_act": "relu",
    "mlp_hidden_act": "relu",
    "mlp_layer_types": ["dense"] * 2,
    "mlp_multipliers": [1.0, 0.5],
    "moe_router_activation_func": "softmax",
    "mtp_layers_block_type": ["mlp"],
    "pad_token_id": 3,
    "per_layer_config": {"1": {"head_dim": 8}},
    "position_embedding_type": "rope",
    "q_lora_rank": 24,
    "rope_parameters": {"full_attention": {"rope_theta": 10.0}, "rope_theta": 10.0},
    "ssm_multipliers": [1.0] * 5,
    "time_step_floor": 0.01,
    "time_step_init_scheme": "constant",
    "time_step_limit": [0.1, 0.2],
    "use_bidirectional_attention": "all",
}
SPARED = {
    # a second name for what another entry says, or read beside that alone
    *(("kimi_linear", name) for name in ("num_experts", "n_routed_experts", "model_max_length")),
    *(("kimi_linear", name) for name in ("num_expert_group", "num_experts_per_token")),
    *(("kimi_linear", name) for name in ("num_shared_experts", "moe_renormalize", "topk_group")),
    *((kind, "num_local_experts") for kind in ("nemotron_h", "jamba")),
    *((kind, name) for kind in ("mamba", "falcon_mamba") for name in ("max_position_embeddings",)),
    ("granitemoehybrid", "num_experts"),
    ("granitemoehybrid", "layers_block_type"),
    ("nemotron_h", "hybrid_override_pattern"),
    ("nemotron_h", "layer_types"),
    ("nemotron_h", "num_hidden_layers"),  # as long as the list of blocks
    ("nemotron_h", "n_shared_experts"),  # their width has an entry
    ("nemotron_h", "topk_group"),  # of one group
    ("nemotron_h", "pad_token_id"),  # whose row is drawn like others
    ("recurrent_gemma", "max_position_embeddings"),
    ("recurrent_gemma", "rotary_pct"),
    ("gemma4_text", "num_global_key_value_heads"),  # beside attention_k_eq_v alone
    ("gemma4_text", "use_double_wide_mlp"),  # of layers that share keys
    ("kimi_linear", "first_k_dense_replace"),  # of one layer with experts
    ("falcon_h1", "mamba_expand"),  # mamba_d_ssm says it
    ("falcon_h1", "mamba_norm_before_gate"),  # without a norm
}


@EACH
def test_every_entry_that_is_read_changes_the_declaration_or_is_named(kind: str) -> None:
    family, config = OF_BLOCKS[kind], config_of(kind)
    first, said = read(config)
    for entry in sorted(family.entries(config)):
        if (kind, entry) in SPARED or family.usual.get(entry) is ...:
            continue
        usual = config.get(entry, family.defaults.get(entry, family.usual.get(entry)))
        if entry in SECOND:
            other = SECOND[entry]
        elif isinstance(usual, bool):
            other = not usual
        elif isinstance(usual, int | float):
            other = 2 * usual or 1
        else:
            assert entry not in family.defaults, entry
            continue
        try:
            second, more = read(config | {entry: other})
        except DomainError:
            continue
        assert second != first or more != said, entry


RELEASED = {
    "granite-4.0-h-tiny": ("mamba2", 36),
    "nemotron-h-8b": ("mamba2", 24),
    "falcon-h1-0.5b": ("parallel mixer", 36),
    "jamba-v0.1": ("mamba", 28),
    "mamba-130m": ("mamba", 24),
    "recurrentgemma-2b": ("rg_lru", 18),
    "kimi-linear-48b": ("gated_delta_net", 20),
    "gemma-3n-e2b": ("attention", 30),
    "gemma-4-31b": ("attention", 60),
    "gemma-4-26b-a4b": ("attention", 30),
    "gemma-4-e2b": ("attention", 35),
}
SAID = {"falcon-h1-0.5b": "mlp_multipliers", "gemma-4-31b": "attention_k_eq_v"}
SAID |= {"gemma-4-26b-a4b": " = True: "}  # of keys that are values, and of experts


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_read_whole(name: str) -> None:
    config = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    model, said = read(config, seq_len=32)
    kinds = [getattr(one, "kind", None) for one in model.mixers]
    assert kinds.count(RELEASED[name][0]) == RELEASED[name][1]
    left = [one for one in said if "text side" not in one]
    assert all(SAID.get(name, "none") in one for one in left), left


@pytest.mark.filterwarnings("ignore::moments.errors.ValidityWarning")
def test_heads_of_512_features_have_numbers() -> None:
    """Of the released entries, fewer layers, on classes of a text with repeats."""
    config = json.loads((FOLDER / "gemma-4-26b-a4b.json").read_text(encoding="utf-8"))
    own = config["text_config"]
    own |= {"num_hidden_layers": 2, "layer_types": own["layer_types"][4:6]}
    model, _ = read(config, seq_len=64)
    prediction = moments.predict(model)
    assert min(prediction.grad_variance) > 0
    assert prediction.experts()["experts"].tolist() == [128, 128]


def test_of_a_model_that_reads_pictures_the_text_side_is_read() -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 64}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 8}}
    model, said = read(whole, seq_len=16)
    assert model == read(text, seq_len=16)[0]
    assert any("'gemma3'" in one and "vision_config" in one for one in said)
    scout = {"model_type": "llama4", "text_config": {"num_hidden_layers": 4}}
    model, said = read(scout, seq_len=16)
    normed = [one is not None for one in model.mixers]
    assert normed == [True, True, True, False]  # the last has no positions
    with pytest.raises(DomainError, match="model_type = 'clip'"):
        moments.from_huggingface({"model_type": "clip", "text_config": {"hidden_size": 8}})


def test_layers_that_share_keys_read_the_last_of_their_kind() -> None:
    config = json.loads((FOLDER / "gemma-4-e2b.json").read_text(encoding="utf-8"))
    model, _ = read(config, seq_len=32)
    sources = [getattr(one, "keys_of", None) for one in model.mixers]
    assert sources == [None] * 15 + [14, 14, 14, 14, 15] * 4
    assert [getattr(one, "d_ff", None) for one in model.ffns] == [None] * 15 + [2 * 6144] * 20
    assert model.per_layer_embedding is not None
    assert model.per_layer_embedding.width == 256
    of = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    with pytest.raises(DomainError, match="num_kv_shared_layers = 2"):
        moments.from_huggingface(config_of("gemma4_text") | of | {"num_kv_shared_layers": 2})
