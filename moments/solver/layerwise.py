"""Inversion block by block: weight variances that give every block's output a chosen variance.

At every residual addition of one walk the block's weights are scaled until its output (or the sum)
has its target; docs/theory/inversion.md says why one walk is enough.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
    holds,
)

Target = Callable[[int, str], float]

LAYERWISE = {
    "stream_variance": "variance of the stream after every layer",
    "block_variance": "variance of every block's output",
}
NOTHING = 1e-12
"""Factor on a variance that stands for a block without output."""


@dataclass(frozen=True)
class Found:
    """What the walk gives: factors on every matrix's variance by layer; where no factor reaches a
    target, the largest relative distance to one, the variance there, and every such (layer, block).
    """

    factors: Mapping[str, tuple[float, ...]]
    shortfall: float = 0.0
    nearest: float | None = None
    missed: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Reached:
    """What one residual addition comes to: variances of the block's output and of the sum."""

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
) -> Found:
    """Scale the free matrices, those of one block by the same factor, until every block has its
    target.

    Args:
        model, signal, layout: the declaration, what enters layer 1, and how its tokens lie.
        free: matrices to scale.
        target: variance wanted at (layer, "attention", "cross" or "ffn"), averaged over tokens.
        of_sum: whether it is that of the residual sum, or of the block's output as it comes from
            its dropout, before any scale.
        memory: what a decoder's cross-attention reads.

    Raises:
        DomainError: a block's output does not depend on its free matrices, or is normalised.
    """
    walk = _Walk(layout, free, target, of_sum, memory)
    layers: Any = declare(model, "refined", *layout.places).children
    for layer in layers:
        signal = walk.layer_above(layer.number, layer.body, signal)
    factors = {name: tuple(values) for name, values in walk.factors.items()}
    return Found(factors, walk.shortfall, walk.nearest, tuple(walk.missed))


class _Walk:
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
        self.seen: set[str] = set()
        self.shortfall = 0.0
        self.nearest: float | None = None
        self.missed: list[tuple[int, str]] = []

    def layer_above(self, number: int, body: Component, signal: Signal) -> Signal:
        self.layer, self.seen = number, set()
        for part in flat(body):
            signal = self.step(part, signal)
        for matrix in set(self.free) - self.seen:
            raise DomainError(f"free has {matrix!r}, which layer {number} does not have")
        return signal

    def step(self, part: Component, signal: Signal) -> Signal:
        return self._forward(part.with_residuals(signal, self._solved, self._forward), signal)

    def _forward(self, part: Component, signal: Signal) -> Signal:
        return forward(part, signal, self.memory)[0]

    def _solved(self, node: Residual, signal: Signal) -> Residual:
        """The node with its branch replaced by what it adds once its matrices are scaled."""
        blocks = self._blocks(node, signal)
        if not any(block.free for block in blocks):
            return node
        before = len(self.missed), self.shortfall, self.nearest
        chosen = self._chosen(node, signal, blocks)
        added = [block.propagated(factor) for block, factor in zip(blocks, chosen, strict=True)]
        average = self.layout.token_average
        own = [float(average(one.kernel)[0]) for one in added]
        settled = [block.settles(*at) for block, *at in zip(blocks, chosen, own, strict=True)]
        if any(settled):
            del self.missed[before[0] :]
            self.shortfall, self.nearest = before[1:]
            chosen = self._chosen(node, signal, blocks)
            added = [block.propagated(factor) for block, factor in zip(blocks, chosen, strict=True)]
        for block, factor in zip(blocks, chosen, strict=True):
            for matrix in block.free:
                self.factors[matrix].append(factor)
                self.seen.add(matrix)
        known = tuple(map(KnownOutput, added))
        branch = known[0] if len(known) == 1 else Parallel(known)
        return dataclasses.replace(node, branch=branch)

    def _chosen(self, node: Residual, signal: Signal, blocks: list[FreeBlock]) -> list[float]:
        """The factor of every block."""
        if self.of_sum:
            return [self._of_sum(node, signal, blocks)] * len(blocks)
        return [self._of_output(block) if block.free else 1.0 for block in blocks]

    def _blocks(self, node: Residual, signal: Signal) -> list[FreeBlock]:
        shared, blocks = blocks_of(node)
        parts = flat(node.branch)
        behind = itertools.takewhile(lambda part: not holds(part, SOLVABLE), reversed(parts))
        if any(part.normalises for part in behind):
            raise DomainError(
                "a norm at its output (norm = 'sandwich') normalises what every block adds: its "
                "variance is norm_gain^2"
            )
        entering = self._forward(Chain(shared), signal)
        return [
            FreeBlock(name, each, self.free, entering, self.layout, self.memory)
            for name, each in blocks
        ]

    def _of_output(self, block: FreeBlock) -> float:
        wanted = self.target(self.layer, block.name)
        factor, reached = factor_for(block.output, wanted, len(block.free), block.ends)
        self._note(block.name, reached, wanted, abs(reached / wanted - 1) > 1e-9)
        return factor

    def _of_sum(self, node: Residual, signal: Signal, blocks: list[FreeBlock]) -> float:
        name = node.label.partition(".")[0]
        wanted = self.target(self.layer, name)
        kept = node.skip_scale**2 * float(self.layout.token_average(signal.kernel)[0])
        scale = node.branch_scale**2
        free = [block for block in blocks if block.free]
        kept += scale * sum(block.added(1.0) for block in blocks if not block.free)
        if wanted <= kept or scale == 0.0:
            self._note(name, kept, wanted, True)
            return NOTHING
        factor, added = factor_for(
            lambda f: sum(block.added(f) for block in free),
            (wanted - kept) / scale,
            min(len(block.free) for block in free),
            (free[0].ends[0], min(block.ends[1] for block in free)),
        )
        total = kept + scale * added
        self._note(name, total, wanted, abs(total / wanted - 1) > 1e-9)
        return factor

    def _note(self, name: str, reached: float, wanted: float, missed: bool) -> None:
        if missed:
            self.missed.append((self.layer, name))
            if abs(reached / wanted - 1) >= self.shortfall:
                self.shortfall, self.nearest = abs(reached / wanted - 1), reached


def reached(stack: Stack) -> tuple[list[Reached], list[float]]:
    """What a forward pass comes to: at every residual sum, and the stream behind every layer."""
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
