"""Plots of a sweep: lines over one axis, maps over two."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DomainError, domain_error, unknown_name
from ..model.summary import in_brief
from ..show import palette
from ..show.plot import Picture, round_ticks, scale, styled, ticks, titled
from .axes import in_words, numeric
from .store import QUANTITIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Panel
    from matplotlib.figure import Figure

    from .result import Sweep

FEW = 8
"""Largest number of lines."""

MOST_PANELS = 9

AXES = {
    "seq_len": "tokens",
    "temperature": "temperature of the attention",
    "variance": "variance of the input",
    "correlation": "token correlation of the input",
    "grad_variance": "gradient variance at the output",
    "grad_correlation": "gradient correlation at the output",
}
_ROUND = [m * 10**e for e in range(7) for m in (1, 2, 5)]
STYLES = ("-", "--", ":", "-.")


def axis_title(name: str) -> str:
    """The label of an axis."""
    kind, _, part = name.rpartition(".")
    words = AXES.get(name, part.replace("_", " "))
    return f"variance of {words} weights" if kind == "weights" else words


@styled
def plot_sweep(
    sweep: Sweep,
    x: str | None,
    y: str | None,
    quantity: str,
    by: str | None,
    name: str | None,
) -> Figure:
    """See `Sweep.plot`."""
    if quantity not in sweep.values:
        raise unknown_name("quantity", quantity, sweep.values)
    x, y, by = _chosen(sweep, x, y, by)
    figure = _lines(sweep, x, by, quantity) if y is None else _maps(sweep, x, y, by, quantity)
    width = int(10.5 * figure.get_figwidth())
    figure.head(textwrap.fill(_title(sweep, name, {x, y, by}), width))
    if note := _note(sweep):
        figure.below(note)
    return figure


def _chosen(
    sweep: Sweep, x: str | None, y: str | None, by: str | None
) -> tuple[str, str | None, str | None]:
    """The axes x, y and by, with defaults for None; axes of one value are fixed."""
    values = sweep.axes.values
    for argument, axis in (("x", x), ("y", y), ("by", by)):
        if axis is not None and axis not in values:
            raise unknown_name(argument, axis, values)
    named = [axis for axis in (x, y, by) if axis is not None]
    if len(set(named)) < len(named):
        raise domain_error("y" if x == y else "by", named[-1], "another axis than the others")
    left = [axis for axis, entries in values.items() if len(entries) > 1 and axis not in named]
    if x is None:
        x = left.pop(0) if left else next(axis for axis in values if axis not in named)
    if y is None and by is None and len(left) == 1 and len(values[left[0]]) <= FEW:
        by = left.pop()
    elif y is None and left and by is None:
        y = left.pop(0)
    if by is None and left:
        by = left.pop(0)
    if left:
        raise DomainError(
            f"{len(left)} axes more than a picture has ({', '.join(left)}): sweep one value of them"
        )
    most = MOST_PANELS if y is not None else FEW
    if by is not None and len(values[by]) > most:
        what = "maps" if y is not None else "lines"
        raise domain_error(
            "by", by, f"an axis of at most {most} values, one for each of the {what}"
        )
    return x, y, by


def _array(sweep: Sweep, values: np.ndarray, order: Iterable[str | None]) -> np.ndarray:
    """Values of the grid with its axes in this order; all others have a single value."""
    names = list(sweep.axes.values)
    first = [axis for axis in order if axis is not None]
    rest = [names.index(axis) for axis in names if axis not in first]
    values = np.transpose(values, [*map(names.index, first), *rest])
    return values.reshape(values.shape[: len(first)])


# --- lines ----------------------------------------------------------------------------------------


def _lines(sweep: Sweep, x: str, by: str | None, quantity: str) -> Picture:
    import matplotlib as mpl

    figure = Picture(7.2, 4.6)
    ax = figure.subplots()
    values = _array(sweep, sweep.values[quantity], (x, by))
    curves = values.T if by is not None else values[None]
    places = _places(sweep.axes.values[x])
    colors: Any = mpl.colormaps[palette.SEQUENTIAL](np.linspace(0.0, 0.75, len(curves)))
    if by is not None and not numeric(sweep.axes.values[by]):
        colors = list(itertools.islice(itertools.cycle(palette.SERIES), len(curves)))
    marker = "o" if len(places) <= 30 else ""
    for i, curve in enumerate(curves):
        label = None if by is None else in_words(sweep.axes.values[by][i])
        style = STYLES[i % len(STYLES)] if len(curves) > 1 else "-"
        ax.plot(places, curve, style, marker=marker, markersize=3.5, color=colors[i], label=label)
    _set_axis(ax, "x", x, sweep.axes.values[x])
    ax.set_ylabel(QUANTITIES[quantity])
    scale(ax, quantity, values)
    if quantity.endswith("growth"):
        ax.axhline(1.0, color=palette.GREY, linewidth=0.8, zorder=0)
    if by is not None:
        ax.legend(title=axis_title(by))
    return figure


# --- maps -----------------------------------------------------------------------------------------


def _maps(sweep: Sweep, x: str, y: str, by: str | None, quantity: str) -> Picture:
    values = _array(sweep, sweep.values[quantity], (by, x, y))
    panels = values if by is not None else values[None]
    count = len(panels)
    across = min(count, 3)
    down = math.ceil(count / across)
    figure = Picture(*((7.4, 5.2) if count == 1 else (1.6 + 3.3 * across, 1.5 + 3.0 * down)))
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    places = _places(sweep.axes.values[x]), _places(sweep.axes.values[y])
    colors, levels = _colors(quantity, values), _levels(quantity, values)
    noted = [
        (_flags(sweep, notes, (by, x, y)).reshape(panels.shape), style)
        for notes, style in (
            (sweep.warnings, {"marker": ".", "color": "white", "markersize": 2.5}),
            (sweep.refused, {"marker": "x", "color": palette.BLACK, "markersize": 4}),
        )
    ]
    mesh: Any = None
    for ax in grid.ravel()[count:]:
        ax.set_visible(False)
    for i, ax in enumerate(grid.ravel()[:count]):
        _set_axis(ax, "x", x, sweep.axes.values[x])
        _set_axis(ax, "y", y, sweep.axes.values[y])
        mesh = _map(ax, places, panels[i], levels, colors)
        for flags, style in noted:
            at, up = np.nonzero(flags[i])
            ax.plot(places[0][at], places[1][up], linestyle="none", **style)
        if by is not None:
            ax.set_title(f"{axis_title(by)} {in_words(sweep.axes.values[by][i])}")
    bar = figure.colorbar(
        mesh, ax=grid.ravel().tolist(), pad=0.02, shrink=0.95 if count == 1 else 0.8
    )
    bar.set_label(QUANTITIES[quantity])
    if _logarithmic(quantity, values):
        round_ticks(bar, mesh.norm.vmin, mesh.norm.vmax)
    for ax in grid[:, 1:].ravel():
        ax.set_ylabel("")
    for ax in grid[:-1].ravel():
        ax.set_xlabel("")
    return figure


def _map(
    ax: Panel,
    places: tuple[np.ndarray, np.ndarray],
    values: np.ndarray,
    levels: list[float],
    colors: dict[str, Any],
) -> Any:
    """Cells and level lines; missing cells show the background."""
    ax.set_facecolor(palette.PALE)
    edges = map(_edges, places, (ax.get_xscale(), ax.get_yscale()))
    mesh = ax.pcolormesh(*edges, np.ma.masked_invalid(values).T, **colors, rasterized=True)
    if min(values.shape) > 2 and levels:
        drawn = ax.contour(
            *places, values.T, levels=levels, colors="black", linewidths=0.7, alpha=0.7
        )
        ax.clabel(drawn, fmt=in_words, fontsize=7.5, inline_spacing=3)
    return mesh


# --- axes, colours and words ----------------------------------------------------------------------


def _places(values: tuple[Any, ...]) -> np.ndarray:
    return np.array(values if numeric(values) else range(len(values)), dtype=float)


def _set_axis(ax: Panel, which: str, name: str, values: tuple[Any, ...]) -> None:
    """Set label, ticks and scale: logarithmic if positive values span a factor of twenty."""
    places = _places(values)
    getattr(ax, f"set_{which}label")(axis_title(name))
    if not numeric(values):
        getattr(ax, f"set_{which}ticks")(places, [in_words(v) for v in values])
    elif places.min() > 0 and places.max() >= 20 * places.min():
        getattr(ax, f"set_{which}scale")("log")
        if all(isinstance(v, int) for v in values):
            whole = [int(v) for v in values]
            if len(whole) > 10:
                whole = [n for n in _ROUND if min(whole) <= n <= max(whole)]
            getattr(ax, f"set_{which}ticks")(whole, [str(v) for v in whole])
            getattr(ax, f"set_{which}ticks")([], minor=True)
        else:
            round_ticks(getattr(ax, f"{which}axis"), places.min(), places.max())
    elif all(isinstance(v, int) for v in values):
        axis = getattr(ax, f"{which}axis")
        if len(values) > 8:
            axis.get_major_locator().set_params(integer=True)
        else:
            axis.set_ticks(places)


def _edges(places: np.ndarray, scale: str) -> np.ndarray:
    """Edges of cells around places, halfway between them on the axis's scale."""
    order = np.log(places) if scale == "log" else places
    if len(order) == 1:
        edges = order[0] + np.array([-0.5, 0.5])
    else:
        middle = (order[1:] + order[:-1]) / 2
        first, last = 2 * order[0] - middle[0], 2 * order[-1] - middle[-1]
        edges = np.concatenate([[first], middle, [last]])
    return np.asarray(np.exp(edges) if scale == "log" else edges)


