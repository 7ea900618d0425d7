"""Running a module: wrappers, inputs and outputs, mode, and hooks."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import DomainError, MomentsError, domain_error

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
Row = TypeVar("Row")
Key = TypeVar("Key")

# --- wrappers -------------------------------------------------------------------------------------


WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Submodules of compiled, sharded and checkpointed modules that are the module inside."""

_INSIDE = (*WRAPPED, "module")
"""The same with that of data-parallel modules."""

_WRAPPERS = (
    "OptimizedModule",
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "CheckpointWrapper",
)


def own_module(module: Any, allowed: str = "an nn.Module") -> nn.Module:
    """A module, `unwrapped`; a DomainError if it is none."""
    module = unwrapped(module)
    if not isinstance(module, nn.Module):
        raise domain_error("module", type(module).__name__, allowed)
    return module


def built(module: Any, seed: int) -> nn.Module:
    """A module, or the one that a factory makes from a seed, `unwrapped`."""
    if not isinstance(module, nn.Module):
        if not callable(module):
            raise domain_error("module", type(module).__name__, "an nn.Module or factory(seed)")
        return own_module(module(seed), "a factory that returns an nn.Module")
    return unwrapped(module)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel, DistributedDataParallel or FSDP, if any.

    Raises:
        DomainError: its parameters are shards of tensors.
    """
    while isinstance(module, nn.Module) and type(module).__name__ in _WRAPPERS:
        candidates = (module._modules.get(name) for name in _INSIDE)
        inner = next((part for part in candidates if part is not None), None)
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
    """Parameters that are a part of a matrix, or several matrices flattened together."""
    for path, part in module.named_modules():
        flat = isinstance(part, nn.Linear | nn.Embedding) and part.weight.ndim < 2
        for name, parameter in part.named_parameters(recurse=False):
            split = type(parameter).__name__ == "DTensor" or name == "_flat_param"
            if split or (flat and name == "weight"):
                yield f"{path}.{name}".lstrip(".")


def eager() -> AbstractContextManager[object]:
    """A context in which compiled parts run uncompiled, so that their hooks run (from torch 2.6);
    nothing is compiled if the compiler was never loaded.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if stance is None else stance("force_eager")


# --- inputs and outputs ---------------------------------------------------------------------------


def first_tensor(value: Any) -> Tensor:
    """The tensor itself, or the first of a tuple, list or mapping; a MomentsError without one."""
    if isinstance(value, Tensor):
        return value
    entries = value.values() if isinstance(value, Mapping) else value
    tensors = [v for v in entries if isinstance(v, Tensor)] if np.iterable(entries) else []
    if not tensors:
        raise MomentsError(f"expected a tensor or a tuple of them, got {type(value).__name__}")
    return tensors[0]


def module_loss(output: Any) -> Tensor | None:
    """The loss in a module's output: its attribute, or the only scalar among other tensors."""
    result = getattr(output, "loss", None)
    if result is not None or not isinstance(output, tuple | list | dict):
        return result if isinstance(result, Tensor) else None
    values = list(output.values()) if isinstance(output, dict) else list(output)
    scalars = [v for v in values if isinstance(v, Tensor) and v.ndim == 0 and v.is_floating_point()]
    return scalars[0] if len(scalars) == 1 and len(values) > 1 else None


def module_logits(output: Any) -> Tensor | None:
    """The logits in a module's output: its attribute, or the tensor next to its loss."""
    result = getattr(output, "logits", None)
    if result is not None or module_loss(output) is None:
        return result if isinstance(result, Tensor) else None
    values = output.values() if isinstance(output, dict) else output
    return next((v for v in values if isinstance(v, Tensor) and v.ndim == 3), None)


def with_first_tensor(value: Any, tensor: Tensor) -> Any:
    """An output with another first tensor."""
    if isinstance(value, Tensor):
        return tensor
    if isinstance(value, tuple | list):
        place = next(i for i, entry in enumerate(value) if isinstance(entry, Tensor))
        return type(value)([*value[:place], tensor, *value[place + 1 :]])
    raise MomentsError(f"expected a tensor or a tuple of them, got {type(value).__name__}")


def padding_row(module: nn.Module, tensor: Tensor) -> int | None:
    """The padding row of a table of a module, if it has one."""
    return padding_rows(module).get(tensor)


def padding_rows(module: nn.Module) -> dict[Tensor, int]:
    """Tables with a padding row -> the row; the first submodule's of those that share a table."""
    result: dict[Tensor, int | None] = {}
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            result.setdefault(part.weight, part.padding_idx)
    return {table: int(row) for table, row in result.items() if row is not None}


