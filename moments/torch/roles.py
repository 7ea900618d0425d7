"""Where the sites of the theory sit in a module, its residual branches, what every parameter is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import DomainError, domain_error
from ..model.weights import MATRICES
from .running import grouped, kept

Side = Literal["input", "output"]


class WeightPart(NamedTuple):
    """One matrix or vector within a parameter.

    Along `axis` the parameter is groups of `split` rows, and this is part number `part` of every
    group; an empty split stands for the whole parameter. Query, key and value side by side are one
    group; GPT-NeoX, which interleaves them by head, has as many groups as heads.
    """

    weight: str
    parameter: str
    axis: int = 0
    part: int = 0
    split: tuple[int, ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor shaped like the parameter, as a view.

        Where there are several groups, their number is an axis of its own before `axis`.
        """
        if not self.split:
            return tensor
        start = sum(self.split[: self.part])
        grouped = tensor.unflatten(self.axis, (-1, sum(self.split)))
        result = grouped.narrow(self.axis + 1, start, self.split[self.part])
        return result.flatten(self.axis, self.axis + 1) if grouped.shape[self.axis] == 1 else result


class HookPoint(NamedTuple):
    """One site: the first tensor going into, or coming out of, the submodule at `path`."""

    layer: int
    site: str
    path: str
    side: Side


ENCODER = "encoder."


class SubmoduleTensor(NamedTuple):
    """The first tensor going into, or coming out of, a submodule."""

    path: str
    side: Side


@dataclass(frozen=True)
class ModuleBranch:
    """One residual branch.

    Attributes:
        stack: "", or "encoder." of an encoder beside the main stack.
        layer: from 1.
        path: of the layer.
        name: "attention", "cross" or "ffn".
        placement: "pre", "post", "sandwich", "output" or "none".
        norm: path of the block's norm; None where there is none.
        post_norm: path of the norm at the block's output.
        stream: x of the residual sum lambda x + beta f.
        raw: f as the output projection (or a sandwich's second norm) gives it.
        branch: f as it enters the sum, behind dropout or a second norm where they are modules.
        total: the sum.
        parallel: whether this block and another share one sum.
        drops: whether its output is dropped behind `branch`.
    """

    stack: str
    layer: int
    path: str
    name: str
    placement: str
    norm: str | None
    post_norm: str | None
    stream: SubmoduleTensor
    raw: SubmoduleTensor
    branch: SubmoduleTensor
    total: SubmoduleTensor
    parallel: bool = False
    drops: bool = field(default=False, compare=False)

    @property
    def column(self) -> int:
        """Of the (N, 2) arrays of scales: attention and cross-attention, or feed-forward."""
        return int(self.name == "ffn")


class BlockSum(NamedTuple):
    """One block's residual sum lambda x + beta f: x is the stream, f the output of the block's last
    matrix or second norm.

    Attributes:
        placement: of its norms.
        skip, branch: lambda, beta.
        norm: factor of the normalised input, root mean square over features; None without a norm.
        proportional: whether the sum has this form.
    """

    placement: str
    skip: float
    branch: float
    norm: float | None
    proportional: bool


Sums = Mapping[tuple[str, int, str], BlockSum]
"""By stack, layer and block."""


# --- which role every parameter plays -------------------------------------------------------------


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
        result = (role for role in self.roles if role.name in names and role.stack == stack)
        return tuple(sorted(result, key=lambda role: role.layer))


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
    result = re.search(r"(?<![^.])\d+(?![^.])", path)
    return (
        (path[: result.start()], int(result[0]), path[result.end() :]) if result else (path, -1, "")
    )


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


def in_layers(layers: list[int], total: int) -> str:
    """Which of so many layers, in words; 0 stands for what has none."""
    if layers == [0]:
        return ""
    if len(layers) == total and total > 1:
        return " in every layer"
    return f" in layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


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
    bias = getattr(norm, "bias", None)
    with torch.no_grad(), kept([weight]):
        weight.zero_()
        try:
            at_zero = type(norm).forward(norm, x) - (0 if bias is None else bias)
        except (RuntimeError, TypeError, ValueError):  # no norm of a vector: taken as it is
            return True
    return bool(at_zero.square().mean() < 0.5)


