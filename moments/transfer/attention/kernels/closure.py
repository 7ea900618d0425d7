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

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import exact_rows
from .balance import self_overlap
from .calibration import calibrate, nodes_for
from .contractions import single
from .finite_rows import Widths
from .joint_laws import JointLaws
from .logits import Logits
from .pair_weights import PairWeights, row_scale
from .row_classes import RowClass, as_slice, find_patterns, group_patterns, window
from .row_statistics import RowStatistics, mean_attention, row_statistics

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


class RowLayout(NamedTuple):
    """The rows of one layer.

    Attributes:
        statistics: of the patterns, then of the classes' own rows.
        pattern: (Lq,) the pattern of every row.
        group: (P,) the class of every pattern.
        classes: all classes.
        weights: (Lq, Lk) mean attention.
        norm: (Lq,) norm of a row's query over its pattern's.
    """

    statistics: RowStatistics
    pattern: Indices
    group: Indices
    classes: list[RowClass]
    weights: Array
    norm: Array

    @classmethod
    def of(cls, logits: Logits) -> RowLayout:
        """Sort the rows of a layer; patterns are numbered class by class."""
        temperature, kernel = logits.temperature, logits.within
        first, pattern = find_patterns(logits.prior, temperature, logits.biased)
        groups = group_patterns(logits.prior[first], _means(temperature, pattern), logits.biased)
        order = np.concatenate(groups)
        pattern = np.argsort(order)[pattern]
        patterns = logits.prior[first[order]]
        pattern_temperature = _means(temperature, pattern)
        ends = np.cumsum([len(group) for group in groups])
        spans = [
            slice(int(end) - len(group), int(end)) for end, group in zip(ends, groups, strict=True)
        ]
        shared = [_shared(patterns[span], logits.biased) for span in spans]
        extended = np.vstack([patterns, *shared])
        means = [pattern_temperature[span].mean() for span in spans]
        statistics = row_statistics(
            kernel, extended, np.concatenate([pattern_temperature, means]), logits.scale
        )
        classes = [
            _make_class(span, len(patterns) + index, extended, statistics, kernel, logits.scale)
            for index, span in enumerate(spans)
        ]
        compact = np.zeros(patterns.shape)
        group = np.empty(len(patterns), dtype=np.intp)
        for index, one in enumerate(classes):
            compact[window(one.patterns, one.keys)] = one.weights
            group[one.patterns] = index
        norm = np.sqrt(temperature / pattern_temperature[pattern])
        return cls(statistics, pattern, group, classes, compact[pattern], norm)


def _shared(patterns: Array, biased: bool) -> Array:
    """The prior of a class's own row: over every key that its patterns attend to."""
    if biased:
        return np.asarray(patterns.mean(0))
    union = (patterns > 0.0).any(0)
    return np.asarray(union / union.sum())


def _make_class(
    span: slice, own: int, extended: Array, stats: RowStatistics, kernel: Array, scale: float
) -> RowClass:
    keys = as_slice(np.flatnonzero(extended[own]))
    members = np.append(np.arange(span.start, span.stop), own)
    inside = kernel[window(keys, keys)]
    prior = extended[members][:, keys]
    weights = mean_attention(inside, prior, stats, members, scale)
    response = np.zeros_like(inside)
    if len(inside) > 1:
        pull = stats.odds[own]
        tau = scale * stats.temperature[own] * stats.held[own]
        guess = np.exp(pull * tau * (inside - inside.max(1, keepdims=True))) * prior[-1]
        exponent = pull * tau / max(stats.strength[own], 1e-6) ** 2
        response = self_overlap(inside, weights[-1], guess, exponent)
    return RowClass(span, keys, own, weights[:-1], weights[-1], response)


def _means(values: Array, group: Indices) -> Array:
    return np.asarray(np.bincount(group, values) / np.bincount(group))


