"""Planted faults are found: in noise-free predictions, in simulations and in live modules."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import moments
from moments import Transformer
from moments.show.diagnosis import diagnose_case
from moments.show.differences import Case, differences
from moments.torch.batches import inputs_of, shifted_left, shifted_right

torch = pytest.importorskip("torch")

from moments.torch.diagnose import _large  # noqa: E402

DECLARED = Transformer(layers=4, d_model=48, heads=4, seq_len=12, dropout=0.1)
INPUT = {"correlation": 0.3}


def with_matrix(model: Transformer, matrix: str, factor: float, layer: int) -> Transformer:
    """One matrix of one layer at another variance."""
    assert model.weights is not None
    values = [float(model.weights.of(matrix))] * model.layers  # type: ignore[arg-type]
    values[layer - 1] *= factor
    return model.replace(weights=model.weights.replace(**{matrix: values}))


@pytest.fixture(scope="module")
def template() -> moments.Measurement:
    return moments.simulate(DECLARED, **INPUT, seeds=1, batch=1)


def as_measured(template: moments.Measurement, model: Transformer) -> moments.Measurement:
    """What a measurement of `model` is without any noise."""
    p = moments.predict(model, **INPUT)
    return dataclasses.replace(template, variance=p.variance, grad_variance=p.grad_variance)


def diagnosed(measured: moments.Measurement, found: Transformer, **options: Any) -> moments.Report:
    features = differences(DECLARED, found)
    return diagnose_case(Case(DECLARED, dict(INPUT)), measured, features, **options)


# --- the features ---------------------------------------------------------------------------------


def test_what_differs_is_named_with_its_layers_and_numbers() -> None:
    (feature,) = differences(DECLARED, with_matrix(DECLARED, "ffn_out", 15.8, 3))
    assert feature.name == "ffn_out"
    assert feature.layers == (3,)
    assert feature.ratio == pytest.approx(15.8)
    assert feature.words == "ffn_out in layer 3: variance 0.132, declared 0.00833 (15.8x)"
    (feature,) = differences(DECLARED.replace(branch_scale=0.2), DECLARED)
    expected = "missing branch multiplier (beta) in every layer: 1, declared 0.2 (5x)"
    assert feature.words == expected
    halves = DECLARED.replace(branch_scale=[(1.0, 0.5)] * 4)
    (feature,) = differences(DECLARED, halves)
    assert "feed-forward block" in feature.words
    (feature,) = differences(DECLARED, DECLARED.replace(causal=True))
    assert feature.words == "attention mask: causal, declared full"
    assert [f.name for f in differences(DECLARED, DECLARED.replace(norm="post"))] == ["norm"]
    assert differences(DECLARED, DECLARED) == []


def test_sampling_noise_is_no_difference() -> None:
    """The mean square of n normal entries has the relative variance 2/n."""
    random = np.random.default_rng(0)
    weights = DECLARED.weights
    assert weights is not None
    entries = DECLARED.d_model**2
    drawn = {
        name: [float(getattr(weights, name)) * random.chisquare(entries) / entries for _ in "1234"]
        for name in ("query", "key", "value", "output")
    }
    assert differences(DECLARED, DECLARED.replace(weights=weights.replace(**drawn))) == []
    shifted = {name: [1.15 * v for v in values] for name, values in drawn.items()}
    found = differences(DECLARED, DECLARED.replace(weights=weights.replace(**shifted)))
    assert [f.name for f in found] == ["query", "key", "value", "output"], "15 % on average are"


def test_features_of_an_encoder_change_the_encoder() -> None:
    model = DECLARED.replace(causal=True, encoder=Transformer(2, 48, 4, 10))
    assert model.encoder is not None
    other = model.replace(encoder=model.encoder.replace(activation="gelu"))
    (feature,) = differences(model, other)
    assert feature.words.startswith("encoder activation: gelu, declared relu")
    assert feature.apply(Case(model)).model == other


# --- the ranking ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (with_matrix(DECLARED, "ffn_out", 40.0, 2), "ffn_out"),
        (DECLARED.replace(branch_scale=0.3), "branch_scale"),
        (DECLARED.replace(skip_scale=0.7), "skip_scale"),
        (DECLARED.replace(dropout=0.5), "dropout"),
        (DECLARED.replace(norm="post"), "norm"),
    ],
    ids=["matrix", "branch", "skip", "dropout", "norm"],
)
def test_one_fault_explains_all(
    template: moments.Measurement, found: Transformer, name: str
) -> None:
    diagnosis = diagnosed(as_measured(template, found), found)
    assert not diagnosis.expected
    assert diagnosis.causes()[0].kind == name
    assert diagnosis.causes()[0].explains > 0.85
    assert diagnosis.explained > 0.85
    cause = diagnosis.causes()[0].reason.rpartition(": ")[0]
    outside = diagnosis.to_frame().query("passed == False")
    assert (outside.note == cause).mean() > 0.8
    assert cause in str(diagnosis).replace("\n   ", " ")


def test_a_bias_differs_where_its_draws_cannot_be_of_the_declared_variance() -> None:
    """5 standard deviations of a mean square of n Gaussian entries are 5 sqrt(2 / n)."""
    declared = DECLARED.replace(biases=moments.Biases.of("query", "ffn_in").replace(ffn_in=0.01))

    def found(**biases: float | None) -> list[str]:
        other = declared.replace(biases=declared.biases.replace(**biases))  # type: ignore[union-attr]
        return [feature.words for feature in differences(declared, other)]

    bound = 5 * (2 / (4 * DECLARED.d_model) / DECLARED.layers) ** 0.5
    assert found(ffn_in=0.01 * np.exp(0.9 * bound)) == []
    assert found(ffn_in=0.01 * np.exp(1.1 * bound)) != []
    assert found(gate=None, query=None, value=None) == []
    assert found(ffn_in=None) == ["biases: variance of ffn_in 0 (declared 0.01)"]
    assert found(query=0.1) == ["biases: variance of query 0.1 (declared 0)"]


def test_a_fault_is_told_from_what_differs_besides(template: moments.Measurement) -> None:
    """The query's variance hardly moves uniform attention; the value's does."""
    found = with_matrix(with_matrix(DECLARED, "query", 0.5, 3), "value", 50.0, 2)
    diagnosis = diagnosed(as_measured(template, found), found)
    by_name = {cause.kind: cause.explains for cause in diagnosis.causes()}
    assert diagnosis.causes()[0].kind == "value"
    assert by_name["value"] > 0.9
    assert abs(by_name["query"]) < 0.05
    assert any(
        found.kind == "query" and found.reason.endswith("no part of the difference")
        for found in diagnosis.findings
    )


def test_faults_that_make_up_for_each_other_are_both_seen(template: moments.Measurement) -> None:
    found = with_matrix(DECLARED, "ffn_out", 30.0, 4).replace(branch_scale=0.45)
    diagnosis = diagnosed(as_measured(template, found), found)
    by_name = {cause.kind: cause.explains for cause in diagnosis.causes()}
    assert by_name["branch_scale"] > 0.2
    assert abs(by_name["ffn_out"]) > 0.05
    assert diagnosis.explained > 0.9


def test_what_nothing_explains_is_said(template: moments.Measurement) -> None:
    diagnosis = diagnosed(as_measured(template, DECLARED.replace(skip_scale=0.6)), DECLARED)
    assert not diagnosis.expected
    assert diagnosis.causes() == ()
    notes = diagnosis.to_frame().query("passed == False").note
    assert len(notes)
    assert (notes == "no difference explains it").all()
    assert [found.kind for found in diagnosis.findings] == ["not as predicted"]


def test_a_right_network_is_expected(template: moments.Measurement) -> None:
    diagnosis = diagnosed(template, DECLARED.replace(activation="gelu"))
    assert diagnosis.expected
    assert math.isnan(diagnosis.explained) or diagnosis.explained < 0.5
    assert "is expected" in str(diagnosis)


def test_a_fault_in_a_simulation() -> None:
    found = with_matrix(DECLARED, "output", 30.0, 3).replace(causal=True)
    measured = moments.simulate(found, **INPUT, seeds=1, batch=2, seed=4)
    diagnosis = diagnosed(measured, found)
    assert diagnosis.causes()[0].kind == "output"
    assert diagnosis.explained > 0.6
    assert diagnosis.findings[0].kind == "output"


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_in_the_words_of_predict() -> None:
    labels = np.array([[5, 6, -100, 7]])
    assert shifted_left(labels).tolist() == [[6, -100, 7, -100]]
    assert shifted_right(labels, 1).tolist() == [[1, 5, 6, 1]]
    embedding = moments.Embedding(vocab_size=10, token_variance=1.0)
    model = Transformer(1, 8, 2, 4, causal=True, embedding=embedding, head=moments.Head())
    batch = {"input_ids": labels % 10, "labels": labels, "attention_mask": np.ones((1, 4))}
    given = inputs_of(model, batch)
    assert set(given) == {"token_ids", "targets", "tokens"}
    np.testing.assert_array_equal(given["targets"], shifted_left(labels))
    assert inputs_of(model.replace(embedding=None, head=None), batch) == {}


# --- live modules ---------------------------------------------------------------------------------


def encoder(copies: bool = False, **options: Any) -> Any:
    """Three layers drawn one by one; nn.TransformerEncoder by itself holds copies of one."""
    torch.manual_seed(1)
    options = {"dropout": 0.1, "norm_first": True, "batch_first": True} | options
    layers = [torch.nn.TransformerEncoderLayer(48, 4, 96, **options) for _ in range(3)]
    module = torch.nn.TransformerEncoder(layers[0], 3, enable_nested_tensor=False)
    if not copies:
        module.layers = torch.nn.ModuleList(layers)
    return module


def test_a_dropout_that_the_config_does_not_say() -> None:
    pytest.importorskip("transformers")
    import small_modules

    module = small_modules.family_module("gpt2", 2, 64)
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.3
    ids = torch.arange(12)[None]
    diagnosis = moments.torch.diagnose(module, {"input_ids": ids, "labels": ids})
    assert "dropout" in {found.kind for found in diagnosis.findings}


def test_layers_that_are_copies_of_one_are_told() -> None:
    batch = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(2))
    diagnosis = moments.torch.diagnose(encoder(copies=True), batch)
    assert not diagnosis.expected
    first = diagnosis.causes()[0]
    assert first.kind == "copied layers"
    assert first.reason.startswith("query, key, value, output, ffn_in, ffn_out")
    assert "hold the same entries in layers 1, 2, 3" in first.reason
    assert first.layers == (1, 2, 3)
    assert first.explains > 0.5
    assert "not as predicted" not in {found.kind for found in diagnosis.findings}


def test_a_live_module_with_one_wrong_matrix() -> None:
    module = encoder()
    batch = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(2))
    before = {name: p.clone() for name, p in module.named_parameters()}
    right = moments.torch.diagnose(module, batch)
    assert right.expected
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    total = right.comparison.outputs().set_index("quantity").loc["gradient_norm"]
    assert total.predicted == pytest.approx(total.measured, rel=0.1)
    with torch.no_grad():
        module.layers[1].linear2.weight.mul_(12)
    wrong = moments.torch.diagnose(module, batch)
    assert not wrong.expected
    assert wrong.causes()[0].kind == "ffn_out"
    assert wrong.causes()[0].layers == (2,)
    assert wrong.causes()[0].explains > 0.7


def test_a_live_module_with_a_mask_and_without_dropout() -> None:
    batch = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(2)) + 2.0
    mask = torch.nn.Transformer.generate_square_subsequent_mask(12)
    declared = moments.torch.diagnose(encoder(dropout=0.0), {"src": batch, "mask": mask}, None)
    assert "causal" in {cause.kind for cause in declared.causes()}
    model = declared.comparison.prediction.model.replace(dropout=0.3)
    found = moments.torch.diagnose(encoder(dropout=0.0), batch, model)
    by_name = {cause.kind: cause for cause in found.causes()}
    assert "causal" not in by_name
    assert by_name["dropout"].reason.startswith("dropout: 0, declared 0.3")


@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")  # its authors use Post-LN
def test_a_scheme_that_was_never_applied() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=48,
        n_head=4,
        vocab_size=200,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(200, (2, 8), generator=torch.Generator().manual_seed(3))
    assert moments.torch.diagnose(module, {"input_ids": ids}).expected
    diagnosis = moments.torch.diagnose(module, {"input_ids": ids}, "ds-init")
    assert not diagnosis.expected
    assert {"value", "output", "ffn_in", "ffn_out"} <= {c.kind for c in diagnosis.causes()}
    assert diagnosis.explained > 0.8


def test_a_long_diagnosis_tells_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, the verdict before the search for causes."""
    batch = torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(2))
    diagnosis = moments.torch.diagnose(encoder(copies=True), batch, progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[0] == "measuring TransformerEncoder, 1 draw"
    verdict = lines.index(diagnosis.comparison.verdict())
    assert lines[verdict - 1] == "predicting 3 layers at 12 tokens"
    assert lines[verdict + 1].startswith("ranking 2 differences: 5 predictions of some ")
    ranked = [line for line in lines[verdict + 2 :] if " of 2: " in line]
    assert len(ranked) == 2
    moments.torch.diagnose(encoder(copies=True), batch)
    assert capsys.readouterr().err == "", "small ones are silent"


def test_which_diagnoses_are_long() -> None:
    large, ids = torch.nn.Linear(8000, 8000, device="meta"), torch.zeros(4, 64)
    assert _large(large, {"input_ids": ids}, 1)
    assert _large(large, ids[:1], 4)
    assert not _large(large, ids[:1], 1)


def test_what_cannot_be_diagnosed_says_why() -> None:
    with pytest.raises(moments.DomainError, match="layers of the plan"):
        moments.torch.diagnose(encoder(), torch.randn(1, 8, 48), DECLARED)
