"""A part of a network about its mean, tokens alike: its branches, and what carries overlaps.

Tokens alike have two kinds of modes: the token mean, with eigenvalue v + (L - 1) c, and L - 1
differences with eigenvalue v - c (`moments.noise.band`). A pair of tokens of two sequences stands
for what sequences share of one draw.

See docs/theory/band.md, What fluctuates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .state import Array, Gradient, Kernel, Signal
from .trace import Record, Run

if TYPE_CHECKING:
    from .composition import Component


@dataclass(frozen=True)
class Modes:
    """The two eigenvalues of a kernel over L tokens alike, last axis (mean, difference)."""

    seq_len: int

    @property
    def count(self) -> Array:
        """Number of modes of each kind."""
        return np.array([1.0, self.seq_len - 1.0])

    @property
    def average(self) -> Array:
        """Weights with which the modes make up the variance of a token."""
        return self.count / self.seq_len

    def of(self, kernel: Kernel) -> Array:
        """Eigenvalues (..., 2) of a kernel."""
        diagonal, pairs = np.broadcast_arrays(kernel.diagonal, kernel.pairs)
        return np.stack([diagonal + (self.seq_len - 1) * pairs, diagonal - pairs], axis=-1)

    def kernel(self, modes: Array) -> Kernel:
        """The kernel with eigenvalues (..., 2)."""
        mean, difference = modes[..., 0], modes[..., 1]
        pairs = (mean - difference) / self.seq_len
        return Kernel(difference + pairs, pairs)


class Branch(NamedTuple):
    """What one branch of a part adds to the input, on its own.

    Attributes:
        record: of what it consists of.
        entering: kernel of the tokens that enter it.
        added: (rows, ..., 2) modes of the signal.
        returned: (rows, ..., 2, 2) what it does to the gradient's modes.
        gain: (..., 2, 2) factor on the overlap of different modes.
    """

    record: Record
    entering: Kernel
    added: Array
    returned: Array
    gain: Array


class Passes:
    """Passes through components at slightly changed moments, all layers and changes at once."""

    def __init__(self, modes: Modes, width: Array, memory: Signal | None, axes: int) -> None:
        self.modes, self.width, self.memory = modes, width, memory
        self.basis = modes.kernel(np.eye(2).reshape(2, 1, *(1,) * axes, 2))

    def signal(self, kernel: Kernel) -> Signal:
        return Signal(kernel, self.modes.seq_len, width=self.width, spread=kernel.scaled(0.0))

    def through(self, node: Component, signal: Signal, shape: Any) -> tuple[Signal, Array, Record]:
        """Output, map of the gradient's modes (rows, ..., 2, 2), and the record."""
        record = node.propagate(signal, Run(self.memory))
        sent = record.backward(Gradient(self.basis, self.modes.seq_len)).gradient_sent
        pulled = np.broadcast_to(self.modes.of(sent.kernel), (2, *shape))
        return record.output, np.moveaxis(pulled, 0, -1), record

    def branches(
        self, node: Component, scale: Any, nudged: Array, kernel: Kernel, overlap: Array
    ) -> list[Branch]:
        """Every way through parallel branches by itself: together they add what the node does.

        Unless a normalisation behind them fixes the size of their sum, which then is one.

        Args:
            node: any.
            scale: squared, that it is added with.
            nudged: modes of the signal, a row for every change.
            kernel: of the signal.
            overlap: covariance of tokens of different sequences.
        """
        signal, found = self.signal(self.modes.kernel(nudged)), []
        scale = np.asarray(scale)
        for path in node.ways():
            output, returned, record = self.through(path, signal, nudged.shape)
            gain = scale[..., None, None] * coherent_gain(path, kernel, overlap, self.width)
            added = scale[..., None] * self.modes.of(output.kernel)
            found.append(Branch(record, kernel, added, scale[..., None, None] * returned, gain))
        return found


class Pair(NamedTuple):
    """Two tokens of different sequences, or of one.

    Attributes:
        signal: the two, as a signal of two alike.
        memory: variance of what cross-attention reads, and covariance between sequences; None: its
            sequences share nothing.
        within: whether they are of one sequence: differences between tokens do not survive
            averaging over them.
    """

    signal: Signal
    memory: Kernel | None = None
    within: bool = False

    def behind(self, signal: Signal) -> Pair:
        """The same two at another place."""
        return self._replace(signal=signal)


def coherent_gain(component: Component, kernel: Kernel, overlap: Array, width: Array) -> Array:
    """Factor (..., 2, 2) on a small overlap between two modes, the same in both directions.

    Args:
        component: a branch, or a whole part of a layer.
        kernel: of the tokens that enter.
        overlap: covariance of tokens of different sequences.
        width: d_model.
    """
    tokens = Signal(Kernel(kernel.diagonal, overlap), 2, width=width)
    across = component.pair(Pair(tokens))[1]
    tokens = Signal(kernel, 2, width=width)
    within = component.pair(Pair(tokens, within=True))[1]
    within, across = np.broadcast_arrays(within, across)
    return np.stack([np.stack([across, within], -1), np.stack([within, within], -1)], -1)
