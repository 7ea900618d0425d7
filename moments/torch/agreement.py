"""Whether two initialisers draw the same: a two-sample test for every tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import domain_error
from ..show.findings import Finding, Report, Row
from .entries import EntryMoments
from .roles import gathered_names
from .running import grouped
from .tensors import FALSE_ALARM

MOST = 1 << 16
"""Entries of a tensor whose distributions are compared; mean squares are of all."""


def same_initialization(ours: Any, theirs: Any) -> Report:
    """Whether the tensors of two freshly initialised modules are of the same distributions.

    Every tensor of one is compared with that of the same name and shape in the other: constants
    have to be equal; of drawn ones the mean squares are compared, with the sampling errors that
    their kurtosis gives them, and the distributions by the two-sample test of Kolmogorov and
    Smirnov. Two right initialisers fail with probability 1e-5, all tensors together. Tensors that
    are equal entry by entry pass. Shards (DTensor) are gathered.

    Args:
        ours, theirs: modules, or mappings of names to tensors such as state dicts.

    Returns:
        A Report: `passed`, `findings`, `to_frame()` with a row for each tensor.

    Raises:
        DomainError: neither a module nor a mapping of tensors.
    """
    one, other = (_tensors("ours", ours), _tensors("theirs", theirs))
    both = [name for name in one if name in other and one[name].shape == other[name].shape]
    rows = [row for name in both for row in _rows(name, one[name], other[name], len(both))]
    result = list(_absent(one, other))
    off = [row for row in rows if row.passed is False]
    for (quantity, words), group in grouped(off, lambda row: (row.quantity, row.note)).items():
        worst = max(group, key=lambda row: row.size)
        numbers = f"{worst.measured:.3g} here, {worst.expected:.3g} there, in {worst.parameter}"
        why = f"{words}: {quantity} {numbers}" if quantity != "distribution" else words
        of = gathered_names([row.parameter for row in group]), (), worst.measured, worst.expected
        mend = "draw both by the same code"
        result.append(Finding("error", "other initialisation", *of, why, mend))
    return Report(
        source=f"{type(ours).__name__} against {type(theirs).__name__}",
        scheme=f"{len(both)} tensors of the same names and shapes",
        findings=tuple(result),
        notes=(),
        unchecked=(),
        rows=tuple(sorted(rows, key=lambda row: -row.size)),
    )


def _tensors(argument: str, given: Any) -> dict[str, Tensor]:
    known: Any = given
    if isinstance(given, nn.Module):
        known = dict(given.named_parameters()) | dict(given.named_buffers())
    if not isinstance(known, Mapping) or not all(isinstance(v, Tensor) for v in known.values()):
        allowed = "an nn.Module or a mapping of names to tensors"
        raise domain_error(argument, type(given).__name__, allowed)
    whole = {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in known.items()}
    return {name: v.detach() for name, v in whole.items() if v.is_floating_point()}


def _absent(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[Finding]:
    for here, there, words in ((one, other, "there"), (other, one, "here")):
        lacking = [name for name in here if name not in there]
        if lacking:
            names = gathered_names(lacking)
            why = f"no tensor of this name {words}"
            yield Finding("warning", "no counterpart", names, reason=why, mend="rename it")
    shapes = [n for n in one if n in other and one[n].shape != other[n].shape]
    if shapes:
        first = shapes[0]
        why = f"shapes differ: {tuple(one[first].shape)} and {tuple(other[first].shape)} of {first}"
        yield Finding("warning", "other shape", gathered_names(shapes), reason=why)


def _rows(name: str, one: Tensor, other: Tensor, count: int) -> Iterator[Row]:
    """What is compared of one tensor."""
    limit = FALSE_ALARM / (2 * max(count, 1))  # Bonferroni
    if torch.equal(one.cpu(), other.cpu()):
        yield Row(0, "", name, "variance", _square(other), _square(one), True, "equal")
        return
    a, b = EntryMoments.of(one), EntryMoments.of(other)
    if not (math.isfinite(a.square) and math.isfinite(b.square)):
        yield Row(0, "", name, "variance", b.square, a.square, False, "entries are not finite")
        return
    drawn = a.kurtosis > 1 and b.kurtosis > 1 and a.square > 0 and b.square > 0
    if not drawn:
        note = "constant entries differ"
        yield Row(0, "", name, "variance", b.square, a.square, False, note)
        return
    from scipy.special import kolmogorov

    spread = math.hypot(a.spread, b.spread)
    away = abs(math.log(a.square / b.square)) / spread
    chance = math.erfc(away / math.sqrt(2))
    note = "" if chance >= limit else "mean squares differ"
    stderr = b.square * spread
    yield Row(0, "", name, "variance", b.square, a.square, chance >= limit, note, stderr, chance)
    if chance < limit:
        return  # which the test of distributions would say again
    x, y = (np.sort(_some(part)) for part in (one, other))
    every = np.concatenate([x, y])
    steps = (np.searchsorted(part, every, "right") / part.size for part in (x, y))
    distance = float(np.max(np.abs(np.subtract(*steps))))
    chance = float(kolmogorov(distance * math.sqrt(x.size * y.size / (x.size + y.size))))
    words = f"{a.distribution or 'one'} here, {b.distribution or 'another'} there"
    note = "" if chance >= limit else f"distributions differ: entries look {words}"
    of = 0, "", name, "distribution", 0.0, distance, chance >= limit, note
    yield Row(*of, probability=chance)


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().mean()) if tensor.numel() else 0.0


def _some(tensor: Tensor) -> np.ndarray:
    """Entries spread evenly over a tensor."""
    flat = tensor.reshape(-1)
    step = max(1, flat.numel() // MOST)
    return np.asarray(flat[::step].double().cpu().numpy())
