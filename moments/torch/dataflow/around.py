"""What stands before the first layer and behind the last: tables, patches, head and loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .graph import VIEWS, Node
from .stream import StreamReader, SumChain
from .units import LinearUnit, Norm, proportionality, slope_and_cap

_LOOKUPS = ("embedding", "index", "index_select", "gather")
SINUSOIDAL = 0.5
"""Mean square of a sine and a cosine of one angle."""


@dataclass
class Before:
    """What enters layer 1.

    Attributes:
        tables: role -> parameter ("token", "position", "segment", "class").
        patch: the map of image patches.
        factor: the matrix that widens narrower tables: their normalised sum, or token rows.
        scale: multiplies the token's row; `factors` what else is added.
        total: the sum, before its norm and dropout.
        shape: of the picture; () for text.
    """

    tables: dict[str, str] = field(default_factory=dict)
    patch: LinearUnit | None = None
    factor: LinearUnit | None = None
    patch_size: int = 0
    scale: float = 1.0
    factors: dict[str, float] = field(default_factory=dict)
    sinusoidal: bool = False
    norm: Norm | None = None
    dropout: float = 0.0
    total: int = 0
    offset: int = 0
    shape: tuple[int, ...] = ()
    given: bool = False
    doubts: list[str] = field(default_factory=list)


@dataclass
class After:
    """What follows the last layer; `factor` narrows what the matrix to the logits reads, `scaled`:
    whether what multiplies the logits was read."""

    transform: LinearUnit | None = None
    factor: LinearUnit | None = None
    activation: str | None = None
    norm: Norm | None = None
    matrix: LinearUnit | None = None
    scale: float = 1.0
    scaled: bool = False
    softcap: float | None = None
    dropout: float = 0.0
    pool: str | None = None
    labels: int = 0
    doubts: list[str] = field(default_factory=list)


def before(stream: StreamReader, chain: SumChain) -> Before:
    """Reads what makes the tensor that enters layer 1."""
    graph, reader = stream.graph, stream.reader
    start = chain.start
    result = Before(total=start)
    value = graph.values[reader.source(start)]
    if value.producer is None:
        result.given = True
        return result
    nodes = graph.ancestor_nodes(start)
    looked = [row for node in nodes if (row := _lookup(stream, node)) is not None]
    linears = [reader.linears[node.index] for node in nodes if node.index in reader.linears]
    if looked and len(linears) == 1 and _size(stream, linears[0].input) < _size(stream, start):
        (linear,) = linears
        if reader.source(linear.output) == reader.source(start):
            result.factor, start = linear, linear.input
            while (view := graph.producer(start)) is not None and view.name in VIEWS:
                start = view.inputs[0]
            result.total, linears, nodes = start, [], graph.ancestor_nodes(start)
        elif reader.source(linear.input) in [made for *_, made in looked] and not linear.biases:
            result.factor = linear
    width = _size(stream, start)
    looked = [
        row for row in looked if graph.tensor(row[2]).shape[-1] == width or reader.live(row[2])
    ]
    _norm(stream, result, start, nodes)
    if result.factor is not None and (start == chain.start) == (result.norm is not None):
        result.doubts.append(
            f"{_list(result.factor.params)}: neither behind the norm of all tables, "
            "nor of token rows without one"
        )
    zeros: dict[int, Tensor] = {}
    for name, index, made in looked:
        role = _role_of_lookup(stream, index)
        if role is None or role in result.tables:
            result.doubts.append(f"{name}: looked up before layer 1, as nothing known")
            continue
        result.tables[role] = name
        if role == "position":
            result.offset = int(graph.tensor(index).min())
        zeros[made] = torch.zeros_like(graph.tensor(made))
        factor = _factor(stream, made, result.total) or 1.0
        if role == "token":
            result.scale = factor
        elif abs(factor - 1) > 1e-4:
            result.factors[role] = factor
    used = {name for name, _, _ in looked}
    for linear in linears:
        node = graph.nodes[linear.node]
        whole = graph.values[reader.source(linear.input)]
        kernel = graph.tensor(linear.matrix).shape
        if result.patch is None and "convolution" in node.name and whole.name and len(kernel) == 4:
            result.patch, result.patch_size = linear, kernel[-1]
            result.shape = tuple(whole.tensor.shape)
        elif linear is not result.factor:
            result.doubts.append(f"{_list(linear.params)}: a matrix before layer 1")
        zeros[linear.output] = torch.zeros_like(graph.tensor(linear.output))
        used |= linear.params
        for bias in linear.biases:
            used |= graph.values[bias].params
    if result.norm is not None:
        used |= {*result.norm.gains, *result.norm.biases}
    for leaf in reader.parameters_of(nodes):
        name = str(graph.values[leaf].name)
        if name in used:
            continue
        tensor = graph.tensor(leaf)
        if not tensor.numel():  # no registers, say
            continue
        tokens = tensor.numel() // width
        role = "class" if tokens == 1 else "position" if tensor.shape[-1] == width else None
        if all(graph.nodes[n].name.rstrip("_") in _SCALING for n in graph.values[leaf].consumers):
            role = None  # a norm's gain
        if role is None or role in result.tables:
            result.doubts.append(f"{name}: before layer 1, as nothing known")
        else:
            result.tables[role] = name
        zeros[leaf] = torch.zeros_like(tensor)
    _constant(stream, result, zeros)
    if result.factor is not None and (
        result.sinusoidal if result.norm else "segment" in result.tables
    ):
        result.doubts.append(
            f"{_list(result.factor.params)}: widens tables, with sines or segments added"
        )
    return result


_SCALING = ("mul", "layer_norm", "native_layer_norm", "rms_norm")
"""Operations that take a parameter as a factor."""


def _size(stream: StreamReader, value: int) -> int:
    """Features of a value."""
    return int(stream.graph.tensor(value).shape[-1])


def _list(names: Any) -> str:
    return ", ".join(sorted(names))


def _lookup(stream: StreamReader, node: Node) -> tuple[str, int, int] | None:
    """A table's parameter, the indices, the rows."""
    graph = stream.graph
    if node.name not in _LOOKUPS:
        return None
    table = graph.values[node.inputs[0]]
    if table.live or len(table.params) != 1 or len(node.inputs) < 2:
        return None
    return next(iter(table.params)), node.inputs[-1], node.outputs[0]


