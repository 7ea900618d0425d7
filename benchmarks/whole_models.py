"""The theories against the simulated grid of `moments validate`, as a table of docs/accuracy.md.

python benchmarks/whole_models.py run [PATTERN]    # simulates what is not stored yet, a day for all
python benchmarks/whole_models.py table    # predicts 72 models under three theories, a minute
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tables

import moments
from moments.formulas.law import THEORIES
from moments.prediction.draws import QUANTITIES
from moments.validation.errors import by_class, errors
from moments.validation.grid import Configuration, subset
from moments.validation.store import ROWS, StoredSimulation, load, packaged

CLASSES = (("pre", "full"), ("pre", "causal"), ("post", "full"), ("post", "causal"))


def table() -> None:
    """Mean error of log gradient variance by theory, placement and mask; the refined theory's
    forward errors and the simulation's standard error."""
    found = by_class(errors(), ("norm", "mask")).set_index(["norm", "mask", "theory"])

    def row(title: str, theory: str, measure: str) -> list[str]:
        return [title, *(f"{found.loc[(*c, theory), measure]:.2g}" for c in CLASSES)]

    lines = [row(f"`{theory}`", theory, "grad") for theory in THEORIES]
    lines.append(row("standard error of the simulation", "refined", "noise"))
    lines.append(row("`refined`, beyond two of these", "refined", "grad_beyond"))
    lines.append(row("`refined`, forward variance (relative)", "refined", "variance"))
    lines.append(row("`refined`, correlation", "refined", "correlation"))
    header = ("", "Pre-LN", "Pre-LN, causal", "Post-LN", "Post-LN, causal")
    tables.put("accuracy", "whole-models", tables.markdown(header, lines))


def simulated(
    c: Configuration, seeds: int | None = None, seed: int = 0, device: str = "cpu"
) -> StoredSimulation:
    """One configuration, batch 1; `seed` and the digest give the random numbers."""
    began = time.perf_counter()
    measured = moments.simulate(
        c.model,
        **c.ends,
        seeds=c.seeds if seeds is None else seeds,
        batch=1,
        seed=int(c.digest[:8], 16) + seed,
        device=device,
    )
    values = {name: getattr(measured, name) for name in QUANTITIES}
    stderr = {name: getattr(measured, f"{name}_stderr") for name in QUANTITIES}
    typical = measured.grad_variance_typical
    values["log_grad_variance"] = np.log(typical)
    stderr["log_grad_variance"] = measured.grad_variance_typical_stderr / typical
    profiles = (measured.token_grad_variance, measured.token_grad_variance_stderr)
    kept = (0, c.layers // 2) if c.causal else ()
    by_token = [{n: profile[n] for n in kept} for profile in profiles]
    seconds = time.perf_counter() - began
    return StoredSimulation(c.digest, measured.seeds, seconds, values, stderr, *by_token)


def save(path: Path, stored: Mapping[str, StoredSimulation]) -> None:
    """A line each, of six digits."""
    lines = [f"{json.dumps(name)}:{_entry(stored[name])}" for name in sorted(stored)]
    body = ",\n".join(lines)
    path.write_text(f'{{"format_version":1,"measurements":{{\n{body}\n}}}}\n', encoding="utf-8")


def _entry(one: StoredSimulation) -> str:
    rows: dict[str, Any] = {}
    for name in ROWS:
        found = getattr(one, name)
        rows[name] = {str(at): [float(f"{x:.6g}") for x in row] for at, row in found.items()}
    data = {"digest": one.digest, "seeds": one.seeds, "seconds": round(one.seconds, 2), **rows}
    return json.dumps(data, separators=(",", ":"))


def run(path: Path, configurations: Iterable[Configuration], **options: Any) -> None:
    """Simulate what a file does not hold yet, the cheapest first, saving after each one."""
    for c in sorted(configurations, key=lambda c: c.cost * c.seeds):
        stored = load(path) if path.exists() else {}
        known = stored.get(c.name)
        if known is None or known.digest != c.digest or known.seeds < options.get("seeds", c.seeds):
            save(path, stored | {c.name: simulated(c, **options)})


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        run(packaged(), subset((*sys.argv[2:], "all")[0]))
    else:
        table()
