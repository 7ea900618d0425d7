"""What a few runs of a module show: what enters layer 1, its mask, chance, and parts that idle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from ..errors import MomentsError, optional
from ..prediction.draws import STREAM
from .anatomy import measured_parts
from .batches import shifted_left
from .running import (
    batch_first,
    device_of,
    first_tensor,
    hooked,
    in_mode,
    made_at_hand,
    module_logits,
    module_loss,
    on_device,
    run,
    watch_tensor,
)

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn
    from torch.overrides import TorchFunctionMode
    from torch.utils.hooks import RemovableHandle

UNSEEN = 1e-6
"""Relative change below which a token has not noticed another; single precision rounds to 1e-7."""

RANDOM = 0.03
"""Relative difference from which two runs are two: rounding stays below, and dropout with
probability p changes a tensor by sqrt(2 p) of its size."""

ENTRIES = 4096
"""Of every output, as many entries are compared."""


def first_stream(module: nn.Module, batch: Any) -> np.ndarray | None:
    """The tensor that enters layer 1 without dropout, (B, L, d_model); None where it is no such."""
    return _stream(module, batch, 0)


def sees_ahead(
    module: nn.Module, batch: Any, layers: int, ids: np.ndarray | None = None
) -> bool | None:
    """Whether a token's output depends on a later token: the second is changed, the first read.

    None where that cannot be told: a module of pictures, two stacks, one token.
    """
    changed = _changed(batch, batch_first(module), ids)
    if changed is None:
        return None
    one, other = (_stream(module, given, layers) for given in (batch, changed))
    if one is None or other is None or one.shape != other.shape or one.shape[1] < 2:
        return None
    moved = np.abs(one - other).max((0, 2)) / max(float(np.abs(one).max()), 1e-30)
    return bool(moved[0] > UNSEEN) if moved[1] > UNSEEN else None


def ids_read(module: nn.Module, batch: Any, vocab_size: int) -> np.ndarray | None:
    """The (B, L) token ids that the one table of so many rows looks up, if there is one."""
    seen: list[Tensor] = []
    hooks = (
        watch_tensor(part, "input", seen.append)
        for part in module.modules()
        if isinstance(part, nn.Embedding) and part.num_embeddings == vocab_size
    )
    _evaluated(module, batch, hooks)
    texts = [ids for ids in seen if ids.ndim == 2 and ids.shape[1] > 1]
    return np.asarray(texts[0].cpu().numpy()) if len(texts) == 1 else None


def targets_read(
    module: nn.Module, batch: Any, ids: np.ndarray, loss: Callable[[Any, Any], Tensor] | None = None
) -> np.ndarray | None:
    """What every token's logits are held against, (B, L), -100 where nothing.

    Of the arrays in the batch, as they are and shifted by one, that whose mean cross-entropy with
    the module's logits is its loss; None where there is none.
    """
    if (output := _evaluated(module, batch)) is None:
        return None
    alone = not isinstance(batch, Mapping)
    given = {"": batch} if alone else batch
    device = device_of(module)
    tensors = {name: on_device(value, device) for name, value in given.items()}
    logits, value = module_logits(output), module_loss(output)
    if loss is not None:
        value = loss(output, tensors[""] if alone else tensors)
        logits = first_tensor(output) if logits is None else logits
    if logits is None or value is None or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        return None
    for one in tensors.values():
        if not isinstance(one, Tensor) or one.shape != ids.shape or one.is_floating_point():
            continue
        labels = one.cpu().numpy().astype(np.int64)
        for targets in (labels, shifted_left(labels)):
            if targets.max() >= logits.shape[-1] or not np.any(targets >= 0):
                continue
            flat = torch.as_tensor(targets, device=logits.device).flatten()
            found = nn.functional.cross_entropy(logits.flatten(0, 1).float(), flat)
            if abs(float(found) - float(value)) < 1e-4 * abs(float(value)):
                return np.asarray(targets)
    return None


def _evaluated(module: nn.Module, batch: Any, hooks: Iterable[RemovableHandle] = ()) -> Any:
    """What a module makes of a batch without dropout; None where it cannot be run."""
    with in_mode(module, False), hooked(hooks):
        try:
            return run(module, batch)
        except (RuntimeError, ValueError, IndexError, MomentsError):
            return None


def _changed(batch: Any, batch_first: bool, ids: np.ndarray | None) -> Any:
    """The batch with another second token in every sequence."""
    if not isinstance(batch, Mapping):
        return _another(batch, batch_first)
    if "decoder_input_ids" in batch or "pixel_values" in batch:
        return None
    read = [name for name in batch if ids is not None and np.array_equal(batch[name], ids)]
    read += [name for name, v in batch.items() if np.ndim(v) == 3 and "mask" not in name]
    name = "input_ids" if "input_ids" in batch else next(iter(read), None)
    return None if name is None else {**batch, name: _another(batch[name], batch_first)}


@made_at_hand
def _another(tokens: Any, batch_first: bool) -> Tensor:
    """(B, L) ids or (B, L, features), or (L, B, features)."""
    given = torch.as_tensor(tokens).clone()
    if given.ndim < 2:
        return given
    rows = given if batch_first or given.ndim == 2 else given.transpose(0, 1)
    if rows.shape[1] > 2:
        # Another token stands in for the second, so that no id leaves the vocabulary.
        first, second, third = rows[:, 0], rows[:, 1].clone(), rows[:, 2]
        other = torch.where(third != second, third, first)
        other = torch.where(other != second, other, (second - 1).clamp(min=0))
        rows[:, 1] = -second if rows.is_floating_point() else other
    return given


def _stream(module: nn.Module, batch: Any, layer: int) -> np.ndarray | None:
    points = measured_parts(module, batch)[0]
    if any(point.site.startswith("encoder.") for point in points):
        return None
    point = next((p for p in points if (p.layer, p.site) == (layer, STREAM)), None)
    if point is None:
        return None
    seen: list[Tensor] = []
    part = module.get_submodule(point.path)
    _evaluated(module, batch, [watch_tensor(part, point.side, seen.append)])
    if not seen or seen[0].ndim != 3:
        return None
    tensor = seen[0] if batch_first(module) else seen[0].transpose(0, 1)
    return np.asarray(tensor.detach().double().cpu().numpy())


# --- chance in evaluation mode, and parts that are never run --------------------------------------


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
