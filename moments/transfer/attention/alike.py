"""Attention with tokens alike whose queries correlate otherwise than its keys.

So it is in cross-attention, with biases on the queries and behind normalised queries and keys. With
query kernel (q, q rho), keys (k, k - k_own) and values (v, v - v_own), rows have logits of variance
theta = tau q k_own and of correlation rho between rows, and by symmetry between keys

    O = v - v_own + v_own C2,      V_jj = sum_ii' G_ii' C2/n,     V_jl = sum G (1 - C2)/(n (n-1)),
    Q_ii' = G_ii' tau v_own k_own T,    K_jj = sum_ii' G_ii' tau q_ii' v_own T/n = (1 - n) K_jl,

with the exact C2 = E sum a a' and T = E tr J J' at rho, or at 1 for i = i'. Orders 1/d_model and
1/d_head as by token (`kernels.finite_rows`).

See docs/theory/attention.md, Tokens alike.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...engine.state import Array, Kernel, ratio_or_zero
from .kernels import exact_rows
from .kernels.attention import FAINT
from .kernels.finite_rows import FiniteRows, finite_rows
from .kernels.widths import Widths
from .softmax import PairStatistics, RowStatistics


class _Tables:
    """Exact statistics of rows of one length, beyond the tables too."""

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self._rows = exact_rows.AlikeRows(keys)

    def tabulated(self, theta: Array) -> Array:
        return exact_rows.tabulated(theta)

    def rows(self, theta: Array, keys: Array) -> RowStatistics:
        return self._rows.single(theta)

    def pairs(self, theta: Array, keys: Array, rho: Array) -> PairStatistics:
        return self._rows.pair(theta, rho)


@functools.lru_cache(maxsize=256)
def _tables(keys: int) -> _Tables:
    return _Tables(keys)


class AlikePaths(NamedTuple):
    """Kernels of the gradient at the queries' tokens and at the keys'.

    `overlap_path` is what `query` gains per unit of the variance of two tokens' overlap
    (`overlap`).
    """

    value: Kernel
    query: Kernel
    key: Kernel
    cross: Kernel
    overlap_path: Kernel


class AlikeAttention:
    """Moments of one layer.

    Attributes:
        forward: second moments per feature of sum_j a_ij y_j.
        mean_output: overlap of two heads that share keys and values.
        logit_variance, sum_square, entropy: of a row.
    """

    def __init__(
        self,
        queries: Kernel,
        keys: Kernel,
        values: Kernel,
        *,
        query_count: int,
        key_count: int,
        scale: Array,
        drop_prob: Array,
        d_model: Any,
        d_head: Any,
        norm_spread: Any,
        value_bias: Any = 0.0,
    ) -> None:
        """Evaluate the statistics; arguments as those of `kernels.KernelAttention`."""
        self._counts, self._queries, self._scale = (query_count, key_count), queries, scale
        self._own = values.diagonal - values.pairs, keys.diagonal - keys.pairs
        self._noise = drop_prob / (1 - drop_prob)
        self._masked = values.diagonal + value_bias
        theta = np.asarray(scale * queries.diagonal * self._own[1], dtype=np.float64)
        correlation = np.clip(ratio_or_zero(queries.pairs, queries.diagonal), -1.0, 1.0)
        apart_from = ratio_or_zero(self._own[1], keys.diagonal)
        flat = np.broadcast_arrays(theta, correlation, apart_from, norm_spread)
        sizes, cosines, unshared, spreads = (np.ravel(one) for one in flat)
        tables = _tables(key_count)
        several = {s: Widths(float(d_model), float(d_head), s) for s in np.unique(spreads).tolist()}
        self._shape = np.shape(flat[0])
        # Vanishing logits: what is linear in them, from faint ones.
        taken = np.maximum(sizes, FAINT)
        self._drive = scale * queries.diagonal / self._of(taken)
        rows = _by_width(tables, taken, cosines, unshared, spreads, several)
        self._rows = rows = _linear(rows, sizes / taken, float(key_count))
        self._wide = 1.0 / float(d_model)
        deficit = self._of(np.array([several[s].deficit for s in spreads.tolist()]))
        self.logit_variance = theta[()]
        same, apart = self._at(rows.overlap)
        self.sum_square = same
        self.entropy = np.asarray(tables.rows(theta, theta).entropy)[()]
        own = self._own[0]
        stiffness = self._of(rows.stiffness)
        shared = np.maximum(1 - self._of(unshared), 0.0)
        returned = 2 * deficit * shared**2
        # Attended values share the direction that their row looks in: 1/d_model of E tr^2.
        looking = scale * self._own[1] * (1 - same) ** 2
        self._overlap_paths = [looking * one for one in self._at(rows.query_shift)]
        joint_shifts, growth = self._at(rows.joint_shift), self._at(rows.growth)
        against = self._of(rows.against) * values.pairs
        mixed = same * np.exp(-2 * stiffness) + returned * growth[0]
        mixed = own * (mixed + looking * joint_shifts[0] * self._wide * queries.diagonal) - against
        dropped = self._noise * values.diagonal * same * (1 + self._of(rows.masks))
        others = apart * np.exp(-stiffness * (1 + correlation)) + returned * growth[1]
        others = own * (others + looking * joint_shifts[1] * self._wide * queries.pairs) - against
        self.forward = Kernel(values.pairs + mixed + dropped, values.pairs + others)
        self.mean_output = averaged(values, key_count)

    def backward(self, gradient: Kernel) -> AlikePaths:
        """Paths for a gradient at the averaged values, their weights' gain included."""
        queries, keys = self._counts
        own_value, own_key = self._own
        rows, wide, noise = self._rows, self._wide, self._noise * self._masked
        one = gradient.diagonal * queries
        two = gradient.pairs * queries * (queries - 1)
        same, apart = self._at(rows.overlap)
        held = one * same + two * apart
        spread = one * (1 - same) + two * (1 - apart)
        others = max(keys - 1, 1)
        masked = self._noise * one * same / keys
        value = Kernel(held / keys + masked, spread / (keys * others))
        scale = self._scale * own_key
        path = Kernel(
            gradient.diagonal * self._overlap_paths[0] * own_value,
            gradient.pairs * self._overlap_paths[1] * own_value,
        )
        moved, beside = self._at(rows.query)
        moved = own_value * (moved + self._of(rows.common)) + noise * self._of(rows.dropped_query)
        query = Kernel(
            gradient.diagonal * scale * moved,
            gradient.pairs * scale * own_value * beside,
        ).mixed(1.0, path, wide)
        driven, driven_apart = self._at(rows.key)
        pushed = one * (driven * own_value + noise * self._of(rows.dropped_key))
        pushed = self._drive * (pushed + two * driven_apart * own_value) / keys
        key = Kernel(pushed, -pushed / others)
        growth, growth_apart = self._at(rows.growth)
        shared = one * (growth + self._noise * self._of(rows.dropped_cross)) + two * growth_apart
        shared = 2 * wide * shared / keys
        return AlikePaths(value, query, key, Kernel(shared, -shared / others), path)

    def _of(self, values: Array) -> Array:
        """A number per row, in the shape of the configurations."""
        return np.asarray(values.reshape(self._shape)[()])

    def _at(self, values: Array) -> tuple[Array, Array]:
        """For a row with itself and with another."""
        return self._of(values[:, 0]), self._of(values[:, 1])


