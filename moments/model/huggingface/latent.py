"""Decoders with latent attention, with attention sinks, or with a learned activation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ...errors import domain_error
from ..experts import Experts
from ..mixers import LatentAttention
from ..transformer import Transformer
from ..weights import Biases
from .entries import FULL, SLIDING, Entries
from .family import Reader
from .llama import _BOTH, FFN, _decoder, _granite, _length, _longrope, sliding, yarn
from .moe import first_dense, listed_sparse, routed, sigmoid_experts, softmax_experts

LATENT_EPSILON = 1e-6
"""Epsilon of the latents' norms: transformers does not pass the config's to them."""


def latent_attention(read: Entries, variance: float, **changes: Any) -> LatentAttention:
    """DeepSeek's latent attention, all matrices of one variance.

    Raises:
        DomainError: heads that share keys, or biases of the matrices to the latents.
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
    """Logit temperature from YaRN's scaling: 1 / mscale^2, or 1 without scaling.

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
    width, factors = read.count("qk_rope_head_dim"), {}
    if changes.pop("scaled", False):
        ranks = {"query_factor": "q_lora_rank", "kv_factor": "kv_lora_rank"}
        ratios = {name: read.count("hidden_size") / read.count(r) for name, r in ranks.items()}
        factors = {name: math.sqrt(ratio) for name, ratio in ratios.items()}
    fields: dict[str, Any] = {}
    if "rotary" not in changes:
        rotary, factor = yarn(read, width)
        fields = {"rotary": rotary, "temperature": latent_temperature(read)}
        if factor != 1.0:
            read.leave_out("attention_factor", factor, _FACTOR)
    return _decoder(
        read,
        seq_len,
        variance=variance,
        biases=None,
        d_head=width,
        kv_heads=read.count("num_attention_heads"),
        mixer=latent_attention(read, read.variance() if variance is None else variance, **factors),
        **(fields | changes),
    )


_FACTOR = "the turned part of queries and keys keeps its size"


def _minicpm3(read: Entries, seq_len: int | None) -> Transformer:
    """Multipliers on branches, embedding and logits, set by depth and width."""
    longrope = _longrope(read, read.count("qk_rope_head_dim"), _length(read, seq_len))
    if longrope.get("temperature", 1.0) != 1.0:
        read.leave_out("attention_factor", longrope["temperature"] ** -0.5, _FACTOR)
    depth, d_model = read.layers("num_hidden_layers"), read.count("hidden_size")
    scale = 1.0 if read.null("scale_depth") else read.number("scale_depth") / math.sqrt(depth)
    base = d_model if read.null("dim_model_base") else read.positive("dim_model_base")
    return _latent_decoder(
        read,
        seq_len,
        rotary=longrope["rotary"],
        temperature=1.0,
        branch_scale=scale,
        embedding={"scale": read.number("scale_emb")},
        head={"output_scale": base / d_model},
    )


def _youtu(read: Entries, seq_len: int | None) -> Transformer:
    """Default standard deviation 2/sqrt(5 d_model), and twice that for the token table."""
    usual = 2.0 / math.sqrt(5.0 * read.count("hidden_size"))
    variance = read.variance(default=usual)
    table = read.variance("embedding_initializer_range", 0.0) or 4.0 * variance
    return _latent_decoder(
        read,
        seq_len,
        variance=variance,
        embedding={"token_variance": table},
    )


def _granite_swa(
    read: Entries, seq_len: int | None, biased: tuple[str, ...] = _BOTH, **changes: Any
) -> Transformer:
    """Granite with windows, a rotary base per layer (0: no rotation) and zero attention sinks."""
    layers, rotary = read.layers("num_hidden_layers"), read.rotary()
    bases = read.several("layer_rope_theta", 0.0, layers) or [rotary.base] * layers
    kinds = read.kinds([SLIDING if number % 4 else FULL for number in range(layers)])
    return _granite(
        read,
        seq_len,
        biased,
        attention_sink=0.0,
        rotary=[rotary.replace(base=float(base)) if base else None for base in bases],
        window=sliding(read, seq_len, kinds),
        **changes,
    )


def _apertus(read: Entries, seq_len: int | None) -> Transformer:
    """No gate; queries and keys are normalised; xIELU has its initial parameters."""
    return _decoder(read, seq_len, gated=False, qk_norm="rmsnorm")


# --- with experts ---------------------------------------------------------------------------------


def _deepseek_v3(
    read: Entries, seq_len: int | None, sparse: Iterable[int] | None = None
) -> Transformer:
    sparse = first_dense(read) if sparse is None else sparse
    experts = routed(read, sigmoid_experts(read), sparse)
    return _latent_decoder(read, seq_len, ffn=experts)


def _deepseek_v2(read: Entries, seq_len: int | None) -> Transformer:
    """Softmax over all experts; a group's score is that of its best expert."""
    method = read("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise domain_error("topk_method", method, "'greedy' or 'group_limited_greedy'")
    groups = (read.count("n_group"), read.count("topk_group")) if method != "greedy" else (1, 1)
    width = read.count("moe_intermediate_size")
    experts = softmax_experts(
        read,
        "n_routed_experts",
        "num_experts",
        d_ff=width,
        normalised="all",
        scale=read.positive("routed_scaling_factor"),
        groups=groups[0],
        kept_groups=groups[1],
        group_best=1,
        shared=width * int(read("n_shared_experts", 0)),
    )
    ffn = routed(read, experts, first_dense(read))
    return _latent_decoder(read, seq_len, ffn=ffn)


def _glm4_moe_lite(read: Entries, seq_len: int | None) -> Transformer:
    """A dense first layer, unless `mlp_layer_types` differs."""
    experts = routed(read, sigmoid_experts(read), listed_sparse(read, 1))
    return _latent_decoder(read, seq_len, ffn=experts)


def _longcat_flash(read: Entries, seq_len: int | None) -> Transformer:
    """Each layer is declared as two: experts read the input of the first one's dense block, and
    their output is added after the second. Latents are scaled by sqrt(d_model / rank)."""
    identity = int(read("zero_expert_num") or 0)
    experts = Experts(
        read.count("n_routed_experts") + identity,
        read.count("moe_topk"),
        d_ff=read.count("expert_ffn_hidden_size"),
        normalised="all",
        scale=read.positive("routed_scaling_factor"),
        router_variance=read.variance(),
        shared=read.count("ffn_hidden_size"),
        identity=identity,
        delayed=True,
    )
    layers = 2 * read.layers("num_layers")
    read.expect("num_hidden_layers", layers, "its layers are counted in halves")
    read.expect("head_dim", read.count("qk_rope_head_dim"), "so many features are turned")
    read = read.replaced(num_hidden_layers=layers)
    return _latent_decoder(
        read,
        seq_len,
        scaled=True,
        names={"layers": "num_hidden_layers"},
        d_ff=read.count("ffn_hidden_size"),
        ffn=routed(read, experts, range(0, layers, 2)),
    )


def _gpt_oss(read: Entries, seq_len: int | None) -> Transformer:
    """Attention sinks, windows in every second layer; clamped experts whose factor is 1 + u."""
    layers = read.layers("num_hidden_layers")
    kinds = read.kinds([FULL if number % 2 else SLIDING for number in range(layers)])
    alpha = read.number("swiglu_alpha")
    if alpha != 1.702:
        raise domain_error("swiglu_alpha", alpha, "1.702, that of quick_gelu")
    variance = read.variance()
    experts = softmax_experts(
        read, router_bias_variance=variance, shift=1.0, clamp=read.positive("swiglu_limit")
    )
    return _decoder(
        read,
        seq_len,
        activation="quick_gelu",
        attention_sink=variance,
        window=sliding(read, seq_len, kinds),
        biases=Biases() if read.flag("attention_bias") else read.biases(FFN),
        ffn=routed(read, experts),
    )


READERS: dict[str, Reader] = {
    "minicpm3": _minicpm3,
    "youtu": _youtu,
    "apertus": _apertus,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "gpt_oss": _gpt_oss,
    "longcat_flash": _longcat_flash,
    "granite_swa": _granite_swa,
}
