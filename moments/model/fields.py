"""Base of declarations: checked fields, changed copies, JSON objects."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Annotated, Any, ClassVar, Self, get_args, get_type_hints

from ..errors import DomainError, domain_error
from ..files import plain
from ..formulas.checks import (
    NONNEGATIVE,
    POSITIVE,
    PROBABILITY,
    REAL,
    Interval,
    check_choice,
    check_count,
    check_flag,
    check_number,
)

Check = Callable[[str, Any], Any]

Count = Annotated[int, check_count]
Natural = Annotated[int, partial(check_count, least=0)]
Several = Annotated[int, partial(check_count, least=2)]
Flag = Annotated[bool, check_flag]
Real = Annotated[float, partial(check_number, interval=REAL)]
Positive = Annotated[float, partial(check_number, interval=POSITIVE)]
Nonnegative = Annotated[float, partial(check_number, interval=NONNEGATIVE)]
Share = Annotated[float, partial(check_number, interval=Interval(0.0, 1.0, open_lower=True))]
Probability = Annotated[float, partial(check_number, interval=PROBABILITY)]
Variance = Annotated[float, partial(check_number, interval=NONNEGATIVE, remedy="pass a variance")]
PositiveVariance = Annotated[
    float, partial(check_number, interval=POSITIVE, remedy="pass a variance")
]


def one_of(*allowed: Any) -> Check:
    """The check of a field with a list of allowed values."""

    def check(name: str, value: Any) -> Any:
        check_choice(name, value, allowed)
        return value

    return check


@functools.cache
def _checks(declaration: type[Any]) -> tuple[tuple[str, Check, bool], ...]:
    """Name and check of every field whose annotation has a check, and whether it may be None."""
    try:
        hints = get_type_hints(declaration, include_extras=True)
    except NameError:  # a user's block imports names only for a type checker
        return ()
    return tuple(
        (f.name, part.__metadata__[0], f.default is None)
        for f in fields(declaration)
        for part in (hints[f.name], *get_args(hints[f.name]))
        if hasattr(part, "__metadata__")
    )


def set_field(declaration: Any, name: str, value: Any) -> None:
    """Set a field of a frozen declaration under construction."""
    object.__setattr__(declaration, name, value)


def settle(
    declaration: Any, names: Iterable[str], check: Callable[..., Any], *args: Any, **limits: Any
) -> None:
    """Replace fields of a frozen declaration by the plain values that a check returns.

    Fields with the default None may stay None.
    """
    optional = {f.name for f in fields(declaration) if f.default is None}
    for name in names:
        value = getattr(declaration, name)
        if value is not None or name not in optional:
            set_field(declaration, name, check(name, value, *args, **limits))


def check_fields(name: str, given: Any, declaration: type[Any]) -> None:
    """Raise DomainError if a stored dictionary has unknown fields, or lacks required ones."""
    if not isinstance(given, Mapping):
        raise domain_error(name, given, "a JSON object of its fields")
    known = [f for f in fields(declaration) if f.init]
    allowed = {f.name for f in known}
    unknown = sorted(set(given) - allowed)
    if unknown:
        raise domain_error(f"{name} field", unknown[0], f"one of {', '.join(sorted(allowed))}")
    missing = [f.name for f in known if f.default is MISSING and f.name not in given]
    if missing:
        raise DomainError(f"{name} field {missing[0]!r} is missing")


@dataclass(frozen=True)
class Stored:
    """A part of a declaration, stored as a JSON object; errors call it `_part`."""

    _part: ClassVar[str]

    def __post_init__(self) -> None:
        """Replace fields by the plain values that the checks of their annotations return."""
        for name, check, optional in _checks(type(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if value is not None or not optional:
                set_field(self, name, check(name, value))

    def replace(self, **changes: Any) -> Self:
        """A changed copy."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_dict` reads it back."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a dictionary of `to_dict`.

        Raises:
            DomainError: a missing or unknown field.
        """
        check_fields(cls._part, data, cls)
        return cls(**data)
