"""Gradients of parameters that multiply a whole stream: lambdas, weights of skips, layer scales.

Such a number acts on all features of a site at once, so that it changes norms, activations and
softmaxes to leading order, and a norm behind it removes its change along the stream. Its squared
gradient is the second moment of the output's derivative in it, which is a variable, as is the
derivative of every variable before the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .lowering import Lowering
from .sampling import pushed
from .variables import (
    NUMBERS,
    Blend,
    Combination,
    Curve,
    Drift,
    Fixed,
    Joined,
    Known,
    Mix,
    Part,
    Product,
    Sampled,
    Term,
    Times,
    Variable,
    Weights,
    combination,
    slope,
    times,
)

MOST = 100
"""Entries whose gradients are computed at most; each takes about as long as the signal itself."""


class Changes:
    """Derivatives of variables in one entry of a parameter that is used as a number."""

    def __init__(self, lowering: Lowering, name: str, entry: int) -> None:
        self._lowering, self._name = lowering, name
        number = lowering.numbers[name]
        self._direction = torch.zeros(number.numel(), dtype=number.dtype)
        self._direction[entry] = 1.0
        self._direction = self._direction.reshape(number.shape)
        self._known: dict[int, Variable | None] = {}

    def of(self, v: Variable) -> Variable | None:
        """The derivative of a variable; None: it does not change."""
        if v.number not in self._known:
            self._known[v.number] = self._of(v)
        return self._known[v.number]

    def _of(self, v: Variable) -> Variable | None:
        match v:
            case Product(source=Variable() as source):
                change = self.of(source)
                return None if change is None else replace(v, source=change, number=next(NUMBERS))
            case Fixed():
                values = self.of_numbers(v.moving)
                if values is None:
                    return None
                return replace(v, values=values, moving=None, number=next(NUMBERS))
            case Combination():
                return self._of_sum(v)
            case Blend():
                change, mixing = self.of(v.inner), self.of_numbers(v.moving)
                summands: list[Variable] = []
                if change is not None:
                    blended = Blend(
                        sites=v.sites,
                        features=v.features,
                        gaussian=change.gaussian,
                        alike=v.alike,
                        roots=change.roots,
                        inner=change,
                        mixing=v.mixing,
                    )
                    summands.append(blended)
                if mixing is not None:
                    summands.append(replace(v, mixing=mixing, moving=None, number=next(NUMBERS)))
                return _sum(v, summands)
            case Joined():
                changes = [self.of(piece) for piece, _ in v.pieces]
                if all(change is None for change in changes):
                    return None
                pieces = [
                    (_zero_like(piece) if change is None else change, first)
                    for (piece, first), change in zip(v.pieces, changes, strict=True)
                ]
                roots = frozenset[object]().union(*(piece.roots for piece, _ in pieces))
                return replace(v, pieces=pieces, roots=roots, number=next(NUMBERS))
            case Part():
                change = self.of(v.whole)
                return None if change is None else self._lowering.parts.of(change, v.chosen)
            case Curve():
                change = self.of(v.inner)
                return None if change is None else slope(v, change)
            case Times() | Mix():
                (a, b), (da, db) = v.parents, map(self.of, v.parents)
                pairs = [(x, y) for x, y in ((da, b), (a, db)) if x is not None and y is not None]
                if isinstance(v, Times):
                    return _sum(v, [times(x, y, v.at, v.sites, v.features) for x, y in pairs])
                new = ((x, y, x.roots | y.roots, next(NUMBERS)) for x, y in pairs)
                return _sum(
                    v, [replace(v, weights=x, values=y, roots=r, number=n) for x, y, r, n in new]
                )
            case Sampled():
                return self._of_sampled(v)
        return None

    def _of_sum(self, v: Combination) -> Variable | None:
        terms = []
        for term in v.terms:
            change, coefficient = self.of(term.variable), self.of_numbers(term.moving)
            if change is not None:
                terms.append(Term(change, term.coefficient, term.at))
            if coefficient is not None:
                terms.append(Term(term.variable, coefficient, term.at))
        shift = self.of_numbers(v.moving)
        if not terms and shift is None:
            return None
        return combination(v.sites, v.features, terms, shift)

    def _of_sampled(self, v: Sampled) -> Variable | None:
        sampler = self._lowering.sampler
        plan = sampler.plan(v)
        sources = {cut.variable.number: cut.variable for cut in plan.cuts.values()}
        changes = {n: change for n, u in sources.items() if (change := self.of(u)) is not None}
        inputs = {value for n in plan.nodes for value in self._lowering.graph.nodes[n].inputs}
        numbers = {}
        for value in sorted(inputs - plan.cuts.keys()):
            state = self._lowering.states.get(value)
            moving = state.tensor if isinstance(state, Known) else None
            if isinstance(state, Weights) and state.root in self._lowering.coherent:
                moving = self._lowering.moving(state)
            change = self.of_numbers(moving)
            if change is not None:
                numbers[value] = change
        if not changes and not numbers:
            return None
        return Drift(
            sites=v.sites,
            features=v.features,
            alike=v.alike,
            roots=v.roots.union(*(change.roots for change in changes.values())),
            sampled=v,
            changes=changes,
            numbers=numbers,
        )

    def of_numbers(self, moving: Tensor | None) -> Tensor | None:
        """The derivative of numbers; None: they do not change."""
        if moving is None or not moving.requires_grad:
            return None
        lowering = self._lowering
        leaves = [lowering.numbers[self._name], *(leaf for _, leaf in lowering.owned.values())]
        zero = torch.zeros_like(moving)
        _, *used = torch.autograd.grad(moving, leaves, zero, retain_graph=True, allow_unused=True)
        tangents = [(leaves[0], self._direction)]
        for (key, (variable, leaf)), gradient in zip(lowering.owned.items(), used, strict=True):
            change = None if gradient is None else self._of_moment(variable, key[1])
            if change is not None:
                tangents.append((leaf, change))
        result = pushed(moving, tangents)
        return None if result is None or not bool(result.any()) else result

    def _of_moment(self, v: Variable, square: bool) -> Tensor | None:
        """The derivative of a variable's mean, or mean square, (sites,)."""
        change, laws = self.of(v), self._lowering.laws
        if change is None:
            return None
        mean = laws.mean(change)
        return 2 * (laws.covariance(change, v).diagonal() + mean * laws.mean(v)) if square else mean


def squared_gradients(lowering: Lowering, end: Variable, kernel: Tensor) -> dict[str, float]:
    """Expected squared gradients of parameters that are used as numbers, up to MOST entries.

    Args:
        end: the output; `kernel`: (sites, sites) of its gradients.
    """
    laws, total = lowering.laws, dict[str, float]()
    count = 0
    for name, number in lowering.numbers.items():
        count += number.numel()
        if count > MOST:
            break
        squares = 0.0
        for entry in range(number.numel()):
            change = Changes(lowering, name, entry).of(end)
            if change is not None:
                squares += float((kernel * laws.moment(change, change)).sum())
        total[name] = squares
    return total


def _sum(v: Variable, summands: Sequence[Variable]) -> Variable | None:
    if not summands:
        return None
    terms = [Term(one, torch.ones((), dtype=torch.float64)) for one in summands]
    return combination(v.sites, v.features, terms)


def _zero_like(v: Variable) -> Variable:
    return Combination(sites=v.sites, features=v.features, gaussian=True, terms=[])
