"""`moments validate`: the theories against simulations of whole models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DomainError
from .base import (
    CsvOption,
    JsonOption,
    PlotOption,
    TheoryName,
    app,
    out,
    steps,
    write_csv,
    write_plot,
)


@app.command(
    examples=(
        "validate --subset quick",
        "validate --theory refined --plot errors.svg --csv errors.csv",
        "validate --subset 'post-causal-*' --max-error 0.3",
        "validate --subset quick --run --data mine.json",
    )
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
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the whole page.")] = False,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Hold the theories against simulations of a fixed grid of whole models."""
    from ..formulas.law import THEORIES
    from ..papers.validation.errors import by_class, errors
    from ..papers.validation.grid import subset as find
    from ..papers.validation.report import class_tables, page, plot_errors
    from ..papers.validation.store import load, run_grid

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
    if csv is not None:
        write_csv(frame, csv)
    if plot is not None:
        write_plot(plot_errors(frame), plot)
    if markdown:
        print(page(frame), end="")
    elif as_json:
        tables = {"runs": frame, "classes": by_class(frame)}
        records = {name: json.loads(t.to_json(orient="records")) for name, t in tables.items()}
        print(json.dumps({"format": 1, **records}, indent=2))
    else:
        out.print(*class_tables(frame))
    if max_error is not None:
        refined = frame.loc[frame["theory"] == "refined", "grad_beyond"]
        if not (refined <= max_error).all():
            raise typer.Exit(1)
