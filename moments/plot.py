"""Pictures: a prediction along the depth, and a measurement over it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .errors import domain_error
from .files import replacing
from .report import STREAM_QUANTITIES, TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .comparison import Comparison
    from .prediction import Prediction

FORWARD, BACKWARD, MEASURED, OUTSIDE = "#1b6ca8", "#c8553d", "#222222", "#d00000"

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
    else:
        ax.set_ylim(0.0, 1.15 * high)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _describe(prediction: Prediction) -> str:
    model = prediction.model
    return (
        f"{model.layers} layers, d_model {model.d_model}, {model.heads} heads, "
        f"{model.seq_len} tokens, {model.norm} norm, theory {prediction.theory}"
    )


def _shade_band(ax: Axes, prediction: Prediction) -> None:
    """Where one draw of the weights falls 95 % of the time."""
    low, high = prediction.grad_variance_band
    layers = np.arange(low.size)
    ax.fill_between(
        layers, low, high, color=BACKWARD, alpha=0.15, linewidth=0, label="95 % of draws"
    )
    ax.legend(frameon=False, fontsize=9)


def plot_prediction(prediction: Prediction) -> Figure:
    """Four panels along the depth; one line per configuration."""
    figure, axes = _panels(_describe(prediction))
    layers = np.arange(prediction.model.layers + 1)
    shaded = prediction.variance.ndim == 1 and prediction.theory == "refined"
    if shaded:
        _shade_band(axes["grad_variance"], prediction)
    for quantity, ax in axes.items():
        curves = getattr(prediction, quantity).reshape(-1, layers.size)
        for curve in curves:
            ax.plot(layers, curve, color=_color(quantity), linewidth=1.8, alpha=0.9)
        upper = (
            (prediction.grad_variance_band[1],) if shaded and quantity == "grad_variance" else ()
        )
        _scale(ax, quantity, curves, *upper)
    return figure


def plot_comparison(comparison: Comparison) -> Figure:
    """Prediction as lines, measurement as points with bars of two standard errors.

    The variances' bands are where 95 % of measurements of as many draws are expected; points out of
    them are rings.
    """
    prediction, measurement = comparison.prediction, comparison.measurement
    figure, axes = _panels(_describe(prediction) + _losses(comparison))
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
        label="95 % expected",
    )
    measured = np.asarray(getattr(comparison.measurement, quantity))
    return (measured < expected.low) | (measured > expected.high)


def _losses(comparison: Comparison) -> str:
    """Both losses, as a second line of the title."""
    outputs = comparison.outputs().set_index("quantity")
    if "loss" not in outputs.index:
        return ""
    loss = outputs.loc["loss"]
    noise = "" if not loss["stderr"] > 0 else f" ± {loss['stderr']:.2g}"
    return f"\nloss {loss['measured']:.4g}{noise} measured, {loss['predicted']:.4g} predicted"
