"""Joint laws of the rows of two classes, many pairs of classes of one shape at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .balance import EXPONENT_MAX, JOINT_SWEEPS, joint_excess, tangent
from .contractions import PairSum
from .logits import Logits
from .padded import PaddedClass
from .row_classes import stacked, window

Array = NDArray[np.float64]

Single = NDArray[np.float32]

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
