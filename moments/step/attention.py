"""A step's change carried through attention, to first order in the logits.

Heads are A V with A the softmax of queries and keys. With kernels of queries, keys and values what
moves the mean weights W has the kernel

    T(Q, K, V) = Q o J(K, V),
    J(K, V) = W (K o V) W^T - (WK) o (WV) ... = E over two rows of what J = diag(a) - a a^T leaves,

trilinear in its three kernels: the change of A V is T(Q', K', V') - T(Q, K, V) besides
W V' W^T - W V W^T. T is scaled, entry by entry, to the package's own law of the query path at the
old kernels, the key path as a whole. Coherent changes of queries and keys, which T's means of
pairs miss most of, are those of drawn heads (`heads`).

See docs/theory/first-step.md, The change travels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .change import Array, Change, between, conserved
from .heads import Heads


class Three(NamedTuple):
    """Something of queries, keys and values, on the scale of the tokens they read."""

    query: Any
    key: Any
    value: Any


class Averaged(NamedTuple):
    """A kernel A of tokens, W A, A W^T and W A W^T, all but the first of every head."""

    tokens: Array
    left: Array
    right: Array
    both: Array

    def plus(self, other: Averaged, factor: float = 1.0) -> Averaged:
        """Of A + factor A'."""
        if factor == 1.0:
            return Averaged(*(one + two for one, two in zip(self, other, strict=True)))
        return Averaged(*(one + factor * two for one, two in zip(self, other, strict=True)))

    @property
    def doubled(self) -> Averaged:
        """Of A + A^T."""
        tokens, left, right, both = self
        left = left + np.swapaxes(right, -1, -2)
        right, both = np.swapaxes(left, -1, -2), both + np.swapaxes(both, -1, -2)
        return Averaged(tokens + tokens.T, left, right, both)

    @property
    def even(self) -> Averaged:
        """Of (A + A^T)/2."""
        return Averaged(*(part / 2 for part in self.doubled))


def _average(heads: Array) -> Array:
    """Over heads that are not alike."""
    return np.asarray(heads.mean(0) if len(heads) > 1 else heads[0])


