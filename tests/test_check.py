"""`moments.check`: planted slips named, correct modules passed, what was not checked said."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moments
from moments.show.findings import LINES
from moments.show.precision import FORMATS
from moments.show.recognition import recognise, weights_of

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import check_modules  # noqa: E402
import foreign_slips  # noqa: E402
from checked_gpt import Config, build  # noqa: E402
from small_modules import encoder, family_module  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from moments.cli import app  # noqa: E402

nn = torch.nn

SMALL = {"n_layer": 2, "n_embd": 48, "block_size": 16}


# --- number formats -------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_what_a_format_loses_is_what_a_cast_loses(form: Any) -> None:
    """200,000 Gaussian entries, cast by torch: counts within five binomial deviations."""
    count = 200_000
    wide = torch.randn(count, generator=torch.Generator().manual_seed(1)).double()
    edges = (form.step, 2.0**form.lowest, form.largest)
    for scale in [edge * 2.0**power for edge in edges for power in (-2, 0, 2)]:
        if scale > 1e38:
            continue  # the float32 that is cast has no such entries
        given = (scale * wide).float()
        cast = given.to(getattr(torch, form.name)).float()
        # E4M3 has no infinity: what is beyond it saturates, or is nan in older versions.
        over = ~torch.isfinite(cast) | (given.abs().double() >= form.limit)
        seen = (
            cast == 0,
            (cast != 0) & (cast.abs() < 2.0**form.lowest),
            over,
        )
        for share, mask in zip(form.shares(scale**2), seen, strict=True):
            deviation = math.sqrt(max(share * (1 - share), 1 / count) / count)
            assert abs(float(mask.double().mean()) - share) < 5 * deviation, (form.name, scale)


def test_the_limits_of_the_formats_are_torchs() -> None:
    for form in FORMATS:
        info = torch.finfo(getattr(torch, form.name))
        assert form.largest == info.max
        assert 2.0**form.lowest == info.tiny
        assert form.step == info.smallest_normal * info.eps


# --- recognition ----------------------------------------------------------------------------------

MODEL = moments.Transformer(layers=6, d_model=64, heads=4, seq_len=16)


@pytest.mark.parametrize("name", ["xavier", "ds-init", "deepnorm", "t-fixup", "mup"])
@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
def test_a_published_scheme_is_recognised_by_its_variances(name: str) -> None:
    found = recognise(weights_of(MODEL.with_scheme(name)), MODEL)
    assert not found.unexplained
    assert found.title.startswith(name) or name == "mup"
    if name == "mup":  # its variances are LeCun's; its other multipliers no weight shows
        assert found.title == "LeCun's 1/fan_in"


@pytest.mark.parametrize(
    ("weights", "title"),
    [
        (moments.Weights.normal(0.02**2), "one normal distribution for all matrices, std 0.02"),
        (moments.Weights.normal(0.013**2, output_divisor=12), "GPT-2's scaled init: std 0.013"),
        (moments.Weights.torch_default(64), "torch's default for nn.Linear"),
    ],
)
def test_a_free_deviation_is_read_off_the_weights(weights: Any, title: str) -> None:
    found = recognise(weights_of(MODEL.replace(weights=weights)), MODEL)
    assert found.title.startswith(title)
    assert not found.unexplained


def test_a_slip_is_taken_only_where_no_rule_explains_as_much() -> None:
    swapped = moments.Weights(1 / 12, 1 / 12, 1 / 12, 1.0, 1.0, 1 / 12)
    found = recognise(weights_of(MODEL.replace(weights=swapped)), MODEL)
    assert found.intended is not None
    assert "on query, key and value instead of output" in found.title
    first = found.intended.layer_weights(1)
    assert (first.query, first.ffn_in) == (1.0, 1.0)
    assert first.output == first.ffn_out == pytest.approx(1 / 12)


# --- modules --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right() -> moments.Report:
    return moments.check(build(Config(**SMALL), 1))


def test_nothing_wrong_is_a_few_lines(right: moments.Report) -> None:
    """The verdict, what was assumed, and how to see the rest."""
    right.assert_healthy()
    assert right.findings == ()
    first, *body, last = str(right).splitlines()
    assert first == "GPT: nothing found wrong"
    assert len(body) <= LINES
    assert "--all" in last
    assert (
        "2 layers of width 48, causal attention, Pre-LN, LayerNorm, 4 heads, gelu, 15 tok"
        in body[0]
    )
    for words in ("GPT-2's scaled init: std 0.02", "log(101) = 4.615"):
        assert words in " ".join(str(right).split())
    assert "note: " not in str(right)
    assert right.unchecked == ()


def test_many_findings_leave_the_growth_on_the_screen(right: moments.Report) -> None:
    """The verdict, what the depth does, every finding as far as there is room, notes by name."""
    growth = "variance x"
    for count in (1, 4, 9):
        findings = tuple(
            moments.Finding(
                "warning", f"kind {n}", (f"h.{n}.weight",), reason=f"matrix {n} is wrong"
            )
            for n in range(count)
        )
        notes = tuple(f"remark {n}, {'and so on ' * 20}" for n in range(5))
        report = dataclasses.replace(right, findings=findings, notes=notes)
        lines = str(report).splitlines()
        body = lines[1 : next(n for n, line in enumerate(lines) if line.startswith("note"))]
        assert len(body) <= LINES
        assert any(line.strip().startswith(growth) for line in body)
        assert any(line.startswith("1. matrix 0") for line in body)
        assert ("and 5 more: kind 4, kind 5" in str(report)) == (count == 9)
        assert lines[len(body) + 1].startswith("note: remark 0")
        assert "and 2 more notes" in lines
        whole = report.text(whole=True)
        assert all(f"h.{n}.weight" in whole for n in range(count))


def test_each_measured_number_stands_beside_its_band(right: moments.Report) -> None:
    frame = right.to_frame().set_index("quantity")
    row = frame.loc["gradient variance entering layer 1"]
    assert row.low < row.expected < row.high
    assert row.measured == right.comparison.measurement.grad_variance[0]
    matrices = frame[frame["role"] == "ffn_in"]
    assert list(matrices["parameter"]) == ["transformer.h.*.mlp.c_fc.weight"]
    assert frame.loc["loss against log(101)"].expected == math.log(101)


def test_a_report_travels_and_a_factory_may_take_a_seed(right: moments.Report) -> None:
    again = pickle.loads(pickle.dumps(right))
    assert str(again) == str(right)
    assert again.causes() == ()
    made = moments.check(lambda seed: build(Config(**SMALL), seed + 1))
    assert str(made) == str(right)
    assert right.model is not None
    assert right.model.layers == 2
    with pytest.raises(moments.DomainError, match="plan and scheme"):
        moments.check(build(Config(**SMALL), 1), plan="xavier", scheme="xavier")


def test_causes_of_a_planted_slip_are_ranked() -> None:
    module = build(Config(**SMALL, dropout=0.0), 1)
    plan = moments.check(module).model
    with torch.no_grad():
        module.transformer["h"][1].mlp.c_proj.weight.mul_(20)
    causes = moments.check(module, plan=plan).causes()
    assert causes[0].kind == "ffn_out"
    assert causes[0].layers == (2,)
    assert causes[0].explains > 0.8


def test_the_page_is_one_file_with_its_pictures(right: moments.Report) -> None:
    page = right.to_html()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<svg") == 1
    assert "prefers-color-scheme: dark" in page
    assert "var(--signal)" in page
    for outside in ("http://cdn", "https://", "<script ", "src="):
        assert outside not in page.replace("https://matplotlib", "")
    assert right._repr_html_().count("<svg") == 0


SLIPS = {slip.title: slip for slip in check_modules.all_slips()}


@pytest.mark.parametrize(
    "title",
    [
        "scale on c_attn",
        "no scale, fused=False",
        "dropout on",
        "no residual",
        "BERT of copied layers",
    ],
)
def test_a_planted_slip_is_named_with_its_tensor(title: str) -> None:
    """A few of those that the stored run holds."""
    slip = SLIPS[title]
    report = moments.check(check_modules.slip_module(slip), scheme=slip.scheme or None)
    assert check_modules.named(slip, report), str(report)
    assert not report.healthy
    with pytest.raises(AssertionError, match=slip.kind):
        report.assert_healthy()
    assert all(f.reason and f.mend and f.severity in ("error", "warning") for f in report.findings)


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("gains drawn", "minGPT"),
        ("one norm skipped", "torchtune"),
        ("no 1/sqrt(d_head)", "torchtitan"),
        ("one layer three times as wide", "lit-gpt"),
    ],
)
def test_a_slip_in_a_foreign_style_is_named(name: str, style: str) -> None:
    slip = next(s for s in foreign_slips.SLIPS if s.name == name)
    made = foreign_slips.planted(style, slip, 5)
    assert made is not None
    module, where = made
    hits = [f for f in check_modules.checked(module).findings if f.kind == slip.kind]
    assert any(check_modules.same(where, n) for f in hits for n in f.where), hits


class _Translator(torch.nn.Module):
    """nn.Transformer between tables, as people put it together."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(60, 32)
        self.inner = torch.nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.out = torch.nn.Linear(32, 60)

    def forward(self, src: Any, tgt: Any) -> Any:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tgt.shape[1])
        return self.out(self.inner(self.table(src), self.table(tgt), tgt_mask=mask))


