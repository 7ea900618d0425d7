"""Everything the package raises or warns on purpose."""

from __future__ import annotations


class MomentsError(Exception):
    """Base of every error that `moments` raises on purpose."""


class DomainError(MomentsError, ValueError):
    """A value outside what is allowed; the message names it, what is allowed, and the remedy.

    Attributes:
        argument: name of the value, where it is one value.
    """

    argument: str | None = None


class ValidityWarning(UserWarning):
    """A number was computed outside the regime in which its formula is known to be accurate."""


def domain_error(argument: str, value: object, allowed: str, remedy: str = "") -> DomainError:
    """Build the one sentence every bad input gets.

    >>> str(domain_error("dropout", 1.2, "a probability in [0, 1)", "pass 0.1 for ten percent"))
    'dropout = 1.2: must be a probability in [0, 1); pass 0.1 for ten percent'
    """
    message = f"{argument} = {value!r}: must be {allowed}"
    error = DomainError(f"{message}; {remedy}" if remedy else message)
    error.argument = argument
    return error
