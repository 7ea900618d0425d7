"""Named architectures: the published sizes of BERT and GPT-2, as their config entries."""

from __future__ import annotations

from typing import Any

from .errors import domain_error
from .huggingface import from_huggingface
from .transformer import Transformer


def _bert(layers: int, d_model: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "num_hidden_layers": layers,
        "hidden_size": d_model,
        "num_attention_heads": heads,
        "intermediate_size": 4 * d_model,
    }


def _gpt2(layers: int, d_model: int, heads: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_layer": layers, "n_embd": d_model, "n_head": heads}


_CONFIGS: dict[str, dict[str, Any]] = {
    "bert-tiny": _bert(2, 128, 2),
    "bert-mini": _bert(4, 256, 4),
    "bert-small": _bert(4, 512, 8),
    "bert-medium": _bert(8, 512, 8),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
}


class _Presets:
    """Callable collection of named architectures."""

    def __call__(self, name: str, *, seq_len: int | None = None) -> Transformer:
        """The architecture of that name.

        Args:
            name: one of `preset.names()`.
            seq_len: tokens per sequence; None: the most its position table holds.

        Raises:
            DomainError: no preset of that name.
        """
        return from_huggingface(self.config(name), seq_len=seq_len)

    def names(self) -> tuple[str, ...]:
        """Every preset's name."""
        return tuple(_CONFIGS)

    def config(self, name: str) -> dict[str, Any]:
        """The Hugging Face config entries behind a preset.

        Raises:
            DomainError: no preset of that name.
        """
        if name not in _CONFIGS:
            raise domain_error("preset", name, f"one of {', '.join(_CONFIGS)}")
        return dict(_CONFIGS[name])

    def __repr__(self) -> str:
        return f"moments.preset(name), name one of {', '.join(_CONFIGS)}"


preset = _Presets()
