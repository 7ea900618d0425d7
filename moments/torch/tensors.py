"""Checks of a module's tensors, multipliers and structure against a model."""

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
from .assumptions import Copies, copies, copy_rows
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
"""Probability that an audit of a correct module fails, over all its checks together."""

WRITTEN = 1e-3
"""Relative tolerance of entries and multipliers that are set to a value, not drawn."""

CONSTANT = 1.01
"""Kurtosis up to which entries have one magnitude (1), as entries that are set have."""

SLACK = 2e-3
"""Relative tolerance of a multiplier, for single precision and rounding."""


@dataclass(frozen=True)
class Measured:
    """A role, the moments of its entries and their mean square in the model, if it says one."""

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
        where = self.role.layer, self.role.full_name, self.role.label
        return Row(*where, quantity, expected, measured, passed, note, **chance)


@dataclass(frozen=True)
class Tensors:
    """A module's tensors: moments of the entries of every role, and those that are `repeated` in
    several layers."""

    module: nn.Module
    reading: ModuleReading
    entries: tuple[tuple[Role, EntryMoments], ...]
    repeated: tuple[Copies, ...]

    @classmethod
    def of(cls, module: nn.Module, reading: ModuleReading) -> Tensors:
        """The tensors of a module and its reading."""
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
        """The module's own names of the tensors of these roles, in some layers or in all."""
        ordered = sorted(self.reading.roles.roles, key=lambda role: role.layer)
        named = [role for name in roles for role in ordered if role.full_name == name]
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
    """The checks of a module against a model.

    Attributes:
        measured: every role with its expected mean square.
        rows: every check, failed ones first.
        unchecked: what was not checked, in phrases.
        unlike: fields that differ but change no signal at initialisation, in phrases.
    """

    measured: list[Measured]
    rows: tuple[Row, ...]
    unchecked: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()

    @classmethod
    def entries(cls, read: Tensors, model: Transformer) -> Checked:
        """The checks of entries."""
        measured = [Measured(r, e, expected_variance(model, r)) for r, e in read.entries]
        rows = variance_rows(measured, {r for roles in read.repeated for r in roles[1:]})
        rows += copy_rows(read.repeated)
        return cls(measured, (*rows, *norm_rows(measured, model)))

    @classmethod
    def of(cls, read: Tensors, model: Transformer) -> Checked:
        """The checks of entries, multipliers and structure."""
        module, roles, sums = read.module, read.reading.roles, read.reading.sums
        entries = cls.entries(read, model)
        fields = departures(model, module, read.reading, promised_by(module))
        # Norms are checked by block among the scales, missing matrices not at all.
        skipped = {f"{block.stack}norm" for block in roles.blocks} | set(MATRICES)
        rows = [
            *entries.rows,
            *(row for row in fields if row.passed is False and row.role not in skipped),
            *scale_rows(model, roles, sums),
            *temperature_rows(roles, sums, model),
        ]
        if (path := logits_path(roles)) is not None and model.head is not None:
            where = model.layers + 1, "head", path, "output_scale"
            rows.append(multiplier_row(*where, read.reading.logit_scale, model.head.output_scale))
        open_fields = (phrase_of(row) for row in fields if row.passed is None)
        return cls(
            entries.measured,
            tuple(sorted(rows, key=lambda row: -row.size)),
            (*open_fields, *unchecked(model, roles, sums, rows)),
            tuple(phrase_of(row) for row in fields if row.passed),
        )


# --- checks ---------------------------------------------------------------------------------------


def variance_rows(measured: Iterable[Measured], copied: Container[Role] = ()) -> list[Row]:
    """Checks of the mean square and the mean of every tensor, and of the mean square of every role
    over all layers, without the tensors that are copied.
    """
    norms = ("norm.gain", "norm.bias")
    drawn = [m for m in measured if m.expected is not None and not m.role.name.endswith(norms)]
    independent = (m for m in drawn if m.role not in copied)
    groups = grouped(independent, lambda m: (m.role.full_name, m.role.layer > 0))
    several = [group for group in groups.values() if len(group) > 1]
    limit = FALSE_ALARM / max(1, 2 * len(drawn) + len(several))  # Bonferroni
    rows = [_variance(m, limit) for m in drawn]
    rows += [row for m in drawn if (row := _mean(m, limit)) is not None]
    failed = {(row.role, row.quantity) for row in rows if row.passed is False}
    for group in several:
        pooled = _pooled(group, limit)
        if pooled is not None and (pooled.role, "variance") not in failed:
            rows.append(pooled)
    return rows


def _variance(m: Measured, limit: float) -> Row:
    expected, entries = float(m.expected or 0.0), m.entries
    numbers = "variance", expected, entries.square
    if not math.isfinite(entries.square):
        return m.row(*numbers, False, "entries are not finite", stderr=math.nan)
    if expected == 0:
        return m.row(*numbers, entries.square == 0, entries.distribution)
    if entries.square == 0:
        return m.row(*numbers, False, "every entry is 0")
    p = tail_probability(entries.square / expected, entries.spread)
    stderr = expected * entries.spread
    return m.row(*numbers, p >= limit, entries.distribution, stderr=stderr, probability=p)


