"""`moments check`: whether a model is in order at initialisation, for people and for CI."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
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
    no_preset,
    out,
    plain,
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
        out.print(plain(str(report)), soft_wrap=True)
    if not report.healthy:
        raise typer.Exit(1)


def _checked(subject: str, scheme: str | None, seq_len: int | None) -> Any:
    import moments

    file, colon, name = subject.rpartition(":")
    if colon and file.endswith(".py"):
        module, batch = _made(file, name)
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
    try:
        return moments.check(module, batch, scheme=scheme)
    except MomentsError as error:
        # What could not be read is told in a line; a draft of its mapping is another command's.
        why = str(error).splitlines()[0]
        if file.endswith(".py"):
            why = why.replace("pass batch=", f"let {name}() return (module, batch)")
        raise MomentsError(f"{subject} cannot be checked: {why}") from None


def _stored(subject: str) -> bool:
    """Whether it names a checkpoint."""
    folder = os.path.isdir(subject) and any(Path(subject).glob("*.safetensors"))
    return folder or subject.endswith(".safetensors")


def _made(file: str, name: str) -> tuple[Any, Any]:
    """The module that a user's file makes, and its batch where it gives one."""
    path = Path(file)
    if not path.is_file():
        raise DomainError(f"SUBJECT: no file {brief(file)}")
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
        made = getattr(loaded, name)
        if (callable(made) and not hasattr(made, "forward")) or isinstance(made, type):
            made = made()
    if isinstance(made, tuple) and len(made) == 2:
        return made
    return made, None
