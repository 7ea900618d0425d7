"""Derivatives of numpy programs, against complex steps, finite differences and mpmath."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import special

import moments
from moments.engine.derivative import gradient, plain, primitive, pullback, tangent

RANDOM = np.random.default_rng(0)
MATRIX = RANDOM.normal(size=(3, 3))
POSITIVE = 0.2 + 0.6 * RANDOM.random((2, 3))

ANALYTIC: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: (2.0 - x) * x / (1.0 + x * x) - x**3 + 1.0 / x,
    "roots": lambda x: np.sqrt(x) * np.exp(-x) + np.log(x) * np.sin(x) - np.cos(x),
    "more": lambda x: np.expm1(x) + np.log1p(x) * np.tanh(x) + np.arctan(x) + np.square(x),
    "inverse": lambda x: np.arcsin(x) * np.arccos(x),
    "power": lambda x: x**x,
    "matmul": lambda x: (x @ MATRIX) @ (MATRIX @ x.T),
    "vectors": lambda x: MATRIX @ x[0] + x[1] @ MATRIX,
    "einsum": lambda x: np.einsum("ij,jk,ik->i", x, MATRIX, x) + np.einsum("ij->i", x),
    "shapes": lambda x: np.reshape(np.swapaxes(x, 0, 1), (2, 3)) * np.flip(np.cumsum(x, axis=1), 1),
    "parts": lambda x: np.concatenate([x[:, 1:], x * x], 1) + np.stack([x[0, :1], x[1, :1]]),
    "means": lambda x: x.mean(0) * np.sum(x, axis=1, keepdims=True) + np.expand_dims(x.mean(), 0),
    "broadcast": lambda x: x[0] * x[:, :1] + np.broadcast_to(x[1], (4, 3)).sum(0),
    "diagonal": lambda x: np.diagonal(x[:, :2] @ x[:, :2]) * np.transpose(x)[0],
    "repeated index": lambda x: x[np.array([0, 0, 1])] * x[0],
}


@pytest.mark.parametrize("name", ANALYTIC)
def test_slopes_are_those_of_complex_steps(name: str) -> None:
    """Exact to rounding: f(x + ih) has h f'(x) for its imaginary part."""
    f, direction = ANALYTIC[name], RANDOM.normal(size=POSITIVE.shape)
    weights = RANDOM.normal(size=np.shape(f(POSITIVE)))
    step = f(POSITIVE + 1e-30j * direction).imag / 1e-30
    value, pull = pullback(f, POSITIVE)
    assert np.allclose(value, f(POSITIVE), rtol=1e-14)
    assert np.sum(pull(weights)[0] * direction) == pytest.approx(np.sum(weights * step), rel=1e-11)
    _, slope = tangent(f, [POSITIVE], [direction])
    assert np.allclose(slope, step, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ANALYTIC)
def test_second_derivatives_nest(name: str) -> None:
    """The derivative of a derivative, by a complex step through the first."""
    f = ANALYTIC[name]
    weights, direction = RANDOM.normal(size=(2, *POSITIVE.shape))

    def along(x: Any) -> Any:
        return np.sum(pullback(lambda y: np.sum(f(y) * f(y)), x)[1](1.0)[0] * weights)

    h = 1e-5
    found = np.sum(gradient(along)(POSITIVE) * direction)
    above, below = along(POSITIVE + h * direction), along(POSITIVE - h * direction)
    assert found == pytest.approx((above - below) / (2 * h), rel=1e-6, abs=1e-7)


def test_high_orders_are_those_of_mpmath() -> None:
    f: Callable[[Any], Any] = lambda x: np.exp(-x) * np.tanh(x) / np.sqrt(1.0 + x)  # noqa: E731
    found = f
    for order in range(1, 5):
        found = gradient(found)
        seen = mpmath.diff(
            lambda x: mpmath.exp(-x) * mpmath.tanh(x) / mpmath.sqrt(1 + x), 0.7, order
        )
        assert float(found(0.7)) == pytest.approx(float(seen), rel=1e-9)


def test_kinks_take_one_side() -> None:
    x = np.array([-1.0, 2.0, 0.5])
    assert np.all(gradient(lambda x: np.maximum(x, 0.0))(x) == [0, 1, 1])
    assert np.all(gradient(lambda x: np.minimum(x, 1.0))(x) == [1, 0, 1])
    assert np.all(gradient(lambda x: np.clip(x, 0.0, 1.0))(x) == [0, 0, 1])
    assert np.all(gradient(abs)(x) == [-1, 1, 1])
    assert np.all(gradient(lambda x: np.where(x > 0, x * x, -x))(x) == [-1, 4, 1])
    assert np.all(gradient(lambda x: plain(x) * x)(x) == x)


def test_scipys_functions() -> None:
    for function in (special.ndtr, special.erf, special.expit):
        step = (function(0.3 + 1e-6) - function(0.3 - 1e-6)) / 2e-6
        assert gradient(function)(0.3) == pytest.approx(step, rel=1e-8)


def test_closed_laws_are_primitives() -> None:
    """Whose derivatives are primitives again: the arc-cosine kernel."""

    def law(r: Any, order: int) -> Any:
        if order == 0:
            return (np.sqrt(1 - r * r) + (np.pi - np.arccos(r)) * r) / (2 * np.pi)
        return (np.pi - np.arccos(r)) / (2 * np.pi)

    kernel = primitive(law, lambda y, r, order: lambda g: g * kernel(r, order + 1), None)
    h = 1e-6
    seen = (law(0.3 + h, 0) - law(0.3 - h, 0)) / (2 * h)
    assert gradient(lambda r: kernel(r, 0))(0.3) == pytest.approx(seen, rel=1e-8)


def test_several_arguments_and_results() -> None:
    x, y = np.array([1.0, 2.0]), np.array([3.0])

    def both(x: Any, y: Any) -> tuple[Any, ...]:
        return x * y, x.sum() + 0.0 * y

    (first, second), pull = pullback(both, x, y)
    assert np.all(first == [3, 6])
    assert np.all(second == [3])
    at_x, at_y = pull((np.array([1.0, 10.0]), np.array([100.0])))
    assert np.all(at_x == [103, 130])
    assert np.all(at_y == [21])
    _, (along, _) = tangent(both, [x, y], [np.ones(2), np.zeros(1)])
    assert np.all(along == 3)


def test_what_has_no_derivative_is_named() -> None:
    with pytest.raises(moments.DomainError, match=r"sort .* no derivative .* einsum"):
        gradient(np.sort)(np.ones(3))
    with pytest.raises(moments.DomainError, match="floor"):
        gradient(np.floor)(1.0)
    with pytest.raises(moments.DomainError, match="cannot become a plain one"):
        gradient(lambda x: np.asarray(x))(1.0)
