"""What a family is: how its config is read, and which module it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..transformer import Transformer
from .entries import Entries
from .names import USUAL

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
