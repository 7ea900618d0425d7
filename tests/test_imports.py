"""What an import costs, and which module may import which."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import moments

PACKAGE = Path(moments.__file__).parent
HEAVY = ("sympy", "mpmath", "pandas", "matplotlib", "torch", "transformers", "scipy", "typer")


# --- cost -----------------------------------------------------------------------------------------


def fresh(code: str) -> str:
    """Standard output of `code` in a new interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def loaded(code: str, names: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of `names` are in sys.modules after `code`."""
    return fresh(f"import sys\n{code}\nprint(*[n for n in {names!r} if n in sys.modules])").split()


def test_import_is_light() -> None:
    assert loaded("import moments") == []


@pytest.mark.parametrize("theory", ["refined", "published"])
def test_predicting_a_preset_loads_nothing_symbolic(theory: str) -> None:
    code = f"import moments; moments.predict(moments.preset('bert-tiny'), theory={theory!r})"
    assert set(loaded(code)) <= {"scipy"}


def test_declaring_and_the_table_need_no_pandas() -> None:
    code = (
        "import moments; m = moments.Transformer(2, 64, 4, 16); repr(m); str(m);"
        "p = moments.predict(m, theory='published'); p.table(); p.to_json(); repr(p)"
    )
    assert loaded(code) == []


def test_every_public_name_loads() -> None:
    assert set(moments.__all__) <= set(dir(moments))
    core = [
        name
        for name in moments.__all__
        if name not in ("simulate", "diagnose", "expect", "transfer")
    ]
    assert "torch" not in loaded(f"import moments; [getattr(moments, n) for n in {core!r}]")
    with pytest.raises(AttributeError, match="no attribute 'perdict'"):
        moments.perdict  # noqa: B018
    assert (PACKAGE / "py.typed").exists()


LOADED = 140
"""Modules that the command line's first prediction may load; may only fall."""


def test_a_first_prediction_loads_only_what_it_needs() -> None:
    """The whole of `moments predict bert-base`, from a cold interpreter, most of it loading."""
    code = (
        "import sys; sys.argv = ['moments', 'predict', 'bert-base']\n"
        "from moments.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('LOADED', *sys.modules)"
    )
    names = fresh(code).partition("LOADED")[2].split()
    assert {name for name in HEAVY if name in names} <= {"scipy", "typer"}
    assert not {"scipy.stats", "scipy.optimize", "scipy.integrate"} & set(names)
    assert sum(name.startswith("moments.") for name in names) <= LOADED


# --- layers ---------------------------------------------------------------------------------------

# Imports run downward in this order of folders, and within a folder in no circle.
ORDER = (
    "errors",
    "errors",
    "files",
    "formulas",
    "model",
    "engine",
    "layers",
    "noise",
    "prediction",
    "step",
    "solver",
    "scheme",
    "show",
    "grids",
    "simulation",
    "torch",
    "validation",
    "cli",
    "pytest_plugin",
)
RANK = {name: rank for rank, name in enumerate(ORDER)}
# Upward, from inside a function: what an object offers as a method and loads when called.
METHODS = {
    ("model.transformer", "scheme"),  # with_scheme
    ("prediction.result", "show"),  # table, plot
    ("prediction.result", "step"),  # after
    ("step.result", "show"),  # table, plot
    ("step.search", "show"),  # plot
    ("scheme.registry", "show"),  # plot
    ("solver.plan", "show"),  # plot
}
# Those that may import torch; but for stored simulations, which start the simulator from inside
# a function, and the commands, nothing else may import them.
TORCH_SIDE = ("simulation", "torch")
OUTSIDE = ("validation",)


class Imports(ast.NodeVisitor):
    """Dotted names that a module imports: at its top, and inside functions."""

    def __init__(self, package: tuple[str, ...]) -> None:
        self.package = package
        self.top: set[str] = set()
        self.inside: set[str] = set()
        self.depth = 0

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for other in node.orelse:
                self.visit(other)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def _add(self, name: str) -> None:
        (self.inside if self.depth else self.top).add(name)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else ()
        module = ".".join((*base, *((node.module or "").split(".") if node.module else ())))
        self._add(module)
        if module.partition(".")[0] == "moments":
            for alias in node.names:
                self._add(f"{module}.{alias.name}")


@functools.cache
def imports() -> dict[str, Imports]:
    """Every module of the package, by dotted name below `moments`."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        visitor = Imports(("moments", *parts[:-1]))
        visitor.visit(ast.parse(file.read_text(encoding="utf-8")))
        found[".".join(parts)] = visitor
    return found


def own(names: set[str]) -> Iterator[str]:
    """What stands below `moments` of those names that are the package's own."""
    for name in names:
        root, _, rest = name.partition(".")
        if root == "moments" and rest:
            yield rest


def folder(name: str) -> str:
    return name.partition(".")[0]


def test_every_folder_has_its_place() -> None:
    heads = {folder(name) for name in imports()} - {"__init__", "__main__"}
    assert heads == set(RANK)


def test_every_folder_says_what_is_inside() -> None:
    for file in PACKAGE.rglob("__init__.py"):
        said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
        assert len((said or "").partition("\n")[0]) > 20, file


def test_imports_run_downward() -> None:
    for name, found in imports().items():
        if folder(name) not in RANK:
            continue
        for target in own(found.top | found.inside):
            if (name, folder(target)) in METHODS and target not in own(found.top):
                continue
            if folder(target) in RANK:  # and else a public name of the package
                assert RANK[folder(target)] <= RANK[folder(name)], f"{name} imports {target}"


def test_no_import_cycles() -> None:
    """At module level, module by module."""
    modules = {name.removesuffix(".__init__") for name in imports()}
    graph: dict[str, set[str]] = {}
    for name, found in imports().items():
        if folder(name) in RANK:
            short = name.removesuffix(".__init__")
            # A package's own modules run after its first lines did.
            graph[short] = {
                t for t in set(own(found.top)) & modules if not f"{short}.".startswith(f"{t}.")
            }
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", ["engine", "layers", "noise", "prediction"])
def test_no_circle_within_a_folder(name: str) -> None:
    """Those for annotations alone and inside functions included."""
    files = [file for file in (PACKAGE / name).rglob("*.py") if file.stem != "__init__"]
    modules = {file: (*file.relative_to(PACKAGE.parent).with_suffix("").parts,) for file in files}
    known, graph = {".".join(parts) for parts in modules.values()}, dict[str, set[str]]()
    for file, parts in modules.items():
        targets = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = ".".join((*parts[: -node.level], *filter(None, [node.module])))
                targets |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        graph[".".join(parts)] = targets & known
    TopologicalSorter(graph).prepare()


# Imports inside functions, which put off what a first prediction does not need. May only fall.
INSIDE = 23


def test_imports_inside_functions_are_counted() -> None:
    modules = {name.removesuffix(".__init__") for name in imports()}
    counted = [
        (name, target)
        for name, found in imports().items()
        if folder(name) not in ("__init__", "cli", "pytest_plugin")
        for target in set(own(found.inside - found.top)) & modules
    ]
    assert len(counted) <= INSIDE, counted


def test_the_core_never_imports_torch() -> None:
    for name, found in imports().items():
        if folder(name) in TORCH_SIDE:
            continue
        everything = found.top | found.inside
        roots = {folder(target) for target in everything}
        assert not roots & {"torch", "transformers"}, name
        reached = {folder(target) for target in own(everything)} & set(TORCH_SIDE)
        if folder(name) not in ("__init__", "cli") and not name.startswith(OUTSIDE):
            assert not reached, f"{name} imports {reached}"
        top = {folder(target) for target in own(found.top)}
        assert not top & set(TORCH_SIDE), f"{name} imports torch when imported"


def test_only_the_command_line_needs_typer() -> None:
    for name, found in imports().items():
        roots = {folder(target) for target in found.top | found.inside}
        assert "typer" not in roots or folder(name) == "cli"
        top = {folder(target) for target in found.top}
        assert not top & {"sympy", "pandas"}, name
        if name != "show.plot":
            assert "matplotlib" not in top
