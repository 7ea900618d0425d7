"""Softmax attention on an arbitrary token kernel, at initialisation.

See docs/theory/attention.md.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ....errors import domain_error
from ..softmax.table import THETA_MAX
from .closure import OverlapClosure, width_terms
from .finite_rows import Widths
from .logits import Logits, Rotation, prior_weights
from .row_statistics import AttentionRows, dropped_by_own, saturation

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


FAINT = 1e-5
"""Logit variance, and share of the largest query's variance, that stand for less: attention is
linear in them to five digits there, and what is linear is scaled on."""


Moments = TypeVar("Moments")


class Paths(NamedTuple, Generic[Moments]):
    """Per-feature second moments of the gradient at the attention's input, by path: arrays (L, L),
    kernels, or matrices on classes.

    Attributes:
        cross: correlation of the value and key paths, of order 1/d_model.
    """

    value: Moments
    query: Moments
    key: Moments
    cross: Moments

    @property
    def total(self) -> Any:
        """Their sum, where the tokens that ask are those attended to."""
        parts: Any = self
        return parts.value + parts.query + parts.key + parts.cross


class KernelAttention:
    """Moments of one softmax attention layer with Gaussian weights, on a given token kernel.

    Logits of query i and key j have covariance tau C_ii' C_jj' over draws of the query and key
    weights. The layer is the joint law of its attention rows (`closure.OverlapClosure`), for any
    kernel and any mask; for exchangeable kernels (one correlation between all tokens) that law is
    exact, otherwise an approximation; docs/theory/attention.md has its measured errors.

    Attributes:
        logits: what the logits look like.
        mean_attention: (Lq, Lk) E a_ij; rows sum to 1.
        logit_variance: (Lq,) variance of a row's logits around their common part, theta.
        effective_keys: (Lq,) number of independent keys of the row's reference (`row_statistics`).
        entropy: (Lq,) E[-sum_j a_ij log a_ij] in nats, of the reference row spread over the allowed
            keys: exact for exchangeable kernels.
        beyond_tables: (Lq,) whether theta is beyond 8, where rows are those of `softmax.peaked`.
    """

    def __init__(
        self,
        kernel: ArrayLike,
        *,
        logit_scale: float,
        allowed: ArrayLike | None = None,
        drop_prob: float = 0.0,
        d_model: float = math.inf,
        d_head: float = math.inf,
        norm_spread: float = 0.0,
        query_kernel: ArrayLike | None = None,
        key_kernel: ArrayLike | None = None,
        rotation: Rotation | None = None,
        bias: ArrayLike | None = None,
        value_bias: float = 0.0,
    ) -> None:
        """Build the layer's joint law; O(L^3).

        Args:
            kernel: (Lk, Lk) second moments per feature E[x_i x_j] of the tokens attended to.
            logit_scale: tau = d_model^2 times the query and key weight variances.
            allowed: (Lq, Lk) mask, True where query i may see key j; None: everywhere.
            drop_prob: dropout on the attention weights.
            d_model, d_head: widths, for the corrections of their inverse order.
            norm_spread: Var|x|^2 / E^2|x|^2 of a token: 0 after a normalisation, 2/d_model for
                Gaussian features.
            query_kernel, key_kernel: (Lq, Lq) and (Lk, Lk) second moments of queries and of keys on
                the scale of `kernel`, where they differ from it: logits of query i and key j have
                covariance tau query_ii' key_jj'.
            bias: (Lq, Lk) what is added to the logits.
            value_bias: variance of the values' bias over the gain of their weights. Rows of
                attention sum to 1, so that only dropped attention can tell; it is not in
                `forward`, which without dropout it would raise by itself everywhere.

        Raises:
            DomainError: a kernel that is no square matrix, or what is not finite.
        """
        self.kernel = square("kernel", kernel)
        keys = self.kernel if key_kernel is None else square("key_kernel", key_kernel)
        queries = keys if query_kernel is None else square("query_kernel", query_kernel)
        if not 0.0 <= logit_scale < math.inf:
            raise domain_error("logit_scale", logit_scale, "finite and at least 0")
        if allowed is None:
            allowed = np.ones((len(queries), len(keys)), bool)
        self.allowed = np.asarray(allowed, bool)
        offset = None if bias is None else np.asarray(bias, dtype=np.float64)
        self.drop_prob = float(drop_prob)
        # Queries and keys without any size still receive gradients: the limit of small ones.
        of_queries = np.diag(queries)
        largest = float(of_queries.max()) or 1.0
        small = np.maximum(FAINT * largest - of_queries, 0.0)
        least = FAINT / (largest * (float(np.diag(keys).max()) or 1.0))
        self._linear = min(1.0, float(logit_scale) / least)
        self.logits = Logits(
            queries + np.diag(small) if np.any(small) else queries,
            keys,
            self.kernel,
            prior_weights(self.allowed, offset),
            max(float(logit_scale), least),
            offset is not None,
            rotation,
        )
        self._dropped = self.drop_prob / (1.0 - self.drop_prob)
        self._values = np.diag(self.kernel) + float(value_bias)
        self._widths = Widths(float(d_model), float(d_head), float(norm_spread))
        self._closure = OverlapClosure(self.logits, self._widths)
        if self._dropped > 0.0:
            self._closure.respond_to(self._values)
        temperature = self.logits.temperature
        self._norm = np.sqrt(np.outer(temperature, temperature))
        rows, pattern = self._closure.rows, self._closure.pattern
        self.mean_attention = self._closure.weights
        self.logit_variance = rows.unshared[pattern] * self.logit_scale * of_queries
        self.effective_keys = rows.keys[pattern]
        self.entropy = rows.entropy[pattern]
        self.beyond_tables = self.logit_variance > THETA_MAX

    @property
    def logit_scale(self) -> float:
        """tau."""
        return self.logits.scale * self._linear

    @property
    def sum_square(self) -> Array:
        """(Lq,) E sum_j a_ij^2, without dropout."""
        return np.asarray(self._closure.squares.sum(1))

    @functools.cached_property
    def _forward(self) -> tuple[Array, Array, Array]:
        """O, with the dropout of attention weights on its diagonal, and of `logits` the query path
        per unit of G, likewise, and `overlap_path`."""
        mean = self.mean_attention @ self.kernel @ self.mean_attention.T
        closure, variance = self._closure, np.diag(self.kernel)
        excess, slope = closure.gather(self.kernel)
        linear = self._linear
        gained, overlap_path = width_terms(closure, self._widths, mean, excess, slope)
        output = mean + linear * (excess + gained)
        query = closure.pairs.query * slope / self._norm + overlap_path / self._widths.d_model
        group = closure.group[closure.pattern]
        common = closure.calibration.common[group] * np.diag(slope) / self.logits.temperature
        query = query + np.diag(common)
        if self._dropped > 0.0:
            noise = closure.gather_noise(self.logits.within)
            output = output + self._dropped * np.diag(closure.squares @ variance)
            query = query + self._dropped * self.logits.scale * np.diag(noise)
        return output, query, overlap_path

    @property
    def amplification(self) -> Array:
        """(Lq, Lq) `amplification` of every two rows."""
        every = np.arange(len(self.allowed))
        rows, pattern = self._closure.rows, self._closure.pattern
        correlation = self.logits.correlation()
        result = amplification(rows, pattern[:, None], pattern[None, :], correlation)
        result[every, every] *= 1.0 + dropped_by_own(self._dropped, rows.unshared_fraction[pattern])
        return result

    @property
    def overlap_path(self) -> Array:
        """(Lq, Lq) what Q gains per unit of G, and of the relative variance of two tokens' overlap:
        1/d_model of it is in `backward` (see `moments.noise.overlap`)."""
        return self._linear * self._forward[2]

    @property
    def response(self) -> Array:
        """(Lq, Lq) what the query path is per unit of G."""
        return self._linear * self._forward[1]

    def forward(self) -> Array:
        """(Lq, Lq) second moments per feature of sum_j a_ij x_j, attention dropout included."""
        return self._forward[0].copy()

    def backward(self, gradient: ArrayLike) -> Paths[Array]:
        """Second moments per feature of the gradient at the attention's input.

        The query weights' gradient follows from the query path: with the value gain in `gradient`,
        E|dW_q|^2 = d_model sum(C o query) / Var(W_q); the key weights' alike from `key`.

        Args:
            gradient: (Lq, Lq) second moments per feature of the gradient at sum_j a_ij x_j, that is
                behind the value weights: their gain times the gradient's kernel at the heads.

        Raises:
            DomainError: `gradient` is not a finite (Lq, Lq) matrix.
        """
        gradient = square("gradient", gradient, len(self.allowed))
        value, key, cross = self._linear * self._closure.spread(gradient)
        value = value + self.mean_attention.T @ gradient @ self.mean_attention
        if self._dropped > 0.0:
            grad_out = np.diag(gradient)
            value = value + self._dropped * np.diag(self._closure.squares.T @ grad_out)
            sizes = self._dropped * self.logit_scale * grad_out * self.logits.temperature
            noise, noise_cross = self._closure.spread_noise(sizes)
            if self.logits.rotation is not None:
                noise, noise_cross = noise * self.logits.rotation.keys, noise_cross
            key, cross = key + noise, cross + noise_cross
        query = gradient * self.response
        # an antisymmetric rounding error would be amplified through a deep network
        value, key, cross = (0.5 * (path + path.T) for path in (value, key, cross))
        return Paths(value, query, key, cross)


def amplification(
    rows: AttentionRows, first: Indices, second: Indices, correlation: Array
) -> Array:
    """How much more two rows move together than rows of their mean weights would: as those of
    exchangeable keys whose log odds grow in proportion to the correlation of their queries.

    Args:
        first, second: which of them, of every pair.
        correlation: of every pair's queries.
    """
    keys = np.maximum(rows.keys, 1.0 + 1e-6)
    theta = np.maximum(rows.theta, FAINT)
    odds = np.where(rows.keys > 1.0 + 1e-6, rows.odds * theta, theta)
    slopes = [
        saturation(correlation, *(one[side] + 0.0 * correlation for one in (keys, theta, odds)))[1]
        for side in (first, second)
    ]
    held = np.sqrt(rows.held)
    return np.asarray(held[first] * held[second] * 0.5 * (slopes[0] + slopes[1]))


def square(name: str, kernel: ArrayLike, length: int | None = None) -> Array:
    """The symmetric part of a finite square matrix, of the given length where there is one."""
    array = np.asarray(kernel, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not len(array):
        raise domain_error(name, kernel, "a square matrix", f"its shape is {array.shape}")
    if length is not None and len(array) != length:
        raise domain_error(name, array, f"of shape ({length}, {length})")
    if not np.all(np.isfinite(array)):
        raise domain_error(name, kernel, "finite everywhere")
    return np.asarray(0.5 * (array + array.T))
