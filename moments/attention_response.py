"""Attention about its mean: how one layer answers to small changes of its kernels, by token.

Logits of rows i and i' covary by tau C_ii' C_jl. To first order in that, with w the mean attention
and P_i = diag(w_i) - w_i w_i^T, the joint law of two rows is (Price's theorem)

    E a_ij a_i'l = w_ij w_i'l + tau C_ii' R1 (P_i C P_i')_jl.

It saturates as exact rows do: where n keys of logit variance theta have E sum_j a_ij^2 = S, the
odds exp(t) = S (n - 1)/(1 - S) of one key give, with p = 1/(1 + (n - 1) exp(-rho t)),

    R1 = (p - 1/n)/(rho theta m),    R2 = d(rho R1)/drho = (t/theta) p (1 - p)/m,

with m = (n - 1)/n^2.

Products of (L, L) matrices alone: a small part of what `kernels.KernelAttention` costs. It is for
sensitivities, which need a shape; the size comes from the moments that were traced.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .attention import SelfAttention
from .block_noise import ratio
from .kernels import exact_rows
from .kernels.logits import prior_weights
from .kernels.row_statistics import mean_attention, row_statistics
from .sensitivity import SINGLE, diagonal, symmetric, transposed
from .state import Array

FAINT = 1e-9
"""A product of correlation and logit variance below which rows are read as independent."""


class Rise(NamedTuple):
    """What a sensitivity Lambda to the gradient at attention's input becomes, kernels (..., L, L).

    Attributes:
        given: Lambda itself.
        onward: the sensitivity to the gradient at the output.
        gathered: tr(P_i C P_i' Lambda) of every two rows.
    """

    given: Array
    onward: Array
    gathered: Array


@dataclass(frozen=True)
class AttentionResponse:
    """Linear maps of one layer's kernels, (..., L, L) each; leading axes of arguments broadcast.

    The gradient G at the output becomes, at the input,

        w^T G w + sum_ii' (value + key)_ii' G_ii' P_i C P_i' + query o G + dropped noise,

    and attention hands on a change of its kernel by the transpose of that map.

    Attributes:
        kernel: second moments C of the tokens that attend.
        weights: mean attention w.
        squares: E a_ij^2 times p/(1 - p) of the dropout on the attention weights.
        by_head: the factors value + key, tau C_ii' (R1 + R2): realised weights and keys, which are
            one vector over tokens in each head. The keys' part of dropout is included.
        query: tau R2 tr(P_i C P_i' C).
        slope: tau R2.
        slope_change: C_ii' d(slope)/dC_ii'.
        logit_variance, keys: (..., L) theta and effective number of keys of every row.
    """

    kernel: Array
    weights: Array
    squares: Array
    by_head: Array
    query: Array
    slope: Array
    slope_change: Array
    logit_variance: Array
    keys: Array

    @classmethod
    def of(
        cls, attention: SelfAttention, kernel: Array, allowed: list[np.ndarray], tau: float
    ) -> AttentionResponse:
        """The response around a kernel (..., L, L).

        Args:
            attention: the layer.
            kernel: second moments of the tokens that attend.
            allowed: for every leading entry, (L, L) which keys each query sees.
            tau: logit scale.
        """
        flat = kernel.reshape(-1, *kernel.shape[-2:])
        dropped = attention.drop_prob / (1 - attention.drop_prob)
        built = [
            _response(one, prior_weights(mask, None), tau, dropped, float(attention.d_model))
            for one, mask in zip(flat, allowed, strict=True)
        ]
        axes = kernel.shape[:-2]
        fields = [np.stack(one) for one in zip(*built, strict=True)]
        fields = [field.reshape(*axes, *field.shape[1:]) for field in fields]
        return cls(*(field.astype(SINGLE) for field in (kernel, *fields)))

    def rise(self, sensitivity: Array) -> Rise:
        """Sensitivity to the gradient at the output, of one to that at the input."""
        w = self.weights
        seen = w @ sensitivity
        mean = seen @ transposed(w)
        cross = w @ transposed(self._mixed * seen)
        gathered = w @ (self.kernel * sensitivity) @ transposed(w)
        gathered += self._means * mean - cross - transposed(cross)
        dropped = np.einsum("...ij,...jj->...i", self.squares, sensitivity)
        onward = mean + self.by_head * gathered + self.query * sensitivity + diagonal(dropped)
        return Rise(sensitivity, symmetric(onward), gathered)

    def fall(self, sensitivity: Array, rise: Rise | None, gradient: Array) -> tuple[Array, Array]:
        """Sensitivity to the signal's kernel at the input, of one to that at the output.

        Returns it, and its part through the correlation of two queries, C_ii' of logits.

        Args:
            sensitivity: Gamma, to the kernel at the output.
            rise: a sensitivity to the gradient at the input, whose dependence on the signal's
                kernel (mean weights kept) is added; None: there is none.
            gradient: G at the output.
        """
        w, wt = self.weights, transposed(self.weights)
        pairs = self.by_head * sensitivity
        direct = self.query * sensitivity
        middle = sensitivity + pairs * self._means
        dropped = np.einsum("...ij,...ii->...j", self.squares, sensitivity)
        if rise is not None:
            given = rise.given
            twice = 2 * self.slope + self.slope_change
            direct = direct + twice * gradient * rise.gathered
            overlaps = 2 * (self.slope + self.slope_change) * gradient * given
            pairs = pairs + overlaps
            keys = twice * self.kernel * gradient
            seen = w @ given
            middle = middle + overlaps * self._means + keys * (seen @ wt)
        onward = wt @ pairs
        cross = onward * transposed(self._mixed)
        kept = (onward @ w) * self.kernel
        if rise is not None:
            sent = wt @ keys
            cross = cross + sent * transposed(seen)
            kept = kept + (sent @ w) * given
        cross = cross @ w
        total = wt @ middle @ w + kept - cross - transposed(cross)
        return symmetric(total + direct + diagonal(dropped)), direct

    def sent_by_head(self, gradient: Array) -> Array:
        """The part of the gradient at the input that is one vector over tokens in each head."""
        w, wt = self.weights, transposed(self.weights)
        pairs = self.by_head * gradient
        onward = wt @ pairs
        cross = (onward * transposed(self._mixed)) @ w
        total = (onward @ w) * self.kernel - cross - transposed(cross)
        return total + wt @ (pairs * self._means) @ w

    def agreement(self, gradient: Array) -> Array:
        """(..., L) correlation of a row's query with others', as gradients weigh them."""
        size = np.sqrt(np.diagonal(self.kernel, axis1=-2, axis2=-1))
        weight = np.diagonal(gradient, axis1=-2, axis2=-1)
        correlation = ratio(self.kernel, size[..., :, None] * size[..., None, :])
        others = (correlation @ weight[..., None])[..., 0] - weight
        return np.clip(ratio(others, weight.sum(-1)[..., None] - weight), 0.0, 1.0)

    def participation(self, agreement: Array) -> Array:
        """(..., L) one over the number of keys that a head's sum over rows averages.

        Rows that share a logit c per key, of variance `agreement` theta, weigh keys by e^{2 c}:
        this is E sum_j a_j^2 of the doubled logits.
        """
        theta = exact_rows.tabulated(4.0 * (agreement * self.logit_variance).astype(float))
        keys = np.maximum(self.keys.astype(float), 1.0 + 1e-6)
        theta, keys = np.broadcast_arrays(theta, keys)
        rows = exact_rows.rows(theta.ravel(), keys.ravel())
        return np.asarray(rows.sum_square).reshape(keys.shape)

    @functools.cached_property
    def _mixed(self) -> Array:
        return self.weights @ self.kernel

    @functools.cached_property
    def _means(self) -> Array:
        return self._mixed @ transposed(self.weights)


def _response(
    kernel: Array, allowed: Array, tau: float, dropped: float, d_model: float
) -> tuple[Array, ...]:
    """All attributes but the kernel, of one sequence."""
    own = np.diag(kernel)
    rows = row_statistics(kernel, allowed, own, tau)
    weights = mean_attention(kernel, allowed, rows, np.arange(len(kernel)), tau)
    keys, theta = np.maximum(rows.keys, 1 + 1e-6), np.maximum(rows.theta, FAINT)
    odds = np.where(rows.keys > 1 + 1e-6, rows.own_response * theta, theta)
    correlation = ratio(kernel, np.sqrt(np.outer(own, own)))
    shapes = [0.0, 0.0, 0.0]
    for to_rows in (lambda v: v[:, None], lambda v: v[None, :]):
        shapes = [
            total + 0.5 * half
            for total, half in zip(
                shapes, _saturation(correlation, *map(to_rows, (keys, theta, odds))), strict=True
            )
        ]
    chord, slope, change = (tau * rows.softening.mean() * shape for shape in shapes)
    mixed = weights @ kernel
    means = mixed @ weights.T
    excess = own - 2 * mixed + np.diag(means)[:, None]
    squares = weights**2 * (1 + np.diag(kernel * chord)[:, None] * np.maximum(excess, 0.0))
    # Given the direction a query looks in, the tokens it attends to share a component along it.
    apart = weights @ own - np.diag(means)
    cross = weights @ (mixed * mixed).T
    overlap = weights @ kernel**2 @ weights.T - cross - cross.T + means**2
    query = slope * (overlap + np.outer(apart, apart) / d_model)
    # Dropout makes logits matter by what their keys have of their own, whatever they share.
    through_keys = (
        np.eye(len(kernel)) * dropped / np.maximum(ratio(rows.unshared, own.mean()), 0.05)
    )
    by_head = kernel * (chord + slope * (1 + through_keys))
    return weights, dropped * squares, by_head, query, slope, change, rows.theta, rows.keys


def _saturation(
    correlation: Array, keys: Array, theta: Array, odds: Array
) -> tuple[Array, Array, Array]:
    """R1, R2 and rho dR2/drho of rows with these statistics."""
    free = (keys - 1) / keys**2
    share = 1 / (1 + (keys - 1) * np.exp(-correlation * odds))
    slope = odds / theta * share * (1 - share) / free
    faint = np.abs(correlation * theta) < FAINT
    chord = np.where(
        faint, slope, (share - 1 / keys) / (np.where(faint, 1.0, correlation * theta) * free)
    )
    return chord, slope, correlation * odds * (1 - 2 * share) * slope
