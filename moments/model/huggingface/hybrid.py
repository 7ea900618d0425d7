"""Decoders whose layers have attention, a recurrence, or both."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import domain_error
from ..experts import Experts
from ..mixers import Absent, FeedForward, GatedDeltaNet, LayerAttention, ParallelMixer
from ..per_layer import PerLayerEmbedding
from ..positions import Rotary
from ..streams import AltUp, Laurel
from ..transformer import Transformer
from ..weights import Weights
from .entries import FULL, SLIDING, Entries
from .family import Reader
from .latent import latent_attention
from .llama import _decoder, _granite, head_width, sliding
from .moe import listed_sparse, routed, sigmoid_experts, softmax_experts
from .recurrent import (
    _LINEAR,
    _mixed,
    mamba2_block,
    mamba_block,
    rescaled_output,
    step_range,
)
from .relatives import _by_type, _kinds, _positions_per_layer

_NAMES = {"mamba": _LINEAR, "attention": FULL}
"""Layer types before transformers 5 -> their present names."""


def _granitemoehybrid(read: Entries, seq_len: int | None) -> Transformer:
    """Granite's multipliers, Mamba-2 or attention in every layer, experts beside a dense block."""
    layers, shared = read.layers("num_hidden_layers"), read.count("shared_intermediate_size")
    entry = "layer_types" if read.has("layer_types") else "layers_block_type"
    given = read.several(entry, "") or [_LINEAR] * layers
    read = read.replaced(layer_types=[_NAMES.get(kind, kind) for kind in given])
    rotates = read("position_embedding_type", None) == "rope"
    experts: dict[str, Any] = {"d_ff": shared}
    if int(read("num_local_experts")) > 0:
        experts = {"ffn": routed(read, softmax_experts(read, shared=shared))}
    return _granite(
        read,
        seq_len,
        biased=("attention_bias",),
        mixer=_mixed(read, [_LINEAR] * layers, {_LINEAR: mamba2_block(read)}),
        rotary=read.rotary() if rotates else None,
        **experts,
    )


_OF_NEMOTRON = {"heads": "mamba_num_heads", "head": "mamba_head_dim", "state": "ssm_state_size"}
_OF_NEMOTRON |= {"groups": "n_groups", "kernel": "conv_kernel", "tap_bias": "use_conv_bias"}
_OF_NEMOTRON |= {"epsilon": "layer_norm_epsilon"}


