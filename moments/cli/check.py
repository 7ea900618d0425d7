"""Models compared with what they should be: `moments check`, `audit` and `compare`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DomainError, MomentsError, Undeclared, brief, domain_error, refused
from ..files import read_object, replacing
from ..formulas.checks import check_count
from .base import (
    CHECK,
    Answer,
    CsvOption,
    JsonOption,
    LayersOption,
    ModelArgument,
    OneScheme,
    PlotOption,
    SchemeOption,
    SeqLenOption,
    check_writable,
    command,
    complete_scheme,
    name_of,
    read_model,
    scheme_options,
    shortened,
    stored_model,
    unknown_model,
    write_plot,
)

if TYPE_CHECKING:
    from ..show.findings import Report

WholeOption = Annotated[
    bool, typer.Option("--all", help="Print every finding, note and number, not one screen.")
]

# --- audit ----------------------------------------------------------------------------------------


@command(
    CHECK,
    "audit checkpoint/",
    "audit checkpoint/ --scheme dslm",
    "audit train.py:build --scheme scaled-init",
    "audit model.safetensors --plan plan.json --csv tensors.csv",
    "audit bert-tiny --seed 3",
)
def audit(
    module: Annotated[
        str,
        typer.Argument(
            help="FILE.py:NAME, where NAME is a module or a function that returns one (or a module "
            "and a batch); or a checkpoint: a folder, or a .safetensors file with config.json next "
            "to it; or a preset or config.json, whose module is then newly initialised.",
            show_default=False,
        ),
    ],
    scheme: OneScheme = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan or model as JSON, as `moments solve --json` prints it."),
    ] = None,
    layers: LayersOption = None,
    option: SchemeOption = None,
    seed: Annotated[int, typer.Option(help="Seed of a newly initialised module.")] = 0,
    whole: WholeOption = False,
) -> Answer:
    """Check a module's weights, gains and residual multipliers against a scheme or plan.

    This is `moments check` without loss and prediction. Without --scheme and --plan, the module is
    compared with the initialisation that its config promises. Exit status 1 if the audit fails.
    """
    from ..scheme.registry import scheme as known
    from ..torch import audit as run

    options = scheme_options(option)
    wanted = _intended(scheme, plan)  # first: building a module may take minutes
    if options and scheme is None:
        raise DomainError("--option sets an option of a scheme: add --scheme")
    if scheme is not None:
        known(scheme)
    target, batch = _module(module, layers, seed)
    with user_code(module):
        report = run(target, wanted, batch=batch, options=options or None)
    return _answer(report, whole)


def _answer(report: Report, whole: bool, precision: str | None = None) -> Answer:
    lost = None if precision is None else report.breaks_first(precision)
    return Answer(
        text=lambda: "\n".join(filter(None, (report.text(whole=whole), lost))),
        data=lambda: json.loads(report.to_json()) | ({} if lost is None else {"precision": lost}),
        frame=report.to_frame,
        figure=report.plot,
        passed=report.healthy,
    )


def _module(name: str, layers: int | None, seed: int) -> tuple[Any, Any]:
    """The module that MODULE names, and its batch, if it comes with one."""
    from ..model.presets import preset
    from ..torch.checkpoints import load
    from ..torch.huggingface_modules import build_module

    found = _user_module("MODULE", name)
    if found is not None:
        if layers is not None:
            raise DomainError("--layers is only for a preset or a config.json: leave it out")
        module, batch = found
        return load(module) if isinstance(module, str) else module, batch
    if name in preset.names():
        return build_module(preset.config(name), seed, layers=layers), None
    if os.path.exists(name):
        return build_module(name, seed, layers=layers), None
    raise unknown_model("MODULE", name, "FILE.py:NAME, a checkpoint, a config nor a preset")


def _intended(scheme: str | None, plan: Path | None) -> Any:
    """The scheme's name or the model of the plan's file; None without both."""
    if plan is None:
        return scheme
    if scheme is not None:
        raise DomainError("--scheme and --plan both define what is intended: pass one of them")
    entries = read_object(plan, "--plan", "a plan or model as JSON")
    try:
        return stored_model(entries)[0]
    except DomainError as error:
        raise DomainError(f"--plan {plan}: not a plan or model: {error}") from None


# --- check ----------------------------------------------------------------------------------------


@command(
    CHECK,
    "check train.py:build",
    "check config.json --seq-len 256",
    "check checkpoint/ --scheme dslm --html health.html",
    "check bert-base --json --quiet",
    "check config.json --measured variance@24=20",
)
def check(
    subject: Annotated[
        str,
        typer.Argument(
            help="FILE.py:NAME, where NAME is a module or a function that returns one (or a module "
            "and a batch); or a checkpoint's folder, a config.json or a preset.",
            show_default=False,
        ),
    ],
    scheme: Annotated[
        str | None,
        typer.Option(
            help="The intended initialisation; `moments schemes` lists the schemes.",
            autocompletion=complete_scheme,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="The intended initialisation: a plan or model, as `moments solve --json` prints."
        ),
    ] = None,
    seq_len: SeqLenOption = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report to this .html file.", callback=check_writable),
    ] = None,
    measured: Annotated[
        list[str] | None,
        typer.Option(
            help="A number that you measured, such as variance@24=20 (variance of the residual "
            "stream after layer 24): is it expected, and what would explain it? May be repeated.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Also say which operand of a matrix product loses most under this format: fp8, "
            "fp8-row, mxfp8 or nvfp4."
        ),
    ] = None,
    whole: WholeOption = False,
) -> Answer:
    """Check a model before it is trained: its scheme, growth, gradients, first loss, number range.

    A config is judged by its predictions. Exit status 1 if there are findings, 2 if the model
    cannot be read.
    """
    from ..show.expects import measurements
    from ..show.page import check_html

    if html is not None:
        check_html(html)
    given = measurements(measured or (), "--measured")
    report = _check_subject(subject, _intended(scheme, plan), seq_len)
    report = report.with_measured(given) if given else report
    if html is not None:
        with replacing(html) as partial:
            Path(partial).write_text(report.to_html(), encoding="utf-8")
    return _answer(report, whole, precision)


def _check_subject(subject: str, plan: Any, seq_len: int | None) -> Report:
    import moments

    found = _user_module("SUBJECT", subject)
    if found is None:
        known = subject.endswith(".json") or subject in moments.preset.names()
        if not (known or os.path.exists(subject)):
            raise unknown_model("SUBJECT", subject, "FILE.py:NAME, a file nor a preset")
        try:
            model, _ = read_model(subject, {"seq_len": seq_len})
        except Undeclared:
            if seq_len is not None or plan is not None:
                raise
            return moments.check(subject)
        from ..show.health import check_declared

        return check_declared(shortened(model, seq_len), subject, scheme=plan)
    if seq_len is not None:
        raise DomainError("--seq-len is only for a config or preset: a module reads its own batch")
    with user_code(subject):
        return moments.check(*found, plan=plan)


@contextlib.contextmanager
def user_code(subject: str) -> Iterator[None]:
    """Run a user's module: its prints go to standard error, its exceptions become one line."""
    file, _, name = subject.rpartition(":")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except MomentsError as error:
        why = str(error).splitlines()[0]
        plan = "pass a plan, a Transformer or a scheme's name"
        why = why.replace(plan, "pass --scheme or --plan")
        if file.endswith(".py"):
            why = why.replace("pass batch=", f"let {name}() return (module, batch)")
        kind = DomainError if isinstance(error, DomainError) else MomentsError
        raise kind(f"{subject} cannot be checked: {why}") from None
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if Path(__file__).parent.parent in Path(frame.f_code.co_filename).parents:
            raise
        said = " ".join(str(error).split())[:300]
        raise DomainError(
            f"{subject} cannot be checked: running it raised {type(error).__name__}: {said}"
        ) from error


PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


def _user_module(argument: str, name: str) -> tuple[Any, Any] | None:
    """The module of FILE.py:NAME and its batch, or a checkpoint's path; None for other names.
    DomainError for a pickle, which may run code when it is read, or for FILE.py alone."""
    path, (file, colon, inside) = Path(name), name.rpartition(":")
    if path.suffix in PICKLES:
        raise DomainError(
            f"{argument} = {brief(name)}: a pickle may run code when it is read: pass "
            "model.safetensors with its config.json next to it, or load it in a file of your own "
            "and pass FILE.py:NAME"
        )
    if colon and file.endswith(".py"):
        return load_user_module(file, inside, argument)
    if path.suffix == ".py":
        raise DomainError(f"{argument} = {brief(name)}: which object of the file? pass {name}:NAME")
    folder = path.is_dir() and any(path.glob("*.safetensors"))
    return (name, None) if folder or path.suffix == ".safetensors" else None


def load_user_module(file: str, name: str, argument: str) -> tuple[Any, Any]:
    """Load FILE.py and return its module `name`, and the batch, if it comes with one."""
    from ..show.health import is_factory
    from ..torch.factory import constructed as call_factory

    path = Path(file)
    if not path.is_file():
        raise DomainError(f"{argument}: there is no file {brief(file)}")
    with refused(file), contextlib.redirect_stdout(sys.stderr):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, loaded)
        sys.path.insert(0, str(path.parent.resolve()))
        spec.loader.exec_module(loaded)
        if not hasattr(loaded, name):
            raise DomainError(f"{file} does not define {brief(name)}")
        found = getattr(loaded, name)
        if is_factory(found):
            module, batch = call_factory(found)
            found = module if batch is None else (module, batch)
    module, batch = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    readable = batch is None or isinstance(batch, Mapping | list) or hasattr(batch, "shape")
    if isinstance(module, tuple) or not readable:
        raise domain_error(
            f"{argument}: result of {file}:{name}",
            tuple(type(one).__name__ for one in found),
            "a module or (module, batch), where a batch is an array, a tensor or a mapping of them",
        )
    return module, batch


