"""Linearised attention: the response of one layer to small changes of its kernels.

The joint law of two rows to first order in the covariance of their logits, with the saturation of
exact rows: derivatives of the closure at a small part of the cost of `kernels.KernelAttention`. See
docs/theory/band.md, Saturation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...engine.classes import ClassMatrix, ClassRows, KeyCounts, OneClass, diagonal_of
from ...engine.composition import PullbackResult
from ...engine.fluctuation import (
    OverlapWalk,
    UnsharedOverlap,
    between_rows,
    has_fixed_norms,
    overlap_covariance,
    rows_times,
    unshared_variance,
)
from ...engine.response import (
    SINGLE,
    GradientAdjoint,
    Matrix,
    SignalAdjoint,
    count_of,
    diagonal_matrix,
    entrywise,
    matrix_of,
    ones,
    over_tokens,
    per_pair,
    ratio,
    row_sums,
    stacked,
    symmetric,
    total,
    trace_of,
    trace_of_products,
    transposed,
)
from ...engine.state import Array, Kernel, Signal, ratio_or_zero
from ...engine.texts import TextClasses
from ...engine.trace import Record
from . import softmax
from .kernels import position_attention
from .kernels.position_attention import ClassLogits, Words
from .kernels.row_statistics import (
    FAINT,
    AttentionRows,
    ReferenceRow,
    dropped_by_own,
    mean_attention,
    rows_of_kernel,
    saturation,
    statistics_of,
)
from .layers import self_masks
from .projections import logit_law, real_tokens

BEND_STEP = 0.02
"""Relative step of the difference quotient in `_bend`; its statistics have errors of 1e-4."""

LEAST_BENT = 1e-3
"""Logit variance below which log-odds are taken as proportional to it."""


class AttentionAdjoint(NamedTuple):
    """Adjoint of attention's gradient map, kernels (..., L, L).

    Attributes:
        sensitivity: Lambda, to the gradient at the input, with its averages.
        onward: the sensitivity to the gradient at the output.
        gathered: tr(P_i C P_i' Lambda) of every two rows.
    """

    sensitivity: Averages
    onward: Array
    gathered: Array


class Averages(NamedTuple):
    """Weights w, a kernel X over keys, and w X and w X w^T; P_i = diag(w_i) - w_i w_i^T."""

    weights: Matrix
    kernel: Matrix
    mixed: Matrix
    means: Matrix

    @classmethod
    def of(cls, weights: Matrix, kernel: Matrix) -> Averages:
        mixed = weights @ kernel
        return cls(weights, kernel, mixed, mixed @ transposed(weights))

    def gather(self, other: Averages) -> Matrix:
        """tr(P_i X P_i' Y) of every two rows."""
        w = self.weights
        cross = w @ transposed(self.mixed * other.mixed)
        result = w @ (self.kernel * other.kernel) @ transposed(w)
        return result + self.means * other.means - cross - transposed(cross)

    def spread(self, off_diagonal: Matrix) -> Matrix:
        """sum_ii' H_ii' P_i X P_i', the transpose of `gather` in Y, for pairs H of rows."""
        w = self.weights
        left = transposed(w) @ off_diagonal
        cross = (left * transposed(self.mixed)) @ w
        result = (left @ w) * self.kernel - cross - transposed(cross)
        return result + transposed(w) @ (off_diagonal * self.means) @ w


@dataclass(frozen=True)
class AttentionResponse:
    """Linear maps of one layer's kernels, (..., L, L) each; leading axes of arguments broadcast.

    The gradient G at the output becomes, at the input,

        w^T G w + sum_ii' (value + key)_ii' G_ii' P_i C P_i' + query o G + dropout noise.

    A change of the signal's kernel is propagated by the transpose of that map, plus the saturation
    of rows as their theta grows: at a given covariance of two rows' logits, R1 and R2 change by
    b R2 and b (R2 + rho dR2/drho) with log theta, b = dlog t/dlog theta - 1. Changes of the mean
    weights and of the effective number of keys are neglected.

    Attributes:
        kernel: second moments C of the tokens.
        squares: E a_ij^2 times p/(1 - p) of attention dropout.
        by_head: the factors value + key, tau C_ii' (R1 + R2): gradients through the realised
            weights and keys, one vector over tokens per head; includes the keys' dropout term.
        query: tau R2 tr(P_i C P_i' C).
        slope: tau R2.
        slope_change: C_ii' d(slope)/dC_ii'.
        query_change: (slope + slope_change) tr(P_i C P_i' C).
        through_keys: (..., L) dropout's relative addition to the key factor of a row with itself.
        unshared: (..., L) sum_j w_ij C_jj - (w C w^T)_ii, to which theta is proportional.
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
    through_keys: Array
    unshared: Array
    bend: Array
    logit_variance: Array
    keys: Array

    @classmethod
    def of(cls, attention: Any, kernel: Matrix, allowed: Any, tau: Array) -> AttentionResponse:
        """The response around a kernel (..., L, L).

        Args:
            attention: a `SelfAttention`.
            kernel: second moments of the tokens.
            allowed: (L, L) masks, one per leading entry; None on classes of positions (causal) and
                for exchangeable tokens (all keys).
            tau: (...,) logit scale.
        """
        dropped = attention.drop_prob / (1 - attention.drop_prob)
        axes = kernel.shape[:-2]
        if isinstance(kernel, ClassMatrix) and isinstance(kernel.classes, OneClass):
            tau = np.broadcast_to(tau, axes)[..., None]
            fields = _response(
                kernel, *_exchangeable(kernel, tau), tau, dropped, float(attention.d_model)
            )
            return cls(*(field.astype(SINGLE) for field in (kernel, *fields)))
        tau, built = float(np.mean(tau)), []
        for place, index in enumerate(np.ndindex(axes)):
            one = kernel[index]
            if allowed is None:
                rows = _on_classes(one, one.classes.key_counts(attention.window), tau)
            else:
                rows = _by_token(one, allowed[place], tau)
            built.append(_response(one, *rows, tau, dropped, float(attention.d_model)))
        fields = tuple(_reshaped(field, axes) for field in zip(*built, strict=True))
        return cls(*(field.astype(SINGLE) for field in (kernel, *fields)))

    def gradient_adjoint(self, sensitivity: Array) -> AttentionAdjoint:
        """Sensitivity to the gradient at the output, from the one to that at the input."""
        averages = Averages.of(self.weights, sensitivity)
        gathered = self._rows.gather(averages)
        dropped = (self.squares @ diagonal_of(sensitivity)[..., None])[..., 0]
        onward = averages.means + self.by_head * gathered + self.query * sensitivity
        onward = onward + diagonal_matrix(dropped, onward)
        return AttentionAdjoint(averages, symmetric(onward), gathered)

    def signal_adjoint(
        self, sensitivity: Array, adjoint: AttentionAdjoint | None, gradient: Array
    ) -> Array:
        """Sensitivity to the signal's kernel at the input, from the one to that at the output.

        Args:
            sensitivity: Gamma, to the kernel at the output.
            adjoint: of a sensitivity to the gradient at the input; that gradient's dependence on
                the signal's kernel, at constant mean weights, is added. None: there is none.
            gradient: G at the output.
        """
        w, wt = self.weights, transposed(self.weights)
        off_diagonal = self.by_head * sensitivity
        direct = self.query * sensitivity
        middle = sensitivity
        dropped = (transposed(self.squares) @ diagonal_of(sensitivity)[..., None])[..., 0]
        # Sensitivity to a row's log theta, which depends on the query's norm and on `unshared`.
        by_theta = self.bend * row_sums(self.query * self.kernel * sensitivity)
        by_unshared = by_theta
        if adjoint is not None:
            at_input = adjoint.sensitivity.kernel
            twice = 2 * self.slope + self.slope_change
            again = diagonal_of(self.slope + self.slope_change) * self.through_keys
            twice = twice + diagonal_matrix(again, twice)
            direct = direct + twice * gradient * adjoint.gathered
            slopes = 2 * (self.slope + self.slope_change)
            off_diagonal = off_diagonal + slopes * gradient * at_input
            keys = twice * self.kernel * gradient
            sizes = row_sums(keys * adjoint.gathered + self.query_change * gradient * at_input)
            by_theta = by_theta + self.bend * sizes
            # `through_keys` is proportional to the tokens' mean second moment over `unshared`
            keyed = diagonal_of(self.slope * self.kernel * adjoint.gathered * gradient)
            keyed = keyed * self.through_keys
            by_unshared = by_theta - keyed
            dropped = dropped + ratio(over_tokens(keyed, middle), trace_of(self.kernel))[..., None]
        direct = direct + diagonal_matrix(ratio(by_theta, diagonal_of(self.kernel)), middle)
        by_unshared = ratio(by_unshared, self.unshared)
        middle = middle - diagonal_matrix(by_unshared, middle)
        dropped = dropped + (wt @ by_unshared[..., None])[..., 0]
        result = wt @ middle @ w + self._rows.spread(off_diagonal)
        if adjoint is not None:
            result = result + adjoint.sensitivity.spread(keys)
        return symmetric(result + direct + diagonal_matrix(dropped, result))

    def one_vector_gradient(self, gradient: Array) -> Array:
        """The part of the gradient at the input that is a single vector over tokens per head."""
        return self._rows.spread(self.by_head * gradient)

    def agreement(self, gradient: Array) -> Array:
        """(..., L) correlation of a row's query with those of other rows, weighted by gradients."""
        size, weight = np.sqrt(diagonal_of(self.kernel)), diagonal_of(gradient)
        sizes = size[..., :, None] * size[..., None, :]
        correlation = entrywise(ratio, self.kernel, sizes)
        others = (correlation @ weight[..., None])[..., 0] - weight
        return np.clip(ratio(others, trace_of(gradient)[..., None] - weight), 0.0, 1.0)

    def participation(self, agreement: Array) -> Array:
        """(..., L) one over the effective number of keys in a head's sum over rows.

        Rows that share a logit c per key, of variance `agreement` theta, weight keys by e^{2 c}:
        E sum_j a_j^2 of the doubled logits.
        """
        theta = softmax.tabulated(4.0 * (agreement * self.logit_variance).astype(float))
        keys = np.maximum(self.keys.astype(float), 1.0 + 1e-6)
        theta, keys = np.broadcast_arrays(theta, keys)
        rows = softmax.rows(theta.ravel(), keys.ravel())
        return np.asarray(rows.sum_square).reshape(keys.shape)

    @functools.cached_property
    def _rows(self) -> Averages:
        return Averages.of(self.weights, self.kernel)


def _by_token(kernel: Array, mask: Array, tau: float) -> tuple[AttentionRows, Array, Array]:
    """Statistics of rows, mean attention and its squares, of one sequence."""
    prior = mask / mask.sum(1, keepdims=True)
    rows = rows_of_kernel(kernel, prior, np.diag(kernel), tau)
    weights = mean_attention(kernel, prior, rows, np.arange(len(kernel)), tau)
    return rows, weights, weights**2


def _on_classes(
    kernel: ClassMatrix, key_counts: KeyCounts, tau: float
) -> tuple[AttentionRows, Matrix, Matrix]:
    """As `_by_token`, on classes of positions."""
    classes = kernel.classes
    tokens, *same_word = classes.blocks_by_word(kernel.diagonal, kernel.off_diagonal)
    logits = ClassLogits(tokens, tokens, tokens, tau, key_counts)
    if isinstance(classes, TextClasses):
        (same,) = same_word
        counts = classes.share, classes.repeated_share, classes.same_word_share
        logits = logits._replace(words=Words(same, same, same, *counts))
    rows = position_attention.rows_of_classes(logits)
    by_word = position_attention.attention_by_word(logits, rows)
    portions = logits.mixture().portions
    mean, crowded = by_word @ portions, None
    if isinstance(classes, TextClasses):
        crowded = ratio(by_word[..., 1], mean) ** 2
    weights = ClassMatrix.of_rows(mean, key_counts, classes, crowded)
    squares = ClassMatrix.of_rows(by_word**2 @ portions, key_counts, classes)
    repeated = {f.name: classes.tiled(getattr(rows, f.name)) for f in dataclasses.fields(rows)}
    return dataclasses.replace(rows, **repeated), weights, squares


def _exchangeable(kernel: ClassMatrix, tau: Array) -> tuple[AttentionRows, Matrix, Matrix]:
    """As `_by_token`, for exchangeable tokens without a mask, with the leading axes of tau."""
    length = kernel.classes.length
    diagonal, off_diagonal = kernel.diagonal, kernel.off_diagonal[..., 0]
    count = np.full(diagonal.shape, float(length))
    result = statistics_of(
        ReferenceRow(np.maximum(diagonal - off_diagonal, 0.0), count),
        1.0,
        count,
        diagonal,
        tau,
        diagonal,
        (diagonal + (length - 1) * off_diagonal) / length,
        np.log(count),
    )
    weights = ones(kernel.shape, kernel) * (1.0 / length)
    return result, weights, weights**2


def _reshaped(fields: Any, axes: tuple[int, ...]) -> Any:
    """Stack the fields of all leading entries, with these leading axes."""
    result = stacked(fields, np.stack)
    if isinstance(result, ClassMatrix):
        diagonal = result.diagonal.reshape(*axes, *result.diagonal.shape[1:])
        off_diagonal = result.off_diagonal.reshape(*axes, *result.shape[1:])
        crowded = result.same_word_ratio
        if crowded is not None:
            crowded = crowded.reshape(*axes, *crowded.shape[1:])
        return ClassMatrix(diagonal, off_diagonal, result.classes, crowded)
    return result.reshape(*axes, *result.shape[1:])


def _response(
    kernel: Matrix,
    rows: AttentionRows,
    weights: Matrix,
    squares: Matrix,
    tau: Any,
    dropped: Any,
    d_model: float,
) -> tuple[Any, ...]:
    """Fields of `AttentionResponse` after the kernel, for one sequence; leading axes are allowed
    for exchangeable tokens."""
    diagonal = diagonal_of(kernel)
    keys, theta = np.maximum(rows.keys, 1 + 1e-6), np.maximum(rows.theta, FAINT)
    odds = np.where(rows.keys > 1 + 1e-6, rows.odds * theta, theta)
    correlation = entrywise(ratio, kernel, np.sqrt(_outer(diagonal)))
    halves = (
        entrywise(saturation, correlation, *map(to_rows, (keys, theta, odds)))
        for to_rows in (lambda v: v[..., :, None], lambda v: v[..., None, :])
    )
    factor = np.asarray(tau * _variance_kept(rows))
    factor = factor[..., None] if factor.ndim else factor
    chord, slope, change = (factor * (0.5 * (a + b)) for a, b in zip(*halves, strict=True))
    averages = Averages.of(weights, kernel)
    mixed, means = averages.mixed, averages.means
    itself = diagonal_of(means)[..., :, None]
    excess = entrywise(
        lambda value: np.maximum(value, 0.0), diagonal[..., None, :] - 2 * mixed + itself
    )
    squares = squares * (1 + diagonal_of(kernel * chord)[..., :, None] * excess)
    # Given the query, the tokens that it attends to share a component along its direction.
    unshared = (weights @ diagonal[..., None])[..., 0] - diagonal_of(means)
    overlap = averages.gather(averages)
    query = slope * (overlap + _outer(unshared) / d_model)
    mean = (trace_of(kernel) / count_of(kernel))[..., None]
    dropped_rows = dropped[..., None] if np.ndim(dropped) else dropped
    through_keys = dropped_by_own(dropped_rows, ratio(rows.unshared, mean))
    by_head = kernel * (chord + slope * (1 + diagonal_matrix(through_keys, kernel)))
    query_change = (slope + change) * overlap
    dropped = per_pair(dropped) if np.ndim(dropped) else dropped
    maps = weights, dropped * squares, by_head, query, slope, change, query_change
    return *maps, through_keys, unshared, _bend(rows), rows.theta, rows.keys


def _outer(entries: Array) -> Array:
    return entries[..., :, None] * entries[..., None, :]


def _variance_kept(rows: AttentionRows) -> Array:
    """`AttentionRows.variance_kept`, averaged over the rows of a sequence: an approximation."""
    return rows.variance_kept if rows.variance_kept.ndim > 1 else rows.variance_kept.mean()


def _bend(rows: AttentionRows) -> Array:
    """(..., L) d log t/d log theta - 1, t the log-odds of one key."""
    keys = np.maximum(rows.keys, 1 + 1e-6).ravel()
    step, logs = BEND_STEP, []
    for factor in (1 - step, 1 + step):
        theta = softmax.tabulated(factor * np.maximum(rows.theta, LEAST_BENT)).ravel()
        square = np.asarray(softmax.rows(theta, keys).sum_square)
        logs.append(np.log(np.log(square * (keys - 1) / (1 - square))))
    slope = (logs[1] - logs[0]) / np.log((1 + step) / (1 - step))
    slope = slope.reshape(rows.keys.shape)
    return np.where(rows.keys > 1 + 1e-6, slope - 1, 0.0)


# --- sensitivities --------------------------------------------------------------------------------


class HeadNoise(NamedTuple):
    """Fluctuation of the gradient through one head's weights and keys.

    Row i sends (g_i . v_j) a_ij q_i to key j, v_j relative to the row's mean. Rows of one gradient,
    or of one query, send one vector z_j over keys; independent rows send one each. With
    f = E a^4/(E a^2)^2 the relative variance of sum_j z_j^2 over n keys is (3 f - 1)/n, in addition
    to 2/d for the norm that all g . v_j share.

    Attributes:
        gradients, queries: (..., L, L) gradients at the keys due to rows of common gradient, and of
            common query.
        crowding: (..., L) f of the rows' common vector.
        single: (..., L) relative variance of one row's vector, times the squared fraction of it
            that is independent of other rows.
    """

    gradients: Matrix
    queries: Matrix
    crowding: Array
    single: Array

    @classmethod
    def of(cls, maps: AttentionResponse, gradient: Matrix) -> HeadNoise:
        diagonal = diagonal_of(gradient)
        share = ratio(diagonal, trace_of(gradient)[..., None])  # 1: a single row, all of it common
        agreement = maps.agreement(gradient)
        common = gradient - diagonal_matrix(diagonal * (1 - share), gradient)
        queries = diagonal_matrix(diagonal * (1 - share) * agreement, gradient)
        independent = ((1 - share) * (1 - agreement)) ** 2
        of_row = 3 * maps.participation(np.ones_like(agreement)) - 1 / maps.keys
        return cls(
            maps.one_vector_gradient(common),
            maps.one_vector_gradient(queries),
            maps.keys * maps.participation(agreement),
            independent * of_row,
        )


@dataclass(frozen=True)
class AttentionSublayer:
    """Linearised attention with its value projection.

    Attributes:
        maps: linear maps of the attention weights.
        gain, back_gain: of the value projection, on a signal and on a gradient.
        grad_out: (..., L, L) gradient at the output.
        heads, d_head, d_model: number and width of the heads, width of the tokens.
    """

    maps: AttentionResponse
    gain: Array
    back_gain: Array
    grad_out: Matrix
    head_noise: HeadNoise
    heads: float
    d_head: float
    d_model: float

    @classmethod
    def of(cls, attention: Any, signal: Signal, grad_out: Matrix) -> AttentionSublayer:
        """Linearise around an input signal and a gradient kernel at the output."""
        tokens = signal.second_moment()
        kernel = matrix_of(tokens, signal.seq_len)
        allowed = None
        if tokens.resolved is True:
            allowed = self_masks(attention, kernel.shape[-1], int(np.prod(kernel.shape[:-2])))
        widths = attention.d_model, attention.d_model
        law = logit_law(attention, tokens, tokens, widths, signal.seq_len)
        # Norms and biases of queries and keys enter by their mean size; rotation is neglected.
        size = law.queries.kernel.mean_diagonal() * law.keys.kernel.mean_diagonal()
        tau = ratio(law.scale * size, tokens.mean_diagonal() ** 2)
        maps = AttentionResponse.of(attention, kernel, allowed, tau)
        back_gain = attention.heads * attention.d_head * attention.value
        return cls(
            maps,
            attention.d_model * attention.value,
            back_gain,
            grad_out,
            HeadNoise.of(maps, per_pair(back_gain) * grad_out),
            attention.heads,
            attention.d_head,
            attention.d_model,
        )

    def gradient_adjoint(self, sensitivity: Array) -> GradientAdjoint:
        """Sensitivity to the gradient at the output, and the noise of this layer: that of the value
        projection, 2 over its features, and that of each head's weights and keys (`HeadNoise`)."""
        adjoint = self.maps.gradient_adjoint(sensitivity)
        onward = per_pair(self.back_gain) * adjoint.onward
        noise = (
            2 / (self.heads * self.d_head) * trace_of_products(onward, self.grad_out, self.grad_out)
        )
        head = self.head_noise
        sizes = entrywise(np.abs, self.maps.by_head * self.grad_out * adjoint.gathered)
        rows = row_sums(sizes)
        crowding = ratio(over_tokens(rows * head.crowding, sizes), over_tokens(rows, sizes))
        for grad_in in (head.gradients, head.queries):
            by_key = (3 * crowding - 1) * trace_of_products(sensitivity, grad_in, grad_in)
            size = 2 * total(sensitivity * grad_in) ** 2 / self.d_model
            noise = noise + (by_key + size) / self.heads
        diagonal = self.maps.by_head * adjoint.gathered + self.maps.query * sensitivity
        diagonal = diagonal_of(per_pair(self.back_gain) * diagonal * self.grad_out)
        noise = noise + over_tokens(diagonal**2 * head.single, self.grad_out) / self.heads
        overlap = total(sensitivity * (self.grad_out @ self.maps.weights))
        whole = total(sensitivity * self.grad_out) * total(onward * self.grad_out)
        return GradientAdjoint(onward, adjoint, noise, ratio(self.back_gain * overlap**2, whole))

    def signal_adjoint(self, sensitivity: Array, exposure: Any) -> SignalAdjoint:
        """See `Response`; the fluctuation of a head's |W_k^T W_q x|^2 in logits is neglected."""
        gain, grad_out = per_pair(self.gain), per_pair(self.back_gain) * self.grad_out
        count = len(exposure.sensitivity.kernel)
        onward = self.maps.signal_adjoint(gain * sensitivity[:count], exposure, grad_out)
        if count < len(sensitivity):
            rest = self.maps.signal_adjoint(gain * sensitivity[count:], None, grad_out)
            onward = stacked((onward, rest))
        return SignalAdjoint(onward)


# --- overlaps of two tokens -----------------------------------------------------------------------


def through_attention(
    leaf: Any, record: Record, at: UnsharedOverlap, walk: OverlapWalk, fixed: bool = False
) -> UnsharedOverlap:
    """Variance of the unshared overlap at the output of a `SelfAttention` or `CrossAttention`.

    Args:
        record: of the attention, or of the component that contains it.
        at: unshared overlap of the queries' tokens.
        fixed: whether the component normalises its tokens.
    """
    signal, output, memory = record.input, record.output, record.memory
    averages = Averaging(0.0, 0.0)
    if memory is None:
        memory, attended, keys = signal, at.variance, 1.0 / signal.seq_len
        if signal.resolved:
            weights = uniform_rows(leaf, signal)
            averages = averaging(weights, signal, walk.real)
            on_classes = isinstance(weights, ClassRows)
            squares = weights.counted * weights.weights if on_classes else weights * weights
            keys = float(signal.kernel.average(squares.sum(-1), walk.real))
    else:
        attended = 1.0 / memory.width if walk.memory is None else walk.memory
        real = real_tokens(leaf)
        keys = 1.0 / (memory.seq_len if real is None else real.sum() / leaf.sequences)
    walk.attended[record.place] = attended
    by_queries = query_elasticity(record.pulled, signal, output, walk.real)
    fixed = fixed or has_fixed_norms(memory)
    grown = math.exp(unshared_spread(memory, real_tokens(leaf))) if fixed else 1.0
    for name in ("query", "key", "query.bias", "query.norm.gain", "key.norm.gain"):
        walk.growth[record.layer, f"{leaf.prefix}{name}"] = grown
    groups = leaf.kv_heads
    distinct = 1.0 if groups is None else groups / leaf.heads  # value heads per query head
    # parts of the output's unshared variance that follow the overlaps of attended and of querying
    # tokens; the rest is due to the deviations of weights from their mean, drawn in every head
    gain, unshared = leaf.memory_width * leaf.value, unshared_variance(output, walk.real)
    by_mean = float(np.clip(ratio_or_zero(np.mean(gain) * averages.unshared, unshared), 0.0, 1.0))
    by_queries = min(by_queries, 1.0)
    inherited = by_mean**2 + by_queries**2 + 2.0 * by_mean * by_queries * averages.elasticity
    fresh = 1.0 / (distinct * output.width) + by_queries**2 * 2.0 / output.width
    fresh += (1.0 - by_mean**2) * keys / leaf.heads
    followed = at.response * (by_mean * averages.elasticity + by_queries)
    return UnsharedOverlap(inherited * attended + fresh, followed)


def uniform_rows(leaf: Any, tokens: Signal) -> Any:
    """(L, L) uniform attention under the mask, for resolved tokens; `ClassRows` on classes."""
    classes = tokens.kernel.classes
    if classes is not None:
        key_counts = classes.key_counts(leaf.window)
        return ClassRows(key_counts.visible / key_counts.size[:, None], key_counts)
    mask = self_masks(leaf, tokens.kernel.off_diagonal.shape[-1], 1)[0]
    return np.asarray(mask / mask.sum(1, keepdims=True))


ROUNDING = 1e-6
"""Unshared variance of rows' averages over that of the tokens below which it is rounding."""


class Averaging(NamedTuple):
    """Averages of tokens by weights that are uniform under the mask.

    Attributes:
        unshared: unshared variance of the averages; 0 if all rows attend to all keys equally.
        elasticity: squared correlation of two tokens' unshared overlap with that of the averages.
    """

    unshared: float
    elasticity: float


def averaging(weights: Any, tokens: Signal, real: Array | None = None) -> Averaging:
    """Moments of the averages W x.

    With M = C W^T between tokens and averages, Cov(o_ab, (W o W^T)_ab) = nu (M_aa M_bb + ...).
    """
    kernel = tokens.second_moment()
    if kernel.classes is not None:
        kernels = rows_times(weights, kernel), kernel, between_rows(weights, kernel)
    else:
        averaged = weights @ kernel.off_diagonal
        kernels = Kernel.of_matrix(averaged), kernel, Kernel.of_matrix(averaged @ weights.T)
    cross, tokens_own, averages_own = (
        float(one.mean_diagonal(real) - one.mean_off_diagonal(real)) for one in kernels
    )
    if averages_own <= ROUNDING * tokens_own or tokens_own <= 0.0:
        return Averaging(0.0, 0.0)
    elasticity = max(cross, 0.0) ** 2 / (tokens_own * averages_own)
    return Averaging(averages_own, min(elasticity, 1.0))  # Cauchy-Schwarz


def query_elasticity(
    pulled: PullbackResult | None, before: Signal, after: Signal, real: Array | None
) -> float:
    """`fluctuation.elasticity` of the output's unshared variance through the queries; 0 without a
    backward pass."""
    unshared = unshared_variance(after, real)
    response = None if pulled is None or unshared == 0.0 else pulled.response()
    if response is None:
        return 0.0
    grad_in = float(response.mean_off_diagonal(real))
    return float(grad_in * before.width / after.width * unshared_variance(before, real) / unshared)


def unshared_spread(tokens: Signal, real: Array | None = None) -> float:
    """Variance v over draws of log u, u the unshared part of tokens of equal norm.

    The tokens' common part has a squared norm c that varies by y_kl^2, which leaves u = 1 - c: for
    two disjoint pairs, Cov(d o - c d q, d o' - c d q') = (1 - c)^2 y_kl^2 (`fluctuation`). Each
    layer multiplies u by an independent factor, so log u is Gaussian and E u^2 grows by e^v.
    """
    overlaps = overlap_covariance(tokens)
    if overlaps is None:
        return 0.0
    size = float(tokens.second_moment().mean_diagonal(real))
    return float(overlaps.mean_off_diagonal(real)) / size**2 if size > 0.0 else 0.0
