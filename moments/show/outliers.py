"""One layer that is unlike the others of its stack, without any scheme to hold it against.

Published rules keep a variance or change it smoothly with the layer's number. A layer is odd where
the others follow such a rule within their sampling error and it does not.
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

UNLIKELY = 1e-4
"""Probability of deviations from a rule this large, below which layers do not follow it."""

SPARE = 4
"""Layers beyond a rule's parameters without which one that is not constant is not believed: layers
that follow none agree with one of so few parameters by chance."""

SHIFTS = (0.0, 1.0, 2.0)
"""Added to a layer's number before a power is taken, as code that counts from 0 does."""


def odd_layers(
    variances: Sequence[float] | np.ndarray, spreads: Sequence[float], values: int = 1
) -> tuple[int, ...]:
    """Places (from 0) of layers whose variance is unlike that of the others, who follow a rule.

    Args:
        variances: one per layer; positive, or 0.
        spreads: relative standard error of each.
        values: how many such rows are asked about together, for Bonferroni's bound.
    """
    square = np.asarray(variances, dtype=float)
    zero = square == 0
    if zero.any():
        if len(zero) == 2 and not zero.all():
            return (int(np.argmax(zero)),)  # a zero is odd next to a single other
        few = zero if 2 * zero.sum() < len(zero) else ~zero
        return tuple(np.flatnonzero(few).tolist()) if 2 * few.sum() < len(few) else ()
    if len(square) < 3:
        return ()
    logs, error = np.log(square), np.maximum(np.asarray(spreads, dtype=float), 1e-6)
    far = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * max(values, 1) * len(logs)))
    rules = list(_rules(len(logs)))
    everyone = np.ones(len(logs), dtype=bool)
    if any(_follows(logs, error, basis, everyone) is not None for basis in rules):
        return ()
    near = np.abs(logs - np.median(logs)) <= far * np.hypot(error, float(np.median(error)))
    kept = len(logs) - max(1, len(logs) // 4)
    alike = near.sum() >= kept and _follows(logs, error, rules[0], near) is not None
    if alike and (off := _off(logs, error, rules[0], near, far)):
        # Of three layers the first and the last may be the end of a rule.
        return off if len(logs) > 3 or off == (1,) else ()
    best: tuple[float, tuple[int, ...]] = (np.inf, ())
    for basis in rules[1:]:
        for place in range(1, len(logs)):  # a rule may start steeply
            rest = everyone.copy()
            rest[place] = False
            if rest.sum() < basis.shape[1] + SPARE:
                continue
            worst = _follows(logs, error, basis, rest)
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
    logs: np.ndarray, error: np.ndarray, basis: np.ndarray, of: np.ndarray
) -> float | None:
    """The sum of squares of some layers' deviations from a rule fitted to them, in standard errors,
    over its degrees of freedom; None where chi-square makes it unlikely, or too few layers are
    left."""
    from scipy.special import chdtrc

    free = int(of.sum()) - basis.shape[1]
    if free < 1:
        return None
    fit, _ = _fitted(logs, error, basis, of)
    total = float(np.sum(((logs - fit)[of] / error[of]) ** 2))
    return total / free if chdtrc(free, total) >= UNLIKELY else None


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
