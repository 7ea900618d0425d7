"""Many configurations in one pass: one declaration whose numbers are arrays over configurations.

Laws broadcast over leading axes. A shallower model is padded with layers whose branches are scaled
by 0, which is possible if every part of a layer is a residual connection (Pre-LN, but not Post-LN).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..engine.composition import Chain, Component, Layer, Residual
from ..engine.state import Kernel
from ..engine.structure import DifferentStructure, fields_of, flattened, joined, unflattened
from ..formulas.law import Theory
from ..layers.architecture import declare, declare_layer
from ..model.transformer import Transformer
from ..prediction.draws import QUANTITIES
from ..prediction.gate import computing
from ..prediction.resolution import resolution_of
from ..prediction.result import Prediction
from ..prediction.stack import Inputs, Stack, last_gradient

OUTPUTS = ("loss", "loss_stderr", "logit_variance")
"""Quantities of a prediction that are None without a head."""


def kind(
    model: Transformer, theory: Theory, arguments: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """The key that configurations of one pass share; None for a configuration that needs its own.

    Predictions by token or by class of positions have array axes already, and run one by one.
    """
    if model.encoder is not None or resolution_of(model, theory, arguments.get("tokens")):
        return None
    fields = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init}
    shared = ("d_model", "heads", "seq_len", "d_ff", "norm", "normalization", "activation", "head")
    more = ("embedding", "d_head", "kv_heads", "gated", "parallel", "parallel_norms", "qk_norm")
    rest = ("norm_groups", "layernorm_scaling", "identity_attention", "norm_affine", "norm_bias")
    same = tuple(fields[name] for name in (*shared, *more, *rest))
    depth = () if _extends(model) else (model.layers,)
    return (theory, arguments.get("batch", 1), *same, *depth)


def _extends(model: Transformer) -> bool:
    """Whether the stack can be padded with layers that add nothing."""
    return set(model.placements) <= {"pre", "sandwich", "none"} and (
        model.layernorm_scaling != "after-residual"
    )


def predict_together(
    models: Sequence[Transformer],
    theory: Theory,
    moments: Mapping[str, np.ndarray],
    batch: int = 1,
) -> Prediction:
    """`predict` for B models of one `kind`, with exchangeable tokens and `moments` of shape (B,).

    The prediction's stream has shape (B, N + 1), N of the deepest model, and is meaningless beyond
    the depth of shallower ones; quantities of the head have shape (B,). Raises Unlike if the
    declarations differ in more than numbers and depth.
    """
    deepest = max(models, key=lambda model: model.layers)
    declaration = stacked_layers(models, theory)
    inputs = Inputs(moments.get("variance"), moments.get("correlation"))
    stack = _Together(declaration, deepest, theory, inputs, False, (len(models),))
    gradient = (moments.get("grad_variance"), moments.get("grad_correlation"))
    with computing(theory, [stack.run]):
        signal = stack.forward()
        outcome = last_gradient(stack, signal, *gradient, None, None, batch)
        stack.backward(outcome)
    p = stack.prediction(batch, outcome, None)
    shape = (len(models), deepest.layers + 1)
    arrays: dict[str, Any] = {n: np.broadcast_to(getattr(p, n), shape) for n in QUANTITIES}
    for name in OUTPUTS:
        if getattr(p, name) is not None:
            arrays[name] = np.broadcast_to(getattr(p, name), shape[:1])
    return dataclasses.replace(p, **arrays)


class _Together(Stack):
    """A stack whose declaration has arrays over configurations for numbers."""

    def __init__(self, declaration: Chain, *args: Any) -> None:
        self._declaration = declaration
        super().__init__(*args)

    def declaration(self) -> Chain:
        return self._declaration

    def _first(self, *args: Any) -> Kernel:
        kernel = super()._first(*args)
        return Kernel(
            np.array(np.broadcast_to(kernel.diagonal, self.shape), dtype=float),
            np.array(np.broadcast_to(kernel.off_diagonal, self.shape), dtype=float),
        )


# --- declarations with arrays ---------------------------------------------------------------------


def stacked_layers(models: Sequence[Transformer], theory: Theory) -> Chain:
    """One stack for all models, as deep as the deepest; raises Unlike if they differ too much."""
    depth = max(model.layers for model in models)
    declared = {
        id(m): (declare_layer(m, theory, 1),) if _uniform(m) else declare(m, theory).children
        for m in {id(m): m for m in models}.values()
    }
    stacks = [declared[id(model)] for model in models]
    cache: dict[tuple[Any, ...], Component] = {}
    layers = []
    for number in range(1, depth + 1):
        ended = tuple(i for i, model in enumerate(models) if model.layers < number)
        at_depth = [stack[min(number, len(stack)) - 1] for stack in stacks]
        key = (ended, *map(id, at_depth))
        if key not in cache:
            cache[key] = _joined(at_depth, ended)
        layers.append(Layer(cache[key], number))
    return Chain(tuple(layers))


def _joined(layers: Sequence[Component], ended: Sequence[int]) -> Component:
    """One body for the layers of all models; models whose stack has `ended` add nothing."""
    bodies = [layer.body for layer in layers if isinstance(layer, Layer)]
    template = next(body for i, body in enumerate(bodies) if i not in ended)
    for i in ended:
        bodies[i] = _adding_nothing(template)
    result = joined(bodies, _as_array)
    assert isinstance(result, Component)
    return result


def _uniform(model: Transformer) -> bool:
    """Whether all layers have equal numbers."""
    if model.layernorm_scaling or model.norm == "mix":
        return False
    per_layer: list[Any] = [model.skip_scale, model.branch_scale, model.norm_gain]
    per_layer += [model.temperature, model.window]
    for part in (model.weights, model.biases):
        if part is not None:
            per_layer += [getattr(part, f.name) for f in dataclasses.fields(part)]
    return not any(isinstance(value, tuple | list) for value in per_layer)


def _adding_nothing(body: Component) -> Component:
    """The body with branches scaled by 0, which leaves the stream as it is."""
    parts = []
    for part in body.children if isinstance(body, Chain) else (body,):
        if type(part) is not Residual:
            raise DifferentStructure(part.label)
        branch = _with_uniform_attention(part.branch)
        parts.append(dataclasses.replace(part, branch=branch, skip_scale=1.0, branch_scale=0.0))
    return body.with_children(tuple(parts)) if isinstance(body, Chain) else parts[0]


HOT = 1e6
"""A temperature at which logits have almost no variance, and attention is cheapest to compute."""


def _with_uniform_attention(part: Component) -> Any:
    numbers: list[Any] = []
    structure = flattened(part, numbers)
    fields = zip(fields_of(structure), numbers, strict=True)
    return unflattened(structure, (HOT if name == "temperature" else x for name, x in fields))


def _as_array(_field: str, numbers: tuple[Any, ...]) -> Any:
    """A number that all configurations share, else an array."""
    first = numbers[0]
    return first if all(number == first for number in numbers) else np.array(numbers)
