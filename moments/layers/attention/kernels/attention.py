"""Softmax attention on an arbitrary token kernel, at initialisation, by token.

Given mean attention w and A_jl = E[a_j a_l]/E a_j, the joint laws of rows are exact to first order
in the logits, exact for exchangeable kernels, and an approximation otherwise. They are formed at
nodes of the correlation of two queries, and interpolated. Attention dropout adds E[J D J] with
D = diag(C_jj):

    E[J D J] = P_i N P_i,    N = (F/(w w^T)) o [(1-A) D (1-A)^T + u 1^T + 1 u^T]

at rho = 1, with u such that F keeps its marginals, scaled to the trace of the exchangeable row with
the same number of keys and E sum a^2.

Rows with the same keys and nearly the same query norm are one *pattern*; patterns with nearly the
same keys form a *class* with a representative row, which attends to every key of its members and
whose overlaps A they share. Joint laws are w_i w_i'^T + P_i g P_i', where P_i = diag(w_i) -
w_i w_i^T removes a row's mean, so that the marginals are w_i and w_i' whatever g is. Two maps are
each other's transpose:

    spread: H -> sum_{r i i'} H_r,ii' P_i g_r P_i'        gather: X -> tr(P_i g_r P_i' X^T)

g is stored and summed in single precision. The leading axis c of every array counts pairs of
classes of equal shapes, which are processed together. See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ....engine.classes import Matrix
from ....errors import domain_error
from .. import softmax
from .joint_laws import (
    ALIKE,
    JOINT_SWEEPS,
    RHO_MIN,
    ByRelation,
    Sums,
    bounded_exp,
    geometric_mean,
    softmax_response,
)
from .relative_positions import Rotation
from .row_statistics import (
    AttentionRows,
    Calibration,
    Nodes,
    Widths,
    calibrate,
    mean_attention,
    nodes_for,
    rows_of_kernel,
)
from .rows import FAINT, Paths, RowAttention, single

Array = NDArray[np.float64]
Single = NDArray[np.float32]
Indices = NDArray[np.intp]


# --- covariance -----------------------------------------------------------------------------------

LEAST_WEIGHT = 1e-3
"""Fraction of a row's largest weight below which keys with a bias are left out."""


@dataclass(frozen=True)
class Logits:
    """Covariance of the logits s_ij and s_i'j': scale Cq_ii' Ck_jj', after rotation if any.

    Attributes:
        queries: (Lq, Lq) Cq.
        keys: (Lk, Lk) Ck.
        values: (Lk, Lk) second moments of the tokens that attention averages.
        prior: (Lq, Lk) softmax of the deterministic part of the logits: uniform over a row's keys
            unless `biased`; rows sum to 1.
        biased: whether the deterministic part differs among a row's keys.
        rotation: None without rotary positions.
    """

    queries: Array
    keys: Array
    values: Array
    prior: Array
    scale: float
    biased: bool = False
    rotation: Rotation | None = None

    @property
    def temperature(self) -> Array:
        """(Lq,) Cq_ii."""
        return np.diagonal(self.queries)

    @property
    def within(self) -> Array:
        """(Lk, Lk) kernel of the keys within one row."""
        return self.keys if self.rotation is None else self.keys * self.rotation.keys

    @property
    def aligned(self) -> bool:
        """Whether there is no rotation and values have the kernel of the keys: the derivative in
        the correlation of two queries is then along the values' kernel."""
        return self.rotation is None and self.keys is self.values

    def correlation(self) -> Array:
        """(Lq, Lq) correlation of the queries, before rotation."""
        norm = np.sqrt(np.outer(self.temperature, self.temperature))
        return np.asarray(np.clip(self.queries / norm, -1.0, 1.0))


def prior_weights(allowed: NDArray[np.bool_], bias: Array | None) -> Array:
    """(Lq, Lk) softmax of the bias over the allowed keys; uniform without a bias."""
    if bias is None:
        return np.asarray(allowed / allowed.sum(1, keepdims=True))
    logits = np.where(allowed, bias, -np.inf)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights[weights < LEAST_WEIGHT] = 0.0
    return np.asarray(weights / weights.sum(1, keepdims=True))


# --- groups of similar rows -----------------------------------------------------------------------

EXACT_KEYS = 4
"""Patterns of up to this many keys never share a class."""

