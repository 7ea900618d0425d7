"""The command `moments`: what it prints and writes, and how it fails."""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import io
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import moments
from moments import Transformer
from moments.cli import app, main
from moments.cli.base import scheme_options

RUNNER = CliRunner()
OWN = ["--layers", "3", "--d-model", "64", "--heads", "4", "--seq-len", "32"]
PUBLISHED = ["--theory", "published"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The command prints validity warnings; in this process they would be errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        yield


def run(*arguments: str) -> str:
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command from its entry point on: exit status and both outputs, in this process."""
    shown, said, status = io.StringIO(), io.StringIO(), None
    with (
        warnings.catch_warnings(),
        mock.patch.object(sys, "argv", ["moments", *arguments]),
        contextlib.redirect_stdout(shown),
        contextlib.redirect_stderr(said),
    ):
        try:
            main()
        except SystemExit as stopped:
            status = stopped.code
    assert isinstance(status, int)
    return subprocess.CompletedProcess(list(arguments), status, shown.getvalue(), said.getvalue())


def test_the_command_is_a_process_of_its_own() -> None:
    arguments = ["predict", "gpt2", "--layers", "0"]
    command = [sys.executable, "-m", "moments", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    here = process(*arguments)
    assert (done.returncode, done.stdout) == (here.returncode, here.stdout) == (2, "")
    assert done.stderr == here.stderr


# --- predict --------------------------------------------------------------------------------------


def test_vision_models_read_a_photograph() -> None:
    short = ["vit-base", "--layers", "2"]
    predicted = json.loads(run("predict", *short, "--json"))
    explained = json.loads(run("explain", *short, "--json"))
    plan = json.loads(run("solve", *short, "--objective", "block_variance", "--json"))
    assert plan["inputs"]["variance"] == pytest.approx(predicted["variance"][0])
    assert plan["inputs"]["correlation"] == pytest.approx(predicted["correlation"][0])
    assert explained
    said = process("predict", *short)
    assert "photograph" in said.stderr
    own = process("predict", *short, "--variance", "1", "--correlation", "0.4")
    assert "photograph" not in own.stderr


def test_predict_as_json_is_the_prediction() -> None:
    printed = json.loads(
        run("predict", *OWN, "--correlation", "0.3", "--dropout", "0.1", *PUBLISHED, "--json")
    )
    model = moments.Transformer(3, 64, 4, 32, dropout=0.1)
    expected = moments.predict(model, correlation=0.3, theory="published")
    for quantity in ("variance", "correlation", "grad_variance", "grad_correlation"):
        assert printed[quantity] == getattr(expected, quantity).tolist()
    assert moments.Transformer.from_dict(printed["model"]) == model
    assert printed["theory"] == "published"


def test_every_option_reaches_the_model() -> None:
    printed = json.loads(
        run(
            *("predict", *OWN, "--d-ff", "100", "--norm", "post", "--activation", "gelu"),
            *("--dropout", "0.2", "--causal", "--variance", "2", "--correlation", "0.4"),
            *("--grad-variance", "3", "--grad-correlation", "0.5", *PUBLISHED, "--json"),
        )
    )
    model = printed["model"]
    assert (model["d_ff"], model["norm"], model["activation"]) == (100, "post", "gelu")
    assert (model["dropout"], model["causal"]) == (0.2, True)
    assert (printed["variance"][0], printed["correlation"][0]) == (2.0, 0.4)
    assert (printed["grad_variance"][-1], printed["grad_correlation"][-1]) == (3.0, 0.5)


def test_predict_a_preset_as_a_table() -> None:
    words = ("predict", "bert-base", "--layers", "4", "--seq-len", "64", *PUBLISHED)
    table = run(*words, "--all")
    model = moments.preset("bert-base", seq_len=64).replace(layers=4)
    expected = moments.predict(model, theory="published")
    lines = [line.replace("│", " ").replace("|", " ").split() for line in table.splitlines()]
    rows = {words[0]: words[1:] for words in lines if words and words[0].isdigit()}
    assert sorted(rows) == [str(n) for n in range(5)]
    for n in range(5):
        shown = [float(word) for word in rows[str(n)][:4]]
        values = [
            getattr(expected, quantity)[n]
            for quantity in ("variance", "correlation", "grad_variance", "grad_correlation")
        ]
        assert shown == pytest.approx(values, rel=1e-3, abs=1e-12)


def test_predict_shows_a_screen() -> None:
    """The verdict, what was assumed, five layers of however many, how to see all."""
    first, *body, last = run("predict", "gpt2", "--seq-len", "64").splitlines()
    assert first.startswith("gpt2: variance x ")
    assert "--all" in last
    assert any("12 layers of width 768, causal attention" in line for line in body)
    rows = [line.split() for line in body]
    shown = [int(row[0]) for row in rows if len(row) == 4 and row[0].isdigit()]
    assert shown == [0, 3, 6, 9, 12]
    assert len(body) < 10


def test_predict_a_config_file(tmp_path: Path) -> None:
    config = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 96}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "num_attention_heads": 6}))
    for argument in (str(file), str(tmp_path)):
        printed = json.loads(run("predict", argument, "--seq-len", "16", *PUBLISHED, "--json"))
        assert printed["model"]["d_model"] == 96
        assert printed["model"]["seq_len"] == 16
        assert len(printed["variance"]) == 3


def test_csv_and_plot(tmp_path: Path) -> None:
    table, picture = tmp_path / "points.csv", tmp_path / "picture.png"
    run(
        *("predict", *OWN, *PUBLISHED, "--correlation", "0.3"),
        *("--csv", str(table), "--plot", str(picture)),
    )
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    with table.open() as lines:
        rows = list(csv.DictReader(lines))
    expected = moments.predict(
        moments.Transformer(3, 64, 4, 32), correlation=0.3, theory="published"
    )
    stream = [row for row in rows if row["site"] == "stream"]
    assert [int(row["layer"]) for row in stream] == [0, 1, 2, 3]
    assert [float(row["variance"]) for row in stream] == pytest.approx(
        expected.variance.tolist(), rel=1e-12
    )
    assert len(rows) == len(expected.to_frame())


# --- formulas -------------------------------------------------------------------------------------


def test_formulas_lists_every_component() -> None:
    listed, names = run("formulas"), moments.components()
    for name in names:
        assert name in listed
    assert json.loads(run("formulas", "--json")) == {
        name: moments.component(name).title for name in names
    }


@pytest.mark.parametrize("theory", ["refined", "published", "simplified"])
@pytest.mark.parametrize("name", ["relu", "layernorm", "dropout"])
def test_formulas_as_json(name: str, theory: Any) -> None:
    printed = json.loads(run("formulas", name, "--theory", theory, "--json"))
    laws = moments.component(name).under(theory)
    assert list(printed) == list(laws)
    for quantity, law in laws.items():
        entry = printed[quantity]
        assert entry["expression"] == str(law.expr)
        assert entry["latex"] == law.latex()
        assert entry["source"] == str(law.source)
        assert entry["status"] == law.status
        assert set(entry["domain"]) == set(entry["symbols"]) == set(law.arguments)


def test_formulas_for_people() -> None:
    text = " ".join(run("formulas", "relu", *PUBLISHED).split())
    assert "asin(x_correlation)" in text
    assert "Table 18" in text
    assert "exact" in text
    latex = " ".join(run("formulas", "relu", *PUBLISHED, "--latex").split())
    assert r"\operatorname{asin}" in latex


def test_version_and_help() -> None:
    assert run("--version").strip() == moments.__version__
    for command in ("predict", "compare", "formulas"):
        assert "--json" in run(command, "--help")


# --- bad input ------------------------------------------------------------------------------------


def test_options_of_schemes_reach_every_command_that_applies_them() -> None:
    whole = moments.preset("bert-tiny").with_scheme("xavier", per_head=False)
    option = ["--option", "per_head=false"]
    solved = json.loads(run("solve", "bert-tiny", "--objective", "xavier", *option, "--json"))
    assert Transformer.from_dict(solved["model"]).weights == whole.weights
    both = ["--scheme", "xavier", "--scheme", "normal", *option, "--json"]
    rows = json.loads(run("schemes", "bert-tiny", *both))["schemes"]
    post = moments.predict(whole.replace(norm="post"))
    growth = next(row for row in rows if row["scheme"] == "xavier")["variance_growth"]
    assert growth == pytest.approx(post.variance[-1] / post.variance[0])
    result = RUNNER.invoke(app, ["audit", "bert-tiny", "--scheme", "xavier", *option, "--json"])
    found = json.loads(result.stdout)
    rows = [f for f in found["rows"] if (f["role"], f["quantity"]) == ("query", "variance")]
    assert {row["expected"] for row in rows} == {whole.layer_weights(1).query}
    assert found["unchecked"] == []
    with pytest.raises(moments.DomainError, match="option = 'nothing'"):
        moments.compare_schemes(whole, "normal", options={"nothing": 1})


def test_values_of_options_are_what_they_look_like() -> None:
    given = ["per_head=False", "variance=4e-4", "layers=3", "position=after-norm"]
    values = {"per_head": False, "variance": 4e-4, "layers": 3, "position": "after-norm"}
    assert scheme_options(given) == values
    assert scheme_options(None) == {}


def test_a_good_command_says_nothing_on_standard_error() -> None:
    result = process("predict", *OWN, *PUBLISHED, "--json")
    assert result.returncode == 0
    assert result.stderr == ""
    assert np.isfinite(json.loads(result.stdout)["variance"]).all()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["predict", "bert-bass"], "neither a file nor a preset; did you mean bert-base or"),
        (["predict", "my-model"], "neither a file nor a preset; presets: bert-tiny"),
        (
            ["audit", "bert-tiny", "--plan", "pyproject.toml"],
            "'pyproject.toml': must be valid JSON (",
        ),
        (["predict", "missing.json"], "missing.json"),
        (["predict", "--layers", "3"], "add --d-model, --heads, --seq-len"),
        (["solve", "--layers", "3"], "no MODEL given: name a preset or a config.json\n"),
        (["audit", "gpt2", "--option", "per_head=false"], "add --scheme"),
        (["solve", "bert-tiny", "--option", "per_head"], "must be NAME=VALUE"),
        (["predict", *OWN, "--dropout", "1.5"], "dropout = 1.5"),
        (["predict", *OWN, "--heads", "5"], "heads = 5"),
        (["predict", *OWN, "--correlation", "2", *PUBLISHED], "correlation = 2.0"),
        (["predict", *OWN, "--csv", "/nowhere/x.csv", *PUBLISHED], "cannot write /nowhere/x.csv"),
        (["formulas", "swish"], "component = 'swish'"),
        (["sweep", "bert-tiny", "--axis", "layes=3"], "did you mean 'layers'"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_status_2(arguments: list[str], said: str) -> None:
    result = process(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["predict", *OWN, "--theory", "folklore"], "folklore"),
        (["predict", *OWN, "--dropout", "some"], "--dropout"),
        (["predict", *OWN, "--depth", "3"], "--depth"),
        (["foretell"], "foretell"),
    ],
    ids=["choice", "number", "option", "command"],
)
def test_what_the_parser_refuses_is_one_line_and_status_2(arguments: list[str], said: str) -> None:
    result = process(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "text",
    ['{"model_type": "bert", "initializer_range": "small"}', "{", '{"model_type": "no such type"}'],
    ids=["entry", "syntax", "type"],
)
def test_a_bad_config_is_one_line_and_status_2(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    result = process("predict", str(file))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_picture_of_an_unknown_format(tmp_path: Path) -> None:
    result = process("predict", *OWN, *PUBLISHED, "--plot", str(tmp_path / "picture.xyz"))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "must be a file name that ends in .png, .svg or .pdf" in result.stderr


@pytest.mark.parametrize(("ending", "first"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_picture_is_what_its_ending_says(ending: str, first: bytes, tmp_path: Path) -> None:
    picture = tmp_path / f"picture.{ending}"
    run("predict", *OWN, *PUBLISHED, "--plot", str(picture))
    assert picture.read_bytes().startswith(first)


def test_warnings_go_to_standard_error() -> None:
    result = process("predict", *OWN, "--causal", *PUBLISHED, "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["warnings"]
    assert result.stderr.startswith("ValidityWarning: ")
    assert result.stderr.count("\n") == 1


def test_compare_schemes_chosen() -> None:
    shape = ["bert-tiny", "--seq-len", "16", "--scheme", "lns", "--scheme", "deepnorm"]
    rows = json.loads(run("schemes", *shape, "--json"))["schemes"]
    assert [row["scheme"] for row in rows] == ["lns", "deepnorm"]


# --- plans, files and words -----------------------------------------------------------------------


def test_a_plan_is_predicted_on_the_input_it_was_solved_for(tmp_path: Path) -> None:
    model = moments.Transformer(2, 16, 4, 8, dropout=0.1)
    plan = moments.solve(model, "stream_variance", variance=2.0, correlation=0.3)
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    printed = json.loads(run("predict", str(file), "--json"))
    expected = moments.predict(plan.model, variance=2.0, correlation=0.3)
    assert printed["variance"] == expected.variance.tolist()
    assert moments.Transformer.from_dict(printed["model"]) == plan.model
    own = json.loads(run("predict", str(file), "--variance", "1", "--json"))
    assert own["variance"] == moments.predict(plan.model, correlation=0.3).variance.tolist()
    for command in ("explain", "schemes"):
        words = ("--scheme", "xavier") if command == "schemes" else ()
        assert json.loads(run(command, str(file), *words, "--json"))


@pytest.mark.parametrize(
    "spoil",
    [
        {"inputs": {"temper": 1}},
        {"inputs": 3},
        {"target": "x"},
        {"feasible": 1},
        {"residual": None},
        {"free": "k"},
        {"model": 5},
        {"model": {"format": 1, "layers": 2}},
        {"model": {"format": 1, "weights": 3}},
        {"format": 2},
    ],
    ids=str,
)
def test_a_spoilt_plan_is_refused(spoil: dict[str, Any]) -> None:
    plan = moments.solve(moments.Transformer(2, 16, 4, 8), "xavier")
    assert moments.solver.Plan.from_json(plan.to_json()) == plan
    data = json.loads(plan.to_json()) | spoil
    with pytest.raises(moments.DomainError):
        moments.solver.Plan.from_json(json.dumps(data))


def test_scheme_options_are_read_as_json() -> None:
    printed = json.loads(
        run("predict", *OWN, "--scheme", "xavier", "--option", "per_head=false", "--json")
    )
    model = moments.Transformer(3, 64, 4, 32).with_scheme("xavier", per_head=False)
    assert moments.Transformer.from_dict(printed["model"]) == model
    shape = ["bert-tiny", "--seq-len", "8", "--json"]
    plan = json.loads(run("solve", *shape, "--scheme", "normal", "--option", "variance=0.01"))
    assert plan["model"]["weights"]["query"] == 0.01


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["predict", *OWN, "--option", "a=1"], "--option sets an option of a scheme: add --scheme"),
        (["predict", *OWN, "--scheme", "xavier", "--option", "per_head"], "must be NAME=VALUE"),
        (["predict", *OWN, "--scheme", "deepnrm"], "did you mean 'deepnorm'?"),
        (["solve", "bert-tiny", "--objective", "final_varience"], "did you mean 'final_variance'"),
        (["schemes", "bert-tiny", "--scheme", "xaver"], "did you mean 'xavier'?"),
        (["predict", *OWN, "--csv", ""], "--csv: cannot write '.': not the name of a file"),
        (["predict", *OWN, "--plot", "/"], "--plot: cannot write '/': not the name of a file"),
        (["predict", *OWN, "--plot", "."], "not the name of a file"),
        (["predict", *OWN, "--plot", "picture"], "ends in .png, .svg or .pdf"),
        (["predict", "x" * 300 + ".json"], "File name too long"),
        (["audit", "bert-tiny", "--plan", "docs"], "--plan = 'docs': must be"),
        (["audit", "bert-tiny", "--scheme", "xaver"], "did you mean 'xavier'?"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, list) else "",
)
def test_bad_words_and_files(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["moments", *arguments])

    @functools.wraps(moments.predict)
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("refused only after the work")

    for name in moments.__all__:  # what is first imported below would keep `never`
        getattr(moments, name)
    importlib.import_module("moments.validation.errors")
    monkeypatch.setattr("moments.torch.huggingface_modules.build_module", never)
    monkeypatch.setattr("moments.prediction.predict.predict", never)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_command_alone_shows_its_help() -> None:
    result = process()
    assert result.returncode == 2
    assert "schemes" in result.stdout
    assert result.stderr == ""


def test_validate_says_how_far_it_is_when_piped() -> None:
    result = process("validate", "--subset", "quick", "--theory", "simplified")
    assert result.returncode == 0
    assert "note: predicting 4 models ..." in result.stderr
    assert "100 % after" in result.stderr


def test_tables_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = run("predict", "bert-tiny", "--seq-len", "8", "--all")
    assert "layer  variance  token correlation  gradient variance  gradient correlation\n" in text
    assert "…" not in text


def test_explain_shows_its_formulas() -> None:
    text = run("explain", "bert-tiny", "--seq-len", "8")
    assert "= (drop_prob*x_mean**2 + x_variance)/(1 - drop_prob)" in text
    model = moments.Transformer(2, 16, 4, 8)
    assert repr(moments.explain(model, 1)).startswith("Explanation(layer 1 of 2, ")
    found = moments.compare_schemes(model, ["xavier", "lns"])
    assert repr(found) == "SchemeComparison(2 layers: xavier, lns)"


@pytest.mark.parametrize("names", [["xavier"], ["lns"], ["dslm", "xavier"]], ids="-".join)
def test_schemes_of_some_families_are_drawn(names: list[str]) -> None:
    model = moments.Transformer(3, 16, 4, 8)
    figure = moments.compare_schemes(model, names).plot()
    legends = [legend for ax in figure.axes if (legend := ax.get_legend()) is not None]
    assert {text.get_text() for legend in legends for text in legend.get_texts()} == set(names)


def test_a_table_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pandas

    file = tmp_path / "points.csv"
    run("predict", *OWN, *PUBLISHED, "--csv", str(file))
    before = file.read_bytes()

    def broken(frame: Any, path: Path, **_: Any) -> None:
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pandas.DataFrame, "to_csv", broken)
    result = RUNNER.invoke(app, ["predict", *OWN, *PUBLISHED, "--csv", str(file)])
    assert "No space left on device" in str(result.exception)
    assert file.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == ["points.csv"]


@pytest.mark.parametrize("ending", ["png", "SVG", "pdf"])
def test_a_picture_is_of_the_kind_of_its_ending(ending: str, tmp_path: Path) -> None:
    from moments.show.plot import Picture, save

    save(Picture(4, 3), tmp_path / f"picture.{ending}")
    begun = {"png": b"\x89PNG", "SVG": b"<?xml", "pdf": b"%PDF"}[ending]
    assert (tmp_path / f"picture.{ending}").read_bytes().startswith(begun)
    assert len(list(tmp_path.iterdir())) == 1


# --- sweeps ---------------------------------------------------------------------------------------

GRID = ("sweep", "--d-model", "32", "--heads", "2", "--seq-len", "8")


def test_a_sweep_is_that_of_the_library(tmp_path: Path) -> None:
    table, picture, kept = tmp_path / "a.csv", tmp_path / "a.png", tmp_path / "a.jsonl"
    arguments = (
        *(*GRID, "--axis", "layers=1,3", "--axis", "weights.query=log:1e-3:1e-2:3"),
        *("--correlation", "0.2", "--csv", str(table), "--plot", str(picture)),
        *("--path", str(kept), "--quantity", "correlation", "--json"),
    )
    data = json.loads(run(*arguments))
    model = moments.Transformer(1, 32, 2, 8)
    axes = {"layers": [1, 3], "weights.query": np.geomspace(1e-3, 1e-2, 3)}
    expected = moments.sweep(model, axes, correlation=0.2).to_frame()
    for frame in (pd.DataFrame(data["rows"]), pd.read_csv(table)):
        found = frame.drop(columns=["warnings", "refused"])
        pd.testing.assert_frame_equal(found, expected.drop(columns=["warnings", "refused"]))
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert moments.Sweep.load(kept).done.all()
    assert "6 configurations" in run(*arguments[:-1])


def test_values_of_axes() -> None:
    arguments = (*GRID, "--layers", "1", "--json")
    for spelled, expected in (
        ("layers=range:1:7:3", [1, 4, 7]),
        ("layers=log:1:4:3", [1, 2, 4]),
        ("layers=log:1:3:4", [1, 2, 3]),
        ("layers=1,2.0", [1, 2]),
        ("dropout=lin:0:0.2:3", [0.0, 0.1, 0.2]),
        ("scheme=none,deepnorm", [None, "deepnorm"]),
        ("theory=published", ["published"]),
    ):
        data = json.loads(run(*arguments, "--axis", spelled))
        assert data["axes"][spelled.partition("=")[0]] == pytest.approx(expected)
    deep = json.loads(run(*arguments, "--axis", "layers=1,2", "--profile"))["rows"]
    assert [row["layer"] for row in deep] == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no --axis given"),
        (("--axis", "layers"), "NAME=VALUES"),
        (("--axis", "layers="), "NAME=VALUES"),
        (("--axis", "layer=3", "--layers", "1"), "did you mean 'layers'"),
        (("--axis", "layers=log:0:3:4"), "positive numbers"),
        (("--axis", "dropout=lin:0:1"), "lin:LEAST:MOST:COUNT"),
        (("--axis", "layers=range:5:1"), "whole numbers"),
        (("--axis", "layers=1,,2"), "between commas"),
        (("--axis", "layers=1", "--axis", "layers=2"), "given twice"),
        (("--axis", "layers=1", "--quantity", "varience"), "did you mean 'variance'"),
        (("--axis", "layers=1", "--x", "dropout"), "--x"),
        (("--axis", "layers=1", "--plot", "a.bmp"), "ends in"),
        (("--axis", "heads=3", "--layers", "1"), "every configuration is refused"),
        (("--axis", "layers=2,3.5"), "layers = 3.5: must be a whole number"),
        (("--layers", "1", "--axis", "heads=2.5"), "heads = 2.5: must be a whole number"),
    ],
)
def test_a_bad_sweep_says_what_is_wrong(arguments: tuple[str, ...], said: str) -> None:
    result = RUNNER.invoke(app, [*GRID, *arguments])
    assert isinstance(result.exception, moments.DomainError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("solve", "bert-tiny", "dslm"), "`moments solve --help` has examples"),
        (
            ("predict", "mine.py:make"),
            "`moments check` and `moments audit` take your own module, as FILE.py:NAME",
        ),
        (("schemes", "bert-tiny", "--correlation", "nan"), "correlation = nan"),
        (("report", "bert-tiny", "--scheme", "nope"), "scheme = 'nope'"),
    ],
)
def test_what_was_meant_is_said(
    arguments: tuple[str, ...], said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["moments", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out


def test_nothing_is_said_of_schemes_that_nobody_asked_for(tmp_path: Path) -> None:
    words = [
        "report",
        "bert-tiny",
        "--seq-len",
        "16",
        "--no-schemes",
        "-o",
        str(tmp_path / "a.html"),
    ]
    assert "schemes" not in RUNNER.invoke(app, words).stderr


def test_a_type_that_is_no_stack_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "sam"}')
    result = RUNNER.invoke(app, ["predict", str(file)])
    assert "model_type = 'sam': no model of text or of images" in str(result.exception)


GIVEN = {
    "(nn.Linear(3, 3), 1, 2)": "result of .*a module or \\(module, batch\\)",
    "(nn.Linear(3, 3), 'words')": "result of .*a module or \\(module, batch\\)",
    "(nn.Linear(3, 3), nn.Linear(3, 3))": "result of .*a module or \\(module, batch\\)",
    "(stack, torch.zeros(2, 3, 5))": "running it raised",
    "None": "must be an nn.Module",
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("command", ["audit", "check"])
def test_what_a_file_gives_is_refused_in_a_line(command: str, given: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)\n"
        f"def build(): return {given}\n"
    )
    words = [command, f"{file}:build", *(["--scheme", "xavier"] if command == "audit" else [])]
    if command == "audit" and given.startswith("(stack"):
        pytest.skip("tensors are audited without a batch where torch's own class says the rest")
    error = RUNNER.invoke(app, words).exception
    assert isinstance(error, moments.MomentsError)
    assert re.search(GIVEN[given], str(error))
