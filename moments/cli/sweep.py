"""Many configurations of a model: `moments sweep` and `compare-schemes`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from ..errors import DomainError, brief, domain_error, unknown_name
from .base import (
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
    app,
    declared,
    named,
    scheme_options,
    spelled,
    steps,
    told,
    with_input,
)

if TYPE_CHECKING:
    from ..model.transformer import Transformer

MOST_VALUES = 100_000


@app.command(
    examples=(
        "sweep gpt2 --axis layers=6,12,24,48 --axis weights.query=log:1e-4:1e-2:9 --plot map.png",
        "sweep --d-model 256 --heads 4 --seq-len 64 --axis layers=range:4:64:4 "
        "--axis scheme=none,deepnorm --plot schemes.svg",
        "sweep bert-base --seq-len 64 --axis correlation=lin:0:0.9:10 "
        "--axis branch_scale=log:0.05:1:12 --quantity correlation --jobs 4 --csv grid.csv",
        "sweep bert-base --axis layers=range:1:96 --axis theory=refined,published "
        "--path grid.jsonl --json > grid.json",
    ),
    ways=("as_json", "csv", "plot"),
)
def sweep(
    model: ModelArgument = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            help="NAME=VALUES; may be repeated. VALUES: 12,24,48 or log:LEAST:MOST:COUNT, "
            "lin:LEAST:MOST:COUNT, range:FIRST:LAST[:STEP].",
            show_default=False,
        ),
    ] = None,
    layers: LayersOption = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    seq_len: SeqLenOption = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
    theory: TheoryOption = TheoryName.refined,
    quantity: Annotated[
        str, typer.Option(help="What is drawn; a wrong name lists all.")
    ] = "grad_variance",
    x: Annotated[str | None, typer.Option(help="Axis along the picture; the first.")] = None,
    y: Annotated[
        str | None, typer.Option(help="Axis up a map; lines where the second is short.")
    ] = None,
    by: Annotated[str | None, typer.Option(help="Axis of whose values each is drawn.")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Keep every layer: a row each in --csv and --json.")
    ] = False,
    path: Annotated[
        Path | None,
        typer.Option(
            help="Append results to this file as they come; a killed sweep goes on from there.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the work.", min=1)] = 1,
) -> Answer:
    """Predict a grid of configurations: any field of the model, its schemes, and its input.

    An axis is a field (layers, dropout, norm), a part's field (weights.query, embedding.scale,
    head.output_scale), scheme and its options (scheme=none,deepnorm), or variance, correlation,
    grad_variance, grad_correlation, theory.
    """
    from ..grids.run import sweep as run
    from ..grids.store import QUANTITIES

    if not axis:
        raise DomainError("no --axis given: add one such as --axis layers=12,24,48")
    options: dict[str, _Values] = {}
    for text in axis:
        name, values = _axis(text)
        if name in options:
            raise domain_error("--axis", text, f"once for each name: {name} is given twice")
        options[name] = values
    sizes = {"layers": layers, "d_model": d_model, "heads": heads, "seq_len": seq_len}
    if model is None:  # what varies need not be said twice
        sizes = {
            name: _whole(name, options[name])[0] if size is None and name in options else size
            for name, size in sizes.items()
        }
    described, known = declared(model, sizes)
    axes = {
        name: _whole(name, given) if _counts(described, name) else given.values
        for name, given in options.items()
    }
    if quantity not in QUANTITIES:
        raise unknown_name("--quantity", quantity, QUANTITIES)
    for option, chosen in (("--x", x), ("--y", y), ("--by", by)):
        if chosen is not None and chosen not in axes:
            raise unknown_name(option, chosen, axes)
    inputs = known | told(variance=variance, correlation=correlation)
    inputs = {name: value for name, value in inputs.items() if name not in axes}
    with contextlib.ExitStack() as stack:
        executor = None
        if jobs > 1:
            executor = stack.enter_context(_processes(jobs))
        found = run(
            described,
            axes,
            theory=theory.value,
            executor=executor,
            path=path,
            profile=profile,
            **inputs,
        )

    def data() -> dict[str, Any]:
        return {
            "format": 1,
            "axes": {name: list(values) for name, values in found.axes.values.items()},
            "theory": found.theory,
            "inputs": dict(found.inputs),
            "rows": found.to_frame(by_layer=profile),
        }

    return Answer(
        said=lambda: str(found),
        data=data,
        frame=lambda: found.to_frame(by_layer=profile),
        figure=lambda: found.plot(x, y, quantity, by=by, name=named(model)),
    )


def _processes(jobs: int) -> concurrent.futures.Executor:
    """Fresh ones, which inherit no threads; the same on every system."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context)


