"""Inversion block by block: weight variances that give every block's output a chosen variance.

One walk solves all: at every residual addition the block's weights are scaled until its output (or
the sum) has its target, and the walk goes on with what they give.

Layers like one that was solved in plain are walked on its program. One replay tells what every
block of a layer comes to, so that the factors of all of them are sought at once, from those of the
layer before: by secants in logarithms, a block's slope being measured where the blocks before it
have settled. What does not settle is left to the plain walk, which knows what is wrong.

See docs/theory/inversion.md, Why one walk is enough.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..engine.composition import Chain, Component, Parallel, Residual, forward
from ..engine.layout import SequenceLayout
from ..engine.program import (
    LIBRARY,
    NOT_REPLAYED,
    WORTH,
    FlatLayer,
    LayerReading,
    Walked,
    flattened,
    layer_readings,
    site_variances,
)
from ..engine.state import Signal
from ..engine.trace import Record
from ..errors import DomainError
from ..model.transformer import Transformer
from ..prediction.stack import Stack
from ..transfer.architecture import declare
from .block import (
    CLOSE,
    LIMIT,
    MATRICES,
    SECANTS,
    SOLVABLE,
    FreeBlock,
    KnownOutput,
    blocks_of,
    factor_for,
    flat,
    holds,
)

# --- many layers of one shape ---------------------------------------------------------------------

Target = Callable[[int, str], float]


class _Group(NamedTuple):
    """Matrices that share a factor.

    Attributes:
        names: of the matrices.
        places: of their variances among the layer's numbers.
        block, site: whose variance has a target.
        power: of the factor, which it goes with where nothing saturates or is added.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    block: str
    site: str
    power: int


class _Solved(NamedTuple):
    """The last layer of one shape: its groups, and the logarithms of their factors."""

    groups: tuple[_Group, ...]
    logs: list[float]


def _layer_numbers(record: Record) -> dict[str, Any]:
    """Variances of all sites, what every sum gained, and by name of the matrix before it what share
    of its laws' domain an activation's input has."""
    found = site_variances(record)
    for one in record.walk():
        part: Any = one.component
        if (total := part.addition(one)) is not None:
            found[f"{part.label} gained"] = total.added.output.kernel.diagonal * total.adding
        elif part.hidden is not None:
            signal, before = one.input, "gate" if part.matrices else "ffn_in"
            found[before] = part.domain_share(signal.mean, signal.kernel.diagonal, signal.algebra)
    return found


