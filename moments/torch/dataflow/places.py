"""Where the units of a recorded pass sit in the module: parameters by role, sites by submodule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...prediction.draws import STREAM
from ..roles import WHOLE, HookPoint, ModuleBranch, Role, SubmoduleTensor, WeightPart
from .graph import VIEWS, Graph
from .units import BranchUnit, LinearUnit, Norm, Projections, Stack

LARGEST = 1 << 25
"""Entries of a matrix up to which it is traced to its parameter entry by entry."""

_COPIES = ("_to_copy", "alias", "detach", "clone", "lift_fresh")
"""Operations that leave every entry at its place."""


# --- parameters -----------------------------------------------------------------------------------


class _Use(NamedTuple):
    """A role of a parameter, or of some of its rows or (axis 1) columns, if these are given."""

    role: Role
    places: Tensor | None = None


@dataclass
class Roles:
    """Collects which unit uses which part of which parameter.

    Attributes:
        repeated: stack, layer, role and parameter of what an earlier layer uses already.
    """

    graph: Graph
    uses: dict[str, list[_Use]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    repeated: list[tuple[str, int, str, str]] = field(default_factory=list)

    def add_stack(self, stack: Stack) -> None:
        """Add the parameters of all units of a stack."""
        prefix, last = stack.prefix, len(stack.layers) + 1
        embedding, head = stack.embedding, stack.head
        for number, unit in stack.units():
            self._add_block(prefix, number, unit)
        for role, name in embedding.tables.items():
            if role != "token" or not prefix or name not in self.uses:
                self._add("" if role == "token" else prefix, 0, role, name)
        self._add(prefix, 0, "patch", embedding.patch)
        self._add(prefix, 0, "factor", embedding.factor)
        self._add(prefix, 0, "embedding.norm", embedding.norm)
        self._add(prefix, last, "final.norm", stack.final)
        self._add(prefix, last, "head.transform", head.transform)
        self._add(prefix, last, "head.factor", head.factor)
        self._add(prefix, last, "head.norm", head.norm)
        if head.matrix is not None and not head.matrix.params & set(embedding.tables.values()):
            self._add(prefix, last, "head", head.matrix)
        elif head.matrix is not None:  # tied to a table
            for bias in head.matrix.biases:
                for name in self.graph.values[bias].params:
                    self._add(prefix, last, "head.bias", name)

    def _add_block(self, stack: str, layer: int, unit: BranchUnit) -> None:
        cross = "cross_" if unit.name == "cross" else ""
        if (attention := unit.attention) is not None:
            self._add_projections(stack, layer, cross, attention.projections)
            for linear in attention.output[-1:]:
                self._add(stack, layer, f"{cross}output", linear)
            self._add(stack, layer, f"{cross}query.norm", attention.qk_norm)
            self._add(stack, layer, f"{cross}key.norm", attention.key_norm)
            self._add(stack, layer, "attention_sink", attention.sinks)
            if layer == 1:
                self._add(stack, 0, "relative_bias", attention.relative)
        if unit.feed is not None:
            self._add_projections(stack, layer, "", unit.feed.projections)
            self._add(stack, layer, "ffn_out", unit.feed.output)
        for norm in (unit.pre_norm, unit.sum_norm):
            self._add(stack, layer, f"{unit.name}.norm", norm)
        self._add(stack, layer, f"{unit.name}.post_norm", unit.output_norm)
        for name in unit.scale_params:
            self._add(stack, layer, f"{unit.name}.branch_scale", name)

    def _add_projections(self, stack: str, layer: int, cross: str, rows: Projections) -> None:
        for role, matrices in rows.items():
            for linear, columns in matrices:
                self._add_linear(stack, layer, cross + role, linear, columns)

    def _add(self, stack: str, layer: int, name: str, unit: LinearUnit | Norm | str | None) -> None:
        """Add a linear map, a norm or a parameter by its name."""
        if isinstance(unit, LinearUnit):
            self._add_linear(stack, layer, name, unit)
        elif isinstance(unit, Norm):
            for gain in unit.gains:
                self._use(Role(stack, layer, f"{name}.gain", gain, unit=unit.unit))
            for bias in unit.biases:
                self._use(Role(stack, layer, f"{name}.bias", bias))
        elif unit is not None:
            self._use(Role(stack, layer, name, unit))

    def _add_linear(
        self, stack: str, layer: int, name: str, linear: LinearUnit, columns: Tensor | None = None
    ) -> None:
        """Add a matrix, or those of its output columns that play a role, and its bias."""
        result = self._columns_of(linear)
        if result is None:
            self.doubts.append(
                f"{', '.join(sorted(linear.params))}: made over before it is used as {name}"
            )
            return
        parameter, axis, places, fan_in = result
        total = len(places)
        chosen = None if columns is None or len(columns) == total else places[columns]
        fan_out = total if chosen is None else len(chosen)
        if chosen is None and self.graph.leaf(parameter).numel() != fan_in * total:
            chosen = places
        part = WeightPart(axis)
        self._use(Role(stack, layer, name, parameter, part, fan_in, fan_out, axis == 1), chosen)
        for bias in linear.biases:
            if (entries := self._entries_of(bias)) is not None:
                vector, where = entries[0], entries[1].reshape(-1)[:total]
                rows: Tensor | None = where if columns is None else where[columns]
                if rows is not None and len(rows) == self.graph.leaf(vector).numel():
                    rows = None
                self._use(Role(stack, layer, f"{name}.bias", vector), rows)

    def _use(self, role: Role, places: Tensor | None = None) -> None:
        uses = self.uses.setdefault(role.parameter, [])
        for other, other_places in uses:
            if other.full_name == role.full_name and (
                other_places is None or (places is not None and torch.equal(other_places, places))
            ):
                if other.layer != role.layer:
                    self.repeated.append((role.stack, role.layer, role.name, role.parameter))
                return
        uses.append(_Use(role, places))

    def _columns_of(self, linear: LinearUnit) -> tuple[str, int, Tensor, int] | None:
        """Parameter, its axis of output features, the place there of each output column, fan_in."""
        graph = self.graph
        node = graph.nodes[linear.node]
        if len(linear.params) != 1:
            return self._traced_columns(linear)
        (name,) = linear.params
        tensor = graph.leaf(name)
        changes = [n.name for n in graph.ancestor_nodes(linear.matrix) if n.name not in _COPIES]
        if "convolution" in node.name:
            return None if changes else (name, 0, torch.arange(len(tensor)), tensor[0].numel())
        if tensor.ndim == 2 and changes in ([], ["t"], ["transpose"]):
            axis = int(node.inputs[-1] == linear.matrix) ^ int(bool(changes))
            return name, axis, torch.arange(tensor.shape[axis]), tensor.shape[1 - axis]
        return self._traced_columns(linear)

    def _traced_columns(self, linear: LinearUnit) -> tuple[str, int, Tensor, int] | None:
        """`_columns_of` a matrix that is a part or another view of its parameter."""
        result = self._entries_of(linear.matrix)
        if result is None:
            return None
        name, places = result
        tensor = self.graph.leaf(name)
        if self.graph.nodes[linear.node].inputs[-1] != linear.matrix:
            places = places.transpose(-1, -2)
        if places.ndim == 3 and bool((places == places[:1]).all()):  # one matrix for every row
            places = places[0]
        if places.ndim == 3:  # (heads, in, out) -> (in, heads * out)
            places = places.transpose(0, 1).flatten(1)
        width = tensor.reshape(len(tensor), -1).shape[1]
        rows, columns = places // width, places % width
        if bool((rows == rows[:1]).all()):
            return name, 0, rows[0], places.shape[0]
        if bool((columns == columns[:1]).all()):
            return name, 1, columns[0], places.shape[0]
        if places.numel() == tensor.numel():
            return name, 0, torch.arange(places.shape[1]), places.shape[0]
        return None

    def _entries_of(self, value: int) -> tuple[str, Tensor] | None:
        """The parameter whose entries a value is, and their flat indices; None if there is none."""
        graph, numbers = self.graph, dict[int, Tensor]()
        spans, end = [], 0
        for leaf in graph.leaves(value):
            tensor, name = graph.tensor(leaf), graph.values[leaf].name
            begin, end = end, end + tensor.numel()
            if name is None or end > LARGEST:
                return None
            numbers[leaf] = torch.arange(begin, end).view(tensor.shape)
            spans.append((name, begin, end))
        places = _moved(graph, numbers, value)
        if places is None:
            return None
        for name, begin, end in spans:
            if begin <= int(places.min()) and int(places.max()) < end:
                return name, places - begin
        return None

    def roles(self) -> list[Role]:
        """The role of every part of every parameter."""
        result = []
        for uses in self.uses.values():
            whole = [use for use in uses if use.places is None][:1]
            for use in whole or uses:
                parts = [WHOLE] if whole else self._parts(uses, use)
                result += [dataclasses.replace(use.role, part=part) for part in parts]
        return result

    def _parts(self, uses: list[_Use], use: _Use) -> list[WeightPart]:
        """The runs of rows or columns of one use of a parameter, among those of all uses."""
        axis = use.role.part.axis
        labels = torch.full((self.graph.leaf(use.role.parameter).shape[axis],), -1)
        for number, other in enumerate(uses):
            if other.role.part.axis == axis and other.places is not None:
                labels[other.places] = number
        values, counts = torch.unique_consecutive(labels, return_counts=True)
        period = _period(list(zip(values.tolist(), counts.tolist(), strict=True)))
        split = tuple(width for _, width in period)
        return [
            WeightPart(axis, place, split)
            for place, (label, _) in enumerate(period)
            if label >= 0 and uses[label] is use
        ]


def _period(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The shortest beginning of a list whose repetition is the whole list."""
    for length in range(1, len(runs) + 1):
        if len(runs) % length == 0 and runs == runs[:length] * (len(runs) // length):
            return runs[:length]
    return runs


def _moved(graph: Graph, leaves: dict[int, Tensor], end: int) -> Tensor | None:
    """`end` computed from integer leaves; None if an operation does more than move entries."""
    tensors = dict(leaves)
    for node in graph.ancestor_nodes(end):
        scaled = node.name in ("mul", "div") and len(node.inputs) == 1
        if scaled or node.name in _COPIES:
            tensors[node.outputs[0]] = tensors[node.inputs[0]]
            continue
        if node.name not in VIEWS and node.name not in ("cat", "stack"):
            return None
        tensors |= dict(zip(node.outputs, node.rerun(tensors.get), strict=True))
    return tensors.get(end)


# --- sites ----------------------------------------------------------------------------------------


class Sites:
    """The submodules whose first input or output is a value of the graph.

    Attributes:
        tokens: those that hold every token, in sequences or one after the other.

    Args:
        streams: the first values of the residual streams.
        dropouts: paths of the submodules that are nn.Dropout, which may drop nothing yet.
    """

    def __init__(self, graph: Graph, streams: Iterable[int], dropouts: Collection[str]) -> None:
        self.graph, self.dropouts = graph, dropouts
        rows = {graph.tensor(v).numel() // graph.tensor(v).shape[-1] for v in streams}
        boundaries = [b for b in graph.boundaries if graph.tensor(b.value).ndim in (2, 3)]
        self.tokens = {
            SubmoduleTensor(path, side)
            for path, side, value, _ in boundaries
            if graph.tensor(value).ndim == 3 or len(graph.tensor(value)) in rows
        }
        values: dict[SubmoduleTensor, set[int]] = {}
        for path, side, value, _ in boundaries:
            values.setdefault(SubmoduleTensor(path, side), set()).add(self._viewed(value))
        self._at: dict[int, list[SubmoduleTensor]] = {}
        for point, origins in values.items():
            if len(origins) == 1:  # a submodule that runs on several values is no site
                self._at.setdefault(origins.pop(), []).append(point)

    def _viewed(self, value: int) -> int:
        """The value that a value is a mere view of."""
        while (node := self.graph.producer(value)) is not None:
            size = self.graph.tensor(value).numel()
            view = node.name in VIEWS and len(node.outputs) == 1
            if not view or self.graph.tensor(node.inputs[0]).numel() != size:
                break
            value = node.inputs[0]
        return value

    def at(self, value: int) -> list[SubmoduleTensor]:
        """The submodules that give or read a value, in the order of the pass."""
        return self._at.get(self._viewed(value), [])

    def output(self, value: int) -> SubmoduleTensor | None:
        """The innermost submodule that gives a value, else the first that reads it."""
        return min(self.at(value), key=lambda point: point.side == "input", default=None)

    def input(self, value: int) -> SubmoduleTensor | None:
        """The first submodule that reads a value, else the innermost that gives it."""
        return min(self.at(value), key=lambda point: point.side == "output", default=None)

    def dropout(self, unit: BranchUnit) -> SubmoduleTensor | None:
        """The submodule that applies dropout to a block's output."""
        if unit.dropped is not None:
            return self.output(unit.dropped)
        points = (p for p in self.at(unit.raw) if p.path in self.dropouts and p.side == "output")
        return next(points, None)

    def norm(self, norm: Norm) -> str | None:
        """The path of the submodule that is a norm."""
        inputs = {p.path for p in self.at(norm.start) if p.side == "input"}
        outputs = (p.path for p in self.at(norm.end) if p.side == "output")
        return next((path for path in outputs if path in inputs), None)


def place(sites: Sites, stack: Stack) -> tuple[list[HookPoint], list[ModuleBranch], bool]:
    """The sites of a stack as submodules.

    Returns:
        Hook points; residual branches, none if submodules do not show all; and whether every
        stream is a hook point.
    """
    ends = [u.sum.output if u.sum_norm is None else u.sum_norm.end for *_, u in stack.layers]
    streams = _consistent([sites.at(value) for value in ends])
    rows = [(0, STREAM, _stream_input(sites, stack, streams))]
    blocks: list[ModuleBranch | None] = []
    for number, (units, stream) in enumerate(zip(stack.layers, streams, strict=True), start=1):
        layer: dict[str, SubmoduleTensor] = {}
        for unit in units:
            for site, point in _block_sites(sites, unit, not unit.parallel or unit is units[-1]):
                rows.append((number, site, point))
                if point is not None and point in sites.tokens:
                    layer.setdefault(site, point)
        rows.append((number, STREAM, stream))
        blocks += [_branch(sites, stack, number, unit, layer, stream) for unit in units]
    complete = all(point in sites.tokens for _, site, point in rows if site == STREAM)
    sums = all(point in sites.tokens for _, site, point in rows if site.endswith(".sum"))
    points = [
        HookPoint(number, stack.prefix + site, point.path, point.side)
        for number, site, point in (*rows, *_outer_sites(sites, stack))
        if point is not None and point in sites.tokens
    ]
    norms = (n for _, u in stack.units() for n in (u.pre_norm, u.sum_norm) if n is not None)
    whole = sums and None not in blocks and all(sites.norm(norm) is not None for norm in norms)
    return points, [block for block in blocks if block is not None and whole], complete


def _branch(
    sites: Sites,
    stack: Stack,
    layer: int,
    unit: BranchUnit,
    points: Mapping[str, SubmoduleTensor],
    stream: SubmoduleTensor | None,
) -> ModuleBranch | None:
    """A residual branch by the sites of its layer; None if no submodule shows it."""
    name = unit.name
    # its stream enters its norm, or the layer, which may run alone under checkpointing
    reader = (unit.pre_norm and sites.norm(unit.pre_norm)) or (stream.path if stream else "")
    inputs: SubmoduleTensor | None = SubmoduleTensor(reader, "input")
    if inputs not in sites.at(unit.sum.stream):
        inputs = sites.input(unit.sum.stream)
    raw = "ffn.out" if name == "ffn" else f"{name}.projection"
    dropout = points.get(f"{name}.dropout")
    candidates = points.get(f"{name}.post_norm"), dropout, points.get(raw)
    output = next((p for p in candidates if p and p.side == "output"), None)
    if stream is None or inputs is None or output is None:
        return None
    known = unit.scales_known and unit.proportional and not unit.scale_params and unit.branch
    norm = points.get(f"{name}.norm") or (points.get("attention.norm") if unit.parallel else None)
    return ModuleBranch(
        stack=stack.prefix,
        layer=layer,
        path=stream.path,
        name=name,
        placement=stack.placement(layer, unit),
        norm=None if norm is None else norm.path,
        stream=inputs,
        branch=output,
        parallel=unit.parallel,
        drops=unit.drops_last and output != dropout,
        native=float(f"{unit.branch:.6g}") if known else 1.0,
    )


def _stream_input(
    sites: Sites, stack: Stack, streams: list[SubmoduleTensor | None]
) -> SubmoduleTensor | None:
    """The first tensor of the stream: the input of the first layer if that is a submodule."""
    layer = streams[0].path if streams and streams[0] is not None else ""
    first = SubmoduleTensor(layer, "input")
    return min(sites.at(stack.start), key=lambda p: (p != first, p.side != "output"), default=None)


def _consistent(rows: list[list[SubmoduleTensor]]) -> list[SubmoduleTensor | None]:
    """One candidate of every layer, outermost first, whose path is alike in all layers."""

    def pattern(point: SubmoduleTensor) -> tuple[str, str]:
        return re.sub(r"\d+", "#", point.path), point.side

    common = set.intersection(*({pattern(p) for p in row} for row in rows)) if rows else set()
    result: list[SubmoduleTensor | None] = []
    for row in rows:
        ordered = [p for p in reversed(row) if p.side == "output"] + row
        alike = [p for p in ordered if pattern(p) in common and "#" in pattern(p)[0]]
        result.append(next(iter([*alike, *ordered]), None))
    return result


def _block_sites(
    sites: Sites, unit: BranchUnit, with_sum: bool
) -> Iterator[tuple[str, SubmoduleTensor | None]]:
    """The sites of one block."""
    name = unit.name
    if unit.pre_norm is not None:
        yield f"{name}.norm", sites.output(unit.pre_norm.end)
    if unit.attention is not None and unit.attention.output:
        yield f"{name}.heads", sites.input(unit.attention.output[-1].input)
        yield f"{name}.projection", sites.output(unit.raw)
    if (feed := unit.feed) is not None:
        rows = [row for rows in feed.projections.values() for row in rows]
        if len({linear.node for linear, _ in rows}) == len(feed.projections):
            for role, site in (("ffn_in", "ffn.in"), ("gate", "ffn.gate")):
                for linear, _ in feed.projections.get(role, [])[:1]:
                    yield site, sites.output(linear.output)
        if feed.dropped is None:
            yield "ffn.activation", sites.input(feed.output.input)
        else:
            yield "ffn.activation", sites.output(feed.dropped[0])
            yield "ffn.activation_dropout", sites.output(feed.dropped[1])
        yield "ffn.out", sites.output(unit.raw)
    if (dropout := sites.dropout(unit)) is not None:
        yield f"{name}.dropout", dropout
    if unit.output_norm is not None:
        yield f"{name}.post_norm", sites.output(unit.output_norm.end)
    if with_sum:
        yield f"{name}.sum", sites.output(unit.sum.output)
    if unit.sum_norm is not None:
        yield f"{name}.norm", sites.output(unit.sum_norm.end)


def _outer_sites(sites: Sites, stack: Stack) -> Iterator[tuple[int, str, SubmoduleTensor | None]]:
    """The sites before the first layer and behind the last."""
    start, last = stack.start, len(stack.layers) + 1
    embedding, head = stack.embedding, stack.head
    if embedding.total != start:
        yield 0, "embedding.sum", sites.output(embedding.total)
    if embedding.norm is not None:
        yield 0, "embedding.norm", sites.output(embedding.norm.end)
    if not embedding.is_input:
        if embedding.factor is not None and embedding.norm is not None:
            yield 0, "embedding", sites.output(embedding.factor.input)
            yield 0, "embedding.factor", sites.output(start)
        else:
            yield 0, "embedding", sites.output(start)
    if stack.final is not None:
        yield last, "final.norm", sites.output(stack.final.end)
    if head.norm is not None:
        yield last, "head.transform", sites.output(head.norm.start)
        yield last, "head.norm", sites.output(head.norm.end)
    if head.matrix is not None and head.pool not in ("first", "mean"):
        yield last, "logits", sites.output(head.matrix.output)
