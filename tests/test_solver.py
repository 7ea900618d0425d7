"""Solve, then predict: the target comes back, or the plan says that it cannot."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import moments
from moments import solve
from moments.cli import app
from moments.solver import Plan, objectives
from moments.solver.goals import query_value_ratios
from moments.solver.search import least_squares, per_layer, root

BASE = moments.Transformer(3, 64, 4, 16, dropout=0.1)
RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        yield


def sites(model: moments.Transformer, site: str, **inputs: Any) -> np.ndarray:
    """Variance at a site of every layer, as a prediction has it."""
    frame = moments.predict(model, **inputs).to_frame()
    return frame[frame.site == site].variance.to_numpy()


# --- block by block ------------------------------------------------------------------------------

CASES = {
    "pre": {},
    "post": {"norm": "post"},
    "none": {"norm": "none", "branch_scale": 0.3},
    "hybrid": {"norm": "hybrid"},
    "b2t": {"norm": "b2t"},
    "gelu": {"activation": "gelu"},
    "tanh": {"activation": "tanh", "dropout": 0.0},
    "gated": {"activation": "swiglu"},
    "biased": {"biases": moments.Biases.torch_default(64), "activation": "gelu_tanh"},
    "activation dropout": {"activation_dropout": 0.2},
    "lns": {"layernorm_scaling": True},
    "lns after the block": {"layernorm_scaling": "after-block"},
    "causal": {"causal": True},
    "parallel": {"parallel": True, "branch_scale": [[1.0, 0.5]] * 3},
    "parallel, two norms": {"parallel": True, "parallel_norms": 2},
    "capped": {"logit_softcap": 20.0, "qk_norm": "rmsnorm"},
}


@pytest.mark.parametrize("case", CASES)
def test_block_outputs_have_their_target(case: str) -> None:
    model = BASE.replace(**CASES[case])
    targets = [1.0, 0.5, 0.7]
    if case == "tanh":
        targets = [0.3, 0.2, 0.25]
    plan = solve(model, "block_variance", target=targets, correlation=0.3)
    assert plan.feasible
    assert plan.residual < 1e-12
    for block in ("attention", "ffn"):
        found = sites(plan.model, f"{block}.dropout", correlation=0.3)
        np.testing.assert_allclose(found, targets, rtol=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    norm=st.sampled_from(["pre", "post", "none"]),
    activation=st.sampled_from(["relu", "gelu", "silu", "identity", "geglu"]),
    dropout=st.sampled_from([0.0, 0.2]),
    target=st.floats(0.05, 5.0),
    correlation=st.floats(0.01, 0.95),
    free=st.sets(st.sampled_from(["value", "output", "ffn_in", "ffn_out"]), min_size=1),
)
def test_any_free_set_meets_any_block_variance(
    norm: str, activation: str, dropout: float, target: float, correlation: float, free: set[str]
) -> None:
    model = moments.Transformer(2, 32, 2, 8, norm=norm, activation=activation, dropout=dropout)
    plan = solve(model, "block_variance", target=target, free=sorted(free), correlation=correlation)
    assert plan.feasible
    for block, own in (("attention", {"value", "output"}), ("ffn", {"ffn_in", "ffn_out"})):
        if own & free:
            found = sites(plan.model, f"{block}.dropout", correlation=correlation)
            np.testing.assert_allclose(found, target, rtol=1e-9)
    for name in ("query", "key", "value", "output", "ffn_in", "ffn_out"):
        if name not in free:
            assert plan.model.weights.of(name) == model.weights.of(name)


def test_relu_block_against_its_formula() -> None:
    """The output's variance is d d_ff s^4 / (2 (1 - p)) behind a norm of unit variance."""
    weights = BASE.weights.replace(ffn_in=0.01, ffn_out=0.01)
    plan = solve(BASE.replace(weights=weights), "block_variance", target=0.7, correlation=0.2)
    expected = math.sqrt(0.7 * 2 * 0.9 / (64 * 256))
    assert plan.model.weights.ffn_in == pytest.approx(expected, rel=1e-12)
    assert plan.model.weights.ffn_out == pytest.approx(expected, rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    activation=st.sampled_from(["relu", "gelu"]),
    skip=st.sampled_from([0.7, 1.0]),
    steps=st.lists(st.floats(0.2, 2.0), min_size=3, max_size=3),
    variance=st.floats(0.3, 2.0),
)
def test_stream_variance_follows_any_growing_profile(
    activation: str, skip: float, steps: list[float], variance: float
) -> None:
    model = BASE.replace(activation=activation, skip_scale=skip)
    targets = (variance + np.cumsum(steps)).tolist()
    inputs = {"variance": variance, "correlation": 0.4}
    plan = solve(model, "stream_variance", target=targets, **inputs)
    assert plan.feasible
    found = moments.predict(plan.model, **inputs).variance
    np.testing.assert_allclose(found[1:], targets, rtol=1e-9)


