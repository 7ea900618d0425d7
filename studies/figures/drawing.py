"""`draw`: a figure's predictions as lines, its stored simulations as points over them.

`simulate` makes what is stored.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moments.errors import domain_error
from moments.show.palette import MARKERS, PALE, SEQUENTIAL, SERIES
from moments.show.plot import Picture, round_ticks, save, styled

from . import kedia, noci, sun
from .setup import FigureLine, HeatMap, Panel, Setup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


@cache
def _declared() -> dict[str, Setup]:
    return {found.name: found for paper in (kedia, sun, noci) for found in paper.figures()}


def names() -> tuple[str, ...]:
    """What `draw` takes."""
    return tuple(_declared())


def setup(name: str) -> Setup:
    """A figure's panels, lines and settings.

    Raises:
        DomainError: there is no such figure.
    """
    if name not in _declared():
        raise domain_error("figure", name, f"one of {', '.join(names())}")
    return _declared()[name]


DATA = Path(__file__).parent / "data" / "points.json"


@cache
def stored() -> Mapping[str, Any]:
    """By key: x, value, stderr, seeds, and the model and inputs they were made with."""
    found: Mapping[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def key(figure: str, panel: int, label: str) -> str:
    """Where a line's points are stored."""
    return f"{figure}/{panel}/{label}"


MOST_POINTS = 25


@styled
def draw(name: str, path: str | Path | None = None) -> Figure:
    """Redraw one figure.

    Args:
        name: one of `names()`, such as "kedia-3".
        path: where to save it, as its ending .png, .svg or .pdf says; None: it is only returned.

    Returns:
        The figure; points are simulations, with bars of two standard errors over draws.

    Raises:
        DomainError: there is no such figure or format, or it cannot be saved there.
    """
    found = setup(name)
    count = found.columns or len(found.panels)
    lines = -(-len(found.panels) // count)
    width = 4.0 if isinstance(found.panels[0], HeatMap) else 5.2
    figure = Picture(max(1.2 + width * count, 6.4), 0.8 + 4.0 * lines)
    for index, panel in enumerate(found.panels):
        ax = figure.add_subplot(lines, count, index + 1)
        if isinstance(panel, HeatMap):
            image = _heat_map(ax, panel)
            if index == count - 1:
                label = "angular distance (0 alike, .5 unrelated)"
                figure.colorbar(image, ax=figure.axes, label=label, shrink=0.9)
        else:
            _panel(ax, found, index, panel)
    for column in range(count if lines > 1 else 0):
        _alike(figure.axes[column::count])
    figure.head(f"{found.title}\n{found.source}")
    text = ". ".join((found.settings, *_about_points(found)))
    wrapped = textwrap.fill(text, int(15 * figure.get_figwidth()))
    figure.below(wrapped)
    if path is not None:
        save(figure, path, dpi=120)
    return figure


def _simulated(found: Setup) -> list[tuple[FigureLine, str]]:
    """Lines that points belong over, and where they are stored."""
    return [
        (line, key(found.name, index, line.label))
        for index, panel in enumerate(found.panels)
        for line in panel.lines
        if line.points
    ]


def _about_points(found: Setup) -> list[str]:
    """What points and bars are."""
    lines = _simulated(found)
    draws = sorted({stored()[where]["made"]["seeds"] for _, where in lines})
    if not draws:
        return []
    counted = " or ".join(map(str, draws))
    text = f"Lines: predictions. Points: simulations, {counted} draws, two standard errors"
    if all(line.site is None for line, _ in lines):
        return [f"{text}; a line's points share their draws, and so the side they lie on"]
    return [text]


def _heat_map(ax: Axes, panel: HeatMap) -> AxesImage:
    values = panel.distances()
    count = len(values)
    # Row n starts at n layers further, so that cells are centred on whole numbers.
    edges, colors = (-0.5, count - 0.5, 0.5, count + 0.5), f"{SEQUENTIAL}_r"
    image = ax.imshow(
        values,
        origin="lower",
        extent=edges,
        cmap=colors,
        vmin=0,
        vmax=0.5,
        aspect="auto",
    )
    ax.set_title(panel.title)
    ax.grid(False)
    ax.set_xlabel("from layer (0 enters layer 1)")
    ax.set_ylabel("layers further")
    return image


def _alike(axes: list[Axes]) -> None:
    """One scale for panels above each other."""
    ends = [ax.get_ylim() for ax in axes]
    for ax in axes:
        ax.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))


def _darker(color: str) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple(0.5 * part for part in to_rgb(color))


def _panel(ax: Axes, found: Setup, index: int, panel: Panel) -> None:
    ends: list[np.ndarray] = []
    if panel.diagonal:
        ax.plot([0, 1], [0, 1], color=PALE, linewidth=1, zorder=0)
    colored = 0
    for line in panel.lines:
        x, values = line.predicted()
        if line.points:
            color = SERIES[colored % len(SERIES)]
            colored += 1
            ends.append(values)
        dash = "-" if line.points else (0, (5, 2))
        # Later lines are thinner, so that one that covers another shows both.
        width = 2.8 - 0.5 * colored if line.points else 1.4
        # What is held beside a prediction is drawn over it, where the two coincide too.
        shade, order = (color, 2) if line.points else (_darker(color), 4)
        style = {"linestyle": dash, "linewidth": width, "zorder": order}
        (drawn,) = ax.plot(x, values, color=shade, label=line.label)
        drawn.set(**style)
        if line.points:
            _points(ax, line, key(found.name, index, line.label), color, panel)
    ax.set_title(panel.title)
    ax.set_xlabel(panel.x)
    ax.set_ylabel(panel.y)
    if panel.log_x:
        ax.set_xscale("symlog", linthresh=1, linscale=0.4)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.log:
        ax.set_yscale("log")
        round_ticks(ax.yaxis, *ax.get_ylim())
    else:
        ax.margins(y=0.08)
        ax.set_ylim(bottom=min(0.0, *(float(v.min()) for v in ends)))
    if len(panel.lines) > 1:
        ax.legend()


def _shown(count: int, log: bool) -> np.ndarray:
    """Indices of at most MOST_POINTS points, evenly along their axis."""
    if log:
        return np.unique(np.rint(np.geomspace(1, count, MOST_POINTS)).astype(int) - 1)
    return np.arange(0, count, max(1, count // MOST_POINTS))


def _points(ax: Axes, line: FigureLine, where: str, color: str, panel: Panel) -> None:
    points = stored()[where]
    chosen = _shown(len(points["x"]), panel.log_x)
    x, value, stderr = (np.array(points[name])[chosen] for name in ("x", "value", "stderr"))
    bar = 2 * np.nan_to_num(stderr)
    if panel.log:  # of the logarithm: a bar of the value itself would reach below zero
        factor = np.exp(bar / value)
        low, high = value * (1 - 1 / factor), value * (factor - 1)
    else:
        low, high = bar, bar
    ax.errorbar(
        x,
        value,
        yerr=np.stack([low, high]),
        fmt=MARKERS[SERIES.index(color)],
        markersize=4.2,
        color=color,
        markeredgecolor="white",
        markeredgewidth=0.5,
        elinewidth=0.8,
        zorder=3,
    )
