"""The declaration: what it accepts, what it says when it does not, copies and files."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest

import moments
from moments import Embedding, Transformer, Weights
from moments.errors import DomainError, MomentsError
from moments.model.summary import in_short

BASE: dict[str, Any] = {"layers": 3, "d_model": 64, "heads": 4, "seq_len": 32}


def model(**changes: Any) -> Transformer:
    return Transformer(**{**BASE, **changes})


# --- validation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value", "allowed"),
    [
        ("layers", 0, "an integer of at least 1"),
        ("layers", 2.0, "an integer"),
        ("layers", True, "an integer"),
        ("d_model", 1, "at least 2"),
        ("heads", 0, "at least 1"),
        ("heads", 5, "a divisor of d_model = 64; change one of them, or pass d_head"),
        ("seq_len", 0, "at least 1"),
        ("d_ff", 0, "at least 1"),
        ("d_head", -8, "at least 1"),
        ("norm", "prepost", "one of 'pre', 'post', 'none'"),
        ("normalization", "batchnorm", "'layernorm'"),
        ("activation", "step", "one of relu, gelu"),
        ("dropout", 1.0, r"\[0, 1\); pass 0.1 for ten percent"),
        ("dropout", -0.1, r"\[0, 1\)"),
        ("dropout", "0.1x", r"a number inside \[0, 1\)"),
        ("dropout", math.nan, r"\[0, 1\)"),
        ("attention_dropout", 10, r"\[0, 1\)"),
        ("causal", 1, "True or False"),
        ("skip_scale", 0.0, "amplitudes"),
        ("branch_scale", [1.0, -1.0, 1.0], "amplitudes"),
        ("skip_scale", [[1.0, 1.0, 1.0]], "one per layer"),
        ("branch_scale", [[1.0, 1.0], [1.0, 0.5], [1.0, -1.0]], "amplitudes"),
        ("kv_heads", 3, "a divisor of heads"),
        ("norm_groups", 5, "a divisor of 64"),
        ("post_layers", 1, "norm='mix'"),
        ("window", [4, 4], "one per layer"),
        ("window", 0, "at least 1"),
        ("qk_norm", "batchnorm", "None, 'rmsnorm', 'layernorm'"),
        ("rotary", True, "a moments.Rotary, or None"),
        ("head", "tied", "a moments.Head, or None"),
        ("skip_scale", [1.0, 1.0], r"one number, or one per layer \(3\)"),
        ("branch_scale", [], "inside"),
        ("layernorm_scaling", 1, "one of False, True, 'after-norm'"),
        ("norm_epsilon", -1e-5, "inside"),
        ("weights", {"query": 1.0}, "a moments.Weights, or None"),
        (
            "embedding",
            32000,
            "a moments.Embedding or moments.PatchEmbedding or moments.SoundEmbedding, or None",
        ),
    ],
)
def test_bad_values_are_named(argument: str, value: Any, allowed: str) -> None:
    with pytest.raises(DomainError, match=rf"^{argument} = .*must be .*{allowed}") as caught:
        model(**{argument: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MomentsError)
    if np.ndim(value) == 0 and not isinstance(value, dict):
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("vocab_size", 1),
        ("vocab_size", 3.5),
        ("token_variance", 0.0),
        ("token_variance", math.inf),
        ("position_variance", -1.0),
        ("segment_variance", math.nan),
        ("norm", "yes"),
        ("dropout", 1.0),
        ("norm_epsilon", -1.0),
    ],
)
def test_bad_embeddings_are_named(argument: str, value: Any) -> None:
    fields = {"vocab_size": 100, "token_variance": 1.0, argument: value}
    with pytest.raises(DomainError, match=rf"^{argument} = .*must be"):
        Embedding(**fields)


def test_bad_weights_are_named() -> None:
    with pytest.raises(DomainError, match=r"weights.key = -1.0.*square of a deviation"):
        Weights(1.0, -1.0, 1.0, 1.0, 1.0, 1.0)
    three = Weights.normal(0.01).replace(value=[0.01, 0.02])
    with pytest.raises(DomainError, match=r"weights.value = '2 numbers'.*one per layer \(3\)"):
        model(weights=three)
    with pytest.raises(DomainError, match="output_divisor = 0"):
        Weights.normal(0.01, output_divisor=0)
    with pytest.raises(DomainError, match="heads"):
        Weights.xavier(64, 0)
    with pytest.raises(DomainError, match=r"weights field .* is missing"):
        Weights.from_dict({"query": 1.0})


def test_layernorm_scaling_needs_a_norm() -> None:
    with pytest.raises(DomainError, match="layernorm_scaling = True: must be False where norm"):
        model(norm="none", layernorm_scaling=True)


# --- defaults -------------------------------------------------------------------------------------


def test_defaults_follow_their_parents() -> None:
    m = model(dropout=0.2)
    assert (m.d_ff, m.d_head, m.attention_dropout) == (256, 16, 0.2)
    assert m.weights == Weights.xavier(64, 4, 256)


def test_replace_recomputes_what_was_left_out() -> None:
    m = model(dropout=0.2).replace(d_model=128, heads=2, dropout=0.3)
    assert (m.d_ff, m.d_head, m.attention_dropout) == (512, 64, 0.3)
    assert m.weights == Weights.xavier(128, 2, 512)
    again = m.replace(d_ff=100)
    assert again.d_ff == 100
    assert again.weights == Weights.xavier(128, 2, 100)
    assert again.replace(d_model=256).d_ff == 100


def test_replace_keeps_what_was_given() -> None:
    weights = Weights.normal(0.02**2)
    m = model(d_ff=96, attention_dropout=0.0, weights=weights, d_head=8)
    changed = m.replace(d_model=128, dropout=0.5)
    assert (changed.d_ff, changed.attention_dropout, changed.d_head) == (96, 0.0, 8)
    assert changed.weights == weights
    assert changed.replace(weights=None, d_ff=None).weights == Weights.xavier(128, 4, 512, 8)
    assert m.d_model == 64


def test_replace_validates() -> None:
    with pytest.raises(DomainError, match=r"field = 'width': must be one of .*d_model"):
        model().replace(width=12)
    with pytest.raises(DomainError, match="a divisor of d_model = 66"):
        model().replace(d_model=66)
    with pytest.raises(DomainError, match="one per layer"):
        model(skip_scale=[1.0, 0.9, 0.8]).replace(layers=4)
    with pytest.raises(DomainError, match="field = '_defaulted'"):
        model().replace(_defaulted=frozenset())


# --- values per layer -----------------------------------------------------------------------------


def test_what_each_layer_has() -> None:
    weights = Weights.normal(0.01).replace(query=[0.1, 0.2, 0.3], ffn_out=(1, 2, 3))
    m = model(
        weights=weights, skip_scale=[1, 0.5, 0.25], branch_scale=2, layernorm_scaling="after-norm"
    )
    assert [m.layer_weights(n).query for n in (1, 2, 3)] == [0.1, 0.2, 0.3]
    assert [m.layer_weights(n).ffn_out for n in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert [m.layer_weights(n).key for n in (1, 2, 3)] == [0.01] * 3
    assert m.skip_scales.tolist() == [1.0, 0.5, 0.25]
    assert m.branch_scales.tolist() == [2.0] * 3
    assert m.norm_scales == pytest.approx([1, 1 / math.sqrt(2), 1 / math.sqrt(3)], rel=1e-15)
    assert model().norm_scales.tolist() == [1.0] * 3


def test_arrays_are_taken_as_lists() -> None:
    m = model(branch_scale=np.array([1.0, 2.0, 3.0]))
    assert m.branch_scale == (1.0, 2.0, 3.0)
    assert hash(m) == hash(model(branch_scale=[1, 2, 3]))
    weights = Weights.normal(0.01).replace(key=np.array([0.1, 0.2, 0.3]))
    assert weights.key == (0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (Weights.xavier(64, 4, 100), (2 / 80, 2 / 80, 2 / 80, 1 / 64, 2 / 164, 2 / 164)),
        (Weights.torch_default(64, 100), (*[1 / 192] * 5, 1 / 300)),
        (Weights.normal(4e-4), (4e-4,) * 6),
        (
            Weights.normal(4e-4, output_divisor=24),
            (4e-4, 4e-4, 4e-4, 4e-4 / 24, 4e-4, 4e-4 / 24),
        ),
    ],
)
def test_named_initialisations(weights: Weights, expected: tuple[float, ...]) -> None:
    assert dataclasses.astuple(weights)[:6] == pytest.approx(expected, rel=1e-15)
    assert dataclasses.astuple(weights)[6:] == (None,) * 6 + ("normal",)


def test_torch_default_is_what_torch_draws() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    expected = Weights.torch_default(96, 384)
    drawn = {
        "ffn_in": torch.nn.Linear(96, 384).weight,
        "ffn_out": torch.nn.Linear(384, 96).weight,
    }
    for name, weight in drawn.items():
        # n uniform draws: relative standard error of the variance sqrt(0.8/n).
        error = 4 * math.sqrt(0.8 / weight.numel())
        assert float(weight.detach().var()) == pytest.approx(getattr(expected, name), rel=error)


# --- immutability, equality, files ----------------------------------------------------------------


def full_model() -> Transformer:
    return model(
        d_ff=100,
        norm="post",
        activation="gelu",
        dropout=0.1,
        attention_dropout=0.2,
        causal=True,
        skip_scale=[1.0, 0.5, 0.25],
        branch_scale=0.7,
        layernorm_scaling=True,
        weights=Weights.normal(0.02**2).replace(value=[0.1, 0.2, 1 / 3]),
        embedding=Embedding(1000, 0.1, 0.2, 0.3, norm=True, dropout=0.1, norm_epsilon=1e-12),
        d_head=24,
        norm_epsilon=1e-5,
    )


@pytest.mark.parametrize("original", [model(), full_model()], ids=["plain", "full"])
def test_json_round_trip(original: Transformer) -> None:
    text = json.dumps(original.to_dict(), allow_nan=False)
    read = Transformer.from_dict(json.loads(text))
    assert read == original
    assert hash(read) == hash(original)
    assert json.loads(text)["format"] == 1
    # What was left to a default is still a default after reading.
    assert read.replace(d_model=96, heads=3) == original.replace(d_model=96, heads=3)


def test_unreadable_dictionaries() -> None:
    data = model().to_dict()
    for version in (None, 99, "1"):
        with pytest.raises(DomainError, match=r"^format = .*must be 1"):
            Transformer.from_dict({**data, "format": version})
    with pytest.raises(DomainError, match="field = 'depth'"):
        Transformer.from_dict({**data, "depth": 3})
    with pytest.raises(DomainError, match="embedding field = 'rows'"):
        Transformer.from_dict({**data, "embedding": {"rows": 3}})
    with pytest.raises(DomainError, match="weights"):
        Transformer.from_dict({**data, "weights": {"query": 1.0}})


@pytest.mark.parametrize("missing", ["layers", "d_model", "heads", "seq_len"])
def test_a_dictionary_without_a_required_field(missing: str) -> None:
    data = model().to_dict()
    del data[missing]
    with pytest.raises(DomainError, match=missing):
        Transformer.from_dict(data)


def test_an_embedding_without_a_required_field() -> None:
    with pytest.raises(DomainError, match="token_variance"):
        Embedding.from_dict({"vocab_size": 100})


@pytest.mark.parametrize("thing", [model(), Weights.normal(1.0), Embedding(10, 1.0)])
def test_declarations_do_not_change(thing: Any) -> None:
    for field in dataclasses.fields(thing):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field.name, 1)


def test_arrays_of_a_model_are_copies() -> None:
    m = model()
    m.skip_scales[0] = 7.0
    assert m.skip_scales[0] == 1.0


def test_displays() -> None:
    m = full_model()
    text, html, short = str(m), m._repr_html_(), repr(m)
    for part in ("3 layers, d_model 64", "causal", "gelu", "skip 0.25 to 1", "1000 tokens"):
        assert part in text
        assert part in html
    assert short.startswith("Transformer(layers=3, d_model=64")
    assert "_defaulted" not in short
    assert html.startswith("<table>")
    assert eval(repr(model()), {"Transformer": Transformer, "Weights": Weights}) == model()


def test_predictions_can_be_shown() -> None:
    p = moments.predict(model(), correlation=0.3, theory="published")
    assert "3 layers, published" in repr(p)
    assert p.table().count("\n") > 5
    assert "<pre>" in p._repr_html_()
    data = json.loads(p.to_json())
    assert Transformer.from_dict(data["model"]) == p.model
    assert data["variance"] == p.variance.tolist()


def test_the_line_about_a_model_has_the_field_s_names() -> None:
    swiglu = model(heads=4, kv_heads=2, activation="silu", gated=True)
    assert "4 query heads on 2 key heads, SwiGLU" in in_short(swiglu)
    experts = swiglu.replace(ffn=moments.Experts(8, 2))
    assert "8 experts, 2 per token" in in_short(experts)