def _range(values: np.ndarray) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)


def _logarithmic(quantity: str, values: np.ndarray) -> bool:
    low, high = _range(values)
    return not quantity.endswith("correlation") and low > 0 and high > 5 * low


def _colors(quantity: str, values: np.ndarray) -> dict[str, Any]:
    """A diverging colour scale for growth, else a sequential one that is readable in grey."""
    from matplotlib.colors import LogNorm, Normalize

    low, high = _range(values)
    if quantity.endswith("growth") and 0 < low < 0.9 and high > 1.1:
        far = max(high, 1 / low, 1.05)
        return {"cmap": "RdBu_r", "norm": LogNorm(1 / far, far)}
    if _logarithmic(quantity, values):
        return {"cmap": palette.SEQUENTIAL, "norm": LogNorm(low, high)}
    if quantity.endswith("correlation"):
        low, high = min(low, 0.0), max(high, low + 0.05)
    return {"cmap": palette.SEQUENTIAL, "norm": Normalize(low, high if high > low else low + 1.0)}


def _levels(quantity: str, values: np.ndarray) -> list[float]:
    low, high = _range(values)
    if not high > low:
        return []
    if quantity.endswith("correlation"):
        levels = [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999]
    else:
        levels = ticks(low, high, _logarithmic(quantity, values))
    return [level for level in levels if low < level < high]


