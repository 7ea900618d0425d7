"""Is `Prediction.sharpness` right? Lanczos' method on real modules beside it.

    python benchmarks/sharpness.py run [NAME ...]   # what benchmarks/data/sharpness.json lacks
    python benchmarks/sharpness.py table            # measured, and predicted by the code as it is

Modules are transformers' own at their own initialisation, on a text by Zipf's law; no dropout.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
import warnings
from pathlib import Path
from typing import Any

import learning_rate as rates
import numpy as np
import torch
from learning_rate import UNTIED, module

import moments
from moments.torch import measure_sharpness

DATA = Path(__file__).parent / "data" / "sharpness.json"
WORDS = 256
# draws of the weights, and how many where the standard error of those is beyond that share
SEEDS, MORE, LOOSE = 3, 10, 0.07


gpt2, llama, opt = (
    functools.partial(one, vocab_size=WORDS) for one in (rates.gpt2, rates.llama, rates.opt)
)
opt = functools.partial(opt, do_layer_norm_before=False)
# (config, sequences, tokens)
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "GPT-2, 4 x 64, untied": (gpt2(64, 4, 2, **UNTIED), 2, 64),
    "GPT-2, 4 x 128, untied": (gpt2(128, 4, 4, **UNTIED), 2, 64),
    "GPT-2, 4 x 256, untied": (gpt2(256, 4, 8, **UNTIED), 2, 64),
    "GPT-2, 12 x 64, untied": (gpt2(64, 12, 2, **UNTIED), 2, 64),
    "GPT-2, 4 x 128": (gpt2(128, 4, 4), 2, 64),
    "Llama, 4 x 128": (llama(128, 4, 4, **UNTIED), 2, 64),
    "Llama, 12 x 64": (llama(64, 12, 2, **UNTIED), 2, 64),
    "OPT Post-LN, 16 x 64": (opt(64, 16, 2), 2, 64),
    # chosen when the theory stood
    "GPT-2, 24 x 64, untied": (gpt2(64, 24, 2, **UNTIED), 2, 32),
    "GPT-2, 2 x 512": (gpt2(512, 2, 8), 2, 32),
    "GPT-2, 6 x 96, 4 sequences": (gpt2(96, 6, 3), 4, 32),
    "Llama, 2 x 256, grouped heads": (llama(256, 2, 8, num_key_value_heads=2, **UNTIED), 2, 48),
    "Llama, 8 x 96, tied": (llama(96, 8, 3, tie_word_embeddings=True), 4, 32),
    "OPT Post-LN, 6 x 128": (opt(128, 6, 4), 2, 48),
    "GPT-2, 4 x 128, weights of deviation .05": (gpt2(128, 4, 4, initializer_range=0.05), 2, 48),
}


def text(rows: int, tokens: int) -> np.ndarray:
    chance = 1 / np.arange(1, WORDS - 2)
    drawn = np.random.default_rng(3).choice(WORDS - 3, (rows, tokens), p=chance / chance.sum())
    return drawn + 3  # beyond special tokens


def measured(name: str, optimizer: str) -> dict[str, float]:
    config, rows, tokens = CASES[name]
    batch = {"input_ids": torch.as_tensor(text(rows, tokens))}
    for seeds in (SEEDS, MORE):
        seen = measure_sharpness(lambda seed: module(config, seed), batch, optimizer, seeds=seeds)
        if seen.largest_stderr < LOOSE * seen.largest:
            break
    names = ("largest", "least", "largest_stderr", "least_stderr")
    return {key: float(f"{getattr(seen, key):.4g}") for key in names}


def predicted(name: str, optimizer: str) -> Any:
    config, rows, tokens = CASES[name]
    model = moments.from_huggingface(config, seq_len=tokens)
    return moments.predict(model, token_ids=text(rows, tokens)).sharpness(optimizer)


def stored() -> dict[str, Any]:
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def run(names: list[str]) -> None:
    kept = stored()
    for name in names or CASES:
        for optimizer in ("adam", "sgd"):
            if f"{name}, {optimizer}" in kept and not names:
                continue
            start = time.perf_counter()
            kept[f"{name}, {optimizer}"] = measured(name, optimizer)
            DATA.write_text(json.dumps(kept, indent=1) + "\n")
            print(name, optimizer, f"{time.perf_counter() - start:.1f} s", flush=True)


def table() -> None:
    print("| module | optimizer | largest, measured | predicted | ratio | least, ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for key, seen in stored().items():
        name, _, optimizer = key.rpartition(", ")
        found = predicted(name, optimizer)
        most, size = seen["largest"], 100 * seen["largest_stderr"] / seen["largest"]
        print(
            f"| {name} | {optimizer} | {most:.4g} ± {size:.0f} % | {found.largest:.4g} | "
            f"{found.largest / most:.2f} | {found.least / seen['least']:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    warnings.simplefilter("ignore", moments.ValidityWarning)
    if given.command == "run":
        run(given.names)
    else:
        table()


if __name__ == "__main__":
    main()
