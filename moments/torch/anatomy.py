"""A cache of readings: a module is read again only if its code or its entries have changed."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import DomainError, MomentsError
from ..model.huggingface import FAMILIES
from ..model.transformer import Transformer
from ..model.weights import Biases, Weights
from ..prediction.draws import STREAM, WeightGradient
from .checkpoints import drawn, is_meta
from .dataflow import ModuleReading, read
from .roles import WHOLE, HookPoint, WeightPart, is_gain, with_experts
from .running import restored

Measured = tuple[tuple[HookPoint, ...], list[tuple[WeightGradient, WeightPart]]]
"""Hook points, and parts of parameters with their rows of weight gradients."""


def hook_points(module: nn.Module, batch: Any = None) -> tuple[HookPoint, ...]:
    """Every site of a module that is the input or output of a submodule.

    Args:
        module: any; one on the meta device is read as its own initialisation would draw it.
        batch: its input, as in `moments.torch.measure`; None: random token ids, features or
            pictures.

    Raises:
        MomentsError: the module could not be read.
    """
    return anatomy_of(drawn(module)[0] if is_meta(module) else module, batch).sites


def measured_parts(module: nn.Module, batch: Any) -> Measured:
    """The hook points of a module and its trainable parameters, split into their matrices.

    Names are those of `moments.Weights`, with ".bias" for biases, "attention.norm.gain" and the
    like for norms, "token", "position", "segment", "patch" and "class" in layer 0,
    "final.norm.gain", "head.transform" and "head" in layer N + 1; with the prefix "encoder." for an
    encoder if there is a decoder too. A parameter of unknown role has its own name, in layer 0.
    """
    reading = _reading(module, batch, values=False)
    if why := reading.unlayered:
        reasons = "; ".join((*why, *(r for r in reading.reasons if r not in why)))
        raise MomentsError(
            f"the layers of {type(module).__name__} could not be distinguished: {reasons}"
        )
    roles = reading.roles
    layers = [point.layer for point in reading.sites if point.site == STREAM]
    if sorted(layers) != list(range(roles.layers + 1)):
        raise MomentsError(
            f"{type(module).__name__} was read, but no submodule gives or takes the stream of "
            "every layer, where a hook could see it: make its layers submodules"
        )
    return reading.sites, parts_of(module, reading)


def parts_of(module: nn.Module, reading: ModuleReading) -> list[tuple[WeightGradient, WeightPart]]:
    """The trainable parameters, as of `measured_parts`."""
    known = reading.roles
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    roles = [*known.roles, *known.scales]
    rows = [(WeightGradient(r.layer, r.full_name, r.parameter), r.part) for r in roles]
    rows += [(WeightGradient(0, n, n), WHOLE) for n in known.unidentified]
    return [(row, part) for row, part in rows if row.parameter in trainable]


def as_drawn(reading: ModuleReading) -> Transformer | None:
    """A module's architecture with matrices and biases as nn.Linear draws them, without tables and
    head, whose initialisation is unknown; None if no Transformer describes the module.
    """
    crosses = any(block.name == "cross" for block in reading.roles.blocks)
    if reading.model is None or (crosses and reading.model.encoder is None):
        return None  # nothing says what a decoder without encoder attends to
    return _as_drawn(reading.model)


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


def anatomy_of(module: nn.Module, batch: Any = None, *, own: bool = False) -> ModuleReading:
    """The reading of a module, from one pass or from an earlier one with the same entries; `own`:
    not one over a batch, which sets the length of the declaration.

    Raises:
        DomainError: a module on the meta device.
        MomentsError: the module could not be read.
    """
    return _reading(module, batch, values=True, own=own)


_KNOWN: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any, bool, ModuleReading]] = (
    weakref.WeakKeyDictionary()
)


def forget(module: nn.Module) -> None:
    """Remove the reading of a module from the cache."""
    _KNOWN.pop(module, None)


def _reading(module: nn.Module, batch: Any, *, values: bool, own: bool = False) -> ModuleReading:
    """As `anatomy_of`; without `values` an earlier reading is used even if entries have changed."""
    if is_meta(module):
        name = next(name for name, p in module.named_parameters() if p.is_meta)
        raise DomainError(
            f"{name} of {type(module).__name__} is on the meta device, without entries: give the "
            "module storage (to_empty(device='cpu')) and draw them; moments.torch.describe(module) "
            "says what its own initialisation would give"
        )
    structure, entries = _structure(module), _entries(module)
    known = _KNOWN.get(module)
    masked = isinstance(batch, Mapping) and any("mask" in name for name in batch)
    masked = masked and not hasattr(module, "config")
    used = batch if masked or not _runs_on_random_input(module) else None
    if known is not None and ((values and known[1] != entries) or (own and known[2])):
        known = None
    if known is None or known[0] != structure or (masked and not known[2]):
        with _readable(module):
            reading = read(module, used)
        roles = with_experts(reading.roles, dict(module.named_parameters()))
        reading = dataclasses.replace(reading, roles=roles)
        known = structure, entries, used is not None, reading
        _KNOWN[module] = known
    return known[3]


@contextmanager
def _readable(module: nn.Module) -> Iterator[None]:
    """Give a module a finite signal within the context: entries that are not finite are zero;
    norms of weight zero have ones, and tables of zeros, perhaps never drawn, normal entries.
    """
    infinite = [p for p in module.parameters() if not bool(torch.isfinite(p).all())]
    with torch.no_grad(), restored(infinite), ExitStack() as stack:
        for parameter in infinite:
            parameter.nan_to_num_(0.0, 0.0, 0.0)
        for part in module.modules():
            weight = getattr(part, "weight", None)
            if not isinstance(weight, nn.Parameter) or bool(weight.any()):
                continue
            table, norm = isinstance(part, nn.Embedding), "norm" in type(part).__name__.lower()
            if table or (norm and is_gain(part, weight)):
                stack.enter_context(restored([weight]))
                generator = torch.Generator(weight.device).manual_seed(0)
                weight.normal_(generator=generator) if table else weight.fill_(1.0)
        yield


def _runs_on_random_input(module: nn.Module) -> bool:
    """Whether random input, which is not padded, packed or long, is known to suit a module."""
    config = getattr(module, "config", None)
    known = hasattr(config, "to_dict") and getattr(config, "model_type", None) in FAMILIES
    return known or isinstance(module, nn.TransformerEncoder | nn.Transformer)


def _structure(module: nn.Module) -> tuple[Any, ...]:
    """What determines a module's computation: its parts, their settings, hooks and own methods."""
    rows = []
    for path, part in module.named_modules():
        own = {name: value for name, value in sorted(vars(part).items()) if name != "training"}
        settings = tuple((name, value) for name, value in own.items() if type(value) in _PLAIN)
        callables = tuple(id(value) for value in own.values() if callable(value))
        hooks = tuple(part._forward_hooks), tuple(part._forward_pre_hooks)
        rows.append((path, id(type(part)), settings, callables, hooks))
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return (*rows, shapes)


_PLAIN = (bool, int, float, str, type(None))


def _entries(module: nn.Module) -> tuple[Any, ...]:
    """A fingerprint of the entries of a module's tensors, registered or not."""
    values = (value for part in module.modules() for value in vars(part).values())
    own = [value for value in values if isinstance(value, Tensor | list | tuple)]
    loose = (leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor))
    return tuple(_summary(tensor) for tensor in (*module.parameters(), *module.buffers(), *loose))


def _summary(tensor: Tensor) -> tuple[Any, ...]:
    """Sum and norm: they change with a redraw or a rescaling, not with a permutation."""
    entries = tensor.detach()
    if tensor.is_meta or not entries.is_floating_point():
        return tuple(tensor.shape), str(tensor.dtype), tensor._version
    sums = torch.stack([entries.sum(), torch.linalg.vector_norm(entries)]).double()
    return tuple(tensor.shape), *(float(x).hex() for x in sums.cpu())
