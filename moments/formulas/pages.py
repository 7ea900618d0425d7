"""The formula reference as Markdown, generated from the laws so that it cannot drift from them."""

from __future__ import annotations

from .law import QUANTITIES, THEORIES, ComponentLaws, Law
from .registry import STACKS, component, components
from .symbols import SYMBOLS

_INTRODUCTION = """# Formulas

Every formula of the package, generated from the laws themselves by `moments formulas --markdown`.
*Exact* means exact under Gaussian inputs; *asymptotic* names the quantity that must be large in its
note; *fitted* is an approximation its authors fitted. Pairs of tokens have variances
$\\sigma_x^2$ and $\\sigma_{x'}^2$ and correlation $r$.
"""


def formula_page() -> str:
    """Markdown of every component's laws, with sources, domains and notes, and of all symbols."""
    parts = [_INTRODUCTION]
    parts += [component_page(component(name)) for name in components()]
    parts.append("# Whole networks\n")
    parts += [component_page(record) for record in STACKS.values()]
    parts += ["## Symbols\n", symbols_page()]
    return "\n".join(parts)


def component_page(record: ComponentLaws, level: int = 2) -> str:
    """Markdown of one component's laws under a heading of that level."""
    lines = [f"{'#' * level} {record.title}\n", f"`moments.component({record.name!r})`\n"]
    own = [name for theory in THEORIES for name in record.under(theory)]
    meanings = QUANTITIES | {n: n.replace("_", " ") for n in own if n not in QUANTITIES}
    for quantity, meaning in meanings.items():
        for law, theories in _variants(record, quantity):
            lines.append(_law(quantity, meaning, law, theories))
    return "\n".join(lines)


def _variants(record: ComponentLaws, quantity: str) -> list[tuple[Law, list[str]]]:
    """The distinct laws of one quantity, each with the theories that use it."""
    variants: list[tuple[Law, list[str]]] = []
    for theory in THEORIES:
        law = record.under(theory).get(quantity)
        if law is None:
            continue
        for known, theories in variants:
            if known is law:
                theories.append(theory)
                break
        else:
            variants.append((law, [theory]))
    return variants


def _law(quantity: str, meaning: str, law: Law, theories: list[str]) -> str:
    which = "every theory" if len(theories) == len(THEORIES) else ", ".join(theories)
    domain = "; ".join(f"`{name}` in {interval}" for name, interval in law.domain.items())
    lines = [
        f"**{quantity}**, {meaning} ({which}; {law.status})\n",
        f"$${law.latex()}$$\n",
        f"Source: {law.source}." + (f" Note: {law.note}." if law.note else ""),
    ]
    if domain:
        lines.append(f"Domain: {domain}.")
    return "\n".join(lines) + "\n"


def symbols_page() -> str:
    """Markdown table of every symbol: name, letter, meaning and domain."""
    rows = [f"| `{s.name}` | ${s.tex}$ | {s.meaning} | {s.domain} |" for s in SYMBOLS.values()]
    header = ["| name | symbol | meaning | domain |", "| --- | --- | --- | --- |"]
    return "\n".join([*header, *rows]) + "\n"
