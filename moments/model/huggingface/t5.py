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
from .layout import Layout, Site, attention, feed_forward, matrices, projections


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
    length = read.length("n_positions", seq_len, table=False)
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
    if read.kind == "mt5":  # ties in any case, and never scales
        scaled = False
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


_LETTERS = ("q", "k", "v", "o")


def _sublayer(path: str, block: str, inside: tuple[Site, ...]) -> tuple[Site, ...]:
    """A norm, the block and the sum, which a submodule of their own holds."""
    normed: Site = (f"{block}.norm", f"{path}.layer_norm", "output")
    return (normed, *inside, (f"{block}.sum", path, "output"))


def _attended(path: str, block: str, inner: str) -> tuple[Site, ...]:
    return _sublayer(path, block, attention(f"{path}.{inner}.o", f"{path}.dropout", name=block))


def _ffn(path: str, *, gated: bool) -> tuple[Site, ...]:
    dense = f"{path}.DenseReluDense"
    inner, gate = (f"{dense}.wi_1", f"{dense}.wi_0") if gated else (f"{dense}.wi", "")
    inside = feed_forward(inner, f"{dense}.wo", f"{path}.dropout", gate)
    dropped: tuple[Site, ...] = (
        ("ffn.activation", f"{dense}.dropout", "input"),
        ("ffn.activation_dropout", f"{dense}.dropout", "output"),
    )
    inside = (*(s for s in inside if s[0] != "ffn.activation"), *dropped)
    return (*_sublayer(path, "ffn", inside), ("stream", "", "output"))


def _layout(*, decoder: bool, gated: bool) -> Layout:
    last = "layer.2" if decoder else "layer.1"
    stack = "decoder" if decoder else "encoder"
    dense = f"{last}.DenseReluDense"
    inner = matrices(gate=f"{dense}.wi_0", ffn_in=f"{dense}.wi_1")
    cross: tuple[Site, ...] = ()
    other: tuple[tuple[str, str], ...] = ()
    if decoder:
        other = projections("layer.1.EncDecAttention", _LETTERS)
        cross = _attended("layer.1", "cross", "EncDecAttention")
    norms = (("attention.norm", "layer.0.layer_norm"), ("ffn.norm", f"{last}.layer_norm"))
    table = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
    return Layout(
        f"T5 {stack}{', gated' if gated else ''}",
        sites=(
            *_attended("layer.0", "attention", "SelfAttention"),
            *cross,
            *_ffn(last, gated=gated),
        ),
        weights=(
            *projections("layer.0.SelfAttention", _LETTERS),
            *((f"cross_{name}", path) for name, path in other),
            *(inner if gated else matrices(ffn_in=f"{dense}.wi")),
            *matrices(ffn_out=f"{dense}.wo"),
        ),
        norms=(*norms, ("cross.norm", "layer.1.layer_norm")) if decoder else norms,
        outside=(
            ("relative_bias", table),
            ("final.norm", f"{stack}.final_layer_norm"),
            *((("token", "shared"), ("head", "lm_head")) if decoder else ()),
        ),
        after=(
            ("final.norm", f"{stack}.final_layer_norm", "output"),
            *((("logits", "lm_head", "output"),) if decoder else ()),
        ),
        prefix="" if decoder else "encoder.",
        applies=lambda layer: layer.is_decoder == decoder,
    )


LAYOUTS = tuple(
    _layout(decoder=decoder, gated=gated) for decoder in (True, False) for gated in (True, False)
)
