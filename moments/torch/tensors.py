"""What is seen of a module's tensors, multipliers and structure, and all of it against a model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..show.findings import Row
from .advice import Advice, advise
from .architecture import promised_by
from .assumptions import Copies, copies, copy_findings
from .dataflow import ModuleReading
from .departures import Departure, departures
from .entries import EntryMoments
from .expectation import scales_of
from .findings import (
    measure_roles,
    norm_findings,
    scale_findings,
    temperature_findings,
    unchecked,
    variance_findings,
    written,
)
from .logits import logits_path, measured_scale
from .roles import ModuleRoles, Role, block_of, gain_of, gathered, tensors_of
from .running import grouped, padding_rows


@dataclass(frozen=True)
class AuditedModule:
    """What an audit sees of a module, whatever it is held against.

    Attributes:
        repeated: tensors that are another layer's.
        batch: what it is run on, if it is.
    """

    module: nn.Module
    found: ModuleRoles
    entries: tuple[tuple[Role, EntryMoments], ...]
    repeated: tuple[Copies, ...]
    reading: ModuleReading
    batch: Any
    _factors: dict[bool, float | None] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def by_role(self) -> dict[Role, EntryMoments]:
        """The same as a table."""
        return dict(self.entries)

    @functools.cached_property
    def zero(self) -> frozenset[str]:
        """Matrices whose entries are 0 in every layer."""
        groups = grouped(self.entries, lambda row: row[0].full_name)
        return frozenset(
            name
            for name, rows in groups.items()
            if rows[0][0].name in MATRICES and all(entries.square == 0 for _, entries in rows)
        )

    def names(self, *roles: str, layers: tuple[int, ...] = ()) -> tuple[str, ...]:
        """Tensors of these roles under the module's own names."""
        known = sorted(self.found.roles, key=lambda role: role.layer)
        named = [role for name in roles for role in known if role.full_name == name]
        return gathered([role for role in named if not layers or role.layer in layers])

    def logit_factor(self, model: Transformer) -> float | None:
        """What multiplies the logits, by `measured_scale`, once."""
        capped = model.head is not None and model.head.logit_softcap is not None
        if model.head is not None and capped not in self._factors:
            self._factors[capped] = measured_scale(self.module, self.found, model, self.batch)
        return self._factors.get(capped)

    @classmethod
    def of(cls, module: nn.Module, reading: ModuleReading, batch: Any) -> AuditedModule:
        """Look at the tensors of a module that was read."""
        entries, repeated = entries_of(module, reading.roles)
        reads = reading.example if batch is None else batch
        return cls(module, reading.roles, entries, repeated, reading, reads)


class Checked(NamedTuple):
    """Every check of a module's tensors, multipliers and structure, those that failed first, what
    was not checked, and fields that differ and change no signal at initialisation, in words."""

    rows: tuple[Row, ...]
    unchecked: tuple[str, ...]
    unlike: tuple[str, ...]


def checked_rows(read: AuditedModule, model: Transformer, described: Transformer | None) -> Checked:
    """Hold what was read of a module against a model."""
    module, found, sums = read.module, read.found, read.reading.sums
    rows = _weights(read.entries, read.repeated, model)
    fields = departures(model, module, read.reading, promised_by(module))
    # Norms are checked block by block among the scales, and matrices that are missing not at all.
    apart = {f"{block.stack}norm" for block in found.blocks} | set(MATRICES)
    faults = [row for row in fields if not row.remark and row.name not in apart]
    rows += [_structure(row, module) for row in faults]
    rows += scale_findings(model, found, sums)
    rows += temperature_findings(found, model)
    rows += _logits(read, model)
    return Checked(
        tuple(sorted(rows, key=lambda row: -row.size)),
        (
            *(f"{row.name} ({row})" for row in fields if row.remark and not row.silent),
            *unchecked(model, found, sums, rows),
        ),
        tuple(f"{row.name} ({row})" for row in fields if row.silent),
    )


def _structure(row: Departure, module: nn.Module) -> Row:
    """A field that no weight changes, as a check that failed."""
    both = row.planned, row.present
    planned, present = (float(v) if isinstance(v, int | float) else math.nan for v in both)
    of = 0, row.name, type(module).__name__, "architecture"
    return Row(*of, planned, present, False, str(row))


def entries_of(
    module: nn.Module, found: ModuleRoles
) -> tuple[tuple[tuple[Role, EntryMoments], ...], tuple[Copies, ...]]:
    """Every tensor's entries, and those that are another one's."""
    tensors = tensors_of(module)
    repeated = copies((role, block_of(tensors, role)) for role in found.roles)
    padding = padding_rows(module)
    entries = ((role, _entries(module, role, tensors, padding)) for role in found.roles)
    return tuple(entries), tuple(repeated)


def _weights(
    entries: Iterable[tuple[Role, EntryMoments]], repeated: Sequence[Copies], model: Transformer
) -> list[Row]:
    """Every tensor against its expectation."""
    measured = measure_roles(model, entries)
    rows = variance_findings(measured, {role for roles in repeated for role in roles[1:]})
    rows += copy_findings(repeated)
    rows += norm_findings(measured, _carried(model))
    return rows


def weight_advice(
    module: nn.Module,
    found: ModuleRoles,
    model: Transformer,
    described: Transformer | None,
) -> Advice:
    """Likely causes of what is wrong with weights, without a run; arguments as of `advise`."""
    entries, repeated = entries_of(module, found)
    rows, measured = _weights(entries, repeated, model), measure_roles(model, entries)
    return advise(rows, measured, model, described)


def _logits(read: AuditedModule, model: Transformer) -> list[Row]:
    path = logits_path(read.found)
    if path is None or model.head is None:
        return []
    wanted, factor = model.head.output_scale, read.logit_factor(model)
    return [written(model.layers + 1, "head", path, "output_scale", factor, wanted)]


def _entries(
    module: nn.Module, role: Role, tensors: Mapping[str, Any], rows: Mapping[Any, int]
) -> EntryMoments:
    block = block_of(tensors, role)
    if role.name.endswith("norm.gain"):
        block = gain_of(module, role, block)
    padding = rows.get(tensors[role.parameter])
    if padding is not None and not bool(block[padding].any()):
        keep = [row for row in range(len(block)) if row != padding % len(block)]
        block = block[keep]
    return EntryMoments.of(block)


def _carried(model: Transformer) -> dict[tuple[int, str], float]:
    """LayerNorm Scaling may sit in a norm's gain."""
    return {
        (layer, f"{stack}{block}.norm"): float(factor)
        for stack, scales in scales_of(model).items()
        for layer, row in enumerate(scales.norm_output, start=1)
        for block, factor in zip(("attention", "ffn"), row, strict=True)
    }