def test_the_average_over_real_tokens_of_a_causal_text() -> None:
    model = BASE.replace(causal=True, embedding=moments.Embedding(50, 1.0))
    ids = np.random.default_rng(0).integers(0, 50, (2, 16))
    mask = np.ones((2, 16), dtype=int)
    mask[1, 10:] = 0
    plan = solve(model, "block_variance", token_ids=ids, attention_mask=mask)
    inputs = {"token_ids": ids, "attention_mask": mask}
    np.testing.assert_allclose(sites(plan.model, "attention.dropout", **inputs), 1, rtol=1e-9)
    stream = solve(model, "stream_variance", target=[2, 3, 4], token_ids=ids)
    found = moments.predict(stream.model, token_ids=ids).variance
    np.testing.assert_allclose(found[1:], [2, 3, 4], rtol=1e-9)


def test_a_decoder_has_three_blocks() -> None:
    encoder = moments.Transformer(2, 48, 4, 12, dropout=0.1)
    model = BASE.replace(encoder=encoder, causal=True)
    inputs: dict[str, Any] = {"correlation": 0.3, "encoder_inputs": {"correlation": 0.2}}
    plan = solve(model, "block_variance", **inputs)
    assert set(plan.free) >= {"cross_value", "cross_output"}
    assert plan.model.encoder == encoder
    for block in ("attention", "cross", "ffn"):
        np.testing.assert_allclose(sites(plan.model, f"{block}.dropout", **inputs), 1.0, rtol=1e-9)


def test_parallel_blocks_share_a_sum() -> None:
    model = BASE.replace(parallel=True)
    plan = solve(model, "stream_variance", target=[2.0, 3.0, 4.0], correlation=0.3)
    found = moments.predict(plan.model, correlation=0.3).variance
    np.testing.assert_allclose(found, [1.0, 2.0, 3.0, 4.0], rtol=1e-9)


def test_a_matrix_that_follows_another_by_default_stays() -> None:
    model = BASE.replace(activation="swiglu")
    plan = solve(model, "block_variance", free=("ffn_in",), correlation=0.3)
    assert plan.model.weights.of("gate") == model.weights.of("gate")
    assert plan.feasible


# --- infeasible ----------------------------------------------------------------------------------


def test_less_than_the_skip_connection_brings_is_reported() -> None:
    said = r"not feasible: the nearest that .* can give is 1, which the skip connection brings"
    with pytest.warns(moments.ValidityWarning, match=said):
        plan = solve(BASE, "stream_variance", target=0.5)
    assert not plan.feasible
    assert plan.nearest == pytest.approx(1.0)
    assert plan.residual == pytest.approx(1.0)
    assert "NOT FEASIBLE" in str(plan)


def test_what_is_met_in_a_limit_alone_says_so() -> None:
    """A stream of variance 1 to which blocks add nothing: branch_scale 0, which is no variable."""
    with pytest.warns(moments.ValidityWarning, match="in the limit of vanishing branch_scale"):
        plan = solve(BASE, "final_variance", target=1.0, free=["branch_scale"])
    assert not plan.feasible


@pytest.mark.parametrize(("variance", "hinted"), [(1.0, False), (4e-4, True), (400.0, True)])
def test_a_target_far_from_what_enters_is_said(variance: float, hinted: bool) -> None:
    plan = solve(BASE, "block_variance", correlation=0.3, variance=variance)
    end = moments.predict(plan.model, correlation=0.3, variance=variance).variance[-1]
    said = f"the variance that enters layer 1 ({variance:.3g})"
    assert (said in plan.hint) is hinted
    assert (f"goes from {variance:.3g} to {end:.3g}" in str(plan)) is hinted
    assert Plan.from_json(plan.to_json()).hint == plan.hint


