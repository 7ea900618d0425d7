"""`moments report` and `moments explore`: one model as a static or an interactive page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import DomainError
from .base import (
    PREDICT,
    Answer,
    InputCorrelation,
    InputVariance,
    LayersOption,
    ModelArgument,
    SeqLenOption,
    SomeSchemes,
    check_writable,
    command,
    model_and_inputs,
    name_of,
    progress_steps,
    read_model,
    shortened,
)

if TYPE_CHECKING:
    from ..model.transformer import Transformer


@command(
    PREDICT,
    "report bert-base -o bert.html",
    "report config.json --seq-len 256 -o mine.html",
    "report gpt2 --scheme dslm --scheme admin -o two.html",
    "report gpt2 --no-schemes -o quick.html",
    csv=False,
    plot=False,
)
def report(
    model: ModelArgument = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="The .html file to write.", callback=check_writable),
    ] = Path("report.html"),
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    variance: InputVariance = None,
    correlation: InputCorrelation = None,
    scheme: SomeSchemes = None,
    schemes: Annotated[bool, typer.Option(help="Show the model under published schemes.")] = True,
) -> Answer:
    """Write one self-contained page about a model: growth, gradients, schemes, what to cite.

    The page needs no network, follows the reader's light or dark setting, and prints.
    """
    from ..scheme import schemes as every
    from ..show.page import check_html
    from ..show.page import report as make
    from ..show.verdict import growth

    check_html(output)
    if scheme and not schemes:
        raise DomainError("--scheme and --no-schemes contradict each other: pass one of them")
    described, inputs = model_and_inputs(model, layers, seq_len, variance, correlation)
    names = (scheme or [one.name for one in every()]) if schemes else []
    with progress_steps("applying schemes", len(names)) as advance:
        found = make(
            described,
            name=name_of(model),
            schemes=names,
            step=lambda name: advance(1, name),
            **inputs,
        )
    found.save(output)
    verdict = growth(found.prediction)
    return Answer(
        text=lambda: f"{verdict}\npage: {output}",
        data=lambda: {
            "format": 1,
            "page": str(output),
            "model": described.to_dict(),
            "verdict": verdict,
            "warnings": list(found.prediction.warnings),
            "schemes": [] if found.schemes is None else list(found.schemes.predictions),
        },
    )


@command(
    PREDICT,
    "explore",
    "explore bert-base",
    "explore config.json --port 8000 --no-browser",
    json=False,
    csv=False,
    plot=False,
)
def explore(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Port of the page; default: the first free one from 8866.", min=1, max=65535
        ),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """Change depth, width, scales, norm placement and scheme by hand, on a page in your browser.

    This is the app of `moments.explore`, served by Voilà (extra `notebook`). Ctrl-C ends it.
    """
    import tempfile

    from ..show.explorer import serve

    cell = explorer_code(model, layers, seq_len)
    with tempfile.TemporaryDirectory() as folder:
        serve(cell, Path(folder), port, browser)


def explorer_code(
    model: str | None = None, layers: int | None = None, seq_len: int | None = None
) -> str:
    """Python code that shows the model of the MODEL argument with controls."""
    if model is None:
        if layers is not None or seq_len is not None:
            raise DomainError("--layers and --seq-len change a MODEL: pass one")
        return "import moments\nmoments.explore()"
    described, _ = read_model(model, {"layers": layers, "seq_len": seq_len})
    made = _python(model, layers, shortened(described, seq_len))
    return f"import moments\nmoments.explore({made}, {name_of(model)!r}, {made!r})"


def _python(model: str, layers: int | None, described: Transformer) -> str:
    """A Python expression for the model of a MODEL argument, valid in any folder."""
    from ..model.huggingface.config import read_config
    from ..model.presets import preset

    if model in preset.names():
        made = f"moments.preset({model!r}, seq_len={described.seq_len})"
    elif not model.endswith(".toml") and "model_type" in read_config(model):
        path = str(Path(model).resolve())
        made = f"moments.from_huggingface({path!r}, seq_len={described.seq_len})"
    else:
        return f"moments.Transformer.from_dict({described.to_dict()!r})"
    return made if layers is None else f"{made}.replace(layers={layers})"
