"""How realised overlaps vary, and what normalisation and gated units gain by it. About 4 s.

The Monte Carlo draws networks in numpy and shares no code with the package.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

from moments.engine.classes import ClassRows, PositionClasses
from moments.engine.composition import Chain, Layer, Parallel, Residual, forward
from moments.engine.fluctuation import of_averages, overlap_variance, rows_times
from moments.engine.state import Fluctuation, Gradient, Kernel, Signal
from moments.engine.trace import Record
from moments.formulas.activation import activation_laws
from moments.formulas.linear import LINEAR, SCALE
from moments.formulas.normalization import RMSNORM
from moments.layers.attention.self_attention import SelfAttention
from moments.layers.elementary import Activation, Linear, Scale
from moments.layers.gated import GatedLinear
from moments.layers.normalization import FiniteNormalization
from moments.prediction.stack import exchangeable_kernel, gaussian

TOKENS, WIDTH, HIDDEN, DRAWS = 24, 48, 96, 2500
SITES = ("heads", "sum", "norm", "gated")


def normalised(x: np.ndarray) -> np.ndarray:
    size: np.ndarray = np.sqrt((x * x).mean(-1, keepdims=True))
    return np.asarray(x / size)


@functools.cache
def drawn(causal: bool) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """At every site, overlaps' mean and variance, and the mean's standard error, (L, L)."""
    random = np.random.default_rng(7)
    weights = np.tri(TOKENS) if causal else np.ones((TOKENS, TOKENS))
    weights = weights / weights.sum(1, keepdims=True)
    sums = {site: np.zeros((2, TOKENS, TOKENS)) for site in SITES}
    for _ in range(DRAWS):

        def matrix(fan_in: int, fan_out: int, gain: float) -> np.ndarray:
            return random.normal(scale=math.sqrt(gain / fan_in), size=(fan_in, fan_out))

        x = math.sqrt(0.9) * random.normal(size=(TOKENS, WIDTH))
        x += math.sqrt(0.1) * random.normal(size=WIDTH)
        heads = weights @ normalised(x) @ matrix(WIDTH, WIDTH, 4.0)
        total = x + heads @ matrix(WIDTH, WIDTH, 1.0)
        norm = normalised(total)
        gate, factor = (norm @ matrix(WIDTH, HIDDEN, 1.0) for _ in range(2))
        gated = gate / (1 + np.exp(-gate)) * factor
        for site, y in zip(SITES, (heads, total, norm, gated), strict=True):
            overlap = y @ y.T / y.shape[1]
            sums[site] += np.stack([overlap, overlap * overlap])
    found = {}
    for site, (first, second) in sums.items():
        mean = first / DRAWS
        variance = second / DRAWS - mean * mean
        found[site] = mean, variance, np.sqrt(variance / DRAWS)
    return found


@functools.cache
def predicted(causal: bool) -> tuple[dict[str, Signal], Record]:
    norm = FiniteNormalization(RMSNORM, "norm", centres=False)
    heads = SelfAttention(
        "heads", WIDTH, 1, WIDTH, 0.0, 0.0, 4 / WIDTH, 0.0, causal=causal, kv_heads=1
    )
    projection = Linear(
        LINEAR,
        "refined",
        "projection",
        {"fan_in": WIDTH, "fan_out": WIDTH, "weight_variance": 1 / WIDTH},
        WIDTH,
    )
    gated = GatedLinear("gated", activation_laws("silu"), WIDTH, HIDDEN, 1 / WIDTH, 1 / WIDTH)
    parts = Residual(Chain((norm, heads, projection))), norm, gated
    signal = gaussian(exchangeable_kernel(1.0, 0.1, TOKENS, causal), TOKENS, WIDTH, True)
    _, record = forward(Chain((Layer(Chain(parts), 1),)), signal)
    done = record.backward(Gradient(Kernel(1.0, 0.0), TOKENS) if not causal else _white())
    return {one.point.site: one.output for one in done.sites()}, done


def _white() -> Gradient:
    return Gradient(Kernel.of_matrix(np.eye(TOKENS)), TOKENS)


def off(matrix: np.ndarray) -> float:
    return float(matrix[~np.eye(TOKENS, dtype=bool)].mean())


def pairs_of(value: object) -> float:
    return off(value) if isinstance(value, np.ndarray) else float(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("site", ["heads", "sum"])
def test_spread_of_squared_norms(site: str, causal: bool) -> None:
    """Averages of tokens of fixed norm have norms that vary, beyond the values' 2/width."""
    mean, variance, _ = drawn(causal)[site]
    signal = predicted(causal)[0][site]
    assert signal.fluctuation is not None
    seen = float(np.mean(np.diag(variance) / np.diag(mean) ** 2))
    found = float(np.mean(signal.fluctuation.norms.diagonal / signal.kernel.diagonal**2))
    assert found == pytest.approx(seen, rel=0.06)
    if site == "heads":
        assert seen > 1.15 * 2 / WIDTH


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("site", ["sum", "norm"])
def test_variance_of_overlaps(site: str, causal: bool) -> None:
    _, variance, _ = drawn(causal)[site]
    found = overlap_variance(predicted(causal)[0][site])
    assert pairs_of(found) == pytest.approx(off(variance), rel=0.12)


