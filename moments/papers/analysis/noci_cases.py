"""Cases of Noci et al.: Figures 7 and 11 to 14, Table 2's and C.1's networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ...formulas.law import Source
from ...formulas.noci import UNIFORM_ATTENTION_GRADIENTS
from ...formulas.references import NOCI
from ...model.transformer import Transformer
from ...model.weights import Weights
from .case import Case, expected, limits
from .query_value import gradient_gap
from .uniform import linear_stack, uniform_attention


def _noci(place: str) -> Source:
    return Source(NOCI, place)


def uniformity() -> Case:
    """Figure 7: attention's distance from uniform against d_k, at d_v = 100."""
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
    return Case(
        "uniformity",
        _noci("Figure 7 and Theorem A.2"),
        "the squared distance of attention from uniform falls as d_k^-2",
        {"d_v": 100, "weights": "2/(d_v + d_k)", "draws": 200},
        {"tokens": tokens, "input": "white, variance 1"},
        {"exponent from d_k = 1000": float(slope)},
        "It does once d_k exceeds d_v; below, attention is far from uniform",
        claimed={"exponent from d_k = 1000": -2.0},
        series={"d_k": np.array(widths), "distance": np.array(distances)},
    )


def norm_growth() -> Case:
    """Figure 11: mean squared norm of a linear network's stream, layers 1 to 10."""
    width, tokens, layers = 30, 20, 10
    closed = uniform_attention(layers, tokens, depth_scaled=False, d_model=width)
    predicted: dict[str, float] = {}
    series = {"uniform": closed.variance}
    made = []
    predicted["uniform attention: growth"] = float(closed.variance[-1])
    unit = 1 / width
    model = linear_stack(layers, width, tokens, 1.0).replace(
        weights=Weights(unit, unit, unit, unit, unit, unit)
    )
    for name, variance in (("1/sqrt(d)", unit), ("1", 1.0)):
        p = expected(model.replace(layers=layers), variance=variance)
        made.append(p)
        growth = p.variance / variance
        predicted[f"softmax, deviation {name}: growth"] = float(growth[-1])
        series[f"deviation {name}"] = growth
    return Case(
        "norm_growth",
        _noci("Figure 11 and Lemma 3.3"),
        "uniform attention gives the mean norm at input deviation 1/sqrt(d), and not at 1",
        {"d": width, "layers": "1 to 10", "draws": 1000, "input": "white"},
        {"tokens": tokens, "activation": "identity", "alpha": 1.0},
        predicted,
        "Without normalisation the logits' variance grows as the stream's squared, so that even at "
        "1/sqrt(d) attention is sharp after ten layers. Simulated with 1,000 draws, growth is "
        "5.0e4 (standard error 0.2e4) under uniform attention, 9.1e4 (0.5e4) with softmax at "
        "1/sqrt(d) and 6.7e5 (0.2e5) at 1: there the prediction is 30 % and a factor of 4 low",
        notes=limits(made),
        series=series,
    )


def query_value_ratio() -> Case:
    """Figures 12 to 14: squared query over value gradients of one head."""
    names = ("d_model", "seq_len", "correlation", "deviation", "closed", "predicted")
    rows = []
    for d_model in (32, 128):
        unit = 1 / d_model
        weights = Weights(unit, unit, unit, unit, unit, unit)
        for tokens in (16, 64):
            model = Transformer(1, d_model, 1, tokens, norm="none", weights=weights)
            for correlation in (0.0, 0.3, 0.9):
                for deviation in (0.1, 0.5, 1.0):
                    moments = {"x_variance": deviation**2, "x_correlation": correlation}
                    square = UNIFORM_ATTENTION_GRADIENTS.law("inverse_temperature_square")(
                        d_model=d_model, seq_len=tokens, **moments
                    )
                    p = expected(
                        model, variance=deviation**2, correlation=correlation, tokens=False
                    )
                    norms = p.weight_gradients().set_index("weight")["squared_norm"]
                    ratio = float(norms["query"] / norms["value"])
                    rows.append((d_model, tokens, correlation, deviation, 1 / float(square), ratio))
    table = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    gap = np.abs(np.log(table["predicted"] / table["closed"]))
    by_deviation = {
        f"deviation {s:g}: largest |log ratio|": float(gap[table["deviation"] == s].max())
        for s in (0.1, 0.5, 1.0)
    }
    return Case(
        "query_value_ratio",
        _noci("Figures 12 to 14, equations 17 and 18"),
        "uniform attention predicts the gradients of queries and values, best for small inputs",
        {"d": "varied", "n": "varied", "correlation": "varied", "deviation": "varied"},
        {"heads": 1, "grid": "d 32, 128; n 16, 64; r 0, .3, .9; deviation .1, .5, 1"},
        by_deviation,
        "Closed form and refined theory agree at small inputs and part as the logits grow",
        series=table,
    )


