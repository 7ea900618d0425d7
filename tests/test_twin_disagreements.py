"""What a search over random declarations found: predictions that the torch twin contradicted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from moments.errors import DomainError
from moments.model.embedding import Embedding
from moments.model.head import Head
from moments.model.transformer import Transformer
from moments.model.weights import Biases, Weights
from moments.prediction.measurement import Measurement
from moments.prediction.predict import predict
from moments.prediction.result import Prediction
from moments.simulation.run import simulate

IDS = np.array([3, 1, 4, 1, 5, 0, 2, 6, 5, 3, 5, 8, 9, 7, 0, 9])
WORDS = 40
SMALL = {"layers": 1, "d_model": 64, "heads": 2, "seq_len": len(IDS)}


def both(model: Transformer, seeds: int, **inputs: Any) -> tuple[Prediction, Measurement]:
    return predict(model, **inputs), simulate(model, seeds=seeds, seed=3, batch=1, **inputs)


def test_dyt_has_no_place_among_queries_keys_and_values() -> None:
    """It was predicted as a LayerNorm: gradients of queries 250 times too large in one layer."""
    with pytest.raises(DomainError, match="normalization"):
        Transformer(**SMALL, norm="hybrid", normalization="dyt")


def test_logits_of_a_hidden_layer_without_a_norm_hold_its_mean() -> None:
    """E gelu(z)^2, drawn, where its variance stood before: 22 % less."""
    head = Head(
        loss="masked",
        tied=False,
        weight_variance=0.02,
        transform="gelu",
        transform_variance=1.5 / 64,
        transform_norm=False,
    )
    model = Transformer(**SMALL, embedding=Embedding(WORDS, 1.0), head=head)
    draws = torch.nn.functional.gelu(
        math.sqrt(1.5) * torch.randn(10**6, generator=torch.Generator().manual_seed(0))
    )
    found = predict(model, token_ids=IDS)
    wanted = 64 * 0.02 * float(draws.square().mean())
    assert found.logit_variance == pytest.approx(wanted, rel=0.01)


def test_hidden_layer_of_dyt_is_not_divided_by_a_norm() -> None:
    head = Head(
        loss="masked", tied=False, weight_variance=0.03, transform="tanh", transform_variance=0.005
    )
    model = Transformer(**SMALL, normalization="dyt", embedding=Embedding(WORDS, 1.0), head=head)
    predicted, measured = both(model, 48, token_ids=IDS)
    assert measured.logit_variance is not None
    assert predicted.logit_variance == pytest.approx(measured.logit_variance, rel=0.06)


@pytest.mark.parametrize("placement", ["pre", "none"])
def test_padding_rows_carry_nothing_to_a_tied_head(placement: str) -> None:
    """A zero row in a small stream counted as more than all of it: a crash at best."""
    table = Embedding(WORDS, 1.0, position_variance=0.05, padding_id=0)
    head = Head(loss="masked", output_scale=0.01, norm=placement == "pre")
    model = Transformer(**SMALL, norm=placement, branch_scale=0.0, embedding=table, head=head)
    targets = np.where(IDS == 0, 4, -100)
    predicted, measured = both(model, 128, token_ids=IDS, targets=targets)
    assert predicted.loss == pytest.approx(measured.loss, rel=0.02)
    last = predicted.grad_variance[-1]
    assert last == pytest.approx(measured.grad_variance[-1], rel=0.1)


def test_dropout_of_a_classifier_follows_its_pool() -> None:
    """What the head reads is dropped: tokens of one mean share its mask."""
    head = Head(loss="classification", tied=False, weight_variance=0.02, classes=5, pool="mean")
    model = Transformer(**SMALL, head=head.replace(dropout=0.3))
    predicted, measured = both(model, 32)
    assert measured.grad_correlation[-1] > 0.95
    assert abs(predicted.grad_correlation[-1] - measured.grad_correlation[-1]) < 0.03


def test_dyt_behind_saturated_dyt_is_predicted_with_a_note() -> None:
    """Its norms vary less than Gaussian entries' would: a negative variance was refused."""
    table = Embedding(WORDS, 18.0, norm=True)
    model = Transformer(**SMALL, normalization="dyt", embedding=table)
    with pytest.warns(match="take these for Gaussian"):
        predicted = predict(model, token_ids=IDS)
    measured = simulate(model, seeds=24, token_ids=IDS)
    np.testing.assert_allclose(predicted.variance, measured.variance, rtol=0.06)