def aliases(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """All names of every parameter; tied ones have several."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return grouped(names, module.get_parameter)


def grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Key -> the rows with that key, in order."""
    result: dict[Key, list[Row]] = {}
    for row in rows:
        result.setdefault(key(row), []).append(row)
    return result


# --- calls ----------------------------------------------------------------------------------------


def run(module: nn.Module, batch: Any) -> Any:
    """A module's output for a batch, on its own device and without gradients."""
    device = device_of(module)
    with torch.no_grad():
        if isinstance(batch, Mapping):
            return module(**{name: on_device(value, device) for name, value in batch.items()})
        args = batch if isinstance(batch, tuple) else (batch,)
        return module(*(on_device(value, device) for value in args))


def device_of(module: nn.Module) -> torch.device | None:
    """The device of a module's first parameter."""
    return next((parameter.device for parameter in module.parameters()), None)


def on_device(value: Any, device: torch.device | None) -> Any:
    """Arrays as tensors on a device; other values unchanged."""
    if isinstance(value, Tensor | np.ndarray | list):
        return torch.as_tensor(value, device=device)
    return value


def as_named(module: nn.Module, batch: Any) -> Any:
    """A batch as an array, or as a mapping of forward's arguments.

    Raises:
        DomainError: it is neither, nor a tuple of arrays in the order of forward's arguments.
    """
    if batch is None or isinstance(batch, Mapping | Tensor | np.ndarray):
        return batch
    arguments = inspect.signature(module.forward).parameters.values()
    names = [a.name for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD]
    allowed = (
        "an array or a tensor, a mapping of forward's arguments to them, or a tuple of them in "
        f"the order of forward({', '.join(names)})"
    )
    if isinstance(batch, tuple):
        if len(batch) > len(names) or not all(isinstance(v, Tensor | np.ndarray) for v in batch):
            raise domain_error("batch", f"a tuple of {len(batch)}", allowed)
        return batch[0] if len(batch) == 1 else dict(zip(names, batch, strict=False))
    if isinstance(batch, list) and not any(isinstance(v, Tensor) for v in batch):
        with suppress(ValueError, TypeError):
            return np.asarray(batch)
    raise domain_error("batch", type(batch).__name__, allowed)


def batch_on_cpu(batch: Any) -> Any:
    """A batch with its tensors on the CPU."""
    if isinstance(batch, Mapping):
        return {name: batch_on_cpu(value) for name, value in batch.items()}
    return batch.detach().cpu() if isinstance(batch, Tensor) else batch


def made_on_cpu(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Decorator: new tensors are on the CPU, whatever torch's default device."""

    @functools.wraps(function)
    def wrapped(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        if torch.get_default_device().type == "cpu":  # entering a mode slows every operation
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Set a module's mode, without a cache of keys and values, within the context; restore modes,
    configs and torch's random state after it."""
    modes = {part: part.training for part in module.modules()}
    configs = {id(c): c for part in modes if (c := getattr(part, "config", None)) is not None}
    cached = [c for c in configs.values() if getattr(c, "use_cache", None) is True]
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    module.train(training)
    for config in cached:
        config.use_cache = False
    try:
        with torch.random.fork_rng(devices=devices), eager():
            yield
    finally:
        for config in cached:
            config.use_cache = True
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers (running means of norms, caches) after the context."""
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                old = before.get(name)
                if old is not None and old.shape == buffer.shape and not torch.equal(buffer, old):
                    buffer.copy_(old)


@contextmanager
def restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the entries of tensors after the context."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, entries in before:
                tensor.copy_(entries)


@contextmanager
def unfrozen(module: nn.Module) -> Iterator[None]:
    """Let every parameter require gradients within the context, so that gradients pass it."""
    frozen = [p for p in module.parameters() if not p.requires_grad and p.is_floating_point()]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def watch_tensor(
    part: nn.Module, side: str, keep: Callable[[Tensor], object], *, first: bool = False
) -> RemovableHandle:
    """Pass the first tensor of a submodule's "input" or "output" to `keep` at every call; `first`:
    before other hooks."""
    if side == "input":

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            keep(first_tensor([*args, *kwargs.values()]))

        return part.register_forward_pre_hook(before, with_kwargs=True, prepend=first)

    def after(_: nn.Module, __: Any, output: Any) -> None:
        keep(first_tensor(output))

    return part.register_forward_hook(after, prepend=first)


@contextmanager
def hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Place hooks, by iterating over them, within the context, and remove them after it."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.remove)
        yield


def batch_first(module: nn.Module) -> bool:
    """Whether the axis of sequences comes before that of tokens."""
    return all(p.batch_first for p in module.modules() if isinstance(p, nn.MultiheadAttention))
