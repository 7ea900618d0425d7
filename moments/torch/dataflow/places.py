"""Where the units of a recorded pass sit in the module: parameters by role, sites by submodule."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...prediction.draws import STREAM
from ..roles import HookPoint, ModuleBranch, Role, SubmoduleTensor, WeightPart
from .graph import VIEWS, Graph
from .stream import BranchUnit, SumChain
from .units import LinearUnit, Norm

MOST = 1 << 25
"""Entries of a matrix beyond which only its plain forms are followed, entry by entry."""

_SAME = ("_to_copy", "alias", "detach", "clone", "lift_fresh")
"""Operations that keep every entry where it is."""


@dataclass
class _Claim:
    """Some rows or columns of a parameter, and the role they have."""

    stack: str
    layer: int
    name: str
    axis: int
    places: Tensor | None
    fan_in: int
    fan_out: int
    transposed: bool = False
    unit: bool | None = None


@dataclass
class Roles:
    """Collects who claims which part of which parameter.

    Attributes:
        again: stack, layer, role and parameter of what an earlier layer has already.
    """

    graph: Graph
    claims: dict[str, list[_Claim]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    again: list[tuple[str, int, str, str]] = field(default_factory=list)

    def whole(
        self, stack: str, layer: int, name: str, parameter: str, unit: bool | None = None
    ) -> None:
        """A vector or a table."""
        self._claim(parameter, _Claim(stack, layer, name, 0, None, 0, 0, unit=unit))

    def norm(self, stack: str, layer: int, site: str, norm: Norm | None) -> None:
        if norm is None:
            return
        for name in norm.gains:
            self.whole(stack, layer, f"{site}.gain", name, norm.unit)
        for name in norm.biases:
            self.whole(stack, layer, f"{site}.bias", name)

    def linear(
        self, stack: str, layer: int, name: str, linear: LinearUnit, columns: Tensor | None = None
    ) -> None:
        """A matrix, or those of its columns that play a role, and its bias."""
        result = self._entries(linear)
        if result is None:
            self.doubts.append(
                f"{', '.join(sorted(linear.params))}: made over before it is used as {name}"
            )
            return
        parameter, axis, places, fan_in = result
        total = len(places)
        chosen = None if columns is None or len(columns) == total else places[columns]
        taken = total if chosen is None else len(chosen)
        held = self.graph.leaf(parameter)
        if chosen is None and held.numel() != fan_in * total:
            chosen = places
        claim = _Claim(stack, layer, name, axis, chosen, fan_in, taken, axis == 1)
        self._claim(parameter, claim)
        for bias in linear.biases:
            row = self._owner(bias)
            if row is not None:
                owner, where = row[0], row[1].reshape(-1)[:total]
                part = where if columns is None else where[columns]
                if len(part) == self.graph.leaf(owner).numel():
                    part = None
                self._claim(owner, _Claim(stack, layer, f"{name}.bias", 0, part, 0, 0))

    def _claim(self, parameter: str, claim: _Claim) -> None:
        rows = self.claims.setdefault(parameter, [])
        for other in rows:
            if other.name == claim.name and other.stack == claim.stack:
                same = other.places is None or (
                    claim.places is not None and torch.equal(other.places, claim.places)
                )
                if same:  # the same thing again, in another layer
                    if other.layer != claim.layer:
                        self.again.append((claim.stack, claim.layer, claim.name, parameter))
                    return
        rows.append(claim)

    def _entries(self, linear: LinearUnit) -> tuple[str, int, Tensor, int] | None:
        """Parameter, its axis of features made, the place of every column there, features read."""
        graph = self.graph
        node = graph.nodes[linear.node]
        if len(linear.params) != 1:
            return self._traced(linear)
        (name,) = linear.params
        held = self.graph.leaf(name)
        turned = [n.name for n in graph.ancestor_nodes(linear.matrix) if n.name not in _SAME]
        if "convolution" in node.name:
            return None if turned else (name, 0, torch.arange(len(held)), held[0].numel())
        reads_first = node.inputs[-1] == linear.matrix
        if held.ndim == 2 and turned in ([], ["t"], ["transpose"]):
            axis = int(reads_first) ^ int(bool(turned))
            return name, axis, torch.arange(held.shape[axis]), held.shape[1 - axis]
        return self._traced(linear)

    def _traced(self, linear: LinearUnit) -> tuple[str, int, Tensor, int] | None:
        """The same for a matrix that is a part or another view of its parameter."""
        result = self._owner(linear.matrix)
        if result is None:
            return None
        (name, places), held = result, self.graph.leaf(result[0])
        if self.graph.nodes[linear.node].inputs[-1] != linear.matrix:
            places = places.transpose(-1, -2)
        if places.ndim == 3 and bool((places == places[:1]).all()):  # one matrix for every row
            places = places[0]
        if places.ndim == 3:  # (heads, in, out) -> (in, heads * out)
            places = places.transpose(0, 1).flatten(1)
        flat = held.reshape(len(held), -1).shape
        rows, columns = places // flat[1], places % flat[1]
        if bool((rows == rows[:1]).all()):
            return name, 0, rows[0], places.shape[0]
        if bool((columns == columns[:1]).all()):
            return name, 1, columns[0], places.shape[0]
        if places.numel() == held.numel():
            return name, 0, torch.arange(places.shape[1]), places.shape[0]
        return None

    def _owner(self, value: int) -> tuple[str, Tensor] | None:
        """The parameter that a value is entries of, and which; None where they are of several, or
        others than it has."""
        graph, given = self.graph, dict[int, Tensor]()
        owners, offset = [], 0
        for leaf in graph.leaves(value):
            held, name = graph.tensor(leaf), graph.values[leaf].name
            if name is None or offset + held.numel() > MOST:
                return None
            end = offset + held.numel()
            given[leaf] = torch.arange(offset, end).view(held.shape)
            owners.append((name, offset, end))
            offset = end
        places = _followed(graph, given, value)
        if places is None:
            return None
        for name, first, end in owners:
            if first <= int(places.min()) and int(places.max()) < end:
                return name, places - first
        return None

    def roles(self) -> list[Role]:
        """Every claim as a role; parts of one parameter tell each other's places."""
        result = []
        for parameter, claims in self.claims.items():
            if any(claim.places is None for claim in claims):
                claims = [claim for claim in claims if claim.places is None][:1]
            held = self.graph.leaf(parameter)
            for claim in claims:
                short = claim.name.removesuffix(".bias")
                for part in self._parts(parameter, claims, claim, held):
                    label = f"{parameter} [{short}]" if part.split else parameter
                    fans = claim.fan_in, claim.fan_out, claim.transposed
                    where = claim.stack, claim.layer, claim.name
                    result.append(Role(*where, part, *fans, label, claim.unit))
        return result

    def _parts(
        self, parameter: str, claims: list[_Claim], claim: _Claim, held: Tensor
    ) -> list[WeightPart]:
        name = claim.stack + claim.name
        if claim.places is None:
            return [WeightPart(name, parameter)]
        size = held.shape[claim.axis]
        labels = torch.full((size,), -1)
        for number, other in enumerate(claims):
            if other.axis == claim.axis and other.places is not None:
                labels[other.places] = number
        values, counts = torch.unique_consecutive(labels, return_counts=True)
        period = _period(list(zip(values.tolist(), counts.tolist(), strict=True)))
        split = tuple(width for _, width in period)
        position = next(number for number, other in enumerate(claims) if other is claim)
        return [
            WeightPart(name, parameter, claim.axis, place, split)
            for place, (label, _) in enumerate(period)
            if label == position
        ]


