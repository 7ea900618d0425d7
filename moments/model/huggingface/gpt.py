"""GPT-2 and its relatives: Pre-LN decoders with position tables or linear position biases."""

from __future__ import annotations

import math
from typing import Any

from ...errors import domain_error
from ..transformer import Transformer
from ..weights import Biases, Weights
from .entries import Entries
from .family import Reader, declared


def _gpt2(read: Entries, seq_len: int | None) -> Transformer:
    read.expect("add_cross_attention", False, "no cross-attention is assumed")
    layers, d_model, heads = read.layers("n_layer"), read.count("n_embd"), read.count("n_head")
    variance = read.variance()
    scale = 1.0 if read.flag("scale_attn_weights", True) else math.sqrt(heads / d_model)
    temperature: Any = scale
    if read.flag("scale_attn_by_inverse_layer_idx", False):
        temperature = tuple(scale * number for number in range(1, layers + 1))
    return declared(
        read,
        seq_len,
        d_ff=read("n_inner", 4 * d_model),
        # Both output projections are scaled by 1/sqrt(2 N), a variance factor of 1/(2 N).
        weights=Weights.normal(variance, output_divisor=2 * layers),
        temperature=temperature,
        embedding={"position_variance": variance},
    )


def _gpt_neo(read: Entries, seq_len: int | None) -> Transformer:
    """GPT-2 with windows in every second layer, unscaled attention logits, and no biases on query,
    key and value."""
    d_model, heads = read.count("hidden_size"), read.count("num_heads")
    layers = read.layers("num_layers")
    length = read.length("max_position_embeddings", seq_len)
    return declared(
        read,
        seq_len,
        d_ff=read("intermediate_size", 4 * d_model),
        biases=read.biases(("output", "ffn_in", "ffn_out")),
        temperature=math.sqrt(heads / d_model),
        window=read.windows(_neo_kinds(read, layers), "local", "window_size", length),
        embedding={"position_variance": read.variance()},
    )


def _neo_kinds(read: Entries, layers: int) -> list[str]:
    """Attention type of every layer, from [[["global", "local"], repetitions], ...]."""
    given = read("attention_types", [[["global", "local"], layers // 2]])
    try:
        named = sum(len(group) * times for group, times in given)
    except (TypeError, ValueError):
        named = 0
    if named != layers or any(times < 0 for _, times in given):
        raise domain_error("attention_types", given, f"one kind for each of {layers} layers")
    kinds = [kind for group, times in given for _ in range(times) for kind in group]
    if not set(kinds) <= {"global", "local"}:
        raise domain_error("attention_types", given, "of 'global' and 'local'")
    read.expect("attention_layers", kinds, "attention_types says it")
    return kinds


def _opt(read: Entries, seq_len: int | None) -> Transformer:
    """GPT-2 without embedding dropout; the position table's first two rows are never used.

    Token rows may be narrower than the stream: one matrix widens them, another narrows the head's
    input.
    """
    d_model = read.count("hidden_size")
    read.refuse("_remove_final_layer_norm", False, "a Pre-LN stack without a final norm")
    variance = read.variance()
    pre = read.flag("do_layer_norm_before")
    factor: dict[str, Any] = {}
    if (narrow := read.count("word_embed_proj_dim", d_model)) != d_model:
        factor = {"factor_dim": narrow, "factor_variance": variance}
    return declared(
        read,
        seq_len,
        epsilon=1e-5,  # torch's default, which the module keeps
        norm="pre" if pre else "post",
        biases=Biases() if read.flag("enable_bias") else None,
        norm_affine=read.flag("layer_norm_elementwise_affine"),
        embedding={"position_variance": variance, "padding_id": read.padding()} | factor,
        head={"norm": pre} | factor,
    )


def _bloom(read: Entries, seq_len: int | None) -> Transformer:
    """ALiBi, a normalised embedding, and no limit on the sequence length."""
    read.refuse(
        "apply_residual_connection_post_layernorm", False, "a residual stream from behind the norm"
    )
    width = "n_embed" if read.has("n_embed") else "hidden_size"
    read.same_as("num_attention_heads", "n_head")
    return declared(
        read,
        seq_len,
        names={"width": width},
        table=False,
        activation="gelu_tanh",
        alibi=True,
        embedding={"norm": True, "norm_epsilon": read.number("layer_norm_epsilon")},
    )


READERS: dict[str, Reader] = {
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "opt": _opt,
    "bloom": _bloom,
}
