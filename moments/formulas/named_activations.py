"""Activations by name: those of the package, leaky ReLU at any slope, and the user's own.

Laws of a function that is known only by its values: any callable on numpy arrays.

Expectations by the midpoint rule on a grid fine enough for kinks (error of order step^2), whose
nodes avoid the origin, where most kinks and jumps are; pairs by the Hermite (Mehler) expansion.
Whoever asks such a law for an expression gets the function by name; for digits, doubles.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error
from .activation import (
    ERF,
    GELU,
    GELU_TANH,
    IDENTITY,
    LEAKY_RELU,
    MISH,
    QUICK_GELU,
    RELU,
    RELU_SQUARED,
    SIGMOID,
    SILU,
    SOFTPLUS,
    TANH,
    Single,
    activation,
    leaky_relu,
    remembered,
    slope_alignment,
)
from .algebra import FLOAT, NUMPY
from .law import ComponentLaws
from .symbols import Interval

# --- functions known by their values --------------------------------------------------------------

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


# --- names ----------------------------------------------------------------------------------------

ACTIVATION_LAWS: dict[str, ComponentLaws] = {
    record.name: record
    for record in (
        RELU,
        GELU,
        GELU_TANH,
        IDENTITY,
        SILU,
        TANH,
        RELU_SQUARED,
        LEAKY_RELU,
        QUICK_GELU,
        SIGMOID,
        SOFTPLUS,
        MISH,
        ERF,
    )
}

_REGISTERED: dict[str, tuple[ComponentLaws, Function, Function]] = {}
_LOCK = threading.Lock()
_LEAKY = re.compile(r"leaky_relu\(([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\)")


def activation_names() -> tuple[str, ...]:
    """Every name that `activation_laws` takes, besides "leaky_relu(SLOPE)" for other slopes."""
    return (*ACTIVATION_LAWS, *_REGISTERED)


def activation_laws(name: str) -> ComponentLaws:
    """The laws of an activation.

    >>> activation_laws("leaky_relu(0.2)").law("mean")(x_variance=1.0).round(4)
    np.float64(0.3192)

    Raises:
        DomainError: no activation of that name.
    """
    if isinstance(name, str) and name in ACTIVATION_LAWS:
        return ACTIVATION_LAWS[name]
    if isinstance(name, str) and name in _REGISTERED:
        return _REGISTERED[name][0]
    slope = leaky_slope(name)
    if slope is not None:
        return _leaky(slope)
    raise domain_error(
        "activation",
        name,
        f'one of {", ".join(activation_names())}, or "leaky_relu(0.2)" for another slope',
        "pass any other function to moments.register_activation first",
    )


def leaky_slope(name: str) -> str | None:
    """The slope below zero that "leaky_relu" or "leaky_relu(0.2)" names; None: another activation.

    >>> leaky_slope("leaky_relu(0.2)"), leaky_slope("leaky_relu"), leaky_slope("relu")
    ('0.2', '0.01', None)
    """
    if name == "leaky_relu":
        return "0.01"
    found = _LEAKY.fullmatch(name) if isinstance(name, str) else None
    return None if found is None else found[1]


@functools.lru_cache(maxsize=64)
def _leaky(slope: str) -> ComponentLaws:
    return leaky_relu(slope)


def registered_function(name: str) -> tuple[Function, Function] | None:
    """A registered activation's function and derivative; None: not one of the user's."""
    return _REGISTERED[name][1:] if name in _REGISTERED else None


def register_activation(name: str, function: Function, derivative: Function) -> ComponentLaws:
    """Make an activation of your own known by name, wherever an activation is named.

    Its laws are Gaussian expectations of the values of `function`, right to 1e-5 even with a kink.
    One is less precise: a pair's slope where the derivative jumps and tokens correlate above .99;
    for ReLU given in this way it is off by up to .6 percent.

    >>> import numpy as np
    >>> laws = register_activation("sine", np.sin, np.cos)
    >>> laws.law("variance")(x_variance=1.0).round(4)  # (1 - exp(-2))/2
    np.float64(0.4323)

    Args:
        name: lower-case letters, digits and underscores, not taken already.
        function: maps an array of any shape to one of the same shape, entry by entry.
        derivative: the same for its derivative; at a kink or a jump, either side's.

    Returns:
        The laws, also to be had as `moments.component(name)`. Their domain is the variances up to
        which the expectations converge, 25 at most.

    Raises:
        DomainError: a name that is taken or malformed, values that are not finite real numbers of
            the input's shape, a derivative that is not the function's, a constant function, or one
            whose expectations do not converge.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise domain_error(
            "name", name, "lower-case letters, digits and underscores", "choose another name"
        )
    _check_function(name, function, derivative)
    laws = sampled(name, function, derivative, _largest_variance(name, function, derivative))
    with _LOCK:
        if name in _REGISTERED and _same(_REGISTERED[name][1:], (function, derivative)):
            return _REGISTERED[name][0]
        # Predictions made under a name stay what they were: it cannot be given to another function.
        if name in ACTIVATION_LAWS or name in _REGISTERED:
            raise domain_error("name", name, "a name that is free", "choose another name")
        _REGISTERED[name] = (laws, function, derivative)
    return laws


