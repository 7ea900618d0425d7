"""BART, Marian, M2M-100 and their relatives: an encoder and a decoder in Post-LN or Pre-LN, with
positions added to the token rows that both stacks share."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from ..head import Head
from ..transformer import Transformer
from .decoders import spread_base
from .entries import Entries
from .family import Family, declared
from .t5 import _t5

_EPSILON = 1e-5  # LayerNorm's own default, which the code does not change


def stack(
    read: Entries, side: str, *, norm: str, head: Head, seq_len: int, **fields: Any
) -> Transformer:
    """The "encoder" or the "decoder" of a config that has entries of its own for either.

    Args:
        side: which of them.
        norm: "post", or "pre" with one more norm behind the last layer.
        head: of the stack; whether a norm is before it is `norm`'s to say.
        fields: of `declared`.
    """
    layerdrop = read.number(f"{side}_layerdrop")
    if layerdrop:
        read.leave_out(f"{side}_layerdrop", layerdrop, "no whole layer is dropped")
    return declared(
        read,
        _EPSILON,
        variance=read.variance("init_std"),
        shape=(f"{side}_layers", "d_model", f"{side}_attention_heads"),
        seq_len=seq_len,
        d_ff=read(f"{side}_ffn_dim"),
        norm=norm,
        activation=read.activation("activation_function"),
        dropout=read.number("dropout"),
        attention_dropout=read.number("attention_dropout"),
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
    variance, d_model = read.variance("init_std"), read.count("d_model")
    tied = read.flag("tie_word_embeddings")
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
        "seq_len": read.length("max_position_embeddings", seq_len),
        "embedding": embedding,
    }
    encoder = stack(read, "encoder", head=Head(loss=None), **fields)
    fields["embedding"] = embedding if shared else embedding | {"vocab_size": target}
    # Inputs are the targets shifted by one, so that every token has its own target.
    head = Head(tied=tied, weight_variance=None if tied else variance, loss="causal")
    return stack(read, "decoder", head=head, causal=True, encoder=encoder, **fields)


# Of every type its module, where its norms are, whether its positions are sines and cosines, and
# whether its embedding is normalised
_BUILT = {
    "bart": ("BartForConditionalGeneration", "post", False, True),
    "blenderbot": ("BlenderbotForConditionalGeneration", "pre", False, False),
    "blenderbot-small": ("BlenderbotSmallForConditionalGeneration", "post", False, True),
    "m2m_100": ("M2M100ForConditionalGeneration", "pre", True, False),
    "marian": ("MarianMTModel", "post", True, False),
    "mbart": ("MBartForConditionalGeneration", "pre", False, True),
    "mvp": ("MvpForConditionalGeneration", "post", False, True),
    "pegasus": ("PegasusForConditionalGeneration", "pre", True, False),
    "plbart": ("PLBartForConditionalGeneration", "post", False, True),
}
# Of configs' other entries, those that no module reads
_UNREAD = (
    "classif_dropout do_blenderbot_90_layernorm extra_pos_embeddings "
    "force_bos_token_to_be_generated layernorm_variant prompt_length prompt_mid_dim save_step"
)


def _family(module: str, norm: str, fixed: bool, normed: bool) -> Family:
    usual = dict.fromkeys(_UNREAD.split(), ...) | {
        "add_bias_logits": False,
        "add_final_layer_norm": norm == "pre",
        "is_encoder_decoder": True,
        "normalize_before": norm == "pre",
        "normalize_embedding": normed,
        "static_position_embeddings": fixed,
        "use_prompt": False,
    }
    reader = partial(_bart, norm=norm, fixed=fixed, normed=normed)
    return Family(reader, module, "translation", usual)


FAMILIES = {kind: _family(*built) for kind, built in _BUILT.items()} | {
    # T5 whose layers each have a table of relative biases
    "umt5": Family(
        _t5,
        "UMT5ForConditionalGeneration",
        "translation",
        {"is_encoder_decoder": True, "scalable_attention": ...},
    )
}
