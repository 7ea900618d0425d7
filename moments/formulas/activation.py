"""Activations applied to a centred Gaussian input, as pair laws.

Each activation is two functions of a pair of tokens with variances v, v' and correlation r: the
second moment E phi(x) phi(x') and the slope E phi'(x) phi'(x') (its derivative in the covariance,
by Price's theorem). A token with itself is the pair at r = 1, so every law below follows from these
two and from the mean. Closed forms where they exist, Gaussian expectations elsewhere.

Smooth activations without closed forms are taken by quadrature. A function's Hermite coefficients
fall like exp(-sqrt(2 n/v) times the distance of its nearest pole from the real axis), which sets
the largest variance at which pairs are resolved: there the slope of a pair at correlations up to
.9999 is right to 1e-8, everything else to 1e-10.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from ..errors import domain_error
from .algebra import FLOAT, NUMPY, LogSeries
from .law import ComponentLaws, Law, Source, derived
from .recording import RECORDED, whole
from .references import CHO, kedia
from .symbols import Interval

Pair = Callable[[Any, Any, Any, Any], Any]
Single = Callable[[Any, Any], Any]


def activation(
    name: str,
    title: str,
    *,
    mean: Single,
    moment: Pair,
    slope: Pair,
    kurtosis: Single,
    alignment: Single,
    source: dict[str, Source],
    simplified: dict[str, Law | None] | None = None,
    limits: Mapping[str, Interval] | None = None,
    entrywise: tuple[Single, Single] | None = None,
) -> ComponentLaws:
    """Assemble an activation's laws from its mean, pair moment, pair slope, kurtosis and alignment.

    Kurtosis is E phi^4/(E phi^2)^2, alignment E phi^2 phi'^2/(E phi^2 E phi'^2).

    `limits` narrows the variances where the expectations are resolved numerically.
    """
    within = {} if limits is None else dict(limits)

    def law(formula: Callable[..., Any], quantity: str) -> Law:
        return Law(formula, source.get(quantity, by_default), limits=within)

    def covariance(m: Any, v: Any, other: Any, r: Any) -> Any:
        return moment(m, v, other, r) - mean(m, v) * mean(m, other)

    by_default = derived("second moment and slope of a Gaussian pair, checked by quadrature")
    return ComponentLaws(
        name,
        title,
        {
            "mean": law(lambda m, x_variance: mean(m, x_variance), "mean"),
            "variance": law(
                lambda m, x_variance: covariance(m, x_variance, x_variance, 1), "variance"
            ),
            "covariance": law(
                lambda m, x_variance, x_other_variance, x_correlation: covariance(
                    m, x_variance, x_other_variance, x_correlation
                ),
                "covariance",
            ),
            "hidden_covariance": law(
                lambda m, x_variance, x_hidden_correlation: covariance(
                    m, x_variance, x_variance, x_hidden_correlation
                ),
                "hidden_covariance",
            ),
            "grad_variance": law(
                lambda m, x_variance, grad_variance: (
                    slope(m, x_variance, x_variance, 1) * grad_variance
                ),
                "grad_variance",
            ),
            "grad_covariance": law(
                lambda m, x_variance, x_other_variance, x_correlation, grad_covariance: (
                    slope(m, x_variance, x_other_variance, x_correlation) * grad_covariance
                ),
                "grad_covariance",
            ),
            "kurtosis": law(lambda m, x_variance: kurtosis(m, x_variance), "kurtosis"),
            "alignment": law(lambda m, x_variance: alignment(m, x_variance), "alignment"),
        },
        simplified=simplified or {},
        entrywise=entrywise,
    )


def remembered(formula: Callable[..., Any]) -> Callable[..., Any]:
    """An expectation that plain floats have once each, as layers of one kind ask for the same, and
    that many variances read from a series in their logarithm."""

    @functools.lru_cache(maxsize=1024)
    def at(*values: float) -> Any:
        return formula(FLOAT, *values)

    noted = whole(at, lambda *values: formula(NUMPY, *values))
    series = LogSeries(lambda variance: np.asarray(formula(NUMPY, variance)))

    def law(m: Any, *values: Any) -> Any:
        if m is FLOAT:
            return at(*values)
        if (held := getattr(m, "held", None)) is not None:
            key = (law, *map(id, values))
            if key not in held:  # with the values, so that nothing else takes their places
                held[key] = law(NUMPY, *values), values
            return held[key][0]
        if m is NUMPY and len(values) == 1:
            variance = np.asarray(values[0], dtype=float)
            if LogSeries.serves(variance):
                return series(variance.ravel()).reshape(variance.shape)
        return noted(*values) if m is RECORDED else formula(m, *values)

    return law


# --- ReLU: the arc-cosine kernels of degree 1 and 0 ---------------------------------------------


def relu_slope(m: Any, v: Any, other: Any, r: Any) -> Any:
    return m.ratio(1, 4) + m.asin(r) / (2 * m.pi)


def relu_moment(m: Any, v: Any, other: Any, r: Any) -> Any:
    return m.sqrt(v * other) * (
        r * relu_slope(m, v, other, r) + m.sqrt((1 - r) * (1 + r)) / (2 * m.pi)
    )


RELU = activation(
    "relu",
    "ReLU, max(x, 0)",
    mean=lambda m, v: m.sqrt(v / (2 * m.pi)),
    moment=relu_moment,
    slope=relu_slope,
    kurtosis=lambda m, v: 6 + 0 * v,
    alignment=lambda m, v: 2 + 0 * v,
    source={
        "mean": kedia("A.4 and Table 15"),
        "variance": kedia("A.4 and Table 16"),
        "covariance": kedia("A.4 and Table 18; unequal variances: arc-cosine kernel of degree 1"),
        "hidden_covariance": kedia("A.4 and Table 19"),
        "grad_variance": kedia("A.4 and Table 17"),
        "grad_covariance": kedia("A.4 and Table 20; arc-cosine kernel of degree 0"),
        "kurtosis": derived("E x^4 / 2 over (E x^2 / 2)^2"),
        "alignment": derived("E x^2 / 2 over (E x^2 / 2)(1 / 2)"),
    },
    simplified={
        "covariance": Law(
            lambda m, x_variance, x_correlation: (
                x_variance
                * (m.pi - 1)
                / (2 * m.pi)
                * (m.ratio(7, 10) * x_correlation + m.ratio(3, 10) * x_correlation**2)
            ),
            kedia("Table 1"),
            "fitted",
            note="the paper's polynomial fit to the exact law on r in [0, 1]",
            limits={"x_correlation": Interval(0.0, 1.0)},
        )
    },
    entrywise=(lambda m, x: (x + abs(x)) / 2, lambda m, x: 1 * (x > 0)),
)


# --- GeLU, erf form: x Phi(x) -------------------------------------------------------------------
# Phi(x) = P(z < x) for an independent standard normal z, so moments of x Phi(x) are orthant
# probabilities of (x - z, x' - z') and their derivatives; c = r sqrt(v v'), q = (1+v)(1+v').


def _gelu_parts(m: Any, v: Any, other: Any, r: Any) -> tuple[Any, Any, Any, Any, Any]:
    c = r * m.sqrt(v * other)
    # q - c^2 written without cancellation at r near 1; the angle's sine is c/sqrt(q)
    gap = 1 + v + other + v * other * (1 - r) * (1 + r)
    orthant = m.ratio(1, 4) + m.atan(c / m.sqrt(gap)) / (2 * m.pi)
    density = 1 / (2 * m.pi * m.sqrt(gap))
    edge = v * other * (1 - r) * (1 + r) + c**2 / (1 + v) + c**2 / (1 + other)
    return c, gap, orthant, density, edge


def _gelu_moment(m: Any, v: Any, other: Any, r: Any) -> Any:
    c, _, orthant, density, edge = _gelu_parts(m, v, other, r)
    return c * orthant + density * edge


def _gelu_slope(m: Any, v: Any, other: Any, r: Any) -> Any:
    c, gap, orthant, density, _ = _gelu_parts(m, v, other, r)
    bend = 2 / (1 + v) + 2 / (1 + other)
    # edge - gap, whose leading terms cancel where both are large
    short = 1 + (1 - r) * (1 + r) * (v + other) + r**2 * (other / (1 + v) + v / (1 + other))
    return orthant + c * density * (bend - short / gap)


def gelu_function(m: Any, x: Any) -> Any:
    return x * m.normal_cdf(x)


def gelu_derivative(m: Any, x: Any) -> Any:
    return m.normal_cdf(x) + x * m.exp(-(x**2) / 2) / m.sqrt(2 * m.pi)


GELU = activation(
    "gelu",
    "GeLU, erf form, x Phi(x)",
    mean=lambda m, v: v / m.sqrt(2 * m.pi * (1 + v)),
    moment=_gelu_moment,
    slope=_gelu_slope,
    kurtosis=remembered(lambda m, v: fourth_over_squared(m, gelu_function, v)),
    alignment=remembered(lambda m, v: slope_alignment(m, gelu_function, gelu_derivative, v)),
    source={
        "mean": kedia("A.5 and Table 15"),
        "variance": kedia("A.5 and Table 16"),
        "covariance": kedia("A.5 and Table 18; unequal variances derived here, by quadrature"),
        "hidden_covariance": kedia("A.5; the cell of Table 19 is blank in both versions"),
        "grad_variance": kedia("A.5 and Table 17"),
        "grad_covariance": kedia("A.5 and Table 20; unequal variances derived here"),
    },
    entrywise=(gelu_function, gelu_derivative),
)


# --- The identity, for linear networks ----------------------------------------------------------

IDENTITY = activation(
    "identity",
    "Identity, for linear networks",
    mean=lambda m, v: 0 * v,
    moment=lambda m, v, other, r: r * m.sqrt(v * other),
    slope=lambda m, v, other, r: 1 + 0 * r,
    kurtosis=lambda m, v: 3 + 0 * v,
    alignment=lambda m, v: 1 + 0 * v,
    source={},
    entrywise=(lambda m, x: x, lambda m, x: 1 + 0 * x),
)


# --- Any other function: expectations over the Gaussian ------------------------------------------


def fourth_over_squared(m: Any, function: Single, v: Any) -> Any:
    """Kurtosis about zero of a function of a Gaussian, by quadrature."""
    fourth = m.expect(lambda n, x: function(n, x) ** 4, v)
    return fourth / m.expect(lambda n, x: function(n, x) ** 2, v) ** 2


def slope_alignment(m: Any, function: Single, derivative: Single, v: Any) -> Any:
    """E f^2 f'^2/(E f^2 E f'^2) of a Gaussian, by quadrature."""
    both = m.expect(lambda n, x: (function(n, x) * derivative(n, x)) ** 2, v)
    apart = m.expect(lambda n, x: function(n, x) ** 2, v)
    return both / (apart * m.expect(lambda n, x: derivative(n, x) ** 2, v))


def by_quadrature(
    name: str,
    title: str,
    function: Single,
    derivative: Single,
    *,
    largest_variance: float = 25.0,
    odd: bool = False,
    even_part: Single | None = None,
) -> ComponentLaws:
    """An activation without closed forms: its laws are Gaussian expectations.

    `function` and `derivative` are written over a number system, f(m, x), like every formula.
    Numerically: the trapezoidal rule; pairs by the Hermite (Mehler) expansion in r. Resolved for
    variances up to `largest_variance`, beyond which the function is nearly a kink on its input's
    scale; GeLU's tanh form to 1e-10. An `odd` function's mean is 0; of an `even_part`, a linear
    function's rounding does not hide a small one.
    """
    averaged = even_part or function
    resolved = Interval(0.0, largest_variance, open_lower=True)
    return activation(
        name,
        title,
        limits={"x_variance": resolved, "x_other_variance": resolved},
        mean=remembered(lambda m, v: 0 * v if odd else m.expect(averaged, v)),
        moment=remembered(lambda m, v, other, r: m.expect_pair(function, v, other, r)),
        slope=remembered(lambda m, v, other, r: m.expect_pair(derivative, v, other, r)),
        kurtosis=remembered(lambda m, v: fourth_over_squared(m, function, v)),
        alignment=remembered(lambda m, v: slope_alignment(m, function, derivative, v)),
        source={},
        entrywise=(function, derivative),
    )


def _tanh_gate(m: Any, x: Any) -> Any:
    return m.tanh(m.sqrt(2 / m.pi) * (x + m.ratio(44715, 1000000) * x**3))


def gelu_tanh_function(m: Any, x: Any) -> Any:
    return x * (1 + _tanh_gate(m, x)) / 2


def gelu_tanh_derivative(m: Any, x: Any) -> Any:
    gate = _tanh_gate(m, x)
    inner = m.sqrt(2 / m.pi) * (1 + 3 * m.ratio(44715, 1000000) * x**2)
    return (1 + gate + x * (1 - gate**2) * inner) / 2


GELU_TANH = by_quadrature(
    "gelu_tanh",
    "GeLU, tanh form, as in GPT-2",
    gelu_tanh_function,
    gelu_tanh_derivative,
    even_part=lambda m, x: x * _tanh_gate(m, x) / 2,
)


# --- further closed forms -------------------------------------------------------------------------

# --- Leaky ReLU: a x + (1 - a) ReLU(x) ------------------------------------------------------------
# Stein: E x ReLU(x') = c/2, so that the moment is a c + (1-a)^2 times ReLU's.


def leaky_relu(slope: str | int | float | Fraction = "0.01") -> ComponentLaws:
    """ReLU with `slope` below zero, a decimal that is taken at its word.

    Its name carries the slope unless that is 0.01.

    Raises:
        DomainError: a slope that is not a finite number.
    """
    try:
        exact = Fraction(str(slope))
    except (ValueError, ZeroDivisionError):
        raise domain_error("slope", slope, "a finite number, such as 0.2") from None

    def a(m: Any) -> Any:
        return m.ratio(exact.numerator, exact.denominator)

    usual = exact == Fraction(1, 100)
    return activation(
        "leaky_relu" if usual else f"leaky_relu({float(exact):g})",
        f"Leaky ReLU, {float(exact):g} x below zero",
        mean=lambda m, v: (1 - a(m)) * m.sqrt(v / (2 * m.pi)),
        moment=lambda m, v, other, r: (
            a(m) * r * m.sqrt(v * other) + (1 - a(m)) ** 2 * relu_moment(m, v, other, r)
        ),
        slope=lambda m, v, other, r: a(m) + (1 - a(m)) ** 2 * relu_slope(m, v, other, r),
        kurtosis=lambda m, v: 6 * (1 + a(m) ** 4) / (1 + a(m) ** 2) ** 2 + 0 * v,
        alignment=lambda m, v: 2 * (1 + a(m) ** 4) / (1 + a(m) ** 2) ** 2 + 0 * v,
        source={},
        entrywise=(
            lambda m, x: a(m) * x + (1 - a(m)) * (x + abs(x)) / 2,
            lambda m, x: a(m) + (1 - a(m)) * (x > 0),
        ),
    )


LEAKY_RELU = leaky_relu()


# --- Squared ReLU: the arc-cosine kernels of degree 2 and 1 ---------------------------------------


def _relu_squared_moment(m: Any, v: Any, other: Any, r: Any) -> Any:
    edge = 3 * r * m.sqrt((1 - r) * (1 + r)) / (2 * m.pi)
    return v * other * ((1 + 2 * r**2) * relu_slope(m, v, other, r) + edge)


RELU_SQUARED = activation(
    "relu_squared",
    "Squared ReLU, max(x, 0)^2",
    mean=lambda m, v: v / 2,
    moment=_relu_squared_moment,
    slope=lambda m, v, other, r: 4 * relu_moment(m, v, other, r),
    kurtosis=lambda m, v: m.ratio(70, 3) + 0 * v,
    alignment=lambda m, v: 10 + 0 * v,
    source=dict.fromkeys(
        ("covariance", "hidden_covariance", "variance", "grad_covariance", "grad_variance"),
        Source(CHO, "Section 2.1, the arc-cosine kernels of degree 2 and 1"),
    ),
    entrywise=(lambda m, x: (x + abs(x)) ** 2 / 4, lambda m, x: x + abs(x)),
)


# --- erf: the arcsine kernel ----------------------------------------------------------------------
# erf(x) = 2 Phi(sqrt(2) x) - 1: orthant probabilities again, with slope by Price's theorem.


def erf_function(m: Any, x: Any) -> Any:
    return 2 * m.normal_cdf(m.sqrt(2) * x) - 1


ERF = activation(
    "erf",
    "Error function, erf(x)",
    mean=lambda m, v: 0 * v,
    moment=lambda m, v, other, r: (
        2 / m.pi * m.asin(2 * r * m.sqrt(v * other) / m.sqrt((1 + 2 * v) * (1 + 2 * other)))
    ),
    # (1+2v)(1+2v') - 4c^2, written without cancellation at r near 1
    slope=lambda m, v, other, r: (
        4 / (m.pi * m.sqrt(1 + 2 * v + 2 * other + 4 * v * other * (1 - r) * (1 + r)))
    ),
    kurtosis=lambda m, v: fourth_over_squared(m, erf_function, v),
    # phi'^2 = (4/pi) e^(-2 x^2) makes a Gaussian of variance v/(1 + 4v) of one of variance v.
    alignment=lambda m, v: m.asin(2 * v / (1 + 6 * v)) / m.asin(2 * v / (1 + 2 * v)),
    source={},
    entrywise=(erf_function, lambda m, x: 2 / m.sqrt(m.pi) * m.exp(-(x**2))),
)


# --- smooth functions, by quadrature --------------------------------------------------------------


def _sigmoid(m: Any, x: Any) -> Any:
    return (1 + m.tanh(x / 2)) / 2


def _softplus(m: Any, x: Any) -> Any:
    return m.log1p(m.exp(x))


def _mish_gate(m: Any, x: Any) -> Any:
    return m.tanh(_softplus(m, x))


def _quick(m: Any) -> Any:
    return m.ratio(1702, 1000)


def _weighted_slope(m: Any, x: Any, rate: Any) -> Any:
    """Derivative of x sigmoid(rate x)."""
    gate = _sigmoid(m, rate * x)
    return gate * (1 + rate * x * (1 - gate))


SIGMOID = by_quadrature(
    "sigmoid",
    "Logistic sigmoid, 1/(1 + exp(-x))",
    _sigmoid,
    lambda m, x: _sigmoid(m, x) * _sigmoid(m, -x),
)

SILU = by_quadrature(
    "silu",
    "SiLU (Swish), x sigmoid(x)",
    lambda m, x: x * _sigmoid(m, x),
    lambda m, x: _weighted_slope(m, x, 1),
    largest_variance=20.0,
    even_part=lambda m, x: x * m.tanh(x / 2) / 2,
)

QUICK_GELU = by_quadrature(
    "quick_gelu",
    "GeLU, sigmoid form, x sigmoid(1.702 x), as in CLIP",
    lambda m, x: x * _sigmoid(m, _quick(m) * x),
    lambda m, x: _weighted_slope(m, x, _quick(m)),
    largest_variance=9.0,
    even_part=lambda m, x: x * m.tanh(_quick(m) * x / 2) / 2,
)

TANH = by_quadrature(
    "tanh",
    "Hyperbolic tangent",
    lambda m, x: m.tanh(x),
    lambda m, x: 1 - m.tanh(x) ** 2,
    largest_variance=9.0,
    odd=True,
)

SOFTPLUS = by_quadrature("softplus", "Softplus, log(1 + exp(x))", _softplus, _sigmoid)

MISH = by_quadrature(
    "mish",
    "Mish, x tanh(softplus(x))",
    lambda m, x: x * _mish_gate(m, x),
    lambda m, x: _mish_gate(m, x) + x * (1 - _mish_gate(m, x) ** 2) * _sigmoid(m, x),
    largest_variance=12.0,
)
