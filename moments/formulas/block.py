"""Attention and feed-forward blocks as whole units, as tabulated in the papers.

The "published" rows of the summary tables are compositions of the components' laws; the
"simplified" rows (Table 2) are separate approximations, which that theory propagates.
"""

from __future__ import annotations

from typing import Any

from .activation import relu_moment
from .attention import (
    BACKWARD_NOTE,
    FORWARD_NOTE,
    attention_covariance,
    attention_variance,
    value_path_covariance,
    value_path_variance,
)
from .checks import SHARE
from .law import ComponentLaws, Law, Substituted, asymptotic
from .price import price
from .references import kedia

_UNIFORM = "uniform attention over many correlated tokens; no source term where r or r_g is 0"

_DROPOUT_NOTE = (
    "; as printed: the block's dropout scales the correlated part of the gradient too, where the "
    "components composed (A.3 and A.8) leave a covariance unchanged"
)


def _after_dropout(formula: Any) -> Substituted:
    """After the block's dropout."""
    return Substituted(lambda m, inner, drop_prob: inner / (1 - drop_prob), inner=formula)


def _attention_dropout(through: Any) -> Substituted:
    """With the dropout probability of attention."""
    return Substituted(through, drop_prob="attention_drop_prob")


def _after_projection(heads: Any) -> Substituted:
    """After the output projection."""
    return Substituted(lambda m, output, heads, d_model: d_model * output * heads, heads=heads)


def _before_projections(through: Any) -> Substituted:
    """Gradient through the output and value projections."""
    return Substituted(
        lambda m, output, value, d_model, inner: d_model**2 * output * value * inner, inner=through
    )


_UNIFORM_HEADS = _before_projections(
    lambda m, x_variance, x_correlation: x_variance * x_correlation
)
_UNIFORM_GRADIENT = _before_projections(lambda m, grad_covariance: grad_covariance)
_SHARED = {"x_correlation": SHARE}


def _uniform(formula: Any, place: str, limits: Any = None) -> Law:
    return asymptotic(formula, kedia(place), _UNIFORM, limits=limits)


ATTENTION_BLOCK = ComponentLaws(
    "attention_block",
    "Attention block: attention, output projection, dropout",
    {
        "mean": Law(lambda m: 0, kedia("B.1 and Table 15")),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19")),
    },
    published={
        "variance": asymptotic(
            _after_dropout(_after_projection(_attention_dropout(attention_variance))),
            kedia("B.1 and Table 16"),
            FORWARD_NOTE,
        ),
        "covariance": asymptotic(
            _after_projection(attention_covariance), kedia("B.1 and Table 18"), FORWARD_NOTE
        ),
        "grad_variance": asymptotic(
            _after_dropout(_before_projections(_attention_dropout(value_path_variance))),
            kedia("B.1 and Table 17"),
            BACKWARD_NOTE + _DROPOUT_NOTE,
        ),
        "grad_covariance": asymptotic(
            _before_projections(value_path_covariance),
            kedia("B.1 and Table 20"),
            BACKWARD_NOTE + _DROPOUT_NOTE,
        ),
    },
    simplified={
        "variance": _uniform(_after_dropout(_UNIFORM_HEADS), "Table 2", _SHARED),
        "covariance": _uniform(_UNIFORM_HEADS, "Table 2: output correlation 1 - p", _SHARED),
        "grad_variance": _uniform(_after_dropout(_UNIFORM_GRADIENT), "Table 2"),
        "grad_covariance": _uniform(_UNIFORM_GRADIENT, "Table 2: gradient correlation 1 - p"),
    },
)


def _ffn(formula: Any) -> Substituted:
    """With the gain of both matrices."""
    return Substituted(
        formula, gain=lambda m, d_model, d_ff, ffn_in, ffn_out: d_model * d_ff * ffn_in * ffn_out
    )


def _pair(formula: Any) -> Substituted:
    """For a pair of tokens after the first matrix."""
    return _ffn(Substituted(formula, v="x_variance", other="x_other_variance", r="x_correlation"))


FFN_BLOCK = ComponentLaws(
    "ffn_block",
    "Feed-forward block: linear, ReLU, linear, dropout",
    {
        "mean": Law(lambda m: 0, kedia("B.2 and Table 15")),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19")),
        "variance": Law(
            _after_dropout(_ffn(lambda m, gain, x_variance: gain / 2 * x_variance)),
            kedia("B.2 and Table 16, at d_ff = 4 d"),
        ),
        "covariance": Law(
            _pair(lambda m, gain, v, other, r: gain * relu_moment(m, v, other, r)),
            kedia("B.2 and Table 18, at d_ff = 4 d"),
            note="the table prints 4 d for 4 d^2",
        ),
        "grad_variance": Law(
            _after_dropout(_ffn(lambda m, gain, grad_variance: gain / 2 * grad_variance)),
            kedia("B.2 and Table 17, at d_ff = 4 d"),
        ),
        "grad_covariance": Law(
            _pair(
                lambda m, gain, v, other, r, grad_covariance: (
                    gain * price(relu_moment)(m, v, other, r) * grad_covariance
                )
            ),
            kedia("B.2 and Table 20, at d_ff = 4 d"),
        ),
    },
    simplified={
        "covariance": Law(
            _ffn(
                lambda m, gain, x_variance, x_correlation: (
                    gain
                    / 2
                    * x_variance
                    * (1 / m.pi + x_correlation / 2 + (m.ratio(1, 2) - 1 / m.pi) * x_correlation**2)
                )
            ),
            kedia("Table 2: the polynomial times 1 - p"),
            "fitted",
            note="the paper's polynomial approximation of the exact law on r in [0, 1]",
            limits=_SHARED,
        )
    },
)
