"""Predictions beside measurements: the frame, its errors, and real modules on real text."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import moments
from moments.cli import app
from moments.prediction.measurement import last_grad_kernel
from moments.show.expected import allowed_outside, log_variance, over_draws
from moments.show.verdict import judge

torch = pytest.importorskip("torch")

MODEL = moments.Transformer(layers=2, d_model=64, heads=2, seq_len=16, dropout=0.1)


@pytest.fixture(scope="module")
def measured() -> moments.Measurement:
    return moments.simulate(MODEL, correlation=0.3, seeds=12, batch=2, seed=1)


@pytest.fixture(scope="module")
def comparison(measured: moments.Measurement) -> moments.Comparison:
    return moments.compare(moments.predict(MODEL, correlation=0.3), measured)


def test_frame_has_every_site_and_its_errors(comparison: moments.Comparison) -> None:
    frame = comparison.to_frame()
    predicted = set(comparison.prediction.to_frame().site)
    assert set(frame.site) == predicted
    stream = frame[(frame.site == "stream") & (frame.quantity == "variance")]
    np.testing.assert_allclose(stream.predicted, comparison.prediction.variance)
    np.testing.assert_allclose(stream.measured, comparison.measurement.variance)
    np.testing.assert_allclose(stream.error, stream.predicted / stream.measured - 1)
    correlations = frame[frame.quantity == "correlation"]
    np.testing.assert_allclose(correlations.error, correlations.predicted - correlations.measured)
    assert (frame.excess <= frame.error.abs() + 1e-12).all()


def test_summary_counts_what_exceeds_two_standard_errors(comparison: moments.Comparison) -> None:
    summary = comparison.summary().set_index(["points", "quantity"])
    row = summary.loc[("stream", "variance")]
    assert row["mean"] <= row["max"]
    assert row["excess"] <= row["mean"]
    assert row["r_squared"] > 0.95


def test_what_varies_no_more_than_its_noise_has_no_fit() -> None:
    """Ten draws about one value, and the value as their prediction; the same about a slope."""
    from moments.show.comparison import _r_squared

    noise = 0.1 * np.random.default_rng(1).standard_normal(10)
    stderr = pd.Series(np.full(10, 0.1))
    for slope, has in ((0.0, False), (1.0, True)):
        value = 2 + slope * np.arange(10)
        fit = _r_squared(pd.Series(value), pd.Series(value + noise), stderr)
        assert math.isfinite(fit) is has


def test_an_error_of_nothing_has_no_sign() -> None:
    from moments.show.report import _error

    assert _error("variance", -1e-9) == "+0.0%"
    assert _error("correlation", -1e-9) == "+0.000"
    assert _error("variance", -0.1) == "-10.0%"


def test_shown_as_text_and_picture(comparison: moments.Comparison) -> None:
    text = comparison.table()
    assert "signal along the residual stream" in text
    assert "±" in text
    figure = comparison.plot("a name")
    assert len(figure.axes) == 4
    assert figure.get_suptitle().startswith("a name: ")
    assert " ".join(figure.get_supxlabel().split()) == comparison.verdict()
    assert "Comparison(" in repr(comparison)


def legend(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_a_band_is_called_what_it_is() -> None:
    """A normalised stream hardly scatters over draws: its band is the tolerance."""
    for norm, label in (("post", "± 3.9 % granted to the theory"), ("pre", "95 % expected")):
        model = moments.Transformer(2, 48, 4, 12, norm=norm, dropout=0.1)
        simulated = moments.simulate(model, correlation=0.3, seeds=4, batch=1)
        predicted = moments.predict(model, correlation=0.3)
        found = moments.compare(predicted, simulated)
        beside = found.plot().legends[0]
        named = [text.get_text().replace("\n", " ") for text in beside.get_texts()]
        assert any(text.startswith(label) for text in named), (norm, named)


def test_a_prediction_shows_the_bands_it_has() -> None:
    def drawn(**changes: Any) -> tuple[Any, list[list[str]]]:
        model = moments.Transformer(
            **{"layers": 2, "d_model": 48, "heads": 4, "seq_len": 12} | changes
        )
        figure = moments.predict(model, correlation=0.3).plot("tiny")
        return figure, [legend(figure.axes[index]) for index in (0, 2)]

    figure, both = drawn()
    assert both == [["95 % of draws", "mean over draws"]] * 2
    assert figure.get_suptitle().startswith("tiny: 2 layers")
    assert "token correlation 0.30 to 0." in figure.get_supxlabel()
    with pytest.warns(moments.ValidityWarning, match="which nothing normalises"):
        _, several = drawn(norm="none")
    assert all("95 % of draws" in names for names in several)
    published = moments.predict(moments.Transformer(2, 48, 4, 12), theory="published").plot()
    assert [legend(published.axes[index]) for index in (0, 2)] == [["mean over draws"]] * 2


def test_measurement_survives_json(measured: moments.Measurement) -> None:
    data = json.loads(measured.to_json())
    again = moments.Measurement.from_dict(data)
    np.testing.assert_allclose(again.grad_variance, measured.grad_variance)


def test_last_gradient_has_the_measured_moments(measured: moments.Measurement) -> None:
    kernel = last_grad_kernel(measured)
    length = len(kernel)
    assert np.trace(kernel) / length == pytest.approx(measured.grad_variance[-1], rel=1e-6)
    pairs = (kernel.sum() - np.trace(kernel)) / (length * (length - 1))
    expected = measured.grad_correlation[-1] * measured.grad_variance[-1]
    assert pairs == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_only_like_is_compared_with_like(measured: moments.Measurement) -> None:
    with pytest.raises(moments.DomainError, match="3 layers"):
        moments.compare(moments.predict(MODEL.replace(layers=3)), measured)
    with pytest.raises(moments.DomainError, match="Measurement"):
        moments.compare(moments.predict(MODEL), MODEL)  # type: ignore[arg-type]
    batch = moments.predict(MODEL, correlation=np.array([0.1, 0.2]))
    with pytest.raises(moments.DomainError, match="single configuration"):
        moments.compare(batch, measured)


# --- the band -------------------------------------------------------------------------------------


def one_draw(measured: moments.Measurement, **changes: object) -> moments.Measurement:
    """As if one draw had given these numbers."""
    nothing = np.full_like(measured.variance, math.nan)
    quantities = ("variance", "correlation", "grad_variance", "grad_correlation")
    unknown = {f"{name}_stderr": nothing for name in quantities}
    return dataclasses.replace(measured, seeds=1, **unknown, **changes)  # type: ignore[arg-type]


def test_one_draw_is_judged_by_the_predicted_band(measured: moments.Measurement) -> None:
    prediction = moments.predict(MODEL, correlation=0.3, batch=2)
    points = moments.compare(prediction, one_draw(measured), tolerance=0).points()
    gradient = points[points.quantity == "grad_variance"]
    np.testing.assert_allclose([gradient.low, gradient.high], prediction.grad_variance_band)
    wider = moments.compare(moments.predict(MODEL, correlation=0.3), one_draw(measured))
    gradient_two = wider.points().query("quantity == 'grad_variance'")
    assert (gradient_two.high.to_numpy() > gradient.high.to_numpy()).all(), "tolerance adds"
    assert (gradient_two.high < 1.1 * gradient.high.to_numpy()).all(), "the batch is taken over"


def test_the_mean_of_draws_has_the_variance_of_a_mean() -> None:
    one = np.array([0.01, 0.5, 2.0])
    np.testing.assert_allclose(over_draws(one, 1), one)
    relative = np.expm1(over_draws(one, 7))
    np.testing.assert_allclose(relative, np.expm1(one) / 7)


def test_the_scatter_of_the_signal_is_the_simulated_one(measured: moments.Measurement) -> None:
    """Twelve draws leave 20 % of the deviation to chance."""
    prediction = moments.predict(MODEL, correlation=0.3, batch=2)
    deviation = np.sqrt(log_variance(prediction.variance_band))
    seen = np.log(measured.samples["variance"]).std(0, ddof=1)
    assert np.all(np.abs(np.log(deviation / seen)) < math.log(2))


def test_outliers_are_the_points_that_were_moved(measured: moments.Measurement) -> None:
    prediction = moments.predict(MODEL, correlation=0.3, batch=2)
    right = one_draw(measured, variance=prediction.variance, grad_variance=prediction.grad_variance)
    comparison = moments.compare(prediction, right)
    assert comparison.outliers().empty
    assert comparison.verdict().startswith(
        "the growth you see is expected: variance x 3.17 from first to last "
        "layer (x 3.17 predicted)"
    )
    moved = prediction.grad_variance * np.array([3.0, 1.0, 1.0])
    comparison = moments.compare(
        prediction, one_draw(measured, variance=prediction.variance, grad_variance=moved)
    )
    (row,) = comparison.outliers(3.0).to_dict("records")
    assert (row["layer"], row["quantity"]) == (0, "grad_variance")
    assert row["error"] == pytest.approx(1 / 3 - 1)
    assert "gradient variance is outside its band at point 0" in comparison.verdict()
    assert "3 times the prediction" in comparison.verdict()
    assert "*" in comparison.table()


def test_so_many_points_may_lie_outside() -> None:
    """By hand: of 6 points 3 or more lie outside with probability .0022, 2 or more with .033."""
    for points in (1, 2, 6, 26, 98):
        allowed = allowed_outside(points)
        terms = [math.comb(points, k) * 0.05**k * 0.95 ** (points - k) for k in range(points + 1)]
        assert sum(terms[allowed + 1 :]) < math.erfc(3 / math.sqrt(2))
        assert sum(terms[allowed:]) >= math.erfc(3 / math.sqrt(2))
    assert allowed_outside(6) == 2


def test_many_points_just_outside_are_not_expected(measured: moments.Measurement) -> None:
    prediction = moments.predict(MODEL, correlation=0.3, batch=2)
    right = one_draw(measured, variance=prediction.variance, grad_variance=prediction.grad_variance)
    ranges = moments.compare(prediction, right).ranges

    def moved(variances: tuple[int, ...], gradients: tuple[int, ...]) -> moments.Comparison:
        """Points at 2.5 standard deviations, the others at the middle of their bands."""
        found = {}
        for name, places in (("variance", variances), ("grad_variance", gradients)):
            deviation = ranges[name].deviation
            away = np.isin(np.arange(deviation.size), places) * 2.5 * deviation
            found[name] = ranges[name].mean * np.exp(away - deviation**2 / 2)
        return moments.compare(prediction, one_draw(measured, **found))

    two, three = moved((1, 2), ()), moved((1, 2), (0,))
    assert len(two.outliers()) == 2
    assert two.verdict().startswith("the growth you see is expected")
    assert len(three.outliers()) == 3
    assert three.outliers(3.0).empty
    assert three.verdict().startswith("the growth you see is doubtful: 3 of 6 points lie outside")
    assert "where up to 2 would by chance" in three.verdict()
    assert "2 of 6 points lie outside their 95 % bands, as happens by chance" in two.verdict()
    one = moved((1,), ()).verdict()
    assert "1 of 6 points lies outside its 95 % band, as happens by chance" in one


def test_what_a_prediction_was_given_is_no_evidence(measured: moments.Measurement) -> None:
    """The first variance and the last gradient, where they are the measurement's own."""
    draw = one_draw(measured)
    given = {"variance": float(draw.variance[0]), "grad_variance": float(draw.grad_variance[-1])}
    begun = moments.predict(MODEL, correlation=0.3, batch=2, **given)
    assert len(judge(moments.compare(begun, draw)).points) == 4
    free = moments.predict(MODEL, correlation=0.3, batch=2)
    assert len(judge(moments.compare(free, draw)).points) == 6


