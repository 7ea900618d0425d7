"""Laws of a function that is known only by its values: any callable on numpy arrays.

Expectations by the midpoint rule on a grid fine enough for kinks (error of order step^2), whose
nodes avoid the origin, where most kinks and jumps are; pairs by the Hermite (Mehler) expansion.
Whoever asks such a law for an expression gets the function by name; for digits, doubles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .activation import Single, activation, remembered, slope_alignment
from .algebra import FLOAT, NUMPY
from .law import ComponentLaws
from .symbols import Interval

Function = Callable[[np.ndarray], np.ndarray]

NODES = 4096
_ORDERS = 400


@functools.cache
def grid(count: int = NODES) -> tuple[np.ndarray, np.ndarray]:
    """Midpoints of equal cells over twelve standard deviations, and their Gaussian weights."""
    nodes = (np.arange(count) + 0.5) * (24.0 / count) - 12.0
    weights = np.exp(-(nodes**2) / 2)
    return nodes, weights / weights.sum()


@functools.cache
def _rows() -> np.ndarray:
    """Weighted orthonormal Hermite polynomials at the nodes, one row each."""
    nodes, weights = grid()
    rows = np.empty((_ORDERS, nodes.size))
    rows[0], rows[1] = 1.0, nodes
    for a in range(1, _ORDERS - 1):
        rows[a + 1] = (nodes * rows[a] - np.sqrt(a) * rows[a - 1]) / np.sqrt(a + 1)
    return np.asarray(rows * weights)


def _values(function: Function, variance: Any) -> np.ndarray:
    scale = np.sqrt(np.asarray(variance, dtype=float))[..., None]
    return np.asarray(function(scale * grid()[0]), dtype=float)


def _single(function: Function, power: int, variance: Any) -> Any:
    return _values(function, variance) ** power @ grid()[1]


def _pair(function: Function, variance: Any, other: Any, correlation: Any) -> Any:
    """E f(x) f(x') = sum_a r^a f_a(v) f_a(v').

    What the orders left out hold is known at r = 1 and r = -1; it enters at the first of them.
    """
    r = np.asarray(correlation, dtype=float)
    first, even, odd = _coefficients(function, variance)
    second, other_even, other_odd = _coefficients(function, other)
    total = np.sqrt(even * other_even) + np.sign(r) * np.sqrt(odd * other_odd)
    for a in range(_ORDERS - 1, -1, -1):
        total = total * r + first[..., a] * second[..., a]
    return total


def _coefficients(function: Function, variance: Any) -> tuple[np.ndarray, Any, Any]:
    values, weights = _values(function, variance), grid()[1]
    orders = values @ _rows().T
    mirrored = values[..., ::-1]
    left = [
        np.maximum(half**2 @ weights - (orders[..., parity::2] ** 2).sum(-1), 0.0)
        for parity, half in enumerate(((values + mirrored) / 2, (values - mirrored) / 2))
    ]
    return orders, left[0], left[1]


def _formula(name: str, function: Function) -> Single:
    """The function over any number system: by name as a symbol, in double precision elsewhere."""

    def formula(m: Any, x: Any) -> Any:
        if hasattr(x, "free_symbols"):
            import sympy

            return sympy.Function(name)(x)
        return float(function(np.asarray([float(x)]))[0])

    return formula


def sampled(
    name: str, function: Function, derivative: Function, largest_variance: float
) -> ComponentLaws:
    """Laws of `function`, whose expectations are resolved up to `largest_variance`."""
    resolved = Interval(0.0, largest_variance, open_lower=True)
    symbolic, symbolic_slope = _formula(name, function), _formula(f"{name}'", derivative)

    def expect(m: Any, power: int, v: Any) -> Any:
        if m is NUMPY or m is FLOAT:
            value = _single(function, power, v)
            return value if np.ndim(v) else float(value)
        return m.expect(lambda n, x: symbolic(n, x) ** power, v)

    def pair(m: Any, of: Function, formula: Single, v: Any, other: Any, r: Any) -> Any:
        if m is not NUMPY and m is not FLOAT:
            return m.expect_pair(formula, v, other, r)
        if np.ndim(r) == 0 and r == 1 and v is other:
            value = _single(of, 2, v)
        else:
            value = _pair(of, v, other, r)
        return value if np.ndim(value) else float(value)

    def aligned(m: Any, v: Any) -> Any:
        if m is not NUMPY and m is not FLOAT:
            return slope_alignment(m, symbolic, symbolic_slope, v)
        weights = grid()[1]
        squares = [_values(of, v) ** 2 for of in (function, derivative)]
        value = (squares[0] * squares[1]) @ weights
        apart = (squares[0] @ weights) * (squares[1] @ weights)
        # a step function has no slope to align with anything
        value = np.divide(value, apart, out=np.ones_like(value), where=apart > 0)
        return value if np.ndim(v) else float(value)

    return activation(
        name,
        f"{name}, registered by the user",
        limits={"x_variance": resolved, "x_other_variance": resolved},
        mean=remembered(lambda m, v: expect(m, 1, v)),
        moment=remembered(lambda m, v, other, r: pair(m, function, symbolic, v, other, r)),
        slope=remembered(lambda m, v, other, r: pair(m, derivative, symbolic_slope, v, other, r)),
        kurtosis=remembered(lambda m, v: expect(m, 4, v) / expect(m, 2, v) ** 2),
        alignment=remembered(aligned),
        source={},
        entrywise=(lambda m, x: function(x), lambda m, x: derivative(x)),
    )
