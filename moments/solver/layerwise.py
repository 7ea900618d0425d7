"""Inversion block by block: weight variances that give every block's output a chosen variance.

The forward pass of a layer does not depend on later ones, so that one walk solves all: at every
residual addition the block's weights are scaled until its output (or the sum) has its target, and
the walk goes on with what they give. A block's output variance is proportional to the variances of
its value and output matrices, of feed-forward matrices behind the activation, and of those before
an activation of degree 1; elsewhere a bracketed root finds the factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..architecture import declare
from ..attention import SelfAttention
from ..composition import Chain, Component, Parallel, Residual
from ..cross_attention import CrossAttention
from ..errors import DomainError
from ..gated import GatedLinear
from ..layout import Layout
from ..parts import Linear
from ..propagate import Trace, forward
from ..state import Signal
from ..transformer import Transformer

FACTOR_LIMIT = 60.0
"""Largest logarithm of a factor on a variance that is tried."""

NOTHING = 1e-12
"""Factor on a variance that stands for a block without output."""

MATRICES = {
    "attention": ("value", "output"),
    "cross": ("cross_value", "cross_output"),
    "ffn": ("ffn_in", "gate", "ffn_out"),
}


@dataclass(frozen=True)
class Found:
    """What the walk found.

    Attributes:
        factors: for every matrix, what its variance is multiplied with in each layer.
        shortfall: largest relative distance between a target and what is reached, where a target
            lies below what the skip connection alone brings.
        nearest: the variance reached there.
    """

    factors: Mapping[str, tuple[float, ...]]
    shortfall: float = 0.0
    nearest: float | None = None


def solve_blocks(
    model: Transformer,
    signal: Signal,
    layout: Layout,
    free: tuple[str, ...],
    target: Callable[[int, str], float],
    of_sum: bool,
    memory: Signal | None = None,
) -> Found:
    """Scale the free matrices until every block meets its target.

    Args:
        model: the declaration.
        signal: what enters layer 1.
        layout: of its tokens.
        free: matrices to scale; those of one block by the same factor.
        target: variance wanted at (layer, "attention" or "ffn").
        of_sum: whether it is that of the residual sum, or of the block's output.
        memory: what a decoder's cross-attention reads.

    Raises:
        DomainError: a block's output does not depend on its free matrices.
    """
    padding = None
    factors: dict[str, list[float]] = {name: [] for name in free}
    shortfall, nearest = 0.0, None
    trace = Trace()
    trace.memory = memory
    for layer in declare(model, "refined", padding, layout.sequences).parts:
        number = layer.number  # type: ignore[attr-defined]
        seen: set[str] = set()
        for part in _flat(layer.body):  # type: ignore[attr-defined]
            if isinstance(part, Residual):
                name = part.label.partition(".")[0]
                own = tuple(m for m in MATRICES[name] if m in free)
                if own:
                    wanted = target(number, name)
                    part, factor, missing = _fitted(
                        part, own, signal, layout, wanted, of_sum, memory
                    )
                    if abs(missing) > shortfall:
                        shortfall, nearest = abs(missing), wanted * (1 + missing)
                    for matrix in own:
                        factors[matrix].append(factor)
                        seen.add(matrix)
            signal, _ = forward(part, signal, trace)
        trace.points.clear()
        for matrix in set(free) - seen:
            raise DomainError(f"free has {matrix!r}, which layer {number} does not have")
    return Found({name: tuple(values) for name, values in factors.items()}, shortfall, nearest)


def _flat(component: Component) -> tuple[Component, ...]:
    if isinstance(component, Chain):
        return tuple(part for inner in component.parts for part in _flat(inner))
    return (component,)


def _fitted(
    part: Residual,
    own: tuple[str, ...],
    signal: Signal,
    layout: Layout,
    wanted: float,
    of_sum: bool,
    memory: Signal | None,
) -> tuple[Residual, float, float]:
    """The residual with its matrices scaled, the factor, and the relative distance that is left."""
    entering = float(layout.token_average(signal.kernel)[0])
    skip, scale = part.skip_scale**2, part.branch_scale**2
    aim = (wanted - skip * entering) / scale if of_sum else wanted
    if aim <= 0:
        return _scaled(part, own, NOTHING), NOTHING, skip * entering / wanted - 1

    def output(factor: float) -> float:
        changed, trace = _scaled(part.branch, own, factor), Trace()
        trace.memory = memory
        return float(layout.token_average(forward(changed, signal, trace)[0].kernel)[0])

    factor = (aim / output(1.0)) ** (1 / len(own))
    if abs(output(factor) / aim - 1) > 1e-12:
        factor = _root(lambda log: math.log(output(math.exp(log)) / aim), math.log(factor), part)
    return _scaled(part, own, factor), factor, 0.0


def _root(distance: Callable[[float], float], start: float, part: Residual) -> float:
    from scipy.optimize import brentq

    width = 0.5
    while distance(start - width) * distance(start + width) > 0:
        width *= 2
        if width > FACTOR_LIMIT:
            raise DomainError(
                f"no variance of the free matrices gives {part.label} its target: its output is "
                "normalised, or saturates"
            )
    return math.exp(brentq(distance, start - width, start + width, xtol=1e-14, rtol=1e-14))


def _scaled(component: Any, own: tuple[str, ...], factor: float) -> Any:
    """A component whose named matrices have their variance times `factor`."""
    if isinstance(component, Chain):
        return Chain(tuple(_scaled(part, own, factor) for part in component.parts))
    if isinstance(component, Parallel):
        raise DomainError("blocks in parallel share one sum: solve for another objective")
    if isinstance(component, Residual):
        return dataclasses.replace(component, branch=_scaled(component.branch, own, factor))
    if isinstance(component, Linear) and component.weight in own:
        parameters = dict(component.parameters)
        parameters["weight_variance"] = parameters["weight_variance"] * factor
        return dataclasses.replace(component, parameters=parameters)
    if isinstance(component, SelfAttention | GatedLinear):
        names = [m for m in own if hasattr(component, m)]
        changes = {name: getattr(component, name) * factor for name in names}
        return dataclasses.replace(component, **changes) if changes else component
    if isinstance(component, CrossAttention) and "cross_value" in own:
        return dataclasses.replace(component, value=component.value * factor)
    return component
