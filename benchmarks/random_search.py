"""Random declarations: classes of positions against every token, and both against draws.

    python benchmarks/random_search.py --models 300               # closed forms alone
    python benchmarks/random_search.py --models 100 --simulate    # and against torch

Every field of `Transformer` is drawn, seeded by the model's number, so that `--first N --models 1`
is the N-th again. A model is an exception where a number leaves the bounds (`BOUNDS`; a simulated
one also twice its standard error on top) and no warning is given: those of predictions are what
users read, and what they name is no exception.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import moments

BOUNDS = {"variance": 0.03, "correlation": 0.01, "gradient": 0.05, "query": 0.1, "key": 0.1}
"""Largest error: relative, and absolute of a correlation."""

LEAST_MOVED = 1e-6
"""Squared gradient norms below this part of the largest are not compared: rounding of float32."""


class Case(NamedTuple):
    """One declaration and what enters it."""

    number: int
    model: moments.Transformer
    inputs: dict[str, Any]


class Miss(NamedTuple):
    """A number beyond its bound."""

    against: str
    name: str
    place: int
    found: float
    expected: float
    bound: float


# --- declarations ---------------------------------------------------------------------------------


def case(number: int) -> Case:
    """The declaration of that number; drawn again until the fields go together."""
    rng = np.random.default_rng(number)
    while True:
        try:
            return Case(number, *_drawn(rng))
        except moments.DomainError:
            continue


def _drawn(rng: np.random.Generator) -> tuple[moments.Transformer, dict[str, Any]]:
    def one(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    def at(chance: float, value: Callable[[], Any], otherwise: Any) -> Any:
        return value() if rng.random() < chance else otherwise

    def size(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    layers, heads, d_head = int(rng.integers(1, 5)), one(2, 4), one(32, 48)
    width, length = heads * d_head, int(rng.integers(12, 49))
    gated = rng.random() < 0.3
    d_ff = one(None, 2 * width, 3 * width)
    hidden = d_ff or 4 * width
    root = size(0.3, 6.0) ** 0.5 / width  # of queries and keys, by the logits' variance
    weights = moments.Weights(
        query=root,
        key=root,
        value=size(0.3, 2.0) / width,
        output=size(0.3, 2.0) / width,
        ffn_in=size(0.3, 2.0) / width,
        ffn_out=size(0.3, 2.0) / hidden,
        gate=size(0.3, 2.0) / width if gated else None,
        distribution=one("normal", "uniform"),
    )
    causal, parallel, identity = (rng.random() < chance for chance in (0.6, 0.15, 0.05))
    norm = one("pre", "pre", "post", "none", "sandwich", "mix", "hybrid", "b2t")
    if parallel:
        norm = one("pre", "pre", "none")
    positions = "none" if identity else one("none", "none", "rotary", "alibi", "bias")
    model = moments.Transformer(
        layers=layers,
        d_model=width,
        heads=heads,
        seq_len=length,
        d_ff=d_ff,
        norm=norm,
        normalization=one("layernorm", "rmsnorm", "layernorm", "rmsnorm", "dyt"),
        activation=one("relu", "gelu", "silu", "gelu_tanh", "relu"),
        dropout=at(0.2, lambda: 0.1, 0.0),
        attention_dropout=at(0.2, lambda: 0.1, None),
        causal=causal,
        skip_scale=at(0.2, lambda: size(0.7, 1.0), 1.0),
        branch_scale=at(0.3, lambda: size(0.2, 1.0), 1.0),
        layernorm_scaling=at(0.1, lambda: True, False),
        weights=weights,
        d_head=at(0.1, lambda: d_head // 2, None),
        kv_heads=at(0.3, lambda: heads // 2, None),
        temperature=at(0.2, lambda: size(0.8, 1.5), 1.0),
        norm_epsilon=at(0.2, lambda: 1e-5, 0.0),
        norm_affine=rng.random() < 0.3,
        norm_bias=rng.random() < 0.7,
        norm_gain=at(0.1, lambda: size(0.7, 1.3), 1.0),
        norm_groups=at(0.1, lambda: 2, 1),
        dyt_alpha=size(0.2, 1.0),
        post_layers=1 if norm == "mix" else 0,
        gated=gated,
        activation_dropout=at(0.1, lambda: 0.1, 0.0),
        ffn_dropout=at(0.1, lambda: 0.1, None),
        identity_attention=identity,
        biases=at(0.2, lambda: moments.Biases(**dict.fromkeys(_BIASES, size(0.01, 0.3))), None),
        parallel=parallel,
        parallel_norms=one(1, 2) if parallel else 1,
        rotary=moments.Rotary(fraction=one(1.0, 0.5)) if positions == "rotary" else None,
        alibi=positions == "alibi",
        relative_bias=moments.RelativeBias(0.01) if positions == "bias" else None,
        qk_norm=at(0.2, lambda: one("rmsnorm", "layernorm"), None),
        logit_softcap=at(0.2, lambda: size(2.0, 30.0), None),
        window=at(0.2, lambda: int(rng.integers(4, length)), None) if causal else None,
    )
    given = {
        "correlation": float(rng.choice([0.0, rng.uniform(0.0, 0.9)])),
        "grad_correlation": float(rng.choice([0.0, rng.uniform(0.0, 0.6)])),
    }
    return model, given


_BIASES = ("query", "key", "value", "output", "ffn_in", "ffn_out")


# --- comparison -----------------------------------------------------------------------------------


def numbers(result: Any) -> dict[tuple[str, int], tuple[float, float]]:
    """Value and standard error of everything compared, by name and place."""
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for name, field in (("variance",) * 2, ("correlation",) * 2, ("gradient", "grad_variance")):
        values = np.asarray(getattr(result, field))
        errors = np.asarray(getattr(result, f"{field}_stderr", np.zeros(len(values))))
        for place, (value, error) in enumerate(zip(values, errors, strict=True)):
            found[name, place] = float(value), float(error)
    table = result.weight_gradients()
    for row in table[table.weight.isin(["query", "key"])].itertuples():
        error = getattr(row, "squared_norm_stderr", 0.0)
        found[row.weight, row.layer] = float(row.squared_norm), float(error)
    return found


def misses(found: Any, expected: Any, against: str) -> Iterator[Miss]:
    """What of a result lies beyond its bound and twice its standard error."""
    ours, theirs = numbers(found), numbers(expected)
    moved = [value for (name, _), (value, _) in theirs.items() if name in ("query", "key")]
    least = LEAST_MOVED * max(moved, default=0.0)
    for (name, place), (value, error) in theirs.items():
        own = ours[name, place][0]
        if name in ("query", "key") and max(value, own) < least:
            continue
        size = 1.0 if name == "correlation" else abs(value)
        bound = BOUNDS[name] * size + 2.0 * error
        if not abs(own - value) <= bound:
            yield Miss(against, name, place, own, value, bound)


def judged(one: Case, simulate: bool, seeds: int = 40) -> tuple[list[Miss], tuple[str, ...]]:
    """What leaves the bounds, and the warnings of either prediction."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_classes = moments.predict(one.model, **one.inputs)
        by_token = moments.predict(one.model, tokens=True, **one.inputs)
        found = list(misses(by_classes, by_token, "by token"))
        if simulate:
            drawn = moments.simulate(one.model, seeds=seeds, batch=2, **one.inputs)
            found += misses(by_classes, drawn, "simulated")
            found += misses(by_token, drawn, "by token, simulated")
    return found, (*by_classes.warnings, *by_token.warnings)


