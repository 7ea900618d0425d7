"""Attention on a token kernel against Monte Carlo of one layer, exact rows, its own symmetries."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import mpmath as mp
import numpy as np
import pytest
from exact_softmax import pair_statistics
from numpy.typing import NDArray

from moments.engine.state import Kernel
from moments.errors import DomainError
from moments.layers.attention.kernels import KernelAttention, Rotation
from moments.layers.attention.kernels.attention import rotation_factor
from moments.layers.attention.kernels.row_statistics import matched, saturation
from moments.layers.attention.layers import AlikeLayer
from moments.layers.attention.response import AttentionResponse
from moments.layers.attention.self_attention import SelfAttention
from moments.layers.attention.softmax import SquareTable

Array = NDArray[np.float64]


def _benchmark() -> ModuleType:
    """The Monte Carlo of the validation script, which shares no code with the package."""
    path = Path(__file__).parents[1] / "benchmarks" / "kernel_attention_validation.py"
    spec = importlib.util.spec_from_file_location("kernel_attention_validation", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


montecarlo = _benchmark()


def exchangeable(length: int, correlation: float) -> Array:
    return correlation + (1.0 - correlation) * np.eye(length)


def masks(length: int) -> dict[str, NDArray[np.bool_] | None]:
    causal = np.tri(length, dtype=bool)
    padded = causal.copy()
    padded[:, 2] = False
    padded[2, 2] = True
    return {
        "full": None,
        "causal": causal,
        "window": causal & ~np.tri(length, k=-6, dtype=bool),
        "padded": padded,
        "two sequences": np.kron(np.eye(2, dtype=bool), np.ones((length // 2,) * 2, dtype=bool)),
    }


def structured(length: int, seed: int = 0) -> Array:
    """Repeated and related tokens, with negative correlations and a diagonal near 1."""
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((length, 8))
    features[::3] = features[0]
    features /= np.linalg.norm(features, axis=1)[:, None]
    norms = np.sqrt(1.0 + 0.02 * generator.standard_normal(length))
    return np.asarray(norms[:, None] * norms * (0.6 * features @ features.T + 0.4 * np.eye(length)))


def random_gradient(length: int, seed: int = 1) -> Array:
    features = np.random.default_rng(seed).standard_normal((length, 2 * length))
    return np.asarray(features @ features.T / (2 * length))


# --- exchangeable kernels: exact ------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 3, 8, 40])
@pytest.mark.parametrize("theta", [0.2, 1.0, 2.0])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_full_attention_of_exchangeable_tokens_is_exact(
    length: int, theta: float, correlation: float
) -> None:
    """Infinite width: every path in closed form from the exact evaluator's C2 and T."""
    own = pair_statistics(theta, length, 1.0)
    both = pair_statistics(theta, length, correlation)
    kernel, tau = exchangeable(length, correlation), theta / (1.0 - correlation)
    gradient = 0.3 + 0.7 * np.eye(length)
    layer = KernelAttention(kernel, logit_scale=tau)
    output, parts = layer.forward(), layer.backward(gradient)
    rest = 1.0 - correlation
    others = length - 1
    assert output[0, 0] == pytest.approx(correlation + rest * own.overlap, rel=2e-3)
    assert output[0, 1] == pytest.approx(correlation + rest * both.overlap, rel=2e-3)
    value = own.overlap + 0.3 * others * both.overlap
    assert parts.value[0, 0] == pytest.approx(value, rel=2e-3)
    assert parts.query[0, 0] == pytest.approx(theta * rest * own.jacobian_overlap, rel=5e-3)
    expected = 0.3 * theta * rest * both.jacobian_overlap
    assert parts.query[0, 1] == pytest.approx(expected, rel=1e-2)
    key = theta * (own.jacobian_overlap + 0.3 * others * correlation * both.jacobian_overlap)
    key /= 1.0 - correlation
    key *= rest
    assert parts.key[0, 0] == pytest.approx(key, rel=1e-2)
    assert parts.key[0, 1] == pytest.approx(-key / others, rel=1e-2)
    np.testing.assert_allclose(layer.logit_variance, theta, rtol=1e-6)
    np.testing.assert_allclose(layer.effective_keys, length, rtol=1e-6)


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_causal_rows_of_exchangeable_tokens_are_exact_row_by_row(correlation: float) -> None:
    """The classes of rows may not blur anything: each row has its own number of keys."""
    length, theta = 40, 2.0
    layer = KernelAttention(
        exchangeable(length, correlation),
        logit_scale=theta / (1.0 - correlation),
        allowed=np.tri(length, dtype=bool),
    )
    row = SquareTable.load().single(theta, np.arange(1.0, length + 1.0))
    rest = 1.0 - correlation
    output = np.diag(layer.forward())
    np.testing.assert_allclose(output, correlation + rest * row.sum_square, rtol=2e-3)
    np.testing.assert_allclose(layer.sum_square, row.sum_square, rtol=5e-3)
    np.testing.assert_allclose(layer.entropy, row.entropy, rtol=1e-6, atol=1e-9)
    query = np.diag(layer.backward(np.eye(length)).query)
    np.testing.assert_allclose(query, theta * rest * row.jacobian_square, rtol=1e-2, atol=1e-12)


