"""The joint law of two attention rows on an arbitrary token kernel.

With logits of covariance tau C_ii' C_jl, the matrix F(rho)_jl = E a_ij a_i'l depends on two rows
only through the correlation rho of their queries and through their supports, and Price's theorem
gives dF/drho = tau E[J C J'] with J = diag(a) - a a^T. Everything attention does to a kernel follows
from F. To first order in rho, exactly,

    F = w w'^T + rho tau Wd (1 - A) C (1 - A')^T Wd',      A_jl = E[a_j a_l]/E a_j,  Wd = diag(w),

since E J = Wd (1 - A). The closure exponentiates this and keeps the marginals:

    F proportional to w_j w'_l exp(beta(rho) [(1 - A) C (1 - A')^T]_jl),  Sinkhorn scaled to w and w',

with A = F(1)/w self-consistent and beta(rho) fixed by exact exchangeable rows (`calibration`). It is
exact to first order given w and A, exact in everything for exchangeable kernels, and otherwise an
approximation whose errors are measured in `attention.KernelAttention`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moments.kernels import exact_rows
from moments.kernels.calibration import calibrate, nodes_for
from moments.kernels.contractions import PairSum
from moments.kernels.row_classes import (
    RowClass,
    balanced,
    find_patterns,
    group_patterns,
    self_overlap,
)
from moments.kernels.row_statistics import mean_attention, row_statistics

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

EXPONENT_MAX = 40.0
"""Cap on the closure's exponents: reached only beyond the tables, where nothing is claimed."""

RHO_MIN = 1e-3
"""Nodes nearer to 0 are moved here: the excess is divided by rho."""


class Block(NamedTuple):
    """Two classes and what the joint law of their rows has beyond independence.

    Attributes:
        first, second: the classes.
        sums: over their pairs of rows, of [F/(w w') - 1]/rho at every node.
    """

    first: RowClass
    second: RowClass
    sums: PairSum


