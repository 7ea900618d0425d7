"""Self-contained HTML from the templates of this folder: light, dark and print styles, tables, and
matplotlib pictures as SVG.

A page is a `fragment`, for notebooks, or a `document` around one.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATES = Environment(
    loader=PackageLoader("moments.show"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)

_COLOURS = {
    "#000000": "--ink",
    palette.BLACK: "--ink",
    palette.SOFT: "--soft",
    palette.GREY: "--soft",
    palette.PALE: "--edge",
    palette.BLUE: "--signal",
    palette.VERMILION: "--gradient",
    palette.GREEN: "--third",
    palette.PURPLE: "--fourth",
    palette.ORANGE: "--fifth",
    palette.SKY: "--sixth",
}
"""Colours of pictures, as variables of page.css that follow the reader's theme."""


def render(template: str, **values: Any) -> Markup:
    """Fill a template; strings are escaped unless they are Markup."""
    return Markup(TEMPLATES.get_template(template).render(**values))


def fragment(body: str) -> str:
    """HTML with its style, for use inside another page."""
    return str(render("fragment.html", body=Markup(body)))


def document(title: str, body: str) -> str:
    """A complete HTML file; folded parts open for printing."""
    return str(render("page.html", title=title, body=Markup(body)))


def picture(figure: Figure) -> Markup:
    """A figure as SVG whose colours follow the page's theme."""
    import matplotlib

    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moments"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Text without a colour attribute is black by default.
    text = re.sub(r"<svg ", '<svg style="fill: var(--ink)" ', text, count=1)
    for colour, name in _COLOURS.items():
        text = text.replace(colour, f"var({name})")
    return Markup(f'<div class="wide">{text}</div>')
