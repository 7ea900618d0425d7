"""Randomly initialised Hugging Face modules from a config, and text for them to read."""

from __future__ import annotations

import functools
from typing import Any

from moments.checks import check_count
from moments.errors import domain_error
from moments.huggingface import read_config
from moments.measurement import Measurement
from moments.optional import optional
from moments.text import Ids, mask_tokens, tokenize

with optional("hf", "torch", "transformers"):
    import torch
    import transformers
    from torch import nn

# model_type -> class of the module, and the loss that transformers gives it
_CLASSES = {
    "bert": ("BertForMaskedLM", "ForMaskedLM"),
    "gpt2": ("GPT2LMHeadModel", "ForCausalLM"),
}


def _settings(config: Any) -> tuple[str, Any]:
    """The `model_type` and the transformers config object."""
    entries = read_config(config)
    kind = entries.pop("model_type", None)
    if kind not in _CLASSES:
        raise domain_error("model_type", kind, f"one of {', '.join(_CLASSES)}")
    return kind, transformers.AutoConfig.for_model(kind, **entries)


def build_module(config: Any, seed: int = 0, *, layers: int | None = None) -> nn.Module:
    """A module with fresh weights, drawn by transformers' own initialisation of that family.

    Args:
        config: a path to config.json (or its folder), a dict, or a PretrainedConfig, whose
            `model_type` is "bert" (BertForMaskedLM) or "gpt2" (GPT2LMHeadModel).
        seed: of the weights; torch's random state is left as it was.
        layers: replaces the config's depth (GPT-2's output projections follow it).

    Raises:
        DomainError: an unreadable config, or another `model_type`.
        MomentsError: torch or transformers is not installed.
    """
    check_count("seed", seed, least=0)
    kind, settings = _settings(config)
    if layers is not None:
        check_count("layers", layers)
        settings.num_hidden_layers = layers
    name, settings.loss_type = _CLASSES[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: nn.Module = getattr(transformers, name)(settings)
    return module


def text_batch(
    config: Any, *, seq_len: int, batch: int = 2, seed: int = 0, offset: int = 0
) -> dict[str, Ids]:
    """Input ids and labels of English text for the config's own training task.

    BERT's text is corrupted and its labels are the chosen positions; GPT-2's labels are its text.
    BERT's segments are all the first one.

    Returns:
        "input_ids" and "labels", each (B, L) integers; a label of -100 is no target.

    Raises:
        DomainError: a config or an argument out of range.
    """
    kind, settings = _settings(config)
    vocab_size = int(settings.vocab_size)
    ids = tokenize(vocab_size, seq_len, batch, offset)
    inputs, labels = mask_tokens(ids, vocab_size, seed) if kind == "bert" else (ids, ids)
    return {"input_ids": inputs, "labels": labels}


def measure_config(
    config: Any,
    *,
    layers: int | None = None,
    seq_len: int,
    batch: int = 2,
    seeds: int = 4,
    seed: int = 0,
    progress: bool = False,
) -> tuple[Measurement, Ids]:
    """Measure a config's module on text, with fresh weights in every draw.

    The text and its corruption follow `seed` and stay the same from draw to draw.

    Returns:
        The measurement and the ids (B, L) that the embedding read.

    Raises:
        DomainError: as `build_module` and `text_batch`.
        MomentsError: an extra is not installed.
    """
    from moments.torch import measure

    data = text_batch(config, seq_len=seq_len, batch=batch, seed=seed)
    build = functools.partial(build_module, config, layers=layers)
    measurement = measure(build, data, seeds=seeds, seed=seed, progress=progress)
    return measurement, data["input_ids"]
