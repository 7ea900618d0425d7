"""Stored measurements of real modules against predictions: errors with their standard errors."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from real_modules import CHUNK, QUANTITIES, Case

# Chunks from which a sum's standard error is that of the chunks' sums
_ENOUGH = 6


@dataclass(frozen=True)
class Gap:
    """Errors of one quantity and the standard errors of what they are held against, (k,) each."""

    error: np.ndarray
    stderr: np.ndarray

    @property
    def mean(self) -> float:
        return float(np.abs(self.error).mean())

    @property
    def worst(self) -> float:
        return float(np.abs(self.error).max())

    @property
    def beyond(self) -> float:
        """The largest error that twice its standard error does not cover."""
        return float(np.maximum(np.abs(self.error) - 2 * self.stderr, 0.0).max())


@dataclass(frozen=True)
class Comparison:
    """One case.

    Attributes:
        variance, correlation, grad_variance: over the stream's N + 1 places; relative errors, the
            correlation's absolute.
        loss, total: one entry each, relative; `total` over all parameters.
        matrices, vectors: of every parameter of every layer.
        by_name: error and standard error of every parameter's norm, summed over layers.
        missing: parameters that are not predicted.
        measured: loss, mean squared logit, and the entering tensor's variance and correlation.
        predicted: the same.
        outside_band: places where the measured mean gradient is outside the band of one draw, of
            cases that are held to it.
    """

    seeds: int
    seconds: float
    variance: Gap
    correlation: Gap
    grad_variance: Gap
    loss: Gap
    total: Gap
    matrices: Gap
    vectors: Gap
    by_name: dict[str, tuple[float, float]]
    missing: list[str]
    measured: dict[str, float]
    predicted: dict[str, float]
    outside_band: int
    warnings: list[str]


def compare_case(case: Case) -> Comparison:
    """Errors of one case, each with the Monte-Carlo error of what it is held against."""
    chunks = case.stored()["chunks"]
    seeds = CHUNK * len(chunks)
    start = time.perf_counter()
    p = case.predicted()
    seconds = time.perf_counter() - start
    assert p.loss is not None
    assert p.logit_variance is not None
    stream, means = {}, {}
    for name in QUANTITIES:
        samples = np.concatenate([np.reshape(c[name], (CHUNK, -1)) for c in chunks])
        means[name], error = samples.mean(0), samples.std(0, ddof=1) / math.sqrt(seeds)
        scale = 1.0 if name == "correlation" else means[name]
        stream[name] = Gap((np.asarray(getattr(p, name)) - means[name]) / scale, error / scale)
    outside = 0
    if case.in_band:
        low, high = np.asarray(p.grad_variance_band)
        gradient = means["grad_variance"]
        outside = int(((gradient < low) | (gradient > high)).sum())
    loss, error = pooled(np.array([c["loss"] for c in chunks]))
    logit, _ = pooled(np.array([c["logit_variance"] for c in chunks]))
    weights = compare_weights(p, chunks)
    return Comparison(
        seeds,
        seconds,
        variance=stream["variance"],
        correlation=stream["correlation"],
        grad_variance=stream["grad_variance"],
        loss=Gap(np.array([float(p.loss) / loss - 1]), np.array([error / loss])),
        **weights,
        measured={"loss": float(loss), "logit": float(logit)}
        | {name: float(means[name][0]) for name in QUANTITIES[:2]},
        predicted={"loss": float(p.loss), "logit": float(p.logit_variance)}
        | {name: float(getattr(p, name)[0]) for name in QUANTITIES[:2]},
        outside_band=outside,
        warnings=list(p.warnings),
    )


def pooled(pairs: np.ndarray) -> tuple[Any, Any]:
    """Mean and standard error over chunks, (chunks, ..., 2), from those of each chunk."""
    means, errors = pairs[..., 0], pairs[..., 1]
    count = len(means) * CHUNK
    within = CHUNK * (CHUNK - 1) * (errors**2).sum(0)
    between = CHUNK * ((means - means.mean(0)) ** 2).sum(0)
    return means.mean(0), np.sqrt((within + between) / (count - 1) / count)


def compare_weights(p: Any, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Gaps of all parameters, of each and summed."""
    rows, found = weight_rows(p), [dict(c["weights"]) for c in chunks]
    if chunks[0]["encoder"] and p.encoder is not None:
        read = weight_rows(p.encoder)
        # One table for both stacks: what reaches it from either is taken as independent.
        rows["0 token"] += read.pop("0 token", 0.0)
        rows |= {f"encoder {k}": v for k, v in read.items()}
        for each, chunk in zip(found, chunks, strict=True):
            each |= {f"encoder {k}": v for k, v in chunk["encoder"]["weights"].items()}
    keys = [k for k in found[0] if max(each[k][0] for each in found) > 1e-12]
    known = [k for k in keys if k in rows]
    values = np.array([[each[k] for k in keys] for each in found])
    mean, error = pooled(values)
    predicted = np.array([rows.get(k, 0.0) for k in keys])
    names = [("encoder." if k.startswith("encoder ") else "") + k.rpartition(" ")[2] for k in keys]
    single = {k: (predicted[i] / mean[i] - 1, error[i] / mean[i]) for i, k in enumerate(keys)}
    by_name = {}
    for name in dict.fromkeys(names[keys.index(k)] for k in known):
        which = np.array([n == name for n in names])
        by_name[name] = summed(values[:, which], predicted[which])
    vectors = [k for k in known if k.endswith((".bias", ".gain"))]
    matrices = [k for k in known if k not in vectors]

    def gap(chosen: list[str]) -> Gap:
        if not chosen:
            return Gap(np.zeros(1), np.zeros(1))
        return Gap(*np.array([single[k] for k in chosen]).T)

    total = summed(values, predicted)
    return {
        "total": Gap(np.array(total[:1]), np.array(total[1:])),
        "matrices": gap(matrices),
        "vectors": gap(vectors),
        "by_name": by_name,
        "missing": sorted({n for k, n in zip(keys, names, strict=True) if k not in rows}),
    }


def summed(values: np.ndarray, predicted: np.ndarray) -> tuple[float, float]:
    """Relative error of a sum of norms, values (chunks, k, 2), and its standard error.

    Parameters of one draw are correlated: their sum's error is that of the chunks' sums where there
    are enough, else the sum of the errors, an upper bound.
    """
    sums = values[..., 0].sum(1)
    mean = sums.mean()
    error = pooled(values)[1].sum()
    if len(sums) >= _ENOUGH:
        error = sums.std(ddof=1) / math.sqrt(len(sums))
    return float(predicted.sum() / mean - 1), float(error / mean)


def weight_rows(p: Any) -> dict[str, float]:
    return {
        f"{row.layer} {row.weight}": float(row.squared_norm)
        for row in p.weight_gradients().itertuples()
    }
