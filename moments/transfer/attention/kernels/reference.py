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
        before = theta
        theta = np.minimum(np.maximum(theta - (value - target) / slope, 1e-12), bound)
        if np.all(np.abs(theta - before) <= 1e-14 * theta):
            break
    return theta


def _false_position(
    function: Callable[[Array], Array],
    ends: tuple[Array, Array],
    values: tuple[Array, Array],
    where: NDArray[np.bool_],
) -> Array:
    """Roots between ends with values of opposite signs, by the Illinois rule; an end elsewhere."""
    (low, high), (low_value, high_value) = ends, values
    side, at = np.zeros(low.shape), low
    while True:
        gap = np.where(where, high_value - low_value, 1.0)
        before, at = at, np.where(where, (low * high_value - high * low_value) / gap, low)
        if np.all(np.abs(at - before) <= 1e-13 * (1.0 + np.abs(at))):
            return at
        value = function(at)
        above = (value > 0.0) == (high_value > 0.0)
        # An end that stays twice counts half, or the other would creep.
        low_value, high_value = (
            np.where(above, np.where(side > 0, 0.5 * low_value, low_value), value),
            np.where(above, value, np.where(side < 0, 0.5 * high_value, high_value)),
        )
        low, high = np.where(above, low, at), np.where(above, at, high)
        side = np.where(above, 1.0, -1.0)


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
    resolved = np.abs(high_value) > 1e-6 * second  # else exchangeable to rounding: all keys count
    bracketed = (low_value * high_value < 0.0) & resolved
    nearer_low = ~bracketed & resolved & (np.abs(low_value) < np.abs(high_value))
    ends, values = (np.log(floor), np.log(ceiling)), (low_value, high_value)
    root = _false_position(lambda log: excess(np.exp(log), theta_high)[0], ends, values, bracketed)
    keys = np.where(bracketed, np.exp(root), np.where(nearer_low, floor, ceiling))
    theta = _theta_of(keys, first, np.maximum(theta_high, theta_low))
    return ReferenceRow(np.where(several, theta, 0.0), np.where(several, keys, 1.0))
