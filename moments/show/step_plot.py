"""Pictures of a first step, in the form of a coordinate check, and of learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..step.measured import StepMeasurement
from ..step.result import FirstStep
from ..step.search import LearningRate
from .palette import BLACK, BLUE, GREEN, GREY, MEASURED, ORANGE, PURPLE, SKY, VERMILION
from .plot import Picture, along_layers, round_ticks, styled

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
PANELS = (
    ("relative_change", SITES, "Relative change of the stream, E|dh|² / E|h|²"),
    ("relative", WEIGHTS, "Step over weight, E dW² / E W²"),
    ("alignment", WEIGHTS, "Alignment exponent (½ random, 1 full)"),
)
"""Quantity, styles of its curves, title."""


@styled
def plot_first_step(
    step: FirstStep, name: str | None = None, measured: StepMeasurement | None = None
) -> Figure:
    """Three panels along the depth: relative change of sites, size of updates relative to weights,
    and alignment. Hollow marks are a step measured at the same rate, ± two standard errors."""
    figure = Picture(12.5, 4.4)
    axes = figure.subplots(1, 3)
    for ax, (quantity, styles, title) in zip(axes, PANELS, strict=True):
        result = _known(step, quantity)
        seen = None if measured is None else _known(measured, quantity)
        for key, (color, marker) in styles.items():
            _line(ax, result[result["key"] == key], key, color, marker)
            if seen is not None:
                _marks(ax, seen[seen["key"] == key], color, marker)
        ax.set_title(title)
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
        )
    called = f"{name}: first" if name else "First"
    figure.head(
        f"{called} step of {step.optimizer} at learning rate {step.learning_rate:g}; loss "
        f"{step.loss_before:.3f} to {step.loss:.3f}"
        + ("" if measured is None else f", measured {measured.loss:.3f}")
    )
    return figure


def _known(step: FirstStep | StepMeasurement, quantity: str) -> Any:
    """Rows of a panel's quantity: layer, key (of its style), value, stderr of a measurement."""
    if quantity == "relative_change":
        frame: Any = step.to_frame().rename(columns={"site": "key"})
    else:
        frame = step.weights().rename(columns={"weight": "key"})
        updates = [name for name in frame if name.startswith("update_variance")]
        scale = frame["weight_variance"].where(lambda v: v > 0)
        for name in updates:
            frame[name.replace("update_variance", "relative")] = frame[name] / scale
    frame = frame.rename(columns={quantity: "value", f"{quantity}_stderr": "stderr"})
    known = np.isfinite(frame["value"]) & ((frame["value"] > 0) | (quantity == "alignment"))
    return frame[known]


def _line(ax: Axes, rows: Any, key: str, color: str, marker: str) -> None:
    if len(rows):
        (line,) = ax.plot(
            rows["layer"], rows["value"], color=color, marker=marker, label=_words(key)
        )
        line.set(markersize=4, linewidth=1.4)


def _words(key: str) -> str:
    return key.replace("_", " ").replace(".", " ")


def _marks(ax: Axes, rows: Any, color: str, marker: str) -> None:
    if len(rows):
        ax.errorbar(
            rows["layer"],
            rows["value"],
            yerr=2 * np.nan_to_num(rows["stderr"].to_numpy(float)),
            color=color,
            ecolor=MEASURED,
            marker=marker,
            markersize=8,
            markerfacecolor="none",
            linestyle="none",
            elinewidth=0.8,
        )


@styled
def plot_learning_rate(rates: LearningRate, name: str | None = None) -> Figure:
    """The loss after one step over learning rates, with the range to search and its limits."""
    top = 30 * rates.step_size
    if rates.edge is not None:
        top = max(top, 1.5 * rates.edge)
    places = np.geomspace(rates.step_size / 10, top, 15)
    figure = Picture(6.4, 3.8)
    ax = figure.subplots()
    ax.semilogx(places, rates.losses(places.tolist()), color=BLUE, marker="o", markersize=3)
    ax.axhline(rates.step.loss_before, color=BLUE, linestyle=":", linewidth=1)
    ax.axvline(rates.step_size, color=BLUE, linestyle="--", linewidth=1, label="step size")
    if rates.range is not None:
        ax.axvspan(*rates.range, color=GREEN, alpha=0.18, linewidth=0, label="search")
    if rates.first_instability is not None:
        ax.axvline(rates.first_instability, color=VERMILION, linewidth=1.4, label="unstable from")
    if rates.edge is not None:
        ax.axvline(rates.edge, color=VERMILION, linestyle=":", linewidth=1.4, label="edge")
    ax.set(xlabel=f"learning rate of {rates.optimizer}", ylabel="loss after one step (nats)")
    figure.legend(loc="outside lower left", ncols=3)
    figure.head("Which rates will train" if name is None else f"{name}: which rates will train")
    return figure
