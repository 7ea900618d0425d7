"""The residual scalings that Kedia et al.'s Table 3 compares, by their effective scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...model.transformer import Transformer
from ...model.weights import Weights


@dataclass(frozen=True)
class Method:
    """One row of Table 3.

    Attributes:
        branch_square: beta^2 at N layers, as constant and exponent of N, lambda being 1; None: set
            by the scheme "dslm".
        printed: by norm, the printed order of each quantity.
        note: where the effective scale comes from.
    """

    branch_square: tuple[float, float] | None
    printed: Mapping[str, Mapping[str, str]]
    note: str


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
        "no scaling",
    ),
    "ds-init": Method(
        (1.0, -2.0),
        _both("O(1)", "O(N^-1)", "O(1)"),
        "effective beta^2 = N^-2, as Kedia et al. 4.5 and K.3 count it",
    ),
    "layerscale": Method(
        (_BETA**2, 0.0),
        _both("O(1)", "O(beta N)", "O(1)"),
        "a learned beta at its initial value, the same at every depth; the order N beta^2 of "
        "Section 4.6 is printed as beta N",
    ),
    "deepnet": Method(
        (1.0, -1.5),
        {"post": {"backward": "O(1)"}},
        "effective beta^2 = N^-1.5, as Kedia et al. 4.5 and K.3 count it",
    ),
    "dslm": Method(
        None,
        {
            "post": {"backward": "O(1)"},
            "pre": {"forward": "1", "backward": "O(1)", "sensitivity": "O(1)"},
        },
        "lambda^2 = 1 - 2/N, beta^2 = 2/N, blocks of variance 1",
    ),
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