def gain_of(module: nn.Module, role: Role, block: Tensor) -> Tensor:
    """The gain that a norm's weight stands for."""
    return block if unit_gain(module, role) else 1 + block


# --- experts, by the names and shapes that transformers gives them --------------------------------

# Bare parameters of three axes, (E, 2 d_ff, d) or (E, d, 2 d_ff) with gate and second factor in
# one, which no submodule passes through: the dataflow knows none of them as a matrix.

_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"
_SHARED = re.compile(
    r"shared_experts?\.(gate|up|down)_proj\.(weight|bias)|shared_expert_gate\.weight"
)
_NAMES = {"gate": "gate", "up": "ffn_in", "down": "ffn_out"}


def with_experts(result: ModuleRoles, tensors: Mapping[str, Any]) -> ModuleRoles:
    """The same with the roles of experts, routers and shared experts in the place of any that their
    parameters had."""
    roles = tuple(role for one in _mixtures(tensors) for role in _roles(*one, tensors))
    known = {role.parameter for role in roles}
    if not known:
        return result
    return dataclasses.replace(
        result,
        roles=(*(role for role in result.roles if role.parameter not in known), *roles),
        scales=tuple(role for role in result.scales if role.parameter not in known),
        unidentified=tuple(name for name in result.unidentified if name not in known),
    )


def _mixtures(tensors: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Beginnings of the names of a mixture's parameters, each with its layer's number."""
    for name in tensors:
        number = re.search(r"(?<![^.])(\d+)\.", name)
        if name.endswith(f".{_UP}") and number is not None:
            before = name.removesuffix(_UP)
            if f"{before}{_DOWN}" in tensors and tensors[name].ndim == 3:
                yield before, int(number[1]) + 1


def _roles(before: str, layer: int, tensors: Mapping[str, Any]) -> Iterator[Role]:
    up, down = tensors[before + _UP], tensors[before + _DOWN]
    by_rows = up.shape[2] == down.shape[1] and up.shape[1] == 2 * down.shape[2]
    d_model, d_ff = (down.shape[1:]) if by_rows else (down.shape[2], down.shape[1])
    axis = 1 if by_rows else 2
    # GPT-OSS, the one with biases there, has the two in turn
    split = (1, 1) if f"{before}{_UP}_bias" in tensors else (d_ff, d_ff)

    def role(name: str, part: WeightPart, fans: tuple[int, int], transposed: bool) -> Role:
        label = part.parameter + (f" [{name}]" if part.split else "")
        return Role("", layer, name, part, *fans, transposed, label)

    for place, name in enumerate(("gate", "ffn_in")):
        part = WeightPart(name, before + _UP, axis, place, split)
        yield role(name, part, (d_model, d_ff), not by_rows)
        if split == (1, 1):
            bias = WeightPart(f"{name}.bias", f"{before}{_UP}_bias", 1, place, split)
            yield role(f"{name}.bias", bias, (0, 0), False)
    yield role("ffn_out", WeightPart("ffn_out", before + _DOWN), (d_ff, d_model), not by_rows)
    if f"{before}{_DOWN}_bias" in tensors:
        bias = WeightPart("ffn_out.bias", f"{before}{_DOWN}_bias")
        yield role("ffn_out.bias", bias, (0, 0), False)
    for own in ("gate", "router"):
        weight, bias_name = f"{before}{own}.weight", f"{before}{own}.bias"
        if weight in tensors and tuple(tensors[weight].shape) == (up.shape[0], d_model):
            yield role("router", WeightPart("router", weight), (d_model, up.shape[0]), False)
            if bias_name in tensors:
                yield role("router.bias", WeightPart("router.bias", bias_name), (0, 0), False)
    for name, tensor in tensors.items():
        shared = _SHARED.fullmatch(name.removeprefix(before)) if name.startswith(before) else None
        if shared is None:
            continue
        ending = ".bias" if shared[2] == "bias" else ""
        called = f"shared_{_NAMES[shared[1]]}{ending}" if shared[1] else "shared_router"
        fans = (0, 0) if ending else (tensor.shape[1], tensor.shape[0])
        yield role(called, WeightPart(called, name), fans, False)
