"""All figures by name."""

from __future__ import annotations

from functools import cache

from ...errors import domain_error
from . import kedia, noci, sun
from .setup import Setup


@cache
def _declared() -> dict[str, Setup]:
    return {found.name: found for paper in (kedia, sun, noci) for found in paper.figures()}


def names() -> tuple[str, ...]:
    """What `draw` takes."""
    return tuple(_declared())


def setup(name: str) -> Setup:
    """A figure's panels, lines and settings.

    Raises:
        DomainError: there is no such figure.
    """
    if name not in _declared():
        raise domain_error("figure", name, f"one of {', '.join(names())}")
    return _declared()[name]
