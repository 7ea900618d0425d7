"""How components compose, and what each does to a signal and to its gradient.

A composition is a declaration: leaves, chains (`>>`), residual connections, parallel branches and
numbered layers. Every component has `propagate` for the way up, which leaves a `Record`, and
`backpropagate` for the way back, which completes it. What a component is made of, and what a
gradient through it depends on, it says itself. See docs/theory/gradients.md, Lost directions.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import DomainError, MomentsError
from .directions import at_tokens, isotropic, orthogonal_parts, persistence, shared_persistence
from .fluctuation import OverlapWalk, UnsharedOverlap, summed, unshared_variance
from .layout import Padding
from .response import Around, Elementwise, Response, Sequence, Sublayer, Sum, sum_of
from .state import Array, Gradient, Kernel, Signal, ratio_or_zero
from .trace import Record, Run


def _nothing() -> None: ...


@dataclass(slots=True, eq=False)
class Pulled:
    """What a pullback returns: the gradient at the input, and what follows from it when asked.

    Attributes:
        weights: gives the expected squared gradient norm of each weight matrix.
        overlaps: by how much those grow per unit of the variance of two tokens' overlap in what is
            attended to, beyond the 1/width they count with.
        response: by how much two outputs' overlap moves per that of the tokens that ask, as the
            kernel that a gradient of ones would have there; None where none asks.
    """

    gradient: Gradient
    weights: Callable[[], Mapping[str, Array]] = dict
    overlaps: Callable[[], Mapping[str, Array]] = dict
    response: Callable[[], Kernel | None] = _nothing


def weights_of(*parts: Pulled) -> Mapping[str, Array]:
    """Of several together."""
    return {name: norm for part in parts for name, norm in part.weights().items()}


Pullback = Callable[[Gradient], Pulled]
OfEntry = Callable[[tuple[Array, Array], float], tuple[Array, Array]]
ReaderPullback = Callable[[Gradient], tuple[Pulled, Gradient]]


class Addition(NamedTuple):
    """A sum of what is kept and what is added, with the squares of their factors.

    Attributes:
        kept, added: what enters the connection and what leaves the branch.
    """

    kept: Record
    added: Record
    keeping: Any
    adding: Any


class Hidden(NamedTuple):
    """What ends an entrywise unit of hidden features, in a chain.

    Attributes:
        parts: of the unit, this one being the last.
        along: (K_oo + 4 K_qq)/K_oo of their covariance K (`moments.noise.overlap`).
    """

    parts: int
    along: float


class Component(abc.ABC):
    """A node of the declaration. `label` names its site in a trace, such as "attention.norm"; a
    component without one is no site."""

    label: str

    # --- what it does ----------------------------------------------------------------------------

    @abc.abstractmethod
    def propagate(self, signal: Signal, run: Run) -> Record:
        """Carry a signal through, forward."""

    @abc.abstractmethod
    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        """Complete a record of this component with a gradient at its output, carried back."""

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        """What it does to how much the overlap of what tokens have of their own varies."""
        for child in record.children:
            at = walk.through(child, at)
        return at

    def of_entry(self, algebra: Any, names: tuple[str, ...] = ()) -> OfEntry | None:
        """Mean and variance of an entry that leaves, from those of one that enters and a factor on
        the variances of the `matrices` of these names; None: they follow from more than that."""
        return None

    def domain_share(self, mean: Array, variance: Array, algebra: Any) -> Array:
        """Share of its laws' domain that an entry's variance takes up; 0 of one without end."""
        return 0.0

    def addition(self, record: Record) -> Addition | None:
        """What it adds to what it keeps, where it is a sum of the two."""
        return None

    def carried(self, record: Record, amplitude: Array) -> Array:
        """The amplitude, per token, with which the output holds what the input holds with this
        one; what random matrices turn is not counted."""
        return 0.0 * amplitude

    # --- what one draw of it does (`moments.noise`) ----------------------------------------------

    def response(self, record: Record, around: Around) -> Response:
        """What it does to sensitivities, by token.

        Raises:
            MomentsError: it does not say.
        """
        raise MomentsError(f"no band of one draw through a {type(self).__name__} in a branch")

    @property
    def self_attention(self) -> Any | None:
        """The self-attention in it, as it attends behind any normalisation of its own; None: it
        has none."""
        return next((one.self_attention for one in self.children if one.self_attention), None)

    @property
    def reads(self) -> Any | None:
        """What in it reads a memory; None: nothing does."""
        return next((one.reads for one in self.children if one.reads), None)

    def unplaced(self) -> Any:
        """The same with every token seeing every other, wherever it stands."""
        return self.mapped(lambda leaf: leaf.unplaced()) if self.children else self

    def apart(self) -> Any:
        """The same as it acts on tokens of endless sequences, each of another: two have in common
        what their sequences have, whatever their tokens attend to."""
        return self.mapped(lambda leaf: leaf.apart()) if self.children else self.unplaced()

    @property
    def masks(self) -> bool:
        """Whether it drops at random, anew for every token."""
        return False

    # --- what it is made of ----------------------------------------------------------------------

    @property
    def children(self) -> tuple[Component, ...]:
        """The components it holds, in the order in which a signal passes them."""
        return ()

    def with_children(self, children: tuple[Component, ...]) -> Component:
        """The same with other components in their places."""
        return self

    def way_back(self, records: tuple[Record, ...]) -> Iterable[Record]:
        """Those of its children in the order in which a gradient passes them."""
        return reversed(records)

    def mapped(self, function: Callable[[Any], Any]) -> Any:
        """The same with a function of every leaf in that leaf's place."""
        if not self.children:
            return function(self)
        return self.with_children(tuple(child.mapped(function) for child in self.children))

    @property
    def hidden(self) -> Hidden | None:
        """The unit that it ends; None: it ends none."""
        return None

    @property
    def gain_name(self) -> str | None:
        """Name of its gain, where that is a parameter per feature behind a normalisation."""
        return None

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of the weight matrices in it whose entries' variance its output's is affine in."""
        return tuple(name for child in self.children for name in child.matrices)

    def with_variances(self, names: tuple[str, ...], factor: float) -> Any:
        """The same with the variances of its `matrices` of these names times a factor."""
        if not self.children:
            return self
        return self.mapped(lambda leaf: leaf.with_variances(names, factor))

    def residuals(self) -> tuple[Residual, ...]:
        """The residual connections in it, in the order of the forward pass."""
        return tuple(one for child in self.children for one in child.residuals())

    def with_residuals(self, signal: Signal, solve: Solve, carry: Carry) -> Component:
        """The same with another residual connection in the place of each of its own.

        Args:
            solve: gives the other, from the one and what enters it.
            carry: gives what a component makes of what enters it.
        """
        return self

    def in_order(self) -> tuple[Component, ...]:
        """What follows one another in it: itself, unless it is a chain."""
        return (self,)

    def record_paths(self, record: Record) -> list[tuple[Record, ...]]:
        """The records of every way through parallel branches, leaf by leaf."""
        return [(record,)]

    # --- what a gradient through it depends on ---------------------------------------------------

    @functools.cached_property
    def mixes_tokens(self) -> bool:
        """Whether tokens receive what others send."""
        return any(child.mixes_tokens for child in self.children)

    @functools.cached_property
    def normalises(self) -> bool:
        """Whether the output ignores the input's scale."""
        return any(child.normalises for child in self.children)

    @property
    def rescales(self) -> bool:
        """Whether it changes the size of a token alone."""
        return False

    @property
    def splits(self) -> bool:
        """Whether it ends in parallel branches, which take their own parts."""
        return False

    @property
    def padding(self) -> Padding | None:
        """For every sequence, the document of each token that its attention keeps apart, 0 where
        it pads; None: it does not."""
        return None

    @property
    def documents(self) -> np.ndarray | None:
        """(B, L) the documents that attention in it keeps apart; None: each row is one."""
        for child in self.children:
            if (result := child.documents) is not None:
                return result
        numbers = self.padding
        if numbers is None or np.max(numbers) < 2:
            return None
        return np.asarray(numbers, dtype=np.int64)

    def __rshift__(self, other: Component) -> Chain:
        first = self.components if isinstance(self, Chain) else (self,)
        second = other.components if isinstance(other, Chain) else (other,)
        return Chain(first + second)


