"""Stored measurements of real modules against today's predictions.

The whole comparison is `python benchmarks/real_modules.py table`; here some quick cases of it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import real_modules
from real_modules import CHUNK, DEPTHS, Case, Gap, failures, rows_of, stored, together

from moments.model.huggingface import FAMILIES

pytest.importorskip("transformers")
QUICK = (("bert", 6), ("gpt2", 6), ("opt", 6), ("vit", 6), ("roberta", 24))


@functools.cache
def row_of(kind: str, layers: int) -> Any:
    """The case predicted today."""
    return next(rows_of([Case(kind, layers)]))


@pytest.mark.parametrize(("kind", "layers"), QUICK)
def test_quick_cases_are_within_their_bounds(kind: str, layers: int) -> None:
    row = row_of(kind, layers)
    assert failures(row) == []
    assert row.found.missing == []


def test_every_family_is_measured() -> None:
    for kind in FAMILIES:
        for layers in DEPTHS:
            assert stored()[Case(kind, layers).name]["seeds"] >= 96, (kind, layers)


def test_bounds_find_a_wrong_prediction() -> None:
    """A gradient 10 % off over all places, where it is measured to 1 %."""
    row = row_of("gpt2", 6)
    wrong = Gap(np.full(7, 0.1), np.full(7, 0.01))
    changed = vars(row.found) | {"grad_variance": wrong}
    assert failures(row._replace(found=type(row.found)(**changed))) == ["grad_variance"]


def test_chunks_merged_are_all_their_draws() -> None:
    draws = 1.0 + 0.1 * np.random.default_rng(0).normal(size=(24, 5))
    kept, count = real_modules._spread(draws[:CHUNK]), CHUNK
    for start in range(CHUNK, len(draws), CHUNK):
        kept = together((count, CHUNK), kept, real_modules._spread(draws[start : start + CHUNK]))
        count += CHUNK
    np.testing.assert_allclose(kept[0], draws.mean(0), rtol=1e-12)
    np.testing.assert_allclose(kept[1], draws.std(0, ddof=1) / len(draws) ** 0.5, rtol=1e-12)


def test_standard_error_of_a_sum_of_norms_that_move_together() -> None:
    """Two layers of one draw: their sum's error is twice each one's, by the sums of chunks."""
    rng = np.random.default_rng(0)
    kept: dict[str, Any] = {}
    draws = 1.0 + 0.1 * rng.normal(size=(200, CHUNK))
    for row in draws:
        each = real_modules._spread(np.stack([row, row], axis=1))
        none = np.full((2, 1), np.nan)
        new = dict.fromkeys((*real_modules.QUANTITIES, "loss", "logit_variance"), none)
        sums = np.array([[2 * row.mean()], [np.nan]])
        new |= {"seeds": CHUNK, "keys": ["1 query", "2 query"], "names": ["query"]}
        kept = real_modules.merged(kept, new | {"weights": each, "sums": sums})
    error, stderr = real_modules.summed({"1 query": 1.0, "2 query": 1.0}, kept)["query"]
    assert error == pytest.approx(0.0, abs=0.02)
    assert stderr == pytest.approx(0.1 / np.sqrt(draws.size), rel=0.15)
