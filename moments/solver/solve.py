"""From an objective to the weight variances and scales that meet it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DomainError, ValidityWarning, domain_error, unknown_name
from ..formulas.checks import check_in
from ..model.transformer import Transformer
from ..prediction.predict import predict
from ..prediction.result import Prediction
from .by_block import by_block, per_layer_targets, stored, worded
from .goals import GOALS, PROFILES, Goal
from .largest import LARGEST, largest
from .layerwise import LAYERWISE
from .plan import Plan
from .search import Search, least_squares, per_layer, root
from .variables import bounds, check_free, names_of, scaled

Inputs = Mapping[str, Any]


def objectives() -> dict[str, str]:
    """Name and meaning of every objective besides the schemes."""
    found = dict(LAYERWISE)
    found |= {goal.name: goal.title for goal in (*GOALS.values(), *PROFILES.values())}
    return found | LARGEST


def solve_objective(
    model: Transformer,
    objective: str | Sequence[tuple[str, float]],
    *,
    target: float | Sequence[float] = 1.0,
    free: str | Sequence[str] | None = None,
    bound: tuple[str, float] | None = None,
    tolerance: float = 1e-9,
    progress: bool = False,
    **inputs: Any,
) -> Plan:
    """A plan that meets one of `objectives()`, or several; `moments.solve` without the schemes."""
    names = names_of(free)
    if names is not None:
        check_free(model, names)
    task = _Task(model, inputs, tolerance)
    if not isinstance(objective, str):
        return task.several(_pairs(objective), names)
    if objective in LAYERWISE:
        return by_block(model, objective, target, names, tolerance, inputs)
    if objective in GOALS:
        return task.goal(GOALS[objective], target, names)
    if objective in PROFILES:
        return task.profile(PROFILES[objective], target, names)
    if objective in LARGEST:
        return largest(model, objective, bound, task.predicted, inputs, progress)
    raise unknown_name("objective", objective, list(objectives()))


def _pairs(objective: Any) -> list[tuple[Goal, float]]:
    try:
        pairs = [(name, target) for name, target in objective]
    except (TypeError, ValueError):
        raise domain_error("objective", objective, "a name, or pairs (objective, target)") from None
    for name, target in pairs:
        if name not in GOALS:
            raise domain_error("objective", name, f"one of {', '.join(GOALS)} beside another")
        check_in(f"target of {name}", target, GOALS[name].allowed)
    if not pairs:
        raise domain_error("objective", objective, "one or more pairs (objective, target)")
    return [(GOALS[name], float(target)) for name, target in pairs]


class _Task:
    """A model, the inputs it is solved for, and how closely."""

    def __init__(self, model: Transformer, inputs: Inputs, tolerance: float) -> None:
        self.model, self.inputs, self.tolerance = model, inputs, tolerance

    def predicted(self, model: Transformer) -> Prediction:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ValidityWarning)
            return predict(model, **self.inputs)

    def goal(self, goal: Goal, target: Any, free: tuple[str, ...] | None) -> Plan:
        check_in("target", target, goal.allowed)
        if np.ndim(target):
            raise domain_error("target", target, f"one number for {goal.name}")
        wanted, names = float(target), goal.free if free is None else free

        def distance(log: float) -> float:
            return self._distances([(goal, wanted)], scaled(self.model, names, math.exp(log)))[0]

        if goal.at_most and "k" not in names and distance(0.0) <= 0:
            return self._plan([(goal, wanted)], goal.name, names, self.model, True)
        found = root(distance, bounds(self.model, names), self.tolerance)
        solved = scaled(self.model, names, math.exp(found.at))
        return self._plan([(goal, wanted)], goal.name, names, solved, found.met)

    def several(self, pairs: list[tuple[Goal, float]], free: tuple[str, ...] | None) -> Plan:
        freed = dict.fromkeys(name for goal, _ in pairs for name in goal.free)
        names = tuple(freed) if free is None else free

        def at(logs: np.ndarray) -> Transformer:
            changed = self.model
            for name, log in zip(names, logs, strict=True):
                changed = scaled(changed, (name,), math.exp(log))
            return changed

        ends = [bounds(self.model, (name,)) for name in names]
        found = least_squares(
            lambda logs: np.array(self._distances(pairs, at(logs))), ends, self.tolerance
        )
        title = ", ".join(goal.name for goal, _ in pairs)
        return self._plan(pairs, title, names, at(found.at), found.met)

    def profile(self, goal: Goal, target: Any, free: tuple[str, ...] | None) -> Plan:
        targets, names = (
            per_layer_targets(self.model, target, goal.allowed),
            goal.free if free is None else free,
        )
        if "k" in names:
            raise domain_error("free", "k", "what each layer can have of its own")
        low, high = bounds(self.model, names)
        found: Search = per_layer(
            lambda logs: goal.distance(
                goal.value(self.predicted(scaled(self.model, names, np.exp(logs)))), targets
            ),
            self.model.layers,
            (max(low, -12.0), min(high, 12.0)),
            self.tolerance,
        )
        solved = scaled(self.model, names, np.exp(found.at))
        values = np.asarray(goal.value(self.predicted(solved)))
        far = np.abs(values / targets - 1)
        met = found.met and float(far.max()) <= self.tolerance
        return Plan(
            solved,
            goal.name,
            f"{goal.title} = {worded(target)}",
            stored(target),
            names,
            float(far.max()),
            feasible=met,
            nearest=None if met else float(values[far.argmax()]),
            tolerance=self.tolerance,
            inputs=self.inputs,
        )

    def _distances(self, pairs: list[tuple[Goal, float]], model: Transformer) -> list[float]:
        try:
            found = self.predicted(model)
        except DomainError:
            return [math.nan] * len(pairs)
        return [float(goal.distance(goal.value(found), wanted)) for goal, wanted in pairs]

    def _plan(
        self,
        pairs: list[tuple[Goal, float]],
        objective: str,
        names: tuple[str, ...],
        solved: Transformer,
        met: bool,
    ) -> Plan:
        found = self.predicted(solved)
        values = [float(goal.value(found)) for goal, _ in pairs]
        far = [
            max(value - wanted, 0.0) if goal.at_most else abs(value - wanted)
            for value, (goal, wanted) in zip(values, pairs, strict=True)
        ]
        residual = max(
            far_one / max(abs(wanted), 1e-12)
            for far_one, (_, wanted) in zip(far, pairs, strict=True)
        )
        met = met and residual <= self.tolerance
        words = (
            f"{goal.title} {'at most' if goal.at_most else '='} {wanted:g}"
            for goal, wanted in pairs
        )
        single = len(pairs) == 1
        return Plan(
            solved,
            objective,
            ", ".join(words),
            pairs[0][1] if single else tuple(wanted for _, wanted in pairs),
            names,
            residual,
            feasible=met,
            nearest=None if met else values[0] if single else tuple(values),
            tolerance=self.tolerance,
            inputs=self.inputs,
        )
