"""What precedes the first layer and what follows the last: tables, patches, head and loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .graph import VIEWS, Node
from .stream import StreamReader
from .units import EmbeddingUnit, HeadUnit, LinearUnit, Stack, proportionality, slope_and_cap

_LOOKUPS = ("embedding", "index", "index_select", "gather")
_SCALING = ("mul", "layer_norm", "native_layer_norm", "rms_norm")
"""Operations that take a parameter as a factor."""

SINUSOIDAL = 0.5
"""Mean square of a sine and a cosine of one angle."""


class _Lookup(NamedTuple):
    """A table's parameter, and the values of the indices and of the rows."""

    parameter: str
    indices: int
    rows: int


# --- before the first layer -----------------------------------------------------------------------


def read_embedding(stream: StreamReader, end: int) -> EmbeddingUnit:
    """Read what makes the value `end`, the input of layer 1."""
    graph, start = stream.graph, end
    result = EmbeddingUnit(total=start)
    if graph.values[stream.source(start)].producer is None:
        result.is_input = True
        return result
    nodes = graph.ancestor_nodes(start)
    lookups = [row for node in nodes if (row := _lookup(stream, node)) is not None]
    linears = [stream.linears[node.index] for node in nodes if node.index in stream.linears]
    if lookups and len(linears) == 1 and stream.width(linears[0].input) < stream.width(start):
        (linear,) = linears
        if stream.source(linear.output) == stream.source(start):
            result.factor, start = linear, linear.input
            while (view := graph.producer(start)) is not None and view.name in VIEWS:
                start = view.inputs[0]
            result.total, linears, nodes = start, [], graph.ancestor_nodes(start)
        elif stream.source(linear.input) in [row.rows for row in lookups] and not linear.biases:
            result.factor = linear
    width = stream.width(start)
    lookups = [row for row in lookups if stream.width(row.rows) == width or stream.live(row.rows)]
    _read_norm(stream, result, start, nodes)
    if result.factor is not None and (start == end) == (result.norm is not None):
        result.doubts.append(
            f"{_names(result.factor.params)}: neither behind the norm of all tables, "
            "nor of token rows without one"
        )
    summands = [
        *_read_tables(stream, result, lookups),
        *_read_patches(stream, result, linears),
        *_read_vectors(stream, result, nodes, lookups, linears, width),
    ]
    _read_constant(stream, result, summands)
    if result.factor is not None and (
        result.sinusoidal if result.norm else "segment" in result.tables
    ):
        result.doubts.append(
            f"{_names(result.factor.params)}: widens tables, with sines or segments added"
        )
    return result


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _lookup(stream: StreamReader, node: Node) -> _Lookup | None:
    if node.name not in _LOOKUPS:
        return None
    table = stream.graph.values[node.inputs[0]]
    if table.live or len(table.params) != 1 or len(node.inputs) < 2:
        return None
    return _Lookup(next(iter(table.params)), node.inputs[-1], node.outputs[0])


def _read_norm(stream: StreamReader, result: EmbeddingUnit, start: int, nodes: list[Node]) -> None:
    """Read the norm of the sum of tables and the dropout behind it."""
    graph = stream.graph
    shape = graph.tensor(start).shape
    sums = (n for n in reversed(nodes) if n.name.rstrip("_") in ("add", "mul", "cat", *_LOOKUPS))
    for value in (node.outputs[0] for node in sums):
        tensor = graph.tensor(value)
        if value == start or not stream.live(value) or tensor.shape != shape:
            continue
        link = stream.link(value, start) if tensor.is_floating_point() else None
        if link is not None and link.norm is not None:
            result.norm, result.total = link.norm, value
            break
    drops = [(node, p) for node in nodes if (p := stream.dropout_of(node)) is not None]
    if drops:
        node, result.dropout = drops[-1]
        if result.norm is None:
            result.total = next(v for v in node.inputs if stream.live(v))


def _read_tables(stream: StreamReader, result: EmbeddingUnit, lookups: list[_Lookup]) -> list[int]:
    """Read the role and the factor of every table; return the values of their rows."""
    summands = []
    for name, indices, rows in lookups:
        role = _role_of_indices(stream, indices)
        if role is None or role in result.tables:
            result.doubts.append(f"{name}: looked up before layer 1, as nothing known")
            continue
        result.tables[role] = name
        if role == "position":
            result.offset = int(stream.graph.tensor(indices).min())
        summands.append(rows)
        factor = _factor(stream, rows, result.total) or 1.0
        if role == "token":
            result.scale = factor
        elif abs(factor - 1) > 1e-4:
            result.factors[role] = factor
    return summands


