"""What mkdocs runs: pages generated from the code, and formulas as MathML.

Nothing generated is committed, so that it cannot drift: formulas come from the laws, schemes from
the registry, the reference from docstrings.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("MPLBACKEND", "Agg")

import components
import mathml
import reference
import scheme_pages


def generated() -> dict[str, str | bytes]:
    """Every generated file by its path in the site."""
    return {
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


def on_page_content(html: str, **_: Any) -> str:
    """Formulas."""
    return mathml.converted(html)
