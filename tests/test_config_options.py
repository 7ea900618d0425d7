"""Every entry that a config reader reads, at a second value: measured, or named.

The measurements and the whole comparison are `python benchmarks/config_options.py`; here that no
entry escapes it, that readings are still those that were compared, and some cases of it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments.model.huggingface import FAMILIES

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
KINDS = pytest.mark.parametrize("kind", sorted(FAMILIES))
# Entries that once were read for another than the module means
QUICK = (
    ("falcon", {"attention_dropout": 0.4}),
    ("roberta", {"hidden_act": "relu"}),
    ("gemma", {"hidden_act": "relu"}),
    ("t5", {"initializer_factor": 0.5}),
)


@pytest.fixture(scope="module")
def campaign() -> Iterator[Any]:
    pytest.importorskip("transformers")
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("config_options")
    sys.path.remove(str(BENCHMARKS))


@KINDS
def test_every_entry_that_is_read_is_measured_or_named(campaign: Any, kind: str) -> None:
    """The table of second values is walked by what the reader asks for, not by a list."""
    found = campaign.stored(kind)
    tried = campaign.options(kind)
    spared = {*campaign.WITHOUT_EFFECT, *campaign.MEASURED_ELSEWHERE}
    assert campaign.entries_read(kind, {}) <= {*tried, *spared}
    for entry, changes in tried.items():
        assert changes, entry
        for change in changes:
            case = campaign.Option.of(kind, change)
            stored = case.changed in found and "error" not in found[case.changed]
            assert campaign.is_named(kind, entry, change) or stored, case.name


@KINDS
def test_readings_are_those_that_were_compared(campaign: Any, kind: str) -> None:
    """What each changed entry changes in the declaration, field by field, as when its prediction
    was last held against the module."""
    readings = json.loads(campaign.READINGS.read_text())[kind]
    cases = [case for _, case in campaign.measurable(kind)]
    assert {case.changed for case in cases} == set(readings)
    for case in cases:
        found = json.loads(json.dumps(campaign.reading(case)))
        assert found == readings[case.changed], case.name


@pytest.mark.parametrize(("kind", "changes"), QUICK, ids=[f"{k}-{'-'.join(c)}" for k, c in QUICK])
def test_quick_cases_are_within_their_bounds(campaign: Any, kind: str, changes: Any) -> None:
    wanted = {"{}", campaign.Option.of(kind, changes).changed}
    rows = [row for row in campaign.compare_kind(kind, wanted) if row.entry]
    assert [row.case.changed for row in rows] == [campaign.Option.of(kind, changes).changed]
    assert rows[0].failures == ()
    assert {error.quantity for error in rows[0].errors} == set(campaign.BOUNDS)


def test_linear_biases_divided_like_the_logits(campaign: Any) -> None:
    """What ALiBi does to Falcon's correlation, in paired draws: to their own error, beyond which it
    would be with slopes that are not divided."""
    plain, biased = (campaign.Option.of("falcon", c) for c in ({}, {"alibi": True}))
    base, record = (campaign.stored("falcon")[case.changed] for case in (plain, biased))
    draws = campaign._draws(record, "correlation") - campaign._draws(base, "correlation")
    measured, stderr = draws.mean(0)[-1], draws.std(0, ddof=1)[-1] / len(draws) ** 0.5
    model = campaign.declared(biased.config)[0]
    ids = biased.data()["input_ids"]
    without, own, undivided = (
        moments.predict(m, token_ids=ids, tokens=True).correlation[-1]
        for m in (campaign.declared(plain.config)[0], model, model.replace(alibi=True))
    )
    assert abs(own - without - measured) < 3 * stderr + 0.002
    assert abs(undivided - without - measured) > 3 * stderr + 0.002


def test_a_misreading_is_found(campaign: Any) -> None:
    """RoBERTa's head as it was once read, and an entry that only one side takes."""
    kind, changed = "roberta", campaign.Option.of("roberta", {"hidden_act": "relu"})
    record, base = (campaign.stored(kind)[c] for c in (changed.changed, "{}"))
    plain = campaign.Option.of(kind, {})
    right, first = campaign._predicted(changed), campaign._predicted(plain)
    assert all(e.outside <= 0 for e in campaign._errors(right, record, first, base))
    wrong = campaign._errors(first, record, first, base)
    assert any(e.outside > 0 for e in wrong)
    assert campaign._misread(changed, base, base)[0].startswith("the module does not read it")
    assert campaign._misread(plain, record, base) == [
        "the module reads it, the declaration does not"
    ]


def test_standard_error_of_a_ratio_of_paired_means(campaign: Any) -> None:
    """Against the spread over repetitions of the whole experiment."""
    rng = np.random.default_rng(0)
    base = {"variance": 1 + 0.2 * rng.normal(size=(4000, 16, 3))}
    own = {"variance": 2 * base["variance"] + 0.1 * rng.normal(size=(4000, 16, 3))}
    ratio = own["variance"].mean(1) / base["variance"].mean(1)
    one = type("P", (), dict.fromkeys(campaign.QUANTITIES, np.full(3, 2.0)))
    two = type("P", (), dict.fromkeys(campaign.QUANTITIES, np.full(3, 1.0)))
    stderr = []
    for n in range(50):
        pair = [dict.fromkeys(campaign.QUANTITIES, side["variance"][n]) for side in (own, base)]
        errors = campaign._errors(one, {**pair[0], "loss": [None, None]}, two, pair[1])
        stderr += [e.stderr for e in errors if e.where == "effect stream 1"][:1]
    assert np.mean(stderr) == pytest.approx(ratio.std() / ratio.mean(), rel=0.15)
