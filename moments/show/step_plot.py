"""A first step drawn as people draw a coordinate check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..step.measured import StepMeasurement
from ..step.result import FirstStep
from .palette import BLACK, BLUE, GREEN, GREY, MEASURED, ORANGE, PURPLE, SKY, VERMILION
from .plot import Picture, along_layers, dress, round_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SITES = {
    "stream": (BLACK, "o"),
    "attention.heads": (BLUE, "s"),
    "attention.projection": (SKY, "D"),
    "ffn.activation": (VERMILION, "^"),
    "ffn.out": (ORANGE, "v"),
}
WEIGHTS = {
    "query": (GREEN, "P"),
    "key": (PURPLE, "X"),
    "value": (BLUE, "s"),
    "output": (SKY, "D"),
    "gate": (GREY, "<"),
    "ffn_in": (VERMILION, "^"),
    "ffn_out": (ORANGE, "v"),
}


def plot_first_step(
    step: FirstStep, name: str | None = None, measured: StepMeasurement | None = None
) -> Figure:
    """Three panels along the depth: relative change of sites, size of steps against weights, and
    alignment; hollow marks are measured, with twice their standard error.

    Args:
        step: the prediction.
        name: the model's, for the title.
        measured: a module's step at the same rate.
    """
    figure = Picture(12.5, 4.4)
    axes = figure.subplots(1, 3)
    sites, weights = step.to_frame(), step.weights()
    seen = None if measured is None else measured.to_frame()
    for site, style in SITES.items():
        _line(axes[0], sites, "site", site, "relative_change", style)
        if seen is not None:
            _marks(axes[0], seen, "site", site, "relative_change", style)
    weights = weights.assign(
        relative=weights["update_variance"] / weights["weight_variance"].where(lambda v: v > 0)
    )
    seen_weights = None if measured is None else measured.weights()
    if seen_weights is not None:
        scale = seen_weights["weight_variance"].where(lambda v: v > 0)
        seen_weights = seen_weights.assign(
            relative=seen_weights["update_variance"] / scale,
            relative_stderr=seen_weights["update_variance_stderr"] / scale,
        )
    for weight, style in WEIGHTS.items():
        for ax, quantity in ((axes[1], "relative"), (axes[2], "alignment")):
            _line(ax, weights, "weight", weight, quantity, style)
            if seen_weights is not None:
                _marks(ax, seen_weights, "weight", weight, quantity, style)
    titles = (
        "relative change of a site, E|dh|² / E|h|²",
        "step over weight, E dW² / E W²",
        "alignment exponent (½ random, 1 full)",
    )
    for ax, title in zip(axes, titles, strict=True):
        dress(ax, title, 10)
        along_layers(ax)
    for ax in axes[:2]:
        if any(np.all(np.asarray(line.get_ydata()) > 0) for line in ax.get_lines()):
            ax.set_yscale("log")
            low, high = ax.get_ylim()
            if high < 3 * low:
                middle = (low * high) ** 0.5
                ax.set_ylim(middle / 2, middle * 2)
            round_ticks(ax.yaxis, *ax.get_ylim())
    axes[2].set_ylim(0.45, 1.05)
    for ax in (axes[0], axes[1]):
        handles, _ = ax.get_legend_handles_labels()
        figure.legend(
            handles=handles,
            loc="outside lower left" if ax is axes[0] else "outside lower right",
            ncols=4,
            fontsize=8,
            frameon=False,
        )
    called = f"{name}: first" if name else "First"
    figure.head(
        f"{called} step of {step.optimizer} at learning rate {step.learning_rate:g}; loss "
        f"{step.loss_before:.3f} to {step.loss:.3f}"
        + ("" if measured is None else f", measured {measured.loss:.3f}")
    )
    return figure


def _drawable(frame: Any, column: str, key: str, quantity: str) -> Any:
    found = frame[(frame[column] == key) & np.isfinite(frame[quantity])]
    return found if quantity == "alignment" else found[found[quantity] > 0]


def _line(
    ax: Axes, frame: Any, column: str, key: str, quantity: str, style: tuple[str, str]
) -> None:
    found, (color, marker) = _drawable(frame, column, key, quantity), style
    if len(found):
        of_line: dict[str, Any] = {"markersize": 4, "linewidth": 1.4, "label": key}
        ax.plot(found["layer"], found[quantity], color=color, marker=marker, **of_line)


def _marks(
    ax: Axes, frame: Any, column: str, key: str, quantity: str, style: tuple[str, str]
) -> None:
    found, (color, marker) = _drawable(frame, column, key, quantity), style
    if len(found):
        ax.errorbar(
            found["layer"],
            found[quantity],
            yerr=2 * np.nan_to_num(found[f"{quantity}_stderr"].to_numpy(float)),
            color=color,
            ecolor=MEASURED,
            marker=marker,
            markersize=8,
            markerfacecolor="none",
            linestyle="none",
            elinewidth=0.8,
        )
