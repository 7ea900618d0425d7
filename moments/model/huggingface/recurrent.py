"""Decoders with recurrences or short convolutions in attention's place, in all layers or some."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ...errors import domain_error
from ..mixers import (
    Absent,
    GatedDeltaNet,
    LinearAttention,
    Mamba2,
    ShortConvolution,
    lightning_decays,
)
from ..transformer import Transformer
from ..weights import Weights
from .entries import Entries
from .family import Family, causal_head, declared
from .llama import _BOTH, _FULL, _decoder, _length
from .moe import _QWEN, _normalised, _stepped, routed, softmax_experts

_LINEAR = "linear_attention"
LONGEST = 512
"""Tokens where a config names none: as many as are followed by token."""


def _mixed(read: Entries, kinds: Any, blocks: dict[str, Any]) -> tuple[Any, ...]:
    """The block of every layer by its kind, None where that is attention.

    Raises:
        DomainError: a kind that is none of them, or another number of layers.
    """
    layers = read.layers("num_hidden_layers")
    if len(kinds) != layers or not set(kinds) <= {_FULL, *blocks}:
        allowed = f"{layers} of {', '.join(map(repr, (_FULL, *blocks)))}"
        raise domain_error("layer_types", kinds, allowed)
    made: dict[str, Any] = {}
    return tuple(None if k == _FULL else made.setdefault(k, blocks[k]) for k in kinds)


def _lfm2(read: Entries, seq_len: int | None) -> Transformer:
    """Gated short convolutions and attention by `layer_types`; two thirds of intermediate_size."""
    read.refuse("conv_bias", False, "biases of a short convolution's matrices")
    layers = read.layers("num_hidden_layers")
    attends = read("full_attn_idxs", None) if not read.has("layer_types") else None
    usual = [_FULL if attends is None or n in attends else "conv" for n in range(layers)]
    width = read.count("intermediate_size")
    if read.flag("block_auto_adjust_ff_dim"):
        multiple = read.count("block_multiple_of")
        width = int(read.number("block_ffn_dim_multiplier") * int(2 * width / 3))
        width = multiple * -(-width // multiple)
    convolution = ShortConvolution(read.count("conv_L_cache"), read.variance())
    mixers = _mixed(read, read("layer_types", usual), {"conv": convolution})
    return _decoder(
        read,
        seq_len,
        epsilon="norm_eps",
        activation="silu",
        biases=None,
        d_ff=width,
        attention_dropout=0.0,
        qk_norm="rmsnorm",
        mixer=mixers,
    )


def _qwen3_next(read: Entries, seq_len: int | None) -> Transformer:
    """Three gated delta nets to one layer of gated attention, with experts."""
    read.refuse("attention_bias", False, "biases together with gates of attention's output")
    layers, variance = read.layers("num_hidden_layers"), read.variance()
    every = read.count("full_attention_interval", 4)
    usual = [_FULL if (n + 1) % every == 0 else _LINEAR for n in range(layers)]
    block = GatedDeltaNet(
        read.count("linear_num_key_heads"),
        read.count("linear_num_value_heads"),
        read.count("linear_key_head_dim"),
        read.count("linear_value_head_dim"),
        *(variance,) * 3,
        kernel=read.count("linear_conv_kernel_dim"),
        tap_variance=variance,
        norm_epsilon=read.number("rms_norm_eps"),
    )
    experts = None
    if int(read("num_experts")) > 0:
        mixture = softmax_experts(
            read,
            *_QWEN,
            d_ff=read.count("moe_intermediate_size"),
            normalised=_normalised(read),
            shared=read.count("shared_expert_intermediate_size"),
            shared_gate_variance=variance,
        )
        experts = routed(read, mixture, _stepped(read))
    mixers = _mixed(read, read("layer_types", usual), {_LINEAR: block})
    return _decoder(
        read,
        seq_len,
        biases=None,
        qk_norm="rmsnorm",
        attention_gate="elementwise",
        mixer=mixers,
        ffn=experts,
    )


ONE_STEP = math.log1p(math.e)
"""Softplus of a bias of 1, which modules without a rule of their own for it start with."""


def _bamba(read: Entries, seq_len: int | None) -> Transformer:
    """Mamba-2 in all layers but those of `attn_layer_indices`, with gated units in each; steps have
    biases of 1."""
    read.refuse("mamba_proj_bias", False, "biases of a mixer's matrices")
    layers, heads, variance = (
        read.layers("num_hidden_layers"),
        read.count("mamba_n_heads"),
        read.variance(),
    )
    width = int(read.number("mamba_expand") * read.count("hidden_size"))
    if heads * read.count("mamba_d_head") != width:
        allowed = f"mamba_expand * hidden_size = {width} over mamba_d_head"
        raise domain_error("mamba_n_heads", heads, allowed)
    _unlimited(read)
    block = Mamba2(
        heads,
        width // heads,
        read.count("mamba_d_state"),
        variance,
        variance,
        groups=read.count("mamba_n_groups"),
        kernel=read.count("mamba_d_conv"),
        tap_variance=variance,
        tap_distribution="normal",
        tap_bias=read.flag("mamba_conv_bias"),
        steps=(ONE_STEP, ONE_STEP),
        norm_epsilon=read.number("rms_norm_eps"),
    )
    attends = read("attn_layer_indices", None) or ()
    mixers = tuple(None if number in attends else block for number in range(layers))
    return _decoder(read, seq_len, biased=_BOTH, mixer=mixers)


def _unlimited(read: Entries) -> None:
    low, high = read("time_step_limit", (0.0, math.inf))
    if low > 0 or high != math.inf:
        read.leave_out("time_step_limit", [low, high], "steps are not limited")


def _mamba2(read: Entries, seq_len: int | None) -> Transformer:
    """Mixers alone. The output projection is torch's default, `in_proj` of initializer_range; steps
    have random biases, and A is 1, 2, ..."""
    read.refuse("use_bias", False, "biases of a mixer's matrices")
    read.expect("hidden_act", "silu", "SiLU is assumed behind the convolution")
    heads, width = read.count("num_heads"), read.count("head_dim")
    inner = int(read.number("expand") * read.count("hidden_size"))
    if inner != heads * width:
        allowed = f"expand * hidden_size = {inner} over head_dim = {width}"
        raise domain_error("num_heads", heads, allowed)
    _unlimited(read)
    variance, layers = read.variance(), read.layers("num_hidden_layers")
    rescaled = layers if read.flag("rescale_prenorm_residual") else 1
    least = max(read.positive("time_step_min"), read.positive("time_step_floor"))
    block = Mamba2(
        heads,
        width,
        read.count("state_size"),
        variance,
        variance,
        groups=read.count("n_groups"),
        kernel=read.count("conv_kernel"),
        tap_bias=read.flag("use_conv_bias"),
        steps=(least, read.positive("time_step_max")),
        norm_epsilon=read.number("layer_norm_epsilon"),
    )
    return declared(
        read,
        read.number("layer_norm_epsilon"),
        shape=("num_hidden_layers", "hidden_size", "num_heads"),
        d_head=width,
        seq_len=read.at_most(LONGEST, seq_len, "", table=False),
        normalization="rmsnorm",
        dropout=0.0,
        biases=None,
        weights=Weights.normal(variance).replace(output=1 / (3 * inner * rescaled)),
        embedding={"padding_id": read.padding()},
        mixer=block,
        ffn=Absent(),
    )


_IRRELEVANT = {
    "chunk_size": ...,
    "residual_in_fp32": ...,
    "time_step_rank": ...,
    "use_cache": ...,
}
"""Of Mamba-2: how it is computed, and an entry that nothing reads."""


def _minimax(read: Entries, seq_len: int | None) -> Transformer:
    """Lightning and full attention by turns, with experts.

    A block's sum keeps what its norm made of the stream. So layers are Post-LN behind a norm of the
    embedding, the last one's second norm being the final one; the stream is what those norms leave.
    """
    layers, heads = read.layers("num_hidden_layers"), read.count("num_attention_heads")
    width, variance = read.count("hidden_size"), read.variance()
    d_head = read.count("head_dim", width // heads)
    usual = [_LINEAR if number % 2 else _FULL for number in range(layers)]
    kinds = read("layer_types", usual)
    for_each = _mixed(read, kinds, dict.fromkeys((_LINEAR,), True))
    mixers = [
        linear
        and LinearAttention(
            *(heads, d_head, d_head, lightning_decays(heads, number, layers)),
            feature_map="silu",
            scale=1.0,
            norm="all",
            norm_epsilon=1e-6,
            gate="sigmoid",
            gate_variance=variance,
        )
        for number, linear in enumerate(for_each)
    ]
    skip, branch = (
        [
            [read.number(f"{'linear' if one else 'full'}_attn_{side}_factor", 1.0), mlp]
            for one in for_each
        ]
        for side in ("alpha", "beta")
        for mlp in (read.number(f"mlp_{side}_factor", 1.0),)
    )
    epsilon = read.number("rms_norm_eps")
    head = dataclasses.replace(causal_head(read, variance, epsilon), norm=False)
    return _decoder(
        read,
        seq_len,
        biases=None,
        d_head=d_head,
        norm="post",
        skip_scale=skip,
        branch_scale=branch,
        embedding={"norm": True, "norm_epsilon": epsilon},
        head=head,
        window=read.window("sliding_window", _length(read, seq_len)),
        mixer=mixers,
        ffn=routed(read, softmax_experts(read)),
    )


FAMILIES: dict[str, Family] = {
    "bamba": Family(
        _bamba,
        "BambaForCausalLM",
        "causal",
        {"mamba_chunk_size": ..., "num_logits_to_keep": ..., "z_loss_coefficient": 0.0},
    ),
    "lfm2": Family(_lfm2, "Lfm2ForCausalLM", "causal"),
    "mamba2": Family(_mamba2, "Mamba2ForCausalLM", "causal", _IRRELEVANT),
    "minimax": Family(
        _minimax, "MiniMaxForCausalLM", "causal", {"router_aux_loss_coef": ..., "block_size": ...}
    ),
    "qwen3_next": Family(
        _qwen3_next, "Qwen3NextForCausalLM", "causal", {"router_aux_loss_coef": ...}
    ),
}
