"""Averages over draws of one neuron's preactivations at all tokens.

Pair laws have the moments of two tokens at a time. Where the slope of an activation varies, the
gradient at its input is not Gaussian across tokens, which matters to the sign rule, and a coherent
change is multiplied by one neuron's slopes at all tokens. Both are averages over a T-dimensional
Gaussian without closed form, taken over draws with a fixed seed.
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

_MOST_DRAWS, _ENTRIES = 4096, 2**17
"""Largest number of draws, and entries of the matrix of draws, of at least 512."""

_MODES, _SHARE = 16, 0.01
"""Largest number of eigenvectors of a gradient kernel that are kept, and share of its trace that
the others may have."""

_SLOPE_DRAWS = 128
"""Draws of slopes over which the term of each eigenvector is averaged."""


@dataclass(frozen=True, eq=False)
class Neurons:
    """Draws of a hidden layer: an activation of one map, or a gated unit of two.

    Attributes:
        inputs: (N, T) draws of each map.
        kernels: (T, T) of each map.
        values: (N, T) draws of the output.
        slopes: (N, T) derivatives of the output by each map.
        gradient: E delta delta at the output.
        laws: of the activation.
    """

    inputs: tuple[Array, ...]
    kernels: tuple[Array, ...]
    values: Array
    slopes: tuple[Array, ...]
    gradient: Array
    laws: ComponentLaws

    @classmethod
    def of(cls, laws: ComponentLaws, kernels: tuple[Array, ...], gradient: Array) -> Neurons | None:
        """Draw an activation, or a gated unit if `kernels` are those of a gate and a factor.

        None if the activation has no known function, or is linear.
        """
        if laws.entrywise is None or laws.name == "identity":
            return None
        function, derivative = laws.entrywise
        drawn = tuple(gaussian(kernel, seed) for seed, kernel in enumerate(kernels))
        with np.errstate(over="ignore"):
            value, slope = (
                np.asarray(law(_SINGLE_NUMPY, drawn[0]), drawn[0].dtype)
                for law in (function, derivative)
            )
        if len(drawn) == 1:
            return cls(drawn, kernels, value, (slope,), gradient, laws)
        slopes = slope * drawn[1], value
        return cls(drawn, kernels, value * drawn[1], slopes, gradient, laws)

    def dropped(self, keep: float) -> Neurons:
        """The hidden layer behind dropout with that share kept."""
        mask = np.random.default_rng(12).random(self.values.shape) < keep
        return dataclasses.replace(self, values=self.values * mask / self.values.dtype.type(keep))

    @functools.cached_property
    def cotangents(self) -> Array:
        """(N, T) draws of the gradient at the output."""
        return gaussian(self.gradient, 7)

    @functools.cached_property
    def _mean_slopes(self) -> tuple[Array, ...]:
        return tuple(slope.mean(0) for slope in self.slopes)

    def input_gradients(self, index: int, kernel: Array) -> Drawn:
        """Draws of the gradient at the map of that index, of that (T, T) kernel. Their Gaussian
        control variates share the part that is multiplied by the mean slope."""
        mean, delta = self._mean_slopes[index], self.cotangents
        shared = np.outer(mean, mean) * self.gradient
        return _with_control(self.slopes[index] * delta, mean * delta, shared, kernel)

    def outputs(self, kernel: Array) -> Drawn:
        """Draws of the output, of that (T, T) kernel. Their Gaussian control variates share the
        part that is linear in the maps."""
        linear, shared = np.zeros_like(self.values), np.zeros_like(kernel)
        for mean, x, x_kernel in zip(self._mean_slopes, self.inputs, self.kernels, strict=True):
            linear += mean * x
            shared += np.outer(mean, mean) * x_kernel
        return _with_control(self.values, linear, shared, kernel)

    @functools.cached_property
    def _modes(self) -> Array:
        """(modes, T) largest eigenvectors of the gradient's kernel over its trace, times the roots
        of their eigenvalues."""
        count, dtype = len(self.gradient), precision(len(self.gradient))
        kernel = (self.gradient / (float(np.trace(self.gradient)) or 1.0)).astype(dtype)
        largest = [max(0, count - _MODES), count - 1]
        values, vectors = eigh((kernel + kernel.T) / 2, subset_by_index=largest)
        values = np.clip(values, 0.0, None)
        needed = 1.0 - values.sum() + np.cumsum(values) > _SHARE
        return np.asarray((vectors[:, needed] * np.sqrt(values[needed])).T)

    def beyond_pairs(self, coherent: tuple[Array, ...]) -> Array:
        """The part of U behind the unit that pair laws miss, from the coherent changes P of its
        maps: E (f_t P_tr f_r)(f_s P_sq f_q) D_rq less the same with slopes averaged in pairs
        (t, s), (r, q), as kernels are propagated, or (t, r), (s, q) across maps.
        """
        step, modes = max(1, len(self.values) // _SLOPE_DRAWS), self._modes
        slopes = [slope[::step] for slope in self.slopes]
        count, size = len(slopes[0]), max(float(np.abs(part).max()) for part in coherent) or 1.0
        parts = [(part / size).astype(modes.dtype) for part in coherent]
        changes = sum(
            slope * ((slope * modes[:, None]) @ part.T)
            for slope, part in zip(slopes, parts, strict=True)
        )
        flat = np.asarray(changes).reshape(-1, len(self.gradient))
        result, kernel = flat.T @ flat / count, modes.T @ modes
        means = [slope.T @ slope / count for slope in slopes]
        for mean, part in zip(means, parts, strict=True):
            result -= mean * (part @ (mean * kernel) @ part.T)
        if len(means) == 2:
            of_gate, of_factor = (mean * part for mean, part in zip(means, parts, strict=True))
            cross = of_gate @ kernel @ of_factor.T
            result -= cross + cross.T
        return np.asarray(result + result.T, float) * (float(np.trace(self.gradient)) * size**2 / 2)


def _root(x: Any) -> Any:
    return math.sqrt(x) if isinstance(x, float) else np.sqrt(x)


_SINGLE_NUMPY = SimpleNamespace(**vars(NUMPY) | {"sqrt": _root})
"""NUMPY whose constants do not raise the precision of single-precision draws."""


def _with_control(values: Array, linear: Array, shared: Array, kernel: Array) -> Drawn:
    """Draws of a kernel with Gaussian control variates of the same kernel, `linear` of kernel
    `shared` plus independent draws of the rest, which is positive as a sum of higher orders in
    Hermite polynomials."""
    rest = drawn_by(kernel - shared, len(values), 11)
    share = float(np.trace(shared) / np.trace(kernel))
    return Drawn(values, linear + rest, min(max(share, 0.0), 1.0))


@functools.lru_cache(maxsize=8)
def _normal(count: int, tokens: int, seed: int, dtype: Any) -> Array:
    # antithetic; shuffled, so that independent draws of gate, factor and gradient are not paired
    half = np.random.default_rng(seed).standard_normal((count // 2, tokens))
    order = np.random.default_rng(100 + seed).permutation(count)
    return np.concatenate([half, -half])[order].astype(dtype)


def gaussian(kernel: Array, seed: int) -> Array:
    """(N, T) Gaussian draws of a kernel."""
    count = int(np.clip(_ENTRIES // len(kernel), 512, _MOST_DRAWS)) // 2 * 2
    return drawn_by(kernel, count, seed)


def drawn_by(kernel: Array, count: int, seed: int) -> Array:
    """(count, T) Gaussian draws of a kernel."""
    dtype = precision(len(kernel))
    return np.asarray(_normal(count, len(kernel), seed, dtype) @ spread(kernel).astype(dtype))
