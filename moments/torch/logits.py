"""The factor on the logits: what code applies, and what a hook must add."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model.transformer import Transformer
from .roles import ModuleRoles
from .running import hooked, in_mode, run, watch_tensor

EXPLAINED = 1e-3
"""A tensor whose share left unexplained is below this is a multiple of another one."""


class LogitFactor(NamedTuple):
    """What a hook behind the matrix to logits multiplies by."""

    path: str
    factor: float


def logits_path(found: ModuleRoles) -> str | None:
    """Path of the submodule that gives the logits; None where the module has no head."""
    heads = [role.parameter.rpartition(".")[0] for role in found.named("head")]
    return found.logits or next(iter(heads), None)


def logit_factor(
    found: ModuleRoles, model: Transformer, described: Transformer | None
) -> LogitFactor | None:
    """The hook that a model's output scale needs beside the module's own; None where none."""
    path = logits_path(found)
    if path is None or model.head is None:
        return None
    there = 1.0 if described is None or described.head is None else described.head.output_scale
    factor = float(model.head.output_scale / there)
    return None if abs(factor - 1) < 1e-12 else LogitFactor(path, factor)


def measured_scale(
    module: nn.Module, found: ModuleRoles, model: Transformer, batch: Any
) -> float | None:
    """What really multiplies the logits, whatever code does it; None where it cannot be seen.

    The product of two slopes: of the module's logits upon what the head's own matrix gives, and of
    what that matrix reads upon the final norm's output where it is a multiple of it (T5).
    """
    path = logits_path(found)
    if path is None or batch is None or model.head is None:
        return None
    seen: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        seen[name] = tensor.detach().to(torch.float64, copy=True)

    head = module.get_submodule(path)
    norms = (role.parameter.rpartition(".")[0] for role in found.named("final.norm.gain"))
    hooks = (
        watch_tensor(part, side, functools.partial(keep, name), first=first)
        for name, part, side, first in (
            ("read", head, "input", False),
            ("own", head, "output", True),
            ("hooked", head, "output", False),
            *(("norm", module.get_submodule(norm), "output", False) for norm in norms),
        )
    )
    with in_mode(module, False), hooked(hooks):
        output = run(module, batch)
    logits = getattr(output, "logits", None)
    capped = model.head.logit_softcap is not None
    if logits is None or capped or logits.shape != seen["own"].shape:
        logits = seen["hooked"]
    if not seen["own"].any():
        return None
    behind, _ = _multiple(seen["own"], logits.detach().double())
    if "norm" in seen and seen["norm"].shape == seen["read"].shape:
        before, rest = _multiple(seen["norm"], seen["read"])
        behind *= before if rest < EXPLAINED else 1.0
    return behind


def _multiple(x: Tensor, y: Tensor) -> tuple[float, float]:
    """What multiplies x to be nearest to y, and the share of y that is left."""
    slope = float((x * y).sum() / x.square().sum())
    return slope, float((y - slope * x).norm() / y.norm().clamp(min=1e-30))