class OverlapClosure:
    """Joint laws of all pairs of rows of one attention layer.

    Attributes:
        rows: reference statistics of the patterns, then of the classes' own rows.
        pattern: (L,) the pattern of every row.
        weights: (L, L) mean attention.
    """

    def __init__(
        self,
        kernel: Array,
        allowed: NDArray[np.bool_],
        logit_scale: float,
        d_model: float,
        d_head: float,
    ) -> None:
        temperature = np.diag(kernel)
        first, self.pattern = find_patterns(allowed, temperature)
        self._members = np.bincount(self.pattern)
        pattern_temperature = np.bincount(self.pattern, temperature) / self._members
        patterns = allowed[first].astype(np.float64)
        groups = group_patterns(patterns, pattern_temperature)
        order = np.concatenate(groups)  # number the patterns class by class
        patterns, pattern_temperature = patterns[order], pattern_temperature[order]
        self.pattern = np.argsort(order)[self.pattern]
        self._members = self._members[order]
        ends = np.cumsum([len(group) for group in groups])
        groups = [slice(end - len(group), end) for end, group in zip(ends, groups, strict=True)]
        extended = np.vstack([patterns, *[patterns[members].max(0) for members in groups]])
        means = [pattern_temperature[members].mean() for members in groups]
        self.rows = row_statistics(
            kernel, extended, np.concatenate([pattern_temperature, means]), logit_scale
        )
        self._kernel, self._scale = kernel, logit_scale
        self._norm = np.sqrt(temperature / pattern_temperature[self.pattern])
        self._classes = [
            self._make_class(members, len(patterns) + index, extended)
            for index, members in enumerate(groups)
        ]
        compact = np.zeros(patterns.shape)
        leader = np.empty(len(patterns), dtype=np.intp)
        for group in self._classes:
            compact[group.patterns, group.keys] = group.weights
            leader[group.patterns] = group.row
        self.weights = compact[self.pattern]

        correlation = np.clip(kernel / np.sqrt(np.outer(temperature, temperature)), -1.0, 1.0)
        self._nodes = nodes_for(correlation, float(self.rows.theta.max()), RHO_MIN)
        stats, own = self.rows, slice(len(patterns), None)
        unshared = stats.logit_variance / np.maximum(logit_scale * stats.temperature, 1e-300)
        self.calibration = calibrate(
            stats.theta[own], stats.keys[own], unshared[own], self._nodes, d_model, d_head
        )
        gap = np.maximum(stats.logit_variance[own], 1e-6) * stats.strength[own] ** 2
        per_tau = logit_scale * stats.temperature[own] / np.maximum(gap, 1e-12)
        self._exponent = self.calibration.log_odds * per_tau[:, None]
        self._row_scale, self._noise_scale = self._make_row_scale(leader, extended.sum(1))
        self._blocks = self._make_blocks()
        self._set_pair_weights(correlation, leader - len(patterns))

    # --- construction --------------------------------------------------------------------------

    def _make_class(self, members: Indices, own: int, extended: Array) -> RowClass:
        keys = _as_slice(np.flatnonzero(extended[own]))
        rows = np.append(np.arange(members.start, members.stop), own)
        kernel = self._kernel[_window(keys, keys)]
        stats = self.rows
        weights = mean_attention(kernel, extended[rows][:, keys], stats, rows, own, self._scale)
        response = np.zeros_like(kernel)
        if len(kernel) > 1:
            pull = stats.own_response[own]
            tau = self._scale * stats.temperature[own] * stats.softening[own]
            guess = np.exp(pull * tau * (kernel - kernel.max(1, keepdims=True)))
            exponent = pull * tau / max(stats.strength[own], 1e-6) ** 2
            response = self_overlap(kernel, weights[-1], guess, exponent)
        return RowClass(members, keys, own, weights[:-1], weights[-1], response)

    def _make_row_scale(self, leader: Indices, count: Array) -> tuple[Array, Array]:
        """A pattern's exact excess over its class's: square root (r, P) at the nodes, and the ratio
        (P,) of E tr J^2, both before P_i (see `contractions`) removes the mean.

        Inverse numbers of keys add: a row that lacks some keys of its class has
        1/n_e = 1/n_e(class) + 1/n - 1/n(class).
        """
        stats, patterns = self.rows, len(leader)
        relative = stats.temperature[:patterns] / stats.temperature[leader]
        inverse = 1.0 / stats.keys[leader] + 1.0 / count[:patterns] - 1.0 / count[leader]

        def excess(theta: Array, inverse_keys: Array) -> Array:
            keys = 1.0 / np.clip(inverse_keys, 1e-8, 1.0 - 1e-9)
            theta = np.clip(theta, 1e-6, exact_rows.THETA_MAX)
            exact = exact_rows.pair(theta, keys, self._nodes.rho[:, None])
            ahead = np.vstack([exact.overlap * keys - 1.0, exact.jacobian_overlap[:1] * keys])
            return np.asarray(ahead / (1.0 - 1.0 / keys))

        row = excess(stats.theta[leader] * relative, inverse)
        group = excess(stats.theta[patterns:], 1.0 / stats.keys[patterns:])[:, leader - patterns]
        trivial = (count[:patterns] < 1.5) | (np.abs(group) < 1e-14)
        ratio = np.where(trivial, 1.0, row / np.where(trivial, 1.0, group))
        return np.sqrt(np.maximum(ratio[:-1], 0.0)), ratio[-1]

    def _make_blocks(self) -> list[Block]:
        groups = [index for index, group in enumerate(self._classes) if len(group.keys) > 1]
        rho = self._nodes.rho[:, None, None]
        blocks = []
        for position, one in enumerate(groups):
            first = self._classes[one]
            onward = first.response @ self._kernel[first.keys]
            for two in groups[position:]:
                second = self._classes[two]
                projected = onward[:, second.keys] @ second.response.T
                product = self._exponent[one] * self._exponent[two]
                exponent = np.sign(self._exponent[one]) * np.sqrt(np.maximum(product, 0.0))
                joint = np.exp(np.minimum(exponent[:, None, None] * projected, EXPONENT_MAX))
                joint = balanced(joint, first.own_weights, second.own_weights, 3)
                sums = PairSum.of((joint - 1.0) / rho, first.weights, second.weights)
                blocks.append(Block(first, second, sums))
        return blocks

    def _set_pair_weights(self, correlation: Array, group: Indices) -> None:
        """Interpolation weights (r, L, L) of the excess and of its derivative for every pair of rows,
        and the key and query factors (L, L)."""
        value, slope = self._nodes.basis(correlation)
        scale = self._row_scale[:, self.pattern] * self._norm
        scale = scale[:, :, None] * scale[:, None, :]
        self._value_weight = scale * value * correlation
        self._slope_weight = scale * (slope * correlation + value)
        row = group[self.pattern]
        factors = []
        for values in (self.calibration.key, self.calibration.query):
            factor = np.einsum("rij,ir->ij", value, values[row])
            factors.append(0.5 * (factor + factor.T))
        self._key_factor, self._query_factor = factors

    # --- sums over pairs of rows ---------------------------------------------------------------

    @property
    def _distinct(self) -> bool:
        return len(self._members) == len(self.pattern)

    def _compress(self, pairs: Array) -> Array:
        """(..., P, P) sums over the rows of every two patterns."""
        if self._distinct:
            return pairs
        member = np.equal.outer(np.arange(len(self._members)), self.pattern).astype(float)
        return np.asarray(member @ pairs @ member.T)

    def gather(self, kernel: Array) -> Array:
        """(3, L, L): tr((F_ii' - w_i w_i'^T) kernel^T), the key path's and the query path's
        multiple of its derivative in the correlation of i and i'."""
        patterns = len(self._members)
        values = np.zeros((len(self._nodes.rho), patterns, patterns))
        for first, second, excess in self._blocks:
            inner = kernel[np.ix_(first.keys, second.keys)]
            part = contractions.gather(inner, excess, first.weights, second.weights)
            values[:, first.patterns[:, None], second.patterns] = part
            if first is not second:
                values[:, second.patterns[:, None], first.patterns] = part.swapaxes(1, 2)
        if not self._distinct:
            values = values[:, self.pattern[:, None], self.pattern]
        slope = np.einsum("rij,rij->ij", self._slope_weight, values)
        return np.stack(
            [
                np.einsum("rij,rij->ij", self._value_weight, values),
                self._key_factor * slope,
                self._query_factor * slope,
            ]
        )

    def spread(self, gradient: Array) -> Array:
        """(2, L, L): sum_ii' G_ii' times F_ii' - w_i w_i'^T, and times the key path's multiple of
        its derivative."""
        weights = self._compress(
            np.stack([gradient * self._value_weight, gradient * self._key_factor * self._slope_weight])
        )
        total = np.zeros((2, *self._kernel.shape))
        for first, second, excess in self._blocks:
            inner = weights[:, :, first.patterns[:, None], second.patterns]
            part = contractions.spread(inner, excess, first.weights, second.weights)
            total[:, first.keys[:, None], second.keys] += part
            if first is not second:
                total[:, second.keys[:, None], first.keys] += part.swapaxes(1, 2)
        return total
