"""The vocabulary of every formula: each symbol's name, LaTeX, meaning and natural domain.

Python-facing names are the ones laws take as arguments. Nothing here imports sympy; `Symbol.sympy`
makes the sympy symbol when an expression is asked for.
"""

from __future__ import annotations

import functools
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
    ("logit_scale", r"\Theta", "logit variance of a row divided by 1 - r", NONNEGATIVE),
    (
        "row_square",
        r"P_2",
        "E sum_j a_ij^2 over one attention row",
        Interval(0.0, 1.0, open_lower=True),
    ),
    ("query", r"\sigma_q^2", "variance of the query weights", NONNEGATIVE),
    ("key", r"\sigma_k^2", "variance of the key weights", NONNEGATIVE),
    ("value", r"\sigma_v^2", "variance of the value weights", NONNEGATIVE),
    ("output", r"\sigma_o^2", "variance of the output-projection weights", NONNEGATIVE),
    ("ffn_in", r"\sigma_1^2", "variance of the first feed-forward matrix", NONNEGATIVE),
    ("ffn_out", r"\sigma_2^2", "variance of the second feed-forward matrix", NONNEGATIVE),
    ("layers", r"N", "layers of the stack", COUNT),
    ("layer", r"\ell", "number of a layer, counted from 1", COUNT),
    ("heads", r"h", "attention heads", COUNT),
    ("attention_gain", r"C_1", "attention block's variance at unit variance, r = 1", NONNEGATIVE),
    ("ffn_gain", r"C_2", "feed-forward block's variance at unit variance", NONNEGATIVE),
    ("skip_square", r"\lambda^2", "square of the skip connection's scale", NONNEGATIVE),
    ("branch_square", r"\beta^2", "square of the branch's scale", NONNEGATIVE),
    ("branch_constant", r"k", "constant of beta^2 = k / N^alpha", NONNEGATIVE),
    ("branch_exponent", r"\alpha", "exponent of beta^2 = k / N^alpha", REAL),
    ("branch_variance", r"\sigma_b^2", "variance of a block's output", NONNEGATIVE),
    ("branch_correlation", r"\rho_b", "correlation of a block's output and stream", CORRELATION),
    ("grad_branch_variance", r"\sigma_{gb}^2", "gradient's variance through a block", NONNEGATIVE),
    (
        "grad_branch_correlation",
        r"\rho_{gb}",
        "correlation of the gradients through a block and past it",
        CORRELATION,
    ),
    ("gradient_ratio", r"C_6", "token correlation of the gradient over the signal's", NONNEGATIVE),
    ("attention_branch_square", r"\alpha_1^2", "square of the attention's scale", NONNEGATIVE),
    ("ffn_branch_square", r"\alpha_2^2", "square of the feed-forward block's scale", NONNEGATIVE),
    (
        "attention_depth_constant",
        r"\tilde\alpha_1",
        "number of layers times the attention's squared scale",
        NONNEGATIVE,
    ),
    (
        "ffn_depth_constant",
        r"\tilde\alpha_2",
        "number of layers times the feed-forward block's squared scale",
        NONNEGATIVE,
    ),
    ("gram_square", r"\|X^\top L X\|^2", "squared norm of the centred Gram matrix", NONNEGATIVE),
    ("gram_trace", r"\mathrm{tr}\,X^\top L X", "tokens' squared distance to the mean", NONNEGATIVE),
    ("token_square", r"\|X\|^2", "squared norm of all tokens", NONNEGATIVE),
    ("jacobian_linear", r"A", "coefficient of 1/sigma in a layer's Jacobian bound", NONNEGATIVE),
    ("jacobian_quadratic", r"B", "coefficient of 1/sigma^2 in a layer's bound", NONNEGATIVE),
    ("bias_variance", r"\sigma_{bias}^2", "variance of a bias's entries", NONNEGATIVE),
    ("factor_variance", r"\sigma_u^2", "variance of a product's other factor", NONNEGATIVE),
    ("factor_covariance", r"c_u", "covariance of a product's other factor between tokens", REAL),
    ("alpha", r"\alpha", "factor on the input of Dynamic Tanh", POSITIVE),
]

SYMBOLS: dict[str, Symbol] = {name: Symbol(name, *rest) for name, *rest in _TABLE}
