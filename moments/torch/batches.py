"""A real module's batch, as `predict` is given it."""

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
"""Sequences that are read of random input and of a user's batch, and their tokens."""

FEW = 16
"""Tokens of the runs that look at sums, masks and dropout."""

TARGETS = ("targets", "target", "labels", "label", "y")
"""What people call the tokens to predict."""


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
    result = None
    if isinstance(embedding, PatchEmbedding):
        result = batch.get("pixel_values")
        heard = batch.get("input_values")
        if result is None and heard is not None and np.ndim(heard) == 3:
            result = np.swapaxes(heard, 1, 2)[:, None]
    elif isinstance(embedding, SoundEmbedding) and "input_features" in batch:
        result = np.asarray(batch["input_features"])[:, None]
    return {} if result is None else {"pixels": np.asarray(result, dtype=float)}


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


# --- what a few runs show: what enters layer 1, ids, targets --------------------------------------


def first_stream(module: nn.Module, batch: Any) -> np.ndarray | None:
    """The tensor that enters layer 1 without dropout, (B, L, d_model); None where it is no such."""
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
    """The (B, L) token ids that the one table of so many rows looks up, if there is one."""
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
    """Every token's target, (B, L), -100 where nothing.

    Of the arrays in the batch, as they are and shifted by one, that whose mean cross-entropy with
    the module's logits is its loss; None where there is none.
    """
    if (output := _evaluated(module, batch)) is None:
        return None
    alone = not isinstance(batch, Mapping)
    given = {"": batch} if alone else batch
    device = device_of(module)
    tensors = {name: on_device(value, device) for name, value in given.items()}
    logits, value = module_logits(output), module_loss(output)
    if loss is not None:
        value = loss(output, tensors[""] if alone else tensors)
        logits = first_tensor(output) if logits is None else logits
    if logits is None or value is None or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        return None
    for one in tensors.values():
        if not isinstance(one, Tensor) or one.shape != ids.shape or one.is_floating_point():
            continue
        labels = one.cpu().numpy().astype(np.int64)
        for targets in (labels, shifted_left(labels)):
            if targets.max() >= logits.shape[-1] or not np.any(targets >= 0):
                continue
            flat = torch.as_tensor(targets, device=logits.device).flatten()
            result = nn.functional.cross_entropy(logits.flatten(0, 1).float(), flat)
            if abs(float(result) - float(value)) < 1e-4 * abs(float(value)):
                return np.asarray(targets)
    return None


def _evaluated(module: nn.Module, batch: Any, hooks: Iterable[RemovableHandle] = ()) -> Any:
    """What a module makes of a batch without dropout; None where it cannot be run."""
    with in_mode(module, False), hooked(hooks):
        try:
            return run(module, batch)
        except (RuntimeError, ValueError, IndexError, MomentsError):
            return None


def shortened(batch: Any, sequences: int, tokens: int) -> Any:
    """Of a text that is all it holds, the first tokens; anything else as it is."""
    if not isinstance(batch, Mapping):
        return batch[:sequences, :tokens] if is_ids(batch) else batch
    shapes = {np.shape(v) for v in batch.values() if np.ndim(v)}
    texts = all(is_ids(v) for v in batch.values() if v is not None)
    if not batch or not texts or len(shapes) != 1:
        return batch
    return {name: v if v is None else v[:sequences, :tokens] for name, v in batch.items()}


def is_ids(value: Any) -> bool:
    """Whether it is (B, L) token ids."""
    return np.ndim(value) == 2 and not torch.as_tensor(value).is_floating_point()


# --- what it is run on ----------------------------------------------------------------------------


class RunInputs(NamedTuple):
    """What a module is run on; `few` is `batch` of fewer tokens."""

    batch: Any
    few: Any
    loss: Loss | None
    words: str


def completed(module: nn.Module, batch: Any) -> Any:
    """A batch with what a module is trained on, where it holds the text alone."""
    return _with_labels(module, _with_targets(module, batch))


def inputs_for(
    module: nn.Module,
    roles: ModuleRoles,
    model: Transformer,
    batch: Any,
    loss: Loss | None,
    example: Any,
) -> RunInputs:
    """A batch of one's own, or the user's; `example` is what the module was run on to be read."""
    random = batch is None
    given = shortened(batch, SEQUENCES, MOST_TOKENS)
    if random:
        given = _own_batch(module, roles, model, example)
        if given is not example and not configured(module):  # nothing says how much it reads
            given = _that_runs(module, given, example)
    given = completed(module, given)
    loss = loss or _next_token(module, given, roles)
    words = f"measured on {batch_shape(given)}" + (" of random input" if random else "")
    return RunInputs(given, shortened(given, 1, FEW), loss, words)


def _that_runs(module: nn.Module, given: Any, example: Any) -> Any:
    """Of the longest first tokens of a batch those that the module reads; else the example."""
    lengths = (MOST_TOKENS, 24, FEW) if _ids_alone(given) else (MOST_TOKENS,)
    with torch.no_grad(), in_mode(module, False):
        for length in lengths:
            few = shortened(given, SEQUENCES, length)
            with contextlib.suppress(Exception):  # the module's own code, on too many tokens
                run(module, few)
                return few
    return example


