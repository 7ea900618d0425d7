"""Published sizes, long texts and many layers, measured on an accelerator and predicted.

Real modules and torch twins at the sizes that are trained: nothing is passed from the theory to
them, or back, but the config, the text and the targets.

    python benchmarks/full_size.py measure --device cuda --seconds 450 [CASE ...]  # continues
    python benchmarks/full_size.py table    # predicts all, six minutes; into docs/accuracy.md
    python benchmarks/full_size.py text                              # the text, once

`measure` goes through the cases in order, a few draws of each and then more, and stores after every
draw, so that it can be stopped at any moment; `--toy` does the same at small widths. Every draw has
a seed of its own by the case's name and its number. Arithmetic is float32 without TF32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import math
import platform
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import real_modules
import records
import tables
from real_modules import BOUNDS, TITLES
from scipy.stats import t as student

import moments
from moments.model.huggingface import FAMILIES
from moments.model.huggingface.sizes import at_depth, sized_config
from moments.prediction.measurement import Measurement

DATA = records.path_of("full_size")
TEXT = Path(__file__).parent / "data" / "full_size_text.npz"
TOKENS = 16384
STREAM = ("variance", "correlation", "grad_variance", "grad_correlation")
MATRICES = ("query", "key", "value", "output", "gate", "ffn_in", "ffn_out")
ROUNDS = (0.25, 0.5, 1.0)
"""Shares of a case's draws after which the next case has its turn."""
ADAM, SGD, MUON = (1e-5, 1e-4, 3e-4, 1e-3), (3e-3, 3e-2), (3e-4, 3e-3)


@dataclass(frozen=True)
class Case:
    """What is run on one input.

    Attributes:
        name: of the case; its random numbers follow it.
        seeds: draws wanted.
        kind: "module" (transformers' own), "twin" (`moments.simulate`) or "step" (one step of an
            optimizer on transformers' own).
        config: entries of the module, or of the twin that is read off it; None: `declare` gives it.
        declare: makes the twin's model; takes whether it is to be small.
        seq_len, batch: of the text; None: images.
        inputs: of a twin that reads no text.
        trained: layers whose parameters have gradients, where not all of them fit; 0 is the tables.
        optimizer, rates: of a step.
        tokens: as in `predict`.
        alike: predicted without the tokens' own places and targets, as too many for the memory of
            a prediction by token; or image by image.
        samples: whether every draw is kept.
    """

    name: str
    seeds: int
    kind: str = "module"
    config: Mapping[str, Any] | None = None
    declare: Callable[[bool], moments.Transformer] | None = None
    seq_len: int | None = None
    batch: int = 1
    inputs: Mapping[str, Any] = field(default_factory=dict)
    trained: tuple[int, ...] | None = None
    optimizer: str = ""
    rates: tuple[float, ...] = ()
    tokens: bool | None = None
    alike: bool = False
    samples: bool = False

    def small(self) -> Case:
        """The same at widths and lengths that a processor runs at once."""
        changes: dict[str, Any] = {"seeds": 2, "seq_len": self.seq_len and 64}
        if self.config is not None:
            changes["config"] = small_config(self.config)
        if self.trained is not None:
            changes["trained"] = (0, 1)
        if self.declare is not None:
            large = self.declare
            changes["declare"] = lambda _: large(True)
        return dataclasses.replace(self, **changes)

    # --- what it reads ---------------------------------------------------------------------------

    @functools.cached_property
    def task(self) -> str:
        assert self.config is not None
        return FAMILIES[self.config["model_type"]].task

    def data(self) -> dict[str, Any]:
        """What the module reads, the same in every draw and on every machine."""
        from moments.torch.huggingface_modules import image_batch, settings_of
        from moments.torch.text import mask_tokens

        if self.task == "images":
            return image_batch(self.config, batch=self.batch)
        assert self.seq_len is not None
        if self.task == "translation":
            ids = text(self.seq_len, 2 * self.batch)
            return {"input_ids": ids[::2].copy(), "labels": ids[1::2].copy()}
        ids = text(self.seq_len, self.batch)
        vocab_size = int(settings_of(self.config)[1].vocab_size)
        ids = np.where(ids < vocab_size, ids, 4 + ids % (vocab_size - 4))
        if self.task == "masked":
            ids, labels = mask_tokens(ids, vocab_size, 0)
            return {"input_ids": ids, "labels": labels}
        return {"input_ids": ids, "labels": ids}

    def model(self) -> moments.Transformer:
        if self.declare is not None:
            return self.declare(False)
        return moments.from_huggingface(self.config, seq_len=self.seq_len)

    def read(self) -> dict[str, Any]:
        """Arguments of `predict` that say what is read; of `simulate` without `tokens`."""
        if self.config is None or self.inputs:
            return dict(self.inputs)
        data = self.data()
        if self.task == "images":
            return {"pixels": data["pixel_values"], "targets": data["labels"]}
        if self.task == "translation":
            shifted = np.pad(data["labels"][:, :-1], ((0, 0), (1, 0)))
            read = {"token_ids": data["input_ids"]}
            return {"token_ids": shifted, "targets": data["labels"], "encoder_inputs": read}
        given = {} if self.task == "causal" else {"targets": data["labels"]}
        return {"token_ids": data["input_ids"], **given}

    def alike_inputs(self) -> tuple[moments.Transformer, dict[str, Any]]:
        """The model and what it reads where tokens are alike."""
        model, read = self.model(), self.read()
        if self.task == "translation":
            return model, {"batch": self.batch}
        assert model.head is not None
        share = float((read["targets"] != -100).mean())
        head = dataclasses.replace(model.head, target_share=share)
        return model.replace(head=head), {"token_ids": read["token_ids"], "tokens": False}

    def predicted(self) -> moments.Prediction:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", moments.ValidityWarning)
            if self.alike:
                model, read = self.alike_inputs()
                return moments.predict(model, **read)
            return moments.predict(self.model(), tokens=self.tokens, **self.read())


