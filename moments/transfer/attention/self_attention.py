"""Self-attention with all its gradient paths, for tokens alike or resolved by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...engine.composition import Component, Leaf, Pullback, Pulled
from ...engine.fluctuation import of_averages
from ...engine.own_overlap import OverlapWalk, OwnOverlap
from ...engine.packing import Padding
from ...engine.response import Around
from ...engine.sensitivity import Response
from ...engine.state import Array, Fluctuation, Gradient, Kernel, Signal
from ...engine.trace import Record
from ...errors import domain_error
from ...model.positions import RelativeBias, Rotary
from .alike import averaged
from .by_token import (
    BEYOND_TABLES,
    PENALTIES_ON_CLASSES,
    Mask,
    by_distance,
    layer_of,
    self_masks,
    variance_notes,
)
from .laws import attend_by_laws
from .logits import LogitLaw, Paths, logit_law, through
from .overlap import through_attention
from .sensitivity import Attending
from .statistics import AttentionStatistics
from .weight_gradients import ProjectionPaths, of_rows, overlap_gradients, projection_gradients


class Attention(Component):
    """What self-attention and cross-attention share: keys come from the tokens or from elsewhere.

    Attributes:
        matrices: name of the value matrix.
        prefix: of its weights' names.
    """

    matrices: ClassVar[tuple[str, ...]]
    prefix: ClassVar[str]
    mixes_tokens: ClassVar[bool] = True

    value: Any

    def own_overlap(self, record: Record, at: OwnOverlap, walk: OverlapWalk) -> OwnOverlap:
        return through_attention(self, record, at, walk)

    def with_variances(self, names: tuple[str, ...], factor: float) -> Any:
        if self.matrices[0] not in names:
            return self
        return dataclasses.replace(self, value=self.value * factor)  # type: ignore[type-var]


@dataclass(frozen=True)
class SelfAttention(Attention, Leaf):
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
        if not signal.resolved:
            self._check_alike(signal.seq_len)
            placed = by_distance(self) and signal.seq_len > 1
            plain = self.qk_norm is None and self.logit_softcap is None
            if plain and not placed and not np.any(self.query_bias):
                return self._by_laws(signal)
        way = attended(self, signal, signal)
        return way.output, way

    def sight(self, queries: int, keys: int, matrices: int) -> list[Mask]:
        """Which keys each query sees, one mask for every kernel."""
        return self_masks(self, keys, matrices)

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

    def _by_laws(self, signal: Signal) -> tuple[Signal, Pullback]:
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
        return output, _ByLaws(self, law, signal, signal, output, mixed, back)

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
        signal, memory: the tokens that ask and those attended to; one where they are the same.
        output: what left.
        mixed: second moments per feature of sum_j a_ij y_j over those attended to.
        layer: what knows the paths.
    """

    leaf: Any
    law: LogitLaw
    signal: Signal
    memory: Signal
    output: Signal
    mixed: Kernel
    layer: Any

    def __call__(self, gradient: Gradient) -> Pulled:
        """To tokens that attend to themselves."""
        query, rest, sides = self._sent(gradient.kernel)
        return self._pulled(rest + query, gradient, sides)

    def to_both(self, gradient: Gradient) -> tuple[Pulled, Gradient]:
        """To the tokens that ask, and to those attended to."""
        query, rest, sides = self._sent(gradient.kernel)
        return self._pulled(query, gradient, sides), Gradient(rest, self.memory.seq_len)

    def _pulled(self, sent: Kernel, gradient: Gradient, sides: Any) -> AttentionPulled:
        return AttentionPulled(Gradient(sent, gradient.seq_len), self, gradient.kernel, sides)

    def _sent(self, received: Kernel) -> tuple[Kernel, Kernel, Paths]:
        """Through the queries, through keys and values, and the paths."""
        sides: Paths = self.layer.backward(received.scaled(self.gain))
        key = through(sides.key, self.law.keys, self.law.gradient_scale)
        return self._at_queries(sides.query), sides.value + sides.cross + key, sides

    @property
    def gain(self) -> Any:
        """Of the values, on a gradient."""
        return self.leaf.heads * self.leaf.d_head * self.leaf.value

    def _at_queries(self, path: Kernel) -> Kernel:
        """At the tokens that ask, of a path counted on the scale of those attended to."""
        found = through(path, self.law.queries, self.law.gradient_scale)
        if self.memory is self.signal:
            return found
        return found.scaled(self.leaf.memory_width / self.leaf.d_model)

    def overlap_path(self, received: Kernel) -> Kernel:
        """What the query path gains per unit of the overlaps' variance."""
        found: Kernel = self.layer.overlap_path(received.scaled(self.gain))
        return found

    def response(self, received: Kernel) -> Kernel:
        """The query path of a gradient of ones."""
        found: Kernel = self.layer.response()
        return self._at_queries(found.scaled(self.gain))

    def weights(self, received: Kernel, sides: Any) -> dict[str, Array]:
        """`projection_gradients` of the paths of a gradient, and that of a table of biases."""
        gained = received.scaled(self.gain)
        repeated = None if self.memory.repeats is None else self.layer.repeated(gained)
        norms = self._of_projections(received, sides, repeated)
        table = self.layer.table_gradient(gained)
        return norms if table is None else norms | {"relative_bias": table}

    def _of_projections(
        self, received: Kernel, sides: Any, repeated: Kernel | None
    ) -> dict[str, Array]:
        paths = ProjectionPaths(sides.query, sides.key, self.overlap_path(received), repeated)
        rows = of_rows(self.output, np.shape(self.mixed.diagonal) if self.mixed.resolved else ())
        return projection_gradients(
            self.leaf, self.law, self.signal, self.memory, self.mixed, received, paths, rows
        )


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
        return overlap_gradients(way.leaf, way.law, way.signal, way.overlap_path(self.received))

    def response(self) -> Kernel:
        return self.way.response(self.received)


