"""The joint law of two attention rows on an arbitrary token kernel.

`OverlapClosure` makes the laws of all rows: exact to first order in the logits given mean attention
w and A_jl = E[a_j a_l]/E a_j, exact in everything for exchangeable kernels, an approximation
otherwise. Attention dropout adds E[J D J] with D = diag(C_jj):

    E[J D J] = P_i N P_i,    N = (F/(w w^T)) o [(1-A) D (1-A)^T + u 1^T + 1 u^T]

at rho = 1, where u keeps the marginals of F, and the trace is that of the exchangeable row with the
same number of keys and E sum a^2. `width_terms` is what finite widths add at order 1/d_model. Where
delta is the deficit of the norms' fluctuation and u the fraction of a key that it does not share,

    the same token's overlap keeps e^{-x (1 + rho)}, x = u^2 delta theta (2 P2 - 5 P3 + 3 P4)/P2;
    that of different tokens that both attend to falls by u (1 + u) delta theta (1 - 3 P2 + 2 P3);
    the keys' own variance gives back 2 (1 - u)^2 delta dO/dlog theta.

See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from . import exact_rows
from .finite_rows import Widths, calibrate, nodes_for
from .joint_laws import ALIKE, Sums, own_response
from .logits import Logits, RowClass, as_slice, find_patterns, group_patterns, window
from .row_groups import JointLaws, PairWeights, row_scale, single
from .row_statistics import AttentionRows, mean_attention, rows_of_kernel

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


def _shared(patterns: Array, biased: bool) -> Array:
    """The prior of a class's own row: over every key that its patterns attend to."""
    if biased:
        return np.asarray(patterns.mean(0))
    union = (patterns > 0.0).any(0)
    return np.asarray(union / union.sum())


def _make_class(
    span: slice, leader: int, extended: Array, stats: AttentionRows, kernel: Array, scale: float
) -> RowClass:
    keys = as_slice(np.flatnonzero(extended[leader]))
    members = np.append(np.arange(span.start, span.stop), leader)
    inside = kernel[window(keys, keys)]
    prior = extended[members][:, keys]
    weights = mean_attention(inside, prior, stats, members, scale)
    response = np.zeros_like(inside)
    if len(inside) > 1:
        one, every, ones = weights[-1:], slice(0, len(inside)), np.ones((1, len(inside)))
        aims = ones[..., None]
        sums = Sums.of(ALIKE, (every, every), (one, one), (one, one), (aims, aims))
        pull = (stats.odds * scale * stats.temperature * stats.held)[leader]
        given = np.diagonal(inside), [inside[None]], [ones], ones > 0.0, prior[-1:]
        of_row = (np.array([x]) for x in (pull, stats.strength[leader], stats.step[leader]))
        ((excess, pairs),), _ = own_response(sums, *given, *of_row)
        response = pairs[0] + np.diag(excess[0])
    return RowClass(span, keys, leader, weights[:-1], weights[-1], response)


def _means(values: Array, group: Indices) -> Array:
    return np.asarray(np.bincount(group, values) / np.bincount(group))


