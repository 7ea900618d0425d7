"""Attention of one stream of tokens to another: a decoder's to its encoder's output."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...engine.composition import Reader, ReaderPullback
from ...engine.packing import Padding
from ...engine.state import Array, Kernel, Signal
from ...errors import domain_error
from .by_token import (
    Mask,
    same_sequence,
)
from .self_attention import Attention, attended


@dataclass(frozen=True)
class CrossAttention(Attention, Reader):
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

    def sight(self, queries: int, keys: int, matrices: int) -> list[Mask]:
        """A (queries, keys) mask for every kernel: a token's own sequence, its real tokens."""
        mask = same_sequence(queries, keys, self.sequences)
        if self.padding is None:
            return [mask] * matrices
        real = np.asarray(self.padding, dtype=bool)
        if self.sequences > 1:
            real = real.reshape(1, -1)
        seen = [np.where((mask & row).any(1, keepdims=True), mask & row, mask) for row in real]
        return seen if len(seen) == matrices else seen * matrices


__all__ = ["CrossAttention"]
