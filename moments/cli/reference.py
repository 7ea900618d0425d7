"""What is known: `moments schemes`, `formulas` and `model`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .base import (
    Answer,
    LayersOption,
    ModelArgument,
    OneScheme,
    SchemeOption,
    SeqLenOption,
    TheoryName,
    TheoryOption,
    app,
    declared,
    escaped,
    scheme_options,
)

if TYPE_CHECKING:
    from ..scheme import Scheme


@app.command(examples=("schemes", "schemes --json"), ways=("as_json",))
def schemes() -> Answer:
    """List the published schemes that --scheme and `with_scheme` know."""
    from ..scheme import schemes as every

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
    return Answer(said=lambda: tuple(map(_scheme_lines, every())), data=lambda: rows)


def _scheme_lines(scheme: Scheme) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in scheme.options.items())
    return (
        f"[bold]{scheme.name}[/]  {escaped(scheme.title)}\n"
        f"  sets {', '.join(scheme.sets)}; {escaped(str(scheme.source))}"
    ) + (f"\n  options: {escaped(options)}" if options else "")


@app.command(
    examples=(
        "formulas",
        "formulas relu",
        "formulas layernorm --theory published --latex",
        "formulas softmax --json",
    ),
    ways=("as_json",),
)
def formulas(
    component: Annotated[str | None, typer.Argument(help="A component's name.")] = None,
    theory: TheoryOption = TheoryName.refined,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the whole reference as Markdown.")
    ] = False,
) -> Answer | None:
    """Print a component's formulas with their sources, or list the components."""
    from ..formulas.registry import STACKS, components, formula_page
    from ..formulas.registry import component as find

    if markdown:
        print(formula_page(), end="")
        return None
    if component is None:
        titles = {name: find(name).title for name in (*components(), *STACKS)}
        width = max(map(len, titles)) + 2
        return Answer(
            said=lambda: tuple(f"[bold]{name:<{width}}[/]{t}" for name, t in titles.items()),
            data=lambda: titles,
        )
    record = find(component)
    laws = record.under(theory.value)

    def said() -> Iterator[str]:
        yield f"[bold]{record.title}[/], theory {theory.value}"
        for quantity, law in laws.items():
            yield f"\n[bold]{quantity}[/]  [dim]{law.status}; {escaped(str(law.source))}[/]"
            yield f"  {escaped(law.latex() if latex else str(law.expr))}"
            if law.note:
                yield f"[dim]note: {escaped(law.note)}[/]"

    return Answer(said=said, data=lambda: {name: _law_entry(law) for name, law in laws.items()})


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


@app.command(
    examples=(
        "model gpt2",
        "model gpt2 --layers 48 --scheme dslm --json > deep.json",
        "predict deep.json",
        "model mine.toml",
    ),
    ways=("as_json",),
)
def model(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    scheme: OneScheme = None,
    option: SchemeOption = None,
) -> Answer:
    """Show what a MODEL argument declares; as JSON, a model file that every command reads.

    A model file may also be written by hand, as TOML: fields of moments.Transformer, with `preset`
    to start from one and a table [scheme] with its name and options.
    """
    described, _ = declared(model, {"layers": layers, "seq_len": seq_len})
    if scheme is not None:
        described = described.with_scheme(scheme, **scheme_options(option))
    return Answer(said=lambda: str(described), data=described.to_dict)
