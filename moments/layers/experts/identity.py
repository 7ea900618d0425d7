"""Identity experts, and experts whose output joins the stream later than their input leaves it.

    h = N(x),   z = x + u + sum_{a > Z} g_a F_a(h) + g h,   g = sum_{a <= Z} g_a,

with u the outputs of the blocks in between. h is along x, so z contains (1 + g/|x|) x, |x| the
token's root mean square, and other terms are independent in direction. As g differs between tokens,
it adds to the fluctuation of z. See docs/theory/experts.md, Experts that give back what they read.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...engine.bottom_to_top import at_both, crossed
from ...engine.composition import Component, PullbackResult, added
from ...engine.fluctuation import OverlapWalk, UnsharedOverlap, overlap_covariance
from ...engine.state import Array, Fluctuation, Gradient, Kernel, Signal, Values, ratio_or_zero
from ...engine.trace import Record, Run
from .routing import together

FORK, TAP = "shortcut from", "shortcut"
"""Keys in `Run`, with a layer's number: the stream that experts read, and their output."""


class ExpertOutput(NamedTuple):
    """Output of a mixture, to be added by `Join`.

    Attributes:
        tokens: h.
        output: of the experts with matrices.
        mean: E g.
        square: E g g' of two tokens.
        slopes: E sum_e T_e T'_e, T_e = dg/dz_e.
        square_tilt, slopes_tilt: both with the factor (g + g')/2 - E g.
    """

    tokens: Kernel
    output: Signal
    mean: Array
    square: Kernel
    slopes: Kernel
    square_tilt: Kernel
    slopes_tilt: Kernel


@dataclass(frozen=True)
class _Through(Component):
    """Base of components that leave the stream's direction unchanged."""

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return at

    def amplitude_of_input(self, record: Record, amplitude: Array) -> Array:
        return amplitude


@dataclass(frozen=True)
class Fork(_Through):
    """The stream that experts of this layer read, for `Join`."""

    number: int
    label: str = ""

    def propagate(self, signal: Signal, run: Run) -> Record:
        run.kept[FORK, self.number] = signal
        return Record(self, run.layer, signal, signal)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        # the gradient of the stream, correlated with that through g h
        (along,) = run.sent.pop((FORK, self.number))
        return record.completed(gradient, gradient.joined(along), ())


@dataclass(frozen=True)
class Tap(_Through):
    """A mixture that reads the normalised stream, which a dense block reads too."""

    mixture: Any
    number: int
    label: str = ""

    @property
    def children(self) -> tuple[Component, ...]:
        return (self.mixture,)

    def with_children(self, children: tuple[Component, ...]) -> Tap:
        return dataclasses.replace(self, mixture=children[0])

    def propagate(self, signal: Signal, run: Run) -> Record:
        child, leaf, tokens = self.mixture.propagate(signal, run), self.mixture, signal.kernel
        mean: Array = 0.0
        pairs = [tokens.scaled(0.0)] * 4
        if leaf.identity:
            logits, correlation = leaf.logits(tokens)
            identity = leaf.router, leaf.identity, logits
            mean, single = together(*identity, 1.0 + 0.0 * logits)
            _, joint = together(*identity, correlation)
            pairs = [at_tokens(tokens, *both) for both in zip(single, joint, strict=True)]
        experts = ExpertOutput(tokens, child.output, mean, *pairs)
        run.kept[TAP, self.number] = experts
        return Record(self, run.layer, signal, signal, (child,), experts)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        """With kernels G of the gradient and H of h, (h.g)(h'.g') has the mean d H_ij G_ij, reduced
        by the part of the gradient that is lacking along z, of which h has cos^2; and later norms
        reduce the gradient of tokens with a large g."""
        (child,), experts = record.children, record.pullback
        ((at_output, lacks, response),) = run.sent.pop((TAP, self.number))
        child = child.backward(at_output, run)
        slopes = experts.slopes + experts.slopes_tilt.scaled(-response)
        logits = at_output.kernel * experts.tokens * slopes
        logits = logits.scaled(record.input.width * (1.0 - lacks))
        square = experts.square + experts.square_tilt.scaled(-response)
        through = at_output.kernel * square + logits.scaled(self.mixture.router_variance)
        weights = functools.partial(self._weights, child.pulled, experts, logits, gradient.seq_len)
        pulled = dataclasses.replace(child.pulled, weights=weights)
        child = child.completed(child.grad_out, child.grad_in, (), pulled)
        total = gradient.kernel + child.grad_in.kernel + through
        return record.completed(gradient, Gradient(total, gradient.seq_len), (child,))

    def _weights(
        self, pulled: PullbackResult, experts: ExpertOutput, logits: Kernel, length: int
    ) -> Values:
        leaf, result = self.mixture, dict(pulled.weights())
        result[leaf.name] += leaf.d_model * (experts.tokens * logits).total(length)
        if leaf.has_bias:
            result[f"{leaf.name}.bias"] += logits.total(length)
        return result