Solve = Callable[["Residual", Signal], "Residual"]
Carry = Callable[[Component, Signal], Signal]


class Leaf(Component):
    """A component that transforms moments by its laws."""

    def carried(self, record: Record, amplitude: Array) -> Array:
        if not self.rescales:
            return 0.0 * amplitude
        before, after = record.input.kernel.diagonal, record.output.kernel.diagonal
        return amplitude * np.sqrt(ratio_or_zero(after, before))

    def response(self, record: Record, around: Around) -> Response:
        grad_out, grad_in = around.grad_out(record), record.grad_out
        return Elementwise.of(self.forward, record.input, grad_in, grad_out)

    @abc.abstractmethod
    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        """Moments of the output, and the map that carries a gradient back through this node."""

    def propagate(self, signal: Signal, run: Run) -> Record:
        output, pullback = self.forward(signal)
        return run.passed(Record(self, run.layer, signal, output, (), pullback))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        pulled = record.pullback(gradient)
        return record.completed(gradient, pulled.gradient, (), pulled)


class Reader(Component):
    """A component that also reads another tensor, a decoder's cross-attention the encoder's."""

    @abc.abstractmethod
    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        """Moments of the output, and the map from its gradient to those at both inputs."""

    def response(self, record: Record, around: Around) -> Response:
        # As it meets the tokens that ask: every one alone, of a memory as it is.
        memory, grad_out = record.memory, around.grad_out(record)
        assert memory is not None

        def forward(signal: Signal) -> tuple[Signal, Pullback]:
            output, pullback = self.attend(signal, memory)
            return output, lambda gradient: pullback(gradient)[0]

        return Elementwise.of(forward, record.input, record.grad_out, grad_out, at_once=False)

    def propagate(self, signal: Signal, run: Run) -> Record:
        memory = run.memory
        if memory is None:
            raise DomainError("cross-attention has nothing to read: declare model.encoder")
        output, pullback = self.attend(signal, memory)
        return run.passed(Record(self, run.layer, signal, output, (), pullback, memory))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        pulled, to_memory = record.pullback(gradient)
        return record.completed(gradient, pulled.gradient, (), pulled, to_memory)


