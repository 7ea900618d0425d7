"""One model as a page, and the explorer: its app, what `moments explore` hands to Voilà."""

from __future__ import annotations

import builtins
import json
import re
import socket
import subprocess
import sys
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from typer.testing import CliRunner

import moments
from moments.cli import app
from moments.formulas import references
from moments.show.plot import plot_stream, shown, ticks
from studies.formulas.stacks import STACKS

MODEL = moments.Transformer(4, 64, 4, 16, dropout=0.1, name="little")


class Page(HTMLParser):
    """What a page is made of: tags, addresses that it would load, and its words."""

    VOID = ("meta", "br", "img", "input", "link", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.loads: list[str] = []
        self.words = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


# --- pictures of pages ----------------------------------------------------------------------------


def test_an_axis_over_decades_is_logarithmic_with_ticks_inside() -> None:
    values = 10.0 ** -np.arange(7)
    axis = plot_stream(moments.predict(MODEL.replace(branch_scale=8.0))).axes[0]
    assert axis.get_yscale() == "log"
    assert all(values[-1] <= t <= 1.0 for t in ticks(values[-1], 1.0, True))
    assert all(0.0 <= t <= 3.0 for t in ticks(0.0, 3.0, False))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-7, "10⁻⁷"),
        (2.5e8, "2.5·10⁸"),
        (20000.0, "20000"),
        (0.25, "0.25"),
        (0.0, "0"),
        (-3.0, "-3"),
    ],
)
def test_numbers_as_they_are_set(value: float, text: str) -> None:
    assert shown(value) == text


# --- the report -----------------------------------------------------------------------------------


def test_a_report_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    found = moments.report(MODEL, schemes=["lns", "deepnorm"], correlation=0.3)
    file = tmp_path / "page.html"
    found.save(file)
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.loads
    assert not re.search(r"@import|url\((?!#)|fetch\(|https?://(?!www\.w3\.org/)", text)
    assert page.seen.count("svg") == 2  # the stream, and the gradients of the weights
    expected = moments.predict(MODEL, correlation=0.3)
    assert shown(float(expected.variance[-1])) in page.words
    gradients = expected.weight_gradients()
    assert shown(float(gradients.squared_norm.iloc[0])) in page.words
    scaled = moments.predict(MODEL.with_scheme("lns"), correlation=0.3)
    assert shown(float(scaled.variance[-1] / scaled.variance[0])) in page.words
    for citation in ("@inproceedings{kedia2024", "@inproceedings{sun2025", "@article{wang2022"):
        assert citation in page.words
    assert page.words.count("little") >= 4
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    (written,) = re.findall(r"<pre>(\{.*?\n\})</pre>", text, re.S)
    stored = json.loads(unescape(written))
    assert moments.Transformer.from_dict(stored) == MODEL


def test_a_report_tells_its_warnings_and_losses() -> None:
    model = moments.preset("gpt2", seq_len=8).replace(layers=2)
    with pytest.warns(moments.ValidityWarning):
        expected = moments.predict(model.replace(norm="post", dropout=0.0), theory="published")
    published = moments.report(expected.model, schemes=False, theory="published")
    assert expected.warnings[0][:40] in Page(published.to_html()).words
    found = moments.report(model, schemes=False)
    words = Page(found.to_html()).words
    assert f"Loss {found.prediction.loss:.4g}" in words
    assert "gpt2" in words
    assert "By position" in words


def test_a_report_names_the_choices_that_a_loss_is_over() -> None:
    words = moments.preset("bert-base", seq_len=8).replace(layers=1)
    head = moments.Head(loss="classification", tied=False, weight_variance=4e-4, classes=3)
    for model, said in ((words, "30522 words"), (words.replace(head=head), "3 labels")):
        assert (
            f"uniformly among {said} has a loss" in moments.report(model, schemes=False).to_html()
        )


