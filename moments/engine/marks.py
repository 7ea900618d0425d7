"""What a branch is made of, as far as the gradient through it depends on that."""

from __future__ import annotations

from typing import Any

import numpy as np

from .composition import Chain, Component, Parallel


def splits(component: Component) -> bool:
    """Whether a branch ends in parallel branches, which take their own parts."""
    last = component.parts[-1] if isinstance(component, Chain) else component
    return isinstance(last, Parallel)


def mixes_tokens(component: Component) -> bool:
    """Whether tokens receive what others send."""
    return _any(component, "mixes_tokens")


def normalises(component: Component) -> bool:
    """Whether the output ignores the input's scale."""
    return _any(component, "normalises")


def grouped_norm(component: Component) -> Any | None:
    """The normalisation that a branch begins with, where it is one in groups of features."""
    for part in _inner(component):
        if normalises(part):
            return grouped_norm(part)
    return component if normalises(component) and getattr(component, "groups", 1) > 1 else None


def packed(component: Component) -> np.ndarray | None:
    """(B, L) the documents that a branch's attention keeps apart; None: each row is one."""
    for part in _inner(component):
        if (found := packed(part)) is not None:
            return found
    numbers = getattr(component, "padding", None)
    if numbers is None or np.max(numbers) < 2:
        return None
    return np.asarray(numbers, dtype=np.int64)


def _any(component: Component, mark: str) -> bool:
    held = any(_any(part, mark) for part in _inner(component))
    return held or bool(getattr(component, mark, False))


def _inner(component: Component) -> tuple[Component, ...]:
    if isinstance(component, Chain):
        return component.parts
    return component.branches if isinstance(component, Parallel) else ()
