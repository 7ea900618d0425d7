"""Settings that `docs/limits.md` names, simulated again.

    python benchmarks/limits.py run [NAME ...]   # simulates and stores, about three minutes
    python benchmarks/limits.py table            # against today's predictions, into docs/limits.md

Each is small, and has what its row of that page is about: logits of a certain variance, rotary
positions of tokens that are alike, caps, tanh in place of a norm. `moments.simulate` draws fresh
weights, and knows no law of the theory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from tables import markdown, percent, put

import moments

STORE = Path(__file__).parent / "data" / "limits.json"
GIVEN = {"variance": 1.0, "correlation": 0.2, "grad_variance": 1.0, "grad_correlation": 0.1}
ALIKE = {"variance": 1.0, "correlation": 0.9, "grad_variance": 1.0, "grad_correlation": 0.6}
PLAIN = moments.Transformer(layers=2, d_model=96, heads=2, seq_len=48, causal=True)


def with_logits(model: moments.Transformer, variance: float) -> moments.Transformer:
    """Queries and keys drawn so that logits have this variance."""
    of_each = math.sqrt(variance) / model.d_model
    return model.replace(weights=model.weights.replace(query=of_each, key=of_each))


ROTARY = PLAIN.replace(layers=1, d_model=128, seq_len=96, rotary=moments.Rotary())
DYT = PLAIN.replace(d_model=128, norm="post", normalization="dyt", causal=False)
CASES: dict[str, tuple[moments.Transformer, dict[str, float], int]] = {
    "rotary, correlation .9": (ROTARY.replace(normalization="rmsnorm"), ALIKE, 256),
    "cap 10, logit variance 5": (with_logits(PLAIN, 5.0).replace(logit_softcap=10.0), GIVEN, 512),
    "cap 7, logit variance 25": (with_logits(PLAIN, 25.0).replace(logit_softcap=7.0), GIVEN, 512),
    "DyT 1, Post-LN, 1 layer": (DYT.replace(layers=1, dyt_alpha=1.0), GIVEN, 256),
    "DyT 1, Post-LN, 8 layers": (DYT.replace(layers=8, dyt_alpha=1.0), GIVEN, 128),
    "DyT .5, Post-LN, 8 layers": (DYT.replace(layers=8), GIVEN, 128),
    "no norm, gated, 8 layers, width 64": (
        PLAIN.replace(
            layers=8, d_model=64, norm="none", activation="swiglu", branch_scale=0.3, causal=False
        ),
        GIVEN,
        512,
    ),
    "logit variance 12, full": (
        with_logits(PLAIN.replace(d_model=128, causal=False), 12.0),
        GIVEN,
        512,
    ),
    "logit variance 12": (with_logits(PLAIN.replace(d_model=128), 12.0), GIVEN, 512),
}


def run(names: list[str]) -> None:
    """Simulate, and store means with their errors."""
    stored = json.loads(STORE.read_text()) if STORE.exists() else {}
    for name in names or CASES:
        model, given, seeds = CASES[name]
        m = moments.simulate(model, **given, seeds=seeds, batch=4)
        weights = m.weight_gradients().groupby("weight")
        stored[name] = {
            "variance": [float(m.variance[-1]), float(m.variance_stderr[-1])],
            "gradient": [float(m.grad_variance[0]), float(m.grad_variance_stderr[0])],
            "weights": {
                weight: [
                    float(rows.squared_norm.sum()),
                    float(np.hypot.reduce(rows.squared_norm_stderr)),
                ]
                for weight, rows in weights
            },
        }
        print(name, flush=True)
        STORE.write_text(json.dumps(stored, indent=1) + "\n")


def compared() -> list[list[str]]:
    """Rows of the table: predicted over simulated, by token only where that differs."""
    rows = []
    for name, seen in json.loads(STORE.read_text()).items():
        model, given, _ = CASES[name]
        for words, tokens in (("classes" if model.causal else "alike", None), ("by token", True)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                p = moments.predict(model, **given, tokens=tokens)
            sums = p.weight_gradients().groupby("weight").squared_norm.sum()
            others = [w for w in seen["weights"] if w not in ("query", "key")]
            worst = max(others, key=lambda w: abs(math.log(sums[w] / seen["weights"][w][0])))
            row = [
                f"{name}, {words}",
                _error(p.variance[-1], seen["variance"]),
                _error(p.grad_variance[0], seen["gradient"]),
                *(_error(sums[w], seen["weights"][w]) for w in ("query", "key", worst)),
                "yes" if p.warnings else "",
            ]
            if tokens is None or row[1:] != rows[-1][1:]:
                rows.append(row)
    return rows


def _error(predicted: float, seen: list[float]) -> str:
    """In percent, with the standard error of what was simulated."""
    mean, stderr = seen
    return percent(predicted / mean - 1, stderr / mean, signed=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("names", nargs="*", choices=[[], *CASES])
    arguments = parser.parse_args()
    if arguments.action == "run":
        run(arguments.names)
        return
    heads = ("setting", "variance", "gradient", "queries", "keys", "worst other weight", "noted")
    put("limits", "measured-again", markdown(heads, compared()))


if __name__ == "__main__":
    main()
