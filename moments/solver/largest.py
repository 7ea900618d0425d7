"""The largest k or depth that keeps an objective within a bound, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import domain_error
from ..formulas.checks import check_number
from ..model.transformer import Transformer
from ..prediction.result import Prediction
from .entering import entered
from .goals import GOALS, bounds, scaled
from .plan import Plan
from .search import or_nan

LARGEST = {
    "largest_k": "the largest k of branch_scale^2 = k/N, skip_scale^2 = 1 - k/N within a bound",
    "largest_depth": "the largest number of layers within a bound",
}
DEPTH_MAX = 1024
"""Largest depth of a search."""
MOST_PAIRS = 2**20
"""Largest number of layers times pairs of tokens; a prediction stores about 1 kB for each."""
CLOSE = 1e-12
"""Relative width of the interval for k at which the bisection ends."""


def largest(
    model: Transformer,
    objective: str,
    bound: Any,
    predict: Callable[[Transformer], Prediction],
    inputs: Mapping[str, Any],
    progress: bool = False,
) -> Plan:
    """The plan of the largest k or depth, assuming that a broken bound stays broken beyond it."""
    if not isinstance(bound, list | tuple) or len(bound) != 2 or bound[0] not in tuple(GOALS):
        raise domain_error("bound", bound, f"(goal, most), goal one of {', '.join(GOALS)}")
    goal = GOALS[bound[0]]
    most = check_number(f"bound on {goal.name}", bound[1], goal.allowed)
    kind = objective.removeprefix("largest_")

    def value(candidate: Transformer) -> float:
        number = or_nan(lambda: float(goal.value(predict(candidate))))
        if progress and kind == "depth":
            _print(f"{candidate.layers} layers: {goal.title} {number:.4g}, the bound is {most:g}")
        return number

    if kind == "depth":
        _check_any_depth(model)
        limit = _limit(entered(model.replace(layers=1), inputs)[0].first.off_diagonal)
        trials = [*(2.0**i for i in range((limit - 1).bit_length())), float(limit)]

        def at(x: float) -> Transformer:
            return model.replace(layers=int(x))
    else:
        limit = None
        low, high = bounds(model, ("k",))
        trials = [low, high]

        def at(x: float) -> Transformer:
            return scaled(model, ("k",), math.exp(x))

    x, width = _bisect(lambda x: value(at(x)) <= most, trials, 1.0 if limit else CLOSE)
    solved, feasible = at(trials[0] if x is None else x), x is not None
    title = f"largest {kind} with {goal.title} at most {most:g}"
    if x is not None:
        title += f": {x:.0f}" if limit else f": {math.exp(x):.6g}"
        title += ", the largest tried" if x == trials[-1] else ""
    return Plan(
        solved,
        objective,
        title,
        most,
        ("layers",) if limit else ("k",),
        residual=0.0 if limit else width,
        feasible=feasible,
        nearest=None if feasible else value(solved),
        inputs=inputs,
    )


def _bisect(
    allowed: Callable[[float], bool], trials: list[float], close: float
) -> tuple[float | None, float]:
    """The largest allowed number, and the width of the interval left above it: at most `close`,
    which is 1 for whole numbers. None if not even the first of the increasing `trials` is allowed.
    """
    if not allowed(trials[0]):
        return None, 0.0
    high = next((trial for trial in trials[1:] if not allowed(trial)), None)
    if high is None:
        return trials[-1], 0.0
    low = max(trial for trial in trials if trial < high)
    while high - low > close:
        middle = (low + high) / 2 if close < 1 else (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low, high - low


def _check_any_depth(model: Transformer) -> None:
    for name in ("skip_scale", "branch_scale", "norm_gain", "temperature", "window"):
        if isinstance(getattr(model, name), tuple):
            raise domain_error(name, "one entry per layer", "one number for a model of any depth")
    if model.post_layers:
        raise domain_error("post_layers", model.post_layers, "0 for a model of any depth")


def _limit(pairs: Any) -> int:
    """The largest depth that is predicted, by the number of token pairs in a layer."""
    tokens = np.shape(pairs)[-1] if np.ndim(pairs) else 1
    return max(2, min(DEPTH_MAX, MOST_PAIRS // (tokens * tokens)))


def _print(text: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).print(text, soft_wrap=True, markup=False)