def describe(one: Case) -> str:
    """The fields that differ from what they are by default, in short."""
    fields = {f.name: f for f in dataclasses.fields(one.model) if not f.name.startswith("_")}
    shown = []
    for name, field in fields.items():
        value = getattr(one.model, name)
        if value != field.default and name not in ("weights", "biases"):
            shown.append(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}")
    weights = one.model.weights
    if weights is not None:
        shown.append(f"logits={one.model.d_model**2 * weights.query * weights.key:.3g}")
    shown += [f"{name}={value:.2f}" for name, value in one.inputs.items()]
    return ", ".join(shown)


def main(arguments: list[str] | None = None) -> int:
    """Search, print every exception and the counts; the exit status is 1 where there are some."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=40, help="draws of a simulation")
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--minutes", type=float, default=np.inf, help="stop after so many")
    parser.add_argument("--all", action="store_true", help="print what a warning names, too")
    given = parser.parse_args(arguments)
    begun, counts = time.monotonic(), dict.fromkeys(("held", "named", "refused", "exceptions"), 0)
    for number in range(given.first, given.first + given.models):
        if time.monotonic() - begun > 60 * given.minutes:
            break
        one = case(number)
        try:
            found, notes = judged(one, given.simulate, given.seeds)
        except moments.MomentsError as error:  # numbers that overflow, say
            counts["refused"] += 1
            print(f"{number} refused: {describe(one)}: {error}")
            continue
        kind = "held" if not found else "named" if notes else "exceptions"
        counts[kind] += 1
        if kind == "exceptions" or (kind == "named" and given.all):
            print(f"{number} {kind}: {describe(one)}")
            for miss in found:
                size = miss.found / miss.expected - 1 if miss.expected else np.inf
                shown = f"{100 * size:+.1f} %" if miss.name != "correlation" else ""
                values = f"{miss.found:.4g} for {miss.expected:.4g}"
                print(f"    {miss.against}: {miss.name} {miss.place}: {values} {shown}")
            for note in notes[:3] if kind == "named" else ():
                print(f"    note: {note[:160]}")
            sys.stdout.flush()
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(counts["exceptions"] > 0)


if __name__ == "__main__":
    sys.exit(main())
