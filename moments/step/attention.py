"""A step's change carried through attention.

Heads are A V with A the softmax of queries and keys. To first order in the logits, a change dl of
row i moves it by sum_j w_ij dl_ij (v_j - v-bar_i), w the mean weights. With kernels of queries,
keys and values that product has the kernel

    T(Q, K, V) = Q o J(K, V),
    J(K, V) = W (K o V) W^T - (WK) o (WV) ... = E over two rows of what J = diag(a) - a a^T leaves,

trilinear in its three kernels, and everything follows from it: the change of A V is
T(Q', K', V') - T(Q, K, V) besides W V' W^T - W V W^T. T is scaled, entry by entry, to the package's
own law of the query path at the old kernels, which knows finite logits, rotation, windows, biases
and dropped heads; the key path is scaled as a whole, to the package's own. Coherent changes of
queries and keys, which T's means of pairs miss most of, are those of drawn heads (`heads`). Logits
of order 1 that change by as much are beyond first order.

See docs/theory/first-step.md.
"""

from __future__ import annotations

import dataclasses
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


@dataclass(frozen=True, eq=False)
class Rows:
    """One layer's attention, as the step meets it.

    Attributes:
        query_kernel: of the tokens that queries read.
        key_kernel: of those that keys and values read, C; self-attention's are the same.
        weights: (heads, T, T) W of each, mean attention; one, where all are alike.
        response: the query path's kernel per unit of the gradient's behind the value weights.
        gain: of the value weights.
        behind: gradient behind the value weights.
        key_path: its kernel at the tokens by way of the keys, the package's.
        gradients: D at queries, keys and values, before any rotation.
        received: D at the heads.
        sizes: variance of queries, keys and values over that of the tokens.
        grown: by name, the three's gradients' squared norms over those that mean overlaps give: a
            gradient at keys is made of queries and values, whose overlaps are those of the tokens
            that keys read.
        heads: by draws, what their coherent changes do.
        sequences: that the tokens are, none of which sees another.
    """

    query_kernel: Array
    key_kernel: Array
    weights: Array
    response: Array
    gain: float
    behind: Array
    key_path: Array
    gradients: Three
    received: Array
    sizes: Three
    grown: Callable[[str], float]
    heads: Heads
    sequences: int = 1

    @functools.cached_property
    def key_path_scale(self) -> float:
        """What multiplies T's key path to give the package's."""
        size = float(
            (self.behind * self._product(self.query_kernel, self.key_kernel, self.key_kernel)).sum()
        )
        return float((self.key_kernel * self.key_path).sum()) / size if size else 1.0

    @functools.cached_property
    def _apart(self) -> list[Rows]:
        """Heads that are not alike, one by one."""
        if len(self.weights) == 1:
            return []
        return [dataclasses.replace(self, weights=one[None]) for one in self.weights]

    def _joint(self, keys: Array, values: Array) -> Array:
        """J, by averages over rows from either side."""
        if self._apart:
            return _average([one._joint(keys, values) for one in self._apart])
        mean = self._mean
        if values is keys or _symmetric(keys, values):
            (left, one), (right, two) = self._averages(keys), self._averages(values)
            half = mean(mean(keys * values).T / 2 - left.T * right.T)
            return half + half.T + one * two
        left, right = mean(keys), mean(values)
        crossed = mean((left * right).T).T
        turned = mean(mean(keys.T).T * mean(values.T).T)
        one, two = mean(left.T).T, mean(right.T).T
        return self._both(keys * values) - crossed - turned + one * two

    def _both(self, tokens: Array) -> Array:
        """W A W^T."""
        if self._apart:
            return _average([one._both(tokens) for one in self._apart])
        return self._mean(self._mean(tokens).T).T

    def _averages(self, tokens: Array) -> tuple[Array, Array]:
        """W A and W A W^T, of a symmetric A."""
        if tokens is self.key_kernel:
            return self._read
        left = self._mean(tokens)
        return left, self._mean(left.T)

    @functools.cached_property
    def _read(self) -> tuple[Array, Array]:
        left = self._mean(self.key_kernel)
        return left, self._mean(left.T)

    def _mean(self, tokens: Array) -> Array:
        """W A, sequence by sequence."""
        if self.sequences == 1:
            return np.asarray(self.weights[0] @ tokens)
        rows, keys = self.weights[0].shape
        split = tokens.reshape(self.sequences, keys // self.sequences, -1)
        return np.asarray((self._blocks @ split).reshape(rows, -1))

    @functools.cached_property
    def _blocks(self) -> Array:
        count, (rows, keys) = self.sequences, self.weights[0].shape
        shaped = self.weights[0].reshape(count, rows // count, count, keys // count)
        return np.stack([shaped[k, :, k] for k in range(count)])

    @functools.cached_property
    def _factor(self) -> Array:
        found = self._still
        there = np.abs(found) > 1e-6 * np.abs(found).max(initial=0.0)
        return np.where(there, self.response / np.where(there, found, 1.0), 0.0)

    def _product(self, queries: Array, keys: Array, values: Array) -> Array:
        """T, without the value weights' gain."""
        still = keys is self.key_kernel and values is self.key_kernel
        joint = self._still if still else self._joint(keys, values)
        return self._factor * queries * joint

    @functools.cached_property
    def _still(self) -> Array:
        return self._joint(self.key_kernel, self.key_kernel)

    def carried(
        self,
        changes: Three,
        gradient: Array,
        received: tuple[Array | None, Array | None] = (None, None),
    ) -> Change:
        """The heads' change, from those of queries, keys and values on the scale of the tokens.

        Args:
            changes: of the three.
            gradient: E delta delta at the heads.
            received: draws of E delta delta at values and at the heads, less it.
        """
        (query, key, value), gain = changes, self.gain
        q, c, product = self.query_kernel, self.key_kernel, self._product
        nothing = np.zeros_like(c)
        moved = Change(
            self._both(value.coherent),
            self._both(value.overlap),
            self._both(value.total),
            nothing,
        )
        sent = query.sent(self.gradients.query, self.sizes.query)
        sent_keys = key.sent(self.gradients.key, self.sizes.key)
        share = np.trace(product(sent, c, c)) + self.key_path_scale * np.trace(
            product(q, sent_keys, c)
        )
        drawn = share > _DRAWN * np.trace(moved.total)
        tilted = 0 * moved.total
        if drawn:  # and beside it the noise of queries and keys
            tilted = self.heads.moved(query.coherent, key.coherent, gain * gradient)
            query, key = query.less(sent), key.less(sent_keys)
        # with the value path, the excess of A V A^T over W V W^T
        coherent = [
            moved.coherent + product(q, c, _even(value.coherent)),
            product(_even(query.coherent), c, c),
            self.key_path_scale * product(q, _even(key.coherent), c),
        ]
        old = product(q, c, c)
        met = product(query.met(q), key.met(c), value.met(c))
        new = product(query.new(q), key.new(c), value.new(c))
        if max(_share(query, q), _share(key, c), _share(value, c)) < _SMALL:
            total = product(query.total, c, c) + product(q, c, value.total)
            total = total + self.key_path_scale * product(q, key.total, c)
            overlap = product(query.overlap, c, c) + product(q, key.overlap, c)
            overlap = overlap + product(q, c, value.overlap)
        else:
            overlap, total = met - old, new - met - met.T + old
            if abs(self.key_path_scale - 1) > _ALIKE:
                total = total + (self.key_path_scale - 1) * product(q, key.total, c)
        parts = [gain * part for part in coherent]
        moving = parts[1] + parts[2]
        # the causes share delta; of means, the square of what tilts the weights once more
        cross = between(parts[0] + (0.0 if drawn else 0.5) * moving, gradient, moving)
        total = gain * (moved.total + total + tilted) + cross + cross.T
        passed = Change.of(parts[0])
        if value.drawn is not None:
            tilts = [self._both(one) + product(q, c, _even(one)) for one in value.drawn]
            passed = Change.of(parts[0], gain * np.stack(tilts))
            passed = conserved(value, passed, (self.gradients.value, gradient), received)
        overlap = gain * (moved.overlap + overlap)
        return Change(parts[0] + moving, overlap, total, nothing, (), passed.drawn)


def _average(kernels: list[Array]) -> Array:
    return np.asarray(sum(kernels) / len(kernels))


def _symmetric(first: Array, second: Array) -> bool:
    return all(np.array_equal(one, one.T) for one in (first, second))


_ALIKE = 0.02
"""Difference of the key path's scale that is left out of a change's square."""

_DRAWN = 3e-4
"""Share of the heads' change, by the means of pairs, from which coherent changes of queries and
keys are drawn: drawn, they came out 12 to 15 times that."""

_SMALL = 1e-9
"""Relative change below which differences of products would lose digits."""


def _share(change: Change, kernel: Array) -> float:
    return float(np.max(np.diag(change.total)) / np.max(np.diag(kernel)))


def _even(matrix: Array) -> Array:
    return (matrix + matrix.T) / 2
