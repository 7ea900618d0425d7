"""Rows that attend to nearly the same keys, and what such a class shares.

A class stands for the row that attends to every key its members attend to. It shares that row's
self-consistent overlaps; the mean attention of its members stays their own, and the strength of
their overlaps is rescaled row by row, exactly so for an exchangeable kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

EXACT_KEYS = 4
"""Rows of up to this many keys share a class only with rows of the very same keys."""

SUPPORT_SLACK = 0.3
"""Fraction of the keys beyond `EXACT_KEYS` by which two rows of one class may differ."""

NORM_SLACK = 0.15
"""Largest difference of log C_ii between a class's rows."""


@dataclass(frozen=True)
class RowClass:
    """One class of attention rows.

    Attributes:
        rows: (a,) indices of its queries.
        keys: (n,) indices of the keys that any of them attends to.
        row: index of the class's own row in the row statistics.
        weights: (a, n) mean attention of its queries.
        own_weights: (n,) mean attention of the class's own row.
        response: (n, n) 1 - A with A_jl = E[a_j a_l]/E a_j: how logit shifts move the softmax.
    """

    rows: Indices
    keys: Indices
    row: int
    weights: Array
    own_weights: Array
    response: Array


def group_rows(allowed: Array, temperature: Array) -> list[Indices]:
    """Partition the rows into classes of nearly equal supports and nearly equal query norms.

    Args:
        allowed: (L, L) zeros and ones.
        temperature: (L,) second moments C_ii of the queries.
    """
    shared = allowed @ allowed.T
    count = np.diag(shared)
    either = count[:, None] + count[None] - shared
    log_temperature = np.log(temperature)
    free = np.ones(len(allowed), dtype=bool)
    groups = []
    for leader in np.argsort(-count, kind="stable"):
        if not free[leader]:
            continue
        slack = SUPPORT_SLACK * np.maximum(either[leader] - EXACT_KEYS, 0.0)
        alike = either[leader] - shared[leader] <= slack
        alike &= np.abs(log_temperature - log_temperature[leader]) <= NORM_SLACK
        members = np.flatnonzero(alike & free)
        free[members] = False
        groups.append(members)
    return groups


def balanced(joint: Array, weights: Array, weights2: Array, sweeps: int) -> Array:
    """Sinkhorn: scale `joint` (..., n, k) so that its means over either index are 1.

    The means are weighted by `weights` (n,) and `weights2` (k,), which sum to 1.
    """
    left = np.ones(joint.shape[:-1])
    right = np.ones((*joint.shape[:-2], joint.shape[-1]))
    for _ in range(sweeps):
        right = 1.0 / ((left * weights)[..., None, :] @ joint)[..., 0, :]
        left = 1.0 / (joint @ (right * weights2)[..., None])[..., 0]
    return np.asarray(joint * left[..., :, None] * right[..., None, :])


def self_overlap(kernel: Array, weights: Array, first_guess: Array, exponent: float) -> Array:
    """Solve A = F/w, F = w w^T o exp(exponent (1 - A) C (1 - A)^T) scaled to the marginals w.

    Args:
        kernel: (n, n) second moments of the keys.
        weights: (n,) mean attention.
        first_guess: (n, n) unnormalised A.
        exponent: beta(1), per unit of the projected kernel.

    Returns:
        1 - A.
    """
    identity = np.eye(len(weights))
    overlap = first_guess / first_guess.sum(1, keepdims=True)
    for _ in range(30):
        response = identity - overlap
        projected = response @ kernel @ response.T
        joint = np.exp(np.minimum(exponent * projected, 40.0))
        update = balanced(joint, weights, weights, 4) * weights
        change = np.abs(update - overlap).max()
        overlap = 0.5 * (overlap + update)
        if change < 2e-4:
            break
    return np.asarray(identity - overlap)
