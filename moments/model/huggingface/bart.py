"""Where BART and its relatives (mBART, Marian, Pegasus, Whisper, ...) keep sites and parameters.

Their configs are not read: the layouts are for measuring. Whether norms stand before or behind the
blocks, nothing in a layer says but its class.
"""

from __future__ import annotations

from .layout import Layout, attention, feed_forward, matrices, projections

POST = ("Bart", "Marian", "PLBart", "BlenderbotSmall")
PRE = ("MBart", "Pegasus", "Whisper", "M2M100", "Blenderbot", "BigBirdPegasus", "Speech2Text")

_HEADS = ("lm_head", "proj_out")


def _layout(*, pre: bool, decoder: bool) -> Layout:
    stack = "decoder" if decoder else "encoder"
    blocks = {"attention": ("self_attn_layer_norm", attention("self_attn.out_proj"))}
    weights = projections("self_attn")
    if decoder:
        inside = attention("encoder_attn.out_proj", name="cross")
        blocks["cross"] = ("encoder_attn_layer_norm", inside)
        weights += tuple((f"cross_{name}", path) for name, path in projections("encoder_attn"))
    blocks["ffn"] = ("final_layer_norm", feed_forward("fc1", "fc2"))
    classes = tuple(f"{name}{stack.title()}Layer" for name in (PRE if pre else POST))
    final = f"{stack}.layer_norm"
    return Layout.of(
        f"BART's relatives' {stack}, {'Pre' if pre else 'Post'}-LN",
        "pre" if pre else "post",
        blocks,
        weights=(*weights, *matrices(ffn_in="fc1", ffn_out="fc2")),
        outside=(
            ("position", f"{stack}.embed_positions"),
            ("embedding.norm", f"{stack}.layernorm_embedding"),
            ("final.norm", final),
            *((("token", "shared"), ("token", "decoder.embed_tokens")) if decoder else ()),
            *((("head", path) for path in _HEADS) if decoder else ()),
        ),
        after=(
            *((("final.norm", final, "output"),) if pre else ()),
            *((("logits", path, "output") for path in _HEADS) if decoder else ()),
        ),
        prefix="" if decoder else "encoder.",
        applies=lambda layer: type(layer).__name__ in classes,
    )


LAYOUTS = tuple(
    _layout(pre=pre, decoder=decoder) for pre in (True, False) for decoder in (True, False)
)