def test_bad_reports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(moments.DomainError, match="html"):
        moments.report(MODEL, schemes=False).save(tmp_path / "page.pdf")
    with pytest.raises(moments.DomainError, match="one configuration"):
        moments.report(MODEL, correlation=[0.1, 0.2])
    with pytest.raises(moments.DomainError, match="model"):
        moments.report("gpt2")  # type: ignore[arg-type]


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    file = tmp_path / "tiny.html"
    words = ["report", "bert-tiny", "--seq-len", "16", "--scheme", "lns", "-o", str(file), "--json"]
    said = json.loads(CliRunner().invoke(app, words).stdout)
    assert said["schemes"] == ["lns"]
    assert "bert-tiny" in Page(file.read_text(encoding="utf-8")).words


def test_every_source_can_be_cited() -> None:
    sources = [str(scheme.source) for scheme in moments.schemes()]
    for record in (*map(moments.component, moments.components()), *STACKS.values()):
        for theory in ("refined", "published", "simplified"):
            laws = record.under(theory)  # type: ignore[arg-type]
            sources += [str(law.source) for law in laws.values()]
    known = references.entries()
    for source in sources:
        keys = references.keys(source)
        assert set(keys) <= set(known), source
        assert keys or source.startswith("derived here"), source
    for key, entry in known.items():
        assert key in {k for source in sources for k in references.keys(source)}, key
        assert entry.count("{") == entry.count("}")
        surname, year = re.fullmatch(r"([a-z]+)(\d{4})", key).groups()  # type: ignore[union-attr]
        assert re.search(rf"author = \{{{surname},", entry, re.I)
        assert f"year = {{{year}}}" in entry


# --- the explorer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"layers": 6, "norm": "post", "dropout": 0.2, "correlation": 0.4},
        {"d_model": 256, "heads": 4, "logit_scale": 1.259, "branch_scale": 0.5, "seq_len": 32},
        {"scheme": "dslm", "correlation": 0.3, "dropout": 0.1},
        {"scheme": "lns", "activation": "swiglu", "normalization": "rmsnorm", "layers": 4},
        {"causal": True, "layers": 2, "seq_len": 8},
    ],
    ids=str,
)
def test_the_line_of_python_is_what_is_shown(state: dict[str, Any]) -> None:
    """The line is our own, printed for users to paste; run here as they would run it."""
    explorer = moments.explore()
    explorer.turn(**state)
    assert not explorer.error
    assert explorer.prediction is not None
    found = eval(explorer.python, {"moments": moments})
    np.testing.assert_array_equal(found.variance, explorer.prediction.variance)
    np.testing.assert_array_equal(found.grad_variance, explorer.prediction.grad_variance)
    assert found.model == explorer.prediction.model
    page = explorer._shown.value
    assert f"{found.model.layers} layers, d_model {found.model.d_model}" in page
    assert page.count("<svg") == 1


def test_controls_stand_where_the_model_is_before_anything_is_turned() -> None:
    explorer = moments.explore(MODEL)
    for name in ("layers", "d_model", "heads", "seq_len", "dropout", "norm", "causal"):
        assert explorer.inputs[name].value == getattr(MODEL, name)
    assert explorer.python == "moments.predict(model)"
    assert "little" in explorer._shown.value


def test_a_turned_control_shows_its_model() -> None:
    explorer = moments.explore(MODEL)
    before = explorer._shown.value
    explorer.inputs["layers"].value = 6
    assert explorer._shown.value != before
    assert eval(explorer.python, {"moments": moments, "model": MODEL}).model == MODEL.replace(
        layers=6
    )
    explorer.inputs["scheme"].value = "deepnorm"
    assert explorer.inputs["branch_scale"].disabled
    explorer.turn()
    assert not explorer.inputs["branch_scale"].disabled
    assert explorer._shown.value == before


def test_states_that_cannot_be() -> None:
    explorer = moments.explore(MODEL)
    for name, value in (("layers", 0), ("layers", 3.5), ("norm", "none_such"), ("colour", "red")):
        with pytest.raises(moments.DomainError, match=name):
            explorer.turn(**{name: value})
    explorer.turn(d_model=1024, heads=12)
    assert explorer.prediction is not None
    assert explorer.prediction.model.heads == 16  # the nearest that divides the width
    assert "16 heads" in explorer._shown.value
    with pytest.raises(moments.DomainError, match="model"):
        moments.explore("gpt2")  # type: ignore[arg-type]


