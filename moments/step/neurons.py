"""Hidden units as they are: averages over draws of one neuron's preactivations at all tokens.

Pair laws know two tokens at a time. Where the slope of an activation varies, the gradient behind it
is not Gaussian across tokens, which the sign rule sees, and a coherent change meets one neuron's
slopes at all tokens at once. Both are averages over a T-dimensional Gaussian without closed form;
they are taken over draws with a fixed seed, in ratios whose noise is small (E rho/sqrt(E rho^2)
over 2000 draws: 0.3 %).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from ..formulas.algebra import NUMPY
from ..formulas.law import ComponentLaws
from .change import Array

_MOST, _ENTRIES = 4096, 2**17
"""Draws: as many as fill a matrix of that size, within [512, 4096]."""

_MODES, _SHARE = 16, 0.01
"""Modes of a gradient kernel that are followed: so many at most, or all but that share of it."""

_FOLLOWED = 128
"""Draws of slopes that each mode is averaged over."""


@dataclass(frozen=True, eq=False)
class Neurons:
    """Draws of a hidden layer.

    Attributes:
        values: (N, T) what a neuron gives.
        slopes: (N, T) of each of the maps before it, what a gradient is multiplied by there.
        gradient: E delta delta at the neurons' output.
    """

    values: Array
    slopes: tuple[Array, ...]
    gradient: Array

    @classmethod
    def of(cls, laws: ComponentLaws, kernels: tuple[Array, ...], gradient: Array) -> Neurons | None:
        """Of an activation, or of a gated unit where there are kernels of a gate and a factor.

        None: the function itself is not known, or it is linear.
        """
        if laws.entrywise is None or laws.name == "identity":
            return None
        function, derivative = laws.entrywise
        drawn = [gaussian(kernel, place) for place, kernel in enumerate(kernels)]
        with np.errstate(over="ignore"):
            value = np.asarray(function(NUMPY, drawn[0]), float)
            slope = np.asarray(derivative(NUMPY, drawn[0]), float)
        if len(drawn) == 1:
            return cls(value, (slope,), gradient)
        return cls(value * drawn[1], (slope * drawn[1], value), gradient)

    @functools.cached_property
    def received(self) -> Array:
        """(N, T) draws of the gradient at the output."""
        weights, vectors = self._spectrum
        return drawn_by((vectors * np.sqrt(weights)) @ vectors.T, 7)

    @functools.cached_property
    def _spectrum(self) -> tuple[Array, Array]:
        weights, vectors = np.linalg.eigh((self.gradient + self.gradient.T) / 2)
        return np.clip(weights, 0.0, None), vectors

    def sent(self, place: int) -> Array:
        """(N, T) draws of the gradient at the map of that place."""
        return self.slopes[place] * self.received

    @functools.cached_property
    def _modes(self) -> Array:
        weights, vectors = self._spectrum
        left = np.cumsum(weights) > _SHARE * weights.sum()
        left[:-_MODES] = False
        return np.asarray(vectors[:, left] * np.sqrt(weights[left]))

    def beyond_pairs(self, coherent: tuple[Array, ...]) -> Array:
        """What a coherent change P of the maps before has of its kernel behind the unit beyond
        its pairs: E (f_t P_tr f_r)(f_s P_sq f_q) D_rq less the same with slopes averaged in pairs
        (t, s), (r, q), where the change is carried as a kernel, or (t, r), (s, q) across maps.
        """
        step = max(1, len(self.values) // _FOLLOWED)
        slopes = [slope[::step] for slope in self.slopes]
        count, modes = len(slopes[0]), self._modes
        found = np.zeros_like(self.gradient)
        for mode in modes.T:
            moved = sum(
                slope * ((slope * mode) @ part.T)
                for slope, part in zip(slopes, coherent, strict=True)
            )
            found += np.asarray(moved).T @ moved / count
        kernel = modes @ modes.T
        means = [slope.T @ slope / count for slope in slopes]
        for mean, part in zip(means, coherent, strict=True):
            found -= mean * (part @ (mean * kernel) @ part.T)
        if len(means) == 2:
            sides = [mean * part for mean, part in zip(means, coherent, strict=True)]
            cross = sides[0] @ kernel @ sides[1].T
            found -= cross + cross.T
        return (found + found.T) / 2


@functools.lru_cache(maxsize=8)
def _normal(count: int, tokens: int, place: int) -> Array:
    drawn = np.random.default_rng(place).standard_normal((count // 2, tokens))
    return np.concatenate([drawn, -drawn])


def gaussian(kernel: Array, place: int) -> Array:
    """(N, T) draws of a kernel, those of one `place` the same every time."""
    weights, vectors = np.linalg.eigh((kernel + kernel.T) / 2)
    return drawn_by((vectors * np.sqrt(np.clip(weights, 0.0, None))) @ vectors.T, place)


def drawn_by(root: Array, place: int) -> Array:
    """`gaussian`, of a kernel's root."""
    tokens = len(root)
    count = int(np.clip(_ENTRIES // tokens, 512, _MOST)) // 2 * 2
    # independent draws of gate, factor and gradient are paired in an order of their own
    order = np.random.default_rng(100 + place).permutation(count)
    return np.asarray((_normal(count, tokens, place) @ root)[order])
