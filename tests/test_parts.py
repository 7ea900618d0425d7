"""The leaves by themselves, against random matrices and real tensors: biases, gates, norms."""

from __future__ import annotations

import doctest
import math
import threading
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
from quadrature import Estimate, exchangeable, gridded_pair, token_moments

import moments
from moments.engine.composition import Leaf
from moments.engine.directions import expected_cosine, expected_pull
from moments.engine.state import Fluctuation, Gradient, Kernel, Signal
from moments.errors import DomainError
from moments.formulas import activation as activations
from moments.formulas.activation import (
    ACTIVATION_LAWS,
    activation_laws,
    activation_names,
    register_activation,
    registered_function,
)
from moments.formulas.linear import BIASED_LINEAR, DROPOUT, LINEAR
from moments.formulas.normalization import LAYERNORM, RMSNORM
from moments.layers.elementary import Dropout, Linear
from moments.layers.gated import GatedLinear
from moments.layers.normalization import DynamicTanh, FiniteNormalization
from moments.prediction.stack import gaussian

TOKENS, VARIANCE, CORRELATION, GRAD, GRAD_CORRELATION = 4, 1.3, 0.4, 0.8, 0.3


def _gaussian(width: int) -> Signal:
    kernel = Kernel(VARIANCE, CORRELATION * VARIANCE)
    varies = Fluctuation.of_gaussian(kernel, width)
    return Signal(kernel, TOKENS, width=float(width), fluctuation=varies)


def _gradient() -> Gradient:
    return Gradient(Kernel(GRAD, GRAD_CORRELATION * GRAD), TOKENS)


def _resolved(signal: Signal) -> Signal:
    def matrix(kernel: Kernel) -> Kernel:
        pairs = np.full((TOKENS, TOKENS), kernel.off_diagonal)
        np.fill_diagonal(pairs, kernel.diagonal)
        return Kernel.of_matrix(pairs)

    assert signal.fluctuation is not None
    varies = Fluctuation(matrix(signal.fluctuation.norms))
    return Signal(matrix(signal.kernel), TOKENS, width=signal.width, fluctuation=varies)


def _predicted(leaf: Leaf, signal: Signal) -> dict[str, float]:
    output, back = leaf.forward(signal)
    pulled = back(_gradient())
    kernel, sent = output.kernel, pulled.gradient.kernel
    assert output.fluctuation is not None
    return {
        "variance": kernel.diagonal,
        "covariance": kernel.off_diagonal,
        "spread": output.fluctuation.norms.diagonal,
        "fourth": output.kurtosis * kernel.diagonal**2,
        "grad_variance": sent.diagonal,
        "grad_covariance": sent.off_diagonal,
        **(pulled.weights() if pulled.weights is not None else {}),
    }


def _measured(
    draw: Callable[[np.random.Generator, np.ndarray, np.ndarray], tuple[Any, Any, dict[str, Any]]],
    widths: tuple[int, int],
    draws: int,
    *,
    unit: bool = False,
) -> dict[str, Estimate]:
    """Moments over draws of (output, gradient at the input, gradients of parameters).

    `unit` puts every token's squared norm at its mean.
    """
    rng = np.random.default_rng(3)
    seen: dict[str, list[float]] = {}
    norms = []
    for _ in range(draws):
        x = exchangeable(rng, TOKENS, widths[0], VARIANCE, CORRELATION)
        if unit:
            x *= math.sqrt(VARIANCE) / np.sqrt((x**2).mean(-1, keepdims=True))
        g = exchangeable(rng, TOKENS, widths[1], GRAD, GRAD_CORRELATION)
        y, dx, parameters = draw(rng, x, g)
        found = dict(zip(("variance", "covariance"), token_moments(y), strict=True))
        found |= dict(zip(("grad_variance", "grad_covariance"), token_moments(dx), strict=True))
        found |= {name: float((value**2).sum()) for name, value in parameters.items()}
        found["fourth"] = float((y**4).mean())
        norms.append((y**2).mean(-1))
        for name, value in found.items():
            seen.setdefault(name, []).append(value)
    about = np.stack(norms) - np.mean(norms)
    return {name: Estimate.of(values) for name, values in seen.items()} | {
        "spread": Estimate.of((about**2).mean(-1))
    }


