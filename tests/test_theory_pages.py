"""The theory pages: what they cite exists, what they quote stands where they say, and the code's
pointers to them lead somewhere."""

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
OTHERWISE = ("constants", "first-step")  # written in another form, each held by tests of its own
NUMBER = r"[+-]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?"


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


def cited(page: Path) -> Iterator[tuple[str, str, str]]:
    """(file, name, fragment) of every path of the repository in backticks."""
    file = r"((?:moments|tests|benchmarks|docs)/[\w./-]+?\.(?:py|md|json))"
    pattern = rf"`{file}(?:::([\w.]+))?(?:#([^`]+))?`"
    for match in re.finditer(pattern, text(page)):
        yield match[1], match[2] or "", match[3] or ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_names_that_a_page_cites_exist(page: Path) -> None:
    found = list(cited(page))
    assert found or page.stem in ("index", *OTHERWISE)
    for file, name, _ in found:
        assert (ROOT / file).exists(), file
        assert not name or name in names(file), f"{file} has no {name}"
    for target in re.findall(r"\]\(([^)#]+\.md)", text(page)):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_has_its_parts(page: Path) -> None:
    if page.stem in ("index", *OTHERWISE):
        return
    for part in ("Measured", "Where it fails", "Where it lives"):
        assert f"\n## {part}\n" in text(page), part
    assert f"({page.name})" in text("docs/theory/index.md")


def quoted(page: Path) -> Iterator[tuple[str, str, str]]:
    """(number, file, fragment) of the rows of a page's table of measurements."""
    part = text(page).partition("\n## Measured\n")[2].partition("\n## ")[0]
    for line in part.splitlines():
        cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)]
        if len(cells) == 5 and cells[3].startswith("`"):
            file, _, fragment = cells[3].strip("`").partition("#")
            yield cells[2], file, fragment


def stands(number: str, file: str, fragment: str) -> bool:
    if file.endswith(".json"):
        found = json.loads(text(file))
        for key in fragment.split("/"):
            found = found[key]
        digits = len(number.partition("e")[0].replace("-", "").replace(".", "").lstrip("0"))
        return f"{found:.{digits - 1}e}" == f"{float(number):.{digits - 1}e}"
    lines = text(file).splitlines()
    if fragment:
        lines = [line for line in lines if all(word in line for word in fragment.split("/"))]
    whole = re.sub(r"[\s|`*]+", " ", " ".join(lines))
    parts = [part.strip() for part in number.split(",")]
    return all(re.search(rf"(?<![\d.]){re.escape(part)}(?![\d])", whole) for part in parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_numbers_that_a_page_quotes_stand_where_it_says(page: Path) -> None:
    found = list(quoted(page))
    for number, file, fragment in found:
        assert re.search(NUMBER, number) or number.isalpha(), number
        assert stands(number, file, fragment), (number, file, fragment)


def test_a_number_that_does_not_stand_there_is_found_out() -> None:
    assert not stands("0.089", "docs/theory/norms.md", "gated unit/percent")
    stored = "cases/Pre-LN, 12 x 128/gradient"
    assert not stands("0.00056", "benchmarks/data/position_classes.json", stored)


POINTER = re.compile(r"docs/theory/(\w+)\.md(?:, ([A-Z][^.;:()\"]*))?")
HEADING = re.compile(r"^(?:## (?:\d+\. )?|\*\*)([^*\n]+)", re.M)


def test_pointers_in_the_code_lead_somewhere() -> None:
    count = 0
    for file in (ROOT / "moments").rglob("*.py"):
        for match in POINTER.finditer(re.sub(r"\s*\n\s*#?\s*", " ", file.read_text("utf-8"))):
            count += 1
            page = ROOT / "docs/theory" / f"{match[1]}.md"
            assert page.exists(), (file, match[0])
            if match[2]:
                headings = [h.rstrip(". ") for h in HEADING.findall(page.read_text("utf-8"))]
                said = match[2].strip()
                assert any(said.startswith(h) or h.startswith(f"{said} (") for h in headings), (
                    file.name,
                    match[0],
                )
    assert count >= 30


def test_the_page_of_constants_has_the_code_s_values() -> None:
    """A constant that changes is measured again: `python benchmarks/constants.py --only NAME`."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    constants = importlib.import_module("constants")
    assert text("docs/theory/constants.md") == constants.page()
    stored = json.loads(text("benchmarks/data/constants.json"))
    assert set(stored) == {f"{c.module}.{c.name}" for c in (*constants.TABLE, *constants.EDGES)}


# Modules of the refined theory whose formulas are no laws.
THEORY = (
    "engine/classes",
    "engine/directions",
    "engine/fluctuation",
    "engine/bottom_to_top",
    "engine/composition",
    "noise/overlap",
    "noise/band",
    "noise/network",
    "transfer/attention/response",
    "engine/response",
    "noise/loss_noise",
    "noise/encoder_noise",
    "transfer/elementary",
    "transfer/gated",
    "transfer/normalization",
    "transfer/attention/layers",
    "transfer/attention/projections",
    "transfer/attention/laws",
    "transfer/attention/kernels/attention",
    "transfer/attention/kernels/closure",
    "transfer/attention/kernels/finite_rows",
    "transfer/attention/kernels/joint_laws",
    "transfer/attention/kernels/position_attention",
    "transfer/attention/kernels/logits",
    "transfer/attention/kernels/row_statistics",
    "transfer/attention/kernels/relative_positions",
    "transfer/attention/softmax/norms",
    "transfer/attention/softmax/table",
    "transfer/attention/softmax/peaked",
    "transfer/head/cross_entropy",
    "transfer/head/readout",
    "transfer/head/softmax_agreement",
    "transfer/head/tied",
    "solver/layerwise",
    "solver/inversion",
)


@pytest.mark.parametrize("module", THEORY)
def test_formulas_that_are_no_laws_have_a_place_on_a_page(module: str) -> None:
    file = ROOT / "moments" / f"{module}.py"
    if not file.exists():  # moved since: then whatever holds the idea points there
        pytest.fail(f"{module} is gone; name what holds its formulas")
    assert "docs/theory/" in (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "")
