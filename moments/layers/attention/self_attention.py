"""Attention with all its gradient paths, for tokens alike or resolved by token.

Of tokens to themselves, to a memory (a decoder's to its encoder's output), and with queries, keys
and values all normalised, head by head (HybridNorm).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...engine.composition import Chain, Component, Leaf, Pullback, Pulled, Reader, ReaderPullback
from ...engine.directions import expected_pull
from ...engine.fluctuation import OverlapWalk, UnsharedOverlap, of_averages
from ...engine.layout import Padding
from ...engine.response import SINGLE, Around, Elementwise, Response, Sequence, kernel_of
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
    logit_law,
    of_rows,
    overlap_gradients,
    prefixed,
    projection_gradients,
    through,
    variance_notes,
)
from .response import AttentionSublayer, through_attention


@dataclass(frozen=True, kw_only=True)
class Attention(Component):
    """What self-attention and cross-attention share: keys come from the tokens or from elsewhere.

    Attributes:
        matrices: name of the value matrix.
        prefix: of its weights' names.
        heads, d_head: number and width of the heads.
        query, key, value: variances of the projections' entries.
        temperature: divides the logits.
        kv_heads: key and value heads, each shared by heads / kv_heads queries; None: heads.
        qk_norm: normalisation of each head's queries and keys: None, "rmsnorm" or "layernorm".
        norm_epsilon: added to the variance under the root of `qk_norm`.
        norm_affine: whether `qk_norm` has gains, shared by the heads, that receive gradients.
        logit_softcap: c of c tanh(logit / c); None: uncapped.
        query_bias, key_bias, value_bias: variances of the projections' biases.
        has_bias: which of query, key and value have a bias, be its variance 0, that receives a
            gradient; True: all.
        padding: for every sequence of the tokens attended to, the document of each, 0 where it
            pads; None: one of all. A token attends to its own document, and nobody to padding.
        sequences: number of equally long sequences that a token kernel holds one after the other.
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
        leaf: Any = self  # a dataclass, whichever it is
        return dataclasses.replace(leaf, value=self.value * factor)


@dataclass(frozen=True)
class SelfAttention(Attention, Leaf):
    """Query, key and value projections, softmax with dropout, heads concatenated.

    Attributes:
        d_model: width of the input.
        drop_prob: dropout on the attention weights.
        causal: whether a token attends to only itself and earlier ones.
        rotary: how positions turn queries and keys.
        alibi: multiplies the slopes that, times the distance, logits lose; 0: they lose nothing.
        relative_bias: random biases on the logits by relative position.
        window: a token attends to those less than this many positions away; None: all.
        sink: variance over heads of the logit of a key without a value; None: there is none.
    """

    label: str
    d_model: Any
    heads: Any
    d_head: Any
    query: Any
    key: Any
    value: Any
    drop_prob: Any
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
        """Width of the tokens attended to, which are those that ask."""
        return self.d_model

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        """Moments of the concatenated heads, and the map that carries a gradient back.

        Raises:
            DomainError: tokens alike under a mask or positions that distinguish them.
        """
        if not signal.resolved:
            self._check_alike(signal.seq_len)
        way = attended(self, signal, signal)
        return way.output, way

    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        """The same, keys and values being made of other tokens than those that ask."""
        if not signal.resolved:
            self._check_alike(signal.seq_len)
        way = attended(self, signal, memory)
        return way.output, way.to_both

    def key_masks(self, queries: int, keys: int, matrices: int) -> list[Mask]:
        """Which keys each query attends to, one mask for every kernel."""
        return self_masks(self, keys, matrices)

    # --- tokens alike --------------------------------------------------------------------------

    def _check_alike(self, length: int) -> None:
        """Raise where positions distinguish tokens."""
        if length == 1:
            return
        placed = {
            "causal": self.causal,
            "alibi": bool(self.alibi),
            "window": self.window is not None and self.window < length,
        }
        for name, present in placed.items():
            if present:
                allowed = "absent where all tokens are alike"
                remedy = "resolve moments by token: tokens=True"
                raise domain_error(name, getattr(self, name), allowed, remedy)

    def apart(self) -> Linear:
        sizes = {"fan_in": self.d_model, "fan_out": self._width, "weight_variance": self.value}
        return Linear(LINEAR, "refined", self.label, sizes, self._width, self.matrices[0])

    def unplaced(self) -> SelfAttention:
        free = dataclasses.replace(self, causal=False, window=None, padding=None, sequences=1)
        return dataclasses.replace(free, rotary=None, alibi=False, relative_bias=None)

    def response(self, record: Record, around: Around) -> Response:
        return AttentionSublayer.of(self, record.input, around.grad_out(record))

    @property
    def _width(self) -> Any:
        return self.heads * self.d_head


