"""From an objective to the weight variances and scales that reach it.

Variances of blocks or of the stream are solved block by block, other objectives by search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error, unknown_name, without_warnings
from ..formulas.checks import POSITIVE, Interval, check_interval
from ..model.streams import AltUp
from ..model.transformer import Transformer
from ..prediction.predict import predict
from ..prediction.result import Prediction
from .block import MATRICES, SOLVABLE, solvable
from .entering import entered
from .goals import GOALS, PROFILES, Goal, bounds, check_free, names_of, scaled, scaled_weights
from .largest import LARGEST, largest
from .layerwise import LAYERWISE, Target, reached, solve_blocks
from .plan import Plan
from .search import Search, least_squares, per_layer, root

# --- block by block -------------------------------------------------------------------------------


def by_block(
    model: Transformer,
    objective: str,
    target: Any,
    free: tuple[str, ...] | None,
    tolerance: float,
    inputs: Mapping[str, Any],
) -> Plan:
    """The plan for "stream_variance" or "block_variance"; its residual is from a separate forward
    pass through the solved model. DomainError if the model fixes the variance otherwise."""
    names = solvable(model) if free is None else free
    for name in names:
        if name not in SOLVABLE:
            raise domain_error("free", name, f"one of {', '.join(SOLVABLE)}")
    targets = _per_layer_targets(model, target, POSITIVE)
    of_sum = objective == "stream_variance"
    _check_blocks(model, objective)
    if of_sum:
        _check_stream(model, names)
    stack, memory = entered(model, inputs)
    signal = stack.enter()
    input_variance = float(stack.layout.average(signal.kernel.diagonal))
    after_block = _ramp(targets, input_variance, model)
    found = solve_blocks(
        model,
        signal,
        stack.layout,
        names,
        after_block if of_sum else lambda layer, _: float(targets[layer - 1]),
        of_sum,
        memory,
    )
    solved = model.replace(weights=scaled_weights(model, found.factors))
    values, value_targets, stream = _reached(solved, names, targets, of_sum, inputs)
    errors = np.abs(values / value_targets - 1)
    feasible = float(errors.max()) <= tolerance and not found.missed
    nearest = found.nearest if found.missed else float(values[errors.argmax()])
    return Plan(
        solved,
        objective,
        f"{LAYERWISE[objective]} = {_target_text(target)}",
        _stored_target(target),
        names,
        float(errors.max()),
        feasible=feasible,
        nearest=None if feasible else nearest,
        tolerance=tolerance,
        inputs=inputs,
        hint=_hint(objective, float(targets[0]), [input_variance, *stream]) if feasible else "",
    )


FAR = 10.0
"""Ratio between a target and the variance of layer 1's input, or its inverse, that gets a hint."""


def _hint(objective: str, target: float, stream: Sequence[float]) -> str:
    """The consequences of a target far from the variance of layer 1's input; "" if it is near."""
    start, end = stream[0], stream[-1]
    if start / FAR <= target <= FAR * start:
        return ""
    ratio = f"{target / start:.3g} times the variance that enters layer 1 ({start:.3g})"
    drowned = "hide the embedding" if target > start else "hardly change the embedding"
    return (
        f"a {objective} of {target:.3g} is {ratio}: the first blocks {drowned}, and the stream "
        f"goes from {start:.3g} to {end:.3g}; ask for a target near {start:.3g}, or scale the "
        "embedding first"
    )


def _check_blocks(model: Transformer, objective: str) -> None:
    """Raise DomainError if a layer reads earlier layers or is no sequence of sums, as blocks are
    solved one by one."""
    earlier = [n for n in ("values", "skips", "input_mix") if getattr(model, n) is not None]
    if earlier:
        raise DomainError(
            f"{objective} is not solved for with {', '.join(earlier)}, which read earlier layers: "
            "solve for final_variance"
        )
    if model.laurel is not None or isinstance(model.streams, AltUp):
        name = "streams=AltUp" if model.laurel is None else "laurel"
        raise DomainError(
            f"{objective} is not solved for with {name}, whose sums are not of a block alone: "
            "solve for final_variance"
        )


def _check_stream(model: Transformer, free: tuple[str, ...]) -> None:
    if model.streams is not None:
        raise DomainError(
            "stream_variance is not solved for with several residual streams: solve for "
            "block_variance"
        )
    after = {"post", "b2t", "hybrid"} & set(model.placements)
    if after or model.layernorm_scaling == "after-residual":
        raise DomainError(
            "stream_variance is set by what follows the sum: solve for block_variance"
        )
    if not {"ffn_in", "gate", "ffn_out"} & set(free):
        raise domain_error("free", free, "a feed-forward matrix too, which ends each layer")


