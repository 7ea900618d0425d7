"""The notebooks: what is stored was executed from the code that stands there; some run here."""

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

import pytest

import moments

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
QUICK = ("tour",)
"""Executed here; the others by `python benchmarks/notebooks.py run`."""
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


@pytest.mark.filterwarnings("ignore")  # of the notebook machinery; cells raise on their own errors
@pytest.mark.parametrize("name", QUICK)
def test_notebook_runs(name: str) -> None:
    done, _ = script("notebooks").execute(NOTEBOOKS[name])
    cells = [cell for cell in done.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    assert len(pictures(cells)) == len(pictures(code(name)))
