"""Spellings of public libraries, predicted by operations, against fresh draws."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import open_modules
import pytest
import torch
from test_operations import IDS, departures, measured
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import moments
from moments.torch import predict

WIDTH = 64


class Part(nn.Module):
    """A table of tokens, something, a norm and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(open_modules.WORDS, WIDTH)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.norm(self.inner(self.table(ids))))

    def inner(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class AxialPositions(Part):
    """Positions are sums of two parameters; a third is a table times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = (nn.Parameter(torch.randn(*n, WIDTH)) for n in ((8, 1), (1, 8)))
        self.places = nn.Embedding(40, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        both = self.rows.expand(8, 8, WIDTH) - self.columns.expand(8, 8, WIDTH)
        there = self.places(torch.arange(x.shape[1]))
        return x + both.reshape(64, WIDTH)[: x.shape[1]] + 0.5 * there


class ScaledSinusoids(Part):
    """A fixed table times a parameter of one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.7]))
        angles = torch.arange(64)[:, None] / 10000 ** (torch.arange(WIDTH // 2) / (WIDTH // 2))
        self.register_buffer("sines", torch.cat((angles.sin(), angles.cos()), 1))

    def inner(self, x: Tensor) -> Tensor:
        return x + self.sines[: x.shape[1]] * self.scale


class LearnedKeys(Part):
    """Attention with keys and values that are parameters of every head."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.keys, self.values = (nn.Parameter(torch.randn(4, 3, 16)) for _ in range(2))

    def inner(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        k, v = (
            torch.cat((p.expand(len(x), -1, -1, -1), y), 2)
            for p, y in ((self.keys, k), (self.values, v))
        )
        mixed = (q @ k.mT / 4).softmax(-1) @ v
        return x + mixed.transpose(1, 2).flatten(2)


class SlowTable(Part):
    """A tenth of the gradient flows back."""

    def inner(self, x: Tensor) -> Tensor:
        return 0.1 * x + 0.9 * x.detach()


class VectorGate(Part):
    """A vector of weights gives every token's share of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.share = nn.Parameter(torch.randn(WIDTH) / WIDTH**0.5)

    def inner(self, x: Tensor) -> Tensor:
        share = torch.sigmoid(x @ self.share)[..., None]
        return share * self.one(x) + (1 - share) * self.other(x)


class OuterProducts(Part):
    """Products of every two of a few features."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.back = nn.Linear(WIDTH, 16), nn.Linear(256, WIDTH)

    def inner(self, x: Tensor) -> Tensor:
        y = self.few(x)
        return x + self.back((y[..., :, None] * y[..., None, :]).flatten(-2))


class ChosenRows(Part):
    """Rows of a table that every token chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.score = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.rows(self.score(x).topk(4).indices).sum(-2)


class KeysTimesValues(Part):
    """Attention without a softmax: all of one tensor, whose Gram matrix varies between draws."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.fused = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.after = nn.Linear(WIDTH, WIDTH, bias=False)

    def inner(self, x: Tensor) -> Tensor:
        q, k, v = functional.silu(self.fused(self.before(x))).chunk(3, -1)
        return x + self.after(q @ (k.mT @ v)) / 4


STYLES = (
    KeysTimesValues,
    AxialPositions,
    ScaledSinusoids,
    LearnedKeys,
    SlowTable,
    VectorGate,
    OuterProducts,
    ChosenRows,
)


@pytest.mark.parametrize("make", STYLES)
def test_styles(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    result = predict(make(), IDS)
    assert not result.unread
    squares, gradients, weights = measured(make, IDS, draws=60)
    rows = {row.module: row for row in result.outputs}
    forward = {path: row.variance + row.mean**2 for path, row in rows.items()}
    assert not departures(forward, squares, 0.06)
    back = {path: row.grad_variance for path, row in rows.items() if row.grad_variance}
    assert not departures(back, gradients, 0.12)
    seen = {name: w for name, w in weights.items() if w.mean() > 1e-9}
    assert result.weights.keys() >= seen.keys()
    assert not departures({n: result.weights[n] for n in seen}, weights, 0.15)


def correlation(make: Callable[[], Any], draws: int = 60) -> float:
    """Of two tokens before the last matrix."""
    gram = torch.zeros(IDS.shape[1], IDS.shape[1])
    for draw in range(draws):
        torch.manual_seed(draw)
        module = make()
        with torch.no_grad():
            x = module.norm(module.inner(module.table(IDS)))[0]
        gram += x @ x.T
    n = len(gram)
    return float((gram.sum() - gram.trace()) / (n - 1) / gram.trace())


@pytest.mark.parametrize("make", [AxialPositions, ScaledSinusoids])
def test_tokens_that_share_parameters_are_alike(make: Any) -> None:
    torch.manual_seed(0)
    rows = {row.module: row for row in predict(make(), IDS).outputs}
    expected = correlation(make)
    assert expected > 0.05
    assert rows["norm"].correlation == pytest.approx(expected, abs=0.03)


class ManyKernels(Part):
    """Attention that chooses its kernel itself, behind a learned number."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.number = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.tensor(0.8))

    def inner(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(self.number * x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            mixed = functional.scaled_dot_product_attention(q, k, v)
        return x + mixed.transpose(1, 2).flatten(2)


def test_attention_that_chooses_its_kernel() -> None:
    torch.manual_seed(0)
    result = predict(ManyKernels(), IDS)
    assert not result.unread
    assert result.weights["number"] > 0


class Written(nn.Module):
    """Layers that are no modules, with sums or without."""

    def __init__(self, adds: bool, layers: int = 3) -> None:
        super().__init__()
        self.adds, self.table = adds, nn.Embedding(open_modules.WORDS, WIDTH)
        size = WIDTH, 4, 16
        self.layers = nn.ModuleList(
            nn.ParameterDict({n: nn.Parameter(torch.randn(size) / 8) for n in "qkvo"})
            for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, open_modules.WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            y = functional.layer_norm(x, (WIDTH,))
            q, k, v = (torch.einsum("btd,dhk->bthk", y, layer[n]) for n in "qkv")
            logits = torch.einsum("bthk,bshk->bhts", q, k) / 4
            later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            weights = logits.masked_fill(later, -torch.inf).softmax(-1)
            mixed = torch.einsum("bhts,bshk->bthk", weights, v)
            y = torch.einsum("bthk,dhk->btd", mixed, layer["o"])
            x = x + y if self.adds else y
        return self.head(functional.layer_norm(x, (WIDTH,)))


@pytest.mark.parametrize("adds", [True, False])
def test_sums_that_every_layer_lacks(adds: bool) -> None:
    torch.manual_seed(0)
    kinds = {finding.kind for finding in moments.check(Written(adds), batch=IDS).findings}
    assert ("no residual path" in kinds) is not adds


def test_pictures_have_no_tokens() -> None:
    torch.manual_seed(0)
    make = functools.partial(nn.Conv2d, 3, 8, 4, 4)
    module = nn.Sequential(make(), nn.Flatten(2), nn.GELU(), nn.Linear(4, 5))
    result = predict(module, torch.randn(1, 3, 8, 8))
    assert result.tokens == 0
    assert "tokens" not in str(result).splitlines()[0]
