"""Attention of one stream of tokens to another: a decoder's to its encoder's output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...engine.composition import Pulled, Reader, ReaderPullback
from ...engine.own_overlap import OverlapWalk, OwnOverlap
from ...engine.packing import Padding
from ...engine.state import Array, Gradient, Kernel, Signal
from ...engine.trace import Record
from ...errors import domain_error
from .alike import AlikeAttention
from .by_token import (
    BEYOND_TABLES,
    Mask,
    attention_diagnostics,
    build,
    flat,
    logit_scales,
    mean_spread,
    same_sequence,
    variance_notes,
)
from .logits import LogitLaw, logit_law, positive
from .overlap import through_attention
from .self_attention import AttentionPullback, AttentionPulled, concatenated


@dataclass(frozen=True)
class CrossAttention(Reader):
    """Queries from the tokens at hand, keys and values from a memory; every query sees every key.

    Attributes:
        d_model, memory_width: widths of the tokens and of the memory.
        heads, d_head: number and width of the heads.
        query, key, value: variances of the projections' entries.
        drop_prob: dropout on the attention weights.
        temperature: divides the logits.
        kv_heads, qk_norm, logit_softcap, norm_epsilon, norm_affine, has_bias: as in
            `SelfAttention`.
        query_bias, key_bias, value_bias: variances of the projections' biases.
        padding: for every sequence of the memory, which of its tokens are real; None: all.
        sequences: number of equally long sequences that each token kernel holds one after the
            other.
    """

    label: str
    d_model: Any
    memory_width: Any
    heads: Any
    d_head: Any
    query: Any
    key: Any
    value: Any
    drop_prob: Any = 0.0
    temperature: Any = 1.0
    kv_heads: Any = None
    qk_norm: str | None = None
    logit_softcap: float | None = None
    norm_epsilon: float = 0.0
    norm_affine: bool = False
    query_bias: float = 0.0
    key_bias: float = 0.0
    value_bias: float = 0.0
    has_bias: bool | tuple[str, ...] = ()
    padding: Padding | None = None
    sequences: int = 1

    rotary: ClassVar[None] = None
    alibi: ClassVar[bool] = False
    relative_bias: ClassVar[None] = None
    mixes_tokens: ClassVar[bool] = True
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
        query_tokens, key_tokens = signal.second_moment(), memory.second_moment()
        law = logit_law(self, query_tokens, key_tokens, (self.d_model, self.memory_width))
        make = self._by_token if memory.resolved else self._alike
        seen = make(signal, memory, law)
        mixed, *_ = seen.heads
        output = concatenated(
            self,
            signal,
            memory,
            *seen.heads,
            diagnostics=seen.diagnostics,
            notes=seen.notes + law.notes,
        )
        return output, _Pullback(self, law, signal, output, mixed, seen.layer, memory)

    def own_overlap(self, record: Record, at: OwnOverlap, walk: OverlapWalk) -> OwnOverlap:
        return through_attention(self, record, at, walk)

    def with_variances(self, names: tuple[str, ...], factor: float) -> CrossAttention:
        if self.matrices[0] not in names:
            return self
        return dataclasses.replace(self, value=self.value * factor)

    def two_sequences(self, signal: Signal, memory: Kernel | None) -> Signal:
        one = 1.0 + 0.0 * signal.kernel.pairs
        if memory is None:
            memory = Kernel(signal.kernel.diagonal, 0.0 * one)
        kernel = memory.scaled(self.memory_width * self.value)
        width = self.heads * self.d_head
        return Signal(Kernel(kernel.diagonal * one, kernel.pairs * one), 2, width=width)

    @property
    def reads(self) -> CrossAttention:
        return self

    def unplaced(self) -> CrossAttention:
        return dataclasses.replace(self, padding=None, sequences=1)

    def back_kappa(self, memory_len: int) -> Array:
        """d_model times the relative variance of what queries of a memory send back, squared.

        Behind W_q, 2 over d_model, stand in each head W_k and what the output projection sent, 2
        over d_head each, and M W_v g, M the kernel over features of the memory's tokens around
        their mean, all but of rank r = memory_len - 1: 2/r + 2/memory_width.
        """
        rank = 1 / max(memory_len - 1, 1) + 1 / self.memory_width
        by_head = 2 * (2 / self.d_head + rank) / self.heads
        return 2.0 + self.d_model * by_head

    def _masks(self, queries: int, keys: int, matrices: int) -> list[Mask]:
        """A (queries, keys) mask for every kernel: a token's own sequence, its real tokens."""
        mask = same_sequence(queries, keys, self.sequences)
        if self.padding is None:
            return [mask] * matrices
        real = np.asarray(self.padding, dtype=bool)
        if self.sequences > 1:
            real = real.reshape(1, -1)
        seen = [np.where((mask & row).any(1, keepdims=True), mask & row, mask) for row in real]
        return seen if len(seen) == matrices else seen * matrices

    def _by_token(self, signal: Signal, memory: Signal, law: LogitLaw) -> _Attended:
        key_tokens = memory.second_moment()
        shape, memory_shape = signal.kernel.pairs.shape, key_tokens.pairs.shape
        count = int(np.prod(shape[:-2], dtype=int))
        masks = self._masks(shape[-1], memory_shape[-1], count)
        rows, wanted = build(self, law, key_tokens, masks, mean_spread(memory), True)
        layer = _TokenRows(rows, shape, memory_shape)
        diagnostics = attention_diagnostics(
            np.stack([one.logit_variance for one in rows]),
            layer.squares,
            np.stack([one.entropy for one in rows]),
            np.stack([mask.sum(-1) for mask in masks]).astype(float),
        )
        notes = variance_notes(wanted)
        if not notes and any(np.any(one.beyond_tables) for one in rows):
            notes = (BEYOND_TABLES,)
        squares = layer.squares.reshape(shape[:-1])
        heads = (layer.forward(), squares, layer.mean_output, layer.weights)
        return _Attended(heads, diagnostics, notes, layer)

    def _alike(self, signal: Signal, memory: Signal, law: LogitLaw) -> _Attended:
        key_tokens = memory.second_moment()
        scale, wanted = logit_scales(law)
        layer = AlikeAttention(
            law.queries.kernel,
            law.keys.kernel,
            key_tokens,
            query_count=signal.seq_len,
            key_count=memory.seq_len,
            scale=scale,
            drop_prob=self.drop_prob,
            d_model=self.memory_width,
            d_head=law.head_freedom,
            norm_spread=mean_spread(memory),
            value_bias=self.value_bias / positive(self.memory_width * self.value),
        )
        diagnostics = attention_diagnostics(
            layer.logit_variance, layer.sum_square, layer.entropy, float(memory.seq_len)
        )
        heads = (layer.forward, layer.sum_square, lambda: layer.mean_output, None)
        return _Attended(
            heads, diagnostics, variance_notes(wanted), _AlikeRows(layer, signal.kernel)
        )


