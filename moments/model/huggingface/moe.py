"""Decoders whose feed-forward blocks are routed mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import domain_error
from ..experts import Experts
from ..mixers import LayerAttention
from ..transformer import Transformer
from .entries import FULL, SLIDING, Entries
from .family import Reader
from .llama import INWARD, _decoder, _granite, _length, positions_of, sliding, unclipped


def routed(
    read: Entries, experts: Experts, layers: Iterable[int] | None = None
) -> tuple[Experts | None, ...]:
    """The feed-forward block of every layer: `experts` in `layers` (from 0; None: in all)."""
    _note_training_only(read)
    count = read.layers("num_hidden_layers")
    chosen = set(range(count) if layers is None else layers)
    return tuple(experts if number in chosen else None for number in range(count))


def _note_training_only(read: Entries) -> None:
    """Note a load-balancing loss and noise on the router's input, which act only in training."""
    if read.flag("output_router_logits", False):
        read.leave_out(
            "output_router_logits", True, "the loss that balances the experts is not added"
        )
    for name in ("router_jitter_noise", "input_jitter_noise"):
        read.expect(name, 0.0, "what is routed is not multiplied by noise while it is trained")


def _count(read: Entries, name: str, other: str) -> int:
    """A count under the name that the config class stores, or under an alias that it accepts."""
    read.same_as(other, name)
    return read.count(other if read.has(other) else name)


def softmax_experts(
    read: Entries, name: str = "num_local_experts", other: str = "num_experts", **fields: Any
) -> Experts:
    """Experts with a softmax router, renormalised over the chosen ones unless `fields` differ.

    Args:
        name, other: the entry for the number of experts, and its alias.
    """
    chosen = fields.pop("chosen", None) or read.count("num_experts_per_tok")
    return Experts(_count(read, name, other), chosen, router_variance=read.variance(), **fields)


def _normalised(read: Entries) -> str:
    return "chosen" if read.flag("norm_topk_prob", True) else "all"


def sigmoid_experts(read: Entries, name: str = "n_routed_experts") -> Experts:
    """Experts as in DeepSeek-V3: sigmoid gates, expert groups, a scale, shared experts.

    Experts are selected by gate plus a bias, which starts at zero.
    """
    width = read.count("moe_intermediate_size")
    groups = read.count("n_group", 1)
    return Experts(
        _count(read, name, "num_local_experts"),
        read.count("num_experts_per_tok"),
        d_ff=width,
        rule="sigmoid",
        normalised="chosen" if read.flag("norm_topk_prob") else "none",
        scale=read.positive("routed_scaling_factor"),
        groups=groups,
        kept_groups=read.count("topk_group", 1),
        router_variance=read.variance(),
        shared=width * int(read("n_shared_experts", 0)),
    )


def first_dense(read: Entries) -> Iterable[int]:
    """Layers with experts: all after the first `first_k_dense_replace`, which are dense."""
    dense = read("first_k_dense_replace", 0)
    if dense < 0:
        raise domain_error("first_k_dense_replace", dense, "0 or more")
    return range(dense, read.layers("num_hidden_layers"))


def listed_sparse(read: Entries, dense: int = 0) -> list[int]:
    """Layers with experts: `mlp_layer_types`, by default all but the first (`dense` of them)."""
    first = read.replaced(first_k_dense_replace=read("first_k_dense_replace", dense))
    chosen = set(first_dense(first))
    usual = ["sparse" if n in chosen else "dense" for n in range(read.layers("num_hidden_layers"))]
    kinds = read.kinds(usual, ("dense", "sparse"), name="mlp_layer_types")
    return [number for number, kind in enumerate(kinds) if kind == "sparse"]


def _stepped(read: Entries) -> list[int]:
    """Layers with experts: every decoder_sparse_step-th one that is not in mlp_only_layers."""
    step, dense = read.count("decoder_sparse_step", 1), read.several("mlp_only_layers", 0)
    layers = range(read.layers("num_hidden_layers"))
    return [number for number in layers if number not in dense and not (number + 1) % step]


_QWEN = ("num_experts", "num_local_experts")


def _mixtral(read: Entries, seq_len: int | None) -> Transformer:
    window = read.window("sliding_window", _length(read, seq_len))
    experts = routed(read, softmax_experts(read))
    return _decoder(read, seq_len, biased=(), window=window, ffn=experts)


def _qwen2_moe(read: Entries, seq_len: int | None) -> Transformer:
    """A shared expert with a sigmoid gate; optional windows in every second of the first layers."""
    first = read("max_window_layers")
    used, layers = read.flag("use_sliding_window"), read.layers("num_hidden_layers")
    usual = [FULL if n % 2 or n >= first or not used else SLIDING for n in range(layers)]
    kinds = read.kinds(usual)
    experts = softmax_experts(
        read,
        *_QWEN,
        d_ff=read.count("moe_intermediate_size"),
        normalised=_normalised(read),
        shared=read.count("shared_expert_intermediate_size"),
        shared_gate_variance=read.variance(),
    )
    return _decoder(
        read,
        seq_len,
        window=sliding(read, seq_len, kinds) if used else None,
        biases=read.biases(INWARD if read.flag("qkv_bias") else ()),
        ffn=routed(read, experts, _stepped(read)),
    )


