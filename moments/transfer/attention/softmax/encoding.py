"""Statistics of softmax rows as bounded, smooth functions of theta, log n and rho, and back.

Tables interpolate the functions below rather than the statistics, which span many decades. Each is
a statistic over its behaviour in the limits theta -> 0, n -> 1 and n -> infinity (or the logarithm
of that, where it is positive and varies a lot): errors are relative, and those limits are exact.

See docs/theory/softmax.md, The integrals.
"""

from __future__ import annotations

import math

import numpy as np

from .exact import PairStatistics, RowStatistics, pair_statistics, row_statistics
from .laplace import Array, BoolArray

ROW_FUNCTIONS = 10
PAIR_FUNCTIONS = 4


def encode_row(theta: float, n: float) -> Array:
    """(ROW_FUNCTIONS,) functions of one row, from the exact evaluator; theta > 0 and n > 1.

    First the log-odds of P2 per theta, log[(n-1) P2 / (1-P2)] / theta: 1 at theta = 0.
    """
    row = row_statistics(theta, n)
    rest = 1.0 - row.sum_square
    return np.array(
        [
            math.log((n - 1.0) * row.sum_square / rest) / theta,
            row.jacobian_square / (row.sum_square * rest),
            row.sum_square_slope / (theta * row.jacobian_square),
            row.radial_square / row.jacobian_square,
            row.trace_square / rest,
            (row.mean_logit_square - theta * rest**2) / row.sum_square,
            math.log(row.weighted_logit_square / row.sum_square),
            (math.log(n) - row.entropy) / (theta * rest),
            math.log(n**2 * row.sum_cube) / theta,
            math.log(n**3 * row.sum_fourth) / theta,
        ]
    )


def decode_participation(theta: Array, n: Array | float, functions: Array) -> tuple[Array, Array]:
    """(P2, 1 - P2) from the first function, each to full relative accuracy."""
    odds = np.exp(theta * functions[0])
    others = n - 1.0
    total = others + odds
    return odds / total, others / total


def decode_row(
    theta: Array, n: Array | float, functions: Array, valid: BoolArray | bool
) -> RowStatistics:
    """Inverse of `encode_row`; theta and the trailing axes of `functions` broadcast."""
    p2, rest = decode_participation(theta, n, functions)
    jacobian = functions[1] * p2 * rest
    spread = theta * rest
    return RowStatistics(
        sum_square=p2,
        sum_cube=np.minimum(np.exp(theta * functions[8]) / n**2, p2),
        sum_fourth=np.minimum(np.exp(theta * functions[9]) / n**3, p2),
        trace_square=functions[4] * rest,
        jacobian_square=jacobian,
        radial_square=functions[3] * jacobian,
        sum_square_slope=functions[2] * theta * jacobian,
        mean_logit_square=functions[5] * p2 + spread * rest,
        weighted_logit_square=np.exp(functions[6]) * p2,
        entropy=np.log(n) - functions[7] * spread,
        valid=valid,
    )


def _pair_at_small_theta(theta: float, n: float, rho: float) -> PairStatistics:
    """The pair, its overlap divided by the evaluator's own error in the exact C2(rho = 0) = 1/n.

    log(n C2) is divided by psi below, which would magnify that error near theta = 0.
    """
    pair = pair_statistics(theta, n, rho)
    if theta > 0.1:
        return pair
    uncorrelated = n * pair_statistics(theta, n, 0.0).overlap
    return pair._replace(overlap=pair.overlap / uncorrelated)


def encode_square_pair(theta: float, n: float, rho: float) -> Array:
    """(PAIR_FUNCTIONS,) functions of two rows of n keys; theta > 0, n > 1 and rho != 0.

    The first is the log-odds of C2 per psi: at rho = 1 that of P2 per theta.
    """
    pair, psi = _pair_at_small_theta(theta, n, rho), rho * theta
    rest = 1.0 - pair.overlap
    return np.array(
        [
            math.log((n - 1.0) * pair.overlap / rest) / psi,
            math.log(pair.jacobian_overlap / (pair.overlap * rest)),
            pair.radial_overlap / pair.jacobian_overlap,
            pair.overlap_slope / (psi * pair.jacobian_overlap),
        ]
    )


def decode_square_pair(
    psi: Array, n: Array | float, functions: Array, valid: BoolArray | bool
) -> PairStatistics:
    """Inverse of `encode_square_pair`."""
    c2, rest = decode_participation(psi, n, functions)
    jacobian = np.exp(functions[1]) * c2 * rest
    slope = functions[3] * psi * jacobian
    return PairStatistics(c2, jacobian, functions[2] * jacobian, slope, valid)
