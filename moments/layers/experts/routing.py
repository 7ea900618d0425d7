"""A router with Gaussian logits: three functions of the correlation of two tokens.

The logits z_e of a token are independent and identically distributed over experts, with variance
s; those of two tokens have correlation r. With gates g_e(z), 0 for experts that are not chosen,

    M(r) = E sum_e g_e g'_e     N(r) = E sum_ae (dg_a/dz_e)(dg'_a/dz'_e)     P(r) = E |S n S'|

determine the output's kernel, its gradient, and the load of the experts. They have no closed form:
the thresholds of both tokens, their (k+1)-th largest logits, are integrated over on a grid, and a
normaliser D by 1/D^m = int u^(m-1) exp(-u D) du/(m-1)!, since exp(-u D) factorises over experts.
The number of experts enters as a power. See docs/theory/experts.md, The three functions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True)
class Router:
    """Gates as functions of logits.

    Attributes:
        experts, chosen: E, and the number k of experts per token.
        logistic: whether weights are sigmoid(z) instead of exp(z).
        normalised: gates are weights over the sum of those of the "chosen", of "all", or "none".
        scale: factor on all gates.
        groups, kept_groups: number of groups of experts, and of groups that a token chooses from.
        group_best: number of largest weights whose sum is a group's score.
        power: exponent of the weights.
    """

    experts: int
    chosen: int
    logistic: bool = False
    normalised: str = "chosen"
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    power: float = 1.0

    @property
    def sampled(self) -> bool:
        """Whether the three functions are sampled: with groups nothing factorises over experts."""
        return self.kept_groups < self.groups

    @property
    def constant(self) -> bool:
        """Whether the gate is 1 whatever the logits: no gradient reaches them."""
        return self.chosen == 1 and self.normalised == "chosen"

    def weight(self, z: Array) -> tuple[Array, Array]:
        """w(z) and its derivative."""
        if not self.logistic:
            value = np.exp(self.power * z)
            return value, self.power * value
        value = 1 / (1 + np.exp(-z))
        power = value**self.power
        return power, self.power * power * (1 - value)

    def choice(self, z: Array) -> Array:
        """(..., E) 1 for chosen experts, else 0, from logits (..., E)."""
        if self.sampled:
            by_group = z.reshape(*z.shape[:-1], self.groups, -1)
            score = self.weight(by_group)[0]
            best = np.partition(score, -self.group_best, -1)[..., -self.group_best :].sum(-1)
            least = np.partition(best, -self.kept_groups, -1)[..., -self.kept_groups, None]
            z = np.where((best >= least)[..., None], by_group, -np.inf).reshape(z.shape)
        return (z >= np.partition(z, -self.chosen, -1)[..., -self.chosen, None]) * 1.0

    def gates(self, z: Array) -> tuple[Array, Array]:
        """Gates and `choice` at logits (..., E)."""
        chosen, (weight, _) = self.choice(z), self.weight(z)
        return self.scale * weight * chosen / self._total(weight, chosen), chosen

    def _total(self, weight: Array, chosen: Array) -> Array:
        """D, by which weights are divided."""
        if self.normalised == "none":
            return np.ones((*weight.shape[:-1], 1))
        return (weight * chosen if self.normalised == "chosen" else weight).sum(-1, keepdims=True)

    def of_pair(self, z: Array, other: Array) -> Array:
        """(3, ...) summands of M, N and P for two tokens' logits (..., E), before the mean."""
        (one, two), of = (self.choice(z), self.choice(other)), (self.weight(z), self.weight(other))
        (w, slope), (v, steep) = of
        total, sums = self._total(w, one), self._total(v, two)
        both = one * two
        m = (both * w * v / (total * sums)).sum(-1)
        direct = both * slope * steep / (total * sums)
        if self.normalised == "none":
            n = direct.sum(-1)
        else:
            # dg_a/dz_e = (slope_a/D) (a = e) - w_a slope_e/D^2, e among the experts in D
            among = both if self.normalised == "chosen" else np.ones_like(both)
            shared = (among * slope * steep / (total * sums) ** 2).sum(-1)
            cross = (both * w * v).sum(-1) * shared
            mixed = both * slope * steep * (w / (total**2 * sums) + v / (total * sums**2))
            n = direct.sum(-1) - mixed.sum(-1) + cross
        return np.stack([self.scale**2 * m, self.scale**2 * n, both.sum(-1)])


