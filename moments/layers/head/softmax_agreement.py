"""Agreement E sum_v p_v p'_v of two softmaxes of correlated Gaussian logits.

It is the probability that two samples, drawn with Gumbel noise, are equal, computed by the Fourier
transform of the density of two logits with that noise. See docs/theory/loss.md.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ...engine.state import Array
from .cross_entropy import softmax_expectations

# Variance of the logits below which log E p p' is linear in the correlation to .1 percent.
_FLAT = 1.0
_STEP = 0.35  # of y: the transforms have fallen to 1e-6 at their ends
_STEP_OF_EXTREME = 0.9  # for large variances, in the scale of the largest of V logits: to 1e-16
_TAIL = 7.0  # standard deviations
# Cap in units of sqrt(2 log V); beyond it the largest logit has all probability, to 1e-6.
_DEVIATION_MAX = 1e6
_ROUNDING = 1e-14  # of the transform; E p p' = 1/V^2 reaches it for ten million logits
_LOGITS_MAX = 10**9  # cap on V, as the result depends on log V
# Correlations at which the share is computed; more negative ones do not occur.
_NODES = np.array([-0.4, -0.15, 0.15, 0.4, 0.65, 0.85])


def agreement_share(vocab_size: int, variance: float, correlation: Array) -> Array:
    """(log E p p' - log E p E p') / (log E p^2 - log E p E p') at a correlation of the logits.

    Args:
        vocab_size: number of logits V.
        correlation: of two tokens' logits, any shape.
    """
    if variance < _FLAT or vocab_size < 3:
        return correlation
    slopes = _slopes(min(vocab_size, _LOGITS_MAX), float(f"{variance:.3g}"))
    nodes = np.append(_NODES, 1.0)
    inside = np.clip(correlation, nodes[0], 1.0)
    total = 0.0 * np.asarray(inside)
    for k, slope in enumerate(slopes):
        others = np.delete(nodes, k)
        basis = [(inside - other) / (nodes[k] - other) for other in others]
        total = total + slope * math.prod(basis)
    return (correlation * total)[()]


@functools.lru_cache(maxsize=256)
def _slopes(vocab_size: int, variance: float) -> tuple[float, ...]:
    """The share over the correlation, at the nodes and at 1."""
    independent = -2 * math.log(vocab_size)
    equal = math.log(float(softmax_expectations(vocab_size, variance).other.probability_square))
    result = [
        (_log_product(vocab_size, variance, rho) - independent) / (equal - independent) / rho
        for rho in _NODES.tolist()
    ]
    return (*result, 1.0)


def _log_product(vocab_size: int, variance: float, correlation: float) -> float:
    """log E p_v p'_v at a correlation below 1."""
    from scipy.special import loggamma

    extreme = math.sqrt(2 * math.log(vocab_size))
    deviation = min(math.sqrt(variance), _DEVIATION_MAX * extreme)
    step = max(_STEP, _STEP_OF_EXTREME * deviation / max(extreme, 3.0))
    # Below `low` F^(V-1) vanishes; the period still includes the density there.
    largest = deviation * extreme
    mean = math.log(vocab_size) + deviation**2 / 2
    low = -_TAIL * deviation - 4
    high = min(mean, largest + _TAIL * deviation) + 30
    count = math.ceil((high - low) / step)
    waves = 2 * math.pi * np.fft.fftfreq(count, step)
    first, second = waves[:, None], waves[None, :]
    once = loggamma(1 + 1j * waves)
    exponent = -(first**2 + second**2 + 2 * correlation * first * second) * deviation**2 / 2
    transform = np.exp(exponent + once[:, None] + once[None, :] + 1j * low * (first + second))
    density = np.fft.ifft2(transform).real / step**2
    below = _antiderivative(_antiderivative(density, step, 0), step, 1)
    missing = np.clip(1 - below, 0.0, 1 - 1e-16)
    whole = density * np.exp((vocab_size - 1) * np.log1p(-missing))
    total = step**2 * float(whole.sum())
    if total < _ROUNDING:  # so flat that E p p' is E exp(z + z') over (V E exp z)^2
        return -2 * math.log(vocab_size) + correlation * variance
    return math.log(total)


def _antiderivative(values: np.ndarray, step: float, axis: int) -> np.ndarray:
    """Integral from the first point on, of a function that vanishes at both ends."""
    values = np.moveaxis(values, axis, -1)
    waves = 2 * math.pi * np.fft.fftfreq(values.shape[-1], step)
    waves[0] = 1.0
    modes = np.fft.fft(values) / (1j * waves)
    modes[..., 0] = 0.0
    result = np.fft.ifft(modes).real
    result += values.mean(-1, keepdims=True) * step * np.arange(values.shape[-1])
    return np.asarray(np.moveaxis(result - result[..., :1], -1, axis))
