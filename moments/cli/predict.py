"""Predictions for one model and for many: `moments predict`, `solve`, `explain`, `first-step` and
`sweep`."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer

from ..errors import DomainError, Undeclared, brief, domain_error, unknown_name
from .base import (
    INITIALISE,
    PREDICT,
    Answer,
    InputCorrelation,
    InputVariance,
    LayersOption,
    ModelArgument,
    OneScheme,
    SchemeOption,
    SeqLenOption,
    TheoryName,
    TheoryOption,
    command,
    default_sound,
    err,
    model_and_inputs,
    name_of,
    not_none,
    note,
    parse_value,
    photo_for,
    read_model,
    scheme_options,
    shortened,
)

if TYPE_CHECKING:
    from ..model.transformer import Transformer


@command(
    PREDICT,
    "predict bert-base",
    "predict config.json --seq-len 256 --plot growth.svg",
    "predict gpt2 --layers 48 --scheme dslm --json > deep.json",
    "predict --layers 24 --d-model 512 --heads 8 --seq-len 128 --norm post --correlation 0.2",
    "predict bert-base --theory published --csv points.csv",
)
def predict(
    model: ModelArgument = None,
    layers: LayersOption = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    seq_len: SeqLenOption = None,
    d_ff: Annotated[int | None, typer.Option(help="Feed-forward width.")] = None,
    norm: Annotated[
        str | None,
        typer.Option(help="Norm placement: pre, post, none, sandwich, output, mix, hybrid or b2t."),
    ] = None,
    activation: Annotated[
        str | None, typer.Option(help="Such as relu, gelu or swiglu; an unknown name lists all.")
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout probability.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="Attention mask.")] = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
    grad_variance: Annotated[
        float | None, typer.Option(help="Gradient variance at the last layer's output.")
    ] = None,
    grad_correlation: Annotated[
        float | None, typer.Option(help="Gradient correlation of two tokens at that output.")
    ] = None,
    scheme: OneScheme = None,
    option: SchemeOption = None,
    theory: TheoryOption = TheoryName.refined,
    whole: Annotated[bool, typer.Option("--all", help="Print every layer, not only five.")] = False,
) -> Answer:
    """Predict every layer's variance, token correlation and gradient moments.

    A config of a type that cannot be declared is predicted submodule by submodule.
    """
    from ..prediction.predict import predict as run
    from ..scheme.registry import input_options
    from ..scheme.registry import scheme as known_scheme
    from ..show.report import prediction_screen, prediction_table

    options: dict[str, Any] = {"layers": layers, "d_model": d_model, "heads": heads}
    options |= {"seq_len": seq_len, "d_ff": d_ff, "norm": norm, "activation": activation}
    options |= {"dropout": dropout, "causal": causal}
    try:
        described, known = read_model(model, options)
    except Undeclared as refusal:
        moved = (variance, correlation, grad_variance, grad_correlation, scheme, option)
        if model is None or not_none(**options) or any(m is not None for m in moved):
            raise
        return _by_operations(model, refusal)
    if theory == "refined":
        described = shortened(described, seq_len)
    given = not_none(variance=variance, correlation=correlation)
    given |= not_none(grad_variance=grad_variance, grad_correlation=grad_correlation)
    if scheme is None and option:
        raise DomainError("--option sets an option of a scheme: add --scheme")
    if scheme is not None:
        options = scheme_options(option)
        if described.embedding is None and correlation is not None:
            options = input_options(described, known_scheme(scheme), given) | options
        described = described.with_scheme(scheme, **options)
    inputs = known | given
    if not known:
        inputs |= {"pixels": photo_for(described, variance, correlation)} | default_sound(described)
    progress = err.is_terminal and described.causal and described.seq_len > 128
    prediction = run(described, theory=theory.value, progress=progress, **inputs)
    name = name_of(model)
    return Answer(
        lambda: prediction_table(prediction) if whole else prediction_screen(prediction, name),
        prediction.to_json,
        prediction.to_frame,
        lambda: prediction.plot(name),
    )


def _by_operations(model: str, refusal: Undeclared) -> Answer:
    """Predict a config whose module no Transformer describes, operation by operation."""
    from ..model.huggingface.config import read_config
    from ..torch.from_config import predicted

    note(f"{refusal}: it is predicted operation by operation instead")
    result = predicted(read_config(model))

    def figure() -> Any:
        raise refusal

    return Answer(text=result.table, data=result.to_json, frame=result.to_frame, figure=figure)


@command(
    INITIALISE,
    "solve bert-base --objective dslm --json > plan.json",
    "solve bert-base --layers 96 --objective block_variance --target 1",
    "solve bert-base --objective gradient_ratio --target 0.8 --free branch_scale",
    "solve bert-base --objective largest_depth --bound final_correlation=0.9",
    "solve bert-base --objective block_variance --plot plan.svg",
)
def solve(
    model: ModelArgument = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            "--scheme",
            help="A scheme (`moments schemes` lists them) or an objective; default: dslm.",
        ),
    ] = None,
    target: Annotated[float | None, typer.Option(help="The value to reach; default: 1.")] = None,
    free: Annotated[
        list[str] | None,
        typer.Option(help="A field to solve for; may be repeated.", show_default=False),
    ] = None,
    goal: Annotated[
        list[str] | None,
        typer.Option(
            help="OBJECTIVE=TARGET, such as final_variance=2; several are solved together.",
            show_default=False,
        ),
    ] = None,
    bound: Annotated[
        str | None,
        typer.Option(
            help="For largest_k and largest_depth: GOAL=LIMIT, such as final_correlation=0.9."
        ),
    ] = None,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
    option: SchemeOption = None,
    tolerance: Annotated[float, typer.Option(help="Allowed relative error.")] = 1e-9,
) -> Answer:
    """Solve for weight variances and scales; exit status 1 if the target cannot be reached.

    Objectives and what their --target is: block_variance, the variance of every block's output;
    stream_variance, the variance after every layer; final_variance, after the last layer;
    gradient_ratio, the first layer's gradient variance over the last one's (2: within twice);
    flat_gradient, the same ratio from layer to layer; final_correlation, the largest token
    correlation; query_value_balance, squared gradient norms of queries over values;
    query_value_balance_per_layer. With --bound: largest_k, largest_depth.
    """
    from ..scheme import schemes
    from ..scheme.plan import solve as run

    options = scheme_options(option)
    if goal and objective is not None:
        raise DomainError("--goal and --objective both define the target: pass one of them")
    objective = objective or "dslm"
    if options and objective not in [scheme.name for scheme in schemes()]:
        raise DomainError("--option sets an option of a scheme: pass the scheme as --objective")
    described, inputs = model_and_inputs(model, layers, seq_len, variance, correlation)
    plan = run(
        described,
        [_parse_goal(text, "goal") for text in goal] if goal else objective,
        target=target,
        free=free or None,
        bound=None if bound is None else _parse_goal(bound, "bound"),
        tolerance=tolerance,
        options=options or None,
        progress=True,
        **inputs,
    )
    return Answer(
        text=lambda: str(plan),
        data=plan.to_json,
        frame=plan.to_frame,
        figure=lambda: plan.plot(name_of(model)),
        passed=plan.feasible,
    )


def _parse_goal(text: str, option: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        allowed = "OBJECTIVE=NUMBER, such as final_correlation=0.9"
        raise domain_error(option, text, allowed) from None


@command(
    PREDICT,
    "explain bert-base --layer 7",
    "explain config.json --layer 1 --latex",
    "explain bert-base --layer 12 --csv steps.csv",
    plot=False,
)
def explain(
    model: ModelArgument = None,
    layer: Annotated[int, typer.Option(help="The layer to explain, from 1.")] = 1,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
    theory: TheoryOption = TheoryName.refined,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX.")] = False,
) -> Answer:
    """Explain one layer formula by formula, with the numbers in each and its source."""
    from ..prediction.explanation import explain as run

    described, inputs = model_and_inputs(model, layers, seq_len, variance, correlation)
    explanation = run(described, layer, theory=theory.value, **inputs)
    return Answer(
        text=lambda: explanation.latex() if latex else str(explanation),
        data=explanation.to_frame,
        frame=explanation.to_frame,
    )


@command(
    PREDICT,
    "first-step gpt2 --seq-len 64 --lr 1e-4",
    "first-step gpt2 --layers 4 --seq-len 32 --bound 0.3 --by-group",
    "first-step config.json --optimizer muon --lr 2e-3 --plot step.png",
    name="first-step",
)
def first_step(
    model: ModelArgument = None,
    optimizer: Annotated[str, typer.Option(help="sgd, adam, adamw, lion, sign or muon.")] = "adam",
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate", "--lr", help="Default: the rate whose first step reaches --bound."
        ),
    ] = None,
    bound: Annotated[
        float,
        typer.Option(help="Without --lr: the largest relative change of the residual stream."),
    ] = 0.1,
    weight_decay: Annotated[float, typer.Option(help="Weight decay of every parameter.")] = 0.0,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    sequences: Annotated[int, typer.Option(help="Sequences of random text (Zipf's law).")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of that text.")] = 0,
    steps: Annotated[
        int, typer.Option(help="Number of optimizer steps, each on its share of the sequences.")
    ] = 1,
    by_group: Annotated[
        bool, typer.Option(help="Without --lr: also the rate for every group of parameters alone.")
    ] = False,
) -> Answer:
    """Predict which learning rates to search, and the first step: loss, stream, every matrix.

    Without --lr the rates are printed first: the range to search, the rate from which training is
    unstable, and the rate whose first step reaches --bound.
    """
    from ..formulas.checks import POSITIVE, check_number
    from ..prediction.predict import predict
    from ..show.report import first_step_table
    from ..step.rules import check_step
    from ..step.search import learning_rate as search
    from ..step.search import zipf_batch

    options: dict[str, Any] = {"weight_decay": weight_decay} if weight_decay else {}
    if steps != 1:
        options["steps"] = steps
    check_number("bound", bound, POSITIVE)
    check_step(optimizer, 1.0 if learning_rate is None else learning_rate, **options)
    described, known = read_model(model, {"layers": layers, "seq_len": seq_len})
    if known:
        raise DomainError("a plan has moments of its input but no text: pass its model alone")
    described = shortened(described, seq_len)
    pixels = photo_for(described, None, None)
    if pixels is not None:
        prediction = predict(described, pixels=pixels, targets=[0] * len(pixels))
    else:
        if not hasattr(described.embedding, "vocab_size"):
            raise DomainError("a first step needs a text: declare an embedding with a token table")
        prediction = predict(described, **zipf_batch(described, sequences, seed))
    rates = None
    if learning_rate is None:
        rates = search(prediction, optimizer, bound=bound, groups=by_group, **options)
        step = rates.step
        for warning in step.warnings:
            note(warning)
    else:
        step = prediction.after(optimizer, learning_rate, **options)
    known_rates = {} if rates is None else {"rates": rates.to_dict()}
    tables = [] if rates is None else [rates.table]
    return Answer(
        text=lambda: "\n\n".join([*(table() for table in tables), first_step_table(step)]),
        data=lambda: step.to_dict() | known_rates,
        frame=step.to_frame,
        figure=lambda: (step if rates is None else rates).plot(name_of(model)),
    )


# --- grids ----------------------------------------------------------------------------------------

MOST_VALUES = 100_000
"""Most values of one progression; more are taken for a typing error."""


@command(
    PREDICT,
    "sweep gpt2 --axis layers=6,12,24,48 --axis weights.query=log:1e-4:1e-2:9 --plot map.png",
    "sweep --d-model 256 --heads 4 --seq-len 64 --axis layers=range:4:64:4 "
    "--axis scheme=none,deepnorm --plot schemes.svg",
    "sweep bert-base --seq-len 64 --axis correlation=lin:0:0.9:10 "
    "--axis branch_scale=log:0.05:1:12 --quantity correlation --jobs 4 --csv grid.csv",
    "sweep bert-base --axis layers=range:1:96 --axis theory=refined,published "
    "--path grid.jsonl --json > grid.json",
)
def sweep(
    model: ModelArgument = None,
    axis: Annotated[
        list[str] | None,
        typer.Option(
            "--axis",
            help="NAME=VALUES; may be repeated. VALUES: 12,24,48 or log:LEAST:MOST:COUNT, "
            "lin:LEAST:MOST:COUNT or range:FIRST:LAST[:STEP].",
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
        str, typer.Option(help="Quantity to draw; an unknown name lists all.")
    ] = "grad_variance",
    x: Annotated[
        str | None, typer.Option(help="Horizontal axis of the picture; default: the first --axis.")
    ] = None,
    y: Annotated[
        str | None,
        typer.Option(
            help="Vertical axis of a map; default: the second --axis, or lines if it is short."
        ),
    ] = None,
    by: Annotated[str | None, typer.Option(help="Axis with one line or map per value.")] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Keep every layer, one row each in --csv and --json.")
    ] = False,
    path: Annotated[
        Path | None,
        typer.Option(
            help="Append results to this file as they arrive; a stopped sweep continues from it.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Number of processes.", min=1)] = 1,
) -> Answer:
    """Predict a grid of configurations: any field of the model, its schemes, and its input.

    An axis is a field of the model (layers, dropout, norm), a field of a part (weights.query,
    embedding.scale, head.output_scale), the scheme and its options (scheme=none,deepnorm), or
    variance, correlation, grad_variance, grad_correlation or theory.
    """
    from ..grids.run import sweep as run
    from ..grids.store import QUANTITIES

    if not axis:
        raise DomainError("no --axis given: add one such as --axis layers=12,24,48")
    options: dict[str, _Values] = {}
    for text in axis:
        name, values = _parse_axis(text)
        if name in options:
            raise domain_error("--axis", text, f"given once per name: {name} is given twice")
        options[name] = values
    sizes = {"layers": layers, "d_model": d_model, "heads": heads, "seq_len": seq_len}
    if model is None:  # a size that varies need not be given as an option too
        sizes = {
            name: _integers(name, options[name])[0] if size is None and name in options else size
            for name, size in sizes.items()
        }
    described, known = read_model(model, sizes)
    axes = {
        name: _integers(name, given) if _is_count(described, name) else given.values
        for name, given in options.items()
    }
    if quantity not in QUANTITIES:
        raise unknown_name("--quantity", quantity, QUANTITIES)
    for option, chosen in (("--x", x), ("--y", y), ("--by", by)):
        if chosen is not None and chosen not in axes:
            raise unknown_name(option, chosen, axes)
    inputs = known | not_none(variance=variance, correlation=correlation)
    inputs = {name: value for name, value in inputs.items() if name not in axes}
    with _processes(jobs) if jobs > 1 else contextlib.nullcontext() as executor:
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
        text=lambda: str(found),
        data=data,
        frame=lambda: found.to_frame(by_layer=profile),
        figure=lambda: found.plot(x, y, quantity, by=by, name=name_of(model)),
    )


def _processes(jobs: int) -> concurrent.futures.Executor:
    """A pool of spawned processes, which inherit no threads, on every system."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context)