def _mean(m: Measured, limit: float) -> Row | None:
    """A check that entries have mean zero; None for entries that are zero or not finite."""
    entries = m.entries
    if not m.expected or not entries.square or not math.isfinite(entries.square):
        return None
    stderr = math.sqrt(entries.square / entries.count)
    p = math.erfc(abs(entries.mean) / stderr / math.sqrt(2))
    numbers = "mean", 0.0, entries.mean, p >= limit, entries.distribution
    return m.row(*numbers, stderr=stderr, probability=p)


def _pooled(group: list[Measured], limit: float) -> Row | None:
    """A check of all layers of a role together, for a common factor too small to show in one."""
    usable = [m for m in group if m.expected and m.entries.square > 0]
    if len(usable) < 2:
        return None
    count = sum(m.entries.count for m in usable)
    ratio = sum(m.entries.count * m.entries.square / float(m.expected or 1) for m in usable) / count
    spread = math.sqrt(sum((m.entries.count * m.entries.spread) ** 2 for m in usable) / count**2)
    p = tail_probability(ratio, spread)
    first, last = usable[0].role, usable[-1].role
    where = 0, first.full_name, f"{first.label} ... {last.label}", "variance over its expectation"
    return Row(*where, 1.0, ratio, p >= limit, f"{len(usable)} layers together", spread, p)


def odd_tensors(
    rows: Mapping[str, Mapping[int, Sequence[tuple[str, EntryMoments]]]],
    count: int,
    zero: Collection[str] = (),
) -> Iterator[tuple[str, Finding]]:
    """Findings on layers whose entries differ from those of all others, each with its row's name.

    Args:
        rows: name -> layer -> names of tensors with the moments of their entries.
        count: number of rows that are tested together.
        zero: names of which no layer may be zero unless all are.
    """
    for name, by_layer in rows.items():
        layers = sorted(by_layer)
        parts = [[entries for _, entries in by_layer[n]] for n in layers]
        sizes = [sum(e.count for e in part) for part in parts]
        sized = list(zip(parts, sizes, strict=True))
        squares = [sum(e.count * e.square for e in part) / size for part, size in sized]
        spreads = [
            math.hypot(*(e.count * (e.spread if e.square else 0.0) for e in part)) / size
            for part, size in sized
        ]
        if all(max(e.kurtosis for e in part) < CONSTANT for part in parts if part[0].square):
            spreads = [WRITTEN] * len(layers)
        odd = set(odd_layers(squares, spreads, count))
        if name in zero and any(squares):
            odd |= {place for place, square in enumerate(squares) if square == 0}
        for place in sorted(odd):
            median = float(np.median([s for n, s in enumerate(squares) if n != place]))
            names = gathered_names([label for label, _ in by_layer[layers[place]]])
            yield name, _odd_layer(name, layers[place], names, squares[place], median)


def _odd_layer(
    name: str, layer: int, names: tuple[str, ...], square: float, others: float
) -> Finding:
    if not square:
        words = "every entry is 0, where those of the other layers are not"
    elif not others:
        words = f"entries have a mean square of {square:.3g}, where the other layers' are 0"
    else:
        words = (
            f"entries have {square / others:.3g} times the mean square of the other layers' "
            f"({math.sqrt(square):.3g} for {math.sqrt(others):.3g}, root mean square)"
        )
    mend = "initialise every layer by the same code"
    mend += f": std {math.sqrt(others):.3g}" if others > 0 else ""
    why = f"{name} of layer {layer}: {words}"
    return Finding("warning", "odd layer", names, (layer,), square, others, why, mend)


def norm_rows(measured: Iterable[Measured], model: Transformer) -> Iterator[Row]:
    """Checks of gains and biases of norms; a gain may contain the factor of LayerNorm Scaling."""
    factors = {
        (layer, f"{stack}{block}.norm.gain"): float(factor)
        for stack, scales in scales_of(model).items()
        for layer, row in enumerate(scales.norm_output, start=1)
        for block, factor in zip(("attention", "ffn"), row, strict=True)
    }
    for m in measured:
        name = m.role.name
        if not name.endswith(("norm.gain", "norm.bias")):
            continue
        usual = float(name.endswith("gain"))  # also of a head that is not declared
        expected = usual if m.expected is None else m.expected
        quantity, value = "mean square", m.entries.square
        if name.endswith("gain"):
            quantity, value, expected = "gain", math.sqrt(value), math.sqrt(expected)
            factor = factors.get((m.role.layer, m.role.full_name), 1.0)
            if abs(value - expected * factor) <= SLACK * expected:
                expected *= factor
        passed = abs(value - expected) <= SLACK * max(expected, 0.0) + 1e-12
        yield m.row(quantity, expected, value, passed, "")


