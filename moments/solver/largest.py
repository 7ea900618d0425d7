"""The largest k or depth that keeps a number of the prediction within a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..checks import check_in
from ..errors import domain_error
from ..prediction import Prediction
from ..transformer import Transformer
from .goals import GOALS
from .plan import Plan
from .search import or_nan
from .variables import bounds, scaled

LARGEST = {
    "largest_k": "the largest k of branch_scale^2 = k/N, skip_scale^2 = 1 - k/N within a bound",
    "largest_depth": "the largest number of layers within a bound",
}
DEPTH_MAX = 4096
"""Depth at which a search ends."""
HALVINGS = 50

Predict = Callable[[Transformer], Prediction]


def largest(model: Transformer, objective: str, bound: Any, predict: Predict, inputs: Any) -> Plan:
    """The plan of the largest k or depth; a bound once broken is taken to stay so.

    Raises:
        DomainError: no such bound, or a model whose depth is written into its fields.
    """
    if not isinstance(bound, list | tuple) or len(bound) != 2 or bound[0] not in GOALS:
        raise domain_error("bound", bound, f"(goal, most), goal one of {', '.join(GOALS)}")
    goal, most = GOALS[bound[0]], bound[1]
    check_in(f"bound on {goal.name}", most, goal.allowed)
    what = objective.removeprefix("largest_")
    title = f"largest {what} with {goal.title} at most {most:g}"

    def value(candidate: Transformer) -> float:
        return or_nan(lambda: float(goal.value(predict(candidate))))

    search = _depth if what == "depth" else _k
    found, kept, spread = search(model, lambda candidate: value(candidate) <= most)
    k = found.layers * float(found.by_block("branch_scale")[0, 0]) ** 2
    reached = found.layers if what == "depth" else k
    title += f": {reached:.6g}" if kept else ""
    if what == "depth" and found.layers == DEPTH_MAX:
        title += ", where the search ends"
    elif what == "k" and kept and spread == 0:
        title += ", the whole range"
    free = ("layers",) if what == "depth" else ("k",)
    return Plan(
        found,
        objective,
        title,
        float(most),
        free,
        residual=spread,
        feasible=kept,
        nearest=None if kept else value(found),
        inputs=inputs,
    )


Kept = Callable[[Transformer], bool]


def _k(model: Transformer, kept: Kept) -> tuple[Transformer, bool, float]:
    """By halving log k; the width that is left, relative."""
    low, high = bounds(model, ("k",))

    def at(log: float) -> Transformer:
        return scaled(model, ("k",), math.exp(log))

    if not kept(at(low)):
        return at(low), False, 0.0
    if kept(at(high)):
        return at(high), True, 0.0
    for _ in range(HALVINGS):
        if high - low < 1e-12:
            break
        middle = (low + high) / 2
        low, high = (middle, high) if kept(at(middle)) else (low, middle)
    return at(low), True, high - low


def _depth(model: Transformer, kept: Kept) -> tuple[Transformer, bool, float]:
    """By doubling, then halving; the depth found keeps the bound and one more layer breaks it."""
    for name in ("skip_scale", "branch_scale", "norm_gain", "temperature", "window"):
        if isinstance(getattr(model, name), tuple):
            raise domain_error(name, "one entry per layer", "one number for a model of any depth")
    if model.post_layers:
        raise domain_error("post_layers", model.post_layers, "0 for a model of any depth")

    def at(depth: int) -> Transformer:
        return model.replace(layers=depth)

    if not kept(at(1)):
        return at(1), False, 0.0
    low, high = 1, 2
    while high <= DEPTH_MAX and kept(at(high)):
        low, high = high, 2 * high
    while high <= DEPTH_MAX and high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kept(at(middle)) else (low, middle)
    return at(low), True, 0.0
