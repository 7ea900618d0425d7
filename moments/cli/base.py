"""The command's frame: the application, options that commands share, errors, files."""

from __future__ import annotations

import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from ..errors import DomainError, MomentsError, ValidityWarning

if TYPE_CHECKING:
    from ..transformer import Transformer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Closed-form signal propagation in transformers at initialisation.",
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

# The parser's own base error: typer exports its subclasses, from click or from a copy of it.
_ParserError: Any = typer.BadParameter.__mro__[2]


class TheoryName(StrEnum):
    refined = "refined"
    published = "published"
    simplified = "simplified"


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="A preset's name, a config.json, or a model of your own as JSON.", show_default=False
    ),
]
LayersOption = Annotated[int | None, typer.Option(help="Number of layers.")]
SeqLenOption = Annotated[int | None, typer.Option(help="Tokens per sequence.")]
SchemeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="Of a scheme: NAME=VALUE, such as per_head=false (`moments schemes` lists them); "
        "may be repeated.",
        show_default=False,
    ),
]
TheoryOption = Annotated[TheoryName, typer.Option(help="Which formulas to use.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
CsvOption = Annotated[Path | None, typer.Option("--csv", help="Write every point as CSV.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", help="Write the picture to this file: .png, .svg or .pdf.")
]


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
    err.print(f"[bold red]error:[/] {plain(text)}", soft_wrap=True)
    sys.exit(2)


def _show_warning(message: Any, category: Any, *_: Any, **__: Any) -> None:
    err.print(f"[yellow]{category.__name__}:[/] {plain(str(message))}", soft_wrap=True)


def plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _version(requested: bool) -> None:
    if requested:
        from .. import __version__

        out.print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def declared_model(name: str | None, changes: dict[str, Any]) -> Transformer:
    """A preset or config with changes, or a model described by options alone."""
    from ..presets import preset
    from ..transformer import Transformer

    given = {key: value for key, value in changes.items() if value is not None}
    if name is None:
        required = ("layers", "d_model", "heads", "seq_len")
        missing = [key for key in required if key not in given]
        if missing:
            flags = ", ".join("--" + key.replace("_", "-") for key in missing)
            own = f", or add {flags}" if set(required) <= set(changes) else ""
            raise DomainError(f"no MODEL given: name a preset or a config.json{own}")
        return Transformer(**given)
    seq_len = given.pop("seq_len", None)
    if name in preset.names():
        model = preset(name, seq_len=seq_len)
    elif Path(name).exists() or name.endswith(".json"):
        model = _from_file(name, seq_len)
    else:
        raise no_preset("MODEL", name)
    if "d_model" in given or "heads" in given:
        raise DomainError("--d-model and --heads describe a model of your own: leave MODEL out")
    return model.replace(**given) if given else model


def no_preset(argument: str, name: str, expected: str = "a file nor a preset") -> DomainError:
    """What a name that means nothing gets: the nearest presets, else all of them."""
    from difflib import get_close_matches

    from ..presets import preset

    near = get_close_matches(name, preset.names(), cutoff=0.7)
    remedy = f"did you mean {' or '.join(near)}?" if near else ""
    remedy = remedy or f"presets: {', '.join(preset.names())}"
    return DomainError(f"{argument} = {name!r}: neither {expected}; {remedy}")


def _from_file(name: str, seq_len: int | None) -> Transformer:
    """A Hugging Face config, or what `Transformer.to_dict` wrote."""
    from ..huggingface import from_huggingface, read_config
    from ..transformer import FORMAT_VERSION, Transformer

    entries = read_config(name)
    if "model_type" in entries or entries.get("format") != FORMAT_VERSION:
        return from_huggingface(name, seq_len=seq_len)
    model = Transformer.from_dict(entries)
    return model if seq_len is None else model.replace(seq_len=seq_len)


def scheme_options(given: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE of every --option; true, false and numbers are no words."""
    found: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise DomainError(f"--option {text!r}: NAME=VALUE is wanted, such as per_head=false")
        found[name] = _plain_value(value)
    return found


def _plain_value(text: str) -> bool | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def write_csv(frame: Any, path: Path) -> None:
    try:
        frame.to_csv(path, index=False)
    except OSError as error:
        raise DomainError(f"cannot write {path}: {error.strerror or error}") from None


def write_plot(figure: Any, path: Path) -> None:
    from ..plot import save

    save(figure, path)


def named(model: str | None) -> str | None:
    """What a picture calls the MODEL argument: a preset's name, or a file's without its ending."""
    return None if model is None else Path(model).stem if model.endswith(".json") else model


def pictures(model: Transformer, variance: float | None, correlation: float | None) -> Any:
    """What a vision model reads where the user describes no input: a photograph, with a note."""
    from ..patches import PatchEmbedding

    embedding = model.embedding
    if not isinstance(embedding, PatchEmbedding) or embedding.channels != 3:
        return None
    if variance is not None or correlation is not None:
        return None
    from ..images import photograph

    err.print(
        "[yellow]note:[/] reads the photograph that ships with matplotlib; for an input of your "
        "own give --variance and --correlation",
        soft_wrap=True,
    )
    return photograph(embedding.image_size)


def input_moments(
    model: Transformer, variance: float | None, correlation: float | None
) -> dict[str, float]:
    """What the user says of the input; of a vision model's, else, the photograph's moments."""
    given = {"variance": variance, "correlation": correlation}
    found = {name: value for name, value in given.items() if value is not None}
    pixels = pictures(model, variance, correlation)
    if pixels is None:
        return found
    from ..passes import predict

    entering = predict(model, pixels=pixels)
    return {
        "variance": float(entering.variance[0]),
        "correlation": float(entering.correlation[0]),
    }


# Tokens that attention is resolved over where the user names no length: the cost per layer grows
# with the cube of the length.
_TOKENS = 256


def shortened(model: Transformer, seq_len: int | None) -> Transformer:
    """The model at fewer tokens, with a note, where it is resolved by token and none were named."""
    from ..passes import positional

    if seq_len is not None or model.seq_len <= _TOKENS or not positional(model):
        return model
    err.print(
        f"[yellow]note:[/] {_TOKENS} of up to {model.seq_len} tokens, resolved one by one; "
        f"for all of them add --seq-len {model.seq_len}",
        soft_wrap=True,
    )
    return model.replace(seq_len=_TOKENS)