@dataclass(frozen=True, eq=False)
class Rows:
    """One layer's attention, as the step meets it.

    Attributes:
        heads: mean attention W of each; kernels of the tokens that queries read and of those that
            keys and values read, C; and by draws, what their coherent changes do.
        response: the query path's kernel per unit of the gradient's behind the value weights.
        gain: of the value weights.
        behind: gradient behind the value weights.
        key_path: its kernel at the tokens by way of the keys, the package's.
        gradients: D at queries, keys and values, before any rotation.
        sizes: variance of queries, keys and values over that of the tokens.
        grown: by name, the three's gradients' squared norms over those that mean overlaps give: a
            gradient at keys is made of queries and values, whose overlaps are those of the tokens
            that keys read.
        sequences: that the tokens are, none of which sees another.
    """

    heads: Heads
    response: Array
    gain: float
    behind: Array
    key_path: Array
    gradients: Three
    sizes: Three
    grown: Callable[[str], float]
    sequences: int = 1

    @functools.cached_property
    def key_path_scale(self) -> float:
        """What multiplies T's key path to give the package's."""
        size = float((self.behind * self._factor * self.heads.query_kernel * self._still).sum())
        return float((self.heads.key_kernel * self.key_path).sum()) / size if size else 1.0

    @functools.cached_property
    def _blocks(self) -> Array:
        """(heads, sequences, rows, keys) W, of every sequence's own tokens."""
        count, (heads, rows, keys) = self.sequences, self.heads.weights.shape
        shaped = self.heads.weights.reshape(heads, count, rows // count, count, keys // count)
        return np.stack([shaped[:, k, :, k] for k in range(count)], 1)

    def _left(self, tokens: Array) -> Array:
        """W A, behind an axis of heads."""
        heads, count, rows, keys = self._blocks.shape
        split = tokens.reshape(*tokens.shape[:-2], count, keys, -1)
        return np.asarray((self._blocks @ split).reshape(heads, count * rows, -1))

    def _right(self, tokens: Array) -> Array:
        """A W^T, likewise."""
        turned = np.swapaxes(self._blocks, -1, -2)
        heads, count, keys, rows = turned.shape
        split = np.swapaxes(tokens.reshape(*tokens.shape[:-1], count, keys), -3, -2)
        found = np.empty((heads, tokens.shape[-2], count, rows))
        np.matmul(split, turned, out=np.swapaxes(found, 1, 2))
        return found.reshape(heads, -1, count * rows)

    def _averaged(self, tokens: Array, symmetric: bool = False) -> Averaged:
        left = self._left(tokens)
        right = np.swapaxes(left, -1, -2) if symmetric else self._right(tokens)
        return Averaged(tokens, left, right, self._right(left))

    @functools.cached_property
    def _old(self) -> Averaged:
        """Of the tokens that keys and values read."""
        return self._averaged(self.heads.key_kernel, True)

    def _joint(self, keys: Averaged, values: Averaged, symmetric: bool = True) -> Array:
        """J, by averages over rows from either side."""
        onward, crossed = self._left(keys.tokens * values.tokens), keys.left * values.left
        both = keys.both * values.both
        if symmetric:
            half = self._right(onward / 2 - crossed)
            found = half + np.swapaxes(half, -1, -2) + both
        else:
            turned = self._left(keys.right * values.right)
            found = self._right(onward - crossed) - turned + both
        return _average(found)

    @functools.cached_property
    def _still(self) -> Array:
        return self._joint(self._old, self._old)

    @functools.cached_property
    def _factor(self) -> Array:
        """What multiplies T, without the value weights' gain, to give the package's."""
        found = self._still
        there = np.abs(found) > 1e-6 * np.abs(found).max(initial=0.0)
        return np.where(there, self.response / np.where(there, found, 1.0), 0.0)

    def carried(
        self,
        changes: Three,
        gradient: Array,
        received: tuple[Array | None, Array | None] = (None, None),
    ) -> Change:
        """The heads' change, from those of queries, keys and values on the scale of the tokens.

        `gradient` is E delta delta at the heads, `received` draws of it at values and heads, less
        it.
        """
        (query, key, value), gain, old = changes, self.gain, self._old
        # what multiplies J of changed keys or values, and changes of queries
        of_keys, of_queries = self._factor * self.heads.query_kernel, self._factor * self._still
        key_scale = self.key_path_scale
        passed = self._averaged(value.coherent)
        sides = {
            name: (self._averaged(one.overlap), self._averaged(one.total, True))
            for name, one in (("key", key), ("value", value))
        }
        moved = Change(
            _average(passed.both),
            _average(sides["value"][0].both),
            _average(sides["value"][1].both),
            np.zeros_like(of_keys),
        )
        sent = query.sent(self.gradients.query, self.sizes.query)
        sent_keys = self._averaged(key.sent(self.gradients.key, self.sizes.key), True)
        share = np.vdot(of_queries.diagonal(), sent.diagonal()) + key_scale * np.vdot(
            of_keys.diagonal(), self._joint(sent_keys, old).diagonal()
        )
        drawn = share > _DRAWN * np.trace(moved.total)
        tilted = 0 * moved.total
        if drawn:  # and beside it the noise of queries and keys
            tilted = self.heads.moved(query.coherent, key.coherent, gain * gradient)
            query, key = query.less(sent), key.less(sent_keys.tokens)
            sides["key"] = sides["key"][0], sides["key"][1].plus(sent_keys, -1.0)
        # with the value path, the excess of A V A^T over W V W^T
        coherent = [
            moved.coherent + of_keys * self._joint(old, passed.even),
            of_queries * _even(query.coherent),
            key_scale * of_keys * self._joint(self._averaged(_even(key.coherent), True), old),
        ]
        (key_met, key_sent), (value_met, value_sent) = sides["key"], sides["value"]
        c, q = self.heads.key_kernel, self.heads.query_kernel
        if max(query.share(q), key.share(c), value.share(c)) < _SMALL:
            total = of_queries * query.total + of_keys * (
                self._joint(old, value_sent) + self._joint(key_sent, old)
            )
            overlap = of_queries * query.overlap + of_keys * (
                self._joint(key_met, old, False) + self._joint(old, value_met, False)
            )
        else:
            still = self._factor * q * self._still
            keys, values = self._old.plus(key_met), self._old.plus(value_met)
            met = self._factor * query.met(q) * self._joint(keys, values, False)
            keys = self._old.plus(key_met.doubled.plus(key_sent))
            values = self._old.plus(value_met.doubled.plus(value_sent))
            new = self._factor * query.new(q) * self._joint(keys, values)
            overlap, total = met - still, new - met - met.T + still
        parts = [gain * part for part in coherent]
        moving = parts[1] + parts[2]
        # the causes share delta; of means, the square of what tilts the weights once more
        cross = between(parts[0] + (0.0 if drawn else 0.5) * moving, gradient, moving)
        total = gain * (moved.total + total + tilted) + cross + cross.T
        by_value = Change.of(parts[0])
        if value.drawn is not None:
            tilts = []
            for one in value.drawn:
                averaged = self._averaged(one)
                tilts.append(_average(averaged.both) + of_keys * self._joint(old, averaged.even))
            by_value = Change.of(parts[0], gain * np.stack(tilts))
            by_value = conserved(value, by_value, (self.gradients.value, gradient), received)
        overlap = gain * (moved.overlap + overlap)
        return Change(parts[0] + moving, overlap, total, moved.scattered, None, by_value.drawn)


_DRAWN = 3e-4
"""Share of the heads' change, by the means of pairs, from which coherent changes of queries and
keys are drawn."""

_SMALL = 1e-9
"""Relative change below which differences of products would lose digits."""


def _even(matrix: Array) -> Array:
    return (matrix + matrix.T) / 2
