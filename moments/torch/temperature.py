"""Attention temperatures: where Hugging Face's attention keeps its factor, and as measured.

The factor on q k is measured without chance: of a token with itself a rotation of queries and keys
is none, a bias of position is one number per head (at most linear in the place, as ALiBi is where
it counts from the first key), and no mask acts. Those logits are therefore c q_i k_i plus what two
numbers per head say, with q and k from the module's own matrices and what enters them; regression
gives c to rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from ..errors import DomainError, optional
from ..model.transformer import Transformer
from .behaviour import logits_with_itself
from .expectation import model_of_stack, stacks_in
from .findings import SLACK, Finding
from .roles import ModuleRoles, Role, block_of, tensors_of
from .running import grouped, watch_tensor

SAME = 1e-4
"""Relative difference of two temperatures that are one: some are read off a run in float32."""

UNEXPLAINED = 1e-3
"""Share of those logits that the regression may leave: rounding in half precision leaves 1e-5, and
positions that enter otherwise, as DeBERTa's do, most."""

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn


def factors(
    module: nn.Module, found: ModuleRoles, model: Transformer, described: Transformer | None
) -> list[tuple[nn.Module, float]]:
    """Attention modules whose `scaling` must change, and to what, for the model's temperatures.

    Logits are q k / (sqrt(d_head) temperature).

    Raises:
        DomainError: the temperatures differ from the module's own and cannot be set.
    """
    changes = []
    for role, temperature, holder, current in _temperatures(module, found, model, described):
        if np.isclose(current, temperature, rtol=1e-6):
            continue
        if holder is None:
            raise DomainError(
                f"{role.stack}layer {role.layer}: the plan's temperature {temperature:g} has no "
                "place in this module, whose attention has no attribute 'scaling'; divide the "
                "query weights' variance by its square instead"
            )
        changes.append((holder, 1 / (_width(model, role) * temperature)))
    return changes


def temperature_findings(
    module: nn.Module,
    found: ModuleRoles,
    model: Transformer,
    described: Transformer | None,
    batch: Any = None,
) -> Iterator[Finding]:
    """Every layer's temperature against the model's; None where only the module's code knows it.

    Args:
        batch: what the module is run on to measure them; None: it is not run, and what an attribute
            or a class of torch or of Hugging Face tells is believed.
    """
    told = any(isinstance(part, nn.MultiheadAttention) for part in module.modules()) or (
        described is not None and hasattr(getattr(module, "config", None), "to_dict")
    )
    seen = np.full(model.layers, np.nan)
    if batch is not None and model.encoder is None and model.qk_norm is None:
        seen = _measured(module, found, model, batch)
    for role, expected, holder, current in _temperatures(module, found, model, described):
        base = (role.layer, f"{role.stack}attention", role.label, "temperature", expected)
        slack = SAME
        if not role.stack and np.isfinite(seen[role.layer - 1]):
            current, slack = float(seen[role.layer - 1]), SLACK
        elif holder is None and not told:
            note = "no attribute 'scaling' tells it, and logits are not q k times a factor"
            yield Finding(*base, math.nan, None, note, math.nan)
            continue
        yield Finding(*base, current, bool(np.isclose(current, expected, rtol=slack)))


def _measured(module: nn.Module, found: ModuleRoles, model: Transformer, batch: Any) -> np.ndarray:
    """Every layer's temperature, (N,); nan where logits are not q k times a factor."""
    seen = np.full(model.layers, np.nan)
    pairs = [_one(found, name) for name in ("query", "key")]
    layers = range(1, model.layers + 1)
    if not all(layer in roles for roles in pairs for layer in layers):
        return seen
    read: dict[str, Tensor] = {}
    paths = {role.parameter.rpartition(".")[0] for roles in pairs for role in roles.values()}
    with ExitStack() as hooks:
        for path in paths:
            keep = functools.partial(read.__setitem__, path)
            hooks.callback(watch_tensor(module.get_submodule(path), "input", keep).remove)
        logits = logits_with_itself(module, batch)
    if len(logits) != model.layers:
        return seen
    tensors = tensors_of(module)
    biases = [_one(found, f"{name}.bias") for name in ("query", "key")]
    for layer, given in zip(layers, logits, strict=True):
        q, k = (
            _made(read, tensors, roles[layer], bias.get(layer))
            for roles, bias in zip(pairs, biases, strict=True)
        )
        factor = None if q is None or k is None else _factor(q, k, given)
        if factor is not None:
            seen[layer - 1] = 1 / (float(model.d_head or 1) ** 0.5 * factor)
    return seen


