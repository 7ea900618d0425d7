"""The largest k or depth that keeps a number of the prediction within a bound.

A stack's first layers are a shallower stack. The largest depth of a bound on the stream is
therefore found by one walk, a layer at a time, that keeps no trace; only a bound on gradients,
which enter at the top, takes a prediction per depth, by doubling and halving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..engine.composition import forward
from ..engine.state import ratio_or_zero
from ..errors import DomainError, domain_error
from ..formulas.checks import check_number
from ..model.transformer import Transformer
from ..prediction.result import Prediction
from ..transfer.architecture import check_coverage, declare_layer
from .entering import entered
from .goals import GOALS, Goal, bounds, scaled
from .plan import Plan
from .search import or_nan

LARGEST = {
    "largest_k": "the largest k of branch_scale^2 = k/N, skip_scale^2 = 1 - k/N within a bound",
    "largest_depth": "the largest number of layers within a bound",
}
DEPTH_MAX = 4096
"""Depth at which a search ends."""
WALKED_PAIRS = 2**24
"""Layers times pairs of tokens that a walk passes, 4096 layers of 64 tokens: some minutes."""
HELD_PAIRS = 2**20
"""Likewise of a prediction, whose trace holds about a kilobyte of each: a gigabyte."""
SETTLING = 0.8
"""Ratio of successive changes, at depths that double, up to which a value is taken to settle."""
LEAST_SEEN = 32
"""Layers below which nothing is said of what deeper stacks do."""
HALVINGS = 50

Predict = Callable[[Transformer], Prediction]


def largest(
    model: Transformer,
    objective: str,
    bound: Any,
    predict: Predict,
    inputs: Mapping[str, Any],
    progress: bool = False,
) -> Plan:
    """The plan of the largest k or depth; a bound once broken is taken to stay so.

    Raises:
        DomainError: no such bound, or a model whose depth is written into its fields.
    """
    if not isinstance(bound, list | tuple) or len(bound) != 2 or bound[0] not in tuple(GOALS):
        raise domain_error("bound", bound, f"(goal, most), goal one of {', '.join(GOALS)}")
    goal = GOALS[bound[0]]
    most = check_number(f"bound on {goal.name}", bound[1], goal.allowed)
    title = f"largest {objective.removeprefix('largest_')} with {goal.title} at most {most:g}"

    def value(candidate: Transformer) -> float:
        return or_nan(lambda: float(goal.value(predict(candidate))))

    if objective == "largest_depth":
        _check_any_depth(model)
        search = _Depths(goal, most, progress)
        if goal.of_stream:
            depth, reached, ending = search.walked(model, inputs)
        else:
            depth, reached, ending = search.predicted(model, inputs, value)
        kept = reached <= most
        return Plan(
            model.replace(layers=depth),
            objective,
            f"{title}: {depth}{ending}" if kept else title,
            most,
            ("layers",),
            feasible=kept,
            nearest=None if kept else reached,
            inputs=inputs,
        )
    found, kept, spread = _k(model, lambda candidate: value(candidate) <= most)
    if kept:
        title += f": {found.layers * float(found.by_block('branch_scale')[0, 0]) ** 2:.6g}"
        title += ", the whole range" if spread == 0 else ""
    return Plan(
        found,
        objective,
        title,
        most,
        ("k",),
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


def _check_any_depth(model: Transformer) -> None:
    for name in ("skip_scale", "branch_scale", "norm_gain", "temperature", "window"):
        if isinstance(getattr(model, name), tuple):
            raise domain_error(name, "one entry per layer", "one number for a model of any depth")
    if model.post_layers:
        raise domain_error("post_layers", model.post_layers, "0 for a model of any depth")


class DepthReached(NamedTuple):
    """Where a search for the largest depth ended.

    Attributes:
        depth: the largest that keeps the bound, of those tried; 1 where none does.
        value: of the bounded quantity there.
        ending: for a title: why no larger depth is named; "" where one more layer breaks the bound.
    """

    depth: int
    value: float
    ending: str = ""


class _Depths:
    """A search over depths, and what the doublings seen so far say of those to come."""

    def __init__(self, goal: Goal, most: float, progress: bool) -> None:
        self.goal, self.most, self.progress = goal, most, progress
        self.seen: list[float] = []

    def walked(self, model: Transformer, inputs: Mapping[str, Any]) -> DepthReached:
        """Layer by layer, to the first that breaks the bound."""
        stack, memory = entered(model.replace(layers=1), inputs)
        check_coverage(model, "refined")
        layout, kept = stack.layout, math.nan
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            signal = stack.enter()
            limit = _limit(WALKED_PAIRS, signal.kernel.pairs)
            for depth in range(1, limit + 1):
                if depth & (depth - 1) == 0:
                    # Deep enough for the next layers: a declaration as deep as any costs more.
                    deep = model.replace(layers=2 * depth)
                layer = declare_layer(deep, "refined", depth, *layout.places)
                try:
                    signal = forward(layer, signal, memory)[0]
                    value = self._of(*layout.token_average(signal.kernel))
                except (DomainError, OverflowError, ZeroDivisionError):
                    value = math.nan
                if not value <= self.most:
                    return DepthReached(1, value) if depth == 1 else DepthReached(depth - 1, kept)
                kept = value
                if depth & (depth - 1) == 0 and (ending := self._ending(depth, value)):
                    return DepthReached(depth, value, ending)
        return DepthReached(limit, kept, ", where the search ends")

    def _of(self, variance: Any, covariance: Any) -> float:
        moments = {"variance": variance, "correlation": ratio_or_zero(covariance, variance)}
        return float(moments[self.goal.name.removeprefix("final_")])

    def predicted(
        self, model: Transformer, inputs: Mapping[str, Any], value: Callable[[Transformer], float]
    ) -> DepthReached:
        """By doubling, then halving; one more layer than the depth found breaks the bound."""
        limit = _limit(HELD_PAIRS, entered(model.replace(layers=1), inputs)[0].first.pairs)

        def at(depth: int) -> float:
            return value(model.replace(layers=depth))

        low, kept = 1, at(1)
        if not kept <= self.most:
            return DepthReached(1, kept)
        broken = limit + 1
        while low < limit:
            if ending := self._ending(low, kept):
                return DepthReached(low, kept, ending)
            high = min(2 * low, limit)
            found = at(high)
            if not found <= self.most:
                broken = high
                break
            low, kept = high, found
        while broken - low > 1 and broken <= limit:
            middle = (low + broken) // 2
            found = at(middle)
            if found <= self.most:
                low, kept = middle, found
            else:
                broken = middle
        return DepthReached(low, kept, ", where the search ends" if low == limit else "")

    def _ending(self, depth: int, value: float) -> str:
        """Note the value at a depth, twice the last one's; words where deeper ones keep the bound.

        An extrapolation, no proof: the changes from doubling to doubling, while they shrink, are
        taken to go on shrinking by the larger of the last two ratios, and twice what then remains
        must fit below the bound. In a Pre-LN stack the stream's shape follows the logarithm of the
        depth and so settles geometrically in doublings; in others it settles sooner. Followed on
        to 1024 layers, Pre-LN and Post-LN stacks (ReLU and GELU, branch scales 1 and .3) changed by
        at most .72 of what was named as remaining.
        """
        self.seen.append(value)
        if self.progress and depth > 1:
            self._tell(depth, value)
        if depth < LEAST_SEEN:
            return ""
        before, last, new = (
            abs(b - a) for a, b in zip(self.seen[-4:-1], self.seen[-3:], strict=True)
        )
        least = 1e-9 * abs(value)
        ratio = max(last / max(before, least), new / max(last, least))
        if new > least and ratio > SETTLING:
            return ""
        remaining = 0.0 if new <= least else new * ratio / (1 - ratio)
        if value + 2 * remaining > self.most:
            return ""
        tends = f"{value:.4g}" if remaining == 0 else f"{value:.4g} give or take {remaining:.2g}"
        return f" and more: unbounded as far as doublings tell, deeper stacks tend to {tends}"

    def _tell(self, depth: int, value: float) -> None:
        from rich.console import Console

        text = f"{depth} layers: {self.goal.title} {value:.4g}, the bound is {self.most:g}"
        Console(stderr=True, highlight=False).print(text, soft_wrap=True, markup=False)


def _limit(most: int, pairs: Any) -> int:
    """Layers that may be passed, by how many pairs of tokens each holds."""
    tokens = np.shape(pairs)[-1] if np.ndim(pairs) else 1
    return max(2, min(DEPTH_MAX, most // (tokens * tokens)))
