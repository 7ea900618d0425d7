"""Pictures: a prediction along the depth, and a measurement over it."""

from __future__ import annotations

import io
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import domain_error
from ..files import replacing
from ..model.summary import in_brief
from ..model.weights import MATRICES
from ..noise.band import NORMAL_95
from ..prediction.draws import QUANTITIES
from ..prediction.predict import predict
from .chart import limits, shown, ticks
from .diagnosis import SHARE
from .expected import Expected, one_draw
from .palette import DASHES, FOUND, GRADIENT, GREY, MEASURED, OUTSIDE, SERIES, SIGNAL, SOFT
from .report import TITLES
from .verdict import growth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..model.transformer import Transformer
    from ..prediction.result import Prediction
    from ..solver.plan import Plan
    from .comparison import Comparison
    from .findings import Report

SEEN = 2e-3
"""Deviation of a draw's logarithm, below which a band would be hidden by its line."""

ENDINGS = (".png", ".svg", ".pdf")


class Picture(Figure):
    """A figure in the manner of all, which a notebook shows without any plotting backend."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")

    def head(self, title: str, size: float = 12) -> None:
        """A title over all of it."""
        self.suptitle(title, x=0.01, ha="left", fontsize=size)

    def below(self, words: str, size: float = 8.5) -> None:
        """What it says, in words under it."""
        self.supxlabel(words, x=0.01, ha="left", fontsize=size, color=SOFT)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=80)
        return buffer.getvalue()


def save(figure: Figure, path: str | os.PathLike[str], dpi: float = 150) -> None:
    """Write a picture, whole or not at all; the file's ending gives the format."""
    ending = check_ending(path)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=dpi, format=ending[1:])


def check_ending(path: str | os.PathLike[str]) -> str:
    """The ending of a picture's file in small letters; DomainError where no picture is written as
    that."""
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        allowed = f"a file name that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        raise domain_error("picture", str(path), allowed)
    return ending


def round_ticks(axis: Any, low: float, high: float) -> None:
    """Round numbers between two ends of a logarithmic axis or colour bar, all written alike;
    beyond four decades powers of ten do."""
    if high < 1e4 * low:
        found = ticks(low, high, True)
        axis.set_ticks(found, labels=[shown(tick) for tick in found])
        axis.set_ticks([], minor=True)


def along_layers(ax: Axes, label: str = "layer") -> None:
    """Ticks at whole layers."""
    ax.set_xlabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _color(quantity: str) -> str:
    return GRADIENT if quantity.startswith("grad") else SIGNAL


def _panels(title: str) -> tuple[Picture, dict[str, Axes]]:
    figure = Picture(9.5, 6.2)
    grid = figure.subplots(2, 2, sharex=True)
    axes = dict(zip(QUANTITIES, grid.ravel(), strict=True))
    for quantity, ax in axes.items():
        dress(ax, TITLES[quantity])
    for ax in grid[1]:
        along_layers(ax, "layer (0 enters layer 1)")
    figure.head(title)
    return figure, axes


def dress(ax: Axes, title: str = "", size: float = 10.5) -> None:
    """A panel in the manner of all: a light grid, no frame, its title on the left."""
    ax.set_title(title, loc="left", fontsize=size)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.spines[["top", "right"]].set_visible(False)


def scale(ax: Axes, quantity: str, *curves: np.ndarray) -> None:
    """The axis of a quantity, from what is drawn on it."""
    low, high, log = limits(curves, quantity.endswith("correlation"))
    if log:
        ax.set_yscale("log")
        round_ticks(ax.yaxis, low, high)
    ax.set_ylim(low, high)


def called(model: Transformer, name: str | None) -> str:
    """What a title calls a model."""
    return name or model.name or "a declared model"


def _describe(prediction: Prediction, name: str | None) -> str:
    model = prediction.model
    return f"{called(model, name)}: {in_brief(model)}, theory {prediction.theory}"


def _shade(ax: Axes, quantity: str, band: Expected, label: str) -> None:
    layers = np.arange(band.mean.size)
    drawn = ax.fill_between(layers, band.low, band.high, color=_color(quantity), alpha=0.15)
    drawn.set(linewidth=0, label=label)


