"""Laplace transforms of log-normal logits on a grid: the one ingredient of every exact statistic.

A row of attention logits is s_j = sigma g_j with g_j independent standard normal, and its softmax
a_j = e^{s_j} / Z. Powers of the partition sum are removed by

    Gamma(p) Z^{-p} = int_0^inf t^{p-1} e^{-tZ} dt,

after which the keys are independent and each contributes an expectation over one g. In x = log t
every integrand is smooth and decays at both ends, so the trapezoidal rule converges geometrically:
its error is the integrand's Fourier transform at 2 pi / step, and for t^p e^{-t} that is
|Gamma(p + 2 pi i / step)|.

See docs/theory/softmax.md, The integrals.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

PAIR_STEP = 0.35
"""Spacing in log t for two rows, where p <= 2: |Gamma(2 + 2 pi i / step)| = 1e-10."""

ROW_STEP = 0.2
"""Spacing in log t for one row, where p <= 4: |Gamma(4 + 2 pi i / step)| = 2e-16."""

LEFT_TAIL = 23.0
"""Nats kept below the bulk of a row: what is dropped is e^-23 = 1e-10 of the total."""

LOG_TINY = -650.0
"""Floor of logarithms of probabilities: e^-650 underflows to nothing, and never to NaN."""


class NormalGrid(NamedTuple):
    """Trapezoidal rule for E f(g), g standard normal; the nodes are symmetric about 0."""

    nodes: Array
    weights: Array


def needs_fine_grid(theta: float) -> bool:
    """Whether a logit variance is too large for the coarse grid of `normal_grid`."""
    return theta > 16.0


@functools.cache
def normal_grid(fine: bool) -> NormalGrid:
    """Nodes in [-12, 12] and weights, spaced 0.1 or, if `fine`, 0.05.

    e^{-t e^{sigma g}} is bounded in the strip |Im g| < pi / (2 sigma), so the rule's error is
    exp(-pi^2 / (sigma spacing)): 2e-11 at theta = 16 and spacing 0.1, 3e-14 at theta = 40 and 0.05.
    """
    spacing = 0.05 if fine else 0.1
    half = round(12.0 / spacing)
    nodes = spacing * np.arange(-half, half + 1, dtype=np.float64)
    weights = np.exp(-0.5 * nodes**2)
    return NormalGrid(nodes, weights / weights.sum())


@functools.lru_cache(8)
def hermite_weights(orders: int, fine: bool) -> Array:
    """(orders, nodes): weights times He_m(g) / sqrt(m!); f @ result.T are the modes of f."""
    nodes, weights = normal_grid(fine)
    polynomials = np.empty((orders, nodes.size))
    polynomials[0], polynomials[1] = 1.0, nodes
    for m in range(1, orders - 1):
        up = nodes * polynomials[m] - math.sqrt(m) * polynomials[m - 1]
        polynomials[m + 1] = up / math.sqrt(m + 1)
    return polynomials * weights


class LaplaceRow(NamedTuple):
    """One key of a row at every x = log t (first axis) and every g (second); e = t e^s, E = e^{-e}.

    Attributes:
        x: (points,) log t.
        e: t e^{sigma g}.
        survival: E.
        excess: E - 1, to full relative accuracy where t is tiny.
        log_phi: (points,) log of phi = E_g[E], floored at LOG_TINY.
    """

    x: Array
    e: Array
    survival: Array
    excess: Array
    log_phi: Array


@functools.lru_cache(8)  # some 1.5 MB each
def laplace_row(theta: float, length: float, reach: float, step: float, fine: bool) -> LaplaceRow:
    """The transforms of one row, on the multiples of `step` where `length` keys have weight.

    Left of the bulk an integrand falls like t E[Z]; E[Z] is e^{theta/2} per key, but the e^s that
    make it lie within 6 sigma. On the right phi^length vanishes once t e^s >> 1 for every key,
    which for one key takes the lower tail of g, cut at 6.5 sigma (5.5 for 50 keys or more).
    `reach` moves the left end out where the row's weight is known to be tilted that way.
    """
    sigma = math.sqrt(theta)
    low = -math.log(length) - min(0.5 * theta, 6.0 * sigma) - LEFT_TAIL - reach
    high = 3.6 - math.log(length) + (6.5 if length < 50 else 5.5) * sigma
    first, last = math.floor(low / step), math.ceil(high / step)
    x = step * np.arange(first, last + 1, dtype=np.float64)
    nodes, weights = normal_grid(fine)
    e = np.exp(x[:, None] + sigma * nodes)
    excess = np.expm1(-e)
    survival = np.exp(-e)
    mean = excess @ weights
    tail = np.log(np.maximum(survival @ weights, math.exp(LOG_TINY)))
    log_phi = np.where(mean < -0.5, tail, np.log1p(np.maximum(mean, -0.75)))
    return LaplaceRow(x, e, survival, excess, log_phi)


class PairModes(NamedTuple):
    """What one row brings to a pair: five functions of g, their means and their modes.

    The functions are E - 1, f1 = dE/ds = -e E, f2 = d2E/ds2 = -e (1 - e) E, and the derivatives of
    E and of f1 in sigma, g f1 and g f2.

    Attributes:
        log_phi: (points,) log E_g[E].
        means: (5, points).
        modes: (5, points, modes): Hermite coefficients, for Mehler's
            E f(g) h(g') = sum_m rho^m f_m h_m; or, where rho = +-1, the values at the nodes times
            the square root of the weights, so that the same sum with weights 1 runs over g.
    """

    log_phi: Array
    means: Array
    modes: Array


@functools.lru_cache(8)  # up to 4 MB each
def pair_modes(theta: float, length: float, reach: float, orders: int, fine: bool) -> PairModes:
    """Modes of one row; `orders` = 0 asks for values at the nodes."""
    row = laplace_row(theta, length, reach, PAIR_STEP, fine)
    nodes, weights = normal_grid(fine)
    slope = -row.e * row.survival
    curvature = slope * (1.0 - row.e)
    functions = np.stack([row.excess, slope, curvature, nodes * slope, nodes * curvature])
    modes = functions @ hermite_weights(orders, fine).T if orders else functions * np.sqrt(weights)
    return PairModes(row.log_phi, functions @ weights, modes)
