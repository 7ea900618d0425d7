"""A module's forward pass as a graph of operations that can be run again on other values.

A dispatch mode records every operation that reaches the library, so that a linear layer, a method
and an einsum look alike; fused attention kernels are replaced by their plain form. What a part of
the graph computes is then determined by running it on chosen values, whatever its source code.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ..roles import Side

_VIEWS = (
    "view _unsafe_view reshape _reshape_alias t transpose permute expand unsqueeze squeeze slice "
    "select split split_with_sizes unbind clone alias detach _to_copy contiguous movedim unflatten "
    "lift_fresh"
)
VIEWS = frozenset(_VIEWS.split())
"""Operations that rearrange or copy entries without changing them."""

PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv"))
SOFTMAX = ("_softmax", "_safe_softmax", "softmax")

SELECTIONS = frozenset(
    ("nonzero", "masked_select", "topk", "sort", "argsort", "_local_scalar_dense")
)
"""Operations whose result is indices, a Python number, or of a size that depends on the data."""

_RANDOM = (
    "bernoulli exponential geometric log_normal multinomial normal poisson rand rand_like randint "
    "randn randn_like randperm uniform"
)
RANDOM = frozenset(_RANDOM.split())
"""Operations that draw random numbers."""


class Ref(NamedTuple):
    """The number of a value, in place of the tensor among the arguments of an operation."""

    value: int


@dataclass
class Node:
    """One operation; `inputs`, `outputs` and `writes` (values changed in place) number values."""

    index: int
    name: str
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[int, ...] = ()

    def rerun(self, tensor_of: Callable[[int], Any]) -> list[Tensor]:
        """The output tensors for other inputs, which may have other strides than the recorded."""

        def argument(value: int) -> Any:
            return tensor_of(value).clone() if value in self.writes else tensor_of(value)

        args, kwargs = _substituted(self.args, argument), _substituted(self.kwargs, argument)
        if self.name in ("view", "_unsafe_view") and not kwargs and len(args) == 2:
            return [args[0].reshape(args[1])]
        result = self.func(*args, **kwargs)
        return [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]


@dataclass
class Value:
    """One tensor.

    Attributes:
        tensor: its entries in the recorded pass.
        producer: index of its operation; None for inputs, parameters and buffers.
        live: whether it depends on the batch.
        name: of the parameter, buffer or input.
        params: parameters that it depends on; empty for live values.
        drop_prob: dropout probability, if it is a dropout mask.
        consumers: indices of the operations that read it.
    """

    tensor: Tensor
    producer: int | None = None
    live: bool = False
    name: str | None = None
    params: frozenset[str] = frozenset()
    drop_prob: float | None = None
    consumers: list[int] = field(default_factory=list)


class Boundary(NamedTuple):
    """The first tensor that enters or leaves a submodule, before operation number `at`."""

    path: str
    side: Side
    value: int
    at: int


class Graph:
    """Operations in the order in which they ran."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.boundaries: list[Boundary] = []
        self.outputs: Any = None
        self._ancestors: dict[int, int] = {}
        self._named: dict[str, int] = {}

    def add(self, tensor: Tensor, **fields: Any) -> int:
        self.values.append(Value(tensor, **fields))
        if (name := self.values[-1].name) is not None:
            self._named.setdefault(name, len(self.values) - 1)
        return len(self.values) - 1

    def tensor(self, value: int) -> Tensor:
        return self.values[value].tensor

    def leaf(self, name: str) -> Tensor:
        """The parameter, buffer or input of that name."""
        return self.values[self._named[name]].tensor

    def parameter_factors(self) -> dict[str, float]:
        """The factor by which each parameter is multiplied as a whole before it is used."""
        result: dict[str, float] = {}
        for node in self.nodes:
            if node.name not in ("mul", "div") or len(node.inputs) != 1:
                continue
            source, product = self.values[node.inputs[0]], self.values[node.outputs[0]]
            if product.live or len(product.params) != 1 or not source.tensor.is_floating_point():
                continue
            size = float(source.tensor.detach().norm())
            if size > 0:
                (name,) = product.params
                result[name] = result.get(name, 1.0) * float(product.tensor.detach().norm()) / size
        return result

    def producer(self, value: int) -> Node | None:
        index = self.values[value].producer
        return None if index is None else self.nodes[index]

    def link(self) -> None:
        """Compute the consumers of every value and the ancestors of every operation."""
        for value in self.values:
            value.consumers.clear()
        for node in self.nodes:
            bits = 1 << node.index
            for number in node.inputs:
                if node.name != "empty_like":  # it reads the shape only
                    self.values[number].consumers.append(node.index)
                bits |= self.ancestors(number)
            self._ancestors[node.index] = bits

    def ancestors(self, value: int) -> int:
        """The operations that a value depends on: bit i stands for operation i."""
        index = self.values[value].producer
        return 0 if index is None else self._ancestors[index]

    def ancestor_nodes(self, value: int) -> list[Node]:
        """The operations that a value depends on, in order."""
        bits, result = self.ancestors(value), []
        while bits:
            result.append(self.nodes[(bits & -bits).bit_length() - 1])
            bits &= bits - 1
        return result

    def leaves(self, value: int) -> list[int]:
        """The inputs, parameters and constants that a value depends on; itself if it is one."""
        nodes = self.ancestor_nodes(value)
        inputs = dict.fromkeys(v for node in nodes for v in node.inputs)
        return [v for v in inputs if self.values[v].producer is None] if nodes else [value]

    def depends_on(self, value: int, other: int) -> bool:
        """Whether `other` is an ancestor of `value` or `value` itself."""
        index = self.values[other].producer
        if index is not None and len(self.nodes[index].outputs) == 1:
            return bool(self.ancestors(value) >> index & 1)
        return value == other or bool(self.path([other], value))

    def path(self, starts: Collection[int], end: int) -> list[Node]:
        """The operations between any of `starts` and `end`, in order."""
        last = self.values[end].producer
        if last is None or end in starts:
            return []
        result, reached = self._descendants(starts, self.ancestors(end), last)
        return result if end in reached else []

    def _descendants(
        self, starts: Iterable[int], bits: int, last: int
    ) -> tuple[list[Node], set[int]]:
        """Operations among `bits`, up to number `last`, that depend on `starts`; their values."""
        reached, nodes = set(starts), []
        firsts = [index for v in reached for index in self.values[v].consumers[:1]]
        for index in range(min(firsts, default=last + 1), last + 1):
            node = self.nodes[index]
            if bits >> index & 1 and not reached.isdisjoint(node.inputs):
                nodes.append(node)
                reached.update(node.outputs)
        return nodes, reached

    def selecting_submodule(self) -> str:
        """Path of the innermost submodule that selects entries by the batch's numbers, or ""."""
        return next(self._innermost(lambda n: n.name in SELECTIONS and self._has_live_input(n)), "")

    def random_submodule(self) -> str | None:
        """Path of the innermost submodule that draws random numbers which affect the output."""
        outputs = (v for v in tree_flatten(self.outputs)[0] if isinstance(v, int))
        bits = functools.reduce(operator.or_, map(self.ancestors, outputs), 0)
        return next(self._innermost(lambda n: bits >> n.index & 1 and self._is_random(n)), None)

    def detaching_submodules(self) -> tuple[str, ...]:
        """Paths of submodules that detach a real tensor of the batch, which blocks its gradient."""

        def detaches(node: Node) -> bool:
            live = node.name == "detach" and self._has_live_input(node)
            return live and self.tensor(node.inputs[0]).is_floating_point()

        return tuple(self._innermost(detaches))

    def _is_random(self, node: Node) -> bool:
        if node.name == "native_dropout":
            return bool(node.args[1])
        drops = any(self.values[v].drop_prob for v in node.outputs)
        return drops or node.name.removesuffix("_") in RANDOM

    def _innermost(self, chosen: Callable[[Node], object]) -> Iterator[str]:
        """Paths of the innermost submodules that contain a chosen operation, as they end."""
        begins: dict[str, int] = {}
        known: set[int] = set()
        for path, side, _, at in self.boundaries:
            if side == "input":
                begins[path] = at
                continue
            nodes = self.nodes[begins.pop(path, at) : at]
            if new := {n.index for n in nodes if chosen(n)} - known:
                known |= new
                yield path

    def _has_live_input(self, node: Node) -> bool:
        return any(self.values[v].live for v in node.inputs)

    def run(self, inputs: Mapping[int, Tensor], *outputs: int) -> list[Tensor]:
        """The tensors of `outputs` if the values in `inputs` had other tensors."""
        bits = functools.reduce(operator.or_, map(self.ancestors, outputs), 0)
        last = max((i for v in outputs if (i := self.values[v].producer) is not None), default=-1)
        affected, _ = self._descendants(inputs, bits, last)
        needed, plan = set(outputs) - set(inputs), []
        for node in reversed(affected):
            if not needed.isdisjoint(node.outputs):
                plan.append(node)
                needed.update(v for v in node.inputs if v not in inputs)
        tensors = dict(inputs)

        def tensor_of(value: int) -> Tensor:
            return tensors[value] if value in tensors else self.tensor(value)

        with torch.no_grad():
            for node in reversed(plan):
                pairs = zip(node.outputs, node.rerun(tensor_of), strict=True)
                tensors.update((output, t) for output, t in pairs if output not in inputs)
        return [tensor_of(v) for v in outputs]


