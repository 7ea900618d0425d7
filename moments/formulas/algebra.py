"""The number systems a formula is evaluated in: numpy, mpmath and sympy.

A formula is one Python function whose first argument is one of these namespaces. It yields floats
and arrays, numbers of any precision, and a symbolic expression, so that these cannot differ; sympy
is only imported for expressions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

# A function of a number system and of numbers in it.
Formula = Callable[[Any, Any], Any]


def _harmonic_float(count: Any, order: int) -> Any:
    return np.vectorize(lambda n: _harmonic_sum(int(n), order))(count)[()]


_SUMMED = 1000  # terms before the Euler-Maclaurin formula for the rest


@functools.lru_cache(maxsize=4096)
def _harmonic_sum(count: int, order: int) -> float:
    """sum_k k^-order; the first neglected term of the Euler-Maclaurin formula is below 1e-18."""
    first = min(count, _SUMMED)
    total = float(np.sum(1.0 / np.arange(first, 0, -1, dtype=float) ** order))
    if count == first:
        return total

    def primitive(x: float) -> float:
        whole = math.log(x) if order == 1 else x ** (1 - order) / (1 - order)
        slope, third = -order * x ** (-order - 1), -order * (order + 1) * (order + 2)
        return whole + x**-order / 2 + slope / 12 - third * x ** (-order - 3) / 720

    return total + primitive(float(count)) - primitive(float(first))


_FINEST = 4096  # steps on either side of 0
_WIDEST = 12.0  # the Gaussian weight beyond twelve deviations is below 1e-31
_AT_ONCE = 2**16  # products of coefficients per array
_ORDERS = 400  # Hermite orders, of which a call sums those that are not negligible


@functools.lru_cache(maxsize=64)
def _normal_grid(half: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of the trapezoidal rule for the normal, spectrally accurate."""
    nodes = np.linspace(-_WIDEST, _WIDEST, 2 * half + 1)
    weights = np.exp(-(nodes**2) / 2)
    return nodes, weights / weights.sum()


