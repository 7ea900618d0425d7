"""A step's change through a block that is given by one law of second moments.

Between its matrices a small change follows the law's tangents: P, M and U of what a matrix reads
are linear in those of what the block and the matrices before give. Left out are products of two
changes, what a large step does to variances, and a neuron's slopes at all tokens at once
(`neurons`), for which changes behind squared ReLU come out 15 % low at width 64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.derivative import pullback, tangent
from ..engine.laws import Applied, Cut, LawMatrix, Layout, passed
from ..layers.by_law import LawLeaf
from .change import Array, Change


@dataclass(frozen=True, eq=False)
class Segments:
    """A law cut at its matrices.

    Attributes:
        leaf: whose law.
        kernel: (T, T) second moments that enter.
    """

    leaf: LawLeaf
    kernel: Array

    @functools.cached_property
    def layout(self) -> Layout:
        return Layout(True, max(len(self.kernel) // self.leaf.seq_len, 1))

    @functools.cached_property
    def _passed(self) -> dict[str, tuple[Array, Array]]:
        weights = self.leaf.applied()
        self.leaf.evaluated(self.layout, self.layout.cut(self.kernel), weights)
        return passed(weights)

    @functools.cached_property
    def matrices(self) -> tuple[LawMatrix, ...]:
        """In the order in which the law applies them."""
        known = {one.name: one for one in self.leaf.weights}
        return tuple(known[name] for name in self._passed)

    def before(self, name: str) -> Array:
        """(T, T) what a matrix reads."""
        return np.asarray(self.layout.joined(self._passed[name][0]))

    def received(self, gradient: Array) -> dict[str, Array]:
        """(T, T) gradients per feature behind every matrix, of that behind the block."""
        leaf, layout = self.leaf, self.layout
        sent = leaf.width * layout.cut(np.asarray(gradient, float))
        names = [f"{one.name}.bias" for one in self.matrices]

        def law(*added: Any) -> Any:
            weights = Applied(leaf.label, leaf.weights, dict(zip(names, added, strict=True)))
            return leaf.evaluated(layout, layout.cut(self.kernel) + 0.0 * added[0], weights)

        _, pull = pullback(law, *(np.zeros(sent.shape) for _ in names))
        found = zip(self.matrices, pull(sent), strict=True)
        return {one.name: layout.joined(kernel) / one.fan_out for one, kernel in found}

    def _cut(self, x: Any, *behind: Any) -> tuple[Any, ...]:
        names = [one.name for one in self.matrices]
        weights = Cut(self.leaf.label, self.leaf.weights, dict(zip(names, behind, strict=True)))
        found = self.leaf.evaluated(self.layout, x, weights)
        return (*(passed(weights)[name][0] for name in names), found)

    def carried(self, to: int, source: int, part: Array) -> Array:
        """A part of a change of one source: 0 is what enters, k behind the k-th matrix; at what the
        matrix number `to` reads, or behind the block."""
        layout = self.layout
        at = [self.kernel, *(layout.joined(self._passed[one.name][1]) for one in self.matrices)]
        shape = np.broadcast_shapes(part.shape, self.kernel.shape)
        points = [layout.cut(np.broadcast_to(one, shape)) for one in at]
        ways = [np.zeros(points[0].shape) for _ in at]
        ways[source] = layout.cut(np.broadcast_to(part, shape))
        _, found = tangent(self._cut, points, ways)
        return np.asarray(layout.joined(np.broadcast_to(found[to], points[0].shape)))

    def gathered(self, to: int, changes: Sequence[Change], gradient: Array) -> Change:
        """The change there of those of all sources so far; `gradient` is E delta delta there."""
        total = Change.none(len(self.kernel))
        for source, change in enumerate(changes):
            total = total.plus(change.each(functools.partial(self.carried, to, source)), gradient)
        return total
