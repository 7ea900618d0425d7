"""Scaled dot-product attention: the refined laws, then the published ones.

As published: log-normal weights, and of the gradient only the value path.

theta_0 = d v^2 sigma_q^2 sigma_k^2, so that the logits of one row have variance (1 - r) d theta_0.
The functions' parameter names are the laws' symbols.
"""

from __future__ import annotations

from typing import Any

from .law import ComponentLaws, Law, Substituted, asymptotic, derived
from .references import kedia

# --- tokens alike, complete: value, query and key paths, finite L, d and d_k ----------------------
#
# Tokens x = sqrt(v) (sqrt(r) c + sqrt(1 - r) e_j), logits Gaussian given the query, of variance
# theta = (1 - r) Theta within a row and covariance psi between rows. With D = diag(a) - a a^T the
# softmax Jacobian of a row, the statistics that enter are exact expectations over Gaussian logits
# (see `moments.transfer.attention.softmax`), averaged over the chi-square fluctuation of the
# queries' norms: P_2 = E sum a^2, C_2 = E a.a', T_2 = E tr D^2, T = E tr D D', and those weighted
# with the logits.
#
# Every backward law is per unit of beta = d_v sigma_v^2 sigma_g^2, the value path's gain. The
# terms in 1/d and 1/d_k come from the overlap of a logit's direction with the tokens it weighs,
# each expanded to first order: with o_jk = x_j.x_k/d and |w|^2 = Theta of a row,
#
#     E f(s) o_jk = E o_jk E f + (Theta/2) sum_lm Cov(o_jk, o_lm) E d_l d_m f.
#
# Gaussian tokens have d Cov(o_jk, o_lm) = r_jl r_km + r_jm r_kl. Fixing the norms adds
#
#     r_jk r_lm (r_jl^2 + r_jm^2 + r_kl^2 + r_km^2)/2 - r_jk (r_jl r_jm + r_kl r_km)
#                                                     - r_lm (r_lj r_lk + r_mj r_mk),
#
# and sum_l d_l = 0 on any function of a softmax leaves of it the terms in delta = `norm_deficit`
# below: 1/d after a normalisation, 0 for Gaussian tokens. Those that multiply a statistic are
# written as exponentials, equal to first order, which keep variances positive. Left out:
# gradients through values and queries, and through queries and keys, correlate to order 1/(d L).


_PROOF = derived("second moments of Gaussian logits and tokens; tested by Monte Carlo of one layer")
_ORDER = (
    "first order in 1/d_model and 1/d_head; exact in the sequence length and logit variance for "
    "Gaussian tokens, to first order for tokens of fixed norm"
)


def _dropped(drop_prob: Any) -> Any:
    """Relative variance of a kept-and-scaled attention weight."""
    return drop_prob / (1 - drop_prob)


def average_variance(
    m: Any,
    d_model: Any,
    norm_deficit: Any,
    drop_prob: Any,
    x_correlation: Any,
    row_square: Any,
    row_square_slope: Any,
    row_tilt: Any,
    row_logit_square: Any,
    row_dropout_cross: Any,
    row_skewness: Any,
) -> Any:
    """Variance of sum_j a_ij x_j over that of x."""
    unshared = 1 - x_correlation
    stiff = m.exp(-2 * unshared**2 * norm_deficit * row_dropout_cross / row_square)
    mixed = unshared * (row_square * stiff * (1 - 1 / d_model) + row_tilt / d_model)
    fluctuating = unshared * (1 / d_model - norm_deficit)
    masks = row_square + fluctuating * (row_logit_square - row_square)
    # Overlaps with tokens of fixed norm fluctuate less, and against the logit variance.
    against = (
        2 * x_correlation**2 * row_square_slope - x_correlation * (1 + unshared) * row_skewness
    )
    mixed = mixed + norm_deficit * unshared * against
    return x_correlation + mixed + _dropped(drop_prob) * masks


