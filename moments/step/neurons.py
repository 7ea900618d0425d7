"""Hidden units as they are: averages over draws of one neuron's preactivations at all tokens.

Pair laws know two tokens at a time. Where the slope of an activation varies, the gradient behind it
is not Gaussian across tokens, on which the sign rule depends, and a coherent change meets one
neuron's slopes at all tokens at once. Both are averages over a T-dimensional Gaussian without
closed form, taken over draws with a fixed seed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy.linalg import eigh

from ..formulas.algebra import NUMPY
from ..formulas.law import ComponentLaws
from .change import Array, precision
from .rules import Drawn, spread

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
        inputs: (N, T) of each of the maps before it.
        kernels: theirs.
        values: (N, T) what a neuron gives.
        slopes: (N, T) of each of the maps, what a gradient is multiplied by there.
        gradient: E delta delta at the neurons' output.
    """

    inputs: tuple[Array, ...]
    kernels: tuple[Array, ...]
    values: Array
    slopes: tuple[Array, ...]
    gradient: Array
    laws: ComponentLaws

    @classmethod
    def of(cls, laws: ComponentLaws, kernels: tuple[Array, ...], gradient: Array) -> Neurons | None:
        """Of an activation, or of a gated unit where there are kernels of a gate and a factor.

        None: the function itself is not known, or it is linear.
        """
        if laws.entrywise is None or laws.name == "identity":
            return None
        function, derivative = laws.entrywise
        drawn = tuple(gaussian(kernel, place) for place, kernel in enumerate(kernels))
        with np.errstate(over="ignore"):
            value, slope = (
                np.asarray(one(_OF_DRAWS, drawn[0]), drawn[0].dtype)
                for one in (function, derivative)
            )
        if len(drawn) == 1:
            return cls(drawn, kernels, value, (slope,), gradient, laws)
        slopes = slope * drawn[1], value
        return cls(drawn, kernels, value * drawn[1], slopes, gradient, laws)

    def dropped(self, kept: float) -> Neurons:
        """Behind dropout."""
        mask = np.random.default_rng(12).random(self.values.shape) < kept
        return dataclasses.replace(self, values=self.values * mask / self.values.dtype.type(kept))

    @functools.cached_property
    def received(self) -> Array:
        """(N, T) draws of the gradient at the output."""
        return gaussian(self.gradient, 7)

    @functools.cached_property
    def _means(self) -> tuple[Array, ...]:
        return tuple(slope.mean(0) for slope in self.slopes)

    def sent(self, place: int, gradient: Array) -> Drawn:
        """The gradient at the map of that place, whose kernel there is given: twins have the mean
        slope's part of it in common."""
        mean = self._means[place]
        shared = np.outer(mean, mean) * self.gradient
        return _twinned(self.slopes[place] * self.received, mean * self.received, shared, gradient)

    def given(self, kernel: Array) -> Drawn:
        """What the neurons give, of that kernel: twins have its linear part in common."""
        linear, shared = np.zeros_like(self.values), np.zeros_like(kernel)
        for mean, entered, own in zip(self._means, self.inputs, self.kernels, strict=True):
            linear += mean * entered
            shared += np.outer(mean, mean) * own
        return _twinned(self.values, linear, shared, kernel)

    @functools.cached_property
    def _modes(self) -> Array:
        """(modes, T) of the gradient over its trace."""
        count, kind = len(self.gradient), precision(len(self.gradient))
        share = (self.gradient / (float(np.trace(self.gradient)) or 1.0)).astype(kind)
        span = [max(0, count - _MODES), count - 1]
        weights, vectors = eigh((share + share.T) / 2, subset_by_index=span)
        weights = np.clip(weights, 0.0, None)
        left = 1.0 - weights.sum() + np.cumsum(weights) > _SHARE
        return np.asarray((vectors[:, left] * np.sqrt(weights[left])).T)

    def beyond_pairs(self, coherent: tuple[Array, ...]) -> Array:
        """What a coherent change P of the maps before has of its kernel behind the unit beyond
        its pairs: E (f_t P_tr f_r)(f_s P_sq f_q) D_rq less the same with slopes averaged in pairs
        (t, s), (r, q), where the change is carried as a kernel, or (t, r), (s, q) across maps.
        """
        step, modes = max(1, len(self.values) // _FOLLOWED), self._modes
        slopes = [slope[::step] for slope in self.slopes]
        count, size = len(slopes[0]), max(float(np.abs(part).max()) for part in coherent) or 1.0
        parts = [(part / size).astype(modes.dtype) for part in coherent]
        moved = sum(
            slope * ((slope * modes[:, None]) @ part.T)
            for slope, part in zip(slopes, parts, strict=True)
        )
        flat = np.asarray(moved).reshape(-1, len(self.gradient))
        found, kernel = flat.T @ flat / count, modes.T @ modes
        means = [slope.T @ slope / count for slope in slopes]
        for mean, part in zip(means, parts, strict=True):
            found -= mean * (part @ (mean * kernel) @ part.T)
        if len(means) == 2:
            sides = [mean * part for mean, part in zip(means, parts, strict=True)]
            cross = sides[0] @ kernel @ sides[1].T
            found -= cross + cross.T
        return np.asarray(found + found.T, float) * (float(np.trace(self.gradient)) * size**2 / 2)


def _root(x: Any) -> Any:
    return math.sqrt(x) if isinstance(x, float) else np.sqrt(x)


_OF_DRAWS = SimpleNamespace(**vars(NUMPY) | {"sqrt": _root})
"""NUMPY whose constants leave draws as precise as they are."""


def _twinned(values: Array, linear: Array, shared: Array, kernel: Array) -> Drawn:
    """Draws of a kernel, with Gaussian ones that have a linear part of kernel `shared` in common:
    the rest of the kernel, positive as that of higher orders in Hermite's polynomials, is drawn."""
    own = drawn_by(kernel - shared, len(values), 11)
    share = float(np.trace(shared) / np.trace(kernel))
    return Drawn(values, linear + own, min(max(share, 0.0), 1.0))


@functools.lru_cache(maxsize=8)
def _normal(count: int, tokens: int, place: int, kind: Any) -> Array:
    # independent draws of gate, factor and gradient are paired in an order of their own
    drawn = np.random.default_rng(place).standard_normal((count // 2, tokens))
    order = np.random.default_rng(100 + place).permutation(count)
    return np.concatenate([drawn, -drawn])[order].astype(kind)


def gaussian(kernel: Array, place: int) -> Array:
    """(N, T) draws of a kernel, those of one `place` the same every time."""
    count = int(np.clip(_ENTRIES // len(kernel), 512, _MOST)) // 2 * 2
    return drawn_by(kernel, count, place)


def drawn_by(kernel: Array, count: int, place: int) -> Array:
    """`gaussian`, that many."""
    tokens = len(kernel)
    kind = precision(tokens)
    return np.asarray(_normal(count, tokens, place, kind) @ spread(kernel).astype(kind))
