"""What a module does that its weights and sums do not show: seen by running it a few times."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

from ..errors import MomentsError, optional
from .running import first_tensor, hooked, in_mode, run

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn
    from torch.overrides import TorchFunctionMode


class Behaviour(NamedTuple):
    """What two runs of a module in evaluation mode show.

    `random` is the first submodule whose output differs between the runs, if any; `never_run` are
    those that were not called and whose own parameters nothing else took.
    """

    random: str | None
    never_run: tuple[str, ...]


def behaviour(module: nn.Module, batch: Any) -> Behaviour:
    """Run a module twice on one batch, without dropout."""
    runs: list[list[tuple[str, Tensor | None]]] = []
    watch = _Watch()

    def keep(path: str, seen: list[tuple[str, Tensor | None]]) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            try:
                tensor = first_tensor(output).detach().flatten()[:ENTRIES].clone()
            except MomentsError:
                tensor = None
            seen.append((path, tensor))

        return hook

    with in_mode(module, False):
        for mode in (watch, nullcontext()):
            seen: list[tuple[str, Tensor | None]] = []
            parts = module.named_modules()
            hooks = (part.register_forward_hook(keep(path, seen)) for path, part in parts)
            with hooked(hooks), mode:
                run(module, batch)
            runs.append(seen)
    called = {path for path, _ in runs[0]}
    idle = (
        path
        for path, part in module.named_modules()
        if path not in called
        and (parameters := list(part.parameters(recurse=False)))
        and not any(id(one) in watch.met for one in parameters)
    )
    return Behaviour(_first_apart(*runs), tuple(idle))


def _first_apart(
    one: list[tuple[str, Tensor | None]], other: list[tuple[str, Tensor | None]]
) -> str | None:
    for (path, first), (_, second) in zip(one, other, strict=False):
        if first is None or second is None:
            continue
        if first.shape != second.shape:
            return path or "the module itself"
        if not first.is_floating_point():
            continue
        size, apart = first.double().norm(), (first.double() - second.double()).norm()
        if float(apart) > RANDOM * float(size):
            return path or "the module itself"
    return None


class _Watch(TorchFunctionMode):
    """Sees every parameter that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = func(*args, **kwargs)
        if not isinstance(given, bool | int | torch.dtype | torch.device | torch.Size):
            # A table's weight may be added, and a projection's given to a fused kernel.
            self.met.update(
                id(one) for one in (*args, *kwargs.values()) if isinstance(one, nn.Parameter)
            )
        return given


RANDOM = 0.03
"""Relative difference from which two runs are two: kernels that differ in rounding stay below, and
dropout with probability p changes a tensor by sqrt(2 p) of its size, .045 at p = .001."""

ENTRIES = 4096
"""Of every output, as many entries are held against one another."""
