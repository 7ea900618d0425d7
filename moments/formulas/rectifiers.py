"""Further activations with closed forms: leaky and squared ReLU, and the error function."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ..errors import domain_error
from .activation import activation, fourth_over_squared, relu_moment, relu_slope
from .law import ComponentLaws, Source
from .references import CHO

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
