"""All figures by name."""

from __future__ import annotations

import importlib
from functools import cache

from ...errors import domain_error
from .setup import Setup

_NUMBERS = {"kedia": (1, 2, 3, 4, 7, 8, 13), "sun": (2, 3, 4, 6), "noci": (8, 9, 10)}
NAMES = {f"{paper}-{n}": paper for paper, numbers in _NUMBERS.items() for n in numbers}


def names() -> tuple[str, ...]:
    """What `draw` takes."""
    return tuple(NAMES)


@cache
def _declared(paper: str) -> dict[str, Setup]:
    module = importlib.import_module(f".{paper}", __package__)
    return {found.name: found for found in module.figures()}


def setup(name: str) -> Setup:
    """A figure's panels, lines and settings.

    Raises:
        DomainError: there is no such figure.
    """
    if name not in NAMES:
        raise domain_error("figure", name, f"one of {', '.join(NAMES)}")
    return _declared(NAMES[name])[name]
