"""What a solver may change: weight variances, scales, temperature, and DSLM's k."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import domain_error
from ..transformer import Transformer
from ..weights import MATRICES

AMPLITUDES = ("branch_scale", "skip_scale", "norm_gain", "temperature")
NAMES = (*MATRICES, *AMPLITUDES, "k")


def check_free(free: tuple[str, ...]) -> None:
    """Known names, each once; k beside no other scale.

    Raises:
        DomainError: otherwise.
    """
    for name in free:
        if name not in NAMES:
            raise domain_error("free", name, f"one of {', '.join(NAMES)}")
    if len(set(free)) != len(free) or not free:
        raise domain_error("free", free, "one name or more, each once")
    if "k" in free and {"branch_scale", "skip_scale"} & set(free):
        raise domain_error("free", free, "either k, which sets both scales, or the scales")


def scaled(model: Transformer, free: tuple[str, ...], factor: float) -> Transformer:
    """Every free variance times `factor`; amplitudes times its square root.

    "k" sets branch_scale^2 = factor / layers and skip_scale^2 = 1 - branch_scale^2.
    """
    changes: dict[str, Any] = {}
    matrices = {name: (factor,) * model.layers for name in free if name in MATRICES}
    if matrices:
        changes["weights"] = scaled_weights(model, matrices)
    for name in AMPLITUDES:
        if name in free:
            values = np.asarray(getattr(model, name)) * math.sqrt(factor)
            changes[name] = float(values) if values.ndim == 0 else values.tolist()
    if "k" in free:
        branch = factor / model.layers
        changes |= {"branch_scale": math.sqrt(branch), "skip_scale": math.sqrt(1 - branch)}
    return model.replace(**changes)


def scaled_weights(model: Transformer, factors: Mapping[str, tuple[float, ...]]) -> Any:
    """The model's weights with matrices' variances times a factor per layer."""
    assert model.weights is not None
    changes: dict[str, Any] = {}
    for name, factor in factors.items():
        values = np.asarray(model.weights.of(name)) * np.asarray(factor)
        same = bool(np.all(values == values[0]))
        changes[name] = float(values[0]) if same else values.tolist()
    return model.weights.replace(**changes)


def bounds(model: Transformer, free: tuple[str, ...]) -> tuple[float, float]:
    """The logarithms of the factor between which a root is sought."""
    if "k" in free:
        return math.log(1e-6), math.log(model.layers * (1 - 1e-6))
    sharper = {"temperature", "query", "key"} & set(free)
    return (-7.0, 7.0) if sharper else (-30.0, 30.0)
