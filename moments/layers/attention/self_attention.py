"""Attention as a component: forward moments, all gradient paths, weight gradients.

Self-attention, cross-attention of a decoder to its encoder's output (the memory), and HybridNorm:
self-attention with queries, keys and values normalised in each head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

import numpy as np

from ...engine.classes import ClassRows
from ...engine.composition import (
    Chain,
    Component,
    Leaf,
    Pullback,
    PullbackResult,
    Reader,
    ReaderPullback,
)
from ...engine.directions import at_tokens, expected_pull
from ...engine.fluctuation import OverlapWalk, UnsharedOverlap, of_averages
from ...engine.layout import Padding
from ...engine.response import SINGLE, Elementwise, GradientUnits, Response, Sequence, kernel_of
from ...engine.state import Array, Fluctuation, Gradient, Kernel, Signal, ratio_or_zero
from ...engine.trace import Record
from ...errors import domain_error
from ...formulas.linear import LINEAR
from ...formulas.normalization import RMSNORM
from ...model.positions import RelativeBias, Rotary
from ..elementary import Linear
from ..normalization import FiniteNormalization
from .kernels import Paths
from .layers import (
    BEYOND_TABLES,
    TURNED_ALIKE,
    Mask,
    layer_of,
    same_sequence,
    self_masks,
    turned_alike,
)
from .projections import (
    LogitLaw,
    biased,
    logit_law,
    norm_freedom,
    over_all_heads,
    positive,
    through,
    variance_notes,
)
from .response import AttentionSublayer, through_attention
from .softmax import participation_variance


@dataclass(frozen=True)
class Attention(Component):
    """Fields common to self-attention and cross-attention.

    Attributes:
        matrices: name of the value matrix.
        prefix: of the names of all weights.
        heads, d_head: number and width of the heads.
        query, key, value: variances of the projections' entries.
        drop_prob: dropout on the attention weights.
        temperature: divides the logits.
        kv_heads: key and value heads, each shared by heads / kv_heads queries; None: heads.
        qk_norm: normalisation of each head's queries and keys: None, "rmsnorm" or "layernorm".
        norm_epsilon: added to the variance under the root of `qk_norm`.
        norm_affine: whether `qk_norm` has gains, shared by the heads, that receive gradients.
        logit_softcap: c of c tanh(logit / c); None: uncapped.
        query_bias, key_bias, value_bias: variances of the projections' biases.
        has_bias: which of query, key and value have a bias (possibly of variance 0) that receives a
            gradient; True: all.
        padding: for every sequence attended to, the number of each token's document, 0 for padding;
            None: one document without padding. Tokens attend to their own document only.
        sequences: number of equally long sequences concatenated in a token kernel.
    """

    matrices: ClassVar[tuple[str, ...]]
    prefix: ClassVar[str]
    mixes_tokens: ClassVar[bool] = True

    label: str
    d_model: Any
    heads: Any
    d_head: Any
    query: Any
    key: Any
    value: Any
    _: KW_ONLY
    drop_prob: Any = 0.0
    temperature: Any = 1.0
    kv_heads: Any = None
    qk_norm: str | None = None
    norm_epsilon: float = 0.0
    norm_affine: bool = False
    logit_softcap: float | None = None
    query_bias: float = 0.0
    key_bias: float = 0.0
    value_bias: float = 0.0
    has_bias: bool | tuple[str, ...] = ()
    padding: Padding | None = None
    sequences: int = 1

    @property
    def value_width(self) -> Any:
        """Features of the values of all heads."""
        return self.heads * self.d_head

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        return through_attention(self, record, at, walk)

    def with_variances(self, names: tuple[str, ...], factor: float) -> Any:
        if self.matrices[0] not in names:
            return self
        leaf: Any = self  # subclasses are dataclasses with the same field
        return dataclasses.replace(leaf, value=self.value * factor)


@dataclass(frozen=True)
class SelfAttention(Attention, Leaf):
    """Query, key and value projections, softmax with dropout, heads concatenated.

    Attributes:
        causal: whether a token attends only to itself and earlier tokens.
        rotary: rotary positions of queries and keys.
        alibi: factor on the ALiBi slopes, by which logits fall with distance; 0: no penalty.
        relative_bias: random biases of the logits by relative position.
        window: tokens attend to tokens less than this many positions away; None: to all.
        sink: variance over heads of the logit of an additional key without a value; None: no sink.
    """

    drop_prob: Any = 0.0
    causal: bool = False
    rotary: Rotary | None = None
    alibi: bool | float = False
    relative_bias: RelativeBias | None = None
    window: int | None = None
    sink: float | None = None

    matrices: ClassVar[tuple[str, ...]] = ("value",)
    prefix: ClassVar[str] = ""

    @property
    def memory_width(self) -> Any:
        """Width of the tokens attended to."""
        return self.d_model

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        """Moments of the concatenated heads, and the map from their gradient to the input's."""
        pullback = attended(self, signal, signal)
        return pullback.output, pullback

    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        """`forward` with keys and values from other tokens, at the same positions."""
        pullback = attended(self, signal, memory)
        return pullback.output, pullback.to_both

    def key_masks(self, queries: int, keys: int, matrices: int) -> list[Mask]:
        """(queries, keys) masks of the keys that each query attends to, one per kernel."""
        return self_masks(self, keys, matrices)

    def apart(self) -> Linear:
        width = self.value_width
        sizes = {"fan_in": self.d_model, "fan_out": width, "weight_variance": self.value}
        return Linear(LINEAR, "refined", self.label, sizes, width, self.matrices[0])

    def without_positions(self) -> SelfAttention:
        free = dataclasses.replace(self, causal=False, window=None, padding=None, sequences=1)
        return dataclasses.replace(free, rotary=None, alibi=False, relative_bias=None)

    def response(self, record: Record, around: GradientUnits) -> Response:
        return AttentionSublayer.of(self, record.input, around.grad_out(record))


