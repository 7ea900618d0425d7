"""The vocabulary of every formula: each symbol's name, LaTeX, meaning and natural domain.

Python-facing names are the ones laws take as arguments. Nothing here imports sympy; `Symbol.sympy`
makes the sympy symbol when an expression is asked for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import sympy

INFINITY = float("inf")


@dataclass(frozen=True)
class Interval:
    """A real interval; an open end excludes its bound."""

    lower: float = -INFINITY
    upper: float = INFINITY
    open_lower: bool = False
    open_upper: bool = False

    def contains(self, value: Any) -> bool:
        """Whether every entry of `value` lies inside (NaN and infinities never do)."""
        v = np.asarray(value, dtype=float)
        above = v > self.lower if self.open_lower else v >= self.lower
        below = v < self.upper if self.open_upper else v <= self.upper
        return bool(np.all(above & below & np.isfinite(v)))

    def __str__(self) -> str:
        left = "(" if self.open_lower or self.lower == -INFINITY else "["
        right = ")" if self.open_upper or self.upper == INFINITY else "]"
        return f"{left}{_bound(self.lower)}, {_bound(self.upper)}{right}"


def _bound(value: float) -> str:
    if abs(value) == INFINITY:
        return "∞" if value > 0 else "-∞"
    return f"{value:g}"


REAL = Interval()
POSITIVE = Interval(0.0, INFINITY, open_lower=True)
NONNEGATIVE = Interval(0.0, INFINITY)
CORRELATION = Interval(-1.0, 1.0)
PROBABILITY = Interval(0.0, 1.0, open_upper=True)
COUNT = Interval(1.0, INFINITY)


@dataclass(frozen=True)
class Symbol:
    """One named quantity of the theory."""

    name: str
    tex: str
    meaning: str
    domain: Interval

    @property
    def sympy(self) -> sympy.Symbol:
        return _sympy_symbol(self.name)


@functools.cache
def _sympy_symbol(name: str) -> sympy.Symbol:
    import sympy

    # Only `real` is assumed: a positive symbol would let sympy drop a domain silently.
    return sympy.Symbol(name, real=True)


_TABLE = [
    ("x_mean", r"\mu_x", "mean of the input", REAL),
    ("x_other_mean", r"\mu_{x'}", "mean of the input at the other token of a pair", REAL),
    ("x_variance", r"\sigma_x^2", "variance of the input", POSITIVE),
    (
        "x_other_variance",
        r"\sigma_{x'}^2",
        "variance of the input at the other token of a pair",
        POSITIVE,
    ),
    (
        "x_correlation",
        r"r",
        "correlation of the input between two tokens, same feature",
        CORRELATION,
    ),
    (
        "x_hidden_correlation",
        r"r^d",
        "correlation of the input between two features, same token",
        CORRELATION,
    ),
    ("grad_variance", r"\sigma_g^2", "variance of the gradient at the output", NONNEGATIVE),
    (
        "grad_correlation",
        r"r_g",
        "correlation of the output's gradient between two tokens",
        CORRELATION,
    ),
    ("grad_covariance", r"c_g", "covariance of the output's gradient between two tokens", REAL),
    ("fan_in", r"d_{in}", "features summed over by a matrix", COUNT),
    ("fan_out", r"d_{out}", "features a matrix produces", COUNT),
    ("weight_variance", r"\sigma_w^2", "variance of a weight matrix's entries", NONNEGATIVE),
    ("table_variance", r"\sigma_e^2", "variance of an embedding table's entries", NONNEGATIVE),
    (
        "pattern_correlation",
        r"\rho",
        "share of token pairs that look up the same table row",
        CORRELATION,
    ),
    ("drop_prob", r"p", "probability that dropout drops an entry", PROBABILITY),
    (
        "attention_drop_prob",
        r"p_a",
        "probability that dropout drops an attention weight",
        PROBABILITY,
    ),
    ("d_model", r"d", "width of the residual stream", Interval(2.0, INFINITY)),
    ("d_head", r"d_k", "width of one attention head", COUNT),
    ("d_ff", r"d_{ff}", "width of the feed-forward hidden layer", COUNT),
    ("seq_len", r"L", "tokens in the sequence", Interval(2.0, INFINITY)),
    ("vocab_size", r"|V|", "rows of the token table", Interval(2.0, INFINITY)),
    ("query", r"\sigma_q^2", "variance of the query weights", NONNEGATIVE),
    ("key", r"\sigma_k^2", "variance of the key weights", NONNEGATIVE),
    ("value", r"\sigma_v^2", "variance of the value weights", NONNEGATIVE),
    ("output", r"\sigma_o^2", "variance of the output-projection weights", NONNEGATIVE),
    ("ffn_in", r"\sigma_1^2", "variance of the first feed-forward matrix", NONNEGATIVE),
    ("ffn_out", r"\sigma_2^2", "variance of the second feed-forward matrix", NONNEGATIVE),
]

SYMBOLS: dict[str, Symbol] = {name: Symbol(name, *rest) for name, *rest in _TABLE}  # type: ignore[arg-type]
