"""Joint laws of all pairs of rows of one layer, summed over rows or over keys.

Joint laws are w_i w_i'^T + P_i g P_i', where P_i = diag(w_i) - w_i w_i^T removes a row's mean, so
that the marginals are w_i and w_i' whatever g is. The two maps are each other's transpose:

    spread: H -> sum_{r i i'} H_r,ii' P_i g_r P_i'        gather: X -> tr(P_i g_r P_i' X^T)

g is stored and summed in single precision. The leading axis c of every array counts pairs of
classes of equal shapes, which are processed together. See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import exact_rows
from .finite_rows import Nodes
from .joint_laws import (
    ALIKE,
    JOINT_SWEEPS,
    RHO_MIN,
    ByRelation,
    Sums,
    bounded_exp,
    geometric_mean,
)
from .logits import Logits, Rotation, RowClass, as_slice, stacked, window
from .row_statistics import AttentionRows

# --- sums over pairs ------------------------------------------------------------------------------

Array = NDArray[np.float64]
Single = NDArray[np.float32]

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


def single(array: Array) -> tuple[float, Single]:
    """The largest absolute entry, and the array divided by it, in single precision."""
    scale = float(max(array.max(initial=0.0), -array.min(initial=0.0))) or 1.0
    return scale, (array / scale).astype(np.float32)


# --- two rows and their classes -------------------------------------------------------------------

Indices = NDArray[np.intp]


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
        overlap = exact_rows.overlaps(exact_rows.tabulated(theta)[:, None], keys, rho)
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
"""By the index of a class's row: (t, n, Lk) products (1 - A) C of t kernels C."""


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


class Projected(NamedTuple):
    """Products (1 - A) C of every class, for the kernels C of one layer.

    Attributes:
        within: keys within a row.
        values: None if the derivative in the queries' correlation is along the values' kernel.
        rotated: each of `Rotation.kernels`; None without rotation.
    """

    within: Half
    values: Half | None
    rotated: Half | None

    @classmethod
    def of_layer(cls, classes: Iterable[RowClass], logits: Logits) -> Projected:
        """Form the products that all pairs of classes share."""
        within = _half(classes, logits.within[None])
        if logits.aligned:
            return cls(within, None, None)
        values = _half(classes, logits.values[None])
        if logits.rotation is None:
            return cls(within, values, None)
        return cls(within, values, _half(classes, logits.rotation.kernels(logits.keys)))


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
    def of(cls, pairs: list[Pair], exponents: Array, slopes: Array, projected: Projected) -> Block:
        """Form the joint laws.

        Args:
            pairs: of classes, all of equal shapes.
            exponents: (c, r) beta at the nodes.
            slopes: (c, r) its derivative in the correlation.
        """
        rows = stacked([first.weights for first, _ in pairs])
        rows2 = stacked([second.weights for _, second in pairs])
        directions, along = [], None
        if projected.values is not None:
            along = _projected(projected.values, pairs)
            directions.append(slopes[..., None, None] * along)
        exponent = exponents[..., None, None] * _projected(projected.within, pairs)
        joint, *derivatives = _laws(pairs, exponent, directions, JOINT_SWEEPS)
        laws = [PairSum.of(law, rows, rows2) for law in (joint - 1.0, *derivatives)]
        response, rotated, unrotated = laws[1] if derivatives else None, None, None
        if along is not None and projected.rotated is not None:
            rotated = PairSum.of(_projected(projected.rotated, pairs), rows, rows2)
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
        projected = Projected.of_layer(self._classes, logits)
        self.blocks: list[Block] = []
        for indices, pairs in by_shape(several_keys, exponents.shape[1]):
            first, second = np.transpose(indices)
            exponent = geometric_mean(exponents[first], exponents[second])
            self.blocks.append(Block.of(pairs, exponent, exponent @ derivative, projected))

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
