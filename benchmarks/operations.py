"""Every operation of a module: predicted, and measured on fresh draws of it.

    python benchmarks/operations.py run [NAME ...]   # prints and stores a row for each
    python benchmarks/operations.py cover [--types N]    # which types of transformers are followed
    python benchmarks/operations.py numbers          # gradients of lambdas, skip weights, ...
    python benchmarks/operations.py table            # writes what is stored into the page

What is measured replays the recorded pass on the parameters of other draws of the same module: the
mean square of every tensor, the mean correlation of two of its places, the mean square of its
gradient for an independent gradient of variance 1 at the output, and every parameter's squared
gradient. One draw of a narrow module scatters by 5 to 30 percent, so that errors are also given
beyond two standard errors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import multiprocessing
import random
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
import more_modules
import open_modules
import own_styles
import tables

from moments.errors import MomentsError
from moments.torch.dataflow.graph import Graph
from moments.torch.operations.laws import F64
from moments.torch.operations.lowering import Lowering
from moments.torch.operations.predict import lowered
from moments.torch.operations.sampling import again, by_label
from moments.torch.operations.variables import Field, Square

DATA = Path(__file__).parent / "data" / "operations.json"
DRAWS, TOKENS = 24, 16

OWN: dict[str, Callable[[int], Any]] = {
    "hourglass of skips, value tables": lambda seed: open_modules.Hourglass(),
    "experts, norms behind blocks": lambda seed: open_modules.Chosen(),
    "latent keys, convolution, gate": lambda seed: open_modules.Latent(),
}
STYLES = ("TitanGPT", "TuneGPT", "BareGPT", "GroupedGPT", "TorchLM", "EinsumLM")
OWN_LATER: dict[str, Callable[[int], Any]] = {
    "several streams": lambda seed: more_modules.Streams(),
    "lambdas, skip weights, shares": lambda seed: more_modules.Weighted(),
    "selective recurrence": lambda seed: more_modules.Recurrent(),
    "picture and captions": lambda seed: more_modules.Captions(),
} | {name: (lambda seed, name=name: getattr(own_styles, name)()) for name in STYLES}
SMALL = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 64, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
LATENT = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
}
LATENT |= {"v_head_dim": 32, "first_k_dense_replace": 1, "n_shared_experts": 1}
TYPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 64},
    "llama": {},
    "qwen3": {},
    "gemma2": {},
    "olmo2": {},
    "gpt_neox": {},
    "cohere2": {},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "olmoe": EXPERTS,
    "gpt_oss": EXPERTS,
    "deepseek_v3": EXPERTS | LATENT,
    "apertus": {},
    "nanochat": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bert": {},
}
PLAIN = (
    "qwen2 phi3 starcoder2 stablelm granite phi falcon gemma3_text glm4 exaone4 nemotron smollm3 "
    "electra arcee"
)
LATER: dict[str, dict[str, Any]] = {kind: {} for kind in PLAIN.split()}
WIDE = {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 256}
LATER |= {
    "bloom": {"hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "gptj": WIDE | {"rotary_dim": 16},
    "granitemoe": EXPERTS,
    "phimoe": EXPERTS,
    "minimax": EXPERTS,
    "deepseek_v2": EXPERTS | LATENT,
    "jamba": EXPERTS
    | {"mamba_d_state": 8, "mamba_dt_rank": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba": {"state_size": 8},
}
"""First run on 28 November 2026; faults that these showed were mended then."""

UNSEEN = "mistral gemma persimmon biogpt cohere glm bitnet seed_oss hunyuan_v1_dense"
NEVER: dict[str, dict[str, Any]] = {kind: {} for kind in UNSEEN.split()}
NEVER |= {"qwen2_moe": EXPERTS, "mpt": {"d_model": 128, "n_layers": 2, "n_heads": 4}}
"""Run once, after that."""

BARS = {
    "variances within 5 % beyond 2 s.e.": 98,
    "correlations within .03 beyond 2 s.e.": 98,
    "gradients within 10 % beyond 2 s.e.": 95,
    "weights within 10 % beyond 2 s.e.": 90,
}
"""Shares that are aimed at, in percent."""

GROUPS = {"": [*OWN, *TYPES], "later": [*OWN_LATER, *LATER], "held out": list(NEVER)}


def of_type(kind: str, entries: dict[str, Any]) -> Callable[[int], Any]:
    """A causal model of transformers, or one of masked tokens, small."""
    import transformers

    known = transformers.AutoConfig.for_model(kind).to_dict()
    given = {k: v for k, v in (SMALL | entries).items() if k in known or k in entries}
    if kind == "gpt2":
        given = entries
    config = transformers.AutoConfig.for_model(kind, **given)
    for name in ("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    causal = kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto = (
        transformers.AutoModelForCausalLM
        if causal and kind != "bert"
        else (transformers.AutoModelForMaskedLM)
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"
    return lambda seed: auto.from_config(config)


def measured(make: Callable[[int], Any], graph: Graph, low: Lowering, end: int) -> dict[str, Any]:
    """Mean squares, Gram matrices and correlations of places over fresh draws, by value; squared
    gradients by name."""
    named = {v.name: n for n, v in enumerate(graph.values) if v.producer is None and v.name}
    states = {
        n: s
        for n, s in low.states.items()
        if isinstance(s, Field) and n not in low.lost and graph.tensor(n).is_floating_point()
        if graph.tensor(n).numel() and bool(graph.tensor(n).isfinite().all())
    }
    views = _views(graph, states)
    squares: dict[int, list[float]] = {n: [] for n in states}
    grams: dict[int, Any] = dict.fromkeys(states, 0.0)
    apart: dict[int, list[float]] = {n: [] for n in states}
    gradients: dict[int, list[float]] = {n: [] for n in states}
    weights: dict[str, list[float]] = {}
    for draw in range(DRAWS):
        torch.manual_seed(100 + draw)
        fresh = make(draw).train()
        parameters = dict(fresh.named_parameters())
        values: dict[int, Any] = {named[k]: p for k, p in parameters.items() if k in named}
        with torch.enable_grad():
            for node in graph.nodes:
                again(graph, node, values, {})
                for output in node.outputs:
                    if output in states and values[output].requires_grad:
                        values[output].retain_grad()
            values[end].backward(torch.randn(values[end].shape))
        for n, s in states.items():
            v = s.variable
            sites = torch.unique(s.site)
            features, often = torch.unique(s.feature, return_counts=True)
            x = by_label(values[n].detach(), s.site, s.feature, v.sites, v.features)
            x = x[sites][:, features]
            gram = x * (often / often.sum()) @ x.T
            squares[n].append(float(values[n].detach().abs().to(F64).square().mean()))
            grams[n] = grams[n] + gram / DRAWS
            apart[n].append(float(gram.sum() - gram.diagonal().sum()))
            received = [g for m in views[n] if (g := values[m].grad) is not None]
            if received and s.site.numel() == len(sites) * len(features):
                gradients[n].append(float(sum(received).to(F64).square().mean()))
        for k, p in parameters.items():
            if p.grad is not None:
                weights.setdefault(k, []).append(float(p.grad.to(F64).square().sum()))
    noise = {
        n: float(np.std(apart[n], ddof=1)) / DRAWS**0.5 / max(float(gram.trace()), 1e-300)
        for n, gram in grams.items()
    }
    noise = {n: e / max(1, len(grams[n]) - 1) for n, e in noise.items()}
    of = {"squares": squares, "grams": grams, "gradients": gradients, "weights": weights}
    return of | {"correlation noise": noise}


def _views(graph: Graph, states: dict[int, Field]) -> dict[int, list[int]]:
    """By recorded tensor those with the same entries of which none was made of another, itself
    among them: a variable's gradient is the sum of what they receive, as of a slice that is taken
    twice."""
    groups: dict[int, list[int]] = {}
    for n, s in states.items():
        groups.setdefault(s.variable.number, []).append(n)
    alike = {}
    for n, s in states.items():
        others = [
            m
            for m in groups[s.variable.number]
            if m != n
            and torch.equal(states[m].site, s.site)
            and torch.equal(states[m].feature, s.feature)
            and not graph.depends_on(m, n)
            and not graph.depends_on(n, m)
        ]
        first = [m for m in others if not any(graph.depends_on(m, k) for k in others if k != m)]
        alike[n] = [n, *first]
    return alike


def study(make: Callable[[int], Any], batch: Any) -> dict[str, Any]:
    """Shares of what is predicted within its bounds."""
    torch.manual_seed(0)
    began = time.process_time()
    result = lowered(make(0), batch)
    graph, low, replicas, end = result.graph, result.lowering, result.replicas, result.end
    seconds = time.process_time() - began
    seen = measured(make, graph, low, end)
    forward, pairs, gradients, weights = [], [], [], []
    passed = low.sampler.passed()
    first: dict[int, int] = {}
    for n in sorted(seen["grams"]):
        first.setdefault(low.states[n].variable.number, n)
    worst: list[tuple[float, str]] = []
    for n, gram in seen["grams"].items():
        s, node = low.states[n], graph.producer(n)
        v, sites = s.variable, torch.unique(s.site)
        if isinstance(v, Square):  # which has a mean alone
            continue
        means, expected = low.laws.shown(s)
        expected = expected + means[:, None] * means[None]
        square = float(expected.diagonal()[s.site].mean())
        expected = expected[sites][:, sites]
        forward.append(_error(square, seen["squares"][n]))
        worst.append((forward[-1][0], f"{node.name if node else 'leaf'} {n}"))
        if len(sites) > 1 and s.site.numel() >= len(sites) * len(torch.unique(s.feature)):
            error = abs(_correlation(expected) - _correlation(gram))
            pairs.append((error, max(0.0, error - 2 * seen["correlation noise"][n])))
        crossed = replicas.known.get((v.number, v.number))
        if crossed is None or crossed.grad is None or first[v.number] != n or n in passed:
            continue
        if seen["gradients"][n]:
            mine = float(crossed.grad[sites][:, sites].diagonal().mean()) / v.features
            gradients.append(_error(mine, seen["gradients"][n]))
    for name, squares in seen["weights"].items():
        if name in result.left:
            continue
        weights.append(_error(result.weights.get(name, 0.0), squares))
    print("   largest:", sorted(worst, reverse=True)[:3], dict(low.unread))
    return {
        "operations": len(forward),
        "variances within 5 %": within(forward, 0.05),
        "variances within 5 % beyond 2 s.e.": within(forward, 0.05, 1),
        "correlations within .03": within(pairs, 0.03),
        "correlations within .03 beyond 2 s.e.": within(pairs, 0.03, 1),
        "gradients": len(gradients),
        "gradients within 10 %": within(gradients, 0.1),
        "gradients within 10 % beyond 2 s.e.": within(gradients, 0.1, 1),
        "weights": len(weights),
        "weights within 10 % beyond 2 s.e.": within(weights, 0.1, 1),
        "unread": sum(low.unread.values()),
        "seconds": round(seconds, 1),
    }


def _error(expected: float, seen: list[float]) -> tuple[float, float]:
    """Relative, and what of it is beyond two standard errors."""
    mean, noise = float(np.mean(seen)), float(np.std(seen, ddof=1)) / math.sqrt(len(seen))
    if mean < 1e-14:
        return (0.0, 0.0) if expected < 1e-12 else (math.inf, math.inf)
    return abs(expected / mean - 1), max(0.0, abs(expected - mean) - 2 * noise) / mean


def _correlation(gram: Any) -> float:
    own = float(gram.diagonal().mean())
    return (float(gram.mean()) * len(gram) - own) / max((len(gram) - 1) * own, 1e-300)


def within(errors: list[tuple[float, float]], bound: float, which: int = 0) -> int:
    """Share of relative errors (0), or of what of them is beyond two standard errors (1)."""
    return _share([error[which] <= bound for error in errors])


def _share(hits: list[bool]) -> int:
    return round(100 * sum(hits) / max(1, len(hits)))


def run(names: list[str]) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    ids = torch.randint(8, 120, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    stored = json.loads(DATA.read_text()) if DATA.exists() else {}
    own, types = OWN | OWN_LATER, TYPES | LATER | NEVER
    for name in names or [name for group in GROUPS.values() for name in group]:
        batch: Any = ids % own_styles.VOCAB if name in STYLES else ids
        if name == "picture and captions":
            batch = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)), ids
        group = next(group for group, members in GROUPS.items() if name in members)
        try:
            make = own[name] if name in own else of_type(name, types[name])
            batch = batch if name in own else {"input_ids": ids}
            stored[name] = {"group": group} | study(make, batch)
        except Exception as error:
            with contextlib.suppress(KeyError):
                del stored[name]
            print(f"{name}: {type(error).__name__}: {error}")
            continue
        print(name, stored[name], flush=True)
        DATA.write_text(json.dumps(stored, indent=1) + "\n")


# --- numbers that multiply a stream ---------------------------------------------------------------

NUMBERS, MANY = Path(__file__).parent / "data" / "operations_numbers.json", 400
"""One draw's squared gradient of a single number scatters by 140 percent: many are taken."""


