"""How blocks and layers read and write several residual streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..model.streams import AltUp, HyperConnections
from .functions import normalise


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


def entering(streams: AltUp, weights: Tensor, x: Tensor) -> Tensor:
    """The streams (..., N, d_model) that enter layer 1, from its input (..., d_model)."""
    others = (x @ weights).unflatten(-1, (streams.streams - 1, -1))
    return torch.cat([x.unsqueeze(-2), _of_size(others, x.unsqueeze(-2))], -2)


def leaving(streams: AltUp, weights: Tensor, x: Tensor) -> Tensor:
    """The mean of the streams behind the last layer, with matrices between."""
    each = weights.unflatten(-1, (streams.streams - 1, -1))
    others = torch.einsum("...nd,dne->...ne", x[..., 1:, :], each)
    return torch.cat([x[..., :1, :], _of_size(others, x[..., :1, :])], -2).mean(-2)


def _of_size(x: Tensor, like: Tensor) -> Tensor:
    square = x.square().mean(-1, keepdim=True).clamp(min=1e-5)
    return x * (like.square().mean(-1, keepdim=True) / square).sqrt()


def _modalities(layer: Any, x: Tensor) -> Tensor:
    n = normalise(x, "rmsnorm", layer.model.norm_epsilon)
    return torch.tanh(n @ layer.weights["streams.router"] / x.shape[-1])


def predicted(layer: Any, x: Tensor) -> Tensor:
    """Every stream plus a combination of all."""
    count = x.shape[-2]
    coefficients = _modalities(layer, x[..., 0, :]) @ layer.weights["streams.prediction"]
    return x + coefficients.unflatten(-1, (count, count)) @ x


def corrected(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Every stream plus the first one's change to y."""
    coefficients = 1.0 + _modalities(layer, y) @ layer.weights["streams.correction"]
    return x + coefficients.unsqueeze(-1) * (y - x[..., 0, :]).unsqueeze(-2)
