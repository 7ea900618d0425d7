"""A layer's program against the plain passes that it was recorded from."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moments
from moments.engine.program import Library, Mixed, Passage, Replayed
from moments.engine.state import Gradient, Kernel
from moments.formulas.algebra import RECORDED, Recorded, Tape, Unrecordable, whole
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


def passage(model: moments.Transformer, variance, correlation, library: Library = LIBRARY):
    """Numbers of signals and of gradients, in the order of the layers."""
    shape = np.shape(correlation)
    stack = Stack(model, "refined", Inputs(variance, correlation), False, shape)
    layers = [layer.body for layer in declare(model, "refined", None, 1).children]
    found = Passage(library, stack.enter())
    found.up(library.flat(layers))
    gradients = found.down(Gradient(Kernel(1.0, 0.0), model.seq_len))
    return [one for _, one in found.signals], [one for _, one in gradients]


@contextlib.contextmanager
def plain_passes():
    """Predictions without a replay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moments.prediction.stack.replayed", lambda *_: None)
        yield


def differences(model: moments.Transformer, variance: float, correlation: float) -> float:
    """The largest between a replay and `predict`, relative and of correlations absolute."""
    with warnings.catch_warnings(), plain_passes():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        p = moments.predict(model, variance=variance, correlation=correlation, tokens=False)
    try:
        signals, gradients = passage(model, variance, correlation)
    except Unrecordable:
        assert p.warnings
        return 0.0
    own, pairs = np.array([numbers[:2] for numbers in signals]).T
    back, sent = np.array([numbers[:2] for numbers in gradients]).T
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
    passage(plain(layers=40), 1.0, 0.2, library)
    assert sum(map(len, library._programs.values())) == 1


@pytest.mark.parametrize("name", ["pre", "post, gelu", "gated, rmsnorm"])
def test_many_configurations_are_each_of_them(name):
    model, correlation = MODELS[name], np.linspace(0.05, 0.95, 7)
    signals, gradients = passage(model, 1.0, correlation)
    for k, r in enumerate(correlation):
        with plain_passes():
            p = moments.predict(model, correlation=float(r), tokens=False)
        own = [numbers[0][k] for numbers in signals[1:]]
        back = [numbers[0][k] for numbers in gradients[:-1]]
        assert own == pytest.approx(p.variance[1:], rel=1e-10)
        assert back == pytest.approx(p.grad_variance[:-1], rel=1e-9)


def test_configurations_of_several_branches_are_told():
    model = plain(activation="gelu")
    stack = Stack(model, "refined", Inputs(1.0, np.array([0.1, 0.9])), False, (2,))
    body = declare(model, "refined", None, 1).children[0].body
    first = dataclasses.replace(body.children[0], branch_scale=np.array([0.0, 0.5]))
    changed = body.with_children((first, *body.children[1:]))
    library = Library()
    way = Passage(library, stack.enter())
    way.up(library.flat([changed]))
    with pytest.raises(Mixed) as told:
        way.down(Gradient(Kernel(1.0, 0.0), 24))
    assert told.value.first.shape == (2,)


@pytest.mark.parametrize("correlation", [0.3, np.array([0.3, 0.5])])
def test_a_prediction_of_many_layers_is_that_of_the_plain_passes(correlation):
    model = plain(layers=64, norm="post", activation="gelu", d_model=192)
    found = moments.predict(model, correlation=correlation, tokens=False)
    assert isinstance(found.trace.stack, Replayed)
    with plain_passes():
        expected = moments.predict(model, correlation=correlation, tokens=False)
    for name in ("variance", "correlation", "grad_variance", "grad_variance_band"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9)
    one, other = (p.to_frame().select_dtypes("number") for p in (found, expected))
    assert one.to_numpy() == pytest.approx(other.to_numpy(), rel=1e-9)
    if not np.ndim(correlation):
        one, other = (p.weight_gradients()["squared_norm"] for p in (found, expected))
        assert one.to_numpy() == pytest.approx(other.to_numpy(), rel=1e-9)


def test_what_has_something_to_say_is_not_replayed():
    """A note holds the numbers it is about."""
    model = plain(norm="none", layers=20, activation="gelu", skip_scale=2.0)
    with pytest.warns(moments.ValidityWarning):
        moments.predict(model, variance=1e4, correlation=0.1, tokens=False)
    with pytest.raises(Unrecordable):
        passage(model, 1e4, 0.1)


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


def test_ways_back_of_other_branches_are_recorded_where_they_are_met():
    """Outputs that vanish and outputs that dominate, through programs of one way up."""
    library, model = Library(), MODELS["pre"]
    assert model.weights is not None
    for factor in (1e-5, 1e-11, 1e3):
        weights = model.weights.replace(
            output=model.weights.of("output") * factor, ffn_out=model.weights.of("ffn_out") * factor
        )
        changed = model.replace(weights=weights)
        _, gradients = passage(changed, 1.0, 0.3, library)
        with plain_passes():
            p = moments.predict(changed, variance=1.0, correlation=0.3, tokens=False)
        assert [one[0] for one in gradients] == pytest.approx(p.grad_variance, rel=1e-11)
