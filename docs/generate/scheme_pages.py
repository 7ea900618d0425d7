"""Schemes from the registry, a page per family: what each is and sets, its options, its sources."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

from components import QUICK

import moments
from moments.scheme import Scheme
from moments.show.plot import FAMILIES, family
from moments.show.scheme_table import input_options

SCHEMES = [s for s in moments.schemes() if not QUICK or s.name in ("xavier", "dslm", "t-fixup")]
BASE = {"layers": 24, "d_model": 128, "heads": 4, "seq_len": 64, "dropout": 0.1}


def page_of(scheme: Scheme) -> str:
    """The page that has a scheme."""
    return family(scheme).replace(" ", "-")


def navigation() -> list[Any]:
    """Entries of the section."""
    shown = {page_of(s) for s in SCHEMES}
    titles = [(title, title.replace(" ", "-")) for title in FAMILIES]
    return [
        "scheme/index.md",
        *({title.capitalize(): f"scheme/{page}.md"} for title, page in titles if page in shown),
    ]


def pages() -> dict[str, str | bytes]:
    """A page per family and an index."""
    found = {}
    for title in FAMILIES:
        own = [s for s in SCHEMES if family(s) == title]
        if own:
            text = [f"# Schemes of {title}", "", *map(_section, own)]
            found[f"scheme/{page_of(own[0])}.md"] = "\n".join(text)
    rows = [
        f"| [`{s.name}`]({page_of(s)}.md#{s.name}) | {s.title} | "
        f"{', '.join(f'`{f}`' for f in s.sets)} | {', '.join(s.placements) or 'any'} |"
        for s in SCHEMES
    ]
    found["scheme/index.md"] = "\n".join(
        [
            "# Schemes",
            "",
            "Published initialisation and scaling schemes. `model.with_scheme(NAME)` applies one, "
            "`moments.compare_schemes(model)` predicts all, "
            "[which scheme?](../how-to/which-scheme.md) helps to choose, and "
            "[every scheme measured](../schemes.md) holds each against simulation.",
            "",
            "| scheme | what it is | sets | norm of its authors |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )
    return dict(found)


def _section(scheme: Scheme) -> str:
    lines = [f"## {scheme.name} {{ #{scheme.name} }}", "", f"{_greek(scheme.title)}.", ""]
    lines += [f"Source: {scheme.source}.", ""]
    lines += [f"It sets {', '.join(f'`{name}`' for name in scheme.sets)}.", ""]
    if scheme.placements:
        lines += [f"Its authors' placement of the norm: {' or '.join(scheme.placements)}.", ""]
    doc = inspect.getdoc(scheme.transform)
    if doc:
        lines += ["```text", doc, "```", ""]
    if scheme.options:
        lines += ["| option | default |", "| --- | --- |"]
        lines += [f"| `{name}` | `{value!r}` |" for name, value in scheme.options.items()]
        lines.append("")
    return "\n".join(lines + _numbers(scheme))


def _numbers(scheme: Scheme) -> list[str]:
    norm = scheme.placements[0] if scheme.placements else "pre"
    plain = moments.Transformer(**BASE, norm=norm)
    options = input_options(plain, scheme, {"correlation": 0.25})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = moments.predict(plain.with_scheme(scheme.name, **options), correlation=0.25)
    given = "".join(f", {name}={value!r}" for name, value in options.items())
    return [
        "```python",
        "import moments",
        "",
        f"model = moments.Transformer({', '.join(f'{k}={v!r}' for k, v in BASE.items())}, "
        f"norm={norm!r})",
        f"scaled = model.with_scheme({scheme.name!r}{given})",
        "prediction = moments.predict(scaled, correlation=0.25)",
        "```",
        "",
        "| after | variance | correlation | gradient variance, mean | typical draw |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {n} layers | {p.variance[n]:.4g} | {p.correlation[n]:.3f} | "
            f"{p.grad_variance[n]:.4g} | {p.grad_variance_typical[n]:.4g} |"
            for n in (0, 1, 6, 12, 24)
        ),
        "",
    ]


def _greek(text: str) -> str:
    letters = {"lambda": "λ", "beta": "β", "alpha": "α", "sigma": "σ", "^2": "²"}
    return re.sub(r"\b(?:lambda|beta|alpha|sigma)\b|\^2", lambda m: letters[m.group()], text)
