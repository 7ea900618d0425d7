"""A small GPT as people write their own: nn.Linear throughout, one fused matrix for q, k and v.

Its argument names, its outputs (logits, loss) and its submodules are those of the common teaching
code, not of any library; with `bare` it has no dropout submodules and no biases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

STD = 0.02


@dataclass
class Config:
    """Shape."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 64
    vocab_size: int = 97
    block_size: int = 24
    dropout: float = 0.1
    bare: bool = False


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.c_attn = nn.Linear(width, 3 * width, bias=not config.bare)
        self.c_proj = nn.Linear(width, width, bias=not config.bare)
        self.dropout = 0.0 if config.bare else config.dropout
        if not config.bare:
            self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in self._parts(x)]
        drop = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(*heads, dropout_p=drop, is_causal=True)
        out = self.c_proj(mixed.transpose(1, 2).flatten(2))
        return self.resid_dropout(out) if hasattr(self, "resid_dropout") else out

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.c_attn(x).chunk(3, dim=-1)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.n_embd
        self.c_fc = nn.Linear(width, 4 * width, bias=not config.bare)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=not config.bare)
        if not config.bare:
            self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = self.c_proj(self.gelu(self.c_fc(x)))
        return self.dropout(out) if hasattr(self, "dropout") else out


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=not config.bare)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=not config.bare)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Token and position tables, pre-norm blocks, a final norm, a tied head."""

    def __init__(self, config: Config | None = None, **changes: Any) -> None:
        super().__init__()
        self.config = config = config or Config(**changes)
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "wpe": nn.Embedding(config.block_size, config.n_embd),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": nn.LayerNorm(config.n_embd, bias=not config.bare),
        }
        if not config.bare:
            parts["drop"] = nn.Dropout(config.dropout)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        self.apply(self._draw)
        for name, weight in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(weight, std=STD / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _draw(part: nn.Module) -> None:
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=STD)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        places = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](places)
        if "drop" in self.transformer:
            x = self.transformer["drop"](x)
        for block in self.transformer["h"]:
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text(config: Config, batch: int = 4, seed: int = 1) -> dict[str, Tensor]:
    """Random tokens and the token that follows each."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (batch, config.block_size + 1), generator=generator)
    return {"idx": ids[:, :-1], "targets": ids[:, 1:]}
