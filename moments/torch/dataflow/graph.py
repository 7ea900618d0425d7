"""A module's forward pass as a graph of operations that can be run again on other values.

A dispatch mode records every operation that reaches the library, so that a linear layer, a method
and an einsum look alike, and a fused kernel is asked for its plain form. What a stretch of the
graph computes is then found out by running it on values of one's choice, however it is spelled.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ..roles import Side

_VIEWS = (
    "view _unsafe_view reshape _reshape_alias t transpose permute expand unsqueeze squeeze slice "
    "select split split_with_sizes unbind clone alias detach _to_copy contiguous movedim unflatten "
    "lift_fresh"
)
VIEWS = frozenset(_VIEWS.split())
"""Operations that pass entries on as they are."""

PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv"))
SOFTMAX = ("_softmax", "_safe_softmax", "softmax")


CHOICES = frozenset(("nonzero", "masked_select", "topk", "sort", "argsort", "_local_scalar_dense"))
"""Operations whose outcome is places, or as long as numbers have it."""


_DRAWS = (
    "bernoulli exponential geometric log_normal multinomial normal poisson rand rand_like randint "
    "randn randn_like randperm uniform"
)
DRAWS = frozenset(_DRAWS.split())
"""Operations that draw random numbers."""


class Ref(NamedTuple):
    """A value in place of a tensor among the arguments of an operation."""

    value: int


@dataclass
class Node:
    """One operation; `drop_prob` where it makes or applies a dropout's mask."""

    index: int
    name: str
    func: Callable[..., Any]
    args: Any
    kwargs: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[int, ...] = ()

    def redone(self, value: Callable[[int], Any]) -> list[Tensor]:
        """What it gives where its inputs are other tensors, whose strides may be others too."""

        def given(number: int) -> Any:
            return value(number).clone() if number in self.writes else value(number)

        args, kwargs = filled(self.args, given), filled(self.kwargs, given)
        if self.name in ("view", "_unsafe_view") and not kwargs and len(args) == 2:
            return [args[0].reshape(args[1])]
        made = self.func(*args, **kwargs)
        return [t for t in tree_flatten(made)[0] if isinstance(t, Tensor)]


@dataclass
class Value:
    """One tensor.

    Attributes:
        tensor: what it was in the recorded pass.
        producer: index of its operation; None for what the module was given or holds.
        live: whether it depends on the batch.
        name: of the parameter or buffer that it is.
        params: parameters that it depends on; of values that are not live.
        drop_prob: of the dropout whose mask it is.
    """

    tensor: Tensor
    producer: int | None = None
    live: bool = False
    name: str | None = None
    params: frozenset[str] = frozenset()
    drop_prob: float | None = None
    consumers: list[int] = field(default_factory=list)


