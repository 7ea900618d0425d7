"""What is known and what is there: `moments schemes`, `formulas`, `model`, `schema`, `doctor`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import MomentsError, unknown_name
from .base import (
    Answer,
    LayersOption,
    ModelArgument,
    OneScheme,
    SchemeOption,
    SeqLenOption,
    TheoryName,
    TheoryOption,
    app,
    declared,
    escaped,
    out,
    scheme_options,
)

if TYPE_CHECKING:
    from ..scheme import Scheme


@app.command(examples=("schemes", "schemes --json"), ways=("as_json",))
def schemes() -> Answer:
    """List the published schemes that --scheme and `with_scheme` know."""
    from ..scheme import schemes as every

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
    return Answer(said=lambda: tuple(map(_scheme_lines, every())), data=lambda: rows)


def _scheme_lines(scheme: Scheme) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in scheme.options.items())
    return (
        f"[bold]{scheme.name}[/]  {escaped(scheme.title)}\n"
        f"  sets {', '.join(scheme.sets)}; {escaped(str(scheme.source))}"
    ) + (f"\n  options: {escaped(options)}" if options else "")


@app.command(
    examples=(
        "formulas",
        "formulas relu",
        "formulas layernorm --theory published --latex",
        "formulas softmax --json",
    ),
    ways=("as_json",),
)
def formulas(
    component: Annotated[str | None, typer.Argument(help="A component's name.")] = None,
    theory: TheoryOption = TheoryName.refined,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the whole reference as Markdown.")
    ] = False,
) -> Answer | None:
    """Print a component's formulas with their sources, or list the components."""
    from ..formulas.registry import STACKS, components, formula_page
    from ..formulas.registry import component as find

    if markdown:
        print(formula_page(), end="")
        return None
    if component is None:
        titles = {name: find(name).title for name in (*components(), *STACKS)}
        width = max(map(len, titles)) + 2
        return Answer(
            said=lambda: tuple(f"[bold]{name:<{width}}[/]{t}" for name, t in titles.items()),
            data=lambda: titles,
        )
    record = find(component)
    laws = record.under(theory.value)

    def said() -> Iterator[str]:
        yield f"[bold]{record.title}[/], theory {theory.value}"
        for quantity, law in laws.items():
            yield f"\n[bold]{quantity}[/]  [dim]{law.status}; {escaped(str(law.source))}[/]"
            yield f"  {escaped(law.latex() if latex else str(law.expr))}"
            if law.note:
                yield f"[dim]note: {escaped(law.note)}[/]"

    return Answer(said=said, data=lambda: {name: _law_entry(law) for name, law in laws.items()})


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


DISTRIBUTION = "transformer-moments"


@app.command(examples=("doctor", "doctor --json"), ways=("as_json",))
def doctor() -> Answer:
    """Say what is installed: versions, the extras that were found, devices.

    Put its output into a report of a problem. Exit status 1 where a package that everything needs
    is missing or too old.
    """
    found = _installed()
    passed = all(package["ok"] for package in found["core"])
    return Answer(said=lambda: _say(found), data=lambda: found, passed=passed)


def _say(found: dict[str, Any]) -> None:
    out.print(f"moments {found['moments']}, Python {found['python']}, {escaped(found['platform'])}")
    out.print(f"in {escaped(found['path'])}", soft_wrap=True)
    for package in found["core"]:
        out.print(f"  {_mark(package)}", soft_wrap=True)
    for name, extra in found["extras"].items():
        state = "found" if extra["ok"] else f'not complete: pip install "{DISTRIBUTION}[{name}]"'
        out.print(f"extra [bold]{name}[/]: {escaped(state)}", soft_wrap=True)
        for package in extra["packages"]:
            out.print(f"  {_mark(package)}", soft_wrap=True)
    out.print(f"devices: {', '.join(found['devices'])}")


