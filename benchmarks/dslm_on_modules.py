"""DeepScaleLM on real modules: solved, written into them, and measured on real text.

For every family a module of transformers (or of torch itself) is given the scheme by
`moments.torch.initialize`, audited, and run on English text (pictures for ViT) with its own
training loss. It is compared with `moments.predict` of the plan on the same tokens.

    python benchmarks/dslm_on_modules.py measure [--kinds gpt2 ...] [--layers 12 48] [--seeds 8]
    python benchmarks/dslm_on_modules.py paper     # the paper's own settings
    python benchmarks/dslm_on_modules.py show      # every case against today's prediction
    python benchmarks/dslm_on_modules.py table     # into docs/accuracy.md, minutes

The first two run what data/dslm_on_modules.npz lacks, draws included, and store it case by case:
every draw, at up to 13 places of the stream.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import records
import tables

import moments
from moments.model.huggingface import FAMILIES
from moments.model.huggingface.sizes import sized_config

NAME = "dslm_on_modules"
RELEASED = "released constants"
"""Ends the name of a case that has the authors' constants and not the solved blocks."""

FAMILY_KINDS = (
    "bert", "roberta", "distilbert", "gpt2", "opt", "gpt_neox", "gptj", "llama", "mistral", "qwen2",
    "qwen3", "gemma", "gemma2", "phi", "t5", "vit",
)  # fmt: skip
TORCH_KINDS = (
    "nn.TransformerEncoder, Pre-LN",
    "nn.TransformerEncoder, Post-LN",
    f"nn.TransformerEncoder, Pre-LN, {RELEASED}",
    f"nn.TransformerEncoder, Post-LN, {RELEASED}",
    "nn.TransformerDecoder, Pre-LN",
    "nn.TransformerDecoder, Post-LN",
)
KINDS = (*FAMILY_KINDS, *TORCH_KINDS)
DEPTHS = (12, 48)
D_MODEL, HEADS, VOCAB, SEQ_LEN = 128, 4, 2000, 64
DROPOUTS = ("config", "0")
SPEECH = {"variance": 2.2, "correlation": 0.29}
IMAGE_CORRELATION = 0.46
TEXT_CORRELATION = 0.25
MOST_PLACES = 13

Run = dict[str, Any]


class Case(NamedTuple):
    """One module to be: what is solved, what it is solved and predicted on, and how to run it.

    Attributes:
        model: the declaration, before the scheme.
        inputs: of `solve` and `predict`.
        targets: what only `predict` reads.
        build: a module of a seed.
        batch: what it reads, of a seed.
        options: of the scheme.
    """

    model: moments.Transformer
    inputs: dict[str, Any]
    targets: dict[str, Any]
    build: Callable[[int], Any]
    batch: Callable[[int], dict[str, Any]]
    options: Mapping[str, Any] = MappingProxyType({})


# --- families of transformers ---------------------------------------------------------------------


def family_case(
    kind: str, layers: int, dropout: str, d_model: int = D_MODEL, seq_len: int = SEQ_LEN
) -> Case:
    """A family's module at a small size, everything else as the family has it."""
    from moments.torch.huggingface_modules import build_module, module_batch

    config = sized_config(kind, layers, d_model, heads=HEADS, vocab_size=VOCAB, seq_len=seq_len + 4)
    if dropout == "0":
        config |= {name: 0.0 for name in FAMILIES[kind].defaults if _is_dropout(name)}
    task = FAMILIES[kind].task
    data = module_batch(config, seq_len=seq_len, batch=1, seed=0)
    model = moments.from_huggingface(config, seq_len=None if task == "images" else seq_len)
    inputs, targets = _read(task, data)
    return Case(model, inputs, targets, lambda seed: build_module(config, seed), lambda seed: data)


