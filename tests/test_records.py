"""The tree of records that a prediction leaves: it mirrors the declaration, pickles and copies."""

from __future__ import annotations

import concurrent.futures
import copy
import itertools
import multiprocessing
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moments
from moments.engine.trace import Record

BASE = moments.Transformer(2, 32, 4, 8, dropout=0.1)
TABLE = moments.Embedding(50, 0.02)

CASES: dict[str, tuple[moments.Transformer, dict[str, Any]]] = {
    "pre": (BASE.replace(biases=moments.Biases.torch_default(32)), {}),
    "b2t": (BASE.replace(norm="b2t"), {}),
    "hybrid": (BASE.replace(norm="hybrid"), {}),
    "parallel": (BASE.replace(parallel=True), {}),
    "gated": (BASE.replace(activation="swiglu", normalization="rmsnorm"), {}),
    "dyt": (BASE.replace(normalization="dyt", norm_affine=True), {}),
    "causal": (BASE.replace(causal=True, kv_heads=2), {}),
    "classes": (BASE.replace(causal=True, seq_len=40), {}),
    "rotary": (BASE.replace(causal=True, rotary=moments.Rotary()), {}),
    "normalised queries": (BASE.replace(qk_norm="rmsnorm", norm_affine=True), {}),
    "decoder": (BASE.replace(encoder=moments.Transformer(2, 48, 4, 12)), {}),
    "deep": (BASE.replace(layers=60), {}),
    "text": (
        BASE.replace(causal=True, embedding=TABLE, head=moments.Head()),
        {"token_ids": np.arange(16).reshape(2, 8)},
    ),
    "masked": (
        BASE.replace(embedding=TABLE, head=moments.Head(transform="gelu", transform_variance=0.03)),
        {},
    ),
    "published": (BASE, {"theory": "published"}),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        yield


def predicted(case: str) -> moments.Prediction:
    model, inputs = CASES[case]
    return moments.predict(model, **inputs)


def assert_same(one: moments.Prediction, other: moments.Prediction) -> None:
    """Everything that can be asked of them, to the last bit."""
    assert one.to_frame().equals(other.to_frame())
    assert one.weight_gradients().equals(other.weight_gradients())
    assert one.attention().equals(other.attention())
    if one.theory == "refined":
        np.testing.assert_array_equal(one.grad_variance_band, other.grad_variance_band)
        assert one.to_json() == other.to_json()
    if one.encoder is not None:
        assert other.encoder is not None
        assert_same(one.encoder, other.encoder)


@pytest.mark.parametrize("case", CASES)
def test_a_prediction_pickles_and_copies(case: str) -> None:
    plain = predicted(case)
    text = pickle.dumps(plain)  # before anything is asked of it
    assert_same(pickle.loads(text), plain)
    for again in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert again.weight_gradients().equals(plain.weight_gradients())


def test_predictions_cross_processes() -> None:
    cases = ["pre", "causal", "decoder"]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        for case, found in zip(cases, pool.map(predicted, cases), strict=True):
            assert_same(found, predicted(case))


def test_laws_are_found_again_not_copied() -> None:
    for name in ("relu", "leaky_relu(0.2)", "layernorm", "biased_linear"):
        laws = moments.component(name)
        assert pickle.loads(pickle.dumps(laws)) is laws
        assert copy.deepcopy(laws) is laws


@pytest.mark.parametrize("case", ["pre", "b2t", "parallel", "decoder", "deep"])
def test_records_mirror_the_declaration(case: str) -> None:
    """Every node of the declaration has a record, and what one hands on the next receives."""
    trace = predicted(case).trace
    assert trace.stack is not None
    met = 0
    for record in trace.stack.walk():
        assert tuple(one.component for one in record.children) == record.component.children
        assert record.grad_out is not None
        assert record.grad_in is not None
        met += 1
    assert met > 10 * trace.stack.children[-1].layer
    assert _chained(trace.stack.children)
    assert [point.site for point in trace.points].count("stream") == 1 + len(trace.layers)


def _chained(records: tuple[Record, ...]) -> bool:
    for below, above in itertools.pairwise(records):
        np.testing.assert_allclose(below.output.kernel.diagonal, above.input.kernel.diagonal)
        sent, received = above.grad_in.kernel, below.grad_out.kernel
        np.testing.assert_allclose(sent.diagonal, received.diagonal, rtol=1e-12)
    return True


def test_a_record_can_be_asked_again() -> None:
    """`backward` makes a record anew: the one it is asked of stays as it was."""
    record = predicted("pre").trace.layers[1]
    twice = record.grad_out.with_kernel(record.grad_out.kernel.scaled(2.0))
    again = record.backward(twice)
    ratio = again.grad_in.kernel.diagonal / record.grad_in.kernel.diagonal
    assert ratio == pytest.approx(2.0, rel=0.02)  # directions are of order 1/width
    assert record.grad_out is not again.grad_out
