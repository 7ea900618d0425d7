"""Modules that no family knows, described from one pass and predicted, against what they do.

    python benchmarks/dataflow.py measure [--kinds minGPT "timm" gpt_bigcode ...] [--seeds 16]
    python benchmarks/dataflow.py table

Every draw of a module is described by its dataflow alone, `moments.predict` of that description
reads the same tokens (or begins at the measured moments of features and pictures), and
`moments.torch.measure` runs the module once in training mode. Errors are paired draw by draw, so
that the entries which happened to be drawn do not count as errors. Stored in
benchmarks/data/dataflow.json, kind by kind.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import inspect
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moments
from moments.torch.dataflow import read

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks/data/dataflow.json"
sys.path.insert(0, str(ROOT / "tests"))

import foreign_modules  # noqa: E402
import own_styles  # noqa: E402

BATCH, LENGTH = 4, 24


def _style(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return own_styles.STYLES[name]()


KINDS: dict[str, Callable[[int], Any]] = {
    **{n: functools.partial(_style, n) for n in own_styles.STYLES if "bare" not in n},
    **{
        f"x-transformers, {n}": functools.partial(foreign_modules.x_transformer, n)
        for n in foreign_modules.X_TRANSFORMERS
    },
    "nn.TransformerEncoder, Pre-LN": functools.partial(foreign_modules.torch_encoder, True),
    "nn.TransformerEncoder, Post-LN": functools.partial(foreign_modules.torch_encoder, False),
    **{kind: functools.partial(foreign_modules.unread, kind) for kind in foreign_modules.UNREAD},
    "timm itself, ViT": foreign_modules.timm_vit,
}
LIBRARIES = ("torch", "transformers", "x-transformers", "timm")


def versions() -> dict[str, str]:
    """Of what is installed; timm is no dependency, and asks for a torchvision of torch's build."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name).partition("+")[0]
    return found


def compare(kind: str, seed: int) -> dict[str, Any]:
    """One draw: predicted over measured, place by place."""
    module = KINDS[kind](seed)
    generator = torch.Generator().manual_seed(seed)
    pictures = hasattr(module, "patch_embed")
    features = isinstance(module, torch.nn.TransformerEncoder)
    if pictures:
        given: Any = torch.randn(BATCH, 3, 32, 32, generator=generator)
    elif features:
        given = torch.randn(BATCH, LENGTH, 64, generator=generator)
    else:
        given = torch.randint(5, 97, (BATCH, LENGTH), generator=generator)
    names = inspect.signature(module.forward).parameters
    batch, targets, loss = given, None, None
    if "labels" in names:
        targets = given.clone()
        if "MaskedLM" in type(module).__name__:
            targets[torch.rand(given.shape, generator=generator) > 0.3] = -100
        batch = {"input_ids": given, "labels": targets}
    elif pictures:
        labels = torch.randint(10, (BATCH,), generator=generator)
        batch = {"x": given, "targets": labels} if "targets" in names else given
        if "targets" not in names:

            def loss(logits: Any, _: Any) -> Any:
                return torch.nn.functional.cross_entropy(logits, labels)

    elif "targets" in names:
        targets = given.roll(-1, 1)
        batch = {"idx": given, "targets": targets}
    model = read(module, batch).model
    assert model is not None
    measured = moments.torch.measure(module, batch, loss=loss, seed=seed)
    if not pictures:
        model = model.replace(seq_len=LENGTH)
    known: dict[str, Any] = {}
    if pictures:
        known["pixels"] = given.numpy()
    elif features:
        model = model.replace(embedding=None)
        known |= {"variance": measured.variance[0], "correlation": measured.correlation[0]}
    else:
        known["token_ids"] = given.numpy()
    if measured.loss is None:
        model = model.replace(head=None)
        known["grad_variance"] = measured.grad_variance[-1]
        known["grad_correlation"] = measured.grad_correlation[-1]
    elif targets is not None and ("targets" in names or bool((targets < 0).any())):
        known["targets"] = targets.numpy()
    predicted = moments.predict(model, **known)
    found = {
        "variance": predicted.variance / measured.variance - 1,
        "correlation": predicted.correlation - measured.correlation,
        "grad_variance": predicted.grad_variance / measured.grad_variance - 1,
    }
    if measured.loss is not None:
        assert predicted.loss is not None
        found["loss"] = np.array([predicted.loss / measured.loss - 1])
    return {name: values.tolist() for name, values in found.items()}


def measure(kinds: list[str], seeds: int) -> None:
    """Store the draws of every kind."""
    stored = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for kind in kinds:
        started, draws = time.process_time(), []
        for seed in range(seeds):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                draws.append(compare(kind, seed))
        stored[kind] = {
            "seeds": seeds,
            "versions": versions(),
            **{
                name: {
                    "mean": np.mean([d[name] for d in draws], 0).round(6).tolist(),
                    "stderr": (np.std([d[name] for d in draws], 0, ddof=1) / np.sqrt(seeds))
                    .round(6)
                    .tolist(),
                }
                for name in draws[0]
            },
        }
        DATA.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(row(kind, stored[kind]), f"{time.process_time() - started:.0f} s", flush=True)


def row(kind: str, found: dict[str, Any]) -> str:
    """Worst error of every quantity beyond twice its standard error, in percent."""
    words = []
    for name in ("variance", "correlation", "grad_variance", "loss"):
        if name not in found:
            continue
        mean, stderr = (100 * np.array(found[name][part]) for part in ("mean", "stderr"))
        worst = int(np.argmax(np.abs(mean) - 2 * stderr))
        words.append(f"{name} {mean[worst]:+.2f} ± {stderr[worst]:.2f}")
    return f"{kind}: {', '.join(words)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=("measure", "table"))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seeds", type=int, default=16)
    given = parser.parse_args()
    if given.command == "measure":
        measure(given.kinds, given.seeds)
        return
    for kind, found in json.loads(DATA.read_text(encoding="utf-8")).items():
        print(row(kind, found))


if __name__ == "__main__":
    main()
