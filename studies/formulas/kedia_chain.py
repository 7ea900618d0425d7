"""Whole stacks in Kedia et al.'s simplified theory: growth, fixed points, bounds.

Blocks are Table 2's: at a normalised input of token correlation r attention adds C_1 r to the
variance and the feed-forward block C_2; their gradients multiply by C_1 r_g and C_2.
"""

from __future__ import annotations

from typing import Any

from moments.formulas.checks import SHARE, Interval
from moments.formulas.law import ComponentLaws, Law, Substituted, asymptotic, derived
from moments.formulas.references import kedia

_TABLE_TWO = "Table 2's blocks: long sequences, correlated tokens"


def _layer_variance(m: Any, attention_gain: Any, ffn_gain: Any, x_correlation: Any) -> Any:
    return attention_gain * x_correlation + ffn_gain


def _stable_correlation(m: Any, attention_gain: Any, ffn_gain: Any, drop_prob: Any) -> Any:
    """Smaller root of a r^2 - b r + c = 0: the weighted mean of the blocks' correlations."""
    kept = 1 - drop_prob
    a = ffn_gain * kept * (m.ratio(1, 2) - 1 / m.pi)
    b = attention_gain + ffn_gain - ffn_gain * kept / 2
    c = kept * (attention_gain + ffn_gain / m.pi)
    return 2 * c / (b + m.sqrt(b * b - 4 * a * c))


def _stable_grad_correlation(
    m: Any, attention_gain: Any, ffn_gain: Any, drop_prob: Any, x_correlation: Any
) -> Any:
    kept = 1 - drop_prob
    slope = m.ratio(1, 2) + m.asin(x_correlation) / m.pi
    return kept * attention_gain / (attention_gain + ffn_gain * (1 - kept * slope))


_POSITIVE_CORRELATION = {"x_correlation": SHARE}

PRE_LN_CHAIN = ComponentLaws(
    "pre_ln_chain",
    "Pre-LN stack of Table 2's blocks",
    {
        "variance_growth": asymptotic(
            _layer_variance, kedia("E.1.1: what one layer adds to the variance"), _TABLE_TWO
        ),
        "grad_exponent": asymptotic(
            Substituted(
                lambda m, above, below: above / below,
                above=Substituted(_layer_variance, x_correlation="grad_correlation"),
                below=_layer_variance,
            ),
            kedia("E.1.2: C_g; the gradient falls as (N/n)^C_g"),
            _TABLE_TWO,
        ),
        "grad_exponent_lower": Law(
            lambda m, attention_gain, ffn_gain: ffn_gain / (attention_gain + ffn_gain),
            kedia("E.1.2: C_g at r = 1, r_g = 0"),
        ),
        "grad_exponent_upper": Law(
            lambda m, attention_gain, ffn_gain: (attention_gain + ffn_gain) / ffn_gain,
            kedia("E.1.2: C_g at r = 0, r_g = 1"),
            limits={"ffn_gain": Interval(0.0, open_lower=True)},
            note="the displayed recursion prints the lower exponent on both sides",
        ),
        "correlation": Law(
            _stable_correlation,
            kedia("F, solved: its equation is quadratic in r"),
            "fitted",
            note="Table 2's polynomial; attention weighed by C_1, as at r = 1",
        ),
        "grad_correlation": asymptotic(
            _stable_grad_correlation,
            kedia("F, solved: its equation is linear in r_g"),
            "attention weighed by C_1, as at r_g = 1",
            limits=_POSITIVE_CORRELATION,
        ),
        "correlation_rate": asymptotic(
            lambda m, attention_gain, ffn_gain: attention_gain / (attention_gain + ffn_gain),
            derived(
                "without dropout: 1 - r falls as layer^-rate, since blocks' mixed correlation has "
                "slope C_2/(C_1 + C_2) at 1"
            ),
            "many layers",
        ),
    },
)

POST_LN_CHAIN = ComponentLaws(
    "post_ln_chain",
    "Post-LN stack of Table 2's blocks",
    {
        "grad_growth": asymptotic(
            lambda m, attention_gain, x_correlation, grad_correlation: (
                (1 + attention_gain * grad_correlation) / (1 + attention_gain * x_correlation)
            ),
            kedia("E.2.2: C_5, the factor of one layer on the gradient"),
            _TABLE_TWO + "; r leaves the layer below, r_g meets the attention",
        ),
        "correlation_rate": asymptotic(
            lambda m, attention_gain: 1 / (1 + attention_gain),
            derived(
                "without dropout, slope of one layer's map at r = 1: attention returns tokens "
                "alike, and the feed-forward block's slope there is 1"
            ),
            _TABLE_TWO,
        ),
    },
)


DSLM_CHAIN = ComponentLaws(
    "dslm_chain",
    "Stack of DeepScaleLM layers, lambda^2 + beta^2 = 1 and beta^2 = k/N^alpha",
    {
        "branch_square": Law(
            lambda m, branch_constant, branch_exponent, layers: (
                branch_constant / layers**branch_exponent
            ),
            kedia("3.5 and 4.6"),
        ),
        "sensitivity": Law(
            lambda m, layers, branch_square: layers * branch_square,
            kedia("4.6, after Davis et al. 2021: N sigma_block^2 / sigma_skip^2"),
            note="the section prints the ratio of the variances upside down",
        ),
        "grad_growth": asymptotic(
            lambda m, skip_square, branch_square, gradient_ratio: (
                skip_square + branch_square * gradient_ratio
            ),
            kedia("E.3.2 and E.4.2: the factor of one layer on the gradient"),
            _TABLE_TWO,
        ),
        "grad_bound": asymptotic(
            lambda m, branch_constant, gradient_ratio: m.exp(
                branch_constant * (gradient_ratio - 1)
            ),
            kedia("E.3.2, with beta^2 = k/N where the section writes 1/N"),
            "many layers, alpha = 1",
        ),
        "simplified_variance_lower": asymptotic(
            lambda m, branch_constant: (1 + m.exp(-2 * branch_constant)) / 2,
            kedia("E.5.1, equation 6, at k = 2"),
            "simplified initialisation, r = 0; many layers, alpha = 1, input variance 1",
        ),
        "simplified_variance_upper": asymptotic(
            lambda m, branch_constant: (3 + m.exp(-2 * branch_constant)) / 4,
            kedia("E.5.1, equation 6, at k = 2"),
            "simplified initialisation, r = 1; many layers, alpha = 1, input variance 1",
        ),
        "simplified_grad_lower": asymptotic(
            lambda m, branch_constant: m.exp(-2 * branch_constant),
            kedia("E.5.2: through the skip connections alone"),
            "many layers, alpha = 1",
        ),
        "simplified_grad_upper": asymptotic(
            lambda m, branch_constant, gradient_ratio: m.exp(branch_constant * gradient_ratio),
            kedia("E.5.2, from its premise that the variance stays above 1/2"),
            "many layers, alpha = 1; the section prints 2 C_6 + 2 for 2 C_6 at k = 2",
        ),
        "simplified_post_grad_growth": asymptotic(
            lambda m, branch_square, x_correlation, grad_correlation: (
                1 + branch_square / 2 * (grad_correlation - x_correlation)
            ),
            kedia("E.6.2, equation 7"),
            "small beta^2",
        ),
        "fall": asymptotic(
            lambda m, branch_constant, branch_exponent, layers: m.exp(
                -2 * branch_constant * layers ** (1 - branch_exponent)
            ),
            kedia("Appendix G: (1 - beta^2)^(2 N), what skip connections alone keep"),
            "small beta^2; the appendix prints a growing exponential",
        ),
    },
)
