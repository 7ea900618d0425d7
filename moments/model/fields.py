"""What declarations have in common: fields that are checked, changed copies, JSON objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self

from ..errors import DomainError, domain_error
from ..files import plain


def set_field(declaration: Any, name: str, value: Any) -> None:
    """A field of a frozen declaration, while it is made and nobody has it yet."""
    object.__setattr__(declaration, name, value)


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
            set_field(declaration, name, check(name, value, *args, **limits))


def check_fields(name: str, given: Any, declaration: type[Any]) -> None:
    """The keys of a stored dictionary: none unknown, none without a default missing."""
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
    """A part of a declaration, `_part` in errors: changed by copy, stored as a JSON object."""

    _part: ClassVar[str]

    def replace(self, **changes: Any) -> Self:
        """A changed copy."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; `from_dict` reads it back."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote.

        Raises:
            DomainError: a missing or unknown field.
        """
        check_fields(cls._part, data, cls)
        return cls(**data)
