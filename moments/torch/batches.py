"""Batches of a module: as inputs of `predict`, as token ids and targets, and random ones."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..engine.layout import restarted
from ..errors import MomentsError
from ..layers.head.targets import NO_TARGET
from ..model.embedding import Embedding
from ..model.patches import PatchEmbedding, SoundEmbedding
from ..model.transformer import Transformer
from ..prediction.draws import STREAM
from ..prediction.measurement import Measurement, last_grad_kernel
from ..prediction.resolution import positional
from .anatomy import measured_parts
from .measure import Loss, needs_labels
from .roles import ModuleRoles, tensors_of
from .running import (
    batch_first,
    device_of,
    first_tensor,
    hooked,
    in_mode,
    made_on_cpu,
    module_logits,
    module_loss,
    on_device,
    run,
    watch_tensor,
)
from .text import mask_tokens

OWN, SEQUENCES, MOST_TOKENS = 1, 2, 32
"""Sequences of random input, sequences used of a user's batch, and their tokens at most."""

FEW = 16
"""Tokens of passes that test for random operations."""

TARGETS = ("targets", "target", "labels", "label", "y")
"""Usual names of the argument that holds the tokens to predict."""


def shifted_right(labels: np.ndarray, start: int = 0) -> np.ndarray:
    """The input of a decoder that predicts `labels`, (B, L), after an encoder."""
    ids = np.concatenate([np.full((len(labels), 1), start), labels[:, :-1]], axis=1)
    return np.where(ids == NO_TARGET, start, ids)


def shifted_left(labels: np.ndarray) -> np.ndarray:
    """The target of every token, (B, L), of a causal module that shifts its labels itself."""
    return np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=NO_TARGET)


