"""The tensor that a module takes or gives, wherever it is packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import MomentsError, optional

with optional("torch", "torch"):
    from torch import Tensor, nn


def first_tensor(value: Any) -> Tensor:
    """The tensor itself, or the first one of a tuple, list or mapping.

    Raises:
        MomentsError: there is none.
    """
    if isinstance(value, Tensor):
        return value
    entries = value.values() if isinstance(value, Mapping) else value
    tensors = [v for v in entries if isinstance(v, Tensor)] if np.iterable(entries) else []
    if not tensors:
        raise MomentsError(f"expected a tensor or a tuple of them, got {type(value).__name__}")
    return tensors[0]


def module_loss(output: Any) -> Tensor | None:
    """The loss that a module returns: its attribute, or the one scalar beside other tensors."""
    found = getattr(output, "loss", None)
    if found is not None or not isinstance(output, tuple | list | dict):
        return found if isinstance(found, Tensor) else None
    values = list(output.values()) if isinstance(output, dict) else list(output)
    scalars = [v for v in values if isinstance(v, Tensor) and v.ndim == 0 and v.is_floating_point()]
    return scalars[0] if len(scalars) == 1 and len(values) > 1 else None


def module_logits(output: Any) -> Tensor | None:
    """The logits that a module returns: its attribute, or what stands beside its loss."""
    found = getattr(output, "logits", None)
    if found is not None or module_loss(output) is None:
        return found if isinstance(found, Tensor) else None
    values = output.values() if isinstance(output, dict) else output
    return next((v for v in values if isinstance(v, Tensor) and v.ndim == 3), None)


def with_first_tensor(value: Any, tensor: Tensor) -> Any:
    """The same packing around another first tensor."""
    if isinstance(value, Tensor):
        return tensor
    if isinstance(value, tuple | list):
        place = next(i for i, entry in enumerate(value) if isinstance(entry, Tensor))
        return type(value)([*value[:place], tensor, *value[place + 1 :]])
    raise MomentsError(f"expected a tensor or a tuple of them, got {type(value).__name__}")


def padding_row(module: nn.Module, tensor: Tensor) -> int | None:
    """The row of a table that a module takes for padding, whatever name the table goes by."""
    return padding_rows(module).get(tensor)


def padding_rows(module: nn.Module) -> dict[Tensor, int]:
    """Every table that has such a row, and the row; of a table in several parts the first's."""
    found: dict[Tensor, int | None] = {}
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            found.setdefault(part.weight, part.padding_idx)
    return {table: int(row) for table, row in found.items() if row is not None}
