"""Sums over pairs of attention rows of P_i g P_i', with P_i = diag(w_i) - w_i w_i^T.

P_i removes a row's mean, so that every joint law w_i w_i'^T + P_i g P_i' has the marginals w_i and
w_i' whatever g is. The two maps below are each other's transpose:

    spread: H -> sum_{r i i'} H_r,ii' P_i g_r P_i'        gather: X -> tr(P_i g_r P_i' X^T)

g is stored, and its sums are formed, in single precision, which halves their time and memory: its
rounding is four orders of magnitude below the error of any g that is not exact. What the maps are
given is on the scale of its largest entry (`single`), so that sums neither overflow nor underflow.

The leading axis c of every array counts pairs of row groups of one shape, treated together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        """(c, r, a, b): tr(P_i g_r P_i' X^T) for every pair of rows; X (c, n, k), or (c, r, n, k)
        where every g_r meets its own."""
        inner = kernel if kernel.ndim == 4 else kernel[:, None]
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
