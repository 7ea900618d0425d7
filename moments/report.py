"""Tables for people: predictions and comparisons as rich tables and as text."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .comparison import Comparison
    from .prediction import Prediction

STREAM_QUANTITIES = ("variance", "correlation", "grad_variance", "grad_correlation")
_HEADS = {"variance": "variance", "correlation": "corr."}
TITLES = {
    "variance": "variance",
    "correlation": "token correlation",
    "grad_variance": "gradient variance",
    "grad_correlation": "gradient correlation",
}


def render(table: Table, width: int = 120) -> str:
    """A rich table as plain text."""
    buffer = io.StringIO()
    Console(file=buffer, width=width, color_system=None).print(table)
    return buffer.getvalue().rstrip()


def number(value: float) -> str:
    """Four significant digits, scientific only where it helps."""
    return f"{value:.4g}"


def prediction_table(prediction: Prediction) -> Table:
    """The stream layer by layer; for a batch, one row per configuration."""
    if prediction.variance.ndim > 1:
        return _batch_table(prediction)
    model = prediction.model
    table = Table(
        title=f"{model.layers} layers, {model.norm} norm, theory {prediction.theory}",
        caption="index 0 enters layer 1; gradients are means over draws of the weights",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("layer", justify="right")
    for name in STREAM_QUANTITIES:
        table.add_column(TITLES[name], justify="right")
    for index in range(model.layers + 1):
        cells = [number(getattr(prediction, name)[index]) for name in STREAM_QUANTITIES]
        table.add_row(str(index), *cells)
    return table


def _batch_table(prediction: Prediction) -> Table:
    table = Table(title=f"input and output of {prediction.model.layers} layers")
    table.add_column("configuration", justify="right")
    for name in STREAM_QUANTITIES:
        table.add_column(f"{TITLES[name]}, first", justify="right")
        table.add_column("last", justify="right")
    rows = [
        getattr(prediction, name).reshape(-1, prediction.model.layers + 1)
        for name in STREAM_QUANTITIES
    ]
    for index in range(rows[0].shape[0]):
        cells = [number(r[index, end]) for r in rows for end in (0, -1)]
        table.add_row(str(index), *cells)
    return table


def comparison_tables(comparison: Comparison) -> tuple[Table, Table]:
    """Stream points, predicted beside measured: the signal, and its gradient."""
    frame = comparison.to_frame()
    stream = frame[frame["site"] == "stream"]
    signal = _side_by_side(stream, STREAM_QUANTITIES[:2], "signal along the residual stream")
    gradient = _side_by_side(stream, STREAM_QUANTITIES[2:], "gradient along the residual stream")
    return signal, gradient


def _side_by_side(stream: Any, quantities: tuple[str, ...], title: str) -> Table:
    table = Table(
        title=title,
        caption="measured ± one standard error over seeds; errors of correlations absolute",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("layer", justify="right")
    for name in quantities:
        table.add_column(_HEADS[name.removeprefix("grad_")], justify="right", no_wrap=True)
        table.add_column("measured", justify="right", no_wrap=True)
        table.add_column("error", justify="right", no_wrap=True)
    for layer, rows in stream.groupby("layer"):
        cells: list[str] = []
        for name in quantities:
            row = rows[rows["quantity"] == name].iloc[0]
            measured = f"{_short(row['measured'])} ±{_short(row['stderr'], 1)}"
            cells += [_short(row["predicted"]), measured, _error(name, row["error"])]
        table.add_row(str(layer), *cells)
    return table


def _fit(r_squared: float) -> str:
    """R², which says nothing where the measured values do not vary beyond their noise."""
    if not math.isfinite(r_squared):
        return "-"
    return f"{r_squared:.2f}" if r_squared >= 0 else "< 0"


def _short(value: float, digits: int = 3) -> str:
    """Few significant digits; an exponent without its padding zero."""
    text = f"{value:.{digits}g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.{digits - 1}e}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def _error(quantity: str, error: float) -> str:
    if quantity.endswith("correlation"):
        return f"{error:+.3f}"
    return f"{100 * error:+.1f}%"


def summary_table(comparison: Comparison) -> Table:
    """Errors per quantity, over the stream and over all sites inside the layers."""
    table = Table(
        title="mean, median and largest error; mean of what exceeds two standard errors",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("points", "quantity"):
        table.add_column(name, no_wrap=True)
    for name in ("mean", "median", "max", "excess", "R²"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in comparison.summary().to_dict("records"):
        absolute = row["quantity"].endswith("correlation")
        show: Any = (lambda v: f"{v:.3f}") if absolute else (lambda v: f"{100 * v:.2f}%")
        table.add_row(
            row["points"],
            TITLES[row["quantity"]],
            *(show(row[name]) for name in ("mean", "median", "max", "excess")),
            _fit(row["r_squared"]),
        )
    return table