def _flags(sweep: Sweep, notes: Mapping[int, Any], order: Iterable[str | None]) -> np.ndarray:
    """Whether each configuration has a note, in the order of `_array`."""
    flat = np.zeros(sweep.axes.size, dtype=bool)
    flat[list(notes)] = True
    return _array(sweep, flat.reshape(sweep.axes.shape), order)


def _title(sweep: Sweep, name: str | None, varied: set[str | None]) -> str:
    base, axes = sweep.model(), sweep.axes.values
    fixed = {a: values[0] for a, values in axes.items() if len(values) == 1 and a not in varied}
    fixed |= {axis: value for axis, value in sweep.inputs.items() if numeric([value])}
    words = [f"{axis_title(axis)} {in_words(value)}" for axis, value in fixed.items()]
    activation = "" if "activation" in axes else base.activation
    plain = "theory" in axes or sweep.theory == "refined"
    theory = "" if plain else f"{sweep.theory} formulas"
    parts = filter(None, (in_brief(base, axes), activation, *words, theory))
    return titled(base, name, ", ".join(parts))


def _note(sweep: Sweep) -> str:
    parts = []
    if sweep.warnings:
        parts.append(f"dots: {len(sweep.warnings)} outside a formula's validity")
    if sweep.refused:
        parts.append(f"crosses: {len(sweep.refused)} refused")
    left = int((~sweep.done).sum())
    if left:
        parts.append(f"grey: {left} not computed yet")
    return "; ".join(parts)
