"""Heads as they are: averages over draws of one head's queries, keys, values and gradients.

A step of queries is made of the very keys and values that it meets again, and a step of keys of the
queries: an average of a product of four softmaxes, four keys and four values, of which means of two
and two (`attention`) miss three quarters at logits of variance 1.

See docs/theory/first-step.md, The change travels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .change import Array
from .rules import spread

_TOKENS = 2048
"""Draws of shared heads: as many as have that many tokens together, at least 4."""


@dataclass(frozen=True, eq=False)
class Heads:
    """One layer's heads.

    Attributes:
        query_kernel, key_kernel: of the tokens that queries and keys read.
        weights: (heads, T, T) mean attention, 0 where a row does not see a key; one, where all
            heads are alike.
        scale: covariance of logits over those of queries and of keys, on the tokens' scale.
        d_head: features.
        shared: heads of keys and values.
        sharing: queries that share each.
        drop_prob: of attention weights.
        frequencies: of rotary positions, one for every pair of features; empty without.
        positions: of the tokens.
    """

    query_kernel: Array
    key_kernel: Array
    weights: Array
    scale: float
    d_head: int
    shared: int
    sharing: int
    drop_prob: float
    frequencies: Array
    positions: Array

    @functools.cached_property
    def _turn(self) -> tuple[Array, Array]:
        phases = np.outer(self.positions, self.frequencies)
        return np.cos(phases), np.sin(phases)

    def _turned(self, tokens: Array, back: bool = False) -> Array:
        """Features behind the rotation of their positions."""
        if not len(self.frequencies):
            return tokens
        (cos, sin), half = (one.astype(tokens.dtype) for one in self._turn), len(self.frequencies)
        sin = -sin if back else sin
        first, second, rest = np.split(tokens, [half, 2 * half], axis=-1)
        return np.concatenate([cos * first - sin * second, sin * first + cos * second, rest], -1)

    @functools.cached_property
    def _seen(self) -> Array:
        there = self.weights > 0
        return np.where(there, np.log(np.where(there, self.weights, 1.0)), -np.inf)

    def attended(self, q: Any, k: Any, v: Any, rng: np.random.Generator) -> Attended:
        """Heads of drawn queries (N, heads, T, d_head), keys and values (N, shared, ...), on the
        scale of the tokens."""
        amplitude, kept = (self.scale / self.d_head) ** 0.5, np.float32(1.0 - self.drop_prob)
        q, k = self._turned(q), self._turned(k)
        k, v = (np.repeat(one, self.sharing, axis=1) for one in (k, v))
        logits = np.float32(amplitude) * (q @ np.swapaxes(k, -1, -2))
        logits = self._seen.astype(logits.dtype) + logits
        a = np.exp(logits - logits.max(-1, keepdims=True))
        seen = a = np.asarray(a / a.sum(-1, keepdims=True))
        if self.drop_prob:
            seen = a * (rng.random(a.shape, np.float32) < kept) / kept
        return Attended(self, np.float32(amplitude), q, k, v, a, seen)

    def moved(self, query: Array, key: Array, gradient: Array) -> Array:
        """Kernel of what coherent changes P of queries and keys do to the heads, whose gradient is
        E delta delta there; all on the scale of the tokens."""
        rng, every = np.random.default_rng(5), self.shared * self.sharing
        count = -(-max(4, _TOKENS // len(self.query_kernel)) // self.shared)

        def drawn(kernel: Array, heads: int) -> Array:
            shape = count, heads, len(kernel), self.d_head
            return np.asarray(spread(kernel) @ rng.standard_normal(shape))

        k, v = (drawn(self.key_kernel, self.shared) for _ in range(2))
        passed = self.attended(drawn(self.query_kernel, every), k, v, rng)
        queries, keys, _ = passed.back(drawn(gradient, every))
        moved = passed.moved(query @ queries, key @ keys)
        kernel = np.tensordot(moved, moved, ((0, 1, 3), (0, 1, 3)))
        return np.asarray(kernel / (count * every * self.d_head))


@dataclass(frozen=True, eq=False)
class Attended:
    """Drawn heads, by queries, keys (behind their rotation) and values.

    Attributes:
        amplitude: of logits.
        attention, seen: weights, and those that dropout leaves.
    """

    heads: Heads
    amplitude: Any
    queries: Any
    keys: Any
    values: Any
    attention: Any
    seen: Any

    @property
    def given(self) -> Any:
        """(N, heads, T, d_head)."""
        return self.seen @ self.values

    def moved(self, queries: Any, keys: Any) -> Any:
        """What changes of queries and keys do to `given`, to first order."""
        heads = self.heads
        keys = np.repeat(heads._turned(keys), heads.sharing, axis=1)
        tilts = heads._turned(queries) @ np.swapaxes(self.keys, -1, -2)
        tilts = self.amplitude * (tilts + self.queries @ np.swapaxes(keys, -1, -2))
        tilts = tilts - (self.attention * tilts).sum(-1, keepdims=True)
        return (self.seen * tilts) @ self.values

    def back(self, delta: Any) -> tuple[Any, Any, Any]:
        """The gradient at queries, keys and values, of that at what heads give."""
        turned = self.heads._turned
        own = self.seen * (delta @ np.swapaxes(self.values, -1, -2))
        sent = self.amplitude * (own - self.attention * own.sum(-1, keepdims=True))
        keys = np.swapaxes(sent, -1, -2) @ self.queries
        values = np.swapaxes(self.seen, -1, -2) @ delta
        keys, values = (
            one.reshape(len(one), self.heads.shared, -1, *one.shape[2:]).sum(2)
            for one in (keys, values)
        )
        return turned(sent @ self.keys, back=True), turned(keys, back=True), values
