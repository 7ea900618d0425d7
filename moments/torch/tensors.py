"""A module's tensors, multipliers and structure, and all of it against what a model says."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..show.expected import tail_probability
from ..show.findings import Finding, Row
from ..show.outliers import odd_layers
from .architecture import departures, phrase_of, promised_by
from .assumptions import Copies, copies, copy_findings
from .dataflow import ModuleReading
from .entries import EntryMoments
from .expectation import expected_variance, model_of_stack, scales_of, stacks_in
from .roles import (
    ModuleRoles,
    Role,
    Sums,
    block_of,
    gain_of,
    gathered,
    gathered_names,
    in_layers,
    tensors_of,
)
from .running import grouped, padding_rows
from .scales import logits_path

FALSE_ALARM = 1e-5
"""Probability that an audit of a correct module fails at all, over all its checks together."""

WRITTEN = 1e-3
"""Relative error taken for entries and multipliers that were written, not drawn."""

CONSTANT = 1.01
"""Kurtosis below which entries have one magnitude, as written ones have (1)."""

SLACK = 2e-3
"""Relative error of a multiplier that single precision and rounding may leave."""


@dataclass(frozen=True)
class Measured:
    """A role, its entries and what the model expects of their mean square."""

    role: Role
    entries: EntryMoments
    expected: float | None

    def row(
        self,
        quantity: str,
        expected: float,
        measured: float,
        passed: bool,
        note: str,
        **chance: Any,
    ) -> Row:
        """A check of these entries."""
        of = self.role.layer, self.role.full_name, self.role.label
        return Row(*of, quantity, expected, measured, passed, note, **chance)


@dataclass(frozen=True)
class Tensors:
    """What is seen of a module's tensors, whatever they are compared with.

    Attributes:
        repeated: tensors that are another layer's.
    """

    module: nn.Module
    reading: ModuleReading
    entries: tuple[tuple[Role, EntryMoments], ...]
    repeated: tuple[Copies, ...]

    @classmethod
    def of(cls, module: nn.Module, reading: ModuleReading) -> Tensors:
        """Look at the tensors of a module that was read."""
        tensors, padding, roles = tensors_of(module), padding_rows(module), reading.roles.roles
        repeated = copies((role, block_of(tensors, role)) for role in roles)
        entries = ((role, _entries(module, role, tensors, padding)) for role in roles)
        return cls(module, reading, tuple(entries), tuple(repeated))

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
        known = sorted(self.reading.roles.roles, key=lambda role: role.layer)
        named = [role for name in roles for role in known if role.full_name == name]
        return gathered([role for role in named if not layers or role.layer in layers])


def _entries(
    module: nn.Module, role: Role, tensors: Mapping[str, Any], padding: Mapping[Any, int]
) -> EntryMoments:
    block = block_of(tensors, role)
    if role.name.endswith("norm.gain"):
        block = gain_of(module, role, block)
    row = padding.get(tensors[role.parameter])
    if row is not None and not bool(block[row].any()):
        block = block[[n for n in range(len(block)) if n != row % len(block)]]
    return EntryMoments.of(block)


@dataclass(frozen=True)
class Checked:
    """A module against a model.

    Attributes:
        measured: every role beside its expectation.
        rows: every check, those that failed first.
        unchecked: what was not checked, a phrase each.
        unlike: fields that differ and change no signal at initialisation, likewise.
    """

    measured: list[Measured]
    rows: tuple[Row, ...]
    unchecked: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()

    @classmethod
    def entries(cls, read: Tensors, model: Transformer) -> Checked:
        """Of entries alone."""
        measured = [Measured(r, e, expected_variance(model, r)) for r, e in read.entries]
        rows = variance_findings(measured, {r for roles in read.repeated for r in roles[1:]})
        rows += copy_findings(read.repeated)
        return cls(measured, (*rows, *norm_findings(measured, _carried(model))))

    @classmethod
    def of(cls, read: Tensors, model: Transformer) -> Checked:
        """Of entries, multipliers and structure."""
        module, roles, sums = read.module, read.reading.roles, read.reading.sums
        drawn = cls.entries(read, model)
        fields = departures(model, module, read.reading, promised_by(module))
        # Norms are checked block by block among the scales, missing matrices not at all.
        apart = {f"{block.stack}norm" for block in roles.blocks} | set(MATRICES)
        rows = [
            *drawn.rows,
            *(row for row in fields if row.passed is False and row.role not in apart),
            *scale_findings(model, roles, sums),
            *temperature_findings(roles, model),
        ]
        if (path := logits_path(roles)) is not None and model.head is not None:
            of = model.layers + 1, "head", path, "output_scale", read.reading.logit_scale
            rows.append(written(*of, model.head.output_scale))
        open_fields = (phrase_of(row) for row in fields if row.passed is None)
        return cls(
            drawn.measured,
            tuple(sorted(rows, key=lambda row: -row.size)),
            (*open_fields, *unchecked(model, roles, sums, rows)),
            tuple(phrase_of(row) for row in fields if row.passed),
        )


def _carried(model: Transformer) -> dict[tuple[int, str], float]:
    """LayerNorm Scaling may sit in a norm's gain."""
    return {
        (layer, f"{stack}{block}.norm"): float(factor)
        for stack, scales in scales_of(model).items()
        for layer, row in enumerate(scales.norm_output, start=1)
        for block, factor in zip(("attention", "ffn"), row, strict=True)
    }


