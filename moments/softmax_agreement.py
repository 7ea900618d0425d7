"""How much two softmaxes of correlated Gaussian logits agree: E sum_v p_v p'_v.

With S = sum_v exp(z_v), p_v = int exp(u - S exp(-y)) dy, u = z_v - y, and pairs (z_v, z'_v) of
different v independent,

    E p_v p'_v = int int E[exp(u - exp(u)) exp(u' - exp(u'))] E[exp(-exp(u) - exp(u'))]^(V-1) dy dy'

on equally spaced points. Between E p_v E p'_v, where the logits are independent, and E p_v^2, where
they are equal, its logarithm rises in proportion to the correlation as long as softmaxes are flat.
Peaked ones agree where their largest logits do, and those agree by V^-(1 - rho)/(1 + rho): the rise
is 2 rho/(1 + rho) there.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from .state import Array

# Below this variance of the logits E p p' is within .1 percent of a rise like the correlation.
_FLAT = 1.0
_STEP = 0.8  # exp(-pi^2 / step) = 4e-6
_TAIL = 6.0  # standard deviations
# Where the rise is computed. Negative correlations are below what interpolation needs.
_NODES = np.array([-0.4, -0.15, 0.15, 0.4, 0.65, 0.85])


def rise(vocab_size: int, variance: float, correlation: Array) -> Array:
    """Share of the way from log E p E p' to log E p^2 at a correlation of the logits.

    Args:
        vocab_size: number of logits V.
        variance: of each logit.
        correlation: of two tokens' logits, any shape.
    """
    if variance < _FLAT or vocab_size < 3:
        return correlation
    slopes = _slopes(vocab_size, float(f"{variance:.3g}"))
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
    apart, same = (_log_product(vocab_size, variance, rho) for rho in (0.0, 1.0))
    found = [
        (_log_product(vocab_size, variance, rho) - apart) / (same - apart) / rho
        for rho in _NODES.tolist()
    ]
    return (*found, 1.0)


def _log_product(vocab_size: int, variance: float, correlation: float) -> float:
    """log E p_v p'_v."""
    deviation = math.sqrt(variance)
    step = min(_STEP, deviation / 2)
    largest = deviation * math.sqrt(2 * math.log(vocab_size))
    least = min(math.log(vocab_size), largest) - 6
    log_mean = math.log(vocab_size) + variance / 2
    y = np.arange(least, min(log_mean, largest + 4 * deviation) + 14, _STEP)
    z = np.arange(-_TAIL * deviation, (_TAIL + deviation) * deviation + step, step)
    z = z[z <= y[-1] + 5]
    first = step / (deviation * math.sqrt(2 * math.pi)) * np.exp(-(z**2) / (2 * variance))
    lost, density = _transforms(z, y)
    rest = deviation * math.sqrt(1 - correlation**2)
    if rest == 0.0:
        other_lost, other_density = lost, density
    else:
        fine = min(_STEP, rest / 2)
        w = np.arange(-_TAIL * rest, (_TAIL + rest) * rest + fine, fine)
        second = fine / (rest * math.sqrt(2 * math.pi)) * np.exp(-(w**2) / (2 * rest**2))
        parts = [_transforms(correlation * value + w, y) for value in z]
        other_lost = np.stack([part @ second for part, _ in parts], axis=1)
        other_density = np.stack([part @ second for _, part in parts], axis=1)
    missing = (lost @ first)[:, None] + ((1 - lost) * first) @ other_lost.T
    joint = (density * first) @ other_density.T
    whole = joint * np.exp((vocab_size - 1) * np.log1p(-np.minimum(missing, 1 - 1e-16)))
    return math.log(_STEP**2 * float(whole.sum()))


def _transforms(z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1 - exp(-exp(u)) and exp(u - exp(u)) at u = z - y, (points of y, points of z)."""
    u = z[None, :] - y[:, None]
    size = np.exp(np.minimum(u, 700.0))
    return -np.expm1(-size), np.exp(u - size)
