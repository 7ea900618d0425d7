"""Small line charts as SVG text that takes its colours from the page around it.

matplotlib, which draws every other picture, is too slow under a slider, and fixes its colours when
it draws. Ticks are matplotlib's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

WIDTH, HEIGHT = 460, 262
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 36
MOST_MARKED = 64
"""Points that show their number under the pointer; beyond that they would overlap."""

ROLES = ("signal", "gradient", "third", "fourth", "fifth", "sixth", "seventh")
_DASHES = {"signal": "", "gradient": "7 3", "third": "2 2", "fourth": "8 2 2 2"}
_DASHES |= {"fifth": "1 3", "sixth": "12 4", "seventh": "", "held": "4 3", "before": ""}
_BEHIND = ("held", "before")

STYLE = """.chart { max-width: 100%; height: auto; overflow: visible }
.chart text { fill: currentColor; font: 11px system-ui, "DejaVu Sans", sans-serif }
.chart .title { font-size: 13px; font-weight: 600 }
.chart .rule { stroke: #8884; stroke-width: .7 }
.chart .band { stroke: none; opacity: .16 }
.chart .line { fill: none; stroke-width: 2; stroke-linejoin: round }
.chart .spot { fill: transparent; stroke: none }
"""
"""Of a page of `html` that holds charts, once."""


@dataclass(frozen=True, eq=False)
class Curve:
    """One line: its `label` in the legend ("": none), values `y` at the places `x`, (P,) each, the
    `role` that gives colour and dash (of ROLES, or "held" or "before"), and the ends of a shaded
    range, `band`, (2, P)."""

    label: str
    y: np.ndarray
    x: np.ndarray
    role: str = "signal"
    band: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Chart:
    """A panel of lines over one axis, later curves over earlier ones and "held" and "before" behind
    all; correlations and shares are `bounded`, drawn from 0 to 1."""

    title: str
    curves: Sequence[Curve]
    x_label: str = "layer (0 enters layer 1)"
    bounded: bool = False

    def svg(self) -> str:
        """The panel, for a page of `html` that has STYLE."""
        return _svg(self)


def limits(parts: Iterable[np.ndarray], bounded: bool) -> tuple[float, float, bool]:
    """Ends of an axis for what is drawn on it, and whether it is logarithmic: where values span a
    factor of five. `bounded`: correlations or shares, drawn from 0."""
    values = np.concatenate([np.ravel(part) for part in parts])
    values = values[np.isfinite(values)]
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if not values.size:
        return 0.0, 1.0, False
    if bounded:
        return min(0.0, 1.1 * low), max(1.02 * high, min(1.02, max(1.25 * high, 0.1))), False
    positive = values[values > 0]
    if low >= 0 and positive.size > 0.9 * values.size:  # a zero among many lies on the floor
        low = float(positive.min())
    if low > 0 and high > 5 * low:
        margin = 0.04 * math.log(high / low)
        return low * math.exp(-margin), high * math.exp(min(margin, 1.0)), True
    return min(0.0, 1.1 * low), 1.15 * high or 1.0, False


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers between two ends, some five of them."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if not log:
        found = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    else:
        decades = math.log10(high / low)
        subs = (1.0,) if decades > 3 else (1.0, 3.0) if decades > 1.7 else (1.0, 2.0, 5.0)
        found = LogLocator(subs=subs, numticks=6).tick_values(low, high)
    return [float(t) for t in found if low <= t <= high]


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def shown(value: float) -> str:
    """A number in few signs; powers of ten as such."""
    if value and not 1e-3 <= abs(value) < 1e5:
        power = math.floor(math.log10(abs(value)) + 1e-9)
        front = value / 10.0**power
        base = f"10{str(power).translate(_RAISED)}"
        return base if abs(front - 1) < 1e-6 else f"{front:.3g}·{base}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def _svg(chart: Chart) -> str:
    bands = [c.band for c in chart.curves if c.band is not None]
    low, high, log = limits([*(c.y for c in chart.curves), *bands], chart.bounded)
    xs = np.concatenate([c.x for c in chart.curves])
    first, last = float(xs.min()), float(xs.max())
    legend, rows = _legend([c for c in chart.curves if c.label])
    top, right, bottom = TOP + 16 * rows, WIDTH - RIGHT, HEIGHT - BOTTOM

    def across(x: np.ndarray | float) -> np.ndarray:
        share = (np.asarray(x, float) - first) / ((last - first) or 1.0)
        return np.asarray(LEFT + (right - LEFT) * share)

    def up(y: np.ndarray | float) -> np.ndarray:
        values = np.asarray(y, float)
        if log:
            share = np.log(np.maximum(values, 1e-300) / low) / math.log(high / low)
        else:
            share = (values - low) / (high - low)
        return np.asarray(bottom - (bottom - top) * np.clip(share, -0.05, 1.05))

    label = escape(f"{chart.title} against {chart.x_label}")
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">',
        f'<text class="title" x="4" y="15">{escape(chart.title)}</text>',
        legend,
    ]
    for tick in ticks(low, high, log):
        y = float(up(tick))
        parts.append(
            f'<line class="rule" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown(tick)}</text>'
        )
    for tick in _whole(first, last):
        at = float(across(tick))
        parts.append(
            f'<line class="rule" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
        )
    middle = (LEFT + right) / 2
    below = f'<text x="{middle:.0f}" y="{HEIGHT - 4}" text-anchor="middle">'
    parts.append(f"{below}{escape(chart.x_label)}</text>")
    told_apart = sum(bool(curve.label) for curve in chart.curves) > 1
    # Dashed lines over solid ones, so that one that covers another shows both.
    for curve in sorted(chart.curves, key=lambda curve: curve.role not in _BEHIND):
        x, color = across(curve.x), f"var(--{curve.role})"
        if curve.band is not None:
            around = np.concatenate([up(curve.band[0]), up(curve.band[1])[::-1]])
            path = _points(np.concatenate([x, x[::-1]]), around)
            parts.append(f'<polygon class="band" points="{path}" fill="{color}"/>')
        dash = _DASHES[curve.role] if told_apart or curve.role == "held" else ""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        path = _points(x, up(curve.y))
        parts.append(f'<polyline class="line" points="{path}" stroke="{color}"{dashed}/>')
    parts += _spots(chart, across, up)
    return "".join(parts) + "</svg>"


def _whole(first: float, last: float) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    return [t for t in MaxNLocator(8, integer=True).tick_values(first, last) if first <= t <= last]


def _points(x: np.ndarray, y: np.ndarray) -> str:
    known = np.isfinite(y)
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x[known], y[known], strict=True))


def _spots(chart: Chart, across: Callable[..., Any], up: Callable[..., Any]) -> list[str]:
    """What the pointer reads."""
    found = []
    for curve in chart.curves:
        if curve.role in _BEHIND or curve.y.size > MOST_MARKED:
            continue
        name = f"{curve.label}, " if curve.label else ""
        for at, value in zip(curve.x, curve.y, strict=True):
            if np.isfinite(value):
                said = f"{escape(name)}{at:g}: {shown(float(value))}"
                found.append(
                    f'<circle class="spot" cx="{float(across(at)):.1f}" '
                    f'cy="{float(up(value)):.1f}" r="5"><title>{said}</title></circle>'
                )
    return found


def _legend(curves: list[Curve]) -> tuple[str, int]:
    """Names beside a piece of their line, in rows; and how many rows."""
    if not curves:
        return "", 0
    parts, x, row = [], float(LEFT), 0
    for curve in curves:
        needed = 34 + 6.3 * len(curve.label)
        if x > LEFT and x + needed > WIDTH:
            x, row = float(LEFT), row + 1
        y = TOP + 16 * row
        dash = _DASHES[curve.role]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(
            f'<line class="line" x1="{x:.0f}" x2="{x + 24:.0f}" y1="{y - 4}" y2="{y - 4}" '
            f'stroke="var(--{curve.role})"{dashed}/>'
            f'<text x="{x + 29:.0f}" y="{y}">{escape(curve.label)}</text>'
        )
        x += needed
    return "".join(parts), row + 1