def test_faint_rows_of_exchangeable_tokens_are_exact_row_by_row() -> None:
    length, theta, correlation = 40, 0.08, 0.6
    layer = KernelAttention(
        exchangeable(length, correlation),
        logit_scale=theta / (1.0 - correlation),
        allowed=np.tri(length, dtype=bool),
    )
    keys, rest = np.arange(1.0, length + 1.0), 1.0 - correlation
    row = SquareTable.load().single(theta, keys)
    output = np.diag(layer.forward())
    # of what logits add, and not of the mean over keys
    added = output - correlation - rest / keys
    np.testing.assert_allclose(added, rest * (row.sum_square - 1 / keys), rtol=5e-3, atol=1e-7)
    np.testing.assert_allclose(layer.sum_square, row.sum_square, rtol=1e-4)
    query = np.diag(layer.backward(np.eye(length)).query)
    np.testing.assert_allclose(query, theta * rest * row.jacobian_square, rtol=1e-2, atol=1e-12)


@pytest.mark.parametrize("name", ["repeated tokens", "8 clusters at 0.5"])
def test_faint_paths_against_monte_carlo(name: str) -> None:
    """Within half the logits' variance, and four standard errors of the sampling."""
    length, tau, mask = 24, 0.05, masks(24)["causal"]
    kernel, gradient = montecarlo.test_kernels(length)[name], random_gradient(length)
    sample = montecarlo.sample_field(kernel, gradient, tau, mask, draws=500)
    layer = KernelAttention(kernel, logit_scale=tau, allowed=mask)
    ours = montecarlo.predicted(layer, gradient)
    for path in ("output", "value", "key", "query", "total"):
        truth = np.trace(sample.mean[path])
        slack = tau / 2 * truth + 4.0 * sample.error[path][0]
        assert abs(np.trace(ours[path]) - truth) < slack, path
    sent = (kernel * layer.backward(gradient).value).sum()
    assert sent == pytest.approx((layer.forward() * gradient).sum(), rel=1e-5)


# --- Monte Carlo, infinite width ------------------------------------------------------------------

# Kernel, mask, tau, and the error allowed in %: of output, value, key, query, total (all traces).
CASES = [
    ("correlation 0.3", "causal", 2.0, (0.3, 0.3, 1.0, 1.0, 0.5)),
    ("correlation 0.9", "causal", 3.0, (0.3, 0.3, 1.0, 1.0, 0.5)),
    ("8 clusters at 0.5", "full", 1.0, (1.0, 0.5, 2.0, 2.0, 1.0)),
    ("8 clusters at 0.9", "causal", 1.0, (1.0, 0.5, 3.0, 3.0, 1.5)),
    ("positions", "full", 1.0, (1.0, 0.5, 3.0, 3.0, 1.5)),
    ("repeated tokens", "causal", 1.0, (2.0, 1.0, 6.0, 6.0, 3.0)),
    ("random, rank L/4", "full", 1.0, (2.0, 1.0, 6.0, 6.0, 3.0)),
    ("positions", "causal", 3.0, (3.0, 2.0, 12.0, 12.0, 6.0)),
]


