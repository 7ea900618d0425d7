"""One block as a function of a factor on its free matrices' variances.

The parts before the first free matrix are propagated once. Behind it, means and variances suffice
to find the factor, with which the block is then propagated in full, once.
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
"""Largest logarithm of a factor on a variance."""

CLOSE = 1e-13
"""Relative distance to the target at which a root is accepted, a few rounding errors."""

SECANT_STEPS = 12


def factor_for(
    output: Callable[[float], float], target: float, count: int, ends: tuple[float, float]
) -> tuple[float, float]:
    """Find the factor on `count` variances at which `output` is `target`, and the output there.

    One step suffices if the output is proportional to the factor to the power `count`; otherwise
    secant steps in logarithms, or a bracketed root if their slope is implausible. Without a root,
    the result is the nearer end of the range `ends`, which is in logarithms of the factor.
    DomainError if the output does not depend on the factor.
    """

    def distance(log: float) -> float:
        value = output(math.exp(log))
        if not 0 < value < math.inf:
            return math.copysign(math.inf, value - 1)
        ratio = value / target
        return math.log(ratio) if 0 < ratio < math.inf else math.log(value) - math.log(target)

    low, high = ends
    previous = min(0.0, high)
    error = distance(previous)
    start = min(max(previous - error / count, low), high)
    log, slope = start, float(count)
    for _ in range(SECANT_STEPS):
        previous_error, error = error, distance(log)
        if abs(error) <= CLOSE:
            return math.exp(log), output(math.exp(log))
        if log != previous and math.isfinite(error - previous_error):
            slope = (error - previous_error) / (log - previous)
        if not (0.1 < slope / count < 10 and math.isfinite(error)):
            break
        previous, log = log, min(max(log - error / slope, low), high)
    log = _bracketed(distance, start, ends)
    return math.exp(log), output(math.exp(log))


def _bracketed(
    distance: Callable[[float], float], start: float, ends: tuple[float, float]
) -> float:
    """The root of `distance`, bracketed by a growing interval around `start`, or the nearer end."""
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
    """The matrices of a model that block-wise inversion can scale."""
    return tuple(name for name in SOLVABLE if name in matrices_of(model))


@dataclass(frozen=True)
class KnownOutput(Leaf):
    """A component that returns a signal computed before."""

    output: Signal
    label: str = "given"

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        return self.output, _no_backward


def _no_backward(_: Any) -> Any:
    raise DomainError("a solver's walk goes forward only")


class FreeBlock:
    """One block ("attention", "cross" or "ffn") whose free matrices share a factor; `parts` include
    norms before and scales behind it, `memory` is the encoder output for cross-attention."""

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
        first = next((i for i, part in enumerate(parts) if has_any(part, free)), len(parts))
        last = next((i for i, part in enumerate(parts) if part.label == f"{name}.dropout"), -1)
        end = max(first, last + 1)
        self.input = forward(Chain(parts[:first]), signal, self.memory)[0]
        self.free_parts, self.scales = parts[first:end], parts[end:]
        self.heads: Signal | None = None
        if self.free_parts and self.free_parts[0].mixes_tokens:
            self._fit_heads()
        self._free_laws = [self._entry_law(part) for part in self.free_parts]
        self._scale_laws = [self._entry_law(part) for part in self.scales]
        self._input_moments = self.input.mean, self.input.kernel.diagonal
        self.ends = -LIMIT, min(LIMIT, self._domain_end())
        self._correction = 1.0

    def output(self, factor: float) -> float:
        """Variance of the block's output before any scale of the branch, averaged over tokens."""
        return self._variance(self._free_laws, factor)

    def added(self, factor: float) -> float:
        """Variance of the branch before branch_scale, averaged over tokens."""
        return self._variance(self._free_laws + self._scale_laws, factor)

    def propagated(self, factor: float) -> Signal:
        """The whole signal of the branch before branch_scale."""
        parts, signal = self.free_parts, self.input
        if self.heads is not None and self._proportional:
            heads = self.heads
            varies = None if heads.fluctuation is None else heads.fluctuation.scaled(factor)
            signal = heads.replace(kernel=heads.kernel.scaled(factor), fluctuation=varies)
            parts = parts[1:]
        scaled = tuple(part.with_variances(self.free, factor) for part in parts)
        return forward(Chain(scaled + self.scales), signal, self.memory)[0]

    def corrected(self, factor: float, added: float) -> bool:
        """Correct later variances by the whole signal's, `added`, and return whether it differs, as
        it does for experts whose gates and outputs depend on one overlap."""
        ratio = added / self.added(factor) if added else 1.0
        if not abs(ratio - 1.0) > 10 * CLOSE:
            return False
        self._correction *= ratio
        return True

    # --- means and variances -------------------------------------------------------------------

    def _variance(self, laws: list[OfEntry], factor: float) -> float:
        """Variance behind a sequence of laws, averaged over tokens."""
        moments = self._input_moments
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            for law in laws:
                moments = law(moments, factor)
        return self._correction * float(self.layout.average(moments[1]))

    def _domain_end(self) -> float:
        """Logarithm of the factor at which an activation's input leaves the domain of its laws."""
        moments, algebra = self._input_moments, self.input.algebra
        for part, law in zip(self.free_parts, self._free_laws, strict=True):
            share = float(np.max(part.domain_share(*moments, algebra)))
            if share > 0.0:
                return -math.log(share)
            moments = law(moments, 1.0)
        return LIMIT

    def _fit_heads(self) -> None:
        """Heads' variance as an affine function of the factor; the constant is from the bias."""
        attention = self.free_parts[0]
        if not isinstance(attention, Attention):
            raise DomainError(
                f"{attention.label or 'a mixer'} has no inversion: solve for final_variance, or "
                "leave value out of free"
            )
        self.heads = forward(attention, self.input, self.memory)[0]
        self._proportional = not np.any(attention.value_bias)
        self._slope, self._constant = self.heads.kernel.diagonal, 0.0
        if not self._proportional:
            doubled = attention.with_variances(attention.matrices, 2.0)
            doubled_heads = forward(doubled, self.input, self.memory)[0]
            self._slope = doubled_heads.kernel.diagonal - self.heads.kernel.diagonal
            self._constant = self.heads.kernel.diagonal - self._slope

    def _entry_law(self, part: Component) -> OfEntry:
        """An output entry's mean and variance as a function of those of an input entry."""
        if part.mixes_tokens and part.matrices:
            return lambda _, factor: (0.0, self._slope * factor + self._constant)
        law = part.entry_moments(self.input.algebra, self.free)
        if law is None:
            label = part.label or "a sum of parallel blocks"
            raise DomainError(f"{label} has no inversion: solve for another objective")
        return law


# --- components -----------------------------------------------------------------------------------


def flat(component: Component) -> tuple[Component, ...]:
    """The parts of nested chains, in order."""
    if isinstance(component, Chain):
        return tuple(part for inner in component.children for part in flat(inner))
    return (component,)


def blocks_of(
    node: Residual,
) -> tuple[tuple[Component, ...], list[tuple[str, tuple[Component, ...]]]]:
    """The parts before parallel blocks, if there are any, and every block's name and parts."""
    parts = flat(node.branch)
    if not parts[-1].ends_in_branches:
        return (), [(node.label.partition(".")[0], parts)]
    blocks = []
    for block in map(flat, parts[-1].children):
        labels = {part.label for part in block}
        blocks.append((next(name for name in MATRICES if f"{name}.dropout" in labels), block))
    return parts[:-1], blocks


def has_any(part: Component, names: tuple[str, ...]) -> bool:
    """Whether a component has one of these matrices."""
    return not set(names).isdisjoint(part.matrices)
