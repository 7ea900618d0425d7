"""Smooth activations without closed forms: Gaussian expectations by quadrature.

A function's Hermite coefficients fall like exp(-sqrt(2 n/v) times the distance of its nearest pole
from the real axis), which sets the largest variance at which pairs are resolved: there the slope of
a pair at correlations up to .9999 is right to 1e-8, everything else to 1e-10.
"""

from __future__ import annotations

from typing import Any

from .activation import by_quadrature


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
