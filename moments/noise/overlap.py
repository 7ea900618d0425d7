"""Weight gradients corrected for the variance of two tokens' overlap o_ab = x_a.x_b/d over draws.

The gradients of queries and keys sum o_ab^2 over L^2 pairs of tokens, whose mean overlap may be 0,
and C_aa^2 over only L tokens, so that terms of order 1/d count. They are followed as one number nu,
the relative variance of the overlap of two tokens' unshared parts (`Component.unshared_overlap`).

Hidden units of an activation whose inputs have the realised overlap o have the covariance F(o) and
send the gradient G b(o) back. Squared gradients of the matrix or norm gain before them sum o b(o)
over pairs, of the matrix behind them F(o). These are averaged over the two values E o +-
sqrt(Var o), exact to third order in o; Var o is the forward pass's (`fluctuation`).

See docs/theory/norms.md, Overlaps of idiosyncratic parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..engine.composition import Chain, forward
from ..engine.fluctuation import OverlapWalk, UnsharedOverlap, shifted_overlaps
from ..engine.state import Array, Gradient, Kernel, Signal, ratio_or_zero
from ..engine.trace import Record, Trace, weight_rows
from ..layers.attention.projections import real_tokens


class StackOverlaps(NamedTuple):
    """Variance of overlaps throughout a stack.

    Attributes:
        attended: nu of the input of every attention, by (layer, site).
        growth: factors on squared gradient norms, by (layer, name).
        last: nu at the stack's output.
    """

    attended: dict[tuple[int, str], float]
    growth: dict[tuple[int, str], float]
    last: float

    def weights(self, trace: Trace) -> list[tuple[int, str, Array]]:
        """`Trace.weights` with the corrections."""
        rows = weight_rows((one, self.attended.get(one.place)) for one in trace.weighted())
        return [
            (layer, name, norm * self.growth.get((layer, name), 1.0)) for layer, name, norm in rows
        ]


def stack_overlaps(
    stack: Record, memory: float | None = None, entering: float | None = None
) -> StackOverlaps:
    """Propagate nu through the layers.

    Args:
        stack: both passes through the layers, for a single configuration.
        memory: nu of the memory of cross-attention; None: 1/width.
        entering: nu of the signal that enters layer 1; None: 1/width.
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
    """An activation in a chain, with the matrices before it.

    Attributes:
        records: from the tokens to the hidden features.
        gain: name of the norm gain before them; None: there is none.
        matrix: name of the matrix behind them; None: there is none.
        along: as `composition.Hidden.along`.
    """

    records: tuple[Record, ...]
    gain: str | None
    matrix: str | None
    along: float


def units(chain: Record) -> Iterator[ChainUnit]:
    """The units of a chain that a gradient has passed."""
    parts = [one.component for one in chain.children]
    for index, part in enumerate(parts):
        hidden = part.hidden
        if hidden is None or chain.children[index].grad_out is None:
            continue
        first = index + 1 - hidden.parts
        if first < 0 or not parts[first].matrices:
            continue
        # Scales between a gain and the unit, and masks behind it, cancel in the ratios.
        before = [p for p in parts[:first] if p.normalises or not p.rescales]
        behind = [p for p in parts[index + 1 :] if not p.is_dropout]
        yield ChainUnit(
            chain.children[first : index + 1],
            before[-1].gain_name if before else None,
            next(iter(behind[0].matrices), None) if behind else None,
            hidden.along,
        )


def unit_growth(unit: ChainUnit) -> dict[str, float]:
    """Factors on squared gradient norms, by name."""
    tokens, gradient = unit.records[0].input, unit.records[-1].grad_out
    kernel, moved = tokens.second_moment(), shifted_overlaps(tokens)
    if moved is None:  # behind a user's component that does not track fluctuations
        return {}
    mean = tokens.replace(kernel=kernel, mean=0.0 * kernel.diagonal)
    # what directions and norms of the gradient do is in both, but not in moments at moved overlaps
    gradient = gradient.with_kernel(gradient.kernel)
    (norms, _), (norms_above, above), (norms_below, below) = (
        _norms(unit, one, gradient) for one in (mean, moved.above, moved.below)
    )
    result = {name: 0.5 * (norms_above[name] + norms_below[name]) for name in norms}
    if unit.gain is not None:
        first, second = kernel.over_tokens(kernel.diagonal)
        slope = ratio_or_zero(0.5 * (above - below), moved.step)  # 0 on the diagonal
        along = (first * second + 2.0 * kernel.off_diagonal**2) * slope / tokens.width
        diagonal = 0.0 * kernel.diagonal
        total = Kernel.of_parts(diagonal, along, kernel.resolved).total(tokens.seq_len)
        result[unit.gain] += unit.along * float(np.sum(total))
    return {name: result[name] / norm for name, norm in norms.items() if norm > 0.0}


def _norms(unit: ChainUnit, tokens: Signal, gradient: Gradient) -> tuple[dict[str, float], Array]:
    """Squared gradient norms, up to constant factors, and off-diagonal entries of the gradient at
    the tokens."""
    _, record = forward(Chain(tuple(one.component for one in unit.records)), tokens)
    result: dict[str, Array] = {}
    if unit.matrix is not None:
        hidden = record.output.second_moment() * gradient.kernel
        result[unit.matrix] = hidden.total(tokens.seq_len)
    record = record.backward(gradient)
    for one in record.leaves():
        result |= one.weights()
    grad_in = record.grad_in.kernel
    if unit.gain is not None:
        result[unit.gain] = (tokens.kernel * grad_in).total(tokens.seq_len)
    return {name: float(np.sum(norm)) for name, norm in result.items()}, grad_in.off_diagonal
