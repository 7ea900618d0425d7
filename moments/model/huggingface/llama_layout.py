"""Where Llama and its relatives keep their sites and parameters."""

from __future__ import annotations

from typing import Any

from .layout import Fused, Layout, Site

_BLOCK: tuple[Site, ...] = (
    ("attention.norm", "input_layernorm", "output"),
    ("attention.heads", "self_attn.o_proj", "input"),
    ("attention.projection", "self_attn.o_proj", "output"),
)
_SUMS: tuple[Site, ...] = (("ffn.sum", "", "output"), ("stream", "", "output"))
_SEQUENTIAL: tuple[Site, ...] = (
    ("attention.sum", "post_attention_layernorm", "input"),
    ("ffn.norm", "post_attention_layernorm", "output"),
)
_NORMS = (
    ("attention.norm", "input_layernorm"),
    ("ffn.norm", "post_attention_layernorm"),
    ("query.norm", "self_attn.q_norm"),
    ("key.norm", "self_attn.k_norm"),
)
_ATTENTION = tuple(
    (name, f"self_attn.{path}_proj.weight")
    for name, path in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
)
_GATED: tuple[Site, ...] = (
    ("ffn.gate", "mlp.gate_proj", "output"),
    ("ffn.in", "mlp.up_proj", "output"),
    ("ffn.activation", "mlp.down_proj", "input"),
    ("ffn.out", "mlp.down_proj", "output"),
)
_GATED_WEIGHTS = (
    ("gate", "mlp.gate_proj.weight"),
    ("ffn_in", "mlp.up_proj.weight"),
    ("ffn_out", "mlp.down_proj.weight"),
)
_OUTSIDE = (("token", "embed_tokens"), ("final.norm", "norm"), ("head", "lm_head"))
_AFTER: tuple[Site, ...] = (("final.norm", "norm", "output"), ("logits", "lm_head", "output"))


def _layout(name: str, sites: tuple[Site, ...], **changes: Any) -> Layout:
    fields: dict[str, Any] = {
        "weights": (*_ATTENTION, *_GATED_WEIGHTS),
        "norms": _NORMS,
        "outside": _OUTSIDE,
        "after": _AFTER,
    }
    return Layout(name, sites, **(fields | changes))


def _phi3_split(layer: Any) -> tuple[int, ...]:
    attention = layer.self_attn
    queries = attention.o_proj.in_features
    shared = queries // attention.num_key_value_groups
    return (queries, shared, shared)


def _halves(layer: Any) -> tuple[int, ...]:
    return (layer.mlp.down_proj.in_features,) * 2


LAYOUTS = (
    _layout(
        "Gemma-2",
        (
            *_BLOCK,
            ("attention.post_norm", "post_attention_layernorm", "output"),
            ("attention.sum", "pre_feedforward_layernorm", "input"),
            ("ffn.norm", "pre_feedforward_layernorm", "output"),
            *_GATED,
            ("ffn.post_norm", "post_feedforward_layernorm", "output"),
            *_SUMS,
        ),
        norms=(
            ("attention.norm", "input_layernorm"),
            ("attention.post_norm", "post_attention_layernorm"),
            ("ffn.norm", "pre_feedforward_layernorm"),
            ("ffn.post_norm", "post_feedforward_layernorm"),
        ),
    ),
    _layout("Llama", (*_BLOCK, *_SEQUENTIAL, *_GATED, *_SUMS)),
    _layout("Cohere", (*_BLOCK, *_GATED, *_SUMS)),
    _layout(
        "Phi-3",
        (
            *_BLOCK,
            ("attention.dropout", "resid_attn_dropout", "output"),
            *_SEQUENTIAL,
            ("ffn.activation", "mlp.down_proj", "input"),
            ("ffn.out", "mlp.down_proj", "output"),
            ("ffn.dropout", "resid_mlp_dropout", "output"),
            *_SUMS,
        ),
        weights=(("output", "self_attn.o_proj.weight"), ("ffn_out", "mlp.down_proj.weight")),
        fused=(
            Fused(("query", "key", "value"), "self_attn.qkv_proj.weight", _phi3_split),
            Fused(("gate", "ffn_in"), "mlp.gate_up_proj.weight", _halves),
        ),
    ),
    _layout(
        "StarCoder2",
        (
            *_BLOCK,
            *_SEQUENTIAL,
            ("ffn.in", "mlp.c_fc", "output"),
            ("ffn.activation", "mlp.c_proj", "input"),
            ("ffn.out", "mlp.c_proj", "output"),
            *_SUMS,
        ),
        weights=(*_ATTENTION, ("ffn_in", "mlp.c_fc.weight"), ("ffn_out", "mlp.c_proj.weight")),
    ),
)
