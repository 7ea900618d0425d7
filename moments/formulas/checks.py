"""Checks of single arguments, each with the error a user needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DomainError, domain_error
from .symbols import Interval

Array = NDArray[np.float64]


def check_count(name: str, value: Any, *, least: int = 1, most: float = 2.0**53) -> int:
    """An integer of at least `least`, as a Python one; at most what a float holds exactly."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least:
        raise domain_error(name, value, f"an integer of at least {least}")
    if value > most:
        raise domain_error(name, value, f"an integer of at most {most:.3g}")
    return int(value)


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """One of a list; True and 1 are told apart."""
    if not any(
        value is option or (type(value) is type(option) and value == option) for option in allowed
    ):
        raise domain_error(name, value, f"one of {', '.join(map(repr, allowed))}")


def check_flag(name: str, value: Any) -> bool:
    """True or False, as Python's."""
    if not isinstance(value, bool | np.bool_):
        raise domain_error(name, value, "True or False")
    return bool(value)


def check_in(name: str, value: Any, interval: Interval, remedy: str = "") -> Array:
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
    numeric = check_in(name, value, interval, remedy)
    if numeric.ndim:
        raise domain_error(name, value, f"one number inside {interval}", remedy)
    return float(numeric)


def check_array(name: str, value: Any, allowed: str, dtype: Any = float) -> NDArray[Any]:
    """An array of numbers, its rows of one length; `allowed` says what it should be.

    With dtype None its type stays.
    """
    try:
        given = np.asarray(value)
        if given.dtype.kind in "SUO":
            raise TypeError
        return given if dtype is None else np.asarray(given, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        remedy = "rows of one length, of numbers"
        raise domain_error(name, value, allowed, remedy) from None


def settle(
    declaration: Any, names: Iterable[str], check: Callable[..., Any], *args: Any, **limits: Any
) -> None:
    """Replace fields of a frozen declaration by the plain values that a check makes of them.

    What may be left out and is, None by default, stays None.
    """
    optional = {f.name for f in fields(declaration) if f.default is None}
    for name in names:
        value = getattr(declaration, name)
        if value is not None or name not in optional:
            object.__setattr__(declaration, name, check(name, value, *args, **limits))


def check_fields(name: str, given: Any, known: Sequence[Field[Any]]) -> None:
    """The keys of a stored dictionary: none unknown, none without a default missing."""
    if not isinstance(given, Mapping):
        raise domain_error(name, given, "a JSON object of its fields")
    allowed = [f.name for f in known if f.init]
    unknown = sorted(set(given) - set(allowed))
    if unknown:
        raise domain_error(f"{name} field", unknown[0], f"one of {', '.join(sorted(allowed))}")
    required = [f.name for f in known if f.init and f.default is MISSING]
    missing = [field for field in required if field not in given]
    if missing:
        raise DomainError(f"{name} field {missing[0]!r} is missing")


def check_layers(
    name: str, value: Any, interval: Interval, remedy: str = ""
) -> float | tuple[float, ...]:
    """One number inside an interval, or one per layer, as what cannot change."""
    numeric = check_in(name, value, interval, remedy)
    if numeric.ndim > 1:
        raise domain_error(name, value, "one number, or a flat list of one per layer")
    return tuple(numeric.tolist()) if numeric.ndim else float(numeric)
