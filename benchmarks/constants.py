"""Measure the effect of every number in the engine that has no derivation.

Each constant is set to other values, one at a time, and a few small models that use it are
predicted. Stored is the largest change, over those models and over layers and matrices, of forward
variance, token correlation (absolute), gradient variance, weight gradients and the standard
deviation of one draw.

    python benchmarks/constants.py         # measures and stores, some ten minutes
    python benchmarks/constants.py page > docs/theory/constants.md
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import moments

DATA = Path(__file__).parent / "data" / "constants.json"
QUANTITIES = ("variance", "correlation", "gradient", "weight gradients", "deviation")
KERNELS = "layers.attention.kernels"


class Constant(NamedTuple):
    """A constant and the values to try instead.

    Attributes:
        module: its module, below `moments`.
        name: its name there; a function if the choice is one.
        others: values or functions tried instead.
        why: its kind, a key of `WORDS`.
        models: the models of `MODELS` that use it, the one that depends on it most first.
    """

    module: str
    name: str
    others: tuple[Any, ...]
    why: str
    models: tuple[str, ...]


BY_TOKEN = ("text", "rotary", "distances")
MIXED = ("state space", "delta rule")
CLASSES = ("long", "long rotary", "no text", "long text")
ROWS = (*BY_TOKEN, *CLASSES)
TABLE = (
    Constant(f"{KERNELS}.joint_laws", "EXPONENT_MAX", (30.0, 80.0), "range", ("hot", "text")),
    Constant(f"{KERNELS}.joint_laws", "TOLERANCE", (2e-4, 2e-6), "precision", ROWS),
    Constant(f"{KERNELS}.joint_laws", "ITERATIONS", (15, 60), "precision", ("hot", "text")),
    Constant(f"{KERNELS}.joint_laws", "SELF_SWEEPS", (1, 4), "precision", ROWS),
    Constant(f"{KERNELS}.joint_laws", "JOINT_SWEEPS", (2, 6), "precision", BY_TOKEN),
    Constant(f"{KERNELS}.joint_laws", "TANGENT_SWEEPS", (3, 12), "precision", ("rotary",)),
    Constant(
        f"{KERNELS}.row_statistics", "NEAREST_END", (0.8, 0.95), "precision", ("close", "text")
    ),
    Constant(f"{KERNELS}.row_statistics", "MOST_ORDERS", (6, 14), "precision", ("hot", "text")),
    Constant(f"{KERNELS}.row_statistics", "TOLERANCE", (1e-1, 4e-3), "precision", BY_TOKEN),
    Constant(f"{KERNELS}.relative_positions", "TURNS", (1.0, 4.0), "choice", ("rotary",)),
    Constant(
        f"{KERNELS}.relative_positions", "TERM_TOLERANCE", (0.05, 0.002), "precision", ("rotary",)
    ),
    Constant(f"{KERNELS}.row_statistics", "LEAST_SCALE", (1e-2, 1e-4), "range", ("text",)),
    Constant(f"{KERNELS}.row_statistics", "LEAST_RESPONSE", (1e-2, 1e-4), "range", BY_TOKEN),
    Constant(f"{KERNELS}.row_statistics", "FEWEST_KEYS", (2.5, 4.0), "choice", BY_TOKEN),
    Constant(f"{KERNELS}.attention", "EXACT_KEYS", (2, 8), "precision", BY_TOKEN),
    Constant(f"{KERNELS}.attention", "SUPPORT_SLACK", (0.6, 0.1), "precision", BY_TOKEN),
    Constant(f"{KERNELS}.attention", "NORM_STEP", (0.2, 0.01), "precision", ("bare", *BY_TOKEN)),
    Constant(f"{KERNELS}.attention", "LEAST_WEIGHT", (1e-2, 1e-5), "precision", ("distances",)),
    Constant(f"{KERNELS}.joint_laws", "RHO_MIN", (1e-2, 1e-5), "precision", BY_TOKEN),
    Constant(f"{KERNELS}.rows", "FAINT", (1e-4, 1e-7), "range", ("text",)),
    Constant("layers.attention.softmax", "THETA_PEAKED", (100.0,), "range", ("hot",)),
    Constant("layers.attention.layers", "HEADS_RESOLVED", (2, 8), "precision", ("distances",)),
    Constant("layers.experts.routing", "STEP", (0.1, 0.4), "precision", ("experts",)),
    Constant("layers.experts.routing", "FINE", (0.025, 0.1), "precision", ("experts",)),
    Constant("layers.experts.routing", "OF_LOG", (0.25, 0.8), "precision", ("experts",)),
    Constant("layers.experts.routing", "MOST_OF_LOG", (1.0, 3.0), "precision", ("experts",)),
    Constant("layers.experts.routing", "OCTAVE", (0.1, 0.4), "precision", ("experts",)),
    Constant("layers.experts.routing", "SAMPLES", (5000, 80000), "precision", ("grouped",)),
    Constant("layers.recurrent.drawn", "ENTRIES", (1 << 22, 1 << 26), "precision", MIXED),
    Constant("layers.recurrent.mixers", "MOST_HEADS", (8, 16), "precision", ("state space",)),
    Constant("layers.recurrent.mixers", "MOST_FEATURES", (128,), "precision", ("state space",)),
    Constant("layers.recurrent.leaf", "BAND_DRAWS", (8, 64), "precision", MIXED),
    Constant("layers.attention.sinks", "NODES", (24, 80), "precision", ("sinks",)),
    Constant("layers.attention.sinks", "DEGREES", (8, 24), "precision", ("sinks",)),
    Constant("layers.attention.sinks", "STEP", (1.0, 0.25), "precision", ("sinks",)),
    Constant("layers.attention.sinks", "SHARED_NODES", (8, 28), "precision", ("sinks",)),
    Constant("layers.streams", "NODES", (7, 13), "precision", ("streams",)),
    Constant("layers.streams", "DRAWS", (2**10, 2**14), "precision", ("streams",)),
    Constant("layers.streams", "POINTS", (48, 192), "precision", ("streams",)),
    Constant("layers.attention.layers", "PROFILED_SCALE", (0.0,), "precision", ("alike",)),
    Constant("layers.attention.layers", "_NODES", (20, 80), "precision", ("alike",)),
    Constant("layers.attention.projections", "FAINTEST", (1e-7, 1e-12), "range", ("alike",)),
    Constant("layers.attention.self_attention", "LEAST_FREEDOM", (3.5, 6.0), "range", ("hybrid",)),
    Constant("layers.attention.softmax", "CORRECTED_MAX", (15.0,), "range", ("hot", "alike")),
    Constant("engine.classes", "SUMMED", (16, 256), "precision", ("long",)),
    Constant("engine.classes", "LEAST_SHARED", (1e-3, 1e-12), "range", ("packed",)),
    Constant(
        f"{KERNELS}.relative_positions", "LEAST_PAIRS", (1e-3, 1e-9), "range", ("long rotary",)
    ),
    Constant("prediction.resolution", "LAST_PER_OCTAVE", (1.0, 2.0), "precision", ("no text",)),
    Constant("prediction.resolution", "WIDENING", (0.0, 0.1), "precision", ("no text",)),
    Constant(f"{KERNELS}.row_statistics", "LEAST_OWN", (0.01, 0.2), "range", ("text",)),
    Constant("layers.attention.response", "BEND_STEP", (0.05, 0.008), "step", ("text",)),
    Constant("layers.attention.response", "LEAST_BENT", (1e-2, 1e-4), "range", ("text",)),
    Constant("noise.band", "TARGETS", (5, 17), "precision", ("deep",)),
    Constant("noise.band", "ALIKE_TARGETS", (65, 257), "precision", ("thousand",)),
    Constant("noise.sources", "MODE_STEP", (1e-4, 1e-6), "step", ("encoder",)),
    Constant("engine.response", "STEP", (1e-3, 1e-5), "step", ("text",)),
    Constant("layers.by_law", "MOST_NUMBERS", (2**15, 2**19), "precision", ("own block",)),
    Constant("noise.sources", "_COARSE", (3e-2, 3e-3), "step", ("alike", "text")),
    Constant("noise.sources", "_NODES", (5, 17), "precision", ("alike", "text")),
    Constant("layers.normalization", "_EXPANDED", (0.02, 0.2), "range", ("narrow",)),
    Constant("layers.head.cross_entropy", "_STEP", (0.5, 0.2), "precision", ("alike", "text")),
    Constant("layers.head.softmax_agreement", "_FLAT", (0.3, 3.0), "choice", ("peaked",)),
    Constant("layers.head.softmax_agreement", "_STEP", (0.5, 0.2), "precision", ("peaked",)),
    Constant("layers.head.readout", "_STILL", (1e-1, 1e-5), "precision", ("peaked",)),
)

WORDS = {
    "precision": "resolution of a computation with a known exact result; finer means less error",
    "step": "step of a numerical difference; larger means more error, smaller more rounding",
    "range": "a limit that keeps numbers finite, or that few models reach",
    "choice": "a rule in whose place another would do as well",
}

# --- models ---------------------------------------------------------------------------------------


def _words(*shape: int) -> np.ndarray:
    return np.asarray(np.random.default_rng(0).zipf(1.3, size=shape) % 200)


TEXT = _words(32)


def _plain(**changes: Any) -> moments.Transformer:
    given: dict[str, Any] = {"layers": 2, "d_model": 128, "heads": 4, "seq_len": 32}
    return moments.Transformer(**(given | changes))


def _mixed(mixer: Any) -> moments.Transformer:
    return _plain(causal=True, normalization="rmsnorm", mixer=mixer)


def _head(**changes: Any) -> dict[str, Any]:
    table = moments.Embedding(200, 0.5, positions="none")
    return {
        "embedding": table,
        "head": moments.Head(**({"tied": False, "weight_variance": 1.5 / 128} | changes)),
    }


def _encoder(prediction: moments.Prediction) -> moments.Prediction:
    assert prediction.encoder is not None
    return prediction.encoder


def _own(x: Any, w: Any) -> Any:
    """Averages over the tokens before, behind a gate."""
    count = x.shape[-1]
    a = np.tril(np.ones((count, count))) / np.arange(1, count + 1)[:, None]
    return w.output(moments.laws.activation("sigmoid", w.gate(x)) * (a @ w.value(x) @ a.T))


SQUARE = ("d_model", "d_model")

MODELS: dict[str, Callable[[], Any]] = {
    "own block": lambda: moments.predict(
        _plain(
            mixer=moments.block(
                law=_own, weights=dict.fromkeys(("gate", "value", "output"), SQUARE)
            )
        ),
        correlation=0.3,
    ),
    "text": lambda: moments.predict(
        _plain(causal=True, dropout=0.1, activation="gelu", **_head()), token_ids=TEXT
    ),
    "rotary": lambda: moments.predict(
        _plain(
            causal=True,
            normalization="rmsnorm",
            gated=True,
            activation="silu",
            rotary=moments.Rotary(),
            kv_heads=2,
        ),
        correlation=0.3,
        tokens=True,
    ),
    "distances": lambda: moments.predict(
        _plain(causal=True, alibi=True, heads=8), correlation=0.3, tokens=True
    ),
    "sinks": lambda: moments.predict(
        _plain(causal=True, attention_sink=1.0), correlation=0.3, tokens=True
    ),
    "streams": lambda: moments.predict(
        _plain(causal=True, streams=moments.HyperConnections(4, variance=6.5 / 512)),
        correlation=0.3,
    ),
    "experts": lambda: moments.predict(
        _plain(
            normalization="rmsnorm",
            norm_epsilon=0.3,
            ffn=moments.Experts(16, 2, router_bias_variance=0.3),
        ),
        correlation=0.3,
        tokens=False,
    ),
    "grouped": lambda: moments.predict(
        _plain(ffn=moments.Experts(16, 4, rule="sigmoid", groups=4, kept_groups=2)),
        correlation=0.3,
        tokens=False,
    ),
    "state space": lambda: moments.predict(
        _mixed(moments.Mamba2(32, 8, 16, 1 / 128, 1 / 128)), correlation=0.3
    ),
    "delta rule": lambda: moments.predict(
        _mixed(moments.GatedDeltaNet(4, 8, 16, 16, *(1 / 128,) * 3, rates=(0.1, 2.0))),
        correlation=0.3,
    ),
    "alike": lambda: moments.predict(
        _plain(layers=6, norm="post", dropout=0.1, **_head(loss="masked")), tokens=False
    ),
    "hybrid": lambda: moments.predict(_plain(norm="hybrid", heads=32), correlation=0.3),
    "hot": lambda: moments.predict(
        _plain(causal=True, temperature=0.15), correlation=0.3, tokens=True
    ),
    "narrow": lambda: moments.predict(
        _plain(d_model=16, heads=2, causal=True), correlation=0.3, tokens=True
    ),
    "close": lambda: moments.predict(_plain(causal=True), correlation=0.95, tokens=True),
    "bare": lambda: moments.predict(
        _plain(causal=True, norm="none", branch_scale=0.5), correlation=0.3, tokens=True
    ),
    "deep": lambda: moments.predict(
        _plain(layers=12, seq_len=12, causal=True), correlation=0.3, tokens=True
    ),
    "thousand": lambda: moments.predict(_plain(layers=1000), correlation=0.3, tokens=False),
    "encoder": lambda: _encoder(
        moments.predict(_plain(encoder=_plain()), correlation=0.3, tokens=False)
    ),
    "long rotary": lambda: moments.predict(
        _plain(causal=True, seq_len=512, rotary=moments.Rotary()), correlation=0.3
    ),
    "one class": lambda: moments.predict(
        _plain(seq_len=256, rotary=moments.Rotary()), correlation=0.3
    ),
    "packed": lambda: moments.predict(
        _plain(causal=True, seq_len=128),
        correlation=0.3,
        document_ids=np.repeat([0, 1], [80, 48]),
    ),
    "long": lambda: moments.predict(_plain(causal=True, seq_len=1024), correlation=0.3),
    "no text": lambda: moments.predict(_plain(causal=True, seq_len=2048, **_head())),
    "long text": lambda: moments.predict(
        _plain(causal=True, seq_len=512, **_head()), token_ids=_words(512)
    ),
    "peaked": lambda: moments.predict(_plain(**_head(weight_variance=0.016)), token_ids=TEXT),
}
DESCRIBED = {
    "own block": "a block given by its law, a gated average",
    "text": "causal GELU on a text with repeats, dropout, a head",
    "rotary": "rotary, grouped heads, gated units, RMSNorm, by token",
    "distances": "ALiBi of 8 heads",
    "sinks": "causal, sinks of variance 1",
    "streams": "four residual streams, logits of variance 6.5",
    "experts": "2 of 16 experts, logits of variance about 1",
    "grouped": "4 of 16 experts, of 2 of 4 groups, sigmoid gates",
    "state space": "Mamba-2 of 32 heads of 8 and 16 states",
    "delta rule": "gated delta nets of 8 heads of 16",
    "alike": "Post-LN, exchangeable tokens, masked loss",
    "hybrid": "HybridNorm with heads of 4 features",
    "hot": "causal at logit variances of 60 to 80",
    "narrow": "width 16",
    "close": "causal, tokens that correlate by .95",
    "bare": "causal, no normalisation",
    "deep": "12 layers, by token",
    "thousand": "1000 layers, exchangeable tokens",
    "encoder": "an encoder and its decoder, exchangeable tokens",
    "long": "1024 tokens on classes of positions",
    "long rotary": "rotary, 512 tokens on classes",
    "one class": "rotary without a mask, 256 exchangeable tokens",
    "packed": "rows of two documents, 128 tokens on classes",
    "no text": "2048 tokens of an unknown text on classes, a head",
    "long text": "512 tokens of a text on classes, a head",
    "peaked": "a head of logit variance 2",
}


def predicted(model: str) -> dict[str, np.ndarray]:
    """What a model is predicted to be, by quantity."""
    return _quantities(MODELS[model])


def _quantities(make: Callable[[], moments.Prediction]) -> dict[str, np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = make()
        frame = p.weight_gradients()
        low, high = p.grad_variance_band
    return {
        "variance": p.variance,
        "correlation": p.correlation,
        "gradient": p.grad_variance,
        "weight gradients": frame.squared_norm.to_numpy(),
        "deviation": np.log(high / low)[:-1] / (2 * 1.96),
    }


# --- edges: from where on something is refused or noted -------------------------------------------


class Edge(NamedTuple):
    """A limit of what classes of positions resolve, and texts on either side of it.

    Attributes:
        module, name: as of `Constant`.
        texts: each of which is predicted on classes, whatever the limit says, and by token.
        measure: what the limit is one of, from the classes of a text.
        model: in words.
    """

    module: str
    name: str
    texts: tuple[np.ndarray, ...]
    measure: Callable[[Any], float]
    model: str


def _repeating(first: int) -> np.ndarray:
    """A text whose first words are one."""
    found = _words(320)
    found[:first] = found[0]
    return found


def _copied(share: float) -> np.ndarray:
    """Two texts that agree at a share of their places, beside where they do by chance."""
    found = _words(2, 288)
    same = np.random.default_rng(1).random(288) < share
    found[1, same] = found[0, same]
    return found


EDGES = (
    Edge(
        "prediction.resolution",
        "MOST_CROWDED",
        tuple(map(_repeating, (1, 3, 4, 6, 12))),
        lambda classes: float(classes.crowded),
        "320 tokens, the first 1, 3, 4, 6, 12 one word",
    ),
    Edge(
        "prediction.resolution",
        "COPIES",
        tuple(map(_copied, (0.0, 0.25, 0.5, 1.0))),
        lambda classes: float(np.mean(classes.shares[1][0])),
        "two of 288 tokens",
    ),
)


def measured_edge(edge: Edge) -> dict[str, Any]:
    """Error of classes against every token by itself, by the value that the limit is one of."""
    found = {}
    for text in edge.texts:
        model = _plain(causal=True, seq_len=text.shape[-1], **_head())
        with changed(edge, math.inf):
            on_classes = _quantities(lambda: moments.predict(model, token_ids=text))  # noqa: B023
            classes = moments.predict(model, token_ids=text).layout.classes
        by_token = _quantities(lambda: moments.predict(model, token_ids=text, tokens=True))  # noqa: B023
        found[f"{edge.measure(classes):.2g}"] = {
            quantity: difference(on_classes[quantity], value, quantity == "correlation")
            for quantity, value in by_token.items()
        }
    return found


# --- change one number ----------------------------------------------------------------------------


def _everything() -> list[Any]:
    for found in pkgutil.walk_packages(moments.__path__, "moments."):
        if found.name.split(".")[1] not in ("torch", "simulation", "cli", "papers", "__main__"):
            importlib.import_module(found.name)
    return [m for name, m in sys.modules.items() if name.startswith("moments.")]


def _forget(modules: list[Any]) -> None:
    for module in modules:
        for value in list(vars(module).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


@contextmanager
def changed(constant: Constant | Edge, value: Any) -> Iterator[None]:
    """With the constant at another value, in every module that has it by name."""
    modules = _everything()
    home = sys.modules[f"moments.{constant.module}"]
    was = getattr(home, constant.name)
    several = [m for m in modules if vars(m).get(constant.name) is was]
    try:
        for module in several:
            setattr(module, constant.name, value)
        _forget(modules)
        yield
    finally:
        for module in several:
            setattr(module, constant.name, was)
        _forget(modules)


def difference(found: np.ndarray, base: np.ndarray, absolute: bool) -> float:
    """Largest change."""
    apart = np.abs(found - base)
    if not absolute:
        apart = apart / np.maximum(np.abs(base), 1e-300)
    return float(np.max(apart))


def measured(constant: Constant, base: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """Largest change of every quantity over a constant's models, by its other value."""
    found = {}
    for other in constant.others:
        name = other.__name__ if callable(other) else f"{other:g}"
        with changed(constant, other):
            each = {model: predicted(model) for model in constant.models}
        found[name] = {
            quantity: max(
                difference(each[m][quantity], base[m][quantity], quantity == "correlation")
                for m in constant.models
            )
            for quantity in QUANTITIES
        }
    return found


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="measure", choices=("measure", "page"))
    parser.add_argument("--only", help="names that hold this; the others stay as stored")
    given = parser.parse_args()
    if given.what == "page":
        print(page(), end="")
        return
    stored = json.loads(DATA.read_text()) if given.only and DATA.exists() else {}
    wanted = [c for c in TABLE if not given.only or given.only in f"{c.module}.{c.name}"]
    edges = [c for c in EDGES if not given.only or given.only in f"{c.module}.{c.name}"]
    base = {model: predicted(model) for model in {m: 0 for c in wanted for m in c.models}}
    for constant in [*wanted, *edges]:
        stored[f"{constant.module}.{constant.name}"] = (
            measured_edge(constant) if isinstance(constant, Edge) else measured(constant, base)
        )
        print(constant.name, file=sys.stderr, flush=True)
        order = [f"{c.module}.{c.name}" for c in (*TABLE, *EDGES)]
        stored = {name: stored[name] for name in order if name in stored}
        DATA.write_text(json.dumps(stored, indent=1) + "\n")