def _role_of_indices(stream: StreamReader, indices: int) -> str | None:
    """The role of a table: "segment" for equal indices, "position" for a count, else "token"."""
    ids, live = stream.graph.tensor(indices), stream.live(indices)
    if ids.ndim >= 1 and ids.shape[-1] > 1:
        steps = ids.reshape(-1, ids.shape[-1]).diff(dim=-1)
        if not bool(steps.any()):
            if not live or bool((ids == ids.flatten()[0]).all()):
                return "segment"
        elif bool(((steps == 0) | (steps == 1)).all()):
            return "position"
    return "token" if live else None


def _factor(stream: StreamReader, start: int, end: int) -> float | None:
    """The factor from one value to another; None if they are not proportional."""
    row, x = stream.random_row(start)
    y, base = (stream.graph.run({start: t}, end)[0] for t in (x, 0 * x))
    if y.shape[-1] != len(row):
        return None
    change = (y - base).double().reshape(-1, len(row))
    return proportionality(row.expand_as(change), change)


def _read_patches(
    stream: StreamReader, result: EmbeddingUnit, linears: list[LinearUnit]
) -> list[int]:
    """Read the convolution of a picture's patches; return what the linear maps give."""
    graph = stream.graph
    for linear in linears:
        source = graph.values[stream.source(linear.input)]
        kernel = graph.tensor(linear.matrix).shape
        convolves = "convolution" in graph.nodes[linear.node].name and len(kernel) == 4
        if result.patch is None and convolves and source.name:
            result.patch, result.patch_size = linear, kernel[-1]
            result.shape = tuple(source.tensor.shape)
        elif linear is not result.factor:
            result.doubts.append(f"{_names(linear.params)}: a matrix before layer 1")
    return [linear.output for linear in linears]


def _read_vectors(
    stream: StreamReader,
    result: EmbeddingUnit,
    nodes: list[Node],
    lookups: list[_Lookup],
    linears: list[LinearUnit],
    width: int,
) -> list[int]:
    """Read the remaining parameters, which are added as they are: positions or a class token."""
    graph = stream.graph
    known = {row.parameter for row in lookups}
    for linear in linears:
        known |= linear.params.union(*(graph.values[bias].params for bias in linear.biases))
    if result.norm is not None:
        known |= {*result.norm.gains, *result.norm.biases}
    summands = []
    for leaf in stream.parameters_of(nodes):
        name, tensor = str(graph.values[leaf].name), graph.tensor(leaf)
        if name in known or not tensor.numel():  # empty: no registers, say
            continue
        tokens = tensor.numel() // width
        role = "class" if tokens == 1 else "position" if tensor.shape[-1] == width else None
        if all(graph.nodes[n].name.rstrip("_") in _SCALING for n in graph.values[leaf].consumers):
            role = None  # a norm's gain
        if role is None or role in result.tables:
            result.doubts.append(f"{name}: before layer 1, as nothing known")
        else:
            result.tables[role] = name
        summands.append(leaf)
    return summands


def _read_constant(stream: StreamReader, result: EmbeddingUnit, summands: list[int]) -> None:
    """Read what remains of the sum without its parameters: sinusoidal positions or nothing."""
    if not summands:
        return
    zeros = {value: torch.zeros_like(stream.graph.tensor(value)) for value in summands}
    (rest,) = stream.graph.run(zeros, result.total)
    square = float(rest.double().square().mean())
    if square > 1e-12:
        sines = abs(square / SINUSOIDAL - 1) < 0.01 and "position" not in result.tables
        result.sinusoidal = sines
        if not sines:
            result.doubts.append(
                f"what is added to the tables before layer 1 (mean square {square:.3g}) is no "
                "parameter and no sinusoidal positions"
            )


# --- behind the last layer ------------------------------------------------------------------------


