"""Other sizes of a family's architecture: the entries for depth and width, whatever their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import domain_error, unknown_name
from ...formulas.checks import check_count
from . import READERS
from .entries import NAMES

# All of them, of either stack
LAYERS = (*NAMES["layers"], "num_decoder_layers", "encoder_layers")
WIDTHS = (*NAMES["width"], "embedding_size", "input_embedding_size", "output_embedding_size")
HEADS = (*NAMES["heads"], "encoder_attention_heads", "decoder_attention_heads")
FFN_WIDTHS = (*NAMES["hidden"], "encoder_ffn_dim", "decoder_ffn_dim")
_HEAD_WIDTH = ("head_dim", "d_kv", "query_pre_attn_scalar")
# What a class's own defaults lack to be a model that is read
_NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
}
# Entries with one item per layer, which follow the depth when they are left out
_PER_LAYER = ("layer_types", "attention_layers", "activation_sparsity_pattern")


def at_depth(entries: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The entries of a config with another number of layers, in both stacks where there are two.

    Raises:
        DomainError: `layers` out of range, or a family whose depth no entry says.
    """
    check_count("layers", layers)
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        raise unknown_name("model_type", kind, sorted(READERS))
    changed = {name: value for name, value in entries.items() if name not in _PER_LAYER}
    pattern = READERS[kind].defaults.get("layers_block_type")
    if pattern is not None:  # one entry for every layer, which says how many there are
        changed |= dict.fromkeys({"num_hidden_layers"} & set(entries), layers)
        letters = entries.get("hybrid_override_pattern")
        if letters and "layers_block_type" not in entries:
            return changed | {"hybrid_override_pattern": (letters * layers)[:layers]}
        several = list(entries.get("layers_block_type", pattern)) * layers
        return changed | {"layers_block_type": several[:layers]}
    names = [name for name in LAYERS if name in READERS[kind].defaults or name in entries]
    if not names:
        raise domain_error("model_type", kind, "a family with an entry for its depth")
    if "attention_types" in entries or kind == "gpt_neo":
        if layers % 2:
            raise domain_error("layers", layers, "even: kinds of attention alternate")
        changed["attention_types"] = [[["global", "local"], layers // 2]]
    return changed | dict.fromkeys(names, layers)


def sized_config(
    kind: str,
    layers: int = 6,
    d_model: int = 64,
    *,
    heads: int = 4,
    vocab_size: int = 1000,
    seq_len: int = 64,
) -> dict[str, Any]:
    """A config of a family at another size, everything else as the family has it.

    Keys and values get half the heads where the family can share them; a hidden layer is four times
    as wide as the stream; an image is 32 pixels wide, a patch 8; special tokens are the first ones.

    Args:
        kind: `model_type`.
        layers: of each stack.
        d_model: width of the stream.
        heads: of queries; divides d_model.
        vocab_size: rows of the token table.
        seq_len: the most tokens.

    Raises:
        DomainError: an argument out of range.
    """
    if kind not in READERS:
        raise domain_error("kind", kind, f"one of {', '.join(sorted(READERS))}")
    check_count("heads", heads, least=2)
    if d_model % heads:
        raise domain_error("heads", heads, f"a divisor of d_model = {d_model}")
    defaults = READERS[kind].defaults
    width = d_model // heads
    sizes: dict[str, Any] = dict.fromkeys(WIDTHS, d_model)
    sizes |= dict.fromkeys(HEADS, heads) | dict.fromkeys(FFN_WIDTHS, 4 * d_model)
    sizes |= dict.fromkeys(NAMES["length"], seq_len) | dict.fromkeys(_HEAD_WIDTH, width)
    shared = heads if "kv_lora_rank" in defaults else heads // 2
    sizes |= {"num_key_value_heads": shared, "rotary_dim": width // 2}
    sizes |= {"vocab_size": vocab_size, "image_size": 32, "patch_size": 8}
    extra: dict[str, Any] = {} if kind == "vit" else {"bos_token_id": 1, "eos_token_id": 2}
    if kind == "opt":
        extra["word_embed_proj_dim"] = d_model
    if defaults.get("pad_token_id", 0) >= vocab_size:
        extra["pad_token_id"] = 0
    found = {name: value for name, value in sizes.items() if name in defaults}
    nulls = "rms_norm_eps" in defaults or kind in ("cohere", "olmo")  # as many as heads
    if nulls and "num_kv_heads" not in defaults:
        found["num_key_value_heads"] = shared
    return at_depth({"model_type": kind} | found | extra | _NEEDED.get(kind, {}), layers)
