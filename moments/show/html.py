"""HTML of pages that need no other file: their style by day, by night and on paper, and tables.

A page is a `fragment`, which a notebook shows as it is, or a `document` around one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from . import palette
from .chart import ROLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SERIES = "; ".join(f"--{role}: {c}" for role, c in zip(ROLES, palette.SERIES, strict=True))

_STYLE = """
& { color-scheme: light dark; --ground: #ffffff; --ink: #1d1d1f; --soft: #5b5f66;
  --edge: #d8dbe0; --panel: #f6f7f9; SERIES; --held: #767676; --before: #8886; --outside: #a8527f;
  --alarm: #b80000; --warn: #e69f00; --good: #1f7a3d; background: var(--ground);
  color: var(--ink); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif }
@media (prefers-color-scheme: dark) { & { --ground: #15171a; --ink: #e8e8ea; --soft: #a5abb4;
  --edge: #363a41; --panel: #1e2126; --signal: #56b4e9; --gradient: #f0803c; --third: #2cc79c;
  --fourth: #e3a1c6; --fifth: #f0c04c; --sixth: #9fd4f5; --seventh: #dddddd; --held: #9a9a9a;
  --outside: #e3a3c4; --alarm: #ff7b72; --good: #6fcf8f } }
@media print { & { --ground: #ffffff; --ink: #000000; --soft: #444444; --edge: #bbbbbb;
  --panel: #ffffff; SERIES } }
& * { box-sizing: border-box }
& h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem }
& h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--edge) }
& p { margin: .4rem 0 } & .soft { color: var(--soft) } & .kind { font-weight: 600 }
& .card { background: var(--panel); border-left: 4px solid var(--soft); padding: .7rem 1rem;
  margin: 1rem 0 }
& .warning { border-left-color: var(--warn) } & .error { border-left-color: var(--alarm) }
& .charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(21rem, 1fr));
  gap: 1rem }
& .charts svg { width: 100% } & svg { max-width: 100%; height: auto }
& .wide { overflow-x: auto }
& table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
& th, & td { padding: .18rem .6rem; text-align: right; border-bottom: 1px solid var(--edge);
  white-space: nowrap }
& th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom }
& .text { text-align: left; white-space: normal }
& td.text:last-child { min-width: 14rem }
& td.out { color: var(--alarm); font-weight: 600 }
& tr.own td { background: var(--panel); font-weight: 600 }
& pre { background: var(--panel); border: 1px solid var(--edge); padding: .7rem;
  overflow-x: auto; font-size: 12.5px }
& summary { cursor: pointer; color: var(--soft); margin: .6rem 0 }
@media print { & { font-size: 10.5pt } & pre { white-space: pre-wrap }
  & .wide { overflow: visible } & table { font-size: 7.5pt } & th, & td { padding: .1rem .25rem }
  & td.text:last-child { min-width: 0 }
  & svg, & tr, & .card { break-inside: avoid } & h2 { break-after: avoid } }
""".replace("&", ".moments-page").replace("SERIES", _SERIES)

_WHOLE = """
:root { color-scheme: light dark } body { margin: 0 }
body > .moments-page { margin: 0; padding: 1.5rem max(1.5rem, calc(50vw - 31rem));
  min-height: 100vh } @media print { body > .moments-page { padding: 0 } }
"""

_OPEN_TO_PRINT = (
    "addEventListener('beforeprint',()=>document.querySelectorAll('details')"
    ".forEach(d=>{d.open=true}))"
)

_COLOURS = {
    "#000000": "--ink",
    palette.BLACK: "--ink",
    palette.SOFT: "--soft",
    palette.GREY: "--soft",
    palette.SIGNAL: "--signal",
    palette.GRADIENT: "--gradient",
    palette.OUTSIDE: "--outside",
    palette.PALE: "--edge",
    "#b0b0b0": "--edge",
}
"""Of pictures, as variables that follow the theme."""


def fragment(body: str, style: str = "") -> str:
    """What a page shows, with its style, to stand inside another page."""
    return f'<style>{_STYLE}{style}</style><div class="moments-page">{body}</div>'


def document(title: str, body: str, style: str = "") -> str:
    """A whole file; what is folded opens when it is printed."""
    script = f"<script>{_OPEN_TO_PRINT}</script>" if "<details" in body else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_WHOLE}</style></head>"
        f"<body>{fragment(body, style)}{script}</body></html>\n"
    )


def details(title: str, content: str) -> str:
    """What is folded away under a title."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def table(
    heads: Sequence[str],
    cells: Iterable[Sequence[str]],
    text: Collection[int] = (),
    marked: int = -1,
    out: Collection[tuple[int, int]] = (),
) -> str:
    """Cells; the columns `text` are read from the left, row `marked` is set apart, and the cells
    `out` (row, column) stand out."""

    def row(values: Sequence[str], tag: str, number: int) -> str:
        inside = ""
        for column, value in enumerate(values):
            kinds = ["text"] * (column in text) + ["out"] * ((number, column) in out)
            inside += f"<{tag} class={kinds[0]}>" if kinds else f"<{tag}>"
            inside += f"{escape(value)}</{tag}>"
        return f"<tr{' class=own' if number == marked >= 0 else ''}>{inside}</tr>"

    head = f"<thead>{row(heads, 'th', -1)}</thead>" if heads else ""
    lines = "".join(row(values, "td", number) for number, values in enumerate(cells))
    return f'<div class="wide"><table>{head}<tbody>{lines}</tbody></table></div>'


def picture(figure: Figure) -> str:
    """A figure as SVG whose colours follow the page's theme."""
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
    return f'<div class="wide">{text}</div>'
