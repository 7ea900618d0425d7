"""Model families of Hugging Face: how a config is read, and where a module keeps its parts.

names, entries   reading a config and naming what is left unread
family, sizes    what a family is; its architecture at another size
heads            the heads that most families share
layout           tables of paths inside a module
bert, gpt, parallel, llama, t5, vit (and *_layout): one group of families each
bart_layout      encoders with decoders whose modules are measured, and whose configs are not read
encoder          torch's own encoder
"""

from __future__ import annotations

from . import (
    bart_layout,
    bert,
    bert_layout,
    encoder,
    gpt,
    gpt_layout,
    llama,
    llama_layout,
    llama_relatives,
    parallel,
    parallel_layout,
    t5,
    vit,
)
from .family import Family
from .layout import Layout

__all__ = ["FAMILIES", "LAYOUTS", "REFUSED", "Family", "Layout"]

_GROUPS = (bert, gpt, parallel, llama, llama_relatives, t5, vit)
_PLACES = (encoder, bart_layout, bert_layout, gpt_layout, parallel_layout, llama_layout, t5, vit)

FAMILIES: dict[str, Family] = {
    kind: family for group in _GROUPS for kind, family in group.FAMILIES.items()
}
"""`model_type` -> family."""

LAYOUTS: tuple[Layout, ...] = tuple(layout for group in _PLACES for layout in group.LAYOUTS)
"""Kinds of layers; where several recognise a layer, the one that names most of it holds."""

_EXPERTS = "a mixture of experts"
_STATES = "a state-space layer"

REFUSED: dict[str, str] = {
    "albert": "one layer's weights shared by all layers",
    "bart": "cross-attention in a Post-LN decoder with a position table of its own",
    "convnext": "convolutions",
    "deepseek_v2": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "falcon_mamba": _STATES,
    "gpt_oss": _EXPERTS,
    "mamba": _STATES,
    "mamba2": _STATES,
    "mixtral": _EXPERTS,
    "olmoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "rwkv": "a recurrent layer",
    "swin": "windows of patches that shift between layers",
    "switch_transformers": _EXPERTS,
}
"""Known model types, and the feature that no Transformer can express."""
