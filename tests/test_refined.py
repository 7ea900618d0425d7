"""The refined theory against simulations that share no formula with it, and against itself."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments.engine.composition import Residual, forward
from moments.engine.state import Fluctuation, Gradient, Kernel
from moments.formulas.attention import UNIFORM_ATTENTION_GRADIENTS
from moments.formulas.linear import LINEAR
from moments.formulas.normalization import LAYERNORM
from moments.layers.elementary import Linear
from moments.layers.normalization import FiniteNormalization
from moments.prediction.stack import exchangeable_kernel, gaussian

pytest.importorskip("torch")


sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
draws: Any = importlib.import_module("small_draws")
small = draws.small


def log_ratio(predicted: np.ndarray, measured: np.ndarray, stderr: np.ndarray) -> np.ndarray:
    """|log(predicted / measured)| beyond three standard errors of the measurement."""
    return np.maximum(np.abs(np.log(predicted / measured)) - 3 * stderr / measured, 0.0)


@pytest.fixture(scope="module")
def stored() -> dict[str, dict[str, Any]]:
    """Means and standard errors over draws, stored by `benchmarks/small_draws.py`."""
    found = {name: draws.stored()[f"twin/{name}"] for name in draws.TWINS}
    assert all(entry["draws"] >= 48 for entry in found.values())
    return {name: entry["found"] for name, entry in found.items()}


@pytest.mark.parametrize("name", draws.TWINS)
def test_moments_against_the_simulation(name: str, stored: dict[str, Any]) -> None:
    predicted = moments.predict(small(**draws.TWINS[name]), **draws.ENTERING)
    measured = {quantity: np.array(stored[name][quantity]) for quantity in draws.STREAM}
    value, error = measured["variance"]
    assert log_ratio(predicted.variance, value, error + 1e-9).max() < 0.02
    value, error = measured["correlation"]
    assert np.all(np.abs(predicted.correlation - value) < 0.015 + 3 * error)
    assert log_ratio(predicted.grad_variance, *measured["grad_variance"]).mean() < 0.03
    value, error = measured["grad_correlation"]
    assert np.all(np.abs(predicted.grad_correlation - value) < 0.02 + 3 * error)


@pytest.mark.parametrize("name", draws.TWINS)
def test_weight_gradients_against_the_simulation(name: str, stored: dict[str, Any]) -> None:
    predicted = moments.predict(small(**draws.TWINS[name]), **draws.ENTERING).weight_gradients()
    assert set(predicted.weight) == {"query", "key", "value", "output", "ffn_in", "ffn_out"}
    for layer, weight, norm in predicted.itertuples(index=False):
        measured, error = stored[name]["norms"][f"{layer}.{weight}"]
        assert abs(norm - measured) < 0.05 * measured + 3 * error, (layer, weight)


@pytest.mark.parametrize("name", draws.TWINS)
def test_simulating_again_agrees_with_what_is_stored(name: str, stored: dict[str, Any]) -> None:
    """Twins as they are today, by other random numbers: one draw scatters as those stored did."""
    again = draws.twin_draws(small(**draws.TWINS[name]), 2, 11)
    seeds = draws.stored()[f"twin/{name}"]["draws"]
    for quantity in draws.STREAM:
        (first, error), (second, _) = (np.array(v[quantity]) for v in (stored[name], again))
        scatter = error * math.sqrt(seeds / 2 + 1)
        z = (second - first) / np.maximum(scatter, 2e-6)
        assert np.any(second != first)
        assert np.sqrt(np.mean(z**2)) < 3, (quantity, z)


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_both_resolutions_agree_where_tokens_are_alike(norm: str) -> None:
    # without a norm the logits grow with the stream, so keep its growth small
    model = small(norm=norm, layers=3, branch_scale=0.5 if norm == "none" else 1.0)
    alike_ = moments.predict(model, correlation=0.4, grad_correlation=0.1)
    resolved = moments.predict(model, correlation=0.4, grad_correlation=0.1, tokens=True)
    # Without a norm the tokens' own norms vary, which only tokens alike average over.
    tolerance = 0.03 if norm == "none" else 0.01
    for name in ("variance", "correlation", "grad_variance", "grad_correlation"):
        np.testing.assert_allclose(
            getattr(resolved, name), getattr(alike_, name), rtol=tolerance, atol=0.002
        )
    assert alike_.token_variance is None
    assert resolved.token_variance is not None
    assert resolved.token_variance.shape == (4, 24)
    np.testing.assert_allclose(resolved.token_variance.mean(-1), resolved.variance)


def test_text_is_the_kernel_of_its_repetitions() -> None:
    model = small(
        embedding=moments.Embedding(vocab_size=50, token_variance=0.5, position_variance=0.5)
    )
    ids = np.arange(24) % 7
    by_text = moments.predict(model, token_ids=ids)
    kernel = 0.5 * (ids[:, None] == ids[None, :]) + 0.5 * np.eye(24)
    by_kernel = moments.predict(model, kernel=kernel)
    np.testing.assert_allclose(by_text.grad_variance, by_kernel.grad_variance, rtol=1e-12)
    twice = moments.predict(model, token_ids=np.stack([ids, ids]))
    np.testing.assert_allclose(twice.variance, by_text.variance, rtol=1e-5)
    np.testing.assert_allclose(twice.grad_variance, by_text.grad_variance, rtol=1e-4)


def test_causal_gradient_gathers_on_the_first_tokens() -> None:
    model = small(causal=True)
    profile = moments.predict(model, correlation=0.3).token_grad_variance
    assert profile is not None
    assert profile.shape == (5, 24)
    assert profile[0, 0] > 5 * profile[0, -1]
    np.testing.assert_allclose(profile[-1], 1.0)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_batches_of_configurations_equal_single_ones(norm: str) -> None:
    model = small(norm=norm, layers=2)
    variance, correlation = np.array([0.5, 1.0, 2.0]), np.array([0.1, 0.5, 0.9])
    together = moments.predict(model, variance=variance, correlation=correlation)
    assert together.variance.shape == (3, 3)
    for i in range(3):
        one = moments.predict(model, variance=variance[i], correlation=correlation[i])
        for name in ("variance", "correlation", "grad_variance", "grad_correlation"):
            np.testing.assert_allclose(
                getattr(together, name)[i], getattr(one, name), rtol=1e-4, atol=1e-9
            )


def test_normalisation_backward_is_the_mean_over_draws() -> None:
    """E of the exact pullback of LayerNorm on Gaussian tokens, d small enough for 1/d to show."""
    rng = np.random.default_rng(0)
    d, draws, r = 32, 50_000, 0.5
    common = rng.standard_normal((draws, 1, d))
    x = math.sqrt(r) * common + math.sqrt(1 - r) * rng.standard_normal((draws, 2, d))
    g = rng.standard_normal((draws, 1, d)) + rng.standard_normal((draws, 2, d))
    centred = x - x.mean(-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(-1, keepdims=True))
    normal = centred / scale
    pulled = g - g.mean(-1, keepdims=True) - normal * (g * normal).mean(-1, keepdims=True)
    pulled /= scale
    signal = gaussian(exchangeable_kernel(1.0, r, 2, False), 2, d, True)
    _, pullback = FiniteNormalization(LAYERNORM, "norm").forward(signal)
    sent = pullback(Gradient(Kernel(2.0, 1.0), 2)).gradient.kernel
    # leading order in 1/d: what is left is of order 1/d^2
    assert sent.diagonal == pytest.approx(float((pulled**2).mean()), rel=6 / d**2)
    assert sent.off_diagonal == pytest.approx(
        float((pulled[:, 0] * pulled[:, 1]).mean()), rel=12 / d**2
    )


def test_noci_norms_are_the_limit_of_uniform_attention() -> None:
    """Theorem 3.2's query and value norms: one wide head, small logits, uncorrelated gradients."""
    d, length, r = 4096, 64, 0.4
    model = moments.Transformer(
        layers=1,
        d_model=d,
        heads=1,
        seq_len=length,
        norm="none",
        temperature=1e3,
        weights=moments.Weights.xavier(d, 1).replace(output=1 / d),
    )
    rows = moments.predict(model, correlation=r).weight_gradients().set_index("weight")
    weights = model.layer_weights(1)
    values = {"d_model": d, "seq_len": length, "x_variance": 1.0, "x_correlation": r}
    law = UNIFORM_ATTENTION_GRADIENTS.law
    ratio = law("query_gradient")(**values) / law("value_gradient")(**values)
    measured = rows.squared_norm["query"] / rows.squared_norm["value"]
    # the laws hold for key and value weights of variance 1/d
    expected = ratio * weights.key * weights.value * d**2 / 1e3**2
    assert measured == pytest.approx(expected, rel=0.02)
    balance = law("inverse_temperature_square")(**values)
    assert balance * ratio == pytest.approx(1.0)


