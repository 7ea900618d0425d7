"""How signal and gradient grow with depth: rates of one model, and exponents over many depths.

Kedia et al.'s Table 3 compares residual scalings, here by their effective scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moments.errors import DomainError, domain_error
from moments.formulas.checks import check_count
from moments.formulas.law import Theory
from moments.model.transformer import Transformer
from moments.model.weights import Weights
from moments.prediction.result import Prediction
from moments.show.scheme_table import block_sensitivity

from ..formulas.kedia_chain import POST_LN_CHAIN, PRE_LN_CHAIN
from .fixed_points import correlation_fixed_points, repeated_layer
from .kedia import chain_constants, received_correlation
from .results import Result, predict_alike

# --- methods --------------------------------------------------------------------------------------


class Method(NamedTuple):
    """One row of Table 3.

    Attributes:
        branch_square: beta^2 at N layers, as constant and exponent of N, lambda being 1; None: set
            by the scheme "dslm".
        printed: by norm, the printed order of each quantity.
    """

    branch_square: tuple[float, float] | None
    printed: Mapping[str, Mapping[str, str]]


_BETA = 1e-2  # LayerScale's initial value; the orders do not depend on it while N beta^2 is small


def _both(backward: str, sensitivity: str, forward: str) -> dict[str, dict[str, str]]:
    return {
        "post": {"backward": backward},
        "pre": {"forward": forward, "backward": backward, "sensitivity": sensitivity},
    }


METHODS: dict[str, Method] = {
    "vanilla": Method(
        (1.0, 0.0),
        {
            "post": {"backward": "O(c^±N)"},
            "pre": {
                "forward": "O(N)",
                "backward": "O(N)",
                "sensitivity": "O(1), Section 4.6",
                "sensitivity (mean)": "O(log N)",
            },
        },
    ),
    # As Kedia et al. 4.5 and K.3 count it, like DeepNet's below.
    "ds-init": Method((1.0, -2.0), _both("O(1)", "O(N^-1)", "O(1)")),
    # A learned beta at its initial value, the same at every depth; the order N beta^2 of Section
    # 4.6 is printed as beta N.
    "layerscale": Method((_BETA**2, 0.0), _both("O(1)", "O(beta N)", "O(1)")),
    "deepnet": Method((1.0, -1.5), {"post": {"backward": "O(1)"}}),
    # lambda^2 = 1 - 2/N, beta^2 = 2/N, blocks of variance 1
    "dslm": Method(None, _both("O(1)", "O(1)", "1")),
}


def method_model(
    model: Transformer, method: str, layers: int, norm: str, correlation: float
) -> Transformer:
    """The model as one method sets it; Xavier weights except under DeepScaleLM."""
    chosen = METHODS[method]
    base = model.replace(
        layers=layers,
        norm=norm,
        skip_scale=1.0,
        branch_scale=1.0,
        temperature=1.0,
        layernorm_scaling=False,
        embedding=None,
        weights=Weights.xavier(model.d_model, model.heads, model.d_ff),
    )
    if chosen.branch_square is None:
        return base.with_scheme("dslm", input_correlation=correlation)
    constant, exponent = chosen.branch_square
    return base.replace(branch_scale=(constant * layers**exponent) ** 0.5)


# --- growth ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GrowthLaws(Result):
    """Rates of growth with depth: Table 2's closed forms beside a prediction.

    Attributes:
        model, theory: what was asked.
        closed: by quantity, from C_1, C_2 and the stationary correlations of Table 2.
        predicted: by quantity, the least-squares slope over the deeper half of `prediction`.
        prediction: of the deep stack the slopes were read from.
    """

    model: Transformer
    theory: Theory
    closed: Mapping[str, float]
    predicted: Mapping[str, float]
    prediction: Prediction

    @property
    def heading(self) -> str:
        return f"growth with depth, {self.model.norm} norm, theory {self.theory}"

    def _table(self) -> dict[str, Any]:
        names = list(self.closed)
        columns = {"closed form": self.closed, "predicted": self.predicted}
        return {"quantity": names} | {c: [v[n] for n in names] for c, v in columns.items()}


def growth_laws(
    model: Transformer,
    theory: Theory = "published",
    *,
    layers: int = 400,
    correlation: float | None = None,
    grad_correlation: float | None = None,
) -> GrowthLaws:
    """Pre-LN: variance per layer and the gradient's exponent. Post-LN: the gradient's factor.

    Pre-LN: variance_growth, C_1 r + C_2, and grad_exponent, C_g of gradient ~ (N/n)^C_g.
    Post-LN: grad_growth, C_5, the gradient's factor per layer towards the input.

    Args:
        model: a ReLU model; its first layer is repeated.
        theory: of the prediction beside the closed forms, which are those of Table 2.
        layers: depth of the prediction.
        correlation, grad_correlation: at its two ends; None: the stationary ones.

    Raises:
        DomainError: a model that Table 2 does not cover.
    """
    check_count("layers", layers, least=20)
    if model.norm not in ("pre", "post") or np.any(model.skip_scales != 1.0):
        raise DomainError(
            "growth_laws covers pre and post norm with skip_scale 1; "
            "for DeepScaleLM see dslm_bounds"
        )
    gains = chain_constants(model)._asdict()  # refuses what Table 2 does not cover
    table = correlation_fixed_points(model, "simplified")
    values = {
        **gains,
        "x_correlation": table.correlation,
        "grad_correlation": table.grad_correlation,
    }
    stable = correlation_fixed_points(model, theory)
    prediction = predict_alike(
        repeated_layer(model, 1, layers),
        theory,
        correlation=stable.correlation if correlation is None else correlation,
        grad_correlation=stable.grad_correlation if grad_correlation is None else grad_correlation,
    )
    depth = np.arange(layers + 1)
    if model.norm == "post":
        middle = slice(layers // 4, 3 * layers // 4)
        slope = np.polyfit(depth[middle], np.log(prediction.grad_variance[middle]), 1)[0]
        once = predict_alike(
            repeated_layer(model, 1, 1),
            "simplified",
            correlation=table.correlation,
            grad_correlation=table.grad_correlation,
        )
        # That which meets the attention: the stream's, through the feed-forward block.
        values["grad_correlation"] = float(received_correlation(once)[0])
        closed = {"grad_growth": float(POST_LN_CHAIN.law("grad_growth")(**values))}
        return GrowthLaws(model, theory, closed, {"grad_growth": float(np.exp(-slope))}, prediction)
    late = depth >= layers // 2
    line = np.polyfit(depth[late], prediction.variance[late], 1)[0]
    power = np.polyfit(np.log(depth[late]), np.log(prediction.grad_variance[late]), 1)[0]
    names = ("variance_growth", "grad_exponent")
    closed = {name: float(PRE_LN_CHAIN.law(name)(**values)) for name in names}
    predicted = {"variance_growth": float(line), "grad_exponent": float(-power)}
    return GrowthLaws(model, theory, closed, predicted, prediction)


@dataclass(frozen=True)
class GrowthExponents(Result):
    """Exponents of growth over depths, as Kedia et al.'s Table 3 states them in O().

    `rows` has for each method, norm and quantity the values at every depth, the fitted exponent a
    of depth^a, `rate`, the slope of log(value) per layer over the deeper half of the depths, and
    the printed order. What grows exponentially has a stable rate; its exponent depends on the
    depths.
    """

    depths: tuple[int, ...]
    theory: Theory
    rows: tuple[Mapping[str, Any], ...]

    @property
    def heading(self) -> str:
        return (
            f"growth over {', '.join(map(str, self.depths))} layers, theory {self.theory}: "
            "fitted exponents of depth beside the printed orders"
        )


def growth_exponents(
    model: Transformer,
    depths: Sequence[int] = (12, 24, 48, 96, 192, 384, 768, 1000),
    *,
    theory: Theory = "refined",
    methods: Iterable[str] = tuple(METHODS),
    correlation: float = 0.227,
    grad_correlation: float = 0.8,
) -> GrowthExponents:
    """Table 3 of Kedia et al. from predictions: forward, backward and sensitivity over depth.

    forward is the largest variance over the input's, backward the largest ratio of gradient
    variances within the network, sensitivity the median over blocks (Section 4.6).

    Args:
        model: shape and dropout; its depth, norm, weights and scales are set by the method.
        depths: numbers of layers.
        theory: of the predictions.
        methods: of `studies.analysis.growth.METHODS`.
        correlation, grad_correlation: at the input (before the embedding's dropout) and the output.

    Raises:
        DomainError: an unknown method, or fewer than two depths.
    """
    counts = tuple(int(n) for n in depths)
    if len(set(counts)) < 2:
        raise domain_error("depths", depths, "at least two different numbers of layers")
    rows: list[Mapping[str, Any]] = []
    for method in methods:
        if method not in METHODS:
            raise domain_error("method", method, f"one of {', '.join(METHODS)}")
        for norm, printed in METHODS[method].printed.items():
            found: dict[str, list[float]] = {name: [] for name in printed}
            for layers in counts:
                declared = method_model(model, method, layers, norm, correlation)
                p = predict_alike(
                    declared,
                    theory,
                    correlation=correlation * (1 - model.dropout),
                    grad_correlation=grad_correlation,
                )
                gradient = p.grad_variance
                blocks = block_sensitivity(p)
                values = {
                    "forward": p.variance.max() / p.variance[0],
                    "backward": gradient.max() / gradient.min(),
                    "sensitivity": np.median(blocks),
                    "sensitivity (mean)": np.mean(blocks),
                }
                for name in printed:
                    found[name].append(float(values[name]))
            rows += [
                {
                    "method": method,
                    "norm": norm,
                    "quantity": name,
                    **{f"N={n}": v for n, v in zip(counts, series, strict=True)},
                    "exponent": _slope(np.log(counts), series),
                    "rate": _late_rate(counts, series),
                    "printed": printed[name],
                }
                for name, series in found.items()
            ]
    return GrowthExponents(counts, theory, tuple(rows))


def _slope(x: Any, series: Sequence[float]) -> float:
    return float(np.polyfit(x, np.log(series), 1)[0])


def _late_rate(counts: Sequence[int], series: Sequence[float]) -> float:
    half = min(len(counts) // 2, len(counts) - 2)
    return _slope(np.asarray(counts[half:], dtype=float), series[half:])
