"""T5: an encoder, and a decoder that also attends to what the encoder gives."""

from __future__ import annotations

import math
from typing import Any

from ...errors import domain_error
from ..embedding import Embedding
from ..head import Head
from ..positions import RelativeBias
from ..transformer import Transformer
from ..weights import Weights
from .entries import ACTIVATIONS, Entries
from .family import Family


def _t5(read: Entries, seq_len: int | None) -> Transformer:
    """The decoder, whose `encoder` is the other stack; both read the same token table.

    Attention logits are not divided by sqrt(d_kv); the initialisation of the queries makes up for
    it. Where the output is scaled, logits are those of the token table times 1/sqrt(d_model).
    """
    gain = read.positive("initializer_factor")
    factor = read.variance("initializer_factor")
    d_model, heads, d_head, d_ff = (
        read.count(name) for name in ("d_model", "num_heads", "d_kv", "d_ff")
    )
    dropout = read.number("dropout_rate")
    epsilon = read.number("layer_norm_epsilon")
    activation, gated = _feed_forward(read)
    layers = read.count("num_layers")
    length = read.length("n_positions", seq_len, table=False, default=512)
    embedding = Embedding(
        vocab_size=read("vocab_size"), token_variance=factor, positions="none", dropout=dropout
    )
    shared: dict[str, Any] = {
        "d_model": d_model,
        "heads": heads,
        "seq_len": length,
        "d_ff": d_ff,
        "d_head": d_head,
        "norm": "pre",
        "normalization": "rmsnorm",
        "activation": activation,
        "gated": gated,
        "dropout": dropout,
        "activation_dropout": dropout,
        "temperature": 1 / math.sqrt(d_head),
        "weights": Weights(
            query=factor / (d_model * d_head),
            key=factor / d_model,
            value=factor / d_model,
            output=factor / (heads * d_head),
            ffn_in=factor / d_model,
            ffn_out=factor / d_ff,
        ),
        "relative_bias": RelativeBias(
            factor / d_model,
            read("relative_attention_num_buckets"),
            read("relative_attention_max_distance"),
        ),
        "norm_epsilon": epsilon,
        "norm_affine": True,
        "norm_gain": gain,
        "embedding": embedding,
    }
    if read.kind in ("mt5", "umt5"):  # tie in any case; the one never scales, the other does
        scaled = read.kind == "umt5"
        read("tie_word_embeddings", None)
    elif read.has("scale_decoder_outputs"):
        scaled = read.flag("scale_decoder_outputs")
        read("tie_word_embeddings", None)
    else:  # T5 1.1 and its successors say so by this entry; it ties in either case
        scaled = read.flag("tie_word_embeddings", True)
    head = Head(norm=True, norm_gain=gain, dropout=dropout, loss=None)
    encoder = Transformer(layers=layers, head=head, **shared)
    return Transformer(
        layers=read("num_decoder_layers", layers),
        causal=True,
        encoder=encoder,
        head=head.replace(
            output_scale=d_model**-0.5 if scaled else 1.0,
            # Inputs are the targets shifted by one, so that every token has its own target.
            loss="causal",
        ),
        **shared,
    )


def _feed_forward(read: Entries) -> tuple[str, bool]:
    given = read("feed_forward_proj")
    read("dense_act_fn", None)
    read("is_gated_act", None)
    kind, _, name = str(given).rpartition("-")
    name = "gelu_new" if given == "gated-gelu" else name
    if name not in ACTIVATIONS or kind not in ("", "gated"):
        raise domain_error("feed_forward_proj", given, "an activation, or 'gated-' and one")
    return ACTIVATIONS[name], kind == "gated"


_USUAL = {"is_encoder_decoder": True}
FAMILIES = {
    "t5": Family(_t5, "T5ForConditionalGeneration", "translation", _USUAL),
    "mt5": Family(_t5, "MT5ForConditionalGeneration", "translation", _USUAL),
}