@dataclass(frozen=True)
class Chain(Component):
    """Components one after the other."""

    components: tuple[Component, ...]
    label: str = ""

    def propagate(self, signal: Signal, run: Run) -> Record:
        output, records = signal, []
        for part in self.components:
            records.append(part.propagate(output, run))
            output = records[-1].output
        return Record(self, run.layer, signal, output, tuple(records))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        grad_in, children = gradient, []
        for child in reversed(record.children):
            children.append(child.component.backpropagate(child, grad_in, run))
            grad_in = children[-1].grad_in
        return record.completed(gradient, grad_in, tuple(reversed(children)))

    def carried(self, record: Record, amplitude: Array) -> Array:
        for child in record.children:
            amplitude = child.component.carried(child, amplitude)
        return amplitude

    @property
    def children(self) -> tuple[Component, ...]:
        return self.components

    def with_children(self, children: tuple[Component, ...]) -> Chain:
        return Chain(children, self.label)

    def in_order(self) -> tuple[Component, ...]:
        return self.components

    def record_paths(self, record: Record) -> list[tuple[Record, ...]]:
        result: list[tuple[Record, ...]] = [()]
        for child in record.children:
            result = [one + path for one in result for path in child.paths()]
        return result

    def response(self, record: Record, around: Around) -> Response:
        return Sequence(tuple(one.component.response(one, around) for one in record.children))

    @property
    def splits(self) -> bool:
        return self.components[-1].splits


