"""Roots in one number, in several by least squares, and in one number per layer."""

from __future__ import annotations

import contextlib
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
PATIENCE = 4
"""Rounds that may pass before the largest distance of any layer has halved."""
FEW = 64
"""Layers up to which a Jacobian of one column per layer is affordable."""


class Search(NamedTuple):
    """Where a search ended: the logarithm of the factor, or several, and whether the target is
    reached there, inside the range and not merely in its limit."""

    at: Any
    reached: bool


def or_nan(value: Callable[[], float]) -> float:
    """A number, or NaN where a model's numbers overflow."""
    try:
        return value()
    except DomainError:
        return math.nan


def root(distance: Callable[[float], float], ends: Ends, tolerance: float) -> Search:
    """Where the signed `distance` (NaN where there is none) is 0, nearest to 0 first and where it
    falls; or where it is least. DomainError where there is no number in the whole range."""
    from scipy.optimize import brentq, minimize_scalar

    seen: dict[float, float] = {}

    def at(log: float) -> float:
        if log not in seen:
            seen[log] = distance(log)
        return 0.0 if abs(seen[log]) <= 1e-2 * tolerance else seen[log]

    probes = _probes(ends)
    while probes:
        # Where the nearest distances fall to one side, a root is looked for there first.
        sides = [abs(seen.get(log, math.nan)) for log in (-FIRST_STEP, 0.0, FIRST_STEP)]
        falls = (sides[0] < sides[1] < sides[2]) - (sides[0] > sides[1] > sides[2])
        probe = next((log for log in probes if log * falls <= 0), probes[0])
        probes.remove(probe)
        if at(probe) == 0.0:
            return Search(probe, ends[0] < probe < ends[1])
        inside = sorted(log for log, far in seen.items() if math.isfinite(far))
        for low, high in itertools.pairwise(inside):
            if seen[low] * seen[high] < 0:
                with contextlib.suppress(ValueError):  # there is no number somewhere between
                    return Search(float(brentq(at, low, high, xtol=1e-14, rtol=1e-14)), True)
    finite = {log: abs(far) for log, far in seen.items() if math.isfinite(far)}
    if not finite:
        raise DomainError("the numbers overflow whatever the free variables are")
    inside, least = sorted(finite), min(finite.values())
    # Where nothing depends on the factor, it stays what it is.
    best = next(log for log in finite if finite[log] <= least * (1 + 1e-9) + 1e-15)
    index = inside.index(best)
    low, high = inside[max(index - 1, 0)], inside[min(index + 1, len(inside) - 1)]

    def least_at(log: float) -> float:
        if at(log) * seen[best] <= 0:
            raise _Crossed(log)
        return abs(at(log))

    if low < high:
        try:
            # A least distance is known to the square of the place's error.
            found = minimize_scalar(
                least_at, bounds=(low, high), method="bounded", options={"xatol": 1e-3}
            )
        except _Crossed as crossed:
            beyond = float(crossed.args[0])
            if at(beyond) != 0.0:
                beyond = float(brentq(at, *sorted((best, beyond)), xtol=1e-14, rtol=1e-14))
            return Search(beyond, True)
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


class _Crossed(Exception):
    """The distance has another sign here than at every probe."""


class _Met(Exception):
    """All distances are well within the tolerance."""


Distances = Callable[[np.ndarray], np.ndarray]


def least_squares(
    distances: Distances, ends: list[Ends], tolerance: float, start: Any = 0.0, most: int = 100
) -> Search:
    """Where several signed distances are 0 together, or their squares' sum is least, from `start`
    by at most so many derivatives; `ends` are those of every number's range."""
    from scipy import optimize

    low, high = np.array(ends).T
    at = np.clip(np.full(len(ends), start), low + 1e-3, high - 1e-3)
    count = len(distances(at))

    def finite(x: np.ndarray) -> np.ndarray:
        nonlocal at
        found = _or_large(distances, x, count)
        far: np.ndarray = np.nan_to_num(found, nan=LARGE, posinf=LARGE, neginf=-LARGE)
        if np.max(np.abs(far)) <= 1e-2 * tolerance:
            at = x.copy()
            raise _Met
        return far

    try:
        found = optimize.least_squares(
            finite, at, bounds=(low, high), xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=most
        )
    except _Met:
        return Search(at, _inside(at, low, high))
    reached = float(np.max(np.abs(found.fun))) <= tolerance
    return Search(found.x, reached and _inside(found.x, low, high))


def _or_large(distances: Distances, x: np.ndarray, count: int) -> np.ndarray:
    try:
        return np.asarray(distances(x))
    except DomainError:
        return np.full(count, LARGE)


def _inside(x: np.ndarray, low: Any, high: Any) -> bool:
    return bool(np.all((x > low + 1e-6) & (x < high - 1e-6)))


def per_layer(distances: Distances, layers: int, ends: Ends, tolerance: float) -> Search:
    """One number per layer, each mostly felt by its own layer's distance, by secant steps at once;
    where that stalls, by least squares, or Newton's method in Krylov spaces where layers are many.
    """
    x, far = np.zeros(layers), distances(np.zeros(layers))
    step = np.full(layers, 0.05)
    slope = (distances(step) - far) / step
    best, least, rounds = x, float(np.max(np.abs(far))), 0
    while least > 1e-1 * tolerance and rounds < PATIENCE:
        steep = np.where(np.abs(slope) < 1e-3, np.where(slope < 0, -1e-3, 1e-3), slope)
        after = np.clip(x + np.clip(-far / steep, -2.0, 2.0), *ends)
        new = _or_large(distances, after, layers)
        moved = np.abs(after - x) > 1e-9
        secant = np.divide(new - far, after - x, out=slope.copy(), where=moved)
        usable = (secant / steep > 0.25) & (secant / steep < 4)
        slope = np.where(usable, secant, slope)
        x, far, rounds = after, new, rounds + 1
        if np.max(np.abs(far)) < 0.5 * least:
            rounds = 0
        if np.max(np.abs(far)) < least:
            best, least = x, float(np.max(np.abs(far)))
    if least <= tolerance:
        return Search(best, _inside(best, *ends))
    if layers <= FEW:
        return least_squares(distances, [ends] * layers, tolerance, best, 12)
    return _krylov(distances, ends, tolerance, best)


def _krylov(distances: Distances, ends: Ends, tolerance: float, start: np.ndarray) -> Search:
    from scipy.optimize import root as many

    def finite(x: np.ndarray) -> np.ndarray:
        return _or_large(distances, np.clip(x, *ends), len(start))

    options = {"fatol": 1e-1 * tolerance, "maxiter": 8}
    found = np.clip(many(finite, start, method="krylov", options=options).x, *ends)
    far, before = finite(found), finite(start)
    if np.max(np.abs(far)) > np.max(np.abs(before)):
        found, far = start, before
    return Search(found, _inside(found, *ends) and float(np.max(np.abs(far))) <= tolerance)
