"""A real module's batch, as `predict` is given it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..engine.layout import restarted
from ..layers.head.targets import NO_TARGET
from ..model.embedding import Embedding
from ..model.patches import PatchEmbedding, SoundEmbedding
from ..model.transformer import Transformer
from ..prediction.measurement import Measurement, last_grad_kernel
from ..prediction.resolution import positional


def shifted_right(labels: np.ndarray, start: int = 0) -> np.ndarray:
    """What an encoder-decoder's decoder reads to predict `labels`, (B, L)."""
    read = np.concatenate([np.full((len(labels), 1), start), labels[:, :-1]], axis=1)
    return np.where(read == NO_TARGET, start, read)


def shifted_left(labels: np.ndarray) -> np.ndarray:
    """Target of every token of a causal module that shifts its labels itself, (B, L)."""
    return np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TARGET)


def inputs_of(model: Transformer, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a text, or a batch of pictures or spectrograms, is to the model, as keyword arguments of
    `predict`.

    `batch` holds a Hugging Face module's arguments as numpy arrays; empty where the model has no
    embedding for them.
    """
    labels = batch.get("labels")
    head = model.head is not None and model.head.loss is not None
    given: dict[str, Any] = _pixels(model.embedding, batch)
    if given:
        return given | ({"targets": labels} if head and labels is not None else {})
    heard = {} if model.encoder is None else _pixels(model.encoder.embedding, batch)
    if not isinstance(model.embedding, Embedding) or not (heard or "input_ids" in batch):
        return {}
    if model.encoder is not None:
        read = batch.get("decoder_input_ids")
        if read is None and labels is not None:
            read = shifted_right(labels)
        if read is None:
            return {}
        other = heard or _text(batch["input_ids"], batch.get("attention_mask"), None)
        given = _text(read, batch.get("decoder_attention_mask"), None) | {"encoder_inputs": other}
        return given | ({"targets": labels} if head and labels is not None else {})
    segments = batch.get("token_type_ids")
    given = _text(batch["input_ids"], batch.get("attention_mask"), segments)
    given["tokens"] = True
    if (places := batch.get("position_ids")) is not None:
        documents = restarted(places, batch.get("attention_mask"))
        if documents is not None:
            given["document_ids"] = np.broadcast_to(documents, given["token_ids"].shape)
    if head and labels is not None:
        assert model.head is not None
        causal = model.head.loss == "causal"
        given["targets"] = shifted_left(labels) if causal else labels
    return given


def _pixels(embedding: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Pictures, or spectrograms as pictures of one channel, bins down and time across."""
    found = None
    if isinstance(embedding, PatchEmbedding):
        found = batch.get("pixel_values")
        heard = batch.get("input_values")
        if found is None and heard is not None and np.ndim(heard) == 3:
            found = np.swapaxes(heard, 1, 2)[:, None]
    elif isinstance(embedding, SoundEmbedding) and "input_features" in batch:
        found = np.asarray(batch["input_features"])[:, None]
    return {} if found is None else {"pixels": np.asarray(found, dtype=float)}


def _text(ids: Any, mask: Any, segments: Any) -> dict[str, Any]:
    given = {"token_ids": np.atleast_2d(ids)}
    if mask is not None and np.ndim(mask) == 2 and not np.all(mask):
        given["attention_mask"] = np.asarray(mask)
    if segments is not None:
        given["segment_ids"] = np.atleast_2d(segments)
    return given


def measured_moments(measurement: Measurement) -> dict[str, Any]:
    """The tensor that entered layer 1, tokens alike: its variance and token correlation."""
    correlation = _possible(measurement.correlation[0], measurement)
    return {"variance": float(measurement.variance[0]), "correlation": correlation}


def measured_gradient(
    model: Transformer, measurement: Measurement, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """The gradient that entered the last layer, by token where the prediction is."""
    by_token = any(name in inputs for name in ("token_ids", "pixels", "kernel"))
    if by_token or positional(model):
        return {"grad_kernel": last_grad_kernel(measurement)}
    correlation = _possible(measurement.grad_correlation[-1], measurement)
    return {"grad_variance": float(measurement.grad_variance[-1]), "grad_correlation": correlation}


def _possible(correlation: float, measurement: Measurement) -> float:
    """Of so many tokens, what sampling may have put outside of that range."""
    return float(np.clip(correlation, -1 / max(measurement.seq_len - 1, 1), 1.0))


def batch_shape(batch: Any) -> str:
    """How much a batch holds, in words."""
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    first = next((v for v in values if np.ndim(v) >= 2), None)
    if first is None:
        return "one batch"
    count, length = np.shape(first)[:2]
    if np.ndim(first) == 4:
        return f"{count} picture{'s' * (count > 1)}"
    return f"{count} sequence{'s' * (count > 1)} of {length} tokens"
