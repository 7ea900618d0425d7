"""Cases of Kedia et al.: large query and key weights, rank collapse, Figure 12's polynomial."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...formulas.activation import RELU
from ...formulas.references import kedia
from ...model.transformer import Transformer
from .case import Case, expected, limits
from .fixed_points import correlation_fixed_points

_INPUT = {"correlation": 0.227 * 0.9, "grad_correlation": 0.0}


def double_query_key(layers: int = 192) -> Case:
    """Query and key weights at twice Xavier."""
    predicted: dict[str, float] = {}
    made = []
    for norm in ("pre", "post"):
        model = Transformer(layers, 256, 4, 512, norm=norm, dropout=0.1)
        growth = {}
        for reading, factor in (("Xavier", 1.0), ("variances", 2.0), ("deviations", 4.0)):
            assert model.weights is not None
            louder = model.weights.replace(
                query=factor * float(model.weights.query),  # type: ignore[arg-type]
                key=factor * float(model.weights.key),  # type: ignore[arg-type]
            )
            p = expected(model.replace(weights=louder), **_INPUT)
            made.append(p)
            growth[reading] = float(p.grad_variance[0] / p.grad_variance[-1])
            predicted[f"{norm}, {reading}: growth"] = growth[reading]
        for reading in ("variances", "deviations"):
            predicted[f"{norm}, {reading}: over Xavier's"] = growth[reading] / growth["Xavier"]
    return Case(
        "double_query_key",
        kedia("3.3"),
        "query and key weights at 2 x Xavier make gradients explode 10,000-fold over 192 layers",
        {"layers": layers, "query and key": "2 x Xavier, all else Xavier"},
        {"d_model": 256, "heads": 4, "seq_len": 512, "dropout": 0.1, "input": _INPUT},
        predicted,
        "Neither the norm nor what is doubled, variance or deviation, is stated: all four readings "
        "are given. Doubled deviations in Pre-LN come to the claimed order, beside Xavier's growth",
        claimed=dict.fromkeys((k for k in predicted if k.endswith("Xavier's")), 1e4),
        notes=limits(made),
    )


def fan_out_weights() -> Case:
    """1/fan_out against Xavier for queries, keys and values, without dropout."""
    predicted: dict[str, float] = {}
    series = {}
    for norm in ("post", "pre"):
        model = Transformer(12, 32, 4, 50, norm=norm)
        weights = model.weights
        assert weights is not None
        per_head = 1 / (model.d_head or 1)
        fan_out = weights.replace(query=per_head, key=per_head, value=per_head, output=1 / 32)
        fan_out = fan_out.replace(ffn_in=1 / 128, ffn_out=1 / 32)
        for name, chosen in (("1/fan_out", fan_out), ("Xavier", weights)):
            p = expected(model.replace(weights=chosen), correlation=0.2)
            found = correlation_fixed_points(model.replace(weights=chosen))
            predicted[f"{norm}, {name}: correlation after 12 layers"] = float(p.correlation[12])
            predicted[f"{norm}, {name}: stationary correlation"] = found.correlation
            predicted[f"{norm}, {name}: {found.kind} rate"] = found.rate
            series[f"{norm}, {name}"] = p.correlation
    return Case(
        "fan_out_weights",
        kedia("Appendix F, on Noci et al. 2022"),
        "without dropout it is the weights of variance 1/fan_out that make tokens collapse",
        {
            "d_model": 32,
            "d_ff": 128,
            "heads": 4,
            "tokens": 50,
            "dropout": 0.0,
            "activation": "relu",
        },
        {"layers": 12, "input correlation": 0.2, "heads": "matrices of their own"},
        predicted,
        "Tokens collapse with either: correlation 1 is stable whenever dropout is absent, and the "
        "weights only set the rate",
        series=series,
    )


def small_branches() -> Case:
    """beta = 1/sqrt(N) and the skip connection's scale, against collapse without dropout."""
    layers = 192
    predicted, series = {}, {}
    scales = {
        "lambda = 1, beta = 1": (1.0, 1.0),
        "lambda = 1, beta^2 = 1/N": (1.0, 1 / layers),
        "lambda^2 = 1 - 1/N, beta^2 = 1/N": (1 - 1 / layers, 1 / layers),
    }
    for norm in ("post", "pre"):
        for name, (skip, branch) in scales.items():
            model = Transformer(
                layers, 256, 4, 256, norm=norm, skip_scale=skip**0.5, branch_scale=branch**0.5
            )
            p = expected(model, correlation=0.227)
            predicted[f"{norm}, {name}"] = float(p.correlation[-1])
            series[f"{norm}, {name}"] = p.correlation
    return Case(
        "small_branches",
        kedia("3.4"),
        "beta^2 = 1/N keeps tokens apart without dropout; in Pre-LN lambda = 1 slows collapse down "
        "against lambda^2 = 1 - 1/N",
        {"layers": layers, "beta^2": "1/N", "dropout": 0.0},
        {"d_model": 256, "heads": 4, "seq_len": 256, "input correlation": 0.227, "Xavier": True},
        predicted,
        "Both hold",
        series=series,
    )


def relu_polynomial() -> Case:
    """Figure 12: ReLU's correlation law beside 0.7 r + 0.3 r^2 and its least squares."""
    r = np.linspace(0.0, 1.0, 1001)
    exact = RELU.law("covariance", "published")(x_variance=1.0, x_correlation=r)
    exact = exact / RELU.law("variance", "published")(x_variance=1.0)
    fitted = RELU.law("covariance", "simplified")(x_variance=1.0, x_correlation=r)
    fitted = fitted / RELU.law("variance", "published")(x_variance=1.0)
    design = np.stack([r, r**2], axis=1)
    linear, square = np.linalg.lstsq(design, exact, rcond=None)[0]
    error = np.abs(fitted - exact)
    return Case(
        "relu_polynomial",
        kedia("Figure 12 and Table 1"),
        "0.7 r + 0.3 r^2 fits the correlation that ReLU returns remarkably well",
        {"r": "0 to 1"},
        {},
        {
            "largest error": float(error.max()),
            "mean error": float(error.mean()),
            "least squares, r": float(linear),
            "least squares, r^2": float(square),
        },
        "Both coefficients are what least squares give to one digit",
        claimed={"least squares, r": 0.7, "least squares, r^2": 0.3},
        series={"r": r, "exact": exact, "polynomial": fitted},
    )


CASES: Mapping[str, Callable[[], Case]] = {
    "double_query_key": double_query_key,
    "fan_out_weights": fan_out_weights,
    "small_branches": small_branches,
    "relu_polynomial": relu_polynomial,
}