SUPPORT_SLACK = 0.3
"""Fraction of the keys beyond `EXACT_KEYS` by which two patterns of one class may differ."""

NORM_STEP = 0.05
"""Queries with log C_ii in the same interval of this width may share a pattern."""


@dataclass(frozen=True)
class RowClass:
    """One class of patterns.

    Attributes:
        patterns: range of its a patterns.
        keys: indices of the n keys that any of them attends to.
        row: index of the representative row in the row statistics.
        weights: (a, n) mean attention of its patterns.
        leader_weights: (n,) mean attention of the representative row.
        response: (n, n) 1 - A, see `joint_laws.softmax_response`.
    """

    patterns: slice
    keys: slice | Indices
    row: int
    weights: NDArray[Any]
    leader_weights: NDArray[Any]
    response: NDArray[Any]

    def in_single(self) -> RowClass:
        """The class in single precision."""
        arrays = (self.weights, self.leader_weights, self.response)
        return RowClass(self.patterns, self.keys, self.row, *(x.astype(np.float32) for x in arrays))


def find_patterns(prior: Array, temperature: Array, biased: bool) -> tuple[Indices, Indices]:
    """Distinct rows.

    Args:
        prior: (L, n) weights of every row's keys at vanishing logits, of sum 1.
        temperature: (L,) second moments C_ii of the queries.
        biased: whether to compare the weights; otherwise only the sets of keys are compared.

    Returns:
        (P,) the first row of every pattern, and (L,) the pattern of every row.
    """
    bucket = np.round(np.log(temperature) / NORM_STEP).astype(np.int64)
    support = np.packbits(prior > 0.0, axis=1)
    if biased:
        levels = np.round(prior / prior.max(1, keepdims=True), 6).astype(np.float32)
        support = levels.view(np.uint8)
    signature = np.hstack([support, bucket[:, None].view(np.uint8)])
    _, first, inverse = np.unique(signature, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.argsort(order)
    return first[order], rank[inverse.ravel()]


def group_patterns(prior: Array, temperature: Array, biased: bool) -> list[Indices]:
    """Partition patterns into classes, those of few keys first.

    Args:
        prior: (P, n) weights of the keys at vanishing logits, of sum 1.
        temperature: (P,) second moments of the queries.
        biased: whether to measure the difference of two patterns by half the distance of their
            weights, instead of the number of keys that they do not share.
    """
    allowed = (prior > 0.0).astype(np.float64)
    shared = allowed @ allowed.T
    count = 1.0 / (prior * prior).sum(1)
    either = np.diag(shared)[:, None] + np.diag(shared) - shared
    log_temperature = np.log(temperature)
    free = np.ones(len(allowed), dtype=bool)
    groups = []
    for leader in np.argsort(-count, kind="stable"):
        if not free[leader]:
            continue
        if biased:
            distance = 0.5 * np.abs(prior - prior[leader]).sum(1)
            alike = distance <= SUPPORT_SLACK * max(1.0 - EXACT_KEYS / count[leader], 0.0)
        else:
            slack = SUPPORT_SLACK * np.maximum(either[leader] - EXACT_KEYS, 0.0)
            alike = either[leader] - shared[leader] <= slack
        alike &= np.abs(log_temperature - log_temperature[leader]) <= NORM_STEP
        members = np.flatnonzero(alike & free)
        free[members] = False
        groups.append(members)
    return groups[::-1]


def stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """(c, ...) stack of parts of one shape; a view of a single part."""
    if len(parts) == 1:
        return parts[0][None]
    whole = np.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype)
    for index, part in enumerate(parts):
        whole[index] = part
    return whole


def as_slice(indices: Indices) -> slice | Indices:
    """Increasing indices, as a slice if they are consecutive, to index by view."""
    low, high = int(indices[0]), int(indices[-1]) + 1
    return slice(low, high) if high - low == len(indices) else indices


def window(rows: slice | Indices, columns: slice | Indices) -> Any:
    """Index of a submatrix in the last two axes."""
    if isinstance(rows, slice) and isinstance(columns, slice):
        return (..., rows, columns)
    return (..., _indices(rows)[:, None], _indices(columns))


def _indices(index: slice | Indices) -> Indices:
    return np.arange(index.start, index.stop) if isinstance(index, slice) else index