def numbers() -> None:
    """Squared gradients of parameters that are used as numbers, predicted and measured."""
    ids = torch.randint(8, 120, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    rows = []
    for name in ("lambdas, skip weights, shares", "several streams"):
        make = OWN_LATER[name]
        torch.manual_seed(0)
        predicted = lowered(make(0), ids).scalars
        seen: dict[str, list[float]] = {parameter: [] for parameter in predicted}
        for draw in range(MANY):
            torch.manual_seed(5000 + draw)
            module = make(draw)
            output = module(ids)
            output.backward(torch.randn(output.shape))
            for parameter, entries in module.named_parameters():
                if parameter in seen and entries.grad is not None:
                    seen[parameter].append(float(entries.grad.to(F64).square().sum()))
        for parameter, squares in seen.items():
            mean, noise = np.mean(squares), np.std(squares, ddof=1) / len(squares) ** 0.5
            rows.append([name, parameter, predicted[parameter], float(mean), float(noise)])
            print(rows[-1], flush=True)
    NUMBERS.write_text(json.dumps(rows, indent=1) + "\n")


# --- which types are followed whole --------------------------------------------------------------

COVERED = Path(__file__).parent / "data" / "operations_cover.json"
SECONDS, MEMORY = 40, 4 << 30


def _followed(kind: str, sink: Any) -> None:
    """What becomes of one type, in a process of its own."""
    import board

    used = math.ceil(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, used + SECONDS))
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    try:
        module = board.built(kind)
    except Exception:
        return sink.send({"outcome": "not built"})
    try:
        done = lowered(module, None)
    except MomentsError as error:
        ran = "could not be run" not in str(error)
        return sink.send({"outcome": "refused" if ran else "not run", "why": str(error)[:120]})
    low = done.lowering
    why = "; ".join(f"{name}: {reason}" for name, reason in low.unread)[:120]
    return sink.send({"outcome": "in part" if low.unread else "whole", "why": why})