class OverlapClosure:
    """Joint laws of all pairs of rows of one attention layer.

    Attributes:
        rows: statistics of the patterns, then of the classes' own rows.
        pattern: (Lq,) the pattern of every row.
        group: (P,) the class of every pattern.
        weights: (Lq, Lk) mean attention.
        calibration: what exact rows say about every class.
        pairs: what the joint laws are read at.
    """

    def __init__(self, logits: Logits, widths: Widths) -> None:
        self.logits = logits
        norm = self._sort_rows()
        stats = self.rows
        correlation = logits.correlation()
        if logits.rotation is not None:
            correlation = np.minimum(correlation * logits.rotation.queries, 0.0)
        self._nodes = nodes = nodes_for(correlation, float(stats.theta.max()))
        leaders = slice(len(self.group), None)
        self.calibration = calibrate(
            stats.theta[leaders],
            stats.keys[leaders],
            stats.unshared_fraction[leaders],
            stats.unshared_by_mean[leaders],
            nodes,
            widths,
        )
        variance = np.maximum(stats.logit_variance[leaders], exact_rows.THETA_LEAST)
        gap = variance * stats.strength[leaders] ** 2
        self._exponent_per_logit = self.calibration.log_odds / np.maximum(gap, 1e-12)[:, None]
        exponents = self._exponent_per_logit * logits.scale * stats.temperature[leaders, None]
        self._row_scale = row_scale(stats, self.group, self.classes, logits.within, nodes)
        self._laws = JointLaws(self.classes, self.pattern, exponents, nodes.slopes, logits)
        self.pairs = PairWeights.of(
            logits,
            stats,
            self.pattern,
            self.group,
            self._row_scale[:, self.pattern] * norm,
            nodes,
            self.calibration,
            widths,
            self._turned(logits.values),
        )

    def _sort_rows(self) -> Array:
        """Patterns, numbered class by class; (Lq,) norm of a row's query over its pattern's."""
        logits, temperature, kernel = self.logits, self.logits.temperature, self.logits.within
        first, pattern = find_patterns(logits.prior, temperature, logits.biased)
        groups = group_patterns(logits.prior[first], _means(temperature, pattern), logits.biased)
        order = np.concatenate(groups)
        pattern = np.argsort(order)[pattern]
        patterns = logits.prior[first[order]]
        pattern_temperature = _means(temperature, pattern)
        ends = np.cumsum([len(group) for group in groups])
        spans = [
            slice(int(end) - len(one), int(end)) for end, one in zip(ends, groups, strict=True)
        ]
        shared = [_shared(patterns[span], logits.biased) for span in spans]
        extended = np.vstack([patterns, *shared])
        means = [pattern_temperature[span].mean() for span in spans]
        self.rows = rows_of_kernel(
            kernel, extended, np.concatenate([pattern_temperature, means]), logits.scale
        )
        given = extended, self.rows, kernel, logits.scale
        classes = [_make_class(s, len(patterns) + k, *given) for k, s in enumerate(spans)]
        compact = np.zeros(patterns.shape)
        group = np.empty(len(patterns), dtype=np.intp)
        for index, one in enumerate(classes):
            compact[window(one.patterns, one.keys)] = one.weights
            group[one.patterns] = index
        self.pattern, self.group, self.classes = pattern, group, classes
        self.weights = compact[pattern]
        return np.asarray(np.sqrt(temperature / pattern_temperature[pattern]))

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

    @functools.cached_property
    def squares(self) -> Array:
        """(Lq, Lk) E a_ij^2."""
        compact = np.zeros((len(self.group), len(self.logits.values)))
        for block in self._laws.blocks:
            if block.with_itself:
                sums = block.overlap
                for index, (group, _) in enumerate(block.pairs):
                    diagonal = np.diagonal(sums.excess[index, 0]) - 2.0 * sums.left[index, 0]
                    diagonal = diagonal + np.diagonal(sums.both[index, 0])[:, None]
                    scale = self._row_scale[0, group.patterns, None] ** 2
                    square = group.weights**2 * np.maximum(1.0 + scale * diagonal, 0.0)
                    compact[window(group.patterns, group.keys)] = square
        for group in self.classes:
            if len(group.leader_weights) == 1:
                compact[window(group.patterns, group.keys)] = 1.0
        return compact[self.pattern]

    # --- dropped attention ---------------------------------------------------------------------

    def respond_to(self, variance: Array) -> None:
        """Form E[J D J], D = diag(C_jj) of (Lk,) `variance` C_jj, for the two methods below."""
        self._laws.respond_to(variance)
        members = np.unique(self.pattern, return_index=True)[1]
        trace = exact_rows.jacobian_square(
            self.squares[members].sum(1), self.rows.count[: len(self.group)]
        )
        trace = trace * (self.weights[members] @ variance)  # tr J D J, were D uniform
        bare = self._of_noise(np.eye(len(variance)))[members]
        usable = bare > 1e-300
        scale = np.where(usable, trace / np.where(usable, bare, 1.0), 0.0)
        self._noise_scale = scale[self.pattern]

    def gather_noise(self, kernel: Array) -> Array:
        """(Lq,): tr(E[J D J] kernel) of every row in the query path."""
        factor = self.calibration.noise_query[self.group[self.pattern]]
        return np.asarray(factor * self._noise_scale * self._of_noise(kernel))

    def spread_noise(self, row_weights: Array) -> Array:
        """(2, Lk, Lk): sum_i h_i E[J_i D J_i] in the key path and in its correlation with the value
        path, for (Lq,) weights h."""
        calibration, group = self.calibration, self.group[self.pattern]
        scale, given = single(self._noise_scale * row_weights)
        factors = np.stack([calibration.noise_key[group], calibration.noise_cross[group]])
        weights = np.zeros((2, 1, len(self.group), len(self.group)), dtype=np.float32)
        for total, factor in zip(weights[:, 0], factors, strict=True):
            np.add.at(total, (self.pattern, self.pattern), given * factor)
        return scale * self._laws.spread("noise", weights)

    def _of_noise(self, kernel: Array) -> Array:
        return np.diagonal(self._laws.gather("noise", kernel, 1)[0])


# --- finite width ---------------------------------------------------------------------------------


