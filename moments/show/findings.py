"""Findings about a model, and the report that `check`, `audit` and `diagnose` return."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import MomentsError
from ..files import as_frame, plain
from ..model.summary import in_short
from ..model.transformer import Transformer
from .html import document, fragment, picture, render
from .precision import precision
from .report import in_a_line, number, tabled, wrapped
from .verdict import NAMES, class_count, growth_phrases, judge

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from ..prediction.result import Prediction
    from .comparison import Comparison

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or one cause of a measured difference.

    Attributes:
        severity, kind: "error", "warning" or "note", and a short name such as "wrong variance".
        where, layers: tensors or submodules under the user's own names, and layers, from 1.
        measured, expected: the numbers compared, nan if there are none.
        reason, mend: what is wrong and why it matters, and how to repair it.
        explains: for a cause, the share of the whole difference that it explains; nan if that was
            not computed; negative if it cancels another cause.
    """

    severity: str
    kind: str
    where: tuple[str, ...]
    layers: tuple[int, ...] = ()
    measured: float = math.nan
    expected: float = math.nan
    reason: str = ""
    mend: str = ""
    explains: float = math.nan

    @property
    def names(self) -> tuple[str, ...]:
        """`where`, with names that differ in one part merged."""
        return braced(self.where)

    def lines(self) -> list[str]:
        """The reason, the place and the repair, a paragraph each."""
        said = [f"{self.reason} [{self.severity}: {self.kind}]"]
        said += [f"in {', '.join(self.names)}"] if any(self.where) else []
        return said + ([f"fix: {self.mend}"] if self.mend else [])

    def __str__(self) -> str:
        return "; ".join(self.lines())


@dataclass(frozen=True)
class Row:
    """A measured number and the expected one.

    Attributes:
        layer, role: its place; 0 is outside the layers or all of them, "" the stream.
        parameter: the tensor, or the submodule of a sum or norm; "" for the stream.
        quantity: "variance", "skip_scale", "loss", ...
        expected, measured: nan if not known.
        passed: None if the number was not judged.
        note: why it failed, or what the entries look like.
        stderr, probability: sampling error of the measured number, and the probability of a
            deviation this large in a correct model.
        low, high: range of 95 % of correct draws; nan if not known.
    """

    layer: int
    role: str
    parameter: str
    quantity: str
    expected: float
    measured: float
    passed: bool | None = None
    note: str = ""
    stderr: float = 0.0
    probability: float = math.nan
    low: float = math.nan
    high: float = math.nan

    @property
    def ratio(self) -> float:
        """Measured over expected."""
        return self.measured / self.expected if self.expected else math.nan

    @property
    def size(self) -> float:
        """Sort key: |log ratio| of rows that failed, negative for the others."""
        if self.passed is not False:
            return -1.0 if self.passed else -0.5
        ratio = self.ratio if self.measured else math.nan
        return abs(math.log(ratio)) if math.isfinite(ratio) and ratio > 0 else math.inf

    def cells(self) -> tuple[str, ...]:
        """Cells of a table: quantity, parameter, measured, expected, band, note."""
        what = f"{self.quantity} of {self.role}" if self.role else self.quantity
        band = f"{number(self.low)} to {number(self.high)}" if math.isfinite(self.low) else "-"
        both = ("-" if math.isnan(v) else number(v) for v in (self.measured, self.expected))
        return what, self.parameter, *both, band, self.note


def stream_row(
    quantity: str,
    measured: float,
    expected: float,
    band: Sequence[float] = (math.nan, math.nan),
    passed: bool | None = None,
) -> Row:
    """Make a row for a point of the stream or for the output."""
    return Row(0, "", "", quantity, expected, measured, passed, low=band[0], high=band[1])


class Unhealthy(MomentsError, AssertionError):
    """Raised if a model has findings; the message is the report."""


