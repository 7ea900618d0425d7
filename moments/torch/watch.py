"""Hooks that show a collector the tensors of a module's forward pass, and training mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..errors import domain_error, optional
from .hook_points import HookPoint
from .scale_hooks import ScaleBranch
from .tensors import first_tensor
from .wrappers import eager

with optional("torch", "torch"):
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ..simulation.collector import Collector


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Training mode, so that dropout acts, and nothing compiled; afterwards modes are as before."""
    modes = {part: part.training for part in module.modules()}
    module.train()
    try:
        with eager():
            yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def watched(module: nn.Module, points: Iterable[HookPoint], collector: Collector) -> Iterator[None]:
    """Show the collector every point as the module's forward passes it."""
    by_tensor: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for point in points:
        if point.side not in ("input", "output"):
            raise domain_error(f"sites: side of {point.site}", point.side, "'input' or 'output'")
        by_tensor.setdefault((point.path, point.side), []).append((point.layer, point.site))
    modules = dict(module.named_modules())
    with ExitStack() as hooks:
        for (path, side), places in by_tensor.items():
            if path not in modules:
                raise domain_error(
                    "sites: path", path, "a submodule", "list them with module.named_modules()"
                )
            hooks.callback(_hook(modules[path], side, places, collector).remove)
        yield


def _hook(
    part: nn.Module, side: str, places: list[tuple[int, str]], collector: Collector
) -> RemovableHandle:
    def before(_: nn.Module, positional: Any, named: Any) -> None:
        collector.watch(first_tensor([*positional, *named.values()]), places)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        collector.watch(first_tensor(output), places)

    if side == "input":
        return part.register_forward_pre_hook(before, with_kwargs=True)
    # A block's output is what the block gives, not what a scale's hook makes of it for the sum.
    scaled = any(isinstance(hook, ScaleBranch) for hook in part._forward_hooks.values())
    return part.register_forward_hook(after, prepend=scaled)
