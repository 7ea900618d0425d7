"""What enters the layers that a solver walks through, from the inputs that `predict` takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..engine.classes import PositionClasses
from ..engine.state import Signal
from ..errors import domain_error
from ..model.transformer import Transformer
from ..prediction.predict import INPUTS, predict, stack_of
from ..prediction.stack import Inputs, Stack, as_many

NOT_INPUTS = ("model", "theory", "progress", "batch")


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise unless these describe the input and the gradient of one configuration."""
    known = [name for name in inspect.signature(predict).parameters if name not in NOT_INPUTS]
    for name, value in inputs.items():
        if name not in known:
            raise domain_error("input", name, f"one of {', '.join(known)}")
        single = name in ("variance", "correlation", "grad_variance", "grad_correlation")
        if single and np.ndim(value):
            raise domain_error(name, value, "one number: a plan is for one configuration")


def stacks(model: Transformer, inputs: Mapping[str, Any]) -> tuple[Stack, Stack | None]:
    """The stack of layers and its encoder's, if it has one, before anything passes through them."""
    own = Inputs(**{name: value for name, value in inputs.items() if name in INPUTS})
    tokens = inputs.get("tokens")
    if model.encoder is None:
        return stack_of(model, own, tokens), None
    own, outer = as_many(own, Inputs(**dict(inputs.get("encoder_inputs") or {})))
    stack, other = stack_of(model, own, tokens), stack_of(model.encoder, outer)
    beside = isinstance(stack.resolved, PositionClasses) and other.resolved is False
    if stack.resolved != other.resolved and not beside:
        stack, other = stack_of(model, own, True), stack_of(model.encoder, outer, True)
    return stack, other


def entered(model: Transformer, inputs: Mapping[str, Any]) -> tuple[Stack, Signal | None]:
    """The stack of layers, and what a decoder's cross-attention reads."""
    stack, other = stacks(model, inputs)
    if other is not None:
        other.forward()
        stack.reads(other)
    return stack, stack.run.memory