@dataclass(frozen=True)
class Parallel(Component):
    """Branches that read the same tensor; the output is their sum."""

    branches: tuple[Component, ...]
    label: str = ""

    def propagate(self, signal: Signal, run: Run) -> Record:
        records = tuple(branch.propagate(signal, run) for branch in self.branches)
        output = records[0].output
        for record in records[1:]:
            output = added(output, record.output, 1.0, 1.0, parallel=True)
        return Record(self, run.layer, signal, output, records)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        signal, output = record.input, record.output
        children, kernels, alone = [], [], []
        for child in record.children:
            addend = gradient.with_kernel(gradient.kernel)
            if signal.fluctuation is not None:
                share = ratio_or_zero(child.output.kernel.diagonal, output.kernel.diagonal)
                addend = gradient.at_addend(gradient.kernel, share, gradient.persistence)
            children.append(child.component.backpropagate(child, addend, run))
            kernel = children[-1].grad_in.kernel
            if signal.fluctuation is not None:
                kernel = returned(kernel, addend, child.component, signal.width)
            kernels.append(kernel)
            alone.append(kernel.diagonal * sent_alone(children[-1].grad_in, child.component))
        total = sum_of(kernels)
        grad_in = Gradient(total, gradient.seq_len, alone=ratio_or_zero(sum(alone), total.diagonal))
        return record.completed(gradient, grad_in, tuple(children))

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        total, before = at, 0.0
        for index, child in enumerate(record.children):
            inner, gained = walk.through(child, at), unshared_variance(child.output, walk.real)
            width = child.output.width
            total = total.added(inner, (before, gained), at, width) if index else inner
            before += gained
        return total

    @property
    def children(self) -> tuple[Component, ...]:
        return self.branches

    def with_children(self, children: tuple[Component, ...]) -> Parallel:
        return Parallel(children, self.label)

    def way_back(self, records: tuple[Record, ...]) -> Iterable[Record]:
        return records

    def record_paths(self, record: Record) -> list[tuple[Record, ...]]:
        return [path for child in record.children for path in child.paths()]

    def response(self, record: Record, around: Around) -> Response:
        inner = tuple(one.component.response(one, around) for one in record.children)
        return Sum(inner, around.grad_out(record))

    @property
    def splits(self) -> bool:
        return True


