"""Corrections of order 1/width to gradients that depend on the signal: direction and norm.

At the input of a normalisation the gradient has no component along the signal (`Gradient.radial`
0), and decreases with the signal's squared norm (`Gradient.norm_response` 1). Norms of few
features, in groups or heads, fluctuate too much for an expansion: their cosines and inverses are
averaged exactly. See docs/theory/gradients.md and docs/theory/norms.md, Short vectors.
"""

from __future__ import annotations

import math

import numpy as np

from ..formulas.algebra import is_number
from .layout import same_document
from .state import Array, Gradient, Kernel, Signal, ratio_or_zero

# --- short vectors --------------------------------------------------------------------------------

PARALLEL = 1 - 1e-12
"""Largest squared correlation, short of 1, where hypergeometric functions are singular."""


def _hypergeometric(a: float, b: float, c: float, z: Array) -> Array:
    """2F1(a, b; c; z) for 0 <= z <= 1. For c >= 64, where scipy's overflows near z = 1, by 64 terms
    of the series, the last of which is below 1e-30."""
    if c < 64:
        from scipy.special import hyp2f1

        return hyp2f1(a, b, c, z)
    total = term = 1.0 + 0.0 * z
    for k in range(64):
        term = term * z * ((a + k) * (b + k) / ((c + k) * (k + 1)))
        total = total + term
    return total


def expected_cosine(freedom: float, correlation: Array) -> Array:
    """E cos(x, x')/r for two Gaussian vectors of n entries with correlation r.

    (2/n) (Gamma((n + 1)/2)/Gamma(n/2))^2 2F1(1/2, 1/2; n/2 + 1; r^2), the mean of a sample
    correlation about a known mean (Hotelling 1953).
    """
    ratio = math.exp(2 * (math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)))
    square = correlation * correlation
    return 2 / freedom * ratio * _hypergeometric(0.5, 0.5, freedom / 2 + 1, square)


def expected_pull(freedom: float, correlation: Array) -> Array:
    """E tr(P P')/(|x| |x'|) for Gaussian vectors x, x' of n entries, variance 1 and correlation r.

    P projects on the complement of x, so that tr P P' = n - 2 + c^2 with the cosine c of x and x';
    docs/theory/norms.md derives both means. At r = 1 it is (n - 1)/(n - 2).
    """
    n = freedom
    if is_number(correlation) and correlation * correlation == 1.0:
        return (n - 1) / (n - 2)
    square = np.minimum(correlation * correlation, PARALLEL)
    half = 0.5 * math.exp(2 * (math.lgamma((n - 1) / 2) - math.lgamma(n / 2)))
    first = _hypergeometric(0.5, 0.5, n / 2, square)
    second = (1 - square) * _hypergeometric(1.5, 1.5, n / 2 + 1, square)
    result = half * (n - 1) * (first - second / n)
    return result if np.ndim(result) else float(result)


# --- directions -----------------------------------------------------------------------------------


def isotropic(radial: Array) -> bool:
    """Whether a gradient's component along the signal is like any other."""
    return is_number(radial) and radial == 1.0


def knows_directions(gradient: Gradient) -> bool:
    """Whether a gradient depends on the direction or the norm of its signal."""
    response = gradient.norm_response
    no_response = is_number(response) and response == 0.0
    return not (no_response and isotropic(gradient.radial))


def at_tokens(kernel: Kernel, value: Array) -> tuple[Array, Array, Array]:
    """A value per token or for all tokens, broadcast against the diagonal, and as the first and
    second token against the off-diagonal."""
    if not kernel.resolved or np.ndim(value) == 0:
        return value, value, value
    if np.ndim(value) < np.ndim(kernel.diagonal):
        one, two = kernel.lift(value)
        return one, two, two
    return (value, *kernel.over_tokens(value))


def of_pairs(first: Array, second: Array, overlap: Array) -> Array:
    """Relative loss of a covariance if each of two tokens loses its own direction, which have the
    squared cosine `overlap`; `first` and `second` are the losses of the variances."""
    return first + second - abs(first * second) ** 0.5 * overlap


def without(kernel: Kernel, signal: Signal, lost: Array) -> Kernel:
    """A gradient's kernel without the share `lost` of its variance along the signal's direction.

    With the cosine r of two tokens a covariance loses 2 - r^2 such shares.
    """
    one, first, second = at_tokens(kernel, lost)
    return kernel.weighted(1 - one, 1 - of_pairs(first, second, signal.cosine_square()))


def with_alignment(kernel: Kernel, output: Signal, gradient: Gradient, alignment: Array) -> Kernel:
    """The gradient `kernel` behind an activation f, whose squares correlate with its slopes'.

    It loses (1 - radial + k)(alignment - 1)/width, with alignment = E f^2 f'^2/(E f^2 E f'^2) and
    the response k to the norm. Derived for one token; for a covariance the same alignment is
    assumed, of 2 - r^2 directions. 1/(1 + loss) replaces 1 - loss, so that variances of few units
    stay positive.
    """
    loss = (alignment - 1) / output.width
    if kernel.resolved and np.ndim(alignment):
        loss = kernel.average(loss)
    of_one, of_two = kernel.lift(loss)
    one, first, second = at_tokens(kernel, 1 - gradient.radial)
    response, response_first, response_second = at_tokens(kernel, gradient.norm_response)
    off_diagonal = of_pairs(first, second, output.cosine_square())
    off_diagonal = off_diagonal + (response_first + response_second) / 2
    return kernel.weighted(1 / (1 + of_one * (one + response)), 1 / (1 + of_two * off_diagonal))


