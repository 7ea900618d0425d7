"""Blocks given by one law of second moments, against draws of their torch functions."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import law_blocks
import numpy as np
import pytest

import moments
from moments import laws
from moments.engine.derivative import pullback
from moments.engine.laws import Layout, evaluating
from moments.prediction.measurement import Measurement
from moments.show.plot import shown
from moments.solver.goals import GOALS, query_value_ratios

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"
DRAWS = 60
SQUARE = ("d_model", "d_model")


def declared(d_model: int, seq_len: int, **place: Any) -> moments.Transformer:
    weights = moments.Weights(
        query=0.3 / d_model,
        key=0.3 / d_model,
        value=1 / d_model,
        output=1 / d_model,
        ffn_in=1 / d_model,
        ffn_out=1 / 128,
        gate=2 / d_model,
    )
    return moments.Transformer(
        2, d_model, 4, seq_len, d_ff=64, activation="gelu", causal=True, weights=weights, **place
    )


MODELS = {
    "gated average": declared(96, 10, mixer=law_blocks.GATED),
    "recurrence": declared(96, 10, mixer=law_blocks.RECURRENCE),
    "sink": declared(64, 8, mixer=law_blocks.SINK),
    "units": declared(96, 10, ffn=law_blocks.UNITS),
}
GIVEN: dict[str, Any] = {"correlation": 0.3, "grad_correlation": 0.2}


@pytest.fixture(scope="module", params=MODELS)
def both(request: Any) -> tuple[moments.Prediction, Measurement]:
    model = MODELS[request.param]
    measured = moments.simulate(model, seeds=DRAWS, batch=1, seed=1, **GIVEN)
    return moments.predict(model, **GIVEN), measured


def test_moments_and_weight_gradients_are_those_of_draws(
    both: tuple[moments.Prediction, Measurement],
) -> None:
    """Signal, gradient and every matrix, within 3.5 standard errors and 1 (weights: 3) percent, of
    order 1/width."""
    predicted, measured = both
    for name in ("variance", "correlation", "grad_variance", "grad_correlation"):
        found, mean = getattr(predicted, name), getattr(measured, name)
        error = getattr(measured, f"{name}_stderr")
        assert np.all(np.abs(found - mean) < 3.5 * error + 0.01 * np.abs(mean)), name
    rows, seen = predicted.weight_gradients(), measured.weight_gradients()
    table = rows.merge(seen, on=["layer", "weight"], suffixes=("", "_seen"))
    assert len(table) == len(rows) == len(seen)
    off = (table.squared_norm - table.squared_norm_seen).abs()
    within = 3.5 * table.squared_norm_stderr + 0.03 * table.squared_norm_seen
    assert (off < within).all(), table


def test_draws_spread_as_the_band_says(both: tuple[moments.Prediction, Measurement]) -> None:
    predicted, measured = both
    low, high = predicted.grad_variance_band
    sigma = np.log(high / low) / (2 * 1.959963984540054)
    seen = np.log(np.asarray(measured.samples["grad_variance"])).std(0, ddof=1)
    assert np.all(np.abs(sigma - seen) < 0.1 * seen + 3 * seen / np.sqrt(2 * (DRAWS - 1)))
    low, high = predicted.variance_band
    draws = np.asarray(measured.samples["variance"])
    assert np.mean((draws > low) & (draws < high)) > 0.85


def test_each_law_is_short_and_shown() -> None:
    text = GUIDE.read_text()
    for law in (law_blocks.gated_law, law_blocks.recurrence_law, law_blocks.sink_law):
        assert len(inspect.getsource(law).splitlines()) < 20
    for part in (law_blocks.average, law_blocks.gated_law, law_blocks.gated_twin):
        assert inspect.getsource(part).strip() in text


# --- what else works on them ----------------------------------------------------------------------


def test_a_block_that_treats_tokens_alone_has_every_resolution() -> None:
    """The built-in layer of the same units, whose laws are typed: forward exactly, back to 1/width.
    Tokens alike, classes and single tokens."""
    wide = moments.Weights(*[1e-6] * 6)
    for given, tokens in (({}, False), ({"causal": True}, None), ({"causal": True}, True)):
        own, usual = (
            moments.predict(
                moments.Transformer(2, 10**6, 4, 40, d_ff=10**6, weights=wide, **given, **units),
                tokens=tokens,
                **GIVEN,
            )
            for units in ({"ffn": law_blocks.UNITS}, {"activation": "relu_squared"})
        )
        for name in ("variance", "correlation", "grad_variance", "grad_correlation"):
            assert getattr(own, name) == pytest.approx(getattr(usual, name), rel=1e-4), name
        a, b = (p.weight_gradients().set_index(["layer", "weight"]) for p in (own, usual))
        assert np.allclose(a.squared_norm, b.squared_norm.loc[a.index], rtol=1e-4)


def test_several_sequences_share_the_weights() -> None:
    """Two texts in one kernel have each what it has alone, and one batch narrows the band."""
    model = MODELS["gated average"].replace(embedding=moments.Embedding(50, 1.0))
    ids = np.random.default_rng(0).integers(0, 50, (2, 10))
    together = moments.predict(model, token_ids=ids)
    alone = [moments.predict(model, token_ids=one) for one in ids]
    mean = np.mean([one.grad_variance for one in alone], 0)
    assert together.grad_variance == pytest.approx(mean, rel=1e-8)
    widths = [np.ptp(np.log(p.grad_variance_band), 0)[0] for p in (alone[0], together)]
    assert widths[1] < widths[0]
    assert np.all(together.variance_band[0] < together.variance)
    many = moments.predict(MODELS["gated average"], batch=8, **GIVEN)
    assert np.ptp(np.log(many.grad_variance_band), 0)[0] < widths[0]


def test_configurations_pictures_and_stored_declarations(tmp_path: Path) -> None:
    model = MODELS["recurrence"]
    p = moments.predict(model, variance=np.array([0.5, 2.0]))
    assert p.variance.shape == (2, 3)
    for k, v in enumerate((0.5, 2.0)):
        alone = moments.predict(model, variance=v)
        assert p.grad_variance[k] == pytest.approx(alone.grad_variance, rel=1e-12)
    assert moments.Transformer.from_dict(model.to_dict()) == model
    assert "recurrence (value, output)" in str(model)
    again = pickle.loads(pickle.dumps(alone))
    assert again.weight_gradients().equals(alone.weight_gradients())
    alone.plot().savefig(tmp_path / "prediction.png")
    frame = moments.sweep(model, {"branch_scale": [0.5, 1.0]}).to_frame()
    assert frame.grad_variance.iloc[1] == pytest.approx(
        moments.predict(model).grad_variance[0], rel=1e-9
    )


def test_layers_without_queries_have_no_ratio_of_theirs() -> None:
    for mixer, there in (
        ([law_blocks.RECURRENCE, None], [False, True]),
        (law_blocks.RECURRENCE, [False, False]),
    ):
        p = moments.predict(MODELS["recurrence"].replace(mixer=mixer))
        assert np.isfinite(query_value_ratios(p)).tolist() == there
        assert np.isfinite(GOALS["query_value_balance"].value(p)) == any(there)
    assert shown(float("nan")) == ""


def test_explain_names_the_block() -> None:
    steps = moments.explain(MODELS["sink"], 1, **GIVEN).steps
    found = [step for step in steps if step.site == "sink"]
    assert [step.quantity for step in found] == [
        "variance",
        "covariance",
        "grad_variance",
        "grad_covariance",
    ]
    assert {step.source for step in found} == {"a block's own law of second moments"}


LINEAR = moments.block(
    name="values and outputs",
    law=lambda x, w: w.output(w.value(x)),
    weights={"value": SQUARE, "output": SQUARE},
)


@pytest.mark.parametrize(("rule", "rate"), [("sgd", 1e-2), ("adam", 1e-4)])
def test_the_first_step_is_that_of_the_matrices(rule: Any, rate: float) -> None:
    """Values and outputs alone, as attention that sees only itself has them in components; they
    part in what of order 1/width is left out inside a block."""
    ids = np.random.default_rng(0).integers(0, 50, (2, 12))
    tables = {"embedding": moments.Embedding(50, 0.02), "head": moments.Head()}
    model = moments.Transformer(
        3, 64, 4, 12, causal=True, weights=moments.Weights(*[1 / 64] * 6), **tables
    )
    own, usual = (
        moments.predict(model.replace(**mixer), token_ids=ids).after(rule, rate)
        for mixer in ({"mixer": LINEAR}, {"identity_attention": True})
    )
    assert own.loss_change == pytest.approx(usual.loss_change, rel=0.04)
    assert own.relative_change == pytest.approx(usual.relative_change, rel=0.03)
    for one, other in zip(own.weights().itertuples(), usual.weights().itertuples(), strict=True):
        assert one[1:3] == other[1:3]
        assert one.slope == pytest.approx(other.slope, rel=0.03)


# --- what laws are written with -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "gelu", "sigmoid", "tanh"])
def test_activations_differentiate(name: str) -> None:
    """Across replicas by Price's theorem; with what each has by itself, as a whole."""
    random = np.random.default_rng(1)
    root = random.normal(size=(4, 4))
    c, layout = root @ root.T / 4, Layout(True)

    def whole(x: Any) -> Any:
        with evaluating(layout, np.inf):
            return laws.activation(name, x)

    direction = random.normal(size=(4, 4))
    direction = direction + direction.T
    weights, h = random.normal(size=(4, 4)), 1e-5
    found = np.sum(pullback(whole, c)[1](weights)[0] * direction)
    seen = np.sum((whole(c + h * direction) - whole(c - h * direction)) * weights) / (2 * h)
    assert found == pytest.approx(seen, rel=2e-5)


