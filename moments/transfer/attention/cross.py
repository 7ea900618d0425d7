"""Attention of one stream of tokens to another: a decoder's to its encoder's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ...engine.composition import Pulled, Reader, ReaderPullback
from ...engine.packing import Padding
from ...engine.state import Array, Gradient, Kernel, Signal
from ...errors import domain_error
from .alike import AlikeAttention
from .by_token import (
    BEYOND_TABLES,
    Mask,
    attention_facts,
    build,
    flat,
    mean_spread,
    same_sequence,
    variance_notes,
)
from .kernels.exact_rows import THETA_PEAKED
from .logits import LogitLaw, logit_law, positive, through
from .self_attention import concatenated
from .weight_gradients import Paths, of_rows, overlap_gradients, projection_gradients


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
    prefix: ClassVar[str] = "cross_"

    def attend(self, signal: Signal, memory: Signal) -> tuple[Signal, ReaderPullback]:
        """Moments of the concatenated heads, and the map from their gradient to both inputs'.

        Raises:
            DomainError: one of the two is resolved by token and the other is not.
        """
        if signal.resolved != memory.resolved:
            raise domain_error(
                "memory", memory.resolved, "resolved by token exactly where the queries are"
            )
        asking, asked = signal.second_moment(), memory.second_moment()
        law = logit_law(self, asking, asked, (self.d_model, self.memory_width))
        make = self._by_token if signal.resolved else self._alike
        seen, back = make(signal, memory, law)
        output = concatenated(self, signal, memory, *seen.heads)
        output.facts, output.notes = seen.facts, seen.notes + law.notes
        mixed, squares, *_ = seen.heads
        rows = of_rows(output, np.shape(squares))

        def pullback(gradient: Gradient) -> tuple[Pulled, Gradient]:
            received = gradient.kernel
            paths, straight = back(received.scaled(self.heads * self.d_head * self.value))
            # `back` counts the values' gain on the tokens' scale, which is the memory's here.
            query = through(paths.query, law.queries, law.spoken)
            query = query.scaled(self.memory_width / self.d_model)
            key = through(paths.key, law.keys, law.spoken)

            def overlaps() -> dict[str, Array]:
                return overlap_gradients(self, law, signal, paths.tilt)

            def weights() -> dict[str, Array]:
                return projection_gradients(self, law, signal, memory, mixed, received, paths, rows)

            def response() -> Kernel:
                gain = self.heads * self.d_head * self.value * self.memory_width / self.d_model
                found = through(seen.response(), law.queries, law.spoken)
                return found.scaled(gain)

            return (
                Pulled(Gradient(query, gradient.seq_len), weights, overlaps, response),
                Gradient(straight + key, memory.seq_len),
            )

        return output, pullback

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

    def _by_token(self, signal: Signal, memory: Signal, law: LogitLaw) -> tuple[_Attended, _Back]:
        asked = memory.second_moment()
        shape, memory_shape = signal.kernel.pairs.shape, asked.pairs.shape
        count = int(np.prod(shape[:-2], dtype=int))
        masks = self._masks(shape[-1], memory_shape[-1], count)
        rows, wanted = build(self, law, asked, masks, mean_spread(memory), True)
        mixed = Kernel.of_matrix(np.stack([one.forward() for one in rows]).reshape(shape))
        squares = np.stack([one.sum_square for one in rows])
        facts = attention_facts(
            np.stack([one.logit_variance for one in rows]),
            squares,
            np.stack([one.entropy for one in rows]),
            np.stack([mask.sum(-1) for mask in masks]).astype(float),
        )
        notes = variance_notes(wanted)
        if not notes and any(np.any(one.beyond_tables) for one in rows):
            notes = (BEYOND_TABLES,)

        def back(received: Kernel) -> tuple[Paths, Kernel]:
            gained = flat(received)
            parts = [one.backward(matrix) for one, matrix in zip(rows, gained, strict=True)]
            query = np.stack([part.query for part in parts]).reshape(shape)
            key = np.stack([part.key for part in parts]).reshape(memory_shape)
            straight = np.stack([part.value + part.cross for part in parts]).reshape(memory_shape)

            tilt = np.stack([one.tilt * g for one, g in zip(rows, gained, strict=True)])
            of = Kernel.of_matrix
            return Paths(of(query), of(key), of(tilt.reshape(shape))), of(straight)

        def shared() -> Kernel:
            return Kernel.of_matrix(np.stack([one.mean_output() for one in rows]).reshape(shape))

        def weights() -> Array:
            found = np.stack([one.mean_attention for one in rows])
            return found.reshape(*shape[:-2], *found.shape[-2:])

        heads = (mixed, squares.reshape(shape[:-1]), shared, weights)

        def response() -> Kernel:
            return Kernel.of_matrix(np.stack([one.response for one in rows]).reshape(shape))

        return _Attended(heads, facts, notes, response), back

    def _alike(self, signal: Signal, memory: Signal, law: LogitLaw) -> tuple[_Attended, _Back]:
        asked = memory.second_moment()
        own = law.keys.kernel.diagonal - law.keys.kernel.pairs
        wanted = law.scale * law.queries.kernel.diagonal * own
        layer = AlikeAttention(
            law.queries.kernel,
            law.keys.kernel,
            asked,
            query_count=signal.seq_len,
            key_count=memory.seq_len,
            scale=law.scale * np.minimum(1.0, THETA_PEAKED / np.maximum(wanted, 1e-300)),
            drop_prob=self.drop_prob,
            d_model=self.memory_width,
            d_head=law.head_freedom,
            norm_spread=mean_spread(memory),
            value_bias=self.value_bias / positive(self.memory_width * self.value),
        )
        facts = attention_facts(
            layer.logit_variance, layer.sum_square, layer.entropy, float(memory.seq_len)
        )

        def back(received: Kernel) -> tuple[Paths, Kernel]:
            paths = layer.backward(received)
            return Paths(paths.query, paths.key, paths.tilt), paths.value + paths.cross

        def response() -> Kernel:
            return layer.backward(signal.kernel.with_ones()).query

        heads = (layer.forward, layer.sum_square, lambda: layer.mean_output, None)
        return _Attended(heads, facts, variance_notes(wanted), response), back


class _Attended(NamedTuple):
    """What a way of attending knows: the last four arguments of `concatenated`, facts, notes, and
    the query path of a gradient of ones (`Pulled.response`)."""

    heads: tuple[Kernel, Array, Callable[[], Kernel], Callable[[], Array] | None]
    facts: dict[str, Array]
    notes: tuple[str, ...]
    response: Callable[[], Kernel]


# From the gradient there, the values' gain included: the paths, and what goes straight through the
# values.
_Back = Callable[[Kernel], tuple[Paths, Kernel]]

__all__ = ["CrossAttention"]