def _agree(
    predicted: dict[str, float], measured: dict[str, Estimate], left_out: dict[str, float]
) -> None:
    """Within four standard errors and the relative error that `left_out` allows each quantity."""
    assert set(predicted) == set(measured)
    for name, estimate in measured.items():
        slack = left_out.get(name, left_out.get("", 0.0)) * abs(estimate.mean)
        distance = abs(predicted[name] - estimate.mean)
        assert distance <= 4 * estimate.stderr + slack, (name, predicted[name], estimate)


# --- linear maps with a bias ----------------------------------------------------------------------


def _biased(fan_in: int, fan_out: int) -> Linear:
    parameters = {
        "fan_in": fan_in,
        "fan_out": fan_out,
        "weight_variance": 0.01,
        "bias_variance": 0.5,
    }
    return Linear(LINEAR, "refined", "ffn.in", parameters, fan_out, "ffn_in", has_bias=True)


def test_linear_with_bias() -> None:
    leaf = _biased(48, 80)
    assert leaf.laws is BIASED_LINEAR

    def draw(rng: np.random.Generator, x: np.ndarray, g: np.ndarray) -> Any:
        weight, bias = 0.1 * rng.normal(size=(48, 80)), math.sqrt(0.5) * rng.normal(size=80)
        return x @ weight + bias, g @ weight.T, {"ffn_in": x.T @ g, "ffn_in.bias": g.sum(0)}

    _agree(_predicted(leaf, _gaussian(48)), _measured(draw, (48, 80), 1500), {"fourth": 0.04})


def test_a_bias_of_variance_zero_changes_nothing_but_is_listed() -> None:
    plain = {"fan_in": 8, "fan_out": 6, "weight_variance": 0.1}
    without = Linear(LINEAR, "refined", "ffn.in", plain, 6, "ffn_in")
    zero = {**plain, "bias_variance": 0.0}
    with_bias = Linear(LINEAR, "refined", "ffn.in", zero, 6, "ffn_in", has_bias=True)
    one, two = _predicted(without, _gaussian(8)), _predicted(with_bias, _gaussian(8))
    # sum over tokens of a feature's gradient: L g2 (1 + (L - 1) r_g), times six features
    bias = 6 * TOKENS * GRAD * (1 + (TOKENS - 1) * GRAD_CORRELATION)
    assert two.pop("ffn_in.bias") == pytest.approx(bias)
    assert one == two


# --- gated units ----------------------------------------------------------------------------------


def _logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


_FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu": (lambda x: np.maximum(x, 0), lambda x: (x > 0) * 1.0),
    "silu": (
        lambda x: x * _logistic(x),
        lambda x: _logistic(x) * (1 + x * (1 - _logistic(x))),
    ),
}


