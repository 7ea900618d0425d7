"""The band of the stream's variance, and whether a number that was measured is expected."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from typer.testing import CliRunner

import moments
from moments import DomainError, Embedding, Rotary, Transformer, predict
from moments.noise.band import NORMAL_95

SMALL: dict[str, Any] = {"layers": 3, "d_model": 48, "heads": 4, "seq_len": 10}
TABLE = Embedding(40, 0.3, 0.1)
TEXT = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3])


def deviation(prediction: moments.Prediction) -> np.ndarray:
    low, high = prediction.variance_band
    return np.asarray(np.log(high / low) / (2 * NORMAL_95))


# --- the band -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "inputs"),
    [
        ({}, {"correlation": 0.2}),
        ({"dropout": 0.1, "normalization": "rmsnorm", "gated": True}, {"correlation": 0.1}),
        ({"embedding": TABLE, "causal": True}, {"token_ids": TEXT}),
        ({"embedding": Embedding(40, 0.3, positions="sinusoidal")}, {"token_ids": TEXT}),
        ({"norm": "none", "branch_scale": 0.5}, {"correlation": 0.2}),
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_draws_deviate_as_the_band_says(
    changes: dict[str, Any], inputs: dict[str, Any], batch: int
) -> None:
    """60 draws leave 9 % of a deviation to chance."""
    if batch > 1 and "token_ids" in inputs:
        inputs = {"token_ids": np.stack([TEXT, TEXT[::-1], np.roll(TEXT, 3)])}
    model = Transformer(**(SMALL | changes))
    found = predict(model, **inputs, batch=1 if "token_ids" in inputs else batch)
    seen = moments.simulate(model, **inputs, seeds=60, batch=batch).samples["variance"]
    ratio = np.log(seen).std(0, ddof=1) / deviation(found)
    assert np.all(np.abs(np.log(ratio)) < 3 * 0.09 + 0.1), ratio
    low, high = found.variance_band
    assert ((seen > low) & (seen < high)).mean() > 0.88


def test_what_enters_deviates_as_a_wishart_matrix() -> None:
    """Of Gaussian tokens of kernel K, the average square varies by 2 sum K_ij^2/(d L^2)."""
    model = Transformer(**SMALL)
    for batch in (1, 5):
        for tokens in (None, True):
            found = predict(model, variance=3.0, correlation=0.4, batch=batch, tokens=tokens)
            wanted = 2 / 48 * (1 + 9 * 0.4**2) / 10 / batch
            assert deviation(found)[0] ** 2 == pytest.approx(wanted, rel=1e-5)


def test_a_norm_on_the_stream_leaves_nothing_to_draws() -> None:
    found = predict(Transformer(**SMALL, norm="post"), correlation=0.2)
    assert deviation(found)[0] > 0.05
    assert deviation(found)[1:] == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("batch", [1, 4])
def test_by_token_and_alike_agree(batch: int) -> None:
    model = Transformer(**SMALL)
    bands = [predict(model, correlation=0.3, tokens=t, batch=batch) for t in (False, True)]
    first, second = map(deviation, bands)
    assert first == pytest.approx(second, rel=0.03)


def test_classes_agree_with_every_token_by_itself() -> None:
    model = Transformer(3, 64, 4, 48, causal=True, rotary=Rotary())
    several = [predict(model, correlation=0.3, tokens=t) for t in (None, True)]
    assert several[0].resolution != several[1].resolution
    assert deviation(several[0]) == pytest.approx(deviation(several[1]), rel=0.02)


def test_padding_has_no_part_in_the_band() -> None:
    model = Transformer(**SMALL, embedding=TABLE, causal=True)
    mask = (np.arange(14) < 10) + 0
    longer = model.replace(seq_len=14)
    ids = np.append(TEXT, [7] * 4)
    found = predict(longer, token_ids=ids, attention_mask=mask)
    assert deviation(found) == pytest.approx(deviation(predict(model, token_ids=TEXT)), rel=0.01)


def test_deep_streams_are_followed_at_some_points_by_token() -> None:
    """In between they are interpolated."""
    model = Transformer(40, 32, 4, 6)
    coarse, fine = (deviation(predict(model, correlation=0.2, tokens=t)) for t in (True, False))
    assert coarse == pytest.approx(fine, rel=0.04)


def test_other_theories_state_no_band() -> None:
    found = predict(Transformer(**SMALL), theory="published")
    for ask in (lambda: found.variance_band, lambda: found.expects(variance={1: 2.0})):
        with pytest.raises(DomainError, match="refined"):
            ask()


# --- is it expected -------------------------------------------------------------------------------

DEEP = Transformer(4, 64, 4, 12)
PREDICTION = predict(DEEP, correlation=0.2)


def test_a_draw_is_expected_and_a_number_far_away_is_not() -> None:
    seen = moments.simulate(DEEP, correlation=0.2, seeds=12, batch=1).samples["variance"]
    said = [PREDICTION.expects(variance={4: float(v)}) for v in seen[:, 4]]
    assert sum(map(bool, said)) >= 10  # of which one in twenty is outside
    for draw in seen[:3]:
        every = {n: float(v) for n, v in enumerate(draw)}
        assert PREDICTION.expects(variance=every).verdict != "not expected"
    far = PREDICTION.expects(variance={4: 3 * PREDICTION.variance[4]})
    assert not far
    assert far.verdict == "not expected"
    assert "variance" in str(far)
    assert "at layer 4" in str(far)


def test_the_points_are_the_band() -> None:
    (point,) = PREDICTION.expects(variance={3: 7.0}).points
    band = PREDICTION.variance_band[:, 3]
    # with the theory's own 2 % in quadrature
    wide = math.hypot(math.log(band[1] / band[0]) / 2, 0.02 * NORMAL_95)
    assert math.log(point.high / point.low) / 2 == pytest.approx(wide, rel=1e-6)
    assert point.deviations * wide / NORMAL_95 == pytest.approx(
        math.log(7.0 / math.sqrt(band[0] * band[1])), rel=1e-6
    )
    middle = math.sqrt(point.low * point.high)
    doubtful = middle * math.exp(2.5 / NORMAL_95 * wide)
    assert PREDICTION.expects(variance={3: doubtful}).verdict == "doubtful"
    assert PREDICTION.expects(variance={3: middle}).verdict == "expected"
    fewer = PREDICTION.expects(variance={3: 7.0}, draws=16).points[0]
    assert fewer.high / fewer.low < point.high / point.low


@pytest.mark.parametrize(
    ("slip", "named"),
    [
        (lambda m: m.replace(branch_scale=1.0), "no branch scale"),
        (lambda m: m.replace(branch_scale=0.35**2), "the branch scale applied twice"),
        (lambda m: m.replace(norm="post"), "post-ln"),
        (lambda m: m.replace(norm="sandwich"), "sandwich-ln"),
        (
            lambda m: m.replace(weights=m.weights.replace(value=9 * m.weights.value)),
            "value alone with three times the std",
        ),
    ],
)
def test_what_would_give_it_is_named(slip: Any, named: str) -> None:
    """Of a network with that slip, its own prediction stands for the measurement."""
    model = DEEP.replace(branch_scale=0.35)
    prediction = predict(model, correlation=0.2)
    wrong = predict(slip(model), correlation=0.2)
    seen = {n: float(wrong.variance[n]) for n in (1, 2, 4)}
    found = prediction.expects(variance=seen)
    assert not found
    assert any(named in cause.words for cause in found.causes), str(found)
    best = found.causes[0]
    assert best.off < 0.5
    assert "what would explain it" in str(found)
    assert named in found.to_frame()["causes"][0]


def test_a_depth_scale_left_out() -> None:
    model = DEEP.with_scheme("scaled-init")
    whole = {"output": model.weights.value, "ffn_out": model.weights.ffn_in}
    entering = {"variance": 1e-3, "correlation": 0.2}
    wrong = predict(model.replace(weights=model.weights.replace(**whole)), **entering)
    found = predict(model, **entering).expects(variance={4: float(wrong.variance[4])})
    assert any(one.words == "no depth scale on output and ffn_out" for one in found.causes)


def test_a_gradient_is_judged_by_its_own_band() -> None:
    seen = {0: float(PREDICTION.grad_variance[0])}
    assert PREDICTION.expects(grad_variance=seen)
    assert not PREDICTION.expects(grad_variance={0: 50 * seen[0]})


def test_tokens_that_do_not_correlate_leave_other_schemes() -> None:
    """A matrix that was measured may have tokens correlate by a little below 0."""
    table = Embedding(40, 1.0, 1.0)
    model = Transformer(**SMALL, activation="relu", norm="post", embedding=table)
    with mock.patch("moments.scheme.dslm._input_correlation", return_value=-1e-3):
        found = predict(model).expects(variance={3: 3.0})
        assert "not expected" in str(found)
        with pytest.raises(DomainError, match=r"correlate by -0.001, and must be above 0"):
            model.with_scheme("dslm")


def test_nothing_that_gives_it() -> None:
    found = PREDICTION.expects(variance={4: 1e-9})
    assert found.causes == ()
    assert "nearest is" in str(found)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "no measured numbers"),
        ({"variance": {5: 1.0}}, "layer = 5"),
        ({"variance": {1: -1.0}}, r"variance\[1\]"),
        ({"variance": 20.0}, "a mapping"),
        ({"variance": {1: 1.0}, "draws": 0}, "draws"),
    ],
)
def test_bad_measurements(given: dict[str, Any], named: str) -> None:
    with pytest.raises(DomainError, match=named):
        PREDICTION.expects(**given)


# --- the command and the check --------------------------------------------------------------------


CONFIG = {"model_type": "gpt2", "n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 16}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


def told(config: Path, *arguments: str) -> Any:
    from moments.cli import app

    result = CliRunner().invoke(app, ["check", str(config), *arguments])
    if isinstance(result.exception, DomainError):
        raise result.exception
    return result


def test_the_command_says_whether_a_number_is_expected(config: Path) -> None:
    right = predict(moments.from_huggingface(CONFIG)).variance
    found = told(config, "--measured", f"variance@3={right[3]}", "--measured", f"{right[2]}@2")
    assert found.exit_code == 0
    assert "nothing found wrong" in found.output
    assert (
        "note: expected: variance"
        in told(config, "--measured", f"variance@3={right[3]}", "--all").output
    )
    found = told(config, "--measured", "variance@3=20")
    assert found.exit_code == 1
    assert "1. variance 20 at layer 3, where" in found.output
    assert "[error: unexpected variance]" in " ".join(found.output.split())


@pytest.mark.parametrize(
    "text", ["20", "variance@12", "loss@3=2", "variance@x=2", "variance@3=many", "@3=2"]
)
def test_what_the_command_does_not_read(text: str, config: Path) -> None:
    with pytest.raises(DomainError, match="--measured"):
        told(config, "--measured", text)


def test_a_number_for_each_place(config: Path) -> None:
    with pytest.raises(DomainError, match="one number per place"):
        told(config, "--measured", "20@2", "--measured", "variance@2=21")


def test_a_check_takes_what_was_measured() -> None:
    expected = PREDICTION.variance[4]
    report = moments.check(DEEP, measured={4: 40 * expected})
    (found,) = [one for one in report.findings if one.kind == "unexpected variance"]
    assert found.layers == (4,)
    assert found.measured == pytest.approx(40 * expected)
    with pytest.raises(AssertionError, match="unexpected variance"):
        report.assert_healthy()
    of_gradient = {"grad_variance": {4: 1.0}}
    fine = moments.check(DEEP, measured=of_gradient)
    assert any(note.startswith("expected: gradient variance") for note in fine.notes)


@pytest.mark.parametrize("placed", [True, "after-block"])
def test_a_slip_that_a_model_cannot_have_is_left_out(placed: Any) -> None:
    """LayerNorm Scaling at a norm's output has no place without norms."""
    p = predict(moments.preset("gpt2").replace(layers=2, layernorm_scaling=placed))
    judged = str(p.expects(variance={2: 1e6}))
    assert judged.startswith("not expected: variance 1e+06 at layer 2")
