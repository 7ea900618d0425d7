"""Types that change a block, layer pattern or default of an earlier one; text models of multimodal
types, whose positions are ordinary token positions if there are no images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import domain_error
from ..transformer import Transformer
from .entries import FULL, SLIDING, Entries
from .family import Reader
from .latent import _deepseek_v3, _granite_swa, _latent_decoder
from .llama import INWARD, _decoder, _gemma2, _length, _llama, _mistral, _qwen2, sliding
from .moe import (
    _QWEN,
    _glm4_moe,
    _qwen3_moe,
    first_dense,
    listed_sparse,
    routed,
    sigmoid_experts,
    softmax_experts,
)
from .recurrent import _lfm2, _qwen3_next
from .relatives import _by_type, _exaone4, _glm, _hunyuan, _kinds, _olmo2, _positions_per_layer


def _alike(read: Entries, name: str, usual: int) -> int:
    """A count, or a list that repeats one count for every layer.

    Raises:
        DomainError: layers differ.
    """
    given = read(name, ...) if read.has(name) else usual
    counts: Sequence[Any] = given if isinstance(given, list) and given else [given]
    if any(count != counts[0] for count in counts):
        raise domain_error(name, given, "the same number in every layer")
    return read.replaced(**{name: counts[0]}).count(name)


def _note_query_scaling(read: Entries, seq_len: int | None) -> None:
    """Note Llama 4's scaling of queries, which grows with floor(position / original length)."""
    given = read.rope() or read.usual("rope_parameters")
    original = given.get("original_max_position_embeddings", 0)
    beta = given.get("llama_4_scaling_beta")
    if beta and _length(read, seq_len) > original:
        meaning = f"queries behind the first {original} tokens are as large as those before"
        read.leave_out("llama_4_scaling_beta", beta, meaning)


def _cwm(read: Entries, seq_len: int | None) -> Transformer:
    """Layers 1, 5, 9, ... full, the others with windows; no biases in attention."""
    layers = read.layers("num_hidden_layers")
    kinds = read.kinds([SLIDING if number % 4 else FULL for number in range(layers)])
    window = sliding(read, seq_len, kinds)
    return _decoder(read, seq_len, biased=("mlp_bias",), window=window)


def _ministral3(read: Entries, seq_len: int | None) -> Transformer:
    _note_query_scaling(read, seq_len)
    return _mistral(read, seq_len)


def _vaultgemma(read: Entries, seq_len: int | None) -> Transformer:
    """Gemma 2 without norms after blocks."""
    return _gemma2(read, seq_len, norm="pre")


def _qwen2_vl(read: Entries, seq_len: int | None) -> Transformer:
    return _qwen2(read, seq_len, rotary=read.rotary(scaled=("mrope",)))


def _qwen3_vl(read: Entries, seq_len: int | None) -> Transformer:
    return _decoder(read, seq_len, qk_norm="rmsnorm")


def _glm4v(read: Entries, seq_len: int | None) -> Transformer:
    return _glm(read, seq_len, biased=True, norm="sandwich")


# --- with experts ---------------------------------------------------------------------------------


def _exaone_moe(read: Entries, seq_len: int | None) -> Transformer:
    """EXAONE 4 with norms before its blocks."""
    read = read.replaced(n_shared_experts=read("num_shared_experts"))
    experts = routed(read, sigmoid_experts(read, "num_experts"), listed_sparse(read))
    return _exaone4(read, seq_len, norm="pre", ffn=experts)


def _flex_olmo(read: Entries, seq_len: int | None) -> Transformer:
    normalised = "chosen" if read.flag("norm_topk_prob") else "all"
    experts = softmax_experts(read, *_QWEN, normalised=normalised)
    return _olmo2(read, seq_len, ffn=routed(read, experts))


def _hunyuan_moe(read: Entries, seq_len: int | None) -> Transformer:
    """A shared expert as wide as the others; per-layer lists must repeat one number."""
    read = read.replaced(num_experts=_alike(read, "num_experts", 1))
    chosen = _alike(read, "moe_topk", 1)
    experts = softmax_experts(read, *_QWEN, chosen=chosen, shared=read.count("intermediate_size"))
    return _hunyuan(read, seq_len, ffn=routed(read, experts))


