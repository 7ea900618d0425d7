"""What is known: `moments schemes`, `formulas`, `model` and `validate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DomainError
from ..files import as_frame
from .base import (
    INITIALISE,
    REFERENCE,
    Answer,
    CsvOption,
    InputCorrelation,
    InputVariance,
    JsonOption,
    LayersOption,
    ModelArgument,
    OneScheme,
    PlotOption,
    QuietOption,
    SchemeOption,
    SeqLenOption,
    SomeSchemes,
    TheoryName,
    TheoryOption,
    app,
    declared,
    escaped,
    examples,
    named,
    scheme_options,
    steps,
    with_input,
)

if TYPE_CHECKING:
    from ..scheme import Scheme


@app.command(
    rich_help_panel=INITIALISE,
    epilog=examples(
        "schemes",
        "schemes bert-base --plot schemes.svg",
        "schemes config.json --layers 96 --scheme dslm --scheme deepnorm --json > schemes.json",
    ),
)
def schemes(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    scheme: SomeSchemes = None,
    option: SchemeOption = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
    quiet: QuietOption = False,
) -> None:
    """List the published schemes, or show what each does to a model's growth and gradients."""
    from ..scheme import schemes as every
    from ..scheme.registry import scheme as known
    from ..show.scheme_table import compare_schemes

    chosen = [known(name) for name in scheme] if scheme else list(every())
    if model is None:
        if plot is not None:
            raise DomainError("--plot draws what schemes do to a model: name a MODEL")
        rows = [
            {
                "name": one.name,
                "title": one.title,
                "sets": list(one.sets),
                "options": one.options,
                "source": str(one.source),
            }
            for one in chosen
        ]
        listed = Answer(
            said=lambda: map(_scheme_lines, chosen),
            data=lambda: rows,
            frame=lambda: as_frame(rows),
        )
        listed.show(as_json, csv)
        return
    described, inputs = with_input(model, layers, seq_len, variance, correlation)
    with steps("applying schemes", len(chosen)) as advance:
        found = compare_schemes(
            described,
            [one.name for one in chosen],
            options=scheme_options(option),
            step=lambda name: advance(1, name),
            **inputs,
        )
    if not found.predictions:
        reasons = "; ".join(dict.fromkeys(found.left_out.values()))
        raise DomainError(f"no scheme could be applied: {reasons}")
    Answer(
        said=lambda: str(found),
        data=lambda: {"format": 1, "schemes": found.to_frame(), "left_out": dict(found.left_out)},
        frame=found.to_frame,
        figure=lambda: found.plot(named(model)),
    ).show(as_json, csv, plot)


def _scheme_lines(scheme: Scheme) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in scheme.options.items())
    return (
        f"[bold]{scheme.name}[/]  {escaped(scheme.title)}\n"
        f"  sets {', '.join(scheme.sets)}; {escaped(str(scheme.source))}"
    ) + (f"\n  options: {escaped(options)}" if options else "")


@app.command(
    rich_help_panel=REFERENCE,
    epilog=examples(
        "formulas",
        "formulas relu",
        "formulas layernorm --theory published --latex",
        "formulas softmax --json",
    ),
)
def formulas(
    component: Annotated[str | None, typer.Argument(help="A component's name.")] = None,
    theory: TheoryOption = TheoryName.refined,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Print a component's formulas with their sources, or list the components."""
    from ..formulas.registry import component as find
    from ..formulas.registry import components

    if component is None:
        titles = {name: find(name).title for name in components()}
        width = max(map(len, titles)) + 2
        Answer(
            said=lambda: tuple(f"[bold]{name:<{width}}[/]{t}" for name, t in titles.items()),
            data=lambda: titles,
        ).show(as_json)
        return
    record = find(component)
    laws = record.under(theory.value)

    def said() -> Iterator[str]:
        yield f"[bold]{record.title}[/], theory {theory.value}"
        for quantity, law in laws.items():
            yield f"\n[bold]{quantity}[/]  [dim]{law.status}; {escaped(str(law.source))}[/]"
            yield f"  {escaped(law.latex() if latex else str(law.expr))}"
            if law.note:
                yield f"[dim]note: {escaped(law.note)}[/]"

    Answer(said=said, data=lambda: {name: _law_entry(law) for name, law in laws.items()}).show(
        as_json
    )


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
    hidden=True,
    epilog=examples(
        "model gpt2",
        "model gpt2 --layers 48 --scheme dslm --json > deep.json",
        "predict deep.json",
        "model mine.toml",
    ),
)
def model(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    scheme: OneScheme = None,
    option: SchemeOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what a MODEL argument declares; as JSON, a model file that every command reads.

    A model file may also be written by hand, as TOML: fields of moments.Transformer, with `preset`
    to start from one and a table [scheme] with its name and options.
    """
    described, _ = declared(model, {"layers": layers, "seq_len": seq_len})
    if scheme is not None:
        described = described.with_scheme(scheme, **scheme_options(option))
    Answer(said=lambda: str(described), data=described.to_dict).show(as_json)


@app.command(
    hidden=True,
    epilog=examples(
        "validate --subset quick",
        "validate --theory refined --plot errors.svg --csv errors.csv",
        "validate --subset 'post-causal-*' --max-error 0.3",
        "validate --subset quick --run --data mine.json",
    ),
)
def validate(
    subset: Annotated[
        str,
        typer.Option(help="all, baselines, array, quick, or a pattern such as 'post-causal-*'."),
    ] = "all",
    theory: Annotated[
        list[TheoryName] | None,
        typer.Option(help="Which formulas; may be repeated. Left out: all.", show_default=False),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Simulate first, continuing what --data holds.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Simulations to read, or with --run to write (default: validation.json here); "
            "without it, those that come with the package.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where --run simulates, such as cpu or cuda.")
    ] = "cpu",
    max_error: Annotated[
        float | None,
        typer.Option(
            help="Exit 1 if the refined gradient variance of some run is off by more, as the mean "
            "|log| beyond two standard errors, or has no value."
        ),
    ] = None,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
    quiet: QuietOption = False,
) -> None:
    """Hold the theories against simulations of a fixed grid of whole models."""
    from ..formulas.law import THEORIES
    from ..validation.errors import by_class, errors
    from ..validation.grid import subset as find
    from ..validation.report import class_tables, plot_errors
    from ..validation.store import load, run_grid

    configurations = find(subset)
    theories = [t for t in THEORIES if t in {name.value for name in theory or TheoryName}]
    if max_error is not None and "refined" not in theories:
        raise DomainError("--max-error judges the refined theory: add --theory refined")
    held = None if run else load(data)
    if held is None:
        data = Path("validation.json") if data is None else data
        with steps("simulating", sum(c.cost * c.seeds for c in configurations)) as advance:
            held = run_grid(
                configurations,
                data,
                device=device,
                progress=lambda c: advance(c.cost * c.seeds),
            )
    with steps(f"predicting {len(configurations)} models", len(configurations)) as advance:
        frame = errors(theories, configurations, held, lambda c: advance(1))

    refined = frame.loc[frame["theory"] == "refined", "grad_beyond"]
    Answer(
        said=lambda: class_tables(frame),
        data=lambda: {"format": 1, "runs": frame, "classes": by_class(frame)},
        frame=lambda: frame,
        figure=lambda: plot_errors(frame),
        passed=max_error is None or bool((refined <= max_error).all()),
    ).show(as_json, csv, plot)
