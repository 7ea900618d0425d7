"""The joint law of two attention rows on an arbitrary token kernel.

With logits of covariance tau C_ii' C_jl, the matrix F(rho)_jl = E a_ij a_i'l depends on two rows
only through the correlation rho of their queries and through their supports, and Price's theorem
gives dF/drho = tau E[J C J'] with J = diag(a) - a a^T. Everything attention does to a kernel
follows from F. To first order in rho, exactly,

    F = w w'^T + rho tau Wd (1 - A) C (1 - A')^T Wd',      A_jl = E[a_j a_l]/E a_j,  Wd = diag(w),

since E J = Wd (1 - A). The closure exponentiates this and keeps the marginals:

    F proportional to w_j w'_l exp(beta(rho) [(1 - A) C (1 - A')^T]_jl), Sinkhorn scaled to w, w',

with A = F(1)/w self-consistent and beta(rho) fixed by exact exchangeable rows (`calibration`). It
is exact to first order given w and A, exact in everything for exchangeable kernels, and otherwise
an approximation whose errors are measured in `attention.KernelAttention`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moments.kernels import exact_rows
from moments.kernels.balance import EXPONENT_MAX, balanced, self_overlap
from moments.kernels.calibration import Widths, calibrate, nodes_for
from moments.kernels.contractions import PairSum
from moments.kernels.row_classes import (
    RowClass,
    as_slice,
    find_patterns,
    group_patterns,
    window,
)
from moments.kernels.row_statistics import mean_attention, row_statistics

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

RHO_MIN = 1e-3
"""Where the ratio of two excesses is taken at a node nearer to 0, their common zero."""


class Block(NamedTuple):
    """Two classes and what the joint law of their rows has beyond independence.

    Attributes:
        first, second: the classes.
        sums: over their pairs of rows, of F/(w w') - 1 at every node.
    """

    first: RowClass
    second: RowClass
    sums: PairSum


class OverlapClosure:
    """Joint laws of all pairs of rows of one attention layer.

    Attributes:
        rows: reference statistics of the patterns, then of the classes' own rows.
        pattern: (L,) the pattern of every row.
        group: (P,) the class of every pattern.
        count: number of allowed keys of the patterns, then of the classes' own rows.
        classes: all classes.
        calibration: what exact rows say about every class.
        weights: (L, L) mean attention.
    """

    def __init__(
        self,
        kernel: Array,
        allowed: NDArray[np.bool_],
        logit_scale: float,
        widths: Widths,
    ) -> None:
        self._kernel, self._tau = kernel, logit_scale
        temperature = np.diag(kernel)
        first, pattern = find_patterns(allowed, temperature)
        groups = group_patterns(allowed[first].astype(np.float64), _means(temperature, pattern))
        order = np.concatenate(groups)  # patterns numbered class by class
        self.pattern = np.argsort(order)[pattern]
        patterns = allowed[first[order]].astype(np.float64)
        pattern_temperature = _means(temperature, self.pattern)
        ends = np.cumsum([len(group) for group in groups])
        spans = [
            slice(int(end) - len(group), int(end)) for end, group in zip(ends, groups, strict=True)
        ]
        extended = np.vstack([patterns, *[patterns[span].max(0) for span in spans]])
        means = [pattern_temperature[span].mean() for span in spans]
        self.rows = row_statistics(
            kernel, extended, np.concatenate([pattern_temperature, means]), logit_scale
        )
        self.classes = [
            self._make_class(span, len(patterns) + index, extended)
            for index, span in enumerate(spans)
        ]
        compact = np.zeros(patterns.shape)
        self.group = np.empty(len(patterns), dtype=np.intp)
        for index, group in enumerate(self.classes):
            compact[window(group.patterns, group.keys)] = group.weights
            self.group[group.patterns] = index
        self.weights = compact[self.pattern]

        correlation = np.clip(kernel / np.sqrt(np.outer(temperature, temperature)), -1.0, 1.0)
        self._nodes = nodes_for(correlation, float(self.rows.theta.max()))
        stats, own = self.rows, slice(len(patterns), None)
        self.calibration = calibrate(
            stats.theta[own],
            stats.keys[own],
            stats.unshared_fraction[own],
            self._nodes,
            widths,
        )
        variance = np.maximum(stats.logit_variance[own], exact_rows.THETA_LEAST)
        gap = variance * stats.strength[own] ** 2
        self._exponent_per_logit = self.calibration.log_odds / np.maximum(gap, 1e-12)[:, None]
        self.count = extended.sum(1)
        self._row_scale = self._make_row_scale()
        self._blocks = self._make_blocks()
        norm = np.sqrt(temperature / pattern_temperature[self.pattern])
        self._norm = norm
        self._set_pair_weights(correlation)

    # --- construction --------------------------------------------------------------------------

    def _make_class(self, span: slice, own: int, extended: Array) -> RowClass:
        keys = as_slice(np.flatnonzero(extended[own]))
        members = np.append(np.arange(span.start, span.stop), own)
        kernel = self._kernel[window(keys, keys)]
        stats = self.rows
        weights = mean_attention(kernel, extended[members][:, keys], stats, members, self._tau)
        response = np.zeros_like(kernel)
        if len(kernel) > 1:
            pull = stats.own_response[own]
            tau = self._tau * stats.temperature[own] * stats.softening[own]
            guess = np.exp(pull * tau * (kernel - kernel.max(1, keepdims=True)))
            exponent = pull * tau / max(stats.strength[own], 1e-6) ** 2
            response = self_overlap(kernel, weights[-1], guess, exponent)
        return RowClass(span, keys, own, weights[:-1], weights[-1], response)

    def _make_row_scale(self) -> Array:
        """(r, P): square root of a pattern's exact excess over its class's at the nodes, before P_i
        (see `contractions`) removes the mean.

        Inverse numbers of keys add up over pairs of keys that move together: a row of weights w
        in a class of weights w' has

            1/n_e = 1/n_e(class) + sum_jl w_j (w_l - w'_l) (C_jl - b)^2 / (C_jj - b)^2,

        which is 1/n - 1/n' for an exchangeable kernel.
        """
        stats, patterns, count = self.rows, len(self.group), self.count
        rho = np.where(np.abs(self._nodes.rho) < RHO_MIN, RHO_MIN, self._nodes.rho)
        leader = patterns + self.group
        relative = stats.temperature[:patterns] / stats.temperature[leader]
        inverse = 1.0 / stats.keys[leader]
        for group in self.classes:
            kernel = self._kernel[window(group.keys, group.keys)]
            unshared = max(stats.unshared[group.row], 1e-12)
            together = 1.0 + (kernel - np.diagonal(kernel).mean()) / unshared
            lacking = group.weights - group.own_weights
            inverse[group.patterns] += ((group.weights @ together**2) * lacking).sum(1)

        def excess(theta: Array, inverse_keys: Array) -> Array:
            keys = 1.0 / np.clip(inverse_keys, 1e-8, 1.0 - 1e-9)
            exact = exact_rows.pairs(exact_rows.tabulated(theta), keys, rho)
            return np.asarray((np.transpose(exact.overlap) * keys - 1.0) / (1.0 - 1.0 / keys))

        own = excess(stats.theta[leader] * relative, inverse)
        shared = excess(stats.theta[patterns:], 1.0 / stats.keys[patterns:])[:, self.group]
        trivial = (count[:patterns] < 1.5) | (np.abs(shared) < 1e-14)
        ratio = np.where(trivial, 1.0, own / np.where(trivial, 1.0, shared))
        return np.sqrt(np.maximum(ratio, 0.0))

    def _make_blocks(self) -> list[Block]:
        exponents = self._exponent_per_logit * self._tau
        exponents = exponents * self.rows.temperature[len(self.group) :, None]
        groups = [index for index, group in enumerate(self.classes) if len(group.own_weights) > 1]
        blocks = []
        for position, one in enumerate(groups):
            first = self.classes[one]
            onward = first.response @ self._kernel[first.keys]
            for two in groups[position:]:
                second = self.classes[two]
                projected = onward[:, second.keys] @ second.response.T
                exponent = geometric_mean(exponents[one], exponents[two])[:, None, None]
                joint = exponent.astype(np.float32) * projected.astype(np.float32)
                np.exp(np.minimum(joint, EXPONENT_MAX, out=joint), out=joint)
                joint = balanced(
                    joint,
                    first.own_weights.astype(np.float32),
                    second.own_weights.astype(np.float32),
                    3,
                )
                joint -= 1.0
                sums = PairSum.of(joint, first.weights, second.weights)
                blocks.append(Block(first, second, sums))
        return blocks

    def _set_pair_weights(self, correlation: Array) -> None:
        """For every pair of rows, interpolation weights (r, L, L) of the excess and of its
        derivative, and the key and query factors (L, L)."""
        value, slope = self._nodes.basis(correlation)
        scale = self._row_scale[:, self.pattern] * self._norm
        scale = scale[:, :, None] * scale[:, None, :]
        self._value_weight = scale * value
        self._slope_weight = scale * slope
        group = self.group[self.pattern]
        sharpened = self._sharpening(correlation)
        factors = []
        for values in (self.calibration.key, self.calibration.query):
            factor = np.einsum("rij,ir->ij", value, values[group])
            factors.append(0.5 * (factor + factor.T) * sharpened)
        self._key_factor, self._query_factor = factors

    def _sharpening(self, correlation: Array) -> Array | float:
        """Growth of dF/drho beyond the tables.

        At rho = 1 a hard softmax is sensitive only where two logits nearly tie, E tr J^2 of order
        theta^{-1/2}; correlations with theta (1 - rho) >> 1 have reached their limit.
        """
        stats = self.rows
        if not np.any(stats.logit_variance > stats.theta):
            return 1.0
        inside = np.sqrt(stats.theta[self.pattern])
        beyond = np.sqrt(np.maximum(stats.logit_variance, stats.theta)[self.pattern])
        apart = 1.0 - correlation
        inner = 1.0 / np.outer(inside, inside) + apart
        return np.asarray(np.sqrt(inner / (1.0 / np.outer(beyond, beyond) + apart)))

    # --- sums over pairs of rows ---------------------------------------------------------------

    def _is_identity(self) -> bool:
        return len(self.group) == len(self.pattern) and bool(np.all(np.diff(self.pattern) == 1))

    def _compress(self, pairs: Array) -> Array:
        """(..., P, P) sums over the rows of every two patterns."""
        if self._is_identity():
            return pairs
        member = np.equal.outer(np.arange(len(self.group)), self.pattern).astype(np.float64)
        return np.asarray(member @ pairs @ member.T)

    def gather(self, kernel: Array) -> Array:
        """(3, L, L): tr((F_ii' - w_i w_i'^T) kernel^T), the key path's and the query path's
        multiple of its derivative in the correlation of i and i'."""
        patterns = len(self.group)
        values = np.zeros((len(self._nodes.rho), patterns, patterns))
        for first, second, sums in self._blocks:
            part = sums.gather(kernel[window(first.keys, second.keys)])
            values[:, first.patterns, second.patterns] = part
            if first is not second:
                values[:, second.patterns, first.patterns] = part.swapaxes(1, 2)
        if not self._is_identity():
            values = values[:, self.pattern[:, None], self.pattern]
        slope = np.einsum("rij,rij->ij", self._slope_weight, values)
        total = np.stack(
            [
                np.einsum("rij,rij->ij", self._value_weight, values),
                self._key_factor * slope,
                self._query_factor * slope,
            ]
        )
        return np.asarray(0.5 * (total + total.swapaxes(1, 2)))

    def spread(self, gradient: Array) -> Array:
        """(2, L, L): sum_ii' G_ii' times F_ii' - w_i w_i'^T, and times the key path's multiple of
        its derivative."""
        sloped = gradient * self._key_factor
        weights = self._compress(
            np.stack([gradient * self._value_weight, sloped * self._slope_weight])
        )
        total = np.zeros((2, *self._kernel.shape))
        for first, second, sums in self._blocks:
            part = sums.spread(weights[:, :, first.patterns, second.patterns])
            total[window(first.keys, second.keys)] += part
            if first is not second:
                total[window(second.keys, first.keys)] += part.swapaxes(1, 2)
        return total

    @property
    def cross(self) -> float:
        """Correlation of the key and value paths per unit of the key path, averaged over rows."""
        return float(self.calibration.cross[self.group[self.pattern]].mean())

    # --- single rows ---------------------------------------------------------------------------

    @property
    def unshared(self) -> Array:
        """(L,) what a row's keys do not share: C_jj - b of its reference row."""
        return np.asarray(self.rows.unshared[self.pattern])

    @property
    def softening(self) -> Array:
        """(L,) 1, and below 1 for rows beyond the tables: the factor on their logit variance."""
        return np.asarray(self.rows.softening[self.pattern])

    @property
    def logit_square(self) -> Array:
        """(2, L): E sum_j a_ij (t_ij^2 - 1) and E sum_j a_ij^2 (t_ij^2 - 1).

        t_ij is the component of token j along the direction that row i looks in, in units of its
        root mean square: attended tokens point that way.
        """
        stats = self.rows
        once = stats.unshared_fraction * stats.logit_square
        twice = stats.unshared_fraction * (stats.weighted_logit_square - stats.sum_square)
        return np.stack([once[self.pattern], twice[self.pattern]])

    @functools.cached_property
    def squares(self) -> Array:
        """(L, L) E a_ij^2."""
        compact = np.zeros((len(self.group), len(self._kernel)))
        for first, second, sums in self._blocks:
            if first is second:
                diagonal = np.diagonal(sums.excess[0]) - 2.0 * sums.left[0]
                diagonal = diagonal + np.diagonal(sums.both[0])[:, None]
                scale = self._row_scale[0, first.patterns, None] ** 2
                square = first.weights**2 * np.maximum(1.0 + scale * diagonal, 0.0)
                compact[window(first.patterns, first.keys)] = square
        single = [group for group in self.classes if len(group.own_weights) == 1]
        for group in single:
            compact[window(group.patterns, group.keys)] = 1.0
        return compact[self.pattern]

    def joint(self, group: RowClass) -> Array:
        """(n, n) F/(w w^T) of a class's own row with itself, symmetric."""
        for first, second, sums in self._blocks:
            if first is group and second is group:
                return np.asarray(1.0 + 0.5 * (sums.excess[0] + sums.excess[0].T))
        return np.ones((1, 1))

    @functools.cached_property
    def exponent_slopes(self) -> Array:
        """(classes,) dbeta/drho at rho = 1, per unit of logit scale and query norm."""
        slope = self._nodes.basis(np.ones(1))[1][:, 0]
        return np.asarray(self._exponent_per_logit @ slope)


def _means(values: Array, group: Indices) -> Array:
    return np.asarray(np.bincount(group, values) / np.bincount(group))


def geometric_mean(first: Array, second: Array) -> Array:
    """Of two numbers of one sign, with that sign; the arithmetic mean of others."""
    product = first * second
    size = np.sign(first) * np.sqrt(np.maximum(product, 0.0))
    return np.where(product > 0.0, size, 0.5 * (first + second))
