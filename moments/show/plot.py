"""Pictures: a prediction along the depth, and a measurement over it."""

from __future__ import annotations

import io
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from ..errors import domain_error
from ..files import replacing
from ..noise.band import NORMAL_95
from .expected import Expected, signal_log_variance
from .report import STREAM_QUANTITIES, TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..prediction.result import Prediction
    from .comparison import Comparison

FORWARD, BACKWARD, MEASURED, OUTSIDE = "#1b6ca8", "#c8553d", "#222222", "#d00000"
ENDINGS = (".png", ".svg", ".pdf")
SEEN = 2e-3
"""Deviation of a draw's logarithm, below which a band would be hidden by its line."""

ENDINGS = (".png", ".svg", ".pdf")


class Picture(Figure):
    """A figure that a notebook shows without any plotting backend being set up."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=80)
        return buffer.getvalue()


def save(figure: Figure, path: str | os.PathLike[str], dpi: float = 150) -> None:
    """Write a picture, whole or not at all; the file's ending gives the format.

    Raises:
        DomainError: an ending that no picture is written as, or a file that cannot be written.
    """
    ending = check_ending(path)
    with replacing(path) as partial:
        figure.savefig(partial, dpi=dpi, format=ending[1:])


def check_ending(path: str | os.PathLike[str]) -> str:
    """The ending of a picture's file, in small letters.

    Raises:
        DomainError: no picture is written as that.
    """
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        allowed = f"a file name that ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        raise domain_error("picture", str(path), allowed)
    return ending


def round_ticks(ax: Axes) -> None:
    """On a logarithmic axis of few decades: round numbers, also between powers of ten, all written
    alike."""
    low, high = ax.get_ylim()
    decades = np.log10(high / low)
    if decades > 4:
        return
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 3) if decades > 1.7 else (1, 2, 5), numticks=12))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    ax.yaxis.set_minor_locator(NullLocator())


def along_layers(ax: Axes) -> None:
    """Ticks at whole layers."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _color(quantity: str) -> str:
    return BACKWARD if quantity.startswith("grad") else FORWARD


def _panels(title: str) -> tuple[Figure, dict[str, Axes]]:
    figure = Picture(figsize=(9.5, 6.2), layout="constrained")
    grid = figure.subplots(2, 2, sharex=True)
    axes = dict(zip(STREAM_QUANTITIES, grid.ravel(), strict=True))
    for quantity, ax in axes.items():
        ax.set_title(TITLES[quantity], loc="left", fontsize=10.5)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    for ax in grid[1]:
        ax.set_xlabel("layer (0 enters layer 1)")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    return figure, axes


def _scale(ax: Axes, quantity: str, *curves: np.ndarray) -> None:
    """Logarithmic where a variance spans a factor of five, else from zero."""
    values = np.concatenate([np.ravel(c) for c in curves])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    if quantity.endswith("correlation"):
        ax.set_ylim(min(0.0, 1.1 * low), max(1.02 * high, 0.1, min(1.02, 1.25 * high)))
    elif low > 0 and high > 5 * low:
        ax.set_yscale("log")
        round_ticks(ax)
    else:
        ax.set_ylim(0.0, 1.15 * high)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _describe(prediction: Prediction, name: str | None) -> str:
    model = prediction.model
    return f"{name or 'a declared model'}: " + (
        f"{model.layers} layers, d_model {model.d_model}, {model.heads} heads, "
        f"{model.seq_len} tokens, {model.norm} norm, theory {prediction.theory}"
    )


def _growth(prediction: Prediction) -> str:
    """What the depth does to one configuration, in a line."""
    if prediction.variance.ndim > 1:
        return f"{prediction.variance.size // prediction.variance.shape[-1]} configurations"
    variance, gradient = prediction.variance, prediction.grad_variance
    parts = [
        f"{title} × {to / start:.3g} {way}"
        for title, to, start, way in (
            ("variance", variance[-1], variance[0], "from input to output"),
            ("gradient variance", gradient[0], gradient[-1], "from output to input"),
        )
        if start > 0
    ]
    ends = prediction.correlation[[0, -1]]
    parts.append(f"token correlation {ends[0]:.3g} to {ends[1]:.3g}")
    if notes := len(prediction.warnings):
        parts.append(f"{notes} warning{'s' * (notes > 1)} of validity")
    return "; ".join(parts)


