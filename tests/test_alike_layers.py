"""Faults of one layer in modules that no Transformer describes, and right modules without any."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import open_modules
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import moments

IDS = torch.randint(0, open_modules.WORDS, (1, 12), generator=torch.Generator().manual_seed(3))


class Layer(nn.Module):
    """Attention without a feed-forward block, gated by what it reads."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, width)
        self.mixer = open_modules.Attention(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + torch.sigmoid(self.gate(y)) * self.mixer(y)


class Gated(nn.Module):
    def __init__(self, width: int = 48, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(open_modules.WORDS, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, open_modules.WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


def forward_as(layer: nn.Module, new: Callable[..., Tensor]) -> None:
    layer.forward = functools.partial(new, layer.forward)  # type: ignore[method-assign]


@torch.no_grad()
def values(module: Any) -> None:
    module.layers[1].mixer.fused.weight[96:] *= 3


@torch.no_grad()
def nothing(module: Any) -> None:
    module.layers[2].mixer.out.weight.zero_()


@torch.no_grad()
def gain(module: Any) -> None:
    module.layers[1].norm.weight.zero_()


def shared(module: Any) -> None:
    module.layers[2].mixer.out.weight = module.layers[1].mixer.out.weight


def copied(module: Any) -> None:
    module.layers[2].load_state_dict(module.layers[1].state_dict())


def norm_of_the_stream(module: Any) -> None:
    forward_as(module.layers[1], lambda old, x: old(functional.layer_norm(x, x.shape[-1:])))


def norm_behind(module: Any) -> None:
    forward_as(module.layers[2], lambda old, x: functional.rms_norm(old(x), x.shape[-1:]))


def added_twice(module: Any) -> None:
    for layer in module.layers:
        forward_as(layer, lambda old, x: x + old(x))


def never_run(module: Any) -> None:
    module.spare = nn.Linear(48, 48)


def dropped(module: Any) -> None:
    forward_as(module.layers[1], lambda old, x: functional.dropout(old(x), 0.1))


def attended(of: Callable[..., Tensor], *numbers: int) -> Callable[[Any], None]:
    """Attention of some layers by another function of queries, keys and values."""

    def plant(module: Any) -> None:
        for number in numbers:
            forward_as(module.layers[number].mixer, functools.partial(_with_attention, of))

    return plant


def _with_attention(of: Callable[..., Tensor], old: Callable[..., Tensor], *x: Tensor) -> Tensor:
    plain = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = of  # type: ignore[assignment]
    try:
        return old(*x)
    finally:
        functional.scaled_dot_product_attention = plain


def open_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    later = torch.full((q.shape[-2], q.shape[-2]), -torch.inf).triu(1)
    return (q @ k.mT / q.shape[-1] ** 0.5 + later).softmax(-2) @ v


FAULTS: dict[str, tuple[Callable[[Any], None], str, tuple[int, ...]]] = {
    "values three times as large": (values, "odd layer", (2,)),
    "a matrix of zeros": (nothing, "odd layer", (3,)),
    "a gain of zeros": (gain, "odd layer", (2,)),
    "one matrix in two layers": (shared, "shared matrix", (2, 3)),
    "a copied layer": (copied, "copied layers", (2, 3)),
    "a norm of the stream": (norm_of_the_stream, "norm placement", (2,)),
    "a norm behind the sum": (norm_behind, "norm placement", (3,)),
    "added twice": (added_twice, "variance explodes", ()),
    "never run": (never_run, "never used", ()),
    "dropout": (dropped, "dropout left on", ()),
    "one layer without a mask": (attended(open_attention, 1), "tokens see later ones", (2,)),
    "no mask": (attended(open_attention, 0, 1, 2, 3), "tokens see later ones", ()),
    "softmax over queries": (attended(over_queries, 2), "softmax over the wrong axis", ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    plant, kind, layers = FAULTS[fault]
    torch.manual_seed(0)
    module = Gated()
    plant(module)
    report = moments.check(module, IDS)
    assert "operation by operation" in report.read
    named = [finding for finding in report.findings if finding.kind == kind]
    assert named, str(report)
    assert named[0].layers == layers


def test_a_norm_and_the_head_behind_it_are_no_layers_of_one_stack() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(open_modules.WORDS, 48), nn.Linear(48, open_modules.WORDS)
    module = nn.Sequential(table, Layer(), Layer(), nn.LayerNorm(48), head)
    assert moments.check(module, IDS).healthy


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Gated", "masked", "Hourglass", "shared", "first"])
def test_right_modules_have_no_finding(kind: str) -> None:
    torch.manual_seed(1)
    module: Any = open_modules.Hourglass(layers=6) if kind == "Hourglass" else Gated()
    if kind == "masked":  # a model of hidden tokens says so
        module = type("MaskedGated", (Gated,), {})()
        attended(open_attention, 0, 1, 2, 3)(module)
    if kind == "shared":  # one matrix of all layers
        for layer in module.layers:
            layer.gate = module.layers[0].gate
    if kind == "first":  # the first layer of a stack may be another
        forward_as(module.layers[0], lambda old, x: old(x) * 1.5)
    report = moments.check(module, IDS)
    assert "operation by operation" in report.read
    assert report.healthy, str(report)
