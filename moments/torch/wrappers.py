"""Modules around a module: compiled, data-parallel, sharded; and running what they hold eagerly."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from ..errors import DomainError, optional
from .hook_points import WRAPPED

with optional("torch", "torch"):
    import torch
    from torch import nn

_HELD = (*WRAPPED, "module")
"""Where wrappers keep the module inside; "module" is that of data-parallel ones."""

_WRAPPERS = (
    "OptimizedModule",
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "CheckpointWrapper",
)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel, DistributedDataParallel, FSDP.

    Anything else, also what is no module, is returned as it is.

    Raises:
        DomainError: its parameters are shards of their tensors.
    """
    while isinstance(module, nn.Module) and type(module).__name__ in _WRAPPERS:
        held = (module._modules.get(name) for name in _HELD)
        inner = next((part for part in held if part is not None), None)
        if inner is None:
            break
        module = inner
    if isinstance(module, nn.Module) and (shard := next(_shards(module), "")):
        raise DomainError(
            f"{shard} is a shard, whose entries are not those of a whole matrix: pass the module "
            "before fully_shard or FullyShardedDataParallel, or inside summon_full_params"
        )
    return module


def _shards(module: nn.Module) -> Iterator[str]:
    """Parameters that hold a part of a matrix, or several matrices in a row."""
    for path, part in module.named_modules():
        flat = isinstance(part, nn.Linear | nn.Embedding) and part.weight.ndim < 2
        for name, parameter in part.named_parameters(recurse=False):
            split = type(parameter).__name__ == "DTensor" or name == "_flat_param"
            if split or (flat and name == "weight"):
                yield f"{path}.{name}".lstrip(".")


def eager() -> AbstractContextManager[object]:
    """Compiled parts run as they are written, so that hooks see what passes (torch 2.6 on).

    Where the compiler was never loaded nothing is compiled, and loading it takes seconds.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if stance is None else stance("force_eager")