def plot_prediction(prediction: Prediction, name: str | None = None) -> Figure:
    """Four panels along the depth, `name` in the title; one line per configuration."""
    figure, axes = _panels(_describe(prediction, name))
    figure.below(growth(prediction))
    layers = np.arange(prediction.model.layers + 1)
    bands = one_draw(prediction)
    for quantity, ax in axes.items():
        band, label = bands.get(quantity), "mean over draws"
        if band is not None and float(np.max(band.deviation)) < SEEN:
            label += f"; one draw is within {2 * SEEN:.1%}"
        elif band is not None:
            _shade(ax, quantity, band, "95 % of draws")
        curves = getattr(prediction, quantity).reshape(-1, layers.size)
        for curve in curves:
            ax.plot(layers, curve, color=_color(quantity), linewidth=1.8, alpha=0.9, label=label)
            label = "_" if len(curves) > 1 else label
        scale(ax, quantity, curves, *(() if band is None else (band.low, band.high)))
        if quantity in ("variance", "grad_variance"):
            ax.legend(frameon=False, fontsize=9)
    return figure


def plot_comparison(
    comparison: Comparison, name: str | None = None, found: Prediction | None = None
) -> Picture:
    """Prediction as lines, measurement as points with bars of two standard errors, out of their
    band as rings, the verdict below; `found`, another prediction, is drawn beside it.

    Bands are where 95 % of measurements of as many draws are expected, the tolerance included.
    """
    prediction, measurement = comparison.prediction, comparison.measurement
    figure, axes = _panels(_describe(prediction, name) + _losses(comparison))
    figure.below(textwrap.fill(comparison.verdict(), 150))
    layers = np.arange(prediction.model.layers + 1)
    for quantity, ax in axes.items():
        curve = getattr(prediction, quantity)
        points = getattr(measurement, quantity)
        stderr = np.nan_to_num(getattr(measurement, f"{quantity}_stderr"))
        label = "gradient, predicted" if quantity.startswith("grad") else "signal, predicted"
        ax.plot(layers, curve, color=_color(quantity), linewidth=1.8, label=label)
        drawn = [curve, points]
        if found is not None:
            drawn.append(getattr(found, quantity))
            (line,) = ax.plot(layers, drawn[-1], label="predicted for it as found")
            line.set(color=FOUND, linestyle=DASHES[1])
        band, outside = comparison.ranges.get(quantity), np.zeros(layers.size, dtype=bool)
        if band is not None:
            drawn += [band.low, band.high]
            outside = (points < band.low) | (points > band.high)
            if np.any(np.isfinite(band.deviation)):
                _shade(ax, quantity, band, _range_label(band.deviation, comparison.tolerance))
        ax.errorbar(
            layers,
            points,
            yerr=2 * stderr,
            fmt="o",
            markersize=4,
            color=MEASURED,
            elinewidth=1,
            capsize=2,
            label="measured ± 2 s.e.",
        )
        if np.any(outside):
            (rings,) = ax.plot(layers[outside], points[outside], "o", label="out of its band")
            rings.set(markersize=10, markerfacecolor="none", markeredgecolor=OUTSIDE)
        scale(ax, quantity, *drawn)
    _legend_beside(figure)
    return figure


def _legend_beside(figure: Figure) -> None:
    """Every label of any panel once, to their right: points may lie anywhere inside."""
    found: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(textwrap.fill(label, 20), handle)
    figure.set_figwidth(11.2)
    figure.legend(
        found.values(), found.keys(), loc="outside right upper", frameon=False, fontsize=9
    )


def plot_report(report: Report, name: str | None = None) -> Figure:
    """The comparison, the prediction for the module as it was read, verdict and causes below."""
    assert report.comparison is not None
    likely = [finding for finding in report.findings if finding.explains >= SHARE]
    figure = plot_comparison(report.comparison, name, report.prediction if likely else None)
    words = [report.comparison.verdict()]
    words += [f"{number}. {one.reason}" for number, one in enumerate(likely[:3], start=1)]
    if len(likely) > 3:
        words[-1] += f" (and {len(likely) - 3} more)"
    figure.below("\n".join(textwrap.fill(line, 150) for line in words))
    return figure


