"""Small transformers as people write their own, one class per style of the public teaching and
training code; every name, layout and habit differs, none is of a library."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

VOCAB, WIDTH, HEADS, LENGTH = 97, 64, 4, 24


# --- minGPT: masks in a buffer, softmax by hand, three matrices -----------------------------------


class _HandAttention(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.key, self.query, self.value, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attn_drop, self.resid_drop = nn.Dropout(drop), nn.Dropout(drop)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        k = self.key(x).view(b, t, HEADS, c // HEADS).transpose(1, 2)
        q = self.query(x).view(b, t, HEADS, c // HEADS).transpose(1, 2)
        v = self.value(x).view(b, t, HEADS, c // HEADS).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = self.attn_drop(f.softmax(att, dim=-1)) @ v
        return self.resid_drop(self.proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class _NewGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class HandGPT(nn.Module):
    """minGPT style."""

    def __init__(self, layers: int = 2, drop: float = 0.1) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCAB, WIDTH)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(1, LENGTH, WIDTH))
        self.drop = nn.Dropout(drop)
        self.blocks = nn.Sequential(*(_HandBlock(drop) for _ in range(layers)))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.drop(self.tok_emb(idx) + self.pos_emb[:, : idx.size(1)])
        logits = self.head(self.ln_f(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, f.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


class _HandBlock(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = _HandAttention(drop)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), _NewGelu(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(drop)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


# --- the lecture: every head a module of its own --------------------------------------------------


class _Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.key, self.query, self.value = (nn.Linear(WIDTH, size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(LENGTH, LENGTH)))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:t, :t] == 0, float("-inf"))
        return self.dropout(f.softmax(wei, dim=-1)) @ self.value(x)


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([_Head() for _ in range(HEADS)])
        self.proj, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.proj(torch.cat([h(x) for h in self.heads], dim=-1)))


class LectureGPT(nn.Module):
    """A list of heads in a list of blocks."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.token_embedding_table = nn.Embedding(VOCAB, WIDTH)
        self.position_embedding_table = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(_LectureBlock() for _ in range(layers)))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        t = idx.shape[1]
        x = self.token_embedding_table(idx) + self.position_embedding_table(torch.arange(t))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, f.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


class _LectureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sa, self.ln1, self.ln2 = _Heads(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.ffwd = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.sa(self.ln1(x))
        return x + self.ffwd(self.ln2(x))


# --- lit-gpt: grouped queries in one matrix, rotary on part of a head, parallel or not ------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


class _RMS(nn.Module):
    """RMSNorm by hand, its gain perhaps stored less one."""

    def __init__(self, size: int, unit: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if unit else torch.ones(size))
        self.unit, self.eps = unit, 1e-5

    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        x = x.float()
        x = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps)
        return (x * (1 + self.weight if self.unit else self.weight)).to(kind)


class _GroupedAttention(nn.Module):
    def __init__(self, groups: int, share: float) -> None:
        super().__init__()
        self.groups, self.size = groups, WIDTH // HEADS
        self.turned = int(share * self.size)
        self.attn = nn.Linear(WIDTH, (HEADS + 2 * groups) * self.size, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.size()
        per = HEADS // self.groups
        qkv = self.attn(x).view(b, t, self.groups, per + 2, self.size).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per, 1, 1), dim=2)
        k = k.expand(b, self.groups, per, t, self.size)
        v = v.expand(b, self.groups, per, t, self.size)
        q, k, v = (p.reshape(b, -1, t, self.size) for p in (q, k, v))
        n = self.turned
        q = torch.cat((_rotate(q[..., :n], cos, sin), q[..., n:]), dim=-1)
        k = torch.cat((_rotate(k[..., :n], cos, sin), k[..., n:]), dim=-1)
        y = f.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.size**-0.5)
        return self.proj(y.transpose(1, 2).reshape(b, t, WIDTH))


