"""What a prediction costs, against what one would do instead.

    python benchmarks/speed.py                 # measures and stores, about five minutes
    python benchmarks/speed.py --table         # what is stored, into docs/accuracy.md
    python benchmarks/speed.py --rival PYTHON  # measures neural-tangents alone, and stores its row

Processor seconds of one thread, the least of several runs, all in one run: ratios are what to
quote. A machine that others use makes all of them longer, ratios little. The module's eight seeds
are two measured, times four. Rivals that do not install or import are named with the reason:
`pip install --no-deps anyinit==0.4.0`. neural-tangents imports with older versions of jax than this
package's numpy allows, so another interpreter measures it, of an environment of its own with
`pip install neural-tangents==0.6.5 jax==0.4.30 jaxlib==0.4.30 "numpy<2" "scipy<1.14"`, and with
`--no-deps` behind that `tf2jax==0.3.6`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import tables

import moments

HERE = Path(__file__).parent
DATA = HERE / "data" / "speed.json"
ALIKE = moments.Transformer(24, 256, 4, 128, dropout=0.1)
CAUSAL = moments.Transformer(24, 256, 4, 256, dropout=0.1, causal=True)
COUNT = 10_000


WARM = 0.5
"""Processor seconds in which what is short is measured again and again: the interpreter adapts for
some ten passes, and what others do to the caches scatters."""


def seconds(work: Callable[[], Any], runs: int = 3) -> float:
    """Processor time, the least of some runs after one that fills tables, and of all that fit."""
    work()
    found: list[float] = []
    while len(found) < runs or sum(found) < WARM:
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


# --- the rivals -----------------------------------------------------------------------------------


def real_module(seeds: int = 8, measured: int = 2) -> float:
    """GPT-2 small, 2 texts of 128 tokens: its weights drawn, forward and backward, for `seeds`."""
    import torch

    from moments.torch.huggingface_modules import build_module, module_batch

    torch.set_num_threads(1)
    config = moments.preset.config("gpt2")
    read = module_batch(config, seq_len=128, batch=2)
    batch = {name: torch.as_tensor(np.asarray(value)) for name, value in read.items()}
    batch.setdefault("labels", batch["input_ids"])
    start = time.process_time()
    for seed in range(measured):
        module = build_module(config, seed)
        module.train()
        module(**batch).loss.backward()
    return (time.process_time() - start) * seeds / measured


def by_hand(model: moments.Transformer) -> tuple[np.ndarray, ...]:
    """Kedia et al.'s Table 2 for a Pre-LN stack, as one would type it: variances and covariances of
    stream and gradient with arrays of no axes."""
    weights, d, f = model.layer_weights(1), model.d_model, model.d_ff
    kept, n = 1 - model.dropout, model.layers
    attention, hidden = (
        d * d * weights.output * weights.value,
        d * f * weights.ffn_in * weights.ffn_out,
    )
    v, c = np.zeros(n + 1), np.zeros(n + 1)
    slopes, norms = [], []
    v[0], c[0] = 1.0, 0.2
    for i in range(n):
        own, pair = v[i], c[i]
        norms.append(own)
        r = pair / own
        own, pair = own + attention * r / kept, pair + attention * r
        norms.append(own)
        r = pair / own
        slopes.append(0.25 + np.arcsin(r) / (2 * np.pi))
        polynomial = 1 / np.pi + r / 2 + (0.5 - 1 / np.pi) * r**2
        v[i + 1], c[i + 1] = own + hidden / 2 / kept, pair + hidden / 2 * polynomial
    g, h = np.zeros(n + 1), np.zeros(n + 1)
    g[n], h[n] = 1.0, 0.2
    for i in range(n - 1, -1, -1):
        own, pair, norm = g[i + 1], h[i + 1], norms[2 * i + 1]
        own, pair = own + hidden / 2 / kept * own / norm, pair + hidden * slopes[i] * pair / norm
        norm = norms[2 * i]
        own, pair = own + attention * pair / kept / norm, pair + attention * pair / norm
        g[i], h[i] = own, pair
    return v, c / v, g, h / g


def anyinit() -> tuple[float | None, str]:
    """Its analytic report of twelve layers, which draws weights and measures forward, too."""
    import torch

    try:
        rival = importlib.import_module("anyinit")
    except ImportError as error:
        return None, f"anyinit: {error}"
    torch.set_num_threads(1)
    layer = torch.nn.TransformerEncoderLayer(
        256, 4, 1024, activation="gelu", batch_first=True, norm_first=True
    )
    module = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    time_of = seconds(lambda: rival.initialize(module, "analytic", (2, 128, 256)), 1)
    return time_of, f"anyinit {importlib.metadata.version('anyinit')}"


NEURAL_TANGENTS = """
import functools, importlib.metadata, json, time
import jax, numpy
jax.config.update("jax_enable_x64", True)
from neural_tangents import stax

def residual(*branch):
    branch = stax.serial(*branch)
    return stax.serial(stax.FanOut(2), stax.parallel(branch, stax.Identity()), stax.FanInSum())

