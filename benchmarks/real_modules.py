"""Real modules of every family on real text, measured and predicted.

For each family at 6 and 24 layers, for some at weights of variance 1/d and at full size:
transformers' own module with its own initialisation reads English text (pictures of natural
spectrum, at full size a photograph, for ViT) and computes its own training loss; the same config is
declared by `moments.from_huggingface` and predicted on the same tokens. Nothing is passed from one
to the other but the config, the tokens and the targets.

    python benchmarks/real_modules.py measure --seeds 64 --kinds gpt2 llama   # continues
    python benchmarks/real_modules.py show --kinds gpt2     # every parameter of some cases
    python benchmarks/real_modules.py table                 # into docs/accuracy.md, minutes

data/real_modules.npz holds, by case and quantity, the mean over draws and its standard error; more
draws are merged into them by chunks. Every case draws from seeds of its own.
"""

from __future__ import annotations

import argparse
import math
import platform
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import records
import tables

import moments
from moments.model.huggingface import FAMILIES
from moments.model.huggingface.sizes import at_depth, sized_config
from moments.prediction.measurement import Measurement

NAME = "real_modules"
DEPTHS = (6, 24)
D_MODEL, HEADS, VOCAB, SEQ_LEN, BATCH = 128, 4, 2000, 64, 2
CHUNK = 4
QUANTITIES = ("variance", "correlation", "grad_variance")
# T5's own initialisation is that of variance 1/d already.
UNIT = ("bert", "gpt2", "llama", "vit")
# Of Llama's 7B, two layers.
FULL: Mapping[str, dict[str, int]] = {
    "bert": {"layers": 12, "seq_len": 128},
    "gpt2": {"layers": 12, "seq_len": 128},
    "llama": {"layers": 2, "batch": 1},
    "vit": {"layers": 12},
}


@dataclass(frozen=True)
class Case:
    """One module on one input.

    Attributes:
        kind: `model_type`.
        layers: N.
        size: "" at width 128 as the family initialises it, "unit" with its standard deviation
            replaced by 1/sqrt(d), "full" at the family's published size.
        seq_len, batch: of the text.
    """

    kind: str
    layers: int
    size: str = ""
    seq_len: int = SEQ_LEN
    batch: int = BATCH

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.kind, str(self.layers), self.size)))

    @property
    def in_band(self) -> bool:
        """Whether gradients are judged by the band of one draw: in deep Post-LN."""
        return self.layers >= DEPTHS[-1] and self.declared().norm == "post"

    @property
    def config(self) -> dict[str, Any]:
        """Everything but its size, and the deviation in a "unit" case, is the family's own."""
        if self.size == "full":
            return at_depth({"model_type": self.kind}, self.layers)
        sizes = {"heads": HEADS, "vocab_size": VOCAB, "seq_len": SEQ_LEN + 4}
        config = sized_config(self.kind, self.layers, D_MODEL, **sizes)
        if self.size == "unit":
            config["initializer_range"] = D_MODEL**-0.5
        return config

    def data(self) -> dict[str, Any]:
        """What the module reads, the same in every draw."""
        from moments.torch.huggingface_modules import module_batch

        if self.kind == "vit" and self.size == "full":
            return photographs(self.batch)
        return module_batch(self.config, seq_len=self.seq_len, batch=self.batch, seed=0)

    def stored(self) -> dict[str, Any]:
        return dict(stored().get(self.name, {}))

    def declared(self) -> moments.Transformer:
        images = FAMILIES[self.kind].task == "images"
        return moments.from_huggingface(self.config, seq_len=None if images else self.seq_len)

    def predicted(self) -> moments.Prediction:
        """The config declared and predicted on the same tokens."""
        data, task, model = self.data(), FAMILIES[self.kind].task, self.declared()
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


def photographs(count: int) -> dict[str, Any]:
    """Crops of the photograph that matplotlib ships, as ViT's preprocessing scales them."""
    from matplotlib import cbook, pyplot

    file: Any = cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    photo = pyplot.imread(file).astype(np.float32) / 127.5 - 1
    starts = np.linspace(0, photo.shape[0] - 224, count).astype(int)
    left = (photo.shape[1] - 224) // 2
    crops = [photo[s : s + 224, left : left + 224].transpose(2, 0, 1) for s in starts]
    return {"pixel_values": np.stack(crops), "labels": np.arange(count) % 2}


def cases(kinds: list[str], depths: list[int], sizes: list[str]) -> Iterator[Case]:
    """Every case of these families, depths (of the small ones) and sizes."""
    chosen = kinds or sorted(FAMILIES)
    if "" in sizes:
        yield from (Case(kind, layers) for layers in depths for kind in chosen)
    if "unit" in sizes:
        yield from (Case(kind, DEPTHS[0], "unit") for kind in UNIT if kind in chosen)
    if "full" in sizes:
        yield from (Case(kind, size="full", **v) for kind, v in FULL.items() if kind in chosen)


