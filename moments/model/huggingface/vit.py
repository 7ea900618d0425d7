"""ViT: a Pre-LN encoder of image patches, whose first token classifies."""

from __future__ import annotations

from ..head import Head
from ..patches import PatchEmbedding
from ..transformer import Transformer
from ..weights import Biases, Weights
from .entries import Entries
from .family import Family
from .layout import Layout, Site


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
    read.fixed_length(seq_len, embedding.seq_len, "the image's patches and the class token")
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
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "initializer_range": 0.02,
            "layer_norm_eps": 1e-12,
            "image_size": 224,
            "patch_size": 16,
            "num_channels": 3,
            "qkv_bias": True,
        },
        {"encoder_stride": ..., "pooler_output_size": ..., "pooler_act": ...},
    )
}


def _layout(name: str, attention: dict[str, str], ffn: tuple[str, str], dropouts: bool) -> Layout:
    output, (inner, outer) = attention["output"], ffn
    sites: list[Site] = [
        ("attention.norm", "layernorm_before", "output"),
        ("attention.heads", output, "input"),
        ("attention.projection", output, "output"),
        ("attention.sum", "layernorm_after", "input"),
        ("ffn.norm", "layernorm_after", "output"),
        ("ffn.in", inner, "output"),
        ("ffn.activation", outer, "input"),
        ("ffn.out", outer, "output"),
        ("ffn.sum", "", "output"),
        ("stream", "", "output"),
    ]
    if dropouts:
        sites.append(("attention.dropout", "attention.output.dropout", "output"))
    return Layout(
        name,
        sites=tuple(sites),
        weights=(
            *((matrix, f"{path}.weight") for matrix, path in attention.items()),
            ("ffn_in", f"{inner}.weight"),
            ("ffn_out", f"{outer}.weight"),
        ),
        norms=(("attention.norm", "layernorm_before"), ("ffn.norm", "layernorm_after")),
        outside=(
            ("patch", "patch_embeddings.projection"),
            ("position", "embeddings.position_embeddings"),
            ("class", "embeddings.cls_token"),
            ("final.norm", "layernorm"),
            ("head", "classifier"),
        ),
        before=(
            ("embedding.sum", "embeddings.dropout", "input"),
            ("embedding", "embeddings.dropout", "output"),
        ),
        after=(("final.norm", "layernorm", "output"),),
    )


_MATRICES = ("query", "key", "value", "output")
_OLD = tuple(f"attention.attention.{name}" for name in _MATRICES[:3])
LAYOUTS = (
    _layout(
        "ViT",
        {name: f"attention.{name[0]}_proj" for name in _MATRICES},
        ("mlp.fc1", "mlp.fc2"),
        False,
    ),
    # Modules of transformers 4
    _layout(
        "ViT, transformers 4",
        dict(zip(_MATRICES, (*_OLD, "attention.output.dense"), strict=True)),
        ("intermediate.dense", "output.dense"),
        True,
    ),
)
