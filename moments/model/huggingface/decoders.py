"""Decoders of 2018 to 2023, as the readers of GPT-2, GPT-J and OPT read them with a few changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import domain_error
from ..transformer import Transformer
from .entries import Entries
from .family import Family, causal_head, declared
from .gpt import _gpt2
from .parallel import _gptj

_GPT2_SHAPE = ("n_layer", "n_embd", "n_head")


def _gpt_bigcode(read: Entries, seq_len: int | None) -> Transformer:
    """GPT-2 with one head of keys and values."""
    model = _gpt2(read, seq_len)
    return model.replace(kv_heads=1) if read.flag("multi_query") else model


def _openai_gpt(read: Entries, seq_len: int | None) -> Transformer:
    """Post-LN, with neither a norm of the embedding nor a last one; "gelu" is the tanh form."""
    variance, activation = read.variance(), read.activation("afn")
    return declared(
        read,
        read.number("layer_norm_epsilon"),
        shape=_GPT2_SHAPE,
        seq_len=read.length("n_positions", seq_len),
        norm="post",
        activation="gelu_tanh" if activation == "gelu" else activation,
        dropout=read.number("resid_pdrop"),
        attention_dropout=read.number("attn_pdrop"),
        causal=True,
        embedding={"position_variance": variance, "dropout": read.number("embd_pdrop")},
        head=causal_head(read, variance, None),
    )


def _ctrl(read: Entries, seq_len: int | None) -> Transformer:
    """Sinusoidal positions, token rows times sqrt(d_model); attention weights are not dropped, and
    the epsilon of all norms but the last is written into the code."""
    epsilon, variance = 1e-6, read.variance()
    read.expect("layer_norm_epsilon", epsilon, "the last norm has the others' epsilon")
    return declared(
        read,
        epsilon,
        shape=_GPT2_SHAPE,
        seq_len=read.length("n_positions", seq_len),
        d_ff=read("dff"),
        dropout=read.number("resid_pdrop"),
        attention_dropout=0.0,
        causal=True,
        embedding={
            "positions": "sinusoidal",
            "scale": math.sqrt(read.count("n_embd")),
            "dropout": read.number("embd_pdrop"),
        },
        head=causal_head(read, variance, epsilon, bias=True),
    )


def _neox_japanese(read: Entries, seq_len: int | None) -> Transformer:
    """Sequential, without biases; the one that its last layer's attention has is left out."""
    return declared(
        read,
        read.number("layer_norm_eps"),
        seq_len=read.length("max_position_embeddings", seq_len, table=False),
        d_ff=read.count("intermediate_multiple_size") * read.count("hidden_size"),
        activation=read.activation("hidden_act"),
        dropout=read.number("hidden_dropout"),
        attention_dropout=read.number("attention_dropout"),
        biases=None,
        rotary=read.rotary("rotary_emb_base", "rotary_pct"),
    )


def _mpt(read: Entries, seq_len: int | None) -> Transformer:
    """ALiBi, neither biases nor those of norms; one probability of attn_config drops what blocks
    give and attention's weights."""
    given = read("attn_config", {})
    for name, value in given.items():
        if name == "clip_qkv" and value is not None:
            read.leave_out(name, value, "queries, keys and values are not clipped")
        elif name in _MPT_ATTENTION and value != _MPT_ATTENTION[name]:
            read.leave_out(name, value, "its module does not read it")
    d_model, heads = read.count("d_model"), read.count("n_heads")
    scale, dropout = given.get("softmax_scale"), given.get("attn_pdrop") or 0.0
    if scale is not None and (not isinstance(scale, int | float) or scale <= 0):
        raise domain_error("softmax_scale", scale, "a positive number, or null")
    return declared(
        read,
        read.number("layer_norm_epsilon"),
        shape=("n_layers", "d_model", "n_heads"),
        seq_len=read.length("max_seq_len", seq_len),
        activation="gelu",
        dropout=float(dropout),
        temperature=1.0 if scale is None else math.sqrt(heads / d_model) / float(scale),
        norm_bias=False,
        biases=None,
        alibi=True,
    )


def _persimmon(read: Entries, seq_len: int | None) -> Transformer:
    """Queries and keys normalised; what attention gives is not dropped."""
    return declared(
        read,
        read.number("layer_norm_eps"),
        seq_len=read.length("max_position_embeddings", seq_len, table=False),
        d_ff=read("intermediate_size"),
        activation=read.activation("hidden_act"),
        ffn_dropout=read.number("hidden_dropout"),
        attention_dropout=read.number("attention_dropout"),
        rotary=read.rotary(),
        qk_norm="layernorm" if read.flag("qk_layernorm") else None,
    )


