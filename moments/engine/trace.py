"""What a pass through a declaration leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .composition import Pulled
from .state import Array, Gradient, Signal


@dataclass(slots=True)
class Point:
    """One site of the network with the moments that pass through it."""

    layer: int
    site: str
    signal: Signal
    gradient: Gradient | None = None


class Norms(NamedTuple):
    """Squared gradient norms that one node gives when asked, and the signal it attends to."""

    layer: int
    pulled: Pulled
    signal: Signal

    def given(self, overlaps: Mapping[int, Array]) -> dict[str, Array]:
        assert self.pulled.weights is not None
        norms = dict(self.pulled.weights())
        variance = overlaps.get(id(self.signal))
        if variance is not None and self.pulled.overlaps is not None:
            for name, growth in self.pulled.overlaps().items():
                norms[name] = norms[name] + (variance - 1 / self.signal.width) * growth
        return norms


@dataclass
class Trace:
    """Everything a pass saw, in the order of the forward pass."""

    points: list[Point] = field(default_factory=list)
    layer: int = 0
    on_layer: Callable[[], None] | None = None  # called as each layer is passed, in either pass
    memory: Signal | None = None  # what cross-attention reads
    memory_gradients: list[Gradient] = field(default_factory=list)
    norms: list[Norms] = field(default_factory=list)

    def weights(self, overlaps: Mapping[int, Array] | None = None) -> list[tuple[int, str, Array]]:
        """(layer, matrix, expected squared gradient norm), from the first layer to the last.

        Args:
            overlaps: variance of two tokens' overlap in what every attention attends to, by the
                identity of its signal (`overlap`); None: that of independent features, 1/width.
        """
        norms = [
            (norms.layer, name, norm)
            for norms in self.norms
            for name, norm in norms.given(overlaps or {}).items()
        ]
        return sorted(norms, key=lambda row: row[0])

    def stream(self) -> list[Point]:
        """The N + 1 points of the residual stream."""
        return [point for point in self.points if point.site == "stream"]
