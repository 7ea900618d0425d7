"""Joint laws of all pairs of rows of one layer, summed over rows or over keys.

Joint laws are w_i w_i'^T + P_i g P_i', where P_i = diag(w_i) - w_i w_i^T removes a row's mean, so
that the marginals are w_i and w_i' whatever g is. The two maps are each other's transpose:

    spread: H -> sum_{r i i'} H_r,ii' P_i g_r P_i'        gather: X -> tr(P_i g_r P_i' X^T)

g is stored, and its sums are formed, in single precision. The leading axis c of every array counts
pairs of classes of one shape, treated together. See docs/theory/attention.md, The closure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import exact_rows
from .finite_rows import Calibration, Nodes, Widths
from .logits import Logits, Rotation, RowClass, as_slice, stacked, window
from .row_statistics import AttentionRows

# --- sums over pairs ------------------------------------------------------------------------------

Array = NDArray[np.float64]
Single = NDArray[np.float32]


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
    def of(cls, excess: Single, rows: Single, rows2: Single) -> PairSum:
        """Form the products."""
        left: Single = rows[:, None] @ excess
        turned = rows2.swapaxes(1, 2)[:, None]
        return cls(excess, rows, rows2, left, excess @ turned, left @ turned)

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


# --- balanced laws --------------------------------------------------------------------------------

EXPONENT_MAX = 40.0
"""Cap on exponents: reached only beyond the tables of exact rows, where nothing is claimed."""

TOLERANCE = 2e-4
"""Largest change of an overlap at which its iteration ends."""

ITERATIONS = 30
"""Most steps to a self-consistent overlap."""

SELF_SWEEPS = 4
"""Sinkhorn sweeps within a step of that iteration, which itself goes on balancing."""

JOINT_SWEEPS = 3
"""Sinkhorn sweeps of the joint law of two rows."""

TANGENT_SWEEPS = 6
"""Sweeps that bring the means of its derivative to 0."""


Real = TypeVar("Real", np.float32, np.float64)


def balanced(
    joint: NDArray[Real], weights: NDArray[Real], weights2: NDArray[Real], sweeps: int
) -> NDArray[Real]:
    """Sinkhorn: scale `joint` (..., n, k) so that its means over either index are 1.

    The means are weighted by `weights` (n,) and `weights2` (k,), which sum to 1.
    """
    left: NDArray[Real] = np.ones_like(joint[..., 0])
    right: NDArray[Real] = np.ones_like(joint[..., 0, :])
    for _ in range(sweeps):
        np.divide(1.0, ((left * weights)[..., None, :] @ joint)[..., 0, :], out=right)
        np.divide(1.0, (joint @ (right * weights2)[..., None])[..., 0], out=left)
    scaled = joint * left[..., :, None]
    scaled *= right[..., None, :]
    return scaled


SMALL_EXPONENT = 0.02
"""Exponents up to which e^x - 1 is its series to third order, 3e-7 of itself in error."""


def joint_excess(
    exponents: NDArray[Real], weights: NDArray[Real], weights2: NDArray[Real], sweeps: int
) -> NDArray[Real]:
    """`balanced` of e^exponents, less 1, to the relative precision of the numbers.

    Joint laws of small exponents are 1 to single precision. What they have beyond 1 is therefore
    scaled by itself: with means 1 + m, the factor 1/(1 + m) has -m/(1 + m) beyond 1.
    """
    small = np.abs(exponents).max((-2, -1)) <= SMALL_EXPONENT
    every = np.broadcast_to(weights, exponents[..., 0].shape)
    others = np.broadcast_to(weights2, exponents[..., 0, :].shape)
    if not small.any():
        return balanced(np.exp(exponents), every, others, sweeps) - 1
    result = np.empty_like(exponents)
    if not small.all():
        large = ~small
        result[large] = balanced(np.exp(exponents[large]), every[large], others[large], sweeps) - 1
    x, weight, other = exponents[small], every[small], others[small]
    excess = x * (1.0 + x * (0.5 + x / 6.0))
    left = np.zeros_like(weight)
    right = np.zeros_like(other)
    for _ in range(sweeps):
        held = left * weight
        mean = ((weight + held)[..., None, :] @ excess)[..., 0, :] + held.sum(-1, keepdims=True)
        right = -mean / (1.0 + mean)
        held = right * other
        mean = (excess @ (other + held)[..., None])[..., 0] + held.sum(-1, keepdims=True)
        left = -mean / (1.0 + mean)
    factor = left[..., :, None] * (1.0 + right[..., None, :]) + right[..., None, :]
    result[small] = excess + factor + factor * excess
    return result


def tangent(
    joint: NDArray[Real], direction: NDArray[Real], weights: NDArray[Real], weights2: NDArray[Real]
) -> NDArray[Real]:
    """joint o (direction + u 1^T + 1 v^T) whose weighted means over either index are 0.

    `joint` (..., n, k) has means 1, so that its spectrum in [-1, 1] makes the sweeps contract.
    """
    moved = joint * direction
    rows = (moved @ weights2[..., None])[..., 0]
    columns = (weights[..., None, :] @ moved)[..., 0, :]
    right = np.zeros_like(columns)
    left = rows
    for _ in range(TANGENT_SWEEPS):
        left = -rows - (joint @ (weights2 * right)[..., None])[..., 0]
        right = -columns - ((weights * left)[..., None, :] @ joint)[..., 0, :]
    moved += joint * (left[..., :, None] + right[..., None, :])
    return moved


def self_overlap(
    kernel: Array, weights: Array, first_guess: Array, exponent: float, steady: float
) -> Array:
    """Solve A = F/w, F = w w^T o exp(exponent (1 - A) C (1 - A)^T) scaled to the marginals w.

    Args:
        kernel: (n, n) second moments of the keys.
        weights: (n,) mean attention.
        first_guess: (n, n) unnormalised A.
        exponent: beta(1), per unit of the projected kernel.
        steady: the first step, and the least: `AttentionRows.step`.

    Returns:
        1 - A.
    """
    # single precision, three orders of magnitude below the tolerance
    identity = np.eye(len(weights), dtype=np.float32)
    scaled = np.clip(exponent * kernel, -1e30, 1e30).astype(np.float32)
    shares = weights.astype(np.float32)
    guess = first_guess / np.maximum(first_guess.sum(1, keepdims=True), 1e-300)
    overlap = guess.astype(np.float32)
    step, last = steady, None
    for _ in range(ITERATIONS):
        response = identity - overlap
        projected = response @ scaled @ response.T
        joint = np.exp(np.minimum(projected, EXPONENT_MAX, out=projected), out=projected)
        change = balanced(joint, shares, shares, SELF_SWEEPS)
        change *= shares
        change -= overlap
        if last is not None:  # the step that would have cancelled the last change (Irons and Tuck)
            turned = last - change
            size = float(np.vdot(turned, turned))
            step = min(max(step * float(np.vdot(last, turned)) / max(size, 1e-30), steady), 1.0)
        last = change
        overlap = overlap + np.float32(step) * change
        if np.abs(change).max() < TOLERANCE:
            break
    return np.asarray(identity - overlap, dtype=np.float64)


# --- weights of pairs of rows ---------------------------------------------------------------------

Indices = NDArray[np.intp]

RHO_MIN = 1e-3
"""Where the ratio of two excesses is taken at a node nearer to 0, their common zero."""


@dataclass(frozen=True)
class PairWeights:
    """One entry per pair of rows; (Lq, Lq), behind a leading axis where stated.

    Attributes:
        value, slope: (r, ...) interpolation weights of the nodes for the excess and for its
            derivative in the correlation, in single precision.
        key, query: width factors of the key and query paths; the first includes the correlation.
        cross: that of the correlation of the key and value paths.
        growth: of the joint law in the logits' variance, over that in the correlation.
        correlation: at which the joint law is read.
        turn: the correlation at which the joint law is read, over that of the queries.
        bare: correlation of the queries.
        terms: (1 + t, ...) covariance per unit of `bare` along each of `Rotation.kernels` that this
            leaves out; None without rotation.
    """

    value: Single
    slope: Single
    key: Array
    query: Array
    cross: Array
    growth: Array
    correlation: Array
    turn: Array | float
    bare: Array
    terms: Array | None

    @classmethod
    def of(
        cls,
        logits: Logits,
        stats: AttentionRows,
        pattern: Indices,
        group: Indices,
        scale: Array,
        nodes: Nodes,
        calibration: Calibration,
        widths: Widths,
        overlaps: Array | None,
    ) -> PairWeights:
        """Weights at the correlations of the layer's queries.

        Args:
            logits: of the layer.
            stats: of the patterns, then of the classes' own rows.
            pattern, group: (Lq,) pattern of every row and (P,) class of every pattern.
            scale: (r, Lq) amplitude of every row at the nodes over its class's.
            nodes, calibration, widths: of the closure.
            overlaps: (1 + t, Lq, Lq) what each of `Rotation.kernels` adds to the overlap of two
                rows' outputs, to first order; None without rotation.
        """
        bare, rotation, of_class = logits.correlation(), logits.rotation, group[pattern]
        turn: Array | float = 1.0
        if rotation is not None and overlaps is not None:
            turn = _turn(rotation, overlaps, bare, nodes.low)
        correlation = bare * turn
        value, slope = nodes.basis(correlation)
        sharpened = sharpening(stats, pattern[:, None], pattern[None, :], correlation)

        def between(values: Array) -> Array:
            factor = np.einsum("rij,ir->ij", value, values[of_class])
            return np.asarray(0.5 * (factor + factor.T))

        query, growth = between(calibration.query) * sharpened, between(calibration.growth)
        scales = scale[:, :, None] * scale[:, None, :]
        read, read_slope = ((scales * one).astype(np.float32) for one in (value, slope))
        shared = 2.0 / widths.d_model  # of the overlap that values and keys of one token have
        if rotation is None:
            key, cross = between(calibration.key) * sharpened, shared * growth * sharpened
            return cls(read, read_slope, key, query, cross, growth, correlation, turn, bare, None)
        # Products fluctuate together where keys are turned alike, however far apart their rows are.
        beside = calibration.key - nodes.rho * calibration.along
        key = bare * rotation.queries * between(calibration.along) + between(beside)
        key, cross = key * sharpened, shared * growth * sharpened
        amplitude = np.sqrt(logits.scale * logits.temperature * stats.softening[pattern])
        left_out = np.concatenate([(rotation.queries - turn)[None], rotation.query_terms])
        terms = np.outer(amplitude, amplitude) * left_out
        return cls(read, read_slope, key, query, cross, growth, correlation, turn, bare, terms)


def _turn(rotation: Rotation, overlaps: Array, bare: Array, low: float) -> Array:
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


def sharpening(
    stats: AttentionRows, first: Indices, second: Indices, correlation: Array
) -> Array | float:
    """Growth of dF/drho beyond the tables, of pairs of rows with these statistics.

    At rho = 1 a hard softmax is sensitive only where two logits nearly tie, E tr J^2 of order
    theta^{-1/2}; correlations with theta (1 - rho) >> 1 have reached their limit.
    """
    if not np.any(stats.logit_variance > stats.theta):
        return 1.0
    inside = np.sqrt(stats.theta)
    beyond = np.sqrt(np.maximum(stats.logit_variance, stats.theta))
    unlike = 1.0 - correlation
    inner = 1.0 / (inside[first] * inside[second]) + unlike
    return np.asarray(np.sqrt(inner / (1.0 / (beyond[first] * beyond[second]) + unlike)))


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


def geometric_mean(first: Array, second: Array) -> Array:
    """Of two numbers of one sign, with that sign; the arithmetic mean of others."""
    product = first * second
    size = np.sign(first) * np.sqrt(np.maximum(product, 0.0))
    return np.where(product > 0.0, size, 0.5 * (first + second))


# --- joint laws of classes ------------------------------------------------------------------------

Pair = tuple[RowClass, RowClass]

STACK_ENTRIES = 1 << 18
"""Entries of the joint laws treated at a time, at all nodes: a megabyte, which stays in cache."""


Mixed = dict[int, Single]
"""By a class's row, (t, n, Lk): (1 - A) C of t kernels C."""


