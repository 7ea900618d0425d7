"""ViT: a Pre-LN encoder of image patches, with a classifier on its first token."""

from __future__ import annotations

from typing import Any

from ...errors import domain_error
from ..head import Head
from ..patches import PatchEmbedding
from ..transformer import Transformer
from ..weights import Biases
from .entries import Entries
from .family import Reader, declared


def patches(read: Entries, variance: float, **fields: Any) -> PatchEmbedding:
    """The patch embedding of square images; `fields` override the usual ones."""
    usual: dict[str, Any] = {"patch_variance": variance, "bias_variance": 0.0}
    if "image_size" not in fields:
        usual |= {"image_size": read("image_size"), "channels": read("num_channels")}
    return PatchEmbedding(patch_size=read("patch_size"), **(usual | fields))


def encoder(
    read: Entries,
    seq_len: int | None,
    embedding: PatchEmbedding,
    variance: float = 0.0,
    **fields: Any,
) -> Transformer:
    """A Pre-LN encoder with ViT's entry names; `fields` override the usual ones.

    Args:
        seq_len: the user's request; only the image's own number of tokens is allowed.
        variance: of the matrices, unless `fields` has weights.
    """
    if seq_len not in (None, embedding.seq_len):
        allowed = f"{embedding.seq_len}: the image's patches and the tokens before them"
        raise domain_error("seq_len", seq_len, allowed)
    if "biases" not in fields:
        no_qkv = read.biases(("output", "ffn_in", "ffn_out"))
        fields["biases"] = Biases() if read.flag("qkv_bias") else no_qkv
    fields = {"head": None} | fields
    return declared(
        read, None, length=embedding.seq_len, variance=variance, embedding=embedding, **fields
    )


def classifier(read: Entries, variance: float, pool: str = "first", **fields: Any) -> Head:
    """A linear classifier on the pooled tokens of an image."""
    return Head(
        tied=False,
        weight_variance=variance,
        bias=True,
        loss="classification",
        classes=read.labels(),
        pool=pool,
        **fields,
    )


def _vit(read: Entries, seq_len: int | None) -> Transformer:
    """Positions and class token are truncated at +-2, without effect at standard deviation .02."""
    variance, dropout = read.variance(), read.number("hidden_dropout_prob")
    embedding = patches(
        read, variance, position_variance=variance, class_variance=variance, dropout=dropout
    )
    return encoder(read, seq_len, embedding, variance, head=classifier(read, variance))


READERS: dict[str, Reader] = {
    "vit": _vit,
}