def test_torchs_transformer_inside_a_module_is_as_torch_draws_it() -> None:
    """Every matrix by Xavier's rule, anew; biases stay the copies that they were made as."""
    torch.manual_seed(4)
    module = _Translator()
    assert moments.check(module).healthy
    ids = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(1))
    report = moments.check(module, {"src": ids, "tgt": ids.flip(1)})
    assert report.healthy, str(report)
    assert any("copied layers" in note for note in report.notes)
    with torch.no_grad():
        for layer in module.inner.decoder.layers:
            layer.linear1.weight.mul_(2)
    found = moments.check(module, {"src": ids, "tgt": ids.flip(1)}).findings
    assert any("inner.decoder.layers.*.linear1.weight" in f.where for f in found)


def test_one_draw_is_no_fault_where_the_expected_number_is_in_order() -> None:
    """Branches of 1.05e-4 of the stream are no identity, though this draw's second is below 1e-4;
    those of a quarter are one."""
    module = foreign_slips.drawn("torchtune, scaled", "gpt2", 207)
    report = moments.check(module)
    assert report.healthy, str(report)
    frame = report.comparison.measurement.to_frame().set_index(["layer", "site"])["variance"]
    drawn = frame[2, "attention.projection"] + frame[2, "ffn.out"]
    assert 0.3**2 * drawn < 1e-4 * frame[1, "stream"]  # the style scales branches by 0.3
    parts = foreign_slips.Parts(module)
    with torch.no_grad():
        for block in parts.blocks("output", "ffn_out"):
            block.mul_(0.5)
    assert "identity layers" in {f.kind for f in moments.check(module).findings}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the library imports
