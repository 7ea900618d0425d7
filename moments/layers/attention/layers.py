"""Attention at every resolution of its tokens, from the fields of a leaf.

`AlikeLayer`: exchangeable keys with exact rows, for queries at any resolution. Layers of equal
weights on exchangeable tokens differ only in the tokens' correlation, so that one evaluation at
Chebyshev nodes serves all of them. `TokenLayer`: any kernel and any mask, token by token.
`ClassLayer`: classes of positions. See docs/theory/attention.md, Tokens alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.classes import ClassRows, Matrix, PositionClasses, few_points, one_class
from ...engine.fluctuation import norm_variance
from ...engine.layout import places, same_document
from ...engine.state import Array, Kernel, Signal, ratio_or_zero
from ...engine.texts import TextClasses
from ...errors import DomainError, MomentsError
from ...model.positions import RelativeBias, alibi_slopes
from . import softmax
from .kernels import KernelAttention, Paths, Rotation
from .kernels.position_attention import Across, ClassLogits, PositionAttention, Words
from .kernels.relative_positions import RotaryMeans, shifted_classes, shifted_together
from .kernels.row_statistics import FiniteRows, Widths, finite_rows
from .kernels.rows import FAINT
from .projections import LOGIT_VARIANCE_MAX, LogitLaw, attention_diagnostics, by_distance, positive
from .sinks import SinkLayer
from .softmax import chebyshev_basis

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
        softmax.tabulated(floored),
        np.full(floored.size, keys),
        np.clip(unshared, 0.0, 2.0),
        np.column_stack([np.ones_like(correlation), correlation]),
        widths,
        softmax.AlikeRows.of(keys),
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


# --- tokens alike ---------------------------------------------------------------------------------


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
        times `RowAttention.amplification`."""
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


Mask = NDArray[np.bool_]

HEADS_RESOLVED = 4
"""ALiBi heads evaluated one by one; more are averaged by a Gauss rule with this number of nodes in
the logarithm of the slope."""

BEYOND_TABLES = (
    "some rows have a logit variance beyond 8, where they follow the law of the largest logits"
)


ALIKE_NOTED, TURNED_NOTED = 0.7, 0.5
"""Correlation of rotated keys and logit variance beyond which, together, a note warns."""

TURNED_ALIKE = (
    "tokens that rotary positions turn correlate by more than .7, and logits differ mostly as keys "
    "turn: against simulation queries' and keys' gradients are, at a correlation of .8 and "
    "logit variances of 1 to 2.7, up to 11 and 22 % high token by token, on classes of positions "
    "keys up to 33 % behind the first layer; at .95 up to twice as large, and on classes keys 4 to "
    "6 times"
)


def turned_alike(leaf: Any, law: LogitLaw) -> bool:
    """Whether rotary positions act on strongly correlated tokens with large logits."""
    keys = law.keys.kernel
    size, shared = keys.mean_diagonal(), keys.mean_off_diagonal()
    logits = law.scale * law.queries.kernel.mean_diagonal() * size
    strong = (shared > ALIKE_NOTED * size) & (np.asarray(logits) > TURNED_NOTED)
    return leaf.rotary is not None and bool(np.any(strong))


# --- what each query attends to -------------------------------------------------------------------


def positions(tokens: int, leaf: Any) -> Array:
    """(tokens,) position of every token in its sequence, or in its document if packed."""
    length = tokens // leaf.sequences
    documents = np.ones((1, length)) if leaf.padding is None else np.asarray(leaf.padding)
    if np.max(documents) < 2 or documents.shape[-1] != length:
        documents = np.ones((1, length))
    where = np.broadcast_to(places(documents), (leaf.sequences, length))
    return where.reshape(-1).astype(np.float64)


