"""Gradients of numbers that multiply a whole stream: lambdas, weights of skips, scales of a layer.

One such number acts on all features of a place at once, so that it moves norms, activations and
softmaxes by itself, and a norm behind it takes away what it adds along the stream. Its squared
gradient is the second moment of how the output changes with it, and every variable's change is a
variable again, jointly random with it.
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
"""Numbers of a module that are followed; each takes about as long as the signal's way."""


class Changes:
    """How variables change with one entry of a parameter that is used as a number.

    Args:
        lowering: of the module.
        name: of the parameter.
        entry: which of its entries.
    """

    def __init__(self, lowering: Lowering, name: str, entry: int) -> None:
        self._lowering, self._name = lowering, name
        number = lowering.numbers[name]
        self._direction = torch.zeros(number.numel(), dtype=number.dtype)
        self._direction[entry] = 1.0
        self._direction = self._direction.reshape(number.shape)
        self._made: dict[int, Variable | None] = {}

    def of(self, v: Variable) -> Variable | None:
        """The derivative of a variable; None: it does not change."""
        if v.number not in self._made:
            self._made[v.number] = self._of(v)
        return self._made[v.number]

    def _of(self, v: Variable) -> Variable | None:
        match v:
            case Product(source=Variable() as source):
                change = self.of(source)
                return None if change is None else replace(v, source=change, number=next(NUMBERS))
            case Combination():
                return self._of_sum(v)
            case Blend():
                change, mixing = self.of(v.inner), self.of_numbers(v.moving)
                made: list[Variable] = []
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
                    made.append(blended)
                if mixing is not None:
                    made.append(replace(v, mixing=mixing, moving=None, number=next(NUMBERS)))
                return _sum(v, made)
            case Joined():
                changes = [self.of(piece) for piece, _ in v.pieces]
                if all(change is None for change in changes):
                    return None
                pieces = [
                    (_nothing(piece) if change is None else change, first)
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
            case Times():
                (a, b), (one, other) = v.parents, map(self.of, v.parents)
                pairs = ((one, b), (a, other))
                both = [(x, y) for x, y in pairs if x is not None and y is not None]
                return _sum(v, [times(x, y, v.at, v.sites, v.features) for x, y in both])
            case Mix():
                (a, b), (one, other) = v.parents, map(self.of, v.parents)
                pairs = ((one, b), (a, other))
                return _sum(
                    v,
                    [
                        replace(
                            v, weights=x, values=y, roots=x.roots | y.roots, number=next(NUMBERS)
                        )
                        for x, y in pairs
                        if x is not None and y is not None
                    ],
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
        under = {cut.variable.number: cut.variable for cut in plan.cuts.values()}
        changes = {n: change for n, u in under.items() if (change := self.of(u)) is not None}
        read = {value for n in plan.nodes for value in self._lowering.graph.nodes[n].inputs}
        numbers = {}
        for value in sorted(read - plan.cuts.keys()):
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
        leaves = [leaf for _, leaf in lowering.owned.values()]
        back = torch.zeros_like(moving)
        used = torch.autograd.grad(moving, leaves, back, retain_graph=True, allow_unused=True)
        moved = [(lowering.numbers[self._name], self._direction)]
        for (key, (variable, leaf)), got in zip(lowering.owned.items(), used, strict=True):
            change = None if got is None else self._own(variable, key[1])
            if change is not None:
                moved.append((leaf, change))
        made = pushed(moving, moved)
        return None if made is None or not bool(made.any()) else made

    def _own(self, v: Variable, square: bool) -> Tensor | None:
        """The derivative of a variable's mean, or mean square, (sites,)."""
        change, laws = self.of(v), self._lowering.laws
        if change is None:
            return None
        mean = laws.mean(change)
        return 2 * (laws.covariance(change, v).diagonal() + mean * laws.mean(v)) if square else mean


def squared_gradients(lowering: Lowering, end: Variable, kernel: Tensor) -> dict[str, float]:
    """By parameter that is used as a number, its expected squared gradient, for a kernel (sites,
    sites) of gradients at a variable; without those of more than MOST entries together."""
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


def _sum(v: Variable, made: Sequence[Variable]) -> Variable | None:
    if not made:
        return None
    terms = [Term(one, torch.ones((), dtype=torch.float64)) for one in made]
    return combination(v.sites, v.features, terms)


def _nothing(v: Variable) -> Variable:
    return Combination(sites=v.sites, features=v.features, gaussian=True, terms=[])
