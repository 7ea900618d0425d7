"""Classes of positions against every token: what they lose, and what they cost.

    python benchmarks/position_classes.py            # measures and stores, about ten minutes
    python benchmarks/position_classes.py --only "twice the classes"    # a section again
    python benchmarks/position_classes.py --show     # prints what is stored

Errors are the largest over layers, those of queries and keys include what grouped rows cost by
token, unless every row is a class of its own there. Long sequences are compared with twice the
classes. Times are processor seconds of one thread in one run, so that their ratio is what to quote.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd

import moments
from moments.engine.classes import PER_OCTAVE, PositionClasses
from moments.layers.attention.kernels import attention
from moments.prediction import resolution

DATA = Path(__file__).parent / "data" / "position_classes.json"
PLAIN = {"layers": 12, "d_model": 256, "heads": 4, "dropout": 0.1, "causal": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Pre-LN, 12 x 128": (moments.Transformer(**PLAIN, seq_len=128), {"correlation": 0.2}),
    "Post-LN, 12 x 128": (
        moments.Transformer(**PLAIN, seq_len=128, norm="post"),
        {"correlation": 0.2},
    ),
    "gated, grouped heads, 12 x 128": (
        moments.Transformer(
            **PLAIN | {"dropout": 0.0, "heads": 8},
            seq_len=128,
            kv_heads=2,
            normalization="rmsnorm",
            activation="swiglu",
        ),
        {"correlation": 0.1},
    ),
    "Pre-LN, 4 x 384": (moments.Transformer(**PLAIN | {"layers": 4}, seq_len=384), {}),
    "GPT-2 small, 12 x 128": (moments.preset("gpt2", seq_len=128), {}),
    "GPT-2 small, 2 x 512": (moments.preset("gpt2", seq_len=512).replace(layers=2), {}),
}
SMALL = {"layers": 3, "d_model": 256, "heads": 4, "dropout": 0.1, "causal": True, "seq_len": 64}
ROTARY = moments.Rotary()
OWN_ROWS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gated, grouped heads, 3 x 128": (
        CASES["gated, grouped heads, 12 x 128"][0].replace(layers=3),
        CASES["gated, grouped heads, 12 x 128"][1],
    ),
    "gated, grouped heads, 12 x 128": CASES["gated, grouped heads, 12 x 128"],
    "Llama 3 8B, 2 x 64": (moments.preset("llama-3-8b", seq_len=64).replace(layers=2), {}),
    **{
        f"{name}, 3 x 64": (
            moments.Transformer(**SMALL | fields),
            {"correlation": 0.2},
        )
        for name, fields in {
            "rotary": {"rotary": ROTARY},
            "rotary, Post-LN": {"rotary": ROTARY, "norm": "post"},
            "window of 16": {"window": 16},
            "window of 8": {"window": 8},
            "rotary, window of 16": {"rotary": ROTARY, "window": 16},
            "normalised queries and keys, rotary": {"rotary": ROTARY, "qk_norm": "layernorm"},
            "biases, rotary": {
                "rotary": ROTARY,
                "biases": moments.Biases(query=0.3, key=0.3, value=0.2),
            },
        }.items()
    },
    "relative biases of variance .3, 3 x 64": (
        moments.Transformer(**SMALL, relative_bias=moments.RelativeBias(0.3)),
        {"correlation": 0.2},
    ),
    "relative biases of variance .3, one class, 3 x 64": (
        moments.Transformer(**SMALL | {"causal": False}, relative_bias=moments.RelativeBias(0.3)),
        {"correlation": 0.2},
    ),
    "decoder on classes, encoder alike, 2 x 64": (
        moments.Transformer(
            **SMALL | {"layers": 2}, encoder=moments.Transformer(2, 256, 4, 48, dropout=0.1)
        ),
        {"correlation": 0.2},
    ),
    "24 layers, Post-LN, 24 x 64": (
        moments.Transformer(**SMALL | {"layers": 24, "d_model": 128, "norm": "post"}),
        {},
    ),
}
ROTARY_ALIKE: dict[str, tuple[Any, dict[str, Any]]] = {
    f"{length} tokens of correlation {correlation}": (
        moments.Transformer(3, 256, 4, length, dropout=0.1, rotary=ROTARY),
        {"correlation": correlation},
    )
    for length, correlation in ((64, 0.2), (128, 0.2), (64, 0.6))
}


def text(*shape: int) -> np.ndarray:
    """Tokens by Zipf's law."""
    share = 1.0 / np.arange(1.0, 50258)
    return np.random.default_rng(0).choice(50257, shape, p=share / share.sum())


GPT2_SMALL = moments.preset("gpt2", seq_len=64).replace(layers=4)


