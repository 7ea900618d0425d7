"""How much two softmaxes of correlated Gaussian logits agree: E sum_v p_v p'_v.

It is the chance that two choices by Gumbel variables are one, by the Fourier transform of the
density of two logits with these added. See docs/theory/loss.md.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ...engine.state import Array
from .cross_entropy import softmax_expectations

# Below this variance of the logits E p p' is within .1 percent of a rise like the correlation.
_FLAT = 1.0
_STEP = 0.35  # of y: the transforms have fallen to 1e-6 where they end
_STEP_OF_EXTREME = 0.9  # where logits vary widely, in the scale of the largest of V: to 1e-16
_TAIL = 7.0  # standard deviations
# Beyond it, in units of sqrt(2 log V), the largest logit is all there is, to 1e-6.
_DEVIATION_MAX = 1e6
_ROUNDING = 1e-14  # of the transform, which E p p' of 1/V^2 meets for ten million logits
_LOGITS_MAX = 10**9  # as many stand for more: the rise follows log V
# Where the rise is computed. Negative correlations are below what interpolation needs.
_NODES = np.array([-0.4, -0.15, 0.15, 0.4, 0.65, 0.85])


def agreement_share(vocab_size: int, variance: float, correlation: Array) -> Array:
    """Share of the way from log E p E p' to log E p^2 at a correlation of the logits.

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
    """Rise over correlation at the nodes and at 1."""
    apart = -2 * math.log(vocab_size)
    same = math.log(float(softmax_expectations(vocab_size, variance).other.probability_square))
    result = [
        (_log_product(vocab_size, variance, rho) - apart) / (same - apart) / rho
        for rho in _NODES.tolist()
    ]
    return (*result, 1.0)


def _log_product(vocab_size: int, variance: float, correlation: float) -> float:
    """log E p_v p'_v, of a correlation below 1."""
    from scipy.special import loggamma

    extreme = math.sqrt(2 * math.log(vocab_size))
    deviation = min(math.sqrt(variance), _DEVIATION_MAX * extreme)
    step = max(_STEP, _STEP_OF_EXTREME * deviation / max(extreme, 3.0))
    # Below, F^(V-1) vanishes; what f has there is kept within the period all the same.
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
    if total < _ROUNDING:  # so even that log E p p' is that of E exp(z + z') over (E exp z)^2
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