def plot_plan(plan: Plan, name: str | None = None) -> Figure:
    """Weight variances and scales layer by layer, and the prediction of the model they make."""
    model = plan.model
    figure = Picture(9.5, 6.2)
    axes = figure.subplots(2, 2, sharex=True).ravel()
    frame = plan.to_frame()
    layers = frame["layer"].to_numpy()
    names = [column for column in frame if column in MATRICES]
    _steps(axes[0], layers, {n.replace("_", " "): frame[n].to_numpy() for n in names})
    scales = {
        f"{symbol} {block}": frame[f"{block}_{kind}_scale"].to_numpy()
        for kind, symbol in (("skip", r"$\lambda$"), ("branch", r"$\beta$"))
        for block in ("attention", "ffn")
    }
    _steps(axes[1], layers, scales)
    found = predict(model, **plan.inputs)
    for ax, quantity in zip(axes[2:], ("variance", "grad_variance"), strict=True):
        values = getattr(found, quantity)
        ax.plot(np.arange(model.layers + 1), values, color=_color(quantity), linewidth=1.8)
        scale(ax, quantity, values)
    titles = ["variance of the weights", r"residual scales $\lambda$ (skip) and $\beta$ (branch)"]
    titles += ["signal variance, predicted", "gradient variance, predicted"]
    for ax, title in zip(axes, titles, strict=True):
        dress(ax, title)
    for ax in axes[2:]:
        along_layers(ax, "layer (0 enters layer 1)")
    title = f"{called(model, name)}, {model.layers} layers: {plan.title or plan.objective}"
    figure.head(title)
    figure.below(textwrap.fill(plan.state, 150))
    return figure


def plot_change(before: Prediction, after: Prediction, title: str) -> Figure:
    """Two predictions of one model along the depth: as it is in grey, and changed."""
    figure, axes = _panels(title)
    figure.below(f"as it is: {growth(before)}\nchanged: {growth(after)}")
    for quantity, ax in axes.items():
        curves = []
        for found, color, dash, label in (
            (before, GREY, DASHES[1], "as it is"),
            (after, _color(quantity), "-", "changed"),
        ):
            curves.append(getattr(found, quantity))
            (line,) = ax.plot(np.arange(found.model.layers + 1), curves[-1], label=label)
            line.set(color=color, linestyle=dash, linewidth=1.8)
        scale(ax, quantity, *curves)
    axes["variance"].legend(frameon=False, fontsize=9)
    return figure


def _steps(ax: Axes, layers: np.ndarray, curves: dict[str, np.ndarray]) -> None:
    """Numbers of every layer, later lines thinner and dashed so that those below are seen."""
    for index, (label, values) in enumerate(curves.items()):
        (line,) = ax.plot(layers, values, drawstyle="steps-mid", label=label)
        line.set(color=SERIES[index % len(SERIES)], linestyle=DASHES[index % len(DASHES)])
        line.set_linewidth(2.6 - 0.25 * index)
    scale(ax, "variance", *curves.values())
    ax.legend(frameon=False, fontsize=8.5, ncols=2)


def _range_label(deviation: np.ndarray, tolerance: float) -> str:
    """What most of a band is made of: the scatter of draws, or little but the tolerance."""
    scatter = np.sqrt(np.maximum(np.nanmedian(deviation) ** 2 - tolerance**2, 0.0))
    granted = f"± {100 * NORMAL_95 * tolerance:.2g} % granted to the theory"
    return granted if scatter < tolerance else "95 % expected: draws, and the theory's tolerance"


def _losses(comparison: Comparison) -> str:
    """Both losses, as a second line of the title."""
    outputs = comparison.outputs().set_index("quantity")
    if "loss" not in outputs.index:
        return ""
    loss = outputs.loc["loss"]
    noise = "" if not loss["stderr"] > 0 else f" ± {loss['stderr']:.2g}"
    return f"\nloss {loss['measured']:.4g}{noise} measured, {loss['predicted']:.4g} predicted"