def inputs_of(model: Transformer, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `predict` for a text, or for a batch of pictures or spectrograms.

    Args:
        batch: a Hugging Face module's arguments as numpy arrays.

    Returns:
        Empty if the model has no embedding for them.
    """
    labels = batch.get("labels")
    head = model.head is not None and model.head.loss is not None
    targets = {"targets": labels} if head and labels is not None else {}
    if pixels := _pixels(model.embedding, batch):
        return pixels | targets
    sound = {} if model.encoder is None else _pixels(model.encoder.embedding, batch)
    if not isinstance(model.embedding, Embedding) or not (sound or "input_ids" in batch):
        return {}
    if model.encoder is not None:
        ids = batch.get("decoder_input_ids")
        if ids is None and labels is not None:
            ids = shifted_right(labels)
        if ids is None:
            return {}
        encoder = sound or _text(batch["input_ids"], batch.get("attention_mask"), None)
        text = _text(ids, batch.get("decoder_attention_mask"), None)
        return text | {"encoder_inputs": encoder} | targets
    segments = batch.get("token_type_ids")
    inputs = _text(batch["input_ids"], batch.get("attention_mask"), segments)
    inputs["tokens"] = True
    if (positions := batch.get("position_ids")) is not None:
        documents = restarted(positions, batch.get("attention_mask"))
        if documents is not None:
            inputs["document_ids"] = np.broadcast_to(documents, inputs["token_ids"].shape)
    if targets and model.head is not None and model.head.loss == "causal":
        targets = {"targets": shifted_left(np.asarray(labels))}
    return inputs | targets


def _pixels(embedding: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Pictures, or spectrograms as pictures of one channel: bins down, time across."""
    result = None
    if isinstance(embedding, PatchEmbedding):
        result = batch.get("pixel_values")
        spectrum = batch.get("input_values")
        if result is None and spectrum is not None and np.ndim(spectrum) == 3:
            result = np.swapaxes(spectrum, 1, 2)[:, None]
    elif isinstance(embedding, SoundEmbedding) and "input_features" in batch:
        result = np.asarray(batch["input_features"])[:, None]
    return {} if result is None else {"pixels": np.asarray(result, dtype=float)}


def _text(ids: Any, mask: Any, segments: Any) -> dict[str, Any]:
    result = {"token_ids": np.atleast_2d(ids)}
    if mask is not None and np.ndim(mask) == 2 and not np.all(mask):
        result["attention_mask"] = np.asarray(mask)
    if segments is not None:
        result["segment_ids"] = np.atleast_2d(segments)
    return result


def measured_moments(measurement: Measurement) -> dict[str, Any]:
    """The measured variance and token correlation of the input of layer 1."""
    correlation = _possible(measurement.correlation[0], measurement)
    return {"variance": float(measurement.variance[0]), "correlation": correlation}


def measured_gradient(
    model: Transformer, measurement: Measurement, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """The measured gradient behind the last layer, by token if the prediction is by token."""
    by_token = any(name in inputs for name in ("token_ids", "pixels", "kernel"))
    if by_token or positional(model):
        return {"grad_kernel": last_grad_kernel(measurement)}
    correlation = _possible(measurement.grad_correlation[-1], measurement)
    return {"grad_variance": float(measurement.grad_variance[-1]), "grad_correlation": correlation}


def _possible(correlation: float, measurement: Measurement) -> float:
    """A correlation clipped to the range that so many tokens can have."""
    return float(np.clip(correlation, -1 / max(measurement.seq_len - 1, 1), 1.0))


def batch_shape(batch: Any) -> str:
    """The size of a batch in words."""
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    first = next((v for v in values if np.ndim(v) >= 2), None)
    if first is None:
        return "one batch"
    count, length = np.shape(first)[:2]
    if np.ndim(first) == 4:
        return f"{count} picture{'s' * (count > 1)}"
    return f"{count} sequence{'s' * (count > 1)} of {length} tokens"


# --- measured by hooks: the input of layer 1, token ids, targets ----------------------------------


def first_stream(module: nn.Module, batch: Any) -> np.ndarray | None:
    """The input of layer 1 without dropout, (B, L, d_model); None if it has another shape."""
    points = measured_parts(module, batch)[0]
    if any(point.site.startswith("encoder.") for point in points):
        return None
    point = next((p for p in points if (p.layer, p.site) == (0, STREAM)), None)
    if point is None:
        return None
    seen: list[Tensor] = []
    part = module.get_submodule(point.path)
    _evaluated(module, batch, [watch_tensor(part, point.side, seen.append)])
    if not seen or seen[0].ndim != 3:
        return None
    tensor = seen[0] if batch_first(module) else seen[0].transpose(0, 1)
    return np.asarray(tensor.detach().double().cpu().numpy())


def ids_read(module: nn.Module, batch: Any, vocab_size: int) -> np.ndarray | None:
    """The (B, L) token ids that enter the only table of so many rows, if there is one."""
    seen: list[Tensor] = []
    hooks = (
        watch_tensor(part, "input", seen.append)
        for part in module.modules()
        if isinstance(part, nn.Embedding) and part.num_embeddings == vocab_size
    )
    _evaluated(module, batch, hooks)
    texts = [ids for ids in seen if ids.ndim == 2 and ids.shape[1] > 1]
    return np.asarray(texts[0].cpu().numpy()) if len(texts) == 1 else None


def targets_read(
    module: nn.Module, batch: Any, ids: np.ndarray, loss: Callable[[Any, Any], Tensor] | None = None
) -> np.ndarray | None:
    """The target of every token, (B, L), -100 without one.

    It is the array of the batch, as it is or shifted by one, whose mean cross-entropy with the
    module's logits is the module's loss; None if none is.
    """
    if (output := _evaluated(module, batch)) is None:
        return None
    is_mapping = isinstance(batch, Mapping)
    device = device_of(module)
    values = batch if is_mapping else {"": batch}
    tensors = {name: on_device(value, device) for name, value in values.items()}
    logits, value = module_logits(output), module_loss(output)
    if loss is not None:
        value = loss(output, tensors if is_mapping else tensors[""])
        logits = first_tensor(output) if logits is None else logits
    if logits is None or value is None or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        return None
    for tensor in tensors.values():
        if not is_ids(tensor) or tensor.shape != ids.shape:
            continue
        labels = tensor.cpu().numpy().astype(np.int64)
        for targets in (labels, shifted_left(labels)):
            if targets.max() >= logits.shape[-1] or not np.any(targets >= 0):
                continue
            flat = torch.as_tensor(targets, device=logits.device).flatten()
            result = nn.functional.cross_entropy(logits.flatten(0, 1).float(), flat)
            if abs(float(result) - float(value)) < 1e-4 * abs(float(value)):
                return np.asarray(targets)
    return None


def _evaluated(module: nn.Module, batch: Any, hooks: Iterable[RemovableHandle] = ()) -> Any:
    """A module's output for a batch without dropout; None if it does not run."""
    with in_mode(module, False), hooked(hooks):
        try:
            return run(module, batch)
        except (RuntimeError, ValueError, IndexError, MomentsError):
            return None


def shortened(batch: Any, sequences: int, tokens: int) -> Any:
    """The first tokens of a batch of texts alone; other batches unchanged."""
    if not isinstance(batch, Mapping):
        return batch[:sequences, :tokens] if is_ids(batch) else batch
    shapes = {np.shape(v) for v in batch.values() if np.ndim(v)}
    texts = all(is_ids(v) for v in batch.values() if v is not None)
    if not batch or not texts or len(shapes) != 1:
        return batch
    return {name: v if v is None else v[:sequences, :tokens] for name, v in batch.items()}


def is_ids(value: Any) -> bool:
    """Whether a value is (B, L) token ids."""
    return np.ndim(value) == 2 and not torch.as_tensor(value).is_floating_point()


# --- the batch of a check -------------------------------------------------------------------------


class RunInputs(NamedTuple):
    """The batch that a module is checked on, the same of fewer tokens, its loss, and words."""

    batch: Any
    few: Any
    loss: Loss | None
    words: str


def completed(module: nn.Module, batch: Any) -> Any:
    """A batch with targets or labels, if it is a text alone."""
    return _with_labels(module, _with_targets(module, batch))


def inputs_for(
    module: nn.Module,
    roles: ModuleRoles,
    model: Transformer,
    batch: Any,
    loss: Loss | None,
    example: Any,
) -> RunInputs:
    """The user's batch, or a random one; `example`: the input with which the module was read."""
    random = batch is None
    used = shortened(batch, SEQUENCES, MOST_TOKENS)
    if random:
        used = _random_batch(module, roles, model, example)
        if used is not example and not configured(module):  # it may read fewer tokens
            used = _that_runs(module, used, example)
    used = completed(module, used)
    loss = loss or _next_token_loss(module, used, roles)
    words = f"measured on {batch_shape(used)}" + (" of random input" if random else "")
    return RunInputs(used, shortened(used, 1, FEW), loss, words)


def _that_runs(module: nn.Module, batch: Any, example: Any) -> Any:
    """As many first tokens of a batch as the module runs on; else the example."""
    lengths = (MOST_TOKENS, 24, FEW) if _is_text_alone(batch) else (MOST_TOKENS,)
    with torch.no_grad(), in_mode(module, False):
        for length in lengths:
            few = shortened(batch, SEQUENCES, length)
            with contextlib.suppress(Exception):  # the module's own code, on too many tokens
                run(module, few)
                return few
    return example


@made_on_cpu
def _random_batch(module: nn.Module, roles: ModuleRoles, model: Transformer, example: Any) -> Any:
    """Random input of the kind of the example, with labels of the module's task."""
    generator = torch.Generator().manual_seed(0)
    task = None if model.head is None else model.head.loss
    if isinstance(example, Mapping) and "pixel_values" in example:
        return _classified(module, example) if task == "classification" else example
    token = roles.named("token") or roles.named("token", stack="encoder.")
    if not token or (isinstance(example, Mapping) and "input_ids" not in example):
        return example
    vocab = len(tensors_of(module)[token[0].parameter])
    length = _length(module, roles)
    ids = torch.randint(vocab, (OWN, length), generator=generator)
    if not isinstance(example, Mapping):
        return ids
    if model.encoder is not None:
        labels = torch.randint(vocab, (OWN, length), generator=generator)
        return {"input_ids": ids, "labels": labels} if task else {**example, "input_ids": ids}
    if task == "masked" and "labels" in _arguments(module):
        return _masked(ids, vocab)
    return {"input_ids": ids}


def _masked(ids: Tensor, vocab: int) -> dict[str, Tensor]:
    corrupted, labels = mask_tokens(ids.numpy(), vocab)
    return {"input_ids": torch.as_tensor(corrupted), "labels": torch.as_tensor(labels)}


def _classified(module: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Pictures with random labels, if the module's config says of how many classes."""
    classes = getattr(getattr(module, "config", None), "num_labels", None)
    if not classes:
        return batch
    generator, count = torch.Generator().manual_seed(0), len(batch["pixel_values"])
    return {**batch, "labels": torch.randint(classes, (count,), generator=generator)}


def _length(module: nn.Module, roles: ModuleRoles) -> int:
    """Tokens for which the module has positions; some families reserve a few rows."""
    position, config = roles.named("position"), getattr(module, "config", None)
    reserved = 4 if configured(module) else 0
    lengths = [MOST_TOKENS]
    if position:
        table = tensors_of(module)[position[0].parameter]
        lengths.append(table.numel() // table.shape[-1] - reserved)
    largest = getattr(config, "max_position_embeddings", None)
    if isinstance(largest, int):
        lengths.append(largest - reserved)
    return max(4, min(lengths))


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def configured(module: nn.Module) -> bool:
    """Whether a module has a Hugging Face config."""
    return hasattr(getattr(module, "config", None), "to_dict")


def _with_targets(module: nn.Module, batch: Any) -> Any:
    """Token ids split into inputs and targets, for a module that takes both."""
    arguments = _arguments(module)
    name = next((n for n in TARGETS if n in arguments[1:]), None)
    if name is None or configured(module) or not _is_text_alone(batch):
        return batch
    ((first, ids),) = (batch if isinstance(batch, Mapping) else {arguments[0]: batch}).items()
    ids = torch.as_tensor(ids)
    return {first: ids[:, :-1].contiguous(), name: ids[:, 1:].contiguous()}


@made_on_cpu
def _with_labels(module: nn.Module, batch: Any) -> Any:
    """A batch with labels, for a Hugging Face module that needs them."""
    name, arguments = type(module).__name__, _arguments(module)
    if not needs_labels(name) or not configured(module) or "labels" not in arguments:
        return batch
    if not isinstance(batch, Mapping):
        batch = {arguments[0]: batch}
    ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    if "labels" in batch:
        return batch
    if name.endswith("ForImageClassification") and "pixel_values" in batch:
        return _classified(module, batch)
    if name.endswith("ForMaskedLM") and ids is not None:
        ids = torch.as_tensor(ids)
        return {**batch, **_masked(ids, int(ids.max()) + 1)}
    return batch if ids is None else {**batch, "labels": ids}


def _is_text_alone(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return len(batch) == 1 and is_ids(next(iter(batch.values())))
    return is_ids(batch)


def _next_token_loss(module: nn.Module, batch: Any, roles: ModuleRoles) -> Loss | None:
    """The cross-entropy of the next token, for a module that gives logits and no loss."""
    token = roles.named("token")
    if not token or not _is_text_alone(batch) or configured(module):
        return None
    vocab = len(tensors_of(module)[token[0].parameter])
    ids = torch.as_tensor(next(iter(batch.values())) if isinstance(batch, Mapping) else batch)

    def loss(output: Any, _: Any) -> Tensor:
        logits = first_tensor(output)
        targets = ids.to(logits.device)[:, 1:].flatten()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)

    with in_mode(module, False):
        output = run(module, batch)
    if module_loss(output) is not None:
        return None
    try:
        logits = first_tensor(output)
    except MomentsError:
        return None
    return loss if logits.shape == (*ids.shape, vocab) else None
