"""Read a Hugging Face config into a Transformer, with that family's own initialisation.

A path or a dictionary needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .checks import check_count
from .embedding import Embedding
from .errors import DomainError, ValidityWarning, domain_error
from .transformer import Transformer
from .weights import Weights

# transformers' names of activation functions -> ours
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "linear": "identity",
}


def from_huggingface(config: Any, *, seq_len: int | None = None) -> Transformer:
    """The architecture and initialisation that a Hugging Face config describes.

    Args:
        config: a path to config.json (or its folder), a dict, or a PretrainedConfig.
        seq_len: tokens per sequence; None: the most the position table holds.

    Returns:
        A Transformer whose embedding declares the moments of its input.

    Raises:
        DomainError: an unreadable file, an unknown model type, or a missing or bad entry.

    Warns:
        ValidityWarning: names each feature of the config that is not modelled.
    """
    entries = read_config(config)
    kind = entries.get("model_type")
    if kind not in _READERS:
        raise domain_error("model_type", kind, f"one of {', '.join(sorted(_READERS))}")
    reader = _Reader(entries, kind)
    model = _READERS[kind](reader, seq_len)
    for note in reader.notes:
        warnings.warn(note, ValidityWarning, stacklevel=2)
    return model


def read_config(config: Any) -> dict[str, Any]:
    """The entries of a config given as path, dict or PretrainedConfig.

    Raises:
        DomainError: no such file, or not a JSON object.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        if path.is_dir():
            path = path / "config.json"
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            reason = error.strerror or str(error)
            raise domain_error("config", str(path), f"a readable config.json ({reason})") from None
        except ValueError as error:
            raise domain_error("config", str(path), f"valid JSON ({error})") from None
        if not isinstance(entries, dict):
            raise domain_error("config", str(path), "a JSON object of config entries")
        return entries
    if hasattr(config, "to_dict"):
        return dict(config.to_dict())
    raise DomainError(
        f"config must be a path, a dict or a PretrainedConfig, not {type(config).__name__}"
    )


class _Reader:
    """Entries of one config, with errors that name the entry, and notes on what is left out."""

    def __init__(self, entries: Mapping[str, Any], kind: str) -> None:
        self.entries = entries
        self.kind = kind
        self.notes: list[str] = []

    def __call__(self, name: str, default: Any = ...) -> Any:
        value = self.entries.get(name)
        if value is not None:
            return value
        if default is ...:
            raise DomainError(f"config of type {self.kind!r} lacks the entry {name!r}")
        return default

    def number(self, name: str, default: float) -> float:
        """A real entry."""
        value = self(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise domain_error(name, value, "a number")
        return float(value)

    def activation(self, name: str, default: str) -> str:
        given = self(name, default)
        if not isinstance(given, str) or given not in _ACTIVATIONS:
            raise domain_error(name, given, f"one of {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[given]

    def expect(self, name: str, usual: Any, meaning: str) -> None:
        """Note an entry whose value switches on something that is not modelled."""
        value = self.entries.get(name, usual)
        if value != usual:
            self.notes.append(f"{name} = {value!r} is not modelled: {meaning}")

    def length(self, name: str, default: int, seq_len: int | None) -> int:
        most = self(name, default)
        check_count(name, most, least=2)
        if seq_len is None:
            return int(most)
        check_count("seq_len", seq_len, least=2)
        if seq_len > most:
            raise domain_error("seq_len", seq_len, f"at most {name} = {most}")
        return seq_len


def _bert(read: _Reader, seq_len: int | None) -> Transformer:
    read.expect("position_embedding_type", "absolute", "learned absolute positions are assumed")
    read.expect("is_decoder", False, "full attention is assumed")
    read.expect("add_cross_attention", False, "no cross-attention is assumed")
    variance = read.number("initializer_range", 0.02) ** 2
    epsilon = read.number("layer_norm_eps", 1e-12)
    dropout = read.number("hidden_dropout_prob", 0.1)
    return Transformer(
        layers=read("num_hidden_layers", 12),
        d_model=read("hidden_size", 768),
        heads=read("num_attention_heads", 12),
        seq_len=read.length("max_position_embeddings", 512, seq_len),
        d_ff=read("intermediate_size", 3072),
        norm="post",
        activation=read.activation("hidden_act", "gelu"),
        dropout=dropout,
        attention_dropout=read.number("attention_probs_dropout_prob", 0.1),
        weights=Weights.normal(variance),
        norm_epsilon=epsilon,
        embedding=Embedding(
            vocab_size=read("vocab_size", 30522),
            token_variance=variance,
            position_variance=variance,
            segment_variance=variance,
            norm=True,
            norm_epsilon=epsilon,
            dropout=dropout,
        ),
    )


def _gpt2(read: _Reader, seq_len: int | None) -> Transformer:
    read.expect("scale_attn_weights", True, "logits are scaled by 1/sqrt(d_head)")
    read.expect("scale_attn_by_inverse_layer_idx", False, "logits are not scaled by 1/layer")
    read.expect("add_cross_attention", False, "no cross-attention is assumed")
    layers, d_model = read("n_layer", 12), read("n_embd", 768)
    variance = read.number("initializer_range", 0.02) ** 2
    return Transformer(
        layers=layers,
        d_model=d_model,
        heads=read("n_head", 12),
        seq_len=read.length("n_positions", 1024, seq_len),
        d_ff=read("n_inner", 4 * d_model),
        norm="pre",
        activation=read.activation("activation_function", "gelu_new"),
        dropout=read.number("resid_pdrop", 0.1),
        attention_dropout=read.number("attn_pdrop", 0.1),
        causal=True,
        # Both output projections carry 1/sqrt(2 N), as one variance factor 1/(2 N).
        weights=Weights.normal(variance, output_divisor=2 * layers),
        norm_epsilon=read.number("layer_norm_epsilon", 1e-5),
        embedding=Embedding(
            vocab_size=read("vocab_size", 50257),
            token_variance=variance,
            position_variance=variance,
            dropout=read.number("embd_pdrop", 0.1),
        ),
    )


_READERS: dict[str, Callable[[_Reader, int | None], Transformer]] = {"bert": _bert, "gpt2": _gpt2}


def supported_model_types() -> tuple[str, ...]:
    """The `model_type` entries that `from_huggingface` reads."""
    return tuple(_READERS)
