"""What a pass through a declaration leaves behind: a tree of records that mirrors it.

Propagation makes one `Record` for every node, with what entered and what left; carrying a gradient
back makes the same tree again with the gradients in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .state import Array, Gradient, Signal


class Point(NamedTuple):
    """One site of the network with the moments that pass through it."""

    layer: int
    site: str
    signal: Signal
    gradient: Gradient | None = None


@dataclass(slots=True, eq=False)
class Record:
    """One component as a signal passed it, and a gradient where one has come back.

    A value, like `state.Signal`: nothing changes it after it is made.

    Attributes:
        component: the node of the declaration, a `composition.Component`.
        layer: number of the layer that it is in; 0 before the first.
        input, output: what entered and left.
        children: of the components it holds, in the order in which the signal passed them.
        pullback: of a leaf, the way back around `input`.
        memory: what a leaf read besides its input.
        grad_out, grad_in: the `Gradient` at the output and at the input; None before it came.
        pulled: of a leaf, the `composition.Pulled` that its way back returned.
        grad_memory: the gradient at `memory`.
    """

    component: Any
    layer: int
    input: Signal
    output: Signal
    children: tuple[Record, ...] = ()
    pullback: Any = None
    memory: Signal | None = None
    grad_out: Any = None
    grad_in: Any = None
    pulled: Any = None
    grad_memory: Gradient | None = None

    def backward(self, gradient: Gradient, run: Run | None = None) -> Record:
        """The same with a gradient at the output carried back through it."""
        done: Record = self.component.backpropagate(self, gradient, Run() if run is None else run)
        return done

    def completed(
        self,
        grad_out: Gradient,
        grad_in: Gradient,
        children: tuple[Record, ...],
        pulled: Any = None,
        grad_memory: Gradient | None = None,
    ) -> Record:
        """The same with what came back."""
        entered = self.component, self.layer, self.input, self.output, children
        passed = self.pullback, self.memory
        return Record(*entered, *passed, grad_out, grad_in, pulled, grad_memory)

    def walk(self) -> Iterator[Record]:
        """Every record, children before what holds them: the order of the forward pass."""
        for child in self.children:
            yield from child.walk()
        yield self

    def walk_back(self) -> Iterator[Record]:
        """Every record, what holds others before them: the order of the backward pass."""
        yield self
        for child in self.component.way_back(self.children):
            yield from child.walk_back()

    def notes(self) -> list[tuple[int, str, str]]:
        """(layer, site, note) of all that makes the numbers here less certain."""
        return [(o.layer, o.component.label, n) for o in self.sites() for n in o.output.notes]

    def paths(self) -> list[tuple[Record, ...]]:
        """The leaves of every way through parallel branches; those before and behind the branches
        are in each."""
        paths: list[tuple[Record, ...]] = self.component.record_paths(self)
        return paths

    def in_order(self) -> tuple[Record, ...]:
        """What follows one another in it: itself, unless it is of a chain."""
        alone = any(one is self.component for one in self.component.in_order())
        return (self,) if alone else self.children

    def leaves(self) -> Iterator[Record]:
        """Those of components that hold no others."""
        return (one for one in self.walk() if not one.component.children)

    def sites(self) -> Iterator[Record]:
        """Those of components that have a site in a trace, in the order of the forward pass."""
        return (one for one in self.walk() if one.component.label)

    @property
    def place(self) -> tuple[int, str]:
        """Number of the layer and name of the site: no other record has both."""
        return self.layer, self.component.label

    @property
    def point(self) -> Point:
        """The site behind the component."""
        return Point(self.layer, self.component.label, self.output, self.grad_out)

    def weights(self, overlap: Array | None = None) -> Mapping[str, Array]:
        """Expected squared gradient norms of a leaf's weights, by name.

        Args:
            overlap: variance of two tokens' overlap in what it attends to (`overlap`); None: that
                of independent features, 1/width.
        """
        if self.pulled is None:
            return {}
        norms = dict(self.pulled.weights())
        if overlap is not None:
            attended = self.input if self.memory is None else self.memory
            for name, growth in self.pulled.overlaps().items():
                norms[name] = norms[name] + (overlap - 1 / attended.width) * growth
        return norms


@dataclass
class Run:
    """One pass under way: what components may read, where it is, and callbacks.

    Attributes:
        layer: number of the layer at hand.
        on_layer: called as each layer is passed, in either direction.
        reached: every site passed on the way up, for an error to say where numbers broke.
        returned, gradients: every one on the way back, and what arrived there.
        kept: what later components read besides their input, by its name: of what leaves a layer
            (0: of what enters the first) that layer's number.
        sent: what they sent back to it.
    """

    memory: Signal | None = None
    layer: int = 0
    on_layer: Callable[[], None] | None = None
    reached: list[Record | Point] = field(default_factory=list)
    returned: list[Record] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    kept: dict[Any, Any] = field(default_factory=dict)
    sent: dict[Any, list[Any]] = field(default_factory=dict)

    def send(self, name: Any, gradient: Any) -> None:
        """A gradient back to what is kept."""
        self.sent.setdefault(name, []).append(gradient)

    @property
    def points(self) -> list[Point]:
        """Every site reached, with the gradient that has come back to it."""
        places = [(one.layer, one.component.label) for one in self.returned]
        grad_in = dict(zip(places, self.gradients, strict=True))
        points = [one.point if isinstance(one, Record) else one for one in self.reached]
        return [p._replace(gradient=grad_in.get((p.layer, p.site))) for p in points]

    def passed(self, record: Record) -> Record:
        """Note a site on the way up."""
        self.reached.append(record)
        return record

    def returning(self, record: Record, gradient: Gradient) -> None:
        """Note a site on the way back."""
        self.returned.append(record)
        self.gradients.append(gradient)

    def layer_done(self) -> None:
        if self.on_layer is not None:
            self.on_layer()


@dataclass(eq=False)
class Trace:
    """Both passes through a model, or as much of them as there has been.

    Attributes:
        entering: what enters layer 1.
        embedding: of what follows the sum of the embedding tables.
        ending: of what stands between the last layer and the matrix to the logits, or the decoder
            that reads it.
        logits: the last site, behind `ending`.
        kept: as `Run.kept`.
    """

    entering: Signal
    stack: Record | None = None
    embedding: Record | None = None
    ending: Record | None = None
    logits: Point | None = None
    kept: dict[Any, Any] = field(default_factory=dict)

    @functools.cached_property
    def points(self) -> list[Point]:
        """Every site, in the order of the forward pass."""
        result = [] if self.embedding is None else [one.point for one in self.embedding.sites()]
        result.append(Point(0, "stream", self.entering, self.stack.grad_in if self.stack else None))
        for record in (self.stack, self.ending):
            if record is not None:
                result += [one.point for one in record.sites()]
        return result if self.logits is None else [*result, self.logits]

    def stream(self) -> list[Point]:
        """The N + 1 points of the residual stream."""
        return [point for point in self.points if point.site == "stream"]

    def passing(self) -> list[tuple[Signal, Gradient]]:
        """What enters every layer, and the gradient that its output receives."""
        return [(one.input, one.children[0].grad_out) for one in self.layers]

    def notes(self) -> list[tuple[int, str, str]]:
        """Those of every record, in the order of the forward pass."""
        records = (self.embedding, self.stack, self.ending)
        return [note for record in records if record is not None for note in record.notes()]

    @property
    def layers(self) -> tuple[Record, ...]:
        """Of every numbered layer."""
        return () if self.stack is None else self.stack.children

    @property
    def memory(self) -> Signal | None:
        """What cross-attention in the layers reads."""
        read = (one.memory for layer in self.layers[:1] for one in layer.walk())
        return next((memory for memory in read if memory is not None), None)

    def grad_memory(self) -> list[Gradient]:
        """The gradients at what cross-attention reads, from the last layer down."""
        if self.stack is None:
            return []
        grad_in = (one.grad_memory for one in self.stack.walk_back())
        return [gradient for gradient in grad_in if gradient is not None]

    def weights(self) -> list[tuple[int, str, Array]]:
        """(layer, matrix, expected squared gradient norm), from the first layer to the last.

        Of tokens whose overlaps vary as those of independent features do.
        """
        return weight_rows((one, None) for one in self.weighted())

    def weighted(self) -> Iterator[Record]:
        """The records whose weights stand for themselves, from the last on: a head's do not."""
        read = self.ending if self.logits is None else None
        for record in (read, self.stack, self.embedding):
            if record is not None:
                yield from record.walk_back()


def weight_rows(records: Iterator[tuple[Record, Array | None]]) -> list[tuple[int, str, Array]]:
    """(layer, matrix, squared norm) of records, each with the overlap for `Record.weights`, from
    the first layer to the last."""
    rows = [
        (record.layer, name, norm)
        for record, overlap in records
        for name, norm in record.weights(overlap).items()
    ]
    return sorted(rows, key=lambda row: row[0])


def with_top_gradient(stack: Record, gradient: Gradient) -> Record:
    """A chain of layers whose last output is said to receive another gradient."""
    *below, last = stack.children
    return replace(stack, children=(*below, replace(last, grad_out=gradient)))
