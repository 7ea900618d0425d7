"""Real modules of every family on real text, measured and predicted.

For each family at 6 and 24 layers: transformers' own module with its own initialisation reads
English text (pictures of natural spectrum for ViT) and computes its own training loss; the same
config is declared by `moments.from_huggingface` and predicted on the same tokens. Nothing is passed
from one to the other but the config, the tokens and the targets.

    python benchmarks/real_modules.py measure --seeds 16 --kinds gpt2 llama   # continues
    python benchmarks/real_modules.py table                                  # predicts and prints

Measurements lie in benchmarks/data/real_modules, one file per case, and are continued by batches of
seeds: a case that has enough is skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import moments
from moments.families import FAMILIES
from moments.families.sizes import sized_config
from moments.measurement import Measurement

DATA = Path(__file__).parent / "data" / "real_modules"
DEPTHS = (6, 24)
D_MODEL, HEADS, VOCAB, SEQ_LEN, BATCH = 128, 4, 2000, 64, 2
CHUNK = 4
QUANTITIES = ("variance", "correlation", "grad_variance")


def config_of(kind: str, layers: int) -> dict[str, Any]:
    """The case's config; everything but its size is the family's own."""
    return sized_config(kind, layers, D_MODEL, heads=HEADS, vocab_size=VOCAB, seq_len=SEQ_LEN + 4)


def batch_of(kind: str, layers: int) -> dict[str, Any]:
    """What the module reads, the same in every draw."""
    from moments.huggingface_modules import module_batch

    return module_batch(config_of(kind, layers), seq_len=SEQ_LEN, batch=BATCH, seed=0)


def measure_case(kind: str, layers: int, seeds: int) -> None:
    """Bring a case's file to at least that many seeds."""
    import torch
    import transformers

    from moments.huggingface_modules import build_module
    from moments.torch import measure

    transformers.logging.set_verbosity_error()
    file = DATA / f"{kind}-{layers}.json"
    stored = json.loads(file.read_text()) if file.exists() else {"chunks": []}
    data, config = batch_of(kind, layers), config_of(kind, layers)
    while (done := CHUNK * len(stored["chunks"])) < seeds:
        start = time.perf_counter()
        found = measure(
            lambda seed: build_module(config, seed), data, seeds=CHUNK, seed=1000 + done
        )
        stored["chunks"].append(slim(found))
        stored |= {"config": config, "seq_len": SEQ_LEN, "batch": BATCH}
        stored["machine"] = f"{platform.machine()}, torch {torch.__version__}, transformers " + (
            transformers.__version__
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(stored))
        print(f"{kind} {layers}: {done + CHUNK} seeds, {time.perf_counter() - start:.0f} s")


def slim(m: Measurement) -> dict[str, Any]:
    """What the table needs of a chunk of draws: means, and the spread of the draws."""

    def rounded(values: Any) -> list[float]:
        return [float(f"{v:.6g}") for v in np.ravel(values)]

    data: dict[str, Any] = {name: rounded(m.samples[name]) for name in QUANTITIES}
    data["weights"] = {
        f"{row['layer']} {row['weight']}": rounded(
            [row["squared_norm"], row["squared_norm_stderr"]]
        )
        for row in m.weight_gradient_rows
    }
    data["loss"] = rounded([m.loss, m.loss_stderr])
    data["logit_variance"] = rounded([m.logit_variance, m.logit_variance_stderr])
    data["encoder"] = None if m.encoder is None else slim_encoder(m.encoder, rounded)
    return data


def slim_encoder(m: Measurement, rounded: Any) -> dict[str, Any]:
    """Of the other stack: stream and weights."""
    weights = {
        f"{row['layer']} {row['weight']}": rounded(
            [row["squared_norm"], row["squared_norm_stderr"]]
        )
        for row in m.weight_gradient_rows
    }
    return {name: rounded(m.samples[name]) for name in QUANTITIES} | {"weights": weights}


def pooled(pairs: list[list[float]]) -> tuple[float, float]:
    """Mean and standard error over chunks of CHUNK draws, from those of each chunk."""
    means, errors = np.array(pairs, dtype=float).T
    count = len(means) * CHUNK
    within = CHUNK * (CHUNK - 1) * (errors**2).sum()
    between = CHUNK * ((means - means.mean()) ** 2).sum()
    return float(means.mean()), math.sqrt((within + between) / (count - 1) / count)


def predict_case(kind: str, layers: int) -> moments.Prediction:
    """The config declared and predicted on the same tokens."""
    config, data = config_of(kind, layers), batch_of(kind, layers)
    task = FAMILIES[kind].task
    model = moments.from_huggingface(config, seq_len=None if task == "images" else SEQ_LEN)
    if task == "images":
        return moments.predict(model, pixels=data["pixel_values"], targets=data["labels"])
    if task == "translation":
        shifted = np.pad(data["labels"][:, :-1], ((0, 0), (1, 0)))
        read = {"token_ids": data["input_ids"]}
        return moments.predict(
            model, token_ids=shifted, targets=data["labels"], encoder_inputs=read
        )
    given = {} if task == "causal" else {"targets": data["labels"]}
    return moments.predict(model, token_ids=data["input_ids"], tokens=True, **given)


