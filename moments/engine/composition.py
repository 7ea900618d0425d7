"""Components and their composition: leaves, chains (`>>`), residual sums, branches and layers.

The forward pass, `propagate`, creates a `Record` for each component, and the backward pass,
`backpropagate`, completes it. All properties of a component that a pass depends on are members of
`Component`. See docs/theory/gradients.md, Lost directions.
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
from .fluctuation import OverlapWalk, UnsharedOverlap, overlap_of_sum, unshared_variance
from .layout import Padding
from .response import Elementwise, GradientUnits, Response, Sequence, Sublayer, Sum, sum_of
from .state import Array, Gradient, Kernel, Signal, ratio_or_zero
from .trace import Record, Run


def _nothing() -> None: ...


@dataclass(slots=True, eq=False)
class PullbackResult:
    """Result of a pullback: the gradient at the input, and functions evaluated on demand.

    Attributes:
        weights: returns the expected squared gradient norm of each weight matrix.
        overlaps: returns the derivatives of these norms by the variance of two tokens' overlap in
            the attended tensor, for which they assume 1/width.
        response: returns the derivative of two outputs' overlap by that of the query tokens, as the
            kernel that a gradient of ones would have there; None without queries.
    """

    gradient: Gradient
    weights: Callable[[], Mapping[str, Array]] = dict
    overlaps: Callable[[], Mapping[str, Array]] = dict
    response: Callable[[], Kernel | None] = _nothing


def weights_of(*parts: PullbackResult) -> Mapping[str, Array]:
    """The `weights` of several pullbacks."""
    return {name: norm for part in parts for name, norm in part.weights().items()}


Pullback = Callable[[Gradient], PullbackResult]
OfEntry = Callable[[tuple[Array, Array], float], tuple[Array, Array]]
ReaderPullback = Callable[[Gradient], tuple[PullbackResult, Gradient]]


class Addition(NamedTuple):
    """A residual sum.

    Attributes:
        kept: record whose input is the first addend.
        added: record whose output is the second addend.
        kept_scale, added_scale: squared factors of the addends.
    """

    kept: Record
    added: Record
    kept_scale: Any
    added_scale: Any


class Hidden(NamedTuple):
    """The last component of an activation unit in a chain, which includes the matrices before it.

    Attributes:
        parts: number of components of the unit.
        along: (K_oo + 4 K_qq)/K_oo of the covariance K of hidden features (`noise.overlap`).
    """

    parts: int
    along: float


class Component(abc.ABC):
    """A node of the declaration. `label` names its site in a trace, such as "attention.norm"; a
    component without a label is no site."""

    label: str

    # --- passes ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def propagate(self, signal: Signal, run: Run) -> Record:
        """Propagate a signal forward."""

    @abc.abstractmethod
    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        """Propagate a gradient backward from the output, around the record of a forward pass."""

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        """Propagate `at`, the fluctuation of the input's unshared overlaps, to the output."""
        for child in record.children:
            at = walk.through(child, at)
        return at

    def entry_moments(self, algebra: Any, names: tuple[str, ...] = ()) -> OfEntry | None:
        """A function of (mean, variance) of an input entry, and of a factor on the variances of the
        `matrices` of these names, that returns those of an output entry; None: there is no such
        function."""
        return None

    def domain_share(self, mean: Array, variance: Array, algebra: Any) -> Array:
        """An entry's variance over the largest in the domain of the laws; 0 if it is unbounded."""
        return 0.0

    def addition(self, record: Record) -> Addition | None:
        """The addends, if the component is a residual sum."""
        return None

    def amplitude_of_input(self, record: Record, amplitude: Array) -> Array:
        """Amplitude of a tensor in the output, per token, given its amplitude in the input; images
        under random matrices do not count."""
        return 0.0 * amplitude

    # --- fluctuations (`moments.noise`) ----------------------------------------------------------

    def response(self, record: Record, around: GradientUnits) -> Response:
        """Adjoints for sensitivities, around a record of both passes.

        Raises:
            MomentsError: not implemented for this component.
        """
        raise MomentsError(f"no band of one draw through a {type(self).__name__} in a branch")

    def without_positions(self) -> Any:
        """The component without masks and positions, for exchangeable tokens."""
        return self.with_leaves(lambda leaf: leaf.without_positions()) if self.children else self

    def apart(self) -> Any:
        """The component as it acts on tokens of different, infinitely long sequences."""
        return (
            self.with_leaves(lambda leaf: leaf.apart())
            if self.children
            else self.without_positions()
        )

    @property
    def is_dropout(self) -> bool:
        """Whether it applies a random mask, independent for every token."""
        return False

    # --- structure -------------------------------------------------------------------------------

    @property
    def children(self) -> tuple[Component, ...]:
        """Its parts, in the order of the forward pass."""
        return ()

    def with_children(self, children: tuple[Component, ...]) -> Component:
        return self

    def in_backward_order(self, records: tuple[Record, ...]) -> Iterable[Record]:
        """The children's records in the order of the backward pass."""
        return reversed(records)

    def with_leaves(self, function: Callable[[Any], Any]) -> Any:
        """The component with every leaf replaced by a function of it."""
        if not self.children:
            return function(self)
        return self.with_children(tuple(child.with_leaves(function) for child in self.children))

    @property
    def hidden(self) -> Hidden | None:
        """The activation unit of which this is the last component; None: of none."""
        return None

    @property
    def gain_name(self) -> str | None:
        """Name of its gain, if it is a normalisation with a gain per feature."""
        return None

    @property
    def matrices(self) -> tuple[str, ...]:
        """Names of its weight matrices, in whose variance the output's variance is affine."""
        return tuple(name for child in self.children for name in child.matrices)

    def with_variances(self, names: tuple[str, ...], factor: float) -> Any:
        """The component with the weight variances of the named `matrices` times a factor."""
        if not self.children:
            return self
        return self.with_leaves(lambda leaf: leaf.with_variances(names, factor))

    def residuals(self) -> tuple[Residual, ...]:
        """Its residual connections, in the order of the forward pass."""
        return tuple(one for child in self.children for one in child.residuals())

    def with_residuals(self, signal: Signal, solve: Solve, carry: Carry) -> Component:
        """The component with its residual connections replaced, in the order of the forward pass.

        Args:
            solve: returns the replacement, from a residual connection and its input.
            carry: returns the output, from a component and its input.
        """
        return self

    def in_order(self) -> tuple[Component, ...]:
        """The components of a chain, or the component itself."""
        return (self,)

    def record_paths(self, record: Record) -> list[tuple[Record, ...]]:
        """The leaves' records on each path through parallel branches."""
        return [(record,)]

    # --- properties that gradients depend on -----------------------------------------------------

    @functools.cached_property
    def mixes_tokens(self) -> bool:
        """Whether an output token depends on other input tokens."""
        return any(child.mixes_tokens for child in self.children)

    @functools.cached_property
    def normalises(self) -> bool:
        """Whether the output is independent of the input's scale."""
        return any(child.normalises for child in self.children)

    @property
    def rescales(self) -> bool:
        """Whether it only multiplies each token by a factor."""
        return False

    @property
    def ends_in_branches(self) -> bool:
        """Whether it ends in parallel branches, each of which applies `returned` itself."""
        return False

    @property
    def padding(self) -> Padding | None:
        """For every sequence the document of each token, 0 for padding, if attention in it is
        limited to documents; else None."""
        return None

    @property
    def documents(self) -> np.ndarray | None:
        """(B, L) document of each token, if attention in it is limited to documents; else None."""
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
    """A component without parts, which transforms moments by its laws."""

    def amplitude_of_input(self, record: Record, amplitude: Array) -> Array:
        if not self.rescales:
            return 0.0 * amplitude
        before, after = record.input.kernel.diagonal, record.output.kernel.diagonal
        return amplitude * np.sqrt(ratio_or_zero(after, before))

    def response(self, record: Record, around: GradientUnits) -> Response:
        grad_out, grad_in = around.grad_out(record), record.grad_out
        return Elementwise.of(self.forward, record.input, grad_in, grad_out)

    @abc.abstractmethod
    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        """Moments of the output, and the pullback of a gradient at the output to the input."""

    def propagate(self, signal: Signal, run: Run) -> Record:
        output, pullback = self.forward(signal)
        return run.record_forward(Record(self, run.layer, signal, output, (), pullback))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.record_backward(record, gradient)
        pulled = record.pullback(gradient)
        return record.completed(gradient, pulled.gradient, (), pulled)


