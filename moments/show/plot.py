"""Pictures of predictions, with a measurement or by scheme, and of first steps."""

from __future__ import annotations

import io
import itertools
import math
import os
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import style
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from ..errors import domain_error
from ..files import replacing
from ..model.summary import in_brief
from ..model.weights import MATRICES
from ..noise.band import NORMAL_95
from ..prediction.draws import QUANTITIES
from ..prediction.predict import predict
from ..scheme.registry import scheme as scheme_named
from .diagnosis import SHARE
from .expected import Expected, one_draw
from .palette import (
    BLACK,
    BLUE,
    DASHES,
    FOUND,
    GRADIENT,
    GREEN,
    GREY,
    MEASURED,
    ORANGE,
    OUTSIDE,
    PALE,
    PURPLE,
    SERIES,
    SIGNAL,
    SKY,
    SOFT,
    VERMILION,
)
from .report import spaced
from .verdict import growth

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..model.transformer import Transformer
    from ..prediction.result import Prediction
    from ..scheme import Scheme
    from ..solver.plan import Plan
    from ..step.measured import StepMeasurement
    from ..step.result import FirstStep
    from ..step.search import LearningRate
    from .comparison import Comparison
    from .findings import Report
    from .scheme_table import SchemeComparison

SEEN = 2e-3
"""Standard deviation of the log of one draw, below which a band is hidden by its line."""

ENDINGS = (".png", ".svg", ".pdf")

DEPTH = "layer (0 enters layer 1)"

TITLES = {
    "variance": "Signal variance",
    "correlation": "Correlation between tokens",
    "grad_variance": "Gradient variance",
    "grad_correlation": "Gradient correlation between tokens",
}

styled = style.context(Path(__file__).with_name("moments.mplstyle"))
"""Decorator for drawing functions: matplotlib reads the style when axes and texts are created."""


class Picture(Figure):
    """A figure that a notebook shows without a plotting backend."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")

    def head(self, title: str) -> None:
        """Set the title of the figure."""
        self.suptitle(title, x=0.01, ha="left")

    def below(self, words: str) -> None:
        """Put a caption below the figure."""
        self.supxlabel(words, x=0.01, ha="left", color=SOFT)

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=80)
        return buffer.getvalue()


def save(figure: Figure, path: str | os.PathLike[str], dpi: float = 110) -> None:
    """Write a picture completely or not at all; the file name's ending gives the format."""
    ending = check_ending(path)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=dpi, format=ending[1:])


def check_ending(path: str | os.PathLike[str]) -> str:
    """The lower-case ending of a picture's file name; DomainError for an unknown format."""
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        allowed = f"a file name that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        raise domain_error("picture", str(path), allowed)
    return ending


# --- axes -----------------------------------------------------------------------------------------


def limits(parts: Iterable[np.ndarray], bounded: bool) -> tuple[float, float, bool]:
    """Limits of an axis for given values, and whether it is logarithmic (values span a factor of
    five). `bounded`: correlations or shares, drawn from 0."""
    values = np.concatenate([np.ravel(part) for part in parts])
    values = values[np.isfinite(values)]
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if not values.size:
        return 0.0, 1.0, False
    if bounded:
        return min(0.0, 1.1 * low), max(1.02 * high, min(1.02, max(1.25 * high, 0.1))), False
    positive = values[values > 0]
    if low >= 0 and positive.size > 0.9 * values.size:  # few zeros are drawn at the bottom
        low = float(positive.min())
    if low > 0 and high > 5 * low:
        margin = 0.04 * math.log(high / low)
        return low * math.exp(-margin), high * math.exp(min(margin, 1.0)), True
    return min(0.0, 1.1 * low), 1.15 * high or 1.0, False


def ticks(low: float, high: float, log: bool) -> list[float]:
    """About five round numbers between two limits."""
    if not log:
        result = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    else:
        decades = math.log10(high / low)
        subs = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1.7 else (1.0, 2.0, 5.0)
        result = LogLocator(subs=subs, numticks=6).tick_values(low, high)
    return [float(t) for t in result if low <= t <= high]


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def shown(value: float) -> str:
    """A number in few characters, with powers of ten; "" for nan."""
    if math.isnan(value):
        return ""
    if value and not 1e-3 <= abs(value) < 1e5:
        power = math.floor(math.log10(abs(value)) + 1e-9)
        front = value / 10.0**power
        base = f"10{str(power).translate(_RAISED)}"
        return base if abs(front - 1) < 1e-6 else f"{front:.3g}·{base}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def round_ticks(axis: Any, low: float, high: float) -> None:
    """Set round ticks on a logarithmic axis or colour bar, in one format."""
    result = ticks(low, high, True)
    axis.set_ticks(result, labels=[shown(tick) for tick in result])
    axis.set_ticks([], minor=True)


