"""`moments check`: whether a model is in order at initialisation, for people and for CI."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DomainError, MomentsError, brief, refused
from ..files import replacing
from .base import (
    CsvOption,
    JsonOption,
    PlotOption,
    SeqLenOption,
    app,
    complete_scheme,
    declared,
    escaped,
    no_preset,
    out,
    writable,
    write_csv,
    write_plot,
)

HtmlOption = Annotated[
    Path | None,
    typer.Option(
        "--html", help="Write the report, with its pictures, to this file.", callback=writable
    ),
]


@app.command(
    examples=(
        "check train.py:build",
        "check config.json --seq-len 256",
        "check checkpoint/ --scheme dslm --html health.html",
        "check bert-base --json --quiet",
    )
)
def check(
    subject: Annotated[
        str,
        typer.Argument(
            help="FILE.py:NAME, where NAME is a module or gives one (or a module and a batch) when "
            "called; or a checkpoint's folder, a config.json or a preset.",
            show_default=False,
        ),
    ],
    scheme: Annotated[
        str | None,
        typer.Option(
            help="What the initialisation is meant to be; `moments schemes` lists them.",
            autocompletion=complete_scheme,
        ),
    ] = None,
    seq_len: SeqLenOption = None,
    as_json: JsonOption = False,
    csv: CsvOption = None,
    html: HtmlOption = None,
    plot: PlotOption = None,
) -> None:
    """Check a model before it is trained: its scheme, growth, gradients, first loss, number range.

    A config is judged by its predictions alone. Exit status 1 where there are findings, 2 where it
    cannot be read.
    """
    report = _checked(subject, scheme, seq_len)
    if csv is not None:
        write_csv(report.to_frame(), csv)
    if html is not None:
        with replacing(html) as partial:
            Path(partial).write_text(report.to_html(), encoding="utf-8")
    if plot is not None:
        write_plot(report.plot(), plot)
    if as_json:
        print(report.to_json())
    else:
        out.print(escaped(str(report)), soft_wrap=True)
    if not report.healthy:
        raise typer.Exit(1)


def _checked(subject: str, scheme: str | None, seq_len: int | None) -> Any:
    import moments

    refuse_pickle("SUBJECT", subject)
    file, colon, name = subject.rpartition(":")
    if colon and file.endswith(".py"):
        module, batch = made(file, name, "SUBJECT")
    elif _stored(subject):
        module, batch = subject, None
    elif subject.endswith(".py"):
        raise DomainError(f"SUBJECT = {brief(subject)}: say what in it: {subject}:NAME")
    elif os.path.exists(subject) or subject.endswith(".json") or subject in moments.preset.names():
        model, _ = declared(subject, {"seq_len": seq_len})
        from ..show.health import check_declared

        return check_declared(model, subject, scheme=scheme)
    else:
        raise no_preset("SUBJECT", subject, "FILE.py:NAME, a file nor a preset")
    if seq_len is not None:
        raise DomainError("--seq-len is for a config: a module reads its own batch")
    with running(subject):
        return moments.check(module, batch, scheme=scheme)


@contextlib.contextmanager
def running(subject: str) -> Iterator[None]:
    """A user's module is run: what it prints is no result, and why it cannot be read one line."""
    file, _, name = subject.rpartition(":")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except MomentsError as error:
        # A draft of its mapping is another command's.
        why = str(error).splitlines()[0]
        if file.endswith(".py"):
            why = why.replace("pass batch=", f"let {name}() return (module, batch)")
        kind = DomainError if isinstance(error, DomainError) else MomentsError
        raise kind(f"{subject} cannot be checked: {why}") from None


def _stored(subject: str) -> bool:
    """Whether it names a checkpoint."""
    folder = os.path.isdir(subject) and any(Path(subject).glob("*.safetensors"))
    return folder or subject.endswith(".safetensors")


PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


def refuse_pickle(argument: str, name: str) -> None:
    """Say what to do with a file that may run code as it is read.

    Raises:
        DomainError: it is one.
    """
    if Path(name).suffix in PICKLES:
        raise DomainError(
            f"{argument} = {brief(name)}: a pickle, which may run code as it is read: name "
            "model.safetensors with its config.json beside it, or load it in a file of your own "
            "and name FILE.py:NAME"
        )


def made(file: str, name: str, argument: str) -> tuple[Any, Any]:
    """The module that a user's file makes, and its batch where it gives one.

    Raises:
        DomainError: no such file, or no such name in it.
    """
    path = Path(file)
    if not path.is_file():
        raise DomainError(f"{argument}: no file {brief(file)}")
    with refused(file), contextlib.redirect_stdout(sys.stderr):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, loaded)
        sys.path.insert(0, str(path.parent.resolve()))
        spec.loader.exec_module(loaded)
        if not hasattr(loaded, name):
            raise DomainError(f"{file} has no {brief(name)}")
        found = getattr(loaded, name)
        if (callable(found) and not hasattr(found, "forward")) or isinstance(found, type):
            found = found()
    if isinstance(found, tuple) and len(found) == 2:
        return found
    return found, None
