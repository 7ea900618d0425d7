"""Do models train at the rates that `moments.learning_rate` names? Real training beside it.

    python benchmarks/learning_rate.py run [NAME ...]   # what data/learning_rate.json lacks
    python benchmarks/learning_rate.py table            # measured and, by today's code, predicted

Modules are transformers' own at their own initialisation, without dropout, on the bytes of Python's
standard library. Three things are measured, on a grid of rates of steps of a factor sqrt 2:

    onset    Adam at a constant rate on one batch of 2 x 64 bytes for 25 steps: the first rate at
             which the loss rises above the least so far, by .01 (`onset`) and by .3 (`spike`), of
             four draws of the weights
    best     AdamW for 300 steps of 4 x 64 bytes: the mean loss of the last 30, at rates around the
             best and up to where it is a tenth above it: there training is damaged; `warm` the
             same behind a linear warm-up of 50 steps

The factors that `moments.learning_rate` puts between an eigenvalue and a rate come from the modules
of docs/theory/sharpness.md; none of these is among them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import sysconfig
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers

import moments

DATA = Path(__file__).parent / "data" / "learning_rate.json"
WORDS, TOKENS, BATCH, STEPS, WARM = 259, 64, 4, 300, 50
ROOT = math.sqrt(2.0)


def gpt2(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": TOKENS}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return {"model_type": "gpt2", "vocab_size": WORDS} | sizes | none | more


def llama(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": heads, "intermediate_size": 8 * (width // 3)}
    sizes |= {"vocab_size": WORDS, "max_position_embeddings": TOKENS, "pad_token_id": None}
    return {"model_type": "llama"} | sizes | more


def opt(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 4 * width}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": WORDS}
    none = {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": TOKENS}
    return {"model_type": "opt", "do_layer_norm_before": True} | sizes | none | more


def neox(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": WORDS}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "gpt_neox", "max_position_embeddings": TOKENS} | sizes | more


UNTIED, TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
CASES: dict[str, dict[str, Any]] = {
    "GPT-2, 6 x 96": gpt2(96, 6, 3),
    "GPT-2, 2 x 64, untied": gpt2(64, 2, 2, **UNTIED),
    "Llama, 4 x 64, untied": llama(64, 4, 2, **UNTIED),
    "Llama, 3 x 96, tied, grouped heads": llama(96, 3, 6, num_key_value_heads=2, **TIED),
    "OPT, 3 x 96": opt(96, 3, 3),
    "OPT Post-LN, 4 x 96": opt(96, 4, 3, do_layer_norm_before=False),
    "OPT Post-LN, 2 x 64": opt(64, 2, 2, do_layer_norm_before=False),
    "GPT-NeoX, 4 x 64": neox(64, 4, 2),
    "GPT-2, 4 x 64, weights of deviation .05": gpt2(64, 4, 2, initializer_range=0.05, **UNTIED),
    "GPT-2, 2 x 128": gpt2(128, 2, 4),
    "Llama, 6 x 64, untied, weights of deviation .04": llama(
        64, 6, 4, initializer_range=0.04, **UNTIED
    ),
}


# modules of docs/theory/sharpness.md, on which factors are fixed
FIXED: dict[str, dict[str, Any]] = {
    "GPT-2, 4 x 64, untied": gpt2(64, 4, 2, **UNTIED),
    "GPT-2, 4 x 128": gpt2(128, 4, 4),
    "Llama, 4 x 128": llama(128, 4, 4, **UNTIED),
    "GPT-2, 12 x 64, untied": gpt2(64, 12, 2, **UNTIED),
    "OPT Post-LN, 16 x 64": opt(64, 16, 2, do_layer_norm_before=False),
}


@functools.cache
def corpus() -> np.ndarray:
    """Bytes of the modules of Python's standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int64)


def batch(rng: np.random.Generator, rows: int) -> np.ndarray:
    text = corpus()
    starts = rng.integers(0, len(text) - TOKENS, rows)
    return np.stack([text[k : k + TOKENS] for k in starts]) + 3  # beyond special tokens