def test_what_multiplies_a_table_counts() -> None:
    """x-transformers multiplies its positions by 1/sqrt(d_model) before it adds them."""
    pytest.importorskip("x_transformers")
    report = moments.check(foreign_slips.drawn("x-transformers plain", "lecun", 5005))
    assert report.healthy, str(report)
    assert not any("not what its weights give" in note for note in report.notes)
    frame = report.to_frame().set_index("quantity")
    assert frame.loc["variance entering layer 1"].passed


STYLES = ("minGPT", "lecture", "x-transformers", "torchtune", "lit-gpt", "torchtitan", "timm")


def test_the_stored_run() -> None:
    """`benchmarks/check_modules.py slips` and `correct`."""
    stored = check_modules.stored()
    rows = stored["slips"]["rows"]
    assert {row["slip"] for row in rows} == set(SLIPS)
    assert sum(row["named"] for row in rows) >= 0.95 * len(rows)
    foreign = stored["foreign"]["rows"]
    assert len({row["slip"] for row in foreign}) >= 20
    assert {row["style"] for row in foreign} == set(foreign_slips.PLANTED)
    assert sum(row["named"] for row in foreign) == len(foreign)
    right = stored["correct"]["rows"]
    assert {row["module"] for row in right} == {name for name, _ in check_modules.correct()}
    alarms = {True: [0, 0], False: [0, 0]}  # in foreign styles, and elsewhere: rows, alarms
    for row in right:
        count = alarms[row["module"].startswith(STYLES)]
        count[0] += 1
        if check_modules.judged(row["module"]):
            (told,) = row["findings"]
            assert told.startswith("identity layers")
            continue
        count[1] += bool(row["findings"])
    page = (ROOT / "docs/check-your-model.md").read_text(encoding="utf-8")
    for count in alarms.values():
        assert f"| {count[1]} of {count[0]} |" in page
    assert sum(total for total, _ in alarms.values()) >= 1000
    assert sum(count for _, count in alarms.values()) <= 5
    for name in (name for name in stored if name.startswith("correct from ")):
        rows = stored[name]["rows"]
        known = {name for name, _ in check_modules.correct(int(name.rpartition(" ")[2]))}
        assert {row["module"] for row in rows} <= known
        assert not [r for r in rows if r["findings"] and not check_modules.judged(r["module"])]
        assert f"| 0 of {len(rows)} |" in page


