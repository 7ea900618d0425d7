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
from ..prediction.predict import predict, stack_of
from ..prediction.stack import Stack

NOT_INPUTS = ("model", "theory", "progress", "batch")


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Only what describes the input and the gradient of one configuration.

    Raises:
        DomainError: another name, or several configurations at once.
    """
    known = [name for name in inspect.signature(predict).parameters if name not in NOT_INPUTS]
    for name, value in inputs.items():
        if name not in known:
            raise domain_error("input", name, f"one of {', '.join(known)}")
        single = name in ("variance", "correlation", "grad_variance", "grad_correlation")
        if single and np.ndim(value):
            raise domain_error(name, value, "one number: a plan is for one configuration")


def entered(model: Transformer, inputs: Mapping[str, Any]) -> tuple[Stack, Signal | None]:
    """The stack of layers, and what a decoder's cross-attention reads.

    Raises:
        DomainError: as `predict`.
    """
    of_decoder = {name: value for name, value in inputs.items() if name != "encoder_inputs"}
    stack = stack_of(model, **of_decoder)
    if model.encoder is None:
        return stack, None
    outer = dict(inputs.get("encoder_inputs") or {})
    other = stack_of(model.encoder, **outer)
    beside = isinstance(stack.resolved, PositionClasses) and other.resolved is False
    if stack.resolved != other.resolved and not beside:
        stack = stack_of(model, **of_decoder | {"tokens": True})
        other = stack_of(model.encoder, **outer | {"tokens": True})
    other.forward()
    memory = other.read()
    stack.run.memory = memory
    return stack, memory
