"""Decoders with recurrences or short convolutions in attention's place, in all layers or some."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import domain_error
from ..block import Block
from ..mixers import (
    RGLRU,
    Absent,
    GatedDeltaNet,
    LinearAttention,
    Mamba,
    Mamba2,
    ShortConvolution,
    lightning_decays,
)
from ..transformer import Transformer
from ..weights import Weights
from .entries import FULL, Entries
from .family import Family, causal_head, declared
from .llama import _BOTH, _decoder, _length
from .moe import _QWEN, _normalised, _stepped, routed, softmax_experts

_LINEAR = "linear_attention"
LONGEST = 512
"""Tokens where a config names none: as many as are followed by token."""


def _mixed(read: Entries, usual: Sequence[str], blocks: Mapping[str, Any]) -> tuple[Any, ...]:
    """The block of every layer by its kind, None where that is attention."""
    return tuple(map(blocks.get, read.kinds(usual, (FULL, *blocks))))


def _lfm2(read: Entries, seq_len: int | None) -> Transformer:
    """Gated short convolutions and attention by `layer_types`; two thirds of intermediate_size."""
    read.refuse("conv_bias", False, "biases of a short convolution's matrices")
    layers = read.layers("num_hidden_layers")
    attends = read.several("full_attn_idxs", 0) if read.has("full_attn_idxs") else range(layers)
    usual = [FULL if n in attends else "conv" for n in range(layers)]
    width = read.count("intermediate_size")
    if read.flag("block_auto_adjust_ff_dim"):
        multiple = read.count("block_multiple_of")
        width = int(read.number("block_ffn_dim_multiplier") * int(2 * width / 3))
        width = multiple * -(-width // multiple)
    convolution = ShortConvolution(read.count("conv_L_cache"), read.variance())
    mixers = _mixed(read, usual, {"conv": convolution})
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
    usual = [FULL if (n + 1) % every == 0 else _LINEAR for n in range(layers)]
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
    mixers = _mixed(read, usual, {_LINEAR: block})
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


def mamba2_block(read: Entries, width: int | None = None, **changes: Any) -> Mamba2:
    """Mamba-2 of the entries that begin with "mamba_", steps with biases of 1.

    Args:
        width: features of x; None: mamba_expand * hidden_size.
    """
    read.refuse("mamba_proj_bias", False, "biases of a mixer's matrices")
    heads, variance = read.count("mamba_n_heads"), read.variance()
    usual = int(read.number("mamba_expand") * read.count("hidden_size"))
    width = usual if width is None else width
    given = read("mamba_d_head", None)
    if width % heads or given not in (None, "auto", width // heads):
        raise domain_error("mamba_n_heads", heads, f"{width} features over mamba_d_head")
    fields: dict[str, Any] = {
        "groups": read.count("mamba_n_groups"),
        "kernel": read.count("mamba_d_conv"),
        "tap_variance": variance,
        "tap_distribution": "normal",
        "tap_bias": read.flag("mamba_conv_bias"),
        "steps": (ONE_STEP, ONE_STEP),
        "norm_epsilon": read.number("rms_norm_eps"),
    } | step_limits(read)
    fields |= changes
    return Mamba2(heads, width // heads, read.count("mamba_d_state"), variance, variance, **fields)


def _bamba(read: Entries, seq_len: int | None) -> Transformer:
    """Mamba-2 in all layers but those of `attn_layer_indices`, with gated units in each."""
    layers, block = read.layers("num_hidden_layers"), mamba2_block(read)
    attends = read.several("attn_layer_indices", 0)
    mixers = tuple(None if number in attends else block for number in range(layers))
    return _decoder(read, seq_len, biased=_BOTH, mixer=mixers)


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
    variance = read.variance()
    block = Mamba2(
        heads,
        width,
        read.count("state_size"),
        variance,
        variance,
        groups=read.count("n_groups"),
        kernel=read.count("conv_kernel"),
        tap_bias=read.flag("use_conv_bias"),
        steps=step_range(read),
        norm_epsilon=read.number("layer_norm_epsilon"),
        **step_limits(read),
    )
    return _alone(read, seq_len, block, inner, ("num_hidden_layers", "hidden_size", "num_heads"))


def step_limits(read: Entries) -> dict[str, Any]:
    """Between which steps are kept; transformers 5 writes infinity as {"__float__": "Infinity"}."""
    given = read("time_step_limit", None) or (0.0, None)
    unbounded = (None, math.inf, {"__float__": "Infinity"})
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise domain_error("time_step_limit", given, "a list of two numbers")
    low, high = given
    high = None if any(high == one for one in unbounded) else high
    for one in (low, high or 0.0):
        if isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one < math.inf:
            raise domain_error("time_step_limit", given, "two numbers, of at least 0")
    return {"least_step": low, "most_step": high}


def step_range(read: Entries) -> tuple[float, float]:
    """Between which steps start, uniformly in their logarithm."""
    least = max(read.positive("time_step_min"), read.positive("time_step_floor"))
    return least, read.positive("time_step_max")


def rescaled_output(read: Entries, inner: int) -> float:
    """Variance of an output projection of torch's default, over the depth where it is rescaled."""
    layers = read.layers("num_hidden_layers") if read.flag("rescale_prenorm_residual") else 1
    return 1 / (3 * inner * layers)


