"""What enters a module's first layer, and whether its tokens see later ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from moments.draws import STREAM
from moments.errors import MomentsError
from moments.hook_points import HookPoint, hook_points
from moments.modules.tensors import first_tensor
from moments.modules.watch import training
from moments.optional import optional

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn

UNSEEN = 1e-6
"""Relative change below which a token has not noticed another; single precision rounds to 1e-7."""


def first_stream(
    module: nn.Module, batch: Any, sites: Iterable[Any] | None = None
) -> np.ndarray | None:
    """The tensor that enters layer 1 without dropout, (B, L, d_model); None where it is no such."""
    return _stream(module, batch, sites, 0)


def sees_ahead(
    module: nn.Module, batch: Any, sites: Iterable[Any] | None, layers: int
) -> bool | None:
    """Whether a token's output depends on a later token: the second is changed, the first read.

    None where that cannot be told: a module of pictures, two stacks, one token.
    """
    changed = _changed(batch, _batch_first(module))
    if changed is None:
        return None
    one, other = (_stream(module, given, sites, layers) for given in (batch, changed))
    if one is None or other is None or one.shape != other.shape or one.shape[1] < 2:
        return None
    moved = np.abs(one - other).max((0, 2)) / max(float(np.abs(one).max()), 1e-30)
    return bool(moved[0] > UNSEEN) if moved[1] > UNSEEN else None


def _changed(batch: Any, batch_first: bool) -> Any:
    """The batch with another second token in every sequence."""
    if not isinstance(batch, Mapping):
        return _another(batch, batch_first)
    if "decoder_input_ids" in batch or "pixel_values" in batch:
        return None
    read = (name for name, value in batch.items() if np.ndim(value) == 3 and "mask" not in name)
    name = "input_ids" if "input_ids" in batch else next(read, None)
    return None if name is None else {**batch, name: _another(batch[name], batch_first)}


def _another(tokens: Any, batch_first: bool) -> Tensor:
    """(B, L) ids or (B, L, features), or (L, B, features)."""
    given = torch.as_tensor(tokens).clone()
    if given.ndim < 2:
        return given
    rows = given if batch_first or given.ndim == 2 else given.transpose(0, 1)
    if rows.shape[1] > 2:
        # Another token stands in for the second, so that no id leaves the vocabulary.
        rows[:, 1] = -rows[:, 1] if rows.is_floating_point() else _different(rows)
    return given


def _different(ids: Tensor) -> Tensor:
    second = ids[:, 1]
    other = torch.where(ids[:, 2] != second, ids[:, 2], ids[:, 0])
    return torch.where(other != second, other, (second - 1).clamp(min=0))


def _stream(
    module: nn.Module, batch: Any, sites: Iterable[Any] | None, layer: int
) -> np.ndarray | None:
    points = hook_points(module) if sites is None else [HookPoint(*site) for site in sites]
    if any(point.site.startswith("encoder.") for point in points):
        return None
    point = next(p for p in points if (p.layer, p.site) == (layer, STREAM))
    seen: list[Tensor] = []

    def before(_: nn.Module, positional: Any, named: Any) -> None:
        seen.append(first_tensor([*positional, *named.values()]).detach())

    def after(_: nn.Module, __: Any, output: Any) -> None:
        seen.append(first_tensor(output).detach())

    part = module.get_submodule(point.path)
    with training(module), ExitStack() as hooks:
        module.eval()
        if point.side == "input":
            hook = part.register_forward_pre_hook(before, with_kwargs=True)
        else:
            hook = part.register_forward_hook(after)
        hooks.callback(hook.remove)
        try:
            _run(module, batch)
        except (RuntimeError, ValueError, IndexError, MomentsError):
            return None
    if not seen or seen[0].ndim != 3:
        return None
    tensor = seen[0] if _batch_first(module) else seen[0].transpose(0, 1)
    return np.asarray(tensor.double().cpu().numpy())


def _batch_first(module: nn.Module) -> bool:
    return all(p.batch_first for p in module.modules() if isinstance(p, nn.MultiheadAttention))


def _run(module: nn.Module, batch: Any) -> None:
    parameter = next(module.parameters(), None)
    device = None if parameter is None else parameter.device

    def on(value: Any) -> Any:
        if isinstance(value, Tensor | np.ndarray | list):
            return torch.as_tensor(value, device=device)
        return value

    if isinstance(batch, Mapping):
        module(**{name: on(value) for name, value in batch.items()})
    else:
        module(on(batch))
