"""A plugin of pytest: `pytest --moments FILE.py:FACTORY` checks what a factory makes, and the
fixture `moments_check` fails a test where a model has findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .errors import DomainError, MomentsError


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.getgroup("moments").addoption(
        "--moments",
        action="append",
        default=[],
        metavar="FILE.py:FACTORY",
        help="check the module that a factory makes, alone or with its batch, by moments.check, "
        "and fail where there are findings; once for each",
    )


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """One test for each factory, behind all others."""
    for name in session.config.getoption("--moments"):
        items.append(Checked.from_parent(session, name=f"moments::{name}", subject=name))


class Checked(pytest.Item):
    """What one factory makes, checked."""

    def __init__(self, subject: str, **given: Any) -> None:
        super().__init__(**given)
        self.subject = subject

    def runtest(self) -> None:
        """Fails by `Unhealthy`, whose text is the report."""
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
        """The report, or one line, without a traceback through this package."""

        if isinstance(excinfo.value, MomentsError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where it stands."""
        return self.path, None, self.name


@pytest.fixture(scope="session")
def moments_check() -> Callable[..., Any]:
    """`moments.check`, which fails the test where there are findings; gives the report."""

    def checked(subject: Any, batch: Any = None, **options: Any) -> Any:
        __tracebackhide__ = True
        from . import check

        report = check(subject, batch, **options)
        report.assert_healthy()
        return report

    return checked
