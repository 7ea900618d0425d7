"""Exceptions and warnings of the package, the texts of its error messages, and optional imports."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class MomentsError(Exception):
    """Base of every error that `moments` raises on purpose."""


class DomainError(MomentsError, ValueError):
    """A value that is not allowed; the message names it, what is allowed, and the remedy.

    Attributes:
        argument: name of the value; None if the error is about several.
    """

    argument: str | None = None


class Undeclared(DomainError):
    """A valid config whose module no `Transformer` can describe."""


class ValidityWarning(UserWarning):
    """A number was computed outside the regime in which its formula is known to be accurate."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress ValidityWarnings inside the block; results keep them in `warnings`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        yield


def domain_error(argument: str, value: object, allowed: str, remedy: str = "") -> DomainError:
    """Build the error for a bad value, in the form that every such message has.

    >>> str(domain_error("dropout", 1.2, "a probability in [0, 1)", "pass 0.1 for ten percent"))
    'dropout = 1.2: must be a probability in [0, 1); pass 0.1 for ten percent'
    """
    message = f"{argument} = {brief(value)}: must be {allowed}"
    error = DomainError(f"{message}; {remedy}" if remedy else message)
    error.argument = argument
    return error


def unknown_name(argument: str, value: object, known: Iterable[str], more: str = "") -> DomainError:
    """Build the error for an unknown name: it lists the nearest known ones, else all of them.

    Args:
        argument: the argument that takes the name.
        value: the name passed.
        known: the names that exist.
        more: further allowed values, in words.

    >>> str(unknown_name("norm", "pots", ["pre", "post"]))
    "norm = 'pots': no such name; did you mean 'post'?"
    """
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(value[:100], names, cutoff=0.7) if isinstance(value, str) else []
    if near:
        suggested = " or ".join(map(repr, near))
        return DomainError(f"{argument} = {brief(value)}: no such name; did you mean {suggested}?")
    return domain_error(argument, value, f"one of {', '.join(names)}{more}")


class _Brief(reprlib.Repr):
    """`repr` shortened to a line or two."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 12
        self.maxstring = self.maxother = 120

    def repr_int(self, value: int, level: int) -> str:
        # Python refuses to convert very long integers to text.
        return repr(value) if value.bit_length() < 200 else f"<{value.bit_length()} bits>"

    def repr_instance(self, value: Any, level: int) -> str:
        return " ".join(super().repr_instance(value, level).split())


def brief(value: object, most: int = 240) -> str:
    """The `repr` of a value for an error message, cut in the middle if it is long.

    >>> brief("x" * 10**6, 20)
    "'xxxxxxx...xxxxxxxx'"
    """
    text = _BRIEF.repr(value)
    if len(text) <= most:
        return text
    head = (most - 3) // 2
    return f"{text[:head]}...{text[head + 3 - most :]}"


_BRIEF = _Brief()


@contextmanager
def optional(extra: str, *packages: str) -> Iterator[None]:
    """Turn a missing import of `packages` inside the block into an error that names the extra.

    Args:
        extra: the extra of `transformer-moments` that installs the packages.
        packages: top-level import names; any other failing import is raised unchanged.

    Raises:
        MomentsError: one of the packages is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in packages:
            raise
        raise MomentsError(
            f"this needs {missing.name}, which is not installed; "
            f'pip install "transformer-moments[{extra}]"'
        ) from missing


def listed(numbers: Sequence[int]) -> str:
    """Write numbers with runs merged: "1 to 4, 7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Turn any exception of another library or of a user's code into a DomainError.

    Raises:
        DomainError: anything was raised inside the block.
    """
    try:
        yield
    except MomentsError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise DomainError(f"{what}: {type(error).__name__}: {text[:300]}".rstrip(": ")) from error
