"""How much two tokens' overlap x_a.x_b/d varies over draws, beyond independent features.

The gradients of queries and keys sum o_ab^2 over L^2 pairs of tokens, whose mean overlap may be 0,
and L terms C_aa: there 1/d is followed as one number nu for all pairs, the relative variance of
the overlap of what two tokens have of their own (a component's `unshared_overlap`).

Around a unit of realised overlap o, hidden units have the covariance F(o) and send the gradient
G b(o) back. The gradients of the matrices before and behind, and of the gain of a norm before, sum
o b(o) and F(o) over pairs: the mean is taken of the two values at E o +- sqrt(Var o), exact to
third order in o. Var o_ab is the forward pass's (`fluctuation`).

See docs/theory/norms.md, Overlaps of idiosyncratic parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..engine.composition import Chain, forward
from ..engine.fluctuation import OverlapWalk, UnsharedOverlap, moved_overlaps
from ..engine.state import Array, Gradient, Kernel, Signal, ratio_or_zero
from ..engine.trace import Record, Trace, weight_rows
from ..layers.attention.projections import real_tokens


class StackOverlaps(NamedTuple):
    """Overlaps over a whole stack.

    Attributes:
        attended: nu of what every attention attends to, by its place.
        growth: factors on squared gradient norms, by layer and name.
        last: nu at the stack's output.
    """

    attended: dict[tuple[int, str], float]
    growth: dict[tuple[int, str], float]
    last: float

    def weights(self, trace: Trace) -> list[tuple[int, str, Array]]:
        """`Trace.weights`, of overlaps as they vary."""
        rows = weight_rows((one, self.attended.get(one.place)) for one in trace.weighted())
        return [
            (layer, name, norm * self.growth.get((layer, name), 1.0)) for layer, name, norm in rows
        ]


def stack_overlaps(
    stack: Record, memory: float | None = None, entering: float | None = None
) -> StackOverlaps:
    """Follow nu through the layers.

    Args:
        stack: the layers, both passes, one configuration.
        memory: nu of what cross-attention reads; None: 1/width of that.
        entering: nu of what enters layer 1; None: 1/width.
    """
    leaves = (one.component for one in stack.leaves() if one.memory is None)
    padded = (real_tokens(leaf) for leaf in leaves if leaf.padding is not None)
    walk = OverlapWalk(memory, next(padded, None))
    start = 1.0 / stack.input.width if entering is None else entering
    last = walk.through(stack, UnsharedOverlap(start))
    for chain in (one for one in stack.walk() if isinstance(one.component, Chain)):
        for unit in units(chain):
            for name, factor in unit_growth(unit).items():
                walk.growth[chain.layer, name] = factor
    return StackOverlaps(walk.attended, walk.growth, last.variance)


class ChainUnit(NamedTuple):
    """A unit in a chain.

    Attributes:
        records: of which it is made, from tokens to hidden features.
        before: name of the gain that sums o b(o); None: there is none.
        behind: name of the matrix that sums F(o); None: there is none.
        along: (K_oo + 4 K_qq)/K_oo.
    """

    records: tuple[Record, ...]
    before: str | None
    behind: str | None
    along: float


def units(chain: Record) -> Iterator[ChainUnit]:
    """The units of a chain that a gradient has come back through."""
    parts = [one.component for one in chain.children]
    for index, part in enumerate(parts):
        result = part.hidden
        if result is None or chain.children[index].grad_out is None:
            continue
        first = index + 1 - result.parts
        if first < 0 or not parts[first].matrices:
            continue
        # scales do not change what a gain meets, nor masks what a matrix does
        before = [p for p in parts[:first] if p.normalises or not p.rescales]
        behind = [p for p in parts[index + 1 :] if not p.masks]
        yield ChainUnit(
            chain.children[first : index + 1],
            before[-1].gain_name if before else None,
            next(iter(behind[0].matrices), None) if behind else None,
            result.along,
        )


def unit_growth(unit: ChainUnit) -> dict[str, float]:
    """Factors on squared gradient norms, by name."""
    tokens, gradient = unit.records[0].input, unit.records[-1].grad_out
    kernel, moved = tokens.second_moment(), moved_overlaps(tokens)
    if moved is None:  # behind a component of one's own that does not follow them
        return {}
    mean = tokens.replace(kernel=kernel, mean=0.0 * kernel.diagonal)
    at, above, below = (_norms(unit, one, gradient) for one in (mean, moved.above, moved.below))
    grown = {name: 0.5 * (above[0][name] + below[0][name]) for name in at[0]}
    if unit.before is not None:
        first, second = kernel.over_tokens(kernel.diagonal)
        # a token with itself has no step
        slope = ratio_or_zero(0.5 * (above[1] - below[1]), moved.step)
        along = (first * second + 2.0 * kernel.off_diagonal**2) * slope / tokens.width
        diagonal = 0.0 * kernel.diagonal
        total = Kernel.joined(diagonal, along, kernel.resolved).total(tokens.seq_len)
        grown[unit.before] += unit.along * float(np.sum(total))
    return {name: grown[name] / norm for name, norm in at[0].items() if norm > 0.0}


def _norms(unit: ChainUnit, tokens: Signal, gradient: Gradient) -> tuple[dict[str, float], Array]:
    """Squared norms, or what they are in proportion to, and the gradient's pairs at the tokens."""
    _, record = forward(Chain(tuple(one.component for one in unit.records)), tokens)
    signal = record.output
    result: dict[str, Array] = {}
    if unit.behind is not None:
        hidden = signal.second_moment() * gradient.kernel
        result[unit.behind] = hidden.total(tokens.seq_len)
    record = record.backward(gradient)
    for one in record.leaves():
        result |= one.weights()
    gradient = record.grad_in
    if unit.before is not None:
        result[unit.before] = (tokens.kernel * gradient.kernel).total(tokens.seq_len)
    return {
        name: float(np.sum(norm)) for name, norm in result.items()
    }, gradient.kernel.off_diagonal