ANGLES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.28, np.pi / 2, 2.0)
"""arccos of the correlations at which the three functions are evaluated, and interpolated by a
polynomial in the angle, in which they are smooth."""
LEAST = float(np.cos(ANGLES[-1]))
"""Least correlation of two tokens' logits in the tables."""
OCTAVE = 0.2
"""Step of the tables in log s, between two of which they are interpolated in the root of s."""
SMALLEST, LARGEST = 1e-4, 40.0
"""Range of the tables in the logits' variance; below it only the choice depends on the logits."""
SAMPLES = 40_000
"""Sampled pairs of tokens for a choice by groups."""


@functools.lru_cache(maxsize=512)
def _table(router: Router, step: int) -> np.ndarray:
    """Coefficients (3, angles), lowest first, of polynomials in the angle: of log M, log N, log P;
    of N that is 0 none."""
    s = float(np.exp(OCTAVE * step))
    if router.sampled:
        values = sampled(router, s)[0]
    else:
        off_diagonal = [at(router, s, float(np.cos(angle))) for angle in ANGLES[1:]]
        values = np.stack([alone(router, s), *off_diagonal], -1)
    if router.constant:
        values[1] = 1.0
    return np.linalg.solve(np.vander(ANGLES, increasing=True), np.log(values).T).T


def functions(router: Router, s: Array, correlation: Array) -> tuple[Array, Array, Array]:
    """M, N and P, of tables that are made once.

    Args:
        s: variance of the logits, a number or one per configuration.
        correlation: of two tokens' logits, with as many axes more as it likes.
    """
    scalar = np.ndim(s) == 0 and np.ndim(correlation) == 0
    square, router = router.scale**2, replace(router, scale=1.0)
    s, correlation = np.asarray(s, float), np.asarray(correlation, float)
    clipped = np.clip(s, SMALLEST, LARGEST)
    below = np.floor(np.log(clipped) / OCTAVE + 1e-9).astype(int)
    # slopes fall with the largest logits' size: in the root of s their logarithms are straight
    low, high = (np.exp(OCTAVE / 2 * (below + step)) for step in (0, 1))
    share = np.maximum((np.sqrt(clipped) - low) / (high - low), 0.0)
    shape = np.shape(s)
    powers = np.empty((3, *shape, len(ANGLES)))
    for step in np.unique(below):
        at_step = below == step
        rest = share[at_step][:, None] if shape else share
        one = _table(router, int(step))
        between = np.max(share[at_step]) > 1e-9
        two = _table(router, int(step) + 1) if between else one
        if shape:
            one, two = one[:, None], two[:, None]
        powers[:, at_step] = (one + rest * (two - one)).reshape(
            3, *np.shape(powers[:, at_step])[1:]
        )
    angle = np.arccos(np.clip(correlation, LEAST, 1.0))
    more = (1,) * (correlation.ndim - len(shape))
    result: Any = 0.0
    for power in range(len(ANGLES) - 1, -1, -1):
        result = result * angle + powers[..., power].reshape(3, *shape, *more)
    log_m, log_n, log_p = result
    m, p = square * np.exp(log_m), np.exp(log_p)
    n = 0.0 * m if router.constant else square * np.exp(log_n)
    return (float(m), float(n), float(p)) if scalar else (m, n, p)