@dataclass(slots=True, eq=False)
class _ByLaws(AttentionPullback):
    """Of tokens alike, by the laws."""

    def __call__(self, gradient: Gradient) -> Pulled:
        sides = self.layer(gradient.kernel, self.signal.algebra)
        return self._pulled(sides.sent, gradient, sides)

    def overlap_path(self, received: Kernel) -> Kernel:
        found: Kernel = self.layer.overlap_path(received)
        return found

    def response(self, received: Kernel) -> Kernel:
        found: Kernel = self.layer(received.with_ones(), self.signal.algebra).query
        return found

    def weights(self, received: Kernel, sides: Any) -> dict[str, Array]:
        return self._of_projections(received, sides, None)


def attended(leaf: Any, signal: Signal, memory: Signal) -> AttentionPullback:
    """Attention of tokens to a memory, or to themselves: what leaves, and the way back.

    Args:
        leaf: a `SelfAttention` or `CrossAttention`.
        signal, memory: the tokens that ask and those attended to; one where they are the same.
    """
    queries = signal.second_moment()
    tokens = queries if memory is signal else memory.second_moment()
    law = logit_law(leaf, queries, tokens, (leaf.d_model, leaf.memory_width))
    layer = layer_of(leaf, law, signal, memory, (queries, tokens))
    mixed, notes = layer.forward(), variance_notes(layer.wanted)
    if not notes and layer.beyond_tables:
        notes = (BEYOND_TABLES,)
    notes += law.notes
    if layer.coarse:
        notes += (PENALTIES_ON_CLASSES,)
    output = concatenated(
        leaf,
        signal,
        memory,
        mixed,
        layer.sum_square,
        layer.mean_output,
        layer.weights,
        diagnostics=layer.diagnostics(),
        notes=notes,
    )
    return AttentionPullback(leaf, law, signal, memory, output, mixed, layer)


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
    weights: Callable[[], Any] = lambda: None,
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
        weights: gives mean attention, None where it is uniform, tokens alike.
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
        found = of_averages(memory, weights(), gain)
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
