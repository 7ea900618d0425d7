"""`moments predict`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import DomainError
from .base import (
    CsvOption,
    JsonOption,
    LayersOption,
    ModelArgument,
    OneScheme,
    PlotOption,
    SchemeOption,
    SeqLenOption,
    TheoryName,
    TheoryOption,
    app,
    declared,
    err,
    named,
    out,
    pictures,
    scheme_options,
    shortened,
    write_csv,
    write_plot,
)


@app.command(
    examples=(
        "predict bert-base",
        "predict config.json --seq-len 256 --plot growth.svg",
        "predict gpt2 --layers 48 --scheme dslm --json > deep.json",
        "predict --layers 24 --d-model 512 --heads 8 --seq-len 128 --norm post --correlation 0.2",
        "predict bert-base --theory published --csv points.csv",
    )
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
    variance: Annotated[float | None, typer.Option(help="Of what enters layer 1.")] = None,
    correlation: Annotated[float | None, typer.Option(help="Of its tokens.")] = None,
    grad_variance: Annotated[float | None, typer.Option(help="At the last layer.")] = None,
    grad_correlation: Annotated[float | None, typer.Option(help="At the last layer.")] = None,
    scheme: OneScheme = None,
    option: SchemeOption = None,
    theory: TheoryOption = TheoryName.refined,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Predict every layer's variance, token correlation and gradient moments."""
    from ..prediction.predict import predict as run

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
    if scheme is None and option:
        raise DomainError("--option is of a scheme: add --scheme")
    if scheme is not None:
        options = scheme_options(option)
        if scheme == "dslm" and described.embedding is None and correlation is not None:
            # The scheme counts from before the embedding's dropout, which lowers the correlation.
            before = min(1.0, correlation / (1 - described.dropout))
            options.setdefault("input_correlation", before)
        described = described.with_scheme(scheme, **options)
    given = {
        "variance": variance,
        "correlation": correlation,
        "grad_variance": grad_variance,
        "grad_correlation": grad_correlation,
    }
    inputs = known | {name: value for name, value in given.items() if value is not None}
    if not known:
        inputs["pixels"] = pictures(described, variance, correlation)
    progress = err.is_terminal and described.causal and described.seq_len > 128
    prediction = run(described, theory=theory.value, progress=progress, **inputs)
    if csv is not None:
        write_csv(prediction.to_frame(), csv)
    if plot is not None:
        write_plot(prediction.plot(named(model)), plot)
    if as_json:
        print(prediction.to_json())
        return
    from ..show.report import prediction_table

    out.print(prediction_table(prediction))
