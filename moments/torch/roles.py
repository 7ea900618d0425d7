"""The parts of a module that correspond to the theory: hook points, residual branches, roles of
parameters."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import DomainError, domain_error
from ..model.weights import MATRICES
from .running import grouped, restored

Side = Literal["input", "output"]


class WeightPart(NamedTuple):
    """The place of a matrix or vector within a parameter.

    Along `axis` the parameter consists of equal groups, each split into parts of `split` rows, and
    this is part number `part` of every group; an empty split stands for the whole parameter. Query,
    key and value after one another are one group; GPT-NeoX, which interleaves them by head, has a
    group for every head.
    """

    axis: int = 0
    part: int = 0
    split: tuple[int, ...] = ()

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor shaped like the parameter, as a view; several groups are an
        additional axis before `axis`."""
        if not self.split:
            return tensor
        start = sum(self.split[: self.part])
        grouped = tensor.unflatten(self.axis, (-1, sum(self.split)))
        result = grouped.narrow(self.axis + 1, start, self.split[self.part])
        return result.flatten(self.axis, self.axis + 1) if grouped.shape[self.axis] == 1 else result


WHOLE = WeightPart()


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
        stack: "", or "encoder." if there is a decoder too.
        layer: from 1.
        path: of the layer.
        name: "attention", "cross" or "ffn".
        placement: "pre", "post", "sandwich", "output" or "none".
        norm: path of the block's norm; None without one.
        stream: x of the residual sum lambda x + beta f.
        branch: f behind dropout and a second norm, if these are submodules.
        parallel: whether this block and another share one sum.
        drops: whether dropout acts on the block's output behind `branch`.
        native: factor of the block's output in the module's code, of hooks too; 1 if parameters
            are part of it.
    """

    stack: str
    layer: int
    path: str
    name: str
    placement: str
    norm: str | None
    stream: SubmoduleTensor
    branch: SubmoduleTensor
    parallel: bool = False
    drops: bool = field(default=False, compare=False)
    native: float = field(default=1.0, compare=False)

    @property
    def column(self) -> int:
        """Column in (N, 2) arrays of scales: 0 for (cross-)attention, 1 for feed-forward."""
        return int(self.name == "ffn")


class BlockSum(NamedTuple):
    """One block's residual sum lambda x + beta f: x is the stream, f the output of the block's last
    matrix or second norm.

    Attributes:
        placement: of its norms.
        skip, branch: lambda, beta.
        norm: factor of the normalised input, root mean square over features; None without a norm.
        proportional: whether the sum has this form.
        multiplier: logits / (q k) of attention, if known.
    """

    placement: str
    skip: float
    branch: float
    norm: float | None
    proportional: bool
    multiplier: float | None


Sums = Mapping[tuple[str, int, str], BlockSum]
"""By stack, layer and block."""


# --- roles of parameters --------------------------------------------------------------------------


TABLES = ("token", "position", "segment", "class", "relative_bias")
"""Roles that are looked up or added, not multiplied with."""


_AFTER_LAYERS = ("head", "final")


@dataclass(frozen=True)
class Role:
    """One matrix or vector of a module.

    Attributes:
        stack: "", or "encoder." if there is a decoder too.
        layer: from 1; 0 before the first layer, N + 1 behind the last.
        name: "query", "query.bias", "attention.norm.gain", "token", "final.norm.gain", ...
        parameter: name of the whole parameter.
        fan_in, fan_out: numbers of input and output features; 0 for vectors.
        transposed: whether the matrix is stored (fan_in, fan_out), as Conv1D stores it.
        unit: whether a norm's gain is the weight itself, not 1 + weight; None: unknown.
    """

    stack: str
    layer: int
    name: str
    parameter: str
    part: WeightPart = WHOLE
    fan_in: int = 0
    fan_out: int = 0
    transposed: bool = False
    unit: bool | None = None

    def __str__(self) -> str:
        """In words: "query of layer 3", "token", "final.norm.gain"."""
        inside = self.layer > 0 and not self.name.startswith(_AFTER_LAYERS)
        return f"{self.full_name} of layer {self.layer}" if inside else self.full_name

    @property
    def full_name(self) -> str:
        """The name with the stack's prefix."""
        return self.stack + self.name

    @property
    def label(self) -> str:
        """The parameter's name, with the role's if it is a part of the parameter."""
        short = self.name.removesuffix(".bias")
        return f"{self.parameter} [{short}]" if self.part.split else self.parameter

    @property
    def is_matrix(self) -> bool:
        """Whether it maps features to features."""
        return self.fan_in > 0


