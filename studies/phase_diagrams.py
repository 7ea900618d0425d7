"""Phase diagrams: predictions over two axes, with boundaries of infinite size beside them.

    python -m studies.phase_diagrams [--only NAME]      # draws docs/phase-NAME.png, some minutes

Nothing is stored: every number is a prediction.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import moments
from moments.show.plot import save
from studies.analysis import boundaries
from studies.analysis.boundary import draw

DOCS = Path(__file__).parent.parent / "docs"
DEPTHS = [1, 2, 4, 8, 16, 32, 64]


def logits() -> Any:
    """Depth against the logits' scale: tokens become one, or attention freezes."""
    model = moments.Transformer(24, 256, 4, 128, activation="gelu")
    queries = np.geomspace(1e-4, 6e-2, 12)
    sweep = moments.sweep(model, {"weights.query": queries, "layers": DEPTHS}, correlation=0.1)
    kinds = ("entropy", "rank", "correlation")
    lines = boundaries(sweep, "weights.query", "layers", kinds, correlation=0.75)
    found = sweep.plot("weights.query", "layers", "correlation", name="Pre-LN")
    return draw(found, sweep, "weights.query", "layers", lines)


def branches() -> Any:
    """Depth against the scale of the branches: how far gradients grow on their way down."""
    model = moments.Transformer(24, 256, 4, 128, activation="gelu")
    axes = {"branch_scale": np.geomspace(0.03, 1.5, 24), "layers": [*DEPTHS, 128]}
    sweep = moments.sweep(model, axes, correlation=0.1)
    return sweep.plot("branch_scale", "layers", "grad_variance_growth", name="Pre-LN")


def trainability() -> Any:
    """Order and chaos: a tanh stack that attention draws together and its hidden layer apart."""
    d = 512
    base = moments.Transformer(24, d, 8, 128, norm="post", activation="tanh")

    def made(attention_gain: float, hidden_gain: float) -> moments.Transformer:
        weights = moments.Weights(
            query=1 / d,
            key=1 / d,
            value=attention_gain / d,
            output=1 / d,
            ffn_in=hidden_gain / d,
            ffn_out=1 / (4 * d),
        )
        return base.replace(weights=weights)

    axes = {
        "attention_gain": np.geomspace(0.01, 4, 27),
        "hidden_gain": np.geomspace(0.3, 9, 18),
    }
    sweep = moments.sweep(made, axes, correlation=0.3)
    kinds = ("angle", "gradient", "rank", "correlation")
    lines = boundaries(sweep, "attention_gain", "hidden_gain", kinds)
    found = sweep.plot("attention_gain", "hidden_gain", "correlation", name="Post-LN")
    draw(found, sweep, "attention_gain", "hidden_gain", lines)
    found.axes[0].set(
        xlabel="width × variance of value weights",
        ylabel="width × variance of hidden weights",
    )
    return found


PICTURES = {"logits": logits, "branches": branches, "trainability": trainability}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PICTURES, help="one of the pictures")
    chosen = parser.parse_args().only
    warnings.simplefilter("ignore", moments.ValidityWarning)
    for name, picture in PICTURES.items():
        if chosen in (None, name):
            save(picture(), DOCS / f"phase-{name}.png")


if __name__ == "__main__":
    main()