@dataclass(slots=True, eq=False)
class AttentionPullback:
    """The way back through attention.

    Attributes:
        leaf: a `SelfAttention` or `CrossAttention`.
        signal, memory: the tokens that ask and those attended to; one where they are the same.
        mixed: second moments per feature of sum_j a_ij y_j over those attended to.
        layer: what knows the paths.
        aligned: of what values do not share, the part along their own keys' tokens: overlaps that
            vary move that one alone.
    """

    leaf: Any
    law: LogitLaw
    signal: Signal
    memory: Signal
    output: Signal
    mixed: Kernel
    layer: Any
    aligned: Any = 1.0

    def __call__(self, gradient: Gradient) -> Pulled:
        """To tokens that attend to themselves."""
        query, key, sides = self._sent(gradient.kernel)
        return self._pulled(sides.value + sides.cross + key + query, gradient, sides)

    def to_both(self, gradient: Gradient) -> tuple[Pulled, Gradient]:
        """To the tokens that ask, and to those attended to."""
        query, key, sides = self._sent(gradient.kernel)
        rest = sides.value + sides.cross + key
        return self._pulled(query, gradient, sides), Gradient(rest, self.memory.seq_len)

    def _pulled(self, grad_in: Kernel, gradient: Gradient, sides: Any) -> AttentionPulled:
        grad_out = gradient.kernel
        return AttentionPulled(
            Gradient(grad_in, gradient.seq_len),
            functools.partial(self.weights, grad_out, sides),
            functools.partial(self.overlaps, grad_out),
            self.response,
            way=self,
            grad_out=grad_out,
            sides=sides,
        )

    def _sent(self, grad_out: Kernel) -> tuple[Kernel, Kernel, Paths[Kernel]]:
        """Through the queries, through the keys, and the paths."""
        sides: Paths[Kernel] = self.layer.backward(grad_out.scaled(self.gain))
        if np.any(self.aligned != 1.0):
            lost = self.layer.overlap_path(grad_out.scaled(self.gain))
            lost = lost.scaled((self.aligned - 1.0) / self.leaf.memory_width)
            sides = sides._replace(query=sides.query + lost)
        key = through(sides.key, self.law.keys, self.law.key_scale)
        return self._at_queries(sides.query), key, sides

    @property
    def gain(self) -> Any:
        """Of the values, on a gradient."""
        return self.leaf.value_width * self.leaf.value

    def _at_queries(self, path: Kernel) -> Kernel:
        """At the tokens that ask, of a path counted on the scale of those attended to."""
        result = through(path, self.law.queries, self.law.gradient_scale)
        if self.memory is self.signal:
            return result
        return result.scaled(self.leaf.memory_width / self.leaf.d_model)

    def overlap_path(self, grad_out: Kernel) -> Kernel:
        """What the query path gains per unit of the overlaps' variance."""
        result: Kernel = self.layer.overlap_path(grad_out.scaled(self.gain * self.aligned))
        return result

    def summed(self, query: Kernel) -> Kernel:
        """The query path for sums over tokens."""
        result: Kernel = self.layer.summed(query)
        return result

    def overlaps(self, grad_out: Kernel) -> dict[str, Array]:
        """As `Pulled.overlaps`."""
        path = self.overlap_path(grad_out)
        return prefixed(self.leaf, overlap_gradients(self.leaf, self.law, self.signal, path))

    def response(self) -> Kernel:
        """The query path of a gradient of ones."""
        result: Kernel = self.layer.response()
        return self._at_queries(result.scaled(self.gain))

    def weights(self, grad_out: Kernel, sides: Any) -> dict[str, Array]:
        """`projection_gradients` of the paths of a gradient, and that of a table of biases."""
        gained = grad_out.scaled(self.gain)
        norms = self._of_projections(grad_out, sides)
        table = self.layer.table_gradient(self.leaf, gained)
        if table is not None:
            norms |= {"relative_bias": table}
        kept, length = self.layer.rows, self.signal.seq_len
        if kept is None:
            return norms
        if "value.bias" in norms:
            share = ratio_or_zero((grad_out * kept).total(length), grad_out.total(length))
            norms["value.bias"] = norms["value.bias"] * share
        return norms | {"attention_sink": self.layer.sink_gradient(self.leaf, gained, length)}

    def _of_projections(self, grad_out: Kernel, sides: Any) -> dict[str, Array]:
        query = self.summed(sides.query)
        rows = of_rows(self.output, np.shape(self.mixed.diagonal) if self.mixed.resolved else ())
        tokens, path = (self.signal, self.memory, self.mixed), self.overlap_path(grad_out)
        paths = sides._replace(query=query)
        return projection_gradients(self.leaf, self.law, *tokens, grad_out, paths, path, rows)