def _read(task: str, data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if task == "images":
        return {"pixels": data["pixel_values"]}, {"targets": data["labels"]}
    ids, labels = data["input_ids"], data["labels"]
    if task == "translation":
        shifted = np.pad(labels[:, :-1], ((0, 0), (1, 0)))
        return {"token_ids": shifted, "encoder_inputs": {"token_ids": ids}}, {"targets": labels}
    if task == "causal":
        return {"token_ids": ids}, {}
    return {"token_ids": ids, "tokens": True}, {"targets": labels}


def _is_dropout(name: str) -> bool:
    return ("drop" in name or name.endswith("pdrop")) and "classifier" not in name


# --- torch's own modules --------------------------------------------------------------------------


def torch_case(
    kind: str,
    layers: int,
    dropout: str,
    *,
    d_model: int = D_MODEL,
    seq_len: int = SEQ_LEN,
    encoder_layers: int | None = None,
    source: dict[str, float] | None = None,
    activation: str = "relu",
) -> Case:
    """nn.TransformerEncoder, or nn.Transformer, whose output receives a white gradient.

    Args:
        kind: one of TORCH_KINDS. Their blocks are solved with the model's own laws, or have the
            constants that the paper's authors released.
        layers: of the stack that gives the output.
        dropout: "config", which is torch's 0.1, or "0".
        d_model, seq_len, activation: of both stacks.
        encoder_layers: of a decoder's encoder; None: as many.
        source: variance and correlation of a Gaussian input of the (first) stack; None: rows of a
            table of variance 1, looked up for English text, drawn again with every seed.
    """
    import torch
    from torch import nn

    from moments.torch.architecture import architecture_of
    from moments.torch.expectation import with_zero_biases
    from moments.torch.text import tokenize

    drop_prob = 0.1 if dropout == "config" else 0.0
    pre, decoder = "Pre-LN" in kind, "Decoder" in kind
    options = {"variant": "released" if kind.endswith(RELEASED) else "solved"}
    ids = tokenize(VOCAB, seq_len, 2)
    common: dict[str, Any] = {"norm_first": pre, "batch_first": True, "activation": activation}
    sizes = (d_model, HEADS, 4 * d_model, drop_prob)

    def encoder(count: int, norm: bool) -> Any:
        layer = nn.TransformerEncoderLayer(*sizes, **common)
        final = nn.LayerNorm(d_model) if norm else None
        return nn.TransformerEncoder(layer, count, norm=final, enable_nested_tensor=False)

    def build(seed: int) -> Any:
        if not decoder:
            return encoder(layers, False)
        own = nn.TransformerDecoder(nn.TransformerDecoderLayer(*sizes, **common), layers)
        first = encoder(encoder_layers or layers, pre)
        return nn.Transformer(
            d_model, HEADS, custom_encoder=first, custom_decoder=own, batch_first=True
        )

    def drawn(seed: int, place: int) -> Any:
        generator = torch.Generator().manual_seed(2 * seed + place)
        if place == 0 and source is not None:
            own, shared = (torch.randn((1, n, d_model), generator=generator) for n in (seq_len, 1))
            mixed = (1 - source["correlation"]) ** 0.5 * own
            mixed = mixed + source["correlation"] ** 0.5 * shared
            return source["variance"] ** 0.5 * mixed
        table = torch.randn((VOCAB, d_model), generator=generator)
        return table[torch.as_tensor(ids[place : place + 1])]

    def batch(seed: int) -> dict[str, Any]:
        if not decoder:
            return {"src": drawn(seed, 0)}
        mask = nn.Transformer.generate_square_subsequent_mask(seq_len)
        return {"src": drawn(seed, 0), "tgt": drawn(seed, 1), "tgt_mask": mask}

    declared = architecture_of(build(0), seq_len)
    assert declared is not None
    model = with_zero_biases(declared)
    first = {"kernel": _text_kernel(ids[0])} if source is None else dict(source)
    if not decoder:
        return Case(model, first, {}, build, batch, options)
    inputs = {"kernel": _text_kernel(ids[1]), "encoder_inputs": first}
    if source is not None:
        inputs["encoder_inputs"] = {"kernel": _alike_kernel(seq_len, source)}
    return Case(model, inputs, {}, build, batch, options)


def _text_kernel(ids: np.ndarray) -> np.ndarray:
    """Tokens of one table of variance 1: alike where they are the same word."""
    return np.equal.outer(ids, ids).astype(float)


def _alike_kernel(seq_len: int, source: dict[str, float]) -> np.ndarray:
    r = source["correlation"]
    return source["variance"] * (r + (1 - r) * np.eye(seq_len))


# --- one case -------------------------------------------------------------------------------------


def places(layers: int) -> np.ndarray:
    """Points of the stream that are kept, both ends among them."""
    count = min(layers + 1, MOST_PLACES)
    return np.unique(np.linspace(0, layers, count).round().astype(int))


def run_case(case: Case, seeds: int, before: Run | None = None) -> Run:
    """Solve, initialise, audit and measure.

    Args:
        case: what to run.
        seeds: draws in all.
        before: a run of fewer draws, to which the others are added.
    """
    from moments.torch import audit, initialize, measure

    start = time.perf_counter()
    plan, module = solved(case), case.build(0)
    initialize(module, plan, seed=0)
    report = audit(module, plan)
    run: Run = {"audit": {"passed": report.passed, "checks": len(report.rows)}, "seeds": seeds}
    draws: dict[str, list[Any]] = {
        name: list((before or {}).get(name, ())) for name in ("variance", "grad_variance", "loss")
    }
    for seed in range(len(draws["variance"]), seeds):
        initialize(module, plan, seed=seed)
        found = measure(module, case.batch(seed), seed=seed)
        at = places(len(found.variance) - 1)
        draws["variance"].append(found.variance[at])
        draws["grad_variance"].append(found.grad_variance[at])
        if found.loss is not None:
            draws["loss"].append(found.loss)
    run |= {name: np.array(rows) for name, rows in draws.items() if rows}
    return run | {"seconds": round(time.perf_counter() - start, 1)}


def solved(case: Case) -> moments.solver.Plan:
    """The scheme's plan for a case."""
    inputs = dict(case.inputs)
    if "kernel" in inputs and case.options.get("variant") == "released":
        # The paper's constants are of tokens alike, of one correlation.
        kernel = inputs.pop("kernel")
        n = len(kernel)
        mean = float((kernel.sum() - np.trace(kernel)) / (n * (n - 1)))
        inputs |= {"variance": 1.0, "correlation": mean}
    return moments.solve(case.model, "dslm", options=dict(case.options), **inputs)


def scores(case: Case, run: Run) -> dict[str, Any]:
    """Variances after layers 1 to N, gradients against today's prediction and its band."""
    plan = solved(case)
    return against(run, moments.predict(plan.model, **case.inputs, **case.targets))


def against(run: Run, p: Any) -> dict[str, Any]:
    """The same of a prediction."""
    at, draws = places(len(p.variance) - 1), run["variance"]
    measured, error = draws.mean(0)[1:], error_of_mean(draws)[1:]
    far = np.abs(measured - 1)
    samples, expected = run["grad_variance"], p.grad_variance[at]
    found: dict[str, Any] = {
        "entering": float(draws[:, 0].mean()),
        "predicted_off": float(np.abs(p.variance[1:] - 1).max()),
        "measured_mean": float(draws[:, 1:].mean()),
        "mean_stderr": float(error_of_mean(draws[:, 1:].mean(1))),
        "measured_off": float(far.max()),
        "stderr": float(error[far.argmax()]),
        "ratio": float(expected[0] / expected[-1]),
        "gradient_error": float(np.abs(np.log(samples.mean(0) / expected)).mean()),
        "inside": math.nan,
    }
    with contextlib.suppress(moments.MomentsError):
        low, high = p.grad_variance_band[:, at]
        found["inside"] = float(((samples >= low) & (samples <= high)).mean())
    return found


def error_of_mean(draws: Any) -> Any:
    """Standard error of a mean over the first axis."""
    return np.std(draws, axis=0, ddof=1) / np.sqrt(len(draws))


# --- storing --------------------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    return records.load(NAME) if records.exists(NAME) else {"modules": {}, "paper": {}}


def store(part: str, key: str, run: Run) -> None:
    import torch
    import transformers

    data = stored()
    data[part][key] = run
    data["machine"] = (
        f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    records.save(NAME, data)


def attempt(part: str, key: str, make: Callable[[], Case], seeds: int, again: bool) -> None:
    """Run and store what a case lacks; what cannot be done is stored with its reason."""
    before = stored()[part].get(key) or {}
    if not again and ("refused" in before or before.get("seeds", 0) >= seeds):
        return
    try:
        run = run_case(make(), seeds, None if again else before)
    except moments.MomentsError as error:
        run = {"refused": str(error)}
    store(part, key, run)
    print(key, run.get("refused") or f"{run['seconds']} s", flush=True)


Scored = tuple[str, str, Run, dict[str, Any]]


def scored() -> Iterator[Scored]:
    """Part, key, run and scores of every stored case."""
    data = stored()
    for part, cases in (("modules", module_cases()), ("paper", paper_cases())):
        for key, make in cases:
            run = data[part].get(key)
            if run is not None and "refused" not in run:
                yield part, key, run, scores(make(), run)


def show() -> None:
    for _, key, run, score in scored():
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in score.items())
        print(f"{key}: audit {run['audit']['passed']}, {numbers}", flush=True)


def table() -> None:
    """A row for every depth and kind of case, worst numbers."""
    groups: dict[str, list[Scored]] = {}
    for one in scored():
        part, key = one[:2]
        title = "the paper's own settings, 24 to 192 layers"
        if part == "modules":
            constants = ", constants as released" if RELEASED in key else ""
            title = f"{key.split('/')[1]} layers{constants}"
        groups.setdefault(title, []).append(one)
    lines = []
    for title, mine in groups.items():
        found = [score for *_, score in mine]
        worst = max(found, key=lambda s: abs(s["measured_mean"] - 1))
        errors = [s["gradient_error"] for s in found]
        inside = [s["inside"] for s in found if math.isfinite(s["inside"])]
        lines.append(
            (
                title,
                len(mine),
                sum(run["audit"]["passed"] for *_, run, _ in mine),
                f"{max(s['predicted_off'] for s in found):.3f}",
                f"{worst['measured_mean']:.3f} ± {worst['mean_stderr']:.3f}",
                f"{np.median(errors):.2f} ({max(errors):.2f})",
                f"{np.mean(inside):.2f} ({min(inside):.2f})",
            )
        )
    header = ("modules of", "cases", "audits passed", "variance off 1, predicted")
    header += ("measured, worst mean over layers", "gradient, mean abs log (worst)")
    tables.put(
        "accuracy", "dslm-on-modules", tables.markdown((*header, "in the band (least)"), lines)
    )


# --- the paper's own settings ---------------------------------------------------------------------


def paper_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Speech into 48 encoder and 24 decoder layers, 192 layers on images, a deep decoder twice."""
    for norm in ("Pre-LN", "Post-LN"):
        yield (
            f"speech, encoder-decoder 48-24, d 128, {norm}",
            lambda norm=norm: torch_case(
                f"nn.TransformerDecoder, {norm}",
                24,
                "config",
                seq_len=32,
                encoder_layers=48,
                source=SPEECH,
            ),
        )
        yield (
            f"image correlation .46, 192 layers, d 64, {norm}",
            lambda norm=norm: torch_case(
                f"nn.TransformerEncoder, {norm}",
                192,
                "0",
                d_model=64,
                seq_len=17,
                source={"variance": 1.0, "correlation": IMAGE_CORRELATION},
                activation="gelu",
            ),
        )
    yield "ViT, 192 layers, d 64, pictures", lambda: family_case("vit", 192, "config", 64)
    for d_model in (64, 128):
        made = functools.partial(family_case, "gpt2", 96, "config", d_model, 32)
        yield f"GPT-2, 96 layers, d {d_model}, text", made


# --- commands -------------------------------------------------------------------------------------


def module_cases(
    kinds: Sequence[str] = (), depths: Sequence[int] = DEPTHS, dropouts: Sequence[str] = DROPOUTS
) -> Iterator[tuple[str, Callable[[], Case]]]:
    """The first tables: every kind at every depth, with its dropout and without."""
    for layers in depths:
        for kind in kinds or KINDS:
            for dropout in dropouts:
                if dropout == "0" and kind in FAMILY_KINDS and not _drops(kind):
                    continue
                made = functools.partial(case_of, kind, layers, dropout)
                yield f"{kind}/{layers}/{dropout}", made


def case_of(kind: str, layers: int, dropout: str) -> Case:
    """A case of the first table."""
    return (family_case if kind in FAMILY_KINDS else torch_case)(kind, layers, dropout)


def _drops(kind: str) -> bool:
    """Whether the family's own config drops anything."""
    defaults = FAMILIES[kind].defaults
    return any(value for name, value in defaults.items() if _is_dropout(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("measure", "paper", "show", "table"))
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--layers", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--dropouts", nargs="*", default=list(DROPOUTS), choices=DROPOUTS)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--again", action="store_true", help="run what is stored too")
    given = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        if given.action == "show":
            show()
        elif given.action == "table":
            table()
        else:
            modules = module_cases(given.kinds, given.layers, given.dropouts)
            part, cases = ("paper", paper_cases())
            if given.action == "measure":
                part, cases = "modules", modules
            for key, make in cases:
                attempt(part, key, make, given.seeds, given.again)


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    main()
