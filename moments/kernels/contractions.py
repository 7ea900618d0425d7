"""Sums over pairs of attention rows of P_i g P_i', with P_i = diag(w_i) - w_i w_i^T.

P_i removes a row's mean, so that every joint law w_i w_i'^T + P_i g P_i' has the marginals w_i and
w_i' whatever g is. The two maps below are each other's transpose:

    spread: H -> sum_{r i i'} H_r,ii' P_i g_r P_i'        gather: X -> tr(P_i g_r P_i' X^T)

g is stored, and its sums are formed, in single precision, which halves their time and memory: its
rounding is four orders of magnitude below the error of any g that is not exact. Sums are formed on
the scale of the largest entry, so that they neither overflow nor underflow.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Single = NDArray[np.float32]


class PairSum(NamedTuple):
    """One g between a rows over n keys and b rows over k keys, with the products both maps need.

    Attributes:
        excess: (r, n, k) g.
        rows, rows2: (a, n) and (b, k) mean attention w_i, w_i'.
        left: (r, a, k) w_i^T g.
        right: (r, n, b) g w_i'.
        both: (r, a, b) w_i^T g w_i'.
    """

    excess: Single
    rows: Single
    rows2: Single
    left: Single
    right: Single
    both: Single

    @classmethod
    def of(cls, excess: Single, rows: Array, rows2: Array) -> PairSum:
        """Form the products."""
        one: Single = rows.astype(np.float32)
        two: Single = rows2.astype(np.float32)
        left: Single = one @ excess
        return cls(excess, one, two, left, excess @ two.T, left @ two.T)

    def spread(self, pair_weights: Array) -> Array:
        """(m, n, k) key kernels from (m, r, a, b) weights H on pairs of rows."""
        scale, weights = _single(pair_weights)
        onward = weights @ self.rows2  # (m, r, a, k)
        total = np.einsum("mrnk,rnk->mnk", self.rows.T @ onward, self.excess)
        total -= self.rows.T @ np.einsum("mrak,rak->mak", onward, self.left)
        total -= np.einsum("mrnb,rnb->mnb", self.rows.T @ weights, self.right) @ self.rows2
        both = np.einsum("mrab,rab->mab", weights, self.both)
        total += self.rows.T @ both @ self.rows2
        return np.asarray(total, dtype=np.float64) * scale

    def gather(self, kernel: Array) -> Array:
        """(r, a, b): tr(P_i g_r P_i' kernel^T) for every pair of rows; kernel (n, k)."""
        scale, inner = _single(kernel)
        kernel_left = self.rows @ inner  # (a, k)
        kernel_right = inner @ self.rows2.T  # (n, b)
        total = (self.rows @ (self.excess * inner) - self.left * kernel_left) @ self.rows2.T
        total -= self.rows @ (self.right * kernel_right)
        total += self.both * (kernel_left @ self.rows2.T)
        return np.asarray(total, dtype=np.float64) * scale


def _single(array: Array) -> tuple[float, Single]:
    """The largest entry, and the array over it."""
    scale = float(max(array.max(initial=0.0), -array.min(initial=0.0))) or 1.0
    return scale, (array / scale).astype(np.float32)
