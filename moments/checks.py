"""Checks of single arguments, each with the error a user needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field
from typing import Any

import numpy as np

from .errors import DomainError, domain_error
from .symbols import Interval


def check_count(name: str, value: Any, *, least: int = 1) -> None:
    """An integer of at least `least`."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least:
        raise domain_error(name, value, f"an integer of at least {least}")


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """One of a list; True and 1 are told apart."""
    if not any(
        value is option or (type(value) is type(option) and value == option) for option in allowed
    ):
        raise domain_error(name, value, f"one of {', '.join(map(repr, allowed))}")


def check_flag(name: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise domain_error(name, value, "True or False")


def check_in(name: str, value: Any, interval: Interval, remedy: str = "") -> None:
    """A number, or an array of numbers, inside an interval."""
    try:
        numeric = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise domain_error(name, value, f"a number inside {interval}", remedy) from None
    if numeric.size == 0 or not interval.contains(numeric):
        raise domain_error(name, value, f"inside {interval}", remedy)


def check_fields(name: str, given: Any, fields: Sequence[Field[Any]]) -> None:
    """The keys of a stored dictionary: none unknown, none without a default missing."""
    if not isinstance(given, Mapping):
        raise domain_error(name, given, "a JSON object of its fields")
    allowed = [f.name for f in fields if f.init]
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise domain_error(f"{name} field", unknown[0], f"one of {', '.join(sorted(allowed))}")
    required = [f.name for f in fields if f.init and f.default is MISSING]
    missing = [field for field in required if field not in given]
    if missing:
        raise DomainError(f"{name} field {missing[0]!r} is missing")


def frozen_layers(name: str, value: Any) -> float | tuple[float, ...]:
    """One number, or one per layer, as what cannot change."""
    if np.ndim(value) > 1:
        raise domain_error(name, value, "one number, or a flat list of one per layer")
    return float(value) if np.ndim(value) == 0 else tuple(float(v) for v in value)