class _Attended(NamedTuple):
    """What a way of attending knows: the last four arguments of `concatenated`, diagnostics, notes,
    and the paths of a gradient."""

    heads: tuple[Kernel, Array, Callable[[], Kernel], Callable[[], Array] | None]
    diagnostics: dict[str, Array]
    notes: tuple[str, ...]
    layer: _TokenRows | _AlikeRows


class _Sides(NamedTuple):
    """Of a gradient, the values' gain included: the paths, as `by_token.Paths` has them."""

    query: Kernel
    key: Kernel
    overlap_path: Kernel
    value: Kernel
    cross: Kernel


@dataclass(slots=True, eq=False)
class _TokenRows:
    """Rows of tokens of two stacks, by token."""

    rows: list[Any]
    shape: tuple[int, ...]
    memory_shape: tuple[int, ...]

    @property
    def squares(self) -> Array:
        return np.stack([one.sum_square for one in self.rows])

    def forward(self) -> Kernel:
        return self._kernel([one.forward() for one in self.rows])

    def mean_output(self) -> Kernel:
        return self._kernel([one.mean_output() for one in self.rows])

    def weights(self) -> Array:
        found = np.stack([one.mean_attention for one in self.rows])
        return found.reshape(*self.shape[:-2], *found.shape[-2:])

    def backward(self, received: Kernel) -> _Sides:
        gained = flat(received)
        parts = [one.backward(matrix) for one, matrix in zip(self.rows, gained, strict=True)]
        key, value, cross = (
            Kernel.of_matrix(np.stack(found).reshape(self.memory_shape))
            for found in zip(*((part.key, part.value, part.cross) for part in parts), strict=True)
        )
        return _Sides(
            self._kernel([part.query for part in parts]),
            key,
            self._kernel([one.overlap_path * g for one, g in zip(self.rows, gained, strict=True)]),
            value,
            cross,
        )

    def response(self) -> Kernel:
        return self._kernel([one.response for one in self.rows])

    def _kernel(self, matrices: list[Array]) -> Kernel:
        return Kernel.of_matrix(np.stack(matrices).reshape(self.shape))


@dataclass(slots=True, eq=False)
class _AlikeRows:
    """Rows of tokens alike; `query_tokens` is the kernel of those that attend."""

    layer: AlikeAttention
    query_tokens: Kernel

    def backward(self, received: Kernel) -> _Sides:
        paths = self.layer.backward(received)
        return _Sides(paths.query, paths.key, paths.overlap_path, paths.value, paths.cross)

    def response(self) -> Kernel:
        return self.layer.backward(self.query_tokens.with_ones()).query


@dataclass(slots=True, eq=False)
class _Pullback(AttentionPullback):
    """To the tokens that ask and to those attended to."""

    memory: Signal

    @property
    def attended(self) -> Signal:
        return self.memory

    def __call__(self, gradient: Gradient) -> tuple[Pulled, Gradient]:
        leaf, received = self.leaf, gradient.kernel
        sides = self.layer.backward(received.scaled(self.gain))
        # `backward` counts the values' gain on the tokens' scale, which is the memory's here.
        query = self.at_logits(sides.query, self.law.queries)
        query = query.scaled(leaf.memory_width / leaf.d_model)
        key = self.at_logits(sides.key, self.law.keys)
        pulled = AttentionPulled(Gradient(query, gradient.seq_len), self, received, sides)
        return pulled, Gradient(sides.value + sides.cross + key, self.memory.seq_len)

    def response(self, received: Kernel) -> Kernel:
        found: Kernel = self.layer.response()
        return found.scaled(self.gain * self.leaf.memory_width / self.leaf.d_model)


__all__ = ["CrossAttention"]
