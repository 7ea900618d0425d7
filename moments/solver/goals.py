"""What can be asked of a model as one number: each goal reads it off a prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..prediction import Prediction
from ..symbols import CORRELATION, POSITIVE, Interval


@dataclass(frozen=True)
class Goal:
    """A number of a prediction that a solver can steer.

    Attributes:
        name: what `solve` takes.
        title: what it is.
        value: reads it off a prediction.
        allowed: what targets make sense.
        free: what is solved for unless the user says otherwise.
    """

    name: str
    title: str
    value: Callable[[Prediction], float]
    allowed: Interval
    free: tuple[str, ...]


def _gradient_ratio(p: Prediction) -> float:
    return float(p.grad_variance[0] / p.grad_variance[-1])


def _query_value(p: Prediction) -> float:
    """Geometric mean over layers of E|dL/dW_q|^2 / E|dL/dW_v|^2."""
    norms = p.weight_gradients().pivot_table(index="layer", columns="weight", values="squared_norm")
    both = norms.loc[1 : p.model.layers]
    return float(np.exp(np.mean(np.log(both["query"] / both["value"]))))


GOALS = {
    goal.name: goal
    for goal in (
        Goal(
            "final_variance",
            "variance of the stream after the last layer",
            lambda p: float(p.variance[-1]),
            POSITIVE,
            ("output", "ffn_out"),
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