# --- page -----------------------------------------------------------------------------------------


def page() -> str:
    """docs/theory/constants.md."""
    stored = json.loads(DATA.read_text())
    lines = [_ABOVE.strip(), ""]
    for kind, words in WORDS.items():
        lines += [f"## {kind.capitalize()}", "", f"{words[0].upper()}{words[1:]}.", ""]
        lines += ["| constant | value | tried instead | " + " | ".join(QUANTITIES) + " | models |"]
        lines += ["| --- | --- | --- | " + "--- | " * len(QUANTITIES) + "--- |"]
        for constant in (c for c in TABLE if c.why == kind):
            lines += _rows(constant, stored[f"{constant.module}.{constant.name}"])
        lines.append("")
    lines += ["## Limits", "", *_LIMITS.strip().splitlines(), ""]
    lines += ["| limit | value | value of the text | " + " | ".join(QUANTITIES) + " | text |"]
    lines += ["| --- | --- | --- | " + "--- | " * len(QUANTITIES) + "--- |"]
    for edge in EDGES:
        lines += _rows(edge, stored[f"{edge.module}.{edge.name}"])
    lines += ["", "## Models", ""]
    lines += [f"* {name}: {words}" for name, words in DESCRIBED.items()]
    return "\n".join(lines) + "\n" + _BELOW


