"""The frame of the command line: the application, shared options, answers, errors and files."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from ..errors import DomainError, MomentsError, ValidityWarning, brief, domain_error
from ..files import parse_json, plain, read_toml, replacing

if TYPE_CHECKING:
    from ..model.transformer import Transformer


PREDICT, INITIALISE, CHECK, REFERENCE = "Predict", "Initialise", "Check", "Reference"
"""Panels of the help text."""


class _Group(TyperGroup):
    """A command group whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _untyped(command.get_params(ctx))
        return command


def _untyped(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Closed-form signal propagation in transformers at initialisation.",
    epilog="Start with `moments predict bert-base` or `moments check config.json`; "
    "`moments COMMAND --help` has examples to copy.",
)
err = Console(stderr=True, highlight=False)


class TheoryName(StrEnum):
    refined = "refined"
    published = "published"
    simplified = "simplified"


def _complete_model(incomplete: str) -> list[str]:
    """Shell completions for MODEL: presets, and files that may contain a model."""
    from ..model.presets import preset

    files = [str(path) for path in Path().glob("*") if path.suffix in (".json", ".toml")]
    return [name for name in (*preset.names(), *files) if name.startswith(incomplete)]


def complete_scheme(incomplete: str) -> list[tuple[str, str]]:
    from ..scheme import schemes

    return [(s.name, s.title) for s in schemes() if s.name.startswith(incomplete)]


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="A preset, a config.json, or a model file of your own (JSON or TOML).",
        show_default=False,
        autocompletion=_complete_model,
    ),
]
OneScheme = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        help="A published scheme to apply; `moments schemes` lists them.",
        autocompletion=complete_scheme,
    ),
]
SomeSchemes = Annotated[
    list[str] | None,
    typer.Option(
        "--scheme",
        help="A scheme to include; may be repeated. Default: all.",
        show_default=False,
        autocompletion=complete_scheme,
    ),
]
LayersOption = Annotated[int | None, typer.Option(help="Number of layers.")]
SeqLenOption = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
SchemeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="An option of the scheme as NAME=VALUE, such as per_head=false (`moments schemes` "
        "lists them); may be repeated.",
        show_default=False,
    ),
]
TheoryOption = Annotated[
    TheoryName,
    typer.Option(
        help="Formulas to use: refined is this package's own theory, published and simplified are "
        "those of the founding papers."
    ),
]
InputVariance = Annotated[
    float | None, typer.Option("--variance", help="Variance of the input of layer 1.")
]
InputCorrelation = Annotated[
    float | None,
    typer.Option("--correlation", help="Correlation of two tokens at the input of layer 1."),
]


def _silence(context: typer.Context, quiet: bool) -> bool:
    """Discard standard error while the command runs; `main` prints errors afterwards."""
    if quiet:
        context.with_resource(contextlib.redirect_stderr(io.StringIO()))
    return quiet


QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        callback=_silence,
        help="Do not print notes, warnings or progress.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def check_writable(path: Path | None, parameter: typer.CallbackParam) -> Path | None:
    """Refuse a path that cannot be written before the computation whose result would be lost."""
    if path is not None:
        option = f"--{parameter.name}"
        if not path.name:
            raise DomainError(f"{option}: cannot write {str(path)!r}: not the name of a file")
        if os.path.isdir(path):
            raise DomainError(f"{option}: cannot write {path}: it is a folder")
        if not os.path.isdir(path.parent):
            raise DomainError(f"{option}: cannot write {path}: there is no folder {path.parent}")
        if option == "--plot":
            from ..show.plot import check_ending

            check_ending(path)
    return path


CsvOption = Annotated[
    Path | None,
    typer.Option("--csv", help="Write the rows to this file, as CSV.", callback=check_writable),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        help="Write the picture to this file: .png, .svg or .pdf.",
        callback=check_writable,
    ),
]


# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """Result of a command; each form is computed only if it is requested.

    Attributes:
        text: returns what is printed.
        data, frame, figure: return what --json, --csv and --plot write.
        passed: whether the check passed; if not, the exit status is 1.
    """

    text: Callable[[], str]
    data: Callable[[], Any]
    frame: Callable[[], Any] = dict
    figure: Callable[[], Any] = dict
    passed: bool = True

    def show(
        self, as_json: bool = False, csv: Path | None = None, plot: Path | None = None
    ) -> None:
        """Write and print the requested forms; raise typer.Exit if it did not pass."""
        if csv is not None:
            with replacing(csv) as partial:
                self.frame().to_csv(partial, index=False)
        if plot is not None:
            write_plot(self.figure(), plot)
        if as_json:
            data = self.data()
            text = isinstance(data, str)
            print(data if text else json.dumps(data, indent=2, allow_nan=False, default=_records))
        else:
            print(printable(self.text()))
        if not self.passed:
            raise typer.Exit(1)


def command(
    panel: str | None,
    *examples: str,
    name: str | None = None,
    json: bool = True,
    csv: bool = True,
    plot: bool = True,
) -> Callable[[Callable[..., Answer | None]], Callable[..., Answer | None]]:
    """Register a command that returns an `Answer`, with --json, --csv, --plot and --quiet.

    Args:
        panel: panel of the help; None: the command is not listed.
        examples: command lines, without the leading "moments".
        name: of the command; None: that of the function.
        json, csv, plot: whether the command has that option.
    """
    shown: dict[str, Any] = {"as_json": (JsonOption, False)} if json else {}
    shown |= {"csv": (CsvOption, None)} if csv else {}
    shown |= {"plot": (PlotOption, None)} if plot else {}
    more = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=of)
        for n, (of, default) in (shown | {"quiet": (QuietOption, False)}).items()
    ]

    def registered(function: Callable[..., Answer | None]) -> Callable[..., Answer | None]:
        signature = inspect.signature(function, eval_str=True)
        signature = signature.replace(parameters=[*signature.parameters.values(), *more])

        @functools.wraps(function)
        def run(quiet: bool, **given: Any) -> None:
            chosen = {name: given.pop(name) for name in shown}
            answer = function(**given)
            if answer is not None:
                answer.show(**chosen)

        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        lines = ["Examples:", *(f"    moments {line}" for line in examples)]
        app.command(name, rich_help_panel=panel, hidden=panel is None, epilog="\n\n".join(lines))(
            run
        )
        return function

    return registered


def _records(frame: Any) -> list[dict[str, Any]]:
    return [plain(row) for row in frame.to_dict("records")]


# Base class of the parser's errors: typer exports only subclasses, of click or its own copy.
_ParserError: Any = typer.BadParameter.__mro__[2]


def main() -> None:
    """Entry point; bad input prints one line on standard error and exits with status 2."""
    warnings.simplefilter("always", ValidityWarning)
    warnings.showwarning = _show_warning
    try:
        status = app(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # so that a full disk is reported below
    except MomentsError as error:
        _fail(str(error))
    except _ParserError as error:
        if not error.format_message():
            sys.exit(2)  # no command: the help has been printed
        _fail(_with_advice(error.format_message()))
    except typer.Abort:
        _fail("interrupted")
    except MemoryError as error:
        _fail(f"out of memory: {error}; use fewer tokens, layers or sequences")
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # torch has no exception class for this
            raise
        _fail("out of memory: the module does not fit; use fewer layers")
    except OSError as error:
        _discard_output()
        if isinstance(error, BrokenPipeError):
            sys.exit(0)  # the reader closed the pipe
        named = "" if error.filename is None else f"read or write {error.filename}"
        _fail(f"cannot {named or 'write the answer'}: {error.strerror or error}")
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _discard_output()  # rich raises SystemExit for a closed pipe
        sys.exit(0)
    sys.exit(status if isinstance(status, int) else 0)


def _discard_output() -> None:
    """Discard what Python flushes to standard output at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_advice(said: str) -> str:
    """A parser error; if an option was given as an argument, with how to write it."""
    if not said.startswith("Got unexpected extra argument"):
        return said
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    return (
        f"{said}: everything after MODEL is an option, such as --scheme NAME or --layers 12; "
        f"`moments {command} --help` has examples to copy"
    )


def _fail(message: str) -> NoReturn:
    with contextlib.suppress(OSError):
        note(message, "error", "bold red")
    sys.exit(2)


def _show_warning(message: Any, category: Any, *_: Any, **__: Any) -> None:
    note(str(message), category.__name__)


def note(text: str, kind: str = "note", style: str = "yellow") -> None:
    """Print a note to standard error."""
    err.print(f"[{style}]{kind}:[/] {_one_line(text)}", soft_wrap=True)


def _one_line(text: str) -> str:
    """Join a text to one printable line, cutting very long words and lines in the middle."""
    words = (word if len(word) <= 240 else f"{word[:120]}...{word[-40:]}" for word in text.split())
    line = printable(" ".join(words))
    return escape(line if len(line) <= 2400 else f"{line[:2000]} ... {line[-300:]}")


def printable(text: str) -> str:
    """Replace control characters in a text."""
    return "".join(c if c.isprintable() or c in "\n\t" else REPLACED for c in text)


