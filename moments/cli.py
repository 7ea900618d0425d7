"""The command `moments`: thin wrappers that parse, call the library and print."""

from __future__ import annotations

import json
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from .errors import DomainError, MomentsError, ValidityWarning

if TYPE_CHECKING:
    from .measurement import Measurement
    from .transformer import Transformer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Closed-form signal propagation in transformers at initialisation.",
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

# Tokens that a causal model is predicted at where the user names no length: the cost per layer
# grows with the cube of the length.
_TOKENS = 256

# The parser's own base error: typer exports its subclasses, from click or from a copy of it.
_ParserError: Any = typer.BadParameter.__mro__[2]


class TheoryName(StrEnum):
    refined = "refined"
    published = "published"
    simplified = "simplified"


ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A preset's name, or a path to a config.json.", show_default=False),
]
LayersOption = Annotated[int | None, typer.Option(help="Number of layers.")]
SeqLenOption = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
TheoryOption = Annotated[TheoryName, typer.Option(help="Which formulas to use.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
CsvOption = Annotated[Path | None, typer.Option("--csv", help="Write every point as CSV.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Write the picture to this file.")]


def main() -> None:
    """Entry point: bad input prints one line on standard error and exits with status 2."""
    warnings.simplefilter("always", ValidityWarning)
    warnings.showwarning = _show_warning
    try:
        status = app(standalone_mode=False)
    except MomentsError as error:
        _fail(str(error))
    except _ParserError as error:
        _fail(error.format_message())
    except typer.Abort:
        _fail("interrupted")
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> NoReturn:
    text = " ".join(message.split())
    err.print(f"[bold red]error:[/] {_plain(text)}", soft_wrap=True)
    sys.exit(2)


def _show_warning(message: Any, category: Any, *_: Any, **__: Any) -> None:
    err.print(f"[yellow]{category.__name__}:[/] {_plain(str(message))}", soft_wrap=True)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _version(requested: bool) -> None:
    if requested:
        from . import __version__

        out.print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _model(name: str | None, changes: dict[str, Any]) -> Transformer:
    """A preset or config with changes, or a model described by options alone."""
    from .huggingface import from_huggingface
    from .presets import preset
    from .transformer import Transformer

    given = {key: value for key, value in changes.items() if value is not None}
    if name is None:
        required = ("layers", "d_model", "heads", "seq_len")
        missing = [key for key in required if key not in given]
        if missing:
            flags = ", ".join("--" + key.replace("_", "-") for key in missing)
            raise DomainError(f"no MODEL given: name a preset or a config.json, or add {flags}")
        return Transformer(**given)
    seq_len = given.pop("seq_len", None)
    if name in preset.names():
        model = preset(name, seq_len=seq_len)
    elif Path(name).exists() or name.endswith(".json"):
        model = from_huggingface(name, seq_len=seq_len)
    else:
        raise DomainError(
            f"MODEL = {name!r}: neither a file nor a preset; presets: {', '.join(preset.names())}"
        )
    if "d_model" in given or "heads" in given:
        raise DomainError("--d-model and --heads describe a model of your own: leave MODEL out")
    return model.replace(**given) if given else model


@app.command()
def predict(
    model: ModelArgument = None,
    layers: LayersOption = None,
    d_model: Annotated[int | None, typer.Option(help="Width of the stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    seq_len: SeqLenOption = None,
    d_ff: Annotated[int | None, typer.Option(help="Feed-forward width.")] = None,
    norm: Annotated[str | None, typer.Option(help="pre, post or none.")] = None,
    activation: Annotated[str | None, typer.Option(help="relu, gelu, gelu_tanh, identity.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Probability of dropping.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="Causal mask.")] = None,
    variance: Annotated[float | None, typer.Option(help="Of what enters layer 1.")] = None,
    correlation: Annotated[float | None, typer.Option(help="Of its tokens.")] = None,
    grad_variance: Annotated[float | None, typer.Option(help="At the last layer.")] = None,
    grad_correlation: Annotated[float | None, typer.Option(help="At the last layer.")] = None,
    scheme: Annotated[
        str | None, typer.Option(help="A published scheme; `moments schemes` lists them.")
    ] = None,
    theory: TheoryOption = TheoryName.refined,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Predict every layer's variance, token correlation and gradient moments."""
    from .prediction import predict as run

    declared = _model(
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
    if seq_len is None and declared.causal and declared.seq_len > _TOKENS and theory == "refined":
        err.print(
            f"[yellow]note:[/] {_TOKENS} of up to {declared.seq_len} tokens, resolved one by one; "
            f"for all of them add --seq-len {declared.seq_len}",
            soft_wrap=True,
        )
        declared = declared.replace(seq_len=_TOKENS)
    if scheme is not None:
        options = {}
        if scheme == "dslm" and declared.embedding is None and correlation is not None:
            # The scheme counts from before the embedding's dropout, which lowers the correlation.
            options["input_correlation"] = min(1.0, correlation / (1 - declared.dropout))
        declared = declared.with_scheme(scheme, **options)
    prediction = run(
        declared,
        variance=variance,
        correlation=correlation,
        grad_variance=grad_variance,
        grad_correlation=grad_correlation,
        theory=theory.value,
        progress=declared.causal and declared.seq_len > 128,
    )
    if csv is not None:
        _write_csv(prediction.to_frame(), csv)
    if plot is not None:
        _write_plot(prediction.plot(), plot)
    if as_json:
        print(prediction.to_json())
        return
    from .report import prediction_table

    out.print(prediction_table(prediction))


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
    from .comparison import compare as put_beside
    from .comparison import last_gradient
    from .prediction import predict as run

    if model is None:
        raise DomainError("no MODEL given: name a preset or a config.json")
    declared = _model(model, {"layers": layers, "seq_len": seq_len})
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
        _write_csv(comparison.to_frame(), csv)
    if plot is None and picture and not as_json:
        plot = Path(f"{Path(model).stem}-compare.png")
    if plot is not None:
        _write_plot(comparison.plot(), plot)
    if as_json:
        data = {
            "prediction": json.loads(prediction.to_json()),
            "measurement": json.loads(measurement.to_json()),
            "summary": json.loads(summary.to_json(orient="records")),
        }
        print(json.dumps(data, indent=2))
    else:
        from .report import comparison_tables, summary_table

        out.print(*comparison_tables(comparison), summary_table(comparison))
        if plot is not None:
            out.print(f"picture: {plot}")
    stream = summary[(summary["points"] == "stream") & (summary["quantity"] == "variance")]
    if max_error is not None and float(stream["mean"].iloc[0]) > max_error:
        raise typer.Exit(1)


def _measure(
    name: str, layers: int | None, seq_len: int, batch: int, seeds: int, seed: int
) -> tuple[Measurement, Any]:
    from .huggingface_modules import measure_config
    from .presets import preset

    config: Any = preset.config(name) if name in preset.names() else name
    return measure_config(
        config, layers=layers, seq_len=seq_len, batch=batch, seeds=seeds, seed=seed, progress=True
    )


@app.command()
def validate(
    subset: Annotated[
        str,
        typer.Option(help="all, baselines, array, quick, or a pattern such as 'post-causal-*'."),
    ] = "all",
    theory: Annotated[
        list[TheoryName] | None,
        typer.Option(help="Which formulas; may be repeated. Left out: all.", show_default=False),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Simulate first, continuing what --data holds.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Simulations to read, or with --run to write (default: validation.json here); "
            "without it, those that come with the package.",
            show_default=False,
        ),
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="Exit 1 if the refined gradient variance of some run is off by more, as the mean "
            "|log| beyond two standard errors, or has no value."
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the whole page.")] = False,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    plot: PlotOption = None,
) -> None:
    """Hold the theories against simulations of a fixed grid of whole models."""
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from .law import THEORIES
    from .validation.errors import by_class, errors
    from .validation.grid import subset as find
    from .validation.report import class_tables, page, plot_errors
    from .validation.store import load, run_grid

    configurations = find(subset)
    theories = [t for t in THEORIES if t in {name.value for name in theory or TheoryName}]
    if max_error is not None and "refined" not in theories:
        raise DomainError("--max-error judges the refined theory: add --theory refined")
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        if run:
            work = sum(c.cost * c.seeds for c in configurations)
            simulating = bar.add_task("simulating", total=round(work))
            data = Path("validation.json") if data is None else data
            stored = run_grid(
                configurations, data, progress=lambda c: bar.advance(simulating, c.cost * c.seeds)
            )
        else:
            stored = load(data)
        predicting = bar.add_task("predicting", total=len(configurations))
        frame = errors(theories, configurations, stored, lambda c: bar.advance(predicting))
    if csv is not None:
        _write_csv(frame, csv)
    if plot is not None:
        _write_plot(plot_errors(frame), plot)
    if markdown:
        print(page(frame), end="")
    elif as_json:
        tables = {"runs": frame, "classes": by_class(frame)}
        records = {name: json.loads(t.to_json(orient="records")) for name, t in tables.items()}
        print(json.dumps(records, indent=2))
    else:
        out.print(*class_tables(frame))
    if max_error is not None:
        refined = frame.loc[frame["theory"] == "refined", "grad_beyond"]
        if not (refined <= max_error).all():
            raise typer.Exit(1)


@app.command()
def schemes(as_json: JsonOption = False) -> None:
    """List the published schemes that --scheme and `with_scheme` know."""
    from .scheme import schemes as every

    if as_json:
        rows = [
            {
                "name": scheme.name,
                "title": scheme.title,
                "sets": list(scheme.sets),
                "options": scheme.options,
                "source": str(scheme.source),
            }
            for scheme in every()
        ]
        print(json.dumps(rows, indent=2))
        return
    for scheme in every():
        options = ", ".join(f"{name}={value!r}" for name, value in scheme.options.items())
        out.print(f"[bold]{scheme.name}[/]  {_plain(scheme.title)}")
        out.print(f"  sets {', '.join(scheme.sets)}; {_plain(str(scheme.source))}")
        if options:
            out.print(f"  options: {_plain(options)}")


@app.command()
def formulas(
    component: Annotated[str | None, typer.Argument(help="A component's name.")] = None,
    theory: TheoryOption = TheoryName.refined,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the whole reference as Markdown.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a component's formulas with their sources, or list the components."""
    if markdown:
        from .formula_page import formula_page

        print(formula_page(), end="")
        return
    from .registry import component as find
    from .registry import components

    if component is None:
        names = [find(name) for name in components()]
        if as_json:
            print(json.dumps({record.name: record.title for record in names}, indent=2))
            return
        for record in names:
            out.print(f"[bold]{record.name:<26}[/]{record.title}")
        return
    record = find(component)
    laws = record.under(theory.value)  # type: ignore[arg-type]
    if as_json:
        print(json.dumps({name: _law_entry(law) for name, law in laws.items()}, indent=2))
        return
    out.print(f"[bold]{record.title}[/], theory {theory.value}")
    for quantity, law in laws.items():
        out.print(f"\n[bold]{quantity}[/]  [dim]{law.status}; {_plain(str(law.source))}[/]")
        out.print(f"  {_plain(law.latex() if latex else str(law.expr))}")
        if law.note:
            out.print(f"[dim]note: {_plain(law.note)}[/]")


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


def _write_csv(frame: Any, path: Path) -> None:
    try:
        frame.to_csv(path, index=False)
    except OSError as error:
        raise DomainError(f"cannot write {path}: {error.strerror}") from None


def _write_plot(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise DomainError(f"cannot write {path}: {error}") from None
