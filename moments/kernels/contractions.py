"""Sums over pairs of attention rows of P_i g P_i', with P_i = diag(w_i) - w_i w_i^T.

P_i removes a row's mean, so that every joint law w_i w_i'^T + P_i g P_i' has the marginals w_i and
w_i' whatever g is. The two maps are each other's transpose:

    spread: H -> sum_{r i i'} H_r,ii' P_i g_r P_i'        gather: X -> tr(P_i g_r P_i' X^T)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def spread(pair_weights: Array, excess: Array, rows: Array, rows2: Array) -> Array:
    """(m, n, k) key kernels from (m, r, a, b) weights on pairs of rows.

    Args:
        pair_weights: H, for m kernels at once.
        excess: (r, n, k) g.
        rows, rows2: (a, n) and (b, k) mean attention w_i, w_i'.
    """
    left = rows @ excess  # (r, a, k)
    right = excess @ rows2.T  # (r, n, b)
    both = left @ rows2.T  # (r, a, b)
    onward = pair_weights @ rows2  # (m, r, a, k)
    total = np.einsum("mrnk,rnk->mnk", rows.T @ onward, excess)
    total -= rows.T @ np.einsum("mrak,rak->mak", onward, left)
    total -= np.einsum("mrnb,rnb->mnb", rows.T @ pair_weights, right) @ rows2
    total += rows.T @ np.einsum("mrab,rab->mab", pair_weights, both) @ rows2
    return np.asarray(total)


def gather(kernel: Array, excess: Array, rows: Array, rows2: Array) -> Array:
    """(r, a, b): tr(P_i g_r P_i' kernel^T) for every pair of rows; arguments as in `spread`."""
    kernel_left = rows @ kernel  # (a, k)
    kernel_right = kernel @ rows2.T  # (n, b)
    left = rows @ excess
    right = excess @ rows2.T
    total = rows @ (excess * kernel) @ rows2.T
    total -= (left * kernel_left) @ rows2.T
    total -= rows @ (right * kernel_right)
    total += (left @ rows2.T) * (kernel_left @ rows2.T)
    return np.asarray(total)