@pytest.mark.parametrize(("variance", "cap"), [(1.0, 3.0), (2.0, 3.0), (4.0, 12.0)])
def test_a_soft_cap_bends_most_where_attention_looks(variance: float, cap: float) -> None:
    """Its linear part alone left gradients of queries 28, 60 and 11 % too large, without a note."""
    width, each = 96, math.sqrt(variance) / 96
    weights = Weights(each, each, 1 / width, 1 / width, 1 / width, 1 / width)
    like = {"layers": 1, "d_model": width, "heads": 2, "d_ff": 64, "weights": weights}
    model = Transformer(**like, seq_len=24, logit_softcap=cap)
    predicted, measured = predict(model), simulate(model, seeds=80, batch=2)
    found, truth = (
        frame.set_index("weight").squared_norm
        for frame in (predicted.weight_gradients(), measured.weight_gradients())
    )
    uncapped = predict(model.replace(logit_softcap=None)).weight_gradients().squared_norm
    assert found["query"] < 0.98 * uncapped[0]
    for name, allowed in (("query", 0.18), ("key", 0.18), ("value", 0.08)):
        assert found[name] == pytest.approx(truth[name], rel=allowed)


@pytest.mark.parametrize("variance", [1.0, 3.0])
def test_norms_of_queries_keys_and_values_divide_by_biases_too(variance: float) -> None:
    """Of values as large as their biases gradients were 68 to 82 % too large; those of biases of
    tokens of another size than 1, by that size."""
    each = 0.3 / 64
    weights = Weights(each, each, each, 1 / 64, 1 / 64, 1 / 64)
    biases = Biases(query=0.1, key=None, value=0.3, output=None, ffn_in=None, ffn_out=None)
    model = Transformer(**SMALL, norm="hybrid", weights=weights, biases=biases)
    inputs = {"variance": variance, "correlation": 0.3}
    predicted, measured = predict(model, **inputs), simulate(model, seeds=60, **inputs)
    found, truth = (
        frame.set_index("weight").squared_norm
        for frame in (predicted.weight_gradients(), measured.weight_gradients())
    )
    assert abs(predicted.correlation[1] - measured.correlation[1]) < 0.03
    for name in ("query", "key", "value", "output", "value.bias", "query.bias"):
        assert found[name] == pytest.approx(truth[name], rel=0.15), name


def test_gains_of_normalised_queries_and_keys_are_simulated() -> None:
    """They were predicted, and the twin had none to hold against."""
    memory = Transformer(**SMALL, norm_affine=True)
    model = Transformer(**SMALL, qk_norm="rmsnorm", norm_affine=True, encoder=memory)
    predicted, measured = predict(model), simulate(model, seeds=60)
    found, truth = (
        frame.set_index("weight").squared_norm
        for frame in (predicted.weight_gradients(), measured.weight_gradients())
    )
    for side in ("query", "key", "cross_query", "cross_key"):
        name = f"{side}.norm.gain"
        assert found[name] == pytest.approx(truth[name], rel=0.2), name


def test_padding_rows_beside_a_classifier() -> None:
    head = Head(loss="classification", tied=False, weight_variance=0.002, classes=3)
    table = Embedding(WORDS, 1.0, position_variance=0.1, padding_id=0)
    both_texts = predict(Transformer(**SMALL, embedding=table, head=head), token_ids=[IDS, IDS])
    assert np.isfinite(both_texts.loss)
