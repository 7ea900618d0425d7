"""A real module as a Transformer with the variances of its weights, and the role of every
parameter."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import DomainError, MomentsError, ValidityWarning
from ..files import as_frame
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from .anatomy import anatomy_of
from .architecture import check_sizes, promised_by
from .assumptions import WeightStatistics, alignment_note, copy_notes, gain_notes, notes
from .checkpoints import drawn, is_meta, opened
from .dataflow import read
from .dataflow.reading import EXACT, biases_of, in_every_layer
from .entries import EntryMoments
from .expectation import OUTSIDE, model_of_stack
from .roles import (
    ENCODER,
    HookPoint,
    ModuleRoles,
    Role,
    block_of,
    gain_of,
    layer_pattern,
    tensors_of,
)
from .running import as_named
from .tensors import Tensors

if TYPE_CHECKING:
    import pandas

NO_ROLE = ": no role is known"
"""Remark on a parameter of unknown role."""


def describe(
    module: nn.Module | str | os.PathLike[str],
    batch: Any = None,
    *,
    seq_len: int | None = None,
    architecture: Transformer | None = None,
) -> Description:
    """A module or checkpoint as a Transformer with its real variances, and its parameters by role.

    A variance is the mean square of a matrix's entries, a gain the root mean square of a norm's
    weight. The module is run once, and its operations are followed from the tables to the logits.

    Args:
        module: any; or the path of a checkpoint's folder, or of a .safetensors file with
            config.json next to it. One on the meta device is described as its own initialisation
            would draw it.
        batch: its input; None: random token ids, features or pictures.
        seq_len: tokens per sequence; None: what the config allows, or 128.
        architecture: the module's architecture, if one pass does not show it.

    Returns:
        A Description: `model`, `roles`, `unplaced`, `str(...)`, `to_frame()`.

    Raises:
        DomainError: the checkpoint cannot be read.
        MomentsError: the module cannot be run, or has no attention on a residual stream and no
            config of a known type.

    Warns:
        ValidityWarning: for every assumption of the theory that the weights break, with numbers:
            layers that are copies of one another, means that are not zero, heavy tails, dominant
            singular values, query and key that are not independent, gains that differ between
            features.
    """
    module = opened(module)
    module, lost = drawn(module) if is_meta(module) else (module, ())
    batch = as_named(module, batch)
    model = architecture
    if model is None and hasattr(module, "config"):
        model = promised_by(module, seq_len)
    own = model is None and batch is None and seq_len is None
    try:
        if model is None and not own:
            reading = read(module, batch, seq_len)
        else:
            reading = anatomy_of(module, batch, own=own)
    except DomainError:
        raise
    except MomentsError as error:
        if model is None or architecture is not None:
            raise
        return _by_config(module, model, str(error), lost)
    tensors = Tensors.of(module, reading)
    unplaced = tuple(f"{name}{NO_ROLE}" for name in reading.roles.unidentified)
    notes = lost
    if model is None:
        model, unplaced = reading.model, (*reading.reasons, *unplaced)
        notes = (*reading.doubts, *lost)
    else:
        try:
            model = described_as(model, tensors)
        except DomainError as error:
            if architecture is not None or not reading.reasons:
                raise
            return _by_config(module, model, "; ".join((*reading.reasons, str(error))), lost)
    for note in broken(tensors):
        warnings.warn(note, ValidityWarning, stacklevel=2)
    return Description(module, model, reading.roles, unplaced, reading.sites, notes)


def _by_config(
    module: nn.Module, model: Transformer, why: str, lost: tuple[str, ...]
) -> Description:
    """A module whose layers one pass does not show, as its config declares it."""
    names = tuple(name for name, _ in module.named_parameters())
    note = (
        "the model is that of its config, with the config's variances; moments.check compares "
        "every parameter with what its class draws"
    )
    roles = ModuleRoles(layers=model.layers, roles=(), unidentified=names, blocks=())
    return Description(module, model, roles, (f"its layers: {why}",), (), (note, *lost))


def described_as(model: Transformer, read: Tensors) -> Transformer:
    """An architecture with a module's own variances and multipliers.

    Raises:
        DomainError: an architecture of other sizes, or variances that it cannot have.
    """
    check_sizes(model, read.reading.roles, None)
    result = _with_variances(model, read)
    if model.encoder is not None:
        result = result.replace(encoder=_with_variances(model, read, ENCODER))
    return result


@dataclass(frozen=True)
class Description:
    """The result of `describe`.

    Attributes:
        module: the described module.
        model: the Transformer with the module's variances; None if no Transformer describes the
            module, for the reasons in `unplaced`.
        found: parameters by role, and residual branches.
        unplaced: what has no place in the model, and why, in phrases.
        sites: hook points.
        notes: what was assumed, in phrases.
    """

    module: nn.Module
    model: Transformer | None
    found: ModuleRoles
    unplaced: tuple[str, ...]
    sites: tuple[HookPoint, ...]
    notes: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, tuple[Role, ...]]:
        """Every parameter's name with its roles: several if it is fused, none if unknown."""
        named: dict[str, tuple[Role, ...]] = {n: () for n, _ in self.module.named_parameters()}
        for role in (*self.found.roles, *self.found.scales):
            named[role.parameter] = (*named.get(role.parameter, ()), role)
        return named

    def to_frame(self) -> pandas.DataFrame:
        """One row per parameter and role: parameter, layer, role ("" if not known), fan_in,
        fan_out, variance (mean square of its entries).
        """
        columns = ["parameter", "layer", "role", "fan_in", "fan_out", "variance"]
        return as_frame(list(self._rows()), columns=columns)

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        tensors = tensors_of(self.module)
        for name, roles in self.roles.items():
            for role in roles:
                square = float(block_of(tensors, role).double().square().mean())
                yield role.label, role.layer, role.full_name, role.fan_in, role.fan_out, square
            if not roles:
                square = float(tensors[name].detach().double().square().mean())
                yield name, 0, "", 0, 0, square

    def __str__(self) -> str:
        lines = [f"{type(self.module).__name__}:"]
        if self.model is None:
            lines[0] += " nothing that moments.Transformer declares"
        else:
            lines += str(self.model).splitlines()
        for name, words in (("not placed", self.unplaced), ("assumed", self.notes)):
            if words:
                lines += [f"{name}:", *(f"  {phrase}" for phrase in words)]
        lines += ["parameters:", *(f"  {row}" for row in self._patterns())]
        return "\n".join(lines)

    def _patterns(self) -> list[str]:
        """Names, with {layer} for the layer's number, and their roles."""
        lines: dict[str, str] = {}
        for name, roles in self.roles.items():
            role = "+".join(dict.fromkeys(r.full_name for r in roles)) or "?"
            layered = any(1 <= r.layer <= self.found.layers for r in roles)
            lines.setdefault(layer_pattern(name) if layered else name, role)
        return [f'"{pattern}": "{role}",' for pattern, role in lines.items()]


