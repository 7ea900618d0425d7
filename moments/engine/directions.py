"""What a gradient knows of its signal, to order 1/width: lost directions, and norms that persist.

Below a normalisation the gradient has no component along the signal (`Gradient.radial` 0), and
falls as the signal's squared norm rises (`Gradient.norm_response` 1). Norms of few features, in
groups or heads, fluctuate too much to expand: their cosines and inverses are taken exactly. See
docs/theory/gradients.md and docs/theory/norms.md, Short vectors.
"""

from __future__ import annotations

import math

import numpy as np

from ..formulas.algebra import is_number
from .layout import one_document
from .state import Array, Gradient, Kernel, Signal, ratio_or_zero

# --- short vectors --------------------------------------------------------------------------------

PARALLEL = 1 - 1e-12
"""Squared correlation that stands for 1, where hypergeometric functions have their singularity."""


def _hypergeometric(a: float, b: float, c: float, z: Array) -> Array:
    """2F1(a, b; c; z) of 0 <= z <= 1; of large c, where scipy's overflows next to z = 1, by 64
    terms of its series: of c = 64 the last is below 1e-30."""
    if c < 64:
        from scipy.special import hyp2f1

        return hyp2f1(a, b, c, z)
    total = term = 1.0 + 0.0 * z
    for k in range(64):
        term = term * z * ((a + k) * (b + k) / ((c + k) * (k + 1)))
        total = total + term
    return total


def expected_cosine(freedom: float, correlation: Array) -> Array:
    """E cos(x, x') over r, of two Gaussian vectors of n entries that correlate by r.

    (2/n) (Gamma((n + 1)/2)/Gamma(n/2))^2 2F1(1/2, 1/2; n/2 + 1; r^2), the mean of a sample
    correlation about a known mean (Hotelling 1953).
    """
    ratio = math.exp(2 * (math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)))
    square = correlation * correlation
    return 2 / freedom * ratio * _hypergeometric(0.5, 0.5, freedom / 2 + 1, square)


def expected_pull(freedom: float, correlation: Array) -> Array:
    """E tr(P P')/(|x| |x'|) over r, of two Gaussian vectors x, x' of n entries and variance 1.

    P projects on what is orthogonal to x, so that tr P P' = n - 2 + c^2 with c the cosine of x and
    x'; docs/theory/norms.md derives both means. At r = 1 it is (n - 1)/(n - 2).
    """
    n = freedom
    if is_number(correlation) and correlation * correlation == 1.0:
        return (n - 1) / (n - 2)
    square = np.minimum(correlation * correlation, PARALLEL)
    half = 0.5 * math.exp(2 * (math.lgamma((n - 1) / 2) - math.lgamma(n / 2)))
    both = _hypergeometric(0.5, 0.5, n / 2, square)
    apart = (1 - square) * _hypergeometric(1.5, 1.5, n / 2 + 1, square)
    result = half * (n - 1) * (both - apart / n)
    return result if np.ndim(result) else float(result)


# --- directions -----------------------------------------------------------------------------------


def isotropic(radial: Array) -> bool:
    """Whether a gradient has as much along its signal as along any other direction."""
    return is_number(radial) and radial == 1.0


def knows_directions(gradient: Gradient) -> bool:
    """Whether a gradient is anything but generic towards its signal."""
    response = gradient.norm_response
    nothing = is_number(response) and response == 0.0
    return not (nothing and isotropic(gradient.radial))


def at_tokens(kernel: Kernel, value: Array) -> tuple[Array, Array, Array]:
    """A number per token or one for all: at one token, and at the two of a pair."""
    if not kernel.resolved or np.ndim(value) == 0:
        return value, value, value
    if np.ndim(value) < np.ndim(kernel.diagonal):
        one, two = kernel.lift(value)
        return one, two, two
    return (value, *kernel.over_tokens(value))


def of_pairs(first: Array, second: Array, overlap: Array) -> Array:
    """What a covariance of two tokens loses where each loses its share; `overlap`, r^2, once."""
    return first + second - abs(first * second) ** 0.5 * overlap


def without(kernel: Kernel, signal: Signal, lost: Array) -> Kernel:
    """A gradient's kernel, less the share `lost` that lies along its signal's direction.

    Two tokens' directions overlap by r: a covariance loses 2 - r^2 of them.
    """
    one, first, second = at_tokens(kernel, lost)
    return kernel.weighted(1 - one, 1 - of_pairs(first, second, signal.cosine_square()))


