"""DeepScaleLM's conditions, solved with each model's own laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import moments


def model(layers: int = 6, **changes: Any) -> moments.Transformer:
    fields = {"layers": layers, "d_model": 128, "heads": 4, "seq_len": 32, "dropout": 0.1}
    return moments.Transformer(**{**fields, **changes})


CASES: dict[str, dict[str, Any]] = {
    "gelu": {"activation": "gelu", "layers": 48},
    "post": {"activation": "gelu", "norm": "post"},
    "swiglu, grouped heads": {"activation": "swiglu", "d_ff": 340, "kv_heads": 2},
    "rmsnorm": {"normalization": "rmsnorm", "d_ff": 100},
    "causal": {"causal": True, "activation": "silu"},
    "b2t": {"norm": "b2t", "activation": "gelu"},
    "unnormalised": {"norm": "none", "activation": "tanh"},
}


@pytest.mark.parametrize("name", CASES)
def test_the_stream_keeps_unit_variance(name: str) -> None:
    scaled = model(**CASES[name]).with_scheme("dslm", input_correlation=0.227)
    prediction = moments.predict(scaled, correlation=0.9 * 0.227)
    np.testing.assert_allclose(prediction.variance, 1.0, rtol=1e-6)
    frame = prediction.to_frame()
    blocks = frame[frame.site.isin(["attention.dropout", "ffn.dropout"])]
    assert len(blocks) == 2 * scaled.layers
    np.testing.assert_allclose(blocks.variance, 1.0, rtol=1e-6)
    weights = scaled.weights
    assert weights is not None
    assert weights.value == weights.output
    assert weights.ffn_in == weights.ffn_out
    assert weights.query == 1 / 128
    if scaled.gated:
        assert weights.gate == weights.ffn_in


def test_solved_is_near_the_printed_constants_where_they_hold() -> None:
    """They neglect 1/L and 1/d: in an infinite model both are the same."""
    base = model(12, d_model=2048, seq_len=2048, heads=2)
    released, solved = (
        base.with_scheme("dslm", input_correlation=0.3, variant=variant).weights
        for variant in ("released", "solved")
    )
    assert released is not None
    assert solved is not None
    np.testing.assert_allclose(solved.ffn_in, released.ffn_in, rtol=1e-3)
    # Attention gathers r, 1 - p of it is lost to dropout's noise; the recursion takes 1 - p.
    np.testing.assert_allclose(solved.value, released.value, rtol=0.03)
    assert base.with_scheme("dslm", input_correlation=0.3).weights == released


def test_a_text_is_what_the_weights_are_solved_for() -> None:
    ids = np.arange(32) % 5
    base = model(embedding=moments.Embedding(50, 0.02, 0.02, dropout=0.1), activation="gelu")
    scaled = base.with_scheme("dslm", inputs={"token_ids": ids})
    np.testing.assert_allclose(moments.predict(scaled, token_ids=ids).variance, 1.0, rtol=1e-6)
    assert (
        np.abs(moments.predict(base.with_scheme("dslm"), token_ids=ids).variance - 1).max() > 0.01
    )


def test_an_encoder_and_its_decoder() -> None:
    base = model(4, causal=True, encoder=model(6, d_model=64))
    scaled = base.with_scheme("dslm", input_correlation=0.3)
    assert scaled.encoder is not None
    given = {"correlation": 0.9 * 0.3}
    prediction = moments.predict(scaled, **given, encoder_inputs=given)
    assert prediction.encoder is not None
    np.testing.assert_allclose(prediction.variance, 1.0, rtol=1e-6)
    np.testing.assert_allclose(prediction.encoder.variance, 1.0, rtol=1e-6)
    np.testing.assert_allclose(scaled.branch_scales**2, 2 / 4)
    np.testing.assert_allclose(scaled.encoder.branch_scales**2, 2 / 6)
    weights = scaled.weights
    assert weights is not None
    assert weights.cross_value == weights.cross_output != weights.value


@pytest.mark.parametrize("gated", [False, True])
def test_simplified(gated: bool) -> None:
    changes = {"activation": "gelu", "gated": gated}
    scaled = model(**changes).with_scheme("dslm", input_correlation=0.3, simplified=True)
    weights = scaled.weights
    assert weights is not None
    assert weights.value == weights.output
    np.testing.assert_allclose(weights.value, weights.ffn_in, rtol=1e-9)
    frame = moments.predict(scaled, correlation=0.9 * 0.3).to_frame()
    np.testing.assert_allclose(frame[frame.site == "ffn.dropout"].variance, 1.0, rtol=1e-9)
    assert frame[frame.site == "attention.dropout"].variance.max() < 0.9


def test_what_cannot_be_solved() -> None:
    with pytest.raises(moments.DomainError, match="normalises"):
        model(norm="sandwich").with_scheme("dslm", input_correlation=0.3)
    with pytest.raises(moments.DomainError, match="solved"):
        model().with_scheme("dslm", variant="released", inputs={"correlation": 0.3})
    with pytest.raises(moments.DomainError, match="mean square"):
        model(embedding=moments.Embedding(9, 1.0, dropout=0.6, positions="sinusoidal")).with_scheme(
            "dslm"
        )
