"""One model as a page, the explorer behind its server and its widgets, and charts of both."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from typer.testing import CliRunner

import moments
from moments.cli import app
from moments.cli.pages import server
from moments.formulas import references
from moments.formulas.registry import STACKS
from moments.show.chart import Chart, Curve, shown, ticks
from moments.show.explorer import Explorer
from moments.show.explorer_page import ADDRESS, Server
from moments.show.explorer_widgets import explore

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


# --- charts ---------------------------------------------------------------------------------------


def drawn(chart: Chart) -> ET.Element:
    return ET.fromstring(chart.svg())


def test_a_chart_is_to_scale() -> None:
    """Ends of the line and ticks lie on one linear map."""
    chart = Chart("title", [Curve("", np.array([1.0, 2.0, 3.0]), np.arange(3))])
    svg = drawn(chart)
    (line,) = (e for e in svg.iter() if e.tag.endswith("polyline"))
    heights = [float(pair.split(",")[1]) for pair in line.attrib["points"].split()]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    rules = {
        text.text: float(text.attrib["y"]) - 4
        for text in svg.iter()
        if text.attrib.get("text-anchor") == "end"
    }
    assert rules["1"] == pytest.approx(heights[0], abs=0.2)
    assert rules["3"] == pytest.approx(heights[2], abs=0.2)


def test_a_chart_over_decades_is_logarithmic() -> None:
    values = 10.0 ** -np.arange(7)
    svg = drawn(
        Chart("<&>", [Curve("a & b", values, np.arange(7)), Curve("c", values, np.arange(7))])
    )
    lines = [e.attrib["points"] for e in svg.iter() if e.tag.endswith("polyline")]
    heights = np.array([float(pair.split(",")[1]) for pair in lines[0].split()])
    np.testing.assert_allclose(np.diff(heights), np.diff(heights)[0], atol=0.21)
    words = "".join(svg.itertext())
    assert "<&>" in words
    assert "a & b" in words
    assert all(low <= t <= high for low, high in [(1e-6, 1.0)] for t in ticks(low, high, True))


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


def test_values_that_are_none_leave_gaps_and_nothing_else() -> None:
    svg = Chart("t", [Curve("", np.array([np.nan, 0.0, 0.0]), np.arange(3))], bounded=True).svg()
    assert "nan" not in svg


# --- the report -----------------------------------------------------------------------------------


def test_a_report_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    found = moments.report(MODEL, schemes=["lns", "deepnorm"], correlation=0.3)
    file = tmp_path / "page.html"
    found.save(file)
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.loads
    assert not re.search(r"@import|url\(|fetch\(|https?://(?!www\.w3\.org/2000/svg)", text)
    assert page.seen.count("svg") == 6  # the stream's four, attention's and the feed-forward's
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
    stored = json.loads(re.findall(r"<pre>(\{.*?\n\})</pre>", text, re.S)[0].replace("&quot;", '"'))
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
        assert f"evenly among {said} costs" in moments.report(model, schemes=False).to_html()


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
    for name in (*moments.components(), *STACKS):
        for theory in ("refined", "published", "simplified"):
            laws = moments.component(name).under(theory)  # type: ignore[arg-type]
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
    "query",
    [
        "",
        "layers=6&norm=post&dropout=0.2&correlation=0.4",
        "d_model=256&heads=4&logit_scale=1.259&branch_scale=0.5&skip_scale=0.9&seq_len=32",
        "scheme=dslm&correlation=0.3&dropout=0.1",
        "scheme=dslm",
        "scheme=lns&activation=swiglu&normalization=rmsnorm&layers=4",
        "causal=true&layers=2&seq_len=8",
    ],
)
def test_the_line_of_python_is_what_is_shown(query: str) -> None:
    """The line is our own, printed for users to paste; run here as they would run it."""
    explorer = Explorer()
    view = explorer.view(query)
    assert not view.error
    found = eval(view.python, {"moments": moments})
    again = explorer.view(view.link)
    assert again.charts == view.charts
    assert again.values == view.values
    model = found.model
    assert f"{model.layers} layers, d_model {model.d_model}, {model.heads} heads" in view.title
    assert f"{model.seq_len} tokens" in view.title
    assert Explorer(model).model == model
    last = shown(float(found.variance[-1]))
    points = ET.fromstring(view.charts[0])
    assert f"{model.layers}: {last}" in [e.text for e in points.iter() if e.tag.endswith("title")]


def test_states_that_cannot_be() -> None:
    explorer = Explorer()
    for query, said in (
        ("layers=0", "layers"),
        ("layers=1e400", "layers"),
        ("layers=" + "1" * 4000, "layers"),
        ("layers=3.5", "layers"),
        ("dropout=nan", "dropout"),
        ("norm=none_such", "norm"),
        ("colour=red", "colour"),
        ("held=layers%3D-1", "layers"),
    ):
        view = explorer.view(query)
        assert said in view.error
        assert not view.charts
    settled = explorer.view("d_model=1024&heads=12")
    assert settled.values["heads"] == 16
    assert "do not divide" in settled.settled[0]


def test_a_scheme_decides_what_it_sets() -> None:
    explorer = Explorer()
    view = explorer.view("scheme=dslm&branch_scale=0.5&correlation=0.2")
    assert {"skip_scale", "branch_scale"} <= set(view.by_scheme)
    assert "branch_scale" not in view.python
    for scheme in moments.schemes():
        assert not explorer.view(
            f"layers=3&d_model=256&heads=4&seq_len=16&scheme={scheme.name}"
        ).error


def test_a_held_state_is_drawn_behind() -> None:
    explorer = Explorer(MODEL)
    plain, held = explorer.view("layers=6"), explorer.view("layers=6&held=norm%3Dpost")
    assert [c.count("<polyline") for c in plain.charts] == [1, 1, 1, 1]
    assert [c.count("<polyline") for c in held.charts] == [2, 2, 2, 2]
    assert held.link == "layers=6&held=norm%3Dpost"


def test_models_bring_their_own_controls() -> None:
    deep = MODEL.replace(branch_scale=[0.5, 0.4, 0.3, 0.2])
    assert "branch_scale" not in Explorer(deep).controls
    embedded = moments.preset("bert-tiny", seq_len=16)
    assert not {"correlation", "d_model", "heads"} & set(Explorer(embedded).controls)
    view = Explorer(embedded, python="moments.preset('bert-tiny', seq_len=16)").view("norm=pre")
    found = eval(view.python, {"moments": moments})
    assert found.model == embedded.replace(norm="pre")
    with pytest.raises(moments.DomainError, match="model"):
        Explorer("gpt2")  # type: ignore[arg-type]


def heights(chart: str) -> list[list[str]]:
    lines = (e for e in ET.fromstring(chart).iter() if e.tag.endswith("polyline"))
    return [line.attrib["points"].split() for line in lines]


def test_a_state_is_shown_as_it_becomes_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moments.show.explorer.FRAME", 0.002)
    explorer, query = Explorer(), "layers=5&causal=true&seq_len=40"
    first = list(explorer.views("layers=4"))[-1]
    *partial, last = explorer.views(query)
    whole = explorer.view(query)
    assert (last.charts, last.python, last.complete) == (whole.charts, whole.python, True)
    assert partial
    assert first.complete
    lengths = []
    for view in partial:
        assert (view.python, view.link, view.complete) == (whole.python, whole.link, False)
        if view.charts and not view.verdict:  # layers so far, over what stood there
            before, so_far = heights(view.charts[0])
            assert len(before) == 5
            lengths.append(len(so_far))
    assert lengths == sorted(lengths)
    assert all("band" not in chart for view in partial for chart in view.charts)


def test_a_newer_state_ends_an_older_one_of_the_same_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moments.show.explorer.FRAME", 0.0)
    explorer = Explorer()
    old = explorer.views("causal=true&layers=20", "this page")
    assert not next(old).complete
    other = explorer.views("layers=4", "another page")
    next(other)
    newer = list(explorer.views("layers=3", "this page"))
    assert newer[-1].complete
    assert not any(view.complete for view in old)
    assert list(other)[-1].complete
    assert [view.error for view in explorer.views("layers=x")] == [explorer.view("layers=x").error]


def test_layers_are_told_as_they_are_passed() -> None:
    told: list[np.ndarray] = []
    # token by token, where no layer is replayed
    found = moments.predict(
        MODEL, correlation=0.2, tokens=True, progress=lambda so_far: told.append(so_far())
    )
    assert len(told) == 2 * MODEL.layers
    names = ("variance", "correlation", "grad_variance", "grad_correlation")
    whole = np.array([getattr(found, name) for name in names])
    for passed, known in enumerate(told, 1):
        np.testing.assert_array_equal(known[:2, : passed + 1], whole[:2, : passed + 1])
        assert np.isnan(known[:2, passed + 1 :]).all()
        below = max(2 * MODEL.layers - passed, 0) + 1
        np.testing.assert_array_equal(known[2:, below:], whole[2:, below:])
        assert np.isnan(known[2:, :1]).all()


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with server("bert-tiny", seq_len=16) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def get(running: Server, path: str, host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(ADDRESS, running.server_port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_the_page_needs_this_server_alone(running: Server) -> None:
    status, text, headers = get(running, "/?layers=6")
    assert status == 200
    assert not Page(text).loads
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    known = json.loads(re.findall(r'id="known">(.*?)</script>', text, re.S)[0])
    assert [control["name"] for control in known] == list(running.explorer.controls)
    assert urlsplit(running.address).hostname == "127.0.0.1"


@pytest.mark.parametrize(
    ("query", "layers", "norm", "causal"),
    [
        ("", 2, "post", "false"),
        ("?layers=12&norm=pre&causal=true", 12, "pre", "true"),
        ("?layers=none", 2, "post", "false"),
    ],
)
def test_controls_stand_where_the_link_says_before_any_answer(
    running: Server, query: str, layers: int, norm: str, causal: str
) -> None:
    """In the page's own text: a browser shows it so, whatever the server answers later."""
    text = get(running, "/" + query)[1]
    rows = dict(re.findall(r"<label id='control-(\w+)'>(.*?)</label>", text, re.S))
    assert list(rows) == list(running.explorer.controls)
    (place,) = re.findall(r" value='(\d+)'", rows["layers"])
    assert running.explorer.controls["layers"].values[int(place)] == layers
    assert f"<output>{layers}</output>" in rows["layers"]
    for name, value in (("norm", norm), ("causal", causal)):
        assert re.findall(r"value='([\w-]+)' selected", rows[name]) == [value]