def _gated(name: str, d_model: int, d_ff: int) -> GatedLinear:
    return GatedLinear(
        "ffn.activation",
        activation_laws(name),
        d_model,
        d_ff,
        0.012,
        0.009,
        gate_bias=0.2,
        bias=0.3,
        has_bias=True,
    )


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_gated_unit(name: str) -> None:
    d_model, d_ff = 96, 160
    function, derivative = _FUNCTIONS[name]

    def draw(rng: np.random.Generator, x: np.ndarray, g: np.ndarray) -> Any:
        gate, factor = (math.sqrt(s) * rng.normal(size=(d_model, d_ff)) for s in (0.012, 0.009))
        gate_bias, bias = (math.sqrt(s) * rng.normal(size=d_ff) for s in (0.2, 0.3))
        a, u = x @ gate + gate_bias, x @ factor + bias
        at_gate, at_factor = g * derivative(a) * u, g * function(a)
        parameters = {
            "gate": x.T @ at_gate,
            "gate.bias": at_gate.sum(0),
            "ffn_in": x.T @ at_factor,
            "ffn_in.bias": at_factor.sum(0),
        }
        return function(a) * u, at_gate @ gate.T + at_factor @ factor.T, parameters

    kernel = Kernel(VARIANCE, CORRELATION * VARIANCE)
    fixed = Fluctuation.fixed(kernel)
    signal = Signal(kernel, TOKENS, width=float(d_model), fluctuation=fixed)
    # The gradient's part along the token is twice that of independent paths: 1/d_model or so.
    left_out = {"": 1 / d_model, "grad_variance": 1.5 / d_model, "grad_covariance": 2 / d_model}
    measured = _measured(draw, (d_model, d_ff), 1500, unit=True)
    _agree(_predicted(_gated(name, d_model, d_ff), signal), measured, left_out)
    # Gaussian tokens: their squared norms fluctuate by 2/d_model, which reaches both factors.
    loose = _measured(draw, (d_model, d_ff), 600)
    predicted = _predicted(_gated(name, d_model, d_ff), _gaussian(d_model))
    _agree(predicted, loose, {"": 2.5 / d_model, "fourth": 0.15, "spread": 0.1})
    assert predicted["spread"] > 1.3 * _predicted(_gated(name, d_model, d_ff), signal)["spread"]


def test_gated_unit_resolved_by_token_equals_tokens_alike() -> None:
    leaf, signal = _gated("silu", 32, 48), _gaussian(32)
    alike, back = leaf.forward(signal)
    resolved, resolved_back = leaf.forward(_resolved(signal))
    for one, two in (
        (alike.kernel, resolved.kernel),
        (alike.fluctuation.norms, resolved.fluctuation.norms),
        (
            back(_gradient()).gradient.kernel,
            resolved_back(
                Gradient(
                    Kernel.of_matrix(
                        GRAD * (GRAD_CORRELATION + (1 - GRAD_CORRELATION) * np.eye(TOKENS))
                    ),
                    TOKENS,
                )
            ).gradient.kernel,
        ),
    ):
        assert one is not None
        assert two is not None
        assert two.mean_diagonal() == pytest.approx(one.diagonal, rel=1e-10)
        assert two.mean_off_diagonal() == pytest.approx(one.off_diagonal, rel=1e-10)


def test_a_gate_outside_its_laws_leaves_a_note() -> None:
    leaf = GatedLinear("ffn.activation", activation_laws("silu"), 64, 64, 1.0, 0.01)
    output, _ = leaf.forward(_gaussian(64))
    assert "gate's variance" in output.notes[0]
    assert not _gated("silu", 64, 64).forward(_gaussian(64))[0].notes


# --- normalisation --------------------------------------------------------------------------------