def scale_rows(model: Transformer, roles: ModuleRoles, sums: Sums) -> Iterator[Row]:
    """Checks of every block's residual sum: its form, its multipliers and its norm."""
    scales = scales_of(model)
    blocks = {(block.stack, block.layer, block.name): block for block in roles.blocks}
    for (prefix, layer, name), one in sums.items():
        stack, block = model_of_stack(model, prefix), blocks.get((prefix, layer, name))
        if layer > stack.layers:
            continue
        column = int(name == "ffn")
        skip, branch, _, output = scales[prefix].at(layer, column)
        path, branch_path, norm = ("",) * 3
        if block is not None:
            path, branch_path, norm = block.path, block.branch.path, block.norm or ""
        role, expected = f"{prefix}{name}", stack.placements[layer - 1]
        where = layer, f"{role} sum", path
        if expected != one.placement:
            note = f"the norm sits {one.placement!r}, the plan wants {expected!r}"
            yield Row(*where, "norm placement", 1, 0, False, note)
        if not one.proportional:
            note = "not lambda x + beta f: norms or sums are placed otherwise"
            yield Row(*where, "unexplained share of the sum", 0.0, math.nan, False, note)
            continue
        yield multiplier_row(layer, role, path, "skip_scale", one.skip, skip)
        yield multiplier_row(layer, role, branch_path, "branch_scale", one.branch, branch)
        if one.norm is not None and one.placement == expected:
            output *= float(stack.norm_gains[layer - 1, column])
            where = layer, f"{role}.norm", norm
            yield multiplier_row(*where, "norm_output_scale", one.norm, output)


def multiplier_row(
    layer: int, role: str, path: str, quantity: str, value: float | None, expected: float
) -> Row:
    """A check of a multiplier; None: it could not be measured."""
    where = layer, role, path, quantity, expected
    if value is None:
        note = "what it multiplies is 0 throughout, so that it cannot be measured"
        return Row(*where, math.nan, None, note, math.nan)
    return Row(*where, value, abs(value - expected) <= SLACK * abs(expected) + 1e-9)


def unchecked(
    model: Transformer, roles: ModuleRoles, sums: Sums, rows: Iterable[Row] = ()
) -> tuple[str, ...]:
    """What of a model was not checked, in phrases."""
    phrases = []
    for stack, of_stack in stacks_in(model).items():
        layers = range(1, of_stack.layers + 1)
        names = ("attention", "ffn") if of_stack.encoder is None else ("attention", "cross", "ffn")
        for name in names:
            if unread := [n for n in layers if (stack, n, name) not in sums]:
                phrases.append(
                    f"residual multipliers, norm factors and norm placement of {stack}{name} "
                    f"blocks{in_layers(unread, of_stack.layers)} (their sum with the stream was "
                    "not recognised)"
                )
    for stack, of_stack in stacks_in(model).items():
        present = {(role.layer, role.name) for role in roles.roles if role.stack == stack}
        for name in of_stack.matrix_shapes:
            missing = [n for n in range(1, of_stack.layers + 1) if (n, name) not in present]
            if missing:
                where = in_layers(missing, of_stack.layers)
                phrases.append(f"{stack}{name}{where} (no parameter has this role)")
    undeclared = dict.fromkeys(
        role.full_name for role in roles.roles if expected_variance(model, role) is None
    )
    if undeclared:
        phrases.append(f"{', '.join(undeclared)} (of which nothing is planned)")
    if count := len(roles.unidentified):
        phrases.append(f"{count} parameter{'s' * (count > 1)} of unknown role")
    notes = {row.quantity: row.note for row in rows if row.passed is None}
    phrases += [f"some {quantity.replace('_', ' ')}s ({note})" for quantity, note in notes.items()]
    return tuple(phrases)


def temperature_rows(roles: ModuleRoles, sums: Sums, model: Transformer) -> Iterator[Row]:
    """Checks of every layer's temperature."""
    for role, expected, present in temperatures(roles, sums, model):
        where = role.layer, role.stack + attention_of(role), role.label, "temperature", expected
        if present is None:
            yield Row(*where, math.nan, None, "the factor on q k was not recognised", math.nan)
        else:
            yield Row(*where, present, bool(np.isclose(present, expected, rtol=SLACK)))


def temperatures(
    roles: ModuleRoles, sums: Sums, model: Transformer
) -> Iterator[tuple[Role, float, float | None]]:
    """Every query matrix with its temperature in the model and in the module."""
    for stack, of_stack in stacks_in(model).items():
        width = math.sqrt(of_stack.d_head or 1)
        for role in roles.named("query", "cross_query", stack=stack):
            one = sums.get((stack, role.layer, attention_of(role)))
            known = one is not None and one.multiplier
            present = 1 / (width * known) if known else None
            yield role, float(of_stack.temperatures[role.layer - 1]), present


def attention_of(role: Role) -> str:
    return "cross" if role.name.startswith("cross") else "attention"
