"""Positions on classes of which a token and the one before it are told apart from their cell.

A causal head's target is the token that is read next, whose row a tied head has in what the next
token reads; and what two tokens share may depend on how near they are. So a kernel has

    [[K, N], [N^T, K']],    of tokens and of the ones before them,

K of any two positions, smooth as in `classes.PositionClasses`, (x_p, x_p - 1) on the diagonal of N
and K' at (x_p - 1, x_p - 1) on its own; the rest is not read. Sums over pairs count K for all of
them and correct the L - 1 neighbours,

    sum_ij f(i, j) = sum of K + sum_i [N(i, i - 1) - K(i, i - 1)] + the same turned.

See docs/theory/state.md, Neighbours.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .classes import (
    Array,
    Matrix,
    PairSums,
    PositionClasses,
    TwiceClasses,
    lagrange,
    positions_between,
    stencil,
)

LEAST_PAIRS, LEAST_OTHERS = 1e-6, 0.25
"""Pairs of two cells, and share of them that are no neighbours, below which there are none, or too
few to tell them by what all have."""


@dataclass(frozen=True, eq=False)
class NeighbouringClasses(TwiceClasses):
    """Of one sequence under a causal mask; `nodes` are a token's and then those of the one before,
    `one` classes without neighbours."""

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
    def pair_count(self) -> Array:
        met = self.following[:, None] * self._at_before
        rest, beside = self.one.pair_count - met - met.T, np.diag(self.following)
        return np.block([[rest, beside], [beside, np.zeros_like(rest)]])

    def repeated(self, values: Array) -> Array:
        """Of tokens, and of those before them; logarithms are interpolated, as in `spread_out`."""
        values, matrix = np.asarray(values, float), self._at_before.T
        positive = np.all(values > 0.0, axis=-1, keepdims=True)
        by_logs = np.exp(np.log(np.where(positive, values, 1.0)) @ matrix)
        return np.concatenate([values, np.where(positive, by_logs, values @ matrix)], axis=-1)

    # --- neighbours -------------------------------------------------------------------------------

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
        found, size = np.zeros((len(self.nodes),) * 2), self.size
        each = np.arange(1, size)
        found[size + each, each] = 1.0
        return found

    def neighbours(self, pairs: Array) -> Array:
        """(..., P) entries of a token and the one before it, of (..., 2 P, 2 P)."""
        each = np.arange(self.size)
        return np.asarray(pairs[..., each, len(each) + each])

    def smooth(self, own: Array, pairs: Array) -> Matrix:
        """What any two tokens of one kernel have, without its neighbours."""
        size = self.size
        return own[..., :size], pairs[..., :size, :size]

    @functools.cached_property
    def _shares(self) -> tuple[Array, Array]:
        """(P, P) of the pairs of two cells, those in which the first token comes right behind the
        second; and what is left by these, turned or not. Cells are linear in log position."""
        nodes, size = self.one.nodes, self.size
        met, twice, mass = np.zeros((size, size)), np.zeros((size, size)), np.zeros(size)
        met[0, 0], twice[0, 0], mass[0] = 0.0, 1.0, 1.0
        for cell, (low, high) in enumerate(itertools.pairwise(nodes.tolist())):
            places, weights = positions_between(low, high + 1)
            hats, earlier = (
                np.stack([1.0 - rising, rising])
                for rising in (np.log(at / low) / np.log(high / low) for at in (places, places - 1))
            )
            held = slice(cell, cell + 2)
            met[held, held] += (hats * weights) @ earlier.T
            twice[held, held] += (hats * weights) @ hats.T
            mass[held] += hats @ weights
        count = np.outer(mass, mass) - twice
        met = np.divide(met, count, out=np.zeros_like(met), where=count > LEAST_PAIRS)
        return met, 1.0 - met - met.T

    def _among(self, beside: Array, turned: Array) -> Array:
        """(..., P, P) what neighbours, (..., P), add to the means over all pairs of two cells."""
        share = self._shares[0]
        found = beside[..., :, None] * share + turned[..., None, :] * share.T
        return np.asarray(found)

    def blocks(self, own: Array, pairs: Array) -> tuple[Matrix, ...]:
        """One matrix of means over cells, neighbours included."""
        own, rest = self.smooth(own, pairs)
        size, each = self.size, np.arange(self.size)
        among = self._among(self.neighbours(pairs), pairs[..., size + each, each])
        return ((own, rest * self._shares[1] + among),)

    def joined(self, *blocks: Matrix) -> Matrix:
        """Of a matrix of means over cells, in which neighbours are like others."""
        own, pairs = blocks[0]
        return self.of_smooth(own, pairs, self.near(pairs), self.near(np.swapaxes(pairs, -1, -2)))

    def with_neighbours(self, own: Array, pairs: Array, beside: Array) -> Matrix:
        """Of a matrix of means over cells, and what neighbours have, (..., P)."""
        others = self._shares[1] > LEAST_OTHERS
        rest = (pairs - self._among(beside, beside)) / np.where(others, self._shares[1], 1.0)
        return self.of_smooth(own, np.where(others, rest, pairs), beside)

    def of_smooth(
        self, own: Array, pairs: Array, beside: Array, turned: Array | None = None
    ) -> Matrix:
        """Of what other pairs have, and what a token has with the one before it and, where that is
        not the same, turned."""
        turned = beside if turned is None else turned
        own, beside, turned = (np.broadcast_to(v, pairs.shape[:-1]) for v in (own, beside, turned))
        each, right, left = np.arange(self.size), np.array(pairs), np.array(pairs)
        right[..., each, each], left[..., each, each] = beside, turned
        top = np.concatenate([pairs, right], axis=-1)
        earlier = self._at_before @ pairs @ self._at_before.T
        bottom = np.concatenate([left, earlier], axis=-1)
        return self.repeated(own), np.concatenate([top, bottom], axis=-2)

    # --- texts ------------------------------------------------------------------------------------

    def cell_means(self, values: Array) -> Array:
        return self.repeated(self.one.cell_means(values))

    def of_sums(self, *means: Array) -> Array:
        rest, ahead, behind = means
        return np.asarray(self.of_smooth(np.ones(self.size), rest, ahead, behind)[1])

    def pair_sums(
        self, first: NDArray[np.int64], second: NDArray[np.int64], weights: Array | None = None
    ) -> list[PairSums]:
        """Of others than neighbours, and of a token and the one before it, either way."""
        ((found, pairs, _),) = self.one.pair_sums(first, second, weights)
        weights = np.ones(len(first)) if weights is None else weights
        hats, before = self.one.hats[:, 1:], self.one.hats[:, :-1]
        ahead = weights[1:] * (first[1:] == second[:-1])
        behind = weights[:-1] * (first[:-1] == second[1:])
        met, size = hats @ before.T, len(hats)
        found = found - (hats * ahead) @ before.T - (before * behind) @ hats.T
        count = hats.sum(1)
        others = PairSums(found, pairs - met - met.T, self.pair_count[:size, :size])
        return [others, *(PairSums(hats @ one, count, count) for one in (ahead, behind))]


@functools.lru_cache(maxsize=16)
def with_neighbours(one: PositionClasses) -> NeighbouringClasses:
    """The same for the same classes."""
    return NeighbouringClasses(one.length, np.tile(one.nodes, 2), one)
