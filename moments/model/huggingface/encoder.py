"""torch's own encoder and decoder layers, which say themselves where their norms are.

nn.TransformerEncoder and nn.TransformerDecoder stand alone; in nn.Transformer the first is the
encoder beside the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .layout import Layout, Site, WeightPart, attention, matrices, thirds

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


def _attention(name: str, path: str, dropout: str) -> tuple[Site, ...]:
    # The head projection is applied inside a function, so that "attention.heads" has no hook.
    return attention(path, dropout, name=name)[1:]


def _ffn(dropout: str) -> tuple[Site, ...]:
    # The activation is a function, seen by the dropout behind it.
    return (
        ("ffn.in", "linear1", "output"),
        ("ffn.activation", "dropout", "input"),
        ("ffn.activation_dropout", "dropout", "output"),
        ("ffn.out", "linear2", "output"),
        ("ffn.dropout", dropout, "output"),
    )


def _layout(*, pre: bool, decoder: bool) -> Layout:
    blocks = {"attention": ("norm1", _attention("attention", "self_attn", "dropout1"))}
    weights = matrices(output="self_attn.out_proj", ffn_in="linear1", ffn_out="linear2")
    fused = [thirds("self_attn.in_proj_weight")]
    if decoder:
        blocks["cross"] = ("norm2", _attention("cross", "multihead_attn", "dropout2"))
        weights += matrices(cross_output="multihead_attn.out_proj")
        cross = thirds("multihead_attn.in_proj_weight")
        fused.append(cross._replace(weights=tuple(f"cross_{name}" for name in cross.weights)))
    number = len(blocks) + 1
    blocks["ffn"] = (f"norm{number}", _ffn(f"dropout{number}"))
    return _TorchLayout.of(
        f"nn.Transformer{'Decoder' if decoder else 'Encoder'}Layer",
        "pre" if pre else "post",
        blocks,
        weights=weights,
        fused=tuple(fused),
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