def test_a_module_of_logits_alone_and_torchs_encoder() -> None:
    bare = moments.check(build(Config(**SMALL, loss=False, tied=False, init="torch"), 2))
    assert bare.healthy, str(bare)
    assert bare.scheme.startswith("torch's default for nn.Linear")
    seen = bare.comparison.measurement.loss
    assert seen == pytest.approx(math.log(101), rel=0.1)
    assert bare.comparison.prediction.loss == pytest.approx(seen, rel=0.05)
    assert not any("head" in words for words in bare.unchecked)
    copied = moments.check(encoder(2, 48, 96))
    assert [f.kind for f in copied.findings] == ["copied layers"]
    assert "a loss (none in the module, and none was passed)" in copied.unchecked


def test_the_module_is_left_as_it_was() -> None:
    module = build(Config(**SMALL, dropout=0.1), 3)
    module.transformer["h"][0].eval()
    modes = [part.training for part in module.modules()]
    before = {name: p.clone() for name, p in module.named_parameters()}
    state = torch.random.get_rng_state()
    moments.check(module)
    assert torch.equal(state, torch.random.get_rng_state())
    assert modes == [part.training for part in module.modules()]
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert all(p.grad is None for p in module.parameters())


def test_of_a_users_text_a_part_is_read_and_that_is_said() -> None:
    ids = torch.randint(101, (5, 40), generator=torch.Generator().manual_seed(0))
    report = moments.check(family_module("gpt2", 2, 48), {"input_ids": ids[:, :36]})
    assert report.read == "measured on 2 sequences of 32 tokens"
    assert report.read in " ".join(str(report).split())


def test_what_is_no_transformer_is_followed_by_its_operations() -> None:
    report = moments.check(torch.nn.Linear(2, 2))
    assert "operation by operation" in str(report)
    with pytest.raises(moments.MomentsError, match="Linear: no attention on a residual stream"):
        moments.torch.measure(torch.nn.Linear(2, 2), torch.zeros(1, 3, 2))
    with pytest.raises(moments.DomainError, match="batch"):
        moments.check("gpt2", torch.zeros(2, 2))


