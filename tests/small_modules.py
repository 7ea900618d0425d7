"""Modules small enough to initialise, run and audit in milliseconds."""

from __future__ import annotations

import functools
from typing import Any

import torch

from moments.model.huggingface.sizes import sized_config
from moments.torch import measure
from moments.torch.huggingface_modules import build_module, text_batch


def family_module(
    kind: str, layers: int, width: int, *, vocab_size: int = 101, seed: int = 0, **changes: Any
) -> Any:
    """A Hugging Face module of a family, with its own head; `changes` are entries of its config."""
    config = sized_config(kind, layers, width, vocab_size=vocab_size, seq_len=32)
    return build_module(config | changes, seed)


def measured(config: Any, seq_len: int, seeds: int, **options: Any) -> tuple[Any, Any]:
    """A config's module on text, with fresh weights in every draw, and the ids that it read."""
    data = text_batch(config, seq_len=seq_len, seed=options.get("seed", 0))
    build = functools.partial(build_module, config)
    return measure(build, data, seeds=seeds, **options), data["input_ids"]


def encoder(
    layers: int,
    width: int,
    d_ff: int,
    *,
    final: bool = False,
    dropout: float = 0.1,
    pre: bool = True,
) -> Any:
    """nn.TransformerEncoder as torch builds it: copies of one layer."""
    layer = torch.nn.TransformerEncoderLayer(
        width, 4, d_ff, dropout, norm_first=pre, batch_first=True
    )
    norm = torch.nn.LayerNorm(width) if final else None
    return torch.nn.TransformerEncoder(layer, layers, norm=norm, enable_nested_tensor=False)
