"""Exact statistics of exchangeable softmax rows, many rows at a time.

`moments.softmax` tabulates them; here its tables are read for arrays of rows of different variances
and lengths at once, with the variance moved to the edge of the table where it lies beyond.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moments.softmax import PairStatistics, RowStatistics, SquareTable
from moments.softmax.chebyshev import (
    THETA_MAX,
    chebyshev_basis,
    length_coordinate,
    theta_coordinate,
)
from moments.softmax.encoding import decode_square_pair

Array = NDArray[np.float64]

THETA_LEAST = 1e-6
"""Variances below are moved here, where every statistic is linear to six digits."""


def tabulated(theta: Array) -> Array:
    """The variance at which a row of logit variance `theta` is evaluated."""
    return np.asarray(np.clip(theta, THETA_LEAST, THETA_MAX))


def rows(theta: Array, keys: Array) -> RowStatistics:
    """Statistics of single rows; `theta` within the table, arguments of one shape."""
    return SquareTable.load().single(theta, keys)


def pairs(theta: Array, keys: Array, rho: Array) -> PairStatistics:
    """Statistics of two alike rows at several correlations.

    Args:
        theta, keys: (m,) logit variance within the table and number of keys of either row.
        rho: (r,) correlations of their logits, or (m, r) where each row has its own.

    Returns:
        (m, r) arrays.
    """
    table = SquareTable.load().pair
    thetas, lengths, functions, orders = table.shape
    in_theta = chebyshev_basis(theta_coordinate(theta), thetas)
    in_length = chebyshev_basis(length_coordinate(keys), lengths)
    both = (in_theta[:, None] * in_length[None]).reshape(thetas * lengths, -1)
    in_rho = both.T @ table.reshape(thetas * lengths, functions * orders)
    in_rho = in_rho.reshape(-1, functions, orders)
    basis = chebyshev_basis(rho.ravel(), orders)
    if rho.ndim == 1:
        values = in_rho @ basis
    else:
        values = np.einsum("mfo,omr->mfr", in_rho, basis.reshape(orders, *rho.shape))
    psi = theta[:, None] * rho
    return decode_square_pair(psi, keys[:, None], values.swapaxes(0, 1), True)
