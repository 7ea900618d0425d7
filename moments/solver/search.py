"""Roots in one number, in several by least squares, and in one number per layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import DomainError

Ends = tuple[float, float]

FIRST_STEP = 0.25
LARGE = 50.0
"""Distance that stands for numbers that overflow."""
ROUNDS = 60


class Search(NamedTuple):
    """Where a search ended.

    Attributes:
        at: the logarithm of the factor, or several.
        met: whether the target is met there, inside the range and not merely in its limit.
    """

    at: Any
    met: bool


def or_nan(value: Callable[[], float]) -> float:
    """A number, or NaN where a model's numbers overflow."""
    try:
        return value()
    except DomainError:
        return math.nan


def root(distance: Callable[[float], float], ends: Ends, tolerance: float) -> Search:
    """Where `distance` is 0, nearest to 0 first; or where it is least.

    Args:
        distance: signed; NaN where there is no number.
        ends: of the range.
        tolerance: a root to well within it is a root.

    Raises:
        DomainError: no number in the whole range.
    """
    from scipy.optimize import brentq, minimize_scalar

    seen: dict[float, float] = {}

    def at(log: float) -> float:
        if log not in seen:
            seen[log] = distance(log)
        return 0.0 if abs(seen[log]) <= 1e-2 * tolerance else seen[log]

    for probe in _probes(ends):
        if at(probe) == 0.0:
            return Search(probe, ends[0] < probe < ends[1])
        inside = sorted(log for log, far in seen.items() if math.isfinite(far))
        for low, high in itertools.pairwise(inside):
            if seen[low] * seen[high] < 0:
                return Search(float(brentq(at, low, high, xtol=1e-14, rtol=1e-14)), True)
    finite = {log: abs(far) for log, far in seen.items() if math.isfinite(far)}
    if not finite:
        raise DomainError("the numbers overflow whatever the free variables are")
    inside = sorted(finite)
    best = min(finite, key=lambda log: finite[log])
    index = inside.index(best)
    low, high = inside[max(index - 1, 0)], inside[min(index + 1, len(inside) - 1)]
    if low < high:
        found = minimize_scalar(
            lambda log: abs(at(log)), bounds=(low, high), method="bounded", options={"maxiter": 40}
        )
        if abs(at(float(found.x))) < finite[best]:
            best = float(found.x)
    inner = inside[0] + 1e-6 < best < inside[-1] - 1e-6
    return Search(best, inner and abs(at(best)) <= tolerance)


def _probes(ends: Ends) -> list[float]:
    start = min(max(0.0, ends[0]), ends[1])
    probes, step = [start], FIRST_STEP
    while start - step > ends[0] or start + step < ends[1]:
        probes += [log for log in (start - step, start + step) if ends[0] < log < ends[1]]
        step *= 2
    return [*probes, *(end for end in ends if end != start)]


def least_squares(
    distances: Callable[[np.ndarray], np.ndarray], ends: list[Ends], tolerance: float
) -> Search:
    """Where several distances are 0 together, or their squares' sum is least."""
    from scipy import optimize

    def finite(x: np.ndarray) -> np.ndarray:
        try:
            return np.nan_to_num(distances(x), nan=LARGE, posinf=LARGE, neginf=-LARGE)
        except DomainError:
            return np.full(sizes, LARGE)

    low, high = np.array(ends).T
    start = np.clip(np.zeros(len(ends)), low + 1e-3, high - 1e-3)
    sizes = len(distances(start))
    found = optimize.least_squares(
        finite, start, bounds=(low, high), xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=100
    )
    inner = bool(np.all((found.x > low + 1e-6) & (found.x < high - 1e-6)))
    return Search(found.x, inner and float(np.max(np.abs(found.fun))) <= tolerance)


def per_layer(
    distances: Callable[[np.ndarray], np.ndarray], layers: int, ends: Ends, tolerance: float
) -> Search:
    """One number per layer, each mostly felt by its own layer's distance.

    Every layer takes a secant step of its own at once, with slopes that start from a step common to
    all. Of a few layers, least squares finish what stalls.
    """
    x = np.zeros(layers)
    far = distances(x)
    trial = np.full(layers, 0.05)
    slope = (distances(trial) - far) / trial
    best, least = x, far
    for _ in range(ROUNDS):
        if np.max(np.abs(least)) <= 1e-1 * tolerance:
            break
        steep = np.where(np.abs(slope) < 1e-3, np.where(slope < 0, -1e-3, 1e-3), slope)
        after = np.clip(x + np.clip(-far / steep, -2.0, 2.0), *ends)
        try:
            new = distances(after)
        except DomainError:
            after = (x + after) / 2
            new = distances(after)
        moved = np.abs(after - x) > 1e-9
        secant = np.divide(new - far, after - x, out=slope.copy(), where=moved)
        usable = (secant * slope > 0) & (np.abs(secant / slope) < 4) & (np.abs(secant / slope) > 0.25)
        slope = np.where(usable, secant, slope)
        x, far = after, new
        if np.max(np.abs(far)) < np.max(np.abs(least)):
            best, least = x, far
    inner = bool(np.all((best > ends[0] + 1e-6) & (best < ends[1] - 1e-6)))
    met = inner and float(np.max(np.abs(least))) <= tolerance
    return Search(best, met)
