"""Types of decoder against transformers' own modules, drawn before
(`python benchmarks/every_type.py measure`): some quick ones of the whole table."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import every_type
import records

from moments.model.huggingface import READERS

QUICK = ("cohere2 4", "gpt_oss 4", "vaultgemma 4", "granite_swa 4", "hunyuan_v1_moe 4", "youtu 4")


@pytest.fixture(scope="module")
def stored() -> Any:
    return records.load(every_type.NAME)


def test_what_is_stored_is_of_types_that_are_read(stored: Any) -> None:
    assert set(every_type.kinds()) <= set(READERS)
    assert {key.split()[0] for key in stored} <= set(READERS)
    assert records.path_of(every_type.NAME).stat().st_size < 300_000
    assert len(stored) > 80


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_type_is_within_the_bounds(stored: Any, name: str) -> None:
    kind, layers = name.split()
    found = every_type.errors(stored[name], every_type.predicted(kind, int(layers)))
    assert every_type.outside(found) == [], found
    assert "unknown" not in found


def test_bounds_find_a_wrong_prediction() -> None:
    found = {"variance": (0.05, 0.01, 1), "matrix": (0.1, 0.02, "2 key"), "total": (0.01, 0.0, "")}
    assert every_type.outside(found) == ["variance"]
