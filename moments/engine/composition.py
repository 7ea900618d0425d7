"""How components compose: leaves, chains (`>>`), residual connections and numbered layers.

A composition is a declaration and evaluates nothing. `propagate` walks it; at a leaf it calls
`forward`, which returns the output's moments and the pullback: the map from the moments of the
gradient at the output to those at the input.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .state import Array, Gradient, Kernel, Signal


class Pulled(NamedTuple):
    """What a pullback returns.

    Attributes:
        gradient: at the input.
        weights: gives the expected squared gradient norm of each weight matrix, when asked.
        overlaps: gives by how much those grow per unit of the variance of two tokens' overlap
            (`overlap`) in what is attended to, beyond the 1/width they count with.
        response: gives by how much two outputs' overlap moves per that of the tokens that ask, as
            the kernel that a gradient of ones would have there.
        attended: of self-attention by token, the layer and what returns through values, queries
            and keys.
    """

    gradient: Gradient
    weights: Callable[[], Mapping[str, Array]] | None = None
    overlaps: Callable[[], Mapping[str, Array]] | None = None
    response: Callable[[], Kernel] | None = None
    attended: tuple[Any, Any] | None = None


Pullback = Callable[[Gradient], Pulled]
ReaderPullback = Callable[[Gradient], tuple[Pulled, Gradient]]


class Component(abc.ABC):
    """A node of the declaration. `label` names its site in a trace, such as "attention.norm"."""

    label: str

    def __rshift__(self, other: Component) -> Chain:
        first = self.parts if isinstance(self, Chain) else (self,)
        second = other.parts if isinstance(other, Chain) else (other,)
        return Chain(first + second)


class Leaf(Component):
    """A component that transforms moments by its laws."""

    @abc.abstractmethod
    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        """Moments of the output, and the map that carries a gradient back through this node."""


@dataclass(frozen=True)
class Chain(Component):
    """Components one after the other."""

    parts: tuple[Component, ...]
    label: str = ""


@dataclass(frozen=True)
class Residual(Component):
    """skip_scale * x + branch_scale * branch(x); the scales multiply amplitudes."""

    branch: Component
    skip_scale: Any = 1.0
    branch_scale: Any = 1.0
    label: str = "sum"


@dataclass(frozen=True)
class Parallel(Component):
    """Branches that read the same tensor; the output is their sum."""

    branches: tuple[Component, ...]
    label: str = ""


@dataclass(frozen=True)
class BottomToTop(Component):
    """ffn(norm(attention(x))) + x: a layer's input added again at its end (Takase et al. 2022)."""

    attention: Residual
    norm: Component
    ffn: Residual
    label: str = "ffn.bottom_to_top"


class Reader(Component):
    """A component that also reads another tensor, a decoder's cross-attention the encoder's."""

    @abc.abstractmethod
    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        """Moments of the output, and the map from its gradient to those at both inputs."""


@dataclass(frozen=True)
class Layer(Component):
    """One numbered layer of the stack; its output is a point of the stream."""

    body: Component
    number: int
    label: str = "stream"
