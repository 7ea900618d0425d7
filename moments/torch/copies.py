"""Tensors of different layers that hold the same entries, as layers copied from one do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..errors import optional
from .findings import Finding
from .roles import Role, block_of, tensors_of

with optional("torch", "torch"):
    import torch
    from torch import Tensor, nn


class Copies(NamedTuple):
    """One role whose blocks are equal, entry by entry, in several layers."""

    roles: tuple[Role, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Where, from 1."""
        return tuple(role.layer for role in self.roles)


def copies(blocks: Iterable[tuple[Role, Tensor]]) -> list[Copies]:
    """Matrices and bias vectors of one role that are equal in several layers and not constant.

    What such layers add to the stream is not independent. A matrix that is one parameter of all
    layers stands in one of them only, and is none.
    """
    alike: dict[tuple[str, tuple[int, ...]], list[list[tuple[Role, Tensor]]]] = {}
    for role, block in blocks:
        drawn = role.is_matrix or role.name.endswith(".bias")
        if role.layer < 1 or not drawn or bool((block == block.reshape(-1)[0]).all()):
            continue
        groups = alike.setdefault((role.full_name, tuple(block.shape)), [])
        same = (group for group in groups if torch.equal(group[0][1], block))
        group = next(same, None)
        if group is None:
            groups.append([(role, block)])
        else:
            group.append((role, block))
    return [
        Copies(tuple(role for role, _ in group))
        for groups in alike.values()
        for group in groups
        if len(group) > 1
    ]


def copy_notes(found: Iterable[Copies]) -> Iterator[str]:
    """One sentence for all roles that are equal in the same layers."""
    together: dict[tuple[int, ...], list[str]] = {}
    for group in found:
        together.setdefault(group.layers, []).append(group.roles[0].full_name)
    for layers, names in together.items():
        names.sort(key=lambda name: name.endswith(".bias"))  # matrices first
        yield (
            f"{', '.join(names)} hold the same entries in layers {', '.join(map(str, layers))}: "
            "what such layers add is not independent and grows faster than predicted "
            "(nn.TransformerEncoder copies one layer; moments.torch.initialize draws each anew)"
        )


def shuffle(module: nn.Module, found: Iterable[Copies], seed: int) -> nn.Module:
    """The module, every copy's entries in another order, as if drawn on their own.

    What a tensor holds, its variance and any tail of it, stays the same.
    """
    generator = torch.Generator().manual_seed(seed)
    for block in _copied(module, found):
        entries = block.reshape(-1).clone()
        order = torch.randperm(entries.numel(), generator=generator).to(entries.device)
        block.copy_(entries[order].reshape(block.shape))
    return module


@contextmanager
def shuffled(module: nn.Module, found: Iterable[Copies], seed: int) -> Iterator[None]:
    """`shuffle`, and every tensor as it was afterwards."""
    found = list(found)
    stored = [block.clone() for block in _copied(module, found)]
    try:
        shuffle(module, found, seed)
        yield
    finally:
        for block, entries in zip(_copied(module, found), stored, strict=True):
            block.copy_(entries)


def _copied(module: nn.Module, found: Iterable[Copies]) -> list[Tensor]:
    """Blocks that are another layer's, as views."""
    tensors = tensors_of(module)
    return [block_of(tensors, role) for group in found for role in group.roles[1:]]


def copy_findings(found: Iterable[Copies]) -> Iterator[Finding]:
    """A failed check for every tensor that is an earlier layer's."""
    for group in found:
        first = group.roles[0]
        for role in group.roles[1:]:
            note = f"equal, entry by entry, to {first.label}"
            base = (role.layer, role.full_name, role.label, "correlation with another layer")
            yield Finding(*base, 0.0, 1.0, 0.0, 0.0, False, note)