def test_attention_facts() -> None:
    model = small(layers=2, temperature=1e4)
    facts = moments.predict(model, correlation=0.3).attention()
    np.testing.assert_allclose(facts.entropy, math.log(24), rtol=1e-6)
    np.testing.assert_allclose(facts.square_sum, 1 / 24, rtol=1e-6)
    assert facts.distance_to_uniform.abs().max() < 1e-6
    sharp = moments.predict(model.replace(temperature=0.6), correlation=0.3).attention()
    assert (sharp.entropy < facts.entropy - 0.5).all()


def test_extreme_logits_warn_and_stay_finite() -> None:
    model = small(layers=2, temperature=0.01)
    with pytest.warns(moments.ValidityWarning, match="logit variance"):
        prediction = moments.predict(model, correlation=0.1)
    assert prediction.warnings
    assert np.all(np.isfinite(prediction.grad_variance))


@pytest.mark.parametrize("causal", [False, True])
def test_padding_leaves_the_rest_as_if_alone(causal: bool) -> None:
    """Eight padded tokens behind sixteen real ones change nothing for those."""
    mask = np.arange(24) < 16
    model = small(causal=causal, layers=2)
    padded = moments.predict(model, correlation=0.3, attention_mask=mask)
    alone = moments.predict(model.replace(seq_len=16), correlation=0.3, tokens=True)
    for name in ("variance", "correlation", "grad_variance", "grad_correlation"):
        np.testing.assert_allclose(
            getattr(padded, name), getattr(alone, name), rtol=2e-3, atol=1e-4
        )
    assert padded.token_grad_variance is not None
    assert np.all(padded.token_grad_variance[:, 16:] == 0)


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"norm": "post", "activation": "gelu"},
        {"gated": True, "normalization": "rmsnorm"},
        {"normalization": "dyt"},
        {"qk_norm": "rmsnorm"},
        {"logit_softcap": 2.0},
        {"parallel": True, "dropout": 0.1},
    ],
    ids=lambda one: " ".join(one) or "plain",
)
def test_padding_is_in_no_mean(options: dict[str, Any]) -> None:
    """The gradients of all weights, with twice as much padding of one word and without."""
    embedding = moments.Embedding(vocab_size=50, token_variance=1.0)
    model = small(layers=2, d_model=16, heads=2, embedding=embedding, seq_len=12, **options)
    ids = np.random.default_rng(0).integers(1, 50, 12)
    alone = moments.predict(model, token_ids=ids, tokens=True)
    padded = moments.predict(
        model.replace(seq_len=36),
        token_ids=np.append(ids, np.zeros(24, int)),
        attention_mask=np.arange(36) < 12,
    )
    for name in ("variance", "correlation", "grad_variance", "grad_correlation"):
        np.testing.assert_allclose(getattr(padded, name), getattr(alone, name), rtol=1e-3)
    found, expected = (one.weight_gradients().squared_norm for one in (padded, alone))
    np.testing.assert_allclose(found, expected, rtol=2e-3)