@dataclass(frozen=True, eq=False)
class Report:
    """Result of `moments.check`, `audit` and `diagnose`.

    Attributes:
        source: what was checked.
        scheme: the initialisation that was recognised or compared with, in words.
        findings: errors, then warnings.
        notes: observations that are no fault by themselves.
        unchecked: what was not checked, a phrase each.
        rows: measured numbers next to expected ones; if tensors were checked one by one, those that
            failed come first.
        model: the module as a Transformer, with its actual variances; None if it was not read.
        prediction: for that model; None if there is none.
        comparison: of prediction and measurement; None if nothing was measured.
        read: the input of the measurement, in words; "" if nothing was measured.
        explained: for a diagnosis, the share of the difference that all causes together explain.
    """

    source: str
    scheme: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    unchecked: tuple[str, ...]
    rows: tuple[Row, ...]
    model: Transformer | None = field(default=None, repr=False)
    prediction: Prediction | None = field(default=None, repr=False)
    comparison: Comparison | None = field(default=None, repr=False)
    read: str = ""
    explained: float = math.nan
    _compared: bool = False
    _why: Callable[[], tuple[Finding, ...]] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Sort findings by severity, and move those of severity "note" to the notes."""
        result = [one for one in self.findings if one.severity != "note"]
        notes = [*self.notes, *(str(one) for one in self.findings if one.severity == "note")]
        object.__setattr__(self, "findings", ranked(result))
        object.__setattr__(self, "notes", tuple(dict.fromkeys(notes)))

    @property
    def healthy(self) -> bool:
        """Whether there are no findings. `unchecked` lists what this says nothing about."""
        return not self.findings

    @property
    def passed(self) -> bool:
        """The same as `healthy`, for audits."""
        return self.healthy

    @property
    def offenders(self) -> tuple[Row, ...]:
        """The rows that failed, the worst first."""
        failed = (row for row in self.rows if row.passed is False)
        return tuple(sorted(failed, key=lambda row: -row.size))

    @property
    def advice(self) -> tuple[str, ...]:
        """The reasons of all findings."""
        return tuple(finding.reason for finding in self.findings)

    @property
    def expected(self) -> bool | None:
        """Whether the stream is as predicted, whatever the findings; None if nothing was measured.

        True if no point is further than three standard deviations from its expectation, and no more
        points are outside their 95 % bands than chance allows
        (`moments.show.expected.allowed_outside`).
        """
        return None if self.comparison is None else judge(self.comparison).expected

    @functools.cached_property
    def _causes(self) -> tuple[Finding, ...]:
        return () if self._why is None else self._why()

    def causes(self) -> tuple[Finding, ...]:
        """Differences from the plan, or from what config or class promise, ranked by how much of
        the measured difference each explains (`Finding.explains`).

        Takes two predictions per difference. Empty if nothing was measured, or if no intended
        initialisation is known.
        """
        return self._causes

    def assert_healthy(self) -> None:
        """For test suites: raise Unhealthy, an AssertionError, if there are findings."""
        if self.findings:
            raise Unhealthy(self.text(whole=True))

    def with_measured(self, measured: Mapping[Any, Any]) -> Report:
        """A report that also judges measured variances by layer, or arguments of `expects`."""
        assert self.prediction is not None
        by_name = any(isinstance(key, str) for key in measured)
        value = self.prediction.expects(**(measured if by_name else {"variance": measured}))
        rows = [
            stream_row(
                f"{NAMES[point.quantity]} leaving layer {point.layer}, as measured",
                *(point.measured, point.predicted, (point.low, point.high), point.inside),
            )
            for point in value.points
        ]
        report = dataclasses.replace(self, rows=(*rows, *self.rows))
        if value.expected:
            return dataclasses.replace(report, notes=(*self.notes, str(value)))
        first, *why = (line.strip() for line in str(value).splitlines())
        word = "unexpected" if value.verdict == "not expected" else value.verdict
        worst = max(value.points, key=lambda point: abs(point.deviations))
        severity = "error" if value.verdict == "not expected" else "warning"
        given = tuple(Finding(severity, "likely cause", (), reason=str(c)) for c in value.causes)
        layers = tuple(sorted({point.layer for point in value.points if not point.inside}))
        kind, numbers = f"{word} {NAMES[worst.quantity]}", (worst.measured, worst.predicted)
        reason = "; ".join([first.removeprefix(f"{value.verdict}: "), " ".join(why)]).rstrip("; ")
        mend = "initialise the weights as declared, or declare them as they are initialised"
        finding = Finding(severity, kind, (), layers, *numbers, reason, mend)
        result = (*self.findings, finding)
        return dataclasses.replace(report, findings=result, _why=lambda: given)

    def to_frame(self) -> pd.DataFrame:
        """One row per number: layer, role, parameter, quantity, expected, measured, ratio, stderr,
        probability, passed, note, low, high."""
        names = [f.name for f in dataclasses.fields(Row)]
        names.insert(names.index("measured") + 1, "ratio")
        return as_frame([{n: getattr(row, n) for n in names} for row in self.rows], columns=names)

    def precision(self, format: str | None = None) -> pd.DataFrame:
        """Predict what a number format loses.

        Args:
            format: a format of `Prediction.low_precision`, whose operands are listed with the worst
                first; None: bf16, fp16 and unscaled fp8 at every point, forward and backward
                (`moments.show.precision`).

        Raises:
            DomainError: another format, or an activation without a known function.
            MomentsError: the report has no prediction.
        """
        if self.prediction is None:
            raise MomentsError("no losses of number formats: this report has no prediction")
        if format is None:
            return precision(self.prediction)
        lost = self.prediction.low_precision(format)
        return lost.sort_values("snr", ignore_index=True)

    def breaks_first(self, format: str) -> str:
        """Name the operand that loses most under a format (as in `precision`), in a sentence."""
        lost = self.precision(format).dropna()
        if not len(lost):
            return f"under {format} no matrix product that is predicted loses anything"
        worst = lost.iloc[0]
        where = f"{worst['product']} product, layer {worst.layer}"
        return (
            f"under {format} the {worst.operand} of {worst.weight} loses most ({where}): "
            f"{worst.snr:.1f} dB of signal over noise remain, "
            f"{100 * worst.zero:.2g} % of its entries become 0; the product keeps "
            f"{worst.product_snr:.1f} dB"
        )

    @property
    def architecture(self) -> str:
        """The model in one line."""
        return "" if self.model is None else in_short(self.model)

    @property
    def headline(self) -> str:
        """What was checked and the number of findings."""
        count = len(self.findings)
        state = f"{count} finding{'s' * (count > 1)}" if count else "nothing found wrong"
        return f"{self.source}: {state}"

    def verdict(self) -> str:
        """One line."""
        parts = [self.headline, self.architecture, self.scheme, *self._growth(), self._basis]
        if self.unchecked:
            parts.append(f"not checked: {'; '.join(self.unchecked)}")
        return "; ".join(part for part in parts if part)

    @property
    def _basis(self) -> str:
        """What the numbers are based on."""
        if self.prediction is None:
            return self.read
        return self.read or "predicted, nothing was measured"

    def _growth(self, *, short: bool = False) -> list[str]:
        """Growth along the depth and the loss; `short` leaves out predictions."""
        p = self.prediction
        if p is None:
            return []
        if self.expected is not None and self._compared and not short:
            assert self.comparison is not None
            return [self.comparison.verdict()]
        m: Any = p if self.comparison is None else self.comparison.measurement
        against = None if m is p else m
        parts = growth_phrases(p, against, weights=" for these weights", short=short)
        if m.loss is not None and (vocab := class_count(p.model)) is not None:
            guessing = "" if short else f" (log({vocab}) = {math.log(vocab):.3f})"
            parts.append(f"loss {m.loss:.3f}{guessing}")
        return parts

    def text(self, *, whole: bool = False) -> str:
        """The report: verdict, growth along the depth, findings, notes, what was not checked.

        Args:
            whole: print every finding, note and number; otherwise findings are shortened to LINES
                lines and notes to NOTES.
        """
        read = "; ".join(words for words in (self.architecture, self._basis) if words)
        top = wrapped(read, "  ", "  ")
        if not self.findings:
            top += wrapped(self.scheme, "  ", "  ")
        growth = wrapped("; ".join(self._growth()), "  ", "  ")
        blocks = []
        for place, finding in enumerate(self.findings, start=1):
            first, *rest = finding.lines()
            block = wrapped(f"{place}. {first}", "", "   ")
            blocks.append(block + [line for part in rest for line in wrapped(part, "   ", "   ")])
        if not whole and len(top) + len(growth) + sum(map(len, blocks)) > LINES:
            growth = wrapped("; ".join(self._growth(short=True)), "  ", "  ") if blocks else growth
            blocks = self._fitting(blocks, LINES - len(top) - len(growth))
        body = [*top, *growth, *(line for block in blocks for line in block)]
        notes = [line for note in self.notes for line in wrapped(f"note: {note}", "", "  ")]
        if not whole and len(body) + len(notes) > LINES:
            notes = [in_a_line(f"note: {note}") for note in self.notes[:NOTES]]
            more = len(self.notes) - NOTES
            notes += [f"and {more} more note{'s' * (more > 1)}"] if more > 0 else []
        lines = [self.headline, *body, *notes]
        if self.unchecked:
            lines += wrapped(f"not checked: {'; '.join(self.unchecked)}", "", "  ")
        if whole:
            return "\n".join([*lines, *(f"  {line}" for line in self.table().splitlines())])
        return "\n".join([*lines, ALL])

    def _fitting(self, blocks: list[list[str]], room: int) -> list[list[str]]:
        """Shorten findings to `room` lines: first all but the first finding to one line each, then
        that one too, then the last ones to their kinds. A single finding stays whole."""
        lines = [
            [in_a_line(f"{place}. {finding.reason}")]
            for place, finding in enumerate(self.findings, start=1)
        ]
        for form in (blocks, [*blocks[:1], *lines[1:]], lines):
            if len(blocks) < 2 or sum(map(len, form)) <= room:
                return form
        shown = max(1, room - 1)
        kinds = ", ".join(dict.fromkeys(finding.kind for finding in self.findings[shown:]))
        return [*lines[:shown], [f"   and {len(lines) - shown} more: {kinds}"]]

    def __str__(self) -> str:
        return self.text()

    def table(self) -> str:
        """The rows as a text table."""
        states = {True: "ok", False: "out", None: ""}
        rows = [(states[row.passed], *row.cells()) for row in self.rows]
        noted = any(row.note for row in self.rows)
        rows = rows if noted else [row[:-1] for row in rows]
        heads = ("", *NUMBER_HEADS, *(("note",) if noted else ()))
        return tabled("", heads, rows, text=3)

    def to_html(self) -> str:
        """The whole report as one HTML file, pictures included."""
        return document(f"moments check: {self.source}", _body(self, whole=True))

    def plot(self, name: str | None = None) -> Figure:
        """Draw measured and expected numbers along the depth; without a measurement the prediction.
        `name` is for the title; None: `source`."""
        name = self.source if name is None else name
        if self.comparison is not None:
            from .plot import plot_report

            return plot_report(self, name)
        if self.prediction is None:
            raise MomentsError("nothing to draw: an audit has no prediction; use moments.check")
        return self.prediction.plot(name)

    def to_json(self) -> str:
        """The report as JSON."""
        import json

        data = {
            "format": 1,
            "source": self.source,
            "healthy": self.healthy,
            "passed": self.passed,
            "verdict": self.verdict(),
            "scheme": self.scheme,
            "architecture": self.architecture,
            "findings": [plain(dataclasses.asdict(f)) for f in self.findings],
            "notes": list(self.notes),
            "unchecked": list(self.unchecked),
            "read": self.read,
            "rows": [plain(dataclasses.asdict(row)) for row in self.rows],
        }
        return json.dumps(data, indent=2, allow_nan=False)

    def _repr_html_(self) -> str:
        return fragment(_body(self, whole=False))  # a notebook draws the picture on its own

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_why": None}  # it holds the module, which is not pickled

    def __repr__(self) -> str:
        kinds = ", ".join(f.kind for f in self.findings[:4])
        return f"Report({self.source}: {kinds or 'healthy'})"


LINES = 8
"""Most lines of a short report between its headline and its notes."""

NOTES = 3
"""Most notes of a short report, each shortened to one line."""

ALL = "everything: print(report.text(whole=True)), or --all on the command line"
NUMBER_HEADS = ("number", "parameter", "measured", "expected", "95 % of draws")


def braced(names: Sequence[str]) -> tuple[str, ...]:
    """Merge dotted names that differ in one part, as "h.*.{c_attn,c_proj}.weight".

    >>> braced(["a.q.weight", "a.k.weight", "b"])
    ('a.{q,k}.weight', 'b')
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        path, _, last = ("", "", "") if " " in name else name.rpartition(".")
        above, _, inner = path.rpartition(".")
        groups.setdefault((above, last) if path else (name, ""), []).append(inner)
    return tuple(
        above  # a name that has no parts, or words
        if not last
        else ".".join(filter(None, (above, parts[0] if not parts[1:] else _braces(parts), last)))
        for (above, last), parts in groups.items()
    )