def _rows(constant: Constant | Edge, found: dict[str, Any]) -> Iterator[str]:
    home = importlib.import_module(f"moments.{constant.module}")
    value = getattr(home, constant.name)
    shown = "see there" if callable(value) else f"{value:g}"
    place = f"`moments/{constant.module.replace('.', '/')}.py::{constant.name}`"
    for other, changes in found.items():
        other = "another form" if callable(value) else other
        cells = [_printed(changes[quantity]) for quantity in QUANTITIES]
        seen = constant.model if isinstance(constant, Edge) else ", ".join(constant.models)
        row = [place, shown, other, *cells, seen]
        yield "| " + " | ".join(row) + " |"
        place = shown = ""


def _printed(change: float) -> str:
    return "0" if change < 1e-9 else f"{change:.1e}".replace("e-0", "e-")


_ABOVE = """
# Constants

This page lists every number in the engine that has no derivation, and its effect on predictions.
Each constant was set to the values in the column "tried instead". The other columns have the
resulting change: the largest relative change (for correlation the largest change) over the models
named, their layers and their matrices; "deviation" is the standard deviation of one draw. A zero
means that no model here reaches the limit. The models are described at the end of the page.

Numbers with a derivation (such as 3.5 in `moments/layers/attention/projections.py`) are on the
other pages. Limits of the logit variance are in [softmax statistics](softmax.md), the number of
nodes of position with its measured effect in `moments/engine/classes.py`.

The page is written by `python benchmarks/constants.py page` from `benchmarks/data/constants.json`;
do not edit it.
"""

