"""Encoder-decoders: T5 with relative positions; BART and its relatives, Post-LN or Pre-LN, with
absolute positions and one token table for both stacks."""

from __future__ import annotations

import math
from typing import Any

from ...errors import domain_error
from ..head import Head
from ..positions import RelativeBias
from ..transformer import Transformer
from ..weights import Weights
from .entries import ACTIVATIONS, Entries
from .family import Reader, declared, tied_or
from .relatives import spread_base


def _t5(read: Entries, seq_len: int | None) -> Transformer:
    """The decoder, with the encoder as its `encoder`; both share the token table.

    Attention logits are not divided by sqrt(d_kv); the query initialisation compensates. With
    scale_decoder_outputs, the output logits are multiplied by 1/sqrt(d_model).
    """
    gain, factor = read.positive("initializer_factor"), read.variance("initializer_factor")
    d_model, heads, d_head, d_ff = map(read.count, ("d_model", "num_heads", "d_kv", "d_ff"))
    dropout, (activation, gated) = read.number("dropout_rate"), _feed_forward(read)
    buckets = "relative_attention_num_buckets", "relative_attention_max_distance"
    inward, outward = factor / d_model, factor / (heads * d_head)
    read = read.replaced(num_decoder_layers=read("num_decoder_layers", read.count("num_layers")))
    fields: dict[str, Any] = {
        "length": read.length("n_positions", seq_len, table=False, default=512),
        "variance": factor,
        "d_head": d_head,
        "normalization": "rmsnorm",
        "activation": activation,
        "gated": gated,
        "dropout": dropout,
        "activation_dropout": dropout,
        "temperature": 1 / math.sqrt(d_head),
        "weights": Weights(inward / d_head, inward, inward, outward, inward, factor / d_ff),
        "biases": None,
        "relative_bias": RelativeBias(inward, *map(read, buckets)),
        "norm_gain": gain,
        "embedding": {"positions": "none", "dropout": dropout},
    }
    head = Head(norm=True, norm_gain=gain, dropout=dropout, loss=None)
    encoder = declared(read, None, names={"layers": "num_layers"}, head=head, **fields)
    # T5 1.1 and its successors use the second entry, and tie in either case
    tied = read("tie_word_embeddings", True)
    scaled = {"mt5": False, "umt5": True}.get(read.kind)
    if scaled is None:
        scaled = read.flag("scale_decoder_outputs", tied)
    # Inputs are the targets shifted by one, so that every token has its own target.
    head = head.replace(loss="causal", output_scale=d_model**-0.5 if scaled else 1.0)
    names = {"layers": "num_decoder_layers"}
    return declared(read, None, names=names, head=head, causal=True, encoder=encoder, **fields)


def _feed_forward(read: Entries) -> tuple[str, bool]:
    given = read("feed_forward_proj")
    kind, _, name = str(given).rpartition("-")
    name = "gelu_new" if given == "gated-gelu" else name
    read.expect("dense_act_fn", name, "feed_forward_proj says it")
    read.expect("is_gated_act", kind == "gated", "feed_forward_proj says it")
    if name not in ACTIVATIONS or kind not in ("", "gated"):
        raise domain_error("feed_forward_proj", given, "an activation, or 'gated-' and one")
    return ACTIVATIONS[name], kind == "gated"


# --- BART, Marian, M2M-100 and their relatives ----------------------------------------------------

_EPSILON = 1e-5  # torch's default, which the modules keep


def stack(
    read: Entries, side: str, *, norm: str, head: Head, length: int, **fields: Any
) -> Transformer:
    """Declare one stack of a config with separate entries for its encoder and decoder.

    Args:
        side: "encoder" or "decoder".
        norm: "post", or "pre" with a norm after the last layer.
        head: of the stack; its `norm` is set to whether the stack is Pre-LN.
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


# Type -> place of the norms, sinusoidal positions or not, normalised embedding or not
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


def _bart(read: Entries, seq_len: int | None) -> Transformer:
    """The decoder, with the encoder as its `encoder`."""
    norm, fixed, normed = _BUILT[read.kind]
    read.same_as("num_hidden_layers", "encoder_layers")
    read("num_hidden_layers", None)
    usual = {"add_final_layer_norm": norm == "pre", "normalize_before": norm == "pre"}
    usual |= {"normalize_embedding": normed, "static_position_embeddings": fixed}
    for entry, value in usual.items():
        read.expect(entry, value, "it is left out")
    variance, d_model = read.variance("init_std"), read.count("d_model")
    target_vocab = vocab = read.count("vocab_size")
    if read.flag("share_encoder_decoder_embeddings", True):
        read.expect("decoder_vocab_size", vocab, "both stacks share one table")
    else:
        target_vocab = read.count("decoder_vocab_size", vocab)
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
    fields: dict[str, Any] = {"norm": norm}
    fields["length"] = read.length("max_position_embeddings", seq_len)
    encoder = stack(read, "encoder", head=Head(loss=None), embedding=embedding, **fields)
    if read.kind == "blenderbot-small":
        embedding["position_variance"] = 0.0
        read.notes.append(
            f"the decoder adds positions of variance {variance:.3g} to tokens that are normalised "
            "before, not after: they are left out of what enters its layer 1"
        )
    # Inputs are the targets shifted by one, so that every token has its own target.
    fields["head"] = Head(**tied_or(read, variance), loss="causal")
    fields["embedding"] = embedding | {"vocab_size": target_vocab}
    return stack(read, "decoder", causal=True, encoder=encoder, **fields)


READERS: dict[str, Reader] = {"t5": _t5, "mt5": _t5, "umt5": _t5}
READERS |= dict.fromkeys(_BUILT, _bart)