# --- one comparison each --------------------------------------------------------------------------


def variance_findings(measured: Iterable[Measured], copied: Container[Role] = ()) -> list[Row]:
    """Mean square and mean of every tensor, and the mean square of a role over all layers, to which
    tensors that are copied add nothing.
    """
    norms = ("norm.gain", "norm.bias")
    drawn = [m for m in measured if m.expected is not None and not m.role.name.endswith(norms)]
    alone = (m for m in drawn if m.role not in copied)
    groups = grouped(alone, lambda m: (m.role.full_name, m.role.layer > 0))
    several = [group for group in groups.values() if len(group) > 1]
    limit = FALSE_ALARM / max(1, 2 * len(drawn) + len(several))  # Bonferroni
    findings = [_variance(m, limit) for m in drawn]
    findings += [f for m in drawn if (f := _mean(m, limit)) is not None]
    failed = {(f.role, f.quantity) for f in findings if f.passed is False}
    for group in several:
        pooled = _pooled(group, limit)
        if pooled is not None and (pooled.role, "variance") not in failed:
            findings.append(pooled)
    return findings


def _variance(m: Measured, limit: float) -> Row:
    expected, entries = float(m.expected or 0.0), m.entries
    base = "variance", expected, entries.square
    if not math.isfinite(entries.square):
        return m.row(*base, False, "entries are not finite", stderr=math.nan)
    if expected == 0:
        return m.row(*base, entries.square == 0, entries.distribution)
    if entries.square == 0:
        return m.row(*base, False, "every entry is 0")
    chance = tail_probability(entries.square / expected, entries.spread)
    stderr = expected * entries.spread
    return m.row(*base, chance >= limit, entries.distribution, stderr=stderr, probability=chance)


def _mean(m: Measured, limit: float) -> Row | None:
    """Entries of mean zero; None where there are none to speak of."""
    entries = m.entries
    if not m.expected or not entries.square or not math.isfinite(entries.square):
        return None
    stderr = math.sqrt(entries.square / entries.count)
    chance = math.erfc(abs(entries.mean) / stderr / math.sqrt(2))
    base = "mean", 0.0, entries.mean, chance >= limit, entries.distribution
    return m.row(*base, stderr=stderr, probability=chance)


def _pooled(group: list[Measured], limit: float) -> Row | None:
    """All layers of one role at once: a small common factor that no single tensor shows."""
    usable = [m for m in group if m.expected and m.entries.square > 0]
    if len(usable) < 2:
        return None
    count = sum(m.entries.count for m in usable)
    ratio = sum(m.entries.count * m.entries.square / float(m.expected or 1) for m in usable) / count
    variance = sum((m.entries.count * m.entries.spread) ** 2 for m in usable) / count**2
    spread = math.sqrt(variance)
    chance = tail_probability(ratio, spread)
    first, last = usable[0].role, usable[-1].role
    of = 0, first.full_name, f"{first.label} ... {last.label}", "variance over its expectation"
    note = f"{len(usable)} layers together"
    return Row(*of, 1.0, ratio, chance >= limit, note, spread, chance)


