"""Stored simulations of the figures' lines; `benchmarks/figures.py` makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "points.json"


@cache
def stored() -> Mapping[str, Any]:
    """By key: x, value, stderr, seeds, and the model and inputs they were made with."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}


def key(figure: str, panel: int, label: str) -> str:
    """Where a line's points are stored."""
    return f"{figure}/{panel}/{label}"
