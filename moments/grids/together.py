"""Many configurations in one pass: declarations alike but for their numbers, as one with arrays.

Laws broadcast over leading axes, so that leaves hold an array of the configurations' numbers. A
further layer that keeps the stream and scales its branch by 0 changes nothing, so that different
depths go together where every part of a layer is such a connection (Pre-LN, but not Post-LN).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..engine.composition import Chain, Component, Layer, Residual
from ..engine.state import Kernel
from ..engine.structure import Unlike, fields_of, flattened, joined, unflattened
from ..formulas.law import Theory
from ..layers.architecture import declare, declare_layer
from ..model.transformer import Transformer
from ..prediction.draws import QUANTITIES
from ..prediction.gate import computing
from ..prediction.resolution import resolution_of
from ..prediction.result import Prediction
from ..prediction.stack import Inputs, Stack, last_gradient

OUTPUTS = ("loss", "loss_stderr", "logit_variance")
"""What a prediction has of a head, else None."""


def kind(
    model: Transformer, theory: Theory, arguments: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """What configurations must share to go together; None for one that goes alone, as do classes of
    positions and tokens one by one, which are arrays already."""
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
    """Whether layers that add nothing may follow its last."""
    return set(model.placements) <= {"pre", "sandwich", "none"} and (
        model.layernorm_scaling != "after-residual"
    )


def predict_together(
    models: Sequence[Transformer],
    theory: Theory,
    moments: Mapping[str, np.ndarray],
    batch: int = 1,
) -> Prediction:
    """`predict` of models of one `kind` at once, tokens alike, on one number each of its `moments`.

    The stream's arrays are (B, N + 1), N of the deepest, and what a head gives (B,); of a shallower
    one what is beyond its depth says nothing. Raises Unlike where declarations differ in more than
    numbers.
    """
    deepest = max(models, key=lambda model: model.layers)
    declaration = stacked_layers(models, theory)
    inputs = Inputs(moments.get("variance"), moments.get("correlation"))
    stack = _Together(declaration, deepest, theory, inputs, False, (len(models),))
    given = (moments.get("grad_variance"), moments.get("grad_correlation"))
    with computing(theory, [stack.run]):
        signal = stack.forward()
        outcome = last_gradient(stack, signal, *given, None, None, batch)
        stack.backward(outcome)
    p = stack.prediction(batch, outcome, None)
    shape = (len(models), deepest.layers + 1)
    found: dict[str, Any] = {n: np.broadcast_to(getattr(p, n), shape) for n in QUANTITIES}
    for name in OUTPUTS:
        if getattr(p, name) is not None:
            found[name] = np.broadcast_to(getattr(p, name), shape[:1])
    return dataclasses.replace(p, **found)


class _Together(Stack):
    """A stack whose declaration has a number for every configuration."""

    def __init__(self, declaration: Chain, *args: Any) -> None:
        self._declaration = declaration
        super().__init__(*args)

    def declaration(self) -> Chain:
        return self._declaration

    def _first(self, *args: Any) -> Kernel:
        found = super()._first(*args)
        count = self.shape
        return Kernel(
            np.array(np.broadcast_to(found.diagonal, count), dtype=float),
            np.array(np.broadcast_to(found.off_diagonal, count), dtype=float),
        )


# --- declarations with arrays ---------------------------------------------------------------------


def stacked_layers(models: Sequence[Transformer], theory: Theory) -> Chain:
    """The layers of all models as one stack, as deep as the deepest; or Unlike."""
    depth = max(model.layers for model in models)
    known = {
        id(m): (declare_layer(m, theory, 1),) if _uniform(m) else declare(m, theory).children
        for m in {id(m): m for m in models}.values()
    }
    cache: dict[tuple[Any, ...], Component] = {}
    layers = []
    for number in range(1, depth + 1):
        over = tuple(i for i, model in enumerate(models) if model.layers < number)
        here = [known[id(m)][min(number, len(known[id(m)])) - 1] for m in models]
        key = (over, *map(id, here))
        if key not in cache:
            cache[key] = _joined(here, over)
        layers.append(Layer(cache[key], number))
    return Chain(tuple(layers))


def _joined(layers: Sequence[Component], over: Sequence[int]) -> Component:
    """One body of the layers' bodies; of stacks that are over, one that adds nothing."""
    bodies = [layer.body for layer in layers if isinstance(layer, Layer)]
    going = next(i for i in range(len(bodies)) if i not in over)
    for i in over:
        bodies[i] = _adding_nothing(bodies[going])
    found = joined(bodies, _side_by_side)
    assert isinstance(found, Component)
    return found


def _uniform(model: Transformer) -> bool:
    """Whether every layer has the numbers of the first."""
    if model.layernorm_scaling or model.norm == "mix":
        return False
    per_layer: list[Any] = [model.skip_scale, model.branch_scale, model.norm_gain]
    per_layer += [model.temperature, model.window]
    for part in (model.weights, model.biases):
        if part is not None:
            per_layer += [getattr(part, f.name) for f in dataclasses.fields(part)]
    return not any(isinstance(value, tuple | list) for value in per_layer)


def _adding_nothing(body: Component) -> Component:
    """The body of a layer that keeps the stream and adds nothing."""
    parts = body.children if isinstance(body, Chain) else (body,)
    found = []
    for part in parts:
        if type(part) is not Residual:
            raise Unlike(part.label)
        branch = _without_logits(part.branch)
        found.append(dataclasses.replace(part, branch=branch, skip_scale=1.0, branch_scale=0.0))
    return body.with_children(tuple(found)) if isinstance(body, Chain) else found[0]


HOT = 1e6
"""A temperature that leaves logits next to no variance, whose attention costs least; what it does
is multiplied by 0."""


def _without_logits(part: Component) -> Any:
    """A component whose attention is uniform."""
    numbers: list[Any] = []
    structure = flattened(part, numbers)
    names = fields_of(structure)
    hot = (HOT if n == "temperature" else one for n, one in zip(names, numbers, strict=True))
    return unflattened(structure, hot)


def _side_by_side(_field: str, numbers: tuple[Any, ...]) -> Any:
    first = numbers[0]
    return first if all(one == first for one in numbers) else np.array(numbers)
