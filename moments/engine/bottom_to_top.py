"""A layer's input x added again at its end, to an output that still carries it (B2T).

    s = k x + A(x),    y = s/|s|,    u = k' y + F(y),    out = u + x

Of u, k' y is x with amplitude a = k k'/deviation of s, and what attention added. Of what the
gradient at `out` lacks along `out`, u and x have the squares of their cosines with it. See
docs/theory/gradients.md, A second connection (B2T).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from .classes import diagonal_of
from .composition import Carry, Component, Residual, Solve
from .fluctuation import followed
from .response import (
    SINGLE,
    Around,
    GradientAdjoint,
    SignalAdjoint,
    Sublayer,
    count_of,
    diagonal_matrix,
    over_tokens,
    paired,
    per_pair,
    ratio,
    row_sums,
    total,
    trace_of,
)
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
        return run.passed(Record(self, run.layer, signal, output, children))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        attention, norm, ffn = record.children
        signal, carried = record.input, self._carried(record.children)
        shared = signal.kernel.weighted(carried, 1.0).mean_diagonal()
        size = record.output.kernel.mean_diagonal()

        def along(part: Signal) -> Array:
            """Squared cosine between a part and the sum, of which that part has `shared`."""
            own = part.kernel.mean_diagonal()
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
        kept = above + _crossed(above, carried)
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
        """Amplitude of the input in the sum behind the feed-forward block, per token."""
        amplitude: Array = 1.0
        for child in children:
            amplitude = child.component.carried(child, amplitude)
        return amplitude

    def _sum(self, signal: Signal, inner: Signal, carried: Array) -> Signal:
        """(1 + a) x and the rest, independent in direction, of which `inner` has a x and the
        rest."""
        tokens, cross = signal.kernel, _crossed(signal.kernel, carried)
        held = _at_both(tokens, carried)
        mixed = ((_at_both(tokens, 1 + carried) - held) * (inner.kernel - held)).scaled(
            4 / signal.width
        )

        def varies(before: Kernel, behind: Kernel) -> Kernel:
            grown = _at_both(before, (1 + carried) ** 2) - _at_both(before, carried**2)
            return behind + grown + mixed

        assert signal.fluctuation is not None
        assert inner.fluctuation is not None
        overlaps, behind = followed(signal), followed(inner)
        if overlaps is not None and behind is not None:
            overlaps = varies(overlaps, behind)
        centred = None
        if inner.centred is not None:
            centred = inner.centred + cross
            centred = centred if signal.centred is None else centred + signal.centred
        return Signal(
            inner.kernel + tokens + cross,
            signal.seq_len,
            width=signal.width,
            fluctuation=Fluctuation(
                varies(signal.fluctuation.norms, inner.fluctuation.norms), overlaps
            ),
            centred=centred,
        )

    def two_sequences(self, signal: Signal, memory: Kernel | None) -> Signal:
        between = self.attention.two_sequences(signal, memory)
        entering = self.norm.two_sequences(between, memory)
        inner = self.ffn.two_sequences(entering, memory)
        carried = np.sqrt(entering.kernel.diagonal / between.kernel.diagonal)
        both = 1 + 2 * np.asarray(carried * self.attention.skip_scale * self.ffn.skip_scale)
        return Signal(inner.kernel + signal.kernel.scaled(both), 2, width=signal.width)

    def sublayer(self, record: Record, around: Around) -> Sublayer:
        sublayers = [one.component.sublayer(one, around) for one in record.children]
        carried = around.by_token(self._carried(record.children), record.input.kernel)
        three = sublayers[0], sublayers[1], sublayers[2]
        return bypassed(three, carried.astype(SINGLE), around.kernels(record))

    def carried(self, record: Record, amplitude: Array) -> Array:
        inner = amplitude
        for child in record.children:
            inner = child.component.carried(child, inner)
        return amplitude + inner


def _crossed(kernel: Kernel, carried: Array) -> Kernel:
    """What moments gain from a tensor that is there a second time by these amplitudes."""
    first, second = kernel.over_tokens(carried)
    return kernel.weighted(2 * carried, first + second)


def _at_both(kernel: Kernel, factor: Array) -> Kernel:
    """Every entry times a factor of either token."""
    first, second = kernel.over_tokens(factor)
    return kernel.weighted(factor * factor, first * second)


# --- one draw, by token ---------------------------------------------------------------------------
#
# With u = s x + b the sum behind attention, n = u/|u| and f the feed-forward block's output, the
# layer ends in y = x + s' n + f, which holds x with amplitude 1 + a, a = s s'/|u|. The cross term
# x.b of attention is in the kernel of u with the factor 2 s and in that of y with 2 s'/|u|,
# and on the way back the feed-forward block's likewise.


@dataclass(frozen=True, kw_only=True)
class Bypass(Sublayer):
    """What the three parts of such a layer do to sensitivities, their noise included.

    Attributes:
        attention, norm, ffn: residual connection, normalisation, residual connection.
        carried: (..., L) a.
    """

    attention: Sublayer
    norm: Sublayer
    ffn: Sublayer
    carried: Array

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        inner = self.attention.gradient_adjoint(sensitivity)
        between = self.norm.gradient_adjoint(inner.sensitivity)
        top = self.ffn.gradient_adjoint(between.sensitivity)
        both, skip = self._both, per_pair(self.ffn.skip)
        # The feed-forward block's branch, then attention's and all the rest.
        first = skip * self.grad_out
        deep = self.ffn.grad_in - first
        crossed = between.sensitivity + ratio(0.5 * (both - 1), skip) * sensitivity
        noise = self._added(crossed, between.sensitivity, first, deep, self.ffn.back_kappa)
        attended = self.grad_in - both * self.grad_out
        attended = attended - per_pair(self.attention.skip) * self.norm.grad_in
        noise += self._added(
            sensitivity, sensitivity, self.grad_in - attended, attended, self.attention.back_kappa
        )
        sizes = total(sensitivity * attended), total(between.sensitivity * deep)
        crossing = sizes[0] * inner.coherence + sizes[1] * top.coherence
        exposure = (inner.exposure, between.exposure, top.exposure, sensitivity)
        return GradientAdjoint(
            top.sensitivity + both * sensitivity,
            exposure,
            noise + inner.noise + between.noise + top.noise,
            between.coherence * ratio(crossing, sizes[0] + sizes[1]),
        )

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        of_attention, of_norm, of_ffn, given = exposure
        top = self.ffn.signal_adjoint(sensitivity, of_ffn)
        between = self.norm.signal_adjoint(top.sensitivity, of_norm)
        kernel, around = self.attention.entering, self.attention.leaving
        # a falls as |u| grows
        moved = row_sums(sensitivity * kernel)
        moved[: len(given)] += row_sums(given * self.grad_out)
        share = self.carried / diagonal_of(around)
        middle = between.sensitivity - diagonal_matrix((share * moved).astype(SINGLE), around)
        inner = self.attention.signal_adjoint(middle, of_attention)
        both, skip = self._both, per_pair(self.attention.skip)
        first = skip * kernel
        crossed = middle + ratio(0.5 * (both - 1), skip) * sensitivity
        noise = self._added(crossed, middle, first, around - first, self.attention.kappa)
        deep = self.ffn.leaving - per_pair(self.ffn.skip) * self.ffn.entering
        noise += self._added(sensitivity, sensitivity, self.leaving - deep, deep, self.ffn.kappa)
        return SignalAdjoint(
            inner.sensitivity + both * sensitivity,
            noise + inner.noise + between.noise + top.noise,
            inner.common + between.common + top.common,
        )

    def gradient_noise(self, sensitivity: Array) -> Array:
        return np.zeros(sensitivity.shape[:-2])

    signal_noise = gradient_noise

    @property
    def _both(self) -> Array:
        return 1 + self.carried[..., :, None] + self.carried[..., None, :]

    def _added(
        self, crossed: Array, sensitivity: Array, carried: Array, added: Array, kappa: Array
    ) -> Array:
        """Variance of an addition whose cross term has another sensitivity than its square."""
        cross = 4 * paired(crossed, carried.astype(SINGLE), added.astype(SINGLE))
        square = paired(sensitivity, added.astype(SINGLE), added.astype(SINGLE))
        return (cross + kappa * square) / self.attention.width


def bypassed(
    sublayers: tuple[Sublayer, Sublayer, Sublayer],
    carried: Array,
    kernels: tuple[Array, Array, Array, Array],
) -> Sublayer:
    """The whole layer but its last normalisation as one part.

    Args:
        sublayers: residual connection, normalisation, residual connection.
        carried: (..., L) a.
        kernels: of the signal that enters and leaves, of the gradient sent and received.
    """
    attention, norm, ffn = sublayers
    entering = kernels[0]
    # What different directions share passes the connections on average over tokens.
    each = over_tokens((1 + carried) ** 2, entering) / count_of(entering)
    added = [one.leaving - per_pair(one.skip) * one.entering for one in (attention, ffn)]
    sizes = [trace_of(one) for one in added]
    mean = over_tokens(carried, entering) / count_of(entering)
    sizes[0] = sizes[0] * ratio(mean**2, np.asarray(attention.skip) ** 2)
    share = ratio(sizes[0], sizes[0] + sizes[1])
    kappa = 2 + (attention.kappa - 2) * share**2 + (ffn.kappa - 2) * (1 - share) ** 2
    moments = *kernels, kappa, kappa, attention.width, attention.inner, share
    whole = attention.response, True, each, 1.0, *moments  # of which it makes nothing
    return Bypass(*whole, attention=attention, norm=norm, ffn=ffn, carried=carried)
