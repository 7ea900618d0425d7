"""What the variance of two tokens' overlap does to the gradients around an entrywise unit.

Between two tokens of realised overlap o, hidden units have the covariance F(o) and send the
gradient G b(o) back to them (Price). The gradients of the matrices before and behind, and of the
gain of a norm before, sum o b(o) and F(o) over pairs of tokens, whose mean is not that at E o:
gated units have both in proportion to o^2, so that L^2 pairs gain Var(o). The mean is taken of the
two values at E o +- sqrt(Var o), exact to third order in o. Var o_ab is what the forward pass found
(`realised`); where it followed none, nu (C_aa C_bb + C_ab^2), and nu C_aa C_bb (1 - r^2)^2 where
tokens have a fixed norm. A gated unit's kernels are such means already, an activation's are at E o.

A gain's gradient sums x_ak x_bk g_ak g_bk feature by feature, and what a unit sends back has a part
along the tokens. With K(o, |x_a|^2/d, |x_b|^2/d) the covariance of hidden units,

    d^2 sum_k x_ak x_bk (d/dx_ak) (d/dx_bk) K = d^2 o b + (K_oo + 4 K_qq) sum_k x_ak^2 x_bk^2 + ...

where sum_k is d (C_aa C_bb + 2 C_ab^2) and b = d K_o. An entrywise function has 4 K_qq = K_oo; of a
gated unit's K_oo that is the smaller part, left out.

See docs/theory/norms.md, Overlaps of what tokens have of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..engine.composition import Chain, forward
from ..engine.realised import overlap_variance, step_within
from ..engine.state import Array, Gradient, Kernel, Signal, ratio_or_zero
from ..engine.trace import Record


class Unit(NamedTuple):
    """A unit in a chain.

    Attributes:
        first: index of its first part.
        records: of which it is made, from tokens to hidden features.
        before: name of the gain that sums o b(o); None: there is none.
        behind: name of the matrix that sums F(o); None: there is none.
        along: (K_oo + 4 K_qq)/K_oo.
    """

    first: int
    records: tuple[Record, ...]
    before: str | None
    behind: str | None
    along: float


def units(chain: Record) -> Iterator[Unit]:
    """The units of a chain that a gradient has come back through."""
    parts = [one.component for one in chain.children]
    for index, part in enumerate(parts):
        found = part.hidden
        if found is None or chain.children[index].received is None:
            continue
        first = index + 1 - found.parts
        if first < 0 or not parts[first].matrices:
            continue
        # scales do not change what a gain meets, nor masks what a matrix does
        before = [p for p in parts[:first] if p.normalises or not p.rescales]
        behind = [p for p in parts[index + 1 :] if not p.masks]
        yield Unit(
            first,
            chain.children[first : index + 1],
            before[-1].gain_name if before else None,
            next(iter(behind[0].matrices), None) if behind else None,
            found.along,
        )


def unit_growth(unit: Unit, variance: float) -> dict[str, float]:
    """Factors on squared gradient norms, by name.

    Args:
        unit: of a chain.
        variance: nu of the overlaps of the tokens that enter it (`overlap`).
    """
    tokens, gradient = unit.records[0].input, unit.records[-1].gradient_received
    kernel = tokens.second_moment()
    first, second = kernel.over_tokens(kernel.diagonal)
    square = kernel.pairs * kernel.pairs
    fixed = tokens.spread is not None and not np.any(tokens.spread.diagonal)
    product = first * second
    found = overlap_variance(tokens)
    if found is None:
        spread = (product - square) ** 2 / product if fixed else product + square
        step = np.sqrt(variance * spread)
    else:
        step = step_within(kernel, found)
    at = _norms(unit, kernel, kernel.pairs, tokens, gradient, True)
    above, below = (
        _norms(unit, kernel, kernel.pairs + side * step, tokens, gradient) for side in (1, -1)
    )
    grown = {name: 0.5 * (above[0][name] + below[0][name]) for name in at[0]}
    if unit.before is not None:
        slope = ratio_or_zero(0.5 * (above[1] - below[1]), step)  # a token with itself has no step
        along = (product + 2.0 * square) * slope / tokens.width
        diagonal = 0.0 * kernel.diagonal
        total = Kernel.joined(diagonal, along, kernel.resolved).total(tokens.seq_len)
        grown[unit.before] += unit.along * float(np.sum(total))
    return {name: grown[name] / norm for name, norm in at[0].items() if norm > 0.0}


def _norms(
    unit: Unit,
    kernel: Kernel,
    pairs: Array,
    tokens: Signal,
    gradient: Gradient,
    averaged: bool = False,
) -> tuple[dict[str, float], Array]:
    """Squared norms, or what they are in proportion to, and the gradient's pairs at the tokens."""
    moved = Kernel.joined(kernel.diagonal, pairs, kernel.resolved)
    signal = Signal(
        moved,
        tokens.seq_len,
        mean=0.0 * kernel.diagonal,
        width=tokens.width,
        spread=tokens.spread if averaged else None,
        realised=tokens.realised if averaged else None,
    )
    _, record = forward(Chain(tuple(one.component for one in unit.records)), signal)
    signal = record.output
    found: dict[str, Array] = {}
    if unit.behind is not None:
        hidden = signal.second_moment() * gradient.kernel
        found[unit.behind] = hidden.total(tokens.seq_len)
    record = record.backward(gradient)
    for one in record.leaves():
        found |= one.weights()
    gradient = record.gradient_sent
    if unit.before is not None:
        found[unit.before] = (moved * gradient.kernel).total(tokens.seq_len)
    return {name: float(np.sum(norm)) for name, norm in found.items()}, gradient.kernel.pairs
