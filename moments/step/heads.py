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

import numpy as np

from .change import Array
from .rules import Root, wishart_root

_TOKENS = 2048
"""Draws: as many as have that many tokens together, at least 4."""


@dataclass(frozen=True, eq=False)
class Heads:
    """One layer's heads.

    Attributes:
        asking, kernel: of the tokens that ask and of those attended to.
        weights: mean attention, 0 where a row does not see a key.
        scale: covariance of logits over those of queries and of keys, on the tokens' scale.
        d_head: features.
        shared: heads of keys and values.
        sharing: queries that share each.
        drop_prob: of attention weights.
        frequencies: of rotary positions, one for every pair of features; empty without.
        positions: of the tokens.
        width: features of the stream, of which all heads, and their gradients, are maps.
    """

    asking: Array
    kernel: Array
    weights: Array
    scale: float
    d_head: int
    shared: int
    sharing: int
    drop_prob: float
    frequencies: Array
    positions: Array
    width: float

    @functools.cached_property
    def _turn(self) -> tuple[Array, Array]:
        phases = np.outer(self.positions, self.frequencies)
        return np.cos(phases), np.sin(phases)

    def _turned(self, tokens: Array, back: bool = False) -> Array:
        """Features behind the rotation of their positions."""
        if not len(self.frequencies):
            return tokens
        (cos, sin), half = self._turn, len(self.frequencies)
        sin = -sin if back else sin
        first, second, rest = np.split(tokens, [half, 2 * half], axis=1)
        return np.concatenate([cos * first - sin * second, sin * first + cos * second, rest], 1)

    @functools.cached_property
    def _seen(self) -> Array:
        there = self.weights > 0
        return np.where(there, np.log(np.where(there, self.weights, 1.0)), -np.inf)

    def received(
        self, gradient: Array, gain: float, count: int
    ) -> list[tuple[Array, Array, Array]]:
        """Draws of all heads' gradients at queries, keys and values, each (T, features), on the
        scale of the tokens.

        Rows share one head's attention over all its features, so that values receive no more
        directions than rows and heads send.

        Args:
            gradient: E delta delta at the heads.
            gain: of the values.
            count: draws.
        """
        rng = np.random.default_rng(6)
        roots = [Root.of(one).lower for one in (self.asking, self.kernel, gain * gradient)]
        amplitude, kept = (self.scale / self.d_head) ** 0.5, 1.0 - self.drop_prob
        found = []
        for _ in range(count):
            parts: list[tuple[Array, Array, Array]] = []
            asking, attended, sending = self._realised(roots, rng)
            for _ in range(self.shared):
                k, v = (self._drawn(attended, rng) for _ in range(2))
                k, queries = self._turned(k), []
                keys, values = np.zeros((2, *k.shape))
                for _ in range(self.sharing):
                    q, delta = self._turned(self._drawn(asking, rng)), self._drawn(sending, rng)
                    a = self._attention(amplitude * (q @ k.T))
                    mask = rng.random(a.shape) < kept if self.drop_prob else 1.0
                    seen = a * mask / kept
                    own = delta @ v.T
                    sent = amplitude * (seen * own - a * (seen * own).sum(1, keepdims=True))
                    queries.append(self._turned(sent @ k, back=True))
                    keys += sent.T @ q
                    values += seen.T @ delta
                parts.append((np.concatenate(queries, 1), self._turned(keys, back=True), values))
            query, key, value = zip(*parts, strict=True)
            found.append(tuple(np.concatenate(side, 1) for side in (query, key, value)))
        return found  # type: ignore[return-value]

    def given(self, count: int) -> list[Array]:
        """Draws of what all heads give, each (T, features), values on the scale of the tokens."""
        rng = np.random.default_rng(8)
        roots = [Root.of(one).lower for one in (self.asking, self.kernel)]
        amplitude, kept = (self.scale / self.d_head) ** 0.5, 1.0 - self.drop_prob
        found = []
        for _ in range(count):
            parts = []
            asking, attended = self._realised(roots, rng)
            for _ in range(self.shared):
                k, v = self._turned(self._drawn(attended, rng)), self._drawn(attended, rng)
                for _ in range(self.sharing):
                    q = self._turned(self._drawn(asking, rng))
                    a = self._attention(amplitude * (q @ k.T))
                    mask = rng.random(a.shape) < kept if self.drop_prob else 1.0
                    parts.append((a * mask / kept) @ v)
            found.append(np.concatenate(parts, 1))
        return found

    def _realised(self, roots: list[Array], rng: np.random.Generator) -> list[Array]:
        """One draw's: heads are maps of the same tokens, and of the same gradients behind them."""
        found = [root @ wishart_root(root.shape[1], self.width, rng) for root in roots]
        if self.asking is self.kernel:
            found[0] = found[1]
        return found

    def _drawn(self, root: Array, rng: np.random.Generator) -> Array:
        return np.asarray(root @ rng.standard_normal((root.shape[1], self.d_head)))

    def _attention(self, logits: Array) -> Array:
        logits = self._seen + logits
        a = np.exp(logits - logits.max(1, keepdims=True))
        return np.asarray(a / a.sum(1, keepdims=True))

    def moved(self, query: Array, key: Array, gradient: Array) -> Array:
        """Kernel of what coherent changes of queries and keys do to the heads.

        Args:
            query, key: P of the two, on the scale of the tokens.
            gradient: E delta delta at heads on that scale.
        """
        rng, count = np.random.default_rng(5), max(4, _TOKENS // len(self.asking))
        roots = [Root.of(one).lower for one in (self.asking, self.kernel, gradient)]
        amplitude = (self.scale / self.d_head) ** 0.5
        found = np.zeros_like(self.asking)
        for _ in range(count):
            k, v = self._turned(self._drawn(roots[1], rng)), self._drawn(roots[1], rng)
            sent_keys, heads = np.zeros_like(k), []
            for _ in range(self.sharing):
                q, delta = self._turned(self._drawn(roots[0], rng)), self._drawn(roots[2], rng)
                a = self._attention(amplitude * (q @ k.T))
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
