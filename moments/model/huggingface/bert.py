"""BERT and its relatives: Post-LN masked language models."""

from __future__ import annotations

import math

from ...errors import domain_error
from ..transformer import Transformer
from .entries import Entries
from .family import Reader, declared, masked_head


def _bert(
    read: Entries, seq_len: int | None, hidden: str | None = None, length: int | None = None
) -> Transformer:
    """A Post-LN encoder with BERT's entry names and learned positions.

    `hidden` is the activation of the head's hidden layer if it differs from the layers', `length`
    the sequence length if it is not that of max_position_embeddings.
    """
    read.expect("is_decoder", False, "full attention is assumed")
    read.expect("add_cross_attention", False, "no cross-attention is assumed")
    read.expect("position_embedding_type", "absolute", "learned absolute positions are assumed")
    variance = read.variance()
    segments = read("type_vocab_size", 0) > 0
    read.count("vocab_size")
    return declared(
        read,
        seq_len,
        length=length,
        norm="post",
        embedding={
            "position_variance": variance,
            "segment_variance": variance if segments else 0.0,
            "norm": True,
            "norm_epsilon": read.number("layer_norm_eps"),
            "dropout": read.number("hidden_dropout_prob"),
            "padding_id": read.padding(),
        },
        head=masked_head(read, variance, hidden or read.activation("hidden_act")),
    )


def _electra(read: Entries, seq_len: int | None) -> Transformer:
    """BERT with optionally narrower token tables: a matrix after their norm widens them, and the
    head's hidden layer is as narrow. The module hard-codes the head's activation."""
    width, model = read.count("embedding_size"), _bert(read, seq_len, "gelu")
    return model if width == model.d_model else _narrow(read, model, width)


def _narrow(read: Entries, model: Transformer, width: int) -> Transformer:
    """Give a model token tables of `width` features and a matrix to d_model."""
    embedding = model.embedding.replace(
        factor_dim=width, factor_variance=read.variance(), factor_bias=True
    )
    return model.replace(embedding=embedding, head=model.head.replace(factor_dim=width))


def _roberta(read: Entries, seq_len: int | None) -> Transformer:
    """Positions start at pad_token_id + 1, so the earlier rows of their table are never used; the
    module hard-codes the head's activation."""
    if read.null("pad_token_id"):
        raise domain_error("pad_token_id", None, "a token: its module counts positions from it")
    offset = read("pad_token_id") + 1
    most = read.count("max_position_embeddings") - offset
    length = read.at_most(most, seq_len, f"max_position_embeddings - {offset}")
    return _bert(read, seq_len, "gelu", length)


def _distilbert(read: Entries, seq_len: int | None) -> Transformer:
    """BERT without segments and without dropout after the output projection; the module hard-codes
    every epsilon."""
    fixed = read.flag("sinusoidal_pos_embds", False)
    variance, dropout, epsilon = read.variance(), read.number("dropout"), 1e-12
    return declared(
        read,
        seq_len,
        epsilon=epsilon,
        norm="post",
        dropout=0.0,
        ffn_dropout=dropout,
        embedding={
            "position_variance": 0.0 if fixed else variance,
            "positions": "sinusoidal" if fixed else "learned",
            "norm": True,
            "norm_epsilon": epsilon,
            "dropout": dropout,
            "padding_id": read.padding(),
        },
        head=masked_head(read, variance, read.activation("activation")),
    )


def _deberta(read: Entries, seq_len: int | None) -> Transformer:
    """BERT with relative position terms in the attention logits, which are not modelled.

    With k terms in use, the logits are divided by sqrt((1 + k) d_head). Each term is a product of
    projected tokens with projected position vectors, independent of each other, and so adds to the
    squared gradients of query and key as much as uncorrelated tokens do.
    """
    read.refuse("conv_kernel_size", 0, "a convolution parallel to the first layer")
    read.refuse("embedding_size", read("hidden_size"), "a projection of narrower token tables")
    terms = read.texts("pos_att_type")
    used = sum(kind in terms for kind in ("c2p", "p2c"))
    # With shared matrices every term has a gradient at both, else at one of the two.
    extra = used if read("share_att_key", False) else min(used, 1)
    if read("relative_attention", False) and terms:
        read.leave_out(
            "pos_att_type",
            terms,
            "logits are those of query and key alone, and squared gradients of the query and key "
            f"weights up to {1 + extra} times too small (more where tokens are alike); the stream "
            "and all other gradients hardly change",
        )
    unused = "relative_attention norm_rel_ebd position_buckets max_relative_positions"
    for name in unused.split():
        read(name, None)
    model = _bert(read, seq_len)
    if not read.flag("position_biased_input"):
        model = model.replace(embedding=model.embedding.replace(position_variance=0.0))
    return model.replace(temperature=math.sqrt(1 + used))


READERS: dict[str, Reader] = {
    "bert": _bert,
    "electra": _electra,
    "ernie": _bert,
    "roberta": _roberta,
    "camembert": _roberta,
    "xlm-roberta": _roberta,
    "distilbert": _distilbert,
    "deberta-v2": _deberta,
}
