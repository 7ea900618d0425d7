"""A few of the correct modules of `benchmarks/random_modules.py`: nothing is wrong in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import moments

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import random_modules


@pytest.mark.parametrize("number", [26, 45, 46, 161, 736])
def test_nothing_is_found(number: int) -> None:
    report = moments.check(random_modules.built(number))
    assert not report.findings
    spec = random_modules.drawn(number)
    assert report.model is not None
    assert report.model.activation == spec.function  # 45: its ReLU's gate comes first
    assert report.model.layers == spec.layers
    if spec.extra == "skips":  # what enters layer 2 again is added to itself there
        assert report.model.by_block("skip_scale")[1, 0] > 1