class Adds(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.map(self.norm(x))


class Sums(torch.nn.Module):
    """Blocks that add their input themselves, to which a loop adds it `again`."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.blocks = again, torch.nn.ModuleList(Adds() for _ in range(6))
        self.table = torch.nn.Embedding(50, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x) if self.again else block(x)
        return x


@pytest.mark.parametrize("again", [True, False])
def test_an_input_that_is_added_twice_makes_the_variance_explode(again: bool) -> None:
    torch.manual_seed(0)
    report = moments.check(Sums(again), torch.randint(0, 50, (2, 4)))
    assert [f.kind for f in report.findings if "variance" in f.kind] == [
        "variance explodes"
    ] * again
    if again:
        (finding,) = report.findings
        assert finding.measured == pytest.approx(4.0, rel=0.3)
        assert "added twice" in finding.mend


def test_a_class_token_of_zeros_is_why_the_gradient_explodes() -> None:
    """Its norm has a slope of 1/sqrt(epsilon); drawn as patches are, it has none like it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "image_size": 32, "patch_size": 8}
    config = transformers.DeiTConfig(
        num_hidden_layers=2, num_attention_heads=4, num_labels=7, **sizes
    )
    module = transformers.DeiTForImageClassification(config)
    (finding,) = moments.check(module).findings
    assert finding.kind == "gradient explodes"
    assert "2 tokens that enter as 0" in finding.reason
    assert "class token" in finding.mend
    assert "deit.embeddings.cls_token" in finding.where
    with torch.no_grad():
        module.deit.embeddings.position_embeddings.normal_(std=0.02)
    assert not any("gradient" in f.kind for f in moments.check(module).findings)


# --- declarations ---------------------------------------------------------------------------------


def test_a_config_is_judged_by_predictions_and_says_so() -> None:
    report = moments.check("gpt2")
    assert report.healthy
    assert "nothing was measured" in " ".join(str(report).split())
    assert report.unchecked == ("the module itself (no weights were read, nothing was run)",)
    assert np.isnan(report.to_frame()["measured"]).all()
    assert report.scheme.startswith("GPT-2's scaled init: std 0.02")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"embedding": moments.Embedding(1000, 1.0)}, "initial loss"),
        ({"embedding": moments.Embedding(1000, 0.0004, 1.0)}, "positions drown tokens"),
        ({"head": moments.Head(norm=False)}, "no final norm"),
        ({"weights": moments.Weights.normal(1e-8)}, "identity layers"),
    ],
)
@pytest.mark.filterwarnings("ignore::moments.ValidityWarning")
def test_what_a_declaration_cannot_be_trained_with_is_found(
    changes: dict[str, Any], kind: str
) -> None:
    model = moments.Transformer(
        layers=3,
        d_model=64,
        heads=4,
        seq_len=8,
        causal=True,
        weights=moments.Weights.normal(1 / 64),
        embedding=moments.Embedding(1000, 1 / 64),
        head=moments.Head(),
    )
    assert moments.check(model).healthy
    intended = model if kind == "no final norm" else None
    found = moments.check(model.replace(**changes), scheme=intended)
    assert kind in {f.kind for f in found.findings}, str(found)


def test_a_loss_is_told_as_it_was_measured() -> None:
    """And judged by what these weights expect, where one draw does not contradict it."""
    module = Scaled(4, 16, 0.25)
    nn.init.normal_(module.head.weight, std=0.8)
    report = moments.check(module)
    assert report.comparison is not None
    measured, expected = (
        one.loss for one in (report.comparison.measurement, report.comparison.prediction)
    )
    (found,) = (f for f in report.findings if f.kind == "initial loss")
    assert found.measured == measured != expected
    assert f"the first loss is {measured:.3g}," in found.reason
    assert report.table().count("…") == 0


