"""Self-attention with all its gradient paths, for tokens alike or resolved by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...engine.composition import Leaf, Pullback, Pulled
from ...engine.fluctuation import of_averages
from ...engine.own_overlap import OverlapWalk, OwnOverlap
from ...engine.packing import Padding
from ...engine.response import Around
from ...engine.sensitivity import Response
from ...engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ...engine.trace import Record
from ...errors import domain_error
from ...model.positions import RelativeBias, Rotary
from .alike import AlikeAttention, averaged
from .by_token import (
    BEYOND_TABLES,
    PENALTIES_ON_CLASSES,
    attention_diagnostics,
    logit_scales,
    mean_spread,
    self_attention,
    variance_notes,
)
from .laws import attend_by_laws
from .logits import LogitLaw, Side, logit_law, positive, through
from .overlap import through_attention
from .sensitivity import Attending
from .statistics import AttentionStatistics
from .weight_gradients import Paths, of_rows, overlap_gradients, projection_gradients


@dataclass(frozen=True)
class SelfAttention(Leaf):
    """Query, key and value projections, softmax with dropout, heads concatenated.

    Attributes:
        d_model: width of the input.
        heads, d_head: number and width of the heads.
        query, key, value: variances of the projections' entries.
        drop_prob: dropout on the attention weights.
        temperature: divides the logits.
        causal: whether a token sees only itself and earlier ones.
        padding: for every sequence, the document of each token, 0 where it pads; None: one of all.
            A token attends to its own document, and nobody to padding.
        kv_heads: key and value heads, each shared by heads / kv_heads queries; None: heads.
        rotary: how positions turn queries and keys.
        alibi: multiplies the slopes that, times the distance, logits lose; 0: they lose nothing.
        relative_bias: random biases on the logits by relative position.
        qk_norm: normalisation of each head's queries and keys: None, "rmsnorm" or "layernorm".
        logit_softcap: c of c tanh(logit / c); None: uncapped.
        window: a token sees those less than this many positions away; None: all.
        query_bias, key_bias, value_bias: variances of the projections' biases.
        has_bias: which of query, key and value have a bias, be its variance 0, that receives a
            gradient; True: all.
        sequences: number of equally long sequences that the token kernel holds one after the other.
        norm_epsilon: added to the variance under the root of `qk_norm`.
        norm_affine: whether `qk_norm` has gains, shared by the heads, that receive gradients.
    """

    label: str
    d_model: Any
    heads: Any
    d_head: Any
    query: Any
    key: Any
    value: Any
    drop_prob: Any
    temperature: Any = 1.0
    causal: bool = False
    padding: Padding | None = None
    kv_heads: Any = None
    rotary: Rotary | None = None
    alibi: bool | float = False
    relative_bias: RelativeBias | None = None
    qk_norm: str | None = None
    logit_softcap: float | None = None
    window: int | None = None
    query_bias: float = 0.0
    key_bias: float = 0.0
    value_bias: float = 0.0
    has_bias: bool | tuple[str, ...] = ()
    sequences: int = 1
    norm_epsilon: float = 0.0
    norm_affine: bool = False

    mixes_tokens: ClassVar[bool] = True
    matrices: ClassVar[tuple[str, ...]] = ("value",)
    prefix: ClassVar[str] = ""

    @property
    def memory_width(self) -> Any:
        """Width of the tokens attended to, which are those that ask."""
        return self.d_model

    def forward(self, signal: Signal) -> tuple[Signal, Pullback]:
        """Moments of the concatenated heads, and the map that carries a gradient back.

        Raises:
            DomainError: tokens alike under a mask or positions that tell them apart.
        """
        if signal.resolved:
            return self._resolved(signal)
        self._check_alike(signal.seq_len)
        if self._by_distance and signal.seq_len > 1:
            return self._resolved(signal)
        plain = self.qk_norm is None and self.logit_softcap is None
        if plain and not np.any(self.query_bias):
            return self._alike_by_laws(signal)
        return self._alike(signal)

    def _resolved(self, signal: Signal) -> tuple[Signal, Pullback]:
        tokens = signal.second_moment()
        law = logit_law(self, tokens, tokens, (self.d_model, self.d_model))
        layer = self_attention(
            self, law, tokens, mean_spread(signal), signal.seq_len, signal.repeats
        )
        mixed, squares = layer.forward(), layer.sum_square
        notes = variance_notes(layer.wanted) + law.notes
        if not notes and layer.beyond_tables:
            notes = (BEYOND_TABLES,)
        if layer.coarse:
            notes += (PENALTIES_ON_CLASSES,)
        output = concatenated(
            self,
            signal,
            signal,
            mixed,
            squares,
            layer.mean_output,
            layer.weights,
            diagnostics=layer.diagnostics(),
            notes=notes,
        )
        return output, _Resolved(self, law, signal, output, mixed, layer)

    # --- tokens alike --------------------------------------------------------------------------

    def _check_alike(self, length: int) -> None:
        """Raise where positions tell tokens apart."""
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

    @property
    def _by_distance(self) -> bool:
        """Whether logits know how far apart tokens are."""
        table = self.relative_bias
        return self.rotary is not None or (table is not None and table.variance > 0.0)

    def _alike_by_laws(self, signal: Signal) -> tuple[Signal, Pullback]:
        found, mixed, back = attend_by_laws(self, signal)
        assert found.diagnostics is not None
        squares = found.diagnostics["square_sum"]
        # As in a narrow layer, where two heads of one key agree up to what their rows share.
        tokens = signal.second_moment()
        output = concatenated(
            self,
            signal,
            signal,
            mixed,
            squares,
            lambda: averaged(tokens, signal.seq_len),
            heads=found.kernel,
            diagnostics=found.diagnostics,
            notes=found.notes,
        )
        law = logit_law(self, tokens, tokens, (self.d_model, self.d_model))
        return output, _ByLaws(self, law, signal, output, mixed, back)

    def _alike(self, signal: Signal) -> tuple[Signal, Pullback]:
        tokens, length = signal.second_moment(), signal.seq_len
        law = logit_law(self, tokens, tokens, (self.d_model, self.d_model))
        scale, wanted = logit_scales(law)
        layer = AlikeAttention(
            law.queries.kernel,
            law.keys.kernel,
            tokens,
            query_count=length,
            key_count=length,
            scale=scale,
            drop_prob=self.drop_prob,
            d_model=self.d_model,
            d_head=law.head_freedom,
            norm_spread=mean_spread(signal),
            value_bias=self.value_bias / positive(self.d_model * self.value),
        )
        mixed, squares = layer.forward, layer.sum_square
        output = concatenated(
            self,
            signal,
            signal,
            mixed,
            squares,
            lambda: layer.mean_output,
            diagnostics=attention_diagnostics(
                layer.logit_variance, squares, layer.entropy, float(length)
            ),
            notes=variance_notes(wanted) + law.notes,
        )
        return output, _Alike(self, law, signal, output, mixed, layer)

    def own_overlap(self, record: Record, at: OwnOverlap, walk: OverlapWalk) -> OwnOverlap:
        return through_attention(self, record, at, walk)

    def with_variances(self, names: tuple[str, ...], factor: float) -> SelfAttention:
        if self.matrices[0] not in names:
            return self
        return dataclasses.replace(self, value=self.value * factor)

    def two_sequences(self, signal: Signal, memory: Kernel | None) -> Signal:
        # Weights sum to 1 within each sequence, and all pairs across have one covariance.
        return Signal(signal.kernel.scaled(self.d_model * self.value), 2, width=self._width)

    def unplaced(self) -> SelfAttention:
        return dataclasses.replace(
            self,
            causal=False,
            window=None,
            rotary=None,
            alibi=False,
            relative_bias=None,
            padding=None,
            sequences=1,
        )

    def response(self, record: Record, around: Around) -> Response:
        return Attending.of(self, record.input, around.received(record))

    @property
    def _width(self) -> Any:
        return self.heads * self.d_head


@dataclass(slots=True, eq=False)
class AttentionPullback:
    """The way back through attention.

    Attributes:
        leaf: a `SelfAttention` or `CrossAttention`.
        law: of its logits.
        signal, output: the tokens that ask, and what left.
        mixed: second moments per feature of sum_j a_ij y_j over those attended to.
        layer: what knows the paths.
    """

    leaf: Any
    law: LogitLaw
    signal: Signal
    output: Signal
    mixed: Kernel
    layer: Any

    @property
    def attended(self) -> Signal:
        """The tokens attended to."""
        return self.signal

    @property
    def gain(self) -> Any:
        """Of the values, on a gradient."""
        return self.leaf.heads * self.leaf.d_head * self.leaf.value

    def overlap_path(self, received: Kernel, sides: Any) -> Kernel:
        """What the query path gains per unit of the overlaps' variance."""
        found: Kernel = sides.overlap_path
        return found

    def response(self, received: Kernel) -> Kernel:
        """The query path of a gradient of ones, before what stands between tokens and logits."""
        raise NotImplementedError

    def weights(self, received: Kernel, sides: Any) -> dict[str, Array]:
        """`projection_gradients` of the paths of a gradient."""
        overlap = self.overlap_path(received, sides)
        paths = Paths(sides.query, sides.key, overlap, self.repeated(received))
        rows = of_rows(self.output, np.shape(self.mixed.diagonal) if self.mixed.resolved else ())
        return projection_gradients(
            self.leaf, self.law, self.signal, self.attended, self.mixed, received, paths, rows
        )

    def repeated(self, received: Kernel) -> Kernel | None:
        """As in `weight_gradients.Paths`."""
        return None

    def at_logits(self, path: Kernel, side: Side) -> Kernel:
        """A path's kernel at the tokens behind queries or keys."""
        return through(path, side, self.law.gradient_scale)


