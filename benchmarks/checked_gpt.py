"""A small GPT in the ways people write it, and the slips they report in public.

One class: attention fused or by hand, biases or none, a tied head or its own, logits alone or a
loss beside them, several initialisations. `slip` names one thing that is done wrong.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """Shape, style and slip; `init` is one of INITS."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 64
    vocab_size: int = 101
    block_size: int = 40
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True
    fused: bool = True
    loss: bool = True
    init: str = "gpt2"
    std: float = 0.02
    slip: str = ""


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.slip, self.heads, self.by_hand = config.slip, config.n_head, not config.fused
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.p = config.dropout
        self.n_head = config.n_head
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.c_attn(x).chunk(3, dim=-1)
        )
        width, length = q.shape[-1], q.shape[-2]
        scale = {
            "no scale": 1.0,
            "scale by width": 1 / width,
            "scale by model": 1 / math.sqrt(width * self.heads),
        }.get(self.slip, 1 / math.sqrt(width))
        causal = self.slip != "no mask"
        if self.by_hand:
            logits = q @ k.transpose(-2, -1) * scale
            if causal:
                ahead = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
                logits = logits.masked_fill(ahead, float("-inf"))
            axis = -2 if self.slip == "softmax axis" else -1
            weights = functional.dropout(
                functional.softmax(logits, dim=axis), self.p, self.training
            )
            mixed = weights.nan_to_num() @ v
        else:
            drop = self.p if self.training else 0.0
            mixed = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=drop, is_causal=causal, scale=scale
            )
        out = self.c_proj(mixed.transpose(1, 2).flatten(2))
        if self.slip == "dropout on":
            return functional.dropout(out, 0.2)
        return self.resid_dropout(out)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        self.slip, self.number = config.slip, number
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        if self.slip == "norm on the stream":
            x = self.ln_1(x)
            x = x + self.attn(x)
            x = self.ln_2(x)
            return x + self.mlp(x)
        if self.slip == "no residual" and self.number == 1:
            x = x + self.attn(self.ln_1(x))
            return self.mlp(self.ln_2(x))
        if self.slip == "norm skipped" and self.number == 1:
            x = x + self.attn(x)
            return x + self.mlp(self.ln_2(x))
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Token and position tables, Pre-LN blocks, a final norm, a head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        blocks = [Block(config, number) for number in range(config.n_layer)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(blocks),
            }
        )
        if config.slip != "no final norm":
            self.transformer["ln_f"] = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer["wte"].weight
        draw(self, config)

    def hidden(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.transformer["wte"](ids) + self.transformer["wpe"](places)
        x = self.transformer["drop"](x)
        for block in self.transformer["h"]:
            x = block(x)
        last = self.config.slip not in ("no final norm", "final norm never run")
        return self.transformer["ln_f"](x) if last else x

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.lm_head(self.hidden(idx))
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bare(GPT):
    """The same, giving logits alone."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.lm_head(self.hidden(ids))


def build(config: Config, seed: int) -> nn.Module:
    """A module, its weights drawn under a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (GPT if config.loss else Bare)(config)


# --- initialisations ------------------------------------------------------------------------------


def _linears(module: GPT) -> list[tuple[str, nn.Linear]]:
    inside = module.transformer["h"].named_modules()
    return [(name, part) for name, part in inside if isinstance(part, nn.Linear)]


def _outward(name: str) -> bool:
    return name.endswith("c_proj")


Spread = Callable[[str, nn.Linear, int], float]


def _gpt2(config: Config) -> Spread:
    root = math.sqrt(2 * config.n_layer)
    return lambda name, part, layer: config.std / (root if _outward(name) else 1)


def _by_layer(config: Config) -> Spread:
    return lambda name, part, layer: config.std / (math.sqrt(2 * layer) if _outward(name) else 1)


def _neox(config: Config) -> Spread:
    small = math.sqrt(2 / (5 * config.n_embd))
    wang = 2 / (config.n_layer * math.sqrt(config.n_embd))
    return lambda name, part, layer: wang if _outward(name) else small


def _xavier(config: Config) -> Spread:
    def spread(name: str, part: nn.Linear, layer: int) -> float:
        out = part.out_features
        if name.endswith("c_attn") and config.slip != "fused fan":
            out //= 3
        return math.sqrt(2 / (part.in_features + out))

    return spread


INITS: dict[str, Callable[[Config], Spread]] = {
    "gpt2": _gpt2,
    "normal": lambda config: lambda name, part, layer: config.std,
    "by layer": _by_layer,
    "neox": _neox,
    "xavier": _xavier,
    "kaiming": lambda config: lambda name, part, layer: math.sqrt(2 / part.in_features),
    "lecun": lambda config: lambda name, part, layer: math.sqrt(1 / part.in_features),
}
"""And "torch": as nn.Linear draws itself, tables apart."""

TRUNCATED = 0.87962566103423978
"""Deviation of a standard normal cut at two."""


def draw(module: GPT, config: Config) -> None:
    """Draw the weights as the style says, then what its slip does to them."""
    for table in (module.transformer["wte"], module.transformer["wpe"]):
        nn.init.normal_(table.weight, std=config.std)
    if not config.tied:
        nn.init.normal_(module.lm_head.weight, std=config.std)
    if config.init != "torch":
        spread = INITS[config.init](config)
        for name, part in _linears(module):
            layer = int(name.split(".")[0]) + 1
            nn.init.normal_(part.weight, std=spread(name, part, layer))
            if part.bias is not None and config.slip != "biases left":
                nn.init.zeros_(part.bias)
    with torch.no_grad():
        _SLIPS.get(config.slip, lambda *_: None)(module, config)


def _scaled(*ends: str) -> Callable[[GPT, Config], None]:
    """The depth scale on matrices whose names end so, and not on c_proj."""

    def slip(module: GPT, config: Config) -> None:
        root = math.sqrt(2 * config.n_layer)
        for name, part in _linears(module):
            right, here = name.endswith("c_proj"), name.endswith(ends)
            if right and not here:
                part.weight.mul_(root)
            elif here and not right:
                part.weight.div_(root)

    return slip


def _instead(wrong: str, right: str) -> Callable[[GPT, Config], None]:
    def slip(module: GPT, config: Config) -> None:
        root = math.sqrt(2 * config.n_layer)
        for name, part in _linears(module):
            if name.endswith(wrong):
                part.weight.div_(root)
            if name.endswith(right):
                part.weight.mul_(root)

    return slip


def _twice(module: GPT, config: Config) -> None:
    for name, part in _linears(module):
        if _outward(name):
            part.weight.div_(math.sqrt(2 * config.n_layer))


def _cut(at: float, corrected: bool) -> Callable[[GPT, Config], None]:
    """Normals cut at so many deviations, theirs corrected for a cut at two or not."""

    def slip(module: GPT, config: Config) -> None:
        for name, part in _linears(module):
            std = INITS[config.init](config)(name, part, 1) / (TRUNCATED if corrected else 1)
            nn.init.trunc_normal_(part.weight, std=std, a=-at * std, b=at * std)

    return slip


def _copied(module: GPT, config: Config) -> None:
    first = module.transformer["h"][0]
    for number in range(1, config.n_layer):
        module.transformer["h"][number] = copy.deepcopy(first)


def _table(name: str, std: float) -> Callable[[GPT, Config], None]:
    return lambda module, config: (nn.init.normal_(module.transformer[name].weight, std=std), None)[
        1
    ]


def _gains(module: GPT, config: Config) -> None:
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            nn.init.normal_(part.weight, std=0.02)


def _one_left(module: GPT, config: Config) -> None:
    module.transformer["h"][2].mlp.c_fc.reset_parameters()
    nn.init.zeros_(module.transformer["h"][2].mlp.c_fc.bias)


def _positive(module: GPT, config: Config) -> None:
    for name, part in _linears(module):
        if name.endswith("c_fc"):
            nn.init.uniform_(part.weight, 0, config.std * math.sqrt(3))


def _squared(module: GPT, config: Config) -> None:
    for _, part in _linears(module):
        part.weight.mul_(config.std)


def _all_scaled(module: GPT, config: Config) -> None:
    """The scale of a loop that matches "proj" in mlp alone."""
    root = math.sqrt(2 * config.n_layer)
    for name, part in _linears(module):
        if name.endswith("mlp.c_proj"):
            part.weight.mul_(root)


_SLIPS: dict[str, Callable[[GPT, Config], None]] = {
    "scale on c_attn": _instead("attn.c_attn", "attn.c_proj"),
    "scale on c_fc": _instead("mlp.c_fc", "mlp.c_proj"),
    "scale on inward": _scaled("c_attn", "c_fc"),
    "scale twice": _twice,
    "scale on attention alone": _all_scaled,
    "cut at 100": _cut(100.0, True),
    "cut at 2": _cut(2.0, False),
    "copied": _copied,
    "token std 1": _table("wte", 1.0),
    "position std 1": _table("wpe", 1.0),
    "gains drawn": _gains,
    "one matrix left": _one_left,
    "mean not zero": _positive,
    "variance as std": _squared,
}
