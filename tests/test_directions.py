"""What a gradient knows of its signal: norms that persist, directions that are lost.

Blocks below a norm against torch's own gradients over draws of all weights, at widths where terms
of order 1/width show: without these terms the numbers are 1 to 10 percent off. The draws are stored
by `benchmarks/small_draws.py`, and a few are drawn here again.
"""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from moments.engine.bottom_to_top import BottomToTop
from moments.engine.composition import Chain, Component, Parallel, Residual, forward
from moments.engine.state import Gradient, Kernel
from moments.formulas.activation import RELU, SILU
from moments.formulas.linear import LINEAR
from moments.formulas.normalization import RMSNORM
from moments.layers.attention.self_attention import SelfAttention
from moments.layers.elementary import Activation, Linear
from moments.layers.gated import GatedLinear
from moments.layers.normalization import FiniteNormalization
from moments.prediction.stack import gaussian

pytest.importorskip("torch")

WIDTH, HIDDEN, TOKENS, CORRELATION = 48, 64, 3, 0.4


@pytest.fixture(scope="module")
def draws() -> Any:
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    return importlib.import_module("small_draws")


def norm(label: str = "norm", groups: int = 1) -> FiniteNormalization:
    return FiniteNormalization(RMSNORM, label, centres=False, groups=groups)


def linear(fan_in: int, fan_out: int, gain: float = 1.0) -> Linear:
    parameters = {"fan_in": fan_in, "fan_out": fan_out, "weight_variance": gain / fan_in}
    return Linear(LINEAR, "refined", "matrix", parameters, fan_out)


def sent_back(*parts: Component, groups: int = 1) -> Kernel:
    """Second moments of the gradient at the input, of a generic one above a last norm."""
    signal = gaussian(Kernel(1.0, CORRELATION), TOKENS, WIDTH, True)
    _, record = forward(Chain((*parts, norm("final", groups))), signal)
    return record.backward(Gradient(Kernel(1.0, 0.3), TOKENS)).grad_in.kernel


def feed_forward() -> tuple[Component, ...]:
    activation = Activation(RELU, "refined", "activation")
    return linear(WIDTH, HIDDEN, 2.0), activation, linear(HIDDEN, WIDTH)


def attention() -> tuple[Component, ...]:
    heads = SelfAttention("heads", WIDTH, 1, WIDTH, 1e-12, 1e-12, 2.0 / WIDTH, 0.0)
    return heads, linear(WIDTH, WIDTH)


def three(*parts: Component, groups: int = 1) -> Kernel:
    """Of three Pre-LN blocks."""
    branch = Residual(Chain((norm(groups=groups), *parts)))
    return sent_back(branch, branch, branch, groups=groups)


def post_norm() -> Kernel:
    """Each block normalised behind its sum, between two norms."""
    layer = Residual(Chain(feed_forward())), norm()
    return sent_back(norm("first"), *layer, *layer, Residual(Chain(feed_forward())))


def below_another() -> Kernel:
    """Hybrid: what the gradient lacks along the upper sum, it lacks in part along the lower."""
    branch = Residual(Chain(feed_forward()))
    return sent_back(branch, branch, Residual(Chain((norm(), *feed_forward()))))


def bottom_to_top() -> Kernel:
    sums = BottomToTop(Residual(Chain(attention())), norm(), Residual(Chain(feed_forward())))
    return sent_back(norm("first"), sums, norm(), sums, norm(), sums)


PREDICTED = {
    "feed-forward": lambda: three(*feed_forward()),
    "gated": lambda: three(
        GatedLinear("activation", SILU, WIDTH, HIDDEN, 1 / WIDTH, 3 / WIDTH), linear(HIDDEN, WIDTH)
    ),
    "attention": lambda: three(*attention()),
    "parallel": lambda: three(Parallel((Chain(feed_forward()), Chain(attention())))),
    "norm behind the branch": lambda: three(*feed_forward(), norm("post_norm")),
    "post-norm": post_norm,
    # Six features each: 1/|x|^2 of a group has a variance, and is far from its expansion.
    "norms of groups": lambda: three(*feed_forward(), groups=8),
    "below another branch": below_another,
    "bottom-to-top": bottom_to_top,
}


@pytest.mark.parametrize("name", PREDICTED)
def test_gradients_are_those_of_draws(name: str, draws: Any) -> None:
    """Products between tokens are left 2.7 % +- .4 % too large behind ReLU units at this width."""
    predicted = PREDICTED[name]()
    found = draws.stored()[f"block/{name}"]["found"]
    for value, (mean, error), accepted in (
        (predicted.diagonal, found["square"], 0.015 if name == "norms of groups" else 0.01),
        (predicted.off_diagonal, found["product"], 0.02),
    ):
        assert value == pytest.approx(mean, abs=3 * error + accepted * mean), (found, predicted)


@pytest.mark.parametrize("name", PREDICTED)
def test_drawing_again_agrees(name: str, draws: Any) -> None:
    """Blocks as they are written today, by other random numbers, against what is stored."""
    assert set(draws.BLOCKS) == set(PREDICTED)
    kept = draws.stored()[f"block/{name}"]
    assert kept["draws"] >= 12_000
    assert kept["seed"] != 7
    for quantity, (mean, error) in draws.block_draws(name, 500, 7).items():
        first, small = kept["found"][quantity]
        assert 0 < abs(mean - first) < 4 * math.hypot(error, small), quantity
