"""Every scheme against simulation, and the page docs/schemes.md.

    python benchmarks/schemes.py simulate [--layers 24] [--seeds 6]
    python benchmarks/schemes.py page

`simulate` runs what benchmarks/data/schemes.json does not hold yet and stores it after every
scheme, so that it can be interrupted: on one core three minutes at 24 layers and 6 draws, and six
at 96 layers and 3. `page` writes docs/schemes.md from that file and from predictions.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import moments
from moments.scheme import Scheme, schemes
from moments.scheme_table import scheme_model

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks/data/schemes.json"
PAGE = ROOT / "docs/schemes.md"
INPUTS = {"correlation": 0.25}
DEPTHS = (24, 96)


def base(layers: int) -> moments.Transformer:
    return moments.Transformer(layers, 128, 4, 64, dropout=0.1)


def declared(layers: int, scheme: Scheme) -> moments.Transformer:
    """The scheme on the benchmark's model, at its authors' placement."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return scheme_model(base(layers), scheme, INPUTS)


# --- simulation ----------------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {"runs": {}}


def simulate(layers: int, seeds: int) -> None:
    """Run what is missing; models that two schemes share run once."""
    for scheme in schemes():
        data, key = stored(), f"{scheme.name}/{layers}"
        model = declared(layers, scheme)
        if key in data["runs"] and _made_with(data["runs"][key], model):
            continue
        same = [run for run in data["runs"].values() if _made_with(run, model)]
        run = same[0] if same else _run(model, seeds)
        data["runs"][key] = run
        data["machine"] = f"{platform.machine()}, {platform.system()}, one thread"
        DATA.parent.mkdir(exist_ok=True)
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        print(key, f"{run['seconds']:.0f} s", "shared" if same else "", flush=True)


def _declared(run: dict[str, Any]) -> moments.Transformer:
    return moments.Transformer.from_dict(run["model"])


def _made_with(run: dict[str, Any], model: moments.Transformer) -> bool:
    """Whether a run is of this model, to the digits that a solved temperature settles in."""
    then, now = (json.dumps(_rounded(m.to_dict())) for m in (_declared(run), model))
    return then == now


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry) for entry in value]
    return f"{value:.5g}" if isinstance(value, float) else value


def _run(model: moments.Transformer, seeds: int) -> dict[str, Any]:
    begun = time.time()
    found = moments.simulate(model, **INPUTS, seeds=seeds, batch=2)
    first, last = found.variance[0], found.grad_variance[-1]
    return {
        "model": model.to_dict(),
        "seeds": seeds,
        "seconds": time.time() - begun,
        "variance_growth": [found.variance[-1] / first, found.variance_stderr[-1] / first],
        "gradient_ratio": [found.grad_variance[0] / last, found.grad_variance_stderr[0] / last],
        "typical_ratio": [
            found.grad_variance_typical[0] / found.grad_variance_typical[-1],
            found.grad_variance_typical_stderr[0] / found.grad_variance_typical[-1],
        ],
        "final_correlation": [found.correlation[-1], found.correlation_stderr[-1]],
    }


# --- page ----------------------------------------------------------------------------------------


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


def table(layers: int) -> str:
    """Predicted against simulated, one row per scheme."""
    runs = stored()["runs"]
    lines = [
        "| scheme | norm | variance growth | simulated | error | gradient ratio | typical draw "
        "| simulated | error | final correlation | simulated | error |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for scheme in schemes():
        run = runs.get(f"{scheme.name}/{layers}")
        if run is None:
            continue
        model = _declared(run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", moments.ValidityWarning)
            found = moments.predict(model, **INPUTS, batch=2)
        growth = float(found.variance[-1] / found.variance[0])
        mean = float(found.grad_variance[0] / found.grad_variance[-1])
        typical = _typical(found)
        r = float(found.correlation[-1])
        # ReZero's stream is its input, whose own scatter is part of every growth.
        scatter = runs[f"rezero/{layers}"]["variance_growth"][1]
        value, stderr = run["variance_growth"]
        grown = [value, float(np.hypot(stderr, value * scatter))]
        cells = [f"`{scheme.name}`", model.norm]
        cells += [_short(growth), _measured(grown), _percent(growth, grown)]
        cells += [_short(mean), "-" if typical is None else _short(typical)]
        cells += [_measured(run["typical_ratio"])]
        cells += [_percent(mean if typical is None else typical, run["typical_ratio"])]
        cells += [f"{r:.3f}", _measured(run["final_correlation"])]
        cells += [f"{r - run['final_correlation'][0]:+.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _typical(found: moments.Prediction) -> float | None:
    """The gradient ratio of a typical draw; None where no spread of draws is predicted."""
    try:
        return float(found.grad_variance_typical[0] / found.grad_variance_typical[-1])
    except moments.MomentsError:
        return None


def _short(value: float) -> str:
    return f"{value:.3g}"


def _measured(pair: list[float]) -> str:
    return f"{pair[0]:.3g} ± {pair[1]:.1g}"


def _percent(predicted: float, pair: list[float]) -> str:
    return f"{100 * (predicted / pair[0] - 1):+.1f} %"


HEAD = """# Schemes

Generated by `python benchmarks/schemes.py page`. `model.with_scheme(name, **options)` applies one,
`moments.compare_schemes(model)` all of them. Where Sun et al. define a method otherwise than its
authors, an option says so. A scheme warns where it clashes with what a model has.

"""


NOTES = """## Where predictions are far off

`group-ln`: the authors' 32 groups of a stream of width 128 have 4 features each. Behind 3 degrees
of freedom 1/|x|^2 has a mean and no variance: few draws lie near the mean that is predicted.
`sandwich-ln`, `peri-ln` and `mix-ln` at 96 layers are off by several of their standard errors, as
three draws estimate them. Post-LN, `mix-ln`, `hybridnorm` and `b2t`: at 96 layers and width 128 the
gradient of single draws scatters over decades, and few draws do not settle its mean."""


def page() -> str:
    """The whole page."""
    parts = [HEAD + listing()]
    seeds = {key.rpartition("/")[2]: run["seeds"] for key, run in stored()["runs"].items()}
    for layers in DEPTHS:
        if str(layers) not in seeds:
            continue
        parts.append(
            f"## {layers} layers\n\n"
            f"d_model 128, 4 heads, 64 tokens, ReLU, dropout 0.1, input correlation 0.25, white "
            f"gradient at the output; {seeds[str(layers)]} draws of the weights, 2 sequences each, "
            "± one standard error over draws. Each scheme at its authors' placement. Gradient "
            "ratio: gradient variance at the first layer's input over that at the last layer's "
            "output, predicted as the mean over draws and as the geometric mean, the typical draw, "
            "with which the simulation's is compared (with the mean where no spread of draws is "
            "predicted).\n\n" + table(layers)
        )
    return "\n\n".join([*parts, NOTES]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("simulate", "page"))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=6)
    arguments = parser.parse_args()
    if arguments.command == "simulate":
        simulate(arguments.layers, arguments.seeds)
    else:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
