"""The theory pages: what they cite exists, and the code's pointers to them lead somewhere."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs/theory").glob("*.md"))


def text(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def names(path: str) -> set[str]:
    """What a module defines: NAME, Class.attribute."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                collect(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.Assign):
                several = [getattr(t, "elts", (t,)) for t in node.targets]
                found.update(prefix + t.id for ts in several for t in ts if isinstance(t, ast.Name))
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    collect(ast.parse(text(path)).body, "")
    return found


def cited(page: Path) -> Iterator[tuple[str, str]]:
    """(file, name) of every path of the repository in backticks."""
    file = r"((?:moments|tests|benchmarks|docs)/[\w./-]+?\.(?:py|md|json))"
    for match in re.finditer(rf"`{file}(?:::([\w.]+))?(?:#[^`]+)?`", text(page)):
        yield match[1], match[2] or ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_names_that_a_page_cites_exist(page: Path) -> None:
    for file, name in cited(page):
        assert (ROOT / file).exists(), file
        assert not name or name in names(file), f"{file} has no {name}"


POINTER = re.compile(r"docs/theory/(\w+)\.md(?:, ([A-Z][^.;:()\"]*))?")
HEADING = re.compile(r"^(?:## (?:\d+\. )?|\*\*)([^*\n]+)", re.M)


def test_pointers_in_the_code_lead_somewhere() -> None:
    for file in (ROOT / "moments").rglob("*.py"):
        for match in POINTER.finditer(re.sub(r"\s*\n\s*#?\s*", " ", file.read_text("utf-8"))):
            page = ROOT / "docs/theory" / f"{match[1]}.md"
            assert page.exists(), (file, match[0])
            if match[2]:
                headings = [h.rstrip(". ") for h in HEADING.findall(page.read_text("utf-8"))]
                said = match[2].strip()
                assert any(said.startswith(h) or h.startswith(f"{said} (") for h in headings), (
                    file.name,
                    match[0],
                )


def test_the_page_of_constants_has_the_code_s_values() -> None:
    """A constant that changes is measured again: `python benchmarks/constants.py --only NAME`."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    constants = importlib.import_module("constants")
    assert text("docs/theory/constants.md") == constants.page()
    stored = json.loads(text("benchmarks/data/constants.json"))
    assert set(stored) == {f"{c.module}.{c.name}" for c in (*constants.TABLE, *constants.EDGES)}
