"""Pictures as SVG bytes: colour-blind safe, the same at every build."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


def svg(draw: Callable[[Any], None], title: str, columns: int = 2) -> bytes:
    """A row of axes, drawn by `draw`."""
    import matplotlib.pyplot as plt

    settings = {
        "svg.hashsalt": "moments",
        "svg.fonttype": "none",  # text stays text
        "font.family": "DejaVu Sans",
        "axes.prop_cycle": plt.cycler(color=["#0072B2", "#D55E00", "#009E73", "#CC79A7"]),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
    }
    with plt.rc_context(settings):
        figure, axes = plt.subplots(1, columns, figsize=(3.6 * columns, 2.9), squeeze=False)
        draw(axes[0])
        figure.suptitle(title, fontsize=10)
        sides = 0.85 / figure.get_figwidth()  # inches that labels need; a search would be slow
        wide = 0.85 / (3.6 - 0.9)
        top = 0.8 if any(axis.get_title() for axis in axes[0]) else 0.87  # below both titles
        figure.subplots_adjust(sides, 0.17, 1 - 0.15 / figure.get_figwidth(), top, wspace=wide)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)
    return file.getvalue()