# --- sums over pairs ------------------------------------------------------------------------------

# BLAS works on padded blocks, whose uninitialised padding may raise the invalid-value flag: rarely
# observed for inputs that were finite and below 1 (numpy issues 13173, 24067).
_finite = np.errstate(invalid="ignore")


class PairSum(NamedTuple):
    """g between a rows over n keys and b rows over k keys, with the products both maps need.

    Attributes:
        excess: (c, r, n, k) g.
        rows, rows2: (c, a, n) and (c, b, k) mean attention w_i, w_i'.
        left: (c, r, a, k) w_i^T g.
        right: (c, r, n, b) g w_i'.
        both: (c, r, a, b) w_i^T g w_i'.
    """

    excess: Single
    rows: Single
    rows2: Single
    left: Single
    right: Single
    both: Single

    @classmethod
    @_finite
    def of(cls, law: NDArray[Any], rows: Single, rows2: Single) -> PairSum:
        """Form the products."""
        excess: Single = law.astype(np.float32)
        left: Single = rows[:, None] @ excess
        columns = rows2.swapaxes(1, 2)[:, None]
        return cls(excess, rows, rows2, left, excess @ columns, left @ columns)

    @_finite
    def spread(self, weights: Single) -> Single:
        """(c, m, n, k) key kernels from (c, m, r, a, b) weights H on pairs of rows."""
        rows = self.rows.swapaxes(1, 2)[:, None]
        rows2 = self.rows2[:, None]
        right = weights @ rows2[:, None]  # (c, m, r, a, k)
        total = np.einsum("cmrnk,crnk->cmnk", rows[:, None] @ right, self.excess)
        total -= rows @ np.einsum("cmrak,crak->cmak", right, self.left)
        total -= np.einsum("cmrnb,crnb->cmnb", rows[:, None] @ weights, self.right) @ rows2
        both = np.einsum("cmrab,crab->cmab", weights, self.both)
        total += rows @ both @ rows2
        return np.asarray(total)

    @_finite
    def gather(self, kernel: Single) -> Single:
        """(c, r, a, b): tr(P_i g_r P_i' X^T) for every pair of rows; X (c, n, k)."""
        inner = kernel[:, None]
        rows, columns = self.rows[:, None], self.rows2.swapaxes(1, 2)[:, None]
        kernel_left = rows @ inner  # (c, ., a, k)
        kernel_right = inner @ columns  # (c, ., n, b)
        total = (rows @ (self.excess * inner) - self.left * kernel_left) @ columns
        total -= rows @ (self.right * kernel_right)
        total += self.both * (kernel_left @ columns)
        return np.asarray(total)


# --- two rows and their classes -------------------------------------------------------------------


def rotation_factor(rotation: Rotation, overlaps: Array, bare: Array, low: float) -> Array:
    """Factor on the `bare` correlation of two queries with which the keys' unrotated kernel gives
    the overlap of outputs that the rotated one gives to first order.

    Args:
        overlaps: (1 + t, Lq, Lq) of outputs, by each of `Rotation.kernels`.
        low: the least correlation at which joint laws are formed.
    """
    usable = np.abs(overlaps[0]) > 1e-12 * np.abs(overlaps[0]).max(initial=1e-300)
    share = np.einsum("tij,tij->ij", rotation.query_terms, overlaps[1:])
    share = share / np.where(usable, overlaps[0], 1.0)
    factor = rotation.queries + np.where(usable, share, 0.0)
    factor = 0.5 * (factor + factor.T)
    nonzero = np.abs(bare) > 1e-12
    bounded = np.clip(factor * bare, low, 1.0) / np.where(nonzero, bare, 1.0)
    return np.where(nonzero, bounded, np.clip(factor, -1.0, 1.0))