def weighted_by_gradient(tokens: Kernel, spread: Kernel, response: Array) -> Kernel:
    """Second moments of tokens, weighted by squared gradients that decrease with their norms.

    E |x|^2 |g|^2 = E |x|^2 E |g|^2 (1 - response v) with the relative variance v of |x|^2, of which
    `spread` is the absolute; 1/(1 + response v) replaces the factor.
    """
    if is_number(response) and response == 0.0:
        return tokens
    diagonal = ratio_or_zero(spread.diagonal, tokens.diagonal * tokens.diagonal)
    response, _, _ = at_tokens(tokens, response)
    one, first, second = at_tokens(tokens, response * diagonal)
    return tokens.weighted(1 / (1 + one), 1 / (1 + (first + second) / 2))


def persistence(signal: Signal, response: Array) -> Kernel:
    """Relative growth of a branch's gradient, as the gradient above decreases with the same norm.

    k (v_i + v_j + 2 c_ij)/4 with the response k and the relative variance v and covariance c of
    squared norms.
    """
    single, common = relative_norm_variance(signal)
    kernel = signal.kernel
    one, first, second = at_tokens(kernel, response)
    v, w = kernel.over_tokens(single)
    off_diagonal = (first * v + second * w + (first + second) * common) / 4
    return Kernel.of_parts(one * single, off_diagonal, kernel.resolved)


def shared_persistence(
    signal: Signal, response: Array, above: Kernel, documents: np.ndarray | None = None
) -> Array:
    """Relative growth, per token, of the gradient that attention returns.

    k_i c_ij averaged over the tokens i of j's sequence, or document in packed rows (B, L), weighted
    by the gradient's variance `above`; that not all of them attend to j is neglected.
    """
    single, common = relative_norm_variance(signal)
    length = signal.seq_len
    if not signal.resolved:
        return response * (single + (length - 1) * common) / length
    if signal.kernel.classes is not None:
        classes = signal.kernel.classes
        weights = above.diagonal * classes.count
        share = ratio_or_zero(weights, weights.sum(-1, keepdims=True) + 0.0 * weights) * response
        share, count = classes.as_one_document(share), classes.as_one_document(classes.count)
        (diagonal, inside), *_ = classes.blocks(single, common)
        excess = diagonal - np.diagonal(inside, axis1=-2, axis2=-1)
        sums = (share[..., None, :] @ inside)[..., 0, :]
        return classes.tiled(sums + share * excess / count)
    leading, count = common.shape[:-2], common.shape[-1]
    blocks = common.reshape(*leading, count // length, length, count // length, length)
    sequences = np.einsum("...bibj->...bij", blocks)
    by_sequence = sequences.shape[:-1]
    weights = np.broadcast_to(above.diagonal, (*leading, count)).reshape(*by_sequence)
    total = weights.sum(-1, keepdims=True) + 0.0 * weights
    if documents is not None:
        same = same_document(documents) + 0.0
        total, sequences = np.einsum("...bi,bij->...bj", weights, same), sequences * same
    weights = weights * np.broadcast_to(response, (*leading, count)).reshape(*by_sequence)
    result = np.einsum("...bi,...bij->...bj", weights, sequences)
    return ratio_or_zero(result, total).reshape(*leading, count)


def relative_norm_variance(signal: Signal, features: bool = True) -> tuple[Array, Array]:
    """Relative variance of squared norms, and covariance of those of two tokens.

    Without `features`, minus that of independent Gaussian features, 2/width and 2 r^2/width.
    """
    assert signal.fluctuation is not None
    kernel, spread = signal.kernel, signal.fluctuation.norms
    if not features:
        spread = spread - (kernel * kernel).scaled(2 / signal.width)
    first, second = kernel.over_tokens(kernel.diagonal)
    single = ratio_or_zero(spread.diagonal, kernel.diagonal * kernel.diagonal)
    return single, ratio_or_zero(spread.off_diagonal, first * second)


def orthogonal_parts(
    signal: Signal, share: Array, gradient: Gradient, kept: Kernel, grad_in: Gradient, mixing: bool
) -> tuple[Kernel, Kernel]:
    """The gradients through the skip connection and the branch of u = x + M x, corrected for scale
    invariance to order 1/d.

    Along x the two gradients cancel. The branch loses one of d directions, times `grad_in.radial`
    that its matrices preserved, the skip connection `share` of one, the branch's part of |u|^2;
    both times 1 - `gradient.radial`. Exact to this order for a branch of degree 1 that acts on
    tokens separately with the same gain forward and backward. A branch that mixes tokens loses the
    direction of their average, and the skip connection that of their mean gradient.
    """
    width, lost = signal.width, 1.0 - gradient.radial
    both = 1.0 if mixing else 2 - signal.correlation() ** 2
    above = gradient.kernel
    common = ratio_or_zero(above.mean_off_diagonal(), above.mean_diagonal()) if mixing else 1.0
    one, two = kept.lift(grad_in.radial * lost / width)
    skip_one, skip_two = kept.lift(share * common * lost / width)
    return (
        kept.weighted(1 - skip_one, 1 - skip_two * both),
        grad_in.kernel.weighted(1 - one, 1 - two * both),
    )