def test_objectives_are_listed_where_one_is_looked_for() -> None:
    with pytest.raises(moments.DomainError, match="nonsense") as caught:
        solve(BASE, "nonsense")
    said = RUNNER.invoke(app, ["solve", "--help"]).stdout
    for name, title in objectives().items():
        assert f"{name}: {title}" in str(caught.value)
        assert name in said


@pytest.mark.parametrize("target", [1.0, 0.5])
def test_a_target_met_only_in_the_limit_is_not_met(target: float) -> None:
    plan = solve(BASE, "final_variance", target=target)
    assert not plan.feasible
    assert plan.nearest == pytest.approx(1.0, abs=1e-6)
    assert not solve(BASE, "stream_variance", target=1.0).feasible


def test_saturated_activations_have_a_largest_output() -> None:
    """tanh is at most 1: the output's variance is below d_ff s_2 whatever comes before."""
    model = BASE.replace(activation="tanh", dropout=0.0)
    most = 256 * model.weights.ffn_out
    plan = solve(model, "block_variance", target=2 * most, free="ffn_in", correlation=0.3)
    assert not plan.feasible
    assert plan.nearest < most * (1 + 1e-6)


def test_biases_that_exceed_the_target() -> None:
    model = BASE.replace(biases=moments.Biases(ffn_out=0.5))
    plan = solve(model, "block_variance", target=0.1, free="ffn_out", correlation=0.3)
    assert not plan.feasible
    assert plan.nearest == pytest.approx(0.5 / 0.9, rel=1e-6)


# --- one number, several, one per layer -----------------------------------------------------------

GOALS = [
    ("final_variance", 3.0, None),
    ("final_variance", 0.4, "skip_scale"),
    ("gradient_ratio", 2.0, None),
    ("gradient_ratio", 0.9, "k"),
    ("query_value_balance", 0.3, None),
    ("query_value_balance", 0.3, ("query", "key")),
]


@pytest.mark.parametrize("norm", ["pre", "none"])
@pytest.mark.parametrize(("objective", "target", "free"), GOALS)
def test_a_number_of_the_prediction(objective: str, target: float, free: Any, norm: str) -> None:
    plan = solve(BASE.replace(norm=norm), objective, target=target, free=free, correlation=0.3)
    assert plan.feasible
    p = moments.predict(plan.model, correlation=0.3)
    found = {
        "final_variance": p.variance[-1],
        "gradient_ratio": p.grad_variance[0] / p.grad_variance[-1],
        "query_value_balance": np.exp(np.mean(np.log(query_value_ratios(p)))),
    }
    assert found[objective] == pytest.approx(target, rel=1e-9)


def test_query_value_ratios_are_those_of_the_table() -> None:
    p = moments.predict(BASE, correlation=0.3)
    norms = p.weight_gradients().pivot_table(index="layer", columns="weight", values="squared_norm")
    np.testing.assert_allclose(query_value_ratios(p), norms["query"] / norms["value"], rtol=1e-12)


def test_a_correlation_is_a_maximum() -> None:
    held = solve(BASE, "final_correlation", target=0.99, correlation=0.3)
    assert held.model == BASE
    assert held.feasible
    assert held.residual == 0.0
    plan = solve(BASE, "final_correlation", target=0.4, correlation=0.3)
    found = moments.predict(plan.model, correlation=0.3).correlation[-1]
    assert found == pytest.approx(0.4, abs=1e-9)
    assert plan.model.branch_scale < BASE.branch_scale
    assert not solve(BASE, "final_correlation", target=0.1, correlation=0.3).feasible


def test_several_goals_by_least_squares() -> None:
    goals = [("final_variance", 3.0), ("gradient_ratio", 2.0)]
    plan = solve(BASE, goals, free=("output", "skip_scale"), correlation=0.3)
    assert plan.feasible
    p = moments.predict(plan.model, correlation=0.3)
    assert p.variance[-1] == pytest.approx(3.0, rel=1e-9)
    assert p.grad_variance[0] / p.grad_variance[-1] == pytest.approx(2.0, rel=1e-9)
    assert plan.model.weights.ffn_out == BASE.weights.ffn_out
    # Post-LN fixes the variance at 1.
    goals = [("final_variance", 2.0), ("gradient_ratio", 1.0)]
    plan = solve(BASE.replace(norm="post"), goals, correlation=0.3)
    assert not plan.feasible
    assert plan.nearest[0] == pytest.approx(1.0, rel=1e-3)


