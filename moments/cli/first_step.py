"""`moments first-step`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ..errors import DomainError
from .base import (
    CsvOption,
    JsonOption,
    LayersOption,
    ModelArgument,
    PlotOption,
    SeqLenOption,
    app,
    declared,
    named,
    out,
    pictures,
    shortened,
    write_csv,
    write_plot,
)
from .base import note as say


@app.command(
    "first-step",
    examples=(
        "first-step gpt2 --seq-len 64 --lr 1e-4",
        "first-step gpt2 --layers 4 --seq-len 32 --bound 0.3 --by-group",
        "first-step config.json --optimizer muon --lr 2e-3 --plot step.png",
    ),
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
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Predict the first step of an optimizer: loss, the stream's change, every matrix's step."""
    from ..prediction.predict import predict
    from ..show.step import first_step_table
    from ..step.search import learning_rate as search
    from ..step.search import zipf_batch

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
    options: dict[str, Any] = {"weight_decay": weight_decay} if weight_decay else {}
    if steps != 1:
        options["steps"] = steps
    groups: dict[str, float] = {}
    if learning_rate is None:
        found = search(prediction, optimizer, bound=bound, groups=by_group, **options)
        step, groups = found.step, dict(found.by_group)
        for note in step.warnings:
            say(note)
    else:
        step = prediction.after(optimizer, learning_rate, **options)
    if csv is not None:
        write_csv(step.to_frame(), csv)
    if plot is not None:
        write_plot(step.plot(named(model)), plot)
    if as_json:
        by = {name: rate if rate < float("inf") else None for name, rate in groups.items()}
        print(json.dumps(step.to_dict() | {"by_group": by}, indent=2, allow_nan=False))
        return
    out.print(first_step_table(step))
    for name, rate in groups.items():
        out.print(f"{name} alone: learning rate {rate:.3g}")
