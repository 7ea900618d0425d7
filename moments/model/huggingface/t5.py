"""Encoders with a decoder that also attends to what they give: T5, and BART with its relatives in
Post-LN or Pre-LN, whose positions are added to the token rows that both stacks share."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from ...errors import domain_error
from ..embedding import Embedding
from ..head import Head
from ..positions import RelativeBias
from ..transformer import Transformer
from ..weights import Weights
from .entries import ACTIVATIONS, Entries
from .family import Reader, declared, tied_or
from .relatives import spread_base


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
    kind, _, name = str(given).rpartition("-")
    name = "gelu_new" if given == "gated-gelu" else name
    read.expect("dense_act_fn", name, "feed_forward_proj says it")
    read.expect("is_gated_act", kind == "gated", "feed_forward_proj says it")
    if name not in ACTIVATIONS or kind not in ("", "gated"):
        raise domain_error("feed_forward_proj", given, "an activation, or 'gated-' and one")
    return ACTIVATIONS[name], kind == "gated"


# --- BART, Marian, M2M-100 and their relatives: positions are added to token rows -----------------

_EPSILON = 1e-5  # LayerNorm's own default, which the code does not change


def stack(
    read: Entries, side: str, *, norm: str, head: Head, length: int, **fields: Any
) -> Transformer:
    """The "encoder" or the "decoder" of a config that has entries of its own for either.

    Args:
        side: which of them.
        norm: "post", or "pre" with one more norm behind the last layer.
        head: of the stack; whether a norm is before it is `norm`'s to say.
        fields: of `declared`.
    """
    read.without(f"{side}_layerdrop", "no whole layer is dropped")
    return declared(
        read,
        None,
        names={"layers": f"{side}_layers", "heads": f"{side}_attention_heads"},
        length=length,
        epsilon=_EPSILON,
        d_ff=read(f"{side}_ffn_dim"),
        norm=norm,
        activation_dropout=read.number("activation_dropout"),
        head=head.replace(norm=norm == "pre"),
        **fields,
    )


def _bart(
    read: Entries, seq_len: int | None, *, norm: str, fixed: bool, normed: bool
) -> Transformer:
    """The decoder, whose `encoder` is the other stack.

    Args:
        norm: "post", or "pre" with one more norm behind the last layer.
        fixed: whether positions are sines and cosines instead of a table.
        normed: whether the embedding is normalised.
    """
    read.same_as("num_hidden_layers", "encoder_layers")
    read("num_hidden_layers", None)
    for entry, usual in (
        ("add_final_layer_norm", norm == "pre"),
        ("normalize_before", norm == "pre"),
        ("normalize_embedding", normed),
        ("static_position_embeddings", fixed),
    ):
        read.expect(entry, usual, "it is left out")
    variance, d_model = read.variance("init_std"), read.count("d_model")
    shared = read.flag("share_encoder_decoder_embeddings", True)
    vocab_size = read.count("vocab_size")
    target = read.count("decoder_vocab_size", vocab_size)
    if shared:
        read.expect("decoder_vocab_size", vocab_size, "both stacks share one table")
    embedding: dict[str, Any] = {
        "positions": "sinusoidal" if fixed else "learned",
        "position_variance": 0.0 if fixed else variance,
        "position_base": spread_base(d_model) if read.kind == "m2m_100" else 10000.0,
        "scale": math.sqrt(d_model) if read.flag("scale_embedding") else 1.0,
        "norm": normed,
        "norm_epsilon": _EPSILON if normed else 0.0,
        "dropout": read.number("dropout"),
        "padding_id": read.padding(),
    }
    fields: dict[str, Any] = {
        "norm": norm,
        "length": read.length("max_position_embeddings", seq_len),
        "embedding": embedding,
    }
    encoder = stack(read, "encoder", head=Head(loss=None), **fields)
    fields["embedding"] = embedding if shared else embedding | {"vocab_size": target}
    if read.kind == "blenderbot-small":
        fields["embedding"] = fields["embedding"] | {"position_variance": 0.0}
        read.notes.append(
            f"the decoder adds positions of variance {variance:.3g} to tokens that are normalised "
            "before, not after: they are left out of what enters its layer 1"
        )
    # Inputs are the targets shifted by one, so that every token has its own target.
    head = Head(**tied_or(read, variance), loss="causal")
    return stack(read, "decoder", head=head, causal=True, encoder=encoder, **fields)


# Of every type where its norms are, whether its positions are sines and cosines, and whether its
# embedding is normalised
_BUILT = {
    "bart": ("post", False, True),
    "blenderbot": ("pre", False, False),
    "blenderbot-small": ("post", False, True),
    "m2m_100": ("pre", True, False),
    "marian": ("post", True, False),
    "mbart": ("pre", False, True),
    "mvp": ("post", False, True),
    "pegasus": ("pre", True, False),
    "plbart": ("post", False, True),
}
READERS: dict[str, Reader] = {"t5": _t5, "mt5": _t5, "umt5": _t5}
READERS |= {
    kind: partial(_bart, norm=norm, fixed=fixed, normed=normed)
    for kind, (norm, fixed, normed) in _BUILT.items()
}
