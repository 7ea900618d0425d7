"""Whether learning rates transfer along width, depth or the number of experts: exponents by matrix,
and remedies.

An exponent is that of a root mean square in the size, 0 where rates transfer (Yang et al. 2022,
Tensor Programs V, appendix J: the coordinate check).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..files import Serialised, as_frame, plain

if TYPE_CHECKING:
    import pandas as pd

AXES = ("width", "depth", "experts")
QUANTITIES = ("activation", "update", "logit", "loss")

TOLERANCE = {"width": 0.3, "depth": 0.4, "experts": 0.4}
"""Largest absolute exponent that passes: slips have a half or more, corrections of order 1/size at
small sizes less."""


@dataclass(frozen=True)
class Slip:
    """A quantity that does not transfer.

    Attributes:
        weight: role of the parameter, "query", "head", ...
        parameters: its names in the module.
        quantity: "activation", "update", "logit", "loss", or "product", the change of a head's
            logits by a step of queries or keys.
        exponent: exponent of its root mean square in the size.
        mend: a change that would make the exponent 0.
    """

    weight: str
    parameters: str
    quantity: str
    exponent: float
    mend: str

    def __str__(self) -> str:
        return f"{self.parameters or self.weight} ({self.weight}): {self.mend}"


@dataclass(frozen=True, eq=False, repr=False)
class TransferReport(Serialised):
    """Whether learning rates hold along width, depth or the number of experts.

    Attributes:
        axis, sizes, optimizer: of the comparison.
        rows: by parameter role, exponents of root mean squares: activation (a matrix's output over
            its input), update (the change of its output by its step, over its input), logit and
            loss (changes by its step alone); nan if there is none, and logit for vectors. Those of
            experts, activation and update, are over the chosen experts of a token.
        findings: quantities that do not transfer, with remedies.
        notes: assumptions.
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
        """The verdict, remedies, and exponents by role, as text."""
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

    def __repr__(self) -> str:
        verdict = "passed" if self.passed else f"{len(self.findings)} findings"
        return f"TransferReport({self.axis} {self.sizes}, {self.optimizer}: {verdict})"


def exponent(logs: np.ndarray, values: Sequence[float]) -> float:
    """Exponent of two values in two sizes, given by their logarithms; nan unless both values are
    positive."""
    if not all(value > 0 and math.isfinite(value) for value in values):
        return math.nan
    return float(np.log(values[1] / values[0]) / (logs[1] - logs[0]))


def along_width(
    rows: Sequence[Mapping[str, Any]], products: float = 0.0, heads: float = 0.0
) -> list[Slip]:
    """Quantities that do not transfer along the width.

    A matrix's output and its change by a step have the size of its input at any width. The output
    of the head, of queries and of keys may be smaller at the start. A step of queries is a sum of
    keys, so that the d entries of a head's product add up: its scale has to be 1/d (Yang et al.
    2022, Tensor Programs V, definition 4.1).

    Args:
        rows: exponents by role.
        products: exponent of d_head times the scale of a head's logits.
        heads: exponent of d_head if steps are proportional to the gradient, else 0: at the start
            values are independent of the gradient that multiplies them, so that queries and keys
            receive 1/sqrt(d_head) of the gradient after alignment.
    """
    allowed, slips = TOLERANCE["width"], []
    tied = all(row["weight"] != "head" for row in rows)
    for row in rows:
        name, activation, step = row["weight"], row["activation"], row["update"]
        off_at_start = activation > allowed or (activation < -allowed and name not in _MAY_FALL)
        multiplied = name.partition(".")[0] in _PRODUCT
        if name == "head" and off_at_start and step > allowed:
            slips.append(_slip(row, "update", f"its output lacks {_power(step, 'width')}"))
            continue
        if off_at_start:
            mend = _remedy("initial variance", 2 * activation, "width")
            slips.append(_slip(row, "activation", mend))
        if abs(step + (heads / 2 if multiplied else 0.0)) > allowed and not slow_table(row):
            slips.append(_slip(row, "update", _remedy("rate", step, "width")))
        if name == "token" and tied and row["logit"] > allowed:
            slips.append(_slip(row, "logit", f"its logits lack {_power(row['logit'], 'width')}"))
        if name in _PRODUCT and abs(products) > allowed:
            mend = _remedy("product's scale", products, "width")
            slips.append(Slip(name, row["parameters"], "product", products, mend))
    return slips


def slow_table(row: Mapping[str, Any]) -> bool:
    """Whether a table's rate is proportional to 1/sqrt(width), as in published recipes, but not in
    muP (Blake et al. 2024, u-muP, section 4.4)."""
    return row["weight"] in ("token", "position") and -0.8 < row["update"] < -TOLERANCE["width"]


_PRODUCT = ("query", "key")
_MAY_FALL = ("head", *_PRODUCT)


def along_depth(rows: Sequence[Mapping[str, Any]], growth: float) -> list[Slip]:
    """Quantities that do not transfer along the depth: the loss's change by all layers together and
    the stream are independent of depth (`growth`: exponent of the stream's root mean square)."""
    allowed, slips = TOLERANCE["depth"], []
    if growth > allowed:
        mend = f"blocks' outputs lack {_power(growth, 'depth')}"
        slips.append(Slip("stream", "", "activation", growth, mend))
    return slips + [
        _slip(row, "loss", _remedy("rate", row["loss"], "depth"))
        for row in rows
        if abs(row["loss"]) > allowed
    ]


def along_experts(rows: Sequence[Mapping[str, Any]], gain: float) -> list[Slip]:
    """Quantities that do not transfer along the number of experts, at a fixed number per token.

    The output of a chosen expert's matrix, its change by a step, and the sum of the experts are
    independent of the number of experts (`gain`: exponent of the sum's root mean square).
    """
    allowed, slips = TOLERANCE["experts"], []
    largest = max(
        (abs(row["activation"]) for row in rows if row["activation"] < math.inf), default=0.0
    )
    if abs(gain) > allowed and largest <= allowed:
        slips.append(Slip("experts", "", "activation", gain, _remedy("sum", gain, "experts")))
    for row in rows:
        activation, step = row["activation"], row["update"]
        if abs(activation) > allowed:
            mend = _remedy("initial variance", 2 * activation, "experts")
            slips.append(_slip(row, "activation", mend))
        if abs(step) > allowed:
            slips.append(_slip(row, "update", _remedy("rate", step, "experts")))
    return slips


def _slip(row: Mapping[str, Any], quantity: str, mend: str) -> Slip:
    return Slip(row["weight"], row["parameters"], quantity, row[quantity], mend)


def _remedy(factor: str, exponent: float, size: str) -> str:
    if exponent > 0:
        return f"its {factor} lacks {_power(exponent, size)}"
    return f"its {factor} falls too fast with {size}: by {_power(-exponent, size)}"


def _power(exponent: float, size: str) -> str:
    halves = round(2 * exponent)
    named = {1: f"1 / sqrt({size})", 2: f"1 / {size}"}
    return named.get(halves, f"1 / {size}^{halves / 2:g}")
