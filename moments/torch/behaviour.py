"""What a module does that its weights and sums do not show: seen by running it a few times."""

from __future__ import annotations

import math
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

from ..errors import MomentsError
from ..optional import optional
from .probe import in_mode, run
from .tensors import first_tensor

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn
    from torch.overrides import TorchFunctionMode

MASKED = 5e3
"""A logit this far below the largest one of its row is a masked one."""


class Softmax(NamedTuple):
    """One softmax over keys.

    Attributes:
        logit_variance: of the logits within a row, averaged over rows with two keys at least.
        over_keys: whether it ran over the last axis.
    """

    logit_variance: float
    over_keys: bool


class Behaviour(NamedTuple):
    """What two runs of a module in evaluation mode show.

    Attributes:
        softmaxes: over L x L logits, fused or by hand, in order.
        random: the first submodule whose output differs from one run to the next, of the same
            input; None where none does.
        never_run: submodules with parameters of their own that were not called, and whose
            parameters nothing else took.
    """

    softmaxes: tuple[Softmax, ...]
    random: str | None
    never_run: tuple[str, ...]


def behaviour(module: nn.Module, batch: Any) -> Behaviour:
    """Run a module twice on one batch, without dropout."""
    runs: list[list[tuple[str, Tensor | None]]] = []
    watch = _watch()

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
            with ExitStack() as hooks:
                for path, part in module.named_modules():
                    hooks.callback(part.register_forward_hook(keep(path, seen)).remove)
                hooks.enter_context(mode)
                run(module, batch)
            runs.append(seen)
    called = {path for path, _ in runs[0]}
    idle = (
        path
        for path, part in module.named_modules()
        if path not in called
        and (own := list(part.parameters(recurse=False)))
        and not any(id(one) in watch.met for one in own)
    )
    return Behaviour(tuple(watch.found), _first_apart(*runs), tuple(idle))


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


def _watch() -> Any:
    by_hand = (nn.functional.softmax, torch.softmax, Tensor.softmax)

    class Watch(TorchFunctionMode):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.found: list[Softmax] = []
            self.met: set[int] = set()

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is nn.functional.scaled_dot_product_attention:
                self.found.append(Softmax(_row_variance(_fused(*args, **kwargs)), True))
            elif func in by_hand and args and _square(args[0]):
                axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
                last = axis in (-1, args[0].ndim - 1)
                self.found.append(Softmax(_row_variance(args[0]), last))
            given = func(*args, **kwargs)
            if not isinstance(given, bool | int | torch.dtype | torch.device | torch.Size):
                # A table's weight may be added, and a projection's given to a fused kernel.
                self.met.update(
                    id(one) for one in (*args, *kwargs.values()) if isinstance(one, nn.Parameter)
                )
            return given

    return Watch()


RANDOM = 0.03
"""Relative difference from which two runs are two: kernels that differ in rounding stay below, and
dropout with probability p changes a tensor by sqrt(2 p) of its size, .045 at p = .001."""

ENTRIES = 4096
"""Of every output, as many entries are held against one another."""


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
