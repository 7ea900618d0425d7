"""Joint laws of all pairs of rows of one layer, summed over rows or over keys.

Many pairs of classes of one shape are treated at a time.
Classes of few keys cost more to address than to compute. Those whose numbers of keys share their
next power of two are brought to the largest of them, by keys of weight 0 and rows of weight 0: a
joint law between such keys is 1, and neither they nor the rows contribute to any sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .balance import EXPONENT_MAX, JOINT_SWEEPS, joint_excess, tangent
from .contractions import PairSum, single
from .logits import Logits
from .pair_weights import geometric_mean
from .row_classes import RowClass, as_slice, stacked, window

Array = NDArray[np.float64]
Single = NDArray[np.float32]
Indices = NDArray[np.intp]

MOST_PADDED = 32
"""Classes of more keys keep their shape."""


class PaddedClass(NamedTuple):
    """One class in the shape of its bin, in single precision.

    Attributes:
        source: the class.
        patterns, keys: of its a rows and n keys, real and added.
        own_patterns, own_keys: where among them the real ones are.
        weights: (a, n) mean attention.
        own_weights: (n,) of the class's own row.
        response: (n, n) 1 - A.
    """

    source: RowClass
    patterns: slice
    keys: slice | Indices
    own_patterns: slice
    own_keys: slice
    weights: Single
    own_weights: Single
    response: Single


def padded(classes: list[RowClass], patterns: int, tokens: int) -> dict[int, PaddedClass]:
    """The classes of more than one key, by index; `patterns` and `tokens` count either in all."""
    several = {i: one for i, one in enumerate(classes) if len(one.own_weights) > 1}
    shapes: dict[int, tuple[int, int]] = {}
    for one in several.values():
        rows, keys = one.weights.shape
        most = shapes.get(_bin(keys), (0, 0))
        shapes[_bin(keys)] = max(most[0], rows), max(most[1], keys)
    return {
        index: _in_shape(one, shapes[_bin(one.weights.shape[1])], patterns, tokens)
        for index, one in several.items()
    }


def _bin(keys: int) -> int:
    """Next power of two; classes beyond `MOST_PADDED` have bins of their own shape's."""
    return 1 << (keys - 1).bit_length() if keys <= MOST_PADDED else keys


def _in_shape(one: RowClass, shape: tuple[int, int], patterns: int, tokens: int) -> PaddedClass:
    rows, own_rows = _wider(one.patterns, shape[0], patterns)
    if isinstance(one.keys, slice):
        keys: slice | Indices
        keys, own_keys = _wider(one.keys, shape[1], tokens)
    else:
        others = np.setdiff1d(np.arange(tokens), one.keys)
        keys = np.concatenate([one.keys, others[: shape[1] - len(one.keys)]])
        own_keys = slice(0, len(one.keys))

    def placed(values: Array, shape: tuple[int, ...], where: Any) -> Single:
        if values.shape == shape:
            return values.astype(np.float32)
        whole = np.zeros(shape, dtype=np.float32)
        whole[where] = values
        return whole

    return PaddedClass(
        one,
        rows,
        keys,
        own_rows,
        own_keys,
        placed(one.weights, shape, (own_rows, own_keys)),
        placed(one.own_weights, shape[1:], own_keys),
        placed(one.response, (shape[1], shape[1]), (own_keys, own_keys)),
    )


def _wider(span: slice, length: int, limit: int) -> tuple[slice, slice]:
    """A slice of the given length around `span`, within `limit`, and where `span` is inside."""
    start = min(span.start, limit - length)
    inner = span.start - start
    return slice(start, start + length), slice(inner, inner + span.stop - span.start)


Pair = tuple[PaddedClass, PaddedClass]

STACK_ENTRIES = 1 << 18
"""Entries of the joint laws treated at a time, at all nodes: a megabyte, which stays in cache."""


class ProjectedKernels(NamedTuple):
    """(1 - A) C (1 - A')^T of kernels C and of every two classes.

    Attributes:
        mixed: by a class's row, (t, n, Lk): (1 - A) C.
    """

    mixed: dict[int, Single]

    @classmethod
    def of_classes(cls, classes: Iterable[PaddedClass], kernels: Array) -> ProjectedKernels:
        """Of (t, Lk, Lk) kernels."""
        whole: Single = kernels.astype(np.float32)
        return cls({one.source.row: one.response @ whole[..., one.keys, :] for one in classes})

    def of(self, pairs: list[Pair]) -> Single:
        """(c, t, n, k)."""
        mixed = [self.mixed[one.source.row][..., two.keys] for one, two in pairs]
        projected: Single = stacked(mixed) @ stacked([two.response.T for _, two in pairs])[:, None]
        return projected


class Projected(NamedTuple):
    """Projected kernels of one layer.

    Attributes:
        within: of the keys within a row.
        values: of the values; None where moving along the queries' correlation moves along them.
        turned: of each of `Rotation.kernels`; None without rotation.
    """

    within: ProjectedKernels
    values: ProjectedKernels | None
    turned: ProjectedKernels | None

    @classmethod
    def of_layer(cls, classes: Iterable[PaddedClass], logits: Logits) -> Projected:
        """Form the products that all pairs share."""
        within = ProjectedKernels.of_classes(classes, logits.within[None])
        if logits.aligned:
            return cls(within, None, None)
        values = ProjectedKernels.of_classes(classes, logits.values[None])
        if logits.rotation is None:
            return cls(within, values, None)
        kernels = logits.rotation.kernels(logits.keys)
        return cls(within, values, ProjectedKernels.of_classes(classes, kernels))


