"""Rates of learning: the sharpness that limits them, and where to search."""

from __future__ import annotations

from ..step.sharpness import Sharpness
from .report import number, render, tabled


def sharpness_text(sharpness: Sharpness) -> str:
    """The extreme eigenvalues, and the matrices that carry the largest one."""
    rows = sharpness.by_matrix.head(8).itertuples(index=False)
    of = "the Hessian" if sharpness.optimizer == "sgd" else "the Hessian over root gradients"
    return render(
        tabled(
            f"sharpness under {sharpness.optimizer}: largest eigenvalue of {of} "
            f"{number(sharpness.largest)} (± {sharpness.largest_stderr:.2g}), least "
            f"{number(sharpness.least)} (± {sharpness.least_stderr:.2g})",
            ("layer", "parameter", "share of the largest"),
            ((str(layer), name, f"{100 * share:.1f} %") for layer, name, share in rows),
            "± is the standard error over draws of the network",
            whole=False,
        )
    )