def along_layers(ax: Axes, label: str = "layer") -> None:
    """Ticks at whole layers."""
    ax.set_xlabel(label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def scale(ax: Axes, quantity: str, *curves: np.ndarray) -> None:
    """Set the y axis of a quantity for the curves drawn on it."""
    low, high, log = limits(curves, quantity.endswith("correlation"))
    if log:
        ax.set_yscale("log")
        round_ticks(ax.yaxis, low, high)
    elif high < 1e-3:
        ax.yaxis.set_major_formatter(lambda value, _: shown(value))
    ax.set_ylim(low, high)


# --- one model along its depth --------------------------------------------------------------------


def titled(model: Transformer, name: str | None, words: str) -> str:
    """A title, after the model's name if it has one."""
    name = name or model.name
    return f"{name}: {words}" if name else words


def _describe(prediction: Prediction, name: str | None) -> str:
    model = prediction.model
    theory = "" if prediction.theory == "refined" else f", {prediction.theory} formulas"
    return titled(model, name, f"{in_brief(model)}{theory}")


def _color(quantity: str) -> str:
    return GRADIENT if quantity.startswith("grad") else SIGNAL


def _panels(title: str = "") -> tuple[Picture, dict[str, Axes]]:
    """A figure with one panel per quantity of the stream."""
    figure = Picture(9.5, 6.2)
    grid = figure.subplots(2, 2, sharex=True)
    axes = dict(zip(QUANTITIES, grid.ravel(), strict=True))
    for quantity, ax in axes.items():
        ax.set_title(TITLES[quantity])
    for ax in grid[1]:
        along_layers(ax, DEPTH)
    if title:
        figure.head(title)
    return figure, axes


def _shade(ax: Axes, quantity: str, band: Expected, label: str) -> None:
    layers = np.arange(band.mean.size)
    drawn = ax.fill_between(layers, band.low, band.high, color=_color(quantity), alpha=0.15)
    drawn.set(linewidth=0, label=label)


@styled
def plot_stream(prediction: Prediction, behind: Prediction | None = None) -> Picture:
    """Variance, correlation and those of the gradient along the depth, with the 95 % bands of one
    draw; `behind`, another prediction of any depth, is drawn in grey."""
    figure, axes = _panels()
    layers = np.arange(prediction.model.layers + 1)
    bands = one_draw(prediction)
    for quantity, ax in axes.items():
        drawn, band, label = [], bands.get(quantity), "mean over draws"
        if band is not None and float(np.max(band.deviation)) < SEEN:
            label += f"; one draw is within {2 * SEEN:.1%}"
        elif band is not None:
            _shade(ax, quantity, band, "95 % of draws")
        if band is not None:
            drawn += [band.low, band.high]
        if behind is not None:
            drawn.append(getattr(behind, quantity))
            ax.plot(drawn[-1], color=GREY, linestyle=DASHES[1], label="kept")
        drawn.append(getattr(prediction, quantity).reshape(-1, layers.size))
        for curve in drawn[-1]:
            ax.plot(layers, curve, color=_color(quantity), alpha=0.9, label=label)
            label = "_" if len(drawn[-1]) > 1 else label
        scale(ax, quantity, *(curves.ravel() for curves in drawn))
        if quantity in ("variance", "grad_variance"):
            ax.legend()
    return figure


@styled
def plot_prediction(prediction: Prediction, name: str | None = None) -> Figure:
    """`plot_stream` with the model's `name` as title and the growth as caption."""
    figure = plot_stream(prediction)
    figure.head(_describe(prediction, name))
    figure.below(growth(prediction))
    return figure


@styled
def plot_curves(
    panels: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]], x: str
) -> Figure:
    """Panels side by side; `panels` maps titles to lines, which map labels to (x, y)."""
    figure = Picture(9.5, 3.4)
    grid = figure.subplots(1, len(panels), squeeze=False)
    for ax, (title, curves) in zip(grid[0], panels.items(), strict=True):
        ax.set_title(title)
        along_layers(ax, x)
        for (label, line), color, dash in zip(
            curves.items(), itertools.cycle(SERIES), itertools.cycle(DASHES), strict=False
        ):
            ax.plot(*line, color=color, linestyle=dash, label=label)
        scale(ax, "variance", *(y for _, y in curves.values()))
        ax.legend(ncols=2)
    return figure


