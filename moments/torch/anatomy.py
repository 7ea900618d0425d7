"""What a module is made of, as its author says or one pass through it tells."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import DomainError, MomentsError, optional
from ..model.huggingface import FAMILIES
from ..model.transformer import Transformer
from ..model.weights import Biases, Weights
from ..prediction.draws import STREAM, WeightGradient
from .checkpoints import drawn, is_meta
from .dataflow import ModuleReading, read
from .draft import unread
from .hook_points import HookPoint, WeightPart, points_of
from .roles import ModuleRoles, branches, roles_of

with optional("torch", "torch"):
    from torch import nn


@dataclass(frozen=True)
class Anatomy:
    """A module's parts.

    Attributes:
        found: parameters by role, and residual branches.
        sites: hook points; None where the user named parameters alone.
        reading: what one pass told; None where the user named the parameters.
    """

    found: ModuleRoles
    sites: tuple[HookPoint, ...] | None
    reading: ModuleReading | None = None

    def parts(self, module: nn.Module) -> Measured:
        """Hook points, and every parameter that can learn, split into its matrices.

        Names are those of `moments.Weights`, with ".bias" for biases, "attention.norm.gain" and the
        like for norms, "token", "position", "segment", "patch" and "class" in layer 0,
        "final.norm.gain", "head.transform" and "head" in layer N + 1; those of an encoder beside
        the main stack begin with "encoder.". A parameter without a role keeps its own name as one,
        in layer 0.
        """
        learn = {name for name, p in module.named_parameters() if p.requires_grad}
        roles = [*self.found.roles, *self.found.scales]
        rows = [(WeightGradient(r.layer, r.full_name, r.parameter), r.part) for r in roles]
        rows += _unnamed(self.found.unidentified)
        return self.sites or (), [(row, part) for row, part in rows if row.parameter in learn]

    @property
    def example(self) -> Any:
        """What the module was run on to be read; None where it was not."""
        return None if self.reading is None else self.reading.example

    def architecture(self) -> Transformer | None:
        """Of a module that one pass told: its shape, as nn.Linear draws matrices and biases.

        Of its tables and its head nothing is said, since nothing in it tells how they are meant to
        be drawn.
        """
        model = None if self.reading is None else self.reading.model
        crossing = any(block.name == "cross" for block in self.found.blocks)
        if model is None or (crossing and model.encoder is None):
            return None  # what a decoder alone reads, nothing in it says
        return _as_drawn(model)


Measured = tuple[tuple[HookPoint, ...], list[tuple[WeightGradient, WeightPart]]]
"""Where to watch a module, and what its parameters are."""


def _unnamed(parameters: Iterable[str]) -> list[tuple[WeightGradient, WeightPart]]:
    return [(WeightGradient(0, name, name), WeightPart(name, name)) for name in parameters]


def hook_points(module: nn.Module, batch: Any = None) -> tuple[HookPoint, ...]:
    """Every site of a module that a submodule takes or gives.

    The result is also a template: edit a copy of it, and pass it as `sites` to
    `moments.torch.measure`. A mapping of your own needs at least the site "stream" at the input of
    layer 1, as layer 0, and at the output of every layer.

    Args:
        batch: what the module reads, as in `moments.torch.measure`. None: random token ids,
            features or pictures, as it takes them. A module on the meta device is read as its own
            initialisation would draw it.

    Raises:
        MomentsError: the module could not be read.
    """
    told = drawn(module)[0] if is_meta(module) else module
    return anatomy_of(told, batch).sites or ()


def measured_parts(module: nn.Module, batch: Any, sites: tuple[HookPoint, ...] | None) -> Measured:
    """Where a module is watched, and its parameters by role; by their own names with `sites`.

    Raises:
        MomentsError: that is not known, or no submodule gives the stream.
    """
    if sites is not None:
        return sites, _unnamed(n for n, p in module.named_parameters() if p.requires_grad)
    parts = anatomy_of(module, batch)
    layers = [point.layer for point in parts.sites or () if point.site == STREAM]
    if sorted(layers) != list(range(parts.found.layers + 1)):
        raise MomentsError(
            f"{type(module).__name__} was read, but no submodule gives or takes the stream of "
            "every layer, where a hook could see it: make its layers submodules"
        )
    return parts.parts(module)


def _as_drawn(model: Transformer) -> Transformer:
    drawn = Biases.torch_default(model.d_model, model.d_ff).to_dict()
    declared = {} if model.biases is None else model.biases.to_dict()
    biases = {name: drawn[name] for name, value in declared.items() if value is not None}
    changes: dict[str, Any] = {"embedding": None, "head": None, "norm_gain": 1.0}
    if model.encoder is not None:
        changes["encoder"] = _as_drawn(model.encoder)
    return model.replace(
        weights=Weights.torch_default(model.d_model, model.d_ff),
        biases=Biases.of().replace(**biases) if biases else None,
        **changes,
    )


def anatomy_of(
    module: nn.Module,
    batch: Any = None,
    names: Mapping[str, str] | None = None,
    sites: Iterable[Any] | None = None,
) -> Anatomy:
    """A module's parts, as its author names them, or one pass tells.

    Args:
        batch: what it reads, as in `moments.torch.measure`.
        names, sites: for a module of one's own, as in `roles_of`.

    Raises:
        DomainError: a module on the meta device, a pattern of `names` that matches nothing, or an
            unknown role.
        MomentsError: the module could not be read; with a draft of `names`.
    """
    if is_meta(module):
        name = next(name for name, p in module.named_parameters() if p.is_meta)
        raise DomainError(
            f"{name} of {type(module).__name__} is on the meta device, without entries: give the "
            "module storage (to_empty(device='cpu')) and draw them; moments.torch.describe(module) "
            "says what its own initialisation would give"
        )
    given = None if sites is None else points_of(sites)
    if names is not None:
        found = roles_of(module, names, given)
        with suppress(MomentsError):  # what q k is multiplied by has no name
            told = _read(module, batch).roles
            if told.layers == found.layers:
                found = dataclasses.replace(found, multipliers=told.multipliers)
        return Anatomy(found, given)
    try:
        reading = _read(module, batch)
    except MomentsError as why:
        draft = unread(module, "or say what these are, and pass them as names= with sites=")
        raise MomentsError(f"{why}\n{draft}") from None
    if given is None:
        return Anatomy(reading.roles, reading.sites, reading)
    found = dataclasses.replace(reading.roles, blocks=branches(module, given))
    return Anatomy(found, given, reading)


_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ModuleReading]] = (
    weakref.WeakKeyDictionary()
)


def forget(module: nn.Module) -> None:
    """Read a module anew when it is next read, with the entries that it has then."""
    _KNOWN.pop(module, None)


def _read(module: nn.Module, batch: Any) -> ModuleReading:
    """A module's reading, kept as long as nothing of its structure changes."""
    mark = _structure(module)
    known = _KNOWN.get(module)
    if known is None or known[0] != mark:
        known = mark, read(module, None if _says_its_input(module) else batch)
        _KNOWN[module] = known
    return known[1]


def _says_its_input(module: nn.Module) -> bool:
    """Whether a module is sure to run on random input: a batch may be padded, packed or long."""
    config = getattr(module, "config", None)
    known = hasattr(config, "to_dict") and getattr(config, "model_type", None) in FAMILIES
    return known or isinstance(module, nn.TransformerEncoder | nn.Transformer)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """What tells whether a module still computes what it computed: parts, settings, hooks."""
    plain = (bool, int, float, str, type(None))
    rows = []
    for path, part in module.named_modules():
        held = vars(part)
        settings = tuple(
            (k, v) for k, v in sorted(held.items()) if type(v) in plain and k != "training"
        )
        callables = tuple(id(v) for k, v in sorted(held.items()) if callable(v))
        hooks = len(part._forward_hooks), len(part._forward_pre_hooks)
        rows.append((path, id(type(part)), settings, callables, hooks))
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return (*rows, shapes)