def _mark(package: dict[str, Any]) -> str:
    version = package["version"] or "missing"
    return escaped(
        f"{'+' if package['ok'] else '-'} {package['name']} {version} ({package['needs']})"
    )


def _installed() -> dict[str, Any]:
    from .. import __version__

    core: list[dict[str, Any]] = []
    extras: dict[str, list[dict[str, Any]]] = {}
    for text in _requirements():
        name, needs, extra = _requirement(text)
        if name == DISTRIBUTION:
            continue  # an extra that contains another
        package = {"name": name, "needs": needs or "any", **_version(name, needs)}
        (core if extra is None else extras.setdefault(extra, [])).append(package)
    return {
        "format": 1,
        "moments": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "path": str(Path(__file__).parent.parent),
        "core": core,
        "extras": {
            name: {"ok": all(p["ok"] for p in packages), "packages": packages}
            for name, packages in extras.items()
        },
        "devices": _devices(),
    }


def _requirements() -> list[str]:
    """Lines of the installed distribution; none where the package runs from its folder alone."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _requirement(text: str) -> tuple[str, str, str | None]:
    """Name, versions and extra of a line such as 'torch>=2.4; extra == "torch"'."""
    wanted, _, condition = text.partition(";")
    found = re.match(r"\s*([\w.-]+)(?:\[[\w,-]*\])?\s*(.*)", wanted)
    assert found
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", condition)
    return found[1], found[2].strip(), extra[1] if extra else None


def _version(name: str, needs: str) -> dict[str, Any]:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return {"version": None, "ok": False}
    least = re.search(r">=\s*([\d.]+)", needs)
    return {"version": version, "ok": least is None or _parts(version) >= _parts(least[1])}


def _parts(version: str) -> tuple[int, ...]:
    release = re.match(r"[\d.]+", version)
    parts = [int(part) for part in (release[0] if release else "0").split(".") if part]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def _devices() -> list[str]:
    """Processors that a simulation or a module can run on."""
    found = [f"cpu ({os.cpu_count()} cores)"]
    try:
        from ..torch.running import accelerators
    except MomentsError:  # without torch there are none
        return found
    return found + accelerators()


@app.command(
    examples=(
        "model gpt2",
        "model gpt2 --layers 48 --scheme dslm --json > deep.json",
        "predict deep.json",
        "model mine.toml",
    ),
    ways=("as_json",),
)
def model(
    model: ModelArgument = None,
    layers: LayersOption = None,
    seq_len: SeqLenOption = None,
    scheme: OneScheme = None,
    option: SchemeOption = None,
) -> Answer:
    """Show what a MODEL argument declares; as JSON, a model file that every command reads.

    A model file may also be written by hand, as TOML: fields of moments.Transformer, with `preset`
    to start from one and a table [scheme] with its name and options.
    """
    described, _ = declared(model, {"layers": layers, "seq_len": seq_len})
    if scheme is not None:
        described = described.with_scheme(scheme, **scheme_options(option))
    return Answer(said=lambda: str(described), data=described.to_dict)


@app.command(examples=("schema", "schema predict > predict.schema.json"))
def schema(
    command: Annotated[
        str | None, typer.Argument(help="Whose; left out: names of all.", show_default=False)
    ] = None,
) -> None:
    """Print the JSON Schema of what a command prints with --json."""
    known = schemas()
    if command is None:
        for name in known:
            out.print(name)
        return
    if command not in known:
        raise unknown_name("command", command, known)
    print(json.dumps(known[command], indent=2))


def schemas() -> dict[str, Any]:
    """JSON Schemas by command, each whole by itself."""
    text = resources.files("moments").joinpath("data", "schemas.json").read_text(encoding="utf-8")
    stored = json.loads(text)
    return {
        name: {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"urn:moments:{name}:{stored['version']}",
            **entry,
            "$defs": stored["$defs"],
        }
        for name, entry in stored["commands"].items()
    }
