"""Causes of the difference between a live module's measurement and its declaration, ranked."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import DomainError, MomentsError, domain_error
from ..model.embedding import Embedding
from ..model.transformer import Transformer
from ..prediction.measurement import Measurement
from ..show.diagnosis import TOKENS, diagnose_case, print_to_stderr
from ..show.differences import Case, Feature, differences
from ..show.findings import Report
from .anatomy import anatomy_of, as_drawn
from .architecture import promised_by
from .assumptions import Copies, copy_notes, shuffle, shuffled
from .batches import (
    batch_shape,
    configured,
    first_stream,
    ids_read,
    inputs_of,
    measured_gradient,
    measured_moments,
    targets_read,
)
from .describe import broken, described_as
from .expectation import model_of
from .measure import Loss, measure
from .roles import ENCODER
from .running import as_named, batch_on_cpu, built
from .tensors import Checked, Tensors, unchecked
from .weight_findings import advise

LARGE = 1e10
"""Parameters times tokens times draws from which a diagnosis reports its progress."""


def diagnose(
    module: nn.Module | Callable[[int], nn.Module],
    batch: Any = None,
    plan: Any = None,
    *,
    loss: Loss | None = None,
    seeds: int = 1,
    seed: int = 0,
    progress: bool | None = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Measure a live module, compare it with its declaration, and find the likeliest causes.

    Every feature in which the module differs from the declaration is put into the declaration by
    itself (copied layers are redrawn in the module, which is measured once more); the feature that
    removes most of the difference is the likeliest cause. Text, pictures and loss are predicted if
    the model declares embedding and head; else the prediction begins at the measured moments, and
    the diagnosis says that these were not checked.

    Args:
        module, batch, loss, seeds, seed: as of `moments.torch.measure`. With a factory the
            module described is that of `seed`.
        plan: what the module is meant to be: a Transformer, a plan of `moments.solve`, or the name
            of a scheme, which is applied to the module's own architecture. None: that architecture
            with the initialisation of its framework.
        progress: write progress, the verdict as soon as it is known, and the remaining time to
            standard error; None: for large modules.
        options: of the scheme, if the plan is a scheme's name.

    Returns:
        A Report: `str(...)`, `expected`, `causes()`, `unchecked`, `to_frame()`.

    Raises:
        DomainError: a plan of another depth, or none for a module that does not say what it is
            meant to be.
        MomentsError: as `moments.torch.measure`.
    """
    fixed = isinstance(module, nn.Module)
    target = built(module, seed)
    batch = batch_on_cpu(as_named(target, batch))
    reading = anatomy_of(target, batch)
    batch = reading.example if batch is None else batch
    if progress is None:
        progress = _large(target, batch, seeds)
    if progress:
        print_to_stderr(f"measuring {type(target).__name__}, {seeds} draw{'s' * (seeds > 1)}")

    def measured(at: nn.Module | Callable[[int], nn.Module]) -> Measurement:
        return measure(at, batch, loss=loss, seeds=seeds, seed=seed, progress=bool(progress))

    measurement = measured(module)
    described = promised_by(target, measurement.seq_len)
    read = as_drawn(reading) if described is None else described
    if plan is None and described is None:
        left = ("weights", "biases", "embedding", "head", "encoder")
        typed = [
            f"{field.name}={'moments.' * dataclasses.is_dataclass(value)}{value!r}"
            for field in (() if read is None else dataclasses.fields(read))
            if field.init and field.name not in left
            if (value := getattr(read, field.name)) != field.default
        ]
        words = ", ".join([*typed, "weights=moments.Weights(...)"])
        raise DomainError(
            "nothing in the module says how it is meant to be drawn: pass the plan that it should "
            f"follow, such as moments.Transformer({words}), or the name of a scheme"
        )
    declared = at_length(described if plan is None else model_of(plan, read, options), measurement)
    if declared.layers != measurement.layers:
        raise domain_error("layers of the plan", declared.layers, f"{measurement.layers}")
    tensors, result, notes = Tensors.of(target, reading), None, list[str]()
    try:
        result = described_as(at_length(described or declared, measurement), tensors)
        notes = broken(tensors)
    except MomentsError as error:
        notes.append(f"weights and scales of the module could not be read: {error}")
    if plan is None and result is not None and not hasattr(target, "config"):
        # torch's own layers draw biases at random, which a class does not declare.
        declared = declared.replace(biases=result.biases)
    text = Text.of(target, declared, batch, loss)
    case = case_of(declared, text, measurement)
    unseen = _not_predicted(target, case, measurement)
    advice, features = tuple[str, ...](), list[Feature]()
    if result is not None:
        changed = result
        if reading.bidirectional is not None:
            with contextlib.suppress(DomainError):  # a mask that no declaration allows
                changed = result.replace(causal=not reading.bidirectional)
        if (one_pass := reading.model) is not None:
            names = "dropout", "attention_dropout", "activation_dropout", "ffn_dropout"
            changed = changed.replace(**{name: getattr(one_pass, name) for name in names})
        likely = advise(Checked.entries(tensors, declared), declared, read)
        for feature in differences(declared, changed):
            reasons = likely.reasons.get(feature.name.replace("encoder ", ENCODER), ())
            words = "; ".join(filter(None, (feature.words, "; or ".join(reasons))))
            features.append(dataclasses.replace(feature, words=words))
        advice = tuple(sentence for _, sentence in likely.crossed)
        if repeated := tensors.repeated:
            notes = [note for note in notes if note not in set(copy_notes(repeated))]

            def without_copies() -> Measurement:
                if not isinstance(module, nn.Module):
                    return measured(lambda draw: shuffle(built(module, draw), repeated, draw))
                with shuffled(target, repeated, seed):
                    return measured(module)

            features.append(_copied(repeated, without_copies, text))
        unseen = [*unchecked(declared, reading.roles, reading.sums), *unseen]
        unseen += ["the attention mask"] if reading.bidirectional is None else []
    else:
        unseen.insert(0, "its weights, scales and norms")
    if "token_ids" not in case.inputs and "pixels" not in case.inputs:
        features += tokens_entering(first_stream(target, batch), case, measurement)
    if progress:
        print_to_stderr(f"predicting {declared.layers} layers at {declared.seq_len} tokens")
    return diagnose_case(
        case,
        measurement,
        features,
        source=type(target).__name__,
        same_weights=fixed,
        notes=notes,
        advice=advice,
        unchecked=unseen,
        read=f"measured on {batch_shape(batch)}",
        progress=bool(progress),
    )


