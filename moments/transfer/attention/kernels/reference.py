"""The exchangeable row that stands for each row of a token kernel.

Attention row i has Gaussian logits with covariance tau C_ii C_jk over its allowed keys. Its softmax
is compared with that of n_e keys whose covariance is tau (b + (spread) delta_jk): softmax ignores
the common part b, so two numbers describe that row, its logit variance theta and its number of keys
n_e. They are chosen to reproduce the overlap distribution of the kernel's keys through

    mean C,    log mean e^{tau C},    log mean e^{2 tau C}    (means over pairs of allowed keys),

the last two being the second and fourth annealed moments of the partition sum. An exchangeable
kernel is returned exactly, and so are clusters of equal size whose members coincide.

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FEWEST_KEYS = 3.0
"""Floor of n_e where the row allows that many: the response in `mean_attention` is 0/0 at 2."""


class ReferenceRow(NamedTuple):
    """Exchangeable rows, one per attention row; arrays (L,).

    Attributes:
        theta: variance of the logits around their common part.
        keys: effective number of keys n_e, between 1 and 1/sum prior^2, the number of keys.
    """

    theta: Array
    keys: Array


Mean = Callable[[Callable[[Array], Array]], Array]
"""Means over every row's pairs of keys of a function of C - max C."""


def annealed_moments(mean: Mean, relative: Array, spread: float, tau: float) -> tuple[Array, Array]:
    """log mean e^{tau (C - mean C)} and log mean e^{2 tau (C - mean C)} over a row's key pairs.

    Args:
        mean: over pairs.
        relative: (rows,) mean of C - max C.
        spread: max C - min C.
        tau: as in `reference_rows`.
    """
    shift = -tau * relative
    if tau * spread < 1.0:  # logarithms of numbers near one: keep their excess
        first = np.log1p(mean(lambda below: np.expm1(tau * below)))
        second = np.log1p(mean(lambda below: np.expm1(2.0 * tau * below)))
    else:
        first = np.log(np.maximum(mean(lambda below: np.exp(tau * below)), 1e-300))
        second = np.log(np.maximum(mean(lambda below: np.exp(2.0 * tau * below)), 1e-300))
    return np.maximum(first + shift, 0.0), np.maximum(second + 2.0 * shift, 0.0)


def _annealed(theta: Array, keys: Array) -> Array:
    """log mean over key pairs of e^{cov - mean cov} of an exchangeable row."""
    return np.asarray(np.logaddexp(np.log1p(-1.0 / keys), theta - np.log(keys)) - theta / keys)


def _theta_of(keys: Array, target: Array, theta: Array) -> Array:
    """Root of `_annealed(theta, keys) = target`, convex and increasing in theta: Newton's method.

    One step from anywhere lands at or above the root, after which the descent is monotone.
    """
    bound = (target + np.log(keys)) / (1.0 - 1.0 / keys)
    theta = np.minimum(np.maximum(theta, 1e-12), bound)
    for _ in range(6):
        value = _annealed(theta, keys)
        occupied = np.exp(theta - np.log(keys) - value - theta / keys)
        slope = np.maximum(occupied - 1.0 / keys, 1e-12)
        theta = np.clip(theta - (value - target) / slope, 1e-12, bound)
    return theta


def reference_rows(kernel: Array, prior: Array, tau: float) -> ReferenceRow:
    """Match every row's overlap distribution.

    Args:
        kernel: (L, L) second moments C of the keys.
        prior: (rows, L) weights of every row's keys at vanishing logits; they sum to 1, and a row's
            pairs of keys are averaged under them.
        tau: covariance of logits per unit of query kernel times key kernel, already multiplied by
            the row's own C_ii (its average over rows; the caller rescales theta row by row).

    Source:
        derived here; which annealed moments to match was decided by measurement (`attention`).
    """
    below = kernel - kernel.max()

    def mean(function: Callable[[Array], Array]) -> Array:
        return np.asarray(np.einsum("ij,ij->i", prior @ function(below), prior))

    relative = mean(lambda values: values)
    first, second = annealed_moments(mean, relative, float(np.ptp(kernel)), tau)
    return matched(first, second, 1.0 / (prior * prior).sum(1))


def matched(first: Array, second: Array, count: Array) -> ReferenceRow:
    """The exchangeable rows of these `annealed_moments`, of at most `count` keys."""
    several = count > 1.0 + 1e-6
    ceiling = np.where(several, count, 2.0)
    floor = np.minimum(FEWEST_KEYS, ceiling)

    def excess(keys: Array, theta: Array) -> tuple[Array, Array]:
        theta = _theta_of(keys, first, theta)
        return second - _annealed(2.0 * theta, keys), theta

    # above the root: by the last key alone, and by second order where theta is small
    theta = (first + np.log(ceiling)) / (1.0 - 1.0 / ceiling)
    theta = np.minimum(theta, np.sqrt(2.0 * first / (1.0 - 1.0 / ceiling) * ceiling))
    high_value, theta_high = excess(ceiling, theta)
    low_value, theta_low = excess(floor, theta_high)
    low, high = np.log(floor), np.log(ceiling)
    resolved = np.abs(high_value) > 1e-6 * second  # else exchangeable to rounding: all keys count
    bracketed = (low_value * high_value < 0.0) & resolved
    rising = high_value > 0.0
    theta = theta_high
    for _ in range(26):
        middle = 0.5 * (low + high)
        value, theta = excess(np.exp(middle), theta)
        above = (value > 0.0) == rising
        high, low = np.where(above, middle, high), np.where(above, low, middle)
    nearer_low = ~bracketed & resolved & (np.abs(low_value) < np.abs(high_value))
    keys = np.where(bracketed, np.exp(0.5 * (low + high)), np.where(nearer_low, floor, ceiling))
    theta = _theta_of(keys, first, np.maximum(theta_high, theta_low))
    return ReferenceRow(np.where(several, theta, 0.0), np.where(several, keys, 1.0))
