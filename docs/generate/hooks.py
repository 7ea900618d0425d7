"""What mkdocs runs: pages generated from the code, and formulas as MathML by math-core.

Nothing generated is committed, so that it cannot drift: formulas come from the laws, schemes from
the registry, the reference from docstrings.
"""

from __future__ import annotations

import functools
import html
import io
import os
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("MPLBACKEND", "Agg")

import components
import reference
import scheme_pages


def generated() -> dict[str, str | bytes]:
    """Every generated file by its path in the site."""
    return {
        "fonts/math.woff": math_font(),
        **components.pages(),
        **scheme_pages.pages(),
        **reference.pages(),
    }


def on_config(config: Any) -> Any:
    """Names of generated folders in the navigation become their pages."""
    sections = {
        "components/": components.navigation(),
        "scheme/": scheme_pages.navigation(),
        "api/": reference.navigation(),
    }
    config["nav"] = [
        {title: sections.get(inside, inside) if isinstance(inside, str) else inside}
        for entry in config["nav"]
        for title, inside in entry.items()
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what is generated."""
    from mkdocs.structure.files import File

    for path, content in generated().items():
        files.append(File.generated(config, path, content=content))
    # a page that the navigation does not name is found all the same
    named = set(re.findall(r"[\w./-]+\.md", str(config["nav"])))
    more = [f.src_uri for f in files.documentation_pages() if f.src_uri not in named]
    if more:
        config["nav"].append({"More": more})
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to the repository's other folders, which the site does not hold, become their names.

    Where the site is built to be tested, tables keep their first rows and those with links.
    """
    if components.QUICK:
        markdown = re.sub(r"(?:^\|.*\n){12,}", _first_rows, markdown, flags=re.M)
    up = "../" * (page.file.src_uri.count("/") + 1)
    return re.sub(rf"\[([^\]]+)\]\({re.escape(up)}(\w[^)]*)\)", r"\1 (`\2`)", markdown)


def _first_rows(table: re.Match[str]) -> str:
    rows = table[0].splitlines(keepends=True)
    return "".join(row for at, row in enumerate(rows) if at < 8 or "](" in row)


_FORMULA = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas, which arithmatex marked, as MathML: they need no script and no network."""

    def one(match: re.Match[str]) -> str:
        latex = html.unescape(match[2]).strip()
        block = latex.startswith(r"\[")
        found = mathml(latex[2:-2].strip(), block)
        return f'<span class="math-block">{found}</span>' if block else found

    return _FORMULA.sub(one, content)


def math_font() -> bytes:
    """STIX Two Math, which ziamath brings, for readers whose system has no font of mathematics."""
    from fontTools.ttLib import TTFont

    font = TTFont(resources.files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf")
    font.flavor, made = "woff", io.BytesIO()
    font.save(made)
    return made.getvalue()


@functools.cache
def mathml(latex: str, block: bool) -> str:
    """One formula; LatexError, which ends the build, where it is none."""
    return str(_converter().convert_with_local_state(latex, displaystyle=block))


@functools.cache
def _converter() -> Any:
    from math_core import LatexToMathML

    return LatexToMathML()
