"""Modules of libraries that no reader knows, small, and what they are by their own settings."""

from __future__ import annotations

from typing import Any

import torch

SIZES = {
    "small": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"intermediate_size": 256, "max_position_embeddings": 32, "vocab_size": 101},
    "shared": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"intermediate_size": 256, "max_position_embeddings": 32, "vocab_size": 101}
    | {"num_key_value_heads": 2, "head_dim": 16},
    "gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 101},
}
UNREAD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt_bigcode": ("gpt", {}, {"kv_heads": 1, "activation": "gelu_tanh"}),
    "codegen": ("gpt", {"rotary_dim": 8}, {"parallel": True, "rotary.fraction": 0.5}),
    "openai-gpt": ("gpt", {}, {"norm": "post", "causal": True}),
    "ctrl": ("gpt", {"dff": 256}, {"embedding.positions": "sinusoidal", "embedding.scale": 8.0}),
    "biogpt": ("small", {}, {"embedding.scale": 8.0, "activation": "gelu"}),
    "nemotron": (
        "small",
        {"num_key_value_heads": 2},
        {"activation": "relu_squared", "rotary.fraction": 0.5},
    ),
    "helium": (
        "small",
        {"head_dim": 16, "num_key_value_heads": 2},
        {"normalization": "rmsnorm", "rotary.base": 100000.0},
    ),
    "persimmon": ("small", {}, {"qk_norm": "layernorm", "rotary.fraction": 0.5}),
    "gpt_neox_japanese": ("small", {}, {"attention_dropout": 0.1, "head.tied": True}),
    "seed_oss": (
        "small",
        {"head_dim": 16, "num_key_value_heads": 2},
        {"gated": True, "dropout": 0.1},
    ),
    "arcee": ("small", {}, {"activation": "relu_squared", "normalization": "rmsnorm"}),
    "mpt": ("", {"d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 101}, {"alibi": True}),
    "mpnet": ("small", {}, {"norm": "post", "relative_bias.buckets": 32, "causal": False}),
    "megatron-bert": ("small", {}, {"norm": "pre", "head.transform": "gelu"}),
}

X_TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"norm": "pre", "d_ff": 256, "head.norm": True}),
    "modern": (
        {"use_rmsnorm": True, "rotary_pos_emb": True, "rotary_emb_dim": 16}
        | {"ff_glu": True, "ff_swish": True, "attn_kv_heads": 2},
        {"normalization": "rmsnorm", "gated": True, "kv_heads": 2, "rotary.fraction": 1.0},
    ),
    "sandwich": ({"sandwich_norm": True}, {"norm": "sandwich"}),
    "post": ({"pre_norm": False}, {"norm": "post", "head.norm": False}),
    "alibi": ({"alibi_pos_bias": True}, {"alibi": True}),
}
"""Settings of x-transformers' decoder, and fields of what it then is."""


def unread(kind: str, seed: int = 0) -> Any:
    """A module of transformers, of a type without a reader here."""
    import transformers

    sizes, more, _ = UNREAD[kind]
    config = transformers.CONFIG_MAPPING[kind](**SIZES.get(sizes, {}) | more)
    masked = kind in ("mpnet", "megatron-bert")
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    torch.manual_seed(seed)
    return auto.from_config(config)


def x_transformer(name: str, seed: int = 0) -> Any:
    """A decoder of x-transformers with its table and its head."""
    import x_transformers

    torch.manual_seed(seed)
    settings = X_TRANSFORMERS[name][0]
    layers = x_transformers.Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **settings)
    return x_transformers.TransformerWrapper(num_tokens=97, max_seq_len=24, attn_layers=layers)


def timm_vit(seed: int = 0) -> Any:
    """A vision transformer of timm itself, small, with a class token and learned positions."""
    import timm

    torch.manual_seed(seed)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=64,
        depth=2,
        num_heads=4,
        num_classes=10,
    )


def torch_encoder(pre: bool, seed: int = 0) -> Any:
    """nn.TransformerEncoder whose layers are drawn apart, not copied."""
    torch.manual_seed(seed)

    def layer() -> Any:
        return torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=pre)

    encoder = torch.nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)
    encoder.layers = torch.nn.ModuleList(layer() for _ in range(2))
    return encoder
