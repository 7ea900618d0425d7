"""Where decoders of parallel blocks keep their sites and parameters."""

from __future__ import annotations

from typing import Any

from .layout import Fused, Layout, Site


def _sites(norms: tuple[str, ...], projection: str, ffn: tuple[str, str]) -> list[Site]:
    """One norm, or one per block; the layer's output is the only sum."""
    inner, outer = ffn
    return [
        ("attention.norm", norms[0], "output"),
        ("attention.heads", projection, "input"),
        ("attention.projection", projection, "output"),
        *((("ffn.norm", norms[1], "output"),) if len(norms) > 1 else ()),
        ("ffn.in", inner, "output"),
        ("ffn.activation", outer, "input"),
        ("ffn.out", outer, "output"),
        ("ffn.sum", "", "output"),
        ("stream", "", "output"),
    ]


def _matrices(
    attention: str, output: str, ffn: tuple[str, str], *, fused: bool = False
) -> tuple[tuple[str, str], ...]:
    separate = () if fused else ("query", "key", "value")
    return (
        *((name, f"{attention}.{name[0]}_proj.weight") for name in separate),
        ("output", f"{attention}.{output}.weight"),
        ("ffn_in", f"{ffn[0]}.weight"),
        ("ffn_out", f"{ffn[1]}.weight"),
    )


def _neox(*, parallel: bool) -> Layout:
    ffn = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    norms = ("input_layernorm", "post_attention_layernorm")
    sites = _sites(norms, "attention.dense", ffn)
    sites += [
        ("attention.dropout", "post_attention_dropout", "output"),
        ("ffn.dropout", "post_mlp_dropout", "output"),
    ]
    if not parallel:
        sites.append(("attention.sum", "post_attention_layernorm", "input"))

    def by_head(layer: Any) -> tuple[int, ...]:
        return (layer.attention.head_size,) * 3

    return Layout(
        "GPT-NeoX" if parallel else "GPT-NeoX, sequential",
        sites=tuple(sites),
        fused=(Fused(("query", "key", "value"), "attention.query_key_value.weight", by_head),),
        weights=_matrices("attention", "dense", ffn, fused=True),
        norms=(("attention.norm", norms[0]), ("ffn.norm", norms[1])),
        outside=(
            ("token", "embed_in"),
            ("final.norm", "final_layer_norm"),
            ("head", "lm_head"),
            ("head", "embed_out"),
        ),
        before=(("embedding.sum", "emb_dropout", "input"), ("embedding", "emb_dropout", "output")),
        after=(("final.norm", "final_layer_norm", "output"), ("logits", "lm_head", "output")),
        applies=lambda layer: layer.use_parallel_residual == parallel,
    )


def _falcon_split(layer: Any) -> tuple[int, ...]:
    """Rows of query, key and value within each group of heads that shares keys and values."""
    attention = layer.self_attention
    width, heads = attention.head_dim, attention.num_heads
    if attention.new_decoder_architecture:
        return (heads // attention.num_kv_heads * width, width, width)
    return (heads * width, width, width) if attention.multi_query else (width,) * 3


def _falcon_layout(norms: tuple[str, ...], *, parallel: bool) -> Layout:
    ffn = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    sites = _sites(norms, "self_attention.dense", ffn)
    if not parallel:
        sites.append(("attention.sum", norms[1], "input"))
    names = ("attention.norm", "ffn.norm")
    return Layout(
        f"Falcon, {len(norms)} norms{'' if parallel else ', sequential'}",
        sites=tuple(sites),
        fused=(
            Fused(
                ("query", "key", "value"), "self_attention.query_key_value.weight", _falcon_split
            ),
        ),
        weights=_matrices("self_attention", "dense", ffn, fused=True),
        norms=tuple(zip(names, norms, strict=False)),
        outside=(("token", "word_embeddings"), ("final.norm", "ln_f"), ("head", "lm_head")),
        after=(("final.norm", "ln_f", "output"), ("logits", "lm_head", "output")),
        applies=lambda layer: (
            hasattr(layer.self_attention, "multi_query")
            and len(
                [
                    name
                    for name, _ in layer.named_children()
                    if name.startswith(("ln_", "input_l", "post_a"))
                ]
            )
            == len(norms)
        ),
    )


_GPTJ_FFN = ("mlp.fc_in", "mlp.fc_out")
_PHI_FFN = ("mlp.fc1", "mlp.fc2")
LAYOUTS = (
    _neox(parallel=True),
    _neox(parallel=False),
    Layout(
        "GPT-J",
        sites=(
            *_sites(("ln_1",), "attn.out_proj", _GPTJ_FFN),
            ("attention.dropout", "attn.resid_dropout", "output"),
            ("ffn.dropout", "mlp.dropout", "output"),
        ),
        weights=_matrices("attn", "out_proj", _GPTJ_FFN),
        norms=(("attention.norm", "ln_1"),),
        outside=(("token", "wte"), ("final.norm", "ln_f"), ("head", "lm_head")),
        before=(("embedding.sum", "drop", "input"), ("embedding", "drop", "output")),
        after=(("final.norm", "ln_f", "output"), ("logits", "lm_head", "output")),
    ),
    Layout(
        "Phi",
        # resid_dropout is passed twice in a layer, so that it is no site.
        sites=tuple(_sites(("input_layernorm",), "self_attn.dense", _PHI_FFN)),
        weights=_matrices("self_attn", "dense", _PHI_FFN),
        norms=(
            ("attention.norm", "input_layernorm"),
            ("query.norm", "self_attn.q_layernorm"),
            ("key.norm", "self_attn.k_layernorm"),
        ),
        outside=(("token", "embed_tokens"), ("final.norm", "final_layernorm"), ("head", "lm_head")),
        before=(
            ("embedding.sum", "embed_dropout", "input"),
            ("embedding", "embed_dropout", "output"),
        ),
        after=(("final.norm", "final_layernorm", "output"), ("logits", "lm_head", "output")),
    ),
    _falcon_layout(("input_layernorm",), parallel=True),
    _falcon_layout(("ln_attn", "ln_mlp"), parallel=True),
    _falcon_layout(("input_layernorm", "post_attention_layernorm"), parallel=False),
)
