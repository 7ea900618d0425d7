"""Experts that give back what they read, and what is added a layer later than it was made.

    h = N(x),   z = x + u + sum_{a > Z} g_a F_a(h) + g h,   g = sum_{a <= Z} g_a,

u being what blocks between the reading and the adding gave. h lies along x: z has (1 + g/|x|) x,
|x| a token's root mean square, and the rest is independent of it in direction. Where tokens differ
in g, z is scattered by it. See docs/theory/experts.md, Experts that give back what they read.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...engine.bottom_to_top import at_both, crossed
from ...engine.composition import Component, Pulled, added
from ...engine.fluctuation import OverlapWalk, UnsharedOverlap, followed
from ...engine.state import Array, Fluctuation, Gradient, Kernel, Signal, Values, ratio_or_zero
from ...engine.trace import Record, Run
from .routing import together

FORK, TAP = "shortcut from", "shortcut"
"""Names, with a layer's number, of what is kept: the stream, and what experts make of it."""


class Left(NamedTuple):
    """What is left for the adding.

    Attributes:
        tokens: h.
        given: what experts with matrices give.
        mean: E g.
        twice: E g g' of two tokens.
        slopes: E sum_e T_e T'_e, T_e = dg/dz_e.
        leaning, steeper: both with the factor (g + g')/2 - E g.
    """

    tokens: Kernel
    given: Signal
    mean: Array
    twice: Kernel
    slopes: Kernel
    leaning: Kernel
    steeper: Kernel


@dataclass(frozen=True)
class _Through(Component):
    """Hands on what it reads."""

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return at

    def carried(self, record: Record, amplitude: Array) -> Array:
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
        # what came down beside the experts, with what came through g h
        (along,) = run.sent.pop((FORK, self.number))
        return record.completed(gradient, gradient.joined(along), ())


@dataclass(frozen=True)
class Tap(_Through):
    """Behind the norm: a mixture reads what a dense block reads too."""

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
            given = leaf.router, leaf.identity, logits
            mean, single = together(*given, 1.0 + 0.0 * logits)
            _, joint = together(*given, correlation)
            pairs = [at_tokens(tokens, *both) for both in zip(single, joint, strict=True)]
        left = Left(tokens, child.output, mean, *pairs)
        run.kept[TAP, self.number] = left
        return Record(self, run.layer, signal, signal, (child,), left)

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        """With G of the gradient and H of h, (h.G)(h'.G') has the mean d H_ij G_ij, less by what
        the gradient lacks along z, of which h has cos^2; and behind norms the more a token has
        of h, the less comes back."""
        (child,), left = record.children, record.pullback
        ((sent, lacks, falls),) = run.sent.pop((TAP, self.number))
        child = child.backward(sent, run)
        slopes = left.slopes + left.steeper.scaled(-falls)
        logits = (sent.kernel * left.tokens * slopes).scaled(record.input.width * (1.0 - lacks))
        through = sent.kernel * (left.twice + left.leaning.scaled(-falls)) + logits.scaled(
            self.mixture.router_variance
        )
        weights = functools.partial(self._weights, child.pulled, left, logits, gradient.seq_len)
        pulled = dataclasses.replace(child.pulled, weights=weights)
        child = child.completed(child.grad_out, child.grad_in, (), pulled)
        total = gradient.kernel + child.grad_in.kernel + through
        return record.completed(gradient, Gradient(total, gradient.seq_len), (child,))

    def _weights(self, pulled: Pulled, left: Left, logits: Kernel, length: int) -> Values:
        leaf, result = self.mixture, dict(pulled.weights())
        result[leaf.name] += leaf.d_model * (left.tokens * logits).total(length)
        if leaf.has_bias:
            result[f"{leaf.name}.bias"] += logits.total(length)
        return result