def _role_of_lookup(stream: StreamReader, index: int) -> str | None:
    ids, live = stream.graph.tensor(index), stream.reader.live(index)
    if ids.ndim >= 1 and ids.shape[-1] > 1:
        steps = ids.reshape(-1, ids.shape[-1]).diff(dim=-1)
        if not bool(steps.any()):
            if not live or bool((ids == ids.flatten()[0]).all()):
                return "segment"
        elif bool(((steps == 0) | (steps == 1)).all()):
            return "position"
    return "token" if live else None


def _factor(stream: StreamReader, start: int, end: int) -> float | None:
    """What a value is multiplied by on its way to another one; None: it is not multiplied."""
    graph = stream.graph
    row, x = stream.reader.random_row(start)
    made, base = (graph.run({start: t}, end)[0] for t in (x, 0 * x))
    if made.shape[-1] != len(row):
        return None
    moved = (made - base).double().reshape(-1, len(row))
    return proportionality(row.expand_as(moved), moved)


def _norm(stream: StreamReader, result: Before, start: int, nodes: list[Node]) -> None:
    """The norm of the sum, if there is one, and the dropout behind it."""
    graph, reader = stream.graph, stream.reader
    size = graph.tensor(start).shape
    sums = (n for n in reversed(nodes) if n.name.rstrip("_") in ("add", "mul", "cat", *_LOOKUPS))
    for value in (node.outputs[0] for node in sums):
        tensor = graph.tensor(value)
        if value == start or not reader.live(value) or tensor.shape != size:
            continue
        link = stream.norm(value, start) if tensor.is_floating_point() else None
        if isinstance(link, tuple):
            result.norm, result.total = link[0], value
            break
    drops = [(node, p) for node in nodes if (p := reader.dropout_of(node)) is not None]
    if drops:
        node, result.dropout = drops[-1]
        if result.norm is None:
            result.total = next(v for v in node.inputs if reader.live(v))


def _constant(stream: StreamReader, read: Before, zeros: dict[int, Tensor]) -> None:
    """What is added that is no parameter."""
    if not zeros:
        return
    (left,) = stream.graph.run(zeros, read.total)
    square = float(left.double().square().mean())
    if square > 1e-12:
        read.sinusoidal = abs(square / SINUSOIDAL - 1) < 0.01 and "position" not in read.tables
        if not read.sinusoidal:
            read.doubts.append(
                f"what is added to the tables before layer 1 (mean square {square:.3g}) is no "
                "parameter and no sinusoidal positions"
            )


