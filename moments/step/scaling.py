"""Whether learning rates hold along width, depth or the number of experts: exponents by matrix, and
what is to be mended.

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
"""Of an exponent: slips are of a half or more, what is left of 1/size at small sizes less."""


@dataclass(frozen=True)
class Slip:
    """What does not transfer.

    Attributes:
        weight: the parameter's role, "query", "head", ...
        parameters: the module's own names.
        quantity: of which the exponent is: "activation", "update", "logit", "loss", or "product",
            of what a step of queries or keys adds to a head's logits.
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
class TransferReport(Serialised):
    """Whether learning rates hold along width, depth or the number of experts.

    Attributes:
        axis, sizes, optimizer: what was read.
        rows: by parameter role, exponents of root mean squares: activation (what the matrix makes
            of its input), update (what its step adds to its output, over its input), logit and loss
            (what its step alone changes); nan where there is none, and logit of vectors. Of experts
            activation and update are those of the ones that a token goes to.
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

    def __repr__(self) -> str:
        said = "passed" if self.passed else f"{len(self.findings)} findings"
        return f"TransferReport({self.axis} {self.sizes}, {self.optimizer}: {said})"


def exponent(logs: np.ndarray, values: Sequence[float]) -> float:
    """Of two values, at the logarithms of two sizes; nan where one is not positive."""
    if not all(value > 0 and math.isfinite(value) for value in values):
        return math.nan
    return float(np.log(values[1] / values[0]) / (logs[1] - logs[0]))


def along_width(
    rows: Sequence[Mapping[str, Any]], products: float = 0.0, heads: float = 0.0
) -> list[Slip]:
    """What does not transfer along the width.

    A matrix passes on what it reads, and its step adds as much at any width. The head, and the
    queries and keys whose products meet each other, may start smaller. A step of queries is a sum
    of keys, so that a head's d entries of their product add up: its scale has to be 1/d (Yang et
    al. 2022, Tensor Programs V, definition 4.1).

    Args:
        rows: exponents by role.
        products: the exponent of d_head times the scale of a head's logits.
        heads: that of d_head where steps follow the gradient's size, and 0 where they do not:
            values start independent of the gradient that they meet, which leaves queries and keys
            1/sqrt(d_head) of what they receive once these are aligned.
    """
    allowed, slips = TOLERANCE["width"], []
    tied = all(row["weight"] != "head" for row in rows)
    for row in rows:
        name, made, step = row["weight"], row["activation"], row["update"]
        starts = made > allowed or (made < -allowed and name not in _MAY_FALL)
        multiplied = name.partition(".")[0] in _PRODUCT
        if name == "head" and starts and step > allowed:
            slips.append(_slip(row, "update", f"its output lacks {_power(step, 'width')}"))
            continue
        if starts:
            slips.append(_slip(row, "activation", _said("initial variance", 2 * made, "width")))
        if abs(step + (heads / 2 if multiplied else 0.0)) > allowed and not slow_table(row):
            slips.append(_slip(row, "update", _said("rate", step, "width")))
        if name == "token" and tied and row["logit"] > allowed:
            slips.append(_slip(row, "logit", f"its logits lack {_power(row['logit'], 'width')}"))
        if name in _PRODUCT and abs(products) > allowed:
            mend = _said("product's scale", products, "width")
            slips.append(Slip(name, row["parameters"], "product", products, mend))
    return slips


def slow_table(row: Mapping[str, Any]) -> bool:
    """Whether a table's rate falls as 1/sqrt(width), as published recipes have it that muP has not
    (Blake et al. 2024, u-muP, section 4.4)."""
    return row["weight"] in ("token", "position") and -0.8 < row["update"] < -TOLERANCE["width"]


_PRODUCT = ("query", "key")
_MAY_FALL = ("head", *_PRODUCT)


def along_depth(rows: Sequence[Mapping[str, Any]], growth: float) -> list[Slip]:
    """What does not transfer along the depth: all layers together move the loss as much at any
    depth, and the stream does not grow (`growth`: the exponent of its root mean square)."""
    allowed, slips = TOLERANCE["depth"], []
    if growth > allowed:
        of = f"blocks' outputs lack {_power(growth, 'depth')}"
        slips.append(Slip("stream", "", "activation", growth, of))
    return slips + [
        _slip(row, "loss", _said("rate", row["loss"], "depth"))
        for row in rows
        if abs(row["loss"]) > allowed
    ]


def along_experts(rows: Sequence[Mapping[str, Any]], gain: float) -> list[Slip]:
    """What does not transfer along the number of experts, a token going to as many of them.

    What a matrix of experts makes of a token that goes there, and what its step adds to that, is as
    much at any number, and so is what the experts' sum makes of its input (`gain`: the exponent of
    its root mean square).
    """
    allowed, slips = TOLERANCE["experts"], []
    made = max(
        (abs(row["activation"]) for row in rows if row["activation"] < math.inf), default=0.0
    )
    if abs(gain) > allowed and made <= allowed:
        slips.append(Slip("experts", "", "activation", gain, _said("sum", gain, "experts")))
    for row in rows:
        made, step = row["activation"], row["update"]
        if abs(made) > allowed:
            slips.append(_slip(row, "activation", _said("initial variance", 2 * made, "experts")))
        if abs(step) > allowed:
            slips.append(_slip(row, "update", _said("rate", step, "experts")))
    return slips


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
