"""Softmax rows of large logit variance: against the exact evaluator and against drawn layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from exact_softmax import pair_statistics, row_statistics
from scipy.special import ndtr

import moments
from moments.layers.attention import softmax
from moments.layers.attention.kernels import KernelAttention
from moments.layers.attention.projections import bent
from moments.layers.head.cross_entropy import softmax_expectations
from moments.prediction.gate import Gate


@pytest.mark.parametrize("keys", [4, 16, 64])
def test_rows_beyond_the_tables(keys: int) -> None:
    exact = row_statistics(32.0, keys)
    found = softmax.rows(np.array([32.0]), np.array([float(keys)]))
    for name, error in (
        ("sum_square", 0.005),
        ("sum_cube", 0.02),
        ("sum_fourth", 0.03),
        ("jacobian_square", 0.05),
        ("sum_square_slope", 0.02),
    ):
        ours = float(getattr(found, name)[0])
        assert ours == pytest.approx(float(getattr(exact, name)), rel=error), name


@pytest.mark.parametrize("keys", [4, 16, 64])
def test_pairs_beyond_the_tables(keys: int) -> None:
    rho = np.array([0.3, 0.9, 1.0])
    found = softmax.pairs(np.array([[16.0]]), np.array([float(keys)]), rho)
    for index, one in enumerate(rho):
        exact = pair_statistics(16.0, keys, one)
        assert found.overlap[0, index] == pytest.approx(exact.overlap, rel=0.05)
        assert 1 - found.overlap[0, index] == pytest.approx(1 - exact.overlap, rel=0.03)
        ours = found.jacobian_overlap[0, index]
        assert ours == pytest.approx(exact.jacobian_overlap, rel=0.15)


def same_maximum(keys: int, rho: float) -> float:
    """Chance that two rows of correlated normals have their largest at one key, by quadrature."""
    step, apart = 0.01, np.sqrt(1 - rho * rho)
    x, y = np.arange(-7, 7, step) + step / 2, np.arange(-7, 7, 0.02)
    density = np.exp(-x * x / 2)[:, None] / np.sqrt(2 * np.pi)
    z = (y - rho * x[:, None]) / apart
    cell = density * ndtr(z)
    below = np.cumsum(cell, 0) * step - 0.5 * step * cell
    joint = density * np.exp(-z * z / 2) / np.sqrt(2 * np.pi) / apart
    return float(keys * (joint * below ** (keys - 1)).sum() * step * 0.02)


@pytest.mark.parametrize("keys", [4, 16])
@pytest.mark.parametrize("rho", [0.3, 0.9])
def test_a_hard_maximum(keys: int, rho: float) -> None:
    found = softmax.pairs(np.array([[200.0]]), np.array([float(keys)]), np.array([rho]))
    softened = rho * 200 / (200 + np.pi**2 / 6)  # by Gumbel's noise
    assert 1 - found.overlap[0, 0] == pytest.approx(1 - same_maximum(keys, softened), rel=0.06)


def drawn(kernel: np.ndarray, tau: float, gradient: np.ndarray, draws: int) -> np.ndarray:
    """Traces of output, value, query and key path over draws of Gaussian logits, (draws, 4)."""
    rng = np.random.default_rng(0)
    length = len(kernel)
    values, vectors = np.linalg.eigh(kernel)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    s = np.sqrt(tau) * root @ rng.normal(size=(draws, length, length)) @ root
    a = np.exp(s - s.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    jacobian = -np.einsum("bij,bil->bijl", a, a)
    index = np.arange(length)
    jacobian[:, :, index, index] += a
    moved = jacobian @ kernel
    flat = jacobian.reshape(draws, length, -1)
    through = moved.reshape(draws, length, -1) @ flat.transpose(0, 2, 1)
    own = np.einsum("bijl,bilj->bi", moved, moved)
    return np.stack(
        [
            np.einsum("bij,jk,bik->b", a, kernel, a, optimize=True),
            np.einsum("bij,ik,bkj->b", a, gradient, a, optimize=True),
            tau * own @ np.diag(gradient),
            tau * (through * gradient * kernel).sum((1, 2)),
        ],
        1,
    )


@pytest.mark.parametrize("theta", [12.0, 64.0, 180.0])
def test_a_layer_of_peaked_rows(theta: float) -> None:
    kernel, gradient = np.full((16, 16), 0.2), np.full((16, 16), 0.3)
    np.fill_diagonal(kernel, 1.0)
    np.fill_diagonal(gradient, 1.0)
    sample = drawn(kernel, theta / 0.8, gradient, 400)
    mean, noise = sample.mean(0), sample.std(0) / 20
    layer = KernelAttention(kernel, logit_scale=theta / 0.8)
    paths = layer.backward(gradient)
    ours = [np.trace(m) for m in (layer.forward(), paths.value, paths.query, paths.key)]
    assert np.all(np.abs(ours - mean) < 4 * noise + 0.04 * mean)


def of_variance(theta: float, width: int, length: int, **fields: Any) -> moments.Transformer:
    """One layer of unit values whose logits have that variance between independent tokens."""
    root = theta**0.5 / width
    weights = moments.Weights(
        query=root, key=root, value=1 / width, output=1 / width, ffn_in=0.0, ffn_out=0.0
    )
    return moments.Transformer(
        layers=1, d_model=width, heads=width // 32, seq_len=length, weights=weights, **fields
    )


def squared(table: pd.DataFrame, weight: str, column: str = "squared_norm") -> float:
    return float(table.loc[table.weight == weight, column].item())


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
@pytest.mark.parametrize("theta", [5.0, 9.0, 12.0, 30.0, 100.0, 190.0])
@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_peaked_rows_on_classes_of_positions_are_those_of_tokens(
    theta: float, correlation: float
) -> None:
    model = of_variance(theta, 256, 128, causal=True)
    classes, tokens = (
        moments.predict(model, correlation=correlation, tokens=kind) for kind in (None, True)
    )
    rows = [float(np.mean(one.attention().square_sum)) for one in (classes, tokens)]
    assert rows[0] == pytest.approx(rows[1], rel=0.005)
    assert classes.variance[-1] == pytest.approx(tokens.variance[-1], rel=0.002)
    assert classes.correlation[-1] == pytest.approx(tokens.correlation[-1], abs=0.001)
    for weight in ("value", "query", "key"):
        sizes = [squared(one.weight_gradients(), weight) for one in (classes, tokens)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.02), weight


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
@pytest.mark.parametrize("causal", [False, True])
def test_queries_of_tokens_of_fixed_norm(causal: bool) -> None:
    """Against draws, at a logit variance where terms of fixed norms matter most."""
    model = of_variance(12.0, 64, 48, causal=causal, normalization="rmsnorm")
    drawn = moments.simulate(model, seeds=80, batch=2).weight_gradients()
    found = moments.predict(model).weight_gradients()
    size, error = (squared(drawn, "query", c) for c in ("squared_norm", "squared_norm_stderr"))
    assert abs(squared(found, "query") - size) < 0.03 * size + 3 * error


@pytest.mark.parametrize(
    ("own", "shared", "cap", "dimension", "keys"),
    [(2.5, 2.5, 2.0, np.inf, 24), (5.0, 0.0, 10.0, np.inf, 12), (8.0, 1.0, None, 16.0, 24)],
)
def test_rows_of_bent_logits(
    own: float, shared: float, cap: float | None, dimension: float, keys: int
) -> None:
    """What stands for them, against draws of capped logits and of keys on a sphere."""
    rng = np.random.default_rng(0)
    draws = 40_000
    common = np.sqrt(shared) * rng.normal(size=(draws, 1))
    along = rng.normal(size=(draws, keys))
    orthogonal = np.ones_like(along)
    if dimension < np.inf:
        squares = along**2 + rng.chisquare(dimension - 1, along.shape)
        orthogonal = dimension / (dimension - 1) * (1 - along**2 / squares)
        along *= np.sqrt(dimension / squares)
    logits, slopes = np.sqrt(own) * along + common, np.ones_like(along)
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
        slopes = 1 - (logits / cap) ** 2
    a = np.exp(logits - logits.max(1, keepdims=True))
    a /= a.sum(1, keepdims=True)
    square = (a * a).sum(1, keepdims=True)
    driven = (slopes**2 * orthogonal * a * a * (1 - 2 * a + square)).sum(1)
    common_part = (a * a * (slopes - (a * slopes).sum(1, keepdims=True)) ** 2).sum(1)
    found = bent(own, shared, keys, 0.0, cap, dimension)
    of_gaussian = softmax.AlikeRows.of(float(keys)).rows(own * found.shrunk)
    assert of_gaussian.sum_square == pytest.approx(square.mean(), rel=0.01)
    ours = found.driven * of_gaussian.jacobian_square
    assert ours == pytest.approx(driven.mean(), rel=0.01)
    whole = found.with_common * of_gaussian.jacobian_square
    expected = driven.mean() + shared / own * common_part.mean()
    assert whole == pytest.approx(expected, rel=0.01)


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
@pytest.mark.parametrize(
    ("options", "correlation"),
    [
        ({"logit_softcap": 7.0, "causal": True}, 0.0),
        ({"logit_softcap": 2.0}, 0.5),
        ({"qk_norm": "rmsnorm", "temperature": 0.35}, 0.0),
    ],
    ids=["capped", "capped and shared", "normalised"],
)
def test_gradients_through_bent_logits(options: dict[str, Any], correlation: float) -> None:
    """Queries of one layer, against draws. Without the two ratios they are 20 to 40 % off."""
    model = of_variance(5.0, 96, 24, **options)
    drawn = moments.simulate(model, correlation=correlation, seeds=100).weight_gradients()
    found = moments.predict(model, correlation=correlation).weight_gradients()
    size, error = (squared(drawn, "query", c) for c in ("squared_norm", "squared_norm_stderr"))
    assert abs(squared(found, "query") - size) < 0.05 * size + 3 * error


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_keys_of_faint_logits(alpha: float) -> None:
    """A stream that decays through eight layers of DyT: tokens alike against each by itself."""
    model = moments.Transformer(
        layers=8,
        d_model=64,
        heads=2,
        seq_len=24,
        norm="post",
        normalization="dyt",
        dyt_alpha=alpha,
    )
    alike, tokens = (
        moments.predict(model, tokens=kind).weight_gradients() for kind in (None, True)
    )
    for name in ("query", "key"):
        found, expected = (one.squared_norm[one.weight == name] for one in (alike, tokens))
        np.testing.assert_allclose(found, expected, rtol=0.05)


def test_a_gate_says_what_it_cuts_off_and_where() -> None:
    gate = Gate("refined", (), 10)
    cut = gate.correlation("the correlation", np.array([0.5, 2.8]), ["first", "second"])
    assert cut[1] == 1.0
    assert "the correlation, second: 2.8" in gate.notes[0]
    left = gate.parts("squares", np.array([[1.0, 2.0], [3.0, -0.5]]))
    assert left[1, 1] == 0.0
    assert "squares, behind layer 1, token 2: down to -0.5" in gate.notes[1]
    gate.parts("squares", np.array([1.0, -1e-12]), places=["a", "b"])
    gate.correlation("the correlation", np.array([1.0 + 1e-9]), ["a"])
    assert len(gate.notes) == 2


def test_a_head_of_impossible_logits_says_so() -> None:
    with pytest.raises(OverflowError, match="finite variance"):
        softmax_expectations(3, np.array([np.nan, 1.0]))
