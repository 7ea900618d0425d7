"""Objectives that are read off a prediction, one number or one per layer, and the free variables of
a solver: weight variances, scales, temperature, and DSLM's k."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import domain_error
from ..formulas.checks import CORRELATION, POSITIVE, Interval
from ..model.transformer import Transformer
from ..model.weights import DEFAULTS, MATRICES
from ..prediction.result import Prediction

# --- goals ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """An objective: one number of a prediction, or one per layer.

    Attributes:
        name, title: its name in `solve`, and its meaning.
        value: reads it off a prediction; shape () or (N,).
        allowed: the interval of targets.
        free: the default free variables.
        at_most: whether the target is an upper bound and not a value to reach.
    """

    name: str
    title: str
    value: Callable[[Prediction], Any]
    allowed: Interval
    free: tuple[str, ...]
    at_most: bool = False

    def distance(self, value: Any, target: Any) -> Any:
        """Signed distance: log(value / target) of positive quantities, else the difference."""
        if self.allowed is POSITIVE:
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.log(np.asarray(value) / target)
        return np.asarray(value) - target


def _gradient_ratio(p: Prediction) -> float:
    return float(p.grad_variance[0] / p.grad_variance[-1])


def query_value_ratios(p: Prediction) -> np.ndarray:
    """E|dL/dW_q|^2 / E|dL/dW_v|^2 of self-attention in every layer, shape (N,); nan for a layer
    without queries."""
    norms = p.weight_gradients().set_index(["weight", "layer"]).squared_norm
    layers = range(1, p.model.layers + 1)
    query, value = (
        norms.reindex([(name, n) for n in layers]).to_numpy() for name in ("query", "value")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(query / value)


def _query_value(p: Prediction) -> float:
    with np.errstate(divide="ignore"):
        logs = np.log(query_value_ratios(p))
    finite_logs = logs[~np.isnan(logs)]
    return float(np.exp(np.mean(finite_logs))) if finite_logs.size else float("nan")


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
            at_most=True,
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


# --- what may vary --------------------------------------------------------------------------------

AMPLITUDES = ("branch_scale", "skip_scale", "norm_gain", "temperature")
NAMES = (*MATRICES, *AMPLITUDES, "k")


def names_of(free: Any) -> tuple[str, ...] | None:
    """A name, or several, as a tuple."""
    if free is None or isinstance(free, str):
        return None if free is None else (free,)
    try:
        return tuple(free)
    except TypeError:
        raise domain_error("free", free, "names of what to solve for") from None


def matrices_of(model: Transformer) -> tuple[str, ...]:
    """Names of a model's matrices."""
    absent = (() if model.gated else ("gate",)) + (("cross_",) if model.encoder is None else ())
    absent += () if model.attention_gate else ("attention_gate",)
    return tuple(name for name in MATRICES if not name.startswith(absent))


def check_free(model: Transformer, free: tuple[str, ...]) -> None:
    """Raise DomainError unless these are names of the model, each once, and k without a scale."""
    for name in free:
        if name not in NAMES:
            raise domain_error("free", name, f"one of {', '.join(NAMES)}")
        if name == "gate" and not model.gated:
            raise domain_error("free", name, "a matrix of the model, which is not gated")
        if name == "attention_gate" and model.attention_gate is None:
            allowed = "a matrix of the model, whose attention is not gated"
            raise domain_error("free", name, allowed)
        if name.startswith("cross_") and model.encoder is None:
            raise domain_error("free", name, "a matrix of the model, which has no encoder")
    if len(set(free)) != len(free) or not free:
        raise domain_error("free", free, "one name or more, each once")
    if "k" in free and {"branch_scale", "skip_scale"} & set(free):
        raise domain_error("free", free, "either k, which sets both scales, or the scales")


def scaled(model: Transformer, free: tuple[str, ...], factor: Any) -> Transformer:
    """Multiply free variances by `factor`, one number or one per layer, amplitudes by its root.

    "k" sets branch_scale^2 = factor / layers and skip_scale^2 = 1 - branch_scale^2.
    """
    changes: dict[str, Any] = {}
    factors = np.broadcast_to(np.asarray(factor, dtype=float), model.layers)
    matrices = {name: factors for name in free if name in MATRICES}
    if matrices:
        changes["weights"] = scaled_weights(model, matrices)
    for name in AMPLITUDES:
        if name in free:
            changes[name] = _scaled_amplitude(getattr(model, name), np.sqrt(factors))
    if "k" in free:
        branch = float(factor) / model.layers
        changes |= {"branch_scale": math.sqrt(branch), "skip_scale": math.sqrt(1 - branch)}
    return model.replace(**changes)


def _scaled_amplitude(value: Any, roots: np.ndarray) -> Any:
    amplitude = np.asarray(value, dtype=float)
    if amplitude.ndim == 0 and np.all(roots == roots[0]):
        return float(amplitude * roots[0])
    return (amplitude * (roots[:, None] if amplitude.ndim == 2 else roots)).tolist()


def scaled_weights(model: Transformer, factors: Mapping[str, Any]) -> Any:
    """The model's weights with variances multiplied by a factor per layer.

    A matrix whose variance defaults to that of another keeps its value unless it is scaled too.
    """
    assert model.weights is not None
    changes: dict[str, Any] = {}
    for name, factor in factors.items():
        values = np.asarray(model.weights.of(name)) * np.asarray(factor)
        same = bool(np.all(values == values[0]))
        changes[name] = float(values[0]) if same else values.tolist()
    for name, like in DEFAULTS.items():
        if like in changes and name not in changes:
            changes[name] = model.weights.of(name)
    return model.weights.replace(**changes)


def bounds(model: Transformer, free: tuple[str, ...]) -> tuple[float, float]:
    """The range of the factor's logarithm in which a root is searched."""
    if "k" in free:
        return math.log(1e-6), math.log(model.layers * (1 - 1e-6))
    sharper = {"temperature", "query", "key"} & set(free)
    return (-7.0, 7.0) if sharper else (-25.0, 25.0)
