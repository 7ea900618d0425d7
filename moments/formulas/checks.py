"""Intervals, and checks of arguments with errors that name argument, value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import domain_error

Array = NDArray[np.float64]

INFINITY = float("inf")


@dataclass(frozen=True)
class Interval:
    """A real interval; an open end excludes its bound."""

    lower: float = -INFINITY
    upper: float = INFINITY
    open_lower: bool = False
    open_upper: bool = False

    def contains(self, value: Any) -> bool:
        """Whether every entry of `value` lies inside (NaN and infinities never do)."""
        v = np.asarray(value, dtype=float)
        above = v > self.lower if self.open_lower else v >= self.lower
        below = v < self.upper if self.open_upper else v <= self.upper
        return bool(np.all(above)) and bool(np.all(below)) and bool(np.all(np.isfinite(v)))

    def __str__(self) -> str:
        left = "(" if self.open_lower or self.lower == -INFINITY else "["
        right = ")" if self.open_upper or self.upper == INFINITY else "]"
        return f"{left}{_bound(self.lower)}, {_bound(self.upper)}{right}"


def _bound(value: float) -> str:
    if abs(value) == INFINITY:
        return "∞" if value > 0 else "-∞"
    return f"{value:g}"


REAL = Interval()
POSITIVE = Interval(0.0, INFINITY, open_lower=True)
NONNEGATIVE = Interval(0.0, INFINITY)
CORRELATION = Interval(-1.0, 1.0)
PROBABILITY = Interval(0.0, 1.0, open_upper=True)
SHARE = Interval(0.0, 1.0)
COUNT = Interval(1.0, INFINITY)


def check_count(name: str, value: Any, *, least: int = 1, most: float = 2.0**53) -> int:
    """A Python integer from `least` to `most`, the largest that a float represents exactly."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least:
        raise domain_error(name, value, f"an integer of at least {least}")
    if value > most:
        raise domain_error(name, value, f"an integer of at most {most:.3g}")
    return int(value)


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Refuse a value that is not in a list; True and 1 differ."""
    if not any(
        value is option or (type(value) is type(option) and value == option) for option in allowed
    ):
        raise domain_error(name, value, f"one of {', '.join(map(repr, allowed))}")


def check_flag(name: str, value: Any) -> bool:
    """A Python bool."""
    if not isinstance(value, bool | np.bool_):
        raise domain_error(name, value, "True or False")
    return bool(value)


def check_interval(name: str, value: Any, interval: Interval, remedy: str = "") -> Array:
    """A number, or an array of numbers, inside an interval; neither text nor truth values."""
    try:
        given = np.asarray(value)
        if given.dtype.kind in "bSU":
            raise TypeError
        numeric = np.asarray(given, dtype=float)
    except (TypeError, ValueError, OverflowError):
        raise domain_error(name, value, f"a number inside {interval}", remedy) from None
    if numeric.size == 0 or not interval.contains(numeric):
        raise domain_error(name, value, f"inside {interval}", remedy)
    return numeric


def check_number(name: str, value: Any, interval: Interval, remedy: str = "") -> float:
    """One number inside an interval, as a Python float."""
    numeric = check_interval(name, value, interval, remedy)
    if numeric.ndim:
        raise domain_error(name, value, f"one number inside {interval}", remedy)
    return float(numeric)


def check_array(name: str, value: Any, allowed: str, dtype: Any = float) -> NDArray[Any]:
    """An array of numbers; `allowed` describes it in errors. With dtype None its type stays."""
    try:
        given = np.asarray(value)
        if given.dtype.kind in "SUO":
            raise TypeError
        return given if dtype is None else np.asarray(given, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        remedy = "rows of one length, of numbers"
        raise domain_error(name, value, allowed, remedy) from None


def check_layers(
    name: str, value: Any, interval: Interval, remedy: str = ""
) -> float | tuple[float, ...]:
    """One number inside an interval, or a tuple of one per layer."""
    numeric = check_interval(name, value, interval, remedy)
    if numeric.ndim > 1:
        raise domain_error(name, value, "one number, or a flat list of one per layer")
    return tuple(numeric.tolist()) if numeric.ndim else float(numeric)