class OverlapClosure:
    """Joint laws of all pairs of rows of one attention layer.

    Attributes:
        logits: of the layer.
        rows, pattern, group, classes, weights: as in `RowLayout`, `rows` its statistics.
        calibration: what exact rows say about every class.
        pairs: what the joint laws are read at.
    """

    def __init__(self, logits: Logits, widths: Widths) -> None:
        self.logits = logits
        layout = RowLayout.of(logits)
        self.rows = stats = layout.statistics
        self.pattern, self.group, self.classes = layout.pattern, layout.group, layout.classes
        self.weights = layout.weights
        correlation = logits.correlation()
        if logits.rotation is not None:
            correlation = np.minimum(correlation * logits.rotation.queries, 0.0)
        self._nodes = nodes = nodes_for(correlation, float(stats.theta.max()))
        own = slice(len(self.group), None)
        self.calibration = calibrate(
            stats.theta[own],
            stats.keys[own],
            stats.unshared_fraction[own],
            stats.own_fraction[own],
            nodes,
            widths,
        )
        variance = np.maximum(stats.logit_variance[own], exact_rows.THETA_LEAST)
        gap = variance * stats.strength[own] ** 2
        self._exponent_per_logit = self.calibration.log_odds / np.maximum(gap, 1e-12)[:, None]
        self._row_scale = row_scale(stats, self.group, self.classes, logits.within, nodes)
        exponents = self._exponent_per_logit * logits.scale * stats.temperature[own, None]
        derivative = nodes.basis(nodes.rho)[1]
        self._laws = JointLaws(self.classes, self.pattern, exponents, derivative, logits)
        self.pairs = PairWeights.of(
            logits,
            stats,
            self.pattern,
            self.group,
            self._row_scale[:, self.pattern] * layout.norm,
            nodes,
            self.calibration,
            widths,
            self._turned(logits.values),
        )

    # --- sums over pairs of rows ---------------------------------------------------------------

    def _turned(self, kernel: Array) -> Array | None:
        """(1 + t, Lq, Lq): tr(E J_i X_t E J_i' kernel^T) for each X_t of `Rotation.kernels`."""
        rotation = self.logits.rotation
        if rotation is None:
            return None
        parity = np.append(1.0, rotation.parity)
        return self._laws.gather("turned", kernel, len(parity), parity)

    def gather(self, kernel: Array) -> tuple[Array, Array]:
        """Two (Lq, Lq): tr((F_ii' - w_i w_i'^T) kernel^T), and for the values' kernel its
        derivative in the correlation of i and i'."""
        pairs = self.pairs
        values = self._laws.gather("overlap", kernel, len(self._nodes.rho))
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
            values = self._laws.gather("overlap", kernel, count)
            total = both * np.einsum("rij,rij->ij", pairs.slope, values)
            return np.asarray(0.5 * (total + total.T))
        turned = kernel if rotation is None else kernel * rotation.keys
        values = self._laws.gather("response", turned, count)
        total = both * np.einsum("rij,rij->ij", pairs.value, values)
        if pairs.terms is not None and rotation is not None:
            met = kernel * rotation.key_terms
            rest = self._laws.gather("plain", met, len(met), rotation.parity)
            total = total + pairs.bare * np.einsum("tij,tij->ij", pairs.terms[1:], rest)
        return np.asarray(0.5 * (total + total.T))

    def spread(self, gradient: Array) -> Array:
        """(3, Lk, Lk): sum_ii' G_ii' times F_ii' - w_i w_i'^T, and its derivative times what the
        key path and the correlation of the key and value paths have of it."""
        pairs, rotation, laws = self.pairs, self.logits.rotation, self._laws
        scale, given = single(gradient)
        value = (given * pairs.value)[None]
        driven = given * np.stack([pairs.key, pairs.cross]).astype(np.float32)
        if self.logits.aligned:
            weights = np.concatenate([value, driven[:, None] * pairs.slope])
            return scale * laws.spread("overlap", laws.compressed(weights))
        onward = laws.compressed(driven[:, None] * pairs.value)
        total = np.concatenate(
            [laws.spread("overlap", laws.compressed(value)), laws.spread("response", onward)]
        )
        if rotation is not None:
            total[1:] *= rotation.keys
        if pairs.terms is not None and rotation is not None:
            terms = laws.compressed(given * (pairs.bare * pairs.terms).astype(np.float32))
            total[0] += laws.spread("turned", terms[None])[0]
            plain = laws.spread("plain", terms[1:, None], rotation.parity)
            total[1] += np.einsum("tij,tij->ij", plain, rotation.key_terms)
        return scale * total

    # --- single rows ---------------------------------------------------------------------------

    @property
    def effective_keys(self) -> Array:
        """(Lq,) n_e of a row's reference."""
        return np.asarray(self.rows.keys[self.pattern])

    @property
    def own_fraction(self) -> Array:
        """(Lq,) the fraction of a key that it does not share with the row's others."""
        return np.asarray(self.rows.own_fraction[self.pattern])

    @functools.cached_property
    def squares(self) -> Array:
        """(Lq, Lk) E a_ij^2."""
        compact = np.zeros((len(self.group), len(self.logits.values)))
        for block in self._laws.blocks:
            if block.own:
                sums = block.overlap
                for index, (wide, _) in enumerate(block.pairs):
                    group = wide.source
                    diagonal = np.diagonal(sums.excess[index, 0]) - 2.0 * sums.left[index, 0]
                    diagonal = diagonal + np.diagonal(sums.both[index, 0])[:, None]
                    diagonal = diagonal[wide.own_patterns, wide.own_keys]
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
        for block in self._laws.blocks:
            if block.own:
                for (wide, _), excess in zip(block.pairs, block.overlap.excess, strict=True):
                    inside = excess[0, wide.own_keys, wide.own_keys].astype(np.float64)
                    joints[wide.source.row] = 1.0 + 0.5 * (inside + inside.T)
        return joints

    @functools.cached_property
    def exponent_slopes(self) -> Array:
        """(classes,) dbeta/drho at rho = 1, per unit of logit scale and query norm."""
        slope = self._nodes.basis(np.ones(1))[1][:, 0]
        return np.asarray(self._exponent_per_logit @ slope)
