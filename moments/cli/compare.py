"""`moments compare`: a prediction beside the real module on real input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DomainError
from .base import (
    CsvOption,
    JsonOption,
    LayersOption,
    ModelArgument,
    PlotOption,
    TheoryName,
    TheoryOption,
    app,
    declared_model,
    out,
    write_csv,
    write_plot,
)

if TYPE_CHECKING:
    from ..measurement import Measurement


@app.command()
def compare(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences per seed.")] = 2,
    seeds: Annotated[int, typer.Option(help="Draws of the weights.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    theory: TheoryOption = TheoryName.refined,
    max_error: Annotated[
        float | None,
        typer.Option(help="Exit 1 if the stream's mean forward-variance error exceeds this."),
    ] = None,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
    picture: Annotated[bool, typer.Option(help="Draw the picture.")] = True,
) -> None:
    """Predict a model, measure the real module on real text, and put both side by side.

    The module is a randomly initialised Hugging Face model built from the same config; the gradient
    measured at its last layer is where the prediction's backward pass starts.
    """
    from ..comparison import compare as put_beside
    from ..comparison import last_gradient
    from ..passes import predict as run

    if model is None:
        raise DomainError("no MODEL given: name a preset or a config.json")
    declared = declared_model(model, {"layers": layers, "seq_len": seq_len})
    measurement, ids = _measure(model, layers, seq_len, batch, seeds, seed)
    entering: dict[str, Any] = {"grad_kernel": last_gradient(measurement)}
    if theory is not TheoryName.refined:
        entering = {
            "grad_variance": float(measurement.grad_variance[-1]),
            "grad_correlation": float(measurement.grad_correlation[-1]),
        }
    prediction = run(declared, token_ids=ids, theory=theory.value, progress=True, **entering)
    comparison = put_beside(prediction, measurement)
    summary = comparison.summary()
    if csv is not None:
        write_csv(comparison.to_frame(), csv)
    if plot is None and picture and not as_json:
        plot = Path(f"{Path(model).stem}-compare.png")
    if plot is not None:
        write_plot(comparison.plot(), plot)
    if as_json:
        data = {
            "prediction": json.loads(prediction.to_json()),
            "measurement": json.loads(measurement.to_json()),
            "summary": json.loads(summary.to_json(orient="records")),
        }
        print(json.dumps(data, indent=2))
    else:
        from ..report import comparison_tables, summary_table

        out.print(*comparison_tables(comparison), summary_table(comparison))
        if plot is not None:
            out.print(f"picture: {plot}")
    stream = summary[(summary["points"] == "stream") & (summary["quantity"] == "variance")]
    if max_error is not None and float(stream["mean"].iloc[0]) > max_error:
        raise typer.Exit(1)


def _measure(
    name: str, layers: int | None, seq_len: int, batch: int, seeds: int, seed: int
) -> tuple[Measurement, Any]:
    from ..huggingface_modules import measure_config
    from ..presets import preset

    config: Any = preset.config(name) if name in preset.names() else name
    return measure_config(
        config, layers=layers, seq_len=seq_len, batch=batch, seeds=seeds, seed=seed, progress=True
    )