@functools.cache
def _whole_text() -> np.ndarray:
    return np.load(TEXT)["ids"].astype(np.int64)


def text(seq_len: int, batch: int) -> np.ndarray:
    """Consecutive stretches of the stored text, (batch, seq_len)."""
    return _whole_text()[: batch * seq_len].reshape(batch, seq_len).copy()


def write_text() -> None:
    """Python's own help topics as `moments.torch.text` encodes them, the same on any machine."""
    from moments.torch.text import MOST_TRAINED, tokenize

    ids = tokenize(MOST_TRAINED, TOKENS)[0].astype(np.uint16)
    np.savez_compressed(TEXT, ids=ids)


def small_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Two narrow layers of the family, with what is special about the config."""
    kept = {k: v for k, v in config.items() if k in ("sliding_window", "tie_word_embeddings")}
    if kept.get("sliding_window"):
        kept["sliding_window"] = 16
    return sized_config(config["model_type"], 2, 64, vocab_size=8000, seq_len=72) | kept


# --- cases ---------------------------------------------------------------------------------------


def _preset(name: str, layers: int | None = None, **more: Any) -> dict[str, Any]:
    config = moments.preset.config(name)
    return (config if layers is None else at_depth(config, layers)) | more


def _bare(small: bool) -> moments.Transformer:
    """Llama 3 8B between its tables: tokens that differ by place alone."""
    config = _preset("llama-3-8b")
    if small:
        return _stripped(moments.from_huggingface(small_config(config), seq_len=64))
    return _stripped(moments.from_huggingface(config, seq_len=8192))


def _stripped(model: moments.Transformer) -> moments.Transformer:
    return model.replace(embedding=None, head=None)


def _deep(layers: int, norm: str, scheme: str, small: bool) -> moments.Transformer:
    """The models of Kedia et al.'s figures, dropout .1; LayerNorm Scaling's have a causal mask."""
    layers, seq_len = (6, 32) if small else (layers, 256)
    causal = scheme == "lns"
    model = moments.Transformer(
        layers, 256, 4, seq_len, norm=norm, dropout=0.0 if causal else 0.1, causal=causal
    )
    if scheme == "xavier":
        return model
    return model.with_scheme(scheme, **({"input_correlation": 0.227} if scheme == "dslm" else {}))


LLAMA_1B = _preset("tinyllama-1.1b", 16)
GAUSSIAN = {"variance": 1.0, "correlation": 0.9 * 0.227}
BLOOM = {"model_type": "bloom", "n_layer": 24, "hidden_size": 2048, "n_head": 16}
LARGEST = (0, 1, 11, 22, 32)


def _twin(layers: int, norm: str, scheme: str, seeds: int) -> Case:
    made = functools.partial(_deep, layers, norm, scheme)
    named = {"dslm": "DeepScaleLM", "xavier": "Xavier", "lns": "LayerNorm Scaling"}[scheme]
    return Case(
        f"{named}, {norm}-LN, {layers} layers", seeds, "twin", declare=made, inputs=GAUSSIAN
    )


def _step(name: str, config: Mapping[str, Any], optimizer: str, rates: tuple[float, ...]) -> Case:
    seeds = 48 if "GPT" in name else 24
    return Case(
        f"{name}, 2 x 128 tokens, step of {optimizer}",
        seeds,
        "step",
        config,
        seq_len=128,
        batch=2,
        optimizer=optimizer,
        rates=rates,
    )


CASES = [
    Case(
        "Llama 3 8B, 4 layers, 512 tokens",
        8,
        config=_preset("llama-3-8b", 4),
        seq_len=512,
        tokens=True,
    ),
    Case(
        "Gemma 2B, 4 layers, 512 tokens",
        8,
        config=_preset("gemma-2b", 4),
        seq_len=512,
        tokens=True,
    ),
    Case(
        "Pythia 1.4B, 4 layers, 512 tokens",
        8,
        config=_preset("pythia-1.4b", 4),
        seq_len=512,
        tokens=True,
    ),
    Case("BERT large, one text", 12, config=_preset("bert-large"), seq_len=512),
    Case("RoBERTa large, one text", 8, config=_preset("roberta-large"), seq_len=512),
    Case("T5 large, one text", 8, config=_preset("t5-large"), seq_len=512),
    Case("ViT large, one picture", 16, config=_preset("vit-large")),
    Case("Llama 3 8B, twin", 4, "twin", _preset("llama-3-8b"), seq_len=8192),
    Case("GPT-2, 1024 tokens", 32, config=_preset("gpt2"), seq_len=1024),
    Case("Llama 3 8B", 8, config=_preset("llama-3-8b"), seq_len=3072, trained=LARGEST),
    Case("GPT-2 XL", 24, config=_preset("gpt2-xl"), seq_len=1024),
    Case(
        "Mistral 7B, 8 layers, window 2048",
        12,
        config=_preset("mistral-7b", 8, sliding_window=2048),
        seq_len=8192,
    ),
    Case("BLOOM 1.7B", 24, config=BLOOM, seq_len=2048),
    Case("Pythia 1.4B", 40, config=_preset("pythia-1.4b"), seq_len=2048),
    _step("GPT-2", _preset("gpt2"), "adam", ADAM),
    _step("Llama of 16 layers", LLAMA_1B, "adam", ADAM),
    Case(
        "GPT-2, band", 200, config=_preset("gpt2"), seq_len=128, batch=2, tokens=True, samples=True
    ),
    _twin(192, "post", "dslm", 12),
    _twin(768, "pre", "dslm", 8),
    _twin(1000, "pre", "lns", 6),
    Case(
        "Llama 3 8B, twin, Gaussian tokens",
        3,
        "twin",
        declare=_bare,
        inputs={"variance": 1.0, "correlation": 0.2},
    ),
    Case("T5 large, 2 texts", 16, config=_preset("t5-large"), seq_len=512, batch=2, alike=True),
    Case("BERT large, 2 texts", 16, config=_preset("bert-large"), seq_len=512, batch=2, alike=True),
    Case("ViT large, 4 pictures", 24, config=_preset("vit-large"), batch=4, alike=True),
    Case("Gemma 2B", 16, config=_preset("gemma-2b"), seq_len=2048),
    Case("Qwen2 1.5B", 32, config=_preset("qwen2-1.5b"), seq_len=2048),
    Case(
        "RoBERTa large, 2 texts",
        16,
        config=_preset("roberta-large"),
        seq_len=512,
        batch=2,
        alike=True,
    ),
    Case("Falcon 7B, 8 layers", 16, config=_preset("falcon-7b", 8), seq_len=2048),
    _step("GPT-2", _preset("gpt2"), "sgd", SGD),
    _step("GPT-2", _preset("gpt2"), "muon", MUON),
    _step("Llama of 16 layers", LLAMA_1B, "sgd", SGD),
    _step("Llama of 16 layers", LLAMA_1B, "muon", MUON),
    _twin(192, "pre", "dslm", 12),
    _twin(192, "pre", "xavier", 12),
    _twin(192, "post", "xavier", 12),
    _twin(768, "post", "dslm", 4),
    Case("Llama 3 8B, 10 layers", 8, config=_preset("llama-3-8b", 10), seq_len=8192),
]


# --- what is kept --------------------------------------------------------------------------------


def bins(seq_len: int) -> list[slice]:
    """Positions by powers of two: 0, 1, 2 to 3, 4 to 7 and so on."""
    edges = [0, *(1 << k for k in range(seq_len.bit_length())), seq_len]
    return [slice(a, b) for a, b in itertools.pairwise(edges) if a < b <= seq_len]


def places(layers: int) -> list[int]:
    """Points of the stream whose profile over positions is kept."""
    return sorted({round(share * layers) for share in (0, 0.25, 0.5, 0.75, 1)})


def profile(by_token: Any) -> np.ndarray:
    """(places, bins) means of (N + 1, L)."""
    rows = np.asarray(by_token)
    chosen = rows[places(len(rows) - 1)]
    return np.stack([chosen[:, s].mean(1) for s in bins(rows.shape[1])], 1)


MOST_LAYERS = 192
"""Deeper stacks are kept at every k-th point, the fewest that are no more than this."""


def points(layers: int) -> np.ndarray:
    """Points of the stream that are kept."""
    return np.arange(0, layers + 1, -(-layers // MOST_LAYERS))


def stack_record(m: Any) -> dict[str, np.ndarray]:
    """Of one stack, measured or predicted."""
    chosen = points(len(m.variance) - 1)
    found = {name: np.asarray(getattr(m, name), dtype=float)[chosen] for name in STREAM}
    found["covariance"] = found["variance"] * found["correlation"]
    for name in ("token_variance", "token_grad_variance"):
        if getattr(m, name) is not None:
            found[name] = profile(getattr(m, name)).ravel()
    found["weights"] = weight_rows(m)["squared_norm"].to_numpy(dtype=float)
    return found


def weight_rows(m: Any) -> Any:
    """Squared gradient norms; of deep stacks at some layers."""
    rows = m.weight_gradients()
    layers = len(m.variance) - 1
    if layers < MOST_LAYERS:
        return rows
    return rows[rows["layer"].isin([1, *places(layers)[1:]])]


def weight_names(m: Any) -> list[str]:
    rows = weight_rows(m)
    return [f"{a} {b}" for a, b in zip(rows["layer"], rows["weight"], strict=True)]


def draw_record(m: Measurement) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """One draw as vectors by quantity, and names of the weights."""
    found = stack_record(m)
    found["log_grad_variance"] = np.log(found["grad_variance"])
    names = {"weights": weight_names(m)}
    if m.loss is not None:
        found["loss"] = np.array([m.loss])
    if m.logit_variance is not None:
        found["logit_variance"] = np.array([m.logit_variance])
    if m.encoder is not None:
        found |= {f"encoder.{k}": v for k, v in stack_record(m.encoder).items()}
        names["encoder.weights"] = weight_names(m.encoder)
    return found, names


def step_record(rates: tuple[float, ...], steps: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One draw's steps, measured or predicted, as vectors by rate and quantity."""
    found: dict[str, np.ndarray] = {}
    names: list[str] = []
    for rate, step in zip(rates, steps, strict=True):
        for name in ("loss_before", "loss_change", "slope"):
            found[f"{rate:g}/{name}"] = np.array([getattr(step, name)], dtype=float)
        for name in ("variance", "relative_change"):
            found[f"{rate:g}/{name}"] = np.asarray(getattr(step, name), dtype=float)
        rows = step.weights()
        rows = rows[rows["weight"].isin(MATRICES)].sort_values(["layer", "weight"])
        names = [f"{a} {b}" for a, b in zip(rows["layer"], rows["weight"], strict=True)]
        for name in ("update_variance", "alignment"):
            found[f"{rate:g}/{name}"] = rows[name].to_numpy(dtype=float)
    return found, {"weights": names}


