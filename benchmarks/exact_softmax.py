"""Exact statistics of softmax rows whose logits are Gaussian and independent across keys.

Two rows, of n and k >= n keys, share the first n keys: s_j = sigma g_j and s'_j = sigma' g'_j with
E g_j g'_j = rho, theta = sigma^2, theta' = sigma'^2, psi = rho sigma sigma'. With F = log sum e^s,
a = grad F and the Jacobian J = diag(a) - a a^T = hess F, Price's theorem gives

    C2 = E sum_j a_j a'_j = d Cov(F, F') / dpsi,        T = E tr(J J') = dC2 / dpsi.

Writing 1/Z and 1/Z' as Laplace integrals, with B = E e^{-t e^s - u e^s'} for a
shared key, phi' = E e^{-u e^s'} for a key of the longer row alone, and [f, h] = E f(g) h(g'),

    C2 = n int int B^{n-1} phi'^{k-n} [f1, f1']                                  dlog t dlog u,
    T  = n int int B^{n-1} phi'^{k-n} { [f2, f2'] + (n-1) [f1, f1']^2 / B }      dlog t dlog u,

where f1 and f2 are the first and second s-derivatives of E = e^{-t e^s}. Derivatives in log sigma
at fixed rho follow under the integral from dE/dlog sigma = s f1 and df1/dlog sigma = s f2; the
mixed one, in log sigma and log sigma', is E (J s).(J' s'), because J s = da/dlog sigma. B is summed
by Mehler's formula, or directly over g where |rho| = 1.

For one row every moment E prod a_j^{p_j} s_j^{q_j} is a single integral over log t. The numbers of
keys may be any real numbers >= 1: the integrals continue the statistics analytically (inequalities
that rest on a sum over keys may fail between 1 and 2). As k grows, k C2 and k T tend to limits that
do not depend on theta' at given psi, n times the mean softmax of a key whose logit is raised by psi
and its derivative; k = 1e12 n is that limit to 12 digits.

Laplace transforms of log-normal logits on a grid: the one ingredient of every exact statistic.

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
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moments.errors import domain_error
from moments.layers.attention import softmax as table
from moments.layers.attention.softmax import PairStatistics, RowStatistics

# --- integrals over the partition sum -------------------------------------------------------------

Array = NDArray[np.float64]

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


# --- statistics -----------------------------------------------------------------------------------

THETA_EXACT = 32.0
"""Largest logit variance at which the quadratures below are validated."""

PSI_LEAST = -12.0
"""Least covariance of logits at which Mehler's sum is used: its terms alternate there, and cancel
to a part e^{2 psi} of their size, which leaves five digits at -12 and nine at -8. The direct sum at
rho = -1 has no such limit."""


def check_theta(name: str, theta: float) -> float:
    """`theta` as a float in [0, THETA_EXACT]; DomainError otherwise."""
    if not 0.0 <= theta <= THETA_EXACT:
        raise domain_error(
            name,
            theta,
            f"a logit variance in [0, {THETA_EXACT:g}]",
        )
    return float(theta)


def check_length(name: str, length: float, at_least: float = 1.0) -> float:
    """`length` as a finite float, no smaller than `at_least`; DomainError otherwise."""
    if not at_least <= length < math.inf:
        raise domain_error(name, length, f"a finite number of keys >= {at_least:g}")
    return float(length)


def mehler_orders(theta: float, rho: float) -> int:
    """How many Hermite orders Mehler's sum needs at the larger variance `theta`.

    E is analytic in the strip |Im g| < w = pi / (2 sigma), so its m-th coefficient falls like
    exp(-w sqrt(2 m)) and the m-th term like |rho|^m exp(-2 w sqrt(2 m)): the exponent is asked to
    reach 34, which leaves room for the factor m^2 of second derivatives.
    """
    decay = -math.log(min(max(abs(rho), 1e-3), 1.0))
    linear = math.pi * math.sqrt(2.0 / max(theta, 1.0))
    root = 68.0 / (linear + math.sqrt(linear**2 + 136.0 * decay))  # decay m + linear sqrt(m) = 34
    return min(32 * math.ceil((root**2 + 16.0) / 32.0), 768)


def pair_statistics(
    theta: float, n: float, rho: float, theta2: float | None = None, k: float | None = None
) -> PairStatistics:
    """Exact statistics of two correlated softmax rows.

    Relative error below 5e-7 (3e-10 typically for the overlap) wherever psi >= -8.

    Args:
        theta: logit variance of the first row, in [0, 32].
        n: number of keys of the first row, all of them shared with the second; real, >= 1.
        rho: correlation of the two logits of a shared key, in [-1, 1]; short of -1, such that
            psi = rho sqrt(theta theta2) >= -12.
        theta2: logit variance of the second row; the first row's if None.
        k: number of keys of the second row, real, >= n; n if None.

    Raises:
        DomainError: an argument outside these ranges.

    Source:
        Derived in the module docstring.
    """
    theta = check_theta("theta", theta)
    theta2 = theta if theta2 is None else check_theta("theta2", theta2)
    n = check_length("n", n)
    k = n if k is None else check_length("k", k, n)
    if not -1.0 <= rho <= 1.0:
        raise domain_error("rho", rho, "a correlation in [-1, 1]")
    if rho > -1.0 and rho * math.sqrt(theta * theta2) < PSI_LEAST:
        raise domain_error(
            "rho", rho, f"such that rho sqrt(theta theta2) >= {PSI_LEAST:g}", "raise rho"
        )
    if n == 1.0:  # one key: a = 1, and sum_j a_j a'_j is a'_1, whose mean is 1/k by symmetry
        return PairStatistics(1.0 / k, 0.0, 0.0, 0.0)
    return _pair(theta, n, float(rho), theta2, k)


@functools.lru_cache(8192)
def _pair(theta: float, n: float, rho: float, theta2: float, k: float) -> PairStatistics:
    fine = needs_fine_grid(max(theta, theta2))
    orders = 0 if abs(rho) == 1.0 else mehler_orders(max(theta, theta2), rho)
    # where k >> n a shared key is tilted by e^psi in both rows, and the weight moves left as much
    mean_shift = max(rho, 0.0) * math.sqrt(theta * theta2) * (1.0 - n / k)
    reach = 4.0 * math.ceil(mean_shift / 4.0)
    one = pair_modes(theta, n, reach, orders, fine)
    two = pair_modes(theta2, k, reach, orders, fine)
    modes2 = two.modes[:, :, ::-1] if rho == -1.0 else two.modes  # g' = -g
    mehler = rho ** np.arange(orders) if orders else 1.0

    def bracket(f: int, h: int) -> Array:
        return np.asarray((one.modes[f] * mehler) @ modes2[h].T)

    mean, mean2 = one.means[:, :, None], two.means[:, None, :]
    excess = bracket(0, 0) + mean[0] + mean2[0]  # B - 1
    log_b = np.log1p(np.maximum(excess, -1.0 + 1e-15))
    inverse_b = np.where(log_b > -30.0, np.exp(-log_b), 0.0)
    alone = np.exp((k - n) * two.log_phi)
    weight = np.exp((n - 1.0) * log_b) * alone
    # A term whose integral over one log t alone is a total derivative integrates to 0 at n = 1;
    # subtracting that exact zero keeps the relative accuracy of statistics proportional to n - 1.
    derivative_weight = np.expm1((n - 1.0) * log_b) * alone if n < 2.0 else weight

    f11, f22 = bracket(1, 1), bracket(2, 2)
    d1, d2 = (bracket(3, 0) + mean[3]) * inverse_b, (bracket(0, 3) + mean2[3]) * inverse_b
    d12 = bracket(3, 3) * inverse_b
    f11_d1, f11_d2, f11_d12 = bracket(4, 1), bracket(1, 4), bracket(4, 4)
    alone_d2 = (k - n) * mean2[3] * np.exp(-two.log_phi) * (two.log_phi > -30.0)

    def integral(shared: Array, derivative: Array) -> float:
        return float(
            n * PAIR_STEP**2 * (np.vdot(weight, shared) + np.vdot(derivative_weight, derivative))
        )

    m, zero = n - 1.0, np.zeros_like(f11)
    overlap = integral(f11, zero)
    jacobian = integral(m * f11**2 * inverse_b, f22)
    slope1 = integral(m * d1 * f11, f11_d1)
    slope2 = integral(m * d2 * f11, f11_d2 + alone_d2 * f11)
    slope = 0.5 * (math.sqrt(theta) * slope1 + math.sqrt(theta2) * slope2)
    if abs(rho) < 1e-7:
        radial = _radial_at_zero(theta, n) * _radial_at_zero(theta2, k) * m
    else:
        twice = (m * (n - 2.0) * d1 * d2 + m * d12) * f11 + m * (d1 * f11_d2 + d2 * f11_d1)
        mixed = integral(twice + alone_d2 * m * d1 * f11, f11_d12 + alone_d2 * f11_d1)
        radial = mixed / rho
    return PairStatistics(overlap, jacobian, radial, slope)


def _radial_at_zero(theta: float, n: float) -> float:
    """The factor alpha of one row in UD at rho = 0, which is (n - 1) alpha alpha'.

    By Price's theorem UD -> sum_jl E[d_l (J s)_j] E[d_l (J' s')_j]. Softmax is shift-invariant and
    keys are alike, so E[d_l (J s)_j] = alpha (delta_jl - 1/n); its trace times theta is
    E s.J s (Stein) = dE m/dlog sigma - E m with E m = theta (1 - P2).
    """
    row = row_statistics(theta, n)
    return float((1.0 - row.sum_square - 2.0 * row.sum_square_slope) / (n - 1.0))


def row_statistics(theta: float, n: float) -> RowStatistics:
    """Exact statistics of one softmax row: relative error 1e-11 up to theta = 16, 3e-9 up to 32.

    Args:
        theta: logit variance, in [0, 32].
        n: number of keys; real, >= 1.

    Raises:
        DomainError: an argument outside these ranges.

    Source:
        E sum over distinct keys of prod a_j^{p_j} g_j^{q_j}, for c keys and p = sum p_j, is
        n (n-1) .. (n-c+1) / Gamma(p) int phi^{n-c} prod E[e^{p_j} g^{q_j} E] dlog t; sums over keys
        are split by which of them coincide, so that 1 - S = sum_{j != k} a_j a_k and, for
        m = sum_j a_j s_j, s_j - m = sum_k a_k (s_j - s_k) hold without cancellation. dP2/dtheta by
        Stein's lemma. Entropy is E log Z - E m with E m = theta (1 - P2) and, by Frullani,
        E log Z = log M + int (e^{-t M} - phi^n) dlog t, M = E Z.
    """
    return _row(check_theta("theta", theta), check_length("n", n))


@functools.lru_cache(8192)
def _row(theta: float, n: float) -> RowStatistics:
    fine = needs_fine_grid(theta)
    nodes, weights = normal_grid(fine)
    row = laplace_row(theta, n, 0.0, ROW_STEP, fine)
    # moment[p, q] = E[e^p g^q E]
    moment = {
        (p, q): (row.e**p * row.survival) @ (weights * nodes**q)
        for p in range(1, 5)
        for q in range(3)
    }

    def keys(*powers: tuple[int, int]) -> float:
        """E of the sum over distinct keys of prod a_j^p g_j^q, with factors (p, q) in `powers`."""
        product = np.exp((n - len(powers)) * row.log_phi)
        for factor in powers:
            product = product * moment[factor]
        falling = math.prod(n - i for i in range(len(powers)))
        return float(falling * ROW_STEP * product.sum() / math.gamma(sum(p for p, _ in powers)))

    a1, a2, a1g, a2g, a2gg = (1, 0), (2, 0), (1, 1), (2, 1), (2, 2)
    p2, p3, p4 = keys(a2), keys((3, 0)), keys((4, 0))
    p22, p31, p211 = keys(a2, a2), keys((3, 0), a1), keys(a2, a1, a1)
    mean_z = n * math.exp(0.5 * theta)
    log_z = math.log(mean_z) + ROW_STEP * float(
        (np.exp(-mean_z * np.exp(row.x)) - np.exp(n * row.log_phi)).sum()
    )
    one_minus_p2 = keys(a1, a1)
    return RowStatistics(
        sum_square=p2,
        sum_cube=p3,
        sum_fourth=p4,
        jacobian_square=2.0 * p22 + p211,
        radial_square=2.0 * (keys(a2gg, a2) - keys(a2g, a2g))
        + keys(a2gg, a1, a1)
        - 2.0 * keys(a2g, a1g, a1)
        + keys(a2, a1g, a1g),
        sum_square_slope=theta * (p211 + 4.0 * p22 - 2.0 * p31),
        entropy=max(log_z - theta * one_minus_p2, 0.0),
    )


class FixedNorms(NamedTuple):
    """What keys of fixed norm need of a row, beside its own statistics.

    Attributes:
        share: 1 - (12 dP3 - 6 dP4)/(7 dP2), derivatives in theta.
        curvature: sum_l E d^2 (J^2)_ll/ds_l^2 over E tr J^2.
    """

    share: float
    curvature: float


def fixed_norm_statistics(theta: float, n: float) -> FixedNorms:
    """Exact, for theta in [0, 32] and n > 1 keys.

    Source:
        Stein's lemma: dP_m/dtheta = (m/2) [(m - 1) P_m - 2 m P_{m+1} + (m + 1) E S_2 S_m]; and the
        second derivatives of (J^2)_ll = a_l^2 (1 - 2 a_l + S_2), summed over keys. S_m = sum a^m.
    """
    theta, n = check_theta("theta", theta), check_length("n", n)
    nodes_weights = normal_grid(needs_fine_grid(theta)).weights
    row = laplace_row(theta, n, 0.0, ROW_STEP, needs_fine_grid(theta))
    moment = {p: (row.e**p * row.survival) @ nodes_weights for p in range(1, 7)}

    def keys(*powers: int) -> float:
        """E of the sum over distinct keys of prod a_j^p."""
        product = np.exp((n - len(powers)) * row.log_phi)
        for power in powers:
            product = product * moment[power]
        falling = math.prod(n - i for i in range(len(powers)))
        return float(falling * ROW_STEP * product.sum() / math.gamma(sum(powers)))

    power = {p: keys(p) for p in range(2, 7)}
    square = {p: power[p + 2] + keys(2, p) for p in (2, 3, 4)}  # E S_2 S_p
    slope = {
        p: p / 2 * ((p - 1) * power[p] - 2 * p * power[p + 1] + (p + 1) * square[p])
        for p in (2, 3, 4)
    }
    curvature = 4 * power[2] - 28 * power[3] + 60 * power[4] - 40 * power[5]
    curvature += 4 * square[2] - 20 * square[3] + 20 * square[4]
    jacobian = power[2] - 2 * power[3] + square[2]
    return FixedNorms(1 - (12 * slope[3] - 6 * slope[4]) / (7 * slope[2]), curvature / jacobian)


# --- what is tabulated ----------------------------------------------------------------------------


def encode_row(theta: float, n: float) -> Array:
    """(7,) functions of one row that are tabulated; theta > 0 and n > 1.

    First the log-odds of P2 per theta, log[(n-1) P2 / (1-P2)] / theta: 1 at theta = 0.
    """
    row = row_statistics(theta, n)
    rest = 1.0 - row.sum_square
    return np.array(
        [
            math.log((n - 1.0) * row.sum_square / rest) / theta,
            row.jacobian_square / (row.sum_square * rest),
            row.sum_square_slope / (theta * row.jacobian_square),
            row.radial_square / row.jacobian_square,
            (math.log(n) - row.entropy) / (theta * rest),
            math.log(n**2 * row.sum_cube) / theta,
            math.log(n**3 * row.sum_fourth) / theta,
        ]
    )


def _pair_at_small_theta(theta: float, n: float, rho: float) -> PairStatistics:
    """The pair, its overlap divided by the evaluator's own error in the exact C2(rho = 0) = 1/n.

    log(n C2) is divided by psi below, which would magnify that error near theta = 0.
    """
    pair = pair_statistics(theta, n, rho)
    if theta > 0.1:
        return pair
    uncorrelated = n * pair_statistics(theta, n, 0.0).overlap
    return pair._replace(overlap=pair.overlap / uncorrelated)


def encode_square_pair(theta: float, n: float, rho: float) -> Array:
    """(4,) functions of two rows of n keys; theta > 0, n > 1 and rho != 0.

    The first is the log-odds of C2 per psi: at rho = 1 that of P2 per theta.
    """
    pair, psi = _pair_at_small_theta(theta, n, rho), rho * theta
    rest = 1.0 - pair.overlap
    return np.array(
        [
            math.log((n - 1.0) * pair.overlap / rest) / psi,
            math.log(pair.jacobian_overlap / (pair.overlap * rest)),
            pair.radial_overlap / pair.jacobian_overlap,
            pair.overlap_slope / (psi * pair.jacobian_overlap),
        ]
    )


def gauss_nodes(count: int) -> Array:
    """Roots of the Chebyshev polynomial of degree `count`: none at an end, where ratios are 0/0."""
    return np.cos(np.pi * (np.arange(count) + 0.5) / count)


def chebyshev_coefficients(values: Array, axes: Sequence[int]) -> Array:
    """Coefficients of the interpolant through `values` at the gauss_nodes of each of `axes`."""
    for axis in axes:
        count = values.shape[axis]
        transform = np.cos(np.outer(np.arange(count), np.arccos(gauss_nodes(count))))
        transform *= 2.0 / count
        transform[0] *= 0.5
        values = np.moveaxis(np.tensordot(transform, values, (1, axis)), 0, axis)
    return values


def theta_at(coordinate: float) -> float:
    """Inverse of `theta_coordinate`."""
    return table.THETA_MAX * (0.5 * (1.0 + coordinate)) ** 2


def far_theta_at(coordinate: float) -> float:
    """Inverse of `far_coordinate`."""
    return (table._NEAR + (table._FAR - table._NEAR) * 0.5 * (1.0 + coordinate)) ** 2


def whole_theta_at(coordinate: float) -> float:
    """Inverse of `whole_coordinate`."""
    return table.THETA_FAR * (0.5 * (1.0 + coordinate)) ** 2


def far_rho_at(coordinate: float) -> float:
    """Inverse of `far_rho_coordinate`."""
    return table.RHO_FAR + (1.0 - table.RHO_FAR) * 0.5 * (1.0 + coordinate)


def length_at(coordinate: float) -> float:
    """Inverse of `length_coordinate`."""
    return math.exp(0.5 * table.LOG_LENGTH_MAX * (1.0 + coordinate))
