"""Softmax attention on an arbitrary token kernel, at initialisation, by token.

Given mean attention w and A_jl = E[a_j a_l]/E a_j, the joint laws of rows are exact to first order
in the logits, exact for exchangeable kernels, and an approximation otherwise. Rows with nearly the
same keys form a class with one A and one joint law at each node of their queries' correlation.
Attention dropout adds E[J D J] with D = diag(C_jj):

    E[J D J] = P_i N P_i,    N = (F/(w w^T)) o [(1-A) D (1-A)^T + u 1^T + 1 u^T]

at rho = 1, with u such that F keeps its marginals, scaled to the trace of the exchangeable row with
the same number of keys and E sum a^2. See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ....engine.classes import Matrix
from ....errors import domain_error
from . import exact_rows
from .finite_rows import Calibration, Widths, calibrate, nodes_for
from .joint_laws import ALIKE, Sums, softmax_response
from .logits import (
    Logits,
    Rotation,
    RowClass,
    as_slice,
    find_patterns,
    group_patterns,
    prior_weights,
    window,
)
from .row_groups import JointLaws, rotation_factor, row_scale, single
from .row_statistics import AttentionRows, mean_attention, rows_of_kernel
from .rows import FAINT, Paths, RowAttention

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


class KernelAttention(RowAttention):
    """Moments of one softmax attention layer with Gaussian weights, on a given token kernel.

    Logits of query i and key j have covariance tau C_ii' C_jj' over draws of the query and key
    weights. Any kernel and any mask are allowed; docs/theory/attention.md has measured errors.

    Attributes:
        logits: covariance of the logits.
        mean_attention: (Lq, Lk) E a_ij; rows sum to 1.
        logit_variance: (Lq,) theta, variance of a row's logits around their common part.
        effective_keys: (Lq,) number of independent keys of the row's reference (`row_statistics`).
        entropy: (Lq,) E[-sum_j a_ij log a_ij] in nats, by the reference row; exact for exchangeable
            kernels.
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
                the scale of `kernel`, if they differ from it: logits of query i and key j then have
                covariance tau query_ii' key_jj'.
            bias: (Lq, Lk) added to the logits.
            value_bias: variance of the values' bias over the gain of their weights. Rows of
                attention sum to 1, so it only enters the response to dropped attention here; the
                caller adds it to `forward`.

        Raises:
            DomainError: a kernel is not square or not finite.
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
        # Queries and keys that are 0 still receive gradients: the limit of small ones.
        query_variance = np.diag(queries)
        largest = float(query_variance.max()) or 1.0
        small = np.maximum(FAINT * largest - query_variance, 0.0)
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
        self._sizes, self._value_bias = np.diagonal(self.kernel), float(value_bias)
        self._widths = Widths(float(d_model), float(d_head), float(norm_spread))
        every = np.arange(len(queries))
        self._two_rows, self._self_pairs = (every[:, None], every[None, :]), (every, every)
        norm = self._group_rows()
        self._joint_laws(norm)
        if self._dropped > 0.0:
            self._respond_to_noise()
        self.logit_variance = self._rows.unshared * self.logit_scale * query_variance
        self.effective_keys, self.entropy = self._rows.keys, self._rows.entropy
        weights = self.mean_attention
        mean = weights @ self.kernel @ weights.T
        excess, slope = self._gather(self.kernel)
        self._evaluate(mean, excess, slope, self.logits.queries, weights @ weights.T)

    @property
    def logit_scale(self) -> float:
        """tau."""
        return float(self.logits.scale * self._linear)

    @property
    def sum_square(self) -> Array:
        """(Lq,) E sum_j a_ij^2, without dropout."""
        return np.asarray(self._squares.sum(1))

    def forward(self) -> Array:
        """(Lq, Lq) second moments per feature of sum_j a_ij x_j, attention dropout included."""
        result: Array = self.output.copy()
        return result

    def backward(self, gradient: ArrayLike) -> Paths[Array]:
        """Second moments per feature of the gradient at the attention's input.

        The query weights' gradient follows from the query path: with the value gain in `gradient`,
        E|dW_q|^2 = d_model sum(C o query) / Var(W_q); that of the key weights likewise from `key`.

        Args:
            gradient: (Lq, Lq) second moments per feature of the gradient at sum_j a_ij x_j: the
                gain of the value weights times the gradient's kernel at the heads.

        Raises:
            DomainError: `gradient` is not a finite (Lq, Lq) matrix.
        """
        gradient = square("gradient", gradient, len(self.allowed))
        value, key, cross = self._linear * self._spread(gradient)
        value = value + self.mean_attention.T @ gradient @ self.mean_attention
        if self._dropped > 0.0:
            row_gradient = np.diag(gradient)
            value = value + self._dropped * np.diag(self._squares.T @ row_gradient)
            sizes = self._dropped * self.logit_scale * row_gradient * self.logits.temperature
            noise, noise_cross = self._spread_noise(sizes)
            if self.logits.rotation is not None:
                noise = noise * self.logits.rotation.keys
            key, cross = key + noise, cross + noise_cross
        query = gradient * self.response
        # an antisymmetric rounding error would be amplified by a deep network
        value, key, cross = (0.5 * (path + path.T) for path in (value, key, cross))
        return Paths(value, query, key, cross)

    # --- rows ----------------------------------------------------------------------------------

    def _group_rows(self) -> Array:
        """Group rows into patterns, numbered class by class, and these into classes; returns the
        (Lq,) norms of the queries over those of their patterns."""
        logits, temperature, kernel = self.logits, self.logits.temperature, self.logits.within
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
        shared = [_class_prior(patterns[span], logits.biased) for span in spans]
        extended = np.vstack([patterns, *shared])
        means = [pattern_temperature[span].mean() for span in spans]
        self._statistics = rows_of_kernel(
            kernel, extended, np.concatenate([pattern_temperature, means]), logits.scale
        )
        classes = [
            _make_class(span, len(patterns) + k, extended, self._statistics, kernel, logits.scale)
            for k, span in enumerate(spans)
        ]
        compact = np.zeros(patterns.shape)
        group = np.empty(len(patterns), dtype=np.intp)
        for index, row_class in enumerate(classes):
            compact[window(row_class.patterns, row_class.keys)] = row_class.weights
            group[row_class.patterns] = index
        self._pattern, self._group, self._classes = pattern, group, classes
        self.mean_attention = self.weights = self.counted = compact[pattern]
        return np.asarray(np.sqrt(temperature / pattern_temperature[pattern]))

    def _joint_laws(self, norm: Array) -> None:
        """Form the joint laws of every two classes at nodes of the correlation, and the weights by
        which they are interpolated for two rows."""
        logits, stats, rotation = self.logits, self._statistics, self.logits.rotation
        self._bare = lowest = logits.correlation()
        if rotation is not None:
            lowest = np.minimum(lowest * rotation.queries, 0.0)
        self._nodes = nodes = nodes_for(lowest, float(stats.theta.max()))
        leaders = stats.of(np.arange(len(self._group), len(stats.count)))
        calibration = calibrate(leaders, logits.scale, nodes, self._widths)
        scale = row_scale(stats, self._group, self._classes, logits.within, nodes)
        self._row_scale, scale = scale, scale[:, self._pattern] * norm
        self._laws = JointLaws(
            self._classes, self._pattern, calibration.exponent, nodes.slopes, logits
        )
        overlaps = self._gather_rotated(logits.values)
        self._rotation_factor: Array | float = 1.0
        if rotation is not None and overlaps is not None:
            self._rotation_factor = rotation_factor(rotation, overlaps, self._bare, nodes.low)
        self._correlation = self._bare * self._rotation_factor
        value, slope = nodes.basis(self._correlation)
        scales = scale[:, :, None] * scale[:, None, :]
        self._read, self._read_slope = ((scales * x).astype(np.float32) for x in (value, slope))
        self._rows = rows = stats.of(self._pattern)
        self._calibration = Calibration(*(x[self._group[self._pattern]] for x in calibration))
        self._factors = factors = self._path_factors(nodes, value, rotation is not None)
        self._key, self._terms = factors.key, None
        if rotation is not None and factors.along is not None:
            self._key = factors.key + rotation.queries * factors.along
            amplitude = np.sqrt(logits.scale * logits.temperature * rows.softening)
            rest = rotation.queries - self._rotation_factor
            terms = np.concatenate([rest[None], rotation.query_terms])
            self._terms = np.outer(amplitude, amplitude) * terms

    # --- sums over pairs of rows ---------------------------------------------------------------

    def _gather_rotated(self, kernel: Array) -> Array | None:
        """(1 + t, Lq, Lq): tr(E J_i X_t E J_i' kernel^T) for each X_t of `Rotation.kernels`."""
        rotation = self.logits.rotation
        if rotation is None:
            return None
        parity = np.append(1.0, rotation.parity)
        return self._laws.gather("rotated", kernel, len(parity), parity)

    def _gather(self, kernel: Array) -> tuple[Array, Array]:
        """Two (Lq, Lq): tr((F_ii' - w_i w_i'^T) kernel^T), and, if `kernel` is the values', its
        derivative in the correlation of queries i and i'."""
        values = self._laws.gather("overlap", kernel, len(self._nodes.rho))
        excess = np.einsum("rij,rij->ij", self._read, values)
        slope = np.einsum("rij,rij->ij", self._read_slope, values) * self._rotation_factor
        rest = self._gather_rotated(kernel)
        if self._terms is not None and rest is not None:
            rest = np.einsum("tij,tij->ij", self._terms, rest)
            excess, slope = excess + self._bare * rest, slope + rest
        return 0.5 * (excess + excess.T), 0.5 * (slope + slope.T)

    def _spread(self, gradient: Array) -> Array:
        """(3, Lk, Lk): sum_ii' G_ii' (F_ii' - w_i w_i'^T) in the value path, and sums of its
        derivative times the factors of the key path and of `Paths.cross`."""
        rotation, laws = self.logits.rotation, self._laws
        scale, scaled = single(gradient)
        value = (scaled * self._read)[None]
        weighted = scaled * np.stack([self._key, self._factors.cross]).astype(np.float32)
        if self.logits.aligned:
            weights = np.concatenate([value, weighted[:, None] * self._read_slope])
            return scale * laws.spread("overlap", laws.compressed(weights))
        weights = laws.compressed(weighted[:, None] * self._read)
        total = np.concatenate(
            [laws.spread("overlap", laws.compressed(value)), laws.spread("response", weights)]
        )
        if self._terms is not None and rotation is not None:
            total[1:] *= rotation.keys
            terms = laws.compressed(scaled * (self._bare * self._terms).astype(np.float32))
            total[0] += laws.spread("rotated", terms[None])[0]
            unrotated = laws.spread("unrotated", terms[1:, None], rotation.parity)
            total[1] += np.einsum("tij,tij->ij", unrotated, rotation.key_terms)
        return scale * total

    # --- single rows ---------------------------------------------------------------------------

    @functools.cached_property
    def _squares(self) -> Array:
        """(Lq, Lk) E a_ij^2."""
        compact = np.zeros((len(self._group), len(self.logits.values)))
        for block in self._laws.blocks:
            if block.with_itself:
                sums = block.overlap
                for index, (group, _) in enumerate(block.pairs):
                    diagonal = np.diagonal(sums.excess[index, 0]) - 2.0 * sums.left[index, 0]
                    diagonal = diagonal + np.diagonal(sums.both[index, 0])[:, None]
                    scale = self._row_scale[0, group.patterns, None] ** 2
                    square = group.weights**2 * np.maximum(1.0 + scale * diagonal, 0.0)
                    compact[window(group.patterns, group.keys)] = square
        for group in self._classes:
            if len(group.leader_weights) == 1:
                compact[window(group.patterns, group.keys)] = 1.0
        return compact[self._pattern]

    def _as_kernel(self, values: Array) -> Array:
        return values

    def _mean_kernel(self, name: str) -> Matrix:
        kernel = getattr(self.logits, name)
        return np.diagonal(kernel), kernel

    def _key_phases(self) -> NDArray[np.complex128] | None:
        rotation = self.logits.rotation
        return None if rotation is None else np.exp(1j * rotation.key_angles)

    def _shift_products(self) -> Array:
        rotation = self.logits.rotation
        if rotation is None:
            return super()._shift_products()
        shift = self._shift * np.exp(-1j * rotation.query_angles)
        return np.asarray(((shift * rotation.shares) @ shift.conj().T).real)

    # --- dropped attention ---------------------------------------------------------------------

    def _respond_to_noise(self) -> None:
        """Form E[J D J], D = diag(C_jj) of the values."""
        noise = self._sizes + self._value_bias
        self._laws.respond_to(noise)
        members = np.unique(self._pattern, return_index=True)[1]
        count = self._statistics.count[: len(self._group)]
        trace = exact_rows.jacobian_square(self._squares[members].sum(1), count)
        trace = trace * (self.mean_attention[members] @ noise)  # tr J D J as if D were uniform
        bare = self._noise_overlap(np.eye(len(noise)))[members]
        usable = bare > 1e-300
        scale = np.where(usable, trace / np.where(usable, bare, 1.0), 0.0)
        self._noise_scale = scale[self._pattern]

    def _dropped_terms(self) -> tuple[Array, Array]:
        overlap = self._noise_scale * self._noise_overlap(self.logits.within)
        return self._squares @ np.diagonal(self.kernel), overlap

    def _spread_noise(self, row_weights: Array) -> Array:
        """(2, Lk, Lk): sum_i h_i E[J_i D J_i] in the key path and in `Paths.cross`, for (Lq,) h."""
        scale, scaled = single(self._noise_scale * row_weights)
        factors = self._calibration.noise_key, self._calibration.noise_cross
        weights = np.zeros((2, 1, len(self._group), len(self._group)), dtype=np.float32)
        for total, factor in zip(weights[:, 0], factors, strict=True):
            np.add.at(total, (self._pattern, self._pattern), scaled * factor)
        return scale * self._laws.spread("noise", weights)

    def _noise_overlap(self, kernel: Array) -> Array:
        """(Lq,) tr(E[J D J] kernel) up to `_noise_scale`."""
        return np.diagonal(self._laws.gather("noise", kernel, 1)[0])