def test_gradients_of_one_size_in_all_layers() -> None:
    model = BASE.replace(layers=6, skip_scale=0.9, branch_scale=math.sqrt(0.19))
    plan = solve(model, "flat_gradient", correlation=0.3)
    assert plan.feasible
    found = moments.predict(plan.model, correlation=0.3).grad_variance
    np.testing.assert_allclose(found / found[-1], 1.0, rtol=1e-8)
    # A skip connection of 1 keeps the gradient, and every branch adds to it.
    plan = solve(BASE, "flat_gradient", correlation=0.3)
    assert not plan.feasible
    assert plan.nearest > 1


def test_a_temperature_per_layer() -> None:
    plan = solve(BASE, "query_value_balance_per_layer", target=0.1, correlation=0.3)
    assert plan.feasible
    ratios = query_value_ratios(moments.predict(plan.model, correlation=0.3))
    np.testing.assert_allclose(ratios, 0.1, rtol=1e-9)
    assert len(set(plan.model.temperature)) == 3


def test_many_layers_go_on_in_krylov_spaces() -> None:
    def distances(x: np.ndarray) -> np.ndarray:
        return np.tanh(x + 0.5 * np.roll(x, 1) - 0.4 * np.roll(x, 2)) - 0.3

    for layers in (8, 80):
        found = per_layer(distances, layers, (-12.0, 12.0), 1e-9)
        assert found.reached
        np.testing.assert_allclose(found.at, np.arctanh(0.3) / 1.1, rtol=1e-8)


def test_searches_say_when_they_fail() -> None:
    assert not root(lambda x: x * x + 1, (-5, 5), 1e-9).reached
    assert root(lambda x: x * x + 1, (-5, 5), 1e-9).at == pytest.approx(0, abs=1e-3)
    assert root(lambda x: x - 2, (-5, 5), 1e-9) == (pytest.approx(2, abs=1e-9), True)
    assert root(lambda x: math.nan if x > 1 else x + 0.5, (-5, 5), 1e-9).reached
    assert not root(lambda x: math.exp(x), (-30, 30), 1e-9).reached
    with pytest.raises(moments.DomainError, match="overflow"):
        root(lambda x: math.nan, (-1, 1), 1e-9)
    hidden = root(lambda x: 0.05 - (x - 3) ** 2, (-5, 5), 1e-9)  # both roots lie between 2 and 4
    assert hidden.reached
    assert abs(hidden.at - 3) == pytest.approx(math.sqrt(0.05))
    asked: list[float] = []

    def rising(x: float) -> float:
        asked.append(x)
        return x - 2.5

    root(rising, (-5, 5), 1e-9)
    assert min(asked) == -0.25, "away from where it falls"
    found = least_squares(lambda x: np.array([x[0] - 1, x[0] + 1]), [(-5, 5)], 1e-9)
    assert not found.reached
    assert found.at[0] == pytest.approx(0.0, abs=1e-6)


