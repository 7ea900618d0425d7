"""Slips planted in modules of foreign styles by the role of a tensor, and initialisations drawn so.

Roles are those that `moments.torch.describe` reads, which tests hold against what the styles'
authors call their parts; what is planted is done to tensors and submodules alone, so that one slip
fits every style.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moments.torch.anatomy import anatomy_of
from moments.torch.roles import Role, block_of, tensors_of

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import foreign_modules
import own_styles
from checked_gpt import TRUNCATED

STYLES: dict[str, Callable[..., nn.Module]] = {
    **{name: build for name, build in own_styles.STYLES.items() if "bare" not in name},
    **{
        f"x-transformers {name}": functools.partial(foreign_modules.x_transformer, name)
        for name in foreign_modules.X_TRANSFORMERS
    },
}
PLANTED = ("minGPT", "lit-gpt", "torchtitan", "torchtune", "x-transformers plain")
"""Styles that slips are planted in."""

INITS = ("own", "gpt2", "normal", "xavier", "lecun")
NOT_CORRECT = {
    *(("timm, scaled", init) for init in INITS if init != "own"),
    *((f"x-transformers {name}", "own") for name in foreign_modules.X_TRANSFORMERS),
}
"""Combinations that are no correct modules: branches scaled by .1 beside matrices this small, whose
layers act as the identity, and a library's own tables, in which positions drown the tokens."""
OUTWARD = ("output", "ffn_out")
MATRICES = ("query", "key", "value", "output", "ffn_in", "gate", "ffn_out")
STD = 0.02


class Parts:
    """A module's tensors by role."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.found = anatomy_of(module).roles
        self.tensors = tensors_of(module)

    def roles(self, *names: str, layer: int | None = None) -> list[Role]:
        return [
            r for r in self.found.roles if r.name in names and (layer is None or r.layer == layer)
        ]

    def blocks(self, *names: str, layer: int | None = None) -> list[torch.Tensor]:
        return [block_of(self.tensors, role) for role in self.roles(*names, layer=layer)]

    def name(self, role: str, layer: int | None = None) -> str:
        return next(r.parameter for r in self.roles(role, layer=layer))

    def owner(self, role: str, layer: int | None = None) -> tuple[nn.Module, str]:
        path = self.name(role, layer).rpartition(".")[0]
        parent, _, name = path.rpartition(".")
        return self.module.get_submodule(parent), name


def drawn(style: str, init: str, seed: int, layers: int = 2) -> nn.Module:
    """A module of a style, its matrices drawn by role."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        more = {"layers": layers} if layers != 2 and style in own_styles.STYLES else {}
        module = STYLES[style](**more)
        if style.startswith("x-transformers"):
            torch.manual_seed(seed)
            module = foreign_modules.x_transformer(style.removeprefix("x-transformers "), seed)
        if init != "own":
            with torch.no_grad():
                _draw(Parts(module), init)
    return module


def _draw(parts: Parts, init: str) -> None:
    depth = math.sqrt(2 * parts.found.layers)
    for role in parts.roles(*MATRICES):
        fans = {"xavier": (role.fan_in + role.fan_out) / 2, "lecun": role.fan_in}
        std = fans[init] ** -0.5 if init in fans else STD
        std /= depth if init == "gpt2" and role.name in OUTWARD else 1
        block_of(parts.tensors, role).normal_(std=std)
    for role in parts.found.roles:
        if role.name.endswith(".bias") and not role.name.endswith("norm.bias"):
            block_of(parts.tensors, role).zero_()
        elif role.name in ("token", "position", "head"):
            block_of(parts.tensors, role).normal_(std=STD)


