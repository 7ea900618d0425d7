"""Two sides of a difference, in words and numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def each(value: Any, layers: int) -> np.ndarray:
    """One number or N as (N,)."""
    return np.broadcast_to(np.asarray(value, dtype=float), (layers,)).copy()


def positions(layers: tuple[int, ...]) -> list[int]:
    """Of layers in an array that counts from 0."""
    return [n - 1 for n in layers]


def ratio(one: np.ndarray, other: np.ndarray, layers: tuple[int, ...]) -> float:
    """Geometric mean of found over declared; nan where one of them is 0."""
    a, b = one[positions(layers)], other[positions(layers)]
    if np.any(a <= 0) or np.any(b <= 0):
        return math.nan
    return float(np.exp(np.mean(np.log(b / a))))


def numbers(one: np.ndarray, other: np.ndarray, layers: tuple[int, ...]) -> str:
    """Found and declared, ranges where layers differ, and their ratio."""
    found, declared = _span(other[positions(layers)]), _span(one[positions(layers)])
    factor = ratio(one, other, layers)
    times = "" if math.isnan(factor) else f" ({factor:.3g}x)"
    return f"{found}, declared {declared}{times}"


def _span(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    if abs(high - low) <= 0.1 * abs(high):
        return f"{float(values.mean()):.3g}"
    return f"{low:.3g} to {high:.3g}"


def where(layers: tuple[int, ...], total: int) -> str:
    """Which of so many layers, as the end of a phrase."""
    if len(layers) == total and total > 1:
        return " in every layer"
    runs = np.split(np.array(layers), np.flatnonzero(np.diff(layers) != 1) + 1)
    shown = [f"{r[0]} to {r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs]
    return f" in layer{'s' if len(layers) > 1 else ''} {', '.join(shown)}"


def pair(one: Any, other: Any) -> str:
    """Found and declared, with their ratio where they are numbers."""
    factor = quotient(one, other)
    if not all(isinstance(v, float) for v in (one, other)):
        return f"{other}, declared {one}"
    times = "" if math.isnan(factor) else f" ({factor:.3g}x)"
    return f"{other:.3g}, declared {one:.3g}{times}"


def quotient(one: Any, other: Any) -> float:
    """Found over declared; nan where they are no positive numbers."""
    positive = all(isinstance(v, float) and v > 0 for v in (one, other))
    return other / one if positive else math.nan
