"""One page per component: every law with its formula, source, domain and status, and a picture."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))

from component_pictures import panels, stored
from figure import svg

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
    """Pages and pictures."""
    found: dict[str, str | bytes] = {"components/index.md": _index(), "components/symbols.md": ""}
    found["components/symbols.md"] = "# Symbols\n\n" + symbols_page()
    for name, record in ALL.items():
        text = component_page(record, level=1)
        found[f"components/{name}.svg"] = _picture(name)
        text += (
            f"\n## Predicted and simulated\n\n![{record.title}: predicted and simulated]"
            f"({name}.svg)\n\nLines are the laws; points are means over draws of tokens and "
            "weights that use no law, bars two standard errors. An asymptotic law is off by "
            "what its note names.\n"
        )
        found[f"components/{name}.md"] = text
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


def _picture(name: str) -> bytes:
    of = stored()[name]
    return svg(functools.partial(panels, of=of), f"{name}: law and simulation", len(of))
