"""One page per component: every law with its formula, source, domain and status."""

from __future__ import annotations

import os
from typing import Any

from moments.formulas.registry import COMPONENTS, STACKS, component_page, symbols_page

QUICK = bool(os.environ.get("MOMENTS_SITE_QUICK"))
"""Whether a few components and schemes stand for all: what a test of the build needs."""

FEW = ("relu", "attention", "cross_entropy", "post_ln_chain")
ALL = {n: r for n, r in {**COMPONENTS, **STACKS}.items() if not QUICK or n in FEW}


def navigation() -> list[Any]:
    """Entries of the section."""
    own = [
        {record.title: f"components/{name}.md"}
        for name, record in ALL.items()
        if name in COMPONENTS
    ]
    whole = [
        {record.title: f"components/{name}.md"} for name, record in ALL.items() if name in STACKS
    ]
    return [
        "components/index.md",
        {"Components": own},
        {"Whole networks": whole},
        {"Symbols": "components/symbols.md"},
    ]


def pages() -> dict[str, str | bytes]:
    """Every page."""
    found: dict[str, str | bytes] = {"components/index.md": _index(), "components/symbols.md": ""}
    found["components/symbols.md"] = "# Symbols\n\n" + symbols_page()
    for name, record in ALL.items():
        found[f"components/{name}.md"] = component_page(record, level=1)
    return found


def _index() -> str:
    lines = [
        "# Formulas",
        "",
        "Every formula of the package, a page per component, made from the laws themselves. The "
        "same from the command line: `moments formulas NAME`; from Python: "
        '`moments.component(NAME).law("variance")`.',
        "",
        "*Exact* means exact under Gaussian inputs; *asymptotic* names in its note what must be "
        "large; *fitted* is an approximation that its authors fitted.",
        "",
        "| component | name | laws |",
        "| --- | --- | --- |",
    ]
    for name, record in ALL.items():
        laws = sorted({q for theory in ("refined", "published") for q in record.under(theory)})
        lines.append(f"| [{record.title}]({name}.md) | `{name}` | {', '.join(laws)} |")
    return "\n".join(lines) + "\n"
