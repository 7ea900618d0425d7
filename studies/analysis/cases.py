"""Named cases of the papers: their settings as data, what they claim, and what is predicted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from moments.errors import domain_error
from moments.formulas.activation import RELU
from moments.formulas.attention import UNIFORM_ATTENTION_GRADIENTS
from moments.formulas.law import Source
from moments.formulas.references import NOCI, SUN, kedia
from moments.model.embedding import Embedding
from moments.model.positions import Rotary
from moments.model.presets import preset
from moments.model.transformer import Transformer
from moments.model.weights import Weights
from moments.prediction.result import Prediction

from .fixed_points import correlation_fixed_points
from .noci import gradient_gap, linear_stack, uniform_attention
from .results import Result, expected
from .sun import angular_distance


@dataclass(frozen=True)
class PaperCase(Result):
    """What a paper reports, and what is predicted for it.

    Attributes:
        name, source, claim: which statement.
        settings: as the paper gives them; `assumed` holds what it leaves open.
        predicted, claimed: numbers by quantity; a claim in words has none.
        verdict: how the two compare, in words.
        series: columns for a plot, by name.
        notes: where the prediction left its validity.
    """

    name: str
    source: Source
    claim: str
    settings: Mapping[str, Any]
    assumed: Mapping[str, Any]
    predicted: Mapping[str, float]
    verdict: str
    claimed: Mapping[str, float] = field(default_factory=dict)
    series: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        lines = [f"{self.name} ({self.source}): {self.claim}. {self.verdict}", *self.notes]
        return "\n".join(lines)

    def _table(self) -> list[Mapping[str, Any]]:
        return [
            {"quantity": name, "predicted": value, "claimed": self.claimed.get(name, math.nan)}
            for name, value in self.predicted.items()
        ]


def limits(predictions: Iterable[Prediction]) -> tuple[str, ...]:
    """Where predictions left their validity: how many notes there are, and the first."""
    notes = list(dict.fromkeys(note for p in predictions for note in p.warnings))
    if len(notes) < 2:
        return tuple(notes)
    return (f"{notes[0]}; and {len(notes) - 1} such notes more",)


@dataclass(frozen=True)
class NamedCases(Result):
    """Cases by name."""

    cases: Mapping[str, PaperCase]

    def __getitem__(self, name: str) -> PaperCase:
        if name not in self.cases:
            raise domain_error("case", name, f"one of {', '.join(self.cases)}")
        return self.cases[name]

    @property
    def heading(self) -> str:
        return "named cases: settings, claims and predictions"

    def _table(self) -> list[Mapping[str, Any]]:
        return [{"case": name, **row} for name, case in self.cases.items() for row in case._table()]


def named_cases(names: Iterable[str] | None = None) -> NamedCases:
    """Settings that the papers report on, predicted by the engine.

    Args:
        names: which; None: all of them, up to a minute for those with sharp attention.

    Raises:
        DomainError: an unknown name.
    """
    chosen = tuple(_ALL) if names is None else tuple(names)
    for name in chosen:
        if name not in _ALL:
            raise domain_error("case", name, f"one of {', '.join(_ALL)}")
    return NamedCases({name: _ALL[name]() for name in chosen})


_ALL: dict[str, Callable[..., PaperCase]] = {}

Found = tuple[Mapping[str, float], Mapping[str, Any], Iterable[Prediction]]
"""Numbers by quantity, columns by name, and predictions whose notes matter."""


def _case(
    source: Source,
    claim: str,
    settings: Mapping[str, Any],
    assumed: Mapping[str, Any],
    verdict: str,
    claimed: Mapping[str, float] | None = None,
) -> Callable[[Callable[..., Found]], Callable[..., PaperCase]]:
    """Declare a case as a `PaperCase` says it; what follows predicts it."""

    def declare(predict: Callable[..., Found]) -> Callable[..., PaperCase]:
        name = predict.__name__

        def case(**other: Any) -> PaperCase:
            set_up = {**settings, **other}
            predicted, series, made = predict(**other)
            beside = predicted, verdict, claimed or {}, series, limits(made)
            return PaperCase(name, source, claim, set_up, assumed, *beside)

        _ALL[name] = case
        return case

    return declare


# --- Kedia et al.: large query and key weights, rank collapse, Figure 12's polynomial -------------


_INPUT = {"correlation": 0.227 * 0.9, "grad_correlation": 0.0}


@_case(
    kedia("3.3"),
    "query and key weights at 2 x Xavier make gradients explode 10,000-fold over 192 layers",
    {"layers": 192, "query and key": "2 x Xavier, all else Xavier"},
    {"d_model": 256, "heads": 4, "seq_len": 512, "dropout": 0.1, "input": _INPUT},
    "Neither the norm nor what is doubled, variance or deviation, is stated, and none of the "
    "four readings comes to the claimed order. Two simulated draws of the Pre-LN grow 192-fold "
    "(65) with doubled variances, and 1.9e8-fold (1.7e8) with doubled deviations",
    {f"{n}, {r}: over Xavier's": 1e4 for n in ("pre", "post") for r in ("variances", "deviations")},
)
def double_query_key(layers: int = 192) -> Found:
    """Growth of the gradient's variance from the output to the input."""
    base = Transformer(layers, 256, 4, 512, dropout=0.1)
    xavier, first = Weights.xavier(256, 4, 1024), base.layer_weights(1)
    predicted: dict[str, float] = {}
    made = []
    for norm in ("pre", "post"):
        growth = {}
        for reading, factor in (("Xavier", 1.0), ("variances", 2.0), ("deviations", 4.0)):
            louder = xavier.replace(query=factor * first.query, key=factor * first.key)
            p = expected(base.replace(norm=norm, weights=louder), **_INPUT)
            made.append(p)
            growth[reading] = float(p.grad_variance[0] / p.grad_variance[-1])
            predicted[f"{norm}, {reading}: growth"] = growth[reading]
        for reading in ("variances", "deviations"):
            predicted[f"{norm}, {reading}: over Xavier's"] = growth[reading] / growth["Xavier"]
    return predicted, {}, made