class _Values(NamedTuple):
    """Values of one --axis, and whether they come from a progression (`stepped`)."""

    values: list[Any]
    stepped: bool


def _parse_axis(text: str) -> tuple[str, _Values]:
    name, sign, values = text.partition("=")
    if not sign or not name or not values:
        allowed = "NAME=VALUES, such as layers=12,24,48 or weights.query=log:1e-4:1e-1:9"
        raise domain_error("--axis", text, allowed)
    kind, colon, rest = values.partition(":")
    if colon and kind in ("log", "lin", "range"):
        return name, _Values(_parse_progression(text, kind, rest.split(":")), True)
    words = values.split(",")
    if not all(word.strip() for word in words):
        raise domain_error("--axis", text, "a list without empty values between commas")
    return name, _Values([parse_value(word, f"--axis {brief(text)}") for word in words], False)


def _parse_progression(text: str, kind: str, parts: list[str]) -> list[Any]:
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


def _integers(name: str, given: _Values) -> list[Any]:
    """Round the values of a progression, without repeats; DomainError for a fraction in a list."""
    for value in given.values:
        if isinstance(value, float) and value % 1 and not given.stepped:
            raise domain_error(f"--axis {name}", value, "a whole number")
    return list(dict.fromkeys(round(v) if isinstance(v, float) else v for v in given.values))


def _is_count(model: Transformer, name: str) -> bool:
    holder: Any = model
    for part in name.split("."):
        if not dataclasses.is_dataclass(holder):
            return False
        holder = getattr(holder, part, None)
    return isinstance(holder, int) and not isinstance(holder, bool)
