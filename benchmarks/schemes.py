"""Every scheme against simulation, and the page docs/schemes.md.

    python benchmarks/schemes.py simulate [--layers 24] [--seeds 24] [--scheme NAME ...]
    python benchmarks/schemes.py depth [--seeds 4]
    python benchmarks/schemes.py page

`simulate` runs what benchmarks/data/schemes.json does not hold yet with as many draws, and stores
it after every scheme, so that it can be interrupted: on one core a draw of all schemes takes half a
minute at 24 layers and a minute at 96. `depth` does the same with 192 and 1000 layers, a minute a
draw. `page` writes docs/schemes.md from that file and from predictions.
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
from schemes_depth import DEEP, DEEP_CASES, DEPTH, SCALING, deep, depth, scaling
from schemes_page import DEPTHS, HEAD, INPUTS, SETTING, base, listing, outside, rows, table

import moments
from moments.scheme import Scheme, schemes
from moments.show.scheme_table import scheme_model

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks/data/schemes.json"
PAGE = ROOT / "docs/schemes.md"


def declared(layers: int, scheme: Scheme) -> moments.Transformer:
    """The scheme on the benchmark's model, at its authors' placement."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        return scheme_model(base(layers), scheme, INPUTS)


def stored() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {"runs": {}}


def _store(data: dict[str, Any]) -> None:
    data["machine"] = f"{platform.machine()}, {platform.system()}, one thread"
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


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


def page(data: dict[str, Any]) -> str:
    """The whole page."""
    parts, every = [HEAD + listing(), SETTING], []
    for layers in DEPTHS:
        found = rows(data, layers)
        every += found
        parts += [f"## {layers} layers", table(found)]
    parts += ["## Outside the bounds", outside(every), DEPTH, depth(data)]
    return "\n\n".join([*parts, SCALING, scaling()]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("simulate", "depth", "page"))
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
        PAGE.write_text(page(stored()), encoding="utf-8")


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
