"""A two-sample test of every tensor of two initialisations."""

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
"""Entries of a tensor whose distribution is compared; mean squares are of all entries."""


def same_initialization(ours: Any, theirs: Any) -> Report:
    """Whether the tensors of two freshly initialised modules have the same distributions.

    Tensors of the same name and shape are compared: constants have to be equal; of random entries
    the mean squares are compared, with sampling errors by their kurtosis, and the distributions by
    the two-sample test of Kolmogorov and Smirnov. Two equal initialisers fail with probability 1e-5
    over all tensors together. Tensors with equal entries pass. Shards (DTensor) are gathered.

    Args:
        ours, theirs: modules, or mappings of names to tensors such as state dicts.

    Returns:
        A Report: `passed`, `findings`, `to_frame()` with a row for each tensor.

    Raises:
        DomainError: neither a module nor a mapping of tensors.
    """
    a, b = _tensors("ours", ours), _tensors("theirs", theirs)
    common = [name for name in a if name in b and a[name].shape == b[name].shape]
    rows = [row for name in common for row in _rows(name, a[name], b[name], len(common))]
    findings = list(_absent(a, b))
    failed = [row for row in rows if row.passed is False]
    for (quantity, words), group in grouped(failed, lambda row: (row.quantity, row.note)).items():
        worst = max(group, key=lambda row: row.size)
        numbers = f"{worst.measured:.3g} here, {worst.expected:.3g} there, in {worst.parameter}"
        why = f"{words}: {quantity} {numbers}" if quantity != "distribution" else words
        names, mend = gathered_names([r.parameter for r in group]), "draw both by the same code"
        stated = names, (), worst.measured, worst.expected
        findings.append(Finding("error", "other initialisation", *stated, why, mend))
    return Report(
        source=f"{type(ours).__name__} against {type(theirs).__name__}",
        scheme=f"{len(common)} tensors of the same names and shapes",
        findings=tuple(findings),
        notes=(),
        unchecked=(),
        rows=tuple(sorted(rows, key=lambda row: -row.size)),
    )


def _tensors(argument: str, value: Any) -> dict[str, Tensor]:
    named: Any = value
    if isinstance(value, nn.Module):
        named = dict(value.named_parameters()) | dict(value.named_buffers())
    if not isinstance(named, Mapping) or not all(isinstance(v, Tensor) for v in named.values()):
        allowed = "an nn.Module or a mapping of names to tensors"
        raise domain_error(argument, type(value).__name__, allowed)
    whole = {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in named.items()}
    return {name: v.detach() for name, v in whole.items() if v.is_floating_point()}


def _absent(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Findings on tensors without one of the same name and shape in the other module."""
    for these, those, words in ((a, b, "there"), (b, a, "here")):
        if missing := [name for name in these if name not in those]:
            names, why = gathered_names(missing), f"no tensor of this name {words}"
            yield Finding("warning", "no counterpart", names, reason=why, mend="rename it")
    shapes = [name for name in a if name in b and a[name].shape != b[name].shape]
    if shapes:
        first = shapes[0]
        why = f"shapes differ: {tuple(a[first].shape)} and {tuple(b[first].shape)} of {first}"
        yield Finding("warning", "other shape", gathered_names(shapes), reason=why)


def _rows(name: str, ours: Tensor, theirs: Tensor, count: int) -> Iterator[Row]:
    """The checks of one tensor of `count`."""
    limit = FALSE_ALARM / (2 * max(count, 1))  # Bonferroni
    where = 0, "", name, "variance"
    if torch.equal(ours.cpu(), theirs.cpu()):
        yield Row(*where, _square(theirs), _square(ours), True, "equal")
        return
    a, b = EntryMoments.of(ours), EntryMoments.of(theirs)
    if not (math.isfinite(a.square) and math.isfinite(b.square)):
        yield Row(*where, b.square, a.square, False, "entries are not finite")
        return
    if not (a.kurtosis > 1 and b.kurtosis > 1 and a.square > 0 and b.square > 0):
        yield Row(*where, b.square, a.square, False, "constant entries differ")
        return
    from scipy.special import kolmogorov

    spread = math.hypot(a.spread, b.spread)
    deviations = abs(math.log(a.square / b.square)) / spread
    p = math.erfc(deviations / math.sqrt(2))
    note = "" if p >= limit else "mean squares differ"
    yield Row(*where, b.square, a.square, p >= limit, note, b.square * spread, p)
    if p < limit:
        return  # distributions of unlike variance differ
    x, y = (np.sort(_some(tensor)) for tensor in (ours, theirs))
    every = np.concatenate([x, y])
    steps = (np.searchsorted(part, every, "right") / part.size for part in (x, y))
    distance = float(np.max(np.abs(np.subtract(*steps))))
    p = float(kolmogorov(distance * math.sqrt(x.size * y.size / (x.size + y.size))))
    words = f"{a.distribution or 'one'} here, {b.distribution or 'another'} there"
    note = "" if p >= limit else f"distributions differ: entries look {words}"
    yield Row(0, "", name, "distribution", 0.0, distance, p >= limit, note, probability=p)


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().mean()) if tensor.numel() else 0.0


def _some(tensor: Tensor) -> np.ndarray:
    """Some of a tensor's entries, at equal distances."""
    flat = tensor.reshape(-1)
    step = max(1, flat.numel() // MOST)
    return np.asarray(flat[::step].double().cpu().numpy())
