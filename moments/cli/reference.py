"""Reference: `moments schemes`, `formulas` and `validate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DomainError
from ..files import as_frame
from .base import (
    INITIALISE,
    REFERENCE,
    Answer,
    InputCorrelation,
    InputVariance,
    LayersOption,
    ModelArgument,
    SchemeOption,
    SeqLenOption,
    SomeSchemes,
    TheoryName,
    TheoryOption,
    command,
    model_and_inputs,
    name_of,
    progress_steps,
    scheme_options,
)

if TYPE_CHECKING:
    from ..scheme import Scheme


@command(
    INITIALISE,
    "schemes",
    "schemes bert-base --plot schemes.svg",
    "schemes config.json --layers 96 --scheme dslm --scheme deepnorm --json > schemes.json",
)
def schemes(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    scheme: SomeSchemes = None,
    option: SchemeOption = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
) -> Answer:
    """List the published schemes, or compare what each does to a model's growth and gradients."""
    from ..scheme import schemes as every
    from ..scheme.registry import scheme as known
    from ..show.scheme_table import compare_schemes

    chosen = [known(name) for name in scheme] if scheme else list(every())
    if model is None:
        rows = [
            {"name": one.name, "title": one.title, "sets": list(one.sets), "options": one.options}
            | {"source": str(one.source)}
            for one in chosen
        ]
        return Answer(
            text=lambda: "\n".join(map(_scheme_lines, chosen)),
            data=lambda: rows,
            frame=lambda: as_frame(rows),
            figure=_no_model,
        )
    described, inputs = model_and_inputs(model, layers, seq_len, variance, correlation)
    with progress_steps("applying schemes", len(chosen)) as advance:
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
    return Answer(
        text=lambda: str(found),
        data=lambda: {"format": 1, "schemes": found.to_frame(), "left_out": dict(found.left_out)},
        frame=found.to_frame,
        figure=lambda: found.plot(name_of(model)),
    )


def _no_model() -> Any:
    raise DomainError("--plot draws a model under the schemes: pass a MODEL")


def _scheme_lines(scheme: Scheme) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in scheme.options.items())
    return (f"{scheme.name}  {scheme.title}\n  sets {', '.join(scheme.sets)}; {scheme.source}") + (
        f"\n  options: {options}" if options else ""
    )


@command(
    REFERENCE,
    "formulas",
    "formulas relu",
    "formulas layernorm --theory published --latex",
    "formulas softmax --json",
    csv=False,
    plot=False,
)
def formulas(
    component: Annotated[str | None, typer.Argument(help="A component's name.")] = None,
    theory: TheoryOption = TheoryName.refined,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX.")] = False,
) -> Answer:
    """Print a component's formulas with their sources, or list the components."""
    from ..formulas.registry import component as find
    from ..formulas.registry import components

    if component is None:
        titles = {name: find(name).title for name in components()}
        width = max(map(len, titles)) + 2
        return Answer(
            text=lambda: "\n".join(f"{name:<{width}}{t}" for name, t in titles.items()),
            data=lambda: titles,
        )
    record = find(component)
    laws = record.under(theory.value)

    def text() -> str:
        lines = [f"{record.title}, theory {theory.value}"]
        for quantity, law in laws.items():
            lines.append(f"\n{quantity}  {law.status}; {law.source}")
            lines.append(f"  {law.latex() if latex else law.expr}")
            lines += [f"note: {law.note}"] if law.note else []
        return "\n".join(lines)

    return Answer(text, lambda: {name: _law_entry(law) for name, law in laws.items()})


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


@command(
    None,
    "validate --subset quick",
    "validate --theory refined --plot errors.svg --csv errors.csv",
    "validate --subset 'post-causal-*' --max-error 0.3",
)
def validate(
    subset: Annotated[
        str,
        typer.Option(
            help="Models: all, baselines, array, quick, or a pattern like 'post-causal-*'."
        ),
    ] = "all",
    theory: Annotated[
        list[TheoryName] | None,
        typer.Option(help="Formulas to test; may be repeated. Default: all.", show_default=False),
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="Exit status 1 if the refined gradient variance of any run is off by more (mean "
            "|log ratio| beyond two standard errors), or has no value."
        ),
    ] = None,
) -> Answer:
    """Compare every theory with stored simulations of a fixed grid of whole models."""
    from ..formulas.checks import POSITIVE, check_number
    from ..formulas.law import THEORIES
    from ..validation.errors import by_class, errors
    from ..validation.grid import subset as find
    from ..validation.report import class_tables, plot_errors

    configurations = find(subset)
    theories = [t for t in THEORIES if t in {name.value for name in theory or TheoryName}]
    if max_error is not None:
        check_number("--max-error", max_error, POSITIVE)
    if max_error is not None and "refined" not in theories:
        raise DomainError("--max-error is about the refined theory: add --theory refined")
    with progress_steps(f"predicting {len(configurations)} models", len(configurations)) as advance:
        frame = errors(theories, configurations, progress=lambda c: advance(1))

    refined = frame.loc[frame["theory"] == "refined", "grad_beyond"]
    return Answer(
        text=lambda: class_tables(frame),
        data=lambda: {"format": 1, "runs": frame, "classes": by_class(frame)},
        frame=lambda: frame,
        figure=lambda: plot_errors(frame),
        passed=max_error is None or bool((refined <= max_error).all()),
    )
