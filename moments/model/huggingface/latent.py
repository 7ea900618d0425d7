"""Decoders with latent attention, and with attention sinks."""

from __future__ import annotations

import math
from typing import Any

from ...errors import domain_error
from ..latent_attention import LatentAttention
from ..transformer import Transformer
from .entries import Entries
from .family import Family, causal_head
from .llama import _FULL, _SLIDING, _decoder, _length, _longrope

LATENT_EPSILON = 1e-6
"""Of the norms of latents, which transformers constructs without the config's own."""


def latent_attention(read: Entries, variance: float, **changes: Any) -> LatentAttention:
    """The block of DeepSeek's entries, matrices of one variance.

    Raises:
        DomainError: heads that share keys, or biases before the latents.
    """
    heads = read.count("num_attention_heads")
    if read.count("num_key_value_heads", heads) != heads:
        given = read("num_key_value_heads")
        raise domain_error("num_key_value_heads", given, f"num_attention_heads = {heads}")
    read.refuse("attention_bias", False, "biases of the matrices to the latents")
    rank = None if read.null("q_lora_rank") else read("q_lora_rank", None)
    return LatentAttention(
        kv_rank=read.count("kv_lora_rank"),
        nope_dim=read.count("qk_nope_head_dim"),
        rope_dim=read.count("qk_rope_head_dim"),
        value_dim=read.count("v_head_dim", read.count("hidden_size") // heads),
        kv_down=variance,
        query_rank=rank,
        norm_epsilon=LATENT_EPSILON,
        **changes,
    )


def latent_temperature(read: Entries) -> float:
    """YaRN's factor on the logits, squared there, where positions are scaled.

    Source:
        DeepSeek-AI 2024, DeepSeek-V2, section 3.1.4; as transformers' yarn_apply_mscale.
    """
    given = read.rope()
    kind, mscale = given.get("rope_type", given.get("type", "default")), given.get("mscale_all_dim")
    if kind == "default" or not mscale:
        return 1.0
    factor = float(given.get("factor", 1.0))
    return 1.0 if factor <= 1.0 else (0.1 * float(mscale) * math.log(factor) + 1.0) ** -2


def _latent_decoder(read: Entries, seq_len: int | None, **changes: Any) -> Transformer:
    variance = changes.pop("variance", None)
    width = read.count("qk_rope_head_dim")
    fields: dict[str, Any] = {"rotary": read.rotary()} if "rotary" not in changes else {}
    fields |= {"temperature": latent_temperature(read)} if "temperature" not in changes else {}
    return _decoder(
        read,
        seq_len,
        variance=variance,
        biases=None,
        d_head=width,
        kv_heads=read.count("num_attention_heads"),
        mixer=latent_attention(read, read.variance() if variance is None else variance),
        **(fields | changes),
    )


def _minicpm3(read: Entries, seq_len: int | None) -> Transformer:
    """Branches, embedding and logits times constants of depth and width."""
    length, width = _length(read, seq_len), read.count("qk_rope_head_dim")
    turned = _longrope(read, width, length)
    if turned.get("temperature", 1.0) != 1.0:
        factor, meaning = turned["temperature"] ** -0.5, "the turned part of logits keeps its size"
        read.leave_out("attention_factor", factor, meaning)
    depth, d_model = read.layers("num_hidden_layers"), read.count("hidden_size")
    scale = 1.0 if read.null("scale_depth") else read.number("scale_depth") / math.sqrt(depth)
    base = d_model if read.null("dim_model_base") else read.positive("dim_model_base")
    return _latent_decoder(
        read,
        seq_len,
        rotary=turned["rotary"],
        temperature=1.0,
        branch_scale=scale,
        embedding={"scale": read.number("scale_emb")},
        head=causal_head(
            read, read.variance(), read.number("rms_norm_eps"), output_scale=base / d_model
        ),
    )


def _youtu(read: Entries, seq_len: int | None) -> Transformer:
    """Deviations of 2/sqrt(5 d), twice that in the token table, unless given."""
    usual = 2.0 / math.sqrt(5.0 * read.count("hidden_size"))
    deviation = read.number("initializer_range", usual)
    table = read.number("embedding_initializer_range", 0.0) or 2.0 * deviation
    return _latent_decoder(
        read,
        seq_len,
        variance=deviation**2,
        head=causal_head(read, deviation**2, read.number("rms_norm_eps")),
        embedding={"token_variance": table**2},
    )


def _granite_swa(read: Entries, seq_len: int | None) -> Transformer:
    """Granite's multipliers, windows, a rotary base per layer (0: no positions), and sinks at 0."""
    width = read.count("head_dim", read.count("hidden_size") // read.count("num_attention_heads"))
    layers, rotary = read.layers("num_hidden_layers"), read.rotary()
    bases = read("layer_rope_theta", None) or [rotary.base] * layers
    if len(bases) != layers:
        raise domain_error("layer_rope_theta", bases, f"one number per layer ({layers})")
    usual = [_SLIDING if number % 4 else _FULL for number in range(layers)]
    kinds = read("layer_types", usual)
    return _decoder(
        read,
        seq_len,
        biased=("attention_bias", "mlp_bias"),
        attention_sink=0.0,
        temperature=1 / (read.positive("attention_multiplier") * math.sqrt(width)),
        branch_scale=read.number("residual_multiplier"),
        rotary=[rotary.replace(base=float(base)) if base else None for base in bases],
        window=read.windows(kinds, _SLIDING, "sliding_window", _length(read, seq_len)),
        embedding={"scale": read.number("embedding_multiplier")},
        head=causal_head(
            read,
            read.variance(),
            read.number("rms_norm_eps"),
            output_scale=1 / read.positive("logits_scaling"),
        ),
    )


_MADE = {"head_dim": ..., "qk_head_dim": ...}  # by the config's class of other entries
FAMILIES = {
    "minicpm3": Family(_minicpm3, "MiniCPM3ForCausalLM", "causal", _MADE),
    "youtu": Family(_youtu, "YoutuForCausalLM", "causal", _MADE | {"rope_interleave": ...}),
    "granite_swa": Family(_granite_swa, "GraniteSWAForCausalLM", "causal"),
}
