"""A diagnosis as text: the verdict, the likeliest causes, then the points they explain."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .diagnosis import SHARE
from .verdict import NAMES

if TYPE_CHECKING:
    from .diagnosis import Diagnosis

WIDTH = 100
MOST = 8
"""Features that a headline names."""

ENOUGH = 0.8
"""Share of a difference from which what is found counts as the explanation."""


def text(diagnosis: Diagnosis) -> str:
    """The whole diagnosis."""
    return "\n".join(
        wrapped
        for line in _lines(diagnosis)
        for wrapped in textwrap.wrap(line, WIDTH, subsequent_indent="   ")
    )


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield _headline(diagnosis)
    frame = diagnosis.to_frame()
    for sentence in diagnosis.advice:
        yield f"in its weights, {sentence}"
    causes = [c for c in diagnosis.causes if abs(c.explains) >= SHARE]
    idle = [c for c in diagnosis.causes if abs(c.explains) < SHARE]
    if causes:
        yield "likeliest causes:"
        for number, cause in enumerate(causes, start=1):
            yield f"{number}. {cause}"
    if math.isfinite(diagnosis.explained) and len(causes) > 1:
        yield f"together they explain {100 * diagnosis.explained:.0f} %"
    for note in diagnosis.notes:
        yield f"note: {note}"
    if not diagnosis.expected and not diagnosis.explained > ENOUGH and not diagnosis.notes:
        yield (
            "what is left comes from something that neither weights nor scales nor the causal mask "
            "show: the chance of this draw, a mask or code of the module's own, dropout elsewhere, "
            "features that are not independent, or an error of the theory"
        )
    if idle:
        small = f"explaining less than {100 * SHARE:.0f} % of the difference each"
        rest = "with no point out of its band" if frame.empty else small
        yield f"{'also ' if causes else ''}not as declared, {rest}:"
        for cause in idle:
            yield f"- {cause.words}"
    if not frame.empty:
        yield "points out of their 95 % band:"
        keys = ["stack", "quantity", "cause"]
        for (stack, quantity, words), part in frame.groupby(keys, sort=False):
            yield _points(str(stack), str(quantity), str(words), part.to_dict("records"))


def _headline(diagnosis: Diagnosis) -> str:
    """The verdict; before it what it cannot speak for."""
    verdict = diagnosis.comparison.verdict()
    if diagnosis.unchecked:
        verdict = f"{verdict}; NOT CHECKED: {'; '.join(diagnosis.unchecked)}"
    if not (diagnosis.differing and diagnosis.expected):
        return verdict
    names = list(diagnosis.differing)
    some = ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" * (len(names) > MOST))
    return f"NOT AS DECLARED: {some} (below); all the same, {verdict}"


def _points(stack: str, quantity: str, cause: str, rows: list[Any]) -> str:
    """One line for all points of a quantity that have one cause."""
    worst: Mapping[str, Any] = max(rows, key=lambda row: abs(row["deviations"]))
    times = worst["measured"] / worst["predicted"] if worst["predicted"] else math.inf
    most = f", most at {worst['layer']}" if len(rows) > 1 else ""
    line = (
        f"- {'encoder ' if stack else ''}{NAMES[quantity]} at {_runs([r['layer'] for r in rows])}"
        f"{most}: {worst['measured']:.4g}, predicted {worst['predicted']:.4g} "
        f"({times:.3g}x, {worst['deviations']:+.1f} standard deviations)"
    )
    return f"{line}: {cause}" if cause else f"{line}: no difference found explains it"


def _runs(layers: list[int]) -> str:
    """1 to 4, 7."""
    runs = []
    for _, group in itertools.groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0]):
        members = [layer for _, layer in group]
        runs.append(f"{members[0]} to {members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ", ".join(runs)
