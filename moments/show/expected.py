"""How far a measurement may be from its prediction, by chance and by the error of the theory.

One draw of the weights is close to lognormal with mean m: log g ~ N(log m - s^2/2, s^2). The mean
of K draws is treated as lognormal too, with the same mean and 1/K of the variance (Fenton and
Wilkinson's approximation, exact at K = 1):

    s_K^2 = log(1 + (e^{s^2} - 1)/K).

s^2 is the one of the bands of signal and gradient. If the draws scatter more than predicted, their
measured standard error replaces it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from ..engine.state import Kernel
from ..engine.trace import Point
from ..noise.band import NORMAL_95
from ..prediction.measurement import Measurement
from ..prediction.result import Prediction

NAMES = ("variance", "grad_variance")
"""Quantities with a band."""

CENTRAL = 0.95
"""Probability that a band contains one draw."""

CLEAR = 3.0
"""Standard deviations beyond which a difference is not attributed to chance."""

BEYOND_CLEAR = math.erfc(CLEAR / math.sqrt(2))

TOLERANCE = 0.02
"""Relative error of the theory itself, one standard deviation."""


TRUNCATION = 2.0
"""Standard deviations at which a "truncated" normal is cut."""


def truncated_variance(cut: float) -> float:
    """Variance of a standard normal cut at +-cut: 1 - 2 cut phi(cut) / (2 Phi(cut) - 1)."""
    density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
    return 1 - 2 * cut * density / math.erf(cut / math.sqrt(2))


@dataclass(frozen=True, eq=False)
class Expected:
    """Lognormal ranges of N + 1 points: predicted means, and standard deviations of the logarithm
    (nan if not known), both (N + 1,)."""

    mean: np.ndarray
    deviation: np.ndarray

    @property
    def low(self) -> np.ndarray:
        """Lower end of the central 95 %."""
        return self.mean * np.exp(-(self.deviation**2) / 2 - NORMAL_95 * self.deviation)

    @property
    def high(self) -> np.ndarray:
        """Upper end of the central 95 %."""
        return self.mean * np.exp(-(self.deviation**2) / 2 + NORMAL_95 * self.deviation)

    def deviations(self, measured: np.ndarray) -> np.ndarray:
        """Distance of a measurement from its expectation in standard deviations; nan if unknown."""
        result = np.full(self.mean.shape, np.nan)
        known = np.isfinite(self.deviation) & (self.mean > 0) & (measured > 0)
        logarithm = np.log(measured[known] / self.mean[known]) + self.deviation[known] ** 2 / 2
        # Without any uncertainty, rounding must not count as a difference.
        scale = np.maximum(self.deviation[known], 1e-6)
        result[known] = logarithm / scale
        result[(self.mean > 0) & (measured == 0) & np.isfinite(self.deviation)] = -np.inf
        return result


def allowed_outside(points: int) -> int:
    """How many of `points` points of a correct network may be outside their 95 % bands.

    The smallest number that is exceeded with less probability than one point has to be three
    standard deviations off, if points were independent: K is binomial(points, 1/20). Points of
    neighbouring layers are correlated, so a correct network exceeds it more often.
    """
    from scipy.special import bdtrc

    return int(next(k for k in range(points + 1) if bdtrc(k, points, 1 - CENTRAL) < BEYOND_CLEAR))


def tail_probability(ratio: float, spread: float) -> float:
    """Two-sided probability of a mean square, measured over expected, at a relative standard error
    `spread` = sqrt((k - 1) / n).

    A mean square of n entries of kurtosis k is close to chi-square over its degrees of freedom 2 n
    / (k - 1), exactly so for normal entries.
    """
    from scipy.special import gammainc, gammaincc

    half = 1 / spread**2  # half the degrees of freedom
    lower, upper = gammainc(half, half * ratio), gammaincc(half, half * ratio)
    return float(min(1.0, 2 * min(lower, upper)))


def over_draws(log_variance: np.ndarray, draws: int) -> np.ndarray:
    """Variance of the logarithm of the mean of `draws` draws, from that of one draw."""
    return np.asarray(np.log1p(np.expm1(log_variance) / draws))


def point_log_variance(prediction: Prediction, point: Point) -> float:
    """Variance over draws of the log of the signal variance at a point inside the network; nan if
    not tracked.

    The token average of x^2 has variance sum_ij U_ij / L^2, U being the covariance of the tokens'
    squared norms. The sequences of a batch count as independent.
    """
    signal, layout, batch = point.signal, prediction.layout, max(1, prediction.batch)
    length = prediction.model.seq_len
    variance = float(layout.moments(point)[1])
    if signal.fluctuation is None or not variance:
        return math.nan
    norms = signal.fluctuation.norms
    tokens = layout.sequences * length if norms.resolved else length
    sequences = max(1, batch // layout.sequences)
    total = _total(norms, tokens, layout.real) / sequences
    return float(np.log1p(max(total, 0.0) / variance**2))


def _total(norms: Kernel, tokens: int, real: np.ndarray | None) -> float:
    """Variance of the average over the tokens that are not padding."""
    if real is None or not norms.resolved:
        return float(np.mean(norms.total(tokens))) / tokens**2
    share = real.reshape(-1) if real.size == tokens else np.resize(real, tokens)
    return float(share @ norms.off_diagonal @ share) / float(share.sum()) ** 2


def log_variance(band: np.ndarray) -> np.ndarray:
    """Variance of the logarithm of one draw, from its 95 % band (2, ...)."""
    low, high = band
    positive = (low > 0) & (high > 0)
    width = np.log(np.divide(high, low, out=np.ones_like(high), where=positive))
    return np.asarray((width / (2 * NORMAL_95)) ** 2)


def expected(
    prediction: Prediction,
    measurement: Measurement,
    *,
    same_weights: bool = False,
    tolerance: float = TOLERANCE,
) -> dict[str, Expected]:
    """The ranges of "variance" and "grad_variance" at every point of the stream; arguments as of
    `compare`."""
    if prediction.batch < measurement.batch and prediction.layout.sequences == 1:
        prediction = dataclasses.replace(prediction, batch=measurement.batch)
    draws = 1 if same_weights else measurement.seeds
    unknown = dict.fromkeys(NAMES, np.full(prediction.variance.shape, np.nan))
    ranges = {}
    for name, one in (_spreads(prediction) or unknown).items():
        measured, stderr = (np.asarray(getattr(measurement, name + s)) for s in ("", "_stderr"))
        scatter = np.divide(stderr, measured, out=np.zeros_like(measured), where=measured > 0) ** 2
        chance = np.fmax(over_draws(one, draws), scatter)  # nan where one of them is unknown
        ranges[name] = Expected(getattr(prediction, name), np.sqrt(chance + tolerance**2))
    return ranges


def one_draw(prediction: Prediction) -> dict[str, Expected]:
    """The ranges of one draw of the weights; empty if they are not known."""
    spreads = {} if prediction.variance.ndim > 1 else _spreads(prediction)
    return {n: Expected(getattr(prediction, n), np.sqrt(spread)) for n, spread in spreads.items()}


def _spreads(prediction: Prediction) -> dict[str, np.ndarray]:
    """Variances of the logarithm of one draw; empty under theories without a band."""
    if not prediction.states_draws:
        return {}
    return {name: log_variance(getattr(prediction, f"{name}_band")) for name in NAMES}
