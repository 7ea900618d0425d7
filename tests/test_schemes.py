"""Schemes set what their papers say."""

from __future__ import annotations

import math

import numpy as np
import pytest

import moments
from moments.scheme import schemes


def model(layers: int = 12, **changes: object) -> moments.Transformer:
    fields = {"layers": layers, "d_model": 256, "heads": 4, "seq_len": 64, "dropout": 0.1}
    return moments.Transformer(**{**fields, **changes})  # type: ignore[arg-type]


def recursion(r: float, layers: int, p: float) -> list[tuple[float, float]]:
    """Appendix M written out: correlation entering and leaving every layer."""
    beta, rows = 2 / layers, []
    r = (1 - p) * r
    for _ in range(layers):
        entering = r
        r = (1 - beta) * r + beta * (1 - p)
        ffn = r + math.sqrt(1 - r * r) / math.pi - r * math.acos(r) / math.pi
        r = (1 - beta) * r + beta * (1 - p) * ffn
        rows.append((entering, r))
    return rows


@pytest.mark.parametrize("layers", [12, 192, 1000])
@pytest.mark.parametrize(("variant", "which"), [("released", 0), ("printed", 1)])
def test_dslm_is_the_recursion(layers: int, variant: str, which: int) -> None:
    scaled = model(layers).with_scheme("dslm", input_correlation=0.227, variant=variant)
    rows = recursion(0.227, layers, 0.1)
    weights = scaled.weights
    assert weights is not None
    expected = [math.sqrt(0.9 / row[which]) / 256 for row in rows]
    np.testing.assert_allclose(weights.value, expected, rtol=1e-12)
    np.testing.assert_allclose(weights.output, expected, rtol=1e-12)
    assert weights.query == weights.key == 1 / 256
    assert weights.ffn_in == pytest.approx(math.sqrt(0.45) / 256, rel=1e-12)
    np.testing.assert_allclose(scaled.skip_scales**2, 1 - 2 / layers, rtol=1e-12)
    np.testing.assert_allclose(scaled.branch_scales**2, 2 / layers, rtol=1e-12)


@pytest.mark.parametrize("theory", ["simplified", "refined"])
def test_dslm_keeps_the_variance(theory: str) -> None:
    scaled = model(192).with_scheme("dslm", input_correlation=0.227)
    prediction = moments.predict(scaled, correlation=0.9 * 0.227, theory=theory)
    assert np.abs(prediction.variance - 1).max() < 0.05


def table_two(chosen: list[float], layers: int, r: float, p: float) -> list[float]:
    """Table 2 written out for Pre-LN: stream variances where layer l's weights expect chosen[l]."""
    beta, variance, covariance, stream = 2 / layers, 1.0, r, [1.0]
    for expected in chosen:
        attention = (covariance / variance) / expected
        variance = (1 - beta) * variance + beta * attention
        covariance = (1 - beta) * covariance + beta * (1 - p) * attention
        r = covariance / variance
        polynomial = 1 / math.pi + r / 2 + (1 / 2 - 1 / math.pi) * r**2
        variance = (1 - beta) * variance + beta
        covariance = (1 - beta) * covariance + beta * (1 - p) * polynomial
        stream.append(variance)
    return stream


@pytest.mark.parametrize(("variant", "which"), [("released", 0), ("printed", 1)])
def test_the_printed_variant_loses_variance(variant: str, which: int) -> None:
    scaled = model(12).with_scheme("dslm", input_correlation=0.227, variant=variant)
    prediction = moments.predict(scaled, correlation=0.9 * 0.227, theory="simplified")
    chosen = [row[which] for row in recursion(0.227, 12, 0.1)]
    expected = table_two(chosen, 12, 0.9 * 0.227, 0.1)
    np.testing.assert_allclose(prediction.variance, expected, rtol=1e-9)
    assert (min(expected) < 0.92) == (variant == "printed")


def test_dslm_scales_the_embedding() -> None:
    scaled = moments.preset("bert-base", seq_len=128).with_scheme("dslm")
    embedding = scaled.embedding
    assert embedding is not None
    assert embedding.token_variance == embedding.segment_variance == pytest.approx(0.9 / 3)


def test_simplified_dslm() -> None:
    scaled = model().with_scheme("dslm", simplified=True)
    weights = scaled.weights
    assert weights is not None
    assert weights.value == weights.output == weights.ffn_in == weights.ffn_out


def test_layernorm_scaling_and_xavier() -> None:
    scaled = model().with_scheme("lns")
    np.testing.assert_allclose(scaled.norm_scales**2, 1 / np.arange(1, 13))
    assert model().with_scheme("normal").with_scheme("xavier").weights == model().weights


@pytest.mark.parametrize("scheme", schemes(), ids=lambda scheme: scheme.name)
def test_every_scheme_sets_only_what_it_says(scheme: object) -> None:
    base = model(embedding=moments.Embedding(100, 0.5), norm="post")
    changed = base.with_scheme(scheme.name)  # type: ignore[attr-defined]
    before, after = base.to_dict(), changed.to_dict()
    touched = {name for name in before if before[name] != after[name]}
    assert touched
    assert touched <= set(scheme.sets)  # type: ignore[attr-defined]
    assert str(scheme.source)  # type: ignore[attr-defined]
    assert np.all(np.isfinite(moments.predict(changed).grad_variance))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dlsm", {}, "dslm"),
        ("dslm", {"kk": 1}, "k, alpha"),
        ("dslm", {"k": 12.0}, "below layers"),
        ("dslm", {}, "input_correlation"),
        ("dslm", {"input_correlation": 0.0}, "input_correlation"),
        ("lns", {"k": 1}, "no options"),
    ],
)
def test_bad_schemes_and_options(name: str, options: dict[str, float], words: str) -> None:
    with pytest.raises(moments.DomainError, match=words):
        model().with_scheme(name, **options)
