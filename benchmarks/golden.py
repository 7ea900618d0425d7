"""What the package answered, kept: a change that only moves code is seen to move nothing.

    python benchmarks/golden.py write     # benchmarks/data/golden.npz, with the code as it is
    python benchmarks/golden.py check     # what differs now, by case and quantity

Not a claim of accuracy: the numbers are this package's own. A change that is meant to alter them
says which rows moved and why, and writes anew.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import moments

DATA = Path(__file__).parent / "data" / "golden.npz"
SHAPE: dict[str, Any] = {"layers": 3, "d_model": 64, "heads": 4, "dropout": 0.1}
ARRAYS = ("variance", "correlation", "grad_variance", "grad_correlation", "grad_variance_typical")
# Relative to the largest entry of its array.
TOLERANCE = 1e-9


def plain(seq_len: int = 16, **fields: Any) -> moments.Transformer:
    return moments.Transformer(**SHAPE | {"seq_len": seq_len} | fields)


FIELDS: dict[str, dict[str, Any]] = {
    "post": {"norm": "post"},
    "none": {"norm": "none"},
    "rmsnorm swiglu": {"normalization": "rmsnorm", "activation": "swiglu"},
    "dyt": {"normalization": "dyt"},
    "grouped heads": {"kv_heads": 2},
    "window": {"window": 5, "causal": True},
    "rotary": {"rotary": True, "causal": True},
    "parallel": {"parallel": True},
    "qk norm": {"qk_norm": "rmsnorm"},
    "temperature": {"temperature": 2.0},
}


def cases() -> Iterator[tuple[str, moments.Transformer, dict[str, Any]]]:
    rng = np.random.default_rng(0)
    for name in moments.preset.names():
        try:
            model = moments.preset(name).replace(layers=2)
        except moments.DomainError:
            continue
        yield f"preset {name}", model, {"tokens": False}
    for name, fields in FIELDS.items():
        for kind, given in (("alike", {"tokens": False}), ("by token", {"tokens": True})):
            try:
                yield f"{name}, {kind}", plain(**fields), given | {"correlation": 0.2}
            except moments.DomainError:
                continue
    for causal in (False, True):
        text = {"token_ids": rng.integers(0, 20, (2, 16))}
        model = plain(
            causal=causal,
            embedding=moments.Embedding(vocab_size=50, token_variance=0.02),
            head=moments.Head(vocab_size=50, tied=causal, weight_variance=None if causal else 0.02),
        )
        yield f"text, causal {causal}", model, text
    yield "classes, pre", plain(128, causal=True), {"correlation": 0.2}
    yield "classes, post", plain(128, causal=True, norm="post"), {"correlation": 0.2}
    for row in moments.schemes():
        for norm in ("pre", "post"):
            for tokens in (False, True):
                try:
                    model = plain(norm=norm, dropout=0.1).with_scheme(row.name)
                except (moments.DomainError, TypeError):
                    continue
                yield f"{row.name}, {norm}, tokens {tokens}", model, {"tokens": tokens}
    for theory in ("published", "simplified"):
        for norm in ("pre", "post"):
            yield f"{theory}, {norm}", plain(norm=norm), {"theory": theory, "correlation": 0.2}


def answers() -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, model, given in cases():
        try:
            p = moments.predict(model, **given)
        except moments.DomainError:
            found[f"{name}|refused"] = np.ones(1)
            continue
        refined = given.get("theory", "refined") == "refined"
        for array in ARRAYS if refined else ARRAYS[:-1]:
            found[f"{name}|{array}"] = np.asarray(getattr(p, array), float)
        if refined and p.grad_variance_band is not None:
            found[f"{name}|band"] = np.asarray(p.grad_variance_band, float)
        if p.loss is not None:
            found[f"{name}|loss"] = np.array([p.loss, p.logit_variance], float)
        frame = p.to_frame().select_dtypes("number")
        found[f"{name}|sites"] = frame.to_numpy(float, na_value=-1.0)
        if refined:
            squared = p.weight_gradients()["squared_norm"]
            found[f"{name}|weights"] = squared.to_numpy(float)
        if "-v" in sys.argv:
            print(name, flush=True)
    return found


def difference(now: np.ndarray, then: np.ndarray) -> float:
    if now.shape != then.shape:
        return float("inf")
    scale = np.abs(then).max(axis=0 if then.ndim == 2 else None, initial=1e-300)
    return float(np.max(np.abs(now - then) / scale, initial=0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["write", "check"])
    parser.add_argument("-v", action="store_true", help="names each case")
    command = parser.parse_args().command
    warnings.simplefilter("ignore", moments.ValidityWarning)
    found = answers()
    if command == "write":
        np.savez_compressed(DATA, **found)  # type: ignore[arg-type]
        print(len(found), "arrays,", DATA.stat().st_size // 1024, "KiB")
        return
    with np.load(DATA) as stored:
        moved = {key: difference(found[key], stored[key]) for key in stored if key in found}
        lost = [key for key in stored if key not in found] + [k for k in found if k not in stored]
    worse = sorted((key for key in moved if moved[key] > TOLERANCE), key=lambda k: -moved[k])
    for key in lost:
        print(f"{key:60} on one side only")
    for key in worse:
        print(f"{key:60} {moved[key]:.1e}")
    print(f"{len(moved)} compared, {len(worse)} beyond {TOLERANCE:g}, {len(lost)} on one side only")
    sys.exit(bool(worse or lost))


if __name__ == "__main__":
    main()
