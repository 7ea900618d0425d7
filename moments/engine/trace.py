"""Records of the forward and backward pass: a tree that mirrors the declaration.

The forward pass creates a `Record` for every component, with its input and output; the backward
pass returns the tree completed by gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .state import Array, Gradient, Signal


class Point(NamedTuple):
    """One site of the network with its moments."""

    layer: int
    site: str
    signal: Signal
    gradient: Gradient | None = None


@dataclass(slots=True, eq=False)
class Record:
    """Forward pass through one component and, where completed, the backward pass.

    Immutable by convention, like `state.Signal`.

    Attributes:
        component: a `composition.Component`.
        layer: number of its layer; 0 before the first.
        input, output: signals.
        children: records of the component's children, in the order of the forward pass.
        pullback: of a leaf, the backward pass at `input`.
        memory: signal that a leaf reads in addition to its input.
        grad_out, grad_in: `Gradient` at the output and at the input; None before the backward pass.
        pulled: of a leaf, the `composition.Pulled` that its pullback returned.
        grad_memory: gradient at `memory`.
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
        """The record completed by the backward pass of a gradient at the output."""
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
        """The record with the results of the backward pass."""
        passed = self.component, self.layer, self.input, self.output, children
        read = self.pullback, self.memory
        return Record(*passed, *read, grad_out, grad_in, pulled, grad_memory)

    def walk(self) -> Iterator[Record]:
        """All records of the tree, children first: the order of the forward pass."""
        for child in self.children:
            yield from child.walk()
        yield self

    def walk_back(self) -> Iterator[Record]:
        """All records of the tree, parents first: the order of the backward pass."""
        yield self
        for child in self.component.in_backward_order(self.children):
            yield from child.walk_back()

    def notes(self) -> list[tuple[int, str, str]]:
        """(layer, site, note) of all warnings about accuracy."""
        return [(o.layer, o.component.label, n) for o in self.sites() for n in o.output.notes]

    def paths(self) -> list[tuple[Record, ...]]:
        """The leaves on each path through parallel branches, with those before and behind them."""
        paths: list[tuple[Record, ...]] = self.component.record_paths(self)
        return paths

    def in_order(self) -> tuple[Record, ...]:
        """The records of a chain's components, or the record itself."""
        single = any(one is self.component for one in self.component.in_order())
        return (self,) if single else self.children

    def leaves(self) -> Iterator[Record]:
        return (one for one in self.walk() if not one.component.children)

    def sites(self) -> Iterator[Record]:
        """The labelled records, in the order of the forward pass."""
        return (one for one in self.walk() if one.component.label)

    @property
    def place(self) -> tuple[int, str]:
        """(layer, site), which is unique."""
        return self.layer, self.component.label

    @property
    def point(self) -> Point:
        """The site at the component's output."""
        return Point(self.layer, self.component.label, self.output, self.grad_out)

    def weights(self, overlap: Array | None = None) -> Mapping[str, Array]:
        """Expected squared gradient norms of a leaf's weights, by name.

        Args:
            overlap: variance of two tokens' overlap in the attended tensor (`noise.overlap`); None:
                that of independent features, 1/width.
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
    """State of a running pass, which components read and update.

    Attributes:
        memory: what cross-attention reads.
        layer: number of the current layer.
        on_layer: called after each layer, in either direction.
        reached: sites of the forward pass so far, for error messages.
        returned, gradients: records of the backward pass so far, and the gradients at their
            outputs.
        kept: tensors that later components read in addition to their input, by name: the output of
            a layer by its number, the input of the first by 0.
        sent: gradients that these components send back, by the same names.
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
        """Send a gradient back to one of `kept`."""
        self.sent.setdefault(name, []).append(gradient)

    @property
    def points(self) -> list[Point]:
        """All sites reached, with their gradients as far as computed."""
        gradients = dict(zip((one.place for one in self.returned), self.gradients, strict=True))
        points = [one.point if isinstance(one, Record) else one for one in self.reached]
        return [p._replace(gradient=gradients.get((p.layer, p.site))) for p in points]

    def record_forward(self, record: Record) -> Record:
        """Record a site in the forward pass."""
        self.reached.append(record)
        return record

    def record_backward(self, record: Record, gradient: Gradient) -> None:
        """Record a site in the backward pass."""
        self.returned.append(record)
        self.gradients.append(gradient)

    def layer_done(self) -> None:
        if self.on_layer is not None:
            self.on_layer()


@dataclass(eq=False)
class Trace:
    """Both passes through a model, as far as they have been computed.

    Attributes:
        entering: signal that enters layer 1.
        stack: record of the layers.
        embedding: record of the components behind the sum of the embedding tables.
        ending: record of the components between the last layer and the matrix to the logits, or the
            decoder that reads the stack.
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
        """All sites, in the order of the forward pass."""
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
        """For each layer the signal at its input and the gradient at its output."""
        return [(one.input, one.children[0].grad_out) for one in self.layers]

    def notes(self) -> list[tuple[int, str, str]]:
        """`Record.notes` of all records, in the order of the forward pass."""
        records = (self.embedding, self.stack, self.ending)
        return [note for record in records if record is not None for note in record.notes()]

    @property
    def layers(self) -> tuple[Record, ...]:
        """Records of the numbered layers."""
        return () if self.stack is None else self.stack.children

    @property
    def memory(self) -> Signal | None:
        """The signal that cross-attention reads."""
        memories = (one.memory for layer in self.layers[:1] for one in layer.walk())
        return next((memory for memory in memories if memory is not None), None)

    def grad_memory(self) -> list[Gradient]:
        """The gradients at `memory`, from the last layer to the first."""
        if self.stack is None:
            return []
        gradients = (one.grad_memory for one in self.stack.walk_back())
        return [gradient for gradient in gradients if gradient is not None]

    def weights(self) -> list[tuple[int, str, Array]]:
        """(layer, matrix, expected squared gradient norm), from the first layer to the last; for
        overlaps of tokens that vary as those of independent features."""
        return weight_rows((one, None) for one in self.weighted())

    def weighted(self) -> Iterator[Record]:
        """The records whose `weights` are final, in the backward order: not those of a head."""
        reading = self.ending if self.logits is None else None
        for record in (reading, self.stack, self.embedding):
            if record is not None:
                yield from record.walk_back()


def weight_rows(records: Iterator[tuple[Record, Array | None]]) -> list[tuple[int, str, Array]]:
    """(layer, matrix, squared norm), from the first layer to the last, of records with the
    `overlap` of `Record.weights`."""
    rows = [
        (record.layer, name, norm)
        for record, overlap in records
        for name, norm in record.weights(overlap).items()
    ]
    return sorted(rows, key=lambda row: row[0])


def with_top_gradient(stack: Record, gradient: Gradient) -> Record:
    """The record of a chain of layers with another gradient at the last layer's output."""
    *below, last = stack.children
    return replace(stack, children=(*below, replace(last, grad_out=gradient)))