def _large(module: nn.Module, batch: Any, seeds: int) -> bool:
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    tokens = max((int(np.prod(np.shape(v)[:2])) for v in values if np.ndim(v) >= 2), default=1)
    return seeds * tokens * sum(int(p.numel()) for p in module.parameters()) > float(LARGE)


@dataclasses.dataclass(frozen=True)
class Text:
    """The input and the targets of a module.

    Attributes:
        arrays: the batch, with its token ids, if any, as "input_ids".
        ids: (B, L) token ids; None without text or with two stacks.
        targets: of every token, if the value of the loss shows them.
        predicted: whether the loss can be predicted from the head.
    """

    arrays: dict[str, Any]
    ids: np.ndarray | None
    targets: np.ndarray | None
    predicted: bool

    @classmethod
    def of(cls, module: nn.Module, model: Transformer, batch: Any, loss: Loss | None) -> Text:
        arrays, known = arrays_of(batch), configured(module)
        if model.encoder is not None or not isinstance(model.embedding, Embedding):
            return cls(arrays, None, None, known and loss is None)
        ids = arrays.get("input_ids") if known else None
        if ids is None:
            ids = ids_read(module, batch, model.embedding.vocab_size)
        if ids is None:
            ids = arrays.get("input_ids")
        elif not known:
            arrays = arrays | {"input_ids": ids}
        targets = None
        if ids is not None and (loss is not None or not known):
            targets = targets_read(module, batch, ids, loss)
        return cls(arrays, ids, targets, targets is not None or (known and loss is None))