@functools.cache
def midpoints(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Midpoints of equal cells and their Gaussian weights; they avoid the origin, where most kinks
    and jumps are."""
    nodes = (np.arange(count) + 0.5) * (2 * _WIDEST / count) - _WIDEST
    weights = np.exp(-(nodes**2) / 2)
    return nodes, weights / weights.sum()


NODES = 4096
"""Number of midpoints for a function with kinks."""

Rule = tuple[Callable[[int], tuple[np.ndarray, np.ndarray]], int]
"""A function that returns nodes and weights for the normal, and its number of steps."""


def _rule_for(variance: np.ndarray, kinks: bool = False) -> Rule:
    """The rule whose step resolves a function of x at standard deviation sqrt(v): at most 0.3 in x.

    The step has a minimum that matters for variances above 10^4, far outside the domain of laws by
    quadrature.
    """
    if kinks:
        return midpoints, NODES
    step = min(0.125, 0.3 / math.sqrt(max(float(np.max(variance)), 1e-300)))
    # Powers of two in the number of steps keep the cache small.
    return _normal_grid, min(2 ** math.ceil(math.log2(_WIDEST / step)), _FINEST)


@functools.lru_cache(maxsize=8)
def _hermite_rows(rule: Rule) -> np.ndarray:
    """Weighted orthonormal Hermite polynomials He_a/sqrt(a!) at the nodes, one row each."""
    nodes, weights = rule[0](rule[1])
    rows = np.empty((_ORDERS, nodes.size))
    rows[0], rows[1] = 1.0, nodes
    for a in range(1, _ORDERS - 1):
        rows[a + 1] = (nodes * rows[a] - np.sqrt(a) * rows[a - 1]) / np.sqrt(a + 1)
    return np.asarray(rows * weights)


def _distinct(variance: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The distinct values and the indices that restore the array; None if most are distinct.

    Normalised tokens share one variance, for which a law is evaluated once.
    """
    if variance.size < 8:
        return variance, None
    ordered = np.sort(variance, axis=None)
    if 2 * (1 + np.count_nonzero(np.diff(ordered))) > variance.size:
        return variance, None
    values, where = np.unique(variance, return_inverse=True)
    return values, where.reshape(variance.shape)


# --- expectations of many variances: series in log variance --------------------------------------
# An expectation over a Gaussian of variance v is analytic for Re v > 0, so that in x = log v its
# nearest singularities lie i pi/2 off the real axis: over a factor of 2 in v, a half width of .35,
# Chebyshev coefficients fall like 9^-n.

_FEW = 8  # number of variances from which series replace integrals
_OCTAVES = (-40, 10)  # the range of series, in powers of two
_DEGREE = 16


class LogSeries:
    """A function of variances, built lazily as Chebyshev series in their logarithm.

    Args:
        function: (n,) variances to (n, ...) values.
    """

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        self._function = function
        self._octaves: dict[int, np.ndarray] = {}

    @staticmethod
    def serves(variance: np.ndarray) -> bool:
        """Whether there are enough variances, all in the range of series."""
        if variance.size < _FEW:
            return False
        low, high = variance.min(), variance.max()
        return bool(2.0 ** _OCTAVES[0] <= low and high < 2.0 ** _OCTAVES[1])

    def __call__(self, variance: np.ndarray) -> np.ndarray:
        """(n, ...) values at (n,) variances."""
        logs = np.log2(variance)
        octaves = np.floor(logs).astype(int)
        angles = np.arccos(np.clip(2.0 * (logs - octaves) - 1.0, -1.0, 1.0))
        terms = np.cos(np.multiply.outer(angles, np.arange(_DEGREE + 1)))
        first, last = int(octaves.min()), int(octaves.max())
        if first == last:
            return np.asarray(terms @ self._octave(first))
        found: np.ndarray | None = None
        for octave in range(first, last + 1):
            places = octaves == octave
            if not places.any():
                continue
            series = self._octave(octave)
            if found is None:
                found = np.empty((variance.size, *series.shape[1:]))
            found[places] = terms[places] @ series
        assert found is not None
        return found

    def _octave(self, octave: int) -> np.ndarray:
        if octave not in self._octaves:
            angles = np.pi * (np.arange(_DEGREE + 1) + 0.5) / (_DEGREE + 1)
            values = self._function(2.0 ** (octave + 0.5 * (1.0 + np.cos(angles))))
            transform = np.cos(np.outer(np.arange(_DEGREE + 1), angles)) * (2.0 / (_DEGREE + 1))
            transform[0] /= 2.0
            self._octaves[octave] = transform @ values
        return self._octaves[octave]


@functools.lru_cache(maxsize=256)
def _hermite_series(function: Formula) -> LogSeries:
    """Concatenated Hermite coefficients and squared sums of the neglected ones."""

    def values(variance: np.ndarray) -> np.ndarray:
        found = _hermite_coefficients(function, variance, _rule_for(variance))
        return np.concatenate([found.orders, found.even[:, None], found.odd[:, None]], axis=1)

    return LogSeries(values)


@functools.lru_cache(maxsize=256)
def _square_series(function: Formula) -> LogSeries:
    return LogSeries(lambda variance: _expect_float(lambda m, x: function(m, x) ** 2, variance))


def _expect_float(function: Formula, variance: Any, kinks: bool = False) -> Any:
    v, where = _distinct(np.asarray(variance, dtype=float))
    rule, size = _rule_for(v, kinks)
    nodes, weights = rule(size)
    values = function(NUMPY, np.sqrt(v)[..., None] * nodes) @ weights
    return values if where is None else values[where]


def _expect_pair_float(
    function: Formula, variance: Any, other: Any, correlation: Any, kinks: bool = False
) -> Any:
    v, w = np.asarray(variance, dtype=float), np.asarray(other, dtype=float)
    if variance is other and np.ndim(correlation) == 0 and correlation == 1:
        if LogSeries.serves(v) and not kinks:
            return _square_series(function)(v.ravel()).reshape(v.shape)
        return _expect_float(lambda m, x: function(m, x) ** 2, v, kinks)
    rule = _rule_for(np.maximum(v.max(), w.max()), kinks)
    if v.ndim == w.ndim == np.ndim(correlation) == 0:
        one = _scalar_coefficients(function, float(v), rule)
        return _mehler(one, _scalar_coefficients(function, float(w), rule), correlation)
    first = _coefficients(function, v, rule)
    if v.size == w.size and np.array_equal(v.ravel(), w.ravel()):
        # The usual pair of tokens: one list of variances, along rows and along columns.
        second = _Coefficients(
            first.orders.reshape(*w.shape, -1),
            first.even.reshape(w.shape),
            first.odd.reshape(w.shape),
        )
    else:
        second = _coefficients(function, w, rule)
    return _mehler(first, second, correlation)


class _Coefficients(NamedTuple):
    """Hermite coefficients (..., orders), and squared sums of the neglected, by parity (...)."""

    orders: np.ndarray
    even: np.ndarray
    odd: np.ndarray


def _mehler(first: _Coefficients, second: _Coefficients, correlation: Any) -> Any:
    """E f(x) f(x') = sum_a r^a f_a(v) f_a(v'), f_a the Hermite coefficients.

    The sum of the neglected orders is known at r = 1 and r = -1 from E f(x)^2 and E f(x) f(-x); it
    is added at the first neglected order, which is exact at both ends.
    """
    r = np.asarray(correlation, dtype=float)
    shape = np.broadcast_shapes(first.even.shape, second.even.shape, r.shape)
    neglected = np.sqrt(first.even * second.even) + np.sign(r) * np.sqrt(first.odd * second.odd)
    if not shape:
        powers = float(r) ** np.arange(_ORDERS + 1)
        return powers[:-1] @ (first.orders * second.orders) + neglected * powers[-1]
    size = np.abs(first.orders).reshape(-1, _ORDERS).max(0)
    # The sum has products of two coefficients times a power of r: coefficients below 1e-9 of the
    # largest contribute less than rounding errors.
    size = size * min(1.0, float(np.abs(r).max(initial=0.0))) ** (0.5 * np.arange(_ORDERS))
    kept = np.flatnonzero(~(size < 1e-9 * size.max()))  # all orders if one is NaN
    orders = 1 + int(kept[-1])
    total = 0.0 * r
    if orders >= _ORDERS - 1:  # one parity may vanish
        orders, total = _ORDERS, neglected
    left, right = (
        np.moveaxis(one.orders[..., :orders], -1, 0).reshape(
            orders, *(1,) * (len(shape) - one.even.ndim), *one.even.shape
        )
        for one in (first, second)
    )
    total = np.array(np.broadcast_to(total, shape))
    # Horner's scheme over the kept orders: half of them vanish for even functions.
    chunk, square, last = max(1, _AT_ONCE // max(1, total.size)), r * r, orders
    descending = kept[::-1]
    for start in range(0, len(descending), chunk):
        part = descending[start : start + chunk]
        for order, product in zip(part, left[part] * right[part], strict=True):
            for _ in range((last - order) // 2):
                total *= square
            if (last - order) % 2:
                total *= r
            total += product
            last = order
    for _ in range(last):
        total *= r
    return total


@functools.lru_cache(maxsize=256)
def _scalar_coefficients(function: Formula, variance: float, rule: Rule) -> _Coefficients:
    return _hermite_coefficients(function, np.asarray(variance), rule)


def _coefficients(function: Formula, v: np.ndarray, rule: Rule) -> _Coefficients:
    v, where = _distinct(v)
    if LogSeries.serves(v) and rule[0] is not midpoints:
        both = _hermite_series(function)(v.ravel()).reshape(*v.shape, -1)
        left = np.maximum(both[..., -2:], 0.0)
        found = _Coefficients(both[..., :-2], left[..., 0], left[..., 1])
    else:
        found = _hermite_coefficients(function, v, rule)
    return found if where is None else _Coefficients(*(part[where] for part in found))


def _hermite_coefficients(function: Formula, v: np.ndarray, rule: Rule) -> _Coefficients:
    """Hermite coefficients of a function of a Gaussian of variance v."""
    nodes, weights = rule[0](rule[1])
    values = function(NUMPY, np.sqrt(v)[..., None] * nodes) + 0.0 * nodes
    orders = values @ _hermite_rows(rule).T
    mirrored = values[..., ::-1]
    halves = ((values + mirrored) / 2, (values - mirrored) / 2)
    left = [
        np.maximum(half**2 @ weights - (orders[..., parity::2] ** 2).sum(-1), 0.0)
        for parity, half in enumerate(halves)
    ]
    return _Coefficients(orders, *left)


def _normal_cdf_float(x: Any) -> Any:
    from scipy.special import ndtr

    return ndtr(x)


LEAST = 1e-150
"""Smallest variance by which a derivative in a covariance is divided."""

NUMPY = SimpleNamespace(
    scalar=False,
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
    faint=lambda v: np.maximum(v, LEAST),
    tidy=lambda x: x,
)


class CachingNumpy(SimpleNamespace):
    """NUMPY with a cache of expectations by identity of arrays (`activation.cached_expectation`),
    as the backward pass of a layer needs those of its forward pass again."""

    def __init__(self) -> None:
        super().__init__(**vars(NUMPY), held={})

    def __reduce__(self) -> Any:
        return CachingNumpy, ()


# Elementary functions of every number system.
_ELEMENTARY = ("sqrt", "exp", "expm1", "log", "log1p", "asin", "atan", "tanh")

# The same functions on single floats: ten times faster than numpy on scalars.
FLOAT = SimpleNamespace(
    **{
        **vars(NUMPY),
        "scalar": True,
        **{name: getattr(math, name) for name in _ELEMENTARY},
        "faint": lambda v: max(v, LEAST),
        "expect": lambda *given: float(_expect_float(*given)),
        "expect_pair": lambda *given: float(_expect_pair_float(*given)),
    }
)


@functools.cache
def mpmath_namespace() -> SimpleNamespace:
    """Arbitrary-precision numbers, at mpmath's current working precision."""
    import mpmath as mp

    this = SimpleNamespace()

    def gaussian_mean(function: Any) -> Any:
        """Mean over a standard normal, up to where its density is below the working precision."""
        norm = 1 / mp.sqrt(2 * mp.pi)
        cut = mp.ceil(mp.sqrt(2 * mp.log(10) * mp.mp.dps)) + 1
        return mp.quad(
            lambda x: norm * mp.exp(-x * x / 2) * function(x),
            [-cut, *(mark for mark in (-6, -3, 0, 3, 6) if abs(mark) < cut), cut],
            method="gauss-legendre",
        )

    def expect(function: Formula, variance: Any, kinks: bool = False) -> Any:
        scale = mp.sqrt(variance)
        return gaussian_mean(lambda x: function(this, scale * x))

    def expect_pair(
        function: Formula, variance: Any, other: Any, r: Any, kinks: bool = False
    ) -> Any:
        if r == 1 and variance == other:
            return expect(lambda m, x: function(m, x) ** 2, variance)
        scale, scale_other, rest = mp.sqrt(variance), mp.sqrt(other), mp.sqrt((1 - r) * (1 + r))
        return gaussian_mean(
            lambda x: (
                function(this, scale * x)
                * gaussian_mean(lambda y: function(this, scale_other * (r * x + rest * y)))
            )
        )

    vars(this).update(
        {name: getattr(mp, name) for name in _ELEMENTARY},
        # An mpmath constant, which follows the working precision.
        pi=mp.pi,
        ratio=lambda a, b: mp.mpf(a) / b,
        harmonic=lambda n, order: (
            mp.harmonic(n) if order == 1 else mp.zeta(order) - mp.zeta(order, n + 1)
        ),
        normal_cdf=mp.ncdf,
        expect=expect,
        expect_pair=expect_pair,
        faint=lambda v: v,
        tidy=lambda x: x,
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

    def expect(function: Formula, variance: Any, kinks: bool = False) -> Any:
        integrand = density(x) * function(this, sp.sqrt(variance) * x)
        return sp.Integral(integrand, (x, -sp.oo, sp.oo))

    def expect_pair(
        function: Formula, variance: Any, other: Any, r: Any, kinks: bool = False
    ) -> Any:
        if r == 1 and variance == other:
            return expect(lambda m, z: function(m, z) ** 2, variance)
        partner = sp.sqrt(other) * (r * x + sp.sqrt((1 - r) * (1 + r)) * y)
        product = function(this, sp.sqrt(variance) * x) * function(this, partner)
        return sp.Integral(
            density(x) * density(y) * product, (x, -sp.oo, sp.oo), (y, -sp.oo, sp.oo)
        )

    vars(this).update(
        {name: getattr(sp, name) for name in _ELEMENTARY if hasattr(sp, name)},
        pi=sp.pi,
        expm1=lambda x: sp.exp(x) - 1,
        log1p=lambda x: sp.log(1 + x),
        ratio=sp.Rational,
        harmonic=sp.harmonic,
        normal_cdf=lambda z: (1 + sp.erf(z / sp.sqrt(2))) / 2,
        expect=expect,
        expect_pair=expect_pair,
        faint=lambda v: v,
        tidy=sp.factor_terms,
    )
    return this


def is_number(value: Any) -> bool:
    """Whether a value is a plain float, of a configuration without axes."""
    return type(value) is float


def number_system(value: Any) -> Any:
    """The number system for a float, or for arrays."""
    return FLOAT if type(value) is float else NUMPY
