"""The command `moments`: thin wrappers that parse, call the library and print.

`main` loads the module of the command at hand alone; `app` is of all commands.
"""

import importlib
import sys
from typing import Any

from . import base

MODULES = {name: module for names in base.PANELS.values() for name, module in names.items()}


def main() -> None:
    """Entry point: bad input prints one line on standard error and exits with status 2."""
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    _load({MODULES[command]} if command in MODULES else set(MODULES.values()))
    base.main()


def _load(modules: set[str]) -> None:
    for module in sorted(modules):
        importlib.import_module(f".{module}", __name__)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load(set(MODULES.values()))
    return base.app
