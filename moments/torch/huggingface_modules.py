"""Randomly initialised Hugging Face modules from a config, and batches for them."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from ..errors import domain_error, optional, refused
from ..formulas.checks import check_count
from ..model.huggingface.config import family, read_config
from ..model.huggingface.family import Family
from ..model.huggingface.sizes import at_depth
from .text import Ids, mask_tokens, tokenize

with optional("hf", "torch", "transformers"):
    import torch
    import transformers
    from torch import nn

_LOSSES = {"causal": "ForCausalLM", "masked": "ForMaskedLM"}


# Entries of any config that affect a module's shape without choosing code or files.
_SHAPING = frozenset(("id2label", "label2id", "num_labels", "is_encoder_decoder", "problem_type"))


def settings_of(config: Any) -> tuple[Family, Any]:
    """The family of a config, and the transformers config object that its module is built from.

    Only entries that describe the architecture are passed to transformers: those of the family's
    own config class, of its reader here, and of labels. Entries that choose implementations, code,
    precision or files (attn_implementation, auto_map, quantization_config, ...) are not.

    Raises:
        DomainError: an unknown family, or entries that it or transformers refuses.
        MomentsError: torch or transformers is not installed.
    """
    entries = read_config(config)
    kind = entries.pop("model_type", None)
    result = family(kind)
    with refused(f"config of type {kind!r}"):
        config_class = transformers.CONFIG_MAPPING[kind]
    described = set(inspect.signature(config_class.__init__).parameters)
    described -= set(inspect.signature(transformers.PretrainedConfig.__init__).parameters)
    allowed = described | _SHAPING | result.entries({"model_type": kind} | entries)
    entries = {name: value for name, value in entries.items() if name in allowed}
    if result.task == "translation":
        entries.setdefault("decoder_start_token_id", 0)  # T5's, which its class does not set
    vocab_size = entries.get("vocab_size")
    with refused(f"config of type {kind!r}"):
        settings = config_class(**entries)
    # A small vocabulary may lack the family's special tokens.
    if vocab_size is not None:
        for name in _TOKENS:
            token = getattr(settings, name, None)
            if name not in entries and isinstance(token, int) and token >= vocab_size:
                setattr(settings, name, None if name == "pad_token_id" else vocab_size - 1)
    return result, settings


_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def named_class(config: Any, *names: Any) -> Any:
    """The first of these model classes of transformers that belongs to the config's type."""
    for name in names:
        kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
        model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        if model and kind.config_class is type(config):
            return kind
    return None


def build_module(config: Any, seed: int = 0, *, layers: int | None = None) -> nn.Module:
    """A module with fresh weights, drawn by transformers' own initialisation of that family.

    Args:
        config: a path to config.json (or its folder), a dict, or a PretrainedConfig, of one of
            `moments.model.huggingface.FAMILIES`; the module is the one with the head of the
            family's own task.
        seed: of the weights; torch's random state is left as it was.
        layers: replaces the config's depth (which GPT-2's output projections depend on), of both
            stacks if there are two.

    Raises:
        DomainError: an unreadable config, another `model_type`, or a bad entry.
        MomentsError: torch or transformers is not installed.
    """
    check_count("seed", seed, least=0)
    entries = read_config(config)
    family(entries.get("model_type"))
    result, settings = settings_of(entries if layers is None else at_depth(entries, layers))
    if result.task in _LOSSES:
        settings.loss_type = _LOSSES[result.task]
    with torch.random.fork_rng(devices=[]), refused(f"config of type {settings.model_type!r}"):
        torch.manual_seed(seed)
        module: nn.Module = getattr(transformers, result.module)(settings)
    return module


def text_batch(config: Any, *, seq_len: int, batch: int = 2, seed: int = 0) -> dict[str, Ids]:
    """Input ids and labels of English text for the config's own training task.

    For a masked model the text is corrupted and the labels are the tokens at chosen positions; for
    a causal model labels are the text; for a model of two stacks the encoder's input is one part of
    the text, and the decoder's labels are the next. All segments are the first.

    Returns:
        "input_ids" and "labels", each (B, L) integers; a label of -100 is no target.

    Raises:
        DomainError: a config or an argument out of range, or a family that reads images.
    """
    result, settings = settings_of(config)
    if result.task == "images":
        raise domain_error("config", result.module, "a family that reads text", "use image_batch")
    vocab_size = int(settings.vocab_size)
    if result.task == "translation":
        ids = tokenize(vocab_size, seq_len, 2 * batch)
        return {"input_ids": ids[::2].copy(), "labels": ids[1::2].copy()}
    ids = tokenize(vocab_size, seq_len, batch)
    inputs, labels = mask_tokens(ids, vocab_size, seed) if result.task == "masked" else (ids, ids)
    return {"input_ids": inputs, "labels": labels}


def image_batch(config: Any, *, batch: int = 2, seed: int = 0) -> dict[str, Any]:
    """Pictures and labels for a family that classifies images.

    Pictures are smooth random fields with the power spectrum 1/f^2 of natural images (Field 1987),
    each channel centred and of variance 1, as preprocessing leaves them.

    Returns:
        "pixel_values" (B, channels, height, width) and "labels" (B,).

    Raises:
        DomainError: a config or an argument out of range, or a family that reads text.
    """
    check_count("batch", batch)
    check_count("seed", seed, least=0)
    result, settings = settings_of(config)
    if result.task != "images":
        raise domain_error("config", result.module, "a family that reads images", "use text_batch")
    size, channels = int(settings.image_size), int(settings.num_channels)
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None, :])
    amplitude = np.divide(1.0, frequency, out=np.zeros_like(frequency), where=frequency > 0)
    white = np.fft.rfft2(random.standard_normal((batch, channels, size, size)))
    pixels = np.fft.irfft2(white * amplitude, s=(size, size))
    pixels /= pixels.std((2, 3), keepdims=True)
    labels = random.integers(0, settings.num_labels, batch)
    return {"pixel_values": pixels.astype(np.float32), "labels": labels}


def module_batch(
    config: Any, *, seq_len: int | None = None, batch: int = 2, seed: int = 0
) -> dict[str, Any]:
    """A batch for the config's own training task: text, or pictures."""
    if family(read_config(config).get("model_type")).task == "images":
        return image_batch(config, batch=batch, seed=seed)
    if seq_len is None:
        raise domain_error("seq_len", None, "given for a family that reads text")
    return text_batch(config, seq_len=seq_len, batch=batch, seed=seed)
