"""Read a Hugging Face config into a Transformer, with that family's own initialisation.

A path or a dictionary needs neither torch nor transformers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

from .errors import DomainError, ValidityWarning, domain_error
from .families import FAMILIES, REFUSED, Family
from .files import read_object
from .transformer import Transformer


def from_huggingface(config: Any, *, seq_len: int | None = None) -> Transformer:
    """The architecture and initialisation that a Hugging Face config describes.

    Args:
        config: a path to config.json (or its folder), a dict, or a PretrainedConfig.
        seq_len: tokens per sequence; None: the most the config allows.

    Returns:
        A Transformer with the embedding and the head of the family's own training task; of an
        encoder and a decoder the decoder, with the other as its `encoder`.

    Raises:
        DomainError: an unreadable file, an unknown model type, a missing or bad entry, or an entry
            that switches on a feature that no Transformer can express, which it names.

    Warns:
        ValidityWarning: names each entry of the config that is not modelled.
    """
    entries = read_config(config)
    model, notes = family(entries.get("model_type")).declare(entries, seq_len)
    for note in notes:
        warnings.warn(note, ValidityWarning, stacklevel=2)
    return model


def family(kind: Any) -> Family:
    """The family of a `model_type`.

    Raises:
        DomainError: it is not known, or known for a feature that is outside what moments models.
    """
    if not isinstance(kind, str) or kind not in FAMILIES:
        feature = REFUSED.get(kind) if isinstance(kind, str) else None
        reason = f"{feature} is outside what moments models" if feature else ""
        raise domain_error("model_type", kind, f"one of {', '.join(sorted(FAMILIES))}", reason)
    return FAMILIES[kind]


def read_config(config: Any) -> dict[str, Any]:
    """The entries of a config given as path, dict or PretrainedConfig.

    Raises:
        DomainError: no such file, or not a JSON object.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str | os.PathLike):
        path = os.path.join(config, "config.json") if os.path.isdir(config) else config
        return read_object(path, "config", "a readable config.json")
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    raise DomainError(
        f"config must be a path, a dict or a PretrainedConfig, not {type(config).__name__}"
    )


def supported_model_types() -> tuple[str, ...]:
    """The `model_type` entries that `from_huggingface` reads."""
    return tuple(FAMILIES)