def _alone(
    read: Entries, seq_len: int | None, block: Block, inner: int, shape: tuple[Any, Any, Any]
) -> Transformer:
    """Mixers and nothing else."""
    return declared(
        read,
        read.number("layer_norm_epsilon"),
        shape=shape,
        d_head=1,
        seq_len=read.at_most(LONGEST, seq_len, "", table=False),
        normalization="rmsnorm",
        dropout=0.0,
        biases=None,
        weights=Weights.normal(read.variance()).replace(output=rescaled_output(read, inner)),
        embedding={"padding_id": read.padding()},
        mixer=block,
        ffn=Absent(),
    )


def step_rank(read: Entries, name: str) -> int:
    """Features that steps are made of: the width over 16 where a config leaves it open."""
    given = read(name, None)
    return -(-read.count("hidden_size") // 16) if given in (None, "auto") else read.count(name)


def mamba_block(read: Entries, names: dict[str, str], **fields: Any) -> Mamba:
    """Mamba of its entries by what they are called."""
    variance, d_model = read.variance(), read.count("hidden_size")
    return Mamba(
        int(read.number(names["expand"]) * d_model),
        read.count(names["state"]),
        step_rank(read, names["rank"]),
        variance,
        fields.pop("step_variance", variance),
        variance,
        kernel=read.count(names["kernel"]),
        tap_bias=read.flag(names["tap_bias"]),
        **fields,
    )


_MAMBA = {"rank": "time_step_rank", "expand": "expand", "state": "state_size"}
_MAMBA |= {"kernel": "conv_kernel", "tap_bias": "use_conv_bias"}


def _mamba(read: Entries, seq_len: int | None, **fields: Any) -> Transformer:
    """Mixers alone. The output projection and the convolution are torch's default; the matrix to
    the steps is uniform, of `time_step_scale` over the root of its rank."""
    read.refuse("use_bias", False, "biases of a mixer's matrices")
    read.refuse("time_step_init_scheme", "random", "steps of one weight for all features")
    read.expect("hidden_act", "silu", "SiLU is assumed behind the convolution")
    rank = step_rank(read, _MAMBA["rank"])
    step_variance = read.variance("time_step_scale") / (3 * rank)
    fields |= {"step_variance": step_variance, "steps": step_range(read)}
    block = mamba_block(read, _MAMBA, **fields)
    depth = "num_hidden_layers", "hidden_size", "state_size"
    return _alone(read, seq_len, block, block.width, depth)


def _falcon_mamba(read: Entries, seq_len: int | None) -> Transformer:
    """Norms without gains of B, C and what steps are made of."""
    epsilon = read.number("mixer_rms_eps")
    return _mamba(read, seq_len, inner_norm="plain", norm_epsilon=epsilon)


def _recurrent_gemma(read: Entries, seq_len: int | None) -> Transformer:
    """RG-LRUs and attention in windows by `block_types`, with gated units of half
    `intermediate_size`; matrices have variances of their own, and biases, of 0."""
    read = read.replaced(max_position_embeddings=LONGEST)  # it names none
    layers, d_model = read.layers("num_hidden_layers"), read.count("hidden_size")
    heads, width = read.count("num_attention_heads"), read.count("lru_width", d_model)
    every, kernel = read.positive("w_init_variance_scale"), read.count("conv1d_width")
    base, block_width = every / kernel, max(width // heads, 1)
    unit = RGLRU(
        *(width, heads, 1 / d_model, every / block_width, every / block_width),
        kernel=kernel,
        tap_variance=base,
        gate=read.activation("hidden_activation"),
    )
    blocks = {"attention": None, "recurrent": unit}
    given = read.several("block_types", "")
    if not given or not set(given) <= set(blocks):
        raise domain_error("block_types", given, f"a list of {' and '.join(map(repr, blocks))}")
    mixers = [blocks[given[number % len(given)]] for number in range(layers)]
    inward = ("query", "key", "value") if read.flag("attention_bias") else ()
    output = [2.0 / (layers * (width if one else d_model)) for one in mixers]
    cap = read.cap("logits_soft_cap")
    return _decoder(
        read,
        seq_len,
        variance=base,
        activation=read.activation("hidden_activation"),
        d_ff=read.count("intermediate_size") // 2,
        biases=read.biases((*inward, "output", "ffn_in", "ffn_out", "gate")),
        rotary=read.rotary(),
        window=read.window("attention_window_size", _length(read, seq_len)),
        weights=Weights(*(1 / d_model,) * 3, output, base, base),
        embedding={"scale": math.sqrt(d_model)},
        head=causal_head(read, base, read.number("rms_norm_eps"), logit_softcap=cap),
        mixer=mixers,
    )


_IRRELEVANT = {
    "chunk_size": ...,
    "residual_in_fp32": ...,
    "time_step_rank": ...,
    "use_cache": ...,
}
"""Of Mamba-2: how it is computed, and an entry that nothing reads."""
_COMPUTED: dict[str, Any] = {
    "residual_in_fp32": ...,
    "use_mambapy": ...,
    "use_associative_scan": ...,
}
_COMPUTED |= dict.fromkeys(("intermediate_size", "d_inner", "d_model", "n_layer"), ...)
_COMPUTED |= {
    "fused_add_norm": ...,
    "pad_vocab_size_multiple": ...,
    "rms_norm": True,
    "ssm_cfg": {},
}


def _minimax(read: Entries, seq_len: int | None) -> Transformer:
    """Lightning and full attention by turns, with experts.

    A block's sum keeps what its norm made of the stream. So layers are Post-LN behind a norm of the
    embedding, the last one's second norm being the final one; the stream is what those norms leave.
    """
    layers, heads = read.layers("num_hidden_layers"), read.count("num_attention_heads")
    width, variance = read.count("hidden_size"), read.variance()
    d_head = read.count("head_dim", width // heads)
    usual = [_LINEAR if number % 2 else FULL for number in range(layers)]
    for_each = _mixed(read, usual, {_LINEAR: True})
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
    "mamba": Family(_mamba, "MambaForCausalLM", "causal", _COMPUTED),
    "falcon_mamba": Family(_falcon_mamba, "FalconMambaForCausalLM", "causal", _COMPUTED),
    "mamba2": Family(_mamba2, "Mamba2ForCausalLM", "causal", _IRRELEVANT),
    "minimax": Family(
        _minimax, "MiniMaxForCausalLM", "causal", {"router_aux_loss_coef": ..., "block_size": ...}
    ),
    "recurrent_gemma": Family(
        _recurrent_gemma,
        "RecurrentGemmaForCausalLM",
        "causal",
        {"final_w_init_variance_scale": ..., "head_dim": ..., "embeddings_scale_by_sqrt_dim": True},
    ),
    "qwen3_next": Family(
        _qwen3_next, "Qwen3NextForCausalLM", "causal", {"router_aux_loss_coef": ...}
    ),
}
