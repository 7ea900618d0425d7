"""Model families of Hugging Face: how a config is read, and where a module keeps its parts.

entries          reading a config and naming what is left unread
family, sizes    what a family is, with the heads that most share; its architecture at another size
layout           tables of paths inside a module
bert, gpt, parallel, llama, t5, vit: one group of families each, configs first, modules below
bart             encoders with decoders whose modules are measured, and whose configs are not read
encoder          torch's own encoder
"""

from __future__ import annotations

from . import bart, bert, encoder, gpt, llama, parallel, t5, vit
from .family import Family
from .layout import Layout

__all__ = ["FAMILIES", "LAYOUTS", "NEAREST", "REFUSED", "Family", "Layout"]

_GROUPS = (bert, gpt, parallel, llama, t5, vit)
_PLACES = (encoder, bart, bert, gpt, parallel, llama, t5, vit)

FAMILIES: dict[str, Family] = {
    kind: family for group in _GROUPS for kind, family in group.FAMILIES.items()
}
"""`model_type` -> family."""

LAYOUTS: tuple[Layout, ...] = tuple(layout for group in _PLACES for layout in group.LAYOUTS)
"""Kinds of layers; where several recognise a layer, the one that names most of it holds."""

_EXPERTS = "a mixture of experts"
_STATES = "a state-space layer"
_BEHIND = "a norm behind every block and none before it"
_SPEECH = "a convolution over sound"
_TURNED = "rotary positions in some layers only"
_BASES = "rotary positions of two bases"
_VISION = "pictures and text in one model"

REFUSED: dict[str, str] = {
    "albert": "one layer's weights shared by all layers",
    "bart": "cross-attention in a Post-LN decoder with a position table of its own",
    "big_bird": "sparse attention",
    "clip": _VISION,
    "cohere2": _TURNED,
    "convnext": "convolutions",
    "dbrx": _EXPERTS,
    "deberta": "logits of relative positions",
    "deepseek_v2": _EXPERTS,
    "deepseek_v3": _EXPERTS,
    "exaone4": _BEHIND,
    "falcon_h1": _STATES,
    "falcon_mamba": _STATES,
    "funnel": "a stack that pools its tokens",
    "gemma3": _VISION,
    "gemma3_text": _BASES,
    "gemma3n": "several streams side by side",
    "gpt_oss": _EXPERTS,
    "granitemoe": _EXPERTS,
    "jamba": _EXPERTS,
    "led": "sparse attention",
    "llama4": _EXPERTS,
    "llama4_text": _EXPERTS,
    "longformer": "sparse attention",
    "longt5": "sparse attention",
    "mamba": _STATES,
    "mamba2": _STATES,
    "minimax": _EXPERTS,
    "mixtral": _EXPERTS,
    "mobilebert": "bottlenecks around every block",
    "modernbert": "a first layer without its norm, and rotary positions of two bases",
    "olmo2": _BEHIND,
    "olmo3": _BEHIND,
    "olmoe": _EXPERTS,
    "phimoe": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "qwen3_next": _EXPERTS,
    "recurrent_gemma": "a recurrent layer",
    "reformer": "hashed attention",
    "rwkv": "a recurrent layer",
    "smollm3": _TURNED,
    "swin": "windows of patches that shift between layers",
    "switch_transformers": _EXPERTS,
    "wav2vec2": _SPEECH,
    "whisper": _SPEECH,
    "xlnet": "attention of two streams",
    "zamba": _STATES,
}
"""Known model types, and the feature that no Transformer can express."""

NEAREST: dict[str, str] = {
    **dict.fromkeys(("blenderbot", "m2m_100", "marian", "mbart", "pegasus"), "t5"),
    "bart": "bert",
    "beit": "vit",
    "biogpt": "opt",
    "codegen": "gptj",
    "cohere2": "cohere",
    "ctrl": "gpt2",
    "data2vec-text": "roberta",
    "deberta": "bert",
    "deit": "vit",
    "dinov2": "vit",
    "exaone4": "qwen3",
    "gemma3": "gemma2",
    "gemma3_text": "gemma2",
    "glm": "llama",
    "glm4": "gemma2",
    "gpt-sw3": "gpt2",
    "gpt_bigcode": "gpt2",
    "gpt_neox_japanese": "gpt_neox",
    "helium": "llama",
    "layoutlm": "bert",
    "longt5": "t5",
    "megatron-bert": "bert",
    "modernbert": "bert",
    "mpnet": "bert",
    "mpt": "bloom",
    "nemotron": "starcoder2",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "openai-gpt": "gpt2",
    "persimmon": "stablelm",
    "rembert": "bert",
    "roberta-prelayernorm": "roberta",
    "roformer": "bert",
    "seed_oss": "llama",
    "smollm3": "llama",
    "umt5": "mt5",
    "vit_mae": "vit",
    "xglm": "opt",
    "xlm-roberta-xl": "xlm-roberta",
}
"""Model types that are not read -> the family here that is built most like them."""
