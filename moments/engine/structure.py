"""States and declarations as their numbers and the structure that holds them.

Values of one structure are evaluated at once, with arrays where each has a number (`joined`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .composition import Component
from .state import Fluctuation, Gradient, Kernel, Signal

_VALUES = (Kernel, Fluctuation, Signal, Gradient)


class Unlike(Exception):
    """Values that differ in more than numbers."""


@functools.cache
def _fields(kind: Any) -> tuple[str, ...] | None:
    """The names to walk through of a class that holds numbers; None: it is no such class."""
    if kind in _VALUES or issubclass(kind, Component):
        names = getattr(kind, "_fields", None) or [f.name for f in dataclasses.fields(kind)]
        return tuple(name for name in names if name != "diagnostics")
    return None


def flattened(value: Any, numbers: list[Any], axes: bool = False) -> Any:
    """The structure of a state or a declaration, hashable; its numbers are appended.

    A number is a float, or an array (B,) of one for each of B configurations; with `axes` an array
    of any shape.

    Raises:
        Unlike: a state with other axes.
    """
    kind: Any = type(value)
    if kind is float or (kind is np.ndarray and (axes or value.ndim == 1)):
        numbers.append(value)
        return float
    if kind is Kernel and value.resolved:
        raise Unlike("tokens distinguished")
    names = _fields(kind)
    if names is not None:
        return (kind, *[(name, flattened(getattr(value, name), numbers, axes)) for name in names])
    if kind is tuple:
        return (tuple, *[flattened(one, numbers, axes) for one in value])
    if kind is dict:
        return (dict, *[(name, flattened(one, numbers, axes)) for name, one in value.items()])
    if isinstance(value, np.floating):
        numbers.append(float(value))
        return float
    if isinstance(value, np.ndarray):
        raise Unlike("a state with axes")
    return value


def unflattened(structure: Any, numbers: Iterator[Any]) -> Any:
    """The value of that structure with those numbers."""
    if structure is float:
        return next(numbers)
    if not (isinstance(structure, tuple) and structure and isinstance(structure[0], type)):
        return structure
    kind, *rest = structure
    if kind is tuple:
        return tuple(unflattened(one, numbers) for one in rest)
    return kind(**{name: unflattened(one, numbers) for name, one in rest})


@functools.lru_cache(maxsize=512)
def fields_of(structure: Any, field: str = "") -> tuple[str, ...]:
    """Names of the fields that hold its numbers, in their order."""
    if structure is float:
        return (field,)
    if not (isinstance(structure, tuple) and structure and isinstance(structure[0], type)):
        return ()
    kind, *rest = structure
    named = ((field, one) for one in rest) if kind is tuple else rest
    return tuple(name for one, inner in named for name in fields_of(inner, one))


def joined(values: Sequence[Any], join: Callable[[str, tuple[Any, ...]], Any]) -> Any:
    """One value of the structure that all have.

    Args:
        join: of a field's name and its numbers, the number that takes their place.

    Raises:
        Unlike: they differ in more than numbers.
    """
    numbers: list[list[Any]] = [[] for _ in values]
    structure, *others = (flattened(*one, True) for one in zip(values, numbers, strict=True))
    for other in others:
        if other != structure:
            raise Unlike(f"{structure!r} is not {other!r}")
    columns = zip(fields_of(structure), zip(*numbers, strict=True), strict=True)
    return unflattened(structure, (join(*column) for column in columns))
