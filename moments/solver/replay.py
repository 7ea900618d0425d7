"""The walk block by block on a layer's program: layers like one that was solved in plain.

One replay tells what every block of a layer comes to, so that the factors of all of them are sought
at once, from those of the layer before: by secants in logarithms, a block's slope being measured
where the blocks before it have settled. What does not settle is left to the plain walk, which knows
what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..engine.composition import Component
from ..engine.program import LIBRARY, NOT_REPLAYED, Apart, Told, site_variances, taken_apart
from ..engine.state import Signal
from ..engine.trace import Record
from .block import MATRICES
from .factor import CLOSE, LIMIT, SECANTS

Target = Callable[[int, str], float]


class _Group(NamedTuple):
    """Matrices that share a factor.

    Attributes:
        names: of the matrices.
        places: of their variances among the layer's numbers.
        block, site: whose variance has a target.
        power: of the factor, which it goes with where nothing saturates or is added.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    block: str
    site: str
    power: int


class _Solved(NamedTuple):
    """The last layer of one shape: its groups, and the logarithms of their factors."""

    groups: tuple[_Group, ...]
    logs: list[float]


def _told(record: Record) -> dict[str, Any]:
    """Variances of all sites, what every sum gained, and by name of the matrix before it what share
    of its laws' domain an activation's input has."""
    found = site_variances(record)
    for one in record.walk():
        part: Any = one.component
        if (total := part.addition(one)) is not None:
            found[f"{part.label} gained"] = total.added.output.kernel.diagonal * total.adding
        elif part.hidden is not None:
            signal, before = one.input, "gate" if part.matrices else "ffn_in"
            found[before] = part.domain_share(signal.mean, signal.kernel.diagonal, signal.algebra)
    return found