@dataclass(frozen=True)
class Join(_Through):
    """What the experts of layer `number` give, added."""

    number: int
    label: str = "ffn.shortcut"

    def propagate(self, signal: Signal, run: Run) -> Record:
        source, left = run.kept[FORK, self.number], run.kept[TAP, self.number]
        kernel, tokens = source.kernel, left.tokens
        held = left.mean * np.sqrt(ratio_or_zero(tokens.diagonal, kernel.diagonal))
        with_given = added(signal, left.given, 1.0, 1.0)
        output = with_given.replace(
            kernel=with_given.kernel + crossed(kernel, held) + tokens * left.twice,
            fluctuation=_fluctuation(source, with_given, left, held),
            centred=None,
        )
        return run.passed(Record(self, run.layer, signal, output, (), (source, left, held)))

    def backpropagate(self, record: Record, gradient: Gradient, run: Run) -> Record:
        run.returning(record, gradient)
        (source, left, held), known = record.pullback, gradient.averaged()
        length, above = gradient.seq_len, gradient.kernel
        before, after, first = (
            one.kernel.mean_diagonal() for one in (record.input, record.output, source)
        )
        grown = above.average(held) if np.ndim(held) else held
        lost = 1.0 - known.radial
        given = ratio_or_zero(left.given.kernel.mean_diagonal(), after)
        sent = Gradient(
            above, length, 1.0 - given * lost, norm_response=given * known.norm_response
        )
        along = ratio_or_zero((1.0 + grown) ** 2 * first, after)
        # of a token's square per g; its root is of the gradient at either token
        size = left.tokens.mean_diagonal() ** 0.5
        falls = 2.0 * size * ratio_or_zero((1.0 + grown) * first**0.5, after) * known.norm_response
        run.send((TAP, self.number), (sent, lost * along, falls))
        one, two = above.lift(left.mean)
        varies = at_tokens(above, 1.0, 1.0)
        if np.any(left.mean):
            own, pairs = left.twice.diagonal - one * one, left.twice.off_diagonal - two * two
            mean_own, _ = above.lift(above.average(own) if np.ndim(own) else own)
            _, alone = above.lift(np.mean(mean_own))
            varies = Kernel.joined(
                1.0 - falls * own / one, 1.0 - falls * (alone + pairs) / (2 * two), above.resolved
            )
        run.send((FORK, self.number), crossed(above, held) * varies)
        both = before + grown * first
        cosine = ratio_or_zero(both * both, before * after)
        grad_in = Gradient(
            above,
            length,
            radial=1.0 - lost * cosine,
            norm_response=known.norm_response * ratio_or_zero(both, after),
        )
        return record.completed(gradient, grad_in, ())

    def carried(self, record: Record, amplitude: Array) -> Array:
        _, _, held = record.pullback
        return amplitude * (1.0 + held)


def _fluctuation(source: Signal, given: Signal, left: Left, held: Array) -> Fluctuation | None:
    """Of (1 + g/|x|) x and the rest. As |h| is fixed, |x + g h|^2 answers to |x|^2 by 1 + g/|x|;
    and it is scattered by g: of pairs, such that Cov(o_ij, o_ii) = y_ii y_ij (`engine.fluctuation`)
    is that of a scale of either token."""
    if given.fluctuation is None or source.fluctuation is None:
        return None
    kernel = source.kernel
    grown = at_both(kernel, 1.0 + held)
    crosses = ((grown - kernel) * (given.kernel - kernel)).scaled(4 / source.width)

    def varies(before: Kernel, behind: Kernel) -> Kernel:
        return behind + at_both(before, 1.0 + held) - before + crosses

    norms = varies(source.fluctuation.norms, given.fluctuation.norms)
    square = left.mean * left.mean
    one, two = left.twice.lift(square)
    own, pairs = left.twice.diagonal - one, left.twice.off_diagonal - two
    like = ratio_or_zero(pairs, 0.0 * pairs + np.mean(own))
    size = np.sqrt(ratio_or_zero(left.tokens.diagonal, kernel.diagonal)) / (1.0 + held)
    scatter = np.mean(4.0 * own * size * size)
    norms = norms + (grown * grown).weighted(scatter, scatter * (0.5 + 0.5 * like) ** 2)
    before, behind = followed(source), followed(given)
    overlaps = None if before is None or behind is None else varies(before, behind)
    return Fluctuation(norms, overlaps)


def at_tokens(tokens: Kernel, alone: Array, both: Array) -> Kernel:
    """A kernel like another of a number for every token and one for every pair."""
    diagonal = tokens.lift(alone)[0] + 0.0 * tokens.diagonal
    return Kernel.joined(diagonal, both + 0.0 * tokens.off_diagonal, tokens.resolved)
