"""What the papers hold: `moments figures`, and the theories against simulations, `validate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DomainError
from ..formulas.checks import check_choice
from .base import Answer, TheoryName, app, escaped, out, steps


@app.command(
    examples=("figures --list", "figures kedia-3", "figures --format pdf --folder papers"),
    ways=("as_json",),
)
def figures(
    name: Annotated[str | None, typer.Argument(help="Which; left out: all.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path("figures"),
    ending: Annotated[
        str, typer.Option("--format", help="What they are written as: png, svg or pdf.")
    ] = "png",
    names: Annotated[bool, typer.Option("--list", help="List them instead.")] = False,
) -> Answer:
    """Redraw the papers' figures from predictions, with simulated points over them."""
    from ..papers.figures import draw, setup
    from ..papers.figures import names as every

    chosen = {one: setup(one) for one in (every() if name is None else (name,))}
    listed = [{"name": n, "title": s.title, "source": str(s.source)} for n, s in chosen.items()]
    if not names:
        check_choice("format", ending.removeprefix("."), ("png", "svg", "pdf"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DomainError(f"--folder {folder}: {error.strerror}") from None

    def drawn() -> Iterator[dict[str, str]]:
        for row in listed:
            path = folder / f"{row['name']}.{ending.removeprefix('.')}"
            if not names:
                draw(row["name"], path)
            yield row if names else row | {"picture": str(path)}

    def said() -> None:
        for row in drawn():
            words = f"{row['name']:9} {row['title']}" if names else f"picture: {row['picture']}"
            out.print(escaped(words), soft_wrap=True)

    return Answer(said=said, data=lambda: list(drawn()))


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

    refined = frame.loc[frame["theory"] == "refined", "grad_beyond"]
    return Answer(
        said=lambda: print(page(frame), end="") if markdown else class_tables(frame),
        data=lambda: {"format": 1, "runs": frame, "classes": by_class(frame)},
        frame=lambda: frame,
        figure=lambda: plot_errors(frame),
        passed=max_error is None or bool((refined <= max_error).all()),
    )
