"""One model's numbers: `moments predict`, `solve`, `explain` and `first-step`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..errors import DomainError, domain_error
from .base import (
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
    app,
    declared,
    err,
    named,
    note,
    pictures,
    scheme_options,
    shortened,
    told,
    with_input,
)


@app.command(
    examples=(
        "predict bert-base",
        "predict config.json --seq-len 256 --plot growth.svg",
        "predict gpt2 --layers 48 --scheme dslm --json > deep.json",
        "predict --layers 24 --d-model 512 --heads 8 --seq-len 128 --norm post --correlation 0.2",
        "predict bert-base --theory published --csv points.csv",
    ),
    ways=("as_json", "csv", "plot"),
)
def predict(
    model: ModelArgument = None,
    layers: LayersOption = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    seq_len: SeqLenOption = None,
    d_ff: Annotated[int | None, typer.Option(help="Feed-forward width.")] = None,
    norm: Annotated[
        str | None, typer.Option(help="pre, post, none, sandwich, mix, hybrid or b2t.")
    ] = None,
    activation: Annotated[
        str | None, typer.Option(help="Such as relu, gelu or swiglu; a wrong name lists all.")
    ] = None,
    dropout: Annotated[float | None, typer.Option(help="Probability of dropping.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="Causal mask.")] = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
    grad_variance: Annotated[float | None, typer.Option(help="At the last layer.")] = None,
    grad_correlation: Annotated[float | None, typer.Option(help="At the last layer.")] = None,
    scheme: OneScheme = None,
    option: SchemeOption = None,
    theory: TheoryOption = TheoryName.refined,
) -> Answer:
    """Predict every layer's variance, token correlation and gradient moments."""
    from ..prediction.predict import predict as run
    from ..scheme.registry import scheme as known_scheme
    from ..show.report import prediction_table
    from ..show.scheme_table import input_options

    described, known = declared(
        model,
        {
            "layers": layers,
            "d_model": d_model,
            "heads": heads,
            "seq_len": seq_len,
            "d_ff": d_ff,
            "norm": norm,
            "activation": activation,
            "dropout": dropout,
            "causal": causal,
        },
    )
    if theory == "refined":
        described = shortened(described, seq_len)
    given = told(
        variance=variance,
        correlation=correlation,
        grad_variance=grad_variance,
        grad_correlation=grad_correlation,
    )
    if scheme is None and option:
        raise DomainError("--option is of a scheme: add --scheme")
    if scheme is not None:
        options = scheme_options(option)
        if described.embedding is None and correlation is not None:
            options = input_options(described, known_scheme(scheme), given) | options
        described = described.with_scheme(scheme, **options)
    inputs = known | given
    if not known:
        inputs["pixels"] = pictures(described, variance, correlation)
    progress = err.is_terminal and described.causal and described.seq_len > 128
    prediction = run(described, theory=theory.value, progress=progress, **inputs)
    return Answer(
        said=lambda: (prediction_table(prediction),),
        data=prediction.to_json,
        frame=prediction.to_frame,
        figure=lambda: prediction.plot(named(model)),
    )


@app.command(
    examples=(
        "solve bert-base --objective dslm --json > plan.json",
        "solve bert-base --layers 96 --objective block_variance --target 1",
        "solve bert-base --objective gradient_ratio --target 0.8 --free branch_scale",
        "solve bert-base --objective largest_depth --bound final_correlation=0.9",
        "solve bert-base --objective block_variance --plot plan.svg",
    ),
    ways=("as_json", "csv", "plot"),
)
def solve(
    model: ModelArgument = None,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            "--scheme",
            help="A scheme (`moments schemes`), or one of those above.",
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
) -> Answer:
    """Solve for weight variances and scales; exit 1 where the target is infeasible.

    Objectives, each with its --target: block_variance, of every block's output; stream_variance,
    after every layer; final_variance, after the last; gradient_ratio, the first layer's gradient
    variance over the last one's (2: within twice); flat_gradient, the same from layer to layer;
    final_correlation, of tokens, at most; query_value_balance, squared gradient norms of queries
    over values, and query_value_balance_per_layer. With --bound: largest_k, largest_depth.
    """
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

    return Answer(
        said=lambda: str(plan),
        data=plan.to_json,
        frame=plan.to_frame,
        figure=lambda: plan.plot(named(model)),
        passed=plan.feasible,
    )


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
    ),
    ways=("as_json", "csv"),
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
) -> Answer:
    """One layer law by law: the formulas, the numbers in them, and where each comes from."""
    from ..prediction.explanation import explain as run

    described, inputs = with_input(model, layers, seq_len, variance, correlation)
    explanation = run(described, layer, theory=theory.value, **inputs)
    return Answer(
        said=lambda: print(explanation.latex()) if latex else str(explanation),
        data=explanation.to_frame,
        frame=explanation.to_frame,
    )


