"""What few bits lose of the matrix products of real modules: predicted, and cast bit by bit.

    python benchmarks/low_precision.py table    # predicts, casts and writes docs/accuracy.md
    python benchmarks/low_precision.py draws    # prints numbers for a test

Ten families of transformers at width 256, 3 layers, 2 x 64 tokens, one draw (six for products that
give weights' gradients); means over layers.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tables

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import test_low_precision as measured

from moments.prediction.low_precision import FORMATS

LIKE_LLAMA = ("mistral", "qwen2", "qwen3", "gemma", "olmo", "stablelm", "granite")
OPT = {
    "model_type": "opt",
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 1024,
    "num_attention_heads": 4,
    "vocab_size": 2000,
    "dropout": 0.0,
}
OPT_PARAMETERS = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "out_proj": ("output",),
    "fc1": ("ffn_in",),
    "fc2": ("ffn_out",),
}


SEEDS = 6
"""Draws of a module over which products that give weights' gradients are averaged."""


def means(family: str, draws: int) -> dict[str, dict[str, float]]:
    """By format and weight, decibels of the product that gives its gradient, over layers, draws."""
    drawn = [measured.operands(family, seed) for seed in range(draws)]
    found: dict[str, dict[str, float]] = {}
    for name, form in FORMATS.items():
        of_draws = [measured.of_weights(one, form) for one in drawn]
        weights = dict.fromkeys(weight for _, weight in of_draws[0])
        found[name] = {
            weight: float(
                np.mean([v for one in of_draws for (_, w), v in one.items() if w == weight])
            )
            for weight in weights
        }
    return found


def errors(family: str) -> dict[str, list[float]]:
    """Of every format: largest error of an operand, of a product and of one that gives a weight's
    gradient in dB, and of a share of zeros above one in a hundred, relative in percent, of
    gradients of queries and keys and of all else."""
    found, prediction = measured.operands(family), measured.predicted(family)
    drawn, every = means(family, SEEDS), measured.predicted(family, tokens=True)
    rows = {}
    for name, form in FORMATS.items():
        frame = prediction.low_precision(name).set_index(["weight", "product", "operand", "layer"])
        by_operand = measured.compared(found, frame, form)
        operand = product = 0.0
        zeros = {True: 0.0, False: 0.0}
        for where, lines in by_operand.items():
            snr, product_snr, zero, seen = np.mean(lines, axis=0)
            operand, product = max(operand, abs(snr)), max(product, abs(product_snr))
            if seen > 0.01:
                heavy = where[0] in ("query", "key") and where[2] == "gradient"
                zeros[heavy] = max(zeros[heavy], 100 * abs(zero / seen - 1))
        own = every.low_precision(name)
        own = own[own["product"] == "weight gradient"].groupby("weight")["product_snr"].mean()
        gradient = max(abs(own[weight] - value) for weight, value in drawn[name].items())
        rows[name] = [operand, product, gradient, zeros[False], zeros[True]]
        print(family, name, *(f"{value:.2f}" for value in rows[name]), flush=True)
    return rows


def table() -> None:
    """The largest of all families, each with its name."""
    warnings.simplefilter("ignore")
    base: dict[str, Any] = measured.CONFIGS["llama"]
    for family in LIKE_LLAMA:
        measured.CONFIGS[family] = base | {"model_type": family, "head_dim": 64}
        measured.PARAMETERS[family] = measured.PARAMETERS["llama"]
    measured.CONFIGS["opt"], measured.PARAMETERS["opt"] = OPT, OPT_PARAMETERS
    by_family = {family: errors(family) for family in measured.CONFIGS}
    body = []
    for name in FORMATS:
        cells = [name]
        for place in range(5):
            worst = max(by_family, key=lambda family: by_family[family][name][place])
            value = by_family[worst][name][place]
            digits = 2 if place < 3 else 0
            cells.append(f"{value:.{digits}f} ({worst})" if round(value, digits) else "0")
        body.append(cells)
    header = (
        "format",
        "operand, dB",
        "product, dB",
        "weight gradient, dB",
        "zeros, %",
        "of query and key, %",
    )
    tables.put("accuracy", "low-precision", tables.markdown(header, body, words=1))


def draws() -> None:
    """The numbers that tests/test_low_precision.py has."""
    warnings.simplefilter("ignore")
    for family in ("gpt2", "llama"):
        rounded = {
            name: {weight: round(value, 2) for weight, value in by_weight.items()}
            for name, by_weight in means(family, 12).items()
        }
        print(f"{family!r}: {rounded},")


if __name__ == "__main__":
    {"draws": draws}.get(sys.argv[-1], table)()
