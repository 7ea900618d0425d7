"""A softmax over a vocabulary of Gaussian logits: its expectations, exact for one token.

S = sum_v exp(f(z_v)) has the Laplace transform E exp(-t S) = prod_v E exp(-t exp(f(z_v))), a
product of one-dimensional integrals. With t = exp(-y) every expectation of a softmax is an integral
over y:

    E log S = y0 + int [exp(-exp(y0 - y)) - E exp(-exp(-y) S)] dy      (a Gumbel law at y0 compared)
    E p_v^k = int E[exp(k u - exp(u))] prod_{v' != v} E exp(-exp(u')) dy / (k - 1)!,  u = f(z) - y

Integrands are analytic within |Im| < pi/2, so that equally spaced points converge exponentially.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .state import Array

_STEP = 0.4  # of y and of z: an error of exp(-pi^2 / step) = 2e-11
_TAIL = 8.5  # standard deviations


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

    def reshaped(self, shape: tuple[int, ...]) -> Logit:
        return Logit(*(np.reshape(v, shape)[()] for v in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Softmax:
    """Expectations of one token's softmax.

    Attributes:
        log_sum: E log sum_v exp(f(z_v)).
        own: the logit of the token that is read, of a mean and variance of its own.
        other: each of the others.
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
    """Expectations of a softmax over independent Gaussian logits, all but one alike.

    Args:
        vocab_size: number of logits.
        variance: of each, any shape.
        own_mean, own_variance: of the one that differs; they broadcast with `variance`; None: as
            the others.
        softcap: c in f(z) = c tanh(z/c); None: f(z) = z.
    """
    own_variance = variance if own_variance is None else own_variance
    arrays = np.broadcast_arrays(
        np.asarray(variance, float), np.asarray(own_mean, float), np.asarray(own_variance, float)
    )
    shape = arrays[0].shape
    rows, where = np.unique(
        np.stack([a.ravel() for a in arrays], axis=-1).round(12), axis=0, return_inverse=True
    )
    found = [_single(vocab_size, v, mean, own, softcap) for v, mean, own in rows.tolist()]
    table = np.array(found)[where.ravel()].T
    log_sum, own, other = table[0], Logit(*table[1:10]), Logit(*table[10:])
    return Softmax(log_sum.reshape(shape)[()], own.reshaped(shape), other.reshaped(shape))


class _Nodes:
    """One logit at equally spaced nodes, with the weights of its Gaussian."""

    def __init__(self, mean: float, variance: float, softcap: float | None, top: float) -> None:
        deviation = math.sqrt(max(variance, 1e-24))
        step = min(_STEP, deviation / 2, math.inf if softcap is None else softcap / 4)
        low = mean - _TAIL * deviation
        # exp(2 z) moves the mass up to mean + 2 variance; beyond `top` exp(-exp(z - y)) ends it.
        high = min(mean + 2 * variance + _TAIL * deviation, max(top, mean + _TAIL * deviation))
        z = np.arange(low, high + step, step)
        self.weights = np.exp(-((z - mean) ** 2) / (2 * variance + 2e-24))
        self.weights *= step / (deviation * math.sqrt(2 * math.pi))
        if softcap is None:
            self.value, self.slope = z, np.ones_like(z)
        else:
            tanh = np.tanh(z / softcap)
            self.value, self.slope = softcap * tanh, 1 - tanh**2

    def mean(self, values: np.ndarray) -> Any:
        return values @ self.weights

    def transforms(self, y: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """1 - E exp(-exp(u)), and E exp(k u - exp(u)) times powers of the slope, at every y."""
        u = self.value[None, :] - y[:, None]
        size = np.exp(np.minimum(u, 700.0))
        once, twice = np.exp(u - size), np.exp(2 * u - size)
        slope, square = self.weights * self.slope, self.weights * self.slope**2
        found = {
            "p": once @ self.weights,
            "pw": once @ slope,
            "pww": once @ square,
            "ppww": twice @ square,
            "pp": twice @ self.weights,
        }
        return -np.expm1(-size) @ self.weights, found


def _single(
    vocab_size: int, variance: float, own_mean: float, own_variance: float, softcap: float | None
) -> list[float]:
    """log_sum, then the fields of `Logit` for the own logit and for another."""
    from scipy.special import ndtri

    # log E S without a cap, above what it is with one; and what S falls short of once in 1e13.
    largest = np.logaddexp(math.log(vocab_size - 1) + variance / 2, own_mean + own_variance / 2)
    largest_logit = math.sqrt(variance) * ndtri(1e-13 ** (1 / vocab_size))
    least = min(math.log(vocab_size), largest_logit) - 6
    grid = np.arange(least, largest + 25, _STEP)
    other = _Nodes(0.0, variance, softcap, float(grid[-1]) + 4)
    own = _Nodes(own_mean, own_variance, softcap, float(grid[-1]) + 4)
    missing, others = other.transforms(grid)
    own_missing, owns = own.transforms(grid)
    log_one = np.log1p(-np.minimum(missing, np.nextafter(1.0, 0.0)))
    without_own = np.exp((vocab_size - 1) * log_one)
    without_other = np.exp((vocab_size - 2) * log_one) * (1 - own_missing)
    whole = without_own * (1 - own_missing)
    log_sum = largest + _STEP * float((np.exp(-np.exp(largest - grid)) - whole).sum())
    found = [log_sum]
    for nodes, kinds, rest in ((own, owns, without_own), (other, others, without_other)):
        softmax = {name: _STEP * float(values @ rest) for name, values in kinds.items()}
        found += [
            float(nodes.mean(nodes.value)),
            float(nodes.mean(nodes.value**2)),
            float(nodes.mean(nodes.slope)),
            float(nodes.mean(nodes.slope**2)),
            *(softmax[name] for name in ("p", "pw", "pww", "ppww", "pp")),
        ]
    return found