def _nemotron_h(read: Entries, seq_len: int | None) -> Transformer:
    """One block per layer: Mamba-2, attention without positions, a dense block or experts."""
    read.refuse("use_bias", False, "biases of a mixer's matrices")
    read.expect("tie_word_embeddings", False, "the module has a matrix of its own for its logits")
    read.expect("mamba_hidden_act", "silu", "SiLU is assumed behind the convolution")
    named = {"M": _LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
    pattern, entry = str(read("hybrid_override_pattern", "")), "layers_block_type"
    given = [named.get(letter, letter) for letter in pattern]
    if not pattern or read.has("layer_types") or read.has(entry):
        given = read.several("layer_types" if read.has("layer_types") else entry, "")
    kinds = [_NAMES.get(kind, kind) for kind in given]
    if not set(kinds) <= set(named.values()):
        raise domain_error("layers_block_type", kinds, f"of {', '.join(named.values())}")
    read.expect("num_hidden_layers", len(kinds), "there are as many layers as kinds of them")
    read = read.replaced(num_hidden_layers=len(kinds), tie_word_embeddings=False)
    variance, experts, least = read.variance(), None, read.positive("time_step_min")
    block = mamba2_block(read, None, _OF_NEMOTRON, steps=step_range(read), least_step=least)
    if "moe" in kinds:
        read.refuse("moe_latent_size", None, "experts between two matrices of their own")
        width = read.count("moe_shared_expert_intermediate_size")
        experts = sigmoid_experts(read).replace(shared=width)
        routed(read, experts)
    ffns: dict[str, Any] = {"mlp": None, "moe": experts}
    mixers: dict[str, Any] = {FULL: None, _LINEAR: block}
    drawn = read.flag("rescale_prenorm_residual")
    rescaled = rescaled_output(read, block.heads * block.d_head) if drawn else variance
    output = [rescaled if kind == _LINEAR else variance for kind in kinds]
    return _decoder(
        read,
        seq_len,
        activation=read.activation("mlp_hidden_act"),
        gated=False,
        rotary=None,
        biases=read.biases(("ffn_in", "ffn_out") if read.flag("mlp_bias") else ()),
        weights=Weights.normal(variance).replace(output=output),
        embedding={"padding_id": None},
        mixer=[mixers.get(kind, Absent()) for kind in kinds],
        ffn=[ffns.get(kind, Absent()) for kind in kinds],
    )


def _falcon_h1(read: Entries, seq_len: int | None) -> Transformer:
    """Parallel Mamba-2 and attention in every layer, with multipliers everywhere."""
    read.refuse("projectors_bias", False, "biases of a mixer's matrices")
    width = None if read.null("mamba_d_ssm") else read.count("mamba_d_ssm")
    several = read.several("ssm_multipliers", 0.0, 5) or [1.0] * 5
    gate, down = read.several("mlp_multipliers", 0.0, 2) or (1.0, 1.0)
    entering, reading = read.number("ssm_in_multiplier"), read.positive("attention_in_multiplier")
    mixer = mamba2_block(
        read,
        width,
        norm=read.flag("mamba_rms_norm"),
        norm_before_gate=read.flag("mamba_norm_before_gate"),
        multipliers=tuple(entering * multiplier for multiplier in several),
    )
    both = ParallelMixer(
        mixer,
        reading * read.number("attention_out_multiplier"),
        read.number("ssm_out_multiplier"),
    )
    if gate != 1.0:
        read.notes.append(
            f"mlp_multipliers = {[gate, down]}: the first is in the variance of the gate's matrix, "
            f"of which the module's own has {gate * gate:.3g} of the squared gradient"
        )
    variance, square = read.variance(), read.variance("attention_in_multiplier")
    temperature = 1 / (read.positive("key_multiplier") * square)
    return _decoder(
        read,
        seq_len,
        biased=("attention_bias", "mlp_bias"),
        temperature=temperature,
        weights=Weights.normal(variance).replace(gate=variance * gate**2),
        branch_scale=[[1.0, down]] * read.layers("num_hidden_layers"),
        embedding={"scale": read.number("embedding_multiplier")},
        head={"output_scale": read.number("lm_head_multiplier")},
        mixer=both,
    )


def _jamba(read: Entries, seq_len: int | None) -> Transformer:
    """Mamba with inner norms, attention without positions, experts in every second layer."""
    read.refuse("mamba_proj_bias", False, "biases of a mixer's matrices")
    layers, variance = range(read.layers("num_hidden_layers")), read.variance()
    names = {"rank": "mamba_dt_rank", "expand": "mamba_expand", "state": "mamba_d_state"}
    block = mamba_block(
        read,
        names | {"kernel": "mamba_d_conv", "tap_bias": "mamba_conv_bias"},
        tap_variance=variance,
        tap_distribution="normal",
        steps=(math.log(2), math.log(2)),  # softplus(0)
        inner_norm="affine",
        norm_epsilon=read.number("rms_norm_eps"),
    )
    attends, chosen = (
        [n for n in layers if n % read.count(f"{of}_period") == read(f"{of}_offset")]
        for of in ("attn_layer", "expert_layer")
    )
    experts: Experts | None = None
    if read.count("num_experts") > 1:
        experts = softmax_experts(read, "num_experts", "num_local_experts", normalised="all")
    return _decoder(
        read,
        seq_len,
        biases=None,
        rotary=None,
        mixer=[None if number in attends else block for number in layers],
        ffn=None if experts is None else routed(read, experts, chosen),
    )


def _kimi_linear(read: Entries, seq_len: int | None) -> Transformer:
    """Kimi's delta attention, latent attention without positions, experts."""
    values = {new: read(old, None) for old, new in _KIMI.items() if not read.has(new)}
    read = read.replaced(**values)
    layers, variance = read.layers("num_hidden_layers"), read.variance()
    own = read.inside("linear_attn_config")
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    width, heads, kernel = (own.count(k, read(name)) for k, name in names.items())
    full = [n for n in range(1, layers) if n % 4 == 0]
    if own.has("kda_layers") and own.has("full_attn_layers"):
        full = [n - 1 for n in own.several("full_attn_layers", 0)]
        others = sorted(n + 1 for n in set(range(layers)) - set(full))
        if sorted(own.several("kda_layers", 0)) != others:
            raise domain_error("kda_layers", own("kda_layers"), "those not in full_attn_layers")
    usual = [FULL if n in full else _LINEAR for n in range(layers)]
    block = GatedDeltaNet(
        *(heads, heads, width, width, variance, variance, variance),
        kernel=kernel,
        tap_variance=variance,
        rates=(1.0, 16.0),
        steps=(1e-3, 1e-1),
        norm_epsilon=read.number("rms_norm_eps"),
        decay="channel",
        gate="sigmoid",
        rank=width,
    )
    mixers = _mixed(read, usual, {_LINEAR: block})
    latent = latent_attention(read, variance)
    return _decoder(
        read,
        seq_len,
        biases=None,
        rotary=None,
        d_head=read.count("qk_rope_head_dim"),
        kv_heads=read.count("num_attention_heads"),
        mixer=[mixer or latent for mixer in mixers],
        ffn=routed(read, sigmoid_experts(read, "num_local_experts"), listed_sparse(read, 1)),
    )


def _gemma4(read: Entries, seq_len: int | None) -> Transformer:
    """Gemma 3 with normalised values, logits without 1/sqrt(d_head), and other head widths in full
    layers; the last layers may share earlier keys and values; optional per-layer embeddings."""
    if (given := read("use_bidirectional_attention", None)) == "all":
        read.leave_out("use_bidirectional_attention", given, "a causal mask is assumed")
    kinds = _kinds(read, 6)
    _mixed(read, kinds, dict.fromkeys((SLIDING,), True))  # refuses other types
    kinds[-1] = FULL  # as the module does
    if alike := read.flag("attention_k_eq_v"):
        read.notes.append(
            "attention_k_eq_v = True: full layers' keys and values are drawn apart; of the one "
            "matrix that they are the squared gradient is about the sum of both"
        )
    # entries by layer replace both the common and the full layers' head sizes
    named = {str(n).lstrip("0") or "0": row for n, row in read("per_layer_config", {}).items()}
    own = read.replaced(per_layer_config=named).inside("per_layer_config")
    keys, wide = read("num_global_key_value_heads", None), read.count("global_head_dim", 512)
    heads: dict[str, Any] = {kind: {"head_dim": read.count("head_dim")} for kind in kinds}
    if not named:
        heads[FULL] = {"head_dim": wide, "num_key_value_heads": keys if alike else None}
    sources = _keys_of(read, kinds)
    own_keys = sources.count(None)
    mixers, temperatures = [], []
    for number, (kind, source) in enumerate(zip(kinds, sources, strict=True)):
        layer = own.inside(str(number), heads[kind])
        given = layer.count("head_dim"), layer("num_key_value_heads", None)
        temperatures.append(given[0] ** -0.5)
        mixers.append(LayerAttention(*given, "rmsnorm", value_norm=True, keys_of=source))
    by_kind, rotaries = read.inside("rope_parameters"), {}
    for kind, part, base in ((FULL, 0.25, 1e6), (SLIDING, 1.0, 1e4)):
        rope = by_kind.inside(kind)
        part = rope.number("partial_rotary_factor", 1.0 if by_kind.has(kind) else part)
        # frequencies are spaced over all features, although only a part is rotated
        rotaries[kind] = Rotary(part, rope.positive("rope_theta", base) ** part)
        if rope("rope_type", "default") not in ("default", "proportional") or rope.has("factor"):
            given_rope = read("rope_parameters")
            read.leave_out("rope_parameters", given_rope, "unscaled rotary frequencies are assumed")
    ffns: Any = _beside_experts(read) if read.flag("enable_moe_block") else None
    if read.flag("use_double_wide_mlp") and own_keys < len(kinds):
        read.refuse("enable_moe_block", False, "wider dense blocks beside experts")
        wide_block = FeedForward(2 * read.count("intermediate_size"))
        ffns = (None,) * own_keys + (wide_block,) * (len(kinds) - own_keys)
    return _decoder(
        read,
        seq_len,
        norm="sandwich",
        rotary=[rotaries[kind] for kind in kinds],
        temperature=temperatures,
        window=sliding(read, seq_len, kinds),
        embedding={"scale": math.sqrt(read.count("hidden_size"))},
        head={"logit_softcap": read.cap("final_logit_softcapping", None)},
        mixer=mixers,
        ffn=ffns,
        per_layer_embedding=_per_layer(read),
    )


def _keys_of(read: Entries, kinds: list[str]) -> list[int | None]:
    """For every layer the one whose keys and values it reads; None: its own."""
    own = len(kinds) - int(read.number("num_kv_shared_layers"))
    sources = {kind: number for number, kind in enumerate(kinds[: max(own, 0)], 1)}
    if own < len(kinds) and set(sources) != set(kinds):
        allowed = "so few that layers of every kind before have keys of their own"
        raise domain_error("num_kv_shared_layers", len(kinds) - own, allowed)
    return [None if number < own else sources[kind] for number, kind in enumerate(kinds)]


def _gemma3n(read: Entries, seq_len: int | None) -> Transformer:
    """Gemma 3 with normalised values, logits without 1/sqrt(d_head), shared keys, Laurel, sparse
    gates, and AltUp with per-layer embeddings in its other streams."""
    read.refuse("altup_active_idx", 0, "layers that read another stream than the first")
    read.refuse("altup_correct_scale", True, "per-layer embeddings that read the stream unscaled")
    kinds, variance, width = _kinds(read, 5), read.variance(), head_width(read)
    layers, scale = len(kinds), [[math.sqrt(0.5), 1.0]] * len(kinds)
    positions = _positions_per_layer(_by_type(read, 1e6, 1e4, "rope_local_base_freq"), kinds)
    positions["temperature"] = (width**-0.5 * np.asarray(positions["temperature"])).tolist()
    widths = read.counts("intermediate_size", layers)
    usual = [0.95 if n < 10 and layers > 10 else 0.0 for n in range(layers)]
    shares = read.several("activation_sparsity_pattern", 0.0, layers) or usual
    return _decoder(
        read,
        seq_len,
        norm="sandwich",
        window=sliding(read, seq_len, kinds),
        embedding={"scale": math.sqrt(read.count("hidden_size"))},
        head={"logit_softcap": read.cap("final_logit_softcapping", None)},
        mixer=[
            LayerAttention(qk_norm="rmsnorm", value_norm=True, keys_of=source)
            for source in _keys_of(read, kinds)
        ],
        d_ff=widths[0],
        ffn=[FeedForward(one, share or None) for one, share in zip(widths, shares, strict=True)],
        skip_scale=scale,
        branch_scale=scale,
        laurel=Laurel(read.count("laurel_rank"), variance, variance),
        streams=AltUp(read.count("altup_num_inputs"), *(variance,) * 5),
        per_layer_embedding=_per_layer(read),
        **positions,
    )


def _per_layer(read: Entries) -> PerLayerEmbedding | None:
    """The per-layer token embedding, if hidden_size_per_layer_input is not 0."""
    width, variance = int(read.number("hidden_size_per_layer_input")), read.variance()
    if width == 0:
        return None
    return PerLayerEmbedding(
        width,
        *(variance,) * 4,
        scale=math.sqrt(width),
        projection_scale=read.count("hidden_size") ** -0.5,
    )


def _beside_experts(read: Entries) -> tuple[Experts | None, ...]:
    """Experts parallel to a dense block, each with a norm before and after it."""
    width, variance = read.count("hidden_size"), read.variance()
    read.notes.append(
        "enable_moe_block = True: pre_feedforward_layernorm and pre_feedforward_layernorm_2 count "
        "as one norm, whose gain receives what both do; the router's input has the factor "
        "hidden_size^-1/2, which is in its matrix: of that the squared gradient is hidden_size = "
        f"{width} times router.proj's; "
        "router.scale and router.per_expert_scale have none here"
    )
    experts = Experts(
        read.count("num_experts"),
        read.count("top_k_experts"),
        d_ff=read.count("moe_intermediate_size"),
        router_variance=variance / width,
        shared=read.count("intermediate_size"),
        output_norms=True,
    )
    return routed(read, experts)


_KIMI = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Entry name in released configs -> in transformers' config class."""


READERS: dict[str, Reader] = {
    "granitemoehybrid": _granitemoehybrid,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
}
