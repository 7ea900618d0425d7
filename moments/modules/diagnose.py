"""Why a live module does not do what it was declared to do: measured, described, ranked."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from moments.batches import inputs_of, measured_dropout, measured_gradient, measured_moments
from moments.diagnosis import Diagnosis, diagnose_case
from moments.differences import Case, Feature, differences
from moments.errors import DomainError, MomentsError, domain_error
from moments.expected import TOLERANCE
from moments.measurement import Measurement
from moments.modules.architecture import architecture_of
from moments.modules.describe import describe
from moments.modules.entering import first_stream, sees_ahead
from moments.modules.expectation import model_of
from moments.optional import optional
from moments.transformer import Transformer

with optional("torch", "torch"):
    import torch
    from torch import nn

DROPOUT = 0.02
"""Difference in probability from which dropout is taken to be another than declared."""


def diagnose(
    module: nn.Module | Callable[[int], nn.Module],
    batch: Any,
    model: Any = None,
    *,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    seeds: int = 1,
    seed: int = 0,
    inputs: Mapping[str, Any] | None = None,
    sites: Iterable[Any] | None = None,
    names: Mapping[str, str] | None = None,
    tolerance: float = TOLERANCE,
    progress: bool = False,
) -> Diagnosis:
    """Measure a live module, hold it against its declaration, and find the likeliest causes.

    The module is described as it is: the variances of its weights, its residual multipliers and
    gains, its mask and dropout, and what enters it. Every feature in which that is not as declared
    is put into the declaration by itself; what removes most of the difference is the likeliest
    cause. A text or pictures, and the module's own loss, are predicted from the model's embedding
    and head where it declares them; else the measured moments of the tensor entering layer 1, and
    of the gradient at the last layer, are where the prediction begins.

    Args:
        module, batch, loss, seeds, seed, sites, progress: as of `moments.torch.measure`. With a
            factory the module described is that of `seed`.
        model: what the module is meant to be: a Transformer, a plan of `moments.solve`, or the name
            of a scheme, which is applied to the module's own architecture. None: that architecture
            with the initialisation of its framework.
        inputs: arguments of `predict` that describe the input, where the batch shall not.
        names: as of `moments.torch.describe`, for a module of one's own.
        tolerance: as of `moments.compare`.

    Returns:
        A Diagnosis: `str(...)`, `expected`, `causes`, `to_frame()`.

    Raises:
        DomainError: a model of another depth, or none for a module whose architecture is not known.
        MomentsError: as `moments.torch.measure`.
    """
    from moments.torch import measure

    sites = None if sites is None else list(sites)
    measurement = measure(
        module, batch, loss=loss, seeds=seeds, seed=seed, sites=sites, progress=progress
    )
    fixed = isinstance(module, nn.Module)
    target = module if isinstance(module, nn.Module) else module(seed)
    own = _architecture(target, measurement, names)
    if model is None and own is None:
        raise DomainError(
            "the module's architecture is not known: pass the model that it is meant to be"
        )
    declared = _at_length(own if model is None else model_of(model, own), measurement)
    if declared.layers != measurement.layers:
        raise domain_error("layers of the model", declared.layers, f"{measurement.layers}")
    found, notes = _described(target, batch, measurement, own or declared, names, sites)
    if model is None and found is not None and not hasattr(target, "config"):
        # torch's own layers draw theirs: what is there is one draw of the framework's.
        declared = declared.replace(biases=found.biases)
    arrays = _arrays(batch)
    case, features = _case(declared, arrays, measurement, inputs, loss is not None)
    if found is not None:
        changed = _with_mask(found, sees_ahead(target, batch, sites, declared.layers))
        changed = _with_dropout(changed, declared, measurement)
        features = [*differences(declared, changed), *features]
    if "token_ids" not in case.inputs and "pixels" not in case.inputs:
        features += _tokens(first_stream(target, batch, sites), case, measurement)
    return diagnose_case(
        case, measurement, features, same_weights=fixed, tolerance=tolerance, notes=notes
    )


def _architecture(
    module: nn.Module, measurement: Measurement, names: Mapping[str, str] | None
) -> Transformer | None:
    if names is not None:
        return None
    try:
        return architecture_of(module, measurement.seq_len)
    except MomentsError:
        return None


def _at_length(model: Transformer | None, measurement: Measurement) -> Transformer:
    """The model for as many tokens as were seen."""
    assert model is not None
    if model.encoder is not None and measurement.encoder is not None:
        model = model.replace(encoder=_at_length(model.encoder, measurement.encoder))
    if model.seq_len == measurement.seq_len:
        return model
    return model.replace(seq_len=measurement.seq_len)


def _described(
    module: nn.Module,
    batch: Any,
    measurement: Measurement,
    architecture: Transformer,
    names: Mapping[str, str] | None,
    sites: list[Any] | None,
) -> tuple[Transformer | None, list[str]]:
    """The module as it is, and what was said about it; None where it cannot be read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = describe(
                module,
                batch=batch,
                names=names,
                sites=sites,
                architecture=_at_length(architecture, measurement),
            )
        except MomentsError as error:
            return None, [f"weights and scales of the module could not be read: {error}"]
    return found, list(dict.fromkeys(str(w.message) for w in caught))


