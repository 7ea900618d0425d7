"""The papers the laws cite."""

from __future__ import annotations

from .law import Source

KEDIA = "Kedia et al. 2024, Transformers Get Stable (ICML)"
SUN = "Sun et al. 2025, The Curse of Depth"
NOCI = "Noci et al. 2022, Signal Propagation in Transformers"
CHO = "Cho and Saul 2009, Kernel Methods for Deep Learning"


def kedia(place: str) -> Source:
    """A place in Kedia et al. 2024, numbered as in the ICML text."""
    return Source(KEDIA, place)