class _GroupedBlock(nn.Module):
    def __init__(self, groups: int, share: float, parallel: bool) -> None:
        super().__init__()
        self.norm_1 = _RMS(WIDTH, unit=True)
        self.attn = _GroupedAttention(groups, share)
        self.norm_2 = None if parallel else _RMS(WIDTH, unit=True)
        self.mlp = nn.ModuleDict(
            {
                "fc_1": nn.Linear(WIDTH, 3 * WIDTH, bias=False),
                "fc_2": nn.Linear(WIDTH, 3 * WIDTH, bias=False),
                "proj": nn.Linear(3 * WIDTH, WIDTH, bias=False),
            }
        )

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp["proj"](f.silu(self.mlp["fc_1"](x)) * self.mlp["fc_2"](x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.attn(normed, cos, sin)
        if self.norm_2 is None:
            return self.feed(normed) + attended + x
        x = attended + x
        return self.feed(self.norm_2(x)) + x


class GroupedGPT(nn.Module):
    """lit-gpt style."""

    def __init__(
        self, layers: int = 2, groups: int = 2, share: float = 0.5, parallel: bool = False
    ) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "h": nn.ModuleList(_GroupedBlock(groups, share, parallel) for _ in range(layers)),
                "ln_f": _RMS(WIDTH, unit=True),
            }
        )
        turned = int(share * (WIDTH // HEADS))
        theta = 1.0 / (10000 ** (torch.arange(0, turned, 2).float() / turned))
        angle = torch.outer(torch.arange(LENGTH), theta).repeat(1, 2)
        self.register_buffer("cos", torch.cos(angle), persistent=False)
        self.register_buffer("sin", torch.sin(angle), persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        t = idx.size(1)
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:
            x = block(x, self.cos[:t], self.sin[:t])
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits
        return logits, f.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- torchtitan: complex rotary, w1 w2 w3, layers in a dictionary ---------------------------------


def _turn(x: Tensor, freqs: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * freqs.view(1, x.shape[1], 1, -1)).flatten(3)
    return turned.type_as(x)


class _TitanAttention(nn.Module):
    def __init__(self, shared: int) -> None:
        super().__init__()
        self.size, self.shared = WIDTH // HEADS, shared
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, shared * self.size, bias=False)
        self.wv = nn.Linear(WIDTH, shared * self.size, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.size) for w in (self.wq, self.wk, self.wv))
        q, k = _turn(q, freqs), _turn(k, freqs)
        times = HEADS // self.shared
        k, v = (p.repeat_interleave(times, dim=2) for p in (k, v))
        q, k, v = (p.transpose(1, 2) for p in (q, k, v))
        out = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(b, t, -1))


class _TitanFeed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(f.silu(self.w1(x)) * self.w3(x))


class _TitanBlock(nn.Module):
    def __init__(self, shared: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = _TitanAttention(shared), _TitanFeed()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs)
        return h + self.feed_forward(self.ffn_norm(h))


class TitanGPT(nn.Module):
    """torchtitan style."""

    def __init__(self, layers: int = 2, shared: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(n): _TitanBlock(shared) for n in range(layers)})
        self.norm, self.output = nn.RMSNorm(WIDTH, 1e-5), nn.Linear(WIDTH, VOCAB, bias=False)
        size = WIDTH // HEADS
        speeds = 1.0 / (500000.0 ** (torch.arange(0, size, 2).float() / size))
        angle = torch.outer(torch.arange(LENGTH).float(), speeds)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angle), angle))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis[: tokens.shape[1]])
        return self.output(self.norm(h))