def test_weights_in_common_are_one_draw(measured: moments.Measurement) -> None:
    prediction = moments.predict(MODEL, correlation=0.3)
    both = [moments.compare(prediction, measured, same_weights=s) for s in (False, True)]
    narrow, wide = (c.ranges["grad_variance"].deviation[0] for c in both)
    assert wide > 2 * narrow
    with pytest.raises(moments.DomainError, match="tolerance"):
        moments.compare(prediction, measured, tolerance=-1)


def test_a_published_theory_has_the_measured_errors_alone(measured: moments.Measurement) -> None:
    prediction = moments.predict(MODEL, correlation=0.3, theory="published")
    deviation = moments.compare(prediction, measured, tolerance=0).ranges["variance"].deviation
    np.testing.assert_allclose(deviation, measured.variance_stderr / measured.variance)
    blind = moments.compare(prediction, one_draw(measured), tolerance=0)
    assert blind.points().deviations.isna().all()
    assert "it is not known whether" in blind.verdict()


def test_loss_logits_and_weight_gradients() -> None:
    small = moments.Transformer(
        2,
        48,
        4,
        12,
        causal=True,
        embedding=moments.Embedding(vocab_size=80, token_variance=0.01),
        head=moments.Head(),
    )
    ids = np.random.default_rng(0).integers(0, 80, (2, 12))
    measured = moments.simulate(small, token_ids=ids, seeds=4, seed=3)
    comparison = moments.compare(moments.predict(small, token_ids=ids), measured)
    outputs = comparison.outputs().set_index("quantity")
    assert list(outputs.index) == ["loss", "logit_variance", "gradient_norm"]
    assert abs(outputs.deviations["loss"]) < 4
    assert outputs.predicted["gradient_norm"] == pytest.approx(
        outputs.measured["gradient_norm"], rel=0.2
    )
    norms = comparison.weight_gradients()
    row = norms[(norms.layer == 2) & (norms.weight == "ffn_out")].iloc[0]
    table = measured.weight_gradients()
    expected = table[(table.layer == 2) & (table.weight == "ffn_out")].squared_norm.iloc[0]
    assert row.measured == expected
    assert row.error == pytest.approx(row.predicted / row.measured - 1)
    assert "loss" in comparison.table()
    assert "loss" in comparison.plot().get_suptitle()


