"""`solve`: from a target to the weight variances and scales that meet it."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..checks import check_in
from ..errors import DomainError, ValidityWarning, domain_error
from ..passes import predict, stack_of
from ..stack import Stack
from ..prediction import Prediction
from ..symbols import POSITIVE
from ..transformer import Transformer
from .goals import GOALS, Goal
from .layerwise import solve_blocks
from .plan import Plan
from .variables import bounds, check_free, scaled, scaled_weights

LAYERWISE = {
    "stream_variance": "variance of the stream after every block",
    "block_variance": "variance of every block's output",
}
LARGEST = ("largest_k", "largest_depth")
PROBES = 13
DEPTH_MAX = 4096


def objectives() -> dict[str, str]:
    """Name and meaning of every objective besides the schemes."""
    found = dict(LAYERWISE)
    found |= {goal.name: goal.title for goal in GOALS.values()}
    return found | {
        "largest_k": "the largest k of branch_scale^2 = k/N, skip_scale^2 = 1 - k/N within a bound",
        "largest_depth": "the largest number of layers within a bound",
    }


def solve(
    model: Transformer,
    objective: str,
    *,
    target: float | Sequence[float] = 1.0,
    free: str | Sequence[str] | None = None,
    bound: tuple[str, float] | None = None,
    tolerance: float = 1e-9,
    options: dict[str, Any] | None = None,
    **inputs: Any,
) -> Plan:
    """Weight variances and scales that give a model what is asked for.

    Args:
        model: the declaration; what is not free stays as it is.
        objective: a scheme's name (`moments.schemes()`), or one of `moments.solver.objectives()`:
            "stream_variance" and "block_variance" in every layer, "final_variance",
            "gradient_ratio" (first over last), "final_correlation", "query_value_balance",
            "largest_k", "largest_depth".
        target: the wanted value; one per layer for the first two.
        free: what to solve for: names of weight variances, "branch_scale", "skip_scale",
            "norm_gain", "temperature", or "k" (branch_scale^2 = k/N, skip_scale^2 = 1 - k/N);
            several share one factor on their variances. None: each objective's own.
        bound: for the largest: (goal, most), such as ("final_correlation", 0.9).
        tolerance: of the plan's residual, relative.
        options: of a scheme.
        inputs: what `predict` takes to describe the input and the gradient.

    Returns:
        A Plan; where the target cannot be met it says so, and carries the nearest model.

    Raises:
        DomainError: an unknown objective, target or free variable, or one without influence.

    Warns:
        ValidityWarning: the target is infeasible.
    """
    if not isinstance(model, Transformer):
        raise domain_error("model", type(model).__name__, "a moments.Transformer")
    from ..scheme import schemes

    known = [scheme.name for scheme in schemes()]
    if objective in known:
        return Plan(model.with_scheme(objective, **(options or {})), f"scheme {objective}")
    names = (free,) if isinstance(free, str) else None if free is None else tuple(free)
    if names is not None:
        check_free(names)
    if objective in LAYERWISE:
        plan = _layerwise(model, objective, target, names, tolerance, inputs)
    elif objective in GOALS:
        plan = _goal(model, GOALS[objective], target, names, tolerance, inputs)
    elif objective in LARGEST:
        plan = _largest(model, objective, bound, inputs)
    else:
        allowed = f"one of {', '.join(objectives())}, or a scheme: {', '.join(known)}"
        raise domain_error("objective", objective, allowed)
    if not plan.feasible:
        warnings.warn(
            f"{plan.objective} is not feasible; the nearest value is {plan.nearest:.6g}",
            ValidityWarning,
            stacklevel=2,
        )
    return plan


# --- block by block ------------------------------------------------------------------------------


def _layerwise(
    model: Transformer,
    objective: str,
    target: Any,
    free: tuple[str, ...] | None,
    tolerance: float,
    inputs: dict[str, Any],
) -> Plan:
    names = ("value", "output", "ffn_in", "ffn_out") if free is None else free
    if model.gated and free is None:
        names = ("value", "output", "ffn_in", "ffn_out")
    for name in names:
        if name not in ("value", "output", "ffn_in", "gate", "ffn_out"):
            raise domain_error("free", name, "value, output, ffn_in, gate or ffn_out")
    check_in("target", target, POSITIVE)
    targets = np.broadcast_to(np.asarray(target, dtype=float), model.layers)
    of_sum = objective == "stream_variance"
    if of_sum and model.norm in ("post", "b2t"):
        raise DomainError(
            "stream_variance is fixed by Post-LN's normalisation: solve for block_variance"
        )
    stack: Stack = stack_of(model, **inputs)
    signal = stack.enter()
    found = solve_blocks(
        model, signal, stack.layout, names, lambda n, _: float(targets[n - 1]), of_sum
    )
    solved = model.replace(weights=scaled_weights(model, found.factors))
    residual = max(found.shortfall, _distance(solved, objective, targets, inputs))
    return Plan(
        solved,
        f"{LAYERWISE[objective]} = {_shown(target)}",
        names,
        residual,
        feasible=residual <= tolerance,
        nearest=found.nearest if residual > tolerance else None,
        tolerance=tolerance,
        formula=_block_formula(len(names) > 2),
    )


def _distance(model: Transformer, objective: str, targets: Any, inputs: dict[str, Any]) -> float:
    """What a prediction of the solved model says: relative distance to the targets."""
    frame = _predicted(model, inputs).to_frame()
    sites = ("attention.sum", "ffn.sum")
    if objective == "block_variance":
        sites = ("attention.dropout", "ffn.dropout")
    rows = frame[frame.site.isin(sites)]
    return float(np.max(np.abs(rows.variance / targets[rows.layer - 1] - 1)))


def _block_formula(several: bool) -> str:
    shared = r"^{1/2}" if several else ""
    return rf"\sigma_w^2 \leftarrow \sigma_w^2 \left(\sigma_*^2 / \sigma_b^2\right){shared}"


# --- one number ----------------------------------------------------------------------------------


def _goal(
    model: Transformer,
    goal: Goal,
    target: Any,
    free: tuple[str, ...] | None,
    tolerance: float,
    inputs: dict[str, Any],
) -> Plan:
    check_in("target", target, goal.allowed)
    if np.ndim(target):
        raise domain_error("target", target, f"one number for {goal.name}")
    wanted, names = float(target), goal.free if free is None else free

    def value(log: float) -> float:
        return goal.value(_predicted(scaled(model, names, math.exp(log)), inputs))

    log, reached = _root(value, wanted, bounds(model, names))
    solved = scaled(model, names, math.exp(log))
    residual = abs(reached - wanted) / max(abs(wanted), 1e-12)
    return Plan(
        solved,
        f"{goal.title} = {wanted:g}",
        names,
        residual,
        feasible=residual <= tolerance,
        nearest=None if residual <= tolerance else reached,
        tolerance=tolerance,
    )


def _root(
    value: Callable[[float], float], wanted: float, ends: tuple[float, float]
) -> tuple[float, float]:
    """Where value(log) is nearest to `wanted`, and that value; exact where a bracket is found."""
    from scipy.optimize import brentq, minimize_scalar

    seen: dict[float, float] = {}

    def distance(log: float) -> float:
        if log not in seen:
            seen[log] = _or_nan(value, log) - wanted
        return seen[log]

    start = min(max(0.0, ends[0]), ends[1])
    probes = sorted(
        {start, *np.linspace(ends[0], ends[1], PROBES).tolist()}, key=lambda x: abs(x - start)
    )
    for probe in probes:
        if distance(probe) == 0:
            return probe, wanted
        inside = sorted(log for log, far in seen.items() if np.isfinite(far))
        for low, high in itertools.pairwise(inside):
            if seen[low] * seen[high] < 0:
                log = float(brentq(distance, low, high, xtol=1e-14, rtol=1e-14))
                return log, distance(log) + wanted
    finite = {log: abs(far) for log, far in seen.items() if np.isfinite(far)}
    best = min(finite, key=lambda log: finite[log])
    inside = sorted(finite)
    index = inside.index(best)
    low, high = inside[max(index - 1, 0)], inside[min(index + 1, len(inside) - 1)]
    if low < high:
        found = minimize_scalar(
            lambda log: abs(distance(log)), bounds=(low, high), method="bounded"
        )
        if abs(distance(float(found.x))) < finite[best]:
            best = float(found.x)
    return best, distance(best) + wanted


def _or_nan(value: Callable[[float], float], log: float) -> float:
    """A value, or NaN where the numbers overflow there."""
    try:
        return value(log)
    except DomainError:
        return math.nan


# --- the largest within a bound ------------------------------------------------------------------


def _largest(model: Transformer, objective: str, bound: Any, inputs: dict[str, Any]) -> Plan:
    if bound is None or len(bound) != 2 or bound[0] not in GOALS:
        raise domain_error("bound", bound, f"(goal, most), goal one of {', '.join(GOALS)}")
    goal, most = GOALS[bound[0]], float(bound[1])
    what = objective.removeprefix("largest_")
    title = f"largest {what} with {goal.title} at most {most:g}"

    def kept(candidate: Transformer) -> bool:
        return _or_nan(lambda _: goal.value(_predicted(candidate, inputs)), 0.0) <= most

    if what == "depth":
        best = _largest_depth(model, kept)
        if best is None:
            one = goal.value(_predicted(model.replace(layers=1), inputs))
            return Plan(model.replace(layers=1), title, ("layers",), feasible=False, nearest=one)
        return Plan(best, title, ("layers",))
    low, high = (math.exp(end) for end in bounds(model, ("k",)))
    if not kept(scaled(model, ("k",), low)):
        least = scaled(model, ("k",), low)
        reached = goal.value(_predicted(least, inputs))
        return Plan(least, title, ("k",), feasible=False, nearest=reached)
    if kept(scaled(model, ("k",), high)):
        return Plan(scaled(model, ("k",), high), title, ("k",))
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if kept(scaled(model, ("k",), middle)) else (low, middle)
    return Plan(scaled(model, ("k",), low), title, ("k",), residual=high / low - 1)


def _largest_depth(model: Transformer, kept: Callable[[Transformer], bool]) -> Transformer | None:
    """By doubling, then halving; a bound once broken is taken to stay so."""
    if not kept(model.replace(layers=1)):
        return None
    low, high = 1, 2
    while high <= DEPTH_MAX and kept(model.replace(layers=high)):
        low, high = high, 2 * high
    if high > DEPTH_MAX:
        return model.replace(layers=low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kept(model.replace(layers=middle)) else (low, middle)
    return model.replace(layers=low)


def _predicted(model: Transformer, inputs: dict[str, Any]) -> Prediction:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValidityWarning)
        return predict(model, **inputs)


def _shown(target: Any) -> str:
    return f"{target:g}" if np.ndim(target) == 0 else "one value per layer"
