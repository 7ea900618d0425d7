"""Attention statistics as functions of the token correlation alone.

After a normalisation, layers with equal weights differ only in their tokens' correlation. One
vectorised evaluation at Chebyshev nodes then serves all of them: a deep model costs little more
than a shallow one. At logit scales up to 5 the moments of 24-layer models move by 1e-10; a test
compares the interpolation with the statistics it stands for.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from .softmax.chebyshev import chebyshev_basis
from .statistics import STATISTICS, AttentionStatistics, attention_statistics

_NODES = 40


class _Profile(NamedTuple):
    """Chebyshev coefficients on correlations in [0, 1], a column for each of `STATISTICS` and for
    the entropy."""

    coefficients: np.ndarray
    valid: bool


@functools.lru_cache(maxsize=512)
def _profile(logit_scale: float, seq_len: int, d_model: float, d_head: float) -> _Profile:
    angles = math.pi * (np.arange(_NODES) + 0.5) / _NODES
    correlation = (1 + np.cos(angles)) / 2
    found = attention_statistics(
        np.full(_NODES, logit_scale), correlation, seq_len, d_model, d_head
    )
    columns = (*(found.values[name] for name in STATISTICS), found.entropy)
    values = np.stack([np.broadcast_to(v, correlation.shape) for v in columns], axis=-1)
    transform = np.cos(np.outer(np.arange(_NODES), angles)) * (2 / _NODES)
    transform[0] /= 2
    return _Profile(transform @ values, found.valid)


_ORDERS = np.arange(_NODES)


class Columns(NamedTuple):
    """Statistics of several correlations: (23, B), the entropy last."""

    values: np.ndarray
    valid: bool


def profiled_columns(
    logit_scale: float, correlation: np.ndarray, seq_len: int, d_model: float, d_head: float
) -> Columns:
    """`profiled_statistics` of several correlations, (B,), none of them negative."""
    profile = _profile(logit_scale, seq_len, d_model, d_head)
    basis = chebyshev_basis(2 * correlation - 1, _NODES)
    return Columns(profile.coefficients.T @ basis, profile.valid)


def profiled_numbers(
    logit_scale: float, correlation: float, seq_len: int, d_model: float, d_head: float
) -> tuple[list[float], bool]:
    """`profiled_columns` of one correlation, and whether they are valid."""
    profile = _profile(logit_scale, seq_len, d_model, d_head)
    basis = np.cos(_ORDERS * math.acos(2 * correlation - 1))
    return (basis @ profile.coefficients).tolist(), profile.valid


def profiled_statistics(
    logit_scale: float, correlation: float, seq_len: int, d_model: float, d_head: float
) -> AttentionStatistics:
    """`attention_statistics` of one normalised layer, by interpolation in the correlation."""
    if correlation < 0:
        return attention_statistics(logit_scale, correlation, seq_len, d_model, d_head)
    (*numbers, entropy), valid = profiled_numbers(
        logit_scale, correlation, seq_len, d_model, d_head
    )
    values = dict(zip(STATISTICS, numbers, strict=True))
    return AttentionStatistics(values, (1 - correlation) * logit_scale, entropy, valid)
