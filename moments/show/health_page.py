"""A check as HTML: one file that needs no other, in light and in dark."""

from __future__ import annotations

import io
import math
import re
from html import escape
from typing import TYPE_CHECKING, Any

from . import palette
from .report import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .health import CheckReport

_COLOURS = {
    "#000000": "--ink",
    palette.BLACK: "--ink",
    palette.SOFT: "--soft",
    palette.GREY: "--soft",
    palette.SIGNAL: "--forward",
    palette.GRADIENT: "--backward",
    palette.OUTSIDE: "--outside",
    palette.PALE: "--line",
    "#b0b0b0": "--line",
}
"""Of the pictures, as variables that follow the theme."""

_STYLE = """
.moments-check { --ink:#1d1d1f; --soft:#5b5b60; --line:#c9c9ce; --paper:#ffffff; --card:#f5f5f7;
  --forward:#0072b2; --backward:#d55e00; --outside:#a8527f; --alarm:#b80000;
  --warn:#8a5a00; --good:#1f7a3d;
  color:var(--ink); background:var(--paper); font:15px/1.5 system-ui,sans-serif; }
@media (prefers-color-scheme: dark) { .moments-check { --ink:#ececf0; --soft:#a9a9b2;
  --line:#4a4a52; --paper:#17171a; --card:#232328; --forward:#6cb8f0; --backward:#f0937d;
  --outside:#e3a3c4;
  --alarm:#ff7b72; --warn:#e3b341; --good:#6fcf8f; } }
.moments-check h1 { font-size:1.35em; margin:0 0 .3em; } .moments-check h2 { font-size:1.1em; }
.moments-check .verdict { margin:0 0 1em; } .moments-check .soft { color:var(--soft); }
.moments-check .card { background:var(--card); border-left:4px solid var(--line);
  padding:.6em .9em; margin:.6em 0; } .moments-check .error { border-color:var(--alarm); }
.moments-check .warning { border-color:var(--warn); } .moments-check code { font-size:.92em; }
.moments-check .healthy { border-color:var(--good); }
.moments-check .kind { font-weight:600; } .moments-check .scroll { overflow-x:auto; }
.moments-check table { border-collapse:collapse; font-size:.93em; }
.moments-check th, .moments-check td { padding:.25em .7em; text-align:right;
  border-bottom:1px solid var(--line); white-space:nowrap; } .moments-check th:first-child,
.moments-check th:nth-child(2), .moments-check td:first-child,
.moments-check td.name { text-align:left; }
.moments-check td.out { color:var(--alarm); font-weight:600; }
.moments-check svg { max-width:100%; height:auto; }
"""


def page(report: CheckReport) -> str:
    """A whole file."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>moments check: {escape(report.source)}</title>"
        "<style>body { margin:0; } body > .moments-check { padding:1.5em; min-height:100vh; "
        "box-sizing:border-box; } .moments-check > * { max-width:62em; }</style></head>"
        f"<body>{fragment(report, picture=True)}</body></html>\n"
    )


def fragment(report: CheckReport, *, picture: bool = False) -> str:
    """What a notebook shows; with its picture only where asked for."""
    parts = [f"<style>{_STYLE}</style>", '<div class="moments-check">']
    count = len(report.findings)
    state = f"{count} finding{'s' * (count > 1)}" if count else "nothing found wrong"
    parts.append(f"<h1>{escape(report.source)}: {state}</h1>")
    parts.append(f'<p class="verdict soft">{escape(report.verdict())}</p>')
    for found in report.findings:
        names = ", ".join(f"<code>{escape(name)}</code>" for name in found.parameters)
        parts.append(
            f'<div class="card {found.severity}"><span class="kind">{found.severity}: '
            f"{escape(found.kind)}</span> {names}<br>{escape(found.reason)}<br>"
            f'<span class="soft">Mend:</span> {escape(found.mend)}</div>'
        )
    parts.append("<h2>Measured beside expected</h2>" if report.read else "<h2>Predicted</h2>")
    heads = ("number", "parameter", "measured", "expected", "95 % of draws")
    rows: list[tuple[str, ...]] = [
        (
            n.quantity,
            n.parameter,
            _shown(n.measured),
            _shown(n.expected),
            f"{_shown(n.low)} to {_shown(n.high)}" if math.isfinite(n.low) else "",
            n.state,
        )
        for n in report.numbers
    ]
    parts.append(_table(heads, rows))
    if picture:
        parts.append(f'<div class="scroll">{svg(report.plot())}</div>')
        parts += ["<h2>What number formats lose</h2>", _precision(report)]
    for title, said in (("Notes", report.notes), ("Not checked", report.unchecked)):
        if said:
            items = "".join(f"<li>{escape(words)}</li>" for words in said)
            parts.append(f"<h2>{title}</h2><ul>{items}</ul>")
    return "".join([*parts, "</div>"])


def _shown(value: float) -> str:
    return "" if math.isnan(value) else number(value)


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Rows end with their state, which is a colour and a word."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = ""
    for *cells, state in rows:
        marks = ["name", "name", *[""] * len(cells)]
        out = ' class="out"' if state == "out" else ""
        filled = "".join(
            f"<td{out if place == 2 else f' class={mark!r}' if mark else ''}>{escape(cell)}"
            f"{' (out)' if out and place == 2 else ''}</td>"
            for place, (cell, mark) in enumerate(zip(cells, marks, strict=False))
        )
        body += f"<tr>{filled}</tr>"
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _precision(report: CheckReport) -> str:
    """The worst point of every format, each way."""
    rows: list[tuple[str, ...]] = []
    frame = report.precision()
    for (form, way), own in frame.groupby(["format", "way"], sort=False):
        worst: Any = own.assign(lost=own["zero"] + own["overflow"]).sort_values("lost").iloc[-1]
        shares = (f"{100 * worst[name]:.3g} %" for name in ("zero", "subnormal", "overflow"))
        where = f"{worst['site']}, layer {int(worst['layer'])}"
        rows.append((f"{form}, {way}", where, *shares, ""))
    heads = ("unscaled, at its worst point", "point", "become 0", "subnormal", "overflow")
    return _table(heads, rows)


def svg(figure: Figure) -> str:
    """A picture as SVG whose colours follow the page's theme."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moments"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Text without a colour of its own is black by default.
    text = re.sub(r"<svg ", '<svg style="fill: var(--ink)" ', text, count=1)
    for colour, name in _COLOURS.items():
        text = text.replace(colour, f"var({name})")
    return text
