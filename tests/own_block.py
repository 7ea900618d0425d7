"""A block of one's own, declared, put together and simulated in one file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import moments
from moments.formulas.activation import activation_laws
from moments.formulas.linear import LINEAR
from moments.layers.architecture import BLOCKS, Blocks
from moments.layers.elementary import Activation, Linear
from moments.model.block import Block
from moments.simulation.network import BLOCK_TWINS, LayerTwin


@dataclass(frozen=True)
class Bottleneck(Block):
    """ReLU between a matrix of its own and one of the model's."""

    kind: ClassVar[str] = "bottleneck"
    places: ClassVar[tuple[str, ...]] = ("mixer", "ffn")
    width: int = 8
    out: str = "ffn_out"

    def shapes(self, model: moments.Transformer) -> dict[str, tuple[int, int]]:
        return {"up": (model.d_model, self.width), self.out: (self.width, model.d_model)}

    def variances(self, model: moments.Transformer) -> dict[str, float]:
        return {"up": 2 / model.d_model}


def _components(parts: Blocks, block: Bottleneck) -> tuple[Any, ...]:
    d_model, width = parts.model.d_model, block.width
    given = {"fan_in": d_model, "fan_out": width, "weight_variance": 2 / d_model}
    return (
        Linear(LINEAR, parts.theory, "ffn.in", given, width, "up"),
        Activation(activation_laws("relu"), parts.theory, "ffn.activation"),
        parts._linear("ffn.out", block.out, width, d_model),
    )


def _twin(block: Bottleneck, layer: LayerTwin, z: torch.Tensor) -> torch.Tensor:
    return layer.linear(torch.relu(layer.linear(z, "up")), block.out)


BLOCKS[Bottleneck], BLOCK_TWINS[Bottleneck] = _components, _twin
