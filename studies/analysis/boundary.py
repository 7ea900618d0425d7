"""Boundaries that theories of infinite size draw, and ours at finite size, over a sweep's map."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from moments.errors import MomentsError
from moments.formulas.checks import PROBABILITY, check_choice, check_interval
from moments.grids.result import Sweep
from moments.model.transformer import Transformer
from moments.show import palette
from moments.show.plot import Picture, styled

from .fixed_points import many_exponents, repeated
from .frozen import RandomEnergy, random_energy

KINDS = {
    "angle": "tokens neither part nor merge (angle exponent 0, Cowsik et al.)",
    "gradient": "gradients neither grow nor shrink (gradient exponent 0, Cowsik et al.)",
    "entropy": "attention freezes at infinite length (Giorlandino and Goldt)",
    "rank": "correlation {:g} at infinite size (Giorlandino and Goldt)",
    "correlation": "correlation {:g}, predicted at this size",
}
"""Which boundary, and its label."""

TOGETHER = 128

BOUNDARIES = (
    (palette.VERMILION, "white", 2.4, "solid"),
    (palette.BLACK, "white", 2.0, (0, (5, 2))),
    ("white", palette.BLACK, 4.2, "solid"),
    (palette.BLUE, "white", 1.6, (0, (6, 2, 1, 2))),
)
"""Colour, rim, width and dashes of lines over a map; one that lies on another leaves it seen."""


class LevelLine(NamedTuple):
    """A line over a map, named `label` in the legend: where `values`, of the shape (number of x,
    number of y) of the map, cross a level."""

    label: str
    values: np.ndarray
    level: float = 0.0


def boundaries(
    sweep: Sweep,
    x: str,
    y: str,
    kinds: Sequence[str] = ("angle", "gradient", "entropy", "rank"),
    *,
    correlation: float = 0.9,
) -> list[LevelLine]:
    """Lines for `draw`, at the sweep's values of both axes.

    They are those of the model without dropout, which no theory of boundaries has, at the first
    value of every other axis.

    Args:
        sweep: whose configurations.
        x, y: axes of the map.
        kinds: "angle" and "gradient": where that exponent is 0 (`exponents`, of the first layer
            repeated, finite size). "entropy": where attention freezes in some layer, and "rank":
            where tokens reach `correlation` at the last layer, both of infinite width and length
            (`random_energy`). "correlation": the latter as `predict` has it.
        correlation: of the latter two.

    Raises:
        DomainError: no such kind or axis.
    """
    for kind in kinds:
        check_choice("kinds", kind, tuple(KINDS))
    check_interval("correlation", correlation, PROBABILITY)
    models = [
        [_undropped(sweep, {x: across, y: up}) for up in sweep.axes.values[y]]
        for across in sweep.axes.values[x]
    ]
    found = []
    cache: dict[str, np.ndarray] = {}
    for kind in kinds:
        level = correlation if kind in ("rank", "correlation") else 0.0
        if kind in ("angle", "gradient"):
            cache = cache or _exponents(models)
            values = cache[kind]
        elif kind == "correlation":
            values = _predicted(sweep, x, y)
        else:
            read = _freezing if kind == "entropy" else _last_correlation
            values = _each(sweep, models, x, y, read)
        found.append(LevelLine(KINDS[kind].format(correlation), values, level))
    return found


@styled
def draw(figure: Picture, sweep: Sweep, x: str, y: str, lines: Sequence[LevelLine]) -> Picture:
    """A map of `sweep.plot(x, y)` with rimmed lines on it, of different widths and dashes, named in
    a legend."""
    (ax, *_), places = figure.axes, [np.array(sweep.axes.values[axis]) for axis in (x, y)]
    handles = []
    for line, (color, rim, width, style) in zip(lines, itertools.cycle(BOUNDARIES)):
        values = np.asarray(line.values, dtype=float)
        around = [withStroke(linewidth=width + 1.4, foreground=rim)]
        finite = values[np.isfinite(values)]
        there = finite.size and finite.min() < line.level < finite.max()
        if there:
            drawn = ax.contour(
                *places, values.T, levels=[line.level], colors=[color], linewidths=width
            )
            # the widest below all, so that none is hidden
            drawn.set(linestyle=style, path_effects=around, zorder=4.0 - width / 5)
        label = line.label if there else f"{line.label}: not on this map"
        named = Line2D([], [], color=color, linestyle=style, linewidth=width, label=label)
        named.set(path_effects=around)
        handles.append(named)
    figure.legend(handles=handles, loc="outside lower center", ncols=1)
    if note := figure.get_supxlabel():  # whose place the legend takes
        figure.head(f"{figure.get_suptitle()}\n{note}")
        figure.below("")
    return figure


def _undropped(sweep: Sweep, values: dict[str, Any]) -> Transformer | None:
    """The configuration without dropout; None where it cannot be declared."""
    try:
        model = sweep.model(**values)
    except MomentsError:
        return None
    return model.replace(
        dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0, activation_dropout=0.0
    )


def _exponents(models: list[list[Transformer | None]]) -> dict[str, np.ndarray]:
    """Both exponents at every configuration, each kind of layer once."""
    shape = (len(models), len(models[0]))
    layers: dict[Transformer, list[tuple[int, int]]] = {}
    for i, j in np.ndindex(shape):
        model = models[i][j]
        if model is not None:
            layers.setdefault(repeated(model, 1), []).append((i, j))
    both = {name: np.full(shape, np.nan) for name in ("angle", "gradient")}
    kept = list(layers)
    for start in range(0, len(kept), TOGETHER):
        part = kept[start : start + TOGETHER]
        for model, one in zip(part, many_exponents(part), strict=True):
            for place in layers[model]:
                both["angle"][place], both["gradient"][place] = one.angle, one.gradient
    return both


def _each(
    sweep: Sweep,
    models: list[list[Transformer | None]],
    x: str,
    y: str,
    read: Callable[[RandomEnergy], float],
) -> np.ndarray:
    """A number of that theory at every configuration; NaN where it has none."""
    found = np.full((len(models), len(models[0])), np.nan)
    for i, across in enumerate(sweep.axes.values[x]):
        for j, up in enumerate(sweep.axes.values[y]):
            model, told = models[i][j], sweep.arguments(**{x: across, y: up})
            given = {name: told.get(name) for name in ("variance", "correlation")}
            if model is not None:
                numbers = {name: float(v) for name, v in given.items() if v is not None}
                found[i, j] = read(random_energy(model, **numbers))
    return found


def _freezing(found: RandomEnergy) -> float:
    """Logarithm of the largest logit variance over the critical one."""
    return float(np.log(found.logit_variance.max() / found.critical_logit_variance))


def _last_correlation(found: RandomEnergy) -> float:
    return float(found.correlation[-1])


def _predicted(sweep: Sweep, x: str, y: str) -> np.ndarray:
    names = list(sweep.axes.values)
    values = np.moveaxis(sweep["correlation"], (names.index(x), names.index(y)), (0, 1))
    return np.asarray(values.reshape(*values.shape[:2], -1)[..., 0])