@dataclass(slots=True, eq=False, kw_only=True)
class AttentionPulled(Pulled):
    """What attention sent back, the gradient received, and its paths."""

    way: AttentionPullback
    grad_out: Kernel
    sides: Any


def attended(
    leaf: Any, signal: Signal, memory: Signal, values: Signal | None = None, own: Any = 1.0
) -> AttentionPullback:
    """Attention of tokens to a memory, or to themselves: what leaves, and the way back.

    Args:
        leaf: a `SelfAttention` or `CrossAttention`.
        signal, memory: the tokens that ask and those attended to; one where they are the same.
        values: what values are made of; None: of those attended to.
        own: part of the values' kernel that is the tokens', over theirs.
    """
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


def _with_bias(leaf: Any, heads: Kernel, squares: Array, rows: Kernel | None) -> Kernel:
    """The heads with the values' bias: rows of attention sum to 1 (or have second moments `rows`),
    and dropped ones have second moment 1 + p/(1-p) sum a^2."""
    if not np.any(leaf.value_bias):
        return heads
    dropped = leaf.drop_prob / (1 - leaf.drop_prob)
    one, two = heads.lift(leaf.value_bias)
    of_one, of_two = (1.0, 1.0) if rows is None else (rows.diagonal, rows.off_diagonal)
    diagonal = heads.diagonal + one * (of_one + dropped * squares)
    return Kernel.joined(diagonal, heads.off_diagonal + two * of_two, heads.resolved)


def concatenated(
    leaf: Any, signal: Signal, memory: Signal, mixed: Kernel, layer: Any, notes: tuple[str, ...]
) -> Signal:
    """The concatenated heads of a `SelfAttention` or `CrossAttention`.

    Args:
        signal, memory: the tokens that ask, and those attended to.
        mixed: second moments per feature of sum_j a_ij y_j over the latter.
    """
    width, gain = leaf.value_width, leaf.memory_width * leaf.value
    kernel = _with_bias(leaf, mixed.scaled(gain), layer.sum_square, layer.rows)
    fluctuation: Fluctuation | None = None
    if signal.fluctuation is not None:
        # Given the averaged tokens, entries are Gaussian: 2/width of the squared moment. Heads
        # with one key and value in common overlap besides, by what their rows share.
        alone = (kernel * kernel).scaled(2 / width)
        together = 1 if leaf.kv_heads is None else leaf.heads / leaf.kv_heads
        if together > 1:
            common = layer.mean_output().scaled(gain).resolved_as(kernel)
            alone += (common * common).scaled(2 * (together - 1) / width)
        result = of_averages(memory, layer.weights(), gain)
        fluctuation = Fluctuation(alone)
        if result is not None and result.overlaps is not None:  # the averages' own vary too
            # Of another stack's tokens, those that ask are taken to know nothing; what the layers
            # before read of them, and thus have in common with this one, is left out.
            known = result.shared if memory is signal else (alone.scaled(0.0),) * 2
            norms, overlaps = (one.resolved_as(kernel) for one in (result.norms, result.overlaps))
            fluctuation = Fluctuation(alone + norms, alone + overlaps, shared=known)
    return Signal(
        kernel,
        signal.seq_len,
        0.0 * kernel.diagonal,
        width,
        fluctuation=fluctuation,
        diagnostics=layer.diagnostics(),
        notes=notes,
    )