def gradients_in_depth() -> Case:
    """Figures 3 and 9: query and value gradients of Table 2's network, Post-LN and Pre-LN."""
    predicted, series = {}, {}
    for norm in ("post", "pre"):
        model = Transformer(12, 32, 4, 50, d_ff=128, norm=norm)
        p = expected(model, correlation=0.2)
        gap = gradient_gap(p)
        predicted[f"{norm}: correlation, last layer"] = float(p.correlation[-1])
        predicted[f"{norm}: query / value, layer 1"] = float(gap.ratio[0])
        predicted[f"{norm}: query / value, last layer"] = float(gap.ratio[-1])
        series[f"{norm}, correlation"] = p.correlation
        series[f"{norm}, query / value"] = gap.ratio
    return Case(
        "gradients_in_depth",
        _noci("Figures 3 and 9, Table 2"),
        "query gradients vanish with depth in Post-LN; in Pre-LN correlation grows much slower",
        {"d_model": 32, "d_ff": 128, "heads": 4, "tokens": 50, "activation": "relu", "runs": 50},
        {"layers": 12, "weights": "Xavier", "input correlation": 0.2},
        predicted,
        "Both hold",
        series=series,
    )


def reversal() -> Case:
    """C.1: five Post-LN layers, one head, twenty digits with sinusoidal positions."""
    width, tokens, digits = 16, 20, 10
    position = np.arange(tokens)
    rates = 10000.0 ** (-np.arange(width // 2) * 2 / width)
    # E x_i x_j per feature: table rows of variance 1 that agree with odds 1/digits, and the mean
    # over features of the two positions' sines and cosines.
    waves = np.cos((position[:, None] - position[None, :])[..., None] * rates).mean(-1) / 2
    kernel = waves + np.where(np.eye(tokens, dtype=bool), 1.0, 1 / digits)
    model = Transformer(5, width, 1, tokens, norm="post")
    p = expected(model, kernel=kernel)
    gap = gradient_gap(p)
    return Case(
        "reversal",
        _noci("C.1 and Figure 6"),
        "tokens of a small Post-LN network collapse and its query gradients vanish",
        {"layers": 5, "heads": 1, "tokens": tokens, "d_model": width, "alphabet": digits},
        {"d_ff": 4 * width, "weights": "Xavier"},
        {
            "correlation, input": float(p.correlation[0]),
            "correlation, last layer": float(p.correlation[-1]),
            "query / value, layer 1": float(gap.ratio[0]),
            "query / value, last layer": float(gap.ratio[-1]),
        },
        f"Predicted; at width {width} a draw scatters by about {1 / math.sqrt(width):.2f}",
        series={"correlation": p.correlation, "query / value": gap.ratio},
    )


CASES: Mapping[str, Callable[[], Case]] = {
    "uniformity": uniformity,
    "norm_growth": norm_growth,
    "query_value_ratio": query_value_ratio,
    "gradients_in_depth": gradients_in_depth,
    "reversal": reversal,
}