@made_on_cpu
def _own_batch(module: nn.Module, roles: ModuleRoles, model: Transformer, given: Any) -> Any:
    """Random input like what is `given`, with what the module is trained on."""
    generator = torch.Generator().manual_seed(0)
    task = None if model.head is None else model.head.loss
    if isinstance(given, Mapping) and "pixel_values" in given:
        classes = getattr(getattr(module, "config", None), "num_labels", None)
        if task != "classification" or not classes:
            return given
        return _classified(given, classes, generator)
    token = roles.named("token") or roles.named("token", stack="encoder.")
    if not token or (isinstance(given, Mapping) and "input_ids" not in given):
        return given
    vocab = len(tensors_of(module)[token[0].parameter])
    length = _length(module, roles)
    ids = torch.randint(vocab, (OWN, length), generator=generator)
    if not isinstance(given, Mapping):
        return ids
    if model.encoder is not None:
        labels = torch.randint(vocab, (OWN, length), generator=generator)
        return {"input_ids": ids, "labels": labels} if task else {**given, "input_ids": ids}
    if task == "masked" and "labels" in _arguments(module):
        read, labels = mask_tokens(ids.numpy(), vocab)
        return {"input_ids": torch.as_tensor(read), "labels": torch.as_tensor(labels)}
    return {"input_ids": ids}


def _classified(batch: Mapping[str, Any], classes: int, generator: torch.Generator) -> Any:
    count = len(batch["pixel_values"])
    return {**batch, "labels": torch.randint(classes, (count,), generator=generator)}


def _length(module: nn.Module, roles: ModuleRoles) -> int:
    """Tokens that its tables have positions for; some families keep a few rows to themselves."""
    position, config = roles.named("position"), getattr(module, "config", None)
    kept = 4 if hasattr(config, "to_dict") else 0
    rows = [MOST_TOKENS]
    if position:
        table = tensors_of(module)[position[0].parameter]
        rows.append(table.numel() // table.shape[-1] - kept)
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int):
        rows.append(most - kept)
    return max(4, min(rows))


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def configured(module: nn.Module) -> bool:
    """Whether its arguments are Hugging Face's."""
    return hasattr(getattr(module, "config", None), "to_dict")


def _with_targets(module: nn.Module, batch: Any) -> Any:
    """Token ids alone, for a module that takes what to predict beside them."""
    arguments = _arguments(module)
    name = next((n for n in TARGETS if n in arguments[1:]), None)
    if name is None or configured(module) or not _ids_alone(batch):
        return batch
    ((first, ids),) = (batch if isinstance(batch, Mapping) else {arguments[0]: batch}).items()
    ids = torch.as_tensor(ids)
    return {first: ids[:, :-1].contiguous(), name: ids[:, 1:].contiguous()}


@made_on_cpu
def _with_labels(module: nn.Module, batch: Any) -> Any:
    """Labels for a Hugging Face module that makes none of its own."""
    config: Any = getattr(module, "config", None)
    name, arguments = type(module).__name__, _arguments(module)
    if not needs_labels(name) or not configured(module) or "labels" not in arguments:
        return batch
    if not isinstance(batch, Mapping):
        batch = {arguments[0]: batch}
    ids = batch.get("decoder_input_ids", batch.get("input_ids"))
    if "labels" in batch:
        return batch
    if name.endswith("ForImageClassification") and "pixel_values" in batch:
        generator = torch.Generator().manual_seed(0)
        return _classified(batch, config.num_labels, generator)
    if name.endswith("ForMaskedLM") and ids is not None:
        rows = torch.as_tensor(ids)
        read, labels = mask_tokens(rows.numpy(), int(rows.max()) + 1)
        changed = {"input_ids": torch.as_tensor(read), "labels": torch.as_tensor(labels)}
        return {**batch, **changed}
    return batch if ids is None else {**batch, "labels": ids}


def _ids_alone(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return len(batch) == 1 and is_ids(next(iter(batch.values())))
    return is_ids(batch)


def _next_token(module: nn.Module, batch: Any, roles: ModuleRoles) -> Loss | None:
    """The cross-entropy of the next token, for a module that gives logits and no loss."""
    token = roles.named("token")
    if not token or not _ids_alone(batch) or configured(module):
        return None
    vocab = len(tensors_of(module)[token[0].parameter])
    ids = torch.as_tensor(next(iter(batch.values())) if isinstance(batch, Mapping) else batch)

    def loss(output: Any, _: Any) -> Tensor:
        logits = first_tensor(output)
        wanted = ids.to(logits.device)[:, 1:].flatten()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted)

    with in_mode(module, False):
        output = run(module, batch)
    if module_loss(output) is not None:
        return None
    try:
        logits = first_tensor(output)
    except MomentsError:
        return None
    whole = logits.ndim == 3 and logits.shape[:2] == ids.shape and logits.shape[-1] == vocab
    return loss if whole else None