class Replay:
    """Layers solved on programs, tokens alike.

    Args:
        bodies: of all layers.
        free, target, of_sum: as those of `layerwise.solve_blocks`.

    Attributes:
        walked: layers that were solved here, by their place among all.
    """

    def __init__(
        self, bodies: Sequence[Component], free: tuple[str, ...], target: Target, of_sum: bool
    ) -> None:
        self._bodies = bodies
        self._free, self._target, self._of_sum = free, target, of_sum
        self._solved: dict[int, _Solved] = {}
        self.walked: dict[int, Walked] = {}
        self._left: tuple[Signal, LayerReading] | None = None
        self._failed = False
        with LIBRARY.busy:
            try:
                self._layers = LIBRARY.flat(bodies)
            except NOT_REPLAYED:
                self._failed = True

    def layer(self, number: int, signal: Signal) -> tuple[Signal, Mapping[str, float]] | None:
        """What leaves layer `number` once its blocks meet their targets, and the factors on its
        matrices. None: the plain walk is to solve it."""
        if self._failed or not LIBRARY.busy.acquire(blocking=False):
            return None
        try:
            layer = self._layers[number - 1]
            before = self._solved.get(layer.shape)
            return before and self._sought(number, layer, before, signal)
        except NOT_REPLAYED:
            self._failed = True
            return None
        finally:
            LIBRARY.busy.release()

    def learn(self, number: int, signal: Signal, factors: Mapping[str, float]) -> None:
        """Where the plain walk has solved a layer, those of its shape may start from there."""
        if self._failed or not LIBRARY.busy.acquire(blocking=False):
            return
        try:
            layer = self._layers[number - 1]
            read = LIBRARY.step(layer, self._entering(signal), _layer_numbers).read
            groups = tuple(self._groups(self._bodies[number - 1], layer, list(read)))
            if set(self._free) == {name for group in groups for name in group.names}:
                logs = [math.log(factors[group.names[0]]) for group in groups]
                self._solved[layer.shape] = _Solved(groups, logs)
        except NOT_REPLAYED:
            self._failed = True
        finally:
            LIBRARY.busy.release()

    def _entering(self, signal: Signal) -> LayerReading:
        """A signal's structure and numbers: those that left the layer before, where it did."""
        if self._left is None or self._left[0] is not signal:
            numbers: list[Any] = []
            structure = flattened(signal, numbers)
            self._left = signal, LayerReading(structure, tuple(numbers), {})
        return self._left[1]

    def _groups(self, body: Component, layer: FlatLayer, sites: Sequence[str]) -> list[_Group]:
        found, waiting = [], []
        for site in sites:
            block, _, kind = site.partition(".")
            if kind == "dropout" and block in MATRICES:
                names = tuple(name for name in MATRICES[block] if name in self._free)
                if names and self._of_sum:
                    waiting.append(names)
                elif names:
                    places = self._places(body, layer, names)
                    found.append(_Group(names, places, block, site, len(names)))
            elif kind == "sum" and waiting:
                names = tuple(name for group in waiting for name in group)
                places = self._places(body, layer, names)
                found.append(_Group(names, places, block, site, min(map(len, waiting))))
                waiting = []
        return found

    def _places(self, body: Component, layer: FlatLayer, names: tuple[str, ...]) -> tuple[int, ...]:
        numbers: list[Any] = []
        flattened(body.with_variances(names, 2.0), numbers)
        pairs = enumerate(zip(layer.numbers, numbers, strict=True))
        return tuple(place for place, (one, other) in pairs if one != other)

    def _sought(
        self, number: int, layer: FlatLayer, before: _Solved, signal: Signal
    ) -> tuple[Signal, Mapping[str, float]] | None:
        entering = self._entering(signal)
        groups, logs = before
        aims = [self._target(number, group.block) for group in groups]
        slopes = [float(group.power) for group in groups]
        last: tuple[list[float], list[float]] | None = None
        for _ in range(SECANTS):
            numbers = list(layer.numbers)
            for group, log in zip(groups, logs, strict=True):
                for place in group.places:
                    numbers[place] *= math.exp(log)
            tried = layer._replace(numbers=numbers)
            leaving = LIBRARY.step(tried, entering, _layer_numbers)
            read = leaving.read
            far = [self._far(read, g, aim) for g, aim in zip(groups, aims, strict=True)]
            if max(far) == math.inf:
                return None
            if max(map(abs, far)) <= CLOSE:
                if not self._inside(groups, logs, read):
                    return None
                self._solved[layer.shape] = _Solved(groups, logs)
                factors = {
                    n: math.exp(g) for one, g in zip(groups, logs, strict=True) for n in one.names
                }
                self._left = leaving.signal, leaving
                self.walked[number - 1] = Walked(tried, entering, leaving)
                return self._left[0], factors
            if last is not None:
                slopes = _measured(groups, slopes, (logs, far), last)
            last = logs, far
            logs = [log - d / slope for log, d, slope in zip(logs, far, slopes, strict=True)]
            if max(map(abs, logs)) > LIMIT:
                return None
        return None

    def _far(self, read: Mapping[str, float], group: _Group, aim: float) -> float:
        """Logarithm of what the free matrices give over what they should; infinite where what is
        there without them is too much."""
        given = read[group.site]
        if self._of_sum:
            gained = read[f"{group.site} gained"]
            given, aim = gained, aim - (given - gained)
        return math.log(given / aim) if given > 0 < aim else math.inf

    def _inside(
        self, groups: Sequence[_Group], logs: Sequence[float], read: Mapping[str, float]
    ) -> bool:
        """Whether no factor is beyond what the plain walk allows it."""
        for group, log in zip(groups, logs, strict=True):
            for name in ("ffn_in", "gate"):
                if name in read and {"ffn_in", "gate", "ffn_out"} & set(group.names):
                    share = read[name] * (1.0 if name in group.names else math.exp(log))
                    if share > 1.0:
                        return False
        return True


def _measured(
    groups: Sequence[_Group],
    slopes: Sequence[float],
    now: tuple[list[float], list[float]],
    last: tuple[list[float], list[float]],
) -> list[float]:
    """The slopes, that of the first group that had not settled by a difference."""
    found = list(slopes)
    for k, group in enumerate(groups):
        step = now[0][k] - last[0][k]
        if abs(last[1][k]) > CLOSE and step:
            slope = (now[1][k] - last[1][k]) / step
            # Ten times off what powers say, a difference is of rounding or of a block before that
            # moved. It guards the search alone: what is not `CLOSE` in the end is left to the plain
            # walk.
            found[k] = slope if 0.1 < slope / group.power < 10 else found[k]
            break
    return found


# --- layer by layer -------------------------------------------------------------------------------

LAYERWISE = {
    "stream_variance": "variance of the stream after every layer",
    "block_variance": "variance of every block's output",
}
NOTHING = 1e-12
"""Factor on a variance that stands for a block without output."""


