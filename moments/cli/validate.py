"""Theories against simulations of whole models: `moments validate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import DomainError
from .base import Answer, TheoryName, app, steps


@app.command(
    examples=(
        "validate --subset quick",
        "validate --theory refined --plot errors.svg --csv errors.csv",
        "validate --subset 'post-causal-*' --max-error 0.3",
        "validate --subset quick --run --data mine.json",
    ),
    ways=("as_json", "csv", "plot"),
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
) -> Answer:
    """Hold the theories against simulations of a fixed grid of whole models."""
    from ..formulas.law import THEORIES
    from ..validation.errors import by_class, errors
    from ..validation.grid import subset as find
    from ..validation.report import class_tables, page, plot_errors
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
    return Answer(
        said=lambda: print(page(frame), end="") if markdown else class_tables(frame),
        data=lambda: {"format": 1, "runs": frame, "classes": by_class(frame)},
        frame=lambda: frame,
        figure=lambda: plot_errors(frame),
        passed=max_error is None or bool((refined <= max_error).all()),
    )