@pytest.mark.parametrize("causal", [False, True])
def test_correlation_behind_a_normalisation(causal: bool) -> None:
    """The common part of all tokens varies in size: correlations fall by r^2 (1 - r) of that."""
    mean, _, error = drawn(causal)["norm"]
    signals = predicted(causal)[0]
    loss = pairs_of(signals["sum"].correlation()) - off(mean)
    left = pairs_of(signals["norm"].kernel.off_diagonal) - off(mean)
    assert loss > 6 * off(error) / math.sqrt(TOKENS)
    assert abs(left) < 0.2 * loss + off(error)


@pytest.mark.parametrize("causal", [False, True])
def test_gated_units_see_realised_overlaps(causal: bool) -> None:
    mean, _, error = drawn(causal)["gated"]
    signal = predicted(causal)[0]["gated"]
    assert pairs_of(signal.kernel.off_diagonal) == pytest.approx(
        off(mean), rel=0.02, abs=off(error)
    )
    entering = predicted(causal)[0]["norm"]
    assert entering.fluctuation is not None
    entering = entering.replace(fluctuation=Fluctuation(entering.fluctuation.norms))
    gated = GatedLinear("gated", activation_laws("silu"), WIDTH, HIDDEN, 1 / WIDTH, 1 / WIDTH)
    without, _ = gated.forward(entering)
    assert pairs_of(without.kernel.off_diagonal) < 0.985 * off(mean)


@pytest.mark.parametrize("causal", [False, True])
def test_parallel_branches_follow_one_stream(causal: bool) -> None:
    """Attention and units that read one tensor move with its overlaps together."""
    random, draws = np.random.default_rng(11), 600
    weights = np.tri(TOKENS) if causal else np.ones((TOKENS, TOKENS))
    weights = weights / weights.sum(1, keepdims=True)

    def mapped(x: np.ndarray, fan_out: int, gain: float) -> np.ndarray:
        fan_in = x.shape[-1]
        return x @ random.normal(scale=math.sqrt(gain / fan_in), size=(draws, fan_in, fan_out))

    x = math.sqrt(0.9) * random.normal(size=(draws, TOKENS, WIDTH))
    x += math.sqrt(0.1) * random.normal(size=(draws, 1, WIDTH))
    for _ in range(2):
        heads = mapped(weights @ mapped(normalised(x), WIDTH, 1.0), WIDTH, 1.0)
        hidden = np.maximum(mapped(normalised(x), HIDDEN, 1.0), 0.0)
        x = x + heads + mapped(hidden, WIDTH, 4.0)
    seen = (x @ np.swapaxes(x, 1, 2) / WIDTH).var(0)

    def linear(fan_in: int, fan_out: int, gain: float, label: str) -> Linear:
        sizes = {"fan_in": fan_in, "fan_out": fan_out, "weight_variance": gain / fan_in}
        return Linear(LINEAR, "refined", label, sizes, fan_out)

    norm = FiniteNormalization(RMSNORM, "norm", centres=False)
    attended = SelfAttention(
        "heads", WIDTH, 1, WIDTH, 0.0, 0.0, 1 / WIDTH, 0.0, causal=causal, kv_heads=1
    )
    unit = Activation(activation_laws("relu"), "refined", "unit")
    branches = (
        Chain((norm, attended, linear(WIDTH, WIDTH, 1.0, "projection"))),
        Chain((norm, linear(WIDTH, HIDDEN, 1.0, "in"), unit, linear(HIDDEN, WIDTH, 4.0, "out"))),
    )
    signal = gaussian(exchangeable_kernel(1.0, 0.1, TOKENS, causal), TOKENS, WIDTH, True)
    both = Residual(Parallel(branches))
    last, _ = forward(Chain((Layer(both, 1), Layer(both, 2))), signal)
    assert pairs_of(overlap_variance(last)) == pytest.approx(off(seen), rel=0.1)


