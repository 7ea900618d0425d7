"""Independent references for the exact laws: quadrature, enumeration and exact counting.

Nothing here is imported from the package. `REFERENCES` maps (component, quantity) to a function of
the laws' symbols; `tests/test_laws.py` fails for an exact law that has no entry.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath as mp
import numpy as np
from scipy.special import erf, ndtr

Reference = Callable[..., float]
DIGITS = 18
CUT = 12  # standard deviations; the Gaussian weight beyond is below 1e-31


# --- activations ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationReference:
    """A function, its derivative, and their means under N(m, s^2) where those have closed forms."""

    function: Callable[[np.ndarray], np.ndarray]
    derivative: Callable[[np.ndarray], np.ndarray]
    mean: Callable[[np.ndarray, float], np.ndarray]
    mean_slope: Callable[[np.ndarray, float], np.ndarray]


def _density(x: np.ndarray) -> np.ndarray:
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def _step(x: np.ndarray) -> np.ndarray:
    return (x > 0).astype(float)


def _relu_mean(m: np.ndarray, s: float) -> np.ndarray:
    return s * _density(m / s) + m * ndtr(m / s) if s else _relu(m)


def _relu_mean_slope(m: np.ndarray, s: float) -> np.ndarray:
    return ndtr(m / s) if s else _step(m)


def _gelu_mean(m: np.ndarray, s: float) -> np.ndarray:
    width = math.sqrt(1 + s * s)
    return m * ndtr(m / width) + s * s / width * _density(m / width)


def _gelu_mean_slope(m: np.ndarray, s: float) -> np.ndarray:
    width = math.sqrt(1 + s * s)
    return ndtr(m / width) + m / width**3 * _density(m / width)


CLOSED: dict[str, ActivationReference] = {
    "relu": ActivationReference(_relu, _step, _relu_mean, _relu_mean_slope),
    "gelu": ActivationReference(
        lambda x: x * ndtr(x), lambda x: ndtr(x) + x * _density(x), _gelu_mean, _gelu_mean_slope
    ),
    "identity": ActivationReference(
        lambda x: x, np.ones_like, lambda m, s: m, lambda m, s: np.ones_like(m)
    ),
    "leaky_relu": ActivationReference(
        lambda x: np.maximum(x, x / 100),
        lambda x: np.where(x > 0, 1.0, 0.01),
        lambda m, s: m / 100 + 0.99 * _relu_mean(m, s),
        lambda m, s: 0.01 + 0.99 * _relu_mean_slope(m, s),
    ),
    "relu_squared": ActivationReference(
        lambda x: _relu(x) ** 2,
        lambda x: 2 * _relu(x),
        lambda m, s: s * s * _relu_mean_slope(m, s) + m * _relu_mean(m, s),
        lambda m, s: 2 * _relu_mean(m, s),
    ),
    "erf": ActivationReference(
        erf,
        lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x),
        lambda m, s: erf(m / math.sqrt(1 + 2 * s * s)),
        lambda m, s: 2 / math.sqrt(math.pi * (1 + 2 * s * s)) * np.exp(-m * m / (1 + 2 * s * s)),
    ),
}
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(24)


def _gaussian_integral(integrand: Callable[[np.ndarray], np.ndarray], *marks: float) -> float:
    """Integral over a standard normal by Gauss-Legendre's rule on pieces that no bend is inside of.

    Split at 0 and symmetrically at `marks`; doubling the number of pieces proves that it converged.
    """
    inside = sorted({mark for mark in (*marks, 1, 2, 4, 7) if 0 < mark < CUT})
    edges = np.array([-CUT, *(-mark for mark in reversed(inside)), 0, *inside, CUT], dtype=float)

    def estimate(pieces: int) -> float:
        share = np.arange(pieces) / pieces
        starts = (edges[:-1, None] + np.diff(edges)[:, None] * share).ravel()
        half = np.diff(np.append(starts, CUT)) / 2
        z = (starts + half)[:, None] + half[:, None] * _NODES
        return math.fsum((half[:, None] * _NODE_WEIGHTS * _density(z) * integrand(z)).ravel())

    return _converged(estimate, (1, 2))


@functools.cache
def single_moment(name: str, power: int, variance: float, *, slope: bool = False) -> float:
    """E f(x)^power, or of the derivative, for x ~ N(0, variance)."""
    chosen = CLOSED[name]
    function = chosen.derivative if slope else chosen.function
    scale = math.sqrt(variance)
    return _gaussian_integral(lambda z: function(scale * z) ** power, 1 / scale)


@functools.cache
def pair_moment(
    name: str, variance: float, other: float, correlation: float, *, slope: bool = False
) -> float:
    """E f(x) f(x') by conditioning: the inner mean in closed form, the outer by quadrature.

    The conditional mean turns over sqrt(1 - r^2)/r standard deviations of the outer variable (or
    one over the function's own width), so the integral is split there.
    """
    chosen = CLOSED[name]
    function = chosen.derivative if slope else chosen.function
    mean = chosen.mean_slope if slope else chosen.mean
    v, w, r = math.sqrt(variance), math.sqrt(other), correlation
    rest = math.sqrt((1 - r) * (1 + r))
    turn = (rest + 1 / w) / abs(r) if r else 1.0
    return _gaussian_integral(
        lambda z: function(v * z) * mean(w * r * z, w * rest),
        *(rest / abs(r) * 6 if r else 0, turn, 1 / v),
    )


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu_tanh_slope(x: np.ndarray) -> np.ndarray:
    gate = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + gate) + 0.5 * x * (1 - gate**2) * math.sqrt(2 / math.pi) * (
        1 + 3 * 0.044715 * x**2
    )


def _logistic(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


def _weighted(rate: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """x times the logistic function of rate x, and its derivative."""
    return (
        lambda x: x * _logistic(rate * x),
        lambda x: _logistic(rate * x) + rate * x * _logistic(rate * x) * _logistic(-rate * x),
    )


def _mish(x: np.ndarray) -> np.ndarray:
    return x * np.tanh(np.logaddexp(0.0, x))


def _mish_slope(x: np.ndarray) -> np.ndarray:
    gate = np.tanh(np.logaddexp(0.0, x))
    return gate + x * _logistic(x) / np.cosh(np.logaddexp(0.0, x)) ** 2


def squashed(alpha: float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """tanh(alpha x) and its derivative."""
    return lambda x: np.tanh(alpha * x), lambda x: alpha / np.cosh(alpha * x) ** 2


# Functions without closed conditional means: the trapezoidal rule on the whole plane converges
# exponentially for analytic integrands, and halving its step proves that it has.
GRIDDED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gelu_tanh": (_gelu_tanh, _gelu_tanh_slope),
    "sigmoid": (_logistic, lambda x: _logistic(x) * _logistic(-x)),
    "silu": _weighted(1.0),
    "quick_gelu": _weighted(1.702),
    "tanh": squashed(1.0),
    "softplus": (lambda x: np.logaddexp(0.0, x), _logistic),
    "mish": (_mish, _mish_slope),
}


def _trapezoid(count: int) -> tuple[np.ndarray, np.ndarray]:
    nodes = np.linspace(-9.5, 9.5, count)
    weights = np.exp(-(nodes**2) / 2)
    # Their sum is 1 but for rounding, which differences of moments would keep.
    return nodes, weights / weights.sum()


def _converged(estimate: Callable[[int], float], counts: tuple[int, ...]) -> float:
    values = [estimate(count) for count in counts]
    assert abs(values[-1] - values[-2]) <= 1e-12 * max(1.0, abs(values[-1])), values
    return values[-1]


def gridded(name: str | float) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A function and its derivative by name; a number is the alpha of tanh(alpha x)."""
    return GRIDDED[name] if isinstance(name, str) else squashed(name)


def gridded_single(name: str | float, power: int, variance: float, *, slope: bool = False) -> float:
    function = gridded(name)[slope]

    def estimate(count: int) -> float:
        nodes, weights = _trapezoid(count)
        return float(weights @ function(math.sqrt(variance) * nodes) ** power)

    return _converged(estimate, (1001, 2001))


def both_squares(name: str | float, variance: float) -> float:
    """E f^2 f'^2."""
    if name in CLOSED:
        chosen = CLOSED[str(name)]
        scale = math.sqrt(variance)
        return _gaussian_integral(
            lambda z: (chosen.function(scale * z) * chosen.derivative(scale * z)) ** 2, 1 / scale
        )
    function, derivative = gridded(name)

    def estimate(count: int) -> float:
        nodes, weights = _trapezoid(count)
        x = math.sqrt(variance) * nodes
        return float(weights @ (function(x) * derivative(x)) ** 2)

    return _converged(estimate, (1001, 2001))


def gridded_pair(
    name: str | float, variance: float, other: float, correlation: float, *, slope: bool = False
) -> float:
    function = gridded(name)[slope]
    rest = math.sqrt((1 - correlation) * (1 + correlation))

    def estimate(count: int) -> float:
        nodes, weights = _trapezoid(count)
        first = weights * function(math.sqrt(variance) * nodes)
        partner = correlation * nodes[:, None] + rest * nodes[None, :]
        return float(first @ (function(math.sqrt(other) * partner) @ weights))

    return _converged(estimate, (241, 321))


def _pair(values: dict[str, float]) -> tuple[float, float, float]:
    return values["x_variance"], values["x_other_variance"], values["x_correlation"]


def _activation_references(name: str | float) -> dict[str, Reference]:
    if name in GRIDDED or not isinstance(name, str):
        single = lambda power, v, slope=False: gridded_single(name, power, v, slope=slope)  # noqa: E731
        pair = lambda v, w, r, slope=False: gridded_pair(name, v, w, r, slope=slope)  # noqa: E731
    else:
        single = lambda power, v, slope=False: single_moment(name, power, v, slope=slope)  # noqa: E731
        pair = lambda v, w, r, slope=False: pair_moment(name, v, w, r, slope=slope)  # noqa: E731

    def covariance(v: float, w: float, r: float) -> float:
        return pair(v, w, r) - single(1, v) * single(1, w)

    def slope(v: float, w: float, r: float) -> float:
        return pair(v, w, r, slope=True)

    return {
        "mean": lambda x_variance, **_: single(1, x_variance),
        "variance": lambda x_variance, **_: single(2, x_variance) - single(1, x_variance) ** 2,
        "covariance": lambda **values: covariance(*_pair(values)),
        "hidden_covariance": lambda x_variance, x_hidden_correlation, **_: covariance(
            x_variance, x_variance, x_hidden_correlation
        ),
        "grad_variance": lambda x_variance, grad_variance, **_: (
            grad_variance * single(2, x_variance, slope=True)
        ),
        "grad_covariance": lambda grad_covariance, **values: (
            grad_covariance * slope(*_pair(values))
        ),
        "kurtosis": lambda x_variance, **_: single(4, x_variance) / single(2, x_variance) ** 2,
        "alignment": lambda x_variance, **_: (
            both_squares(name, x_variance)
            / (single(2, x_variance) * single(2, x_variance, slope=True))
        ),
    }


def _dyt(quantity: str) -> Reference:
    return lambda alpha, **values: _activation_references(alpha)[quantity](**values)


# --- gated units: a function of one Gaussian times an independent one ----------------------------


def _factor_product(values: dict[str, float]) -> float:
    """E u u' over two values with those moments."""
    v, c = values["factor_variance"], values["factor_covariance"]
    return sum(p * u * other for p, u, other in two_points(0.0, v, 0.0, v, c / v))


def _gated_references(name: str) -> dict[str, Reference]:
    of = _activation_references(name)

    def moment(values: dict[str, float]) -> float:
        w = values["x_other_variance"]
        return of["covariance"](**values) + of["mean"](**values) * of["mean"](x_variance=w)

    def square(values: dict[str, float]) -> float:
        return of["variance"](**values) + of["mean"](**values) ** 2

    def factor_kurtosis() -> float:
        second, fourth = (sum(p * x**k for p, x in NORMAL_POINTS) for k in (2, 4))
        return fourth / second**2

    return {
        # The rows of weights that make the factor are symmetric.
        "mean": lambda **_: _row_mean(1.0),
        "hidden_covariance": lambda **_: _row_mean(1.0),
        "variance": lambda **values: square(values) * values["factor_variance"],
        "covariance": lambda **values: moment(values) * _factor_product(values),
        "grad_variance": lambda **values: of["grad_variance"](**values) * values["factor_variance"],
        "grad_covariance": lambda **values: (
            of["grad_covariance"](**values) * _factor_product(values)
        ),
        "grad_factor": lambda **values: square(values) * values["grad_variance"],
        "grad_factor_covariance": lambda **values: moment(values) * values["grad_covariance"],
        "kurtosis": lambda **values: of["kurtosis"](**values) * factor_kurtosis(),
    }


GATES = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "identity",
}


# --- linear maps, dropout, scales: enumeration of discrete distributions --------------------------

State = tuple[float, float, float]  # probability, value, value at the other token (or feature)
# Three points that share the standard normal's moments up to the fifth.
NORMAL_POINTS = ((1 / 6, -math.sqrt(3)), (2 / 3, 0.0), (1 / 6, math.sqrt(3)))


def two_points(mean: float, variance: float, other_mean: float, other: float, r: float) -> list:
    """The pair (m + sqrt(v) a, m' + sqrt(v') b) of signs a, b that agree with odds (1+r)/2."""
    return [
        ((1 + a * b * r) / 4, mean + math.sqrt(variance) * a, other_mean + math.sqrt(other) * b)
        for a in (-1, 1)
        for b in (-1, 1)
    ]


def _states(values: dict[str, float]) -> list[State]:
    v, w, r = _pair(values)
    return two_points(values["x_mean"], v, values["x_other_mean"], w, r)


def _products(states: list[State], count: int) -> Iterator[tuple[float, list[State]]]:
    for draw in itertools.product(states, repeat=count):
        yield math.prod(state[0] for state in draw), list(draw)


def summed_moment(states: list[State], fan: int, weight_variance: float, *, hidden: bool) -> float:
    """E y y' of y = sum_i w_i x_i over all signs w and all draws of `fan` features.

    With `hidden` the second factor is another row of weights at the same token.
    """
    total = 0.0
    rows = list(itertools.product((-1, 1), repeat=fan))
    for probability, draw in _products(states, fan):
        for row, other_row in (
            itertools.product(rows, rows) if hidden else zip(rows, rows, strict=True)
        ):
            first = sum(w * state[1] for w, state in zip(row, draw, strict=True))
            second = sum(
                w * state[1 if hidden else 2] for w, state in zip(other_row, draw, strict=True)
            )
            total += probability * first * second / (len(rows) ** 2 if hidden else len(rows))
    return weight_variance * total


def _linear_variance(
    fan_in: int, weight_variance: float, x_variance: float, x_mean: float
) -> float:
    states = two_points(x_mean, x_variance, x_mean, x_variance, 1.0)
    return summed_moment(states, int(fan_in), weight_variance, hidden=False)


def _gaussian_row_kurtosis() -> float:
    """Kurtosis of w . x over Gaussian rows w at a given input x."""
    x = (0.3, -1.7, 0.8)
    moments = {2: 0.0, 4: 0.0}
    for row in itertools.product(NORMAL_POINTS, repeat=len(x)):
        y = sum(w * value for (_, w), value in zip(row, x, strict=True))
        for power in moments:
            moments[power] += math.prod(p for p, _ in row) * y**power
    return moments[4] / moments[2] ** 2


def dropped(
    states: list[State], drop_prob: float, powers: tuple[int, int], *, shared: bool = False
) -> float:
    """E d(x)^a d(x')^b for dropout d, over masks; `shared`: x' is the same entry as x."""
    masks = ((drop_prob, 0.0), (1 - drop_prob, 1 / (1 - drop_prob)))
    total = 0.0
    for (p, x, other), (q, keep), (q_other, keep_other) in itertools.product(states, masks, masks):
        if shared:
            total += p * q * q_other * (keep * x) ** (powers[0] + powers[1])
        else:
            total += p * q * q_other * (keep * x) ** powers[0] * (keep_other * other) ** powers[1]
    return total


def _row_mean(mean: float) -> float:
    """Mean of w . x over rows of signs, at inputs of that mean."""
    rows = list(itertools.product((-1, 1), repeat=3))
    return sum(sum(row) * mean for row in rows) / len(rows)


LINEAR: dict[str, Reference] = {
    "mean": lambda x_mean, **_: _row_mean(x_mean),
    "variance": lambda fan_in, weight_variance, x_variance, x_mean, **_: _linear_variance(
        fan_in, weight_variance, x_variance, x_mean
    ),
    "covariance": lambda fan_in, weight_variance, **values: summed_moment(
        _states(values), int(fan_in), weight_variance, hidden=False
    ),
    "hidden_covariance": lambda weight_variance, x_variance, x_mean, **_: summed_moment(
        two_points(x_mean, x_variance, x_mean, x_variance, 1.0), 2, weight_variance, hidden=True
    ),
    "grad_variance": lambda fan_out, weight_variance, grad_variance, **_: _linear_variance(
        fan_out, weight_variance, grad_variance, 0.0
    ),
    "grad_covariance": lambda fan_out, weight_variance, grad_variance, grad_correlation, **_: (
        summed_moment(
            two_points(0.0, grad_variance, 0.0, grad_variance, grad_correlation),
            int(fan_out),
            weight_variance,
            hidden=False,
        )
    ),
    "kurtosis": lambda **_: _gaussian_row_kurtosis(),
}


def _with_bias(reference: Reference) -> Reference:
    """A bias of either sign, the same at both tokens, averaged over."""
    return lambda bias_variance, **values: (
        reference(**values)
        + sum(b * b for b in (-math.sqrt(bias_variance), math.sqrt(bias_variance))) / 2
    )


BIASED_LINEAR: dict[str, Reference] = {
    **{
        quantity: (lambda bias_variance, reference=reference, **values: reference(**values))
        for quantity, reference in LINEAR.items()
    },
    "variance": _with_bias(LINEAR["variance"]),
    "covariance": _with_bias(LINEAR["covariance"]),
}


def _dropout_covariance(drop_prob: float, states: list[State]) -> float:
    first = dropped(states, drop_prob, (1, 0))
    second = dropped(states, drop_prob, (0, 1))
    return dropped(states, drop_prob, (1, 1)) - first * second


def _own(mean: float, variance: float) -> list[State]:
    return two_points(mean, variance, mean, variance, 1.0)


def _dropout_kurtosis(drop_prob: float) -> float:
    states = [(p, x, x) for p, x in NORMAL_POINTS]
    second = dropped(states, drop_prob, (1, 1), shared=True)
    return dropped(states, drop_prob, (2, 2), shared=True) / second**2


DROPOUT: dict[str, Reference] = {
    "mean": lambda drop_prob, x_mean, x_variance, **_: dropped(
        _own(x_mean, x_variance), drop_prob, (1, 0)
    ),
    "variance": lambda drop_prob, x_mean, x_variance, **_: (
        dropped(_own(x_mean, x_variance), drop_prob, (1, 1), shared=True)
        - dropped(_own(x_mean, x_variance), drop_prob, (1, 0)) ** 2
    ),
    "covariance": lambda drop_prob, **values: _dropout_covariance(drop_prob, _states(values)),
    "hidden_covariance": lambda drop_prob, x_mean, x_variance, x_hidden_correlation, **_: (
        _dropout_covariance(
            drop_prob,
            two_points(x_mean, x_variance, x_mean, x_variance, x_hidden_correlation),
        )
    ),
    "grad_variance": lambda drop_prob, grad_variance, **_: dropped(
        _own(0.0, grad_variance), drop_prob, (1, 1), shared=True
    ),
    "grad_covariance": lambda drop_prob, grad_variance, grad_correlation, **_: _dropout_covariance(
        drop_prob, two_points(0.0, grad_variance, 0.0, grad_variance, grad_correlation)
    ),
    "kurtosis": lambda drop_prob, **_: _dropout_kurtosis(drop_prob),
}


def _scaled_covariance(weight_variance: float, states: list[State]) -> float:
    factor = math.sqrt(weight_variance)
    expect = lambda value: sum(state[0] * value(*state[1:]) for state in states)  # noqa: E731
    product = expect(lambda x, y: factor * x * factor * y)
    return product - expect(lambda x, y: factor * x) * expect(lambda x, y: factor * y)


SCALE: dict[str, Reference] = {
    "mean": lambda weight_variance, x_mean, x_variance, **_: sum(
        p * math.sqrt(weight_variance) * x for p, x, _ in _own(x_mean, x_variance)
    ),
    "variance": lambda weight_variance, x_mean, x_variance, **_: _scaled_covariance(
        weight_variance, _own(x_mean, x_variance)
    ),
    "covariance": lambda weight_variance, **values: _scaled_covariance(
        weight_variance, _states(values)
    ),
    "hidden_covariance": lambda weight_variance, x_mean, x_variance, x_hidden_correlation, **_: (
        _scaled_covariance(
            weight_variance,
            two_points(x_mean, x_variance, x_mean, x_variance, x_hidden_correlation),
        )
    ),
    "grad_variance": lambda weight_variance, grad_variance, **_: _scaled_covariance(
        weight_variance, _own(0.0, grad_variance)
    ),
    "grad_covariance": lambda weight_variance, grad_variance, grad_correlation, **_: (
        _scaled_covariance(
            weight_variance, two_points(0.0, grad_variance, 0.0, grad_variance, grad_correlation)
        )
    ),
    "kurtosis": lambda **_: (
        sum(p * x**4 for p, x in NORMAL_POINTS) / sum(p * x**2 for p, x in NORMAL_POINTS) ** 2
    ),
}


# --- embeddings: counting -------------------------------------------------------------------------


def repeated_share(ids: tuple[int, ...]) -> Fraction:
    """Share of ordered pairs of different places that hold the same id."""
    length = len(ids)
    same = sum(ids[i] == ids[j] for i in range(length) for j in range(length) if i != j)
    return Fraction(same, length * (length - 1))


def zipf_repeats(vocab_size: int, seq_len: int) -> float:
    """Expected share over every text of `seq_len` independent tokens with odds 1, 1/2, 1/3, ..."""
    total = sum(Fraction(1, rank) for rank in range(1, vocab_size + 1))
    odds = [Fraction(1, rank) / total for rank in range(1, vocab_size + 1)]
    texts = itertools.product(range(vocab_size), repeat=seq_len)
    return float(sum(math.prod(odds[t] for t in text) * repeated_share(text) for text in texts))


def segment_repeats(seq_len: int) -> float:
    """Expected share over every split of the sequence into two segments, either possibly empty."""
    splits = [(0,) * first + (1,) * (seq_len - first) for first in range(seq_len + 1)]
    return float(sum(repeated_share(split) for split in splits) / len(splits))


def _looked_up(table_variance: float, share: float, *, hidden: bool) -> float:
    """E of two look-ups' product over every table of signs with two rows and two features."""
    scale, total = math.sqrt(table_variance), 0.0
    for table in itertools.product((-scale, scale), repeat=4):
        first, other_feature, other_row = table[0], table[1], table[2]
        product = first * (other_feature if hidden else share * first + (1 - share) * other_row)
        total += product / 16
    return total


def _embedding(pattern: Reference) -> dict[str, Reference]:
    return {
        "mean": lambda table_variance, **_: _row_mean(math.sqrt(table_variance)),
        "variance": lambda table_variance, **_: _looked_up(table_variance, 1.0, hidden=False),
        "covariance": lambda table_variance, pattern_correlation, **_: _looked_up(
            table_variance, pattern_correlation, hidden=False
        ),
        "hidden_covariance": lambda table_variance, **_: _looked_up(
            table_variance, 1.0, hidden=True
        ),
        "pattern_correlation": pattern,
    }


# --- what follows from a symmetry -----------------------------------------------------------------


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _softmax_mean(seq_len: int) -> float:
    """Exchangeable logits: the average over every rotation of one row of them."""
    logits = np.random.default_rng(5).normal(size=int(seq_len))
    return float(np.mean([_softmax(np.roll(logits, k))[0] for k in range(int(seq_len))]))


def attention_symmetry(*, value: bool) -> tuple[float, float]:
    """Mean of an output feature and product of two, averaged over signs of the input's features.

    Flipping a feature together with the rows of W_q and W_k that read it leaves the logits alone;
    with values, the columns of W_v flip instead.
    """
    rng = np.random.default_rng(6)
    x, query, key = rng.normal(size=(5, 3)), rng.normal(size=(3, 3)), rng.normal(size=(3, 3))
    values = rng.normal(size=(3, 3)) if value else np.eye(3)
    outputs = []
    for signs in itertools.product((-1.0, 1.0), repeat=3):
        flip = np.diag(signs)
        if value:
            outputs.append(_softmax(x @ query @ (x @ key).T) @ x @ values @ flip)
        else:
            tokens = x @ flip
            outputs.append(_softmax(tokens @ flip @ query @ (tokens @ flip @ key).T) @ tokens)
    stack = np.stack(outputs)
    return float(stack[:, 0, 0].mean()), float((stack[:, 0, 0] * stack[:, 0, 1]).mean())


# --- layer normalisation: any input vector, over permutations of its features ---------------------


def normalised(vector: np.ndarray, epsilon: float) -> np.ndarray:
    centred = vector - vector.mean()
    return centred / np.sqrt((centred**2).mean() + epsilon)


def _features(d_model: int, variance: float) -> np.ndarray:
    vector = np.random.default_rng(7).normal(size=int(d_model))
    vector -= vector.mean()
    return vector * math.sqrt(variance / (vector**2).mean())


def _layernorm_hidden(d_model: int, x_variance: float, epsilon: float) -> float:
    y = normalised(_features(d_model, x_variance), epsilon)
    return float((y.sum() ** 2 - (y**2).sum()) / (y.size * (y.size - 1)))


def _sphere_kurtosis(d_model: int) -> float:
    """Kurtosis of a normalised Gaussian vector's entry: a projection of the sphere in d - 1."""
    with mp.workdps(DIGITS):
        n = mp.mpf(int(d_model) - 1)
        density = lambda t: (1 - t * t) ** ((n - 3) / 2)  # noqa: E731
        moments = [mp.quad(lambda t, k=k: t**k * density(t), [-1, 0, 1]) for k in (0, 2, 4)]
        return float(moments[2] * moments[0] / moments[1] ** 2)


LAYERNORM: dict[str, Reference] = {
    "mean": lambda d_model, x_variance, epsilon, **_: float(
        normalised(_features(d_model, x_variance), epsilon).mean()
    ),
    "variance": lambda d_model, x_variance, epsilon, **_: float(
        (normalised(_features(d_model, x_variance), epsilon) ** 2).mean()
    ),
    "hidden_covariance": lambda d_model, x_variance, epsilon, **_: _layernorm_hidden(
        d_model, x_variance, epsilon
    ),
    "kurtosis": lambda d_model, **_: _sphere_kurtosis(d_model),
}


def _rms_normalised(d_model: int, x_variance: float, epsilon: float) -> np.ndarray:
    vector = np.random.default_rng(8).normal(size=int(d_model))
    vector *= math.sqrt(x_variance / (vector**2).mean())
    return np.asarray(vector / np.sqrt((vector**2).mean() + epsilon))


def _direction_kurtosis(d_model: int) -> float:
    """Kurtosis of an entry of a uniform direction: x_1^2/|x|^2 is Beta(1/2, (d - 1)/2)."""
    with mp.workdps(DIGITS):
        a, b = mp.mpf(1) / 2, (mp.mpf(int(d_model)) - 1) / 2
        moments = [mp.beta(a + k, b) / mp.beta(a, b) for k in (1, 2)]
        return float(moments[1] / moments[0] ** 2)


def _sign_average(d_model: int, x_variance: float, epsilon: float) -> tuple[float, float]:
    """Mean of an entry, and of the product of two, over the signs of a token's features."""
    entries = [
        _rms_normalised(d_model, x_variance, epsilon)[:2] * np.array(signs)
        for signs in itertools.product((-1.0, 1.0), repeat=2)
    ]
    stack = np.stack(entries)
    return float(stack[:, 0].mean()), float(stack.prod(-1).mean())


RMSNORM: dict[str, Reference] = {
    "mean": lambda d_model, x_variance, epsilon, **_: _sign_average(d_model, x_variance, epsilon)[
        0
    ],
    "hidden_covariance": lambda d_model, x_variance, epsilon, **_: _sign_average(
        d_model, x_variance, epsilon
    )[1],
    "variance": lambda d_model, x_variance, epsilon, **_: float(
        (_rms_normalised(d_model, x_variance, epsilon) ** 2).mean()
    ),
    "kurtosis": lambda d_model, **_: _direction_kurtosis(d_model),
}


# --- the feed-forward block: two linear maps around a ReLU ----------------------------------------


def _block_gain(values: dict[str, float]) -> float:
    return math.prod(values[name] for name in ("d_model", "ffn_in", "d_ff", "ffn_out"))


def _relu_pair(values: dict[str, float], *, slope: bool = False) -> float:
    return pair_moment("relu", *_pair(values), slope=slope)


def _relu_square(values: dict[str, float], *, slope: bool = False) -> float:
    return single_moment("relu", 2, values["x_variance"], slope=slope) / (1 - values["drop_prob"])


FFN_BLOCK: dict[str, Reference] = {
    # The last matrix makes the output: its rows are independent and have mean zero.
    "mean": lambda x_variance, **_: _row_mean(single_moment("relu", 1, x_variance)),
    "hidden_covariance": lambda ffn_out, x_variance, **_: LINEAR["hidden_covariance"](
        weight_variance=ffn_out, x_variance=x_variance, x_mean=0.0
    ),
    "variance": lambda **values: _block_gain(values) * _relu_square(values),
    "covariance": lambda **values: _block_gain(values) * _relu_pair(values),
    "grad_variance": lambda **values: (
        _block_gain(values) * _relu_square(values, slope=True) * values["grad_variance"]
    ),
    "grad_covariance": lambda **values: (
        _block_gain(values) * _relu_pair(values, slope=True) * values["grad_covariance"]
    ),
}


def _sum_square(
    skip_square: float,
    branch_square: float,
    x_variance: float,
    branch_variance: float,
    branch_correlation: float,
    **_: float,
) -> float:
    """E (lambda x + beta b)^2 of correlated Gaussians, summed over nodes that are exact for it."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(4)
    one, other = np.meshgrid(nodes, nodes)
    rest = math.sqrt(1 - branch_correlation**2)
    branch = math.sqrt(branch_variance) * (branch_correlation * one + rest * other)
    total = math.sqrt(skip_square * x_variance) * one + math.sqrt(branch_square) * branch
    return float(weights @ total**2 @ weights / weights.sum() ** 2)


def _grad_sum_square(**given: float) -> float:
    names = ("x_variance", "branch_variance", "branch_correlation")
    theirs = ("grad_variance", "grad_branch_variance", "grad_branch_correlation")
    return _sum_square(**given | {n: given[g] for n, g in zip(names, theirs, strict=True)})


_BY_COMPONENT: dict[str, dict[str, Reference]] = {
    **{name: _activation_references(name) for name in (*CLOSED, *GRIDDED)},
    **{name: _gated_references(gate) for name, gate in GATES.items()},
    "dyt": {quantity: _dyt(quantity) for quantity in _activation_references("tanh")},
    "linear": LINEAR,
    "biased_linear": BIASED_LINEAR,
    "dropout": DROPOUT,
    "scale": SCALE,
    "correlated_residual": {"variance": _sum_square, "grad_variance": _grad_sum_square},
    "token_embedding": _embedding(
        lambda vocab_size, seq_len, **_: zipf_repeats(int(vocab_size), int(seq_len))
    ),
    "segment_embedding": _embedding(lambda seq_len, **_: segment_repeats(int(seq_len))),
    "position_embedding": _embedding(
        lambda seq_len, **_: float(repeated_share(tuple(range(int(seq_len)))))
    ),
    "softmax": {"mean": lambda seq_len, **_: _softmax_mean(seq_len)},
    "attention_without_value": {
        "mean": lambda **_: attention_symmetry(value=False)[0],
        "hidden_covariance": lambda **_: attention_symmetry(value=False)[1],
    },
    **{
        name: {
            "mean": lambda **_: attention_symmetry(value=True)[0],
            "hidden_covariance": lambda **_: attention_symmetry(value=True)[1],
            "kurtosis": lambda **_: _gaussian_row_kurtosis(),
        }
        for name in ("attention", "attention_block")
    },
    "layernorm": LAYERNORM,
    "rmsnorm": RMSNORM,
    "ffn_block": FFN_BLOCK,
}

REFERENCES: dict[tuple[str, str], Reference] = {
    (component, quantity): reference
    for component, references in _BY_COMPONENT.items()
    for quantity, reference in references.items()
}


# --- Monte Carlo of what holds only asymptotically ------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean over independent draws with its standard error."""

    mean: float
    stderr: float

    @classmethod
    def of(cls, draws: Any) -> Estimate:
        values = np.asarray(draws, dtype=float)
        return cls(float(values.mean()), float(values.std(ddof=1) / math.sqrt(values.size)))


def exchangeable(
    rng: np.random.Generator, tokens: int, features: int, variance: float, correlation: float
) -> np.ndarray:
    """Gaussian entries, shape (tokens, features), any two tokens correlated alike."""
    common = rng.normal(size=(1, features))
    own = rng.normal(size=(tokens, features))
    return math.sqrt(variance) * (
        math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own
    )


def token_moments(x: np.ndarray) -> tuple[float, float]:
    """Mean square, and mean product over ordered pairs of different tokens."""
    tokens, features = x.shape
    squares = float((x**2).sum())
    pairs = float((x.sum(0) ** 2).sum()) - squares
    return squares / x.size, pairs / (tokens * (tokens - 1) * features)


def masks(rng: np.random.Generator, shape: tuple[int, ...], drop_prob: float) -> np.ndarray:
    return (rng.random(shape) >= drop_prob) / (1 - drop_prob)


def softmax_draws(
    seq_len: int, variance: float, correlation: float, draws: int, seed: int
) -> dict[str, Estimate]:
    """Variance of one weight, and of the gradient that a white unit gradient sends to a logit."""
    rng = np.random.default_rng(seed)
    logits = exchangeable(rng, seq_len, draws, variance, correlation).T
    a = _softmax(logits)
    g = rng.normal(size=a.shape)
    sent = a * (g - (a * g).sum(-1, keepdims=True))
    return {
        "variance": Estimate.of(((a - 1 / seq_len) ** 2).mean(-1)),
        "grad_variance": Estimate.of((sent**2).mean(-1)),
    }


@dataclass(frozen=True)
class AttentionSetting:
    """One attention block with heads * d_head = d_model, full mask, logits of variance `theta`."""

    theta: float
    x_variance: float = 1.3
    x_correlation: float = 0.4
    grad_variance: float = 0.8
    grad_correlation: float = 0.3
    drop_prob: float = 0.1
    attention_drop_prob: float = 0.2
    d_model: int = 128
    heads: int = 2
    seq_len: int = 64
    value: float = 0.012
    output: float = 0.006

    @property
    def query(self) -> float:
        """Variance of query and of key weights."""
        squared = self.theta / (1 - self.x_correlation)
        return math.sqrt(squared) / (self.d_model * self.x_variance)

    def values(self) -> dict[str, float]:
        names = [f for f in self.__dataclass_fields__ if f not in ("theta", "heads")]
        return {n: getattr(self, n) for n in names} | {
            "query": self.query,
            "key": self.query,
            "fan_out": self.d_model,
        }


@functools.cache
def attention_draws(setting: AttentionSetting, draws: int, seed: int) -> dict[tuple, Estimate]:
    """Token moments by (component, quantity), the gradient through the values only."""
    s, rng = setting, np.random.default_rng(seed)
    length, d, d_head = s.seq_len, s.d_model, s.d_model // s.heads
    seen: dict[tuple[str, str], list[float]] = {}

    def record(component: str, prefix: str, moments: tuple[float, float]) -> None:
        for quantity, moment in zip(("variance", "covariance"), moments, strict=True):
            seen.setdefault((component, prefix + quantity), []).append(moment)

    for _ in range(draws):
        x = exchangeable(rng, length, d, s.x_variance, s.x_correlation)
        g = exchangeable(rng, length, d, s.grad_variance, s.grad_correlation)
        w_o = rng.normal(size=(d, d)) * math.sqrt(s.output)
        returned = (g * masks(rng, g.shape, s.drop_prob)) @ w_o.T
        plain, heads, through_values, through_block = [], [], 0.0, 0.0
        for h in range(s.heads):
            q, k = (rng.normal(size=(d, d_head)) * math.sqrt(s.query) for _ in range(2))
            w_v = rng.normal(size=(d, d_head)) * math.sqrt(s.value)
            a = _softmax(x @ q @ (x @ k).T / math.sqrt(d_head))
            a = a * masks(rng, a.shape, s.attention_drop_prob)
            plain.append(a @ x)
            heads.append(a @ x @ w_v)
            columns = slice(h * d_head, (h + 1) * d_head)
            through_values = through_values + a.T @ g[:, columns] @ w_v.T
            through_block = through_block + a.T @ returned[:, columns] @ w_v.T
            record("attention_without_value", "grad_", token_moments(a.T @ g))
        y = np.concatenate(heads, 1)
        record("attention_without_value", "", token_moments(np.concatenate(plain, 1)))
        record("attention", "", token_moments(y))
        record("attention", "grad_", token_moments(through_values))
        block = (y @ w_o.T) * masks(rng, x.shape, s.drop_prob)
        record("attention_block", "", token_moments(block))
        record("attention_block", "grad_", token_moments(through_block))
    return {key: Estimate.of(values) for key, values in seen.items()}


@functools.cache
def uniform_attention_draws(
    d_model: int, seq_len: int, variance: float, correlation: float, draws: int, seed: int
) -> dict[str, Estimate]:
    """Squared gradient norms of one head's matrices at uniform attention, weight variances 1/d."""
    rng = np.random.default_rng(seed)
    centre = np.eye(seq_len) - 1 / seq_len
    norms: dict[str, list[float]] = {"value_gradient": [], "query_gradient": []}
    for _ in range(draws):
        x = exchangeable(rng, seq_len, d_model, variance, correlation)
        g = rng.normal(size=(seq_len, d_model))
        w_k, w_v = (rng.normal(size=(d_model, d_model)) / math.sqrt(d_model) for _ in range(2))
        to_values = np.broadcast_to(g.mean(0), g.shape)
        to_logits = g @ (x @ w_v).T @ centre / seq_len
        to_queries = to_logits @ (x @ w_k) / math.sqrt(d_model)
        norms["value_gradient"].append(float(((x.T @ to_values) ** 2).sum()))
        norms["query_gradient"].append(float(((x.T @ to_queries) ** 2).sum()))
    return {quantity: Estimate.of(values) for quantity, values in norms.items()}


@functools.cache
def layernorm_draws(
    d_model: int, variance: float, correlation: float, draws: int, seed: int
) -> dict[str, Estimate]:
    """Pairs of tokens: correlation after normalisation, and moments of a white-feature gradient."""
    rng = np.random.default_rng(seed)
    grad_correlation = 0.6
    shape = (draws, d_model)

    def pair(v: float, r: float) -> tuple[np.ndarray, np.ndarray]:
        first = rng.normal(size=shape)
        second = r * first + math.sqrt(1 - r * r) * rng.normal(size=shape)
        return math.sqrt(v) * first, math.sqrt(v) * second

    def normalise(x: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True))
        y = centred / scale
        inner = g - g.mean(-1, keepdims=True) - y * (g * y).mean(-1, keepdims=True)
        return y, inner / scale

    x, g = pair(variance, correlation), pair(1.0, grad_correlation)
    (y, dx), (y_other, dx_other) = (normalise(*both) for both in zip(x, g, strict=True))
    return {
        "covariance": Estimate.of((y * y_other).mean(-1)),
        "grad_variance": Estimate.of((dx**2).mean(-1)),
        "grad_covariance": Estimate.of((dx * dx_other).mean(-1) / grad_correlation),
    }