@_case(
    kedia("Appendix F, on Noci et al. 2022"),
    "without dropout it is the weights of variance 1/fan_out that make tokens collapse",
    {"d_model": 32, "d_ff": 128, "heads": 4, "tokens": 50, "dropout": 0.0, "activation": "relu"},
    {"layers": 12, "input correlation": 0.2, "heads": "matrices of their own"},
    "Tokens collapse with either: correlation 1 is stable whenever dropout is absent, and the "
    "weights only set the rate",
)
def fan_out_weights() -> Found:
    predicted: dict[str, float] = {}
    series = {}
    fan_out = Weights(1 / 8, 1 / 8, 1 / 8, 1 / 32, 1 / 128, 1 / 32)
    for norm in ("post", "pre"):
        for name, weights in (("1/fan_out", fan_out), ("Xavier", Weights.xavier(32, 4, 128))):
            model = Transformer(12, 32, 4, 50, norm=norm, weights=weights)
            found = correlation_fixed_points(model)
            series[f"{norm}, {name}"] = r = expected(model, correlation=0.2).correlation
            predicted[f"{norm}, {name}: correlation after 12 layers"] = float(r[12])
            predicted[f"{norm}, {name}: stationary correlation"] = found.correlation
            predicted[f"{norm}, {name}: {found.kind} rate"] = found.rate
    return predicted, series, ()


@_case(
    kedia("3.4"),
    "beta^2 = 1/N keeps tokens apart without dropout; in Pre-LN lambda = 1 slows collapse down "
    "against lambda^2 = 1 - 1/N",
    {"layers": 192, "beta^2": "1/N", "dropout": 0.0},
    {"d_model": 256, "heads": 4, "seq_len": 256, "input correlation": 0.227, "Xavier": True},
    "Both hold",
)
def small_branches() -> Found:
    layers = 192
    scales = {
        "lambda = 1, beta = 1": (1.0, 1.0),
        "lambda = 1, beta^2 = 1/N": (1.0, 1 / layers),
        "lambda^2 = 1 - 1/N, beta^2 = 1/N": (1 - 1 / layers, 1 / layers),
    }
    series = {}
    for norm in ("post", "pre"):
        base = Transformer(layers, 256, 4, 256, norm=norm)
        for name, (skip, branch) in scales.items():
            model = base.replace(skip_scale=skip**0.5, branch_scale=branch**0.5)
            series[f"{norm}, {name}"] = expected(model, correlation=0.227).correlation
    return {name: float(r[-1]) for name, r in series.items()}, series, ()