def stored() -> dict[str, Any]:
    """By case: seeds, config, and (mean, standard error) of every quantity."""
    return records.load(NAME) if records.exists(NAME) else {}


# --- measurement ---------------------------------------------------------------------------------


def measure_case(case: Case, seeds: int) -> None:
    """Bring a case to at least that many draws."""
    import torch
    import transformers

    from moments.torch import measure
    from moments.torch.huggingface_modules import build_module

    transformers.logging.set_verbosity_error()
    data, config, kept = case.data(), case.config, case.stored()
    first = 1000 * (zlib.crc32(case.name.encode()) % 1_000_000)
    while (done := kept.get("seeds", 0)) < seeds:
        start = time.perf_counter()
        found = measure(
            lambda seed: build_module(config, seed), data, seeds=CHUNK, seed=first + done
        )
        kept = merged(kept, chunk(found)) | {"config": config}
        kept["machine"] = f"{platform.machine()}, torch {torch.__version__}, transformers " + (
            transformers.__version__
        )
        records.save(NAME, stored() | {case.name: kept})
        print(f"{case.name}: {done + CHUNK} seeds, {time.perf_counter() - start:.0f} s", flush=True)


def chunk(m: Measurement) -> dict[str, Any]:
    """Means of a chunk of draws and their standard errors; sums of norms by name, of chunks."""
    found = {name: _spread(m.samples[name]) for name in QUANTITIES}
    found["loss"] = np.array([[m.loss], [m.loss_stderr]])
    found["logit_variance"] = np.array([[m.logit_variance], [m.logit_variance_stderr]])
    rows = norms(m)
    if m.encoder is not None:
        rows |= {f"encoder {key}": pair for key, pair in norms(m.encoder).items()}
    values = np.array(list(rows.values())).T
    sums: dict[str, float] = {}
    for key, value in zip(rows, values[0], strict=True):
        sums[name_of(key)] = sums.get(name_of(key), 0.0) + value
    sums["total"] = sum(sums.values())
    own = np.array(list(sums.values()))
    return {
        "seeds": m.seeds,
        "keys": list(rows),
        "names": list(sums),
        **found,
        "weights": values,
        "sums": np.stack([own, np.full_like(own, np.nan)]),
    }


def _spread(draws: Any) -> np.ndarray:
    values = np.asarray(draws)
    return np.stack([values.mean(0), values.std(0, ddof=1) / math.sqrt(len(values))])


def norms(m: Measurement) -> dict[str, tuple[float, float]]:
    """Squared gradient norms of one stack, by layer and name."""
    return {
        f"{row['layer']} {row['weight']}": (row["squared_norm"], row["squared_norm_stderr"])
        for row in m.weight_gradient_rows
    }


def name_of(key: str) -> str:
    """Of a parameter of one layer, without the layer."""
    return ("encoder." if key.startswith("encoder ") else "") + key.rpartition(" ")[2]