# --- torchtune: rotary on interleaved pairs, norms of queries and keys, scales on the residual ----


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _TuneRotary(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        theta = 1.0 / (10000 ** (torch.arange(0, size, 2)[: size // 2].float() / size))
        angle = torch.einsum("i, j -> ij", torch.arange(LENGTH).float(), theta)
        cache = torch.stack([torch.cos(angle), torch.sin(angle)], dim=-1)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        rope = self.cache[: x.size(1)].view(-1, x.size(1), 1, pairs.size(3), 2)
        out = torch.stack(
            [
                pairs[..., 0] * rope[..., 0] - pairs[..., 1] * rope[..., 1],
                pairs[..., 1] * rope[..., 0] + pairs[..., 0] * rope[..., 1],
            ],
            -1,
        )
        return out.flatten(3).type_as(x)


class _TuneLayer(nn.Module):
    def __init__(self, normed: bool, scaled: bool) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = (nn.RMSNorm(self.size) if normed else None for _ in range(2))
        self.pos_embeddings = _TuneRotary(self.size)
        self.sa_norm, self.mlp_norm = nn.RMSNorm(WIDTH, 1e-6), nn.RMSNorm(WIDTH, 1e-6)
        self.sa_scale = _Scale() if scaled else nn.Identity()
        self.mlp_scale = _Scale() if scaled else nn.Identity()
        self.w = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.pos_embeddings(self.q_proj(x).view(b, t, HEADS, self.size))
        k = self.pos_embeddings(self.k_proj(x).view(b, t, HEADS, self.size))
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        v = self.v_proj(x).view(b, t, HEADS, self.size).transpose(1, 2)
        mask = torch.tril(torch.ones(t, t, dtype=torch.bool))
        out = f.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.output_proj(out.transpose(1, 2).reshape(b, t, -1))

    def feed(self, x: Tensor) -> Tensor:
        gate, up = self.w(x).chunk(2, dim=-1)
        return self.down(f.gelu(gate, approximate="tanh") * up)

    def forward(self, x: Tensor) -> Tensor:
        h = self.sa_scale(self.attend(self.sa_norm(x))) + x
        return h + self.mlp_scale(self.feed(self.mlp_norm(h)))


class TuneGPT(nn.Module):
    """torchtune style; a tied head and a scaled table as in Gemma."""

    def __init__(self, layers: int = 2, normed: bool = True, scaled: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.tok_embeddings.weight, std=0.02)
        self.layers = nn.ModuleList(_TuneLayer(normed, scaled) for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH, 1e-6)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens) * math.sqrt(WIDTH)
        for layer in self.layers:
            h = layer(h)
        return f.linear(self.norm(h), self.tok_embeddings.weight).float()


# --- tensors without modules ----------------------------------------------------------------------


class BareGPT(nn.Module):
    """Parameters in a list, einsum throughout, norms as functions, no layer a module."""

    def __init__(self, layers: int = 2, post: bool = False) -> None:
        super().__init__()
        self.post = post
        size = WIDTH // HEADS

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape) / math.sqrt(WIDTH))

        self.table = made(VOCAB, WIDTH)
        self.params = nn.ModuleList(
            nn.ParameterDict(
                {
                    "qkv": made(3, HEADS, WIDTH, size),
                    "mix": made(HEADS, size, WIDTH),
                    "up": made(WIDTH, 2 * WIDTH),
                    "down": made(2 * WIDTH, WIDTH),
                }
            )
            for _ in range(layers)
        )

    def _norm(self, x: Tensor) -> Tensor:
        return f.layer_norm(x, (WIDTH,))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids]
        t = ids.shape[1]
        hidden = torch.full((t, t), float("-inf")).triu(1)
        for p in self.params:
            y = x if self.post else self._norm(x)
            q, k, v = torch.einsum("btd,nhde->nbhte", y, p["qkv"])
            weights = (torch.einsum("bhte,bhse->bhts", q, k) / q.shape[-1] ** 0.5 + hidden).softmax(
                -1
            )
            mixed = torch.einsum("bhts,bhse->bthe", weights, v)
            x = x + torch.einsum("bthe,hed->btd", mixed, p["mix"])
            x = self._norm(x) if self.post else x
            y = x if self.post else self._norm(x)
            x = x + f.silu(y @ p["up"]) @ p["down"]
            x = self._norm(x) if self.post else x
        return x @ self.table.T


