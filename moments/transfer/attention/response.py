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

See docs/theory/band.md, Saturation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...engine.classes import ClassMatrix, OneClass, Sight
from ...engine.sensitivity import (
    SINGLE,
    Matrix,
    count_of,
    diagonal,
    entrywise,
    ones,
    over_tokens,
    own_entries,
    per_pair,
    ratio,
    row_sums,
    stacked,
    symmetric,
    trace_of,
    transposed,
)
from ...engine.state import Array
from .kernels import exact_rows, position_attention
from .kernels.position_attention import ClassLogits
from .kernels.reference import ReferenceRow
from .kernels.row_statistics import (
    RowStatistics,
    mean_attention,
    row_statistics,
    statistics_of,
)

FAINT = 1e-9
"""A product of correlation and logit variance below which rows are read as independent."""


LEAST_OWN = 0.05
"""Least share of its own that a key is taken to have where dropped weights are told apart."""

BEND_STEP = 0.02
"""Relative step of the difference for `_bend`, whose statistics are interpolated to 1e-4."""

LEAST_BENT = 1e-3
"""Logit variance below which the odds grow in proportion."""


class AttentionAdjoint(NamedTuple):
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

    and attention hands on a change of its kernel by the transpose of that map, and by what rows
    saturate as their theta grows: at a given covariance of two rows' logits, R1 and R2 change by
    b R2 and b (R2 + rho dR2/drho) with log theta, b = dlog t/dlog theta - 1. Not followed are the
    mean weights and the number of keys that count.

    Tokens alike (12, correlations .3 and .6, tau up to 1, dropout up to .1): derivatives of output
    and gradient within 7 % of differences of `KernelAttention`, mostly within 2 %.

    Attributes:
        kernel: second moments C of the tokens that attend.
        weights: mean attention w.
        squares: E a_ij^2 times p/(1 - p) of the dropout on the attention weights.
        by_head: the factors value + key, tau C_ii' (R1 + R2): realised weights and keys, which are
            one vector over tokens in each head. The keys' part of dropout is included.
        query: tau R2 tr(P_i C P_i' C).
        slope: tau R2.
        slope_change: C_ii' d(slope)/dC_ii'.
        query_change: (slope + slope_change) tr(P_i C P_i' C).
        squares_change: C_ii d(squares)/dC_ii, as if theta's odds grew in proportion.
        through_keys: (..., L) what dropout adds to the keys' part of a row with itself.
        apart: (..., L) sum_j w_ij C_jj - (w C w^T)_ii, which theta is proportional to.
        bend: (..., L) d log t/d log theta - 1 of every row.
        logit_variance, keys: (..., L) theta and effective number of keys of every row.
    """

    kernel: Matrix
    weights: Matrix
    squares: Matrix
    by_head: Matrix
    query: Matrix
    slope: Matrix
    slope_change: Matrix
    query_change: Matrix
    squares_change: Matrix
    through_keys: Array
    apart: Array
    bend: Array
    logit_variance: Array
    keys: Array

    @classmethod
    def of(cls, attention: Any, kernel: Matrix, allowed: Any, tau: Array) -> AttentionResponse:
        """The response around a kernel (..., L, L).

        Args:
            attention: the layer, a `SelfAttention`.
            kernel: second moments of the tokens that attend.
            allowed: for every leading entry, (L, L) which keys each query sees; None on classes of
                positions, where it sees those before it, and for tokens alike, where it sees all.
            tau: (...,) logit scale.
        """
        dropped = attention.drop_prob / (1 - attention.drop_prob)
        axes = kernel.shape[:-2]
        if isinstance(kernel, ClassMatrix) and isinstance(kernel.classes, OneClass):
            tau = np.broadcast_to(tau, axes)[..., None]
            fields = _response(kernel, *_alike(kernel, tau), tau, dropped, float(attention.d_model))
            return cls(*(field.astype(SINGLE) for field in (kernel, *fields)))
        tau, built = float(np.mean(tau)), []
        for place, index in enumerate(np.ndindex(axes)):
            one = kernel[index]
            if allowed is None:
                rows = _on_classes(one, one.classes.seen(attention.window), tau)
            else:
                rows = _by_token(one, allowed[place], tau)
            built.append(_response(one, *rows, tau, dropped, float(attention.d_model)))
        fields = tuple(_reshaped(field, axes) for field in zip(*built, strict=True))
        return cls(*(field.astype(SINGLE) for field in (kernel, *fields)))

    def gradient_adjoint(self, sensitivity: Array) -> AttentionAdjoint:
        """Sensitivity to the gradient at the output, of one to that at the input."""
        w = self.weights
        seen = w @ sensitivity
        mean = seen @ transposed(w)
        cross = w @ transposed(self._mixed * seen)
        gathered = w @ (self.kernel * sensitivity) @ transposed(w)
        gathered = gathered + self._means * mean - cross - transposed(cross)
        dropped = (self.squares @ own_entries(sensitivity)[..., None])[..., 0]
        onward = mean + self.by_head * gathered + self.query * sensitivity
        onward = onward + diagonal(dropped, onward)
        return AttentionAdjoint(sensitivity, symmetric(onward), gathered)

    def signal_adjoint(
        self, sensitivity: Array, adjoint: AttentionAdjoint | None, gradient: Array
    ) -> tuple[Array, Array]:
        """Sensitivity to the signal's kernel at the input, of one to that at the output.

        Returns it, and its part through the correlation of two queries, C_ii' of logits.

        Args:
            sensitivity: Gamma, to the kernel at the output.
            adjoint: a sensitivity to the gradient at the input, whose dependence on the signal's
                kernel (mean weights kept) is added; None: there is none.
            gradient: G at the output.
        """
        w, wt = self.weights, transposed(self.weights)
        pairs = self.by_head * sensitivity
        direct = self.query * sensitivity
        middle = sensitivity + pairs * self._means
        dropped = (transposed(self.squares) @ own_entries(sensitivity)[..., None])[..., 0]
        # What follows a row's theta less than in proportion: `follows` both the query's own size
        # and how far apart its keys are, `sized` only the former, `apart` only the latter.
        own = own_entries(sensitivity)
        sized = own * (self.squares_change @ own_entries(self.kernel)[..., None])[..., 0]
        follows = self.bend * (row_sums(self.query * self.kernel * sensitivity) + sized)
        apart = 0.0 * sized
        if adjoint is not None:
            given = adjoint.given
            twice = 2 * self.slope + self.slope_change
            again = own_entries(self.slope + self.slope_change) * self.through_keys
            twice = twice + diagonal(again, twice)
            direct = direct + twice * gradient * adjoint.gathered
            overlaps = 2 * (self.slope + self.slope_change) * gradient * given
            pairs = pairs + overlaps
            keys = twice * self.kernel * gradient
            seen = w @ given
            middle = middle + overlaps * self._means + keys * (seen @ wt)
            own = own_entries(gradient)
            squares = own * (self.squares_change @ own_entries(given)[..., None])[..., 0]
            sizes = row_sums(keys * adjoint.gathered + self.query_change * gradient * given)
            follows = follows + self.bend * (sizes + squares)
            # `through_keys` is per that distance over the tokens' mean size
            keyed = (
                own_entries(self.slope * self.kernel * adjoint.gathered) * own * self.through_keys
            )
            sized, apart = sized + squares, squares - keyed
            dropped = dropped + ratio(over_tokens(keyed, middle), trace_of(self.kernel))[..., None]
        direct = direct + diagonal(ratio(follows + sized, own_entries(self.kernel)), middle)
        apart = ratio(follows + apart, self.apart)
        middle = middle - diagonal(apart, middle)
        dropped = dropped + (wt @ apart[..., None])[..., 0]
        onward = wt @ pairs
        cross = onward * transposed(self._mixed)
        kept = (onward @ w) * self.kernel
        if adjoint is not None:
            sent = wt @ keys
            cross = cross + sent * transposed(seen)
            kept = kept + (sent @ w) * given
        cross = cross @ w
        found = wt @ middle @ w + kept - cross - transposed(cross)
        return symmetric(found + direct + diagonal(dropped, found)), direct

    def sent_by_head(self, gradient: Array) -> Array:
        """The part of the gradient at the input that is one vector over tokens in each head."""
        w, wt = self.weights, transposed(self.weights)
        pairs = self.by_head * gradient
        onward = wt @ pairs
        cross = (onward * transposed(self._mixed)) @ w
        found = (onward @ w) * self.kernel - cross - transposed(cross)
        return found + wt @ (pairs * self._means) @ w

    def agreement(self, gradient: Array) -> Array:
        """(..., L) correlation of a row's query with others', as gradients weigh them."""
        size, weight = np.sqrt(own_entries(self.kernel)), own_entries(gradient)
        sizes = size[..., :, None] * size[..., None, :]
        correlation = entrywise(ratio, self.kernel, sizes)
        others = (correlation @ weight[..., None])[..., 0] - weight
        return np.clip(ratio(others, trace_of(gradient)[..., None] - weight), 0.0, 1.0)

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


def _by_token(kernel: Array, mask: Array, tau: float) -> tuple[RowStatistics, Array, Array]:
    """Statistics of rows, mean attention and its squares, of one sequence."""
    prior = mask / mask.sum(1, keepdims=True)
    rows = row_statistics(kernel, prior, np.diag(kernel), tau)
    weights = mean_attention(kernel, prior, rows, np.arange(len(kernel)), tau)
    return rows, weights, weights**2


def _on_classes(
    kernel: ClassMatrix, sight: Sight, tau: float
) -> tuple[RowStatistics, Matrix, Matrix]:
    tokens = kernel.own, kernel.pairs
    logits = ClassLogits(tokens, tokens, tokens, tau, sight)
    rows = position_attention.row_statistics(logits)
    weights = position_attention.mean_attention(logits, rows)
    squares = ClassMatrix.of_rows(weights**2, sight)
    return rows, ClassMatrix.of_rows(weights, sight), squares


def _alike(kernel: ClassMatrix, tau: Array) -> tuple[RowStatistics, Matrix, Matrix]:
    """Of tokens that all see all, whose rows are their own references; leading axes as tau's."""
    length = kernel.classes.length
    own, pairs = kernel.own, kernel.pairs[..., 0]
    count = np.full(own.shape, float(length))
    found = statistics_of(
        ReferenceRow(np.maximum(own - pairs, 0.0), count),
        1.0,
        count,
        own,
        tau,
        own,
        (own + (length - 1) * pairs) / length,
        np.log(count),
    )
    weights = ones(kernel.shape, kernel) * (1.0 / length)
    return found, weights, weights**2


def _reshaped(fields: Any, axes: tuple[int, ...]) -> Any:
    """Fields of every leading entry, as one."""
    found = stacked(fields, np.stack)
    if isinstance(found, ClassMatrix):
        own = found.own.reshape(*axes, *found.own.shape[1:])
        return ClassMatrix(own, found.pairs.reshape(*axes, *found.shape[1:]), found.classes)
    return found.reshape(*axes, *found.shape[1:])


def _response(
    kernel: Matrix,
    rows: RowStatistics,
    weights: Matrix,
    squares: Matrix,
    tau: Any,
    dropped: Any,
    d_model: float,
) -> tuple[Any, ...]:
    """All attributes but the kernel, of one sequence; of tokens alike, with leading axes."""
    own = own_entries(kernel)
    keys, theta = np.maximum(rows.keys, 1 + 1e-6), np.maximum(rows.theta, FAINT)
    odds = np.where(rows.keys > 1 + 1e-6, rows.own_response * theta, theta)
    correlation = entrywise(ratio, kernel, np.sqrt(_outer(own)))
    shapes = [0.0, 0.0, 0.0]
    for to_rows in (lambda v: v[..., :, None], lambda v: v[..., None, :]):
        shapes = [
            total + 0.5 * half
            for total, half in zip(
                shapes,
                entrywise(_saturation, correlation, *map(to_rows, (keys, theta, odds))),
                strict=True,
            )
        ]
    factor = np.asarray(tau * _softened(rows))
    factor = factor[..., None] if factor.ndim else factor
    chord, slope, change = (factor * shape for shape in shapes)
    mixed = weights @ kernel
    means = mixed @ transposed(weights)
    itself = own_entries(means)[..., :, None]
    excess = entrywise(lambda met: np.maximum(met, 0.0), own[..., None, :] - 2 * mixed + itself)
    squares_change = squares * own_entries(kernel * slope)[..., :, None] * excess
    squares = squares * (1 + own_entries(kernel * chord)[..., :, None] * excess)
    # Given the direction a query looks in, the tokens it attends to share a component along it.
    apart = (weights @ own[..., None])[..., 0] - own_entries(means)
    cross = weights @ transposed(mixed * mixed)
    overlap = weights @ kernel**2 @ transposed(weights) - cross - transposed(cross) + means**2
    query = slope * (overlap + _outer(apart) / d_model)
    # Dropout makes logits matter by what their keys have of their own, whatever they share.
    mean = (trace_of(kernel) / count_of(kernel))[..., None]
    dropped_rows = dropped[..., None] if np.ndim(dropped) else dropped
    through_keys = dropped_rows / np.maximum(ratio(rows.unshared, mean), LEAST_OWN)
    by_head = kernel * (chord + slope * (1 + diagonal(through_keys, kernel)))
    query_change = (slope + change) * overlap
    dropped = per_pair(dropped) if np.ndim(dropped) else dropped
    squares, squares_change = dropped * squares, dropped * squares_change
    maps = weights, squares, by_head, query, slope, change, query_change, squares_change
    return *maps, through_keys, apart, _bend(rows), rows.theta, rows.keys


def _outer(entries: Array) -> Array:
    return entries[..., :, None] * entries[..., None, :]


def _softened(rows: RowStatistics) -> Array:
    """One factor for all rows where some are beyond the tables, and 1 where none is: a guess."""
    return rows.softening if rows.softening.ndim > 1 else rows.softening.mean()


def _bend(rows: RowStatistics) -> Array:
    """d log t/d log theta - 1: how much less than in proportion the odds of one key grow."""
    keys = np.maximum(rows.keys, 1 + 1e-6).ravel()
    step, logs = BEND_STEP, []
    for factor in (1 - step, 1 + step):
        theta = exact_rows.tabulated(factor * np.maximum(rows.theta, LEAST_BENT)).ravel()
        square = np.asarray(exact_rows.rows(theta, keys).sum_square)
        logs.append(np.log(np.log(square * (keys - 1) / (1 - square))))
    slope = (logs[1] - logs[0]) / np.log((1 + step) / (1 - step))
    slope = slope.reshape(rows.keys.shape)
    return np.where(rows.keys > 1 + 1e-6, slope - 1, 0.0)


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