class Block(NamedTuple):
    """Pairs of classes of one shape and what the joint laws of their rows have beyond independence.

    Attributes:
        pairs: the c pairs of classes.
        own: whether every pair is a class with itself.
        overlap: F/(w w') - 1 at the r nodes of the queries' correlation.
        response: its derivative along the values' kernel, per unit of correlation; None where that
            is the derivative in the correlation.
        turned: its first order in each of `Rotation.kernels`; None without rotation.
        plain: its first order in the values' kernel; None without rotation.
    """

    pairs: list[Pair]
    own: bool
    overlap: PairSum
    response: PairSum | None
    turned: PairSum | None
    plain: PairSum | None

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
            stacked([one.own_weights for one, _ in pairs])[:, None],
            stacked([two.own_weights for _, two in pairs])[:, None],
        )
        joint = exponents[..., None, None].astype(np.float32) * projected.within.of(pairs)
        np.minimum(joint, EXPONENT_MAX, out=joint)
        joint = joint_excess(joint, shares[0], shares[1], JOINT_SWEEPS)
        response = turned = plain = None
        if projected.values is not None:
            along = projected.values.of(pairs)
            step = slopes[..., None, None].astype(np.float32) * along
            response = PairSum.of(tangent(1.0 + joint, step, shares[0], shares[1]), rows, rows2)
            if projected.turned is not None:
                turned = PairSum.of(projected.turned.of(pairs), rows, rows2)
                plain = PairSum.of(along, rows, rows2)
        own = pairs[0][0] is pairs[0][1]
        return cls(pairs, own, PairSum.of(joint, rows, rows2), response, turned, plain)

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
            if not self.own:
                turned = part if parity is None else parity[:, None, None] * part
                total[window(two.keys, one.keys)] += turned.swapaxes(-1, -2)

    def put_patterns(self, total: Single, parts: Single, parity: Array | None) -> None:
        """Write (c, r, a, b) into a (r, P, P) total, in both orders of a pair: those of parity -1
        change sign when it turns."""
        sign = 1.0 if parity is None else parity[:, None, None]
        for (one, two), part in zip(self.pairs, parts, strict=True):
            rows, rows2 = one.source.patterns, two.source.patterns
            inside = part[..., one.own_patterns, two.own_patterns]
            total[..., rows, rows2] = inside
            if not self.own:
                total[..., rows2, rows] = sign * inside.swapaxes(-1, -2)


def by_shape(
    classes: Mapping[int, PaddedClass], nodes: int
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
            classes: of rows.
            pattern: (Lq,) the pattern of every row.
            exponents: (classes, r) beta at the nodes.
            derivative: (r, r) from values at the nodes to derivatives at the nodes.
            logits: of the layer.
        """
        self._patterns = int(pattern.max()) + 1
        self._keys = len(logits.values)
        order = np.argsort(pattern, kind="stable")
        identity = self._patterns == len(pattern) and bool(np.all(np.diff(pattern) == 1))
        self._pattern = None if identity else pattern
        self._order = as_slice(order) if bool(np.all(np.diff(order) == 1)) else order
        self._starts = np.searchsorted(pattern[order], np.arange(self._patterns))
        wide = padded(classes, self._patterns, self._keys)
        projected = Projected.of_layer(wide.values(), logits)
        self.blocks = []
        for indices, pairs in by_shape(wide, exponents.shape[1]):
            one, two = np.transpose(indices)
            exponent = geometric_mean(exponents[one], exponents[two])
            self.blocks.append(Block.of(pairs, exponent, exponent @ derivative, projected))

    def compressed(self, pairs: Single) -> Single:
        """(..., P, P) sums over the rows of every two patterns."""
        if self._pattern is None:
            return pairs
        ordered = pairs[..., self._order, :]
        rows = np.add.reduceat(ordered, self._starts, axis=-2, dtype=np.float64)
        columns = np.add.reduceat(rows[..., self._order], self._starts, axis=-1)
        return np.asarray(columns, dtype=np.float32)

    def gather(self, law: str, kernel: Array, count: int, parity: Array | None = None) -> Array:
        """(r, Lq, Lq): tr(P_i g_r P_i' X^T) of one of the blocks' laws, for X (Lk, Lk) or one X
        (r, Lk, Lk) for every g_r."""
        scale, met = single(kernel)
        values = np.zeros((count, self._patterns, self._patterns), dtype=np.float32)
        for block in self.blocks:
            part = getattr(block, law).gather(block.of_keys(met))
            block.put_patterns(values, part, parity)
        if self._pattern is not None:
            values = values[..., self._pattern[:, None], self._pattern]
        return np.asarray(values * scale, dtype=np.float64)

    def spread(self, law: str, weights: Single, parity: Array | None = None) -> Array:
        """(m, Lk, Lk): sum_r,ii' H_r,ii' P_i g_r P_i' of one of the blocks' laws, for compressed
        weights H (m, r, P, P); `parity` (m,) where H changes sign when a pair of rows turns."""
        total = np.zeros((len(weights), self._keys, self._keys), dtype=np.float32)
        signs = None if parity is None else parity.astype(np.float32)
        for block in self.blocks:
            part = getattr(block, law).spread(block.of_patterns(weights))
            block.add_to_keys(total, part, signs)
        return total.astype(np.float64)