@dataclass(slots=True, eq=False)
class AttentionPullback:
    """Backward pass through attention.

    Attributes:
        leaf: a `SelfAttention` or `CrossAttention`.
        signal, memory: the tokens of the queries, and those of keys and values; the same object for
            self-attention.
        mixed: second moments per feature of sum_j a_ij y_j, y the tokens attended to.
        layer: with the gradient paths of the attention weights.
        aligned: fraction of the values' unshared second moment that is along the tokens of their
            keys: only this part is moved by fluctuating overlaps.
    """

    leaf: Any
    law: LogitLaw
    signal: Signal
    memory: Signal
    output: Signal
    mixed: Kernel
    layer: Any
    aligned: Any = 1.0

    def __call__(self, gradient: Gradient) -> PullbackResult:
        """Gradient at the input of self-attention."""
        gradient = self._weighted(gradient)
        query, key, sides = self._paths(gradient.kernel)
        return self._pulled(sides.value + sides.cross + key + query, gradient, sides)

    def _weighted(self, gradient: Gradient) -> Gradient:
        """The gradient, weighted by sum_j a_ij^2: through attention it returns in proportion to
        that, and decreases with the output's squared norm, which is proportional to it too."""
        fluctuation = self.output.fluctuation
        if fluctuation is None or fluctuation.overlaps is None:
            return gradient
        response, _, _ = at_tokens(gradient.kernel, gradient.norm_response)
        kernel = gradient.kernel.weighted(1 / (1 + response * fluctuation.drawn), 1.0)
        return gradient.with_kernel(kernel)

    def to_both(self, gradient: Gradient) -> tuple[PullbackResult, Gradient]:
        """Gradients at the tokens of the queries, and at those of keys and values."""
        gradient = self._weighted(gradient)
        query, key, sides = self._paths(gradient.kernel)
        rest = sides.value + sides.cross + key
        return self._pulled(query, gradient, sides), Gradient(rest, self.memory.seq_len)

    def _pulled(self, grad_in: Kernel, gradient: Gradient, sides: Any) -> AttentionPulled:
        grad_out = gradient.kernel
        return AttentionPulled(
            Gradient(grad_in, gradient.seq_len),
            functools.partial(self.weights, grad_out, sides),
            functools.partial(self.overlaps, grad_out),
            self.response,
            pullback=self,
            grad_out=grad_out,
            paths=sides,
        )

    def _paths(self, grad_out: Kernel) -> tuple[Kernel, Kernel, Paths[Kernel]]:
        """Gradients at the tokens through queries and through keys, and all paths."""
        sides: Paths[Kernel] = self.layer.backward(grad_out.scaled(self.gain))
        if np.any(self.aligned != 1.0):
            lost = self.layer.overlap_path(grad_out.scaled(self.gain))
            lost = lost.scaled((self.aligned - 1.0) / self.leaf.memory_width)
            sides = sides._replace(query=sides.query + lost)
        key = through(sides.key, self.law.keys, self.law.key_scale)
        return self._at_queries(sides.query), key, sides

    @property
    def gain(self) -> Any:
        """Gain of the value projection on a gradient."""
        return self.leaf.value_width * self.leaf.value

    def _at_queries(self, path: Kernel) -> Kernel:
        """Gradient at the queries' tokens, from a query path per unit of the memory's width."""
        result = through(path, self.law.queries, self.law.gradient_scale)
        if self.memory is self.signal:
            return result
        return result.scaled(self.leaf.memory_width / self.leaf.d_model)

    def overlap_path(self, grad_out: Kernel) -> Kernel:
        """Growth of the query path per unit of the variance of two tokens' overlap."""
        result: Kernel = self.layer.overlap_path(grad_out.scaled(self.gain * self.aligned))
        return result

    def response(self) -> Kernel:
        """The query path of a gradient of ones."""
        result: Kernel = self.layer.response()
        return self._at_queries(result.scaled(self.gain))

    # --- gradients of the projections ------------------------------------------------------------

    def weights(self, grad_out: Kernel, sides: Paths[Kernel]) -> dict[str, Array]:
        """Squared gradient norms of the projections, with their biases and norms, of a table of
        relative biases and of sinks; `sides` are the paths in the kernels of queries and keys."""
        leaf, law, length = self.leaf, self.law, self.signal.seq_len
        path, query = self.overlap_path(grad_out), self.layer.summed(sides.query)
        grown, inverse = self._overlap_gradients(path), self._inverse_variances()
        result: dict[str, Array] = {}
        for side, grad_in in (("query", query), ("key", sides.key)):
            norms = self._of_side(side, grad_in)
            result |= {name: norm * inverse[side] for name, norm in norms.items()}
        result["value"] = (
            leaf.memory_width * leaf.value_width * (self.mixed * grad_out).total(length)
        )
        result["key"] = result["key"] + grown["key"] / leaf.memory_width
        if leaf.qk_norm is not None and leaf.norm_affine:
            # E (tr J)^2 of two rows, to which overlaps' variance contributes, is that of any two.
            within = self._within_heads(query + path.scaled(-1 / leaf.memory_width))
            gain = self._of_gain(law.queries.kernel * query + within)
            result["query.norm.gain"] = result["key.norm.gain"] = gain
        if "value" in biased(leaf.has_bias):
            result["value.bias"] = self._of_value_bias(grad_out)
        if "key.bias" in result:
            shifts = self._shift_matters
            result["key.bias"] = np.maximum(result["key.bias"], 0.0) if shifts else 0.0
        result = self._named(dict(sorted(result.items(), key=lambda one: one[0].count("."))))
        gained = grad_out.scaled(self.gain)
        table = self.layer.table_gradient(leaf, gained)
        if table is not None:
            result |= {"relative_bias": table}
        if self.layer.rows is None:
            return result
        return result | {"attention_sink": self.layer.sink_gradient(leaf, gained, length)}

    def overlaps(self, grad_out: Kernel) -> dict[str, Array]:
        """See `PullbackResult.overlaps`."""
        return self._named(self._overlap_gradients(self.overlap_path(grad_out)))

    def _overlap_gradients(self, path: Kernel) -> dict[str, Array]:
        """Growth of queries' and keys' squared gradient norms per unit of overlaps' variance."""
        leaf, inverse, of_query = self.leaf, self._inverse_variances(), self._of_side("query", path)
        grown = {name: norm * inverse["query"] for name, norm in of_query.items()}
        # The same sum over overlaps of queries times overlaps of keys.
        grown["key"] = of_query["query"] * inverse["key"]
        if leaf.qk_norm is not None and leaf.norm_affine:
            gain = self._of_gain(self.law.queries.kernel * path)
            grown["query.norm.gain"] = grown["key.norm.gain"] = gain
        return grown

    def _named(self, norms: dict[str, Array]) -> dict[str, Array]:
        """Norms under the full names of the weights."""
        return {f"{self.leaf.prefix}{name}": norm for name, norm in norms.items()}

    def _of_side(self, name: str, path: Kernel) -> dict[str, Array]:
        """Squared gradient norms of the query or key projection and its bias, times the variance of
        the weights: d_model sum_ij E[x_i x_j] E[dx_i dx_j]."""
        is_query = name == "query"
        tokens, side = (self.signal, self.law.queries) if is_query else (self.memory, self.law.keys)
        kernel, length = tokens.second_moment(), tokens.seq_len
        if not (is_query or self._shift_matters):
            kernel = kernel.without_common()
        grad_in, size = through(path, side, self.law.gradient_scale), self.leaf.memory_width
        result = {name: size * (kernel * grad_in).total(length)}
        if name in biased(self.leaf.has_bias):
            result[f"{name}.bias"] = size / tokens.width * grad_in.total(length)
        return result

    def _of_value_bias(self, grad_out: Kernel) -> Array:
        leaf, length = self.leaf, self.signal.seq_len
        dropped = leaf.drop_prob / (1 - leaf.drop_prob)
        diagonal = grad_out.diagonal * (1 + dropped * self._of_rows("square_sum"))
        result = leaf.value_width * grad_out.with_diagonal(diagonal).total(length)
        kept = self.layer.rows
        if kept is None:
            return result
        return result * ratio_or_zero((grad_out * kept).total(length), grad_out.total(length))

    def _of_gain(self, product: Kernel) -> Array:
        """Squared gradient norm of a norm's gain, from the product of kernel and query path."""
        leaf = self.leaf
        share = 1.0 if over_all_heads(leaf) else norm_freedom(leaf) / leaf.d_head
        total = product.total(self.signal.seq_len)
        return leaf.memory_width * share * self.law.gradient_scale * total

    def _within_heads(self, path: Kernel) -> Kernel:
        """(1 - N^2)^2 dQ/dN of different rows, times 2 over the features of a norm."""
        kernel = self.law.queries.kernel
        first, second = kernel.over_tokens(kernel.diagonal)
        size = np.sqrt(first * second)
        cosine = ratio_or_zero(kernel.off_diagonal, size)
        theta, square = (
            np.sqrt(np.multiply(*kernel.over_tokens(self._of_rows(name))))
            for name in ("logit_variance", "square_sum")
        )
        # odds of one key's weight at this correlation of two queries
        odds = ratio_or_zero(square, np.maximum(1 - square, 0.0)) * np.exp((cosine - 1) * theta)
        slope = theta * (1 - odds) / (1 + odds)
        off_diagonal = size * (1 - cosine * cosine) ** 2 * slope * path.off_diagonal
        result = Kernel.of_parts(0.0 * kernel.diagonal, off_diagonal, kernel.resolved)
        return result.scaled(2 / norm_freedom(self.leaf))

    def _of_rows(self, name: str) -> Array:
        """A reported statistic of the rows, in the shape of queries."""
        assert self.output.diagnostics is not None
        values = np.asarray(self.output.diagnostics[name])
        return values.reshape(np.shape(self.mixed.diagonal)) if self.mixed.resolved else values

    @property
    def _shift_matters(self) -> bool:
        """Whether a common shift of all keys changes attention. It cancels in the softmax, whose
        Jacobian has rows of sum 0, except with rotary positions, normalised keys or a sink."""
        leaf = self.leaf
        return leaf.rotary is not None or leaf.qk_norm is not None or leaf.sink is not None

    def _inverse_variances(self) -> dict[str, Array]:
        """1 over the variance of a projection's entries, in the limit of small ones; 0 if the other
        projection is 0, so that no gradient reaches this one."""
        leaf = self.leaf
        query = positive(leaf.query, leaf.query_bias / leaf.d_model)
        key = positive(leaf.key, leaf.key_bias / leaf.memory_width)
        nonzero = (np.add(leaf.query, leaf.query_bias) > 0, np.add(leaf.key, leaf.key_bias) > 0)
        return {"query": nonzero[1] / query, "key": nonzero[0] / key}