def test_what_cannot_be_is_said_in_place_of_a_picture() -> None:
    explorer = moments.explore(MODEL)
    explorer.turn(scheme="value-skipinit", norm="hybrid")
    assert "identity_attention" in explorer.error
    assert "identity_attention" in explorer._shown.value
    assert explorer.prediction is None
    assert "<svg" not in explorer._shown.value


def test_a_scheme_decides_what_it_sets() -> None:
    explorer = moments.explore(MODEL)
    explorer.turn(scheme="dslm", branch_scale=0.5, correlation=0.2)
    assert explorer.inputs["skip_scale"].disabled
    assert explorer.inputs["branch_scale"].disabled
    assert "branch_scale" not in explorer.python


def test_what_is_kept_is_drawn_behind() -> None:
    kept, now = moments.predict(MODEL), moments.predict(MODEL.replace(layers=6))
    lines = plot_stream(now, kept).axes[0].lines
    np.testing.assert_array_equal(lines[0].get_ydata(), kept.variance)
    np.testing.assert_array_equal(lines[1].get_ydata(), now.variance)
    explorer = moments.explore(MODEL)
    explorer.keep.value = True
    explorer.inputs["layers"].value = 6
    assert "kept" in explorer._shown.value
    explorer.keep.value = False
    assert "kept" not in explorer._shown.value


def test_models_bring_their_own_controls() -> None:
    deep = MODEL.replace(branch_scale=[0.5, 0.4, 0.3, 0.2])
    assert "branch_scale" not in moments.explore(deep).controls
    embedded = moments.preset("bert-tiny", seq_len=16)
    explorer = moments.explore(embedded, python="moments.preset('bert-tiny', seq_len=16)")
    assert not {"correlation", "d_model", "heads"} & set(explorer.controls)
    explorer.inputs["norm"].value = "pre"
    assert eval(explorer.python, {"moments": moments}).model == embedded.replace(norm="pre")


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ([], moments.Transformer(12, 768, 12, 128)),
        (["bert-tiny", "--seq-len", "16"], moments.preset("bert-tiny", seq_len=16)),
        (
            ["bert-tiny", "--seq-len", "16", "--layers", "3"],
            moments.preset("bert-tiny", seq_len=16).replace(layers=3),
        ),
        (["model.json"], MODEL),
    ],
)
def test_the_command_serves_the_app_of_its_model(
    words: list[str], model: moments.Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    served: dict[str, Any] = {}

    class Voila:
        @staticmethod
        def launch_instance(argv: list[str]) -> None:
            file, *served["options"] = argv
            served["cell"] = nbformat.read(file, as_version=4).cells[0].source

    package, module = ModuleType("voila"), ModuleType("voila.app")
    module.Voila = Voila  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "voila", package)
    monkeypatch.setitem(sys.modules, "voila.app", module)
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(MODEL.to_dict()), encoding="utf-8")
    done = CliRunner().invoke(app, ["explore", *words, "--port", "8123", "--no-browser"])
    assert done.exit_code == 0, done.output
    assert {"--Voila.ip=127.0.0.1", "--port=8123", "--no-browser"} <= set(served["options"])
    *_, last = served["cell"].splitlines()
    assert eval(last, {"moments": moments}).model == model


def test_the_server_shows_widgets(tmp_path: Path) -> None:
    """Voilà itself runs the app; what a browser makes of it was looked at by hand."""
    pytest.importorskip("voila")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "moments", "explore", "bert-tiny", "--seq-len", "8"]
    words += ["--port", str(port), "--no-browser"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        try:
            page, tries = "", 0
            while not page and server.poll() is None and tries < 300:
                try:
                    with urlopen(f"http://127.0.0.1:{port}/", timeout=60) as answer:
                        page = answer.read().decode()
                except OSError:
                    tries += 1
                    time.sleep(0.1)
        finally:
            server.terminate()
        assert "application/vnd.jupyter.widget-view+json" in page, server.stderr


def test_without_its_extra_the_explorer_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] in ("voila", "ipywidgets"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
        return plain(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(moments.MomentsError, match=r"transformer-moments\[notebook\]"):
        moments.explore(MODEL)
    done = CliRunner().invoke(app, ["explore", "--no-browser"])
    assert isinstance(done.exception, moments.MomentsError)
    assert "transformer-moments[notebook]" in str(done.exception)
