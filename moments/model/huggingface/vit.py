"""ViT: a Pre-LN encoder of image patches, whose first token classifies."""

from __future__ import annotations

from ...errors import domain_error
from ..head import Head
from ..patches import PatchEmbedding
from ..transformer import Transformer
from ..weights import Biases, Weights
from .entries import Entries
from .family import Family


def _vit(read: Entries, seq_len: int | None) -> Transformer:
    """Positions and class token are truncated at 2 on either side, which is no cut at .02."""
    variance, epsilon = read.variance(), read.number("layer_norm_eps")
    dropout = read.number("hidden_dropout_prob")
    embedding = PatchEmbedding(
        image_size=read("image_size"),
        patch_size=read("patch_size"),
        channels=read("num_channels"),
        patch_variance=variance,
        position_variance=variance,
        class_variance=variance,
        bias_variance=0.0,
        dropout=dropout,
    )
    if seq_len not in (None, embedding.seq_len):
        allowed = f"{embedding.seq_len}: the image's patches and the class token"
        raise domain_error("seq_len", seq_len, allowed)
    return Transformer(
        layers=read("num_hidden_layers"),
        d_model=read("hidden_size"),
        heads=read("num_attention_heads"),
        seq_len=embedding.seq_len,
        d_ff=read("intermediate_size"),
        norm="pre",
        activation=read.activation("hidden_act"),
        dropout=dropout,
        attention_dropout=read.number("attention_probs_dropout_prob"),
        weights=Weights.normal(variance),
        biases=Biases() if read.flag("qkv_bias") else read.biases(("output", "ffn_in", "ffn_out")),
        norm_epsilon=epsilon,
        norm_affine=True,
        embedding=embedding,
        head=Head(
            tied=False,
            weight_variance=variance,
            bias=True,
            loss="classification",
            classes=read.labels(),
            pool="first",
        ),
    )


FAMILIES = {
    "vit": Family(
        _vit,
        "ViTForImageClassification",
        "images",
        {"encoder_stride": ..., "pooler_output_size": ..., "pooler_act": ...},
    )
}
