"""The notebooks: what is stored was executed from the code that stands there; all run here."""

from __future__ import annotations

import ast
import base64
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

import moments
from studies import figures

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
SMALLER = {
    "a-block-of-your-own": {"seeds=40": "seeds=2"},
    "choose-a-learning-rate": {
        "WORDS, TOKENS, STEPS = 64, 2, 128, 32, 150": "WORDS, TOKENS, STEPS = 32, 1, 32, 8, 20",
        "rates.first_instability, 8)": "rates.first_instability, 2)",
        "seeds=3": "seeds=2",
        "sizes=(64, 128)": "sizes=(32, 64)",
    },
    "choose-a-scheme": {"layers=24": "layers=3"},
    "debug-my-model": {
        "layers=8, d_model=128": "layers=4, d_model=64",
        "layer, 8,": "layer, 4,",
        "128, 4, 512": "64, 4, 256",
        "4, 1, 128": "4, 1, 64",
        "4, 32, 128": "4, 32, 64",
        "[:256]": "[:128]",
    },
    "design-a-200-layer-model": {
        '"layers": 200': '"layers": 6',
        "layer, 200": "layer, 6",
        "arange(201)": "arange(7)",
    },
    "is-the-growth-expected": {
        "n_layer=8": "n_layer=2",
        "n_embd=192": "n_embd=64",
        "vocab_size=2000": "vocab_size=200",
        "n_positions=48": "n_positions=16",
        "tokenize(2000, 48": "tokenize(200, 16",
    },
    "kedia-2024": {"(12, 24, 48, 96, 192)": "(12, 24)", "(192, 1024, 16, 256": "(12, 128, 2, 64"},
    "long-contexts-and-decoders": {"seeds=24": "seeds=2", "seq_len=8192": "seq_len=1024"},
    "recurrent-mixers": {
        "seeds=24": "seeds=2",
        "draws = np.arange(1, 129), 2000": "draws = np.arange(1, 129), 20",
    },
    "tour": {"seeds=24": "seeds=2"},
}
"""Numbers that are less here than in a notebook, so that every one is executed in little time; as
they stand they are by `python benchmarks/notebooks.py run`."""
MOST_SECONDS = 60


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def read(name: str) -> Any:
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def code(name: str) -> list[Any]:
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def pictures(cells: list[Any]) -> list[bytes]:
    found = [
        o.data["image/png"] for c in cells for o in c.outputs if "image/png" in o.get("data", {})
    ]
    return [base64.b64decode(picture) for picture in found]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_outputs_are_those_of_the_code(name: str) -> None:
    """What was executed is what stands there, whole, quick enough, and led to a picture."""
    notebooks = script("notebooks")
    entry = notebooks.stored()[name]
    assert entry["code"] == notebooks.code_hash(read(name))
    assert entry["seconds"]["processor"] < MOST_SECONDS
    cells = code(name)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"]
    shown = pictures(cells)
    assert shown
    assert all(picture.startswith(b"\x89PNG") for picture in shown)
    assert NOTEBOOKS[name].stat().st_size < notebooks.MOST_BYTES
    said = json.dumps([cell.outputs for cell in cells])
    assert "/tmp/" not in said
    assert "/root/" not in said


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_uses_public_names_that_exist(name: str) -> None:
    """Of those that are not executed here, at least every name of the package is found."""
    for cell in code(name):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moments"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    assert hasattr(module, alias.name) or importlib.import_module(full)
            if not isinstance(node, ast.Attribute):
                continue
            dotted = ast.unparse(node)
            if re.fullmatch(r"moments(\.[a-zA-Z_]+)+", dotted):
                found: Any = moments
                for part in dotted.split(".")[1:]:
                    found = getattr(found, part)


def test_every_notebook_says_what_it_is_about() -> None:
    for name in NOTEBOOKS:
        first = read(name).cells[0]
        assert first.cell_type == "markdown"
        assert first.source.startswith("# "), name


def run(cell: str, where: str, names: dict[str, Any]) -> int:
    """Execute a cell as Jupyter does, the last value shown; how many pictures it gives."""
    tree = ast.parse(cell)
    last = tree.body[-1] if tree.body else None
    drawn = set(plt.get_fignums())
    if not isinstance(last, ast.Expr):
        exec(compile(tree, where, "exec"), names)
        return len(set(plt.get_fignums()) - drawn)
    exec(compile(ast.Module(tree.body[:-1], []), where, "exec"), names)
    shown = eval(compile(ast.Expression(last.value), where, "eval"), names)
    if hasattr(shown, "_repr_html_"):
        assert shown._repr_html_() is None or isinstance(shown._repr_html_(), str)
    return len(set(plt.get_fignums()) - drawn) + isinstance(shown, Figure)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # cells filter those of the package themselves
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell, of less work in `SMALLER`; the papers' figures are drawn in test_figures.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)

    def figure(which: str) -> Figure:
        assert figures.setup(which).panels
        return Figure()

    monkeypatch.setattr(figures, "draw", figure)
    cells, names = code(name), {"__name__": "__main__"}
    whole = "\n".join(cell.source for cell in cells)
    assert all(old in whole for old in SMALLER.get(name, {}))
    found = 0
    with plt.rc_context():
        for place, cell in enumerate(cells, 1):
            source = cell.source
            for old, new in SMALLER.get(name, {}).items():
                source = source.replace(old, new)
            found += run(source, f"{name}, cell {place}", names)
            plt.close("all")
    assert found == len(pictures(cells))


@pytest.mark.filterwarnings("ignore")  # of the notebook machinery
def test_the_command_executes_from_clean(tmp_path: Path) -> None:
    file = tmp_path / "small.ipynb"
    cell = nbformat.v4.new_code_cell("import matplotlib.pyplot as plt\nplt.plot([1]);")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), file)
    done, seconds = script("notebooks").execute(file)
    assert len(pictures(done.cells)) == 1
    assert done.cells[0].execution_count == 1
    assert seconds["clock"] > 0
