"""Softmax self-attention on an arbitrary token kernel, at initialisation."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moments.errors import domain_error
from moments.kernels.closure import OverlapClosure
from moments.softmax.chebyshev import THETA_MAX

Array = NDArray[np.float64]


class AttentionGradient(NamedTuple):
    """Per-feature second moments of the gradient at the attention's input, by path; (L, L) each.

    Attributes:
        value: through the values.
        query: through the queries.
        key: through the keys.
        cross: correlation of the value and key paths, of order 1/d_model.
        total: their sum, symmetric.
    """

    value: Array
    query: Array
    key: Array
    cross: Array
    total: Array


class KernelAttention:
    """Moments of softmax attention on a given token kernel."""

    def __init__(
        self,
        kernel: ArrayLike,
        *,
        logit_scale: float,
        allowed: ArrayLike | None = None,
        drop_prob: float = 0.0,
        d_model: float = math.inf,
        d_head: float = math.inf,
    ) -> None:
        self.kernel = _square("kernel", kernel)
        length = len(self.kernel)
        temperature = np.diag(self.kernel).copy()
        if np.any(temperature <= 0.0):
            raise domain_error("kernel", float(temperature.min()), "positive on its diagonal")
        if not 0.0 <= logit_scale < math.inf:
            raise domain_error("logit_scale", logit_scale, "finite and at least 0")
        if not 0.0 <= drop_prob < 1.0:
            raise domain_error("drop_prob", drop_prob, "a probability in [0, 1)")
        for name, width in (("d_model", d_model), ("d_head", d_head)):
            if not width >= 1.0:
                raise domain_error(name, width, "a width of at least 1")
        mask = np.ones((length, length), bool) if allowed is None else np.asarray(allowed, bool)
        if mask.shape != self.kernel.shape or not mask.any(1).all():
            raise domain_error("allowed", mask.shape, f"({length}, {length}) with a key per row")
        self.allowed = mask
        self.logit_scale, self.drop_prob = float(logit_scale), float(drop_prob)
        self.d_model, self.d_head = float(d_model), float(d_head)
        self._dropped = 1.0 / (1.0 - self.drop_prob) - 1.0
        self._closure = OverlapClosure(
            self.kernel, mask, self.logit_scale, self.d_model, self.d_head
        )
        rows = self._closure.rows
        self.mean_attention = self._closure.weights
        pattern = self._closure.pattern
        norm = temperature / rows.temperature[pattern]
        self.logit_variance = rows.logit_variance[pattern] * norm
        self.effective_keys = rows.keys[pattern]
        self.entropy = rows.entropy[pattern]
        self.beyond_tables = self.logit_variance > THETA_MAX
        self._norm = np.sqrt(np.outer(temperature, temperature))

    @functools.cached_property
    def _forward(self) -> tuple[Array, Array]:
        """O and Q/G, with the dropout of the attention weights on their diagonals."""
        mean = self.mean_attention @ self.kernel @ self.mean_attention.T
        excess, _, query = self._closure.gather(self.kernel)
        output, query = mean + excess, query / self._norm
        own = np.diag(self.kernel)
        if self.d_model < math.inf:
            # the tokens' overlaps are both in the logits and in the values: tr(E J C) each
            shift = self.mean_attention @ own - np.diag(output)
            tilt = self.logit_scale / self.d_model * np.outer(shift, shift)
            output, query = output + tilt * self.kernel, query + tilt
        if self._dropped > 0.0:
            dropped = self._closure.squares @ own + self._closure.squared_tilt / self.d_model
            _, _, noise = self._closure.noise_gather(self.kernel)
            output = output + self._dropped * np.diag(dropped)
            query = query + self._dropped * self.logit_scale * np.diag(noise)
        return output, query

    def forward(self) -> Array:
        """(L, L) second moments per feature of sum_j a_ij x_j, attention dropout included."""
        return self._forward[0].copy()

    def backward(self, gradient: ArrayLike) -> AttentionGradient:
        """Second moments per feature of the gradient at the attention's input.

        Args:
            gradient: (L, L) second moments of the gradient at the attention-weighted values,
                already multiplied by the gain of the value matrix.

        Raises:
            DomainError: `gradient` is not a finite (L, L) matrix.
        """
        gradient = self._check_shape("gradient", gradient)
        value, key = self._closure.spread(gradient)
        value = value + self.mean_attention.T @ gradient @ self.mean_attention
        cross = self._closure.cross * key
        if self._dropped > 0.0:
            own = np.diag(gradient)
            value = value + self._dropped * np.diag(self._closure.squares.T @ own)
            scale = self._dropped * self.logit_scale
            noise, noise_cross = self._closure.noise_spread(scale * own * np.diag(self.kernel))
            key, cross = key + noise, cross + noise_cross
        query = gradient * self._forward[1]
        value, key, cross = (0.5 * (path + path.T) for path in (value, key, cross))
        return AttentionGradient(value, query, key, cross, value + query + key + cross)

    def adjoint(self, sensitivity: ArrayLike) -> Array:
        """Transpose of the map from G to `backward(G).total`.

        <Lambda, backward(G).total> = <adjoint(Lambda), G> for symmetric Lambda and G, which carries
        the sensitivity of a scalar to the input's gradient kernel up to the output's.

        Args:
            sensitivity: (L, L) Lambda.
        """
        sensitivity = self._check_shape("sensitivity", sensitivity)
        value, key, _ = self._closure.gather(sensitivity)
        mean = self.mean_attention @ sensitivity @ self.mean_attention.T
        total = mean + value + (1.0 + self._closure.cross) * key
        total += sensitivity * self._forward[1]
        if self._dropped > 0.0:
            noise, noise_cross, _ = self._closure.noise_gather(sensitivity)
            through_keys = self.logit_scale * np.diag(self.kernel) * (noise + noise_cross)
            through_values = self._closure.squares @ np.diag(sensitivity)
            total += self._dropped * np.diag(through_values + through_keys)
        return np.asarray(0.5 * (total + total.T))

    def _check_shape(self, name: str, kernel: ArrayLike) -> Array:
        array = _square(name, kernel)
        if array.shape != self.kernel.shape:
            raise domain_error(name, array.shape, f"of shape {self.kernel.shape}")
        return array


def _square(name: str, kernel: ArrayLike) -> Array:
    array = np.asarray(kernel, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not len(array):
        raise domain_error(name, array.shape, "a square matrix")
    if not np.all(np.isfinite(array)):
        raise domain_error(name, "not finite", "finite everywhere")
    return np.asarray(0.5 * (array + array.T))
