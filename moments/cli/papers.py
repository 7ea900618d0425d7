"""`moments compare-schemes` and `moments figures`: schemes side by side, the papers' pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DomainError
from ..formulas.checks import check_choice
from .base import (
    CsvOption,
    JsonOption,
    LayersOption,
    ModelArgument,
    PlotOption,
    SchemeOption,
    SeqLenOption,
    SomeSchemes,
    app,
    escaped,
    named,
    out,
    scheme_options,
    with_input,
    write_csv,
    write_plot,
)


@app.command(
    "compare-schemes",
    examples=(
        "compare-schemes bert-base --plot schemes.svg",
        "compare-schemes config.json --layers 96 --scheme dslm --scheme deepnorm",
        "compare-schemes bert-base --json > schemes.json",
    ),
)
def compare_schemes(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    scheme: SomeSchemes = None,
    option: SchemeOption = None,
    variance: Annotated[float | None, typer.Option(help="Of what enters layer 1.")] = None,
    correlation: Annotated[float | None, typer.Option(help="Of its tokens.")] = None,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """What every scheme does to one model: growth, gradients, correlation, in one table."""
    from ..show.scheme_table import compare_schemes as run

    described, inputs = with_input(model, layers, seq_len, variance, correlation)
    found = run(described, scheme or None, options=scheme_options(option), **inputs)
    if not found.predictions:
        reasons = "; ".join(dict.fromkeys(found.left_out.values()))
        raise DomainError(f"no scheme could be applied: {reasons}")
    if csv is not None:
        write_csv(found.to_frame(), csv)
    if plot is not None:
        write_plot(found.plot(named(model)), plot)
    if as_json:
        records = json.loads(found.to_frame().to_json(orient="records"))
        said = {"format": 1, "schemes": records, "left_out": dict(found.left_out)}
        print(json.dumps(said, indent=2))
    else:
        out.print(escaped(str(found)), soft_wrap=True)


@app.command(
    examples=("figures --list", "figures kedia-3", "figures --format pdf --folder papers"),
)
def figures(
    name: Annotated[str | None, typer.Argument(help="Which; left out: all.")] = None,
    folder: Annotated[Path, typer.Option(help="Where the pictures go.")] = Path("figures"),
    ending: Annotated[
        str, typer.Option("--format", help="What they are written as: png, svg or pdf.")
    ] = "png",
    names: Annotated[bool, typer.Option("--list", help="List them instead.")] = False,
    as_json: JsonOption = False,
) -> None:
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
    for row in listed:
        path = folder / f"{row['name']}.{ending.removeprefix('.')}"
        if not names:
            draw(row["name"], path)
            row["picture"] = str(path)
        if not as_json:
            words = f"{row['name']:9} {row['title']}" if names else f"picture: {path}"
            out.print(escaped(words), soft_wrap=True)
    if as_json:
        print(json.dumps(listed, indent=2))
