"""Errors of the theories over the stored grid, per configuration and per class of them."""

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
"""Profiles are compared from this token on, counted from 0: the first few hold most of the gradient
and are in `grad_variance` already."""

DEEP_POST = 36
"""Beyond so many layers of Post-LN the mean over draws is ruled by rare draws: see `typical`."""

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
"""What the columns of `errors` hold. An imposed end (forward index 0, gradient index N) counts in
no mean; a measure that a theory does not offer is NaN."""

CLASS = ("norm", "mask", "layers")


def _log_ratio(prediction: Array, simulated: Array) -> Array:
    return np.log(np.maximum(prediction, np.finfo(float).tiny) / simulated)


def _beyond(error: Array, stderr: Array) -> Array:
    return np.maximum(error - 2 * stderr, 0.0)


def _typical(configuration: Configuration, prediction: Prediction) -> Array | None:
    """The predicted geometric mean, None where it is not judged or the theory has none."""
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
        kept = slice(FIRST_POSITION, None)
        error = np.abs(_log_ratio(tokens[layer][kept], simulated[kept]))
        errors.append(error)
        beyond.append(_beyond(error, stored.profile_stderr[layer][kept] / simulated[kept]))
    return float(np.mean(errors)), float(np.mean(beyond))


def measure(
    configuration: Configuration, prediction: Prediction, stored: StoredSimulation
) -> dict[str, float]:
    """All MEASURES of one prediction, and `noise`, the mean relative stderr of `grad`."""
    values, stderr = stored.values, stored.stderr
    seen, variance = values["grad_variance"], values["variance"]
    gradient = _log_ratio(prediction.grad_variance, seen), stderr["grad_variance"] / seen
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
    """Hold theories against the stored simulations: one row per configuration and theory.

    Args:
        theories: which formulas.
        configurations: which part of the grid.
        stored: simulations by name; None: those that come with the package.
        progress: called as each configuration is done.

    Returns:
        Columns: name, mask, the factors of the grid, theory, failure (the error where the theory
        gave no numbers, else empty), warned (whether it said that it left its validity), seconds of
        the prediction, seeds and simulated_seconds of the simulation, noise and MEASURES.

    Raises:
        DomainError: a configuration was not simulated as the grid now has it.
    """
    stored = load() if stored is None else stored
    rows: list[dict[str, Any]] = []
    configurations = tuple(configurations)
    for c in configurations:  # before any work that one that is missing would waste
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
    """Means of the measures over configurations of a class that gave numbers.

    Columns: `keys`, theory, runs, failed, noise and MEASURES. Measures are means over the runs that
    did not fail: read them together with `failed`.
    """
    grouped = frame.groupby([*keys, "theory"], sort=False)
    result = grouped[["noise", *MEASURES]].mean()
    result.insert(0, "failed", grouped["failure"].agg(lambda messages: int((messages != "").sum())))
    result.insert(0, "runs", grouped.size())
    return result.reset_index().sort_values(
        [*keys, "theory"],
        key=lambda of: of.map(THEORIES.index) if of.name == "theory" else of,
        ignore_index=True,
    )