def _normalise(
    x: np.ndarray, g: np.ndarray, epsilon: float, *, centres: bool, groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Normalised tokens, and the gradient at the input of that at the output."""
    shape = (*x.shape[:-1], groups, -1)
    parts, sent = x.reshape(shape), g.reshape(shape)
    if centres:
        parts = parts - parts.mean(-1, keepdims=True)
        sent = sent - sent.mean(-1, keepdims=True)
    scale = np.sqrt((parts**2).mean(-1, keepdims=True) + epsilon)
    y = parts / scale
    sent = (sent - y * (sent * y).mean(-1, keepdims=True)) / scale
    return y.reshape(x.shape), sent.reshape(x.shape)


@pytest.mark.parametrize("centres", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
def test_normalisation(centres: bool, groups: int) -> None:
    width, gain = 128, 0.6
    leaf = FiniteNormalization(
        LAYERNORM if centres else RMSNORM,
        "ffn.norm",
        1e-3,
        centres=centres,
        gain=gain,
        affine=True,
        bias=True,
        groups=groups,
    )

    def draw(rng: np.random.Generator, x: np.ndarray, g: np.ndarray) -> Any:
        y, sent = _normalise(x, gain * g, 1e-3, centres=centres, groups=groups)
        return gain * y, sent, {"ffn.norm.gain": (g * y).sum(0), "ffn.norm.bias": g.sum(0)}

    predicted = _predicted(leaf, _gaussian(width))
    measured = _measured(draw, (width, width), 4000)
    assert predicted.pop("spread") == 0.0
    measured.pop("spread")
    # The laws' own notes: r (1 - r^2)/(2 d) forward; second order in the norm backward.
    inner = width / groups
    forward = (1 - CORRELATION**2) / (2 * inner)
    second = 2 * (2 / inner) ** 2
    left_out = {"": second, "covariance": 1.5 * forward, "ffn.norm.gain": forward}
    _agree(predicted, measured, left_out)


def test_what_a_gradient_has_lost_it_does_not_lose_again() -> None:
    """Orthogonal and centred gradients: real ones, whose moments are then rescaled exactly."""
    width, rng = 64, np.random.default_rng(4)
    x = rng.normal(size=(4000, width))
    g = rng.normal(size=x.shape)
    plain = FiniteNormalization(RMSNORM, "norm", centres=False)
    _, once = _normalise(x, g, 0.0, centres=False, groups=1)
    _, twice = _normalise(x, once, 0.0, centres=False, groups=1)
    measured = Estimate.of((twice**2).mean(-1) / (once**2).mean())
    kernel = Kernel(1.0, 0.0)
    varies = Fluctuation.of_gaussian(kernel, width)
    signal = Signal(kernel, 2, width=float(width), fluctuation=varies)
    _, back = plain.forward(signal)
    kept = back(Gradient(Kernel(1.0, 0.0), 2, radial=0.0)).gradient
    lost = back(Gradient(Kernel(1.0, 0.0), 2)).gradient
    assert kept.orthogonal
    assert lost.kernel.diagonal == pytest.approx((1 - 1 / width) * kept.kernel.diagonal)
    # E 1/|x|^4 over (E 1/|x|^2): the two divisions are by the same norm
    again = (1 + 2 * 2 / width) / (1 + 2 / width) * kept.kernel.diagonal
    assert again == pytest.approx(measured.mean, rel=5e-3)
    centring = FiniteNormalization(LAYERNORM, "norm")
    _, back = centring.forward(signal)
    half = back(Gradient(Kernel(1.0, 0.0), 2, centred_share=0.5)).gradient.kernel.diagonal
    none = back(Gradient(Kernel(1.0, 0.0), 2)).gradient.kernel.diagonal
    assert half / none == pytest.approx((1 - 1.5 / width) / (1 - 2 / width))


def test_dynamic_tanh() -> None:
    width, alpha, gain = 64, 0.7, 1.4
    leaf = DynamicTanh("ffn.norm", alpha, gain, affine=True)

    def draw(rng: np.random.Generator, x: np.ndarray, g: np.ndarray) -> Any:
        y = np.tanh(alpha * x)
        sent = g * gain * alpha * (1 - y**2)
        return gain * y, sent, {"ffn.norm.gain": (g * y).sum(0), "ffn.norm.bias": g.sum(0)}

    _agree(_predicted(leaf, _gaussian(width)), _measured(draw, (width, width), 4000), {})
    output, back = leaf.forward(_gaussian(width))
    assert not output.notes
    assert not back(_gradient()).gradient.orthogonal
    assert "alpha x" in DynamicTanh("norm", 4.0).forward(_gaussian(width))[0].notes[0]


# --- activations by name --------------------------------------------------------------------------


def test_names_of_activations() -> None:
    assert set(ACTIVATION_LAWS) <= set(activation_names())
    for name in activation_names():
        assert moments.component(name) is activation_laws(name)
    with pytest.raises(DomainError, match=r"activation = 'swish'.*silu.*register_activation"):
        activation_laws("swish")


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(activations).failed == 0


def test_leaky_relu_at_any_slope() -> None:
    assert activation_laws("leaky_relu(0.01)").law("mean")(x_variance=2.0) == activation_laws(
        "leaky_relu"
    ).law("mean")(x_variance=2.0)
    for slope, like in (("0", "relu"), ("1", "identity")):
        for quantity in ("mean", "variance", "covariance", "grad_covariance", "kurtosis"):
            values = {"x_variance": 2.0, "x_correlation": 0.3, "grad_covariance": 1.0}
            law = activation_laws(f"leaky_relu({slope})").law(quantity)
            assert law(**values) == pytest.approx(moments.component(like).law(quantity)(**values))
    # E f^2 = v (1 + a^2)/2, whatever the mean
    laws = activation_laws("leaky_relu(-0.25)")
    square = laws.law("variance")(x_variance=3.0) + laws.law("mean")(x_variance=3.0) ** 2
    assert square == pytest.approx(3.0 * (1 + 0.25**2) / 2)
    for bad in ("leaky_relu()", "leaky_relu(x)", "leaky_relu(__import__('os'))", "leaky_relu(nan)"):
        with pytest.raises(DomainError):
            activation_laws(bad)


@pytest.mark.parametrize("name", ["tanh", "quick_gelu", "mish", "silu", "sigmoid", "softplus"])
def test_quadrature_holds_to_the_end_of_its_domain(name: str) -> None:
    """1e-8 in the slope and 1e-9 in the moment at the largest variance, .9999 included."""
    laws = moments.component(name).under("refined")
    largest = laws["variance"].domain["x_variance"].upper
    for v in (1e-4, largest):
        for r in (0.5, 0.99, 0.9999):
            point = {"x_variance": v, "x_correlation": r, "grad_covariance": 1.0}
            second = laws["covariance"](**point) + laws["mean"](x_variance=v) ** 2
            assert second == pytest.approx(gridded_pair(name, v, v, r), rel=1e-9)
            slope = gridded_pair(name, v, v, r, slope=True)
            assert laws["grad_covariance"](**point) == pytest.approx(slope, rel=1e-8)


# --- activations of one's own ---------------------------------------------------------------------


def test_registered_activations_have_the_laws_of_their_function() -> None:
    relu = (lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, 1.0, 0.0))
    kinked = register_activation("my_relu", *relu)
    smooth = register_activation("my_tanh", np.tanh, lambda x: 1 - np.tanh(x) ** 2)
    assert moments.component("my_relu") is kinked
    assert {"my_relu", "my_tanh"} <= set(moments.components())
    assert registered_function("my_relu") == relu
    assert registered_function("relu") is None
    for laws, like, error, slope_error in (
        (kinked, "relu", 1e-5, 6e-3),
        (smooth, "tanh", 1e-9, 1e-8),
    ):
        for v, w, r in ((1.0, 1.0, 0.3), (0.2, 3.0, -0.8), (2.0, 2.0, 0.999), (4.0, 4.0, 1.0)):
            point = {"x_variance": v, "x_other_variance": w, "x_correlation": r}
            point |= {"grad_variance": 1.0, "grad_covariance": 1.0}
            for quantity, law in moments.component(like).under("refined").items():
                allowed = error if quantity != "grad_covariance" else slope_error
                point["x_hidden_correlation"] = r
                expected = pytest.approx(law(**point), rel=allowed, abs=allowed * 1e-3)
                assert laws.law(quantity)(**point) == expected, (quantity, point)
    assert "my_relu" in str(kinked.law("mean").expr)
    mean = kinked.law("mean").evaluate(digits=15, x_variance=1)
    assert float(mean) == pytest.approx(0.3989422804)
    # The same again is no error; another function under the name is.
    assert register_activation("my_relu", *relu) is kinked
    with pytest.raises(DomainError, match="name that is free"):
        register_activation("my_relu", np.sin, np.cos)


@pytest.mark.parametrize(
    ("name", "function", "derivative", "match"),
    [
        ("relu", np.tanh, lambda x: 1 - np.tanh(x) ** 2, "name that is free"),
        ("My Function", np.sin, np.cos, "lower-case"),
        ("cosine", np.sin, np.sin, "derivative of 'cosine' at x"),
        ("logarithm", np.log, lambda x: 1 / x, "not finite at x"),
        ("summed", lambda x: x.sum(), np.cos, "entry by entry"),
        ("complex", lambda x: x * 1j, np.cos, "real numbers"),
        ("flat", np.ones_like, np.zeros_like, "constant"),
        ("steep", lambda x: np.exp(8 * x), lambda x: 8 * np.exp(8 * x), "converge"),
        ("text", "np.sin(x)", np.cos, "a function of a numpy array"),
    ],
)
def test_what_is_no_activation_is_refused(
    name: str, function: Any, derivative: Any, match: str
) -> None:
    with pytest.raises(DomainError, match=match):
        register_activation(name, function, derivative)
    assert name in ACTIVATION_LAWS or name not in activation_names()


def test_registering_from_several_threads_gives_one_answer() -> None:
    found = []

    def register() -> None:
        found.append(register_activation("threaded_sine", np.sin, np.cos))

    threads = [threading.Thread(target=register) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({id(laws) for laws in found}) == 1


@pytest.mark.parametrize(("freedom", "correlation"), [(3, 0.5), (7, 0.8), (3, 0.95)])
def test_expected_cosine_of_gaussian_vectors(freedom: int, correlation: float) -> None:
    rng = np.random.default_rng(5)
    x, other = rng.normal(size=(2, 200_000, freedom))
    y = correlation * x + np.sqrt(1 - correlation**2) * other
    cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    error = cosines.std() / correlation / np.sqrt(len(x))
    assert abs(cosines.mean() / correlation - expected_cosine(freedom, correlation)) < 4 * error


@pytest.mark.parametrize(("freedom", "correlation"), [(3, 0.0), (3, 0.85), (7, 0.5), (7, 0.97)])
def test_inverse_norms_of_short_vectors(freedom: int, correlation: float) -> None:
    rng = np.random.default_rng(7)
    x, other = rng.normal(size=(2, 200_000, freedom))
    y = correlation * x + np.sqrt(1 - correlation**2) * other
    first, second = np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1)
    cosine = (x * y).sum(1) / (first * second)
    pulled = (freedom - 2 + cosine**2) / (first * second)
    error = pulled.std() / np.sqrt(len(x))
    assert abs(pulled.mean() - expected_pull(freedom, correlation)) < 4 * error
    whole = expected_pull(freedom, np.array([1.0, 1.0 - 1e-13]))
    np.testing.assert_allclose(whole, (freedom - 1) / (freedom - 2), rtol=1e-5)


@pytest.mark.parametrize("centres", [True, False])
def test_gradient_behind_small_groups(centres: bool) -> None:
    """Groups of eight features: 1/|x|^2 is far from its expansion."""
    rng = np.random.default_rng(6)
    size, count, draws = 8, 40, 4000
    x, g = rng.normal(size=(2, draws, count, size))
    x = 1.5 * x
    inner = x - x.mean(-1, keepdims=True) if centres else x
    norm = np.sqrt((inner**2).mean(-1, keepdims=True))
    unit = inner / norm
    sent = g - unit * (unit * g).mean(-1, keepdims=True)
    sent = (sent - g.mean(-1, keepdims=True) if centres else sent) / norm
    measured, error = (sent**2).mean(), (sent**2).mean((1, 2)).std() / np.sqrt(draws)
    leaf = FiniteNormalization(
        LAYERNORM if centres else RMSNORM, "norm", centres=centres, groups=count
    )
    signal = gaussian(Kernel(2.25, 0.5), 4, size * count, True)
    back = leaf.forward(signal)[1]
    predicted = back(Gradient(Kernel(1.0, 0.0), 4)).gradient.kernel.diagonal
    assert abs(predicted - measured) < 4 * error


@pytest.mark.parametrize("resolved", [False, True])
def test_norms_behind_dropout(resolved: bool) -> None:
    """E x^4 m/q^4 - (E x^2 m/q^2)^2 = (2 + p) v^2/q^3 of Gaussian features; masks are each token's,
    so that two tokens' norms covary as without it, over q^2."""
    width, drop_prob, variance, common = 40, 0.4, 1.7, 0.6
    kept = 1 - drop_prob
    kernel = Kernel(variance, common)
    if resolved:
        kernel = Kernel.of_matrix(common + (variance - common) * np.eye(3))
    leaf = Dropout(DROPOUT, "refined", "drop", {"drop_prob": drop_prob})
    varies = leaf.forward(gaussian(kernel, 3, width, True))[0].fluctuation
    assert varies is not None
    alone = (2 + drop_prob) * variance**2 / kept**3 / width
    assert varies.norms.mean_diagonal() == pytest.approx(alone, rel=1e-12)
    assert varies.norms.mean_off_diagonal() == pytest.approx(
        2 * common**2 / width / kept**2, rel=1e-12
    )


def test_a_function_known_by_its_values_is_registered_when_it_is_asked_for() -> None:
    """xIELU against Gauss-Legendre's rule on either side of its bend."""
    laws = moments.component("xielu")
    nodes, weights = np.polynomial.legendre.leggauss(200)
    mean = square = 0.0
    for low, high in ((-9.0, 0.0), (0.0, 9.0)):
        x = 0.5 * (high - low) * (nodes + 1.0) + low
        share = 0.5 * (high - low) * weights * np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)
        bent = 0.8 * (np.expm1(x) - x) if high == 0.0 else 0.8 * x * x
        mean += share @ (bent + 0.5 * x)
        square += share @ (bent + 0.5 * x) ** 2
    assert float(laws.law("mean")(x_variance=1.0)) == pytest.approx(mean, rel=1e-9)
    assert float(laws.law("variance")(x_variance=1.0)) == pytest.approx(square - mean**2, rel=1e-9)
    given, shared = {"x_variance": 1.0, "x_correlation": 0.6}, 0.0
    for low, high in ((-9.0, 0.0), (0.0, 9.0)):  # E f f' of two, by Mehler's kernel
        for other, upper in ((-9.0, 0.0), (0.0, 9.0)):
            x = 0.5 * (high - low) * (nodes + 1.0) + low
            y = 0.5 * (upper - other) * (nodes + 1.0) + other
            both = x[:, None] ** 2 - 1.2 * x[:, None] * y[None] + y[None] ** 2
            density = np.exp(-both / (2 * 0.64)) / (2 * np.pi * 0.8)
            ends = [
                0.5 * t + (0.8 * (np.expm1(t) - t) if end == 0.0 else 0.8 * t * t)
                for t, end in ((x, high), (y, upper))
            ]
            area = 0.25 * (high - low) * (upper - other)
            shared += area * (weights * ends[0]) @ density @ (weights * ends[1])
    assert float(laws.law("covariance")(**given)) == pytest.approx(shared - mean**2, rel=1e-6)


