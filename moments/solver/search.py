"""Root finding in one unknown, in several by least squares, and in one unknown per layer."""

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
"""Distance that replaces one that overflows."""
PATIENCE = 4
"""Secant rounds in which the largest distance must halve."""
FEW = 64
"""Largest number of layers for a dense Jacobian, one column per layer."""


class Search(NamedTuple):
    """Where a search ended: the logarithms of one or several factors, and whether the target is
    reached there, strictly inside the range."""

    at: Any
    reached: bool


def or_nan(value: Callable[[], float]) -> float:
    """The value, or NaN if the model's numbers overflow."""
    try:
        return value()
    except DomainError:
        return math.nan


def root(distance: Callable[[float], float], ends: Ends, tolerance: float) -> Search:
    """Find a root of the signed `distance` (NaN if the model overflows), or its least absolute
    value if there is no root; DomainError if it is NaN in the whole range.

    Probes move away from 0, first to the side on which the distance falls.
    """
    from scipy.optimize import brentq, minimize_scalar

    known: dict[float, float] = {}

    def at(log: float) -> float:
        if log not in known:
            known[log] = distance(log)
        return 0.0 if abs(known[log]) <= 1e-2 * tolerance else known[log]

    probes = _probes(ends)
    while probes:
        sides = [abs(known.get(log, math.nan)) for log in (-FIRST_STEP, 0.0, FIRST_STEP)]
        falls = (sides[0] < sides[1] < sides[2]) - (sides[0] > sides[1] > sides[2])
        probe = next((log for log in probes if log * falls <= 0), probes[0])
        probes.remove(probe)
        if at(probe) == 0.0:
            return Search(probe, ends[0] < probe < ends[1])
        inside = sorted(log for log, far in known.items() if math.isfinite(far))
        for low, high in itertools.pairwise(inside):
            if known[low] * known[high] < 0:
                with contextlib.suppress(ValueError):  # NaN somewhere in between
                    return Search(float(brentq(at, low, high, xtol=1e-14, rtol=1e-14)), True)
    finite = {log: abs(far) for log, far in known.items() if math.isfinite(far)}
    if not finite:
        raise DomainError("the numbers overflow whatever the free variables are")
    inside, least = sorted(finite), min(finite.values())
    # If the distance does not depend on the factor, the first probe, factor 1, is best.
    best = next(log for log in finite if finite[log] <= least * (1 + 1e-9) + 1e-15)
    index = inside.index(best)
    low, high = inside[max(index - 1, 0)], inside[min(index + 1, len(inside) - 1)]

    def least_at(log: float) -> float:
        if at(log) * known[best] <= 0:
            raise _Crossed(log)
        return abs(at(log))

    if low < high:
        try:
            # The error of a minimum is quadratic in the error of its location.
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
    """The distance has the opposite sign here from all probes."""


class _Reached(Exception):
    """All distances are well within the tolerance."""


Distances = Callable[[np.ndarray], np.ndarray]


def least_squares(
    distances: Distances, ends: list[Ends], tolerance: float, start: Any = 0.0, most: int = 100
) -> Search:
    """Find where several signed distances vanish, or where the sum of their squares is least, with
    at most `most` Jacobians from `start`; `ends` has the range of every unknown."""
    from scipy import optimize

    low, high = np.array(ends).T
    at = np.clip(np.full(len(ends), start), low + 1e-3, high - 1e-3)
    count = len(distances(at))

    def finite(x: np.ndarray) -> np.ndarray:
        nonlocal at
        values = _or_large(distances, x, count)
        errors: np.ndarray = np.nan_to_num(values, nan=LARGE, posinf=LARGE, neginf=-LARGE)
        if np.max(np.abs(errors)) <= 1e-2 * tolerance:
            at = x.copy()
            raise _Reached
        return errors

    try:
        found = optimize.least_squares(
            finite, at, bounds=(low, high), xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=most
        )
    except _Reached:
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
    """Find one factor per layer, where a layer's distance depends mostly on its own factor.

    Secant steps of all layers at once; if they stall, least squares for few layers, and Newton's
    method in Krylov spaces for many.
    """
    x, errors = np.zeros(layers), distances(np.zeros(layers))
    step = np.full(layers, 0.05)
    slope = (distances(step) - errors) / step
    best, least, rounds = x, float(np.max(np.abs(errors))), 0
    while least > 1e-1 * tolerance and rounds < PATIENCE:
        steep = np.where(np.abs(slope) < 1e-3, np.where(slope < 0, -1e-3, 1e-3), slope)
        next_x = np.clip(x + np.clip(-errors / steep, -2.0, 2.0), *ends)
        next_errors = _or_large(distances, next_x, layers)
        moved = np.abs(next_x - x) > 1e-9
        secant = np.divide(next_errors - errors, next_x - x, out=slope.copy(), where=moved)
        usable = (secant / steep > 0.25) & (secant / steep < 4)
        slope = np.where(usable, secant, slope)
        x, errors, rounds = next_x, next_errors, rounds + 1
        if (largest := float(np.max(np.abs(errors)))) < 0.5 * least:
            rounds = 0
        if largest < least:
            best, least = x, largest
    if least <= tolerance:
        return Search(best, _inside(best, *ends))
    if layers <= FEW:
        return least_squares(distances, [ends] * layers, tolerance, best, 12)
    return _krylov(distances, ends, tolerance, best)


def _krylov(distances: Distances, ends: Ends, tolerance: float, start: np.ndarray) -> Search:
    from scipy.optimize import root as multivariate_root

    def finite(x: np.ndarray) -> np.ndarray:
        return _or_large(distances, np.clip(x, *ends), len(start))

    options = {"fatol": 1e-1 * tolerance, "maxiter": 8}
    solution = multivariate_root(finite, start, method="krylov", options=options)
    found = np.clip(solution.x, *ends)
    errors, start_errors = finite(found), finite(start)
    if np.max(np.abs(errors)) > np.max(np.abs(start_errors)):
        found, errors = start, start_errors
    return Search(found, _inside(found, *ends) and float(np.max(np.abs(errors))) <= tolerance)
