"""What a few runs of a module show: what it reads and enters layer 1, its targets, chance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import MomentsError
from ..prediction.draws import STREAM
from .anatomy import measured_parts
from .batches import shifted_left
from .running import (
    batch_first,
    device_of,
    first_tensor,
    hooked,
    in_mode,
    module_logits,
    module_loss,
    on_device,
    run,
    watch_tensor,
)

RANDOM = 0.03
"""Relative difference from which two runs are two: rounding stays below, and dropout with
probability p changes a tensor by sqrt(2 p) of its size."""

ENTRIES = 4096
"""Of every output, as many entries are compared."""


def first_stream(module: nn.Module, batch: Any) -> np.ndarray | None:
    """The tensor that enters layer 1 without dropout, (B, L, d_model); None where it is no such."""
    points = measured_parts(module, batch)[0]
    if any(point.site.startswith("encoder.") for point in points):
        return None
    point = next((p for p in points if (p.layer, p.site) == (0, STREAM)), None)
    if point is None:
        return None
    seen: list[Tensor] = []
    part = module.get_submodule(point.path)
    _evaluated(module, batch, [watch_tensor(part, point.side, seen.append)])
    if not seen or seen[0].ndim != 3:
        return None
    tensor = seen[0] if batch_first(module) else seen[0].transpose(0, 1)
    return np.asarray(tensor.detach().double().cpu().numpy())


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


# --- chance in evaluation mode --------------------------------------------------------------------


def random_part(module: nn.Module, batch: Any) -> str | None:
    """The first submodule whose output differs between two runs on one batch without dropout."""
    runs: list[list[tuple[str, Tensor | None]]] = []

    def keep(path: str, seen: list[tuple[str, Tensor | None]]) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            try:
                tensor = first_tensor(output).detach().flatten()[:ENTRIES].clone()
            except MomentsError:
                tensor = None
            seen.append((path, tensor))

        return hook

    with in_mode(module, False):
        for _ in range(2):
            seen: list[tuple[str, Tensor | None]] = []
            parts = module.named_modules()
            with hooked(part.register_forward_hook(keep(path, seen)) for path, part in parts):
                run(module, batch)
            runs.append(seen)
    return _first_apart(*runs)


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