@pytest.mark.parametrize("freedom", [96, 128, 256, 512])
def test_short_vectors_of_large_heads_have_no_singularity(freedom: int) -> None:
    """Next to parallel, against mpmath: scipy's 2F1 gives NaN there from 256 entries on."""
    n, half = mpmath.mpf(freedom), mpmath.mpf(1) / 2
    correlations = np.array([0.0, 0.5, 0.99, 1 - 1e-9])
    for at, pull, cosine in zip(
        correlations,
        expected_pull(freedom, correlations),
        expected_cosine(freedom, correlations),
        strict=True,
    ):
        square = mpmath.mpf(at) ** 2
        both = mpmath.hyp2f1(half, half, n / 2, square)
        apart = (1 - square) * mpmath.hyp2f1(3 * half, 3 * half, n / 2 + 1, square)
        ratio = (mpmath.gamma((n - 1) / 2) / mpmath.gamma(n / 2)) ** 2
        assert pull == pytest.approx(float(ratio / 2 * (n - 1) * (both - apart / n)), rel=1e-11)
        ratio = (mpmath.gamma((n + 1) / 2) / mpmath.gamma(n / 2)) ** 2
        whole = 2 / n * ratio * mpmath.hyp2f1(half, half, n / 2 + 1, square)
        assert cosine == pytest.approx(float(whole), rel=1e-11)
