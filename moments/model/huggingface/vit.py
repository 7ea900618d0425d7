"""ViT: a Pre-LN encoder of image patches, whose first token classifies."""

from __future__ import annotations

from typing import Any

from ...errors import domain_error
from ..head import Head
from ..patches import PatchEmbedding
from ..transformer import Transformer
from ..weights import Biases, Weights
from .entries import Entries
from .family import Reader


def patches(read: Entries, variance: float, **fields: Any) -> PatchEmbedding:
    """Patches of square images; what a family adds are `fields`."""
    usual: dict[str, Any] = {"patch_variance": variance, "bias_variance": 0.0}
    if "image_size" not in fields:
        usual |= {"image_size": read("image_size"), "channels": read("num_channels")}
    return PatchEmbedding(patch_size=read("patch_size"), **(usual | fields))


def encoder(
    read: Entries,
    seq_len: int | None,
    embedding: PatchEmbedding,
    variance: float | None = None,
    **fields: Any,
) -> Transformer:
    """A Pre-LN encoder with the entries' names of ViT; what a family adds are `fields`.

    Args:
        seq_len: as the user asks; it is the picture's.
        variance: of the matrices, where `fields` have no weights of their own.
    """
    if seq_len not in (None, embedding.seq_len):
        allowed = f"{embedding.seq_len}: the image's patches and the tokens before them"
        raise domain_error("seq_len", seq_len, allowed)
    usual: dict[str, Any] = {"norm": "pre", "norm_affine": True}
    if variance is not None:
        usual["weights"] = Weights.normal(variance)
    if "d_ff" not in fields:
        usual["d_ff"] = read("intermediate_size")
    if "activation" not in fields:
        usual["activation"] = read.activation("hidden_act")
    if "attention_dropout" not in fields:
        usual["dropout"] = read.number("hidden_dropout_prob")
        usual["attention_dropout"] = read.number("attention_probs_dropout_prob")
    if "biases" not in fields:
        without = read.biases(("output", "ffn_in", "ffn_out"))
        usual["biases"] = Biases() if read.flag("qkv_bias") else without
    layers, d_model, heads = (
        read(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    return Transformer(
        layers,
        d_model,
        heads,
        embedding.seq_len,
        norm_epsilon=read.number("layer_norm_eps"),
        embedding=embedding,
        **(usual | fields),
    )


def classifier(read: Entries, variance: float, pool: str = "first", **fields: Any) -> Head:
    """A matrix on what a picture's tokens are pooled to."""
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
    """Positions and class token are truncated at 2 on either side, which is no cut at .02."""
    variance, dropout = read.variance(), read.number("hidden_dropout_prob")
    embedding = patches(
        read, variance, position_variance=variance, class_variance=variance, dropout=dropout
    )
    return encoder(read, seq_len, embedding, variance, head=classifier(read, variance))


READERS: dict[str, Reader] = {
    "vit": _vit,
}
