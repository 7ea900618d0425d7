"""A pytest plugin: `pytest --moments FILE.py:FACTORY` checks the module that a factory returns, and
the fixture `moments_check` fails a test if a model has findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .errors import DomainError, MomentsError


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--moments`."""
    parser.getgroup("moments").addoption(
        "--moments",
        action="append",
        default=[],
        metavar="FILE.py:FACTORY",
        help="check the module that a factory makes, alone or with its batch, by moments.check, "
        "and fail where there are findings; once for each",
    )


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Append one test for each factory."""
    for name in session.config.getoption("--moments"):
        items.append(Checked.from_parent(session, name=f"moments::{name}", subject=name))


class Checked(pytest.Item):
    """The check of one factory's module."""

    def __init__(self, subject: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.subject = subject

    def runtest(self) -> None:
        """Check the module; raises `Unhealthy` with the report as its text."""
        from . import check
        from .cli.check import load_user_module

        file, colon, name = self.subject.rpartition(":")
        if not colon or not file.endswith(".py"):
            raise DomainError(f"--moments {self.subject}: name a file and a factory, FILE.py:NAME")
        module, batch = load_user_module(
            str(self.config.invocation_params.dir / file), name, "--moments"
        )
        check(module, batch).assert_healthy()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The report or error message, without a traceback through this package."""
        if isinstance(excinfo.value, MomentsError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Path, line and name of the test."""
        return self.path, None, self.name


@pytest.fixture(scope="session")
def moments_check() -> Callable[..., Any]:
    """A function like `moments.check` that fails the test if there are findings."""

    def checked(subject: Any, batch: Any = None, **options: Any) -> Any:
        __tracebackhide__ = True
        from . import check

        report = check(subject, batch, **options)
        report.assert_healthy()
        return report

    return checked
