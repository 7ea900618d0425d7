"""The validation as a table, a picture and a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from ..formulas.law import THEORIES
from ..show.palette import BLACK, BLUE, GREY, VERMILION
from ..show.plot import Picture, styled
from ..show.report import tabled
from .errors import CLASS, MEASURES, by_class, worst
from .grid import ARRAY, BASELINES, FACTORIAL, FACTORS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

CAPTION = (
    "means over layers and runs, of |log(predicted / simulated)|; >2σ: the part beyond two "
    "standard errors; s.e.: of the simulated gradient; typical: of the geometric mean; "
    "profile: by token; runs without numbers (not covered, or overflow) count in no mean"
)
COLUMNS: tuple[tuple[str, str], ...] = (
    ("noise", "s.e."),
    ("grad", "gradient |log|"),
    ("grad_beyond", ">2σ"),
    ("grad_bias", "signed"),
    ("variance", "variance"),
    ("variance_beyond", ">2σ"),
    ("correlation", "correlation"),
    ("correlation_beyond", ">2σ"),
    ("typical", "typical |log|"),
    ("typical_beyond", ">2σ"),
    ("profile", "profile |log|"),
    ("profile_beyond", ">2σ"),
)
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


def _shown(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """Columns of measures that some row has."""
    return [(name, title) for name, title in COLUMNS if frame[name].notna().any()]


def _rows(
    classes: pd.DataFrame, keys: Sequence[str], columns: Sequence[tuple[str, str]]
) -> list[list[str]]:
    """Cells of the class table; what a row shares with the one above is left blank."""
    rows: list[list[str]] = []
    above: list[str] = []
    for _, row in classes.iterrows():
        group = [str(row[key]) for key in keys]
        named = [""] * len(group) if group == above else group
        above = group
        runs = f"{row['runs'] - row['failed']}/{row['runs']}" if row["failed"] else row["runs"]
        cells = (_cell(name, row[name]) for name, _ in columns)
        rows.append([*named, str(row["theory"]), str(runs), *cells])
    return rows


def class_tables(frame: pd.DataFrame) -> tuple[Table, Table]:
    """Errors by class and theory, of the gradient and of the signal, for a terminal."""
    classes = by_class(frame)
    shown = dict(_shown(classes))
    gradient = [name for name in shown if not name.startswith(("variance", "correlation"))]
    signal = [name for name in shown if name not in gradient]
    return (
        _class_table(classes, "gradient variance", gradient, CAPTION),
        _class_table(classes, "signal", signal, ""),
    )


def _class_table(classes: pd.DataFrame, title: str, names: Sequence[str], caption: str) -> Table:
    short = dict(COLUMNS) | {"grad": "|log|", "typical": "typical", "profile": "profile"}
    columns = [(name, short[name]) for name in names]
    found = _rows(classes, CLASS, columns)
    table = tabled(
        f"errors of the theories against simulations: {title}",
        ("models", "theory", "runs", *(head for _, head in columns)),
        ([" ".join(row[: len(CLASS)]), *row[len(CLASS) :]] for row in found),
        caption,
        text=2,
    )
    table.box, table.padding = SIMPLE, (0, 1, 0, 0)
    for row, below in zip(table.rows, [*found[1:], ["another class"]], strict=True):
        row.end_section = bool(below[0])
    return table


@styled
def plot_errors(frame: pd.DataFrame) -> Figure:
    """Gradient error of every run by depth, a panel per norm placement and mask.

    Errors below the floor are drawn on it; crosses along the top are runs that gave no numbers.
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


def _markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    titles = [name.replace("|", "\\|") for name in header]
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(header)}"]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def page(frame: pd.DataFrame) -> str:
    """The whole validation as Markdown: design, errors by class, worst runs, every run."""
    runs = frame.drop_duplicates("name")
    draws, minutes = runs["seeds"], runs["simulated_seconds"].sum() / 60
    lines = [
        "# Validation",
        "",
        "Written by `moments validate --markdown`.",
        "",
        f"{frame['name'].nunique()} whole models were simulated once, {draws.min()} to "
        f"{draws.max()} draws of all weights each, one sequence per draw. Their moments and "
        "standard errors are data of the package (`moments/data/validation.json`). No formula "
        "reads them and nothing is fitted to them. `moments validate --run` simulates them again: "
        f"{minutes:.0f} minutes, the sum of the stored wall times.",
        "",
        "## The grid",
        "",
        f"{len(ARRAY)} runs of an orthogonal array of strength 2 and {len(BASELINES)} baselines. "
        "In the array every pair of levels of any two factors occurs equally often (a level listed "
        "twice counts twice); every combination of the first four factors occurs exactly once.",
        "",
        *_markdown(
            ["factor", "levels", "crossed in full"],
            [
                (name, ", ".join(map(str, levels)), "yes" if name in FACTORIAL else "")
                for name, levels in FACTORS.items()
            ],
        ),
        "",
        "Input and last gradient have variance 1; d_ff is 4 d_model; `dropout` acts on attention "
        "weights too. `doubled-qk` is Xavier with query and key variances doubled, `lns` Xavier "
        "with layernorm scaling, `dslm` the DeepScaleLM recursion with its scales.",
        "",
        "## Measures",
        "",
        *(f"- `{name}`: {meaning}" for name, meaning in MEASURES.items()),
        "- `gradient s.e.`: relative standard error of the simulated gradient variance, mean over "
        "layers",
        "",
        "The published theories ignore masks and state moments of tokens alike, so they have no "
        "profile. `runs` counts those that gave numbers: the simplified tables cover ReLU only, "
        "and numbers can overflow; the others count in no mean.",
        "",
        "## Errors by norm placement and mask",
        "",
        *_overview(frame),
        "",
        "## Errors by depth",
        "",
        *_overview(frame, CLASS),
        "",
        "## Errors by weights",
        "",
        *_overview(frame, ("norm", "mask", "weights")),
        "",
        "## The five worst runs of the refined theory",
        "",
        *_every_run(worst(frame)),
        "",
        "## Every run of the refined theory",
        "",
        *_every_run(frame[frame["theory"] == "refined"].sort_values("name")),
        "",
    ]
    return "\n".join(lines)


def _overview(frame: pd.DataFrame, keys: Sequence[str] = CLASS[:2]) -> list[str]:
    classes = by_class(frame, keys)
    columns = _shown(classes)
    header = [*keys, "theory", "runs", *(title for _, title in columns)]
    return _markdown(header, _rows(classes, keys, columns))


def _every_run(rows: pd.DataFrame) -> list[str]:
    cells = []
    for _, row in rows.iterrows():
        measures = [_cell(name, row[name]) for name, _ in COLUMNS]
        if row["failure"]:
            measures[1:] = ["none", *[""] * (len(COLUMNS) - 2)]
        cells.append([f"`{row['name']}`", row["seeds"], *measures])
    return _markdown(["run", "seeds", *(title for _, title in COLUMNS)], cells)
