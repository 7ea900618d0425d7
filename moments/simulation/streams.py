"""What connects a block to several residual streams (`moments.HyperConnections`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..model.streams import HyperConnections


def connection(
    of: HyperConnections, layer: Any, x: Tensor, block: str, place: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(..., N) what a block reads of every stream of `x`, (..., N, d_model), and writes to it; and
    (..., N, N) what every stream, a row, gives to every other."""
    count = of.streams
    if of.reads == "one":
        number = 2 * (layer.number - 1) + place
        alone = torch.zeros_like(x[..., 0])
        alone[..., number % count] = 1.0
        return alone, torch.ones_like(alone), torch.eye(count).to(x)
    n = x.flatten(-2)
    n = n / (n.square().mean(-1, keepdim=True) + layer.model.norm_epsilon).sqrt()
    z = torch.zeros(*x.shape[:-2], of.logits).to(x)
    if f"{block}.streams" in layer.weights:
        weights = layer.weights
        z = of.scale * (n @ weights[f"{block}.streams"]) + weights[f"{block}.streams.bias"]
    read = torch.sigmoid(of.read_bias + z[..., :count]) + of.epsilon
    write = of.write_factor * torch.sigmoid(of.write_bias + z[..., count : 2 * count])
    if of.mixing == "identity":
        return read, write, torch.eye(count).to(x)
    mix = z[..., 2 * count :].unflatten(-1, (count, count)).softmax(-1) + of.epsilon
    for number in range(of.rounds):
        if number:
            mix = mix / (mix.sum(-1, keepdim=True) + of.epsilon)
        mix = mix / (mix.sum(-2, keepdim=True) + of.epsilon)
    return read, write, mix
