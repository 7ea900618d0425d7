"""What a family is: how its config is read, which module it is; the two heads that most have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..head import Head
from ..transformer import Transformer
from .entries import USUAL, Entries

Reader = Callable[[Entries, int | None], Transformer]


@dataclass(frozen=True)
class Family:
    """One `model_type`: how its config is read, and which module it is.

    Args:
        read: from entries and a sequence length to the declaration.
        module: name of the transformers class with its head.
        task: what it is trained on: "causal", "masked", "translation" or "images".
        defaults: entries of its config class.
        usual: entries that are not modelled, with the value at which they change nothing (... where
            none does).
    """

    read: Reader
    module: str
    task: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=dict)

    def declare(
        self, given: Mapping[str, Any], seq_len: int | None
    ) -> tuple[Transformer, list[str]]:
        """The declaration of a config, and a note for each feature that is left out."""
        entries = Entries(given, str(given.get("model_type")), self.defaults)
        model = self.read(entries, seq_len)
        entries.finish(self.usual)
        return model, entries.notes

    def entries(self, given: Mapping[str, Any]) -> frozenset[str]:
        """Names of the entries that describe the architecture: read, known by their default, or
        known to change nothing at one value.

        Raises:
            DomainError: an entry that the declaration refuses.
        """
        reader = Entries(given, str(given.get("model_type")), self.defaults)
        self.read(reader, None)
        elsewhere = {"model_type", "quantization_config"}
        return (reader.read | set(self.defaults) | set(self.usual) | set(USUAL)) - elsewhere


# --- The two heads that most families have --------------------------------------------------------


def causal_head(
    read: Entries,
    variance: float,
    epsilon: float | None,
    *,
    bias: bool = False,
    output_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Head:
    """A final norm and one matrix, which `tie_word_embeddings` may make the token table.

    Args:
        variance: of the matrix where it is its own.
        epsilon: of the final norm; None: there is none.
    """
    tied = read.flag("tie_word_embeddings")
    return Head(
        tied=tied,
        weight_variance=None if tied else variance,
        norm=epsilon is not None,
        bias=bias,
        output_scale=output_scale,
        logit_softcap=logit_softcap,
        loss="causal",
    )


def masked_head(read: Entries, variance: float, activation: str) -> Head:
    """BERT's: a hidden layer with activation and norm, then the token table and a bias."""
    tied = read.flag("tie_word_embeddings", True)
    return Head(
        tied=tied,
        weight_variance=None if tied else variance,
        norm=False,
        transform=activation,
        transform_variance=variance,
        transform_bias_variance=0.0,
        bias=True,
        loss="masked",
    )