def cover(types: int) -> None:
    import board

    kinds = sorted(board.module_classes())
    random.Random(0).shuffle(kinds)
    board.built("gpt2")
    context = multiprocessing.get_context("fork")
    rows = {}
    for kind in kinds[:types]:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_followed, args=(kind, sender))
        child.start()
        sender.close()
        row = {"outcome": "no end"}
        with contextlib.suppress(EOFError):
            row = receiver.recv() if receiver.poll(3 * SECONDS) else row
        child.kill()
        child.join()
        rows[kind] = row
        print(kind, row, flush=True)
        COVERED.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    print(Counter(row["outcome"] for row in rows.values()))


def table() -> None:
    rows_of = json.loads(NUMBERS.read_text())
    ratios = [(predicted / mean, noise / mean) for *_, predicted, mean, noise in rows_of]
    beyond = sum(abs(ratio - 1) > 0.1 + 2 * noise for ratio, noise in ratios)
    tables.put(
        "theory/any-module",
        "numbers",
        f"{len(ratios)} parameters, predicted over measured {min(r for r, _ in ratios):.2f} to "
        f"{max(r for r, _ in ratios):.2f}, {np.mean([r for r, _ in ratios]):.3f} in the mean; "
        f"{beyond} more than 10 % and two standard errors off.",
        tables.markdown(
            ("module", "parameter", "predicted", "measured", "standard error"),
            [(m, p, *(float(f"{x:.3g}") for x in numbers)) for m, p, *numbers in rows_of],
        ),
    )
    stored = json.loads(DATA.read_text())
    columns = [c for c in next(iter(stored.values())) if c not in ("group", "unread")]
    body, totals = [], []
    for group, members in GROUPS.items():
        rows = {name: stored[name] for name in members if name in stored}
        title = f" ({group})" if group else ""
        body += [(name + title, *[row[c] for c in columns]) for name, row in rows.items()]
        totals.append(f"{group or 'first'}: {len(rows)} modules, " + _reached(rows))
    tables.put(
        "theory/any-module",
        "operations",
        "Modules that reach the bar: " + "; ".join(totals) + ".",
        tables.markdown(("module", *columns), body),
    )


def _reached(rows: dict[str, Any]) -> str:
    return ", ".join(
        f"{sum(row[what] >= bar for row in rows.values())} at {bar} % of {what.split(' within')[0]}"
        for what, bar in BARS.items()
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("names", nargs="*")
    commands.add_parser("cover").add_argument("--types", type=int, default=150)
    commands.add_parser("numbers")
    commands.add_parser("table")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.names)
    elif arguments.command == "numbers":
        numbers()
    elif arguments.command == "cover":
        cover(arguments.types)
    else:
        table()
