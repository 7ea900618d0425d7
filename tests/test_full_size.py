"""Full-size measurements as they are stored, today's predictions of some, and the page of them.

The whole is `python benchmarks/full_size.py measure`, `predict` and `page`.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def full() -> Iterator[Any]:
    pytest.importorskip("transformers")
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("full_size")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def written(full: Any) -> Any:
    return importlib.import_module("full_size_page")


@pytest.mark.parametrize("name", ["Falcon 7B, 8 layers", "DeepScaleLM, post-LN, 192 layers"])
@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
def test_stored_predictions_are_todays(full: Any, name: str) -> None:
    (case,) = [c for c in full.CASES if c.name == name]
    kept = full.stored()["cases"][name]
    fresh = full.predict_case(case, kept["names"])
    assert fresh["notes"] == kept["predicted"]["notes"]
    for quantity, row in kept["predicted"]["values"].items():
        found = np.array(fresh["values"][quantity], dtype=float)
        np.testing.assert_allclose(found, np.array(row, dtype=float), rtol=1e-5, err_msg=quantity)


def test_the_page_is_what_the_data_give(full: Any, written: Any) -> None:
    assert written.PAGE.read_text(encoding="utf-8") == written.page(full.stored())
    assert len(written.picture(full.stored()).axes) == 6


def test_every_case_on_the_page_was_measured_on_an_accelerator(full: Any) -> None:
    data = full.stored()
    assert "NVIDIA" in data["machine"]
    for name, kept in data["cases"].items():
        assert kept["seeds"] >= 1, name
        assert "error" not in kept, name


def test_bounds_find_a_wrong_prediction(full: Any, written: Any) -> None:
    name = "GPT-2, band"
    kept = full.stored()["cases"][name]
    assert set(written.verdicts(name, kept).values()) == {"pass"}
    for quantity, factor in (("variance", 1.04), ("grad_variance", 0.9), ("loss", 1.01)):
        wrong = copy.deepcopy(kept)
        said = wrong["predicted"]["values"]
        said[quantity] = [factor * x for x in said[quantity]]
        assert written.verdicts(name, wrong)[quantity] == "fails"


def test_few_draws_leave_open_what_many_do_not(written: Any) -> None:
    one = np.ones(1)
    assert written.Gap(0.10 * one, 0.02 * one, 0.05, 40).verdict == "fails"
    assert written.Gap(0.10 * one, 0.02 * one, 0.05, 2).verdict == "open"
    assert written.Gap(0.08 * one, 0.02 * one, 0.05, 2).verdict == "pass"
    assert written.Gap(0.10 * one, np.nan * one, 0.05, 1).verdict == "open"


def test_draws_are_added_one_by_one(full: Any) -> None:
    rows = np.random.default_rng(0).normal(3.0, 1.0, (7, 4))
    kept: dict[str, Any] = {}
    for row in rows:
        full.add(kept, {"x": row})
    mean, error = full.mean_of(kept, "x")
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(error, rows.std(0, ddof=1) / 7**0.5, rtol=1e-5)


@pytest.mark.parametrize("length", [5, 64, 100, 197])
def test_bins_hold_every_position_once(full: Any, length: int) -> None:
    held = [i for s in full.bins(length) for i in range(s.start, s.stop)]
    assert held == list(range(length))


def test_measuring_goes_on_where_it_stopped(full: Any, tmp_path: Path) -> None:
    """A case that fails says why and does not keep the next from running."""

    def model(small: bool) -> moments.Transformer:
        return moments.Transformer(2, 16, 2, 8)

    def broken(small: bool) -> moments.Transformer:
        raise ValueError("no such model")

    inputs = {"variance": 1.0, "correlation": 0.2}
    cases = [
        full.Case("broken", 2, "twin", declare=broken, inputs=inputs),
        full.Case("whole", 3, "twin", declare=model, inputs=inputs),
    ]
    path = tmp_path / "full.json"
    full.measure_cases(cases, "cpu", 1e9, path, seeds=1)
    full.measure_cases(cases, "cpu", 1e9, path)
    found = full.stored(path)["cases"]
    assert "no such model" in found["broken"]["error"]
    assert found["whole"]["seeds"] == 3
    first = 10_000 * (full.zlib.crc32(b"whole") % 100_000)
    rows = [
        moments.simulate(model(False), **inputs, batch=1, seeds=1, seed=first + k).variance
        for k in range(3)
    ]
    np.testing.assert_allclose(
        full.mean_of(found["whole"], "variance")[0], np.mean(rows, 0), rtol=1e-6
    )
