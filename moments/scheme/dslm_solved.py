"""DeepScaleLM's conditions solved with a model's own laws instead of the printed constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DomainError
from ..model.transformer import Transformer
from ..model.weights import Weights
from ..solver.entering import entered
from ..solver.layerwise import solve_blocks
from ..solver.variables import scaled_weights

ROUNDS = 50
"""Walks through the layers at most, where value and output weights follow the feed-forward's."""

FFN = ("ffn_in", "ffn_out")


def solved(model: Transformer, simplified: bool, inputs: Mapping[str, Any]) -> Transformer:
    """The model with every block's output at variance 1, averaged over tokens.

    Within a block all matrices keep one common variance, apart from query and key.

    Args:
        model: with DeepScaleLM's scales, and matrices of one variance in every block.
        simplified: whether value and output matrices have the feed-forward block's variances
            instead of their own.
        inputs: what `predict` takes to describe the input.

    Raises:
        DomainError: a block whose output does not depend on its weights, or, with `simplified`,
            a walk that does not settle.
    """
    if not simplified:
        return _once(model, inputs, _names(model))
    for _ in range(ROUNDS):
        found = _once(model, inputs, (*FFN, "gate") if model.gated else FFN)
        assert found.weights is not None
        assert model.weights is not None
        before, ffn = np.asarray(model.weights.of("value")), found.weights.of("ffn_in")
        model = found.replace(weights=_with_attention(found.weights, found, ffn))
        if np.allclose(before, ffn, rtol=1e-12, atol=0):
            return model
    raise DomainError("dslm: value and output weights do not settle; use simplified=False")


def described(inputs: Mapping[str, Any]) -> bool:
    """Whether inputs say how the tokens of the stream correlate."""
    return bool({"correlation", "token_ids", "kernel", "pixels"} & set(inputs))


def by_token(model: Transformer, inputs: Mapping[str, Any]) -> bool:
    """Whether a prediction of the model on such inputs is resolved by token."""
    from ..prediction.predict import stack_of

    own = {name: value for name, value in inputs.items() if name != "encoder_inputs"}
    return bool(stack_of(model, **own).resolved)


def _names(model: Transformer) -> tuple[str, ...]:
    cross = ("cross_value", "cross_output") if model.encoder is not None else ()
    return ("value", "output", *cross, *FFN, *(("gate",) if model.gated else ()))


def _with_attention(weights: Weights, model: Transformer, variance: Any) -> Weights:
    names = [name for name in _names(model) if "value" in name or "output" in name]
    return weights.replace(**dict.fromkeys(names, variance))


def _once(model: Transformer, inputs: Mapping[str, Any], free: tuple[str, ...]) -> Transformer:

    stack, memory = entered(model, inputs)
    found = solve_blocks(
        model, stack.enter(), stack.layout, free, lambda number, block: 1.0, False, memory
    )
    if found.missed:
        layer, block = found.missed[0]
        raise DomainError(
            f"dslm: no weights give the {block} block of layer {layer} variance 1, only "
            f"{found.nearest:.3g}: its activation saturates or its input vanishes"
        )
    return model.replace(weights=scaled_weights(model, found.factors))
