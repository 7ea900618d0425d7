"""Random declarations over all fields: positions by classes against every token, some drawn."""

from __future__ import annotations

import dataclasses

import pytest
import random_search

import moments


@pytest.mark.parametrize("numbers", [range(5), range(5, 10)], ids=["first", "second"])
def test_classes_are_what_tokens_are(numbers: range) -> None:
    for number in numbers:
        one = random_search.case(number)
        found, notes = random_search.judged(one, simulate=False)
        assert notes or not found, (random_search.describe(one), found)


@pytest.mark.parametrize("number", [2, 5])
def test_draws_are_within_the_bounds(number: int) -> None:
    one = random_search.case(number)
    found, notes = random_search.judged(one, simulate=True, seeds=8)
    assert notes or not found, (random_search.describe(one), found)


def test_every_field_is_drawn() -> None:
    """But for what tests of its own hold: tables, heads, encoders, blocks, sinks, gates, shared
    layers, streams and what earlier layers give."""
    names = {f.name for f in dataclasses.fields(moments.Transformer)}
    names -= {"embedding", "head", "encoder", "name", "_defaulted"}
    names -= {"mixer", "ffn", "attention_sink", "attention_gate", "layer_scale", "shared_layers"}
    names -= {"streams", "input_mix", "skips", "values", "per_layer_embedding"} | {"laurel"}
    cases = [random_search.case(number).model for number in range(60)]
    for name in names:
        values = [getattr(model, name) for model in cases]
        assert any(value != values[0] for value in values), name


def test_an_exception_is_found() -> None:
    one = random_search.case(0)
    found, other = (moments.predict(one.model, correlation=r) for r in (0.1, 0.12))
    assert any(miss.name == "correlation" for miss in random_search.misses(found, other, "other"))
