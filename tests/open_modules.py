"""Modules that are no stack of alike layers: choices, several skips, low rank, convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS = 128


def _unit(x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],))


class Attention(nn.Module):
    """Causal attention, its queries and keys of unit size; values may be given a second source."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.fused = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        rows, tokens, width = x.shape
        q, k, v = self.fused(x).view(rows, tokens, 3, self.heads, -1).unbind(2)
        if more is not None:
            v = (v + more.view_as(v)) * 0.5**0.5
        q, k, v = (t.transpose(1, 2) for t in (_unit(q), _unit(k), v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))


class Squared(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)).square())


class Hourglass(nn.Module):
    """Layers of the second half also read the first half's streams and the embedding, and their
    values a table of their own."""

    def __init__(self, width: int = 96, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.values = nn.ModuleList(nn.Embedding(WORDS, width) for _ in range(layers // 2))
        self.mixers = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.units = nn.ModuleList(Squared(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = start = _unit(self.table(ids))
        half, kept = len(self.mixers) // 2, []
        for n, (mixer, unit) in enumerate(zip(self.mixers, self.units, strict=True)):
            if n >= half:
                x = 0.8 * x + 0.5 * kept.pop() + 0.3 * start
            x = x + mixer(_unit(x), self.values[n](ids) if n < half else None)
            x = x + unit(_unit(x))
            if n < half:
                kept.append(x)
        return 15 * torch.tanh(self.head(_unit(x)) / 15)


class Routed(nn.Module):
    """Two of eight experts for every token."""

    def __init__(self, width: int, hidden: int, experts: int = 8, chosen: int = 2) -> None:
        super().__init__()
        self.router, self.chosen = nn.Linear(width, experts, bias=False), chosen
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, places = self.router(x).softmax(-1).topk(self.chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for expert in range(len(self.up)):
            share = (weights * (places == expert)).sum(-1, keepdim=True)
            total = total + share * (functional.gelu(x @ self.up[expert]) @ self.down[expert])
        return total


class Chosen(nn.Module):
    """A decoder of experts whose blocks are normalised at their output."""

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.mixers = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.experts = nn.ModuleList(Routed(width, 2 * width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for n, (mixer, experts) in enumerate(zip(self.mixers, self.experts, strict=True)):
            x = x + self.norms[2 * n](mixer(x))
            x = x + self.norms[2 * n + 1](experts(x))
        return self.head(self.norms[-1](x))


class Latent(nn.Module):
    """Keys and values of one narrow, normalised code; a convolution over time in front."""

    def __init__(self, width: int = 96, rank: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Embedding(WORDS, width)
        self.short = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.query, self.code = nn.Linear(width, width), nn.Linear(width, rank)
        self.norm = nn.RMSNorm(rank)
        self.both, self.out = nn.Linear(rank, 2 * width), nn.Linear(width, width)
        self.gate, self.last = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        rows, tokens, width = x.shape
        z = functional.silu(self.short(x.transpose(1, 2))[..., :tokens].transpose(1, 2))
        k, v = self.both(self.norm(self.code(z))).chunk(2, -1)
        q, k, v = (
            t.view(rows, tokens, self.heads, -1).transpose(1, 2) for t in (self.query(z), k, v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(rows, tokens, width)
        x = x + self.out(mixed * torch.sigmoid(self.gate(x)))
        return self.head(self.last(x))
