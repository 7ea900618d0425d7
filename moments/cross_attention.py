"""Attention of one stream of tokens to another: a decoder's to its encoder's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .attention_alike import AlikeAttention
from .attention_by_token import (
    BEYOND_TABLES,
    Mask,
    attention_facts,
    build,
    flat,
    mean_spread,
    same_sequence,
    variance_notes,
)
from .attention_weights import biased, inverse_variances
from .composition import Pulled, Reader, ReaderPullback
from .errors import domain_error
from .kernels.exact_rows import THETA_PEAKED
from .logits import LogitLaw, logit_law, positive, through
from .state import Array, Gradient, Kernel, Signal

Padding = tuple[tuple[bool, ...], ...]


@dataclass(frozen=True)
class CrossAttention(Reader):
    """Queries from the tokens at hand, keys and values from a memory; every query sees every key.

    Attributes:
        d_model, memory_width: widths of the tokens and of the memory.
        heads, d_head: number and width of the heads.
        query, key, value: variances of the projections' entries.
        drop_prob: dropout on the attention weights.
        temperature: divides the logits.
        kv_heads, qk_norm, logit_softcap, norm_epsilon, has_bias: as in `SelfAttention`.
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
        mixed, squares, facts, notes, back = make(signal, memory, law)
        width = self.heads * self.d_head
        heads = mixed.scaled(self.memory_width * self.value)
        dropped = self.drop_prob / (1 - self.drop_prob)
        if np.any(self.value_bias):
            one, two = heads.lift(self.value_bias)
            diagonal = heads.diagonal + one * (1 + dropped * squares)
            heads = Kernel.joined(diagonal, heads.pairs + two, heads.resolved)
        output = Signal(heads, signal.seq_len, mean=0.0 * heads.diagonal, width=width)
        output.facts, output.notes = facts, notes + law.notes
        if signal.spread is not None:
            output.spread = (heads * heads).scaled(2 / width)

        def pullback(gradient: Gradient) -> tuple[Pulled, Gradient]:
            received = gradient.kernel
            paths = back(received.scaled(width * self.value))
            # `back` counts the values' gain on the tokens' scale, which is the memory's here.
            query = through(paths.query, law.queries, law.spoken)
            query = query.scaled(self.memory_width / self.d_model)
            key = through(paths.key, law.keys, law.spoken)
            weight = inverse_variances(self, self.d_model, self.memory_width)

            def overlaps() -> dict[str, Array]:
                """As `attention_weights.overlap_gradients`."""
                tilt = through(paths.tilt(), law.queries, law.spoken).scaled(self.memory_width)
                total = (asking * tilt).total(signal.seq_len)
                grown = {f"cross_{name}": total * one for name, one in weight.items()}
                if "query" in biased(self.has_bias):
                    grown["cross_query.bias"] = tilt.total(signal.seq_len) * weight["query"]
                return grown

            def weights() -> dict[str, Array]:
                counts = signal.seq_len, memory.seq_len
                through_key = self.memory_width * (asked * key).total(counts[1])
                norms = {
                    "cross_query": self.d_model
                    * (asking * query).total(counts[0])
                    * weight["query"],
                    "cross_key": through_key * weight["key"],
                    "cross_value": self.memory_width * width * (mixed * received).total(counts[0]),
                }
                norms["cross_key"] += overlaps()["cross_key"] / self.memory_width
                if self.has_bias:
                    ones = received.with_diagonal(received.diagonal * (1 + dropped * squares))
                    biases = {
                        "query": query.total(counts[0]) * weight["query"],
                        "key": self._key_bias(key.total(counts[1]) * weight["key"]),
                        "value": width * ones.total(counts[0]),
                    }
                    norms |= {f"cross_{name}.bias": biases[name] for name in biased(self.has_bias)}
                return norms

            return (
                Pulled(Gradient(query, gradient.seq_len), weights, overlaps),
                Gradient(paths.straight + key, memory.seq_len),
            )

        return output, pullback

    def _key_bias(self, norm: Array) -> Array:
        """A shift of all keys moves no softmax, unless a norm takes it up."""
        return 0.0 if self.qk_norm is None else np.maximum(norm, 0.0)

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

        def back(received: Kernel) -> _Returned:
            gained = flat(received)
            parts = [one.backward(matrix) for one, matrix in zip(rows, gained, strict=True)]
            query = np.stack([part.query for part in parts]).reshape(shape)
            key = np.stack([part.key for part in parts]).reshape(memory_shape)
            straight = np.stack([part.value + part.cross for part in parts]).reshape(memory_shape)

            def tilt() -> Kernel:
                found = np.stack([one.tilt * g for one, g in zip(rows, gained, strict=True)])
                return Kernel.of_matrix(found.reshape(shape))

            of = Kernel.of_matrix
            return _Returned(of(query), of(key), of(straight), tilt)

        return mixed, squares.reshape(shape[:-1]), facts, notes, back

    def _alike(self, signal: Signal, memory: Signal, law: LogitLaw) -> _Attended:
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

        def back(received: Kernel) -> _Returned:
            paths = layer.backward(received)
            return _Returned(paths.query, paths.key, paths.value + paths.cross, lambda: paths.tilt)

        return layer.forward, layer.sum_square, facts, variance_notes(wanted), back


class _Returned(NamedTuple):
    """The paths through queries, through keys and straight through the values, and what the first
    gains per unit of the variance of two tokens' overlap (`overlap`)."""

    query: Kernel
    key: Kernel
    straight: Kernel
    tilt: Callable[[], Kernel]


# Mixed tokens, E sum a^2, facts, notes, and the map from the gradient there, the values' gain
# included.
_Attended = tuple[
    Kernel,
    Array,
    dict[str, Array],
    tuple[str, ...],
    Callable[[Kernel], _Returned],
]

__all__ = ["CrossAttention"]