def average_covariance(
    m: Any,
    d_model: Any,
    norm_deficit: Any,
    logit_scale: Any,
    x_correlation: Any,
    row_square: Any,
    row_cube: Any,
    row_vacancy: Any,
    row_dropout_cross: Any,
    row_skewness: Any,
    overlap: Any,
    overlap_slope: Any,
    jacobian_overlap: Any,
) -> Any:
    """Covariance of sum_j a_ij x_j and sum_j a_kj x_j over the variance of x."""
    r, unshared = x_correlation, 1 - x_correlation
    # E tr D tr D' and E (a'.a^2 - a.a' sum a^2) interpolate between independent and equal rows;
    # `shared` stands for theta E sum_l (d_l + d'_l)^2 a_l a'_l / 2 over C_2, and is that for equal
    # rows or many keys.
    vacancies = (1 - row_square) ** 2 * (1 - r**2) + r**2 * row_vacancy
    square_square = row_vacancy - 1 + 2 * row_square
    joint_shift = vacancies + jacobian_overlap - 4 * (row_cube - square_square)
    joint_shift = r * unshared * logit_scale / d_model * joint_shift
    shared = (1 + r) * row_dropout_cross / row_square
    stiff = m.exp(-(unshared**2) * norm_deficit * shared)
    against = 2 * r**2 * overlap_slope - r * (1 + unshared) * row_skewness
    return r + unshared * (overlap * stiff + joint_shift + norm_deficit * against)


def value_variance(
    m: Any,
    seq_len: Any,
    drop_prob: Any,
    row_square: Any,
    overlap: Any,
    grad_variance: Any,
    grad_covariance: Any,
) -> Any:
    """sum_i a_ij g_i: exact given the statistics."""
    others = (seq_len - 1) * overlap * grad_covariance
    return row_square / (1 - drop_prob) * grad_variance + others


def value_covariance(
    m: Any, seq_len: Any, row_square: Any, overlap: Any, grad_variance: Any, grad_covariance: Any
) -> Any:
    return (1 - row_square) / (seq_len - 1) * grad_variance + (1 - overlap) * grad_covariance


def query_variance(
    m: Any,
    d_model: Any,
    d_head: Any,
    norm_deficit: Any,
    drop_prob: Any,
    logit_scale: Any,
    x_correlation: Any,
    row_square: Any,
    row_cube: Any,
    row_fourth: Any,
    row_vacancy: Any,
    jacobian_square: Any,
    jacobian_curvature: Any,
    jacobian_radial: Any,
    grad_variance: Any,
) -> Any:
    """Through the logits' left factor."""
    unshared = 1 - x_correlation
    diagonal = row_square - 2 * row_cube + row_fourth
    straight = jacobian_square * (1 - 2 / d_model - 1 / d_head)
    stiff = unshared**2 * norm_deficit / jacobian_square
    # The keys' own variance, fluctuating by 2 r^2 delta, enters squared and through the weights.
    common = x_correlation**2 * norm_deficit
    radial = straight + jacobian_radial * (1 / d_head + 3 / d_model)
    radial = radial * m.exp(-2 * stiff * (diagonal + jacobian_curvature))
    radial = radial + row_vacancy / d_model + common * (4 * jacobian_radial - 2 * jacobian_square)
    masks = straight + jacobian_radial * (1 / d_head + 2 / d_model)
    masks = masks * m.exp(-stiff * jacobian_curvature)
    masks = masks + unshared * (1 / d_model - norm_deficit) * (2 * diagonal + jacobian_curvature)
    masks = masks + 2 * common * (jacobian_radial - jacobian_square)
    return (
        unshared * logit_scale * (unshared * radial + _dropped(drop_prob) * masks) * grad_variance
    )


def query_covariance(
    m: Any,
    d_model: Any,
    d_head: Any,
    norm_deficit: Any,
    logit_scale: Any,
    x_correlation: Any,
    row_square: Any,
    row_cube: Any,
    row_fourth: Any,
    jacobian_square: Any,
    jacobian_curvature: Any,
    jacobian_overlap: Any,
    radial_overlap: Any,
    grad_covariance: Any,
) -> Any:
    unshared = 1 - x_correlation
    straight = jacobian_overlap * (1 - 2 / d_model - 1 / d_head)
    radial = straight + radial_overlap * (1 / d_head + 3 / d_model)
    # The curvature of two rows over that of one: (1 + r)/2 for many keys and for equal rows.
    diagonal = row_square - 2 * row_cube + row_fourth
    shared = diagonal + (1 + x_correlation) / 2 * jacobian_curvature
    stiff = m.exp(-2 * unshared**2 * norm_deficit * shared / jacobian_square)
    shape = (1 - row_square) ** 2 / d_model + radial * stiff
    return unshared * logit_scale * unshared * shape * grad_covariance