def _reached(
    model: Transformer,
    names: tuple[str, ...],
    targets: np.ndarray,
    of_sum: bool,
    inputs: Mapping[str, Any],
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Variances that have a target, from a forward pass through the solved model; their targets;
    and the stream's variance behind every layer."""
    stack, _ = entered(model, inputs)
    free = {block for block, matrices in MATRICES.items() if set(matrices) & set(names)}
    judged = {"ffn"} if of_sum else free
    all_rows, stream = reached(stack)
    rows = [row for row in all_rows if row.block in judged]
    values = np.array([row.total if of_sum else row.output for row in rows])
    return values, targets[[row.layer - 1 for row in rows]], stream


def _ramp(targets: np.ndarray, input_variance: float, model: Transformer) -> Target:
    """Target of the stream after every block: equal steps between the targets of two layers."""
    ends = [input_variance, *targets.tolist()]
    blocks = ["attention", *(["cross"] if model.encoder is not None else []), "ffn"]
    shares = {block: (i + 1) / len(blocks) for i, block in enumerate(blocks)}
    return lambda n, block: ends[n - 1] + shares[block] * (ends[n] - ends[n - 1])


def _per_layer_targets(model: Transformer, target: Any, allowed: Interval) -> np.ndarray:
    """Targets of shape (N,), from one number or N."""
    check_interval("target", target, allowed)
    if np.shape(target) not in ((), (model.layers,)):
        raise domain_error("target", target, f"one number, or one per layer ({model.layers})")
    return np.broadcast_to(np.asarray(target, dtype=float), model.layers)


def _target_text(target: Any) -> str:
    return f"{target:g}" if np.ndim(target) == 0 else "one value per layer"


def _stored_target(target: Any) -> float | tuple[float, ...]:
    return float(target) if np.ndim(target) == 0 else tuple(float(v) for v in target)


# --- by search ------------------------------------------------------------------------------------

Inputs = Mapping[str, Any]


def objectives() -> dict[str, str]:
    """Name and meaning of every objective but the schemes."""
    searched = {goal.name: goal.title for goal in (*GOALS.values(), *PROFILES.values())}
    return LAYERWISE | searched | LARGEST


def solve_objective(
    model: Transformer,
    objective: str | Sequence[tuple[str, float]],
    *,
    target: float | Sequence[float] | None = None,
    free: str | Sequence[str] | None = None,
    bound: tuple[str, float] | None = None,
    tolerance: float = 1e-9,
    progress: bool = False,
    **inputs: Any,
) -> Plan:
    """A plan for one of `objectives()`, or several; `moments.solve` without the schemes."""
    single = isinstance(objective, str)
    bounded = single and objective in LARGEST
    if bound is not None and not bounded:
        raise domain_error("bound", bound, f"left out, but for {' and '.join(LARGEST)}")
    if target is not None and (bounded or not single):
        raise domain_error("target", target, "left out: bound, or the pairs, say what to reach")
    target = 1.0 if target is None else target
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
            raise domain_error("objective", name, f"one of {', '.join(GOALS)} in pairs")
        check_interval(f"target of {name}", target, GOALS[name].allowed)
    if not pairs:
        raise domain_error("objective", objective, "one or more pairs (objective, target)")
    return [(GOALS[name], float(target)) for name, target in pairs]


class _Task:
    """A model to be solved for given inputs to a tolerance."""

    def __init__(self, model: Transformer, inputs: Inputs, tolerance: float) -> None:
        self.model, self.inputs, self.tolerance = model, inputs, tolerance

    def predicted(self, model: Transformer) -> Prediction:
        with without_warnings():
            return predict(model, **self.inputs)

    def goal(self, goal: Goal, target: Any, free: tuple[str, ...] | None) -> Plan:
        check_interval("target", target, goal.allowed)
        if np.ndim(target):
            raise domain_error("target", target, f"one number for {goal.name}")
        pairs, names = [(goal, float(target))], goal.free if free is None else free

        def distance(log: float) -> float:
            return self._distances(pairs, scaled(self.model, names, math.exp(log)))[0]

        if goal.at_most and "k" not in names and distance(0.0) <= 0:
            return self._plan(pairs, goal.name, names, self.model, True)
        found = root(distance, bounds(self.model, names), self.tolerance)
        solved = scaled(self.model, names, math.exp(found.at))
        return self._plan(pairs, goal.name, names, solved, found.reached)

    def several(self, pairs: list[tuple[Goal, float]], free: tuple[str, ...] | None) -> Plan:
        defaults = dict.fromkeys(name for goal, _ in pairs for name in goal.free)
        names = tuple(defaults) if free is None else free

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
        return self._plan(pairs, title, names, at(found.at), found.reached)

    def profile(self, goal: Goal, target: Any, free: tuple[str, ...] | None) -> Plan:
        targets = _per_layer_targets(self.model, target, goal.allowed)
        names = goal.free if free is None else free
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
        errors = np.abs(values / targets - 1)
        feasible = found.reached and float(errors.max()) <= self.tolerance
        return Plan(
            solved,
            goal.name,
            f"{goal.title} = {_target_text(target)}",
            _stored_target(target),
            names,
            float(errors.max()),
            feasible=feasible,
            nearest=None if feasible else float(values[errors.argmax()]),
            tolerance=self.tolerance,
            inputs=self.inputs,
        )

    def _distances(self, pairs: list[tuple[Goal, float]], model: Transformer) -> list[float]:
        try:
            prediction = self.predicted(model)
        except DomainError:
            return [math.nan] * len(pairs)
        return [float(goal.distance(goal.value(prediction), target)) for goal, target in pairs]

    def _plan(
        self,
        pairs: list[tuple[Goal, float]],
        objective: str,
        names: tuple[str, ...],
        solved: Transformer,
        reached: bool,
    ) -> Plan:
        prediction = self.predicted(solved)
        values = [float(goal.value(prediction)) for goal, _ in pairs]
        residual = 0.0
        for value, (goal, target) in zip(values, pairs, strict=True):
            error = max(value - target, 0.0) if goal.at_most else abs(value - target)
            residual = max(residual, error / max(abs(target), 1e-12))
        feasible = reached and residual <= self.tolerance
        words = (
            f"{goal.title} {'at most' if goal.at_most else '='} {target:g}"
            for goal, target in pairs
        )
        single = len(pairs) == 1
        return Plan(
            solved,
            objective,
            ", ".join(words),
            pairs[0][1] if single else tuple(target for _, target in pairs),
            names,
            residual,
            feasible=feasible,
            nearest=None if feasible else values[0] if single else tuple(values),
            tolerance=self.tolerance,
            inputs=self.inputs,
        )
