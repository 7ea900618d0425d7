"""A layer's program against the plain passes that it was recorded from."""

from __future__ import annotations

import dataclasses
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moments
from moments.engine.program import Library, Mixed, Passed
from moments.engine.state import Gradient, Kernel
from moments.formulas.recording import RECORDED, Recorded, Tape, Unrecordable, whole
from moments.prediction.stack import Inputs, Stack
from moments.transfer.architecture import declare

SHAPE = {"layers": 6, "d_model": 96, "heads": 4, "seq_len": 24, "dropout": 0.1}
LIBRARY = Library()


def plain(**fields) -> moments.Transformer:
    return moments.Transformer(**SHAPE | fields)


MODELS = {
    "pre": plain(),
    "post, gelu": plain(norm="post", activation="gelu"),
    "gated, rmsnorm": plain(activation="swiglu", normalization="rmsnorm"),
    "no dropout": plain(dropout=0.0),
    "sandwich": plain(norm="sandwich"),
    "b2t": plain(norm="b2t"),
    "parallel": plain(parallel=True),
    "grouped heads": plain(kv_heads=2),
    "layernorm scaling": plain(layernorm_scaling=True),
    "biases": plain(biases=moments.Biases(value=0.1, ffn_in=0.2)),
    "scales": plain(skip_scale=0.9, branch_scale=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
    "mix": plain().with_scheme("mix-ln"),
    "weights by layer": plain(norm="post").with_scheme("dslm", input_correlation=0.3),
}


def replayed(model: moments.Transformer, variance: float, correlation: float) -> Passed:
    stack = Stack(model, "refined", Inputs(variance, correlation), False)
    layers = [layer.body for layer in declare(model, "refined", None, 1).parts]
    last = Gradient(Kernel(1.0, 0.0), model.seq_len)
    return LIBRARY.passed(layers, stack.enter(), lambda signal: last)


def differences(model: moments.Transformer, variance: float, correlation: float) -> float:
    """The largest between a replay and `predict`, relative and of correlations absolute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        p = moments.predict(model, variance=variance, correlation=correlation, tokens=False)
    try:
        found = replayed(model, variance, correlation)
    except Unrecordable:
        assert p.warnings
        return 0.0
    own, pairs = np.array([numbers[:2] for numbers in found.signals]).T
    back, sent = np.array([numbers[:2] for numbers in found.gradients]).T
    return max(
        np.abs(own / p.variance - 1).max(),
        np.abs(pairs / own - p.correlation).max(),
        np.abs(back / p.grad_variance - 1).max(),
        np.abs(sent / back - p.grad_correlation).max(),
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_replay_is_the_plain_pass(name):
    for variance, correlation in ((1.0, 0.3), (1.5, 0.05), (1.0, 0.3)):
        assert differences(MODELS[name], variance, correlation) < 1e-11


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["pre", "post, gelu", "gated, rmsnorm", "no dropout"]),
    st.floats(0.01, 50.0),
    st.floats(0.0, 0.999),
)
def test_branches_on_values_are_guarded(name, variance, correlation):
    """Whatever branch the numbers take, the replay takes it or the layer is recorded anew."""
    assert differences(MODELS[name], variance, correlation) < 1e-11


def test_layers_of_one_shape_share_a_program():
    library = Library()
    model = plain(layers=40)
    stack = Stack(model, "refined", Inputs(1.0, 0.2), False)
    layers = [layer.body for layer in declare(model, "refined", None, 1).parts]
    assert len({id(layer) for layer in layers}) == 1
    last = Gradient(Kernel(1.0, 0.0), model.seq_len)
    library.passed(layers, stack.enter(), lambda signal: last)
    assert sum(map(len, library._programs.values())) == 1


@pytest.mark.parametrize("name", ["pre", "post, gelu", "gated, rmsnorm"])
def test_many_configurations_are_each_of_them(name):
    model, correlation = MODELS[name], np.linspace(0.05, 0.95, 7)
    stack = Stack(model, "refined", Inputs(1.0, correlation), False, (7,))
    layers = [layer.body for layer in declare(model, "refined", None, 1).parts]
    last = Gradient(Kernel(1.0, 0.0), model.seq_len)
    found = LIBRARY.passed(layers, stack.enter(), lambda signal: last)
    for k, r in enumerate(correlation):
        p = moments.predict(model, correlation=float(r), tokens=False)
        own = [numbers[0][k] for numbers in found.signals[1:]]
        back = [numbers[0][k] for numbers in found.gradients[:-1]]
        assert own == pytest.approx(p.variance[1:], rel=1e-10)
        assert back == pytest.approx(p.grad_variance[:-1], rel=1e-9)


def test_configurations_of_several_branches_are_told():
    model = plain(norm="none")
    scale = np.array([0.0, 0.5])
    with pytest.raises(Mixed) as told:
        replayed_with(model, scale)
    assert told.value.first.shape == (2,)


def replayed_with(model, branch_scale):
    """With a branch scale for every configuration."""
    stack = Stack(model, "refined", Inputs(1.0, np.array([0.1, 1.0])), False, (2,))
    body = declare(model, "refined", None, 1).parts[0].body
    first = dataclasses.replace(body.parts[0], branch_scale=branch_scale)
    changed = dataclasses.replace(body, parts=(first, *body.parts[1:]))
    last = Gradient(Kernel(1.0, 0.0), model.seq_len)
    return Library().passed([changed], stack.enter(), lambda signal: last)


def test_what_has_something_to_say_is_not_replayed():
    """A note holds the numbers it is about."""
    model = plain(norm="none", layers=20, activation="gelu", skip_scale=2.0)
    with pytest.warns(moments.ValidityWarning):
        moments.predict(model, variance=1e4, correlation=0.1, tokens=False)
    with pytest.raises(Unrecordable):
        replayed(model, 1e4, 0.1)


# --- recorded numbers -----------------------------------------------------------------------------


def test_recorded_numbers_are_numbers():
    tape = Tape()
    x, y = tape.input(0.3), tape.input(-2.0)
    found = RECORDED.sqrt(x) * 2 + abs(y) / 3 - x**2 + np.maximum(x, y) + np.where(x > y, 1.0, x)
    assert found.value == math.sqrt(0.3) * 2 + 2.0 / 3 - 0.3**2 + 0.3 + 1.0
    before = len(tape.operations)
    assert (x * y).value == (x * y).value
    assert len(tape.operations) == before + 1


def test_a_branch_is_a_guard():
    tape = Tape()
    x = tape.input(0.3)
    assert min(x, 1.0) is x
    assert [guard.outcome for guard in tape.guards] == [False]


@pytest.mark.parametrize("lose", [float, math.sqrt, hash, "{:.3g}".format, np.asarray, int])
def test_no_recorded_number_is_lost(lose):
    with pytest.raises(Unrecordable):
        lose(Tape().input(0.3))


def test_what_is_whole_is_one_operation():
    tape = Tape()

    @whole
    def both(x: float, count: int) -> tuple[float, float]:
        return math.gamma(x), float(count)

    first, second = both(tape.input(4.0), 3)
    assert isinstance(first, Recorded)
    assert (first.value, second.value) == (6.0, 3.0)
    assert [operation.name for operation in tape.operations] == ["input", "whole", "item", "item"]