def test_norms_hold_what_each_replica_has() -> None:
    c = np.array([[4.0, 1.0], [1.0, 9.0]])

    def law(x: Any) -> Any:
        with evaluating(Layout(True), x.level):
            return laws.normalized(x, 1.0)

    value, pull = pullback(law, c)
    assert value == pytest.approx(c / np.sqrt(np.outer([5, 10], [5, 10])))
    assert pull(np.ones((2, 2)))[0] == pytest.approx(1 / np.sqrt(np.outer([5, 10], [5, 10])))


@pytest.mark.parametrize("most", [10**6, 0])
def test_overlaps_move_as_they_vary(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Squares of the directions sum up to the covariance; drawn ones do on average."""
    from moments.engine.state import Fluctuation, Kernel, Signal
    from moments.layers import by_law

    root = np.random.default_rng(1).normal(size=(5, 9))
    c = root @ root.T / 9
    kernel = Kernel.of_matrix(c)
    spread = (kernel * kernel).scaled(2 / 100)
    signal = Signal(kernel, 5, width=100.0, fluctuation=Fluctuation(spread, spread))
    monkeypatch.setattr(by_law, "MOST_NUMBERS", most or 25 * 14)
    moves = by_law.Moves.of(signal, Layout(True))
    found = moves.weight * np.einsum("nkl,nmp->klmp", moves.steps, moves.steps)
    both = np.einsum("km,lp->klmp", c, c) + np.einsum("kp,lm->klmp", c, c)
    error = 1e-12 if most else 6 / np.sqrt(14)
    assert np.max(np.abs(found - both / 100)) < error * np.max(both / 100)


# --- errors ---------------------------------------------------------------------------------------


def broken(law: Callable[..., Any], **options: Any) -> moments.Transformer:
    own = moments.block(name="broken", law=law, weights={"value": SQUARE}, **options)
    return moments.Transformer(1, 16, 2, 4, mixer=own)


@pytest.mark.parametrize(
    ("law", "said"),
    [
        (lambda x, w: x, "never applies its weight 'value'"),
        (lambda x, w: w.vlaue(x), "did you mean 'value'"),
        (lambda x, w: w.value(x)[:2, :2], r"makes shape \(2, 2\) of \(4, 4\)"),
        (lambda x, w: w.value(x) - 9.0, "negative or not finite"),
        (lambda x, w: w.value(x) + 9.0 * (1 - np.eye(4)), "two tokens correlate by"),
        (lambda x, w: w.value(x) @ np.ones((3, 3)), r"fails on moments of shape \(4, 4\)"),
        (lambda x, w: w.value(x) * np.floor(1.5 + 0 * x), "floor .* has no derivative"),
        (lambda x, w: laws.activation("rleu", w.value(x)), "activation = 'rleu'"),
    ],
)
def test_a_law_that_cannot_be_says_why(law: Callable[..., Any], said: str) -> None:
    with pytest.raises(moments.DomainError, match=said):
        moments.predict(broken(law))


def test_bad_blocks_are_refused() -> None:
    law = law_blocks.recurrence_law
    for options, said in (
        ({"law": 3}, "law = 3"),
        ({"law": lambda x, w: x}, "name"),
        ({"law": law, "twin": 3}, "twin = 3"),
        ({"law": law, "weights": {"a b": SQUARE}}, "Python can call"),
        ({"law": law, "weights": {"mine": SQUARE}}, "variance of an entry"),
        ({"law": law, "weights": {"value": (*SQUARE, 1.0)}}, "that of moments.Weights"),
        ({"law": law, "weights": {"mine": (*SQUARE, -1.0)}}, "inside"),
        ({"law": law, "weights": {"mine": ("d_mdel", 3, 1.0)}}, "did you mean 'd_model'"),
        ({"law": law, "weights": {"mine": (0, 3, 1.0)}}, "a number of features"),
        ({"law": law, "weights": {"mine": (True, 3, 1.0)}}, "a number of features"),
        ({"law": law, "weights": {"mine": (*SQUARE, [1.0, 2.0])}}, "one number"),
        ({"law": law, "weights": ["mine"]}, "a dictionary"),
    ):
        with pytest.raises(moments.DomainError, match=said):
            moments.block(**options)
    with pytest.raises(moments.DomainError, match="inside a block's law alone"):
        laws.variances(np.ones((2, 2)))
    with pytest.raises(moments.DomainError, match="mixes_tokens=True"):
        moments.predict(
            broken(lambda x, w: w.value(laws.selves(x)[0]), mixes_tokens=False), tokens=False
        )
    with pytest.raises(moments.DomainError, match="a user's own"):
        moments.Transformer.from_dict(
            MODELS["sink"].to_dict() | {"mixer": {"kind": "law", "name": "nobody's"}}
        )
    with pytest.raises(moments.DomainError, match="a block with a twin"):
        moments.simulate(broken(lambda x, w: w.value(x)), seeds=1)
    mask = np.array([1, 1, 1, 0])
    with pytest.raises(moments.DomainError, match="knows no padding"):
        moments.predict(broken(lambda x, w: w.value(x)), attention_mask=mask)


def test_two_blocks_of_one_name_are_refused() -> None:
    one, other = (
        moments.block(law=law, name="mine", weights={"value": SQUARE}, mixes_tokens=False)
        for law in (lambda x, w: w.value(x), lambda x, w: 2 * w.value(x))
    )
    with pytest.raises(moments.DomainError, match="two blocks are called 'mine'"):
        moments.Transformer(2, 32, 4, 8, mixer=[one, other])
    assert moments.Transformer(2, 32, 4, 8, mixer=[other, None]).mixers[0] == other
