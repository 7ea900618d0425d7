"""Where GPT-2 and its relatives keep their sites and parameters."""

from __future__ import annotations

from typing import Any

from .layout import Fused, Layout, Site, thirds


def _sites(
    norms: tuple[str, str], projection: str, dropouts: tuple[str, str], ffn: tuple[str, str]
) -> tuple[Site, ...]:
    """A Pre-LN layer of two norms; a dropout that is no module has an empty path."""
    before, after = norms
    inner, outer = ffn
    found: list[Site] = [
        ("attention.norm", before, "output"),
        ("attention.heads", projection, "input"),
        ("attention.projection", projection, "output"),
        ("attention.dropout", dropouts[0], "output"),
        ("attention.sum", after, "input"),
        ("ffn.norm", after, "output"),
        ("ffn.in", inner, "output"),
        ("ffn.activation", outer, "input"),
        ("ffn.out", outer, "output"),
        ("ffn.dropout", dropouts[1], "output"),
    ]
    found = [site for site in found if site[1]]
    return (*found, ("ffn.sum", "", "output"), ("stream", "", "output"))


def _opt_layout(*, pre: bool) -> Layout:
    """The same submodules in either placement; layers know which it is."""
    norms = (("attention.norm", "self_attn_layer_norm"), ("ffn.norm", "final_layer_norm"))
    sites = _sites(
        ("self_attn_layer_norm", "final_layer_norm"), "self_attn.out_proj", ("", ""), ("fc1", "fc2")
    )
    if not pre:
        post: tuple[Site, ...] = (
            ("attention.sum", "self_attn_layer_norm", "input"),
            ("ffn.norm", "final_layer_norm", "output"),
            ("ffn.sum", "final_layer_norm", "input"),
        )
        moved = {site[0] for site in post}
        sites = (*(site for site in sites if site[0] not in moved), *post)
    return Layout(
        "OPT" if pre else "OPT, Post-LN",
        sites=sites,
        weights=(
            *(
                (name, f"self_attn.{path}.weight")
                for name, path in zip(
                    ("query", "key", "value", "output"),
                    ("q_proj", "k_proj", "v_proj", "out_proj"),
                    strict=True,
                )
            ),
            ("ffn_in", "fc1.weight"),
            ("ffn_out", "fc2.weight"),
        ),
        norms=norms,
        outside=(
            ("token", "decoder.embed_tokens"),
            ("position", "decoder.embed_positions"),
            ("final.norm", "decoder.final_layer_norm"),
            ("head", "lm_head"),
        ),
        after=(
            ("final.norm", "decoder.final_layer_norm", "output"),
            ("logits", "lm_head", "output"),
        ),
        applies=lambda layer: getattr(layer, "do_layer_norm_before", None) is pre,
    )


def _head_dims(path: str) -> Any:
    """Query, key and value of one head after the other."""

    def split(layer: Any) -> tuple[int, ...]:
        width = layer.get_submodule(path).head_dim
        return (width, width, width)

    return split


_FINAL = (("final.norm", "ln_f"), ("head", "lm_head"))
_AFTER: tuple[Site, ...] = (("final.norm", "ln_f", "output"), ("logits", "lm_head", "output"))
_BEFORE: tuple[Site, ...] = (("embedding.sum", "drop", "input"), ("embedding", "drop", "output"))


def _gpt2_layout(
    name: str,
    *,
    axis: int,
    dropouts: tuple[str, str] = ("attn.resid_dropout", "mlp.dropout"),
) -> Layout:
    """GPT-2's submodules, fused into (d, 3 d) matrices applied from the right or nn.Linear's.

    Query, key and value stand side by side along `axis`; GPTBigCode, which may interleave them by
    head, says so by an attribute.
    """

    def applies(layer: Any) -> bool:
        shape = layer.attn.c_attn.weight.shape
        return shape[axis] == 3 * shape[1 - axis] and not hasattr(layer.attn, "multi_query")

    return Layout(
        name,
        sites=_sites(("ln_1", "ln_2"), "attn.c_proj", dropouts, ("mlp.c_fc", "mlp.c_proj")),
        fused=(thirds("attn.c_attn.weight", axis=axis),),
        weights=(
            ("output", "attn.c_proj.weight"),
            ("ffn_in", "mlp.c_fc.weight"),
            ("ffn_out", "mlp.c_proj.weight"),
        ),
        norms=(("attention.norm", "ln_1"), ("ffn.norm", "ln_2")),
        outside=(("token", "wte"), ("position", "wpe"), *_FINAL),
        before=_BEFORE,
        after=_AFTER,
        applies=applies,
    )


LAYOUTS = (
    _gpt2_layout("GPT-2", axis=1),
    _gpt2_layout("GPT of nn.Linear", axis=0),
    _gpt2_layout("GPT of nn.Linear without dropout modules", axis=0, dropouts=("", "")),
    Layout(
        "GPT-Neo",
        sites=_sites(
            ("ln_1", "ln_2"),
            "attn.attention.out_proj",
            ("attn.attention.resid_dropout", "mlp.dropout"),
            ("mlp.c_fc", "mlp.c_proj"),
        ),
        weights=(
            ("query", "attn.attention.q_proj.weight"),
            ("key", "attn.attention.k_proj.weight"),
            ("value", "attn.attention.v_proj.weight"),
            ("output", "attn.attention.out_proj.weight"),
            ("ffn_in", "mlp.c_fc.weight"),
            ("ffn_out", "mlp.c_proj.weight"),
        ),
        norms=(("attention.norm", "ln_1"), ("ffn.norm", "ln_2")),
        outside=(("token", "wte"), ("position", "wpe"), *_FINAL),
        before=_BEFORE,
        after=_AFTER,
    ),
    _opt_layout(pre=True),
    _opt_layout(pre=False),
    Layout(
        "BLOOM",
        sites=_sites(
            ("input_layernorm", "post_attention_layernorm"),
            "self_attention.dense",
            ("", ""),
            ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ),
        # Query, key and value of one head follow each other.
        fused=(
            Fused(
                ("query", "key", "value"),
                "self_attention.query_key_value.weight",
                _head_dims("self_attention"),
            ),
        ),
        weights=(
            ("output", "self_attention.dense.weight"),
            ("ffn_in", "mlp.dense_h_to_4h.weight"),
            ("ffn_out", "mlp.dense_4h_to_h.weight"),
        ),
        norms=(
            ("attention.norm", "input_layernorm"),
            ("ffn.norm", "post_attention_layernorm"),
        ),
        outside=(
            ("token", "word_embeddings"),
            ("embedding.norm", "word_embeddings_layernorm"),
            *_FINAL,
        ),
        before=(
            ("embedding.sum", "word_embeddings_layernorm", "input"),
            ("embedding.norm", "word_embeddings_layernorm", "output"),
            ("embedding", "word_embeddings_layernorm", "output"),
        ),
        after=_AFTER,
        applies=lambda layer: hasattr(layer.self_attention, "inv_norm_factor"),
    ),
)
