"""Plans for targets that every layer has for itself, solved block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DomainError, domain_error
from ..formulas.checks import check_in
from ..formulas.symbols import POSITIVE, Interval
from ..model.transformer import Transformer
from .block import MATRICES, average
from .entering import entered
from .layerwise import LAYERWISE, reached, solve_blocks
from .plan import Plan
from .replay import Target
from .variables import scaled_weights


def by_block(
    model: Transformer,
    objective: str,
    target: Any,
    free: tuple[str, ...] | None,
    tolerance: float,
    inputs: Mapping[str, Any],
) -> Plan:
    """The plan of "stream_variance" or "block_variance", with the residual of a pass through it.

    Raises:
        DomainError: a free variable or target that the objective has not, or a model in which
            something else fixes the variance.
    """
    names = _matrices(model) if free is None else free
    allowed = [name for block in MATRICES.values() for name in block]
    for name in names:
        if name not in allowed:
            raise domain_error("free", name, f"one of {', '.join(allowed)}")
    targets = per_layer_targets(model, target, POSITIVE)
    of_sum = objective == "stream_variance"
    if of_sum:
        _check_stream(model, names)
    stack, memory = entered(model, inputs)
    signal = stack.enter()
    wanted = _ramp(targets, average(stack.layout, signal.kernel.diagonal), model)
    found = solve_blocks(
        model,
        signal,
        stack.layout,
        names,
        wanted if of_sum else lambda layer, _: float(targets[layer - 1]),
        of_sum,
        memory,
    )
    solved = model.replace(weights=scaled_weights(model, found.factors))
    values, each = _reached(solved, names, targets, of_sum, inputs)
    far = np.abs(values / each - 1)
    feasible = float(far.max()) <= tolerance and not found.missed
    nearest = found.nearest if found.missed else float(values[far.argmax()])
    return Plan(
        solved,
        objective,
        f"{LAYERWISE[objective]} = {worded(target)}",
        stored(target),
        names,
        float(far.max()),
        feasible=feasible,
        nearest=None if feasible else nearest,
        tolerance=tolerance,
        inputs=inputs,
    )


def _matrices(model: Transformer) -> tuple[str, ...]:
    cross = ("cross_value", "cross_output") if model.encoder is not None else ()
    return ("value", "output", *cross, "ffn_in", *(("gate",) if model.gated else ()), "ffn_out")


def _check_stream(model: Transformer, free: tuple[str, ...]) -> None:
    after = {"post", "b2t", "hybrid"} & set(model.placements)
    if after or model.layernorm_scaling == "after-residual":
        raise DomainError(
            "stream_variance is set by what follows the sum: solve for block_variance"
        )
    if not {"ffn_in", "gate", "ffn_out"} & set(free):
        raise domain_error("free", free, "a feed-forward matrix too, which ends each layer")


def _reached(
    model: Transformer,
    names: tuple[str, ...],
    targets: np.ndarray,
    of_sum: bool,
    inputs: Mapping[str, Any],
) -> tuple[np.ndarray, np.ndarray]:
    """What a pass through the solved model gives, and the targets there."""
    stack, _ = entered(model, inputs)
    moved = {block for block, matrices in MATRICES.items() if set(matrices) & set(names)}
    moved = {"ffn"} if of_sum else moved
    rows = [row for row in reached(stack)[0] if row.block in moved]
    values = np.array([row.total if of_sum else row.output for row in rows])
    return values, targets[[row.layer - 1 for row in rows]]


def _ramp(targets: np.ndarray, entering: float, model: Transformer) -> Target:
    """What the stream shall have after every block: even steps from one layer's end to the next."""
    ends = [entering, *targets.tolist()]
    blocks = ["attention", *(["cross"] if model.encoder is not None else []), "ffn"]
    shares = {block: (i + 1) / len(blocks) for i, block in enumerate(blocks)}
    return lambda n, block: ends[n - 1] + shares[block] * (ends[n] - ends[n - 1])


def per_layer_targets(model: Transformer, target: Any, allowed: Interval) -> np.ndarray:
    """A target per layer, (N,), from one number or N.

    Raises:
        DomainError: neither, or outside what is allowed.
    """
    check_in("target", target, allowed)
    if np.shape(target) not in ((), (model.layers,)):
        raise domain_error("target", target, f"one number, or one per layer ({model.layers})")
    return np.broadcast_to(np.asarray(target, dtype=float), model.layers)


def worded(target: Any) -> str:
    """A target in a plan's title."""
    return f"{target:g}" if np.ndim(target) == 0 else "one value per layer"


def stored(target: Any) -> float | tuple[float, ...]:
    """A target as a plan keeps it."""
    return float(target) if np.ndim(target) == 0 else tuple(float(v) for v in target)
