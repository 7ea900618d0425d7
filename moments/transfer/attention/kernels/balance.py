"""Joint laws with given marginals, and the self-consistent overlap of one row."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EXPONENT_MAX = 40.0
"""Cap on exponents: reached only beyond the tables of exact rows, where nothing is claimed."""

TOLERANCE = 2e-4
"""Largest change of an overlap at which its iteration ends."""

ITERATIONS = 30
"""Most steps to a self-consistent overlap: rows of a text need six to `TOLERANCE`, and only those
of logit variances beyond 30 use all."""

SELF_SWEEPS = 4
"""Sinkhorn sweeps within a step of that iteration, which itself goes on balancing."""

JOINT_SWEEPS = 3
"""Sinkhorn sweeps of the joint law of two rows."""

TANGENT_SWEEPS = 6
"""Sweeps that bring the means of its derivative to 0."""


Real = TypeVar("Real", np.float32, np.float64)


def balanced(
    joint: NDArray[Real], weights: NDArray[Real], weights2: NDArray[Real], sweeps: int
) -> NDArray[Real]:
    """Sinkhorn: scale `joint` (..., n, k) so that its means over either index are 1.

    The means are weighted by `weights` (n,) and `weights2` (k,), which sum to 1.
    """
    left: NDArray[Real] = np.ones_like(joint[..., 0])
    right: NDArray[Real] = np.ones_like(joint[..., 0, :])
    for _ in range(sweeps):
        np.divide(1.0, ((left * weights)[..., None, :] @ joint)[..., 0, :], out=right)
        np.divide(1.0, (joint @ (right * weights2)[..., None])[..., 0], out=left)
    scaled = joint * left[..., :, None]
    scaled *= right[..., None, :]
    return scaled


SMALL_EXPONENT = 0.02
"""Exponents up to which e^x - 1 is its series to third order, 3e-7 of itself in error."""


def joint_excess(
    exponents: NDArray[Real], weights: NDArray[Real], weights2: NDArray[Real], sweeps: int
) -> NDArray[Real]:
    """`balanced` of e^exponents, less 1, to the relative precision of the numbers.

    Joint laws of small exponents are 1 to single precision. What they have beyond 1 is therefore
    scaled by itself: with means 1 + m, the factor 1/(1 + m) has -m/(1 + m) beyond 1.
    """
    found = balanced(np.exp(exponents), weights, weights2, sweeps)
    found -= 1.0
    small = np.abs(exponents).max((-2, -1)) <= SMALL_EXPONENT
    if not small.any():
        return found
    x = exponents[small]
    own = np.broadcast_to(weights, exponents[..., 0].shape)[small]
    other = np.broadcast_to(weights2, exponents[..., 0, :].shape)[small]
    excess = x * (1.0 + x * (0.5 + x / 6.0))
    left = np.zeros_like(own)
    right = np.zeros_like(other)
    for _ in range(sweeps):
        held = left * own
        mean = ((own + held)[..., None, :] @ excess)[..., 0, :] + held.sum(-1, keepdims=True)
        right = -mean / (1.0 + mean)
        held = right * other
        mean = (excess @ (other + held)[..., None])[..., 0] + held.sum(-1, keepdims=True)
        left = -mean / (1.0 + mean)
    factor = left[..., :, None] * (1.0 + right[..., None, :]) + right[..., None, :]
    found[small] = excess + factor + factor * excess
    return found


def tangent(
    joint: NDArray[Real], direction: NDArray[Real], weights: NDArray[Real], weights2: NDArray[Real]
) -> NDArray[Real]:
    """joint o (direction + u 1^T + 1 v^T) whose weighted means over either index are 0.

    `joint` (..., n, k) has means 1, so that its spectrum in [-1, 1] makes the sweeps contract.
    """
    moved = joint * direction
    rows = (moved @ weights2[..., None])[..., 0]
    columns = (weights[..., None, :] @ moved)[..., 0, :]
    right = np.zeros_like(columns)
    left = rows
    for _ in range(TANGENT_SWEEPS):
        left = -rows - (joint @ (weights2 * right)[..., None])[..., 0]
        right = -columns - ((weights * left)[..., None, :] @ joint)[..., 0, :]
    moved += joint * (left[..., :, None] + right[..., None, :])
    return moved


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
    # single precision, three orders of magnitude below the tolerance
    identity = np.eye(len(weights), dtype=np.float32)
    scaled = np.clip(exponent * kernel, -1e30, 1e30).astype(np.float32)
    shares = weights.astype(np.float32)
    guess = first_guess / np.maximum(first_guess.sum(1, keepdims=True), 1e-300)
    overlap = guess.astype(np.float32)
    step, last = 0.5, None
    for _ in range(ITERATIONS):
        response = identity - overlap
        projected = response @ scaled @ response.T
        joint = np.exp(np.minimum(projected, EXPONENT_MAX, out=projected), out=projected)
        change = balanced(joint, shares, shares, SELF_SWEEPS)
        change *= shares
        change -= overlap
        if last is not None:  # the step that would have cancelled the last change (Irons and Tuck)
            turned = last - change
            size = float(np.vdot(turned, turned))
            step = min(max(step * float(np.vdot(last, turned)) / max(size, 1e-30), 0.25), 1.0)
        last = change
        overlap = overlap + np.float32(step) * change
        if np.abs(change).max() < TOLERANCE:
            break
    return np.asarray(identity - overlap, dtype=np.float64)