class Replay:
    """Layers solved on programs, tokens alike.

    Args:
        bodies: of all layers.
        free, target, of_sum: as those of `layerwise.solve_blocks`.
    """

    def __init__(
        self, bodies: Sequence[Component], free: tuple[str, ...], target: Target, of_sum: bool
    ) -> None:
        self._bodies = bodies
        self._free, self._target, self._of_sum = free, target, of_sum
        self._solved: dict[int, _Solved] = {}
        self._left: tuple[Signal, Told] | None = None
        self._failed = False
        with LIBRARY.busy:
            try:
                self._apart = LIBRARY.apart(bodies)
            except NOT_REPLAYED:
                self._failed = True

    def layer(self, number: int, signal: Signal) -> tuple[Signal, Mapping[str, float]] | None:
        """What leaves layer `number` once its blocks meet their targets, and the factors on its
        matrices. None: the plain walk is to solve it."""
        if self._failed or not LIBRARY.busy.acquire(blocking=False):
            return None
        try:
            apart = self._apart[number - 1]
            before = self._solved.get(apart.shape)
            return before and self._sought(number, apart, before, signal)
        except NOT_REPLAYED:
            self._failed = True
            return None
        finally:
            LIBRARY.busy.release()

    def learn(self, number: int, signal: Signal, factors: Mapping[str, float]) -> None:
        """Where the plain walk has solved a layer, those of its shape may start from there."""
        if self._failed or not LIBRARY.busy.acquire(blocking=False):
            return
        try:
            apart = self._apart[number - 1]
            told = LIBRARY.step(apart, self._entering(signal), _told).read
            groups = tuple(self._groups(self._bodies[number - 1], apart, list(told)))
            if set(self._free) == {name for group in groups for name in group.names}:
                logs = [math.log(factors[group.names[0]]) for group in groups]
                self._solved[apart.shape] = _Solved(groups, logs)
        except NOT_REPLAYED:
            self._failed = True
        finally:
            LIBRARY.busy.release()

    def _entering(self, signal: Signal) -> Told:
        """A signal's structure and numbers: those that left the layer before, where it did."""
        if self._left is None or self._left[0] is not signal:
            numbers: list[Any] = []
            structure = taken_apart(signal, numbers)
            self._left = signal, Told(structure, tuple(numbers), {})
        return self._left[1]

    def _groups(self, body: Component, apart: Apart, sites: Sequence[str]) -> list[_Group]:
        found, waiting = [], []
        for site in sites:
            block, _, kind = site.partition(".")
            if kind == "dropout" and block in MATRICES:
                names = tuple(name for name in MATRICES[block] if name in self._free)
                if names and self._of_sum:
                    waiting.append(names)
                elif names:
                    places = self._places(body, apart, names)
                    found.append(_Group(names, places, block, site, len(names)))
            elif kind == "sum" and waiting:
                names = tuple(name for group in waiting for name in group)
                places = self._places(body, apart, names)
                found.append(_Group(names, places, block, site, min(map(len, waiting))))
                waiting = []
        return found

    def _places(self, body: Component, apart: Apart, names: tuple[str, ...]) -> tuple[int, ...]:
        numbers: list[Any] = []
        taken_apart(body.with_variances(names, 2.0), numbers)
        pairs = enumerate(zip(apart.numbers, numbers, strict=True))
        return tuple(place for place, (one, other) in pairs if one != other)

    def _sought(
        self, number: int, apart: Apart, before: _Solved, signal: Signal
    ) -> tuple[Signal, Mapping[str, float]] | None:
        entering = self._entering(signal)
        groups, logs = before
        aims = [self._target(number, group.block) for group in groups]
        slopes = [float(group.power) for group in groups]
        last: tuple[list[float], list[float]] | None = None
        for _ in range(SECANTS):
            numbers = list(apart.numbers)
            for group, log in zip(groups, logs, strict=True):
                for place in group.places:
                    numbers[place] *= math.exp(log)
            leaving = LIBRARY.step(apart._replace(numbers=numbers), entering, _told)
            told = leaving.read
            far = [self._far(told, g, aim) for g, aim in zip(groups, aims, strict=True)]
            if max(far) == math.inf:
                return None
            if max(map(abs, far)) <= CLOSE:
                if not self._inside(groups, logs, told):
                    return None
                self._solved[apart.shape] = _Solved(groups, logs)
                factors = {
                    n: math.exp(g) for one, g in zip(groups, logs, strict=True) for n in one.names
                }
                self._left = leaving.signal, leaving
                return self._left[0], factors
            if last is not None:
                slopes = _measured(groups, slopes, (logs, far), last)
            last = logs, far
            logs = [log - d / slope for log, d, slope in zip(logs, far, slopes, strict=True)]
            if max(map(abs, logs)) > LIMIT:
                return None
        return None

    def _far(self, told: Mapping[str, float], group: _Group, aim: float) -> float:
        """Logarithm of what the free matrices give over what they should; infinite where what is
        there without them is too much."""
        given = told[group.site]
        if self._of_sum:
            gained = told[f"{group.site} gained"]
            given, aim = gained, aim - (given - gained)
        return math.log(given / aim) if given > 0 < aim else math.inf

    def _inside(
        self, groups: Sequence[_Group], logs: Sequence[float], told: Mapping[str, float]
    ) -> bool:
        """Whether no factor is beyond what the plain walk allows it."""
        for group, log in zip(groups, logs, strict=True):
            for name in ("ffn_in", "gate"):
                if name in told and {"ffn_in", "gate", "ffn_out"} & set(group.names):
                    share = told[name] * (1.0 if name in group.names else math.exp(log))
                    if share > 1.0:
                        return False
        return True


def _measured(
    groups: Sequence[_Group],
    slopes: Sequence[float],
    now: tuple[list[float], list[float]],
    last: tuple[list[float], list[float]],
) -> list[float]:
    """The slopes, that of the first group that had not settled by a difference."""
    found = list(slopes)
    for k, group in enumerate(groups):
        step = now[0][k] - last[0][k]
        if abs(last[1][k]) > CLOSE and step:
            slope = (now[1][k] - last[1][k]) / step
            # Ten times off what powers say, a difference is of rounding or of a block before that
            # moved. It guards the search alone: what is not `CLOSE` in the end is left to the plain
            # walk.
            found[k] = slope if 0.1 < slope / group.power < 10 else found[k]
            break
    return found