@pytest.mark.parametrize(("name", "mask", "tau", "allowed_error"), CASES)
def test_paths_against_monte_carlo(
    name: str, mask: str, tau: float, allowed_error: tuple[float, ...]
) -> None:
    """Within the declared error of the closure, and four standard errors of the sampling."""
    length = 24
    kernel = montecarlo.test_kernels(length)[name]
    gradient = 0.2 + 0.8 * np.eye(length)
    sample = montecarlo.sample_field(kernel, gradient, tau, masks(length)[mask], draws=500)
    layer = KernelAttention(kernel, logit_scale=tau, allowed=masks(length)[mask])
    ours = montecarlo.predicted(layer, gradient)
    for path, percent in zip(
        ("output", "value", "key", "query", "total"), allowed_error, strict=True
    ):
        truth = np.trace(sample.mean[path])
        slack = percent / 100.0 * truth + 4.0 * sample.error[path][0]
        assert abs(np.trace(ours[path]) - truth) < slack, path


@pytest.mark.parametrize("mask", ["window", "padded", "two sequences"])
def test_other_masks_against_monte_carlo(mask: str) -> None:
    length, tau = 24, 1.5
    kernel, gradient = exchangeable(length, 0.4), random_gradient(length)
    allowed = masks(length)[mask]
    sample = montecarlo.sample_field(kernel, gradient, tau, allowed, draws=500)
    layer = KernelAttention(kernel, logit_scale=tau, allowed=allowed)
    ours = montecarlo.predicted(layer, gradient)
    for path in ("output", "value", "key", "query"):
        truth = np.trace(sample.mean[path])
        assert abs(np.trace(ours[path]) - truth) < 0.01 * truth + 4 * sample.error[path][0], path
    whole = sample.mean["total"]
    assert np.linalg.norm(ours["total"] - whole) < 0.05 * np.linalg.norm(whole)


def test_dropout_against_monte_carlo() -> None:
    """The dropped part of every path, at p = 1/2, where it is as large as the rest."""
    length, tau = 24, 1.0
    for name, percent in (("correlation 0.3", 2.0), ("8 clusters at 0.5", 6.0)):
        kernel, gradient = montecarlo.test_kernels(length)[name], 0.2 + 0.8 * np.eye(length)
        causal = np.tri(length, dtype=bool)
        wet = montecarlo.sample_field(kernel, gradient, tau, causal, 0.5, draws=500)
        dry = montecarlo.sample_field(kernel, gradient, tau, causal, 0.0, draws=500)
        settings = {"logit_scale": tau, "allowed": causal}
        ours = montecarlo.predicted(KernelAttention(kernel, drop_prob=0.5, **settings), gradient)
        base = montecarlo.predicted(KernelAttention(kernel, **settings), gradient)
        for path in ("output", "value", "key", "query"):
            truth = np.trace(wet.mean[path] - dry.mean[path])
            slack = percent / 100 * truth + 4 * wet.error[path][0]
            assert abs(np.trace(ours[path] - base[path]) - truth) < slack, (name, path)


# --- Monte Carlo, a real layer of finite width ----------------------------------------------------


@pytest.mark.parametrize("drop_prob", [0.0, 0.3])
def test_finite_width_against_a_real_layer(drop_prob: float) -> None:
    """d_model 64, d_head 16: the width terms move the query path by 10 %, the key path by 8 %."""
    length, tau = 12, 1.5
    kernel, gradient = exchangeable(length, 0.3), 0.4 + 0.6 * np.eye(length)
    sample, tokens = montecarlo.sample_layer(
        kernel, gradient, tau, 64, 16, drop_prob=drop_prob, draws=12000
    )
    correlation = (tokens.sum() - length) / (length * (length - 1))
    layer = KernelAttention(
        exchangeable(length, correlation),
        logit_scale=tau,
        drop_prob=drop_prob,
        d_model=64,
        d_head=16,
    )
    ours = montecarlo.predicted(layer, gradient)
    percents = {"output": 1, "value": 1, "key": 2, "query": 4, "cross": 8, "total": 1.5}
    for path, percent in percents.items():
        truth = np.trace(sample.mean[path])
        slack = percent / 100 * truth + 4 * sample.error[path][0]
        assert abs(np.trace(ours[path]) - truth) < slack, path


