"""Simulated points of the redrawn figures, stored in data/points.json.

    python -m studies.figures.simulate [NAME ...] [--seeds N]

Runs what is missing, was made with another declaration or with fewer than N draws, and stores it
after every line; about ten minutes on one core for all. `python -m studies.figures` draws them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import numpy as np

import moments

from . import names, setup
from .drawing import DATA, key
from .setup import FigureLine, first_layer, read

MEASURED: dict[str, moments.Measurement] = {}  # two figures may read one simulation
SWEPT = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)


def declaration(line: FigureLine) -> dict[str, Any]:
    """What the points were made with."""
    inputs = {name: np.asarray(value).tolist() for name, value in line.inputs.items()}
    return {"model": line.model.to_dict(), "inputs": inputs, "seeds": line.seeds}


def made_with(made: dict[str, Any], line: FigureLine) -> bool:
    """Whether stored points are of this line, with as many draws; fields added since have their
    defaults."""
    now = declaration(line)
    same = moments.Transformer.from_dict(made["model"]) == line.model
    return same and made["inputs"] == now["inputs"] and made["seeds"] >= line.seeds


def simulate(line: FigureLine) -> dict[str, Any]:
    """x, value and stderr of one line."""
    options: dict[str, Any] = {"seeds": line.seeds, "batch": 1}
    if line.site is not None:
        # Draws of its own for every point: of shared ones all would lie to one side of the line.
        found = [
            line.at_site(moments.simulate(line.model, correlation=r, seed=1 + index, **options))
            for index, r in enumerate(SWEPT)
        ]
        values, errors = np.array(found).T
        return _entry(np.array(SWEPT), values, errors)
    made = json.dumps(declaration(line))
    if made not in MEASURED:
        MEASURED[made] = moments.simulate(line.model, **line.inputs, **options)
    measured = MEASURED[made]
    values, stderr = read(measured, line.quantity, line.over)
    first = first_layer(line.quantity)
    errors = np.full(len(values), np.nan) if stderr is None else stderr
    return _entry(np.arange(first, first + len(values)), values, errors)


def _entry(x: np.ndarray, value: np.ndarray, stderr: np.ndarray) -> dict[str, Any]:
    columns = {"x": x, "value": value, "stderr": np.nan_to_num(stderr)}
    return {name: [float(f"{v:.5g}") for v in column] for name, column in columns.items()}


def main(chosen: list[str], least: int) -> None:
    for name in chosen or names():
        for index, panel in enumerate(setup(name).panels):
            for declared in panel.lines:
                line = dataclasses.replace(declared, seeds=max(declared.seeds, least))
                if not line.points:
                    continue
                data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
                where, made = key(name, index, line.label), declaration(line)
                if where in data and made_with(data[where]["made"], line):
                    continue
                data[where] = {**simulate(line), "made": made}
                DATA.write_text(json.dumps(data) + "\n", encoding="utf-8")
                print(where, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=1)
    arguments = parser.parse_args()
    main(arguments.names, arguments.seeds)
