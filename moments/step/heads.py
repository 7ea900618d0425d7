"""Heads as they are: averages over draws of one head's queries, keys, values and gradients.

A step of queries is made of the very keys and values that it meets again,

    dq_i = -sum_s P_is delta-q_s,  delta-q_s = sum_j a_sj (delta_s . (v_j - v-bar_s)) k_j,

and a step of keys of the queries. What that does to a head is an average of a product of four
softmaxes, four keys and four values, of which the means of two and two (`attention`) miss more the
more attention is peaked and the more features a head has for its keys: at logits of variance 1,
three quarters of the change of a first layer's heads. It is taken over draws with a fixed seed, to
first order in the change of the logits.

See docs/theory/first-step.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .change import Array
from .rules import Root

_TOKENS = 2048
"""Draws: as many as have that many tokens together, at least 4."""


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
        a = self._attention(np.float32(amplitude) * (q @ np.swapaxes(k, -1, -2)), self._seen)
        seen = a
        if self.drop_prob:
            seen = a * (rng.random(a.shape, np.float32) < kept) / kept
        return Attended(self, np.float32(amplitude), q, k, v, a, seen)

    def _drawn(self, root: Array, rng: np.random.Generator) -> Array:
        return np.asarray(root @ rng.standard_normal((root.shape[1], self.d_head)))

    def _attention(self, logits: Array, seen: Array) -> Array:
        logits = seen.astype(logits.dtype) + logits
        a = np.exp(logits - logits.max(-1, keepdims=True))
        return np.asarray(a / a.sum(-1, keepdims=True))

    def moved(self, query: Array, key: Array, gradient: Array) -> Array:
        """Kernel of what coherent changes of queries and keys do to the heads.

        Args:
            query, key: P of the two, on the scale of the tokens.
            gradient: E delta delta at heads on that scale.
        """
        rng, count = np.random.default_rng(5), max(4, _TOKENS // len(self.query_kernel))
        roots = [Root.of(one).lower for one in (self.query_kernel, self.key_kernel, gradient)]
        amplitude = (self.scale / self.d_head) ** 0.5
        found = np.zeros_like(self.query_kernel)
        for draw in range(count):
            k, v = self._turned(self._drawn(roots[1], rng)), self._drawn(roots[1], rng)
            sent_keys, heads = np.zeros_like(k), []
            for head in range(self.sharing):
                q, delta = self._turned(self._drawn(roots[0], rng)), self._drawn(roots[2], rng)
                every = draw * self.sharing + head
                a = self._attention(amplitude * (q @ k.T), self._seen[every % len(self._seen)])
                mean = a @ v
                sent = amplitude * a * (delta @ v.T - (delta * mean).sum(1)[:, None])
                stepped = self._turned(query @ self._turned(sent @ k, back=True))
                sent_keys += sent.T @ q
                heads.append((q, a, mean, stepped))
            stepped_keys = self._turned(key @ self._turned(sent_keys, back=True))
            for q, a, mean, stepped in heads:
                tilted = amplitude * a * (stepped @ k.T + q @ stepped_keys.T)
                change = tilted @ v - tilted.sum(1)[:, None] * mean
                found += change @ change.T
        return found / (count * self.sharing * self.d_head)


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
