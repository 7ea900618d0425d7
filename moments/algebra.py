"""The number systems a formula is evaluated in: numpy, mpmath and sympy.

A formula is one Python function whose first argument is one of these namespaces. Typed once, it
yields floats (broadcasting), numbers of any precision, and the symbolic expression, so that none
of the three can drift from the others; and plain numbers never pay for importing sympy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

# A function of a number system and of numbers in it.
Formula = Callable[[Any, Any], Any]


def _harmonic_float(count: Any, order: int) -> Any:
    @np.vectorize
    def single(n: float) -> float:
        return _harmonic_sum(int(n), order)

    return single(count)[()]


@functools.cache
def _harmonic_sum(count: int, order: int) -> float:
    return float(np.sum(1.0 / np.arange(count, 0, -1, dtype=float) ** order))


@functools.cache
def _gauss_hermite(order: int = 199) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the standard normal; odd, so that 0 is a node."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return nodes, weights / weights.sum()


@functools.cache
def _hermite_rows(count: int = 100) -> np.ndarray:
    """Weighted orthonormal Hermite polynomials He_a/sqrt(a!) at the nodes, one row each."""
    nodes, weights = _gauss_hermite()
    rows = np.empty((count, nodes.size))
    rows[0], rows[1] = 1.0, nodes
    for a in range(1, count - 1):
        rows[a + 1] = (nodes * rows[a] - np.sqrt(a) * rows[a - 1]) / np.sqrt(a + 1)
    return np.asarray(rows * weights)


def _expect_float(function: Formula, variance: Any) -> Any:
    nodes, weights = _gauss_hermite()
    scale = np.sqrt(np.asarray(variance, dtype=float))
    return function(NUMPY, scale[..., None] * nodes) @ weights


def _expect_pair_float(function: Formula, variance: Any, other: Any, correlation: Any) -> Any:
    """Mehler: E f(x) f(x') = sum_a r^a f_a(v) f_a(v'), f_a the Hermite coefficients."""
    nodes, weights = _gauss_hermite()
    v, w = np.asarray(variance, dtype=float), np.asarray(other, dtype=float)
    at_v = function(NUMPY, np.sqrt(v)[..., None] * nodes)
    if np.ndim(correlation) == 0 and correlation == 1 and variance is other:
        return at_v**2 @ weights
    at_w = at_v if variance is other else function(NUMPY, np.sqrt(w)[..., None] * nodes)
    rows = _hermite_rows()
    first = at_v @ rows.T
    second = first if variance is other else at_w @ rows.T
    r = np.asarray(correlation, dtype=float)
    total = first[..., -1] * second[..., -1] + 0 * r
    for a in range(rows.shape[0] - 2, -1, -1):
        total = total * r + first[..., a] * second[..., a]
    return total


def _normal_cdf_float(x: Any) -> Any:
    from scipy.special import ndtr

    return ndtr(x)


NUMPY = SimpleNamespace(
    pi=np.pi,
    sqrt=np.sqrt,
    exp=np.exp,
    expm1=np.expm1,
    log=np.log,
    log1p=np.log1p,
    asin=np.arcsin,
    atan=np.arctan,
    tanh=np.tanh,
    ratio=lambda a, b: a / b,
    harmonic=_harmonic_float,
    normal_cdf=_normal_cdf_float,
    expect=_expect_float,
    expect_pair=_expect_pair_float,
)


def _elementwise(name: str) -> Callable[..., Any]:
    return getattr(math, name)  # type: ignore[no-any-return]


# The same functions on single floats: ten times faster than numpy on scalars.
FLOAT = SimpleNamespace(
    **{
        **vars(NUMPY),
        **{name: _elementwise(name) for name in ("sqrt", "exp", "expm1", "log", "log1p")},
        **{name: _elementwise(name) for name in ("asin", "atan", "tanh")},
        "expect": lambda function, variance: float(_expect_float(function, variance)),
        "expect_pair": lambda function, variance, other, r: float(
            _expect_pair_float(function, variance, other, r)
        ),
    }
)


@functools.cache
def mpmath_namespace() -> SimpleNamespace:
    """Arbitrary-precision numbers, at the working precision of the moment of the call."""
    import mpmath as mp

    this = SimpleNamespace()
    cut = 12  # standard deviations; the Gaussian weight beyond is below 1e-31

    def density(x: Any) -> Any:
        return mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi)

    def expect(function: Formula, variance: Any) -> Any:
        scale = mp.sqrt(variance)
        return mp.quad(lambda x: density(x) * function(this, scale * x), [-cut, -3, 0, 3, cut])

    def expect_pair(function: Formula, variance: Any, other: Any, r: Any) -> Any:
        if r == 1 and variance == other:
            return expect(lambda m, x: function(m, x) ** 2, variance)
        scale, scale_other, rest = mp.sqrt(variance), mp.sqrt(other), mp.sqrt((1 - r) * (1 + r))

        def inner(x: Any) -> Any:
            partner = mp.quad(
                lambda y: density(y) * function(this, scale_other * (r * x + rest * y)),
                [-cut, 0, cut],
            )
            return density(x) * function(this, scale * x) * partner

        return mp.quad(inner, [-cut, 0, cut])

    vars(this).update(
        # `pi` must follow the precision in force, so it is an mpmath constant, not a number.
        pi=mp.pi,
        sqrt=mp.sqrt,
        exp=mp.exp,
        expm1=mp.expm1,
        log=mp.log,
        log1p=mp.log1p,
        asin=mp.asin,
        atan=mp.atan,
        tanh=mp.tanh,
        ratio=lambda a, b: mp.mpf(a) / b,
        harmonic=lambda n, order: (
            mp.harmonic(n) if order == 1 else mp.zeta(order) - mp.zeta(order, n + 1)
        ),
        normal_cdf=mp.ncdf,
        expect=expect,
        expect_pair=expect_pair,
    )
    return this


@functools.cache
def sympy_namespace() -> SimpleNamespace:
    """Exact symbolic expressions."""
    import sympy as sp

    this = SimpleNamespace()
    x, y = sp.Symbol("x", real=True), sp.Symbol("y", real=True)

    def density(z: Any) -> Any:
        return sp.exp(-(z**2) / 2) / sp.sqrt(2 * sp.pi)

    def expect(function: Formula, variance: Any) -> Any:
        integrand = density(x) * function(this, sp.sqrt(variance) * x)
        return sp.Integral(integrand, (x, -sp.oo, sp.oo))

    def expect_pair(function: Formula, variance: Any, other: Any, r: Any) -> Any:
        if r == 1 and variance == other:
            return expect(lambda m, z: function(m, z) ** 2, variance)
        partner = sp.sqrt(other) * (r * x + sp.sqrt((1 - r) * (1 + r)) * y)
        product = function(this, sp.sqrt(variance) * x) * function(this, partner)
        return sp.Integral(
            density(x) * density(y) * product, (x, -sp.oo, sp.oo), (y, -sp.oo, sp.oo)
        )

    vars(this).update(
        pi=sp.pi,
        sqrt=sp.sqrt,
        exp=sp.exp,
        expm1=lambda x: sp.exp(x) - 1,
        log=sp.log,
        log1p=lambda x: sp.log(1 + x),
        asin=sp.asin,
        atan=sp.atan,
        tanh=sp.tanh,
        ratio=sp.Rational,
        harmonic=sp.harmonic,
        normal_cdf=lambda z: (1 + sp.erf(z / sp.sqrt(2))) / 2,
        expect=expect,
        expect_pair=expect_pair,
    )
    return this
