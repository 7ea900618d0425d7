"""Tables of docs: each stands between two comments that name it, and a script writes it anew.

    <!-- table real-modules -->
    | module | ...
    <!-- end -->

`python benchmarks/NAME.py table` prints its table and puts it there, with the day on which the
predictions in it were made.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]], words: int = 1) -> str:
    """A table; all but the first `words` columns are numbers."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|" + "---|" * words + "--:|" * (len(header) - words))
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines)


def percent(value: float, stderr: float = math.nan, *, signed: bool = False) -> str:
    """In percent, with its standard error where there is one."""
    if not math.isfinite(value):
        return ""
    text = f"{100 * value:+.1f}" if signed else f"{100 * value:.1f}"
    return text if math.isnan(stderr) else f"{text}±{100 * stderr:.1f}"


def put(page: str, name: str, *parts: str, dated: bool = True) -> None:
    """Print a table, and write it into docs/PAGE.md at its place, with today's date."""
    said = [f"(Predicted on {datetime.date.today():%d %B %Y}.)"] if dated else []
    body = "\n\n".join([*parts, *said])
    print(body)
    path = DOCS / f"{page}.md"
    whole = path.read_text(encoding="utf-8")
    place = re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)", re.S)
    assert place.search(whole), f"{path} has no place for the table {name}"
    path.write_text(place.sub(rf"\g<1>{_literal(body)}\n\g<2>", whole), encoding="utf-8")


def _literal(text: str) -> str:
    return text.replace("\\", "\\\\")
