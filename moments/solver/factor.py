"""The factor on a block's variances at which its output has its target."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import DomainError

LIMIT = math.log(1e12)
"""Largest logarithm of a factor on a variance that is tried."""

CLOSE = 1e-13
"""Relative distance at which a root is one, a few roundings."""

SECANTS = 12


def factor_for(
    output: Callable[[float], float], aim: float, count: int, ends: tuple[float, float]
) -> tuple[float, float]:
    """The factor on `count` variances at which `output` is `aim`, and the output there.

    In one step where the output is the factor to the power `count`; elsewhere by secants in
    logarithms, and a bracketed root where they stray. Where there is none, the end of the range
    that comes nearest.

    Args:
        output: of a factor.
        aim: positive.
        count: matrices that the factor is on.
        ends: logarithms of the smallest and the largest factor.

    Raises:
        DomainError: the output does not depend on the factor.
    """

    def distance(log: float) -> float:
        value = output(math.exp(log))
        if not 0 < value < math.inf:
            return math.copysign(math.inf, value - 1)
        ratio = value / aim
        return math.log(ratio) if 0 < ratio < math.inf else math.log(value) - math.log(aim)

    low, high = ends
    before = min(0.0, high)
    far = distance(before)
    start = min(max(before - far / count, low), high)
    log, slope = start, float(count)
    for _ in range(SECANTS):
        last, far = far, distance(log)
        if abs(far) <= CLOSE:
            return math.exp(log), output(math.exp(log))
        if log != before and math.isfinite(far - last):
            slope = (far - last) / (log - before)
        if not (0.1 < slope / count < 10 and math.isfinite(far)):
            break
        before, log = log, min(max(log - far / slope, low), high)
    log = _bracketed(distance, start, ends)
    return math.exp(log), output(math.exp(log))


def _bracketed(
    distance: Callable[[float], float], start: float, ends: tuple[float, float]
) -> float:
    """Where `distance` is 0, from an interval around `start` that grows; or the nearer end."""
    from scipy.optimize import brentq

    width, below, above = 1e-2, 1.0, 1.0
    low = high = start
    while below * above > 0 and (low > ends[0] or high < ends[1]):
        low, high = max(start - width, ends[0]), min(start + width, ends[1])
        below, above, width = distance(low), distance(high), 4 * width
    if below * above <= 0:
        return float(brentq(distance, low, high, xtol=1e-15, rtol=1e-14))
    if abs(above - below) < 1e-9:
        raise DomainError("a block's output does not depend on its free matrices")
    return low if abs(below) < abs(above) else high
