"""Attention over exchangeable keys: exact rows, for queries at any resolution.

Layers of equal weights on exchangeable tokens differ only in the tokens' correlation, so that one
evaluation at Chebyshev nodes serves all of them. See docs/theory/attention.md, Tokens alike.
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
    """Exact statistics of rows with themselves and with another row, in two columns.

    `key`, `along` and `dropped_key` are per unit of theta, so that all have a limit at theta = 0;
    below `FAINT` results are linear in theta.

    Args:
        theta: (m,) logit variance.
        correlation: (m,) of the two rows' queries.
        unshared: (m,) fraction of a key's second moment that it does not share with other keys.
        keys: number of keys.
    """
    floored = np.maximum(theta, FAINT)
    rows = finite_rows(
        exact_rows.tabulated(floored),
        np.full(floored.size, keys),
        np.clip(unshared, 0.0, 2.0),
        np.column_stack([np.ones_like(correlation), correlation]),
        widths,
        exact_rows.AlikeRows.of(keys),
    )
    share, pair = theta / floored, (theta / floored)[:, None]
    return rows._replace(
        overlap=1 / keys + pair * (rows.overlap - 1 / keys),
        growth=pair * rows.growth,
        key=rows.key / floored[:, None],
        along=rows.along / floored[:, None],
        stiffness=share * rows.stiffness,
        against=share * rows.against,
        dropped_key=rows.dropped_key / floored,
        dropped_cross=share * rows.dropped_cross,
        entropy=np.log(keys) + share * (rows.entropy - np.log(keys)),
    )


PROFILED_SCALE = 5.0
"""Largest logit scale at which rows are interpolated from a profile; all its nodes then lie inside
the softmax tables."""

MOST_PROFILES = 16
"""Most distinct logit scales of a batch of configurations for which profiles are formed, at 40
evaluations each."""

_NODES = 40


@functools.lru_cache(maxsize=512)
def _profile(logit_scale: float, keys: float, d_model: float, d_head: float) -> Array:
    """Chebyshev coefficients in the correlation, on [0, 1], of all fields of `alike_rows`, for
    self-attention of tokens of fixed norm."""
    angles = np.pi * (np.arange(_NODES) + 0.5) / _NODES
    r = (1 + np.cos(angles)) / 2
    rows = alike_rows((1 - r) * logit_scale, r, 1 - r, keys, Widths(d_model, d_head, 0.0))
    transform = np.cos(np.outer(np.arange(_NODES), angles)) * (2 / _NODES)
    transform[0] /= 2
    return np.ascontiguousarray((transform @ np.column_stack(rows)).T)


def profiled_rows(
    logit_scale: Array, correlation: Array, keys: float, widths: Widths
) -> FiniteRows:
    """`alike_rows` by interpolation, for self-attention of tokens of fixed norm with correlations
    of at least 0 and few distinct logit scales."""
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
    """Base of attention layers: second moments of sum_j a_ij x_j and gradient paths.

    Attributes:
        rows: second moments of the sums of attention rows; None: 1.
        keys: number of keys of a row.
    """

    rows: Kernel | None = None
    keys: Any
    _length: int

    def summed(self, query: Kernel) -> Kernel:
        """The query path as it enters sums over pairs of tokens, if means over the pairs of a class
        are weighted differently there."""
        return query

    def table_gradient(self, leaf: Any, gained: Kernel) -> Array | None:
        """Squared gradient norm of a table of relative biases: that of rows at their mean weights,
        times `kernels.rows.amplification`."""
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
        """Gradient of a table per unit of the gradient kernel; see `shifted_together`."""
        raise MomentsError(f"no table of relative biases on a {type(self).__name__}")


class AlikeLayer(Layer):
    """Attention over exchangeable keys, with queries at any resolution.

    Attributes:
        sum_square, logit_variance, entropy: as in `kernels.KernelAttention`.
        wanted: logit variance before `scale` was capped.
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
        """Evaluate the rows; arguments as in `kernels.KernelAttention`."""
        self._counts, self._queries = (query_count, key_count), queries
        self.keys = float(key_count)
        self._values, self.wanted = values, wanted
        self._noise = drop_prob / (1 - drop_prob)
        unshared_value = values.diagonal - values.off_diagonal
        unshared_key = keys.diagonal - keys.off_diagonal
        size = queries.diagonal
        if queries.resolved:  # geometric mean of two rows, as for log-odds token by token
            first, second = queries.over_tokens(size)
            size = np.sqrt(first * second)
        two = self._at_pairs
        theta = two(scale) * size * two(unshared_key)
        correlation = np.clip(ratio_or_zero(queries.off_diagonal, size), -1.0, 1.0)
        fraction = two(ratio_or_zero(unshared_key, keys.diagonal))
        whole = two(scale * keys.diagonal) * size
        flat = np.broadcast_arrays(1.0 * theta, correlation, fraction, whole, two(norm_spread))
        self._shape = np.shape(flat[0])
        sizes, cosines, unshared, scales, spreads = (np.ravel(x) for x in flat)
        widths = Widths(float(d_model), float(d_head), spreads)
        plain = queries is keys and not queries.resolved and not np.any(spreads)
        if plain and np.min(cosines) >= 0.0 and _few(scales):
            self._rows = rows = profiled_rows(scales, cosines, float(key_count), widths)
        else:
            self._rows = rows = alike_rows(sizes, cosines, unshared, float(key_count), widths)
        self._inverse_width = 1.0 / float(d_model)
        self._logit_scale = two(scale) * size
        self.logit_variance = self._of_row(self._shaped(sizes))
        overlap = self._at(rows.overlap)
        self.sum_square = overlap.diagonal
        self.entropy = self._of_row(self._shaped(rows.entropy))
        self._unshared_value = two(unshared_value)
        self._unshared_scale = two(scale * unshared_key)
        self._masked = two(values.diagonal + value_bias)
        stiffness = self._shaped(rows.stiffness)
        # Attended values share a component along their row's query: 1/d_model of E tr^2.
        shift = self._unshared_scale * (1 - self._shaped(rows.overlap[:, 0])) ** 2
        self._overlap_path = queries.with_ones().at_every_pair(shift * self._unshared_value)
        kept = np.exp(-stiffness * (1 + correlation)), np.exp(-2 * stiffness)
        mixed = overlap.weighted(self._of_row(kept[1]), kept[0])
        shifted = queries.at_every_pair(shift * self._inverse_width)
        mixed = (mixed + shifted).at_every_pair(self._unshared_value)
        shared = two(values.off_diagonal) * (1 - self._shaped(rows.against))
        dropped = self._of_row(two(self._noise * values.diagonal)) * self.sum_square
        diagonal = mixed.diagonal + self._of_row(shared) + dropped
        mixed = Kernel.of_parts(diagonal, mixed.off_diagonal + shared, queries.resolved)
        self._mixed = _plain(mixed)

    def forward(self) -> Kernel:
        """Second moments per feature of sum_j a_ij y_j."""
        return self._mixed

    def mean_output(self) -> Kernel:
        """Overlap of two heads that share keys and values: that of two uniform averages."""
        values = self._values
        mean = values.off_diagonal + (values.diagonal - values.off_diagonal) / self._counts[1]
        return Kernel(mean, mean)

    def weights(self) -> None:
        """Mean attention; None: uniform."""

    def table_gradient(self, leaf: Any, gained: Kernel) -> None:
        """None: exchangeable keys have no relative biases."""

    def overlap_path(self, gradient: Kernel) -> Kernel:
        """Growth of the query path per unit of the variance of two tokens' overlap."""
        return gradient * self._overlap_path

    def response(self) -> Kernel:
        """Query path per unit of the gradient."""
        return self.backward(self._queries.with_ones()).query

    def backward(self, gradient: Kernel) -> Paths[Kernel]:
        """Paths of a gradient at sum_j a_ij x_j, the gain of the value weights included."""
        queries, keys = self._counts
        rows, inverse_width, others = self._rows, self._inverse_width, max(keys - 1, 1)
        unshared_value, noise = self._unshared_value, self._noise * self._masked

        def at_key(rate: Kernel, dropped: Array = 0.0, scale: Array = 1.0) -> Array:
            """Gradient at one key from all pairs of rows, with dropout's addition to the rate of a
            row with itself."""
            dropped = self._of_row(dropped + 0.0 * self._shaped(rows.square))
            rate = Kernel.of_parts(rate.diagonal + dropped, rate.off_diagonal, rate.resolved)
            return (gradient * rate.at_every_pair(scale)).total(queries) / keys

        overlap = self._at(rows.overlap)
        at_itself = at_key(overlap, self._noise * self._shaped(rows.overlap[:, 0]))
        value = Kernel(at_itself, at_key(self._queries.with_ones() - overlap) / others)
        rate = self._at(rows.query).at_every_pair(unshared_value)
        diagonal = unshared_value * self._shaped(rows.common)
        diagonal = self._of_row(diagonal + noise * self._shaped(rows.dropped_query))
        rate = Kernel.of_parts(rate.diagonal + diagonal, rate.off_diagonal, rate.resolved)
        query = gradient * rate.at_every_pair(self._unshared_scale)
        query = query.mixed(1.0, self.overlap_path(gradient), inverse_width)
        rate = self._at(rows.key).at_every_pair(unshared_value)
        key = at_key(rate, noise * self._shaped(rows.dropped_key), self._logit_scale)
        growth = self._at(rows.growth)
        cross = 2 * inverse_width * at_key(growth, self._noise * self._shaped(rows.dropped_cross))
        paths = value, query, Kernel(key, -key / others), Kernel(cross, -cross / others)
        return Paths(*map(_plain, paths))

    def _at_pairs(self, number: Array) -> Array:
        """A number per configuration, broadcast to pairs of rows."""
        return self._queries.lift(number)[1]

    def _shaped(self, values: Array) -> Array:
        """Flat values per pair of rows, in the shape of configurations and rows."""
        return values.reshape(self._shape) if self._shape else float(values[0])

    def _of_row(self, of_pairs: Array) -> Array:
        """Values of a row with itself."""
        if not self._queries.resolved:
            return of_pairs
        return np.diagonal(np.broadcast_to(of_pairs, self._shape), axis1=-2, axis2=-1)

    def _at(self, values: Array) -> Kernel:
        """Kernel over rows from the columns for a row with itself and with another row."""
        diagonal, off_diagonal = self._of_row(self._shaped(values[:, 0])), values[:, 1]
        return Kernel.of_parts(diagonal, self._shaped(off_diagonal), self._queries.resolved)


def _plain(kernel: Kernel) -> Kernel:
    """Convert the arrays without axes of a single configuration to floats."""
    if np.ndim(kernel.diagonal) or np.ndim(kernel.off_diagonal):
        return kernel
    return Kernel(float(kernel.diagonal), float(kernel.off_diagonal))


def _few(scales: Array) -> bool:
    """Whether profiles are worth forming for these logit scales."""
    distinct = np.unique(scales)
    return bool(len(distinct) <= MOST_PROFILES and distinct[-1] <= PROFILED_SCALE)