def key_variance(
    m: Any,
    d_model: Any,
    norm_deficit: Any,
    seq_len: Any,
    drop_prob: Any,
    logit_scale: Any,
    x_correlation: Any,
    jacobian_square: Any,
    jacobian_square_logit: Any,
    jacobian_curvature: Any,
    jacobian_radial_logit: Any,
    jacobian_overlap_logit: Any,
    radial_overlap_logit: Any,
    grad_variance: Any,
    grad_covariance: Any,
) -> Any:
    """Through the logits' right factor."""
    unshared = 1 - x_correlation
    curvature = jacobian_curvature / jacobian_square
    stiff = unshared**2 * norm_deficit * curvature
    straight = jacobian_square_logit * (1 - 1 / d_model) + jacobian_radial_logit / d_model
    straight = unshared * straight * m.exp(-stiff)
    masks = jacobian_square_logit * (1 + unshared * (1 / d_model - norm_deficit) * curvature)
    alone = logit_scale * (straight + _dropped(drop_prob) * masks)
    others = jacobian_overlap_logit * (1 - 1 / d_model) + radial_overlap_logit / d_model
    others = others * m.exp(-(1 + x_correlation) / 2 * stiff)
    return alone * grad_variance + (seq_len - 1) * others * grad_covariance


def cross_variance(
    m: Any,
    d_model: Any,
    seq_len: Any,
    drop_prob: Any,
    row_square_slope: Any,
    row_dropout_cross: Any,
    overlap_slope: Any,
    grad_variance: Any,
    grad_covariance: Any,
) -> Any:
    """Values and keys read the same token: their gradients correlate to order 1/d."""
    own = row_square_slope + _dropped(drop_prob) * row_dropout_cross
    return 2 / d_model * (own * grad_variance + (seq_len - 1) * overlap_slope * grad_covariance)


def _returned_covariance(
    m: Any,
    fan_out: Any,
    value: Any,
    seq_len: Any,
    value_path_covariance: Any,
    query_path_covariance: Any,
    key_path: Any,
    cross_path: Any,
) -> Any:
    fed_back = (key_path + cross_path) / (seq_len - 1)
    return fan_out * value * (value_path_covariance + query_path_covariance - fed_back)


def _law(formula: Any, note: str = _ORDER) -> Law:
    return asymptotic(formula, _PROOF, note)


# Per unit of the input's variance, and per unit of the value path's gain.
AVERAGE: dict[str, Law] = {
    "variance": _law(average_variance),
    "covariance": _law(average_covariance),
    "grad_value": _law(value_variance, "exact given the statistics"),
    "grad_value_covariance": _law(value_covariance, "exact given the statistics"),
    "grad_query": _law(query_variance),
    "grad_query_covariance": _law(query_covariance),
    "grad_key": _law(key_variance),
    "grad_cross": _law(cross_variance),
}

# With value weights: the gain in front, and the paths added up. Rows of the logit gradient sum to
# zero, so what reaches the keys sums to zero over tokens: covariance is -1/(L-1) of the variance.
WITH_VALUE: dict[str, Law] = {
    "variance": _law(
        lambda m, d_model, value, x_variance, average_variance: (
            d_model * value * x_variance * average_variance
        )
    ),
    "covariance": _law(
        lambda m, d_model, value, x_variance, average_covariance: (
            d_model * value * x_variance * average_covariance
        )
    ),
    "grad_variance": _law(
        lambda m, fan_out, value, value_path, query_path, key_path, cross_path: (
            fan_out * value * (value_path + query_path + key_path + cross_path)
        )
    ),
    "grad_covariance": _law(_returned_covariance),
}


# --- as published ---------------------------------------------------------------------------------

FORWARD_NOTE = (
    "large L and d; log-normal attention weights; dropout of the common part left out "
    "(-2.9 % at L = 50, r = .9, p = .6)"
)
BACKWARD_NOTE = (
    "value path under uniform attention only: the query and key paths left out cost a factor of "
    "3 to 10 in deep Post-LN models, more under a causal mask"
)


def _theta(m: Any, d_model: Any, query: Any, key: Any, x_variance: Any) -> Any:
    return d_model * x_variance**2 * query * key


_AS_PRINTED: dict[str, Any] = {"v": "x_variance", "r": "x_correlation", "theta": _theta}


def _average_variance(
    m: Any, d_model: Any, seq_len: Any, theta: Any, drop_prob: Any, v: Any, r: Any
) -> Any:
    """Variance of sum_j a_ij x_j."""
    weights = m.exp((1 - r) * d_model * theta) / (1 - drop_prob)
    scattered = (1 - r) ** 2 * (seq_len - 1) * theta
    return v * ((scattered + weights * (4 * (1 - r) ** 2 * theta + (1 - r))) / seq_len + r)


