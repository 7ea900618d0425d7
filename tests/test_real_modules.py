"""Stored measurements of real modules against today's predictions, and the page made of them.

The whole comparison is `python benchmarks/real_modules.py page`; here some quick cases of it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moments.model.huggingface import FAMILIES

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PAGE = BENCHMARKS.parent / "docs" / "real-modules.md"
QUICK = (("bert", 6), ("gpt2", 6), ("opt", 6), ("vit", 6), ("roberta", 24))


@pytest.fixture(scope="module")
def benchmark_page() -> Iterator[Any]:
    pytest.importorskip("transformers")
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("real_modules_page")
    sys.path.remove(str(BENCHMARKS))


@functools.cache
def row_of(kind: str, layers: int) -> Any:
    """The case predicted today."""
    page = importlib.import_module("real_modules_page")
    return next(page.rows_of([page.Case(kind, layers)]))


@pytest.mark.parametrize(("kind", "layers"), QUICK)
def test_quick_cases_are_within_their_bounds(benchmark_page: Any, kind: str, layers: int) -> None:
    row = row_of(kind, layers)
    assert benchmark_page.failures(row) == []
    assert row.found.missing == []
    start = f"| {kind} | {layers} | {row.found.seeds} |"
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if start in line]
    assert len(lines) == 1
    assert lines[0].endswith("| pass |")


def test_every_family_is_measured_and_on_the_page(benchmark_page: Any) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for kind in FAMILIES:
        for layers in benchmark_page.DEPTHS:
            assert benchmark_page.Case(kind, layers).file.exists(), (kind, layers)
            assert f"| {kind} | {layers} | " in text


def test_bounds_find_a_wrong_prediction(benchmark_page: Any) -> None:
    """A gradient 10 % off over all places, where it is measured to 1 %."""
    row = row_of("gpt2", 6)
    gap = benchmark_page.Gap
    wrong = gap(np.full(7, 0.1), np.full(7, 0.01))
    changed = vars(row.found) | {"grad_variance": wrong}
    found = type(row.found)(**changed)
    assert benchmark_page.failures(row._replace(found=found)) == ["grad_variance"]


def test_standard_error_of_a_sum_of_correlated_norms(benchmark_page: Any) -> None:
    """Two layers that move together: their sum's error is twice each one's."""
    compare = importlib.import_module("real_modules_compare")
    rng = np.random.default_rng(0)
    draws = 1.0 + 0.1 * rng.normal(size=(200, compare.CHUNK))
    each = np.stack([draws.mean(1), draws.std(1, ddof=1) / np.sqrt(compare.CHUNK)], axis=-1)
    values = np.stack([each, each], axis=1)
    error, stderr = compare.summed(values, np.array([1.0, 1.0]))
    assert error == pytest.approx(0.0, abs=0.02)
    assert stderr == pytest.approx(0.1 / np.sqrt(draws.size), rel=0.15)
    mean, single = compare.pooled(values)
    assert single == pytest.approx(draws.std() / np.sqrt(draws.size), rel=0.1)
    assert mean == pytest.approx(draws.mean())