def width_terms(
    closure: OverlapClosure, widths: Widths, mean: Array, excess: Array, slope: Array
) -> tuple[Array, Array]:
    """Two (Lq, Lq): what O gains, and what the query path gains per unit of its gradient and of
    1/d_model.

    Args:
        mean: (Lq, Lq) overlap W C W^T of mean outputs.
        excess: (Lq, Lq) what the joint laws add to it.
        slope: (Lq, Lq) its derivative in the correlation of two queries.
    """
    logits, weights, pairs = closure.logits, closure.weights, closure.pairs
    calibration, leader_class = closure.calibration, closure.group[closure.pattern]
    rows, pattern, variance = closure.rows, closure.pattern, np.diagonal(logits.values)
    shift = weights @ variance - np.diagonal(mean + excess)
    if logits.keys is not logits.values:  # the row looks at the keys, and moves the values
        moved, looked = _unshared(weights, logits.values), _unshared(weights, logits.keys)
        shift = shift * toward_keys(moved, looked, weights @ variance)
    looking = logits.scale * _looking(weights, logits, shift)
    output = looking * logits.queries / widths.d_model
    if widths.deficit <= 0.0:
        return output, looking
    unshared = unshared_part(
        rows.keys[pattern], weights @ variance - np.diagonal(mean), (weights * weights).sum(1)
    )
    rooted = weights * np.sqrt(unshared)[:, None]
    every = np.arange(len(weights))
    of_pairs = (every[:, None], every[None, :]), pairs.correlation, pairs.growth
    stiff, against = calibration.stiffness[leader_class], calibration.against[leader_class]
    of_rows = stiff, against, rows.unshared_by_mean[pattern]
    held = rooted @ rooted.T
    output += fixed_norms(widths, *of_pairs, *of_rows, mean, excess, slope, held)
    return output, looking


def toward_keys(moved: Array, looked: Array, size: Array) -> Array:
    """(Lq,) factor on a row's shift where it looks at keys and moves values.

    Args:
        moved, looked: what the attended tokens' values do not share, and their keys.
        size: of the attended values.
    """
    usable = moved > 1e-9 * size
    return np.sqrt(np.where(usable, looked / np.where(usable, moved, 1.0), 0.0))


def of_shift(parts: Array, shift: Array) -> Array:
    """(Lq, Lk) the keys' parts of a row's shift, in proportion to these."""
    total = parts.sum(1)
    usable = np.abs(total) > 1e-300
    return np.asarray(parts * np.where(usable, shift / np.where(usable, total, 1.0), 0.0)[:, None])


def unshared_part(effective_keys: Array, unshared_sum: Array, square: Array) -> Array:
    """(Lq,) own part of a row's keys, those that move together counting as one: n_e of them, of
    which a row holds 1/n_e in common with itself. Rows of one key have nothing to fluctuate.

    Args:
        unshared_sum: w.diag(C) - w^T C w.
        square: sum_j w_j^2.
    """
    keys = np.maximum(effective_keys, 1.0)
    several = keys > 1.0 + 1e-6
    unshared = np.where(several, unshared_sum / np.where(several, keys - 1.0, 1.0), 0.0)
    return np.asarray(np.maximum(unshared, 0.0) / square)


def fixed_norms(
    widths: Widths,
    rows: tuple[Indices, Indices],
    correlation: Array,
    growth: Array,
    stiffness: Array,
    against: Array,
    unshared_by_mean: Array,
    mean: Array,
    excess: Array,
    slope: Array,
    held: Array,
) -> Array:
    """What tokens of fixed norm add to the output, for pairs of rows; see above.

    Args:
        rows: both indices of every pair.
        stiffness, against, unshared_by_mean: (Lq,) of every row.
        shared: what two rows have in common of the same tokens' own parts.
    """
    one, two = rows
    half = 0.5 * stiffness
    output = np.expm1(-(half[one] + half[two]) * (1.0 + correlation)) * (held + excess)
    half = 0.5 * against
    output -= (half[one] + half[two]) * (mean - held)
    shared = np.sqrt(2.0 * widths.deficit) * np.clip(1.0 - unshared_by_mean, 0.0, 1.0)
    return np.asarray(output + shared[one] * shared[two] * growth * slope)


def _unshared(weights: Array, kernel: Array) -> Array:
    """(Lq,) w.diag(C) - w^T C w, at least 0: what the attended tokens do not share."""
    unshared = weights @ np.diagonal(kernel) - np.einsum("ij,ij->i", weights @ kernel, weights)
    return np.asarray(np.maximum(unshared, 0.0))


def _looking(weights: Array, logits: Logits, shift: Array) -> Array:
    """(Lq, Lq) products of two rows' shifts, turned where positions are rotated: a key's part
    of the shift, w_ij (C_jj - sum_l w_il C_lj), turns with its position."""
    rotation = logits.rotation
    if rotation is None:
        return np.outer(shift, shift)
    parts = weights * (np.diagonal(logits.values) - weights @ logits.values)
    turned = of_shift(parts, shift) @ np.exp(1j * rotation.key_angles)
    turned *= np.exp(-1j * rotation.query_angles)
    return np.asarray(np.real((turned * rotation.shares) @ turned.conj().T))