def layer():
    heads = stax.GlobalSelfAttention(n_chan_out=256, n_chan_key=256, n_chan_val=256, n_heads=4)
    ffn = stax.Dense(1024), stax.Relu(), stax.Dense(256)
    return residual(stax.LayerNorm(axis=-1), heads), residual(stax.LayerNorm(axis=-1), *ffn)

parts = [part for _ in range(12) for part in layer()]
kernel = stax.serial(stax.Dense(256), *parts)[2]
x = numpy.random.default_rng(0).standard_normal((2, 128, 256))
compiled = jax.jit(functools.partial(kernel, x2=None, get="nngp"))
found = []
for _ in range(4):
    start = time.process_time()
    numpy.asarray(compiled(x))
    found.append(time.process_time() - start)
names = "neural-tangents", "jax", "numpy"
versions = {name: importlib.metadata.version(name) for name in names}
print(json.dumps({"seconds": min(found[1:]), "compiling": found[0], "versions": versions}))
"""


def neural_tangents(python: str) -> tuple[dict[str, Any] | None, str]:
    """The kernel of all pairs of tokens of 2 x 128, 12 Pre-LN layers of width 256, forward only:
    it has no gradients by layer, no causal mask, and weighs by a softmax of the mean logits."""
    alone = dict(os.environ, XLA_FLAGS="--xla_cpu_multi_thread_eigen=false")
    alone.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, "-c", NEURAL_TANGENTS], capture_output=True, text=True, env=alone, check=False
    )
    if done.returncode:
        return None, f"neural-tangents: {(done.stderr.strip() or 'no answer').splitlines()[-1]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return found, versions


def against_neural_tangents(python: str) -> tuple[dict[str, Any], str]:
    """Its rows: against tokens alike, what its input is on average, and against every token by
    itself, both ways."""
    rival, said = neural_tangents(python)
    if rival is None:
        return {}, said
    model = moments.Transformer(12, 256, 4, 128)
    found = {}
    for what, given in (("tokens alike", {}), ("tokens one by one", {"tokens": True})):
        ours = seconds(lambda given=given: moments.predict(model, correlation=0.2, **given), 2)
        name = f"neural-tangents' kernel, 12 layers (forward), against {what}"
        found[name] = {
            "rival": rival["seconds"],
            "ours": ours,
            "what": f"predict, {what}, both ways",
            "times": rival["seconds"] / ours,
        }
    return found, f"{said}; compiling its kernel took {rival['compiling']:.1f} s more"


def shell(*options: str) -> float:
    """`moments predict gpt2` from a shell, the interpreter's own start included, of modules that
    were compiled before, as installed ones are. `--json` computes the band as well, which the table
    on a screen does not print."""
    found = []
    command = [sys.executable, "-m", "moments", "predict", "gpt2", *options]
    with tempfile.TemporaryDirectory() as folder:
        there = dict(os.environ, PYTHONPYCACHEPREFIX=folder)
        there.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(4):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, capture_output=True, env=there)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(found)


PEAK = """
import tracemalloc, warnings
import moments
warnings.simplefilter("ignore")
model = moments.preset({name!r})
model = model.replace(seq_len={length})
moments.predict(moments.preset("bert-tiny"))
tracemalloc.start()
moments.predict(model)
print(tracemalloc.get_traced_memory()[1])
"""


def megabytes(name: str, length: int) -> float:
    """The most that Python and numpy hold at once while a process that has made a small prediction
    makes that of a preset, its tables and counts of positions included. The resident size would not
    do: what importing took and gave back hides it."""
    command = [sys.executable, "-c", PEAK.format(name=name, length=length)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout) / 2**20


# --- measuring ------------------------------------------------------------------------------------


def measured() -> dict[str, Any]:
    def predicting(model: moments.Transformer, runs: int = 3, **given: Any) -> float:
        return seconds(lambda: moments.predict(model, **given), runs)

    gpt2, llama = moments.preset("gpt2", seq_len=128), moments.preset("llama-3-8b", seq_len=8192)
    ids = np.random.default_rng(0).zipf(1.3, (2, 128)) % gpt2.embedding.vocab_size
    deepest, strong = ALIKE.replace(layers=1000), ALIKE.replace(temperature=0.3)
    found: dict[str, Any] = {"machine": machine()}
    table = {
        "GPT-2 preset, 128 tokens, no text": predicting(gpt2),
        "GPT-2 preset, 128 tokens of text": predicting(gpt2, token_ids=ids[:1]),
        "GPT-2 preset, 2 x 128 tokens of text": predicting(gpt2, token_ids=ids),
        "GPT-2 preset, 1024 tokens, no text": predicting(moments.preset("gpt2")),
        "Llama-3-8B, 32 layers, 8192 tokens": predicting(llama),
        "24 causal layers, 256 tokens": predicting(CAUSAL),
        "192 layers, tokens alike": predicting(ALIKE.replace(layers=192)),
        "24 layers, tokens alike, logit variances 12 to 23": predicting(strong, correlation=0.2),
        "1000-layer solve (dslm)": seconds(lambda: moments.solve(deepest, "dslm", correlation=0.2)),
        "1000-layer solve (block_variance)": seconds(
            lambda: moments.solve(deepest, "block_variance", correlation=0.2)
        ),
        "moments predict gpt2, shell": shell(),
        "moments predict gpt2 --json (with the band), shell": shell("--json"),
    }
    memory = {
        "GPT-2 preset, 1024 tokens": megabytes("gpt2", 1024),
        "Llama-3-8B, 8192 tokens": megabytes("llama-3-8b", 8192),
    }
    note("table done")
    cost = predicting(ALIKE, correlation=np.linspace(0.0, 0.9, COUNT))
    table["10,000 configurations x 24 layers"] = cost
    found["million configuration-layers a second"] = COUNT * ALIKE.layers / cost / 1e6
    deep = ALIKE.replace(layers=12, embedding=None)
    hand = by_hand(deep)
    p = moments.predict(deep, theory="simplified", correlation=0.2, grad_correlation=0.2)
    names = ("variance", "correlation", "grad_variance", "grad_correlation")
    off = max(float(np.max(np.abs(getattr(p, n) - h))) for n, h in zip(names, hand, strict=True))
    if off > 1e-9:
        raise SystemExit(f"the formulas by hand differ from the package's by {off:.2g}")
    encoder = moments.Transformer(12, 256, 4, 128, activation="gelu")
    rivals: dict[str, Any] = {
        "Table 2 by hand in numpy, 12 layers": (
            seconds(lambda: by_hand(deep)),
            predicting(deep, theory="simplified", correlation=0.2),
            'predict, theory="simplified"',
        ),
        "the same, against the refined theory": (
            seconds(lambda: by_hand(deep)),
            predicting(deep, correlation=0.2),
            "predict, refined",
        ),
    }
    unavailable = []
    cost_of, said = anyinit()
    if cost_of is None:
        unavailable.append(said)
    else:
        rivals[f"AnyInit's analytic report, 12 layers (forward): {said}"] = (
            cost_of,
            predicting(encoder),
            "predict, refined, both ways",
        )
    note("rivals done")
    rivals["real GPT-2, 8 seeds, 2 x 128 tokens, both ways"] = (
        real_module(),
        table["GPT-2 preset, 128 tokens, no text"],
        "predict, classes of positions",
    )
    rivals["the same, against a prediction of the text itself"] = (
        rivals["real GPT-2, 8 seeds, 2 x 128 tokens, both ways"][0],
        table["GPT-2 preset, 2 x 128 tokens of text"],
        "predict, token_ids, classes of positions",
    )
    rivals["and of one text of 128 tokens"] = (
        rivals["real GPT-2, 8 seeds, 2 x 128 tokens, both ways"][0] / 2,
        table["GPT-2 preset, 128 tokens of text"],
        "predict, token_ids, classes of positions",
    )
    return found | {
        "seconds": table,
        "megabytes": memory,
        "rivals": {
            name: {"rival": cost_of, "ours": ours, "what": what, "times": cost_of / ours}
            for name, (cost_of, ours, what) in rivals.items()
        },
        "unavailable": unavailable,
    }


def machine() -> dict[str, str]:
    versions = {n: importlib.metadata.version(n) for n in ("numpy", "scipy", "torch")}
    try:
        cpu = next(
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        )
    except (OSError, StopIteration):
        cpu = platform.processor()
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return {"cpu": cpu, "python": platform.python_version(), "load at the start": load} | versions


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- showing --------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> None:
    """Into docs/accuracy.md."""
    rows = [(name, f"{cost:.2g}") for name, cost in found["seconds"].items()]
    rows += [(f"{name}, megabytes", f"{size:.2g}") for name, size in found["megabytes"].items()]
    beside = found.get("neural-tangents", {"rivals": {}, "said": ""})
    rivals = [
        (name, f"{one['rival']:.2g}", one["what"], f"{one['ours']:.2g}", f"{one['times']:.2g}")
        for name, one in (found["rivals"] | beside["rivals"]).items()
    ]
    said = [f"Not compared: {reason}." for reason in found["unavailable"]]
    said += [beside["said"]] if beside["said"] else []
    tables.put(
        "accuracy",
        "cost",
        tables.markdown(("", "seconds"), rows),
        tables.markdown(("instead", "seconds", "here", "seconds", "times"), rivals),
        "; ".join([*said, ", ".join(f"{k} {v}" for k, v in found["machine"].items())]) + ".",
        dated=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="write what is stored into the docs")
    parser.add_argument("--rival", metavar="PYTHON", help="an interpreter with neural-tangents")
    options = parser.parse_args()
    warnings.simplefilter("ignore", moments.ValidityWarning)
    if options.rival:
        found = json.loads(DATA.read_text(encoding="utf-8"))
        rows, said = against_neural_tangents(options.rival)
        found["neural-tangents"] = {"rivals": rows, "said": said, "machine": machine()}
        DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    elif not options.table:
        before = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
        kept = {name: before[name] for name in ("neural-tangents",) if name in before}
        DATA.write_text(json.dumps(measured() | kept, indent=1) + "\n", encoding="utf-8")
    table(json.loads(DATA.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