@_case(
    kedia("Figure 12 and Table 1"),
    "0.7 r + 0.3 r^2 fits the correlation that ReLU returns remarkably well",
    {"r": "0 to 1"},
    {},
    "Both coefficients are what least squares give to one digit",
    {"least squares, r": 0.7, "least squares, r^2": 0.3},
)
def relu_polynomial() -> Found:
    r = np.linspace(0.0, 1.0, 1001)
    exact, fitted = (
        RELU.law("covariance", theory)(x_variance=1.0, x_correlation=r)
        / RELU.law("variance", "published")(x_variance=1.0)
        for theory in ("published", "simplified")
    )
    linear, square = np.linalg.lstsq(np.stack([r, r**2], axis=1), exact, rcond=None)[0]
    error = np.abs(fitted - exact)
    predicted = {
        "largest error": float(error.max()),
        "mean error": float(error.mean()),
        "least squares, r": float(linear),
        "least squares, r^2": float(square),
    }
    return predicted, {"r": r, "exact": exact, "polynomial": fitted}, ()


# --- Sun et al.: angular distances at initialisation, Figures 2, 3 and 6 --------------------------


VOCABULARY, TOKENS = 32000, 256
SHORT = 32
"""Tokens read by the open models: their angles hardly depend on it."""


def text(tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> np.ndarray:
    """A sequence of words drawn by Zipf's law."""
    weights = 1 / np.arange(1, vocabulary + 1)
    draw = np.random.default_rng(0)
    return np.asarray(draw.choice(vocabulary, size=tokens, p=weights / weights.sum()))


def llama(tokens: int = TOKENS) -> Transformer:
    """LLaMA-130M, every matrix of deviation .02."""
    model = Transformer(
        12,
        768,
        12,
        tokens,
        d_ff=2048,
        normalization="rmsnorm",
        activation="swiglu",
        causal=True,
        embedding=Embedding(VOCABULARY, 0.02**2),
        rotary=Rotary(),
    )
    return model.with_scheme("normal")


def open_models() -> dict[str, Transformer]:
    """Figure 2's, as their configs initialise them; DeepSeek-7B is LLaMA-7B with 30 layers."""
    return {
        "BERT-large, Post-LN": preset("bert-large", seq_len=SHORT),
        "Qwen3-8B, Pre-LN": preset("qwen3-8b", seq_len=SHORT),
        "LLaMA2-13B, Pre-LN": preset("llama-2-13b", seq_len=SHORT),
        "DeepSeek-7B, Pre-LN": preset("llama-7b", seq_len=SHORT).replace(layers=30),
    }


def in_house() -> dict[str, Transformer]:
    """Figure 3's LLaMA-130M."""
    base = llama(SHORT)
    return {"Post-LN": base.replace(norm="post"), "Pre-LN": base}


def scaled() -> dict[str, Transformer]:
    """Figure 6's LLaMA-130M."""
    base = llama(SHORT)
    return {"Pre-LN": base, "LayerNorm Scaling": base.with_scheme("lns")}


def read_words(model: Transformer) -> Prediction:
    """A prediction of the model on `SHORT` words of its vocabulary."""
    words = 30_000  # the least of them has 30,522
    return expected(model, token_ids=text(SHORT, words))


def _angles(
    name: str,
    models: Callable[[], Mapping[str, Transformer]],
    place: str,
    claim: str,
    verdict: str,
) -> PaperCase:
    predicted, series, made = {}, {}, []
    for title, model in models().items():
        made.append(read_words(model))
        found = angular_distance(made[-1])
        step = found.from_layer(1)
        for layer in (1, model.layers // 2, model.layers):
            predicted[f"{title}: layer {layer}"] = float(step[layer - 1])
        series[title] = found.matrix
    return PaperCase(
        name,
        Source(SUN, place),
        claim,
        {"models": ", ".join(series), "distance": "equation 1, one layer"},
        {"tokens": f"{SHORT} by Zipf's law", "weights": "at initialisation, deviation .02"},
        predicted,
        verdict,
        series=series,
        notes=limits(made),
    )


_ANGLES = {
    "angles_of_open_models": (
        open_models,
        "Figure 2",
        "after training, distances fall with depth in Pre-LN, below .2 after DeepSeek-7B's 18th "
        "layer, and rise in Post-LN",
        "Both directions are there at initialisation: Pre-LN's layers add to a stream that has "
        "grown, Post-LN's to one of variance 1, and ever more alike tokens make attention add more",
    ),
    "angles_in_house": (
        in_house,
        "Figure 3",
        "after training, early Post-LN layers and late Pre-LN layers are alike",
        "Both are so at initialisation: distances fall with depth in Pre-LN, and rise in Post-LN, "
        "there by little",
    ),
    "angles_under_scaling": (
        scaled,
        "Figure 6",
        "after training, most layers turn the stream by more than .6 under LayerNorm Scaling, and "
        "by ever less in Pre-LN",
        "Not at initialisation, where scaled blocks add less and turn the stream less than plain "
        "Pre-LN's: independent blocks cannot exceed .5, so that what the figure shows is learned",
    ),
}
_ALL |= {name: partial(_angles, name, *row) for name, row in _ANGLES.items()}


# --- Noci et al.: Figures 7 and 11 to 14, Table 2's and C.1's networks ----------------------------


@_case(
    Source(NOCI, "Figure 7 and Theorem A.2"),
    "the squared distance of attention from uniform falls as d_k^-2",
    {"d_v": 100, "weights": "2/(d_v + d_k)", "draws": 200},
    {"tokens": 50, "input": "white, variance 1"},
    "It does once d_k exceeds d_v; below, attention is far from uniform",
    {"exponent from d_k = 1000": -2.0},
)
def uniformity() -> Found:
    tokens = 50
    widths = (10, 30, 100, 300, 1000, 3000, 10000)
    distances = []
    for d_head in widths:
        share = 2 / (100 + d_head)
        weights = Weights(share, share, 0.01, 0.01, 0.01, 0.01)
        model = Transformer(
            1, 100, 1, tokens, norm="none", d_head=d_head, weights=weights, activation="identity"
        )
        # The mean over rows of sum_j (a_ij - 1/n)^2, over all n^2 entries and another n^2 / n.
        found = expected(model).attention()["distance_to_uniform"].iloc[0]
        distances.append(float(found) / tokens)
    slope = np.polyfit(np.log(widths[-3:]), np.log(distances[-3:]), 1)[0]
    series = {"d_k": np.array(widths), "distance": np.array(distances)}
    return {"exponent from d_k = 1000": float(slope)}, series, ()


@_case(
    Source(NOCI, "Figure 11 and Lemma 3.3"),
    "uniform attention gives the mean norm at input deviation 1/sqrt(d), and not at 1",
    {"d": 30, "layers": "1 to 10", "draws": 1000, "input": "white"},
    {"tokens": 20, "activation": "identity", "alpha": 1.0},
    "Without normalisation the logits' variance grows as the stream's squared, so that even at "
    "1/sqrt(d) attention is sharp after ten layers. Simulated with 1,000 draws, growth is "
    "5.0e4 (standard error 0.2e4) under uniform attention, 9.1e4 (0.5e4) with softmax at "
    "1/sqrt(d) and 6.7e5 (0.2e5) at 1: there the prediction is 30 % and a factor of 4 low",
)
def norm_growth() -> Found:
    """Mean squared norm of a linear network's stream over the input's."""
    width, tokens, layers = 30, 20, 10
    closed = uniform_attention(layers, tokens, depth_scaled=False, d_model=width)
    predicted = {"uniform attention: growth": float(closed.variance[-1])}
    series, made = {"uniform": closed.variance}, []
    model = linear_stack(layers, width, tokens, 1.0)
    assert model.weights is not None
    model = model.replace(weights=model.weights.replace(query=1 / width))
    for name, variance in (("1/sqrt(d)", 1 / width), ("1", 1.0)):
        made.append(expected(model, variance=variance))
        series[f"deviation {name}"] = growth = made[-1].variance / variance
        predicted[f"softmax, deviation {name}: growth"] = float(growth[-1])
    return predicted, series, made


@_case(
    Source(NOCI, "Figures 12 to 14, equations 17 and 18"),
    "uniform attention predicts the gradients of queries and values, best for small inputs",
    {"d": "varied", "n": "varied", "correlation": "varied", "deviation": "varied"},
    {"heads": 1, "grid": "d 32, 128; n 16, 64; r 0, .3, .9; deviation .1, .5, 1"},
    "Closed form and refined theory agree at small inputs and part as the logits grow",
)
def query_value_ratio() -> Found:
    """Squared query over value gradients of one head."""
    names = ("d_model", "seq_len", "correlation", "deviation", "closed", "predicted")
    law = UNIFORM_ATTENTION_GRADIENTS.law("inverse_temperature_square")
    deviations = (0.1, 0.5, 1.0)
    rows = []
    for d, n, r, s in itertools.product((32, 128), (16, 64), (0.0, 0.3, 0.9), deviations):
        weights = Weights(1 / d, 1 / d, 1 / d, 1 / d, 1 / d, 1 / d)
        model = Transformer(1, d, 1, n, norm="none", weights=weights)
        p = expected(model, variance=s**2, correlation=r, tokens=False)
        norms = p.weight_gradients().set_index("weight")["squared_norm"]
        closed = 1 / float(law(d_model=d, seq_len=n, x_variance=s**2, x_correlation=r))
        rows.append((d, n, r, s, closed, float(norms["query"] / norms["value"])))
    table = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    gap = np.abs(np.log(table["predicted"] / table["closed"]))
    by_deviation = {
        f"deviation {s:g}: largest |log ratio|": float(gap[table["deviation"] == s].max())
        for s in deviations
    }
    return by_deviation, table, ()


@_case(
    Source(NOCI, "Figures 3 and 9, Table 2"),
    "query gradients vanish with depth in Post-LN; in Pre-LN correlation grows much slower",
    {"d_model": 32, "d_ff": 128, "heads": 4, "tokens": 50, "activation": "relu", "runs": 50},
    {"layers": 12, "weights": "Xavier", "input correlation": 0.2},
    "Both hold",
)
def gradients_in_depth() -> Found:
    predicted, series = {}, {}
    for norm in ("post", "pre"):
        p = expected(Transformer(12, 32, 4, 50, d_ff=128, norm=norm), correlation=0.2)
        series[f"{norm}, correlation"] = p.correlation
        series[f"{norm}, query / value"] = ratio = gradient_gap(p).ratio
        predicted[f"{norm}: correlation, last layer"] = float(p.correlation[-1])
        predicted[f"{norm}: query / value, layer 1"] = float(ratio[0])
        predicted[f"{norm}: query / value, last layer"] = float(ratio[-1])
    return predicted, series, ()


@_case(
    Source(NOCI, "C.1 and Figure 6"),
    "tokens of a small Post-LN network collapse and its query gradients vanish",
    {"layers": 5, "heads": 1, "tokens": 20, "d_model": 16, "alphabet": 10},
    {"d_ff": 64, "weights": "Xavier"},
    "Predicted; at width 16 a draw scatters by about 0.25",  # 1/sqrt(16)
)
def reversal() -> Found:
    """Twenty digits with sinusoidal positions."""
    width, tokens, digits = 16, 20, 10
    position = np.arange(tokens)
    rates = 10000.0 ** (-np.arange(width // 2) * 2 / width)
    # E x_i x_j per feature: table rows of variance 1 that agree with odds 1/digits, and the mean
    # over features of the two positions' sines and cosines.
    waves = np.cos((position[:, None] - position[None, :])[..., None] * rates).mean(-1) / 2
    kernel = waves + np.where(np.eye(tokens, dtype=bool), 1.0, 1 / digits)
    p = expected(Transformer(5, width, 1, tokens, norm="post"), kernel=kernel)
    ratio = gradient_gap(p).ratio
    predicted = {
        "correlation, input": float(p.correlation[0]),
        "correlation, last layer": float(p.correlation[-1]),
        "query / value, layer 1": float(ratio[0]),
        "query / value, last layer": float(ratio[-1]),
    }
    return predicted, {"correlation": p.correlation, "query / value": ratio}, ()
