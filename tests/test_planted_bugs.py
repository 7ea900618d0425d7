"""Slips planted in five code styles, named; what is by design, passed; what is not read, refused
by name."""

from __future__ import annotations

import math
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments.show.outliers import odd_layers

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import own_styles  # noqa: E402
import planted_bugs  # noqa: E402

from moments.torch.dataflow.graph import Graph  # noqa: E402

nn = torch.nn
SLIPS = {slip.name: slip for slip in planted_bugs.SLIPS}


# --- planted --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "style", "expected"),
    [
        ("output zero in one layer", "nanoGPT", "named"),
        ("value x 3 in one layer", "Llama", "named"),
        ("no mask", "torch", "named"),
        ("no mask in one layer", "einsum", "named"),
        ("Post-LN in one layer", "nanoGPT", "named"),
        ("depth scale 1/N", "Llama", "named"),
        ("embedding of std 1", "Llama", "named"),
        ("tied head forgotten", "GPT-2", "named"),
        ("fans transposed, ffn variances swapped", "einsum", "named"),
        ("gains of one layer 0.3", "torch", "named"),
        ("residual multiplier forgotten", "nanoGPT", "named"),
        ("shared matrix", "einsum", "named"),
        ("huge epsilon", "Llama", "named"),
        ("no sum around attention", "nanoGPT", "named"),
        ("no sum around the feed-forward block", "torch", "named"),
        ("no sum around attention in one layer", "einsum", "named"),
        ("one block in every place", "nanoGPT", "named"),
        ("frozen layer", "torch", "noted"),
        ("dropout in one layer", "einsum", "noted"),
        ("rotary on values", "Llama", "noted"),
        ("residual multiplier beside depth scale", "nanoGPT", "noted"),
        ("LayerNorm scaling on attention only", "Llama", "noted"),
    ],
)
def test_a_planted_bug_is_named(name: str, style: str, expected: str) -> None:
    """A few of those that `benchmarks/planted_bugs.py` counts."""
    word, said = planted_bugs.outcome(SLIPS[name], style)
    assert word == expected, said


@pytest.mark.slow
@pytest.mark.parametrize("style", ["nanoGPT", "Llama"])
def test_what_is_wrong_in_one_layer_fails_a_users_test(style: str) -> None:
    for name in ("output zero in one layer", "no mask", "value x 3 in one layer"):
        module, _ = planted_bugs.planted(SLIPS[name], style, 4)
        with pytest.raises(AssertionError):
            moments.check(module).assert_healthy()


@pytest.mark.parametrize("style", planted_bugs.STYLES)
def test_correct_modules_of_every_style_pass(style: str) -> None:
    report = moments.check(planted_bugs.built(style, "gpt2", 11))
    assert report.healthy, str(report)
    heads = "4 query heads" if style == "Llama" else "4 heads"
    for words in ("causal attention", "Pre-LN", heads, "4 layers of width 64"):
        assert words in report.verdict()


@pytest.mark.parametrize("style", ["nanoGPT", "Llama", "einsum"])
def test_blocks_that_start_as_the_identity_are_by_design(style: str) -> None:
    module = planted_bugs.built(style, "lecun", 2)
    with torch.no_grad():
        for block in planted_bugs.Parts(module).blocks("output", "ffn_out"):
            block.zero_()
    report = moments.check(module)
    assert report.healthy, str(report)
    assert "layers are the identity at step 0, by design" in str(report)


def test_outward_matrices_of_zeros_break_no_promise_of_a_config() -> None:
    """Of a scheme that is asked for they do."""
    pytest.importorskip("transformers")
    from small_modules import family_module

    module = family_module("gpt2", 2, 48)
    for block in module.transformer.h:
        torch.nn.init.zeros_(block.attn.c_proj.weight)
        torch.nn.init.zeros_(block.mlp.c_proj.weight)
    report = moments.check(module)
    assert report.healthy, str(report)
    assert "layers are the identity at step 0, by design" in str(report)
    assert not moments.check(module, scheme="scaled-init").healthy


