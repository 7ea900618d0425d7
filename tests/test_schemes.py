"""Schemes set what their papers say."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

import moments
from moments.scheme import Scheme, schemes


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
    assert scaled.head.output_scale == pytest.approx(1 / math.sqrt(768))


def test_dslm_makes_every_embedding_one() -> None:
    """The sum of all tables after dropout, sinusoids and a factor on the token rows included."""
    for embedding in (
        moments.Embedding(100, 0.5, dropout=0.2),
        moments.Embedding(100, 0.5, 0.1, dropout=0.2, scale=16.0),
        moments.Embedding(100, 0.5, dropout=0.2, positions="sinusoidal"),
    ):
        scaled = model(embedding=embedding).with_scheme("dslm")
        assert scaled.embedding.variance == pytest.approx(0.8, rel=1e-12)
    image = moments.PatchEmbedding(32, 8, 1.0, position_variance=1.0, dropout=0.2)
    scaled = model(embedding=image, seq_len=17).with_scheme("dslm", input_correlation=0.4)
    assert scaled.embedding.patch_variance == pytest.approx(0.4 / (3 * 64))
    assert scaled.embedding.class_variance == scaled.embedding.position_variance == 0.4


def test_simplified_dslm() -> None:
    scaled = model().with_scheme("dslm", simplified=True)
    weights = scaled.weights
    assert weights is not None
    assert weights.value == weights.output == weights.ffn_in == weights.ffn_out


@pytest.mark.parametrize("scheme", schemes(), ids=lambda scheme: scheme.name)
def test_every_scheme_sets_only_what_it_says(scheme: Scheme) -> None:
    placement = (*scheme.placements, "pre")[0]
    other = "pre" if scheme.name == "post-ln" else "post"
    norm = other if "norm" in scheme.sets else placement
    base = model(
        embedding=moments.Embedding(100, 0.02), head=moments.Head(loss=None), norm=norm, layers=4
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        options = {"temperature": "printed"} if scheme.name == "noci" else {}
        changed = base.with_scheme(scheme.name, **options)
        assert np.all(np.isfinite(moments.predict(changed, tokens=False).grad_variance))
        assert changed.with_scheme("post-ln").norm == "post"
    before, after = base.to_dict(), changed.to_dict()
    touched = {name for name in before if before[name] != after[name]}
    assert touched
    assert touched <= set(scheme.sets)
    assert str(scheme.source)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dlsm", {}, "dslm"),
        ("dslm", {"kk": 1}, "k, alpha"),
        ("dslm", {"k": 12.0}, "below layers"),
        ("dslm", {}, "input_correlation"),
        ("dslm", {"input_correlation": 0.0}, "input_correlation"),
        ("post-ln", {"k": 1}, "no options"),
    ],
)
def test_bad_schemes_and_options(name: str, options: dict[str, float], words: str) -> None:
    with pytest.raises(moments.DomainError, match=words):
        model().with_scheme(name, **options)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_dslm_does_not_feel_its_depth(norm: str) -> None:
    """192 and 1000 layers: variance near 1, the gradient's ratio the same; not so with Xavier."""
    ratios: dict[str, list[np.ndarray]] = {"dslm": [], "xavier": []}
    for layers in (192, 1000):
        plain = moments.Transformer(layers, 64, 4, 32, norm=norm, dropout=0.1)
        scaled = plain.with_scheme("dslm", input_correlation=0.25 / 0.9)
        for name, declared in (("dslm", scaled), ("xavier", plain)):
            found = []
            for sent in (0.0, 0.8):
                p = moments.predict(declared, correlation=0.25, grad_correlation=sent)
                found.append(p.grad_variance[0] / p.grad_variance[-1])
                if name == "dslm":
                    assert np.abs(p.variance - 1).max() < 0.1
            ratios[name].append(np.array(found))
    near, far = ratios["dslm"]
    np.testing.assert_allclose(far, near, rtol=0.02)
    assert near.min() > 0.2
    assert near.max() < 3
    near, far = ratios["xavier"]
    assert np.all(np.abs(np.log(far / near)) > 1)


def test_dslm_keeps_parallel_blocks_at_variance_one() -> None:
    model = moments.Transformer(12, 64, 4, 32, parallel=True, activation="gelu")
    scaled = model.with_scheme("dslm", input_correlation=0.2)
    variance = moments.predict(scaled, variance=1.0, correlation=0.2).variance
    np.testing.assert_allclose(variance, 1.0, rtol=1e-9)
