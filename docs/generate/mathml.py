"""LaTeX as MathML at build time: pages need no script and no network to show a formula."""

from __future__ import annotations

import functools
import html
import re

# What latex2mathml does not know, in what it does.
PLAIN = {
    r"\tfrac": r"\frac",
    r"\dfrac": r"\frac",
    r"\big(": "(",
    r"\big)": ")",
    r"\Big(": "(",
    r"\Big)": ")",
    r"\big[": "[",
    r"\big]": "]",
    r"\Big[": "[",
    r"\Big]": "]",
    r"\,": r"\,",
}


@functools.cache
def mathml(latex: str, block: bool) -> str:
    """One formula.

    Raises:
        ValueError: what is left would show as a command.
    """
    from latex2mathml.converter import convert

    for known, plain in PLAIN.items():
        latex = latex.replace(known, plain)
    latex = re.sub(r"(\w)'\}", r"\1\\prime}", latex)  # a prime in an index stands beside it
    found = convert(latex, display="block" if block else "inline")
    unknown = re.search(r"<mi>\\\w+</mi>|<mo>\\\w+</mo>", found)
    if unknown:
        raise ValueError(f"no MathML for {unknown[0]} in {latex}")
    return found


SPAN = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.DOTALL)


def converted(page: str) -> str:
    """The page with every formula that the Markdown extension marked."""

    def one(match: re.Match[str]) -> str:
        inside = html.unescape(match[2]).strip()
        block = inside.startswith(r"\[")
        found = mathml(inside[2:-2].strip(), block)
        return f'<span class="math-block">{found}</span>' if block else found

    return SPAN.sub(one, page)
