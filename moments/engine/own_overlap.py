"""How much the overlap of what two tokens have of their own varies, followed through the records.

`moments.noise.overlap` derives it; every component says what it does by its method of that name.

See docs/theory/norms.md, Overlaps of what tokens have of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .state import Array, Gradient, Kernel, Signal

if TYPE_CHECKING:
    from .composition import Leaf
    from .trace import Record


class OwnOverlap(NamedTuple):
    """How much the overlap of what two tokens have of their own varies, at one point of a network.

    Which of Y no more knows: attention takes the mean of its rows away from it, and what is left
    differs by the rows' own weights. One number for all pairs, followed through the tree of records
    when weight gradients of queries and keys ask for it; derived in `moments.noise.overlap`.

    Attributes:
        variance: nu, over the product of both tokens' own variances.
        response: relative change of the overlap per relative change of the stack's input's.
    """

    variance: float
    response: float = 1.0

    def mapped(self, width: Array) -> OwnOverlap:
        """Behind a linear map onto so many features."""
        return OwnOverlap(self.variance + 1.0 / width, self.response)

    def activated(self, elasticity: float, widths: tuple[float, float]) -> OwnOverlap:
        """Of independent features' nonlinear images, (features in, features out)."""
        moved = elasticity**2 * (self.variance - 1.0 / widths[0])
        return OwnOverlap(moved + 1.0 / widths[1], self.response * elasticity)

    def dropped(self, before: float, after: float, width: float) -> OwnOverlap:
        """Behind dropout; own variances before and after."""
        if after == 0.0:
            return self
        kept = before / after
        variance = self.variance * kept**2 + (1.0 - kept**2) / width
        return OwnOverlap(variance, self.response * kept)

    def added(
        self, other: OwnOverlap, own: tuple[float, float], source: OwnOverlap, width: float
    ) -> OwnOverlap:
        """Of a sum of two tensors, independent in direction, that both depend on `source`.

        Args:
            other: of what is added.
            own: own variances of both.
            source: of what both are made from.
            width: number of features.
        """
        first, second = own
        total = first + second
        if total == 0.0:
            return self
        # Where nothing of the input is left in the overlap, nothing of it is common to both.
        moved = self.response * other.response
        moved *= source.variance / source.response**2 if source.response else 0.0
        variance = self.variance * first**2 + other.variance * second**2
        variance += 2.0 * (moved + 1.0 / width) * first * second
        response = (self.response * first + other.response * second) / total
        return OwnOverlap(variance / total**2, response)


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
    chains: list[tuple[Record, list[OwnOverlap]]] = field(default_factory=list)

    def through(self, record: Record, at: OwnOverlap) -> OwnOverlap:
        """That behind a component."""
        return record.component.own_overlap(record, at, self)


def own_variance(signal: Signal) -> float:
    """What a token's second moment has beyond what two tokens share, averaged."""
    tokens = signal.second_moment()
    return max(float(tokens.mean_diagonal()) - float(tokens.mean_pairs()), 0.0)


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