class Boundary(NamedTuple):
    """A value that went into, or came out of, a submodule as its first tensor, before operation
    number `at`."""

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
        """The parameter or buffer of a name."""
        return self.values[self._named[name]].tensor

    def multiples(self) -> dict[str, float]:
        """By what parameters are multiplied as a whole before anything is done with them."""
        known: dict[str, float] = {}
        for node in self.nodes:
            if node.name not in ("mul", "div") or len(node.inputs) != 1:
                continue
            before, behind = self.values[node.inputs[0]], self.values[node.outputs[0]]
            if behind.live or len(behind.params) != 1 or not before.tensor.is_floating_point():
                continue
            size = float(before.tensor.detach().norm())
            if size > 0:
                (name,) = behind.params
                known[name] = known.get(name, 1.0) * float(behind.tensor.detach().norm()) / size
        return known

    def producer(self, value: int) -> Node | None:
        index = self.values[value].producer
        return None if index is None else self.nodes[index]

    def finish(self) -> None:
        """Who reads what, and what every operation rests on, as sets of bits."""
        ancestors = self._ancestors
        for read in self.values:
            read.consumers.clear()
        for node in self.nodes:
            bits = 1 << node.index
            for value in node.inputs:
                if node.name != "empty_like":  # which reads a shape alone
                    self.values[value].consumers.append(node.index)
                made = self.values[value].producer
                if made is not None:
                    bits |= ancestors[made]
            ancestors[node.index] = bits

    def before(self, value: int) -> int:
        """The operations that a value rests on, as bits."""
        index = self.values[value].producer
        return 0 if index is None else self._ancestors[index]

    def makers(self, value: int) -> list[Node]:
        """The operations that a value rests on, in order."""
        bits, result = self.before(value), []
        while bits:
            result.append(self.nodes[(bits & -bits).bit_length() - 1])
            bits &= bits - 1
        return result

    def leaves(self, value: int) -> list[int]:
        """What a value rests on that no operation made; the value itself where none made it."""
        made = self.makers(value)
        read = dict.fromkeys(v for node in made for v in node.inputs)
        return [v for v in read if self.values[v].producer is None] if made else [value]

    def rests_on(self, value: int, other: int) -> bool:
        """Whether `other` is an ancestor of a value, or the value itself."""
        made = self.values[other].producer
        if made is not None and len(self.nodes[made].outputs) == 1:
            return bool(self.before(value) >> made & 1)
        return value == other or bool(self.path([other], value))

    def path(self, starts: Collection[int], end: int) -> list[Node]:
        """The operations between some values and another one, in order."""
        stop = self.values[end].producer
        if stop is None or end in starts:
            return []
        result, reached = self._onward(starts, self.before(end), stop)
        return result if end in reached else []

    def _onward(self, starts: Iterable[int], bits: int, stop: int) -> tuple[list[Node], set[int]]:
        """Of the operations `bits` up to number `stop` those that read what comes of some values,
        in order, and all that comes of these."""
        reached, nodes = set(starts), []
        firsts = [index for v in reached for index in self.values[v].consumers[:1]]
        for index in range(min(firsts, default=stop + 1), stop + 1):
            node = self.nodes[index]
            if bits >> index & 1 and not reached.isdisjoint(node.inputs):
                nodes.append(node)
                reached.update(node.outputs)
        return nodes, reached

    def routed(self) -> str:
        """The innermost submodule in which the numbers of a batch choose entries; "" where none
        does."""
        return next(self._inside(lambda n: n.name in CHOICES and self._alive(n)), "")

    def drawn(self) -> str | None:
        """The innermost submodule that draws random numbers on which the output rests; None where
        none does."""
        ends = (v for v in tree_flatten(self.outputs)[0] if isinstance(v, int))
        bits = functools.reduce(operator.or_, map(self.before, ends), 0)
        return next(self._inside(lambda n: bool(bits >> n.index & 1) and self._random(n)), None)

    def cut(self) -> tuple[str, ...]:
        """Submodules that detach what depends on the batch and has entries of its own, so that no
        gradient flows back there."""

        def cuts(node: Node) -> bool:
            if node.name != "detach" or not self._alive(node):
                return False
            return bool(self.tensor(node.inputs[0]).is_floating_point())

        return tuple(self._inside(cuts))

    def _random(self, node: Node) -> bool:
        if node.name == "native_dropout":
            return bool(node.args[1])
        drops = any(self.values[v].drop_prob for v in node.outputs)
        return drops or node.name.removesuffix("_") in DRAWS

    def _inside(self, chosen: Callable[[Node], bool]) -> Iterator[str]:
        """The innermost submodules in which such operations stand, as they end."""
        inside: dict[str, int] = {}
        known: set[int] = set()
        for path, side, _, at in self.boundaries:
            if side == "input":
                inside[path] = at
                continue
            nodes = self.nodes[inside.pop(path, at) : at]
            if new := {n.index for n in nodes if chosen(n)} - known:
                known |= new
                yield path

    def _alive(self, node: Node) -> bool:
        return any(self.values[v].live for v in node.inputs)

    def run(self, given: Mapping[int, Tensor], *wanted: int) -> list[Tensor]:
        """Values as they would be if others were what is `given`."""
        bits, stop = 0, -1
        for value in wanted:
            bits |= self.before(value)
            made = self.values[value].producer
            stop = max(stop, -1 if made is None else made)
        forward, _ = self._onward(given, bits, stop)
        needed, plan = set(wanted) - set(given), []
        for node in reversed(forward):
            if not needed.isdisjoint(node.outputs):
                plan.append(node)
                needed.update(v for v in node.inputs if v not in given)
        values = dict(given)

        def now(number: int) -> Tensor:
            return values[number] if number in values else self.tensor(number)

        with torch.no_grad():
            for node in reversed(plan):
                pairs = zip(node.outputs, node.redone(now), strict=True)
                values.update((output, t) for output, t in pairs if output not in given)
        return [now(v) for v in wanted]


def filled(entry: Any, value: Callable[[int], Any]) -> Any:
    """Arguments with a tensor in place of every `Ref`."""
    kind = type(entry)
    if kind is Ref:
        return value(entry.value)
    if kind is tuple or kind is list:
        return kind(filled(e, value) for e in entry)
    if kind is dict:
        return {name: filled(e, value) for name, e in entry.items()}
    return entry