class Cut(torch.nn.Module):
    """Layers of torch's, of which one may hand on what it reads without a gradient."""

    def __init__(self, cut: int | None, batch_first: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=batch_first, norm_first=True)
            for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 100, bias=False)
        self.cut = cut

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        x = self.tokens(ids)
        for n, layer in enumerate(self.layers):
            x = layer(x.detach() if n == self.cut else x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        flat = logits.view(-1, logits.shape[-1]), targets.view(-1)  # as people write it
        return logits, nn.functional.cross_entropy(*flat, ignore_index=-1)


@pytest.mark.parametrize("cut", [None, 1])
def test_a_gradient_that_is_cut_is_named(cut: int | None) -> None:
    torch.manual_seed(0)
    report = moments.check(Cut(cut), torch.randint(100, (2, 16)))
    assert ("gradient cut" in {f.kind for f in report.findings}) == (cut is not None)


def test_a_first_axis_that_is_taken_for_tokens_is_named() -> None:
    torch.manual_seed(0)
    report = moments.check(Cut(None, batch_first=False), torch.randint(100, (2, 16)))
    (finding,) = [f for f in report.findings if f.severity == "error"]
    assert finding.kind == "attention over the batch"
    assert "batch_first" in finding.mend


class Scaled(nn.Module):
    """A Pre-LN decoder of heads of any width, whose logits are q k times a factor."""

    def __init__(self, heads: int, d_head: int, factor: float, width: int = 64) -> None:
        super().__init__()
        self.heads, self.factor = heads, factor
        self.table, self.head = nn.Embedding(101, width), nn.Linear(width, 101, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(5))
        self.inward = nn.ModuleList(nn.Linear(width, 3 * heads * d_head) for _ in range(2))
        self.outward = nn.ModuleList(nn.Linear(heads * d_head, width) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.1)
            elif "bias" in name:
                nn.init.zeros_(parameter)

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        for n in range(2):
            parts = self.inward[n](self.norms[2 * n](x)).chunk(3, -1)
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
            given = nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.factor
            )
            x = x + self.outward[n](given.transpose(1, 2).flatten(2))
            x = x + self.down[n](torch.relu(self.up[n](self.norms[2 * n + 1](x))))
        return self.head(self.norms[4](x))


@pytest.mark.parametrize(
    ("heads", "d_head", "factor", "said"),
    [
        (2, 16, 16**-0.5, None),
        (2, 16, 64**-0.5, "divided by sqrt(d_model), not by"),
        (4, 16, 16**-1.0, "divided by d_head (as muP does), not by"),
        (8, 8, 8**-1.0, "divided by d_head (as muP does), which is sqrt(d_model), not by"),
    ],
)
def test_slips_of_the_logits_scale(
    heads: int, d_head: int, factor: float, said: str | None
) -> None:
    torch.manual_seed(0)
    found = moments.check(Scaled(heads, d_head, factor)).findings
    assert [said in f.reason for f in found] == ([] if said is None else [True])


# --- the command ----------------------------------------------------------------------------------

FILE = """
import sys
sys.path.insert(0, {folder!r})
from checked_gpt import Config, build
def right(): return build(Config(n_layer=2, n_embd=48, block_size=16), 1)
def wrong(): return build(Config(n_layer=2, n_embd=48, block_size=16, slip="gains drawn"), 1)
def broken(): raise RuntimeError("no such\\nthing")
def number(): return 7
def loud():
    module = wrong()
    module.register_forward_pre_hook(lambda *_: print("running"))
    return module
"""


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(folder=str(ROOT / "benchmarks")))
    run = CliRunner().invoke
    good = run(app, ["check", f"{file}:right", "--html", str(tmp_path / "a.html")])
    assert good.exit_code == 0
    assert "nothing found wrong" in good.output
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    bad = run(app, ["check", f"{file}:loud", "--json"])
    assert bad.exit_code == 1
    data = json.loads(bad.stdout)
    assert not data["healthy"]
    assert data["findings"][0]["kind"] == "norm gain"
    for name in ("broken", "absent"):
        with pytest.raises(moments.MomentsError) as error:
            run(app, ["check", f"{file}:{name}"], catch_exceptions=False, standalone_mode=False)
        assert "\n" not in str(error.value)


