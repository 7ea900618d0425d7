"""Parts of a transformer, recognised by what a part of a graph computes, not by its source code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...formulas.activation import activation_names
from ...simulation.functions import activation
from .graph import PRODUCTS, SOFTMAX, VIEWS, Graph, Node, Ref

EXACT = 2e-3
"""Relative deviation up to which two results count as the same (float32 with some cancellation)."""


class LinearUnit(NamedTuple):
    """A product of a live value and a matrix of parameters.

    Attributes:
        node: index of the product.
        input: the live factor.
        output: the result, with its bias.
        matrix: the factor that does not depend on the batch.
        params: names of the parameters that the matrix is made of.
        biases: values that are added.
    """

    node: int
    input: int
    output: int
    matrix: int
    params: frozenset[str]
    biases: tuple[int, ...] = ()


Projections = dict[str, list[tuple[LinearUnit, Tensor]]]
"""Role -> matrices, each with those of its output columns that play the role."""


class Fit(NamedTuple):
    """A normalisation, and its gain by feature."""

    kind: str
    gains: Tensor


@dataclass
class Norm:
    """A normalisation of the value `start` that gives `end`.

    Attributes:
        kind: "layernorm" or "rmsnorm".
        gain: root mean square of its gain.
        gains, biases: names of parameters.
        groups: 0 if a norm of queries or keys spans all heads, else 1.
        scale: factor of the normalised entries behind a norm of queries or keys, `gain` included.
        unit: whether the gain is its parameter, not 1 + parameter; None: neither.
    """

    start: int
    end: int
    kind: str
    gain: float
    epsilon: float
    gains: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    groups: int = 1
    scale: float = 1.0
    unit: bool | None = None


class Link(NamedTuple):
    """What lies between two values: a norm, if there is one, and then a factor."""

    norm: Norm | None
    factor: float


@dataclass
class RotationUnit:
    """Rotary positions.

    Attributes:
        fraction: of the head's features that rotate.
        base: its powers are the speeds, to the relative `deviation`.
        speeds: radians per token of the rotating pairs, fastest first.
    """

    fraction: float
    base: float
    deviation: float
    speeds: tuple[float, ...]


@dataclass
class Core:
    """softmax(q k^T) v: the index of the softmax and of the product q k, and values of the graph.

    `over_keys`: whether the softmax normalises over keys, as it should.
    """

    softmax: int
    logits: int
    weights: int
    query: int
    key: int
    value: int
    output: int
    product: int
    over_keys: bool


@dataclass
class AttentionUnit:
    """One attention; see `Transformer` for the fields.

    Attributes:
        core: its softmax and what that reads.
        multiplier: logits / (q k); None if they are not proportional.
        relative: the parameter of a relative bias, with so many `buckets`.
        projections: role -> matrices with those of their output columns that play it.
        output: the matrices behind the heads.
        rotates_values: whether values are rotated by their position.
        sinks: the parameter that holds one more logit for every head.
    """

    core: Core
    heads: int
    d_head: int
    kv_heads: int
    multiplier: float | None = None
    causal: bool = False
    window: int | None = None
    alibi: bool | float = False
    relative: str | None = None
    buckets: int = 0
    rotary: RotationUnit | None = None
    qk_norm: Norm | None = None
    key_norm: Norm | None = None
    softcap: float | None = None
    dropout: float = 0.0
    projections: Projections = field(default_factory=dict)
    output: list[LinearUnit] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    rotates_values: bool = False
    sinks: str | None = None

    @property
    def temperature(self) -> float:
        """Logits are q k / (sqrt(d_head) temperature)."""
        return 1 / (self.multiplier * math.sqrt(self.d_head)) if self.multiplier else 1.0


@dataclass
class StreamSum:
    """A residual sum, skip * stream + branch * f, of one block's f or of two.

    Attributes:
        index: number of the operation.
        stream: value of the stream that the blocks read.
        branches: value of each f, before views, dropouts and factors.
        terms: value of each f as the sum adds it.
    """

    index: int
    output: int
    stream: int
    branches: tuple[int, ...]
    terms: tuple[int, ...]


@dataclass
class FeedUnit:
    """A feed-forward block; `dropped`: values before and after dropout of its activations."""

    projections: Projections
    output: LinearUnit
    activation: str | None
    gated: bool
    d_ff: int
    dropout: float
    dropped: tuple[int, int] | None = None


@dataclass
class BranchUnit:
    """One residual branch.

    Attributes:
        raw: value that its last matrix gives.
        pre_norm: between the stream and the block's matrices, followed by `pre_factor`.
        output_norm: of the block's output, before the sum.
        sum_norm: of the residual sum, followed by `sum_factor`.
        skip, branch: factors of the sum.
        scale_params: parameters in `branch`.
        dropped: value behind the block's dropout, of probability `dropout`.
        drops_last: whether dropout acts behind `output_norm`.
        proportional: whether the sum adds multiples of the stream and of the block's output.
        scales_known: whether `skip` and `branch` could be read.
        parallel: whether the sum has a second block.
    """

    name: str
    sum: StreamSum
    raw: int
    pre_norm: Norm | None = None
    pre_factor: float = 1.0
    output_norm: Norm | None = None
    sum_norm: Norm | None = None
    sum_factor: float = 1.0
    skip: float = 1.0
    branch: float = 1.0
    scale_params: tuple[str, ...] = ()
    dropout: float = 0.0
    dropped: int | None = None
    drops_last: bool = False
    proportional: bool = True
    scales_known: bool = True
    parallel: bool = False
    attention: AttentionUnit | None = None
    feed: FeedUnit | None = None

    @property
    def norms(self) -> list[Norm]:
        """Its norms: of its input, of the sum, of its output."""
        return [n for n in (self.pre_norm, self.sum_norm, self.output_norm) if n is not None]

    @property
    def norm_factor(self) -> float:
        """The factor behind the norm of its input, or else behind that of the sum."""
        return self.sum_factor if self.pre_norm is None else self.pre_factor


@dataclass
class EmbeddingUnit:
    """The input of layer 1.

    Attributes:
        tables: role -> parameter ("token", "position", "segment", "class").
        patch: the linear map of image patches, of `patch_size` pixels a side.
        factor: the matrix that widens narrower tables: their normalised sum, or the token rows.
        scale: multiplies the token's row; `factors` the rows of other tables.
        sinusoidal: whether sinusoidal positions are added.
        total: the sum, before its norm and dropout.
        offset: row of the position table that the first token has.
        shape: of the picture; () for text.
        is_input: whether the module's own input enters layer 1.
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
    is_input: bool = False
    doubts: list[str] = field(default_factory=list)


