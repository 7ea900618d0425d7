"""What the package answered, kept: a change that only moves code is seen to move nothing.

    python benchmarks/golden.py write     # benchmarks/data/golden.npz and golden_wide.npz
    python benchmarks/golden.py check     # what differs now, by case and quantity

Two sets: every preset, option and scheme at 2 and at 12 layers; and the same with heads as wide as
a declaration allows and everything else in proportion, where terms in 1/width are below 1e-5, so
that a change of those alone leaves it as it is. Not a claim of accuracy: the numbers are this
package's own. A change that is meant to alter them says which rows moved and why, and writes anew.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import moments
from moments.model.positions import Rotary
from moments.model.weights import MATRICES

DATA = Path(__file__).parent / "data"
WIDE_HEAD = 2**20
SHAPE: dict[str, Any] = {"layers": 2, "d_model": 64, "heads": 4, "seq_len": 16, "dropout": 0.1}
DEPTHS = (2, 12)
SITES = 3  # layers up to which every point inside them is kept too
STREAM = ("variance", "correlation", "grad_variance", "grad_correlation", "grad_variance_typical")
TOLERANCE = 1e-5  # of the largest entry of its array: above what machines differ by
KEPT_BITS = 18  # of a mantissa: rounding at 2e-6, so that the files compress

OPTIONS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm": "post"},
    "none": {"norm": "none"},
    "sandwich": {"norm": "sandwich"},
    "hybrid": {"norm": "hybrid"},
    "b2t": {"norm": "b2t"},
    "mix": {"norm": "mix", "post_layers": 1},
    "rmsnorm swiglu": {"normalization": "rmsnorm", "activation": "swiglu"},
    "gelu, activation dropout": {"activation": "gelu", "activation_dropout": 0.1},
    "dyt": {"normalization": "dyt"},
    "epsilon, gains": {"norm_epsilon": 0.1, "norm_affine": True, "norm_gain": 1.5},
    "norm groups": {"norm_groups": 4},
    "layernorm scaling": {"layernorm_scaling": True},
    "scales": {"skip_scale": 0.9, "branch_scale": 0.5},
    "biases": {"biases": moments.Biases(query=0.1, key=0.1, value=0.1, output=0.1)},
    "grouped heads": {"kv_heads": 2},
    "window": {"window": 5},
    "rotary": {"rotary": Rotary()},
    "alibi": {"alibi": True},
    "parallel": {"parallel": True},
    "qk norm": {"qk_norm": "rmsnorm"},
    "soft cap": {"logit_softcap": 3.0},
    "temperature": {"temperature": 2.0},
    "identity attention": {"identity_attention": True},
}


def options() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and fields of a small Transformer, every one with and without a causal mask."""
    for name, fields in OPTIONS.items():
        yield name, fields
        yield f"{name}, causal", fields | {"causal": True}


def text_models(causal: bool) -> moments.Transformer:
    return moments.Transformer(
        **SHAPE,
        causal=causal,
        embedding=moments.Embedding(50, 0.02, position_variance=0.01, dropout=0.1),
        head=moments.Head(vocab_size=50, tied=causal, weight_variance=None if causal else 0.02),
    )


def cases() -> Iterator[tuple[str, moments.Transformer, dict[str, Any]]]:
    rng = np.random.default_rng(0)
    for layers in DEPTHS:
        for name in moments.preset.names():
            try:
                model = moments.preset(name).replace(layers=layers)
            except moments.DomainError:  # what a size's own layers fix
                continue
            yield f"preset {name}, {layers} layers", model, {"tokens": False}
        for name, fields in options():
            for kind in (None, True) if "causal" in fields else (False, True):
                given = {"tokens": kind, "correlation": 0.2}
                depth = {"layers": layers} | ({"post_layers": 1} if "post_layers" in fields else {})
                try:
                    model = moments.Transformer(**SHAPE | fields | depth)
                except moments.DomainError:
                    continue
                yield f"{name}, tokens {kind}, {layers} layers", model, given
        for causal in (False, True):
            ids = {"token_ids": rng.integers(0, 20, (2, 16))}
            yield f"text, causal {causal}, {layers} layers", text_models(causal), ids
    long = moments.Transformer(**SHAPE | {"seq_len": 128, "layers": 3, "causal": True})
    yield "classes, pre", long, {"correlation": 0.2}
    yield "classes, post", long.replace(norm="post"), {"correlation": 0.2}
    for row in moments.schemes():
        for norm in ("pre", "post"):
            try:
                model = moments.Transformer(**SHAPE | {"layers": 3, "norm": norm})
                model = model.with_scheme(row.name)
            except (moments.DomainError, TypeError):
                continue
            yield f"{row.name}, {norm}", model, {"tokens": False}
    for theory in ("published", "simplified"):
        for norm in ("pre", "post"):
            model = moments.Transformer(**SHAPE | {"norm": norm})
            yield f"{theory}, {norm}", model, {"theory": theory, "correlation": 0.2}


@dataclass(frozen=True)
class NarrowRotary(Rotary):
    """Rotary positions with the frequencies of narrower heads."""

    narrow: int = 64

    def check_width(self, d_head: int) -> None:
        super().check_width(self.narrow)

    def frequencies(self, d_head: int) -> tuple[Any, Any]:
        return super().frequencies(self.narrow)