def _mixed(classes: Iterable[RowClass], kernels: Array) -> Mixed:
    whole: Single = kernels.astype(np.float32)
    return {one.row: one.response @ whole[..., one.keys, :] for one in classes}


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
        shares = (
            stacked([one.leader_weights for one, _ in pairs])[:, None],
            stacked([two.leader_weights for _, two in pairs])[:, None],
        )
        joint = exponents[..., None, None].astype(np.float32) * _projected(projected.within, pairs)
        np.minimum(joint, EXPONENT_MAX, out=joint)
        joint = joint_excess(joint, shares[0], shares[1], JOINT_SWEEPS)
        response = turned = plain = None
        if projected.values is not None:
            along = _projected(projected.values, pairs)
            step = slopes[..., None, None].astype(np.float32) * along
            response = PairSum.of(tangent(1.0 + joint, step, shares[0], shares[1]), rows, rows2)
            if projected.turned is not None:
                turned = PairSum.of(_projected(projected.turned, pairs), rows, rows2)
                plain = PairSum.of(along, rows, rows2)
        with_itself = pairs[0][0] is pairs[0][1]
        return cls(pairs, with_itself, PairSum.of(joint, rows, rows2), response, turned, plain)

    def with_noise(self, mixed: Mixed) -> Block:
        """The same with `noise`, along a kernel of which this is (1 - A) C."""
        if not self.with_itself:
            return self
        sums, shares = self.overlap, stacked([one.leader_weights for one, _ in self.pairs])
        direction, shares = _projected(mixed, self.pairs), shares[:, None]
        moved = tangent(1.0 + sums.excess[:, :1], direction, shares, shares)
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
        scale, met = single(kernel)
        values = np.zeros((count, self._patterns, self._patterns), dtype=np.float32)
        for block in self.blocks:
            if (sums := getattr(block, law)) is not None:
                block.put_patterns(values, sums.gather(block.of_keys(met)), parity)
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