def test_the_search_for_a_balance_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction with sharp attention is dear."""
    module = sys.modules["moments.solver.solve"]
    count = 0
    predict = module.predict

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return predict(*args, **kwargs)

    monkeypatch.setattr(module, "predict", counted)
    solve(BASE, "query_value_balance", target=0.3, correlation=0.3)
    assert count < 30


# --- the largest ---------------------------------------------------------------------------------


def test_the_largest_k_keeps_its_bound_and_no_larger_does() -> None:
    plan = solve(BASE, "largest_k", bound=("final_correlation", 0.5), correlation=0.3)
    assert plan.feasible
    assert f"at most 0.5: {BASE.layers * plan.model.branch_scale**2:.6g}" in str(plan)
    assert moments.predict(plan.model, correlation=0.3).correlation[-1] <= 0.5
    square = plan.model.branch_scale**2 * (1 + 1e-6)
    more = BASE.replace(branch_scale=math.sqrt(square), skip_scale=math.sqrt(1 - square))
    assert moments.predict(more, correlation=0.3).correlation[-1] > 0.5


def test_the_largest_depth_keeps_its_bound_and_one_more_layer_does_not() -> None:
    plan = solve(BASE, "largest_depth", bound=("final_variance", 10.0), correlation=0.3)
    depth = plan.model.layers
    found = moments.predict(BASE.replace(layers=depth + 1), correlation=0.3).variance
    assert found[depth] <= 10 < found[depth + 1]
    tight = solve(BASE, "largest_depth", bound=("final_variance", 1.01), correlation=0.3)
    assert not tight.feasible
    assert tight.nearest > 1.01
    assert "the nearest that layers can give is" in str(tight)


@pytest.mark.parametrize("goal", ["final_variance", "gradient_ratio"])
def test_a_bound_that_no_depth_breaks_ends_with_the_largest_tried(
    goal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moments.solver.largest.DEPTH_MAX", 24)
    model = BASE.replace(dropout=0.0, norm="none", branch_scale=0.01, skip_scale=0.9)
    plan = solve(model, "largest_depth", bound=(goal, 1.5), correlation=0.3)
    assert plan.feasible
    assert plan.model.layers == 24
    assert "24, the largest tried" in plan.title


def test_a_search_for_depth_is_bounded_by_the_tokens_it_resolves() -> None:
    from moments.solver.largest import DEPTH_MAX, _limit

    assert _limit(0.5) == DEPTH_MAX
    assert [_limit(np.eye(n)) for n in (16, 64, 256, 2048)] == [DEPTH_MAX, 256, 16, 2]


# --- schemes -------------------------------------------------------------------------------------


def test_a_scheme_is_its_model() -> None:
    options = {"input_correlation": 0.3}
    plan = solve(BASE, "dslm", options=options)
    assert plan.model == BASE.with_scheme("dslm", **options)
    inputs = {"correlation": 0.9 * 0.3}
    outputs = [sites(plan.model, f"{b}.dropout", **inputs) for b in ("attention", "ffn")]
    assert plan.residual == pytest.approx(np.max(np.abs(np.array(outputs) - 1)), rel=1e-9)
    assert solve(BASE, "dslm", correlation=0.27).model == plan.model
    assert solve(BASE, "deepnorm").model == BASE.with_scheme("deepnorm")


@pytest.mark.parametrize("changes", [{"activation": "gelu"}, {"causal": True}, {"gated": True}])
def test_dslm_solved_meets_its_conditions(changes: dict[str, Any]) -> None:
    plan = solve(BASE.replace(**changes), "dslm", correlation=0.3)
    assert plan.residual < 1e-12
    assert plan.tolerance == 1e-9
    same = solve(plan.model, "block_variance", correlation=0.3)
    np.testing.assert_allclose(same.model.weights.value, plan.model.weights.value, rtol=1e-9)


def test_constants_that_miss_the_forward_variance_are_named() -> None:
    """The number in words is the prediction's; the remedy named removes it; none where none is."""
    with pytest.warns(moments.ValidityWarning, match="released constants") as caught:
        plan = solve(BASE, "dslm", correlation=0.05)
    variance = moments.predict(plan.model, **plan.inputs).variance[1:]
    worst = int(np.abs(variance - 1).argmax())
    said = f"forward variance at {variance[worst]:.3g} after layer {worst + 1}, not 1"
    assert said in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", moments.ValidityWarning)
        solve(BASE, "dslm", correlation=0.05, options={"variant": "solved"})
        solve(BASE.replace(seq_len=512), "dslm", correlation=0.5)


# --- the plan ------------------------------------------------------------------------------------


def test_a_plan_survives_json() -> None:
    ids = np.arange(16) % 5
    model = BASE.replace(causal=True, embedding=moments.Embedding(50, 1.0))
    for plan in (
        solve(model, "block_variance", target=[1, 2, 3], token_ids=ids),
        solve(BASE, "stream_variance", target=0.5),
        solve(BASE, [("final_variance", 3.0), ("gradient_ratio", 2.0)], correlation=0.3),
        solve(BASE, "dslm", options={"input_correlation": 0.3}),
    ):
        back = Plan.from_json(plan.to_json())
        assert back == plan
        assert back.to_frame().equals(plan.to_frame())
    again = moments.predict(back.model, **back.inputs)
    assert again.variance[0] == 1.0
    for text in ("{", "[]", '{"format": 9}', '{"format": 1}'):
        with pytest.raises(moments.DomainError, match="plan"):
            Plan.from_json(text)