class _Recorder(TorchDispatchMode):
    """Writes a graph while a module runs; dropout keeps everything."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.graph = Graph()
        self.known: dict[int, int] = {}
        self.kept: list[Tensor] = []
        self.sharing: dict[int, list[Tensor]] = {}
        self.stale: dict[int, list[tuple[int, Callable[[Tensor, Tensor], Tensor]]]] = {}
        self.uniform: dict[int, float] = {}  # values that are a number and a uniform draw
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
        """The value of what the module has or is given."""
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
        """The value that a tensor is now; a new leaf where nothing is known of it."""
        result = self.known.get(id(tensor))
        if result is not None:
            return self._refreshed(tensor, result)
        owner = self.owners.get(_storage(tensor))
        if owner is None or tensor is self.graph.tensor(owner):
            return self.leaf(tensor)
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()

        def seen(whole: Tensor) -> Tensor:
            return whole.as_strided(size, stride, offset)

        return self._bind(tensor, self._derived(tensor, "view", seen, (owner,)))

    def _derived(
        self, tensor: Tensor, name: str, func: Callable[..., Tensor], inputs: tuple[int, ...]
    ) -> int:
        """A tensor as the value that an operation of the recorder's own makes of others."""
        parts = [self.graph.values[v] for v in inputs]
        live, index = any(v.live for v in parts), len(self.graph.nodes)
        params = frozenset() if live else frozenset().union(*(v.params for v in parts))
        made = self.graph.add(tensor, producer=index, live=live, params=params)
        refs = tuple(map(Ref, inputs))
        self.graph.nodes.append(Node(index, name, func, refs, {}, inputs, (made,)))
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        flat = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor)]
        inputs = tuple(dict.fromkeys(self.value_of(t) for t in flat))
        refs = tree_map(
            lambda a: Ref(self.known[id(a)]) if isinstance(a, Tensor) else a, (args, kwargs)
        )
        written = _written(func, args, kwargs)
        for tensor in written:
            for other in self.sharing.get(_storage(tensor), ()):
                before = self.graph.values[self.known[id(other)]]
                if before.tensor is other:
                    before.tensor = other.clone()
        drop_prob, keep, plain = None, None, name.removesuffix("_")
        if plain == "floor":  # of a number and a uniform draw
            keep = self.uniform.get(inputs[0])
        elif plain == "bernoulli" and func._overloadname in ("float", "p"):
            # torch leaves out an argument that is its default, 0.5
            keep = float(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if keep is not None:
            drop_prob = round(1 - keep, 6)
            made = args[0].fill_(keep) if written else torch.full_like(args[0], keep)
            func, refs, inputs = _kept(made), ((), {}), ()
        elif name == "native_dropout":
            func = _undropped
        elif name == "native_batch_norm":
            func = _unmoved
        if keep is None:
            made = func(*args, **kwargs)
        self._record(name, func, refs, inputs, written, made, drop_prob)
        shift = self.uniform.get(inputs[0]) if len(inputs) == 1 else None
        if plain == "rand":
            self.uniform[self.known[id(made)]] = 0.0
        elif shift is not None and plain in ("add", *VIEWS) and isinstance(made, Tensor):
            number = next((float(a) for a in args if type(a) is float), 0.0)
            self.uniform[self.known[id(made)]] = shift + number
        return made

    def _record(
        self,
        name: str,
        func: Any,
        refs: Any,
        inputs: tuple[int, ...],
        written: list[Tensor],
        made: Any,
        drop_prob: float | None,
    ) -> None:
        graph, index = self.graph, len(self.graph.nodes)
        old = [self.known[id(t)] for t in written]
        ingredients = [graph.values[v] for v in inputs]
        masks = [v.drop_prob for v in ingredients if v.drop_prob is not None]
        live = any(v.live for v in ingredients)
        if drop_prob is None and masks and not live and name.rstrip("_") in ("div", "mul", *VIEWS):
            drop_prob = masks[0]
        if drop_prob is not None:
            live = False
        outputs = []
        for tensor in tree_flatten(made)[0]:
            if not isinstance(tensor, Tensor):
                continue
            params = frozenset() if live else frozenset().union(*(v.params for v in ingredients))
            fields = {"live": live, "params": params, "drop_prob": drop_prob}
            value = graph.add(tensor, producer=index, **fields)
            outputs.append(value)
            self._bind(tensor, value)
        graph.nodes.append(
            Node(index, name, func, refs[0], refs[1], inputs, tuple(outputs), tuple(old))
        )
        for tensor in written:
            self._overwrite(tensor)

    def _overwrite(self, written: Tensor) -> None:
        """Whatever shares memory with a tensor that was written is another value when next used."""
        new = self.known[id(written)]
        for other in self.sharing.get(_storage(written), ()):
            if other is not written and self.graph.values[self.known[id(other)]].name is None:
                pending = self.stale.setdefault(id(other), [])
                pending.append((new, _overlaid(other, written)))

    def _refreshed(self, tensor: Tensor, value: int) -> int:
        """The value of a tensor whose memory was written through another one."""
        for new, func in self.stale.pop(id(tensor), ()):
            value = self.known[id(tensor)] = self._derived(tensor, "overlay", func, (value, new))
        return value


def _overlaid(old: Tensor, new: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """One view of a memory after another view of it was written."""
    layouts = [(t.size(), t.stride(), t.storage_offset()) for t in (old, new)]
    shape, size = old.shape, old.untyped_storage().nbytes() // old.element_size()

    @functools.cache
    def places() -> list[Tensor]:
        """Where in the memory each view lies; only a view that is used again asks for it."""
        every = torch.arange(size)
        return [every.as_strided(*layout).flatten() for layout in layouts]

    def lay(first: Tensor, second: Tensor) -> Tensor:
        at, over = places()
        memory = torch.zeros(size, dtype=first.dtype)
        memory[at] = first.reshape(-1)
        memory[over] = second.reshape(-1).to(first.dtype)
        return memory[at].reshape(shape)

    return lay


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def _kept(mask: Tensor) -> Callable[[], Tensor]:
    """A dropout's mask that keeps every entry, whatever has the memory of this one later."""
    keep, shape, dtype = float(mask.flatten()[0]), mask.shape, mask.dtype
    return lambda: torch.full(shape, keep, dtype=dtype)


def _undropped(x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


def _unmoved(*args: Any) -> Any:
    """Batch norm that leaves what it has seen so far as it was, which its schema hides."""
    seen = (None, None) if args[5] else args[3:5]
    return torch.native_batch_norm(*args[:3], *seen, *args[5:])


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors that an operation changes in place."""
    result = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            result += [value] if isinstance(value, Tensor) else list(value or ())
    return result


def record(module: nn.Module, call: Callable[[], Any], batch: Mapping[str, Tensor]) -> Graph:
    """The graph of one call in training mode, whose dropouts drop nothing.

    Args:
        call: runs the module.
        batch: the tensors that it is run on.
    """
    recorder = _Recorder(module)
    for name, tensor in batch.items():
        recorder.leaf(tensor, live=True, name=name)
    boundaries = recorder.graph.boundaries

    def keep(path: str, side: Side, value: Any) -> None:
        tensors = (t for t in tree_flatten(_plain(value))[0] if isinstance(t, Tensor))
        tensor = next(tensors, None)
        if tensor is not None and id(tensor) in recorder.known:
            value, at = recorder.known[id(tensor)], len(recorder.graph.nodes)
            boundaries.append(Boundary(path, side, value, at))

    with ExitStack() as stack:
        for path, part in module.named_modules():

            def before(_: Any, given: Any, named: Any, path: str = path) -> None:
                keep(path, "input", [*given, *named.values()])

            def after(_: Any, __: Any, made: Any, path: str = path) -> None:
                keep(path, "output", made)

            # Ahead of hooks that change it: what a part takes and gives by its own code.
            entering = part.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            stack.callback(entering.remove)
            stack.callback(part.register_forward_hook(after, prepend=True).remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        with recorder:
            made = call()
    graph = recorder.graph
    graph.outputs = tree_map(
        lambda t: recorder.known.get(id(t)) if isinstance(t, Tensor) else t, _plain(made)
    )
    graph.finish()
    return graph


class _Watcher(TorchDispatchMode):
    """Keeps how far back every softmax over keys reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.reaches: list[int | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func._schema.name.partition("::")[2] in SOFTMAX:
            self.reaches.append(reach_of(made))
        return made


def reach_of(weights: Tensor) -> int | None:
    """The most tokens back, itself included, that a token looks; None where it sees the first."""
    length = weights.shape[-1]
    if weights.ndim < 3 or weights.shape[-2] != length or length < 2:
        return None
    seen = (weights.reshape(-1, length, length) > 0).any(0)
    reach = max(i - int(row.nonzero()[0]) + 1 for i, row in enumerate(seen) if bool(row.any()))
    return reach if reach < length else None


def reaches(call: Callable[[], Any]) -> list[int | None]:
    """Of every softmax of one call, in order, how far back it reaches."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), _Watcher() as watcher:
        call()
    result: list[int | None] = watcher.reaches
    return result


def _plain(value: Any) -> Any:
    """A model's output object as a dictionary."""
    return dict(value) if isinstance(value, Mapping) else value
