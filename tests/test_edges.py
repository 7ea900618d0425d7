"""Every answer of a prediction on the smallest models there are, and on matrices of zeros: numbers,
or a refusal in words."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import moments
from moments.formulas.quantization import E4M3, Entries, cast, loss
from moments.prediction.resolution import most_tokens

SMALL = moments.Transformer(2, 8, 2, 4, causal=True)
XAVIER = moments.Weights.xavier(8, 32)
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 8,
    "n_head": 2,
    "vocab_size": 20,
    "n_positions": 64,
}
T5 = {"model_type": "t5", "num_layers": 1, "d_model": 8, "num_heads": 2, "d_kv": 4, "d_ff": 16}
GATED = SMALL.replace(activation="swiglu", weights=replace(XAVIER, gate=1 / 20))
DELTA = moments.GatedDeltaNet(2, 2, 4, 4, 0.1, 0.1, 0.1)
NONE = moments.Weights(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
ZEROS = np.zeros((1, 4), int)

pytestmark = pytest.mark.filterwarnings("ignore::moments.ValidityWarning")

Case = tuple[Callable[[], moments.Transformer], dict[str, Any]]


def small(**changes: Any) -> Callable[[], moments.Transformer]:
    return lambda: SMALL.replace(**changes)


def without(*names: str, model: moments.Transformer = SMALL) -> Callable[[], moments.Transformer]:
    weights = replace(model.weights or XAVIER, **dict.fromkeys(names, 0.0))
    return lambda: model.replace(weights=weights)


CASES: dict[str, Case] = {
    "one token": (small(seq_len=1), {"tokens": True}),
    "one token, no mask": (small(seq_len=1, causal=False), {}),
    "two tokens": (small(seq_len=2), {"tokens": True}),
    "GPT-2 of one token": (lambda: moments.from_huggingface(GPT2, seq_len=1), {}),
    "GPT-2 of one word": (lambda: moments.from_huggingface(GPT2, seq_len=4), {"token_ids": ZEROS}),
    "encoder and decoder": (
        lambda: moments.from_huggingface(T5 | {"vocab_size": 20}, seq_len=1),
        {},
    ),
    "one head": (small(heads=1), {"tokens": True}),
    "one hidden unit": (small(d_ff=1), {}),
    "one layer": (small(layers=1), {}),
    "one expert": (small(ffn=moments.Experts(1, 1)), {}),
    "one of two experts": (small(ffn=moments.Experts(2, 1, normalised="all")), {}),
    "no values": (without("value"), {"tokens": True}),
    "no output": (without("output", "ffn_out"), {"tokens": True}),
    "no gate": (without("gate", model=GATED), {"tokens": True}),
    "no other factor": (without("ffn_in", model=GATED), {}),
    "no weights": (small(norm="none", weights=NONE), {"tokens": True}),
    "no weights, Post-LN": (small(norm="post", weights=NONE), {}),
    "tokens all the same": (small(), {"correlation": 1.0, "tokens": True}),
    "no gradient": (small(), {"grad_variance": 0.0}),
    "window of one": (small(window=1), {"tokens": True}),
    "delta net of one token": (small(seq_len=1, mixer=DELTA), {}),
    "attention of one token": (small(seq_len=1, mixer=moments.LinearAttention(2, 4, 4)), {}),
}

MISSING = {"correlation", "grad_correlation", "snr", "product_snr", "weight_variance", "alignment"}
MISSING |= {"coherent", "relative_change"}
"""Columns that say so where a row has none."""

ANSWERS: dict[str, Callable[[Any], Any]] = {
    "text": lambda p: [repr(p), p.table()],
    "frames": lambda p: [p.to_frame(), p.attention()],
    "json": lambda p: json.loads(p.to_json()),
    "weights": lambda p: p.weight_gradients(),
    "experts": lambda p: p.experts(),
    "bands": lambda p: [p.variance_band, p.grad_variance_band, p.grad_variance_typical],
    "tangent kernel": lambda p: json.loads(p.tangent_kernel().to_json()),
    "expects": lambda p: p.expects(variance={p.model.layers: 2.0}).to_frame(),
    "expects a gradient": lambda p: str(p.expects(grad_variance={0: 2.0})),
    "low precision": lambda p: [p.low_precision(name) for name in ("fp8", "fp8-row", "nvfp4")],
    "step": lambda p: json.loads(p.after("adamw", 1e-3).to_json()),
    "step's frames": lambda p: [p.after("sgd", 1e-3).to_frame(), p.after("sgd", 1e-3).weights()],
    "sharpness": lambda p: json.loads(p.sharpness("sgd").to_json()),
    "a layer": lambda p: [str(moments.explain(p.model, layer=1))],
}


def finite(value: Any) -> bool:
    if isinstance(value, pd.DataFrame):
        numbers = value.select_dtypes("number")
        missing = [name for name in numbers if numbers[name].isna().any()]
        return set(missing) <= MISSING and not np.isinf(numbers).any(axis=None)
    if isinstance(value, str):
        return not {"nan", "inf", "-inf"} & set(value.replace(",", " ").split())
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return value is None or bool(np.all(np.isfinite(value)))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_finite_or_a_refusal(case: str) -> None:
    declared, given = CASES[case]
    prediction, answered = moments.predict(declared(), **given), 0
    for name, answer in ANSWERS.items():
        with contextlib.suppress(moments.DomainError):
            assert finite(answer(prediction)), name
            answered += 1
    assert answered > 6


def test_zeros_lose_nothing() -> None:
    """As a cast of them does."""
    zeros = np.zeros((3, 64))
    changed, clipped = cast(zeros, E4M3, "any", 16)
    assert np.array_equal(changed, zeros)
    assert not clipped
    lost = loss(Entries(zeros, np.ones(zeros.shape)), E4M3, "any", 16)
    assert (lost.noise, lost.zero, lost.clipped) == (0.0, 0.0, 0.0)


def test_products_with_zeros_are_known_by_their_rows() -> None:
    prediction = moments.predict(without("output", "ffn_out")(), tokens=True)
    rows = prediction.low_precision("mxfp8").set_index(["weight", "product", "operand"])
    rows = rows[rows.layer == 1]
    nothing = rows.product_snr.isna()
    forward, back, weights = (
        nothing.xs(name, level="product").groupby("weight").all()
        for name in ("forward", "input gradient", "weight gradient")
    )
    # neither branch gives anything, and no gradient comes through it
    assert set(forward.index[forward]) == {"output", "ffn_out"}
    assert back.all()
    assert set(weights.index[~weights]) == {"output", "ffn_out"}
    alone = rows.snr.isna().sort_index()
    assert not alone["query", "forward"].any()
    assert alone["query", "input gradient", "gradient"]
    assert not alone["output", "input gradient", "gradient"]


def test_one_token_is_the_first_of_several() -> None:
    """Behind a causal mixer, which is drawn anew for another length."""
    one, four = (
        moments.predict(SMALL.replace(seq_len=n, mixer=DELTA), tokens=True) for n in (1, 4)
    )
    assert four.token_variance is not None
    np.testing.assert_allclose(one.variance, four.token_variance[:, 0], rtol=0.03)


@pytest.mark.parametrize("model", [SMALL.replace(mixer=DELTA), SMALL.replace(alibi=True)])
def test_more_tokens_than_are_named_as_covered_are_refused(model: moments.Transformer) -> None:
    long = model.replace(seq_len=4096)
    with pytest.raises(moments.DomainError, match="512"):
        moments.predict(long.replace(seq_len=most_tokens(long) + 1))
    assert most_tokens(SMALL.replace(seq_len=4096)) == 4096
