"""`moments audit`: whether a module or a checkpoint has the weights and scales that a plan says."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DomainError, brief, domain_error
from ..files import read_object
from .base import (
    CsvOption,
    JsonOption,
    LayersOption,
    OneScheme,
    SchemeOption,
    app,
    escaped,
    no_preset,
    out,
    scheme_options,
    stored_model,
    write_csv,
)

if TYPE_CHECKING:
    from ..model.transformer import Transformer


@app.command(
    examples=(
        "audit checkpoint/",
        "audit checkpoint/ --scheme dslm",
        "audit train.py:build --scheme scaled-init",
        "audit model.safetensors --plan plan.json --csv tensors.csv",
        "audit bert-tiny --seed 3",
    )
)
def audit(
    module: Annotated[
        str,
        typer.Argument(
            help="FILE.py:NAME, where NAME is a module or gives one (or a module and a batch) when "
            "called; or a checkpoint's folder or .safetensors file with config.json beside it; or "
            "a preset or config.json, whose module is then drawn afresh.",
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
    seed: Annotated[int, typer.Option(help="Of a fresh module's weights.")] = 0,
    as_json: JsonOption = False,
    csv: CsvOption = None,
) -> None:
    """Check a module's weights, gains and residual multipliers against a scheme or plan.

    Without either, against the initialisation that its own config promises. Exit status 1 where
    the audit fails.
    """
    from ..scheme.registry import scheme as known
    from ..torch.audit import audit as check
    from .check import running

    if scheme is not None and plan is not None:
        raise DomainError("--scheme and --plan both say what is right: give one")
    options = scheme_options(option)
    if options and scheme is None:
        raise DomainError("--option is a scheme's: give its --scheme too")
    if scheme is not None:
        known(scheme)
    # What is wrong with a plan is said before a module is built, which may take minutes.
    wanted: Any = scheme if plan is None else _planned(plan)
    target, batch = _module(module, layers, seed)
    expected = _promised(target) if wanted is None else wanted
    with running(module):
        report = check(target, expected, batch=batch, options=options or None)
    if csv is not None:
        write_csv(report.to_frame(), csv)
    if as_json:
        data = {
            "format": 1,
            "passed": report.passed,
            "source": report.source,
            "advice": list(report.advice),
            "unchecked": list(report.unchecked),
            "unidentified": list(report.unidentified),
            "undeclared": list(report.undeclared),
            "findings": [_finite(row) for row in report.to_frame().to_dict("records")],
        }
        print(json.dumps(data, indent=2, allow_nan=False))
    else:
        out.print(escaped(str(report)), soft_wrap=True)
    if not report.passed:
        raise typer.Exit(1)


def _finite(row: dict[Any, Any]) -> dict[str, Any]:
    """Numbers that JSON has no word for as null."""
    return {
        str(name): None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _module(name: str, layers: int | None, seed: int) -> tuple[Any, Any]:
    """A module, and what its author runs it on where they say so."""
    from ..model.presets import preset
    from ..torch.checkpoints import load
    from ..torch.huggingface_modules import build_module
    from .check import made, refuse_pickle

    refuse_pickle("MODULE", name)
    path, (file, colon, inside) = Path(name), name.rpartition(":")
    own = bool(colon) and file.endswith(".py")
    if name in preset.names():
        return build_module(preset.config(name), seed, layers=layers), None
    stored = os.path.isdir(path) and any(path.glob("*.safetensors"))
    if stored or own or path.suffix == ".safetensors":
        if layers is not None:
            raise DomainError("--layers is for a module drawn afresh: this one has its own")
        return made(file, inside, "MODULE") if own else (load(path), None)
    if path.suffix == ".py":
        raise DomainError(f"MODULE = {brief(name)}: say what in it: {name}:NAME")
    if os.path.exists(path):
        return build_module(name, seed, layers=layers), None
    raise no_preset("MODULE", name, "FILE.py:NAME, a checkpoint, a config nor a preset")


def _promised(module: Any) -> Transformer:
    """What a module's own config promises, or torch's own class.

    Raises:
        DomainError: neither says anything.
    """
    from ..torch.architecture import promised_by
    from ..torch.running import is_module, unwrapped

    if not is_module(module):
        raise domain_error("MODULE", type(module).__name__, "an nn.Module")
    if (found := promised_by(unwrapped(module))) is not None:
        return found
    raise DomainError(
        f"nothing in {type(module).__name__} says how it is meant to be drawn: pass --scheme or "
        "--plan; `moments check` says what its weights look like"
    )


def _planned(plan: Path) -> Transformer:
    """The model of a plan's JSON."""
    entries = read_object(plan, "--plan", "a plan or model as JSON")
    try:
        return stored_model(entries)[0]
    except DomainError as error:
        raise DomainError(f"--plan {plan}: not a plan or model: {error}") from None