def spread_base(d_model: int) -> float:
    """Base of sinusoidal positions whose slowest frequency is 1/10000, as in tensor2tensor."""
    half = d_model // 2
    return float(10000 ** (half / (half - 1)))


def _scaled(
    read: Entries, seq_len: int | None, names: Mapping[str, str], **embedding: Any
) -> Transformer:
    """Pre-LN as in fairseq: token rows times sqrt(d_model), LayerNorm's own epsilon."""
    shape = (names["layers"], names["width"], names["heads"])
    scaled = read.flag("scale_embedding")
    variance, dropout = read.variance(names["variance"]), read.number(names["dropout"])
    layerdrop = read.number("layerdrop")
    if layerdrop:
        read.leave_out("layerdrop", layerdrop, "no whole layer is dropped")
    learned = "positions" not in embedding
    return declared(
        read,
        1e-5,
        variance=variance,
        shape=shape,
        seq_len=read.length("max_position_embeddings", seq_len, table=learned),
        d_ff=read(names["hidden"]),
        activation=read.activation(names["activation"]),
        dropout=dropout,
        attention_dropout=read.number(names["attention"]),
        activation_dropout=read.number("activation_dropout"),
        embedding={
            "position_variance": variance if learned else 0.0,
            "scale": math.sqrt(read.count(names["width"])) if scaled else 1.0,
            "padding_id": read.padding(),
            "dropout": dropout,
        }
        | embedding,
    )


def _biogpt(read: Entries, seq_len: int | None) -> Transformer:
    return _scaled(
        read,
        seq_len,
        {
            "layers": "num_hidden_layers",
            "width": "hidden_size",
            "heads": "num_attention_heads",
            "hidden": "intermediate_size",
            "variance": "initializer_range",
            "activation": "hidden_act",
            "dropout": "hidden_dropout_prob",
            "attention": "attention_probs_dropout_prob",
        },
    )


def _xglm(read: Entries, seq_len: int | None) -> Transformer:
    return _scaled(
        read,
        seq_len,
        {
            "layers": "num_layers",
            "width": "d_model",
            "heads": "attention_heads",
            "hidden": "ffn_dim",
            "variance": "init_std",
            "activation": "activation_function",
            "dropout": "dropout",
            "attention": "attention_dropout",
        },
        positions="sinusoidal",
        position_base=spread_base(read.count("d_model")),
    )


_MPT_ATTENTION = {"alibi": True, "alibi_bias_max": 8, "prefix_lm": False, "qk_ln": False}
_BIGCODE = (
    "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner "
    "validate_runner_input pre_allocate_kv_cache max_sequence_length max_batch_size pad_key_length"
)
_MPT = {"learned_pos_emb": ..., "init_device": ..., "norm_type": ..., "no_bias": True}
_MPT |= {"expansion_ratio": 4, "resid_pdrop": ..., "emb_pdrop": ..., "logit_scale": None}
_MPT |= dict.fromkeys(("embedding_fraction", "verbose", "init_config", "tokenizer_name"), ...)
_JAPANESE = {"layer_norm_type": ..., "use_parallel_residual": ...}
FAMILIES = {
    "biogpt": Family(_biogpt, "BioGptForCausalLM", "causal", {"layer_norm_eps": ...}),
    "codegen": Family(
        _gptj, "CodeGenForCausalLM", "causal", {"n_ctx": ..., "scale_attn_weights": True}
    ),
    "ctrl": Family(
        _ctrl, "CTRLLMHeadModel", "causal", {"n_ctx": ..., "attn_pdrop": ..., "from_tf": ...}
    ),
    "gpt_bigcode": Family(
        _gpt_bigcode,
        "GPTBigCodeForCausalLM",
        "causal",
        # the class makes it of multi_query
        dict.fromkeys(_BIGCODE.split(), ...) | {"num_key_value_heads": ...},
    ),
    "gpt_neox_japanese": Family(_neox_japanese, "GPTNeoXJapaneseForCausalLM", "causal", _JAPANESE),
    "mpt": Family(_mpt, "MptForCausalLM", "causal", _MPT),
    "openai-gpt": Family(
        _openai_gpt,
        "OpenAIGPTLMHeadModel",
        "causal",
        {"n_ctx": ..., "n_special": ..., "predict_special_tokens": ...},
    ),
    "persimmon": Family(_persimmon, "PersimmonForCausalLM", "causal"),
    "xglm": Family(_xglm, "XGLMForCausalLM", "causal"),
}