def _period(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The shortest run of runs whose repetition is all of them."""
    for length in range(1, len(runs) + 1):
        if len(runs) % length == 0 and runs == runs[:length] * (len(runs) // length):
            return runs[:length]
    return runs


def _followed(graph: Graph, given: dict[int, Tensor], end: int) -> Tensor | None:
    """Places that views carry along; None where entries are changed on the way."""
    values = dict(given)
    for node in graph.ancestor_nodes(end):
        scaled = node.name in ("mul", "div") and len(node.inputs) == 1
        if scaled or node.name in _SAME:
            values[node.outputs[0]] = values[node.inputs[0]]
            continue
        if node.name not in VIEWS and node.name not in ("cat", "stack"):
            return None
        values |= dict(zip(node.outputs, node.rerun(values.get), strict=True))
    return values.get(end)


class Sites:
    """Submodules at whose inputs and outputs the values of a graph pass.

    Attributes:
        tokens: those that hold every token, in sequences or one after the other.

    Args:
        streams: the first values of the residual streams.
        dropouts: paths of submodules that are nn.Dropout, which may drop nothing yet.
    """

    def __init__(self, graph: Graph, streams: Iterable[int], dropouts: Collection[str]) -> None:
        self.graph, self.dropouts = graph, dropouts
        rows = {graph.tensor(v).numel() // graph.tensor(v).shape[-1] for v in streams}
        self.at: dict[int, list[SubmoduleTensor]] = {}
        counts: dict[tuple[str, str], set[int]] = {}
        seen = [b for b in graph.boundaries if graph.tensor(b.value).ndim in (2, 3)]
        self.tokens = {
            SubmoduleTensor(path, side)
            for path, side, value, _ in seen
            if graph.tensor(value).ndim == 3 or len(graph.tensor(value)) in rows
        }
        for path, side, value, _ in seen:
            counts.setdefault((path, side), set()).add(self._same(value))
        for path, side, value, _ in seen:
            if len(counts[path, side]) == 1:
                points = self.at.setdefault(self._same(value), [])
                if SubmoduleTensor(path, side) not in points:
                    points.append(SubmoduleTensor(path, side))

    def _same(self, value: int) -> int:
        """The value that others are mere views of."""
        while (node := self.graph.producer(value)) is not None:
            whole = self.graph.tensor(value).numel()
            transparent = node.name in VIEWS and len(node.outputs) == 1
            if not transparent or self.graph.tensor(node.inputs[0]).numel() != whole:
                break
            value = node.inputs[0]
        return value

    def of(self, value: int) -> list[SubmoduleTensor]:
        return self.at.get(self._same(value), [])

    def output(self, value: int) -> SubmoduleTensor | None:
        """The innermost submodule that gives a value, else the first that takes it."""
        return min(self.of(value), key=lambda point: point.side == "input", default=None)

    def dropped(self, unit: BranchUnit) -> SubmoduleTensor | None:
        """The submodule that drops what a block gives."""
        if unit.dropped is not None:
            return self.output(unit.dropped)
        points = (p for p in self.of(unit.raw) if p.path in self.dropouts and p.side == "output")
        return next(points, None)

    def input(self, value: int) -> SubmoduleTensor | None:
        """The first submodule that takes a value, else the innermost that gives it."""
        return min(self.of(value), key=lambda point: point.side == "output", default=None)

    def norm(self, norm: Norm) -> str | None:
        """The submodule that is a norm."""
        before = {p.path for p in self.of(norm.start) if p.side == "input"}
        behind = [p.path for p in self.of(norm.end) if p.side == "output"]
        return next((path for path in behind if path in before), None)


@dataclass
class Placed:
    """Hook points and residual branches of a module, and whether it shows every stream."""

    points: list[HookPoint] = field(default_factory=list)
    blocks: tuple[ModuleBranch, ...] = ()
    streams: bool = True


def place(
    sites: Sites,
    chain: SumChain,
    layers: list[list[BranchUnit]],
    stack: str,
    placements: list[str],
    odd: Collection[tuple[int, str]],
) -> Placed:
    """The sites of one stack.

    Args:
        placements: by layer.
        odd: layer and block of the few without norms.
    """
    result = Placed()
    ends = [u.sum.value if u.after is None else u.after.end for *_, u in layers]
    streams = _alike([sites.of(value) for value in ends])
    rows = [(0, STREAM, _entering(sites, chain, streams))]
    blocks: list[ModuleBranch | None] = []
    for number, (units, stream) in enumerate(zip(layers, streams, strict=True), start=1):
        own: dict[str, SubmoduleTensor] = {}
        for unit in units:
            alone = not unit.parallel or unit is units[-1]
            for site, point in _unit(sites, unit, alone):
                rows.append((number, site, point))
                if point is not None and point in sites.tokens:
                    own.setdefault(site, point)
        rows.append((number, STREAM, stream))
        for unit in units:
            placement = "none" if (number, unit.name) in odd else placements[number - 1]
            reads = _read_by(sites, unit, stream)
            where = stack, number, placement
            made = stream and reads and _branch(unit, own, stream, reads, *where)
            blocks.append(made)
    for layer, site, point in rows:
        if point is not None and point in sites.tokens:
            result.points.append(HookPoint(layer, stack + site, point.path, point.side))
        elif site == STREAM:
            result.streams = False
    norms = [n for units in layers for u in units for n in (u.before, u.after) if n is not None]
    sums = all(point in sites.tokens for _, site, point in rows if site.endswith(".sum"))
    whole = tuple(block for block in blocks if block is not None)
    if sums and len(whole) == len(blocks) and all(sites.norm(norm) is not None for norm in norms):
        result.blocks = whole
    return result


def _branch(
    unit: BranchUnit,
    own: Mapping[str, SubmoduleTensor],
    stream: SubmoduleTensor,
    reads: SubmoduleTensor,
    stack: str,
    layer: int,
    placement: str,
) -> ModuleBranch | None:
    """A residual branch by the sites of its layer; None where no submodule gives its last matrix's
    outcome."""
    name = unit.name
    last = "ffn.out" if name == "ffn" else f"{name}.projection"
    post_norm, dropped = own.get(f"{name}.post_norm"), own.get(f"{name}.dropout")
    given = [p for p in (post_norm, dropped, own.get(last)) if p is not None and p.side == "output"]
    raw = given[0] if post_norm is not None and given else own.get(last)
    if not given or raw is None or raw.side != "output":
        return None
    norm = own.get(f"{name}.norm") or (own.get("attention.norm") if unit.parallel else None)
    return ModuleBranch(
        stack=stack,
        layer=layer,
        path=stream.path,
        name=name,
        placement=placement,
        norm=None if norm is None else norm.path,
        post_norm=None if post_norm is None else post_norm.path,
        stream=reads,
        raw=raw,
        branch=given[0],
        total=own.get(f"{name}.sum", stream),
        parallel=unit.parallel,
        drops=unit.late and given[0] != dropped,
    )


def _read_by(
    sites: Sites, unit: BranchUnit, stream: SubmoduleTensor | None
) -> SubmoduleTensor | None:
    """Where a block's stream goes into a submodule: its norm, or the layer, where it may run alone,
    as checkpointing has it."""
    norm = unit.before and sites.norm(unit.before)
    path = norm or (stream and stream.path)
    inside = SubmoduleTensor(path or "", "input")
    return inside if inside in sites.of(unit.sum.stream) else sites.input(unit.sum.stream)


def _entering(
    sites: Sites, chain: SumChain, streams: list[SubmoduleTensor | None]
) -> SubmoduleTensor | None:
    """The first tensor of the stream: into the first layer where it is a submodule."""
    layer = streams[0].path if streams and streams[0] is not None else ""
    entry = SubmoduleTensor(layer, "input")
    return min(sites.of(chain.start), key=lambda p: (p != entry, p.side != "output"), default=None)


def _alike(rows: list[list[SubmoduleTensor]]) -> list[SubmoduleTensor | None]:
    """Of every layer's candidates the ones that sit alike in all layers, outermost first."""

    def shape(point: SubmoduleTensor) -> tuple[str, str]:
        return re.sub(r"\d+", "#", point.path), point.side

    outer = [[p for p in reversed(row) if p.side == "output"] + row for row in rows]
    common = set.intersection(*({shape(p) for p in row} for row in rows)) if rows else set()
    result: list[SubmoduleTensor | None] = []
    for row in outer:
        match = [p for p in row if shape(p) in common and shape(p)[0].count("#")]
        result.append(next(iter([*match, *row]), None))
    return result


def _unit(
    sites: Sites, unit: BranchUnit, alone: bool
) -> Iterator[tuple[str, SubmoduleTensor | None]]:
    """The sites of one block; its sum where it has one of its own or is the last of several."""
    name = unit.name
    if unit.before is not None:
        yield f"{name}.norm", sites.output(unit.before.end)
    if unit.attention is not None and unit.attention.output:
        yield f"{name}.heads", sites.input(unit.attention.output[-1].input)
        yield f"{name}.projection", sites.output(unit.raw)
    if unit.feed is not None:
        rows = [row for rows in unit.feed.into.values() for row in rows]
        if len({linear.node for linear, _ in rows}) == len(unit.feed.into):
            for role, side in (("ffn_in", "ffn.in"), ("gate", "ffn.gate")):
                for linear, _ in unit.feed.into.get(role, [])[:1]:
                    yield side, sites.output(linear.output)
        if unit.feed.dropped is None:
            yield "ffn.activation", sites.input(unit.feed.output.input)
        else:
            before, behind = unit.feed.dropped
            yield "ffn.activation", sites.output(before)
            yield "ffn.activation_dropout", sites.output(behind)
        yield "ffn.out", sites.output(unit.raw)
    if (dropped := sites.dropped(unit)) is not None:
        yield f"{name}.dropout", dropped
    if unit.behind is not None:
        yield f"{name}.post_norm", sites.output(unit.behind.end)
    if alone:
        yield f"{name}.sum", sites.output(unit.sum.value)
    if unit.after is not None:
        yield f"{name}.norm", sites.output(unit.after.end)