class Reader(Component):
    """A component with a second input, the memory, such as a decoder's cross-attention."""

    @abc.abstractmethod
    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        """Moments of the output, and the pullback of its gradient to both inputs."""

    def response(self, record: Record, around: GradientUnits) -> Response:
        # With a fixed memory it acts on every query token separately.
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
        return run.record_forward(Record(self, run.layer, signal, output, (), pullback, memory))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.record_backward(record, gradient)
        pulled, to_memory = record.pullback(gradient)
        return record.completed(gradient, pulled.gradient, (), pulled, to_memory)


@dataclass(frozen=True)
class Chain(Component):
    """Components in sequence."""

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

    def amplitude_of_input(self, record: Record, amplitude: Array) -> Array:
        for child in record.children:
            amplitude = child.component.amplitude_of_input(child, amplitude)
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

    def response(self, record: Record, around: GradientUnits) -> Response:
        return Sequence(tuple(one.component.response(one, around) for one in record.children))

    @property
    def ends_in_branches(self) -> bool:
        return self.components[-1].ends_in_branches


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
                addend = gradient.for_addend(gradient.kernel, share, gradient.persistence)
            children.append(child.component.backpropagate(child, addend, run))
            kernel = children[-1].grad_in.kernel
            if signal.fluctuation is not None:
                kernel = with_width_corrections(kernel, addend, child.component, signal.width)
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

    def in_backward_order(self, records: tuple[Record, ...]) -> Iterable[Record]:
        return records

    def record_paths(self, record: Record) -> list[tuple[Record, ...]]:
        return [path for child in record.children for path in child.paths()]

    def response(self, record: Record, around: GradientUnits) -> Response:
        inner = tuple(one.component.response(one, around) for one in record.children)
        return Sum(inner, around.grad_out(record))

    @property
    def ends_in_branches(self) -> bool:
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
        return run.record_forward(Record(self, run.layer, signal, output, (branch,)))

    def sum(self, signal: Signal, branch: Signal) -> Signal:
        """The sum of the skip connection and the branch."""
        scales = square(self.skip_scale), square(self.branch_scale)
        return added(signal, branch, *scales, keeps_mean=True)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.record_backward(record, gradient)
        (child,) = record.children

        def back(addend: Gradient) -> Record:
            return self.branch.backpropagate(child, addend, run)

        signal, output, branch = record.input, record.output, child.output
        skip, scale = square(self.skip_scale), square(self.branch_scale)
        kept, to_branch = gradient.kernel.scaled(skip), gradient.kernel.scaled(scale)
        if signal.fluctuation is None:
            done = back(gradient.with_kernel(to_branch))
            merged = _merged(gradient, kept, done.grad_in.kernel, not self.branch.normalises)
            return record.completed(gradient, merged, (done,))
        if not self.branch.normalises:
            return self._scale_free(record, gradient, kept, to_branch, back)
        gained = branch.kernel.diagonal * output.kernel.lift(scale)[0]
        return self._normalised(record, gradient, kept, to_branch, gained, run)

    def _normalised(
        self,
        record: Record,
        gradient: Gradient,
        kept: Kernel,
        to_branch: Kernel,
        gained: Array,
        run: Run,
        entered: Callable[[Kernel], Kernel] = lambda grad_in: grad_in,
    ) -> Record:
        """Backpropagate through a sum whose branch normalises its input.

        Args:
            kept: gradient through the skip connection.
            to_branch: gradient at the branch's output.
            gained: (..., L) variance of each token that the branch added.
            entered: maps the gradient at the branch's input to that at the stream.
        """
        signal, output, (child,) = record.input, record.output, record.children
        share = ratio_or_zero(gained, output.kernel.diagonal)
        response = (1.0 - share) * gradient.norm_response
        shared = shared_persistence(signal, response, gradient.kernel, self.branch.documents)
        grown = persistence(signal, response)
        addend = gradient.for_addend(to_branch, share, (grown, shared))
        done = self.branch.backpropagate(child, addend, run)
        alone = sent_alone(done.grad_in, self.branch)
        # what other tokens send falls with their norms, and with this one as far as both share them
        common = ratio_or_zero(shared, grown.diagonal)
        falls = 1.0 + response * (alone + (1.0 - alone) * common)
        grad_in = entered(
            with_width_corrections(done.grad_in.kernel, addend, self.branch, signal.width)
        )
        total = kept + grad_in
        kept_share = ratio_or_zero(kept.diagonal, total.diagonal)
        mean_share = ratio_or_zero(kept.mean_diagonal(), total.mean_diagonal())
        merged = Gradient(
            total,
            gradient.seq_len,
            # The branch does not change (x.g)^2: its norm's gradient is orthogonal to x.
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

    def response(self, record: Record, around: GradientUnits) -> Sublayer:
        return around.added(record, record.children[0], self.skip_scale**2, self.branch_scale**2)

    def addition(self, record: Record) -> Addition:
        scales = square(self.skip_scale), square(self.branch_scale)
        return Addition(record, record.children[0], *scales)

    def amplitude_of_input(self, record: Record, amplitude: Array) -> Array:
        return amplitude * self.skip_scale

    def _scale_free(
        self,
        record: Record,
        grad_out: Gradient,
        kept: Kernel,
        to_branch: Kernel,
        back: Callable[[Gradient], Record],
    ) -> Record:
        """Backpropagate through a sum whose branch scales with its input, without normalisation."""
        signal, (child,) = record.input, record.children
        gradient = grad_out.averaged()
        total = record.output.kernel.mean_diagonal()
        scale = square(self.branch_scale)
        share = ratio_or_zero(child.output.kernel.mean_diagonal() * scale, total)
        done = back(gradient.for_addend(to_branch, share))
        grad_in = done.grad_in
        if isotropic(gradient.radial):
            merged = _merged(gradient, kept, grad_in.kernel, True)
            return record.completed(grad_out, merged, (done,))
        mixing = self.branch.mixes_tokens
        kept, back_kernel = orthogonal_parts(signal, share, gradient, kept, grad_in, mixing)
        merged = _merged(gradient, kept, back_kernel, True)
        if not gradient.orthogonal:
            # For a branch of degree 1, u.g of the sum u equals x.g of the addend x.
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
        record = run.record_forward(Record(self, self.number, signal, body.output, (body,)))
        run.layer_done()
        return record

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.record_backward(record, gradient)
        (child,) = record.children
        done = self.body.backpropagate(child, gradient, run)
        run.layer_done()
        sent = run.sent.pop(self.number - 1, None)
        grad_in = done.grad_in if sent is None else done.grad_in.joined(sum_of(sent))
        return record.completed(gradient, grad_in, (done,))

    def amplitude_of_input(self, record: Record, amplitude: Array) -> Array:
        return self.body.amplitude_of_input(record.children[0], amplitude)


def forward(
    component: Component, signal: Signal, memory: Signal | None = None
) -> tuple[Signal, Record]:
    """Propagate a signal through a declaration.

    Returns:
        The output, and the record of the pass, whose `backward` propagates a gradient at the output
        to the input.
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
    """Sum of two tensors of independent directions, with kernels multiplied by `skip` and `scale`.

    Args:
        parallel: whether both are branches of one tensor, else the second is a branch of the first.
        keeps_mean: whether the first's `centred` part is passed on.
    """
    kernel = signal.kernel.mixed(skip, branch.kernel, scale)
    fluctuation = overlap_of_sum(signal, branch, skip, scale, parallel)
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


def with_width_corrections(
    kernel: Kernel, addend: Gradient, branch: Component, width: Array
) -> Kernel:
    """The gradient `kernel` at a normalised branch's input, corrected to order 1/width.

    It grows by `Gradient.persistence`; through attention, which averages the gradients of other
    tokens, by the part that they share. Attention's values also lose the direction of their
    average, (1 - radial)/width; activations account for that themselves, and the normalisation for
    the direction of the token itself.
    """
    if addend.persistence is None or branch.ends_in_branches:
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
    """Add the gradients through the branch and through the skip connection.

    The sum is orthogonal to the signal if it is so at the output and the branch scales with its
    input, that is, has no normalisation (exact for ReLU networks, to leading order for attention,
    whose logits do not scale).
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
    return scale * scale
