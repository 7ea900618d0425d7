"""Where BERT and its relatives keep their sites and parameters."""

from __future__ import annotations

from .layout import Layout, Site

_FFN: tuple[Site, ...] = (
    ("ffn.in", "intermediate.dense", "output"),
    ("ffn.activation", "intermediate", "output"),
    ("ffn.out", "output.dense", "output"),
    ("ffn.dropout", "output.dropout", "output"),
    ("ffn.sum", "output.LayerNorm", "input"),
    ("ffn.norm", "output.LayerNorm", "output"),
)
_FFN_WEIGHTS = (
    ("output", "attention.output.dense.weight"),
    ("ffn_in", "intermediate.dense.weight"),
    ("ffn_out", "output.dense.weight"),
)
_TABLES = (
    ("token", "embeddings.word_embeddings"),
    ("position", "embeddings.position_embeddings"),
    ("segment", "embeddings.token_type_embeddings"),
    ("embedding.norm", "embeddings.LayerNorm"),
)
_BEFORE: tuple[Site, ...] = (
    ("embedding.sum", "embeddings.LayerNorm", "input"),
    ("embedding.norm", "embeddings.LayerNorm", "output"),
    ("embedding", "embeddings.dropout", "output"),
)
_HEAD = (
    ("head.transform", "predictions.transform.dense"),
    ("head.norm", "predictions.transform.LayerNorm"),
    ("head", "predictions.decoder"),
    ("head.bias", "predictions.bias"),
    ("head.transform", "lm_head.dense"),
    ("head.norm", "lm_head.layer_norm"),
    ("head", "lm_head.decoder"),
    ("head.bias", "lm_head.bias"),
    ("head.transform", "generator_predictions.dense"),
    ("head.norm", "generator_predictions.LayerNorm"),
    ("head", "generator_lm_head"),
)
# The hidden layer counts as it leaves its activation, which is what enters its norm.
_AFTER: tuple[Site, ...] = (
    ("head.transform", "predictions.transform.LayerNorm", "input"),
    ("head.norm", "predictions.transform.LayerNorm", "output"),
    ("logits", "predictions.decoder", "output"),
    ("head.transform", "lm_head.layer_norm", "input"),
    ("head.norm", "lm_head.layer_norm", "output"),
    ("logits", "lm_head.decoder", "output"),
    ("head.transform", "generator_predictions.LayerNorm", "input"),
    ("head.norm", "generator_predictions.LayerNorm", "output"),
    ("logits", "generator_lm_head", "output"),
)


def _attention(inner: str) -> tuple[Site, ...]:
    return (
        ("attention.heads", inner, "output"),
        ("attention.projection", "attention.output.dense", "output"),
        ("attention.dropout", "attention.output.dropout", "output"),
        ("attention.sum", "attention.output.LayerNorm", "input"),
        ("attention.norm", "attention.output.LayerNorm", "output"),
    )


def _encoder(name: str, projections: tuple[str, str, str]) -> Layout:
    return Layout(
        name,
        sites=(*_attention("attention.self"), *_FFN, ("stream", "", "output")),
        weights=(
            *zip(
                ("query", "key", "value"),
                (f"attention.self.{p}.weight" for p in projections),
                strict=True,
            ),
            *_FFN_WEIGHTS,
        ),
        norms=(("attention.norm", "attention.output.LayerNorm"), ("ffn.norm", "output.LayerNorm")),
        before=_BEFORE,
        outside=(*_TABLES, *_HEAD),
        after=_AFTER,
    )


_DISTIL_HEAD = (
    ("head.transform", "vocab_transform"),
    ("head.norm", "vocab_layer_norm"),
    ("head", "vocab_projector"),
)
LAYOUTS = (
    _encoder("BERT", ("query", "key", "value")),
    _encoder("DeBERTa", ("query_proj", "key_proj", "value_proj")),
    Layout(
        "DistilBERT",
        sites=(
            ("attention.heads", "attention.out_lin", "input"),
            ("attention.projection", "attention.out_lin", "output"),
            ("attention.sum", "sa_layer_norm", "input"),
            ("attention.norm", "sa_layer_norm", "output"),
            ("ffn.in", "ffn.lin1", "output"),
            ("ffn.activation", "ffn.lin2", "input"),
            ("ffn.out", "ffn.lin2", "output"),
            ("ffn.dropout", "ffn.dropout", "output"),
            ("ffn.sum", "output_layer_norm", "input"),
            ("ffn.norm", "output_layer_norm", "output"),
            ("stream", "", "output"),
        ),
        weights=(
            ("query", "attention.q_lin.weight"),
            ("key", "attention.k_lin.weight"),
            ("value", "attention.v_lin.weight"),
            ("output", "attention.out_lin.weight"),
            ("ffn_in", "ffn.lin1.weight"),
            ("ffn_out", "ffn.lin2.weight"),
        ),
        norms=(("attention.norm", "sa_layer_norm"), ("ffn.norm", "output_layer_norm")),
        before=_BEFORE,
        outside=(*_TABLES, *_DISTIL_HEAD),
        after=(
            ("head.transform", "vocab_layer_norm", "input"),
            ("head.norm", "vocab_layer_norm", "output"),
            ("logits", "vocab_projector", "output"),
        ),
    ),
)
