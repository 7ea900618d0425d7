"""Names and sites of a module, as one pass through it tells them.

A draft, to be corrected by whoever wrote the module: what could not be placed is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MomentsError, optional
from .dataflow import ModuleReading, read
from .roles import Role, layer_pattern, parted, tensors_of
from .running import grouped, own_module

with optional("torch", "torch"):
    from torch import nn

Site = tuple[int, str, str, str]


@dataclass(frozen=True)
class Draft:
    """What `moments.torch.draft` made of a module; `str` gives it as Python to correct.

    Attributes:
        names: patterns of parameter names -> roles, as `moments.torch.audit` takes them.
        sites: (layer, site, path, side), as `moments.torch.measure` takes them.
        unplaced: parameters without a role, with their shapes.
        doubts: what was assumed, and what could not be read, in words.
    """

    names: dict[str, str]
    sites: tuple[Site, ...]
    unplaced: tuple[str, ...]
    doubts: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"# {doubt}" for doubt in self.doubts]
        lines += ["names = {"]
        lines += [f'    "{pattern}": "{role}",' for pattern, role in self.names.items()]
        lines += [f'    # "{name}": "?",' for name in self.unplaced]
        lines += ["}", "sites = ["]
        return "\n".join([*lines, *self._sites(), "]"])

    def _sites(self) -> Iterator[str]:
        """Layers that are alike as one row, everything else as it is."""
        streams = [layer for layer, site, *_ in self.sites if site == "stream"]
        layers = max(streams, default=0)
        rows = {n: [_by_layer(s, n) for s in self.sites if s[0] == n] for n in range(1, layers + 1)}
        alike = layers > 0 and all(row == rows[1] for row in rows.values())
        for number, site in enumerate(self.sites):
            if not alike or not 1 <= site[0] <= layers:
                yield f"    {site!r},".replace("'", '"')
            elif number == 0 or self.sites[number - 1][0] == 0:
                yield "    *("
                yield "        (n + 1, site, before + str(n + first) + behind, side)"
                yield f"        for n in range({layers})"
                yield "        for site, before, first, behind, side in ["
                for row in rows[1]:
                    yield f"            {row!r},".replace("'", '"')
                yield "        ]"
                yield "    ),"


def _by_layer(site: Site, layer: int) -> tuple[str, str, int, str, str]:
    """A site, the number in its path counted from that of its layer."""
    _, name, path, side = site
    before, number, behind = parted(path)
    return name, before, number - (layer - 1), behind, side


def draft(module: nn.Module, batch: Any = None) -> Draft:
    """Names and sites for a module of one's own, to look at, correct and pass on.

    What one pass through the module tells (see `moments.torch.describe`) stands in it; where the
    module cannot be run, or nothing is found in what it computes, every parameter is left open.

    Args:
        batch: what the module reads, as in `moments.torch.measure`. None: random token ids,
            features or pictures, as it takes them.

    Returns:
        A Draft: `names`, `sites`, `str(...)`.

    Raises:
        DomainError: not an nn.Module.
    """
    module = own_module(module)
    try:
        reading = read(module, batch)
    except MomentsError as error:
        return unread(module, str(error))
    return _of_reading(module, reading)


def unread(module: nn.Module, why: str) -> Draft:
    """The draft of a module of which nothing is known."""
    return Draft({}, (), tuple(_open(module, [n for n, _ in module.named_parameters()])), (why,))


def _of_reading(module: nn.Module, reading: ModuleReading) -> Draft:
    names: dict[str, str] = {}
    missing, tensors = list(reading.roles.unidentified), tensors_of(module)
    owned = grouped((*reading.roles.roles, *reading.roles.scales), lambda role: role.parameter)
    mixed: list[str] = []
    for parameter, roles in owned.items():
        said = _fused(roles, tensors[parameter].shape)
        layered = any(1 <= role.layer <= reading.roles.layers for role in roles)
        pattern = layer_pattern(parameter) if layered else parameter
        if said is None or names.get(pattern, said) != said:
            missing.append(parameter)
            mixed.append(layer_pattern(parameter))
        else:
            names[pattern] = said
    doubts = [*reading.reasons, *reading.doubts]
    doubts += [
        f"{name} holds several roles that are not equal parts in order: no name says that"
        for name in dict.fromkeys(mixed)
    ]
    sites = tuple(_in_order(_sites(reading), reading.roles.layers))
    normed = {role.name.removesuffix(".gain") for role in reading.roles.roles if role.layer}
    seen = {site for _, site, *_ in sites}
    doubts += [
        f"where {site} takes and gives the stream was not seen: add its site"
        for site in ("attention.norm", "ffn.norm")
        if site in normed and site not in seen
    ]
    return Draft(names, sites, tuple(_open(module, missing)), tuple(doubts))


def _fused(roles: list[Role], shape: Sequence[int]) -> str | None:
    """ "query+key+value" for equal parts in that order; None for parts that no name says."""
    split = roles[0].part.split
    if not split:
        return roles[0].full_name
    placed = sorted(roles, key=lambda role: role.part.part)
    whole = [role.part.part for role in placed] == list(range(len(split)))
    if not whole or len(set(split)) > 1 or shape[roles[0].part.axis] != sum(split):
        return None
    return "+".join(role.full_name for role in placed)


def _open(module: nn.Module, missing: Iterable[str]) -> Iterator[str]:
    """Patterns with shapes, for their author to say what they are."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    rows = [f"{layer_pattern(name)} {shapes[name]}" for name in missing]
    for row in dict.fromkeys(rows):
        alone = [name for name, found in zip(missing, rows, strict=True) if found == row]
        yield row if len(alone) > 1 else f"{alone[0]} {shapes[alone[0]]}"


def _sites(reading: ModuleReading) -> Iterator[Site]:
    """Hook points, and where every block's last matrix gives what it gives."""
    known = set()
    for layer, site, path, side in reading.sites:
        known.add((layer, site))
        yield layer, site, path, side
    for block in reading.roles.blocks:
        site = block.stack + (f"{block.name}.projection" if block.name != "ffn" else "ffn.out")
        if block.post_norm is None and (block.layer, site) not in known:
            yield block.layer, site, block.raw.path, block.raw.side


def _in_order(sites: Iterable[Site], layers: int) -> list[Site]:
    """By layer, in one order of sites in all of them."""
    rows = list(sites)
    order = list(dict.fromkeys((site, side) for layer, site, _, side in rows if layer == 1))

    def place(row: Any) -> tuple[int, int]:
        layer, site, _, side = row
        inside = 1 <= layer <= layers and (site, side) in order
        return layer, order.index((site, side)) if inside else len(order)

    return sorted(rows, key=place)