def test_an_encoder_is_compared_too() -> None:
    encoder = moments.Transformer(1, 32, 2, 6)
    model = moments.Transformer(1, 32, 2, 8, causal=True, encoder=encoder)
    measured = moments.simulate(model, seeds=3, batch=1)
    comparison = moments.compare(moments.predict(model), measured)
    assert comparison.encoder is not None
    assert list(comparison.points()["stack"].unique()) == ["encoder.", ""]
    assert set(comparison.weight_gradients()["stack"]) == {"encoder.", ""}
    assert "encoder variance" in comparison.verdict()
    assert "encoder, signal along" in comparison.table()


# --- the commands ---------------------------------------------------------------------------------

TINY = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
CONFIGS = {
    "llama": {"vocab_size": 300, "num_key_value_heads": 2},
    "vit": {"image_size": 16, "patch_size": 4, "num_labels": 10},
}


def command(*arguments: str) -> tuple[int, dict[str, object]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_compare_predicts_the_real_loss(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind} | TINY | CONFIGS[kind]))
    length = [] if kind == "vit" else ["--seq-len", "16"]
    status, printed = command("compare", str(file), *length, "--seeds", "3", "--max-error", "0.2")
    assert status == 0
    (loss,) = (row for row in printed["outputs"] if row["quantity"] == "loss")  # type: ignore[attr-defined]
    assert abs(loss["deviations"]) < 4
    assert len(printed["points"]) == 6  # type: ignore[arg-type]
    assert str(printed["verdict"]).startswith("the growth you see is")