def merged(kept: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Both together: all draws, and of sums all chunks of `CHUNK` draws."""
    if not kept:
        return dict(new)
    assert (kept["keys"], kept["names"]) == (new["keys"], new["names"])
    whole = dict(kept) | {"seeds": kept["seeds"] + new["seeds"]}
    for name in (*QUANTITIES, "loss", "logit_variance", "weights", "sums"):
        unit = CHUNK if name == "sums" else 1
        counts = kept["seeds"] // unit, new["seeds"] // unit
        whole[name] = together(counts, kept[name], new[name])
    return whole


def together(counts: tuple[int, int], first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(mean, standard error) of two samples of so many, merged."""
    n, total = counts, sum(counts)
    shift = second[0] - first[0]
    mean = first[0] + shift * n[1] / total
    squares = shift**2 * n[0] * n[1] / total
    for count, (_, error) in zip(n, (first, second), strict=True):
        if count > 1:  # one alone has no spread
            squares = squares + error**2 * count * (count - 1)
    return np.stack([mean, np.sqrt(squares / (total - 1) / total)])


# --- comparison ----------------------------------------------------------------------------------

# Chunks from which a sum's standard error is that of the chunks' sums
_ENOUGH = 6


@dataclass(frozen=True)
class Gap:
    """Errors of one quantity and the standard errors of the measurement, (k,) each."""

    error: np.ndarray
    stderr: np.ndarray

    @property
    def mean(self) -> float:
        return float(np.abs(self.error).mean())

    @property
    def worst(self) -> float:
        return float(np.abs(self.error).max())

    @property
    def beyond(self) -> float:
        """The largest error that twice its standard error does not cover."""
        return float(np.maximum(np.abs(self.error) - 2 * self.stderr, 0.0).max())


@dataclass(frozen=True)
class Comparison:
    """One case.

    Attributes:
        variance, correlation, grad_variance: over the stream's N + 1 places; relative errors, the
            correlation's absolute.
        loss, total: one entry each, relative; `total` over all parameters.
        matrices, vectors: of every parameter of every layer.
        by_name: error and standard error of every parameter's norm, summed over layers.
        missing: parameters that are not predicted.
        measured: loss, mean squared logit, and the entering tensor's variance and correlation.
        predicted: the same.
        outside_band: places where the measured mean gradient is outside the band of one draw, of
            cases judged by it.
    """

    seeds: int
    seconds: float
    variance: Gap
    correlation: Gap
    grad_variance: Gap
    loss: Gap
    total: Gap
    matrices: Gap
    vectors: Gap
    by_name: dict[str, tuple[float, float]]
    missing: list[str]
    measured: dict[str, float]
    predicted: dict[str, float]
    outside_band: int
    warnings: list[str]


def compare_case(case: Case) -> Comparison:
    """Errors of one case, each with the Monte-Carlo error of the measurement."""
    kept = case.stored()
    start = time.perf_counter()
    p = case.predicted()
    seconds = time.perf_counter() - start
    assert p.loss is not None
    assert p.logit_variance is not None
    stream = {}
    for name in QUANTITIES:
        mean, error = kept[name]
        scale = 1.0 if name == "correlation" else mean
        stream[name] = Gap((np.asarray(getattr(p, name)) - mean) / scale, error / scale)
    outside = 0
    if case.in_band:
        low, high = np.asarray(p.grad_variance_band)
        gradient = kept["grad_variance"][0]
        outside = int(((gradient < low) | (gradient > high)).sum())
    (loss,), (error,) = kept["loss"]
    return Comparison(
        kept["seeds"],
        seconds,
        variance=stream["variance"],
        correlation=stream["correlation"],
        grad_variance=stream["grad_variance"],
        loss=Gap(np.array([float(p.loss) / loss - 1]), np.array([error / loss])),
        **compare_weights(p, kept),
        measured={"loss": float(loss), "logit": float(kept["logit_variance"][0, 0])}
        | {name: float(kept[name][0, 0]) for name in QUANTITIES[:2]},
        predicted={"loss": float(p.loss), "logit": float(p.logit_variance)}
        | {name: float(getattr(p, name)[0]) for name in QUANTITIES[:2]},
        outside_band=outside,
        warnings=list(p.warnings),
    )


def compare_weights(p: Any, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Gaps of all parameters, of each and summed."""
    rows = weight_rows(p)
    if any(key.startswith("encoder ") for key in kept["keys"]):
        read = weight_rows(p.encoder)
        # One table for both stacks: what reaches it from either is taken as independent.
        rows["0 token"] += read.pop("0 token", 0.0)
        rows |= {f"encoder {k}": v for k, v in read.items()}
    single = {
        key: (rows[key] / mean - 1, error / mean)
        for key, mean, error in zip(kept["keys"], *kept["weights"], strict=True)
        if mean > 1e-12 and key in rows
    }
    missing = {
        name_of(key)
        for key, mean in zip(kept["keys"], kept["weights"][0], strict=True)
        if mean > 1e-12 and key not in rows
    }
    sums = summed(rows, kept)
    vectors = [k for k in single if k.endswith((".bias", ".gain"))]
    matrices = [k for k in single if k not in vectors]

    def gap(chosen: list[str]) -> Gap:
        if not chosen:
            return Gap(np.zeros(1), np.zeros(1))
        return Gap(*np.array([single[k] for k in chosen]).T)

    total = sums.pop("total")
    return {
        "total": Gap(np.array(total[:1]), np.array(total[1:])),
        "matrices": gap(matrices),
        "vectors": gap(vectors),
        "by_name": sums,
        "missing": sorted(missing),
    }


def summed(rows: Mapping[str, float], kept: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Relative errors of sums of norms over layers and over everything, and their standard errors.

    Parameters of one draw are correlated: their sum's error is that of the chunks' sums where there
    are enough, else the sum of the errors, an upper bound.
    """
    predicted, errors = (dict.fromkeys([*kept["names"], "total"], 0.0) for _ in range(2))
    for key, error in zip(kept["keys"], kept["weights"][1], strict=True):
        for name in (name_of(key), "total"):
            predicted[name] += rows.get(key, 0.0)
            errors[name] += error
    enough = kept["seeds"] // CHUNK >= _ENOUGH
    found = {}
    for name, mean, error in zip(kept["names"], *kept["sums"], strict=True):
        if mean > 1e-12 and predicted[name] > 0.0:
            spread = error if enough else errors[name]
            found[name] = (float(predicted[name] / mean - 1), float(spread / mean))
    return found


def weight_rows(p: Any) -> dict[str, float]:
    return {
        f"{row.layer} {row.weight}": float(row.squared_norm)
        for row in p.weight_gradients().itertuples()
    }


# Errors beyond twice the simulation's standard error; twice as much at weights of variance 1/d.
BOUNDS = {
    "variance": 0.02,
    "correlation": 0.015,
    "grad_variance": 0.05,
    "loss": 0.005,
    "matrices": 0.08,
    "total": 0.04,
}
TITLES = {
    "variance": "forward variance",
    "correlation": "correlation",
    "grad_variance": "gradient variance",
    "loss": "loss",
    "matrices": "weight matrices",
    "total": "total",
}


class Row(NamedTuple):
    case: Case
    found: Comparison


def failures(row: Row) -> list[str]:
    """Quantities outside their bounds."""
    factor = 2 if row.case.size == "unit" else 1
    failed = []
    for name, bound in BOUNDS.items():
        gap: Gap = getattr(row.found, name)
        fails = gap.beyond > factor * bound
        if name == "grad_variance" and row.case.in_band:
            fails = row.found.outside_band > 0
        if fails:
            failed.append(name)
    return failed


def rows_of(chosen: Iterable[Case]) -> Iterator[Row]:
    """Cases that were measured."""
    return (Row(case, compare_case(case)) for case in chosen if case.stored())


# --- what is shown -------------------------------------------------------------------------------


def show(chosen: Iterable[Case]) -> None:
    """Every stored case on one line, then every parameter of it."""
    print("case, seeds, seconds; mean/worst/beyond 2 s.e. of", ", ".join(TITLES.values()))
    for row in rows_of(chosen):
        c = row.found
        gaps = (c.variance, c.correlation, c.grad_variance, c.matrices, c.vectors)
        errors = "  ".join(f"{g.mean:.3f}/{g.worst:.3f}/{g.beyond:.3f}" for g in gaps)
        both = "  ".join(f"{g.error[0]:+.4f}({g.stderr[0]:.4f})" for g in (c.loss, c.total))
        failed = ", ".join(failures(row)) or "pass"
        print(f"{row.case.name:<18}{c.seeds:>4} {c.seconds:4.1f}  {errors}  {both}  {failed}")
        weights = ", ".join(f"{k} {v:+.3f}({e:.3f})" for k, (v, e) in c.by_name.items())
        print(f"    {c.measured} {c.predicted} outside {c.outside_band}; {weights}; {c.missing}")
        for note in c.warnings:
            print(f"    {note}", flush=True)


def table() -> None:
    """A row for every family, both depths, and for every other case."""
    small, other = list(rows_of(cases([], list(DEPTHS), [""]))), []
    for size in ("unit", "full"):
        other += list(rows_of(cases([], list(DEPTHS), [size])))
    by_kind: dict[str, list[Row]] = {}
    for row in sorted(small, key=lambda row: (row.case.kind, row.case.layers)):
        by_kind.setdefault(row.case.kind, []).append(row)
    titles = {"": "", "unit": ", variance 1/d", "full": ", published width"}
    for row in other:
        title = f"{row.case.kind}, {row.case.layers} layers{titles[row.case.size]}"
        by_kind[title] = [row]
    lines = []
    for title, rows in by_kind.items():
        cells = [title, " / ".join(str(row.found.seeds) for row in rows)]
        for name in BOUNDS:
            cells.append(" / ".join(_cell(row, name) for row in rows))
        lines.append(cells)
    passed = sum(not failures(row) for row in (*small, *other))
    tables.put(
        "accuracy",
        "real-modules",
        tables.markdown(("module", "draws", *TITLES.values()), lines),
        f"{passed} of {len(small) + len(other)} cases are inside all bounds; **bold** is outside.",
    )


def _cell(row: Row, name: str) -> str:
    gap: Gap = getattr(row.found, name)
    single = name in ("loss", "total")
    text = tables.percent(gap.mean)
    if single:
        text = tables.percent(gap.error[0], gap.stderr[0], signed=True)
    return f"**{text}**" if name in failures(row) else text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("measure", "show", "table"))
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--layers", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--sizes", nargs="*", default=[""], help='"", unit, full')
    parser.add_argument("--seeds", type=int, default=8)
    given = parser.parse_args()
    chosen = cases(given.kinds, given.layers, given.sizes)
    if given.action == "measure":
        for case in chosen:
            measure_case(case, given.seeds)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        if given.action == "show":
            show(chosen)
        else:
            table()


if __name__ == "__main__":
    main()
