"""Pictures of `accuracy.md`, from stored simulations and draws."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from components import QUICK
from figure import svg

import moments

NOTHING = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
ROOT = Path(__file__).parent.parent.parent


def pictures() -> dict[str, str | bytes]:
    """SVG by path."""
    if QUICK:
        return {f"pictures/{name}.svg": NOTHING for name in ("band", "real-modules")}
    return {"pictures/band.svg": _band(), "pictures/real-modules.svg": _real_modules()}


def _band() -> bytes:
    """Draws of one stored case inside the predicted band."""
    stored = json.loads((ROOT / "benchmarks/data/band_draws.json").read_text())

    def draw(axes: Any) -> None:
        for axis, name in zip(axes, ("pre", "post"), strict=True):
            case = stored[name]
            model = moments.Transformer.from_dict(case["made"]["model"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                p = moments.predict(model, batch=case["made"]["batch"], **case["made"]["inputs"])
            drawn = np.array(case["grad_variance"])
            points = np.arange(drawn.shape[1])
            axis.plot(points, drawn.T, color="0.6", lw=0.4, alpha=0.6)
            low, high = p.grad_variance_band
            axis.fill_between(points, low, high, color="C0", alpha=0.25, label="predicted 95 %")
            axis.plot(points, p.grad_variance_typical, color="C0", label="typical draw")
            axis.plot([], [], color="0.6", lw=0.8, label=f"{len(drawn)} draws")
            title = f"{model.layers} layers, {name.title()}-LN, d_model {model.d_model}"
            axis.set(xlabel="after layer", ylabel="gradient variance", yscale="log", title=title)
            axis.title.set_fontsize(9)
            axis.legend(frameon=False, fontsize=8)

    return svg(draw, "One draw of the weights against the predicted band")


def _real_modules() -> bytes:
    """Errors of every family, from the page that the benchmark writes."""
    rows = []
    for line in (ROOT / "docs/real-modules.md").read_text(encoding="utf-8").splitlines():
        cells = [c.strip() for c in line.split("|")[1:-1]]
        if len(cells) == 10 and cells[1] in ("6", "24") and cells[-1] in ("pass", "fails"):
            numbers = [cells[k].strip("* ").split()[0].strip("*") for k in (3, 5, 7)]
            rows.append((f"{cells[0]} {cells[1]}", *map(float, numbers)))
    rows = rows[:62]  # those at their families' own initialisation
    assert len(rows) == 62, "docs/real-modules.md has another form"
    names = ("forward variance", "gradient variance", "weight gradients")

    def draw(axes: Any) -> None:
        (axis,) = axes
        for k, name in enumerate(names):
            values = np.sort([row[k + 1] for row in rows])
            share = np.arange(1, len(values) + 1) / len(values)
            axis.step(np.maximum(values, 0.01), 100 * share, where="post", label=name)
        axis.set(
            xscale="log",
            xlabel="mean error, percent",
            ylabel="percent of modules with less",
        )
        axis.legend(frameon=False, fontsize=8)

    return svg(draw, f"{len(rows)} real modules, against measurement", 1)