def add(kept: dict[str, Any], found: Mapping[str, np.ndarray]) -> None:
    """Another draw: mean and sum of squared deviations by Welford's recursion."""
    count = kept["seeds"] = kept.get("seeds", 0) + 1
    values = kept.setdefault("values", {})
    for name, new in found.items():
        mean, spread = (np.asarray(row) for row in values.get(name, (0.0 * new, 0.0 * new)))
        shift = new - mean
        mean = mean + shift / count
        values[name] = np.stack([mean, spread + shift * (new - mean)])


def mean_of(kept: Mapping[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean over draws and its standard error; nan of one draw."""
    mean, spread = (np.array(row, dtype=float) for row in kept["values"][name])
    count = kept["seeds"]
    if count < 2:
        return mean, np.full_like(mean, math.nan)
    return mean, np.sqrt(spread / (count - 1) / count)


def stored(path: Path = DATA) -> dict[str, Any]:
    return records.load(path) if records.exists(path) else {"cases": {}}


def store(data: Mapping[str, Any], path: Path = DATA) -> None:
    records.save(path, data, bits=16)


# --- measurement ---------------------------------------------------------------------------------


def build(case: Case, device: str, seed: int) -> Any:
    """transformers' own module with its own initialisation, drawn on the device."""
    import torch
    import transformers.integrations.sdpa_attention

    from moments.torch.anatomy import anatomy_of, parts_of
    from moments.torch.huggingface_modules import build_module

    # Keys that several heads share are repeated: in float32 a GPU's other path keeps every logit.
    transformers.integrations.sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    with torch.device(device):
        module = build_module(case.config, seed)
    if case.trained is not None:
        parts = parts_of(module, anatomy_of(module))
        learn = {row.parameter for row, _ in parts if row.layer in case.trained}
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in learn)
    return module


def one_draw(case: Case, device: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a case once."""
    from moments.torch import measure, measure_step

    factory = functools.partial(build, case, device)
    if case.kind == "twin":
        size = {} if "token_ids" in (read := case.read()) else {"batch": case.batch}
        found = moments.simulate(case.model(), **read, **size, seeds=1, seed=seed, device=device)
        return draw_record(found)
    if case.kind == "step":
        rates = list(case.rates)
        steps = measure_step(factory, case.data(), case.optimizer, rates, seed=seed)
        return step_record(case.rates, steps)
    return draw_record(measure(factory, case.data(), seed=seed))


def exact_arithmetic() -> None:
    """No TF32: float32 as a processor computes it."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def machine(device: str) -> str:
    import torch
    import transformers

    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


def measure_cases(
    chosen: list[Case], device: str, seconds: float, path: Path, seeds: int | None = None
) -> None:
    """Bring cases to their draws, in rounds, until the time is spent."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", moments.ValidityWarning)
    exact_arithmetic()
    began, failed = time.perf_counter(), set()
    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    print(machine(device), cards, flush=True)
    for share in ROUNDS:
        for case in chosen:
            wanted = math.ceil(share * (case.seeds if seeds is None else min(seeds, case.seeds)))
            kept = stored(path)["cases"].get(case.name, {})
            while case.name not in failed and kept.get("seeds", 0) < wanted:
                left = seconds - (time.perf_counter() - began)
                if left < 1.3 * kept.get("seconds", 5.0):
                    break
                data = stored(path)
                kept = data["cases"].setdefault(case.name, {})
                start = time.perf_counter()
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                try:
                    first = 10_000 * (zlib.crc32(case.name.encode()) % 100_000)
                    found, names = one_draw(case, device, first + kept.get("seeds", 0))
                except Exception as error:
                    kept["error"] = f"{type(error).__name__}: {error}"[:600]
                    failed.add(case.name)
                    print(f"{case.name}: {kept['error']}", flush=True)
                else:
                    kept.pop("error", None)
                    add(kept, found)
                    kept["names"] = names
                    if case.samples:
                        rows = kept.setdefault("samples", {})
                        for name in ("variance", "grad_variance"):
                            rows.setdefault(name, []).append(
                                [float(f"{x:.5g}") for x in found[name]]
                            )
                gc.collect()
                kept["seconds"] = round(time.perf_counter() - start, 2)
                if device == "cuda":
                    kept["memory"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                    torch.cuda.empty_cache()
                data["machine"] = machine(device)
                store(data, path)
                spent = time.perf_counter() - began
                print(
                    f"{spent:6.1f} s  {case.name}: {kept.get('seeds', 0)} draws, "
                    f"{kept['seconds']} s, {kept.get('memory', 0)} GiB",
                    flush=True,
                )


# --- prediction ----------------------------------------------------------------------------------


def images_apart(case: Case) -> tuple[dict[str, np.ndarray], list[str]]:
    """Means over images, each predicted by itself; of matrices, which all images reach, nothing."""
    read, model, count = case.read(), case.model(), case.batch
    rows, notes = [], set()
    for k in range(count):
        one = {name: value[k : k + 1] for name, value in read.items()}
        p = moments.predict(model, **one)
        found = stack_record(p) | {"loss": np.array([float(p.loss)])}
        rows.append(found | {"logit_variance": np.array([float(p.logit_variance)])})
        notes |= set(p.warnings)
    mean = {name: np.mean([row[name] for row in rows], axis=0) for name in rows[0]}
    for name in ("grad_variance", "token_grad_variance"):
        mean[name] = mean[name] / count**2  # the loss is the mean of theirs
    return mean | {"weights": np.full_like(mean["weights"], math.nan)}, sorted(notes)


def predict_case(case: Case, names: Mapping[str, list[str]]) -> dict[str, Any]:
    """Today's theory in the form of what is kept of a measurement; weights it lacks are nan."""
    start = time.process_time()
    if case.alike and case.task == "images":
        found, notes = images_apart(case)
        return _plain(found, notes, start, "by token, one by one")
    p = case.predicted()
    if case.kind == "step":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", moments.ValidityWarning)
            steps = [p.after(case.optimizer, rate) for rate in case.rates]
        found, own = step_record(case.rates, steps)
        assert own == names
        notes = sorted({note for step in steps for note in step.warnings})
    else:
        found, notes = stack_record(p), list(p.warnings)
        found["weights"] = _in_order(p, names["weights"])
        if "encoder.weights" in names:
            assert p.encoder is not None
            found |= {f"encoder.{k}": v for k, v in stack_record(p.encoder).items()}
            found["encoder.weights"] = _in_order(p.encoder, names["encoder.weights"])
        if case.alike and case.batch > 1:
            # What texts have in common their weights' gradients share; alike, each is by itself.
            for name in ("weights", "encoder.weights"):
                found |= {name: np.full_like(found[name], math.nan)} if name in found else {}
        if p.loss is not None:
            found["loss"] = np.array([float(p.loss)])
            found["logit_variance"] = np.array([float(p.logit_variance)])
        if case.samples or case.declare is not None:
            found["band"] = np.asarray(p.grad_variance_band, dtype=float).ravel()
            found["typical"] = np.asarray(p.grad_variance_typical, dtype=float)
    return _plain(found, notes, start, p.resolution)


def _plain(
    found: Mapping[str, np.ndarray], notes: list[str], start: float, resolution: str
) -> dict[str, Any]:
    return {
        "resolution": resolution,
        "values": dict(found),
        "notes": notes,
        "seconds": round(time.process_time() - start, 1),
    }


def _in_order(p: Any, names: list[str]) -> np.ndarray:
    rows = dict(zip(weight_names(p), weight_rows(p)["squared_norm"], strict=True))
    return np.array([float(rows.get(name, math.nan)) for name in names])


# --- comparison ---------------------------------------------------------------------------------

POST_LN = ("BERT", "RoBERTa", "post-LN")
"""Whose gradient is judged by the band of one draw, where it has one: they have many layers."""


@dataclass(frozen=True)
class Gap(real_modules.Gap):
    """Errors of one quantity with their standard errors, (k,) each, and the bound."""

    bound: float
    draws: int

    def outside(self, allowed: float) -> bool:
        """Whether an error is beyond its bound by more than so many standard errors."""
        stderr = np.nan_to_num(self.stderr)
        return bool((np.abs(self.error) - allowed * stderr > self.bound).any())

    @property
    def verdict(self) -> str:
        """ "pass", "open" (outside by 2 s.e., within what so few draws leave open), "fails"."""
        if not self.outside(2.0):
            return "pass"
        if self.draws < 2:
            return "open"
        return "fails" if self.outside(float(student.ppf(0.975, self.draws - 1))) else "open"


def predicted(kept: Mapping[str, Any], name: str) -> np.ndarray:
    return np.asarray(kept["predicted"]["values"].get(name, ()), dtype=float)


def smoothed(stderr: np.ndarray) -> np.ndarray:
    """Root mean square over a tenth of the stream: of two draws, places where they happen to agree
    have next to no standard error of their own."""
    count = max(1, len(stderr) // 10)
    window = np.ones(2 * count + 1)
    known = np.convolve(np.ones(len(stderr)), window, "same")
    return np.asarray(np.sqrt(np.convolve(stderr**2, window, "same") / known))


def stream_gap(kept: Mapping[str, Any], name: str, bound: float) -> Gap | None:
    """Relative errors over the places of the stream; a correlation's absolute."""
    if name not in kept["values"]:
        return None
    measured, error = mean_of(kept, name)
    if name == "correlation":
        measured, scale = mean_of(kept, "covariance")[0] / mean_of(kept, "variance")[0], 1.0
    else:
        scale = measured
    said = predicted(kept, name)
    if not said.size:
        return None
    relative = error / scale
    if len(relative) > 1 and kept["seeds"] > 1:
        relative = smoothed(relative)
    return Gap((said - measured) / scale, relative, bound, kept["seeds"])


def is_matrix(name: str) -> bool:
    return not name.endswith((".bias", ".gain"))


def weight_gaps(kept: Mapping[str, Any]) -> tuple[Gap | None, Gap | None, dict[str, Gap]]:
    """Of every matrix, of all parameters summed, and by role."""
    names = kept["names"]["weights"]
    measured, error = mean_of(kept, "weights")
    said, draws = predicted(kept, "weights"), kept["seeds"]
    known = np.isfinite(said) & (measured > 1e-12 * measured.max())
    if not known.any():
        return None, None, {}
    matrix = known & np.array([is_matrix(name) for name in names])

    def summed(which: np.ndarray, bound: float) -> Gap:
        # parameters of one draw are correlated: the sum of the errors is an upper bound
        whole = measured[which].sum()
        gap = np.array([said[which].sum() / whole - 1]), np.array([error[which].sum() / whole])
        return Gap(*gap, bound, draws)

    roles = [name.split(" ", 1)[1] for name in names]
    noise = error / np.where(measured > 0, measured, 1.0)
    for role in set(roles):
        which = known & np.array([r == role for r in roles])
        noise[which] = math.sqrt(float((noise[which] ** 2).mean())) if which.any() else 0.0
    off = said[matrix] / measured[matrix] - 1
    each = Gap(off, noise[matrix], BOUNDS["matrices"], draws)
    by_role = {}
    for role in dict.fromkeys(r for r, m in zip(roles, matrix, strict=True) if m):
        which = matrix & np.array([r == role for r in roles])
        by_role[role] = summed(which, BOUNDS["matrices"])
    return each, summed(known, BOUNDS["total"]), by_role


def gaps(kept: Mapping[str, Any]) -> dict[str, Gap]:
    """Every quantity that was both measured and predicted."""
    found = {name: stream_gap(kept, name, BOUNDS[name]) for name in list(BOUNDS)[:4]}
    found["matrices"], found["total"], _ = weight_gaps(kept)
    return {name: gap for name, gap in found.items() if gap is not None}


def outside_band(kept: Mapping[str, Any]) -> int | None:
    """Places whose measured mean gradient is outside the band of one draw; None: no band."""
    band = predicted(kept, "band")
    if not band.size:
        return None
    measured = mean_of(kept, "grad_variance")[0]
    low, high = band.reshape(2, -1)[:, points(band.size // 2 - 1)]
    return int(((measured < low) | (measured > high)).sum())


def verdicts(name: str, kept: Mapping[str, Any]) -> dict[str, str]:
    found = {quantity: gap.verdict for quantity, gap in gaps(kept).items()}
    outside = outside_band(kept) if any(part in name for part in POST_LN) else None
    if outside is not None:
        found["grad_variance"] = "fails" if outside else "pass"
    return found


def band_rows(kept: Mapping[str, Any]) -> list[tuple[int, float, float]]:
    """Place, share of draws inside the band, predicted over measured deviation of the log."""
    low, high = predicted(kept, "band").reshape(2, -1)
    draws = np.array(kept["samples"]["grad_variance"])
    inside = ((draws >= low) & (draws <= high)).mean(0)
    spread = np.log(high / low) / (2 * 1.959964)
    ratio = spread / np.log(draws).std(0, ddof=1)
    return [(n, float(inside[n]), float(ratio[n])) for n in range(len(low))]


def rows(chosen: list[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Measured cases, and today's predictions of them; of a refused one, the reason alone."""
    kept = stored()["cases"]
    for case in chosen:
        if kept.get(case.name, {}).get("seeds"):
            found = kept[case.name]
            try:
                yield case, found | {"predicted": predict_case(case, found["names"])}
            except moments.MomentsError as error:
                yield case, {"refused": str(error)}


def cells(case: Case, kept: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table; errors outside by two standard errors are bold, in italics where so few
    draws leave it open."""
    found, said = gaps(kept), verdicts(case.name, kept)
    row = [case.name, str(kept["seeds"])]
    for quantity in BOUNDS:
        gap = found.get(quantity)
        if gap is None:
            row.append("")
            continue
        single = quantity in ("loss", "total")
        text = tables.percent(gap.mean)
        if single:
            text = tables.percent(gap.error[0], gap.stderr[0], signed=True)
        row.append({"pass": text, "open": f"*{text}*", "fails": f"**{text}**"}[said[quantity]])
    return tuple(row)


STEP_BOUNDS = {"loss_change": 0.05, "relative_change": 0.10, "update_variance": 0.10}


def step_cells(case: Case, kept: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row of every rate: error of the loss's change, worst of stream, sizes and alignment."""
    for rate in case.rates:
        measured, error = (float(x[0]) for x in mean_of(kept, f"{rate:g}/loss_change"))
        said = float(predicted(kept, f"{rate:g}/loss_change")[0])
        row = [case.name.partition(",")[0], case.optimizer, f"{rate:g}", str(kept["seeds"])]
        row.append(tables.percent(said / measured - 1, abs(error / measured), signed=True))
        for name in ("relative_change", "update_variance"):
            value = mean_of(kept, f"{rate:g}/{name}")[0]
            off = np.abs(predicted(kept, f"{rate:g}/{name}") / value - 1)
            row.append(tables.percent(float(np.nanmax(off))))
        aligned = mean_of(kept, f"{rate:g}/alignment")[0]
        row.append(f"{np.nanmax(np.abs(predicted(kept, f'{rate:g}/alignment') - aligned)):.3f}")
        yield tuple(row)


def table() -> None:
    """Every case on one line, and every first step."""
    every = list(rows(CASES))
    refused = [case.name for case, kept in every if "refused" in kept]
    found = [(case, kept) for case, kept in every if "refused" not in kept]
    plain = [(case, kept) for case, kept in found if case.kind != "step"]
    steps = [line for case, kept in found if case.kind == "step" for line in step_cells(case, kept)]
    said = [set(verdicts(case.name, kept).values()) for case, kept in plain]
    passed = sum(v == {"pass"} for v in said)
    failed = sum("fails" in v for v in said)
    (band,) = (band_rows(kept) for case, kept in plain if case.name == "GPT-2, band")
    shares = [100 * share for _, share, _ in band]
    header = ("model", "optimizer", "rate", "draws", "loss", "stream", "update sizes", "alignment")
    tables.put(
        "accuracy",
        "full-size",
        f"{passed} of {len(plain)} cases are inside all bounds, {failed} outside, the others open."
        + (f" Refused: {'; '.join(refused)}." if refused else ""),
        tables.markdown(("model", "draws", *TITLES.values()), (cells(*row) for row in plain)),
        f"Of the draws of GPT-2, {min(shares):.1f} to {max(shares):.1f} % lie inside the predicted "
        "95 % band of one draw, over the places of the stream.",
        "First steps: error of the loss's change, largest error of the stream's change, of a "
        "matrix's mean squared update, and of alignment.",
        tables.markdown(header, steps, words=2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("measure", "table", "text"))
    parser.add_argument("cases", nargs="*", help="parts of names; none: all")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--seeds", type=int, help="at most, of each case")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    given = parser.parse_args()
    chosen = [c for c in CASES if not given.cases or any(part in c.name for part in given.cases)]
    if given.action == "measure":
        chosen = [c.small() for c in chosen] if given.toy else chosen
        measure_cases(chosen, given.device, given.seconds, given.data, given.seeds)
    elif given.action == "text":
        write_text()
    else:
        table()


if __name__ == "__main__":
    main()
