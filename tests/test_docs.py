"""What the documents say is what the code does."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import moments
from moments.formulas.registry import formula_page
from moments.model.huggingface import FAMILIES

ROOT = Path(__file__).parent.parent


def test_formula_reference_is_the_laws() -> None:
    assert (ROOT / "docs/formulas.md").read_text(encoding="utf-8") == formula_page()


def test_readme_python_example_runs(capsys: object) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})


def test_readme_links_and_pictures_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)\)", readme)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_readme_installs_extras_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in re.findall(r'"\.\[(\w+)\]"', readme):
        assert name in extras["optional-dependencies"]


def test_the_counts_in_the_documents_are_the_code_s() -> None:
    """Model types, schemes and presets, wherever a document counts them."""
    counts = {
        r"(\d+)\s+(?:Hugging Face )?model\s+types": len(FAMILIES),
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


def test_the_readme_s_errors_are_those_of_the_validation_page() -> None:
    """To as many digits as the README prints."""
    page = (ROOT / "docs/validation.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    header, *lines = re.findall(
        r"^\|.*\|$", page.split("## Errors by norm placement and mask")[1], re.M
    )
    columns = [c.strip() for c in re.split(r"(?<!\\)\|", header)[1:-1]]
    stated: dict[tuple[str, str], dict[str, str]] = {}
    group = ("", "")
    for line in lines[1:13]:
        cells = dict(zip(columns, (c.strip() for c in line.split("|")[1:-1]), strict=True))
        group = (cells["norm"], cells["mask"]) if cells["norm"] else group
        stated.setdefault(group, {})[cells["theory"]] = cells[r"gradient \|log\|"]
        stated[group].setdefault("standard error of the simulation", cells["s.e."])
    order = [("pre", "full"), ("pre", "causal"), ("post", "full"), ("post", "causal")]
    for row in ("refined", "published", "standard error of the simulation"):
        (numbers,) = re.findall(rf"^\| `?{row}`? \| ([\d.| ]+) \|$", readme, re.M)
        for printed, group in zip(numbers.split(" | "), order, strict=True):
            unit = 10.0 ** -len(printed.partition(".")[2])
            assert abs(float(printed) - float(stated[group][row])) <= 0.51 * unit, (row, group)


def test_the_page_on_checks_quotes_what_its_notebook_printed() -> None:
    page = (ROOT / "docs/check-your-model.md").read_text(encoding="utf-8")
    notebook = json.loads((ROOT / "notebooks/check-your-model.ipynb").read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    printed = " ".join("".join(output.get("text", [])) for output in outputs).split()
    slips = page.partition("| slip | what is found |")[2].partition("\n\n")[0]
    (report,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    quoted = [report, *re.findall(r'"(.+?)"', slips)]
    assert len(quoted) == 7
    for words in quoted:
        assert " ".join(words.replace("\\*", "*").split()) in " ".join(printed), words
