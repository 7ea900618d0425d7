"""A stack as its tokens are on average: all the same; and what sequences share of one draw.

Cross-attention asks nothing of a sequence beyond its own memory. Memories of texts read by one
embedding are taken to share what two of their own tokens do; those of other inputs, nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..engine.composition import Component, Layer
from ..engine.modes import Pair
from ..engine.state import Array, Kernel, Signal
from ..engine.trace import Trace

Site = tuple[Kernel, Kernel]
"""Of a signal and of its gradient."""


class Alike(NamedTuple):
    """What both passes saw, tokens alike or averaged over tokens of one sequence.

    Attributes:
        entering: what enters layer 1.
        sites: of every layer, before, between and behind its parts.
        embedded: whether an embedding read what enters.
        memory: what cross-attention reads.
    """

    entering: Signal
    sites: list[list[Site]]
    embedded: bool
    memory: Signal | None

    @classmethod
    def of(cls, trace: Trace) -> Alike:
        """Of a trace, averaged where it is resolved."""
        entering, memory = trace.entering, trace.memory
        if entering.resolved:
            entering = _alike(entering, entering.kernel)
            memory = None if memory is None else _alike(memory, memory.second_moment())
        length, sites = trace.entering.seq_len, []
        for layer in trace.layers:
            first = layer.input.kernel, layer.gradient_sent.kernel
            inner = layer.children[0].in_order()
            found = [first, *((p.output.kernel, p.gradient_received.kernel) for p in inner)]
            sites.append([(_averaged(a, length), _averaged(b, length)) for a, b in found])
        return cls(entering, sites, trace.embedding is not None, memory)

    @property
    def received(self) -> Kernel:
        """The gradient at the last layer's output."""
        return self.sites[-1][-1][1]

    def across_sequences(self, layers: Sequence[Layer]) -> list[Array]:
        """Covariance of two tokens of different sequences before every part and after the last.

        Independent inputs start at 0, texts read by one embedding as two tokens of one sequence.
        What grows from there is the mean of the activations, which all tokens share.
        """
        start, width, memory = self.entering.kernel.pairs, self.entering.width, None
        overlap = start if self.embedded else 0.0 * start
        if self.memory is not None:
            tokens = self.memory.second_moment()
            pairs = tokens.mean_pairs() * float(self.embedded)
            memory = Kernel(tokens.mean_diagonal(), pairs)
        found = [overlap]
        for layer, sites in zip(layers, self.sites, strict=True):
            for part, (kernel, _) in zip(parts_of(layer), sites, strict=False):
                tokens = Kernel(0.0 * overlap + kernel.diagonal, overlap)
                output, _ = part.pair(Pair(Signal(tokens, 2, width=width), memory))
                overlap = output.kernel.pairs
                found.append(overlap)
        return found


def parts_of(layer: Layer) -> tuple[Component, ...]:
    """What follows one another in a layer."""
    return layer.body.in_order()


def part_starts(layers: Sequence[Layer]) -> list[int]:
    """Number of parts before each layer, and in all: where the points of the stream lie."""
    return [0, *np.cumsum([len(parts_of(layer)) for layer in layers]).tolist()]


def _averaged(kernel: Kernel, seq_len: int) -> Kernel:
    if not kernel.resolved:
        return kernel
    count = kernel.pairs.shape[-1]
    if count > seq_len > 1:
        each = np.arange(count).reshape(-1, seq_len)
        blocks = [kernel.pairs[..., rows[:, None], rows] for rows in each]
        kernel = Kernel.of_matrix(np.mean(blocks, axis=0))
    return Kernel(kernel.mean_diagonal(), kernel.mean_pairs())


def _alike(signal: Signal, kernel: Kernel) -> Signal:
    return Signal(_averaged(kernel, signal.seq_len), signal.seq_len, width=signal.width)
