"""A prediction and a comparison on one screen: the verdict, a few layers, how to see all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..model.summary import in_short
from .report import number, tabled, wrapped
from .verdict import class_count, growth

if TYPE_CHECKING:
    from ..prediction.result import Prediction
    from .comparison import Comparison

ROWS = 5
"""Number of layers shown, evenly from first to last."""


def prediction_screen(prediction: Prediction, name: str | None = None) -> str:
    """The growth along the depth and a few layers; for several configurations the table."""
    if prediction.variance.ndim > 1:
        return prediction.table()
    few = _few(prediction.model.layers)
    names = ("variance", "correlation", "grad_variance")
    rows = [[str(n), *(number(float(getattr(prediction, q)[n])) for q in names)] for n in few]
    heads = ("layer", "variance", "token correlation", "gradient variance")
    lines = [*tabled("", heads, rows).splitlines(), *_loss(prediction)]
    return _screen(growth(prediction), prediction, lines, name)


def comparison_screen(comparison: Comparison, name: str | None = None) -> str:
    """The verdict and a few layers of prediction and measurement."""
    p, m = comparison.prediction, comparison.measurement
    points = comparison.points()
    inside = {
        (str(row["quantity"]), int(row["layer"])): bool(row["inside"])
        for row in points[points["stack"] == ""].to_dict("records")
    }
    rows = []
    for n in _few(p.model.layers):
        cells = [str(n)]
        for quantity in ("variance", "grad_variance"):
            mark = "" if inside[quantity, n] else " *"
            pair = (float(getattr(one, quantity)[n]) for one in (p, m))
            predicted, measured = map(number, pair)
            cells += [predicted, measured + mark]
        rows.append([*cells, f"{p.correlation[n]:z.3f}", f"{m.correlation[n]:z.3f}"])
    heads = ("layer", "variance", "measured", "gradient variance", "measured")
    lines = tabled("", (*heads, "correlation", "measured"), rows).splitlines()
    lines += _loss(p, None if m.loss is None else float(m.loss))
    if not all(inside.values()):
        lines.append("* outside its 95 % band")
    return _screen(comparison.verdict(), p, lines, name)


def _screen(verdict: str, p: Prediction, lines: Sequence[str], name: str | None) -> str:
    """Put the parts together, without the prediction's warnings, which go to standard error."""
    if name := name or p.model.name:
        verdict = f"{name}: {verdict}"
    body = [*wrapped(in_short(p.model), "  ", "  "), *(f"  {line}" for line in lines)]
    return "\n".join([*wrapped(verdict, "", "  "), *body, "every layer: --all, or .table()"])


def _few(layers: int) -> list[int]:
    return sorted({round(float(n)) for n in np.linspace(0, layers, ROWS)})


def _loss(p: Prediction, measured: float | None = None) -> list[str]:
    if p.loss is None:
        return []
    vocabulary = class_count(p.model)
    of = "" if vocabulary is None else f", log({vocabulary}) = {math.log(vocabulary):.3f}"
    seen = "" if measured is None else f", measured {measured:.3f}"
    return [f"loss {float(p.loss):.3f} +- {float(p.loss_stderr or 0.0):.2g} (one draw){seen}{of}"]