def test_compare_says_its_verdict_first(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "vit"} | TINY | CONFIGS["vit"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        words = ("--seeds", "2", "--layers", "1", "--no-picture")
        short = CliRunner().invoke(app, ["compare", str(file), *words])
        result = CliRunner().invoke(app, ["compare", str(file), *words, "--all"])
    first, *_, last = short.stdout.splitlines()
    assert first.startswith(f"{file.stem}: the growth you see is")
    assert "--all" in last
    assert result.exit_code == 0
    assert result.stdout.startswith("the growth you see is")
    assert result.stdout.index("mean, median and largest") < result.stdout.index("residual stream")


def test_audit_tells_a_scheme_from_the_default(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "bert", "vocab_size": 200} | TINY))
    status, printed = command("audit", str(file))
    assert (status, printed["passed"]) == (0, True)
    status, printed = command("audit", str(file), "--scheme", "ds-init")
    assert (status, printed["passed"]) == (1, False)
    assert "framework's own initialisation" in str(printed["findings"])
    model = moments.from_huggingface(str(file))
    assert model.weights is not None
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model": model.to_dict()}))
    assert command("audit", str(file), "--plan", str(plan))[0] == 0
    result = CliRunner().invoke(app, ["audit", "nothing"])
    assert isinstance(result.exception, moments.DomainError)


BERT = {
    "model_type": "bert",
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "max_position_embeddings": 64,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 512,
    "n_embd": 96,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
}


@pytest.mark.parametrize("config", [BERT, GPT2], ids=["bert", "gpt2"])
def test_real_modules_on_real_text(config: dict[str, object]) -> None:
    """What the configs declare is what the modules do, beyond three standard errors."""
    pytest.importorskip("transformers")
    from small_modules import measured

    measurement, ids = measured(config, 48, 10, seed=2)
    model = moments.from_huggingface(config, seq_len=48)
    prediction = moments.predict(model, token_ids=ids, grad_kernel=last_grad_kernel(measurement))
    frame = moments.compare(prediction, measurement).to_frame()
    frame["beyond"] = np.maximum(
        frame.error.abs()
        - 3 * (frame.error / (frame.predicted - frame.measured)).abs() * frame.stderr,
        0.0,
    )
    outputs = frame[frame.site.isin(["stream", "attention.dropout", "ffn.dropout"])]
    mean = outputs.groupby("quantity").beyond.mean()
    assert mean["variance"] < 0.01
    assert mean["correlation"] < 0.01
    assert mean["grad_variance"] < 0.03
    stream = frame[frame.site == "stream"].groupby("quantity").error.apply(lambda e: e.abs().mean())
    assert stream["variance"] < 0.03
    assert stream["correlation"] < 0.02
