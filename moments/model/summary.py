"""A declared model in words: the rows that `print(model)` and a notebook show."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

import numpy as np

from ..errors import listed
from .experts import Experts
from .mixers import Absent

if TYPE_CHECKING:
    from .block import Block
    from .transformer import Transformer


UNITS = {"silu": "SwiGLU", "gelu": "GEGLU", "relu": "ReGLU", "sigmoid": "GLU"}
"""Names of gated units by their activation."""


def in_brief(model: Transformer, without: Container[str] = ()) -> str:
    """Its shape in a line, `without` some of its fields."""
    said = {
        "layers": f"{model.layers} layers",
        "d_model": f"d_model {model.d_model}",
        "heads": f"{model.heads} heads",
        "seq_len": f"{model.seq_len} tokens",
        "norm": f"{model.norm} norm",
    }
    return ", ".join(text for field, text in said.items() if field not in without)


def in_short(model: Transformer) -> str:
    """What a network is, in a line: size, mask, placement, norms, heads, positions, tokens."""
    kinds = list(dict.fromkeys(model.placements))
    names = {"pre": "Pre-LN", "post": "Post-LN", "none": "no norms"}
    placement = "Mix-LN" if model.norm == "mix" else names.get(kinds[0], f"{kinds[0]} norms")
    norm = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(
        model.normalization, model.normalization
    )
    shared = model.kv_heads or model.heads
    heads = f"{model.heads} heads"
    if shared != model.heads:
        heads = f"{model.heads} query heads on {shared} key head{'s' * (shared > 1)}"
    attention = f"{'causal' if model.causal else 'full'} attention"
    mixers = (attention if one is None else _block(one, "mixer") for one in model.mixers)
    units = UNITS.get(model.activation, f"gated {model.activation}")
    own = units if model.gated else model.activation
    blocks = (own if one is None else _block(one, "feed-forward block") for one in model.ffns)
    parts = [f"{model.layers} layer{'s' * (model.layers > 1)} of width {model.d_model}"]
    parts += ["sharing their weights"] if model.shared_layers else []
    parts += ["the input added again"] if model.input_mix else []
    parts += ["earlier layers added"] if model.skips else []
    parts += ["values of several sources"] if model.values else []
    parts += ["embeddings of every layer"] if model.per_layer_embedding else []
    parts += [f"{model.streams.streams} residual streams"] if model.streams else []
    parts += ["a learned residual sum"] if model.laurel else []
    parts += [" and ".join(dict.fromkeys(mixers)), placement]
    parts += [norm] if model.norm != "none" else []
    parts += [heads, " and ".join(dict.fromkeys(blocks))]
    parts += ["rotary"] if model.rotary is not None else []
    parts += ["ALiBi"] if model.alibi else []
    return ", ".join([*parts, f"{model.seq_len} tokens"])


def _block(block: Block, place: str) -> str:
    if isinstance(block, Absent):
        return f"no {place}"
    if isinstance(block, Experts):
        return f"{block.experts} experts, {block.chosen} per token"
    return type(block).__name__


def rows(model: Transformer) -> list[tuple[str, str]]:
    """(name, text) of everything that is not at its default."""
    mask = "causal" if model.causal else "full attention"
    gated = "gated " if model.gated else ""
    found = [
        ("shape", f"{model.layers} layers, d_model {model.d_model}, d_ff {model.d_ff}"),
        ("attention", f"{model.heads} heads of {model.d_head}, {model.seq_len} tokens, {mask}"),
        *[("", text) for text in _attention(model)],
        ("normalisation", f"{model.normalization}, {_placement(model)}"),
        ("activation", gated + model.activation),
        ("dropout", f"{model.dropout:g} on blocks, {model.attention_dropout:g} on attention"),
        ("scales", f"skip {span(model.skip_scales)}, branch {span(model.branch_scales)}"),
        ("weights", str(model.weights)),
    ]
    if model.layernorm_scaling:
        where = model.layernorm_scaling
        place = "after the norm" if where in (True, "after-norm") else str(where)
        found.append(("layernorm scaling", f"1/sqrt(layer) {place}"))
    if model.layer_scale:
        found.append(("layer scale", "a gain per feature on every branch"))
    for name, blocks in (("mixer", model.mixers), ("ffn", model.ffns)):
        for block in dict.fromkeys(one for one in blocks if one is not None):
            where = listed([n for n, one in enumerate(blocks, 1) if one == block])
            alike = blocks.count(block) == model.layers
            found.append((name, str(block) + ("" if alike else f" in layers {where}")))
    if model.parallel:
        found.append(("blocks", "attention and feed-forward in parallel"))
    for name in ("embedding", "head"):
        if getattr(model, name) is not None:
            found.append((name, str(getattr(model, name))))
    if model.encoder is not None:
        encoder = model.encoder
        found.append(("encoder", f"{encoder.layers} layers, d_model {encoder.d_model}"))
    return found


def _placement(model: Transformer) -> str:
    if model.norm == "mix":
        return f"post in the first {model.post_layers} layers, then pre"
    return model.norm


def _attention(model: Transformer) -> list[str]:
    found = []
    if model.kv_heads != model.heads:
        found.append(f"{model.kv_heads} heads of keys and values")
    for turned in dict.fromkeys(model.rotaries):
        where = listed([n for n, one in enumerate(model.rotaries, 1) if one == turned])
        if turned is not None:
            alike = model.rotaries.count(turned) == model.layers
            found.append(str(turned) + ("" if alike else f" in layers {where}"))
    if model.relative_bias is not None:
        found.append(str(model.relative_bias))
    if model.alibi:
        found.append("ALiBi" if model.alibi == 1 else f"ALiBi, slopes times {model.alibi:.3g}")
    if model.qk_norm:
        found.append(f"queries and keys normalised ({model.qk_norm})")
    if model.logit_softcap:
        found.append(f"logits capped at {model.logit_softcap:g}")
    if model.attention_gate:
        found.append(f"output gated ({model.attention_gate})")
    sinks = {one for one in model.attention_sinks if one is not None}
    if sinks:
        sizes = ", ".join(f"{one:.3g}" for one in sorted(sinks))
        found.append(f"attention sinks of variance {sizes}")
    if any(model.windows):
        reach = sorted({w for w in model.windows if w})
        found.append(f"windows of {', '.join(map(str, reach))} tokens")
    return found


def span(values: np.ndarray) -> str:
    """One number, or the range of several."""
    low, high = float(values.min()), float(values.max())
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _title(model: Transformer) -> str:
    return "Transformer" if model.name is None else f"Transformer {model.name}"


def text(model: Transformer) -> str:
    """Aligned lines."""
    lines = rows(model)
    width = max(len(name) for name, _ in lines)
    return "\n".join([_title(model), *(f"  {name:<{width}}  {what}" for name, what in lines)])


def html(model: Transformer) -> str:
    """A table."""
    from html import escape

    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(n)}</th><td>{escape(t)}</td></tr>"
        for n, t in rows(model)
    )
    return f"<table><caption>{escape(_title(model))}</caption>{cells}</table>"
