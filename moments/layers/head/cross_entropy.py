"""Expectations of a softmax over a vocabulary of Gaussian logits, exact for one token.

Each is an integral over y = -log t, t the argument of the Laplace transform of the softmax's sum,
by equally spaced points, which converge exponentially. For large variances E exp(-exp(z - y)) is a
normal distribution smoothed by a Gumbel variable, over which the integral is taken instead. See
docs/theory/loss.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...engine.state import Array

_STEP = 0.4  # of y and z: an error of exp(-pi^2 / step) = 2e-11
# Of the Gumbel variable: an error of 2e-15 (E p (1 - p) is a difference, falling like 1/deviation).
_STEP_OF_GUMBEL = 0.25
_TAIL = 8.5  # standard deviations
_RARE = 1e-13  # neglected probability
_NEAR = 100.0  # distance from a centre, in its scales, within which points are equally spaced
# Cap on a logit's standard deviation. Beyond it softmaxes are one-hot to 1e-6, and results scale.
_DEVIATION_MAX = 1e7
# Most nodes of a capped logit; larger caps (1e3 and beyond) are scaled down to it.
_CAPPED_POINTS = 40_000
_NOTHING = 1e-280  # product of two probabilities that counts as 0
_AT_ONCE = 1 << 20  # entries of a matrix


@dataclass(frozen=True, eq=False)
class Logit:
    """Expectations over a logit's value f = f(z), slope w = f'(z) and probability p, each (...)."""

    value: Array
    square: Array
    slope: Array
    slope_square: Array
    probability: Array
    probability_slope: Array
    probability_slope_square: Array
    square_slope_square: Array
    probability_square: Array

    @property
    def ends(self) -> Array:
        """E (p w)^2 over (E p w)^2; 1 if the logit has no probability."""
        return _share(self.square_slope_square, self.probability_slope**2)

    @property
    def hits(self) -> Array:
        """E p w^2 over E p w E w; 1 if the logit has no probability."""
        return _share(self.probability_slope_square, self.probability_slope * self.slope)

    def reshaped(self, shape: tuple[int, ...]) -> Logit:
        return Logit(*(np.reshape(v, shape)[()] for v in vars(self).values()))


def _share(part: Array, whole: Array) -> Array:
    positive = np.asarray(whole) > _NOTHING
    return np.divide(part, whole, out=np.ones(positive.shape), where=positive)[()]


@dataclass(frozen=True, eq=False)
class Softmax:
    """Expectations of one token's softmax.

    Attributes:
        log_sum: E log sum_v exp(f(z_v)).
        own: the logit of the token's own row, which has another mean and variance.
        other: each of the other logits.
    """

    log_sum: Array
    own: Logit
    other: Logit


def softmax_expectations(
    vocab_size: int,
    variance: Array,
    own_mean: Array = 0.0,
    own_variance: Array = None,
    softcap: float | None = None,
) -> Softmax:
    """Expectations of a softmax over independent Gaussian logits, all but one of equal law.

    Args:
        variance: of the equal logits, any shape.
        own_mean, own_variance: of the other one; they broadcast with `variance`; None: the same.
        softcap: c in f(z) = c tanh(z/c); None: f(z) = z.
    """
    own_variance = variance if own_variance is None else own_variance
    arrays = np.broadcast_arrays(
        np.asarray(variance, float), np.asarray(own_mean, float), np.asarray(own_variance, float)
    )
    shape = arrays[0].shape
    if not all(np.all(np.isfinite(array)) for array in arrays):
        raise OverflowError("logits without a finite variance")
    rows, where = np.unique(
        np.stack([a.ravel() for a in arrays], axis=-1).round(12), axis=0, return_inverse=True
    )
    result = np.array(
        [_single(vocab_size, v, mean, own, softcap) for v, mean, own in rows.tolist()]
    )
    table = result[where.ravel()].T
    log_sum, own, other = table[0], Logit(*table[1:10]), Logit(*table[10:])
    return Softmax(log_sum.reshape(shape)[()], own.reshaped(shape), other.reshaped(shape))


class _Nodes:
    """A logit at equally spaced nodes, with Gaussian weights."""

    def __init__(self, mean: float, variance: float, softcap: float | None, top: float) -> None:
        deviation = math.sqrt(max(variance, 1e-24))
        step = min(_STEP, deviation / 2, math.inf if softcap is None else softcap / 4)
        low, high = mean - _TAIL * deviation, mean + _TAIL * deviation
        if softcap is None:
            # exp(2 z) shifts mass up to mean + 2 variance; exp(-exp(z - y)) cuts it off at `top`.
            high = min(high + 2 * variance, max(top, high))
        else:
            low, high = max(low, -_saturated(softcap)), min(high, _saturated(softcap))
        z = np.arange(low, high + step, step) if low < high else np.array([low])
        self.weights = np.exp(-((z - mean) ** 2) / (2 * variance + 2e-24))
        self.weights *= step / (deviation * math.sqrt(2 * math.pi))
        if softcap is None:
            value, slope = z, np.ones_like(z)
        else:
            tanh = np.tanh(z / softcap)
            value, slope = softcap * tanh, 1 - tanh**2
            self._saturate(float(z[0]), float(z[-1]), step, mean, deviation)
        self._value, self._slope, self._uncapped = value, slope, softcap is None
        self.value, self.square = value @ self.weights, value**2 @ self.weights
        self.slope, self.slope_square = slope @ self.weights, slope**2 @ self.weights

    def _saturate(
        self, first: float, last: float, step: float, mean: float, deviation: float
    ) -> None:
        """Add the weight beyond the ends, where the capped logit is constant, to the ends."""
        from scipy.special import ndtr

        self.weights[0] += ndtr((first - step / 2 - mean) / deviation)
        self.weights[-1] += ndtr((mean - last - step / 2) / deviation)

    def transforms(self, y: np.ndarray) -> dict[str, np.ndarray]:
        """E exp(-exp(u)) ("below"), 1 minus it ("above"), and E exp(k u - exp(u)) times powers of
        the slope, at every y."""
        rows = max(1, _AT_ONCE // len(self._value))
        parts = [self._transforms(y[i : i + rows]) for i in range(0, len(y), rows)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _sizes(self, y: np.ndarray) -> np.ndarray:
        """(points, nodes) exp(u), u = f(z) - y, at most e^300."""
        values, top = self._value, float(self._value.max())
        if top - values.min() < 300.0 and top - y.min() < 300.0:
            return np.multiply.outer(np.exp(top - y), np.exp(values - top))
        return np.asarray(np.exp(np.minimum(values[None, :] - y[:, None], 300.0)))

    def _transforms(self, y: np.ndarray) -> dict[str, np.ndarray]:
        # exp(k u - exp(u)) is exp(u)^k times a factor that is 0 long before the power overflows.
        size = self._sizes(y)
        once = np.exp(-size)
        below, above = once @ self.weights, -np.expm1(-size) @ self.weights
        once *= size
        size *= once
        p, pp = once @ self.weights, size @ self.weights
        if self._uncapped:
            pw, pww, ppww = p, p, pp
        else:
            slope, square = self.weights * self._slope, self.weights * self._slope**2
            pw, pww, ppww = once @ slope, once @ square, size @ square
        result = {"p": p, "pw": pw, "pww": pww, "ppww": ppww, "pp": pp}
        return {"below": below, "above": above, **result}


@dataclass(frozen=True)
class _Wide:
    """An uncapped logit of large variance, by nodes of the added Gumbel variable."""

    value: float
    variance: float
    slope: float = 1.0
    slope_square: float = 1.0

    @property
    def square(self) -> float:
        return self.value**2 + self.variance

    def transforms(self, y: np.ndarray) -> dict[str, np.ndarray]:
        """As `_Nodes.transforms`: exp(u - exp(u)) du is the law of -G, exp(2 u - ...) times e^-G.

        The mass of exp(k u - exp(u)) around z = mean + k variance is neglected: above the variance
        `_wide_from` no y is that large.
        """
        from scipy.special import ndtr

        gumbel = np.arange(-4.0, 40.0, _STEP_OF_GUMBEL)
        law = _STEP_OF_GUMBEL * np.exp(-gumbel - np.exp(-gumbel))
        deviation = math.sqrt(self.variance)
        z = (y[:, None] - self.value - gumbel) / deviation
        density = np.exp(-(z**2) / 2) / (deviation * math.sqrt(2 * math.pi))
        once, twice = density @ law, density @ (law * np.exp(-gumbel))
        result = {"p": once, "pw": once, "pww": once, "ppww": twice, "pp": twice}
        return {"below": ndtr(z) @ law, "above": ndtr(-z) @ law, **result}


def _saturated(softcap: float) -> float:
    """z at which 1 - tanh(z/softcap) is 1e-15."""
    return 18.0 * softcap


def _wide_from(vocab_size: int) -> float:
    """Variance that log S never reaches, so that the mass that exp(z) shifts plays no part."""
    return 2 * math.log(vocab_size / _RARE)


def _logit(
    vocab_size: int, mean: float, variance: float, softcap: float | None, top: float
) -> _Nodes | _Wide:
    if softcap is None and variance > _wide_from(vocab_size):
        return _Wide(mean, variance)
    return _Nodes(mean, variance, softcap, top)


def _points(
    low: float, high: float, centres: list[tuple[float, float]]
) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of an integral from low to high.

    t = sum of n asinh((y - c)/(n s)) over centres c of scale s, n = `_NEAR`, is equally spaced:
    points are at most `_STEP` s apart around each centre, and in proportion to the distance far
    from it, so their number grows with the logarithm of the range.
    """

    def place(y: np.ndarray) -> np.ndarray:
        return np.asarray(sum(_NEAR * np.arcsinh((y - c) / (_NEAR * s)) for c, s in centres))

    def slope(y: np.ndarray) -> np.ndarray:
        return np.asarray(sum(1 / np.hypot(s, (y - c) / _NEAR) for c, s in centres))

    ends = place(np.array([low, high]))
    wanted = np.arange(ends[0], ends[1] + _STEP, _STEP)
    if len(centres) == 1:
        (centre, scale), *_ = centres
        y = centre + _NEAR * scale * np.sinh(wanted / _NEAR)
    else:
        below, above = np.full_like(wanted, low), np.full_like(wanted, 2 * high - low)
        # Bisect to within the smallest scale, a hundredth of that on which t curves; from there
        # Newton's steps square a relative distance of .01.
        halvings = math.log2(2 * (high - low) / min(s for _, s in centres))
        for _ in range(max(1, math.ceil(halvings))):
            middle = (below + above) / 2
            short = place(middle) < wanted
            below, above = np.where(short, middle, below), np.where(short, above, middle)
        y = (below + above) / 2
        for _ in range(4):
            y -= (place(y) - wanted) / slope(y)
    return y, _STEP / slope(y)


