"""Decoders with parallel attention and feed-forward blocks: GPT-NeoX, GPT-J, Phi, Falcon."""

from __future__ import annotations

from ..positions import Rotary
from ..transformer import Transformer
from ..weights import Biases
from .entries import Entries
from .family import Reader, declared

_FFN = ("ffn_in", "ffn_out")
_ALL = ("query", "key", "value", "output", *_FFN)


def _gpt_neox(read: Entries, seq_len: int | None) -> Transformer:
    return declared(
        read,
        seq_len,
        table=False,
        biases=read.biases(_ALL if read.flag("attention_bias") else _FFN),
        parallel=read.flag("use_parallel_residual"),
        parallel_norms=2,
        rotary=read.rotary("rotary_emb_base", "rotary_pct"),
        embedding={"dropout": read.number("hidden_dropout")},
    )


def _gptj(read: Entries, seq_len: int | None) -> Transformer:
    d_model, heads = read.count("n_embd"), read.count("n_head")
    return declared(
        read,
        seq_len,
        d_ff=read("n_inner", 4 * d_model),
        biases=read.biases(_FFN),
        parallel=True,
        rotary=Rotary(read.count("rotary_dim") * heads / d_model),
        head={"bias": True},
    )


def _phi(read: Entries, seq_len: int | None) -> Transformer:
    return declared(
        read,
        seq_len,
        table=False,
        kv_heads=read("num_key_value_heads", read("num_attention_heads")),
        parallel=True,
        rotary=read.rotary(),
        qk_norm="layernorm" if read.flag("qk_layernorm", False) else None,
        embedding={"padding_id": read.padding()},
        head={"bias": True},
    )


def _falcon(read: Entries, seq_len: int | None) -> Transformer:
    """One norm for both blocks (7B) or one each (40B); multi-query or grouped-query attention.

    ALiBi's penalties are divided by sqrt(d_head) like the logits. Only ALiBi models have attention
    dropout. Sequential blocks apply attention_dropout to attention's output.
    """
    d_model, heads = read.count("hidden_size"), read.count("num_attention_heads")
    grouped = read.flag("new_decoder_architecture")
    parallel = read.flag("parallel_attn") or grouped
    norms = read("num_ln_in_parallel_attn", 2 if grouped else 1) if grouped else 1
    kv_heads = 1 if read.flag("multi_query") else heads
    if grouped:
        kv_heads = read.count("num_kv_heads", heads)
    read("num_kv_heads", None)
    read("num_ln_in_parallel_attn", None)
    dropout, attention_dropout = read.number("hidden_dropout"), read.number("attention_dropout")
    alibi = read.flag("alibi")
    return declared(
        read,
        seq_len,
        table=False,
        kv_heads=kv_heads,
        d_ff=read("ffn_hidden_size", 4 * d_model),
        dropout=dropout if parallel else attention_dropout,
        ffn_dropout=dropout,
        attention_dropout=attention_dropout if alibi else 0.0,
        biases=Biases() if read.flag("bias") else None,
        parallel=parallel,
        parallel_norms=norms,
        rotary=None if alibi else read.rotary(),
        alibi=(d_model // heads) ** -0.5 if alibi else False,
    )


READERS: dict[str, Reader] = {
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "phi": _phi,
    "falcon": _falcon,
}
