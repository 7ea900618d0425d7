"""Where BART and its relatives (mBART, Marian, Pegasus, Whisper, ...) keep sites and parameters.

Their configs are not read: the layouts are for measuring. Whether norms stand before or behind the
blocks, nothing in a layer says but its class.
"""

from __future__ import annotations

from .layout import Layout, Site

POST = ("Bart", "Marian", "PLBart", "BlenderbotSmall")
PRE = ("MBart", "Pegasus", "Whisper", "M2M100", "Blenderbot", "BigBirdPegasus", "Speech2Text")

_MATRICES = ("query", "key", "value", "output")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
_HEADS = ("lm_head", "proj_out")


def _layout(*, pre: bool, decoder: bool) -> Layout:
    stack = "decoder" if decoder else "encoder"
    blocks = {"attention": ("self_attn_layer_norm", "self_attn")}
    if decoder:
        blocks["cross"] = ("encoder_attn_layer_norm", "encoder_attn")
    blocks["ffn"] = ("final_layer_norm", "")
    norms = [norm for norm, _ in blocks.values()]
    sites: list[Site] = []
    for number, (name, (norm, path)) in enumerate(blocks.items()):
        if path:
            sites.append((f"{name}.heads", f"{path}.out_proj", "input"))
            sites.append((f"{name}.projection", f"{path}.out_proj", "output"))
        else:
            sites += [
                ("ffn.in", "fc1", "output"),
                ("ffn.activation", "fc2", "input"),
                ("ffn.out", "fc2", "output"),
            ]
        sites.append((f"{name}.norm", norm, "output"))
        read_by = norms[number + 1 :] if pre else [norm]
        sites.append((f"{name}.sum", *((read_by[0], "input") if read_by else ("", "output"))))
    matrices = [
        (f"{prefix}{name}", f"{path}.{projection}.weight")
        for prefix, path in (("", "self_attn"), ("cross_", "encoder_attn"))[: 1 + decoder]
        for name, projection in zip(_MATRICES, _PROJECTIONS, strict=True)
    ]
    classes = tuple(f"{name}{stack.title()}Layer" for name in (PRE if pre else POST))
    return Layout(
        f"BART's relatives' {stack}, {'Pre' if pre else 'Post'}-LN",
        sites=(*sites, ("stream", "", "output")),
        weights=(*matrices, ("ffn_in", "fc1.weight"), ("ffn_out", "fc2.weight")),
        norms=tuple((f"{name}.norm", norm) for name, (norm, _) in blocks.items()),
        outside=(
            ("position", f"{stack}.embed_positions"),
            ("embedding.norm", f"{stack}.layernorm_embedding"),
            ("final.norm", f"{stack}.layer_norm"),
            *((("token", "shared"), ("token", "decoder.embed_tokens")) if decoder else ()),
            *((("head", path) for path in _HEADS) if decoder else ()),
        ),
        after=(
            *((("final.norm", f"{stack}.layer_norm", "output"),) if pre else ()),
            *((("logits", path, "output") for path in _HEADS) if decoder else ()),
        ),
        prefix="" if decoder else "encoder.",
        applies=lambda layer: type(layer).__name__ in classes,
    )


LAYOUTS = tuple(
    _layout(pre=pre, decoder=decoder) for pre in (True, False) for decoder in (True, False)
)
