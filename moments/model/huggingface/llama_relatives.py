"""Further relatives of Llama: Phi-3, StarCoder2, StableLM, OLMo, Cohere, Granite."""

from __future__ import annotations

import math

from ..embedding import Embedding
from ..transformer import Transformer
from ..weights import Biases
from .entries import Entries
from .family import Family, causal_head
from .llama import BOTH, LLAMA, causal, decoder, length


def _phi3(read: Entries, seq_len: int | None) -> Transformer:
    return decoder(
        read,
        seq_len,
        biased=(),
        dropout=read.number("resid_pdrop"),
        window=read.window("sliding_window", length(read, seq_len)),
        embedding=Embedding(
            vocab_size=read("vocab_size"),
            token_variance=read.variance(),
            padding_id=read.padding(),
        ),
    )


def _starcoder2(read: Entries, seq_len: int | None) -> Transformer:
    return decoder(
        read,
        seq_len,
        norm="layernorm",
        epsilon="norm_epsilon",
        gated=False,
        dropout=read.number("residual_dropout"),
        biases=Biases() if read.flag("use_bias") else None,
        window=read.window("sliding_window", length(read, seq_len)),
        embedding=Embedding(
            vocab_size=read("vocab_size"),
            token_variance=read.variance(),
            dropout=read.number("embedding_dropout"),
            padding_id=read.padding(),
        ),
    )


def _stablelm(read: Entries, seq_len: int | None) -> Transformer:
    """LayerNorm; dropout on the feed-forward block's output alone."""
    read.refuse("qk_layernorm", False, "a norm with gains of its own for every head")
    width = read.count("hidden_size") // read.count("num_attention_heads")
    read.refuse("head_dim", width, "a width of heads that its module does not follow")
    return decoder(
        read,
        seq_len,
        norm="layernorm",
        epsilon="layer_norm_eps",
        ffn_dropout=read.number("hidden_dropout"),
        parallel=read.flag("use_parallel_residual"),
        biases=read.biases(("query", "key", "value") if read.flag("use_qkv_bias") else ()),
    )


def _olmo(read: Entries, seq_len: int | None) -> Transformer:
    """LayerNorm without gains or biases, its epsilon written into the code."""
    clip = read("clip_qkv", None)
    if clip is not None:
        read.leave_out("clip_qkv", clip, "queries, keys and values are not clipped")
    return decoder(read, seq_len, norm="layernorm", epsilon=1e-5, norm_affine=False)


def _cohere(read: Entries, seq_len: int | None) -> Transformer:
    """Parallel blocks behind one LayerNorm without bias; logits times a constant."""
    read.refuse("use_qk_norm", False, "a norm with gains of its own for every head")
    variance, epsilon = read.variance(), read.number("layer_norm_eps")
    return decoder(
        read,
        seq_len,
        norm="layernorm",
        epsilon="layer_norm_eps",
        norm_bias=False,
        parallel=True,
        head=causal_head(read, variance, epsilon, output_scale=read.number("logit_scale")),
    )


def _granite(read: Entries, seq_len: int | None) -> Transformer:
    """Llama with multipliers of the embedding, the logits of attention, branches and output."""
    width = read.count("head_dim", read.count("hidden_size") // read.count("num_attention_heads"))
    return decoder(
        read,
        seq_len,
        biased=BOTH,
        temperature=1 / (read.positive("attention_multiplier") * math.sqrt(width)),
        branch_scale=read.number("residual_multiplier"),
        embedding=Embedding(
            vocab_size=read("vocab_size"),
            token_variance=read.variance(),
            scale=read.number("embedding_multiplier"),
            padding_id=read.padding(),
        ),
        head=causal_head(
            read,
            read.variance(),
            read.number("rms_norm_eps"),
            output_scale=1 / read.positive("logits_scaling"),
        ),
    )


FAMILIES = {
    "phi3": Family(
        _phi3,
        "Phi3ForCausalLM",
        "causal",
        LLAMA
        | {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "resid_pdrop": 0.0,
            "pad_token_id": 32000,
            "rope_parameters": {"partial_rotary_factor": 1.0},
        },
        # embd_pdrop is read by no line of the module.
        {"embd_pdrop": ..., "original_max_position_embeddings": ...},
    ),
    "starcoder2": causal(
        _starcoder2,
        "Starcoder2",
        LLAMA
        | {
            "vocab_size": 49152,
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "initializer_range": 0.018042,
            "norm_epsilon": 1e-5,
            "residual_dropout": 0.0,
            "embedding_dropout": 0.0,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "stablelm": causal(
        _stablelm,
        "StableLm",
        LLAMA
        | {
            "vocab_size": 50304,
            "intermediate_size": 6912,
            "hidden_size": 2560,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "rope_parameters": {"partial_rotary_factor": 0.25},
            "use_qkv_bias": False,
            "use_parallel_residual": False,
            "hidden_dropout": 0.0,
        },
    ),
    "olmo": causal(_olmo, "Olmo", LLAMA | {"vocab_size": 50304, "pad_token_id": 1}),
    "cohere": causal(
        _cohere,
        "Cohere",
        LLAMA
        | {
            "vocab_size": 256000,
            "hidden_size": 8192,
            "intermediate_size": 22528,
            "logit_scale": 0.0625,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 500000.0},
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "granite": causal(
        _granite,
        "Granite",
        LLAMA
        | {
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
    ),
}