def test_a_scale_in_front_of_attention_scales_the_values_overlaps() -> None:
    """As LayerNorm Scaling has it: what varied before the norm still does behind the factor."""
    factor = 0.3
    attend = SelfAttention("heads", WIDTH, 1, WIDTH, 1e-9 / WIDTH, 1e-9 / WIDTH, 4.0 / WIDTH, 0.0)
    norm = FiniteNormalization(RMSNORM, "norm", centres=False)
    reduced = Scale(SCALE, "refined", "scale", {"weight_variance": factor})
    signal = gaussian(Kernel(1.0, 0.1), TOKENS, WIDTH, True)
    plain, _ = forward(Chain((norm, attend)), signal)
    scaled, _ = forward(Chain((norm, reduced, attend)), signal)
    assert plain.fluctuation is not None
    assert scaled.fluctuation is not None
    found, whole = scaled.fluctuation.norms.diagonal, plain.fluctuation.norms.diagonal
    assert found == pytest.approx(factor**2 * whole, rel=1e-6)


@pytest.mark.parametrize("apart", [1e-3, 1e-6, 1e-13])
def test_overlaps_of_tokens_that_are_nearly_one_stay_inside_a_gate(apart: float) -> None:
    """No further than parallel: rounding beyond it is no number under a ReLU."""
    size = np.random.default_rng(0).uniform(0.5, 2.0, 60)
    kernel = np.sqrt(np.outer(size, size)) * (1 - apart * (1 - np.eye(60)))
    signal = gaussian(Kernel.of_matrix(kernel), 60, WIDTH, True)
    gated = GatedLinear("gated", activation_laws("relu"), WIDTH, HIDDEN, 1.3 / WIDTH, 1 / WIDTH)
    assert np.isfinite(gated.forward(signal)[0].kernel.off_diagonal).all()


@pytest.mark.parametrize("fixed", [False, True])
def test_averages_on_classes_are_those_of_tokens(fixed: bool) -> None:
    """Where every position is a class, rows of attention are matrices over tokens.

    What a row's average shares with a key (W K) is not what a key shares with it (K W).
    """
    length, rng = 6, np.random.default_rng(0)
    classes = PositionClasses.for_length(length, length)
    assert len(classes.nodes) == length
    features = rng.normal(size=(length, 9))
    matrix = features @ features.T
    size = np.sqrt(np.diag(matrix))
    kernel = matrix / np.outer(size, size) if fixed else matrix / 9
    rows = np.tril(rng.random((length, length)))
    rows /= rows.sum(1, keepdims=True)
    on_classes = ClassRows(rows, classes.key_counts(None))
    met = rows_times(on_classes, Kernel(np.diag(kernel), kernel, classes))
    assert met.off_diagonal == pytest.approx(rows @ kernel, abs=1e-12)

    def averaged(resolved: object, weights: object) -> Fluctuation:
        tokens = Kernel(np.diag(kernel).copy(), kernel.copy(), resolved)
        square = (tokens * tokens).scaled(0.1)
        norms = square.scaled(0.0) if fixed else square
        varies = Fluctuation(norms, square, square if fixed else None)
        found = of_averages(Signal(tokens, length, width=20, fluctuation=varies), weights, 1.3)
        assert found is not None
        return found

    one, other = averaged(True, rows), averaged(classes, on_classes)
    assert one.shared is not None
    assert other.shared is not None
    for by_token, by_class in zip(
        (one.norms, *one.shared), (other.norms, *other.shared), strict=True
    ):
        assert by_class.off_diagonal == pytest.approx(by_token.off_diagonal, abs=1e-12)


