"""The vocabulary of every formula: each symbol's name, LaTeX, meaning and natural domain.

Python-facing names are the ones laws take as arguments. Nothing here imports sympy; `Symbol.sympy`
makes the sympy symbol when an expression is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .checks import CORRELATION, COUNT, NONNEGATIVE, POSITIVE, PROBABILITY, REAL, SHARE, Interval

if TYPE_CHECKING:
    import sympy


@dataclass(frozen=True)
class Symbol:
    """One named quantity of the theory."""

    name: str
    tex: str
    meaning: str
    domain: Interval

    @property
    def sympy(self) -> sympy.Symbol:
        positive = self.domain.lower >= 0 and (self.domain.lower > 0 or self.domain.open_lower)
        return _sympy_symbol(self.name, positive)


@functools.cache
def _sympy_symbol(name: str, positive: bool) -> sympy.Symbol:
    import sympy

    # Domains are our own intervals, so an assumption here can only tidy an expression.
    return sympy.Symbol(name, positive=True) if positive else sympy.Symbol(name, real=True)


_TABLE: list[tuple[Any, ...]] = [
    ("x_mean", r"\mu_x", "mean of the input", REAL),
    ("x_other_mean", r"\mu_{x'}", "mean of the input at the other token of a pair", REAL),
    ("x_variance", r"\sigma_x^2", "variance of the input", POSITIVE),
    ("x_other_variance", r"\sigma_{x'}^2", "variance of a pair's other token", POSITIVE),
    ("x_correlation", r"r", "correlation of two tokens' inputs in the same feature", CORRELATION),
    ("x_hidden_correlation", r"r^d", "correlation of a token's input in two features", CORRELATION),
    ("grad_variance", r"\sigma_g^2", "variance of the gradient at the output", NONNEGATIVE),
    ("grad_correlation", r"r_g", "correlation of two tokens' gradients at the output", CORRELATION),
    ("grad_covariance", r"c_g", "covariance of the output's gradient between two tokens", REAL),
    ("fan_in", r"d_{in}", "features summed over by a matrix", COUNT),
    ("fan_out", r"d_{out}", "features a matrix produces", COUNT),
    ("weight_variance", r"\sigma_w^2", "variance of a weight matrix's entries", NONNEGATIVE),
    ("table_variance", r"\sigma_e^2", "variance of an embedding table's entries", NONNEGATIVE),
    ("pattern_correlation", r"\rho", "share of token pairs that look up the same row", CORRELATION),
    ("epsilon", r"\epsilon", "constant added under a normalisation's root", NONNEGATIVE),
    ("norm_spread", r"u", "squared norm's relative variance over draws", NONNEGATIVE),
    ("other_norm_spread", r"u'", "norm spread of a pair's other token", NONNEGATIVE),
    ("pair_norm_spread", r"u_{ij}", "relative covariance of two tokens' squared norms", REAL),
    (
        "overlap_norm_spread",
        r"w_{ij}",
        "covariance of two tokens' overlap with their squared norms, over the norms' means",
        REAL,
    ),
    ("removed_share", r"\delta", "share of the gradient's variance a norm projects out", SHARE),
    ("removed_pair_share", r"\delta_{ij}", "the same of the gradient's token covariance", SHARE),
    ("drop_prob", r"p", "probability that dropout drops an entry", PROBABILITY),
    ("attention_drop_prob", r"p_a", "probability of dropping an attention weight", PROBABILITY),
    ("d_model", r"d", "width of the residual stream", Interval(2.0)),
    ("d_head", r"d_k", "width of one attention head", COUNT),
    ("d_ff", r"d_{ff}", "width of the feed-forward hidden layer", COUNT),
    ("seq_len", r"L", "tokens in the sequence", Interval(2.0)),
    ("vocab_size", r"|V|", "rows of the token table", Interval(2.0)),
    ("query", r"\sigma_q^2", "variance of the query weights", NONNEGATIVE),
    ("key", r"\sigma_k^2", "variance of the key weights", NONNEGATIVE),
    ("value", r"\sigma_v^2", "variance of the value weights", NONNEGATIVE),
    ("output", r"\sigma_o^2", "variance of the output-projection weights", NONNEGATIVE),
    ("ffn_in", r"\sigma_1^2", "variance of the first feed-forward matrix", NONNEGATIVE),
    ("ffn_out", r"\sigma_2^2", "variance of the second feed-forward matrix", NONNEGATIVE),
    ("heads", r"h", "attention heads", COUNT),
    ("skip_square", r"\lambda^2", "square of the skip connection's scale", NONNEGATIVE),
    ("branch_square", r"\beta^2", "square of the branch's scale", NONNEGATIVE),
    ("branch_variance", r"\sigma_b^2", "variance of a block's output", NONNEGATIVE),
    ("branch_correlation", r"\rho_b", "correlation of a block's output and stream", CORRELATION),
    ("grad_branch_variance", r"\sigma_{gb}^2", "gradient's variance through a block", NONNEGATIVE),
    (
        "grad_branch_correlation",
        r"\rho_{gb}",
        "correlation of the gradients through a block and past it",
        CORRELATION,
    ),
    ("bias_variance", r"\sigma_{bias}^2", "variance of a bias's entries", NONNEGATIVE),
    ("factor_variance", r"\sigma_u^2", "variance of a product's other factor", NONNEGATIVE),
    ("factor_covariance", r"c_u", "covariance of a product's other factor between tokens", REAL),
    ("alpha", r"\alpha", "factor on the input of Dynamic Tanh", POSITIVE),
]

SYMBOLS: dict[str, Symbol] = {}


def declare(table: Iterable[tuple[Any, ...]]) -> None:
    """Add symbols to the vocabulary: name, LaTeX, meaning and domain of each."""
    SYMBOLS.update((name, Symbol(name, *rest)) for name, *rest in table)


declare(_TABLE)
