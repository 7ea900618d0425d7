"""Units of a transformer, recognised by what a stretch of a graph computes, not by its spelling."""

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
"""Relative deviation below which a stretch computes what it is taken for (float32, some
cancellation)."""


class LinearUnit(NamedTuple):
    """One product of something that depends on the batch with something that does not.

    Attributes:
        read: the value that it reads, as the product sees it.
        made: what it makes, its bias included.
        matrix: the operand that does not depend on the batch.
    """

    node: int
    read: int
    made: int
    matrix: int
    params: frozenset[str]
    biases: tuple[int, ...] = ()


class Fit(NamedTuple):
    """A normalisation that a stretch computes, and its gain by feature."""

    kind: str
    gains: Tensor


@dataclass
class Norm:
    """A normalisation between two values.

    Attributes:
        kind: "layernorm" or "rmsnorm".
        gain: root mean square of its gain.
        gains, biases: parameters.
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


@dataclass
class RotationUnit:
    """Queries turned by their position.

    Attributes:
        base: of which the speeds are powers, to the relative `deviation`.
        speeds: of the turned pairs, fastest first.
    """

    fraction: float
    base: float
    deviation: float
    speeds: tuple[float, ...]


@dataclass
class Core:
    """softmax(q k^T) v, as the graph has it; over keys, unless somebody took another axis."""

    softmax: int
    logits: int
    weights: int
    query: int
    key: int
    value: int
    mixed: int
    product: int
    over_keys: bool


@dataclass
class AttentionUnit:
    """What one attention computes; see `Transformer` for the fields.

    Attributes:
        multiplier: of q k; None where logits are no multiple of it.
        turned: whether values are turned by their position.
        sinks: the parameter that holds a logit of every head behind those of the keys.
    """

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
    projections: dict[str, list[tuple[LinearUnit, Tensor]]] = field(default_factory=dict)
    output: list[LinearUnit] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    turned: bool = False
    sinks: str | None = None

    @property
    def temperature(self) -> float:
        """Logits are q k / (sqrt(d_head) temperature)."""
        return 1 / (self.multiplier * math.sqrt(self.d_head)) if self.multiplier else 1.0


class GraphReader:
    """A graph, and what its stretches compute."""

    def __init__(self, graph: Graph, seed: int = 0) -> None:
        self.graph = graph
        self.random = torch.Generator().manual_seed(seed)
        self._fits: dict[tuple[int, int, int | None], Fit | float | None] = {}
        self.adapters = tuple(self._set_aside())

    # --- small words -------------------------------------------------------------------------

    def draw(self, like: int) -> Tensor:
        tensor = self.graph.tensor(like)
        return torch.randn(tensor.shape, generator=self.random).to(tensor.dtype)

    def row(self, like: int) -> tuple[Tensor, Tensor]:
        """A draw of one token, in double precision, and the value that has it at every place."""
        tensor = self.graph.tensor(like)
        row = torch.randn(tensor.shape[-1], generator=self.random)
        return row.double(), row.to(tensor.dtype).expand(tensor.shape).contiguous()

    def live(self, value: int) -> bool:
        return self.graph.values[value].live

    def dropout_of(self, node: Node) -> float | None:
        """The probability, where a node applies a dropout's mask."""
        result = self._mask_of(node)
        return None if result is None or result[1] else result[0]

    def skips_paths(self, node: Node) -> float | None:
        """The probability, where a mask drops whole sequences or tokens (stochastic depth)."""
        result = self._mask_of(node)
        return result[0] if result is not None and result[1] else None

    def _mask_of(self, node: Node) -> tuple[float, bool] | None:
        """The probability of the mask that a node applies, and whether it is of fewer entries."""
        if node.name == "native_dropout":
            return (float(node.args[1]), False) if node.args[1] else None
        alive = [v for v in node.inputs if self.live(v)]
        for value in node.inputs if alive else ():
            drop_prob = self.graph.values[value].drop_prob
            if drop_prob is not None:
                size = self.graph.tensor(value).numel()
                return drop_prob, size < self.graph.tensor(alive[0]).numel()
        return None

    def way(self, value: int, *, scaled: bool = True) -> Iterator[int]:
        """A value, and back over views, dropouts and, if `scaled`, factors, to what makes it."""
        below: int | None = value
        while below is not None:
            yield below
            value, node = below, self.graph.producer(below)
            below = None if node is None else self.below(node, scaled=scaled)
            if node is not None and node.outputs[0] != value and node.name not in VIEWS:
                return

    def up(self, value: int, *, scaled: bool = True) -> int:
        """What makes a value, behind views, dropouts and, if `scaled`, factors."""
        *_, root = self.way(value, scaled=scaled)
        return root

    def below(self, node: Node, *, scaled: bool) -> int | None:
        """What a node passes on, if that is all it does."""
        if node.name in VIEWS:
            shape = self.graph.tensor(node.outputs[0]).numel()
            same = len(node.outputs) == 1 and shape == self.graph.tensor(node.inputs[0]).numel()
            return node.inputs[0] if same else None
        name = node.name.rstrip("_")
        if name == "native_dropout":
            return node.inputs[0]
        if name not in ("mul", "div"):
            return None
        alive = [v for v in node.inputs if self.live(v)]
        if len(alive) != 1 or (name == "div" and alive[0] != node.inputs[0]):
            return None
        if self._mask_of(node) is not None:
            return alive[0]
        rest = [v for v in node.inputs if v != alive[0]]
        whole = self.graph.tensor(node.outputs[0]).numel()
        fits = self.graph.tensor(alive[0]).numel() == whole
        if not scaled or not fits:
            return None
        # a factor is a number or one number per feature, not a table of positions
        small = all(
            self.graph.tensor(v).numel() <= self.graph.tensor(alive[0]).shape[-1] for v in rest
        )
        return alive[0] if small else None

    def dropouts(self, start: int, end: int) -> list[tuple[Node, float]]:
        """Dropouts between two values."""
        path = self.graph.path([start], end)
        return [(node, p) for node in path if (p := self.dropout_of(node)) is not None]

    # --- linear maps -------------------------------------------------------------------------

    @cached_property
    def linears(self) -> dict[int, LinearUnit]:
        """Every product with a parameter, by the index of its operation."""
        result = {}
        for node in self.graph.nodes:
            if node.name not in PRODUCTS and "convolution" not in node.name:
                continue
            alive = [v for v in node.inputs if self.live(v)]
            factors = node.inputs[-2:] if node.name in PRODUCTS else node.inputs[:2]
            fixed = [v for v in factors if not self.live(v)]
            if len(alive) != 1 or len(fixed) != 1 or alive[0] not in factors:
                continue
            matrix = fixed[0]
            params = self.graph.values[matrix].params
            if not params or self._computed(matrix):
                continue
            biases = [v for v in node.inputs if v not in (alive[0], matrix)]
            biases = [v for v in biases if self.graph.values[v].params]
            made, more = self._with_bias(node.outputs[0])
            result[node.index] = LinearUnit(
                node.index, alive[0], made, matrix, params, (*biases, *more)
            )
        return result

    def _set_aside(self) -> Iterator[str]:
        """Takes adapters out of the graph that add nothing yet, and yields their parameters.

        Two products through fewer features than the first reads or the second makes, whose second
        matrix is zero, beside what they are added to (Hu et al. 2021, arXiv:2106.09685).
        """
        graph, linears = self.graph, self.linears
        makers = {linear.made: linear for linear in linears.values()}
        for second in list(linears.values()):
            first = makers.get(self.up(second.read))
            if first is None or bool(graph.tensor(second.matrix).any()):
                continue
            inner = graph.tensor(second.read).shape[-1]
            if inner >= min(graph.tensor(v).shape[-1] for v in (first.read, second.made)):
                continue
            if (node := self._added(second.made)) is None:
                continue
            (kept,) = (v for v in node.inputs if self.up(v) != self.up(second.made))
            node.name, node.func = "alias", torch.clone
            node.args, node.kwargs, node.inputs = (Ref(kept),), {}, (kept,)
            yield from (*first.params, *second.params)
            del linears[first.node], linears[second.node]
        graph.link()

    def _added(self, value: int) -> Node | None:
        """The sum of two of which a value is one, behind views and factors."""
        while len(users := self.graph.values[value].consumers) == 1:
            node = self.graph.nodes[users[0]]
            alive = [v for v in node.inputs if self.live(v)]
            if node.name.rstrip("_") == "add" and len(alive) == len(node.inputs) == 2:
                return node
            if self.below(node, scaled=True) != value:
                return None
            value = node.outputs[0]
        return None

    def _computed(self, matrix: int) -> bool:
        """Whether a constant is itself made by a product or looked up."""
        names = [n.name for n in self.graph.ancestor_nodes(matrix)]
        return any(n in PRODUCTS or n in ("embedding", "index", "index_select") for n in names)

    def _with_bias(self, made: int) -> tuple[int, tuple[int, ...]]:
        """A product's outcome behind a bias that is added on its own."""
        value = made
        for _ in range(4):
            users = [self.graph.nodes[i] for i in self.graph.values[value].consumers]
            if len(users) != 1:
                break
            (node,) = users
            if node.name in VIEWS and len(node.outputs) == 1:
                if self.graph.tensor(node.outputs[0]).numel() != self.graph.tensor(value).numel():
                    break
                value = node.outputs[0]
                continue
            rest = [v for v in node.inputs if v != value]
            if node.name.rstrip("_") == "add" and len(rest) == 1 and not self.live(rest[0]):
                held = self.graph.values[rest[0]].params
                width = self.graph.tensor(value).shape[-1]
                if held and self.graph.tensor(rest[0]).numel() in (width, 1):
                    return node.outputs[0], (rest[0],)
            break
        return made, ()

    def between(self, start: int, end: int) -> list[LinearUnit]:
        """Products with parameters on the way from one value to another."""
        return [
            self.linears[n.index] for n in self.graph.path([start], end) if n.index in self.linears
        ]

    def nearest(self, end: int) -> list[LinearUnit]:
        """Products with parameters that a value rests on by a way without another one."""
        result: dict[int, LinearUnit] = {}
        waiting, seen = [end], {end}
        while waiting:
            node = self.graph.producer(waiting.pop())
            if node is None:
                continue
            if node.index in self.linears:
                result[node.index] = self.linears[node.index]
                continue
            more = [v for v in node.inputs if self.live(v) and v not in seen]
            seen.update(more)
            waiting += more
        return [result[index] for index in sorted(result)]

    def tails(self, linear: LinearUnit, end: int) -> list[tuple[int, Tensor]]:
        """Where a product's outcome is first used for something on the way to a value, with the
        columns used there."""
        node = self.graph.nodes[linear.node]
        first = node.outputs[0]
        shape = self.graph.tensor(first).shape
        axis = 1 if "convolution" in node.name else len(shape) - 1
        matrix = self.graph.tensor(linear.matrix)
        if len(shape) == 3 and matrix.ndim == 3 and matrix.stride(0):  # heads as a batch
            width = shape[0] * shape[2]
            columns = torch.arange(width).view(shape[0], 1, shape[2]).expand(shape)
        else:
            view = [1] * len(shape)
            view[axis] = -1
            columns = torch.arange(shape[axis]).view(view).expand(shape)
        result, waiting = {}, [(first, columns)]
        while waiting:
            value, columns = waiting.pop()
            if value == end:
                result[value] = columns
            for index in self.graph.values[value].consumers:
                user = self.graph.nodes[index]
                if not self.graph.ancestors(end) >> index & 1:
                    continue
                passed = self._passed(user, value, linear, columns)
                if passed:
                    waiting += [(v, c) for v, c in passed if self.graph.depends_on(end, v)]
                else:
                    result[value] = columns
        return list(result.items())

    def _passed(
        self, user: Node, value: int, linear: LinearUnit, columns: Tensor
    ) -> list[tuple[int, Tensor]]:
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

        made = user.rerun(lambda a: columns if a == value else self.graph.tensor(a))
        return list(zip(user.outputs, made, strict=True))

    # --- normalisations ----------------------------------------------------------------------

    def fit(self, start: int, end: int, width: int | None = None) -> Fit | float | None:
        """What a stretch without products computes: a norm, a factor, or neither (None)."""
        key = start, end, width
        if key not in self._fits:
            self._fits[key] = self._fitted(start, end, width)
        return self._fits[key]

    def _fitted(self, start: int, end: int, width: int | None) -> Fit | float | None:
        path = self.graph.path([start], end)
        if all(node.name in VIEWS for node in path):
            return 1.0
        x = self.draw(start)
        width = width or x.shape[-1]
        x = 100 * (x + 0.5)  # so large that no epsilon counts
        (y,) = self.graph.run({start: x}, end)
        if y.numel() != x.numel():
            return None
        if y.shape != x.shape and x.ndim == 3 and y.shape == x.transpose(0, 1).shape:
            y = y.transpose(0, 1)
        flat, out = x.reshape(-1, width).double(), y.reshape(-1, width).double()
        if (slope := multiple(flat, out)) is not None:
            return slope
        for kind in ("layernorm", "rmsnorm"):
            gains = _affine(_normalised(flat, kind), out)
            if gains is not None:
                return Fit(kind, gains)
        return None

    def norm_within(
        self, start: int, values: Iterable[int], width: int | None = None
    ) -> Norm | None:
        """Of some values the first where every parameter of a norm of `start` has acted."""
        fits = {v: fit for v in values if isinstance(fit := self.fit(start, v, width), Fit)}
        if not fits:
            return None
        acted = {v: len(self.leaves(self.graph.path([start], v))) for v in fits}
        end = next(v for v in fits if acted[v] == max(acted.values()))
        width = width or self.graph.tensor(start).shape[-1]
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
            unit=self._unit(gains, fit.gains),
        )

    def _unit(self, gains: tuple[str, ...], fitted: Tensor) -> bool | None:
        """Whether a gain is its parameter, not 1 + it; None where it is neither."""
        held = self.graph.leaf(gains[0]) if len(gains) == 1 else None
        if held is None or held.numel() != fitted.numel():
            return None
        entries = held.detach().reshape(-1).double()
        if close(fitted, entries):
            return True
        return False if close(fitted, 1 + entries) else None

    def _epsilon(self, start: int, end: int, width: int) -> float:
        """From how far a small input falls short of being normalised."""
        x = _normalised(self.draw(start).reshape(-1, width), "layernorm")
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
        """Parameters that multiply, and that are added."""
        x = 100 * (self.draw(start) + 0.5)
        gains: list[str] = []
        biases: list[str] = []
        (y,) = self.graph.run({start: x}, end)
        for value in self.leaves(self.graph.path([start], end)):
            held = self.graph.tensor(value)
            (moved,) = self.graph.run({start: x, value: held + 1}, end)
            change = (moved - y).reshape(-1, width).double()
            spread = float((change - change.mean(0)).square().mean())
            name = str(self.graph.values[value].name)
            (biases if spread < 1e-6 * float(change.square().mean()) else gains).append(name)
        return tuple(gains), tuple(biases)

    def leaves(self, path: Iterable[Node]) -> list[int]:
        """Parameters that operations read, directly or made over."""
        result: dict[int, None] = {}
        for node in path:
            for value in node.inputs:
                held = self.graph.values[value]
                if held.live or not held.params:
                    continue
                for leaf in self.graph.leaves(value):
                    if self.graph.values[leaf].params:
                        result[leaf] = None
        return list(result)

    # --- activations -------------------------------------------------------------------------

    def activation(self, start: int, end: int) -> str | None:
        """The name of an entrywise function; None: not a known one."""
        shape = self.graph.tensor(start).shape
        x = torch.randn(shape, generator=self.random) * 2
        (y,) = self.graph.run({start: x}, end)
        return named(x, y)

    # --- attention ---------------------------------------------------------------------------

    @cached_property
    def cores(self) -> list[Core]:
        """Every softmax of a product of two things that a third is mixed by."""
        result = []
        for node in self.graph.nodes:
            if node.name not in SOFTMAX:
                continue
            logits, weights = node.inputs[0], node.outputs[0]
            mixing = self._mixing(weights)
            product = self._logit_product(logits)
            if mixing is None or product is None:
                continue
            value = next(v for v in mixing.inputs if not self.graph.depends_on(v, weights))
            query, key = product.inputs[-2:]
            of = node.index, logits, weights, query, key, value, mixing.outputs[0], product.index
            over_keys = node.args[1] in (-1, self.graph.tensor(logits).ndim - 1)
            result.append(Core(*of, over_keys))
        return result

    def _mixing(self, weights: int) -> Node | None:
        """The product that the weights enter."""
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
        """The last product of two values of the batch that logits rest on, no matrix behind it."""
        waiting = [logits]
        seen = set()
        result: list[Node] = []
        while waiting:
            value = waiting.pop()
            node = self.graph.producer(value)
            if node is None or value in seen:
                continue
            seen.add(value)
            if node.index in self.linears:
                continue
            if node.name in PRODUCTS:
                pair = node.inputs[-2:]
                if len(pair) == 2 and all(self.live(v) for v in pair):
                    result.append(node)
                continue
            waiting += [v for v in node.inputs if self.live(v)]
        return max(result, key=lambda node: node.index, default=None)