class _Values(NamedTuple):
    """Of one --axis: the values in order, and whether a progression's, which nobody spelled out."""

    values: list[Any]
    stepped: bool


def _axis(text: str) -> tuple[str, _Values]:
    name, sign, values = text.partition("=")
    if not sign or not name or not values:
        allowed = "NAME=VALUES, such as layers=12,24,48 or weights.query=log:1e-4:1e-1:9"
        raise domain_error("--axis", text, allowed)
    kind, colon, rest = values.partition(":")
    if colon and kind in ("log", "lin", "range"):
        return name, _Values(_progression(text, kind, rest.split(":")), True)
    words = values.split(",")
    if not all(word.strip() for word in words):
        raise domain_error("--axis", text, "values between its commas")
    return name, _Values([spelled(word, f"--axis {brief(text)}") for word in words], False)


def _progression(text: str, kind: str, parts: list[str]) -> list[Any]:
    allowed = {
        "log": "log:LEAST:MOST:COUNT with positive numbers",
        "lin": "lin:LEAST:MOST:COUNT",
        "range": "range:FIRST:LAST or range:FIRST:LAST:STEP with whole numbers",
    }[kind]
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        raise domain_error("--axis", text, allowed) from None
    finite = all(np.isfinite(numbers))
    if kind == "range" and finite and len(numbers) in (2, 3):
        first, last, step = (*numbers, 1.0)[:3]
        whole = all(value == round(value) for value in (first, last, step))
        if whole and step > 0 and last >= first and (last - first) / step < MOST_VALUES:
            return list(range(int(first), int(last) + 1, int(step)))
    elif kind != "range" and finite and len(numbers) == 3:
        least, most, count = numbers
        if count == round(count) and 2 <= count <= MOST_VALUES:
            if kind == "lin":
                return list(map(float, np.linspace(least, most, int(count))))
            if least > 0 and most > 0:
                return list(map(float, np.geomspace(least, most, int(count))))
    raise domain_error("--axis", text, allowed)


def _whole(name: str, given: _Values) -> list[Any]:
    """Steps of a progression rounded, each once; what is no number stays. DomainError for a
    fraction that was spelled out."""
    for value in given.values:
        if isinstance(value, float) and value % 1 and not given.stepped:
            raise domain_error(f"--axis {name}", value, "a whole number")
    return list(dict.fromkeys(round(v) if isinstance(v, float) else v for v in given.values))


def _counts(model: Transformer, name: str) -> bool:
    holder: Any = model
    for part in name.split("."):
        if not dataclasses.is_dataclass(holder):
            return False
        holder = getattr(holder, part, None)
    return isinstance(holder, int) and not isinstance(holder, bool)


@app.command(
    "compare-schemes",
    examples=(
        "compare-schemes bert-base --plot schemes.svg",
        "compare-schemes config.json --layers 96 --scheme dslm --scheme deepnorm",
        "compare-schemes bert-base --json > schemes.json",
    ),
    ways=("as_json", "csv", "plot"),
)
def compare_schemes(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    scheme: SomeSchemes = None,
    option: SchemeOption = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
) -> Answer:
    """What every scheme does to one model: growth, gradients, correlation, in one table."""
    from ..scheme import schemes as every
    from ..scheme.registry import scheme as known
    from ..show.scheme_table import compare_schemes as run

    for name in scheme or ():
        known(name)  # before a sign of work
    described, inputs = with_input(model, layers, seq_len, variance, correlation)
    names = scheme or [one.name for one in every()]
    with steps("applying schemes", len(names)) as advance:
        found = run(
            described,
            names,
            options=scheme_options(option),
            step=lambda name: advance(1, name),
            **inputs,
        )
    if not found.predictions:
        reasons = "; ".join(dict.fromkeys(found.left_out.values()))
        raise DomainError(f"no scheme could be applied: {reasons}")

    return Answer(
        said=lambda: str(found),
        data=lambda: {
            "format": 1,
            "schemes": found.to_frame(),
            "left_out": dict(found.left_out),
        },
        frame=found.to_frame,
        figure=lambda: found.plot(named(model)),
    )