# --- a memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CrossAttention(Attention, Reader):
    """Queries from the tokens at hand, keys and values from a memory, all of it.

    Attributes:
        d_model, memory_width: widths of the tokens and of the memory.
        drop_prob: dropout on the attention weights.
    """

    label: str
    d_model: Any
    heads: Any
    d_head: Any
    query: Any
    key: Any
    value: Any
    memory_width: Any
    drop_prob: Any = 0.0

    rotary: ClassVar[None] = None
    alibi: ClassVar[bool] = False
    relative_bias: ClassVar[None] = None
    matrices: ClassVar[tuple[str, ...]] = ("cross_value",)
    prefix: ClassVar[str] = "cross_"

    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        """Moments of the concatenated heads, and the map from their gradient to both inputs'.

        Raises:
            DomainError: one of the two is resolved by token and the other is not.
        """
        if (signal.resolved is True) != bool(memory.resolved):
            raise domain_error(
                "memory", memory.resolved, "resolved by token exactly where the queries are"
            )
        way = attended(self, signal, memory)
        return way.output, way.to_both

    @property
    def reads(self) -> CrossAttention:
        return self

    def unplaced(self) -> CrossAttention:
        return dataclasses.replace(self, padding=None, sequences=1)

    def key_masks(self, queries: int, keys: int, matrices: int) -> list[Mask]:
        """A (queries, keys) mask for every kernel: a token's own sequence, its real tokens."""
        mask = same_sequence(queries, keys, self.sequences)
        if self.padding is None:
            return [mask] * matrices
        real = np.asarray(self.padding, dtype=bool)
        if self.sequences > 1:
            real = real.reshape(1, -1)
        seen = [np.where((mask & row).any(1, keepdims=True), mask & row, mask) for row in real]
        return seen if len(seen) == matrices else seen * matrices


# --- normalised values ----------------------------------------------------------------------------

LEAST_FREEDOM = 4.0
"""Degrees of freedom of a head's norm which stand for fewer: E 1/|v|^2 is 1/(n - 2) and
has no mean at 2, where the ratio (n - 1)/(n - 2) of the way back is without meaning."""


