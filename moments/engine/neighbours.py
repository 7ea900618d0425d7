"""Positions on classes of which a token and the one before it are told apart from their cell.

A causal head's target is the token that is read next. Where the head is tied its row is in what the
next token reads, so that gradients of a token and the next have in common what no other two of
their cells have; and what two tokens share may depend on how near they are. So a kernel has

    [[K, N], [N^T, K]],    of a token and of the one before it,

K of any two positions, smooth as in `classes.PositionClasses`, and N the same but on its diagonal,
which holds (x_p, x_p - 1). Every entrywise map thus meets neighbours by itself. Sums over pairs
count K for all of them and correct the L - 1 neighbours,

    sum_ij f(i, j) = sum of K + sum_i [N(i, i - 1) - K(i, i - 1)] + the same turned,

which is how attention sends a gradient, too: the smooth part by all pairs of rows, the rest by rows
that follow one another. What attends to tokens takes the mean of a cell, neighbours included.

See docs/theory/state.md, Neighbours.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .classes import Array, Matrix, PositionClasses, Sight, lagrange, stencil


@dataclass(frozen=True, eq=False)
class NeighbouringClasses(PositionClasses):
    """Of one sequence under a causal mask; `nodes` are a token's and then those of the one before.

    Attributes:
        one: classes without neighbours.
    """

    one: PositionClasses

    @property
    def inside(self) -> PositionClasses:
        return self.one

    @functools.cached_property
    def before(self) -> NDArray[np.intp]:
        """(P,) the node of the token before, itself where that is of the same class."""
        nodes, each = self.one.nodes, np.arange(len(self.one.nodes))
        found = each.copy()
        found[1:] -= np.diff(nodes) == 1
        return found

    @functools.cached_property
    def following(self) -> Array:
        """(P,) tokens of a class that follow another."""
        return np.asarray(self.one.count - (self.one.nodes == 1))

    @functools.cached_property
    def count(self) -> Array:
        return np.tile(0.5 * self.one.count, 2)

    @functools.cached_property
    def pair_count(self) -> Array:
        met = self.following[:, None] * self._at_before
        rest = self.one.pair_count - met - met.T
        apart = 0.25 * (rest - np.diag(np.diagonal(rest)))
        own, beside = np.diag(0.5 * np.diagonal(rest)), np.diag(self.following)
        return np.block([[apart + own, apart + beside], [apart + beside, apart + own]])

    def seen(self, window: int | None = None) -> Sight:
        return self.one.seen(window)

    def mean(self, values: Array) -> Array:
        """Of (..., 2 P), or of (..., P) numbers that both have."""
        values = np.asarray(values)
        return super().mean(values if values.shape[-1] == len(self.nodes) else np.tile(values, 2))

    def in_one(self, sums: Array) -> Array:
        return np.asarray(2.0 * sums[..., : len(self.before)])

    def repeated(self, values: Array) -> Array:
        return np.concatenate([values, values], axis=-1)

    def within(self, pairs: Array) -> Array:
        return np.block([[pairs, pairs], [pairs, pairs]])

    def everywhere(self, matrix: Matrix) -> Matrix:
        return self.joined(matrix)

    # --- neighbours --------------------------------------------------------------------------------

    @functools.cached_property
    def _at_before(self) -> Array:
        """(P, P) weights of nodes in what is interpolated to the position before each."""
        nodes, logs = self.one.nodes, np.log(self.one.nodes)
        found = np.eye(len(nodes))
        for node in range(1, len(nodes)):
            held = stencil(node - 1, 0, node)
            found[node, node] = 0.0
            found[node, held] = lagrange(logs[held], np.log(nodes[[node]] - 1.0))[:, 0]
        return found

    def near(self, pairs: Array) -> Array:
        """(..., P) of what the smooth part, (..., P, P), says of a token and the one before it."""
        return np.asarray((pairs * self._at_before).sum(-1))

    @functools.cached_property
    def following_pairs(self) -> Array:
        found, size = np.zeros((len(self.nodes),) * 2), len(self.before)
        each = np.arange(1, size)
        found[size + each, each] = 1.0
        return found

    def neighbours(self, pairs: Array) -> Array:
        """(..., P) entries of a token and the one before it, of (..., 2 P, 2 P)."""
        each = np.arange(len(self.before))
        return np.asarray(pairs[..., each, len(each) + each])

    def smooth(self, own: Array, pairs: Array) -> Matrix:
        """What any two tokens of one kernel have, without its neighbours."""
        size = len(self.before)
        return own[..., :size], pairs[..., :size, :size]

    @functools.cached_property
    def _share(self) -> Array:
        """(P,) of neighbours among the pairs of a class; 0 in cells so narrow that these are no
        means over it."""
        pairs = np.diagonal(self.one.pair_count)
        wide = (pairs > 4.0 * self.following) & (self.before == np.arange(len(self.before)))
        return np.where(wide, 2.0 * self.following / np.where(wide, pairs, 1.0), 0.0)

    def blocks(self, own: Array, pairs: Array) -> tuple[Matrix, ...]:
        """One matrix of means over cells, neighbours included."""
        own, rest = self.smooth(own, pairs)
        more = self._share * (self.neighbours(pairs) - self.near(rest))
        each, found = np.arange(len(self.before)), np.array(rest)
        found[..., each, each] += more
        return ((own, found),)

    def joined(self, *blocks: Matrix) -> Matrix:
        """Of a matrix of means over cells, in which neighbours are like others."""
        own, pairs = blocks[0]
        return self.with_neighbours(own, pairs, self.near(pairs))

    def with_neighbours(self, own: Array, pairs: Array, beside: Array) -> Matrix:
        """Of a matrix of means over cells, and what neighbours have, (..., P)."""
        more = self._share / (1.0 - self._share) * (beside - self.near(pairs))
        each, rest = np.arange(len(self.before)), np.array(pairs)
        rest[..., each, each] -= more
        return self.of_smooth(own, rest, beside)

    def of_smooth(self, own: Array, pairs: Array, beside: Array) -> Matrix:
        """The same of what other pairs have."""
        own, beside = (np.broadcast_to(v, pairs.shape[:-1]) for v in (own, beside))
        each, other = np.arange(len(self.before)), np.array(pairs)
        other[..., each, each] = beside
        top = np.concatenate([pairs, other], axis=-1)
        bottom = np.concatenate([np.swapaxes(other, -1, -2), pairs], axis=-1)
        return np.concatenate([own, own], axis=-1), np.concatenate([top, bottom], axis=-2)

    # --- texts -------------------------------------------------------------------------------------

    def cell_means(self, values: Array) -> Array:
        return np.tile(self.one.cell_means(values), 2)

    def pair_means(
        self, first: NDArray[np.int64], second: NDArray[np.int64], weights: Array | None = None
    ) -> Array:
        inside = self.one.pair_means(first, second, weights)
        weights = np.ones(len(first)) if weights is None else weights
        hats = self.one.hats[:, 1:]
        count = hats.sum(1)
        ahead, behind = (
            np.divide(hats @ met, count, out=np.zeros(len(hats)), where=count > 0.0)
            for met in (
                weights[1:] * (first[1:] == second[:-1]),
                weights[:-1] * (first[:-1] == second[1:]),
            )
        )
        size, each = len(hats), np.arange(len(hats))
        found = self.with_neighbours(np.ones(size), inside, 0.5 * (ahead + behind))[1]
        found[each, size + each], found[size + each, each] = ahead, behind
        return found

    def spread_out(self, values: Array) -> Array:
        return self.one.spread_out(values[..., : len(self.before)])


@functools.lru_cache(maxsize=16)
def with_neighbours(one: PositionClasses) -> NeighbouringClasses:
    """The same for the same classes."""
    return NeighbouringClasses(one.length, np.tile(one.nodes, 2), one)