@dataclass(slots=True, eq=False, kw_only=True)
class AttentionPulled(PullbackResult):
    """Gradient at attention's input; its pullback, the gradient at the output and all paths."""

    pullback: AttentionPullback
    grad_out: Kernel
    paths: Any


def attended(
    leaf: Any, signal: Signal, memory: Signal, values: Signal | None = None, own: Any = 1.0
) -> AttentionPullback:
    """Attention of tokens to a memory or to themselves: the pullback, which holds the output.

    Args:
        leaf: a `SelfAttention` or `CrossAttention`.
        signal, memory: the tokens of the queries, and those of keys and values; the same object for
            self-attention.
        values: input of the value projection, if it is not `memory`.
        own: part of the values' kernel that comes from these tokens, over the tokens' kernel.

    Raises:
        DomainError: tokens are exchangeable, but not under this mask.
    """
    if not signal.resolved:
        _check_exchangeable(leaf, signal.seq_len)
    queries = signal.second_moment()
    tokens = queries if memory is signal else memory.second_moment()
    law = logit_law(leaf, queries, tokens, (leaf.d_model, leaf.memory_width), memory.seq_len)
    read = memory if values is None else values
    kernels = queries, tokens if values is None else values.kernel
    layer = layer_of(leaf, law, signal, memory, kernels, values is not None)
    mixed, notes = layer.forward(), variance_notes(layer.wanted)
    if not notes and layer.beyond_tables:
        notes = (BEYOND_TABLES,)
    notes += law.notes
    if turned_alike(leaf, law):
        notes += (TURNED_ALIKE,)
    output = concatenated(leaf, signal, read, mixed, layer, notes)
    if values is not None and output.fluctuation is not None:
        alone = of_averages(signal, layer.weights(), leaf.memory_width * leaf.value * own)
        shared = None if alone is None else alone.shared
        output = output.replace(fluctuation=output.fluctuation._replace(shared=shared))
    return AttentionPullback(leaf, law, signal, memory, output, mixed, layer)


