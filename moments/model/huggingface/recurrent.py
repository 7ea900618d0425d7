"""Decoders with recurrences or short convolutions instead of attention in some or all layers."""

from __future__ import annotations

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
from .family import Reader, declared
from .llama import _BOTH, FFN, INWARD, _decoder, _length
from .moe import _QWEN, _normalised, _stepped, routed, softmax_experts

_LINEAR = "linear_attention"
LONGEST = 512
"""Default sequence length where a config has none: the most that is followed token by token."""


def _mixed(read: Entries, usual: Sequence[str], blocks: Mapping[str, Any]) -> tuple[Any, ...]:
    """The token mixer of every layer, from its type; None: attention."""
    return tuple(map(blocks.get, read.kinds(usual, (FULL, *blocks))))


def _lfm2(read: Entries, seq_len: int | None, ffn: Any = None) -> Transformer:
    """Gated short convolutions and attention by `layer_types`; the hidden width may be adjusted."""
    read.refuse("conv_bias", False, "biases of a short convolution's matrices")
    layers = read.layers("num_hidden_layers")
    attends = read.several("full_attn_idxs", 0) if read.has("full_attn_idxs") else range(layers)
    usual = [FULL if n in attends else "conv" for n in range(layers)]
    width = read.count("intermediate_size")
    if read.flag("block_auto_adjust_ff_dim", False):
        multiple = read.count("block_multiple_of")
        width = int(read.number("block_ffn_dim_multiplier") * int(2 * width / 3))
        width = multiple * -(-width // multiple)
    convolution = ShortConvolution(read.count("conv_L_cache"), read.variance())
    mixers = _mixed(read, usual, {"conv": convolution})
    return _decoder(
        read,
        seq_len,
        activation="silu",
        biases=None,
        d_ff=width,
        attention_dropout=0.0,
        qk_norm="rmsnorm",
        mixer=mixers,
        ffn=ffn,
    )


def _qwen3_next(read: Entries, seq_len: int | None) -> Transformer:
    """Gated attention in every fourth layer, gated delta nets in the rest; mostly with experts."""
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
    if int(read("num_experts", 0)) > 0:
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
        d_ff=read("intermediate_size", None),  # read by dense layers only
        qk_norm="rmsnorm",
        attention_gate="elementwise",
        mixer=mixers,
        ffn=experts,
    )


ONE_STEP = math.log1p(math.e)
"""Step size of modules that start the step bias at 1: softplus(1)."""


_PREFIXED = {"heads": "mamba_n_heads", "head": "mamba_d_head", "state": "mamba_d_state"}
_PREFIXED |= {"groups": "mamba_n_groups", "kernel": "mamba_d_conv", "tap_bias": "mamba_conv_bias"}
_PREFIXED |= {"expand": "mamba_expand", "epsilon": "rms_norm_eps"}