# --- slips ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """One kind of slip.

    Attributes:
        kind: of the finding that names it.
        role, layer: of the tensor that it must name; None for any layer.
        plant: what is done.
        init: what the module is drawn by before; `scheme` what its user says of it.
        needs: roles that a style must have.
        layers: how many, where a style lets one choose.
    """

    name: str
    kind: str
    role: str
    plant: Callable[[Parts], Any]
    layer: int | None = None
    init: str = "gpt2"
    scheme: str = ""
    needs: tuple[str, ...] = ()
    layers: int = 2


def _times(parts: Parts, factor: float, *roles: str, layer: int | None = None) -> None:
    for block in parts.blocks(*roles, layer=layer):
        block.mul_(factor)


def _instead(parts: Parts, right: tuple[str, ...], *wrong: str) -> None:
    depth = math.sqrt(2 * parts.found.layers)
    _times(parts, depth, *right)
    _times(parts, 1 / depth, *wrong)


def _cut(parts: Parts, at: float, corrected: bool) -> None:
    std = STD / (TRUNCATED if corrected else 1)
    for block in parts.blocks(*MATRICES):
        filled = torch.empty(block.shape)
        block.copy_(nn.init.trunc_normal_(filled, std=std, a=-at * std, b=at * std))


def _copied(parts: Parts) -> None:
    for role in parts.found.roles:
        if role.layer > 1 and role.name in MATRICES:
            first = parts.blocks(role.name, layer=1)
            here = parts.blocks(role.name, layer=role.layer)
            for one, other in zip(first, here, strict=True):
                other.copy_(one)


def _default(parts: Parts, role: str, layer: int | None) -> None:
    for found in parts.roles(role, layer=layer):
        bound = found.fan_in**-0.5
        block_of(parts.tensors, found).uniform_(-bound, bound)


def _gains(parts: Parts) -> None:
    for role in parts.found.roles:
        if role.name.endswith("norm.gain"):
            block_of(parts.tensors, role).normal_(std=STD)


def _without(parts: Parts, role: str, layer: int | None = None) -> None:
    owner, name = parts.owner(role, layer)
    setattr(owner, name, nn.Identity())


def _random(parts: Parts) -> None:
    owner, name = parts.owner("output", 1)
    getattr(owner, name).register_forward_hook(
        lambda _, __, made: nn.functional.dropout(made, 0.2, True)
    )


def _bias(parts: Parts) -> None:
    for role in parts.found.roles:
        if role.name.endswith(".bias") and role.name.removesuffix(".bias") in MATRICES:
            block_of(parts.tensors, role).uniform_(-(64**-0.5), 64**-0.5)


def _unscaled(parts: Parts) -> None:
    owner, name = parts.owner("query")
    heads = 4
    for layer in range(1, parts.found.layers + 1):
        owner, name = parts.owner("query", layer)
        getattr(owner, name).register_forward_hook(
            lambda _, __, made: made * math.sqrt(made.shape[-1] // heads)
        )


SLIPS = (
    Planted("depth scale on query, key, value", "wrong variance", "query",
            lambda p: _instead(p, OUTWARD, "query", "key", "value")),
    Planted("depth scale on ffn_in", "wrong variance", "ffn_in",
            lambda p: _instead(p, ("ffn_out",), "ffn_in", "gate")),
    Planted("depth scale on attention alone", "wrong variance", "ffn_out",
            lambda p: _instead(p, ("ffn_out",))),
    Planted("depth scale twice", "wrong variance", "output",
            lambda p: _instead(p, (), *OUTWARD)),
    Planted("depth scale never applied", "wrong variance", "output", lambda p: None,
            init="normal", scheme="scaled-init"),
    Planted("cut at 100 deviations", "wrong variance", "ffn_in",
            lambda p: _cut(p, 100, True), init="normal", scheme="normal"),
    Planted("cut at 2, not corrected", "wrong variance", "ffn_in",
            lambda p: _cut(p, 2, False), init="normal", scheme="normal"),
    Planted("copied layers", "copied layers", "ffn_out", _copied, layer=2),
    Planted("token table of std 1, tied", "initial loss", "token",
            lambda p: [b.normal_() for b in p.blocks("token")], needs=("tied",)),
    Planted("positions of std 1", "positions drown tokens", "position",
            lambda p: [b.normal_() for b in p.blocks("position")], needs=("position",)),
    Planted("gains drawn", "norm gain", "attention.norm.gain", _gains,
            needs=("attention.norm.gain",)),
    Planted("one gain zero", "norm gain", "ffn.norm.gain",
            lambda p: [b.zero_() for b in p.blocks("ffn.norm.gain", layer=2)], layer=2,
            needs=("ffn.norm.gain",)),
    Planted("one matrix as torch draws it", "wrong variance", "ffn_in",
            lambda p: _default(p, "ffn_in", 2), layer=2),
    Planted("values as torch draws them", "wrong variance", "value",
            lambda p: _default(p, "value", None)),
    Planted("one layer three times as wide", "wrong variance", "ffn_out",
            lambda p: _times(p, 3, *MATRICES, layer=2), layer=2, layers=4, needs=("four layers",)),
    Planted("mean not zero", "mean not zero", "ffn_in",
            lambda p: [b.add_(0.02) for b in p.blocks("ffn_in")]),
    Planted("variance as std", "identity layers", "output",
            lambda p: _times(p, STD, *MATRICES)),
    Planted("biases left", "biases", "ffn_in.bias", _bias, needs=("ffn_in.bias",)),
    Planted("no final norm", "no final norm", "",
            lambda p: _without(p, "final.norm.gain"), needs=("final.norm.gain",)),
    Planted("one norm skipped", "norm placement", "query",
            lambda p: _without(p, "attention.norm.gain", 2), layer=2,
            needs=("attention.norm.gain",)),
    Planted("dropout left on", "dropout left on", "output", _random, layer=1),
    Planted("no 1/sqrt(d_head)", "attention scale", "query", _unscaled, needs=("split query",)),
)  # fmt: skip
"""Kinds of slips; the first of a tensor's names in its finding counts as the right one."""


def fits(planted: Planted, parts: Parts) -> bool:
    """Whether a style has what a slip is done to."""
    names = {role.name for role in parts.found.roles}
    if "head" not in names:
        names.add("tied")
    if any(r.unit is False for r in parts.roles("attention.norm.gain")):
        names.add("gains beside 1")
    if parts.found.layers > 2:
        names.add("four layers")
    if all(not r.part.split for r in parts.roles("query")) and "query.norm.gain" not in names:
        names.add("split query")
    stored = planted.kind == "norm gain" and "gains beside 1" in names  # drawn about 0 is right
    return set(planted.needs) <= names and not stored


def planted(style: str, slip: Planted, seed: int) -> tuple[nn.Module, str] | None:
    """The module with the slip in it, and the tensor that has to be named; None: it has none."""
    module = drawn(style, slip.init, seed, slip.layers)
    parts = Parts(module)
    if not fits(slip, parts):
        return None
    where = parts.name(slip.role, slip.layer) if slip.role else ""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        slip.plant(parts)
    return module, where
