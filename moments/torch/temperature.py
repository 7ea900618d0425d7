"""Attention temperatures, in the attribute where Hugging Face's attention keeps its factor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import DomainError
from ..model.transformer import Transformer
from ..optional import optional
from .expectation import model_of_stack
from .findings import Finding
from .probe import in_mode, run
from .roles import ModuleRoles
from .structure import ENCODER

SAME = 1e-4
"""Relative difference of two temperatures that are one: some are read off a run in float32."""

with optional("torch", "torch"):
    from torch import nn
    from torch.overrides import TorchFunctionMode


def factors(
    module: nn.Module, found: ModuleRoles, model: Transformer, described: Transformer | None
) -> list[tuple[nn.Module, float]]:
    """Attention modules whose `scaling` must change, and to what, for the model's temperatures.

    Logits are q k / (sqrt(d_head) temperature).

    Raises:
        DomainError: the temperatures differ from the module's own and cannot be set.
    """
    changes = []
    for stack, wanted in _models(model):
        own = _own(stack, described, wanted)
        for layer, _, holder, current in _temperatures(module, found, stack, wanted, own):
            temperature = float(wanted.temperatures[layer - 1])
            if np.isclose(current, temperature, rtol=1e-6):
                continue
            if holder is None:
                raise DomainError(
                    f"{stack}layer {layer}: the plan's temperature {temperature:g} has no place in "
                    "this module, whose attention has no attribute 'scaling'; divide the query "
                    "weights' variance by its square instead"
                )
            changes.append((holder, 1 / (float(wanted.d_head or 1) ** 0.5 * temperature)))
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
        batch: what the module is run on to see what scaled_dot_product_attention is told, where no
            attribute and no class of torch or of Hugging Face tells it; None: it is not run.
    """
    told = any(isinstance(part, nn.MultiheadAttention) for part in module.modules()) or (
        described is not None and hasattr(getattr(module, "config", None), "to_dict")
    )
    factors = [] if told or batch is None else _factors_seen(module, batch)
    seen = factors if model.encoder is None and len(factors) == model.layers else None
    for stack, wanted in _models(model):
        own = _own(stack, described, wanted)
        for layer, label, holder, current in _temperatures(module, found, stack, wanted, own):
            expected = float(wanted.temperatures[layer - 1])
            if holder is None and not told:
                if seen is None:
                    note = "no attribute 'scaling' and no scaled_dot_product_attention tells it"
                    base = (layer, f"{stack}attention", label, "temperature", expected, math.nan)
                    yield Finding(*base, math.nan, 1.0, None, note)
                    continue
                current = 1 / (float(wanted.d_head or 1) ** 0.5 * seen[layer - 1])
            passed = bool(np.isclose(current, expected, rtol=SAME))
            base = (layer, f"{stack}attention", label, "temperature", expected, current)
            yield Finding(*base, 0.0, float(passed), passed)


def _factors_seen(module: nn.Module, batch: Any) -> list[float]:
    """What every call of scaled_dot_product_attention multiplies q k by, in order."""
    found: list[float] = []

    class Watch(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is nn.functional.scaled_dot_product_attention:
                width = (args[0] if args else kwargs["query"]).shape[-1]
                scale = kwargs.get("scale")
                found.append(width**-0.5 if scale is None else float(scale))
            return func(*args, **kwargs)

    with in_mode(module, False), Watch():
        run(module, batch)
    return found


def _models(model: Transformer) -> list[tuple[str, Transformer]]:
    return [("", model)] if model.encoder is None else [("", model), (ENCODER, model.encoder)]


def _own(stack: str, described: Transformer | None, model: Transformer) -> np.ndarray:
    """Of the module's code: as its architecture says, else sqrt(d_head) alone."""
    return (
        np.ones(model.layers)
        if described is None
        else model_of_stack(described, stack).temperatures
    )


def _temperatures(
    module: nn.Module, found: ModuleRoles, stack: str, model: Transformer, own: np.ndarray
) -> Iterator[tuple[int, str, nn.Module | None, float]]:
    """Layer, query matrix, the module nearest to it that has a numeric `scaling`, temperature."""
    for role in found.named("query", stack=stack):
        path, holder = role.parameter, None
        while holder is None and (path := path.rpartition(".")[0]):
            part = module.get_submodule(path)
            if isinstance(getattr(part, "scaling", None), float):
                holder = part
        if holder is None:
            yield role.layer, role.label, None, float(own[role.layer - 1])
        else:
            width = float(model.d_head or 1) ** 0.5
            yield role.layer, role.label, holder, 1 / (width * float(holder.scaling))  # type: ignore[arg-type]
