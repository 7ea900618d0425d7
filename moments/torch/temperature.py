"""Attention temperatures: where Hugging Face's attention keeps its factor, and as it was read."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..errors import DomainError, optional
from ..model.transformer import Transformer
from .expectation import model_of_stack, stacks_in
from .findings import SLACK, Finding
from .roles import ModuleRoles, Role

SAME = 1e-4
"""Relative difference of two temperatures that are one: some are read off a run in float32."""

with optional("torch", "torch"):
    from torch import nn


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
) -> Iterator[Finding]:
    """Every layer's temperature against the model's; None where only the module's code knows it.

    Where one pass did not tell them, what an attribute or a class of torch or of Hugging Face tells
    is believed.
    """
    told = any(isinstance(part, nn.MultiheadAttention) for part in module.modules()) or (
        described is not None and hasattr(getattr(module, "config", None), "to_dict")
    )
    seen = {(stack, layer): factor for stack, layer, factor in found.multipliers}
    for role, expected, holder, current in _temperatures(module, found, model, described):
        base = (role.layer, f"{role.stack}attention", role.label, "temperature", expected)
        slack = SAME
        if (factor := seen.get((role.stack, role.layer))) is not None:
            current, slack = 1 / (_width(model, role) * factor), SLACK
        elif holder is None and not told:
            note = "no attribute 'scaling' tells it, and logits are not q k times a factor"
            yield Finding(*base, math.nan, None, note, math.nan)
            continue
        yield Finding(*base, current, bool(np.isclose(current, expected, rtol=slack)))


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