def row_scale(
    stats: AttentionRows, group: Indices, classes: list[RowClass], kernel: Array, nodes: Nodes
) -> Array:
    """(r, P): square root of the ratio of a pattern's exact excess n_e C2 - 1 to its class's, at
    the nodes, before P_i (see `PairSum`) removes the mean.

    Inverse numbers of keys add up over pairs of correlated keys: a row of weights w in a class of
    weights w' has

        1/n_e = 1/n_e(class) + sum_jl w_j (w_l - w'_l) (C_jl - b)^2 / (C_jj - b)^2,

    which is 1/n - 1/n' for an exchangeable kernel.
    """
    patterns = len(group)
    rho = np.where(np.abs(nodes.rho) < RHO_MIN, RHO_MIN, nodes.rho)
    leader = patterns + group
    relative = stats.temperature[:patterns] / stats.temperature[leader]
    inverse = 1.0 / stats.keys[leader]
    for row_class in classes:
        inside = kernel[window(row_class.keys, row_class.keys)]
        unshared = max(stats.unshared[row_class.row], 1e-12)
        correlated = 1.0 + (inside - np.diagonal(inside).mean()) / unshared
        difference = row_class.weights - row_class.leader_weights
        change = ((row_class.weights @ correlated**2) * difference).sum(1)
        inverse[row_class.patterns] += change

    def excess(theta: Array, inverse_keys: Array) -> Array:
        keys = 1.0 / np.clip(inverse_keys, 1e-8, 1.0 - 1e-9)
        overlap = softmax.overlaps(softmax.tabulated(theta)[:, None], keys, rho)
        return np.asarray((overlap.T * keys - 1.0) / (1.0 - 1.0 / keys))

    of_pattern = excess(stats.theta[leader] * relative, inverse)
    of_class = excess(stats.theta[patterns:], 1.0 / stats.keys[patterns:])[:, group]
    trivial = (stats.count[:patterns] < 1.5) | (np.abs(of_class) < 1e-14)
    ratio = np.where(trivial, 1.0, of_pattern / np.where(trivial, 1.0, of_class))
    return np.sqrt(np.maximum(ratio, 0.0))


# --- joint laws of classes ------------------------------------------------------------------------

Pair = tuple[RowClass, RowClass]

STACK_ENTRIES = 1 << 18
"""Entries of joint laws processed at a time, at all nodes: a megabyte, which stays in cache."""


Half = dict[int, Single]
"""By the index of a class's row: (t, n, Lk) products (1 - A) C of t kernels C, which all pairs of
classes share."""


@_finite
def _half(classes: Iterable[RowClass], kernels: Array) -> Half:
    whole: Single = kernels.astype(np.float32)
    return {c.row: c.response @ whole[..., c.keys, :] for c in classes}


@_finite
def _projected(half: Half, pairs: list[Pair]) -> Single:
    """(c, t, n, k): (1 - A) C (1 - A')^T of every two classes."""
    left = stacked([half[first.row][..., second.keys] for first, second in pairs])
    projected: Single = left @ stacked([second.response.T for _, second in pairs])[:, None]
    return projected


def _laws(pairs: list[Pair], exponent: Array, directions: list[Array], sweeps: int) -> list[Array]:
    """(c, r, n, k) F/(w w') of the representative rows of every two classes at r exponents
    (c, r, n, k), and its derivatives along directions, which are overwritten; see `Sums`."""
    shape, nothing = exponent.shape, np.empty((len(pairs) * exponent.shape[1], 0))

    def flat(matrix: Array) -> ByRelation:
        return [(nothing.copy(), matrix.reshape(-1, *shape[2:]))]

    weights = [
        np.repeat(stacked([pair[side].leader_weights for pair in pairs]), shape[1], 0).astype(float)
        for side in (0, 1)
    ]
    ones = [np.ones((*weight.shape, 1)) for weight in weights]
    none = slice(0, 0), slice(0, 0)
    sums = Sums.of(ALIKE, none, (weights[0], weights[1]), (nothing, nothing), (ones[0], ones[1]))
    law = bounded_exp(flat(exponent), lambda matrix: nothing, None)
    joint, tangents = sums.balanced_with(law, sweeps, [flat(x) for x in directions])
    return [matrix.reshape(shape) for ((_, matrix),) in (joint, *tangents)]


