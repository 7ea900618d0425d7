"""Joint laws of the rows of two classes, many pairs of classes of one shape at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moments.kernels.balance import EXPONENT_MAX, balanced, tangent
from moments.kernels.contractions import PairSum
from moments.kernels.logits import Logits
from moments.kernels.row_classes import RowClass, window

Array = NDArray[np.float64]

Pair = tuple[RowClass, RowClass]


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
    def of(cls, pairs: list[Pair], exponents: Array, slopes: Array, logits: Logits) -> Block:
        """Form the joint laws.

        Args:
            pairs: of classes, all of one shape.
            exponents: (c, r) beta at the nodes.
            slopes: (c, r) its derivative in the correlation.
            logits: of the layer.
        """
        first = np.stack([one.own_weights for one, _ in pairs])
        second = np.stack([two.own_weights for _, two in pairs])
        rows = np.stack([one.weights for one, _ in pairs])
        rows2 = np.stack([two.weights for _, two in pairs])
        single = [side.astype(np.float32)[:, None] for side in (first, second)]
        projected = _projected(pairs, logits.within[None])
        joint = exponents[..., None, None].astype(np.float32) * projected.astype(np.float32)
        np.exp(np.minimum(joint, EXPONENT_MAX, out=joint), out=joint)
        joint = balanced(joint, single[0], single[1], 3)
        response = turned = plain = None
        if not logits.aligned:
            along = _projected(pairs, logits.values[None])
            step = slopes[..., None, None].astype(np.float32) * along.astype(np.float32)
            response = PairSum.of(tangent(joint, step, single[0], single[1]), rows, rows2)
            if logits.rotation is not None:
                terms = _projected(pairs, logits.rotation.kernels(logits.keys))
                turned = PairSum.of(terms.astype(np.float32), rows, rows2)
                plain = PairSum.of(along.astype(np.float32), rows, rows2)
        joint -= 1.0
        own = pairs[0][0] is pairs[0][1]
        return cls(pairs, own, PairSum.of(joint, rows, rows2), response, turned, plain)

    def of_keys(self, kernel: Array) -> Array:
        """(c, ..., n, k): the parts of a (..., Lk, Lk) kernel that the pairs meet."""
        parts = [kernel[window(one.keys, two.keys)] for one, two in self.pairs]
        return parts[0][None] if len(parts) == 1 else np.stack(parts)

    def of_patterns(self, weights: Array) -> Array:
        """(c, ..., a, b): the parts of (..., P, P) weights on pairs of patterns."""
        parts = [weights[..., one.patterns, two.patterns] for one, two in self.pairs]
        return parts[0][None] if len(parts) == 1 else np.stack(parts)

    def add_to_keys(self, total: Array, parts: Array) -> None:
        """Add (c, ..., n, k) to a (..., Lk, Lk) total, in both orders of a pair."""
        for (one, two), part in zip(self.pairs, parts, strict=True):
            total[window(one.keys, two.keys)] += part
            if not self.own:
                total[window(two.keys, one.keys)] += part.swapaxes(-1, -2)

    def put_patterns(self, total: Array, parts: Array, parity: Array | None) -> None:
        """Write (c, r, a, b) into a (r, P, P) total, in both orders of a pair: those of parity -1
        change sign when it turns."""
        sign = 1.0 if parity is None else parity[:, None, None]
        for (one, two), part in zip(self.pairs, parts, strict=True):
            total[..., one.patterns, two.patterns] = part
            if not self.own:
                total[..., two.patterns, one.patterns] = sign * part.swapaxes(-1, -2)


def _projected(pairs: list[Pair], kernels: Array) -> Array:
    """(c, t, n, k): (1 - A) C (1 - A')^T of (t, Lk, Lk) kernels C."""
    parts = [
        one.response @ kernels[window(one.keys, two.keys)] @ two.response.T for one, two in pairs
    ]
    return parts[0][None] if len(parts) == 1 else np.stack(parts)


def by_shape(classes: list[RowClass]) -> Iterator[tuple[list[tuple[int, int]], list[Pair]]]:
    """All pairs of classes with more than one key, in stacks of one shape."""
    stacks: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    several = [index for index, group in enumerate(classes) if len(group.own_weights) > 1]
    for position, one in enumerate(several):
        for two in several[position:]:
            shape = (*classes[one].weights.shape, *classes[two].weights.shape, one == two)
            stacks.setdefault(shape, []).append((one, two))
    for indices in stacks.values():
        yield indices, [(classes[one], classes[two]) for one, two in indices]
