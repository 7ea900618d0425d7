"""How far a measurement may lie from its prediction: by chance, and by the theory's own error.

One draw of the weights is close to lognormal about its mean m, log g ~ N(log m - s^2/2, s^2). The
mean of K draws is taken for lognormal too, with the same mean and the variance over K (Fenton and
Wilkinson's approximation, exact at K = 1):

    s_K^2 = log(1 + (e^{s^2} - 1)/K).

s^2 is that of the bands of signal and gradient. Where draws scatter more than predicted, their
standard error takes its place.
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
"""Quantities that have a band."""

CENTRAL = 0.95
"""Of a band."""

CLEAR = 3.0
"""Standard deviations beyond which a verdict does not put a difference down to chance."""

BEYOND_CLEAR = math.erfc(CLEAR / math.sqrt(2))

TOLERANCE = 0.02
"""Relative error of the theory itself, one standard deviation."""


TRUNCATION = 2.0
"""Deviations of the parent normal at which "truncated" cuts."""


def truncated_variance(cut: float) -> float:
    """Variance of a standard normal cut at +-cut: 1 - 2 cut phi(cut) / (2 Phi(cut) - 1)."""
    density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
    return 1 - 2 * cut * density / math.erf(cut / math.sqrt(2))


@dataclass(frozen=True, eq=False)
class Expected:
    """A lognormal range by point, (N + 1,): its predicted mean, and the standard deviation of its
    logarithm, nan where none is known."""

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
        """How many standard deviations a measurement is from its expectation; nan where unknown."""
        result = np.full(self.mean.shape, np.nan)
        known = np.isfinite(self.deviation) & (self.mean > 0) & (measured > 0)
        logarithm = np.log(measured[known] / self.mean[known]) + self.deviation[known] ** 2 / 2
        # Without any uncertainty a difference of rounding is none.
        scale = np.maximum(self.deviation[known], 1e-6)
        result[known] = logarithm / scale
        result[(self.mean > 0) & (measured == 0) & np.isfinite(self.deviation)] = -np.inf
        return result


def allowed_outside(points: int) -> int:
    """Of so many points of a right network, how many may lie out of their 95 % bands.

    The fewest that are exceeded with less probability than a single point lies three standard
    deviations out, were the points independent: K is binomial(points, 1/20). Points of neighbouring
    layers move together, so that a right network exceeds it more often.
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
    """Variance of the logarithm of the mean of so many draws, from that of one."""
    return np.asarray(np.log1p(np.expm1(log_variance) / draws))


def point_log_variance(prediction: Prediction, point: Point) -> float:
    """Variance of the logarithm of one draw's signal variance at one point inside the network; nan
    where not tracked.

    The token average of x^2 fluctuates by sum_ij U_ij / L^2, U the covariance of the tokens'
    squared norms; over the `batch` sequences, which count as independent.
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
    """Variance of the average over real tokens."""
    if real is None or not norms.resolved:
        return float(np.mean(norms.total(tokens))) / tokens**2
    share = real.reshape(-1) if real.size == tokens else np.resize(real, tokens)
    return float(share @ norms.off_diagonal @ share) / float(share.sum()) ** 2


def log_variance(band: np.ndarray) -> np.ndarray:
    """Variance of the logarithm of one draw, from its band."""
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
    """Where one draw of the weights falls 95 % of the time, as far as that is known."""
    spreads = {} if prediction.variance.ndim > 1 else _spreads(prediction)
    return {n: Expected(getattr(prediction, n), np.sqrt(spread)) for n, spread in spreads.items()}


def _spreads(prediction: Prediction) -> dict[str, np.ndarray]:
    """Variances of the logarithm of one draw; none under theories that state no band."""
    if not prediction.states_draws:
        return {}
    return {name: log_variance(getattr(prediction, f"{name}_band")) for name in NAMES}
