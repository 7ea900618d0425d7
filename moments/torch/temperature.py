"""Attention temperatures: what multiplies q k in a module, and where it can be set."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..errors import DomainError, optional
from ..model.transformer import Transformer
from .expectation import model_of_stack, stacks_in
from .findings import SLACK, Finding
from .roles import ModuleRoles, Role

with optional("torch", "torch"):
    from torch import nn


READ = 1e-6
"""Relative error with which a factor is read off a run, whose sums are in double precision."""


def factors(
    module: nn.Module, found: ModuleRoles, model: Transformer
) -> list[tuple[nn.Module, float]]:
    """Attention modules whose `scaling` must change, and to what: logits are q k / (sqrt(d_head)
    temperature).

    Raises:
        DomainError: the temperatures differ from the module's own and cannot be set.
    """
    changes = []
    for role, wanted, present in _temperatures(found, model):
        holder = _holder(module, role)
        same = READ if holder is not None else SLACK
        if np.isclose(1.0 if present is None else present, wanted, rtol=same):
            continue
        if holder is None or present is None:
            raise DomainError(
                f"{role.stack}layer {role.layer}, {_block(role)}: the plan's temperature "
                f"{wanted:g} has no place in this module, whose attention has no attribute "
                "'scaling'; divide the query weights' variance by its square instead"
            )
        changes.append((holder, holder.scaling * present / wanted))
    return changes


def temperature_findings(found: ModuleRoles, model: Transformer) -> Iterator[Finding]:
    """Every layer's temperature against the model's."""
    for role, wanted, present in _temperatures(found, model):
        base = role.layer, role.stack + _block(role), role.label, "temperature", wanted
        if present is None:
            yield Finding(*base, math.nan, None, "what multiplies q k was not seen", math.nan)
        else:
            yield Finding(*base, present, bool(np.isclose(present, wanted, rtol=SLACK)))


def _temperatures(
    found: ModuleRoles, model: Transformer
) -> Iterator[tuple[Role, float, float | None]]:
    """Every query matrix with its temperature in the model and in the module."""
    seen = {tuple(place): factor for *place, factor in found.multipliers}
    for stack, wanted in stacks_in(model).items():
        width = math.sqrt(model_of_stack(model, stack).d_head or 1)
        for role in found.named("query", "cross_query", stack=stack):
            factor = seen.get((stack, role.layer, _block(role)))
            present = None if factor is None else 1 / (width * factor)
            yield role, float(wanted.temperatures[role.layer - 1]), present


def _block(role: Role) -> str:
    return "cross" if role.name.startswith("cross") else "attention"


def _holder(module: nn.Module, role: Role) -> nn.Module | None:
    """The module nearest to a matrix that has a numeric `scaling`."""
    path = role.parameter
    while path := path.rpartition(".")[0]:
        part = module.get_submodule(path)
        if isinstance(getattr(part, "scaling", None), float):
            return part
    return None