def read_head(stream: StreamReader, chain: Stack, chains: list[Stack]) -> HeadUnit:
    """Read what follows the last layer of one of the chains."""
    graph = stream.graph
    end = chain.end
    result = HeadUnit()
    behind = _linears_behind(stream, chain, chains)
    for linear in behind[:-2]:
        result.doubts.append(f"{_names(linear.params)}: a matrix behind the last layer")
    if not behind:
        inputs = [
            linear.input
            for linear in stream.linears.values()
            if graph.depends_on(linear.input, end) and not stream.linears_between(end, linear.input)
        ]
        result.dropout = stream.dropout(end, inputs[0]) if inputs else 0.0
        return result
    *hidden, matrix = behind[-2:]
    result.matrix = matrix
    for linear in hidden:
        if graph.depends_on(matrix.input, linear.output):
            _read_transform(stream, result, linear, matrix)
        else:
            result.doubts.append(f"{_names(linear.params)}: a second matrix behind the last layer")
    first = result.transform or result.factor or matrix
    result.scale = _factor(stream, end, first.input) or 1.0
    result.pool = _pool(stream, end, first.input)
    result.dropout = stream.dropout(end, first.input)
    _read_logits(stream, result, matrix)
    return result


def _linears_behind(stream: StreamReader, chain: Stack, chains: list[Stack]) -> list[LinearUnit]:
    """The linear maps behind a chain that belong to no block and follow no other chain."""
    graph, last = stream.graph, chain.sums[-1].output
    blocks = {
        node.index
        for other in chains
        for one in other.sums
        for branch in one.branches
        for node in graph.path([one.stream], branch)
    }
    attentions = [b.attention for other in chains for b in other.blocks if b.attention is not None]
    blocks |= {m.node for a in attentions for rows in a.projections.values() for m, _ in rows}
    ends = (other.sums[-1].output for other in chains if other is not chain)
    later = [value for value in ends if graph.depends_on(value, last)]
    return [
        linear
        for linear in stream.linears.values()
        if linear.node not in blocks
        and graph.depends_on(linear.input, last)
        and not any(graph.depends_on(linear.input, value) for value in later)
    ]


def _read_transform(
    stream: StreamReader, result: HeadUnit, linear: LinearUnit, matrix: LinearUnit
) -> None:
    """Read a hidden layer, its activation and the norm behind it; or a narrowing linear map."""
    graph = stream.graph
    size = stream.size(matrix.input)
    for node in graph.path([linear.output], matrix.input):
        value = node.outputs[0]
        if stream.size(value) != size:
            continue
        name = stream.activation(linear.output, value)
        if name is None:
            continue
        link = stream.link(value, matrix.input)
        if link is not None:
            result.norm = link.norm or result.norm
            result.transform, result.activation = linear, name
            if name != "identity":
                return
    plain = result.activation == "identity" and result.norm is None and not linear.biases
    if result.transform is None:
        result.doubts.append(f"{_names(linear.params)}: a matrix behind the last layer")
    elif plain and stream.width(matrix.input) < stream.width(linear.input):
        result.factor, result.transform = linear, None


def _pool(stream: StreamReader, start: int, end: int) -> str | None:
    """Which tokens of `start` reach `end`: "first", the "mean", "other"; None for every one."""
    tensor = stream.graph.tensor(start)
    if tensor.ndim != 3 or stream.size(end) == tensor.numel():
        return None
    x = torch.zeros_like(tensor)
    x[:, 0] = 1.0
    y, base = (stream.graph.run({start: t}, end)[0] for t in (x, 0 * x))
    share = float((y - base).mean())
    if abs(share - 1) < 1e-4:
        return "first"
    return "mean" if abs(share * tensor.shape[1] - 1) < 0.2 else "other"


def _read_logits(stream: StreamReader, result: HeadUnit, matrix: LinearUnit) -> None:
    """Read the factor or the cap between the last matrix and the logits."""
    graph, start = stream.graph, matrix.output
    result.labels = stream.width(start)
    end, waiting = start, [start]
    while waiting:
        for index in graph.values[waiting.pop(0)].consumers:
            node = graph.nodes[index]
            name, output = node.name.rstrip("_"), next(iter(node.outputs), start)
            if name in ("mul", "div", "tanh", "_to_copy") and stream.live(output):
                if stream.size(output) == stream.size(start):
                    end = output
                    waiting.append(end)
            elif name in ("view", "_unsafe_view", "clone", "alias"):
                waiting.append(output)
    result.scaled = True
    if end == start:
        return
    x = 30 * stream.random_like(start)

    def logits(size: float) -> Tensor:
        return graph.run({start: size * x}, end)[0].reshape(x.shape)

    slope, result.softcap = slope_and_cap(x.double(), logits)
    if slope is None:
        result.scaled = False
        result.doubts.append("what is made of the logits is neither a factor nor a cap")
    elif result.softcap == 1:  # a pooler's activation
        result.matrix = result.softcap = None
    else:
        result.scale *= slope