def test_padding_differs_by_sequence() -> None:
    model = small(
        layers=2,
        embedding=moments.Embedding(vocab_size=50, token_variance=0.5, position_variance=0.5),
    )
    ids = np.stack([np.arange(24) % 5, np.arange(24) % 11])
    mask = np.stack([np.arange(24) < 20, np.arange(24) < 9])
    both = moments.predict(model, token_ids=ids, attention_mask=mask)
    each = [
        moments.predict(model, token_ids=ids[i], attention_mask=mask[i]).variance for i in range(2)
    ]
    # over all real tokens, 20 and 9
    mean = np.average(each, axis=0, weights=mask.sum(axis=1))
    np.testing.assert_allclose(both.variance, mean, rtol=1e-5)


@pytest.mark.parametrize(
    "mask", [np.ones(23), np.zeros(24), np.full(24, 0.5), [[1] * 24] * 2], ids=str
)
def test_bad_masks(mask: object) -> None:
    with pytest.raises(moments.DomainError, match="attention_mask"):
        moments.predict(small(), attention_mask=mask)


def test_scale_invariance_takes_a_direction_from_the_gradient() -> None:
    """x -> LayerNorm(x + M x) backwards, against draws of M, at a width where 1/d shows."""
    rng = np.random.default_rng(1)
    d, draws, r, gain = 24, 40_000, 0.6, 0.8
    common = rng.standard_normal((draws, 1, d))
    x = math.sqrt(r) * common + math.sqrt(1 - r) * rng.standard_normal((draws, 2, d))
    x *= np.sqrt(d / (x**2).sum(-1, keepdims=True))
    g = rng.standard_normal((draws, 1, d)) + rng.standard_normal((draws, 2, d))
    matrix = rng.standard_normal((draws, d, d)) * math.sqrt(gain / d)
    u = x + x @ matrix
    centred = u - u.mean(-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(-1, keepdims=True))
    normal = centred / scale
    at_sum = g - g.mean(-1, keepdims=True) - normal * (g * normal).mean(-1, keepdims=True)
    at_sum /= scale
    pulled = at_sum + at_sum @ matrix.transpose(0, 2, 1)

    realised = float((x[:, 0] * x[:, 1]).mean())
    kernel = Kernel(1.0, realised)
    signal = gaussian(kernel, 2, d, True).replace(fluctuation=Fluctuation.fixed(kernel))
    parameters = {"fan_in": d, "fan_out": d, "weight_variance": gain / d}
    branch = Linear(LINEAR, "refined", "branch", parameters, d)
    layer = Residual(branch) >> FiniteNormalization(LAYERNORM, "norm")
    _, record = forward(layer, signal)
    sent = record.backward(Gradient(Kernel(2.0, 1.0), 2)).grad_in.kernel
    assert sent.diagonal == pytest.approx(float((pulled**2).mean()), rel=0.01)
    pairs = float((pulled[:, 0] * pulled[:, 1]).mean())
    assert sent.off_diagonal == pytest.approx(pairs, rel=0.02)
    # without the direction taken they are 2.7 and 4.9 % too large


@pytest.mark.parametrize("correlation", [-0.1, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.2, 0.6])
def test_sharp_attention_in_narrow_heads(temperature: float, correlation: float) -> None:
    """Against draws: without a note gradients within 5 %, with one low by 11 to 35 % a layer."""
    model = small(d_model=64, seq_len=8, layers=3, temperature=temperature)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        found = moments.predict(model, correlation=correlation)
    drawn = moments.simulate(
        model,
        variance=1.0,
        correlation=correlation,
        grad_variance=1.0,
        grad_correlation=0.0,
        seeds=12,
        batch=4,
        seed=1,
    )
    forward = np.abs(found.variance / drawn.variance - 1)
    assert np.all(forward < 0.03 + 3 * drawn.variance_stderr / drawn.variance)
    ratio = found.grad_variance / drawn.grad_variance
    error = 3 * drawn.grad_variance_stderr / drawn.grad_variance
    low = 0.65 ** np.arange(3, -1, -1) if found.warnings else 0.95
    assert np.all(ratio > low - error), ratio
    assert np.all(ratio < 1.05 + error), ratio