def _lfm2_moe(read: Entries, seq_len: int | None) -> Transformer:
    """Experts after the first layers; their biases, used only in selection, start at 0."""
    dense = first_dense(read.replaced(first_k_dense_replace=read("num_dense_layers")))
    experts = sigmoid_experts(read, "num_experts")
    return _lfm2(read, seq_len, ffn=routed(read, experts, dense))


def _solar_open(read: Entries, seq_len: int | None) -> Transformer:
    biased = INWARD if read.flag("attention_bias") else ()
    experts = routed(read, sigmoid_experts(read))
    return _decoder(read, seq_len, d_ff=None, biases=read.biases(biased), ffn=experts)


def _mellum(read: Entries, seq_len: int | None) -> Transformer:
    """Qwen 3's experts, with windows and rotary bases by layer type."""
    kinds = _kinds(read, None)
    positions = _positions_per_layer(_by_type(read, 5e5, 1e4, "rope_local_base_freq"), kinds)
    experts = softmax_experts(
        read,
        "num_local_experts",
        "num_experts",
        d_ff=read.count("moe_intermediate_size"),
        normalised="chosen" if read.flag("norm_topk_prob") else "all",
    )
    return _decoder(
        read,
        seq_len,
        qk_norm="rmsnorm",
        window=sliding(read, seq_len, kinds),
        ffn=routed(read, experts, listed_sparse(read)),
        **positions,
    )


def _granitemoe_swa(read: Entries, seq_len: int | None) -> Transformer:
    experts = softmax_experts(read, shared=int(read("shared_intermediate_size", 0)))
    return _granite_swa(read, seq_len, ("attention_bias",), ffn=routed(read, experts))


def _mistral4(read: Entries, seq_len: int | None) -> Transformer:
    """Latent attention; softmax over all experts; a group's score is the sum of its best two."""
    _note_query_scaling(read, seq_len)
    given = dict(read.rope() or read.usual("rope_parameters"))
    rope, nope = read.count("qk_rope_head_dim"), read.count("qk_nope_head_dim")
    usual = rope / (rope + nope)
    if (fraction := given.pop("partial_rotary_factor", usual)) != usual:
        read.leave_out("partial_rotary_factor", fraction, "qk_rope_head_dim says it")
    read = read.replaced(rope_parameters=given, rope_scaling=None)
    width = read.count("moe_intermediate_size")
    experts = softmax_experts(
        read,
        "n_routed_experts",
        d_ff=width,
        normalised="chosen" if read.flag("norm_topk_prob") else "all",
        scale=read.positive("routed_scaling_factor"),
        groups=read.count("n_group", 1),
        kept_groups=read.count("topk_group", 1),
        shared=width * int(read("n_shared_experts", 0)),
    )
    return _latent_decoder(read, seq_len, ffn=routed(read, experts, first_dense(read)))


def _indexed(read: Entries, seq_len: int | None) -> Transformer:
    """DeepSeek-V3 with sparse attention to `index_topk` keys, read as full attention."""
    if (most := read.count("index_topk")) < _length(read, seq_len):
        read.leave_out("index_topk", most, "every token sees all those before it")
    return _deepseek_v3(read, seq_len, listed_sparse(read))


READERS: dict[str, Reader] = {
    "cwm": _cwm,
    "internlm3": _llama,
    "iquestcoder": _llama,
    "ministral3": _ministral3,
    "vaultgemma": _vaultgemma,
    "qwen2_vl_text": _qwen2_vl,
    "qwen2_5_vl_text": _qwen2_vl,
    "qwen3_vl_text": _qwen3_vl,
    "glm4v_text": _glm4v,
    "qwen3_5_text": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_vl_moe_text": _qwen3_moe,
    "glm4v_moe_text": _glm4_moe,
    "exaone_moe": _exaone_moe,
    "flex_olmo": _flex_olmo,
    "hunyuan_v1_moe": _hunyuan_moe,
    "lfm2_moe": _lfm2_moe,
    "solar_open": _solar_open,
    "mellum": _mellum,
    "granitemoe_swa": _granitemoe_swa,
    "mistral4": _mistral4,
    "deepseek_v32": _indexed,
    "glm_moe_dsa": _indexed,
}