def weight_statistics(module: nn.Module) -> pandas.DataFrame:
    """Every matrix of a module against independent entries of its variance.

    Args:
        module: any that can be read.

    Returns:
        Columns layer, role, parameter, variance (mean square), mean, kurtosis, spectral (largest
        squared singular value over that of independent entries), stable_rank.

    Raises:
        MomentsError: the module could not be read.
    """
    roles = anatomy_of(module).roles
    tensors = tensors_of(module)
    rows = []
    for role in roles.roles:
        if role.is_matrix:
            block = block_of(tensors, role)
            s = WeightStatistics.of(role, block, EntryMoments.of(block))
            moments = s.entries.square, s.entries.mean, s.entries.kurtosis
            where = role.layer, role.full_name, role.label
            rows.append((*where, *moments, s.spectral, s.stable_rank))
    columns = ["layer", "role", "parameter", "variance", "mean", "kurtosis", "spectral"]
    return as_frame(rows, columns=[*columns, "stable_rank"])


Entries = Mapping[tuple[int, str], EntryMoments]
"""Entries of one stack by layer and role."""


def _with_variances(model: Transformer, read: Tensors, stack: str = "") -> Transformer:
    """A stack of a model with the module's own variances, and its multipliers if they were read."""
    model, own = model_of_stack(model, stack), read.reading.model
    own = own.encoder if own is not None and stack else own
    assert model.weights is not None
    entries = {(r.layer, r.name): e for r, e in read.entries if r.stack == stack}
    squares = {place: moments.square for place, moments in entries.items()}
    scales = ("skip_scale", "branch_scale", "norm_gain", "layernorm_scaling")
    return model.replace(
        weights=model.weights.replace(**in_every_layer(MATRICES, model.layers, squares)),
        biases=biases_of(model.layers, squares),
        **({} if own is None else {name: getattr(own, name) for name in scales}),
        **_outside(model, entries, None if stack else read.reading.logit_scale),
    )


def _outside(model: Transformer, entries: Entries, scale: float | None) -> dict[str, Any]:
    """The embedding and the head with the module's variances; `scale`: of the logits, if known."""
    changes: dict[str, Any] = {}
    for field, layer in (("embedding", 0), ("head", model.layers + 1)):
        part = getattr(model, field)
        if part is None:
            continue
        values = {
            name: entries[layer, role].square
            for role, (of, name) in OUTSIDE.items()
            if of == field and (layer, role) in entries and getattr(part, name, None) is not None
        }
        after = entries.get((layer, "final.norm.gain"))
        if field == "head" and part.norm and after is not None:
            values["norm_gain"] = math.sqrt(after.square)
        changes[field] = part.replace(**values)
    head = changes.get("head")
    if head is not None and scale is not None and abs(scale / head.output_scale - 1) > EXACT:
        changes["head"] = head.replace(output_scale=scale)
    return changes


def broken(read: Tensors) -> list[str]:
    """Assumptions of the theory that the weights violate, in sentences."""
    module, roles, tensors = read.module, read.reading.roles, tensors_of(read.module)
    blocks = {role: block_of(tensors, role) for role in roles.roles}
    matrices = [
        WeightStatistics.of(role, blocks[role], moments)
        for role, moments in dict(read.entries).items()
        if role.is_matrix and role.name in MATRICES
    ]
    lines = [*copy_notes(read.repeated), *notes(matrices)]
    pairs = [[(role, blocks[role]) for role in roles.named(name)] for name in ("query", "key")]
    lines += alignment_note(*pairs)
    lines += gain_notes(
        [
            (role, gain_of(module, role, block))
            for role, block in blocks.items()
            if role.name.endswith("norm.gain")
        ]
    )
    return lines