@dataclass(frozen=True)
class Found:
    """What the walk found.

    Attributes:
        factors: for every matrix, what its variance is multiplied with in each layer.
        shortfall: largest relative distance between a target and what is reached, where no factor
            reaches it.
        nearest: the variance reached there.
        missed: (layer, block) whose targets no factor reaches.
        walked: layers as they were solved on programs, by place; see `reached`.
    """

    factors: Mapping[str, tuple[float, ...]]
    shortfall: float = 0.0
    nearest: float | None = None
    missed: tuple[tuple[int, str], ...] = ()
    walked: Mapping[int, Walked] = field(default_factory=dict)


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
    """Scale the free matrices until every block meets its target.

    Args:
        model: the declaration.
        signal: what enters layer 1.
        layout: of its tokens.
        free: matrices to scale; those of one block by the same factor.
        target: variance wanted at (layer, "attention", "cross" or "ffn"), averaged over tokens.
        of_sum: whether it is that of the residual sum, or of the block's output as it comes from
            its dropout, before any scale.
        memory: what a decoder's cross-attention reads.

    Raises:
        DomainError: a block's output does not depend on its free matrices, or is normalised.
    """
    walk = _Walk(layout, free, target, of_sum, memory)
    layers: Any = declare(model, "refined", *layout.places).children
    alike = len(layers) >= WORTH and memory is None and not signal.resolved
    bodies = [layer.body for layer in layers]
    replay = Replay(bodies, free, target, of_sum) if alike else None
    for layer in layers:
        found = replay and replay.layer(layer.number, signal)
        if found:
            signal, of_layer = found
            for name, factor in of_layer.items():
                walk.factors[name].append(factor)
            continue
        entering, missed = signal, len(walk.missed)
        signal = walk.layer_above(layer.number, layer.body, signal)
        if replay is not None and len(walk.missed) == missed:
            replay.learn(layer.number, entering, {name: walk.factors[name][-1] for name in free})
    factors = {name: tuple(values) for name, values in walk.factors.items()}
    walked = {} if replay is None else replay.walked
    return Found(factors, walk.shortfall, walk.nearest, tuple(walk.missed), walked)


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
        self.met: set[str] = set()
        self.shortfall = 0.0
        self.nearest: float | None = None
        self.missed: list[tuple[int, str]] = []

    def layer_above(self, number: int, body: Component, signal: Signal) -> Signal:
        """Pass one layer, with its matrices scaled."""
        self.layer, self.met = number, set()
        for part in flat(body):
            signal = self.step(part, signal)
        for matrix in set(self.free) - self.met:
            raise DomainError(f"free has {matrix!r}, which layer {number} does not have")
        return signal

    def step(self, part: Component, signal: Signal) -> Signal:
        """Pass one part of a layer, with its matrices scaled."""
        return self._forward(part.with_residuals(signal, self._solved, self._forward), signal)

    def _forward(self, part: Component, signal: Signal) -> Signal:
        return forward(part, signal, self.memory)[0]

    def _solved(self, node: Residual, signal: Signal) -> Residual:
        """The node with its branch replaced by what it adds once its matrices are scaled."""
        blocks = self._blocks(node, signal)
        if not any(block.free for block in blocks):
            return node
        if self.of_sum:
            factor = self._of_sum(node, signal, blocks)
            chosen = [factor] * len(blocks)
        else:
            chosen = [self._of_output(block) if block.free else 1.0 for block in blocks]
        for block, factor in zip(blocks, chosen, strict=True):
            for matrix in block.free:
                self.factors[matrix].append(factor)
                self.met.add(matrix)
        added = tuple(
            KnownOutput(block.propagated(f)) for block, f in zip(blocks, chosen, strict=True)
        )
        branch = added[0] if len(added) == 1 else Parallel(added)
        return dataclasses.replace(node, branch=branch)

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


def reached(
    stack: Stack, walked: Mapping[int, Walked] | None = None
) -> tuple[list[Reached], list[float]]:
    """What a forward pass comes to: at every residual sum, and the stream behind every layer.

    Layers that were `walked` are read off that where the stack's own are those, number by number.
    """
    average = stack.layout.token_average
    declared = stack.declaration()
    read = site_variances if walked is None else _layer_numbers
    replayed = (
        None
        if stack.run.memory is not None
        else layer_readings(declared, stack.enter(), read, walked)
    )
    if replayed is None:
        stack.forward()
        points = [p for p in stack.trace.points if p.layer]
        found = [(p.layer, p.site, float(average(p.signal.kernel)[0])) for p in points]
    else:
        layers: Any = zip(declared.children, replayed, strict=True)
        found = [(n.number, site, v) for n, one in layers for site, v in one.read.items()]
    rows, stream, outputs = [], [], {}
    for layer, place, variance in found:
        block, _, site = place.partition(".")
        if place == "stream":
            stream.append(variance)
        elif site == "dropout" and block in MATRICES:
            outputs[block] = variance
        elif site == "sum":
            rows += [Reached(layer, name, out, variance) for name, out in outputs.items()]
            outputs = {}
    if replayed is not None:
        stream = [one.numbers[0] for one in replayed]
    return rows, stream
