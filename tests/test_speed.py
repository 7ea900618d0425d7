"""The benchmark of speed: what it compares with computes the same, and what is stored is whole."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments

ROOT = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def speed() -> Any:
    spec = importlib.util.spec_from_file_location("speed", ROOT / "speed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["speed"] = module
    spec.loader.exec_module(module)
    return module


def test_the_formulas_by_hand_are_those_of_the_package(speed: Any) -> None:
    """Typed apart from the laws, so that each checks the other."""
    for dropout in (0.0, 0.1):
        model = speed.ALIKE.replace(layers=7, dropout=dropout)
        p = moments.predict(model, theory="simplified", correlation=0.2, grad_correlation=0.2)
        names = ("variance", "correlation", "grad_variance", "grad_correlation")
        for name, hand in zip(names, speed.by_hand(model), strict=True):
            assert np.allclose(getattr(p, name), hand, rtol=1e-12), name


def test_what_is_stored_is_whole(speed: Any) -> None:
    found = json.loads((ROOT / "data/speed.json").read_text(encoding="utf-8"))
    for one in found["rivals"].values():
        assert one["times"] == pytest.approx(one["rival"] / one["ours"])
    for name, points in found["curves"].items():
        counts, costs = np.array(points).T
        assert np.all(np.diff(counts) > 0), name
        assert np.all(costs > 0), name
    rate = 10_000 * 24 / found["seconds"]["10,000 configurations x 24 layers"] / 1e6
    assert found["million configuration-layers a second"] == pytest.approx(rate)
    assert "GPT-2" in speed.table(found)
    assert found["machine"]["cpu"]


def test_the_page_says_what_is_stored(speed: Any) -> None:
    found = json.loads((ROOT / "data/speed.json").read_text(encoding="utf-8"))
    assert speed.PAGE.read_text(encoding="utf-8") == speed.page(found)
    for one in found["neural-tangents"]["rivals"].values():
        assert one["times"] == pytest.approx(one["rival"] / one["ours"])
    compiled = json.loads(speed.COMPILED.read_text(encoding="utf-8"))["microseconds"]
    assert all(cost > 0 for cost in compiled.values())
    assert compiled["numba, without that"] < compiled["Python, straight lines"]