def _check_exchangeable(leaf: Any, length: int) -> None:
    """Raise if the mask distinguishes tokens by position."""
    positional = {
        "causal": leaf.causal,
        "alibi": bool(leaf.alibi),
        "window": leaf.window is not None and leaf.window < length,
    }
    for name, present in positional.items():
        if present and length > 1:
            allowed = "absent where all tokens are alike"
            remedy = "resolve moments by token: tokens=True"
            raise domain_error(name, getattr(leaf, name), allowed, remedy)


def _with_bias(leaf: Any, heads: Kernel, squares: Array, rows: Kernel | None) -> Kernel:
    """Add the values' bias: rows of attention sum to 1 (or have second moments `rows`), and with
    dropout their sums have second moment 1 + p/(1-p) sum a^2."""
    if not np.any(leaf.value_bias):
        return heads
    dropped = leaf.drop_prob / (1 - leaf.drop_prob)
    bias, pair_bias = heads.lift(leaf.value_bias)
    of_row, of_pair = (1.0, 1.0) if rows is None else (rows.diagonal, rows.off_diagonal)
    diagonal = heads.diagonal + bias * (of_row + dropped * squares)
    return Kernel.of_parts(diagonal, heads.off_diagonal + pair_bias * of_pair, heads.resolved)


def concatenated(
    leaf: Any, signal: Signal, memory: Signal, mixed: Kernel, layer: Any, notes: tuple[str, ...]
) -> Signal:
    """The concatenated heads of a `SelfAttention` or `CrossAttention`.

    Args:
        signal, memory: the tokens of the queries, and those of keys and values.
        mixed: second moments per feature of sum_j a_ij y_j, y the latter.
    """
    width, gain = leaf.value_width, leaf.memory_width * leaf.value
    kernel = _with_bias(leaf, mixed.scaled(gain), layer.sum_square, layer.rows)
    fluctuation: Fluctuation | None = None
    if signal.fluctuation is not None:
        # Given the averaged tokens, entries are Gaussian: 2/width of the squared moment. Heads that
        # share keys and values also correlate by the overlap of their mean outputs.
        fresh = (kernel * kernel).scaled(2 / width)
        group = 1 if leaf.kv_heads is None else leaf.heads / leaf.kv_heads
        if group > 1:
            common = layer.mean_output().scaled(gain).resolved_as(kernel)
            fresh += (common * common).scaled(2 * (group - 1) / width)
        averages = of_averages(memory, layer.weights(), gain)
        fluctuation = Fluctuation(fresh)
        if averages is not None and averages.overlaps is not None:  # the averages fluctuate too
            # An encoder's tokens are taken as independent of the decoder's; what earlier layers of
            # the decoder have read of the same encoder is neglected.
            shared = averages.shared if memory is signal else (fresh.scaled(0.0),) * 2
            norms, overlaps = (x.resolved_as(kernel) for x in (averages.norms, averages.overlaps))
            drawn = _of_drawn_weights(mixed, memory, layer, leaf.heads)
            of_norms, of_overlaps = (one.scaled(gain * gain) for one in drawn)
            relative = ratio_or_zero(of_norms.diagonal, kernel.diagonal * kernel.diagonal)
            norms, overlaps = fresh + norms + of_norms, fresh + overlaps + of_overlaps
            fluctuation = Fluctuation(norms, overlaps, shared=shared, drawn=relative)
    return Signal(
        kernel,
        signal.seq_len,
        0.0 * kernel.diagonal,
        width,
        fluctuation=fluctuation,
        diagnostics=layer.diagnostics(),
        notes=notes,
    )