def test_the_server_answers_states(running: Server) -> None:
    status, text, _ = get(running, "/view?norm=pre&layers=3")
    *before, view = map(json.loads, text.splitlines())
    assert status == 200
    assert view["complete"]
    assert not any(one["complete"] for one in before)
    assert len(view["charts"]) == 4
    assert view["link"] == "layers=3&norm=pre"
    expected = moments.preset("bert-tiny", seq_len=16).replace(layers=3, norm="pre")
    assert eval(view["python"], {"moments": moments}).model == expected
    assert "3 layers" in view["title"]
    assert "bert-tiny" in view["title"]
    bad = json.loads(get(running, "/view?layers=x")[1])
    assert "layers" in bad["error"]


def test_the_server_answers_nothing_else(running: Server) -> None:
    for path in ("/explorer.py", "/../../etc/passwd", "/view?layers=" + "1" * 5000, "/%2e%2e/"):
        assert get(running, path)[0] == 404
    assert get(running, "/", host="evil.example:80")[0] == 403
    with socket.create_connection((ADDRESS, running.server_port), timeout=30) as plain:
        plain.sendall(b"GET http://[::1/ HTTP/1.1\r\n\r\n")
        assert plain.recv(4096).startswith(b"HTTP/1.1 400 ")
    with pytest.raises(moments.DomainError, match="port"):
        Server(running.explorer, running.server_port)