@pytest.mark.parametrize("drop_prob", [0.0, 0.3])
@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize(("d_model", "d_head"), [(64, 16), (256, 64), (768, 64)])
def test_finite_widths_are_those_of_tokens_alike(
    d_model: int, d_head: int, gaussian: bool, drop_prob: float
) -> None:
    """By token, tokens alike have the moments of keys that are alike, path by path: to .02 % up to
    theta = 2, and where quadrature nodes leave the tables (d_head 16, theta 4) to 2 %. Off the
    diagonal the query path's tilt is interpolated in the correlation: .6 % at d_model 64."""
    spread = 2.0 / d_model if gaussian else 0.0
    for theta, length, r in ((0.3, 8, 0.3), (1.0, 256, 0.0), (2.0, 32, 0.8), (4.0, 128, 0.3)):
        widths = {"drop_prob": drop_prob, "d_model": d_model, "d_head": d_head}
        widths["norm_spread"] = spread
        tokens, scale = Kernel(1.0, r), theta / (1 - r)
        counts = {"query_count": length, "key_count": length}
        known = AlikeLayer(tokens, tokens, tokens, scale=scale, **counts, **widths)
        layer = KernelAttention(exchangeable(length, r), logit_scale=scale, **widths)
        exact = {"output": known.forward(), **known.backward(Kernel(1.0, 0.3))._asdict()}
        parts = {"output": layer.forward()}
        parts |= layer.backward(exchangeable(length, 0.3))._asdict()
        edge = 2e-2 if d_head == 16 and theta > 3 else 1e-4
        for path, kernel in exact.items():
            pairs = None if path in ("key", "cross") else kernel.off_diagonal  # these sum to 0
            for expected, j, slack in ((kernel.diagonal, 0, 1e-3), (pairs, 1, 0.4 / d_model)):
                if expected is not None:
                    near = pytest.approx(expected, rel=slack + edge, abs=1e-6)
                    assert parts[path][0, j] == near, (path, theta)