def _of_drawn_weights(
    mixed: Kernel, memory: Signal, layer: Any, heads: Any
) -> tuple[Kernel, Kernel]:
    """U and Y of the averages (`Fluctuation`) due to the deviations of weights from their means.

    The deviation of a row is a vector over its n keys, drawn in every head. The overlaps of such
    vectors vary as those of n Gaussian features, a squared norm as sum_j a_j^2.
    """
    rows, per_row = layer.weights(), 1.0 / memory.seq_len + 0.0 * np.asarray(mixed.diagonal)
    if isinstance(rows, ClassRows):
        assert mixed.classes is not None
        per_row = mixed.classes.tiled((rows.counted * rows.weights).sum(-1))
    elif rows is not None:
        per_row = (rows * rows).sum(-1)
    drawn = mixed - layer.mean_output().resolved_as(mixed)
    square = drawn * drawn
    first, second = drawn.over_tokens(per_row**0.5)
    overlaps = square.weighted(per_row, first * second).scaled(2 / heads)
    variance = participation_variance(layer.sum_square, 1.0 / per_row)
    excess = np.maximum(layer.sum_square - per_row, 0.0)
    norms = square.weighted(ratio_or_zero(variance, excess * excess) / heads, 0.0)
    return norms, overlaps


# --- a memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CrossAttention(Attention, Reader):
    """Attention with keys and values from a memory, without a causal mask.

    Attributes:
        memory_width: width of the memory's tokens.
    """

    memory_width: Any

    causal: ClassVar[bool] = False
    window: ClassVar[None] = None
    sink: ClassVar[None] = None
    rotary: ClassVar[None] = None
    alibi: ClassVar[bool] = False
    relative_bias: ClassVar[None] = None
    matrices: ClassVar[tuple[str, ...]] = ("cross_value",)
    prefix: ClassVar[str] = "cross_"

    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        """Moments of the concatenated heads, and the map from their gradient to both inputs'.

        Raises:
            DomainError: only one of the two is resolved by token.
        """
        if (signal.resolved is True) != bool(memory.resolved):
            raise domain_error(
                "memory", memory.resolved, "resolved by token exactly where the queries are"
            )
        pullback = attended(self, signal, memory)
        return pullback.output, pullback.to_both

    @property
    def reads(self) -> CrossAttention:
        return self

    def without_positions(self) -> CrossAttention:
        return dataclasses.replace(self, padding=None, sequences=1)

    def key_masks(self, queries: int, keys: int, matrices: int) -> list[Mask]:
        """(queries, keys) masks, one per kernel: real tokens of the memory of the same sequence."""
        mask = same_sequence(queries, keys, self.sequences)
        if self.padding is None:
            return [mask] * matrices
        real = np.asarray(self.padding, dtype=bool)
        if self.sequences > 1:
            real = real.reshape(1, -1)
        masks = [np.where((mask & row).any(1, keepdims=True), mask & row, mask) for row in real]
        return masks if len(masks) == matrices else masks * matrices