@pytest.mark.parametrize(
    ("roles", "kind"),
    [(("value",), "zero matrix"), (("value", "output"), "zero matrix"), (("query",), "")],
)
def test_a_projection_that_is_zero_in_every_layer(roles: tuple[str, ...], kind: str) -> None:
    module = planted_bugs.built("Llama", "lecun", 2)
    with torch.no_grad():
        for block in planted_bugs.Parts(module).blocks(*roles):
            block.zero_()
    report = moments.check(module)
    assert [f.kind for f in report.findings] == [kind] * bool(kind), str(report)
    assert not kind or not any("by design" in note for note in report.notes)
    if not kind:
        assert any("query is zero in every layer" in note for note in report.notes)


def test_a_zero_head_is_named() -> None:
    module = planted_bugs.built("Llama", "lecun", 2)
    with torch.no_grad():
        module.layers["1"].attention.wo.weight[:, 16:32] = 0
    (found,) = (f for f in moments.check(module).findings if f.kind == "zero head")
    assert found.layers == (2,)
    assert "head 2 " in found.reason
    assert found.where == ("layers.1.attention.wo.weight",)


def test_a_declared_mask_that_the_module_lacks_is_an_error() -> None:
    module, _ = planted_bugs.planted(SLIPS["no mask"], "nanoGPT", 2)
    plan = moments.torch.describe(planted_bugs.built("nanoGPT", "gpt2", 2)).model
    found = moments.check(module, scheme=plan).findings
    assert ("error", "attention mask") in {(f.severity, f.kind) for f in found}
    right = planted_bugs.built("nanoGPT", "gpt2", 2)
    assert moments.check(right, scheme=plan).healthy
    other = plan.replace(rotary=moments.Rotary(), normalization="rmsnorm")
    reasons = [f.reason for f in moments.check(right, scheme=other).findings]
    for field in ("rotary", "normalization"):
        assert any(reason.startswith(f"{field}: ") for reason in reasons), reasons


def test_dropout_of_one_half_is_read() -> None:
    """Whose factor 1/(1 - p) is torch's default, and is not passed on."""
    torch.manual_seed(0)
    found = moments.torch.describe(own_styles.HandGPT(drop=0.5)).model
    assert (found.dropout, found.ffn_dropout, found.attention_dropout) == (0.5, 0.5, 0.5)


# --- one layer unlike the others ------------------------------------------------------------------


@pytest.mark.parametrize("layers", [3, 6, 24])
@pytest.mark.parametrize("power", [0.0, -1.0, -0.5])
def test_layers_that_follow_a_rule_are_none_of_them_odd(layers: int, power: float) -> None:
    """400 stacks of 4,096 normal entries a layer, by the chi-square of their mean square."""
    draw = np.random.default_rng(layers)
    rule = np.arange(1.0, layers + 1) ** power
    for _ in range(400):
        squares = rule * draw.chisquare(4096, layers) / 4096
        assert odd_layers(squares, [math.sqrt(2 / 4096)] * layers) == ()


@pytest.mark.parametrize(
    ("layers", "power", "place", "factor"),
    [
        (3, 0.0, 1, 9.0),
        (4, 0.0, 3, 1 / 4),
        (12, 0.0, 0, 4.0),
        (12, -1.0, 5, 2.0),
        (8, -1.0, 7, 4.0),
    ],
)
def test_a_layer_off_the_rule_of_the_others_is_odd(
    layers: int, power: float, place: int, factor: float
) -> None:
    draw = np.random.default_rng(place)
    for _ in range(50):
        squares = np.arange(1.0, layers + 1) ** power * draw.chisquare(4096, layers) / 4096
        squares[place] *= factor
        assert odd_layers(squares, [math.sqrt(2 / 4096)] * layers) == (place,)


def test_layers_that_follow_no_rule_are_not_judged() -> None:
    draw = np.random.default_rng(3)
    for layers in (2, 6, 12):
        for _ in range(100):
            squares = np.exp(draw.normal(0, 1, layers))
            assert odd_layers(squares, [0.02] * layers) == ()


# --- what is not read, and what is passed ---------------------------------------------------------


