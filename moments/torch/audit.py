"""What a module really has against what a plan says, tensor by tensor."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from ..errors import optional
from ..files import as_frame
from ..model.transformer import Transformer
from ..model.weights import MATRICES
from ..show.report import number, render
from .advice import Advice, Convention, advise, conventions
from .anatomy import anatomy_of
from .architecture import fitted, promised_by
from .assumptions import Copies, copies, copy_findings, copy_notes
from .dataflow.reading import example
from .departures import Departure, departures, in_words
from .entries import EntryMoments
from .expectation import scales_of
from .findings import (
    Finding,
    Measured,
    measure_roles,
    norm_findings,
    scale_findings,
    slope_finding,
    temperature_findings,
    unchecked,
    unprobed_findings,
    variance_findings,
)
from .probe import BlockProbe, Slope, logits_path, measured_scale, probe_or_why
from .roles import ModuleRoles, Role, block_of, gain_of, tensors_of
from .running import padding_rows
from .scales import FOLDED

with optional("torch", "torch"):
    from torch import nn

if TYPE_CHECKING:
    import pandas

_FOLDED = "the module was folded: its weights carry the plan's scales; audit it before folding"

_COLUMNS = (
    *("layer", "role", "parameter", "quantity", "expected", "measured", "ratio", "stderr"),
    *("probability", "passed", "note"),
)


@dataclass(frozen=True)
class AuditReport:
    """What `audit` found.

    Attributes:
        findings: every check, offenders first, the worst of them at the top.
        advice: likely causes, a sentence each.
        unidentified: parameters whose role no rule knows; they are not checked.
        undeclared: parameters whose role is known but of which the plan says nothing.
        source: what was audited, in words.
        unchecked: what of the plan was not compared with the module, a phrase each; `passed` says
            nothing of it.
        unlike: fields in which the plan is not what the module is, where that changes no signal at
            initialisation, a phrase each.
        read: what the module was read as, in words.
    """

    findings: tuple[Finding, ...]
    advice: tuple[str, ...]
    unidentified: tuple[str, ...]
    undeclared: tuple[str, ...]
    source: str
    unchecked: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    read: str = ""

    @property
    def passed(self) -> bool:
        """Whether no check failed. What could not be checked is no failure: see `unchecked`."""
        return all(finding.passed is not False for finding in self.findings)

    @property
    def offenders(self) -> tuple[Finding, ...]:
        """The checks that failed, the worst first."""
        return tuple(finding for finding in self.findings if finding.passed is False)

    def to_frame(self) -> pandas.DataFrame:
        """One row per check: layer, role, parameter, quantity, expected, measured, ratio, stderr
        (of the measured number in a right module), probability (of so large a deviation in a right
        module), passed (None where it could not be checked) and note.
        """
        rows = [{name: getattr(f, name) for name in _COLUMNS} for f in self.findings]
        return as_frame(rows, columns=list(_COLUMNS))

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        state = "passed" if self.passed else f"failed, {len(self.offenders)} offenders"
        if self.unchecked:
            state += f", {len(self.unchecked)} things not checked"
        return f"AuditReport({self.source}: {state}, {len(self.findings)} checks)"


def audit(
    module: nn.Module,
    plan: Any = None,
    *,
    batch: Any = None,
    options: Mapping[str, Any] | None = None,
) -> AuditReport:
    """Compare a freshly initialised module with a plan.

    Compared are mean squares, by matrix and by role over all layers, with their sampling errors,
    means, norms' gains and biases; no layer may have another one's entries. The module is run once,
    in evaluation mode, and the multipliers of its residual sums and norms are measured by
    regression. A right module fails with probability 1e-5, all checks together.

    Args:
        module: any that can be read. It is left as it was. Compiled and
            data-parallel modules are audited as what they hold.
        plan: a plan of `moments.solve`, a Transformer, or a scheme's name, which is then applied to
            the module's own architecture; None: what the module's config or class promises.
        batch: what to run the module on, as in `moments.torch.measure`; None: random input, where
            the module says what it takes.
        options: of the scheme, where the plan is a scheme's name.

    Returns:
        A report: `passed`, `unchecked`, `str(report)`, `to_frame()`.

    Raises:
        DomainError: a plan of another depth, width or number of heads, or none for a module that
            does not say how it is meant to be drawn.
        MomentsError: the module cannot be read.
    """
    of = fitted(module, plan, options, batch, strict=False)
    module, parts, model, described = of.module, of.parts, of.model, of.described
    batch = parts.example if batch is None else batch
    readings = conventions(model if plan is None else plan, options, model)
    read = AuditedModule.of(module, parts.found, batch, model)
    return audit_read(read, model, described, readings)


@dataclass(frozen=True)
class AuditedModule:
    """What an audit sees of a module, whatever it is held against.

    Attributes:
        repeated: tensors that are another layer's.
        why: there are no probes.
        batch: what it was run on; None where it was not.
    """

    module: nn.Module
    found: ModuleRoles
    entries: tuple[tuple[Role, EntryMoments], ...]
    repeated: tuple[Copies, ...]
    probes: tuple[BlockProbe, ...]
    why: str
    batch: Any
    _slopes: dict[bool, Slope | None] = field(default_factory=dict, compare=False, repr=False)

    @functools.cached_property
    def by_role(self) -> dict[Role, EntryMoments]:
        """The same as a table."""
        return dict(self.entries)

    def logit_slope(self, model: Transformer) -> Slope | None:
        """What multiplies the logits, by `measured_scale`, once."""
        capped = model.head is not None and model.head.logit_softcap is not None
        if model.head is not None and capped not in self._slopes:
            self._slopes[capped] = measured_scale(self.module, self.found, model, self.batch)
        return self._slopes.get(capped)

    @classmethod
    def of(
        cls, module: nn.Module, found: ModuleRoles, batch: Any, model: Transformer
    ) -> AuditedModule:
        """Read the tensors, and run the module once; `model`: any of its shape."""
        entries, repeated = entries_of(module, found)
        probes, why = probe_or_why(module, found, batch, epsilon=model.norm_epsilon)
        reads = example(module) if batch is None and probes else batch
        return cls(module, found, entries, repeated, tuple(probes), why, reads)


def audit_read(
    read: AuditedModule,
    model: Transformer,
    described: Transformer | None,
    readings: Sequence[Convention] = (),
) -> AuditReport:
    """Hold what was read of a module against a model; further arguments as of `advise`."""
    module, found, why = read.module, read.found, read.why
    measured, findings = _weights(read.entries, read.repeated, model)
    repeated, probes = read.repeated, read.probes
    reading = anatomy_of(module, read.batch).reading
    rows = departures(model, module, reading, promised_by(module))
    # Norms are checked block by block among the scales, and matrices that are missing not at all.
    apart = {f"{block.stack}norm" for block in found.blocks} | set(MATRICES)
    faults = [row for row in rows if not row.remark and row.name not in apart]
    findings += [_structure(row, module) for row in faults]
    findings += scale_findings(model, probes) if probes else unprobed_findings(model, why)
    findings += temperature_findings(found, model)
    findings += [] if why else _logits(read, model)
    findings.sort(key=lambda finding: -finding.severity)
    undeclared = tuple(m.role.label for m in measured if m.expected is None)
    folded = any(f.passed is False for f in findings) and getattr(module, FOLDED, False)
    return AuditReport(
        findings=tuple(findings),
        advice=(
            *((_FOLDED,) if folded else ()),
            *copy_notes(repeated),
            *advise(findings, measured, model, described, readings).sentences,
        ),
        unidentified=found.unidentified,
        undeclared=undeclared,
        source=type(module).__name__,
        unchecked=(
            *(f"{row.name} ({row})" for row in rows if row.remark and not row.silent),
            *unchecked(model, found, probes, why, findings),
        ),
        unlike=tuple(f"{row.name} ({row})" for row in rows if row.silent),
        read=in_words(reading),
    )


def _structure(row: Departure, module: nn.Module) -> Finding:
    """A field that no weight changes, as a check that failed."""
    both = row.planned, row.present
    planned, present = (float(v) if isinstance(v, int | float) else math.nan for v in both)
    of = 0, row.name, type(module).__name__, "architecture"
    return Finding(*of, planned, present, False, str(row))


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
) -> tuple[list[Measured], list[Finding]]:
    """Every tensor beside its expectation, and what is wrong with them."""
    measured = measure_roles(model, entries)
    findings = variance_findings(measured, {role for roles in repeated for role in roles[1:]})
    findings += copy_findings(repeated)
    findings += norm_findings(measured, _carried(model))
    return measured, findings


def weight_advice(
    module: nn.Module,
    found: ModuleRoles,
    model: Transformer,
    described: Transformer | None,
    readings: Sequence[Convention] = (),
) -> Advice:
    """Likely causes of what is wrong with weights, without a run; arguments as of `advise`."""
    measured, findings = _weights(*entries_of(module, found), model)
    return advise(findings, measured, model, described, readings)


def _logits(read: AuditedModule, model: Transformer) -> list[Finding]:
    path = logits_path(read.found)
    if path is None or model.head is None:
        return []
    wanted, slope = model.head.output_scale, read.logit_slope(model)
    return [slope_finding(model.layers + 1, "head", path, "output_scale", slope, wanted)]


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


WIDTH = 120
TABLE_WIDTH = 240  # parameter names stay whole
OFFENDERS, GOOD = 40, 8


def text(report: AuditReport) -> str:
    """Verdict, advice, offenders first, then a few of the checks that passed."""
    bad = report.offenders
    verdict = "passed" if not bad else f"FAILED: {len(bad)} of {len(report.findings)} checks"
    open_checks = [f for f in report.findings if f.passed is None]
    if report.unchecked:
        verdict = verdict if bad else "nothing that was checked failed"
        verdict += f"; NOT CHECKED: {'; '.join(report.unchecked)}"
    good = [f for f in report.findings if f.passed]
    title = f"audit of {report.source} ({report.read}): {verdict}"
    lines = textwrap.wrap(title, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    folded = functools.partial(textwrap.wrap, width=WIDTH, subsequent_indent="  ")
    for sentence in report.advice:
        lines += folded(f"- {sentence}")
    shown = [*bad[:OFFENDERS], *open_checks[:GOOD], *good[:GOOD]]
    lines.append(render(_table(shown), TABLE_WIDTH))
    for rest, words in ((len(bad) - OFFENDERS, "more failed"), (len(good) - GOOD, "more passed")):
        if rest > 0:
            lines.append(f"... {rest} {words}; to_frame() has every check")
    for names, words in (
        (report.unidentified, "of unknown role, not checked"),
        (report.undeclared, "of which the plan says nothing"),
    ):
        if names:
            lines += folded(f"{len(names)} parameters {words}: {', '.join(names)}")
    for phrase in report.unlike:
        lines += folded(f"not as planned: {phrase}")
    return "\n".join(lines)


def _table(findings: list[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("parameter", no_wrap=True)
    table.add_column("role")
    for name in ("quantity", "plan", "module", "ratio", "note"):
        table.add_column(name, justify="left" if name in ("quantity", "note") else "right")
    for f in findings:
        state = {True: "ok", False: "FAIL", None: "?"}[f.passed]
        ratio = "-" if math.isnan(f.ratio) else f"{f.ratio:.3g}"
        measured = "-" if math.isnan(f.measured) else number(f.measured)
        numbers = number(f.expected), measured, ratio
        table.add_row(state, escape(f.parameter), f.role, f.quantity, *numbers, f.note)
    return table
