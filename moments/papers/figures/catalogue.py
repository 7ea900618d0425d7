"""All figures by name."""

from __future__ import annotations

import importlib
from functools import cache

from ...errors import domain_error
from .setup import Setup

NAMES = {
    "kedia-1": "kedia",
    "kedia-2": "kedia",
    "kedia-3": "kedia",
    "kedia-4": "kedia",
    "kedia-7": "kedia",
    "kedia-8": "kedia",
    "kedia-13": "kedia",
    "sun-2": "sun",
    "sun-3": "sun",
    "sun-4": "sun",
    "sun-6": "sun",
    "noci-8": "noci",
    "noci-9": "noci",
    "noci-10": "noci",
}


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
