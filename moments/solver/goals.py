"""What can be asked of a model: numbers read off a prediction, one of all or one per layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..formulas.symbols import CORRELATION, POSITIVE, Interval
from ..prediction.result import Prediction


@dataclass(frozen=True)
class Goal:
    """A number of a prediction that a solver can steer, or one per layer.

    Attributes:
        name: what `solve` takes.
        title: what it is.
        value: reads it off a prediction; shape () or (N,).
        allowed: what targets make sense.
        free: what is solved for unless the user says otherwise.
        at_most: whether a target is the most that is allowed, and not what must be met.
        of_stream: whether the layers up to the last one fix it, whatever gradient returns, and a
            stack's first layers are a shallower stack; it is the moment named "final_...".
    """

    name: str
    title: str
    value: Callable[[Prediction], Any]
    allowed: Interval
    free: tuple[str, ...]
    at_most: bool = False
    of_stream: bool = False

    def distance(self, value: Any, target: Any) -> Any:
        """Signed and relative, 0 at the target: the logarithm of a positive quantity's ratio."""
        if self.allowed is POSITIVE:
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.log(np.asarray(value) / target)
        return np.asarray(value) - target


def _gradient_ratio(p: Prediction) -> float:
    return float(p.grad_variance[0] / p.grad_variance[-1])


def query_value_ratios(p: Prediction) -> np.ndarray:
    """E|dL/dW_q|^2 / E|dL/dW_v|^2 of self-attention in every layer, shape (N,)."""
    frame = p.weight_gradients()
    inside = frame[(frame.layer >= 1) & (frame.layer <= p.model.layers)]
    query, value = (
        inside[inside.weight == name].squared_norm.to_numpy() for name in ("query", "value")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(query / value)


def _query_value(p: Prediction) -> float:
    with np.errstate(divide="ignore"):
        return float(np.exp(np.mean(np.log(query_value_ratios(p)))))


GOALS = {
    goal.name: goal
    for goal in (
        Goal(
            "final_variance",
            "variance of the stream after the last layer",
            lambda p: float(p.variance[-1]),
            POSITIVE,
            ("output", "ffn_out"),
            of_stream=True,
        ),
        Goal(
            "gradient_ratio",
            "gradient variance at the first layer's input over that at the last layer's output",
            _gradient_ratio,
            POSITIVE,
            ("output", "ffn_out"),
        ),
        Goal(
            "final_correlation",
            "token correlation after the last layer",
            lambda p: float(p.correlation[-1]),
            CORRELATION,
            ("branch_scale",),
            at_most=True,
            of_stream=True,
        ),
        Goal(
            "query_value_balance",
            "squared gradient norm of the query over that of the value weights, geometric mean",
            _query_value,
            POSITIVE,
            ("temperature",),
        ),
    )
}

PROFILES = {
    goal.name: goal
    for goal in (
        Goal(
            "flat_gradient",
            "gradient variance at every layer's input over that at its output",
            lambda p: p.grad_variance[:-1] / p.grad_variance[1:],
            POSITIVE,
            ("output", "ffn_out"),
        ),
        Goal(
            "query_value_balance_per_layer",
            "squared gradient norm of the query over that of the value weights in every layer",
            query_value_ratios,
            POSITIVE,
            ("temperature",),
        ),
    )
}
