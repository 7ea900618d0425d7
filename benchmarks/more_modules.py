"""More modules that are no stack of alike layers, for `benchmarks/operations.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS = 256


class Streams(nn.Module):
    """Several residual streams, mixed between blocks by small matrices; a block reads a sum of all
    and is added to each by its own factor."""

    def __init__(self, width: int = 128, layers: int = 3, streams: int = 4) -> None:
        super().__init__()
        self.table, self.streams = nn.Embedding(WORDS, width), streams
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                nn.Linear(2 * width, width),
            )
            for _ in range(layers)
        )  # fmt: skip
        mixing, factors = 0.7 * torch.eye(streams) + 0.1, torch.linspace(0.3, 0.8, streams)
        self.mixing = nn.ParameterList(nn.Parameter(mixing.clone()) for _ in range(layers))
        self.reading = nn.ParameterList(nn.Parameter(factors.clone()) for _ in range(layers))
        self.writing = nn.ParameterList(nn.Parameter(factors.flip(0)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).unsqueeze(2).repeat(1, 1, self.streams, 1)
        for n, block in enumerate(self.blocks):
            y = block(torch.einsum("n,btnd->btd", self.reading[n], x))
            x = torch.einsum("mn,btnd->btmd", self.mixing[n], x)
            x = x + self.writing[n][:, None] * y.unsqueeze(2)
        return self.head(self.norm(x.sum(2)))


class Weighted(nn.Module):
    """A decoder whose stream, first state, values of a table, skips and logits are each multiplied
    by numbers that are learned."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.heads, half = heads, layers // 2
        self.table = nn.Embedding(WORDS, width)
        self.values = nn.ModuleList(nn.Embedding(WORDS, width) for _ in range(half))
        self.fused = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.out, self.up, self.down = (
            nn.ModuleList(nn.Linear(a * width, b * width, bias=False) for _ in range(layers))
            for a, b in ((1, 1), (1, 4), (4, 1))
        )
        self.stream = nn.Parameter(torch.tensor([[0.9, 0.4]] * layers))
        self.shares = nn.ParameterList(nn.Parameter(torch.tensor([0.5, 0.6])) for _ in range(half))
        self.skips = nn.Parameter(torch.linspace(0.5, 0.8, half))
        self.branches = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = first = functional.rms_norm(self.table(ids), (self.table.embedding_dim,))
        half, kept = len(self.skips), []
        for n, fused in enumerate(self.fused):
            if n >= half:
                x = x + self.skips[n - half] * kept.pop()
            x = self.stream[n, 0] * x + self.stream[n, 1] * first
            y = functional.rms_norm(x, (x.shape[-1],))
            q, k, v = fused(y).unflatten(-1, (3, self.heads, -1)).unbind(2)
            if n < half:
                share = self.shares[n]
                v = share[0] * v + share[1] * self.values[n](ids).view_as(v)
            q, k = (functional.rms_norm(t, (t.shape[-1],)) for t in (q, k))
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.branches * self.out[n](mixed.transpose(1, 2).flatten(2))
            y = functional.rms_norm(x, (x.shape[-1],))
            x = x + self.branches * self.down[n](functional.relu(self.up[n](y)).square())
            if n < half:
                kept.append(x)
        z = self.head(functional.rms_norm(x, (x.shape[-1],)))
        return 15 * torch.tanh(z / 15)


class Selective(nn.Module):
    """A recurrence whose step sizes, inputs and outputs follow the token."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, width)
        self.steps, self.both = nn.Linear(width, width), nn.Linear(width, 2 * states, bias=False)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(width, 1))
        self.steps.bias = nn.Parameter(torch.linspace(-5.0, -2.0, width))

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.enter(x).chunk(2, -1)
        x = functional.silu(x)
        steps = functional.softplus(self.steps(x))
        read, write = self.both(x).chunk(2, -1)
        rate, made = -self.decay.exp(), []
        state = x.new_zeros(x.shape[0], *self.decay.shape)
        for t in range(x.shape[1]):
            kept = torch.exp(steps[:, t, :, None] * rate)
            state = kept * state + (steps[:, t] * x[:, t])[..., None] * read[:, t, None]
            made.append((state * write[:, t, None]).sum(-1))
        return self.leave((torch.stack(made, 1) + x) * functional.silu(gate))


class Recurrent(nn.Module):
    """Two selective recurrences on a residual stream."""

    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers + 1))
        self.cells = nn.ModuleList(Selective(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for norm, cell in zip(self.norms, self.cells, strict=False):
            x = x + cell(norm(x))
        return self.head(self.norms[-1](x))


class Crossed(nn.Module):
    """Attention of some tokens to others, each through a norm of its own."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm = nn.LayerNorm(width)
        self.query, self.both = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        k, v = self.both(y if read is None else read).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.query(y), k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Captions(nn.Module):
    """Patches of a picture, and a decoder of tokens that reads them."""

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.seeing = nn.ModuleList(Crossed(width, heads) for _ in range(layers))
        self.table, self.places = nn.Embedding(WORDS, width), nn.Embedding(64, width)
        self.saying = nn.ModuleList(Crossed(width, heads, causal=True) for _ in range(layers))
        self.looking = nn.ModuleList(Crossed(width, heads) for _ in range(layers))
        self.units = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        for block in self.seeing:
            x = block(x)
        x, y = self.norms[0](x), self.table(ids) + self.places(torch.arange(ids.shape[1]))
        for say, look, unit in zip(self.saying, self.looking, self.units, strict=True):
            y = look(say(y), x)
            y = y + unit(y)
        return self.head(self.norms[1](y))