def module(config: dict[str, Any], seed: int) -> Any:
    given = {name: value for name, value in config.items() if name != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **given)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(made)


def losses(
    config: dict[str, Any],
    rate: float,
    steps: int,
    *,
    rows: int,
    same: bool,
    warm: int,
    seed: int,
    sgd: bool = False,
) -> list[float]:
    """Of every step, on one batch or on fresh ones."""
    made, rng = module(config, seed), np.random.default_rng(seed)
    kind = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = kind(made.parameters(), lr=rate, weight_decay=0.0 if sgd or same else 0.01)
    seen, ids = [], batch(rng, rows)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warm) if warm else rate
        given = torch.as_tensor(ids if same else batch(rng, rows))
        loss = made(input_ids=given, labels=given).loss
        seen.append(loss.item())
        if not math.isfinite(seen[-1]):
            return seen + [math.inf] * (steps - step - 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return seen


RISES = {"onset": 0.01, "spike": 0.3}


def onsets(config: dict[str, Any]) -> dict[str, list[int]]:
    """k of the first rates 1e-3 2^(k/2) at which the loss rises by so much, of four draws."""
    values: dict[str, list[int]] = {name: [] for name in RISES}
    for seed in range(4):
        k, largest = -6, 0.0
        while largest < max(RISES.values()) and k < 20:
            k += 1
            seen = losses(config, at(k), 25, rows=2, same=True, warm=0, seed=seed)
            rise = float(np.max(np.asarray(seen) - np.minimum.accumulate(seen)))
            for name, by in RISES.items():
                if largest <= by < rise:
                    values[name].append(k)
            largest = max(largest, rise)
    return values


def at(k: float) -> float:
    return 1e-3 * ROOT**k


def first_rise(row: dict[str, Any], name: str = "onset") -> float:
    """The geometric mean over draws, between the rate that rises and the one below."""
    return at(float(np.mean(row[name])) - 0.5)


def damaged(losses: dict[str, float], by: float = 0.1) -> float | None:
    """The first rate above the best one at which the loss is that much worse, between neighbours;
    None: none in the sweep."""
    places = sorted(map(int, losses))
    best = int(best_of(losses))
    worst = losses[str(best)] + by
    for low, high in itertools.pairwise(k for k in places if k >= best):
        if losses[str(high)] >= worst:
            return at(float(np.interp(worst, [losses[str(low)], losses[str(high)]], [low, high])))
    return None


def sweep(
    config: dict[str, Any],
    warm: int,
    start: int,
    stride: int = 1,
    sgd: bool = False,
    known: dict[str, float] | None = None,
) -> dict[str, float]:
    """Final losses by k, outwards from a start until both sides are worse twice and the upper one
    by a tenth; `known` are not trained again."""
    seen = {int(k): loss for k, loss in (known or {}).items()}

    def value(k: int) -> float:
        if k not in seen:
            curve = losses(config, at(k), STEPS, rows=BATCH, same=False, warm=warm, seed=0, sgd=sgd)
            seen[k] = round(min(float(np.mean(curve[-30:])), 99.0), 4)  # 99: not finite
        return seen[k]

    if not seen:
        value(start)
    while True:
        best = min(seen, key=lambda k: seen[k])
        wanted = [best + stride * j for j in (-1, 1, -2, 2) if best + stride * j not in seen]
        if not wanted and damaged({str(k): loss for k, loss in seen.items()}) is None:
            wanted = [max(seen) + stride]
        if not wanted:
            return {str(k): seen[k] for k in sorted(seen)}
        value(wanted[0])


def warmups(config: dict[str, Any], k: int) -> dict[str, float]:
    """Final losses at one rate by the length of its warm-up."""
    return {
        str(warm): round(float(np.mean(curve[-30:])), 4)
        for warm in (0, 3, 10, 30, 100)
        for curve in [losses(config, at(k), STEPS, rows=BATCH, same=False, warm=warm, seed=0)]
    }


BY_SGD = ("GPT-2, 4 x 64, untied", "GPT-2, 4 x 128", "Llama, 4 x 128", "GPT-2, 2 x 64, untied")
BY_SGD += ("Llama, 4 x 64, untied", "OPT, 3 x 96", "GPT-NeoX, 4 x 64")
WARMED = ("GPT-2, 4 x 64, untied", "GPT-2, 2 x 64, untied", "Llama, 4 x 64, untied", "OPT, 3 x 96")


def best_of(losses: dict[str, float]) -> str:
    return min(losses, key=lambda k: losses[k])


def stored() -> dict[str, Any]:
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def run(names: list[str]) -> None:
    for name in names or (CASES | FIXED):
        kept = stored()
        start, config = time.perf_counter(), (CASES | FIXED)[name]
        row: dict[str, Any] = {} if names else dict(kept.get(name, {}))
        if "onset" not in row:
            row |= onsets(config)
        row["best"] = sweep(config, 0, row["onset"][0] - 4, known=row.get("best"))
        best = int(best_of(row["best"]))
        if "warm" not in row:
            row["warm"] = sweep(config, WARM, best + 2, 2)
        if name in BY_SGD and "sgd" not in row:
            row["sgd"] = sweep(config, 0, 10, sgd=True)
        if name in WARMED and "warmups" not in row:
            row["warmups"] = warmups(config, best + 2)
        DATA.write_text(json.dumps(stored() | {name: row}, indent=1) + "\n")
        print(name, row, f"{time.perf_counter() - start:.0f} s", flush=True)


def predicted(name: str, optimizer: str = "adam") -> Any:
    """On the batches that onsets and sweeps begin with."""
    config = (CASES | FIXED)[name]
    model = moments.from_huggingface(config, seq_len=TOKENS)
    ids = batch(np.random.default_rng(0), BATCH)
    return moments.learning_rate(moments.predict(model, token_ids=ids), optimizer)


def steps_of(rate: float) -> float:
    """k of a rate."""
    return math.log(rate / 1e-3) / math.log(ROOT)


def excess(losses: dict[str, float], rate: float) -> float:
    """Of the loss at a rate over the best one, between neighbours on the grid."""
    places = sorted(map(int, losses))
    values = [losses[str(k)] for k in places]
    return float(np.interp(steps_of(rate), places, values)) - min(values)


def table() -> None:
    for kind, key in (("adam", "best"), ("sgd", "sgd")):
        print(f"\n{kind}\n| module | edge | onset | over predicted | spike | over edge | ", end="")
        print("damaged | over predicted | best | ", end="")
        print("best over edge | middle over best | loss there above the best | ", end="")
        print("damaged after warm-up | over predicted |")
        print("| --- " * 14 + "|")
        for name, row in stored().items():
            if key not in row:
                continue
            rates, best = predicted(name, kind), at(int(best_of(row[key])))
            middle = math.sqrt(math.prod(rates.range))
            rise, spike = (first_rise(row, of) if kind == "adam" else None for of in RISES)
            warm = damaged(row["warm"]) if kind == "adam" and "warm" in row else None
            print(
                f"| {name}{' (fixed)' if name in FIXED else ''} | {rates.edge:.2g} | "
                f"{over(rise, rates.onset)} | {over(spike, rates.edge)} | "
                f"{over(damaged(row[key]), rates.first_instability)} | {best:.2g} | "
                f"{best / rates.edge:.2f} | {middle / best:.2f} | {excess(row[key], middle):.3f} | "
                f"{over(warm, rates.first_instability_with_warmup)} |",
                flush=True,
            )


def over(measured: float | None, predicted: float | None) -> str:
    """Two cells: a rate, and that over the predicted one."""
    if measured is None or predicted is None:
        return f"{'' if measured is None else f'{measured:.2g}'} | "
    return f"{measured:.2g} | {measured / predicted:.2f}"


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