def _one(found: ModuleRoles, name: str) -> dict[int, Role]:
    """The matrix of that role by layer, of layers that have one."""
    groups = grouped(found.named(name), lambda role: role.layer)
    return {layer: roles[0] for layer, roles in groups.items() if len(roles) == 1}


def _made(
    read: dict[str, Tensor], tensors: dict[str, Tensor], role: Role, bias: Role | None
) -> Tensor | None:
    """What a projection makes of what was seen to enter it, (..., features)."""
    x = read.get(role.parameter.rpartition(".")[0])
    block = block_of(tensors, role).double()
    matrix = block.flatten(1) if role.transposed else block.reshape(-1, block.shape[-1]).T
    if x is None or x.shape[-1] != matrix.shape[0]:
        return None
    return x.double() @ matrix + (
        0 if bias is None else block_of(tensors, bias).double().reshape(-1)
    )


def _factor(q: Tensor, k: Tensor, logits: Tensor) -> float | None:
    """What multiplies q k in the logits of tokens with themselves; None where nothing does.

    Args:
        q, k: (B, L, features) or (L, B, features), heads side by side.
        logits: (..., L) of every sequence's heads.
    """
    length = logits.shape[-1] if logits.ndim else 0
    if q.ndim != 3 or length < 4 or length not in q.shape[:2] or k.shape[:2] != q.shape[:2]:
        return None
    if q.shape[1] != length:
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    count, features = len(q), q.shape[-1]
    heads = logits.numel() // (count * length)
    if logits.numel() % (count * length) or heads == 0 or features % heads:
        return None
    width = features // heads
    if k.shape[-1] % width or heads % (k.shape[-1] // width):
        return None
    if not bool(torch.isfinite(logits).all()):
        return None
    q, k = (t.unflatten(-1, (-1, width)).transpose(1, 2) for t in (q, k))
    products = (q * k.repeat_interleave(heads // k.shape[1], 1)).sum(-1)
    given, made = (_beside_places(t.reshape(count, heads, length)) for t in (products, logits))
    square = float(given.square().sum())
    if square == 0 or not bool(made.any()):
        return None
    factor = float((given * made).sum()) / square
    left = float((made - factor * given).square().sum()) / float(made.square().sum())
    return factor if left < UNEXPLAINED and factor > 0 else None


def _beside_places(rows: Tensor) -> Tensor:
    """What a constant and a slope per head leave of rows over places."""
    places = torch.arange(rows.shape[-1], dtype=rows.dtype, device=rows.device)
    places = (places - places.mean()) / places.std(correction=0)
    level = rows - rows.mean(-1, keepdim=True)
    return level - (level * places).mean(-1, keepdim=True) * places


def _temperatures(
    module: nn.Module, found: ModuleRoles, model: Transformer, described: Transformer | None
) -> Iterator[tuple[Role, float, nn.Module | None, float]]:
    """Query matrix, temperature of the model, the module nearest to the matrix that has a numeric
    `scaling`, and the temperature there; else the architecture's own, else that of sqrt(d_head)."""
    for stack, wanted in stacks_in(model).items():
        own = None if described is None else model_of_stack(described, stack)
        for role in found.named("query", stack=stack):
            path, holder = role.parameter, None
            while holder is None and (path := path.rpartition(".")[0]):
                part = module.get_submodule(path)
                if isinstance(getattr(part, "scaling", None), float):
                    holder = part
            current = 1.0 if own is None else float(own.temperatures[role.layer - 1])
            if holder is not None:
                current = 1 / (_width(model, role) * float(holder.scaling))
            yield role, float(wanted.temperatures[role.layer - 1]), holder, current


def _width(model: Transformer, role: Role) -> float:
    """sqrt(d_head)."""
    return math.sqrt(model_of_stack(model, role.stack).d_head or 1)
