"""Real modules of every family on real text, measured and predicted.

For each family at 6 and 24 layers, for some at weights of variance 1/d and at full size:
transformers' own module with its own initialisation reads English text (pictures of natural
spectrum, at full size a photograph, for ViT) and computes its own training loss; the same config is
declared by `moments.from_huggingface` and predicted on the same tokens. Nothing is passed from one
to the other but the config, the tokens and the targets.

    python benchmarks/real_modules.py measure --seeds 64 --kinds gpt2 llama   # continues
    python benchmarks/real_modules.py table [--kinds gpt2]                  # predicts and prints
    python benchmarks/real_modules.py page                                  # docs/real-modules.md

Measurements lie in benchmarks/data/real_modules, one file per case, and are continued by batches of
seeds: a case that has enough is skipped. Every case draws from seeds of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import moments
from moments.model.huggingface import FAMILIES
from moments.model.huggingface.sizes import at_depth, sized_config
from moments.prediction.measurement import Measurement

DATA = Path(__file__).parent / "data" / "real_modules"
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
    def file(self) -> Path:
        return DATA / f"{self.name}.json"

    @property
    def in_band(self) -> bool:
        """Whether gradients are held to the band of one draw: in deep Post-LN."""
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
        return json.loads(self.file.read_text()) if self.file.exists() else {"chunks": []}

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


# --- measurement ---------------------------------------------------------------------------------


def measure_case(case: Case, seeds: int) -> None:
    """Bring a case's file to at least that many seeds."""
    import torch
    import transformers

    from moments.torch import measure
    from moments.torch.huggingface_modules import build_module

    transformers.logging.set_verbosity_error()
    stored, data, config = case.stored(), case.data(), case.config
    first = 1000 * (zlib.crc32(case.name.encode()) % 1_000_000)
    while (done := CHUNK * len(stored["chunks"])) < seeds:
        start = time.perf_counter()
        found = measure(
            lambda seed: build_module(config, seed), data, seeds=CHUNK, seed=first + done
        )
        stored["chunks"].append(slim(found))
        stored |= {"config": config, "seq_len": case.seq_len, "batch": case.batch}
        stored["machine"] = f"{platform.machine()}, torch {torch.__version__}, transformers " + (
            transformers.__version__
        )
        case.file.parent.mkdir(parents=True, exist_ok=True)
        case.file.write_text(json.dumps(stored))
        print(f"{case.name}: {done + CHUNK} seeds, {time.perf_counter() - start:.0f} s", flush=True)


def _rounded(values: Any) -> list[float]:
    return [float(f"{v:.6g}") for v in np.ravel(values)]


def slim(m: Measurement) -> dict[str, Any]:
    """What the table needs of a chunk of draws: means, and the spread of the draws."""
    data = slim_stack(m)
    data["loss"] = _rounded([m.loss, m.loss_stderr])
    data["logit_variance"] = _rounded([m.logit_variance, m.logit_variance_stderr])
    data["encoder"] = None if m.encoder is None else slim_stack(m.encoder)
    return data


def slim_stack(m: Measurement) -> dict[str, Any]:
    """Of one stack: stream and weights."""
    data: dict[str, Any] = {name: _rounded(m.samples[name]) for name in QUANTITIES}
    data["weights"] = {
        f"{row['layer']} {row['weight']}": _rounded(
            [row["squared_norm"], row["squared_norm_stderr"]]
        )
        for row in m.weight_gradient_rows
    }
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("measure", "table", "page"))
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
    from real_modules_page import table, write_page

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        if given.action == "table":
            table(chosen)
        else:
            write_page()


if __name__ == "__main__":
    main()
