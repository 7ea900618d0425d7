"""DeepScaleLM on real modules: solved, written into them, and measured on real text.

For every family a module of transformers (or of torch itself) is given the scheme by
`moments.torch.initialize`, audited, and run on English text (pictures for ViT) with its own
training loss. What is held against it is `moments.predict` of the plan on the same tokens.

    python benchmarks/dslm_on_modules.py measure [--kinds gpt2 ...] [--layers 12 48] [--seeds 8]
    python benchmarks/dslm_on_modules.py paper     # the paper's own settings
    python benchmarks/dslm_on_modules.py depth     # 192 and 1000 layers
    python benchmarks/dslm_on_modules.py predict   # today's predictions beside what was measured
    python benchmarks/dslm_on_modules.py page

The first three run what benchmarks/data/dslm_on_modules.json lacks, draws included, and store it
case by case; `page` writes docs/dslm-on-modules.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from dslm_page import RELEASED, page, scores

import moments
from moments.model.huggingface import FAMILIES
from moments.model.huggingface.sizes import sized_config

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks/data/dslm_on_modules.json"
PAGE = ROOT / "docs/dslm-on-modules.md"

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
GRAD_CORRELATIONS = (0.0, 0.2, 0.4, 0.8)
DEEP = (192, 1000)

Run = dict[str, Any]


class Case(NamedTuple):
    """One module to be: what is solved, what it is solved and predicted on, and how to run it.

    Attributes:
        model: the declaration, before the scheme.
        inputs: of `solve` and `predict`.
        targets: what only `predict` is told.
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


def run_case(case: Case, seeds: int, before: Run | None = None) -> Run:
    """Solve, initialise, audit, measure and predict.

    Args:
        case: what to run.
        seeds: draws in all.
        before: a run of fewer draws, to which the others are added.
    """
    from moments.torch import audit, initialize, measure

    start = time.perf_counter()
    plan, run = predicted(case)
    module = case.build(0)
    initialize(module, plan, seed=0)
    report = audit(module, plan)
    run["audit"] = {"passed": report.passed, "checks": len(report.findings)}
    run["seeds"] = seeds
    _keep_measured(run, before or {})
    for seed in range(len(run["variance"]["measured"]), seeds):
        initialize(module, plan, seed=seed)
        found = measure(module, case.batch(seed), seed=seed)
        run["variance"]["measured"].append(rounded(found.variance))
        run["grad_variance"]["measured"].append(rounded(found.grad_variance))
        if found.encoder is not None:
            run["encoder_variance"]["measured"].append(rounded(found.encoder.variance))
        if "loss" in run and found.loss is not None:
            run["loss"]["measured"].append(found.loss)
    run["seconds"] = round(time.perf_counter() - start, 1)
    return run


def predicted(case: Case) -> tuple[moments.solver.Plan, Run]:
    """A case's plan, and what is expected of modules that have it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", moments.ValidityWarning)
        plan = solved(case)
    p = moments.predict(plan.model, **case.inputs, **case.targets)
    run: Run = {
        "residual": plan.residual,
        "variance": {"predicted": rounded(p.variance)},
        "grad_variance": {"predicted": rounded(p.grad_variance), "band": _band(p)},
        "notes": sorted({str(w.message) for w in caught} | set(p.warnings)),
    }
    if p.loss is not None:
        run["loss"] = {"predicted": float(p.loss)}
    if p.encoder is not None:
        run["encoder_variance"] = {"predicted": rounded(p.encoder.variance)}
    return plan, run


def _keep_measured(run: Run, before: Run) -> None:
    """The draws of an earlier run beside today's predictions."""
    for name in ("variance", "grad_variance", "encoder_variance", "loss"):
        if name in run:
            run[name]["measured"] = list(before.get(name, {}).get("measured", ()))


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


def _pair(predicted: Any, measured: list[Any]) -> dict[str, Any]:
    return {
        "predicted": rounded(predicted),
        "measured": rounded(np.mean(measured, axis=0)),
        "stderr": rounded(_error(measured)),
    }


def _error(samples: list[Any]) -> Any:
    return np.std(samples, axis=0, ddof=1) / np.sqrt(len(samples))


def _band(prediction: moments.Prediction) -> Any:
    try:
        return [rounded(edge) for edge in prediction.grad_variance_band]
    except moments.MomentsError as error:
        return str(error)


def rounded(values: Any) -> list[float]:
    return [float(f"{v:.5g}") for v in np.ravel(values)]


# --- storing --------------------------------------------------------------------------------------


def stored() -> dict[str, Any]:
    if DATA.exists():
        return dict(json.loads(DATA.read_text(encoding="utf-8")))
    return {"modules": {}, "paper": {}, "depth": {}}


