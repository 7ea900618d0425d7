"""Small decoders that grow by a recipe of muP, in seven styles of code, with slips on demand.

A slip is (what, where): "rate" leaves out a matrix's 1/width in Adam's rate, "variance" that of its
initial variance, "slow" gives a table or a vector a rate of 1/width, "output" leaves the logits
without theirs, and "product" leaves the products of wider heads over the root of their width.
`where` is part of the parameter's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

VOCAB, LENGTH, HEAD, BASE = 61, 16, 16, 64
Slip = tuple[str, str] | None


class _Decoder(nn.Module):
    """Tables, blocks, a last norm and a head; `out` multiplies the logits."""

    def __init__(self, width: int, layers: int, block: Callable[..., nn.Module], norm: Any) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(block(width, layers) for _ in range(layers))
        self.norm_f = norm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        self.out, self.before = 1.0, False

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        x = self.norm_f(x)
        logits = self.lm_head(x * self.out) if self.before else self.lm_head(x) * self.out
        if targets is None:
            return logits, None
        return logits, f.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    three = (one.unflatten(-1, (-1, HEAD)).transpose(1, 2) for one in (q, k, v))
    return f.scaled_dot_product_attention(*three, is_causal=True).transpose(1, 2).flatten(2)


class _Wide(nn.Module):
    """Four heads that widen, their products over their width; biases, LayerNorm, GELU."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.fc, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.product = 8 / (width / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        q, k, v = (
            one(y).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        logits = (q @ k.transpose(-1, -2) * self.product).masked_fill(later, -torch.inf)
        x = x + self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(f.gelu(self.fc(self.ln2(x))))


class _Linears(nn.Module):
    """A Linear each, LayerNorm, GELU; blocks' outputs over the depth (CompleteP's alpha = 1)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.fc, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.branch = 4 / layers

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        x = x + self.branch * self.proj(_attended(self.q(y), self.k(y), self.v(y)))
        return x + self.branch * self.down(f.gelu(self.fc(self.ln2(x))))


class _Fused(nn.Module):
    """One matrix for queries, keys and values, stored as input by output; ReLU."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.w_qkv = nn.Parameter(torch.empty(width, 3 * width))
        self.w_o = nn.Parameter(torch.empty(width, width))
        self.w_in = nn.Parameter(torch.empty(width, 4 * width))
        self.w_out = nn.Parameter(torch.empty(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + _attended(*(self.ln1(x) @ self.w_qkv).chunk(3, dim=-1)) @ self.w_o
        return x + torch.relu(self.ln2(x) @ self.w_in) @ self.w_out


class _Gated(nn.Module):
    """RMSNorm and SwiGLU without biases."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.wo(_attended(self.wq(y), self.wk(y), self.wv(y)))
        y = self.norm2(x)
        return x + self.w2(f.silu(self.w1(y)) * self.w3(y))


class _Unit(nn.Module):
    """u-muP: entries of variance 1, and 1/sqrt(fan_in) where they are multiplied with."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        shapes = {"q": (width, width), "k": (width, width), "v": (width, width)}
        shapes |= {"o": (width, width), "up": (2 * width, width), "down": (width, 2 * width)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def _times(self, x: Tensor, weight: Any) -> Tensor:
        return f.linear(x, weight * weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = _attended(*(self._times(y, part) for part in (self.q, self.k, self.v)))
        x = x + self._times(heads, self.o)
        return x + self._times(f.gelu(self._times(self.norm2(x), self.up)), self.down)


STYLES: dict[str, tuple[Callable[..., nn.Module], Any]] = {
    "linears": (_Linears, nn.LayerNorm),
    "fused": (_Fused, nn.LayerNorm),
    "gated": (_Gated, nn.RMSNorm),
    "unit": (_Unit, nn.RMSNorm),
    "muon": (_Gated, nn.RMSNorm),
    "wide heads": (_Wide, nn.LayerNorm),
    "tied": (_Fused, nn.LayerNorm),
}
"""The "unit" style is u-muP's (Blake et al. 2024, table 2, with its rate of tables), "wide heads"
that of Microsoft's mup (heads' number fixed, products 8/d_head, head and queries from 0), "tied"
that of Cerebras-GPT and CompleteP (one table, what enters the head over the width)."""


def recipe(style: str, slip: Slip = None, *, layers: int = 1) -> Callable[[int], Any]:
    """From a width to a module and its optimizer, by muP in that style."""
    what, where = slip or ("", "")

    def made(width: int) -> tuple[nn.Module, Any]:
        block, norm = STYLES[style]
        module, m = _Decoder(width, layers, block, norm), width / BASE
        module.out = 1.0 if what == "output" else 1 / m
        module.before = style in ("wide heads", "tied")
        if style == "tied":
            module.lm_head.weight = module.wte.weight
        if what == "product":
            for part in module.blocks:
                part.product = (width / 4) ** -0.5
        groups, muon = [], []
        for name, p in module.named_parameters():
            hidden = p.ndim == 2 and name.startswith("blocks")
            transposed = style in ("fused", "tied")
            fan_in = p.shape[0] if transposed and hidden else p.shape[-1]
            std, rate = 0.5, 2e-3
            if hidden:
                std, rate = fan_in**-0.5, rate / m
            if hidden and style == "unit":  # the multiplier has half of either
                std, rate = 1.0, rate * m**0.5
            if name == "wte.weight" and style == "unit":
                rate *= m**-0.5
            if name == "lm_head.weight":
                std = BASE**-0.5
            if style == "wide heads" and (name == "lm_head.weight" or ".q.weight" in name):
                std = 0.0
            if where and where in name:
                std *= m**0.5 if what == "variance" else 1.0
                rate *= {"rate": m, "slow": 1 / m}.get(what, 1.0)
            if p.ndim == 2:
                nn.init.normal_(p, std=std)
            if hidden and style == "muon":
                muon.append({"params": [p], "lr": rate * m})
            else:
                groups.append({"params": [p], "lr": rate})
        adam = torch.optim.AdamW(groups)
        if style != "muon":
            return module, adam
        return module, [torch.optim.Muon(muon, lr=1e-3, momentum=0.0, nesterov=False), adam]

    return made


SLIPS: tuple[tuple[str, Slip], ...] = (
    ("linears", ("rate", "fc.weight")),
    ("linears", ("rate", ".q.")),
    ("linears", ("variance", ".down.weight")),
    ("linears", ("slow", "wte")),
    ("linears", ("slow", "fc.bias")),
    ("linears", ("output", "lm_head")),
    ("fused", ("rate", "w_qkv")),
    ("fused", ("variance", "w_in")),
    ("fused", ("rate", "w_out")),
    ("fused", ("output", "lm_head")),
    ("gated", ("rate", "w3")),
    ("gated", ("variance", "wv")),
    ("gated", ("slow", "norm1")),
    ("gated", ("rate", "wo")),
    ("unit", ("rate", ".up")),
    ("unit", ("variance", ".down")),
    ("unit", ("slow", "wte")),
    ("unit", ("output", "lm_head")),
    ("muon", ("slow", "lm_head")),
    ("muon", ("variance", "w1")),
    ("wide heads", ("product", "blocks.0.")),
    ("wide heads", ("rate", ".k.weight")),
    ("wide heads", ("slow", ".v.bias")),
    ("wide heads", ("output", "lm_head")),
    ("tied", ("output", "wte")),
    ("tied", ("rate", "w_o")),
    ("tied", ("variance", "w_qkv")),
)