@dataclass(frozen=True)
class ModuleRoles:
    """A module's parameters by role, and its residual branches.

    Attributes:
        unidentified: names of parameters of unknown role.
        blocks: the residual branches; empty if submodules do not show all of them.
        scales: parameters and buffers that are a residual scale.
        logits: path of the submodule that gives the logits; "": unknown.
    """

    layers: int
    roles: tuple[Role, ...]
    unidentified: tuple[str, ...]
    blocks: tuple[ModuleBranch, ...]
    scales: tuple[Role, ...] = ()
    logits: str = ""

    def named(self, *names: str, stack: str = "") -> tuple[Role, ...]:
        """The roles of these names in a stack, in the order of the layers."""
        result = (role for role in self.roles if role.name in names and role.stack == stack)
        return tuple(sorted(result, key=lambda role: role.layer))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def block_of(tensors: Mapping[str, Tensor], role: Role) -> Tensor:
    """The part of a parameter that plays a role, as a view.

    Raises:
        DomainError: the parameter has no storage or no real entries.
    """
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
    """The names of tensors, with one pattern for those of several layers."""
    return gathered_names([role.label for role in roles])


def split_at_layer(path: str) -> tuple[str, int, str]:
    """A path before, at and after its first number, the layer's; -1 without a number."""
    found = re.search(r"(?<![^.])\d+(?![^.])", path)
    if found is None:
        return path, -1, ""
    return path[: found.start()], int(found[0]), path[found.end() :]


def layer_pattern(name: str) -> str:
    """A name with {layer} for the layer's number."""
    before, number, after = split_at_layer(name)
    return name if number < 0 else f"{before}{{layer}}{after}"


def gathered_pattern(label: str) -> str:
    """A name with a star for the layer's number: the first inside the name, else the one that
    begins it (in an nn.Sequential)."""
    inside = re.sub(r"(?<=\.)\d+(?=\.)", "*", label, count=1)
    return inside if inside != label else re.sub(r"^\d+(?=\.\w+\.)", "*", label)


def gathered_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Names with one pattern for several layers, "h.*.attn.weight", and one entry for several parts
    of a tensor, "attn.weight [query, key]"."""
    single = [part for label in labels for part in label.split(" ... ")]
    parts_of: dict[str, list[str]] = {}
    for pattern, group in grouped(dict.fromkeys(single), gathered_pattern).items():
        tensor, _, part = (pattern if len(group) > 1 else group[0]).partition(" [")
        parts_of.setdefault(tensor, []).extend([part.rstrip("]")] if part else [])
    order = {name: place for place, name in enumerate(MATRICES)}
    return tuple(
        f"{tensor} [{', '.join(sorted(parts, key=lambda p: order.get(p, 0)))}]" if parts else tensor
        for tensor, parts in parts_of.items()
    )


def in_layers(layers: list[int], total: int) -> str:
    """The layers of so many in words, "in every layer" or "in layers 1, 2"; "" for [0]: none."""
    if layers == [0]:
        return ""
    if len(layers) == total and total > 1:
        return " in every layer"
    return f" in layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


# --- gains of norms: the weight, or 1 + weight (Gemma) --------------------------------------------


def unit_gain(module: nn.Module, role: Role) -> bool:
    """Whether a norm's gain is the weight itself, not 1 + weight."""
    if role.unit is not None:
        return role.unit
    path, _, name = role.parameter.rpartition(".")
    norm = module.get_submodule(path)
    return is_gain(norm, getattr(norm, name))


