"""The hooks themselves: what carries a residual or norm scale, or a factor on the logits."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from ..errors import MomentsError, optional
from .hook_points import Side
from .running import first_tensor, with_first_tensor

with optional("torch", "torch"):
    from torch import Tensor, nn

ATTRIBUTE = "moments_scales"
"""Where a module keeps its `AppliedScales`."""


class Carried:
    """The stream on its way to the sum, one per thread; never copied or stored."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    def put(self, x: Tensor) -> None:
        self._held[threading.get_ident()] = x

    def take(self) -> Tensor:
        x = self._held.pop(threading.get_ident(), None)
        if x is None:
            raise MomentsError(
                "a block ran without its layer's residual stream: run the whole layer, or take "
                f"the scales off with module.{ATTRIBUTE}.remove()"
            )
        return x

    def __getstate__(self) -> dict[str, Any]:
        return {"_held": {}}


@dataclass
class Remember:
    """Hook: keeps the tensor that goes by."""

    carried: Carried
    side: Side

    def __call__(self, _: nn.Module, given: Any, other: Any) -> None:
        # Before a forward `other` is its named arguments, behind it its output.
        self.carried.put(first_tensor([*given, *other.values()] if self.side == "input" else other))


@dataclass
class ScaleBranch:
    """Hook: f becomes (beta f + (lambda - 1) x) / native; `carried` is None where lambda is 1.

    `native` is what the module's own code multiplies f by behind the hook (Granite), `drop_prob`
    that of a dropout that its code applied there and the hook now applies to f.
    """

    skip: float
    branch: float
    native: float
    carried: Carried | None
    drop_prob: float = 0.0

    def __call__(self, part: nn.Module, _: Any, output: Any) -> Any:
        f = first_tensor(output)
        if self.drop_prob and part.training:
            f = nn.functional.dropout(f, self.drop_prob)
        scaled = self.branch / self.native * f
        if self.carried is not None:
            scaled = scaled + (self.skip - 1) / self.native * self.carried.take()
        return with_first_tensor(output, scaled)


@dataclass
class ScaleOutput:
    """Hook: multiplies what a module gives."""

    factor: float

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        return with_first_tensor(output, self.factor * first_tensor(output))


@dataclass
class ScaleInput:
    """Hook: multiplies what a module takes."""

    factor: float

    def __call__(self, _: nn.Module, given: Any, named: Any) -> Any:
        if any(isinstance(value, Tensor) for value in given):
            return with_first_tensor(given, self.factor * first_tensor(given)), named
        name = next(key for key, value in named.items() if isinstance(value, Tensor))
        return given, named | {name: self.factor * named[name]}
