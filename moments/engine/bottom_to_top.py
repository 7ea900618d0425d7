"""A layer's input x added again at its end, to an output that still carries it (B2T).

    s = k x + A(x),    y = s/|s|,    u = k' y + F(y),    out = u + x

Of u, k' y is x with amplitude a = k k'/deviation of s, and what attention added. Derived to order
1/width, for an x that a normalisation left (every layer's but the first): what the gradient at
`out` has along any two of its parts. See docs/theory/gradients.md, A second connection (B2T).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .classes import diagonal_of
from .composition import Carry, Component, Residual, Solve, square
from .directions import isotropic, orthogonal_parts
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
        output = DoubleSum.of(self, signal, children).output()
        return run.passed(Record(self, run.layer, signal, output, children))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        attention, norm, ffn = record.children
        total = DoubleSum.of(self, record.input, record.children)
        run.returning(ffn, gradient)
        ffn = total.ffn_completed(record.output, gradient, ffn, run)
        norm = self.norm.backpropagate(norm, ffn.grad_in, run)
        attention = self.attention.backpropagate(attention, norm.grad_in, run)
        grad_in = total.returned(record.output, gradient, attention.grad_in)
        return record.completed(gradient, grad_in, (attention, norm, ffn))

    def two_sequences(self, signal: Signal, memory: Kernel | None) -> Signal:
        between = self.attention.two_sequences(signal, memory)
        entering = self.norm.two_sequences(between, memory)
        inner = self.ffn.two_sequences(entering, memory)
        carried = np.sqrt(entering.kernel.diagonal / between.kernel.diagonal)
        both = 1 + 2 * np.asarray(carried * self.attention.skip_scale * self.ffn.skip_scale)
        return Signal(inner.kernel + signal.kernel.scaled(both), 2, width=signal.width)

    def sublayer(self, record: Record, around: Around) -> Sublayer:
        sublayers = [one.component.sublayer(one, around) for one in record.children]
        carried = DoubleSum.of(self, record.input, record.children).carried
        carried = around.by_token(carried, record.input.kernel).astype(SINGLE)
        return bypassed((sublayers[0], sublayers[1], sublayers[2]), carried, around.kernels(record))

    def carried(self, record: Record, amplitude: Array) -> Array:
        inner = amplitude
        for child in record.children:
            inner = child.component.carried(child, inner)
        return amplitude + inner


class DoubleSum(NamedTuple):
    """A layer with a second connection, on its way up.

    Attributes:
        inner: the feed-forward block's residual sum.
        carried: amplitude of the input in `inner`, per token.
    """

    node: BottomToTop
    signal: Signal
    between: Signal
    entering: Signal
    inner: Signal
    carried: Array

    @classmethod
    def of(cls, node: BottomToTop, signal: Signal, children: tuple[Record, ...]) -> DoubleSum:
        """From the records of a layer's three parts."""
        between, entering, inner = (one.output for one in children)
        carried = np.sqrt(entering.kernel.diagonal / between.kernel.diagonal)
        carried = carried * node.attention.skip_scale * node.ffn.skip_scale
        return cls(node, signal, between, entering, inner, carried)

    def crossed(self, kernel: Kernel, factor: Array = 1.0) -> Kernel:
        """What the sum's moments gain because u holds the input by the carried amplitude."""
        factor_kept = self.carried * factor
        first, second = kernel.over_tokens(factor_kept)
        return kernel.weighted(2 * factor_kept, first + second)

    def output(self) -> Signal:
        """The sum."""
        signal, inner = self.signal, self.inner
        cross = self.crossed(signal.kernel, self._norm_mean() - self._turned())
        centred = None
        if inner.centred is not None:
            centred = inner.centred + cross
            centred = centred if signal.centred is None else centred + signal.centred
        return Signal(
            inner.kernel + signal.kernel + cross,
            signal.seq_len,
            width=signal.width,
            fluctuation=Fluctuation(self._norms(), self._overlaps()),
            centred=centred,
        )

    def _norm_mean(self) -> Array:
        """E 1/|s| over 1/sqrt(E |s|^2)."""
        assert self.between.fluctuation is not None
        size = self.between.kernel.diagonal
        return 1 + 0.375 * ratio_or_zero(self.between.fluctuation.norms.diagonal, size * size)

    def _turned(self) -> Array:
        """Half the relative covariance of x.s and |s|^2, which share x.A."""
        skip = self.node.attention.skip_scale
        total = self.between.kernel.diagonal
        added = total - skip * skip * self.signal.kernel.diagonal
        return ratio_or_zero(added, total) / self.signal.width

    def _norms(self) -> Kernel:
        """|out|^2 = |u|^2 + |x|^2 + 2 x.F + 2 k' x.y, where x.y = x.s/|s|.

        With e, f the relative deviations of x.s and of |A|^2 over |s|^2, and w the share of x in
        |s|^2, that of x.y is (1 - w) e - f/2.
        """
        signal, between, inner = self.signal, self.between, self.inner
        assert signal.fluctuation is not None
        assert between.fluctuation is not None
        assert inner.fluctuation is not None
        before, behind = signal.fluctuation.norms, between.fluctuation.norms
        width, tokens = signal.width, signal.kernel
        skip = square(self.node.attention.skip_scale)
        added = between.kernel - tokens.scaled(skip)
        fresh = inner.kernel - self.entering.kernel.scaled(square(self.node.ffn.skip_scale))
        crossing = tokens * added
        sizes = behind - before.scaled(skip * skip) - crossing.scaled(4 * skip / width)
        total = between.kernel.diagonal
        share = skip * tokens.diagonal / total
        turned = self._by_token(crossing, self.carried * (1 - share)).scaled(1 / (skip * width))
        sized = self._by_token(sizes, 0.5 * self.carried * tokens.diagonal / total)
        both = ((tokens + self.crossed(tokens)) * fresh).scaled(4 / width)
        return inner.fluctuation.norms + before + both + (turned + sized).scaled(4.0)

    def _by_token(self, kernel: Kernel, factor: Array) -> Kernel:
        first, second = kernel.over_tokens(factor)
        return kernel.weighted(factor * factor, first * second)

    def _overlaps(self) -> Kernel | None:
        """Overlaps of (1 + a) x and the rest, of which `inner` holds those of a x and the rest."""
        signal, inner = self.signal, self.inner
        before, behind = followed(signal), followed(inner)
        if before is None or behind is None:
            return None
        tokens = signal.kernel
        carried_kernel = self._by_token(tokens, self.carried)
        more = self._by_token(tokens, 1 + self.carried)
        rest = inner.kernel - carried_kernel
        squares = self._by_token(before, (1 + self.carried) ** 2)
        squares = squares - self._by_token(before, self.carried**2)
        crossed = ((more - carried_kernel) * rest).scaled(4 / signal.width)
        return behind + squares + crossed

    # --- the way back -----------------------------------------------------------------------------

    def ffn_completed(self, output: Signal, gradient: Gradient, ffn: Record, run: Run) -> Record:
        """The record of the feed-forward block with the gradient carried back to its input y.

        As `directions.orthogonal_parts`, with `output` in place of u: that g lacks E (u.g)^2 of
        y.g_y = u.g, and 2 E (k' y.g)(F.g) + E (F.g)^2 of |g_y|^2.
        """
        (branch,), above = ffn.children, gradient
        gradient = gradient.averaged()
        node = self.node.ffn
        kept = gradient.kernel.scaled(square(node.skip_scale))
        handed = gradient.kernel.scaled(square(node.branch_scale))
        total, entering = output.kernel.mean_diagonal(), self.entering.kernel.mean_diagonal()
        carried_kernel, whole = (
            square(node.skip_scale) * entering,
            self.inner.kernel.mean_diagonal(),
        )
        added, shared = whole - carried_kernel, self._overlap()
        done = branch.backward(gradient.at_addend(handed, added / total), run)
        grad_in = done.grad_in
        lacking = (2 * (carried_kernel + shared) + added) / total - 1.0
        share = ratio_or_zero(added * lacking, carried_kernel)
        kept, returned = orthogonal_parts(
            self.entering, share, gradient, kept, grad_in, mixing=False
        )
        merged = kept + returned
        radial: Array = 1.0
        if not isotropic(gradient.radial):
            along = whole - (1.0 - gradient.radial) * (whole + shared) ** 2 / total
            grad_out = gradient.kernel.mean_diagonal()
            radial = ratio_or_zero(along * grad_out, entering * merged.mean_diagonal())
        kept_share = ratio_or_zero(kept.mean_diagonal(), merged.mean_diagonal())
        centred = gradient.centred_share * kept_share
        result = Gradient(merged, gradient.seq_len, radial, centred)
        return ffn.completed(above, result, (done,))

    def returned(self, output: Signal, gradient: Gradient, grad_in: Gradient) -> Gradient:
        """The gradient at the input, of what the sum received and what attention's side sends."""
        gradient = gradient.averaged()
        above = gradient.kernel
        carried, total = self.signal.kernel.mean_diagonal(), output.kernel.mean_diagonal()
        skip = square(self.node.ffn.skip_scale)
        carried_kernel, shared = skip * self.entering.kernel.mean_diagonal(), self._overlap()
        lacks = (1.0 - gradient.radial) / total
        # E (x.g)^2, E (x.g)(y.g), E (y.g)^2, y what the skip connection of u holds
        alone = carried - lacks * (carried + shared) ** 2
        mutual = shared - lacks * (carried + shared) * (carried_kernel + shared)
        remainder = carried_kernel - lacks * (carried_kernel + shared) ** 2
        # Through s the input receives P g/|s| with P orthogonal to y; and attention, along x, what
        # cancels that, averaged over the tokens' gradients.
        common = ratio_or_zero(above.mean_off_diagonal(), above.mean_diagonal())
        turned = (alone - shared * mutual / carried_kernel) / carried
        lost = remainder / carried_kernel
        if self.entering.centred is not None:  # the mean over features
            lost = lost + 1.0 - gradient.centred_share
        width, norms = self.signal.width, self._norm_mean()
        one, _ = above.lift(1.0 - (lost + common * turned) / width)
        _, two = above.lift(1.0 - (lost + turned) / width)
        first, second = above.over_tokens(self.carried * norms)
        cross = above.weighted(2 * self.carried * norms * one, (first + second) * two)
        kernel = grad_in.kernel + above + cross
        grad_out, kept = above.mean_diagonal(), (above + cross).mean_diagonal()
        size = kernel.mean_diagonal()
        centred = (
            kept * gradient.centred_share + grad_in.kernel.mean_diagonal() * grad_in.centred_share
        )
        return Gradient(
            kernel,
            gradient.seq_len,
            ratio_or_zero(alone * grad_out, carried * size),
            ratio_or_zero(centred, size),
        )

    def _overlap(self) -> Array:
        """Of the input and u."""
        kernel = self.signal.kernel
        return kernel.weighted(self.carried, 1.0).mean_diagonal()


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
