"""Which learning rates will train, drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..step.search import LearningRate
from .palette import BLUE, GREEN, VERMILION
from .plot import Picture, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def plot_learning_rate(rates: LearningRate, name: str | None = None) -> Figure:
    """The loss after one step over rates, with the range to search and its end."""
    top = 30 * rates.step_size
    if rates.first_instability is not None:
        top = max(top, 1.5 * rates.first_instability)
    places = np.geomspace(rates.step_size / 10, top, 15)
    figure = Picture(6.4, 3.8)
    ax = figure.subplots()
    ax.semilogx(places, rates.losses(places.tolist()), color=BLUE, marker="o", markersize=3)
    ax.axhline(rates.step.loss_before, color=BLUE, linestyle=":", linewidth=1)
    ax.axvline(rates.step_size, color=BLUE, linestyle="--", linewidth=1, label="step size")
    if rates.range is not None and rates.first_instability is not None:
        ax.axvspan(*rates.range, color=GREEN, alpha=0.18, linewidth=0, label="search")
    if rates.first_instability is not None:
        ax.axvline(rates.first_instability, color=VERMILION, linewidth=1.4, label="unstable from")
    ax.set(xlabel=f"learning rate of {rates.optimizer}", ylabel="loss after one step (nats)")
    figure.legend(loc="outside lower left", ncols=3)
    figure.head("Which rates will train" if name is None else f"{name}: which rates will train")
    return figure
