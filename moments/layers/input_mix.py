"""The tensor that enters layer 1, x_0, added to what enters a layer: x <- r x + s x_0.

No random matrix stands between x_0 and the share a x_0 that a stream of residual sums still holds
of it: a is a product and sum of declared factors, and x = z + a x_0 with z independent of x_0. So
with a' = r a + s, K_x -> r^2 K_x + (a'^2 - r^2 a^2) K_0. On the way back dL/dx_0 sums s g over all
layers; of those gradients, two share what skip connections hand down, which is the same
combination: every layer sends (a'^2 - r^2 a^2) times its own gradient's kernel. See
docs/theory/streams.md, The input added again.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np

from ..engine.composition import Leaf, Pullback, Pulled
from ..engine.state import Array, Fluctuation, Gradient, Kernel, Signal, ratio_or_zero
from ..engine.trace import Record, Run


@dataclass(frozen=True)
class InputMix(Leaf):
    """r x + s x_0.

    Attributes:
        label: site name in a trace.
        keep, add: r and s.
        held: a, with which x holds x_0.
    """

    label: str
    keep: float
    add: float
    held: float

    rescales = True

    @property
    def _more(self) -> float:
        """By which square, beyond r^2 a^2, the output holds x_0."""
        return (self.keep * self.held + self.add) ** 2 - (self.keep * self.held) ** 2

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        first = signal if signal.origin is None else signal.origin
        square, more = self.keep**2, self._more
        output = signal.replace(
            kernel=signal.kernel.mixed(square, first.kernel, more),
            centred=None
            if signal.centred is None or first.centred is None
            else signal.centred.mixed(square, first.centred, more),
            fluctuation=self._fluctuation(signal, first),
            origin=first,
        )
        return output, functools.partial(self._pulled, signal, output)

    def _fluctuation(self, signal: Signal, first: Signal) -> Fluctuation | None:
        """Of x' = r z + a' x_0: |x'|^2 varies as |r z|^2, |a' x_0|^2 and twice their product do."""
        varies, start = signal.fluctuation, first.fluctuation
        if varies is None or start is None:
            return None
        square, held = self.keep**2, self.held**2
        after = square * held + self._more
        apart = signal.kernel.mixed(1.0, first.kernel, -held)
        cross = (apart * first.kernel).scaled(4 * square * self._more / signal.width)

        def mixed(one: Kernel, other: Kernel) -> Kernel:
            return one.mixed(square**2, other, after**2 - (square * held) ** 2) + cross

        overlaps = varies.overlaps
        if overlaps is not None and start.overlaps is not None:
            overlaps = mixed(overlaps, start.overlaps)
        return Fluctuation(mixed(varies.norms, start.norms), overlaps)

    def _pulled(self, signal: Signal, output: Signal, gradient: Gradient) -> Pulled:
        """What lacks a part along x' lacks cos^2 of it along x, whose length moves that of x' by
        r x.x'/|x'|^2."""
        square, more = self.keep**2, self._more
        before, after = signal.kernel.mean_diagonal(), output.kernel.mean_diagonal()
        first = ratio_or_zero(after - square * before, more)  # |x_0|^2, and x . x_0 = a |x_0|^2
        both = self.keep * before + self.add * self.held * first
        cosine, known = both * both / (before * after), gradient.averaged()

        def at_tokens(value: Array) -> Array:
            one, _ = gradient.kernel.lift(value)
            return one if np.ndim(one) == 0 else one + 0.0 * gradient.kernel.diagonal

        grad_in = Gradient(
            gradient.kernel.scaled(square),
            gradient.seq_len,
            radial=at_tokens(1.0 - (1.0 - known.radial) * cosine),
            norm_response=at_tokens(known.norm_response * self.keep * both / after),
        )
        return Pulled(grad_in)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        done = super().backpropagate(record, gradient, run)
        sent = Gradient(gradient.kernel.scaled(self._more), gradient.seq_len)
        return dataclasses.replace(done, grad_memory=sent)

    def carried(self, record: Record, amplitude: Array) -> Array:
        return amplitude * (self.keep + self.add / self.held)
