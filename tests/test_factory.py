"""Faults that need no theory: memory nothing wrote, draws cut nowhere, two initialisers."""

from __future__ import annotations

import math
from typing import Any

import pytest

import moments

torch = pytest.importorskip("torch")

import small_modules  # noqa: E402
from torch import nn  # noqa: E402


def encoder(**changes: Any) -> Any:
    return small_modules.encoder(2, 48, 96, **changes)


def kinds(report: moments.Report) -> set[str]:
    return {found.kind for found in report.findings}


# --- memory that nothing wrote --------------------------------------------------------------------


def materialised() -> Any:
    """A module from the meta device whose second layer's last matrix is forgotten."""
    with torch.device("meta"):
        module = encoder()
    module.to_empty(device="cpu")
    for name, parameter in module.named_parameters():
        if name != "layers.1.linear2.weight":
            nn.init.ones_(parameter) if parameter.ndim < 2 else nn.init.normal_(parameter, std=0.1)
    return module


def test_a_tensor_that_nothing_wrote_is_named() -> None:
    """Of a factory for certain, whatever the memory held before."""
    before = torch.are_deterministic_algorithms_enabled()
    report = moments.check(materialised)
    (found,) = report.findings
    assert found.where == ("layers.1.linear2.weight",)
    assert "never written" in found.reason
    assert not report.healthy
    assert torch.are_deterministic_algorithms_enabled() is before


def test_a_module_on_the_meta_device_has_no_storage() -> None:
    with torch.device("meta"):
        module = encoder()
    assert kinds(moments.check(module)) == {"no storage"}


def test_stale_numbers_are_told_from_drawn_ones() -> None:
    module = encoder()
    with torch.no_grad():
        module.layers[0].linear1.weight[::4] = 1e-39
    (found,) = moments.check(module).findings
    assert (found.kind, found.where) == ("never written", ("layers.0.linear1.weight",))
    assert found.measured == pytest.approx(0.25)


# --- truncation -----------------------------------------------------------------------------------


def truncated(**bounds: float) -> Any:
    def build() -> Any:
        module = encoder()
        for parameter in module.parameters():
            if parameter.ndim == 2:
                nn.init.trunc_normal_(parameter, std=0.02, **bounds)
        return module

    return build


def test_truncation_that_never_truncates_is_named() -> None:
    """torch's bounds are numbers, -2 and 2, not standard deviations."""
    report = moments.check(truncated())
    (found,) = [one for one in report.findings if one.kind == "nothing truncated"]
    assert found.measured == pytest.approx(100)
    assert found.where[0].startswith("test_factory.py:")
    assert "a=-0.04, b=0.04" in found.mend
    assert "nothing truncated" not in kinds(moments.check(truncated(a=-0.04, b=0.04)))


# --- two initialisers -----------------------------------------------------------------------------


def drawn(seed: int, draw: Any = None) -> Any:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64))
    if draw is not None:
        draw(module[2].weight)
    return module


def test_two_draws_of_one_initialiser_agree() -> None:
    for seed in range(20):
        report = moments.torch.same_initialization(drawn(seed), drawn(seed + 100))
        assert report.passed, str(report)
    assert moments.torch.same_initialization(drawn(1), drawn(1).state_dict()).passed


BOUND = 128**-0.5
SLIPS = {
    "variance": (lambda w: nn.init.uniform_(w, -1.1 * BOUND, 1.1 * BOUND), "variance"),
    "shape": (lambda w: nn.init.normal_(w, std=BOUND / math.sqrt(3)), "distributions differ"),
    "constant": (nn.init.zeros_, "constant entries differ"),
}


@pytest.mark.parametrize("name", SLIPS)
def test_an_initialiser_that_differs_is_named(name: str) -> None:
    draw, words = SLIPS[name]
    report = moments.torch.same_initialization(drawn(1, draw), drawn(2))
    (found,) = report.findings
    assert found.where == ("2.weight",)
    assert words in found.reason
    assert not report.to_frame().iloc[0]["passed"]


def test_what_has_no_counterpart_is_named() -> None:
    other = drawn(2)
    other.add_module("3", nn.Linear(2, 2))
    other[0] = nn.Linear(64, 127)
    report = moments.torch.same_initialization(drawn(1), other)
    assert kinds(report) == {"no counterpart", "other shape"}
    with pytest.raises(moments.DomainError, match="ours = 'int'"):
        moments.torch.same_initialization(3, other)


# --- an activation that no law is known of --------------------------------------------------------


def test_an_unknown_activation_is_refused_with_what_to_call() -> None:
    class Odd(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.sin(x) * x.abs()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = encoder().layers
            for layer in self.layers:
                layer.activation = Odd()

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.raises(moments.MomentsError, match=r"moments\.register_activation"):
        moments.check(Net(), torch.randn(2, 8, 48))
    with pytest.raises(moments.DomainError, match=r"moments\.register_activation"):
        moments.from_huggingface({"model_type": "gpt2", "activation_function": "odd"})
