"""One block as a function of a factor on its free matrices' variances.

What stands before the first of them is propagated once; behind it means and variances suffice to
find the factor. The accepted one is propagated in full, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.composition import Chain, Component, Leaf, OfEntry, Pullback, Residual, forward
from ..engine.layout import SequenceLayout
from ..engine.state import Signal
from ..errors import DomainError
from ..layers.attention.self_attention import Attention
from ..model.transformer import Transformer
from .goals import matrices_of

# --- the factor that gives a variance -------------------------------------------------------------

LIMIT = math.log(1e12)
"""Largest logarithm of a factor on a variance that is tried."""

CLOSE = 1e-13
"""Relative distance at which a root is one, a few roundings."""

SECANTS = 12


def factor_for(
    output: Callable[[float], float], aim: float, count: int, ends: tuple[float, float]
) -> tuple[float, float]:
    """The factor on `count` variances at which `output` is `aim`, and the output there.

    In one step where the output is the factor to the power `count`; elsewhere by secants in
    logarithms, and a bracketed root where they stray. Where there is none, the end of the range,
    `ends` as logarithms of the factor, that comes nearest. DomainError where the output does not
    depend on it.
    """

    def distance(log: float) -> float:
        value = output(math.exp(log))
        if not 0 < value < math.inf:
            return math.copysign(math.inf, value - 1)
        ratio = value / aim
        return math.log(ratio) if 0 < ratio < math.inf else math.log(value) - math.log(aim)

    low, high = ends
    before = min(0.0, high)
    far = distance(before)
    start = min(max(before - far / count, low), high)
    log, slope = start, float(count)
    for _ in range(SECANTS):
        last, far = far, distance(log)
        if abs(far) <= CLOSE:
            return math.exp(log), output(math.exp(log))
        if log != before and math.isfinite(far - last):
            slope = (far - last) / (log - before)
        if not (0.1 < slope / count < 10 and math.isfinite(far)):
            break
        before, log = log, min(max(log - far / slope, low), high)
    log = _bracketed(distance, start, ends)
    return math.exp(log), output(math.exp(log))


def _bracketed(
    distance: Callable[[float], float], start: float, ends: tuple[float, float]
) -> float:
    """Where `distance` is 0, from an interval around `start` that grows; or the nearer end."""
    from scipy.optimize import brentq

    width, below, above = 1e-2, 1.0, 1.0
    low = high = start
    while below * above > 0 and (low > ends[0] or high < ends[1]):
        low, high = max(start - width, ends[0]), min(start + width, ends[1])
        below, above, width = distance(low), distance(high), 4 * width
    if below * above <= 0:
        return float(brentq(distance, low, high, xtol=1e-15, rtol=1e-14))
    if abs(above - below) < 1e-9:
        raise DomainError("a block's output does not depend on its free matrices")
    return low if abs(below) < abs(above) else high


# --- one block ------------------------------------------------------------------------------------

MATRICES = {
    "attention": ("value", "output"),
    "cross": ("cross_value", "cross_output"),
    "ffn": ("ffn_in", "gate", "ffn_out"),
}
SOLVABLE = tuple(name for names in MATRICES.values() for name in names)


def solvable(model: Transformer) -> tuple[str, ...]:
    """Those of a model."""
    return tuple(name for name in SOLVABLE if name in matrices_of(model))


@dataclass(frozen=True)
class KnownOutput(Leaf):
    """Stands for components whose output is known already."""

    output: Signal
    label: str = "given"

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        return self.output, _no_way_back


def _no_way_back(_: Any) -> Any:
    raise DomainError("a solver's walk goes forward only")


class FreeBlock:
    """A chain of components ("attention", "cross" or "ffn", norms before and scales behind
    included), whose free matrices share one factor, entered by a signal; `memory` is what
    cross-attention reads."""

    def __init__(
        self,
        name: str,
        parts: tuple[Component, ...],
        free: tuple[str, ...],
        signal: Signal,
        layout: SequenceLayout,
        memory: Signal | None,
    ) -> None:
        self.name, self.layout, self.memory = name, layout, memory
        free = self.free = tuple(matrix for matrix in MATRICES[name] if matrix in free)
        first = next((i for i, part in enumerate(parts) if holds(part, free)), len(parts))
        last = next((i for i, part in enumerate(parts) if part.label == f"{name}.dropout"), -1)
        end = max(first, last + 1)
        self.entering = forward(Chain(parts[:first]), signal, self.memory)[0]
        self.tail, self.rest = parts[first:end], parts[end:]
        self.heads: Signal | None = None
        if self.tail and self.tail[0].mixes_tokens:
            self._attend()
        self._stages = [self._stage(part) for part in self.tail]
        self._behind = [self._stage(part) for part in self.rest]
        self._start = self.entering.mean, self.entering.kernel.diagonal
        self.ends = -LIMIT, min(LIMIT, self._resolved())
        self._in_full = 1.0

    def output(self, factor: float) -> float:
        """Variance of the block's output, before any scale of the branch; averaged over tokens."""
        return self._through(self._stages, factor)

    def added(self, factor: float) -> float:
        """Variance of what is added to the stream, before branch_scale."""
        return self._through(self._stages + self._behind, factor)

    def propagated(self, factor: float) -> Signal:
        """What is added to the stream, in full."""
        parts, signal = self.tail, self.entering
        if self.heads is not None and self._proportional:
            heads = self.heads
            varies = None if heads.fluctuation is None else heads.fluctuation.scaled(factor)
            signal = heads.replace(kernel=heads.kernel.scaled(factor), fluctuation=varies)
            parts = parts[1:]
        whole = Chain(tuple(part.with_variances(self.free, factor) for part in parts) + self.rest)
        return forward(whole, signal, self.memory)[0]

    def settles(self, factor: float, added: float) -> bool:
        """Whether the block in full adds another variance than its entries say, as experts do whose
        gates and outputs depend on one overlap; the ratio is taken from here on."""
        ratio = added / self.added(factor) if added else 1.0
        if not abs(ratio - 1.0) > 10 * CLOSE:
            return False
        self._in_full *= ratio
        return True

    # --- means and variances -------------------------------------------------------------------

    def _through(self, stages: list[OfEntry], factor: float) -> float:
        moments = self._start
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for stage in stages:
                moments = stage(moments, factor)
        return self._in_full * float(self.layout.average(moments[1]))

    def _resolved(self) -> float:
        """Logarithm of the factor up to which an activation's laws are resolved."""
        moments, algebra = self._start, self.entering.algebra
        for part, stage in zip(self.tail, self._stages, strict=True):
            share = float(np.max(part.domain_share(*moments, algebra)))
            if share > 0.0:
                return -math.log(share)
            moments = stage(moments, 1.0)
        return LIMIT

    def _attend(self) -> None:
        """The heads' variance is affine in that of the value matrix: its bias is the constant."""
        attention = self.tail[0]
        if not isinstance(attention, Attention):
            raise DomainError(
                f"{attention.label or 'a mixer'} has no inversion: solve for final_variance, or "
                "leave value out of free"
            )
        self.heads = forward(attention, self.entering, self.memory)[0]
        self._proportional = not np.any(attention.value_bias)
        self._slope, self._constant = self.heads.kernel.diagonal, 0.0
        if not self._proportional:
            doubled = attention.with_variances(attention.matrices, 2.0)
            more = forward(doubled, self.entering, self.memory)[0]
            self._slope = more.kernel.diagonal - self.heads.kernel.diagonal
            self._constant = self.heads.kernel.diagonal - self._slope

    def _stage(self, part: Component) -> OfEntry:
        if part.mixes_tokens and part.matrices:
            return lambda _, factor: (0.0, self._slope * factor + self._constant)
        stage = part.of_entry(self.entering.algebra, self.free)
        if stage is None:
            label = part.label or "a sum of parallel blocks"
            raise DomainError(f"{label} has no inversion: solve for another objective")
        return stage


# --- components -----------------------------------------------------------------------------------


def flat(component: Component) -> tuple[Component, ...]:
    """The parts of nested chains, in order."""
    if isinstance(component, Chain):
        return tuple(part for inner in component.children for part in flat(inner))
    return (component,)


def blocks_of(
    node: Residual,
) -> tuple[tuple[Component, ...], list[tuple[str, tuple[Component, ...]]]]:
    """What blocks in parallel share before them, and every block's name and parts."""
    parts = flat(node.branch)
    if not parts[-1].splits:
        return (), [(node.label.partition(".")[0], parts)]
    blocks = []
    for each in map(flat, parts[-1].children):
        labels = {part.label for part in each}
        blocks.append((next(name for name in MATRICES if f"{name}.dropout" in labels), each))
    return parts[:-1], blocks


def holds(part: Component, names: tuple[str, ...]) -> bool:
    """Whether a component holds one of these matrices."""
    return not set(names).isdisjoint(part.matrices)
