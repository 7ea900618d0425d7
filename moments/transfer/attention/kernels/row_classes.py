"""Which rows of a mask are alike, and what alike rows share.

Two levels. Rows with the same keys and nearly the same query norm are one *pattern*: full
attention has one pattern, a causal mask one per row. Patterns with nearly the same keys form a
*class*, which stands for the row that attends to every key its members attend to. A class shares
that row's self-consistent overlaps; the mean attention of its patterns stays their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

EXACT_KEYS = 4
"""Patterns of up to this many keys never share a class."""

SUPPORT_SLACK = 0.3
"""Fraction of the keys beyond `EXACT_KEYS` by which two patterns of one class may differ."""

NORM_STEP = 0.05
"""Queries whose log C_ii round to the same multiple of this may share a pattern."""


@dataclass(frozen=True)
class RowClass:
    """One class of patterns.

    Attributes:
        patterns: the a indices of its patterns.
        keys: the n indices of the keys that any of them attends to.
        row: index of the class's own row in the row statistics.
        weights: (a, n) mean attention of its patterns.
        own_weights: (n,) mean attention of the class's own row.
        response: (n, n) 1 - A with A_jl = E[a_j a_l]/E a_j: how logit shifts move the softmax.
    """

    patterns: slice
    keys: slice | Indices
    row: int
    weights: Array
    own_weights: Array
    response: Array


def find_patterns(prior: Array, temperature: Array, biased: bool) -> tuple[Indices, Indices]:
    """Distinct rows.

    Args:
        prior: (L, n) weights of every row's keys at vanishing logits, of sum 1.
        temperature: (L,) second moments C_ii of the queries.
        biased: whether a row prefers some of its keys; otherwise only which it holds is compared.

    Returns:
        (P,) the first row of every pattern, and (L,) the pattern of every row.
    """
    bucket = np.round(np.log(temperature) / NORM_STEP).astype(np.int64)
    held = np.packbits(prior > 0.0, axis=1)
    if biased:
        levels = np.round(prior / prior.max(1, keepdims=True), 6).astype(np.float32)
        held = levels.view(np.uint8)
    signature = np.hstack([held, bucket[:, None].view(np.uint8)])
    _, first, inverse = np.unique(signature, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.argsort(order)
    return first[order], rank[inverse.ravel()]


def group_patterns(prior: Array, temperature: Array, biased: bool) -> list[Indices]:
    """Partition patterns into classes, those of few keys first.

    Args:
        prior: (P, n) weights of the keys at vanishing logits, of sum 1.
        temperature: (P,) second moments of the queries.
        biased: whether a row prefers some of its keys: then what two patterns do not share is not
            a number of keys but half the distance of their weights, on the same scale.
    """
    allowed = (prior > 0.0).astype(np.float64)
    shared = allowed @ allowed.T
    count = 1.0 / (prior * prior).sum(1)
    either = np.diag(shared)[:, None] + np.diag(shared) - shared
    log_temperature = np.log(temperature)
    free = np.ones(len(allowed), dtype=bool)
    groups = []
    for leader in np.argsort(-count, kind="stable"):
        if not free[leader]:
            continue
        if biased:
            apart = 0.5 * np.abs(prior - prior[leader]).sum(1)
            alike = apart <= SUPPORT_SLACK * max(1.0 - EXACT_KEYS / count[leader], 0.0)
        else:
            slack = SUPPORT_SLACK * np.maximum(either[leader] - EXACT_KEYS, 0.0)
            alike = either[leader] - shared[leader] <= slack
        alike &= np.abs(log_temperature - log_temperature[leader]) <= NORM_STEP
        members = np.flatnonzero(alike & free)
        free[members] = False
        groups.append(members)
    return groups[::-1]


def stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """(c, ...) of parts of one shape: a view where there is but one."""
    if len(parts) == 1:
        return parts[0][None]
    whole = np.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype)
    for index, part in enumerate(parts):
        whole[index] = part
    return whole


def as_slice(indices: Indices) -> slice | Indices:
    """The same increasing indices, as a slice where they are consecutive: a view, not a copy."""
    low, high = int(indices[0]), int(indices[-1]) + 1
    return slice(low, high) if high - low == len(indices) else indices


def window(rows: slice | Indices, columns: slice | Indices) -> Any:
    """Index of a submatrix in the last two axes."""
    if isinstance(rows, slice) and isinstance(columns, slice):
        return (..., rows, columns)
    return (..., _indices(rows)[:, None], _indices(columns))


def _indices(index: slice | Indices) -> Indices:
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index
