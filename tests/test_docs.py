"""What the documents say is what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from moments.formula_page import formula_page

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
