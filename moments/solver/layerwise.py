"""Inversion block by block: weight variances that give every block's output a chosen variance.

In one forward pass, each block's weights are scaled at its residual sum until its output (or the
sum) has the target variance; docs/theory/inversion.md says why one pass is enough.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..engine.composition import Chain, Component, Parallel, Residual, forward
from ..engine.layout import SequenceLayout
from ..engine.state import Signal
from ..errors import DomainError
from ..layers.architecture import declare
from ..model.transformer import Transformer
from ..prediction.stack import Stack
from .block import (
    MATRICES,
    SOLVABLE,
    FreeBlock,
    KnownOutput,
    blocks_of,
    factor_for,
    flat,
    has_any,
)

Target = Callable[[int, str], float]

LAYERWISE = {
    "stream_variance": "variance of the stream after every layer",
    "block_variance": "variance of every block's output",
}
ALMOST_ZERO = 1e-12
"""Factor on the variances of a block whose target allows no output."""


class Miss(NamedTuple):
    """A block whose target no factor reaches, and the nearest variance that it can have."""

    layer: int
    block: str
    nearest: float
    target: float

    @property
    def distance(self) -> float:
        """Relative distance to the target."""
        return abs(self.nearest / self.target - 1)


@dataclass(frozen=True)
class Solution:
    """Factors on the variances of every free matrix by layer, and the missed targets."""

    factors: Mapping[str, tuple[float, ...]]
    missed: tuple[Miss, ...] = ()

    @property
    def nearest(self) -> float:
        """The variance reached where a target is missed by most."""
        return max(reversed(self.missed), key=lambda miss: miss.distance).nearest


@dataclass(frozen=True)
class Reached:
    """Variances of one block's output and of its residual sum, averaged over tokens."""

    layer: int
    block: str
    output: float
    total: float


def solve_blocks(
    model: Transformer,
    signal: Signal,
    layout: SequenceLayout,
    free: tuple[str, ...],
    target: Target,
    of_sum: bool,
    memory: Signal | None = None,
) -> Solution:
    """Scale the free matrices, with one factor per block, until every block reaches its target.

    Args:
        model, signal, layout: the declaration, the input of layer 1 and its sequences.
        free: names of the matrices to scale.
        target: wanted variance at (layer, "attention", "cross" or "ffn"), averaged over tokens.
        of_sum: whether the targets are for the residual sums, or for the blocks' outputs behind
            dropout, before any scale.
        memory: the encoder's output, for cross-attention.

    Raises:
        DomainError: a block's output does not depend on its free matrices, or is normalised.
    """
    solver = _ForwardSolver(layout, free, target, of_sum, memory)
    layers: Any = declare(model, "refined", *layout.places).children
    for layer in layers:
        signal = solver.through_layer(layer.number, layer.body, signal)
    factors = {name: tuple(values) for name, values in solver.factors.items()}
    return Solution(factors, tuple(solver.missed))