@dataclass
class HeadUnit:
    """What follows the last layer.

    Attributes:
        transform: hidden linear map, with an `activation` and a `norm` behind it.
        factor: linear map that narrows the input of `matrix`, which gives the logits.
        scale: multiplies the logits; `scaled`: whether it could be read.
        softcap: c of logits c tanh(z / c).
        pool: "first" or "mean" token of a sequence, "other", or None for every token.
        labels: number of logits.
    """

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


@dataclass
class Stack:
    """One residual stream: its sums and blocks in order, and what precedes and follows it.

    Attributes:
        start, end: the first value of the stream, and the last one or that of its final norm.
        prefix: "", or "encoder." if there is a decoder too.
        layers: the blocks by layer.
        placements: where the norms of each layer are: "pre", "post", ...
        unnormed: layer and block of the few that lack the norms which the others have.
    """

    start: int
    sums: list[StreamSum]
    blocks: list[BranchUnit] = field(default_factory=list)
    final: Norm | None = None
    end: int = 0
    prefix: str = ""
    layers: list[list[BranchUnit]] = field(default_factory=list)
    placements: list[str] = field(default_factory=list)
    unnormed: list[tuple[int, str]] = field(default_factory=list)
    embedding: EmbeddingUnit = field(default_factory=EmbeddingUnit)
    head: HeadUnit = field(default_factory=HeadUnit)

    def units(self) -> Iterator[tuple[int, BranchUnit]]:
        """Every block with the number of its layer, from 1."""
        for number, units in enumerate(self.layers, start=1):
            yield from ((number, unit) for unit in units)

    def placement(self, layer: int, unit: BranchUnit) -> str:
        return "none" if (layer, unit.name) in self.unnormed else self.placements[layer - 1]


