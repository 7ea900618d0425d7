"""A check as HTML: one file that needs no other, in light and in dark."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

from .html import document, fragment, table
from .html import picture as drawn
from .report import number

if TYPE_CHECKING:
    from .health import CheckReport


def page(report: CheckReport) -> str:
    """A whole file."""
    return document(f"moments check: {report.source}", _body(report, picture=True))


def notebook(report: CheckReport) -> str:
    """What a notebook shows, which has the picture beside it."""
    return fragment(_body(report, picture=False))


def _body(report: CheckReport, *, picture: bool) -> str:
    count = len(report.findings)
    state = f"{count} finding{'s' * (count > 1)}" if count else "nothing found wrong"
    parts = [f"<h1>{escape(report.source)}: {state}</h1>"]
    parts.append(f'<p class="soft">{escape(report.verdict())}</p>')
    for found in report.findings:
        names = ", ".join(f"<code>{escape(name)}</code>" for name in found.parameters)
        parts.append(
            f'<div class="card {found.severity}"><span class="kind">{found.severity}: '
            f"{escape(found.kind)}</span> {names}<br>{escape(found.reason)}<br>"
            f'<span class="soft">Mend:</span> {escape(found.mend)}</div>'
        )
    parts.append("<h2>Measured beside expected</h2>" if report.read else "<h2>Predicted</h2>")
    heads = ("number", "parameter", "measured", "expected", "95 % of draws")
    rows = [
        (
            n.quantity,
            n.parameter,
            _shown(n.measured) + " (out)" * (n.state == "out"),
            _shown(n.expected),
            f"{_shown(n.low)} to {_shown(n.high)}" if math.isfinite(n.low) else "",
        )
        for n in report.numbers
    ]
    out = {(place, 2) for place, n in enumerate(report.numbers) if n.state == "out"}
    parts.append(table(heads, rows, text={0, 1}, out=out))
    if picture:
        parts.append(drawn(report.plot()))
        parts += ["<h2>What number formats lose</h2>", _precision(report)]
    for title, said in (("Notes", report.notes), ("Not checked", report.unchecked)):
        if said:
            items = "".join(f"<li>{escape(words)}</li>" for words in said)
            parts.append(f"<h2>{title}</h2><ul>{items}</ul>")
    return "".join(parts)


def _shown(value: float) -> str:
    return "" if math.isnan(value) else number(value)


def _precision(report: CheckReport) -> str:
    """The worst point of every format, each way."""
    rows = []
    frame = report.precision()
    for (form, way), sites in frame.groupby(["format", "way"], sort=False):
        worst: Any = (
            sites.assign(lost=sites["zero"] + sites["overflow"]).sort_values("lost").iloc[-1]
        )
        shares = (f"{100 * worst[name]:.3g} %" for name in ("zero", "subnormal", "overflow"))
        where = f"{worst['site']}, layer {int(worst['layer'])}"
        rows.append((f"{form}, {way}", where, *shares))
    heads = ("unscaled, at its worst point", "point", "become 0", "subnormal", "overflow")
    return table(heads, rows, text={0, 1})
