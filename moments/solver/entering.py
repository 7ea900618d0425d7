"""The stack of layers and its input, from the arguments of `predict`."""

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
from ..prediction.stack import Inputs, Stack, with_equal_sequences

NOT_INPUTS = ("model", "theory", "progress", "batch")


def check_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise DomainError unless these are arguments of `predict` for one configuration."""
    known = [name for name in inspect.signature(predict).parameters if name not in NOT_INPUTS]
    for name, value in inputs.items():
        if name not in known:
            raise domain_error("input", name, f"one of {', '.join(known)}")
        single = name in ("variance", "correlation", "grad_variance", "grad_correlation")
        if single and np.ndim(value):
            raise domain_error(name, value, "one number: a plan is for one configuration")


def stacks(model: Transformer, inputs: Mapping[str, Any]) -> tuple[Stack, Stack | None]:
    """The stacks of a model and of its encoder, if it has one, before any forward pass."""
    arguments = Inputs(**{name: value for name, value in inputs.items() if name in INPUTS})
    tokens = inputs.get("tokens")
    if model.encoder is None:
        return stack_of(model, arguments, tokens), None
    encoder_arguments = Inputs(**dict(inputs.get("encoder_inputs") or {}))
    arguments, encoder_arguments = with_equal_sequences(arguments, encoder_arguments)
    stack = stack_of(model, arguments, tokens)
    encoder = stack_of(model.encoder, encoder_arguments)
    compatible = isinstance(stack.resolved, PositionClasses) and encoder.resolved is False
    if stack.resolved != encoder.resolved and not compatible:
        stack = stack_of(model, arguments, True)
        encoder = stack_of(model.encoder, encoder_arguments, True)
    return stack, encoder


def entered(model: Transformer, inputs: Mapping[str, Any]) -> tuple[Stack, Signal | None]:
    """The stack of layers, and the encoder output that its cross-attention reads."""
    stack, encoder = stacks(model, inputs)
    if encoder is not None:
        encoder.forward()
        stack.set_encoder(encoder)
    return stack, stack.run.memory