def by_zipf(*shape: int, vocab_size: int = 30000) -> np.ndarray:
    """Words drawn by Zipf's law; none pads."""
    shares = 1.0 / np.arange(1.0, vocab_size + 1.0)
    rng = np.random.default_rng(2)
    return 5 + rng.choice(vocab_size, size=shape, p=shares / shares.sum())


PACKED = {"correlation": 0.2, "document_ids": np.repeat([0, 1, 2], [64, 40, 52])}
LENGTHS = np.array([[64], [40], [50], [33]])
SEVERAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "GPT-2 small on 2 texts of 64, 4 layers": (GPT2_SMALL, {"token_ids": text(2, 64)}),
    "GPT-2 small on 4 texts of 64, 4 layers": (GPT2_SMALL, {"token_ids": text(4, 64)}),
    "4 texts padded from 64, 40, 50 and 33": (
        GPT2_SMALL,
        {"token_ids": text(4, 64), "attention_mask": np.arange(64) < LENGTHS},
    ),
    **{
        f"packed rows of 64, 40 and 52, {name}, 3 layers": (
            moments.Transformer(**SMALL | {"seq_len": 156, "dropout": 0.0} | fields),
            PACKED,
        )
        for name, fields in {
            "Pre-LN": {},
            "Post-LN": {"norm": "post"},
            "rotary": {"rotary": ROTARY},
            "window of 16": {"window": 16},
            "relative biases of variance .3": {"relative_bias": moments.RelativeBias(0.3)},
        }.items()
    },
}
PLACED: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        f"sinusoidal positions, tables of variance {variance}, {layers} x {length}": (
            moments.Transformer(
                **SMALL | {"layers": layers, "seq_len": length},
                embedding=moments.Embedding(30000, variance, positions="sinusoidal"),
            ),
            {},
        )
        for variance, layers, length in ((1.0, 4, 64), (1.0, 2, 128), (0.5, 4, 64))
    },
    **{
        f"{name} without a mask, 3 x 64": (
            moments.Transformer(**SMALL | {"causal": False} | fields),
            {"correlation": 0.2},
        )
        for name, fields in {
            "windows of 16": {"window": 16},
            "windows of 8": {"window": 8},
            "windows of 16, Post-LN": {"window": 16, "norm": "post"},
            "windows of 16 and none, rotary": {"window": (16, None, 16), "rotary": ROTARY},
        }.items()
    },
}
STRONG = {
    "vocab_size": 32000,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
GPT = {"model_type": "gpt2", "vocab_size": 32000, "n_embd": 256, "n_head": 4, "n_layer": 2}
WORDS = {
    f"{name}, 2 x {length}": (
        moments.from_huggingface(config).replace(seq_len=length, dropout=0.0),
        {"token_ids": by_zipf(length)},
    )
    for name, length, config in (
        ("Llama", 512, {"model_type": "llama"} | STRONG),
        ("Mistral, window 96", 384, {"model_type": "mistral", "sliding_window": 96} | STRONG),
        ("Qwen 2, tied", 384, {"model_type": "qwen2"} | STRONG | {"tie_word_embeddings": True}),
        ("GPT-2, tied", 384, GPT | {"initializer_range": 0.06, "n_positions": 384}),
        (
            "Pythia",
            384,
            {"model_type": "gpt_neox", "rotary_pct": 0.25}
            | {name: value for name, value in STRONG.items() if name != "num_key_value_heads"},
        ),
        (
            "BERT",
            384,
            {"model_type": "bert", "max_position_embeddings": 384, "vocab_size": 32000}
            | {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
            | {"intermediate_size": 512, "initializer_range": 0.06},
        ),
    )
}
BATCHES = {
    f"{name}, 2 layers": (
        moments.from_huggingface(config).replace(seq_len=given["token_ids"].shape[-1], dropout=0.0),
        given,
    )
    for name, config, given in (
        (
            "Llama on 2 texts of 288",
            {"model_type": "llama"} | STRONG,
            {"token_ids": by_zipf(2, 288)},
        ),
        (
            "Llama on 2 texts of 288, a third in common",
            {"model_type": "llama"} | STRONG,
            {"token_ids": np.concatenate([by_zipf(1, 96)[[0, 0]], by_zipf(2, 192)], 1)},
        ),
        (
            "Mistral, window 96, packed rows of 320 and 240",
            {"model_type": "mistral", "sliding_window": 96} | STRONG,
            {"token_ids": by_zipf(560), "document_ids": np.repeat([0, 1], [320, 240])},
        ),
        (
            "GPT-2, tied, on 3 texts of 192",
            GPT | {"initializer_range": 0.08, "n_positions": 192},
            {"token_ids": by_zipf(3, 192)},
        ),
        (
            "GPT-2, tied, on 3 texts padded from 256, 200 and 120",
            GPT | {"initializer_range": 0.08, "n_positions": 256},
            {
                "token_ids": by_zipf(3, 256),
                "attention_mask": np.arange(256) < np.array([[256], [200], [120]]),
            },
        ),
        (
            "Gemma, tied, on 2 texts of 288",
            {"model_type": "gemma", "head_dim": 64} | STRONG | {"tie_word_embeddings": True},
            {"token_ids": by_zipf(2, 288)},
        ),
    )
}
UNKNOWN = {
    **{
        f"tied tables of variance {variance}, {name}, 3 x 96": moments.Transformer(
            **SMALL | {"dropout": 0.0, "seq_len": 96} | fields,
            embedding=moments.Embedding(1000, variance, positions="none"),
            head=moments.Head(),
        )
        for variance in (1.0, 0.01)
        for name, fields in {
            "Pre-LN": {},
            "Post-LN": {"norm": "post"},
            "window of 16": {"window": 16},
            "rotary": {"rotary": ROTARY},
        }.items()
    },
    **{
        f"{name}, 2 x 128": moments.from_huggingface(config).replace(seq_len=128, dropout=0.0)
        for name, config in {
            "Llama": {"model_type": "llama"} | STRONG,
            "Llama, faint logits": {"model_type": "llama"} | STRONG | {"initializer_range": 0.04},
            "GPT-2, tied": GPT | {"n_layer": 2, "initializer_range": 0.04, "n_positions": 128},
        }.items()
    },
}
"""Predicted without a text, against the mean over texts by Zipf's law."""

DRAWN = 16
"""Texts of that mean."""

HALVED = {
    "Llama 3 8B, 32 x 8192": moments.preset("llama-3-8b"),
    "GPT-Neo 125M, 12 x 2048": moments.preset("gpt-neo-125m"),
    "Pythia 160M, 12 x 2048": moments.preset("pythia-160m"),
    "Mistral 7B, 4 x 32768": moments.preset("mistral-7b").replace(layers=4),
    "T5 small, 6 x 8192": moments.preset("t5-small").replace(seq_len=8192),
}
LONG = (1024, 8192, 131072)
SECONDS = ("llama-3-8b", "mistral-7b", "qwen3-8b", "gpt-neo-125m", "t5-small")


def timed(model: Any, **given: Any) -> tuple[moments.Prediction, float]:
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moments.ValidityWarning)
        found = moments.predict(model, **given)
    return found, time.process_time() - start


def largest(found: Any, expected: Any) -> float:
    return float(np.abs(np.asarray(found) / np.asarray(expected) - 1).max())


@contextmanager
def without_words() -> Iterator[None]:
    """Unknown texts by means over cells, as each token by itself has the mean of all."""
    with mock.patch.object(resolution, "repeating", return_value=False):
        yield


def compared(model: Any, given: dict[str, Any], tokens: bool | None = None) -> dict[str, Any]:
    """One case, by token once and on classes twice: the second has no tables to build."""
    exact, seconds = timed(model, tokens=True, **given)
    with nullcontext() if "token_ids" in given else without_words():
        timed(model, tokens=tokens, **given)
        found, own = timed(model, tokens=tokens, **given)
    bands = [np.log(p.grad_variance_band[1] / p.grad_variance_band[0]) for p in (found, exact)]
    frames = [p.weight_gradients().set_index(["layer", "weight"]) for p in (found, exact)]
    ratio = (frames[0] / frames[1])["squared_norm"].dropna()
    ratio = ratio.drop("key.bias", level=1, errors="ignore")
    sharp = ratio.index.get_level_values(1).str.startswith(("query", "key"))
    return {
        "classes": 1
        if found.layout.classes is None
        else len(found.layout.classes.one_document.nodes),
        "variance": largest(found.variance, exact.variance),
        "correlation": float(np.abs(found.correlation - exact.correlation).max()),
        "gradient": largest(found.grad_variance, exact.grad_variance),
        "weight gradients": float(abs(ratio[~sharp] - 1).max()),
        "queries and keys": float(abs(ratio[sharp] - 1).max()),
        "band": largest(bands[0], bands[1]),
        "seconds by token": seconds,
        "seconds on classes": own,
    }


def over_texts(model: Any) -> dict[str, Any]:
    """Without a text, against the mean over texts by Zipf's law, each token by itself; and by means
    over cells, which no two of its tokens are."""
    shares = 1.0 / np.arange(1.0, model.embedding.vocab_size + 1.0)
    draw = np.random.default_rng(0)
    texts = [
        draw.choice(len(shares), size=model.seq_len, p=shares / shares.sum()) for _ in range(DRAWN)
    ]
    each = [timed(model, tokens=True, token_ids=ids)[0] for ids in texts]
    found = {"": timed(model)[0]}
    with without_words():
        found[" by means"] = timed(model)[0]

    def norms(prediction: Any) -> Any:
        frame = prediction.weight_gradients().set_index(["layer", "weight"])["squared_norm"]
        return frame.drop("key.bias", level=1, errors="ignore")

    drawn = pd.concat([norms(one) for one in each], axis=1)
    mean, error = drawn.mean(axis=1), drawn.sem(axis=1)
    sharp = mean.index.get_level_values(1).str.startswith(("query", "key"))
    results: dict[str, Any] = {}
    for name, one in found.items():
        ratio = norms(one) / mean - 1
        results |= {
            f"weight gradients{name}": float(ratio[~sharp].loc[abs(ratio[~sharp]).idxmax()]),
            f"queries and keys{name}": float(ratio[sharp].loc[abs(ratio[sharp]).idxmax()]),
            f"variance{name}": largest(one.variance, np.mean([p.variance for p in each], 0)),
            f"correlation{name}": float(
                np.abs(one.correlation - np.mean([p.correlation for p in each], 0)).max()
            ),
        }
    return results | {
        "standard error": float((error / mean)[~sharp].max()),
        "of queries and keys": float((error / mean)[sharp].max()),
    }


def own_rows(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """`compared`, by token with a class for every row."""
    kept, attention.SUPPORT_SLACK = attention.SUPPORT_SLACK, 0.0
    try:
        return compared(model, given)
    finally:
        attention.SUPPORT_SLACK = kept


def halved(model: Any) -> dict[str, Any]:
    """The classes of today against twice as many."""
    found, seconds = timed(model)
    of = PositionClasses.for_length

    def finer(
        length: int,
        window: int | None = None,
        per_octave: float = PER_OCTAVE,
        widening: float = 0.0,
        **_: Any,
    ) -> PositionClasses:
        steps = {"per_octave": 2.0 * per_octave, "widening": 0.5 * widening}
        return of(length, window, per_window=8.0, **steps)

    PositionClasses.for_length = staticmethod(finer)  # type: ignore[method-assign, assignment]
    try:
        fine, longer = timed(model)
    finally:
        PositionClasses.for_length = of  # type: ignore[method-assign]
    frames = [p.weight_gradients().set_index(["layer", "weight"]) for p in (found, fine)]
    ratio = (frames[0] / frames[1])["squared_norm"].dropna()
    names = ratio.index.get_level_values(1)
    ratio, names = ratio[names != "key.bias"], names[names != "key.bias"]
    sharp = names.str.startswith(("query", "key"))
    return {
        "classes": [len(p.layout.classes.one_document.nodes) for p in (found, fine)],
        "variance": largest(found.variance, fine.variance),
        "correlation": float(np.abs(found.correlation - fine.correlation).max()),
        "gradient": largest(found.grad_variance, fine.grad_variance),
        "weight gradients": float(abs(ratio[~sharp] - 1).max()),
        "queries and keys": float(abs(ratio[sharp] - 1).max()),
        "seconds": [seconds, longer],
    }


def seconds(model: Any) -> float:
    """Of a prediction that has its tables."""
    timed(model)
    return timed(model)[1]


GPT2 = {
    f"GPT-2 small, 12 x {length}": moments.preset("gpt2").replace(seq_len=length) for length in LONG
}
LONGEST = {"t5-small, 131072": moments.preset("t5-small").replace(seq_len=131072)}
PRESETS = LONGEST | {f"{name}, default length": moments.preset(name) for name in SECONDS}
SECTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "cases": (lambda case: compared(*case), CASES),
    "rotary positions without a mask": (
        lambda case: compared(case[0], case[1], tokens=False),
        ROTARY_ALIKE,
    ),
    "rows of their own": (lambda case: own_rows(*case), OWN_ROWS),
    "unknown texts": (over_texts, UNKNOWN),
    "texts under strong logits": (lambda case: compared(*case), WORDS),
    "several texts under strong logits": (lambda case: compared(*case), BATCHES),
    "several documents": (lambda case: own_rows(*case), SEVERAL),
    "places": (lambda case: own_rows(*case), PLACED),
    "twice the classes": (halved, HALVED),
    "seconds": (seconds, GPT2 | PRESETS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--only", choices=SECTIONS, nargs="*", help="sections to measure again")
    parser.add_argument("--missing", action="store_true", help="only what is not stored")
    parsed = parser.parse_args()
    if not parsed.show:
        stored = json.loads(DATA.read_text(encoding="utf-8"))
        stored["machine"] = f"{platform.machine()}, {os.cpu_count()} processors"
        for section in parsed.only or SECTIONS:
            measure, cases = SECTIONS[section]
            if not parsed.missing:
                stored[section] = {}
            found = stored.setdefault(section, {})
            for name, case in cases.items():  # what is measured is kept, should the rest be stopped
                if name in found:
                    continue
                stored[section][name] = measure(case)
                DATA.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(DATA.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