@contextmanager
def progress_steps(title: str, total: float) -> Iterator[Callable[..., None]]:
    """Show progress on standard error: a bar in a terminal, else a line per tenth of the work.
    Yields a function to call with the work of a finished step and the name of the next."""
    from ..prediction.predict import progress_bar

    if not total:
        yield lambda *_: None
        return
    if err.is_terminal:
        with progress_bar(title, round(total)) as moved:
            yield moved
        return
    begun, done, tenths = time.monotonic(), 0.0, 0

    def advance(work: float, doing: str = "") -> None:
        nonlocal done, tenths
        done += work
        reached = int(10 * done / total) if total else 10
        if reached > tenths:
            tenths = reached
            seconds = time.monotonic() - begun
            left = f", about {seconds * (total / done - 1):.0f} s left" if done < total else ""
            note(f"{title}: {10 * reached} % after {seconds:.0f} s{left}")

    note(f"{title} ...")
    yield advance


REPLACED = "\N{REPLACEMENT CHARACTER}"
"""Printed in place of a control character."""


def _version(requested: bool) -> None:
    if requested:
        from .. import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of `moments` itself."""


def read_model(name: str | None, changes: dict[str, Any]) -> tuple[Transformer, dict[str, Any]]:
    """The model that MODEL and options declare, and the arguments of `predict` for its input.

    MODEL is a preset, a config, a model file, or a plan of `solve`, which contains the input of the
    solution. Without MODEL the options alone declare the model.
    """
    from ..model.presets import preset
    from ..model.transformer import Transformer

    given = not_none(**changes)
    if name is None:
        required = ("layers", "d_model", "heads", "seq_len")
        missing = [key for key in required if key not in given]
        if missing:
            flags = ", ".join("--" + key.replace("_", "-") for key in missing)
            alternative = f", or add {flags}" if set(required) <= set(changes) else ""
            raise DomainError(f"no MODEL given: name a preset or a config.json{alternative}")
        return Transformer(**given), {}
    seq_len = given.pop("seq_len", None)
    inputs: dict[str, Any] = {}
    if name in preset.names():
        model = preset(name, seq_len=seq_len)
    elif os.path.exists(name) or name.endswith((".json", ".toml")):
        model, inputs = _from_file(name, seq_len)
    else:
        raise unknown_model("MODEL", name)
    if "d_model" in given or "heads" in given:
        raise DomainError("--d-model and --heads declare a model without MODEL: leave MODEL out")
    return model.replace(**given) if given else model, inputs


def not_none(**options: Any) -> dict[str, Any]:
    """The options that were passed."""
    return {name: value for name, value in options.items() if value is not None}


def unknown_model(argument: str, name: str, expected: str = "a file nor a preset") -> DomainError:
    """The error for an unknown name: it lists the nearest presets, else all of them."""
    from difflib import get_close_matches

    from ..model.presets import preset

    near = get_close_matches(name[:100], preset.names(), cutoff=0.7)
    remedy = f"did you mean {' or '.join(near)}?" if near else ""
    if not remedy and ".py" in name and "FILE.py" not in expected:
        remedy = "`moments check` and `moments audit` take your own module, as FILE.py:NAME"
    remedy = remedy or f"presets: {', '.join(preset.names())}"
    return DomainError(f"{argument} = {brief(name)}: neither {expected}; {remedy}")


def _from_file(name: str, seq_len: int | None) -> tuple[Transformer, dict[str, Any]]:
    """Read a model file: a Hugging Face config, a stored Transformer or plan, or TOML."""
    if name.endswith(".toml"):
        found = _from_toml(name)
        return found if seq_len is None else found.replace(seq_len=seq_len), {}
    from .. import from_huggingface
    from ..model.huggingface.config import read_config
    from ..model.transformer import FORMAT_VERSION

    entries = read_config(name)
    is_model = "model" in entries or entries.get("format") == FORMAT_VERSION
    if "model_type" in entries or not is_model:
        return from_huggingface(entries, seq_len=seq_len), {}
    model, inputs = stored_model(entries)
    return model if seq_len is None else model.replace(seq_len=seq_len), inputs


def _from_toml(name: str) -> Transformer:
    """The model of a TOML file: fields of a Transformer.

    `preset` names the model that the fields change; the table [scheme] has the `name` of a scheme
    and its options.
    """
    from ..model.presets import preset
    from ..model.transformer import FORMAT_VERSION, Transformer

    entries = read_toml(name, "MODEL")
    scheme = entries.pop("scheme", {})
    scheme = dict(scheme) if isinstance(scheme, dict) else {"name": scheme}
    base = entries.pop("preset", None)
    start = {"format": FORMAT_VERSION} if base is None else preset(base).to_dict()
    model = Transformer.from_dict({**start, **entries})
    if not scheme:
        return model
    return model.with_scheme(scheme.pop("name", None), **scheme)


def stored_model(entries: dict[str, Any]) -> tuple[Transformer, dict[str, Any]]:
    """The model of a plan, of an object with an entry "model", or of a stored model itself, and the
    input that a plan was solved for."""
    from ..model.transformer import Transformer
    from ..solver.plan import Plan

    if "objective" not in entries:
        return Transformer.from_dict(entries.get("model", entries)), {}
    plan = Plan.from_dict(entries)
    return plan.model, dict(plan.inputs)


def scheme_options(given: list[str] | None) -> dict[str, Any]:
    """Parse NAME=VALUE of every --option."""
    found: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise domain_error("--option", text, "NAME=VALUE, such as per_head=false")
        found[name] = parse_value(value, f"--option {brief(name)}")
    return found


def parse_value(text: str, argument: str) -> Any:
    """Parse a JSON value (also "none" for null); any other text is returned unchanged."""
    words = {"true": True, "false": False, "none": None}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        return parse_json(text, argument)
    except DomainError:
        raise
    except ValueError:
        return text.strip()


def write_plot(figure: Any, path: Path) -> None:
    """Write a picture completely or not at all."""
    from ..show.plot import save

    save(figure, path)


def name_of(model: str | None) -> str | None:
    """Name of the MODEL argument in pictures: the preset, or the file name without its ending."""
    if model is None or not model.endswith((".json", ".toml")):
        return model
    return Path(model).stem


def photo_for(model: Transformer, variance: float | None, correlation: float | None) -> Any:
    """The photograph that a vision model reads if the user describes no input, with a note."""
    from ..model.patches import PatchEmbedding

    embedding = model.embedding
    if not isinstance(embedding, PatchEmbedding) or embedding.channels != 3:
        return None
    size, *others = set(embedding.sides)
    if others or variance is not None or correlation is not None:
        return None
    from ..layers.images import photograph

    note(
        "the input is the photograph that ships with matplotlib; for another input pass "
        "--variance and --correlation"
    )
    return photograph(size)


def default_sound(model: Transformer) -> dict[str, Any]:
    """The input of a sound encoder if the user describes none: the moments of noise, in place of a
    spectrogram, after its convolutions; with a note."""
    import numpy as np

    from ..layers.images import entering
    from ..model.patches import SoundEmbedding

    encoder = model.encoder
    if encoder is None or not isinstance(encoder.embedding, SoundEmbedding):
        return {}
    note("the encoder reads noise of variance 1 instead of a spectrogram")
    sound = np.random.default_rng(0).standard_normal((1, 1, *encoder.embedding.sides))
    kernel, _ = entering(encoder.embedding, sound, encoder.d_model)
    variance = float(kernel.mean_diagonal())
    correlation = float(kernel.mean_off_diagonal()) / variance
    return {"encoder_inputs": {"variance": variance, "correlation": correlation}}


def model_and_inputs(
    model: str | None,
    layers: int | None,
    seq_len: int | None,
    variance: float | None,
    correlation: float | None,
) -> tuple[Transformer, dict[str, Any]]:
    """The model that MODEL and options declare, and the arguments of `predict` for its input: those
    of the user, else of a plan; for a vision model without either, a photograph's moments."""
    described, known = read_model(model, {"layers": layers, "seq_len": seq_len})
    described = shortened(described, seq_len)
    found = known | default_sound(described) | not_none(variance=variance, correlation=correlation)
    pixels = None if known else photo_for(described, variance, correlation)
    if pixels is None:
        return described, found
    from ..prediction.predict import predict

    entering = predict(described, pixels=pixels)
    ends = ("variance", "correlation")
    return described, {name: float(getattr(entering, name)[0]) for name in ends}


def shortened(model: Transformer, seq_len: int | None) -> Transformer:
    """Shorten a model that is resolved token by token if `seq_len` is None, with a note."""
    from ..prediction.resolution import at_default_length as at_few
    from ..prediction.resolution import most_tokens

    found = model if seq_len is not None else at_few(model)
    if found is not model:
        most = most_tokens(model)
        count = "all of them" if most == model.seq_len else "the most that is possible"
        note(
            f"predicted for {found.seq_len} of up to {model.seq_len} tokens, each separately; "
            f"for {count} add --seq-len {most}"
        )
    return found
