"""A scheme as a plan, with the residual of the conditions it sets itself."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ValidityWarning
from ..transformer import Transformer
from .entering import entered
from .layerwise import reached
from .plan import Plan

EXACT = 1e-9

FAR = 0.1
"""Distance to 1 of the predicted forward variance from which constants that miss it are named."""


def from_scheme(
    model: Transformer, name: str, options: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Plan:
    """What `model.with_scheme` makes of a model, on the input that is described.

    Options that the inputs stand for need not be given twice: a scheme's `correlation`, and of
    "dslm" `input_correlation`, which is the input's before its dropout, or `inputs`.

    Warns:
        ValidityWarning: constants of "dslm" that leave the forward variance far from 1.
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
    outputs, stream = _reached(solved, seen)
    if variant != "solved":
        _warn_where_far(variant, stream, solved.seq_len)
    return Plan(
        solved,
        "dslm",
        "scheme dslm: variance of every block's output = 1",
        1.0,
        residual=float(np.max(np.abs(outputs - 1))),
        tolerance=EXACT if variant == "solved" and not options.get("simplified") else None,
        inputs=seen,
    )


def _reached(model: Transformer, inputs: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Variances, averaged over tokens: of every block's output, and of the stream after a layer."""
    stack, _ = entered(model, inputs)
    stack.forward()
    layout = stack.layout
    outputs = [row.output for row in reached(stack.trace, layout)]
    stream = [float(layout.token_average(p.signal.kernel)[0]) for p in stack.trace.stream()[1:]]
    return np.array(outputs), np.array(stream)


def _warn_where_far(variant: str, stream: np.ndarray, seq_len: int) -> None:
    """Say where the scheme's constants miss what it promises, and what does not."""
    layer = int(np.abs(stream - 1).argmax())
    if abs(stream[layer] - 1) <= FAR:
        return
    warnings.warn(
        f"dslm: the {variant} constants are those of many tokens that correlate; on this input of "
        f"{seq_len} they leave the predicted forward variance at {stream[layer]:.3g} after layer "
        f"{layer + 1}, not 1: pass options={{'variant': 'solved'}}",
        ValidityWarning,
        stacklevel=5,  # of whoever calls `solve`
    )