# --- timm: pictures, a class token, layer scale, a map of patches by convolution ------------------


class _Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.img_size = (32, 32)
        self.proj = nn.Conv2d(3, WIDTH, kernel_size=8, stride=8)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class _ViTBlock(nn.Module):
    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.ls1 = self.ls2 = None
        if scale is not None:
            self.ls1 = nn.Parameter(torch.full((WIDTH,), scale))
            self.ls2 = nn.Parameter(torch.full((WIDTH,), scale))

    def attend(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q = q * (c // HEADS) ** -0.5
        weights = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(self.norm1(x))
        x = x + (y if self.ls1 is None else y * self.ls1)
        y = self.fc2(f.gelu(self.fc1(self.norm2(x))))
        return x + (y if self.ls2 is None else y.mul_(self.ls2))


class PictureModel(nn.Module):
    """timm style."""

    def __init__(self, layers: int = 2, scale: float | None = None) -> None:
        super().__init__()
        self.patch_embed = _Patches()
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, WIDTH))
        self.pos_drop = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(_ViTBlock(scale) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.norm(self.blocks(self.pos_drop(x + self.pos_embed)))
        logits = self.head(x[:, 0])
        return logits if targets is None else (logits, f.cross_entropy(logits, targets))


# --- torch's own layers, and einsum in layers of parameters --------------------------------------


class TorchLM(nn.Module):
    """nn.TransformerEncoderLayer between tables and a head of its own."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", norm_first=True, batch_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.fc(self.norm(x))


class EinsumLayer(nn.Module):
    """Parameters of its own, one per head and matrix."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.k, self.v = (
            nn.Parameter(torch.randn(HEADS, WIDTH, size) * 0.02) for _ in range(3)
        )
        self.o = nn.Parameter(torch.randn(HEADS, size, WIDTH) * 0.02 / math.sqrt(2 * layers))
        self.up = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * 0.02)
        self.down = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) * 0.02 / math.sqrt(2 * layers))
        self.g1, self.g2 = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))
        self.eps = 1e-5

    def norm1(self, x: Tensor) -> Tensor:
        return f.layer_norm(x, (WIDTH,), self.g1, eps=self.eps)

    def norm2(self, x: Tensor) -> Tensor:
        return f.layer_norm(x, (WIDTH,), self.g2, eps=self.eps)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hde->bhte", x, w) for w in (self.q, self.k, self.v))
        mixed = f.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.einsum("bhte,hed->btd", mixed, self.o)

    def feed(self, x: Tensor) -> Tensor:
        return f.gelu(x @ self.up) @ self.down

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.feed(self.norm2(x))


class EinsumLM(nn.Module):
    """Tables and a tied head around them."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.02)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(EinsumLayer(layers) for _ in range(layers))
        self.last = nn.Parameter(torch.ones(WIDTH))

    def final(self, x: Tensor) -> Tensor:
        return f.layer_norm(x, (WIDTH,), self.last)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.table[tokens] + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.final(x) @ self.table.T
        if targets is None:
            return logits
        return logits, f.cross_entropy(logits.flatten(0, 1), targets.flatten())


STYLES: dict[str, Callable[..., nn.Module]] = {
    "minGPT": HandGPT,
    "lecture": LectureGPT,
    "lit-gpt": GroupedGPT,
    "lit-gpt, parallel": functools.partial(GroupedGPT, parallel=True, share=0.25, groups=1),
    "torchtitan": TitanGPT,
    "torchtune": TuneGPT,
    "torchtune, scaled": functools.partial(TuneGPT, normed=False, scaled=True),
    "timm": PictureModel,
    "timm, scaled": functools.partial(PictureModel, scale=0.1),
    "bare": BareGPT,
    "bare, post": functools.partial(BareGPT, post=True),
}