def self_masks(leaf: Any, tokens: int, matrices: int) -> list[Mask]:
    """(n, n) masks of the keys that each query attends to, one per kernel of n tokens.

    A kernel holds `leaf.sequences` concatenated sequences, each of which attends to itself.

    Raises:
        DomainError: n is not a multiple of the number of sequences, or the padding has another
            number of sequences.
    """
    if tokens % leaf.sequences:
        raise DomainError(f"{tokens} tokens are not {leaf.sequences} sequences of one length")
    length = tokens // leaf.sequences
    offset = np.subtract.outer(np.arange(length), np.arange(length))
    inside = np.ones((length, length), bool)
    if leaf.causal:
        inside &= offset >= 0
    if leaf.window is not None:
        inside &= np.abs(offset) < leaf.window
    if leaf.padding is None:
        return [_blocks([inside] * leaf.sequences)] * matrices
    masks = [_visible(inside, np.asarray(row, dtype=np.int64)) for row in leaf.padding]
    if leaf.sequences > 1:
        if len(masks) != leaf.sequences:
            raise DomainError(
                f"padding is given for {len(masks)} sequences, "
                f"and the kernel holds {leaf.sequences}"
            )
        return [_blocks(masks)] * matrices
    return masks if len(masks) == matrices else masks * matrices


def _visible(inside: Mask, documents: NDArray[np.int64]) -> Mask:
    """(L, L) real keys of a query's own document; for a padding query, all real keys. A query
    without any key (padding before a causal text) attends to itself."""
    mask = inside & (same_document(documents) | ((documents[:, None] == 0) & (documents > 0)))
    return np.asarray(np.where(mask.any(-1, keepdims=True), mask, np.eye(len(mask), dtype=bool)))


def _blocks(masks: list[Mask]) -> Mask:
    """(n L, n K) block-diagonal mask of n masks (L, K)."""
    count, (rows, columns) = len(masks), masks[0].shape
    whole = np.zeros((count, rows, count, columns), bool)
    whole[np.arange(count), :, np.arange(count)] = masks
    return whole.reshape(count * rows, count * columns)


