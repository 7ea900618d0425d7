"""torch's own nn.TransformerEncoder, whose layers say where their norms are."""

from __future__ import annotations

from .layout import Layout, Site, thirds

# An encoder layer applies its head projection inside a function, so "attention.heads" has no hook;
# its activation is followed by a dropout of its own, before which the site sits.
_ATTENTION: tuple[Site, ...] = (
    ("attention.projection", "self_attn", "output"),
    ("attention.dropout", "dropout1", "output"),
)
_FFN: tuple[Site, ...] = (
    ("ffn.in", "linear1", "output"),
    ("ffn.activation", "dropout", "input"),
    ("ffn.out", "linear2", "output"),
    ("ffn.dropout", "dropout2", "output"),
)
_POST: tuple[Site, ...] = (
    *_ATTENTION,
    ("attention.sum", "norm1", "input"),
    ("attention.norm", "norm1", "output"),
    *_FFN,
    ("ffn.sum", "norm2", "input"),
    ("ffn.norm", "norm2", "output"),
    ("stream", "", "output"),
)
_PRE: tuple[Site, ...] = (
    ("attention.norm", "norm1", "output"),
    *_ATTENTION,
    ("attention.sum", "norm2", "input"),
    ("ffn.norm", "norm2", "output"),
    *_FFN,
    ("ffn.sum", "", "output"),
    ("stream", "", "output"),
)


def _layout(*, pre: bool) -> Layout:
    return Layout(
        "nn.TransformerEncoderLayer",
        sites=_PRE if pre else _POST,
        weights=(
            ("output", "self_attn.out_proj.weight"),
            ("ffn_in", "linear1.weight"),
            ("ffn_out", "linear2.weight"),
        ),
        fused=(thirds("self_attn.in_proj_weight"),),
        norms=(("attention.norm", "norm1"), ("ffn.norm", "norm2")),
        outside=(("final.norm", "norm"),),
        applies=lambda layer: getattr(layer, "norm_first", None) is pre,
    )


LAYOUTS = (_layout(pre=False), _layout(pre=True))
