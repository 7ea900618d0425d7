"""Exponents and boundaries of other theories against recursions and integrals typed here."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy.integrate import quad

import moments
from studies.analysis import (
    boundaries,
    correlation_fixed_points,
    exponents,
    random_energy,
)
from studies.analysis.boundary import draw
from studies.formulas.random_energy import RANDOM_ENERGY

POST = moments.Transformer(4, 256, 4, 64, norm="post", activation="tanh")


def gaussian(function: object, variance: float) -> float:
    scale = math.sqrt(variance)
    weight = 1 / math.sqrt(2 * math.pi)
    return quad(lambda z: weight * math.exp(-z * z / 2) * function(scale * z), -12, 12)[0]  # type: ignore[operator]


# --- exponents ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [0.5, 4.0])
def test_without_attention_both_are_those_of_a_wide_residual_network(hidden: float) -> None:
    """Tokens pass attention alone, so both exponents are log (2 + chi)/(2 + E f^2) there: x is
    added to W x of unit gain, normalised, added to f, normalised.

    Gradients: through the attention sublayer 1 + 1 over the norm's 2, that is 1, and then as above.
    """
    d = 8192
    weights = moments.Weights(1 / d, 1 / d, 1 / d, 1 / d, hidden / d, 1 / (4 * d))
    model = moments.Transformer(
        1, d, 8, 16, norm="post", activation="tanh", identity_attention=True, weights=weights
    )
    slope = hidden * gaussian(lambda x: (1 - math.tanh(x) ** 2) ** 2, hidden)
    square = gaussian(lambda x: math.tanh(x) ** 2, hidden)
    expected = math.log((1 + slope) / (1 + square))
    found = exponents(model)
    assert found.angle == pytest.approx(expected, abs=2e-3)
    assert found.gradient == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(
    "model",
    [
        POST,
        moments.Transformer(2, 256, 4, 64, activation="gelu", skip_scale=0.9, branch_scale=0.4),
    ],
    ids=["post", "pre"],
)
def test_the_angle_is_the_rate_of_collapse(model: moments.Transformer) -> None:
    """Against the slope of one layer's map, which another analysis takes by differences: of a
    Gaussian input, whose norms vary by 2/width where those behind a Post-LN do not."""
    fixed = correlation_fixed_points(model)
    found = exponents(model)
    assert fixed.collapses
    assert found.correlation == pytest.approx(1.0, abs=1e-9)
    assert found.angle == pytest.approx(math.log(fixed.rate), abs=2 / model.d_model)


def test_chaos_keeps_tokens_apart() -> None:
    d, hidden = POST.d_model, 20.0
    weights = POST.weights.replace(value=0.02 / d, output=1 / d, ffn_in=hidden / d, ffn_out=1e-3)
    found = exponents(POST.replace(weights=weights))
    assert found.angle > 0.05
    assert found.gradient > 0.05
    assert found.correlation < 0.9
    assert "part by exp" in str(found)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"layernorm_scaling": True, "norm": "pre"}, "layernorm_scaling"),
        ({"causal": True}, "alike"),
    ],
)
def test_what_has_no_exponents(changes: dict[str, object], words: str) -> None:
    with pytest.raises(moments.DomainError, match=words):
        exponents(POST.replace(**changes))


# --- the random energy model ----------------------------------------------------------------------


def test_participation_is_the_limit_of_many_keys() -> None:
    """Simulated softmax rows come near it as keys grow, at a logit variance of four times the
    critical: 1/2 (a tenth off at 2^8, standard errors below .01)."""
    random = np.random.default_rng(0)
    off = []
    for count, rows in ((2**4, 8000), (2**8, 4000), (2**16, 100)):
        theta = 8 * math.log(count)
        law = RANDOM_ENERGY.law("row_square")
        limit = law(logit_scale=theta / 0.7, x_correlation=0.3, seq_len=count)
        assert limit == pytest.approx(0.5, abs=1e-12)
        logits = math.sqrt(theta) * random.standard_normal((rows, count), dtype=np.float32)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        weights /= weights.sum(1, keepdims=True)
        off.append(abs(float((weights**2).sum(1).mean()) - 0.5))
    assert off[0] > off[1] > off[2]
    assert off[2] < 0.05


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("beta", [0.5, 3.0])
def test_the_recursion_is_theirs(norm: str, beta: float) -> None:
    """One head, ReLU, unit skips, square matrices: their update of q and p with the arc-cosine
    kernel, and their scale beta sqrt(log n) of the logits."""
    d, length, gain, alpha, layers = 64, 512, 0.2, 0.8, 20
    key = beta * math.sqrt(math.log(length)) / d
    weights = moments.Weights(key, key, gain / d, 1 / d, gain / d, gain / d)
    model = moments.Transformer(
        layers, d, 1, length, d, norm=norm, weights=weights, skip_scale=alpha
    )
    found = random_energy(model, correlation=0.2)
    q, p = 1.0, 0.2
    for n in range(layers):
        size, pair = (q, p) if norm == "post" else (1.0, p / q)
        critical = math.sqrt(2 / (size * (size - pair)))
        share = max(0.0, 1 - critical / beta)
        assert found.participation[n] == pytest.approx(share, abs=1e-12)
        assert found.frozen[n] == (beta > critical)
        q = gain * (pair + (size - pair) * share) + alpha**2 * q
        p = gain * pair + alpha**2 * p
        if norm == "post":
            q, p = 1.0, p / q
        size, pair = (q, p) if norm == "post" else (1.0, p / q)
        r = pair / size
        cosine = (math.sqrt(1 - r * r) + r * (math.pi - math.acos(r))) / math.pi
        q = alpha**2 * q + gain**2 / 2 * size
        p = alpha**2 * p + gain**2 / 2 * size * cosine
        if norm == "post":
            q, p = 1.0, p / q
        assert found.variance[n + 1] == pytest.approx(q, rel=1e-12)
        assert found.correlation[n + 1] == pytest.approx(p / q, rel=1e-9)


def test_a_wide_model_comes_near_it() -> None:
    """Where attention is far from frozen: d 4096, 4096 tokens, correlations within 3e-3."""
    d = 4096
    weights = moments.Weights(0.3 / d, 0.3 / d, 1 / d, 1 / d, 1 / d, 1 / (4 * d))
    model = moments.Transformer(6, d, 16, d, weights=weights, activation="gelu")
    limit = random_energy(model, correlation=0.3)
    found = moments.predict(model, correlation=0.3)
    assert np.allclose(found.correlation, limit.correlation, atol=3e-3)
    assert np.allclose(found.variance, limit.variance, rtol=3e-3)
    assert not limit.frozen.any()


def test_what_that_theory_does_not_have() -> None:
    for changes in ({"dropout": 0.1}, {"causal": True}, {"norm": "sandwich"}):
        with pytest.raises(moments.DomainError, match=next(iter(changes))):
            random_energy(POST.replace(**changes))


# --- lines ----------------------------------------------------------------------------------------


def test_lines_over_a_map() -> None:
    d = 64
    weights = moments.Weights(1 / d, 1 / d, 1 / d, 1 / d, 1 / d, 1 / (4 * d))
    model = moments.Transformer(2, d, 4, 16, norm="post", weights=weights)
    axes = {
        "weights.query": [0.002, 0.01, 0.05],
        "weights.value": [1e-4, 1e-2],
        "dropout": [0.1],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        sweep = moments.sweep(model, axes, correlation=0.3)
    kinds = ("angle", "gradient", "entropy", "rank", "correlation")
    lines = boundaries(sweep, "weights.query", "weights.value", kinds, correlation=0.5)
    plain = model.replace(dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0)
    for i, query in enumerate(axes["weights.query"]):
        for j, value in enumerate(axes["weights.value"]):
            one = plain.replace(weights=weights.replace(query=query, value=value))
            limit = random_energy(one, correlation=0.3)
            ratio = limit.logit_variance.max() / limit.critical_logit_variance
            assert lines[2].values[i, j] == pytest.approx(math.log(ratio))
            assert lines[3].values[i, j] == pytest.approx(limit.correlation[-1])
    last = exponents(one)
    assert lines[0].values[-1, -1] == pytest.approx(last.angle, abs=1e-5)
    assert lines[1].values[-1, -1] == pytest.approx(last.gradient, abs=1e-6)
    assert np.array_equal(lines[4].values, sweep["correlation"][:, :, 0])
    figure = sweep.plot("weights.query", "weights.value", "correlation")
    draw(figure, sweep, "weights.query", "weights.value", lines)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(names) == 5
    assert names[3].endswith("not on this map") == (
        lines[3].values.min() > 0.5 or lines[3].values.max() < 0.5
    )
    with pytest.raises(moments.DomainError, match="kinds"):
        boundaries(sweep, "weights.query", "weights.value", ("edge",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        third = moments.sweep(model, axes | {"correlation": [0.3, 0.6]})
    again = boundaries(third, "weights.query", "weights.value", kinds[2:4], correlation=0.5)
    for line, other in zip(lines[2:4], again, strict=True):
        assert np.array_equal(line.values, other.values)  # at the first value of a third axis
