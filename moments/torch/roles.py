"""Which role every parameter of a module plays: its layer, its matrix, the block it fills."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import DomainError, domain_error, optional
from ..model.weights import MATRICES
from .hook_points import ModuleBranch, WeightPart
from .running import grouped

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn


TABLES = ("token", "position", "segment", "class", "relative_bias")
"""Roles that are looked up or added, not multiplied with."""

_BEHIND = ("head", "final")


@dataclass(frozen=True)
class Role:
    """One matrix or vector of a module.

    Attributes:
        stack: "", or "encoder." of an encoder beside the main stack.
        layer: from 1; 0 before the first layer, N + 1 behind the last.
        name: "query", "query.bias", "attention.norm.gain", "token", "final.norm.gain", ...
        fan_in, fan_out: features summed over, and features made; 0 for vectors.
        transposed: whether the matrix is stored (fan_in, fan_out), as Conv1D stores it.
        label: the parameter's name, with the block's where it is fused.
        unit: of a norm's gain, whether it is the weight itself, not 1 + weight; None: not known.
    """

    stack: str
    layer: int
    name: str
    part: WeightPart
    fan_in: int
    fan_out: int
    transposed: bool
    label: str
    unit: bool | None = None

    def __str__(self) -> str:
        """As a sentence has it: "query of layer 3", "token", "final.norm.gain"."""
        inside = self.layer > 0 and not self.name.startswith(_BEHIND)
        return f"{self.full_name} of layer {self.layer}" if inside else self.full_name

    @property
    def full_name(self) -> str:
        """The name with its stack's."""
        return self.stack + self.name

    @property
    def parameter(self) -> str:
        """Name of the whole parameter."""
        return self.part.parameter

    @property
    def is_matrix(self) -> bool:
        """Whether it maps features to features."""
        return self.fan_in > 0


@dataclass(frozen=True)
class ModuleRoles:
    """A module's parameters by role, and its residual branches.

    Attributes:
        unidentified: names of parameters that no rule knows.
        blocks: the residual branches; empty where the module's sites are not known.
        scales: parameters and buffers that hold a residual scale.
        multipliers: stack, layer, block and what q k is multiplied by, where that was seen.
        logits: path of the submodule that gives the logits; "" where none was seen.
    """

    layers: int
    roles: tuple[Role, ...]
    unidentified: tuple[str, ...]
    blocks: tuple[ModuleBranch, ...]
    scales: tuple[Role, ...] = ()
    multipliers: tuple[tuple[str, int, str, float], ...] = ()
    logits: str = ""

    def named(self, *names: str, stack: str = "") -> tuple[Role, ...]:
        """The roles of these names in a stack, in the order of the layers."""
        found = (role for role in self.roles if role.name in names and role.stack == stack)
        return tuple(sorted(found, key=lambda role: role.layer))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def block_of(tensors: Mapping[str, Tensor], role: Role) -> Tensor:
    """The role's block of its parameter, a view; a DomainError without storage or real entries."""
    tensor = tensors[role.parameter]
    if tensor.is_meta:
        raise DomainError(
            f"{role.parameter} is on the meta device: give the module storage first, "
            "with module.to_empty(device=...)"
        )
    if not tensor.is_floating_point():
        raise domain_error(f"dtype of {role.parameter}", tensor.dtype, "a floating-point type")
    return role.part.of(tensor.detach())


def gathered(roles: Sequence[Role]) -> tuple[str, ...]:
    """Names of tensors, those of several layers as one pattern."""
    return gathered_names([role.label for role in roles])


def parted(path: str) -> tuple[str, int, str]:
    """A path around its first number, which counts layers; -1 where it has none."""
    found = re.search(r"(?<![^.])\d+(?![^.])", path)
    return (path[: found.start()], int(found[0]), path[found.end() :]) if found else (path, -1, "")


def layer_pattern(name: str) -> str:
    """A name with {layer} for the number that counts layers."""
    before, number, behind = parted(name)
    return name if number < 0 else f"{before}{{layer}}{behind}"


def gathered_pattern(label: str) -> str:
    """A name with a star for the number that counts layers: the first inside of it, else one that
    begins it (nn.Sequential's own)."""
    inside = re.sub(r"(?<=\.)\d+(?=\.)", "*", label, count=1)
    return inside if inside != label else re.sub(r"^\d+(?=\.\w+\.)", "*", label)


def gathered_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Tensors of several layers as one pattern, "h.*.attn.weight"; parts of one tensor together,
    "attn.weight [query, key]"."""
    split = [part for label in labels for part in label.split(" ... ")]
    whole: dict[str, list[str]] = {}
    for pattern, group in grouped(dict.fromkeys(split), gathered_pattern).items():
        tensor, _, part = (pattern if len(group) > 1 else group[0]).partition(" [")
        whole.setdefault(tensor, []).extend([part.rstrip("]")] if part else [])
    order = {name: place for place, name in enumerate(MATRICES)}
    return tuple(
        f"{tensor} [{', '.join(sorted(parts, key=lambda p: order.get(p, 0)))}]" if parts else tensor
        for tensor, parts in whole.items()
    )


# --- a norm's weight as its gain: as it is, or with 1 added to it (Gemma) -------------------------


def unit_gain(module: nn.Module, role: Role) -> bool:
    """Whether the gain is the weight itself, not 1 + weight; found out by running the norm once."""
    if role.unit is not None:
        return role.unit
    path, _, name = role.parameter.rpartition(".")
    norm = module.get_submodule(path)
    return is_gain(norm, getattr(norm, name))


def is_gain(norm: nn.Module, weight: Tensor) -> bool:
    """Whether a norm's weight is its gain: at 0 it then gives nothing but its bias."""
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
