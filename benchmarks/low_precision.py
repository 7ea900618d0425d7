"""What few bits lose of the matrix products of real modules: predicted, and cast bit by bit.

    python benchmarks/low_precision.py table    # predicts, casts and writes docs/accuracy.md

Ten families of transformers at width 256, 3 layers, 2 x 64 tokens, one draw; means over layers.
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


def errors(family: str) -> list[list[str]]:
    """Of every format: largest error of an operand and of a product in dB, and of a share of zeros
    above one in a hundred, relative, of gradients of queries and keys and of all else."""
    found, prediction = measured.operands(family)
    rows = []
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
                zeros[heavy] = max(zeros[heavy], abs(zero / seen - 1))
        shares = [f"{100 * zeros[heavy]:.0f}" for heavy in (False, True)]
        rows.append([family, name, f"{operand:.2f}", f"{product:.2f}", *shares])
    return rows


def table() -> None:
    warnings.simplefilter("ignore")
    base: dict[str, Any] = measured.CONFIGS["llama"]
    for family in LIKE_LLAMA:
        measured.CONFIGS[family] = base | {"model_type": family, "head_dim": 64}
        measured.PARAMETERS[family] = measured.PARAMETERS["llama"]
    measured.CONFIGS["opt"], measured.PARAMETERS["opt"] = OPT, OPT_PARAMETERS
    body = [row for family in measured.CONFIGS for row in errors(family)]
    header = ("family", "format", "operand, dB", "product, dB", "zeros, %", "of query and key, %")
    tables.put("accuracy", "low-precision", tables.markdown(header, body, words=2))


if __name__ == "__main__":
    table()