def test_a_gradient_that_falls_with_norms_meets_shorter_tokens() -> None:
    """A matrix before a norm sums g x^T, and the gradient g falls with the norms of W x and of x:
    against draws of narrow tokens, 7 % less than if it did not."""
    width, draws, rng = 24, 8_000, np.random.default_rng(1)
    tokens = gaussian(exchangeable_kernel(1.0, 0.3, 2, True), 2, width, True)
    parameters = {"fan_in": width, "fan_out": width, "weight_variance": 1 / width}
    linear = Linear(LINEAR, "refined", "linear", parameters, width, "matrix")
    norm = FiniteNormalization(RMSNORM, "norm", centres=False)
    _, record = forward(Chain((linear, norm)), tokens)
    first = record.backward(Gradient(exchangeable_kernel(1.0, 0.0, 2, True), 2)).children[0]
    found = float(np.sum(first.weights()["matrix"]))
    root = np.linalg.cholesky(tokens.kernel.off_diagonal)
    x = root @ rng.normal(size=(draws, 2, width))
    y = x @ rng.normal(size=(draws, width, width)) / width**0.5
    size = np.sqrt((y * y).mean(-1, keepdims=True))
    sent = rng.normal(size=y.shape)
    sent = (sent - y * (y * sent).mean(-1, keepdims=True) / size**2) / size
    each = (np.swapaxes(sent, 1, 2) @ x) ** 2
    each = each.sum((1, 2))
    error = each.std() / draws**0.5
    assert found == pytest.approx(each.mean(), abs=3 * error + 0.02 * found)
    loose = first.grad_out.kernel * tokens.kernel
    assert width**2 * loose.total(2) > each.mean() + 5 * error + 0.03 * found


def test_what_other_tokens_send_falls_with_their_norms() -> None:
    """Averages send a token what others receive, which does not fall with its own norm: the
    elasticity of a gradient in the token's square, against draws of tokens of few features."""
    few, width, length, blocks, draws = 12, 96, 24, 2, 400

    def linear(fan_in: int, label: str) -> Linear:
        sizes = {"fan_in": fan_in, "fan_out": width, "weight_variance": 1.0 / fan_in}
        return Linear(LINEAR, "refined", label, sizes, width, label)

    norm = FiniteNormalization(RMSNORM, "norm", centres=False)
    averages = SelfAttention("heads", width, 1, width, 0.0, 0.0, 2 / width, 0.0, kv_heads=1)
    branch = Residual(Chain((norm, averages, linear(width, "projection"))))
    tokens = gaussian(exchangeable_kernel(1.0, 0.0, length, False), length, few, True)
    _, record = forward(Chain((linear(few, "matrix"), *(branch,) * blocks, norm)), tokens)
    first = record.backward(Gradient(Kernel(1.0, 0.0), length)).children[0]

    random = np.random.default_rng(3)

    def drawn(fan_in: int, square: float = 1.0) -> np.ndarray:
        return random.normal(scale=math.sqrt(square / fan_in), size=(draws, fan_in, width))

    def averaged(x: np.ndarray) -> np.ndarray:
        return np.asarray(x.mean(1, keepdims=True))

    def back(x: np.ndarray, sent: np.ndarray) -> np.ndarray:
        size, unit = np.sqrt((x * x).mean(-1, keepdims=True)), normalised(x)
        return np.asarray((sent - unit * (unit * sent).mean(-1, keepdims=True)) / size)

    streams = [random.normal(size=(draws, length, few)) @ drawn(few)]
    maps = [drawn(width, 2.0) @ drawn(width) for _ in range(blocks)]
    for one in maps:
        streams.append(streams[-1] + averaged(normalised(streams[-1])) @ one)
    sent = back(streams[-1], random.normal(size=streams[0].shape))
    for one, x in zip(reversed(maps), reversed(streams[:-1]), strict=True):
        sent = sent + back(x, averaged(sent) @ np.swapaxes(one, 1, 2))
    size, falls = (np.log((one * one).mean(-1)) for one in (streams[0], sent))
    size, falls = size - size.mean(0), falls - falls.mean(0)
    elasticity = -float((size * falls).sum() / (size * size).sum())
    assert float(first.grad_out.norm_response) == pytest.approx(elasticity, abs=0.05)