def _not_predicted(module: nn.Module, case: Case, measurement: Measurement) -> list[str]:
    """Phrases on an embedding, or head and loss, that was measured instead of predicted."""
    result, declared, none = [], case.model, "the model declares none"
    tables = any(isinstance(part, nn.Embedding) for part in module.modules())
    if tables and not {"token_ids", "pixels"} & set(case.inputs):
        why = none if declared.embedding is None else "it is not known what input it reads"
        result.append(f"the embedding (what enters layer 1 was measured, not predicted: {why})")
    if any(name.startswith("grad_") for name in case.inputs) and measurement.loss is not None:
        if declared.head is not None and declared.head.loss is not None:
            none = "the loss is not the declared one of any targets in the batch"
        said = "head and loss (the last layer's gradient was measured, not predicted"
        result.append(f"{said}: {none})")
    return result


def _copied(repeated: Sequence[Copies], measure: Callable[[], Measurement], text: Text) -> Feature:
    """Copied layers as a feature; `measure`: measures the module without copies."""
    measured = functools.cache(measure)

    def apply(case: Case) -> Case:
        fresh = case_of(case.model, text, measured())
        inputs = {name: v for name, v in case.inputs.items() if not name.startswith("grad_")}
        inputs |= {name: v for name, v in fresh.inputs.items() if name.startswith("grad_")}
        return dataclasses.replace(case, inputs=inputs, measurement=measured())

    words = "; ".join(sentence.partition(":")[0] for sentence in copy_notes(repeated))
    layers = tuple(sorted({layer for roles in repeated for layer in (r.layer for r in roles)}))
    return Feature("copied layers", f"{words}, declared independent", math.nan, layers, apply)


def at_length(model: Transformer | None, measurement: Measurement) -> Transformer:
    """The model at the measured sequence length."""
    assert model is not None
    if model.encoder is not None and measurement.encoder is not None:
        model = model.replace(encoder=at_length(model.encoder, measurement.encoder))
    same = model.seq_len == measurement.seq_len
    return model if same else model.replace(seq_len=measurement.seq_len)


def arrays_of(batch: Any) -> dict[str, Any]:
    """The batch as numpy arrays; an array of integers is token ids."""
    values = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    arrays = {
        name: value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }
    if "input_ids" in arrays and np.asarray(arrays["input_ids"]).dtype.kind == "f":
        del arrays["input_ids"]
    return arrays


def case_of(declared: Transformer, text: Text, measurement: Measurement) -> Case:
    """The declared model with its inputs for the batch."""
    inputs = inputs_of(declared, text.arrays) or measured_moments(measurement)
    head = declared.head is not None and declared.head.loss is not None
    if text.targets is not None:
        inputs["targets"] = text.targets
    if measurement.loss is None or not text.predicted or not head:
        inputs.pop("targets", None)
        inputs |= measured_gradient(declared, measurement, inputs)
    return Case(declared, inputs)


def tokens_entering(
    first: np.ndarray | None, case: Case, measurement: Measurement
) -> list[Feature]:
    """Unlike tokens as a feature: the kernel of the measured input of layer 1, (B, L, d_model)."""
    if first is None or "kernel" in case.inputs or first.shape[1] != measurement.seq_len:
        return []
    x = first.astype(float)
    kernel = np.einsum("bid,bjd->ij", x, x) / (len(x) * x.shape[-1])
    variances = np.diag(kernel)
    if variances.min() <= 0:
        return []
    kurtosis = float((x**4).mean() / (x**2).mean() ** 2)
    words = (
        f"input: token variances from {variances.min():.3g} to {variances.max():.3g} and kurtosis "
        f"{kurtosis:.3g}, declared alike and Gaussian (3)"
    )

    def apply(case: Case) -> Case:
        rest = {k: v for k, v in case.inputs.items() if k not in ("variance", "correlation")}
        return dataclasses.replace(case, inputs=rest | {"kernel": kernel})

    return [Feature(TOKENS, words, float("nan"), (), apply)]
