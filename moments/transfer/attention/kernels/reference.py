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
from typing import Any, NamedTuple

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


NEWTON_STEPS = 30
"""More than were ever needed to the last digits: 12 on rows of all shipped models."""


def _theta_of(keys: Array, target: Array, theta: Array, steps: int = NEWTON_STEPS) -> Array:
    """Root of `_annealed(theta, keys) = target`, convex and increasing in theta: Newton's method.

    One step from anywhere lands at or above the root, after which the descent is monotone.
    """
    share = 1.0 / keys
    bound = (target + np.log(keys)) / (1.0 - share)
    theta = np.minimum(np.maximum(theta, 1e-12), bound)
    for _ in range(steps):
        value = _annealed(theta, keys)
        slope = np.maximum(share * np.exp(theta - value - theta * share) - share, 1e-12)
        before = theta
        theta = np.minimum(np.maximum(theta - (value - target) / slope, 1e-12), bound)
        if (np.abs(theta - before) <= 1e-12 * theta).all():
            break
    return theta


def _roots(first: Array, second: Array, low: Array, high: Array) -> tuple[Array, Array]:
    """theta and log n of rows with both moments, log n held between two ends: Newton's method.

    It starts where third cumulants of few keys, or the last key of peaked rows, put the root, and
    corrects theta alone before every step: from there it met all of 28,000 roots, of logit
    variances from .02 to 40 and of 3 to 10^5 keys, in 5 steps mostly.
    """
    size = np.maximum(first, 1e-300)
    small = 0.75 * np.maximum(second / size - 4.0, 1e-3)
    logs = np.log(np.maximum(0.5 * small * small / size, 1.0))
    logs = np.minimum(np.maximum(np.maximum(logs, second - 2.0 * first), low), high)
    share = np.exp(-logs)
    theta = np.sqrt(2.0 * first / (share * (1.0 - share)))
    theta = _theta_of(1.0 / share, first, theta, 3)
    for _ in range(NEWTON_STEPS):
        share = np.exp(-logs)
        theta = _theta_of(1.0 / share, first, theta, 1)
        rest, odds = np.log1p(-share), share / (1.0 - share)
        errors, by_theta, by_logs = [], [], []
        for times, target in ((1.0, first), (2.0, second)):
            scaled = times * theta
            value = np.logaddexp(rest, scaled - logs) - scaled * share
            met = np.exp(scaled - logs - value - scaled * share)  # the share of equal keys
            errors.append(value - target)
            by_theta.append(times * np.maximum(met - share, 1e-12))
            by_logs.append(scaled * share + odds * (1.0 - met) - met)
        whole = by_theta[0] * by_logs[1] - by_theta[1] * by_logs[0]
        step = by_theta[0] * errors[1] - by_theta[1] * errors[0]
        step = -step / np.where(whole == 0.0, 1.0, whole)
        before, last = logs, theta
        logs = np.minimum(np.maximum(logs + step, low), high)
        theta = theta - (errors[0] + by_logs[0] * (logs - before)) / by_theta[0]
        theta = np.maximum(theta, 1e-12)
        if (np.abs(logs - before) + np.abs(theta - last) / last <= 1e-8).all():
            break  # quadratic: the next step would be nothing
    return theta, logs


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

    def excess(keys: Array, of: Any, theta: Array) -> tuple[Array, Array]:
        theta = _theta_of(keys, first[of], theta)
        return np.abs(second[of] - _annealed(2.0 * theta, keys)), theta

    # above the root: by the last key alone, and by second order where theta is small
    theta = (first + np.log(ceiling)) / (1.0 - 1.0 / ceiling)
    theta = np.minimum(theta, np.sqrt(2.0 * first / (1.0 - 1.0 / ceiling) * ceiling))
    all_keys, theta = excess(ceiling, ..., theta)
    keys = ceiling.copy()
    # else exchangeable to rounding: all keys count
    inside = np.flatnonzero((all_keys > 1e-6 * second) & (ceiling > floor) & several)
    if inside.size:
        ends = np.log(floor[inside]), np.log(ceiling[inside])
        moved, logs = _roots(first[inside], second[inside], *ends)
        found = np.exp(logs)
        between = (logs > ends[0]) & (logs < ends[1])
        between &= np.abs(second[inside] - _annealed(2.0 * moved, found)) <= 1e-9 * second[inside]
        if not between.all():  # no such row: the nearer end
            rest = inside[~between]
            few_keys, fewer = excess(floor[rest], rest, theta[rest])
            nearer = few_keys < all_keys[rest]
            found[~between] = np.where(nearer, floor[rest], ceiling[rest])
            moved[~between] = np.where(nearer, fewer, theta[rest])
        keys[inside], theta[inside] = found, moved
    return ReferenceRow(np.where(several, theta, 0.0), np.where(several, keys, 1.0))
