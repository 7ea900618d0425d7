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
from typing import Any

import numpy as np

from ...engine.state import Array, Kernel, ratio_or_zero
from .kernels import exact_rows
from .kernels.attention import FAINT
from .kernels.finite_rows import FiniteRows, Widths, finite_rows
from .laws import attention_diagnostics
from .projections import Paths
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


class AlikeAttention:
    """Moments of one layer, whose keys are alike and whose queries are of any resolution.

    Attributes:
        sum_square: E sum_j a_ij^2 of a row.
        wanted: the variance that logits were to have, where `scale` is less.
    """

    beyond_tables = coarse = False

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
        wanted: Array = 0.0,
    ) -> None:
        """Evaluate the statistics; arguments as those of `kernels.KernelAttention`."""
        self._counts, self._queries = (query_count, key_count), queries
        self._values, self.wanted = values, wanted
        self._noise = drop_prob / (1 - drop_prob)
        own_value, own_key = values.diagonal - values.pairs, keys.diagonal - keys.pairs
        size = queries.diagonal
        if queries.resolved:  # of two rows the geometric mean, as of their log odds by token
            first, second = queries.over_tokens(size)
            size = np.sqrt(first * second)
        two = self._at_pairs
        theta = np.asarray(two(scale) * size * two(own_key), dtype=np.float64)
        correlation = np.clip(ratio_or_zero(queries.pairs, size), -1.0, 1.0)
        apart_from = two(ratio_or_zero(own_key, keys.diagonal))
        flat = np.broadcast_arrays(theta, correlation, apart_from, two(norm_spread))
        sizes, cosines, unshared, spreads = (np.ravel(one) for one in flat)
        tables = _tables(key_count)
        several = {s: Widths(float(d_model), float(d_head), s) for s in np.unique(spreads).tolist()}
        self._shape = np.shape(flat[0])
        # Vanishing logits: what is linear in them, from faint ones.
        taken = np.maximum(sizes, FAINT)
        self._drive = two(scale) * size / self._of(taken)
        rows = _by_width(tables, taken, cosines, unshared, spreads, several)
        self._rows = rows = _linear(rows, sizes / taken, float(key_count))
        self._wide = 1.0 / float(d_model)
        deficit = self._of(np.array([several[s].deficit for s in spreads.tolist()]))
        self._logit_variance = alone = self._alone(theta)[()]
        overlap = self._at(rows.overlap)
        self.sum_square = overlap.diagonal
        self._entropy = np.asarray(tables.rows(alone, alone).entropy)[()]
        self._own = two(own_value), two(scale * own_key), two(values.diagonal + value_bias)
        stiffness = self._of(rows.stiffness)
        shared = np.maximum(1 - self._of(unshared), 0.0)
        returned = 2 * deficit * shared**2
        # Attended values share the direction that their row looks in: 1/d_model of E tr^2.
        looking = self._own[1] * (1 - self._of(rows.overlap[:, 0])) ** 2
        self._overlap_path = self._at(rows.query_shift).at_pairs(looking * self._own[0])
        kept = np.exp(-stiffness * (1 + correlation)), np.exp(-2 * stiffness)
        mixed = overlap.weighted(self._alone(kept[1]), kept[0])
        mixed = mixed + self._at(rows.growth).at_pairs(returned)
        pulled = (self._at(rows.joint_shift) * queries).at_pairs(looking * self._wide)
        mixed = (mixed + pulled).at_pairs(self._own[0])
        against = two(values.pairs) * (1 - self._of(rows.against))
        dropped = two(self._noise * values.diagonal) * (1 + self._of(rows.masks))
        own = mixed.diagonal + self._alone(against) + self._alone(dropped) * self.sum_square
        self._mixed = Kernel.joined(own, mixed.pairs + against, queries.resolved)

    def forward(self) -> Kernel:
        """Second moments per feature of sum_j a_ij y_j."""
        return self._mixed

    def mean_output(self) -> Kernel:
        """Overlap of two heads that share keys and values."""
        return averaged(self._values, self._counts[1])

    def weights(self) -> None:
        """Uniform."""
        return

    def diagnostics(self) -> dict[str, Array]:
        """See `attention_diagnostics`."""
        keys = float(self._counts[1])
        return attention_diagnostics(self._logit_variance, self.sum_square, self._entropy, keys)

    def overlap_path(self, gradient: Kernel) -> Kernel:
        """What the query path gains per unit of the variance of two tokens' overlap."""
        return gradient * self._overlap_path

    def response(self) -> Kernel:
        """What the query path is per unit of the gradient."""
        return self.backward(self._queries.with_ones()).query

    def repeated(self, gradient: Kernel) -> None:
        """No text's tokens are alike."""
        return

    def table_gradient(self, gradient: Kernel) -> None:
        """Positions tell no token from another."""
        return

    def backward(self, gradient: Kernel) -> Paths:
        """Paths of a gradient at the averaged values, their weights' gain included."""
        queries, keys = self._counts
        rows, wide, others = self._rows, self._wide, max(keys - 1, 1)
        own_value, scale, masked = self._own
        noise = self._noise * masked

        def sent(rate: Kernel, dropped: Array = 0.0, drive: Array = 1.0) -> Array:
            """To a key by all rows: rates of every two, and what dropout adds to a row's own."""
            dropped = self._alone(dropped + 0.0 * self._of(rows.square))
            rate = Kernel.joined(rate.diagonal + dropped, rate.pairs, rate.resolved)
            return (gradient * rate.at_pairs(drive)).total(queries) / keys

        ones = self._queries.with_ones()
        overlap = self._at(rows.overlap)
        held = sent(overlap, self._noise * self._of(rows.overlap[:, 0]))
        value = Kernel(held, sent(ones - overlap) / others)
        path = self.overlap_path(gradient)
        rate = self._at(rows.query).at_pairs(own_value)
        own = own_value * self._of(rows.common) + noise * self._of(rows.dropped_query)
        rate = Kernel.joined(rate.diagonal + self._alone(own), rate.pairs, rate.resolved)
        query = (gradient * rate.at_pairs(scale)).mixed(1.0, path, wide)
        driven = self._at(rows.key).at_pairs(own_value)
        key = sent(driven, noise * self._of(rows.dropped_key), self._drive)
        growth = self._at(rows.growth)
        shared = 2 * wide * sent(growth, self._noise * self._of(rows.dropped_cross))
        return Paths(value, query, Kernel(key, -key / others), Kernel(shared, -shared / others))

    def _at_pairs(self, number: Array) -> Array:
        """A number per configuration, for every two rows."""
        return self._queries.lift(number)[1]

    def _of(self, values: Array) -> Array:
        """A number for every two rows, in the shape of the configurations."""
        return np.asarray(values.reshape(self._shape)[()])

    def _alone(self, of_pairs: Array) -> Array:
        """Of a row with itself."""
        if not self._queries.resolved:
            return of_pairs
        return np.diagonal(np.broadcast_to(of_pairs, self._shape), axis1=-2, axis2=-1)

    def _at(self, values: Array) -> Kernel:
        """For a row with itself and with another."""
        own, pairs = self._alone(self._of(values[:, 0])), self._of(values[:, 1])
        return Kernel.joined(own, pairs, self._queries.resolved)


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
