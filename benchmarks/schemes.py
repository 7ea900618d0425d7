"""Every scheme against simulation.

    python benchmarks/schemes.py simulate [--layers 24] [--seeds 24] [--scheme NAME ...]
    python benchmarks/schemes.py depth [--seeds 4]
    python benchmarks/schemes.py table     # into docs/schemes.md

`simulate` runs what data/schemes.npz lacks with as many draws, stored after every scheme, so
that it can be interrupted: on one core a draw of all schemes takes half a minute at 24 layers and a
minute at 96. `depth` does the same with 192 and 1000 layers, a minute a draw.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import records
import tables

import moments
from moments.scheme import Scheme, schemes
from moments.show.scheme_table import scheme_model

NAME = "schemes"
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


DEEP = (192, 1000)
GRAD_CORRELATIONS = (0.0, 0.2, 0.4, 0.8)
DEEP_CASES = (
    ("dslm", "pre", GRAD_CORRELATIONS),
    ("dslm", "post", GRAD_CORRELATIONS),
    ("xavier", "pre", (0.0, 0.8)),
)
"""Scheme, norm and correlations of the output's gradient."""


def deep(layers: int, norm: str, scheme: str) -> moments.Transformer:
    """A model of many layers, narrow so that a processor simulates it."""
    model = moments.Transformer(layers, 64, 4, 32, norm=norm, dropout=0.1)
    given = 0.25 / (1 - model.dropout)
    return model.with_scheme(scheme, **({"input_correlation": given} if scheme == "dslm" else {}))


def declared(layers: int, scheme: Scheme) -> moments.Transformer:
    """The scheme on the benchmark's model, at its authors' placement."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return scheme_model(base(layers), scheme, INPUTS)


def stored() -> dict[str, Any]:
    return records.load(NAME) if records.exists(NAME) else {"runs": {}}


def _store(data: dict[str, Any]) -> None:
    data["machine"] = f"{platform.machine()}, {platform.system()}, one thread"
    records.save(NAME, data, bits=40)  # models are compared


def simulate(layers: int, seeds: int, chosen: list[str]) -> None:
    """Run what is missing or has fewer draws; models that two schemes share run once."""
    for scheme in schemes():
        if chosen and scheme.name not in chosen:
            continue
        data, key = stored(), f"{scheme.name}/{layers}"
        model = declared(layers, scheme)

        def done(run: dict[str, Any], model: moments.Transformer = model) -> bool:
            return run["seeds"] >= seeds and _made_with(run, model)

        if key in data["runs"] and done(data["runs"][key]):
            continue
        same = [run for run in data["runs"].values() if done(run)]
        run = same[0] if same else _run(model, seeds)
        data["runs"][key] = run
        _store(data)
        print(key, f"{run['seconds']:.0f} s", "shared" if same else "", flush=True)


def simulate_depth(seeds: int) -> None:
    """DeepScaleLM and Xavier weights at many layers."""
    cases = [(scheme, norm, r) for scheme, norm, rs in DEEP_CASES for r in rs]
    for scheme, norm, r in cases:
        for layers in DEEP:
            data, key = stored(), f"{scheme}/{norm}/{layers}/{r:g}"
            runs, model = data.setdefault("depth", {}), deep(layers, norm, scheme)
            if key in runs and runs[key]["seeds"] >= seeds and _made_with(runs[key], model):
                continue
            runs[key] = _run(model, seeds, grad_correlation=r)
            _store(data)
            print(key, f"{runs[key]['seconds']:.0f} s", flush=True)


def _made_with(run: dict[str, Any], model: moments.Transformer) -> bool:
    """Whether a run is of this model, to the digits that a solved temperature settles in."""
    then = moments.Transformer.from_dict(run["model"])
    first, second = (json.dumps(_rounded(_fields(m))) for m in (then, model))
    return first == second


def _fields(model: moments.Transformer) -> dict[str, Any]:
    """A declaration with the weights it has by default."""
    weights = model.weights
    return model.to_dict() | {"weights": None if weights is None else weights.to_dict()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return f"{value:.5g}" if isinstance(value, float) else value


def _run(model: moments.Transformer, seeds: int, **gradient: Any) -> dict[str, Any]:
    begun = time.time()
    found = moments.simulate(model, **INPUTS, **gradient, seeds=seeds, batch=2)
    first, last = found.variance[0], found.grad_variance[-1]
    return {
        "model": model.to_dict(),
        "seeds": seeds,
        "seconds": time.time() - begun,
        "last_variance": [found.variance[-1], found.variance_stderr[-1]],
        "variance_growth": [found.variance[-1] / first, found.variance_stderr[-1] / first],
        "gradient_ratio": [found.grad_variance[0] / last, found.grad_variance_stderr[0] / last],
        "typical_ratio": [
            found.grad_variance_typical[0] / found.grad_variance_typical[-1],
            found.grad_variance_typical_stderr[0] / found.grad_variance_typical[-1],
        ],
        "final_correlation": [found.correlation[-1], found.correlation_stderr[-1]],
    }


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


def table() -> None:
    """A row for every scheme, both depths: errors of what is predicted."""
    data, lines, count, beyond = stored(), [], 0, 0
    found = {layers: {row.name: row for row in rows(data, layers)} for layers in DEPTHS}
    for scheme in schemes():
        cells = [f"`{scheme.name}`", scheme.title, ", ".join(scheme.placements) or "any"]
        mine = [found[layers][scheme.name] for layers in DEPTHS]
        for name in ("growth", "gradient", "correlation"):
            each = []
            for row in mine:
                error, stderr = row.errors[name], row.stderr[name]
                error = error if name == "correlation" else math.expm1(error)
                text = tables.percent(error, stderr, signed=True)
                each.append(f"**{text}**" if name in row.beyond() else text)
                count, beyond = count + 1, beyond + (name in row.beyond())
            cells.append(" / ".join(each))
        lines.append((*cells, str(scheme.source)))
    header = ("scheme", "what it is", "norm", "variance growth", "gradient", "correlation")
    tables.put(
        "schemes",
        "schemes",
        tables.markdown((*header, "source"), lines, words=3),
        f"{count - beyond} of {count} numbers are within the bounds; **bold** is not.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("simulate", "depth", "table"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seeds", type=int)
    names = [scheme.name for scheme in schemes()]
    parser.add_argument("--scheme", action="append", default=[], choices=names)
    arguments = parser.parse_args()
    if arguments.command == "simulate":
        simulate(arguments.layers, arguments.seeds or 24, arguments.scheme)
    elif arguments.command == "depth":
        simulate_depth(arguments.seeds or 4)
    else:
        table()


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