def _bands(prediction: Prediction) -> dict[str, Expected]:
    """Where one draw of the weights falls 95 % of the time, as far as that is known.

    Of a stack without norms the signal's spread is known to a factor of two only (`expected`) and
    is left out.
    """
    if prediction.variance.ndim > 1 or prediction.theory != "refined":
        return {}
    low, high = prediction.grad_variance_band
    positive = (low > 0) & (high > 0)
    width = np.log(np.divide(high, low, out=np.ones_like(high), where=positive))
    found = {"grad_variance": Expected(prediction.grad_variance, width / (2 * NORMAL_95))}
    if "none" not in prediction.model.placements:
        deviation = np.sqrt(signal_log_variance(prediction))
        if np.all(np.isfinite(deviation)):
            found["variance"] = Expected(prediction.variance, deviation)
    return found


def _shade_band(ax: Axes, quantity: str, band: Expected) -> str:
    """Draw it where it can be seen; what the line is to be called."""
    if float(np.max(band.deviation)) < SEEN:
        return f"mean over draws; one draw is within {2 * SEEN:.1%}"
    layers = np.arange(band.mean.size)
    drawn = ax.fill_between(layers, band.low, band.high, color=_color(quantity), alpha=0.15)
    drawn.set(linewidth=0, label="95 % of draws")
    return "mean over draws"


def plot_prediction(prediction: Prediction, name: str | None = None) -> Figure:
    """Four panels along the depth, `name` in the title; one line per configuration."""
    figure, axes = _panels(_describe(prediction, name))
    figure.supxlabel(_growth(prediction), x=0.01, ha="left", fontsize=8.5, color="#444444")
    layers = np.arange(prediction.model.layers + 1)
    bands = _bands(prediction)
    for quantity, ax in axes.items():
        band = bands.get(quantity)
        label = "mean over draws" if band is None else _shade_band(ax, quantity, band)
        curves = getattr(prediction, quantity).reshape(-1, layers.size)
        for curve in curves:
            ax.plot(layers, curve, color=_color(quantity), linewidth=1.8, alpha=0.9, label=label)
            label = "_" if len(curves) > 1 else label
        _scale(ax, quantity, curves, *(() if band is None else (band.high,)))
        if quantity in ("variance", "grad_variance"):
            ax.legend(frameon=False, fontsize=9)
    return figure


def plot_comparison(comparison: Comparison, name: str | None = None) -> Figure:
    """Prediction as lines, measurement as points with bars of two standard errors.

    The variances' bands are where 95 % of measurements of as many draws are expected, or what the
    tolerance alone grants where draws scatter less; points out of them are rings. The verdict
    stands below.
    """
    prediction, measurement = comparison.prediction, comparison.measurement
    figure, axes = _panels(_describe(prediction, name) + _losses(comparison))
    verdict = textwrap.fill(comparison.verdict(), 150)
    figure.supxlabel(verdict, x=0.01, ha="left", fontsize=8.5, color="#444444")
    layers = np.arange(prediction.model.layers + 1)
    for quantity, ax in axes.items():
        curve = getattr(prediction, quantity)
        points = getattr(measurement, quantity)
        stderr = np.nan_to_num(getattr(measurement, f"{quantity}_stderr"))
        ax.plot(layers, curve, color=_color(quantity), linewidth=1.8, label="predicted")
        outside = _shade_range(ax, comparison, quantity)
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
            ax.plot(
                layers[outside],
                points[outside],
                "o",
                markersize=10,
                markerfacecolor="none",
                markeredgecolor=OUTSIDE,
                label="out of its band",
            )
        expected = comparison.ranges.get(quantity)
        _scale(ax, quantity, curve, points, *(() if expected is None else (expected.high,)))
    for quantity in ("variance", "grad_variance"):
        axes[quantity].legend(frameon=False, fontsize=9)
    return figure


def _shade_range(ax: Axes, comparison: Comparison, quantity: str) -> np.ndarray:
    """The band in which the measurement is expected; which points lie outside, (N + 1,)."""
    expected = comparison.ranges.get(quantity)
    layers = np.arange(comparison.prediction.model.layers + 1)
    if expected is None or not np.any(np.isfinite(expected.deviation)):
        return np.zeros(layers.size, dtype=bool)
    ax.fill_between(
        layers,
        expected.low,
        expected.high,
        color=_color(quantity),
        alpha=0.15,
        linewidth=0,
        label=_range_label(expected.deviation, comparison.tolerance),
    )
    measured = np.asarray(getattr(comparison.measurement, quantity))
    return (measured < expected.low) | (measured > expected.high)


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
