"""`moments compare`: a prediction beside the real module on real input."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DomainError
from ..formulas.checks import check_count
from .base import (
    CsvOption,
    JsonOption,
    LayersOption,
    ModelArgument,
    PlotOption,
    TheoryName,
    TheoryOption,
    app,
    escaped,
    named,
    no_preset,
    out,
    write_csv,
    write_plot,
)

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..prediction.measurement import Measurement

SEQ_LEN = 128


@app.command(
    examples=(
        "compare bert-base",
        "compare config.json --seq-len 64 --seeds 8 --plot mine.pdf",
        "compare gpt2 --layers 4 --theory published --json",
        "compare bert-tiny --max-error 0.05 --quiet",
    )
)
def compare(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: Annotated[
        int | None, typer.Option(help=f"Tokens per sequence of a text; {SEQ_LEN} unless given.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences or pictures per seed.")] = 2,
    seeds: Annotated[int, typer.Option(help="Draws of the weights.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    theory: TheoryOption = TheoryName.refined,
    measured_gradient: Annotated[
        bool,
        typer.Option(
            "--measured-gradient",
            help="Start the backward pass from the gradient measured at the last layer, "
            "not from the predicted loss.",
        ),
    ] = False,
    max_error: Annotated[
        float | None,
        typer.Option(help="Exit 1 if the stream's mean forward-variance error exceeds this."),
    ] = None,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
    picture: Annotated[bool, typer.Option(help="Draw the picture.")] = True,
) -> None:
    """Predict a model, measure the real module on real input, and put both side by side.

    The module is a randomly initialised Hugging Face model built from the same config; it reads
    English text or pictures and its own loss is differentiated. Where the theory covers the head,
    loss and gradients are predicted absolutely; else the gradient measured at the last layer is
    where the prediction's backward pass starts.
    """
    from ..prediction.predict import predict as run
    from ..show.comparison import compare as put_beside
    from ..transfer.architecture import check_coverage

    if model is None:
        raise DomainError("no MODEL given: name a preset or a config.json")
    for name, value, least in (("seeds", seeds, 1), ("batch", batch, 1), ("seed", seed, 0)):
        check_count(name, value, least=least)  # before a module is built
    config = _config(model, layers)
    declared, data = _declared(config, seq_len, batch, seed)
    check_coverage(declared, theory.value)
    measurement = _measured(config, data, seeds, seed)
    given = _given(declared, data, measurement, theory.value, measured_gradient)
    prediction = run(declared, theory=theory.value, progress=True, **given)
    comparison = put_beside(prediction, measurement)
    summary = comparison.summary()
    if csv is not None:
        write_csv(comparison.to_frame(), csv)
    if plot is None and picture and not as_json:
        plot = Path(f"{Path(model).stem}-compare.png")
    if plot is not None:
        write_plot(comparison.plot(named(model)), plot)
    if as_json:
        frames = {
            "summary": summary,
            "points": comparison.points(),
            "outputs": comparison.outputs(),
            "weight_gradients": comparison.weight_gradients(),
        }
        data = {
            "format": 1,
            "prediction": json.loads(prediction.to_json()),
            "measurement": json.loads(measurement.to_json()),
            "verdict": comparison.verdict(),
            **{name: json.loads(f.to_json(orient="records")) for name, f in frames.items()},
        }
        print(json.dumps(data, indent=2))
    else:
        from ..show.report import comparison_tables, summary_table

        out.print(escaped(comparison.verdict()))
        out.print(summary_table(comparison), *comparison_tables(comparison))
        if plot is not None:
            out.print(f"picture: {plot}")
    stream = summary[(summary["points"] == "stream") & (summary["quantity"] == "variance")]
    if max_error is not None and float(stream["mean"].iloc[0]) > max_error:
        raise typer.Exit(1)


def _config(name: str, layers: int | None) -> dict[str, Any]:
    """The entries of a preset's or a file's config, at another depth where one is given."""
    from ..model.huggingface.config import read_config
    from ..model.huggingface.sizes import at_depth
    from ..model.presets import preset

    known = name in preset.names()
    if not known and not os.path.exists(name) and not name.endswith(".json"):
        raise no_preset("MODEL", name)
    entries = dict(preset.config(name)) if known else read_config(name)
    return entries if layers is None else at_depth(entries, layers)


def _declared(
    config: dict[str, Any], seq_len: int | None, batch: int, seed: int
) -> tuple[Transformer, dict[str, Any]]:
    """The declaration of a config, and what its module reads."""
    from ..model.huggingface.config import family, from_huggingface
    from ..torch.huggingface_modules import module_batch

    if family(config.get("model_type")).task == "images":
        if seq_len is not None:
            raise DomainError("--seq-len is for a model that reads text: leave it out")
    else:
        seq_len = SEQ_LEN if seq_len is None else seq_len
    data = module_batch(config, seq_len=seq_len, batch=batch, seed=seed)
    return from_huggingface(config, seq_len=seq_len), data


def _measured(config: dict[str, Any], data: Any, seeds: int, seed: int) -> Measurement:
    from ..torch.huggingface_modules import build_module
    from ..torch.measure import measure

    build = functools.partial(build_module, config)
    return measure(build, data, seeds=seeds, seed=seed, progress=True)


def _given(
    declared: Transformer,
    data: dict[str, Any],
    measurement: Measurement,
    theory: str,
    measured: bool,
) -> dict[str, Any]:
    """What `predict` is told of the input and of the gradient."""
    from ..torch.batches import inputs_of, measured_gradient

    given = inputs_of(declared, data)
    refined = theory == "refined"
    if not refined:
        given.pop("tokens", None)
    has_loss = declared.head is not None and declared.head.loss is not None
    if has_loss and refined and measurement.loss is not None and not measured:
        return given
    given.pop("targets", None)
    if refined:
        return given | measured_gradient(declared, measurement, given)
    return given | {
        "grad_variance": float(measurement.grad_variance[-1]),
        "grad_correlation": float(measurement.grad_correlation[-1]),
    }
