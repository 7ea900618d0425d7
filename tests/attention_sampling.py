"""One attention layer drawn many times, gradients by autograd; shares no formula with the package.

Positions are written out here as their papers do: rotations of feature pairs, distance penalties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """What is drawn; names as in `moments.layers.attention.self_attention.SelfAttention`."""

    d_model: int
    heads: int
    d_head: int
    query: float
    key: float
    value: float
    kv_heads: int | None = None
    query_bias: float = 0.0
    key_bias: float = 0.0
    value_bias: float = 0.0
    rotary: tuple[float, float] | None = None  # fraction, base
    alibi_slopes: tuple[float, ...] | None = None
    bucket: Any = None  # (Lq, Lk) of the relative bias
    bias_variance: float = 0.0
    qk_norm: str | None = None
    logit_softcap: float | None = None
    allowed: Any = None
    memory_width: int | None = None


def root(kernel: Array) -> torch.Tensor:
    values, vectors = np.linalg.eigh(kernel)
    found = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    return torch.tensor(found, dtype=torch.float32)


def rotated(z: torch.Tensor, fraction: float, base: float) -> torch.Tensor:
    """Features (m, m + turned/2) of position i turned by i base^(-2 m/turned)."""
    half = int(fraction * z.shape[-1]) // 2
    angle = torch.arange(z.shape[-2])[:, None] * base ** (-torch.arange(half) / half)
    first, second, rest = z[..., :half], z[..., half : 2 * half], z[..., 2 * half :]
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], -1)


def sample(
    layer: Layer,
    kernel: Array,
    gradient: Array,
    draws: int,
    memory: Array | None = None,
    seed: int = 0,
) -> dict[str, tuple[float, float]]:
    """Mean and standard error of traces, of sums over all pairs ("... sum") and of squared gradient
    norms, for tokens of fixed norm and a white gradient of the given kernel at the heads. Draws are
    in single precision, whose rounding is far below their scatter."""
    generator = torch.Generator().manual_seed(seed)
    real = {"generator": generator, "dtype": torch.float32}
    batch, length = 50, len(kernel)
    asked = kernel if memory is None else memory
    widths = layer.d_model, layer.memory_width or layer.d_model
    groups = layer.kv_heads or layer.heads
    roots = root(kernel), root(asked)
    gradient_root = root(gradient)
    allowed = np.ones((length, len(asked)), bool) if layer.allowed is None else layer.allowed
    mask = torch.tensor(allowed)
    offset = torch.arange(len(asked))[None] - torch.arange(length)[:, None]

    def tokens(side: int, of: Array) -> torch.Tensor:
        x = roots[side] @ torch.randn(batch, len(of), widths[side], **real)
        size = widths[side] * torch.tensor(np.diag(of), dtype=torch.float32)[:, None]
        return x * torch.sqrt(size / (x**2).sum(-1, keepdim=True))

    def normal(variance: float, *shape: int) -> torch.Tensor:
        return (torch.randn(batch, *shape, **real) * math.sqrt(variance)).requires_grad_()

    def split(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(batch, -1, count, layer.d_head).transpose(1, 2)

    def normed(z: torch.Tensor) -> torch.Tensor:
        if layer.qk_norm == "layernorm":
            z = z - z.mean(-1, keepdim=True)
        return z if layer.qk_norm is None else z / torch.sqrt((z**2).mean(-1, keepdim=True))

    def draw() -> dict[str, torch.Tensor]:
        x = tokens(0, kernel)
        y = x if memory is None else tokens(1, asked)
        ends = [z.clone().requires_grad_() for z in (x, y, y)]
        inner, shared = layer.heads * layer.d_head, groups * layer.d_head
        weights = {
            "query": normal(layer.query, widths[0], inner),
            "key": normal(layer.key, widths[1], shared),
            "value": normal(layer.value, widths[1], shared),
            "query.bias": normal(layer.query_bias, 1, inner),
            "key.bias": normal(layer.key_bias, 1, shared),
            "value.bias": normal(layer.value_bias, 1, shared),
        }
        q = normed(split(ends[0] @ weights["query"] + weights["query.bias"], layer.heads))
        k = normed(split(ends[1] @ weights["key"] + weights["key.bias"], groups))
        if layer.qk_norm is not None:  # a gain for each feature, shared by the heads
            for name in ("query.norm.gain", "key.norm.gain"):
                weights[name] = torch.ones(batch, 1, 1, layer.d_head)
                weights[name].requires_grad_()
            q, k = q * weights["query.norm.gain"], k * weights["key.norm.gain"]
        v = split(ends[2] @ weights["value"] + weights["value.bias"], groups)
        if layer.rotary is not None:
            q, k = rotated(q, *layer.rotary), rotated(k, *layer.rotary)
        k, v = (z.repeat_interleave(layer.heads // groups, 1) for z in (k, v))
        logits = q @ k.transpose(-1, -2) / math.sqrt(layer.d_head)
        if layer.alibi_slopes is not None:
            slopes = torch.tensor(layer.alibi_slopes, dtype=torch.float32)
            logits = logits - slopes[:, None, None] * offset.abs()
        if layer.bucket is not None:
            weights["relative_bias"] = normal(layer.bias_variance, layer.heads, 64)
            logits = logits + weights["relative_bias"][:, :, torch.tensor(layer.bucket)]
        if layer.logit_softcap is not None:
            logits = layer.logit_softcap * torch.tanh(logits / layer.logit_softcap)
        a = torch.softmax(logits.masked_fill(~mask, -1e30), -1)
        heads = (a @ v).transpose(1, 2).reshape(batch, length, inner)
        g = gradient_root @ torch.randn(batch, length, inner, **real)
        found = torch.autograd.grad((heads * g).sum(), [*ends, *weights.values()])
        result = {}
        named = (("output", heads), ("query path", found[0]), ("key path", found[1]))
        for name, z in (*named, ("value path", found[2])):
            result[name] = (z**2).sum((1, 2)) / z.shape[-1]
            result[f"{name} sum"] = (z.sum(1) ** 2).sum(-1) / z.shape[-1]
        given = zip(weights, found[3:], strict=True)
        result |= {name: (one**2).flatten(1).sum(1) for name, one in given}
        squares = (heads**2).mean(-1).mean(-1)  # of the norms of the averages over tokens
        result["spread"] = squares
        return {name: value.detach().double() for name, value in result.items()}

    drawn = [draw() for _ in range(draws // batch)]
    together = {name: torch.cat([one[name] for one in drawn]) for name in drawn[0]}
    found = {n: (float(v.mean()), float(v.std() / len(v) ** 0.5)) for n, v in together.items()}
    norms = together["spread"]
    variance = norms.var()
    error = float(((norms - norms.mean()) ** 2).std() / len(norms) ** 0.5)
    return found | {"spread": (float(variance), error)}
