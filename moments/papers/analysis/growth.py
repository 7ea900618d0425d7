"""How signal and gradient grow over many depths.

Kedia et al.'s Table 3 compares residual scalings, here by their effective scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...errors import domain_error
from ...model.transformer import Transformer
from ...model.weights import Weights
from ...show.scheme_table import block_sensitivity
from .results import Result, predict_alike


class Method(NamedTuple):
    """One row of Table 3.

    Attributes:
        branch_square: beta^2 at N layers, as constant and exponent of N, lambda being 1; None: set
            by the scheme "dslm".
        printed: by norm, the printed order of each quantity.
    """

    branch_square: tuple[float, float] | None
    printed: Mapping[str, Mapping[str, str]]


CORRELATION, GRAD_CORRELATION = 0.227, 0.8
"""At the input, before the embedding's dropout, and at the output."""

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


def method_model(model: Transformer, method: str, layers: int, norm: str) -> Transformer:
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
        return base.with_scheme("dslm", input_correlation=CORRELATION)
    constant, exponent = chosen.branch_square
    return base.replace(branch_scale=(constant * layers**exponent) ** 0.5)


@dataclass(frozen=True)
class GrowthExponents(Result):
    """Exponents of growth over depths, as Kedia et al.'s Table 3 states them in O().

    `rows` has for each method, norm and quantity the values at every depth, the fitted exponent a
    of depth^a, `rate`, the slope of log(value) per layer over the deeper half of the depths, and
    the printed order. What grows exponentially has a stable rate; its exponent depends on the
    depths.
    """

    depths: tuple[int, ...]
    rows: tuple[Mapping[str, Any], ...]

    @property
    def heading(self) -> str:
        return (
            f"growth over {', '.join(map(str, self.depths))} layers: "
            "fitted exponents of depth beside the printed orders"
        )


def growth_exponents(
    model: Transformer,
    depths: Sequence[int] = (12, 24, 48, 96, 192, 384, 768, 1000),
    methods: Iterable[str] = tuple(METHODS),
) -> GrowthExponents:
    """Table 3 of Kedia et al. from predictions: forward, backward and sensitivity over depth.

    forward is the largest variance over the input's, backward the largest ratio of gradient
    variances within the network, sensitivity the median over blocks (Section 4.6).

    Args:
        model: shape and dropout; its depth, norm, weights and scales are set by the method.
        depths: numbers of layers.
        methods: of `moments.papers.analysis.growth.METHODS`.

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
                p = predict_alike(
                    method_model(model, method, layers, norm),
                    "refined",
                    correlation=CORRELATION * (1 - model.dropout),
                    grad_correlation=GRAD_CORRELATION,
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
    return GrowthExponents(counts, tuple(rows))


def _slope(x: Any, series: Sequence[float]) -> float:
    return float(np.polyfit(x, np.log(series), 1)[0])


def _late_rate(counts: Sequence[int], series: Sequence[float]) -> float:
    half = min(len(counts) // 2, len(counts) - 2)
    return _slope(np.asarray(counts[half:], dtype=float), series[half:])