def _substituted(entry: Any, tensor_of: Callable[[int], Any]) -> Any:
    """Arguments with a tensor in place of every `Ref`."""
    kind = type(entry)
    if kind is Ref:
        return tensor_of(entry.value)
    if kind is tuple or kind is list:
        return kind(_substituted(e, tensor_of) for e in entry)
    if kind is dict:
        return {name: _substituted(e, tensor_of) for name, e in entry.items()}
    return entry


class _Recorder(TorchDispatchMode):
    """Writes a graph while a module runs; dropouts keep every entry.

    Attributes:
        known: id of a tensor -> its value; `kept` holds the tensors so that ids stay unique.
        sharing: storage -> the tensors that view it.
        stale: id of a tensor -> the values that have overwritten its memory, each with the function
            of its old and of their entries that gives its new ones.
        uniform: values that are a number plus a uniform draw -> the number.
        owners: storage of a parameter -> its value.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.graph = Graph()
        self.known: dict[int, int] = {}
        self.kept: list[Tensor] = []
        self.sharing: dict[int, list[Tensor]] = {}
        self.stale: dict[int, list[tuple[int, Callable[[Tensor, Tensor], Tensor]]]] = {}
        self.uniform: dict[int, float] = {}
        for name, parameter in module.named_parameters():
            self.leaf(parameter, name=name, params=frozenset((name,)))
        for name, buffer in module.named_buffers():
            self.leaf(buffer, name=name)
        self.owners = {
            tensor.untyped_storage().data_ptr(): value
            for tensor in self.kept
            if (value := self.known[id(tensor)]) is not None and self.graph.values[value].params
        }

    def leaf(self, tensor: Tensor, **fields: Any) -> int:
        """The value of an input, parameter, buffer or constant."""
        if id(tensor) in self.known:
            return self.known[id(tensor)]
        return self._bind(tensor, self.graph.add(tensor, **fields))

    def _bind(self, tensor: Tensor, value: int) -> int:
        if id(tensor) not in self.known:
            self.kept.append(tensor)
            self.sharing.setdefault(_storage(tensor), []).append(tensor)
        self.known[id(tensor)] = value
        return value

    def value_of(self, tensor: Tensor) -> int:
        """The current value of a tensor; an unknown one becomes a leaf or a view of a parameter."""
        result = self.known.get(id(tensor))
        if result is not None:
            for new, func in self.stale.pop(id(tensor), ()):
                result = self._add_node("overlay", func, (result, new), tensor)
            return result
        owner = self.owners.get(_storage(tensor))
        if owner is None or tensor is self.graph.tensor(owner):
            return self.leaf(tensor)
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()

        def view(whole: Tensor) -> Tensor:
            return whole.as_strided(size, stride, offset)

        return self._add_node("view", view, (owner,), tensor)

    def _add_node(self, name: str, func: Any, inputs: tuple[int, ...], tensor: Tensor) -> int:
        """Record an operation of the recorder's own that gives a tensor; return its value."""
        self._record(name, func, (tuple(map(Ref, inputs)), {}), inputs, [], tensor, None)
        return self.known[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        flat = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor)]
        inputs = tuple(dict.fromkeys(self.value_of(t) for t in flat))
        refs = tree_map(
            lambda a: Ref(self.known[id(a)]) if isinstance(a, Tensor) else a, (args, kwargs)
        )
        written = _written(func, args, kwargs)
        for tensor in written:  # the values that share this memory keep their old entries
            for other in self.sharing.get(_storage(tensor), ()):
                value = self.graph.values[self.known[id(other)]]
                if value.tensor is other:
                    value.tensor = other.clone()
        drop_prob, keep, plain = None, None, name.removesuffix("_")
        if plain == "floor":  # floor(keep + uniform draw)
            keep = self.uniform.get(inputs[0])
        elif plain == "bernoulli" and func._overloadname in ("float", "p"):
            # torch leaves out an argument that is its default, 0.5
            keep = float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if keep is not None:
            drop_prob = round(1 - keep, 6)
            result = args[0].fill_(keep) if written else torch.full_like(args[0], keep)
            func, refs, inputs = _constant_like(result), ((), {}), ()
        elif name == "native_dropout":
            func = _dropout_of_nothing
        elif name == "native_batch_norm":
            func = _batch_norm_without_update
        if keep is None:
            result = func(*args, **kwargs)
        self._record(name, func, refs, inputs, written, result, drop_prob)
        shift = self.uniform.get(inputs[0]) if len(inputs) == 1 else None
        if plain == "rand":
            self.uniform[self.known[id(result)]] = 0.0
        elif shift is not None and plain in ("add", *VIEWS) and isinstance(result, Tensor):
            number = next((float(a) for a in args if type(a) is float), 0.0)
            self.uniform[self.known[id(result)]] = shift + number
        return result

    def _record(
        self,
        name: str,
        func: Any,
        refs: Any,
        inputs: tuple[int, ...],
        written: list[Tensor],
        result: Any,
        drop_prob: float | None,
    ) -> None:
        graph, index = self.graph, len(self.graph.nodes)
        writes = tuple(self.known[id(t)] for t in written)
        sources = [graph.values[v] for v in inputs]
        masks = [v.drop_prob for v in sources if v.drop_prob is not None]
        live = any(v.live for v in sources)
        if drop_prob is None and masks and not live and name.rstrip("_") in ("div", "mul", *VIEWS):
            drop_prob = masks[0]
        live = live and drop_prob is None
        params = frozenset() if live else frozenset().union(*(v.params for v in sources))
        outputs = []
        for tensor in tree_flatten(result)[0]:
            if isinstance(tensor, Tensor):
                fields = {"live": live, "params": params, "drop_prob": drop_prob}
                outputs.append(graph.add(tensor, producer=index, **fields))
                self._bind(tensor, outputs[-1])
        graph.nodes.append(
            Node(index, name, func, refs[0], refs[1], inputs, tuple(outputs), writes)
        )
        for tensor in written:
            self._overwrite(tensor)

    def _overwrite(self, written: Tensor) -> None:
        """Mark the tensors that share memory with one that was written as stale."""
        new = self.known[id(written)]
        for other in self.sharing.get(_storage(written), ()):
            if other is not written and self.graph.values[self.known[id(other)]].name is None:
                pending = self.stale.setdefault(id(other), [])
                pending.append((new, _overlaid(other, written)))


