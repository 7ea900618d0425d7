"""`draw`: a figure's predictions as lines, its stored simulations as points over them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .catalogue import setup
from .points import key, stored
from .setup import Line, Panel, Setup

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#1b6ca8", "#c8553d", "#3a8f5c", "#8d5bb0")
MOST_POINTS = 25


def draw(name: str, path: str | Path | None = None) -> Figure:
    """Redraw one figure.

    Args:
        name: one of `names()`, such as "kedia-3".
        path: where to save it, its ending gives the format; None: it is only returned.

    Returns:
        The figure; points are simulations, with bars of two standard errors over draws.

    Raises:
        DomainError: there is no such figure.
    """
    from ..plot import Picture

    found = setup(name)
    count = len(found.panels)
    figure = Picture(figsize=(1.2 + 5.2 * count, 4.6), layout="constrained")
    for index, panel in enumerate(found.panels):
        _panel(figure.add_subplot(1, count, index + 1), found, index, panel)
    figure.suptitle(f"{found.title}\n{found.source}", x=0.01, ha="left", fontsize=11)
    settings = textwrap.fill(found.settings + _unsimulated(found), 72 * count + 12)
    figure.supxlabel(settings, x=0.01, ha="left", fontsize=8, color="#555555")
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _unsimulated(found: Setup) -> str:
    """What belongs under a figure some of whose lines have no stored points."""
    lines = [
        line.label
        for index, panel in enumerate(found.panels)
        for line in panel.lines
        if line.points and key(found.name, index, line.label) not in stored()
    ]
    return f". NOT SIMULATED yet: {len(lines)} lines" if lines else ""


def _panel(ax: Axes, found: Setup, index: int, panel: Panel) -> None:
    ends: list[np.ndarray] = []
    if panel.diagonal:
        ax.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=1, zorder=0)
    colored = 0
    for line in panel.lines:
        x, values = line.predicted()
        if line.points:
            color = COLORS[colored % len(COLORS)]
            colored += 1
            ends.append(values)
        dash = "-" if line.points else (0, (5, 2))
        ax.plot(x, values, color=color, linestyle=dash, linewidth=1.8, label=line.label)
        if line.points:
            _points(ax, line, key(found.name, index, line.label), color)
    ax.set_title(panel.title, loc="left", fontsize=10)
    ax.set_xlabel(panel.x)
    ax.set_ylabel(panel.y)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)
    if panel.log:
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=min(0.0, *(float(v.min()) for v in ends)))
    if len(panel.lines) > 1:
        ax.legend(frameon=False, fontsize=8.5)


def _points(ax: Axes, line: Line, where: str, color: str) -> None:
    points = stored().get(where)
    if points is None:
        return
    step = max(1, len(points["x"]) // MOST_POINTS)
    x, value, stderr = (np.array(points[name])[::step] for name in ("x", "value", "stderr"))
    ax.errorbar(
        x,
        value,
        yerr=2 * np.nan_to_num(stderr),
        fmt="o",
        markersize=3.5,
        color=color,
        markeredgecolor="white",
        markeredgewidth=0.5,
        elinewidth=0.8,
        zorder=3,
    )