# --- compare --------------------------------------------------------------------------------------

SEQ_LEN = 128


@command(
    CHECK,
    "compare bert-base",
    "compare config.json --seq-len 64 --seeds 8 --plot mine.pdf",
    "compare gpt2 --layers 4 --json",
    "compare bert-tiny --max-error 0.05 --quiet",
    json=False,
    csv=False,
    plot=False,
)
def compare(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: Annotated[
        int | None, typer.Option(help=f"Tokens per sequence, for text models; default {SEQ_LEN}.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences or pictures per seed.")] = 2,
    seeds: Annotated[int, typer.Option(help="Draws of the weights.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    max_error: Annotated[
        float | None,
        typer.Option(help="Exit status 1 if the variance's mean relative error exceeds this."),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    picture: Annotated[bool, typer.Option(help="Draw the picture.")] = True,
    whole: WholeOption = False,
    csv: CsvOption = None,
) -> None:
    """Predict a model, measure the real module on real input, and show both side by side.

    The module is a randomly initialised Hugging Face model built from the same config. It reads
    English text or pictures, and its own loss is differentiated. If the theory covers the head,
    loss and gradients are predicted from it; otherwise the prediction's backward pass starts from
    the gradient measured at the last layer.
    """
    from ..layers.architecture import check_coverage
    from ..model.huggingface.config import family, from_huggingface
    from ..prediction.predict import predict as run
    from ..show.comparison import compare as compare_results
    from ..show.report import comparison_screen, comparison_tables, summary_table

    if model is None:
        raise DomainError("no MODEL given: name a preset or a config.json")
    for name, value, least in (("seeds", seeds, 1), ("batch", batch, 1), ("seed", seed, 0)):
        check_count(name, value, least=least)  # before a module is built
    config = _config_entries(model, layers)
    if family(config.get("model_type")).task != "images":
        seq_len = SEQ_LEN if seq_len is None else seq_len
    elif seq_len is not None:
        raise DomainError("--seq-len is only for models that read text: leave it out")
    from ..torch.batches import inputs_of, measured_gradient
    from ..torch.huggingface_modules import build_module, module_batch
    from ..torch.measure import measure

    read = module_batch(config, seq_len=seq_len, batch=batch, seed=seed)
    described = from_huggingface(config, seq_len=seq_len)
    check_coverage(described, "refined")
    build = functools.partial(build_module, config)
    measurement = measure(build, read, seeds=seeds, seed=seed, progress=True)
    inputs = inputs_of(described, read)
    if described.head is None or described.head.loss is None or measurement.loss is None:
        inputs.pop("targets", None)
        inputs |= measured_gradient(described, measurement, inputs)
    prediction = run(described, progress=True, **inputs)
    comparison = compare_results(prediction, measurement)
    summary = comparison.summary()
    if plot is None and picture and not as_json:
        plot = Path(f"{Path(model).stem}-compare.png")
    if plot is not None:
        write_plot(comparison.plot(name_of(model)), plot)

    def text() -> str:
        drawn = [] if plot is None else [f"picture: {plot}"]
        if whole:
            tables = (summary_table(comparison), *comparison_tables(comparison))
            return "\n\n".join([comparison.verdict(), *tables, *drawn])
        return "\n".join([comparison_screen(comparison, name_of(model)), *drawn])

    def data() -> dict[str, Any]:
        return {
            "format": 1,
            "prediction": json.loads(prediction.to_json()),
            "measurement": json.loads(measurement.to_json()),
            "verdict": comparison.verdict(),
            "summary": summary,
            "points": comparison.points(),
            "outputs": comparison.outputs(),
            "weight_gradients": comparison.weight_gradients(),
        }

    stream = summary[(summary["points"] == "stream") & (summary["quantity"] == "variance")]
    passed = max_error is None or float(stream["mean"].iloc[0]) <= max_error
    Answer(text=text, data=data, frame=comparison.to_frame, passed=passed).show(as_json, csv)


def _config_entries(name: str, layers: int | None) -> dict[str, Any]:
    """Config entries of a preset or file, with another depth if `layers` is given."""
    from ..model.huggingface.config import read_config
    from ..model.huggingface.sizes import at_depth
    from ..model.presets import preset

    known = name in preset.names()
    if name.endswith(".toml"):
        raise DomainError(
            f"MODEL = {name}: compare measures the module of a preset or a config.json; for one "
            "of your own use moments.torch.measure and moments.compare in Python"
        )
    if not known and not os.path.exists(name) and not name.endswith(".json"):
        raise unknown_model("MODEL", name)
    entries = dict(preset.config(name)) if known else read_config(name)
    return entries if layers is None else at_depth(entries, layers)
