"""Exact statistics of exchangeable softmax rows, as the calibration of arbitrary rows needs them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray

Array = NDArray[np.float64]
THETA_MAX = 8.0
LOG_KEYS_MAX = float(np.log(1e8))


class Row(NamedTuple):
    sum_square: Array
    sum_cube: Array
    sum_fourth: Array
    jacobian_square: Array
    weighted_logit_square: Array
    entropy: Array


class Pair(NamedTuple):
    overlap: Array
    jacobian_overlap: Array
    radial_overlap: Array
    overlap_slope: Array


@functools.cache
def _coefficients() -> Array:
    return np.load(Path(__file__).with_name("_table.npz"))["c"].sum(-1)


def _equal(theta: Array, n: Array, rho: Array) -> tuple[Array, Array]:
    c = _coefficients()
    q = c.shape[1:]
    theta, n, rho = np.broadcast_arrays(theta, n, rho)
    a = chebyshev.chebvander(2 * np.sqrt(np.clip(theta, 0, THETA_MAX) / THETA_MAX) - 1, q[0] - 1)
    b = chebyshev.chebvander(2 * np.clip(np.log(n), 0, LOG_KEYS_MAX) / LOG_KEYS_MAX - 1, q[1] - 1)
    r = chebyshev.chebvander(rho, q[2] - 1)
    ab = (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:-1], -1)
    f = [((ab @ c[x].reshape(ab.shape[-1], -1)) * r).sum(-1) for x in range(2)]
    one = n <= 1
    kc = np.where(one, 1.0, np.exp(rho * theta * f[0]))
    return kc, np.where(one, 0.0, kc * f[1])


def pair(theta: Array, n: Array, rho: Array) -> Pair:
    """Two rows of n keys."""
    theta, n, rho = np.broadcast_arrays(theta, n, rho)
    theta = np.clip(theta, 1e-6, THETA_MAX)
    c, t = _equal(theta, n, rho)
    h = 0.05
    up = _equal(theta * np.exp(h), n, rho)[0]
    down = _equal(theta * np.exp(-h), n, rho)[0]
    return Pair(c / n, t / n, (1 + rho * theta) * t / n, (up - down) / (2 * h) / n)


def row(theta: Array, n: Array) -> Row:
    theta = np.clip(theta, 1e-6, THETA_MAX)
    theta, n = np.broadcast_arrays(np.asarray(theta, float), np.asarray(n, float))
    c, t, _, slope = pair(theta, n, np.ones_like(theta))
    p3 = c - (3 * t - slope / theta) / 2
    p3 = np.clip(p3, c * c, c)
    x, w = np.polynomial.legendre.leggauss(8)
    x, w = (x + 1) / 2, w / 2
    p = _equal(theta[..., None] * x, n[..., None], np.ones(()))[0] / n[..., None]
    log_z = np.log(n) + 0.5 * theta * ((1 - p) * w).sum(-1)
    return Row(c, p3, p3 * p3 / c, t, c * (1 + 4 * theta), log_z - theta * (1 - c))