def _single(
    vocab_size: int, variance: float, own_mean: float, own_variance: float, softcap: float | None
) -> list[float]:
    """log_sum, then the fields of `Logit` for the own logit and for each other one."""
    from statistics import NormalDist

    quantile = NormalDist().inv_cdf

    shrunk = max(variance, own_variance) ** 0.5 / _DEVIATION_MAX
    if softcap is not None:
        capped = min(2 * _saturated(softcap), 2 * _TAIL * max(variance, own_variance) ** 0.5)
        shrunk = capped / (_STEP * _CAPPED_POINTS)
    if shrunk > 1.0:
        cap = None if softcap is None else softcap / shrunk
        less = variance / shrunk**2, own_mean / shrunk, own_variance / shrunk**2, cap
        return _grown(_single(vocab_size, *less), shrunk)
    deviation, own_deviation = math.sqrt(variance), math.sqrt(own_variance)
    # Location of log S: log of the mean of S, or the largest of V normal deviates.
    size, extreme = math.log(vocab_size), math.sqrt(2 * math.log(vocab_size))
    place = min(size + variance / 2, deviation * extreme, softcap or math.inf)
    scale = max(1.0, deviation / extreme) if softcap is None else 1.0
    own_scale = max(1.0, own_deviation / 4) if softcap is None else 1.0
    centres = [(place, scale)]
    if own_scale < scale or abs(own_mean - place) > _NEAR * scale:
        centres.append((own_mean, own_scale))
    # Range that log S leaves with probability 1e-13, and beyond it the tails of Gumbel laws.
    least = deviation * quantile(_RARE ** (1 / max(vocab_size - 2, 1)))
    most = min(size + variance / 2, size - deviation * quantile(_RARE / vocab_size))
    own_most = own_mean + min(own_variance / 2, -own_deviation * quantile(_RARE))
    if softcap is not None:
        most, own_most = min(most, size + softcap), min(own_most, softcap)
    low = min(size, least, place - 5 * (scale - 1)) - 6
    high = max(most, own_most, place + 25 * (scale - 1)) + 25
    grid, weights = _points(low, high, centres)
    other = _logit(vocab_size, 0.0, variance, softcap, high + 4)
    own = _logit(vocab_size, own_mean, own_variance, softcap, high + 4)
    of_other = other.transforms(grid)
    same = own_mean == 0.0 and own_variance == variance
    of_own = of_other if same else own.transforms(grid)
    log_below = np.log1p(-np.minimum(of_other["above"], np.nextafter(1.0, 0.0)))
    without_own = np.exp((vocab_size - 1) * log_below)
    without_other = np.exp((vocab_size - 2) * log_below) * of_own["below"]
    reference = np.exp(-np.exp(np.minimum((place - grid) / scale, 700.0)))
    log_sum = place + np.euler_gamma * (scale - 1)
    log_sum += float((reference - without_own * of_own["below"]) @ weights)
    result = [log_sum]
    for logit, transforms, rest in ((own, of_own, without_own), (other, of_other, without_other)):
        share = weights * rest
        result += map(float, (logit.value, logit.square, logit.slope, logit.slope_square))
        result += [float(transforms[name] @ share) for name in ("p", "pw", "pww", "ppww", "pp")]
    return result


def _grown(result: list[float], factor: float) -> list[float]:
    """Result of `_single` if all logits are `factor` times as large and softmaxes nearly one-hot.

    The probability that two logits are close enough to share the softmax falls like 1/factor, and
    with it E p (1 - p); the change of E p itself is neglected.
    """
    log_sum, *logits = result
    grown = [log_sum * factor]
    for value, square, slope, slope_square, p, pw, pww, ppww, pp in (logits[:9], logits[9:]):
        grown += [value * factor, square * factor**2, slope, slope_square, p, pw, pww]
        grown += [pww - (pww - ppww) / factor, p - (p - pp) / factor]
    return grown