def is_gain(norm: nn.Module, weight: Tensor) -> bool:
    """Whether a norm's weight is its gain: then its output at weight 0 is its bias."""
    x = torch.linspace(-1.5, 1.7, weight.numel(), dtype=weight.dtype, device=weight.device)
    bias = getattr(norm, "bias", None)
    with torch.no_grad(), restored([weight]):
        weight.zero_()
        try:
            at_zero = type(norm).forward(norm, x) - (0 if bias is None else bias)
        except Exception:  # its own code may reject a vector
            return True
    return bool(at_zero.square().mean() < 0.5)


def gain_of(module: nn.Module, role: Role, block: Tensor) -> Tensor:
    """The gain of a norm with the weight `block`."""
    return block if unit_gain(module, role) else 1 + block


# --- experts, by the names and shapes that transformers gives them --------------------------------

# They are parameters of three axes, (E, 2 d_ff, d) or (E, d, 2 d_ff), in which the gate and the
# other factor are one tensor; the dataflow recognises no matrices in them.

_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"
_SHARED = re.compile(
    r"shared_experts?\.(gate|up|down)_proj\.(weight|bias)|shared_expert_gate\.weight"
)
_NAMES = {"gate": "gate", "up": "ffn_in", "down": "ffn_out"}


def with_experts(result: ModuleRoles, tensors: Mapping[str, Any]) -> ModuleRoles:
    """The roles with those of experts, routers and shared experts."""
    roles = tuple(r for prefix, n in _mixtures(tensors) for r in _expert_roles(prefix, n, tensors))
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
    """The prefix of the names of every mixture's parameters, and the number of its layer."""
    for name in tensors:
        number = re.search(r"(?<![^.])(\d+)\.", name)
        if name.endswith(f".{_UP}") and number is not None:
            prefix = name.removesuffix(_UP)
            if f"{prefix}{_DOWN}" in tensors and tensors[name].ndim == 3:
                yield prefix, int(number[1]) + 1


def _expert_roles(prefix: str, layer: int, tensors: Mapping[str, Any]) -> Iterator[Role]:
    up, down = tensors[prefix + _UP], tensors[prefix + _DOWN]
    by_rows = up.shape[2] == down.shape[1] and up.shape[1] == 2 * down.shape[2]
    d_model, d_ff = (down.shape[1:]) if by_rows else (down.shape[2], down.shape[1])
    axis = 1 if by_rows else 2
    # GPT-OSS, which alone has biases there, interleaves the two
    split = (1, 1) if f"{prefix}{_UP}_bias" in tensors else (d_ff, d_ff)
    role = functools.partial(Role, "", layer)
    for place, name in enumerate(("gate", "ffn_in")):
        part = WeightPart(axis, place, split)
        yield role(name, prefix + _UP, part, d_model, d_ff, not by_rows)
        if split == (1, 1):
            yield role(f"{name}.bias", f"{prefix}{_UP}_bias", WeightPart(1, place, split))
    yield role("ffn_out", prefix + _DOWN, WHOLE, d_ff, d_model, not by_rows)
    if f"{prefix}{_DOWN}_bias" in tensors:
        yield role("ffn_out.bias", f"{prefix}{_DOWN}_bias")
    for gate in ("gate", "router"):
        weight, bias = f"{prefix}{gate}.weight", f"{prefix}{gate}.bias"
        if weight in tensors and tuple(tensors[weight].shape) == (up.shape[0], d_model):
            yield role("router", weight, fan_in=d_model, fan_out=up.shape[0])
            if bias in tensors:
                yield role("router.bias", bias)
    for name, tensor in tensors.items():
        shared = _SHARED.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if shared is None:
            continue
        ending = ".bias" if shared[2] == "bias" else ""
        role_name = f"shared_{_NAMES[shared[1]]}{ending}" if shared[1] else "shared_router"
        fan_out, fan_in = (0, 0) if ending else tensor.shape
        yield role(role_name, name, fan_in=fan_in, fan_out=fan_out)