class Block(NamedTuple):
    """Pairs of classes of equal shapes and g, the joint laws' deviation from independence.

    Attributes:
        pairs: the c pairs of classes.
        with_itself: whether every pair is a class with itself.
        overlap: F/(w w') - 1 at the r nodes of the queries' correlation.
        response: its derivative along the values' kernel, per unit of correlation; None if that
            is the derivative in the correlation.
        rotated: its first order in each of `Rotation.kernels`; None without rotation.
        unrotated: its first order in the values' kernel; None without rotation.
        noise: for rows with themselves, its derivative along the keys' own variances, up to a
            factor; None without attention dropout.
    """

    pairs: list[Pair]
    with_itself: bool
    overlap: PairSum
    response: PairSum | None
    rotated: PairSum | None
    unrotated: PairSum | None
    noise: PairSum | None = None

    @classmethod
    def of(
        cls, pairs: list[Pair], exponents: Array, slopes: Array, halves: Mapping[str, Half]
    ) -> Block:
        """Form the joint laws.

        Args:
            pairs: of classes, all of equal shapes.
            exponents: (c, r) beta at the nodes.
            slopes: (c, r) its derivative in the correlation.
            halves: for the kernels of keys `within` a row; of `values` and `rotated` ones (each of
                `Rotation.kernels`), where `response` and `rotated` are needed.
        """
        rows = stacked([first.weights for first, _ in pairs])
        rows2 = stacked([second.weights for _, second in pairs])
        directions, along = [], None
        if "values" in halves:
            along = _projected(halves["values"], pairs)
            directions.append(slopes[..., None, None] * along)
        exponent = exponents[..., None, None] * _projected(halves["within"], pairs)
        joint, *derivatives = _laws(pairs, exponent, directions, JOINT_SWEEPS)
        laws = [PairSum.of(law, rows, rows2) for law in (joint - 1.0, *derivatives)]
        response, rotated, unrotated = laws[1] if derivatives else None, None, None
        if along is not None and "rotated" in halves:
            rotated = PairSum.of(_projected(halves["rotated"], pairs), rows, rows2)
            unrotated = PairSum.of(along, rows, rows2)
        return cls(pairs, pairs[0][0] is pairs[0][1], laws[0], response, rotated, unrotated)

    def with_noise(self, half: Half) -> Block:
        """The same with `noise`, along the kernel C of which `half` is (1 - A) C."""
        if not self.with_itself:
            return self
        sums, direction = self.overlap, _projected(half, self.pairs).astype(float)
        exponent = np.log1p(sums.excess[:, :1].astype(float))
        _, derivative = _laws(self.pairs, exponent, [direction], 0)
        return self._replace(noise=PairSum.of(derivative, sums.rows, sums.rows2))

    def of_keys(self, kernel: Single) -> Single:
        """(c, ..., n, k): the blocks of a (..., Lk, Lk) kernel at the keys of each pair."""
        return stacked([kernel[window(first.keys, second.keys)] for first, second in self.pairs])

    def of_patterns(self, weights: Single) -> Single:
        """(c, ..., a, b): the blocks of (..., P, P) weights at the patterns of each pair."""
        return stacked(
            [weights[..., first.patterns, second.patterns] for first, second in self.pairs]
        )

    def add_to_keys(self, total: Single, parts: Single, parity: Single | None = None) -> None:
        """Add (c, m, n, k) to a (m, Lk, Lk) total in both orders of each pair of classes; entries
        of parity -1 change sign in the reverse order."""
        for (first, second), part in zip(self.pairs, parts, strict=True):
            total[window(first.keys, second.keys)] += part
            if not self.with_itself:
                reverse = part if parity is None else parity[:, None, None] * part
                total[window(second.keys, first.keys)] += reverse.swapaxes(-1, -2)

    def put_patterns(self, total: Single, parts: Single, parity: Array | None) -> None:
        """Write (c, r, a, b) into a (r, P, P) total, in both orders as `add_to_keys` does."""
        sign = 1.0 if parity is None else parity[:, None, None]
        for (first, second), part in zip(self.pairs, parts, strict=True):
            rows, rows2 = first.patterns, second.patterns
            total[..., rows, rows2] = part
            if not self.with_itself:
                total[..., rows2, rows] = sign * part.swapaxes(-1, -2)


