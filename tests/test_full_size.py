"""Full-size measurements against today's predictions of some; the whole is
`python benchmarks/full_size.py table`."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import full_size as full
import numpy as np
import pytest

import moments

pytest.importorskip("transformers")


@functools.cache
def kept(name: str) -> Any:
    """What was measured of a case, and today's prediction."""
    ((_, found),) = full.rows([case for case in full.CASES if case.name == name])
    return found


@pytest.mark.parametrize("name", ["GPT-2, 1024 tokens", "DeepScaleLM, post-LN, 192 layers"])
@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
def test_cases_are_inside_their_bounds(name: str) -> None:
    assert set(full.verdicts(name, kept(name)).values()) == {"pass"}


def test_every_case_was_measured_on_an_accelerator() -> None:
    data = full.stored()
    assert "NVIDIA" in data["machine"]
    for name, found in data["cases"].items():
        assert found["seeds"] >= 1, name
        assert "error" not in found, name


def test_bounds_find_a_wrong_prediction() -> None:
    name = "GPT-2, 1024 tokens"
    for quantity, factor in (("variance", 1.04), ("grad_variance", 0.9), ("loss", 1.01)):
        wrong = copy.deepcopy(kept(name))
        wrong["predicted"]["values"][quantity] *= factor
        assert full.verdicts(name, wrong)[quantity] == "fails"


def test_few_draws_leave_open_what_many_do_not() -> None:
    one = np.ones(1)
    assert full.Gap(0.10 * one, 0.02 * one, 0.05, 40).verdict == "fails"
    assert full.Gap(0.10 * one, 0.02 * one, 0.05, 2).verdict == "open"
    assert full.Gap(0.08 * one, 0.02 * one, 0.05, 2).verdict == "pass"
    assert full.Gap(0.10 * one, np.nan * one, 0.05, 1).verdict == "open"


def test_draws_are_added_one_by_one() -> None:
    rows = np.random.default_rng(0).normal(3.0, 1.0, (7, 4))
    kept: dict[str, Any] = {}
    for row in rows:
        full.add(kept, {"x": row})
    mean, error = full.mean_of(kept, "x")
    np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(error, rows.std(0, ddof=1) / 7**0.5, rtol=1e-5)


@pytest.mark.parametrize("length", [5, 64, 100, 197])
def test_bins_hold_every_position_once(length: int) -> None:
    held = [i for s in full.bins(length) for i in range(s.start, s.stop)]
    assert held == list(range(length))


def test_measuring_goes_on_where_it_stopped(tmp_path: Path) -> None:
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
    path = tmp_path / "full.npz"
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
        full.mean_of(found["whole"], "variance")[0], np.mean(rows, 0), rtol=1e-5
    )