class _Mixture(nn.Module):
    """Every expert runs; the largest two of its gates count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(3)
        )

    def forward(self, x: Any) -> Any:
        shares = self.router(x).softmax(-1)
        best, places = shares.topk(2, -1)
        gates = torch.zeros_like(shares).scatter(-1, places, best)
        return sum(gates[..., n : n + 1] * e(x) for n, e in enumerate(self.experts))


def test_layers_that_cannot_be_told_apart_are_not_measured() -> None:
    module = own_styles.HandGPT(layers=3)
    for block in module.blocks:
        block.mlp = _Mixture(own_styles.WIDTH)
    ids = torch.randint(own_styles.VOCAB, (1, 8))
    with pytest.raises(moments.MomentsError, match=r"mixture of experts.*blocks\.\*\.mlp"):
        moments.torch.measure(module, ids)
    assert "operation by operation" in str(moments.check(module, ids))


def test_entries_that_are_not_finite_are_named() -> None:
    module = own_styles.TitanGPT()
    with torch.no_grad():
        module.layers["1"].attention.wq.weight[0, 0] = math.nan
    report = moments.check(module)
    (found,) = report.findings
    assert found.where == ("layers.1.attention.wq.weight",)
    assert "not finite" in found.reason
    assert report.unchecked == ("everything else: it cannot be run",)
    assert "layers.1.attention.wq.weight" in str(report)


def test_shared_matrices_are_named() -> None:
    module = own_styles.TitanGPT(layers=3)
    for name in ("1", "2"):
        module.layers[name].feed_forward = module.layers["0"].feed_forward
    said = str(moments.check(module).unchecked)
    assert re.search(r"share their weights \(.*w2\.weight", said)


def test_the_batch_is_the_second_argument_of_all() -> None:
    module = planted_bugs.built("Llama", "gpt2", 1)
    ids = torch.randint(own_styles.VOCAB, (2, 10), generator=torch.Generator().manual_seed(0))
    plan = moments.torch.describe(module, ids).model
    assert moments.torch.measure(module, ids).seq_len == 10
    assert moments.torch.measure(module).layers == 4
    assert moments.torch.diagnose(module, ids, plan).expected
    assert "10 tokens" in moments.check(module, ids).read
    with pytest.raises(moments.DomainError, match=r"kv_heads=2.*gated=True.*rotary=moments.Rotary"):
        moments.torch.diagnose(module, ids)
    for wrong in ("text", 3, [ids, ids], (ids, ids)):
        with pytest.raises(moments.DomainError, match=r"batch .*forward\(tokens\)"):
            moments.check(module, wrong)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.patch = own_styles.HandGPT(drop=0.0), nn.Linear(6, 1)

    def forward(self, pixels: Any, ids: Any) -> Any:
        return self.inner(ids)[0] + self.patch(pixels).mean()


def test_a_tuple_is_the_arguments_in_order_and_advice_names_them() -> None:
    ids = torch.randint(own_styles.VOCAB, (2, 10), generator=torch.Generator().manual_seed(0))
    report = moments.check(_Two(), (torch.randn(2, 6), ids))
    assert report.prediction.model.layers == 2
    with pytest.raises(moments.MomentsError, match=r"pass batch=\{'pixels': ..., 'ids': ...\}"):
        moments.check(_Two())
    with pytest.raises(moments.MomentsError, match="no attention on a residual stream"):
        moments.torch.measure(nn.Linear(3, 3))


class _Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.table, self.out = nn.Embedding(50, 32), nn.Linear(32, 5)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Any) -> Any:
        return self.out(self.inner(self.table(ids)).mean(1))


def test_tables_and_head_around_torchs_encoder_are_described() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)  # copies of one layer
        found = moments.torch.describe(_Classifier())
    assert found.model.embedding.vocab_size == 50
    assert (found.model.head.classes, found.model.head.pool) == (5, "mean")


# --- cost -----------------------------------------------------------------------------------------


def test_reading_is_linear_in_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the questions that are asked of the graph."""
    count, plain = [0], Graph.depends_on

    def counted(self: Graph, value: int, other: int) -> bool:
        count[0] += 1
        return plain(self, value, other)

    monkeypatch.setattr(Graph, "depends_on", counted)
    asked = []
    for layers in (6, 24):
        count[0] = 0
        moments.torch.describe(own_styles.TitanGPT(layers=layers))
        asked.append(count[0])
    assert asked[1] < 5 * asked[0]


def test_a_check_runs_a_module_as_often_as_it_says() -> None:
    module = planted_bugs.built("GPT-2", "gpt2", 1)
    calls = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    moments.check(module)
    assert len(calls) == 3
