"""What a module is made of, whoever knows it: its author, a family, or one pass through it."""

from __future__ import annotations

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
from .checkpoints import is_meta
from .dataflow import ModuleReading, read
from .draft import unread
from .hook_points import HookPoint, WeightPart, hook_points, points_of, weight_parts
from .roles import ModuleRoles, roles_of

with optional("torch", "torch"):
    from torch import nn


@dataclass(frozen=True)
class Anatomy:
    """A module's parts.

    Attributes:
        found: parameters by role, and residual branches.
        sites: hook points; None where the user named parameters alone.
        reading: what one pass told, of a module that no family knows.
        given: the user's hook points.
    """

    found: ModuleRoles
    sites: tuple[HookPoint, ...] | None
    reading: ModuleReading | None = None
    given: bool = False

    def parts(self, module: nn.Module) -> list[tuple[WeightGradient, WeightPart]]:
        """Every parameter that can learn, split into its matrices, as `weight_parts` has them."""
        if self.reading is None:
            return weight_parts(module, self.sites if self.given else None)
        learn = {name for name, p in module.named_parameters() if p.requires_grad}
        roles = [*self.found.roles, *self.found.scales]
        rows = [(WeightGradient(r.layer, r.full_name, r.parameter), r.part) for r in roles]
        rows += [
            (WeightGradient(0, name, name), WeightPart(name, name))
            for name in self.found.unidentified
        ]
        return [(row, part) for row, part in rows if row.parameter in learn]

    @property
    def example(self) -> Any:
        """What the module was run on to be read; None where a family knows it."""
        return None if self.reading is None else self.reading.example

    def architecture(self) -> Transformer | None:
        """Of a module that one pass told: its shape, as nn.Linear draws matrices and biases.

        Of its tables and its head nothing is said, since nothing in it tells how they are meant to
        be drawn.
        """
        if self.reading is None or self.reading.model is None:
            return None
        return _as_drawn(self.reading.model)


Measured = tuple[tuple[HookPoint, ...], list[tuple[WeightGradient, WeightPart]]]
"""Where to watch a module, and what its parameters are."""


def measured_parts(module: nn.Module, batch: Any, sites: tuple[HookPoint, ...] | None) -> Measured:
    """Where a module is watched, and its parameters by role.

    Raises:
        MomentsError: that is not known, or no submodule gives the stream.
    """
    if sites is not None:
        return sites, weight_parts(module, sites)
    try:
        return hook_points(module), weight_parts(module)
    except MomentsError:
        parts = anatomy_of(module, batch)
    points = parts.sites or ()
    layers = [point.layer for point in points if point.site == STREAM]
    if sorted(layers) != list(range(parts.found.layers + 1)):
        raise MomentsError(
            f"{type(module).__name__} was read, but no submodule gives or takes the stream of "
            "every layer, where a hook could see it: make its layers submodules"
        )
    return points, parts.parts(module)


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
    """A module's parts, as its author names them, its family does, or one pass tells.

    Args:
        batch: what it reads, as in `moments.torch.measure`; for a module that no family knows.
        names, sites: for a module of one's own, as in `roles_of`.

    Raises:
        DomainError: a module on the meta device, a pattern of `names` that matches nothing, or an
            unknown role.
        MomentsError: no family knows the module, and it could not be read.
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
        return Anatomy(roles_of(module, names, given), given, given=given is not None)
    if given is None and of_another_type(module):
        # Layers that look like a family's may be put together otherwise.
        with suppress(MomentsError):
            reading = _read(module, batch)
            if reading.model is not None:
                return Anatomy(reading.roles, reading.sites, reading)
    try:
        found = roles_of(module, None, given)
        return Anatomy(found, given or hook_points(module), given=given is not None)
    except DomainError:
        raise
    except MomentsError as error:
        try:
            reading = _read(module, batch)
        except MomentsError as why:
            draft = unread(module, "say what these are, and pass them as names=")
            raise MomentsError(f"{why}\n{error}\n{draft}") from None
    return Anatomy(reading.roles, given or reading.sites, reading, given is not None)


def of_another_type(module: nn.Module) -> bool:
    """Whether a module's config names a type that no reader knows."""
    config = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    return hasattr(config, "to_dict") and isinstance(kind, str) and kind not in FAMILIES


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
        known = mark, read(module, batch)
        _KNOWN[module] = known
    return known[1]


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
