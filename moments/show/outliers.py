"""Find a layer that differs from the others of its stack, without knowing the intended scheme.

Published rules give every layer the same variance or one that varies smoothly with its number. A
layer is odd if the others follow such a rule within their sampling error and it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import NormalDist

import numpy as np

FALSE_ALARM = 1e-5
"""Probability that a stack of equally drawn layers has an odd one, over all values together."""

SLIGHT = 0.1
"""|log variance ratio| below which a layer is not odd: 5 % of the size of its output."""

UNLIKELY = 1e-4
"""Probability of the deviations from a rule, below which layers do not follow it."""

SPARE = 4
"""Number of layers, beyond a rule's parameters, needed to believe a rule that is not constant: with
fewer, layers that follow no rule agree with one by chance."""

SHIFTS = (0.0, 1.0, 2.0)
"""Added to a layer's number before taking a power, for code that counts from 0."""


def odd_layers(
    variances: Sequence[float] | np.ndarray, spreads: Sequence[float], values: int = 1
) -> tuple[int, ...]:
    """Indices (from 0) of layers whose variance differs from the rule that the others follow.

    Args:
        variances: one per layer; positive, or 0.
        spreads: relative standard error of each.
        values: how many such rows are tested together, for Bonferroni's bound.
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
    if any(_chi_square(logs, error, basis, everyone) is not None for basis in rules):
        return ()
    near = np.abs(logs - np.median(logs)) <= far * np.hypot(error, float(np.median(error)))
    kept = len(logs) - max(1, len(logs) // 4)
    alike = near.sum() >= kept and _chi_square(logs, error, rules[0], near) is not None
    if alike and (off := _off_rule(logs, error, rules[0], near, far)):
        # With three layers, the first or last may belong to a rule that is not constant.
        return off if len(logs) > 3 or off == (1,) else ()
    best: tuple[float, tuple[int, ...]] = (np.inf, ())
    for basis in rules[1:]:
        for place in range(1, len(logs)):  # not layer 1, where a rule may be steep
            rest = everyone.copy()
            rest[place] = False
            if rest.sum() < basis.shape[1] + SPARE:
                continue
            worst = _chi_square(logs, error, basis, rest)
            if worst is not None and (off := _off_rule(logs, error, basis, rest, far)):
                best = min(best, (worst, off))
    return best[1]


def _rules(layers: int) -> Iterator[np.ndarray]:
    """Bases of the rules: constant, powers of the layer's number, exponential, curved power."""
    number = np.arange(1.0, layers + 1)
    one = np.ones(layers)
    yield one[:, None]
    for shift in SHIFTS:
        yield np.stack([one, np.log(number + shift)], axis=1)
    yield np.stack([one, number], axis=1)
    yield np.stack([one, np.log(number), np.log(number) ** 2], axis=1)


def _chi_square(
    logs: np.ndarray, error: np.ndarray, basis: np.ndarray, of: np.ndarray
) -> float | None:
    """Chi-square per degree of freedom of a rule fitted to the layers `of`; None if it is unlikely,
    or if too few layers are left."""
    from scipy.special import chdtrc

    free = int(of.sum()) - basis.shape[1]
    if free < 1:
        return None
    fit, _ = _fitted(logs, error, basis, of)
    total = float(np.sum(((logs - fit)[of] / error[of]) ** 2))
    return total / free if chdtrc(free, total) >= UNLIKELY else None


def _off_rule(
    logs: np.ndarray, error: np.ndarray, basis: np.ndarray, of: np.ndarray, far: float
) -> tuple[int, ...]:
    """The layers outside `of` if every one of them is off the rule, else none."""
    fit, spread = _fitted(logs, error, basis, of)
    apart = np.abs(logs - fit)
    off = (apart > far * np.hypot(error, spread)) & (apart > SLIGHT)
    return tuple(np.flatnonzero(~of).tolist()) if bool(off[~of].all()) else ()


def _fitted(
    logs: np.ndarray, error: np.ndarray, basis: np.ndarray, of: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fit a rule by weighted least squares to the layers `of`; return its values and errors at all
    layers."""
    weight = 1 / error[of]
    inverse = np.linalg.pinv(basis[of] * weight[:, None])
    values = basis @ (inverse @ (logs[of] * weight))
    return values, np.sqrt(np.square(basis @ inverse).sum(axis=1))
