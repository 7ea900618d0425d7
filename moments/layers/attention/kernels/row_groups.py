"""Joint laws of all pairs of rows of one layer, summed over rows or over keys.

Joint laws are w_i w_i'^T + P_i g P_i', where P_i = diag(w_i) - w_i w_i^T removes a row's mean, so
that the marginals are w_i and w_i' whatever g is. The two maps are each other's transpose:

    spread: H -> sum_{r i i'} H_r,ii' P_i g_r P_i'        gather: X -> tr(P_i g_r P_i' X^T)

g is stored, and its sums are formed, in single precision. The leading axis c of every array counts
pairs of classes of one shape, treated together. See docs/theory/attention.md, The closure.
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

# BLAS works on padded blocks, and what happens to stand in the padding may raise the flag of an
# invalid value: seen, rarely, of inputs that were finite and below 1 (numpy issues 13173, 24067).
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
        turned = rows2.swapaxes(1, 2)[:, None]
        return cls(excess, rows, rows2, left, excess @ turned, left @ turned)

    @_finite
    def spread(self, weights: Single) -> Single:
        """(c, m, n, k) key kernels from (c, m, r, a, b) weights H on pairs of rows."""
        rows = self.rows.swapaxes(1, 2)[:, None]
        rows2 = self.rows2[:, None]
        onward = weights @ rows2[:, None]  # (c, m, r, a, k)
        total = np.einsum("cmrnk,crnk->cmnk", rows[:, None] @ onward, self.excess)
        total -= rows @ np.einsum("cmrak,crak->cmak", onward, self.left)
        total -= np.einsum("cmrnb,crnb->cmnb", rows[:, None] @ weights, self.right) @ rows2
        both = np.einsum("cmrab,crab->cmab", weights, self.both)
        total += rows @ both @ rows2
        return np.asarray(total)

    @_finite
    def gather(self, kernel: Single) -> Single:
        """(c, r, a, b): tr(P_i g_r P_i' X^T) for every pair of rows; X (c, n, k)."""
        inner = kernel[:, None]
        rows, turned = self.rows[:, None], self.rows2.swapaxes(1, 2)[:, None]
        kernel_left = rows @ inner  # (c, ., a, k)
        kernel_right = inner @ turned  # (c, ., n, b)
        total = (rows @ (self.excess * inner) - self.left * kernel_left) @ turned
        total -= rows @ (self.right * kernel_right)
        total += self.both * (kernel_left @ turned)
        return np.asarray(total)


def single(array: Array) -> tuple[float, Single]:
    """The largest entry, and the array over it."""
    scale = float(max(array.max(initial=0.0), -array.min(initial=0.0))) or 1.0
    return scale, (array / scale).astype(np.float32)


# --- two rows and their classes -------------------------------------------------------------------

Indices = NDArray[np.intp]


def turn_of(rotation: Rotation, overlaps: Array, bare: Array, low: float) -> Array:
    """Factor on the queries' correlation that gives two rows, by the keys' kernel alone, the same
    overlap of outputs as the rotated kernel gives them to first order."""
    usable = np.abs(overlaps[0]) > 1e-12 * np.abs(overlaps[0]).max(initial=1e-300)
    share = np.einsum("tij,tij->ij", rotation.query_terms, overlaps[1:])
    share = share / np.where(usable, overlaps[0], 1.0)
    turn = rotation.queries + np.where(usable, share, 0.0)
    turn = 0.5 * (turn + turn.T)
    nonzero = np.abs(bare) > 1e-12
    inside = np.clip(turn * bare, low, 1.0) / np.where(nonzero, bare, 1.0)
    return np.where(nonzero, inside, np.clip(turn, -1.0, 1.0))


def row_scale(
    stats: AttentionRows, group: Indices, classes: list[RowClass], kernel: Array, nodes: Nodes
) -> Array:
    """(r, P): square root of a pattern's exact excess over its class's at the nodes, before P_i
    (see `PairSum`) removes the mean.

    Inverse numbers of keys add up over pairs of keys that move together: a row of weights w
    in a class of weights w' has

        1/n_e = 1/n_e(class) + sum_jl w_j (w_l - w'_l) (C_jl - b)^2 / (C_jj - b)^2,

    which is 1/n - 1/n' for an exchangeable kernel.
    """
    patterns = len(group)
    rho = np.where(np.abs(nodes.rho) < RHO_MIN, RHO_MIN, nodes.rho)
    leader = patterns + group
    relative = stats.temperature[:patterns] / stats.temperature[leader]
    inverse = 1.0 / stats.keys[leader]
    for one in classes:
        inside = kernel[window(one.keys, one.keys)]
        unshared = max(stats.unshared[one.row], 1e-12)
        together = 1.0 + (inside - np.diagonal(inside).mean()) / unshared
        lacking = one.weights - one.leader_weights
        inverse[one.patterns] += ((one.weights @ together**2) * lacking).sum(1)

    def excess(theta: Array, inverse_keys: Array) -> Array:
        keys = 1.0 / np.clip(inverse_keys, 1e-8, 1.0 - 1e-9)
        overlap = exact_rows.overlaps(exact_rows.tabulated(theta)[:, None], keys, rho)
        return np.asarray((overlap.T * keys - 1.0) / (1.0 - 1.0 / keys))

    alone = excess(stats.theta[leader] * relative, inverse)
    shared = excess(stats.theta[patterns:], 1.0 / stats.keys[patterns:])[:, group]
    trivial = (stats.count[:patterns] < 1.5) | (np.abs(shared) < 1e-14)
    ratio = np.where(trivial, 1.0, alone / np.where(trivial, 1.0, shared))
    return np.sqrt(np.maximum(ratio, 0.0))


# --- joint laws of classes ------------------------------------------------------------------------

Pair = tuple[RowClass, RowClass]

STACK_ENTRIES = 1 << 18
"""Entries of the joint laws treated at a time, at all nodes: a megabyte, which stays in cache."""


Mixed = dict[int, Single]
"""By a class's row, (t, n, Lk): (1 - A) C of t kernels C."""


@_finite
def _mixed(classes: Iterable[RowClass], kernels: Array) -> Mixed:
    whole: Single = kernels.astype(np.float32)
    return {one.row: one.response @ whole[..., one.keys, :] for one in classes}


@_finite
def _projected(mixed: Mixed, pairs: list[Pair]) -> Single:
    """(c, t, n, k): (1 - A) C (1 - A')^T of every two classes."""
    left = stacked([mixed[one.row][..., two.keys] for one, two in pairs])
    projected: Single = left @ stacked([two.response.T for _, two in pairs])[:, None]
    return projected


class Projected(NamedTuple):
    """Kernels of one layer, projected for every class.

    Attributes:
        within: of the keys within a row.
        values: of the values; None where moving along the queries' correlation moves along them.
        turned: of each of `Rotation.kernels`; None without rotation.
    """

    within: Mixed
    values: Mixed | None
    turned: Mixed | None

    @classmethod
    def of_layer(cls, classes: Iterable[RowClass], logits: Logits) -> Projected:
        """Form the products that all pairs share."""
        within = _mixed(classes, logits.within[None])
        if logits.aligned:
            return cls(within, None, None)
        values = _mixed(classes, logits.values[None])
        if logits.rotation is None:
            return cls(within, values, None)
        return cls(within, values, _mixed(classes, logits.rotation.kernels(logits.keys)))


def _laws(pairs: list[Pair], exponent: Array, directions: list[Array], sweeps: int) -> list[Array]:
    """(c, r, n, k) F/(w w') of the own rows of every two classes at r exponents (c, r, n, k), and
    its derivatives along directions, which are written over; see `joint_laws.Sums`."""
    shape, nothing = exponent.shape, np.empty((len(pairs) * exponent.shape[1], 0))

    def flat(matrix: Array) -> ByRelation:
        return [(nothing.copy(), matrix.reshape(-1, *shape[2:]))]

    shares = [
        np.repeat(stacked([pair[side].leader_weights for pair in pairs]), shape[1], 0).astype(float)
        for side in (0, 1)
    ]
    ones = [np.ones((*one.shape, 1)) for one in shares]
    none = slice(0, 0), slice(0, 0)
    sums = Sums.of(ALIKE, none, (shares[0], shares[1]), (nothing, nothing), (ones[0], ones[1]))
    law = bounded_exp(flat(exponent), lambda inside: nothing, None)
    joint, tangents = sums.balanced_with(law, sweeps, [flat(one) for one in directions])
    return [inside.reshape(shape) for ((_, inside),) in (joint, *tangents)]


class Block(NamedTuple):
    """Pairs of classes of one shape and what the joint laws of their rows have beyond independence.

    Attributes:
        pairs: the c pairs of classes.
        with_itself: whether every pair is a class with itself.
        overlap: F/(w w') - 1 at the r nodes of the queries' correlation.
        response: its derivative along the values' kernel, per unit of correlation; None where that
            is the derivative in the correlation.
        turned: its first order in each of `Rotation.kernels`; None without rotation.
        plain: its first order in the values' kernel; None without rotation.
        noise: of rows with themselves, its derivative along the keys' own variances, up to a
            factor; None where none was asked for.
    """

    pairs: list[Pair]
    with_itself: bool
    overlap: PairSum
    response: PairSum | None
    turned: PairSum | None
    plain: PairSum | None
    noise: PairSum | None = None

    @classmethod
    def of(cls, pairs: list[Pair], exponents: Array, slopes: Array, projected: Projected) -> Block:
        """Form the joint laws.

        Args:
            pairs: of classes, all of one shape.
            exponents: (c, r) beta at the nodes.
            slopes: (c, r) its derivative in the correlation.
            projected: kernels of the layer.
        """
        rows = stacked([one.weights for one, _ in pairs])
        rows2 = stacked([two.weights for _, two in pairs])
        directions, along = [], None
        if projected.values is not None:
            along = _projected(projected.values, pairs)
            directions.append(slopes[..., None, None] * along)
        exponent = exponents[..., None, None] * _projected(projected.within, pairs)
        joint, *moved = _laws(pairs, exponent, directions, JOINT_SWEEPS)
        laws = [PairSum.of(one, rows, rows2) for one in (joint - 1.0, *moved)]
        response, turned, plain = laws[1] if moved else None, None, None
        if along is not None and projected.turned is not None:
            turned = PairSum.of(_projected(projected.turned, pairs), rows, rows2)
            plain = PairSum.of(along, rows, rows2)
        return cls(pairs, pairs[0][0] is pairs[0][1], laws[0], response, turned, plain)

    def with_noise(self, mixed: Mixed) -> Block:
        """The same with `noise`, along a kernel of which this is (1 - A) C."""
        if not self.with_itself:
            return self
        sums, direction = self.overlap, _projected(mixed, self.pairs).astype(float)
        exponent = np.log1p(sums.excess[:, :1].astype(float))
        _, moved = _laws(self.pairs, exponent, [direction], 0)
        return self._replace(noise=PairSum.of(moved, sums.rows, sums.rows2))

    def of_keys(self, kernel: Single) -> Single:
        """(c, ..., n, k): the parts of a (..., Lk, Lk) kernel that the pairs meet."""
        return stacked([kernel[window(one.keys, two.keys)] for one, two in self.pairs])

    def of_patterns(self, weights: Single) -> Single:
        """(c, ..., a, b): the parts of (..., P, P) weights on pairs of patterns."""
        return stacked([weights[..., one.patterns, two.patterns] for one, two in self.pairs])

    def add_to_keys(self, total: Single, parts: Single, parity: Single | None = None) -> None:
        """Add (c, m, n, k) to a (m, Lk, Lk) total, in both orders of a pair: those of parity -1
        change sign when it turns."""
        for (one, two), part in zip(self.pairs, parts, strict=True):
            total[window(one.keys, two.keys)] += part
            if not self.with_itself:
                turned = part if parity is None else parity[:, None, None] * part
                total[window(two.keys, one.keys)] += turned.swapaxes(-1, -2)

    def put_patterns(self, total: Single, parts: Single, parity: Array | None) -> None:
        """Write (c, r, a, b) into a (r, P, P) total, in both orders of a pair: those of parity -1
        change sign when it turns."""
        sign = 1.0 if parity is None else parity[:, None, None]
        for (one, two), part in zip(self.pairs, parts, strict=True):
            rows, rows2 = one.patterns, two.patterns
            total[..., rows, rows2] = part
            if not self.with_itself:
                total[..., rows2, rows] = sign * part.swapaxes(-1, -2)


def by_shape(
    classes: Mapping[int, RowClass], nodes: int
) -> Iterator[tuple[list[tuple[int, int]], list[Pair]]]:
    """All pairs of classes, in stacks of one shape."""
    stacks: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    several = list(classes)
    for position, one in enumerate(several):
        for two in several[position:]:
            shape = (*classes[one].weights.shape, *classes[two].weights.shape, one == two)
            stacks.setdefault(shape, []).append((one, two))
    for shape, indices in stacks.items():
        most = max(1, STACK_ENTRIES // (shape[1] * shape[3] * nodes))
        for start in range(0, len(indices), most):
            part = indices[start : start + most]
            yield part, [(classes[one], classes[two]) for one, two in part]


class JointLaws:
    """Blocks of pairs of classes, addressed by rows and keys.

    Attributes:
        blocks: every two classes once.
    """

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
        several = {
            k: one.in_single() for k, one in enumerate(classes) if len(one.leader_weights) > 1
        }
        self._classes = list(several.values())
        projected = Projected.of_layer(self._classes, logits)
        self.blocks: list[Block] = []
        for indices, pairs in by_shape(several, exponents.shape[1]):
            one, two = np.transpose(indices)
            exponent = geometric_mean(exponents[one], exponents[two])
            self.blocks.append(Block.of(pairs, exponent, exponent @ derivative, projected))

    def respond_to(self, variance: Array) -> None:
        """Form `Block.noise` along diag(`variance`) of the keys."""
        mixed = _mixed(self._classes, np.diag(variance / max(variance.max(), 1e-300))[None])
        self.blocks = [block.with_noise(mixed) for block in self.blocks]

    def compressed(self, pairs: Single) -> Single:
        """(..., P, P) sums over the rows of every two patterns."""
        if self._pattern is None:
            return pairs
        ordered = pairs[..., self._order, :]
        rows = np.add.reduceat(ordered, self._starts, axis=-2, dtype=np.float64)
        columns = np.add.reduceat(rows[..., self._order], self._starts, axis=-1)
        return np.asarray(columns, dtype=np.float32)

    def gather(self, law: str, kernel: Array, count: int, parity: Array | None = None) -> Array:
        """(r, Lq, Lq): tr(P_i g_r P_i' X^T) of one of the blocks' laws, for X (Lk, Lk)."""
        scale, scaled = single(kernel)
        values = np.zeros((count, self._patterns, self._patterns), dtype=np.float32)
        for block in self.blocks:
            if (sums := getattr(block, law)) is not None:
                block.put_patterns(values, sums.gather(block.of_keys(scaled)), parity)
        if self._pattern is not None:
            values = values[..., self._pattern[:, None], self._pattern]
        return np.asarray(values * scale, dtype=np.float64)

    def spread(self, law: str, weights: Single, parity: Array | None = None) -> Array:
        """(m, Lk, Lk): sum_r,ii' H_r,ii' P_i g_r P_i' of one of the blocks' laws, for compressed
        weights H (m, r, P, P); `parity` (m,) where H changes sign when a pair of rows turns."""
        total = np.zeros((len(weights), self._keys, self._keys), dtype=np.float32)
        signs = None if parity is None else parity.astype(np.float32)
        for block in self.blocks:
            if (sums := getattr(block, law)) is not None:
                block.add_to_keys(total, sums.spread(block.of_patterns(weights)), signs)
        return total.astype(np.float64)