def odd_tensors(
    rows: Mapping[str, Mapping[int, Sequence[tuple[str, EntryMoments]]]],
    count: int,
    zero: Collection[str] = (),
) -> Iterator[tuple[str, Finding]]:
    """Layers whose entries are unlike those of all others, with the name of the row.

    Args:
        rows: by name and layer, names of tensors with their entries.
        count: of rows that are asked about together.
        zero: names of which no layer may be zero where others are not.
    """
    for name, by_layer in rows.items():
        layers = sorted(by_layer)
        parts = [[entries for _, entries in by_layer[n]] for n in layers]
        sizes = [sum(e.count for e in part) for part in parts]
        both = list(zip(parts, sizes, strict=True))
        squares = [sum(e.count * e.square for e in part) / size for part, size in both]
        spreads = [
            math.hypot(*(e.count * (e.spread if e.square else 0.0) for e in part)) / size
            for part, size in both
        ]
        if all(max(e.kurtosis for e in part) < CONSTANT for part in parts if part[0].square):
            spreads = [WRITTEN] * len(layers)
        odd = set(odd_layers(squares, spreads, count))
        if name in zero and any(squares):
            odd |= {place for place, square in enumerate(squares) if square == 0}
        for place in sorted(odd):
            others = [s for n, s in enumerate(squares) if n != place]
            names = gathered_names([label for label, _ in by_layer[layers[place]]])
            yield name, _odd(name, layers[place], names, squares[place], float(np.median(others)))


def _odd(name: str, layer: int, names: tuple[str, ...], here: float, rest: float) -> Finding:
    if not here:
        words = "every entry is 0, where those of the other layers are not"
    elif not rest:
        words = f"entries have a mean square of {here:.3g}, where the other layers' are 0"
    else:
        words = (
            f"entries have {here / rest:.3g} times the mean square of the other layers' "
            f"({math.sqrt(here):.3g} for {math.sqrt(rest):.3g}, root mean square)"
        )
    mend = "initialise every layer by the same code" + f": std {math.sqrt(rest):.3g}" * (rest > 0)
    why = f"{name} of layer {layer}: {words}"
    return Finding("warning", "odd layer", names, (layer,), here, rest, why, mend)


def norm_findings(
    measured: Iterable[Measured], carried: dict[tuple[int, str], float]
) -> Iterator[Row]:
    """Gains and biases of norms; `carried`: factors of LayerNorm Scaling that a gain may hold."""
    for m in measured:
        name = m.role.name
        if not name.endswith(("norm.gain", "norm.bias")):
            continue
        usual = float(name.endswith("gain"))  # of a head that is not declared, too
        expected = usual if m.expected is None else m.expected
        quantity, value = "mean square", m.entries.square
        if name.endswith("gain"):
            quantity, value, expected = "gain", math.sqrt(value), math.sqrt(expected)
            factor = carried.get((m.role.layer, m.role.full_name.removesuffix(".gain")), 1.0)
            if abs(value - expected * factor) <= SLACK * expected:
                expected *= factor
        passed = abs(value - expected) <= SLACK * max(expected, 0.0) + 1e-12
        yield m.row(quantity, expected, value, passed, "")


def scale_findings(model: Transformer, roles: ModuleRoles, sums: Sums) -> Iterator[Row]:
    """Residual multipliers, norm factors, the norm's kind and the form of the sum itself."""
    scales = scales_of(model)
    paths = {(block.stack, block.layer, block.name): block for block in roles.blocks}
    for (prefix, layer, name), one in sums.items():
        stack, block = model_of_stack(model, prefix), paths.get((prefix, layer, name))
        if layer > stack.layers:
            continue
        column = int(name == "ffn")
        skip, branch, _, output = scales[prefix].at(layer, column)
        path, behind, norm = ("",) * 3
        if block is not None:
            path, behind, norm = block.path, block.branch.path, block.norm or ""
        own, wanted = f"{prefix}{name}", stack.placements[layer - 1]
        of = layer, f"{own} sum", path
        if wanted != one.placement:
            note = f"the norm sits {one.placement!r}, the plan wants {wanted!r}"
            yield Row(*of, "norm placement", 1, 0, False, note)
        if not one.whole:
            note = "not lambda x + beta f: norms or sums are placed otherwise"
            yield Row(*of, "unexplained share of the sum", 0.0, math.nan, False, note)
            continue
        yield written(layer, own, path, "skip_scale", one.skip, skip)
        yield written(layer, own, behind, "branch_scale", one.branch, branch)
        if one.norm is not None and one.placement == wanted:
            output *= float(stack.norm_gains[layer - 1, column])
            yield written(layer, f"{own}.norm", norm, "norm_output_scale", one.norm, output)


