"""Joint laws of all pairs of rows of one layer, summed over rows or over keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .blocks import Block, Projected, by_shape
from .contractions import single
from .logits import Logits
from .padded import padded
from .pair_weights import geometric_mean
from .row_classes import RowClass, as_slice

Array = NDArray[np.float64]
Single = NDArray[np.float32]
Indices = NDArray[np.intp]


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