@dataclass(frozen=True)
class Residual(Component):
    """skip_scale * x + branch_scale * branch(x); the scales multiply amplitudes."""

    branch: Component
    skip_scale: Any = 1.0
    branch_scale: Any = 1.0
    label: str = "sum"

    @property
    def children(self) -> tuple[Component, ...]:
        return (self.branch,)

    def with_children(self, children: tuple[Component, ...]) -> Residual:
        return dataclasses.replace(self, branch=children[0])

    def residuals(self) -> tuple[Residual, ...]:
        return (self,)

    def with_residuals(self, signal: Signal, solve: Solve, carry: Carry) -> Residual:
        return solve(self, signal)

    def propagate(self, signal: Signal, run: Run) -> Record:
        branch = self.branch.propagate(signal, run)
        output = self.sum(signal, branch.output)
        return run.passed(Record(self, run.layer, signal, output, (branch,)))

    def sum(self, signal: Signal, branch: Signal) -> Signal:
        """What the skip connection carries and what the branch gives, added."""
        scales = square(self.skip_scale), square(self.branch_scale)
        return added(signal, branch, *scales, keeps_mean=True)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        (child,) = record.children

        def back(addend: Gradient) -> Record:
            return self.branch.backpropagate(child, addend, run)

        signal, output, branch = record.input, record.output, child.output
        skip, scale = square(self.skip_scale), square(self.branch_scale)
        kept, handed = gradient.kernel.scaled(skip), gradient.kernel.scaled(scale)
        if signal.fluctuation is None:
            done = back(gradient.with_kernel(handed))
            merged = _merged(gradient, kept, done.grad_in.kernel, not self.branch.normalises)
            return record.completed(gradient, merged, (done,))
        if not self.branch.normalises:
            return self._scale_free(record, gradient, kept, handed, back)
        gained = branch.kernel.diagonal * output.kernel.lift(scale)[0]
        return self._normalised(record, gradient, kept, handed, gained, run)

    def _normalised(
        self,
        record: Record,
        gradient: Gradient,
        kept: Kernel,
        handed: Kernel,
        gained: Array,
        run: Run,
        entered: Callable[[Kernel], Kernel] = lambda grad_in: grad_in,
    ) -> Record:
        """The way back where the branch normalises what it reads.

        Args:
            kept: of the gradient, what the skip connection hands down.
            handed: what the branch receives.
            gained: the part of every token's variance that the branch gave.
            entered: the gradient at the stream, of that at what enters the branch.
        """
        signal, output, (child,) = record.input, record.output, record.children
        share = ratio_or_zero(gained, output.kernel.diagonal)
        response = (1.0 - share) * gradient.norm_response
        shared = shared_persistence(signal, response, gradient.kernel, self.branch.documents)
        grown = persistence(signal, response)
        addend = gradient.at_addend(handed, share, (grown, shared))
        done = self.branch.backpropagate(child, addend, run)
        alone = sent_alone(done.grad_in, self.branch)
        # what other tokens send falls with their norms, and with this one as far as both share them
        common = ratio_or_zero(shared, grown.diagonal)
        falls = 1.0 + response * (alone + (1.0 - alone) * common)
        grad_in = entered(returned(done.grad_in.kernel, addend, self.branch, signal.width))
        total = kept + grad_in
        kept_share = ratio_or_zero(kept.diagonal, total.diagonal)
        mean_share = ratio_or_zero(kept.mean_diagonal(), total.mean_diagonal())
        merged = Gradient(
            total,
            gradient.seq_len,
            # (x.g)^2, which the branch does not change: its norm sends back nothing along x
            radial=kept_share * (share + (1.0 - share) * gradient.radial),
            centred_share=gradient.centred_share * mean_share,
            norm_response=kept_share * response + (1.0 - kept_share) * falls,
        )
        return record.completed(gradient, merged, (done,))

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        (child,) = record.children
        inner, width = walk.through(child, at), record.input.width
        kept = unshared_variance(record.input, walk.real) * self.skip_scale**2
        gained = unshared_variance(child.output, walk.real) * self.branch_scale**2
        return at.added(inner, (kept, gained), at, width)

    def response(self, record: Record, around: Around) -> Sublayer:
        return around.added(record, record.children[0], self.skip_scale**2, self.branch_scale**2)

    def addition(self, record: Record) -> Addition:
        scales = square(self.skip_scale), square(self.branch_scale)
        return Addition(record, record.children[0], *scales)

    def carried(self, record: Record, amplitude: Array) -> Array:
        return amplitude * self.skip_scale

    def _scale_free(
        self,
        record: Record,
        grad_out: Gradient,
        kept: Kernel,
        handed: Kernel,
        back: Callable[[Gradient], Record],
    ) -> Record:
        """The way back where the branch scales with its input: it holds no normalisation."""
        signal, (child,) = record.input, record.children
        gradient = grad_out.averaged()
        total = record.output.kernel.mean_diagonal()
        scale = square(self.branch_scale)
        share = ratio_or_zero(child.output.kernel.mean_diagonal() * scale, total)
        done = back(gradient.at_addend(handed, share))
        grad_in = done.grad_in
        if isotropic(gradient.radial):
            merged = _merged(gradient, kept, grad_in.kernel, True)
            return record.completed(grad_out, merged, (done,))
        mixing = self.branch.mixes_tokens
        kept, back_kernel = orthogonal_parts(signal, share, gradient, kept, grad_in, mixing)
        merged = _merged(gradient, kept, back_kernel, True)
        if not gradient.orthogonal:
            # u.g of the sum u is x.g of its addend x, of a branch of degree 1
            kept_share = ratio_or_zero(kept.mean_diagonal(), merged.kernel.mean_diagonal())
            radial = gradient.radial * kept_share * ratio_or_zero(1.0, 1.0 - share)
            merged = dataclasses.replace(merged, radial=radial)
        return record.completed(grad_out, merged, (done,))


