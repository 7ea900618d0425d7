"""A second residual connection around a whole Post-LN layer (B2T).

    s = k x + A(x),    y = s/|s|,    u = k' y + F(y),    out = u + x

u contains x with the amplitude a = k k'/sd(s). The component that the gradient at `out` lacks along
`out` is divided among u and x by their squared cosines with `out`. See docs/theory/gradients.md, A
second connection (B2T).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from .composition import Carry, Component, Residual, Solve
from .fluctuation import overlap_covariance
from .response import SINGLE, GradientUnits, Sequence, Sublayer, heads_width
from .state import Array, Fluctuation, Gradient, Kernel, Signal, ratio_or_zero
from .trace import Record, Run


@dataclass(frozen=True)
class BottomToTop(Component):
    """ffn(norm(attention(x))) + x: a layer's input added again at its end (Takase et al. 2022)."""

    attention: Residual
    norm: Component
    ffn: Residual
    label: str = "ffn.bottom_to_top"

    @property
    def children(self) -> tuple[Component, ...]:
        return self.attention, self.norm, self.ffn

    def with_children(self, children: tuple[Component, ...]) -> BottomToTop:
        attention, norm, ffn = children
        assert isinstance(attention, Residual)
        assert isinstance(ffn, Residual)
        return dataclasses.replace(self, attention=attention, norm=norm, ffn=ffn)

    def with_residuals(self, signal: Signal, solve: Solve, carry: Carry) -> BottomToTop:
        attention = solve(self.attention, signal)
        entering = carry(self.norm, carry(attention, signal))
        return dataclasses.replace(self, attention=attention, ffn=solve(self.ffn, entering))

    def propagate(self, signal: Signal, run: Run) -> Record:
        attention = self.attention.propagate(signal, run)
        norm = self.norm.propagate(attention.output, run)
        ffn = self.ffn.propagate(norm.output, run)
        children = attention, norm, ffn
        output = self._sum(signal, ffn.output, self._carried(children))
        return run.record_forward(Record(self, run.layer, signal, output, children))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.record_backward(record, gradient)
        attention, norm, ffn = record.children
        signal, carried = record.input, self._carried(record.children)
        shared = signal.kernel.weighted(carried, 1.0).mean_diagonal()
        size = record.output.kernel.mean_diagonal()

        def along(addend: Signal) -> Array:
            """Squared cosine of an addend with the sum; `shared` is that of the two addends."""
            own = addend.kernel.mean_diagonal()
            return ratio_or_zero((own + shared) ** 2, own * size)

        share = along(ffn.output)
        at_sum = dataclasses.replace(
            gradient,
            radial=1.0 - share * (1.0 - gradient.radial),
            norm_response=share * gradient.norm_response,
        )
        ffn = self.ffn.backpropagate(ffn, at_sum, run)
        norm = self.norm.backpropagate(norm, ffn.grad_in, run)
        attention = self.attention.backpropagate(attention, norm.grad_in, run)
        above = gradient.kernel
        kept = above + crossed(above, carried)
        total = kept + attention.grad_in.kernel
        mean = kept.mean_diagonal() * gradient.centred_share
        mean = mean + attention.grad_in.kernel.mean_diagonal() * attention.grad_in.centred_share
        radial = 1.0 - along(signal) * (1.0 - gradient.averaged().radial)
        grad_in = Gradient(
            total,
            gradient.seq_len,
            ratio_or_zero(radial * above.mean_diagonal(), total.mean_diagonal()),
            ratio_or_zero(mean, total.mean_diagonal()),
        )
        return record.completed(gradient, grad_in, (attention, norm, ffn))

    def _carried(self, children: tuple[Record, ...]) -> Array:
        """Amplitude a of the input in u, per token."""
        amplitude: Array = 1.0
        for child in children:
            amplitude = child.component.amplitude_of_input(child, amplitude)
        return amplitude

    def _sum(self, signal: Signal, inner: Signal, carried: Array) -> Signal:
        """The sum of `signal`, x, and `inner`, u = a x + r with r independent in direction."""
        tokens, cross = signal.kernel, crossed(signal.kernel, carried)
        inner_part = at_both(tokens, carried)
        grown = at_both(tokens, 1 + carried) - inner_part
        mixed = (grown * (inner.kernel - inner_part)).scaled(4 / signal.width)

        def summed(before: Kernel, behind: Kernel) -> Kernel:
            """Covariances of squared norms or overlaps, from those of x and of u."""
            grown = at_both(before, (1 + carried) ** 2) - at_both(before, carried**2)
            return behind + grown + mixed

        fluctuation, overlaps, behind = None, overlap_covariance(signal), overlap_covariance(inner)
        if overlaps is not None and behind is not None:
            overlaps = summed(overlaps, behind)
        if signal.fluctuation is not None and inner.fluctuation is not None:
            norms = summed(signal.fluctuation.norms, inner.fluctuation.norms)
            fluctuation = Fluctuation(norms, overlaps)
        centred = None
        if inner.centred is not None:
            centred = inner.centred + cross
            centred = centred if signal.centred is None else centred + signal.centred
        return Signal(
            inner.kernel + tokens + cross,
            signal.seq_len,
            width=signal.width,
            fluctuation=fluctuation,
            centred=centred,
        )

    def response(self, record: Record, around: GradientUnits) -> Sublayer:
        # The parts add the noise of their own residual sums; this one adds that of its cross term.
        parts = Sequence(tuple(one.component.response(one, around) for one in record.children))
        carried = around.by_token(self._carried(record.children), record.input.kernel)
        inside, skip = (
            (one[..., :, None] * one[..., None, :]).astype(SINGLE) for one in (carried, 1 + carried)
        )
        kernels, width = around.kernels(record), float(record.output.width)
        fields = 0.0, 0.0, width, heads_width(record)
        return Sublayer(parts, True, skip, 1.0, *kernels, *fields, inside=inside)

    def amplitude_of_input(self, record: Record, amplitude: Array) -> Array:
        inner = amplitude
        for child in record.children:
            inner = child.component.amplitude_of_input(child, inner)
        return amplitude + inner


def crossed(kernel: Kernel, carried: Array) -> Kernel:
    """Cross terms in the kernel of x + y, where y contains x with the amplitude `carried`."""
    first, second = kernel.over_tokens(carried)
    return kernel.weighted(2 * carried, first + second)


def at_both(kernel: Kernel, factor: Array) -> Kernel:
    """Multiply every entry by a factor of each of its two tokens."""
    first, second = kernel.over_tokens(factor)
    return kernel.weighted(factor * factor, first * second)