def _arrays(batch: Any) -> dict[str, Any]:
    """The batch as numpy arrays; integers alone are token ids."""
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    arrays = {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    if "input_ids" in arrays and np.asarray(arrays["input_ids"]).dtype.kind == "f":
        del arrays["input_ids"]
    return arrays


def _case(
    declared: Transformer,
    batch: Mapping[str, Any],
    measurement: Measurement,
    inputs: Mapping[str, Any] | None,
    own_loss: bool,
) -> tuple[Case, list[Feature]]:
    """The declared model on the batch, and how its input differs from what the user says."""
    measured = measured_moments(measurement)
    given = inputs_of(declared, batch) if inputs is None else dict(inputs)
    features = []
    if not given:
        given = dict(measured)
    elif {"variance", "correlation"} & set(given):
        features = _moments(given, measured)
    predicted = declared.head is not None and declared.head.loss is not None
    if measurement.loss is None or own_loss or not predicted:
        given.pop("targets", None)
        if not any(name.startswith("grad_") for name in given):
            given |= measured_gradient(declared, measurement, given)
    return Case(declared, given), features


def _moments(given: Mapping[str, Any], measured: dict[str, Any]) -> list[Feature]:
    variance, correlation = given.get("variance", 1.0), given.get("correlation", 0.0)
    words = (
        f"input: variance {measured['variance']:.3g}, declared {variance:.3g}; token correlation "
        f"{measured['correlation']:.3g}, declared {correlation:.3g}"
    )

    def apply(case: Case) -> Case:
        return dataclasses.replace(case, inputs=case.inputs | measured)

    return [Feature("input", words, measured["variance"] / variance, (), apply)]


def _tokens(first: np.ndarray | None, case: Case, measurement: Measurement) -> list[Feature]:
    """Tokens that are not alike, as the kernel of what entered layer 1."""
    if first is None or "kernel" in case.inputs or first.shape[1] != measurement.seq_len:
        return []
    wide = first.astype(float)
    kernel = np.einsum("bid,bjd->ij", wide, wide) / (len(wide) * wide.shape[-1])
    by_token = np.diag(kernel)
    if by_token.min() <= 0:
        return []
    kurtosis = float((wide**4).mean() / (wide**2).mean() ** 2)
    words = (
        f"input: token variances from {by_token.min():.3g} to {by_token.max():.3g} and kurtosis "
        f"{kurtosis:.3g}, declared alike and Gaussian (3)"
    )

    def apply(case: Case) -> Case:
        rest = {k: v for k, v in case.inputs.items() if k not in ("variance", "correlation")}
        return dataclasses.replace(case, inputs=rest | {"kernel": kernel})

    return [Feature("input tokens", words, float("nan"), (), apply)]


def _with_mask(model: Transformer, ahead: bool | None) -> Transformer:
    """The model with the mask that was seen to act; None: not seen."""
    if ahead is None or ahead is not model.causal:
        return model
    try:
        return model.replace(causal=not ahead)
    except DomainError:
        return model


def _with_dropout(
    model: Transformer, declared: Transformer, measurement: Measurement
) -> Transformer:
    seen = measured_dropout(measurement)
    if seen is None:
        return model
    value, stderr = seen
    unclear = max(DROPOUT, 4 * stderr)
    if abs(value - declared.dropout) < unclear:
        return model.replace(dropout=declared.dropout)
    return model.replace(dropout=round(value, 3) if value >= unclear else 0.0)
