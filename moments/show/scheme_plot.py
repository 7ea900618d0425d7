"""The picture of a comparison of schemes: a row of panels per family, three quantities each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..scheme import Scheme
from ..scheme.registry import scheme
from .palette import DASHES, PALE, SERIES
from .plot import DEPTH, Picture, along_layers, round_ticks, styled, titled
from .scheme_table import SchemeComparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 6
"""Most lines that can be distinguished in one panel."""

QUANTITIES = ("variance", "correlation", "gradient")
TITLES = {
    "variance": "Signal variance, over the input's",
    "correlation": "Correlation between tokens",
    "gradient": "Gradient variance, over the output's",
}
FAMILIES = ("weights", "residual scales", "normalisation")


def family(scheme: Scheme) -> str:
    """Family of a scheme: weights alone, scales of the residual sum, or normalisation."""
    if {"branch_scale", "skip_scale", "identity_attention"} & set(scheme.sets):
        return "residual scales"
    return "weights" if "weights" in scheme.sets else "normalisation"


def rows(names: list[str]) -> list[tuple[str, list[str]]]:
    """Divide names by family into rows of at most MOST."""
    result = []
    for title in FAMILIES:
        members = [name for name in names if family(scheme(name)) == title]
        if members:
            parts = np.array_split(members, -(-len(members) // MOST))
            result += [(title, part.tolist()) for part in parts]
    return result


@styled
def plot_schemes(comparison: SchemeComparison, name: str | None = None) -> Figure:
    """Every scheme along the depth; the schemes of other rows are grey, for comparison."""
    parts = rows(list(comparison.predictions))
    curves = {one: _curves(result) for one, result in comparison.predictions.items()}
    figure = Picture(12.5, 2.5 * len(parts) + 0.7)
    axes = figure.subplots(len(parts), 3, sharex=True, sharey="col", squeeze=False)
    for line, (title, names) in zip(axes, parts, strict=True):
        for ax, quantity in zip(line, QUANTITIES, strict=True):
            _panel(ax, quantity, names, curves)
        line[0].set_ylabel(title, fontweight="bold")
        line[2].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    for ax, quantity in zip(axes[0], QUANTITIES, strict=True):
        ax.set_title(TITLES[quantity])
    for ax in axes[-1]:
        along_layers(ax, DEPTH)
    for column, quantity in enumerate(QUANTITIES):
        _scale(axes[0, column], quantity, [c[quantity] for c in curves.values()])
    model = comparison.model
    figure.head(
        titled(
            model,
            name,
            f"{len(curves)} schemes, {model.layers} layers, d_model {model.d_model}, "
            f"{model.seq_len} tokens, {model.activation}, dropout {model.dropout:g}",
        )
    )
    figure.below(
        "Predictions at initialisation, each scheme at its authors' norm placement. "
        "Grey: the schemes of the other rows; a line that leaves a panel is off its scale."
    )
    return figure


def _curves(result: Any) -> dict[str, np.ndarray]:
    return {
        "variance": result.variance / result.variance[0],
        "correlation": result.correlation,
        "gradient": result.grad_variance / result.grad_variance[-1],
    }


def _panel(ax: Axes, quantity: str, names: list[str], curves: dict[str, Any]) -> None:
    for name, curve in curves.items():
        if name not in names:
            ax.plot(curve[quantity], color=PALE, linewidth=0.8, zorder=1)
    for name, color, dash in zip(names, SERIES, DASHES, strict=False):
        # Later lines are thinner and dashed, so that one that covers another shows both.
        width = 2.4 - 0.2 * names.index(name)
        ax.plot(curves[name][quantity], color=color, linestyle=dash, linewidth=width, label=name)


def _scale(ax: Axes, quantity: str, curves: list[np.ndarray]) -> None:
    if quantity == "correlation":
        ax.set_ylim(min(0.0, min(c.min() for c in curves)), 1.02)
        return
    ax.set_yscale("log")
    # A line that leaves the others by many orders must not flatten them.
    ends = np.log10(np.array([[c.min(), c.max()] for c in curves]))
    low, high = np.quantile(ends[:, 0], 0.04), np.quantile(ends[:, 1], 0.96)
    margin = 0.1 * max(high - low, 1.0)
    ax.set_ylim(10 ** (low - margin), 10 ** (high + margin))
    round_ticks(ax.yaxis, *ax.get_ylim())
