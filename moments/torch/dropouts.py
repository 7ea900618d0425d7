"""Dropout that a layer applies to a block's output inside a function, where no hook reaches.

Its probability is a number that the layer holds. With that number at 0 and the same dropout in the
hook that scales the block, the layer's code drops what it dropped, and the stream that the hook
adds passes beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..errors import optional
from .probe import drops_behind
from .structure import Block

with optional("torch", "torch"):
    from torch import nn


class HeldDropout(NamedTuple):
    """A probability that a submodule's forward reads."""

    path: str
    name: str
    drop_prob: float


def held_dropouts(
    module: nn.Module, blocks: Iterable[Block], batch: Any
) -> dict[Block, HeldDropout]:
    """Of blocks whose output is dropped behind every hook: the number at which that happens.

    A number is the right one where the block's sum is exact once it is 0. Blocks for which none is
    found are left out; the module is left as it was.
    """
    parts = dict(module.named_modules())
    found: dict[Block, HeldDropout] = {}
    open_blocks = {block: list(_candidates(parts, block)) for block in blocks}
    keys = dict.fromkeys(_key(b, held) for b, several in open_blocks.items() for held in several)
    for key in keys:
        tried = {
            block: held
            for block, several in open_blocks.items()
            for held in several
            if block not in found and _key(block, held) == key
        }
        try:
            for held in tried.values():
                setattr(parts[held.path], held.name, 0.0)
            still = drops_behind(module, tuple(tried), batch)
        finally:
            for held in tried.values():
                setattr(parts[held.path], held.name, held.drop_prob)
        found |= {block: held for block, held in tried.items() if block not in still}
    return found


def _key(block: Block, held: HeldDropout) -> tuple[str, str]:
    """What is the same in all layers."""
    return held.path.removeprefix(block.path), held.name


def _candidates(parts: dict[str, nn.Module], block: Block) -> Iterator[HeldDropout]:
    """Probabilities that the block's submodules hold, its layer's first."""
    inner = block.branch.path.removeprefix(block.path).split(".")
    for depth in range(1, len(inner) + 1):
        path = block.path + ".".join(inner[:depth])
        for name, value in vars(parts[path]).items():
            if "drop" in name and isinstance(value, float) and 0 < value < 1:
                yield HeldDropout(path, name, value)
