"""torch's own encoder and decoder layers, which say themselves where their norms are.

nn.TransformerEncoder and nn.TransformerDecoder stand alone; in nn.Transformer the first is the
encoder beside the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .layout import Layout, Site, WeightPart, thirds

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class _TorchLayout(Layout):
    """A layout whose stack keeps its final norm beside its own list of layers."""

    def beside(self, module: nn.Module, layers: int) -> Iterator[tuple[int, WeightPart]]:
        """As of any layout, without the norm of the other stack."""
        for number, part in super().beside(module, layers):
            stack = part.parameter.rpartition(".")[0].rpartition(".")[0]
            layer = next(iter(getattr(module.get_submodule(stack), "layers", ())), None)
            if layer is None or self.applies(layer):
                yield number, part


def _attention(site: str, path: str, dropout: str) -> tuple[Site, ...]:
    # The head projection is applied inside a function, so that "attention.heads" has no hook.
    return (
        (f"{site}.projection", path, "output"),
        (f"{site}.dropout", dropout, "output"),
    )


def _ffn(dropout: str) -> tuple[Site, ...]:
    # The activation is a function, seen by the dropout behind it.
    return (
        ("ffn.in", "linear1", "output"),
        ("ffn.activation", "dropout", "input"),
        ("ffn.activation_dropout", "dropout", "output"),
        ("ffn.out", "linear2", "output"),
        ("ffn.dropout", dropout, "output"),
    )


def _sites(blocks: Mapping[str, tuple[Site, ...]], *, pre: bool) -> tuple[Site, ...]:
    """Of a layer with norm1, norm2, ... in the order of its blocks."""
    found: list[Site] = []
    for number, (name, inner) in enumerate(blocks.items(), start=1):
        norm: Site = (f"{name}.norm", f"norm{number}", "output")
        if not pre:
            found += [*inner, (f"{name}.sum", f"norm{number}", "input"), norm]
            continue
        follows: Site = (f"{name}.sum", f"norm{number + 1}", "input")
        last: Site = (f"{name}.sum", "", "output")
        found += [norm, *inner, last if number == len(blocks) else follows]
    return (*found, ("stream", "", "output"))


def _layout(*, pre: bool, decoder: bool) -> Layout:
    blocks = {"attention": _attention("attention", "self_attn", "dropout1")}
    if decoder:
        blocks["cross"] = _attention("cross", "multihead_attn", "dropout2")
    blocks["ffn"] = _ffn(f"dropout{len(blocks) + 1}")
    cross = thirds("multihead_attn.in_proj_weight")
    cross = cross._replace(weights=tuple(f"cross_{name}" for name in cross.weights))
    return _TorchLayout(
        f"nn.Transformer{'Decoder' if decoder else 'Encoder'}Layer",
        sites=_sites(blocks, pre=pre),
        weights=(
            ("output", "self_attn.out_proj.weight"),
            *((("cross_output", "multihead_attn.out_proj.weight"),) if decoder else ()),
            ("ffn_in", "linear1.weight"),
            ("ffn_out", "linear2.weight"),
        ),
        fused=(thirds("self_attn.in_proj_weight"), *((cross,) if decoder else ())),
        norms=tuple((f"{name}.norm", f"norm{n}") for n, name in enumerate(blocks, start=1)),
        outside=(("final.norm", "norm"),),
        prefix="" if decoder else "encoder.",
        applies=lambda layer: (
            getattr(layer, "norm_first", None) is pre
            and hasattr(layer, "multihead_attn") is decoder
        ),
    )


LAYOUTS = tuple(
    _layout(pre=pre, decoder=decoder) for decoder in (False, True) for pre in (False, True)
)
