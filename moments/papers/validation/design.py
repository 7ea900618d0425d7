"""Orthogonal arrays of two- and four-level factors in a power of two of runs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Masks = tuple[int, ...]


def _bits(levels: Sequence[Any]) -> int:
    """Two levels take one parity of the run's bits, four take two."""
    return {2: 1, 4: 2}[len(levels)]


def _span(masks: Masks) -> frozenset[int]:
    """Nonzero vectors of the subspace over GF(2) that the masks generate."""
    vectors = {0}
    for mask in masks:
        vectors |= {vector ^ mask for vector in vectors}
    return frozenset(vectors - {0})


def _level(run: int, masks: Masks) -> int:
    """The level whose binary digits are the parities of the run's bits under each mask."""
    return sum(((run & mask).bit_count() & 1) << place for place, mask in enumerate(masks))


def _parities(
    crossed: Mapping[str, Sequence[Any]], fractional: Mapping[str, Sequence[Any]], seed: int
) -> dict[str, Masks]:
    parities: dict[str, Masks] = {}
    bits = 0
    for name, levels in crossed.items():
        parities[name] = tuple(1 << (bits + place) for place in range(_bits(levels)))
        bits += _bits(levels)
    search = random.Random(seed)
    while True:
        chosen = dict(parities)
        taken = frozenset[int]().union(
            *(_span(a + b) for a, b in combinations(parities.values(), 2))
        )
        for name, levels in fractional.items():
            free = [mask for mask in range(1, 1 << bits) if mask not in taken]
            options = [m for m in combinations(free, _bits(levels)) if not _span(m) & taken]
            if not options:
                break
            chosen[name] = search.choice(options)
            taken |= _span(chosen[name])
        else:
            return chosen


def orthogonal_array(
    crossed: Mapping[str, Sequence[Any]], fractional: Mapping[str, Sequence[Any]], seed: int
) -> list[dict[str, Any]]:
    """One dictionary of levels by factor for each run; every factor has two or four levels.

    Runs are numbered by bits. The `crossed` factors are the bits themselves, so each combination of
    their levels occurs exactly once. Every `fractional` factor is one parity of the bits, or two.
    Factors whose parities span subspaces of GF(2)^bits that meet in 0 take every combination of
    their levels equally often. A seeded search, which sees nothing but these subspaces, chooses
    parities for which this holds

    - for any two factors (strength 2), and
    - for every fractional factor with any two crossed ones.

    It does not end where no such parities exist.
    """
    factors = {**crossed, **fractional}
    parities = _parities(crossed, fractional, seed)
    bits = sum(_bits(levels) for levels in crossed.values())
    return [
        {name: factors[name][_level(run, masks)] for name, masks in parities.items()}
        for run in range(1 << bits)
    ]