def store(part: str, key: str, run: Run) -> None:
    import torch
    import transformers

    data = stored()
    data[part][key] = run
    data["machine"] = (
        f"{platform.machine()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    beside = DATA.with_suffix(".new")
    beside.write_text(json.dumps(data) + "\n", encoding="utf-8")
    beside.replace(DATA)


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
    print(key, line(run), flush=True)


def predict_again(part: str, key: str, make: Callable[[], Case]) -> None:
    """Put today's predictions beside the stored measurements of a case."""
    before = stored()[part].get(key)
    if before is None or "refused" in before:
        return
    _, run = predicted(make())
    _keep_measured(run, before)
    store(part, key, before | run)
    print(key, line(before | run), flush=True)


def line(run: Run) -> str:
    if "refused" in run:
        return f"refused: {run['refused'][:120]}"
    score = scores(run)
    return (
        f"audit {run['audit']['passed']}, "
        + ", ".join(
            f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
            for name, value in score.items()
        )
        + f", {run['seconds']} s"
    )


# --- depth ----------------------------------------------------------------------------------------


def deep_model(layers: int, scheme: bool, seq_len: int = 32, d_model: int = 64) -> Any:
    """The paper's Pre-LN model at a small width, with or without the scheme."""
    model = moments.Transformer(layers, d_model, HEADS, seq_len, dropout=0.1)
    if not scheme:
        return model
    return model.with_scheme("dslm", input_correlation=TEXT_CORRELATION / 0.9)


def depth_rows() -> Iterator[tuple[str, Run]]:
    """Predictions at every depth and gradient correlation, with and without the scheme."""
    for norm in ("pre", "post"):
        for layers in DEEP:
            for scheme in (True, False):
                model = deep_model(layers, scheme).replace(norm=norm)
                for r in GRAD_CORRELATIONS:
                    p = moments.predict(
                        model, variance=1.0, correlation=TEXT_CORRELATION, grad_correlation=r
                    )
                    yield (
                        f"{norm}/{layers}/{'dslm' if scheme else 'vanilla'}/{r:g}",
                        {
                            "most": float(np.abs(np.asarray(p.variance) - 1).max()),
                            "last": float(p.variance[-1]),
                            "ratio": float(p.grad_variance[0] / p.grad_variance[-1]),
                        },
                    )


def depth(seeds: int) -> None:
    """Predictions, and the torch twin at 192 layers."""
    for key, row in depth_rows():
        store("depth", key, {name: float(f"{v:.6g}") for name, v in row.items()})
    for scheme in ("dslm", "vanilla"):
        for r in (0.0, 0.4):
            model = deep_model(192, scheme == "dslm", seq_len=16)
            given = {"variance": 1.0, "correlation": TEXT_CORRELATION, "grad_correlation": r}
            found = moments.simulate(model, **given, seeds=seeds, batch=4)
            expected = moments.predict(model, **given, batch=4)
            low, high = expected.grad_variance_band[:, :-1]
            inside = (found.samples["grad_variance"][:, :-1] >= low) & (
                found.samples["grad_variance"][:, :-1] <= high
            )
            run = {
                "seeds": seeds,
                "variance": _pair(expected.variance, list(found.samples["variance"])),
                "inside": float(inside.mean()),
                "ratio": rounded(
                    [
                        expected.grad_variance[0] / expected.grad_variance[-1],
                        found.grad_variance[0] / found.grad_variance[-1],
                        found.grad_variance_stderr[0] / found.grad_variance[-1],
                    ]
                ),
            }
            store("depth", f"simulated/{scheme}/{r:g}", run)
            print(scheme, r, run["ratio"], run["inside"], flush=True)


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
    kinds: list[str], depths: list[int], dropouts: list[str]
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


ACTIONS = ("measure", "paper", "depth", "predict", "page")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--layers", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--dropouts", nargs="*", default=list(DROPOUTS), choices=DROPOUTS)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--again", action="store_true", help="run what is stored too")
    given = parser.parse_args()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        modules = ("modules", module_cases(given.kinds, given.layers, given.dropouts))
        paper = ("paper", paper_cases())
        if given.action in ("measure", "paper"):
            part, cases = modules if given.action == "measure" else paper
            for key, make in cases:
                attempt(part, key, make, given.seeds, given.again)
        elif given.action == "predict":
            for part, cases in (modules, paper):
                for key, make in cases:
                    predict_again(part, key, make)
        elif given.action == "depth":
            depth(given.seeds)
        else:
            PAGE.write_text(page(stored()), encoding="utf-8")


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    main()