@dataclass(frozen=True)
class Join(_Through):
    """Adds the output of the experts of layer `number` to the stream."""

    number: int
    label: str = "ffn.shortcut"

    def propagate(self, signal: Signal, run: Run) -> Record:
        source, experts = run.kept[FORK, self.number], run.kept[TAP, self.number]
        kernel, tokens = source.kernel, experts.tokens
        gain = experts.mean * np.sqrt(ratio_or_zero(tokens.diagonal, kernel.diagonal))  # E g/|x|
        total = added(signal, experts.output, 1.0, 1.0)
        output = total.replace(
            kernel=total.kernel + crossed(kernel, gain) + tokens * experts.square,
            fluctuation=_fluctuation(source, total, experts, gain),
            centred=None,
        )
        return run.record_forward(
            Record(self, run.layer, signal, output, (), (source, experts, gain))
        )

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.record_backward(record, gradient)
        (source, experts, gain), known = record.pullback, gradient.averaged()
        length, above = gradient.seq_len, gradient.kernel
        before, after, first = (
            signal.kernel.mean_diagonal() for signal in (record.input, record.output, source)
        )
        mean_gain = above.average(gain) if np.ndim(gain) else gain
        lost = 1.0 - known.radial
        share = ratio_or_zero(experts.output.kernel.mean_diagonal(), after)
        at_output = Gradient(
            above, length, 1.0 - share * lost, norm_response=share * known.norm_response
        )
        along = ratio_or_zero((1.0 + mean_gain) ** 2 * first, after)
        # relative decrease of the squared gradient of a token per unit of g
        size = experts.tokens.mean_diagonal() ** 0.5
        response = 2.0 * size * ratio_or_zero((1.0 + mean_gain) * first**0.5, after)
        response = response * known.norm_response
        run.send((TAP, self.number), (at_output, lost * along, response))
        mean, pair_mean = above.lift(experts.mean)
        factors = at_tokens(above, 1.0, 1.0)
        if np.any(experts.mean):
            variance = experts.square.diagonal - mean * mean
            covariance = experts.square.off_diagonal - pair_mean * pair_mean
            averaged, _ = above.lift(above.average(variance) if np.ndim(variance) else variance)
            _, pair_variance = above.lift(np.mean(averaged))
            pairs = 1.0 - response * (pair_variance + covariance) / (2 * pair_mean)
            factors = Kernel.of_parts(1.0 - response * variance / mean, pairs, above.resolved)
        run.send((FORK, self.number), crossed(above, gain) * factors)
        both = before + mean_gain * first
        cosine = ratio_or_zero(both * both, before * after)
        grad_in = Gradient(
            above,
            length,
            radial=1.0 - lost * cosine,
            norm_response=known.norm_response * ratio_or_zero(both, after),
        )
        return record.completed(gradient, grad_in, ())

    def amplitude_of_input(self, record: Record, amplitude: Array) -> Array:
        _, _, gain = record.pullback
        return amplitude * (1.0 + gain)


def _fluctuation(
    source: Signal, total: Signal, experts: ExpertOutput, gain: Array
) -> Fluctuation | None:
    """Fluctuation of (1 + g/|x|) x and the other terms, `total` being the sum without g h. As |h|
    is fixed, d|x + g h|^2 = (1 + g/|x|) d|x|^2. The fluctuation of g adds that of a scale of either
    token, in pairs such that Cov(o_ij, o_ii) = y_ii y_ij (`engine.fluctuation`)."""
    if total.fluctuation is None or source.fluctuation is None:
        return None
    kernel = source.kernel
    grown = at_both(kernel, 1.0 + gain)
    crosses = ((grown - kernel) * (total.kernel - kernel)).scaled(4 / source.width)

    def with_gain(of_source: Kernel, of_total: Kernel) -> Kernel:
        return of_total + at_both(of_source, 1.0 + gain) - of_source + crosses

    norms = with_gain(source.fluctuation.norms, total.fluctuation.norms)
    mean, pair_mean = experts.square.lift(experts.mean * experts.mean)
    variance, pairs = experts.square.diagonal - mean, experts.square.off_diagonal - pair_mean
    correlation = ratio_or_zero(pairs, 0.0 * pairs + np.mean(variance))
    size = np.sqrt(ratio_or_zero(experts.tokens.diagonal, kernel.diagonal)) / (1.0 + gain)
    scatter = np.mean(4.0 * variance * size * size)
    norms = norms + (grown * grown).weighted(scatter, scatter * (0.5 + 0.5 * correlation) ** 2)
    of_source, of_total = overlap_covariance(source), overlap_covariance(total)
    overlaps = None if of_source is None or of_total is None else with_gain(of_source, of_total)
    return Fluctuation(norms, overlaps)


def at_tokens(tokens: Kernel, diagonal: Array, pairs: Array) -> Kernel:
    """Kernel at the resolution of another, from a value for tokens and values for pairs."""
    diagonal = tokens.lift(diagonal)[0] + 0.0 * tokens.diagonal
    return Kernel.of_parts(diagonal, pairs + 0.0 * tokens.off_diagonal, tokens.resolved)
