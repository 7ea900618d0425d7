"""How much two tokens' overlap varies, as a walk through the tree of records follows it.

The vocabulary of `moments.noise.overlap`, which derives it: every component says what it does to an
`Overlap` by its method of that name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .state import Array, Gradient, Kernel, Signal

if TYPE_CHECKING:
    from .composition import Leaf
    from .trace import Record


class Overlap(NamedTuple):
    """At one point of a network.

    Attributes:
        variance: nu.
        response: relative change of the overlap per relative change of the stack's input's.
    """

    variance: float
    response: float = 1.0


@dataclass
class OverlapWalk:
    """A walk through a tree of records, and what it gathers.

    Attributes:
        memory: nu of what cross-attention reads; None: 1/width of that.
        attended: nu of what every attention attends to, by its place.
        growth: factors on squared gradient norms, by layer and name.
        chains: every chain, with the overlap before each of its parts.
    """

    memory: float | None = None
    attended: dict[tuple[int, str], float] = field(default_factory=dict)
    growth: dict[tuple[int, str], float] = field(default_factory=dict)
    chains: list[tuple[Record, list[Overlap]]] = field(default_factory=list)

    def through(self, record: Record, at: Overlap) -> Overlap:
        """The overlap behind a component."""
        return record.component.overlap(record, at, self)


def own_variance(signal: Signal) -> float:
    """What a token's second moment has beyond what two tokens share, averaged."""
    tokens = signal.second_moment()
    return max(float(tokens.mean_diagonal()) - float(tokens.mean_pairs()), 0.0)


def summed(
    one: Overlap, other: Overlap, own: tuple[float, float], source: Overlap, width: float
) -> Overlap:
    """Of a sum of two tensors, independent in direction, that both depend on `source`.

    Args:
        one, other: of the two.
        own: their own variances.
        source: of what both are made from.
        width: number of features.
    """
    first, second = own
    total = first + second
    if total == 0.0:
        return one
    # Where nothing of the input is left in the overlap, nothing of it is common to both.
    moved = one.response * other.response
    moved *= source.variance / source.response**2 if source.response else 0.0
    variance = one.variance * first**2 + other.variance * second**2
    variance += 2.0 * (moved + 1.0 / width) * first * second
    response = (one.response * first + other.response * second) / total
    return Overlap(variance / total**2, response)


def activated(before: Overlap, elasticity: float, widths: tuple[float, float]) -> Overlap:
    """Of independent features' nonlinear images, (features in, features out)."""
    moved = elasticity**2 * (before.variance - 1.0 / widths[0])
    return Overlap(moved + 1.0 / widths[1], before.response * elasticity)


def elasticity(leaf: Leaf, before: Signal, after: Signal) -> float:
    """Relative change of two tokens' overlap behind an entrywise function per that before it."""
    tokens = Kernel(float(before.kernel.mean_diagonal()), float(before.kernel.mean_pairs()))
    mean = before.second_moment().mean_diagonal() - before.kernel.mean_diagonal()
    entering = Signal(tokens, before.seq_len, float(max(mean, 0.0)) ** 0.5, before.width)
    output, pullback = leaf.forward(entering)
    own = own_variance(output)
    if own == 0.0:
        return 1.0
    sent = pullback(Gradient(Kernel(1.0, 1.0), before.seq_len)).gradient.kernel.pairs
    return float(float(sent) * before.width / after.width * own_variance(entering) / own)


def mapped(at: Overlap, width: Array) -> Overlap:
    """Behind a linear map onto so many features."""
    return Overlap(at.variance + 1.0 / width, at.response)


def dropped(at: Overlap, before: float, after: float, width: float) -> Overlap:
    """Behind dropout; own variances before and after."""
    if after == 0.0:
        return at
    kept = before / after
    return Overlap(at.variance * kept**2 + (1.0 - kept**2) / width, at.response * kept)