@dataclass(frozen=True)
class Layer(Component):
    """One numbered layer of the stack; its output is a point of the stream."""

    body: Component
    number: int
    label: str = "stream"

    @property
    def children(self) -> tuple[Component, ...]:
        return (self.body,)

    def with_children(self, children: tuple[Component, ...]) -> Layer:
        return dataclasses.replace(self, body=children[0])

    def propagate(self, signal: Signal, run: Run) -> Record:
        run.layer = self.number
        run.kept[self.number - 1] = signal
        body = self.body.propagate(signal, run)
        record = run.passed(Record(self, self.number, signal, body.output, (body,)))
        run.layer_done()
        return record

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        (child,) = record.children
        done = self.body.backpropagate(child, gradient, run)
        run.layer_done()
        sent = run.sent.pop(self.number - 1, None)
        grad_in = done.grad_in if sent is None else done.grad_in.joined(sum_of(sent))
        return record.completed(gradient, grad_in, (done,))

    def carried(self, record: Record, amplitude: Array) -> Array:
        return self.body.carried(record.children[0], amplitude)


def forward(
    component: Component, signal: Signal, memory: Signal | None = None
) -> tuple[Signal, Record]:
    """Carry a signal through a declaration.

    Returns:
        The output, and the record of the pass, whose `backward` carries a gradient at the output
        back to the input.
    """
    record = component.propagate(signal, Run(memory))
    return record.output, record


# --- sums -----------------------------------------------------------------------------------------


def added(
    signal: Signal,
    branch: Signal,
    skip: Any,
    scale: Any,
    keeps_mean: bool = False,
    parallel: bool = False,
) -> Signal:
    """Sum of two tensors of independent directions, their kernels times `skip` and `scale`.

    Args:
        parallel: whether both are branches of one tensor, instead of the second of the first.
        keeps_mean: whether what the first has without its features' mean stays a part of its own.
    """
    kernel = signal.kernel.mixed(skip, branch.kernel, scale)
    fluctuation = summed(signal, branch, skip, scale, parallel)
    if fluctuation is None:
        return Signal(kernel, signal.seq_len, width=signal.width)
    centred = signal.centred.scaled(skip) if keeps_mean and signal.centred is not None else None
    return Signal(
        kernel,
        signal.seq_len,
        width=signal.width,
        fluctuation=fluctuation,
        centred=centred,
    )


def returned(kernel: Kernel, addend: Gradient, branch: Component, width: Array) -> Kernel:
    """What a normalised branch sends back, with what norms that persist and directions do to it.

    Attention returns averages of what other tokens receive: of the growth, what they share. Its
    values lose the average's direction, (1 - radial)/width; entrywise units lose theirs where they
    are, and what lies along the token itself is the normalisation's to remove.
    """
    if addend.persistence is None or branch.splits:
        return kernel
    grown, shared = addend.persistence
    if not branch.mixes_tokens:
        return kernel.weighted(1 + grown.diagonal, 1 + grown.off_diagonal)
    lost, _ = kernel.lift((1 - addend.averaged().radial) / width)
    one, first, second = at_tokens(kernel, 1 + shared - lost)
    return kernel.weighted(one, (first + second) / 2)


def sent_alone(grad_in: Gradient, branch: Component) -> Array:
    """`Gradient.alone` of what a branch sends back."""
    if grad_in.alone is not None:
        return grad_in.alone
    return 0.0 if branch.mixes_tokens else 1.0


def _merged(gradient: Gradient, kept: Kernel, grad_in: Kernel, scale_free: bool) -> Gradient:
    """Add the gradient that came through the branch to the one the skip connection kept.

    The sum stays orthogonal to the signal if it was so above and the branch scales with its input,
    that is, holds no normalisation (exact for ReLU networks, to leading order for attention, whose
    logits do not scale).
    """
    total = kept + grad_in
    share = ratio_or_zero(kept.mean_diagonal(), total.mean_diagonal())
    return Gradient(
        total,
        gradient.seq_len,
        radial=0.0 if gradient.orthogonal and scale_free else 1.0,
        centred_share=gradient.centred_share * share,
    )


def square(scale: Any) -> Any:
    """Of an amplitude."""
    return scale * scale
