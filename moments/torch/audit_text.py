"""An audit as text."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ..show.report import number, render

if TYPE_CHECKING:
    from .audit import AuditReport
    from .findings import Finding

WIDTH = 120
TABLE_WIDTH = 240  # parameter names stay whole
OFFENDERS, GOOD = 40, 8


def text(report: AuditReport) -> str:
    """Verdict, advice, offenders first, then a few of the checks that passed."""
    bad = report.offenders
    verdict = "passed" if not bad else f"FAILED: {len(bad)} of {len(report.findings)} checks"
    open_checks = [f for f in report.findings if f.passed is None]
    if report.unchecked:
        verdict = verdict if bad else "nothing that was checked failed"
        verdict += f"; NOT CHECKED: {'; '.join(report.unchecked)}"
    lines = textwrap.wrap(
        f"audit of {report.source}: {verdict}",
        WIDTH,
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    for sentence in report.advice:
        lines += textwrap.wrap(f"- {sentence}", WIDTH, subsequent_indent="  ")
    shown = [*bad[:OFFENDERS], *open_checks[:GOOD]]
    good = [f for f in report.findings if f.passed]
    shown += good[:GOOD]
    lines.append(render(_table(shown), TABLE_WIDTH))
    for rest, words in (
        (len(bad) - OFFENDERS, "more failed"),
        (len(good) - GOOD, "more passed"),
    ):
        if rest > 0:
            lines.append(f"... {rest} {words}; to_frame() has every check")
    for names, words in (
        (report.unidentified, "of unknown role, not checked"),
        (report.undeclared, "of which the plan says nothing"),
    ):
        if names:
            listed = f"{len(names)} parameters {words}: {', '.join(names)}"
            lines += textwrap.wrap(listed, WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("parameter", no_wrap=True)
    table.add_column("role")
    for name in ("quantity", "plan", "module", "ratio", "note"):
        table.add_column(name, justify="left" if name in ("quantity", "note") else "right")
    for f in findings:
        state = {True: "ok", False: "FAIL", None: "?"}[f.passed]
        ratio = "-" if math.isnan(f.ratio) else f"{f.ratio:.3g}"
        measured = "-" if math.isnan(f.measured) else number(f.measured)
        table.add_row(
            state,
            escape(f.parameter),
            f.role,
            f.quantity,
            number(f.expected),
            measured,
            ratio,
            f.note,
        )
    return table
