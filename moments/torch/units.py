"""How a norm's weight becomes its gain: as it is, or with 1 added to it (Gemma)."""

from __future__ import annotations

from ..errors import optional
from .roles import Role

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn


def unit_gain(module: nn.Module, role: Role) -> bool:
    """Whether the gain is the weight itself, not 1 + weight; found out by running the norm once."""
    if role.unit is not None:
        return role.unit
    norm = module.get_submodule(role.parameter.rpartition(".")[0])
    weight = getattr(norm, role.parameter.rpartition(".")[2])
    x = torch.linspace(-1.5, 1.7, weight.numel(), dtype=weight.dtype, device=weight.device)
    stored = weight.detach().clone()
    bias = getattr(norm, "bias", None)
    with torch.no_grad():
        weight.zero_()
        try:
            at_zero = type(norm).forward(norm, x) - (0 if bias is None else bias)
        except (RuntimeError, TypeError):  # no norm of a vector: its weight is taken as it is
            return True
        finally:
            weight.copy_(stored)
    return bool(at_zero.square().mean() < 0.5)


def gain_of(module: nn.Module, role: Role, block: Tensor) -> Tensor:
    """The gain that a norm's weight stands for."""
    return block if unit_gain(module, role) else 1 + block