def written(
    layer: int, role: str, path: str, quantity: str, value: float | None, expected: float
) -> Row:
    """A multiplier against the one that is wanted."""
    of = layer, role, path, quantity, expected
    if value is None:
        note = "what it multiplies is 0 throughout, so that it cannot be measured"
        return Row(*of, math.nan, None, note, math.nan)
    return Row(*of, value, abs(value - expected) <= SLACK * abs(expected) + 1e-9)


def unchecked(
    model: Transformer, roles: ModuleRoles, sums: Sums, findings: Iterable[Row] = ()
) -> tuple[str, ...]:
    """What of a model was not checked, a phrase each."""
    words = list(_unread(model, sums))
    for stack, stack_model in stacks_in(model).items():
        there = {(role.layer, role.name) for role in roles.roles if role.stack == stack}
        for name in stack_model.matrix_shapes:
            lacking = [n for n in range(1, stack_model.layers + 1) if (n, name) not in there]
            if lacking:
                where = in_layers(lacking, stack_model.layers)
                words.append(f"{stack}{name}{where} (no parameter has this role)")
    silent = dict.fromkeys(
        role.full_name for role in roles.roles if expected_variance(model, role) is None
    )
    if silent:
        words.append(f"{', '.join(silent)} (of which nothing is planned)")
    if count := len(roles.unidentified):
        words.append(f"{count} parameter{'s' * (count > 1)} of unknown role")
    notes = {f.quantity: f.note for f in findings if f.passed is None}
    words += [f"some {quantity.replace('_', ' ')}s ({note})" for quantity, note in notes.items()]
    return tuple(words)


def _unread(model: Transformer, sums: Sums) -> Iterator[str]:
    for stack, of_stack in stacks_in(model).items():
        names = ("attention", "ffn") if of_stack.encoder is None else ("attention", "cross", "ffn")
        for name in names:
            layers = [n for n in range(1, of_stack.layers + 1) if (stack, n, name) not in sums]
            if layers:
                where = in_layers(layers, of_stack.layers)
                what = "residual multipliers, norm factors and norm placement"
                unseen = "their sum with the stream was not recognised"
                yield f"{what} of {stack}{name} blocks{where} ({unseen})"


def temperature_findings(roles: ModuleRoles, model: Transformer) -> Iterator[Row]:
    """Every layer's temperature against the model's."""
    for role, wanted, present in temperatures(roles, model):
        base = role.layer, role.stack + attention_of(role), role.label, "temperature", wanted
        if present is None:
            yield Row(*base, math.nan, None, "the factor on q k was not recognised", math.nan)
        else:
            yield Row(*base, present, bool(np.isclose(present, wanted, rtol=SLACK)))


def temperatures(
    roles: ModuleRoles, model: Transformer
) -> Iterator[tuple[Role, float, float | None]]:
    """Every query matrix with its temperature in the model and in the module."""
    seen = {tuple(place): factor for *place, factor in roles.multipliers}
    for stack, wanted in stacks_in(model).items():
        width = math.sqrt(model_of_stack(model, stack).d_head or 1)
        for role in roles.named("query", "cross_query", stack=stack):
            factor = seen.get((stack, role.layer, attention_of(role)))
            present = None if factor is None else 1 / (width * factor)
            yield role, float(wanted.temperatures[role.layer - 1]), present


def attention_of(role: Role) -> str:
    return "cross" if role.name.startswith("cross") else "attention"
