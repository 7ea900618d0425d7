"""Roles of a mixture's parameters, by the names and shapes that transformers gives them.

Experts are bare parameters of three axes, (E, 2 d_ff, d) or (E, d, 2 d_ff) with gate and second
factor in one, which no submodule passes through: the dataflow knows none of them as a matrix.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .roles import ModuleRoles, Role, WeightPart

_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"
_SHARED = re.compile(
    r"shared_experts?\.(gate|up|down)_proj\.(weight|bias)|shared_expert_gate\.weight"
)
_NAMES = {"gate": "gate", "up": "ffn_in", "down": "ffn_out"}


def with_experts(found: ModuleRoles, tensors: Mapping[str, Any]) -> ModuleRoles:
    """The same with the roles of experts, routers and shared experts in the place of any that their
    parameters had."""
    roles = tuple(role for one in _mixtures(tensors) for role in _roles(*one, tensors))
    known = {role.parameter for role in roles}
    if not known:
        return found
    return dataclasses.replace(
        found,
        roles=(*(role for role in found.roles if role.parameter not in known), *roles),
        scales=tuple(role for role in found.scales if role.parameter not in known),
        unidentified=tuple(name for name in found.unidentified if name not in known),
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
