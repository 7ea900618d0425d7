"""`moments schemes` and `moments formulas`: what is known, with sources."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from .base import JsonOption, TheoryName, TheoryOption, app, escaped, out


@app.command(examples=("schemes", "schemes --json"))
def schemes(as_json: JsonOption = False) -> None:
    """List the published schemes that --scheme and `with_scheme` know."""
    from ..scheme import schemes as every

    if as_json:
        rows = [
            {
                "name": scheme.name,
                "title": scheme.title,
                "sets": list(scheme.sets),
                "options": scheme.options,
                "source": str(scheme.source),
            }
            for scheme in every()
        ]
        print(json.dumps(rows, indent=2))
        return
    for scheme in every():
        options = ", ".join(f"{name}={value!r}" for name, value in scheme.options.items())
        out.print(f"[bold]{scheme.name}[/]  {escaped(scheme.title)}")
        out.print(f"  sets {', '.join(scheme.sets)}; {escaped(str(scheme.source))}")
        if options:
            out.print(f"  options: {escaped(options)}")


@app.command(
    examples=(
        "formulas",
        "formulas relu",
        "formulas layernorm --theory published --latex",
        "formulas softmax --json",
    )
)
def formulas(
    component: Annotated[str | None, typer.Argument(help="A component's name.")] = None,
    theory: TheoryOption = TheoryName.refined,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the whole reference as Markdown.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a component's formulas with their sources, or list the components."""
    if markdown:
        from ..formulas.registry import formula_page

        print(formula_page(), end="")
        return
    from ..formulas.registry import STACKS, components
    from ..formulas.registry import component as find

    if component is None:
        names = [find(name) for name in (*components(), *STACKS)]
        if as_json:
            print(json.dumps({record.name: record.title for record in names}, indent=2))
            return
        width = max(len(record.name) for record in names) + 2
        for record in names:
            out.print(f"[bold]{record.name:<{width}}[/]{record.title}")
        return
    record = find(component)
    laws = record.under(theory.value)
    if as_json:
        print(json.dumps({name: _law_entry(law) for name, law in laws.items()}, indent=2))
        return
    out.print(f"[bold]{record.title}[/], theory {theory.value}")
    for quantity, law in laws.items():
        out.print(f"\n[bold]{quantity}[/]  [dim]{law.status}; {escaped(str(law.source))}[/]")
        out.print(f"  {escaped(law.latex() if latex else str(law.expr))}")
        if law.note:
            out.print(f"[dim]note: {escaped(law.note)}[/]")


def _law_entry(law: Any) -> dict[str, Any]:
    return {
        "expression": str(law.expr),
        "latex": law.latex(),
        "symbols": list(law.arguments),
        "domain": {name: str(interval) for name, interval in law.domain.items()},
        "source": str(law.source),
        "status": law.status,
        "note": law.note,
    }
