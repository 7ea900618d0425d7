"""The joint law of two attention rows on an arbitrary token kernel.

With logits of covariance tau Cq_ii' C_jl, the matrix F(rho)_jl = E a_ij a_i'l depends on two rows
only through the correlation rho of their queries and through their supports, and Price's theorem
gives dF/drho = tau E[J C J'] with J = diag(a) - a a^T. Everything attention does to a kernel
follows from F. To first order in rho, exactly,

    F = w w'^T + rho tau Wd (1 - A) C (1 - A')^T Wd',      A_jl = E[a_j a_l]/E a_j,  Wd = diag(w),

since E J = Wd (1 - A). The closure exponentiates this and keeps the marginals:

    F proportional to w_j w'_l exp(beta(rho) [(1 - A) C (1 - A')^T]_jl), Sinkhorn scaled to w, w',

with A = F(1)/w self-consistent and beta(rho) fixed by exact exchangeable rows (`calibration`). It
is exact to first order given w and A, exact in everything for exchangeable kernels, and otherwise
an approximation whose errors are measured in `attention.KernelAttention`.

Where positions are rotated, rows i and i' meet C times rho(D) rho(delta), treated as above, and
a remainder (`rotation`) that is added to first order, times the growth of an exchangeable row's
response from correlation 0 to that of the two rows.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from moments.kernels import exact_rows
from moments.kernels.balance import self_overlap
from moments.kernels.blocks import Block, by_shape
from moments.kernels.calibration import calibrate
from moments.kernels.logits import Logits
from moments.kernels.nodes import nodes_for
from moments.kernels.pair_weights import PairWeights, geometric_mean, row_scale
from moments.kernels.row_classes import (
    RowClass,
    as_slice,
    find_patterns,
    group_patterns,
    window,
)
from moments.kernels.row_statistics import mean_attention, row_statistics
from moments.kernels.widths import Widths

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


class OverlapClosure:
    """Joint laws of all pairs of rows of one attention layer.

    Attributes:
        logits: of the layer.
        rows: reference statistics of the patterns, then of the classes' own rows.
        pattern: (Lq,) the pattern of every row.
        group: (P,) the class of every pattern.
        classes: all classes.
        calibration: what exact rows say about every class.
        weights: (Lq, Lk) mean attention.
    """

    def __init__(self, logits: Logits, widths: Widths) -> None:
        self.logits = logits
        self._kernel = logits.within
        temperature = logits.temperature
        first, pattern = find_patterns(logits.prior, temperature, logits.biased)
        groups = group_patterns(logits.prior[first], _means(temperature, pattern), logits.biased)
        order = np.concatenate(groups)  # patterns numbered class by class
        self.pattern = np.argsort(order)[pattern]
        patterns = logits.prior[first[order]]
        pattern_temperature = _means(temperature, self.pattern)
        ends = np.cumsum([len(group) for group in groups])
        spans = [
            slice(int(end) - len(group), int(end)) for end, group in zip(ends, groups, strict=True)
        ]
        extended = np.vstack([patterns, *[self._shared(patterns[span]) for span in spans]])
        means = [pattern_temperature[span].mean() for span in spans]
        self.rows = row_statistics(
            self._kernel, extended, np.concatenate([pattern_temperature, means]), logits.scale
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

        correlation = logits.correlation()
        if logits.rotation is not None:
            correlation = np.minimum(correlation * logits.rotation.queries, 0.0)
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
        self._row_scale = row_scale(stats, self.group, self.classes, self._kernel, self._nodes)
        self._blocks = self._make_blocks()
        norm = np.sqrt(temperature / pattern_temperature[self.pattern])
        self.pairs = PairWeights.of(
            logits,
            stats,
            self.pattern,
            self.group,
            self._row_scale[:, self.pattern] * norm,
            self._nodes,
            self.calibration,
            widths,
            self._turned(logits.values),
        )

    # --- construction --------------------------------------------------------------------------

    def _shared(self, patterns: Array) -> Array:
        """The prior of a class's own row: over every key that its patterns attend to."""
        if self.logits.biased:
            return np.asarray(patterns.mean(0))
        union = (patterns > 0.0).any(0)
        return np.asarray(union / union.sum())

    def _make_class(self, span: slice, own: int, extended: Array) -> RowClass:
        keys = as_slice(np.flatnonzero(extended[own]))
        members = np.append(np.arange(span.start, span.stop), own)
        kernel = self._kernel[window(keys, keys)]
        stats = self.rows
        prior = extended[members][:, keys]
        weights = mean_attention(kernel, prior, stats, members, self.logits.scale)
        response = np.zeros_like(kernel)
        if len(kernel) > 1:
            pull = stats.own_response[own]
            tau = self.logits.scale * stats.temperature[own] * stats.softening[own]
            guess = np.exp(pull * tau * (kernel - kernel.max(1, keepdims=True))) * prior[-1]
            exponent = pull * tau / max(stats.strength[own], 1e-6) ** 2
            response = self_overlap(kernel, weights[-1], guess, exponent)
        return RowClass(span, keys, own, weights[:-1], weights[-1], response)

    def _make_blocks(self) -> list[Block]:
        exponents = self._exponent_per_logit * self.logits.scale
        exponents = exponents * self.rows.temperature[len(self.group) :, None]
        derivative = self._nodes.basis(self._nodes.rho)[1]
        blocks = []
        for indices, pairs in by_shape(self.classes):
            one, two = np.transpose(indices)
            exponent = geometric_mean(exponents[one], exponents[two])
            blocks.append(Block.of(pairs, exponent, exponent @ derivative, self.logits))
        return blocks

    # --- sums over pairs of rows ---------------------------------------------------------------

    def _is_identity(self) -> bool:
        return len(self.group) == len(self.pattern) and bool(np.all(np.diff(self.pattern) == 1))

    def _compress(self, pairs: Array) -> Array:
        """(..., P, P) sums over the rows of every two patterns."""
        if self._is_identity():
            return pairs
        member = np.equal.outer(np.arange(len(self.group)), self.pattern).astype(np.float64)
        return np.asarray(member @ pairs @ member.T)

    def _expand(self, values: Array) -> Array:
        """(..., Lq, Lq) values of the rows' patterns."""
        if self._is_identity():
            return values
        return np.asarray(values[..., self.pattern[:, None], self.pattern])

    def _gathered(self, law: str, kernel: Array, count: int, parity: Array | None = None) -> Array:
        """(r, Lq, Lq): tr(P_i g_r P_i' X^T) of one of the blocks' laws, for X (Lk, Lk) or one X
        (r, Lk, Lk) for every g_r."""
        values = np.zeros((count, len(self.group), len(self.group)))
        for block in self._blocks:
            part = getattr(block, law).gather(block.of_keys(kernel))
            block.put_patterns(values, part, parity)
        return self._expand(values)

    def _turned(self, kernel: Array) -> Array | None:
        """(1 + t, Lq, Lq): tr(E J_i X_t E J_i' kernel^T) for each X_t of `Rotation.kernels`."""
        rotation = self.logits.rotation
        if rotation is None:
            return None
        parity = np.append(1.0, rotation.parity)
        return self._gathered("turned", kernel, len(parity), parity)

    def gather(self, kernel: Array) -> tuple[Array, Array]:
        """Two (Lq, Lq): tr((F_ii' - w_i w_i'^T) kernel^T), and for the values' kernel its
        derivative in the correlation of i and i'."""
        pairs = self.pairs
        values = self._gathered("overlap", kernel, len(self._nodes.rho))
        excess = np.einsum("rij,rij->ij", pairs.value, values)
        slope = np.einsum("rij,rij->ij", pairs.slope, values) * pairs.turn
        rest = self._turned(kernel)
        if pairs.terms is not None and rest is not None:
            rest = np.einsum("tij,tij->ij", pairs.terms, rest)
            excess, slope = excess + pairs.bare * rest, slope + rest
        return 0.5 * (excess + excess.T), 0.5 * (slope + slope.T)

    def gather_keys(self, kernel: Array) -> Array:
        """(Lq, Lq): transpose of the key path and of its correlation with the value path."""
        pairs, rotation = self.pairs, self.logits.rotation
        count, both = len(self._nodes.rho), pairs.key + pairs.cross
        if self.logits.aligned:
            values = self._gathered("overlap", kernel, count)
            total = both * np.einsum("rij,rij->ij", pairs.slope, values)
            return np.asarray(0.5 * (total + total.T))
        turned = kernel if rotation is None else kernel * rotation.keys
        values = self._gathered("response", turned, count)
        total = both * np.einsum("rij,rij->ij", pairs.value, values)
        if pairs.terms is not None and rotation is not None:
            met = kernel * rotation.key_terms
            rest = self._gathered("plain", met, len(met), rotation.parity)
            total = total + pairs.bare * np.einsum("tij,tij->ij", pairs.terms[1:], rest)
        return np.asarray(0.5 * (total + total.T))

    def spread(self, gradient: Array) -> Array:
        """(3, Lk, Lk): sum_ii' G_ii' times F_ii' - w_i w_i'^T, and its derivative times what the
        key path and the correlation of the key and value paths have of it."""
        pairs, rotation = self.pairs, self.logits.rotation
        total = np.zeros((3, *self._kernel.shape))
        value = (gradient * pairs.value)[None]
        driven = gradient * np.stack([pairs.key, pairs.cross])
        if self.logits.aligned:
            weights = self._compress(np.concatenate([value, driven[:, None] * pairs.slope]))
            for block in self._blocks:
                block.add_to_keys(total, block.overlap.spread(block.of_patterns(weights)))
            return total
        weights = self._compress(value)
        onward = self._compress(driven[:, None] * pairs.value)
        for block in self._blocks:
            assert block.response is not None
            block.add_to_keys(total[:1], block.overlap.spread(block.of_patterns(weights)))
            block.add_to_keys(total[1:], block.response.spread(block.of_patterns(onward)))
        if rotation is not None:
            total[1:] *= rotation.keys
        if pairs.terms is not None and rotation is not None:
            terms = self._compress(gradient * pairs.bare * pairs.terms)
            for block in self._blocks:
                assert block.turned is not None
                assert block.plain is not None
                part = block.of_patterns(terms)
                block.add_to_keys(total[:1], block.turned.spread(part[:, None]))
                keys = block.plain.spread(part[:, 1:, None]) * block.of_keys(rotation.key_terms)
                block.add_to_keys(total[1:2], keys.sum(1, keepdims=True))
        return total

    # --- single rows ---------------------------------------------------------------------------

    @property
    def effective_keys(self) -> Array:
        """(Lq,) n_e of a row's reference."""
        return np.asarray(self.rows.keys[self.pattern])

    @property
    def unshared_fraction(self) -> Array:
        """(Lq,) the fraction of a key that it does not share with the row's others."""
        return np.asarray(self.rows.unshared_fraction[self.pattern])

    @property
    def softening(self) -> Array:
        """(Lq,) 1, and below 1 for rows beyond the tables: the factor on their logit variance."""
        return np.asarray(self.rows.softening[self.pattern])

    @functools.cached_property
    def squares(self) -> Array:
        """(Lq, Lk) E a_ij^2."""
        compact = np.zeros((len(self.group), len(self._kernel)))
        for block in self._blocks:
            if block.own:
                sums = block.overlap
                for index, (group, _) in enumerate(block.pairs):
                    diagonal = np.diagonal(sums.excess[index, 0]) - 2.0 * sums.left[index, 0]
                    diagonal = diagonal + np.diagonal(sums.both[index, 0])[:, None]
                    scale = self._row_scale[0, group.patterns, None] ** 2
                    square = group.weights**2 * np.maximum(1.0 + scale * diagonal, 0.0)
                    compact[window(group.patterns, group.keys)] = square
        for group in self.classes:
            if len(group.own_weights) == 1:
                compact[window(group.patterns, group.keys)] = 1.0
        return compact[self.pattern]

    def own_joints(self) -> dict[int, Array]:
        """(n, n) F/(w w^T) of every class's own row with itself, symmetric, by the row's index."""
        joints = {}
        for block in self._blocks:
            if block.own:
                for (group, _), excess in zip(block.pairs, block.overlap.excess, strict=True):
                    joints[group.row] = np.asarray(1.0 + 0.5 * (excess[0] + excess[0].T))
        return joints

    @functools.cached_property
    def exponent_slopes(self) -> Array:
        """(classes,) dbeta/drho at rho = 1, per unit of logit scale and query norm."""
        slope = self._nodes.basis(np.ones(1))[1][:, 0]
        return np.asarray(self._exponent_per_logit @ slope)


def _means(values: Array, group: Indices) -> Array:
    return np.asarray(np.bincount(group, values) / np.bincount(group))