def _by_width(
    tables: _Tables,
    theta: Array,
    rho: Array,
    unshared: Array,
    spreads: Array,
    widths: Mapping[float, Widths],
) -> FiniteRows:
    """Statistics of every configuration under the widths that its norms' spread makes."""
    parts = {}
    for spread, one in widths.items():
        here = spreads == spread
        parts[spread] = (
            here,
            finite_rows(
                tables.tabulated(theta[here]),
                np.full(int(here.sum()), float(tables.keys)),
                np.clip(unshared[here], 0.0, 2.0),
                np.column_stack([np.ones_like(rho[here]), rho[here]]),
                one,
                tables,
            ),
        )
    if len(parts) == 1:
        return next(iter(parts.values()))[1]
    order = np.argsort(np.concatenate([np.flatnonzero(here) for here, _ in parts.values()]))
    columns = zip(*(found for _, found in parts.values()), strict=True)
    return FiniteRows(*[np.concatenate(column)[order] for column in columns])


def _linear(rows: FiniteRows, share: Array, keys: float) -> FiniteRows:
    """Of logits whose variance is that share of the one given; the key path's per unit of it."""
    pair = share[:, None]
    return rows._replace(
        overlap=1 / keys + pair * (rows.overlap - 1 / keys),
        growth=pair * rows.growth,
        stiffness=share * rows.stiffness,
        against=share * rows.against,
        masks=share * rows.masks,
        dropped_cross=share * rows.dropped_cross,
    )


def averaged(tokens: Kernel, length: int) -> Kernel:
    """Overlaps of two uniform averages of tokens alike."""
    mean = tokens.pairs + (tokens.diagonal - tokens.pairs) / length
    return Kernel(mean, mean)
