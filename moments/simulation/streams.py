"""Connections of a block to several residual streams (`moments.HyperConnections`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..model.streams import HyperConnections


def connection(
    streams: HyperConnections, layer: Any, x: Tensor, block: str, place: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's read and write weights (..., N) for the streams x, (..., N, d_model), and the
    mixing weights (..., N, N) from streams (rows) to streams."""
    count = streams.streams
    if streams.reads == "one":
        number = 2 * (layer.number - 1) + place
        read = torch.zeros_like(x[..., 0])
        read[..., number % count] = 1.0
        return read, torch.ones_like(read), torch.eye(count).to(x)
    n = x.flatten(-2)
    n = n / (n.square().mean(-1, keepdim=True) + layer.model.norm_epsilon).sqrt()
    z = torch.zeros(*x.shape[:-2], streams.logits).to(x)
    if f"{block}.streams" in layer.weights:
        weights = layer.weights
        z = streams.scale * (n @ weights[f"{block}.streams"]) + weights[f"{block}.streams.bias"]
    read = torch.sigmoid(streams.read_bias + z[..., :count]) + streams.epsilon
    write = streams.write_factor * torch.sigmoid(streams.write_bias + z[..., count : 2 * count])
    if streams.mixing == "identity":
        return read, write, torch.eye(count).to(x)
    mix = z[..., 2 * count :].unflatten(-1, (count, count)).softmax(-1) + streams.epsilon
    for number in range(streams.rounds):
        if number:
            mix = mix / (mix.sum(-1, keepdim=True) + streams.epsilon)
        mix = mix / (mix.sum(-2, keepdim=True) + streams.epsilon)
    return read, write, mix