@dataclass(slots=True, eq=False)
class AttentionPulled(Pulled):
    """What attention sent back, the gradient received, and its paths."""

    way: AttentionPullback
    received: Kernel
    sides: Any

    def weights(self) -> dict[str, Array]:
        return self.way.weights(self.received, self.sides)

    def overlaps(self) -> dict[str, Array]:
        way = self.way
        overlap_path = way.overlap_path(self.received, self.sides)
        return overlap_gradients(way.leaf, way.law, way.signal, overlap_path)

    def response(self) -> Kernel:
        return self.way.at_logits(self.way.response(self.received), self.way.law.queries)


@dataclass(slots=True, eq=False)
class _Resolved(AttentionPullback):
    """By token, or by class."""

    def __call__(self, gradient: Gradient) -> Pulled:
        received = gradient.kernel
        sides = self.layer.backward(received.scaled(self.gain))
        sent = sides.value + sides.cross
        sent = sent + self.at_logits(sides.query, self.law.queries)
        sent = sent + self.at_logits(sides.key, self.law.keys)
        return AttentionPulled(Gradient(sent, gradient.seq_len), self, received, sides)

    def overlap_path(self, received: Kernel, sides: Any) -> Kernel:
        found: Kernel = self.layer.overlap_path(received.scaled(self.gain))
        return found

    def repeated(self, received: Kernel) -> Kernel | None:
        if self.signal.repeats is None:
            return None
        found: Kernel | None = self.layer.repeated(received.scaled(self.gain))
        return found

    def response(self, received: Kernel) -> Kernel:
        found: Kernel = self.layer.response()
        return found.scaled(self.gain)

    def weights(self, received: Kernel, sides: Any) -> dict[str, Array]:
        norms = super(_Resolved, self).weights(received, sides)
        table = self.layer.table_gradient(received.scaled(self.gain))
        return norms if table is None else norms | {"relative_bias": table}


