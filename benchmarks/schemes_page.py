"""The page docs/schemes.md, from benchmarks/data/schemes.json and from predictions."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

import moments
from moments.scheme import schemes

INPUTS: dict[str, Any] = {"correlation": 0.25}
DEPTHS = (24, 96)
BOUNDS = {"growth": 0.02, "correlation": 0.015}
GRADIENT_BOUND, POST_GRADIENT_BOUND = 0.03, 0.06
POST = ("post", "mix", "hybrid", "b2t")
"""Placements that normalise the stream itself in some layer."""


def base(layers: int) -> moments.Transformer:
    """The model that all schemes are applied to."""
    return moments.Transformer(layers, 128, 4, 64, dropout=0.1)


def predicted(model: moments.Transformer, batch: int = 2, **inputs: Any) -> moments.Prediction:
    """A prediction whose notes are not warned about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return moments.predict(model, **{**INPUTS, **inputs}, batch=batch)


def typical(found: moments.Prediction) -> float | None:
    """The gradient ratio of a typical draw; None where no spread of draws is predicted."""
    try:
        return float(found.grad_variance_typical[0] / found.grad_variance_typical[-1])
    except moments.MomentsError:
        return None


# --- every scheme --------------------------------------------------------------------------------


def listing() -> str:
    """What every scheme sets, its options with the authors' defaults, its paper."""
    lines = [
        "| scheme | what it is | sets | options | norm | source |",
        "|---|---|---|---|---|---|",
    ]
    for scheme in schemes():
        options = ", ".join(f"`{name}={value!r}`" for name, value in scheme.options.items())
        cells = (
            f"`{scheme.name}`",
            scheme.title,
            ", ".join(f"`{name}`" for name in scheme.sets),
            options,
            ", ".join(scheme.placements) or "any",
            str(scheme.source),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Row:
    """One scheme at one depth.

    Attributes:
        name, layers, norm, draws: which.
        growth, ratio, correlation: predicted; `ratio` is that of a typical draw, or of the mean.
        mean_ratio: predicted mean over draws.
        has_typical: whether a spread of draws is predicted.
        simulated: by quantity, value and standard error over draws.
        errors, stderr: by quantity; logarithms for growth and gradient, a difference for
            correlation.
    """

    name: str
    layers: int
    norm: str
    draws: int
    growth: float
    ratio: float
    mean_ratio: float
    has_typical: bool
    correlation: float
    simulated: dict[str, tuple[float, float]]
    errors: dict[str, float]
    stderr: dict[str, float]

    def beyond(self) -> dict[str, float]:
        """What an error has beyond two standard errors and the refined theory's bound."""
        gradient = POST_GRADIENT_BOUND if self.norm in POST else GRADIENT_BOUND
        bounds = {**BOUNDS, "gradient": gradient}
        found = {
            name: abs(error) - 2 * self.stderr[name] - bounds[name]
            for name, error in self.errors.items()
        }
        return {name: value for name, value in found.items() if value > 0}


def rows(data: dict[str, Any], layers: int) -> list[Row]:
    """Every scheme that was simulated at a depth, predicted again."""
    runs, found = data["runs"], []
    for scheme in schemes():
        run = runs.get(f"{scheme.name}/{layers}")
        if run is None:
            continue
        model = moments.Transformer.from_dict(run["model"])
        p = predicted(model)
        growth = float(p.variance[-1] / p.variance[0])
        mean = float(p.grad_variance[0] / p.grad_variance[-1])
        of_draw = typical(p)
        ratio, r = mean if of_draw is None else of_draw, float(p.correlation[-1])
        # ReZero's stream is its input, whose own scatter is part of every growth.
        input_run = runs[f"rezero/{layers}"]
        scatter = input_run["variance_growth"][1] * math.sqrt(input_run["seeds"] / run["seeds"])
        value, stderr = run["variance_growth"]
        simulated = {
            "growth": (value, float(np.hypot(stderr, value * scatter))),
            "gradient": tuple(run["typical_ratio"]),
            "correlation": tuple(run["final_correlation"]),
        }
        relative = {name: pair[1] / pair[0] for name, pair in simulated.items()}
        found.append(
            Row(
                scheme.name,
                layers,
                model.norm,
                run["seeds"],
                growth,
                ratio,
                mean,
                of_draw is not None,
                r,
                simulated,
                {
                    "growth": math.log(growth / value),
                    "gradient": math.log(ratio / simulated["gradient"][0]),
                    "correlation": r - simulated["correlation"][0],
                },
                {**relative, "correlation": simulated["correlation"][1]},
            )
        )
    return found


def table(found: list[Row]) -> str:
    """Predicted against simulated, one row per scheme."""
    lines = [
        "| scheme | norm | draws | variance growth | simulated | error | gradient ratio, mean "
        "| typical draw | simulated | error | final correlation | simulated | error "
        "| within bounds |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in found:
        outside = row.beyond()
        cells = [f"`{row.name}`", row.norm, str(row.draws)]
        cells += [short(row.growth), measured(row.simulated["growth"])]
        cells += [_percent(row.errors["growth"])]
        cells += [short(row.mean_ratio), short(row.ratio) if row.has_typical else "-"]
        cells += [measured(row.simulated["gradient"]), _percent(row.errors["gradient"])]
        cells += [f"{row.correlation:.3f}", measured(row.simulated["correlation"])]
        cells += [f"{row.errors['correlation']:+.3f}"]
        cells += ["yes" if not outside else "no: " + ", ".join(outside)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def short(value: float) -> str:
    return f"{value:.3g}"


def measured(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3g} ± {pair[1]:.1g}"


def _percent(logarithm: float) -> str:
    return f"{100 * math.expm1(logarithm):+.1f} %"


FIRST_ORDER = (
    "where layers normalise the stream itself, what one draw does to the gradient multiplies from "
    "layer to layer. The theory follows it to first order in 1/d, and layers over width are "
    "{ratio} here; among the runs of 96 Post-LN layers in [validation](validation.md) the error at "
    "width 256 is a fraction of that at 128"
)
REASONS = {
    "group-ln": "the authors' 32 groups of a stream of width 128 have 4 features each. Behind 3 "
    "degrees of freedom 1/|x|^2 has a mean and no variance: few draws come near the mean that is "
    "predicted, and the spread of draws is wider than a lognormal one",
    **dict.fromkeys(("post-ln", "mix-ln", "hybridnorm", "b2t"), FIRST_ORDER),
}
WORDS = {"growth": "variance growth", "gradient": "gradient", "correlation": "final correlation"}


def outside(found: list[Row]) -> str:
    """Which rows leave the bounds, by how much, and why where that is known."""
    lines = []
    for row in found:
        for name, value in row.beyond().items():
            amount = f"{value:.3f}" if name == "correlation" else _percent(value)[1:]
            why = REASONS.get(row.name, "no cause is known") if name == "gradient" else ""
            why = why.format(ratio=f"{row.layers / base(row.layers).d_model:.2g}")
            tail = f": {why}" if why else ""
            lines.append(
                f"* `{row.name}` at {row.layers} layers, {WORDS[name]}, beyond by {amount}{tail}."
            )
    total = 3 * len(found)
    head = f"{total - len(lines)} of {total} numbers are within the bounds."
    return head if not lines else head + " Outside:\n\n" + "\n".join(lines)


# --- the page ------------------------------------------------------------------------------------

HEAD = """# Schemes

Generated by `python benchmarks/schemes.py page`. `model.with_scheme(name, **options)` applies one,
`moments.compare_schemes(model)` all of them. Where Sun et al. define a method otherwise than its
authors, an option says so. A scheme warns where it clashes with what a model has.

"""

SETTING = """Below: d_model 128, 4 heads, 64 tokens, ReLU, dropout 0.1, input correlation 0.25, a
white gradient at the output; 2 sequences per draw of the weights, ± one standard error over draws.
Each scheme at its authors' placement. Gradient ratio: gradient variance at the first layer's input
over that at the last layer's output, predicted as the mean over draws and as the geometric mean,
the typical draw, with which the simulation's is compared (with the mean where no spread of draws is
predicted). An error is within bounds where it exceeds what the refined theory is held to by no more
than two standard errors of the simulation: 2 % of forward variance, .015 of token correlation, and
of the gradient's logarithm .03, or .06 where layers normalise the stream itself."""
