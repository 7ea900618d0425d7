"""Predictions beside measurements: the frame, its errors, and real modules on real text."""

from __future__ import annotations

import json

import numpy as np
import pytest

import moments
from moments.comparison import last_gradient

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


def test_shown_as_text_and_picture(comparison: moments.Comparison) -> None:
    text = comparison.table()
    assert "signal along the residual stream" in text
    assert "±" in text
    figure = comparison.plot()
    assert len(figure.axes) == 4
    assert "Comparison(" in repr(comparison)


def test_measurement_survives_json(measured: moments.Measurement) -> None:
    data = json.loads(measured.to_json())
    again = moments.Measurement.from_dict(data)
    np.testing.assert_allclose(again.grad_variance, measured.grad_variance)


def test_last_gradient_has_the_measured_moments(measured: moments.Measurement) -> None:
    kernel = last_gradient(measured)
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
    from moments.huggingface_modules import measure_config

    measurement, ids = measure_config(config, seq_len=48, batch=2, seeds=10, seed=2)
    model = moments.from_huggingface(config, seq_len=48)
    prediction = moments.predict(model, token_ids=ids, grad_kernel=last_gradient(measurement))
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
