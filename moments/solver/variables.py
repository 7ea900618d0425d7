"""What a solver may change: weight variances, scales, temperature, and DSLM's k."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import domain_error
from ..model.transformer import Transformer
from ..model.weights import DEFAULTS, MATRICES

AMPLITUDES = ("branch_scale", "skip_scale", "norm_gain", "temperature")
NAMES = (*MATRICES, *AMPLITUDES, "k")


def names_of(free: Any) -> tuple[str, ...] | None:
    """A name, or several, as a tuple.

    Raises:
        DomainError: neither.
    """
    if free is None or isinstance(free, str):
        return None if free is None else (free,)
    try:
        return tuple(free)
    except TypeError:
        raise domain_error("free", free, "names of what to solve for") from None


def check_free(model: Transformer, free: tuple[str, ...]) -> None:
    """Names that the model has, each once; k beside no other scale.

    Raises:
        DomainError: otherwise.
    """
    for name in free:
        if name not in NAMES:
            raise domain_error("free", name, f"one of {', '.join(NAMES)}")
        if name == "gate" and not model.gated:
            raise domain_error("free", name, "a matrix of the model, which is not gated")
        if name.startswith("cross_") and model.encoder is None:
            raise domain_error("free", name, "a matrix of the model, which has no encoder")
    if len(set(free)) != len(free) or not free:
        raise domain_error("free", free, "one name or more, each once")
    if "k" in free and {"branch_scale", "skip_scale"} & set(free):
        raise domain_error("free", free, "either k, which sets both scales, or the scales")


def scaled(model: Transformer, free: tuple[str, ...], factor: Any) -> Transformer:
    """Every free variance times `factor`, one number or one per layer; amplitudes times its root.

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
    given = np.asarray(value, dtype=float)
    if given.ndim == 0 and np.all(roots == roots[0]):
        return float(given * roots[0])
    return (given * (roots[:, None] if given.ndim == 2 else roots)).tolist()


def scaled_weights(model: Transformer, factors: Mapping[str, Any]) -> Any:
    """The model's weights with matrices' variances times a factor per layer.

    What followed another matrix by default stays where it is unless it is scaled too.
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
    """The logarithms of the factor between which a root is sought."""
    if "k" in free:
        return math.log(1e-6), math.log(model.layers * (1 - 1e-6))
    sharper = {"temperature", "query", "key"} & set(free)
    return (-7.0, 7.0) if sharper else (-25.0, 25.0)
