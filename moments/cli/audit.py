"""`moments audit`: whether a module or a checkpoint has the weights and scales that a plan says."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DomainError
from ..files import read_object
from .base import (
    CsvOption,
    JsonOption,
    LayersOption,
    OneScheme,
    SchemeOption,
    app,
    no_preset,
    out,
    plain,
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
        "audit model.safetensors --plan plan.json --csv tensors.csv",
        "audit bert-tiny --seed 3",
    )
)
def audit(
    module: Annotated[
        str,
        typer.Argument(
            help="A checkpoint's folder or .safetensors file with config.json beside it, or a "
            "preset or config.json, whose module is then drawn afresh.",
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

    if scheme is not None and plan is not None:
        raise DomainError("--scheme and --plan both say what is right: give one")
    options = scheme_options(option)
    if options and scheme is None:
        raise DomainError("--option is a scheme's: give its --scheme too")
    if scheme is not None:
        known(scheme)
    # What is wrong with a plan is said before a module is built, which may take minutes.
    wanted: Any = scheme if plan is None else _planned(plan)
    target = _module(module, layers, seed)
    expected = _architecture(target) if wanted is None else wanted
    report = check(target, expected, options=options or None)
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
        out.print(plain(str(report)), soft_wrap=True)
    if not report.passed:
        raise typer.Exit(1)


def _finite(row: dict[Any, Any]) -> dict[str, Any]:
    """Numbers that JSON has no word for as null."""
    return {
        str(name): None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _module(name: str, layers: int | None, seed: int) -> Any:
    from ..model.presets import preset
    from ..torch.checkpoints import load
    from ..torch.huggingface_modules import build_module

    path = Path(name)
    if name in preset.names():
        return build_module(preset.config(name), seed, layers=layers)
    stored = os.path.isdir(path) and any(path.glob("*.safetensors"))
    if stored or path.suffix == ".safetensors":
        if layers is not None:
            raise DomainError("--layers is for a module drawn afresh: a checkpoint has its own")
        return load(path)
    if os.path.exists(path):
        return build_module(name, seed, layers=layers)
    raise no_preset("MODULE", name, "a checkpoint, a config nor a preset")


def _architecture(module: Any) -> Transformer:
    """What a module's own config promises."""
    from ..torch.architecture import architecture_of

    model = architecture_of(module)
    if model is None:
        raise DomainError("the module's architecture is not known: pass --plan")
    return model


def _planned(plan: Path) -> Transformer:
    """The model of a plan's JSON."""
    entries = read_object(plan, "--plan", "a plan or model as JSON")
    try:
        return stored_model(entries)[0]
    except DomainError as error:
        raise DomainError(f"--plan {plan}: not a plan or model: {error}") from None