def _braces(parts: Sequence[str]) -> str:
    return f"{{{','.join(parts)}}}"


def ranked(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Sort by severity, keeping the given order within each."""
    return tuple(sorted(findings, key=lambda one: SEVERITIES.index(one.severity)))


# --- as HTML --------------------------------------------------------------------------------------


def _body(report: Report, *, whole: bool) -> str:
    """Render the report; `whole` adds the picture and the losses of number formats."""
    rows = [list(row.cells()) for row in report.rows]
    out = [(place, 2) for place, row in enumerate(report.rows) if row.passed is False]
    for place, column in out:
        rows[place][column] += " (out)"
    heads = (*NUMBER_HEADS, "note")
    numbers = {"heads": heads, "cells": rows, "text": (0, 1, 5), "out": out}
    drawn = whole and report.prediction is not None
    return render(
        "check.html",
        report=report,
        numbers=numbers,
        picture=picture(report.plot()) if drawn else None,
        precision=_precision(report) if drawn else None,
    )


def _precision(report: Report) -> dict[str, Any]:
    """Table of the worst point of every format, forward and backward."""
    rows = []
    frame = report.precision()
    for (form, way), sites in frame.groupby(["format", "way"], sort=False):
        lost = sites["zero"] + sites["overflow"]
        worst: Any = sites.assign(lost=lost).sort_values("lost").iloc[-1]
        shares = (f"{100 * worst[name]:.3g} %" for name in ("zero", "subnormal", "overflow"))
        where = f"{worst['site']}, layer {int(worst['layer'])}"
        rows.append((f"{form}, {way}", where, *shares))
    heads = ("unscaled, at its worst point", "point", "become 0", "subnormal", "overflow")
    return {"heads": heads, "cells": rows, "text": (0, 1)}
