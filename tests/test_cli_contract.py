"""What scripts and shells rely on: JSON, examples, completion, silence, model files."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import moments
from moments.cli import app
from moments.cli.base import (
    CHECK,
    INITIALISE,
    PREDICT,
    REFERENCE,
    _complete_model,
    complete_scheme,
    printable,
)

ROOT = Path(__file__).parent.parent
RUNNER = CliRunner()
SMALL = ("bert-tiny", "--seq-len", "16")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        yield


@functools.cache
def commands() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def run(*arguments: str, status: int = 0) -> Any:
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result


def examples() -> list[str]:
    lines = [line for c in commands().values() for line in (c.epilog or "").split("\n\n")]
    return [line.strip() for line in lines if line.strip().startswith("moments ")]


# --- JSON -----------------------------------------------------------------------------------------

PRINTED = {
    "predict": (*SMALL, "--json"),
    "solve": (*SMALL, "--layers", "3", "--objective", "dslm", "--json"),
    "explain": (*SMALL, "--json"),
    "formulas": ("relu", "--json"),
    "schemes": (*SMALL, "--scheme", "lns", "--scheme", "noci", "--json"),
    "audit": ("bert-tiny", "--json"),
    "compare": (*SMALL, "--seeds", "2", "--json"),
    "validate": ("--subset", "pre-full-N24-xavier-relu-*", "--theory", "refined", "--json"),
    "sweep": (*SMALL, "--axis", "layers=1,2", "--json"),
    "check": (*SMALL, "--json"),
    "first-step": ("config.json", "--seq-len", "8", "--lr", "1e-4", "--json"),
}
TINY = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 200}


WITHOUT_ROOM = {"explain": list, "formulas": dict}
"""Commands whose JSON is a list or a map by name, which carries no version of its own."""


def test_every_command_with_json_stands_on_its_page() -> None:
    with_json = {
        name
        for name, command in commands().items()
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert with_json == {*PRINTED, "report"}
    page = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    assert [name for name in sorted(with_json) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("command", sorted(PRINTED))
def test_what_a_command_prints_is_json_with_a_version(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strict JSON: RFC 8259 has no NaN."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(TINY), encoding="utf-8")

    def refuse(word: str) -> None:
        raise AssertionError(word)

    printed = json.loads(run(command, *PRINTED[command]).stdout, parse_constant=refuse)
    if command in WITHOUT_ROOM:
        assert isinstance(printed, WITHOUT_ROOM[command])
    else:
        assert printed["format"] == 1


# --- help, completion, silence --------------------------------------------------------------------


def test_the_help_lists_at_most_twelve_commands_under_what_they_are_for() -> None:
    said = run("--help").stdout
    shown = [name for name, command in commands().items() if not command.hidden]
    assert len(shown) <= 12
    assert all(re.search(rf"^│ {name} ", said, re.M) for name in shown)
    assert {commands()[name].rich_help_panel for name in shown} == {
        PREDICT,
        INITIALISE,
        CHECK,
        REFERENCE,
    }


def test_help_has_no_words_of_the_parser() -> None:
    for words in ([], ["predict"], ["validate"]):
        assert "<bool>" not in run(*words, "--help").stdout


def test_every_command_teaches_by_examples() -> None:
    for name, command in commands().items():
        assert f"moments {name}" in (command.epilog or ""), (
            f"{name}: app.command(epilog=examples(...))"
        )
        assert "--quiet" in [option for p in command.params for option in p.opts], name


@pytest.mark.parametrize("line", examples())
def test_examples_are_commands(line: str) -> None:
    """Every option exists and takes such a value."""
    words = shlex.split(line.partition(" > ")[0])[1:]
    command = commands()[words[0]]
    with command.make_context(words[0], words[1:]) as context:
        model = context.params.get("model")
    if isinstance(model, str) and "." not in model and "/" not in model:
        assert model in moments.preset.names()


def test_shells_are_offered_models_and_schemes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bert-mine.json").write_text("{}")
    assert {"bert-base", "bert-mine.json"} <= set(_complete_model("bert-"))
    assert not _complete_model("no-such")
    assert [name for name, _ in complete_scheme("dsl")] == ["dslm"]
    offered = RUNNER.invoke(
        app,
        [],
        env={
            "_MOMENTS_COMPLETE": "complete_bash",
            "COMP_WORDS": "moments predict gpt2-",
            "COMP_CWORD": "2",
        },
        prog_name="moments",
    )
    assert "gpt2-xl" in offered.stdout.split()


@pytest.mark.parametrize("command", ["schemes", "report"])
def test_what_takes_a_while_says_how_far_it_is(command: str, tmp_path: Path) -> None:
    words = [command, *SMALL, "--scheme", "lns", "--scheme", "noci"]
    words += ["-o", str(tmp_path / "r.html")] if command == "report" else []
    told = run(*words).stderr
    assert "note: applying schemes ..." in told
    assert "note: applying schemes: 100 % after" in told


def test_quiet_drops_all_but_the_answer(tmp_path: Path) -> None:
    page = str(tmp_path / "r.html")
    words = ["report", *SMALL, "--scheme", "lns", "--scheme", "noci", "-o", page]
    assert "note:" in run(*words).stderr
    for option in ("--quiet", "-q"):
        silent = run(*words, option)
        assert silent.stdout == run(*words).stdout
        assert not silent.stderr
    with pytest.raises(moments.DomainError):
        app(["predict", "bert-tiny", "--variance", "-1", "-q"], standalone_mode=False)


@pytest.mark.parametrize(
    "words", [("--help",), ("predict", *SMALL, "--json"), ("schemes",)], ids=lambda words: words[0]
)
def test_a_full_or_closed_standard_output_is_no_traceback(words: tuple[str, ...]) -> None:
    """Two, with a line that says so, of a disk that is full; nothing of a reader that went."""
    command = [sys.executable, "-m", "moments", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: cannot write the answer: No space left on device\n"
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_name_cannot_colour_the_screen() -> None:
    red = "\x1b[31mred\x1b[0m"
    with pytest.raises(moments.DomainError, match=r"name = .*x1b.* printable"):
        moments.Transformer(2, 16, 2, 8, name=red)
    assert printable(f"a\n\t{red}") == f"a\n\t{red}".replace("\x1b", "\N{REPLACEMENT CHARACTER}")


# --- model files ----------------------------------------------------------------------------------


def test_a_model_file_is_the_model(tmp_path: Path) -> None:
    stored = tmp_path / "deep.json"
    stored.write_text(run("predict", *SMALL, "--layers", "5", "--scheme", "lns", "--json").stdout)
    expected = moments.preset("bert-tiny", seq_len=16).replace(layers=5).with_scheme("lns")
    predicted = json.loads(run("predict", str(stored), "--json").stdout)
    assert moments.Transformer.from_dict(predicted["model"]) == expected
    assert predicted["variance"] == moments.predict(expected).variance.tolist()


def test_a_model_file_by_hand(tmp_path: Path) -> None:
    page = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    file = tmp_path / "mine.toml"
    file.write_text(shown)
    base = moments.preset("bert-base").replace(layers=24, norm="pre")
    found = json.loads(run("predict", str(file), "--json").stdout)
    assert moments.Transformer.from_dict(found["model"]) == base.with_scheme("lns")
    file.write_text('layers = 3\nd_model = 32\nheads = 2\nseq_len = 8\nscheme = "post-ln"\n')
    own = moments.Transformer(3, 32, 2, 8).with_scheme("post-ln")
    found = json.loads(run("predict", str(file), "--seq-len", "9", "--json").stdout)
    assert moments.Transformer.from_dict(found["model"]) == own.replace(seq_len=9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers = ", "valid TOML"),
        ("layerz = 3", "layerz"),
        ('preset = "gpt9"', "preset"),
        ("preset = 3", "preset"),
        ('preset = "gpt2"\nscheme = 4', "scheme"),
        ('preset = "gpt2"\n[scheme]\nname = "lns"\nwidth = 3', "width"),
    ],
)
def test_a_bad_model_file_says_why(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    result = RUNNER.invoke(app, ["predict", str(file)])
    assert isinstance(result.exception, moments.DomainError)
    assert said in str(result.exception)


# --- what the documents say to type ---------------------------------------------------------------

PLACEHOLDERS = re.compile(r"\b(?:COMMAND|CONFIG|FILE|MODEL|NAME|PATTERN)\b")
SMALLER = {
    "compare": ("--layers", "1", "--seq-len", "16", "--seeds", "1", "--no-picture"),
    "first-step": ("--layers", "2", "--seq-len", "16"),
    "predict": ("--layers", "3", "--seq-len", "16"),
    "report": ("--seq-len", "16", "--scheme", "lns"),
    "validate": ("--theory", "published", "--subset", "quick"),
}
"""Options of less work, behind those of the documents."""


def written() -> list[str]:
    """Commands of README and docs, without placeholders."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    found = re.findall(r"`(moments [a-z][^`\n]*)`", text)
    for block in re.findall(r"```bash\n(.*?)```", text, re.S):
        found += re.findall(r"\b(moments [a-z][^#>\n]*)", block)
    lines = dict.fromkeys(line.partition(" > ")[0].strip() for line in found)
    alone = ("moments compare", "moments explore")  # their names; test_pages.py has the latter
    return [line for line in lines if not PLACEHOLDERS.search(line) and line not in alone]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the documents name."""
    pytest.importorskip("transformers")
    from moments.torch.huggingface_modules import build_module

    place = tmp_path_factory.mktemp("documents")
    config = {**TINY, "n_layer": 2, "n_embd": 16, "n_positions": 16}
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (place / "deep.json").write_text(run("predict", *SMALL, "--json").stdout, encoding="utf-8")
    build_module(config, seed=0).save_pretrained(place / "checkpoint")
    (place / "model.py").write_text(
        "from torch import nn\n\n\n"
        "def build():\n"
        "    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)\n"
        "    return nn.Sequential(nn.Embedding(99, 32), nn.TransformerEncoder(layer, 2))\n\n\n"
        "GPT = build\n",
        encoding="utf-8",
    )
    return place


@pytest.mark.slow
@pytest.mark.parametrize("line", written())
def test_commands_of_the_documents_run(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    command, *words = shlex.split(line.replace("@24=", "@2="))[1:]
    result = RUNNER.invoke(app, [command, *words, *SMALLER.get(command, ())])
    assert result.exit_code in (0, 1), result.output
    assert not isinstance(result.exception, Exception), result.exception
    assert result.stdout
