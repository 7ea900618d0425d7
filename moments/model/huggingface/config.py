"""Read a Hugging Face config into a Transformer, with its family's initialisation.

Paths and dictionaries are read without torch or transformers.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Mapping
from typing import Any

from ...errors import DomainError, Undeclared, ValidityWarning, brief, domain_error
from ...files import read_object
from ..transformer import Transformer
from . import NEAREST, PARTS, READERS, REFUSED, Family
from .entries import IRRELEVANT


def from_huggingface(config: Any, *, seq_len: int | None = None) -> Transformer:
    """`moments.from_huggingface` for the families that have a reader; others are refused."""
    entries = read_config(config)
    model, notes = family(entries.get("model_type")).declare(entries, seq_len)
    for note in notes:
        warnings.warn(note, ValidityWarning, stacklevel=2)
    return named(model, entries)


def named(model: Transformer, entries: Mapping[str, Any]) -> Transformer:
    """Name a declaration after its config's `_name_or_path`, else its `model_type`."""
    called = os.path.basename(str(entries.get("_name_or_path") or "").rstrip("/"))
    printable = "".join(filter(str.isprintable, called)).strip()
    return model.replace(name=printable or str(entries["model_type"]))


def has_reader(kind: Any) -> bool:
    """Whether a `model_type` has a config reader; without one, a module may still be read.

    Raises:
        DomainError: not a `model_type`, or one with a feature outside what moments models.
    """
    if not isinstance(kind, str) or kind in REFUSED:
        family(kind)
    return kind in READERS


def family(kind: Any) -> Family:
    """The family of a `model_type`.

    Raises:
        DomainError: an unknown type, or one with a feature outside what moments models.
    """
    if not isinstance(kind, str) or kind not in READERS:
        if kind is None:
            raise DomainError(
                "model_type = None: the config has no such entry; add it, such as 'gpt2', or "
                "declare the model with moments.Transformer"
            )
        reason = _why_not(kind) if isinstance(kind, str) else ""
        if isinstance(kind, str) and kind in REFUSED:
            refusal = DomainError if kind in PARTS else Undeclared
            raise refusal(f"model_type = {brief(kind)}: {reason}")
        raise domain_error("model_type", kind, f"one of {', '.join(sorted(READERS))}", reason)
    return READERS[kind]


def _why_not(kind: str) -> str:
    """Why a type has no reader and what to do: its unmodelled feature, or the nearest family."""
    if kind in REFUSED:
        inside = " or ".join(f"config[{name!r}]" for name in PARTS.get(kind, ()))
        parts = f"; give one of them, {inside}" if inside else ""
        return f"{REFUSED[kind]} is outside what moments models{parts}{nearest(kind)}"
    module = "a module of it is read by what it computes: `moments check FILE.py:FACTORY`"
    if kind in NEAREST:
        return f"{nearest(kind)[2:]}; {module}"
    similar = difflib.get_close_matches(kind, READERS, n=1)
    return f"did you mean {similar[0]!r}?" if similar else module


def nearest(kind: str) -> str:
    """The end of a refusal: the family most similar to a type, if one is known."""
    return f"; {NEAREST[kind]!r} is built most like it" if kind in NEAREST else ""


def read_config(config: Any) -> dict[str, Any]:
    """The entries of a config given as path, dict or PretrainedConfig; of a multimodal model, those
    of its text model.

    Raises:
        DomainError: no such file, or not a JSON object.

    Warns:
        ValidityWarning: the other parts of a multimodal model are left out.
    """
    if isinstance(config, Mapping):
        return _text_side(dict(config))
    if isinstance(config, str | os.PathLike):
        path = os.path.join(config, "config.json") if os.path.isdir(config) else config
        return _text_side(
            read_object(path, "config", "a readable config.json", _named(str(config)))
        )
    if hasattr(config, "to_dict"):
        return _text_side(dict(config.to_dict()))
    raise DomainError(
        f"config must be a path, a dict or a PretrainedConfig, not {type(config).__name__}"
    )


def _text_side(entries: dict[str, Any]) -> dict[str, Any]:
    """The text model's entries if only that type has a reader, else all entries; `architectures`
    may name a known type's class in place of an unknown type."""
    kind, text = entries.get("model_type"), entries.get("text_config")
    if text is None:  # older multimodal configs keep the text model's entries at the top level
        text = {name: value for name, value in entries.items() if not name.endswith("_config")}
        text = {name: value for name, value in text.items() if name not in _OUTER}
    if not isinstance(kind, str) or kind in READERS | REFUSED or not isinstance(text, Mapping):
        return entries
    text_kind = text.get("model_type", f"{kind}_text")
    if not isinstance(text_kind, str) or text_kind not in READERS:
        classes = entries.get("architectures")
        classes = classes if isinstance(classes, list) else []
        known = next((name for name, row in READERS.items() if row.module in classes), None)
        if known is None:
            return entries
        warnings.warn(
            f"model_type = {kind!r} is read as {known!r}, whose class architectures name",
            ValidityWarning,
            stacklevel=4,
        )
        return {**entries, "model_type": known}
    shared = ("_name_or_path", "tie_word_embeddings")
    silent = IRRELEVANT | _OUTER | {"text_config", *shared}
    sides = [name for name in entries if name not in silent]
    warnings.warn(
        f"model_type = {kind!r}: its text side, {text_kind!r}, is read; what it reads pictures or "
        f"sound with ({', '.join(sides) or 'its other sides'}) is left out",
        ValidityWarning,
        stacklevel=4,
    )
    return {**text, "model_type": text_kind} | {k: entries[k] for k in shared if k in entries}


_OUTER = {
    "model_type",
    "image_token_id",
    "video_token_id",
    "vision_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
}
"""Entries of a multimodal model that its text model does not have."""


def _named(config: str) -> str:
    """The remedy for the name of a preset or family given in place of a path."""
    from ..presets import preset

    if config in preset.names():
        return f"a preset of that name is moments.preset({config!r})"
    if config in READERS:
        return f"a family's defaults are {{'model_type': {config!r}}}"
    similar = difflib.get_close_matches(config, preset.names(), n=1)
    return f"did you mean moments.preset({similar[0]!r})?" if similar else ""