def by_shape(
    classes: Mapping[int, RowClass], nodes: int
) -> Iterator[tuple[list[tuple[int, int]], list[Pair]]]:
    """All pairs of classes and their indices, in stacks of equal shapes."""
    stacks: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    numbers = list(classes)
    for position, first in enumerate(numbers):
        for second in numbers[position:]:
            shape = (*classes[first].weights.shape, *classes[second].weights.shape, first == second)
            stacks.setdefault(shape, []).append((first, second))
    for shape, indices in stacks.items():
        most = max(1, STACK_ENTRIES // (shape[1] * shape[3] * nodes))
        for start in range(0, len(indices), most):
            part = indices[start : start + most]
            yield part, [(classes[first], classes[second]) for first, second in part]


class JointLaws:
    """Joint laws of all pairs of rows; `blocks` hold every two classes once."""

    def __init__(
        self,
        classes: list[RowClass],
        pattern: Indices,
        exponents: Array,
        derivative: Array,
        logits: Logits,
    ) -> None:
        """Form the laws.

        Args:
            pattern: (Lq,) the pattern of every row.
            exponents: (classes, r) beta at the nodes.
            derivative: (r, r) from values at the nodes to derivatives at the nodes.
        """
        self._patterns = int(pattern.max()) + 1
        self._keys = len(logits.values)
        order = np.argsort(pattern, kind="stable")
        identity = self._patterns == len(pattern) and bool(np.all(np.diff(pattern) == 1))
        self._pattern = None if identity else pattern
        self._order = as_slice(order) if bool(np.all(np.diff(order) == 1)) else order
        self._starts = np.searchsorted(pattern[order], np.arange(self._patterns))
        several_keys = {
            k: row_class.in_single()
            for k, row_class in enumerate(classes)
            if len(row_class.leader_weights) > 1
        }
        self._classes = list(several_keys.values())
        kernels = {"within": logits.within[None]}
        if not logits.aligned:
            kernels["values"] = logits.values[None]
        if logits.rotation is not None:
            kernels["rotated"] = logits.rotation.kernels(logits.keys)
        halves = {name: _half(self._classes, kernel) for name, kernel in kernels.items()}
        self.blocks: list[Block] = []
        for indices, pairs in by_shape(several_keys, exponents.shape[1]):
            first, second = np.transpose(indices)
            exponent = geometric_mean(exponents[first], exponents[second])
            self.blocks.append(Block.of(pairs, exponent, exponent @ derivative, halves))

    def respond_to(self, variance: Array) -> None:
        """Form `Block.noise` along diag(`variance`) of the keys."""
        half = _half(self._classes, np.diag(variance / max(variance.max(), 1e-300))[None])
        self.blocks = [block.with_noise(half) for block in self.blocks]

    def compressed(self, pairs: Single) -> Single:
        """(..., P, P) sums over the rows of every two patterns, of (..., Lq, Lq)."""
        if self._pattern is None:
            return pairs
        ordered = pairs[..., self._order, :]
        rows = np.add.reduceat(ordered, self._starts, axis=-2, dtype=np.float64)
        columns = np.add.reduceat(rows[..., self._order], self._starts, axis=-1)
        return np.asarray(columns, dtype=np.float32)

    def gather(self, law: str, kernel: Array, count: int, parity: Array | None = None) -> Array:
        """(r, Lq, Lq): tr(P_i g_r P_i' X^T), g the field `law` of the blocks, X (Lk, Lk)."""
        scale, scaled = single(kernel)
        values = np.zeros((count, self._patterns, self._patterns), dtype=np.float32)
        for block in self.blocks:
            if (sums := getattr(block, law)) is not None:
                block.put_patterns(values, sums.gather(block.of_keys(scaled)), parity)
        if self._pattern is not None:
            values = values[..., self._pattern[:, None], self._pattern]
        return np.asarray(values * scale, dtype=np.float64)

    def spread(self, law: str, weights: Single, parity: Array | None = None) -> Array:
        """(m, Lk, Lk): sum_r,ii' H_r,ii' P_i g_r P_i', g the field `law` of the blocks, for
        compressed weights H (m, r, P, P), of `parity` (m,) under exchange of the two rows."""
        total = np.zeros((len(weights), self._keys, self._keys), dtype=np.float32)
        signs = None if parity is None else parity.astype(np.float32)
        for block in self.blocks:
            if (sums := getattr(block, law)) is not None:
                block.add_to_keys(total, sums.spread(block.of_patterns(weights)), signs)
        return total.astype(np.float64)


# --- the layer ------------------------------------------------------------------------------------


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
        return np.array(self.output)

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
        trace = softmax.jacobian_square(self._squares[members].sum(1), count)
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
