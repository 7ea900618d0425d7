"""`solve`: a plan from a scheme's name or an objective, with its residual."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import ValidityWarning, domain_error, unknown_name
from ..formulas.checks import POSITIVE, check_interval
from ..model.transformer import Transformer
from ..solver.entering import check_inputs, entered
from ..solver.layerwise import reached
from ..solver.plan import Plan
from ..solver.solve import objectives, solve_objective
from .dslm import keep_probability, usual_variant
from .registry import scheme, schemes

EXACT = 1e-9

FAR = 0.1
"""Distance of the predicted forward variance from 1 that gets a warning."""


def solve(
    model: Transformer,
    objective: str | Sequence[tuple[str, float]],
    *,
    target: float | Sequence[float] | None = None,
    free: str | Sequence[str] | None = None,
    bound: tuple[str, float] | None = None,
    tolerance: float = 1e-9,
    options: dict[str, Any] | None = None,
    progress: bool = False,
    **inputs: Any,
) -> Plan:
    """Weight variances and scales with which a model reaches a target.

    docs/theory/inversion.md derives the solution block by block; every scheme names its source.

    Args:
        model: the declaration; all that is not free stays as it is, and so does its encoder.
        objective: a scheme's name (`moments.schemes()`), or one of `moments.solver.objectives()`:
            "stream_variance" after every layer (its blocks take even steps there) and
            "block_variance" of every block's output, solved block by block;
            "final_variance", "gradient_ratio" (first over last), "query_value_balance" (geometric
            mean over layers) and "final_correlation" (at most the target), each one number;
            "flat_gradient" (gradient variance at every layer's input over that at its output) and
            "query_value_balance_per_layer", each one number per layer; "largest_k",
            "largest_depth". Or several objectives of one number as pairs (objective, target), which
            are solved together by least squares.
        target: the wanted value, or one per layer for objectives per layer. None: 1, if the
            objective has a target.
        free: names of the free variables: weight variances, "branch_scale", "skip_scale",
            "norm_gain", "temperature", or "k" (branch_scale^2 = k/N, skip_scale^2 = 1 - k/N). They
            share one factor on their variances: one per block for variances of blocks or the
            stream, one per layer for objectives per layer, else one for the model; with several
            objectives each variable has its own. None: the objective's default.
        bound: for "largest_k" and "largest_depth": (objective, most), such as
            ("final_correlation", 0.9).
        tolerance: relative, of the plan's residual.
        options: options of a scheme.
        progress: whether a search for the largest depth prints its trials on standard error.
        inputs: arguments of `predict` for the input and the gradient.

    Returns:
        A Plan. If no value reaches the target, it has the nearest model, and `feasible` is False.

    Raises:
        DomainError: an unknown objective, target, input or free variable, or a free variable that
            the objective does not depend on.

    Warns:
        ValidityWarning: the target is infeasible, or constants of a scheme miss what they promise.
    """
    if not isinstance(model, Transformer):
        raise domain_error("model", type(model).__name__, "a moments.Transformer")
    check_interval("tolerance", tolerance, POSITIVE)
    check_inputs(inputs)
    known = [scheme.name for scheme in schemes()]
    is_scheme = isinstance(objective, str) and objective in known
    if options and not is_scheme:
        raise domain_error("options", options, "left out: they are of a scheme")
    if is_scheme:
        for name, value in (("target", target), ("free", free), ("bound", bound)):
            if value is not None:
                allowed = f"left out: the scheme {objective!r} says what it sets"
                raise domain_error(name, value, allowed)
        plan = _from_scheme(model, str(objective), options or {}, inputs)
    elif isinstance(objective, str) and objective not in objectives():
        titles = [f"{name}: {title}" for name, title in objectives().items()]
        near = unknown_name("objective", objective, [*objectives(), *known])
        if "did you mean" in str(near):
            raise near
        allowed = f"one of moments.schemes(), or {'; '.join(titles)}"
        raise domain_error("objective", objective, allowed)
    else:
        plan = solve_objective(
            model,
            objective,
            target=target,
            free=free,
            bound=bound,
            tolerance=tolerance,
            progress=progress,
            **inputs,
        )
    if not plan.feasible:
        text = f"{plan.title} is not feasible: {plan.missed}"
        warnings.warn(text, ValidityWarning, stacklevel=2)
    return plan


def _from_scheme(
    model: Transformer, name: str, options: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Plan:
    """The plan of a scheme; its options default to inputs of the same name."""
    if name == "dslm":
        return _dslm(model, dict(options), inputs)
    known = scheme(name).options
    options = {key: value for key, value in inputs.items() if key in known} | dict(options)
    return Plan(
        model.with_scheme(name, **options), name, f"scheme {name}", tolerance=None, inputs=inputs
    )


def _dslm(model: Transformer, options: dict[str, Any], inputs: Mapping[str, Any]) -> Plan:
    variant = options.get("variant") or usual_variant(model)
    plan_inputs = dict(inputs)
    if variant == "solved" and inputs and "inputs" not in options:
        options["inputs"] = dict(inputs)
    elif inputs.get("correlation") is not None and "input_correlation" not in options:
        options["input_correlation"] = inputs["correlation"] / keep_probability(model)
    correlation = options.get("input_correlation")
    if correlation is not None and not inputs:
        plan_inputs = {"variance": 1.0, "correlation": keep_probability(model) * correlation}
    solved = model.with_scheme("dslm", **options)
    outputs, stream = _reached(solved, plan_inputs)
    if variant != "solved":
        _warn_where_far(variant, stream, solved.seq_len)
    return Plan(
        solved,
        "dslm",
        "scheme dslm: variance of every block's output = 1",
        1.0,
        residual=float(np.max(np.abs(outputs - 1))),
        tolerance=EXACT if variant == "solved" and not options.get("simplified") else None,
        inputs=plan_inputs,
    )


def _reached(model: Transformer, inputs: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Variances of every block's output and of the stream after every layer, token averages."""
    stack, _ = entered(model, inputs)
    rows, stream = reached(stack)
    return np.array([row.output for row in rows]), np.array(stream)


def _warn_where_far(variant: str, stream: np.ndarray, seq_len: int) -> None:
    """Warn if the scheme's constants leave the stream far from variance 1."""
    layer = int(np.abs(stream - 1).argmax())
    if abs(stream[layer] - 1) <= FAR:
        return
    warnings.warn(
        f"dslm: the {variant} constants are those of many tokens that correlate; on this input of "
        f"{seq_len} they leave the predicted forward variance at {stream[layer]:.3g} after layer "
        f"{layer + 1}, not 1: pass options={{'variant': 'solved'}}",
        ValidityWarning,
        stacklevel=5,  # the caller of `solve`
    )