# --- around the heads -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AroundHeads(Component):
    """Base of components around self-attention heads.

    Attributes:
        heads: a `SelfAttention`, or another component around one.
    """

    heads: Any

    mixes_tokens: ClassVar[bool] = True

    @property
    def label(self) -> str:  # type: ignore[override]
        label: str = self.heads.label
        return label

    @property
    def normalises(self) -> bool:
        return bool(self.heads.normalises)

    @property
    def padding(self) -> Padding | None:
        padding: Padding | None = self.heads.padding
        return padding

    def without_positions(self) -> Self:
        return dataclasses.replace(self, heads=self.heads.without_positions())

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        result: UnsharedOverlap = self.heads.unshared_overlap(record, at, walk)
        return result


# --- normalised values ----------------------------------------------------------------------------

LEAST_FREEDOM = 4.0
"""Floor of the degrees of freedom n of a head's norm: E 1/|v|^2 = 1/(n - 2) diverges at 2, and with
it the ratio (n - 1)/(n - 2) of the backward pass."""


@dataclass(frozen=True)
class NormalizedAttention(AroundHeads, Leaf):
    """Self-attention on q/|q|, k/|k| and v/|v|.

    The result does not depend on the tokens' norms, so tokens are normalised first, at the width of
    the model, and the values' weights then have variance 1/d_model. The further effect of
    normalising values on a gradient is applied to all paths, an error of order 1/d_head in those of
    queries and keys. Correlations of values are those of infinitely wide heads.

    `heads` have `qk_norm`; their `value` is the variance of the unnormalised projection.
    """

    normalises: ClassVar[bool] = True

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        attention = self.heads
        if not np.all(np.add(attention.value, attention.value_bias) > 0):
            allowed = "above 0 where values are normalised"
            raise domain_error("value", attention.value, allowed, "zeros have no direction")
        output, back = self.attend(signal, signal)
        return output, functools.partial(_to_one, back)

    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        """`forward` with keys and values from other tokens, at the same positions."""
        attention, size = self.heads, mean_size(memory)
        unit, plain = self.values_normalised(memory)
        inner, norm = unit.forward(memory)
        queries, query_norm = (inner, norm) if memory is signal else unit.forward(signal)
        gain = attention.d_model * attention.value + attention.value_bias / size
        output, back = plain.attend(queries, inner)
        freedom = _freedom(float(attention.d_head), attention.qk_norm == "layernorm")
        factor, share = expected_pull(freedom, 1.0), plain.value_bias
        pair_factor = expected_pull(freedom, inner.correlation() * (1 - share) + share)
        factors = (factor, pair_factor), factor / gain, size
        return output, functools.partial(self._back, back, (query_norm, norm), factors)

    def _back(
        self,
        attention: ReaderPullback,
        norms: tuple[Pullback, Pullback],
        factors: tuple[tuple[Any, Any], Any, float],
        gradient: Gradient,
    ) -> tuple[PullbackResult, Gradient]:
        """Backward pass through attention and the normalisation of both inputs.

        Args:
            factors: of normalised values on the gradient's diagonal and off-diagonal; on the
                squared gradient of the value matrix; mean second moment of the tokens.
        """
        of_tokens, of_values, size = factors
        inner, to_memory = attention(gradient)
        query, rest = (
            norm(Gradient(at_unit.kernel.weighted(*of_tokens), gradient.seq_len)).gradient
            for norm, at_unit in zip(norms, (inner.gradient, to_memory), strict=True)
        )
        pulled = PullbackResult(
            query,
            functools.partial(_rescaled, inner, of_values, size),
            inner.overlaps,
            functools.partial(_normed, inner, norms[0]),
        )
        return pulled, rest

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        # normalising tokens adds no unshared overlap
        _, plain = self.values_normalised(record.input)
        leaf = dataclasses.replace(plain, value=plain.value / mean_size(record.input))
        return through_attention(leaf, record, at, walk, fixed=True)

    def values_normalised(self, signal: Signal) -> tuple[FiniteNormalization, SelfAttention]:
        """Equivalent normalisation of the tokens, and attention with values of unit variance.

        Biases are divided by the tokens' mean second moment. The value bias enters the norm of a
        value with its mean share (averaged over configurations too).
        """
        attention = self.heads
        unit = FiniteNormalization(RMSNORM, attention.label, attention.norm_epsilon, centres=False)
        width, size = attention.d_model, mean_size(signal)
        diagonal, bias = width * attention.value * size, attention.value_bias
        bias = bias / (diagonal + bias) if bias > 0 else 0.0
        plain = dataclasses.replace(
            attention,
            query_bias=attention.query_bias / size,
            key_bias=attention.key_bias / size,
            value=(1 - bias) / width,
            value_bias=bias,
        )
        return unit, plain

    def apart(self) -> Chain:
        leaf = self.heads
        unit = FiniteNormalization(RMSNORM, leaf.label, leaf.norm_epsilon, centres=False)
        return Chain((unit, dataclasses.replace(leaf, value=1 / leaf.d_model).apart()))

    def response(self, record: Record, around: GradientUnits) -> Response:
        # The derivative of the values' norms, of order 1/d_head, is neglected. The gradient between
        # normalisation and attention is that of the linearised attention.
        signal = record.input
        unit, plain = self.values_normalised(signal)
        grad_out = around.grad_out(record)
        tokens, _ = unit.forward(signal)
        attention = AttentionSublayer.of(plain, tokens, grad_out)
        gained = SINGLE(attention.back_gain) * grad_out
        grad_in = attention.maps.signal_adjoint(gained, None, grad_out)
        at_tokens = Gradient(kernel_of(grad_in), record.grad_out.seq_len)
        normed = Elementwise.of(unit.forward, signal, at_tokens, grad_in)
        return Sequence((normed, attention))