def close(one: Tensor, other: Tensor, tolerance: float = EXACT) -> bool:
    if one.shape != other.shape or not bool(torch.isfinite(one).all()):
        return False
    size = float(other.norm())
    return float((one - other).norm()) <= tolerance * max(size, 1e-30)


def multiple(x: Tensor, y: Tensor) -> float | None:
    """What multiplies x to give y; None where nothing does."""
    slope = float((x * y).sum() / x.square().sum())
    return slope if close(y, slope * x) else None


def multiple_or_cap(
    x: Tensor, made: Callable[[float], Tensor]
) -> tuple[float | None, float | None]:
    """A function's slope at 0, and the cap of a function cap tanh(slope x / cap).

    Args:
        made: what the function makes of x times a number.

    Returns:
        None for the cap of a function slope x; None twice for any other function.
    """
    y = made(1.0).double()
    if (slope := multiple(x, y)) is not None:
        return slope, None
    slope = 1e3 * float((x * made(1e-3).double()).sum() / x.square().sum())
    cap = float(made(1e6).abs().max())
    capped = close(y, cap * torch.tanh(slope * x / cap))
    return (slope, float(f"{cap:.5g}")) if capped else (None, None)


def _normalised(x: Tensor, kind: str) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    return x * (x.square().mean(-1, keepdim=True)).rsqrt()


def _affine(x: Tensor, y: Tensor) -> Tensor | None:
    """The gains of y = gain * x + bias, feature by feature; None where it is none."""
    centred, out = x - x.mean(0), y - y.mean(0)
    gain = (centred * out).sum(0) / centred.square().sum(0).clamp(min=1e-30)
    bias = y.mean(0) - gain * x.mean(0)
    return gain if close(y, gain * x + bias) and bool(gain.abs().max() > 0) else None


def named(x: Tensor, y: Tensor) -> str | None:
    """The known function that makes y of x; None where none does."""
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