_LIMITS = """
Two limits decide when classes of positions do not describe a text. Beyond `MOST_CROWDED` a text is
refused: it is the share of pairs of a row's keys that are the same word, beyond what the word's
frequency in the text explains. Beyond `COPIES` a note says that texts are copies: it is the share
of places at which two texts have the same word. The table has two causal layers of width 128 with a
head, predicted on classes whatever the limit: the difference from the prediction token by token.
"""

_BELOW = """
## Numbers that move no prediction

Thresholds of notes and warnings:
`moments/layers/attention/projections.py::LOGIT_VARIANCE_NOTED`,
`moments/layers/attention/layers.py::ALIKE_NOTED`,
`moments/layers/attention/layers.py::TURNED_NOTED`,
`moments/layers/attention/projections.py::CAP_NOTED`,
`moments/layers/attention/projections.py::TABLE_NOTED`, `moments/layers/normalization.py::_FAR`,
`moments/layers/normalization.py::_NOT_GAUSSIAN`, `moments/layers/head/output.py::_PEAKED`,
`moments/prediction/resolution.py::OFTEN`. Limits of work or memory:
`moments/noise/band.py::CHUNK_ENTRIES`,
`moments/layers/attention/kernels/attention.py::STACK_ENTRIES`.
"""


if __name__ == "__main__":
    main()
