"""Attention over keys that are alike: exact rows, for queries of any resolution.

Layers of equal weights whose tokens are alike differ in the tokens' correlation alone: one
evaluation at Chebyshev nodes then serves all of them. See docs/theory/attention.md, Tokens alike.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...engine.state import Array, Kernel, ratio_or_zero
from ...errors import MomentsError
from ...model.positions import RelativeBias
from .kernels import Paths, exact_rows
from .kernels.finite_rows import FiniteRows, Widths, finite_rows
from .kernels.rows import FAINT
from .projections import attention_diagnostics
from .softmax.table import chebyshev_basis

# --- statistics of rows ---------------------------------------------------------------------------


def alike_rows(
    theta: Array, correlation: Array, unshared: Array, keys: float, widths: Widths
) -> FiniteRows:
    """Exact rows with themselves and with another, columns of two; (m,) arguments.

    `key`, `along` and `dropped_key` are per unit of theta, so that all have a limit at 0, which is
    taken from `FAINT` on.

    Args:
        theta: logit variance.
        correlation: of the two rows' queries.
        unshared: share of a key that it does not share with the others.
        keys: of a row.
        widths: of the layer.
    """
    taken = np.maximum(theta, FAINT)
    rows = finite_rows(
        exact_rows.tabulated(taken),
        np.full(taken.size, keys),
        np.clip(unshared, 0.0, 2.0),
        np.column_stack([np.ones_like(correlation), correlation]),
        widths,
        exact_rows.AlikeRows.of(keys),
    )
    share, pair = theta / taken, (theta / taken)[:, None]
    return rows._replace(
        overlap=1 / keys + pair * (rows.overlap - 1 / keys),
        growth=pair * rows.growth,
        key=rows.key / taken[:, None],
        along=rows.along / taken[:, None],
        stiffness=share * rows.stiffness,
        against=share * rows.against,
        dropped_key=rows.dropped_key / taken,
        dropped_cross=share * rows.dropped_cross,
        entropy=np.log(keys) + share * (rows.entropy - np.log(keys)),
    )


PROFILED_SCALE = 5.0
"""Logit scale up to which rows are read off a profile: its nodes, at every correlation, then stay
inside the softmax tables."""

MOST_PROFILES = 16
"""Logit scales among configurations up to which each has a profile: those of so many are made of
640 evaluations, once for all layers."""

_NODES = 40


@functools.lru_cache(maxsize=512)
def _profile(logit_scale: float, keys: float, d_model: float, d_head: float) -> Array:
    """Chebyshev coefficients of `alike_rows` on correlations in [0, 1], field by field, of tokens
    of fixed norm that attend to themselves."""
    angles = np.pi * (np.arange(_NODES) + 0.5) / _NODES
    r = (1 + np.cos(angles)) / 2
    rows = alike_rows((1 - r) * logit_scale, r, 1 - r, keys, Widths(d_model, d_head, 0.0))
    transform = np.cos(np.outer(np.arange(_NODES), angles)) * (2 / _NODES)
    transform[0] /= 2
    return np.ascontiguousarray((transform @ np.column_stack(rows)).T)


def profiled_rows(
    logit_scale: Array, correlation: Array, keys: float, widths: Widths
) -> FiniteRows:
    """`alike_rows` of such tokens by interpolation, (m,) of few logit scales; no correlation is
    negative."""
    result = np.empty((sum(_COLUMNS), correlation.size))
    for scale in np.unique(logit_scale).tolist():
        at = logit_scale == scale
        basis = chebyshev_basis(2 * correlation[at] - 1, _NODES)
        result[:, at] = _profile(scale, keys, widths.d_model, widths.d_head) @ basis
    parts = np.split(result, np.cumsum(_COLUMNS)[:-1])
    return FiniteRows(*(part.T if len(part) > 1 else part[0] for part in parts))


_OF_TWO = ("overlap", "growth", "key", "along", "query")
_COLUMNS = [2 if name in _OF_TWO else 1 for name in FiniteRows._fields]


# --- the layer ------------------------------------------------------------------------------------


class Layer:
    """What layers of attention share: moments of what a layer mixes, and the paths back.

    Attributes:
        rows: second moments of the sums of rows; None: they are 1.
        keys: how many keys a row attends to.
    """

    rows: Kernel | None = None
    keys: Any
    _length: int

    def summed(self, query: Kernel) -> Kernel:
        """The query path as sums over pairs of tokens take it: what is kept as means over cells
        by what these weigh."""
        return query

    def table_gradient(self, leaf: Any, gained: Kernel) -> Array | None:
        """Of a table of relative biases: of rows of mean weights, as much larger as those of
        reference rows are."""
        table = leaf.relative_bias
        if table is None or table.variance == 0.0:
            return None
        total = (gained * self._shifted(table)).total(self._length)
        return np.asarray(leaf.d_model * total)

    def diagnostics(self) -> dict[str, Array]:
        """See `attention_diagnostics`."""
        theta, square, entropy = map(self._numbers, ("logit_variance", "sum_square", "entropy"))
        return attention_diagnostics(theta, square, entropy, self.keys)

    def _numbers(self, name: str) -> Any:
        return getattr(self, name)

    def _shifted(self, table: RelativeBias) -> Kernel:
        raise MomentsError(f"no table of relative biases on a {type(self).__name__}")


class AlikeLayer(Layer):
    """Moments of one layer, whose keys are alike and whose queries are of any resolution.

    Attributes:
        sum_square, logit_variance, entropy: as of `kernels.KernelAttention`, of a row.
        wanted: the variance that logits were to have, where `scale` is less.
    """

    beyond_tables = False

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
        self.keys = float(key_count)
        self._values, self.wanted = values, wanted
        self._noise = drop_prob / (1 - drop_prob)
        unshared_value, unshared_key = (
            values.diagonal - values.off_diagonal,
            keys.diagonal - keys.off_diagonal,
        )
        size = queries.diagonal
        if queries.resolved:  # of two rows the geometric mean, as of their log odds by token
            first, second = queries.over_tokens(size)
            size = np.sqrt(first * second)
        two = self._at_pairs
        theta = two(scale) * size * two(unshared_key)
        correlation = np.clip(ratio_or_zero(queries.off_diagonal, size), -1.0, 1.0)
        apart_from = two(ratio_or_zero(unshared_key, keys.diagonal))
        whole = two(scale * keys.diagonal) * size
        flat = np.broadcast_arrays(1.0 * theta, correlation, apart_from, whole, two(norm_spread))
        self._shape = np.shape(flat[0])
        sizes, cosines, unshared, scales, spreads = (np.ravel(one) for one in flat)
        widths = Widths(float(d_model), float(d_head), spreads)
        plain = queries is keys and not queries.resolved and not np.any(spreads)
        if plain and np.min(cosines) >= 0.0 and _few(scales):
            self._rows = rows = profiled_rows(scales, cosines, float(key_count), widths)
        else:
            self._rows = rows = alike_rows(sizes, cosines, unshared, float(key_count), widths)
        self._wide = 1.0 / float(d_model)
        self._drive = two(scale) * size
        self.logit_variance = self._alone(self._of(sizes))
        overlap = self._at(rows.overlap)
        self.sum_square = overlap.diagonal
        self.entropy = self._alone(self._of(rows.entropy))
        self._own = (
            two(unshared_value),
            two(scale * unshared_key),
            two(values.diagonal + value_bias),
        )
        stiffness = self._of(rows.stiffness)
        # Attended values share the direction that their row looks in: 1/d_model of E tr^2.
        looking = self._own[1] * (1 - self._of(rows.overlap[:, 0])) ** 2
        self._overlap_path = queries.with_ones().at_every_pair(looking * self._own[0])
        kept = np.exp(-stiffness * (1 + correlation)), np.exp(-2 * stiffness)
        mixed = overlap.weighted(self._alone(kept[1]), kept[0])
        pulled = queries.at_every_pair(looking * self._wide)
        mixed = (mixed + pulled).at_every_pair(self._own[0])
        against = two(values.off_diagonal) * (1 - self._of(rows.against))
        dropped = self._alone(two(self._noise * values.diagonal)) * self.sum_square
        diagonal = mixed.diagonal + self._alone(against) + dropped
        mixed = Kernel.joined(diagonal, mixed.off_diagonal + against, queries.resolved)
        self._mixed = _plain(mixed)

    def forward(self) -> Kernel:
        """Second moments per feature of sum_j a_ij y_j."""
        return self._mixed

    def mean_output(self) -> Kernel:
        """Overlap of two heads that share keys and values: of two uniform averages."""
        values = self._values
        mean = values.off_diagonal + (values.diagonal - values.off_diagonal) / self._counts[1]
        return Kernel(mean, mean)

    def weights(self) -> None:
        """Mean attention; uniform."""

    def table_gradient(self, leaf: Any, gained: Kernel) -> None:
        """Of a table of relative biases; no keys with biases are alike."""

    def overlap_path(self, gradient: Kernel) -> Kernel:
        """What the query path gains per unit of the variance of two tokens' overlap."""
        return gradient * self._overlap_path

    def response(self) -> Kernel:
        """What the query path is per unit of the gradient."""
        return self.backward(self._queries.with_ones()).query

    def backward(self, gradient: Kernel) -> Paths[Kernel]:
        """Paths of a gradient at the averaged values, their weights' gain included."""
        queries, keys = self._counts
        rows, wide, others = self._rows, self._wide, max(keys - 1, 1)
        unshared_value, scale, masked = self._own
        noise = self._noise * masked

        def grad_in(rate: Kernel, dropped: Array = 0.0, drive: Array = 1.0) -> Array:
            """To a key by all rows: rates of every two, and what dropout adds to a row's own."""
            dropped = self._alone(dropped + 0.0 * self._of(rows.square))
            rate = Kernel.joined(rate.diagonal + dropped, rate.off_diagonal, rate.resolved)
            return (gradient * rate.at_every_pair(drive)).total(queries) / keys

        ones = self._queries.with_ones()
        overlap = self._at(rows.overlap)
        of_itself = grad_in(overlap, self._noise * self._of(rows.overlap[:, 0]))
        value = Kernel(of_itself, grad_in(ones - overlap) / others)
        path = self.overlap_path(gradient)
        rate = self._at(rows.query).at_every_pair(unshared_value)
        diagonal = unshared_value * self._of(rows.common) + noise * self._of(rows.dropped_query)
        rate = Kernel.joined(
            rate.diagonal + self._alone(diagonal), rate.off_diagonal, rate.resolved
        )
        query = (gradient * rate.at_every_pair(scale)).mixed(1.0, path, wide)
        driven = self._at(rows.key).at_every_pair(unshared_value)
        key = grad_in(driven, noise * self._of(rows.dropped_key), self._drive)
        growth = self._at(rows.growth)
        shared = 2 * wide * grad_in(growth, self._noise * self._of(rows.dropped_cross))
        paths = value, query, Kernel(key, -key / others), Kernel(shared, -shared / others)
        return Paths(*map(_plain, paths))

    def _at_pairs(self, number: Array) -> Array:
        """A number per configuration, for every two rows."""
        return self._queries.lift(number)[1]

    def _of(self, values: Array) -> Array:
        """A number for every two rows, in the shape of the configurations."""
        return values.reshape(self._shape) if self._shape else float(values[0])

    def _alone(self, of_pairs: Array) -> Array:
        """Of a row with itself."""
        if not self._queries.resolved:
            return of_pairs
        return np.diagonal(np.broadcast_to(of_pairs, self._shape), axis1=-2, axis2=-1)

    def _at(self, values: Array) -> Kernel:
        """For a row with itself and with another."""
        diagonal, off_diagonal = self._alone(self._of(values[:, 0])), self._of(values[:, 1])
        return Kernel.joined(diagonal, off_diagonal, self._queries.resolved)


def _plain(kernel: Kernel) -> Kernel:
    """A configuration without axes has plain numbers."""
    if np.ndim(kernel.diagonal) or np.ndim(kernel.off_diagonal):
        return kernel
    return Kernel(float(kernel.diagonal), float(kernel.off_diagonal))


def _few(scales: Array) -> bool:
    """Whether each of these logit scales is to have a profile."""
    several = np.unique(scales)
    return bool(len(several) <= MOST_PROFILES and several[-1] <= PROFILED_SCALE)