def mamba2_block(
    read: Entries,
    width: int | None = None,
    names: Mapping[str, str] = _PREFIXED,
    biased: str = "mamba_proj_bias",
    **changes: Any,
) -> Mamba2:
    """Mamba-2, by default with step biases of 1.

    Args:
        width: inner features; None: "expand" times d_model if `names` has it, else heads * "head".
        biased: the entry for projection biases, which are refused.
    """
    read.refuse(biased, False, "biases of a mixer's matrices")
    heads, variance = read.count(names["heads"]), read.variance()
    if "expand" in names:
        usual = int(read.number(names["expand"]) * read.count("hidden_size"))
    else:
        usual = heads * read.count(names["head"])
    width, given = usual if width is None else width, read(names["head"], None)
    if width % heads or given not in (None, "auto", width // heads):
        allowed = f"{width} features over {names['head']} = {given}"
        raise domain_error(names["heads"], heads, allowed)
    fields: dict[str, Any] = {
        "groups": read.count(names["groups"]),
        "kernel": read.count(names["kernel"]),
        "tap_variance": variance,
        "tap_distribution": "normal",
        "tap_bias": read.flag(names["tap_bias"]),
        "steps": (ONE_STEP, ONE_STEP),
        "norm_epsilon": read.number(names["epsilon"]),
    }
    if "least_step" not in changes:
        fields |= step_limits(read)
    fields |= changes
    state = read.count(names["state"])
    return Mamba2(heads, width // heads, state, variance, variance, **fields)


def _bamba(read: Entries, seq_len: int | None) -> Transformer:
    """Attention in the layers `attn_layer_indices`, Mamba-2 in the rest; gated units in all."""
    layers, block = read.layers("num_hidden_layers"), mamba2_block(read)
    attends = read.several("attn_layer_indices", 0)
    mixers = tuple(None if number in attends else block for number in range(layers))
    return _decoder(read, seq_len, biased=_BOTH, mixer=mixers)


_ALONE = {"heads": "num_heads", "head": "head_dim", "state": "state_size", "groups": "n_groups"}
_ALONE |= {"kernel": "conv_kernel", "tap_bias": "use_conv_bias", "expand": "expand"}
_ALONE |= {"epsilon": "layer_norm_epsilon"}


def _mamba2(read: Entries, seq_len: int | None) -> Transformer:
    """Mixers only. The output projection has torch's default initialisation, `in_proj`
    initializer_range; step biases are random, and A is 1, 2, ..."""
    read.expect("hidden_act", "silu", "SiLU is assumed behind the convolution")
    drawn = {"tap_variance": None, "tap_distribution": "uniform", "steps": step_range(read)}
    block = mamba2_block(read, None, _ALONE, "use_bias", **drawn)
    return _alone(read, seq_len, block, block.heads * block.d_head)


def step_limits(read: Entries) -> dict[str, Any]:
    """Bounds of the steps; transformers 5 writes infinity as {"__float__": "Infinity"}."""
    given = read("time_step_limit", None) or (0.0, None)
    unbounded = (None, math.inf, {"__float__": "Infinity"})
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise domain_error("time_step_limit", given, "a list of two numbers")
    low, high = given
    high = None if any(high == value for value in unbounded) else high
    for x in (low, high or 0.0):
        if isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x < math.inf:
            raise domain_error("time_step_limit", given, "two numbers, of at least 0")
    return {"least_step": low, "most_step": high}


def step_range(read: Entries) -> tuple[float, float]:
    """Range of the initial steps, which are log-uniform."""
    least = max(read.positive("time_step_min"), read.positive("time_step_floor"))
    return least, read.positive("time_step_max")


def rescaled_output(read: Entries, inner: int) -> float:
    """Variance of torch's default for an output projection, over the depth if it is rescaled."""
    layers = read.layers("num_hidden_layers") if read.flag("rescale_prenorm_residual") else 1
    return 1 / (3 * inner * layers)


def _alone(
    read: Entries, seq_len: int | None, block: Block, inner: int, **names: str
) -> Transformer:
    """A stack of mixers without feed-forward blocks."""
    return declared(
        read,
        seq_len,
        names=names,
        length=read.at_most(LONGEST, seq_len, "", table=False),
        d_head=1,
        normalization="rmsnorm",
        activation="relu",  # used by no block
        biases=None,
        weights=Weights.normal(read.variance()).replace(output=rescaled_output(read, inner)),
        embedding={"padding_id": read.padding()},
        mixer=block,
        ffn=Absent(),
    )


def step_rank(read: Entries, name: str) -> int:
    """Rank of the step projection, by default d_model / 16 rounded up."""
    given = read(name, None)
    return -(-read.count("hidden_size") // 16) if given in (None, "auto") else read.count(name)


def mamba_block(read: Entries, names: dict[str, str], **fields: Any) -> Mamba:
    """Mamba; `names` maps a quantity to its entry name."""
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
    """Mixers only. The output projection and the convolution have torch's default initialisation;
    the step projection is uniform within `time_step_scale` over the square root of its rank."""
    read.refuse("use_bias", False, "biases of a mixer's matrices")
    read.refuse("time_step_init_scheme", "random", "steps of one weight for all features")
    read.expect("hidden_act", "silu", "SiLU is assumed behind the convolution")
    rank = step_rank(read, _MAMBA["rank"])
    step_variance = read.variance("time_step_scale") / (3 * rank)
    fields |= {"step_variance": step_variance, "steps": step_range(read)}
    block = mamba_block(read, _MAMBA, **fields)
    return _alone(read, seq_len, block, block.width, heads="state_size")


def _falcon_mamba(read: Entries, seq_len: int | None) -> Transformer:
    """Norms without gains on B, C and the input of the step projection."""
    epsilon = read.number("mixer_rms_eps")
    return _mamba(read, seq_len, inner_norm="plain", norm_epsilon=epsilon)


def _recurrent_gemma(read: Entries, seq_len: int | None) -> Transformer:
    """RG-LRUs and windowed attention by `block_types`, with gated units half as wide as
    `intermediate_size`; each kind of matrix has its own variance, and a zero bias."""
    read = read.replaced(max_position_embeddings=LONGEST)  # the config has none
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
    inward = INWARD if read.flag("attention_bias") else ()
    output = [2.0 / (layers * (width if one else d_model)) for one in mixers]
    return _decoder(
        read,
        seq_len,
        variance=base,
        d_ff=read.count("intermediate_size") // 2,
        biases=read.biases((*inward, "output", *FFN)),
        rotary=read.rotary(),
        window=read.window("attention_window_size", _length(read, seq_len)),
        weights=Weights(*(1 / d_model,) * 3, output, base, base),
        embedding={"scale": math.sqrt(d_model)},
        head={"logit_softcap": read.cap("logits_soft_cap")},
        mixer=mixers,
    )


_LIGHTNING: dict[str, Any] = {"feature_map": "silu", "scale": 1.0, "gate": "sigmoid"}
_LIGHTNING |= {"norm": "all", "norm_epsilon": 1e-6}
_FACTORS = {
    f"{new}_{side}_factor": f"layernorm_{old}_{side}"
    for side in ("alpha", "beta")
    for new, old in (
        *(("full_attn", "full_attention"), ("linear_attn", "linear_attention")),
        ("mlp", "mlp"),
    )
}
"""Factors of a residual sum's two terms -> their names in older configs."""


def _minimax(read: Entries, seq_len: int | None) -> Transformer:
    """Alternating lightning and full attention, with experts.

    A block's skip connection starts from its norm's output. So layers are Post-LN after a norm of
    the embedding, and the last layer's second norm is the final one.
    """
    kinds = read.several("attn_type_list", 0)  # the authors' earlier entry, as are _FACTORS
    older = {"layer_types": [FULL if kind else _LINEAR for kind in kinds]} if kinds else {}
    older |= {new: read(old, None) for new, old in _FACTORS.items()}
    read = read.replaced(**{name: value for name, value in older.items() if value is not None})
    layers, heads = read.layers("num_hidden_layers"), read.count("num_attention_heads")
    d_head = read.count("head_dim", read.count("hidden_size") // heads)
    linear = LinearAttention(heads, d_head, d_head, gate_variance=read.variance(), **_LIGHTNING)
    usual = [_LINEAR if number % 2 else FULL for number in range(layers)]
    mixers = [
        mixer and mixer.replace(decays=lightning_decays(heads, number, layers))
        for number, mixer in enumerate(_mixed(read, usual, {_LINEAR: linear}))
    ]
    skip, branch = (
        [[read.number(f"{'linear' if m else 'full'}_attn_{side}", 1.0), mlp] for m in mixers]
        for side in ("alpha_factor", "beta_factor")
        for mlp in (read.number(f"mlp_{side}", 1.0),)
    )
    return _decoder(
        read,
        seq_len,
        biases=None,
        d_head=d_head,
        norm="post",
        skip_scale=skip,
        branch_scale=branch,
        embedding={"norm": True, "norm_epsilon": read.number("rms_norm_eps")},
        head={"norm": False},
        window=read.window("sliding_window", _length(read, seq_len)),
        mixer=mixers,
        ffn=routed(read, softmax_experts(read)),
    )


READERS: dict[str, Reader] = {
    "bamba": _bamba,
    "lfm2": _lfm2,
    "mamba": _mamba,
    "falcon_mamba": _falcon_mamba,
    "mamba2": _mamba2,
    "minimax": _minimax,
    "recurrent_gemma": _recurrent_gemma,
    "qwen3_next": _qwen3_next,
}
