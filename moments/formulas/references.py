"""The papers the laws cite, and their entries in BibTeX (`references.bib`, beside this file)."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from .law import Source

KEDIA = "Kedia et al. 2024, Transformers Get Stable (ICML)"
SUN = "Sun et al. 2025, The Curse of Depth"
NOCI = "Noci et al. 2022, Signal Propagation in Transformers"
CHO = "Cho and Saul 2009, Kernel Methods for Deep Learning"


def kedia(place: str) -> Source:
    """A place in Kedia et al. 2024, numbered as in the ICML text."""
    return Source(KEDIA, place)


_CITED = re.compile(r"([A-Z]\w+)(?: et al\.| and [A-Z]\w+)? ((?:19|20)\d\d)\b")


@functools.cache
def entries() -> dict[str, str]:
    """BibTeX entries by key: surname of the first author and year, such as "kedia2024"."""
    text = Path(__file__).with_name("references.bib").read_text(encoding="utf-8")
    blocks = [block.strip() for block in re.split(r"^(?=@)", text, flags=re.M) if block.strip()]
    return {re.split(r"[{,]", block)[1]: block for block in blocks}


def keys(source: str) -> list[str]:
    """Keys of the works cited in a source, as in "Liu et al. 2020" or "De and Smith 2020".

    A key need not have a BibTeX entry.
    """
    citations = _CITED.findall(source)
    plain = [(unicodedata.normalize("NFKD", name), year) for name, year in citations]
    return [f"{name.lower()}{year}" for name, year in plain]


def bibtex(sources: Iterable[str]) -> str:
    """The BibTeX entries of all works cited in the sources, sorted by key."""
    wanted = {key for source in sources for key in keys(source)}
    return "\n\n".join(entry for key, entry in sorted(entries().items()) if key in wanted)
