"""Named cases of the papers: their settings as data, what they claim, and what is predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import domain_error
from . import kedia_cases, noci_cases, sun_cases
from .case import Case
from .results import Result

_ALL: Mapping[str, Callable[[], Case]] = {
    **kedia_cases.CASES,
    **sun_cases.CASES,
    **noci_cases.CASES,
}


@dataclass(frozen=True)
class NamedCases(Result):
    """Cases by name."""

    cases: Mapping[str, Case]

    def __getitem__(self, name: str) -> Case:
        if name not in self.cases:
            raise domain_error("case", name, f"one of {', '.join(self.cases)}")
        return self.cases[name]

    @property
    def heading(self) -> str:
        return "named cases: settings, claims and predictions"

    def _rows(self) -> list[Mapping[str, Any]]:
        return [
            {
                "case": name,
                "quantity": quantity,
                "predicted": value,
                "claimed": case.claimed.get(quantity, math.nan),
            }
            for name, case in self.cases.items()
            for quantity, value in case.predicted.items()
        ]


def named_cases(names: Iterable[str] | None = None) -> NamedCases:
    """Settings that the papers report on, predicted by the engine.

    Args:
        names: which; None: all of them, up to a minute for those with sharp attention.

    Raises:
        DomainError: an unknown name.
    """
    chosen = tuple(_ALL) if names is None else tuple(names)
    for name in chosen:
        if name not in _ALL:
            raise domain_error("case", name, f"one of {', '.join(_ALL)}")
    return NamedCases({name: _ALL[name]() for name in chosen})