class _ForwardSolver:
    """A forward pass that chooses the factor of every block on its way."""

    def __init__(
        self,
        layout: SequenceLayout,
        free: tuple[str, ...],
        target: Target,
        of_sum: bool,
        memory: Signal | None,
    ) -> None:
        self.layout, self.free, self.target, self.of_sum = layout, free, target, of_sum
        self.memory, self.layer = memory, 0
        self.factors: dict[str, list[float]] = {name: [] for name in free}
        self.missed: list[Miss] = []

    def through_layer(self, number: int, body: Component, signal: Signal) -> Signal:
        self.layer = number
        for part in flat(body):
            solved = part.with_residuals(signal, self._solved, self._forward)
            signal = self._forward(solved, signal)
        for matrix, factors in self.factors.items():
            if len(factors) < number:
                raise DomainError(f"free has {matrix!r}, which layer {number} does not have")
        return signal

    def _forward(self, part: Component, signal: Signal) -> Signal:
        return forward(part, signal, self.memory)[0]

    def _solved(self, node: Residual, signal: Signal) -> Residual:
        """The node with its branch replaced by the branch's output at the chosen factors."""
        blocks = self._blocks(node, signal)
        if not any(block.free for block in blocks):
            return node
        factors, missed = self._solve(node, signal, blocks)
        outputs = [block.propagated(factor) for block, factor in zip(blocks, factors, strict=True)]
        variances = [float(self.layout.token_average(output.kernel)[0]) for output in outputs]
        solved = zip(blocks, factors, variances, strict=True)
        corrected = [block.corrected(factor, variance) for block, factor, variance in solved]
        if any(corrected):
            factors, missed = self._solve(node, signal, blocks)
            outputs = [block.propagated(f) for block, f in zip(blocks, factors, strict=True)]
        self.missed += missed
        for block, factor in zip(blocks, factors, strict=True):
            for matrix in block.free:
                self.factors[matrix].append(factor)
        known = tuple(map(KnownOutput, outputs))
        branch = known[0] if len(known) == 1 else Parallel(known)
        return dataclasses.replace(node, branch=branch)

    def _solve(
        self, node: Residual, signal: Signal, blocks: list[FreeBlock]
    ) -> tuple[list[float], list[Miss]]:
        """The factor of every block, and the targets that are missed."""
        if self.of_sum:
            factor, missed = self._solve_sum(node, signal, blocks)
            return [factor] * len(blocks), missed
        factors, misses = [1.0] * len(blocks), []
        for i, block in enumerate(blocks):
            if block.free:
                factors[i], missed = self._solve_output(block)
                misses += missed
        return factors, misses

    def _blocks(self, node: Residual, signal: Signal) -> list[FreeBlock]:
        shared, blocks = blocks_of(node)
        parts = flat(node.branch)
        behind = itertools.takewhile(lambda part: not has_any(part, SOLVABLE), reversed(parts))
        if any(part.normalises for part in behind):
            raise DomainError(
                "a norm at its output (norm = 'sandwich') normalises what every block adds: its "
                "variance is norm_gain^2"
            )
        signal = self._forward(Chain(shared), signal)
        return [
            FreeBlock(name, parts, self.free, signal, self.layout, self.memory)
            for name, parts in blocks
        ]

    def _solve_output(self, block: FreeBlock) -> tuple[float, list[Miss]]:
        target = self.target(self.layer, block.name)
        factor, reached = factor_for(block.output, target, len(block.free), block.ends)
        return factor, self._missed(block.name, reached, target)

    def _solve_sum(
        self, node: Residual, signal: Signal, blocks: list[FreeBlock]
    ) -> tuple[float, list[Miss]]:
        name = node.label.partition(".")[0]
        target = self.target(self.layer, name)
        fixed = node.skip_scale**2 * float(self.layout.token_average(signal.kernel)[0])
        scale = node.branch_scale**2
        free = [block for block in blocks if block.free]
        fixed += scale * sum(block.added(1.0) for block in blocks if not block.free)
        if target <= fixed or scale == 0.0:
            return ALMOST_ZERO, [Miss(self.layer, name, fixed, target)]
        factor, added = factor_for(
            lambda f: sum(block.added(f) for block in free),
            (target - fixed) / scale,
            min(len(block.free) for block in free),
            (free[0].ends[0], min(block.ends[1] for block in free)),
        )
        return factor, self._missed(name, fixed + scale * added, target)

    def _missed(self, name: str, reached: float, target: float) -> list[Miss]:
        miss = Miss(self.layer, name, reached, target)
        return [miss] if miss.distance > 1e-9 else []


def reached(stack: Stack) -> tuple[list[Reached], list[float]]:
    """Run a forward pass; variances at every residual sum, and of the stream behind every layer."""
    average = stack.layout.token_average
    stack.forward()
    points = [p for p in stack.trace.points if p.layer]
    rows, stream, outputs = [], [], {}
    for point in points:
        variance = float(average(point.signal.kernel)[0])
        block, _, site = point.site.partition(".")
        if point.site == "stream":
            stream.append(variance)
        elif site == "dropout" and block in MATRICES:
            outputs[block] = variance
        elif site == "sum":
            rows += [Reached(point.layer, name, out, variance) for name, out in outputs.items()]
            outputs = {}
    return rows, stream
