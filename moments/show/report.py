"""Predictions and comparisons as text: whole tables, or a verdict and a few layers."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..model.summary import in_short
from ..prediction.draws import QUANTITIES
from .verdict import class_count, growth

if TYPE_CHECKING:
    from ..prediction.result import Prediction
    from ..step.result import FirstStep
    from .comparison import Comparison

_HEADS = {"variance": "variance", "correlation": "corr."}
TITLES = {
    "variance": "variance",
    "correlation": "token correlation",
    "grad_variance": "gradient variance",
    "grad_correlation": "gradient correlation",
}


WIDTH = 100
"""Characters per line of text."""


def wrapped(text: str, first: str, rest: str) -> list[str]:
    """Wrap text, with indents for the first and the other lines; "x 3" is not split."""
    whole = re.sub(r"\bx (?=\d)", "x\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(
        whole, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def in_a_line(text: str) -> str:
    """Shorten a text to one line."""
    return textwrap.shorten(text, WIDTH, placeholder=" ...")


def tabled(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str = "",
    *,
    text: int = 0,
) -> str:
    """A text table; the first `text` columns are aligned left, the others right."""
    lines = [tuple(heads), *(tuple(cells) for cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    said = [
        "  ".join(
            cell.ljust(width) if place < text else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ]
    captions = [line for part in caption.splitlines() for line in wrapped(part, "", "  ")]
    return "\n".join([*wrapped(title, "", "  "), *said, *captions])


def spaced(name: str) -> str:
    """A name of the code in words."""
    return name.replace("_", " ").replace(".", " ")


def number(value: float) -> str:
    """Four significant digits, scientific if that is shorter."""
    return f"{value:.4g}"


def _caption(prediction: Prediction) -> str:
    text = "layer 0 is the input of layer 1; gradients are means over draws of the weights"
    if prediction.loss is None:
        return text
    one, every = prediction.sequences
    if one < every:
        text += f"\nweight_gradients() are for {one} of the {every} sequences of the loss"
    return (
        f"{text}\nloss {prediction.loss:.4g} +- {prediction.loss_stderr:.2g} (one draw), "
        f"logit variance {number(prediction.logit_variance or 0.0)}; gradients are of this loss"
    )


def prediction_table(prediction: Prediction) -> str:
    """Table of the stream layer by layer; for a batch, one row per configuration."""
    if prediction.variance.ndim > 1:
        return _batch_table(prediction)
    model = prediction.model
    columns = [map(number, getattr(prediction, name)) for name in QUANTITIES]
    return tabled(
        in_short(model)
        + ("" if prediction.theory == "refined" else f", {prediction.theory} theory"),
        ["layer", *(TITLES[name] for name in QUANTITIES)],
        zip(map(str, range(model.layers + 1)), *columns, strict=True),
        _caption(prediction),
    )


def _batch_table(prediction: Prediction) -> str:
    layers = prediction.model.layers
    columns = [getattr(prediction, name).reshape(-1, layers + 1).T for name in QUANTITIES]
    ends = [map(number, column[end]) for column in columns for end in (0, -1)]
    return tabled(
        f"input and output of {layers} layers",
        ["configuration", *(h for name in QUANTITIES for h in (f"{TITLES[name]}, first", "last"))],
        zip(map(str, range(columns[0].shape[1])), *ends, strict=True),
    )


def comparison_tables(comparison: Comparison) -> tuple[str, ...]:
    """Tables of predicted next to measured stream points, for signal and gradient (the encoder's
    first), then one of the loss if there is one."""
    tables: list[str] = []
    for name, part in (("encoder, ", comparison.encoder), ("", comparison)):
        if part is not None:
            frame = part.to_frame()
            points = part.points()
            inside = points[points["stack"] == ""][["layer", "quantity", "inside"]]
            stream = frame[frame["site"] == "stream"]
            frame = stream.merge(inside, on=["layer", "quantity"], how="left")
            title = "{}{} along the residual stream"
            signal, gradient = QUANTITIES[:2], QUANTITIES[2:]
            tables.append(_side_by_side(frame, signal, title.format(name, "signal")))
            tables.append(_side_by_side(frame, gradient, title.format(name, "gradient")))
    outputs = comparison.outputs()
    if len(outputs):
        tables.append(_outputs_table(outputs))
    return tuple(tables)


def _outputs_table(outputs: Any) -> str:
    rows = []
    for row in outputs.to_dict("records"):
        error = row["predicted"] / row["measured"] - 1 if row["measured"] else math.nan
        cells = (
            row["quantity"].replace("_", " "),
            number(row["predicted"]),
            _measured(row["measured"], row["stderr"], 4),
            f"{100 * error:+.2f}%",
            f"{row['deviations']:+.1f}" if math.isfinite(row["deviations"]) else "-",
        )
        rows.append(cells)
    return tabled(
        "at the output",
        ("", "predicted", "measured", "error", "deviations"),
        rows,
        "deviations: measured minus predicted, in standard deviations of the expected scatter",
        text=1,
    )


def _measured(value: float, stderr: float | None, digits: int = 3) -> str:
    """A measured number with its standard error, if known."""
    text = _short(value, digits)
    return text if stderr is None or math.isnan(stderr) else f"{text} ±{_short(stderr, 1)}"


def _side_by_side(stream: Any, quantities: tuple[str, ...], title: str) -> str:
    heads, lines = ["layer"], []
    for name in quantities:
        heads += [_HEADS[name.removeprefix("grad_")], "measured", "error"]
    for layer, rows in stream.groupby("layer"):
        cells = [str(layer)]
        for name in quantities:
            row = rows[rows["quantity"] == name].iloc[0]
            mark = "*" if row["inside"] == 0 else ""  # nan without a band
            measured = _measured(row["measured"], row["stderr"])
            cells += [_short(row["predicted"]), measured, _error(name, row["error"]) + mark]
        lines.append(cells)
    caption = (
        "measured ± one standard error over seeds; error of the prediction, for correlations "
        "absolute; * outside its 95 % band"
    )
    return tabled(title, heads, lines, caption)


def _fit(r_squared: float) -> str:
    """R², "-" if the measured values do not vary beyond their noise."""
    if not math.isfinite(r_squared):
        return "-"
    return f"{r_squared:.2f}" if r_squared >= 0 else "< 0"


def _short(value: float, digits: int = 3) -> str:
    """Few significant digits; an exponent without its padding zero."""
    text = f"{value:.{digits}g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.{digits - 1}e}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def _error(quantity: str, error: float) -> str:
    if quantity.endswith("correlation"):
        return f"{error:+z.3f}"
    return f"{100 * error:+z.1f}%"


def summary_table(comparison: Comparison) -> str:
    """Errors per quantity, over the stream and over all sites inside the layers."""
    rows = []
    for row in comparison.summary().to_dict("records"):
        absolute = row["quantity"].endswith("correlation")
        show: Any = (lambda v: f"{v:.3f}") if absolute else (lambda v: f"{100 * v:.2f}%")
        errors = (show(row[name]) for name in ("mean", "median", "max", "excess"))
        rows.append((row["points"], TITLES[row["quantity"]], *errors, _fit(row["r_squared"])))
    return tabled(
        "mean, median and largest error; mean of what exceeds two standard errors",
        ("points", "quantity", "mean", "median", "max", "excess", "R²"),
        rows,
        text=2,
    )


# --- on one screen --------------------------------------------------------------------------------

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
    lines = [*tabled("", heads, rows).splitlines(), *_loss_lines(prediction)]
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
    lines += _loss_lines(p, None if m.loss is None else float(m.loss))
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


def _loss_lines(p: Prediction, measured: float | None = None) -> list[str]:
    if p.loss is None:
        return []
    vocabulary = class_count(p.model)
    of = "" if vocabulary is None else f", log({vocabulary}) = {math.log(vocabulary):.3f}"
    seen = "" if measured is None else f", measured {measured:.3f}"
    return [f"loss {float(p.loss):.3f} +- {float(p.loss_stderr or 0.0):.2g} (one draw){seen}{of}"]


def first_step_table(step: FirstStep) -> str:
    """The stream layer by layer, and the loss."""
    changes = zip(step.variance, step.relative_change, strict=True)
    return tabled(
        f"first step of {step.optimizer} at learning rate {step.learning_rate:.3g}: loss "
        f"{step.loss_before:.4g} to {step.loss:.4g}",
        ("layer", "variance after", "relative change"),
        ((str(k), number(v), number(change)) for k, (v, change) in enumerate(changes)),
        f"layer 0 is the input of layer 1; relative change: E |dh|^2/E |h|^2 before the step\n"
        f"slope {step.slope:.4g}: the loss would fall by "
        f"{-step.slope * step.learning_rate:.4g} if it were linear",
    )