def realigned(kernel: Kernel, output: Signal, gradient: Gradient, alignment: Array) -> Kernel:
    """The gradient behind entrywise units f, whose sizes and slopes fluctuate together.

    It lacks (1 - radial + k)(alignment - 1)/width more, alignment = E f^2 f'^2/(E f^2 E f'^2), k
    the response to the norm. Derived for one token; two tokens' covariance is given the same
    alignment, of 2 - r^2 directions. 1/(1 + loss) stands for 1 - loss: few units leave no negative
    variance.
    """
    more = (alignment - 1) / output.width
    if kernel.resolved and np.ndim(alignment):
        more = kernel.average(more)
    of_one, of_two = kernel.lift(more)
    one, first, second = at_tokens(kernel, 1 - gradient.radial)
    falls, falls_first, falls_second = at_tokens(kernel, gradient.norm_response)
    off_diagonal = (
        of_pairs(first, second, output.cosine_square()) + (falls_first + falls_second) / 2
    )
    return kernel.weighted(1 / (1 + of_one * (one + falls)), 1 / (1 + of_two * off_diagonal))


def shortened(tokens: Kernel, spread: Kernel, response: Array) -> Kernel:
    """Second moments of tokens as gradients weigh them that fall with their norms.

    E |x|^2 |g|^2 = E |x|^2 E |g|^2 (1 - response v), v the relative variance of |x|^2, written
    1/(1 + response v).
    """
    if is_number(response) and response == 0.0:
        return tokens
    diagonal = ratio_or_zero(spread.diagonal, tokens.diagonal * tokens.diagonal)
    falls, _, _ = at_tokens(tokens, response)
    one, first, second = at_tokens(tokens, falls * diagonal)
    return tokens.weighted(1 / (1 + one), 1 / (1 + (first + second) / 2))


def persistence(signal: Signal, response: Array) -> Kernel:
    """Relative growth of a branch's gradient because the one above it falls with the same norm.

    k (v_i + v_j + 2 c_ij)/4, k the response, v and c the relative variance and covariance of
    squared norms.
    """
    single, common = relative_spread(signal)
    kernel = signal.kernel
    one, first, second = at_tokens(kernel, response)
    v, w = kernel.over_tokens(single)
    off_diagonal = (first * v + second * w + (first + second) * common) / 4
    return Kernel.joined(one * single, off_diagonal, kernel.resolved)


def shared_persistence(
    signal: Signal, response: Array, above: Kernel, documents: np.ndarray | None = None
) -> Array:
    """What of that growth attention returns to a token, averaged over those that send it.

    k_i c_ij over tokens i of a sequence, or of j's document in packed rows (B, L), weighted by the
    gradient's variance at each; which of them attend to j is left out.
    """
    single, common = relative_spread(signal)
    length = signal.seq_len
    if not signal.resolved:
        return response * (single + (length - 1) * common) / length
    if signal.kernel.classes is not None:
        classes = signal.kernel.classes
        counted = above.diagonal * classes.count
        share = ratio_or_zero(counted, counted.sum(-1, keepdims=True) + 0.0 * counted) * response
        share, count = classes.as_one_document(share), classes.as_one_document(classes.count)
        (diagonal, inside), *_ = classes.blocks(single, common)
        excess = diagonal - np.diagonal(inside, axis1=-2, axis2=-1)
        sums = (share[..., None, :] @ inside)[..., 0, :]
        return classes.repeated(sums + share * excess / count)
    leading, count = common.shape[:-2], common.shape[-1]
    blocks = common.reshape(*leading, count // length, length, count // length, length)
    diagonal = np.einsum("...bibj->...bij", blocks)
    sizes = np.broadcast_to(above.diagonal, (*leading, count)).reshape(*diagonal.shape[:-1])
    grad_out = sizes.sum(-1, keepdims=True) + 0.0 * sizes
    if documents is not None:
        together = one_document(documents) + 0.0
        grad_out, diagonal = np.einsum("...bi,bij->...bj", sizes, together), diagonal * together
    fallen = sizes * np.broadcast_to(response, (*leading, count)).reshape(*diagonal.shape[:-1])
    result = np.einsum("...bi,...bij->...bj", fallen, diagonal)
    return ratio_or_zero(result, grad_out).reshape(*leading, count)


def relative_spread(signal: Signal, features: bool = True) -> tuple[Array, Array]:
    """Relative variance of squared norms and covariance of those of two tokens.

    Without `features`, less what independent Gaussian features have of it, 2/width and 2 r^2/width.
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
    """What scale invariance takes from the two parts of a gradient, to order 1/d.

    Along x, which enters u = x + M x, the branch returns what cancels the skip connection. The
    branch loses one direction in d, of which its matrices have left `grad_in.radial`, the skip
    connection `share` of one, the branch's part of |u|^2; of a gradient that keeps `radial` of its
    component along u both lose the rest. Exact in this order where the branch has degree 1, acts on
    every token alone and has the same gain both ways; one that mixes tokens loses the direction of
    their average, and the skip connection what gradients share.
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
