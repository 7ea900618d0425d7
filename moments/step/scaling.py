"""Whether learning rates hold along width or depth: exponents by matrix, and what is to be mended.

An exponent is that of a root mean square in the size, 0 where rates transfer (Yang et al. 2022,
Tensor Programs V, appendix J: the coordinate check).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import as_frame, plain

if TYPE_CHECKING:
    import pandas as pd

AXES = ("width", "depth")
QUANTITIES = ("activation", "update", "logit", "loss")

TOLERANCE = {"width": 0.3, "depth": 0.4}
"""Of an exponent: slips are of a half or more, what is left of 1/size at small sizes less."""


@dataclass(frozen=True)
class Slip:
    """What does not transfer.

    Attributes:
        weight: the parameter's role, "query", "head", ...
        parameters: the module's own names.
        quantity: of which the exponent is: "activation", "update" or "loss".
        exponent: of its root mean square in the size.
        mend: what would make it 0.
    """

    weight: str
    parameters: str
    quantity: str
    exponent: float
    mend: str

    def __str__(self) -> str:
        return f"{self.parameters or self.weight} ({self.weight}): {self.mend}"


@dataclass(frozen=True, eq=False, repr=False)
class TransferReport:
    """Whether learning rates hold along width or depth.

    Attributes:
        axis, sizes, optimizer: what was read.
        rows: by parameter role, exponents of root mean squares: activation (what the matrix makes
            of its input), update (what its step adds to its output, over its input), logit and loss
            (what its step alone changes); nan where there is none, and logit of vectors.
        findings: what does not transfer, with its mend.
        notes: what was assumed.
    """

    axis: str
    sizes: tuple[int, ...]
    optimizer: str
    rows: tuple[Mapping[str, Any], ...]
    findings: tuple[Slip, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings

    def to_frame(self) -> pd.DataFrame:
        """A row per role: weight, parameters, and exponents activation, update, logit, loss."""
        return as_frame(self.rows, columns=["weight", "parameters", *QUANTITIES])

    def table(self) -> str:
        """The verdict, what to mend, and exponents by role, as text."""
        sizes = ", ".join(map(str, self.sizes))
        verdict = "rates transfer" if self.passed else "rates do not transfer"
        lines = [f"{verdict} along {self.axis} ({sizes}) under {self.optimizer}"]
        lines += [f"  {slip}" for slip in self.findings]
        wide = max(len(row["weight"]) for row in self.rows)
        lines.append(f"{'exponents':{wide}}" + "".join(f"{name:>12}" for name in QUANTITIES))
        for row in self.rows:
            cells = (row[name] for name in QUANTITIES)
            shown = (f"{'-' if math.isnan(value) else f'{value:+.2f}':>12}" for value in cells)
            lines.append(f"{row['weight']:{wide}}" + "".join(shown))
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, with a format version; nan becomes None."""
        return {
            "format": 1,
            "axis": self.axis,
            "sizes": list(self.sizes),
            "optimizer": self.optimizer,
            "passed": self.passed,
            "findings": [vars(slip) for slip in self.findings],
            "rows": plain(self.rows),
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """`to_dict` as one JSON object."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __repr__(self) -> str:
        said = "passed" if self.passed else f"{len(self.findings)} findings"
        return f"TransferReport({self.axis} {self.sizes}, {self.optimizer}: {said})"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(self.table())}</pre>"


def exponent(logs: np.ndarray, values: Sequence[float]) -> float:
    """Of the logarithms, between the two largest sizes; nan where one is not positive."""
    if not all(value > 0 and math.isfinite(value) for value in values):
        return math.nan
    return float(np.log(values[-1] / values[-2]) / (logs[-1] - logs[-2]))


def along_width(rows: Sequence[Mapping[str, Any]]) -> Iterator[Slip]:
    """A matrix passes on what it reads, and its step adds as much at any width. The head, and the
    queries and keys whose products meet each other, may start smaller."""
    allowed = TOLERANCE["width"]
    for row in rows:
        name, made, step = row["weight"], row["activation"], row["update"]
        may_fall = name in _MAY_FALL
        starts = made > allowed or (made < -allowed and not may_fall)
        moves = abs(step) > allowed
        if name == "head" and starts and moves and step > 0:
            yield _slip(row, "update", f"its output lacks {_power(step, 'width')}")
            continue
        if starts:
            yield _slip(row, "activation", _said("initial variance", 2 * made, "width"))
        if moves:
            yield _slip(row, "update", _said("rate", step, "width"))
    settled = all(not abs(row["update"]) > allowed for row in rows)
    for row in rows:
        if settled and row["weight"] in ("query", "key") and abs(row["loss"]) > allowed:
            yield _slip(row, "loss", _said("product's scale", row["loss"], "width"))


_MAY_FALL = ("head", "query", "key")


def along_depth(rows: Sequence[Mapping[str, Any]], growth: float) -> Iterator[Slip]:
    """All layers together move the logits as much at any depth, and the stream does not grow."""
    allowed = TOLERANCE["depth"]
    if growth > allowed:
        of = f"blocks' outputs lack {_power(growth, 'depth')}"
        yield Slip("stream", "", "activation", growth, of)
    for row in rows:
        if abs(row["loss"]) > allowed:
            yield _slip(row, "loss", _said("rate", row["loss"], "depth"))


def _slip(row: Mapping[str, Any], quantity: str, mend: str) -> Slip:
    return Slip(row["weight"], row["parameters"], quantity, row[quantity], mend)


def _said(what: str, exponent: float, size: str) -> str:
    if exponent > 0:
        return f"its {what} lacks {_power(exponent, size)}"
    return f"its {what} falls too fast with {size}: by {_power(-exponent, size)}"


def _power(exponent: float, size: str) -> str:
    halves = round(2 * exponent)
    named = {1: f"1 / sqrt({size})", 2: f"1 / {size}"}
    return named.get(halves, f"1 / {size}^{halves / 2:g}")