def _to_one(back: ReaderPullback, gradient: Gradient) -> PullbackResult:
    """Gradient at the input of self-attention, from those at both inputs of `attend`."""
    pulled, to_memory = back(gradient)
    total = pulled.gradient.kernel + to_memory.kernel
    return dataclasses.replace(pulled, gradient=gradient.with_kernel(total))


def _rescaled(inner: PullbackResult, values: Any, size: float) -> Mapping[str, Array]:
    """Weight gradients for unnormalised values and tokens, from those of the inner attention."""
    result = dict(inner.weights())
    for name in {"value", "value.bias"} & result.keys():
        result[name] = result[name] * values
    return {n: norm / size if n.endswith(".bias") else norm for n, norm in result.items()}


def _normed(inner: PullbackResult, norm: Pullback) -> Kernel | None:
    result = inner.response()
    return None if result is None else norm(inner.gradient.with_kernel(result)).gradient.kernel


def mean_size(signal: Signal) -> float:
    """Mean second moment of tokens, over all configurations; 1 if they are 0."""
    return float(np.mean(signal.second_moment().mean_diagonal())) or 1.0


def _freedom(d_head: float, centred: bool) -> float:
    """Degrees of freedom of a Gaussian head's squared norm."""
    return max(d_head - 1 if centred else d_head, LEAST_FREEDOM)