def _class_prior(patterns: Array, biased: bool) -> Array:
    """Prior of a class's representative row, over every key that its patterns attend to."""
    if biased:
        return np.asarray(patterns.mean(0))
    union = (patterns > 0.0).any(0)
    return np.asarray(union / union.sum())


def _make_class(
    span: slice, leader: int, priors: Array, stats: AttentionRows, kernel: Array, scale: float
) -> RowClass:
    """Class of the patterns `span`, whose representative row is row `leader` of the priors."""
    keys = as_slice(np.flatnonzero(priors[leader]))
    members = np.append(np.arange(span.start, span.stop), leader)
    inside = kernel[window(keys, keys)]
    prior = priors[members][:, keys]
    weights = mean_attention(inside, prior, stats, members, scale)
    response = np.zeros_like(inside)
    if len(inside) > 1:
        own, every, ones = weights[-1:], slice(0, len(inside)), np.ones((1, len(inside)))
        targets = ones[..., None]
        sums = Sums.of(ALIKE, (every, every), (own, own), (own, own), (targets, targets))
        entries = np.diagonal(inside), [inside[None]]
        row = prior[-1:], stats.of(members[-1:])
        ((excess, off_diagonal),), _ = softmax_response(sums, *entries, [ones], *row, scale)
        response = off_diagonal[0] + np.diag(excess[0])
    return RowClass(span, keys, leader, weights[:-1], weights[-1], response)


def _means(values: Array, group: Indices) -> Array:
    """Mean of the values in each group."""
    return np.asarray(np.bincount(group, values) / np.bincount(group))


def square(name: str, kernel: ArrayLike, length: int | None = None) -> Array:
    """Check a finite square matrix, of the given length if any; return its symmetric part."""
    array = np.asarray(kernel, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not len(array):
        raise domain_error(name, kernel, "a square matrix", f"its shape is {array.shape}")
    if length is not None and len(array) != length:
        raise domain_error(name, array, f"of shape ({length}, {length})")
    if not np.all(np.isfinite(array)):
        raise domain_error(name, kernel, "finite everywhere")
    return np.asarray(0.5 * (array + array.T))
