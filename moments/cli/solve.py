"""`moments solve` and `moments explain`: from a target to weights, and one layer law by law."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..errors import DomainError, domain_error
from .base import (
    CsvOption,
    JsonOption,
    LayersOption,
    ModelArgument,
    PlotOption,
    SchemeOption,
    SeqLenOption,
    TheoryName,
    TheoryOption,
    app,
    escaped,
    named,
    note,
    out,
    scheme_options,
    with_input,
    write_csv,
    write_plot,
)

InputVariance = Annotated[float | None, typer.Option("--variance", help="Of what enters layer 1.")]
InputCorrelation = Annotated[float | None, typer.Option("--correlation", help="Of its tokens.")]


@app.command(
    examples=(
        "solve bert-base --objective dslm --json > plan.json",
        "solve bert-base --layers 96 --objective block_variance --target 1",
        "solve bert-base --objective gradient_ratio --target 0.8 --free branch_scale",
        "solve bert-base --objective largest_depth --bound final_correlation=0.9",
        "solve bert-base --objective block_variance --formulas --plot plan.svg",
    )
)
def solve(
    model: ModelArgument = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            "--scheme",
            help="A scheme (`moments schemes`), or stream_variance, block_variance, "
            "final_variance, gradient_ratio, final_correlation, query_value_balance, "
            "query_value_balance_per_layer, flat_gradient, largest_k, largest_depth.",
        ),
    ] = "dslm",
    target: Annotated[float, typer.Option(help="The wanted value.")] = 1.0,
    free: Annotated[
        list[str] | None,
        typer.Option(help="What to solve for; may be repeated.", show_default=False),
    ] = None,
    goal: Annotated[
        list[str] | None,
        typer.Option(
            help="OBJECTIVE=TARGET, such as final_variance=2; repeated, solved together.",
            show_default=False,
        ),
    ] = None,
    bound: Annotated[
        str | None,
        typer.Option(help="Of the largest: GOAL=MOST, such as final_correlation=0.9."),
    ] = None,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
    option: SchemeOption = None,
    tolerance: Annotated[float, typer.Option(help="Of the residual, relative.")] = 1e-9,
    formulas: Annotated[
        bool, typer.Option("--formulas", help="Show the laws inverted in layer 1.")
    ] = False,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Solve for weight variances and scales; exit 1 where the target is infeasible."""
    from ..scheme import schemes
    from ..scheme.plan import solve as run

    options = scheme_options(option)
    if options and objective not in [scheme.name for scheme in schemes()]:
        raise DomainError("--option is a scheme's: name one as --objective")
    described, inputs = with_input(model, layers, seq_len, variance, correlation)
    plan = run(
        described,
        [_named(text, "goal") for text in goal] if goal else objective,
        target=target,
        free=free or None,
        bound=None if bound is None else _named(bound, "bound"),
        tolerance=tolerance,
        options=options or None,
        progress=True,
        **inputs,
    )
    if csv is not None:
        write_csv(plan.to_frame(), csv)
    if plot is not None:
        write_plot(plan.plot(named(model)), plot)
    if as_json:
        print(plan.to_json())
    else:
        out.print(escaped(str(plan)), soft_wrap=True)
        if formulas and plan.formula:
            out.print(escaped(str(plan.inversion())), soft_wrap=True)
        elif formulas:
            note(_without_formulas(plan.objective))
    if not plan.feasible:
        raise typer.Exit(1)


def _without_formulas(objective: str) -> str:
    """Why a plan shows no inverted laws, and where its numbers come from."""
    from ..scheme import schemes
    from ..solver.layerwise import LAYERWISE

    sources = {scheme.name: scheme.source for scheme in schemes()}
    if objective in sources:
        why = f"{objective} is a scheme, whose constants are those of {sources[objective]}"
    else:
        why = f"{objective} is searched for over predictions of the whole model"
    return f"{why}: laws are inverted by --objective {' or '.join(LAYERWISE)} alone"


def _named(text: str, option: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        allowed = "OBJECTIVE=NUMBER, such as final_correlation=0.9"
        raise domain_error(option, text, allowed) from None


@app.command(
    examples=(
        "explain bert-base --layer 7",
        "explain config.json --layer 1 --latex",
        "explain bert-base --layer 12 --csv steps.csv",
    )
)
def explain(
    model: ModelArgument = None,
    layer: Annotated[int, typer.Option(help="Which layer, from 1.")] = 1,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
    theory: TheoryOption = TheoryName.refined,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX.")] = False,
    as_json: JsonOption = False,
    csv: CsvOption = None,
) -> None:
    """One layer law by law: the formulas, the numbers in them, and where each comes from."""
    from ..prediction.explanation import explain as run

    described, inputs = with_input(model, layers, seq_len, variance, correlation)
    explanation = run(described, layer, theory=theory.value, **inputs)
    if csv is not None:
        write_csv(explanation.to_frame(), csv)
    if as_json:
        records = explanation.to_frame().to_json(orient="records")
        print(json.dumps(json.loads(records), indent=2))
    elif latex:
        print(explanation.latex())
    else:
        out.print(escaped(str(explanation)), soft_wrap=True)
