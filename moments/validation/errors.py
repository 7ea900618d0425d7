"""Errors of the theories over the stored grid, by configuration and by class of configurations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DomainError, domain_error, without_warnings
from ..files import as_frame
from ..formulas.law import THEORIES, Theory
from ..prediction.predict import predict
from ..prediction.result import Prediction
from .grid import FACTORS, GRID, Configuration
from .store import StoredSimulation, load

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

FIRST_POSITION = 4
"""First token of compared profiles, counted from 0: earlier tokens have most of the gradient, and
dominate `grad_variance`, which is compared too."""

DEEP_POST = 36
"""Number of Post-LN layers above which rare draws dominate the mean over draws: see `typical`."""

MEASURES: dict[str, str] = {
    "grad": "mean over layers of |log(predicted / simulated)| of the gradient variance",
    "grad_beyond": "the part of `grad` beyond two standard errors",
    "grad_bias": "as `grad`, with its sign: positive where too much is predicted",
    "variance": "mean over layers of |predicted / simulated - 1| of the forward variance",
    "variance_beyond": "the part of `variance` beyond two standard errors",
    "correlation": "mean over layers of |predicted - simulated| token correlation",
    "correlation_beyond": "the part of `correlation` beyond two standard errors",
    "typical": "as `grad`, of the geometric mean over draws; Post-LN deeper than 36 layers only",
    "typical_beyond": "the part of `typical` beyond two standard errors",
    "profile": "as `grad`, over tokens from the fifth on, at layers 0 and N // 2; causal only",
    "profile_beyond": "the part of `profile` beyond two standard errors",
}
"""Columns of `errors`. Means exclude prescribed ends (forward index 0, gradient index N); a measure
that a theory does not predict is NaN."""

CLASS = ("norm", "mask", "layers")


def _log_ratio(prediction: Array, simulated: Array) -> Array:
    return np.log(np.maximum(prediction, np.finfo(float).tiny) / simulated)


def _beyond(error: Array, stderr: Array) -> Array:
    return np.maximum(error - 2 * stderr, 0.0)


def _typical(configuration: Configuration, prediction: Prediction) -> Array | None:
    """The predicted geometric mean; None if it is not compared or not predicted."""
    if configuration.norm != "post" or configuration.layers <= DEEP_POST:
        return None
    try:
        return prediction.grad_variance_typical
    except DomainError:
        return None


def _profile(prediction: Prediction, stored: StoredSimulation) -> tuple[float, float]:
    """Mean error of the gradient variance by token, and the part beyond two standard errors."""
    tokens = prediction.token_grad_variance
    if tokens is None or not stored.profile:
        return float("nan"), float("nan")
    errors, beyond = [], []
    for layer, simulated in stored.profile.items():
        compared = slice(FIRST_POSITION, None)
        error = np.abs(_log_ratio(tokens[layer][compared], simulated[compared]))
        errors.append(error)
        stderr = stored.profile_stderr[layer][compared] / simulated[compared]
        beyond.append(_beyond(error, stderr))
    return float(np.mean(errors)), float(np.mean(beyond))


def measure(
    configuration: Configuration, prediction: Prediction, stored: StoredSimulation
) -> dict[str, float]:
    """All MEASURES of one prediction, and `noise`, the mean relative stderr of `grad`."""
    values, stderr = stored.values, stored.stderr
    simulated, variance = values["grad_variance"], values["variance"]
    gradient = (
        _log_ratio(prediction.grad_variance, simulated),
        stderr["grad_variance"] / simulated,
    )
    compared = {
        "grad": gradient,
        "variance": (prediction.variance / variance - 1, stderr["variance"] / variance),
        "correlation": (prediction.correlation - values["correlation"], stderr["correlation"]),
    }
    typical = _typical(configuration, prediction)
    if typical is not None:
        error = _log_ratio(typical, np.exp(values["log_grad_variance"]))
        compared["typical"] = error, stderr["log_grad_variance"]
    result = dict.fromkeys(MEASURES, float("nan"))
    for name, (error, noise) in compared.items():
        judged = slice(1, None) if name in ("variance", "correlation") else slice(None, -1)
        size = np.abs(error[judged])
        result[name] = float(size.mean())
        result[f"{name}_beyond"] = float(_beyond(size, noise[judged]).mean())
    result["grad_bias"] = float(gradient[0][:-1].mean())
    result["profile"], result["profile_beyond"] = _profile(prediction, stored)
    return result | {"noise": float(gradient[1][:-1].mean())}


def errors(
    theories: Sequence[Theory] = THEORIES,
    configurations: Iterable[Configuration] = GRID,
    stored: Mapping[str, StoredSimulation] | None = None,
    progress: Callable[[Configuration], None] | None = None,
) -> pd.DataFrame:
    """Compare theories with the stored simulations: one row per configuration and theory.

    Args:
        theories: the theories.
        configurations: a part of the grid.
        stored: simulations by name; None: those of the package.
        progress: called after each configuration.

    Returns:
        Columns: name, mask, the factors of the grid, theory, failure (the error if the theory
        predicts nothing, else empty), warned (whether it warned about its validity), seconds of the
        prediction, seeds and simulated_seconds of the simulation, noise and MEASURES.

    Raises:
        DomainError: there is no simulation of a configuration as it is in the grid.
    """
    stored = load() if stored is None else stored
    rows: list[dict[str, Any]] = []
    configurations = tuple(configurations)
    for c in configurations:  # before any prediction
        entry = stored.get(c.name)
        if entry is None or entry.digest != c.digest or not entry.covers(c):
            raise domain_error("configuration", c.name, "one of those simulated")
    for c in configurations:
        entry = stored[c.name]
        described = {"name": c.name, "mask": "causal" if c.causal else "full"}
        described |= {factor: getattr(c, factor) for factor in FACTORS}
        for theory in theories:
            row: dict[str, Any] = {**described, "theory": theory, "failure": "", "warned": False}
            row |= {"seeds": entry.seeds, "simulated_seconds": entry.seconds}
            began = time.perf_counter()
            try:
                with without_warnings():
                    prediction = predict(c.model, **c.ends, theory=theory)
            except DomainError as error:
                row |= {"failure": str(error), "seconds": time.perf_counter() - began}
                row |= dict.fromkeys(["noise", *MEASURES], float("nan"))
            else:
                row |= {"seconds": time.perf_counter() - began, "warned": bool(prediction.warnings)}
                row |= measure(c, prediction, entry)
            rows.append(row)
        if progress is not None:
            progress(c)
    return as_frame(rows)


def by_class(frame: pd.DataFrame, keys: Sequence[str] = CLASS) -> pd.DataFrame:
    """Means of the measures over the configurations of a class that did not fail.

    Columns: `keys`, theory, runs, failed, noise and MEASURES.
    """
    grouped = frame.groupby([*keys, "theory"], sort=False)
    result = grouped[["noise", *MEASURES]].mean()
    result.insert(0, "failed", grouped["failure"].agg(lambda messages: int((messages != "").sum())))
    result.insert(0, "runs", grouped.size())
    return result.reset_index().sort_values(
        [*keys, "theory"],
        key=lambda column: column.map(THEORIES.index) if column.name == "theory" else column,
        ignore_index=True,
    )