def sampled(router: Router, s: float, samples: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The three functions at `ANGLES`, (3, angles), and their standard errors, from random logits;
    all angles use the same draws."""
    random = np.random.default_rng(0)
    samples = SAMPLES if samples is None else samples
    total, square = np.zeros((2, 3, len(ANGLES)))
    chunk = max(1, 2**17 // router.experts)
    for start in range(0, samples, chunk):
        count = min(chunk, samples - start)
        one, two = random.standard_normal((2, count, router.experts)) * np.sqrt(s)
        for place, angle in enumerate(ANGLES):
            values = router.of_pair(one, np.cos(angle) * one + np.sin(angle) * two)
            total[:, place] += values.sum(-1)
            square[:, place] += (values**2).sum(-1)
    mean = total / samples
    return mean, np.sqrt(np.maximum(square / samples - mean**2, 0.0) / samples)


# --- identity experts -----------------------------------------------------------------------------

_DRAWN = 2**21
"""Random logits for a table of `together`."""


def together(router: Router, count: int, s: Array, correlation: Array) -> tuple[Array, Array]:
    """Moments of g = sum_a g_a and T_e = sum_a dg_a/dz_e, sums over `count` of the experts: E g;
    and for two tokens (4, ...) E g g' and E sum_e T_e T'_e, and both with the factor
    (g + g')/2 - E g. Sampled; arguments as in `functions`."""
    shape = np.shape(s)
    angle = np.arccos(np.clip(np.asarray(correlation, float), LEAST, 1.0))
    angle = np.broadcast_to(angle, (*shape, *angle.shape[len(shape) :]))
    means, pairs = [], []
    for one, of in zip(np.ravel(s), angle.reshape(-1, *angle.shape[len(shape) :]), strict=True):
        place = float(np.log(np.clip(one, SMALLEST, LARGEST))) / OCTAVE
        below = int(np.floor(place))
        tables = [_together(router, count, below + step) for step in (0, 1)]
        share = place - below
        mean, powers = ((1 - share) * a + share * b for a, b in zip(*tables, strict=True))
        means.append(mean)
        pairs.append([np.polynomial.polynomial.polyval(of, row) for row in powers])
    return np.reshape(means, shape), np.moveaxis(np.array(pairs), 1, 0).reshape(4, *angle.shape)


@functools.lru_cache(maxsize=256)
def _together(router: Router, count: int, step: int) -> tuple[float, np.ndarray]:
    """E g, and (4, angles) polynomial coefficients in the angle, lowest first, of the others."""
    random, experts = np.random.default_rng(2), router.experts
    samples = max(_DRAWN // experts, 1000)
    one, two = random.standard_normal((2, samples, experts)) * np.exp(OCTAVE * step / 2)

    def drawn(z: Array) -> tuple[Array, Array]:
        gates, chosen = router.gates(z)
        weight, slope = router.weight(z)
        total = router._total(weight, chosen)
        given = gates[:, :count].sum(-1)
        slopes = router.scale * slope * chosen / total
        slopes[:, count:] = 0.0
        if router.normalised != "none":
            among = chosen if router.normalised == "chosen" else 1.0
            slopes -= given[:, None] * among * slope / total
        return given, slopes

    (given, slopes), values = drawn(one), []
    mean = given.mean()
    for angle in ANGLES:
        other, steep = drawn(np.cos(angle) * one + np.sin(angle) * two)
        pairs, lean = np.array([given * other, (slopes * steep).sum(-1)]), (given + other) / 2
        values.append([*pairs.mean(-1), *(pairs * (lean - mean)).mean(-1)])
    powers = np.linalg.solve(np.vander(ANGLES, increasing=True), np.array(values))
    return float(mean), powers.T


# --- by quadrature --------------------------------------------------------------------------------

STEP = 0.2
"""Spacing of the grid of logits, in units of their standard deviation."""
FINE = 0.05
"""The same for a token with itself."""
OF_LOG, MOST_OF_LOG = 0.5, 2.0
"""Spacing of the trapezoidal rule in log u for a constant D, and its largest value."""


def _grid(router: Router, step: float) -> np.ndarray:
    """Logits in units of their standard deviation, over the range of thresholds and logits."""
    from scipy.special import ndtr
    from scipy.stats import binom

    x = np.arange(-6.0, 7.5, 0.05)
    reached = binom.cdf(router.chosen, router.experts, ndtr(-x)) > 1e-7
    low = float(x[np.argmax(reached)]) if router.chosen < router.experts else -6.0
    if router.normalised == "all":
        low = min(low, -5.0)
    return np.arange(low, 4.8 + 0.35 * np.sqrt(2 * np.log(router.experts)) + step, step)


def _thresholds(router: Router, x: np.ndarray) -> slice:
    """Range of a grid in which the largest logit that is not chosen may be."""
    from scipy.special import ndtr
    from scipy.stats import binom

    at_least = binom.sf(router.chosen, router.experts, ndtr(-x)) > 1e-8
    return slice(0, max(int(at_least.sum()), 2))


def _tails(step: float, count: int) -> np.ndarray:
    """(grid, grid) matrix of integrals from every point of the grid to its end, by the trapezoidal
    rule with the first Euler-Maclaurin term."""
    above = np.triu(np.ones((count, count))).T * step - np.eye(count) * step / 2
    slope = (np.eye(count, k=-1) - np.eye(count, k=1)) / 2
    slope[:2, 0] = -1.0, 1.0
    return above + step / 12 * slope


def _normalisers(router: Router, s: float) -> Any:
    """Nodes u and weights of int du exp(-u D), by the trapezoidal rule in log u; the first weight
    includes all smaller u.

    At a step h the error of a mean of 1/D is |Gamma(1 + iy)| times the characteristic function of
    log D at y = 2 pi/h, about exp(-y pi/2 - y^2 v/2), and decreases with the variance of log D, of
    which v is taken as one half. The range of D is sampled, and extended by half a standard
    deviation of the logits below and by a whole one above.
    """
    if router.normalised == "none":
        return np.zeros(1), np.ones(1)
    deviation = np.sqrt(s)
    z = np.random.default_rng(0).standard_normal((1000, router.experts)) * deviation
    total = np.log(router._total(router.weight(z)[0], router.choice(z)))
    spread, wanted = 0.5 * float(np.var(total)), np.pi**2 / OF_LOG
    y = 2 * wanted / (np.pi / 2 + np.sqrt((np.pi / 2) ** 2 + 2 * spread * wanted))
    step = min(2 * np.pi / y, MOST_OF_LOG)
    low, high = total.min() - 0.5 * deviation, total.max() + deviation
    u = np.exp(np.arange(-high - 7.0, -low + 3.0, step))
    size = step * u
    size[0] /= 1 - np.exp(-step)
    return u, size


def _sum_over_common(router: Router, cases: Any, regions: Any, order: int) -> np.ndarray:
    """Sum over the number of experts common to two tokens, `order` of which are singled out.

    Of the others c are chosen by both tokens, i and j by one, and the rest by none:

        sum_c n!/(c! i! j! rest!) c!/(c - order)! P11^(c - order) P10^i P01^j P00^rest

    by Horner's rule in P10 P01/(P11 P00), which is at most 1 at positive correlations.

    Args:
        cases: (weight, n, c + i, c + j) for every case of the threshold experts.
        regions: P11, P10, P01, P00.
    """
    from scipy.special import gammaln

    p11, p10, p01, p00 = (np.maximum(one, 1e-300) for one in regions)
    log11, log00 = np.log(p11), np.log(p00)
    # only rounding errors in empty regions exceed 1, and must not overflow
    ratio = np.exp(
        np.minimum(np.log(p10) + np.log(p01) - log11 - log00, min(30.0, 600 / router.chosen))
    )
    total = np.zeros_like(ratio)
    for weight, others, first, second in cases:
        most, least = min(first, second), max(order, first + second - others)
        if most < least:
            continue
        common = np.arange(most, least - 1, -1)
        i, j = first - common, second - common
        rest = others - common - i - j
        ways = gammaln(others + 1) - gammaln(common - order + 1) - gammaln(rest + 1)
        ways = ways - gammaln(i + 1) - gammaln(j + 1)
        polynomial = np.zeros_like(ratio)
        for coefficient in np.exp(ways - ways[0])[::-1]:
            polynomial = polynomial * ratio + coefficient
        log = ways[0] + (most - order) * log11 + rest[0] * log00
        alone = p10 ** int(i[0]) * p01 ** int(j[0])
        total += weight * alone * np.exp(log) * polynomial
    return np.asarray(total)


def at(router: Router, s: float, r: float) -> np.ndarray:
    """M, N and P at logits of variance s and correlation r < 1, by quadrature."""
    from scipy.special import ndtr

    if router.chosen == router.experts:
        return _all_chosen(router, s, r)
    chosen = router.chosen
    width = np.sqrt(1 - r * r)
    step = min(STEP, 0.4 * width, 0.4 / np.sqrt(s))
    x = _grid(router, step)
    lower = _thresholds(router, x)
    t = x[lower]
    tails = _tails(step, len(x))[:, lower]
    first = x[:, None]
    density = np.exp(-(first**2 - 2 * r * first * x + x**2) / (2 * width**2))
    density /= 2 * np.pi * width
    below = ndtr((t - r * first) / width)  # for one token, given the other
    single = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    w, slope = router.weight(np.sqrt(s) * x)
    u, size = _normalisers(router, s)

    tilted = np.exp(-u[:, None] * w)
    damped = slope * (1 - u[:, None] * w)
    # f at the one token, over its tail: [u, z, t]
    plain = tilted[:, :, None] * tails
    weighed = plain * w[:, None]
    steep = plain * slope[:, None]
    both = plain * damped[:, :, None]
    of_plain, of_weighed, of_both, of_steep = (
        np.matmul(density, one) for one in (plain, weighed, both, steep)
    )
    everywhere = router.normalised == "all"
    sloped = slope * tilted
    given, given_sloped = tilted @ density * step, sloped @ density * step
    over = density @ tails
    beyond = tails.T @ over
    tail = ndtr(-t)
    none = 1 - tail[:, None] - tail + beyond
    at_lower = single[:, None] * below
    alone = np.matmul(plain.transpose(0, 2, 1), at_lower)  # chosen by one token only
    same, at_lower, above = density[lower, lower], at_lower[lower], over[lower]

    load = _cases(router, same, above, at_lower, above.T, at_lower.T)
    regions = beyond, tail[:, None] - beyond, tail - beyond, none
    total = np.zeros(3)
    total[2] = (_sum_over_common(router, load, regions, 1) * beyond).sum()

    for i in range(len(u)):
        for j in range(i, len(u)):
            p11 = plain[i].T @ of_plain[j]
            t_gates = weighed[i].T @ of_weighed[j]
            t_slopes = both[i].T @ of_both[j]
            if everywhere:
                source = 1e-4 * u[i] * u[j]
                known = density, tails, lower, (i, j)
                at_both = _everywhere(*known, tilted, of_plain, given, p11, step)
                t_other = steep[i].T @ of_steep[j]
                at_other = _everywhere(*known, sloped, of_steep, given_sloped, t_other, step)
                values = [at_both]
                values.append([a + source * b for a, b in zip(at_both, at_other, strict=True)])
                one, more = (
                    _sum_over_common(router, _cases(router, *v[:5]), v[5:], 1) for v in values
                )
                m = (one * t_gates).sum()
                n = (one * t_slopes).sum() + ((more - one) * t_gates).sum() / 1e-4
            else:
                of_one, of_other = of_plain[i][lower].T, of_plain[j][lower]
                cases = _cases(router, same, of_other, at_lower, of_one, at_lower.T)
                regions = p11, alone[i], alone[j].T, none
                one = _sum_over_common(router, cases, regions, 1)
                m = (one * t_gates).sum()
                n = (one * t_slopes).sum()
                if chosen > 1 and router.normalised == "chosen":
                    two = _sum_over_common(router, cases, regions, 2)
                    t_other = steep[i].T @ of_steep[j] if router.logistic else t_gates
                    n += u[i] * u[j] * (two * t_other * t_gates).sum()
            count = size[i] * size[j] * (1 if i == j else 2)
            total[:2] += count * np.array([m, n])
    return _scaled(router, total * step**2)


def _cases(router: Router, same: Any, a1: Any, a0: Any, b1: Any, b0: Any) -> Any:
    """Cases of two tokens' threshold experts: the same one, or each above or below the other
    token's threshold."""
    n, k = router.experts, router.chosen
    return (
        (n * same, n - 1, k, k),
        (n * (n - 1) * a1 * b1, n - 2, k - 1, k - 1),
        (n * (n - 1) * a1 * b0, n - 2, k, k - 1),
        (n * (n - 1) * a0 * b1, n - 2, k - 1, k),
        (n * (n - 1) * a0 * b0, n - 2, k, k),
    )


def _everywhere(
    density: Any,
    tails: Any,
    lower: slice,
    at: Any,
    factors: Any,
    onto: Any,
    given: Any,
    p11: Any,
    step: float,
) -> list[Any]:
    """Arguments of `_cases` and `_sum_over_common` if D is a sum over all experts: densities of the
    threshold experts, and the four regions.

    Args:
        lower: range of the grid that has thresholds.
        at: the nodes of the first and the second token.
        onto, given: density times the factor, over its tail and over all, by node.
        p11: the region above both.
    """
    i, j = at
    one, two = factors[i], factors[j]
    first, second = one * given[j], two * given[i]
    row, column = tails.T @ first, tails.T @ second
    every = first.sum() * step
    p10, p01 = row[:, None] - p11, column - p11
    regions = [p11, p10, p01, every - row[:, None] - column + p11]
    one, two, first, second = one[lower], two[lower], first[lower], second[lower]
    a1, b1 = one[:, None] * onto[j][lower], (two[:, None] * onto[i][lower]).T
    same = density[lower, lower] * one[:, None] * two
    return [same, a1, first[:, None] - a1, b1, second - b1, *regions]


def _scaled(router: Router, values: np.ndarray) -> np.ndarray:
    m, n, p = values
    if router.constant:
        m, n = p, 0.0
    return np.array([router.scale**2 * m, router.scale**2 * n, p])


def _all_chosen(router: Router, s: float, r: float) -> np.ndarray:
    """M, N and P if all experts are chosen, without a threshold."""
    experts = router.experts
    nodes = np.arange(-6.0, 6.0 + STEP, min(STEP, 0.4 / np.sqrt(s)))
    weights = np.exp(-nodes * nodes / 2)
    weights = weights / weights.sum()
    z, other = nodes[:, None], r * nodes[:, None] + np.sqrt(max(1 - r * r, 0.0)) * nodes
    mass = weights[:, None] * weights
    (w, slope), (v, steep) = (router.weight(np.sqrt(s) * one) for one in (z, other))
    u, size = _normalisers(router, s)
    m = n = 0.0
    for one, first in zip(u, size, strict=True):
        for two, second in zip(u, size, strict=True):
            f = mass * np.exp(-one * w - two * v)
            t_gates, t_slopes = (f * w * v).sum(), (f * slope * steep).sum()
            t_damped = (f * slope * steep * (1 - one * w) * (1 - two * v)).sum()
            inside, count = f.sum(), first * second * experts
            m += count * inside ** (experts - 1) * t_gates
            n += count * inside ** (experts - 1) * t_damped
            if experts > 1 and router.normalised != "none":
                cross = one * two * t_gates * t_slopes
                n += count * (experts - 1) * inside ** (experts - 2) * cross
    return np.array([router.scale**2 * m, router.scale**2 * n, float(experts)])


def _over(tails: np.ndarray, f: np.ndarray, tag: Any) -> np.ndarray:
    return np.asarray(tails.T @ (f * tag))


def alone(router: Router, s: float) -> np.ndarray:
    """M, N and P of a token with itself: E |g|^2, E |dg/dz|^2 and k, by quadrature."""
    from scipy.special import gammaln, ndtr

    if router.chosen == router.experts:
        return _all_chosen(router, s, 1.0)
    experts, chosen = router.experts, router.chosen
    step = min(FINE, 0.2 / np.sqrt(s))
    x = _grid(router, step)
    tails = _tails(step, len(x))
    single = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    w, slope = router.weight(np.sqrt(s) * x)
    rest = experts - 1 - chosen
    ways = gammaln(experts) - gammaln(rest + 1) - gammaln(chosen + 1)
    everywhere = router.normalised == "all"
    m = n = 0.0
    for u, size in zip(*_normalisers(router, s), strict=True):
        f = single * np.exp(-u * w)
        over = functools.partial(_over, tails, f)
        up = over(1.0)
        low = np.maximum(f.sum() * step - up if everywhere else ndtr(x), 1e-300)
        at_threshold = experts * (f if everywhere else single) * step
        base = at_threshold * np.exp(ways + rest * np.log(low))
        one = chosen * base * up ** (chosen - 1)
        two = chosen * (chosen - 1) * base * up ** max(chosen - 2, 0)
        if router.normalised == "none":
            m, n = (one * over(w * w)).sum(), (one * over(slope**2)).sum()
            continue
        m += size * u * (one * over(w * w)).sum()
        # 1/D^2, -2 w/D^3, w^2/D^4
        tag = slope**2 * (u - (u * w) ** 2 / w + (u * w) ** 2 * u / 6)
        n += size * (one * over(tag)).sum()
        partners = two * over(slope**2)
        if everywhere:
            lower = (f * slope**2).sum() * step - over(slope**2)
            partners = partners + one * (rest * lower / low + slope**2)
        n += size * u**3 / 6 * (partners * over(w * w)).sum()
    return _scaled(router, np.array([m, n, float(chosen)]))