def _average_covariance(m: Any, seq_len: Any, theta: Any, v: Any, r: Any) -> Any:
    """Covariance of sum_j a_ij x_j and sum_j a_kj x_j."""
    return v * (r + (2 * (1 - r) ** 2 * theta + (1 - r)) / seq_len)


_AVERAGE_VARIANCE = Substituted(_average_variance, **_AS_PRINTED)
_AVERAGE_COVARIANCE = Substituted(_average_covariance, **_AS_PRINTED)


def value_path_variance(
    m: Any, seq_len: Any, drop_prob: Any, grad_variance: Any, grad_covariance: Any
) -> Any:
    """Variance of sum_i a_ij g_i."""
    kept = 1 - drop_prob
    return (grad_variance + (seq_len - 1) * grad_covariance * kept) / (seq_len * kept)


def value_path_covariance(m: Any, seq_len: Any, grad_variance: Any, grad_covariance: Any) -> Any:
    return (grad_variance + (seq_len - 1) * grad_covariance) / seq_len


def _common(m: Any, x_variance: Any, x_correlation: Any) -> Any:
    """What all tokens share."""
    return x_correlation * x_variance


def _grad_common(m: Any, grad_covariance: Any) -> Any:
    return grad_covariance


ATTENTION_WITHOUT_VALUE = ComponentLaws(
    "attention_without_value",
    "Single-head attention without the value projection",
    {
        "mean": Law(lambda m: 0, kedia("Table 15, SHA")),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19, SHA")),
    },
    refined=AVERAGE,
    published={
        "variance": asymptotic(
            _AVERAGE_VARIANCE,
            kedia("A.8 and Table 16, SHA"),
            FORWARD_NOTE + "; the table's factor d_in is a misprint",
        ),
        "covariance": asymptotic(
            _AVERAGE_COVARIANCE,
            kedia("A.8 and Table 18, SHA"),
            FORWARD_NOTE + "; the table's factor d_in is a misprint",
        ),
        "grad_variance": asymptotic(
            value_path_variance,
            kedia("A.8 and Table 17, SHA"),
            BACKWARD_NOTE + "; the table's d_in and (1-p)^2 are misprints",
        ),
        "grad_covariance": asymptotic(
            value_path_covariance,
            kedia("A.8 and Table 20, SHA"),
            BACKWARD_NOTE + "; the table's factor d_in is a misprint",
        ),
    },
    simplified={
        quantity: asymptotic(formula, kedia(place), "uniform attention over many tokens")
        for quantity, formula, place in (
            ("variance", _common, "Table 1, SHA"),
            ("covariance", _common, "Table 1, SHA: output correlation 1"),
            ("grad_variance", _grad_common, "Table 1, SHA"),
            ("grad_covariance", _grad_common, "Table 1, SHA: gradient correlation 1"),
        )
    },
)


def _with_value(average: Any) -> Substituted:
    """Behind the value projection."""
    return Substituted(lambda m, value, d_model, of: d_model * value * of, of=average)


attention_variance = _with_value(_AVERAGE_VARIANCE)
attention_covariance = _with_value(_AVERAGE_COVARIANCE)


def _returned(through_values: Any) -> Substituted:
    """Before the value projection."""
    return Substituted(lambda m, value, fan_out, of: fan_out * value * of, of=through_values)


# Heads share the input and have independent weights: each carries the moments of one head, and
# the gradients they send back add up, so fan_out is the width of all values together.
ATTENTION = ComponentLaws(
    "attention",
    "Multi-head scaled dot-product attention with value projection, heads concatenated",
    {
        "mean": Law(lambda m: 0, kedia("A.8 and Table 15")),
        "hidden_covariance": Law(lambda m: 0, kedia("Table 19")),
        "kurtosis": Law(lambda m: 3, kedia("A.8: Gaussian value weights")),
    },
    refined=WITH_VALUE,
    published={
        "variance": asymptotic(attention_variance, kedia("A.8"), FORWARD_NOTE),
        "covariance": asymptotic(attention_covariance, kedia("A.8"), FORWARD_NOTE),
        "grad_variance": asymptotic(_returned(value_path_variance), kedia("A.8"), BACKWARD_NOTE),
        "grad_covariance": asymptotic(
            _returned(value_path_covariance), kedia("A.8"), BACKWARD_NOTE
        ),
    },
)
