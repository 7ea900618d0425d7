"""A scheme as a plan, with the residual of the conditions it sets itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..transformer import Transformer
from .entering import entered
from .layerwise import reached
from .plan import Plan

EXACT = 1e-9


def from_scheme(
    model: Transformer, name: str, options: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Plan:
    """What `model.with_scheme` makes of a model, on the input that is described.

    Options that the inputs stand for need not be given twice: a scheme's `correlation`, and of
    "dslm" `input_correlation`, which is the input's before its dropout, or `inputs`.
    """
    from ..scheme.registry import scheme

    known, given = scheme(name).options, dict(options)
    if name == "dslm":
        return _dslm(model, given, inputs)
    given |= {key: v for key, v in inputs.items() if key in known and key not in given}
    return Plan(
        model.with_scheme(name, **given), name, f"scheme {name}", tolerance=None, inputs=inputs
    )


def _dslm(model: Transformer, options: dict[str, Any], inputs: Mapping[str, Any]) -> Plan:
    from ..scheme.dslm import constants_hold

    variant = options.get("variant") or ("released" if constants_hold(model) else "solved")
    kept = 1 - (model.dropout if model.embedding is None else model.embedding.dropout)
    seen = dict(inputs)
    if variant == "solved" and inputs and "inputs" not in options:
        options["inputs"] = dict(inputs)
    elif inputs.get("correlation") is not None and "input_correlation" not in options:
        options["input_correlation"] = inputs["correlation"] / kept
    given = options.get("input_correlation")
    if given is not None and not inputs:
        seen = {"variance": 1.0, "correlation": kept * given}
    solved = model.with_scheme("dslm", **options)
    return Plan(
        solved,
        "dslm",
        "scheme dslm: variance of every block's output = 1",
        1.0,
        residual=_distance(solved, seen),
        tolerance=EXACT if variant == "solved" and not options.get("simplified") else None,
        inputs=seen,
    )


def _distance(model: Transformer, inputs: Mapping[str, Any]) -> float:
    stack, _ = entered(model, inputs)
    stack.forward()
    outputs = [row.output for row in reached(stack.trace, stack.layout)]
    return float(np.max(np.abs(np.array(outputs) - 1)))
