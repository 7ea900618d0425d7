"""One layer that is unlike the others of its stack, without any scheme to hold it against.

Published rules let a variance be the same in every layer or change smoothly with the layer's
number. A layer is odd where the others follow such a rule within their sampling error and it does
not: where the others follow none, nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import NormalDist

import numpy as np

FALSE_ALARM = 1e-5
"""Probability that a stack of layers drawn alike has an odd one, over all its values together."""

SLIGHT = 0.1
"""Size of a logarithm of variances below which a layer is not odd: a twentieth of the size of what
it gives."""

SHIFTS = (0.0, 1.0, 2.0)
"""Added to a layer's number before a power is taken, as code that counts from 0 does."""


def odd_layers(
    variances: Sequence[float], spreads: Sequence[float], values: int = 1
) -> tuple[int, ...]:
    """Places of layers whose variance is unlike that of the others.

    Args:
        variances: one per layer; positive, or 0.
        spreads: relative standard error of each.
        values: how many such rows are asked about together, for Bonferroni's bound.

    Returns:
        From 0; empty where there are fewer than three layers, or where no rule is followed by the
        others.
    """
    square = np.asarray(variances, dtype=float)
    zero = square == 0
    if zero.any():
        few = zero if 2 * zero.sum() < len(zero) else ~zero
        return tuple(np.flatnonzero(few).tolist()) if 2 * few.sum() < len(few) else ()
    if len(square) < 3:
        return ()
    logs, error = np.log(square), np.maximum(np.asarray(spreads, dtype=float), 1e-6)
    far = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * max(values, 1) * len(logs)))
    rules = list(_rules(len(logs)))
    everyone = np.ones(len(logs), dtype=bool)
    if any(_follows(logs, error, basis, everyone, far) is not None for basis in rules):
        return ()
    near = np.abs(logs - np.median(logs)) <= far * np.hypot(error, float(np.median(error)))
    kept = len(logs) - max(1, len(logs) // 4)
    if near.sum() >= kept and (off := _off(logs, error, rules[0], near, far)):
        return off
    best: tuple[float, tuple[int, ...]] = (np.inf, ())
    for basis in rules[1:]:
        for place in range(1, len(logs)):  # a rule may start steeply
            rest = everyone.copy()
            rest[place] = False
            if rest.sum() < basis.shape[1] + 2:
                continue
            worst = _follows(logs, error, basis, rest, far)
            if worst is not None and (off := _off(logs, error, basis, rest, far)):
                best = min(best, (worst, off))
    return best[1]


def _rules(layers: int) -> Iterator[np.ndarray]:
    """Constants, powers of the layer's number, exponentials, and what bends a power a little."""
    number = np.arange(1.0, layers + 1)
    one = np.ones(layers)
    yield one[:, None]
    for shift in SHIFTS:
        yield np.stack([one, np.log(number + shift)], axis=1)
    yield np.stack([one, number], axis=1)
    yield np.stack([one, np.log(number), np.log(number) ** 2], axis=1)


def _follows(
    logs: np.ndarray, error: np.ndarray, basis: np.ndarray, of: np.ndarray, far: float
) -> float | None:
    """The largest deviation of some layers from a rule fitted to them, in standard errors; None
    where one is too far, or where so few layers follow any rule."""
    if of.sum() <= basis.shape[1]:
        return None
    fit, _ = _fitted(logs, error, basis, of)
    worst = float(np.max(np.abs((logs - fit)[of]) / error[of]))
    return worst if worst <= far else None


def _off(
    logs: np.ndarray, error: np.ndarray, basis: np.ndarray, of: np.ndarray, far: float
) -> tuple[int, ...]:
    """The other layers, if every one of them is off the rule; else none."""
    fit, spread = _fitted(logs, error, basis, of)
    apart = np.abs(logs - fit)
    off = (apart > far * np.hypot(error, spread)) & (apart > SLIGHT)
    return tuple(np.flatnonzero(~of).tolist()) if bool(off[~of].all()) else ()


def _fitted(
    logs: np.ndarray, error: np.ndarray, basis: np.ndarray, of: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A rule by weighted least squares on some layers: its values everywhere, and their errors."""
    weight = 1 / error[of]
    inverse = np.linalg.pinv(basis[of] * weight[:, None])
    values = basis @ (inverse @ (logs[of] * weight))
    return values, np.sqrt(np.square(basis @ inverse).sum(axis=1))
