"""What a module does that its weights and sums do not show: seen by running it a few times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from ..errors import MomentsError
from ..optional import optional
from .probe import in_mode, run
from .tensors import first_tensor

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn
    from torch.overrides import TorchFunctionMode

MASKED = 1e4
"""A logit this far below the largest one of its row is a masked one."""


class Softmax(NamedTuple):
    """One softmax over keys.

    Attributes:
        logit_variance: of the logits within a row, averaged over rows with two keys at least.
        over_keys: whether it ran over the last axis.
    """

    logit_variance: float
    over_keys: bool


def attention_seen(module: nn.Module, batch: Any) -> list[Softmax]:
    """Every softmax over L x L logits, fused or by hand, in order; without dropout."""
    found: list[Softmax] = []
    by_hand = (nn.functional.softmax, torch.softmax, Tensor.softmax)

    class Watch(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is nn.functional.scaled_dot_product_attention:
                found.append(Softmax(_row_variance(_fused(*args, **kwargs)), True))
            elif func in by_hand and args and _square(args[0]):
                axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
                last = axis in (-1, args[0].ndim - 1)
                found.append(Softmax(_row_variance(args[0]), last))
            return func(*args, **kwargs)

    with in_mode(module, False), Watch():
        run(module, batch)
    return found


def _square(logits: Any) -> bool:
    """Whether a tensor has the shape of logits of queries against keys."""
    if not isinstance(logits, Tensor) or logits.ndim not in (3, 4):
        return False
    return bool(logits.shape[-1] == logits.shape[-2] > 1)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The logits of scaled_dot_product_attention, -inf where masked."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    logits = query.detach() @ key.detach().transpose(-2, -1) * factor
    if is_causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(hidden, -math.inf)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            return logits.masked_fill(~attn_mask, -math.inf)
        logits = logits + attn_mask
    return logits


def _row_variance(logits: Tensor) -> float:
    """Mean over rows of the unbiased variance of the logits that are not masked."""
    wide = logits.detach().double()
    seen = wide > wide.amax(-1, keepdim=True) - MASKED
    count = seen.sum(-1)
    kept = torch.where(seen, wide, torch.zeros_like(wide))
    mean = kept.sum(-1) / count
    square = torch.where(seen, (wide - mean[..., None]).square(), torch.zeros_like(wide)).sum(-1)
    rows = count > 1
    if not bool(rows.any()):
        return math.nan
    return float((square[rows] / (count[rows] - 1)).mean())


def first_random(module: nn.Module, batch: Any) -> str | None:
    """In evaluation mode: the first submodule whose output differs from one run to the next, of the
    same input; None where none does."""
    runs: list[list[tuple[str, Tensor]]] = []

    def keep(path: str, seen: list[tuple[str, Tensor]]) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            try:
                tensor = first_tensor(output)
            except MomentsError:
                return
            seen.append((path, tensor.detach().flatten()[:ENTRIES].clone()))

        return hook

    with in_mode(module, False):
        for _ in range(2):
            seen: list[tuple[str, Tensor]] = []
            with ExitStack() as hooks:
                for path, part in module.named_modules():
                    hooks.callback(part.register_forward_hook(keep(path, seen)).remove)
                run(module, batch)
            runs.append(seen)
    for (path, one), (_, other) in zip(*runs, strict=False):
        if one.shape != other.shape or not torch.equal(one, other):
            return path or "the module itself"
    return None


ENTRIES = 4096
"""Of every output, as many entries are held against one another."""


def never_run(module: nn.Module, batch: Any) -> Iterator[str]:
    """Submodules with parameters of their own that a forward pass does not call."""
    called: set[str] = set()

    def note(path: str) -> Any:
        return lambda *_: called.add(path)

    own = {
        path: part
        for path, part in module.named_modules()
        if path and next(part.parameters(recurse=False), None) is not None
    }
    with in_mode(module, False), ExitStack() as hooks:
        for path, part in own.items():
            hooks.callback(part.register_forward_hook(note(path)).remove)
        run(module, batch)
    yield from (path for path in own if path not in called)
