"""Tensor Chebyshev interpolation in the coordinates of a softmax row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .laplace import Array

THETA_MAX = 8.0
"""Largest logit variance in the tables."""

THETA_FAR, RHO_FAR = 32.0, -0.3
"""Largest logit variance, and least correlation of two rows, in the tables beyond `THETA_MAX`."""

LENGTH_MAX = 1e8
"""Largest number of keys in the tables."""

LOG_LENGTH_MAX = math.log(LENGTH_MAX)

_RECURRENCE_FROM = 64
"""Number of points from which the three-term recurrence is faster than cosines."""


def gauss_nodes(count: int) -> Array:
    """Roots of the Chebyshev polynomial of degree `count`: none at an end, where ratios are 0/0."""
    return np.cos(np.pi * (np.arange(count) + 0.5) / count)


def chebyshev_coefficients(values: Array, axes: Sequence[int]) -> Array:
    """Coefficients of the interpolant through `values` at the gauss_nodes of each of `axes`."""
    for axis in axes:
        count = values.shape[axis]
        transform = np.cos(np.outer(np.arange(count), np.arccos(gauss_nodes(count))))
        transform *= 2.0 / count
        transform[0] *= 0.5
        values = np.moveaxis(np.tensordot(transform, values, (1, axis)), 0, axis)
    return values


def chebyshev_basis(x: Array, count: int) -> Array:
    """(count, points): the first `count` Chebyshev polynomials at x (points,) in [-1, 1]."""
    if x.size < _RECURRENCE_FROM:
        return np.asarray(np.cos(np.arange(count)[:, None] * np.arccos(x)))
    basis = np.empty((count, x.size))
    basis[0], basis[1] = 1.0, x
    twice = 2.0 * x
    for degree in range(2, count):
        np.multiply(twice, basis[degree - 1], out=basis[degree])
        basis[degree] -= basis[degree - 2]
    return basis


def theta_coordinate(theta: Array) -> Array:
    """[0, THETA_MAX] to [-1, 1], linear in the standard deviation."""
    return np.asarray(np.sqrt(theta * (4.0 / THETA_MAX)) - 1.0)


def theta_at(coordinate: float) -> float:
    """Inverse of `theta_coordinate`."""
    return THETA_MAX * (0.5 * (1.0 + coordinate)) ** 2


_NEAR, _FAR = math.sqrt(THETA_MAX), math.sqrt(THETA_FAR)


def far_coordinate(theta: Array) -> Array:
    """[THETA_MAX, THETA_FAR] to [-1, 1], linear in the standard deviation."""
    return np.asarray((np.sqrt(theta) - _NEAR) * (2.0 / (_FAR - _NEAR)) - 1.0)


def far_theta_at(coordinate: float) -> float:
    """Inverse of `far_coordinate`."""
    return (_NEAR + (_FAR - _NEAR) * 0.5 * (1.0 + coordinate)) ** 2


def far_rho_coordinate(rho: Array) -> Array:
    """[RHO_FAR, 1] to [-1, 1]."""
    return np.asarray((rho - RHO_FAR) * (2.0 / (1.0 - RHO_FAR)) - 1.0)


def far_rho_at(coordinate: float) -> float:
    """Inverse of `far_rho_coordinate`."""
    return RHO_FAR + (1.0 - RHO_FAR) * 0.5 * (1.0 + coordinate)


def length_coordinate(n: Array) -> Array:
    """[1, 1e8] to [-1, 1], linear in log n."""
    return np.asarray(np.log(n) * (2.0 / LOG_LENGTH_MAX) - 1.0)


def length_at(coordinate: float) -> float:
    """Inverse of `length_coordinate`."""
    return math.exp(0.5 * LOG_LENGTH_MAX * (1.0 + coordinate))