def same_sequence(queries: int, keys: int, sequences: int) -> Mask:
    """(queries, keys) whether both tokens belong to the same sequence."""
    ones = np.ones((queries // sequences, keys // sequences), bool)
    return _blocks([ones] * sequences)


# --- by token -------------------------------------------------------------------------------------


def head_slopes(leaf: Any) -> tuple[Array, Array]:
    """ALiBi slopes that represent those of all heads, and their weights."""
    every = leaf.alibi * alibi_slopes(int(leaf.heads))
    slopes, shares = few_points(np.log(every), HEADS_RESOLVED)
    return np.exp(slopes), shares


def logit_scales(law: LogitLaw) -> tuple[Array, Array]:
    """tau of every kernel, capped where the laws end, and the uncapped logit variance within a row,
    which is due to the unshared part of the keys."""
    queries, keys = law.queries.kernel, law.keys.kernel
    wanted = law.scale * queries.mean_diagonal() * (keys.mean_diagonal() - keys.mean_off_diagonal())
    return law.scale * np.minimum(1.0, LOGIT_VARIANCE_MAX / np.maximum(wanted, 1e-300)), wanted


def flat(kernel: Kernel) -> Array:
    """(matrices, n, n)."""
    return np.asarray(kernel.off_diagonal.reshape(-1, *kernel.off_diagonal.shape[-2:]))


class RowsLayer(Layer):
    """Attention from `kernels.rows.RowAttention`, by token or on classes.

    Attributes:
        wanted: logit variance before it was capped.
    """

    wanted: Array

    def _configurations(
        self,
        leaf: Any,
        law: LogitLaw,
        tokens: Kernel,
        norm_spread: Array,
        values_differ: bool,
        lead: tuple[int, ...],
        split: Callable[[Kernel], Iterable[Any]],
    ) -> Iterator[tuple[Any, Any, Any, float, dict[str, Any]]]:
        """For every configuration the kernels of queries, keys and values, the logit scale, and
        further arguments of its `RowAttention`. Equal kernels are one object.

        Args:
            tokens: kernel of the input of the value projection.
            lead: axes of configurations.
            split: returns the kernels of all configurations.
        """
        queries, keys = law.queries.kernel, law.keys.kernel
        scales, self.wanted = logit_scales(law)
        scales, spreads = (np.broadcast_to(x, lead).ravel() for x in (scales, norm_spread))
        # A common shift of all keys cancels in the softmax, unless it is rotated.
        plain = law.keys.gain is None and (leaf.rotary is None or keys is tokens)
        plain = plain and not values_differ
        value_gain = float(max(leaf.memory_width * leaf.value, 1e-60))
        given = {"drop_prob": leaf.drop_prob, "d_model": leaf.memory_width}
        given |= {"d_head": law.head_freedom, "value_bias": leaf.value_bias / value_gain}
        for query, key, value, scale, spread in zip(
            *map(split, (queries, keys, tokens)), scales, spreads, strict=True
        ):
            of_queries = value if queries is tokens else query
            of_keys = value if plain else key
            yield of_queries, of_keys, value, float(scale), {**given, "norm_spread": float(spread)}

    def _of_rows(self, function: Callable[[Any], Any]) -> Kernel:
        """Kernel of a property of the `RowAttention` of every kernel."""
        raise NotImplementedError

    def forward(self) -> Kernel:
        """Second moments per feature of sum_j a_ij x_j."""
        return self._of_rows(lambda rows: rows.output)

    def overlap_path(self, gained: Kernel) -> Kernel:
        """Growth of the query path per unit of the relative variance of two tokens' overlap."""
        return self._of_rows(lambda rows: rows.overlap_path) * gained

    def response(self) -> Kernel:
        """Query path per unit of the gradient."""
        return self._of_rows(lambda rows: rows.response)


class TokenLayer(RowsLayer):
    """One layer of attention on every kernel of a batch, by token.

    Heads have independent weights, so kernels and gradients are means over heads.
    """

    def __init__(
        self,
        leaf: Any,
        law: LogitLaw,
        queries: Kernel,
        memory: Kernel,
        norm_spread: Array,
        values_differ: bool,
    ) -> None:
        """Args:
        queries, memory: kernels of the tokens of the queries, and of those attended to; the same
            object for self-attention.
        norm_spread: as in `KernelAttention`, per kernel.
        values_differ: whether values are made of other tensors than keys.
        """
        self._leaf, self._shape = leaf, queries.off_diagonal.shape
        self._memory_shape = memory.off_diagonal.shape
        count = int(np.prod(self._shape[:-2], dtype=int))
        self._masks = leaf.key_masks(self._shape[-1], self._memory_shape[-1], count)
        self._rows = self._build(law, memory, norm_spread, values_differ)
        self._length = self._shape[-1]
        self._shares = head_slopes(leaf)[1].tolist() if leaf.alibi else [1.0]
        self.beyond_tables = any(h.beyond_tables for heads in self._rows for h in heads)
        self.keys = np.stack([mask.sum(-1) for mask in self._masks]).astype(float)

    def _build(
        self, law: LogitLaw, memory: Kernel, norm_spread: Array, values_differ: bool
    ) -> list[list[KernelAttention]]:
        """For every kernel the heads of `head_slopes`, or one if heads do not differ."""
        leaf, result = self._leaf, []
        places = [positions(shape[-1], leaf) for shape in (self._shape, self._memory_shape)]
        rotation, biases = None, list[Any]([None])
        if leaf.rotary is not None:
            rotation = Rotation.of_rotary(leaf.rotary, int(leaf.d_head), *places)
        if leaf.alibi:
            distance = np.abs(np.subtract.outer(*places))
            biases = [-slope * distance for slope in head_slopes(leaf)[0]]
        lead = memory.off_diagonal.shape[:-2]
        configurations = self._configurations(
            leaf, law, memory, norm_spread, values_differ, lead, flat
        )
        for (queries, keys, values, scale, given), mask in zip(
            configurations, self._masks, strict=True
        ):
            kernels = {
                "query_kernel": None if queries is keys else queries,
                "key_kernel": None if keys is values else keys,
            }
            given |= kernels | {"logit_scale": scale, "allowed": mask, "rotation": rotation}
            result.append([KernelAttention(values, bias=bias, **given) for bias in biases])
        return result

    def _kernel(self, matrices: Any) -> Kernel:
        return Kernel.of_matrix(np.stack(matrices).reshape(self._shape))

    def _mean(self, values: Iterable[Any]) -> Any:
        """Mean over the heads of one kernel."""
        return sum(share * value for share, value in zip(self._shares, values, strict=True))

    def _numbers(self, name: str) -> Array:
        return np.stack([self._mean(getattr(h, name) for h in heads) for heads in self._rows])

    def _of_rows(self, function: Callable[[KernelAttention], Array]) -> Kernel:
        return self._kernel([self._mean(map(function, heads)) for heads in self._rows])

    def mean_output(self) -> Kernel:
        """Overlap of the outputs of two heads that share keys and values; as their queries are
        independent, so are their rows to leading order."""
        mean, values = self._numbers("mean_attention"), [heads[0].kernel for heads in self._rows]
        return self._kernel(mean @ np.stack(values) @ np.swapaxes(mean, -1, -2))

    def weights(self) -> Array:
        """Mean attention."""
        result = self._numbers("mean_attention")
        return result.reshape(*self._shape[:-2], *result.shape[-2:])

    @functools.cached_property
    def sum_square(self) -> Array:
        """E sum_j a_ij^2."""
        return self._numbers("sum_square").reshape(self._shape[:-1])

    def backward(self, gained: Kernel) -> Paths[Kernel]:
        """Paths of the gradient at sum_j a_ij x_j."""
        parts = []
        for heads, matrix in zip(self._rows, flat(gained), strict=True):
            paths = zip(*(head.backward(matrix) for head in heads), strict=True)
            parts.append(Paths(*map(self._mean, paths)))
        query = self._kernel([part.query for part in parts])
        value, key, cross = (
            Kernel.of_matrix(np.stack(matrices).reshape(self._memory_shape))
            for matrices in zip(*((p.value, p.key, p.cross) for p in parts), strict=True)
        )
        return Paths(value, query, key, cross)

    def _shifted(self, table: RelativeBias) -> Kernel:
        place = positions(self._length, self._leaf)
        bucket = table.bucket(np.subtract.outer(place, place).T, self._leaf.causal)
        weights, values = self._numbers("mean_attention"), [heads[0].kernel for heads in self._rows]
        shifted = [shifted_together(w, bucket, c) for w, c in zip(weights, values, strict=True)]
        return self._of_rows(lambda rows: rows.amplification) * self._kernel(shifted)


# --- by class -------------------------------------------------------------------------------------


class ClassLayer(RowsLayer):
    """`TokenLayer` on classes of positions.

    Exchangeable tokens whose logits depend on distance are a single class.
    """

    def __init__(
        self, leaf: Any, law: LogitLaw, memory: Signal, tokens: Kernel, values_differ: bool
    ) -> None:
        self._alike = tokens.classes is None
        self._classes = classes = tokens.classes or one_class(memory.seq_len)
        self._lead = lead = (
            np.shape(tokens.off_diagonal) if self._alike else tokens.off_diagonal.shape[:-2]
        )
        self._key_counts = key_counts = classes.key_counts(leaf.window)
        rotary_means = None
        if leaf.rotary is not None:
            rotary_means = RotaryMeans.of(key_counts, *leaf.rotary.frequencies(int(leaf.d_head)))
        self._rotary_means = rotary_means
        self._rows: list[PositionAttention] = []
        for queries, keys, values, scale, given in self._configurations(
            leaf, law, tokens, norm_variance(memory), values_differ, lead, self._flat
        ):
            blocks = list(zip(queries, keys, values, strict=True))
            words: list[Words | None] = [None, None]
            if isinstance(classes, TextClasses):
                half = len(blocks) // 2
                words = self._words(classes, blocks[half:])
                blocks = blocks[:half]
            inside, *other = blocks
            across = Across(*other[0], words[1]) if other else None
            logits = ClassLogits(*inside, scale, key_counts, rotary_means, across, words[0])
            self._rows.append(PositionAttention(logits, **given))
        self.beyond_tables = any(rows.beyond_tables for rows in self._rows)
        self._tokens, self._length = tokens, classes.length
        self.keys = self._of_tokens(key_counts.size)

    def _words(
        self, classes: TextClasses, blocks: Sequence[tuple[Matrix, Matrix, Matrix]]
    ) -> list[Words | None]:
        """Kernels of two tokens of the same word, within one document and between two."""
        result: list[Words | None] = []
        others = classes.same_word_share, classes.same_word_share_across
        for (coincidence, share), counts, kernels in zip(
            classes.shares, others, blocks, strict=False
        ):
            queries, keys, values = kernels
            at_one_place = coincidence if result else None
            words = classes.repeated_share, counts, at_one_place
            # a larger share would need more repeated words than there are; texts with many such
            # cells are refused by `prediction.stack`
            share = np.minimum(share, classes.largest_same_word_share)
            result.append(Words(queries, keys, values, share, *words))
        return [*result, None]

    def _flat(self, kernel: Kernel, means: bool = False) -> list[tuple[Matrix, ...]]:
        """For every configuration, the blocks of its kernel by the relation of two tokens (same
        document, same word); with `means`, averaged over words."""
        size = len(self._classes.nodes)
        diagonal, off_diagonal = kernel.diagonal, kernel.off_diagonal
        if self._alike:
            diagonal = np.asarray(diagonal)[..., None]
            off_diagonal = np.asarray(off_diagonal)[..., None, None]
        shape = (*self._lead, size)
        diagonal = np.broadcast_to(diagonal, shape)
        off_diagonal = np.broadcast_to(off_diagonal, (*shape, size))
        blocks = self._classes.blocks if means else self._classes.blocks_by_word
        matrices = diagonal.reshape(-1, size), off_diagonal.reshape(-1, size, size)
        return [blocks(*matrix) for matrix in zip(*matrices, strict=True)]

    def _kernel(self, kernels: list[Any]) -> Kernel:
        diagonal, off_diagonal = kernels[0]
        if self._lead:
            shape = diagonal.shape, off_diagonal.shape
            diagonal, off_diagonal = (np.stack(part) for part in zip(*kernels, strict=True))
            diagonal = diagonal.reshape(*self._lead, *shape[0])
            off_diagonal = off_diagonal.reshape(*self._lead, *shape[1])
        if self._alike:
            return Kernel(diagonal[..., 0][()], off_diagonal[..., 0, 0][()])
        return Kernel(diagonal, off_diagonal, self._classes)

    def _of_rows(self, function: Callable[[PositionAttention], Matrix]) -> Kernel:
        relations = ([rows, *rows.others] for rows in self._rows)
        return self._kernel([self._classes.joined(*map(function, rows)) for rows in relations])

    def _numbers(self, name: str) -> Array:
        result = np.stack([getattr(rows, name) for rows in self._rows])
        return self._of_tokens(result.reshape(*self._lead, *result.shape[1:]))

    def _of_tokens(self, values: Array) -> Array:
        return values[..., 0] if self._alike else self._classes.tiled(values)

    def mean_output(self) -> Kernel:
        return self._of_rows(lambda rows: rows.mean_output())

    def weights(self) -> ClassRows | None:
        """Mean attention; None (uniform) for exchangeable tokens."""
        if self._alike:
            return None
        result = np.stack([rows.weights for rows in self._rows])
        return ClassRows(result.reshape(*self._lead, *result.shape[1:]), self._key_counts)

    @functools.cached_property
    def sum_square(self) -> Array:
        return self._numbers("sum_square")

    def backward(self, gained: Kernel) -> Paths[Kernel]:
        result: list[list[Matrix]] = [[] for _ in Paths._fields]
        counts = self._classes.document_counts
        totals = gained if counts is None else gained.weighted(*counts)
        for rows, gradients in zip(self._rows, self._flat(totals), strict=True):
            relations = [rows, *rows.others]
            if isinstance(self._classes, TextClasses):
                parts = self._backward_by_word(self._classes, relations, gradients)
            else:
                both = zip(relations, gradients, strict=True)
                parts = [attention.backward(*gradient) for attention, gradient in both]
            for of_path, blocks in zip(result, zip(*parts, strict=True), strict=True):
                of_path.append(self._classes.joined(*blocks))
        paths = Paths(*map(self._kernel, result))
        if counts is None:
            return paths
        inverse = [ratio_or_zero(1.0, count) for count in counts]
        return Paths(*(path.weighted(*inverse) for path in paths))

    def _backward_by_word(
        self, classes: TextClasses, rows: list[Any], gradients: tuple[Matrix, ...]
    ) -> list[Any]:
        """Paths for different words, then for the same word; within one document, then between
        two."""
        result: list[list[Any]] = [[], []]
        half = len(classes.shares)
        for number, (coincidence, share) in enumerate(classes.shares):
            both = list(zip(rows[number::half], gradients[number::half], strict=True))
            portions = (1.0 - coincidence, 1.0 - share), (coincidence, share)
            parts = [
                row.backward(of_diagonal * diagonal, of_pairs * off_diagonal)
                for (row, (diagonal, off_diagonal)), (of_diagonal, of_pairs) in zip(
                    both, portions, strict=True
                )
            ]
            queries = [
                (diagonal * row.response[0], off_diagonal * row.response[1])
                for row, (diagonal, off_diagonal) in both
            ]
            for relation, query in enumerate(queries):
                paths = {"query": query}
                for name in ("value", "key", "cross"):
                    (diagonal, matrix), (diagonal2, matrix2) = (getattr(p, name) for p in parts)
                    diagonal, relations = diagonal + diagonal2, matrix + matrix2
                    if number > 0:  # between documents the diagonal is one relation's, not the mean
                        mean = relations[0] + share * (relations[1] - relations[0])
                        diagonal = diagonal + np.diagonal(relations[relation] - mean)
                    paths[name] = diagonal, relations[relation]
                result[relation].append(parts[0]._replace(**paths))
        return result[0] + result[1]

    def summed(self, query: Kernel) -> Kernel:
        classes = self._classes
        inner = classes.one if isinstance(classes, TextClasses) else classes
        # rotary means over pairs of a cell weight pairs differently from `pair_count`
        if self._rotary_means is None or type(inner) is not PositionClasses:
            return query
        count = classes.one_document.pair_count
        usable = count > 0.0
        share = self._rotary_means.pair_count() / np.where(usable, count, 1.0)
        return query.weighted(1.0, classes.block_diagonal(np.where(usable, share, 1.0)))

    def _shifted(self, table: RelativeBias) -> Kernel:
        shifted = [
            self._classes.joined(
                *(shifted_classes(self._key_counts, table, rows.weights, block) for block in blocks)
            )
            for rows, blocks in zip(self._rows, self._flat(self._tokens, means=True), strict=True)
        ]
        return self._kernel(shifted) * self._of_rows(lambda rows: rows.amplification)


# --- choice of the layer --------------------------------------------------------------------------


def layer_of(
    leaf: Any,
    law: LogitLaw,
    signal: Signal,
    memory: Signal,
    kernels: tuple[Kernel, Kernel],
    values_differ: bool = False,
) -> TokenLayer | ClassLayer | AlikeLayer | SinkLayer:
    """Attention at the resolution of its tokens: moments of sum_j a_ij x_j and gradient paths.

    Args:
        signal, memory: the tokens of the queries, and those attended to, which may be the same.
        kernels: of the queries' tokens, and of the input of the value projection.
        values_differ: whether the latter is not the input of the key projection.
    """
    (queries, tokens), spread = kernels, norm_variance(memory)
    layer: TokenLayer | ClassLayer | AlikeLayer
    if memory.resolved is True:
        layer = TokenLayer(leaf, law, queries, tokens, spread, values_differ)
    elif memory.resolved or (by_distance(leaf) and memory.seq_len > 1):
        layer = ClassLayer(leaf, law, memory, tokens, values_differ)
    else:
        scale, wanted = logit_scales(law)
        layer = AlikeLayer(
            law.queries.kernel,
            law.keys.kernel,
            tokens,
            query_count=signal.seq_len,
            key_count=memory.seq_len,
            scale=scale,
            drop_prob=leaf.drop_prob,
            d_model=leaf.memory_width,
            d_head=law.head_freedom,
            norm_spread=spread,
            value_bias=leaf.value_bias / positive(leaf.memory_width * leaf.value),
            wanted=wanted,
        )
    return layer if leaf.sink is None else SinkLayer(layer, law, leaf.sink, tokens)