def test_a_row_per_layer() -> None:
    plan = solve(BASE, "block_variance", correlation=0.3)
    frame = plan.to_frame()
    assert list(frame.layer) == [1, 2, 3]
    assert list(frame.output) == list(plan.model.weights.output)
    assert "gate" not in frame
    assert "<pre>" in plan._repr_html_()


def test_solving_loads_nothing_symbolic() -> None:
    code = (
        "import sys, moments\n"
        "moments.solve(moments.Transformer(3, 64, 4, 16), 'block_variance', correlation=0.3)\n"
        "print(*[n for n in ('sympy', 'pandas', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_hundreds_of_layers(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solved exactly, by as many passes through a block for every layer as four layers take."""
    walks = importlib.import_module("moments.solver.layerwise")
    forward, counts = walks.forward, []

    def counted(*arguments: Any) -> Any:
        counts[-1] += 1
        return forward(*arguments)

    monkeypatch.setattr(walks, "forward", counted)
    for layers in (4, 400):
        model = moments.Transformer(layers, 1024, 16, 512, activation=activation, dropout=0.1)
        counts.append(0)
        assert solve(model, "block_variance", correlation=0.3).residual < 1e-12
    assert 0 < counts[1] <= 100 * counts[0]


def test_what_a_plan_reaches_is_that_of_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pass through them, whatever the walk that solved them took them for."""
    module = importlib.import_module("moments.solver.solve")
    scaled = module.scaled_weights

    def other(model: moments.Transformer, factors: dict[str, tuple[float, ...]]) -> moments.Weights:
        values = list(factors["ffn_out"])
        values[50] *= 1.21
        return scaled(model, {**factors, "ffn_out": tuple(values)})

    monkeypatch.setattr(module, "scaled_weights", other)
    plan = solve(BASE.replace(layers=80), "block_variance", correlation=0.3)
    assert plan.residual == pytest.approx(0.21, rel=1e-9)


def test_one_layer_of_many_that_cannot_reach_its_target_is_named() -> None:
    model = BASE.replace(layers=80, activation="tanh", dropout=0.0)
    target = [0.3] * 79 + [30.0]
    plan = solve(model, "block_variance", target=target, free=("value", "ffn_in"), correlation=0.3)
    short = BASE.replace(layers=2, activation="tanh", dropout=0.0)
    other = solve(
        short, "block_variance", target=[0.3, 30.0], free=("value", "ffn_in"), correlation=0.3
    )
    assert not plan.feasible
    assert plan.nearest == pytest.approx(other.nearest, rel=0.05)


def test_a_root_next_to_numbers_that_overflow_is_the_least_distance() -> None:
    from moments.solver.search import root

    def distance(log: float) -> float:
        return math.nan if -0.6 < log < 0.4 else log + 0.1

    found = root(distance, (-8.0, 8.0), 1e-6)
    assert not found.reached
    assert found.at <= -0.6 or found.at >= 0.4
    assert abs(distance(found.at)) < 0.7


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "options", "match"),
    [
        ("nonsense", {}, "objective"),
        ("final_variance", {"target": -1}, "target"),
        ("final_variance", {"target": [1, 2]}, "target"),
        ("block_variance", {"target": [1, 2]}, "one per layer"),
        ("block_variance", {"free": "branch_scale"}, "free"),
        ("block_variance", {"free": "gate"}, "not gated"),
        ("block_variance", {"free": "cross_value"}, "no encoder"),
        ("block_variance", {"free": ("value", "value")}, "each once"),
        ("stream_variance", {"free": "output"}, "feed-forward matrix"),
        ("final_variance", {"free": ("k", "skip_scale")}, "either k"),
        ("flat_gradient", {"free": "k"}, "each layer"),
        ("largest_k", {}, "bound"),
        ("largest_k", {"bound": ("nonsense", 1)}, "bound"),
        ("largest_depth", {"bound": (["final_variance"], 1)}, "bound"),
        ("largest_depth", {"bound": ("final_variance", "two")}, "bound on final_variance = 'two'"),
        ("largest_depth", {"bound": ("final_variance", [2.0])}, "bound on final_variance"),
        ("block_variance", {"corelation": 0.3}, "input"),
        ("block_variance", {"correlation": [0.1, 0.2]}, "one number"),
        ("block_variance", {"tolerance": 0}, "tolerance"),
        ([("nonsense", 1.0)], {}, "objective"),
        ([], {}, "objective"),
        (3, {}, "objective"),
    ],
)
def test_bad_input_is_named(objective: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(moments.DomainError, match=match):
        solve(BASE, objective, **options)


def test_what_a_placement_fixes_is_no_target() -> None:
    with pytest.raises(moments.DomainError, match="sandwich"):
        solve(BASE.replace(norm="sandwich"), "block_variance")
    with pytest.raises(moments.DomainError, match="what follows the sum"):
        solve(BASE.replace(norm="post"), "stream_variance")
    deep = BASE.replace(branch_scale=[1.0, 0.5, 0.2])
    with pytest.raises(moments.DomainError, match="any depth"):
        solve(deep, "largest_depth", bound=("final_variance", 2.0))
    with pytest.raises(moments.DomainError, match="Transformer"):
        solve("bert-base", "dslm")  # type: ignore[arg-type]


def test_every_objective_is_named() -> None:
    assert set(objectives()) >= {"block_variance", "flat_gradient", "largest_depth"}


# --- the command ---------------------------------------------------------------------------------


def test_solve_command(tmp_path: Any) -> None:
    file = tmp_path / "plan.csv"
    common = ["solve", "bert-tiny", "--correlation", "0.3", "--objective"]
    done = RUNNER.invoke(app, [*common, "block_variance", "--json", "--csv", str(file)])
    assert done.exit_code == 0
    plan = Plan.from_json(done.stdout)
    assert plan.residual < 1e-12
    assert len(file.read_text().splitlines()) == 1 + plan.model.layers
    done = RUNNER.invoke(app, [*common, "final_variance", "--target", "3"])
    assert done.exit_code == 1
    assert "NOT FEASIBLE" in done.stdout
    largest = ["largest_k", "--bound", "final_correlation=0.99", "--json"]
    assert json.loads(RUNNER.invoke(app, [*common, *largest]).stdout)["free"] == ["k"]


def test_a_search_for_depth_tells_how_far_it_is() -> None:
    arguments = ["gpt2", "--seq-len", "4", "--objective", "largest_depth", "--json"]
    done = RUNNER.invoke(app, ["solve", *arguments, "--bound", "final_variance=0.1"])
    told = [line for line in done.stderr.splitlines() if "the bound is 0.1" in line]
    depth = Plan.from_json(done.stdout).model.layers
    tried = [int(line.split()[0]) for line in told]
    assert tried[:5] == [1, 2, 4, 8, 16]
    assert {depth, depth + 1} <= set(tried)


def test_several_goals_from_the_command_line() -> None:
    goals = ["--goal", "gradient_ratio=1.1", "--free", "ffn_out", "--json"]
    done = RUNNER.invoke(app, ["solve", "bert-tiny", "--correlation", "0.3", *goals])
    assert json.loads(done.stdout)["objective"] == "gradient_ratio"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--objective", "largest_k", "--bound", "final_correlation"],
        ["--goal", "final_variance"],
        ["--objective", "final_variance", "--target", "-1"],
        ["--tolerance", "0"],
    ],
)
def test_bad_options_are_named(arguments: list[str]) -> None:
    done = RUNNER.invoke(app, ["solve", "bert-tiny", *arguments])
    assert isinstance(done.exception, moments.DomainError)


def test_bad_input_exits_with_two() -> None:
    code = "from moments.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "solve", "bert-tiny", "--objective", "nonsense"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_experts_meet_their_target_as_predicted() -> None:
    """Whose gates and outputs depend on one overlap of two tokens."""
    experts = moments.Experts(experts=8, chosen=2, d_ff=32)
    model = BASE.replace(ffn=experts, activation="silu")
    plan = solve(model, "block_variance", target=1.0, correlation=0.2)
    assert plan.feasible
    frame = moments.predict(plan.model, correlation=0.2).to_frame()
    outputs = frame[frame["site"] == "ffn.dropout"]["variance"]
    np.testing.assert_allclose(outputs, 1.0, rtol=1e-9)