@dataclass(slots=True, eq=False)
class _ByLaws(AttentionPullback):
    """Of tokens alike, by the laws."""

    def __call__(self, gradient: Gradient) -> Pulled:
        sides = self.layer(gradient.kernel, self.signal.algebra)
        sent = Gradient(sides.sent, gradient.seq_len)
        return AttentionPulled(sent, self, gradient.kernel, sides)

    def overlap_path(self, received: Kernel, sides: Any) -> Kernel:
        found: Kernel = self.layer.overlap_path(received)
        return found

    def response(self, received: Kernel) -> Kernel:
        found: Kernel = self.layer(received.with_ones(), self.signal.algebra).query
        return found


@dataclass(slots=True, eq=False)
class _Alike(AttentionPullback):
    """Of tokens alike, of queries and keys that correlate otherwise."""

    def __call__(self, gradient: Gradient) -> Pulled:
        received = gradient.kernel
        sides = self.layer.backward(received.scaled(self.gain))
        query = self.at_logits(sides.query, self.law.queries)
        key = self.at_logits(sides.key, self.law.keys)
        sent = Gradient(sides.value + sides.cross + query + key, gradient.seq_len)
        return AttentionPulled(sent, self, received, sides)

    def response(self, received: Kernel) -> Kernel:
        found: Kernel = self.layer.backward(received.with_ones().scaled(self.gain)).query
        return found