def _qwen3_moe(read: Entries, seq_len: int | None) -> Transformer:
    used = read.flag("use_sliding_window", False)
    window = read.window("sliding_window", _length(read, seq_len)) if used else None
    experts = softmax_experts(
        read,
        d_ff=read.count("moe_intermediate_size"),
        normalised=_normalised(read),
    )
    return _decoder(
        read,
        seq_len,
        window=window,
        qk_norm="rmsnorm",
        ffn=routed(read, experts, _stepped(read)),
    )


def _olmoe(read: Entries, seq_len: int | None) -> Transformer:
    unclipped(read)
    experts = softmax_experts(read, *_QWEN, normalised=_normalised(read))
    return _decoder(read, seq_len, qk_norm="rmsnorm-all", ffn=routed(read, experts))


def _granitemoe(read: Entries, seq_len: int | None) -> Transformer:
    shared = int(read("shared_intermediate_size", 0))
    experts = routed(read, softmax_experts(read, shared=shared))
    return _granite(read, seq_len, biased=("attention_bias",), ffn=experts)


def _ernie4_5_moe(read: Entries, seq_len: int | None) -> Transformer:
    """Experts in every moe_layer_interval-th layer between the start and end indices."""
    read.refuse("use_bias", False, "biases of all but the experts")
    layers, step = read.layers("num_hidden_layers"), read.count("moe_layer_interval")
    first, last = read("moe_layer_start_index"), read("moe_layer_end_index")
    last = layers - 1 if last == -1 else last
    width = read.count("moe_intermediate_size")
    experts = softmax_experts(
        read,
        "moe_num_experts",
        "num_experts",
        chosen=_count(read, "moe_k", "num_experts_per_tok"),
        d_ff=width,
        shared=width * int(read("moe_num_shared_experts")),
    )
    chosen = [n for n in range(layers) if first <= n <= last and not (n + 1) % step]
    experts_of = routed(read, experts, chosen)
    return _decoder(read, seq_len, biased=(), attention_dropout=0.0, ffn=experts_of)


def _glm4_moe(read: Entries, seq_len: int | None) -> Transformer:
    """Rotary positions on half of a head's features; no bias on the output projection."""
    biased = INWARD if read.flag("attention_bias") else ()
    return _decoder(
        read,
        seq_len,
        biases=read.biases(biased),
        qk_norm="rmsnorm" if read.flag("use_qk_norm", False) else None,
        ffn=routed(read, sigmoid_experts(read), first_dense(read)),
    )


def _dots1(read: Entries, seq_len: int | None) -> Transformer:
    first, layers = read("max_window_layers"), range(read.layers("num_hidden_layers"))
    kinds = read.kinds([SLIDING if number >= first else FULL for number in layers])
    return _decoder(
        read,
        seq_len,
        window=sliding(read, seq_len, kinds),
        qk_norm="rmsnorm",
        ffn=routed(read, sigmoid_experts(read), first_dense(read)),
    )


def _minimax_m2(read: Entries, seq_len: int | None) -> Transformer:
    """Sigmoid gates, normalised over the chosen; rotary positions on `rotary_dim` features."""
    width = read.count("head_dim")
    rotated = read.count("rotary_dim", width)
    plain = read.rotary()
    experts = softmax_experts(read, rule="sigmoid")
    fraction = rotated / width if read.has("rotary_dim") else plain.fraction
    return _decoder(
        read,
        seq_len,
        biased=(),
        rotary=plain.replace(fraction=fraction),
        qk_norm="rmsnorm-all",
        ffn=routed(read, experts),
    )


def _llama4_text(read: Entries, seq_len: int | None) -> Transformer:
    """One expert per token, whose input is multiplied by its gate, and a shared expert."""
    tokens, layers = _length(read, seq_len), read.layers("num_hidden_layers")
    for name in ("attention_chunk_size", "floor_scale"):
        if (reach := read(name, 8192)) < tokens:
            read.leave_out(name, reach, "attention is over the whole text, at one temperature")
    for name in ("attn_scale", "attn_temperature_tuning", "layer_types"):
        read.read.add(name)
    every = read.count("no_rope_layer_interval")
    rotates = read.several("no_rope_layers", 0, layers) or [
        int((n + 1) % every != 0) for n in range(layers)
    ]
    rotary, normed = positions_of(read)["rotary"], LayerAttention(qk_norm="rmsnorm", qk_gains=False)
    used = read.flag("use_qk_norm")
    step = read.count("interleave_moe_layer_step")
    chosen = read.several("moe_layers", 0) or range(step - 1, layers, step)
    if (several := read.count("num_experts_per_tok")) != 1:
        raise domain_error("num_experts_per_tok", several, "1: of several, gates are not followed")
    experts = softmax_experts(
        read,
        d_ff=read.count("intermediate_size"),
        rule="sigmoid_input",
        normalised="none",
        shared=read.count("intermediate_size"),
    )
    model = _decoder(
        read,
        seq_len,
        rotary=[rotary if flag else None for flag in rotates],
        mixer=[normed if used and flag else None for flag in rotates],
        ffn=routed(read, experts, chosen),
    )
    return model.replace(d_ff=read.count("intermediate_size_mlp"))


READERS: dict[str, Reader] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "olmoe": _olmoe,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "ernie4_5_moe": _ernie4_5_moe,
    "glm4_moe": _glm4_moe,
    "dots1": _dots1,
    "minimax_m2": _minimax_m2,
    "llama4_text": _llama4_text,
}
