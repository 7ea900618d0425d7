"""What the documents say is what the code does."""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from pathlib import Path

import pytest

import moments
from moments.model.huggingface import READERS

ROOT = Path(__file__).parent.parent


def test_the_readme_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """But for the numbers of the check, which are of fewer layers here."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", readme, flags=re.DOTALL)
    small = example.replace(
        "CLIPTextConfig())", "CLIPTextConfig(vocab_size=99, num_hidden_layers=2))"
    )
    torch.manual_seed(0)
    exec(compile(small, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.partition("\ngpt2: ")[2] == shown.partition("\ngpt2: ")[2]
    assert numberless(printed) == numberless(shown)
    assert len(readme.splitlines()) < 70


def numberless(text: str) -> str:
    """Words alone."""
    return " ".join(re.sub(r"\d[\d.e+]*", "N", text).split())


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GENERATED = ("components/", "scheme/", "api/")  # by the site


def anchors(page: Path) -> set[str]:
    """Of its headings, as both GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pictures_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s:]+)\)", text):
        file, _, anchor = target.partition("#")
        if file.startswith(GENERATED) or file.removeprefix("../").startswith(GENERATED):
            continue
        found = page.parent / file if file else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


def test_pictures_are_small() -> None:
    for picture in (ROOT / "docs").rglob("*.png"):
        assert picture.stat().st_size < 200_000, picture.name


def test_readme_installs_extras_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in re.findall(r'"\.\[(\w+)\]"', readme):
        assert name in extras["optional-dependencies"]


def test_the_counts_in_the_documents_are_the_code_s() -> None:
    """Model types, schemes and presets, wherever a document counts them."""
    counts = {
        r"(\d+)\s+(?:Hugging Face )?model\s+types": len(READERS),
        r"(\d+)\s+\[?schemes": len(moments.schemes()),
        r"(\d+)\s+presets": len(moments.preset.names()),
    }
    for name in ("README.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        found = [
            (m.group(0), int(m.group(1)), n)
            for p, n in counts.items()
            for m in re.finditer(p, text)
        ]
        assert found
        for words, stated, true in found:
            assert stated == true, f"{name}: {words}"


def test_the_readme_s_errors_are_those_of_the_page_of_accuracy() -> None:
    page = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence = next(line for line in readme.splitlines() if line.startswith("Mean error of log"))
    stated = [float(number) for number in re.findall(r"\d+\.\d+|\b39\b", sentence)]
    measured = []
    for row in ("`refined`", "standard error of the simulation", "`published`"):
        (cells,) = re.findall(rf"^\| {row} \| ([\d.| ]+) \|$", page, re.M)
        numbers = [float(number) for number in cells.split(" | ")]
        measured += [min(numbers), max(numbers)]
    assert stated == pytest.approx(measured, rel=0.06)


def test_the_page_on_checks_quotes_what_its_notebook_printed() -> None:
    page = (ROOT / "docs/check-your-model.md").read_text(encoding="utf-8")
    notebook = json.loads((ROOT / "notebooks/check-your-model.ipynb").read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    printed = " ".join("".join(output.get("text", [])) for output in outputs).split()
    slips = page.partition("| slip | what is found |")[2].partition("\n\n")[0]
    quoted = re.findall(r'"(.+?)"', slips)
    assert len(quoted) == 6
    for words in quoted:
        assert " ".join(words.replace("\\*", "*").split()) in " ".join(printed), words


def test_the_page_on_checks_shows_what_a_check_of_clip_prints() -> None:
    """But for the numbers, which are of more layers there."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    page = (ROOT / "docs/check-your-model.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    torch.manual_seed(0)
    config = transformers.CLIPTextConfig(vocab_size=99, num_hidden_layers=2)
    report = moments.check(transformers.CLIPTextModel(config))
    assert numberless(shown) == numberless(str(report))
    assert len(shown.splitlines()) < 25
    quoted = re.findall(r'"(.+?)", in', page)
    assert "sits on query, key and value instead of output" in quoted[0]
    assert "sits on query, key and value instead of" in report.findings[0].reason


@pytest.mark.slow
def test_the_page_of_first_answers_prints_what_it_quotes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To two digits of what is sampled; `tests/test_site.py` runs the other pages' snippets."""
    pytest.importorskip("transformers")
    page = (ROOT / "docs/how-to/first-answers.md").read_text(encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {"__name__": "page"})
    printed = capsys.readouterr().out.split()
    quoted = [
        line
        for text in re.findall(r"```text\n(.*?)```", page, re.DOTALL)
        for line in text.splitlines()
    ]
    assert len(quoted) > 9
    for line in quoted:
        words = line.split()
        places = range(len(printed) - len(words) + 1)
        assert any(all(map(_same, words, printed[at:])) for at in places), line


def _same(stated: str, printed: str) -> bool:
    try:
        return float(stated) == pytest.approx(float(printed), rel=0.02, abs=1e-9)
    except ValueError:
        return stated == printed


def test_the_first_page_names_every_notebook() -> None:
    page = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    named = set(re.findall(r"notebooks/([\w-]+)\.ipynb", page))
    assert named == {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
