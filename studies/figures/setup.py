"""What a figure consists of: panels, and lines that read a prediction or a simulation alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moments.formulas.law import Source, Theory
from moments.model.transformer import Transformer
from moments.prediction.result import Prediction

from ..analysis import angular_distance
from ..analysis.results import expected

SQUARED_NORM = "squared norm of "
LAYER_NORM = "norm of a layer's weight gradients"
TYPICAL_LAYER_NORM = f"{LAYER_NORM}, typical draw"


@dataclass(frozen=True, eq=False)
class FigureLine:
    """One quantity, along the depth of a model or against the input's correlation.

    Attributes:
        label: in the legend.
        model: the declaration.
        quantity: an array of a Prediction, such as "variance" or "grad_variance_typical"; or
            "squared norm of query", the gradient of a weight matrix layer by layer, or LAYER_NORM,
            the root of the squared norms of all of a layer's; of a prediction TYPICAL_LAYER_NORM
            too, less by what a typical draw's gradient at the layer's output is below the mean.
        inputs: what `predict` and `simulate` take alike.
        site: None along the depth; else the site of layer 1, read at every input correlation.
        theory: of the line.
        over: "first" or "last": what the values are divided by; "": nothing.
        points: whether simulations belong over it.
        seeds: draws of the simulation, at least.
    """

    label: str
    model: Transformer
    quantity: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    site: str | None = None
    theory: Theory = "refined"
    over: str = ""
    points: bool = True
    seeds: int = 4

    def predicted(self) -> tuple[np.ndarray, np.ndarray]:
        """Abscissae and predicted values."""
        if self.site is None:
            values, _ = read(self._predict(self.inputs), self.quantity, self.over)
            first = first_layer(self.quantity)
            return np.arange(first, first + len(values)), values
        grid = np.linspace(0.01, 0.99, 50)
        found = [self.at_site(self._predict({"correlation": float(r)}))[0] for r in grid]
        return grid, np.array(found)

    def at_site(self, found: Any) -> tuple[float, float]:
        """The value at this line's site of layer 1, and its standard error where simulated."""
        frame = found.to_frame()
        row = frame[(frame.layer == 1) & (frame.site == self.site)].iloc[0]
        return float(row[self.quantity]), float(row.get(f"{self.quantity}_stderr", np.nan))

    def _predict(self, inputs: Mapping[str, Any]) -> Any:
        return expected(self.model, theory=self.theory, **inputs)


@dataclass(frozen=True, eq=False)
class Panel:
    """Axes with lines.

    Attributes:
        title: what it shows.
        lines: from back to front.
        x, y: axis labels.
        log: whether y is logarithmic.
        diagonal: whether y = x is drawn in grey.
        log_x: whether x is logarithmic, from 1 on.
    """

    title: str
    lines: tuple[FigureLine, ...]
    x: str = "layer (0 enters layer 1)"
    y: str = ""
    log: bool = False
    diagonal: bool = False
    log_x: bool = False


@dataclass(frozen=True, eq=False)
class HeatMap:
    """Angular distance from every layer of a model on.

    Attributes:
        title: what it shows.
        prediction: makes the prediction it is read from.
    """

    title: str
    prediction: Callable[[], Prediction]
    lines: tuple[FigureLine, ...] = ()

    @functools.cached_property
    def predicted(self) -> Prediction:
        """What `prediction` makes, once."""
        return self.prediction()

    def distances(self) -> np.ndarray:
        """(N, N): row n - 1 the distance over n layers, by the layer before; nan past the end."""
        matrix = angular_distance(self.predicted).matrix
        count = len(matrix) - 1
        found = np.full((count, count), np.nan)
        for steps in range(1, count + 1):
            found[steps - 1, : count + 1 - steps] = np.diagonal(matrix, steps)
        return found


@dataclass(frozen=True, eq=False)
class Setup:
    """One figure of a paper.

    Attributes:
        name: what `draw` takes.
        title: what it shows.
        source: the paper's figure.
        settings: the set-up, and what the paper leaves open.
        panels: side by side.
        columns: in so many columns, each on one scale; 0: in one line.
    """

    name: str
    title: str
    source: Source
    settings: str
    panels: tuple[Panel | HeatMap, ...]
    columns: int = 0


def first_layer(quantity: str) -> int:
    """Where along the depth a quantity starts: the stream at 0, weights at 1."""
    return 1 if quantity.startswith((SQUARED_NORM, LAYER_NORM)) else 0


def read(found: Any, quantity: str, over: str = "") -> tuple[np.ndarray, np.ndarray | None]:
    """Values along the depth from a Prediction or a Measurement, and their standard errors."""
    if quantity.startswith(LAYER_NORM):
        values, stderr = _layer_norms(found.weight_gradients())
        if quantity == TYPICAL_LAYER_NORM:
            values = values * np.sqrt(found.grad_variance_typical / found.grad_variance)[1:]
    elif quantity.startswith(SQUARED_NORM):
        frame = found.weight_gradients()
        rows = frame[frame.weight == quantity.removeprefix(SQUARED_NORM)].sort_values("layer")
        column = "squared_norm"
        values = rows[column].to_numpy()
        stderr = rows[f"{column}_stderr"].to_numpy() if f"{column}_stderr" in rows else None
    else:
        values = np.asarray(getattr(found, quantity))
        stderr = getattr(found, f"{quantity}_stderr", None)
    unit = {"": 1.0, "first": values[0], "last": values[-1]}[over]
    return values / unit, None if stderr is None else np.asarray(stderr) / unit


def _layer_norms(frame: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Errors of a layer's matrices add as if they were wholly correlated, the most they can be."""
    sums = frame[frame.layer > 0].groupby("layer").sum(numeric_only=True).sort_index()
    norms = np.sqrt(sums.squared_norm.to_numpy())
    if "squared_norm_stderr" not in sums:
        return norms, None
    return norms, sums.squared_norm_stderr.to_numpy() / (2 * norms)