@styled
def plot_comparison(
    comparison: Comparison, name: str | None = None, result: Prediction | None = None
) -> Picture:
    """Prediction as lines, measurement as points ± two standard errors, with rings around points
    outside their band, and the verdict as caption; `result` is another prediction to draw.

    Bands contain 95 % of measurements of as many draws, including the tolerance.
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
        ax.plot(layers, curve, color=_color(quantity), label=label)
        drawn = [curve, points]
        if result is not None:
            drawn.append(getattr(result, quantity))
            (line,) = ax.plot(layers, drawn[-1], label="predicted for the weights as they are")
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
            color=MEASURED,
            elinewidth=1,
            label="measured ± 2 s.e.",
        )
        if np.any(outside):
            (rings,) = ax.plot(layers[outside], points[outside], "o", label="outside its band")
            rings.set(markersize=10, markerfacecolor="none", markeredgecolor=OUTSIDE)
        scale(ax, quantity, *drawn)
    _legend_beside(figure)
    return figure


def _legend_beside(figure: Figure) -> None:
    """One legend for all panels, to their right, where it hides no points."""
    result: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            result.setdefault(textwrap.fill(label, 20), handle)
    figure.set_figwidth(11.2)
    figure.legend(result.values(), result.keys(), loc="outside right upper")


@styled
def plot_report(report: Report, name: str | None = None) -> Figure:
    """The comparison with the prediction for the actual module; verdict and causes as caption."""
    assert report.comparison is not None
    likely = [finding for finding in report.findings if finding.explains >= SHARE]
    figure = plot_comparison(report.comparison, name, report.prediction if likely else None)
    words = [report.comparison.verdict()]
    words += [f"{number}. {one.reason}" for number, one in enumerate(likely[:3], start=1)]
    if len(likely) > 3:
        words[-1] += f" (and {len(likely) - 3} more)"
    figure.below("\n".join(textwrap.fill(line, 150) for line in words))
    return figure


@styled
def plot_plan(plan: Plan, name: str | None = None) -> Figure:
    """Weight variances and scales layer by layer, and the prediction of the resulting model."""
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
    result = predict(model, **plan.inputs)
    for ax, quantity in zip(axes[2:], ("variance", "grad_variance"), strict=True):
        values = getattr(result, quantity)
        ax.plot(np.arange(model.layers + 1), values, color=_color(quantity))
        scale(ax, quantity, values)
    titles = ["Variance of the weights", r"Residual scales $\lambda$ (skip) and $\beta$ (branch)"]
    titles += ["Signal variance, predicted", "Gradient variance, predicted"]
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
    for ax in axes[2:]:
        along_layers(ax, DEPTH)
    title = titled(model, name, f"{model.layers} layers, {plan.title or plan.objective}")
    figure.head(title)
    figure.below(textwrap.fill(plan.state, 150))
    return figure


def _steps(ax: Axes, layers: np.ndarray, curves: dict[str, np.ndarray]) -> None:
    """Draw numbers of every layer; later lines are thinner and dashed to show those below."""
    for index, (label, values) in enumerate(curves.items()):
        (line,) = ax.plot(layers, values, drawstyle="steps-mid", label=label)
        line.set(color=SERIES[index % len(SERIES)], linestyle=DASHES[index % len(DASHES)])
        line.set_linewidth(2.6 - 0.25 * index)
    scale(ax, "variance", *curves.values())
    low, high = ax.get_ylim()  # with room for the legend above the lines
    log = ax.get_yscale() == "log"
    ax.set_ylim(low, high * (high / low) ** 0.4 if log else high + 0.35 * (high - low))
    ax.legend(ncols=3, loc="upper left")


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


# --- schemes side by side -------------------------------------------------------------------------

MOST_LINES = 6
"""Most lines that can be distinguished in one panel."""

SCHEME_TITLES = {
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


def in_rows(names: list[str]) -> list[tuple[str, list[str]]]:
    """Divide names by family into rows of at most MOST_LINES."""
    result = []
    for title in FAMILIES:
        members = [name for name in names if family(scheme_named(name)) == title]
        if members:
            parts = np.array_split(members, -(-len(members) // MOST_LINES))
            result += [(title, part.tolist()) for part in parts]
    return result


@styled
def plot_schemes(comparison: SchemeComparison, name: str | None = None) -> Figure:
    """Every scheme along the depth; the schemes of other rows are grey, for comparison."""
    parts = in_rows(list(comparison.predictions))
    curves = {
        one: {
            "variance": result.variance / result.variance[0],
            "correlation": result.correlation,
            "gradient": result.grad_variance / result.grad_variance[-1],
        }
        for one, result in comparison.predictions.items()
    }
    figure = Picture(12.5, 2.5 * len(parts) + 0.7)
    axes = figure.subplots(len(parts), 3, sharex=True, sharey="col", squeeze=False)
    for line, (title, names) in zip(axes, parts, strict=True):
        for ax, quantity in zip(line, SCHEME_TITLES, strict=True):
            _scheme_panel(ax, quantity, names, curves)
        line[0].set_ylabel(title, fontweight="bold")
        line[2].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    for ax, (quantity, title) in zip(axes[0], SCHEME_TITLES.items(), strict=True):
        ax.set_title(title)
        _scale_schemes(ax, quantity, [c[quantity] for c in curves.values()])
    for ax in axes[-1]:
        along_layers(ax, DEPTH)
    model = comparison.model
    words = f"{len(curves)} schemes, {model.layers} layers, d_model {model.d_model}, "
    words += f"{model.seq_len} tokens, {model.activation}, dropout {model.dropout:g}"
    figure.head(titled(model, name, words))
    figure.below(
        "Predictions at initialisation, each scheme at its authors' norm placement. "
        "Grey: the schemes of the other rows; a line that leaves a panel is off its scale."
    )
    return figure


def _scheme_panel(ax: Axes, quantity: str, names: list[str], curves: dict[str, Any]) -> None:
    for name, curve in curves.items():
        if name not in names:
            ax.plot(curve[quantity], color=PALE, linewidth=0.8, zorder=1)
    for name, color, dash in zip(names, SERIES, DASHES, strict=False):
        # Later lines are thinner and dashed, so that one that covers another shows both.
        width = 2.4 - 0.2 * names.index(name)
        ax.plot(curves[name][quantity], color=color, linestyle=dash, linewidth=width, label=name)


def _scale_schemes(ax: Axes, quantity: str, curves: list[np.ndarray]) -> None:
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


# --- first steps ----------------------------------------------------------------------------------

STEP_SITES = {
    "stream": (BLACK, "o"),
    "attention.heads": (BLUE, "s"),
    "attention.projection": (SKY, "D"),
    "ffn.activation": (VERMILION, "^"),
    "ffn.out": (ORANGE, "v"),
}
STEP_WEIGHTS = {
    "query": (GREEN, "P"),
    "key": (PURPLE, "X"),
    "value": (BLUE, "s"),
    "output": (SKY, "D"),
    "gate": (GREY, "<"),
    "ffn_in": (VERMILION, "^"),
    "ffn_out": (ORANGE, "v"),
}
STEP_PANELS = (
    ("relative_change", STEP_SITES, "Relative change of the stream, E|dh|² / E|h|²"),
    ("relative", STEP_WEIGHTS, "Step over weight, E dW² / E W²"),
    ("alignment", STEP_WEIGHTS, "Alignment exponent (½ random, 1 full)"),
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
    for ax, (quantity, styles, title) in zip(axes, STEP_PANELS, strict=True):
        result = _step_rows(step, quantity)
        seen = None if measured is None else _step_rows(measured, quantity)
        for key, (color, marker) in styles.items():
            rows = result[result["key"] == key]
            if len(rows):
                line = {"color": color, "marker": marker, "label": spaced(key)}
                ax.plot(rows["layer"], rows["value"], markersize=4, linewidth=1.4, **line)
            rows = rows[:0] if seen is None else seen[seen["key"] == key]
            if len(rows):
                stderr = np.nan_to_num(rows["stderr"].to_numpy(float))
                marks = {"color": color, "ecolor": MEASURED, "fmt": marker, "elinewidth": 0.8}
                marks |= {"markersize": 8, "markerfacecolor": "none"}
                ax.errorbar(rows["layer"], rows["value"], yerr=2 * stderr, **marks)
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
    for ax, side in zip(axes, ("left", "right"), strict=False):
        handles, _ = ax.get_legend_handles_labels()
        figure.legend(handles=handles, loc=f"outside lower {side}", ncols=4)
    called = f"{name}: first" if name else "First"
    words = f"{called} step of {step.optimizer} at learning rate {step.learning_rate:g}; loss "
    words += f"{step.loss_before:.3f} to {step.loss:.3f}"
    figure.head(words + ("" if measured is None else f", measured {measured.loss:.3f}"))
    return figure


def _step_rows(step: FirstStep | StepMeasurement, quantity: str) -> Any:
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