@dataclass(frozen=True)
class NormalizedAttention(Leaf):
    """Self-attention on q/|q|, k/|k| and v/|v|.

    What is normalised has no scale, so the tokens' own may be taken off first, where their width
    makes it exact, and the values' weights then are 1/d_model. What normalising values does to a
    gradient besides is applied to all of it, an error of order 1/d_head in the query and key paths;
    correlations of values are those of infinitely wide heads.

    Attributes:
        attention: with `qk_norm`; its `value` is the variance of the unnormalised projection.
    """

    attention: SelfAttention

    mixes_tokens: ClassVar[bool] = True
    normalises: ClassVar[bool] = True

    @property
    def label(self) -> str:  # type: ignore[override]
        return self.attention.label

    @property
    def padding(self) -> Padding | None:
        return self.attention.padding

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        attention = self.attention
        if not np.all(np.add(attention.value, attention.value_bias) > 0):
            allowed = "above 0 where values are normalised"
            raise domain_error("value", attention.value, allowed, "zeros have no direction")
        output, back = self.attend(signal, signal)
        return output, functools.partial(_to_one, back)

    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        """The same, keys and values being made of other tokens than those that ask."""
        attention, size = self.attention, mean_size(memory)
        unit, plain = self.values_normalised(memory)
        inner, norm = unit.forward(memory)
        asking, query_norm = (inner, norm) if memory is signal else unit.forward(signal)
        gain = attention.d_model * attention.value + attention.value_bias / size
        output, back = plain.attend(asking, inner)
        freedom = _freedom(float(attention.d_head), attention.qk_norm == "layernorm")
        factor, share = expected_pull(freedom, 1.0), plain.value_bias
        both = expected_pull(freedom, inner.correlation() * (1 - share) + share)
        factors = (factor, both), factor / gain, size
        return output, functools.partial(self._back, back, (query_norm, norm), factors)

    def _back(
        self,
        attention: ReaderPullback,
        norms: tuple[Pullback, Pullback],
        factors: tuple[tuple[Any, Any], Any, float],
        gradient: Gradient,
    ) -> tuple[Pulled, Gradient]:
        """The way back: through attention, and through the normalisation of either's tokens.

        Args:
            factors: what normalising values does to a token's gradient, and to that of two; to that
                of the values' matrix; the tokens' size.
        """
        of_tokens, of_values, size = factors
        inner, to_memory = attention(gradient)
        query, rest = (
            norm(Gradient(one.kernel.weighted(*of_tokens), gradient.seq_len)).gradient
            for norm, one in zip(norms, (inner.gradient, to_memory), strict=True)
        )
        pulled = Pulled(
            query,
            functools.partial(_rescaled, inner, of_values, size),
            inner.overlaps,
            functools.partial(_normed, inner, norms[0]),
        )
        return pulled, rest

    def unshared_overlap(
        self, record: Record, at: UnsharedOverlap, walk: OverlapWalk
    ) -> UnsharedOverlap:
        # norms are no overlaps of their own
        return through_attention(self.attention, record, at, walk, fixed=True)

    def values_normalised(self, signal: Signal) -> tuple[FiniteNormalization, SelfAttention]:
        """Tokens of unit norm and attention with values of unit variance, which it amounts to.

        Biases are to unit tokens what they are to these, over their size. A value's is part of what
        its norm divides by, in the share that it has on average (over configurations too).
        """
        attention = self.attention
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
        leaf = self.attention
        unit = FiniteNormalization(RMSNORM, leaf.label, leaf.norm_epsilon, centres=False)
        return Chain((unit, dataclasses.replace(leaf, value=1 / leaf.d_model).apart()))

    def unplaced(self) -> NormalizedAttention:
        return NormalizedAttention(self.attention.unplaced())

    def response(self, record: Record, around: Around) -> Response:
        # What the values' norms do is of order 1/d_head. The gradient between the two is that of
        # the fast maps.
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


def _to_one(back: ReaderPullback, gradient: Gradient) -> Pulled:
    """To tokens that attend to themselves."""
    pulled, to_memory = back(gradient)
    total = pulled.gradient.kernel + to_memory.kernel
    return dataclasses.replace(pulled, gradient=gradient.with_kernel(total))


def _rescaled(inner: Pulled, values: Any, size: float) -> Mapping[str, Array]:
    """What attention alone said of weights, to those of unnormalised values and tokens."""
    result = dict(inner.weights())
    for name in {"value", "value.bias"} & result.keys():
        result[name] = result[name] * values
    return {n: norm / size if n.endswith(".bias") else norm for n, norm in result.items()}


def _normed(inner: Pulled, norm: Pullback) -> Kernel | None:
    result = inner.response()
    return None if result is None else norm(inner.gradient.with_kernel(result)).gradient.kernel


def mean_size(signal: Signal) -> float:
    """Of the tokens of all configurations, on average; 1 where they are nothing."""
    return float(np.mean(signal.second_moment().mean_diagonal())) or 1.0


def _freedom(d_head: float, centred: bool) -> float:
    """Of a Gaussian head's squared norm."""
    return max(d_head - 1 if centred else d_head, LEAST_FREEDOM)
