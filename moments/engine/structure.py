"""Flattening of states and declarations into numbers and structure, to evaluate several together.

Values of one structure are `joined` into one value whose numbers are arrays.
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


class DifferentStructure(Exception):
    """Raised for values of different structure."""


@functools.cache
def _fields(kind: Any) -> tuple[str, ...] | None:
    """Names of the fields of a state or component class; None for other classes."""
    if kind in _VALUES or issubclass(kind, Component):
        names = getattr(kind, "_fields", None) or [f.name for f in dataclasses.fields(kind)]
        return tuple(name for name in names if name != "diagnostics")
    return None


def flattened(value: Any, numbers: list[Any], axes: bool = False) -> Any:
    """Append the numbers of a state or declaration to `numbers` and return its hashable structure.

    A number is a float or an array (B,) over configurations, with `axes` an array of any shape.

    Raises:
        Unlike: an array of another shape.
    """
    kind: Any = type(value)
    if kind is float or (kind is np.ndarray and (axes or value.ndim == 1)):
        numbers.append(value)
        return float
    if kind is Kernel and value.resolved:
        raise DifferentStructure("tokens distinguished")
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
        raise DifferentStructure("a state with axes")
    return value


def unflattened(structure: Any, numbers: Iterator[Any]) -> Any:
    """The inverse of `flattened`."""
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
    """Names of the fields that hold the numbers of a structure, in order."""
    if structure is float:
        return (field,)
    if not (isinstance(structure, tuple) and structure and isinstance(structure[0], type)):
        return ()
    kind, *rest = structure
    members = [(field, one) for one in rest] if kind is tuple else rest
    return tuple(name for member, inner in members for name in fields_of(inner, member))


def joined(values: Sequence[Any], join: Callable[[str, tuple[Any, ...]], Any]) -> Any:
    """Join values of one structure into one.

    Args:
        join: returns the joined number, from a field's name and the values' numbers.

    Raises:
        Unlike: the structures differ.
    """
    numbers: list[list[Any]] = [[] for _ in values]
    structure, *others = (flattened(*one, True) for one in zip(values, numbers, strict=True))
    for other in others:
        if other != structure:
            raise DifferentStructure(f"{structure!r} is not {other!r}")
    columns = zip(fields_of(structure), zip(*numbers, strict=True), strict=True)
    return unflattened(structure, (join(*column) for column in columns))
