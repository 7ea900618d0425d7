"""Every law with its formula, source, domain and status: a page per kind of component."""

from __future__ import annotations

import os
from typing import Any

from moments.formulas.activation import ACTIVATION_LAWS
from moments.formulas.gated import GATED
from moments.formulas.registry import COMPONENTS, component_page, symbols_page
from studies.formulas.stacks import STACKS

QUICK = bool(os.environ.get("MOMENTS_SITE_QUICK"))
"""Whether a few components and schemes stand for all: what a test of the build needs."""

FEW = ("relu", "attention", "cross_entropy", "post_ln_chain")
ALL = {n: r for n, r in {**COMPONENTS, **STACKS}.items() if not QUICK or n in FEW}

PAGES = {
    "activations": ("Activations", set(ACTIVATION_LAWS)),
    "gated-units": ("Gated units", {record.name for record in GATED}),
    "networks": ("Whole networks", set(STACKS)),
    "normalisation": ("Normalisation", {"layernorm", "rmsnorm", "dyt"}),
    "linear": ("Linear maps, dropout and scales", {"linear", "biased_linear", "dropout", "scale"}),
    "embeddings": ("Embeddings", {name for name in COMPONENTS if name.endswith("_embedding")}),
    "attention": ("Attention, blocks and loss", set()),
}
"""By the page's name: its title, and whose laws it has; the last has all that no other has."""


def page_of(name: str) -> str:
    """The page that has a component's laws."""
    return next((page for page, (_, names) in PAGES.items() if name in names), "attention")


def navigation() -> list[Any]:
    """Entries of the section."""
    shown = {page_of(name) for name in ALL}
    own = [{title: f"components/{page}.md"} for page, (title, _) in PAGES.items() if page in shown]
    return ["components/index.md", *own, {"Symbols": "components/symbols.md"}]


def pages() -> dict[str, str | bytes]:
    """Every page."""
    found = {"components/index.md": _index()}
    found["components/symbols.md"] = "# Symbols\n\n" + symbols_page()
    for name, record in ALL.items():
        page = page_of(name)
        path = f"components/{page}.md"
        heading, _, laws = component_page(record).partition("\n")
        found.setdefault(path, f"# {PAGES[page][0]}\n")
        found[path] += f"\n{heading} {{ #{name} }}\n{laws}"
    return dict(found)


def _index() -> str:
    lines = [
        "# Formulas",
        "",
        "Every formula of the package, made from the laws themselves. The same from the command "
        'line: `moments formulas NAME`; from Python: `moments.component(NAME).law("variance")`.',
        "",
        "*Exact* means exact under Gaussian inputs; *asymptotic* names in its note what must be "
        "large; *fitted* is an approximation that its authors fitted.",
        "",
        "| component | name | laws |",
        "| --- | --- | --- |",
    ]
    for name, record in ALL.items():
        laws = sorted({q for theory in ("refined", "published") for q in record.under(theory)})
        link = f"{page_of(name)}.md#{name}"
        lines.append(f"| [{record.title}]({link}) | `{name}` | {', '.join(laws)} |")
    return "\n".join(lines) + "\n"