@app.command(
    "first-step",
    examples=(
        "first-step gpt2 --seq-len 64 --lr 1e-4",
        "first-step gpt2 --layers 4 --seq-len 32 --bound 0.3 --by-group",
        "first-step config.json --optimizer muon --lr 2e-3 --plot step.png",
    ),
    ways=("as_json", "csv", "plot"),
)
def first_step(
    model: ModelArgument = None,
    optimizer: Annotated[str, typer.Option(help="sgd, adam, adamw, lion, sign or muon.")] = "adam",
    learning_rate: Annotated[
        float | None,
        typer.Option("--learning-rate", "--lr", help="Of the step; else the one of --bound."),
    ] = None,
    bound: Annotated[
        float, typer.Option(help="Without --lr: the stream's largest relative change.")
    ] = 0.1,
    weight_decay: Annotated[float, typer.Option(help="Of every parameter.")] = 0.0,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    sequences: Annotated[int, typer.Option(help="Of text by Zipf's law.")] = 2,
    seed: Annotated[int, typer.Option(help="Of that text.")] = 0,
    steps: Annotated[
        int, typer.Option(help="Of the optimizer, each on its share of the sequences.")
    ] = 1,
    by_group: Annotated[
        bool, typer.Option(help="Without --lr: also the rate of every group alone.")
    ] = False,
) -> Answer:
    """Predict the first step of an optimizer: loss, the stream's change, every matrix's step."""
    from ..formulas.checks import POSITIVE, check_number
    from ..prediction.predict import predict
    from ..show.step import first_step_table
    from ..step.rules import check_step
    from ..step.search import learning_rate as search
    from ..step.search import zipf_batch

    options: dict[str, Any] = {"weight_decay": weight_decay} if weight_decay else {}
    if steps != 1:
        options["steps"] = steps
    check_number("bound", bound, POSITIVE)
    check_step(optimizer, 1.0 if learning_rate is None else learning_rate, **options)
    described, known = declared(model, {"layers": layers, "seq_len": seq_len})
    if known:
        raise DomainError("a plan knows moments of its input and no text: give its model alone")
    described = shortened(described, seq_len)
    pixels = pictures(described, None, None)
    if pixels is not None:
        prediction = predict(described, pixels=pixels, targets=[0] * len(pixels))
    else:
        if not hasattr(described.embedding, "vocab_size"):
            raise DomainError("a first step reads a text: declare an embedding with a token table")
        prediction = predict(described, **zipf_batch(described, sequences, seed))
    groups: dict[str, float] = {}
    if learning_rate is None:
        found = search(prediction, optimizer, bound=bound, groups=by_group, **options)
        step, groups = found.step, dict(found.by_group)
        for warning in step.warnings:
            note(warning)
    else:
        step = prediction.after(optimizer, learning_rate, **options)
    by = {name: rate if rate < float("inf") else None for name, rate in groups.items()}
    alone = (f"{name} alone: learning rate {rate:.3g}" for name, rate in groups.items())
    return Answer(
        said=lambda: (first_step_table(step), *alone),
        data=lambda: step.to_dict() | {"by_group": by},
        frame=step.to_frame,
        figure=lambda: step.plot(named(model)),
    )