# Irrational steps and offset, so that no point is on a kink.
_PROBES = np.sqrt(2) / 20 * np.arange(-300, 300) + 0.01 * np.pi


def _evaluated(what: str, name: str, function: Function, x: np.ndarray) -> np.ndarray:
    if not callable(function):
        raise domain_error(what, function, "a function of a numpy array")
    with np.errstate(all="ignore"):
        values = np.asarray(function(x))
    if values.shape != x.shape or values.dtype.kind not in "fiub":
        raise DomainError(
            f"{what} of {name!r} gives shape {values.shape} of {values.dtype} for shape {x.shape}; "
            "it must map an array to real numbers entry by entry: write it with numpy"
        )
    if not np.all(np.isfinite(values)):
        where = x[~np.isfinite(values)].flat[0]
        raise DomainError(
            f"{what} of {name!r} is not finite at x = {where:.3g}; it must be finite everywhere: "
            "write it without overflow, for example with np.logaddexp"
        )
    return values.astype(float)


def _check_function(name: str, function: Function, derivative: Function) -> None:
    x, step = _PROBES, 1e-5
    values = _evaluated("function", name, function, x)
    slopes = _evaluated("derivative", name, derivative, x)
    _evaluated("function", name, function, x.reshape(20, -1))
    above = _evaluated("function", name, function, x + step)
    below = _evaluated("function", name, function, x - step)
    apart = np.abs((above - below) / (2 * step) - slopes)
    # Rounding of the difference, and its third-order error.
    allowed = 1e-5 * (1 + np.abs(slopes)) + 1e-10 * np.abs(values)
    if np.any(apart > allowed):
        worst = int(np.argmax(apart / allowed))
        raise DomainError(
            f"derivative of {name!r} at x = {x[worst]:.3g} is {slopes[worst]:.6g}, and differences "
            f"of function give {(above - below)[worst] / (2 * step):.6g}; pass its derivative"
        )
    if np.ptp(values) == 0.0:
        raise DomainError(f"function of {name!r} is constant; an activation must vary")


def _largest_variance(name: str, function: Function, derivative: Function) -> float:
    """The largest variance at which halving the step and cutting the tails change nothing."""
    for variance in (25.0, 9.0, 4.0, 1.0):
        if _converged(name, function, derivative, variance):
            return variance
    raise DomainError(
        f"the moments of {name!r} do not converge at variance 1: it varies too fast or grows too "
        "fast; an activation must be resolved by steps of 0.005 and grow no faster than a power"
    )


def _converged(name: str, function: Function, derivative: Function, variance: float) -> bool:
    for what, chosen, power in (
        ("function", function, 2),
        ("function", function, 4),
        ("derivative", derivative, 2),
    ):
        with np.errstate(over="ignore"):
            coarse, fine = (
                weights * _evaluated(what, name, chosen, np.sqrt(variance) * nodes) ** power
                for nodes, weights in (grid(), grid(2 * NODES))
            )
            total = fine.sum()
        if not np.isfinite(total):
            return False
        if total == 0.0:  # a step function's slope
            continue
        if abs(coarse.sum() - total) > 1e-3 * total or max(fine[0], fine[-1]) > 1e-12 * total:
            return False
    return True


def _same(known: tuple[Function, Function], new: tuple[Function, Function]) -> bool:
    return all(
        np.array_equal(np.asarray(old(_PROBES)), np.asarray(other(_PROBES)))
        for old, other in zip(known, new, strict=True)
    )