def after(stream: StreamReader, chain: SumChain, others: list[SumChain]) -> After:
    """Reads what is made of the last layer's output."""
    graph, reader = stream.graph, stream.reader
    end, last = chain.end, chain.sums[-1].value
    result = After()
    sums = [one for other in others for one in other.sums]
    inside = {n.index for one in sums for tip in one.tips for n in graph.path([one.stream], tip)}
    attentions = [b.attention for other in others for b in other.blocks if b.attention is not None]
    inside |= {m.node for a in attentions for rows in a.projections.values() for m, _ in rows}
    ends = (other.sums[-1].value for other in others if other is not chain)
    later = [value for value in ends if graph.depends_on(value, last)]
    behind = [
        linear
        for linear in reader.linears.values()
        if linear.node not in inside
        and graph.depends_on(linear.input, last)
        and not any(graph.depends_on(linear.input, value) for value in later)
    ]
    for one in behind[:-2]:
        result.doubts.append(f"{_list(one.params)}: a matrix behind the last layer")
    behind = behind[-2:]
    if not behind:
        crossing = [
            linear.input
            for linear in reader.linears.values()
            if graph.depends_on(linear.input, end) and not reader.linears_between(end, linear.input)
        ]
        drops = reader.dropouts(end, crossing[0]) if crossing else []
        result.dropout = drops[0][1] if drops else 0.0
        return result
    matrix = result.matrix = behind[-1]
    if len(behind) == 2 and graph.depends_on(matrix.input, behind[0].output):
        _transform(stream, result, behind[0], matrix)
    elif len(behind) == 2:
        result.doubts.append(f"{_list(behind[0].params)}: a second matrix behind the last layer")
    first = result.transform or result.factor or matrix
    result.scale = _factor(stream, end, first.input) or 1.0
    result.pool = _pool(stream, end, first.input)
    drops = reader.dropouts(end, first.input)
    result.dropout = drops[0][1] if drops else 0.0
    _logits(stream, result)
    return result


def _transform(stream: StreamReader, result: After, linear: LinearUnit, matrix: LinearUnit) -> None:
    """A hidden layer: its activation, and the norm behind it."""
    graph, reader = stream.graph, stream.reader
    whole = graph.tensor(matrix.input).numel()
    for node in graph.path([linear.output], matrix.input):
        value = node.outputs[0]
        if graph.tensor(value).numel() != whole:
            continue
        name = reader.activation(linear.output, value)
        if name is None:
            continue
        link = stream.norm(value, matrix.input)
        if isinstance(link, tuple):
            result.norm = link[0]
        if link is not None:
            result.transform, result.activation = linear, name
            if name != "identity":
                return
    plain = result.activation == "identity" and result.norm is None and not linear.biases
    if result.transform is None:
        result.doubts.append(f"{_list(linear.params)}: a matrix behind the last layer")
    elif plain and _size(stream, matrix.input) < _size(stream, linear.input):
        result.factor, result.transform = linear, None


def _pool(stream: StreamReader, end: int, read: int) -> str | None:
    """ "first" or "mean" of a sequence's tokens; None: every token, or another choice."""
    graph = stream.graph
    tensor = graph.tensor(end)
    if tensor.ndim != 3 or graph.tensor(read).numel() == tensor.numel():
        return None
    x = torch.zeros_like(tensor)
    x[:, 0] = 1.0
    one, base = (graph.run({end: t}, read)[0] for t in (x, 0 * x))
    share = float((one - base).mean())
    if abs(share - 1) < 1e-4:
        return "first"
    return "mean" if abs(share * tensor.shape[1] - 1) < 0.2 else "other"


def _logits(stream: StreamReader, result: After) -> None:
    """From the matrix to the logits."""
    graph, reader = stream.graph, stream.reader
    assert result.matrix is not None
    made = result.matrix.output
    result.labels = graph.tensor(made).shape[-1]
    end, waiting = made, [made]
    while waiting:
        value = waiting.pop(0)
        for index in graph.values[value].consumers:
            node = graph.nodes[index]
            name, output = node.name.rstrip("_"), next(iter(node.outputs), made)
            if name in ("mul", "div", "tanh", "_to_copy") and reader.live(output):
                if graph.tensor(output).numel() == graph.tensor(made).numel():
                    end = output
                    waiting.append(end)
            elif name in ("view", "_unsafe_view", "clone", "alias"):
                waiting.append(output)
    result.scaled = True
    if end == made:
        return
    x = 30 * reader.random_like(made)
    slope, result.softcap = slope_and_cap(
        x.double(), lambda size: graph.run({made: size * x}, end)[0].reshape(x.shape)
    )
    if slope is None:
        result.scaled = False
        result.doubts.append("what is made of the logits is neither a factor nor a cap")
    elif result.softcap == 1:  # a pooler's activation
        result.matrix = result.softcap = None
    else:
        result.scale *= slope
