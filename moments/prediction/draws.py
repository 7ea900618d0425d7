"""Raw moments of single draws of the weights, and statistics over draws.

Code that runs a network, in any framework, returns one `Draw` per draw of its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import MomentsError

Array = NDArray[np.float64]
Place = tuple[int, str]
"""A layer, 0 before layer 1, and the name of a site in it."""

STREAM = "stream"

QUANTITIES = ("variance", "correlation", "grad_variance", "grad_correlation")
"""Quantities at every point of the stream."""

CENTRED_SITES = frozenset({"ffn.activation", "ffn.activation_dropout", "head.transform"})
"""Sites whose ensemble mean is not zero. At others it vanishes exactly, by the symmetry of the last
random matrix; subtracting an estimate would remove 1/(draws * d_model) of the variance of a stream
of identical tokens."""

OUTPUT_SITES = frozenset(
    ("final.norm", "final.dropout", "head.factor", "head.transform", "head.norm", "logits")
)
"""Sites behind the last layer N, in layer N + 1."""


@dataclass(frozen=True)
class RawMoments:
    """Moments about zero of the real tokens of a (batch, L, features) tensor: means of entries, of
    their squares, of x_i x_j over features and ordered pairs i != j of one sequence, and (L,) of
    squares by position, 0 where all sequences have padding."""

    mean: float
    square: float
    pair: float
    token_square: Array


class WeightGradient(NamedTuple):
    """A matrix: its layer (0 outside the layers), role and parameter name."""

    layer: int
    weight: str
    parameter: str


@dataclass(frozen=True)
class Draw:
    """Results of one forward and backward pass with one draw of the weights: raw moments of
    activations and of dLoss/dx by place, the squared Frobenius norm of every matrix's gradient,
    loss and logit variance with a head, and the draw of an encoder."""

    signal: Mapping[Place, RawMoments]
    gradient: Mapping[Place, RawMoments]
    weight_gradients: Mapping[WeightGradient, float] = field(default_factory=dict)
    loss: float | None = None
    logit_variance: float | None = None
    encoder: Draw | None = None


class Statistic(NamedTuple):
    """A quantity over draws: its value, its standard error and the values of single draws."""

    value: float
    stderr: float
    samples: Array

    def row(self, name: str) -> dict[str, float]:
        """The entries of a table's columns `name` and `name_stderr`."""
        return {name: self.value, f"{name}_stderr": self.stderr}


def common_places(draws: Sequence[Mapping[Place, Any]]) -> list[Place]:
    """The places of the draws, by layer; MomentsError if these differ."""
    if any(set(draw) != set(draws[0]) for draw in draws):
        raise MomentsError("the draws passed different sites: each must run the same network")
    return sorted(draws[0], key=lambda place: place[0])


def mean_over_draws(samples: Array) -> Statistic:
    """Arithmetic mean; the standard error is nan for one draw."""
    count = len(samples)
    stderr = float(np.std(samples, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return Statistic(float(np.mean(samples)), stderr, samples)


def typical_over_draws(samples: Array) -> Statistic:
    """Geometric mean, with its standard error by the delta method; 0 if a draw is 0."""
    if np.any(samples <= 0):
        return Statistic(0.0, 0.0 if len(samples) > 1 else math.nan, samples)
    logarithm = mean_over_draws(np.log(samples))
    value = math.exp(logarithm.value)
    return Statistic(value, value * logarithm.stderr, samples)


def ratio_over_draws(numerator: Array, denominator: Array) -> Statistic:
    """Ratio of the two means, with its jackknife standard error; 0/0 is 0."""

    def ratio(above: Array, below: Array) -> Array:
        return np.divide(above, below, out=np.zeros_like(above), where=below != 0)

    count = len(numerator)
    top, bottom = np.asarray(numerator.sum()), np.asarray(denominator.sum())
    stderr = math.nan
    if count > 1:
        left_out = ratio(top - numerator, bottom - denominator)
        stderr = float(np.sqrt((count - 1) * np.mean((left_out - left_out.mean()) ** 2)))
    return Statistic(float(ratio(top, bottom)), stderr, ratio(numerator, denominator))


def moments_over_draws(raw: Sequence[RawMoments], centred: bool) -> dict[str, Statistic]:
    """Mean, variance and correlation about the ensemble mean (0 unless `centred`).

    With the mean m over all draws, E (x - m)^2 = E x^2 - 2 m E x + m^2, and the same for a pair.
    """
    mean = mean_over_draws(np.array([r.mean for r in raw]))
    centre = mean.value if centred else 0.0
    shift = centre**2 - 2 * centre * mean.samples
    variance = np.array([r.square for r in raw]) + shift
    covariance = np.array([r.pair for r in raw]) + shift
    return {
        "mean": mean,
        "variance": mean_over_draws(variance),
        "correlation": ratio_over_draws(covariance, variance),
    }