def test_a_module_of_ones_own_is_audited(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(folder=str(ROOT / "benchmarks")))
    run = CliRunner().invoke
    found = run(app, ["audit", f"{file}:loud", "--scheme", "scaled-init", "--json"])
    assert found.exit_code == 1
    data = json.loads(found.stdout)
    offenders = {row["role"] for row in data["rows"] if row["passed"] is False}
    assert {role for role in offenders if role.endswith("gain")} == {
        f"{name}.norm.gain" for name in ("attention", "ffn", "final")
    }
    good = run(app, ["audit", f"{file}:right", "--scheme", "scaled-init"])
    assert good.exit_code == 0
    for words, said in (
        ([f"{file}:right"], "pass --scheme or --plan"),
        ([f"{file}:number"], "must be an nn.Module"),
        ([f"{file}:right", "--layers", "3"], "--layers is only for a preset"),
        ([str(file)], "mine.py:NAME"),
        (["model.pt"], "a pickle"),
    ):
        result = run(app, ["audit", *words])
        assert isinstance(result.exception, moments.DomainError)
        assert said in str(result.exception)


def test_a_default_device_elsewhere_changes_nothing() -> None:
    """What is made for a module lies where it is looked at; "meta" stands for any other device."""
    pytest.importorskip("transformers")
    import small_modules

    for module in (small_modules.family_module("gpt2", 2, 64), small_modules.encoder(2, 64, 128)):
        wanted = moments.check(module).to_json()
        torch.set_default_device("meta")
        try:
            found = moments.check(module).to_json()
        finally:
            torch.set_default_device(None)
        assert found == wanted


@pytest.mark.parametrize("tokens", [None, 256])
def test_check_and_predict_of_one_config_take_the_same_tokens(
    tokens: int | None, tmp_path: Path
) -> None:
    """Both say how many, and both give the growth of that many."""
    entries = {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 500, "n_positions": 512}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", **entries}))
    words = [str(file), *([] if tokens is None else ["--seq-len", str(tokens)])]
    report = CliRunner().invoke(app, ["check", *words]).stdout
    table = CliRunner().invoke(app, ["predict", *words]).stdout
    predicted = json.loads(CliRunner().invoke(app, ["predict", *words, "--json"]).stdout)
    assert predicted["model"]["seq_len"] == (tokens or 512)
    assert f", {tokens or 512} tokens; predicted" in " ".join(report.split())
    assert f"{tokens or 512} tokens" in table
    growth = predicted["variance"][-1] / predicted["variance"][0]
    assert f"variance x {growth:.3g} from" in report
    if tokens is None:
        assert f"variance x {growth:.3g} from" in moments.check(file).verdict()


def test_a_file_whose_tokens_are_resolved_one_by_one_is_read_at_few(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("layers = 1\nd_model = 64\nheads = 2\nseq_len = 136\nalibi = true\n")
    for words in (["check", str(file)], ["predict", str(file)]):
        done = CliRunner().invoke(app, words)
        assert "128 tokens" in done.stdout
        assert "128 of up to 136 tokens" in done.stderr
        assert "136 tokens" in CliRunner().invoke(app, [*words, "--seq-len", "136"]).stdout


def test_fp8_is_judged_where_it_is_asked_for() -> None:
    report = moments.check("gpt2")
    assert "fp8" not in str(report) + " ".join(report.notes)
    assert {"fp8 E4M3", "fp8 E5M2"} <= set(report.precision()["format"])