class GraphReader:
    """Recognises linear maps, norms, activations and attention in a graph.

    Attributes:
        adapters: parameters of adapters that were removed because they add nothing yet.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.random = torch.Generator().manual_seed(0)
        self._fits: dict[tuple[int, int, int | None], Fit | float | None] = {}
        self.adapters = tuple(self._remove_adapters())

    def random_like(self, value: int) -> Tensor:
        """A standard normal tensor of the shape of a value."""
        tensor = self.graph.tensor(value)
        return torch.randn(tensor.shape, generator=self.random).to(tensor.dtype)

    def random_row(self, value: int) -> tuple[Tensor, Tensor]:
        """A random vector of features in double precision, and the value with it at every token."""
        tensor = self.graph.tensor(value)
        row = torch.randn(tensor.shape[-1], generator=self.random)
        return row.double(), row.to(tensor.dtype).expand(tensor.shape).contiguous()

    def live(self, value: int) -> bool:
        return self.graph.values[value].live

    def size(self, value: int) -> int:
        """The number of entries of a value."""
        return int(self.graph.tensor(value).numel())

    def width(self, value: int) -> int:
        """The number of features of a value."""
        return int(self.graph.tensor(value).shape[-1])

    # --- dropouts, views and factors ---------------------------------------------------------

    def dropout_of(self, node: Node) -> float | None:
        """The dropout probability, if a node applies a dropout's mask."""
        drop_prob, whole = self._mask_of(node)
        return drop_prob if whole else None

    def drop_path_of(self, node: Node) -> float | None:
        """The probability, if a node drops whole sequences or tokens (stochastic depth)."""
        drop_prob, whole = self._mask_of(node)
        return None if whole else drop_prob

    def _mask_of(self, node: Node) -> tuple[float | None, bool]:
        """The probability of the mask that a node applies, and whether it has an entry for each."""
        if node.name == "native_dropout":
            return (float(node.args[1]) if node.args[1] else None), True
        live = [v for v in node.inputs if self.live(v)]
        for value in node.inputs if live else ():
            drop_prob = self.graph.values[value].drop_prob
            if drop_prob is not None:
                whole = self.size(live[0])
                return drop_prob, self.size(value) >= whole
        return None, True

    def upstream(self, value: int, *, scaled: bool = True) -> Iterator[int]:
        """A value and the values it comes from by views, dropouts and, if `scaled`, factors."""
        current: int | None = value
        while current is not None:
            yield current
            value, node = current, self.graph.producer(current)
            current = None if node is None else self.passed_input(node, scaled=scaled)
            if node is not None and node.outputs[0] != value and node.name not in VIEWS:
                return

    def source(self, value: int, *, scaled: bool = True) -> int:
        """The first value of `upstream`: what a value is before views, dropouts and factors."""
        *_, result = self.upstream(value, scaled=scaled)
        return result

    def passed_input(self, node: Node, *, scaled: bool) -> int | None:
        """The input of a view, a dropout or, if `scaled`, a factor; None for other operations."""

        if node.name in VIEWS:
            sizes = {self.size(value) for value in (node.inputs[0], *node.outputs)}
            same = len(node.outputs) == len(sizes) == 1
            return node.inputs[0] if same else None
        name = node.name.rstrip("_")
        if name == "native_dropout":
            return node.inputs[0]
        if name not in ("mul", "div"):
            return None
        live = [v for v in node.inputs if self.live(v)]
        if len(live) != 1 or (name == "div" and live[0] != node.inputs[0]):
            return None
        if self._mask_of(node)[0] is not None:
            return live[0]
        if not scaled or self.size(live[0]) != self.size(node.outputs[0]):
            return None
        # a factor is a number or one number per feature, not a table of positions
        width = self.width(live[0])
        small = all(self.size(v) <= width for v in node.inputs if v != live[0])
        return live[0] if small else None

    def dropouts(self, start: int, end: int) -> list[tuple[Node, float]]:
        """Dropouts between two values."""
        path = self.graph.path([start], end)
        return [(node, p) for node in path if (p := self.dropout_of(node)) is not None]

    def dropout(self, start: int, end: int) -> float:
        """The probability of the first dropout between two values; 0 without one."""
        return next((p for _, p in self.dropouts(start, end)), 0.0)

    # --- linear maps -------------------------------------------------------------------------

    @cached_property
    def linears(self) -> dict[int, LinearUnit]:
        """Every product with a parameter, by the index of its operation."""
        result = {}
        for node in self.graph.nodes:
            if node.name not in PRODUCTS and "convolution" not in node.name:
                continue
            live = [v for v in node.inputs if self.live(v)]
            factors = node.inputs[-2:] if node.name in PRODUCTS else node.inputs[:2]
            fixed = [v for v in factors if not self.live(v)]
            if len(live) != 1 or len(fixed) != 1 or live[0] not in factors:
                continue
            matrix = fixed[0]
            params = self.graph.values[matrix].params
            if not params or self._is_computed(matrix):
                continue
            biases = [v for v in node.inputs if v not in (live[0], matrix)]
            biases = [v for v in biases if self.graph.values[v].params]
            output, more = self._with_bias(node.outputs[0])
            result[node.index] = LinearUnit(
                node.index, live[0], output, matrix, params, (*biases, *more)
            )
        return result

    def _remove_adapters(self) -> Iterator[str]:
        """Remove adapters that add nothing yet from the graph, and yield their parameters.

        An adapter is two products through fewer features than the first reads or the second makes,
        added to another value; it adds nothing while its second matrix is zero (Hu et al. 2021,
        arXiv:2106.09685).
        """
        graph, linears = self.graph, self.linears
        by_output = {linear.output: linear for linear in linears.values()}
        for second in list(linears.values()):
            first = by_output.get(self.source(second.input))
            if first is None or bool(graph.tensor(second.matrix).any()):
                continue
            rank = self.width(second.input)
            if rank >= min(self.width(v) for v in (first.input, second.output)):
                continue
            if (node := self._sum_of(second.output)) is None:
                continue
            (kept,) = (v for v in node.inputs if self.source(v) != self.source(second.output))
            node.name, node.func = "alias", torch.clone
            node.args, node.kwargs, node.inputs = (Ref(kept),), {}, (kept,)
            yield from (*first.params, *second.params)
            del linears[first.node], linears[second.node]
        graph.link()

    def _sum_of(self, value: int) -> Node | None:
        """The sum of two live values that a value enters next, behind views and factors."""
        while len(users := self.graph.values[value].consumers) == 1:
            node = self.graph.nodes[users[0]]
            live = [v for v in node.inputs if self.live(v)]
            if node.name.rstrip("_") == "add" and len(live) == len(node.inputs) == 2:
                return node
            if self.passed_input(node, scaled=True) != value:
                return None
            value = node.outputs[0]
        return None

    def _is_computed(self, matrix: int) -> bool:
        """Whether a fixed matrix is itself the result of a product or a lookup."""
        names = [n.name for n in self.graph.ancestor_nodes(matrix)]
        return any(n in PRODUCTS or n in ("embedding", "index", "index_select") for n in names)

    def _with_bias(self, product: int) -> tuple[int, tuple[int, ...]]:
        """A product's result after a bias that a later operation adds, and that bias if any."""
        value = product
        for _ in range(4):
            users = [self.graph.nodes[i] for i in self.graph.values[value].consumers]
            if len(users) != 1:
                break
            (node,) = users
            if node.name in VIEWS and len(node.outputs) == 1:
                if self.size(node.outputs[0]) != self.size(value):
                    break
                value = node.outputs[0]
                continue
            rest = [v for v in node.inputs if v != value]
            if node.name.rstrip("_") == "add" and len(rest) == 1 and not self.live(rest[0]):
                width = self.width(value)
                small = self.size(rest[0]) in (width, 1)
                if self.graph.values[rest[0]].params and small:
                    return node.outputs[0], (rest[0],)
            break
        return product, ()

    def linears_between(self, start: int, end: int) -> list[LinearUnit]:
        """The linear maps on the paths from one value to another."""
        path = self.graph.path([start], end)
        return [self.linears[n.index] for n in path if n.index in self.linears]

    def nearest_linears(self, end: int) -> list[LinearUnit]:
        """The linear maps that a value depends on without another one between."""
        nodes = self._nearest(end, lambda node: node.index in self.linears)
        return [self.linears[node.index] for node in nodes]

    def _nearest(self, end: int, chosen: Callable[[Node], bool]) -> list[Node]:
        """The chosen operations that a live value depends on without another one between."""
        result: dict[int, Node] = {}
        waiting, seen = [end], {end}
        while waiting:
            node = self.graph.producer(waiting.pop())
            if node is not None and chosen(node):
                result[node.index] = node
            elif node is not None:
                more = [v for v in node.inputs if self.live(v) and v not in seen]
                seen.update(more)
                waiting += more
        return [result[index] for index in sorted(result)]

    def first_uses(self, linear: LinearUnit, end: int) -> list[tuple[int, Tensor]]:
        """The values in which a product's entries first enter a computation on the way to `end`.

        Returns:
            Each value with the output column of the product that each of its entries is.
        """
        node = self.graph.nodes[linear.node]
        product = node.outputs[0]
        shape = self.graph.tensor(product).shape
        axis = 1 if "convolution" in node.name else len(shape) - 1
        matrix = self.graph.tensor(linear.matrix)
        if len(shape) == 3 and matrix.ndim == 3 and matrix.stride(0):  # heads as a batch
            width = shape[0] * shape[2]
            columns = torch.arange(width).view(shape[0], 1, shape[2]).expand(shape)
        else:
            view = [1] * len(shape)
            view[axis] = -1
            columns = torch.arange(shape[axis]).view(view).expand(shape)
        result, waiting = {}, [(product, columns)]
        while waiting:
            value, columns = waiting.pop()
            if value == end:
                result[value] = columns
            for index in self.graph.values[value].consumers:
                user = self.graph.nodes[index]
                if not self.graph.ancestors(end) >> index & 1:
                    continue
                if moved := self._rearranged(user, value, linear, columns):
                    waiting += [(v, c) for v, c in moved if self.graph.depends_on(end, v)]
                else:
                    result[value] = columns
        return list(result.items())

    def _rearranged(
        self, user: Node, value: int, linear: LinearUnit, columns: Tensor
    ) -> list[tuple[int, Tensor]]:
        """The outputs of an operation that only moves entries, or adds the bias; [] for others."""
        name = user.name.rstrip("_")
        if name in ("_to_copy", "alias", "detach", "clone", "contiguous"):
            return [(user.outputs[0], columns)]
        if name == "add":
            rest = {v for v in user.inputs if v != value}
            return [(user.outputs[0], columns)] if rest and rest <= set(linear.biases) else []
        picks = user.name in ("index", "index_select", "repeat", "roll", "flip")
        if (user.name not in VIEWS and not picks) or user.inputs[0] != value:
            return []
        if any(self.live(v) for v in user.inputs[1:]):
            return []
        outputs = user.rerun(lambda a: columns if a == value else self.graph.tensor(a))
        return list(zip(user.outputs, outputs, strict=True))

    # --- normalisations ----------------------------------------------------------------------

    def fit(self, start: int, end: int, width: int | None = None) -> Fit | float | None:
        """The norm, or the factor, that leads from one value to another; None if it is neither."""
        key = start, end, width
        if key not in self._fits:
            self._fits[key] = self._fitted(start, end, width)
        return self._fits[key]

    def _fitted(self, start: int, end: int, width: int | None) -> Fit | float | None:
        path = self.graph.path([start], end)
        if all(node.name in VIEWS for node in path):
            return 1.0
        x = self.random_like(start)
        width = width or x.shape[-1]
        x = 100 * (x + 0.5)  # so large that no epsilon counts
        (y,) = self.graph.run({start: x}, end)
        if y.numel() != x.numel():
            return None
        if y.shape != x.shape and x.ndim == 3 and y.shape == x.transpose(0, 1).shape:
            y = y.transpose(0, 1)
        x, y = x.reshape(-1, width).double(), y.reshape(-1, width).double()
        if (slope := proportionality(x, y)) is not None:
            return slope
        for kind in ("layernorm", "rmsnorm"):
            gains = _affine(_normalised(x, kind), y)
            if gains is not None:
                return Fit(kind, gains)
        return None

    def norm_among(self, start: int, ends: Iterable[int], width: int | None = None) -> Norm | None:
        """The norm from `start` to the first of `ends` where all its gains and biases have acted.

        Args:
            width: features that are normalised together; None: all.
        """
        fits = {v: fit for v in ends if isinstance(fit := self.fit(start, v, width), Fit)}
        if not fits:
            return None
        acted = {v: len(self.parameters_of(self.graph.path([start], v))) for v in fits}
        end = next(v for v in fits if acted[v] == max(acted.values()))
        width = width or self.width(start)
        gains, biases = self._norm_params(start, end, width)
        fit = fits[end]
        return Norm(
            start,
            end,
            fit.kind,
            float(fit.gains.square().mean().sqrt()),
            self._epsilon(start, end, width),
            gains,
            biases,
            unit=self._is_plain_gain(gains, fit.gains),
        )

    def _is_plain_gain(self, gains: tuple[str, ...], fitted: Tensor) -> bool | None:
        """Whether a gain is its parameter, not 1 + parameter; None if it is neither."""
        parameter = self.graph.leaf(gains[0]) if len(gains) == 1 else None
        if parameter is None or parameter.numel() != fitted.numel():
            return None
        entries = parameter.detach().reshape(-1).double()
        if close(fitted, entries):
            return True
        return False if close(fitted, 1 + entries) else None

    def _epsilon(self, start: int, end: int, width: int) -> float:
        """Epsilon, from the output variance s / (s + epsilon) at an input variance s near it."""
        x = _normalised(self.random_like(start).reshape(-1, width), "layernorm")
        x = x.reshape(self.graph.tensor(start).shape)
        (whole,) = self.graph.run({start: x * 1e3}, end)
        (zero,) = self.graph.run({start: x * 0}, end)
        best = (math.inf, 0.0)
        full = float((whole - zero).double().square().mean())
        for power in range(-1, 15, 2):
            square = 10.0**-power
            (y,) = self.graph.run({start: x * math.sqrt(square)}, end)
            ratio = float((y - zero).double().square().mean()) / full if full else 1.0
            if 0 < ratio < 1:
                best = min(best, (abs(math.log(ratio / 0.5)), square * (1 / ratio - 1)))
        return float(f"{best[1]:.2e}") if best[0] < 3 else 0.0

    def _norm_params(
        self, start: int, end: int, width: int
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of a norm's gains and biases: a shift of a bias changes all tokens alike."""
        x = 100 * (self.random_like(start) + 0.5)
        gains: list[str] = []
        biases: list[str] = []
        (y,) = self.graph.run({start: x}, end)
        for value in self.parameters_of(self.graph.path([start], end)):
            shifted = {start: x, value: self.graph.tensor(value) + 1}
            change = (self.graph.run(shifted, end)[0] - y).reshape(-1, width).double()
            spread = float((change - change.mean(0)).square().mean())
            name = str(self.graph.values[value].name)
            (biases if spread < 1e-6 * float(change.square().mean()) else gains).append(name)
        return tuple(gains), tuple(biases)

    def parameters_of(self, path: Iterable[Node]) -> list[int]:
        """The parameters that operations read, directly or behind operations on them alone."""
        fixed = (v for n in path for v in n.inputs if not self.live(v))
        leaves = (
            leaf for v in fixed if self.graph.values[v].params for leaf in self.graph.leaves(v)
        )
        return list(dict.fromkeys(leaf for leaf in leaves if self.graph.values[leaf].params))

    # --- activations and attention -----------------------------------------------------------

    def activation(self, start: int, end: int) -> str | None:
        """The name of the entrywise function between two values; None if it is not a known one."""
        shape = self.graph.tensor(start).shape
        x = torch.randn(shape, generator=self.random) * 2
        (y,) = self.graph.run({start: x}, end)
        return activation_name(x, y)

    @cached_property
    def cores(self) -> list[Core]:
        """Every softmax of a product of two live values that weights a third."""
        result = []
        for node in self.graph.nodes:
            if node.name not in SOFTMAX:
                continue
            logits, weights = node.inputs[0], node.outputs[0]
            mixing = self._mixing_product(weights)
            product = self._logit_product(logits)
            if mixing is None or product is None:
                continue
            value = next(v for v in mixing.inputs if not self.graph.depends_on(v, weights))
            query, key = product.inputs[-2:]
            over_keys = node.args[1] in (-1, self.graph.tensor(logits).ndim - 1)
            values = logits, weights, query, key, value, mixing.outputs[0]
            result.append(Core(node.index, *values, product.index, over_keys))
        return result

    def _mixing_product(self, weights: int) -> Node | None:
        """The product of attention weights and values."""
        waiting = [weights]
        while waiting:
            value = waiting.pop()
            for index in self.graph.values[value].consumers:
                node = self.graph.nodes[index]
                if node.name in PRODUCTS and all(self.live(v) for v in node.inputs[-2:]):
                    return node if len(node.inputs) == 2 else None
                transparent = node.name in VIEWS or self.dropout_of(node) is not None
                if transparent or node.name in ("native_dropout", "mul", "nan_to_num", "where"):
                    waiting += node.outputs[:1]
        return None

    def _logit_product(self, logits: int) -> Node | None:
        """The last product of two live values before the logits, behind all linear maps."""
        chosen = self._nearest(logits, lambda n: n.index in self.linears or n.name in PRODUCTS)
        for node in reversed(chosen):
            live = [self.live(v) for v in node.inputs[-2:]]
            if node.index not in self.linears and live == [True, True]:
                return node
        return None


def close(x: Tensor, y: Tensor, tolerance: float = EXACT) -> bool:
    """Whether |x - y| <= tolerance |y|."""
    if x.shape != y.shape or not bool(torch.isfinite(x).all()):
        return False
    return float((x - y).norm()) <= tolerance * max(float(y.norm()), 1e-30)


def proportionality(x: Tensor, y: Tensor) -> float | None:
    """c of y = c x; None if there is none."""
    slope = float((x * y).sum() / x.square().sum())
    return slope if close(y, slope * x) else None


def slope_and_cap(x: Tensor, f: Callable[[float], Tensor]) -> tuple[float | None, float | None]:
    """Slope and cap of an entrywise function y = cap tanh(slope x / cap).

    Args:
        f: number c -> y at c x.

    Returns:
        None for the cap if y = slope x; None twice for any other function.
    """
    y = f(1.0).double()
    if (slope := proportionality(x, y)) is not None:
        return slope, None
    slope = 1e3 * float((x * f(1e-3).double()).sum() / x.square().sum())
    cap = float(f(1e6).abs().max())
    capped = close(y, cap * torch.tanh(slope * x / cap))
    return (slope, float(f"{cap:.5g}")) if capped else (None, None)


def _normalised(x: Tensor, kind: str) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    return x * (x.square().mean(-1, keepdim=True)).rsqrt()


def _affine(x: Tensor, y: Tensor) -> Tensor | None:
    """The gains of y = gain * x + bias, feature by feature; None if y is not affine in x."""
    x_centred, y_centred = x - x.mean(0), y - y.mean(0)
    gain = (x_centred * y_centred).sum(0) / x_centred.square().sum(0).clamp(min=1e-30)
    bias = y.mean(0) - gain * x.mean(0)
    return gain if close(y, gain * x + bias) and bool(gain.abs().max() > 0) else None


def activation_name(x: Tensor, y: Tensor) -> str | None:
    """The known function f of y = f(x), entry by entry; None if it is none of them."""
    if x.numel() != y.numel():
        return None
    x, y = x.reshape(-1).double(), y.reshape(-1).double()
    size = float(y.norm())
    errors = {name: float((activation(name)(x) - y).norm()) for name in activation_names()}
    best = min(errors, key=lambda name: errors[name])
    if errors[best] <= 3e-5 * max(size, 1e-30):
        return best
    below = x < -0.1
    slope = float((y[below] / x[below]).median())
    if close(torch.where(x > 0, x, slope * x), y, 1e-4):
        return f"leaky_relu({slope:.4g})"
    return None