def test_widgets_follow_their_sliders() -> None:
    shown_ = explore(MODEL)
    assert "little" in shown_.view.title
    before = shown_._shown.value
    shown_.inputs["layers"].value = 6
    assert "6 layers" in shown_.view.title
    assert shown_._shown.value != before
    assert eval(shown_.python, {"moments": moments, "model": MODEL}).model == MODEL.replace(
        layers=6
    )
    shown_.inputs["scheme"].value = "deepnorm"
    assert shown_.inputs["branch_scale"].disabled
    shown_.inputs["scheme"].value = "none"
    assert not shown_.inputs["branch_scale"].disabled


def test_widgets_of_a_notebook_show_what_is_known() -> None:
    """Where a loop runs, a moved slider returns at once, and the last state is the one shown."""
    shown_ = explore(MODEL)
    pictures: list[str] = []
    shown_._shown.observe(lambda change: pictures.append(change["new"]), names="value")

    async def drag() -> None:
        for layers in (5, 6, 7, 8):
            shown_.inputs["layers"].value = layers
        assert not pictures
        assert shown_._following is not None
        await shown_._following

    asyncio.run(drag())
    assert "8 layers" in pictures[-1]
    assert shown_._view.complete
    assert shown_.view.charts == shown_.explorer.view("layers=8").charts
