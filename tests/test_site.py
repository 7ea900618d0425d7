"""The documentation site: it builds without a warning, its snippets run, its search finds formulas,
and every public name says what it takes and returns."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import importlib
import inspect
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import moments
from moments.formulas.registry import COMPONENTS
from studies.formulas.stacks import STACKS

ROOT = Path(__file__).parent.parent
FRAGMENTS = ("check-your-model", "first-answers")  # run by a notebook, and by test_docs
HAND_WRITTEN = sorted(
    page
    for page in (ROOT / "docs").rglob("*.md")
    if "```python" in page.read_text(encoding="utf-8") and page.stem not in FRAGMENTS
)


def snippets(page: Path) -> str:
    """All Python of a page, as one program with the page's line numbers."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        starts = line.startswith("```")
        lines.append(line if inside and not starts else "")
        inside = line.startswith("```python") if starts else inside
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.stem)
def test_snippets_run(page: Path, capsys: Any) -> None:
    code = snippets(page)
    if "torch" in code:
        pytest.importorskip("torch")
    if "register_activation" in code:  # in a process of its own: names are registered for good
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        exec(compile(code, str(page), "exec"), {"__name__": "page"})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, with a few components and schemes in place of all."""
    pytest.importorskip("material", reason="needs the extra docs")
    pytest.importorskip("math_core", reason="needs the extra docs")
    pytest.importorskip("ziamath", reason="needs the extra docs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    target = tmp_path_factory.mktemp("site")
    written = {path.stem for path in (ROOT / "docs/generate").glob("*.py")}
    held = {name: sys.modules.pop(name) for name in written & set(sys.modules)}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of mkdocs; those of the site end the build
        patch.setenv("MOMENTS_SITE_QUICK", "1")
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.setattr(sys, "path", [*sys.path])
        build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(target)))
    for name in written:
        sys.modules.pop(name, None)
    sys.modules.update(held)
    return target


def test_the_site_builds_and_shows_no_command_of_tex(site: Path) -> None:
    page = (site / "theory/softmax/index.html").read_text(encoding="utf-8")
    assert "<math" in page
    body = re.sub(r"<annotation.*?</annotation>|<code.*?</code>", "", page, flags=re.DOTALL)
    assert "arithmatex" not in body
    assert not re.findall(r"\\(?:frac|theta|sum|tau)\b", body)
    assert "googleapis" not in page
    for file in (site / "theory").rglob("index.html"):
        shown = re.sub(r"<(pre|code).*?</\1>", "", file.read_text(encoding="utf-8"), flags=re.S)
        assert "$" not in shown.partition("<article")[2].partition("</article")[0], file
        assert "<code>$$" not in file.read_text(encoding="utf-8"), file  # a formula read as code
    assert 'src="https://' not in page


def test_search_finds_what_pages_say(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"]: entry for entry in index["docs"]}
    (components,) = generators("components")
    for name in components.FEW:
        record = components.ALL[name]
        entry = found[f"components/{components.page_of(name)}/#{name}"]
        text = html.unescape(entry["title"] + " " + entry["text"])
        assert record.title in text
        for quantity in record.under("refined"):
            assert quantity in text, (name, quantity)


WRITERS = ("components", "scheme_pages", "reference")


def generators(*names: str) -> list[Any]:
    """Modules that write pages."""
    folder = str(ROOT / "docs/generate")
    sys.path.insert(0, folder)
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(folder)


def test_pages_name_every_formula_and_scheme() -> None:
    components, schemes = generators("components", "scheme_pages")
    assert set(components.ALL) == set(COMPONENTS) | set(STACKS)
    written = components.pages()
    for name, record in components.ALL.items():
        page = written[f"components/{components.page_of(name)}.md"]
        assert f"\n## {record.title} {{ #{name} }}\n" in page
        for quantity in record.under("published"):
            assert f"**{quantity}**" in page, (name, quantity)
    assert [s.name for s in schemes.SCHEMES] == [s.name for s in moments.schemes()]
    section = next(schemes._section(s) for s in schemes.SCHEMES if s.name == "dslm")
    (snippet,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(snippet, {})


def test_the_site_has_fewer_than_sixty_pages() -> None:
    written = [page for one in generators(*WRITERS) for page in one.navigation()]
    by_hand = list((ROOT / "docs").rglob("*.md"))
    assert len(str(written).split(".md")) + len(by_hand) < 60


def test_the_reference_has_every_public_name() -> None:
    (reference,) = generators("reference")
    for package in ("moments", "moments.torch"):
        if package == "moments.torch":
            pytest.importorskip("torch")
        page = reference.package_page(package)
        if package == "moments":
            heads = re.findall(r"^## (\w+)$", page, re.M)
            assert heads[:3] == ["predict", "check", "solve"]
        for name in importlib.import_module(package).__all__:
            if not name.startswith("__"):
                assert f"\n## {name}\n" in page, name


# --- docstrings -----------------------------------------------------------------------------------


def public() -> list[tuple[str, Any]]:
    found = [("moments", moments)]
    with contextlib.suppress(ImportError):
        found.append(("moments.torch", importlib.import_module("moments.torch")))
    return [
        (f"{package}.{name}", getattr(module, name))
        for package, module in found
        for name in module.__all__
        if not name.startswith("__")
    ]


def taken(value: Any) -> list[str]:
    """Names of what it is called with."""
    parameters = inspect.signature(value).parameters
    return [n for n in parameters if n not in ("self", "cls", "args", "kwargs", "inputs")]


@pytest.mark.parametrize(("name", "value"), public(), ids=[name for name, _ in public()])
def test_a_public_name_says_what_it_takes_and_returns(name: str, value: Any) -> None:
    doc = inspect.getdoc(value) or ""
    assert len(doc) > 40, name
    if inspect.isclass(value) and issubclass(value, BaseException | Warning):
        return
    if inspect.isclass(value):
        own = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        fields = {field.name: field for field in own}
        arrays = [f for f in fields.values() if "ndarray" in str(f.type) or "Array" in str(f.type)]
        if arrays:
            assert re.search(r"\([\w ,.+]*\)|shape", doc), f"{name} does not say shapes"
        told = "_stderr" if "`*_stderr`" in doc else "_"
        for field in (f for f in fields if not f.startswith("_") and not f.endswith(told)):
            assert re.search(rf"\b{field}\b", doc), f"{name} does not say what {field} is"
        return
    if not inspect.isroutine(value):
        return
    if inspect.signature(value).parameters:
        assert "Raises:" in doc, f"{name} does not say what it refuses"
    for parameter in taken(value):
        assert re.search(rf"\b{parameter}\b", doc), f"{name} does not say what {parameter} is"
    annotated = inspect.signature(value).return_annotation
    if annotated not in (None, "None", inspect.Signature.empty):
        first = doc.partition("\n")[0]
        verb = first.startswith(("Run", "Write", "Put", "Make", "Compare", "Measure", "Predict"))
        assert "Returns:" in doc or not verb, f"{name} does not say what it returns"


@pytest.mark.parametrize(("name", "value"), public(), ids=[name for name, _ in public()])
def test_a_loss_comes_with_its_unit(name: str, value: Any) -> None:
    """All else is a variance of entries, which have none, or a ratio."""
    fields = getattr(value, "__dataclass_fields__", {}).values()
    numbers = [f.name for f in fields if re.search(r"float|Array|ndarray|Any", str(f.type))]
    if any(field == "loss" or field.startswith("loss_") for field in numbers):
        assert "nats" in (inspect.getdoc(value) or ""), name


@pytest.mark.parametrize("name", ["Prediction", "FirstStep", "explain", "learning_rate", "solve"])
def test_what_formulas_answer_names_where_they_are_derived(name: str) -> None:
    pages = re.findall(r"docs/theory/[\w-]+\.md", inspect.getdoc(getattr(moments, name)) or "")
    assert pages, name
    assert all((ROOT / page).exists() for page in pages)