def compare_case(kind: str, layers: int) -> dict[str, Any]:
    """Errors of one case, each with the Monte-Carlo error of what it is held against."""
    stored = json.loads((DATA / f"{kind}-{layers}.json").read_text())
    chunks = stored["chunks"]
    seeds = CHUNK * len(chunks)
    start = time.perf_counter()
    p = predict_case(kind, layers)
    row: dict[str, Any] = {"seeds": seeds, "seconds": time.perf_counter() - start}
    scores: list[float] = []
    for name in QUANTITIES:
        samples = np.concatenate([np.reshape(c[name], (CHUNK, -1)) for c in chunks])
        mean, error = samples.mean(0), samples.std(0, ddof=1) / math.sqrt(seeds)
        gap = np.asarray(getattr(p, name)) - mean
        scale = np.ones_like(mean) if name == "correlation" else mean
        row[name] = (np.abs(gap / scale).mean(), np.abs(gap / scale).max())
        row[f"{name}_noise"] = float((error / scale).mean())
        scores += list(
            np.abs(gap[error > 1e-9 * np.abs(mean)] / error[error > 1e-9 * np.abs(mean)])
        )
    for name in ("loss", "logit_variance"):
        row[name] = (*pooled([c[name] for c in chunks]), float(getattr(p, name)))
    rows, encoders = weight_rows(p), [c["encoder"] for c in chunks if c["encoder"]]
    measured = {k: pooled([c["weights"][k] for c in chunks]) for k in chunks[0]["weights"]}
    if encoders and p.encoder is not None:
        read = weight_rows(p.encoder)
        # One table for both stacks: what reaches it from either is taken as independent.
        rows["0 token"] += read.pop("0 token", 0.0)
        rows |= {f"encoder {k}": v for k, v in read.items()}
        measured |= {
            f"encoder {k}": pooled([c["weights"][k] for c in encoders])
            for k in encoders[0]["weights"]
        }
    row["weights"] = by_name(rows, measured, scores)
    row["missing"] = sorted({k.rpartition(" ")[2] for k in measured if k not in rows})
    known = [k for k in measured if k in rows]
    row["total"] = sum(rows[k] for k in known) / sum(m for m, _ in measured.values()) - 1
    row["beyond"] = float(np.mean(np.array(scores) > 2))
    row["warnings"] = list(p.warnings)
    return row


def weight_rows(p: Any) -> dict[str, float]:
    return {
        f"{row.layer} {row.weight}": float(row.squared_norm)
        for row in p.weight_gradients().itertuples()
    }


def by_name(
    rows: dict[str, float], measured: dict[str, tuple[float, float]], scores: list[float]
) -> dict[str, tuple[float, float]]:
    """Relative error of every weight's norm, summed over its layers, with its standard error.

    Draws of one seed are shared by the layers, so that the errors of a sum are added up plainly: an
    upper bound.
    """
    found: dict[str, list[tuple[float, float, float]]] = {}
    for key, (mean, error) in measured.items():
        if key not in rows or mean < 1e-12:
            continue
        stack = "encoder." if key.startswith("encoder ") else ""
        found.setdefault(stack + key.rpartition(" ")[2], []).append((rows[key], mean, error))
        if error > 0:
            scores.append(abs(rows[key] - mean) / error)
    sums = {name: np.array(values).sum(0) for name, values in found.items()}
    return {name: (float(a / b - 1), float(c / b)) for name, (a, b, c) in sums.items()}


def cases(kinds: list[str], depths: list[int]) -> Iterator[tuple[str, int]]:
    for layers in depths:
        for kind in kinds or sorted(FAMILIES):
            yield kind, layers


def table(kinds: list[str], depths: list[int]) -> None:
    """Every stored case on one line, then every weight of it."""
    columns = "variance    correlation  gradient    noise  loss: measured    predicted"
    print(f"{'family':<14}{'N':>3} {'seeds':>5}  {columns:<66} total  beyond 2 s.e.")
    details = []
    for kind, layers in cases(kinds, depths):
        if not (DATA / f"{kind}-{layers}.json").exists():
            continue
        row = compare_case(kind, layers)
        errors = "  ".join(f"{row[q][0]:.3f}/{row[q][1]:.3f}" for q in QUANTITIES)
        loss, error, predicted = row["loss"]
        print(
            f"{kind:<14}{layers:>3} {row['seeds']:>5}  {errors}  {row['grad_variance_noise']:.3f}  "
            f"{loss:.4f}({error:.4f}) {predicted:.4f}   {row['total']:+.3f}  {row['beyond']:.2f}",
            flush=True,
        )
        details.append((kind, layers, row))
    for kind, layers, row in details:
        weights = ", ".join(f"{k} {v:+.3f}({e:.3f})" for k, (v, e) in row["weights"].items())
        missing = f"; not predicted: {', '.join(row['missing'])}" if row["missing"] else ""
        _, _, predicted = row["logit_variance"]
        logits = f"logits {row['logit_variance'][0]:.4g} {predicted:.4g}"
        print(f"\n{kind} {layers} ({row['seconds']:.1f} s): {logits}; {weights}{missing}")
        for note in row["warnings"]:
            print(f"    {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("measure", "table"))
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--layers", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--seeds", type=int, default=8)
    given = parser.parse_args()
    if given.action == "measure":
        for kind, layers in cases(given.kinds, given.layers):
            measure_case(kind, layers, given.seeds)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        table(given.kinds, given.layers)


if __name__ == "__main__":
    main()