def widened(model: moments.Transformer) -> moments.Transformer | None:
    """The model with heads of `WIDE_HEAD` features and all widths in proportion, with the same
    variances at every site but for terms in 1/width.

    None: the architecture has no such limit (sinusoids of every width are others)."""
    wider = WIDE_HEAD // model.d_head
    embedding, head, weights = model.embedding, model.head, model.weights
    if getattr(embedding, "positions", None) == "sinusoidal":
        return None
    smaller = {
        name: tuple(np.asarray(value) / wider) if np.ndim(value) else value / wider
        for name in MATRICES
        if (value := getattr(weights, name)) is not None
    }
    changes: dict[str, Any] = {
        "d_model": wider * model.d_model,
        "d_ff": wider * model.d_ff,
        "d_head": wider * model.d_head,
        "weights": replace(weights, **smaller),
    }
    if head is not None:  # a tied one's own logit grows with the width: it gets a matrix
        matrix = embedding.token_variance if head.tied else head.weight_variance
        changes["head"] = replace(
            head,
            tied=False,
            weight_variance=matrix / wider,
            transform_variance=head.transform_variance and head.transform_variance / wider,
        )
    if model.rotary is not None:
        changes["rotary"] = [
            one and NarrowRotary(**vars(one), narrow=model.d_head) for one in model.rotaries
        ]
    if model.encoder is not None:
        encoder = widened(model.encoder)
        if encoder is None:
            return None
        changes["encoder"] = encoder
    return model.replace(**changes)


def wide_cases() -> Iterator[tuple[str, moments.Transformer, dict[str, Any]]]:
    for name, model, given in cases():
        if "theory" in given:
            continue
        wide = widened(model)
        if wide is not None:
            yield name, wide, given


def answers(of: Iterator[tuple[str, moments.Transformer, dict[str, Any]]]) -> dict[str, Any]:
    kept: dict[str, np.ndarray] = {}
    for name, model, given in of:
        try:
            p = moments.predict(model, **given)
        except moments.DomainError:
            kept[f"{name}|refused"] = np.ones(1)
            continue
        refined = given.get("theory", "refined") == "refined"
        for array in STREAM if refined else STREAM[:-1]:
            kept[f"{name}|{array}"] = np.asarray(getattr(p, array), float)
        if refined and p.grad_variance_band is not None:
            kept[f"{name}|band"] = np.asarray(p.grad_variance_band, float)
        if p.loss is not None:
            kept[f"{name}|loss"] = np.array([p.loss, p.logit_variance], float)
        if model.layers <= SITES:
            frame = p.to_frame().select_dtypes("number")
            kept[f"{name}|sites"] = frame.to_numpy(float, na_value=-1.0)
        if refined:
            kept[f"{name}|weights"] = p.weight_gradients()["squared_norm"].to_numpy(float)
        if "-v" in sys.argv:
            print(name, flush=True)
    return {key: rounded(value) for key, value in kept.items()}


def rounded(values: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2.0**KEPT_BITS), exponent - KEPT_BITS)


def write(file: Path, of: dict[str, np.ndarray]) -> None:
    """One array of all values: every array of an archive costs as much as a hundred numbers."""
    shapes = np.array([value.shape + (0,) * (2 - value.ndim) for value in of.values()])
    flat = np.concatenate([value.ravel() for value in of.values()])
    np.savez_compressed(file, names=np.array(list(of)), shapes=shapes, values=flat)


def read(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as stored:
        shapes = [tuple(int(n) for n in shape if n) for shape in stored["shapes"]]
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        parts = np.split(stored["values"], ends)
        named = zip(stored["names"], parts, shapes, strict=True)
        return {str(name): part.reshape(shape) for name, part, shape in named}


def difference(now: np.ndarray, then: np.ndarray) -> float:
    if now.shape != then.shape:
        return float("inf")
    scale = np.abs(then).max(axis=0 if then.ndim == 2 else None, initial=1e-300)
    return float(np.max(np.abs(now - then) / scale, initial=0.0))


def compared(name: str, now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Whether nothing moved; prints what did."""
    moved = {key: difference(now[key], then[key]) for key in then if key in now}
    lost = sorted(set(then) ^ set(now))
    worse = sorted((key for key in moved if moved[key] > TOLERANCE), key=lambda k: -moved[k])
    for key in lost:
        print(f"{name}: {key:60} on one side only")
    for key in worse:
        print(f"{name}: {key:60} {moved[key]:.1e}")
    beyond = f"{len(worse)} beyond {TOLERANCE:g}, {len(lost)} on one side only"
    print(f"{name}: {len(moved)} compared, {beyond}")
    return not worse and not lost


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=["write", "check"])
    parser.add_argument("-v", action="store_true", help="names each case")
    parser.add_argument("--folder", type=Path, default=DATA, help="where the two files lie")
    given = parser.parse_args()
    warnings.simplefilter("ignore", moments.ValidityWarning)
    same = True
    for name, of in (("golden", cases()), ("golden_wide", wide_cases())):
        now, file = answers(of), given.folder / f"{name}.npz"
        if given.command == "write":
            write(file, now)
            print(name, len(now), "arrays,", file.stat().st_size // 1024, "KiB")
            continue
        same = compared(name, now, read(file)) and same
    sys.exit(not same)


if __name__ == "__main__":
    main()