def _overlaid(old: Tensor, new: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The entries of a view after another view of the same memory was written, as a function."""
    layouts = [(t.size(), t.stride(), t.storage_offset()) for t in (old, new)]
    shape, size = old.shape, old.untyped_storage().nbytes() // old.element_size()

    @functools.cache
    def places() -> list[Tensor]:
        """Where each view lies in the memory, computed only if the view is used again."""
        every = torch.arange(size)
        return [every.as_strided(*layout).flatten() for layout in layouts]

    def overlay(first: Tensor, second: Tensor) -> Tensor:
        at, over = places()
        memory = torch.zeros(size, dtype=first.dtype)
        memory[at] = first.reshape(-1)
        memory[over] = second.reshape(-1).to(first.dtype)
        return memory[at].reshape(shape)

    return overlay


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def _constant_like(mask: Tensor) -> Callable[[], Tensor]:
    """A function that makes a dropout mask which keeps every entry, of its own memory."""
    keep, shape, dtype = float(mask.flatten()[0]), mask.shape, mask.dtype
    return lambda: torch.full(shape, keep, dtype=dtype)


def _dropout_of_nothing(x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _batch_norm_without_update(*args: Any) -> Any:
    """Batch norm that leaves its running statistics, a side effect that its schema hides."""
    statistics = (None, None) if args[5] else args[3:5]
    return torch.native_batch_norm(*args[:3], *statistics, *args[5:])


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that an operation changes in place."""
    result = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            result += [value] if isinstance(value, Tensor) else list(value or ())
    return result


class _PlainAttention(TorchFunctionMode):
    """Runs attention in its plain form where a module itself chooses the kernel."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = func is nn.functional.scaled_dot_product_attention
        with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
            return func(*args, **(kwargs or {}))


def record(module: nn.Module, call: Callable[[], Any], batch: Mapping[str, Tensor]) -> Graph:
    """The graph of one call, in which dropouts keep every entry.

    Args:
        call: runs the module.
        batch: the tensors that it is run on, by name.
    """
    recorder = _Recorder(module)
    for name, tensor in batch.items():
        recorder.leaf(tensor, live=True, name=name)
    boundaries = recorder.graph.boundaries

    def add_boundary(path: str, side: Side, value: Any) -> None:
        tensors = (t for t in tree_flatten(_plain(value))[0] if isinstance(t, Tensor))
        tensor = next(tensors, None)
        if tensor is not None and id(tensor) in recorder.known:
            number, at = recorder.known[id(tensor)], len(recorder.graph.nodes)
            boundaries.append(Boundary(path, side, number, at))

    with ExitStack() as stack:
        for path, part in module.named_modules():

            def before(_: Any, args: Any, kwargs: Any, path: str = path) -> None:
                add_boundary(path, "input", [*args, *kwargs.values()])

            def after(_: Any, __: Any, output: Any, path: str = path) -> None:
                add_boundary(path, "output", output)

            # Ahead of the module's own hooks, which may change its inputs and outputs.
            entering = part.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            stack.callback(entering.remove)
            stack.callback(part.register_forward_hook(after, prepend=True).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_PlainAttention())
        with recorder:
            result = call()
    graph = recorder.graph
    graph.outputs = tree_map(
        lambda t: recorder.known.get(id(t)) if isinstance(t, Tensor) else t, _plain(result)
    )
    graph.link()
    return graph


class _SpanRecorder(TorchDispatchMode):
    """Collects the attention span of every softmax over keys."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[int | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.partition("::")[2] in SOFTMAX:
            self.spans.append(attention_span(result))
        return result


def attention_span(weights: Tensor) -> int | None:
    """The most tokens back, itself included, that a query attends to; None if the first is reached.

    Args:
        weights: (..., queries, keys); None too if these numbers differ.
    """
    length = weights.shape[-1]
    if weights.ndim < 3 or weights.shape[-2] != length or length < 2:
        return None
    attended = (weights.reshape(-1, length, length) > 0).any(0)
    rows = [(i, row) for i, row in enumerate(attended) if bool(row.any())]
    span = max(i - int(row.nonzero()[0]) + 1 for i, row in rows)
    return span if span < length else None


def attention_spans(call: Callable[[], Any]) -> list[int | None]:
    """The attention span of every softmax of one call, in order."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _SpanRecorder() as recorder:
        call()
    return list(recorder.spans)


def _plain(value: Any) -> Any:
    """A model's output object as a dictionary."""
    return dict(value) if isinstance(value, Mapping) else value
