"""Tables and a plot of the validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..formulas.law import THEORIES
from ..show.palette import BLACK, BLUE, GREY, VERMILION
from ..show.plot import Picture, styled
from ..show.report import tabled
from .errors import CLASS, by_class

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

CAPTION = (
    "means over layers and runs of |log(predicted / simulated)|; >2σ: what is beyond two standard\n"
    "errors; s.e.: of the simulated gradient; typical: of the geometric mean; profile: by token;\n"
    "runs without numbers (not covered, or overflow) count in no mean"
)
COLUMNS = {
    "noise": "s.e.",
    "grad": "|log|",
    "grad_beyond": ">2σ",
    "grad_bias": "signed",
    "variance": "variance",
    "variance_beyond": ">2σ",
    "correlation": "correlation",
    "correlation_beyond": ">2σ",
    "typical": "typical",
    "typical_beyond": ">2σ",
    "profile": "profile",
    "profile_beyond": ">2σ",
}
COLORS = {"published": VERMILION, "simplified": GREY, "refined": BLUE}
MARKERS = {"published": "s", "simplified": "^", "refined": "o"}
LABELS = {
    "published": "published formulas",
    "simplified": "their simplified tables",
    "refined": "moments",
}


def _cell(measure: str, value: float) -> str:
    if np.isnan(value):
        return "-"
    if measure.startswith("variance"):
        return f"{100 * value:.1f} %" if value < 10 else f"x{1 + value:.1e}"
    if measure == "grad_bias":
        return f"{value:+.3f}" if abs(value) < 10 else f"{value:+.0f}"
    return f"{value:.3f}" if value < 10 else f"{value:.0f}"


def class_tables(frame: pd.DataFrame) -> str:
    """Errors by class and theory, of the gradient and of the signal, for a terminal."""
    classes = by_class(frame)
    shown = [name for name in COLUMNS if classes[name].notna().any()]
    signal = [name for name in shown if name.startswith(("variance", "correlation"))]
    gradient = [name for name in shown if name not in signal]
    tables = _class_table(classes, "gradient variance", gradient)
    return f"{tables}\n{_class_table(classes, 'signal', signal)}\n\n{CAPTION}"


def _class_table(classes: pd.DataFrame, title: str, names: Sequence[str]) -> str:
    """A row per class and theory; the class is blank if it is that of the row above."""
    lines: list[tuple[str, ...]] = []
    for _, rows in classes.groupby(list(CLASS), sort=False):
        for place, (_, row) in enumerate(rows.iterrows()):
            runs = f"{row['runs'] - row['failed']}/{row['runs']}" if row["failed"] else row["runs"]
            models = "" if place else " ".join(str(row[key]) for key in CLASS)
            cells = (_cell(name, row[name]) for name in names)
            lines.append((models, str(row["theory"]), str(runs), *cells))
    heads = ("models", "theory", "runs", *(COLUMNS[name] for name in names))
    return tabled(f"errors of the theories against simulations: {title}", heads, lines, text=2)


@styled
def plot_errors(frame: pd.DataFrame) -> Figure:
    """Gradient error of every run by depth, a panel per norm placement and mask.

    Errors below the lower limit are drawn on it; crosses along the top are failed runs.
    """
    floor, roof = 3e-3, 300.0
    figure = Picture(10, 6.4)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    depths = sorted(frame["layers"].unique())
    classes = [(norm, mask) for norm in ("pre", "post") for mask in ("full", "causal")]
    for ax, (norm, mask) in zip(panels.ravel(), classes, strict=True):
        part = frame[(frame["norm"] == norm) & (frame["mask"] == mask)]
        for place, theory in enumerate(THEORIES):
            rows = part[part["theory"] == theory]
            position = rows["layers"].map(depths.index).to_numpy(float)
            spread = rows.groupby("layers").cumcount().to_numpy(float)
            x = position + (place - 1) * 0.27 + 0.2 * (spread / 8 - 0.5)
            failed = (rows["failure"] != "").to_numpy()
            y = rows["grad"].to_numpy(float)
            ax.scatter(
                x[~failed],
                np.clip(y[~failed], floor, roof),
                s=24,
                marker=MARKERS[theory],
                color=COLORS[theory],
                alpha=0.8,
                label=LABELS[theory],
            )
            ax.scatter(x[failed], np.full(failed.sum(), roof), marker="x", color=COLORS[theory])
        noise = part.groupby("layers")["noise"].mean()
        places = [depths.index(n) for n in noise.index]
        ax.scatter(places, noise, s=700, marker="_", color=BLACK, label="standard error")
        ax.set_yscale("log")
        ax.set_ylim(floor * 0.8, roof * 1.4)
        ax.set_xticks(range(len(depths)), [str(n) for n in depths])
        ax.set_xlim(-0.6, len(depths) - 0.4)
        ax.set_title(f"{norm.capitalize()}-LN, {mask} attention")
    for ax in panels[1]:
        ax.set_xlabel("layers")
    for ax in panels[:, 0]:
        ax.set_ylabel("mean |log| of the ratio")
    panels[0, 0].scatter([], [], marker="x", color=GREY, label="no numbers")
    panels[0, 0].legend(markerscale=0.8, loc=(0.0, 0.7), ncols=2)
    models = len(frame) // frame["theory"].nunique()
    title = f"Gradient variance predicted over simulated, {models} models"
    figure.head(title)
    return figure