def _with_bias(leaf: Any, heads: Kernel, squares: Array) -> Kernel:
    """The heads with the values' bias: rows of attention sum to 1, and dropped ones have
    second moment 1 + p/(1-p) sum a^2."""
    if not np.any(leaf.value_bias):
        return heads
    dropped = leaf.drop_prob / (1 - leaf.drop_prob)
    one, two = heads.lift(leaf.value_bias)
    diagonal = heads.diagonal + one * (1 + dropped * squares)
    return Kernel.joined(diagonal, heads.pairs + two, heads.resolved)


def concatenated(
    leaf: Any,
    signal: Signal,
    memory: Signal,
    mixed: Kernel,
    squares: Array,
    shared: Callable[[], Kernel],
    weights: Callable[[], Array] | None = None,
    heads: Kernel | None = None,
    diagnostics: Mapping[str, Array] | None = None,
    notes: tuple[str, ...] = (),
) -> Signal:
    """The concatenated heads of a `SelfAttention` or `CrossAttention`.

    Args:
        leaf: the attention.
        signal, memory: the tokens that ask, and those attended to.
        mixed: second moments per feature of sum_j a_ij y_j over the latter.
        squares: E sum_j a_ij^2.
        shared: gives the overlap of what two heads of one key and value mix.
        weights: gives mean attention; None: uniform, tokens alike.
        heads: second moments without the values' bias where they are known; None: `mixed` times
            the values' gain.
        diagnostics, notes: of the signal.
    """
    width, gain = leaf.heads * leaf.d_head, leaf.memory_width * leaf.value
    kernel = _with_bias(leaf, mixed.scaled(gain), squares)
    own = kernel if heads is None else _with_bias(leaf, heads, squares)
    mean = 0.0 * kernel.diagonal
    fluctuation: Fluctuation | None = None
    if signal.fluctuation is not None:
        # Given the averaged tokens, entries are Gaussian: 2/width of the squared moment. Heads
        # with one key and value in common overlap besides, by what their rows share.
        alone = (kernel * kernel).scaled(2 / width)
        together = 1 if leaf.kv_heads is None else leaf.heads / leaf.kv_heads
        if together > 1:
            common = shared().scaled(gain).resolved_as(kernel)
            alone += (common * common).scaled(2 * (together - 1) / width)
        row = None if weights is None else weights()
        found = of_averages(memory, row, gain)
        fluctuation = Fluctuation(alone)
        if found is not None and found.overlaps is not None:  # the averages' own vary too
            # Of another stack's tokens, those that ask are taken to know nothing; what the layers
            # before read of them, and thus have in common with this one, is left out.
            known = found.shared if memory is signal else (alone.scaled(0.0),) * 2
            norms, overlaps = (one.resolved_as(kernel) for one in (found.norms, found.overlaps))
            fluctuation = Fluctuation(alone + norms, alone + overlaps, shared=known)
    return Signal(
        own,
        signal.seq_len,
        mean=mean,
        width=width,
        fluctuation=fluctuation,
        diagnostics=diagnostics,
        notes=notes,
    )


__all__ = ["AttentionStatistics", "SelfAttention"]