def _drawn_layer(kernel: Array, tau: float, d_model: int, draws: int) -> tuple[Array, ...]:
    """Mean kernel of normalised tokens; means and errors of (trace, sum off the diagonal) of the
    output and of the query and key paths under a gradient of ones, at infinite d_head."""
    generator, batch, length = np.random.default_rng(0), 100, len(kernel)
    values, vectors = np.linalg.eigh(kernel)
    root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
    found, overlaps = [], np.zeros_like(kernel)
    for _ in range(draws // batch):
        x = root @ generator.standard_normal((batch, length, d_model))
        x *= np.sqrt(d_model) / np.linalg.norm(x, axis=2, keepdims=True)
        matrix = generator.standard_normal((batch, d_model, d_model)) * np.sqrt(tau) / d_model
        seen, looking = x @ matrix.swapaxes(1, 2), x @ matrix
        logits = looking @ x.swapaxes(1, 2)
        a = np.exp(logits - logits.max(2, keepdims=True))
        a /= a.sum(2, keepdims=True)
        overlap = x @ x.swapaxes(1, 2) / d_model
        jacobian = a[..., None] * np.eye(length) - a[..., None] * a[:, :, None]
        onward = jacobian @ overlap[:, None]
        flat = onward.reshape(batch, length, -1)
        back = (jacobian @ (seen @ seen.swapaxes(1, 2))[:, None]).swapaxes(2, 3)
        query = flat @ back.reshape(batch, length, -1).swapaxes(1, 2)
        key = flat @ jacobian.reshape(batch, length, -1).swapaxes(1, 2)
        key = key * (looking @ looking.swapaxes(1, 2))
        paths = [a @ overlap @ a.swapaxes(1, 2), query, key]
        found.append([montecarlo.summary(path.mean(0)) for path in paths])
        overlaps += 0.5 * (overlap + overlap.swapaxes(1, 2)).mean(0)
    drawn = np.array(found)
    return overlaps * batch / draws, drawn.mean(0), drawn.std(0) / np.sqrt(len(drawn))


@pytest.mark.parametrize("kind", ["repeated", "smooth"])
def test_normalised_tokens_that_are_not_alike(kind: str) -> None:
    """A real layer of d_model 64: what the widths change of the output, of the order of 1 %, is met
    to half of it, and nothing beyond the closure's own error is added to the paths."""
    length, tau = 12, 2.5
    place = np.arange(length)
    kernel = {
        "repeated": 0.25 + 0.3 * np.eye(length) + 0.45 * np.equal.outer(place % 5, place % 5),
        "smooth": 0.2
        + 0.12 * np.eye(length)
        + 0.68 * np.exp(-(((place[:, None] - place) / 3) ** 2)),
    }[kind]
    overlap, mean, error = _drawn_layer(kernel, tau, 64, 6000)
    layer = KernelAttention(overlap, logit_scale=tau, d_model=64)
    wide = KernelAttention(overlap, logit_scale=tau)
    gaussian = KernelAttention(overlap, logit_scale=tau, d_model=64, norm_spread=2 / 64)
    ours = [montecarlo.summary(one.forward()) for one in (layer, wide, gaussian)]
    slack = 4 * error[0]
    assert np.all(np.abs(ours[0] - mean[0]) < 0.006 * mean[0] + slack)
    assert np.all(np.abs(ours[2] - mean[0]) > np.abs(ours[0] - mean[0]))
    parts = layer.backward(np.ones((length, length)))
    alone = layer.backward(np.eye(length))
    query = montecarlo.summary(parts.query)
    key = np.array([np.trace(alone.key), np.trace(parts.key) - np.trace(alone.key)])
    drawn_key = mean[2]
    assert np.all(np.abs(query - mean[1]) < 0.04 * mean[1] + 4 * error[1])
    assert np.all(np.abs(key - drawn_key) < 0.08 * drawn_key + 4 * error[2])


# --- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", list(masks(20)))
@pytest.mark.parametrize("drop_prob", [0.0, 0.2])
def test_values_are_sent_what_they_are_gathered_by(mask: str, drop_prob: float) -> None:
    """What averages gather of a kernel and what its tokens receive are transposes of each other."""
    length, kernel = 20, structured(20)
    layer = KernelAttention(
        kernel, logit_scale=2.0, allowed=masks(length)[mask], drop_prob=drop_prob
    )
    gradient = random_gradient(length, 3)
    sent = (kernel * layer.backward(gradient).value).sum()
    assert sent == pytest.approx((layer.forward() * gradient).sum(), rel=1e-5)


def test_permuting_tokens_permutes_everything() -> None:
    length = 20
    order = np.random.default_rng(2).permutation(length)
    kernel, gradient = structured(length), random_gradient(length)
    swapped = np.ix_(order, order)
    for allowed in (None, np.tri(length, dtype=bool)):
        settings = {"logit_scale": 2.0, "drop_prob": 0.1, "d_model": 64.0, "d_head": 16.0}
        one = KernelAttention(kernel, allowed=allowed, **settings)
        mask = None if allowed is None else allowed[swapped]
        two = KernelAttention(kernel[swapped], allowed=mask, **settings)
        np.testing.assert_allclose(one.forward()[swapped], two.forward(), rtol=1e-5)
        ours, theirs = one.backward(gradient).total, two.backward(gradient[swapped]).total
        np.testing.assert_allclose(ours[swapped], theirs, atol=1e-5 * np.abs(ours).max())
        np.testing.assert_allclose(one.mean_attention[swapped], two.mean_attention, rtol=1e-9)


def test_separate_sequences_are_separate_layers() -> None:
    """A block mask over two sequences: inside a block nothing changes."""
    length = 12
    kernel = structured(2 * length)
    gradient = random_gradient(2 * length)
    block = np.kron(np.eye(2, dtype=bool), np.tri(length, dtype=bool))
    joint = KernelAttention(kernel, logit_scale=1.0, allowed=block)
    first = slice(0, length)
    alone = KernelAttention(
        kernel[first, first], logit_scale=1.0, allowed=np.tri(length, dtype=bool)
    )
    np.testing.assert_allclose(joint.forward()[first, first], alone.forward(), rtol=2e-2)
    ours = joint.backward(gradient).total[first, first]
    theirs = alone.backward(gradient[first, first]).total
    np.testing.assert_allclose(ours, theirs, atol=2e-2 * np.abs(theirs).max())


def test_softmax_conserves() -> None:
    """Rows of a sum to 1, so V keeps the gradient's sum and the key path's rows sum to 0."""
    length = 20
    gradient = random_gradient(length)
    layer = KernelAttention(structured(length), logit_scale=2.0, allowed=np.tri(length, dtype=bool))
    parts = layer.backward(gradient)
    assert parts.value.sum() == pytest.approx(gradient.sum(), rel=1e-5)
    assert np.abs(parts.key.sum(1)).max() < 1e-5 * np.abs(parts.key).max()
    np.testing.assert_allclose(layer.mean_attention.sum(1), 1.0, rtol=1e-12)
    for part in parts:
        np.testing.assert_array_equal(part, part.T)


def test_query_and_key_weights_receive_the_same_gradient() -> None:
    """E|dW_q|^2 s_q = E|dW_k|^2 s_k at infinite width: sum(C o query) = sum(C o key)."""
    length = 20
    kernel = structured(length)
    layer = KernelAttention(kernel, logit_scale=2.0, allowed=np.tri(length, dtype=bool))
    parts = layer.backward(random_gradient(length))
    assert (kernel * parts.query).sum() == pytest.approx((kernel * parts.key).sum(), rel=1e-2)


def test_gradient_scale_is_irrelevant() -> None:
    """Gradients of deep networks leave the range of single precision."""
    layer = KernelAttention(structured(10), logit_scale=1.0)
    gradient = random_gradient(10)
    for scale in (1e-80, 1e80):
        scaled = layer.backward(scale * gradient).total / scale
        np.testing.assert_allclose(scaled, layer.backward(gradient).total, rtol=1e-6)


# --- extremes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", list(masks(12)))
@pytest.mark.parametrize("tau", [0.0, 1e-8, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("kind", ["structured", "equal", "negative", "duplicates", "uneven"])
def test_extreme_inputs_stay_finite(mask: str, tau: float, kind: str) -> None:
    length = 12
    kernel = {
        "structured": structured(length),
        "equal": np.ones((length, length)),
        "negative": exchangeable(length, -1.0 / (length - 1)),
        "duplicates": np.kron(np.eye(length // 2), np.ones((2, 2))),
        "uneven": structured(length) * np.outer(*[np.linspace(0.5, 2.0, length)] * 2),
    }[kind]
    layer = KernelAttention(
        kernel,
        logit_scale=tau,
        allowed=masks(length)[mask],
        drop_prob=0.2,
        d_model=32,
        d_head=8,
    )
    parts = layer.backward(random_gradient(length))
    for array in (layer.forward(), *parts, layer.entropy):
        assert np.all(np.isfinite(array))
    np.testing.assert_array_equal(parts.total, parts.total.T)
    assert np.all(np.diag(parts.total) >= 0.0)
    if tau == 0.0:
        assert np.abs(parts.query).max() < 1e-9


def test_hard_attention_keeps_its_growth() -> None:
    """Two keys: T = 4 E a(1-a) a'(1-a') is (4/6) / sqrt(4 pi theta) for hard rows, so Q grows."""
    theta = 400.0
    layer = KernelAttention(np.eye(2), logit_scale=theta)
    expected = theta * (4.0 / 6.0) / np.sqrt(4.0 * np.pi * theta)
    assert layer.beyond_tables
    assert layer.backward(np.eye(2)).query[0, 0] == pytest.approx(expected, rel=0.1)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kernel": np.ones((2, 3))}, "kernel"),
        ({"kernel": np.full((2, 2), np.nan)}, "kernel"),
        ({"logit_scale": -1.0}, "logit_scale"),
        ({"logit_scale": np.inf}, "logit_scale"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], named: str) -> None:
    arguments: dict[str, object] = {"kernel": np.eye(2), "logit_scale": 1.0} | change
    with pytest.raises(DomainError, match=named):
        KernelAttention(arguments.pop("kernel"), **arguments)


def test_bad_gradient_is_named() -> None:
    layer = KernelAttention(np.eye(3), logit_scale=1.0)
    with pytest.raises(DomainError, match="gradient"):
        layer.backward(np.eye(4))


# --- the linear response, and rotated pairs -------------------------------------------------------


def test_response_of_uniform_rows() -> None:
    """With hardly any logits, rows have P = (1 - 1/n)/n and all is its products with the kernel."""
    length, tau, dropped = 6, 1e-5, 0.25
    root = np.random.default_rng(0).normal(size=(length, 2 * length))
    kernel = root @ root.T / root.shape[1]
    kernel /= np.sqrt(np.outer(np.diag(kernel), np.diag(kernel)))
    leaf = SelfAttention("a", 64, 1, 64, 0.1, 0.1, 0.1, dropped / (1 + dropped))
    full = np.ones((length, length), bool)
    maps = AttentionResponse.of(leaf, kernel[None], [full], tau)
    centre = np.eye(length) / length - 1 / length**2
    gathered = np.sum(centre @ kernel @ centre * kernel)
    alone = np.trace(centre @ kernel) ** 2 / 64
    np.testing.assert_allclose(maps.query[0], tau * (gathered + alone), rtol=1e-4)
    np.testing.assert_allclose(maps.squares[0], dropped / length**2, rtol=1e-4)
    off = ~np.eye(length, dtype=bool)
    np.testing.assert_allclose(maps.by_head[0][off], 2 * tau * kernel[off], rtol=5e-3)


def test_saturation_is_one_function_and_its_slopes() -> None:
    """R2 = d(rho R1)/drho, the third rho dR2/drho, and p of equal rows is E sum a^2."""
    keys, theta, square, step = 7.0, 1.4, 0.35, 1e-4
    odds = np.log(square * (keys - 1) / (1 - square))

    def at(rho: float) -> Array:
        rows = (np.array(one) for one in (rho, keys, theta, odds))
        return np.array([float(one) for one in saturation(*rows)])

    for rho in (-0.3, 0.4, 0.8):
        here, above, below = at(rho), at(rho + step), at(rho - step)
        moved = ((rho + step) * above[0] - (rho - step) * below[0]) / (2 * step)
        assert here[1] == pytest.approx(moved, rel=1e-6)
        assert here[2] == pytest.approx(rho * (above[1] - below[1]) / (2 * step), rel=1e-6)
    free = (keys - 1) / keys**2
    assert 1 / keys + theta * free * at(1.0)[0] == pytest.approx(square, rel=1e-12)


def test_a_turned_pair_overlaps_as_its_rotated_kernel_does() -> None:
    """turn times what the keys' kernel alone gives is what kernel and rotations give together."""
    length, random = 5, np.random.default_rng(1)
    place = np.arange(length, dtype=np.float64)
    rotation = Rotation.of(np.array([0.3, 0.02]), np.array([0.6, 0.4]), place, place)
    overlaps = random.uniform(0.1, 0.2, size=(1 + len(rotation.query_terms), length, length))
    overlaps = 0.5 * (overlaps + overlaps.transpose(0, 2, 1))
    overlaps[0] += 1.0
    bare = exchangeable(length, 0.3)
    turn = rotation_factor(rotation, overlaps, bare, -1.0)
    given = rotation.queries * overlaps[0] + (rotation.query_terms * overlaps[1:]).sum(0)
    given = 0.5 * (given / overlaps[0] + (given / overlaps[0]).T)
    inside = np.abs(given * bare) < 1.0
    np.testing.assert_allclose(turn[inside], given[inside], rtol=1e-12)
    assert inside.sum() > length


def test_reference_rows_meet_both_moments() -> None:
    """Moments of exchangeable rows, from the sums over pairs of keys at 50 digits: found again from
    faint to peaked rows, whose keys are a hundredth to all of those that there are."""
    rng = np.random.default_rng(5)
    theta, keys = np.exp(rng.uniform(np.log(0.3), np.log(30.0), 60)), rng.uniform(3.1, 3000.0, 60)
    count = keys * np.exp(rng.uniform(0.01, 4.0, 60))

    def moment(scale: float) -> Array:
        with mp.workdps(50):
            found = []
            for t, n in zip(theta, keys, strict=True):
                t, n = scale * mp.mpf(t), mp.mpf(n)
                found.append(float(mp.log((mp.exp(t) + n - 1) / n) - t / n))
        return np.array(found)

    rows = matched(moment(1.0), moment(2.0), count)
    assert np.allclose(rows.theta, theta, rtol=1e-7, atol=0.0)
    assert np.allclose(rows.keys, keys, rtol=1e-6, atol=0.0)
